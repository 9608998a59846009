"""A low-rank term in the product itself: y = x W^T + (x A^T) B^T of a LoRA, in one launch.

What is new
    Step 18's kernel with another end (`steps.kernels.decode.final_sum`). The thread blocks share
    the work of t = x A^T, [M, ranks], and show each other what they have:

        copies of W begin | 1/128 of t, published | product of W | all of t | + t B^T | y

    t is cut into `UNITS` = 128 units, a part of K of one rank each. A unit is one float32 a token.
    It is published as a word that is zero until then, so its value is its own flag: no fence, no
    counter, one trip to the L2. A sum that is +0 is published as -0.
    A block's rows of B arrive while it multiplies W, by `cp.async`. Its last sums are added to
    those of W, and to the bias, in float32, and are rounded once.
Why it should help
    A and B at rank 64 are 1 MB beside the 9.4 MB of a 4096 x 4096 matrix in Q4_0, 11 % of its time;
    at rank 16 3 %. A launch of its own for x A^T, and one for t B^T, take 1 us or more each where
    launches overlap: 40 % of that product. Here is left a trip to the L2 and a barrier at the end,
    some 0.4 us; what a block does for t it does while its first weights arrive.
What it costs
    Thread blocks wait for each other, and that needs all of them on the GPU at once, which nobody
    promises: other streams may hold SMs. So a block waits for `patience` polls, and then computes
    all of t itself, in the same order of sums: slow, but it never hangs, and the bits are the same.
    The words must be zero before the launch. The last block to have read them sets them back.
Machine code
    As step 18, with LDG.E.128.STRONG.GPU for polls, one BAR.RED and one ATOMG.
Prerequisites
    Step 18.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint16, uint32

from qformats import Format
from qformats.repack import CHUNK, TILE_ROWS
from qformats.storage import storage_format
from steps.contract import Launch, Machine, Shape, ceil_div, dtype_name, shared_memory
from steps.instructions import (
    as_bits,
    as_float,
    cp_async_16_zfill,
    cp_async_commit,
    cp_async_wait,
    float_to_half,
    floats_to_bfloats,
    load_f32,
    load_f32x4,
    load_u32x4,
    prefetch_l2,
    shfl,
    shfl_xor,
    store_f32,
    store_u16,
    store_u32,
    store_u32x4,
)
from steps.instructions.define import GLOBAL, ptx
from steps.kernels.decode.bulk import kernel
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
from steps.simulator.scheduler import now

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

MINUS_ZERO: Final = 0x80000000


# --- words that thread blocks show each other (PTX ISA 9.7.9, relaxed loads and stores) -----------
#
# A relaxed store goes to the L2, and a relaxed load reads there, past the L1. Neither says
# anything about other memory. In the simulator a relaxed load lets all other threads run first.


@ptx(
    "ld.relaxed.gpu.global.v4.u32 {$0, $1, $2, $3}, [$4];",
    returns=(uint32, uint32, uint32, uint32),
    takes=(GLOBAL,),
    scope="lane",
    memory=True,
)
def load_u32x4_relaxed(lane, array, index):
    """Four words at array[index], each as it is in the L2 now. LDG.E.128.STRONG.GPU."""
    at = array.locate(index, 16)
    now().pause()
    return struct.unpack_from("<4I", array.bytes, at)


@ptx("st.relaxed.gpu.global.u32 [$0], $1;", takes=(GLOBAL, uint32), scope="lane", memory=True)
def store_u32_relaxed(lane, array, index, value):
    """A word to array[index], for relaxed loads of other thread blocks. STG.E.STRONG.GPU."""
    array.exchange(index, lambda _: value)


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
    how: Variant, kind: str, scale: float, output: str, of_bias: str | None, ranks: int
) -> FinalSum:
    """The end of a product with a low-rank term: it reads (x, down, up, factors, words, (sums,
    start), patience, bias), see `launch` and `Layout`. kind: dtype of x, down and up; other
    arguments as of `final_sum`."""
    tokens, warps = how.tokens, how.warps
    threads, tile_sums, parts = WARP * warps, TILE_ROWS * tokens, UNITS // ranks
    biased, load_bias = of_bias is not None, LOAD_BIAS[of_bias or "float32"]
    in_half, in_bfloat = output == "float16", output == "bfloat16"
    of_warps = warp_sums(tokens, how.warps_k)
    token_and_feature, add_up = of_warps.token_and_feature, of_warps.add_up
    own_at, sums_at, up_at = offsets(tokens, warps, ranks)
    pitch, chunks = 2 * ranks + PAD, ranks // EIGHT
    together = min(tokens, EIGHT)  # tokens of a thread at a time
    # lanes that share an output where there are fewer outputs than threads, 16 bytes of B each
    lanes = max(1, min(chunks, 16 // tokens))
    lane_bits = lanes.bit_length() - 1
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
    def sums_of_warp(smem, sums, x, down, u, w, m0, t):
        """A warp's sum of a unit, of tokens m0 to m0 + `together`, to shared memory. w: `load_down`
        of its first slice."""
        acc = cuda.local.array(together, float32)
        K, lane, warp = int32(x.shape[1]), int32(t & 31), int32(t >> 5)
        each, part, last = slices_of_unit(K), int32(u & (parts - 1)), int32(x.shape[0] - 1)
        for m in range(together):
            acc[m] = 0
        s = warp
        while s < each:
            k = int32((part * each + s) * SLICE + EIGHT * lane)
            if k < K:
                a = floats(w[0], w[1]) + floats(w[2], w[3])
                for m in range(together):
                    x0, x1, x2, x3 = load_u32x4(x, int64(min(int32(m0 + m), last)) * K + k)
                    b = floats(x0, x1) + floats(x2, x3)
                    for i in range(EIGHT):
                        acc[m] += a[i] * b[i]
            s = int32(s + warps)
            w = load_down(down, u, s, t)
        if warp < each:
            for m in range(together):
                for i in range(5):
                    acc[m] += shfl_xor(acc[m], 1 << i)
            if lane == 0:
                for m in range(together):
                    store_f32(smem, sums + 4 * (warp * tokens + m0 + m), acc[m])

    @cuda.jit(device=True, forceinline=True)
    def unit(smem, sums, x, down, factors, u, w, t):
        """All threads of a block: the word of a unit, of token t, in threads 0 to M - 1. It is
        never zero. w: as of `sums_of_warp`."""
        sums_of_warp(smem, sums, x, down, u, w, int32(0), t)
        if tokens > together:
            sums_of_warp(smem, sums, x, down, u, w, int32(together), t)
        cuda.syncthreads()
        total = float32(0)
        if t < int32(x.shape[0]):
            i, each = int32(0), slices_of_unit(int32(x.shape[1]))
            while i < min(each, int32(warps)):
                total += load_f32(smem, sums + 4 * (i * tokens + t))
                i = int32(i + 1)
        cuda.syncthreads()
        bits = as_bits(total * load_f32(factors, u // parts))
        return bits if bits != 0 else uint32(MINUS_ZERO)

    @cuda.jit(device=True, forceinline=True)
    def put_ranks(smem, at, w, lane):
        """A warp adds up the parts of each rank of a token, four units a lane, to t from byte `at`
        on."""
        a, b = as_float(w[0]) + as_float(w[1]), as_float(w[2]) + as_float(w[3])
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
    def is_there(w):
        return w[0] != 0 and w[1] != 0 and w[2] != 0 and w[3] != 0

    @cuda.jit(device=True, forceinline=True)
    def collect(smem, start, words, patience, here, t):
        """All units to t; a warp takes a token. 1 where one of a thread's did not come in time."""
        lane, m, missing = int32(t & 31), int32(warps - 1 - (t >> 5)), int32(0)
        while m < here:
            at, polls = int32(m * UNITS + 4 * lane), int32(0)
            w = load_u32x4_relaxed(words, at)
            while not is_there(w) and polls < patience:
                w, polls = load_u32x4_relaxed(words, at), int32(polls + 1)
            missing = missing if is_there(w) else int32(1)
            put_ranks(smem, start + 4 * ranks * m, w, lane)
            m = int32(m + warps)
        return missing

    @cuda.jit(device=True, forceinline=True)
    def compute_alone(smem, start, x, down, factors, here, t):
        """All units to t, by this block, in the order of sums of `put_ranks`."""
        sums, own, u = int32(start + sums_at), int32(start + own_at + 4 * parts * t), int32(0)
        while u < UNITS:
            word = unit(smem, sums, x, down, factors, u, load_down(down, u, int32(t >> 5), t), t)
            part = int32(u & (parts - 1))
            if t < here:
                store_u32(smem, own + 4 * part, word)
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
        """The thread's first values of A. Then the block's rows of B to the L2."""
        _, down, up, _, _, _, _, _ = reads
        w = load_down(down, int32(cuda.blockIdx.x), int32(t >> 5), t)
        loaded[0], loaded[1], loaded[2], loaded[3] = (
            as_float(w[0]), as_float(w[1]), as_float(w[2]), as_float(w[3]),
        )  # fmt: skip
        if t == 0:
            n0, N = int32(first * TILE_ROWS), int32(c.shape[1])
            rows = int32(min(int32(end * TILE_ROWS), N) - n0)
            prefetch_l2(up, int64(n0) * ranks, rows * (2 * ranks))

    @cuda.jit(device=True, forceinline=True)
    def prologue(loaded, reads, t):
        """Publishes the block's units: one, or every so many-th where there are fewer blocks."""
        x, down, _, factors, words, places, _, _ = reads
        smem = cuda.shared.array(0, uint8, alignment=128)
        u, blocks = int32(cuda.blockIdx.x), int32(cuda.gridDim.x)
        w = as_bits(loaded[0]), as_bits(loaded[1]), as_bits(loaded[2]), as_bits(loaded[3])
        while u < UNITS:
            word = unit(smem, places[0], x, down, factors, u, w, t)
            if t < int32(x.shape[0]):
                store_u32_relaxed(words, t * UNITS + u, word)
            u = int32(u + blocks)
            if u < UNITS:
                w = load_down(down, u, int32(t >> 5), t)
        return int32(0)

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
        N, before = int32(c.shape[1]), int32(0)
        copy_rows(smem, int32(start + up_at), up, first, end, N, t)
        missing = collect(smem, start, words, patience, here, t)
        wait_for_rows()
        if cuda.syncthreads_or(missing):
            compute_alone(smem, start, x, down, factors, here, t)
        if t == 0:
            before = int32(cuda.atomic.add(words, UNITS * here, uint32(1)))
        lane, i, stop = int32(t & (lanes - 1)), int32(t // lanes), int32(end - first) * tile_sums
        while i < stop:
            token, feature = token_and_feature(i & (tile_sums - 1))
            feature = int32(uint32(i) // uint32(tile_sums) * uint32(TILE_ROWS) + uint32(feature))
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
                at = int64(m0 + token) * N + n
                if in_half:
                    store_u16(c, at, float_to_half(total))
                elif in_bfloat:
                    store_u16(c, at, uint16(floats_to_bfloats(total, total)))
                else:
                    store_f32(c, at, total)
            i = int32(i + threads // lanes)
        if t < WARP and shfl(before, 0) == int32(cuda.gridDim.x) - 1:  # all have read the words
            zero, m = uint32(0), int32(0)
            while m < here:
                store_u32x4(words, m * UNITS + 4 * t, zero, zero, zero, zero)
                m = int32(m + 1)
            if t == 0:
                store_u32(words, UNITS * here, zero)

    return FinalSum(of_warps.store, 4, load_ahead, prologue, write)


def configuration(fmt: Format, shape: Shape, ranks: int) -> tuple[TileConfiguration, Layout]:
    """That of step 18 in family A16, and where the low-rank term has its own. ValueError for more
    than `MOST_TOKENS` tokens or too little shared memory."""
    if shape.m > MOST_TOKENS:
        raise ValueError(f"a low-rank term is added for up to {MOST_TOKENS} tokens, not {shape.m}")
    found = tile_configuration(storage_format(fmt), shape, "A16", False)
    how = found.variant
    own = offsets(how.tokens, how.warps, ranks)[-1] + TILE_ROWS * found.row_tiles * (
        2 * ranks + PAD
    )
    if found.sums_at:  # the ring, free at the end, and the sums, which nobody has stored at first
        layout, room = Layout(found.sums_at, 0, found.shared), how.bars_at
    else:  # the ring has the sums
        sums = ceil_div(found.row_scales_at + 4 * TILE_ROWS * found.row_tiles, 128) * 128
        start = sums + 4 * how.warps * how.tokens
        layout, room = Layout(sums, start, max(found.shared, start + own)), shared_memory() - start
    if own > room:
        raise ValueError(
            f"a low-rank term of M={shape.m} N={shape.n} K={shape.k} and {ranks} ranks needs {own} "
            f"bytes of shared memory, and there are {max(room, 0)}"
        )
    return found, layout


def launch(
    fmt: Format, weights: tuple, x: Any, down: Any, up: Any, factors: Any, out: Any, *,
    machine: Machine, invariant: bool = False, patience: int = PATIENCE,
) -> Launch:  # fmt: skip
    """out = x @ dequantize(W)^T (+ bias) + (factors * (x @ down^T)) @ up^T.

    weights : packed by `qformats.repack.tiles`, and perhaps a bias [N].
    x       : float16 or bfloat16 [M, K], at a multiple of 16 bytes.
    down, up: A [ranks, K] and B [N, ranks], in the dtype of x, likewise; ranks is one of `RANKS`.
    factors : float32 [ranks], by which t is multiplied.
    out     : float32, float16 or bfloat16 [M, N].
    machine : has the words that thread blocks show each other.
    ValueError as of `configuration`, and for other ranks.
    """
    (m, k), (n, ranks) = x.shape, up.shape
    if ranks not in RANKS:
        raise ValueError(f"a low-rank term has {', '.join(map(str, RANKS))} ranks, not {ranks}")
    found, layout = configuration(fmt, Shape(m, n, k, invariant), ranks)
    of_bias, (packed, row_scales, bias) = bias_operand(weights)
    how, name, kind = found.variant, storage_format(fmt).name, dtype_name(x)
    words = machine.array(np.zeros(UNITS * m + 1, np.uint32))
    scale = product_of(name, how, kind).scale
    end_of = low_rank_end(how, kind, scale, dtype_name(out), of_bias, ranks)
    places = np.int32(layout.sums), np.int32(layout.start)
    reads = (x, down, up, factors, words, places, np.int32(patience), bias)
    args = (packed, row_scales, x, row_scales, out, found.sizes(k), reads)
    run = kernel(name, how, kind, end_of)
    return Launch(run, found.grid(m, n), (WARP * how.warps,), args, layout.shared, overlap=True)
