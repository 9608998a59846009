"""The keys and values of a prompt: rotary embedding of all its tokens, and the cache.

The beginning of `attention` for many tokens at once: each thread rotates eight values of a query or
key, or copies eight of a value. Keys and values go to the cache, where attention reads them;
queries into rows of their own, ordered as attention writes its result. So torch's attention needs
no copy before it and none behind it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
from numba import cuda, float32, int32, int64

from steps.contract import Launch, ceil_div, dtype_name
from steps.instructions import (
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    shfl_xor,
    store_u32x4,
)
from steps.instructions.approximate import rsqrt
from steps.kernels.between.eight import EIGHT, OF_DTYPE
from steps.kernels.between.heads import SIZES, rotate_neighbours
from steps.kernels.between.values import as_halves, dot, eight_of, put

THREADS: Final = 128


@cache
def kernel(size: int, normed: bool, of_qkv: str) -> Any:
    """The kernel for heads of `size` values. normed: whether queries and keys have norms."""
    load, load_floats = OF_DTYPE[of_qkv].load, OF_DTYPE["float32"].load
    group_threads = size // EIGHT
    butterfly_steps = group_threads.bit_length() - 1

    @cuda.jit(launch_bounds=(THREADS, 4))
    def rotary(qkv, cache, position, cos, sin, of_queries, of_keys, epsilon, queries):
        """queries, float16 [B * T, heads * D], and cache, float16 [B, 2 kv, L, D], from `position`
        on, of qkv[B * T, (heads + 2 kv) * D]. See `attention`. Grid: (T, parts of a token, B)."""
        griddepcontrol_launch_dependents()
        x = cuda.local.array(EIGHT, float32)
        k = int32(cuda.blockIdx.y * THREADS + cuda.threadIdx.x)
        head, part = int32(k >> butterfly_steps), int32(k & (group_threads - 1))
        tokens, token, b = int32(cuda.gridDim.x), int32(cuda.blockIdx.x), int32(cuda.blockIdx.z)
        heads, kv = int32(queries.shape[1]) >> (butterfly_steps + 3), int32(cache.shape[1]) >> 1
        row, length = int64(b) * tokens + token, int64(cache.shape[2])
        griddepcontrol_wait()

        # lanes without values take part in the butterfly
        is_there, at = head < heads + 2 * kv, row * qkv.shape[1] + EIGHT * k
        p = position[0] + token
        if is_there:
            put(x, 0, load(qkv, at))
        else:
            for i in range(EIGHT):
                x[i] = 0
        if normed:
            squares = dot(x, eight_of(x, 0)[:4], eight_of(x, 0)[4:])
            for step in range(butterfly_steps):
                squares += shfl_xor(squares, 1 << step)
            by = rsqrt(squares * float32(1 / size) + epsilon)
            if head < heads + kv:
                w = load_floats(of_queries if head < heads else of_keys, EIGHT * part)
                for i in range(EIGHT):
                    x[i] = x[i] * by * w[i]
        if head < heads + kv:
            c = load_floats(cos, p * size + EIGHT * part)
            rotate_neighbours(x, c, load_floats(sin, p * size + EIGHT * part))
        if head < heads:
            store_u32x4(queries, row * queries.shape[1] + EIGHT * k, *as_halves(x))
        elif is_there:
            of_head = (int64(b) * (2 * kv) + (head - heads)) * length + p
            store_u32x4(cache, of_head * size + EIGHT * part, *as_halves(x))

    return rotary


def launch(
    qkv: Any, cache: Any, position: Any, cos: Any, sin: Any, queries: Any,
    head_norms: tuple[Any, Any, float] | None = None,
) -> Launch:  # fmt: skip
    """Rotate the queries of a prompt of each sequence, and put keys and values into the cache.

    ValueError for heads of another size than those of `attention.SIZES`.
    """
    batch, _, _, size = cache.shape
    if size not in SIZES:
        raise ValueError(f"heads have {size} values: the kernel takes {', '.join(map(str, SIZES))}")
    *weights, epsilon = head_norms or (cos, cos, 0.0)
    run = kernel(size, head_norms is not None, dtype_name(qkv))
    grid = qkv.shape[0] // batch, ceil_div(qkv.shape[1] // EIGHT, THREADS), batch
    args = (qkv, cache, position, cos, sin, *weights, np.float32(epsilon), queries)
    return Launch(run, grid, (THREADS,), args, overlap=True)
