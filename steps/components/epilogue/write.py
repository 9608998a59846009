"""Writing C: straight from the accumulators of mma.sync, or four neighbouring features at a time.

Step 7 teaches the first; steps 8 to 10 use it (`write_sums`). Step 11 teaches the second, which the
tiles that pass through shared memory use.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from numba import cuda, float32, int32, int64

from steps.instructions import (
    float_to_half,
    floats_to_halves,
    load_f32,
    store_f32,
    store_f32x4,
    store_u16,
    store_u32x2,
)

PAD: Final = 4
"""Floats between one token's sums and the next's: the quads of an mma in four sets of banks."""


@cache
def write_row(in_half: bool) -> Any:
    """write(c, offset, there, x): x, four float32, to flat c from `offset` on; only the first
    `there`."""

    @cuda.jit(device=True, forceinline=True)
    def write(c, offset, there, x):
        if c.shape[1] & 3 == 0:
            if there > 0:
                if in_half:
                    store_u32x2(
                        c, offset, floats_to_halves(x[0], x[1]), floats_to_halves(x[2], x[3])
                    )
                else:
                    store_f32x4(c, offset, x[0], x[1], x[2], x[3])
        else:
            for i in range(4):
                if i < there:
                    if in_half:
                        store_u16(c, offset + i, float_to_half(x[i]))
                    else:
                        store_f32(c, offset + i, x[i])

    return write


@cache
def write_four(in_half: bool) -> Any:
    """write(c, m, n, x): x, four float32, to c[m, n..n+3]; nothing beyond the edges. n % 4 == 0."""

    row = write_row(in_half)

    @cuda.jit(device=True, forceinline=True)
    def write(c, m, n, x):
        M, N = c.shape
        if m < M:
            row(c, int64(m) * N + n, N - n, x)

    return write


@cache
def write_sums(rows: int, columns: int, scale: float) -> Any:
    """write(c, m0, n0, lane, acc, row_scales): the sums of a warp, `rows` x `columns` mma of 16
    features x 8 tokens, to c, float32 [M, N], from token m0 and feature n0 on; nothing beyond the
    edges.

    acc       : float32 [4 * rows * columns], of this lane: of each mma tokens m, m + 1 of feature
                n, then of feature n + 8.
    row_scales: float32, one for each feature, as many as whole fragment-packed tiles have; all sums
                are multiplied by `scale` besides.
    """
    features = 2 * rows  # of a lane

    @cuda.jit(device=True, forceinline=True)
    def write(c, m0, n0, lane, acc, row_scales):
        M, N = int32(c.shape[0]), int32(c.shape[1])
        m, n = int32(m0 + 2 * (lane & 3)), int32(n0 + (lane >> 2))
        # The compiler keeps a load behind the stores above it, so all loads are issued first.
        scales = cuda.local.array(features, float32)
        for i in range(features):
            scales[i] = load_f32(row_scales, n + 8 * i) * float32(scale)
        for j in range(columns):
            for odd in range(2):
                token = int32(m + 8 * j + odd)
                offset = int64(token) * N + n
                for i in range(features):
                    if token < M and int32(n + 8 * i) < N:
                        r = 4 * (i // 2 * columns + j) + 2 * (i % 2) + odd
                        store_f32(c, offset + 8 * i, acc[r] * scales[i])

    return write
