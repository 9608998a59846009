"""Tile heuristics of steps 17 and 18: the work of thread blocks and warps, and their shared memory.

Weights are read once. So every multiprocessor should read equally many, with enough of them in
flight. A thread block takes some row tiles of C and all of K: no partial sums leave it. Its warps
share K; where their sums would take too much shared memory, some of them share the row tiles
instead (`warps_n`). A is copied once and kept where several pairs of row tiles need it. Where one
does, or A does not fit, each tile of weights brings its tile of A into the same slot of the ring.

    ring: [warp][slot][weights of a pair, (A)] | mbarriers | A: [warp along K] | row scales | sums

Step 17 teaches this. Constants that begin with H200 were measured on one.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from qformats import BLOCK
from qformats.repack import TILE_K, TILE_ROWS
from qformats.storage import StorageFormat
from steps.contract import Family, Shape, ceil_div, multiprocessors, shared_memory
from steps.kernels.decode.copies import PAD, ROW_BYTES
from steps.kernels.decode.product import BLOCKS, PAIR
from steps.kernels.decode.product_a8 import SCALE_BYTES
from steps.kernels.decode.quantize import SIDE_BY_SIDE
from steps.kernels.parts.weights.storage_formats import tile_format

MOST_TOKENS: Final = 16
"""Of a thread block: the columns of two mma."""

FUSED_TOKENS: Final = 4
"""Up to so many the kernel quantizes float32 A itself; more would take longer than a pass."""

FUSED_BYTES: Final = 52 * 1024
"""Q8_1 that a thread block makes itself at most."""

WARPS: Final = (16, 8, 4)
"""Of a thread block, the first that fit; 16 leave each thread 128 registers."""

H200_STAGES: Final = {
    "A8": {1: 4, 2: 3, 4: 3, 8: 2, 16: 2},
    "A16": {1: 2, 2: 2, 4: 2, 8: 2, 16: 2},
}
"""Slots of a warp's ring at most, by tokens: more in flight do not arrive sooner, and A queues
behind those of all SMs."""

H200_PREFETCHED: Final = 2
"""Slots issued before A where a warp quantizes it and has several pairs of row tiles, else 1."""

H200_AHEAD: Final = 4
"""Blocks of A that a lane has a part of at a time, at most, where the warp quantizes them."""

SUMS: Final = 64 * 1024
"""Bytes for the sums of a thread block's warps at most."""

MANY_ROW_TILES: Final = 16
"""Of a thread block: from here on there may be more blocks than multiprocessors."""

WAVES: Final = 8
"""Thread blocks to a multiprocessor, one after the other, at most."""

ALONE: Final = 116 * 1024
"""Bytes with which a block has an SM to itself: of two blocks each would get half."""

Place = Literal["kept", "in_slots", "quantized"]
"""How a warp's part of A comes to shared memory: copied once and kept; a tile of it with each tile
of weights, in the slots of the ring; or quantized by the warp, and kept."""


@dataclass(frozen=True, slots=True)
class Variant:
    """What a kernel is compiled for.

    tokens    : columns of a thread block
    warps     : of a thread block; `warps_n` of them lie along N, the others along K
    stages    : slots of a warp's ring; `prefetched` of them are issued before A
    slot_bytes: of a slot: the packed tiles of a pair of row tiles, and A where it lies there
    ahead     : blocks of A that a lane has a part of at a time, where the warp quantizes them
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

    @property
    def warps_k(self) -> int:
        """Warps along K, each with a part of it."""
        return self.warps // self.warps_n

    @property
    def bars_at(self) -> int:
        """The byte where the mbarriers begin: one for each slot, and one for each warp's A."""
        return self.warps * self.stages * self.slot_bytes

    @property
    def a_at(self) -> int:
        """The byte where A begins."""
        return self.bars_at + ceil_div(8 * self.warps * (self.stages + 1), 128) * 128


@dataclass(frozen=True, slots=True)
class TileConfiguration:
    """The work of a product's thread blocks.

    k_tiles, row_tiles: packed tiles along K of a warp; row tiles of a thread block
    pitch        : bytes from token to token of float16 A
    part_bytes   : of a warp's part of A
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
    fmt: StorageFormat, shape: Shape, family: Family, quantized: bool
) -> TileConfiguration:
    """The first that fits, in this order: many warps, A kept, one block to a multiprocessor,
    warps along K, many stages. quantized: A is float32, and the kernel quantizes it.

    An invariant product (`Shape.invariant`) has as many warps along K as one of `MOST_TOKENS`
    tokens: they alone decide the order of a sum."""
    room, parts = shared_memory(), None
    if shape.invariant and shape.m < MOST_TOKENS:
        most_tokens = replace(shape, m=MOST_TOKENS)
        parts = tile_configuration(fmt, most_tokens, family, quantized).variant.warps_k
    places: tuple[Place, ...] = ("quantized",) if quantized else ("kept", "in_slots")
    shares_n = (1,) if quantized else (1, 2, 4, 8, 16)
    blocks_n = max(1, multiprocessors() // ceil_div(shape.m, MOST_TOKENS))
    one_wave = ceil_div(ceil_div(shape.n, TILE_ROWS), blocks_n)
    waves = range(1, WAVES + 1 if one_wave >= MANY_ROW_TILES else 2)
    # sixteen tokens, and minima or scales of 16 K: more than 128 registers a thread
    tile = tile_format(fmt.name)
    tight = family == "A16" and columns(shape.m) == 16 and (tile.minimum or tile.group < BLOCK)
    fitting = WARPS[1:] if tight else WARPS
    for warps, place, wave, warps_n in itertools.product(fitting, places, waves, shares_n):
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
        most = H200_STAGES[family][columns(shape.m)]
        most = max(2, min(most, k_tiles * pairs))
        for stages in range(most, 1, -1):
            found = _configuration(
                fmt, shape, family, place, warps, warps_n, stages, k_tiles, row_tiles
            )
            if found.shared <= room:
                return replace(found, shared=max(found.shared, min(ALONE, room)))
    raise ValueError(f"{room} bytes of shared memory are too few for M={shape.m} N={shape.n}")


def sum_bytes(m: int) -> int:
    """Of a warp's sums of a row tile."""
    return 4 * TILE_ROWS * columns(m)


def _configuration(
    fmt: StorageFormat, shape: Shape, family: Family, place: Place,
    warps: int, warps_n: int, stages: int, k_tiles: int, row_tiles: int,
) -> TileConfiguration:  # fmt: skip
    """That of such a work, in as much shared memory as it needs."""
    tokens, pairs, kept = columns(shape.m), ceil_div(row_tiles, PAIR * warps_n), place != "in_slots"
    rows, a_tiles = tokens if place == "quantized" else min(shape.m, tokens), k_tiles if kept else 1
    pitch = ROW_BYTES * a_tiles + (PAD if rows > 1 else 0)
    a_bytes = rows * pitch if family == "A16" else a_tiles * a8_tile_bytes(rows)
    slot_bytes = PAIR * tile_format(fmt.name).tile_bytes + (0 if kept else a_bytes)
    ahead = min(H200_AHEAD, ceil_div(k_tiles * BLOCKS * tokens, SIDE_BY_SIDE))
    many = place == "quantized" and pairs > 1
    variant = Variant(
        family, tokens, warps, warps_n, stages, H200_PREFETCHED if many else 1, place,
        slot_bytes, ahead if place == "quantized" else 1,
    )  # fmt: skip
    part_bytes = a_bytes if kept else 0
    row_scales_at = variant.a_at + variant.warps_k * part_bytes
    sums_at, sums_stride = row_scales_at + 4 * TILE_ROWS * row_tiles, row_tiles * sum_bytes(shape.m)
    shared = sums_at + variant.warps_k * sums_stride
    if pairs == warps_n == 1:  # a warp stores no sums before it has read all of its ring
        sums_at, sums_stride, shared = 0, stages * slot_bytes, sums_at
    return TileConfiguration(
        variant, k_tiles, row_tiles, pitch, part_bytes, row_scales_at, sums_at, sums_stride, shared
    )
