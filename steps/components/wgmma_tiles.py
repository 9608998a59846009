"""Tile heuristics of the wgmma steps: the tiles of C, the number of blocks, and their launch.

A thread block has an SM to itself and stays there, tile after tile (`steps.components.stream_k`),
so its cycles can be added up beforehand. The steps differ in what 128 K of a tile cost. The
constants here were measured on an H200; steps 12 to 14 use them, and step 12 teaches the tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from qformats.repack import TILE_K
from steps.components.epilogue.wgmma import (
    ACC_HALF_TOKENS,
    WARPGROUP,
    WGMMA_ROWS,
    warpgroups,
)
from steps.components.stream_k import schedules, work_rate
from steps.contract import Launch, Shape, ceil_div, shared_memory

H200_TILE_END: Final = 2000
"""Cycles from the last product of a tile to the first of the next one."""

H200_HAND_OVER: Final = 3000
"""Cycles to store a block's partial sums of a shared tile and to wait for those of others."""

H200_L2_BYTES: Final = 24
"""Bytes of partial sums that a block moves to or from the L2 in a cycle."""

UNEVEN: Final = 6
"""A sixth more where blocks share tiles in unequal parts: some come late (H200)."""

SLICED_TOKENS: Final = 64
"""Tokens of a tile from which on slices pay off (H200)."""

Tile = tuple[int, int]
"""(features, tokens) of C."""

TileConfiguration = tuple[Tile, int, int, int]
"""(tile, how many of them, thread blocks, tiles that all blocks share)."""


def fewest_cycles(
    tiles: tuple[Tile, ...], shape: Shape, sms: int, stage: Callable[[int, int], int]
) -> TileConfiguration:
    """The configuration for `sms` multiprocessors that should take the fewest cycles; stage(*tile)
    is the number of cycles of 128 K of a tile."""
    least: float = float("inf")
    best: TileConfiguration = ((0, 0), 0, 0, 0)
    for bn, bm in tiles:
        total = ceil_div(shape.n, bn) * ceil_div(shape.m, bm)
        steps = ceil_div(shape.k, TILE_K)
        for blocks, shared_tiles, count, worked_on in schedules(total, steps, sms):
            cycles = count * stage(bn, bm) + worked_on * H200_TILE_END
            if shared_tiles:  # partial sums go to the L2 and come back
                contributors = ceil_div(blocks, shared_tiles)
                slices = reduction_slices(((bn, bm), total, blocks, shared_tiles))
                loads = ceil_div(contributors, slices)
                cycles += H200_HAND_OVER + (loads + 1) * bn * bm * 4 // H200_L2_BYTES
            if shared_tiles and blocks % shared_tiles:
                cycles += cycles // UNEVEN
            if cycles < least:
                least, best = cycles, ((bn, bm), total, blocks, shared_tiles)
    return best


def reduction_slices(configuration: TileConfiguration) -> int:
    """The number of slices of a shared tile, which its blocks add up side by side
    (`steps.components.epilogue.wgmma`). More than one where the blocks do equal parts, and so
    finish together, and where adding up takes longer than polling the arrival counter."""
    (_, bm), _, blocks, shared_tiles = configuration
    if not shared_tiles or blocks % shared_tiles or bm < SLICED_TOKENS:
        return 1
    return min(4, 1 << (blocks // shared_tiles).bit_length() - 1)


def scratch_arrays(
    configuration: TileConfiguration, kind: type[np.generic]
) -> tuple[tuple[tuple[int, ...], Any], ...]:
    """`Step.scratch`: two tiles of partial sums, of this `kind`, for each block that shares some;
    int32, an arrival counter for each slice of 64 features of an accumulator half."""
    (bn, bm), total, blocks, shared_tiles = configuration
    counters = total * bn // WGMMA_ROWS * ceil_div(bm, ACC_HALF_TOKENS)
    counters *= reduction_slices(configuration)
    partials = 2 * blocks * bn * bm if shared_tiles else 4
    return ((partials,), kind), ((counters,), np.int32)


def launch_of(
    make: Callable[[int, int], tuple[Any, int]],
    stages: int,
    stagger: int,
    configuration: TileConfiguration,
    k: int,
    operands: tuple[Any, ...],
    scratch: tuple[Any, ...],
) -> Launch:
    """The launch of make(stages, stagger) -> (kernel, its shared memory in bytes), which takes the
    operands, the steps along K, `steps.components.stream_k.work_rate`, and the scratch memory.

    `stages` and `stagger` are upper limits. The ring is as long as shared memory allows. One
    warpgroup runs `stagger` stages before the other only where a block has more tiles than one."""
    (bn, _), total, blocks, shared_tiles = configuration
    while make(stages, 0)[1] > shared_memory():
        stages -= 1
    kernel, shared_bytes = make(stages, min(stagger, stages - 2) if total > blocks else 0)
    steps = ceil_div(k, TILE_K)
    args = (*operands, steps, work_rate(shared_tiles, steps, blocks), *scratch)
    threads = (warpgroups(bn) + 1) * WARPGROUP  # the last warpgroup is the producer
    return Launch(kernel, (blocks,), (threads,), args, shared_bytes, overlap=True)
