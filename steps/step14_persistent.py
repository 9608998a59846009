"""Step 14: persistent - one thread block for each SM, and every one multiplies an equal share.

What is new
    A thread block of step 13 multiplies one tile and ends. With 128 tokens and 4096 features there
    are 32 tiles of 128 x 128, so that 100 of 132 SMs would be idle, and step 13 takes tiles of 32
    tokens, each of which unpacks all weights again. Here tiles stay larger. All of them, each with
    its steps along K, are laid end to end, and every block takes an equal range of that line:
    stream-K, as in step 10. Where there are fewer tiles than SMs, the number of blocks is a
    multiple of the number of tiles. So the parts of a tile are equal and end together, if their
    number divides its steps.
    Four blocks, two tiles:

                   tile 0                              tile 1
        steps     |-----------------------------------|-----------------------------------|
        blocks     0000000000000000 1111111111111111   2222222222222222 3333333333333333
        C                           added up by the last of 0, 1        by the last of 2, 3

    Blocks that share a tile are its *contributors*. Each stores its partial sums and counts itself
    at the tile's counter; the last to arrive adds up all of them, in the order of K, so the bits
    are the same in every run. No block waits for another.
    A block stays on its SM, tile after tile: it is *persistent*. Its producer does not stop between
    tiles. While the consumers store a tile of C, it fills the ring for the next one. So the ring is
    not free for the tile of C, which passes through an area of its own, 32 tokens at a time:

        producer     [copies of tile 0 ][copies of tile 1 ] wait [copies ...
        consumers      [multiply tile 0 ][store][multiply tile 1 ][store]

    Launches *overlap*: the blocks of the next one begin where an SM is free, issue the copy of
    their first weights, which do not depend on this one, and wait for its end (griddepcontrol)
    before they touch A, C or the partial sums.
Why it should help
    With 128 tokens step 13 unpacks every weight four times. At K = 14336 four blocks share a tile
    of 128 x 128 here, and each weight is unpacked once: expect 2x. At K = 4096 a block would have
    eight steps and then as long a wait for the sums of four; so tiles have 64 tokens there, two
    blocks share one, and weights are unpacked twice: expect 12.1 us, 1.3x.
What it costs
    Scratch memory for two tiles of each block, one in which its range begins and one in which it
    ends, and their traffic to the L2. With 512 tokens there is a tile for each SM: nothing to gain.
Machine code
    As step 13, and a fence (MEMBAR) and an atomic (ATOMG) for the counter.
Prerequisites
    Steps 13 and 10 (stream-K, partial sums, arrival counter).
"""

from __future__ import annotations

from functools import cache
from math import gcd
from typing import Any, Final

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32

from qformats import Format
from qformats.repack import TILE_GROUP, TILE_K, TILE_ROWS, tiles
from steps.blocks.halves import half_weights
from steps.contract import Family, Launch, Shape, Step, ceil_div, multiprocessors, plain_rows
from steps.instructions import (
    BOX_K,
    TensorMap,
    barrier_sync,
    bulk_copy,
    fence,
    fence_mbarrier_init,
    floats_to_halves,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    load_f32,
    load_f32x4,
    load_u32x4,
    mbarrier_arrive,
    mbarrier_arrive_expect,
    mbarrier_init,
    mbarrier_wait,
    prefetch_tensor_map,
    setmaxnreg_dec,
    setmaxnreg_inc,
    shfl,
    spread,
    stmatrix_x4_trans,
    store_f32x4,
    store_u16,
    store_u32x4,
    swizzled_descriptor,
    tensor_copy,
    tensor_map_address,
    wgmma_commit,
    wgmma_f16,
    wgmma_fence,
    wgmma_wait,
    zeros_f32,
)

BLOCK_M: Final = 128  # tokens of a tile of C, at most: 64 sums a thread
FEW_STEPS: Final = 16  # of a block: with fewer, tiles of 64 tokens, whose sums are half as many
BLOCK_N: Final = TILE_GROUP * TILE_ROWS  # features: 128, whose weights are one piece of memory
BLOCK_K: Final = TILE_K  # of a stage: 128
WARPGROUP: Final = 128  # threads
CONSUMER_WARPS: Final = 8  # two warpgroups, 64 features each; the producer's comes behind them
CONSUMERS: Final = 32 * CONSUMER_WARPS  # threads
THREADS: Final = CONSUMERS + WARPGROUP
CONSUMER_REGISTERS: Final = 232  # of a thread: 2 x 232 + 40 are the 504 of 3 x 168
PRODUCER_REGISTERS: Final = 40
SHARED_BYTES: Final = 227 * 1024  # of a thread block of Hopper, at most
MOST_STAGES: Final = 8  # with small tiles more would not arrive sooner
MBARRIER: Final = 8  # bytes
STAGED: Final = 32  # tokens of the finished tile in shared memory at a time

CHUNK: Final = 16  # bytes that a thread stores at once: 8 float16
C_ROW: Final = 2 * BLOCK_N  # bytes of a token of the finished tile
NEXT_16_K: Final = 2  # of a descriptor, which counts chunks


@cache
def kernel(format_name: str, block_m: int) -> tuple[Any, int]:
    """(the kernel for tiles of `block_m` tokens, a multiple of 16; its bytes of shared memory)."""
    weights = half_weights(format_name)
    tile_bytes, load, fragment = weights.tile_bytes, weights.load, weights.fragment
    # Shared memory: the tokens of all stages, as boxes begin at multiples of 1024 bytes; then the
    # weights of all stages; STAGED tokens of C; the mbarriers, `full` of all stages, then `empty`
    # of all; and a word for how many contributors arrived before this block
    box_bytes, w_bytes = 2 * BOX_K * block_m, TILE_GROUP * tile_bytes
    a_bytes = 2 * box_bytes
    staged = gcd(block_m, STAGED)
    stages = min(MOST_STAGES, (SHARED_BYTES - 1024 - staged * C_ROW) // (a_bytes + w_bytes))
    weights_begin, c_begin = stages * a_bytes, stages * (a_bytes + w_bytes)
    full, empty = c_begin + staged * C_ROW, c_begin + staged * C_ROW + stages * MBARRIER
    earlier_word = (empty + stages * MBARRIER) // 4  # that word's place, counted in int32
    shared_bytes = empty + stages * MBARRIER + MBARRIER
    n_acc = block_m // 2  # of a thread: 64 features x block_m tokens by 128 threads
    tile_sums = BLOCK_N * block_m
    no_sums = zeros_f32(n_acc)
    wait_for_all, wait_for_all_but_one = wgmma_wait(0), wgmma_wait(1)
    more_registers = setmaxnreg_inc(CONSUMER_REGISTERS)
    fewer_registers = setmaxnreg_dec(PRODUCER_REGISTERS)

    @cuda.jit(device=True, forceinline=True)
    def next_stage(stage, parity):
        if stage == stages - 1:
            return int32(0), int32(parity ^ 1)
        return int32(stage + 1), parity

    @cuda.jit(device=True, forceinline=True)
    def quotient(x, y):
        """x // y of numbers that are not negative, unsigned: a signed one takes more code."""
        return int32(uint32(x) // uint32(y))

    @cuda.jit(device=True, forceinline=True)
    def range_begin(block, share, extra):
        """Where a block's range of work items begins: where that of the block before ends. A range
        has `share` of them; the first `extra` blocks have one more."""
        return int32(block * share + min(block, extra))

    @cuda.jit(device=True, forceinline=True)
    def block_of(item, share, extra):
        """The block whose range has a work item."""
        of_longer = int32(extra * (share + 1))  # the items of blocks that have one more
        if item < of_longer:
            return quotient(item, share + 1)
        return int32(extra + quotient(item - of_longer, share))

    @cuda.jit(device=True, forceinline=True)
    def produce(shared, a, w, item, end, steps, tiles_n):
        """One thread: the copies of work items `item` to `end`, each a step along K of a tile."""
        prefetch_tensor_map(a)
        stage, parity = int32(0), int32(0)
        while item < end:
            tile_id = quotient(item, steps)
            tile_m = quotient(tile_id, tiles_n)
            m0, tile_n = tile_m * block_m, tile_id - tile_m * tiles_n
            step, step_end = item - tile_id * steps, min(steps, item - tile_id * steps + end - item)
            item += step_end - step
            while step < step_end:
                # --- wait until the stage is empty
                mbarrier_wait(shared, empty + MBARRIER * stage, parity ^ 1)

                # --- issue its copies: the weights in one piece, and two boxes of tokens
                bar, k = int32(full + MBARRIER * stage), int32(step * BLOCK_K)
                destination = stage * a_bytes
                mbarrier_arrive_expect(shared, bar, a_bytes + w_bytes)
                source = int64(tile_n * steps + step) * w_bytes
                bulk_copy(shared, weights_begin + stage * w_bytes, w, source, w_bytes, shared, bar)
                griddepcontrol_wait()  # A may be made by the launch before this one; W is not
                tensor_copy(shared, destination, a, k, int32(m0), shared, bar)
                tensor_copy(
                    shared, destination + box_bytes, a, int32(k + BOX_K), int32(m0), shared, bar
                )
                stage, parity = next_stage(stage, parity)
                step = int32(step + 1)

    @cuda.jit(device=True, forceinline=True)
    def multiply(acc, words, descriptor):
        """acc += 64 K of packed weights times the activations that the descriptor points to."""
        w0, w1 = fragment(words, 0), fragment(words, 1)
        w2, w3 = fragment(words, 2), fragment(words, 3)
        wgmma_fence()
        acc = wgmma_f16(acc, w0[0], w0[1], w0[2], w0[3], descriptor, 1)
        acc = wgmma_f16(acc, w1[0], w1[1], w1[2], w1[3], descriptor + NEXT_16_K, 1)
        acc = wgmma_f16(acc, w2[0], w2[1], w2[2], w2[3], descriptor + 2 * NEXT_16_K, 1)
        acc = wgmma_f16(acc, w3[0], w3[1], w3[2], w3[3], descriptor + 3 * NEXT_16_K, 1)
        wgmma_commit()
        return acc

    @cuda.jit(device=True, forceinline=True)
    def consume(shared, warp, lane, count, stage, parity):
        """A warpgroup -> the sums of its 64 features and all tokens over `count` stages, and the
        stage and parity behind them. While the tensor cores multiply one half of a stage, the
        weights of the other half become float16."""
        acc = no_sums()
        previous, step = int32(0), int32(0)
        while True:  # not `for`: a loop that may have no turn makes ptxas wait at every wgmma
            # --- wait until the stage is full
            mbarrier_wait(shared, full + MBARRIER * stage, parity)
            tile_at = weights_begin + stage * w_bytes + warp * tile_bytes
            descriptor = swizzled_descriptor(shared, stage * a_bytes)
            lower, upper = load(shared, tile_at, lane, 0), load(shared, tile_at, lane, 1)

            # --- multiply its first half
            acc = wait_for_all_but_one(acc)  # done: the last stage's first half, its registers free
            acc = multiply(acc, lower, descriptor)

            # --- the previous stage has been multiplied: the warp says so
            acc = wait_for_all_but_one(acc)
            cuda.syncwarp()  # all lanes have loaded their weights of it: one speaks for the warp
            if lane == 0 and step > 0:
                mbarrier_arrive(shared, empty + MBARRIER * previous)

            # --- multiply the second half
            acc = multiply(acc, upper, descriptor + box_bytes // CHUNK)
            previous = stage
            stage, parity = next_stage(stage, parity)
            step = int32(step + 1)
            if step == count:
                break
        acc = wait_for_all(acc)
        cuda.syncwarp()
        if lane == 0:
            mbarrier_arrive(shared, empty + MBARRIER * previous)
        return acc, stage, parity

    @cuda.jit(device=True, forceinline=True)
    def add_up(sums, shared_words, tile_id, steps, share, extra, partials, arrived, t):
        """The end of a part of a tile, by all consumers. True if this block is the last of the
        tile's contributors to arrive: `sums`, its own, have become those of all. Else False, and
        a block that comes later adds them up."""
        # --- store the partial sums: four of a thread, then four of the next one
        tile_begin = int32(tile_id * steps)
        first_block = block_of(tile_begin, share, extra)
        others = int32(block_of(int32(tile_begin + steps - 1), share, extra) - first_block)
        # A block has slot 0 for the tile that its range begins in, slot 1 for the one that it ends
        # in, if that is another. Only a tile's first contributor can have begun in another
        first_slot = int32(1 if range_begin(first_block, share, extra) < tile_begin else 0)
        block = int32(cuda.blockIdx.x)
        place = int64(2 * block + (first_slot if block == first_block else 0)) * tile_sums + 4 * t
        for r in range(0, n_acc, 4):
            store_f32x4(
                partials, place + r * CONSUMERS, sums[r], sums[r + 1], sums[r + 2], sums[r + 3]
            )

        # --- count this block: one that finds all others counted is the last
        fence()
        barrier_sync(1, CONSUMERS)
        if t == 0:
            shared_words[earlier_word] = cuda.atomic.add(arrived, tile_id, 1)
        barrier_sync(1, CONSUMERS)
        if shared_words[earlier_word] < others:
            return False
        fence()
        if t == 0:
            arrived[tile_id] = 0  # for the next launch

        # --- add up, in the order of K
        own = cuda.local.array(n_acc, float32)
        for r in range(n_acc):
            own[r] = sums[r]
            sums[r] = 0
        for i in range(others + 1):
            if first_block + i == block:  # its own: still in registers
                for r in range(n_acc):
                    sums[r] += own[r]
                continue
            place = int64(2 * (first_block + i) + (first_slot if i == 0 else 0)) * tile_sums + 4 * t
            for r in range(0, n_acc, 4):
                four_sums = load_f32x4(partials, place + r * CONSUMERS)
                sums[r], sums[r + 1], sums[r + 2], sums[r + 3] = (
                    sums[r] + four_sums[0],
                    sums[r + 1] + four_sums[1],
                    sums[r + 2] + four_sums[2],
                    sums[r + 3] + four_sums[3],
                )
        return True

    @cuda.jit(launch_bounds=(THREADS, 1))
    def w4a16_persistent(a_map, w, row_scales, c, steps, share, extra, partials, arrived):
        """c[M, N] = a[M, K] @ dequantize(w)[N, K]^T; w and row_scales of qformats.repack.tiles,
        a_map of a; steps of 128 K; share and extra of `range_begin`. a and c are float16 and begin
        at multiples of 16 bytes."""
        shared = cuda.shared.array(0, uint8, alignment=1024)  # all of the dynamic shared memory
        shared_words = cuda.shared.array(0, int32, alignment=1024)  # the same, as int32
        a = tensor_map_address(a_map)
        t, steps = int32(cuda.threadIdx.x), int32(steps)
        # shuffled, so that the compiler knows it is one value for the whole warp
        warp, lane = shfl(int32(t >> 5), 0), int32(t & 31)
        M, N = int32(c.shape[0]), int32(c.shape[1])
        tiles_n = quotient(N + (BLOCK_N - 1), BLOCK_N)

        # --- this block's range of work items
        share, extra, block = int32(share), int32(extra), int32(cuda.blockIdx.x)
        item, end = range_begin(block, share, extra), range_begin(int32(block + 1), share, extra)

        # --- make the mbarriers: one producer fills a stage, every consumer warp empties it
        if t == 0:
            for stage in range(stages):
                mbarrier_init(shared, full + MBARRIER * stage, 1)
                mbarrier_init(shared, empty + MBARRIER * stage, CONSUMER_WARPS)
            fence_mbarrier_init()
        cuda.syncthreads()  # the only barrier of all threads
        griddepcontrol_launch_dependents()  # the next launch may begin wherever an SM is free

        # --- the producer's warpgroup: one thread works, and it needs few registers
        if warp >= CONSUMER_WARPS:
            fewer_registers()
            if warp == CONSUMER_WARPS and lane == 0:
                produce(shared, a, w, item, end, steps, tiles_n)
            return

        # --- the consumers: tile after tile
        more_registers()
        griddepcontrol_wait()  # the launch before may still use partial sums and counters
        sums = cuda.local.array(n_acc, float32)
        stage, parity = int32(0), int32(0)
        out_row, out_chunk = int32(t >> 4), int32(t & 15)  # of the tile that goes to C
        while item < end:
            tile_id = quotient(item, steps)
            tile_m = quotient(tile_id, tiles_n)
            m0, n0 = int32(tile_m * block_m), int32((tile_id - tile_m * tiles_n) * BLOCK_N)
            count = int32(min(int32(tile_id * steps + steps), end) - item)
            item = int32(item + count)
            feature = int32(n0 + 16 * warp + (lane >> 2))
            scale_g, scale_g8 = load_f32(row_scales, feature), load_f32(row_scales, feature + 8)
            acc, stage, parity = consume(shared, warp, lane, count, stage, parity)
            spread(sums, acc)

            # --- a part of a tile: unless it is the last, its sums are left to another block
            if count < steps and not add_up(
                sums, shared_words, tile_id, steps, share, extra, partials, arrived, t
            ):
                continue

            # --- registers -> shared -> global, as in step 12 but some tokens at a time
            token, chunk = (lane >> 4) * 8 + (lane & 7), 2 * warp + (lane >> 3 & 1)
            destination = c_begin + token * C_ROW + (chunk ^ (token & 7)) * CHUNK
            source = c_begin + out_row * C_ROW + (out_chunk ^ (out_row & 7)) * CHUNK
            n = int32(n0 + 8 * out_chunk)
            for first_token in range(0, block_m, staged):
                barrier_sync(1, CONSUMERS)  # nobody loads the tokens before any more
                for j in range(0, staged, 16):
                    i = (first_token + j) // 2
                    stmatrix_x4_trans(
                        shared,
                        destination + j * C_ROW,
                        floats_to_halves(sums[i] * scale_g, sums[i + 1] * scale_g),
                        floats_to_halves(sums[i + 2] * scale_g8, sums[i + 3] * scale_g8),
                        floats_to_halves(sums[i + 4] * scale_g, sums[i + 5] * scale_g),
                        floats_to_halves(sums[i + 6] * scale_g8, sums[i + 7] * scale_g8),
                    )
                barrier_sync(1, CONSUMERS)
                for j in range(0, staged, CONSUMERS // 16):
                    m = int32(m0 + out_row + (first_token + j))
                    if m < M and n < N:
                        eight = load_u32x4(shared, source + j * C_ROW)  # float16
                        if N % 8 == 0:
                            store_u32x4(c, int64(m) * N + n, eight[0], eight[1], eight[2], eight[3])
                        else:  # rows of C do not begin at multiples of 16 bytes
                            for i in range(8):
                                if n + i < N:
                                    value = eight[i // 2] >> uint32(16 * (i % 2))
                                    store_u16(c, int64(m) * N + (n + i), value)

    return w4a16_persistent, shared_bytes


def tiling(shape: Shape) -> tuple[int, int, int]:
    """(tokens of a tile, tiles, thread blocks)."""
    sms, steps = multiprocessors(), ceil_div(shape.k, BLOCK_K)
    for most in (BLOCK_M, BLOCK_M // 2):
        block_m = min(most, ceil_div(shape.m, 16) * 16)  # less where tokens are few
        tiles_c = ceil_div(shape.n, BLOCK_N) * ceil_div(shape.m, block_m)
        if tiles_c * steps >= FEW_STEPS * sms:
            break
    if tiles_c >= sms:
        return block_m, tiles_c, sms
    parts = min(sms // tiles_c, steps)  # of a tile, equal ones if this divides steps
    return block_m, tiles_c, tiles_c * parts


def scratch(fmt: Format, family: Family, shape: Shape) -> tuple[tuple[tuple[int, ...], Any], ...]:
    """Partial sums of two tiles a block, and an arrival counter for each tile."""
    block_m, tiles_c, blocks = tiling(shape)
    return ((2 * blocks * BLOCK_N * block_m,), np.float32), ((tiles_c,), np.int32)


def launch(
    fmt: Format, family: Family, shape: Shape, weights: tuple, activations: tuple, out: Any,
    scratch: tuple,
) -> Launch:  # fmt: skip
    block_m, tiles_c, blocks = tiling(shape)
    run, shared_bytes = kernel(fmt.name, block_m)
    (a,), steps = activations, ceil_div(shape.k, BLOCK_K)
    share, extra = divmod(tiles_c * steps, blocks)  # of all work items, for each block
    args = (TensorMap(a, (block_m, BOX_K)), *weights, out, steps, share, extra, *scratch)
    return Launch(run, (blocks,), (THREADS,), args, shared_bytes, overlap=True)


STEP = Step(
    number=14,
    name="step14_persistent",
    title="W4A16 persistent: an equal share for every SM, tile after tile",
    branch="float16",
    families=("A16",),
    parents={"A16": 13},
    homes=((128, 4096, 4096), (128, 4096, 14336)),  # where whole tiles leave SMs idle
    unit={"A16": "tensor_fp16"},
    pack=tiles,
    activations={"A16": plain_rows},
    launch=launch,
    scratch=scratch,
    inputs=("float16",),
    outputs=("float16",),
    min_cc=(9, 0),
    max_cc=(9, 0),  # others have no wgmma, later ones neither
    idea=("range_begin", "add_up", "cuda.atomic.add"),
    contains={"A16": ("HGMMA", "UTMALDG", "UBLKCP", "SYNCS", "USETMAXREG", "MEMBAR")},
    forbids={"A16": ("IMMA", "HMMA", "LDGSTS", "LDSM")},
)
