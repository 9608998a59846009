"""The simulator finds what it promises to find, and says where."""

import gc
import math
import os
import signal
import threading
import warnings

import numpy as np
import pytest
from numba import cuda, float32, int8, int32, uint8, uint32, uint64
from numba.cuda import types

from steps.instructions import (
    bulk_copy,
    cp_async_16,
    cp_async_commit,
    cp_async_wait,
    fence,
    fence_mbarrier_init,
    load_u32,
    load_u32x4,
    load_u32x4_relaxed,
    mbarrier_arrive_expect,
    mbarrier_init,
    mbarrier_wait,
    store_u32_relaxed,
    store_u32x4,
    trap,
)
from steps.simulator.launch import (
    BarrierDivergence,
    Deadlock,
    Misaligned,
    OutOfRange,
    Race,
    SimulatorError,
    simulate,
)

ORDERS = (0, -1, 1, 2, 3)
wait_all = cp_async_wait(0)


def zeros(count, dtype=np.int32):
    return np.zeros(count, dtype)


# --- barriers


def test_threads_that_left_early_are_divergence():
    @cuda.jit
    def early(out):
        t = cuda.threadIdx.x
        if t >= 48:
            return
        cuda.syncthreads()
        out[t] = t

    message = (
        r"block \(1, 0, 0\) can go on: threads 0-47 wait at syncthreads in test_simulator.py:\d+ "
        r"`cuda.syncthreads\(\)`; threads 48-63 have exited"
    )
    with pytest.raises(BarrierDivergence, match=message):
        simulate(early, 2, 64, (zeros(64),), order=-1)


def test_two_barriers_in_two_branches_are_divergence():
    @cuda.jit
    def branches(out):
        t = cuda.threadIdx.x
        if t < 32:
            cuda.syncthreads()
        else:
            out[t] = 1
            cuda.syncthreads()

    with pytest.raises(
        BarrierDivergence, match=r"meet at different places: .*threads 0-31 .*threads 32-63"
    ):
        simulate(branches, 1, 64, (zeros(64),))


def test_two_kinds_of_barrier_are_divergence():
    @cuda.jit
    def kinds(out):
        t = cuda.threadIdx.x
        if t == 3:
            out[0] = cuda.syncthreads_count(1)
        else:
            cuda.syncthreads()

    with pytest.raises(BarrierDivergence, match="thread 3 at syncthreads_count"):
        simulate(kinds, 1, 64, (zeros(64),))


def test_waiting_for_each_other_is_a_deadlock():
    @cuda.jit
    def crossed(out):
        if cuda.threadIdx.x < 5:
            cuda.syncwarp()
        cuda.syncthreads()

    with pytest.raises(
        Deadlock, match=r"threads 0-4 wait at syncwarp .* threads 5-31 wait at syncthreads"
    ):
        simulate(crossed, 1, 32, (zeros(1),))


def test_polling_for_what_never_comes_is_a_deadlock():
    @cuda.jit
    def spin(flag):
        while flag[0] == 0:
            cuda.nanosleep(100)

    with pytest.raises(Deadlock, match=r"4 thread\(s\) poll and nothing changes"):
        simulate(spin, 1, 4, (zeros(1),))


@pytest.mark.parametrize("order", ORDERS)
def test_blocks_in_flight_together_can_wait_for_each_other(order):
    @cuda.jit
    def relay(flags, values):
        b = cuda.blockIdx.x
        if b < 2:
            while cuda.atomic.add(flags, b + 1, 0) == 0:
                cuda.nanosleep(100)
            fence()
        values[b] = values[b + 1] + 1 if b < 2 else 1
        fence()
        cuda.atomic.add(flags, b, 1)

    flags, values = zeros(3), zeros(3)
    simulate(relay, 3, 1, (flags, values), resident=3, order=order)
    assert values.tolist() == [3, 2, 1]
    if order == 0:
        with pytest.raises(Deadlock):
            simulate(relay, 3, 1, (zeros(3), zeros(3)))


@cuda.jit
def meet(flags, limit):
    """Blocks that count each other's arrivals, and give up after so many looks, if at all."""
    store_u32_relaxed(flags, 4 * cuda.blockIdx.x, 1)
    for i in range(cuda.gridDim.x):
        looks = 0
        while load_u32x4_relaxed(flags, 4 * i)[0] == 0:
            looks += 1
            if looks == limit:
                trap()


@pytest.mark.parametrize("order", ORDERS)
def test_blocks_that_poll_by_relaxed_loads_must_all_run_at_once(order):
    flags = np.zeros(16, np.uint32)
    simulate(meet, 4, 1, (flags, 0), resident=4, order=order)
    assert flags[::4].tolist() == [1] * 4
    with pytest.raises(
        Deadlock,
        match=r"2 thread\(s\) poll and nothing changes any more; 2 of the 4 blocks have not begun: "
        r"blocks that wait for each other must all run at once \[block .* `while load_u32x4_rel",
    ):
        simulate(meet, 4, 1, (np.zeros(16, np.uint32), 0), resident=2, order=order)


def test_a_wait_that_is_bounded_gives_up():
    with pytest.raises(SimulatorError, match=r"the kernel gives up \(trap\) .*`trap\(\)`"):
        simulate(meet, 3, 1, (np.zeros(16, np.uint32), 100), resident=2)


@pytest.mark.parametrize("order", ORDERS)
def test_copies_arrive_while_threads_poll(order):
    """Thread 0 waits for a copy, thread 32 for what thread 0 stores then."""

    @cuda.jit
    def kernel(source, flags):
        stage = cuda.shared.array(16, uint8, alignment=128)
        bar = cuda.shared.array(1, uint64)
        t = cuda.threadIdx.x
        if t == 0:
            mbarrier_init(bar, 0, 1)
            fence_mbarrier_init()
            mbarrier_arrive_expect(bar, 0, 16)
            bulk_copy(stage, 0, source, 0, 16, bar, 0)
            mbarrier_wait(bar, 0, 0)
            store_u32_relaxed(flags, 0, stage[0])
        if t == 32:
            while load_u32x4_relaxed(flags, 0)[0] == 0:
                pass

    flags = np.zeros(4, np.uint32)
    simulate(kernel, 1, 64, (np.full(16, 7, np.uint8), flags), order=order)
    assert flags[0] == 7


# --- warps


def test_a_partial_last_warp_is_a_warp():
    @cuda.jit
    def count(out):
        t = cuda.threadIdx.x
        out[t] = cuda.popc(cuda.ballot_sync(0xFFFFFFFF, True))

    out = zeros(40)
    simulate(count, 1, 40, (out,))
    assert out.tolist() == [32] * 32 + [8] * 8


def test_reading_a_lane_that_is_not_there():
    @cuda.jit
    def beyond(out):
        t = cuda.threadIdx.x
        out[t] = cuda.shfl_xor_sync(0xFFFFFFFF, t, 16)

    with pytest.raises(
        OutOfRange, match=r"lane 4 reads lane 20, which takes no part .*thread \(4, 0, 0\)"
    ):
        simulate(beyond, 1, 20, (zeros(20),))


def test_masks_name_who_takes_part():
    @cuda.jit
    def halves(out):
        t = cuda.threadIdx.x
        if t < 16:
            out[t] = cuda.shfl_sync(0x0000FFFF, t, 3)
        else:
            out[t] = cuda.shfl_sync(0xFFFF0000, t, 19)

    out = zeros(32)
    simulate(halves, 1, 32, (out,))
    assert out.tolist() == [3] * 16 + [19] * 16

    @cuda.jit
    def outsider(out):
        cuda.syncwarp(0xFFFF)

    with pytest.raises(SimulatorError, match="lane 16 calls syncwarp with mask 0x0000ffff"):
        simulate(outsider, 1, 32, (out,))


def test_warp_divergence_is_found():
    @cuda.jit
    def lonely(out):
        if cuda.laneid != 7:
            cuda.syncwarp()

    with pytest.raises(
        BarrierDivergence, match=r"threads 0-6, 8-31 wait at syncwarp .* thread 7 have exited"
    ):
        simulate(lonely, 1, 32, (zeros(1),))


# --- memory


def test_shared_and_local_memory_begin_as_garbage():
    @cuda.jit
    def peek(floats, ints):
        sf = cuda.shared.array(4, float32)
        si = cuda.shared.array((2, 2), int32)
        lf = cuda.local.array(2, types.float32)
        lb = cuda.local.array(2, uint8)
        dynamic = cuda.shared.array(0, float32)
        floats[0], floats[1], floats[2] = sf[0], lf[1], dynamic[2]
        ints[0], ints[1] = si[1, 1], lb[0]

    floats, ints = zeros(3, np.float32), zeros(2)
    simulate(peek, 1, 1, (floats, ints), shared_bytes=64)
    assert np.isnan(floats).all()
    assert ints.tolist() == [np.int32(np.uint32(0xA5A5A5A5).view(np.int32)), 0xA5]


def test_two_arrays_on_one_line_and_one_array_in_a_loop():
    @cuda.jit
    def lines(out):
        a, b = cuda.shared.array(1, int32), cuda.shared.array(1, int32)
        a[0], b[0] = 1, 2
        out[0], out[1] = a[0], b[0]
        for i in range(2):
            c = cuda.shared.array(1, int32)
            if i == 0:
                c[0] = 5
            out[2] = c[0]

    out = zeros(3)
    simulate(lines, 1, 1, (out,))
    assert out.tolist() == [1, 2, 5]


def test_functions_of_one_factory_have_their_own_shared_memory():
    def make(value):
        @cuda.jit(device=True)
        def keep(first):
            kept = cuda.shared.array(1, int32)
            if first:
                kept[0] = value
            return kept[0]

        return keep

    one, two = make(1), make(2)

    @cuda.jit
    def both(out):
        one(True)
        two(True)
        out[0] = one(False)
        out[1] = two(False)

    out = zeros(2)
    simulate(both, 1, 1, (out,))
    assert out.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (64, r"out\[64\] is outside out of shape \(64,\)"),
        (-1, r"out\[-1\] is outside out of shape \(64,\)"),
    ],
)
def test_out_of_range(index, message):
    @cuda.jit
    def access(out):
        if cuda.threadIdx.x == 5:
            out[index] = 1

    with pytest.raises(
        OutOfRange, match=message + r" \[block \(0, 0, 0\), thread \(5, 0, 0\), test_simulator"
    ):
        simulate(access, 1, 32, (zeros(64),))


def test_out_of_range_in_every_way_an_array_is_indexed():
    @cuda.jit
    def access(x, way):
        stage = cuda.shared.array((4, 8), int32)
        if way == 0:
            stage[3, 8] = 0
        elif way == 1:
            stage[4, 0] = 0
        elif way == 2:
            part = stage[2:9]
            part[0, 0] = 0
        elif way == 3:
            row = stage[1]
            row[8] = 0
        elif way == 4:
            load_u32x4(x, 13)
        elif way == 5:
            load_u32(x, -1)

    messages = {
        0: r"stage\[3, 8\] is outside stage of shape \(4, 8\)",
        1: r"stage\[4, 0\]",
        2: r"stage\[2:9\]",
        3: r"stage\[8\] is outside stage of shape \(8,\)",
        4: r"x: 16 bytes at index 13 \(byte 52\) are outside its 64 bytes",
        5: r"x: 4 bytes at index -1",
    }
    for way, message in messages.items():
        with pytest.raises(OutOfRange, match=message):
            simulate(access, 1, 1, (zeros(16), way))


def test_misaligned_loads_are_found():
    @cuda.jit
    def block_loads(blocks, out):
        t = cuda.threadIdx.x
        out[t] = load_u32(blocks, 18 * t + 2)

    with pytest.raises(
        Misaligned, match=r"blocks: index 2 is byte 2, 2 past a multiple of 4; .*thread \(0,"
    ):
        simulate(block_loads, 1, 4, (zeros(80, np.uint8), zeros(4)))
    with pytest.raises(Misaligned, match="thread \\(1,"):  # the same kernel on a shifted view
        simulate(block_loads, 1, 4, (zeros(82, np.uint8)[2:], zeros(4)))


def test_shared_arrays_must_promise_their_alignment():
    @cuda.jit
    def careless(out):
        stage = cuda.shared.array(64, uint8)
        store_u32x4(stage, 0, 1, 2, 3, 4)

    with pytest.raises(
        Misaligned, match=r"stage \(shared, uint8\) is declared with alignment 1, .* alignment=16"
    ):
        simulate(careless, 1, 1, (zeros(1),))

    @cuda.jit
    def half_as_much(out):
        stage = cuda.shared.array(64, uint8, alignment=8)
        store_u32x4(stage, 0, 1, 2, 3, 4)

    with pytest.raises(Misaligned, match=r"is declared with alignment 8, .* alignment=16"):
        simulate(half_as_much, 1, 1, (zeros(1),))


def test_read_only_and_discontiguous_arguments():
    @cuda.jit
    def write(x):
        x[0] = 1

    @cuda.jit
    def wide(x):
        load_u32(x, 0)

    frozen = zeros(4)
    frozen.flags.writeable = False
    with pytest.raises(SimulatorError, match="x is read-only"):
        simulate(write, 1, 1, (frozen,))
    with pytest.raises(SimulatorError, match="x is not C-contiguous"):
        simulate(wide, 1, 1, (zeros(8)[::2],))


def test_views_of_dynamic_shared_memory():
    @cuda.jit
    def read(out):
        raw = cuda.shared.array(0, uint8, alignment=16)
        part = raw[16:32].view(np.uint16)
        part[3] = 0x0102
        out[0], out[1] = raw[22], raw[23]

    out = zeros(2)
    simulate(read, 1, 1, (out,), shared_bytes=32)
    assert out.tolist() == [2, 1]


def test_records_are_refused():
    """A kernel takes their bytes, as all steps do."""

    @cuda.jit
    def read(blocks):
        pass

    blocks = np.zeros(4, np.dtype([("d", "<f2"), ("qs", "u1", (16,))]))
    with pytest.raises(TypeError, match=r"blocks has elements of .*'qs'"):
        simulate(read, 1, 1, (blocks,))


TABLE = np.arange(4, dtype=np.int32) * 11


def test_what_a_kernel_may_refer_to():
    """Types through modules, NumPy scalar types, math, constant arrays, closures, tuples."""
    numbers = (3, 5)

    @cuda.jit(device=True)
    def helper(x):
        return x + numbers[1]

    @cuda.jit
    def refer(out, floats):
        out[0] = types.uint8(300) + np.int32(-1)
        out[1] = TABLE[2] + helper(numbers[0])
        out[2] = min(len(out), out.shape[0]) + out.size
        floats[0] = math.sqrt(float32(2))
        floats[1] = types.float32(types.float16(float32(0.1)))
        floats[2] = cuda.fma(float32(1 + 2**-12), float32(1 + 2**-12), float32(-1 - 2**-11))

    out, floats = zeros(3), zeros(3, np.float32)
    simulate(refer, 1, 1, (out, floats))
    assert out.tolist() == [43, 30, 6]
    assert floats.tolist() == [np.sqrt(np.float32(2)), np.float32(np.float16(0.1)), 2.0**-24]


def test_integer_stores_wrap_and_loads_are_exact():
    @cuda.jit
    def wrap(bytes_out, words_out):
        bytes_out[0] = 300
        bytes_out[1] = -1
        words_out[0] = 1 << 31
        words_out[1] = bytes_out[1] * 0x1_0000_0001

    small, wide = zeros(2, np.uint8), zeros(2)
    simulate(wrap, 1, 1, (small, wide))
    assert small.tolist() == [44, 255]
    assert wide.tolist() == [-(1 << 31), 255]


def test_floats_beyond_an_integer_are_its_ends():
    """As those of the GPU's conversion; of less than 32 bits it is cut after that."""

    @cuda.jit
    def convert(x, signed, unsigned, small):
        t = cuda.threadIdx.x
        signed[t], unsigned[t], small[t] = int32(x[t]), uint32(x[t]), int8(x[t])

    x = np.array([3e9, -3e9, 5e9, -1.9, np.inf, -np.inf, np.nan, 300.7], np.float32)
    signed, unsigned, small = zeros(8), zeros(8, np.uint32), zeros(8, np.int8)
    simulate(convert, 1, 8, (x, signed, unsigned, small))
    low, high = -(2**31), 2**31 - 1
    assert signed.tolist() == [high, low, high, -1, high, low, 0, 300]
    assert unsigned.tolist() == [3_000_000_000, 0, 2**32 - 1, 0, 2**32 - 1, 0, 0, 300]
    assert small.tolist() == [-1, 0, -1, -1, -1, 0, 0, 44]


# --- asynchronous copies


def copy_kernel(wait, barrier):
    @cuda.jit
    def copy(source, out):
        stage = cuda.shared.array(64 * 4, int32, alignment=16)
        t = cuda.threadIdx.x
        cp_async_16(stage, 4 * t, source, 4 * t)
        cp_async_commit()
        if wait:
            wait_all()
        if barrier:
            cuda.syncthreads()
        out[t] = stage[4 * (63 - t)]

    return copy


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("wait", "barrier"), [(True, True), (False, True), (True, False)])
def test_asynchronous_copies_land_at_the_wait(wait, barrier, order):
    source, out = np.arange(256, dtype=np.int32), zeros(64)
    if wait and barrier:
        simulate(copy_kernel(wait, barrier), 1, 64, (source, out), order=order)
        np.testing.assert_array_equal(out, 4 * np.arange(64)[::-1])
        return
    found = r"of stage, (to )?which (thread|a cp_async of thread) \d+ (loads|stores): "
    hint = "a barrier" if wait else "cp_async_wait comes first"
    with pytest.raises(Race, match=found + hint):
        simulate(copy_kernel(wait, barrier), 1, 64, (source, out), order=order)


# --- launches


def test_indices_of_a_three_dimensional_launch():
    @cuda.jit
    def place(out):
        x, y, z = cuda.grid(3)
        out[z, y, x] = (
            cuda.threadIdx.x
            + 10 * cuda.threadIdx.y
            + 100 * cuda.blockIdx.z
            + 1000 * cuda.gridDim.x
            + 10000 * cuda.blockDim.y
        )

    out = zeros((2, 6, 8))
    simulate(place, (2, 2, 2), (4, 3), (out,), order=5)
    z, y, x = np.indices(out.shape)
    np.testing.assert_array_equal(out, x % 4 + 10 * (y % 3) + 100 * z + 2000 + 30000)


@pytest.mark.parametrize("order", ORDERS)
def test_atomics_count(order):
    @cuda.jit
    def count(x, out):
        t = cuda.grid(1)
        cuda.atomic.add(out, 0, x[t])
        cuda.atomic.max(out, 1, x[t])
        cuda.atomic.min(out, 2, x[t])
        cuda.atomic.cas(out, 3, 0, t + 1)

    x = np.random.default_rng(0).integers(-99, 99, 128).astype(np.int32)
    out = zeros(4)
    simulate(count, 4, 32, (x, out), order=order)
    assert out[:3].tolist() == [x.sum(), x.max(), x.min()]
    assert 1 <= out[3] <= 128


def test_bad_launches_are_refused_before_anything_is_written():
    @cuda.jit
    def fill(out):
        out[0] = 1

    @cuda.jit(device=True)
    def helper(x):
        return x

    out = zeros(1)
    for arguments, error, message in (
        ((fill, 1, 2048, (out,)), ValueError, "has 2048 threads; the limit is 1024"),
        ((fill, 0, 32, (out,)), ValueError, "grid is 0"),
        ((fill, 1, 32, (out, out)), TypeError, r"fill takes 1 arguments \(out\), got 2"),
        ((fill, 1, 32, ("x",)), TypeError, "argument out is a str"),
        ((helper, 1, 32, (out,)), TypeError, "takes a @cuda.jit kernel"),
    ):
        with pytest.raises(error, match=message):
            simulate(*arguments)
    assert out[0] == 0


def test_errors_of_python_name_the_place():
    @cuda.jit
    def divide(out):
        out[0] = 1 // out[0]

    with pytest.raises(
        SimulatorError, match=r"ZeroDivisionError: .*thread \(0, 0, 0\), test_simulator.py:\d+ `out"
    ):
        simulate(divide, 1, 1, (zeros(1),))


# --- threads and processes


@pytest.fixture
def met():
    """(a kernel that meets the test while it is simulated, threads that are there, threads that may
    leave)"""
    there, leave = threading.Semaphore(0), threading.Semaphore(0)

    class Meeting:
        def __getattr__(self, name):
            there.release()
            leave.acquire()
            return name

    meeting = Meeting()

    @cuda.jit
    def kernel(out):
        if out[0] < 0:
            meeting.here  # noqa: B018
        out[0] += 1

    return kernel, there, leave


def test_threads_wait_for_each_other(met):
    kernel, there, leave = met
    outs = [np.full(1, -i, np.int32) for i in (1, 2, 3)]
    threads = [threading.Thread(target=simulate, args=(kernel, 1, 1, (out,))) for out in outs]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert there.acquire(timeout=30)
        assert not there.acquire(timeout=0.05), "two kernels at once"
        leave.release()
    for thread in threads:
        thread.join()
    assert [int(out[0]) for out in outs] == [0, -1, -2]


def test_a_process_forked_while_a_thread_simulates_simulates_too(met):
    kernel, there, leave = met
    thread = threading.Thread(target=simulate, args=(kernel, 1, 1, (np.full(1, -1, np.int32),)))
    assert gc.isenabled()
    thread.start()
    assert there.acquire(timeout=30)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a process with threads is forked
        child = os.fork()
    if child == 0:
        signal.alarm(20)  # it would wait for a thread that it has not
        out = zeros(1)
        simulate(kernel, 1, 1, (out,))
        os._exit(int(out[0] == 1 and gc.isenabled()))
    leave.release()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
