"""Step 9: stream-K - every SM multiplies the same share, whatever the shape.

What is new
    The tiles of C, each with its steps along K, are laid end to end, and every thread block takes
    an equal stretch of that line instead of one tile. A stretch may end in the middle of a tile:
    then all that work on it leave their sums in scratch memory, and the one that comes last adds
    them up, always in the order of K: the same bits from run to run, whoever was last.
    How a tile is multiplied is as before, and read there: int8_tile in step08_async_pipeline.
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
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
from numba import cuda, float32, int32, int64, uint8

from qformats import Format
from qformats.repack import TILE_K, tiles
from steps.components.activations.layouts import q8_1_k_outermost
from steps.contract import Family, Launch, Shape, Step, ceil_div, multiprocessors, shared_memory
from steps.instructions import (
    cp_async_commit,
    fence,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    load_f32x4,
    store_f32x4,
)
from steps.step08_async_pipeline import BN, STAGES, WARP_M, WARP_N, WARPS_N, WARPS_PER_SM, int8_tile

TOKENS: Final = (128, 64, 32, 16)  # of a tile; 128 spares q4_1 and q5_1 registers
FEW: Final = 32  # tokens of a tile below which a warp's fragments are used too seldom
IN_FLIGHT: Final = 64  # registers for sums of others on their way
FULL: Final = 0.9  # share of the blocks' time: with so little to win tiles are kept whole


#                  tile 0          tile 1          tile 2          tile 3
#     K       |---------------|---------------|---------------|---------------|
#     block    000000000011111 111112222222222 333333333344444 444445555555555
#                        last of 0 and 1 adds     ... of 1 and 2 ...
#
# Nobody waits for anybody, so any number of blocks is right.
# The fewer the tokens, the lower the tiles.
def warps_per_sm(bm: int) -> int:
    """As many as their registers allow: twice as many with a quarter of the sums."""
    return 2 * WARPS_PER_SM if bm == TOKENS[-1] else WARPS_PER_SM


@cache
def kernel(fmt: Format, bm: int, stages: int) -> Any:
    """(the kernel for tiles of `bm` tokens and a ring of `stages`, threads, bytes of one stage)"""
    # the tile is step 8's
    (threads, tokens, n_acc, stage_bytes), functions = int8_tile(fmt, bm, stages)
    origin, copy_weights, copy_tokens, multiply_stages, write = functions
    at_once = IN_FLIGHT // n_acc  # sums of other blocks that are loaded together

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

    @cuda.jit(launch_bounds=(threads, 32 * warps_per_sm(bm) // threads))
    def w4a8_stream_k(w, factors, qa, ds, c, steps, partials, arrived):
        """c[M, N] = a @ dequantize(w)[N, K]^T; w, factors: qformats.repack.tiles,
        a: K-outermost."""
        ring = cuda.shared.array(0, uint8, alignment=128)
        before = cuda.shared.array(1, int32)  # how many of a tile's blocks were done before this
        acc = cuda.local.array(n_acc, float32)
        M, N = int32(c.shape[0]), int32(c.shape[1])
        t = int32(cuda.threadIdx.x)
        warp, lane = t >> 5, t & 31
        column, first = warp % WARPS_N, warp // WARPS_N * tokens  # what this warp multiplies
        # the stretch of this block; a unit is one step of one tile, K fastest, then features
        tiles_n = int32((N + BN - 1) // BN)
        units = int32((M + bm - 1) // bm * tiles_n * steps)
        block = int32(cuda.blockIdx.x)
        begin, end = beginning(units, block), beginning(units, block + 1)
        griddepcontrol_launch_dependents()
        unit = begin
        while unit < end:
            tile = int32(unit // int32(steps))
            k0 = int32(unit - tile * steps)
            count = int32(min(steps - k0, end - unit))
            m0, n0 = int32(tile // tiles_n * bm), int32(tile % tiles_n * BN)
            source = origin(t, m0, n0, k0, steps, c)
            for i in range(n_acc):
                acc[i] = 0

            for step in range(stages):
                if step < count:
                    copy_weights(ring, step * stage_bytes, w, source, step)
            griddepcontrol_wait()  # the launch before this one quantizes the activations
            for step in range(stages):
                if step < count:
                    copy_tokens(ring, step * stage_bytes, qa, ds, source, step)
                cp_async_commit()
            multiply_stages(acc, ring, w, qa, ds, source, column, first, lane, count)

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
                write(c, m0 + first, n0 + WARP_N * column, lane, acc, factors)
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
    branch="int8",
    families=("A8",),
    parents={"A8": 8},
    homes=((128, 4096, 4096), (512, 4096, 14336)),  # where whole tiles leave SMs idle
    unit={"A8": "tensor_int8"},
    pack=tiles,
    activations=q8_1_k_outermost,
    launch=launch,
    scratch=scratch,
    min_cc=(8, 0),
    contains={"A8": ("IMMA", "LDGSTS.E.BYPASS.128", "LDSM.16.M88.4", "BAR.SYNC", "MEMBAR")},
    forbids={"A8": ("IDP",)},
    chosen_untuned=True,
)
