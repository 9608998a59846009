"""Packed weights as float16 in registers: the A fragments of mma.m16n8k16 and of wgmma.

`qformats.repack.tiles` makes *fragment-packed tiles* of 16 rows x 128 K, in the order in which
lanes need them. For half a tile, 64 K or two blocks of 32, lane 4g + t reads these words:

    codes    of row g and row g + 8, block 0, then block 1: 4 words (Q8_0: 8)
    fifths   the fifth bits of these codes: 1 word (Q5_0 and Q5_1)
    scales   d' of both blocks, two float16: a word for row g, a word for row g + 8
    minima   m' likewise (Q4_1 and Q5_1)

One mask and one multiply-add make two weights, and nothing is converted: the bits of an integer
n < 2048, read as a float16, are the number n 2^-24. In Q4_0, whose code c means c - 8:

    a word of codes          |  k = 2t  |  2t + 8  |  2t + 1  |  2t + 9  |      bytes 0 to 3
    & 0x000F000F             |     code of 2t      |    code of 2t + 1   |      LOP3
    * d' - 8 * 2^-24 d'      |    weight of 2t     |   weight of 2t + 1  |      HFMA2: a0

High nibbles are the codes 16 K further on; they stand 4 bits too high, so they are multiplied by
d' / 16. `tiles` has divided d by 2^-24 and by a power of two for each row, its row scale, which
brings d' into the range of float16. A kernel multiplies its sums by the row scale at the end.

Step 11 teaches this; steps 12 to 14 use it, and step 15 the codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from numba import cuda, uint32

from qformats import BLOCK, FORMATS
from qformats.repack import TILE_K, TILE_ROWS
from steps.instructions import and_xor, hfma2, hmul2, load_u32, load_u32x4, prmt, select_bits

BOTH: Final = 0x00010001  # times 16 bits: the same in both halves of a register
TWO_TO_MINUS_3: Final = 0x3000 * BOTH  # float16
TWO_TO_MINUS_4: Final = 0x2C00 * BOTH
TWO_TO_MINUS_15: Final = 0x0200 * BOTH  # `tiles` has divided m by it, and by the row scale
ZERO_CODE: Final = {"q4_0": 8, "q5_0": 16, "q8_0": 128}  # the code that means 0
FLIPPED: Final = {"q4_0": 8, "q8_0": 128}  # `tiles` has flipped this bit: two's complement


@dataclass(frozen=True, slots=True)
class HalfWeights:
    """How a lane makes float16 weights of a fragment-packed tile.

    tile_bytes
        bytes of a packed tile
    load(array, offset, lane, half)
        the words above, of half 0 or 1 of the packed tile at byte `offset` of an array
    fragment(words, k16)
        (a0, a1, a2, a3) of 16 of these 64 K; k16, 0 to 3, is a constant:

                      lower half   upper half
        row g          a0: 2t       2t + 1
        row g + 8      a1: 2t       2t + 1
        row g          a2: 2t + 8   2t + 9
        row g + 8      a3: 2t + 8   2t + 9
    """

    tile_bytes: int
    load: Any
    fragment: Any


@cache
def two_codes(bits: int, flipped: int) -> Any:
    """codes(words, k16, row, odd): two codes of a word, of its bytes 0 and 2 or (odd) 1 and 3, one
    in each half of a register. words: those of `load`; k16, row and odd are constants. flipped: the
    bit that is flipped in codes which are kept as two's complement."""
    flip = flipped * BOTH

    @cuda.jit(device=True, forceinline=True)
    def codes_4(words, k16, row, odd):
        """The codes, or (k16 = 1, 3) 16 times the codes."""
        up, nibbles = 4 * (k16 & 1), words[2 * (k16 >> 1) + row] >> uint32(8 * odd)
        return and_xor(nibbles, 0x000F000F << up, flip << up)

    @cuda.jit(device=True, forceinline=True)
    def codes_5(words, k16, row, odd):
        """Nibbles stay where they are, and the fifth bit f joins them:

            bit            7   6   5   4   3   2   1   0
            k16 = 0, 2     .   .   .   f   n   n   n   n     the code; f is its highest bit
            k16 = 1, 3     n   n   n   n   f   .   .   .     8 times the code; f is its lowest bit

        The bits f of both codes are neighbours in `fifths`. One shift brings them to bits 4 and 3,
        and the nibble covers the one of the other code."""
        word = 2 * (k16 >> 1) + row
        down = 8 * odd + 2 * word - 3
        fifths = words[4] >> uint32(down) if down >= 0 else words[4] << uint32(-down)
        nibbles = words[word] >> uint32(8 * odd)
        return select_bits(0x000F000F << 4 * (k16 & 1), nibbles, fifths & uint32(0x00180018))

    @cuda.jit(device=True, forceinline=True)
    def codes_8(words, k16, row, odd):
        return and_xor(words[2 * k16 + row] >> uint32(8 * odd), 0x00FF00FF, flip)

    return {4: codes_4, 5: codes_5, 8: codes_8}[bits]


@cache
def half_weights(name: str) -> HalfWeights:
    """Those of Q4_0, Q4_1, Q5_0, Q5_1 or Q8_0, for capture in a kernel factory."""
    bits, has_minimum = FORMATS[name].bits, name in ("q4_1", "q5_1")
    blocks = TILE_ROWS * TILE_K // BLOCK  # of a packed tile; each has a scale of two bytes
    tile_bytes = blocks * FORMATS[name].block_bytes
    minima_at = tile_bytes - 2 * blocks
    scales_at = minima_at - 2 * blocks if has_minimum else minima_at
    fifths_at = TILE_ROWS * TILE_K // 2
    minus_zero_code = (0x8000 | ZERO_CODE.get(name, 0)) * BOTH  # float16, such as -8 * 2^-24
    high_nibbles = TWO_TO_MINUS_3 if bits == 5 else TWO_TO_MINUS_4

    # --- loads ------------------------------------------------------------------------------------
    @cuda.jit(device=True, forceinline=True)
    def load_codes(array, offset, lane, half):
        if bits == 8:
            first = offset + half * 1024 + lane * 16
            return load_u32x4(array, first) + load_u32x4(array, first + 512)
        w0, w1, w2, w3 = load_u32x4(array, offset + half * 512 + lane * 16)
        if bits == 5:
            return w0, w1, w2, w3, load_u32(array, offset + fifths_at + half * 128 + lane * 4)
        return w0, w1, w2, w3

    @cuda.jit(device=True, forceinline=True)
    def load(array, offset, lane, half):
        row_g = offset + (lane >> 2) * 16 + half * 4  # row g + 8 has its scales 8 bytes further
        scales = load_u32(array, row_g + scales_at), load_u32(array, row_g + scales_at + 8)
        if has_minimum:
            minima = load_u32(array, row_g + minima_at), load_u32(array, row_g + minima_at + 8)
            return load_codes(array, offset, lane, half) + scales + minima
        return load_codes(array, offset, lane, half) + scales

    codes = two_codes(bits, FLIPPED.get(name, 0))

    # --- codes -> float16 -------------------------------------------------------------------------
    @cuda.jit(device=True, forceinline=True)
    def of_block(word, k16):
        """The scale or minimum of the block that these 16 K are in, twice."""
        return prmt(word, word, 0x3232 if k16 >> 1 else 0x1010)

    @cuda.jit(device=True, forceinline=True)
    def weights(words, k16, row):
        """(a0, a2) of row g (row 0), or (a1, a3) of row g + 8 (row 1)."""
        d = of_block(words[bits + row], k16)  # behind 4, 5 or 8 words of codes and fifths
        factor = hmul2(d, high_nibbles) if bits < 8 and k16 & 1 else d
        if has_minimum:
            offset = hmul2(of_block(words[bits + 2 + row], k16), TWO_TO_MINUS_15)
        else:
            offset = hmul2(d, minus_zero_code)
        low, high = codes(words, k16, row, 0), codes(words, k16, row, 1)
        return hfma2(low, factor, offset), hfma2(high, factor, offset)

    @cuda.jit(device=True, forceinline=True)
    def fragment(words, k16):
        a0, a2 = weights(words, k16, 0)
        a1, a3 = weights(words, k16, 1)
        return a0, a1, a2, a3

    return HalfWeights(tile_bytes, load, fragment)
