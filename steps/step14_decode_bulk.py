"""Step 14: decode on Hopper - one lane asks for what two row tiles need, and no warp waits for another.

What is new
    Step 10 for a few tokens, the same product and the same bits, but bulk copies bring the weights:
    one lane asks for the records of two row tiles at once, and an mbarrier says that they are
    there. A warp has a part of K to itself, in all row tiles of its thread block. So it quantizes
    itself what it multiplies, fetches B once for two row tiles, and waits for others at the end
    only, when all sums of the block are added up.

         warp 0    warp 1    warp 2    ...       in a pair of row tiles one record of 128 K after
       |---------|---------|---------|--         the other, those of both side by side in memory
       | pair 0  | pair 0  | pair 0  |           (qformats.repack.tiles) and in the ring
    N  | pair 1  | pair 1  | pair 1  |
       | pair 2  | pair 2  | pair 2  |
       |---------|---------|---------|--
                      K -->
Why it should help
    In step 10 32 lanes issue three copies for a record, with an address each, and its loop has 98
    instructions a record; here it has 70. 33 MB of Q4_0 at 4.1 TB/s take 8.1 us. With 1.5 us until
    the first weights are there, and an end: 10.4, in a chain 8.9.
What it costs
    Hopper or later. A part of K to each warp is coarse: 16 warps cut K = 4096 in two records each.
    More tokens, and A that does not fit beside the rings, are step 10's.
Machine code
    UBLKCP before the first LDG of A, IMMA, and in the loop no barrier but SYNCS.
Read next
    How each step was predicted, measured and mended: results/worklog.md
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from numba import cuda, float32, int32, int64, uint8, uint32

from qformats import Format
from qformats.device import record_number, tile_format
from qformats.repack import BAND, HALF_UNIT, MINIMUM_UNIT, TILE_K, TILE_ROWS, tiles
from steps import step10_decode as step10
from steps.activations import float32_quantized_inside
from steps.decode_prologue import quantizer
from steps.decode_split import BLOCKS, FUSED, scale_bytes
from steps.instructions import (
    bulk_copy,
    fence_mbarrier_init,
    half_to_float,
    let_next_start,
    load_f32,
    load_f32x2,
    load_f32x4,
    load_u16,
    load_u32x2,
    mbarrier_arrive_expect,
    mbarrier_init,
    mbarrier_wait,
    mma_m16n8k32_s8,
    mma_m16n8k32_u8,
    shfl,
    shfl_xor,
    store_f32,
    wait_for_previous,
)
from steps.machines import multiprocessors
from steps.step import Activations, Family, Launch, Machine, Shape, Step, ceil_div

FITS: Final = 56 * 1024  # values of A that fit beside rings of one stage in every format
WARPS: Final = 16  # of a thread block: 128 registers a thread
PAIR: Final = 2  # row tiles whose records one copy brings
STAGES: Final = 8  # of a warp's ring, at most
EARLY: Final = 1  # of them asked for before A, which would wait in line behind more
SHARED: Final = 164 * 1024  # bytes of a thread block that are enough
ALONE: Final = 116 * 1024  # bytes with which it has an SM to itself: of two, each gets half
SUMS: Final = 32 * 1024  # bytes for the sums of warps at most; blocks with less rows come in waves
AHEAD: Final = 4  # blocks of A of a lane whose loads are under way together, at most


@cache
def kernel(fmt: Format, tokens: int, stages: int, early: int, ahead: int) -> Any:
    """The kernel for `tokens` (1, 2 or 4) and rings of `stages`, of which `early` are asked for
    before A; of that a lane loads `ahead` blocks at a time."""
    tile = tile_format(fmt.name)
    record, scales_at, minima_at = tile.record_bytes, tile.scales_at, tile.minima_at
    load, fragments, minimum = tile.load, tile.fragments, tile.minimum
    mma = mma_m16n8k32_s8 if tile.signed else mma_m16n8k32_u8
    unit = float32(HALF_UNIT / tile.unit)  # of sums
    of_minima = float32(MINIMUM_UNIT * tile.unit / HALF_UNIT)  # of minima, against that
    share = 4 if tokens < 4 else 2  # blocks of K that share the columns of B
    columns, holders = 8 // share, BLOCKS // share  # of a block; lanes of four with sums at the end
    n_acc, n_d, values = 4 * PAIR, 4 * holders, 1 if tokens == 1 else 2
    slot_bytes, at_bars, at_codes = PAIR * record, *places(fmt, stages)
    size_d = scale_bytes(tokens, minimum)
    step_b, step_d = BLOCKS * tokens * 32, BLOCKS * tokens * size_d  # from record to record
    fetch, quantize = quantizer(tokens, minimum, at_codes, ahead, 8)

    @cuda.jit(device=True, forceinline=True)
    def beginning(row, rows, k, in_row):
        """Of the pair of row tiles from `row` on, those among `rows`: the byte where record k of
        theirs begins, bytes of them, and how far into a slot of the ring they belong."""
        low, high = int32(max(row, rows[0])), int32(min(int32(row + PAIR), rows[1]))
        at = int64(record_number(low, k, in_row)) * record
        return at, int32((high - low) * record), int32((low - row) * record)

    @cuda.jit(device=True, forceinline=True)
    def ask(smem, slot, bar, lane, w, at, size, into, left, row, rows, k0, deep, in_row):
        """Ask for the records at byte `at` of w, if any are left; where are the next ones?"""
        if row < rows[1]:
            if lane == 0:
                mbarrier_arrive_expect(smem, bar, size)
                bulk_copy(smem, slot + into, w, at, size, smem, bar)
            at, left = at + BAND * record, int32(left - 1)
            if left == 0:
                left, row = deep, int32(row + PAIR)
                at, size, into = beginning(row, rows, k0, in_row)
        return at, size, into, left, row

    @cuda.jit(device=True, forceinline=True)
    def fetch_tokens(b, d, smem, at_b, at_d, turn):
        """B for 128 K, zeros in the columns of other blocks; and d and s of this lane's sums."""
        for i in range(holders):
            b0, b1 = load_u32x2(smem, at_b + i * (share * tokens * 32))
            for j in range(share):
                b[2 * (i * share + j)] = b0 if turn == j else uint32(0)
                b[2 * (i * share + j) + 1] = b1 if turn == j else uint32(0)
            at = at_d + i * (share * tokens * size_d)
            if values == 1:
                d[4 * i], d[4 * i + 1] = load_f32x2(smem, at)
            elif minimum:
                d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3] = load_f32x4(smem, at)
            else:
                d[4 * i], d[4 * i + 2] = load_f32x2(smem, at)

    @cuda.jit(device=True, forceinline=True)
    def multiply(acc, r, u, b, d, smem, at, lane, at_scale):
        """acc[r ...] += the record at byte `at`. at_scale: where this lane's first scale is."""
        v0 = v1 = v2 = v3 = int32(0)
        for block in range(BLOCKS):
            if block % 2 == 0:
                f = fragments(load(smem, at, lane, block // 2))
                u[0], u[1], u[2], u[3], u[4], u[5], u[6], u[7] = f
            q, p = block % 2 * 4, 2 * block
            v0, v1, v2, v3 = mma(u[q], u[q + 1], u[q + 2], u[q + 3], b[p], b[p + 1], v0, v1, v2, v3)
            if block % share == share - 1:
                to, i = at + at_scale + 2 * (block - share + 1), block // share * 4
                w0 = half_to_float(load_u16(smem, to + scales_at))
                w8 = half_to_float(load_u16(smem, to + scales_at + 8))
                acc[r] += float32(v0) * (w0 * d[i])
                acc[r + 2] += float32(v2) * (w8 * d[i])
                if values == 2:
                    acc[r + 1] += float32(v1) * (w0 * d[i + 2])
                    acc[r + 3] += float32(v3) * (w8 * d[i + 2])
                if minimum:
                    m0 = half_to_float(load_u16(smem, to + minima_at))
                    m8 = half_to_float(load_u16(smem, to + minima_at + 8))
                    acc[r] += m0 * (d[i + 1] * of_minima)
                    acc[r + 2] += m8 * (d[i + 1] * of_minima)
                    if values == 2:
                        acc[r + 1] += m0 * (d[i + 3] * of_minima)
                        acc[r + 3] += m8 * (d[i + 3] * of_minima)
                v0 = v1 = v2 = v3 = int32(0)

    @cuda.jit(launch_bounds=(32 * WARPS, 1))
    def w4a8_decode_bulk(w, factors, a, c, in_row, each, tall):
        """c[M, N] = a @ dequantize(w)[N, K]^T; w, factors of qformats.repack.tiles, a: float32.

        A thread block has `tall` row tiles, a warp `each` of the `in_row` records along K.
        """
        smem = cuda.shared.array(0, uint8, alignment=128)
        x, acc = cuda.local.array((ahead, 8), float32), cuda.local.array(n_acc, float32)
        u, b, d = cuda.local.array(8, uint32), cuda.local.array(8, uint32), cuda.local.array(n_d, float32)
        let_next_start()
        t = int32(cuda.threadIdx.x)
        warp, lane = shfl(int32(t >> 5), 0), int32(t & 31)
        group, quad = int32(lane >> 2), int32(lane & 3)
        M, N = int32(c.shape[0]), int32(c.shape[1])

        # --- this warp's share: `deep` records along K from k0 on, of row tiles `rows`
        in_row, each, tall = int32(in_row), int32(each), int32(tall)
        k0 = int32(min(int32(warp * each), in_row))
        deep = int32(min(each, int32(in_row - k0)))
        first = int32(cuda.blockIdx.x * tall)
        rows = first, int32(min(int32(first + tall), int32(int32(N + TILE_ROWS - 1) >> 4)))
        begin = int32(first & -PAIR if deep > 0 else rows[1])

        # --- weights, the first: they wait for no launch before this one
        ring, bars = int32(warp * (stages * slot_bytes)), int32(at_bars + 8 * stages * warp)
        if lane == 0:
            for s in range(stages):
                mbarrier_init(smem, bars + 8 * s, 1)
            fence_mbarrier_init()
        left, row = deep, begin
        at, size, into = beginning(row, rows, k0, in_row)
        for s in range(early):
            at, size, into, left, row = ask(
                smem, ring + s * slot_bytes, bars + 8 * s, lane, w, at, size, into, left, row,
                rows, k0, deep, in_row,
            )  # fmt: skip
        wait_for_previous()

        # --- A -> shared memory as Q8_1 [block][token]; meanwhile the other weights
        at_d = int32(at_codes + in_row * step_b)
        start, stop = int32(k0 * (BLOCKS * tokens)), int32((k0 + deep) * (BLOCKS * tokens))
        fetch(x, a, int32(start + group), int32(max(stop, int32(1))), int32(0), quad)
        # --- of what the end multiplies by, what would be late there
        n = first * TILE_ROWS + t // (TILE_ROWS * tokens) * TILE_ROWS + t % TILE_ROWS
        factor = factors[min(int32(n), int32(N - 1))] * unit
        quantize(smem, at_d, x, a, start, stop, 0, group, quad)
        # not before A is there: its loads would wait in line behind all that the rings can hold
        for s in range(early, stages):
            at, size, into, left, row = ask(
                smem, ring + s * slot_bytes, bars + 8 * s, lane, w, at, size, into, left, row,
                rows, k0, deep, in_row,
            )  # fmt: skip
        for more in range(start + 8 * ahead, stop, 8 * ahead):
            fetch(x, a, more + group, stop, 0, quad)
            quantize(smem, at_d, x, a, more, stop, 0, group, quad)
        cuda.syncwarp()

        # --- the stream
        turn, token = int32(group // columns), int32(group % columns if tokens > 1 else 0)
        own_b = int32(at_codes + k0 * step_b + (turn * tokens + token) * 32 + 8 * quad)
        own_d = int32(at_d + k0 * step_d + quad * (16 if minimum else 8))
        at_scale = int32(16 * group + 2 * (quad * share >> 2))
        at_sums = int32(at_d + in_row * step_d)
        s, parity = int32(0), int32(0)
        for pair in range(begin, rows[1], PAIR):
            for r in range(n_acc):
                acc[r] = 0
            for i in range(deep):
                fetch_tokens(b, d, smem, own_b + i * step_b, own_d + i * step_d, turn)
                slot, bar = int32(ring + s * slot_bytes), int32(bars + 8 * s)
                mbarrier_wait(smem, bar, parity)
                for r in range(PAIR):
                    multiply(acc, 4 * r, u, b, d, smem, slot + r * record, lane, at_scale)
                cuda.syncwarp()
                at, size, into, left, row = ask(
                    smem, slot, bar, lane, w, at, size, into, left, row, rows, k0, deep, in_row
                )
                s = int32(s + 1)
                if s == stages:
                    s, parity = int32(0), int32(parity ^ 1)
            # sums of the blocks of K that shared columns -> [warp][row tile][token][16]
            for r in range(PAIR):
                for j in range(4):
                    if j % 2 < values:
                        if holders == 1:
                            acc[4 * r + j] += shfl_xor(acc[4 * r + j], 1)
                        acc[4 * r + j] += shfl_xor(acc[4 * r + j], 2)
                if pair + r >= first and pair + r < rows[1] and quad < holders:
                    place = (warp * tall + pair + r - first) * tokens + 2 * quad
                    to = at_sums + 4 * (place * TILE_ROWS + group)
                    for j in range(values):
                        store_f32(smem, to + 4 * TILE_ROWS * j, acc[4 * r + j])
                        store_f32(smem, to + 4 * TILE_ROWS * j + 32, acc[4 * r + 2 + j])
        cuda.syncthreads()

        # --- the sums of all warps, in the order of K, to C
        of_warp = int32(tall * (tokens * TILE_ROWS))
        for i in range(t, (rows[1] - first) * (tokens * TILE_ROWS), 32 * WARPS):
            total = float32(0)
            for p in range(int32(uint32(in_row + each - 1) // uint32(each))):
                total += load_f32(smem, at_sums + 4 * (p * of_warp + i))
            m = i // TILE_ROWS % tokens
            n = first * TILE_ROWS + i // (tokens * TILE_ROWS) * TILE_ROWS + i % TILE_ROWS
            if i != t:
                factor = factors[min(n, N - 1)] * unit
            if m < M and n < N:
                store_f32(c, int64(m) * N + n, total * factor)

    return w4a8_decode_bulk


def places(fmt: Format, stages: int) -> tuple[int, int]:
    """Where in shared memory, behind the rings, mbarriers begin and codes of A."""
    bars = WARPS * stages * PAIR * tile_format(fmt.name).record_bytes
    return bars, bars + ceil_div(8 * WARPS * stages, 128) * 128


def tiling(fmt: Format, shape: Shape) -> tuple[int, int, int, int, int]:
    """(tokens, stages, row tiles of a thread block, records along K of a warp, bytes of shared
    memory): all weights at once if there are as many multiprocessors, in waves if not."""
    in_row, row_tiles = ceil_div(shape.k, TILE_K), ceil_div(shape.n, TILE_ROWS)
    each, tokens = ceil_div(in_row, WARPS), next(t for t in (1, 2, 4) if t >= shape.m)
    of_row_tile = WARPS * tokens * TILE_ROWS * 4
    waves = ceil_div(ceil_div(row_tiles, multiprocessors()), SUMS // of_row_tile)
    tall = ceil_div(row_tiles, waves * multiprocessors())
    size_d = scale_bytes(tokens, tile_format(fmt.name).minimum)
    beside = in_row * BLOCKS * tokens * (32 + size_d) + tall * of_row_tile
    stages = min(STAGES, each * ceil_div(tall + 1, PAIR))
    while stages > 1 and places(fmt, stages)[1] + beside > SHARED:
        stages -= 1
    return tokens, stages, tall, each, max(ALONE, places(fmt, stages)[1] + beside)


def fits(m: int, k: int) -> bool:
    return m <= FUSED and ceil_div(m, 2) * 2 * k <= FITS or m == 1 and k <= FITS


def activations(family: Family, a: Any, machine: Machine) -> Activations:
    """A itself, or what step 10 takes."""
    return (float32_quantized_inside if fits(*a.shape) else step10.activations)(family, a, machine)


def scratch(fmt: Format, family: Family, shape: Shape) -> tuple:
    return () if fits(shape.m, shape.k) else step10.scratch(fmt, family, shape)


def launch(
    fmt: Format, family: Family, shape: Shape, weights: tuple, activations: tuple, out: Any,
    scratch: tuple,
) -> Launch:  # fmt: skip
    if not fits(shape.m, shape.k):
        return step10.launch(fmt, family, shape, weights, activations, out, scratch)
    tokens, stages, tall, each, shared = tiling(fmt, shape)
    ahead = min(AHEAD, ceil_div(each * BLOCKS * tokens, 8))
    run = kernel(fmt, tokens, stages, min(EARLY, stages), ahead)
    args = (*weights, *activations, out, ceil_div(shape.k, TILE_K), each, tall)
    grid = (ceil_div(ceil_div(shape.n, TILE_ROWS), tall),)
    return Launch(run, grid, (32 * WARPS,), args, shared, overlap=True)


STEP = Step(
    number=14,
    name="step14_decode_bulk",
    title="decode on Hopper: bulk copies, a part of K for each warp",
    families=("A8",),
    parents={"A8": 10},
    unit={"A8": "tensor_int8"},
    pack=tiles,
    activations=activations,
    launch=launch,
    scratch=scratch,
    most_tokens=FUSED,
    min_cc=(9, 0),
    contains={"A8": ("IMMA", "UBLKCP", "SYNCS")},
    forbids={"A8": ("HMMA", "LDGSTS", "LDL", "STL")},
)
