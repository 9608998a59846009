"""Races: two accesses to one place, one of them a store, are found in every order of lanes unless
something orders them; and what orders them does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numba import cuda, float32, int32, uint8, uint32

from steps.instructions import (
    TensorMap,
    barrier_arrive,
    barrier_sync,
    bulk_copy,
    cp_async_4,
    cp_async_commit,
    cp_async_wait,
    fence,
    fence_mbarrier_init,
    fence_proxy_async,
    fence_proxy_async_global,
    griddepcontrol_wait,
    load_u32,
    load_u32x4,
    load_u32x4_relaxed,
    matrix_descriptor,
    mbarrier_arrive,
    mbarrier_arrive_expect,
    mbarrier_init,
    mbarrier_wait,
    shfl_xor,
    store_u16,
    store_u32,
    store_u32_relaxed,
    store_u32x4,
    tensor_copy,
    tensor_map_address,
    wgmma_commit,
    wgmma_fence,
    wgmma_s8,
    wgmma_wait,
)
from steps.simulator.launch import Race, simulate
from steps.simulator.stream import Stream

ORDERS = (0, -1, 1, 2)
wait_all, wait_for_wgmma = cp_async_wait(0), wgmma_wait(0)


def found(kernel: Any, message: str, block: int = 64, grid: int = 1) -> None:
    """The race is named in every order."""
    for order in ORDERS:
        with pytest.raises(Race, match=message):
            simulate(kernel, grid, block, (np.zeros(1024, np.uint32),), order=order)


def clean(kernel: Any, block: int = 64, grid: int = 1) -> np.ndarray:
    out = np.zeros(1024, np.uint32)
    for order in ORDERS:
        simulate(kernel, grid, block, (out,), order=order)
    return out


def both(make: Callable[[bool], Any], message: str, block: int = 64, grid: int = 1) -> None:
    """`make(True)` has no race, `make(False)` has."""
    clean(make(True), block, grid)
    found(make(False), message, block, grid)


# --- what orders the threads of a block


def handed_on(orders: Callable[[Any], None]) -> Any:
    """Each thread stores a word and loads its neighbour's."""

    @cuda.jit
    def kernel(out):
        stage = cuda.shared.array(64, int32)
        t = cuda.threadIdx.x
        stage[t] = t
        orders(t)
        out[t] = stage[t ^ 1]

    return kernel


@cuda.jit(device=True)
def block_barrier(t):
    cuda.syncthreads()


@cuda.jit(device=True)
def warp_barrier(t):
    cuda.syncwarp()


@cuda.jit(device=True)
def named_barrier(t):
    barrier_sync(1 + t // 32, 32)


@cuda.jit(device=True)
def shuffle(t):
    shfl_xor(int32(t), 1)


@cuda.jit(device=True)
def device_fence(t):
    fence()


def test_who_loads_its_own_store_does_not_order_it_for_others():
    """All have passed the same barrier and know the same, but for what each did since."""

    @cuda.jit
    def kernel(out):
        stage = cuda.shared.array(64, int32)
        t = cuda.threadIdx.x
        cuda.syncthreads()
        if t == 0:
            stage[5] = 1
            out[0] = stage[5]
        elif t == 33:
            out[33] = stage[5]

    found(kernel, r"byte 20 of stage, .*thread (0|33)")


def test_a_store_is_after_all_that_load_even_between_two_arrivals():
    """Threads load once before and once after they arrive at a barrier that the storing thread
    waits for: of the second load it knows nothing."""

    def make(right):
        @cuda.jit
        def kernel(out):
            stage = cuda.shared.array(4, int32)
            t = cuda.threadIdx.x
            if t == 63:
                stage[1] = 1
            cuda.syncthreads()
            if t < 32:
                out[t] = stage[1]
                barrier_arrive(1, 64)
                if not right:
                    out[t] = stage[1]
            else:
                barrier_sync(1, 64)
                if t == 63:
                    stage[1] = 2

        return kernel

    both(make, "byte 4 of stage")


def test_wide_stores_and_narrow_loads():
    """Words of one store of 16 bytes are watched one by one."""

    def make(right):
        @cuda.jit
        def kernel(out):
            stage = cuda.shared.array(64, uint32, alignment=16)
            t = cuda.threadIdx.x
            if t < 16:
                store_u32x4(stage, 4 * t, t, t, t, t)
            cuda.syncthreads()
            out[t] = stage[t]
            stage[t if right else t ^ 1] = t

        return kernel

    both(make, "of stage")


@pytest.mark.parametrize("orders", [block_barrier, warp_barrier, named_barrier])
def test_barriers_order(orders):
    np.testing.assert_array_equal(clean(handed_on(orders))[:64], np.arange(64) ^ 1)


@pytest.mark.parametrize("orders", [shuffle, device_fence])
def test_shuffles_and_fences_are_no_barriers(orders):
    found(handed_on(orders), "of stage, (to )?which thread")


def test_an_arrival_orders_what_came_before_it():
    def make(early: bool) -> Any:
        @cuda.jit
        def kernel(out):
            stage = cuda.shared.array(32, int32)
            t = cuda.threadIdx.x
            if t >= 32:
                barrier_sync(1, 64)
                out[t] = stage[t - 32]
            else:
                if early:
                    stage[t] = t
                barrier_arrive(1, 64)
                if not early:
                    stage[t] = t

        return kernel

    both(make, "of stage, (to )?which thread")


def test_an_arrival_does_not_order_what_the_arriving_thread_does_next():
    """It has not waited: it may be far ahead of those that it tells."""

    @cuda.jit
    def kernel(out):
        stage = cuda.shared.array(32, int32)
        t = cuda.threadIdx.x
        if t >= 32:
            stage[t - 32] = t
            barrier_sync(1, 64)
        else:
            barrier_arrive(1, 64)
            out[t] = stage[t]

    found(kernel, "of stage, (to )?which thread")


def test_an_mbarrier_hands_on_what_all_know_who_arrived():
    """Through a third thread, too; and only to those who wait."""

    def make(waits: bool) -> Any:
        @cuda.jit
        def kernel(out):
            stage = cuda.shared.array(2, int32)
            bars = cuda.shared.array(2, np.uint64)
            t = cuda.threadIdx.x
            if t == 0:
                mbarrier_init(bars, 0, 1)
                mbarrier_init(bars, 1, 1)
            cuda.syncthreads()
            if t == 0:
                stage[0] = 5
                mbarrier_arrive(bars, 0)
            if t == 33:
                mbarrier_wait(bars, 0, 0)
                mbarrier_arrive(bars, 1)
            if t == 63:
                if waits:
                    mbarrier_wait(bars, 1, 0)
                out[0] = stage[0]

        return kernel

    both(make, "of stage, (to )?which thread (0 stores|63 loads)")


def test_an_mbarrier_is_made_before_it_is_used():
    @cuda.jit
    def kernel(out):
        bar = cuda.shared.array(1, np.uint64)
        if cuda.threadIdx.x == 0:
            mbarrier_init(bar, 0, 64)
        cuda.syncwarp()
        mbarrier_arrive(bar, 0)

    with pytest.raises(Race, match=r"mbarrier bar\[0\] is used, which thread 0 makes: a barrier"):
        simulate(kernel, 1, 64, (np.zeros(1, np.uint32),))


def test_one_value_stored_by_many_is_no_race():
    @cuda.jit
    def same(out):
        stage = cuda.shared.array(1, int32)
        stage[0] = 7
        out[0] = 7
        cuda.syncthreads()
        out[1 + cuda.threadIdx.x] = stage[0]

    assert (clean(same)[:65] == 7).all()

    @cuda.jit
    def others(out):
        stage = cuda.shared.array(1, int32)
        stage[0] = cuda.threadIdx.x

    found(others, r"a store to byte 0 of stage, which thread \d+ stores to")

    @cuda.jit
    def others_globally(out):
        store_u32(out, 0, cuda.threadIdx.x)

    found(others_globally, r"a store to byte 0 of out, to which thread \d+ stores: a barrier")


def test_neighbours_in_one_word_are_no_race():
    @cuda.jit
    def bytes_and_halves(out):
        stage = cuda.shared.array(128, uint8, alignment=4)
        t = cuda.threadIdx.x
        stage[t] = t
        if t % 2 == 0:
            store_u16(stage, 64 + t, t)
        cuda.syncthreads()
        out[t] = stage[63 - t] + stage[64 + (t & 62)]

    out = clean(bytes_and_halves)
    np.testing.assert_array_equal(out[:64], 63 - np.arange(64) + (np.arange(64) & 62))


@pytest.mark.parametrize("missing", ["before", "after", "at the end"])
def test_atomics_of_threads_need_no_order_but_with_loads_and_stores(missing):
    def make(right: bool) -> Any:
        @cuda.jit
        def kernel(out):
            total = cuda.shared.array(1, int32)
            t = cuda.threadIdx.x
            if t == 0:
                total[0] = 0
            if right or missing != "before":
                cuda.syncthreads()
            cuda.atomic.add(total, 0, t)
            if right or missing != "after":
                cuda.syncthreads()
            out[t] = total[0]
            if right or missing != "at the end":
                cuda.syncthreads()
            cuda.atomic.add(total, 0, 1)

        return kernel

    assert (clean(make(True))[:64] == 63 * 32).all()
    found(make(False), r"(a load of|a store to|an atomic on) byte 0 of total, which thread \d+")


def test_loads_of_all_are_remembered():
    """Not of the last one only: thread 40 loads too, and is not met."""

    @cuda.jit
    def kernel(out):
        stage = cuda.shared.array(4, int32, alignment=16)
        t = cuda.threadIdx.x
        stage[t & 3] = 1
        cuda.syncthreads()
        out[t] = load_u32(stage, 0) + load_u32x4(stage, 0)[2]
        cuda.syncwarp()
        if t == 0:
            stage[2] = 5

    found(kernel, r"a (store to byte 8|load of byte [08]) of stage, (to )?which thread")


def test_a_two_dimensional_array_and_parts_of_it():
    def make(barrier: bool) -> Any:
        @cuda.jit
        def kernel(out):
            stage = cuda.shared.array((8, 8), float32)
            t = cuda.threadIdx.x
            row = stage[t // 8]
            row[t % 8] = t
            if barrier:
                cuda.syncthreads()
            out[t] = stage[t % 8, t // 8]

        return kernel

    both(make, "of stage, (to )?which thread")


# --- asynchronous copies and wgmma


def test_cp_async_stores_until_its_wait():
    @cuda.jit
    def over_it(out):
        stage = cuda.shared.array(64, uint32)
        t = cuda.threadIdx.x
        cp_async_4(stage, t, out, t)
        stage[t] = 1
        cp_async_commit()
        wait_all()

    found(over_it, r"a store to byte \d+ of stage, which a cp_async of thread \d+ stores to")

    @cuda.jit
    def onto_it(out):
        stage = cuda.shared.array(64, uint32)
        if cuda.threadIdx.x == 0:
            stage[1] = 1
        if cuda.threadIdx.x == 1:
            cp_async_4(stage, 1, out, 1)
        cp_async_commit()
        wait_all()

    found(onto_it, r"a store to byte 4 of stage, which (a cp_async of )?thread [01] stores to")


def refill(released: str) -> Any:
    """A warpgroup multiplies what a thread copied, which copies again to the same place."""

    @cuda.jit
    def kernel(out):
        stage = cuda.shared.array(256, uint8, alignment=128)
        bars = cuda.shared.array(2, np.uint64)
        t = int32(cuda.threadIdx.x)
        if t == 0:
            mbarrier_init(bars, 0, 1)
            mbarrier_init(bars, 1, 4)
            fence_mbarrier_init()
        cuda.syncthreads()
        if t == 128:
            mbarrier_arrive_expect(bars, 0, 256)
            bulk_copy(stage, 0, out, 0, 256, bars, 0)
            mbarrier_wait(bars, 1, 0)
            mbarrier_arrive_expect(bars, 0, 256)
            bulk_copy(stage, 0, out, 0, 256, bars, 0)
            mbarrier_wait(bars, 0, 1)
        if t < 128:
            mbarrier_wait(bars, 0, 0)
            where = matrix_descriptor(stage, 0, 128, 256)
            one = uint32(0x01010101)
            acc = (int32(0), int32(0), int32(0), int32(0))
            wgmma_fence()
            acc = wgmma_s8(acc, one, one, one, one, where, 1)
            wgmma_commit()
            if released == "early" and t & 31 == 0:
                mbarrier_arrive(bars, 1)
            acc = wait_for_wgmma(acc)
            if released == "late" and t & 31 == 0:
                mbarrier_arrive(bars, 1)

    return kernel


def test_a_stage_freed_before_its_wgmma_has_ended():
    clean(refill("late"), block=160)
    message = (
        r"a copy to byte 0 of stage, which a wgmma of warp 0 in test_ordering.py:\d+ `acc = "
        r"wgmma_s8.*loads: wgmma_wait, then .*test_ordering.py:\d+ `bulk_copy\(stage"
    )
    found(refill("early"), message, block=160)


def stored_for_wgmma(fenced: str, by_copy: bool) -> Any:
    @cuda.jit
    def kernel(out):
        stage = cuda.shared.array(256, uint8, alignment=128)
        t = int32(cuda.threadIdx.x)
        if by_copy:
            if t < 64:
                cp_async_4(stage, 4 * t, out, t)
            cp_async_commit()
            wait_all()
        else:
            stage[t], stage[t + 128] = 1, 1
        if fenced == "by each" or (fenced == "by one" and t == 0):
            fence_proxy_async()
        if fenced != "no barrier":
            cuda.syncthreads()
        if fenced == "after":
            fence_proxy_async()
        one = uint32(0x01010101)
        acc = (int32(0), int32(0), int32(0), int32(0))
        wgmma_fence()
        acc = wgmma_s8(acc, one, one, one, one, matrix_descriptor(stage, 0, 128, 256), 1)
        wgmma_commit()
        acc = wait_for_wgmma(acc)

    return kernel


@pytest.mark.parametrize("by_copy", [False, True])
def test_what_threads_store_a_wgmma_reads_after_a_proxy_fence(by_copy):
    """The fence of the writers, or one behind the barrier that makes it known."""
    clean(stored_for_wgmma("by each", by_copy), block=128)
    clean(stored_for_wgmma("after", by_copy), block=128)
    unfenced = "a wgmma of byte .* of stage, to which thread .* stored: fence_proxy_async and a bar"
    found(stored_for_wgmma("never", by_copy), unfenced, block=128)
    found(stored_for_wgmma("by one", by_copy), unfenced, block=128)
    found(stored_for_wgmma("no barrier", by_copy), "a barrier is missing", block=128)


def test_a_copy_over_what_threads_stored_needs_a_proxy_fence():
    def make(fenced: bool) -> Any:
        @cuda.jit
        def kernel(out):
            stage = cuda.shared.array(64, uint32, alignment=128)
            bar = cuda.shared.array(1, np.uint64)
            t = cuda.threadIdx.x
            stage[t] = t
            if t == 0:
                mbarrier_init(bar, 0, 1)
                fence_mbarrier_init()
            if fenced:
                fence_proxy_async()
            cuda.syncthreads()
            if t == 0:
                mbarrier_arrive_expect(bar, 0, 256)
                bulk_copy(stage, 0, out, 0, 256, bar, 0)
                mbarrier_wait(bar, 0, 0)

        return kernel

    both(make, "a copy to byte 0 of stage, to which thread 0 stored: fence_proxy_async and a barri")


# --- thread blocks


def reduction(fenced: bool = True, barrier: bool = True, acquired: bool = True) -> Any:
    """Each block stores a partial sum a thread; the last to arrive adds up."""

    @cuda.jit
    def kernel(out):
        before = cuda.shared.array(1, int32)
        t, block = cuda.threadIdx.x, cuda.blockIdx.x
        store_u32(out, 64 * block + t, t)
        if fenced:
            fence()
        if barrier:
            cuda.syncthreads()
        if t == 0:
            before[0] = cuda.atomic.add(out, 1000, 1)
        cuda.syncthreads()
        if before[0] == 2:
            if acquired:
                fence()
            total = 0
            for i in range(3):
                total += load_u32(out, 64 * i + 63 - t)
            out[512 + t] = total

    return kernel


def test_the_last_block_sees_what_the_others_stored():
    out = np.zeros(1024, np.uint32)
    for order in ORDERS:
        out[1000] = 0
        simulate(reduction(), 3, 64, (out,), order=order)
        np.testing.assert_array_equal(out[512:576], 3 * (63 - np.arange(64)))


@pytest.mark.parametrize("missing", ["fenced", "barrier", "acquired"])
def test_partial_sums_that_nothing_orders(missing):
    for order in ORDERS:
        with pytest.raises(Race, match=r"of out, to which thread \d+ of block number \d stores: b"):
            simulate(
                reduction(**{missing: False}), 3, 64, (np.zeros(1024, np.uint32),), order=order
            )


def test_a_fence_adds_to_what_one_before_it_showed():
    """A block that waits for one other, and then for another, knows of both."""

    @cuda.jit
    def kernel(out):
        block = cuda.blockIdx.x
        if block < 2:
            store_u32(out, block, 7)
            fence()
            cuda.atomic.add(out, 8 + block, 1)
        else:
            for i in range(2):
                cuda.atomic.add(out, 8 + i, 1)
                fence()
            out[2] = load_u32(out, 0) + load_u32(out, 1)

    out = np.zeros(16, np.uint32)
    simulate(kernel, 3, 1, (out,))
    assert out[2] == 14


def hand_over(shown: bool = True, barrier: bool = True, seen: bool = True) -> Any:
    """Block 0 stores and sets a flag, for which block 1 polls, by relaxed accesses."""

    @cuda.jit
    def kernel(out, flags):
        t = cuda.threadIdx.x
        if cuda.blockIdx.x == 0:
            store_u32(out, t, t)
            if shown:
                fence()
            if barrier:
                cuda.syncthreads()
            if t == 0:
                store_u32_relaxed(flags, 0, 1)
        else:
            while load_u32x4_relaxed(flags, 0)[0] == 0:
                pass
            if seen:
                fence()
            out[64 + t] = load_u32(out, 63 - t)

    return kernel


def test_a_relaxed_store_shows_what_a_relaxed_load_then_sees():
    for order in ORDERS:
        out, flags = np.zeros(128, np.uint32), np.zeros(4, np.uint32)
        simulate(hand_over(), 2, 64, (out, flags), order=order, resident=2)
        np.testing.assert_array_equal(out[64:], 63 - np.arange(64))


@pytest.mark.parametrize("missing", ["shown", "barrier", "seen"])
def test_relaxed_accesses_without_a_fence_order_nothing(missing):
    for order in ORDERS:
        given = np.zeros(128, np.uint32), np.zeros(4, np.uint32)
        with pytest.raises(Race, match=r"of out, to which thread \d+ of block number \d stores: b"):
            simulate(hand_over(**{missing: False}), 2, 64, given, order=order, resident=2)


def emptied(counted: bool = True, barrier: bool = True, seen: bool = True) -> Any:
    """Both blocks load a word by relaxed loads; the last one that says so stores zero there."""

    @cuda.jit
    def kernel(out, flags):
        arrived = cuda.shared.array(1, int32)
        t = cuda.threadIdx.x
        if cuda.blockIdx.x == 0 and t == 0:
            store_u32_relaxed(flags, 0, 1)
        while load_u32x4_relaxed(flags, 0)[0] == 0:
            pass
        if barrier:
            cuda.syncthreads()
        if t == 0:
            if counted:
                fence()
            arrived[0] = cuda.atomic.add(out, 0, 1)
            if seen:
                fence()
        cuda.syncthreads()
        if arrived[0] == 1 and t == 1:
            store_u32(flags, 0, 0)

    return kernel


def test_the_last_who_looked_may_empty_a_word():
    for order in ORDERS:
        out, flags = np.zeros(4, np.uint32), np.zeros(4, np.uint32)
        simulate(emptied(), 2, 64, (out, flags), order=order, resident=2)
        assert flags[0] == 0


@pytest.mark.parametrize("missing", ["counted", "barrier", "seen"])
def test_a_word_is_emptied_while_others_may_look(missing):
    for order in ORDERS:
        given = np.zeros(4, np.uint32), np.zeros(4, np.uint32)
        with pytest.raises(Race, match=r"a store to byte 0 of flags, which thread \d+ of block nu"):
            simulate(emptied(**{missing: False}), 2, 64, given, order=order, resident=2)


def test_a_relaxed_store_ends_what_the_one_before_it_showed():
    """Block 1 overwrites block 0's flag, and has not fenced: who sees its flag knows of neither."""

    @cuda.jit
    def kernel(out, flags):
        block = cuda.blockIdx.x
        if block == 0:
            store_u32(out, 0, 7)
            fence()
            store_u32_relaxed(flags, 0, 1)
        elif block == 1:
            while load_u32x4_relaxed(flags, 0)[0] == 0:
                pass
            store_u32_relaxed(flags, 0, 2)
        else:
            while load_u32x4_relaxed(flags, 0)[0] != 2:
                pass
            fence()
            out[1] = load_u32(out, 0)

    given = np.zeros(4, np.uint32), np.zeros(4, np.uint32)
    with pytest.raises(Race, match="a load of byte 0 of out, to which thread 0 of block number 0"):
        simulate(kernel, 3, 1, given, resident=3)


@pytest.mark.parametrize("missing", ["", "fenced", "acquired"])
def test_an_atomic_orders_threads_of_one_block_too(missing):
    """Without a barrier: a fence, an atomic that another thread sees, and a fence there."""

    @cuda.jit
    def kernel(out):
        t = cuda.threadIdx.x
        if t == 0:
            store_u32(out, 0, 7)
            if missing != "fenced":
                fence()
            cuda.atomic.add(out, 8, 1)
        if t == 32:
            while cuda.atomic.add(out, 8, 0) == 0:
                cuda.nanosleep(20)
            if missing != "acquired":
                fence()
            out[16] = load_u32(out, 0)

    for order in ORDERS:
        out = np.zeros(32, np.uint32)
        if missing:
            with pytest.raises(Race, match="load of byte 0 of out, to which thread 0 stores"):
                simulate(kernel, 1, 64, (out,), order=order)
        else:
            simulate(kernel, 1, 64, (out,), order=order)
            assert out[16] == 7


@pytest.mark.parametrize("missing", ["", "counted", "acquired", "proxied", "before"])
@pytest.mark.parametrize("blocks", [1, 2])
def test_copies_of_rows_that_other_threads_store(missing, blocks):
    """The thread that copies must know of the stores, and then call fence_proxy_async_global. Rows
    that the box does not reach may still be stored to."""

    @cuda.jit
    def kernel(a_map, a, counters):
        stage = cuda.shared.array(1024, uint8, alignment=1024)
        bar = cuda.shared.array(1, np.uint64)
        t, first = cuda.threadIdx.x, cuda.blockIdx.x == 0
        mapped = tensor_map_address(a_map)
        if t == 32:
            mbarrier_init(bar, 0, 1)
            fence_mbarrier_init()
        cuda.syncthreads()
        if t < 16 and first:
            a[t, 5] = 1
            cuda.syncwarp(0xFFFF)
            if t == 0:
                fence()
                cuda.atomic.add(counters, 0, 1)
        if t == 32 and (not first or blocks == 1):
            if missing == "before":
                fence_proxy_async_global()
            while missing != "counted" and cuda.atomic.add(counters, 0, 0) == 0:
                cuda.nanosleep(20)
            if missing != "acquired":
                fence()
            if missing not in ("proxied", "before"):
                fence_proxy_async_global()
            mbarrier_arrive_expect(bar, 0, 1024)
            tensor_copy(stage, 0, mapped, 0, 0, bar, 0)
            mbarrier_wait(bar, 0, 0)

    a = np.zeros((24, 64), np.float16)
    args = TensorMap(a, (8, 64)), a, np.zeros(4, np.int32)
    if not missing:
        simulate(kernel, blocks, 64, args)
        return
    with pytest.raises(Race, match=r"a copy of byte \d+ of a, to which .* stores: .*_global"):
        simulate(kernel, blocks, 64, args)


@pytest.mark.parametrize("barrier", [block_barrier, named_barrier])
def test_a_barrier_hands_on_what_each_thread_knows_of_other_blocks(barrier):
    """Threads 0 and 1 wait for one block each; without the first wait nobody knows of block 0."""

    def make(right):
        @cuda.jit
        def kernel(out):
            t, block = cuda.threadIdx.x, cuda.blockIdx.x
            if block < 2:
                if t == 0:
                    store_u32(out, block, 7)
                    fence()
                    cuda.atomic.add(out, 8 + block, 1)
            else:
                if t < 2 and (right or t == 1):
                    cuda.atomic.add(out, 8 + t, 1)
                    fence()
                barrier(t)
                out[16 + t] = load_u32(out, 0) + load_u32(out, 1)

        return kernel

    simulate(make(True), 3, 32, (out := np.zeros(1024, np.uint32),))
    np.testing.assert_array_equal(out[16:48], 14)
    with pytest.raises(Race, match="a load of byte 0 of out, to which thread 0 of block number 0"):
        simulate(make(False), 3, 32, (np.zeros(1024, np.uint32),))


def test_two_blocks_store_to_one_place():
    @cuda.jit
    def kernel(out):
        out[cuda.threadIdx.x] = cuda.blockIdx.x + 1

    with pytest.raises(Race, match=r"a store to byte \d+ of out, to which thread \d+ of block"):
        simulate(kernel, 2, 32, (np.zeros(64, np.uint32),))


# --- launches


@cuda.jit
def produce(a):
    a[cuda.threadIdx.x] = 3


def consume(waits: str) -> Any:
    @cuda.jit
    def kernel(a, w, c):
        t = cuda.threadIdx.x
        x = w[t]
        if waits == "each" or (waits == "one" and t == 0):
            griddepcontrol_wait()
        if waits == "one":
            cuda.syncthreads()
        c[t] = x + a[t]

    return kernel


def chain(kernel: Any, overlap: bool = True, rounds: int = 2) -> np.ndarray:
    stream = Stream()
    a, w, c = np.zeros(64, np.uint32), np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)
    for _ in range(rounds):
        simulate(produce, 1, 64, (a,), stream=stream)
        simulate(kernel, 1, 64, (a, w, c), stream=stream, overlap=overlap)
    return c


@pytest.mark.parametrize("waits", ["each", "one"])
def test_what_the_launch_before_stores_may_be_read_after_the_wait(waits):
    np.testing.assert_array_equal(chain(consume(waits)), 3 + np.arange(64))


def test_a_launch_that_does_not_wait():
    """Weights may be read; and where launches do not overlap, everything."""
    chain(consume("never"), overlap=False)
    message = (
        r"a load of byte 0 of a, which the launch of produce before stores to and may still be "
        r"running: griddepcontrol_wait comes first \[block \(0, 0, 0\), thread \(0, 0, 0\), test_o"
    )
    with pytest.raises(Race, match=message):
        chain(consume("never"))


@pytest.mark.parametrize("what", ["a", "w", "c"])
def test_what_a_launch_before_uses_is_not_overwritten(what):
    """Its output, its input, and what the one before it used, which may run as long."""

    @cuda.jit
    def store(x):
        x[cuda.threadIdx.x] = 1
        griddepcontrol_wait()

    @cuda.jit
    def nothing(x):
        griddepcontrol_wait()

    arrays = {name: np.zeros(64, np.uint32) for name in "awcd"}
    for between in (False, True):
        stream = Stream()
        simulate(produce, 1, 64, (arrays["a"],), stream=stream)
        awc = tuple(arrays[name] for name in "awc")
        simulate(consume("each"), 1, 64, awc, stream=stream, overlap=True)
        if between:
            simulate(nothing, 1, 64, (arrays["d"],), stream=stream, overlap=True)
        with pytest.raises(Race, match=r"a store to byte 0 of x, which the launch of \w+ before"):
            simulate(store, 1, 64, (arrays[what],), stream=stream, overlap=True)
        stream.synchronize()
        simulate(store, 1, 64, (arrays[what],), stream=stream, overlap=True)


def test_what_the_launch_before_leaves_alone_may_be_read():
    """An array has both: a cache to which a launch adds a row, while the next one loads others."""

    @cuda.jit
    def load(x, at):
        value = x[at]
        griddepcontrol_wait()
        x[at] = value

    @cuda.jit
    def add_row(x):
        x[1, 32 + cuda.threadIdx.x] = 1

    cache, stream = np.zeros((2, 64), np.uint16), Stream()
    flat = cache.reshape(-1)
    for at in (0, 95, 96, 97, 98, 127):
        simulate(add_row, 1, 2, (cache,), stream=stream)
        if at in (96, 97):
            with pytest.raises(Race, match=f"a load of byte {2 * at} of x, which the launch of ad"):
                simulate(load, 1, 1, (flat, at), stream=stream, overlap=True)
        else:
            simulate(load, 1, 1, (flat, at), stream=stream, overlap=True)


def test_parts_of_one_allocation_are_told_apart():
    @cuda.jit
    def load(x, out):
        out[0] = x[0]

    buffer, stream = np.zeros(128, np.uint32), Stream()
    simulate(produce, 1, 64, (buffer[:64],), stream=stream)
    simulate(load, 1, 1, (buffer[64:], np.zeros(1, np.uint32)), stream=stream, overlap=True)
    with pytest.raises(Race, match="a load of byte 0 of x"):
        simulate(load, 1, 1, (buffer[63:64], np.zeros(1, np.uint32)), stream=stream, overlap=True)
