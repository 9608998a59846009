"""Attention as a stage of a chain: between qkv and out of one token, by blocks that wait for them.

    y | queries, the new key and value | scores, shares, sums of a split | sums of all splits | a

A block has a share of the positions of a head of keys, and each warp some of these, one after the
other: four values of a head are a lane's. What the warps of a block have found lies in place of A,
which no product needs meanwhile; what the blocks have found is shown to those that add it up, 32
outputs of a warp, with tags beside it (`steps.kernels.parts.exchange`), as all layers use the same
words. Where one block has all positions it stores the outputs itself. The first keys and values are
asked for before the queries have come.

`steps.kernels.between.attention` is a launch of its own, and multiplies by tensor cores. Here there
is no room for its rings, and each SM has few positions.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from numba import cuda, float32, int32, int64, uint16, uint32, uint64

from steps.instructions import (
    as_bits,
    as_float,
    barrier_sync,
    float_to_half,
    floats_to_halves,
    half_to_float,
    load_f32,
    load_f32x2,
    load_f32x4,
    load_u32,
    load_u32x2,
    load_u32x4,
    load_u64x2_relaxed,
    prefetch_l2,
    shfl,
    shfl_xor,
    store_f32x2,
    store_f32x4,
    store_u16_relaxed,
    store_u32_relaxed,
    store_u32x4,
    thread_index,
    trap,
)
from steps.instructions.approximate import exp2, reciprocal, rsqrt
from steps.kernels.between.heads import rotate_neighbours
from steps.kernels.between.polled import POLLS, poll
from steps.kernels.between.values import as_halves, put
from steps.kernels.parts.activations.sources import four_floats
from steps.kernels.parts.exchange import are_of, show

AHEAD: Final = 2
"""Keys and values that a warp asks for at a time. With four, words are spilled."""
MOST_SPLITS: Final = 16
"""Blocks for the positions of a head."""
SIZES: Final = (64, 128, 256)
"""Values of a head."""
MOST_QUERIES: Final = 8
"""That share a key."""
LOWEST: Final = float32(-3e38)  # below every score


@cuda.jit(device=True, forceinline=True)
def over(a, b):
    """a // b of int32 that are not negative."""
    return int32(uint32(a) // uint32(b))


@cache
def row_loads(words: int) -> Any:
    """load(array, at): so many words of a row."""

    @cuda.jit(device=True, forceinline=True)
    def load_one(array, at):
        return (load_u32(array, at),)

    return {1: load_one, 2: load_u32x2, 4: load_u32x4}[words]


@cache
def attention_stage(
    warps: int, queries: int, size: int, normed: bool, q_at: int, shares_at: int, states_at: int
) -> Any:
    """(attend, prefetch) for heads of `size` values, `queries` of them to a key. normed: whether
    queries and keys have a norm of their own. In shared memory, q_at: the queries, the new key and
    value; shares_at: sums of each warp; states_at: its largest scores and sums of shares."""
    each, row, group_steps = size // 32, size // 64, (size // 8).bit_length() - 1
    load_row, n_keys, n_acc = row_loads(row), AHEAD * row, queries * each
    new_key_at, n_states = q_at + 4 * queries * size, 2 * warps

    @cuda.jit(device=True, forceinline=True)
    def share_of(p, kv):
        """(head of keys of this block, which of its splits, splits, positions of a warp)."""
        block = int32(cuda.blockIdx.x)
        splits = int32(min(over(int32(cuda.gridDim.x), kv), int32(MOST_SPLITS)))
        split = over(block, kv)
        in_turn = int32(warps * splits)
        return int32(block - split * kv), split, splits, over(int32(p + in_turn), in_turn)

    @cuda.jit(device=True, forceinline=True)
    def prefetch(cache, p, layer, length, kv):
        """Keys and values of this block to the L2, by one thread."""
        head, split, splits, of_warp = share_of(p, kv)
        first = int32(split * warps * of_warp)
        count = int32(min(int32(p - first), int32(warps * of_warp)))
        if split < splits and count > 0:
            at = (int64(layer * (2 * kv) + head) * length + first) * size
            prefetch_l2(cache, at, count * (2 * size))
            prefetch_l2(cache, at + int64(kv) * (length * size), count * (2 * size))

    @cuda.jit(device=True, forceinline=True)
    def head_of(x, y, at, weights, of_weights, cos, sin, position, epsilon, lane):
        """Eight values of a head of queries or keys for each lane, when they have come: normed and
        rotated."""
        w = cuda.local.array(8, float32)
        part = int32(8 * min(lane, int32(size // 8 - 1)))
        c = load_f32x4(cos, position + part) + load_f32x4(cos, position + part + 4)
        r = load_f32x4(sin, position + part) + load_f32x4(sin, position + part + 4)
        if normed:
            put(w, 0, load_f32x4(weights, of_weights + part))
            put(w, 4, load_f32x4(weights, of_weights + part + 4))
        x0, x1, x2, x3 = poll(y, at + part)
        put(x, 0, four_floats(x0, x1))
        put(x, 4, four_floats(x2, x3))
        if normed:
            squares = float32(0)
            for i in range(8):
                squares += x[i] * x[i]
            for i in range(group_steps):
                squares += shfl_xor(squares, 1 << i)
            squares = rsqrt(squares * float32(1 / size) + epsilon)
            for i in range(8):
                x[i] = x[i] * squares * w[i]
        rotate_neighbours(x, c, r)

    @cuda.jit(device=True, forceinline=True)
    def attend(
        smem, y, a, words, cache, p, cos, sin, of_queries, of_keys, scale, epsilon, layer,
        length, kv,
    ):  # fmt: skip
        """a = attention of y, the queries, keys and values of a layer, by all warps that multiply
        of all blocks. p: the position; length: of the cache. See `steps.kernels.between.chain`."""
        t = thread_index()
        lane, warp = int32(t & 31), int32(t >> 5)
        keys, values = cuda.local.array(n_keys, uint32), cuda.local.array(n_keys, uint32)
        acc, query = cuda.local.array(n_acc, float32), cuda.local.array(n_acc, float32)
        tops, totals = cuda.local.array(queries, float32), cuda.local.array(queries, float32)
        k, v = cuda.local.array(each, float32), cuda.local.array(each, float32)
        x, found = cuda.local.array(8, float32), cuda.local.array(MOST_SPLITS, uint64)
        of_warps = cuda.local.array(n_states, float32)
        block, blocks = int32(cuda.blockIdx.x), int32(cuda.gridDim.x)
        head, split, splits, of_warp = share_of(p, kv)
        span, tag = int32(warps * of_warp), uint32(layer + 1)
        active = over(int32(p + span), span)
        n_y, n_a = int32((queries + 2) * size * kv), int32(queries * size * kv)
        if split < active:
            keys_at = int64(layer * (2 * kv) + head) * (length * size)
            values_at = keys_at + int64(kv) * (length * size)
            first = int32(split * span + warp * of_warp)
            end = int32(min(int32(first + of_warp), int32(p + 1)))
            of_lane = int32(each * lane)
            for i in range(AHEAD):  # asked for before the queries have come
                if first + i < min(end, p):
                    at = int64(first + i) * size + of_lane
                    put(keys, row * i, load_row(cache, keys_at + at))
                    put(values, row * i, load_row(cache, values_at + at))

            # --- the queries; and of the block that has the new position, its key and value
            job, jobs = int32((warp + warps // 2) % warps), int32(queries)
            if split == active - 1:
                jobs = int32(queries + 2)
            new_at = int64(p) * size
            while job < jobs:
                at = int32(layer * n_y + (head * queries + job) * size)
                if job < queries:
                    head_of(x, y, at, of_queries, layer * size, cos, sin, new_at, epsilon, lane)
                    for i in range(8):
                        x[i] *= scale
                    if lane < size // 8:
                        to = int32(q_at + 4 * size * job + 32 * lane)
                        store_f32x4(smem, to, x[0], x[1], x[2], x[3])
                        store_f32x4(smem, to + 16, x[4], x[5], x[6], x[7])
                else:
                    at = int32(layer * n_y + (kv * queries + head) * size)
                    to = int32(new_key_at)
                    if job == queries:
                        head_of(x, y, at, of_keys, layer * size, cos, sin, new_at, epsilon, lane)
                        x0, x1, x2, x3 = as_halves(x)
                        place_at = keys_at + new_at
                    else:
                        to = int32(to + 2 * size)
                        at = int32(at + kv * size + 8 * min(lane, int32(size // 8 - 1)))
                        x0, x1, x2, x3 = poll(y, at)
                        place_at = values_at + new_at
                    if lane < size // 8:
                        store_u32x4(smem, to + 16 * lane, x0, x1, x2, x3)
                        store_u32x4(cache, place_at + 8 * lane, x0, x1, x2, x3)
                job = int32(job + warps)
            barrier_sync(1, 32 * warps)

            # --- the keys of this warp, one after the other
            for g in range(queries):
                tops[g], totals[g] = float32(LOWEST), float32(0)
                for i in range(each):
                    acc[g * each + i] = 0
                for i in range(0, each, 2):
                    two = load_f32x2(smem, q_at + 4 * (g * size + of_lane + i))
                    query[g * each + i], query[g * each + i + 1] = two
            at_key = first
            while at_key < end:
                for n in range(AHEAD):
                    if at_key + n < end:
                        if at_key + n == p:
                            put(keys, row * n, load_row(smem, new_key_at + 2 * of_lane))
                            put(
                                values, row * n, load_row(smem, new_key_at + 2 * size + 2 * of_lane)
                            )
                        for i in range(row):
                            k[2 * i] = half_to_float(uint16(keys[row * n + i]))
                            k[2 * i + 1] = half_to_float(uint16(keys[row * n + i] >> 16))
                            v[2 * i] = half_to_float(uint16(values[row * n + i]))
                            v[2 * i + 1] = half_to_float(uint16(values[row * n + i] >> 16))
                        for g in range(queries):
                            score = float32(0)
                            for i in range(each):
                                score += k[i] * query[g * each + i]
                            for i in range(5):
                                score += shfl_xor(score, 1 << i)
                            top = max(tops[g], score)
                            shrink, share = exp2(tops[g] - top), exp2(score - top)
                            tops[g], totals[g] = top, totals[g] * shrink + share
                            for i in range(each):
                                acc[g * each + i] = acc[g * each + i] * shrink + share * v[i]
                at_key = int32(at_key + AHEAD)
                for i in range(AHEAD):
                    if at_key + i < min(end, p):
                        at = int64(at_key + i) * size + of_lane
                        put(keys, row * i, load_row(cache, keys_at + at))
                        put(values, row * i, load_row(cache, values_at + at))
            for g in range(queries):
                to = int32(shares_at + 4 * ((warp * queries + g) * size + of_lane))
                for i in range(0, each, 2):
                    store_f32x2(smem, to + 4 * i, acc[g * each + i], acc[g * each + i + 1])
                if lane == 0:
                    to = int32(states_at + 8 * (warp * queries + g))
                    store_f32x2(smem, to, tops[g], totals[g])
            barrier_sync(1, 32 * warps)

            # --- the sums of all warps
            o = thread_index()
            while o < queries * size:
                g = int32(uint32(o) // uint32(size))
                top, whole, total = float32(LOWEST), float32(0), float32(0)
                for w in range(warps):
                    at = states_at + 8 * (w * queries + g)
                    of_warps[2 * w], of_warps[2 * w + 1] = load_f32x2(smem, at)
                    top = max(top, of_warps[2 * w])
                for w in range(warps):
                    share = exp2(of_warps[2 * w] - top)
                    whole += share * of_warps[2 * w + 1]
                    total += share * load_f32(smem, shares_at + 4 * (w * queries * size + o))
                if active == 1:
                    to = int32(layer * n_a + head * (queries * size) + o)
                    store_u16_relaxed(a, to, float_to_half(total * reciprocal(whole)))
                else:
                    of_split = int32((head * splits + split) * queries)
                    show(words, 2 * (of_split * size + o), tag, as_bits(total))
                    if int32(o - g * size) == 0:
                        to = int32(2 * splits * n_a + 4 * (of_split + g))
                        show(words, to, tag, as_bits(top))
                        show(words, to + 2, tag, as_bits(whole))
                o = int32(o + 32 * warps)
            barrier_sync(1, 32 * warps)

        # --- where positions are split, 32 outputs of a warp
        if active > 1:
            t = thread_index()
            lane, warp = int32(t & 31), int32(t >> 5)
            unit = int32(block + blocks * warp)
            while 32 * unit < n_a:
                query_head = over(int32(32 * unit), int32(size))
                head = over(query_head, int32(queries))
                g, o = int32(query_head - head * queries), int32(32 * unit - query_head * size)
                of_split = int32(head * splits * queries + g)
                from_at = int32((of_split + (lane >> 4) * queries) * size + o + 2 * (lane & 15))
                from_at = int32(2 * from_at)
                # All are polled at once, and a lane's state with them: each takes a trip to the L2.
                half, state_at = int32(lane >> 4), int32(2 * splits * n_a)
                state_at = int32(state_at + 4 * (of_split + min(lane, int32(active - 1)) * queries))
                missing, polls = True, int32(0)
                while missing:
                    for i in range(MOST_SPLITS // 2):
                        if 2 * i + half < active:
                            at = int32(from_at + 2 * (2 * i * queries * size))
                            two = load_u64x2_relaxed(words, at)
                            found[2 * i], found[2 * i + 1] = two[0], two[1]
                    state = load_u64x2_relaxed(words, state_at)
                    missing = not are_of(tag, state)
                    for i in range(MOST_SPLITS // 2):
                        two = found[2 * i], found[2 * i + 1]
                        if 2 * i + half < active and not are_of(tag, two):
                            missing = True
                    polls = int32(polls + 1)
                    if polls > int32(POLLS):
                        trap()
                cuda.syncwarp()
                top, whole = float32(LOWEST), float32(0)
                if lane < active:
                    top, whole = as_float(uint32(state[0])), as_float(uint32(state[1]))
                largest = top
                for i in range(5):
                    largest = max(largest, shfl_xor(largest, 1 << i))
                share = exp2(top - largest)
                whole *= share
                for i in range(5):
                    whole += shfl_xor(whole, 1 << i)
                total_0, total_1 = float32(0), float32(0)
                for i in range(MOST_SPLITS // 2):
                    other = int32(2 * i + (lane >> 4))
                    part = shfl(share, other)
                    if other < active:
                        total_0 += part * as_float(uint32(found[2 * i]))
                        total_1 += part * as_float(uint32(found[2 * i + 1]))
                by = reciprocal(whole)
                total_0 = (total_0 + shfl_xor(total_0, 16)) * by
                total_1 = (total_1 + shfl_xor(total_1, 16)) * by
                if lane < 16:
                    to = int32(layer * n_a + 32 * unit + 2 * lane)
                    store_u32_relaxed(a, to, floats_to_halves(total_0, total_1))
                unit = int32(unit + blocks * warps)

    return attend, prefetch
