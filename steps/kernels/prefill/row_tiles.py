"""A stage of the float16 steps in shared memory: row-major A, swizzled, and fragment-packed tiles.

The tokens of a tile have 128 K a stage, in two *boxes* of 64 K each. A box has a row of 128 bytes
for each token. `ldmatrix` loads 16-byte chunks at one place along K, of eight tokens, together. In
plain rows these would lie in the same four banks, and it would take eight cycles instead of one. So
chunk c of row r lies at c ^ (r & 7):

             bytes 0   16    32    48    64    80    96    112
    token 0     |  0  |  1  |  2  |  3  |  4  |  5  |  6  |  7  |   chunk: 8 neighbours along K
    token 1     |  1  |  0  |  3  |  2  |  5  |  4  |  7  |  6  |
    token 2     |  2  |  3  |  0  |  1  |  6  |  7  |  4  |  5  |
    token 3     |  3  |  2  |  1  |  0  |  7  |  6  |  5  |  4  |
       ...
    token 7     |  7  |  6  |  5  |  4  |  3  |  2  |  1  |  0  |
    token 8     |  0  |  1  |  ...

Within eight tokens a chunk stands in every column once. So the eight chunks of a token lie in all
banks, and so does one chunk of eight tokens. Boxes begin at multiples of 1024 bytes: then this is
also what Hopper calls the 128-byte swizzle, which its matrix descriptors and tensor maps know.

Step 11 teaches this; step 12 uses it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from numba import cuda, int32, int64, uint32

from qformats.repack import CHUNK_HALVES, TILE_K
from steps.instructions import cp_async_16, cp_async_16_zfill

ROW: Final = 128
"""Bytes of a row of a box."""

CHUNKS: Final = TILE_K // CHUNK_HALVES
"""16-byte chunks of a token in a stage: the eight of one box, then those of the other."""


def box_bytes(tokens: int) -> int:
    """Bytes of a box, of which a stage has two."""
    return ROW * tokens


@cache
def copy_row_tile(tokens: int, threads: int) -> Any:
    """copy(ring, at, a, m0, k, t): issue the copies of A[m0 .. m0 + tokens, k .. k + 128] to byte
    `at` of the ring, by all `threads` threads t of a block.

    a is float16 [M, K]; its address is a multiple of 16, and K of 8. Chunks beyond M and K are
    zeros: the weights beyond K are zeros too, but 0 * NaN would be NaN.
    """
    rows = threads // CHUNKS  # that the threads copy at a time: 256 bytes each, in one piece

    @cuda.jit(device=True, forceinline=True)
    def copy(ring, at, a, m0, k, t):
        M, K = int32(a.shape[0]), int32(a.shape[1])
        row, chunk = int32(t >> 4), int32(t & (CHUNKS - 1))
        box = (chunk >> 3) * (ROW * tokens)
        destination = at + box + row * ROW + ((chunk ^ row) & 7) * 16
        column = int32(k + CHUNK_HALVES * chunk)
        there = int32(M - m0 - row) if column < K else int32(0)  # rows with something to copy
        offset, stride = int64(m0 + row) * K + column, int64(rows) * K
        for i in range(0, tokens, rows):
            size = uint32(16 if int32(i) < there else 0)
            cp_async_16_zfill(ring, destination + i * ROW, a, offset, size)
            offset += stride

    return copy


@cache
def copy_packed_tiles(size: int, threads: int) -> Any:
    """copy(ring, at, w, group, t): issue the copies of a group of packed tiles, of one step of 128
    K, to byte `at` of the ring, by all `threads` threads t of a block. They are `size` bytes, one
    piece of memory, and stay in the order in which warps read them."""
    at_once = 16 * threads

    @cuda.jit(device=True, forceinline=True)
    def copy(ring, at, w, group, t):
        offset = int64(group) * size + 16 * t
        for i in range(0, size, at_once):
            if i + at_once <= size or 16 * t < size - i:
                cp_async_16(ring, at + i + 16 * t, w, offset + i)

    return copy
