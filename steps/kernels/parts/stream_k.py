"""The stream-K scheduler: which tiles of C, and which of their steps along K, a thread block does.

A *work item* is one step along K of one tile. Tiles are numbered features first, then tokens. The
first `shared_tiles` tiles are laid end to end, and every block does an equal range of their work
items, which may begin and end within a tile. After its range a block does whole tiles, in turn
with the others:

         tile 0      tile 1      tile 2     tile 3   tile 4   tile 5   tile 6   tile 7
    K  |-----------|-----------|-----------|--------|--------|--------|--------|--------|-- ...
       000000000111111111222222222333333333 block 0  block 1  block 2  block 3  block 0

With shared_tiles = 0 tiles stay whole. Where all tiles are shared and the number of blocks is a
multiple of theirs, this is split-K: equal parts of each tile. No block waits for another, so any
number of blocks is right. The ranges depend on the shape and the number of blocks alone: the same
bits in every run.

Step 10 (stream-K) teaches this; steps 14 and 15 use it with warpgroups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from numba import cuda, int32, int64, uint32

from steps.contract import ceil_div

MOST_CONTRIBUTORS: Final = 8
"""Blocks that share a tile, at most: partial sums of more would take longer to add up (H200)."""


@dataclass(frozen=True, slots=True)
class Scheduler:
    """Device functions of a kernel with tiles of bn features x bm tokens, for its thread block.

    `shared_tiles` tiles are shared, at `rate` work items a block (`work_rate`); a tile has `steps`
    work items. All other values are int32.

    first_work(shared_tiles, rate, steps) -> (tile_id, k0, count, left)
        the block's first tile and step along K, how many steps of that tile it does, and how many
        work items of its range are left after them
    next_work(tile_id, left, shared_tiles, steps) -> (tile_id, k0, count, left)
        the same for the next tile. The block is done when no tile has this tile_id.
    tile_origin(tile_id, tiles_n) -> (m0, n0)
        the tile's first token and feature; tiles_n of them lie side by side along the features
    contributors(tile_id, shared_tiles, rate, steps) -> (first, last, partial_slot)
        the first and last block that work on a shared tile, and which of the first block's two
        partial-sum slots holds its contribution: 1 if its range begins in a tile before, else 0.
        Every other block's contribution is in its slot 0.
    """

    first_work: Any
    next_work: Any
    tile_origin: Any
    contributors: Any


@cache
def scheduler(bn: int, bm: int) -> Scheduler:
    """The device functions, for capture in a kernel factory."""

    @cuda.jit(device=True, forceinline=True)
    def quotient(a, b):
        """a // b of numbers that are not negative: rounding towards -inf would take more code."""
        return int32(uint32(a) // uint32(b))

    @cuda.jit(device=True, forceinline=True)
    def range_start(block, rate):
        """The first work item of a block's range: also the end of the range of the block before."""
        return int32(int64(block) * rate >> 32)

    @cuda.jit(device=True, forceinline=True)
    def first_work(shared_tiles, rate, steps):
        block = int32(cuda.blockIdx.x)
        if shared_tiles == 0:
            return block, int32(0), int32(steps), int32(0)
        first = range_start(block, rate)
        tile_id = quotient(first, steps)
        k0, items = int32(first - tile_id * steps), int32(range_start(block + 1, rate) - first)
        count = int32(min(steps - k0, items))
        return tile_id, k0, count, int32(items - count)

    @cuda.jit(device=True, forceinline=True)
    def next_work(tile_id, left, shared_tiles, steps):
        if left > 0:
            count = int32(min(steps, left))
            return int32(tile_id + 1), int32(0), count, int32(left - count)
        distance = (
            cuda.gridDim.x if tile_id >= shared_tiles else shared_tiles + cuda.blockIdx.x - tile_id
        )
        return int32(tile_id + distance), int32(0), int32(steps), int32(0)

    @cuda.jit(device=True, forceinline=True)
    def tile_origin(tile_id, tiles_n):
        row = int32(0)
        if tile_id >= tiles_n:  # a division takes 250 cycles, which few tokens need not wait for
            row = quotient(tile_id, tiles_n)
        return int32(row * bm), int32((tile_id - row * tiles_n) * bn)

    @cuda.jit(device=True, forceinline=True)
    def block_of(item, items):
        """The block whose range holds a work item: the last that begins at or before it."""
        return quotient((item + 1) * cuda.gridDim.x - 1, items)

    @cuda.jit(device=True, forceinline=True)
    def contributors(tile_id, shared_tiles, rate, steps):
        item, items = int32(tile_id * steps), int32(shared_tiles * steps)
        first, last = block_of(item, items), block_of(item + steps - 1, items)
        return first, last, int32(1 if range_start(first, rate) < item else 0)

    return Scheduler(first_work, next_work, tile_origin, contributors)


def work_rate(shared_tiles: int, steps: int, blocks: int) -> tuple[int, int]:
    """(shared_tiles, rate) for a kernel. rate: work items of a block, in units of 2^-32, so that a
    block finds where its range begins by a multiplication. ValueError where there are fewer work
    items than blocks."""
    if 0 < shared_tiles * steps < blocks:
        raise ValueError(
            f"{shared_tiles} tiles of {steps} steps are shared by {blocks} blocks: "
            f"use {shared_tiles * steps}"
        )
    return shared_tiles, -(-(shared_tiles * steps << 32) // blocks)


def schedules(tiles: int, steps: int, sms: int) -> Iterator[tuple[int, int, int, int]]:
    """Ways to share `tiles` tiles of `steps` steps among the blocks of `sms` multiprocessors, one
    each: (blocks, shared tiles, steps of the busiest block, tiles that it works on)."""
    yield min(tiles, sms), 0, ceil_div(tiles, sms) * steps, ceil_div(tiles, sms)
    if tiles < sms:
        most = min(MOST_CONTRIBUTORS, steps, sms // tiles)
        for splits in range(2, most + 1):
            yield tiles * splits, tiles, ceil_div(steps, splits), 1
        blocks = min(sms, tiles * min(MOST_CONTRIBUTORS, steps))
        if blocks % tiles:
            yield blocks, tiles, ceil_div(tiles * steps, blocks), 2
    elif tiles % sms:
        # what is left over after whole rounds, alone or with one round more
        for shared in (tiles % sms, tiles % sms + sms):
            if shared * min(MOST_CONTRIBUTORS, steps) >= sms:
                rounds = (tiles - shared) // sms
                items = ceil_div(shared * steps, sms)
                yield sms, shared, rounds * steps + items, rounds + ceil_div(shared, sms) + 1
