"""Arithmetic on packed bytes and half-precision bits, one 32-bit register at a time."""

import struct

import numpy as np
from numba.cuda.types import float32, int32, uint16, uint32

from steps.instructions.define import ptx


def uint8s(word: int) -> tuple[int, int, int, int]:
    """The four bytes of a 32-bit word, lowest first, as 0..255 (host and twins only)."""
    return word & 255, word >> 8 & 255, word >> 16 & 255, word >> 24 & 255


def int8s(word: int) -> tuple[int, int, int, int]:
    """The four bytes of a 32-bit word, lowest first, as -128..127 (host and twins only)."""
    a, b, c, d = uint8s(word)
    return (a ^ 128) - 128, (b ^ 128) - 128, (c ^ 128) - 128, (d ^ 128) - 128


@ptx("dp4a.s32.s32 $0, $1, $2, $3;", returns=int32, takes=(int32, int32, int32))
def dp4a(a, b, c):
    """c + the dot product of the four signed bytes of a and of b, modulo 2^32. IDP.4A.S8.S8."""
    a0, a1, a2, a3 = int8s(a)
    b0, b1, b2, b3 = int8s(b)
    return c + a0 * b0 + a1 * b1 + a2 * b2 + a3 * b3


@ptx("dp4a.u32.s32 $0, $1, $2, $3;", returns=int32, takes=(uint32, int32, int32))
def dp4a_us(a, b, c):
    """As `dp4a` with the bytes of a unsigned: codes against signed activations. IDP.4A.U8.S8."""
    a0, a1, a2, a3 = uint8s(a)
    b0, b1, b2, b3 = int8s(b)
    return c + a0 * b0 + a1 * b1 + a2 * b2 + a3 * b3


@ptx("prmt.b32 $0, $1, $2, $3;", returns=uint32, takes=(uint32, uint32, uint32))
def prmt(a, b, selector):
    """Four bytes picked from the eight of a (0..3) and b (4..7), byte i by nibble i of `selector`.

    Bit 3 of a nibble replicates the sign bit of the byte instead (PTX ISA, `prmt`, generic form).
    """
    source = uint8s(a) + uint8s(b)
    result = 0
    for i in range(4):
        pick = selector >> (4 * i) & 15
        byte = source[pick & 7]
        if pick & 8:
            byte = 255 if byte & 128 else 0
        result |= byte << (8 * i)
    return result


@ptx("lop3.b32 $0, $1, $2, $3, 0x6A;", returns=uint32, takes=(uint32, uint32, uint32))
def and_xor(a, b, c):
    """(a & b) ^ c, in one instruction even where b and c are constants. LOP3."""
    return a & b ^ c


@ptx("lop3.b32 $0, $1, $2, $3, 0xCA;", returns=uint32, takes=(uint32, uint32, uint32))
def select_bits(mask, a, b):
    """Bits of a where those of the mask are set, else of b, in one instruction. LOP3."""
    return mask & a | ~mask & b


@ptx("cvt.f32.f16 $0, $1;", returns=float32, takes=(uint16,))
def half_to_float(bits):
    """The float16 whose 16 bits are `bits`, exactly, as float32."""
    return np.uint16(bits).view(np.float16)


@ptx("cvt.rn.f16.f32 $0, $1;", returns=uint16, takes=(float32,))
def float_to_half(x):
    """The 16 bits of x rounded to the nearest float16, ties to even; infinity from 65520 on."""
    return int(np.float16(x).view(np.uint16))


def halves(word: int) -> tuple[float, float]:
    """The two float16 of a 32-bit word, the lower first (host and twins only)."""
    return struct.unpack("<2e", struct.pack("<I", word))


def of_halves(low: float, high: float) -> int:
    """The word of two values, each rounded to the nearest float16 (host and twins only)."""
    try:
        return int.from_bytes(struct.pack("<2e", low, high), "little")
    except OverflowError:  # Python has no rounding to infinity
        with np.errstate(over="ignore"):
            return int(np.array([low, high]).astype("<f2").view("<u4")[0])


@ptx("cvt.rn.f16x2.f32 $0, $2, $1;", returns=uint32, takes=(float32, float32), min_cc=(8, 0))
def floats_to_halves(low, high):
    """Both rounded to the nearest float16, ties to even, in one word. F2FP.F16.F32.PACK_AB."""
    return of_halves(low, high)


@ptx("mul.rn.f16x2 $0, $1, $2;", returns=uint32, takes=(uint32, uint32))
def hmul2(a, b):
    """a * b of two float16 each, rounded once; subnormals count in full. HFMA2 or HMUL2."""
    (a0, a1), (b0, b1) = halves(a), halves(b)
    return of_halves(a0 * b0, a1 * b1)


@ptx("fma.rn.f16x2 $0, $1, $2, $3;", returns=uint32, takes=(uint32, uint32, uint32))
def hfma2(a, b, c):
    """a * b + c of two float16 each, rounded once; subnormals count in full. HFMA2.

    The twin adds in float64, whose rounding is never seen: where it is inexact the product is below
    2^-15 and the sum above 2^5, too far from the middle between two float16 for it to matter.
    """
    (a0, a1), (b0, b1), (c0, c1) = halves(a), halves(b), halves(c)
    return of_halves(a0 * b0 + c0, a1 * b1 + c1)


@ptx("mov.b32 $0, $1;", returns=uint32, takes=(float32,))
def as_bits(x):
    """The 32 bits of a float32."""
    return int(np.float32(x).view(np.uint32))


@ptx("mov.b32 $0, $1;", returns=float32, takes=(uint32,))
def as_float(bits):
    """The float32 of 32 bits."""
    return np.uint32(bits).view(np.float32)
