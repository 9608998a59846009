"""One output, or eight neighbouring ones, to C: what the ends of many kernels have in common."""

from __future__ import annotations

from typing import Final

from numba import cuda, uint16, uint32

from steps.instructions import (
    float_to_half,
    floats_to_bfloats,
    store_f32,
    store_u16,
    store_u32x4,
)


@cuda.jit(device=True, forceinline=True)
def store_half(c, at, x):
    store_u16(c, at, float_to_half(x))


@cuda.jit(device=True, forceinline=True)
def store_bfloat(c, at, x):
    store_u16(c, at, uint16(floats_to_bfloats(x, x)))


STORE: Final = {"float32": store_f32, "float16": store_half, "bfloat16": store_bfloat}
"""store(c, at, x): a float32 to flat c[at], rounded, by the dtype of c."""


@cuda.jit(device=True, forceinline=True)
def store_eight(c, offset, y, wide, there):
    """Eight features of a token in 16 bits, the four words y, to flat c[offset]; only the first
    `there`. wide: whether a row of C begins at a multiple of 16 bytes."""
    if wide:
        if there > 0:
            store_u32x4(c, offset, y[0], y[1], y[2], y[3])
    else:
        for i in range(8):
            if i < there:
                store_u16(c, offset + i, uint32(y[i // 2]) >> uint32(16 * (i & 1)))
