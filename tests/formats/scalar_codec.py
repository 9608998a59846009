"""ggml's reference quantizers once more, one number at a time, in plain Python.

Written from the recipes alone, sharing nothing with `qformats`, not even NumPy, so that both can be
wrong only independently. Slow and obvious on purpose: x is 32 Python floats, each a float32 value.
"""

from __future__ import annotations

import math
import struct


def f32(value: float) -> float:
    """A double rounded to float32. Rounding a double result of + - * / once more is exact here."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def f16(value: float) -> bytes:
    """Two bytes of a float32 rounded to float16, to nearest even."""
    return struct.pack("<e", value)


def inverse(d: float) -> float:
    return f32(1.0 / d) if d != 0.0 else 0.0


def cast(y: float) -> int:
    """(int) y in C: toward zero. Undefined there for NaN and inf; x86-64 makes it 0 in a byte."""
    return int(y) if math.isfinite(y) else 0


def roundf(y: float) -> float:
    return math.copysign(math.floor(abs(y) + 0.5), y) if math.isfinite(y) else y


def nibbles(codes: list[int]) -> bytes:
    return bytes((codes[j] & 15) | (codes[j + 16] & 15) << 4 for j in range(16))


def fifth(codes: list[int]) -> bytes:
    word = 0
    for j in range(32):
        word |= (codes[j] >> 4) << j
    return struct.pack("<I", word)


def symmetric(x: list[float], zero: int) -> tuple[float, list[int]]:
    largest, extreme = 0.0, 0.0
    for v in x:
        if largest < abs(v):
            largest, extreme = abs(v), v
    d = f32(extreme / -zero)
    inv = inverse(d)
    return d, [min(2 * zero - 1, cast(f32(f32(v * inv) + (zero + 0.5)))) for v in x]


def affine(x: list[float], top: int) -> tuple[float, float, list[int]]:
    low = high = x[0]
    for v in x[1:]:
        if v < low:
            low = v
        if v > high:
            high = v
    d = f32(f32(high - low) / top)
    inv = inverse(d)
    return d, low, [cast(f32(f32(f32(v - low) * inv) + 0.5)) for v in x]


def signed(x: list[float]) -> tuple[float, list[int]]:
    d = f32(max(abs(v) for v in x) / 127)
    inv = inverse(d)
    return d, [cast(roundf(f32(v * inv))) for v in x]


def q4_0(x: list[float]) -> bytes:
    d, codes = symmetric(x, 8)
    return f16(d) + nibbles(codes)


def q4_1(x: list[float]) -> bytes:
    d, m, codes = affine(x, 15)
    return f16(d) + f16(m) + nibbles([min(15, q) for q in codes])


def q5_0(x: list[float]) -> bytes:
    d, codes = symmetric(x, 16)
    return f16(d) + fifth(codes) + nibbles(codes)


def q5_1(x: list[float]) -> bytes:
    d, m, codes = affine(x, 31)
    return f16(d) + f16(m) + fifth(codes) + nibbles(codes)


def q8_0(x: list[float]) -> bytes:
    d, codes = signed(x)
    return f16(d) + struct.pack("<32b", *codes)


def q8_1(x: list[float]) -> bytes:
    d, codes = signed(x)
    return f16(d) + f16(f32(sum(codes) * d)) + struct.pack("<32b", *codes)


E2M1 = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]  # doubled, as ggml has them
IQ4_NL = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]


def mxfp4(x: list[float]) -> bytes:
    largest = max(abs(v) for v in x)
    e = max(0, math.floor(f32(math.log2(largest))) + 125) if largest > 0 else 0
    codes = []
    for v in x:
        errors = [f32(abs(f32(f32(level * 2.0 ** (e - 128)) - v))) for level in E2M1]
        codes.append(errors.index(min(errors)))
    return bytes([e]) + nibbles(codes)


def nearest(y: float) -> int:
    """The upper one of two equally near, by the differences in float32."""
    if y <= IQ4_NL[0]:
        return 0
    if y >= IQ4_NL[15]:
        return 15
    upper = next(code for code in range(16) if y < IQ4_NL[code])
    below, above = f32(y - IQ4_NL[upper - 1]), f32(IQ4_NL[upper] - y)
    return upper - 1 if below < above else upper


def iq4_nl(x: list[float]) -> bytes:
    largest, extreme = 0.0, 0.0
    for v in x:
        if largest < abs(v):
            largest, extreme = abs(v), v
    if largest < f32(1e-15):
        return f16(0.0) + nibbles([8] * 32)
    inv = f32(1.0 / f32(extreme / -127.0))
    codes = [nearest(f32(inv * v)) for v in x]
    above = below = 0.0
    for v, code in zip(x, codes, strict=True):
        weighted = f32(f32(v * v) * IQ4_NL[code])
        above = f32(above + f32(weighted * v))
        below = f32(below + f32(weighted * IQ4_NL[code]))
    return f16(f32(above / below)) + nibbles(codes)


QUANTIZE = {"q4_0": q4_0, "q4_1": q4_1, "q5_0": q5_0, "q5_1": q5_1, "q8_0": q8_0, "q8_1": q8_1}
QUANTIZE |= {"mxfp4": mxfp4, "iq4_nl": iq4_nl}
