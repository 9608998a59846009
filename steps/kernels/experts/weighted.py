"""The weighted sum over a token's experts: C[t] = sum over s of router[t, s] * y[t, s].

A thread has four outputs of a token, or eight of 16 bits, and loads those of all its experts at
once, so that only one latency is seen. The order of the sum is that of s: the same bits in every
run.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from numba import cuda, float32, int32, int64

from steps.contract import Launch, ceil_div, dtype_name
from steps.instructions import (
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    load_f32,
    load_f32x4,
    load_u32,
    spread,
)
from steps.kernels.between.eight import EIGHT, OF_DTYPE
from steps.kernels.parts.epilogue.bias import LOAD_BIAS
from steps.kernels.parts.epilogue.rounded import STORE

THREADS: Final = 128
FOUR: Final = 4


@cache
def kernel(
    of_y: str, of_router: str, output: str, chosen: int, each: int, ordered: bool, scaled: bool
) -> Any:
    """The kernel for S = chosen and these dtypes, a thread having `each` outputs: as many of y as
    are 16 bytes, or one. ordered: products are in the order of experts. scaled: each has a scale
    that it is still to be multiplied by."""
    load_router, load_one = LOAD_BIAS[of_router], LOAD_BIAS[of_y]
    load_wide = load_f32x4 if each == FOUR else OF_DTYPE[of_y].load
    store_four, store_eight = OF_DTYPE[output].store_four, OF_DTYPE[output].store
    store_one = STORE[output]

    @cuda.jit(launch_bounds=(THREADS, 1))
    def weighted(y, router, c, places, scales):
        """c[T, N] of y[T, S, N] and router[T, S]. places: of `routing`, int32 [T S], where products
        are in its order. scales: float32 [T S], of the rows of y."""
        N = int32(c.shape[1])
        token = int64(cuda.blockIdx.x)
        n = int32(each * (cuda.blockIdx.y * THREADS + cuda.threadIdx.x))
        x, values = cuda.local.array(each, float32), cuda.local.array(each, float32)
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        if n < N:
            for i in range(each):
                x[i] = 0
            for s in range(chosen):
                slot = token * chosen + s
                factor = load_router(router, slot)
                row = int64(load_u32(places, slot)) if ordered else slot
                if scaled:
                    factor *= load_f32(scales, row)
                if each > 1:
                    spread(values, load_wide(y, row * N + n))
                else:
                    values[0] = load_one(y, row * N + n)
                for i in range(each):
                    x[i] += factor * values[i]
            if each == FOUR:
                store_four(c, token * N + n, x[0], x[1], x[2], x[3])
            elif each > FOUR:
                store_eight(c, token * N + n, (x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]))
            else:
                store_one(c, token * N + n, x[0])

    return weighted


def launch(y: Any, router: Any, c: Any, places: Any = None, scales: Any = None) -> Launch:
    """C[T, N] of products y, float32, float16 or bfloat16 [T, S, N], and the router's weights
    [T, S]. places: of `routing`, where products are in its order. scales: float32 [T S], of their
    rows, where they are still to be multiplied by them."""
    tokens, chosen, n = y.shape
    each = FOUR if dtype_name(y) == "float32" else EIGHT
    each = each if n % each == 0 else 1
    of_y, of_router, output = map(dtype_name, (y, router, c))
    ordered, scaled = places is not None, scales is not None
    run = kernel(of_y, of_router, output, chosen, each, ordered, scaled)
    grid = tokens, ceil_div(n, THREADS * each)
    args = y, router, c, places if ordered else router, scales if scaled else router
    return Launch(run, grid, (THREADS,), args, overlap=True)
