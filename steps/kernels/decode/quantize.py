"""Float32 A to Q8_1 in shared memory: a warp quantizes its part of K while its weights arrive.

An *item* is a block of a token, in the order [block][token]. Four lanes have an item: four values
in a row each, and four more 16 K further. A warp has eight items side by side, and loads `ahead`
times as many at once. Loads are issued apart from their use, so that weights can be issued in
between; and what needs a branch, the two divisions, is done apart from the rest, so that the
compiler can mix the work of all items.

Codes of 16 K are stored in `qformats.repack.MMA_ORDER`, in words of K 2t, 2t + 8, 2t + 1, 2t + 9.
So two lanes with values 8 K apart make two words of their codes:

    lane j      K  4j      4j + 1   4j + 2   4j + 3         word of 4j,     4j + 8,  4j + 1, 4j + 9
    lane j + 2     4j + 8  4j + 9   4j + 10  4j + 11        word of 4j + 2, 4j + 10, 4j + 3, 4j + 11

Step 2 teaches the quantizer, step 17 this use of it.
"""

from __future__ import annotations

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
from steps.instructions import (
    as_float,
    load_f32,
    load_f32x4,
    prmt,
    shfl_xor,
    store_f32x2,
    store_u32,
)
from steps.kernels.decode.product import BLOCKS
from steps.kernels.decode.product_a8 import SCALE_BYTES

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
