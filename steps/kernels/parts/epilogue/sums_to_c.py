"""The last part of a tile of the persistent wgmma steps: a warpgroup's sums to C.

There are two ways. Both pass through an *area* of shared memory that each warpgroup has to itself,
as the ring is full of the next tile already:

    16 bits    transposed by stmatrix, 32 tokens at a time
    (steps/kernels/parts/epilogue/half_tile.py) float32    transposed word by word, 16 tokens at a
               time, so that a thread has four neighbouring features of a token, 16 bytes, and half
               a warp a token's 64

Step 14 teaches this; step 15 uses it for int32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from numba import cuda, float32, int32, int64

from steps.contract import shared_memory
from steps.instructions import (
    barrier_sync,
    load_f32,
    load_f32x4,
    load_u32x4,
    store_f32,
    store_f32x4,
    store_u32,
)
from steps.kernels.parts.epilogue.bias import bias_of
from steps.kernels.parts.epilogue.half_tile import (
    WARPGROUP,
    half_tile_bytes,
    load_two_features,
    store_halves,
)
from steps.kernels.parts.epilogue.mma import PAD

WGMMA_ROWS: Final = 64
"""Features of a `wgmma`, rows of its D."""

STAGED_HALVES: Final = (32, 16)
"""Tokens of a warpgroup in its area at a time in 16 bits: 32 are faster, 16 take half the area,
which may save a stage of the ring."""

STAGED_FLOATS: Final = 16
"""The same in float32."""

PITCH: Final = WGMMA_ROWS + PAD
"""Words from a token's sums to the next token's, in float32."""


@cuda.jit(device=True, forceinline=True)
def load_i32x4(array, offset):
    x = load_u32x4(array, offset)
    return int32(x[0]), int32(x[1]), int32(x[2]), int32(x[3])


@cuda.jit(device=True, forceinline=True)
def write_four(c, offset, there, x):
    """x, four float32, to flat c from `offset` on; only the first `there`."""
    if c.shape[1] & 3 == 0:
        if there > 0:
            store_f32x4(c, offset, x[0], x[1], x[2], x[3])
    else:
        for i in range(4):
            if i < there:
                store_f32(c, offset + i, x[i])


@dataclass(frozen=True, slots=True)
class SumsToC:
    """Device functions that write a warpgroup's sums of 64 features x some tokens to C[M, N]. m and
    n are the first token and feature.

    thread_tokens: how many tokens' scales a thread needs
    load_features(row_scales, bias, n) -> u, the row scales of this thread's features, their biases
    load_token_scales(v, token_scales, m, M)
        v = those of its tokens, a local array
    store(x, u, v, c, m, n)
        the sums, times their scales, plus the bias, to C; nothing beyond the edges. x is a local
        array, in which `spread` has put the accumulators of `wgmma`.
    """

    thread_tokens: int
    load_features: Any
    load_token_scales: Any
    store: Any


@cache
def _to_16_bits(
    tokens: int,
    first_byte: int,
    area_bytes: int,
    staged: int,
    output: str,
    scaled: bool,
    of_bias: str | None,
) -> SumsToC:
    """To 16 bits. A thread holds tokens 2t, 2t + 1 of each 8, of features g and g + 8 of a warp's
    16, with t = lane & 3, g = lane >> 2. For areas see `store_halves`."""
    n_acc, thread_tokens, load_two = tokens // 2, tokens // 4, load_two_features(of_bias)
    store_area = store_halves(tokens, first_byte, area_bytes, output, of_bias, staged)

    @cuda.jit(device=True, forceinline=True)
    def load_features(row_scales, bias, n):
        t = int32(cuda.threadIdx.x & (WARPGROUP - 1))
        return load_two(row_scales, bias, int32(n + (t >> 5) * 16 + (t >> 2 & 7)))

    @cuda.jit(device=True, forceinline=True)
    def load_token_scales(v, token_scales, m, M):
        if scaled:
            first = int32(m + 2 * (cuda.threadIdx.x & 3))
            for i in range(thread_tokens):
                token = int32(first + 8 * (i // 2) + i % 2)
                v[i] = load_f32(token_scales, min(token, int32(M - 1)))

    @cuda.jit(device=True, forceinline=True)
    def store(x, u, v, c, m, n):
        y = cuda.local.array(n_acc, float32)
        for r in range(0, n_acc, 4):
            y[r], y[r + 1] = float32(x[r]) * u[0], float32(x[r + 1]) * u[0]
            y[r + 2], y[r + 3] = float32(x[r + 2]) * u[1], float32(x[r + 3]) * u[1]
            if scaled:  # last: the sums times these alone may overflow
                i = r // 2
                y[r], y[r + 1] = y[r] * v[i], y[r + 1] * v[i + 1]
                y[r + 2], y[r + 3] = y[r + 2] * v[i], y[r + 3] * v[i + 1]
        warpgroup = int32(cuda.threadIdx.x // WARPGROUP)
        barrier_sync(1 + warpgroup, WARPGROUP)  # nobody loads from the area any more
        store_area(y, c, m, n, u)

    return SumsToC(thread_tokens, load_features, load_token_scales, store)


@cache
def _to_float(
    tokens: int, first_byte: int, area_bytes: int, kind: Any, scaled: bool, of_bias: str | None
) -> SumsToC:
    """To float32. Transposed, a thread holds four neighbouring features of tokens m, m + 8 ..."""
    staged, thread_tokens = min(tokens, STAGED_FLOATS), tokens // 8
    load_four = load_f32x4 if kind == float32 else load_i32x4
    store_one = store_f32 if kind == float32 else store_u32
    load_bias, add = bias_of(of_bias)

    @cuda.jit(device=True, forceinline=True)
    def transpose(x):
        """Before, x has the sums as `wgmma` leaves them."""
        sums = cuda.shared.array(0, kind, alignment=128)  # all of the dynamic shared memory
        warpgroup, t = int32(cuda.threadIdx.x >> 7), int32(cuda.threadIdx.x & (WARPGROUP - 1))
        base = first_byte // 4 + warpgroup * (area_bytes // 4)
        store_base = base + 2 * (t & 3) * PITCH + (t >> 5) * 16 + (t >> 2 & 7)
        load_base = base + (t >> 4) * PITCH + (t & 15) * 4
        for first_token in range(0, tokens, staged):
            barrier_sync(1 + warpgroup, WARPGROUP)
            for j in range(0, staged, 8):
                r, destination = (first_token + j) // 2, store_base + j * PITCH
                store_one(sums, destination, x[r])
                store_one(sums, destination + PITCH, x[r + 1])
                store_one(sums, destination + 8, x[r + 2])
                store_one(sums, destination + PITCH + 8, x[r + 3])
            barrier_sync(1 + warpgroup, WARPGROUP)
            for j in range(0, staged, 8):
                r = (first_token + j) // 2
                x[r], x[r + 1], x[r + 2], x[r + 3] = load_four(sums, load_base + j * PITCH)

    @cuda.jit(device=True, forceinline=True)
    def load_features(row_scales, bias, n):
        own = int32(n + (cuda.threadIdx.x & 15) * 4)
        u = load_f32x4(row_scales, min(own, int32(row_scales.size - 4)))
        b0, b1 = load_bias(bias, own), load_bias(bias, own + 1)
        b2, b3 = load_bias(bias, own + 2), load_bias(bias, own + 3)
        return u[0], u[1], u[2], u[3], b0, b1, b2, b3

    @cuda.jit(device=True, forceinline=True)
    def load_token_scales(v, token_scales, m, M):
        if scaled:
            first = int32(m + (cuda.threadIdx.x >> 4 & 7))
            for i in range(thread_tokens):
                v[i] = load_f32(token_scales, min(int32(first + 8 * i), int32(M - 1)))

    @cuda.jit(device=True, forceinline=True)
    def store(x, u, v, c, m, n):
        transpose(x)
        M, N = int32(c.shape[0]), int32(c.shape[1])
        token = int32(m + (cuda.threadIdx.x >> 4 & 7))
        feature = int32(n + (cuda.threadIdx.x & 15) * 4)
        offset, stride = int64(token) * N + feature, int64(8) * N
        for i in range(thread_tokens):
            r = 4 * i
            y0, y1 = float32(x[r]) * u[0], float32(x[r + 1]) * u[1]
            y2, y3 = float32(x[r + 2]) * u[2], float32(x[r + 3]) * u[3]
            if scaled:
                y0, y1, y2, y3 = y0 * v[i], y1 * v[i], y2 * v[i], y3 * v[i]
            y0, y1, y2, y3 = add(y0, u[4]), add(y1, u[5]), add(y2, u[6]), add(y3, u[7])
            there = int32(N - feature if token + 8 * i < M else 0)
            write_four(c, offset, there, (y0, y1, y2, y3))
            offset += stride

    return SumsToC(thread_tokens, load_features, load_token_scales, store)


@cache
def sums_to_c(
    tokens: int,
    warpgroups: int,
    first_byte: int,
    output: str,
    kind: Any,
    scaled: bool,
    of_bias: str | None,
    slices: int,
) -> tuple[SumsToC, SumsToC, int]:
    """(for the sums of `tokens` tokens, for a slice of them, the byte behind the areas, which begin
    at `first_byte`). The sums are of `kind`, float32 or int32; C is of dtype `output`, the bias of
    `of_bias`."""
    sizes = tokens, tokens // slices
    if output == "float32":
        area = 4 * PITCH * min(tokens, STAGED_FLOATS)
        whole, part = (_to_float(size, first_byte, area, kind, scaled, of_bias) for size in sizes)
        return whole, part, first_byte + warpgroups * area
    for staged in STAGED_HALVES:
        area = half_tile_bytes(tokens, staged)
        end = first_byte + warpgroups * area
        if end + 4 * warpgroups * slices <= shared_memory():
            break
    whole, part = (
        _to_16_bits(size, first_byte, area, staged, output, scaled, of_bias) for size in sizes
    )
    return whole, part, end
