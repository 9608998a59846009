"""From the sums of warps to C: each warp along K stores its own, then a thread adds up one output.

Sums of a row tile, 16 features and `tokens` tokens, lie in shared memory as tokens pair by pair, 32
words a pair, each pair rotated by 8 words against the one before:

    word of a pair      0 ..  7    8 .. 15    16 .. 23    24 .. 31
    pair 0              token 0, features 0 .. 15       token 1, features 0 .. 15
    pair 1              token 3 (8 .. 15)   token 2, features 0 .. 15     token 3 (0 .. 7)

So the four lanes of a quad, each with another pair of tokens, store to different banks; and the
threads that add up read consecutive words. Step 17 teaches this.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from numba import cuda, float32, int32, int64, uint32

from qformats.repack import TILE_ROWS
from steps.instructions import load_f32, store_f32
from steps.kernels.decode.product import PAIR
from steps.kernels.parts.epilogue.bias import LOAD_BIAS
from steps.kernels.parts.epilogue.rounded import STORE

ROTATION = 8  # words by which a pair of tokens is rotated against the one before


@dataclass(frozen=True, slots=True)
class FinalSum:
    """Device functions of the end of a kernel. What they read, beside the sums, are arrays that the
    kernel only hands on: `token_scales`, and `reads`, for `final_sum` a bias [N].

    store(acc, smem, offset, lane, low, high)
        a warp: its sums of row tiles low to `high` of a pair (`Product.sums`) to byte `offset` on
    n_loads: floats that a thread loads, long before it needs them
    load_ahead(loaded, c, token_scales, reads, m0, first, end, t)
        a thread loads them to the local array `loaded`; other arguments as of `write`
    prologue(loaded, reads, t) -> own
        what it makes of them, whole warps together
    write(smem, sums, row_scales_at, c, token_scales, reads, own, m0, here, first, end, t)
        all threads: C of row tiles first to `end` and of tokens m0 to m0 + here. sums: (byte of
        the sums of the first warp along K, bytes from one to the next); row_scales_at: the byte
        of the row scales, float32, of the block's features
    beside: threads for which the kernel leaves registers on its SM, beside its own
    """

    store: Any
    n_loads: int
    load_ahead: Any
    prologue: Any
    write: Any
    beside: int = 0


@dataclass(frozen=True, slots=True)
class WarpSums:
    """Device functions for the sums that warps leave in shared memory.

    store: `FinalSum.store`
    token_and_feature(i) -> (token, feature) of sum i of a row tile
    output_of(i) -> (token, feature) of sum i of a thread block
    add_up(smem, sums, i) -> sum i of a thread block, of all its warps along K
    """

    store: Any
    token_and_feature: Any
    output_of: Any
    add_up: Any


@cache
def warp_sums(tokens: int, warps_k: int) -> WarpSums:
    """The device functions, for capture in a kernel factory."""
    tile_sums, groups, columns = TILE_ROWS * tokens, max(1, tokens // 8), min(2, tokens)
    lanes_with_sums = max(1, min(4, tokens // 2))  # of a quad: two tokens each

    @cuda.jit(device=True, forceinline=True)
    def store(acc, smem, offset, lane, low, high):
        group, quad = int32(lane >> 2), int32(lane & 3)
        for r in range(PAIR):
            if low <= r and r < high and quad < lanes_with_sums:
                for j in range(groups):
                    pair = int32(quad + 4 * j)
                    for i in range(4):
                        if i % 2 < columns:
                            word = 16 * (i % 2) + 8 * (i // 2) + group + ROTATION * pair
                            word = int32((r - low) * tile_sums + 32 * pair + (word & 31))
                            store_f32(smem, offset + 4 * word, acc[4 * (groups * r + j) + i])

    @cuda.jit(device=True, forceinline=True)
    def token_and_feature(i):
        pair = i >> 5
        word = (i - ROTATION * pair) & 31
        return int32(2 * pair + (word >> 4)), int32(word & 15)

    @cuda.jit(device=True, forceinline=True)
    def output_of(i):
        token, feature = token_and_feature(i & (tile_sums - 1))
        tile = uint32(i) // uint32(tile_sums)
        return token, int32(tile * uint32(TILE_ROWS) + uint32(feature))

    @cuda.jit(device=True, forceinline=True)
    def add_up(smem, sums, i):
        total = float32(0)
        for part in range(warps_k):
            total += load_f32(smem, sums[0] + 4 * i + part * sums[1])
        return total

    return WarpSums(store, token_and_feature, output_of, add_up)


@cache
def final_sum(
    tokens: int,
    warps: int,
    warps_k: int,
    scale: float,
    scaled: bool,
    output: str,
    of_bias: str | None,
) -> FinalSum:
    """The device functions, for capture in a kernel factory. scale: of all outputs; scaled: whether
    tokens have scales; output: the dtype of C, "float32", "float16" or "bfloat16"; of_bias: that of
    the bias, or None for no bias."""
    biased, load_bias = of_bias is not None, LOAD_BIAS[of_bias or "float32"]
    tile_sums, threads = TILE_ROWS * tokens, 32 * warps
    of_warps = warp_sums(tokens, warps_k)
    output_of, add_up, store_one = of_warps.output_of, of_warps.add_up, STORE[output]

    @cuda.jit(device=True, forceinline=True)
    def token_scale(token_scales, m0, M, i):
        if not scaled:
            return float32(1)
        token, _ = output_of(i)
        return load_f32(token_scales, min(int32(m0 + token), int32(M - 1)))

    @cuda.jit(device=True, forceinline=True)
    def load_ahead(loaded, c, token_scales, bias, m0, first, end, t):
        """The scale of the token of its outputs."""
        loaded[0] = token_scale(token_scales, m0, int32(c.shape[0]), t)

    @cuda.jit(device=True, forceinline=True)
    def prologue(loaded, bias, t):
        return loaded[0]

    @cuda.jit(device=True, forceinline=True)
    def write(
        smem, sums, row_scales_at, c, token_scales, bias, own_scale, m0, here, first, end, t
    ):  # fmt: skip
        M, N = int32(c.shape[0]), int32(c.shape[1])
        i, stop = t, int32(int32(end - first) * tile_sums)
        while i < stop:
            total = add_up(smem, sums, i)
            token, feature = output_of(i)
            row_scale = load_f32(smem, row_scales_at + 4 * feature) * float32(scale)
            if scaled and threads % tile_sums:  # its outputs are of several tokens
                own_scale = token_scale(token_scales, m0, M, i)
            n = int32(first * TILE_ROWS + feature)
            if token < here and n < N:
                total = total * row_scale * own_scale  # the scales alone may underflow
                if biased:
                    total += load_bias(bias, n)
                store_one(c, int64(m0 + token) * N + n, total)
            i = int32(i + threads)

    return FinalSum(of_warps.store, 1, load_ahead, prologue, write)
