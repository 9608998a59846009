"""The end of a tile of the wgmma steps: stream-K partial sums, transpose, scales, C.

The accumulators of a warpgroup lie scattered over its threads. They pass through shared memory, a
few tokens at a time, and each thread then has four neighbouring features of a token, as C has them.
Step 12 teaches this; steps 13 and 14 use it for int32.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from numba import cuda, float32, int32, int64

from steps.components.epilogue.write import PAD, write_row
from steps.components.split_k_reduction import poll_and_count_arrival
from steps.instructions import (
    barrier_sync,
    fence,
    load_f32,
    load_f32x4,
    load_u32x4,
    shfl,
    spread,
    store_f32,
    store_f32x4,
    store_u32,
    store_u32x4,
)

WARPGROUP: Final = 128
"""Threads of a warpgroup."""

WGMMA_ROWS: Final = 64
"""Features of a `wgmma`, rows of its D."""


def warpgroups(features: int) -> int:
    """How many warpgroups multiply a tile of so many features: three where two cannot share it."""
    return 3 if features % (2 * WGMMA_ROWS) else 2


ACC_HALF_TOKENS: Final = 128
"""Tokens of an accumulator half at most, 64 registers: the compiler spills more to local memory."""

STAGED_TOKENS: Final = 16
"""Tokens of a warpgroup's sums that lie in shared memory at a time."""

H200_POLLS: Final = 12
"""Polls of an arrival counter, some 700 cycles each on an H200, before a block leaves its slice to
those that arrive later."""

LOADS_IN_FLIGHT: Final = 64
"""Registers for partial sums of other blocks that are being loaded."""


@cuda.jit(device=True, forceinline=True)
def load_i32x4(array, offset):
    x = load_u32x4(array, offset)
    return int32(x[0]), int32(x[1]), int32(x[2]), int32(x[3])


@cache
def scale_and_write(count: int, in_half: bool, zero: int) -> tuple[Any, Any]:
    """(load_token_scales, write) for four neighbouring features of `count` tokens m, m + 8 ...

    load_token_scales(v, zero_sums, token_scales, m, M)
        v = the scales of the tokens; zero_sums = what the operands' `zero` adds to their sums
    write(x, v, zero_sums, u, c, m, n, M, N)
        x, less zero_sums, times the token scales v and the row scales u, to C
    """
    row = write_row(in_half)

    @cuda.jit(device=True, forceinline=True)
    def load_token_scales(v, zero_sums, token_scales, m, M):
        for i in range(count):
            token = int32(min(int32(m + 8 * i), int32(M - 1)))
            v[i] = load_f32(token_scales, token)
            if zero:
                zero_sums[i] = zero * int32(load_f32(token_scales, int32(M + token)))

    @cuda.jit(device=True, forceinline=True)
    def write(x, v, zero_sums, u, c, m, n, M, N):
        offset, stride = int64(m) * N + n, int64(8) * N
        for i in range(count):
            r = 4 * i
            if zero:
                for j in range(r, r + 4):
                    x[j] = int32(x[j] - zero_sums[i])
            y0, y1 = float32(x[r]) * u[0] * v[i], float32(x[r + 1]) * u[1] * v[i]
            y2, y3 = float32(x[r + 2]) * u[2] * v[i], float32(x[r + 3]) * u[3] * v[i]
            if int32(m + 8 * i) < M:
                row(c, offset, int32(N - n), (y0, y1, y2, y3))
            offset += stride

    return load_token_scales, write


@cache
def transposer(tokens: int, first_word: int, kind: Any) -> Any:
    """transpose(x, sums, warpgroup, t): a thread's sums x, transposed through shared memory.

    Before, a thread holds of each 8 of the `tokens` tokens m and m + 1 of features n and n + 8 of
    64. Afterwards it holds four neighbouring features of tokens m, m + 8, m + 16 ...

    sums: all of the dynamic shared memory. Each warpgroup uses STAGED_TOKENS tokens of it, from
    `first_word` on.
    """
    piece, pitch = min(tokens, STAGED_TOKENS), WGMMA_ROWS + PAD
    load = load_f32x4 if kind == float32 else load_i32x4
    store_one = store_f32 if kind == float32 else store_u32

    @cuda.jit(device=True, forceinline=True)
    def transpose(x, sums, warpgroup, t):
        base = first_word + warpgroup * piece * pitch
        store_base = base + 2 * (t & 3) * pitch + (t >> 5) * 16 + (t >> 2 & 7)
        load_base = base + (t >> 4) * pitch + (t & 15) * 4
        for first_token in range(0, tokens, piece):
            barrier_sync(1 + warpgroup, WARPGROUP)
            for j in range(0, piece, 8):
                r, destination = (first_token + j) // 2, store_base + j * pitch
                store_one(sums, destination, x[r])
                store_one(sums, destination + pitch, x[r + 1])
                store_one(sums, destination + 8, x[r + 2])
                store_one(sums, destination + pitch + 8, x[r + 3])
            barrier_sync(1 + warpgroup, WARPGROUP)
            for j in range(0, piece, 8):
                r = (first_token + j) // 2
                x[r], x[r + 1], x[r + 2], x[r + 3] = load(sums, load_base + j * pitch)

    return transpose


@cache
def finish_wgmma_tile(
    tile: tuple[int, int],
    first_word: int,
    in_half: bool,
    slices: int,
    kind: Any = float32,
    zero: int = 0,
) -> tuple[Any, int]:
    """(finish, the first word of dynamic shared memory behind what it uses from `first_word` on).

    finish(acc, half, tile_id, m0, n0, first_contributor, last_contributor, partial_slot,
           destination)
        the end of a tile, or of a part of it (`steps.components.stream_k`), for its two or three
        `warpgroups`, with 64 features each and up to ACC_HALF_TOKENS tokens: an *accumulator
        half*. A tile of 256 features or tokens has two of them.

    acc         : the accumulators of `wgmma`, all there, of this `kind`: float32 or int32.
    first_contributor, last_contributor, partial_slot: `Scheduler.contributors`. The first is the
                  last where these are the sums of all K.
    destination : (row_scales, token_scales, c, partials, arrived), as of `finish_mma_tile`; but
                  partials is `kind` [blocks, 2, bn, bm], and arrived int32 [tiles, bn / 64 slices].

    The blocks that share a tile store their partial sums in `partials`. A half is divided into
    `slices`, some of its tokens each. The last block to arrive at a slice adds it up, in the order
    of K. With several slices a block counts itself at its own slice only when all others are there,
    or after H200_POLLS polls. So blocks that finish together add up side by side, and no block
    waits for one that may not have begun.

    Unsigned operands for signed ones are off by `zero`, so the sums are off by that many times the
    sum of a token's codes. token_scales has these sums behind the scales then, float32 [2 M].
    """
    bn, bm = tile
    tokens, warpgroups_n = min(bm, ACC_HALF_TOKENS), warpgroups(bn)
    width = warpgroups_n * WGMMA_ROWS
    halves, side = bn // width * (bm // tokens), bn > width  # side by side, or token by token
    n_acc, n_tokens = tokens // 2, tokens // 8  # of a thread: sums of a half, tokens
    slice_sums, slice_tokens = n_acc // slices, n_tokens // slices
    in_flight = LOADS_IN_FLIGHT // max(halves, warpgroups_n - 1)
    sums_at_once = min(slice_sums, in_flight)  # of a contribution, loaded together
    blocks_at_once = in_flight // sums_at_once  # of so many contributions
    n_loaded = blocks_at_once * sums_at_once
    keep_own = slice_sums <= 16  # its own slice's sums: more would lie in local memory
    pitch = WGMMA_ROWS + PAD
    arrivals_at = first_word + warpgroups_n * min(tokens, STAGED_TOKENS) * pitch
    transpose = transposer(tokens, first_word, kind)
    transpose_slice = transposer(tokens // slices, first_word, kind)
    load_token_scales, write = scale_and_write(n_tokens, in_half, zero)
    load_slice_scales, write_slice = scale_and_write(slice_tokens, in_half, zero)
    load, store = (load_f32x4, store_f32x4) if kind == float32 else (load_i32x4, store_u32x4)

    @cuda.jit(device=True, forceinline=True)
    def partial_offset(block, first, partial_slot, own_offset):
        """Where in `partials` a block stores its contribution to a tile."""
        return int64(2 * block + (partial_slot if block == first else 0)) * (bn * bm) + own_offset

    @cuda.jit(device=True, forceinline=True)
    def count_arrivals(arrived, counter, others, contribution, earlier_arrivals, warpgroup, t):
        """At each slice: how many arrived earlier is in shared memory then."""
        barrier_sync(1 + warpgroup, WARPGROUP)
        if t < slices:  # fences of these hold for all whom the barriers order before and after
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
                            p = load(partials, offset + r * WARPGROUP)
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
        row_scales, token_scales, c, partials, arrived = destination
        sums = cuda.shared.array(0, kind, alignment=128)  # all of the dynamic shared memory
        earlier_arrivals = cuda.shared.array(0, int32, alignment=128)  # the same
        x, own_sums = cuda.local.array(n_acc, kind), cuda.local.array(slice_sums, kind)
        v, zero_sums = cuda.local.array(n_tokens, float32), cuda.local.array(n_tokens, int32)
        M, N = int32(c.shape[0]), int32(c.shape[1])
        warpgroup, t = int32(cuda.threadIdx.x >> 7), int32(cuda.threadIdx.x & (WARPGROUP - 1))
        # shuffled, so that addresses are not kept in registers from one half to the next
        m, n = shfl(m0, 0) + (t >> 4), shfl(n0, 0) + warpgroup * WGMMA_ROWS + (t & 15) * 4
        m = int32(m + (0 if side else half * tokens))
        n = int32(n + (half * width if side else 0))
        u = load_f32x4(row_scales, min(n, row_scales.size - 4))
        spread(x, acc)
        if first_contributor == last_contributor:
            load_token_scales(v, zero_sums, token_scales, m, M)
            transpose(x, sums, warpgroup, t)
            write(x, v, zero_sums, u, c, m, n, M, N)
            return
        own_offset = int32((warpgroups_n * half + warpgroup) * WARPGROUP * n_acc + 4 * t)
        offset = partial_offset(int32(cuda.blockIdx.x), first_contributor, partial_slot, own_offset)
        for r in range(0, n_acc, 4):
            store(partials, offset + r * WARPGROUP, x[r], x[r + 1], x[r + 2], x[r + 3])
        others, contribution = (
            int32(last_contributor - first_contributor),
            int32(int32(cuda.blockIdx.x) - first_contributor),
        )
        slice_id = int32(contribution if contribution < slices else 0)
        if keep_own:
            for r in range(slice_sums):
                own_sums[r] = x[r]
                for other in range(1, slices):
                    if other == slice_id:
                        own_sums[r] = x[other * slice_sums + r]
        load_slice_scales(v, zero_sums, token_scales, int32(m + 8 * slice_tokens * slice_id), M)
        counter = int32(((tile_id * halves + half) * warpgroups_n + warpgroup) * slices)
        count_arrivals(arrived, counter, others, contribution, earlier_arrivals, warpgroup, t)
        for i in range(slices):  # its own first, whose token scales are loaded
            # shuffled, so that the compiler knows: the same for all lanes
            if shfl(earlier_arrivals[arrivals_at + slices * warpgroup + slice_id], 0) == others:
                slice_m = int32(m + 8 * slice_tokens * slice_id)
                kept_block = int32(cuda.blockIdx.x if keep_own and i == 0 else -1)
                if i > 0:
                    load_slice_scales(v, zero_sums, token_scales, slice_m, M)
                offset = own_offset + slice_id * slice_sums * WARPGROUP
                add_partials(
                    x,
                    own_sums,
                    kept_block,
                    partials,
                    offset,
                    first_contributor,
                    last_contributor,
                    partial_slot,
                )
                transpose_slice(x, sums, warpgroup, t)
                write_slice(x, v, zero_sums, u, c, slice_m, n, M, N)
            slice_id = int32(slice_id + 1 if slice_id < slices - 1 else 0)

    return finish, arrivals_at + warpgroups_n * slices
