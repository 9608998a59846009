"""Few tokens times their experts: one launch streams the weights of the experts that ids name.

Step 18 streams a matrix whose place is known when it is launched. Here ids on the GPU say which
matrices of E are read, by which tokens. Each thread block works that out for itself, in a
microsecond or less: it counts the tokens of each expert, adds the counts up, and has a list of
*groups*, an expert and up to eight tokens that chose it. So a weight is read once however many
tokens chose its expert. Work is the same for every group, so all thread blocks share it equally,
and no host needs to know how many groups there are:

    items           (group, pair of row tiles): thread block b of B has an equal share of them
    steps of items  128 K of an item: warp w of W has an equal share of its thread block's

        item       |      0      |      1      |      2      |
        step       | 0 1 2 3 4 5 | 0 1 2 3 4 5 | 0 1 2 3 4 5 |
        warp       | 0 0 0 0 1 1   1 1 2 2 2 2   3 3 3 3 ...

A warp writes the items that are its own. Of others it leaves its sums in shared memory, and when
all warps are done one of them adds these up, in the order of K. Which warps share an item depends
on how many groups there are: a row of C has the same bits in every run, but not beside others.

A lies in shared memory: the rows of all tokens, or of the groups that the thread block has a share
of, two or three of them. An mma takes each of its columns from the row of another token. Memory
serves requests in their order, so A is asked for before the weights, and where the launch before
still writes it, after two stages of them. Where K is so long that these rows have no room, those of
a group come with its weights, in the same stage of the warp's ring. The host knows how many groups
there are at most: shared memory has room for the rows of up to 24 tokens where 5 are usual.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32

from qformats import FORMATS
from qformats.repack import KNOWN, TILE_GROUP, TILE_K, TILE_ROWS
from qformats.storage import storage_format
from steps.contract import Launch, Machine, ceil_div, dtype_name, multiprocessors, shared_memory
from steps.instructions import (
    bulk_copy,
    fence_mbarrier_init,
    fence_proxy_async,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    load_f32,
    mbarrier_arrive_expect,
    mbarrier_init,
    mbarrier_wait,
    prefetch_l2,
    shfl,
    store_f32,
    store_u32x4,
)
from steps.kernels.decode.copies import PAD, ROW_BYTES
from steps.kernels.decode.product import PAIR, product_a16
from steps.kernels.experts import summed, weighted
from steps.kernels.experts.contract import (
    ExpertsKernel,
    ExpertsOperands,
    ExpertsRequest,
)
from steps.kernels.experts.gates import GATE_OF
from steps.kernels.experts.grouping import OF_A_WARP, grouping, id_of
from steps.kernels.parts.activations.layouts import float16_rows
from steps.kernels.parts.epilogue.bias import LOAD_BIAS
from steps.kernels.parts.epilogue.rounded import STORE
from steps.kernels.parts.weights.codes import tile_index
from steps.kernels.parts.weights.storage_formats import tile_format

WARP: Final = 32
NAN: Final = math.nan
COLUMNS: Final = (1, 2, 4, 8)
"""Tokens of a group at most, the first of these that all tokens of a call fit in, else the last."""

ROOM: Final = (OF_A_WARP, 128, 512, 1024)
"""Products of a token with an expert that a thread block has tables for, the first that all fit in;
more than the last are another thread block's."""

EXPERTS: Final = 128
"""Kernels are compiled for multiples of so many experts."""

CHUNK: Final = 16
"""Bytes of the widest store."""

H200_RESIDENT: Final = ((16, 2),)
H200_SHAPES: Final = ((16, 3), (16, 2), (8, 4), (8, 3), (8, 2), (4, 2))
"""(warps, stages of each one's ring): the first that fits, with A in shared memory, then with A in
the ring. More stages in flight were no faster."""


@dataclass(frozen=True, slots=True)
class Variant:
    """What a kernel is compiled for.

    tokens    : of a group at most
    warps     : of a thread block; stages: of a warp's ring
    slot_bytes: of a stage: the packed tiles of a pair of row tiles, and the A of a group
    resident  : bytes from row to row of A in shared memory, beside the ring; 0 where the rows of a
                group come with the weights
    a_rows    : so many rows: those of all tokens, or of the groups that a thread block has at most
    by_token  : which of the two
    room      : slots that there are tables for
    experts   : places for counts
    gate      : see `ExpertsRequest`
    follows   : likewise
    scaled    : whether tokens have scales
    """

    tokens: int
    warps: int
    stages: int
    slot_bytes: int
    resident: int
    a_rows: int
    by_token: bool
    room: int
    experts: int
    gate: str | None
    follows: bool
    scaled: bool

    @property
    def pitch(self) -> int:
        """Bytes from token to token of A in a stage."""
        return ROW_BYTES + (PAD if self.tokens > 1 else 0)

    @property
    def bars_at(self) -> int:
        """The byte where the mbarriers begin: one for each stage, and one for all of A."""
        return self.warps * self.stages * self.slot_bytes

    @property
    def a_at(self) -> int:
        """And where a resident A begins."""
        return self.bars_at + ceil_div(8 * (self.warps * self.stages + 1), 128) * 128

    @property
    def sums_at(self) -> int:
        """And where sums of items that other warps began are, one for each warp; before, what
        `route` uses."""
        return self.a_at + self.resident * self.a_rows

    @property
    def sum_bytes(self) -> int:
        """Of the sums of an item. A single token is in all columns: half of them are enough."""
        return 4 * WARP * SUMS // (2 if self.tokens == 1 else 1)

    @property
    def groups_at(self) -> int:
        """And the list of groups."""
        return self.sums_at + self.warps * self.sum_bytes

    @property
    def order_at(self) -> int:
        """And the slots of all groups."""
        return self.groups_at + (8 * self.room if self.tokens > 1 else 0)

    @property
    def shared(self) -> int:
        """Bytes of a thread block."""
        return self.order_at + (4 * self.room if self.tokens > 1 else 0)


SUMS: Final = 4 * PAIR
"""Of a lane, of an item: see `steps.kernels.decode.product.Product`."""

# --- the end of an item ---------------------------------------------------------------------------


@cache
def end_of(
    variant: Variant, output: str, of_bias: str | None, scale: float
) -> tuple[Any, Any, Any]:
    """(load_scales, finished, write), device functions of a warp, whose lanes have the sums `acc`
    of an item."""
    tokens = variant.tokens
    columns, quads = min(2, tokens), max(1, tokens // 2)  # of a lane; lanes of a quad with some
    load_one, biased, scaled = LOAD_BIAS[of_bias or "float32"], of_bias is not None, variant.scaled
    gated = variant.gate is not None
    gate_of, store = GATE_OF[variant.gate or "silu"], STORE[output]

    @cuda.jit(device=True, forceinline=True)
    def load_scales(factors, added, row_scales, bias, e, n, rows, N, begins, lane):
        """Scales, and the bias, of rows g, g + 8, g + 16, g + 24 of an item of expert e, which has
        `rows` rows in row_scales. n: its first row; begins: whether sums are those of the beginning
        of K, to which the bias is added."""
        for i in range(4):
            row = int32(n + (lane >> 2) + 8 * i)
            factors[i] = load_f32(row_scales, e * rows + row)
            added[i] = float32(0)
            if biased and begins:
                added[i] = load_one(bias, e * N + min(row, int32(N - 1)))

    @cuda.jit(device=True, forceinline=True)
    def finished(acc, factors, added, token_scales, rows):
        """acc = sums times all scales, plus the bias. rows: of A, of the lane's columns."""
        for column in range(columns):
            of_token = float32(1)
            if scaled:
                of_token = load_f32(token_scales, rows[column])
            for i in range(4):
                at = 2 * i + column
                acc[at] = acc[at] * (factors[i] * float32(scale)) * of_token
                if biased:
                    acc[at] += added[i]

    @cuda.jit(device=True, forceinline=True)
    def write(acc, c, slots, n, outputs, here, known, lane):
        """Sums of an item to C. slots: of the lane's columns; n: the item's first output; known:
        whether its expert is one."""
        quad = int32(lane & 3)
        for column in range(columns):
            if quad < quads and quad * columns + column < here:
                at = int64(slots[column]) * outputs
                for i in range(2 if gated else 4):
                    x = acc[2 * i + column]
                    if gated:
                        x = gate_of(x, acc[4 + 2 * i + column])
                    if not known:
                        x = float32(NAN)
                    row = int32(n + (lane >> 2) + 8 * i)
                    if row < outputs:
                        store(c, at + row, x)

    return load_scales, finished, write


# --- the kernel -----------------------------------------------------------------------------------


@cache
def kernel(
    name: str, variant: Variant, kind: str, output: str, of_ids: str, of_bias: str | None
) -> Any:
    """The kernel of a storage format. kind, output, of_ids, of_bias: dtypes of A, C, ids and bias
    (None for none)."""
    tokens, warps, stages = variant.tokens, variant.warps, variant.stages
    product = product_a16(name, kind, tokens)
    places, multiply, finish = product.places, product.multiply, product.finish
    of_slots = grouping(
        tokens, variant.room, warps, of_ids, variant.groups_at, variant.order_at, variant.sums_at
    )
    route, locate, slot_at = of_slots.route, of_slots.locate, of_slots.slot_at
    load_scales, finished, write = end_of(variant, output, of_bias, product.scale)
    store = STORE[output]
    expert = id_of(of_ids)
    tile_bytes, threads, pitch = tile_format(name).tile_bytes, WARP * warps, variant.pitch
    weights, slot_bytes = PAIR * tile_bytes, variant.slot_bytes
    bars_at, sums_at = variant.bars_at, variant.sums_at
    experts, room = variant.experts, variant.room
    columns, gated, follows = min(2, tokens), variant.gate is not None, variant.follows
    resident, by_token = variant.resident, variant.by_token
    a_at, a_rows = variant.a_at, variant.a_rows
    sum_bytes, sum_step = variant.sum_bytes, 2 if tokens == 1 else 1
    bar_of_a, n_totals = bars_at + 8 * warps * stages, warps + 1
    wide = PAIR * TILE_ROWS // (2 if gated else 1)  # outputs of an item

    @cuda.jit(device=True, forceinline=True)
    def locate_item(smem, ids, base, item, pairs, E):
        group = int32(uint32(item) // uint32(pairs))
        e, place, here = locate(smem, ids, base, group, E)
        return e, place, here, int32(item - group * pairs)

    @cuda.jit(device=True, forceinline=True)
    def begin(smem, ids, base, group, pair, k_tile, K, sizes, lane):
        """At a K tile of an item: (byte of the weights, where in A the lane's token has these
        128 K, tokens)."""
        k_tiles, _, row_tiles, E, _, _, chosen, _ = sizes
        e, place, here = locate(smem, ids, base, group, E)
        tile = int64(max(e, 0)) * (row_tiles * k_tiles)
        tile += tile_index(int32(PAIR * pair), k_tile, k_tiles)
        source = int64(0)
        if not resident and lane < here:
            row = int32(uint32(slot_at(smem, base, int32(place + lane))) // uint32(chosen))
            source = int64(row) * K + k_tile * TILE_K
        return tile * tile_bytes, source, here

    @cuda.jit(device=True, forceinline=True)
    def following(group, pair, pairs):
        """The next item."""
        pair = int32(pair + 1)
        return (int32(group + 1), int32(0)) if pair == pairs else (group, pair)

    @cuda.jit(device=True, forceinline=True)
    def issue(smem, slot, bar, w, a, walk, ids, base, sizes, lane, of_w, of_a):
        """Issue the copies of a walk's step, of weights (of_w) and of A (of_a), if steps are left
        -> the walk one step further. walk: what `begin` returns, K tile, group, pair, steps."""
        at, source, here, k_tile, group, pair, left = walk
        if left > 0:
            k_tiles, K = sizes[0], int32(a.shape[1])
            ends, size = k_tile == int32(k_tiles - 1), int32(ROW_BYTES)
            if ends:
                size = int32(2 * K - int32(k_tiles - 1) * ROW_BYTES)
            if of_w and lane == 0:
                row_bytes = int32(0 if resident else here * size)
                mbarrier_arrive_expect(smem, bar, int32(weights + row_bytes))
                bulk_copy(smem, slot, w, at, weights, smem, bar)
            if of_a and not resident and lane < here:
                to = int32(slot + weights + lane * pitch)
                bulk_copy(smem, to, a, source, size, smem, bar)
                if ends and size < ROW_BYTES:  # behind the end of A zeros: it could be NaN
                    zero, i = uint32(0), size
                    while i < ROW_BYTES:
                        store_u32x4(smem, to + i, zero, zero, zero, zero)
                        i = int32(i + CHUNK)
                    fence_proxy_async()  # before a copy of another step comes there
            at, source, k_tile = at + TILE_GROUP * tile_bytes, source + TILE_K, int32(k_tile + 1)
            left = int32(left - 1)
            if ends:
                k_tile, (group, pair) = int32(0), following(group, pair, sizes[1])
                if left > 0:
                    at, source, here = begin(smem, ids, base, group, pair, k_tile, K, sizes, lane)
        return at, source, here, k_tile, group, pair, left

    @cuda.jit(device=True, forceinline=True)
    def issue_resident(smem, a, ids, base, first_item, count, sizes, lane):
        """A warp issues copies of a resident A, of the groups of `count` items from first_item."""
        _, pairs, _, E, _, _, chosen, _ = sizes
        size, first, rows = int32(2 * int32(a.shape[1])), int32(0), int32(a_rows)
        if not by_token:
            _, first, _, _ = locate_item(smem, ids, base, first_item, pairs, E)
            _, place, here, _ = locate_item(smem, ids, base, first_item + count - 1, pairs, E)
            rows = int32(place + here - first)
        if lane == 0:
            mbarrier_arrive_expect(smem, bar_of_a, int32(rows * size))
        cuda.syncwarp()
        r = lane
        while r < rows:
            row = r
            if not by_token:
                row = int32(uint32(slot_at(smem, base, int32(first + r))) // uint32(chosen))
            to = int32(a_at + r * resident)
            bulk_copy(smem, to, a, int64(row) * a.shape[1], size, smem, bar_of_a)
            r = int32(r + WARP)

    @cuda.jit(device=True, forceinline=True)
    def zero_tails(smem, a, warp, lane):
        """And stores zeros behind their ends: less than 16 chunks."""
        row, at = warp, int32(2 * int32(a.shape[1]) + CHUNK * lane)
        while row < a_rows:
            if at < resident - PAD:
                zero = uint32(0)
                store_u32x4(smem, a_at + row * resident + at, zero, zero, zero, zero)
            row = int32(row + warps)

    @cuda.jit(device=True, forceinline=True)
    def owner(step, steps):
        """The warp that has a step: the last one that begins at it or before."""
        return int32(uint32(uint32(step + 1) * uint32(warps) - uint32(1)) // steps)

    @cuda.jit(launch_bounds=(threads, 1))
    def few(w, row_scales, a, token_scales, ids, bias, c, sizes):
        """sizes: (K tiles, pairs of row tiles of an expert that have outputs, its row tiles, E, N,
        outputs of a product, slots that share a row of A, all slots), int32."""
        smem = cuda.shared.array(0, uint8, alignment=128)
        counts = cuda.shared.array(experts, int32)
        totals = cuda.shared.array(n_totals, int32)
        acc, factors = cuda.local.array(SUMS, float32), cuda.local.array(4, float32)
        added = cuda.local.array(4, float32)
        slots, rows = cuda.local.array(2, int32), cuda.local.array(2, int32)
        t = int32(cuda.threadIdx.x)
        lane, warp = int32(t & 31), shfl(int32(t >> 5), 0)  # the same in all lanes: one register
        k_tiles, pairs, row_tiles, E, N, outputs, chosen, all_slots = sizes
        base = int32(room * cuda.blockIdx.y)
        n = int32(min(room, int32(all_slots - base)))
        ring, bars = int32(warp * (stages * slot_bytes)), int32(bars_at + warp * (8 * stages))
        if lane == 0:
            for s in range(stages):
                mbarrier_init(smem, bars + 8 * s, 1)
            if resident and warp == 0:
                mbarrier_init(smem, bar_of_a, 1)
            fence_mbarrier_init()
        cuda.syncwarp()
        if resident:
            zero_tails(smem, a, warp, lane)
            if tokens == 1:
                cuda.syncthreads()  # else `route` has some
        # Memory serves requests in their order. So A, which all of a block waits for, comes before
        # its weights, unless the launch before still writes it.
        if not follows:
            griddepcontrol_wait()
            if by_token and warp == 0:
                issue_resident(smem, a, ids, base, int32(0), int32(0), sizes, lane)

        # --- which experts, and which share of their work
        groups = route(smem, counts, totals, ids, base, n, E, t)
        block, blocks = uint32(cuda.blockIdx.x), uint32(cuda.gridDim.x)
        items = uint32(groups * pairs)
        first_item = int32(uint32(items * block) // blocks)
        count = int32(int32(uint32(items * (block + uint32(1))) // blocks) - first_item)
        steps = uint32(count * k_tiles)
        u = int32(uint32(steps * uint32(warp)) // uint32(warps))
        stop = int32(uint32(steps * uint32(warp + 1)) // uint32(warps))

        if not by_token and not follows and resident and count > 0 and warp == 0:
            issue_resident(smem, a, ids, base, first_item, count, sizes, lane)

        # --- the first weights
        item = int32(uint32(u) // uint32(k_tiles))
        k_tile, left = int32(u - item * k_tiles), int32(stop - u)
        item = int32(item + first_item)
        group = int32(uint32(item) // uint32(pairs))
        pair = int32(item - group * pairs)
        walk = int64(0), int64(0), int32(0), k_tile, group, pair, left
        if left > 0:
            K = int32(a.shape[1])
            at, source, here = begin(smem, ids, base, group, pair, k_tile, K, sizes, lane)
            walk = at, source, here, k_tile, group, pair, left
        first = walk
        for s in range(stages):
            slot, bar = ring + s * slot_bytes, bars + 8 * s
            walk = issue(smem, slot, bar, w, a, walk, ids, base, sizes, lane, True, not follows)
        # Whoever is launched next may read ids before it waits: they are older than this launch.
        griddepcontrol_launch_dependents()
        if follows:
            griddepcontrol_wait()
            if resident and warp == 0 and (count > 0 or by_token):
                issue_resident(smem, a, ids, base, first_item, count, sizes, lane)
            for s in range(0 if resident else stages):
                slot, bar = ring + s * slot_bytes, bars + 8 * s
                first = issue(smem, slot, bar, w, a, first, ids, base, sizes, lane, False, True)
        # of the warp's items row scales, which would be waited for at the end of each
        if lane * k_tiles < k_tile + left:
            e, _, _, of_lane = locate_item(smem, ids, base, int32(item + lane), pairs, E)
            row = max(e, 0) * (row_tiles * TILE_ROWS) + PAIR * TILE_ROWS * of_lane
            prefetch_l2(row_scales, row, 4 * PAIR * TILE_ROWS)

        # --- slots without an expert
        if tokens > 1:
            i = int32(block)
            while i < n:
                if expert(ids, base + i, E) < 0:
                    j = t
                    while j < outputs:
                        store(c, int64(base + i) * outputs + j, float32(NAN))
                        j = int32(j + threads)
                i = int32(i + int32(blocks))

        # --- the stream
        cuda.syncwarp()  # zeros behind the end of A
        s, parity, quad = int32(0), int32(0), int32(lane & 3)
        first_place = int32(0)
        if resident and (count > 0 or by_token):  # also in warps without work: no copy outlives it
            if not by_token:
                _, first_place, _, _ = locate_item(smem, ids, base, first_item, pairs, E)
            mbarrier_wait(smem, bar_of_a, 0)
        while u < stop:
            e, place, here = locate(smem, ids, base, group, E)
            row = int32(PAIR * TILE_ROWS * pair)
            begins, left = k_tile == 0, int32(min(int32(stop - u), int32(k_tiles - k_tile)))
            load_scales(
                factors, added, row_scales, bias, max(e, 0), row, row_tiles * TILE_ROWS, N, begins,
                lane,
            )  # fmt: skip
            for column in range(columns):
                at = min(int32(quad * columns + column), int32(here - 1))
                slots[column] = slot_at(smem, base, int32(place + at))
                rows[column] = int32(uint32(slots[column]) // uint32(chosen))
            for i in range(SUMS):
                acc[i] = 0
            offsets, of_item = places(lane, here, resident or pitch), int32(0)
            if resident and not by_token:
                of_item = int32((place - first_place) * resident)
            elif resident and tokens > 1:  # of `ldmatrix`, as in `places`
                at = int32(place + min(int32(lane & 7), int32(here - 1)))
                of_row = int32(uint32(slot_at(smem, base, at)) // uint32(chosen))
                at = int32(of_row * resident + 16 * (lane >> 3))
                offsets = ((at, at),)
            of_item = int32(a_at + of_item)
            ends = k_tile + left == k_tiles
            u = int32(u + left)
            while left > 0:
                slot, bar = int32(ring + s * slot_bytes), int32(bars + 8 * s)
                mbarrier_wait(smem, bar, parity)
                at = int32(slot + weights)
                if resident:
                    at = int32(of_item + ROW_BYTES * k_tile)
                    k_tile = int32(k_tile + 1)
                multiply(acc, smem, slot, at, 0, offsets, here, lane)
                cuda.syncwarp()
                walk = issue(smem, slot, bar, w, a, walk, ids, base, sizes, lane, True, True)
                left, s = int32(left - 1), int32(s + 1)
                if s == stages:
                    s, parity = int32(0), int32(parity ^ 1)
            finish(acc)
            finished(acc, factors, added, token_scales, rows)
            if begins and ends:
                write(acc, c, slots, int32(wide * pair), outputs, here, e >= 0, lane)
            else:
                # one that ends with another warp is the last of this one, whose ring is free
                to = int32((ring if begins else sums_at + sum_bytes * warp) + 4 * lane)
                for i in range(0, SUMS, sum_step):
                    store_f32(smem, to + 4 * WARP * (i // sum_step), acc[i])
            k_tile, (group, pair) = int32(0), following(group, pair, pairs)

        # --- items of several warps
        cuda.syncthreads()
        i = warp
        while i < count:
            v = owner(int32(i * k_tiles), steps)
            until = owner(int32(int32(i + 1) * k_tiles - 1), steps)
            if v < until:
                e, place, here, pair = locate_item(smem, ids, base, first_item + i, pairs, E)
                for column in range(columns):
                    at = min(int32(quad * columns + column), int32(here - 1))
                    slots[column] = slot_at(smem, base, int32(place + at))
                at = int32(v * (stages * slot_bytes) + 4 * lane)
                for j in range(0, SUMS, sum_step):
                    acc[j] = load_f32(smem, at + 4 * WARP * (j // sum_step))
                while v < until:
                    v = owner(int32(uint32(steps * uint32(v + 1)) // uint32(warps)), steps)
                    at = int32(sums_at + sum_bytes * v + 4 * lane)
                    for j in range(0, SUMS, sum_step):
                        acc[j] += load_f32(smem, at + 4 * WARP * (j // sum_step))
                write(acc, c, slots, int32(wide * pair), outputs, here, e >= 0, lane)
            i = int32(i + warps)

    return few


# --- the launch -----------------------------------------------------------------------------------


def resident_rows(request: ExpertsRequest, tokens: int, room: int) -> tuple[int, bool]:
    """How many rows of A a thread block needs at most, and whether these are those of all tokens or
    of its groups of up to `tokens`."""
    slots, pairs = min(room, request.slots), ceil_div(request.n, PAIR * TILE_ROWS)
    chosen = min(request.experts, slots) if tokens > 1 else slots  # experts, or groups of one
    groups = chosen + (slots - chosen) // tokens
    items = ceil_div(groups * pairs, min(multiprocessors(), request.slots * pairs))
    touched = min(groups, (items - 2) // pairs + 2 if items > 1 else 1)
    of_groups = min(slots, touched * tokens)
    by_token = not request.per_slot and request.tokens <= of_groups
    return (request.tokens if by_token else of_groups), by_token


def variant_of(request: ExpertsRequest, scaled: bool) -> Variant:
    """The first of `H200_SHAPES` that fits. ValueError where none does."""
    stored_as = storage_format(FORMATS[request.format])
    tokens = next((one for one in COLUMNS if one >= request.tokens), COLUMNS[-1])
    room = next((one for one in ROOM if one >= request.slots), ROOM[-1])
    experts = ceil_div(request.experts, EXPERTS) * EXPERTS
    weights = PAIR * tile_format(stored_as.name).tile_bytes
    rows, by_token = resident_rows(request, tokens, room)
    pitch = ceil_div(request.k, TILE_K) * ROW_BYTES + PAD
    streamed = weights + tokens * (ROW_BYTES + (PAD if tokens > 1 else 0))
    ways = [(*shape, weights, pitch, rows, by_token) for shape in H200_RESIDENT]
    ways += [(*shape, streamed, 0, 0, False) for shape in H200_SHAPES]
    for way in ways:
        found = Variant(tokens, *way, room, experts, request.gate, request.follows, scaled)
        if found.shared + 4 * (experts + found.warps) + 128 <= shared_memory():
            return found
    raise ValueError(f"{shared_memory()} bytes of shared memory are too few for experts")


def launches(
    request: ExpertsRequest, given: ExpertsOperands, machine: Machine
) -> tuple[Launch, ...]:
    """All launches: the pass that rounds float32 A, the product, and the sum over a token's
    experts."""
    activations = float16_rows(given.a, machine)
    a, *scales = activations.arrays
    if request.router is not None and summed.suits(request):
        return (*activations.launches, summed.launch(request, given, activations.arrays))
    name = storage_format(FORMATS[request.format]).name
    variant = variant_of(request, bool(scales))
    c = given.out
    if request.router is not None:
        c = machine.empty((request.tokens, request.chosen, request.n), np.float32)
    run = kernel(name, variant, dtype_name(a), dtype_name(c), request.ids, request.bias)
    pairs = ceil_div(request.n, PAIR * TILE_ROWS)
    sizes = (
        ceil_div(request.k, TILE_K), pairs, request.row_tiles, request.experts, request.n,
        request.outputs, 1 if request.per_slot else request.chosen, request.slots,
    )  # fmt: skip
    unused = given.row_scales  # where there are no token scales, or no bias
    args = (
        given.packed, given.row_scales, a, scales[0] if scales else unused, given.ids,
        unused if given.bias is None else given.bias, c, tuple(map(np.int32, sizes)),
    )  # fmt: skip
    grid = min(multiprocessors(), request.slots * pairs), ceil_div(request.slots, variant.room)
    own = Launch(run, grid, (WARP * variant.warps,), args, variant.shared, overlap=True)
    if request.router is None:
        return (*activations.launches, own)
    return (*activations.launches, own, weighted.launch(c, given.router, given.out))


KERNEL: Final = ExpertsKernel(
    name="few",
    title="experts of few tokens",
    launches=launches,
    formats=tuple(name for name in KNOWN if name != "q2_k"),  # kernels.decode.product: why
)
