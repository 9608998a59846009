"""Step 14: decode in W4A16 - a few tokens in one launch, and nothing but weights on the way.

What is new
    Step 10 once more, with what steps 11 and 12 have brought. Weights become float16 with their
    scale in them, so a warp adds up all of its K in the tensor core: no promotion, no sums of
    activations, the same lines for formats with minima and without. Bulk copies bring the weights:
    one lane asks for the records of two row tiles at once, and an mbarrier says that they are
    there. Each warp rounds the part of A that it multiplies, so that of A only the largest value of
    a token is everybody's business, which is one barrier.

         warp 0    warp 1    warp 2    ...       a warp has the same part of K in all row tiles of
       |---------|---------|---------|--         its thread block; in a pair of them one record of
       | pair 0  | pair 0  | pair 0  |           128 K after the other, those of both side by side.
    N  | pair 1  | pair 1  | pair 1  |           Its tokens stay where they are, and its sums in
       | pair 2  | pair 2  | pair 2  |           registers until a pair of row tiles is done.
       |---------|---------|---------|--
                      K -->
Why it should help
    At M = 1 step 10 spends 1.1 of 12 us on A, and more on asking: 32 lanes issue three copies for a
    record, where one bulk copy brings two records. 33 MB of Q4_0 at 4.1 TB/s take 8.1 us; with what
    it takes until the first weights are there, and the end: 10.4, in a chain 8.9.
What it costs
    Hopper or later. A lies in shared memory for all of K, so that few tokens fit; more are cut into
    groups, and each group reads the weights again. Longer K than fits is step 12's.
Machine code
    UBLKCP before the first LDG of A, HMMA and HFMA2, and no BAR.SYNC in the loop.
Read next
    How each step was predicted, measured and mended: results/worklog.md
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from numba import cuda, float32, int32, int64, uint8, uint32

from qformats import Format
from qformats.device import (
    LEAST_EXPONENT,
    half_format,
    load_four,
    record_number,
    rows_are_aligned,
    size_bits,
)
from qformats.repack import TILE_K, TILE_ROWS, tiles
from steps import step12_w4a16_wgmma as step12
from steps.activations import float16_units, halves_made_inside
from steps.instructions import (
    as_float,
    bulk_copy,
    fence_mbarrier_init,
    floats_to_halves,
    let_next_start,
    load_f32,
    load_f32x4,
    load_u32x4,
    mbarrier_arrive_expect,
    mbarrier_init,
    mbarrier_wait,
    mma_m16n8k16_f16,
    shfl,
    shfl_xor,
    store_f32,
    store_u32,
    store_u32x2,
    wait_for_previous,
)
from steps.machines import multiprocessors, shared_memory
from steps.step import Activations, Family, Launch, Machine, Shape, Step, ceil_div

MOST_TOKENS: Final = 8  # of a thread block: the columns of an mma
MOST_K: Final = 56 * 1024  # of which one token fits beside a ring of one stage, in every format
WARPS: Final = 16  # of a thread block: 128 registers a thread
PAIR: Final = 2  # row tiles whose records one copy brings
STAGES: Final = 8  # of a warp's ring, at most
EARLY: Final = 2  # of them asked for before A, which would wait in line behind more
SHARED: Final = 164 * 1024  # bytes of a thread block that are enough
ALONE: Final = 116 * 1024  # bytes with which it has an SM to itself: of two, each gets half
SUMS: Final = 32 * 1024  # bytes for the sums of warps at most; blocks with less rows come in waves
HELD: Final = 14  # 128-bit loads of A of a lane under way at once, kept until they can be rounded
PIECE: Final = 2 * TILE_K  # bytes of a token in 128 K
ZEROS: Final = 256  # bytes of a token that there is not


def places(fmt: Format, stages: int) -> tuple[int, int, int, int]:
    """Where in shared memory, behind the rings, these begin: mbarriers, the largest value of each
    token, zeros, A."""
    bars = WARPS * stages * PAIR * half_format(fmt.name).record_bytes
    largest = bars + 8 * WARPS * stages
    zeros = ceil_div(largest + 4 * MOST_TOKENS, 128) * 128
    return bars, largest, zeros, zeros + ZEROS


@cache
def kernel(fmt: Format, tokens: int, stages: int, early: int, held: int) -> Any:
    """The kernel for groups of `tokens` and rings of `stages`, of which `early` are asked for
    before A; of that a lane holds `held` times four values."""
    form = half_format(fmt.name)
    record, words, scales = form.record_bytes, form.words, form.scales
    multipliers, fragments = form.multipliers, form.fragments
    slot_bytes = PAIR * record
    at_bars, at_largest, at_zeros, at_a = places(fmt, stages)
    first_largest, together, n_acc = at_largest // 4, held // tokens, 4 * PAIR

    @cuda.jit(device=True, forceinline=True)
    def ask(smem, ring, bar, lane, w, row, k, rows, part, in_row):
        """Ask for record k of the row tiles `row`, row + 1 as far as they are among the `rows`, if
        any are left; which ones are next?"""
        if row < rows[1] and lane == 0:
            low, high = int32(max(row, rows[0])), int32(min(row + PAIR, rows[1]))
            size = int32((high - low) * record)
            mbarrier_arrive_expect(smem, bar, size)
            at = int64(record_number(low, k, in_row)) * record
            bulk_copy(smem, ring + (low - row) * record, w, at, size, smem, bar)
        k = int32(k + 1)
        if k == part[1]:
            return int32(row + PAIR), part[0]
        return row, k

    @cuda.jit(device=True, forceinline=True)
    def fetch(x, a, first_m, first_k, wide):
        """Ask for a lane's first values of A. Outside of A it is another place's: a load behind a
        branch of its own would wait for those before."""
        M, K = int32(a.shape[0]), int32(a.shape[1])
        for i in range(held):
            m, k = first_m + i % tokens, first_k + i // tokens * TILE_K
            at = int64(min(m, M - 1)) * K + min(k, K - 4)
            if wide:
                x[i, 0], x[i, 1], x[i, 2], x[i, 3] = load_f32x4(a, at)
            else:
                for j in range(4):
                    x[i, j] = load_f32(a, at + j)

    @cuda.jit(device=True, forceinline=True)
    def largest_bits(x, i, most):
        for j in range(4):
            most = max(most, size_bits(x[i, j]))
        return most

    @cuda.jit(device=True, forceinline=True)
    def round_four(smem, at, x, i, exponent):
        """As `qformats.device.half_rounder` does, and in its order: what 16 K take of lane t."""
        scale = as_float(uint32(268 - exponent) << uint32(23))
        even = floats_to_halves(x[i, 0] * scale, x[i, 2] * scale)
        odd = floats_to_halves(x[i, 1] * scale, x[i, 3] * scale)
        store_u32x2(smem, at, even, odd)

    @cuda.jit(device=True, forceinline=True)
    def exponent_of(largest, token):
        return max(int32(largest[first_largest + token] >> 23), LEAST_EXPONENT)

    @cuda.jit(device=True, forceinline=True)
    def multiply(acc, r, smem, at, half, lane, b, c):
        """acc[r ...] += 64 K of the record at byte `at`, as step 11 makes float16 of it; b and c:
        B for two steps of 16 K each."""
        w, s = words(smem, at, lane, half), scales(smem, at, lane, half)
        even, odd = multipliers(s, 0), multipliers(s, 1)
        v0, v1, v2, v3 = acc[r], acc[r + 1], acc[r + 2], acc[r + 3]
        a0, a1, a2, a3 = fragments(w, 0, even)
        v0, v1, v2, v3 = mma_m16n8k16_f16(a0, a1, a2, a3, b[0], b[1], v0, v1, v2, v3)
        a0, a1, a2, a3 = fragments(w, 1, even)
        v0, v1, v2, v3 = mma_m16n8k16_f16(a0, a1, a2, a3, b[2], b[3], v0, v1, v2, v3)
        a0, a1, a2, a3 = fragments(w, 2, odd)
        v0, v1, v2, v3 = mma_m16n8k16_f16(a0, a1, a2, a3, c[0], c[1], v0, v1, v2, v3)
        a0, a1, a2, a3 = fragments(w, 3, odd)
        v0, v1, v2, v3 = mma_m16n8k16_f16(a0, a1, a2, a3, c[2], c[3], v0, v1, v2, v3)
        acc[r], acc[r + 1], acc[r + 2], acc[r + 3] = v0, v1, v2, v3

    @cuda.jit(launch_bounds=(32 * WARPS, 1))
    def w4a16_decode(w, of_rows, a, c, in_row, each, tall):
        """c[M, N] = a @ dequantize(w)[N, K]^T; w of qformats.repack.tiles, a: float32.

        A thread block has `tall` row tiles, a warp `each` of the `in_row` records along K.
        """
        smem = cuda.shared.array(0, uint8, alignment=128)
        largest = cuda.shared.array(0, int32, alignment=128)  # the same memory
        x, y = cuda.local.array((held, 4), float32), cuda.local.array((1, 4), float32)
        most, acc = cuda.local.array(tokens, int32), cuda.local.array(n_acc, float32)
        let_next_start()
        t = int32(cuda.threadIdx.x)
        warp, lane = shfl(int32(t >> 5), 0), int32(t & 31)
        group, quad = int32(lane >> 2), int32(lane & 3)
        M, N, K = int32(c.shape[0]), int32(c.shape[1]), int32(a.shape[1])

        # --- this warp's share: of K, and of the row tiles
        in_row, each, tall = int32(in_row), int32(each), int32(tall)
        part = int32(min(warp * each, in_row)), int32(min(warp * each + each, in_row))
        first, deep = int32(cuda.blockIdx.x * tall), int32(part[1] - part[0])
        rows = first, int32(min(first + tall, (N + TILE_ROWS - 1) // TILE_ROWS))
        begin = int32(first & -PAIR if deep > 0 else rows[1])

        # --- weights, the first: they wait for no launch before this one
        ring, bars = int32(warp * (stages * slot_bytes)), int32(at_bars + 8 * stages * warp)
        row, k = begin, part[0]
        if lane == 0:
            for s in range(stages):
                mbarrier_init(smem, bars + 8 * s, 1)
            fence_mbarrier_init()
        for s in range(early):
            to, bar = ring + s * slot_bytes, bars + 8 * s
            row, k = ask(smem, to, bar, lane, w, row, k, rows, part, in_row)
        if t < MOST_TOKENS:
            largest[first_largest + t] = 0
        if t < ZEROS // 4:
            store_u32(smem, at_zeros + 4 * t, uint32(0))
        cuda.syncthreads()
        wait_for_previous()

        # --- A: float32 -> registers, 4 values of a token and 128 K a lane; meanwhile more weights
        first_m, first_k = int32(cuda.blockIdx.y * tokens), int32(part[0] * TILE_K + 4 * lane)
        wide = rows_are_aligned(a)
        fetch(x, a, first_m, first_k, wide)
        for s in range(early, stages):
            to, bar = ring + s * slot_bytes, bars + 8 * s
            row, k = ask(smem, to, bar, lane, w, row, k, rows, part, in_row)
        for i in range(held):
            inside = first_m + i % tokens < M and first_k + i // tokens * TILE_K < K
            if i // tokens >= deep or not inside:
                for j in range(4):
                    x[i, j] = 0

        # --- the largest of each token; what was not held is read again, from the caches
        for token in range(tokens):
            most[token] = 0
        for i in range(held):
            most[i % tokens] = largest_bits(x, i, most[i % tokens])
        for i in range(together, deep):
            for token in range(tokens):
                load_four(y, 0, a, first_m + token, uint32(first_k + i * TILE_K), wide)
                most[token] = largest_bits(y, 0, most[token])
        for token in range(tokens):
            for i in range(5):
                most[token] = max(most[token], shfl_xor(most[token], 1 << i))
            if lane == 0:
                cuda.atomic.max(largest, first_largest + token, most[token])
        cuda.syncthreads()

        # --- A -> float16 in shared memory [128 K][token][two steps of 16 K][t][8 values]; tokens
        # that are neighbours have such steps in another order, and so use all banks
        at_own = int32(at_a + part[0] * (tokens * PIECE))
        own = int32(at_own + quad * 16 + (lane >> 2 & 1) * 8 + (lane >> 3) * 64)
        for token in range(tokens):
            most[token] = exponent_of(largest, token)
        for i in range(held):
            if i // tokens < deep:
                to = (own ^ (i % tokens & 1) * 64) + i * PIECE
                round_four(smem, to, x, i, most[i % tokens])
        for i in range(together, deep):
            for token in range(tokens):
                load_four(y, 0, a, first_m + token, uint32(first_k + i * TILE_K), wide)
                to = (own ^ (token & 1) * 64) + (i * tokens + token) * PIECE
                round_four(smem, to, y, 0, most[token])
        cuda.syncwarp()

        # --- the stream
        is_one = group < tokens  # B has eight columns
        at_b = int32(at_zeros + quad * 16)
        if is_one:
            at_b = int32(at_own + group * PIECE + quad * 16)
        next_b, turned = int32(tokens * PIECE if is_one else 0), int32(group & 1) * 64
        at_sums = int32(at_a + in_row * (tokens * PIECE))
        s, parity = int32(0), int32(0)
        for pair in range(begin, rows[1], PAIR):
            for r in range(n_acc):
                acc[r] = 0
            for i in range(deep):
                even, odd = at_b + i * next_b + turned, at_b + i * next_b + 64 - turned
                b0, b1 = load_u32x4(smem, even), load_u32x4(smem, odd)
                b2, b3 = load_u32x4(smem, even + 128), load_u32x4(smem, odd + 128)
                to, bar = ring + s * slot_bytes, bars + 8 * s
                mbarrier_wait(smem, bar, parity)
                for r in range(PAIR):
                    multiply(acc, 4 * r, smem, to + r * record, 0, lane, b0, b1)
                    multiply(acc, 4 * r, smem, to + r * record, 1, lane, b2, b3)
                cuda.syncwarp()
                row, k = ask(smem, to, bar, lane, w, row, k, rows, part, in_row)
                s = int32(s + 1)
                if s == stages:
                    s, parity = int32(0), int32(parity ^ 1)
            # sums [warp][row tile][token][16] of the lanes whose columns are tokens
            for r in range(PAIR):
                if pair + r >= first and pair + r < rows[1]:
                    place = (warp * tall + pair + r - first) * tokens + 2 * quad
                    at = at_sums + 4 * (place * TILE_ROWS + group)
                    for j in range(2):
                        if 2 * quad + j < tokens:
                            store_f32(smem, at + 4 * TILE_ROWS * j, acc[4 * r + j])
                            store_f32(smem, at + 4 * TILE_ROWS * j + 32, acc[4 * r + 2 + j])
        cuda.syncthreads()

        # --- the sums of all warps, in the order of K, to C
        for i in range(t, (rows[1] - first) * (tokens * TILE_ROWS), 32 * WARPS):
            total = float32(0)
            for p in range((in_row + each - 1) // each):
                total += load_f32(smem, at_sums + 4 * (p * tall * (tokens * TILE_ROWS) + i))
            token = i // TILE_ROWS % tokens
            m, n = first_m + token, (first + i // (tokens * TILE_ROWS)) * TILE_ROWS + i % TILE_ROWS
            if m < M and n < N:
                factor = as_float(uint32(exponent_of(largest, token) - 14) << uint32(23))
                store_f32(c, int64(m) * N + n, total * of_rows[n] * factor)

    return w4a16_decode


def tiling(fmt: Format, shape: Shape) -> tuple[int, int, int, int, int]:
    """(tokens of a group, stages, row tiles of a thread block, records along K of a warp, bytes of
    shared memory): all weights at once if there are as many multiprocessors, in waves if not."""
    in_row, row_tiles = ceil_div(shape.k, TILE_K), ceil_div(shape.n, TILE_ROWS)
    each = ceil_div(in_row, WARPS)
    tokens = next(t for t in (1, 2, 4, 8) if t >= min(shape.m, MOST_TOKENS))
    while True:
        share = ceil_div(row_tiles, multiprocessors())
        of_row_tile = WARPS * tokens * TILE_ROWS * 4
        waves = ceil_div(share, max(1, SUMS // of_row_tile))
        tall = ceil_div(row_tiles, waves * multiprocessors())
        least = in_row * tokens * PIECE + tall * of_row_tile
        stages = min(STAGES, each * ceil_div(tall + 1, PAIR))
        while stages > 1 and places(fmt, stages)[3] + least > SHARED:
            stages -= 1
        shared = places(fmt, stages)[3] + least
        if tokens == 1 or shared <= shared_memory():
            return tokens, stages, tall, each, max(ALONE, shared)
        tokens //= 2


def activations(family: Family, a: Any, machine: Machine) -> Activations:
    """A itself; for longer K than fits, as step 12 takes it."""
    return (halves_made_inside if a.shape[1] <= MOST_K else float16_units)(family, a, machine)


def scratch(fmt: Format, family: Family, shape: Shape) -> tuple:
    return () if shape.k <= MOST_K else step12.scratch(fmt, family, shape)


def launch(
    fmt: Format, family: Family, shape: Shape, weights: tuple, activations: tuple, out: Any,
    scratch: tuple,
) -> Launch:  # fmt: skip
    if shape.k > MOST_K:
        return step12.launch(fmt, family, shape, weights, activations, out, scratch)
    tokens, stages, tall, each, shared = tiling(fmt, shape)
    held = min(HELD // tokens, each) * tokens
    run = kernel(fmt, tokens, stages, max(1, min(EARLY, stages // 2)), held)
    grid = (ceil_div(ceil_div(shape.n, TILE_ROWS), tall), ceil_div(shape.m, tokens))
    args = (*weights, *activations, out, ceil_div(shape.k, TILE_K), each, tall)
    return Launch(run, grid, (32 * WARPS,), args, shared, overlap=True)


STEP = Step(
    number=14,
    name="step14_decode_w4a16",
    title="decode of few tokens: float16 weights, bulk copies for each warp",
    families=("A16",),
    parents={"A16": 12},
    unit={"A16": "tensor_fp16"},
    pack=tiles,
    activations=activations,
    launch=launch,
    scratch=scratch,
    most_tokens=MOST_TOKENS,
    min_cc=(9, 0),
    contains={"A16": ("HMMA.16816.F32", "HFMA2", "UBLKCP", "SYNCS")},
    forbids={"A16": ("IMMA", "LDGSTS", "LDL", "STL")},
)
