"""Tile heuristics of the wgmma steps: the tiles of C, the number of blocks, and their launch.

A thread block has an SM to itself and stays there, tile after tile
(`steps.kernels.parts.stream_k`), so its cycles can be added up beforehand. The steps differ in what
128 K of a tile cost. The constants here were measured on an H200. Step 14 teaches the tiles; step
13 takes its stage's cycles from here, step 15 its own and all else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from qformats import BLOCK
from qformats.repack import TILE_K, TILE_ROWS
from steps.contract import Launch, Shape, ceil_div, shared_memory
from steps.kernels.parts.epilogue.wgmma import (
    ACC_HALF_TOKENS,
    WARPGROUP,
    WGMMA_ROWS,
    warpgroups,
)
from steps.kernels.parts.stream_k import schedules, work_rate

H200_COPIED_BYTES: Final = 40
"""Bytes that an SM's copies get from the L2 in a cycle."""

H200_INT8_COPIED_BYTES: Final = 50
"""The same where tokens are int8: what step 15 was seen to get with weights of 8 bits."""

INT8_MOST_K: Final = (2**31 - 1) // (128 * 127) // BLOCK * BLOCK
"""The largest K whose products of int8, weights -128 to 127 and tokens -127 to 127, an int32 sum
holds whatever they are: 132096. Sums of a part of K may wrap, as the sum of all parts does not."""

H200_TILE_END: Final = 3000
"""Cycles from the last product of a tile to the first of the next one, where C is float16. Float32
takes some 6500, with which one of 40 shapes would get other tiles."""

H200_HAND_OVER: Final = 3000
"""Cycles to store a block's partial sums of a shared tile and to wait for those of others."""

H200_L2_BYTES: Final = 24
"""Bytes of partial sums that a block moves to or from the L2 in a cycle."""

UNEVEN: Final = 6
"""A sixth more where blocks share tiles in unequal parts: some come late (H200)."""

SLICED_TOKENS: Final = 48
"""Tokens of a tile from which on slices pay off: more than 32 (H200)."""

TOKENS: Final = tuple(range(16, 129, 16))
"""Tokens of a tile. Products of up to 128 are one row of tiles, and what a tile has too many is
multiplied for nothing: with powers of two alone, 65 tokens would take 1.7 times as long as 64."""

Tile = tuple[int, int]
"""(features, tokens) of C."""

TileConfiguration = tuple[Tile, int, int, int]
"""(tile, how many of them, thread blocks, tiles that all blocks share)."""


def float16_stage_cycles(bits: int, bn: int, bm: int) -> int:
    """Cycles of 128 K of a tile with weights of so many bits: the longest of those of the tensor
    cores, those of a warp that unpacks weights and issues products, mostly latencies, and those of
    copies from the L2, at H200_COPIED_BYTES a cycle."""
    unpack = {5: 24, 6: 32}.get(bits, 20)  # instructions that make 16 x 16 weights
    copied = (bn * bits // 8 + 2 * bm) * TILE_K // H200_COPIED_BYTES
    cycles = max(bn * bm // 16, bn * (35 * unpack + 10 * bm // 3) // 128, copied)
    return cycles * 33 // 32 if warpgroups(bn) == 3 else cycles  # for the same work: measured


def int8_stage_cycles(tile_bytes: int, instructions: int, bn: int, bm: int) -> int:
    """The same for int8 weights and tokens, with packed tiles of so many bytes: the longest of
    those of the tensor cores, those of a warp's `instructions`, where the two warps of a scheduler
    together issue one in two cycles, and those of copies, at H200_INT8_COPIED_BYTES a cycle."""
    copied = (bn // TILE_ROWS * tile_bytes + bm * TILE_K) // H200_INT8_COPIED_BYTES
    return max(bn * max(bm, 32) // 32, 4 * instructions, copied)


def fewest_cycles(
    tiles: tuple[Tile, ...], shape: Shape, sms: int, stage_cycles: Callable[[int, int], int]
) -> TileConfiguration:
    """The configuration for `sms` multiprocessors that should take the fewest cycles, where
    stage_cycles(*tile) are those of 128 K of a tile."""
    least: float = float("inf")
    best: TileConfiguration = ((0, 0), 0, 0, 0)
    for bn, bm in tiles:
        total = ceil_div(shape.n, bn) * ceil_div(shape.m, bm)
        steps = ceil_div(shape.k, TILE_K)
        for blocks, shared_tiles, count, worked_on in schedules(total, steps, sms):
            cycles = count * stage_cycles(bn, bm) + worked_on * H200_TILE_END
            if shared_tiles:  # partial sums go to the L2 and come back
                contributors = ceil_div(blocks, shared_tiles)
                slices = reduction_slices(((bn, bm), total, blocks, shared_tiles))
                # some blocks add up more slices than others
                loads = ceil_div(contributors * ceil_div(slices, contributors), slices)
                cycles += H200_HAND_OVER + (loads + 1) * bn * bm * 4 // H200_L2_BYTES
            if shared_tiles and blocks % shared_tiles:
                cycles += cycles // UNEVEN
            if cycles < least:
                least, best = cycles, ((bn, bm), total, blocks, shared_tiles)
    return best


def reduction_slices(configuration: TileConfiguration) -> int:
    """The number of slices of a shared tile, which its blocks add up side by side
    (`steps.kernels.parts.epilogue.wgmma`). More than one where the blocks do equal parts, and so
    finish together, and where adding up takes longer than polling the arrival counter. A slice has
    a multiple of 16 tokens. Wanted are as many as a tile has blocks, four at most, rounded down to
    a power of two; where these do not divide the tile, it is the next number that does."""
    (_, bm), _, blocks, shared_tiles = configuration
    if not shared_tiles or blocks % shared_tiles or bm < SLICED_TOKENS:
        return 1
    sixteens = min(bm, ACC_HALF_TOKENS) // 16
    wanted = min(4, sixteens, 1 << (blocks // shared_tiles).bit_length() - 1)
    return next(slices for slices in range(wanted, sixteens + 1) if sixteens % slices == 0)


def scratch_arrays(
    configuration: TileConfiguration, kind: type[np.generic]
) -> tuple[tuple[tuple[int, ...], Any], ...]:
    """`Step.scratch`: two tiles of partial sums, of this `kind`, for each block that shares some;
    int32, an arrival counter for each slice of 64 features of an accumulator half. Nothing where no
    tile is shared: a caller allocates what is asked for at every call."""
    (bn, bm), total, blocks, shared_tiles = configuration
    if not shared_tiles:
        return ((0,), kind), ((0,), np.int32)
    counters = total * bn // WGMMA_ROWS * ceil_div(bm, ACC_HALF_TOKENS)
    counters *= reduction_slices(configuration)
    return ((2 * blocks * bn * bm,), kind), ((counters,), np.int32)


def launch_that_fits(
    make: Callable[[int, int], tuple[Any, int]],
    stages: int,
    stagger: int,
    configuration: TileConfiguration,
    k: int,
    operands: tuple[Any, ...],
    scratch: tuple[Any, ...],
) -> Launch:
    """The launch of make(stages, stagger) -> (kernel, its shared memory in bytes), with as many
    stages as fit. The kernel takes the operands, the steps along K, the number of tiles,
    `steps.kernels.parts.stream_k.work_rate`, and the scratch memory.

    `stages` and `stagger` are upper limits. One warpgroup runs `stagger` stages before the others
    only where a block has more tiles than one."""
    (bn, _), total, blocks, shared_tiles = configuration
    while make(stages, 0)[1] > shared_memory():
        stages -= 1
    kernel, shared_bytes = make(stages, min(stagger, stages - 2) if total > blocks else 0)
    steps = ceil_div(k, TILE_K)
    args = (*operands, steps, total, work_rate(shared_tiles, steps, blocks), *scratch)
    threads = (warpgroups(bn) + 1) * WARPGROUP  # the last warpgroup has the producers
    return Launch(kernel, (blocks,), (threads,), args, shared_bytes, overlap=True)
