"""Mixtures of experts, many tokens: one persistent wgmma launch over the tiles of all experts.

    C[p] = A[p // S] @ dequantize(W[e])[N, K]^T         of each position p of expert e

The kernel of `steps.kernels.prefill.wgmma_float16`, whose producer also finds its tile: the
positions of an expert are cut into tiles (`routing` has sorted them), and each thread block counts
the tiles of all experts, so that no list of them is made and the host knows nothing. Rows of A lie
in the same order (`sorted_rows`), so that a tensor map copies those of a tile; C of a product that
`leads` is in that order already.

    offsets  0        300  300         520       positions of experts 0, 1, 2
    tiles    [100][100][100] [110][110]          each times the tiles along N

An expert's tiles are alike, as few as can be, of at most 144 rows; where 128 are enough for them,
no more are multiplied. A box that reaches beyond a tile has rows of the next one: their sums are
not stored.

"fast" is the same with int8: A with a scale a token, weights requantized with one a row, of which
step 15 tells. A stage of A is half as large, and a tile has half the cycles.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from itertools import product as product_of
from math import ceil, erfc, sqrt
from typing import Any, Final

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32

from qformats import FORMATS
from qformats.repack import (
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
    TensorMap,
    barrier_arrive,
    barrier_sync,
    bulk_copy,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    load_u32,
    prefetch_tensor_map,
    setmaxnreg_dec,
    setmaxnreg_inc,
    shfl,
    shfl_up,
    spread,
    store_f32,
    store_u16,
    swizzled_descriptor,
    tensor_copy,
    tensor_map_address,
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
from steps.kernels.experts.scatter import scatter
from steps.kernels.experts.sorted_rows import sorted_rows
from steps.kernels.parts.epilogue.half_tile import WARPGROUP
from steps.kernels.parts.weights.int8 import byte_format
from steps.kernels.prefill.ring import mbarrier_ring
from steps.kernels.prefill.stage_copies import box_copies
from steps.kernels.prefill.wgmma_int8 import INSTRUCTIONS
from steps.kernels.prefill.wgmma_products import NEXT_32_K, byte_half_stage, half_stage
from steps.kernels.prefill.wgmma_tiles import (
    H200_TILE_END,
    INT8_MOST_K,
    float16_stage_cycles,
    int8_stage_cycles,
)

MOST_TOKENS: Final = 144
TOKENS: Final = tuple(range(16, MOST_TOKENS + 1, 16))
"""Tokens of a tile. 160 sums of a thread would leave 64 registers for all else, and `wgmma` would
be made to wait for each."""


SPILL_FREE: Final = ("q4_0", "q4_1")
"""Storage formats with which a tile of `MOST_TOKENS` whose tokens have scales does not spill."""


def most_tokens(stored_as: Any, fast: bool, scaled: bool, gated: bool, biased: bool) -> int:
    """Tokens of a tile at most. Tokens with scales and two outputs of a thread, or a bias, spill
    with more than 128. And of float16 weights of more than 4 bits 128 leave a ring of four stages,
    with which an H200 is faster than with 144 and three."""
    if fast:
        return MOST_TOKENS if gated or not scaled else 128
    wide = not scaled or (gated and not biased and stored_as.name in SPILL_FREE)
    return MOST_TOKENS if wide and stored_as.bits == 4 else 128


WARPGROUPS: Final = 2  # that multiply: 64 features of each accumulator half
CONSUMERS: Final = WARPGROUPS * WARPGROUP
CONSUMER_WARPS: Final = CONSUMERS // 32
HALF: Final = 64 * WARPGROUPS  # features of an accumulator half of all warpgroups
H200_ROWS: Final = 8
"""Rows of an expert, on average, above which this kernel is faster than that for few tokens: with 8
pairs took 1.22 times as long (gpt-oss, MXFP4) and 0.98 times (Qwen3-30B-A3B, Q4_0), with 12 rows
0.89 times (gpt-oss). The choice is of T, S and E alone, as two products of a layer share it."""
H200_FAST_ROWS: Final = 32
"""And above which int8 is faster than float16: pairs of 8, 16 and 32 rows of gpt-oss took 1.11,
1.09 and 1.08 times as long, of 64 rows 0.85; pairs of 32 rows of smaller experts 0.91 and 0.97."""

LEAST_NARROW: Final = 112
"""Tokens of a tile from which on it may be a narrow one."""

EVERY_LANE: Final = 0xFFFFFFFF
STAGES: Final = 5  # of the ring, at most
STAGINGS: Final = ((MOST_TOKENS, 1), (32, 2), (16, 2), (16, 1))  # of `scatter`, the first that fits
STAGGER: Final = 1  # stages by which the first warpgroup begins before the other
REGISTERS: Final = (240, 24)  # of consumers and producers: 2 x 240 + 24 are the 504 of 3 x 168
BOX_ROW: Final = 2 * BOX_K  # bytes


@cache
def kernel(
    fmt: StorageFormat, kind: str, output: str, scaled: bool, of_bias: str | None, gate: str | None,
    ordered: bool, tile: tuple[int, int], stages: int, stagger: int, staging: tuple[int, int],
) -> tuple[Any, int]:  # fmt: skip
    """(kernel for A of dtype `kind`, C of dtype `output`, a bias of dtype `of_bias` or none, tiles
    (features, tokens) and a ring of `stages`, the first warpgroup `stagger` of them before the
    other, and `staging` of `scatter`; its shared memory in bytes without the tables of experts,
    `table_bytes`). scaled: tokens have scales. ordered: C keeps the order of experts. gate: of a
    tile of 256 rows of W 128 are gates and 128 their ups, and C has what `GATE_OF` makes of
    them."""
    (bn, bm), of_bytes = tile, kind == "int8"
    form = byte_half_stage(fmt.name) if of_bytes else half_stage(fmt.name)
    load, multiply, tile_bytes = form.load, form.multiply, form.tile_bytes
    acc_halves, is_gated = bn // HALF, gate is not None
    to_floats = output == "float32"
    features = HALF if is_gated else bn  # of C
    # from the weights of a warp's first half to those of its second, and to the next warp's first
    acc_half_bytes, warp_bytes = CONSUMER_WARPS * tile_bytes, tile_bytes
    if is_gated:  # row tiles of gates and ups in turn
        acc_half_bytes, warp_bytes = tile_bytes, 2 * tile_bytes
    box_bytes, w_bytes = BOX_ROW * bm, bn // TILE_ROWS * tile_bytes
    boxes = 1 if of_bytes else 2  # of 128 K
    half_of_a = 2 * NEXT_32_K if of_bytes else box_bytes // 16  # in a descriptor: 64 K
    a_bytes, weights_at = boxes * box_bytes, stages * boxes * box_bytes
    group_bytes = TILE_GROUP * tile_bytes
    ring, copy_boxes = mbarrier_ring(stages, weights_at + stages * w_bytes), box_copies(bm)
    make_ring, next_stage = ring.make, ring.next_stage
    wait_empty, expect = ring.wait_empty, ring.expect
    full, wait_full, release = ring.full, ring.wait_full, ring.release
    area_at = ceil_div(ring.end, 128) * 128
    sum_kind = int32 if of_bytes else float32
    end = scatter(bm, area_at, staging, output, scaled, of_bias, gate, sum_kind, ordered)
    load_tokens, put_tokens = end.load_tokens, end.put_tokens
    load_features = end.load_features
    sums, gated, store, wait_for_stores = end.sums, end.gated, end.store, end.wait_for_stores
    # of int32: offsets[E + 1], first_tile[E + 1]
    offsets_at = area_at // 4 + WARPGROUPS * end.area_bytes // 4
    zeros = zeros_i32 if of_bytes else zeros_f32
    narrow = narrow_tokens(bm, of_bias, gate)
    n_acc, n_few = bm // 2, narrow // 2
    no_sums, narrow_sums = zeros(n_acc), zeros(n_few)
    wait_for_all, wait_for_all_but_one = wgmma_wait(0), wgmma_wait(1)
    inc_registers, dec_registers = setmaxnreg_inc(REGISTERS[0]), setmaxnreg_dec(REGISTERS[1])
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
    def find(tables, tile_id, tiles_n, experts, lane):
        """By a warp: (expert, first of its rows, how many there are, first feature) of a tile. The
        expert is the last one whose first tile is not behind it: of 32 it looks at all at once."""
        first_tile_at = offsets_at + experts + 1
        tile_m = int32(uint32(tile_id) // uint32(tiles_n))
        expert, apart = int32(0), int32(1)
        while apart * 32 < experts:
            apart = int32(apart * 32)
        while apart > 0:
            i = min(int32(expert + lane * apart), experts)
            found = cuda.popc(cuda.ballot_sync(EVERY_LANE, tables[first_tile_at + i] <= tile_m))
            expert, apart = int32(expert + (found - 1) * apart), int32(apart >> 5)
        first, end = tables[offsets_at + expert], tables[offsets_at + expert + 1]
        tile, height = tile_m - tables[first_tile_at + expert], int32(bm)
        if narrow < bm:  # the expert's tiles are alike
            tiles_m = tables[first_tile_at + expert + 1] - tables[first_tile_at + expert]
            height = int32(uint32(end - first + tiles_m - 1) // uint32(tiles_m))
        first = first + tile * height
        there = min(end - first, height)
        n0 = (tile_id - tile_m * tiles_n) * features
        return (
            int32(shfl(expert, 0)),
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
    def multiply_tile(
        acc, acc1, memory, stage, parity, others_begin, steps, warp, lane, tokens
    ):  # fmt: skip
        """(acc, acc1, stage, parity) behind a tile: sums of both accumulator halves over all of K,
        of as many tokens as acc has sums for."""
        previous, step, half = int32(0), int32(0), int32(0)
        while True:
            # Half of a stage, 64 K, for both accumulator halves in turn. A wait leaves only the
            # newest product running: registers of the other are free. It is a loop, and not
            # written out for both halves of a stage, since ptxas gives each product that it
            # sees registers of its own. So with one accumulator half no product may be running.
            if half == 0:
                wait_full(memory, stage, parity)
            at = weights_at + stage * w_bytes + warp * warp_bytes
            b = swizzled_descriptor(memory, stage * a_bytes) + half * half_of_a
            loaded = load(memory, at, lane, half)
            if acc_halves == 2:
                loaded1 = load(memory, at + acc_half_bytes, lane, half)
            if acc_halves == 1:
                acc = wait_for_all(acc)  # else its registers are written while they are multiplied
                acc = multiply(acc, loaded, b)
            else:
                acc = wait_for_all_but_one(acc)
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
        put_tokens(tokens)
        acc, acc1 = wait_for_all(acc), wait_for_all(acc1)
        release(memory, previous, lane == 0)
        return acc, acc1, stage, parity

    @cuda.jit(launch_bounds=(CONSUMERS + WARPGROUP, 1))
    def experts_many(a_map, w, row_scales, token_scales, bias, c, rows, offsets, sizes):
        """c[rows[r]] = a[r] @ dequantize(w[e])[N, K]^T for the rows r of all experts e, c[r] where
        C keeps this order; rows and offsets of `routing`, a_map of a[P, K] and token_scales[P] of
        `sorted_rows`, w of qformats.repack.tiles, those of the experts one after the other. sizes:
        E, steps of 128 K, groups of 128 rows of an expert, and N of c[P, N]."""
        memory = cuda.shared.array(0, uint8, alignment=1024)
        tables = cuda.shared.array(0, int32, alignment=1024)
        a = tensor_map_address(a_map)
        experts, steps, groups, N = sizes
        t = int32(cuda.threadIdx.x)
        warp, lane = shfl(int32(t >> 5), 0), int32(t & 31)  # shuffled: one value for the whole warp
        if t == 0:
            make_ring(memory, CONSUMER_WARPS)
        griddepcontrol_launch_dependents()
        griddepcontrol_wait()
        count_tiles(tables, offsets, experts, t)
        tiles_n = int32(uint32(N + features - 1) // uint32(features))
        tiles_c = int32(tables[offsets_at + 2 * experts + 1] * tiles_n)
        stage, parity, tile_id = int32(0), int32(0), int32(cuda.blockIdx.x)
        if warp >= CONSUMER_WARPS:  # the producer: one lane of one warp
            dec_registers()
            if warp > CONSUMER_WARPS:
                return
            if lane == 0:
                prefetch_tensor_map(a)
            while tile_id < tiles_c:
                expert, first, _, n0 = find(tables, tile_id, tiles_n, experts, lane)
                for step in range(steps):
                    wait_empty(memory, stage, parity)
                    if lane == 0:
                        expect(memory, stage, a_bytes + w_bytes)
                        to, barrier = stage * a_bytes, full(stage)
                        if of_bytes:
                            tensor_copy(memory, to, a, step * TILE_K, first, memory, barrier)
                        else:
                            copy_boxes(memory, to, a, first, step * TILE_K, barrier)
                        to = weights_at + stage * w_bytes
                        copy_weights(memory, to, w, expert, n0, step, steps, groups, barrier)
                    cuda.syncwarp()
                    stage, parity = next_stage(stage, parity)
                tile_id = int32(tile_id + cuda.gridDim.x)
            return

        inc_registers()
        others_begin = int32(-1)  # the other warpgroup begins after this step of the first tile
        if stagger and tile_id < tiles_c:
            if warp < WARPGROUP // 32:
                others_begin = int32(min(stagger, steps) - 1)
            else:
                barrier_sync(stagger_barrier, CONSUMERS)
        while tile_id < tiles_c:
            expert, first, there, n0 = find(tables, tile_id, tiles_n, experts, lane)
            # what the end needs, asked for while nothing waits for it
            tokens = load_tokens(rows, token_scales, first, there)
            n = int32(n0 + (warp >> 2) * (HALF // WARPGROUPS))
            n1 = int32(n if is_gated else n + HALF)
            u = u1 = load_features(row_scales, bias, expert, n, groups, N, 0)
            if acc_halves == 2:
                u1 = load_features(row_scales, bias, expert, n1, groups, N, 1 if is_gated else 0)
            acc, acc1 = cuda.local.array(n_acc, sum_kind), cuda.local.array(n_acc, sum_kind)
            if narrow < bm and there <= narrow:
                one, other, stage, parity = multiply_tile(
                    narrow_sums(), narrow_sums(), memory, stage, parity, others_begin, steps, warp,
                    lane, tokens,
                )  # fmt: skip
                few, few1 = cuda.local.array(n_few, sum_kind), cuda.local.array(n_few, sum_kind)
                spread(few, one)
                spread(few1, other)
                for r in range(n_few):
                    acc[r], acc1[r] = few[r], few1[r]
            else:
                many, many1, stage, parity = multiply_tile(
                    no_sums(), no_sums(), memory, stage, parity, others_begin, steps, warp, lane,
                    tokens,
                )  # fmt: skip
                spread(acc, many)
                spread(acc1, many1)
            others_begin = int32(-1)
            x = cuda.local.array(n_acc, float32)
            sums(x, acc, u)
            if is_gated:
                y = cuda.local.array(n_acc, float32)
                sums(y, acc1, u1)
                gated(x, y)
            store(x, c, first, there, n, N)
            if acc_halves == 2 and not is_gated:
                z = cuda.local.array(n_acc, float32)
                sums(z, acc1, u1)
                wait_for_stores()
                store(z, c, first, there, n1, N)
            tile_id = int32(tile_id + cuda.gridDim.x)

        # rows without an expert are NaN
        i, positions = int32(tables[offsets_at + experts] + cuda.blockIdx.x), int32(rows.shape[0])
        while i < positions:
            begin = int64(i if ordered else load_u32(rows, i)) * N
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


def narrow_tokens(bm: int, of_bias: str | None, gate: str | None) -> int:
    """Tokens that are multiplied of a tile of `bm` which has no more than these; bm where all of it
    is always multiplied: of few tokens weights are what takes time, and with biases of both
    accumulator halves registers do not suffice."""
    return bm if bm < LEAST_NARROW or (of_bias is not None and gate is None) else bm - 16


def likely_rows(rows: float) -> list[tuple[int, float]]:
    """(rows, how likely) of an expert that has `rows` of them on average, where tokens choose at
    random: as of a normal distribution. None are left out."""
    deviation = sqrt(2 * max(rows, 1e-9))
    most = ceil(rows + 4 * deviation) + 1
    beyond = [erfc((r - 0.5 - rows) / deviation) / 2 for r in range(1, most + 2)]
    return [(r, beyond[r - 1] - beyond[r]) for r in range(1, most + 1)]


def stage_cycles(stored_as: Any, fast: bool, bn: int, bm: int) -> int:
    """Cycles of 128 K of a tile (bn, bm) of weights stored so."""
    if not fast:
        return float16_stage_cycles(stored_as.bits, bn, bm)
    instructions = INSTRUCTIONS[stored_as.bits] * bn // HALF
    return int8_stage_cycles(byte_format(stored_as.name).tile_bytes, instructions, bn, bm)


def tile_tokens(
    stored_as: Any, fast: bool, rows: float, bn: int, steps: int, most: int,
    of_bias: str | None = None, gate: str | None = None,
) -> int:  # fmt: skip
    """The tokens of a tile, up to `most`, with which an expert of `rows` rows should take the
    fewest cycles."""

    chances = likely_rows(rows)

    def cycles(bm: int) -> float:
        narrow, found = narrow_tokens(bm, of_bias, gate), 0.0
        each = {
            n: steps * stage_cycles(stored_as, fast, bn, n) + H200_TILE_END for n in (narrow, bm)
        }
        for r, likely in chances:
            tiles = ceil_div(r, bm)
            found += likely * tiles * each[narrow if r <= tiles * narrow else bm]
        return found

    return min((bm for bm in TOKENS if bm <= most), key=cycles)


def launches(
    request: ExpertsRequest, given: ExpertsOperands, machine: Machine, fast: bool = False
) -> tuple[Launch, ...]:
    """All launches: the routing, the pass that sorts A and rounds it, to int8 where it is `fast`,
    the product, and the sum over a token's experts, of products in the dtype of C.

    Products that nothing is added to before, and whose range is a float32's, are multiplied by the
    scales of tokens in the sum."""
    types = routing.sizes(request.slots, request.experts)
    rows, offsets, places = (machine.empty(*one) for one in types)
    activations, passes = sorted_rows(
        given.a, places, request.slots, machine, ordered=request.follows, fast=fast
    )
    before = routing.launch(given.ids, rows, offsets, places), *passes
    if request.router is None:
        return *before, product(request, given, activations, rows, offsets, given.out, fast)
    shape = request.tokens, request.chosen, request.n
    c, scales = machine.empty(shape, array_dtype(request.c)), None
    if activations[1:] and request.bias is None and request.c != "float16":
        scales, activations = activations[1], activations[:1]
    return (
        *before,
        product(request, given, activations, rows, offsets, c, fast),
        weighted.launch(c, given.router, given.out, places, scales),
    )


def product(
    request: ExpertsRequest, given: ExpertsOperands, activations: tuple[Any, ...], rows: Any,
    offsets: Any, c: Any, fast: bool,
) -> Launch:  # fmt: skip
    """The launch of the products alone, of what `routing` made of ids and `sorted_rows` of A."""
    stored_as: Any = (byte_storage_format if fast else storage_format)(FORMATS[request.format])
    a, *scales = activations
    steps, groups = ceil_div(request.k, TILE_K), request.row_tiles // TILE_GROUP
    bn = 2 * HALF if request.n > HALF or request.gate else HALF
    each, gated = request.slots / request.experts, request.gate is not None
    most = most_tokens(stored_as, fast, bool(scales), gated, request.bias is not None)
    bm = tile_tokens(stored_as, fast, each, bn, steps, most, request.bias, request.gate)
    ordered = request.leads or request.router is not None
    kinds = dtype_name(a), dtype_name(c), bool(scales), request.bias, request.gate
    for stages, staging in product_of(range(STAGES, 1, -1), STAGINGS):
        stagger = min(STAGGER, stages - 2)
        run, shared_bytes = kernel(stored_as, *kinds, ordered, (bn, bm), stages, stagger, staging)
        shared_bytes += table_bytes(request.experts)
        if shared_bytes <= shared_memory():
            break
    sizes = tuple(map(np.int32, (request.experts, steps, groups, request.outputs)))
    unused = given.row_scales  # where there are no token scales, or no bias
    args = (
        TensorMap(a, (bm, BOX_ROW if fast else BOX_K)), given.packed, given.row_scales,
        scales[0] if scales else unused, unused if given.bias is None else given.bias, c, rows,
        offsets, sizes,
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
    rows=H200_FAST_ROWS,
    most_k=INT8_MOST_K,
)
