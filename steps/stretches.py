"""Work shared out evenly: which tiles of C, and which of their steps along K, a thread block does.

A *unit* is one step along K of one tile; units are numbered K fastest, then features, then tokens.
The units of the first `tail` tiles are one line, of which every block does an equal stretch, which
may begin and end within a tile; after it come whole tiles, one for each block in turn:

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

from numba import cuda, int32, uint32

from steps.step import ceil_div

PARTS: Final = 8
"""Blocks that share a tile, at most: the sums of more would take longer to add up."""


@dataclass(frozen=True, slots=True)
class Stretches:
    """Device functions of a kernel with tiles of bn features x bm tokens, for its thread block.

    In all of them `shared` is the number of units that are shared (tail * steps) and `steps` that
    of a tile; they return int32.

    begin(shared, steps) -> (unit, end): where the block begins, and where its stretch ends.
    tile_at(unit, end, shared, steps, tiles_n) -> (number, m0, n0, k0, count)
        the tile with that unit, its first token and feature; the step along K from which the block
        does `count` steps. tiles_n: tiles side by side along the features.
    following(unit, end, shared, steps) -> unit: where the block goes on, done up to `unit`.
    sharers(number, shared, steps) -> (first, last): the blocks that work on a shared tile.
    slot(block, number, shared, steps): 0 or 1, the tile where the block's stretch begins, or ends.
    """

    begin: Any
    tile_at: Any
    following: Any
    sharers: Any
    slot: Any


@cache
def stretches(bn: int, bm: int) -> Stretches:
    """The device functions, for capture in a kernel factory."""

    @cuda.jit(device=True, forceinline=True)
    def beginning(shared, block):
        return int32(uint32(shared * block) // uint32(cuda.gridDim.x))

    @cuda.jit(device=True, forceinline=True)
    def following(unit, end, shared, steps):
        if unit > shared:
            return int32(unit + (cuda.gridDim.x - 1) * steps)
        return int32(unit if unit < end else shared + cuda.blockIdx.x * steps)

    @cuda.jit(device=True, forceinline=True)
    def begin(shared, steps):
        block = int32(cuda.blockIdx.x)
        end = beginning(shared, block + 1)
        return following(beginning(shared, block), end, shared, steps), end

    @cuda.jit(device=True, forceinline=True)
    def tile_at(unit, end, shared, steps, tiles_n):
        number = int32(uint32(unit) // uint32(steps))
        row = int32(uint32(number) // uint32(tiles_n))
        k0 = int32(unit - number * steps)
        count = int32(min(steps - k0, end - unit)) if unit < shared else int32(steps)
        return number, int32(row * bm), int32((number - row * tiles_n) * bn), k0, count

    @cuda.jit(device=True, forceinline=True)
    def at_work(shared, unit):
        """The block whose stretch holds a unit: the last that begins at or before it."""
        return int32(uint32((unit + 1) * cuda.gridDim.x - 1) // uint32(shared))

    @cuda.jit(device=True, forceinline=True)
    def sharers(number, shared, steps):
        unit = number * steps
        return at_work(shared, unit), at_work(shared, unit + steps - 1)

    @cuda.jit(device=True, forceinline=True)
    def slot(block, number, shared, steps):
        return int32(1 if beginning(shared, block) < number * steps else 0)

    return Stretches(begin, tile_at, following, sharers, slot)


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
            if tail * PARTS >= sms:
                rounds = (tiles - tail) // sms
                units = ceil_div(tail * steps, sms)
                yield sms, tail, rounds * steps + units, rounds + ceil_div(tail, sms) + 1
