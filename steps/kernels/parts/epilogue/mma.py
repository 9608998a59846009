"""The end of a tile of step 11: through shared memory, split-K partial sums, scales, C.

The accumulators of `mma` lie scattered over a warp, several warps may have sums of the same outputs
(warps along K), and C may be float32 or have 16 bits. So they go to shared memory first, and each
thread then takes four neighbouring features of a token, as C has them. Step 11 teaches this.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from numba import cuda, float32, int32, int64, uint32

from steps.instructions import (
    fence,
    load_f32,
    load_f32x4,
    store_f32,
    store_f32x4,
    store_u16,
    store_u32x2,
)
from steps.kernels.parts.epilogue.bias import bias_of
from steps.kernels.parts.epilogue.half_tile import PAIRS
from steps.kernels.parts.split_k_reduction import count_block_arrival

PAD: Final = 4
"""Floats left free behind each token's sums. A warp stores eight features of tokens 0, 2, 4 and 6
at once: these then lie in all 32 banks."""


def staged_bytes(features: int, tokens: int, warps_k: int) -> int:
    """Bytes of shared memory for the sums of a tile."""
    return 4 * warps_k * tokens * (features + PAD)


@cache
def stage_sums(rows: int, columns: int, features: int) -> Any:
    """stage(sums, acc, token, feature, lane): the sums of a warp, `rows` x `columns` mma of 16
    features x 8 tokens, to shared float32 [tokens, features + PAD], from there on.

    acc: float32 [4 * rows * columns], of this lane: of each mma tokens 2t, 2t + 1 of feature g,
         then of feature g + 8.
    """
    pitch = features + PAD

    @cuda.jit(device=True, forceinline=True)
    def stage(sums, acc, token, feature, lane):
        origin = (token + 2 * (lane & 3)) * pitch + feature + (lane >> 2)
        for i in range(rows):
            for j in range(columns):
                r, at = 4 * (i * columns + j), origin + 8 * j * pitch + 16 * i
                store_f32(sums, at, acc[r])
                store_f32(sums, at + pitch, acc[r + 1])
                store_f32(sums, at + 8, acc[r + 2])
                store_f32(sums, at + pitch + 8, acc[r + 3])

    return stage


@cache
def write_four(output: str) -> Any:
    """write(c, offset, there, x): x, four float32, to flat c of this dtype from `offset` on; only
    the first `there`, of which there is one at least. `offset` is a multiple of 4 where the rows of
    c are."""
    wide, pair = output == "float32", PAIRS.get(output, PAIRS["float16"])

    @cuda.jit(device=True, forceinline=True)
    def write_floats(c, offset, there, x):
        if c.shape[1] & 3 == 0:
            store_f32x4(c, offset, x[0], x[1], x[2], x[3])
        else:
            for i in range(4):
                if i < there:
                    store_f32(c, offset + i, x[i])

    @cuda.jit(device=True, forceinline=True)
    def write_pairs(c, offset, there, x):
        y = pair(x[0], x[1]), pair(x[2], x[3])
        if c.shape[1] & 3 == 0:
            store_u32x2(c, offset, y[0], y[1])
        else:
            for i in range(4):
                if i < there:
                    store_u16(c, offset + i, uint32(y[i // 2]) >> uint32(16 * (i & 1)))

    return write_floats if wide else write_pairs


@cache
def finish_mma_tile(
    features: int,
    tokens: int,
    warps_k: int,
    threads: int,
    output: str,
    scaled: bool,
    of_bias: str | None,
) -> Any:
    """finish(sums, c, m0, n0, row_scales, token_scales, bias, split, splits, tile_id, partials,
           arrived):
    the end of a kernel, for all threads of a block. C is of dtype `output`: "float32", "float16" or
    "bfloat16".

    sums        : shared float32 [warps_k, tokens, features + PAD], all written; they are added up.
    m0, n0      : the tile's first token and feature.
    row_scales  : float32, one for each feature, as many as whole fragment-packed tiles have.
    token_scales: float32 [M], one for each token; not read unless `scaled`.
    bias        : [N] of dtype `of_bias`, which is added; not read where that is None.
    split       : the share of K these are the sums of, of `splits`. With more than one share the
                  blocks of a tile store partial sums in `partials`, float32 [tiles, splits, tokens,
                  features]. The last to arrive, by the counter `arrived`, int32 [tiles], adds them
                  up in the order of K: the same bits in every run. The counter is left at zero.
    """
    write, width = write_four(output), features // 4
    pitch, size = features + PAD, features * tokens
    load_bias, add_bias = bias_of(of_bias)

    @cuda.jit(device=True, forceinline=True)
    def write_scaled(c, m, n, row_scales, token_scales, bias, x):
        M, N = c.shape
        if m < M and n < N:
            u = load_f32x4(row_scales, n)
            y = x[0] * u[0], x[1] * u[1], x[2] * u[2], x[3] * u[3]
            if scaled:
                v = token_scales[m]
                y = y[0] * v, y[1] * v, y[2] * v, y[3] * v
            y = (
                add_bias(y[0], load_bias(bias, n)),
                add_bias(y[1], load_bias(bias, n + 1)),
                add_bias(y[2], load_bias(bias, n + 2)),
                add_bias(y[3], load_bias(bias, n + 3)),
            )
            write(c, int64(m) * N + n, N - n, y)

    @cuda.jit(device=True, forceinline=True)
    def finish(
        sums, c, m0, n0, row_scales, token_scales, bias, split, splits, tile_id, partials, arrived
    ):  # fmt: skip
        t = int32(cuda.threadIdx.x)
        before = cuda.shared.array(1, int32)  # how many of the tile's blocks arrived before this
        for i in range(t, size // 4, threads):
            m, n = i // width, i % width * 4
            x = load_f32x4(sums, m * pitch + n)
            for group in range(1, warps_k):
                y = load_f32x4(sums, (group * tokens + m) * pitch + n)
                x = x[0] + y[0], x[1] + y[1], x[2] + y[2], x[3] + y[3]
            if splits == 1:
                write_scaled(c, m0 + m, n0 + n, row_scales, token_scales, bias, x)
            else:
                offset = (int64(tile_id) * splits + split) * size + 4 * i
                store_f32x4(partials, offset, x[0], x[1], x[2], x[3])
        if splits == 1:
            return
        count_block_arrival(arrived, tile_id, before, t)
        if before[0] == splits - 1:
            fence()
            for i in range(t, size // 4, threads):
                x = float32(0), float32(0), float32(0), float32(0)
                for other in range(splits):
                    y = load_f32x4(partials, (int64(tile_id) * splits + other) * size + 4 * i)
                    x = x[0] + y[0], x[1] + y[1], x[2] + y[2], x[3] + y[3]
                m, n = m0 + i // width, n0 + i % width * 4
                write_scaled(c, m, n, row_scales, token_scales, bias, x)
            if t == 0:
                arrived[tile_id] = 0  # for the next launch

    return finish


# --- the end of a warp tile of steps 8 to 10: from the accumulators of mma.sync straight to C -----
#
# Step 7 teaches this in its own kernel, for a warp of one packed tile.


@cache
def write_sums(rows: int, columns: int, of_bias: str | None) -> Any:
    """write(c, m0, n0, lane, acc, row_scales, bias): the sums of a warp, `rows` x `columns` mma of
    16 features x 8 tokens, to c, float32 [M, N], from token m0 and feature n0 on; nothing beyond
    the edges.

    acc       : float32 [4 * rows * columns], of this lane: of each mma tokens m, m + 1 of feature
                n, then of feature n + 8.
    row_scales: float32, one for each feature, as many as whole fragment-packed tiles have.
    bias      : [N] of dtype `of_bias`, which is added; not read where that is None.
    """
    features, (load_bias, add_bias) = 2 * rows, bias_of(of_bias)  # features of a lane

    @cuda.jit(device=True, forceinline=True)
    def write(c, m0, n0, lane, acc, row_scales, bias):
        M, N = int32(c.shape[0]), int32(c.shape[1])
        m, n = int32(m0 + 2 * (lane & 3)), int32(n0 + (lane >> 2))
        # The compiler keeps a load behind the stores above it, so all loads are issued first.
        scales = cuda.local.array(features, float32)
        biases = cuda.local.array(features, float32)
        for i in range(features):
            scales[i] = load_f32(row_scales, n + 8 * i)
            biases[i] = load_bias(bias, n + 8 * i)
        for j in range(columns):
            for odd in range(2):
                token = int32(m + 8 * j + odd)
                offset = int64(token) * N + n
                for i in range(features):
                    if token < M and int32(n + 8 * i) < N:
                        r = 4 * (i // 2 * columns + j) + 2 * (i % 2) + odd
                        store_f32(c, offset + 8 * i, add_bias(acc[r] * scales[i], biases[i]))

    return write
