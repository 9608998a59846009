"""The end of a tile of the persistent wgmma steps: whole, or shared by several blocks.

The sums of a whole tile go from the accumulators to C (`sums_to_c`). The blocks that share a tile
store their partial sums, and the last to arrive adds them up and writes C. Where they finish
together, each adds up a *slice*, some of the tile's tokens:

    block 0   K 0..1023      [multiply ][store partial sums][poll][add up slice 0][C]
    block 1   K 1024..2047   [multiply  ][store partial sums][poll][add up slice 1][C]

Step 14 teaches this; step 15 uses it for int32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from numba import cuda, float32, int32, int64

from steps.contract import shared_memory
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
from steps.kernels.parts.epilogue.bias import bias_of
from steps.kernels.parts.epilogue.half_tile import (
    WARPGROUP,
    half_tile_bytes,
    load_two_features,
    store_halves,
)
from steps.kernels.parts.epilogue.mma import PAD
from steps.kernels.parts.split_k_reduction import poll_and_count_arrival

# --- a warpgroup's sums to C ----------------------------------------------------------------------
#
# There are two ways. Both pass through an *area* of shared memory that each warpgroup has to
# itself, as the ring is full of the next tile already:
#
#     16 bits    transposed by stmatrix, 32 tokens at a time (half_tile.py)
#     float32    transposed word by word, 16 tokens at a time, so that a thread has four
#                neighbouring features of a token, 16 bytes, and half a warp a token's 64

WGMMA_ROWS: Final = 64
"""Features of a `wgmma`, rows of its D."""

STAGED_HALVES: Final = (32, 16)
"""Tokens of a warpgroup in its area at a time in 16 bits: 32 are faster, 16 take half the area,
which may save a stage of the ring."""

STAGED_FLOATS: Final = 16
"""The same in float32."""

PITCH: Final = WGMMA_ROWS + PAD
"""Words from a token's sums to the next token's, in float32."""


@cuda.jit(device=True, forceinline=True)
def load_i32x4(array, offset):
    x = load_u32x4(array, offset)
    return int32(x[0]), int32(x[1]), int32(x[2]), int32(x[3])


@cuda.jit(device=True, forceinline=True)
def write_four(c, offset, there, x):
    """x, four float32, to flat c from `offset` on; only the first `there`."""
    if c.shape[1] & 3 == 0:
        if there > 0:
            store_f32x4(c, offset, x[0], x[1], x[2], x[3])
    else:
        for i in range(4):
            if i < there:
                store_f32(c, offset + i, x[i])


@dataclass(frozen=True, slots=True)
class SumsToC:
    """Device functions that write a warpgroup's sums of 64 features x some tokens to C[M, N]. m and
    n are the first token and feature.

    thread_tokens: how many tokens' scales a thread needs
    load_features(row_scales, bias, n) -> u, the row scales of this thread's features, their biases
    load_token_scales(v, token_scales, m, M)
        v = those of its tokens, a local array
    store(x, u, v, c, m, n)
        the sums, times their scales, plus the bias, to C; nothing beyond the edges. x is a local
        array, in which `spread` has put the accumulators of `wgmma`.
    """

    thread_tokens: int
    load_features: Any
    load_token_scales: Any
    store: Any


@cache
def _to_16_bits(
    tokens: int,
    first_byte: int,
    area_bytes: int,
    staged: int,
    output: str,
    scaled: bool,
    of_bias: str | None,
) -> SumsToC:
    """To 16 bits. A thread holds tokens 2t, 2t + 1 of each 8, of features g and g + 8 of a warp's
    16, with t = lane & 3, g = lane >> 2. For areas see `store_halves`."""
    n_acc, thread_tokens, load_two = tokens // 2, tokens // 4, load_two_features(of_bias)
    store_area = store_halves(tokens, first_byte, area_bytes, output, of_bias, staged)

    @cuda.jit(device=True, forceinline=True)
    def load_features(row_scales, bias, n):
        t = int32(cuda.threadIdx.x & (WARPGROUP - 1))
        return load_two(row_scales, bias, int32(n + (t >> 5) * 16 + (t >> 2 & 7)))

    @cuda.jit(device=True, forceinline=True)
    def load_token_scales(v, token_scales, m, M):
        if scaled:
            first = int32(m + 2 * (cuda.threadIdx.x & 3))
            for i in range(thread_tokens):
                token = int32(first + 8 * (i // 2) + i % 2)
                v[i] = load_f32(token_scales, min(token, int32(M - 1)))

    @cuda.jit(device=True, forceinline=True)
    def store(x, u, v, c, m, n):
        y = cuda.local.array(n_acc, float32)
        for r in range(0, n_acc, 4):
            y[r], y[r + 1] = float32(x[r]) * u[0], float32(x[r + 1]) * u[0]
            y[r + 2], y[r + 3] = float32(x[r + 2]) * u[1], float32(x[r + 3]) * u[1]
            if scaled:  # last: the sums times these alone may overflow
                i = r // 2
                y[r], y[r + 1] = y[r] * v[i], y[r + 1] * v[i + 1]
                y[r + 2], y[r + 3] = y[r + 2] * v[i], y[r + 3] * v[i + 1]
        warpgroup = int32(cuda.threadIdx.x // WARPGROUP)
        barrier_sync(1 + warpgroup, WARPGROUP)  # nobody loads from the area any more
        store_area(y, c, m, n, u)

    return SumsToC(thread_tokens, load_features, load_token_scales, store)


@cache
def _to_float(
    tokens: int, first_byte: int, area_bytes: int, kind: Any, scaled: bool, of_bias: str | None
) -> SumsToC:
    """To float32. Transposed, a thread holds four neighbouring features of tokens m, m + 8 ..."""
    staged, thread_tokens = min(tokens, STAGED_FLOATS), tokens // 8
    load_four = load_f32x4 if kind == float32 else load_i32x4
    store_one = store_f32 if kind == float32 else store_u32
    load_bias, add = bias_of(of_bias)

    @cuda.jit(device=True, forceinline=True)
    def transpose(x):
        """Before, x has the sums as `wgmma` leaves them."""
        sums = cuda.shared.array(0, kind, alignment=128)  # all of the dynamic shared memory
        warpgroup, t = int32(cuda.threadIdx.x >> 7), int32(cuda.threadIdx.x & (WARPGROUP - 1))
        base = first_byte // 4 + warpgroup * (area_bytes // 4)
        store_base = base + 2 * (t & 3) * PITCH + (t >> 5) * 16 + (t >> 2 & 7)
        load_base = base + (t >> 4) * PITCH + (t & 15) * 4
        for first_token in range(0, tokens, staged):
            barrier_sync(1 + warpgroup, WARPGROUP)
            for j in range(0, staged, 8):
                r, destination = (first_token + j) // 2, store_base + j * PITCH
                store_one(sums, destination, x[r])
                store_one(sums, destination + PITCH, x[r + 1])
                store_one(sums, destination + 8, x[r + 2])
                store_one(sums, destination + PITCH + 8, x[r + 3])
            barrier_sync(1 + warpgroup, WARPGROUP)
            for j in range(0, staged, 8):
                r = (first_token + j) // 2
                x[r], x[r + 1], x[r + 2], x[r + 3] = load_four(sums, load_base + j * PITCH)

    @cuda.jit(device=True, forceinline=True)
    def load_features(row_scales, bias, n):
        own = int32(n + (cuda.threadIdx.x & 15) * 4)
        u = load_f32x4(row_scales, min(own, int32(row_scales.size - 4)))
        b0, b1 = load_bias(bias, own), load_bias(bias, own + 1)
        b2, b3 = load_bias(bias, own + 2), load_bias(bias, own + 3)
        return u[0], u[1], u[2], u[3], b0, b1, b2, b3

    @cuda.jit(device=True, forceinline=True)
    def load_token_scales(v, token_scales, m, M):
        if scaled:
            first = int32(m + (cuda.threadIdx.x >> 4 & 7))
            for i in range(thread_tokens):
                v[i] = load_f32(token_scales, min(int32(first + 8 * i), int32(M - 1)))

    @cuda.jit(device=True, forceinline=True)
    def store(x, u, v, c, m, n):
        transpose(x)
        M, N = int32(c.shape[0]), int32(c.shape[1])
        token = int32(m + (cuda.threadIdx.x >> 4 & 7))
        feature = int32(n + (cuda.threadIdx.x & 15) * 4)
        offset, stride = int64(token) * N + feature, int64(8) * N
        for i in range(thread_tokens):
            r = 4 * i
            y0, y1 = float32(x[r]) * u[0], float32(x[r + 1]) * u[1]
            y2, y3 = float32(x[r + 2]) * u[2], float32(x[r + 3]) * u[3]
            if scaled:
                y0, y1, y2, y3 = y0 * v[i], y1 * v[i], y2 * v[i], y3 * v[i]
            y0, y1, y2, y3 = add(y0, u[4]), add(y1, u[5]), add(y2, u[6]), add(y3, u[7])
            there = int32(N - feature if token + 8 * i < M else 0)
            write_four(c, offset, there, (y0, y1, y2, y3))
            offset += stride

    return SumsToC(thread_tokens, load_features, load_token_scales, store)


@cache
def sums_to_c(
    tokens: int,
    warpgroups: int,
    first_byte: int,
    output: str,
    kind: Any,
    scaled: bool,
    of_bias: str | None,
    slices: int,
) -> tuple[SumsToC, SumsToC, int]:
    """(for the sums of `tokens` tokens, for a slice of them, the byte behind the areas, which begin
    at `first_byte`). The sums are of `kind`, float32 or int32; C is of dtype `output`, the bias of
    `of_bias`."""
    sizes = tokens, tokens // slices
    if output == "float32":
        area = 4 * PITCH * min(tokens, STAGED_FLOATS)
        whole, part = (_to_float(size, first_byte, area, kind, scaled, of_bias) for size in sizes)
        return whole, part, first_byte + warpgroups * area
    for staged in STAGED_HALVES:
        area = half_tile_bytes(tokens, staged)
        end = first_byte + warpgroups * area
        if end + 4 * warpgroups * slices <= shared_memory():
            break
    whole, part = (
        _to_16_bits(size, first_byte, area, staged, output, scaled, of_bias) for size in sizes
    )
    return whole, part, end


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
