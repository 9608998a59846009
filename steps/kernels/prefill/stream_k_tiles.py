"""Tile heuristics of step 10: the tokens of a tile, and which thread blocks share which tiles.

Stream-K leaves the size of a tile free: small tiles are not needed to have many of them. What
counts is the time of a stage, and the way of partial sums through the L2. Both are added up here in
cycles, for each way of `steps.kernels.parts.stream_k.schedules`. Step 10 teaches this.
"""

from __future__ import annotations

from typing import Final

from qformats import Format
from qformats.repack import TILE_K
from steps.contract import Shape, ceil_div, shared_memory
from steps.kernels.parts.stream_k import schedules
from steps.kernels.prefill.shared_stage import BN, stage_layout

BLOCKS_PER_SM: Final = {64: 2, 32: 2, 16: 4}
"""Tokens of a tile -> thread blocks on an SM: as many as their registers allow."""

STAGE_CYCLES: Final = {64: 1420, 32: 790, 16: 470}
"""Tokens of a tile -> cycles of a stage, for each block that an SM holds. Counted in the machine
code of Q4_0: an instruction is one cycle, an IMMA 6.8 (H200: its rate alone)."""

H200_EXPOSED: Final = 270
"""Cycles more where an SM has one block, and nothing hides its waiting: step 9 with 128 tokens."""

H200_STAGE_BYTES: Final = 28
"""Bytes of stages that an SM gets from the L2 in a cycle: the most that was seen (Q8_0, 128
tokens)."""

H200_HAND_OVER: Final = 3000
"""Cycles to store partial sums, to count, and to wait for those of others, besides their bytes."""

H200_PARTIAL_BYTES: Final = 24
"""Bytes of partial sums that an SM moves to or from the L2 in a cycle."""

READS: Final = 4
"""Times that a product may read its weights from the L2, at most, for tiles of fewer tokens."""


def tiling(fmt: Format, shape: Shape, sms: int) -> tuple[int, int, int, int]:
    """(tokens of a tile, tiles, thread blocks, tiles that they share): what should take the fewest
    cycles on `sms` multiprocessors."""
    steps = ceil_div(shape.k, TILE_K)
    least, best = float("inf"), (0, 0, 0, 0)
    for bm, per_sm in BLOCKS_PER_SM.items():
        if shape.m > READS * bm and bm < max(BLOCKS_PER_SM):
            continue
        tiles = ceil_div(shape.n, BN) * ceil_div(shape.m, bm)
        for blocks, shared_tiles, count, worked_on in schedules(tiles, steps, sms * per_sm):
            on_an_sm = ceil_div(blocks, sms)
            cycles = count * max(
                STAGE_CYCLES[bm] + H200_EXPOSED,
                on_an_sm * STAGE_CYCLES[bm],
                on_an_sm * stage_layout(fmt, bm).stage_bytes // H200_STAGE_BYTES,
            )
            if shared_tiles:  # each block stores, and the last to arrive at a tile loads
                loaded = ceil_div(shared_tiles, sms) * ceil_div(blocks, shared_tiles)
                moved = (on_an_sm + loaded) * BN * bm * 4
                cycles += min(2, worked_on) * (H200_HAND_OVER + moved // H200_PARTIAL_BYTES)
            if cycles < least:
                least, best = cycles, (bm, tiles, blocks, shared_tiles)
    return best


def least_shared_bytes(blocks: int, sms: int) -> int:
    """Shared memory of a thread block, such that an SM holds no more than its even part of
    `blocks`. An overlapping launch begins while some SMs are free and others still work for the
    launch before: with more places, the free ones would take the blocks of the others too."""
    places = ceil_div(blocks, sms)
    kept = 1024  # of each block's place, by the SM
    return (shared_memory() + kept) // (places + 1) - kept + 16
