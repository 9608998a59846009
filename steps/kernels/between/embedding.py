"""The embedding of tokens: rows of a quantized table, dequantized as they are looked up.

A thread makes eight values of a row: 8 bytes of codes, of which it takes the lower or the upper
halves, the byte of fifth bits where there are any, a scale and a minimum. The fields of the blocks
lie in arrays of their own, so that every load is aligned.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from numba import cuda, float32, int32, int64, uint32

from qformats import BLOCK
from steps.contract import Launch, ceil_div
from steps.instructions import (
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    half_to_float,
    load_u16,
    load_u32x2,
)
from steps.kernels.between.eight import EIGHT, OF_DTYPE

THREADS: Final = 128


@cache
def kernel(zero_point: int, has_minimum: bool, has_fifth_bits: bool, is_int8: bool) -> Any:
    """The kernel for blocks with these fields, of codes whose zero is `zero_point`."""
    store = OF_DTYPE["float32"].store

    @cuda.jit(device=True, forceinline=True)
    def code(low, high, fifth, part, i):
        """Code i of a thread's eight, part of four, of 8 bytes."""
        byte = (low if i < 4 else high) >> uint32(8 * (i & 3))
        if is_int8:
            return int32(uint32(byte << uint32(24))) >> 24
        found = int32(byte >> uint32(4 * (part >> 1)) & uint32(15))
        if has_fifth_bits:
            found |= int32((fifth >> i & 1) << 4)
        return int32(found - zero_point)

    @cuda.jit(launch_bounds=(THREADS, 1))
    def embedding(ids, d, m, qs, qh, rows):
        """rows[M, K], float32, of the rows ids[M], int64, of a table of blocks: d, m float16
        [V, K/32]; qs uint8 [V, K/32, 16], or int8 [V, K/32, 32]; qh uint8 [V, K/32, 4]. A field
        that the blocks do not have is not read."""
        griddepcontrol_launch_dependents()
        width = int32(rows.shape[1])
        row, k = (
            int64(cuda.blockIdx.x),
            int32(EIGHT * (cuda.blockIdx.y * THREADS + cuda.threadIdx.x)),
        )
        part = int32(k >> 3 & 3)
        griddepcontrol_wait()
        if k < width:
            block = ids[row] * (width // BLOCK) + (k >> 5)
            at = block * 32 + 8 * part if is_int8 else block * 16 + 8 * (part & 1)
            low, high = load_u32x2(qs, at)
            fifth = int32(qh[block * 4 + part]) if has_fifth_bits else int32(0)
            scale = half_to_float(load_u16(d, block))
            offset = half_to_float(load_u16(m, block)) if has_minimum else float32(0)
            x0 = scale * float32(code(low, high, fifth, part, 0)) + offset
            x1 = scale * float32(code(low, high, fifth, part, 1)) + offset
            x2 = scale * float32(code(low, high, fifth, part, 2)) + offset
            x3 = scale * float32(code(low, high, fifth, part, 3)) + offset
            x4 = scale * float32(code(low, high, fifth, part, 4)) + offset
            x5 = scale * float32(code(low, high, fifth, part, 5)) + offset
            x6 = scale * float32(code(low, high, fifth, part, 6)) + offset
            x7 = scale * float32(code(low, high, fifth, part, 7)) + offset
            store(rows, row * width + k, (x0, x1, x2, x3, x4, x5, x6, x7))

    return embedding


def launch(ids: Any, d: Any, m: Any, qs: Any, qh: Any, zero_point: int, rows: Any) -> Launch:
    """The rows ids[M] of a table whose fields are these arrays, flat, m and qh None where its
    blocks have none."""
    count, width = rows.shape
    is_int8 = qs.size == BLOCK * d.size
    run = kernel(zero_point, m is not None, qh is not None, is_int8)
    grid = count, ceil_div(width, EIGHT * THREADS)
    # where there is no field, something unread
    args = ids, d, d if m is None else m, qs, qs if qh is None else qh, rows
    return Launch(run, grid, (THREADS,), args, overlap=True)
