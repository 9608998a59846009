"""A in the order of experts: the pass before products of many tokens.

    out[places[S t + s]] = A[t]         for all slots s of token t

A tile of a product has rows of one expert, and where these lie side by side a tensor map copies
them. So this pass puts a row where each expert that multiplies it reads it. On the way float32 and
bfloat16 become float16 in a power of two of their row, and all dtypes int8 where products are
"fast": codes and scales are those of `steps.kernels.parts.activations.rows`. A warp has a row. It
keeps the row in registers until shuffles have found the largest, and stores it once for each slot;
a row of more than `MOST_LOADS` x 128 values is read twice or more.

A producer that gathers rows itself would need no pass, but issues 64 copies of a warp for each
stage of a tile, of which there are as many as a row has tiles along N.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
from numba import cuda, int32, int64, uint32

from steps.contract import Launch, Machine, array_dtype, ceil_div, dtype_name
from steps.instructions import (
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    load_u32,
    shfl_xor,
    store_u32,
    store_u32x2,
)
from steps.kernels.parts.activations.rows import TO_BYTES, TO_HALVES, largest_bits
from steps.kernels.parts.activations.sources import SOURCES

WARPS: Final = 8
"""Rows of a thread block."""
STEP: Final = 4 * 32
"""Values that a warp loads at a time."""
MOST_LOADS: Final = 24
ROUNDED: Final = {"float16": TO_HALVES, "int8": TO_BYTES}
"""What becomes of a row, by its dtype behind the pass."""


@cache
def kernel(loads: int, of: str, to: str, ordered: bool) -> Any:
    """The kernel for A of dtype `of` and rows that become `to`, of which a warp keeps `loads` x 128
    values. ordered: A[P, K] is in the order of experts, else there are places."""
    read, rounds = SOURCES[of], of != to
    words, is_aligned, load_4, values = read.words, read.aligned, read.load, read.values
    rounding = ROUNDED[to]
    size_of, scale_of, token_scale = rounding.size, rounding.scale, rounding.token_scale
    pack, out_words = rounding.pack, rounding.words

    @cuda.jit(launch_bounds=(32 * WARPS, 1))
    def by_expert(a, places, out, token_scales):
        """out[P, K] and, where rows are rounded, float32 token_scales[P] of a[P / S, K]; int32
        places[P] of `routing`."""
        griddepcontrol_launch_dependents()
        x = cuda.local.array((loads, words), uint32)
        lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        rows, columns = int32(a.shape[0]), int32(a.shape[1])
        slots = int32(uint32(out.shape[0]) // uint32(rows))
        m, first = int32(cuda.blockIdx.x * WARPS + warp), int32(4 * lane)
        row, aligned, kept = int64(m) * columns, is_aligned(a), loads * STEP
        griddepcontrol_wait()
        if m < rows:
            for i in range(loads):
                for j in range(words):
                    x[i, j] = 0
                if first + i * STEP < columns:
                    load_4(x, i, a, row + (first + i * STEP), aligned)
            if rounds:
                largest = int32(0)
                for i in range(loads):
                    largest = largest_bits(values(x, i), largest)
                for k in range(first + kept, columns, STEP):
                    y = cuda.local.array((1, words), uint32)
                    load_4(y, 0, a, row + k, aligned)
                    largest = largest_bits(values(y, 0), largest)
                for apart in (1, 2, 4, 8, 16):
                    largest = max(largest, shfl_xor(largest, apart))
                size = size_of(largest)
                times = scale_of(size)
                for i in range(loads):
                    packed = pack(values(x, i), times)
                    for j in range(out_words):
                        x[i, j] = packed[j]
            for s in range(slots):
                place = m
                if not ordered:
                    place = int32(load_u32(places, m * slots + s))
                to_row = int64(place) * columns
                for i in range(loads):
                    if first + i * STEP < columns:
                        if out_words == 1:
                            store_u32(out, to_row + (first + i * STEP), x[i, 0])
                        else:
                            store_u32x2(out, to_row + (first + i * STEP), x[i, 0], x[i, 1])
                for k in range(first + kept, columns, STEP):
                    y = cuda.local.array((1, words), uint32)
                    load_4(y, 0, a, row + k, aligned)
                    if rounds:
                        packed = pack(values(y, 0), times)
                        for j in range(out_words):
                            y[0, j] = packed[j]
                    if out_words == 1:
                        store_u32(out, to_row + k, y[0, 0])
                    else:
                        store_u32x2(out, to_row + k, y[0, 0], y[0, 1])
                if rounds and lane == 0:
                    token_scales[place] = token_scale(size)

    return by_expert


def sorted_rows(
    a: Any, places: Any, positions: int, machine: Machine, *, ordered: bool, fast: bool
) -> tuple[tuple[Any, ...], tuple[Launch, ...]]:
    """((A[P, K] in the order of experts, and its scales [P] if it was rounded), the launches that
    make them) of A[P / S, K], K a multiple of 4. ordered: A is in this order already."""
    (m, k), of = a.shape, dtype_name(a)
    to = "int8" if fast else "float16"
    if ordered and of == to:
        return (a,), ()
    out = machine.empty((positions, k), np.dtype(np.int8) if fast else array_dtype(to))
    scales = (machine.empty((positions,), np.float32),) if of != to else ()
    run = kernel(min(ceil_div(k, STEP), MOST_LOADS), of, to, ordered)
    args = (a, places, out, *(scales or (places,)))
    launch = Launch(run, (ceil_div(m, WARPS),), (32 * WARPS,), args, overlap=True)
    return (out, *scales), (launch,)
