"""What a product of the decode steps is: two row tiles of weights times the tokens of a block.

`product_a16` and `product_a8` make it for the two families. Step 17 teaches this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from qformats import BLOCK
from qformats.repack import TILE_K

PAIR: Final = 2
"""Row tiles that are multiplied together, so that what is read of A serves both. Those whose packed
tiles lie side by side (`qformats.repack.TILE_GROUP`) are one piece of memory."""

BLOCKS: Final = TILE_K // BLOCK
"""Blocks of K in a packed tile."""


@dataclass(frozen=True, slots=True)
class Product:
    """Device functions of a warp, for a pair of row tiles and up to `tokens` tokens.

    sums  : float32 of a lane in `acc`. Of row tile r and token group j of eight, from
            4 (r * groups + j) on: row g tokens 2t, 2t + 1, row g + 8 tokens 2t, 2t + 1
    scale : by which sums are to be multiplied, beside the row scales
    places(lane, here, pitch) -> offsets
        where the lane reads in a tile of A, from its first byte; `here` tokens of `tokens` are
        there, `pitch` bytes apart where they lie in rows
    multiply(acc, smem, weights, a, a_scales, offsets, here, lane)
        acc += the packed tiles at byte `weights` times the 128 K of A at byte `a`, whose scales
        begin at byte `a_scales`
    finish(acc)
        acc = the sums, from what `multiply` has left in the lanes
    """

    sums: int
    scale: float
    places: Any
    multiply: Any
    finish: Any
