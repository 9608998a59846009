"""The weighted sum over a token's experts: C[t] = sum over s of router[t, s] * y[t, s].

What is new
    A thread has four outputs of a token and loads those of all its experts at once, so that only
    one latency is seen. The order of the sum is that of s: the same bits in every run.
Why it should help
    One token of 8 x 2048 float32 is 64 KB: nothing but latency, 1.5 us, of which the launch is
    hidden behind the product before it. 64 tokens are 4 MB of the L2, 1 us.
What it costs
    A launch, and 8 bytes of each product.
Machine code
    LDG.E.128, no division.
Prerequisites
    Steps 5 (wide accesses) and 14 (launches that overlap).
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from numba import cuda, float32, int32, int64, uint16

from steps.contract import Launch, ceil_div, dtype_name
from steps.instructions import (
    float_to_half,
    floats_to_bfloats,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    load_f32,
    load_f32x4,
    store_f32,
    store_u16,
)
from steps.kernels.between.eight import OF_DTYPE
from steps.kernels.parts.epilogue.bias import LOAD_BIAS

THREADS: Final = 128
FOUR: Final = 4


@cuda.jit(device=True, forceinline=True)
def store_half(c, at, x):
    store_u16(c, at, float_to_half(x))


@cuda.jit(device=True, forceinline=True)
def store_bfloat(c, at, x):
    store_u16(c, at, uint16(floats_to_bfloats(x, x)))


STORE: Final = {"float32": store_f32, "float16": store_half, "bfloat16": store_bfloat}
"""store(c, at, x): a float32 to flat c[at], rounded, by the dtype of c."""


@cache
def kernel(of_router: str, output: str, chosen: int, wide: bool) -> Any:
    """The kernel for S = chosen and these dtypes. wide: N is a multiple of four."""
    load_router = LOAD_BIAS[of_router]
    store_four, store_one = OF_DTYPE[output].store_four, STORE[output]
    each = FOUR if wide else 1

    @cuda.jit(launch_bounds=(THREADS, 1))
    def weighted(y, router, c):
        """c[T, N] of float32 y[T, S, N] and router[T, S]."""
        N = int32(c.shape[1])
        token, n = (
            int64(cuda.blockIdx.x),
            int32(each * (cuda.blockIdx.y * THREADS + cuda.threadIdx.x)),
        )
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        if n < N:
            x0, x1, x2, x3 = float32(0), float32(0), float32(0), float32(0)
            for s in range(chosen):
                slot = token * chosen + s
                factor = load_router(router, slot)
                if wide:
                    y0, y1, y2, y3 = load_f32x4(y, slot * N + n)
                    x0 += factor * y0
                    x1 += factor * y1
                    x2 += factor * y2
                    x3 += factor * y3
                else:
                    x0 += factor * load_f32(y, slot * N + n)
            if wide:
                store_four(c, token * N + n, x0, x1, x2, x3)
            else:
                store_one(c, token * N + n, x0)

    return weighted


def launch(y: Any, router: Any, c: Any) -> Launch:
    """C[T, N] of products y, float32 [T, S, N], and the router's weights [T, S]."""
    tokens, chosen, n = y.shape
    wide = n % FOUR == 0
    run = kernel(dtype_name(router), dtype_name(c), chosen, wide)
    grid = tokens, ceil_div(n, THREADS * (FOUR if wide else 1))
    return Launch(run, grid, (THREADS,), (y, router, c), overlap=True)
