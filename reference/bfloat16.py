"""bfloat16, which NumPy does not have: the upper half of a float32. Its arrays are uint16.

float32    sign, 8 bits of exponent, 23 of fraction
bfloat16   sign, 8 bits of exponent,  7 of fraction: 8 significant bits, and float32's range
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def bfloat16_bits(x: Array) -> Array:
    """Floats rounded to the nearest bfloat16, ties to even: uint16. A NaN stays one."""
    with np.errstate(over="ignore"):
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    upper = bits >> 16
    rounded = bits + np.uint32(0x7FFF) + (upper & 1) >> 16
    return np.where(np.isnan(x), upper | 0x40, rounded).astype(np.uint16)


def bfloat16_values(bits: Array) -> Array:
    """The numbers of uint16 bits, exactly, in float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded_to_bfloat16(x: Array) -> Array:
    """float32: the bfloat16 nearest to each."""
    return bfloat16_values(bfloat16_bits(x))
