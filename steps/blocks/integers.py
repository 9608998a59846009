"""Packed weights as bytes in registers: the A fragments of mma.m16n8k32.

`qformats.repack.tiles` makes *fragment-packed tiles* of 16 rows x 128 K, in the order in which
lanes need them. For half a tile, 64 K or two blocks of 32, lane 4g + t reads these words:

    codes    of row g and row g + 8, block 0, then block 1: 4 words (Q8_0: 8)
    fifths   the fifth bits of these codes: 1 word (Q5_0 and Q5_1)

A code need not stand in the lowest bits of its byte. A nibble stays in the upper half, where one
mask finds it; the byte is 16 times the code, and the scale takes that back:

    a word of codes       |  byte 0  |  byte 1  |  byte 2  |  byte 3  |    two codes in each
    << 4 & 0xF0F0F0F0     |  k = 2t  |  2t + 8  |  2t + 1  |  2t + 9  |    a0, of row g + 8: a1
         & 0xF0F0F0F0     |  2t + 16 |  2t + 24 |  2t + 17 |  2t + 25 |    a2, of row g + 8: a3

Five bits n and f make 8 times the code:

    bit               7   6   5   4   3   2   1   0
    a0, a1            f   n   n   n   n   .   .   .     f is the code's highest bit
    a2, a3            n   n   n   n   f   .   .   .     f is its lowest bit

Bytes of Q4_0, Q5_0 and Q8_0 are signed: their codes mean c - 8, c - 16 and c, and with its highest
bit flipped a code is the two's complement of that (`tiles` has flipped it in Q4_0). So no offset is
left. Those of Q4_1 and Q5_1 are unsigned, and a block has a minimum besides.

Step 7 teaches this; steps 8 to 10 use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from numba import cuda, float32, uint32

from qformats import BLOCK, FORMATS
from qformats.repack import CODE_SCALE, HALF_SCALE, MINIMUM_SCALE, TILE_K, TILE_ROWS
from steps.instructions import and_xor, half_to_float, load_u32, load_u32x4

HIGH_NIBBLES: Final = 0xF0F0F0F0  # of the four bytes of a word
LOWER_FOUR, HIGHEST, LOWEST = 0x78787878, 0x80808080, 0x08080808  # of a code in the upper five bits


@dataclass(frozen=True, slots=True)
class IntegerWeights:
    """How a lane makes int8 operands of a fragment-packed tile.

    tile_bytes
        bytes of a packed tile
    has_minimum
        Q4_1 and Q5_1: there are minima, and bytes are unsigned
    scales_at, minima_at
        the bytes of a packed tile where these begin: float16 [8 g][row g, row g + 8][4 blocks]
    load(array, offset, lane, half)
        the words above, of half 0 or 1 of the packed tile at byte `offset` of an array
    fragment(words, odd)
        (a0, a1, a2, a3) of the first block of these 64 K, or (odd) of the second: bytes that are
        codes times a power of two
    scale(word, odd)
        float32: what these bytes are to be multiplied by, of the lower or (odd) the upper of a
        word's two float16
    minimum(word, odd)
        float32: a minimum likewise
    """

    tile_bytes: int
    has_minimum: bool
    scales_at: int
    minima_at: int
    load: Any
    fragment: Any
    scale: Any
    minimum: Any


@cache
def integer_weights(name: str) -> IntegerWeights:
    """Those of Q4_0, Q4_1, Q5_0, Q5_1 or Q8_0, for capture in a kernel factory."""
    bits, has_minimum = FORMATS[name].bits, name in ("q4_1", "q5_1")
    blocks = TILE_ROWS * TILE_K // BLOCK  # of a packed tile; each has a scale of two bytes
    tile_bytes = blocks * FORMATS[name].block_bytes
    minima_at = tile_bytes - 2 * blocks
    scales_at = minima_at - 2 * blocks if has_minimum else minima_at
    fifths_at = TILE_ROWS * TILE_K // 2
    flip = HIGHEST if name == "q5_0" else 0
    # `tiles` has divided scales and minima by powers of two, and by the row scale
    scale_factor, minimum_factor = float32(HALF_SCALE / CODE_SCALE[bits]), float32(MINIMUM_SCALE)

    # --- loads ------------------------------------------------------------------------------------
    @cuda.jit(device=True, forceinline=True)
    def load(array, offset, lane, half):
        if bits == 8:
            first = offset + half * 1024 + lane * 16
            return load_u32x4(array, first) + load_u32x4(array, first + 512)
        w0, w1, w2, w3 = load_u32x4(array, offset + half * 512 + lane * 16)
        if bits == 5:
            return w0, w1, w2, w3, load_u32(array, offset + fifths_at + half * 128 + lane * 4)
        return w0, w1, w2, w3

    # --- codes -> bytes ---------------------------------------------------------------------------
    @cuda.jit(device=True, forceinline=True)
    def low_nibbles(words, i):
        """Of word i: a0 or a1."""
        if bits == 5:
            up = 6 - 2 * i
            fifths = words[4] << uint32(up) if up >= 0 else words[4] >> uint32(-up)
            return and_xor(fifths, HIGHEST, and_xor(words[i] << uint32(3), LOWER_FOUR, flip))
        return (words[i] << uint32(4)) & uint32(HIGH_NIBBLES)

    @cuda.jit(device=True, forceinline=True)
    def high_nibbles(words, i):
        """Of word i: a2 or a3."""
        if bits == 5:
            up = 3 - 2 * i
            fifths = words[4] << uint32(up) if up >= 0 else words[4] >> uint32(-up)
            return and_xor(fifths, LOWEST, and_xor(words[i], HIGH_NIBBLES, flip))
        return words[i] & uint32(HIGH_NIBBLES)

    @cuda.jit(device=True, forceinline=True)
    def fragment(words, odd):
        if bits == 8:
            i = 4 * odd
            return words[i], words[i + 1], words[i + 2], words[i + 3]
        i = 2 * odd  # row g; row g + 8 is the next
        a0, a1 = low_nibbles(words, i), low_nibbles(words, i + 1)
        return a0, a1, high_nibbles(words, i), high_nibbles(words, i + 1)

    # --- scales and minima ------------------------------------------------------------------------
    @cuda.jit(device=True, forceinline=True)
    def half_of(word, odd):
        return half_to_float(word >> uint32(16) if odd else word & uint32(0xFFFF))

    @cuda.jit(device=True, forceinline=True)
    def scale(word, odd):
        return half_of(word, odd) * scale_factor

    @cuda.jit(device=True, forceinline=True)
    def minimum(word, odd):
        return half_of(word, odd) * minimum_factor

    return IntegerWeights(
        tile_bytes, has_minimum, scales_at, minima_at, load, fragment, scale, minimum
    )
