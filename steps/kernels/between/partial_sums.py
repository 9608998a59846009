"""The end of attention whose positions were split: one thread block adds up what all have left.

Each block has left a largest score, the sum of its shares relative to that score, and the sum of
values likewise. First the threads load the scores and sums of all blocks at once. Then a thread has
four values of a query, and loads those of `AT_ONCE` blocks before it adds them: a load from the L2
takes longer than all of the arithmetic.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from numba import cuda, float32, int32, int64

from steps.instructions import load_f32x2, load_f32x4
from steps.instructions.approximate import exp2, reciprocal
from steps.kernels.between.values import put, put_zeros

THREADS: Final = 128  # of the thread block
MOST_SPLITS: Final = 16
AT_ONCE: Final = 8


@cache
def sum_of_splits(queries: int, size: int, store_four: Any) -> Any:
    """add_up(partials, states, head_id, splits, blocks, tops, totals, out, offset, tag, t): for all
    threads of a block, behind a fence: out from flat `offset` on, of the first `blocks` of the
    `splits` partial sums of a kv head, number head_id of all sequences. tops, totals: shared
    float32 [queries * MOST_SPLITS] to work in. store_four: of (out, at, x0, x1, x2, x3, tag)."""
    n_head, n_loads = queries * size, 4 * AT_ONCE
    query_shift = (size // 4).bit_length() - 1  # thread i has a part of query i >> query_shift

    @cuda.jit(device=True, forceinline=True)
    def add_up(partials, states, head_id, splits, blocks, tops, totals, out, offset, tag, t):
        x = cuda.local.array(n_loads, float32)
        i, first = t, int64(head_id) * splits
        while i < blocks * queries:
            tops[i], totals[i] = load_f32x2(states, 2 * (first * queries + i))
            i = int32(i + THREADS)
        cuda.syncthreads()
        i = t
        while 4 * i < n_head:
            g = int32(i >> query_shift)
            largest, n = max(tops[g], tops[queries + g]), int32(2)  # there are two blocks at least
            while n < blocks:
                largest = max(largest, tops[n * queries + g])
                n = int32(n + 1)
            whole, y0, y1, y2, y3 = float32(0), float32(0), float32(0), float32(0), float32(0)
            at, n = first * n_head + 4 * i, int32(0)
            while n < blocks:
                for j in range(AT_ONCE):
                    if n + j < blocks:
                        put(x, 4 * j, load_f32x4(partials, at + j * n_head))
                    else:
                        put_zeros(x, 4 * j)
                for j in range(AT_ONCE):
                    share = float32(0)
                    if n + j < blocks:
                        share = exp2(tops[(n + j) * queries + g] - largest)
                        whole += share * totals[(n + j) * queries + g]
                    y0 += share * x[4 * j]
                    y1 += share * x[4 * j + 1]
                    y2 += share * x[4 * j + 2]
                    y3 += share * x[4 * j + 3]
                at, n = at + AT_ONCE * n_head, int32(n + AT_ONCE)
            by = reciprocal(whole)
            store_four(out, offset + 4 * i, y0 * by, y1 * by, y2 * by, y3 * by, tag)
            i = int32(i + THREADS)

    return add_up
