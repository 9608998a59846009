"""Work shared out evenly: which tiles of C, and which of their steps along K, a thread block does.

A *unit* is one step along K of one tile; tiles are numbered features first, then tokens. The units
of the first `tail` tiles are one line, of which every block does an equal stretch, which may begin
and end within a tile; after it come whole tiles, one for each block in turn:

         tile 0      tile 1      tile 2   |  tile 3   tile 4   tile 5   tile 6   tile 7 ...
    K  |-----------|-----------|-----------|
       0000000001111 1111122222 22223333333   block 0  block 1  block 2  block 3  block 0 ...

With tail = 0 tiles stay whole; with as many blocks as a multiple of `tail`, and no tiles beyond,
each is cut into equal parts. Nobody waits for anybody, so any number of blocks is right, and who
does what depends on the shape and the number of blocks alone: the same bits in every run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from numba import cuda, int32, int64, uint32

from steps.contract import ceil_div

PARTS: Final = 8
"""Blocks that share a tile, at most: the sums of more would take longer to add up."""


@dataclass(frozen=True, slots=True)
class Stretches:
    """Device functions of a kernel with tiles of bn features x bm tokens, for its thread block.

    `tail` tiles are shared, `rate` units a block (`shares`); a tile has `steps` units. All other
    values are int32.

    begin(tail, rate, steps) -> (number, k0, count, left)
        the block's first tile and step along K, how many steps of that tile it does, and how many
        units of its stretch are left after them
    go_on(number, left, tail, steps) -> (number, k0, count, left): the same for the next tile. The
        block is done when number is not that of a tile.
    corner(number, tiles_n) -> (m0, n0): the tile's first token and feature; tiles_n of them lie
        side by side along the features.
    sharers(number, tail, rate, steps) -> (first, last, early)
        the blocks that work on a shared tile, and 1 if the first of them begins in one before, else
        0. Of the two tiles that a block may leave unfinished, the one where its stretch ends is
        number `early` of the first, every other is number 0.
    """

    begin: Any
    go_on: Any
    corner: Any
    sharers: Any


@cache
def stretches(bn: int, bm: int) -> Stretches:
    """The device functions, for capture in a kernel factory."""

    @cuda.jit(device=True, forceinline=True)
    def quotient(a, b):
        return int32(uint32(a) // uint32(b))

    @cuda.jit(device=True, forceinline=True)
    def beginning(block, rate):
        return int32(int64(block) * rate >> 32)

    @cuda.jit(device=True, forceinline=True)
    def begin(tail, rate, steps):
        block = int32(cuda.blockIdx.x)
        if tail == 0:
            return block, int32(0), int32(steps), int32(0)
        first = beginning(block, rate)
        number = quotient(first, steps)
        k0, units = int32(first - number * steps), int32(beginning(block + 1, rate) - first)
        count = int32(min(steps - k0, units))
        return number, k0, count, int32(units - count)

    @cuda.jit(device=True, forceinline=True)
    def go_on(number, left, tail, steps):
        if left > 0:
            count = int32(min(steps, left))
            return int32(number + 1), int32(0), count, int32(left - count)
        ahead = cuda.gridDim.x if number >= tail else tail + cuda.blockIdx.x - number
        return int32(number + ahead), int32(0), int32(steps), int32(0)

    @cuda.jit(device=True, forceinline=True)
    def corner(number, tiles_n):
        row = int32(0)
        if number >= tiles_n:  # a division takes 250 cycles, which few tokens need not wait for
            row = quotient(number, tiles_n)
        return int32(row * bm), int32((number - row * tiles_n) * bn)

    @cuda.jit(device=True, forceinline=True)
    def at_work(unit, units):
        """The block whose stretch holds a unit: the last that begins at or before it."""
        return quotient((unit + 1) * cuda.gridDim.x - 1, units)

    @cuda.jit(device=True, forceinline=True)
    def sharers(number, tail, rate, steps):
        unit, units = int32(number * steps), int32(tail * steps)
        first, last = at_work(unit, units), at_work(unit + steps - 1, units)
        return first, last, int32(1 if beginning(first, rate) < unit else 0)

    return Stretches(begin, go_on, corner, sharers)


def shares(tail: int, steps: int, blocks: int) -> tuple[int, int]:
    """(tail, rate) for a kernel: units a block in 2^-32, so that it needs no division to find where
    it begins. ValueError where there are fewer units than blocks."""
    if 0 < tail * steps < blocks:
        raise ValueError(
            f"{tail} tiles of {steps} steps are shared by {blocks} blocks: use {tail * steps}"
        )
    return tail, -(-(tail * steps << 32) // blocks)


def cuts(tiles: int, steps: int, sms: int) -> Iterator[tuple[int, int, int, int]]:
    """Ways to share `tiles` tiles of `steps` steps among the blocks of `sms` multiprocessors, one
    each: (blocks, tail, steps that the busiest block does, tiles that it works on)."""
    yield min(tiles, sms), 0, ceil_div(tiles, sms) * steps, ceil_div(tiles, sms)
    if tiles < sms:
        most = min(PARTS, steps, sms // tiles)
        for parts in range(2, most + 1):
            yield tiles * parts, tiles, ceil_div(steps, parts), 1
        blocks = min(sms, tiles * min(PARTS, steps))
        if blocks % tiles:
            yield blocks, tiles, ceil_div(tiles * steps, blocks), 2
    elif tiles % sms:
        # what is left over after whole rounds, alone or with one round more
        for tail in (tiles % sms, tiles % sms + sms):
            if tail * min(PARTS, steps) >= sms:
                rounds = (tiles - tail) // sms
                units = ceil_div(tail * steps, sms)
                yield sms, tail, rounds * steps + units, rounds + ceil_div(tail, sms) + 1
