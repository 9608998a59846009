"""Codes of one bit or three values: Q1_0 and TQ2_0, which trained-so models come in.

Layouts and recipes are those of `ggml-common.h` and `dequantize_row_q1_0`, `dequantize_row_tq2_0`
in `ggml-quants.c`. A value is a whole number of scales: -1 and 1 in Q1_0, -1 to 1 in TQ2_0, whose
fourth code, which ggml does not write, is 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from qformats.blocks import BLOCK, SUPER, block_q1_0, block_tq2_0
from qformats.format import Blocks, Floats, Packed, ReadOnly


@dataclass(frozen=True, slots=True)
class _OneScale(ReadOnly):
    """value = d level, with one d a block, told once for each 32 elements."""

    codebook: ClassVar[tuple[int, ...]]

    def _decode(self, blocks: Blocks, x: Floats) -> None:
        levels = np.array(self.codebook, np.float32)[self._unpack(blocks)]
        np.multiply(levels, self._widened(blocks, "d")[:, None], out=x)

    def _scale(self, blocks: Blocks) -> Floats:
        return np.repeat(self._widened(blocks, "d")[:, None], self.elements // BLOCK, axis=1)

    def _offset(self, blocks: Blocks) -> Floats:
        return np.zeros((len(blocks), self.elements // BLOCK), np.float32)


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
    """66 bytes: u8 qs[64]; f16 d.  value = d (q - 1),  q = 0..2; 256 elements."""

    name = "tq2_0"
    bits = 2
    dtype = block_tq2_0
    elements = SUPER
    packed = (Packed("qs", 2, 32),)
    codebook = (-1, 0, 1, 2)
