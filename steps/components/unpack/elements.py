"""One element of any block at a time, of ggml's own bytes: what a kernel without records reads.

`device_elements("q4_k")` gives three device functions for every format that has weights, those of
files too, whose blocks may hold several groups with scales of their own:

    level(w, at, j)    -> int32     of element j of the block: the code, or what it stands for
    scale(w, at, g)    -> float32   of group g of the block, which holds elements g * fmt.group ...
    offset(w, at, g)   -> float32   such that every format's value is  scale * level + offset

`w` is the weight matrix as plain bytes (uint8, 1-D) and `at` the byte where a block begins. Levels
of Q3_K and Q6_K are centred, which leaves nothing to add. K-quants' scale * level is exact in
float32, and so is a value of all but Q2_K, Q4_K and Q5_K, where adding the offset rounds once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numba import cuda, float32, int8, int32, uint32

from qformats import FORMATS, WEIGHT_FORMATS
from qformats.blocks import offsets
from steps.components.unpack.blocks import device_format
from steps.instructions import as_float, half_to_float, load_u16, prmt

SUBNORMAL = 0x00200000  # of float32: 2^-128, which twice is 2^-127


@dataclass(frozen=True, slots=True)
class Elements:
    """The device functions of one format; see the module's docstring."""

    level: Any
    scale: Any
    offset: Any


@cuda.jit(device=True, forceinline=True)
def bits_of(w, at, shift, mask):
    """Some bits of a byte."""
    return int32((uint32(w[at]) >> uint32(shift)) & uint32(mask))


@cuda.jit(device=True, forceinline=True)
def half_at(w, at):
    """A float16 at any even byte, as float32."""
    return half_to_float(load_u16(w, at))


@cuda.jit(device=True, forceinline=True)
def nothing(w, at, g):
    return float32(0)


@cache
def device_elements(name: str) -> Elements:
    """The device functions of a format, for capture in a kernel."""
    if name in WEIGHT_FORMATS:
        return _of_weight_format(name)
    at = offsets(FORMATS[name].dtype)
    make = {"mxfp4": _indices, "iq4_nl": _indices, "q2_k": _q2_k, "q3_k": _q3_k, "q6_k": _q6_k}
    return make.get(name, _q4_k)(name, at)


def _of_weight_format(name: str) -> Elements:
    fields = device_format(name)
    of_block, added = fields.scale, fields.offset

    @cuda.jit(device=True, forceinline=True)
    def scale(w, at, g):
        return of_block(w, at)

    @cuda.jit(device=True, forceinline=True)
    def offset(w, at, g):
        return added(w, at)

    return Elements(fields.code, scale, offset)


def _indices(name: str, at: dict[str, int]) -> Elements:
    """MXFP4 and IQ4_NL: nibbles as those of Q4_0, indices of sixteen int8."""
    QS, D = at["qs"], at.get("d", 0)
    table = np.array(FORMATS[name].codebook, np.int8).view(np.uint32)
    T0, T1, T2, T3 = (int(word) for word in table)

    @cuda.jit(device=True, forceinline=True)
    def level(w, at, j):
        q = bits_of(w, at + QS + (j & 15), (j >> 4) << 2, 15)
        lower, upper = prmt(T0, T1, q & 7), prmt(T2, T3, q & 7)
        return int32(int8((upper if q > 7 else lower) & uint32(255)))

    @cuda.jit(device=True, forceinline=True)
    def float16_scale(w, at, g):
        return half_at(w, at + D)

    @cuda.jit(device=True, forceinline=True)
    def power_of_two(w, at, g):
        e = uint32(w[at])
        bits = uint32(SUBNORMAL) << e if e < 2 else uint32(e - uint32(1)) << uint32(23)
        return as_float(uint32(bits))

    return Elements(level, float16_scale if name == "iq4_nl" else power_of_two, nothing)


def _q2_k(name: str, at: dict[str, int]) -> Elements:
    SCALES, QS, D, DMIN = at["scales"], at["qs"], at["d"], at["dmin"]

    @cuda.jit(device=True, forceinline=True)
    def level(w, at, j):
        return bits_of(w, at + QS + (j >> 7) * 32 + (j & 31), (j >> 5 & 3) * 2, 3)

    @cuda.jit(device=True, forceinline=True)
    def scale(w, at, g):
        return half_at(w, at + D) * float32(bits_of(w, at + SCALES + g, 0, 15))

    @cuda.jit(device=True, forceinline=True)
    def offset(w, at, g):
        return -(half_at(w, at + DMIN) * float32(bits_of(w, at + SCALES + g, 4, 15)))

    return Elements(level, scale, offset)


def _q3_k(name: str, at: dict[str, int]) -> Elements:
    HMASK, QS, SCALES, D = at["hmask"], at["qs"], at["scales"], at["d"]

    @cuda.jit(device=True, forceinline=True)
    def level(w, at, j):
        low = bits_of(w, at + QS + (j >> 7) * 32 + (j & 31), (j >> 5 & 3) * 2, 3)
        return int32(low + 4 * bits_of(w, at + HMASK + (j & 31), j >> 5, 1) - 4)

    @cuda.jit(device=True, forceinline=True)
    def scale(w, at, g):
        low = bits_of(w, at + SCALES + (g & 7), (g >> 3) * 4, 15)
        high = bits_of(w, at + SCALES + 8 + (g & 3), (g >> 2) * 2, 3)
        return half_at(w, at + D) * float32(int32(low + 16 * high - 32))

    return Elements(level, scale, nothing)


def _q4_k(name: str, at: dict[str, int]) -> Elements:
    """And Q5_K."""
    D, DMIN, SCALES, QS, QH = at["d"], at["dmin"], at["scales"], at["qs"], at.get("qh", 0)
    five = "qh" in at

    @cuda.jit(device=True, forceinline=True)
    def level(w, at, j):
        q = bits_of(w, at + QS + (j >> 6) * 32 + (j & 31), (j >> 5 & 1) * 4, 15)
        if five:
            q = int32(q + 16 * bits_of(w, at + QH + (j & 31), j >> 5, 1))
        return q

    @cuda.jit(device=True, forceinline=True)
    def six_bits(w, at, g, first):
        """Of group g < 4: byte `first` + g; of a later one a nibble, and two bits of that byte."""
        if g < 4:
            return bits_of(w, at + SCALES + first + g, 0, 63)
        low = bits_of(w, at + SCALES + 4 + g, first, 15)
        return int32(low + 16 * bits_of(w, at + SCALES + first + g - 4, 6, 3))

    @cuda.jit(device=True, forceinline=True)
    def scale(w, at, g):
        return half_at(w, at + D) * float32(six_bits(w, at, g, 0))

    @cuda.jit(device=True, forceinline=True)
    def offset(w, at, g):
        return -(half_at(w, at + DMIN) * float32(six_bits(w, at, g, 4)))

    return Elements(level, scale, offset)


def _q6_k(name: str, at: dict[str, int]) -> Elements:
    QL, QH, SCALES, D = at["ql"], at["qh"], at["scales"], at["d"]

    @cuda.jit(device=True, forceinline=True)
    def level(w, at, j):
        low = bits_of(w, at + QL + (j >> 7) * 64 + (j & 63), (j >> 6 & 1) * 4, 15)
        high = bits_of(w, at + QH + (j >> 7) * 32 + (j & 31), (j >> 5 & 3) * 2, 3)
        return int32(low + 16 * high - 32)

    @cuda.jit(device=True, forceinline=True)
    def scale(w, at, g):
        return half_at(w, at + D) * float32(int8(w[at + SCALES + g]))

    return Elements(level, scale, nothing)
