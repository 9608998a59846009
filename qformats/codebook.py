"""The formats whose codes index a table of integers: of sixteen in MXFP4, IQ4_NL, IQ4_XS and NVFP4,
of two and four in Q1_0 and TQ2_0.

Layout, tables and recipes are those of `ggml-common.h`, `ggml-quants.c` (`quantize_row_mxfp4_ref`,
`quantize_row_iq4_nl_ref`, `dequantize_row_q1_0`, `dequantize_row_tq2_0`) and `ggml-impl.h`
(`ggml_e8m0_to_fp32_half`, `ggml_ue4m3_to_fp32`), in float32, never fused. MXFP4 and IQ4_NL are
written, the others only read.

Where C leaves the answer open, or depends on a library, and the answer here:

* **MXFP4 of a block below 2^-125.** The exponent floor(log2 max|x|) + 125 is then negative, and its
  cast to a byte undefined in C and, in gguf, in NumPy; x86-64 wraps it around, to a scale of 2^104
  or more. Here it is 0.
* **MXFP4's log2f rounds.** At 8 the largest float32 below it has a logarithm that rounds to 3, so
  that its block gets the next exponent: the definition is the rounded one, not the bits of the
  float. Here the logarithm is taken in float64 and rounded once; glibc's log2f and NumPy's float32
  log2 have the same integer part at the 400 floats below every power of two and at 5 * 10^6 others.
* **MXFP4's exponent 255** is NaN in the OCP specification and refused by ggml's check of a file;
  decoding is as in ggml and gguf all the same: 255 is the scale 2^127 like any other exponent.
* **IQ4_NL of a block below 1e-15** keeps the codes of the block before it in C. Here they are 8,
  the level 1, whose value is +0 under the scale +0.
* **IQ4_NL as llama-quantize writes it** is searched: `quantize_iq4_nl` tries fifteen more scales,
  and weighs the elements where it has an importance matrix. Here it is the reference, which tries
  one (NMSE of normal data 6.2e-3, searched 5.8e-3); any of them decodes alike.
* **NVFP4's scale 0x7f** is NaN in E4M3, and 0 in ggml and here. The highest bit counts for
  nothing: 0xff is 240.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from qformats.blocks import (
    SUPER,
    block_iq4_nl,
    block_iq4_xs,
    block_mxfp4,
    block_nvfp4,
    block_q1_0,
    block_tq2_0,
)
from qformats.format import Blocks, Bytes, Floats, Nibbles, Packed, ReadOnly, Run, Sum

# Doubled E2M1 values (0, 0.5, 1, 1.5, 2, 3, 4, 6), so that they are integers; under half the scale.
_E2M1: Final = (0, 1, 2, 3, 4, 6, 8, 12)
_SMALL: Final = np.float32(1e-15)  # ggml's GROUP_MAX_EPS


@dataclass(frozen=True, slots=True)
class _Codebook(Nibbles):
    """value = scale * codebook[code]."""

    bits = 4

    def _decode(self, blocks: Blocks, x: Floats) -> None:
        levels = np.array(self.codebook, np.float32)
        np.multiply(levels[self._unpack(blocks)], self._scale(blocks)[:, None], out=x)

    def _offset(self, blocks: Blocks) -> Floats:
        return np.zeros(blocks.shape, np.float32)


@dataclass(frozen=True, slots=True)
class MXFP4(_Codebook):
    """17 bytes: u8 e; u8 qs[16].  value = 2^(e - 128) t[q],  q = 0..15.

    The OCP microscaling format: E2M1 elements under a power of two, E8M0. t holds them doubled.
    """

    name = "mxfp4"
    dtype = block_mxfp4
    codebook = (*_E2M1, *(-level for level in _E2M1))

    def _scale(self, blocks: Blocks) -> Floats:
        """2^(e-128): float32's own exponent e-1, or one of its two subnormals 2^-128 and 2^-127."""
        e = blocks["e"].astype(np.uint32)
        bits = np.where(e < 2, np.uint32(0x00200000) << e, (e - np.uint32(1)) << np.uint32(23))
        scale: Floats = bits.astype(np.uint32).view(np.float32)
        return scale

    def _encode(self, run: Run, s: Sum) -> None:
        low, high = run.extremes()
        largest = np.maximum(high, -low).astype(np.float64)
        exponent = np.floor(np.log2(largest).astype(np.float32))  # -inf where all are zero
        run.blocks["e"] = np.maximum(exponent, -125) + 125
        scale = self._scale(run.blocks)
        magnitude = np.abs(run.x)
        codes = np.zeros(run.x.shape, np.uint8)
        # ggml keeps the first of the nearest levels: of two equally near ones the smaller, and for
        # 0 that of the positive half. Middles are exact; a level beyond float32 is never nearest.
        for lower, upper in pairwise(_E2M1):
            middle = scale * np.float32((lower + upper) / 2)
            middle[np.isinf(scale * np.float32(upper))] = np.inf
            codes += magnitude > middle
        codes += np.uint8(8) * ((run.x < 0) & (codes > 0))
        self._pack(codes, run.blocks)


@dataclass(frozen=True, slots=True)
class IQ4_NL(_Codebook):
    """18 bytes: f16 d; u8 qs[16].  value = d t[q],  q = 0..15.

    t is denser around 0 than at its ends, as weights are. The first element of largest magnitude
    is given level -127; d is then fitted to the levels by least squares weighted with x^2, and may
    be negative.
    """

    name = "iq4_nl"
    dtype = block_iq4_nl
    codebook = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

    def _encode(self, run: Run, s: Sum) -> None:
        low, high = run.extremes()
        levels = np.array(self.codebook, np.float32)
        first = run.signed_extreme(low, high) / levels[0]
        y = run.x * np.divide(np.float32(1), first)
        small = np.maximum(high, -low) < _SMALL
        y[:, small] = 0
        codes = _nearest(levels, y)
        above, below = np.zeros((2, *first.shape), np.float32)
        for x, level in zip(run.x, levels[codes], strict=True):  # sums in the order of the elements
            weighted = x * x * level
            above += weighted * x
            below += weighted * level
        # Data so large that a sum overflows is beyond float16 anyway: `store` says so of `first`.
        d = np.where(np.isfinite(above) & np.isfinite(below), above / below, first)
        d[small] = 0
        run.store("d", d)
        self._pack(codes, run.blocks)


@dataclass(frozen=True, slots=True)
class _Grouped(ReadOnly):
    """value = scale * codebook[code], in blocks of several groups."""

    def _decode(self, blocks: Blocks, x: Floats) -> None:
        grouped = x.reshape(len(x), -1, self.group)
        levels = np.array(self.codebook, np.float32)[self._unpack(blocks)].reshape(grouped.shape)
        np.multiply(self._scale(blocks)[..., None], levels, out=grouped)

    def _offset(self, blocks: Blocks) -> Floats:
        return np.zeros((len(blocks), self.elements // self.group), np.float32)


@dataclass(frozen=True, slots=True)
class IQ4_XS(_Grouped):
    """136 bytes: f16 d; u8 scales_h[2], scales_l[4], qs[128].  value = d (s - 32) t[q],  with the t
    of IQ4_NL and s of 6 bits; 32 elements a group."""

    name = "iq4_xs"
    bits = 4
    dtype = block_iq4_xs
    elements = SUPER
    packed = (Packed("qs", 4, 16),)
    codebook = IQ4_NL.codebook

    def _scale(self, blocks: Blocks) -> Floats:
        low = Packed("scales_l", 4, 1).unpack(blocks["scales_l"])
        high = Packed("scales_h", 2, 1).unpack(blocks["scales_h"])
        factors = (low | high << 4).astype(np.int8) - np.int8(32)
        scale: Floats = self._widened(blocks, "d")[:, None] * factors
        return scale


@dataclass(frozen=True, slots=True)
class NVFP4(_Grouped):
    """36 bytes: u8 d[4], qs[32].  value = d t[q],  with the doubled E2M1 values t of MXFP4, and a
    scale of type UE4M3 (halved) for each 16 of the 64 elements."""

    name = "nvfp4"
    bits = 4
    dtype = block_nvfp4
    elements = 64
    group = 16
    packed = (Packed("qs", 4, 8),)
    codebook = MXFP4.codebook

    def _scale(self, blocks: Blocks) -> Floats:
        d = blocks["d"]
        exponent, fraction = (d >> 3 & 15).astype(np.int32), (d & 7).astype(np.float32)
        small = np.ldexp(fraction, -10)
        normal = np.ldexp(np.float32(1) + fraction / np.float32(8), exponent - 8)
        scale: Floats = np.where(exponent == 0, small, normal).astype(np.float32)
        scale[d == 0x7F] = 0
        return scale


@dataclass(frozen=True, slots=True)
class _OneScale(_Grouped):
    """All groups of a block share its d."""

    def _scale(self, blocks: Blocks) -> Floats:
        return np.repeat(self._widened(blocks, "d")[:, None], self.elements // self.group, axis=1)


@dataclass(frozen=True, slots=True)
class Q1_0(_OneScale):
    """18 bytes: f16 d; u8 qs[16].  value = d (2 q - 1),  q = 0, 1; 128 elements."""

    name = "q1_0"
    bits = 1
    dtype = block_q1_0
    elements = 128
    packed = (Packed("qs", 1, 1),)
    codebook = (-1, 1)


@dataclass(frozen=True, slots=True)
class TQ2_0(_OneScale):
    """66 bytes: u8 qs[64]; f16 d.  value = d (q - 1),  q = 0..2, and 3, which ggml does not write;
    256 elements."""

    name = "tq2_0"
    bits = 2
    dtype = block_tq2_0
    elements = SUPER
    packed = (Packed("qs", 2, 32),)
    codebook = (-1, 0, 1, 2)


def _nearest(levels: Floats, y: Floats) -> Bytes:
    """The code of the level nearest to each y, the upper one of two equally near.

    ggml compares y - a < b - y in float32. Both are exact where they are about equal, so that this
    is the comparison of y with the middle between a and b, a float32 too.
    """
    middles = (levels[:-1] + levels[1:]) / 2
    return np.searchsorted(middles, y, side="right").astype(np.uint8)
