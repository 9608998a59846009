"""The end of a whole tile of wgmma: from the accumulators of a warpgroup to C, float16 or float32.

A thread holds sums of two features and many tokens, and C has the features of a token side by side.
For 16 bits, float16 or bfloat16, the sums pass through shared memory, transposed, and are stored 16
bytes at a time. For float32 they go to C directly: the eight lanes that hold the same token have
eight features, which are 32 bytes of C, a sector. Step 12 teaches this.

    registers of warp w, lane 4g + t                 shared memory, 128 bytes a token, swizzled
                                                              features of warp 0      of warp 1
                   tokens 2t, 2t + 1                             0..7     8..15    16..23   24..31
    feature 16w + g         x0, x1    stmatrix .trans  token 0 | 16 B  |  16 B  |  16 B  |  16 B  |
    feature 16w + g + 8     x2, x3    ------------->   token 1 | 16 B  |  16 B  |  16 B  |  16 B  |
                                                       ...

A token's chunk c of 16 bytes lies at c ^ (token & 7), as in `steps.kernels.prefill.row_tiles`. So
one chunk of eight tokens, which `stmatrix` stores together, lies in all banks, and so do the eight
chunks of a token, which eight lanes load together.
"""

from __future__ import annotations

from functools import cache
from math import gcd
from typing import Any, Final

from numba import cuda, float32, int32, int64, uint8

from steps.instructions import (
    barrier_sync,
    floats_to_bfloats,
    floats_to_halves,
    load_f32,
    load_u32x4,
    spread,
    stmatrix_x4_trans,
    store_f32,
)
from steps.kernels.parts.epilogue.bias import bias_of
from steps.kernels.parts.epilogue.rounded import store_eight

WARPGROUP: Final = 128
"""Threads of a warpgroup."""

STAGED_TOKENS: Final = 32
"""Tokens of a warpgroup that lie in shared memory at a time. There are two buffers, so that one
barrier serves both: the next tokens are stored while slower warps still load these."""

ROW: Final = 128
"""Bytes of 64 features in 16 bits each."""

PAIRS: Final = {"float16": floats_to_halves, "bfloat16": floats_to_bfloats}
"""Two float32 as a word of C, by its dtype."""


def half_tile_bytes(tokens: int, staged_tokens: int = STAGED_TOKENS) -> int:
    """Bytes of shared memory that `store_half_tile` needs for each warpgroup."""
    return 2 * ROW * min(tokens, staged_tokens)


@cache
def load_two_features(of_bias: str | None) -> Any:
    """load(row_scales, bias, n) -> u: the row scales of features n and n + 8, then their biases; of
    features beyond the matrix, some other."""
    load_bias, _ = bias_of(of_bias)

    @cuda.jit(device=True, forceinline=True)
    def load(row_scales, bias, n):
        last, m = int32(row_scales.size - 1), int32(n + 8)
        u, v = load_f32(row_scales, min(n, last)), load_f32(row_scales, min(m, last))
        return u, v, load_bias(bias, n), load_bias(bias, m)

    return load


@cuda.jit(device=True, forceinline=True)
def scale_rows(x, tokens, u):
    """x, a thread's sums of features g and g + 8, times u[0] and u[1], their row scales. They come
    before the tokens' scales: the sums times these alone may overflow."""
    for j in range(tokens // 8):
        x[4 * j] *= u[0]
        x[4 * j + 1] *= u[0]
        x[4 * j + 2] *= u[1]
        x[4 * j + 3] *= u[1]


@cuda.jit(device=True, forceinline=True)
def scale_tokens(x, tokens, token_scales, m, M):
    """x, a thread's sums of tokens m, m + 1, m + 8, m + 9 ..., times the scales of the tokens."""
    for j in range(tokens // 8):
        v = load_f32(token_scales, min(int32(m + 8 * j), int32(M - 1)))
        w = load_f32(token_scales, min(int32(m + 8 * j + 1), int32(M - 1)))
        x[4 * j] *= v
        x[4 * j + 1] *= w
        x[4 * j + 2] *= v
        x[4 * j + 3] *= w


@cache
def store_halves(
    tokens: int,
    first_byte: int,
    area_bytes: int,
    output: str,
    of_bias: str | None,
    staged_tokens: int = STAGED_TOKENS,
) -> Any:
    """store(x, c, m0, n0, u): the sums of a warpgroup, plus the bias of dtype `of_bias`, if that is
    not None, to C, whose dtype is `output`, "float16" or "bfloat16"; nothing beyond the edges.

    x         : float32, a thread's sums of 64 features x `tokens` tokens, as `spread` puts the
                accumulators of `wgmma` there, times all scales; a multiple of 16 tokens.
    m0, n0    : the first token and the first feature of this warpgroup.
    u         : of this thread's two features, `load_two_features`.
    first_byte: of dynamic shared memory, a multiple of 128. Warpgroup i of the block uses
                half_tile_bytes(tokens, staged_tokens) from first_byte + i * area_bytes on, and the
                named barrier 1 + i. When it returns, others may still be loading.

    The address of C is a multiple of 16.
    """
    staged, pair, (_, add) = gcd(tokens, staged_tokens), PAIRS[output], bias_of(of_bias)
    buffer_bytes = ROW * staged

    @cuda.jit(device=True, forceinline=True)
    def store(x, c, m0, n0, u):
        buffers = cuda.shared.array(0, uint8, alignment=128)  # all of the dynamic shared memory
        M, N = int32(c.shape[0]), int32(c.shape[1])
        warpgroup = int32(cuda.threadIdx.x // WARPGROUP)
        t = int32(cuda.threadIdx.x & (WARPGROUP - 1))
        warp, lane = int32(t >> 5), int32(t & 31)
        base = first_byte + warpgroup * area_bytes
        # lane 8i + r addresses row r of matrix i: features 0..7 of eight tokens, features 8..15,
        # then of the next eight tokens
        token, chunk = int32((lane >> 4) * 8 + (lane & 7)), int32(2 * warp + (lane >> 3 & 1))
        destination = base + token * ROW + (chunk ^ (token & 7)) * 16
        # and thread t loads and stores eight features of one token
        row, eight = int32(t >> 3), int32(t & 7)
        source = base + row * ROW + (eight ^ (row & 7)) * 16
        m, n = int32(m0 + row), int32(n0 + 8 * eight)
        offset, stride = int64(m) * N + n, int64(16) * N
        wide, there = N & 7 == 0, int32(N - n)
        for first in range(0, tokens, staged):
            buffer = first // staged % 2 * buffer_bytes
            for j in range(0, staged, 16):
                r = (first + j) // 2
                stmatrix_x4_trans(
                    buffers,
                    destination + buffer + j * ROW,
                    pair(add(x[r], u[2]), add(x[r + 1], u[2])),
                    pair(add(x[r + 2], u[3]), add(x[r + 3], u[3])),
                    pair(add(x[r + 4], u[2]), add(x[r + 5], u[2])),
                    pair(add(x[r + 6], u[3]), add(x[r + 7], u[3])),
                )
            barrier_sync(1 + warpgroup, WARPGROUP)
            for j in range(0, staged, 16):
                y = load_u32x4(buffers, source + buffer + j * ROW)
                if m + (first + j) < M:
                    store_eight(c, offset, y, wide, there)
                offset += stride

    return store


@cache
def store_half_tile(
    tokens: int, first_byte: int, scaled: bool, of_bias: str | None, output: str
) -> Any:
    """store(acc, c, m0, n0, row_scales, token_scales, bias): `store_halves` of a tile whose
    warpgroups all end together, with one area of `half_tile_bytes` behind the other.

    acc         : the accumulators of `wgmma`, all there: float32.
    row_scales  : float32, one for each feature.
    token_scales: float32 [M], one for each token; not read unless `scaled`.
    bias        : [N] of dtype `of_bias`, which is added; not read where that is None.
    """
    n_acc, load_features = tokens // 2, load_two_features(of_bias)
    store_sums = store_halves(tokens, first_byte, half_tile_bytes(tokens), output, of_bias)

    @cuda.jit(device=True, forceinline=True)
    def store(acc, c, m0, n0, row_scales, token_scales, bias):
        x = cuda.local.array(n_acc, float32)
        t = int32(cuda.threadIdx.x & (WARPGROUP - 1))
        u = load_features(row_scales, bias, int32(n0 + (t >> 5) * 16 + (t >> 2 & 7)))
        spread(x, acc)
        scale_rows(x, tokens, u)
        if scaled:
            scale_tokens(x, tokens, token_scales, int32(m0 + 2 * (t & 3)), int32(c.shape[0]))
        store_sums(x, c, m0, n0, u)

    return store


@cache
def store_float_tile(tokens: int, scaled: bool, of_bias: str | None) -> Any:
    """store(acc, c, m0, n0, row_scales, token_scales, bias): the same in float32, without shared
    memory and without a barrier."""
    n_acc, load_features, (_, add) = tokens // 2, load_two_features(of_bias), bias_of(of_bias)

    @cuda.jit(device=True, forceinline=True)
    def store(acc, c, m0, n0, row_scales, token_scales, bias):
        x = cuda.local.array(n_acc, float32)
        M, N = int32(c.shape[0]), int32(c.shape[1])
        t = int32(cuda.threadIdx.x & (WARPGROUP - 1))
        m, n = int32(m0 + 2 * (t & 3)), int32(n0 + (t >> 5) * 16 + (t >> 2 & 7))
        u = load_features(row_scales, bias, n)
        spread(x, acc)
        scale_rows(x, tokens, u)
        if scaled:
            scale_tokens(x, tokens, token_scales, m, M)
        offset, stride = int64(m) * N + n, int64(8) * N
        for j in range(tokens // 8):
            for i in range(2):
                r, at = 4 * j + i, offset + i * int64(N)
                if m + (8 * j + i) < M:
                    if n < N:
                        store_f32(c, at, add(x[r], u[2]))
                    if n + 8 < N:
                        store_f32(c, at + 8, add(x[r + 2], u[3]))
            offset += stride

    return store
