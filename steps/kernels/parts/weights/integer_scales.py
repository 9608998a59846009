"""Weights of a fragment-packed tile from codes and small integer scales, four by one multiply-add.

    LOP3    codes of a register, one in each byte
    IMAD    codes * r + c * 0x01010101, where c is the byte of the offset plus 128
    LOP3    the highest bit of each byte flipped: minus 128, as int8

With 4 bits a word holds the codes of two registers, in low and in high nibbles. With 5 bits a lane
loads five words for eight registers (4 block + 2 up + row). Registers 0 to 4 have their codes in
the low five bits of the bytes of a word; the bits of registers 5 to 7 are above these:

    bits of a byte    7    6    5                    4 .. 0
    word 0            bits 2..0 of register 5        register 0
    word 1            4, 3 of 5;  3 of register 7    register 1
    word 2            bits 2..0 of register 6        register 2
    word 3            4, 3 of 6;  4 of register 7    register 3
    word 4            bits 2..0 of register 7        register 4

Step 16 teaches this.
"""

from __future__ import annotations

from functools import cache

from numba import cuda, uint32

from qformats import FORMATS
from qformats.repack import TILE_ROWS
from steps.blocks.codes import NIBBLES
from steps.blocks.q8_1 import TILE_BLOCKS
from steps.instructions import and_xor, load_u32, prmt
from steps.kernels.parts.weights.codes import tile_format
from steps.kernels.parts.weights.int8 import ByteFormat, byte_format, flipped

LOW_FIVE = 0x1F1F1F1F  # of each byte: a code of 5 bits
UPPER_BITS = 0x07070707  # three bits moved down


@cache
def integer_format(format_name: str) -> ByteFormat:
    """The byte weights of a format, for capture in a kernel factory."""
    tile, bytes_8 = tile_format(format_name), byte_format(format_name)
    bits, scales_at = FORMATS[format_name].bits, tile.scales_at

    @cuda.jit(device=True, forceinline=True)
    def scales(m, offset, lane, half):
        row_g = offset + scales_at + (lane >> 2) * 16 + 4 * half
        return load_u32(m, row_g), load_u32(m, row_g + 8)

    @cuda.jit(device=True, forceinline=True)
    def codes_4(words, block, row, up):
        return uint32(uint32(words[2 * block + row]) >> uint32(4 * up)) & uint32(NIBBLES)

    @cuda.jit(device=True, forceinline=True)
    def left_over(word, down, mask, others):
        """`others`, and the bits of a word at this mask once it is shifted down."""
        return and_xor(uint32(word) >> uint32(down), mask, others)

    @cuda.jit(device=True, forceinline=True)
    def codes_5(words, block, row, up):
        register = 4 * block + 2 * up + row
        if register < 5:
            return uint32(words[register]) & uint32(LOW_FIVE)
        three = left_over(words[2 * register - 10], 5, UPPER_BITS, uint32(0))
        if register < 7:
            return left_over(words[2 * register - 9], 3, 0x18181818, three)
        return left_over(words[1], 2, 0x08080808, left_over(words[3], 1, 0x10101010, three))

    codes = codes_4 if bits == 4 else codes_5

    @cuda.jit(device=True, forceinline=True)
    def fragments(words, scales, block):
        r_g = prmt(scales[0], 0, 0xAAA2 if block else 0x8880)  # one byte, its sign above it
        r_h = prmt(scales[1], 0, 0xAAA2 if block else 0x8880)
        c_g = prmt(scales[0], 0, 0x3333 if block else 0x1111)  # one byte four times
        c_h = prmt(scales[1], 0, 0x3333 if block else 0x1111)
        return (
            flipped(codes(words, block, 0, 0) * r_g + c_g),
            flipped(codes(words, block, 1, 0) * r_h + c_h),
            flipped(codes(words, block, 0, 1) * r_g + c_g),
            flipped(codes(words, block, 1, 1) * r_h + c_h),
        )

    return ByteFormat(
        tile_bytes=scales_at + (0 if bits == 8 else TILE_ROWS * TILE_BLOCKS * 2),
        words=tile.load,
        scales=bytes_8.scales if bits == 8 else scales,
        fragments=bytes_8.fragments if bits == 8 else fragments,
    )
