"""Tile heuristics of steps 17 and 18: the work of thread blocks and warps, and their shared memory.

Weights are read once. So every multiprocessor should read equally many, with enough of them in
flight. A thread block takes some row tiles of C and all of K: no partial sums leave it. Its warps
share K; where their sums would take too much shared memory, some of them share the row tiles
instead (`warps_n`). A is copied once and kept where several pairs of row tiles need it. Where one
does, or A does not fit, each tile of weights brings its tile of A into the same slot of the ring.
From two tokens on step 18 brings 16-bit A so wherever it fits, in boxes that lie beside the ring
and begin at multiples of 1024 bytes; where there is room, boxes are kept for further pairs.

    ring: [warp][slot][weights of a pair, (A)] | mbarriers | A: [warp along K], or boxes:
    [warp][slot] | row scales | sums

Step 17 teaches this. Constants that begin with H200 were measured on one.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final, Literal

import numpy as np
from numba import cuda, int32, int64, uint32

from qformats import BLOCK
from qformats.repack import TILE_GROUP, TILE_K, TILE_ROWS
from qformats.storage import StorageFormat
from steps.blocks.q8_1 import q8_1_mma_order
from steps.contract import (
    Activations,
    Family,
    Machine,
    MakeActivations,
    Shape,
    ceil_div,
    multiprocessors,
    shared_memory,
)
from steps.instructions import bulk_copy
from steps.instructions.tensor_map import BOX_ALIGNMENT
from steps.kernels.decode.copies import PAD, ROW_BYTES, SIDE_BY_SIDE
from steps.kernels.decode.product import (
    BLOCKS,
    PAIR,
    SCALE_BYTES,
    Product,
    boxes_stride,
    product_a8,
    product_a16,
)
from steps.kernels.parts.activations.layouts import float16_rows, float32_quantized_inside
from steps.kernels.parts.weights.codes import tile_index
from steps.kernels.parts.weights.storage_formats import tile_format

MOST_TOKENS: Final = 16
"""Of a thread block: the columns of two mma."""

FUSED_TOKENS: Final = 4
"""Up to so many the kernel quantizes float32 A itself; more would take longer than a pass."""

FUSED_BYTES: Final = 52 * 1024
"""Q8_1 that a thread block makes itself at most."""

WARPS: Final = (16, 8, 4)
"""Of a thread block, the first that fit; 16 leave each thread 128 registers."""

H200_LEAST_TILES: Final = 4
"""Tiles of a warp, each a pair of packed tiles, from which 16 warps are faster than 8 where 16
tokens meet scaled weights."""

H200_STAGES: Final = {
    "A8": {1: 4, 2: 3, 4: 3, 8: 2, 16: 2},
    "A16": {1: 2, 2: 2, 4: 2, 8: 2, 16: 2},
}
"""Slots of a warp's ring at most, by tokens: more in flight do not arrive sooner, and A queues
behind those of all SMs."""

H200_PREFETCHED: Final = 2
"""Slots issued before A where a warp quantizes it and has several pairs of row tiles, else 1."""

H200_AHEAD: Final = 8
"""Blocks of A that a lane has a part of at a time, at most, where the warp quantizes them."""

SUMS: Final = 64 * 1024
"""Bytes for the sums of a thread block's warps at most."""

MANY_ROW_TILES: Final = 16
"""Of a thread block: from here on there may be more blocks than multiprocessors."""

WAVES: Final = 8
"""Thread blocks to a multiprocessor, one after the other, at most."""

BOX_TOKENS: Final = 2
"""Columns from which A comes in boxes."""

ALONE: Final = 116 * 1024
"""Bytes with which a block has an SM to itself: of two blocks each would get half."""

Place = Literal["kept", "with_weights", "in_boxes", "kept_boxes", "quantized"]
"""How a warp's part of A comes to shared memory: copied once and kept; a tile of it with each tile
of weights, in the slots of the ring or in boxes beside it; in boxes with the weights of the warp's
first pair of row tiles, and kept for the others; or quantized by the warp, and kept."""


@dataclass(frozen=True, slots=True)
class Variant:
    """What a kernel is compiled for.

    tokens    : columns of a thread block
    warps     : of a thread block; `warps_n` of them lie along N, the others along K
    stages    : slots of a warp's ring; `prefetched` of them are issued before A
    slot_bytes: of a slot: the packed tiles of a pair of row tiles, and A where it lies there
    ahead     : blocks of A that a lane has a part of at a time, where the warp quantizes them
    scaled    : whether 16-bit A is multiplied by scaled weights (`scales_weights`)
    """

    family: Family
    tokens: int
    warps: int
    warps_n: int
    stages: int
    prefetched: int
    place: Place
    slot_bytes: int
    ahead: int
    scaled: bool = False

    @property
    def warps_k(self) -> int:
        """Warps along K, each with a part of it."""
        return self.warps // self.warps_n

    @property
    def in_boxes(self) -> bool:
        """Whether A comes in boxes of a tensor map."""
        return self.place in ("in_boxes", "kept_boxes")

    @property
    def bars_at(self) -> int:
        """The byte where the mbarriers begin: one for each slot, and one for each warp's A."""
        return self.warps * self.stages * self.slot_bytes

    @property
    def a_at(self) -> int:
        """The byte where A begins."""
        end = self.bars_at + 8 * self.warps * (self.stages + 1)
        alignment = BOX_ALIGNMENT if self.in_boxes else 128
        return ceil_div(end, alignment) * alignment


@dataclass(frozen=True, slots=True)
class TileConfiguration:
    """The work of a product's thread blocks.

    k_tiles, row_tiles: packed tiles along K of a warp; row tiles of a thread block
    pitch        : bytes from token to token of float16 A
    part_bytes   : of a warp's part of A, or of its boxes
    row_scales_at: the byte where row scales begin
    sums_at, sums_stride: where the sums begin, and bytes from one warp along K to the next
    shared       : bytes of a thread block
    """

    variant: Variant
    k_tiles: int
    row_tiles: int
    pitch: int
    part_bytes: int
    row_scales_at: int
    sums_at: int
    sums_stride: int
    shared: int

    def sizes(self, k: int) -> tuple[np.int32, ...]:
        """What a kernel is told of them: packed tiles of a row of `k` first."""
        sizes = (
            ceil_div(k, TILE_K), self.k_tiles, self.row_tiles, self.pitch, self.part_bytes,
            self.row_scales_at, self.sums_at, self.sums_stride,
        )  # fmt: skip
        return tuple(map(np.int32, sizes))

    def grid(self, m: int, n: int) -> tuple[int, int, int]:
        """Thread blocks: along N, and for groups of `MOST_TOKENS` tokens."""
        return ceil_div(ceil_div(n, TILE_ROWS), self.row_tiles), 1, ceil_div(m, MOST_TOKENS)


def fused(m: int, k: int) -> bool:
    """Whether the kernel quantizes float32 A[m, k] itself."""
    tokens = columns(m)
    return m <= FUSED_TOKENS and tokens * k // TILE_K * a8_tile_bytes(1) <= FUSED_BYTES


def columns(m: int) -> int:
    """Of a thread block, for m tokens."""
    return next(tokens for tokens in (1, 2, 4, 8, 16) if tokens >= min(m, MOST_TOKENS))


def a8_tile_bytes(rows: int) -> int:
    """Q8_1 of 128 K: codes, scales and sums."""
    return rows * (TILE_K + BLOCKS * SCALE_BYTES)


def tile_configuration(
    fmt: StorageFormat,
    shape: Shape,
    family: Family,
    quantized: bool,
    mapped: bool = False,
    kind: str = "float16",
    least_tiles: int = 0,
) -> TileConfiguration:
    """The first that fits, in this order: many warps, A kept, one block to a multiprocessor,
    warps along K, many stages. quantized: A is float32, and the kernel quantizes it. mapped: of
    two tokens or more the kernel copies A in boxes, of 2, 4, 8 or 16, wherever these fit.
    kind: the dtype of A. least_tiles: of 16 tokens of scaled weights 16 warps have so many tiles
    each, or there are fewer warps.

    An invariant product (`Shape.invariant`) has as many warps along K as one of `MOST_TOKENS`
    tokens: they alone decide the order of a sum."""
    room, parts = shared_memory(), None
    if shape.invariant and shape.m < MOST_TOKENS:
        most_tokens = replace(shape, m=MOST_TOKENS)
        parts = tile_configuration(
            fmt, most_tokens, family, quantized, mapped, kind
        ).variant.warps_k
    boxes = mapped and family == "A16" and columns(shape.m) >= BOX_TOKENS
    # boxes rather than A that is kept, and rather than more warps
    places: tuple[tuple[Place, ...], ...] = (("kept", "with_weights"),)
    if boxes:
        places = ("in_boxes",), ("kept", "with_weights")
    elif quantized:
        places = (("quantized",),)
    shares_n = (1,) if quantized else (1, 2, 4, 8, 16)
    blocks_n = max(1, multiprocessors() // ceil_div(shape.m, MOST_TOKENS))
    one_wave = ceil_div(ceil_div(shape.n, TILE_ROWS), blocks_n)
    waves = range(1, WAVES + 1 if one_wave >= MANY_ROW_TILES else 2)
    # sums of sixteen tokens, and minima or scales of 16 K: more than 128 registers a thread
    tile, scaled = tile_format(fmt.name), family == "A16" and scales_weights(fmt, shape, kind)
    tight = family == "A16" and columns(shape.m) == 16 and (tile.minimum or tile.group < BLOCK)
    tight = tight and not scaled
    fitting = WARPS[1:] if tight else WARPS
    many = scaled and columns(shape.m) == MOST_TOKENS and not shape.invariant
    orders = [itertools.product(fitting, some, waves, shares_n) for some in places]
    for warps, place, wave, warps_n in itertools.chain(*orders):
        row_tiles = ceil_div(ceil_div(shape.n, TILE_ROWS), wave * blocks_n)
        warps_k = warps // warps_n
        if warps_n > min(warps, ceil_div(row_tiles, PAIR)) or parts not in (None, warps_k):
            continue
        if place == "kept" and row_tiles <= PAIR:
            continue
        if warps_k * row_tiles * sum_bytes(shape.m) > SUMS:
            continue
        k_tiles = ceil_div(ceil_div(shape.k, TILE_K), warps_k)
        pairs = ceil_div(row_tiles, PAIR * warps_n)
        if many and warps > WARPS[1] and k_tiles * pairs < least_tiles:
            continue
        most = H200_STAGES[family][columns(shape.m)]
        most = max(2, min(most, k_tiles * pairs))
        kept = ("kept_boxes",) if place == "in_boxes" and pairs > 1 else ()
        for stages, where in itertools.product(range(most, 1, -1), (*kept, place)):
            found = _configuration(
                fmt, shape, family, where, warps, warps_n, stages, k_tiles, row_tiles
            )
            found = replace(found, variant=replace(found.variant, scaled=scaled))
            if found.shared <= room:
                return replace(found, shared=max(found.shared, min(ALONE, room)))
    raise ValueError(f"{room} bytes of shared memory are too few for M={shape.m} N={shape.n}")


def scales_weights(fmt: StorageFormat, shape: Shape, kind: str) -> bool:
    """Whether float16 A is multiplied by scaled weights. Of an invariant product the number of
    tokens must not decide it."""
    many = columns(shape.m) == MOST_TOKENS and not shape.invariant
    return kind == "float16" and (tile_format(fmt.name).minimum or fmt.bits == 5 or many)


def sum_bytes(m: int) -> int:
    """Of a warp's sums of a row tile."""
    return 4 * TILE_ROWS * columns(m)


def _configuration(
    fmt: StorageFormat, shape: Shape, family: Family, place: Place,
    warps: int, warps_n: int, stages: int, k_tiles: int, row_tiles: int,
) -> TileConfiguration:  # fmt: skip
    """That of such a work, in as much shared memory as it needs."""
    tokens, pairs = columns(shape.m), ceil_div(row_tiles, PAIR * warps_n)
    with_weights = place == "with_weights"
    rows = tokens if place == "quantized" else min(shape.m, tokens)
    a_tiles = k_tiles if place in ("kept", "quantized") else 1
    pitch = ROW_BYTES * a_tiles + (PAD if rows > 1 else 0)
    a_bytes = rows * pitch if family == "A16" else a_tiles * a8_tile_bytes(rows)
    slot_bytes = PAIR * tile_format(fmt.name).tile_bytes + (a_bytes if with_weights else 0)
    ahead = min(H200_AHEAD, ceil_div(k_tiles * BLOCKS * tokens, SIDE_BY_SIDE))
    many = place == "quantized" and pairs > 1
    variant = Variant(
        family, tokens, warps, warps_n, stages, H200_PREFETCHED if many else 1, place,
        slot_bytes, ahead if place == "quantized" else 1,
    )  # fmt: skip
    parts, part_bytes = variant.warps_k, 0 if with_weights else a_bytes
    if variant.in_boxes:
        places = stages if place == "in_boxes" else k_tiles
        parts, part_bytes = warps, places * boxes_stride(tokens)
    row_scales_at = variant.a_at + parts * part_bytes
    sums_at, sums_stride = row_scales_at + 4 * TILE_ROWS * row_tiles, row_tiles * sum_bytes(shape.m)
    shared = sums_at + variant.warps_k * sums_stride
    if pairs == warps_n == 1:  # a warp stores no sums before it has read all of its ring
        sums_at, sums_stride, shared = 0, stages * slot_bytes, sums_at
    return TileConfiguration(
        variant, k_tiles, row_tiles, pitch, part_bytes, row_scales_at, sums_at, sums_stride, shared
    )


# --- the packed tiles that a warp reads, one after the other, in pairs of row tiles ---------------
#
# A warp has a part of K to itself, in every `warps_n`-th pair of row tiles of its thread block:
#
#                  K -->
#               warp 0    warp 1    warp 2    ...     the packed tiles of a pair and of the same
#             |---------|---------|---------|--       128 K lie side by side in memory, and also in
#     pair 0  | 0 1 2 3 | 0 1 2 3 | 0 1 2 3 |         a slot of the warp's ring
#     pair 1  | 4 5 6 7 | 4 5 6 7 | 4 5 6 7 |
#     pair 2  | 8 ...   | 8 ...   | 8 ...   |
#
# Pairs begin at even row tiles. A thread block's first and last row tile may be half of one.
# Step 17 teaches this.
#
# `gated_walk`: a pair is a row tile of gates and the same one of ups, which lie half of the matrix
# apart. Row tiles are counted as if the two took turns: 2 i is tile i of gates, 2 i + 1 of ups.


@dataclass(frozen=True, slots=True)
class PairWalk:
    """Device functions of a warp.

    own_part(sizes, N, warp) -> (pair, part)
        the row tile where its first pair begins, and its part of the work; sizes: those of
        `steps.kernels.decode.tiles.TileConfiguration`
    bulk_copy(smem, to, w, at, size, bar)
        a thread issues the bulk copies of a walk's weights to byte `to`
    bulk_copy_scales(smem, to, row_scales, first, size, bar)
        and those of the row scales of a thread block's rows, `size` bytes, from row tile first on
    start(pair, part) -> walk     at the first K tile of the pair from row tile `pair` on
    advance(walk, part) -> walk   one pair of packed tiles further along K, or at the next rows
    is_over(walk, part) -> bool   whether nothing is left

    part: (row tile where the block begins, and where it ends; K tile where the warp begins, how
          many K tiles it has, K tiles of a row)
    walk: (byte of the weights, bytes there, where in a slot they belong, K tile, row tile of the
          pair)
    """

    own_part: Any
    start: Any
    advance: Any
    is_over: Any
    bulk_copy: Any
    bulk_copy_scales: Any


@cuda.jit(device=True, forceinline=True)
def is_over(walk, part):
    _, end, _, _, _ = part
    _, _, _, _, pair = walk
    return pair >= end


@cache
def pair_walk(tile_bytes: int, warps_n: int) -> PairWalk:
    """The device functions for packed tiles of so many bytes, for capture in a kernel factory."""

    @cuda.jit(device=True, forceinline=True)
    def own_part(sizes, N, warp):
        all_k_tiles, k_tiles, row_tiles, _, _, _, _, _ = sizes
        k0 = int32(min(int32(warp // warps_n * k_tiles), all_k_tiles))
        count = int32(min(k_tiles, int32(all_k_tiles - k0)))
        first = int32(cuda.blockIdx.x * row_tiles)
        all_row_tiles = int32(uint32(N + TILE_ROWS - 1) // uint32(TILE_ROWS))
        end = int32(min(int32(first + row_tiles), all_row_tiles))
        pair = int32((first & -PAIR) + PAIR * (warp % warps_n))
        return pair, (first, end, k0, count, all_k_tiles)

    @cuda.jit(device=True, forceinline=True)
    def start(pair, part):
        first, end, k0, count, all_k_tiles = part
        if count == 0:
            pair = end
        low, high = int32(max(pair, first)), int32(min(int32(pair + PAIR), end))
        at = int64(tile_index(low, k0, all_k_tiles)) * tile_bytes
        return at, int32((high - low) * tile_bytes), int32((low - pair) * tile_bytes), k0, pair

    @cuda.jit(device=True, forceinline=True)
    def advance(walk, part):
        _, _, k0, count, _ = part
        at, size, into, k_tile, pair = walk
        at, k_tile = at + TILE_GROUP * tile_bytes, int32(k_tile + 1)
        if k_tile == int32(k0 + count):
            at, size, into, k_tile, pair = start(int32(pair + PAIR * warps_n), part)
        return at, size, into, k_tile, pair

    @cuda.jit(device=True, forceinline=True)
    def copy(smem, to, w, at, size, bar):
        bulk_copy(smem, to, w, at, size, smem, bar)

    @cuda.jit(device=True, forceinline=True)
    def copy_scales(smem, to, row_scales, first, size, bar):
        bulk_copy(smem, to, row_scales, first * TILE_ROWS, size, smem, bar)

    return PairWalk(own_part, start, advance, is_over, copy, copy_scales)


@cache
def gated_walk(tile_bytes: int, warps_n: int) -> PairWalk:
    """The same for a matrix of gates and ups, as many rows of each, a multiple of 128, where thread
    blocks have even row tiles. N is the number of gates. Gates come first in shared memory."""
    of_both = pair_walk(tile_bytes, warps_n).own_part

    @cuda.jit(device=True, forceinline=True)
    def own_part(sizes, N, warp):
        return of_both(sizes, int32(2 * N), warp)

    @cuda.jit(device=True, forceinline=True)
    def start(pair, part):
        _, end, k0, count, all_k_tiles = part
        if count == 0:
            pair = end
        at = int64(tile_index(int32(pair >> 1), k0, all_k_tiles)) * tile_bytes
        return at, int32(PAIR * tile_bytes), int32(0), k0, pair

    @cuda.jit(device=True, forceinline=True)
    def advance(walk, part):
        _, _, k0, count, _ = part
        at, size, into, k_tile, pair = walk
        at, k_tile = at + TILE_GROUP * tile_bytes, int32(k_tile + 1)
        if k_tile == int32(k0 + count):
            at, size, into, k_tile, pair = start(int32(pair + PAIR * warps_n), part)
        return at, size, into, k_tile, pair

    @cuda.jit(device=True, forceinline=True)
    def copy(smem, to, w, at, size, bar):
        half, ups = int32(size >> 1), at + (int64(w.size) >> 1)
        bulk_copy(smem, to, w, at, half, smem, bar)
        bulk_copy(smem, to + half, w, ups, half, smem, bar)

    @cuda.jit(device=True, forceinline=True)
    def copy_scales(smem, to, row_scales, first, size, bar):
        half, at = int32(size >> 1), int32((first >> 1) * TILE_ROWS)
        ups = int32(at + (int32(row_scales.size) >> 1))
        bulk_copy(smem, to, row_scales, at, half, smem, bar)
        bulk_copy(smem, to + half, row_scales, ups, half, smem, bar)

    return PairWalk(own_part, start, advance, is_over, copy, copy_scales)


def product_of(name: str, variant: Variant, kind: str) -> Product:
    """The product of a storage format with A of a dtype."""
    if variant.family == "A8":
        return product_a8(name, variant.tokens)
    return product_a16(name, kind, variant.tokens, variant.in_boxes, variant.scaled)


# --- A of the decode steps: float16 as it is, or Q8_1, which for few tokens the kernel makes itself
#
# Step 17 teaches this.


def q8_1(a: Any, machine: Machine) -> Activations:
    """Float32 A itself for few tokens, else prequantized: that is too much for each thread block
    to do again."""
    return (float32_quantized_inside if fused(*a.shape) else q8_1_mma_order)(a, machine)


activations: Final[Mapping[Family, MakeActivations]] = {"A16": float16_rows, "A8": q8_1}
