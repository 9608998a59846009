"""Router: the experts of a token and their weights, in the launch that adds and norms.

    h + y -> x = norm -> logits = x @ router^T -> softmax -> the largest k, over their sum

Every thread block adds up the whole row, and has one expert. The norm is one factor r of a row, so
the sum of squares and the product with the router need not wait for each other: one barrier for
both, and the logit is r times the second. Weights of the norm and of the router are loaded before
the wait:

    norm weight, router | wait for the product | h, y | squares and product, barrier | logit

As every block reads h, the sum h + y goes to another array, each block storing some of it. The last
block to arrive, as in step 10, chooses: a thread has an expert and counts those before it, which is
its rank. No sort, and no round after another.

Each block reads 12 KB of h and y from the L2, 1.5 MB for 128 experts. So it is for few tokens; of a
prompt torch multiplies, and `choose` is a launch behind it.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, Final

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from steps.contract import Launch, Machine, ceil_div, dtype_name
from steps.instructions import (
    fence,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    load_f32,
    load_u32x4,
    shfl_xor,
    store_f32,
    store_u32,
)
from steps.instructions.approximate import exp2, reciprocal, rsqrt
from steps.kernels.between.argmax import ordered
from steps.kernels.between.eight import EIGHT, OF_DTYPE
from steps.kernels.between.values import eight_of, put

WARP: Final = 32
FOUR: Final = 4
LOWEST: Final = -(1 << 31)
MOST_THREADS: Final = 512
MOST_TOKENS: Final = 16
"""More read h and y so often that a product of their own is faster."""
MOST_EXPERTS: Final = 1024
LOG2_E: Final = math.log2(math.e)


def supports(width: int, experts: int, chosen: int) -> bool:
    """Whether there are kernels for such a router."""
    return width % EIGHT == 0 and 1 <= chosen <= min(experts, WARP) and experts <= MOST_EXPERTS


def padded(experts: int) -> int:
    """A multiple of four keys."""
    return ceil_div(experts, FOUR) * FOUR


@cache
def choice(experts: int, chosen: int, threads: int, normed: bool) -> Any:
    """pick(logits, row, values, keys, best, ids, shares, m, t), for all threads of a block: the
    choice of token m, of flat logits from `row` on. Shared memory to work in: values, float32
    [experts]; keys, int32 [`padded` experts] at a multiple of 16 bytes; best, float32 [chosen].
    normed: whether shares add up to 1."""

    places = padded(experts)

    @cuda.jit(device=True, forceinline=True)
    def before(key, j, own, e):
        """1 if expert j comes before e: of equal ones the first does."""
        return int32(1 if int32(key) > own - (1 if j < e else 0) else 0)

    @cuda.jit(device=True, forceinline=True)
    def pick(logits, row, values, keys, best, ids, shares, m, t):
        e = t
        while e < places:
            keys[e] = LOWEST
            if e < experts:
                values[e] = load_f32(logits, row + e)
                keys[e] = ordered(values[e])
            e = int32(e + threads)
        cuda.syncthreads()
        e = t
        while e < experts:
            own, rank = int32(keys[e]), int32(0)
            for j in range(0, places, FOUR):
                k0, k1, k2, k3 = load_u32x4(keys, j)
                rank = int32(rank + before(k0, j, own, e) + before(k1, j + 1, own, e))
                rank = int32(rank + before(k2, j + 2, own, e) + before(k3, j + 3, own, e))
            if rank < chosen:
                best[rank] = values[e]
                store_u32(ids, m * chosen + rank, uint32(e))
            e = int32(e + threads)
        cuda.syncthreads()
        if t < chosen:
            top, whole = best[0], float32(0)
            if normed:
                for j in range(chosen):
                    whole += exp2((best[j] - top) * float32(LOG2_E))
            else:
                for j in range(experts):
                    whole += exp2((values[j] - top) * float32(LOG2_E))
            own_share = exp2((best[t] - top) * float32(LOG2_E)) * reciprocal(whole)
            store_f32(shares, m * chosen + t, own_share)

    return pick


@cache
def kernel(
    threads: int, chunks: int, ragged: bool, of_y: str, of_x: str, experts: int, chosen: int,
    normed: bool,
) -> Any:  # fmt: skip
    """The kernel for rows of 8 * threads * chunks values, or, if ragged, of fewer; dtypes of y and
    x; experts and how many of them a token has; whether their shares add up to 1."""
    y_at, x_at, floats = OF_DTYPE[of_y], OF_DTYPE[of_x], OF_DTYPE["float32"]
    load, load_y, store, store_x = floats.load, y_at.load, floats.store, x_at.store
    warps, n_values = threads // WARP, EIGHT * chunks
    pick, places = choice(experts, chosen, threads, normed), padded(experts)

    @cuda.jit(launch_bounds=(threads, 1))
    def route(h, y, weight, mean_of, epsilon, router, residual, x, ids, shares, logits, arrived):
        """residual = h + y, x = its norm, ids and shares of its experts, of float32 h[M, width] and
        y[M, width], see `launch`. router: float32 [experts, width]. logits: float32 [M, experts],
        to work in; arrived: int32 [M], zero before and after. Grid: (experts, M)."""
        griddepcontrol_launch_dependents()
        squares_of = cuda.shared.array(warps, float32)
        products_of = cuda.shared.array(warps, float32)
        values, best = cuda.shared.array(experts, float32), cuda.shared.array(chosen, float32)
        keys, before = cuda.shared.array(places, int32, alignment=16), cuda.shared.array(1, int32)
        v, w = cuda.local.array(n_values, float32), cuda.local.array(n_values, float32)
        of_expert, added = cuda.local.array(n_values, float32), cuda.local.array(EIGHT, float32)
        t, width = int32(cuda.threadIdx.x), int32(h.shape[1])
        expert, m = int32(cuda.blockIdx.x), int32(cuda.blockIdx.y)
        row, first = int64(m) * width, int32(EIGHT * t)
        i = int32(0)
        while i < chunks:
            k = int32(first + i * (EIGHT * threads))
            if not ragged or k < width:
                put(w, EIGHT * i, load(weight, k))
                put(of_expert, EIGHT * i, load(router, int64(expert) * width + k))
            i = int32(i + 1)
        griddepcontrol_wait()

        squares, product = float32(0), float32(0)
        for i in range(chunks):
            k = int32(first + i * (EIGHT * threads))
            if not ragged or k < width:
                put(v, EIGHT * i, load(h, row + k))
                put(added, 0, load_y(y, row + k))
                for j in range(EIGHT * i, EIGHT * (i + 1)):
                    v[j] += added[j - EIGHT * i]
                    squares += v[j] * v[j]
                    product += v[j] * w[j] * of_expert[j]
        for r in range(5):
            squares += shfl_xor(squares, 1 << r)
            product += shfl_xor(product, 1 << r)
        if t & 31 == 0:
            squares_of[t >> 5], products_of[t >> 5] = squares, product
        cuda.syncthreads()
        total = float32(0)
        for warp in range(warps):
            total += squares_of[warp]
        by = rsqrt(total * mean_of + epsilon)
        if t == 0:
            logit = float32(0)
            for warp in range(warps):
                logit += products_of[warp]
            store_f32(logits, m * experts + expert, logit * by)
            fence()  # of this alone: no other store of the block need be seen by the last one
            before[0] = cuda.atomic.add(arrived, m, 1)

        # --- some of the row: every so many-th chunk
        for i in range(chunks):
            k = int32(first + i * (EIGHT * threads))
            own = uint32(t + i * threads) % uint32(experts) == uint32(expert)
            if own and (not ragged or k < width):
                store(residual, row + k, eight_of(v, EIGHT * i))
                for j in range(EIGHT * i, EIGHT * (i + 1)):
                    v[j] = v[j] * by * w[j]
                store_x(x, row + k, eight_of(v, EIGHT * i))

        cuda.syncthreads()
        if before[0] == experts - 1:
            fence()
            pick(logits, m * experts, values, keys, best, ids, shares, m, t)
            if t == 0:
                arrived[m] = 0  # for the next launch

    return route


def launch(
    h: Any, y: Any, weight: Any, epsilon: float, router: Any, residual: Any, x: Any, ids: Any,
    shares: Any, normed: bool, machine: Machine,
) -> Launch:  # fmt: skip
    """residual = h + y, x = its norm, and each token's experts and their shares, largest first.

    h, residual: float32 [M, width], two arrays. y: [M, width]. weight: float32 [width], of the
    norm. router: float32 [E, width]. x: [M, width]. ids: int32 [M, k], shares: float32 [M, k].
    All begin at a multiple of 16 bytes. normed: whether the shares of a token add up to 1, or are
    those of the softmax over all experts. M is 1 to `MOST_TOKENS`; scratch memory is of `machine`.
    """
    (m, width), (experts, _), chosen = h.shape, router.shape, ids.shape[1]
    threads = min(MOST_THREADS, WARP * ceil_div(width, WARP * EIGHT))
    chunks = ceil_div(width, threads * EIGHT)
    ragged = width < threads * chunks * EIGHT
    dtypes = dtype_name(y), dtype_name(x)
    run = kernel(threads, chunks, ragged, *dtypes, experts, chosen, normed)
    logits, arrived = (
        machine.empty((m, experts), np.float32),
        machine.array(np.zeros(m, np.int32)),
    )
    numbers = np.float32(1 / width), np.float32(epsilon)
    args = (h, y, weight, *numbers, router, residual, x, ids, shares, logits, arrived)
    return Launch(run, (experts, m), (threads,), args, overlap=True)


CHOOSING_THREADS: Final = 128


@cache
def choosing_kernel(experts: int, chosen: int, normed: bool) -> Any:
    """The kernel that chooses by logits, a thread block for a token."""
    pick = choice(experts, chosen, CHOOSING_THREADS, normed)
    places = padded(experts)

    @cuda.jit(launch_bounds=(CHOOSING_THREADS, 1))
    def choose_experts(logits, ids, shares):
        """ids and shares, [M, k], of float32 logits[M, E]."""
        griddepcontrol_launch_dependents()
        values, best = cuda.shared.array(experts, float32), cuda.shared.array(chosen, float32)
        keys, m = cuda.shared.array(places, int32, alignment=16), int32(cuda.blockIdx.x)
        griddepcontrol_wait()
        pick(logits, m * experts, values, keys, best, ids, shares, m, int32(cuda.threadIdx.x))

    return choose_experts


def choose(logits: Any, ids: Any, shares: Any, normed: bool) -> Launch:
    """ids and shares as of `launch`, of float32 logits [M, E] that there are."""
    (m, experts), chosen = logits.shape, ids.shape[1]
    run = choosing_kernel(experts, chosen, normed)
    return Launch(run, (m,), (CHOOSING_THREADS,), (logits, ids, shares), overlap=True)
