"""How a product is cut for wgmma: which tiles, how many thread blocks, what a launch of them needs.

A thread block has an SM to itself and stays there, tile after tile (`steps.components.stream_k`), so cycles
can be added up beforehand. What differs between the steps is what 128 K of a tile take.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from qformats.repack import TILE_K
from steps.components.epilogue import GROUP, LOT, ROWS, warpgroups
from steps.components.stream_k import cuts, shares
from steps.contract import Launch, Shape, ceil_div, shared_memory

END: Final = 2000  # cycles from a tile's last product to the next one's first
SHARE: Final = 3000  # cycles for handing over a part of a tile, and waiting for others' sums
UNEVEN: Final = 6  # a sixth more, where blocks share tiles in other than equal parts
MANY: Final = 64  # tokens of a tile that is worth cutting into strips

Tile = tuple[int, int]
"""(features, tokens) of C."""

Cut = tuple[Tile, int, int, int]
"""(tile, how many of them, thread blocks, tiles that all blocks share)."""


def fewest_cycles(
    tiles: tuple[Tile, ...], shape: Shape, sms: int, stage: Callable[[int, int], int]
) -> Cut:
    """The cut for `sms` multiprocessors that should take the fewest cycles; stage(*tile) are those
    of 128 K of a tile."""
    least, best = float("inf"), ((0, 0), 0, 0, 0)
    for bn, bm in tiles:
        total = ceil_div(shape.n, bn) * ceil_div(shape.m, bm)
        for blocks, tail, count, pieces in cuts(total, ceil_div(shape.k, TILE_K), sms):
            cycles = count * stage(bn, bm) + pieces * END
            if tail:  # the way of a tile's parts to the L2 and back, at 24 bytes a cycle
                parts = ceil_div(blocks, tail)
                back = ceil_div(parts, strips(((bn, bm), total, blocks, tail)))
                cycles += SHARE + (back + 1) * bn * bm * 4 // 24
            if tail and blocks % tail:  # some come late: more waiting than can be planned
                cycles += cycles // UNEVEN
            if cycles < least:
                least, best = cycles, ((bn, bm), total, blocks, tail)
    return best


def strips(cut: Cut) -> int:
    """Into how many strips a shared tile is cut, which its blocks add up side by side
    (`steps.components.epilogue.finish_wgmma_tile`): where they do equal parts, and so are done together, and where
    adding up takes longer than asking whether all are there."""
    (_, bm), _, blocks, tail = cut
    if not tail or blocks % tail or bm < MANY:
        return 1
    return min(4, 1 << (blocks // tail).bit_length() - 1)


def room(cut: Cut, kind: type[np.generic]) -> tuple[tuple[tuple[int, ...], Any], ...]:
    """`Step.scratch`: two tiles of sums, of this `kind`, for each block that shares some; int32, a
    count for each strip of 64 features of a tile's lot (`steps.components.epilogue.finish_wgmma_tile`)."""
    (bn, bm), total, blocks, tail = cut
    counts = total * bn // ROWS * ceil_div(bm, LOT) * strips(cut)
    return ((2 * blocks * bn * bm if tail else 4,), kind), ((counts,), np.int32)


def launch_of(
    make: Callable[[int, int], tuple[Any, int]],
    stages: int,
    ahead: int,
    cut: Cut,
    k: int,
    operands: tuple[Any, ...],
    scratch: tuple[Any, ...],
) -> Launch:
    """The launch of make(stages, ahead) -> (kernel, its shared memory in bytes), which takes the
    operands, the steps along K, `steps.components.stream_k.shares`, and the scratch memory.

    `stages` and `ahead` are the most: the ring is as long as there is room for, and only in a block
    with more tiles than one is a warpgroup ahead of the other."""
    (bn, _), total, blocks, tail = cut
    while make(stages, 0)[1] > shared_memory():
        stages -= 1
    kernel, shared_bytes = make(stages, min(ahead, stages - 2) if total > blocks else 0)
    steps = ceil_div(k, TILE_K)
    args = (*operands, steps, shares(tail, steps, blocks), *scratch)
    threads = (warpgroups(bn) + 1) * GROUP  # the last warpgroup brings
    return Launch(kernel, (blocks,), (threads,), args, shared_bytes, overlap=True)
