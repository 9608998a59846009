"""Weights of a fragment-packed tile as float16 in registers: what the W4A16 steps multiply.

Step 11 teaches this; steps 12 to 14 use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numba import cuda, uint32

from qformats import FORMATS
from qformats.repack import MINIMUM_SCALE
from steps.instructions import and_xor, hfma2, high2half2, hmul2, load_u32, low2half2, select_bits
from steps.kernels.parts.weights.codes import tile_format


@dataclass(frozen=True, slots=True)
class HalfFormat:
    """How lanes make float16 weights of a packed tile of `qformats.repack.tiles`.

    tile_bytes: bytes of one packed tile
    words(m, offset, lane, half) -> `n_words` words
        the codes of one lane for one half, 64 K, of the packed tile at byte `offset` of m
    scales(m, offset, lane, half) -> `n_scales` words
        the same for the scales and minima
    multipliers(scales, block) -> (of row g, of row g + 8), of block 0 or 1 of that half. Each is
        (factor of codes in low nibbles, of codes in high nibbles, offset), as float16 twice
    fragments(words, step, multipliers) -> (a0, a1, a2, a3)
        of `mma_m16n8k16_f16` for step 0 to 3 of 16 K of that half, whose block the multipliers are
        of. With g = lane // 4, t = lane % 4 the registers hold

                         lower half   upper half
            row g          a0: 2t       2t + 1          of these 16 K
            row g + 8      a1: 2t       2t + 1
            row g          a2: 2t + 8   2t + 9
            row g + 8      a3: 2t + 8   2t + 9

        as the instruction takes K in its natural order. A mask finds both codes of a register in
        one word, since the word has K in `qformats.repack.MMA_ORDER`.
    `block` and `step` are to be constants. A register, two weights, costs a LOP3, an HFMA2, and a
    quarter (4 bits) or half (8 bits) of a shift. 5 bits cost half a LOP3 and half a shift more,
    where both steps of a block are made. Multipliers add three quarters of an instruction.
    """

    tile_bytes: int
    words: Any
    scales: Any
    multipliers: Any
    fragments: Any
    n_words: int
    n_scales: int


SIXTEENTH = 0x2C002C00  # 2^-4 twice: the factor for codes that stand 4 bits too high
EIGHTH = 0x30003000  # 2^-3 twice
LOWER_BYTES = 0x6240  # prmt: of two words with two numbers each the lower bytes, in turns
FIFTH_BITS = 0x00180018  # bits 3 and 4 of both halves of a register


@cuda.jit(device=True, forceinline=True)
def two_of_five(words, block, row, up, odd):
    """Two codes of 5 bits, of bytes 0 and 2 of a word or (odd) of bytes 1 and 3, one in each half
    of a register. Nibbles stay where they are, and the missing bit joins them:

        bit                7   6   5   4   3   2   1   0
        low nibbles        .   .   .   f   n   n   n   n     f: highest bit    the code
        high nibbles (up)  n   n   n   n   f   .   .   .     f: lowest bit     8 times the code

    The bits f of both lie side by side in words[4]. One shift and one mask bring them to bits 4 and
    3; the nibble covers the one that belongs to the other code."""
    word = 2 * block + row
    down = 8 * odd + 2 * word - 3
    bits = uint32(words[4]) >> uint32(down) if down >= 0 else uint32(words[4]) << uint32(-down)
    nibbles = uint32(words[word]) >> uint32(8 * odd)
    return select_bits(0x000F000F << 4 * up, nibbles, bits & uint32(FIFTH_BITS))


@cache
def two_of_four(flip: int) -> Any:
    """The same with 4 bits: the codes, or (up) 16 times the codes. flip: the bits that are flipped
    in codes that are kept as two's complement."""

    @cuda.jit(device=True, forceinline=True)
    def codes(words, block, row, up, odd):
        nibbles = uint32(words[2 * block + row]) >> uint32(8 * odd)
        return and_xor(nibbles, 0x000F000F << 4 * up, flip << 4 * up)

    return codes


@cache
def half_format(format_name: str) -> HalfFormat:
    """The float16 weights of a format, for capture in a kernel factory."""
    tile = tile_format(format_name)
    scales_at, minima_at, minimum = tile.scales_at, tile.minima_at, tile.minimum
    bits = FORMATS[format_name].bits
    # the code of 0: as a float16, negative, times d' it is the offset ...
    centre = {"q4_0": 8, "q5_0": 16, "q8_0": 128}.get(format_name, 0)
    minus_centre = (0x8000 | centre) * 0x00010001
    too_high = EIGHTH if bits == 5 else SIXTEENTH  # codes of upper nibbles
    # ... and what has been flipped in codes that are kept as two's complement
    flip = centre * 0x00010001
    minimum_unit = int(np.float16(MINIMUM_SCALE).view(np.uint16)) * 0x00010001

    @cuda.jit(device=True, forceinline=True)
    def scales_alone(m, offset, lane, half):
        row_g = offset + scales_at + (lane >> 2) * 16 + 4 * half
        return load_u32(m, row_g), load_u32(m, row_g + 8)

    @cuda.jit(device=True, forceinline=True)
    def scales_and_minima(m, offset, lane, half):
        d_g, d_h = scales_alone(m, offset, lane, half)
        row_g = offset + minima_at + (lane >> 2) * 16 + 4 * half
        return d_g, d_h, load_u32(m, row_g), load_u32(m, row_g + 8)

    @cuda.jit(device=True, forceinline=True)
    def twice(word, block):
        return high2half2(word) if block else low2half2(word)

    @cuda.jit(device=True, forceinline=True)
    def of_row(scales, row, block):
        d = twice(scales[row], block)
        if minimum:
            offset = hmul2(twice(scales[2 + row], block), minimum_unit)
        else:
            offset = hmul2(d, minus_centre)
        return d, hmul2(d, too_high), offset

    @cuda.jit(device=True, forceinline=True)
    def multipliers(scales, block):
        return of_row(scales, 0, block), of_row(scales, 1, block)

    codes = two_of_five if bits == 5 else two_of_four(flip)

    @cuda.jit(device=True, forceinline=True)
    def fragments(w, step, multipliers):
        (low_g, high_g, off_g), (low_h, high_h, off_h) = multipliers
        x, y = (high_g, high_h) if step & 1 else (low_g, low_h)
        return (
            hfma2(codes(w, step >> 1, 0, step & 1, 0), x, off_g),
            hfma2(codes(w, step >> 1, 1, step & 1, 0), y, off_h),
            hfma2(codes(w, step >> 1, 0, step & 1, 1), x, off_g),
            hfma2(codes(w, step >> 1, 1, step & 1, 1), y, off_h),
        )

    @cuda.jit(device=True, forceinline=True)
    def codes_8(word, odd):
        return and_xor(uint32(word) >> uint32(8 * odd), 0x00FF00FF, flip)

    @cuda.jit(device=True, forceinline=True)
    def fragments_8(w, step, multipliers):
        g, h = w[2 * step], w[2 * step + 1]
        (x, _, off_g), (y, _, off_h) = multipliers
        return (
            hfma2(codes_8(g, 0), x, off_g),
            hfma2(codes_8(h, 0), y, off_h),
            hfma2(codes_8(g, 1), x, off_g),
            hfma2(codes_8(h, 1), y, off_h),
        )

    return HalfFormat(
        tile_bytes=tile.tile_bytes,
        words=tile.load,
        scales=scales_and_minima if minimum else scales_alone,
        multipliers=multipliers,
        fragments=fragments_8 if bits == 8 else fragments,
        n_words=bits,
        n_scales=4 if minimum else 2,
    )
