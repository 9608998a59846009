"""Weights of a fragment-packed tile requantized to int8 with one scale per row.

Step 13 teaches this.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numba import cuda, uint32

from qformats import FORMATS
from qformats.repack import BYTE_SCALE, BYTE_ZERO, CENTRE
from steps.components.unpack.codes import tile_format
from steps.components.unpack.halves import EIGHTH, SIXTEENTH, half_format, two_of_five, two_of_four
from steps.instructions import hfma2, hmul2, prmt


@dataclass(frozen=True, slots=True)
class ByteFormat:
    """How lanes make the byte weights of a packed tile of `qformats.repack.byte_tiles`, or of
    `qformats.integer_scales.integer_tiles`.

    tile_bytes: of one packed tile
    zero      : the byte that means 0: 0 where bytes are signed, else they are unsigned
    unpacked  : False where the stored bytes are operands already
    words(m, offset, lane, half), scales(m, offset, lane, half)
        the words of one lane for one half, 64 K, of the packed tile at byte `offset` of m
    fragments(words, scales, block) -> (a0, a1, a2, a3)
        of block 0 or 1 of that half, as `wgmma_s8` takes them, or `wgmma_u8`

    Of `byte_tiles`: in one register two codes, each taken as a float16 below 2^-13, are multiplied
    by d' and added to m', which leaves an int8 in the lower byte of each; a PRMT makes four of two.
    Eight codes cost a shift, four LOP3, four HFMA2 and two PRMT, with 5 bits two LOP3 and two
    shifts more; and three instructions for what depends on the scale.

    Of `integer_tiles`: in one register four codes are multiplied at once. Eight of them cost a
    shift, two LOP3 and two IMAD, with 5 bits one LOP3 and three quarters of a shift more; and two
    PRMT for what depends on the scale.
    """

    tile_bytes: int
    zero: int
    unpacked: bool
    words: Any
    scales: Any
    fragments: Any


LOWER_BYTES = 0x6240  # prmt: of two words with two numbers each the lower bytes, in turns
ZERO_BITS = int(np.float16(BYTE_SCALE * BYTE_ZERO).view(np.uint16)) * 0x00010001


@cache
def byte_format(format_name: str) -> ByteFormat:
    """The int8 weights of a format, for capture in a kernel factory."""
    tile, half = tile_format(format_name), half_format(format_name)
    minimum, bits = tile.minimum, FORMATS[format_name].bits
    flip = 0x00080008 if format_name == "q4_0" else 0  # what `tiles` did to nibbles
    too_high = SIXTEENTH if bits == 4 else EIGHTH  # codes of upper nibbles
    minus_centre = CENTRE.get(format_name, 0) * 0x00010001 | 0x80008000

    @cuda.jit(device=True, forceinline=True)
    def no_scales(m, offset, lane, half):
        return (uint32(0),)

    @cuda.jit(device=True, forceinline=True)
    def of_row(scales, row, block):
        """(d' for codes where they are, for codes of high nibbles, m')"""
        pick = 0x3232 if block else 0x1010
        d = prmt(scales[row], scales[row], pick)
        if minimum:
            return d, hmul2(d, too_high), prmt(scales[2 + row], scales[2 + row], pick)
        return d, hmul2(d, too_high), hfma2(d, minus_centre, ZERO_BITS)

    codes = two_of_four(flip) if bits == 4 else two_of_five

    @cuda.jit(device=True, forceinline=True)
    def four(words, block, row, up, scale, offset):
        even = hfma2(codes(words, block, row, up, 0), scale, offset)
        odd = hfma2(codes(words, block, row, up, 1), scale, offset)
        return prmt(even, odd, LOWER_BYTES)

    @cuda.jit(device=True, forceinline=True)
    def fragments(words, scales, block):
        low_g, high_g, off_g = of_row(scales, 0, block)
        low_h, high_h, off_h = of_row(scales, 1, block)
        return (
            four(words, block, 0, 0, low_g, off_g),
            four(words, block, 1, 0, low_h, off_h),
            four(words, block, 0, 1, high_g, off_g),
            four(words, block, 1, 1, high_h, off_h),
        )

    @cuda.jit(device=True, forceinline=True)
    def fragments_8(words, scales, block):
        return words[4 * block], words[4 * block + 1], words[4 * block + 2], words[4 * block + 3]

    return ByteFormat(
        tile_bytes=tile.scales_at if bits == 8 else tile.tile_bytes,
        zero=0,
        unpacked=bits < 8,
        words=tile.load,
        scales=no_scales if bits == 8 else half.scales,
        fragments=fragments_8 if bits == 8 else fragments,
    )


LOW_FIVE, UPPER_BITS = 0x1F1F1F1F, 0x07070707  # of each byte: a code, and three bits moved down
