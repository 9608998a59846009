"""Residual and norm without a launch: the product before begins them, the product after ends them.

A norm is x = h * r * weight, with one number r for a token. A product is linear, so r may come
behind it, as the scale of a token; and until then no thread block needs to know the whole row:

    product before    h += y | x = h * weight * s | partial sums of h^2, one a thread block
    product after     a @ W^T of that x | * r / s, r of the partial sums | + bias

Both are step 18's kernel with another end (`steps.kernels.decode.final_sum`). Each value of h is
one thread's. s keeps x within float16 whatever the size of the residual is: it is 1/64 of the r of
the norm before, which each thread adds up from the partial sums of that one. These are asked for
before A, or each warp would wait for them behind the weights of all SMs.

**Range:** what the norm would give, at most sqrt(K) * |weight|, is stored times g / 64, g = rms(h)
/ rms(h before). So with rows of 4096 and weights up to 1 a residual may become 65504 times larger
between two norms. What is stored below 2^-14 has fewer than 11 bits: with g = 1 values below 0.004,
to within 2e-6.
Up to `MOST_TOKENS` tokens, as a thread's outputs must be of one token.

**Of two GPUs** that share K, each has a term of y. The thread that has an output stores its term to
memory of the other GPU, and polls its own for the other's term: no launch, and no barrier.

    product before    term to the other GPU | poll the other's | h += both | x, sums of h^2

Memory that is polled is full of `NOTHING`, and the thread that has read a term leaves it so. What a
GPU stores next to the same place must come later than that: a sum in between is enough, as it needs
terms of launches that follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from qformats import BLOCK, Format
from qformats.repack import TILE_ROWS
from qformats.storage import storage_format
from steps.contract import Launch, Shape, dtype_name
from steps.instructions import (
    as_bits,
    as_float,
    float_to_half,
    load_f32,
    load_u32_system,
    shfl_xor,
    store_f32,
    store_u16,
    store_u32_system,
    trap,
)
from steps.instructions.approximate import reciprocal, rsqrt
from steps.kernels.decode.bulk import arguments, kernel
from steps.kernels.decode.final_sum import FinalSum, final_sum, warp_sums
from steps.kernels.decode.tiles import TileConfiguration, Variant, product_of, tile_configuration
from steps.kernels.parts.epilogue.bias import LOAD_BIAS, bias_operand
from steps.kernels.parts.weights.storage_formats import tile_format

MOST_TOKENS: Final = 8
WARP: Final = 32
ROOM: Final = 1 / 64
"""s as a share of the r of the norm before: so much more may a residual grow until the next one."""
BESIDE: Final = 128
"""Threads of attention, beside which the product before a norm has room for its registers. Formats
with minima or scales of 16 K would have to spill some, and get as many as they need."""

NOTHING: Final = 0xFFFFFFFF
"""A float32 NaN that no instruction makes: where a term of the other GPU has yet to come."""
POLLS: Final = 1 << 30
"""Of a term at most: some ten minutes, as the other GPU's process may have a kernel to compile."""


@dataclass(frozen=True, slots=True)
class NormOfToken:
    """Device functions of a warp, for the token of each thread's outputs.

    n_loads: floats that a thread loads, long before it needs them
    load_ahead(loaded, norm, m0, M, t)
        a thread loads them to the local array `loaded`, from 0 on. norm: float32 [M, 1 + parts], s
        and the partial sums of h^2, see `launch_residual`
    factors(loaded, mean_of, epsilon, t) -> (s, r)
    """

    n_loads: int
    load_ahead: Any
    factors: Any


@cache
def norm_of_token(tokens: int, parts: int) -> NormOfToken:
    """The device functions. The lanes of a warp have outputs of two tokens, or of one, and add up
    the sums of both. All warps of all thread blocks do it in the same order."""
    loads, two = -(-parts // WARP), tokens > 1
    own_token = warp_sums(tokens, 1).token_and_feature

    @cuda.jit(device=True, forceinline=True)
    def load_squares(loaded, at, norm, row, lane):
        for i in range(loads):
            loaded[at + i] = 0
            if WARP * (i + 1) <= parts or lane < parts - WARP * i:
                loaded[at + i] = load_f32(norm, row + 1 + lane + WARP * i)

    @cuda.jit(device=True, forceinline=True)
    def load_ahead(loaded, norm, m0, M, t):
        lane, last = int32(t & (WARP - 1)), int32(M - 1)
        token, _ = own_token(int32(t & (TILE_ROWS * tokens - 1)))
        even = int32(m0 + (token & -2))
        loaded[0] = load_f32(norm, int32(min(int32(m0 + token), last) * (1 + parts)))
        load_squares(loaded, 1, norm, int32(min(even, last) * (1 + parts)), lane)
        if two:
            odd = int32(min(int32(even + 1), last) * (1 + parts))
            load_squares(loaded, 1 + loads, norm, odd, lane)

    @cuda.jit(device=True, forceinline=True)
    def factors(loaded, mean_of, epsilon, t):
        total, other = float32(0), float32(0)
        for i in range(loads):
            total += loaded[1 + i]
            if two:
                other += loaded[1 + loads + i]
        for i in range(5):
            total += shfl_xor(total, 1 << i)
            if two:
                other += shfl_xor(other, 1 << i)
        token, _ = own_token(int32(t & (TILE_ROWS * tokens - 1)))
        if two and token & 1:
            total = other
        return loaded[0], rsqrt(total * mean_of + epsilon)

    return NormOfToken(1 + loads * (2 if two else 1), load_ahead, factors)


@cache
def normed_end(
    variant: Variant, scale: float, output: str, of_bias: str | None, parts: int
) -> FinalSum:
    """The end of the product after: it reads (norm, mean_of, epsilon, bias), see `launch_normed`.
    parts: partial sums of a token."""
    plain = final_sum(variant.tokens, variant.warps, variant.warps_k, scale, True, output, of_bias)
    of_token, write_plain = norm_of_token(variant.tokens, parts), plain.write
    load_norm, factors = of_token.load_ahead, of_token.factors

    @cuda.jit(device=True, forceinline=True)
    def load_ahead(loaded, c, _, reads, m0, first, end, t):
        load_norm(loaded, reads[0], m0, int32(c.shape[0]), t)

    @cuda.jit(device=True, forceinline=True)
    def prologue(loaded, reads, t):
        _, mean_of, epsilon, _ = reads
        s, r = factors(loaded, mean_of, epsilon, t)
        return r * reciprocal(s)

    @cuda.jit(device=True, forceinline=True)
    def write(smem, sums, row_scales_at, c, unread, reads, own, m0, here, first, end, t):
        bias = reads[3]
        write_plain(smem, sums, row_scales_at, c, unread, bias, own, m0, here, first, end, t)

    return FinalSum(plain.store, of_token.n_loads, load_ahead, prologue, write)


@cuda.jit(device=True, forceinline=True)
def own_alone(reads, at, term):
    return term


@cuda.jit(device=True, forceinline=True)
def with_other(reads, at, term):
    """The sum of both GPUs' terms of output `at`: the same bits on both."""
    arriving, remote = reads[7], reads[8]
    store_u32_system(remote, at, as_bits(term))
    other, polls = load_u32_system(arriving, at), int32(0)
    while other == uint32(NOTHING):
        other = load_u32_system(arriving, at)
        polls = int32(polls + 1)
        if polls > int32(POLLS):
            trap()
    store_u32_system(arriving, at, uint32(NOTHING))
    return term + as_float(other)


@cache
def residual_end(
    name: str, variant: Variant, scale: float, of_bias: str | None, parts: int, shared: bool
) -> FinalSum:
    """The end of the product before, of a storage format: C is x, and it reads (before, mean_of,
    epsilon, h, weight, after, bias) and, `shared`, (arriving, remote), see `launch_residual`.
    parts: partial sums of a token in `before`."""
    of_both = with_other if shared else own_alone
    tokens, warps, free = variant.tokens, variant.warps, variant.slot_bytes
    biased, load_bias = of_bias is not None, LOAD_BIAS[of_bias or "float32"]
    tile_sums, threads = TILE_ROWS * tokens, WARP * warps
    of_warps, of_token = warp_sums(tokens, variant.warps_k), norm_of_token(tokens, parts)
    of_block, add_up = of_warps.output_of, of_warps.add_up
    token_and_feature = of_warps.token_and_feature
    load_norm, factors, n_loads = of_token.load_ahead, of_token.factors, of_token.n_loads
    alike = max(1, tokens // 2)  # every so many-th warp has outputs of the same tokens
    each = warps // alike  # warps with outputs of a token

    @cuda.jit(device=True, forceinline=True)
    def output_of(i, first):
        """(token, feature in the thread block, feature) of output i."""
        token, feature = of_block(i)
        return token, feature, int32(first * TILE_ROWS + feature)

    @cuda.jit(device=True, forceinline=True)
    def load(h, weight, m0, first, end, i):
        """(h, weight) of output i, if there is one."""
        M, N = int32(h.shape[0]), int32(h.shape[1])
        token, _, n = output_of(i, first)
        old, w = float32(0), float32(0)
        if i < int32(int32(end - first) * tile_sums) and m0 + token < M and n < N:
            old, w = load_f32(h, int64(m0 + token) * N + n), load_f32(weight, n)
        return old, w

    @cuda.jit(device=True, forceinline=True)
    def load_ahead(loaded, c, _, reads, m0, first, end, t):
        before, h, weight = reads[0], reads[3], reads[4]
        load_norm(loaded, before, m0, int32(c.shape[0]), t)
        loaded[n_loads], loaded[n_loads + 1] = load(h, weight, m0, first, end, t)

    @cuda.jit(device=True, forceinline=True)
    def prologue(loaded, reads, t):
        mean_of, epsilon = reads[1], reads[2]
        _, s = factors(loaded, mean_of, epsilon, t)
        return s * float32(ROOM), loaded[n_loads], loaded[n_loads + 1]

    @cuda.jit(device=True, forceinline=True)
    def add_up_squares(smem, squares, after, s, m0, here, t):
        """The sums of h^2 of a thread block's outputs, token by token, to its place in `after`."""
        lane, warp = int32(t & (WARP - 1)), int32(t >> 5)
        token, feature = token_and_feature(int32(t & (tile_sums - 1)))
        for i in range(3):
            squares += shfl_xor(squares, 1 << i)
        if tokens > 1:  # eight lanes and the others of their token, see `final_sum`
            squares += shfl_xor(squares, 24 if token & 2 else 8)
        else:
            squares += shfl_xor(squares, 8)
            squares += shfl_xor(squares, 16)
        rank, row = int32(warp // alike), int64(m0 + token) * after.shape[1]
        if feature == 0 and (tokens > 1 or lane == 0):
            store_f32(smem, free + 4 * (token * each + rank), squares)
            if rank == 0 and cuda.blockIdx.x == 0 and token < here:
                store_f32(after, row, s)
        cuda.syncthreads()
        if t < here:
            whole = float32(0)
            for i in range(each):
                whole += load_f32(smem, free + 4 * (t * each + i))
            store_f32(after, int64(m0 + t) * after.shape[1] + 1 + cuda.blockIdx.x, whole)

    @cuda.jit(device=True, forceinline=True)
    def write(smem, sums, row_scales_at, c, _, reads, own, m0, here, first, end, t):
        h, weight, after, bias = reads[3], reads[4], reads[5], reads[6]
        N = int32(c.shape[1])
        s, old, w = own
        squares = float32(0)
        i, stop = t, int32(int32(end - first) * tile_sums)
        while i < stop:
            total = add_up(smem, sums, i)
            token, feature, n = output_of(i, first)
            row_scale = load_f32(smem, row_scales_at + 4 * feature) * float32(scale)
            if token < here and n < N:
                total = total * row_scale
                if biased:
                    total += load_bias(bias, n)
                at = int64(m0 + token) * N + n
                total = old + of_both(reads, at, total)
                squares += total * total
                store_f32(h, at, total)
                store_u16(c, at, float_to_half(total * s * w))
            i = int32(i + threads)
            old, w = load(h, weight, m0, first, end, i)
        add_up_squares(smem, squares, after, s, m0, here, t)

    tile = tile_format(name)
    tight = tile.minimum or tile.group < BLOCK
    return FinalSum(
        of_warps.store, n_loads + 2, load_ahead, prologue, write, 0 if tight else BESIDE
    )


def configuration(fmt: Format, m: int, n: int, k: int) -> TileConfiguration:
    """Of step 18 in family A16. ValueError for more than `MOST_TOKENS` tokens."""
    if m > MOST_TOKENS:
        raise ValueError(f"a norm is deferred for up to {MOST_TOKENS} tokens, not {m}")
    return tile_configuration(storage_format(fmt), Shape(m, n, k), "A16", False, mapped=True)


def partial_sums(fmt: Format, m: int, n: int, k: int) -> int:
    """How many of a token a product [m, k] @ [n, k]^T leaves: one a thread block."""
    return configuration(fmt, m, n, k).grid(m, n)[0]


def launch_residual(
    fmt: Format, weights: tuple, a: Any, h: Any, weight: Any, before: Any, epsilon: float,
    after: Any, x: Any, arriving: Any = None, remote: Any = None,
) -> Launch:  # fmt: skip
    """h += a @ dequantize(W)^T (+ bias), and x = h * weight * s: all but the last factor, r / s, of
    the norm of h.

    weights : packed by `qformats.repack.tiles`, and perhaps a bias [N].
    a       : float16 [M, K]. h: float32 [M, N]. x: float16 [M, N].
    weight  : float32 [N], of the norm.
    before  : float32 [M, 1 + any]: the norm before, in the form of `after`. s is its r * `ROOM`.
    after   : float32 [M, 1 + `partial_sums`]: of each token s, and the sums of h^2 of parts of its
              row. r = rsqrt(their sum / N + epsilon).
    arriving, remote : float32 [M * N], of two GPUs: where the other one's terms of y come, full of
              `NOTHING`, and the memory of the other one where they come there.
    ValueError for more than `MOST_TOKENS` tokens, or an `after` of another shape.
    """
    (m, k), n = a.shape, h.shape[1]
    found = configuration(fmt, m, n, k)
    grid = found.grid(m, n)
    if tuple(after.shape) != (m, 1 + grid[0]):
        raise ValueError(
            f"{grid[0]} thread blocks leave a sum each of {m} tokens: after must have shape "
            f"{[m, 1 + grid[0]]}, not {list(after.shape)}"
        )
    of_bias, (packed, row_scales, bias) = bias_operand(weights)
    variant, name = found.variant, storage_format(fmt).name
    scale = product_of(name, variant, dtype_name(a)).scale
    end_of = residual_end(name, variant, scale, of_bias, before.shape[1] - 1, remote is not None)
    run = kernel(name, variant, dtype_name(a), end_of)
    places = () if remote is None else (arriving, remote)
    reads = (before, np.float32(1 / n), np.float32(epsilon), h, weight, after, bias, *places)
    args = arguments(variant, packed, row_scales, a, row_scales, x, found.sizes(k), reads)
    return Launch(run, grid, (WARP * variant.warps,), args, found.shared, overlap=True)


def launch_normed(
    fmt: Format, weights: tuple, x: Any, norm: Any, epsilon: float, out: Any
) -> Launch:
    """out = norm(h) @ dequantize(W)^T (+ bias), of what `launch_residual` has left of the norm.

    weights : as there. x: float16 [M, K]. norm: its `after`, float32 [M, 1 + any].
    out     : float32, float16 or bfloat16 [M, N].
    ValueError for more than `MOST_TOKENS` tokens.
    """
    (m, k), n = x.shape, out.shape[1]
    found = configuration(fmt, m, n, k)
    of_bias, (packed, row_scales, bias) = bias_operand(weights)
    variant, name = found.variant, storage_format(fmt).name
    scale = product_of(name, variant, dtype_name(x)).scale
    end_of = normed_end(variant, scale, dtype_name(out), of_bias, norm.shape[1] - 1)
    run = kernel(name, variant, dtype_name(x), end_of)
    reads = (norm, np.float32(1 / k), np.float32(epsilon), bias)
    args = arguments(variant, packed, row_scales, x, row_scales, out, found.sizes(k), reads)
    return Launch(run, found.grid(m, n), (WARP * variant.warps,), args, found.shared, overlap=True)
