"""C's idea of a number, in Python: what `int32(x)` or a store to a uint8 array does to a value.

The simulator computes with Python integers, which never overflow. That is the faithful model of
Numba, which promotes integer arithmetic to 64 bits: a value is cut to its type exactly where the
kernel says `int32(x)`, passes it to an instruction or stores it, and nowhere else.
"""

import math
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import numpy as np
from numba.cuda import types
from numba.cuda.np.numpy_support import as_dtype as numba_as_dtype

_FLOATING = (float, np.floating)

UNCHANGED: dict[Callable, str] = {}
"""Cast -> a Python expression of {value} and {cast}, true only where the cast returns the value as
it is. Generated code (`steps.simulator.calls`) tries it first: it takes less time than a call."""


@cache
def cast_to(dtype: np.dtype) -> Callable:
    """The C cast to `dtype` as a function: integers wrap, floats are truncated, NaN becomes 0.

    Float to integer saturates at the ends of the 32- or 64-bit range, as the GPU's `cvt.rzi` does.
    The function returns a Python int (or bool) for integer dtypes and a NumPy scalar for floating
    ones.
    """
    if dtype.kind == "b":
        return bool
    if dtype.kind == "f":
        UNCHANGED[dtype.type] = "type({value}) is {cast}"
        return dtype.type
    if dtype.kind not in "iu":
        raise TypeError(f"there is no C cast to {dtype}; integers, floats and bool have one")
    bits = 8 * dtype.itemsize
    mask, sign, span = (1 << bits) - 1, 1 << (bits - 1), 1 << bits
    low, high = (-sign, sign - 1) if dtype.kind == "i" else (0, mask)
    wide = max(bits, 32)
    lowest, highest = (
        (-(1 << (wide - 1)), (1 << (wide - 1)) - 1) if dtype.kind == "i" else (0, (1 << wide) - 1)
    )

    def whole(x) -> int:
        """A Python int of any value that is not one."""
        if not isinstance(x, _FLOATING):
            return int(x)
        x = float(x)
        if math.isnan(x):
            return 0
        return lowest if x <= lowest else highest if x >= highest else int(x)

    def signed(x=0) -> int:
        if type(x) is not int:
            x = whole(x)
        if low <= x <= high:
            return x
        x &= mask
        return x - span if x & sign else x

    def unsigned(x=0) -> int:
        return (x if type(x) is int else whole(x)) & mask

    cast: Any = signed if dtype.kind == "i" else unsigned
    cast.dtype = dtype  # so that a declaration, `cuda.shared.array(4, int32)`, can use it too
    UNCHANGED[cast] = f"type({{value}}) is int and {low} <= {{value}} <= {high}"
    return cast


@cache
def as_dtype(described: Any) -> np.dtype:
    """The NumPy dtype of a C cast, a NumPy type or dtype, or a Numba type (records included)."""
    if isinstance(described, FunctionType):
        return described.dtype  # type: ignore[attr-defined]
    if isinstance(described, types.Type):
        return np.dtype(numba_as_dtype(described))
    return np.dtype(described)
