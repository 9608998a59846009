"""The end of a tile of the persistent wgmma steps: whole, or shared by several blocks.

The sums of a whole tile go from the accumulators to C (steps/kernels/parts/epilogue/sums_to_c.py).
The blocks that share a tile store their partial sums, and the last to arrive adds them up and
writes C. Where they finish together, each adds up a *slice*, some of the tile's tokens:

    block 0   K 0..1023      [multiply ][store partial sums][poll][add up slice 0][C]
    block 1   K 1024..2047   [multiply  ][store partial sums][poll][add up slice 1][C]

Step 14 teaches this; step 15 uses it for int32.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from numba import cuda, float32, int32, int64

from steps.instructions import (
    barrier_sync,
    fence,
    load_f32x4,
    shfl,
    spread,
    store_f32x4,
    store_u32x4,
)
from steps.kernels.parts.epilogue.half_tile import WARPGROUP
from steps.kernels.parts.epilogue.sums_to_c import WGMMA_ROWS, load_i32x4, sums_to_c
from steps.kernels.parts.split_k_reduction import poll_and_count_arrival


def warpgroups(features: int) -> int:
    """How many warpgroups multiply a tile of so many features: three where two cannot share it."""
    return 3 if features % (2 * WGMMA_ROWS) else 2


ACC_HALF_TOKENS: Final = 128
"""Tokens of an accumulator half at most, 64 registers: the compiler spills more to local memory."""

H200_POLLS: Final = 12
"""Polls of an arrival counter, some 700 cycles each on an H200, before a block leaves its slice to
those that arrive later."""

LOADS_IN_FLIGHT: Final = 64
"""Registers for partial sums of other blocks that are being loaded."""


@cache
def finish_wgmma_tile(
    tile: tuple[int, int],
    first_byte: int,
    output: str,
    slices: int,
    scaled: bool,
    of_bias: str | None,
    kind: Any = float32,
) -> tuple[Any, int]:
    """(finish, end): the device function, and the byte of dynamic shared memory behind what it uses
    from `first_byte` on, both multiples of 128. C is of dtype `output`: "float32", "float16" or
    "bfloat16".

    finish(acc, half, tile_id, m0, n0, first_contributor, last_contributor, partial_slot,
           destination)
        the end of one *accumulator half* of a tile, or of a part of its K: 64 features for each of
        its two or three `warpgroups`, and up to ACC_HALF_TOKENS tokens. A tile of 256 features or
        tokens has two halves.

    acc         : the accumulators of `wgmma`, all there, of this `kind`: float32 or int32.
    first_contributor, last_contributor, partial_slot: `Scheduler.contributors`. The first is the
                  last where these are the sums of all K.
    destination : (row_scales, token_scales, bias, c, partials, arrived): float32, one for each
                  feature; float32 [M], one for each token, not read unless `scaled`; [N] of dtype
                  `of_bias`, not read where that is None; C; partial sums, of `kind` [blocks, 2, bn,
                  bm]; counters, int32 [tiles, bn / 64 slices], left at zero.

    The blocks that share a tile store their partial sums in `partials`. A half is divided into
    `slices`, some of its tokens each. The last block to arrive at a slice adds it up, in the order
    of K. With several slices a block counts itself at its own slice only when all others are there,
    or after H200_POLLS polls. So blocks that finish together add up side by side, and no block
    waits for one that may not have begun. Whoever writes to C adds the bias: once.
    """
    bn, bm = tile
    tokens, warpgroups_n = min(bm, ACC_HALF_TOKENS), warpgroups(bn)
    width = warpgroups_n * WGMMA_ROWS
    # the halves of a tile lie side by side along the features, or one after the other along tokens
    halves, side_by_side = bn // width * (bm // tokens), bn > width
    n_acc = tokens // 2  # sums of a half that a thread holds
    slice_sums, slice_tokens = n_acc // slices, tokens // slices
    in_flight = LOADS_IN_FLIGHT // max(halves, warpgroups_n - 1)
    sums_at_once = min(slice_sums, in_flight)  # of a contribution, loaded together
    blocks_at_once = in_flight // sums_at_once  # of so many contributions
    n_loaded = blocks_at_once * sums_at_once
    # whether a thread keeps the sums of its own slice in registers: more sums would lie in local
    # memory, and three warpgroups have few registers
    keep_own = slice_sums <= 16 and warpgroups_n == 2
    to_c, slice_to_c, areas_end = sums_to_c(
        tokens, warpgroups_n, first_byte, output, kind, scaled, of_bias, slices
    )
    arrivals_at = areas_end // 4
    end_byte = (areas_end + 4 * warpgroups_n * slices + 127) // 128 * 128
    thread_tokens, load_features = to_c.thread_tokens, to_c.load_features
    load_token_scales, store_sums = to_c.load_token_scales, to_c.store
    load_slice_token_scales, store_slice = slice_to_c.load_token_scales, slice_to_c.store
    load_four, store_four = (
        (load_f32x4, store_f32x4) if kind == float32 else (load_i32x4, store_u32x4)
    )

    @cuda.jit(device=True, forceinline=True)
    def partial_offset(block, first, partial_slot, own_offset):
        """Where in `partials` a block stores its contribution to a tile."""
        return int64(2 * block + (partial_slot if block == first else 0)) * (bn * bm) + own_offset

    @cuda.jit(device=True, forceinline=True)
    def count_arrivals(arrived, counter, others, contribution, earlier_arrivals, warpgroup, t):
        """Count this block at each slice; how many arrived earlier goes to shared memory."""
        barrier_sync(1 + warpgroup, WARPGROUP)
        if t < slices:  # their fences serve all threads, which the barriers order around them
            fence()
            polls = int32(H200_POLLS if slices > 1 and t == contribution else 0)
            earlier = poll_and_count_arrival(arrived, counter + t, others, polls)
            earlier_arrivals[arrivals_at + slices * warpgroup + t] = earlier
            fence()
        barrier_sync(1 + warpgroup, WARPGROUP)

    @cuda.jit(device=True, forceinline=True)
    def add_partials(x, own_sums, kept_block, partials, own_offset, first, last, partial_slot):
        """x = the sums of a slice of blocks `first` to `last`, in this order; those of block
        `kept_block` are `own_sums`."""
        loaded = cuda.local.array(n_loaded, kind)
        for begin in range(0, slice_sums, sums_at_once):
            for r in range(sums_at_once):
                x[begin + r] = 0
            for block in range(first, last + 1, blocks_at_once):
                for i in range(blocks_at_once):
                    contributor, q = int32(min(block + i, last)), i * sums_at_once
                    if not keep_own or contributor != kept_block:
                        offset = (
                            partial_offset(contributor, first, partial_slot, own_offset)
                            + begin * WARPGROUP
                        )
                        for r in range(0, sums_at_once, 4):
                            p = load_four(partials, offset + r * WARPGROUP)
                            loaded[q + r], loaded[q + r + 1] = p[0], p[1]
                            loaded[q + r + 2], loaded[q + r + 3] = p[2], p[3]
                    else:
                        for r in range(sums_at_once):
                            loaded[q + r] = own_sums[begin + r]
                for i in range(blocks_at_once):
                    if block + i <= last:
                        for r in range(sums_at_once):
                            x[begin + r] += loaded[i * sums_at_once + r]

    @cuda.jit(device=True, forceinline=True)
    def finish(
        acc, half, tile_id, m0, n0, first_contributor, last_contributor, partial_slot, destination
    ):
        row_scales, token_scales, bias, c, partials, arrived = destination
        earlier_arrivals = cuda.shared.array(0, int32, alignment=128)  # the dynamic shared memory
        x, own_sums = cuda.local.array(n_acc, kind), cuda.local.array(slice_sums, kind)
        v = cuda.local.array(thread_tokens, float32)
        M = int32(c.shape[0])
        warpgroup, t = int32(cuda.threadIdx.x >> 7), int32(cuda.threadIdx.x & (WARPGROUP - 1))
        # shuffled, so that nothing of this is kept in registers from one half to the next
        others = int32(shfl(int32(last_contributor - first_contributor), 0))
        m = int32(shfl(m0, 0) + (0 if side_by_side else half * tokens))
        n = int32(shfl(n0, 0) + warpgroup * WGMMA_ROWS + (half * width if side_by_side else 0))
        u = load_features(row_scales, bias, n)
        spread(x, acc)
        own_slice, complete = int32(0), others == 0
        if others > 0:
            own_offset = int32((warpgroups_n * half + warpgroup) * WARPGROUP * n_acc + 4 * t)
            block = int32(cuda.blockIdx.x)
            offset = partial_offset(block, first_contributor, partial_slot, own_offset)
            for r in range(0, n_acc, 4):
                store_four(partials, offset + r * WARPGROUP, x[r], x[r + 1], x[r + 2], x[r + 3])
            contribution = int32(block - first_contributor)
            own_slice = int32(contribution if contribution < slices else 0)
            if keep_own:
                for r in range(slice_sums):
                    own = x[r]
                    for other in range(1, slices):
                        another = x[other * slice_sums + r]  # loads first, then choices
                        own = another if other == own_slice else own
                    own_sums[r] = own
            counter = int32(((tile_id * halves + half) * warpgroups_n + warpgroup) * slices)
            count_arrivals(arrived, counter, others, contribution, earlier_arrivals, warpgroup, t)
            slice_id = own_slice
            for i in range(slices):  # its own first
                # shuffled, so that the compiler knows: the same for all lanes
                if shfl(earlier_arrivals[arrivals_at + slices * warpgroup + slice_id], 0) == others:
                    slice_m = int32(m + slice_tokens * slice_id)
                    load_slice_token_scales(v, token_scales, slice_m, M)
                    add_partials(
                        x,
                        own_sums,
                        int32(block if keep_own and i == 0 else -1),
                        partials,
                        own_offset + slice_id * slice_sums * WARPGROUP,
                        first_contributor,
                        last_contributor,
                        partial_slot,
                    )
                    complete = slices == 1
                    if slices > 1:
                        store_slice(x, u, v, c, slice_m, n)
                slice_id = int32(slice_id + 1 if slice_id < slices - 1 else 0)
        if complete:
            load_token_scales(v, token_scales, m, M)
            store_sums(x, u, v, c, m, n)

    return finish, end_byte
