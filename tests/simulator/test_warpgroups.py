"""Asynchronous things simulated at their worst: a right kernel is right in every order, and each
way to get mbarriers, bulk copies, `wgmma` or named barriers wrong is found and named."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from numba import cuda, float32, int32, uint8, uint32

from steps.compile.compiler import machine_code
from steps.instructions import (
    barrier_arrive,
    barrier_sync,
    bulk_copy,
    fence_mbarrier_init,
    fence_proxy_async,
    load_u32,
    load_u32x4,
    matrix_descriptor,
    mbarrier_arrive,
    mbarrier_arrive_expect,
    mbarrier_init,
    mbarrier_wait,
    setmaxnreg_dec,
    setmaxnreg_inc,
    spread,
    wgmma_commit,
    wgmma_f16,
    wgmma_fence,
    wgmma_s8,
    wgmma_sparse_f16,
    wgmma_wait,
    zeros_f32,
)
from steps.simulator.banks import BankCounter
from steps.simulator.launch import (
    BarrierDivergence,
    Deadlock,
    Misaligned,
    Race,
    SimulatorError,
    simulate,
)
from tests.instructions.hopper_cases import CASES, columns, fragments

ORDERS = (0, -1, 1, 2, 3)
STEPS, STAGES, TOKENS = 5, 2, 8
W_BYTES, A_BYTES = 64 * 32, TOKENS * 32  # 16 of K
STAGE_BYTES = W_BYTES + A_BYTES
RING = STAGES * STAGE_BYTES

no_sums = zeros_f32(TOKENS // 2)
wait_for_all, wait_for_all_but_one = wgmma_wait(0), wgmma_wait(1)
sparse = wgmma_sparse_f16(1)


def pipeline(fault: str | None = None) -> Any:
    """c[64, 8] = w a^T: a thread of a fifth warp copies into a ring, a warpgroup multiplies. With a
    fault built in."""
    arrivals = {"one consumer counted": 1, "released unread": 128}.get(fault or "", 4)
    no_release = fault in ("never released", "released early", "released unread")

    @cuda.jit
    def kernel(w, a, c):
        ring = cuda.shared.array(RING, uint8, alignment=128)
        full = cuda.shared.array(STAGES, np.uint64)
        empty = cuda.shared.array(STAGES, np.uint64)
        t = int32(cuda.threadIdx.x)
        if t == 0:
            for s in range(STAGES):
                mbarrier_init(full, s, 1)
                mbarrier_init(empty, s, arrivals)
            if fault != "no fence after init":
                fence_mbarrier_init()
        if fault != "no barrier after init":
            cuda.syncthreads()
        if t == 128:
            for step in range(STEPS):
                s, parity = step % STAGES, (step // STAGES & 1) ^ 1
                if fault != "no wait for empty":
                    mbarrier_wait(empty, s, parity)
                size = STAGE_BYTES
                if fault == "too many bytes expected":
                    size = STAGE_BYTES + 16
                if fault == "too few bytes expected":
                    size = W_BYTES
                mbarrier_arrive_expect(full, s, size)
                if fault == "one arrival too many":
                    mbarrier_arrive(full, s)
                at = s * STAGE_BYTES
                bulk_copy(ring, at, w, step * W_BYTES, W_BYTES, full, s)
                bulk_copy(ring, at + W_BYTES, a, step * A_BYTES, A_BYTES, full, s)
        if t < 128:
            acc = no_sums()
            for step in range(STEPS):
                s, parity = step % STAGES, step // STAGES & 1
                if fault == "parity never flipped":
                    parity = 0
                if fault == "parity flipped":
                    parity ^= 1
                if fault != "no wait for full":
                    mbarrier_wait(full, s, parity)
                if fault == "released unread":
                    mbarrier_arrive(empty, s)
                at = s * STAGE_BYTES
                x = load_u32x4(ring, at + 16 * t)
                where = matrix_descriptor(ring, at + W_BYTES, 16 * TOKENS, 128)
                if fault != "no wgmma_fence":
                    wgmma_fence()
                acc = wgmma_f16(acc, x[0], x[1], x[2], x[3], where, step > 0)
                if fault != "no commit":
                    wgmma_commit()
                if fault == "released early" and t & 31 == 0:
                    mbarrier_arrive(empty, s)
                if fault == "waited for one too few":
                    acc = wait_for_all_but_one(acc)
                elif fault == "sums not waited for":
                    wait_for_all(acc)
                elif fault != "no wait for wgmma":
                    acc = wait_for_all(acc)
                if not no_release and t & 31 == 0:
                    mbarrier_arrive(empty, s)
            row, column = 16 * (t >> 5) + (t >> 2 & 7), 2 * (t & 3)
            c[row, column], c[row, column + 1] = acc[0], acc[1]
            c[row + 8, column], c[row + 8, column + 1] = acc[2], acc[3]

    return kernel


def operands(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """w in fragments, a in columns, and their product."""
    rng = np.random.default_rng(seed)
    w, a = (rng.integers(-9, 9, (rows, 16 * STEPS)).astype(np.float16) for rows in (64, TOKENS))
    product = w.astype(np.float32) @ a.astype(np.float32).T
    return fragments(w).view(np.uint8).reshape(-1), columns(a).reshape(-1), product


def run(fault: str | None, order: int) -> tuple[np.ndarray, np.ndarray]:
    w, a, product = operands()
    c = np.full((64, TOKENS), 7, np.float32)
    simulate(pipeline(fault), 1, 160, (w, a, c), order=order)
    return c, product


@pytest.mark.parametrize("order", ORDERS)
def test_a_right_pipeline_is_right_in_every_order(order):
    c, product = run(None, order)
    np.testing.assert_array_equal(c, product)


FAULTS = {
    "no fence after init": (SimulatorError, "full[0], which its maker has not made known"),
    "no barrier after init": (SimulatorError, "is no mbarrier: mbarrier_init comes first"),
    "no wait for empty": (SimulatorError, "one arrival too many at mbarrier full[0]"),
    "too many bytes expected": (Deadlock, "full[0], whose phase 0 lacks 16 bytes"),
    "too few bytes expected": (SimulatorError, "copies bring 256 bytes more than its arrivals"),
    "one arrival too many": (
        SimulatorError,
        "one arrival too many at mbarrier full[0]: its phase 0 takes 1, has them all and still "
        "waits for 2304 bytes",
    ),
    "parity never flipped": (
        SimulatorError,
        "a second wait for parity 0 of mbarrier full[0], which returns at once for phase 0",
    ),
    "parity flipped": (Race, "a copy to byte 0 of ring, which thread 0 loads: a barrier, or an"),
    "no wait for full": (
        Race,
        "of ring, to which a copy that reports to mbarrier full[0] stores: mbarrier_wait comes",
    ),
    "no wgmma_fence": (
        SimulatorError,
        "wgmma begins with wgmma_fence, which threads 0-127 did not",
    ),
    "no commit": (Race, "a copy to byte 2048 of ring, which a wgmma of warp 0 in test_warp"),
    "released unread": (Race, "a copy to byte 0 of ring, which thread"),
    "released early": (
        Race,
        "a copy to byte 2048 of ring, which a wgmma of warp 0 in test_warpgroups.py",
    ),
    "waited for one too few": (
        Race,
        "a copy to byte 2048 of ring, which a wgmma of warp 0 in test_warpgroups.py",
    ),
    "no wait for wgmma": (Race, "a copy to byte 2048 of ring, which a wgmma of warp 0 in"),
    "sums not waited for": (SimulatorError, "accumulators are read while a wgmma works on them"),
    "never released": (Deadlock, "empty[0], whose phase 0 lacks 4 of 4 arrivals"),
    "one consumer counted": (
        SimulatorError,
        "before a thread that waits for phase 0 looked, which then waits on",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_pipeline_is_named(fault):
    """In one order at least, with the sentence given; in none are the sums right, but that a
    barrier after init is not missed where thread 0 runs first."""
    kind, sentence = FAULTS[fault]
    said = []
    for order in ORDERS:
        try:
            c, product = run(fault, order)
            assert fault == "no barrier after init" or not np.array_equal(c, product)
        except SimulatorError as error:
            said.append(error)
    named = [e for e in said if isinstance(e, kind) and sentence in str(e)]
    assert named, said
    assert re.search(r"block \(0, 0, 0\).*test_warpgroups.py:\d+", str(named[0]))


def refused(kernel: Any, message: str, block: int = 128, kind: type = SimulatorError) -> None:
    """The kernel, of one array of 256 words, is stopped in ascending and in descending order."""
    for order in (0, -1):
        with pytest.raises(kind, match=message):
            simulate(kernel, 1, block, (np.zeros(256, np.uint32),), order=order)


# --- mbarriers and bulk copies


@cuda.jit(device=True)
def one_barrier():
    bar = cuda.shared.array(1, np.uint64)
    if cuda.threadIdx.x == 0:
        mbarrier_init(bar, 0, 1)
        fence_mbarrier_init()
    cuda.syncthreads()
    return bar


def test_data_arrives_late_and_in_any_order():
    """The source is read when the copy arrives: what is stored there meanwhile arrives too."""

    @cuda.jit
    def kernel(source, out):
        stage = cuda.shared.array(8, uint32, alignment=16)
        bar = one_barrier()
        if cuda.threadIdx.x == 0:
            mbarrier_arrive_expect(bar, 0, 32)
            bulk_copy(stage, 0, source, 0, 16, bar, 0)
            bulk_copy(stage, 4, source, 4, 16, bar, 0)
            source[0], source[4] = 3, 4
            mbarrier_wait(bar, 0, 0)
            out[0], out[1] = stage[0], stage[4]

    for order in ORDERS:
        source, out = np.arange(8, dtype=np.uint32), np.zeros(2, np.uint32)
        simulate(kernel, 1, 32, (source, out), order=order)
        assert out.tolist() == [3, 4]


def test_an_arrival_and_its_bytes_may_come_in_any_order():
    """Bytes announced after the copy began, by one of two arrivals."""

    @cuda.jit
    def kernel(source):
        stage = cuda.shared.array(64, uint32, alignment=16)
        bar = cuda.shared.array(1, np.uint64)
        t = cuda.threadIdx.x
        if t == 0:
            mbarrier_init(bar, 0, 2)
            fence_mbarrier_init()
            bulk_copy(stage, 0, source, 0, 256, bar, 0)
        cuda.syncthreads()
        if t == 1:
            cuda.nanosleep(100)
            mbarrier_arrive_expect(bar, 0, 256)
        if t == 2:
            mbarrier_arrive(bar, 0)
        mbarrier_wait(bar, 0, 0)
        source[64 + t] = stage[t]

    for order in ORDERS:
        source = np.arange(128, dtype=np.uint32)
        simulate(kernel, 1, 64, (source,), order=order)
        np.testing.assert_array_equal(source[64:], source[:64])


def test_copies_arrive_while_others_poll():
    @cuda.jit
    def kernel(source):
        stage = cuda.shared.array(4, uint32, alignment=16)
        flag = cuda.shared.array(1, int32)
        bar = one_barrier()
        t = cuda.threadIdx.x
        if t == 0:
            flag[0] = 0
        cuda.syncthreads()
        if t == 1:
            mbarrier_arrive_expect(bar, 0, 16)
            bulk_copy(stage, 0, source, 0, 16, bar, 0)
            mbarrier_wait(bar, 0, 0)
            cuda.atomic.add(flag, 0, 1)
        while cuda.atomic.add(flag, 0, 0) == 0:
            cuda.nanosleep(20)
        if t != 1:
            mbarrier_wait(bar, 0, 0)
        source[4 + t] = stage[3]

    for order in ORDERS:
        source = np.arange(4, 72, dtype=np.uint32)
        simulate(kernel, 1, 64, (source,), order=order)
        assert (source[3:67] == 7).all()


def test_a_bulk_copy_is_of_16_aligned_bytes():
    def copy(to: int, of: int, size: int) -> Any:
        @cuda.jit
        def kernel(source):
            stage = cuda.shared.array(64, uint32, alignment=16)
            bulk_copy(stage, to, source, of, size, one_barrier(), 0)

        return kernel

    refused(copy(1, 0, 16), "index 1 is byte 4, 4 past a multiple of 16", kind=Misaligned)
    refused(copy(0, 2, 16), "index 2 is byte 8, 8 past a multiple of 16", kind=Misaligned)
    refused(copy(0, 0, 24), "bulk_copy takes a multiple of 16 bytes, got 24")
    refused(copy(0, 0, 0), "bulk_copy takes a multiple of 16 bytes, got 0")
    refused(copy(60, 0, 32), "32 bytes at index 60 .* are outside")


def test_nobody_else_writes_where_a_copy_goes():
    @cuda.jit
    def twice(source):
        stage = cuda.shared.array(64, uint32, alignment=16)
        bar = one_barrier()
        if cuda.threadIdx.x == 0:
            bulk_copy(stage, 0, source, 0, 64, bar, 0)
            bulk_copy(stage, 12, source, 0, 32, bar, 0)

    @cuda.jit
    def stored(source):
        stage = cuda.shared.array(64, uint32, alignment=16)
        bar = one_barrier()
        if cuda.threadIdx.x == 0:
            mbarrier_arrive_expect(bar, 0, 64)
            bulk_copy(stage, 0, source, 0, 64, bar, 0)
            stage[15] = 1
            mbarrier_wait(bar, 0, 0)

    @cuda.jit
    def abandoned(source):
        stage = cuda.shared.array(64, uint32, alignment=16)
        bar = one_barrier()
        if cuda.threadIdx.x == 0:
            bulk_copy(stage, 0, source, 0, 64, bar, 0)

    under_way = "which a copy that reports to mbarrier bar.0. stores to: a barrier, or an arrival"
    refused(twice, "a copy to byte 48 of stage, " + under_way, kind=Race)
    refused(stored, "a store to byte 60 of stage, " + under_way, kind=Race)
    refused(abandoned, "have exited while 64 bytes are on their way to byte 0 of stage")


def test_an_mbarrier_is_made_once_and_left_alone():
    @cuda.jit
    def twice(out):
        bar = cuda.shared.array(1, np.uint64)
        mbarrier_init(bar, 0, 1)

    @cuda.jit
    def overwritten(out):
        words = cuda.shared.array(4, uint32, alignment=8)
        mbarrier_init(words, 2, 1)
        words[3] = 0
        mbarrier_arrive(words, 2)

    @cuda.jit
    def askew(out):
        words = cuda.shared.array(4, uint32, alignment=8)
        mbarrier_init(words, 1, 1)

    @cuda.jit
    def nobody(out):
        bar = cuda.shared.array(1, np.uint64)
        mbarrier_init(bar, 0, 0)

    @cuda.jit
    def parity(out):
        bar = cuda.shared.array(1, np.uint64)
        mbarrier_init(bar, 0, 1)
        mbarrier_wait(bar, 0, 2)

    refused(twice, r"bar\[0\] is an mbarrier already", block=2)
    refused(overwritten, r"mbarrier words\[2\] has been overwritten", block=1)
    refused(askew, "index 1 is byte 4, 4 past a multiple of 8", block=1, kind=Misaligned)
    refused(nobody, "would take 0 arrivals", block=1)
    refused(parity, r"a wait for parity 2 of mbarrier bar\[0\]: 0 or 1", block=1)


# --- wgmma


def multiply_kernel(groups: str = "one", same: bool = True, everyone: bool = True) -> Any:
    """One wgmma on what threads stored, done right or not."""

    @cuda.jit
    def kernel(out):
        stage = cuda.shared.array(256, uint8, alignment=128)
        t = int32(cuda.threadIdx.x)
        stage[t], stage[t + 128] = 1, 1
        fence_proxy_async()
        cuda.syncthreads()
        where = matrix_descriptor(stage, 0, 128, 256)
        one = uint32(0x01010101)
        acc = (int32(0), int32(0), int32(0), int32(0))
        if everyone or t < 96:
            wgmma_fence()
            acc = wgmma_s8(acc, one, one, one, one, where if same else where + (t >> 6), 1)
            earlier = acc
            if groups == "stale":
                acc = wgmma_s8(acc, one, one, one, one, where, 1)
            if groups != "some" or t < 64:
                wgmma_commit()
            acc = wait_for_all(earlier if groups == "stale" else acc)
            out[t] = acc[0] + acc[1] + acc[2] + acc[3]

    return kernel


def test_b_released_by_one_of_two_warpgroups_too_early():
    """The other's arrival is the last, and comes while the first only waits for its wgmma."""

    @cuda.jit
    def kernel(out):
        stage = cuda.shared.array(256, uint8, alignment=128)
        read = cuda.shared.array(1, np.uint64)
        t = int32(cuda.threadIdx.x)
        if t < 256:
            stage[t] = 1
        if t == 0:
            mbarrier_init(read, 0, 2)
        fence_proxy_async()
        cuda.syncthreads()
        if t == 0:
            mbarrier_arrive(read, 0)
        if t == 256:
            mbarrier_wait(read, 0, 0)
            stage[7] = 2
        if 128 <= t < 256:
            where = matrix_descriptor(stage, 0, 128, 256)
            one = uint32(0x01010101)
            acc = (int32(0), int32(0), int32(0), int32(0))
            wgmma_fence()
            acc = wgmma_s8(acc, one, one, one, one, where, 1)
            wgmma_commit()
            if t == 128:
                mbarrier_arrive(read, 0)
            acc = wait_for_all(acc)

    changed = r"a store to byte 7 of stage, which a wgmma of warp 4 in test_warpgroups.py:\d+ "
    refused(kernel, changed + ".*loads: wgmma_wait, then an arrival", block=288, kind=Race)


def test_all_of_a_warpgroup_take_part():
    refused(
        multiply_kernel(everyone=False), "threads 0-95 wait at wgmma_s8", kind=BarrierDivergence
    )
    refused(
        multiply_kernel(),
        "wgmma_s8 needs a warpgroup of 128 threads; the last of this block has 96",
        block=96,
    )
    refused(multiply_kernel(same=False), "give wgmma different descriptors")
    refused(multiply_kernel(groups="some"), "some threads of the warpgroup have called wgmma_commi")


def test_only_the_last_accumulators_count():
    refused(multiply_kernel(groups="stale"), "belong to an earlier wgmma")


def test_b_lies_in_shared_memory():
    def reading(at: int, leading: int, stride: int) -> Any:
        @cuda.jit
        def kernel(out):
            stage = cuda.shared.array(512, uint8, alignment=128)
            where = matrix_descriptor(stage, at, leading, stride)
            acc = no_sums()
            wgmma_fence()
            acc = wgmma_f16(acc, 0, 0, 0, 0, where, 1)

        return kernel

    refused(reading(0, 512, 128), "spans 640 bytes, which are not in one piece of shared memory")
    refused(reading(0, 2048, 128), "spans 2176 bytes, which are not in one piece")
    refused(reading(8, 128, 128), "byte 8, 8 past a multiple of 16", kind=Misaligned)
    refused(reading(0, 40, 128), "leading of a matrix_descriptor is a multiple of 16 .* got 40")
    refused(reading(0, 128, 1 << 18), "stride of a matrix_descriptor is .* below 2.18, got 262144")


def test_positions_of_a_sparse_a():
    """Those of lanes 2 and 3 of each four, of which one has the same position twice; the words of
    lanes 0 and 1 are not looked at. B has 64 bytes along K."""

    def product(wrong: int, leading: int) -> Any:
        @cuda.jit
        def kernel(out):
            stage = cuda.shared.array(512, uint8, alignment=128)
            t = int32(cuda.threadIdx.x)
            for i in range(4):
                stage[t + 128 * i] = 0
            fence_proxy_async()
            cuda.syncthreads()
            where = matrix_descriptor(stage, 0, leading, 512)
            positions = 0x44444444 if t != wrong else 0x44544444
            acc = no_sums()
            wgmma_fence()
            acc = sparse(acc, 0, 0, 0, 0, where, positions, 1)
            wgmma_commit()
            acc = wait_for_all(acc)
            out[t] = acc[0] + acc[3]

        return kernel

    out = np.ones(128, np.uint32)
    simulate(product(32 + 4 * 5 + 1, 128), 1, 128, (out,))
    assert not out.any()
    twice = "two numbers of row 29, K 20 to 23, the position 1: they need two"
    refused(product(32 + 4 * 5 + 3, 128), twice)
    refused(product(128, 256), "spans 896 bytes, which are not in one piece of shared memory")
    with pytest.raises(ValueError, match="takes 0 or 1 for a selector, got 2"):
        wgmma_sparse_f16(2)


def test_accumulators_keep_their_values_when_they_are_multiplied_on():
    """A copy kept of sums that have landed is a copy; the sums of other lanes are not mixed in."""

    @cuda.jit
    def kernel(out):
        stage = cuda.shared.array(256, uint8, alignment=128)
        t = int32(cuda.threadIdx.x)
        stage[t], stage[t + 128] = 1, 1
        fence_proxy_async()
        cuda.syncthreads()
        where = matrix_descriptor(stage, 0, 128, 256)
        one = uint32(0x01010101)
        acc = (t, t, t, t)
        wgmma_fence()
        acc = wgmma_s8(acc, one, one, one, one, where, 1)
        wgmma_commit()
        acc = wait_for_all(acc)
        kept = acc
        wgmma_fence()
        acc = wgmma_s8(acc, one, one, one, one, where, 1)
        wgmma_commit()
        acc = wait_for_all(acc)
        out[t], out[t + 128] = kept[3], acc[3]

    out = np.zeros(256, np.uint32)
    simulate(kernel, 1, 128, (out,))
    np.testing.assert_array_equal(out, np.tile(np.arange(128), 2) + np.repeat((32, 64), 128))


def test_spread_takes_an_array_of_its_length():
    @cuda.jit
    def kernel(out):
        values = cuda.local.array(8, float32)
        spread(values, no_sums())

    refused(kernel, "spread of 4 values into local array, which has 8", block=1)


def test_registers_that_are_not_there():
    more, most = setmaxnreg_inc(160), setmaxnreg_inc(240)

    def kernel(grow: Any) -> Any:
        @cuda.jit
        def growing(out):
            grow()

        return growing

    simulate(kernel(more), 1, 384, (np.zeros(1, np.uint32),))

    def moved(fewer: Any, most: Any) -> Any:
        @cuda.jit
        def moving(out):
            if cuda.threadIdx.x < 128:
                if fewer is not None:
                    fewer()
            elif most is not None:
                most()

        return moving

    least = setmaxnreg_dec(24)
    simulate(moved(least, most), 1, 384, (np.zeros(1, np.uint32),))
    refused(moved(None, most), "would have 82944 registers, more than the 65536 .* wait", block=384)
    refused(moved(least, None), "give registers back .* and none takes them", block=384)
    refused(kernel(most), "would have 92160 registers, more than the 65536", block=384)
    with pytest.raises(ValueError, match="a multiple of 8 from 24 to 256 registers, got 100"):
        setmaxnreg_inc(100)
    with pytest.raises(ValueError, match="a number of groups from 0 to 7, got 8"):
        wgmma_wait(8)


# --- named barriers


def test_named_barriers_misused():
    def meeting(number: int, threads: int, others: int = 0) -> Any:
        @cuda.jit
        def kernel(out):
            if others and cuda.threadIdx.x < 32:
                barrier_sync(number, others)
            else:
                barrier_sync(number, threads)

        return kernel

    @cuda.jit
    def in_vain(out):
        if cuda.threadIdx.x < 32:
            barrier_arrive(2, 64)

    @cuda.jit
    def twice(out):
        if cuda.threadIdx.x < 32:
            barrier_arrive(1, 128)
            barrier_arrive(1, 128)

    simulate(meeting(15, 128), 1, 128, (np.zeros(1, np.uint32),))
    refused(meeting(0, 128), r"barrier from 1 to 15 .* got 0")
    refused(meeting(16, 128), r"barrier from 1 to 15 .* got 16")
    refused(meeting(1, 100), "a multiple of 32 and at most the block's 128, got 100")
    refused(meeting(1, 160), "a multiple of 32 and at most the block's 128, got 160")
    refused(meeting(1, 128, others=64), "barrier 1 is in use by .* threads, not")
    refused(in_vain, r"threads 0-31 of block .* arrived at barrier 2 of 64 threads .* nobody has")
    refused(twice, "has arrived at barrier 1 already, which lacks 96 of 128 threads")
    refused(meeting(2, 96), r"threads .* wait at barrier_sync\(2, 96\)", kind=BarrierDivergence)


# --- what the machine code is warned of, and what is counted


def test_remarks_of_ptxas_reach_the_tests():
    """Fragments carried from one turn to the next: each wgmma waits for itself, and ptxas says so,
    in so many words, only here."""

    @cuda.jit
    def carried(w, a, c, steps):
        stage = cuda.shared.array(STAGE_BYTES, uint8, alignment=128)
        t = int32(cuda.threadIdx.x)
        words = cuda.local.array(4, uint32)
        for i in range(4):
            words[i] = load_u32(w, 4 * t + i)
        acc = no_sums()
        for step in range(steps):
            wgmma_fence()
            where = matrix_descriptor(stage, 0, 128, 256)
            acc = wgmma_f16(acc, words[0], words[1], words[2], words[3], where, 1)
            wgmma_commit()
            for i in range(4):
                words[i] = words[i] ^ load_u32(w, 4 * (t + 128 * step) + i)
            acc = wait_for_all(acc)
        c[t] = acc[0] + acc[1] + acc[2] + acc[3]

    words, sums = uint32[::1], float32[::1]
    code = machine_code(carried, (words, words, sums, int32), "sm_90a")
    assert len(code.warnings) == 1
    assert "C7513" in code.warnings[0]


@pytest.mark.parametrize("arch", ["sm_90", "sm_100a"])
def test_wgmma_is_of_one_architecture(arch):
    case = next(case for case in CASES if case.name == "wgmma_start")
    words, ints = uint32[::1], int32[::1]
    with pytest.raises(ValueError, match=f"needs sm_90a; it cannot be compiled for {arch}"):
        machine_code(case.kernel, (words, ints, ints), arch)


def test_copies_and_barriers_cost_no_wavefronts():
    """Lanes do not access shared memory for them: only the fragments that they load are counted."""
    w, a, _ = operands()
    counter = BankCounter()
    c = np.zeros((64, TOKENS), np.float32)
    simulate(pipeline(), 1, 160, (w, a, c), banks=counter)
    assert counter.wavefronts == 4 * 4 * STEPS
    assert counter.conflicts == 0
