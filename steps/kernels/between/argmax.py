"""The likeliest token: the index of the largest logit of each row.

A row is searched by up to 32 thread blocks, each thread with 16 bytes at a time. A block leaves its
largest logit and that one's index; the last one to arrive compares those of all
(`steps.kernels.parts.split_k_reduction`). A float32 is compared as an int32 whose order is the
same, so NaN, which comes above all, needs no branch of its own.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
from numba import cuda, float32, int32, int64

from steps.contract import Launch, Machine, ceil_div
from steps.instructions import (
    as_bits,
    fence,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    load_f32,
    load_f32x4,
    shfl_xor,
)
from steps.kernels.parts.split_k_reduction import count_block_arrival

THREADS: Final = 512
WARPS: Final = THREADS // 32
MOST_PARTS: Final = 32  # of a row: a lane each of the warp that compares them
LOADS: Final = 2  # of 16 bytes, of a thread, before there are more parts
LOWEST: Final = -(1 << 31)
HIGHEST: Final = 0x7FFFFFFF


@cuda.jit(device=True, forceinline=True)
def ordered(x):
    """An int32 that is larger where x is: 0 and -0 are the same, NaN is above infinity."""
    bits = int32(as_bits(x + float32(0)))
    if bits & HIGHEST > 0x7F800000:
        return int32(HIGHEST)
    return int32(bits ^ HIGHEST) if bits < 0 else bits


@cuda.jit(device=True, forceinline=True)
def larger(best, index, other, at):
    """The larger of two and its index, the lower one where they are the same."""
    if other > best or (other == best and at < index):
        return other, at
    return best, index


@cuda.jit(device=True, forceinline=True)
def largest_of_warp(best, index):
    """To all lanes, by a butterfly."""
    for r in range(5):
        best, index = larger(best, index, shfl_xor(best, 1 << r), shfl_xor(index, 1 << r))
    return best, index


@cache
def kernel(aligned: bool) -> Any:
    """aligned: whether every row begins at a multiple of 16 bytes."""

    @cuda.jit(launch_bounds=(THREADS, 1))
    def argmax(logits, found, bests, indices, arrived):
        """found[M], int64, of logits[M, V], float32. bests, indices: int32 [M, parts]; arrived:
        int32 [M], zero before and after. Grid: (parts, M)."""
        griddepcontrol_launch_dependents()
        shared = cuda.shared.array((2, WARPS), int32)
        before = cuda.shared.array(1, int32)
        t, count = int32(cuda.threadIdx.x), int32(logits.shape[1])
        part, parts, m = int32(cuda.blockIdx.x), int32(cuda.gridDim.x), int32(cuda.blockIdx.y)
        row, own = int64(m) * count, m * parts
        k, step = int32(4 * (part * THREADS + t)), int32(4 * THREADS * parts)
        griddepcontrol_wait()

        best, index = int32(LOWEST), int32(HIGHEST)
        while k < count:
            if aligned:
                x0, x1, x2, x3 = load_f32x4(logits, row + k)
                best, index = larger(best, index, ordered(x0), k)
                best, index = larger(best, index, ordered(x1), int32(k + 1))
                best, index = larger(best, index, ordered(x2), int32(k + 2))
                best, index = larger(best, index, ordered(x3), int32(k + 3))
            else:
                for j in range(4):
                    if k + j < count:
                        x = ordered(load_f32(logits, row + k + j))
                        best, index = larger(best, index, x, int32(k + j))
            k = int32(k + step)

        best, index = largest_of_warp(best, index)
        if t & 31 == 0:
            shared[0, t >> 5], shared[1, t >> 5] = best, index
        cuda.syncthreads()
        if t < 32:
            best, index = shared[0, t % WARPS], shared[1, t % WARPS]
            best, index = largest_of_warp(best, index)
            if t == 0:
                bests[own + part], indices[own + part] = best, index

        count_block_arrival(arrived, m, before, t)
        if before[0] == parts - 1 and t < 32:
            fence()
            best, index = int32(LOWEST), int32(HIGHEST)
            if t < parts:
                best, index = bests[own + t], indices[own + t]
            best, index = largest_of_warp(best, index)
            if t == 0:
                found[m] = index
                arrived[m] = 0  # for the next launch

    return argmax


def launch(logits: Any, found: Any, machine: Machine) -> Launch:
    """found[M] = index of the largest of each row of logits[M, V]; scratch memory is of
    `machine`."""
    m, count = logits.shape
    parts = min(MOST_PARTS, ceil_div(count, 4 * THREADS * LOADS))
    scratch = (
        machine.empty((m * parts,), np.int32),
        machine.empty((m * parts,), np.int32),
        machine.array(np.zeros(m, np.int32)),
    )
    args = logits, found, *scratch
    return Launch(kernel(count % 4 == 0), (parts, m), (THREADS,), args, overlap=True)
