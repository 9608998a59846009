"""Step 10: stream_k - every thread block multiplies the same share, whatever the shape.

What is new
    The tiles of C, each with its steps along K, are laid end to end, and every block takes an equal
    range of that line. A step of a tile is a *work item*. A range may begin and end within a tile.
    Then several blocks are *contributors* to the tile: each stores its partial sums and counts
    itself at the tile's counter, and the last to arrive adds up all of them. Five blocks, four
    tiles of 16 steps, 13 work items each and 12 for the last:

                   tile 0          tile 1          tile 2          tile 3
        steps |---------------|---------------|---------------|---------------|
        block 0000000000000111111111111122222222222223333333333333444444444444
        added up by last of 0, 1    last of 1, 2    last of 2, 3    last of 3, 4

    Which blocks contribute to a tile follows from its first and last work item: a quotient each. A
    range has two parts of tiles at most, so a block has two slots for partial sums:

        slot 0    a tile that another block has begun      block 1: steps 13 to 15 of tile 0
        slot 1    a tile that it begins and others end     block 1: steps 0 to 9 of tile 1

    The last to arrive adds in the order of K, whoever it is: the same bits in every run. It also
    sets the counter back to zero for the next launch. No block waits for another.
Why it should help
    With 128 tokens and 4096 features step 9 has 64 tiles for the 264 blocks that 132 SMs hold: half
    of the SMs are idle, the others have one block each. Here 256 blocks share them. At K = 14336
    that is 28 steps of 2840 cycles, at K = 4096, in smaller tiles, 16 of 1580; and 11000 or 6000
    cycles for partial sums, 6000 for both ends. Predicted: 54 us where step 9 takes 109, 2.0x, and
    20.7 where it takes 33.7, 1.6x. With 512 tokens 256 whole tiles keep 97 % of 264 blocks busy.
What it costs
    Scratch memory for two tiles a block, which its range begins and ends in; traffic to the L2.
Machine code
    As step 9, and a fence (MEMBAR) and an atomic (ATOMG) for the counter.
Prerequisites
    Step 9: its loop stands here word for word, inside another over the tiles of a range.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32

from qformats import BLOCK, FORMATS, Format
from qformats.repack import CHUNK, TILE_GROUP, TILE_K, TILE_ROWS, tiles
from steps.blocks.integers import integer_weights
from steps.blocks.q8_1 import q8_1_mma_order
from steps.contract import Family, Launch, Shape, Step, ceil_div, multiprocessors, shared_memory
from steps.instructions import (
    as_bits,
    as_float,
    cp_async_4,
    cp_async_16,
    cp_async_commit,
    cp_async_wait,
    fence,
    ldmatrix_x4,
    load_f32,
    load_f32x4,
    load_u16,
    load_u32x4,
    mma_m16n8k8_tf32,
    mma_m16n8k32_s8,
    mma_m16n8k32_u8,
    store_f32,
    store_f32x4,
)

BLOCK_N: Final = TILE_GROUP * TILE_ROWS  # features: 128, a group of packed tiles
WARP_N: Final = 32  # features of a warp
ROW_TILES: Final = WARP_N // TILE_ROWS  # packed tiles of a warp: 2
BLOCKS: Final = TILE_K // BLOCK  # of K in a stage: 4
CHUNKS: Final = TILE_K // CHUNK  # of 16 K of a token in a stage: 8
THREADS: Final = 128  # four warps, one for each scheduler of an SM
BLOCKS_PER_SM: Final = 2  # as many as registers allow in tiles of 64 tokens
MOST_STAGES: Final = 4  # of the ring; more hide nothing further
MOST_CONTRIBUTORS: Final = 8  # to a tile: partial sums of more would take longer to add up
TF32: Final = 0xFFFFE000  # the bits of a float32 that a tf32 keeps

# A stage, 128 K:
#
#     weights   8 fragment-packed tiles, in one piece as they lie in memory (qformats.repack.tiles)
#     codes     int8 [8 chunks][token][16 K]
#     d         float32 [4 blocks][token]
#     s         float32 [4 blocks][token], of Q4_1 and Q5_1. A warp reads those of 8 tokens of all
#               four blocks at once. With 8 floats left free after each block, they are in 32 banks


@cuda.jit(device=True, forceinline=True)
def place_of(token):
    """Where a token's d lies among those of its block of K. Tokens 2t, 2t + 1, 2t + 8 and 2t + 9 of
    16 are side by side: a lane loads all four at once."""
    return (token & 0x31) | (token & 6) << 1 | (token >> 2 & 2)


@cache
def kernel(format_name: str, block_m: int, most_bytes: int) -> tuple[Any, int]:
    """(the kernel for tiles of `block_m` tokens, 32 or 64, with a ring of `most_bytes` at most; its
    bytes of shared memory)."""
    weights = integer_weights(format_name)
    tile_bytes, has_minimum = weights.tile_bytes, weights.has_minimum
    load, fragment, scale, minimum = weights.load, weights.fragment, weights.scale, weights.minimum
    scales_at, minima_at = weights.scales_at, weights.minima_at
    mma = mma_m16n8k32_u8 if has_minimum else mma_m16n8k32_s8
    n_words = FORMATS[format_name].bits  # 4, 5 or 8 that a lane loads of half a packed tile
    token_groups = block_m // 8  # of 8 tokens, the columns of an mma
    n_acc = 4 * ROW_TILES * token_groups  # registers for sums
    n_b = 2 * token_groups  # registers for B fragments of a block of K
    n_features = 2 * ROW_TILES  # features of a lane
    # Bytes of the parts of a stage, and where they begin
    w_bytes = TILE_GROUP * tile_bytes
    d_begin = w_bytes + block_m * TILE_K
    s_begin = d_begin + 4 * BLOCKS * block_m
    s_block_bytes = 4 * (block_m + 8)  # from s of one block to s of the next
    stage_bytes = s_begin + (BLOCKS * s_block_bytes if has_minimum else 0)
    stages = max(2, min(MOST_STAGES, most_bytes // stage_bytes))
    last_stage_at = (stages - 1) * stage_bytes
    # Bytes of the weights that go by 16, as many for every thread; the rest goes by 4
    w_by_16 = w_bytes // (THREADS * CHUNK) * (THREADS * CHUNK)
    at_once = THREADS // block_m  # chunks or blocks of every token that all threads copy at once

    wait_for_first, wait_for_next = cp_async_wait(stages - 1), cp_async_wait(stages - 2)

    @cuda.jit(device=True, forceinline=True)
    def quotient(x, y):
        """x // y of numbers that are not negative, unsigned: a signed one takes more code."""
        return int32(uint32(x) // uint32(y))

    @cuda.jit(device=True, forceinline=True)
    def first_source(m0, n0, first_step, M, steps, t):
        """Where this thread reads its part of a step of the tile at token m0 and feature n0: a
        byte of w, elements of qa [K/16, M, 16] and of ds [K/32, M, 2]. Tokens beyond M, where
        nobody looks, repeat the last one; beyond K everything is zero."""
        first, m = int64(t // block_m), min(int32(m0 + t % block_m), M - 1)
        w_at = int64(int32(n0 // BLOCK_N * steps + first_step)) * w_bytes + t * CHUNK
        chunk, pair = (CHUNKS * first_step + first) * M + m, (BLOCKS * first_step + first) * M + m
        return w_at, chunk * CHUNK, pair * 2

    @cuda.jit(device=True, forceinline=True)
    def next_source(source, M):
        """The same for the next 128 K. A sum costs less than to find all three anew."""
        w_at, qa_at, ds_at = source
        return w_at + w_bytes, qa_at + int64(M) * TILE_K, ds_at + int64(M) * (2 * BLOCKS)

    @cuda.jit(device=True, forceinline=True)
    def copy_stage(shared, stage_at, w, qa, ds, source, step, steps, M, t):
        """Issue the copies of 128 K, step `step` of `steps`, to the stage at byte `stage_at`, and
        close them into a group. Beyond the last step a group is empty: waits count groups."""
        if step < steps:
            w_at, qa_at, ds_at = source
            # --- W: one piece of memory. The last 1 KB of Q4_0, Q5_0 and Q8_0 goes by 4
            # bytes: 16 for half of the threads would need a branch, which costs more
            for i in range(0, w_by_16, THREADS * CHUNK):
                cp_async_16(shared, stage_at + i + t * CHUNK, w, w_at + i)
            for i in range(w_by_16, w_bytes, THREADS * 4):
                # w_at has 16 t, and a thread's 4 bytes are at 4 t
                cp_async_4(shared, stage_at + i + t * 4, w, w_at + (i - t * (CHUNK - 4)))
            # --- A: each turn copies `at_once` chunks of every token, one a thread; then the d
            # (and s) of `at_once` blocks likewise
            for i in range(0, CHUNKS, at_once):
                destination = stage_at + w_bytes + (i * block_m + t) * CHUNK
                cp_async_16(shared, destination, qa, qa_at + int64(M * CHUNK) * i)
            for i in range(0, BLOCKS, at_once):
                place = (i + t // block_m) * block_m + place_of(t % block_m)
                destination = stage_at + d_begin + 4 * place
                cp_async_4(shared, destination, ds, ds_at + int64(M * 2) * i)
                if has_minimum:
                    destination = stage_at + s_begin + (i + t // block_m) * s_block_bytes
                    destination += t % block_m * 4
                    cp_async_4(shared, destination, ds, ds_at + int64(M * 2) * i + 1)
        cp_async_commit()

    @cuda.jit(device=True, forceinline=True)
    def load_weights(words, shared, tile_at, lane, half):
        """The words of 64 K of the warp's packed tiles, which begin at byte `tile_at`."""
        for i in range(ROW_TILES):
            x = load(shared, tile_at + i * tile_bytes, lane, half)
            for j in range(n_words):
                words[i, j] = x[j]

    @cuda.jit(device=True, forceinline=True)
    def load_scales(scales, shared, tile_at, lane):
        """The scales of 128 K of the warp's packed tiles."""
        for i in range(ROW_TILES):
            x = load_u32x4(shared, tile_at + i * tile_bytes + scales_at + 16 * (lane >> 2))
            scales[i, 0], scales[i, 1], scales[i, 2], scales[i, 3] = x

    @cuda.jit(device=True, forceinline=True)
    def load_tokens(b, shared, chunk_at, block):
        """The B fragments of a block of K. `chunk_at`: the byte of this lane's row in
        block 0."""
        for j in range(0, n_b, 4):
            x = ldmatrix_x4(shared, chunk_at + (2 * block * block_m + 4 * j) * CHUNK)
            b[j], b[j + 1], b[j + 2], b[j + 3] = x

    @cuda.jit(device=True, forceinline=True)
    def load_token_scales(token_scales, shared, d_at, block):
        """d of the tokens of this lane's sums, for a block of K. `d_at`: the byte of its first in
        block 0."""
        for j in range(0, n_b, 4):
            x = load_f32x4(shared, d_at + 4 * (block * block_m + 4 * j))
            token_scales[j], token_scales[j + 1], token_scales[j + 2], token_scales[j + 3] = x

    @cuda.jit(device=True, forceinline=True)
    def multiply(acc, words, b, token_scales, scales, block):
        """acc += one block of K: 32 features times the tokens of the B fragments."""
        for i in range(ROW_TILES):
            # --- codes -> bytes
            a0, a1, a2, a3 = fragment(words[i], block & 1)
            d_g = scale(scales[i, block // 2], block & 1)
            d_g8 = scale(scales[i, 2 + block // 2], block & 1)
            for j in range(token_groups):
                # --- registers -> tensor cores
                c0, c1, c2, c3 = mma(a0, a1, a2, a3, b[2 * j], b[2 * j + 1], 0, 0, 0, 0)

                # --- scale the four sums, add them up
                r = 4 * (i * token_groups + j)
                da, da1 = token_scales[2 * j], token_scales[2 * j + 1]
                acc[r] += d_g * da * float32(c0)
                acc[r + 1] += d_g * da1 * float32(c1)
                acc[r + 2] += d_g8 * da * float32(c2)
                acc[r + 3] += d_g8 * da1 * float32(c3)

    @cuda.jit(device=True, forceinline=True)
    def add_minima(acc, shared, tile_at, s_at, lane):
        """acc += m * s of all four blocks, by one tf32 mma: s is the sum of two tf32, m is one.
        `s_at`: the byte of s of block t and token g."""
        for i in range(ROW_TILES):
            first = tile_at + i * tile_bytes + minima_at + 16 * (lane >> 2) + 2 * (lane & 3)
            min_g = as_bits(minimum(load_u16(shared, first), 0))  # of row g
            min_g8 = as_bits(minimum(load_u16(shared, first + 8), 0))
            for j in range(token_groups):
                s = load_f32(shared, s_at + 32 * j)
                upper = as_bits(s) & uint32(TF32)
                lower = as_bits(s - as_float(upper))
                r = 4 * (i * token_groups + j)
                x0, x1, x2, x3 = acc[r], acc[r + 1], acc[r + 2], acc[r + 3]
                y = mma_m16n8k8_tf32(min_g, min_g8, min_g, min_g8, upper, lower, x0, x1, x2, x3)
                acc[r], acc[r + 1], acc[r + 2], acc[r + 3] = y

    @cuda.jit(device=True, forceinline=True)
    def partials_at(block, first_block, t):
        """Where this thread's sums of a block begin among the partial sums. A block has two slots:
        1 for a tile of which it does the first steps, 0 for one that others have begun."""
        slot = int32(2 * block + (1 if block == first_block else 0))
        return int32(slot * (n_acc * THREADS) + 4 * t)

    @cuda.jit(device=True, forceinline=True)
    def add_partials(acc, partials, first_block, last_block, t):
        """acc = the partial sums of blocks `first_block` to `last_block`, added in this order."""
        sums_at = partials_at(first_block, first_block, t)
        for r in range(0, n_acc, 4):
            acc[r], acc[r + 1], acc[r + 2], acc[r + 3] = load_f32x4(partials, sums_at + r * THREADS)
        for block in range(int32(first_block + 1), int32(last_block + 1)):
            sums_at = partials_at(block, first_block, t)
            for r in range(0, n_acc, 4):
                x = load_f32x4(partials, sums_at + r * THREADS)
                acc[r] += x[0]
                acc[r + 1] += x[1]
                acc[r + 2] += x[2]
                acc[r + 3] += x[3]

    @cuda.jit(launch_bounds=(THREADS, BLOCKS_PER_SM))
    def w4a8_stream_k(w, row_scales, qa, ds, c, steps, share, partials, arrived):
        """c[M, N] = a @ dequantize(w)[N, K]^T, in `steps` of 128 K; w and row_scales of
        qformats.repack.tiles. a is Q8_1, K-outermost: qa int8 [K/16, M, 16], the codes, and ds
        float32 [K/32, M, 2]: of a block its scale d, and s, d times the sum of its codes. A thread
        block does `share` work items: steps of 128 K of a tile."""
        shared = cuda.shared.array(0, uint8, alignment=128)  # all of the dynamic shared memory
        acc = cuda.local.array(n_acc, float32)
        words = cuda.local.array((ROW_TILES, n_words), uint32)
        scales = cuda.local.array((ROW_TILES, 4), uint32)
        b_even, b_odd = cuda.local.array(n_b, uint32), cuda.local.array(n_b, uint32)
        token_scales = cuda.local.array(n_b, float32)
        earlier = cuda.shared.array(1, int32)  # contributors that arrived before this block
        t, steps, share = int32(cuda.threadIdx.x), int32(steps), int32(share)
        warp, lane, M, N = t >> 5, t & 31, int32(c.shape[0]), int32(c.shape[1])
        tiles_n = int32((N + (BLOCK_N - 1)) // BLOCK_N)
        items = int32((M + (block_m - 1)) // block_m * tiles_n * steps)
        # Where in a stage this lane reads. Lane 8i + r addresses row r of ldmatrix's matrix i:
        # chunk i & 1, tokens from 8 (i >> 1) on
        tile_at = warp * (ROW_TILES * tile_bytes)
        chunk_at = w_bytes + ((lane >> 3 & 1) * block_m + (lane >> 4) * 8 + (lane & 7)) * CHUNK
        d_at = d_begin + 16 * (lane & 3)
        s_at = s_begin + (lane & 3) * s_block_bytes + 4 * (lane >> 2)

        # --- this block's range of work items, from `item` to `end`
        item = int32(cuda.blockIdx.x * share)
        end = min(int32(item + share), items)
        while item < end:
            # --- its part of a tile: `count` steps, from step `first_step` on
            tile_id = quotient(item, steps)
            first_step = int32(item - tile_id * steps)
            count = min(int32(steps - first_step), int32(end - item))
            tile_m = quotient(tile_id, tiles_n)
            m0, n0 = int32(tile_m * block_m), int32((tile_id - tile_m * tiles_n) * BLOCK_N)
            for i in range(n_acc):
                acc[i] = 0

            # --- issue the copies of all stages
            source = first_source(m0, n0, first_step, M, steps, t)
            for step in range(stages):
                copy_stage(shared, step * stage_bytes, w, qa, ds, source, step, count, M, t)
                source = next_source(source, M)

            # --- wait for the first stage, load its first fragments
            wait_for_first()
            cuda.syncthreads()
            stage_at = int32(0)  # its first byte in the ring
            load_weights(words, shared, tile_at, lane, 0)
            load_scales(scales, shared, tile_at, lane)
            load_tokens(b_even, shared, chunk_at, 0)
            for step in range(count):
                # --- multiply, while the tokens of the next block are loaded
                load_token_scales(token_scales, shared, stage_at + d_at, 0)
                load_tokens(b_odd, shared, stage_at + chunk_at, 1)
                multiply(acc, words, b_even, token_scales, scales, 0)
                load_token_scales(token_scales, shared, stage_at + d_at, 1)
                load_tokens(b_even, shared, stage_at + chunk_at, 2)
                multiply(acc, words, b_odd, token_scales, scales, 1)
                load_weights(words, shared, stage_at + tile_at, lane, 1)
                load_token_scales(token_scales, shared, stage_at + d_at, 2)
                load_tokens(b_odd, shared, stage_at + chunk_at, 3)
                multiply(acc, words, b_even, token_scales, scales, 2)
                if has_minimum:
                    add_minima(acc, shared, stage_at + tile_at, stage_at + s_at, lane)
                load_token_scales(token_scales, shared, stage_at + d_at, 3)

                # --- wait for the next stage, and until all have read this one: load the next first
                # fragments, refill this one
                wait_for_next()  # what this thread has copied: all but its newest stages - 2 groups
                cuda.syncthreads()
                previous_at = stage_at
                stage_at = int32(stage_at + stage_bytes if stage_at < last_stage_at else 0)
                load_tokens(b_even, shared, stage_at + chunk_at, 0)
                copy_stage(
                    shared, previous_at, w, qa, ds, source, int32(step + stages), count, M, t
                )
                source = next_source(source, M)

                # --- multiply the last block, load the next stage's first weights
                multiply(acc, words, b_odd, token_scales, scales, 3)
                load_weights(words, shared, stage_at + tile_at, lane, 0)
                load_scales(scales, shared, stage_at + tile_at, lane)

            # --- a part of a tile: store partial sums, count this block at the tile's counter. The
            # last to arrive adds up the sums of all
            complete = count == steps
            if not complete:
                first_block = quotient(tile_id * steps, share)
                last_block = quotient(tile_id * steps + (steps - 1), share)
                sums_at = partials_at(int32(cuda.blockIdx.x), first_block, t)
                for r in range(0, n_acc, 4):
                    place = sums_at + r * THREADS
                    store_f32x4(partials, place, acc[r], acc[r + 1], acc[r + 2], acc[r + 3])
                fence()  # others see the sums before they see the counter
                cuda.syncthreads()
                if t == 0:
                    earlier[0] = cuda.atomic.add(arrived, tile_id, 1)
                cuda.syncthreads()
                complete = earlier[0] == last_block - first_block
                if complete:
                    fence()
                    add_partials(acc, partials, first_block, last_block, t)
                    if t == 0:
                        arrived[tile_id] = 0  # for the next launch

            if complete:
                # --- registers -> global. The compiler keeps a load behind the stores above it, so
                # the row scales are loaded first; they go on to the end of the tile
                m, n = int32(m0 + 2 * (lane & 3)), int32(n0 + WARP_N * warp + (lane >> 2))
                lane_row_scales = cuda.local.array(n_features, float32)
                for i in range(n_features):
                    lane_row_scales[i] = load_f32(row_scales, n + 8 * i)
                for j in range(token_groups):
                    for odd in range(2):
                        token = int32(m + 8 * j + odd)
                        for i in range(n_features):
                            feature = int32(n + 8 * i)
                            if token < M and feature < N:
                                x = acc[4 * (i // 2 * token_groups + j) + 2 * (i % 2) + odd]
                                store_f32(c, int64(token) * N + feature, x * lane_row_scales[i])
            item = int32(item + count)
            cuda.syncthreads()  # all have read the ring

    return w4a8_stream_k, stages * stage_bytes


def schedule(shape: Shape) -> tuple[int, int, int, int]:
    """(tokens of a tile, tiles, work items of a block, thread blocks)."""
    # Tiles of 32 tokens need fewer contributors each, but a step of one takes more than half of
    # the time of a step of 64
    block_m = 32 if shape.m <= 128 and shape.k <= 8192 else 64
    tiles_c = ceil_div(shape.n, BLOCK_N) * ceil_div(shape.m, block_m)
    steps, blocks = ceil_div(shape.k, TILE_K), BLOCKS_PER_SM * multiprocessors()
    if tiles_c <= blocks:  # as many for each: ranges end with tiles, if K divides so
        blocks = tiles_c * min(blocks // tiles_c, steps, MOST_CONTRIBUTORS)
    share = ceil_div(tiles_c * steps, blocks)
    return block_m, tiles_c, share, ceil_div(tiles_c * steps, share)


def scratch(fmt: Format, family: Family, shape: Shape) -> tuple[tuple[tuple[int, ...], Any], ...]:
    """Partial sums, two slots of a tile for each block, and an arrival counter for each tile."""
    block_m, tiles_c, _, blocks = schedule(shape)
    return ((2 * blocks * block_m * BLOCK_N,), np.float32), ((tiles_c,), np.int32)


def launch(
    fmt: Format, family: Family, shape: Shape, weights: tuple, activations: tuple, out: Any,
    scratch: tuple,
) -> Launch:  # fmt: skip
    block_m, _, share, blocks = schedule(shape)
    # an SM keeps 1 KB of shared memory for each thread block, beside what it can give one
    most_bytes = (shared_memory() + 1024) // BLOCKS_PER_SM - 1024 - 16  # 16 for `earlier`
    run, shared_bytes = kernel(fmt.name, block_m, most_bytes)
    args = (*weights, *activations, out, ceil_div(shape.k, TILE_K), share, *scratch)
    return Launch(run, (blocks,), (THREADS,), args, shared_bytes)


STEP = Step(
    number=10,
    name="step10_stream_k",
    title="stream-K: an equal share of all tiles for every thread block",
    branch="int8",
    families=("A8",),
    parents={"A8": 9},
    homes=((128, 4096, 4096), (128, 4096, 14336)),  # where whole tiles leave SMs idle
    unit={"A8": "tensor_int8"},
    pack=tiles,
    activations={"A8": q8_1_mma_order},
    launch=launch,
    scratch=scratch,
    min_cc=(8, 0),
    idea=("cuda.atomic.add", "fence", "partials_at", "add_partials"),
    contains={"A8": ("IMMA", "LDGSTS.E.BYPASS.128", "LDSM.16.M88.4", "BAR.SYNC", "MEMBAR")},
    forbids={"A8": ("IDP",)},
    chosen_untuned=True,
)
