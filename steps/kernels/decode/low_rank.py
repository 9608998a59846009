"""A low-rank term in the product itself: y = x W^T + (x A^T) B^T of a LoRA, in one launch.

What is new
    Step 18's kernel with another end (`steps.kernels.decode.final_sum`). The thread blocks share
    the work of t = x A^T, [M, ranks], and show each other what they have:

        copies of W begin | 1/128 of t, published | product of W | all of t | + t B^T | y

    t is cut into `UNITS` = 128 units, a part of K of one rank each. A unit is one float32 a token.
    It is published in one store of 64 bits with the number of the launch beside it, so it is its
    own flag: no fence, no counter, one trip to the L2. Only the warps that have a part of a unit
    meet, at a barrier of their own; the others go on to W.
    Last sums are added to those of W, and to the bias, in float32, and are rounded once.
Why it should help
    A and B at rank 64 are 1 MB beside the 9.4 MB of a 4096 x 4096 matrix in Q4_0, 11 % of its time;
    at rank 16 3 %. A launch of its own for x A^T, and one for t B^T, take 1 us or more each where
    launches overlap: 40 % of that product. Here is left a trip to the L2 and a barrier at the end;
    what a warp does for t it does while its first weights arrive.
    On an H200 1.4 us more than the product alone at one token and rank 8, 1.3 at eight (4096 x 4096
    in Q4_0). A first form took 2.1 and 2.8: all warps met for a unit, a factor was loaded in the
    middle of it and x after A, and at its end each block waited for an atomic, to set the words
    back to zero.
What it costs
    Thread blocks wait for each other, and that needs all of them on the GPU at once, which nobody
    promises: other streams may hold SMs. So a block waits for `patience` polls, and then computes
    all of t itself, in the same order of sums: slow, but it never hangs, and the bits are the same.
    Launches that may run at once need words of their own (`WORDS`), kept from launch to launch.
Machine code
    As step 18, with LDG.E.STRONG.GPU for polls, one BAR.RED, and no atomics.
Prerequisites
    Step 18.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32, uint64

from qformats import Format
from qformats.repack import CHUNK, TILE_ROWS
from qformats.storage import storage_format
from steps.contract import Launch, Shape, ceil_div, dtype_name, shared_memory
from steps.instructions import (
    as_bits,
    as_float,
    barrier_sync,
    cp_async_16_zfill,
    cp_async_commit,
    cp_async_wait,
    load_f32,
    load_f32x4,
    load_u32x4,
    load_u64x2_relaxed,
    prefetch_l2,
    shfl_xor,
    store_f32,
    store_u64_relaxed,
)
from steps.kernels.decode.bulk import arguments, kernel
from steps.kernels.decode.final_sum import FinalSum, warp_sums
from steps.kernels.decode.tiles import (
    MOST_TOKENS,
    TileConfiguration,
    Variant,
    product_of,
    tile_configuration,
)
from steps.kernels.parts.activations.sources import four_floats, four_floats_of_bfloat16
from steps.kernels.parts.epilogue.bias import LOAD_BIAS, bias_operand
from steps.kernels.parts.epilogue.rounded import STORE

UNITS: Final = 128
"""Of t. No more than thread blocks of a large product, so that each has one at most."""

RANKS: Final = (8, 16, 32, 64)
"""Ranks that there are kernels for; A and B of others are padded with zeros."""

PATIENCE: Final = 1024
"""Polls of a word, of some 0.7 us each, before a thread block computes all of t itself."""

WARP: Final = 32
EIGHT: Final = 8  # 16-bit values of a thread at a time
SLICE: Final = WARP * EIGHT
"""K of a warp at a time."""

PAD: Final = 16
"""Bytes between two rows of B in shared memory: other banks."""

WORDS: Final = 4 + 2 * UNITS * MOST_TOKENS
"""uint32 that thread blocks show each other: the number of launches so far, and from word 4 on, of
each token and unit, its value and the number of its launch. All are zero before the first."""


# --- the end of the product -----------------------------------------------------------------------


def padded(rank: int) -> int:
    """The least of `RANKS` that holds this one. ValueError for more than the largest."""
    if not 1 <= rank <= RANKS[-1]:
        raise ValueError(f"a low-rank term has ranks from 1 to {RANKS[-1]}, not {rank}")
    return next(one for one in RANKS if one >= rank)


@dataclass(frozen=True, slots=True)
class Layout:
    """What the low-rank term has in shared memory.

    sums   : the byte of the sums of warps, while the block's units are computed
    start  : the byte of the others, when W has been multiplied, see `offsets`
    shared : bytes of a thread block
    """

    sums: int
    start: int
    shared: int


def offsets(tokens: int, warps: int, ranks: int) -> tuple[int, int, int]:
    """From `Layout.start`, where t is, to the units of a rank that a block computes for itself, to
    sums of its warps for that, and to its rows of B."""
    own = 4 * ranks * tokens
    sums = own + 4 * (UNITS // ranks) * tokens
    return own, sums, ceil_div(sums + 4 * warps * tokens, CHUNK) * CHUNK


@cache
def low_rank_end(
    variant: Variant, kind: str, scale: float, output: str, of_bias: str | None, ranks: int
) -> FinalSum:
    """The end of a product with a low-rank term: it reads (x, down, up, factors, words, (sums,
    start), patience, bias), see `launch` and `Layout`. kind: dtype of x, down and up; other
    arguments as of `final_sum`. A thread loads ahead the number of launches, a factor, and of its
    first slice A and x."""
    tokens, warps = variant.tokens, variant.warps
    threads, tile_sums, parts = WARP * warps, TILE_ROWS * tokens, UNITS // ranks
    biased, load_bias = of_bias is not None, LOAD_BIAS[of_bias or "float32"]
    of_warps = warp_sums(tokens, variant.warps_k)
    output_of, add_up, store_one = of_warps.output_of, of_warps.add_up, STORE[output]
    own_at, sums_at, up_at = offsets(tokens, warps, ranks)
    pitch, chunks = 2 * ranks + PAD, ranks // EIGHT
    together = min(tokens, EIGHT)  # tokens of a thread at a time
    # lanes that share an output where there are fewer outputs than threads, 16 bytes of B each
    lanes = max(1, min(chunks, 16 // tokens))
    lane_bits = lanes.bit_length() - 1
    first_x, n_loads = 6, 6 + 4 * together
    floats = four_floats if kind == "float16" else four_floats_of_bfloat16
    wait_for_rows = cp_async_wait(0)

    @cuda.jit(device=True, forceinline=True)
    def slices_of_unit(K):
        """Slices of 256 K of a unit."""
        slices = int32(uint32(K + SLICE - 1) // uint32(SLICE))
        return int32(uint32(slices + parts - 1) // uint32(parts))

    @cuda.jit(device=True, forceinline=True)
    def load_down(down, u, s, t):
        """A thread's eight values of slice s of a unit, as words; zeros beyond K."""
        K, part = int32(down.shape[1]), int32(u & (parts - 1))
        each = slices_of_unit(K)
        k = int32((part * each + s) * SLICE + EIGHT * (t & (WARP - 1)))
        w = uint32(0), uint32(0), uint32(0), uint32(0)
        if s < each and k < K:
            w = load_u32x4(down, int64(u // parts) * K + k)
        return w

    @cuda.jit(device=True, forceinline=True)
    def load_x(loaded, x, u, s, m0, t):
        """A thread's eight values of `together` tokens from m0 on, of slice s of a unit; the last
        token stands in for those beyond it."""
        K, part, last = int32(x.shape[1]), int32(u & (parts - 1)), int32(x.shape[0] - 1)
        each = slices_of_unit(K)
        k = int32((part * each + s) * SLICE + EIGHT * (t & (WARP - 1)))
        if s < each and k < K:
            for m in range(together):
                at, i = int64(min(int32(m0 + m), last)) * K + k, first_x + 4 * m
                w = load_u32x4(x, at)
                loaded[i], loaded[i + 1] = as_float(w[0]), as_float(w[1])
                loaded[i + 2], loaded[i + 3] = as_float(w[2]), as_float(w[3])
        else:
            for i in range(first_x, n_loads):
                loaded[i] = 0

    @cuda.jit(device=True, forceinline=True)
    def sums_of_warp(smem, sums, loaded, x, down, u, w, m0, t):
        """A warp's sum of a unit, of tokens m0 to m0 + `together`, to shared memory. w, loaded: A
        and x of its first slice."""
        acc = cuda.local.array(together, float32)
        lane, warp = int32(t & 31), int32(t >> 5)
        each = slices_of_unit(int32(x.shape[1]))
        for m in range(together):
            acc[m] = 0
        s = warp
        while s < each:
            a = floats(w[0], w[1]) + floats(w[2], w[3])
            for m in range(together):
                i = first_x + 4 * m
                low = floats(as_bits(loaded[i]), as_bits(loaded[i + 1]))
                b = low + floats(as_bits(loaded[i + 2]), as_bits(loaded[i + 3]))
                for j in range(EIGHT):
                    acc[m] += a[j] * b[j]
            s = int32(s + warps)
            if s < each:
                w = load_down(down, u, s, t)
                load_x(loaded, x, u, s, m0, t)
        for m in range(together):
            for i in range(5):
                acc[m] += shfl_xor(acc[m], 1 << i)
        if lane == 0:
            for m in range(together):
                store_f32(smem, sums + 4 * (warp * tokens + m0 + m), acc[m])

    @cuda.jit(device=True, forceinline=True)
    def meet(each):
        """The warps with a part of a unit."""
        if each > 1:
            barrier_sync(1, WARP * min(each, int32(warps)))
        else:
            cuda.syncwarp()

    @cuda.jit(device=True, forceinline=True)
    def unit(smem, sums, loaded, x, down, factor, u, w, t):
        """The warps below `slices_of_unit`: a unit of t, of token t, in threads 0 to M - 1. w,
        loaded: as of `sums_of_warp`."""
        each, i, total = slices_of_unit(int32(x.shape[1])), int32(0), float32(0)
        sums_of_warp(smem, sums, loaded, x, down, u, w, int32(0), t)
        if tokens > together:
            w = load_down(down, u, int32(t >> 5), t)
            load_x(loaded, x, u, int32(t >> 5), int32(together), t)
            sums_of_warp(smem, sums, loaded, x, down, u, w, int32(together), t)
        meet(each)
        if t < int32(x.shape[0]):
            while i < min(each, int32(warps)):
                total += load_f32(smem, sums + 4 * (i * tokens + t))
                i = int32(i + 1)
        meet(each)
        return total * factor

    @cuda.jit(device=True, forceinline=True)
    def put_ranks(smem, at, low, high, lane):
        """A warp adds up the parts of each rank of a token, four units a lane, two in each of low
        and high, to t from byte `at` on."""
        a, b = as_float(uint32(low[0])) + as_float(uint32(low[1])), float32(0)
        b = as_float(uint32(high[0])) + as_float(uint32(high[1]))
        if parts == 2:
            store_f32(smem, at + 8 * lane, a)
            store_f32(smem, at + 8 * lane + 4, b)
        else:
            a = a + b
            if parts > 4:
                a += shfl_xor(a, 1)
            if parts > 8:
                a += shfl_xor(a, 2)
            if lane & (parts // 4 - 1) == 0:
                store_f32(smem, at + 4 * (lane // (parts // 4)), a)

    @cuda.jit(device=True, forceinline=True)
    def are_of(number, low, high):
        """Whether these units are of the launch with this number."""
        first = uint32(low[0] >> uint64(32)) == number and uint32(low[1] >> uint64(32)) == number
        return (
            first
            and uint32(high[0] >> uint64(32)) == number
            and uint32(high[1] >> uint64(32)) == number
        )

    @cuda.jit(device=True, forceinline=True)
    def collect(smem, start, words, number, patience, here, t):
        """All units to t; a warp takes a token. 1 where one of a thread's did not come in time."""
        lane, m, missing = int32(t & 31), int32(warps - 1 - (t >> 5)), int32(0)
        while m < here:
            at, polls = int32(4 + 2 * (m * UNITS + 4 * lane)), int32(0)
            low, high = load_u64x2_relaxed(words, at), load_u64x2_relaxed(words, at + 4)
            while not are_of(number, low, high) and polls < patience:
                low, high = load_u64x2_relaxed(words, at), load_u64x2_relaxed(words, at + 4)
                polls = int32(polls + 1)
            missing = missing if are_of(number, low, high) else int32(1)
            put_ranks(smem, start + 4 * ranks * m, low, high, lane)
            m = int32(m + warps)
        return missing

    @cuda.jit(device=True, forceinline=True)
    def compute_alone(smem, start, x, down, factors, here, t):
        """All units to t, by this block, in the order of sums of `put_ranks`."""
        loaded = cuda.local.array(n_loads, float32)
        sums, own, u = int32(start + sums_at), int32(start + own_at + 4 * parts * t), int32(0)
        warp = int32(t >> 5)
        while u < UNITS and warp < slices_of_unit(int32(x.shape[1])):
            w = load_down(down, u, warp, t)
            load_x(loaded, x, u, warp, int32(0), t)
            factor, part = load_f32(factors, u // parts), int32(u & (parts - 1))
            value = unit(smem, sums, loaded, x, down, factor, u, w, t)
            if t < here:
                store_f32(smem, own + 4 * part, value)
                if part == parts - 1:
                    step = int32(1)
                    while step < parts:
                        i = int32(0)
                        while i < parts:
                            to, other = int32(own + 4 * i), int32(own + 4 * (i + step))
                            store_f32(smem, to, load_f32(smem, to) + load_f32(smem, other))
                            i = int32(i + 2 * step)
                        step = int32(2 * step)
                    at = int32(start + 4 * (ranks * t + u // parts))
                    store_f32(smem, at, load_f32(smem, own))
            u = int32(u + 1)
        cuda.syncthreads()

    @cuda.jit(device=True, forceinline=True)
    def load_ahead(loaded, c, _, reads, m0, first, end, t):
        x, down, up, factors, words, _, _, _ = reads
        u, warp = int32(cuda.blockIdx.x), int32(t >> 5)
        if u < UNITS:
            w = load_down(down, u, warp, t)
            load_x(loaded, x, u, warp, int32(0), t)
            loaded[0], loaded[1] = as_float(w[0]), as_float(w[1])
            loaded[2], loaded[3] = as_float(w[2]), as_float(w[3])
            loaded[4] = load_f32(factors, u // parts)
        launches = load_u64x2_relaxed(words, 0)
        loaded[5] = as_float(uint32(launches[0]))
        if t == 0:  # the block's rows of B to the L2
            n0, N = int32(first * TILE_ROWS), int32(c.shape[1])
            rows = int32(min(int32(end * TILE_ROWS), N) - n0)
            prefetch_l2(up, int64(n0) * ranks, rows * (2 * ranks))

    @cuda.jit(device=True, forceinline=True)
    def prologue(loaded, reads, t):
        """Publishes the block's units: one, or every so many-th where there are fewer blocks. The
        number of the launch."""
        x, down, _, factors, words, places, _, _ = reads
        smem, number = cuda.shared.array(0, uint8, alignment=128), uint32(as_bits(loaded[5]) + 1)
        u, blocks, warp = int32(cuda.blockIdx.x), int32(cuda.gridDim.x), int32(t >> 5)
        if warp < slices_of_unit(int32(x.shape[1])):
            w = as_bits(loaded[0]), as_bits(loaded[1]), as_bits(loaded[2]), as_bits(loaded[3])
            factor = loaded[4]
            while u < UNITS:
                value = unit(smem, places[0], loaded, x, down, factor, u, w, t)
                if t < int32(x.shape[0]):
                    pair = uint64(number) << uint64(32) | uint64(as_bits(value))
                    store_u64_relaxed(words, 4 + 2 * (t * UNITS + u), pair)
                u = int32(u + blocks)
                if u < UNITS:
                    w = load_down(down, u, warp, t)
                    load_x(loaded, x, u, warp, int32(0), t)
                    factor = load_f32(factors, u // parts)
        return number

    @cuda.jit(device=True, forceinline=True)
    def copy_rows(smem, at, up, first, end, N, t):
        """Issues copies of the block's rows of B to byte `at`."""
        i = t
        while i < int32(end - first) * (TILE_ROWS * chunks):
            row, chunk = int32(uint32(i) // uint32(chunks)), int32(i & (chunks - 1))
            n = int32(first * TILE_ROWS + row)
            size = uint32(16) if n < N else uint32(0)
            to = int32(at + row * pitch + 16 * chunk)
            cp_async_16_zfill(smem, to, up, int64(n) * ranks + EIGHT * chunk, size)
            i = int32(i + threads)
        cp_async_commit()

    @cuda.jit(device=True, forceinline=True)
    def low_rank(smem, start, token, feature, lane):
        """A lane's share of t B^T for an output."""
        total = float32(0)
        for q in range(chunks // lanes):
            chunk = int32(lane + q * lanes)
            w = load_u32x4(smem, start + up_at + feature * pitch + 16 * chunk)
            b = floats(w[0], w[1]) + floats(w[2], w[3])
            at = int32(start + 4 * (token * ranks + EIGHT * chunk))
            x = load_f32x4(smem, at) + load_f32x4(smem, at + 16)
            for i in range(EIGHT):
                total += x[i] * b[i]
        return total

    @cuda.jit(device=True, forceinline=True)
    def write(smem, sums, row_scales_at, c, _, reads, own, m0, here, first, end, t):
        x, down, up, factors, words, places, patience, bias = reads
        _, start = places
        N = int32(c.shape[1])
        copy_rows(smem, int32(start + up_at), up, first, end, N, t)
        missing = collect(smem, start, words, own, patience, here, t)
        wait_for_rows()
        if cuda.syncthreads_or(missing):
            compute_alone(smem, start, x, down, factors, here, t)
        # all have read it; a block that reads it later takes the slow way, and so do those behind
        if t == 0 and cuda.blockIdx.x == cuda.gridDim.x - 1:
            store_u64_relaxed(words, 0, uint64(own))
        lane, i, stop = int32(t & (lanes - 1)), int32(t // lanes), int32(end - first) * tile_sums
        while i < stop:
            token, feature = output_of(i)
            total = add_up(smem, sums, i)
            total *= load_f32(smem, row_scales_at + 4 * feature) * float32(scale)
            term = low_rank(smem, start, min(token, int32(here - 1)), feature, lane)
            for bit in range(lane_bits):
                term += shfl_xor(term, 1 << bit)
            n = int32(first * TILE_ROWS + feature)
            if token < here and n < N and lane == 0:
                if biased:
                    total += load_bias(bias, n)
                total += term
                store_one(c, int64(m0 + token) * N + n, total)
            i = int32(i + threads // lanes)

    return FinalSum(of_warps.store, n_loads, load_ahead, prologue, write)


def configuration(
    fmt: Format, shape: Shape, ranks: int, kind: str
) -> tuple[TileConfiguration, Layout]:
    """That of step 18 in family A16 for x of this dtype, and where the low-rank term has its own.
    ValueError for more than `MOST_TOKENS` tokens or too little shared memory."""
    if shape.m > MOST_TOKENS:
        raise ValueError(f"a low-rank term is added for up to {MOST_TOKENS} tokens, not {shape.m}")
    found = tile_configuration(storage_format(fmt), shape, "A16", False, True, kind)
    variant = found.variant
    own = offsets(variant.tokens, variant.warps, ranks)[-1] + TILE_ROWS * found.row_tiles * (
        2 * ranks + PAD
    )
    if found.sums_at:  # the ring, free at the end, and the sums, which nobody has stored at first
        layout, room = Layout(found.sums_at, 0, found.shared), variant.bars_at
    else:  # the ring has the sums
        sums = ceil_div(found.row_scales_at + 4 * TILE_ROWS * found.row_tiles, 128) * 128
        start = sums + 4 * variant.warps * variant.tokens
        layout, room = Layout(sums, start, max(found.shared, start + own)), shared_memory() - start
    if own > room:
        raise ValueError(
            f"a low-rank term of M={shape.m} N={shape.n} K={shape.k} and {ranks} ranks needs {own} "
            f"bytes of shared memory, and there are {max(room, 0)}"
        )
    return found, layout


def launch(
    fmt: Format, weights: tuple, x: Any, down: Any, up: Any, factors: Any, words: Any, out: Any,
    invariant: bool = False, patience: int = PATIENCE,
) -> Launch:  # fmt: skip
    """out = x @ dequantize(W)^T (+ bias) + (factors * (x @ down^T)) @ up^T.

    weights : packed by `qformats.repack.tiles`, and perhaps a bias [N].
    x       : float16 or bfloat16 [M, K], at a multiple of 16 bytes.
    down, up: A [ranks, K] and B [N, ranks], in the dtype of x, likewise; ranks is one of `RANKS`.
    factors : float32 [ranks], by which t is multiplied.
    words   : uint32 [`WORDS`], at a multiple of 16 bytes: zero before the first of the launches
              that use them one after the other.
    out     : float32, float16 or bfloat16 [M, N].
    ValueError as of `configuration`, and for other ranks.
    """
    (m, k), (n, ranks) = x.shape, up.shape
    if ranks not in RANKS:
        raise ValueError(f"a low-rank term has {', '.join(map(str, RANKS))} ranks, not {ranks}")
    kind = dtype_name(x)
    found, layout = configuration(fmt, Shape(m, n, k, invariant), ranks, kind)
    of_bias, (packed, row_scales, bias) = bias_operand(weights)
    variant, name = found.variant, storage_format(fmt).name
    scale = product_of(name, variant, kind).scale
    end_of = low_rank_end(variant, kind, scale, dtype_name(out), of_bias, ranks)
    places = np.int32(layout.sums), np.int32(layout.start)
    reads = (x, down, up, factors, words, places, np.int32(patience), bias)
    args = arguments(variant, packed, row_scales, x, row_scales, out, found.sizes(k), reads)
    run = kernel(name, variant, kind, end_of)
    return Launch(run, found.grid(m, n), (WARP * variant.warps,), args, layout.shared, overlap=True)
