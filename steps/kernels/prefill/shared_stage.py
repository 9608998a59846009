"""A stage: the operands of 128 K of one tile of C in shared memory, and how threads copy them.

A tile has 128 features and `bm` tokens, 64 at most. A stage holds, one after the other,

    weights   the 8 fragment-packed tiles of its features, as they lie in memory
    codes     [8 chunks of 16 K][token][16 bytes]
    d         float32 [4 blocks][token], see `d_slot`
    s         float32 [4 blocks][token], see `s_slot`; only of formats with minima

Step 8 teaches this; steps 9 and 10 use it with other copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from numba import cuda, int32, int64

from qformats import BLOCK, Format
from qformats.repack import CHUNK, TILE_GROUP, TILE_K, TILE_ROWS
from steps.contract import ceil_div, shared_memory
from steps.kernels.parts.weights.codes import tile_format

BN: Final = TILE_GROUP * TILE_ROWS
"""Features of a tile of C: those whose packed tiles lie side by side."""

THREADS: Final = 128
"""Threads that multiply a tile and copy its stages: four warps, one for each scheduler of an SM."""

BLOCKS: Final = TILE_K // BLOCK
"""Blocks of K in a stage."""

CHUNKS: Final = TILE_K // CHUNK
"""16-byte chunks of a token in a stage."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Bytes of a stage, and where its parts begin: weights at 0, then codes, d, s."""

    codes_at: int
    d_at: int
    s_at: int
    stage_bytes: int


@cache
def stage_layout(fmt: Format, bm: int) -> Stage:
    tile = tile_format(fmt.name)
    codes_at = TILE_GROUP * tile.tile_bytes
    d_at = codes_at + TILE_K * bm
    s_at = d_at + 4 * BLOCKS * bm
    s_bytes = 4 * (BLOCKS * bm + BLOCKS // rows_of_banks(bm) * S_PAD) if tile.minimum else 0
    return Stage(codes_at, d_at, s_at, s_at + s_bytes)


def ring_stages(fmt: Format, bm: int, blocks_per_sm: int, most: int) -> tuple[int, int]:
    """(stages, bytes) of a block's ring: `most` stages, or as many as fit where `blocks_per_sm`
    share an SM, which keeps 1 KB for each; two at least. Step 9 teaches this."""
    share = (shared_memory() + 1024) // blocks_per_sm - 1024
    stage_bytes = stage_layout(fmt, bm).stage_bytes
    stages = max(2, min(most, share // stage_bytes))
    return stages, stages * stage_bytes


@cuda.jit(device=True, forceinline=True)
def d_slot(token):
    """Where a token's d stands among those of a block. A lane of an mma has sums of tokens 2t and
    2t + 1 of every 8. In this order it finds the d of its four of 16 tokens by one 128-bit load:

        lane t = 0: 0 1 8 9    t = 1: 2 3 10 11    t = 2: 4 5 12 13    t = 3: 6 7 14 15
    """
    return (token & ~14) | (token & 6) << 1 | (token & 8) >> 2


S_PAD: Final = 8
"""Floats left free after every 32 or more of s."""


def rows_of_banks(bm: int) -> int:
    """Blocks whose s fill the 32 banks of shared memory, at least one."""
    return max(1, 32 // bm)


@cache
def s_slot(bm: int) -> Any:
    """slot(block, token): where s stands. A warp copies 32 floats side by side, and reads those of
    8 tokens of all four blocks at once. S_PAD floats further on these are in other banks."""
    together = rows_of_banks(bm).bit_length() - 1

    @cuda.jit(device=True, forceinline=True)
    def slot(block, token):
        return block * bm + (block >> together) * S_PAD + token

    return slot


@cache
def stage_copies(fmt: Format, bm: int, copy_16: Any, copy_4: Any) -> tuple[Any, Any, Any, Any]:
    """(first_source, next_source, copy_weights, copy_tokens): how THREADS threads copy a stage, by
    copy_16 and copy_4(destination, to, array, offset), of 16 and 4 bytes.

    first_source(t, m0, n0, k0, steps, M) -> source
        where thread t reads the stage of step k0, of `steps`, of the tile at token m0, feature n0.
        Tokens beyond M repeat the last one.
    next_source(source, M) -> source, of the next step
    copy_weights(stage, to, w, source), copy_tokens(stage, to, qa, ds, source, M)
        its part of both operands. `to` is the byte where the stage begins, plus 16 t: so each copy
        adds only a constant to it.
    """
    layout, minimum = stage_layout(fmt, bm), tile_format(fmt.name).minimum
    codes_at, d_at, s_at, slot = layout.codes_at, layout.d_at, layout.s_at, s_slot(bm)
    assert THREADS % bm == 0, "a thread copies chunks of one token"
    rows = THREADS // bm  # chunks, or blocks, that all threads copy at a time
    scale_rows = ceil_div(BLOCKS, rows)
    everyone = BLOCKS % rows == 0  # has a scale to copy
    # The rest of the weights, too little for 16 bytes a thread, goes by 4: a branch for half of the
    # threads costs more.
    in_chunks = codes_at // (16 * THREADS) * (16 * THREADS)
    assert codes_at % (4 * THREADS) == 0

    @cuda.jit(device=True, forceinline=True)
    def first_source(t, m0, n0, k0, steps, M):
        row, token = int64(t // bm), int32(min(m0 + t % bm, M - 1))
        w_at = int64(int32(n0 // BN * steps + k0)) * codes_at + 16 * t
        return (
            w_at,
            ((CHUNKS * k0 + row) * M + token) * CHUNK,
            ((BLOCKS * k0 + row) * M + token) * 2,
        )

    @cuda.jit(device=True, forceinline=True)
    def next_source(source, M):
        w_at, codes, scales = source
        return w_at + codes_at, codes + int64(M) * TILE_K, scales + int64(M) * (2 * BLOCKS)

    @cuda.jit(device=True, forceinline=True)
    def copy_weights(stage, to, w, source):
        back = 12 * int32(cuda.threadIdx.x)  # from 16 t to 4 t
        for i in range(0, in_chunks, 16 * THREADS):
            copy_16(stage, to + i, w, source[0] + i)
        for i in range(in_chunks, codes_at, 4 * THREADS):
            copy_4(stage, to + i - back, w, source[0] + i - back)

    @cuda.jit(device=True, forceinline=True)
    def copy_tokens(stage, to, qa, ds, source, M):
        t = int32(cuda.threadIdx.x)
        row, token = t // bm, t % bm
        d_to = to - 16 * t + d_at + 4 * (row * bm + d_slot(token))
        s_to = to - 16 * t + s_at
        for i in range(CHUNKS // rows):
            offset = source[1] + i * int64(M * (rows * CHUNK))
            copy_16(stage, to + codes_at + i * (THREADS * CHUNK), qa, offset)
        for i in range(scale_rows):
            if everyone or row < BLOCKS:
                offset = source[2] + i * int64(M * (rows * 2))
                copy_4(stage, d_to + i * (4 * THREADS), ds, offset)
                if minimum:
                    copy_4(stage, s_to + 4 * slot(row + i * rows, token), ds, offset + 1)

    return first_source, next_source, copy_weights, copy_tokens
