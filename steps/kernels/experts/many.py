"""Mixtures of experts, many tokens: one persistent wgmma launch over the tiles of all experts.

    C[p] = A[p // S] @ dequantize(W[e])[N, K]^T         of each position p of expert e

What is new
    The kernel of `steps.kernels.prefill.wgmma_float16`, whose producers also find their tile: the
    positions of an expert are cut into tiles (`routing` has sorted them), and each thread block
    counts the tiles of all experts, so that no list of them is made and the host knows nothing. The
    rows of A of a tile lie anywhere, and no tensor map gathers on compute capability 9.0. So the
    four warps of the producer copy 16 bytes a lane, each row where its token is, to where a tensor
    map would have left them.

        offsets  0        300  300         520       positions of experts 0, 1, 2
        tiles    [128][128][44]  [128][92]           each times the tiles along N

    cp.async does not report bytes to an mbarrier. Whoever copied waits for its own copies, makes
    them known to wgmma, and then arrives. So that nobody else waits meanwhile, the producer's warps
    take stages in turn: while one waits for its stage, three fill the next ones.

        warp 8    | copies of step 0, wait, announce | step 4 ...
        warp 9       | copies of step 1 ...             | step 5 ...
Why it should help
    A loop over experts has a launch and a rest of tiles for each. Here all SMs have equal work
    until the end. Of 512 tokens and 128 experts with 8 chosen, 32 rows an expert, weights are read
    once: 340 MB of Q4_0 in 85 us of an H200. Unpacking them takes longer: 830 cycles for 128 x 128
    weights and 48 tokens, 130 us. Of 4096 tokens, 256 rows an expert, the products take 309 GFLOP,
    and tiles of 144 rows multiply 1.14 times as many: 510 us at 690 TFLOPS.
    "fast" is the same with int8: A with a scale a token (`rounded`), weights requantized with one a
    row, of which step 15 tells. A stage of A is half as large, and a tile has half the cycles.
What it costs
    The copies of A are instructions, 64 of a warp for a stage of 128 tokens. A pass that sorts A
    first would write and read 134 MB at 4096 tokens: 60 us. Boxes of a tensor map that are one row
    high need none, and take 26 cycles each: twice as long.
Machine code
    HGMMA, or IGMMA, with its A from registers, LDGSTS.BYPASS.128, UBLKCP, no spills.
Prerequisites
    Step 14, `routing` and `scatter`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from itertools import product as product_of
from math import erfc, sqrt
from typing import Any, Final

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32

from qformats import FORMATS
from qformats.repack import (
    CHUNK,
    CHUNK_HALVES,
    KNOWN,
    TILE_GROUP,
    TILE_K,
    TILE_ROWS,
    byte_storage_format,
)
from qformats.storage import StorageFormat, storage_format
from steps.contract import (
    Launch,
    Machine,
    array_dtype,
    ceil_div,
    dtype_name,
    multiprocessors,
    shared_memory,
)
from steps.instructions import (
    BOX_K,
    barrier_arrive,
    barrier_sync,
    bulk_copy,
    cp_async_16_zfill,
    cp_async_commit,
    cp_async_wait,
    fence_mbarrier_init,
    fence_proxy_async,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    load_u32,
    load_u32x4,
    mbarrier_arrive,
    mbarrier_init,
    setmaxnreg_dec,
    setmaxnreg_inc,
    shfl,
    shfl_up,
    store_f32,
    store_u16,
    swizzled_descriptor,
    wgmma_commit,
    wgmma_fence,
    wgmma_s8,
    wgmma_wait,
    zeros_f32,
    zeros_i32,
)
from steps.kernels.experts import routing, weighted
from steps.kernels.experts.contract import (
    GROUP_ROWS,
    ExpertsKernel,
    ExpertsOperands,
    ExpertsRequest,
)
from steps.kernels.experts.rounded import rounded_rows
from steps.kernels.experts.scatter import scatter
from steps.kernels.parts.activations.layouts import float16_rows
from steps.kernels.parts.epilogue.half_tile import WARPGROUP
from steps.kernels.parts.weights.int8 import byte_format
from steps.kernels.prefill.ring import BARRIER_BYTES, mbarrier_ring
from steps.kernels.prefill.wgmma_int8 import INSTRUCTIONS, NEXT_32_K
from steps.kernels.prefill.wgmma_products import HalfStage, half_stage
from steps.kernels.prefill.wgmma_tiles import (
    H200_TILE_END,
    INT8_MOST_K,
    float16_stage_cycles,
    int8_stage_cycles,
)

TOKENS: Final = tuple(range(16, 161, 16))
"""Tokens of a tile."""


def most_tokens(bits: int, fast: bool, scaled: bool, gated: bool) -> int:
    """Tokens of a tile at most. 160 sums of a thread leave 64 registers: enough for weights of 4
    bits, for tokens without scales, and for int8 whose two sums become one output. Of more bits 128
    tokens leave a ring of four stages, with which an H200 is faster than with 144 and three."""
    if fast:
        return 160 if gated else 128
    return 160 if bits == 4 and not scaled else 128


WARPGROUPS: Final = 2  # that multiply: 64 features of each accumulator half
CONSUMERS: Final = WARPGROUPS * WARPGROUP
CONSUMER_WARPS: Final = CONSUMERS // 32
PRODUCER_WARPS: Final = WARPGROUP // 32
HALF: Final = 64 * WARPGROUPS  # features of an accumulator half of all warpgroups
H200_ROWS: Final = 6
"""Rows of an expert, on average, above which this kernel is faster than that for few tokens."""

STAGES: Final = 8  # of the ring, at most
STAGINGS: Final = ((32, 2), (16, 2), (16, 1))  # of `scatter`, the last for the sake of a stage
STAGGER: Final = 1  # stages by which the first warpgroup begins before the other
REGISTERS: Final = (224, 56)  # of consumers and producers: 2 x 224 + 56 are the 504 of 3 x 168
ROWS_AT_ONCE: Final = 4  # that a warp of the producer copies together, 64 K of each
BOX_ROW: Final = 2 * BOX_K  # bytes
BOX_CHUNKS: Final = BOX_ROW // 16


@cache
def byte_half_stage(format_name: str) -> HalfStage:
    """`half_stage` of int8 weights, for tokens in int8: a box has 128 K, of which a half stage has
    two descriptors. Step 15 teaches it."""
    form = byte_format(format_name)
    words, scales, fragments = form.words, form.scales, form.fragments

    @cuda.jit(device=True, forceinline=True)
    def load(memory, at, lane, half):
        return words(memory, at, lane, half), scales(memory, at, lane, half)

    @cuda.jit(device=True, forceinline=True)
    def multiply(acc, loaded, b):
        w0, w1 = fragments(loaded[0], loaded[1], 0), fragments(loaded[0], loaded[1], 1)
        wgmma_fence()
        acc = wgmma_s8(acc, w0[0], w0[1], w0[2], w0[3], b, 1)
        acc = wgmma_s8(acc, w1[0], w1[1], w1[2], w1[3], b + NEXT_32_K, 1)
        wgmma_commit()
        return acc

    return HalfStage(form.tile_bytes, load, multiply)


@cache
def kernel(
    fmt: StorageFormat, kind: str, output: str, scaled: bool, of_bias: str | None, gate: str | None,
    tile: tuple[int, int], stages: int, stagger: int, staging: tuple[int, int],
) -> tuple[Any, int]:  # fmt: skip
    """(kernel for A of dtype `kind`, C of dtype `output`, a bias of dtype `of_bias` or none, tiles
    (features, tokens) and a ring of `stages`, the first warpgroup `stagger` of them before the
    other, and `staging` of `scatter`; its shared memory in bytes without the tables of experts,
    `table_bytes`). scaled: tokens have scales. gate: of a tile of 256 rows of W 128 are gates and
    128 their ups, and C has what `GATE_OF` makes of them."""
    (bn, bm), of_bytes = tile, kind == "int8"
    form = byte_half_stage(fmt.name) if of_bytes else half_stage(fmt.name, kind)
    load, multiply, tile_bytes = form.load, form.multiply, form.tile_bytes
    acc_halves, is_gated = bn // HALF, gate is not None
    to_floats = output == "float32"
    features = HALF if is_gated else bn  # of C
    # from the weights of a warp's first half to those of its second, and to the next warp's first
    acc_half_bytes, warp_bytes = CONSUMER_WARPS * tile_bytes, tile_bytes
    if is_gated:  # row tiles of gates and ups in turn
        acc_half_bytes, warp_bytes = tile_bytes, 2 * tile_bytes
    box_bytes, w_bytes = BOX_ROW * bm, bn // TILE_ROWS * tile_bytes
    boxes, chunk_k = (1, CHUNK) if of_bytes else (2, CHUNK_HALVES)  # of 128 K; K of 16 bytes
    half_of_a = 2 * NEXT_32_K if of_bytes else box_bytes // 16  # in a descriptor: 64 K
    a_bytes, weights_at = boxes * box_bytes, stages * boxes * box_bytes
    group_bytes = TILE_GROUP * tile_bytes
    first_barrier = weights_at + stages * w_bytes
    ring = mbarrier_ring(stages, first_barrier)
    next_stage, wait_empty, expect = ring.next_stage, ring.wait_empty, ring.expect
    full, wait_full, release = ring.full, ring.wait_full, ring.release
    area_at = ceil_div(ring.end, 128) * 128
    sum_kind = int32 if of_bytes else float32
    end = scatter(bm, area_at, staging, output, scaled, of_bias, gate, sum_kind)
    load_tokens, put_tokens = end.load_tokens, end.put_tokens
    load_features = end.load_features
    sums, gated, store, wait_for_stores = end.sums, end.gated, end.store, end.wait_for_stores
    # of int32: a table of rows of A for each producer warp, then offsets[E + 1], first_tile[E + 1]
    sources_at, each_row = area_at // 4 + WARPGROUPS * end.area_bytes // 4, bm // ROWS_AT_ONCE
    offsets_at = sources_at + PRODUCER_WARPS * bm
    n_acc, no_sums = bm // 2, (zeros_i32 if of_bytes else zeros_f32)(bm // 2)
    wait_for_all, wait_for_all_but_one = wgmma_wait(0), wgmma_wait(1)
    wait_for_copies = cp_async_wait(0)
    inc_registers, dec_registers = setmaxnreg_inc(REGISTERS[0]), setmaxnreg_dec(REGISTERS[1])
    # Warps of the producer that take stages in turn. With more than there are stages, one could
    # wait for the round after next of a stage, which its parity does not tell from this one.
    turns = min(PRODUCER_WARPS, stages)
    stagger_barrier = 1 + WARPGROUPS  # the named barrier behind those of `store`

    @cuda.jit(device=True, forceinline=True)
    def count_tiles(tables, offsets, experts, t):
        """By all threads: the offsets, and first_tile[e], the tiles of the experts before e."""
        first_tile_at = offsets_at + experts + 1
        for e in range(t, experts + 1, CONSUMERS + WARPGROUP):
            tables[offsets_at + e] = int32(load_u32(offsets, e))
        cuda.syncthreads()
        if t < 32:
            each = int32(uint32(experts + 31) // uint32(32))
            begin, own = int32(t * each), int32(0)
            last = int32(min(begin + each, experts))
            for e in range(begin, last):
                count = tables[offsets_at + e + 1] - tables[offsets_at + e]
                own = int32(own + int32(uint32(count + bm - 1) // uint32(bm)))
            before = own
            for i in range(5):
                other = shfl_up(before, int32(1 << i))
                before = int32(before + (other if t >= 1 << i else 0))
            if t == 31:
                tables[first_tile_at + experts] = before
            before = int32(before - own)
            for e in range(begin, last):
                tables[first_tile_at + e] = before
                count = tables[offsets_at + e + 1] - tables[offsets_at + e]
                before = int32(before + int32(uint32(count + bm - 1) // uint32(bm)))
        cuda.syncthreads()

    @cuda.jit(device=True, forceinline=True)
    def find(tables, tile_id, tiles_n, experts):
        """(expert, first of its rows, how many there are, first feature) of a tile."""
        first_tile_at = offsets_at + experts + 1
        tile_m = int32(uint32(tile_id) // uint32(tiles_n))
        low, high = int32(0), int32(experts)  # first_tile[low] <= tile_m < first_tile[high]
        while high - low > 1:
            middle = int32((low + high) >> 1)
            if tables[first_tile_at + middle] <= tile_m:
                low = middle
            else:
                high = middle
        first = tables[offsets_at + low] + (tile_m - tables[first_tile_at + low]) * bm
        there = min(tables[offsets_at + low + 1] - first, bm)
        n0 = (tile_id - tile_m * tiles_n) * features
        return (
            int32(shfl(low, 0)),
            int32(shfl(int32(first), 0)),
            int32(shfl(int32(there), 0)),
            int32(shfl(int32(n0), 0)),
        )

    @cuda.jit(device=True, forceinline=True)
    def copy_weights(memory, to, w, expert, n0, step, steps, groups, barrier):
        """One thread: the packed tiles of a tile of C, of one step of 128 K. Where features are
        beyond the expert it copies its last group."""
        own = int32(uint32(n0) // uint32(HALF)) * (bn // features)
        for i in range(bn // GROUP_ROWS):
            group = int32(expert * groups + min(int32(own + i), int32(groups - 1)))
            source = (int64(group) * steps + step) * group_bytes
            bulk_copy(memory, to + i * group_bytes, w, source, group_bytes, memory, barrier)

    @cuda.jit(device=True, forceinline=True)
    def find_sources(tables, table_at, a, rows, first, there, slots, lane):
        """By a producer warp: where the rows of A of a tile begin, in 16-byte chunks, those that a
        lane copies side by side; rows beyond the tile are its last one, so that no copy asks."""
        chunks = int32(uint32(a.shape[1]) // uint32(chunk_k))
        for r in range(lane, bm, 32):
            position = uint32(load_u32(rows, int32(first + min(int32(r), int32(there - 1)))))
            at = table_at + (r & (ROWS_AT_ONCE - 1)) * each_row + r // ROWS_AT_ONCE
            tables[at] = int32(int32(position // uint32(slots)) * chunks)
        cuda.syncwarp()

    @cuda.jit(device=True, forceinline=True)
    def copy_rows(memory, tables, table_at, at, a, step, there, lane):
        """By a producer warp: 128 K of the rows of a tile to byte `at`, as tensor maps leave them.
        K beyond A, where weights are zeros, become zeros: 0 * NaN would be NaN. Of rows beyond the
        tile whole sixteens are left as they are: their sums are not stored."""
        row, chunk = int32(lane >> 3), int32(lane & 7)
        k = int32(step * (TILE_K // chunk_k) + chunk)  # in chunks: indices of 32 bits
        left = int32(uint32(a.shape[1]) // uint32(chunk_k)) - k
        lower, upper = uint32(16 if left > 0 else 0), uint32(16 if left > BOX_CHUNKS else 0)
        even = int32(at + row * BOX_ROW + (chunk ^ row) * 16)  # of rows 0 to 3 of eight
        odd = int32(at + (row + 4) * BOX_ROW + (chunk ^ (row + 4)) * 16)
        table_at = int32(table_at + row * each_row)
        for _ in range((there + 15) >> 4):  # sixteen rows, four of a lane
            four = load_u32x4(tables, table_at)
            for j in range(4):
                source = int64(uint32(uint32(four[j]) + uint32(k))) * chunk_k
                to = int32((odd if j & 1 else even) + j // 2 * (8 * BOX_ROW))
                cp_async_16_zfill(memory, to, a, source, lower)
                if boxes == 2:
                    cp_async_16_zfill(memory, to + box_bytes, a, source + BOX_K, upper)
            table_at = int32(table_at + 4)
            even, odd = int32(even + 16 * BOX_ROW), int32(odd + 16 * BOX_ROW)
        cp_async_commit()

    @cuda.jit(launch_bounds=(CONSUMERS + WARPGROUP, 1))
    def experts_many(a, w, row_scales, token_scales, bias, c, rows, offsets, sizes):
        """c[p] = a[p // S] @ dequantize(w[e])[N, K]^T for the positions p of all experts e; rows
        and offsets of `routing`, w of qformats.repack.tiles, those of the experts one after the
        other. sizes: E, steps of 128 K, groups of 128 rows of an expert, S (1 where each position
        has a row of A), and N of c[P, N]."""
        memory = cuda.shared.array(0, uint8, alignment=1024)
        tables = cuda.shared.array(0, int32, alignment=1024)
        experts, steps, groups, slots, N = sizes
        t = int32(cuda.threadIdx.x)
        warp, lane = shfl(int32(t >> 5), 0), int32(t & 31)  # shuffled: one value for the whole warp
        if t == 0:
            for i in range(stages):  # full: the copies of weights are expected, A has arrived
                mbarrier_init(memory, first_barrier + BARRIER_BYTES * i, 2)
                mbarrier_init(memory, first_barrier + BARRIER_BYTES * (stages + i), CONSUMER_WARPS)
            fence_mbarrier_init()
        griddepcontrol_launch_dependents()
        griddepcontrol_wait()
        count_tiles(tables, offsets, experts, t)
        tiles_n = int32(uint32(N + features - 1) // uint32(features))
        tiles_c = int32(tables[offsets_at + 2 * experts + 1] * tiles_n)
        stage, parity, tile_id = int32(0), int32(0), int32(cuda.blockIdx.x)
        if warp >= CONSUMER_WARPS:
            dec_registers()
            own = int32(warp - CONSUMER_WARPS)
            table_at = sources_at + own * bm
            if own >= turns:
                return
            left = own  # steps until the warp's next one
            for _ in range(own):
                stage, parity = next_stage(stage, parity)
            while tile_id < tiles_c:
                expert, first, there, n0 = find(tables, tile_id, tiles_n, experts)
                if left < steps:
                    find_sources(tables, table_at, a, rows, first, there, slots, lane)
                step = left
                while step < steps:
                    wait_empty(memory, stage, parity)
                    if lane == 0:
                        expect(memory, stage, w_bytes)
                        to = weights_at + stage * w_bytes
                        copy_weights(memory, to, w, expert, n0, step, steps, groups, full(stage))
                    cuda.syncwarp()
                    at = stage * a_bytes
                    copy_rows(memory, tables, table_at, at, a, step, there, lane)
                    wait_for_copies()
                    fence_proxy_async()
                    cuda.syncwarp()
                    if lane == 0:
                        mbarrier_arrive(memory, full(stage))
                    for _ in range(turns):
                        stage, parity = next_stage(stage, parity)
                    step = int32(step + turns)
                left = int32(step - steps)
                tile_id = int32(tile_id + cuda.gridDim.x)
            return

        inc_registers()
        others_begin = int32(-1)  # the other warpgroup begins after this step of the first tile
        if stagger and tile_id < tiles_c:
            if warp < WARPGROUP // 32:
                others_begin = int32(min(stagger, steps) - 1)
            else:
                barrier_sync(stagger_barrier, CONSUMERS)
        previous = int32(0)
        while tile_id < tiles_c:
            expert, first, there, n0 = find(tables, tile_id, tiles_n, experts)
            acc, acc1, step, half = no_sums(), no_sums(), int32(0), int32(0)
            tokens = load_tokens(rows, token_scales, first, there, slots)
            while True:
                # Half of a stage, 64 K, for both accumulator halves in turn. A wait leaves only the
                # newest product running: registers of the other are free. It is a loop, and not
                # written out for both halves of a stage, since ptxas gives each product that it
                # sees registers of its own.
                if half == 0:
                    wait_full(memory, stage, parity)
                at = weights_at + stage * w_bytes + warp * warp_bytes
                b = swizzled_descriptor(memory, stage * a_bytes) + half * half_of_a
                loaded = load(memory, at, lane, half)
                if acc_halves == 2:
                    loaded1 = load(memory, at + acc_half_bytes, lane, half)
                acc = wait_for_all_but_one(acc)
                if acc_halves == 1:
                    # the half before has been multiplied but for its last product
                    acc = multiply(acc, loaded, b)
                    acc = wait_for_all_but_one(acc)
                else:
                    acc = multiply(acc, loaded, b)
                    acc1 = wait_for_all_but_one(acc1)
                # the stage before has been multiplied
                release(memory, previous, lane == 0 and half == 0 and step > 0)
                if acc_halves == 2:
                    acc1 = multiply(acc1, loaded1, b)
                if half == 0:
                    previous = stage
                else:
                    if stagger and step == others_begin:
                        barrier_arrive(stagger_barrier, CONSUMERS)
                    stage, parity = next_stage(stage, parity)
                    step = int32(step + 1)
                half = int32(half ^ 1)
                if step == steps:
                    break
            others_begin = int32(-1)
            n = int32(n0 + (warp >> 2) * (HALF // WARPGROUPS))
            # loads, while the last products run
            n1 = int32(n if is_gated else n + HALF)
            u = u1 = load_features(row_scales, bias, expert, n, groups, N, 0)
            if acc_halves == 2:
                u1 = load_features(row_scales, bias, expert, n1, groups, N, 1 if is_gated else 0)
            put_tokens(tokens)
            acc, acc1 = wait_for_all(acc), wait_for_all(acc1)
            release(memory, previous, lane == 0)
            x = cuda.local.array(n_acc, float32)
            sums(x, acc, u)
            if is_gated:
                y = cuda.local.array(n_acc, float32)
                sums(y, acc1, u1)
                gated(x, y)
            store(x, c, there, n, N)
            if acc_halves == 2 and not is_gated:
                z = cuda.local.array(n_acc, float32)
                sums(z, acc1, u1)
                wait_for_stores()
                store(z, c, there, n1, N)
            tile_id = int32(tile_id + cuda.gridDim.x)

        # rows without an expert are NaN
        i, positions = int32(tables[offsets_at + experts] + cuda.blockIdx.x), int32(rows.shape[0])
        while i < positions:
            begin = int64(load_u32(rows, i)) * N
            for n in range(t, N, CONSUMERS):
                if to_floats:
                    store_f32(c, begin + n, float32(np.nan))
                else:
                    store_u16(c, begin + n, uint32(0x7FFF))
            i = int32(i + cuda.gridDim.x)

    return experts_many, 4 * offsets_at


def table_bytes(experts: int) -> int:
    """Bytes of shared memory for the offsets and first tiles of so many experts."""
    return 8 * (experts + 1)


def expected_tiles(rows: float, bm: int) -> float:
    """Tiles of bm rows of an expert that has `rows` of them on average, where tokens choose at
    random: the sum of how likely it is to have more than 0, bm, 2 bm ... rows (as of a normal
    distribution)."""
    deviation, found, j = sqrt(2 * max(rows, 1e-9)), 0.0, 0
    while (more := erfc((j * bm + 0.5 - rows) / deviation) / 2) > 1e-6 or j * bm < rows:
        found, j = found + more, j + 1
    return found


def stage_cycles(stored_as: Any, fast: bool, bn: int, bm: int) -> int:
    """Cycles of 128 K of a tile (bn, bm) of weights stored so."""
    if not fast:
        return float16_stage_cycles(stored_as.bits, bn, bm)
    instructions = INSTRUCTIONS[stored_as.bits] * bn // HALF
    return int8_stage_cycles(byte_format(stored_as.name).tile_bytes, instructions, bn, bm)


def tile_tokens(stored_as: Any, fast: bool, rows: float, bn: int, steps: int, most: int) -> int:
    """The tokens of a tile, up to `most`, with which an expert of `rows` rows should take the
    fewest cycles."""

    def cycles(bm: int) -> float:
        each = steps * stage_cycles(stored_as, fast, bn, bm) + H200_TILE_END
        return expected_tiles(rows, bm) * each

    return min((bm for bm in TOKENS if bm <= most), key=cycles)


def launches(
    request: ExpertsRequest, given: ExpertsOperands, machine: Machine, fast: bool = False
) -> tuple[Launch, ...]:
    """All launches: the pass that rounds float32 A, or A to int8 where it is `fast`, the routing,
    the product, and the sum over a token's experts, of products in the dtype of C."""
    activations = (rounded_rows if fast else float16_rows)(given.a, machine)
    rows_type, offsets_type = routing.sizes(request.slots, request.experts)
    rows, offsets = machine.empty(*rows_type), machine.empty(*offsets_type)
    c = given.out
    if request.router is not None:
        shape = request.tokens, request.chosen, request.n
        c = machine.empty(shape, array_dtype(request.c))
    return (
        *activations.launches,
        routing.launch(given.ids, rows, offsets),
        product(request, given, activations.arrays, rows, offsets, c, fast),
        *(() if request.router is None else [weighted.launch(c, given.router, given.out)]),
    )


def product(
    request: ExpertsRequest, given: ExpertsOperands, activations: tuple[Any, ...], rows: Any,
    offsets: Any, c: Any, fast: bool,
) -> Launch:  # fmt: skip
    """The launch of the products alone, of what `routing` made of the ids."""
    stored_as: Any = (byte_storage_format if fast else storage_format)(FORMATS[request.format])
    a, *scales = activations
    steps, groups = ceil_div(request.k, TILE_K), request.row_tiles // TILE_GROUP
    bn = 2 * HALF if request.n > HALF or request.gate else HALF
    each, gated = request.slots / request.experts, request.gate is not None
    most = most_tokens(stored_as.bits, fast, bool(scales), gated)
    bm = tile_tokens(stored_as, fast, each, bn, steps, most)
    kinds = dtype_name(a), dtype_name(c), bool(scales), request.bias, request.gate
    for stages, staging in product_of(range(STAGES, 1, -1), STAGINGS):
        stagger = min(STAGGER, stages - 2)
        run, shared_bytes = kernel(stored_as, *kinds, (bn, bm), stages, stagger, staging)
        shared_bytes += table_bytes(request.experts)
        if shared_bytes <= shared_memory():
            break
    slots = 1 if request.per_slot else request.chosen
    sizes = tuple(map(np.int32, (request.experts, steps, groups, slots, request.outputs)))
    unused = given.row_scales  # where there are no token scales, or no bias
    args = (
        a, given.packed, given.row_scales, scales[0] if scales else unused,
        unused if given.bias is None else given.bias, c, rows, offsets, sizes,
    )  # fmt: skip
    tiles_n = ceil_div(request.outputs, HALF if request.gate else bn)
    tiles_c = tiles_n * (request.slots // bm + min(request.slots, request.experts))  # at most
    grid = (min(multiprocessors(), tiles_c),)
    return Launch(run, grid, (CONSUMERS + WARPGROUP,), args, shared_bytes, overlap=True)


KERNEL: Final = ExpertsKernel(
    name="many",
    title="experts of many tokens",
    launches=launches,
    formats=KNOWN,
    max_cc=(9, 0),  # others have no wgmma, later ones neither
    rows=H200_ROWS,
)

FAST: Final = replace(
    KERNEL,
    name="many_fast",
    title="experts of many tokens, in int8",
    launches=partial(launches, fast=True),
    accuracy="fast",
    most_k=INT8_MOST_K,
)
