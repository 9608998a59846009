"""Eight neighbouring values of a row, in one access of 16 bytes or in two.

Of float16 and bfloat16 they are 16 bytes, the widest access of a thread; of float32 32. Step 5
teaches wide accesses, step 15 values in 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from numba import cuda

from steps.instructions import (
    floats_to_bfloats,
    floats_to_halves,
    load_f32x4,
    load_u32x4,
    store_f32x4,
    store_u32x2,
    store_u32x4,
)
from steps.kernels.parts.activations.sources import four_floats, four_floats_of_bfloat16

EIGHT: Final = 8


@dataclass(frozen=True, slots=True)
class Eight:
    """Device functions for arrays of one dtype that begin at a multiple of 16 bytes.

    load(a, offset)           -> eight float32, of flat a from `offset`, a multiple of 8, on
    store(a, offset, values)     eight float32, rounded to nearest, likewise
    store_four(a, offset, x0, x1, x2, x3)   four of them, from a multiple of 4 on
    """

    load: Any
    store: Any
    store_four: Any


def _of_floats() -> Eight:
    @cuda.jit(device=True, forceinline=True)
    def load(a, offset):
        return load_f32x4(a, offset) + load_f32x4(a, offset + 4)

    @cuda.jit(device=True, forceinline=True)
    def store(a, offset, values):
        store_f32x4(a, offset, values[0], values[1], values[2], values[3])
        store_f32x4(a, offset + 4, values[4], values[5], values[6], values[7])

    return Eight(load, store, store_f32x4)


def _of_16_bits(floats: Any, rounded: Any) -> Eight:
    """floats(low, high): the four values of two words; rounded(x, y): the word of two values."""

    @cuda.jit(device=True, forceinline=True)
    def load(a, offset):
        w0, w1, w2, w3 = load_u32x4(a, offset)
        return floats(w0, w1) + floats(w2, w3)

    @cuda.jit(device=True, forceinline=True)
    def store(a, offset, values):
        first, second = rounded(values[0], values[1]), rounded(values[2], values[3])
        third, fourth = rounded(values[4], values[5]), rounded(values[6], values[7])
        store_u32x4(a, offset, first, second, third, fourth)

    @cuda.jit(device=True, forceinline=True)
    def store_four(a, offset, x0, x1, x2, x3):
        store_u32x2(a, offset, rounded(x0, x1), rounded(x2, x3))

    return Eight(load, store, store_four)


OF_DTYPE: Final = {
    "float32": _of_floats(),
    "float16": _of_16_bits(four_floats, floats_to_halves),
    "bfloat16": _of_16_bits(four_floats_of_bfloat16, floats_to_bfloats),
}
"""By `steps.contract.dtype_name`."""
