"""The pass before a product of silu(gate) * up, the feed-forward input of a Llama block.

It reads gates and ups and writes the float16 rows that steps read A as. Step 11 is the first to
read them (`steps.kernels.parts.activations.layouts.float16_rows`).
"""

from __future__ import annotations

import math
from typing import Final

from numba import cuda, float32, int64, uint16, uint32

from qformats.repack import CHUNK_HALVES
from steps.instructions import (
    floats_to_halves,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    half_to_float,
    load_u32x4,
    store_u32x4,
)
from steps.instructions.approximate import exp2, reciprocal

LOG2_E: Final = float32(math.log2(math.e))
GATED_THREADS: Final = 256  # of a thread block, at most


@cuda.jit(device=True, forceinline=True)
def silu_times(gate, up):
    """gate / (1 + e^-gate) * up."""
    return gate * reciprocal(float32(1) + exp2(-LOG2_E * gate)) * up


@cuda.jit(device=True, forceinline=True)
def two_gated(gates, ups):
    """The same of two float16 in a word each, rounded to float16."""
    low = silu_times(half_to_float(uint16(gates)), half_to_float(uint16(ups)))
    high = silu_times(half_to_float(uint16(gates >> 16)), half_to_float(uint16(ups >> 16)))
    return uint32(floats_to_halves(low, high))


@cuda.jit(device=True, forceinline=True)
def eight_gated(gates, ups):
    first, second = two_gated(gates[0], ups[0]), two_gated(gates[1], ups[1])
    return first, second, two_gated(gates[2], ups[2]), two_gated(gates[3], ups[3])


@cuda.jit
def gated_to_rows(y, x):
    """x[M, K] = silu(gate) * up of float16 y[M, 2 K], K gates and then K ups, computed in float32
    and rounded to float16. y and x begin at a multiple of 16 bytes, and K is one of 8.
    `gated_grid` for its launch.

    A thread has eight values of a token: 16 bytes of each load and of the store.
    """
    griddepcontrol_launch_dependents()
    columns = uint32(x.shape[1])
    m = int64(cuda.blockIdx.x)
    k = uint32(cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x) * uint32(CHUNK_HALVES)
    griddepcontrol_wait()
    if k < columns:
        offset = m * (2 * columns) + k
        x0, x1, x2, x3 = eight_gated(load_u32x4(y, offset), load_u32x4(y, offset + columns))
        store_u32x4(x, m * columns + k, x0, x1, x2, x3)


def gated_grid(m: int, k: int) -> tuple[tuple[int, int], tuple[int]]:
    """(grid, block) of `gated_to_rows` for x[m, k]; no more threads than a row has work for."""
    chunks = -(-k // CHUNK_HALVES)
    threads = min(GATED_THREADS, -(-chunks // 32) * 32)
    return (m, -(-chunks // threads)), (threads,)
