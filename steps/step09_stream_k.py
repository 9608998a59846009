"""Step 9: stream-K - every SM multiplies the same share, whatever the shape.

What is new
    The tiles of C, each with its steps along K, are laid end to end, and every thread block takes
    an equal stretch of that line instead of one tile. A stretch may end in the middle of a tile:
    then all that work on it leave their sums in scratch memory, and the one that comes last adds
    them up, always in the order of K: the same bits from run to run, whoever was last.
Why it should help
    With 128 tokens and 4096 features step 8 has 64 tiles for the 264 blocks that fit a GPU of 132
    SMs, and needs the time of 256. Shared out, the same work is 15 us of multiplying and some 5 us
    for the sums, 8 MB that go to the L2 and back.
What it costs
    Scratch memory of two tiles a block, and those sums' way through the L2; a few registers of the
    line's, which the compiler may keep in local memory while a tile is multiplied. Where whole
    tiles fill the GPU to nine tenths, they are kept whole, and this is step 8.
Machine code
    As step 8, and a fence (MEMBAR) and an atomic (ATOMG or RED) for the count of who is done.
Read next
    For a few tokens only the weights' way from memory counts: step10_decode
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32

from qformats import BLOCK, Format
from qformats.device import tile_format
from qformats.repack import HALF_UNIT, MINIMUM_UNIT, TILE_K, TILE_ROWS, UNIT, tiles
from steps.activations import q8_1_slabs
from steps.instructions import (
    as_bits,
    as_float,
    cp_async_4,
    cp_async_16,
    cp_async_commit,
    cp_async_wait,
    fence,
    half_to_float,
    ldmatrix_x4,
    let_next_start,
    load_f32,
    load_f32x2,
    load_f32x4,
    load_u16,
    load_u32x4,
    mma_m16n8k8_tf32,
    mma_m16n8k32_s8,
    mma_m16n8k32_u8,
    store_f32,
    store_f32x4,
    wait_for_previous,
)
from steps.machines import multiprocessors, shared_memory
from steps.step import Family, Launch, Shape, Step, ceil_div

BN: Final = 128  # features of a tile of C
WARP_N: Final = 32  # features of a warp
WARP_M: Final = 64  # its tokens at most: 64 accumulators a thread
TOKENS: Final = (128, 64, 32, 16)  # of a tile; 128 spares q4_1 and q5_1 registers
FEW: Final = 32  # tokens of a tile below which a warp's fragments are used too seldom
WARPS_PER_SM: Final = 8  # as many as their registers allow; twice that for few tokens
IN_FLIGHT: Final = 64  # registers for sums of others on their way
STAGES: Final = 4  # of the ring: more hide nothing further
BLOCKS: Final = TILE_K // BLOCK  # of K in a stage
UNITS: Final = TILE_K // UNIT  # of 16 K in a stage
RECORDS: Final = BN // TILE_ROWS  # of weights in a stage
WARPS_N: Final = BN // WARP_N  # warps side by side along the features
ROW_TILES: Final = WARP_N // TILE_ROWS  # records that a warp multiplies
A_WORDS: Final = 8 * ROW_TILES  # A fragments of two blocks
SCALE_WORDS: Final = 4 * ROW_TILES  # float16 scales of four
FULL: Final = 0.9  # share of the blocks' time: with so little to win tiles are kept whole
TF32: Final = 0xFFFFE000  # the bits of a float32 that a tf32 operand keeps


#                  tile 0          tile 1          tile 2          tile 3
#     K       |---------------|---------------|---------------|---------------|
#     block    000000000011111 111112222222222 333333333344444 444445555555555
#                        last of 0 and 1 adds     ... of 1 and 2 ...
#
# Nobody waits for anybody, so any number of blocks is right.
# The fewer the tokens, the lower the tiles.
def warps_per_sm(bm: int) -> int:
    return 2 * WARPS_PER_SM if bm == TOKENS[-1] else WARPS_PER_SM


@cache
def kernel(fmt: Format, bm: int, stages: int) -> Any:
    """(the kernel for tiles of `bm` tokens and a ring of `stages`, threads, bytes of one stage)"""
    tile = tile_format(fmt.name)
    record, scales_at, minima_at = tile.record_bytes, tile.scales_at, tile.minima_at
    load, fragments, minimum = tile.load, tile.fragments, tile.minimum
    unit = float32(HALF_UNIT / MINIMUM_UNIT / tile.unit)  # of scales, against that of minima
    mma = mma_m16n8k32_s8 if tile.signed else mma_m16n8k32_u8
    tokens = min(bm, WARP_M)  # of a warp
    warps = WARPS_N * (bm // tokens)
    threads, resident = 32 * warps, warps_per_sm(bm) // warps
    # a stage: a record of each of 8 rows, then of `bm` tokens the codes, d, and s if it counts
    at_codes = RECORDS * record
    at_d = at_codes + TILE_K * bm
    at_s = at_d + 4 * BLOCKS * bm
    pitch = bm + 8  # floats from one block's s to the next: the four quads in four sets of banks
    stage_bytes = at_s + (4 * BLOCKS * pitch if minimum else 0)
    together = threads // bm  # units of K that the threads copy at a time, one token each
    columns, pairs = tokens // 8, tokens // 16  # B fragments; ldmatrix brings two at once
    n_acc, n_b = 4 * ROW_TILES * columns, 2 * columns
    at_once = IN_FLIGHT // n_acc  # sums of other blocks that are loaded together
    wait_for_first, wait_for_next = cp_async_wait(stages - 1), cp_async_wait(stages - 2)

    # --- global -> shared: ask for the operands of one stage
    @cuda.jit(device=True, forceinline=True)
    def copy_weights(ring, base, t, w, own, other):
        """Records `own` and, in a block of four warps, `other` of each warp."""
        lane, warp = t & 31, t >> 5
        for i in range(RECORDS // warps):
            to = base + (warp + i * warps) * record + 16 * lane
            at = int64(own if i == 0 else other) * record + 16 * lane
            for chunk in range(0, record, 512):
                if chunk + 512 <= record or 16 * lane < record - chunk:
                    cp_async_16(ring, to + chunk, w, at + chunk)

    @cuda.jit(device=True, forceinline=True)
    def copy_tokens(ring, base, t, qa, ds, step, token, M):
        u = t // bm
        unit, block = int32((step * UNITS + u) * M + token), int32((step * BLOCKS + u) * M + token)
        column = t & (bm - 1)
        for i in range(0, UNITS, together):
            to = base + at_codes + ((u + i) * bm + column) * UNIT
            cp_async_16(ring, to, qa, int64(unit + i * M) * UNIT)
        for i in range(0, BLOCKS, together):
            if together <= BLOCKS or u < BLOCKS:
                at = int64(block + i * M) * 2
                cp_async_4(ring, base + at_d + ((u + i) * bm + column) * 4, ds, at)
                if minimum:
                    to = base + at_s + ((u + i) * pitch + column) * 4
                    cp_async_4(ring, to, ds, at + 1)

    # --- shared -> registers
    @cuda.jit(device=True, forceinline=True)
    def fetch_tokens(b, ring, base, first, lane, block):
        """B fragments of one block of 32 K."""
        unit_k, token = 2 * block + (lane >> 3 & 1), first + (lane >> 4) * 8 + (lane & 7)
        at = base + at_codes + (unit_k * bm + token) * UNIT
        for j in range(pairs):
            b0, b1, b2, b3 = ldmatrix_x4(ring, at + 16 * UNIT * j)
            b[4 * j], b[4 * j + 1], b[4 * j + 2], b[4 * j + 3] = b0, b1, b2, b3

    @cuda.jit(device=True, forceinline=True)
    def fetch_d(x, ring, base, first, lane, block):
        """The scales of its tokens."""
        at = base + at_d + (block * bm + first + 2 * (lane & 3)) * 4
        for j in range(columns):
            x[2 * j], x[2 * j + 1] = load_f32x2(ring, at + 32 * j)

    @cuda.jit(device=True, forceinline=True)
    def fetch_weights(a, ring, weights, lane, half):
        """A fragments of two blocks."""
        for i in range(ROW_TILES):
            f = fragments(load(ring, weights + i * record, lane, half))
            a[8 * i], a[8 * i + 1], a[8 * i + 2], a[8 * i + 3] = f[0], f[1], f[2], f[3]
            a[8 * i + 4], a[8 * i + 5], a[8 * i + 6], a[8 * i + 7] = f[4], f[5], f[6], f[7]

    @cuda.jit(device=True, forceinline=True)
    def fetch_scales(scales, ring, weights, lane):
        """float16 scales of rows g and g + 8, four blocks each, two to a word."""
        for i in range(ROW_TILES):
            s = load_u32x4(ring, weights + i * record + scales_at + 16 * (lane >> 2))
            scales[4 * i], scales[4 * i + 1] = s[0], s[1]
            scales[4 * i + 2], scales[4 * i + 3] = s[2], s[3]

    @cuda.jit(device=True, forceinline=True)
    def scale_of(word, odd):
        bits = uint32(word) >> uint32(16) if odd else uint32(word) & uint32(0xFFFF)
        return half_to_float(bits) * unit

    # --- multiply
    @cuda.jit(device=True, forceinline=True)
    def multiply(acc, a, b, x, scales, block):
        """acc += one block of 32 K: an mma, then the promotion of its four integer sums."""
        for i in range(ROW_TILES):
            q, word = 8 * i + 4 * (block & 1), 4 * i + block // 2
            w0, w8 = scale_of(scales[word], block & 1), scale_of(scales[word + 2], block & 1)
            for j in range(columns):
                v0, v1, v2, v3 = mma(
                    a[q], a[q + 1], a[q + 2], a[q + 3], b[2 * j], b[2 * j + 1], 0, 0, 0, 0
                )
                r = 4 * (i * columns + j)
                acc[r] += float32(v0) * (w0 * x[2 * j])
                acc[r + 1] += float32(v1) * (w0 * x[2 * j + 1])
                acc[r + 2] += float32(v2) * (w8 * x[2 * j])
                acc[r + 3] += float32(v3) * (w8 * x[2 * j + 1])

    @cuda.jit(device=True, forceinline=True)
    def add_minima(acc, ring, base, weights, first, lane):
        """acc += sum over the stage's 4 blocks of m * s: one tf32 mma, s as the sum of two tf32."""
        group, quad = lane >> 2, lane & 3
        for i in range(ROW_TILES):
            at = weights + i * record + minima_at + 16 * group + 2 * quad
            m0 = as_bits(half_to_float(load_u16(ring, at)))
            m8 = as_bits(half_to_float(load_u16(ring, at + 8)))
            for j in range(columns):
                s = load_f32(ring, base + at_s + (quad * pitch + first + 8 * j + group) * 4)
                upper = as_bits(s) & uint32(TF32)
                lower = as_bits(s - as_float(upper))
                r = 4 * (i * columns + j)
                acc[r], acc[r + 1], acc[r + 2], acc[r + 3] = mma_m16n8k8_tf32(
                    m0, m8, m0, m8, upper, lower, acc[r], acc[r + 1], acc[r + 2], acc[r + 3]
                )

    # --- registers -> global
    @cuda.jit(device=True, forceinline=True)
    def store(c, m, n, value, factors):
        if m < c.shape[0] and n < c.shape[1]:
            value *= factors[n] * float32(MINIMUM_UNIT)
            store_f32(c, m * c.shape[1] + n, value)

    @cuda.jit(device=True, forceinline=True)
    def write_tile(acc, factors, c, m, n):
        """Of each mma a thread holds tokens m, m + 1 of features n, n + 8."""
        for i in range(ROW_TILES):
            for j in range(columns):
                r = 4 * (i * columns + j)
                store(c, m + 8 * j, n + TILE_ROWS * i, acc[r], factors)
                store(c, m + 8 * j + 1, n + TILE_ROWS * i, acc[r + 1], factors)
                store(c, m + 8 * j, n + TILE_ROWS * i + 8, acc[r + 2], factors)
                store(c, m + 8 * j + 1, n + TILE_ROWS * i + 8, acc[r + 3], factors)

    # --- which stretch belongs to whom
    @cuda.jit(device=True, forceinline=True)
    def beginning(units, block):
        return int32(int64(units) * block // cuda.gridDim.x)

    @cuda.jit(device=True, forceinline=True)
    def at_work(units, unit):
        """The block whose stretch holds a unit: the last that begins at or before it."""
        return int32(((int64(unit) + 1) * cuda.gridDim.x - 1) // units)

    # --- sums of a tile that several blocks share
    @cuda.jit(device=True, forceinline=True)
    def hand_over(partials, slot, t, acc):
        for r in range(0, n_acc, 4):
            at = (slot * n_acc + r) * threads + 4 * t
            store_f32x4(partials, at, acc[r], acc[r + 1], acc[r + 2], acc[r + 3])

    @cuda.jit(device=True, forceinline=True)
    def add_up(partials, from_block, to_block, begins, units, t, acc):
        """acc = the sums of these blocks for the tile that begins at unit `begins`, in order."""
        part = cuda.local.array(IN_FLIGHT, float32)
        for r in range(n_acc):
            acc[r] = 0
        for other in range(from_block, to_block + 1, at_once):
            for i in range(at_once):
                one = min(other + i, to_block)
                slot = 2 * one + (1 if beginning(units, one) < begins else 0)
                for r in range(0, n_acc, 4):
                    p = load_f32x4(partials, (slot * n_acc + r) * threads + 4 * t)
                    q = i * n_acc + r
                    part[q], part[q + 1], part[q + 2], part[q + 3] = p[0], p[1], p[2], p[3]
            for i in range(at_once):
                if other + i <= to_block:
                    for r in range(n_acc):
                        acc[r] += part[i * n_acc + r]

    @cuda.jit(launch_bounds=(threads, resident))
    def w4a8_stream_k(w, factors, qa, ds, c, steps, partials, arrived):
        """c[M, N] = a @ dequantize(w)[N, K]^T; w, factors: qformats.repack.tiles, a: in slabs."""
        ring = cuda.shared.array(0, uint8, alignment=128)
        before = cuda.shared.array(1, int32)  # how many of a tile's blocks were done before this
        acc = cuda.local.array(n_acc, float32)
        a = cuda.local.array(A_WORDS, uint32)
        scales = cuda.local.array(SCALE_WORDS, uint32)
        b_even = cuda.local.array(n_b, uint32)
        b_odd = cuda.local.array(n_b, uint32)
        x = cuda.local.array(n_b, float32)
        M, N = int32(c.shape[0]), int32(c.shape[1])
        t = int32(cuda.threadIdx.x)
        warp, lane = t >> 5, t & 31
        # what this warp multiplies
        row_w, first = warp % WARPS_N * ROW_TILES, warp // WARPS_N * tokens
        # the stretch of this block; a unit is one step of one tile, K fastest, then features
        tiles_n = int32((N + BN - 1) // BN)
        units = int32((M + bm - 1) // bm * tiles_n * steps)
        block = int32(cuda.blockIdx.x)
        begin, end = beginning(units, block), beginning(units, block + 1)
        let_next_start()
        unit = begin
        while unit < end:
            tile = int32(unit // int32(steps))
            k0 = int32(unit - tile * steps)
            count = int32(min(steps - k0, end - unit))
            m0, n0 = int32(tile // tiles_n * bm), int32(tile % tiles_n * BN)
            # where this thread copies from; rows and tokens beyond the matrix repeat one within
            row, last = int32(n0 // TILE_ROWS + warp), int32((N - 1) // TILE_ROWS)
            own = int32(min(row, last) * steps + k0)
            other = int32(min(row + warps, last) * steps + k0)
            token = int32(min(m0 + (t & (bm - 1)), M - 1))
            for i in range(n_acc):
                acc[i] = 0

            for step in range(stages):
                if step < count:
                    copy_weights(ring, step * stage_bytes, t, w, own + step, other + step)
            wait_for_previous()  # the weights were there; the activations have just been quantized
            for step in range(stages):
                if step < count:
                    copy_tokens(ring, step * stage_bytes, t, qa, ds, k0 + step, token, M)
                cp_async_commit()
            wait_for_first()
            cuda.syncthreads()
            base = int32(0)
            weights = row_w * record
            fetch_weights(a, ring, weights, lane, 0)
            fetch_scales(scales, ring, weights, lane)
            fetch_tokens(b_even, ring, base, first, lane, 0)
            for step in range(count):
                # the fragments of the next block are on their way while this one is multiplied
                fetch_d(x, ring, base, first, lane, 0)
                fetch_tokens(b_odd, ring, base, first, lane, 1)
                multiply(acc, a, b_even, x, scales, 0)
                if minimum:
                    add_minima(acc, ring, base, weights, first, lane)
                fetch_d(x, ring, base, first, lane, 1)
                fetch_tokens(b_even, ring, base, first, lane, 2)
                multiply(acc, a, b_odd, x, scales, 1)
                fetch_weights(a, ring, weights, lane, 1)
                fetch_d(x, ring, base, first, lane, 2)
                fetch_tokens(b_odd, ring, base, first, lane, 3)
                multiply(acc, a, b_even, x, scales, 2)
                fetch_d(x, ring, base, first, lane, 3)

                # --- the next stage is there for all, and all have read the last of this one
                wait_for_next()
                cuda.syncthreads()
                ahead = int32(step + stages)
                if ahead < count:
                    copy_weights(ring, base, t, w, own + ahead, other + ahead)
                    copy_tokens(ring, base, t, qa, ds, k0 + ahead, token, M)
                cp_async_commit()
                base = int32(base + stage_bytes)
                if base == stages * stage_bytes:
                    base = int32(0)
                weights = base + row_w * record
                fetch_tokens(b_even, ring, base, first, lane, 0)
                multiply(acc, a, b_odd, x, scales, 3)
                fetch_weights(a, ring, weights, lane, 0)
                fetch_scales(scales, ring, weights, lane)

            # --- a part of a tile: hand it over; the last of its blocks adds up all of them
            whole = count == steps
            if not whole:
                begins = tile * steps
                from_block, to_block = at_work(units, begins), at_work(units, begins + steps - 1)
                hand_over(partials, 2 * block + (1 if begin < begins else 0), t, acc)
                fence()
                cuda.syncthreads()
                if t == 0:
                    before[0] = cuda.atomic.add(arrived, tile, 1)
                cuda.syncthreads()
                whole = before[0] == to_block - from_block
                if whole:
                    fence()
                    add_up(partials, from_block, to_block, begins, units, t, acc)
                    if t == 0:
                        arrived[tile] = 0  # for the next launch
            if whole:
                m, n = m0 + first + 2 * (lane & 3), n0 + row_w * TILE_ROWS + (lane >> 2)
                write_tile(acc, factors, c, m, n)
            cuda.syncthreads()  # the ring is free
            unit = int32(unit + count)

    return w4a8_stream_k, threads, stage_bytes


def tiling(fmt: Format, shape: Shape) -> tuple[int, int, int]:
    """(tokens of a tile, thread blocks, tiles) of a shape: the largest tiles of which there are at
    least half as many as blocks; then nobody shares a tile with more than one other."""
    minimum = "m" in (fmt.dtype.names or ())
    steps = ceil_div(shape.k, TILE_K)
    for bm in TOKENS if minimum else TOKENS[1:]:
        if shape.m <= bm // 2 and bm > TOKENS[-1]:
            continue  # half of it would be empty
        tiles_c = ceil_div(shape.n, BN) * ceil_div(shape.m, bm)
        blocks = multiprocessors() * warps_per_sm(bm) // (WARPS_N * ceil_div(bm, WARP_M))
        if 2 * tiles_c >= FULL * blocks or bm <= FEW:
            break
    if tiles_c >= FULL * blocks * ceil_div(tiles_c, blocks):
        return bm, tiles_c, tiles_c
    parts = min(blocks // tiles_c, steps)
    if tiles_c * parts >= FULL * blocks:
        return bm, tiles_c * parts, tiles_c  # equal parts: nobody works on two tiles
    return bm, min(blocks, tiles_c * steps), tiles_c


def scratch(fmt: Format, family: Family, shape: Shape) -> tuple[tuple[tuple[int, ...], Any], ...]:
    """Two tiles for each block, and a count for each tile."""
    bm, blocks, tiles_c = tiling(fmt, shape)
    shared = 0 if blocks == tiles_c else 2 * blocks * bm * BN
    return ((max(shared, 4),), np.float32), ((tiles_c,), np.int32)


def launch(
    fmt: Format,
    family: Family,
    shape: Shape,
    weights: tuple,
    activations: tuple,
    out: Any,
    scratch: tuple,
) -> Launch:
    bm, blocks, _ = tiling(fmt, shape)
    _, threads, stage_bytes = kernel(fmt, bm, STAGES)
    # bytes for each of the blocks that share an SM, which keeps 1 KB of every one
    share = (shared_memory() + 1024) * threads // (32 * warps_per_sm(bm)) - 1024
    stages = min(STAGES, share // stage_bytes)
    run = kernel(fmt, bm, stages)[0]
    args = (*weights, *activations, out, ceil_div(shape.k, TILE_K), *scratch)
    return Launch(run, (blocks,), (threads,), args, stages * stage_bytes, overlap=True)


STEP = Step(
    number=9,
    name="step09_stream_k",
    title="stream-K: an even share of all tiles for every SM",
    families=("A8",),
    parents={"A8": 8},
    unit={"A8": "tensor_int8"},
    pack=tiles,
    activations=q8_1_slabs,
    launch=launch,
    scratch=scratch,
    min_cc=(8, 0),
    contains={"A8": ("IMMA", "LDGSTS.E.BYPASS.128", "LDSM.16.M88.4", "BAR.SYNC", "MEMBAR")},
    forbids={"A8": ("IDP",)},
)
