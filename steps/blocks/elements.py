"""One element at a time of any block, from ggml's own bytes. Step 1 teaches this.

`device_elements("q4_k")` gives three device functions for every format that has weights, those of
files too, whose blocks may hold several groups with scales of their own:

    level(w, start, j)  -> int32    of element j of the block: the code, or its codebook value
    scale(w, start, g)  -> float32  of group g of the block, which holds elements g * fmt.group ...
    offset(w, start, g) -> float32  such that every format's value is  scale * level + offset

`w` is the weight matrix as plain bytes (uint8, 1-D); a block begins at byte `start`. Levels
of Q3_K and Q6_K are centred, which leaves nothing to add. K-quants' scale * level is exact in
float32, and so is a value of all but Q2_K, Q4_K and Q5_K, where adding the offset rounds once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
from numba import cuda, float32, int8, int32, uint16, uint32

from qformats import FORMATS, WEIGHT_FORMATS
from qformats.blocks import offsets
from steps.blocks.codes import device_format
from steps.instructions import as_float, half_to_float, load_u16, prmt

SUBNORMAL = 0x00200000  # of float32: 2^-128, which twice is 2^-127


@dataclass(frozen=True, slots=True)
class Elements:
    """The device functions of one format; see the module's docstring."""

    level: Any
    scale: Any
    offset: Any


@cuda.jit(device=True, forceinline=True)
def bits_of(w, start, shift, mask):
    """Some bits of a byte."""
    return int32((uint32(w[start]) >> uint32(shift)) & uint32(mask))


@cuda.jit(device=True, forceinline=True)
def half_at(w, start):
    """A float16 at any even byte, as float32."""
    return half_to_float(load_u16(w, start))


@cuda.jit(device=True, forceinline=True)
def no_offset(w, start, g):
    return float32(0)


@cache
def device_elements(name: str) -> Elements:
    """The device functions of a format, for capture in a kernel. ValueError for a format that has
    none."""
    if name in WEIGHT_FORMATS:
        return _of_weight_format(name)
    if name not in _MADE_BY:
        raise ValueError(f"{name} has no device functions of its elements: add it to _MADE_BY")
    return _MADE_BY[name](name, offsets(FORMATS[name].dtype))


def _of_weight_format(name: str) -> Elements:
    block = device_format(name)
    block_scale, block_offset = block.scale, block.offset

    @cuda.jit(device=True, forceinline=True)
    def scale(w, start, g):
        return block_scale(w, start)

    @cuda.jit(device=True, forceinline=True)
    def offset(w, start, g):
        return block_offset(w, start)

    return Elements(block.code, scale, offset)


def _indices(name: str, fields: dict[str, int]) -> Elements:
    """MXFP4, IQ4_NL, IQ4_XS and NVFP4: nibbles, indices of sixteen int8. RUN bytes hold the first
    RUN elements in their low halves and the next RUN in their high ones."""
    QS, D = fields["qs"], fields.get("d", 0)
    RUN = FORMATS[name].packed[0].run  # 8 or 16
    SHIFT = RUN.bit_length() - 1
    table = np.array(FORMATS[name].codebook, np.int8).view(np.uint32)
    T0, T1, T2, T3 = (int(word) for word in table)

    @cuda.jit(device=True, forceinline=True)
    def level(w, start, j):
        byte = (j >> SHIFT + 1) * RUN + (j & RUN - 1)
        q = bits_of(w, start + QS + byte, (j >> SHIFT & 1) * 4, 15)
        lower, upper = prmt(T0, T1, q & 7), prmt(T2, T3, q & 7)
        return int32(int8((upper if q > 7 else lower) & uint32(255)))

    @cuda.jit(device=True, forceinline=True)
    def float16_scale(w, start, g):
        return half_at(w, start + D)

    @cuda.jit(device=True, forceinline=True)
    def power_of_two(w, start, g):
        e = uint32(w[start])
        bits = uint32(SUBNORMAL) << e if e < 2 else uint32(e - uint32(1)) << uint32(23)
        return as_float(uint32(bits))

    if name == "iq4_xs":
        return Elements(level, _scale_of_iq4_xs(fields), no_offset)
    scales = {"iq4_nl": float16_scale, "mxfp4": power_of_two, "nvfp4": ue4m3_scale}
    return Elements(level, scales[name], no_offset)


@cuda.jit(device=True, forceinline=True)
def ue4m3_scale(w, start, g):
    """Half of the UE4M3 scale of group g; 0 where it is NaN. Shifted by seven bits it is a float16,
    2^-8 times as large."""
    d = uint32(w[start + g])
    half = half_to_float(uint16((d & uint32(127)) << 7))
    return float32(0) if d == 127 else half * float32(128)


def _scale_of_iq4_xs(fields: dict[str, int]) -> Any:
    D, HIGH, LOW = fields["d"], fields["scales_h"], fields["scales_l"]

    @cuda.jit(device=True, forceinline=True)
    def scale(w, start, g):
        low = bits_of(w, start + LOW + (g >> 1), (g & 1) * 4, 15)
        high = bits_of(w, start + HIGH + (g >> 2), (g & 3) * 2, 3)
        return half_at(w, start + D) * float32(int32(low + 16 * high - 32))

    return scale


def _few_bits(name: str, fields: dict[str, int]) -> Elements:
    """Q1_0, a bit an element, and TQ2_0, two."""
    QS, D = fields["qs"], fields["d"]

    @cuda.jit(device=True, forceinline=True)
    def sign(w, start, j):
        return int32(2 * bits_of(w, start + QS + (j >> 3), j & 7, 1) - 1)

    @cuda.jit(device=True, forceinline=True)
    def of_two_bits(w, start, j):
        byte = (j >> 7) * 32 + (j & 31)
        return int32(bits_of(w, start + QS + byte, (j >> 5 & 3) * 2, 3) - 1)

    @cuda.jit(device=True, forceinline=True)
    def scale(w, start, g):
        return half_at(w, start + D)

    return Elements(sign if name == "q1_0" else of_two_bits, scale, no_offset)


def _q2_k(name: str, fields: dict[str, int]) -> Elements:
    SCALES, QS, D, DMIN = fields["scales"], fields["qs"], fields["d"], fields["dmin"]

    @cuda.jit(device=True, forceinline=True)
    def level(w, start, j):
        return bits_of(w, start + QS + (j >> 7) * 32 + (j & 31), (j >> 5 & 3) * 2, 3)

    @cuda.jit(device=True, forceinline=True)
    def scale(w, start, g):
        return half_at(w, start + D) * float32(bits_of(w, start + SCALES + g, 0, 15))

    @cuda.jit(device=True, forceinline=True)
    def offset(w, start, g):
        return -(half_at(w, start + DMIN) * float32(bits_of(w, start + SCALES + g, 4, 15)))

    return Elements(level, scale, offset)


def _q3_k(name: str, fields: dict[str, int]) -> Elements:
    HMASK, QS, SCALES, D = fields["hmask"], fields["qs"], fields["scales"], fields["d"]

    @cuda.jit(device=True, forceinline=True)
    def level(w, start, j):
        low = bits_of(w, start + QS + (j >> 7) * 32 + (j & 31), (j >> 5 & 3) * 2, 3)
        return int32(low + 4 * bits_of(w, start + HMASK + (j & 31), j >> 5, 1) - 4)

    @cuda.jit(device=True, forceinline=True)
    def scale(w, start, g):
        low = bits_of(w, start + SCALES + (g & 7), (g >> 3) * 4, 15)
        high = bits_of(w, start + SCALES + 8 + (g & 3), (g >> 2) * 2, 3)
        return half_at(w, start + D) * float32(int32(low + 16 * high - 32))

    return Elements(level, scale, no_offset)


def _q4_k(name: str, fields: dict[str, int]) -> Elements:
    """And Q5_K."""
    D, DMIN, SCALES, QS, QH = (
        fields["d"],
        fields["dmin"],
        fields["scales"],
        fields["qs"],
        fields.get("qh", 0),
    )
    five = "qh" in fields

    @cuda.jit(device=True, forceinline=True)
    def level(w, start, j):
        q = bits_of(w, start + QS + (j >> 6) * 32 + (j & 31), (j >> 5 & 1) * 4, 15)
        if five:
            q = int32(q + 16 * bits_of(w, start + QH + (j & 31), j >> 5, 1))
        return q

    @cuda.jit(device=True, forceinline=True)
    def six_bits(w, start, g, first_byte):
        """Of group g < 4: byte `first_byte` + g; of a later one a nibble and two bits of it."""
        if g < 4:
            return bits_of(w, start + SCALES + first_byte + g, 0, 63)
        low = bits_of(w, start + SCALES + 4 + g, first_byte, 15)
        return int32(low + 16 * bits_of(w, start + SCALES + first_byte + g - 4, 6, 3))

    @cuda.jit(device=True, forceinline=True)
    def scale(w, start, g):
        return half_at(w, start + D) * float32(six_bits(w, start, g, 0))

    @cuda.jit(device=True, forceinline=True)
    def offset(w, start, g):
        return -(half_at(w, start + DMIN) * float32(six_bits(w, start, g, 4)))

    return Elements(level, scale, offset)


def _q6_k(name: str, fields: dict[str, int]) -> Elements:
    QL, QH, SCALES, D = fields["ql"], fields["qh"], fields["scales"], fields["d"]

    @cuda.jit(device=True, forceinline=True)
    def level(w, start, j):
        low = bits_of(w, start + QL + (j >> 7) * 64 + (j & 63), (j >> 6 & 1) * 4, 15)
        high = bits_of(w, start + QH + (j >> 7) * 32 + (j & 31), (j >> 5 & 3) * 2, 3)
        return int32(low + 16 * high - 32)

    @cuda.jit(device=True, forceinline=True)
    def scale(w, start, g):
        return half_at(w, start + D) * float32(int8(w[start + SCALES + g]))

    return Elements(level, scale, no_offset)


_MADE_BY: Final = {
    "mxfp4": _indices,
    "iq4_nl": _indices,
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "q4_k": _q4_k,
    "q5_k": _q4_k,
    "q6_k": _q6_k,
    "iq4_xs": _indices,
    "nvfp4": _indices,
    "q1_0": _few_bits,
    "tq2_0": _few_bits,
}
