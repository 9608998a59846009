"""Memory that launches and thread blocks poll: full of `NOTHING` until something is stored there.

Eight float16 are polled at once, or one float32. Each value is its own flag: no fence, no counter.
Who needs it loads it until it is not `NOTHING`, which no instruction makes.
"""

from __future__ import annotations

from typing import Final

from numba import cuda, int32, uint64

from steps.instructions import load_u32_relaxed, load_u64x2_relaxed, trap

POLLS: Final = 1 << 25
"""Of a value at most: some ten seconds, as a poll of expert layers takes 0.3 us."""
NOTHING: Final = 0xFFFF
"""Of 16 bits, and twice of 32: a NaN that no instruction makes. Memory that is polled is full of it
at first."""


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
    """Eight float16 from array[at] on, when all of them are there."""
    x, polls = load_u64x2_relaxed(array, at), int32(0)
    while missing(x):
        x = load_u64x2_relaxed(array, at)
        polls = int32(polls + 1)
        if polls > int32(POLLS):
            trap()
    return x


@cuda.jit(device=True, forceinline=True)
def poll_three(array, at, other, third):
    """Eight from each of three places on, asked for together."""
    a, b = load_u64x2_relaxed(array, at), load_u64x2_relaxed(array, other)
    c, polls = load_u64x2_relaxed(array, third), int32(0)
    while missing(a) or missing(b) or missing(c):
        a, b = load_u64x2_relaxed(array, at), load_u64x2_relaxed(array, other)
        c = load_u64x2_relaxed(array, third)
        polls = int32(polls + 1)
        if polls > int32(POLLS):
            trap()
    return a, b, c


@cuda.jit(device=True, forceinline=True)
def poll_u32(array, at):
    """32 bits of array[at], when they are there."""
    x, polls = load_u32_relaxed(array, at), int32(0)
    while x == 0xFFFFFFFF:
        x = load_u32_relaxed(array, at)
        polls = int32(polls + 1)
        if polls > int32(POLLS):
            trap()
    return x
