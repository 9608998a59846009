"""The bias of a layer, added to sums before they are rounded to the dtype of C. Step 17 teaches
this."""

from __future__ import annotations

from numba import cuda, uint32

from steps.instructions import as_float, half_to_float, load_f32, load_u16


@cuda.jit(device=True, forceinline=True)
def load_half(bias, n):
    return half_to_float(load_u16(bias, n))


@cuda.jit(device=True, forceinline=True)
def load_bfloat(bias, n):
    return as_float(uint32(uint32(load_u16(bias, n)) << uint32(16)))


LOAD_BIAS = {"float32": load_f32, "float16": load_half, "bfloat16": load_bfloat}
"""load(bias, n) -> float32: element n of bias[N], by its dtype."""
