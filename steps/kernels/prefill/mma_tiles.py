"""Tile heuristics of step 11: tokens of a tile, shares of K, and the ring that fits an SM.

A tile has 128 features, whose packed tiles lie side by side, and 16 to 128 tokens. Few tiles leave
SMs idle, so K may be split: each thread block then has a share of K of a tile, and partial sums are
added up (`steps.kernels.parts.split_k_reduction`). The constants were measured on an H200. Step 11
teaches this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from qformats import BLOCK
from qformats.repack import TILE_GROUP, TILE_K, TILE_ROWS
from qformats.storage import StorageFormat
from steps.contract import Shape, ceil_div, multiprocessors, shared_memory
from steps.kernels.parts.epilogue.mma import staged_bytes
from steps.kernels.prefill.row_tiles import box_bytes

BN: Final = TILE_GROUP * TILE_ROWS
"""Features of a tile."""

TILES: Final = {128: (2, 1), 64: (2, 2), 32: (3, 2), 16: (3, 2)}
"""Tokens of a tile: (blocks an SM, by their registers; warps along K)."""

STAGES: Final = 4
"""Of the ring, at most."""

SPLITS: Final = 16
"""Shares of K, at most: more would take longer to add up."""

H200_COPIED_BYTES: Final = 40
"""Bytes that an SM's copies get from the L2 in a cycle."""

H200_SUMMED_BYTES: Final = 48
"""The same of partial sums, when the last block of a tile adds them up."""

H200_TILE_ENDS: Final = 4000
"""Cycles before the first product of a tile and after the last one."""

H200_HAND_OVER: Final = 2000
"""Cycles more with partial sums, before the first of them arrives."""


@dataclass(frozen=True, slots=True)
class RingSize:
    """What fits an SM: `blocks` thread blocks, each with a ring of `stages` in `shared_bytes`. The
    sums at the end of a tile use the same bytes."""

    blocks: int
    stages: int
    shared_bytes: int


def ring_for(fmt: StorageFormat, bm: int) -> RingSize | None:
    """The ring for tiles of `bm` tokens, of two stages at least, or None where there is no room."""
    (most, warps_k), weights = TILES[bm], BN * TILE_K // BLOCK * fmt.block_bytes
    stage_bytes, sums_bytes = 2 * box_bytes(bm) + weights, staged_bytes(BN, bm, warps_k)
    for blocks in range(most, 0, -1):
        # an SM keeps 1 KB of every block, and the end of a tile has a word
        share = (shared_memory() + 1024) // blocks - 1024 - 16
        stages = min(STAGES, share // stage_bytes)
        if stages >= 2 and sums_bytes <= share:
            return RingSize(blocks, stages, max(stages * stage_bytes, sums_bytes))
    return None


def tiling(fmt: StorageFormat, shape: Shape) -> tuple[int, int, RingSize]:
    """(tokens of a tile, shares of K, ring) that should take the fewest cycles."""
    steps, least, best = ceil_div(shape.k, TILE_K), float("inf"), None
    for bm in TILES:
        ring = ring_for(fmt, bm)
        if not ring:
            continue
        tiles = ceil_div(shape.n, BN) * ceil_div(shape.m, bm)
        # an SM's tensor cores have 16 x 8 x 16 done every 1.9 cycles
        copied = (BN * fmt.bits // 8 + 2 * bm) * TILE_K // H200_COPIED_BYTES
        stage_cycles = max(BN * bm * 15 // 128, copied)
        for splits in range(1, min(SPLITS, steps) + 1):
            ends = H200_TILE_ENDS  # which other blocks on the SM hide in part
            if splits > 1:
                ends += H200_HAND_OVER + splits * BN * bm * 4 // H200_SUMMED_BYTES
            blocks = ceil_div(tiles * splits, multiprocessors())
            cycles = blocks * (ceil_div(steps, splits) * stage_cycles + ends // ring.blocks)
            if blocks < ring.blocks:  # nobody works while a block waits
                cycles = cycles * 6 // 5
            if cycles < least:
                least, best = cycles, (bm, splits, ring)
    assert best, "tiles of 16 tokens fit every GPU"
    return best


def scratch_arrays(
    fmt: StorageFormat, shape: Shape
) -> tuple[tuple[tuple[int, ...], Any], tuple[tuple[int, ...], Any]]:
    """`Step.scratch`: the partial sums of each share of a tile, and a counter for each tile."""
    bm, splits, _ = tiling(fmt, shape)
    tiles = ceil_div(shape.n, BN) * ceil_div(shape.m, bm)
    partials = tiles * splits * bm * BN if splits > 1 else 4
    return ((partials,), np.float32), ((tiles,), np.int32)
