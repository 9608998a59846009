"""Weights of a fragment-packed tile requantized to int8 with one scale per row.

A word has the codes of four neighbours along K in the low nibbles of its bytes, and of four others
in the high ones. Two codes at a time, taken as float16, become two int8 by one multiply-add:

                          byte 3     byte 2     byte 1     byte 0
    word                  [ .. d]    [ .. c]    [ .. b]    [ .. a]
    word & 0x000F000F     0          c          0          a        float16 c, a:  code * 2^-24
    HFMA2                 exponent   int8 c     exponent   int8 a   = (1280 + int8) * 2^-13
    word >> 8, the same   exponent   int8 d     exponent   int8 b
    PRMT                  int8 d     int8 c     int8 b     int8 a   what wgmma takes

The multiply-add is code * d' + m', rounded once: beside 1280 * 2^-13 a float16 has no bits below
2^-13, so the sum is an integer of these, and its lower byte is the int8 in two's complement.

Step 15 teaches this.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numba import cuda, uint32

from qformats import FORMATS
from qformats.repack import BYTE_SCALE, BYTE_ZERO, CENTRE
from steps.instructions import hfma2, high2half2, hmul2, low2half2, prmt
from steps.kernels.parts.weights.codes import HIGHEST, tile_format
from steps.kernels.parts.weights.halves import (
    EIGHTH,
    LOWER_BYTES,
    SIXTEENTH,
    half_format,
    two_of_five,
    two_of_four,
)


@dataclass(frozen=True, slots=True)
class ByteFormat:
    """How lanes make the byte weights of a packed tile of `qformats.repack.byte_tiles`.

    tile_bytes: of one packed tile
    words(m, offset, lane, half), scales(m, offset, lane, half)
        the words of one lane for one half, 64 K, of the packed tile at byte `offset` of m
    fragments(words, scales, block) -> (a0, a1, a2, a3)
        of block 0 or 1 of that half, as `wgmma_s8` takes them

    Eight codes cost a shift, four LOP3, four HFMA2 and two PRMT, with 5 bits two
    LOP3 and two shifts more. A word of scales holds those of a row for both blocks; their multiples
    cost two instructions (one in formats with minima), and HFMA2 picks the half that it needs.
    Bytes of formats of 8 bits are stored with their highest bit flipped, and flipped back here: so
    an instruction writes the operands' registers, as in all formats. Loads would have to wait until
    the product before has read them.
    """

    tile_bytes: int
    words: Any
    scales: Any
    fragments: Any


ZERO_BITS = int(np.float16(BYTE_SCALE * BYTE_ZERO).view(np.uint16)) * 0x00010001


@cuda.jit(device=True, forceinline=True)
def flipped(word):
    """The highest bit of each byte: of x + 128, an unsigned byte, this makes x, a signed one."""
    return uint32(uint32(word) ^ uint32(HIGHEST))


@cache
def byte_format(format_name: str) -> ByteFormat:
    """The int8 weights of a format, for capture in a kernel factory."""
    tile, half = tile_format(format_name), half_format(format_name)
    minimum, bits = tile.minimum, FORMATS[format_name].bits
    too_high = SIXTEENTH if bits == 4 else EIGHTH  # codes of upper nibbles
    minus_centre = CENTRE.get(format_name, 0) * 0x00010001 | 0x80008000
    codes = two_of_four(0) if bits == 4 else two_of_five

    @cuda.jit(device=True, forceinline=True)
    def no_scales(m, offset, lane, half):
        return (uint32(0),)

    @cuda.jit(device=True, forceinline=True)
    def of_block(two, block):
        """Of the scales of two blocks, that of one, twice."""
        return high2half2(two) if block else low2half2(two)

    @cuda.jit(device=True, forceinline=True)
    def of_row(scales, row):
        """For both blocks: (d' for codes where they are, for codes of high nibbles, m')"""
        d = scales[row]
        if minimum:
            return d, hmul2(d, too_high), scales[2 + row]
        return d, hmul2(d, too_high), hfma2(d, minus_centre, ZERO_BITS)

    @cuda.jit(device=True, forceinline=True)
    def four(words, block, row, up, scale, offset):
        """Four neighbours along K, of low nibbles or of high ones (`up`)."""
        d, m = of_block(scale, block), of_block(offset, block)
        even = hfma2(codes(words, block, row, up, 0), d, m)
        odd = hfma2(codes(words, block, row, up, 1), d, m)
        return prmt(even, odd, LOWER_BYTES)

    @cuda.jit(device=True, forceinline=True)
    def fragments(words, scales, block):
        low_g, high_g, offset_g = of_row(scales, 0)
        low_h, high_h, offset_h = of_row(scales, 1)
        return (
            four(words, block, 0, 0, low_g, offset_g),
            four(words, block, 1, 0, low_h, offset_h),
            four(words, block, 0, 1, high_g, offset_g),
            four(words, block, 1, 1, high_h, offset_h),
        )

    @cuda.jit(device=True, forceinline=True)
    def fragments_8(words, scales, block):
        i = 4 * block
        return (
            flipped(words[i]),
            flipped(words[i + 1]),
            flipped(words[i + 2]),
            flipped(words[i + 3]),
        )

    return ByteFormat(
        tile_bytes=tile.scales_at if bits == 8 else tile.tile_bytes,
        words=tile.load,
        scales=no_scales if bits == 8 else half.scales,
        fragments=fragments_8 if bits == 8 else fragments,
    )
