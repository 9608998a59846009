"""Float32 A to Q8_1 in shared memory: a warp quantizes its part of K while its weights arrive.

An *item* is a block of a token, in the order [block][token]. A warp has eight side by side, four
lanes each, and loads `ahead` times as many at once. Loads are issued apart from their use, so that
weights can be issued in between. Step 2 teaches the quantizer, step 17 this use of it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from numba import cuda, float32, int32, int64, uint32

from qformats import BLOCK
from qformats.repack import CHUNK, TILE_K
from steps.components.activations.q8_1 import (
    PAIRS_APART,
    quantized,
    rows_are_aligned,
    sum_of_codes,
)
from steps.components.decode.product import BLOCKS
from steps.components.decode.product_a8 import SCALE_BYTES
from steps.instructions import load_f32, load_f32x2, store_f32x2, store_u32

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
        row, k = int64(m) * K + 2 * quad, int32(k0 * TILE_K + item // uint32(tokens) * BLOCK)
        if rows_are_aligned(a):
            for i in range(ahead):
                # Outside of A it is the last block's place: a load behind a branch of its own would
                # wait for those before.
                at = row + min(int32(k + i * apart), int32(K - BLOCK))
                x[i, 0], x[i, 2] = load_f32x2(a, at)
                x[i, 1], x[i, 3] = load_f32x2(a, at + PAIRS_APART)
                x[i, 4], x[i, 6] = load_f32x2(a, at + 2 * PAIRS_APART)
                x[i, 5], x[i, 7] = load_f32x2(a, at + 3 * PAIRS_APART)
        else:
            for i in range(ahead):
                at = row + min(int32(k + i * apart), int32(K - BLOCK))
                for j in range(8):
                    pair = j // 4 * 2 + j % 2
                    x[i, j] = load_f32(a, at + PAIRS_APART * pair + j // 2 % 2)

    @cuda.jit(device=True, forceinline=True)
    def quantize(smem, codes, scales, x, a, k0, k_tiles, start, lane):
        group, quad = int32(lane >> 2), int32(lane & 3)
        item, stop = uint32(start + group), int32(k_tiles * (BLOCKS * tokens))
        block, token = item // uint32(tokens), item % uint32(tokens)
        k, K = int32(k0 * TILE_K + block * BLOCK), int32(a.shape[1])
        # bank conflicts: of the last four items the upper 16 K go first
        upper = int32(tokens * CHUNK if group >= 4 else 0)
        to = int32(codes + (2 * block * tokens + token) * CHUNK + 4 * quad)
        to_scales = int32(scales + item * SCALE_BYTES)
        for i in range(ahead):
            if int32(start + SIDE_BY_SIDE * i) < stop:  # of all lanes: they exchange values
                low, high, d = quantized(x, i)
                if int32(k + i * apart) >= K:
                    low, high, d = uint32(0), uint32(0), float32(0)
                s = sum_of_codes(low, high, d)
                if int32(start + SIDE_BY_SIDE * i + group) < stop:
                    at = int32(to + i * codes_apart)
                    store_u32(smem, at + upper, high if group >= 4 else low)
                    store_u32(smem, at + tokens * CHUNK - upper, low if group >= 4 else high)
                    store_f32x2(smem, to_scales + i * scales_apart, d, s)

    return load, quantize
