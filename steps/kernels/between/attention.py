"""Attention of one token of each sequence: rotary embedding, the cache, and softmax in one launch.

The queries that share a key are multiplied with it together, by tensor cores, and keys and values
are on their way before the queries exist. A warp takes 16 keys at a time; 8 is the most queries
that share a key, and the N of an mma. For D = 128 values of a head, and with A @ B + C of an
`mma.m16n8k16`:

    scores[16 keys, 8]  = keys[16, 128] @ queries[8, 128]^T            8 mma
    shares              = 2^(scores - the largest so far)
    sums[128, 8]       += values[16, 128]^T @ shares[16, 8]            8 mma

A lane has two queries of the scores and the same two of the sums, so that an online softmax needs
no other lane but for the largest score. As operand B the shares must be transposed: `movmatrix`.
Columns without a query are zeros. Queries and shares are rounded to float16, as keys and values
are.

Each warp has a ring of its own in shared memory, two slots of 16 keys and 16 values, filled by
`cp.async`: 70 KB under way in each block. The launch before makes the queries, and no earlier key:
the first slots are asked for before the wait, while that product still runs. The new key and value
are never in the ring. One group of threads has them in registers and stores them in the cache; in
the end they count as what one warp more has left.

Positions are split between thread blocks where a head has more than one can hide, and then the last
block to arrive adds up what all have left (`steps.kernels.parts.split_k_reduction`). How many
blocks have work follows from the position, which lies in memory: a CUDA graph replays at every one.

Lessons 9 (rings of cp.async), 11 (mma of float16), 10 (partial sums, arrival counters) and 14
(launches that overlap) teach what it uses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32, uint64

from steps.contract import Launch, Machine, ceil_div, dtype_name, multiprocessors
from steps.instructions import (
    cp_async_16_zfill,
    cp_async_commit,
    cp_async_wait,
    fence,
    floats_to_halves,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    load_u32x4,
    mma_m16n8k16_f16,
    movmatrix_trans,
    shfl_xor,
    store_u32x4,
    store_u64_relaxed,
)
from steps.instructions.approximate import exp2, reciprocal, rsqrt
from steps.kernels.between.eight import EIGHT, OF_DTYPE
from steps.kernels.between.heads import SIZES, add_scaled_from, quotient, rotate_neighbours
from steps.kernels.between.partial_sums import MOST_SPLITS, THREADS, sum_of_splits
from steps.kernels.between.polled import poll_three
from steps.kernels.between.values import add_scaled, as_halves, dot, eight_of, put
from steps.kernels.parts.activations.sources import four_floats
from steps.kernels.parts.exchange import PATIENCE, show, shown_twelve, tag_of
from steps.kernels.parts.split_k_reduction import count_block_arrival

RESIDENT: Final = 5  # blocks whose registers an SM has: so they have 96, and fit beside step 18
WARPS: Final = THREADS // 32
KEYS: Final = 16  # of a warp at a time: the M of an mma
TILE: Final = WARPS * KEYS  # of a thread block at a time
QUERIES: Final = 8  # columns of an mma
MOST_QUERIES: Final = QUERIES  # that share a key
LEAST_TILES: Final = 2  # of a thread block, if there are as many
ALONE: Final = 4  # tiles that one block takes faster than several, which hand over their sums
PAD: Final = 16  # bytes between two rows, so that the eight of an `ldmatrix` lie in all banks
LOWEST: Final = float32(-3e38)  # below every score: where a largest one is not known yet


def slot_count(size: int) -> int:
    """Slots in the ring of a warp: two, or one where two are more shared memory than a GPU has."""
    return 2 if size <= 128 else 1


def ring_bytes(size: int) -> int:
    """Shared memory of the rings of all warps: keys and values of 16 positions in each slot."""
    return WARPS * slot_count(size) * 2 * KEYS * (2 * size + PAD)


@dataclass(frozen=True, slots=True)
class Shown:
    """Words of `steps.kernels.parts.exchange` where these begin.

    qkv_at  : qkv, of the launch numbered one less; None where it is an array.
    out_at  : the output.
    """

    qkv_at: int | None
    out_at: int


@cache
def shown_loads(shown: Shown | None, polled: bool) -> Any:
    """load(words, at, other, third, tag, patience) -> 24 values of qkv, eight from each place on,
    asked for together: the launch before may show them only now."""
    qkv_at = 0 if shown is None or shown.qkv_at is None else shown.qkv_at

    @cuda.jit(device=True, forceinline=True)
    def eight(w0, w1, w2, w3):
        return four_floats(w0, w1) + four_floats(w2, w3)

    @cuda.jit(device=True, forceinline=True)
    def load(words, at, other, third, tag, patience):
        before = uint32(tag - 1)
        x = shown_twelve(
            words,
            int32(qkv_at + at),
            int32(qkv_at + other),
            int32(qkv_at + third),
            before,
            patience,
        )
        return (
            eight(x[0], x[1], x[2], x[3])
            + eight(x[4], x[5], x[6], x[7])
            + eight(x[8], x[9], x[10], x[11])
        )

    @cuda.jit(device=True, forceinline=True)
    def eight_of_two(x):
        low, high, upper = uint64(x[0]), uint64(x[1]), uint64(32)
        w0, w1, w2, w3 = uint32(low), uint32(low >> upper), uint32(high), uint32(high >> upper)
        return eight(w0, w1, w2, w3)

    @cuda.jit(device=True, forceinline=True)
    def load_polled(qkv, at, other, third, tag, patience):
        a, b, c = poll_three(qkv, at, other, third)
        return eight_of_two(a) + eight_of_two(b) + eight_of_two(c)

    return load_polled if polled else load


@cache
def stores(of_out: str, shown: Shown | None, polled: bool) -> tuple[Any, Any]:
    """(store, store_four) of eight and of four values of the output."""
    to, out_at = OF_DTYPE[of_out], 0 if shown is None else shown.out_at
    store_eight, store_both = to.store, to.store_four

    @cuda.jit(device=True, forceinline=True)
    def store(out, at, x, tag):
        store_eight(out, at, x)

    @cuda.jit(device=True, forceinline=True)
    def store_four(out, at, x0, x1, x2, x3, tag):
        store_both(out, at, x0, x1, x2, x3)

    @cuda.jit(device=True, forceinline=True)
    def show_four(words, at, x0, x1, x2, x3, tag):
        show(words, int32(out_at + at), tag, floats_to_halves(x0, x1))
        show(words, int32(out_at + at + 2), tag, floats_to_halves(x2, x3))

    @cuda.jit(device=True, forceinline=True)
    def show_eight(words, at, x, tag):
        show_four(words, at, x[0], x[1], x[2], x[3], tag)
        show_four(words, at + 4, x[4], x[5], x[6], x[7], tag)

    @cuda.jit(device=True, forceinline=True)
    def store_four_polled(out, at, x0, x1, x2, x3, tag):
        low, high = uint64(floats_to_halves(x0, x1)), uint64(floats_to_halves(x2, x3))
        store_u64_relaxed(out, at, high << uint64(32) | low)

    @cuda.jit(device=True, forceinline=True)
    def store_eight_polled(out, at, x, tag):
        store_four_polled(out, at, x[0], x[1], x[2], x[3], tag)
        store_four_polled(out, at + 4, x[4], x[5], x[6], x[7], tag)

    if polled:
        return store_eight_polled, store_four_polled
    return (store, store_four) if shown is None else (show_eight, show_four)


@cache
def kernel(
    queries: int, size: int, normed: bool, of_qkv: str, of_out: str, shown: Shown | None,
    polled: bool,
) -> Any:  # fmt: skip
    """The kernel for heads of `size` values, `queries` of them to a key. normed: whether queries
    and keys have a norm of their own; of_qkv, of_out: dtypes. shown: where the words lie through
    which launches that run at the same time show each other qkv and out, both float16. polled:
    these do so in qkv and out."""
    waits = not polled and (shown is None or shown.qkv_at is None)
    rotate = rotate_neighbours
    load, load_shown = OF_DTYPE[of_qkv].load, shown_loads(shown, polled)
    store, store_four = stores(of_out, shown, polled)
    add_up = sum_of_splits(queries, size, store_four)
    load_floats, store_floats = OF_DTYPE["float32"].load, OF_DTYPE["float32"].store
    # The D/8 threads of a group have a row between them; a butterfly over it takes as many steps.
    group_threads = size // EIGHT
    butterfly_steps = group_threads.bit_length() - 1
    chunks, turns = queries * group_threads, ceil_div(queries * group_threads, THREADS)
    slots, pitch = slot_count(size), 2 * size + PAD
    keys_bytes, slot_bytes = KEYS * pitch, 2 * KEYS * pitch
    k_steps = size // 16  # mma along a head, for scores; and of 16 rows each, for sums
    n_acc, n_query = 4 * k_steps, 2 * k_steps
    q_pitch, sums_pitch = size // 2 + 4, size + 4  # words of a row; in as many banks
    n_q, n_sums, n_states = queries * q_pitch, WARPS * queries * sums_pitch, MOST_SPLITS * queries
    n_value, n_head = size // 2, queries * size
    new_states = WARPS * queries  # where the state of the new key lies, behind those of warps
    wait_for_oldest = cp_async_wait(slots - 1)
    resident = RESIDENT if size <= 128 else 2

    @cuda.jit(device=True, forceinline=True)
    def norm(x, weight, epsilon):
        """x[0 .. 7] of each thread of a group, by the root mean square of all of them, times eight
        weights."""
        if normed:
            squares = dot(x, eight_of(x, 0)[:4], eight_of(x, 0)[4:])
            for step in range(butterfly_steps):
                squares += shfl_xor(squares, 1 << step)
            by = rsqrt(squares * float32(1 / size) + epsilon)
            for i in range(EIGHT):
                x[i] = x[i] * by * weight[i]

    @cuda.jit(device=True, forceinline=True)
    def issue(ring, slot, cache, keys_at, values_at, first, end, lane):
        """A warp begins to copy 16 keys and values to a slot, from position `first` on, with zeros
        from `end` on."""
        if first < end:
            for i in range(0, KEYS * group_threads, 32):
                row = int32((i + lane) >> butterfly_steps)
                chunk = int32((i + lane) & (group_threads - 1))
                to = int32(slot + row * pitch + 16 * chunk)
                at = int32((first + row) * size + EIGHT * chunk)
                count = uint32(16 if first + row < end else 0)
                cp_async_16_zfill(ring, to, cache, keys_at + at, count)
                cp_async_16_zfill(ring, to + keys_bytes, cache, values_at + at, count)
        cp_async_commit()

    @cuda.jit(device=True, forceinline=True)
    def attend(
        qkv, cache, position, cos, sin, scale, of_queries, of_keys, epsilon, partials, states,
        arrived, out, tag, patience,
    ):  # fmt: skip
        """out[B, heads * D] of qkv[B, (heads + 2 kv) * D], the heads of queries, keys and values.

        cache    : float16 [B, 2 kv, L, D], keys and values; the new ones are written there.
        position : int64 [1], theirs, below L. Those before it are read. They, the position, cos
                   and sin must not be written by launches that may still run. So a launch that does
                   not overlap lies between two tokens; in a decoder it counts the position.
        cos, sin : float32 [L, D], see `rotate_neighbours`. scale: of scores, log2(e) / sqrt(D).
        of_queries, of_keys : float32 [D], weights of their norms.
        partials, states, arrived : float32 [B * kv, splits, D * queries], [B * kv, splits,
        2 * queries] (largest score and sum of shares of each query) and int32 [B * kv].
        Grid: (splits, kv, B).
        """
        griddepcontrol_launch_dependents()
        ring = cuda.shared.array(0, uint8, alignment=128)
        sums = cuda.shared.array(n_sums, float32, alignment=16)
        tops = cuda.shared.array(n_states, float32)
        totals = cuda.shared.array(n_states, float32)
        before = cuda.shared.array(1, int32)
        q = cuda.shared.array(n_q, uint32, alignment=16)
        added = cuda.shared.array(n_value, uint32, alignment=16)  # the new value
        acc, query = cuda.local.array(n_acc, float32), cuda.local.array(n_query, uint32)
        new, key = cuda.local.array(EIGHT, float32), cuda.local.array(EIGHT, float32)
        value, first_query = cuda.local.array(EIGHT, float32), cuda.local.array(EIGHT, float32)
        t = int32(cuda.threadIdx.x)
        lane, warp = int32(t & 31), int32(t >> 5)
        part = int32(t & (group_threads - 1))  # which eight values of a head this thread has
        column, pair = int32(lane >> 2), int32(lane & 3)  # of a fragment, see `tensor_core`
        split, splits = int32(cuda.blockIdx.x), int32(cuda.gridDim.x)
        head, kv, b = int32(cuda.blockIdx.y), int32(cuda.gridDim.y), int32(cuda.blockIdx.z)
        length, head_id = int32(cache.shape[2]), int32(b * kv + head)
        token_at = int64(b) * qkv.shape[1]
        keys_at = (int64(b) * (2 * kv) + head) * length * size
        values_at = keys_at + int64(kv) * length * size

        # --- the positions of this thread block: first to end. The launch before, which makes qkv,
        # writes none of what is read here: it may still run.
        p = int32(position[0])
        tiles = int32(max((p + TILE - 1) // TILE, 1))
        span = int32(max(quotient(int32(tiles + splits - 1), splits), LEAST_TILES))
        if tiles <= ALONE:
            span = tiles
        blocks = quotient(int32(tiles + span - 1), span)  # that have work
        first = int32(split * (span * TILE))
        end = int32(min(int32(first + span * TILE), p))
        if split >= blocks:
            return
        own, at_key = int32(warp * (slots * slot_bytes)), int32(first + KEYS * warp)
        for s in range(slots):
            slot, here = int32(own + s * slot_bytes), int32(at_key + s * TILE)
            issue(ring, slot, cache, keys_at, values_at, here, end, lane)
        c = load_floats(cos, int64(p) * size + EIGHT * part)
        r = load_floats(sin, int64(p) * size + EIGHT * part)
        # these here too: behind the wait they would be one latency more
        w_query = load_floats(of_queries, EIGHT * part) if normed else c
        w_key = load_floats(of_keys, EIGHT * part) if normed else c
        if waits:
            griddepcontrol_wait()

        # --- the queries, in float16
        # Without a branch, which would wait for them: the first block alone needs these two.
        at = token_at + (kv * queries + head) * size + EIGHT * part
        if waits:
            put(key, 0, load(qkv, at))
            put(value, 0, load(qkv, at + kv * size))
        else:
            of_query = token_at + head * n_head + EIGHT * min(t, int32(chunks - 1))
            three = load_shown(qkv, at, at + kv * size, of_query, tag, patience)
            put(key, 0, three[:8])
            put(value, 0, three[8:16])
            put(first_query, 0, three[16:])
        for turn in range(turns):
            o = int32(t + turn * THREADS)
            for i in range(EIGHT):
                new[i] = 0
            if o < chunks:
                at = token_at + head * n_head + EIGHT * o
                if waits:
                    put(new, 0, load(qkv, at))
                elif turn == 0:
                    put(new, 0, eight_of(first_query, 0))
                else:
                    put(new, 0, load_shown(qkv, at, at, at, tag, patience)[:8])
            norm(new, w_query, epsilon)
            rotate(new, c, r)
            for i in range(EIGHT):
                new[i] *= scale
            if o < chunks:
                at = int32((o >> butterfly_steps) * q_pitch + 4 * part)
                store_u32x4(q, at, *as_halves(new))
        cuda.syncthreads()
        for k in range(n_query):  # operand B: column n is query n, or zeros
            query[k] = 0
            if column < queries:
                query[k] = q[column * q_pitch + 4 * k + pair]

        # --- the new key and value: into the cache, and its score beside those of warps, each group
        # of threads with a query
        if split == 0:
            norm(key, w_key, epsilon)
            rotate(key, c, r)
            new_key, new_value = as_halves(key), as_halves(value)
            if t < group_threads:
                new_at = int64(p) * size + EIGHT * part
                store_u32x4(cache, keys_at + new_at, *new_key)
                store_u32x4(cache, values_at + new_at, *new_value)
                store_u32x4(added, 4 * part, *new_value)
            put(key, 0, four_floats(new_key[0], new_key[1]))
            put(key, 4, four_floats(new_key[2], new_key[3]))
            for turn in range(turns):
                n = int32((t + turn * THREADS) >> butterfly_steps)
                of_query = int32(min(n, int32(queries - 1)))
                w0, w1, w2, w3 = load_u32x4(q, of_query * q_pitch + 4 * part)
                score = dot(key, four_floats(w0, w1), four_floats(w2, w3))
                for step in range(butterfly_steps):
                    score += shfl_xor(score, 1 << step)
                if part == 0 and n < queries:
                    tops[new_states + n], totals[new_states + n] = score, float32(1)

        # --- the keys before it, 16 of a warp after the other
        top_0, top_1, total_0, total_1 = LOWEST, LOWEST, float32(0), float32(0)
        for i in range(n_acc):
            acc[i] = 0
        slot = own
        # rows of the matrices that this lane addresses: keys as they lie, values transposed
        k_at = int32((lane & 15) * pitch + 16 * (lane >> 4))
        v_at = int32(keys_bytes + ((lane & 7) + 8 * (lane >> 4)) * pitch + (lane & 8) * 2)
        while at_key < end:
            wait_for_oldest()
            cuda.syncwarp()
            c0, c1, c2, c3 = float32(0), float32(0), float32(0), float32(0)
            for k in range(k_steps):
                a0, a1, a2, a3 = ldmatrix_x4(ring, int32(slot + k_at + 32 * k))
                c0, c1, c2, c3 = mma_m16n8k16_f16(
                    a0, a1, a2, a3, query[2 * k], query[2 * k + 1], c0, c1, c2, c3
                )
            if at_key + column >= end:
                c0 = c1 = float32(-math.inf)
            if at_key + column + 8 >= end:
                c2 = c3 = float32(-math.inf)
            larger_0, larger_1 = max(c0, c2), max(c1, c3)
            for step in range(3):
                larger_0 = max(larger_0, shfl_xor(larger_0, 4 << step))
                larger_1 = max(larger_1, shfl_xor(larger_1, 4 << step))
            larger_0, larger_1 = max(top_0, larger_0), max(top_1, larger_1)
            shrink_0, shrink_1 = exp2(top_0 - larger_0), exp2(top_1 - larger_1)
            top_0, top_1 = larger_0, larger_1
            c0, c1, c2, c3 = exp2(c0 - top_0), exp2(c1 - top_1), exp2(c2 - top_0), exp2(c3 - top_1)
            total_0 = total_0 * shrink_0 + c0 + c2
            total_1 = total_1 * shrink_1 + c1 + c3
            b0, b1 = movmatrix_trans(floats_to_halves(c0, c1)), floats_to_halves(c2, c3)
            b1 = movmatrix_trans(b1)
            for j in range(k_steps):
                a0, a1, a2, a3 = ldmatrix_x4_trans(ring, int32(slot + v_at + 32 * j))
                d0, d1 = acc[4 * j] * shrink_0, acc[4 * j + 1] * shrink_1
                d2, d3 = acc[4 * j + 2] * shrink_0, acc[4 * j + 3] * shrink_1
                d0, d1, d2, d3 = mma_m16n8k16_f16(a0, a1, a2, a3, b0, b1, d0, d1, d2, d3)
                acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3] = d0, d1, d2, d3
            cuda.syncwarp()
            behind = int32(at_key + slots * TILE)
            issue(ring, slot, cache, keys_at, values_at, behind, end, lane)
            at_key, slot = int32(at_key + TILE), int32(slot + slot_bytes)
            if slot == own + slots * slot_bytes:
                slot = own

        # --- what each warp has, to shared memory
        for step in range(3):
            total_0 += shfl_xor(total_0, 4 << step)
            total_1 += shfl_xor(total_1, 4 << step)
        n = int32(2 * pair)
        to = int32((warp * queries + n) * sums_pitch + column)
        if n < queries:
            for j in range(k_steps):
                sums[to + 16 * j], sums[to + 16 * j + 8] = acc[4 * j], acc[4 * j + 2]
        if n + 1 < queries:
            for j in range(k_steps):
                sums[to + sums_pitch + 16 * j] = acc[4 * j + 1]
                sums[to + sums_pitch + 16 * j + 8] = acc[4 * j + 3]
        if column == 0 and n < queries:
            tops[warp * queries + n], totals[warp * queries + n] = top_0, total_0
        if column == 0 and n + 1 < queries:
            tops[warp * queries + n + 1], totals[warp * queries + n + 1] = top_1, total_1
        cuda.syncthreads()

        # --- the sums of all warps, and the new value
        if not waits and blocks > 1:
            griddepcontrol_wait()  # partial sums of the launch before lie at the same place
        of_head = int64(b) * out.shape[1] + head * n_head
        partial_id = int64(head_id) * splits + split
        o = t
        while o < chunks:
            n, at = int32(o >> butterfly_steps), int32(EIGHT * o)
            larger = tops[n]
            for w in range(1, WARPS):
                larger = max(larger, tops[w * queries + n])
            if split == 0:
                larger = max(larger, tops[new_states + n])
            whole = float32(0)
            for i in range(EIGHT):
                new[i] = 0
            for w in range(WARPS):
                shrink = exp2(tops[w * queries + n] - larger)
                whole += shrink * totals[w * queries + n]
                add_scaled_from(new, shrink, sums, (w * queries + n) * sums_pitch + EIGHT * part)
            if split == 0:
                shrink = exp2(tops[new_states + n] - larger)
                whole += shrink
                w0, w1, w2, w3 = load_u32x4(added, 4 * part)
                add_scaled(new, 0, shrink, four_floats(w0, w1), four_floats(w2, w3))
            if blocks == 1:
                by = reciprocal(whole)
                for i in range(EIGHT):
                    new[i] *= by
                store(out, of_head + at, eight_of(new, 0), tag)
            else:
                store_floats(partials, partial_id * n_head + at, eight_of(new, 0))
                if part == 0:
                    states[partial_id * (2 * queries) + 2 * n] = larger
                    states[partial_id * (2 * queries) + 2 * n + 1] = whole
            o = int32(o + THREADS)
        if blocks == 1:
            if not waits:
                griddepcontrol_wait()
            return

        # --- the last of the blocks to arrive adds up all partial sums
        count_block_arrival(arrived, head_id, before, t)
        if before[0] < int32(blocks - 1):
            return
        fence()
        add_up(partials, states, head_id, splits, blocks, tops, totals, out, of_head, tag, t)
        if t == 0:
            arrived[head_id] = 0  # for the next launch

    @cuda.jit(launch_bounds=(THREADS, resident))
    def attention(
        qkv, cache, position, cos, sin, scale, of_queries, of_keys, epsilon, partials, states,
        arrived, out,
    ):  # fmt: skip
        attend(
            qkv, cache, position, cos, sin, scale, of_queries, of_keys, epsilon, partials, states,
            arrived, out, uint32(0), int32(0),
        )  # fmt: skip

    @cuda.jit(launch_bounds=(THREADS, resident))
    def attention_shown(
        qkv, cache, position, cos, sin, scale, of_queries, of_keys, epsilon, partials, states,
        arrived, words, index, count, patience,
    ):  # fmt: skip
        attend(
            qkv, cache, position, cos, sin, scale, of_queries, of_keys, epsilon, partials, states,
            arrived, words, tag_of(words, index, count), patience,
        )  # fmt: skip

    return attention if shown is None else attention_shown


def supports(heads: int, kv: int, size: int) -> bool:
    """Whether there is a kernel for so many heads of queries and of keys, of `size` values each."""
    return heads % kv == 0 and heads // kv <= MOST_QUERIES and size in SIZES


def split_count(batch: int, kv: int, length: int) -> int:
    """Thread blocks for the positions of a head, so that each SM has one, if there are enough."""
    wanted = multiprocessors() // (batch * kv)
    return max(1, min(wanted, MOST_SPLITS, ceil_div(length, LEAST_TILES * TILE)))


def launch(
    qkv: Any, cache: Any, position: Any, cos: Any, sin: Any, out: Any, machine: Machine,
    head_norms: tuple[Any, Any, float] | None = None, polled: bool = False,
) -> Launch:  # fmt: skip
    """The attention of one token of each sequence, see the kernel; scratch memory is of `machine`.
    head_norms: weights [D] of the norms of queries and of keys, and epsilon. polled: of one
    sequence, beside the launches that make qkv and read out, both float16 and full of `NOTHING`
    before (`steps.kernels.between.polled`).

    ValueError for heads that `supports` says no to, and for a cache of too many positions.
    """
    dtypes = dtype_name(qkv), dtype_name(out)
    return _launch(
        qkv, cache, position, cos, sin, machine, head_norms, out.shape[1], dtypes, None, (out,),
        polled,
    )  # fmt: skip


def launch_shown(
    qkv: Any | None, cache: Any, position: Any, cos: Any, sin: Any, words: Any, places: Shown,
    width: int, index: int, count: int, machine: Machine,
    head_norms: tuple[Any, Any, float] | None = None, patience: int = PATIENCE,
) -> Launch:  # fmt: skip
    """That of one sequence, which runs beside the launch before it and the one behind it.

    words: uint32 [1, any], in which its output, `width` float16, is shown, and qkv, if that is
    None. index, count: of the launch in its token, see `steps.kernels.parts.exchange`.
    """
    numbers = np.int32(index), np.int32(count), np.int32(patience)
    given, dtypes = words if qkv is None else qkv, ("float16", "float16")
    return _launch(
        given, cache, position, cos, sin, machine, head_norms, width, dtypes, places,
        (words, *numbers), False,
    )  # fmt: skip


def _launch(
    qkv: Any, cache: Any, position: Any, cos: Any, sin: Any, machine: Machine, head_norms: Any,
    width: int, dtypes: tuple[str, str], shown: Shown | None, last: tuple[Any, ...], polled: bool,
) -> Launch:  # fmt: skip
    batch, twice, length, size = cache.shape
    kv, heads = twice // 2, width // size
    if not supports(heads, kv, size):
        raise ValueError(
            f"attention takes heads of {', '.join(map(str, SIZES))} values, and up to "
            f"{MOST_QUERIES} of queries to one of keys, not {heads} to {kv} of {size} values"
        )
    if length * size >= 2**31:  # offsets in a head's keys are int32
        raise ValueError(
            f"the cache has {length} positions of {size} values a head, and attention takes "
            f"{(2**31 - 1) // size} at most"
        )
    queries, splits = heads // kv, split_count(batch, kv, length)
    scratch = (
        machine.empty((batch * kv * splits * queries * size,), np.float32),
        machine.empty((batch * kv * splits * queries * 2,), np.float32),
        machine.array(np.zeros(batch * kv, np.int32)),
    )
    scale = np.float32(math.log2(math.e) / math.sqrt(size))
    *weights, epsilon = head_norms or (cos, cos, 0.0)
    run = kernel(queries, size, head_norms is not None, *dtypes, shown, polled)
    tables = cos, sin, scale, *weights, np.float32(epsilon)
    args = (qkv, cache, position, *tables, *scratch, *last)
    return Launch(run, (splits, kv, batch), (THREADS,), args, ring_bytes(size), overlap=True)
