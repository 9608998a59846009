"""Int8 tensor cores, a stream-K share for every thread block.

Taught by `steps.step10_stream_k`; here with all formats, dtypes and biases that callers use.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
from numba import cuda, float32, int32, uint8, uint32

from qformats import Format
from qformats.repack import CHUNK, TILE_K, tiles
from steps.blocks.q8_1 import q8_1_mma_order
from steps.contract import Family, Kernel, Launch, Shape, ceil_div, multiprocessors
from steps.instructions import (
    cp_async_4,
    cp_async_16,
    cp_async_commit,
    cp_async_wait,
    fence,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    load_f32x4,
    store_f32x4,
)
from steps.kernels.parts.epilogue.bias import bias_operand
from steps.kernels.parts.epilogue.mma import write_sums
from steps.kernels.parts.split_k_reduction import count_block_arrival
from steps.kernels.parts.stream_k import scheduler, work_rate
from steps.kernels.parts.weights.codes import tile_format
from steps.kernels.prefill.shared_stage import BN, THREADS, ring_stages, stage_copies, stage_layout
from steps.kernels.prefill.stream_k_tiles import BLOCKS_PER_SM, least_shared_bytes, tiling
from steps.kernels.prefill.warp_tile import A_WORDS, ROW_TILES, SCALE_WORDS, WARP_N, warp_tile

STAGES: Final = 4  # of the ring, at most, as in step 9
IN_FLIGHT: Final = 64  # registers for partial sums that are being loaded


@cache
def kernel(fmt: Format, bm: int, stages: int, of_bias: str | None) -> Any:
    """The kernel for tiles of `bm` tokens, a ring of `stages`, a bias of `of_bias` or none."""
    columns, n_b = bm // 8, bm // 4
    n_acc = 4 * ROW_TILES * columns
    tile, stage_bytes = tile_format(fmt.name), stage_layout(fmt, bm).stage_bytes
    minimum, warp_bytes = tile.minimum, ROW_TILES * tile.tile_bytes
    ring_bytes = stages * stage_bytes
    copies = stage_copies(fmt, bm, cp_async_16, cp_async_4)
    first_source, next_source, copy_weights, copy_tokens = copies
    wt = warp_tile(fmt, bm)
    load_weights, load_scales, load_tokens = wt.load_weights, wt.load_scales, wt.load_tokens
    load_token_scales, multiply, add_minima = wt.load_token_scales, wt.multiply, wt.add_minima
    write = write_sums(ROW_TILES, columns, of_bias)
    wait_for_first, wait_for_next = cp_async_wait(stages - 1), cp_async_wait(stages - 2)
    find = scheduler(BN, bm)
    first_work, next_work = find.first_work, find.next_work
    tile_origin, contributors = find.tile_origin, find.contributors
    at_once = IN_FLIGHT // n_acc  # contributors whose partial sums are loaded together

    @cuda.jit(device=True, forceinline=True)
    def partial_offset(block, first, partial_slot, t):
        """Where a block's partial sums lie: its slot 0; of a tile's first block `partial_slot`."""
        slot = int32(2 * block + (partial_slot if block == first else 0))
        return int32(slot * n_acc * THREADS + 4 * t)

    @cuda.jit(device=True, forceinline=True)
    def add_partials(partials, first, last, partial_slot, t, acc):
        """acc = the partial sums of blocks `first` to `last`, added in this order."""
        loaded = cuda.local.array(IN_FLIGHT, float32)
        for r in range(n_acc):
            acc[r] = 0
        for block in range(first, last + 1, at_once):
            for i in range(at_once):
                q = i * n_acc
                offset = partial_offset(int32(min(block + i, last)), first, partial_slot, t)
                for r in range(0, n_acc, 4):
                    p = load_f32x4(partials, offset + r * THREADS)
                    loaded[q + r], loaded[q + r + 1] = p[0], p[1]
                    loaded[q + r + 2], loaded[q + r + 3] = p[2], p[3]
            for i in range(at_once):
                if block + i <= last:
                    for r in range(n_acc):
                        acc[r] += loaded[i * n_acc + r]

    @cuda.jit(launch_bounds=(THREADS, BLOCKS_PER_SM[bm]))
    def w4a8_stream_k(w, row_scales, bias, qa, ds, c, steps, schedule, partials, arrived):
        """c[M, N] = a @ dequantize(w)[N, K]^T; operands as in step 9, schedule of `work_rate`."""
        ring = cuda.shared.array(0, uint8, alignment=128)
        earlier = cuda.shared.array(1, int32)  # contributors that arrived before this block
        acc = cuda.local.array(n_acc, float32)
        a = cuda.local.array(A_WORDS, uint32)
        scales = cuda.local.array(SCALE_WORDS, uint32)
        b_even = cuda.local.array(n_b, uint32)
        b_odd = cuda.local.array(n_b, uint32)
        token_scales = cuda.local.array(n_b, float32)
        t, M, N = int32(cuda.threadIdx.x), int32(c.shape[0]), int32(c.shape[1])
        warp, lane, steps = t >> 5, t & 31, int32(steps)
        weights_at, scales_at = warp * warp_bytes, 16 * (lane & 3)  # reads in a stage, see step 8
        row_at = ((lane >> 3 & 1) * bm + (lane >> 4) * 8 + (lane & 7)) * CHUNK
        shared_tiles, rate = schedule
        tiles_n = int32((N + BN - 1) // BN)
        tiles_c = int32((M + bm - 1) // bm * tiles_n)
        griddepcontrol_launch_dependents()

        # the block's range of the line: `count` steps of a tile from step k0 on, `left` behind
        tile_id, k0, count, left = first_work(shared_tiles, rate, steps)
        while tile_id < tiles_c:
            m0, n0 = tile_origin(tile_id, tiles_n)
            for i in range(n_acc):
                acc[i] = 0

            # multiply, as in step 9 (ahead, source: where weights and tokens are copied from)
            ahead = source = first_source(t, m0, n0, k0, steps, M)
            for step in range(stages):
                if step < count:
                    copy_weights(ring, step * stage_bytes + 16 * t, w, ahead)
                    ahead = next_source(ahead, M)
            griddepcontrol_wait()  # the launch before this one quantizes the tokens
            for step in range(stages):
                if step < count:
                    copy_tokens(ring, step * stage_bytes + 16 * t, qa, ds, source, M)
                    source = next_source(source, M)
                cp_async_commit()
            wait_for_first()
            cuda.syncthreads()
            stage, to = int32(0), int32(16 * t)
            load_weights(a, ring, weights_at, lane, 0)
            load_scales(scales, ring, weights_at, lane)
            load_tokens(b_even, ring, row_at, 0)
            for step in range(count):
                load_token_scales(token_scales, ring, stage + scales_at, 0)
                load_tokens(b_odd, ring, stage + row_at, 1)
                multiply(acc, a, b_even, token_scales, scales, 0)
                load_token_scales(token_scales, ring, stage + scales_at, 1)
                load_tokens(b_even, ring, stage + row_at, 2)
                multiply(acc, a, b_odd, token_scales, scales, 1)
                load_weights(a, ring, stage + weights_at, lane, 1)
                load_token_scales(token_scales, ring, stage + scales_at, 2)
                load_tokens(b_odd, ring, stage + row_at, 3)
                multiply(acc, a, b_even, token_scales, scales, 2)
                if minimum:
                    add_minima(acc, ring, stage, stage + weights_at, lane)
                load_token_scales(token_scales, ring, stage + scales_at, 3)
                wait_for_next()
                cuda.syncthreads()
                stage = int32(stage + stage_bytes)
                if stage == ring_bytes:
                    stage = int32(0)
                load_tokens(b_even, ring, stage + row_at, 0)
                if step + stages < count:
                    copy_weights(ring, to, w, source)
                    copy_tokens(ring, to, qa, ds, source, M)
                    source = next_source(source, M)
                cp_async_commit()
                to = int32(stage + 16 * t)
                multiply(acc, a, b_odd, token_scales, scales, 3)
                load_weights(a, ring, stage + weights_at, lane, 0)
                load_scales(scales, ring, stage + weights_at, lane)

            # a part of a tile: store partial sums; the last to arrive adds up all of them
            complete = count == steps
            if not complete:
                first, last, partial_slot = contributors(tile_id, shared_tiles, rate, steps)
                offset = partial_offset(int32(cuda.blockIdx.x), first, partial_slot, t)
                for r in range(0, n_acc, 4):
                    sums = acc[r], acc[r + 1], acc[r + 2], acc[r + 3]
                    store_f32x4(partials, offset + r * THREADS, *sums)
                count_block_arrival(arrived, tile_id, earlier, t)
                complete = earlier[0] == last - first
                if complete:
                    fence()
                    add_partials(partials, first, last, partial_slot, t, acc)
                    if t == 0:
                        arrived[tile_id] = 0  # for the next launch
            if complete:
                write(c, m0, n0 + WARP_N * warp, lane, acc, row_scales, bias)
            cuda.syncthreads()  # all have read the ring
            tile_id, k0, count, left = next_work(tile_id, left, shared_tiles, steps)

    return w4a8_stream_k


def scratch(fmt: Format, family: Family, shape: Shape) -> tuple[tuple[tuple[int, ...], Any], ...]:
    """Partial sums, two slots of a tile for each block, and an arrival counter for each tile."""
    bm, tiles_c, blocks, shared_tiles = tiling(fmt, shape, multiprocessors())
    partials = 2 * blocks * bm * BN if shared_tiles else 4
    return ((partials,), np.float32), ((tiles_c,), np.int32)


def launch(
    fmt: Format, family: Family, shape: Shape, weights: tuple, activations: tuple, out: Any,
    scratch: tuple,
) -> Launch:  # fmt: skip
    bm, _, blocks, shared_tiles = tiling(fmt, shape, multiprocessors())
    stages, ring_bytes = ring_stages(fmt, bm, BLOCKS_PER_SM[bm], STAGES)
    # at least so much that an SM holds its even part of the blocks and no more
    shared_bytes = max(ring_bytes, least_shared_bytes(blocks, multiprocessors()))
    of_bias, weights = bias_operand(weights)
    run, steps = kernel(fmt, bm, stages, of_bias), ceil_div(shape.k, TILE_K)
    args = (*weights, *activations, out, steps, work_rate(shared_tiles, steps, blocks), *scratch)
    return Launch(run, (blocks,), (THREADS,), args, shared_bytes, overlap=True)


KERNEL = Kernel(
    number=10,
    name="mma_int8",
    title="stream-K: an equal share of all tiles for every thread block",
    families=("A8",),
    unit={"A8": "tensor_int8"},
    pack=tiles,
    activations={"A8": q8_1_mma_order},
    launch=launch,
    adds_bias=True,
    scratch=scratch,
    min_cc=(8, 0),
    chosen_untuned=True,
)
