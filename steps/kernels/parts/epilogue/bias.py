"""The bias of a layer, added to sums before they are rounded to the dtype of C, by whichever block
writes them. So a layer with a bias takes no launch more. Step 8 is the first whose end uses this,
and all after it do.

A kernel for a product without a bias is compiled without one: `add` returns its argument then, and
nothing of this is left in machine code.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from numba import cuda, float32, int32, uint32

from steps.contract import dtype_name
from steps.instructions import as_float, half_to_float, load_f32, load_u16


@cuda.jit(device=True, forceinline=True)
def load_half(bias, n):
    return half_to_float(load_u16(bias, n))


@cuda.jit(device=True, forceinline=True)
def load_bfloat(bias, n):
    return as_float(uint32(uint32(load_u16(bias, n)) << uint32(16)))


LOAD_BIAS = {"float32": load_f32, "float16": load_half, "bfloat16": load_bfloat}
"""load(bias, n) -> float32: element n of bias[N], by its dtype."""


@cache
def bias_of(of_bias: str | None) -> tuple[Any, Any]:
    """(load, add) for a bias [N] of this dtype, or for none; device functions.

    load(bias, n) -> b : float32, the bias of feature n; of features beyond the matrix, some other
    add(y, b)          : y + b; y alone where there is no bias
    """
    load_one = LOAD_BIAS[of_bias or "float32"]

    @cuda.jit(device=True, forceinline=True)
    def load(bias, n):
        return load_one(bias, min(int32(n), int32(bias.size - 1)))

    @cuda.jit(device=True, forceinline=True)
    def add(y, b):
        return y + b

    @cuda.jit(device=True, forceinline=True)
    def load_none(bias, n):
        return float32(0)

    @cuda.jit(device=True, forceinline=True)
    def add_none(y, b):
        return y

    return (load_none, add_none) if of_bias is None else (load, add)


def bias_operand(weights: Sequence[Any]) -> tuple[str | None, tuple[Any, Any, Any]]:
    """(dtype of the bias, (packed, row_scales, bias)) of a launch's weights. Where these have no
    bias the dtype is None, and row_scales stand in for it: a kernel has a parameter for it anyway.
    """
    packed, row_scales, *bias = weights
    of_bias = dtype_name(bias[0]) if bias else None
    return of_bias, (packed, row_scales, bias[0] if bias else row_scales)
