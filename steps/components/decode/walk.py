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
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from numba import cuda, int32, int64, uint32

from qformats.repack import TILE_GROUP, TILE_ROWS
from steps.components.decode.product import PAIR
from steps.components.unpack.codes import tile_index


@dataclass(frozen=True, slots=True)
class PairWalk:
    """Device functions of a warp.

    own_part(sizes, N, warp) -> (pair, part)
        the row tile where its first pair begins, and its part of the work; sizes: those of
        `steps.components.decode.tiles.TileConfiguration`
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
    def is_over(walk, part):
        _, end, _, _, _ = part
        _, _, _, _, pair = walk
        return pair >= end

    return PairWalk(own_part, start, advance, is_over)
