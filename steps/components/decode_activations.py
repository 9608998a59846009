"""From A to Q8_1 in shared memory, for few tokens: prequantized A copied, or float32 quantized.

Codes lie there as int8 [block][token][32]; behind them, as float32, d [block][token], or d and s
side by side where a format has minima, `steps.components.decode_tiles.scale_bytes` each. Loads of A
are issued apart from their use, so that a kernel can do other things meanwhile. Step 10 teaches
this.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from numba import cuda, float32, int32, int64, uint32

from qformats import BLOCK
from qformats.repack import CHUNK, TILE_K
from steps.components.activations.q8_1 import quantized, rows_are_aligned, sum_of_codes
from steps.components.decode_tiles import BLOCKS, MOST_TOKENS, scale_bytes
from steps.instructions import (
    cp_async_4,
    cp_async_16,
    load_f32,
    load_f32x4,
    store_f32,
    store_f32x2,
    store_u32x2,
)

CHUNKS: Final = TILE_K // CHUNK
"""16-byte chunks of 128 K of a token."""


@cache
def prequantized_loader(tokens: int, minimum: bool, at_codes: int) -> Any:
    """issue(smem, at_d, qa, ds, M, first, k, lane): a warp issues copies (`cp_async`) of K tile
    first + k of A to place k of shared memory: codes from byte `at_codes` on, scales from at_d.

    qa, ds: int8 and float32 of `steps.components.activations.layouts.q8_1_k_outermost`. Beyond M
    other tokens are copied again: no sum of theirs is written."""
    size_d = scale_bytes(tokens, minimum)

    @cuda.jit(device=True, forceinline=True)
    def issue(smem, at_d, qa, ds, M, first, k, lane):
        for j in range(0, CHUNKS * tokens, 32):
            item = j + lane
            token = min(cuda.blockIdx.z * MOST_TOKENS + item % tokens, M - 1)
            offset = (int64(first + k) * CHUNKS + item // tokens) * M + token
            destination = at_codes + k * (BLOCKS * tokens * BLOCK) + item * CHUNK
            cp_async_16(smem, destination, qa, offset * CHUNK)
        for j in range(0, BLOCKS * tokens, 32):
            item = j + lane
            token = min(cuda.blockIdx.z * MOST_TOKENS + item % tokens, M - 1)
            offset = (int64(first + k) * BLOCKS + item // tokens) * M + token
            destination = at_d + k * (BLOCKS * tokens * size_d) + item * size_d
            cp_async_4(smem, destination, ds, 2 * offset)
            if minimum:
                cp_async_4(smem, destination + 4, ds, 2 * offset + 1)

    return issue


@cache
def float32_quantizer(
    tokens: int, minimum: bool, at_codes: int, ahead: int, stride: int
) -> tuple[Any, Any]:
    """(load, quantize), for a warp. An *item* is a block of a token, counted as they lie in shared
    memory; a warp has eight side by side, four lanes each, and `ahead` times those, `stride` apart.

    load(x, a, item, stop, first_block, quad)
        loads a lane's items of float32 A[M, K], those before `stop`, from `item` on; `first_block`
        is the block of K of item 0, `quad` which of the item's four lanes this is. x: local float32
        [ahead, 8], values 4 quad .. and 16 + 4 quad ...
    quantize(smem, at_d, x, a, start, stop, first_block, group, quad)
        x -> shared memory: codes from byte `at_codes` on, scales from at_d; zeros outside of A.
        item = start + group, where group is which of the eight side by side.
    """
    size_d = scale_bytes(tokens, minimum)

    @cuda.jit(device=True, forceinline=True)
    def token_and_block(item, first_block):
        return cuda.blockIdx.z * MOST_TOKENS + item % tokens, int32(first_block + item // tokens)

    @cuda.jit(device=True, forceinline=True)
    def source(a, item, stop, first_block, quad):
        """Where four of an item's values begin. Outside of A it is the last ones' place: a load
        behind a branch of its own would wait for those before."""
        m, k = token_and_block(int32(min(item, stop - 1)), first_block)
        return min(m, a.shape[0] - 1) * a.shape[1] + min(k * BLOCK, a.shape[1] - BLOCK) + 4 * quad

    @cuda.jit(device=True, forceinline=True)
    def load(x, a, item, stop, first_block, quad):
        if rows_are_aligned(a):
            for i in range(ahead):
                offset = source(a, item + stride * i, stop, first_block, quad)
                x[i, 0], x[i, 1], x[i, 2], x[i, 3] = load_f32x4(a, offset)
                x[i, 4], x[i, 5], x[i, 6], x[i, 7] = load_f32x4(a, offset + BLOCK // 2)
        else:
            for i in range(ahead):
                offset = source(a, item + stride * i, stop, first_block, quad)
                for j in range(8):
                    x[i, j] = load_f32(a, offset + j // 4 * (BLOCK // 2) + j % 4)

    @cuda.jit(device=True, forceinline=True)
    def quantize(smem, at_d, x, a, start, stop, first_block, group, quad):
        for i in range(ahead):
            item = int32(start + stride * i + group)
            if item - group < stop:
                low, high, d = quantized(x, i)
                m, k = token_and_block(item, first_block)
                if m >= a.shape[0] or k * BLOCK >= a.shape[1]:
                    low, high, d = uint32(0), uint32(0), float32(0)
                s = sum_of_codes(low, high, d) if minimum else d
                if item < stop:
                    store_u32x2(smem, at_codes + item * BLOCK + 8 * quad, low, high)
                    if minimum:
                        store_f32x2(smem, at_d + item * size_d, d, s)
                    else:
                        store_f32(smem, at_d + item * size_d, d)

    return load, quantize
