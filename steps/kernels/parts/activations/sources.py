"""How activation passes read A: four neighbouring values at a time, of any dtype.

Step 11 teaches this with float32, step 15 with float16 and bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from numba import cuda, int32, uint16, uint32

from steps.blocks.q8_1 import size_bits
from steps.instructions import (
    address,
    as_float,
    half_to_float,
    load_u32,
    load_u32x2,
    load_u32x4,
)


@dataclass(frozen=True, slots=True)
class Source:
    """How four neighbouring values of A, C-contiguous, are read, every fourth column on. `words`
    of 32 bits hold them until they are used. Float32 may begin anywhere; A of 16 bits, and each of
    its rows, at a multiple of 16 bytes. Device functions:

    aligned(a) -> whether they can be loaded at once
    load(x, i, a, offset, aligned): the words x[i, 0 .. words - 1] of flat a from `offset` on
    values(x, i) -> the four as float32

    The same of 16 bytes, `fours` times four values, from every multiple of so many on:

    load_16: the four words x[i, 0 .. 3]
    four(x, i, j) -> the j-th four as float32
    sizes(x, i, j) -> the bits of their |x| as float32, int32
    """

    words: int
    aligned: Any
    load: Any
    values: Any
    fours: int
    load_16: Any
    four: Any
    sizes: Any


@cuda.jit(device=True, forceinline=True)
def four_sizes(x):
    return size_bits(x[0]), size_bits(x[1]), size_bits(x[2]), size_bits(x[3])


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

    @cuda.jit(device=True, forceinline=True)
    def four(x, i, _):
        return values(x, i)

    @cuda.jit(device=True, forceinline=True)
    def sizes(x, i, _):
        return four_sizes(values(x, i))

    return Source(4, aligned, load, values, 1, load, four, sizes)


@cuda.jit(device=True, forceinline=True)
def four_floats(low, high):
    """Of four float16 in two words."""
    first, third = half_to_float(uint16(low)), half_to_float(uint16(high))
    return first, half_to_float(uint16(low >> 16)), third, half_to_float(uint16(high >> 16))


@cuda.jit(device=True, forceinline=True)
def four_floats_of_bfloat16(low, high):
    """A bfloat16 is the upper half of a float32."""
    first, third = as_float(uint32(low << uint32(16))), as_float(uint32(high << uint32(16)))
    upper = uint32(0xFFFF0000)
    return first, as_float(uint32(low & upper)), third, as_float(uint32(high & upper))


@cuda.jit(device=True, forceinline=True)
def four_sizes_of_halves(low, high):
    return four_sizes(four_floats(low, high))


@cuda.jit(device=True, forceinline=True)
def four_sizes_of_bfloats(low, high):
    """Of the integers: as floats they would be kept in registers for `four_floats_of_bfloat16`."""
    upper, lower = uint32(0x7FFF0000), uint32(0x7FFF)
    first, third = int32((low & lower) << uint32(16)), int32((high & lower) << uint32(16))
    return first, int32(low & upper), third, int32(high & upper)


def _of_16_bits(floats: Any, sizes_of: Any) -> Source:
    """floats(low, high), sizes_of(low, high): of the four values that two words hold."""

    @cuda.jit(device=True, forceinline=True)
    def aligned(_):
        return True

    @cuda.jit(device=True, forceinline=True)
    def load(x, i, a, offset, _):
        x[i, 0], x[i, 1] = load_u32x2(a, offset)

    @cuda.jit(device=True, forceinline=True)
    def values(x, i):
        return floats(x[i, 0], x[i, 1])

    @cuda.jit(device=True, forceinline=True)
    def load_16(x, i, a, offset, _):
        x[i, 0], x[i, 1], x[i, 2], x[i, 3] = load_u32x4(a, offset)

    @cuda.jit(device=True, forceinline=True)
    def four(x, i, j):
        return floats(x[i, 2 * j], x[i, 2 * j + 1])

    @cuda.jit(device=True, forceinline=True)
    def sizes(x, i, j):
        return sizes_of(x[i, 2 * j], x[i, 2 * j + 1])

    return Source(2, aligned, load, values, 2, load_16, four, sizes)


SOURCES: Final = {
    "float32": _of_floats(),
    "float16": _of_16_bits(four_floats, four_sizes_of_halves),
    "bfloat16": _of_16_bits(four_floats_of_bfloat16, four_sizes_of_bfloats),
}
"""By the dtype of A, `steps.contract.dtype_name`."""
