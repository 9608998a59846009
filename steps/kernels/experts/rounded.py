"""A to int8 with one scale a token, a warp for each row: the pass before fast products.

What is new
    `steps.kernels.parts.activations.rows` gives a row to a thread block, which meets twice and
    holds one row. The inner features of an expert are few: a row of 768 is 24 values a lane, which
    a warp keeps in registers until shuffles have found the largest. The codes are the same.
Why it should help
    32768 rows of 768 are 75 MB to read and to write, 16 us of an H200. A block for each took 42.
What it costs
    Registers: rows of more than `MOST_LOADS` x 128 values are of a thread block.
Prerequisites
    Step 15 (int8 with a scale a token) and 16 (a warp a row).
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from steps.blocks.q8_1 import four_codes, twice_inverse
from steps.contract import Activations, Launch, Machine, ceil_div, dtype_name
from steps.instructions import (
    as_float,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    shfl_xor,
    store_u32,
)
from steps.kernels.parts.activations.layouts import int8_rows
from steps.kernels.parts.activations.rows import largest_bits
from steps.kernels.parts.activations.sources import SOURCES

WARPS: Final = 8
"""Rows of a thread block."""
STEP: Final = 4 * 32
"""Values that a warp loads at a time."""
MOST_LOADS: Final = 24


@cache
def kernel(loads: int, of: str) -> Any:
    """kernel(a, codes, token_scales) for rows of up to `loads` x 128 values of this dtype: int8
    [M, K] and float32 [M], as `steps.kernels.parts.activations.rows.token_quantizer` makes them."""
    read = SOURCES[of]
    words, is_aligned, load_4, values = read.words, read.aligned, read.load, read.values

    @cuda.jit(launch_bounds=(32 * WARPS, 1))
    def rounded(a, codes, token_scales):
        griddepcontrol_launch_dependents()
        x = cuda.local.array((loads, words), uint32)
        lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        rows, columns = int32(a.shape[0]), int32(a.shape[1])
        m, first = int32(cuda.blockIdx.x * WARPS + warp), int32(4 * lane)
        row, aligned = int64(m) * columns, is_aligned(a)
        griddepcontrol_wait()
        if m < rows:
            for i in range(loads):
                for j in range(words):
                    x[i, j] = 0
                if first + i * STEP < columns:
                    load_4(x, i, a, row + (first + i * STEP), aligned)
            largest = int32(0)
            for i in range(loads):
                largest = largest_bits(values(x, i), largest)
            for apart in (1, 2, 4, 8, 16):
                largest = max(largest, shfl_xor(largest, apart))
            d = as_float(uint32(largest)) / float32(127)
            twice = twice_inverse(d)
            for i in range(loads):
                if first + i * STEP < columns:
                    store_u32(codes, row + (first + i * STEP), four_codes(values(x, i), twice))
            if lane == 0:
                token_scales[m] = d

    return rounded


def rounded_rows(a: Any, machine: Machine) -> Activations:
    """`int8_rows` of A[M, K], K a multiple of 4."""
    (m, k), loads = a.shape, ceil_div(a.shape[1], STEP)
    if loads > MOST_LOADS:
        return int8_rows(a, machine)
    codes, scales = machine.empty((m, k), np.int8), machine.empty((m,), np.float32)
    run = kernel(loads, dtype_name(a))
    args = (a, codes, scales)
    launch = Launch(run, (ceil_div(m, WARPS),), (32 * WARPS,), args, overlap=True)
    return Activations((codes, scales), (launch,), "tokens")
