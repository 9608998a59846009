"""The packed tiles that a warp reads, one after the other, in pairs of row tiles.

A warp has a part of K to itself, in every `warps_n`-th pair of row tiles of its thread block:

                 K -->
              warp 0    warp 1    warp 2    ...     the packed tiles of a pair and of the same
            |---------|---------|---------|--       128 K lie side by side in memory, and also in
    pair 0  | 0 1 2 3 | 0 1 2 3 | 0 1 2 3 |         a slot of the warp's ring
    pair 1  | 4 5 6 7 | 4 5 6 7 | 4 5 6 7 |
    pair 2  | 8 ...   | 8 ...   | 8 ...   |

Pairs begin at even row tiles. A thread block's first and last row tile may be half of one.
Step 17 teaches this.

`gated_walk`: a pair is a row tile of gates and the same one of ups, which lie half of the matrix
apart. Row tiles are counted as if the two took turns: 2 i is tile i of gates, 2 i + 1 of ups.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from numba import cuda, int32, int64, uint32

from qformats.repack import TILE_GROUP, TILE_ROWS
from steps.instructions import bulk_copy
from steps.kernels.decode.product import PAIR
from steps.kernels.parts.weights.codes import tile_index


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
