"""Arithmetic on packed bytes and half-precision bits, one 32-bit register at a time."""

import struct
from functools import cache

import numpy as np
from numba.cuda.types import float32, int32, uint16, uint32

from steps.instructions.define import ptx

_WORD = struct.Struct("<I")
_UINT8S, _INT8S = struct.Struct("<4B"), struct.Struct("<4b")
_HALVES = struct.Struct("<2e")
_TWO_WORDS, _FOUR_HALVES = struct.Struct("<2I"), struct.Struct("<4e")
_THREE_WORDS, _SIX_HALVES = struct.Struct("<3I"), struct.Struct("<6e")


def uint8s(word: int) -> tuple[int, int, int, int]:
    """The four bytes of a 32-bit word, lowest first, as 0..255 (host and twins only)."""
    return _UINT8S.unpack(_WORD.pack(word & 0xFFFFFFFF))


def int8s(word: int) -> tuple[int, int, int, int]:
    """The four bytes of a 32-bit word, lowest first, as -128..127 (host and twins only)."""
    return _INT8S.unpack(_WORD.pack(word & 0xFFFFFFFF))


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
    source = (a | b << 32).to_bytes(8, "little")
    first, second, third, fourth, signs = _picks(selector & 0xFFFF)
    result = source[first] | source[second] << 8 | source[third] << 16 | source[fourth] << 24
    for i in signs:
        byte = 0xFF << 8 * i
        result = result | byte if result >> 8 * i & 128 else result & ~byte
    return result


@cache
def _picks(selector: int) -> tuple[int, int, int, int, list[int]]:
    """The bytes that `prmt` picks, and the places where it replicates the sign."""
    nibbles = [selector >> 4 * i & 15 for i in range(4)]
    a, b, c, d = (nibble & 7 for nibble in nibbles)
    return a, b, c, d, [i for i, nibble in enumerate(nibbles) if nibble & 8]


@ptx("lop3.b32 $0, $1, $2, $3, 0x6A;", returns=uint32, takes=(uint32, uint32, uint32))
def and_xor(a, b, c):
    """(a & b) ^ c, in one instruction even where b and c are constants. LOP3."""
    return a & b ^ c


@ptx("lop3.b32 $0, $1, $2, $3, 0xCA;", returns=uint32, takes=(uint32, uint32, uint32))
def select_bits(mask, a, b):
    """Bits of a where those of the mask are set, else of b, in one instruction. LOP3."""
    return mask & a | ~mask & b


@cache
def _half(bits: int) -> np.float32:
    return np.float32(np.uint16(bits).view(np.float16))


@ptx("cvt.f32.f16 $0, $1;", returns=float32, takes=(uint16,))
def half_to_float(bits):
    """The float16 whose 16 bits are `bits`, exactly, as float32."""
    return _half(bits)


@ptx("cvt.rn.f16.f32 $0, $1;", returns=uint16, takes=(float32,))
def float_to_half(x):
    """The 16 bits of x rounded to the nearest float16, ties to even; infinity from 65520 on."""
    return int(np.float16(x).view(np.uint16))


def halves(word: int) -> tuple[float, float]:
    """The two float16 of a 32-bit word, the lower first (host and twins only)."""
    return _HALVES.unpack(_WORD.pack(word))


def of_halves(low: float, high: float) -> int:
    """The word of two values, each rounded to the nearest float16 (host and twins only)."""
    try:
        return _WORD.unpack(_HALVES.pack(low, high))[0]
    except OverflowError:  # Python has no rounding to infinity
        with np.errstate(over="ignore"):
            return int(np.array([low, high]).astype("<f2").view("<u4")[0])


@ptx("cvt.rn.f16x2.f32 $0, $2, $1;", returns=uint32, takes=(float32, float32), min_cc=(8, 0))
def floats_to_halves(low, high):
    """Both rounded to the nearest float16, ties to even, in one word. F2FP.F16.F32.PACK_AB."""
    return of_halves(low, high)


@ptx("{.reg .b16 l, h; mov.b32 {l, h}, $1; mov.b32 $0, {l, l};}", returns=uint32, takes=(uint32,))
def low2half2(a):
    """The lower float16 of a word twice. As an operand of `hmul2` or `hfma2` it costs nothing: the
    instruction picks the half (HFMA2 R0, R1, R2.H0_H0, R3)."""
    return a & 0xFFFF | a << 16


@ptx("{.reg .b16 l, h; mov.b32 {l, h}, $1; mov.b32 $0, {h, h};}", returns=uint32, takes=(uint32,))
def high2half2(a):
    """The upper float16 of a word twice; see `low2half2`. `.H1_H1`."""
    return a >> 16 | a & 0xFFFF0000


@ptx("mul.rn.f16x2 $0, $1, $2;", returns=uint32, takes=(uint32, uint32))
def hmul2(a, b):
    """a * b of two float16 each, rounded once; subnormals count in full. HFMA2 or HMUL2."""
    a0, a1, b0, b1 = _FOUR_HALVES.unpack(_TWO_WORDS.pack(a, b))
    return of_halves(a0 * b0, a1 * b1)


@ptx("fma.rn.f16x2 $0, $1, $2, $3;", returns=uint32, takes=(uint32, uint32, uint32))
def hfma2(a, b, c):
    """a * b + c of two float16 each, rounded once; subnormals count in full. HFMA2.

    The twin adds in float64, whose rounding is never seen: where it is inexact the product is below
    2^-15 and the sum above 2^5, too far from the middle between two float16 for it to matter.
    """
    a0, a1, b0, b1, c0, c1 = _SIX_HALVES.unpack(_THREE_WORDS.pack(a, b, c))
    return of_halves(a0 * b0 + c0, a1 * b1 + c1)


# One word of memory: struct would make a quiet NaN of a signalling one.
_FLOAT = np.zeros(1, np.float32)
_BITS = _FLOAT.view(np.uint32).data


@ptx("mov.b32 $0, $1;", returns=uint32, takes=(float32,))
def as_bits(x):
    """The 32 bits of a float32."""
    _FLOAT[0] = x
    return _BITS[0]


@ptx("mov.b32 $0, $1;", returns=float32, takes=(uint32,))
def as_float(bits):
    """The float32 of 32 bits."""
    _BITS[0] = bits
    return _FLOAT[0]


def _bfloats(word: int) -> tuple[float, float]:
    """The two bfloat16 of a word, the lower first."""
    _BITS[0] = word << 16 & 0xFFFF0000
    low = float(_FLOAT[0])
    _BITS[0] = word & 0xFFFF0000
    return low, float(_FLOAT[0])


def _bfloat(x: float) -> int:
    """The 16 bits of a float32 rounded to the nearest bfloat16, its upper half, ties to even."""
    _FLOAT[0] = x
    bits = _BITS[0]
    if bits & 0x7FFFFFFF > 0x7F800000:
        return 0x7FFF  # the one NaN that the instruction makes
    return bits + 0x7FFF + (bits >> 16 & 1) >> 16


@ptx("fma.rn.bf16x2 $0, $1, $2, $3;", returns=uint32, takes=(uint32,) * 3, min_cc=(8, 0))
def hfma2_bf16(a, b, c):
    """a * b + c of two bfloat16 each, rounded once; subnormals count in full. HFMA2.BF16_V2.

    The twin rounds to float32 first, which is seen where a sum of numbers far apart is near the
    middle between two bfloat16."""
    (a0, a1), (b0, b1), (c0, c1) = (_bfloats(x) for x in (a, b, c))
    return _bfloat(a0 * b0 + c0) | _bfloat(a1 * b1 + c1) << 16


@ptx("cvt.rn.bf16x2.f32 $0, $2, $1;", returns=uint32, takes=(float32, float32), min_cc=(8, 0))
def floats_to_bfloats(low, high):
    """Both rounded to the nearest bfloat16, ties to even, in one word. F2FP.BF16.F32.PACK_AB. Back
    it needs no instruction of its own: a bfloat16 is the upper half of a float32."""
    return _bfloat(low) | _bfloat(high) << 16
