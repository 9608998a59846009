"""How activation passes read A and where they write it: four values at a time, to 16-byte chunks.

Step 11 teaches the layout (`steps.components.activations.layouts.float16_chunks`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from numba import cuda, int64, uint16, uint32

from qformats.repack import TOKEN_GROUP
from steps.instructions import (
    address,
    as_float,
    half_to_float,
    load_u16,
    load_u32,
    load_u32x2,
    load_u32x4,
)


@dataclass(frozen=True, slots=True)
class Source:
    """How four neighbouring values of A, C-contiguous, are read. `words` of 32 bits hold them until
    they are used. Device functions:

    aligned(a) -> whether they can be loaded at once, from every column that is a multiple of four
    load(x, i, a, offset, aligned): the words x[i, 0 .. words - 1] of flat a from `offset` on
    values(x, i) -> the four as float32
    """

    words: int
    aligned: Any
    load: Any
    values: Any


def _of_floats() -> Source:
    @cuda.jit(device=True, forceinline=True)
    def aligned(a):
        return a.shape[1] & 3 == 0 and address(a, 0) & 15 == 0

    @cuda.jit(device=True, forceinline=True)
    def load(x, i, a, offset, aligned):
        if aligned:
            x[i, 0], x[i, 1], x[i, 2], x[i, 3] = load_u32x4(a, offset)
        else:
            for j in range(4):
                x[i, j] = load_u32(a, offset + j)

    @cuda.jit(device=True, forceinline=True)
    def values(x, i):
        return as_float(x[i, 0]), as_float(x[i, 1]), as_float(x[i, 2]), as_float(x[i, 3])

    return Source(4, aligned, load, values)


@cuda.jit(device=True, forceinline=True)
def two_halves(a, offset):
    """The word that flat float16 a has from `offset` on, wherever in memory that is."""
    low, high = load_u16(a, offset), load_u16(a, offset + 1)
    return uint32(uint32(low) | uint32(high) << uint32(16))


def _of_halves() -> Source:
    @cuda.jit(device=True, forceinline=True)
    def aligned(a):
        return a.shape[1] & 3 == 0 and address(a, 0) & 7 == 0

    @cuda.jit(device=True, forceinline=True)
    def load(x, i, a, offset, aligned):
        if aligned:
            x[i, 0], x[i, 1] = load_u32x2(a, offset)
        else:
            for j in range(2):
                x[i, j] = two_halves(a, offset + 2 * j)

    @cuda.jit(device=True, forceinline=True)
    def values(x, i):
        low, high = x[i, 0], x[i, 1]
        first, third = half_to_float(uint16(low)), half_to_float(uint16(high))
        return first, half_to_float(uint16(low >> 16)), third, half_to_float(uint16(high >> 16))

    return Source(2, aligned, load, values)


SOURCES: Final = {"float32": _of_floats(), "float16": _of_halves()}
"""By the dtype of A."""


@cuda.jit(device=True, forceinline=True)
def token_chunk(rows, m, k, chunks, chunk):
    """The index of a 16-byte chunk: of token m, which has `chunks` of them in 128 K, chunk `chunk`.
    Tokens are in groups of eight, and all groups come before the next 128 K."""
    groups = uint32(uint32(rows + uint32(TOKEN_GROUP - 1)) >> uint32(3))
    group = int64(uint32(k) >> uint32(7)) * groups + (uint32(m) >> uint32(3))
    return (group * chunks + chunk) * TOKEN_GROUP + (uint32(m) & uint32(7))
