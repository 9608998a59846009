"""Rows of a quantized matrix as floats, from ggml's own bytes: all of them, or those with some ids.

A thread makes eight neighbouring values. They lie in one group of one block, so scale and offset
are worked out once, by the device functions of step 1, which know every format. Values are rounded
to the dtype of the rows and stored 16 bytes at a time; a warp stores 512 bytes in a row, or 1 KB of
float32. A matrix takes about as long as its stores.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, Final

from numba import cuda, float32, int32, int64

from qformats import FORMATS
from steps.blocks.elements import device_elements
from steps.contract import Launch, ceil_div, dtype_name
from steps.kernels.between.eight import EIGHT, OF_DTYPE

THREADS: Final = 128
NAN: Final = math.nan


@cache
def kernel(format_name: str, dtype: str, by_id: bool) -> Any:
    """The kernel for blocks of a format and rows of a dtype; by_id: of rows that ids name."""
    fmt, of = FORMATS[format_name], device_elements(format_name)
    level, scale_of, offset_of = of.level, of.scale, of.offset
    store = OF_DTYPE[dtype].store
    ELEMENTS, GROUP, BYTES = fmt.elements, fmt.group, fmt.block_bytes

    @cuda.jit(launch_bounds=(THREADS, 1))
    def dequantize_rows(ids, w, count, rows):
        """rows[M, K] of ids[M], int32 or int64, of the `count` rows of blocks whose bytes are w,
        uint8, flat; a row whose id is none of them is NaN. Not by_id: of rows 0 ... M - 1."""
        width = int32(rows.shape[1])
        row = int64(cuda.blockIdx.x)
        k = int32(EIGHT * (cuda.blockIdx.y * THREADS + cuda.threadIdx.x))
        if k < width:
            found = int64(ids[row]) if by_id else row
            at = row * width + k
            if 0 <= found < count:
                start = (found * (width // ELEMENTS) + k // ELEMENTS) * BYTES
                j = int32(k % ELEMENTS)
                scale = scale_of(w, start, int32(j // GROUP))
                offset = offset_of(w, start, int32(j // GROUP))
                x0 = scale * float32(level(w, start, j)) + offset
                x1 = scale * float32(level(w, start, int32(j + 1))) + offset
                x2 = scale * float32(level(w, start, int32(j + 2))) + offset
                x3 = scale * float32(level(w, start, int32(j + 3))) + offset
                x4 = scale * float32(level(w, start, int32(j + 4))) + offset
                x5 = scale * float32(level(w, start, int32(j + 5))) + offset
                x6 = scale * float32(level(w, start, int32(j + 6))) + offset
                x7 = scale * float32(level(w, start, int32(j + 7))) + offset
                store(rows, at, (x0, x1, x2, x3, x4, x5, x6, x7))
            else:
                none = float32(NAN)
                store(rows, at, (none, none, none, none, none, none, none, none))

    return dequantize_rows


def launch(format_name: str, w: Any, rows: Any, ids: Any = None) -> Launch:
    """The values rows[M, K] of blocks whose bytes are w, uint8 [V, bytes of a row] or flat, from
    an even address on: of the rows ids[M], or of all, M = V."""
    count, width = rows.shape
    fmt = FORMATS[format_name]
    known = w.size // (width // fmt.elements * fmt.block_bytes)
    run = kernel(format_name, dtype_name(rows), ids is not None)
    grid = count, ceil_div(width, EIGHT * THREADS)
    # where there are no ids, something unread
    return Launch(run, grid, (THREADS,), (w if ids is None else ids, w, known, rows))
