"""Routing: the rows of C in the order of their experts, and where the rows of each expert begin.

A row of C is a *position* p = S t + s: slot s of token t. `ids` says which expert multiplies it. A
counting sort puts the positions of each expert side by side, in their own order:

    ids      2  0 | 2  1 | 0  2            three tokens, two slots
    rows     1  4 | 3    | 0  2  5         positions by expert
    offsets  0      2      3        6      where those of experts 0, 1, 2 begin; the end of the last
    places   3  0 | 4  2 | 1  5            where a position is in rows

A thread block for each expert, and one launch. A block reads all ids and counts those that are less
than its own and those that are equal: the first count is where its rows begin. Then it writes its
rows, of which it has kept a bit for each id. Blocks share nothing, so there are no atomics, and the
order is always the same. An id out of range counts as one expert more, behind the last:
rows[offsets[E]:] have none. 32768 ids are 128 KB, which an SM reads from the L2 in 2 us; with 512
experts an SM reads them four times.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
from numba import cuda, int32, uint32

from steps.contract import Launch
from steps.instructions import (
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    load_u32,
    load_u32x2,
    shfl_xor,
    store_u32,
)

WARPS: Final = 16
IN_FLIGHT: Final = 16
"""Loads of a thread before the first is used."""
THREADS: Final = 32 * WARPS
KEPT: Final = 4
"""Batches of `IN_FLIGHT` ids of which a thread keeps which are its block's: 32768 of a block. More
are read again."""
EVERY_LANE: Final = 0xFFFFFFFF


@cache
def kernel(of_ids: str) -> Any:
    """The kernel for ids of dtype "int32" or "int64"."""
    at_once = 32 * IN_FLIGHT
    wide = of_ids == "int64"

    @cuda.jit(device=True, forceinline=True)
    def expert_of(ids, position, count, experts):
        """The expert of a position; `experts` where it has none, experts + 1 beyond the last."""
        at = min(position, int32(count - 1))
        if wide:
            low, high = load_u32x2(ids, at)
            found = low if high == 0 else uint32(EVERY_LANE)
        else:
            found = load_u32(ids, at)
        expert = int32(found) if uint32(found) < uint32(experts) else experts
        return int32(expert if position < count else experts + 1)

    @cuda.jit(device=True, forceinline=True)
    def batch(ids, first, count, experts, own, lane):
        """Of IN_FLIGHT ids of a lane from position first + lane on: (how many are less than the
        block's own, a bit for each that is equal)."""
        loaded = cuda.local.array(IN_FLIGHT, int32)
        for i in range(IN_FLIGHT):
            loaded[i] = expert_of(ids, int32(first + 32 * i + lane), count, experts)
        less = equal = int32(0)
        for i in range(IN_FLIGHT):
            less = int32(less + (1 if loaded[i] < own else 0))
            equal = int32(equal | (1 << i if loaded[i] == own else 0))
        return less, equal

    @cuda.jit(device=True, forceinline=True)
    def sum_of_warp(x):
        for i in range(5):
            x = int32(x + shfl_xor(x, int32(1 << i)))
        return x

    @cuda.jit(device=True, forceinline=True)
    def write(rows, places, row, first, equal, lane):
        """The positions of a batch to rows[row ...], and where they are; the row behind them."""
        before = uint32((1 << lane) - 1)
        for i in range(IN_FLIGHT):
            here = uint32(cuda.ballot_sync(EVERY_LANE, (equal >> i & 1) == 1))
            if equal >> i & 1:
                place = int32(row + cuda.popc(here & before))
                store_u32(rows, place, uint32(first + 32 * i + lane))
                store_u32(places, int32(first + 32 * i + lane), uint32(place))
            row = int32(row + cuda.popc(here))
        return row

    @cuda.jit(launch_bounds=(THREADS, 1))
    def route(ids, rows, offsets, places):
        """rows, offsets, places of ids[T, S], see the module; int32 rows[T S], offsets[E + 1],
        places[T S]. Thread block e has the rows of expert e, the last one those of none."""
        griddepcontrol_launch_dependents()
        counts, kept = cuda.shared.array((2, WARPS), int32), cuda.local.array(KEPT, int32)
        experts, count = int32(offsets.shape[0] - 1), int32(rows.shape[0])
        own, t = int32(cuda.blockIdx.x), int32(cuda.threadIdx.x)
        warp, lane = int32(t >> 5), int32(t & 31)
        part = int32(uint32(count + WARPS * at_once - 1) // uint32(WARPS * at_once) * at_once)
        begin = int32(warp * part)
        end = int32(min(begin + part, count))
        griddepcontrol_wait()
        less = equal = int32(0)
        for q in range(KEPT):
            kept[q] = 0
            if begin + q * at_once < end:
                found = batch(ids, int32(begin + q * at_once), count, experts, own, lane)
                kept[q] = found[1]
                less, equal = int32(less + found[0]), int32(equal + cuda.popc(found[1]))
        for first in range(begin + KEPT * at_once, end, at_once):
            found = batch(ids, int32(first), count, experts, own, lane)
            less, equal = int32(less + found[0]), int32(equal + cuda.popc(found[1]))
        less, equal = sum_of_warp(less), sum_of_warp(equal)
        if lane == 0:
            counts[0, warp], counts[1, warp] = less, equal
        cuda.syncthreads()
        start = row = int32(0)
        for i in range(WARPS):
            start = int32(start + counts[0, i])
            row = int32(row + (counts[1, i] if i < warp else 0))
        if t == 0:
            offsets[own] = start
        row = int32(row + start)
        if equal > 0:
            for q in range(KEPT):
                if begin + q * at_once < end:
                    row = write(rows, places, row, int32(begin + q * at_once), kept[q], lane)
            for first in range(begin + KEPT * at_once, end, at_once):
                found = batch(ids, int32(first), count, experts, own, lane)
                row = write(rows, places, row, int32(first), found[1], lane)

    return route


def launch(ids: Any, rows: Any, offsets: Any, places: Any) -> Launch:
    """rows, offsets and places of ids[T, S], int32 or int64, T S of them at least one; see the
    kernel."""
    run, args = kernel(str(ids.dtype)), (ids, rows, offsets, places)
    return Launch(run, (offsets.shape[0],), (THREADS,), args, overlap=True)


def sizes(positions: int, experts: int) -> tuple[tuple[tuple[int, ...], Any], ...]:
    """(shape, dtype) of rows, of offsets and of places."""
    return ((positions,), np.int32), ((experts + 1,), np.int32), ((positions,), np.int32)
