"""Scales and minima of the blocks of a packed tile as float32: they multiply sums, not weights.

Step 17 teaches this.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from numba import cuda, uint32

from qformats import BLOCK
from steps.instructions import half_to_float, load_u16, load_u32, load_u32x2, prmt
from steps.kernels.parts.weights.storage_formats import ROWS_APART, SCALES_OF_HALF, tile_format


@dataclass(frozen=True, slots=True)
class BlockScales:
    """Device functions that read scales, or minima, of a packed tile's rows g and g + 8, where the
    lane is 4g + t.

    load(smem, offset, lane, half) -> `words` words
        those of the two blocks of one half, 64 K, where all of the tile begin at byte `offset`
    of_block(words, odd, part) -> (of row g, of row g + 8)
        float32, of the first or the second of these blocks; of its part 0 or 1 of 16 K where these
        have scales of their own
    """

    words: int
    load: Any
    of_block: Any


@cache
def block_scales(name: str) -> BlockScales:
    """The device functions of a storage format, for capture in a kernel factory."""
    tile = tile_format(name)

    @cuda.jit(device=True, forceinline=True)
    def load_32(smem, offset, lane, half):
        """Two float16 of row g, two of row g + 8."""
        first = offset + 16 * (lane >> 2) + 4 * half
        return load_u32(smem, first), load_u32(smem, first + 8)

    @cuda.jit(device=True, forceinline=True)
    def load_bytes(smem, offset, lane, half):
        """The same of upper bytes of float16."""
        first = offset + 8 * (lane >> 2) + 2 * half
        g, h = uint32(load_u16(smem, first)), uint32(load_u16(smem, first + 4))
        return prmt(g, 0, 0x1404), prmt(h, 0, 0x1404)

    @cuda.jit(device=True, forceinline=True)
    def of_block_32(words, odd, part):
        up = uint32(16 * odd)
        return half_to_float(uint32(words[0]) >> up), half_to_float(uint32(words[1]) >> up)

    @cuda.jit(device=True, forceinline=True)
    def load_16(smem, offset, lane, half):
        """Four float16 of row g, four of row g + 8."""
        first = offset + half * SCALES_OF_HALF + 8 * (lane >> 2)
        g, h = load_u32x2(smem, first), load_u32x2(smem, first + ROWS_APART)
        return g[0], g[1], h[0], h[1]

    @cuda.jit(device=True, forceinline=True)
    def of_block_16(words, odd, part):
        up = uint32(16 * part)
        return half_to_float(uint32(words[odd]) >> up), half_to_float(uint32(words[2 + odd]) >> up)

    if tile.group < BLOCK:
        return BlockScales(4, load_16, of_block_16)
    return BlockScales(2, load_bytes if tile.scale_bytes == 1 else load_32, of_block_32)
