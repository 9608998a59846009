"""The codes, scale and offset of a block: device functions of each weight format.

Step 2 teaches this; steps 3 to 6 use it.

`device_format("q5_1")` gives the same five names for every weight format, so that one kernel
factory, which captures them, serves all five:

    code(w, start, j)  -> int32         stored code of element j (0..31), by single bytes
    codes(w, start, j) -> int32, int32  those of elements j and j + 16 (j < 16): a nibble format
                                        keeps them in one byte, which is loaded once
    words(w, start, i) -> int32, int32  codes of elements 4i.. and 16 + 4i.. (i = 0..3), one a byte
    scale(w, start)    -> float32       d
    offset(w, start)   -> float32       z, such that every format's value is  d * code + z

`w` is the weight matrix as plain bytes (uint8, 1-D); a block begins at byte `start`. A dot
product with one Q8_1 block (scale da, codes qa, sum s) is then, for every format,

    d * da * sum(code * qa)  +  z * s

where z * s is the *compensation*: -8 d s in Q4_0, -16 d s in Q5_0, m s in Q4_1 and Q5_1, 0 in Q8_0.

**Loads.** A Q4_0 block is 18 bytes long and its quants begin at byte 2, so a 4-byte load there
would be misaligned in every other block (CUDA error 716). A 32-bit word is therefore fetched in
the widest pieces which the layout guarantees: `b1` four bytes, `b2` two halves, `b4` the whole
word. `safe_load` derives the choice from the block's size and the field's offset; it is not a
table to get wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from numba import cuda, float32, int8, int32, uint32

from qformats import BLOCK, FORMATS
from steps.instructions import half_to_float, load_u16, load_u32

HALF = BLOCK // 2  # byte j of qs holds elements j and j + 16
NIBBLES = 0x0F0F0F0F  # the low nibble of each byte of a word


# --- safe 32-bit loads ----------------------------------------------------------------------------
@cuda.jit(device=True, forceinline=True)
def b1(p, i):
    """The 32-bit word at byte i, from single bytes: any alignment."""
    return int32(
        uint32(p[i])
        | (uint32(p[i + 1]) << uint32(8))
        | (uint32(p[i + 2]) << uint32(16))
        | (uint32(p[i + 3]) << uint32(24))
    )


@cuda.jit(device=True, forceinline=True)
def b2(p, i):
    """The 32-bit word at byte i, from two halves: i even."""
    return int32(uint32(load_u16(p, i)) | (uint32(load_u16(p, i + 2)) << uint32(16)))


@cuda.jit(device=True, forceinline=True)
def b4(p, i):
    """The 32-bit word at byte i, at once: i a multiple of four."""
    return int32(load_u32(p, i))


def safe_load(format_name: str, field: str) -> Callable[[Any, Any], Any]:
    """b1, b2 or b4: the widest load of `field` that is aligned in *every* block of an array."""
    dtype = FORMATS[format_name].dtype
    offset = dtype.fields[field][1]  # type: ignore[index]
    return {1: b1, 2: b2}.get(math.gcd(dtype.itemsize, offset, 4), b4)


# --- codes ----------------------------------------------------------------------------------------
@cuda.jit(device=True, forceinline=True)
def fifth_bits(four):
    """Four bits -> the fifth bit (value 16) of each byte of a word.

    The product lays copies of the nibble 7 bits apart, so that bit j lands on bit 8j + 4; copies
    never overlap, so nothing carries, and the mask keeps the one bit of each copy that is wanted.
    """
    return int32((uint32(four) * uint32(0x02040810)) & uint32(0x10101010))


@dataclass(frozen=True, slots=True)
class DeviceFormat:
    """The device functions of one weight format; see the module's docstring."""

    code: Any
    codes: Any
    words: Any
    scale: Any
    offset: Any


@cache
def device_format(format_name: str) -> DeviceFormat:
    """The device functions of a weight format, for capture in a kernel factory."""
    fmt = FORMATS[format_name]
    fields = {name: start for name, (_, start, *_) in fmt.dtype.fields.items()}  # type: ignore[union-attr]
    D, QS, QH, M = fields["d"], fields["qs"], fields.get("qh", 0), fields.get("m", 0)
    load_qs = safe_load(format_name, "qs")
    load_qh = safe_load(format_name, "qh") if "qh" in fields else b1
    centre = float32({"q4_0": -8.0, "q5_0": -16.0}.get(format_name, 0.0))

    @cuda.jit(device=True, forceinline=True)
    def nibble(w, start, j):
        # shifts and masks, not // and %: Python's floor division costs extra for a signed j
        return int32((uint32(w[start + QS + (j & 15)]) >> uint32((j >> 4) << 2)) & uint32(15))

    @cuda.jit(device=True, forceinline=True)
    def nibbles(w, start, j):
        byte = uint32(w[start + QS + j])
        return int32(byte & uint32(15)), int32(byte >> uint32(4))

    @cuda.jit(device=True, forceinline=True)
    def nibble_words(w, start, i):
        q = uint32(load_qs(w, start + QS + 4 * i))
        return int32(q & uint32(NIBBLES)), int32((q >> uint32(4)) & uint32(NIBBLES))

    @cuda.jit(device=True, forceinline=True)
    def five_bit(w, start, j):
        fifth = (uint32(w[start + QH + (j >> 3)]) >> uint32(j & 7)) & uint32(1)
        return int32(nibble(w, start, j) | int32(fifth << uint32(4)))

    @cuda.jit(device=True, forceinline=True)
    def five_bits(w, start, j):
        low, high = nibbles(w, start, j)
        low |= ((uint32(w[start + QH + (j >> 3)]) >> uint32(j & 7)) & uint32(1)) << uint32(4)
        high |= ((uint32(w[start + QH + 2 + (j >> 3)]) >> uint32(j & 7)) & uint32(1)) << uint32(4)
        return int32(low), int32(high)

    @cuda.jit(device=True, forceinline=True)
    def five_bit_words(w, start, i):
        low, high = nibble_words(w, start, i)
        qh = uint32(load_qh(w, start + QH)) >> uint32(4 * i)
        low |= fifth_bits(qh & uint32(15))
        high |= fifth_bits((qh >> uint32(HALF)) & uint32(15))
        return int32(low), int32(high)

    @cuda.jit(device=True, forceinline=True)
    def signed_byte(w, start, j):
        return int32(int8(w[start + QS + j]))  # int8 read as unsigned is one of the classical bugs

    @cuda.jit(device=True, forceinline=True)
    def signed_bytes(w, start, j):
        return signed_byte(w, start, j), signed_byte(w, start, j + HALF)

    @cuda.jit(device=True, forceinline=True)
    def signed_words(w, start, i):
        return load_qs(w, start + QS + 4 * i), load_qs(w, start + QS + HALF + 4 * i)

    @cuda.jit(device=True, forceinline=True)
    def scale(w, start):
        return half_to_float(load_u16(w, start + D))

    @cuda.jit(device=True, forceinline=True)
    def minimum(w, start):
        return half_to_float(load_u16(w, start + M))

    @cuda.jit(device=True, forceinline=True)
    def centred(w, start):
        return centre * half_to_float(load_u16(w, start + D))

    code, codes, words = {
        4: (nibble, nibbles, nibble_words),
        5: (five_bit, five_bits, five_bit_words),
        8: (signed_byte, signed_bytes, signed_words),
    }[fmt.bits]
    return DeviceFormat(code, codes, words, scale, minimum if "m" in fields else centred)
