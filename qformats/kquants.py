"""The K-quants: 256 elements a block, in groups of 16 or 32 whose scales are integers themselves.

Layouts and recipes are those of `ggml-common.h` and `dequantize_row_q*_K` in `ggml-quants.c`. A
value is the product of three: the block's float16 d, its group's integer scale, and the code; in
Q2_K, Q4_K and Q5_K a minimum of the same make (dmin, an integer) is subtracted. The products are
exact in float32 (at most 11 + 7 + 6 bits), so that the subtraction is the only rounding, and
fusing it into an FMA changes nothing.

They are read here, not written: `quantize` says so. ggml's quantizers search for the scales, and
what is downloaded was searched with an importance matrix as well; decoding is the same for all.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from qformats.blocks import (
    SUPER,
    block_q2_k,
    block_q3_k,
    block_q4_k,
    block_q5_k,
    block_q6_k,
)
from qformats.format import Blocks, Bytes, Floats, Packed, ReadOnly


@dataclass(frozen=True, slots=True)
class _WithMinimum(ReadOnly):
    """value = (d scale) code - dmin minimum."""

    elements = SUPER

    @abstractmethod
    def _factors(self, blocks: Blocks) -> tuple[Bytes, Bytes]:
        """Scales and minima of the groups of structured[n], uint8[n, groups] each."""

    def _scale(self, blocks: Blocks) -> Floats:
        scale: Floats = self._widened(blocks, "d")[:, None] * self._factors(blocks)[0]
        return scale

    def _offset(self, blocks: Blocks) -> Floats:
        minimum: Floats = self._widened(blocks, "dmin")[:, None] * self._factors(blocks)[1]
        return -minimum

    def _decode(self, blocks: Blocks, x: Floats) -> None:
        grouped = x.reshape(len(x), -1, self.group)
        np.multiply(
            self._unpack(blocks).reshape(grouped.shape), self._scale(blocks)[..., None], out=grouped
        )
        grouped += self._offset(blocks)[..., None]


@dataclass(frozen=True, slots=True)
class _Centred(ReadOnly):
    """value = (d scale) (code - zero), with zero = 2^(bits-1)."""

    zero: ClassVar[int]
    elements = SUPER
    group = 16

    @abstractmethod
    def _factors(self, blocks: Blocks) -> NDArray[Any]:
        """Scales of the groups of structured[n], int8[n, groups]."""

    def _scale(self, blocks: Blocks) -> Floats:
        scale: Floats = self._widened(blocks, "d")[:, None] * self._factors(blocks)
        return scale

    def _offset(self, blocks: Blocks) -> Floats:
        return np.float32(-self.zero) * self._scale(blocks)

    def _decode(self, blocks: Blocks, x: Floats) -> None:
        grouped = x.reshape(len(x), -1, self.group)
        np.subtract(self._unpack(blocks).reshape(grouped.shape), np.float32(self.zero), out=grouped)
        grouped *= self._scale(blocks)[..., None]


@dataclass(frozen=True, slots=True)
class Q2_K(_WithMinimum):
    """84 bytes: u8 scales[16]; u8 qs[64]; f16 d, dmin.  value = d s q - dmin m,  q, s, m of 2, 4
    and 4 bits; 16 elements a group, whose s is the low and m the high half of a byte."""

    name = "q2_k"
    bits = 2
    group = 16
    dtype = block_q2_k
    packed = (Packed("qs", 2, 32),)

    def _factors(self, blocks: Blocks) -> tuple[Bytes, Bytes]:
        both: Bytes = blocks["scales"]
        return both & np.uint8(15), both >> np.uint8(4)


@dataclass(frozen=True, slots=True)
class Q3_K(_Centred):
    """110 bytes: u8 hmask[32]; u8 qs[64]; u8 scales[12]; f16 d.  value = d (s - 32) (q - 4), q of 3
    and s of 6 bits; 16 elements a group."""

    name = "q3_k"
    bits = 3
    zero = 4
    dtype = block_q3_k
    packed = (Packed("qs", 2, 32), Packed("hmask", 1, 32))

    def _factors(self, blocks: Blocks) -> NDArray[np.int8]:
        low = Packed("scales", 4, 8).unpack(blocks["scales"][:, :8])
        high = Packed("scales", 2, 4).unpack(blocks["scales"][:, 8:])
        return (low | high << 4).astype(np.int8) - np.int8(32)


@dataclass(frozen=True, slots=True)
class Q4_K(_WithMinimum):
    """144 bytes: f16 d, dmin; u8 scales[12]; u8 qs[128].  value = d s q - dmin m,  q of 4, s and m
    of 6 bits; 32 elements a group."""

    name = "q4_k"
    bits = 4
    dtype = block_q4_k
    packed: ClassVar[tuple[Packed, ...]] = (Packed("qs", 4, 32),)

    def _factors(self, blocks: Blocks) -> tuple[Bytes, Bytes]:
        """Groups 0 to 3 have their six bits together, 4 to 7 theirs in two places."""
        scales, minima, both = np.split(blocks["scales"], 3, axis=1)
        return (
            np.hstack([scales & 63, (both & 15) | (scales >> 6) << 4]),
            np.hstack([minima & 63, both >> 4 | (minima >> 6) << 4]),
        )


@dataclass(frozen=True, slots=True)
class Q5_K(Q4_K):
    """176 bytes: f16 d, dmin; u8 scales[12]; u8 qh[32]; u8 qs[128].  As Q4_K, with q of 5 bits."""

    name = "q5_k"
    bits = 5
    dtype = block_q5_k
    packed = (Packed("qs", 4, 32), Packed("qh", 1, 32))


@dataclass(frozen=True, slots=True)
class Q6_K(_Centred):
    """210 bytes: u8 ql[128]; u8 qh[64]; i8 scales[16]; f16 d.  value = d s (q - 32),  q of 6 and s
    of 8 bits; 16 elements a group."""

    name = "q6_k"
    bits = 6
    zero = 32
    dtype = block_q6_k
    packed = (Packed("ql", 4, 64), Packed("qh", 2, 32))

    def _factors(self, blocks: Blocks) -> NDArray[np.int8]:
        factors: NDArray[np.int8] = blocks["scales"]
        return factors
