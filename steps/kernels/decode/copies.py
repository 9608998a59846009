"""A to shared memory as it is: by `cp.async`, lane by lane (step 17), or by bulk copies or in boxes
of a tensor map (step 18).

A warp copies tiles of 128 K: all of its part of K once, which stays, or one tile with each tile of
weights. Where A ends inside the last tile, zeros follow: the weights have scales of 0 there, and
what lies behind A could be Inf or NaN.

    float16 A, row-major           token 0 | 128 K of tile 0 | tile 1 | ... | 16 bytes
                                   token 1 | ...
    Q8_1 A, K-outermost            codes [16 K][token][16], then scales and sums [32 K][token][2]
    float16 A in boxes             64 K of 2 to 16 tokens, swizzled | the other 64 K

The 16 bytes between two tokens put the eight rows of an `ldmatrix` into different banks; in boxes
the swizzle does (`steps.instructions.tensor_map`). A copy of a row is for several tiles of 128 K:
where each tile is copied apart, eight lanes with a copy each take as many instructions as a third
of the product, and one lane copies two boxes instead.

Step 17 teaches this with `cp.async`, step 18 with boxes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from numba import cuda, float32, int32, int64, uint32

from qformats import BLOCK
from qformats.repack import CHUNK, TILE_K
from steps.blocks.q8_1 import (
    four_codes,
    rows_are_aligned,
    size_bits,
    sum_of_codes,
    twice_inverse,
)
from steps.contract import Family
from steps.instructions import (
    BOX_K,
    as_float,
    bulk_copy,
    cp_async_4,
    cp_async_16,
    cp_async_16_zfill,
    load_f32,
    load_f32x2,
    load_f32x4,
    prmt,
    shfl_xor,
    store_f32x2,
    store_u32,
    store_u32x4,
    tensor_copy,
)
from steps.kernels.decode.product import BLOCKS, SCALE_BYTES, boxes_stride

CHUNKS: Final = TILE_K // CHUNK
"""16-byte chunks of 128 K of int8, of a token."""

ROW_BYTES: Final = 2 * TILE_K
"""Of 128 K of float16, of a token."""

PAD: Final = 16
"""Bytes between the rows of two tokens of float16."""


@cache
def async_copy(family: Family, tokens: int) -> Any:
    """copy(smem, to, scales_to, pitch, a, a_scales, rows, k_tile, lane): a warp issues `cp.async`
    of a tile of A to byte `to`, and of its scales to byte `scales_to`. rows: (M, the first token,
    how many: at most `tokens`). pitch: bytes from token to token of float16."""

    @cuda.jit(device=True, forceinline=True)
    def copy_a16(smem, to, scales_to, pitch, a, a_scales, rows, k_tile, lane):
        _, m0, here = rows
        K = int32(a.shape[1])
        for i in range(0, 2 * CHUNKS * tokens, 32):
            token, chunk = int32((i + lane) >> 4), int32((i + lane) & 15)
            k = int32(k_tile * TILE_K + 8 * chunk)
            if token < here:
                size = uint32(CHUNK) if k < K else uint32(0)
                at = int32(to + token * pitch + chunk * CHUNK)
                cp_async_16_zfill(smem, at, a, int64(m0 + token) * K + k, size)

    @cuda.jit(device=True, forceinline=True)
    def copy_a8(smem, to, scales_to, pitch, a, a_scales, rows, k_tile, lane):
        M, m0, here = rows
        for i in range(0, CHUNKS * tokens, 32):
            chunk, token = int32((i + lane) // tokens), int32((i + lane) & (tokens - 1))
            if i + lane < CHUNKS * tokens and token < here:
                source = int64(k_tile * CHUNKS + chunk) * M + m0 + token
                cp_async_16(smem, to + (chunk * here + token) * CHUNK, a, source * CHUNK)
        words = 2 * tokens  # of a block: scales and sums
        for i in range(0, BLOCKS * words, 32):
            block, word = int32((i + lane) // words), int32((i + lane) & (words - 1))
            if i + lane < BLOCKS * words and word < 2 * here:
                source = 2 * (int64(k_tile * BLOCKS + block) * M + m0) + word
                cp_async_4(smem, scales_to + 4 * (2 * block * here + word), a_scales, source)

    return copy_a16 if family == "A16" else copy_a8


@dataclass(frozen=True, slots=True)
class BulkCopies:
    """Device functions of a warp; arguments as of `async_copy`, for `count` tiles from `k_tile` on.

    size(a, rows, k_tile, count) -> bytes of the copies
    issue(smem, to, scales_to, pitch, bar, a, a_scales, rows, k_tile, count, lane)
        issues copies that report to the mbarrier at byte `bar`
    has_tail(a) -> whether A ends inside a tile
    zero_tail(smem, to, pitch, a, rows, k_tile, count, lane)
        zeros behind the end of A, where it ends inside these tiles
    """

    size: Any
    issue: Any
    has_tail: Any
    zero_tail: Any


@cache
def bulk_copies(family: Family) -> BulkCopies:
    """The device functions, for capture in a kernel factory."""

    @cuda.jit(device=True, forceinline=True)
    def row_bytes(a, k_tile, count):
        """Of a token of float16: those that A has in these tiles."""
        return int32(2 * min(int32(count * TILE_K), int32(a.shape[1] - k_tile * TILE_K)))

    @cuda.jit(device=True, forceinline=True)
    def size_a16(a, rows, k_tile, count):
        return int32(rows[2] * row_bytes(a, k_tile, count))

    @cuda.jit(device=True, forceinline=True)
    def issue_a16(smem, to, scales_to, pitch, bar, a, a_scales, rows, k_tile, count, lane):
        _, m0, here = rows
        if lane < here:
            source = int64(m0 + lane) * a.shape[1] + k_tile * TILE_K
            bulk_copy(smem, to + lane * pitch, a, source, row_bytes(a, k_tile, count), smem, bar)

    @cuda.jit(device=True, forceinline=True)
    def has_tail_a16(a):
        return int32(a.shape[1]) % TILE_K != 0

    @cuda.jit(device=True, forceinline=True)
    def zero_tail_a16(smem, to, pitch, a, rows, k_tile, count, lane):
        zero, size = uint32(0), row_bytes(a, k_tile, count)
        if size < count * ROW_BYTES:
            for token in range(rows[2]):
                at = int32(size + CHUNK * lane)  # less than 32 chunks are missing
                if at < count * ROW_BYTES:
                    store_u32x4(smem, to + token * pitch + at, zero, zero, zero, zero)

    @cuda.jit(device=True, forceinline=True)
    def size_a8(a, rows, k_tile, count):
        M, _, here = rows
        with_scales = TILE_K + BLOCKS * SCALE_BYTES if here == M else TILE_K
        return int32(count * here * with_scales)

    @cuda.jit(device=True, forceinline=True)
    def issue_a8(smem, to, scales_to, pitch, bar, a, a_scales, rows, k_tile, count, lane):
        """All tokens are one piece of memory. Some of them are one piece for 16 K, and their
        scales, which are not aligned for bulk copies, are copied lane by lane: a barrier of the
        warp must follow before they are read."""
        M, m0, here = rows
        first, scales = int64(k_tile * CHUNKS) * M, int64(k_tile * BLOCKS) * M
        if here == M:
            if lane == 0:
                size = int32(count * here * TILE_K)
                bulk_copy(smem, to, a, first * CHUNK, size, smem, bar)
                size = int32(count * here * (BLOCKS * SCALE_BYTES))
                bulk_copy(smem, scales_to, a_scales, 2 * scales, size, smem, bar)
        else:
            size, i = int32(here * CHUNK), lane
            while i < count * (BLOCKS * here):
                source = 2 * (scales + int64(i // here) * M + m0 + i % here)
                x, y = load_f32x2(a_scales, source)
                store_f32x2(smem, scales_to + SCALE_BYTES * i, x, y)
                i = int32(i + 32)
            i = int32(0)
            while i < count * CHUNKS and lane == 0:
                source = (first + int64(i) * M + m0) * CHUNK
                bulk_copy(smem, to + i * size, a, source, size, smem, bar)
                i = int32(i + 1)

    @cuda.jit(device=True, forceinline=True)
    def has_tail_a8(a):
        return False  # prequantized A is whole tiles

    @cuda.jit(device=True, forceinline=True)
    def zero_tail_a8(smem, to, pitch, a, rows, k_tile, count, lane):
        pass

    if family == "A16":
        return BulkCopies(size_a16, issue_a16, has_tail_a16, zero_tail_a16)
    return BulkCopies(size_a8, issue_a8, has_tail_a8, zero_tail_a8)


@cache
def box_copies(tokens: int) -> Any:
    """copy(smem, to, bar, a, m0, k_tile): a thread issues copies of the two boxes of a tile of 128
    K of float16 A to byte `to`, a multiple of 1024, the second to the middle of `boxes_stride`. a:
    the tensor map. They are `boxes_bytes`, with zeros beyond M and K."""
    half = boxes_stride(tokens) // 2

    @cuda.jit(device=True, forceinline=True)
    def copy(smem, to, bar, a, m0, k_tile):
        k = int32(k_tile * TILE_K)
        tensor_copy(smem, to, a, k, m0, smem, bar)
        tensor_copy(smem, to + half, a, int32(k + BOX_K), m0, smem, bar)

    return copy


# --- float32 A to Q8_1 in shared memory: a warp quantizes its part of K while its weights arrive --
#
# An *item* is a block of a token, in the order [block][token]. Four lanes have an item: four values
# in a row each, and four more 16 K further. A warp has eight items side by side, and loads `ahead`
# times as many at once. Loads are issued apart from their use, so that weights can be issued in
# between; and what needs a branch, the two divisions, is done apart from the rest, so that the
# compiler can mix the work of all items.
#
# Codes of 16 K are stored in `qformats.repack.MMA_ORDER`, in words of K 2t, 2t + 8, 2t + 1, 2t + 9.
# So two lanes with values 8 K apart make two words of their codes:
#
#     lane j     K  4j      4j + 1   4j + 2   4j + 3        word of 4j,     4j + 8,  4j + 1, 4j + 9
#     lane j + 2    4j + 8  4j + 9   4j + 10  4j + 11       word of 4j + 2, 4j + 10, 4j + 3, 4j + 11
#
# Step 2 teaches the quantizer.

SIDE_BY_SIDE: Final = 8
"""Items of a warp at a time."""


@cache
def float32_quantizer(tokens: int, ahead: int) -> tuple[Any, Any]:
    """(load, quantize), for A of `tokens` tokens at most. x: local float32 [ahead, 8].

    load(x, a, k0, start, lane)
        issues loads of A[M, K], float32, of `ahead` times 8 items from `start` on; item 0 is the
        first block of K tile k0
    quantize(smem, codes, scales, x, a, k0, k_tiles, start, lane)
        x -> shared memory: codes [16 K][token][16] from byte `codes` on, d and s [block][token]
        from byte `scales` on; zeros outside of A, nothing outside of `k_tiles` K tiles
    """
    apart = SIDE_BY_SIDE // tokens * BLOCK  # K between two items of a lane, which are of one token
    codes_apart, scales_apart = SIDE_BY_SIDE * BLOCK, SIDE_BY_SIDE * SCALE_BYTES

    @cuda.jit(device=True, forceinline=True)
    def load(x, a, k0, start, lane):
        item, quad = uint32(start + (lane >> 2)), int32(lane & 3)
        m, K = min(int32(item % uint32(tokens)), int32(a.shape[0] - 1)), int32(a.shape[1])
        row, k = int64(m) * K + 4 * quad, int32(k0 * TILE_K + item // uint32(tokens) * BLOCK)
        wide = rows_are_aligned(a)
        for i in range(ahead):
            # Outside of A it is the last block's place: a load behind a branch of its own would
            # wait for those before.
            at = row + min(int32(k + i * apart), int32(K - BLOCK))
            if wide:
                x[i, 0], x[i, 1], x[i, 2], x[i, 3] = load_f32x4(a, at)
                x[i, 4], x[i, 5], x[i, 6], x[i, 7] = load_f32x4(a, at + CHUNK)
            else:
                for n in range(4):
                    x[i, n], x[i, 4 + n] = load_f32(a, at + n), load_f32(a, at + CHUNK + n)

    @cuda.jit(device=True, forceinline=True)
    def quantize(smem, codes, scales, x, a, k0, k_tiles, start, lane):
        d, twice = cuda.local.array(ahead, float32), cuda.local.array(ahead, float32)
        group, quad = int32(lane >> 2), int32(lane & 3)
        item, stop = uint32(start + group), int32(k_tiles * (BLOCKS * tokens))
        block, token = item // uint32(tokens), item % uint32(tokens)
        k, K = int32(k0 * TILE_K + block * BLOCK), int32(a.shape[1])
        for i in range(ahead):
            largest = size_bits(x[i, 0])
            for n in range(1, 8):
                largest = max(largest, size_bits(x[i, n]))
            largest = max(largest, shfl_xor(largest, 1))
            d[i] = as_float(uint32(max(largest, shfl_xor(largest, 2))))
        for i in range(ahead):
            d[i] = d[i] / float32(127) if int32(k + i * apart) < K else float32(0)
            twice[i] = twice_inverse(d[i])

        further = quad >> 1  # of two lanes the one with values 8 K further
        order, word = uint32(0x3726 if further else 0x5140), int32(2 * (quad & 1) + further)
        # bank conflicts: of the last four items the upper 16 K go first
        upper = int32(tokens * CHUNK if group >= 4 else 0)
        to = int32(codes + (2 * block * tokens + token) * CHUNK + 4 * word)
        to_scales = int32(scales + item * SCALE_BYTES)
        for i in range(ahead):
            low = four_codes((x[i, 0], x[i, 1], x[i, 2], x[i, 3]), twice[i])
            high = four_codes((x[i, 4], x[i, 5], x[i, 6], x[i, 7]), twice[i])
            s = sum_of_codes(low, high, d[i])
            low, high = prmt(low, shfl_xor(low, 2), order), prmt(high, shfl_xor(high, 2), order)
            if int32(start + SIDE_BY_SIDE * i + group) < stop:
                at = int32(to + i * codes_apart)
                store_u32(smem, at + upper, high if group >= 4 else low)
                store_u32(smem, at + tokens * CHUNK - upper, low if group >= 4 else high)
                store_f32x2(smem, to_scales + i * scales_apart, d[i], s)

    return load, quantize
