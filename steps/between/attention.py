"""Attention of one token of each sequence: rotary embedding, the cache, and softmax in one launch.

What is new
    Every thread has eight values of a head. The D/8 threads of a *group* have a key between them:
    each multiplies its eight by its eight of all queries that share the key, and a butterfly adds
    up. All threads of a group then know the scores, so each goes on alone with its eight of the
    value: an online softmax, its largest score, sum and eight sums of values for each query, and no
    barrier before the end. For D = 128, 16 threads and 4 queries to a key:

        thread of group     0        1       ...      15
        key of a group      0-7      8-15    ...   120-127     16 bytes each, in one row of memory
        queries             4 x 8    4 x 8   ...    4 x 8      float32, in shared memory
        sums of values      4 x 8    4 x 8   ...    4 x 8      float32, in registers

    Positions are split between thread blocks, kv heads and sequences. The last of a head's blocks
    to arrive adds up what all have left (`steps.components.split_k_reduction`). How many blocks
    have work follows from the position, which lies in memory: a CUDA graph replays at every one.
    The new key and value need no way through memory: in a head's first block the first group puts
    them into the cache, and begins its sums with them.
Why it should help
    A compiled attention writes scores, shares and the rotated queries, and reads the whole length
    of the cache whatever the position: 10.3 us of a layer. Here 0.7 us until the wait returns, 0.7
    for queries, keys and values, 1 for the arithmetic, and 2 for handing over partial sums, which
    takes a fence, a counter, and loads of what others left. Position, cos and sin are there by
    then, and the first keys and values on their way, as the launch before leaves them alone. 16
    sequences of 700 positions read 46 MB: 11 us.
What it costs
    Up to 16 partial sums of each head, and a counter for each kv head that launches leave at zero.
Machine code
    LDG.E.128 of keys and values, LDS.128 of queries, FFMA, MUFU.EX2; 96 registers, no local memory.
Prerequisites
    Steps 10 (partial sums, arrival counters) and 14 (launches that overlap).
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, Final

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from steps.between.eight import EIGHT, OF_DTYPE
from steps.between.heads import LINE, SIZES, add_scaled_from, quotient, rotate_neighbours
from steps.between.partial_sums import MOST_SPLITS, THREADS, sum_of_splits
from steps.between.values import add_scaled, as_halves, dot, eight_of, put, put_zeros
from steps.components.activations.gated import exp2, reciprocal
from steps.components.activations.sources import four_floats
from steps.components.split_k_reduction import count_block_arrival
from steps.contract import Launch, Machine, ceil_div, dtype_name, multiprocessors
from steps.instructions import (
    fence,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    load_f32x4,
    load_u32x4,
    shfl_xor,
    store_f32x4,
    store_u32x4,
)
from steps.instructions.approximate import rsqrt
from steps.instructions.prefetch import prefetch_line

RESIDENT: Final = 5  # blocks on an SM, at least: so they have 96 registers, and fit beside step 18
WARPS: Final = THREADS // 32
KEYS_AT_ONCE: Final = 2  # keys of a group that are in flight together
BLOCKS_PER_SM: Final = 4  # wanted, so that an SM always has loads in flight
LOWEST: Final = float32(-3e38)  # below every score: where a largest one is not known yet
MOST_QUERIES: Final = 8  # that share a key: of each a thread keeps eight sums


@cache
def kernel(queries: int, size: int, normed: bool, of_qkv: str, of_out: str) -> Any:
    """The kernel for heads of `size` values, `queries` of them to a key. normed: whether queries
    and keys have a norm of their own; of_qkv, of_out: dtypes."""
    load, store, rotate = OF_DTYPE[of_qkv].load, OF_DTYPE[of_out].store, rotate_neighbours
    add_up = sum_of_splits(queries, size, of_out)
    load_floats, store_floats = OF_DTYPE["float32"].load, OF_DTYPE["float32"].store
    # A butterfly over a group takes butterfly_steps, one over the groups of a warp group_steps.
    group_threads = size // EIGHT
    butterfly_steps = group_threads.bit_length() - 1
    group_steps = 5 - butterfly_steps
    groups = THREADS // group_threads
    tile = groups * KEYS_AT_ONCE  # keys of a thread block at a time
    resident = RESIDENT if queries <= 4 else 2
    n_head, n_acc = queries * size, EIGHT * queries
    n_scores, n_kv = KEYS_AT_ONCE * queries, 4 * KEYS_AT_ONCE
    chunks, turns = queries * group_threads, ceil_div(queries * group_threads, THREADS)
    n_sums, n_states = WARPS * n_head, MOST_SPLITS * queries

    @cuda.jit(device=True, forceinline=True)
    def norm(x, at, weight, offset, epsilon):
        """x[at .. at + 7] of each thread of a group, by the root mean square of all of them."""
        if normed:
            squares = dot(x, at, eight_of(x, at)[:4], eight_of(x, at)[4:])
            for step in range(butterfly_steps):
                squares += shfl_xor(squares, 1 << step)
            by, w = rsqrt(squares * float32(1 / size) + epsilon), load_floats(weight, offset)
            for i in range(EIGHT):
                x[at + i] = x[at + i] * by * w[i]

    @cuda.jit(device=True, forceinline=True)
    def query_at(g, part):
        """Where the first four values of a thread's eight of query g lie in shared memory. The
        other four are 4 * group_threads behind: so lanes read words side by side."""
        return int32(g * size + 4 * part)

    @cuda.jit(device=True, forceinline=True)
    def score_of(q, at, low, high):
        """The product of eight values of a query and of a key."""
        a, b = load_f32x4(q, at), load_f32x4(q, at + 4 * group_threads)
        whole = a[0] * low[0] + a[1] * low[1]
        whole += a[2] * low[2]
        whole += a[3] * low[3]
        whole += b[0] * high[0]
        whole += b[1] * high[1]
        whole += b[2] * high[2]
        return whole + b[3] * high[3]

    @cuda.jit(launch_bounds=(THREADS, resident))
    def attention(
        qkv, cache, position, cos, sin, scale, of_queries, of_keys, epsilon, partials, states,
        arrived, out,
    ):  # fmt: skip
        """out[B, heads * D] of qkv[B, (heads + 2 kv) * D], the heads of queries, keys and values.

        cache    : float16 [B, 2 kv, L, D], keys and values; the new ones are written there.
        position : int64 [1], theirs, below L. Those before it are read. They, the position, cos
                   and sin must not be written by the launch before, with which this one overlaps.
        cos, sin : float32 [L, D], see `rotate_neighbours`. scale: of scores, log2(e) / sqrt(D).
        of_queries, of_keys : float32 [D], weights of their norms.
        partials, states, arrived : float32 [B * kv, splits, D * queries], [B * kv, splits,
        2 * queries] (largest score and sum of shares of each query) and int32 [B * kv].
        Grid: (splits, kv, B).
        """
        griddepcontrol_launch_dependents()
        sums = cuda.shared.array(n_sums, float32, alignment=16)
        tops = cuda.shared.array(n_states, float32)
        totals = cuda.shared.array(n_states, float32)
        before = cuda.shared.array(1, int32)
        q = cuda.shared.array(n_head, float32, alignment=16)
        acc = cuda.local.array(n_acc, float32)
        # largest score so far, and the sum of all shares relative to it
        top, total = cuda.local.array(queries, float32), cuda.local.array(queries, float32)
        k_words, v_words = cuda.local.array(n_kv, uint32), cuda.local.array(n_kv, uint32)
        scores, new = cuda.local.array(n_scores, float32), cuda.local.array(EIGHT, float32)
        key, value = cuda.local.array(EIGHT, float32), cuda.local.array(EIGHT, float32)
        t = int32(cuda.threadIdx.x)
        lane, warp, group = t & 31, t >> 5, t >> butterfly_steps
        part = int32(t & (group_threads - 1))  # which eight values of a head this thread has
        split, splits = int32(cuda.blockIdx.x), int32(cuda.gridDim.x)
        head, kv, b = int32(cuda.blockIdx.y), int32(cuda.gridDim.y), int32(cuda.blockIdx.z)
        length, head_id = int32(cache.shape[2]), int32(b * kv + head)
        token_at = int64(b) * qkv.shape[1]
        keys_at = (int64(b) * (2 * kv) + head) * length * size + EIGHT * part
        values_at = keys_at + int64(kv) * length * size

        # --- the positions of this thread block: first to end. The launch before, which makes qkv,
        # writes none of what is read here: it may still run.
        p = int32(position[0])
        tiles = int32(max(quotient(int32(p + tile - 1), tile), 1))
        span = int32(quotient(int32(tiles + splits - 1), splits) * tile)
        first = int32(split * span)
        blocks = int32(quotient(int32(max(p, 1) + span - 1), span))  # that have work
        end = int32(min(int32(first + span), p))

        ahead, stop = int32(first * size + LINE * t), int32(end * size)
        if ahead < stop:  # what the loop below loads is on its way while qkv is made
            prefetch_line(cache, keys_at + (ahead - EIGHT * part))
            prefetch_line(cache, values_at + (ahead - EIGHT * part))
        ahead = int32(first * size + LINE * (THREADS + lane))

        c = load_floats(cos, int64(p) * size + EIGHT * part)
        r = load_floats(sin, int64(p) * size + EIGHT * part)
        griddepcontrol_wait()
        if split > 0 and first >= p:
            return

        # --- the queries, which each thread reads again with its key
        # Without a branch, which would wait for them: the first block alone needs these two.
        put(key, 0, load(qkv, token_at + (kv * queries + head) * size + EIGHT * part))
        put(value, 0, load(qkv, token_at + (kv * queries + kv + head) * size + EIGHT * part))
        for turn in range(turns):
            o = int32(t + turn * THREADS)
            for i in range(EIGHT):
                new[i] = 0
            if o < chunks:
                put(new, 0, load(qkv, token_at + head * n_head + EIGHT * o))
            norm(new, 0, of_queries, EIGHT * part, epsilon)
            rotate(new, 0, c, r)
            for i in range(EIGHT):
                new[i] *= scale
            if o < chunks:
                at = query_at(o >> butterfly_steps, part)
                store_f32x4(q, at, new[0], new[1], new[2], new[3])
                store_f32x4(q, at + 4 * group_threads, new[4], new[5], new[6], new[7])
        cuda.syncthreads()
        for g in range(queries):
            top[g], total[g] = LOWEST, float32(0)
            for i in range(EIGHT):
                acc[EIGHT * g + i] = 0

        # --- the new key and value: into the cache, and the first group adds them up first
        if split == 0:
            norm(key, 0, of_keys, EIGHT * part, epsilon)
            rotate(key, 0, c, r)
            new_key, new_value = as_halves(key, 0), as_halves(value, 0)
            if group == 0:
                store_u32x4(cache, keys_at + p * size, *new_key)
                store_u32x4(cache, values_at + p * size, *new_value)
            put(value, 0, four_floats(new_value[0], new_value[1]))
            put(value, 4, four_floats(new_value[2], new_value[3]))
            low, high = four_floats(new_key[0], new_key[1]), four_floats(new_key[2], new_key[3])
            for g in range(queries):
                score = score_of(q, query_at(g, part), low, high)
                for step in range(butterfly_steps):
                    score += shfl_xor(score, 1 << step)
                if group == 0:
                    top[g], total[g] = score, float32(1)
                    for i in range(EIGHT):
                        acc[EIGHT * g + i] = value[i]

        # --- the keys before it, a tile after the other
        while first < end:
            own_key = int32(first + group)
            k_at, v_at = keys_at + own_key * size, values_at + own_key * size
            for j in range(KEYS_AT_ONCE):
                put_zeros(k_words, 4 * j)
                put_zeros(v_words, 4 * j)
                if int32(own_key + j * groups) < end:
                    put(k_words, 4 * j, load_u32x4(cache, k_at + j * (groups * size)))
                    put(v_words, 4 * j, load_u32x4(cache, v_at + j * (groups * size)))
            if ahead < stop and warp < 2:  # a tile has 32 lines of keys and 32 of values
                prefetch_line(cache, (keys_at if warp == 0 else values_at) + (ahead - EIGHT * part))
            ahead = int32(ahead + LINE * 32)
            for j in range(KEYS_AT_ONCE):
                low = four_floats(k_words[4 * j], k_words[4 * j + 1])
                high = four_floats(k_words[4 * j + 2], k_words[4 * j + 3])
                for g in range(queries):
                    scores[j * queries + g] = score_of(q, query_at(g, part), low, high)
            for n in range(n_scores):
                for step in range(butterfly_steps):
                    scores[n] += shfl_xor(scores[n], 1 << step)
            for j in range(KEYS_AT_ONCE):
                if int32(own_key + j * groups) >= end:
                    for g in range(queries):
                        scores[j * queries + g] = -math.inf
            for g in range(queries):
                larger = top[g]
                for j in range(KEYS_AT_ONCE):
                    larger = max(larger, scores[j * queries + g])
                shrink = exp2(top[g] - larger)
                top[g], total[g] = larger, total[g] * shrink
                for i in range(EIGHT):
                    acc[EIGHT * g + i] *= shrink
                for j in range(KEYS_AT_ONCE):
                    scores[j * queries + g] = exp2(scores[j * queries + g] - larger)
                    total[g] += scores[j * queries + g]
            for j in range(KEYS_AT_ONCE):
                low = four_floats(v_words[4 * j], v_words[4 * j + 1])
                high = four_floats(v_words[4 * j + 2], v_words[4 * j + 3])
                for g in range(queries):
                    add_scaled(acc, EIGHT * g, scores[j * queries + g], low, high)
            first = int32(first + tile)

        # --- the groups of a warp, then its warps
        for g in range(queries):
            for step in range(group_steps):
                mask = group_threads << step
                larger = max(top[g], shfl_xor(top[g], mask))
                shrink = exp2(top[g] - larger)
                top[g], total[g] = larger, total[g] * shrink
                total[g] += shfl_xor(total[g], mask)
                for i in range(EIGHT):
                    acc[EIGHT * g + i] *= shrink
                    acc[EIGHT * g + i] += shfl_xor(acc[EIGHT * g + i], mask)
        if lane < group_threads:
            for g in range(queries):
                at = int32((warp * queries + g) * size + EIGHT * part)
                store_floats(sums, at, eight_of(acc, EIGHT * g))
                if part == 0:
                    tops[warp * queries + g], totals[warp * queries + g] = top[g], total[g]
        cuda.syncthreads()
        of_head = int64(b) * out.shape[1] + head * n_head
        partial_id = int64(head_id) * splits + split
        o = t
        while o < chunks:
            g, at = o >> butterfly_steps, EIGHT * o
            larger = tops[g]
            for w in range(1, WARPS):
                larger = max(larger, tops[w * queries + g])
            whole = float32(0)
            for i in range(EIGHT):
                new[i] = 0
            for w in range(WARPS):
                shrink = exp2(tops[w * queries + g] - larger)
                whole += shrink * totals[w * queries + g]
                add_scaled_from(new, shrink, sums, w * n_head + at)
            if blocks == 1:
                by = reciprocal(whole)
                for i in range(EIGHT):
                    new[i] *= by
                store(out, of_head + at, eight_of(new, 0))
            else:
                store_floats(partials, partial_id * n_head + at, eight_of(new, 0))
                if o & (group_threads - 1) == 0:
                    states[partial_id * (2 * queries) + 2 * g] = larger
                    states[partial_id * (2 * queries) + 2 * g + 1] = whole
            o = int32(o + THREADS)
        if blocks == 1:
            return

        # --- the last of the blocks to arrive adds up all partial sums
        count_block_arrival(arrived, head_id, before, t)
        if before[0] < int32(blocks - 1):
            return
        fence()
        add_up(partials, states, head_id, splits, blocks, tops, totals, out, of_head, t)
        if t == 0:
            arrived[head_id] = 0  # for the next launch

    return attention


def supports(heads: int, kv: int, size: int) -> bool:
    """Whether there is a kernel for so many heads of queries and of keys, of `size` values each."""
    return heads % kv == 0 and heads // kv <= MOST_QUERIES and size in SIZES


def split_count(batch: int, kv: int, length: int, size: int) -> int:
    """Thread blocks for the positions of a head: as many as the GPU holds at a time."""
    tile = THREADS // (size // EIGHT) * KEYS_AT_ONCE
    wanted = BLOCKS_PER_SM * multiprocessors() // (batch * kv)
    return max(1, min(wanted, MOST_SPLITS, ceil_div(length, tile)))


def launch(
    qkv: Any, cache: Any, position: Any, cos: Any, sin: Any, out: Any, machine: Machine,
    head_norms: tuple[Any, Any, float] | None = None,
) -> Launch:  # fmt: skip
    """The attention of one token of each sequence, see the kernel; scratch memory is of `machine`.
    head_norms: weights [D] of the norms of queries and of keys, and epsilon.

    ValueError for heads that `supports` says no to.
    """
    batch, twice, length, size = cache.shape
    kv, heads = twice // 2, out.shape[1] // size
    if not supports(heads, kv, size):
        raise ValueError(
            f"attention takes heads of {', '.join(map(str, SIZES))} values, and up to "
            f"{MOST_QUERIES} of queries to one of keys, not {heads} to {kv} of {size} values"
        )
    queries, splits = heads // kv, split_count(batch, kv, length, size)
    scratch = (
        machine.empty((batch * kv * splits * queries * size,), np.float32),
        machine.empty((batch * kv * splits * queries * 2,), np.float32),
        machine.array(np.zeros(batch * kv, np.int32)),
    )
    scale = np.float32(math.log2(math.e) / math.sqrt(size))
    *weights, epsilon = head_norms or (cos, cos, 0.0)
    run = kernel(queries, size, head_norms is not None, dtype_name(qkv), dtype_name(out))
    tables = cos, sin, scale, *weights, np.float32(epsilon)
    args = (qkv, cache, position, *tables, *scratch, out)
    return Launch(run, (splits, kv, batch), (THREADS,), args, overlap=True)
