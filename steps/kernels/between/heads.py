"""What `attention`, which teaches this, and `rotary` do with the values of a head."""

from __future__ import annotations

from typing import Final

from numba import cuda, float32, int32

from steps.instructions import load_f32x4
from steps.instructions.approximate import reciprocal
from steps.kernels.between.eight import EIGHT
from steps.kernels.between.values import add_scaled

SIZES: Final = (16, 32, 64, 128, 256)
"""Of heads: a power of two, so that a warp has whole groups of threads."""


@cuda.jit(device=True, forceinline=True)
def rotate_neighbours(x, c, s):
    """Rotary embedding of x[0 .. 7] by cos c and sin s, whose sign is (-, +): of neighbours
    (a, b) becomes (a cos - b sin, b cos + a sin)."""
    for i in range(0, EIGHT, 2):
        a, b = x[i], x[i + 1]
        x[i] = a * c[i] + b * s[i]
        x[i + 1] = b * c[i + 1] + a * s[i + 1]


@cuda.jit(device=True, forceinline=True)
def quotient(a, b):
    """a // b of positive int32 below 2^24: there is no instruction, and Numba divides in 64 bits.
    The approximation is off by one at most."""
    about = int32(float32(a) * reciprocal(float32(b)))
    rest = int32(a - about * b)
    return int32(about + (1 if rest >= b else 0) - (1 if rest < 0 else 0))


@cuda.jit(device=True, forceinline=True)
def add_scaled_from(x, factor, values, at):
    """x += factor * values[at .. at + 7]."""
    add_scaled(x, 0, factor, load_f32x4(values, at), load_f32x4(values, at + 4))
