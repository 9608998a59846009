"""Values of a row that a thread has in registers: eight of them in a local array.

`dot` and `add_scaled` are what attention does with eight values of a head: with a key, and with a
value times its share.
"""

from __future__ import annotations

from numba import cuda

from steps.instructions import floats_to_halves


@cuda.jit(device=True, forceinline=True)
def put(x, at, values):
    """x[at ..] = four values, or eight."""
    for i in range(len(values)):
        x[at + i] = values[i]


@cuda.jit(device=True, forceinline=True)
def put_zeros(x, at):
    """x[at .. at + 3] = 0."""
    for i in range(4):
        x[at + i] = 0


@cuda.jit(device=True, forceinline=True)
def eight_of(x, at):
    """x[at .. at + 7]."""
    y0, y1, y2, y3 = x[at], x[at + 1], x[at + 2], x[at + 3]
    return y0, y1, y2, y3, x[at + 4], x[at + 5], x[at + 6], x[at + 7]


@cuda.jit(device=True, forceinline=True)
def dot(x, low, high):
    """Of x[0 .. 7] and eight values, low and high. Written out, so that no tuple is indexed at run
    time, which would take local memory."""
    whole = x[0] * low[0] + x[1] * low[1]
    whole += x[2] * low[2]
    whole += x[3] * low[3]
    whole += x[4] * high[0]
    whole += x[5] * high[1]
    whole += x[6] * high[2]
    return whole + x[7] * high[3]


@cuda.jit(device=True, forceinline=True)
def add_scaled(x, at, factor, low, high):
    """x[at .. at + 7] += factor * eight values, low and high."""
    x[at] += factor * low[0]
    x[at + 1] += factor * low[1]
    x[at + 2] += factor * low[2]
    x[at + 3] += factor * low[3]
    x[at + 4] += factor * high[0]
    x[at + 5] += factor * high[1]
    x[at + 6] += factor * high[2]
    x[at + 7] += factor * high[3]


@cuda.jit(device=True, forceinline=True)
def as_halves(x):
    """x[0 .. 7] rounded to float16, in four words."""
    first, second = floats_to_halves(x[0], x[1]), floats_to_halves(x[2], x[3])
    third, fourth = floats_to_halves(x[4], x[5]), floats_to_halves(x[6], x[7])
    return first, second, third, fourth
