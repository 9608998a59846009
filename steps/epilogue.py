"""From a tile of sums in shared memory to C: parts of K added up, units taken back, full lines.

Steps whose operands are float16 share this. Their accumulators hold products in units of a feature
and of a token, powers of two (`qformats.repack.tiles`, `steps.activations.float16_units`), lie
scattered over a warp, and C may be float32 or float16. So they go to shared memory first, and each
thread then takes four neighbouring features of a token, as C has them.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from numba import cuda, float32, int32, int64

from steps.instructions import (
    fence,
    float_to_half,
    floats_to_halves,
    load_f32x4,
    store_f32,
    store_f32x4,
    store_u16,
    store_u32x2,
)

PAD: Final = 4
"""Floats between one token's sums and the next's: the quads of an mma in four sets of banks."""


@cache
def write_four(in_half: bool) -> Any:
    """write(c, m, n, x): x, four float32, to c[m, n..n+3]; nothing beyond the edges. n % 4 == 0."""

    @cuda.jit(device=True, forceinline=True)
    def write(c, m, n, x):
        M, N = c.shape
        at = int64(m) * N + n
        if m < M and n < N:
            if N & 3 == 0:
                if in_half:
                    store_u32x2(c, at, floats_to_halves(x[0], x[1]), floats_to_halves(x[2], x[3]))
                else:
                    store_f32x4(c, at, x[0], x[1], x[2], x[3])
            else:
                for i in range(4):
                    if n + i < N:
                        if in_half:
                            store_u16(c, at + i, float_to_half(x[i]))
                        else:
                            store_f32(c, at + i, x[i])

    return write


@cache
def finish_tile(features: int, tokens: int, groups: int, threads: int, in_half: bool) -> Any:
    """finish(sums, c, m0, n0, of_rows, of_tokens, part, parts, tile, partials, arrived): the end of
    a kernel, for all threads of a block.

    sums       : shared float32 [groups, tokens, features + PAD], all written; they are added up.
    m0, n0     : the tile's first token and feature.
    of_rows    : float32, what features are multiplied by, as many as whole records have.
    of_tokens  : float32 [M], likewise.
    part, parts: which part of K these are the sums of. Where there is more than one the blocks of a
                 tile leave them in `partials`, float32 [tiles, parts, tokens, features], and the
                 last to come, by the count `arrived`, int32 [tiles], adds up all of them in the
                 order of K: the same bits in every run. The count is left at zero.
    """
    write, width = write_four(in_half), features // 4
    pitch, size = features + PAD, features * tokens

    @cuda.jit(device=True, forceinline=True)
    def write_scaled(c, m, n, of_rows, of_tokens, x):
        if m < c.shape[0] and n < c.shape[1]:
            u, v = load_f32x4(of_rows, n), of_tokens[m]
            y = x[0] * u[0] * v, x[1] * u[1] * v, x[2] * u[2] * v, x[3] * u[3] * v
            write(c, m, n, y)

    @cuda.jit(device=True, forceinline=True)
    def finish(sums, c, m0, n0, of_rows, of_tokens, part, parts, tile, partials, arrived):
        t = int32(cuda.threadIdx.x)
        before = cuda.shared.array(1, int32)  # how many of the tile's blocks were done before this
        for i in range(t, size // 4, threads):
            m, n = i // width, i % width * 4
            x = load_f32x4(sums, m * pitch + n)
            for group in range(1, groups):
                y = load_f32x4(sums, (group * tokens + m) * pitch + n)
                x = x[0] + y[0], x[1] + y[1], x[2] + y[2], x[3] + y[3]
            if parts == 1:
                write_scaled(c, m0 + m, n0 + n, of_rows, of_tokens, x)
            else:
                at = (int64(tile) * parts + part) * size + 4 * i
                store_f32x4(partials, at, x[0], x[1], x[2], x[3])
        if parts == 1:
            return
        fence()
        cuda.syncthreads()
        if t == 0:
            before[0] = cuda.atomic.add(arrived, tile, 1)
        cuda.syncthreads()
        if before[0] == parts - 1:
            fence()
            for i in range(t, size // 4, threads):
                x = float32(0), float32(0), float32(0), float32(0)
                for each in range(parts):
                    y = load_f32x4(partials, (int64(tile) * parts + each) * size + 4 * i)
                    x = x[0] + y[0], x[1] + y[1], x[2] + y[2], x[3] + y[3]
                write_scaled(c, m0 + i // width, n0 + i % width * 4, of_rows, of_tokens, x)
            if t == 0:
                arrived[tile] = 0  # for the next launch

    return finish
