"""The pass for float16 A that stays float16: it only puts values into the order of the chunks.

Step 11 teaches the order (`steps.components.activations.layouts.float16_chunks`).
"""

from __future__ import annotations

from typing import Any, Final

from numba import cuda, int64, uint32

from qformats.repack import CHUNK_HALVES, TILE_K, TOKEN_GROUP
from steps.components.activations.chunks import token_chunk, two_halves
from steps.instructions import (
    address,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    load_u32x4,
    prmt,
    store_u32x4,
)

CHUNK_THREADS: Final = 256  # of a thread block, at most
CHUNK_STEP: Final = CHUNK_THREADS // TOKEN_GROUP * 16  # K that such a block has of each token
EVEN: Final = 0x5410  # for `prmt`: of two words of float16 A those of even k, the lower halves
ODD: Final = 0x7632


@cuda.jit(device=True, forceinline=True)
def eight_halves(a, offset, aligned):
    """The four words that flat float16 a has from `offset` on, which is `aligned` to 16 bytes or
    not."""
    if aligned:
        return load_u32x4(a, offset)
    first, second = two_halves(a, offset), two_halves(a, offset + 2)
    return first, second, two_halves(a, offset + 4), two_halves(a, offset + 6)


@cuda.jit(device=True, forceinline=True)
def store_chunk(chunks, offset, x, y, which):
    """Of 16 values in the words x and y those of even or odd k, to chunks[offset..offset+7]."""
    first, second = prmt(x[0], x[1], which), prmt(x[2], x[3], which)
    store_u32x4(chunks, offset, first, second, prmt(y[0], y[1], which), prmt(y[2], y[3], which))


@cuda.jit(device=True, forceinline=True)
def sixteen_halves(a, offset):
    """The eight words of values that flat float16 a has from `offset` on."""
    aligned = address(a, 0) & 15 == 0
    return eight_halves(a, offset, aligned), eight_halves(a, offset + 8, aligned)


def order_kernel(read: Any, wide: int = 1) -> Any:
    """kernel(a, chunks, token_scales), as that of `half_rounder`, with scales of 1: values are only
    put in order. `chunk_grid` for its launch.

    a              : float16 [M, wide * K], C-contiguous, K a multiple of 32.
    read(a, offset): device function, two times four words: the 16 values of A that a has from
                     `offset` on, of the first K columns.

    A thread has 16 K of a token, 32 bytes, and makes two chunks of them. A warp has 64 K of eight
    tokens: it reads 128 bytes of each and writes 1 KB.
    """

    @cuda.jit
    def halves_to_chunks(a, chunks, token_scales):
        griddepcontrol_launch_dependents()
        thread = uint32(cuda.threadIdx.x)
        # four lanes for 64 K of a token, beside them the other seven, then the next 64 K
        m = uint32(cuda.blockIdx.x * TOKEN_GROUP + (thread >> 2 & 7))
        k = uint32(cuda.blockIdx.y * CHUNK_STEP + (thread >> 5) * 64 + (thread & 3) * 16)
        rows, columns = uint32(a.shape[0]), uint32(a.shape[1] // wide)
        padded = uint32(uint32(columns + uint32(TILE_K - 1)) // uint32(TILE_K) * TILE_K)
        x = y = (uint32(0), uint32(0), uint32(0), uint32(0))
        griddepcontrol_wait()
        if m < rows and k < columns:
            x, y = read(a, int64(m) * (wide * columns) + k)
        if k < padded:
            chunk = token_chunk(
                rows, m, k, TILE_K // CHUNK_HALVES, uint32(k) >> uint32(3) & uint32(14)
            )
            store_chunk(chunks, chunk * CHUNK_HALVES, x, y, EVEN)
            store_chunk(chunks, (chunk + TOKEN_GROUP) * CHUNK_HALVES, x, y, ODD)
        if k == 0 and m < rows:
            token_scales[m] = 1

    return halves_to_chunks


halves_to_chunks: Final = order_kernel(sixteen_halves)
"""Float16 A[M, K] in order: values stay what they are, and all token_scales[M] are 1."""


def chunk_grid(m: int, k: int) -> tuple[tuple[int, int], tuple[int]]:
    """(grid, block) of `halves_to_chunks` for A[m, k]: whole groups of eight tokens and 128 K; no
    more threads than a group has work for."""
    threads = min(CHUNK_THREADS, -(-k // TILE_K) * TILE_K // 16 * TOKEN_GROUP)
    return (-(-m // TOKEN_GROUP), -(-k // CHUNK_STEP)), (threads,)
