"""Tile heuristics of step 10: the work of each thread block of a decode product, and of its warps.

Weights are read once. So every multiprocessor should read equally many, with as many loads in
flight as shared memory holds. A thread block takes some row tiles of C. It takes a share of K only
where more of A would not fit beside the rings, because partial sums of several blocks pass through
memory. Of its warps the first `warps_n` take the row tiles in turn, for the first packed tiles
along K; the next as many warps take the same row tiles, for the next packed tiles.

Step 10 (decode) teaches this. The constants were measured on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from qformats import BLOCK
from qformats.repack import TILE_K, TILE_ROWS
from qformats.storage import StorageFormat
from steps.components.unpack.storage_formats import tile_format
from steps.contract import Shape, ceil_div, multiprocessors, shared_memory

MOST_TOKENS: Final = 16  # of a thread block: the columns of two mma
FUSED: Final = 4  # tokens up to which a thread block quantizes its share of A itself
WARPS: Final = 16  # of a thread block
FEWER: Final = 8  # with prequantized A, where packed tiles are large, or fewer than LITTLE
LITTLE: Final = 128  # packed tiles of a thread block
SHARED: Final = 150 * 1024  # bytes of a thread block
SHARED_PREQUANTIZED: Final = 220 * 1024  # where prequantized A lies there too
ALONE: Final = 116 * 1024  # bytes with which it has an SM to itself: of two, each gets half
STAGES: Final = 8  # packed tiles that a warp has in flight at most
RING: Final = 96 * 1024  # bytes that all have in flight, with prequantized A
PREFETCH: Final = 56 * 1024  # and those issued before A, which would queue behind more
PREFETCH_PREQUANTIZED: Final = 20 * 1024  # the same with prequantized A
SPARE: Final = 72 * 1024  # bytes that A must leave for the rings and the sums
SPLIT: Final = 14 * 1024  # values of A that a thread block quantizes; more of them split K
# values of A that fit beside the rings, by tokens: 16 leave little time to wait for the last block
SPLIT_PREQUANTIZED: Final = {8: 112 * 1024, 16: 64 * 1024}
AHEAD: Final = 4  # blocks of A that a lane loads at a time, at most
PARTIALS: Final = 16 * 1024  # bytes for the partial sums of the warps of a thread block
BLOCKS: Final = TILE_K // BLOCK  # of K in a packed tile


@dataclass(frozen=True, slots=True)
class TileConfiguration:
    """The work of the thread blocks of a product.

    tokens    : columns of a thread block
    row_tiles : of a thread block
    k_tiles   : its packed tiles along K
    splits    : thread blocks along K (split-K)
    warps     : of a thread block; `warps_n` of them lie along N, the others along K
    stages    : of a warp's ring; `prefetched` of them are issued before A
    ahead     : blocks of A that a lane loads at a time
    shared    : bytes of a thread block
    """

    tokens: int
    row_tiles: int
    k_tiles: int
    splits: int
    warps: int
    warps_n: int
    stages: int
    prefetched: int
    ahead: int
    shared: int


def scale_bytes(tokens: int, minimum: bool) -> int:
    """Bytes in shared memory for d of a block of A, and s where the format has minima. One token
    has two places, as a lane reads those of two columns."""
    return (2 if tokens == 1 else 1) * (8 if minimum else 4)


def tile_configuration(fmt: StorageFormat, shape: Shape) -> TileConfiguration:
    """A thread block for each multiprocessor, or as few more as the shape allows."""
    tokens = next(t for t in (1, 2, 4, 8, 16) if t >= min(shape.m, MOST_TOKENS))
    prequantized, tile = shape.m > FUSED, tile_format(fmt.name)
    all_k_tiles = ceil_div(shape.k, TILE_K)
    room = min(SPLIT_PREQUANTIZED[tokens] if prequantized else SPLIT, shared_memory() - SPARE)
    k_tiles = ceil_div(all_k_tiles, min(all_k_tiles, ceil_div(tokens * shape.k, room)))
    splits = ceil_div(all_k_tiles, k_tiles)
    blocks_n = max(1, multiprocessors() // (splits * ceil_div(shape.m, MOST_TOKENS)))
    row_tiles = ceil_div(ceil_div(shape.n, TILE_ROWS), blocks_n)
    ring_limit = RING if prequantized else SHARED
    large = 3 * WARPS * tile.tile_bytes > min(ring_limit, shared_memory() // 2)
    warps = FEWER if large or (prequantized and row_tiles * k_tiles < LITTLE) else WARPS
    # warps_n: so that the busiest warp has least to do; and few, as a warp alone needs no barrier
    factors = [w for w in range(1, warps) if warps % w == 0]
    sums = {w: warps // w * row_tiles * TILE_ROWS * tokens * 4 for w in factors}
    fitting = [w for w in sums if sums[w] <= PARTIALS] + [warps]
    warps_n = min(fitting, key=lambda w: ceil_div(row_tiles, w) * ceil_div(k_tiles, warps // w))
    fixed = k_tiles * BLOCKS * tokens * (BLOCK + scale_bytes(tokens, tile.minimum))
    fixed += sums.get(warps_n, 0)
    stage, warp_k_tiles = warps * tile.tile_bytes, ceil_div(k_tiles, warps // warps_n)
    ring = min(RING, SHARED_PREQUANTIZED - fixed) if prequantized else SHARED - fixed
    stages = max(2, min(STAGES, min(ring, shared_memory() - fixed) // stage))
    warp_tiles = ceil_div(row_tiles, warps_n) * warp_k_tiles  # packed tiles of a warp
    if prequantized:
        prefetched = PREFETCH_PREQUANTIZED // stage
    else:
        prefetched = min(PREFETCH // stage, warp_tiles // 4)
    prefetched = min(stages, max(1, prefetched))
    ahead = min(AHEAD, ceil_div(warp_k_tiles * BLOCKS * tokens, 8 * warps_n))
    shared = min(max(ALONE, fixed + stages * stage), shared_memory())
    return TileConfiguration(
        tokens, row_tiles, k_tiles, splits, warps, warps_n, stages, prefetched, ahead, shared
    )
