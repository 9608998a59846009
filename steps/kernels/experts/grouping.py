"""Which experts are chosen, and by which tokens: what a thread block of `few` works out for itself.

Slots, token by token, are sorted by their experts; an expert's slots stay in their order, so the
same ids make the same groups in every run. Step 14 teaches an equal share for every SM, to which
this is the way when work is known on the GPU alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from numba import cuda, int32, uint32

from steps.instructions import load_u32, load_u32x2, shfl, shfl_up, store_u32, store_u32x2

OF_A_WARP: Final = 32
"""Slots that a warp groups by itself: one in each lane."""

EVERY_LANE: Final = 0xFFFFFFFF


@cache
def id_of(dtype: str) -> Any:
    """expert(ids, slot, E) -> its number, or -1 for an id that is none."""

    @cuda.jit(device=True, forceinline=True)
    def of_int32(ids, slot, E):
        e = uint32(load_u32(ids, slot))
        return int32(e) if e < uint32(E) else int32(-1)

    @cuda.jit(device=True, forceinline=True)
    def of_int64(ids, slot, E):
        low, high = load_u32x2(ids, slot)
        return int32(low) if high == 0 and uint32(low) < uint32(E) else int32(-1)

    return of_int32 if dtype == "int32" else of_int64


@dataclass(frozen=True, slots=True)
class Grouping:
    """Device functions of a thread block that share tables in shared memory.

    route(smem, counts, totals, ids, base, n, E, t) -> groups
        all threads: the list of groups of slots base to base + n, at most 1024. counts: shared
        int32 [E or more], totals: shared int32 [warps + 1]
    locate(smem, ids, base, group, E) -> (expert, the place of its first token, how many)
    slot_at(smem, base, place) -> the slot of a token
    """

    route: Any
    locate: Any
    slot_at: Any


@cache
def grouping(
    tokens: int, room: int, warps: int, of_ids: str, groups_at: int, order_at: int, ranks_at: int
) -> Grouping:
    """The device functions for groups of up to `tokens` of at most `room` slots. groups_at,
    order_at: bytes where 8 bytes for each group and 4 for each slot begin; ranks_at: of 4 more that
    `route` alone uses."""
    threads, expert = 32 * warps, id_of(of_ids)

    @cuda.jit(device=True, forceinline=True)
    def route(smem, counts, totals, ids, base, n, E, t):
        lane, warp = int32(t & 31), int32(t >> 5)
        i = t
        while i < E:
            counts[i] = 0
            i = int32(i + threads)
        if t == 0:
            totals[warps] = 0
        cuda.syncthreads()
        # --- count the slots of each expert
        i = t
        while i < n:
            e = expert(ids, base + i, E)
            if e >= 0:
                store_u32(smem, ranks_at + 4 * i, uint32(cuda.atomic.add(counts, e, 1)))
            i = int32(i + threads)
        cuda.syncthreads()
        # --- where its slots and groups begin: a sum over the experts before it
        so_far, begin = int32(0), int32(0)  # slots, and 2^16 times groups
        while begin < E:
            e, count = int32(begin + t), int32(0)
            if e < E:
                count = int32(counts[e])
            groups = int32(uint32(count + tokens - 1) // uint32(tokens))
            own = int32(count + (groups << 16))
            x = own
            for apart in (1, 2, 4, 8, 16):
                y = shfl_up(x, apart)
                if lane >= apart:
                    x = int32(x + y)
            if lane == 31:
                totals[warp] = x
            cuda.syncthreads()
            first = int32(so_far + x - own)
            for v in range(warps):
                total = int32(totals[v])
                if v < warp:
                    first = int32(first + total)
                so_far = int32(so_far + total)
            if count > 0:
                place = int32(first & 0xFFFF)
                counts[e] = int32(place | (count << 16))
                if groups > 1:
                    cuda.atomic.max(totals, warps, 1)
                for j in range(groups):
                    here = min(tokens, int32(count - tokens * j))
                    found = uint32((place + tokens * j) | (here << 16))
                    store_u32x2(smem, groups_at + 8 * ((first >> 16) + j), uint32(e), found)
            begin = int32(begin + threads)
            cuda.syncthreads()
        # --- the slots of all experts in their order, those of an expert as they were counted
        i = t
        while i < n:
            e = expert(ids, base + i, E)
            if e >= 0:
                rank = int32(load_u32(smem, ranks_at + 4 * i))
                place = int32(int32(counts[e]) & 0xFFFF)
                store_u32(smem, order_at + 4 * (place + rank), uint32(base + i))
            i = int32(i + threads)
        cuda.syncthreads()
        # --- those of several groups in their own order: a slot counts the earlier ones
        if int32(totals[warps]) > 0:
            i = t
            while i < n:
                e = expert(ids, base + i, E)
                if e >= 0 and int32(counts[e]) >= ((tokens + 1) << 16):
                    place, count = int32(int32(counts[e]) & 0xFFFF), int32(int32(counts[e]) >> 16)
                    rank = uint32(0)
                    for j in range(count):
                        if load_u32(smem, order_at + 4 * (place + j)) < uint32(base + i):
                            rank = uint32(rank + uint32(1))
                    store_u32(smem, ranks_at + 4 * i, rank)
                i = int32(i + threads)
            cuda.syncthreads()
            i = t
            while i < n:
                e = expert(ids, base + i, E)
                if e >= 0 and int32(counts[e]) >= ((tokens + 1) << 16):
                    rank = int32(load_u32(smem, ranks_at + 4 * i))
                    place = int32(int32(counts[e]) & 0xFFFF)
                    store_u32(smem, order_at + 4 * (place + rank), uint32(base + i))
                i = int32(i + threads)
            cuda.syncthreads()
        return int32(so_far >> 16)

    # few slots: each lane of a warp has one, and no counts are needed. A key is an expert, a rank
    # among its slots, and whether a group begins there
    @cuda.jit(device=True, forceinline=True)
    def route_warp(smem, counts, totals, ids, base, n, E, t):
        if t < OF_A_WARP:
            e = int32(-1)
            if t < n:
                e = expert(ids, base + t, E)
            cuda.syncwarp()
            count, rank = int32(0), int32(0)
            for j in range(OF_A_WARP):
                same = shfl(e, j) == e
                count = int32(count + (1 if same else 0))
                rank = int32(rank + (1 if same and j < t else 0))
            begins = rank % tokens == 0
            key = int32(64 * e + 2 * rank + (1 if begins else 0))
            if e < 0:
                key = int32(0x7FFFFFFE)
            place, group = int32(0), int32(0)
            for j in range(OF_A_WARP):
                other = shfl(key, j)
                place = int32(place + (1 if other < key else 0))
                group = int32(group + (1 if other < key and other & 1 else 0))
            if e >= 0:
                store_u32(smem, order_at + 4 * place, uint32(base + t))
                if begins:
                    found = uint32(place | (min(tokens, int32(count - rank)) << 16))
                    store_u32x2(smem, groups_at + 8 * group, uint32(e), found)
            groups = cuda.popc(cuda.ballot_sync(EVERY_LANE, e >= 0 and begins))
            if t == 0:
                totals[0] = groups
        cuda.syncthreads()
        return int32(totals[0])

    @cuda.jit(device=True, forceinline=True)
    def locate(smem, ids, base, group, E):
        e, found = load_u32x2(smem, groups_at + 8 * group)
        return int32(e), int32(found & 0xFFFF), int32(found >> 16)

    @cuda.jit(device=True, forceinline=True)
    def slot_at(smem, base, place):
        return int32(load_u32(smem, order_at + 4 * place))

    # one token: a group is a slot, also one of a repeated id, or of none
    @cuda.jit(device=True, forceinline=True)
    def route_one(smem, counts, totals, ids, base, n, E, t):
        return n

    @cuda.jit(device=True, forceinline=True)
    def locate_one(smem, ids, base, group, E):
        return expert(ids, base + group, E), group, int32(1)

    @cuda.jit(device=True, forceinline=True)
    def slot_at_one(smem, base, place):
        return int32(base + place)

    if tokens > 1:
        return Grouping(route_warp if room == OF_A_WARP else route, locate, slot_at)
    return Grouping(route_one, locate_one, slot_at_one)
