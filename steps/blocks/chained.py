"""How a lesson on chained products packs its two matrices.

    H = A @ dequantize(V)[K, K]^T        rounded to float16
    C = H @ dequantize(W)[N, K]^T

An ordinary product is that of V = 1. So all that checks a step, and knows one matrix, checks such a
lesson, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qformats import BLOCK, Format, format_of
from qformats.repack import tiles
from steps.contract import Kernel

Array = np.ndarray[Any, np.dtype[Any]]


def tiles_of_both(blocks: Array, before: Array | None = None) -> tuple[Array, ...]:
    """Blocks of W [N, K/32], and `before`, those of V [K, K/32] or None for V = 1 -> (packed,
    row_scales) of V and of W, of `qformats.repack.tiles`."""
    if before is None:
        before = identity(format_of(blocks), blocks.shape[1] * BLOCK)
    return (*tiles(before), *tiles(blocks))


def identity(fmt: Format, k: int) -> Array:
    """Blocks [K, K/32] whose weights are 1 on the diagonal, and else 0: scales of 1, codes one
    above that of 0."""
    blocks = np.tile(fmt.quantize(np.zeros((1, k), np.float32)), (k, 1))
    row = np.arange(k)
    block, element = np.divmod(row, BLOCK)
    blocks["d"][row, block] = 1
    codes = blocks["qs"].shape[-1]  # bytes: of 16 each holds two codes
    blocks["qs"][row, block, element % codes] += (1 + 15 * (element // codes)).astype(np.uint8)
    return blocks


def multiplies_twice(kernel: Kernel) -> bool:
    """Whether it is such a lesson."""
    return kernel.pack is tiles_of_both
