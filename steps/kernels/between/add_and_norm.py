"""Residual and norm: h += y, and x = h / the root mean square of its row * weight.

A row is one thread block's. Each thread keeps 16 of its values in registers from the first load to
the last store: the row is read once, and one barrier lies between, behind which every thread adds
up the warps' sums itself. Rows beyond 16384 take more registers. The weight does not depend on the
product before, so it is loaded before the wait:

    weight | wait for the product | h, y | sum of squares, barrier | h, x

Where two GPUs have a half each of the product's sums, y is theirs and ours: added here, they are
not stored and loaded once more.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
from numba import cuda, float32, int32, int64

from steps.contract import Launch, ceil_div, dtype_name
from steps.instructions import (
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    shfl_xor,
    store_f32,
)
from steps.instructions.approximate import rsqrt
from steps.kernels.between.eight import EIGHT, OF_DTYPE
from steps.kernels.between.values import add_scaled, eight_of, put

WARP: Final = 32
CHUNKS: Final = 2  # of eight values, of a thread, in rows that 1024 threads can hold so
MOST_THREADS: Final = 1024


def row_threads(width: int) -> tuple[int, int]:
    """(threads of a block, chunks of a thread) for rows of so many values."""
    threads = min(MOST_THREADS, WARP * ceil_div(width, WARP * CHUNKS * EIGHT))
    return threads, ceil_div(width, threads * EIGHT)


@cache
def kernel(
    threads: int, chunks: int, ragged: bool, of_y: str | None, two: bool, of_x: str, parts: int = 0
) -> Any:
    """The kernel for rows of 8 * threads * chunks values, or, if ragged, of fewer. of_y, of_x:
    dtypes of y and x; with None there is no y, and h stays as it is. two: y has two terms. parts:
    sums of squares that it leaves of a row, all but the first of them zero.

    Without a branch around them the loads of all chunks are in flight together.
    """
    y_at, x_at, floats = OF_DTYPE[of_y or "float32"], OF_DTYPE[of_x], OF_DTYPE["float32"]
    load, load_y, store, store_x = floats.load, y_at.load, floats.store, x_at.store
    adds, warps, values = of_y is not None, threads // WARP, EIGHT * chunks

    @cuda.jit(launch_bounds=(threads, 1))
    def add_and_norm(h, y, other, weight, mean_of, epsilon, x, norm):
        """h += y + other and x = h * rsqrt(mean(h^2) + epsilon) * weight, for each row of h,
        float32 [M, width]. y, other, x: [M, width]; weight: float32 [width]; mean_of: 1 / width.
        The width is a multiple of 8, and all arrays begin at a multiple of 16 bytes. norm: float32
        [M, 1 + parts], see `launch`."""
        griddepcontrol_launch_dependents()
        sums = cuda.shared.array(warps, float32)
        v = cuda.local.array(values, float32)
        w, added = cuda.local.array(values, float32), cuda.local.array(EIGHT, float32)
        t, width = int32(cuda.threadIdx.x), int32(h.shape[1])
        row, first = int64(cuda.blockIdx.x) * width, int32(8 * t)
        i = int32(0)
        while i < chunks:  # as a range of two this one loop would not be unrolled
            k = int32(first + i * (8 * threads))
            if not ragged or k < width:
                put(w, EIGHT * i, load(weight, k))
            i = int32(i + 1)
        griddepcontrol_wait()

        squares = float32(0)
        for i in range(chunks):
            k = int32(first + i * (8 * threads))
            if not ragged or k < width:
                put(v, EIGHT * i, load(h, row + k))
                if adds:
                    put(added, 0, load_y(y, row + k))
                    if two:
                        of_other = load_y(other, row + k)
                        add_scaled(added, 0, float32(1), of_other[:4], of_other[4:])
                    term = eight_of(added, 0)
                    add_scaled(v, EIGHT * i, float32(1), term[:4], term[4:])
                for j in range(EIGHT):
                    squares += v[EIGHT * i + j] * v[EIGHT * i + j]
        for r in range(5):
            squares += shfl_xor(squares, 1 << r)
        if t & 31 == 0:
            sums[t >> 5] = squares
        cuda.syncthreads()
        total = float32(0)
        for warp in range(warps):
            total += sums[warp]

        by = rsqrt(total * mean_of + epsilon)
        for i in range(chunks):
            k = int32(first + i * (8 * threads))
            if not ragged or k < width:
                if adds:
                    store(h, row + k, eight_of(v, EIGHT * i))
                for j in range(EIGHT):
                    v[EIGHT * i + j] = v[EIGHT * i + j] * by * w[EIGHT * i + j]
                store_x(x, row + k, eight_of(v, EIGHT * i))
        if parts:
            part = t
            while part <= parts:
                value = by if part == 0 else total if part == 1 else float32(0)
                store_f32(norm, int64(cuda.blockIdx.x) * (1 + parts) + part, value)
                part = int32(part + threads)

    return add_and_norm


def launch(
    h: Any, y: Any | None, weight: Any, epsilon: float, x: Any, other: Any | None = None,
    norm: Any | None = None,
) -> Launch:  # fmt: skip
    """h += y (+ other, of the same dtype) and its norm x, see the kernel; with y None the norm of h
    alone. norm: float32 [M, 1 + parts], what a deferred norm leaves (`deferred_norm`): here s is
    the factor of x itself, and the sum of squares is the first part."""
    m, width = h.shape
    threads, chunks = row_threads(width)
    ragged, of_y = width < threads * chunks * EIGHT, None if y is None else dtype_name(y)
    parts = 0 if norm is None else norm.shape[1] - 1
    run = kernel(threads, chunks, ragged, of_y, other is not None, dtype_name(x), parts)
    y = h if y is None else y
    numbers = np.float32(1 / width), np.float32(epsilon)
    args = (h, y, y if other is None else other, weight, *numbers, x, h if norm is None else norm)
    return Launch(run, (m,), (threads,), args, overlap=True)
