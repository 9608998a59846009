"""What thread blocks of one launch show each other, in memory that is full of `NOTHING` at first.

A value is its own flag: no fence, no counter. Who needs it polls until it is there. Where memory is
used again within a launch, a value has a tag beside it, see `steps.kernels.parts.exchange`.
"""

from __future__ import annotations

from typing import Final

from numba import cuda, int32, uint32, uint64

from steps.instructions import load_u64x2_relaxed, trap

POLLS: Final = 1 << 25
"""Of a value at most: about half a minute."""
NOTHING: Final = 0xFFFF
"""Of 16 bits, and twice of 32: a NaN that no instruction makes."""


@cuda.jit(device=True, forceinline=True)
def missing_of(x):
    """Some bits of 0x8000 in each 16, where one of these four 16 bits is `NOTHING`."""
    y = uint64(x ^ uint64(0xFFFFFFFFFFFFFFFF))
    return uint64(uint64(y - uint64(0x0001000100010001)) & x & uint64(0x8000800080008000))


@cuda.jit(device=True, forceinline=True)
def missing(x):
    return uint64(missing_of(x[0]) | missing_of(x[1])) != uint64(0)


@cuda.jit(device=True, forceinline=True)
def poll(array, at):
    """Eight float16 from array[at] on, in four words, when all of them are there."""
    x, polls = load_u64x2_relaxed(array, at), int32(0)
    while missing(x):
        x = load_u64x2_relaxed(array, at)
        polls = int32(polls + 1)
        if polls > int32(POLLS):
            trap()
    low, high, upper = uint64(x[0]), uint64(x[1]), uint64(32)
    return uint32(low), uint32(low >> upper), uint32(high), uint32(high >> upper)
