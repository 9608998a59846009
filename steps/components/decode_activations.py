"""From A to Q8_1 in shared memory, for few tokens: copied from slabs, or quantized on the way.

Codes lie there as int8 [block][token][32]; behind them, as float32, d [block][token], or d and s
side by side where a format has minima, `steps.components.decode_tiles.scale_bytes` each. Asking for A and
using it are apart, so that a kernel can do other things meanwhile.
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

UNITS: Final = TILE_K // CHUNK
"""Of 16 K in a record."""


@cache
def copier(tokens: int, minimum: bool, at_codes: int) -> Any:
    """copy(smem, at_d, qa, ds, M, first, k, lane): a warp asks (`cp_async`) for record first + k of
    A in slabs, to lie in shared memory as record k: codes from byte `at_codes` on, scales from
    at_d. qa, ds: `steps.components.activations.layouts.q8_1_k_outermost`, int8 and float32. Tokens beyond M are other ones
    again: their sums are nobody's."""
    size_d = scale_bytes(tokens, minimum)

    @cuda.jit(device=True, forceinline=True)
    def copy(smem, at_d, qa, ds, M, first, k, lane):
        for j in range(0, UNITS * tokens, 32):
            item = j + lane
            token = min(cuda.blockIdx.z * MOST_TOKENS + item % tokens, M - 1)
            at = (int64(first + k) * UNITS + item // tokens) * M + token
            to = at_codes + k * (BLOCKS * tokens * BLOCK) + item * CHUNK
            cp_async_16(smem, to, qa, at * CHUNK)
        for j in range(0, BLOCKS * tokens, 32):
            item = j + lane
            token = min(cuda.blockIdx.z * MOST_TOKENS + item % tokens, M - 1)
            at = (int64(first + k) * BLOCKS + item // tokens) * M + token
            to = at_d + k * (BLOCKS * tokens * size_d) + item * size_d
            cp_async_4(smem, to, ds, 2 * at)
            if minimum:
                cp_async_4(smem, to + 4, ds, 2 * at + 1)

    return copy


@cache
def quantizer(
    tokens: int, minimum: bool, at_codes: int, ahead: int, stride: int
) -> tuple[Any, Any]:
    """(fetch, quantize), for a warp. An *item* is a block of a token, counted as they lie in shared
    memory; a warp has eight side by side, four lanes each, and `ahead` times those, `stride` apart.

    fetch(x, a, item, stop, first, quad)
        asks for a lane's items of float32 A[M, K], those before `stop`, from `item` on; `first` is
        the block of K of item 0, `quad` the lane's number of the item's four. x: local float32
        [ahead, 8], values 4 quad .. and 16 + 4 quad ...
    quantize(smem, at_d, x, a, start, stop, first, group, quad)
        x -> shared memory: codes from byte `at_codes` on, scales from at_d; zeros outside of A.
        item = start + group, the number of the eight side by side.
    """
    size_d = scale_bytes(tokens, minimum)

    @cuda.jit(device=True, forceinline=True)
    def token_and_block(item, first):
        return cuda.blockIdx.z * MOST_TOKENS + item % tokens, int32(first + item // tokens)

    @cuda.jit(device=True, forceinline=True)
    def place(a, item, stop, first, quad):
        """Where four of an item's values begin. Outside of A it is the last ones' place: a load
        behind a branch of its own would wait for those before."""
        m, k = token_and_block(int32(min(item, stop - 1)), first)
        return min(m, a.shape[0] - 1) * a.shape[1] + min(k * BLOCK, a.shape[1] - BLOCK) + 4 * quad

    @cuda.jit(device=True, forceinline=True)
    def fetch(x, a, item, stop, first, quad):
        if rows_are_aligned(a):
            for i in range(ahead):
                at = place(a, item + stride * i, stop, first, quad)
                x[i, 0], x[i, 1], x[i, 2], x[i, 3] = load_f32x4(a, at)
                x[i, 4], x[i, 5], x[i, 6], x[i, 7] = load_f32x4(a, at + BLOCK // 2)
        else:
            for i in range(ahead):
                at = place(a, item + stride * i, stop, first, quad)
                for j in range(8):
                    x[i, j] = load_f32(a, at + j // 4 * (BLOCK // 2) + j % 4)

    @cuda.jit(device=True, forceinline=True)
    def quantize(smem, at_d, x, a, start, stop, first, group, quad):
        for i in range(ahead):
            item = int32(start + stride * i + group)
            if item - group < stop:
                low, high, d = quantized(x, i)
                m, k = token_and_block(item, first)
                if m >= a.shape[0] or k * BLOCK >= a.shape[1]:
                    low, high, d = uint32(0), uint32(0), float32(0)
                s = sum_of_codes(low, high, d) if minimum else d
                if item < stop:
                    store_u32x2(smem, at_codes + item * BLOCK + 8 * quad, low, high)
                    if minimum:
                        store_f32x2(smem, at_d + item * size_d, d, s)
                    else:
                        store_f32(smem, at_d + item * size_d, d)

    return fetch, quantize
