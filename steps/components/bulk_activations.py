"""From A to shared memory by bulk copies: float32 that is quantized there, or prequantized.

Step 15 teaches this.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from numba import cuda, float32, int32, int64, uint32

from qformats import BLOCK
from qformats.repack import CHUNK, TILE_K
from steps.components.activations.q8_1 import quantized, sum_of_codes
from steps.components.bulk_tiles import SCALES
from steps.components.decode_tiles import BLOCKS, MOST_TOKENS, scale_bytes
from steps.contract import ceil_div
from steps.instructions import (
    address,
    bulk_copy,
    fence_proxy_async,
    load_f32,
    load_f32x4,
    mbarrier_arrive,
    mbarrier_arrive_expect,
    store_f32,
    store_f32x2,
    store_u32x2,
)

ITEMS_AT_ONCE: Final = 2  # blocks of A that a lane quantizes side by side (H200)


@cache
def prequantized_loader(tokens: int, weights: int) -> Any:
    """issue(smem, slot, bar, lane, a, ds, M, block_tokens, k), for slots that begin with `weights`
    bytes of weights; a, ds: `steps.components.activations.layouts.q8_1_k_outermost`."""

    @cuda.jit(device=True, forceinline=True)
    def issue(smem, slot, bar, lane, a, ds, M, block_tokens, k):
        """Issue copies of K tile k of A to behind the weights of a slot: of its M tokens those of
        this thread block, `block_tokens`. All M tokens are one piece of memory. Of some of them
        16 K are one piece, and scales are copied lane by lane, as they are not aligned for more."""
        destination, destination_d = slot + weights, slot + weights + tokens * TILE_K
        if block_tokens == M:
            if lane == 0:
                first = int64(k) * M
                bulk_copy(smem, destination, a, first * TILE_K, int32(M * TILE_K), smem, bar)
                bulk_copy(
                    smem, destination_d, ds, first * (2 * BLOCKS), int32(M * SCALES), smem, bar
                )
        else:
            m, i, of_block = int64(MOST_TOKENS * cuda.blockIdx.z), int32(0), int32(2 * block_tokens)
            while i < 2 * BLOCKS and lane == 0:
                offset = ((int64(k) * (2 * BLOCKS) + i) * M + m) * CHUNK
                bulk_copy(
                    smem,
                    destination + i * block_tokens * CHUNK,
                    a,
                    offset,
                    int32(block_tokens * CHUNK),
                    smem,
                    bar,
                )
                i = int32(i + 1)
            i = lane
            while i < BLOCKS * of_block:
                offset = ((int64(k) * BLOCKS + i // of_block) * M + m) * 2 + i % of_block
                store_f32(smem, destination_d + 4 * i, load_f32(ds, offset))
                i = int32(i + 32)
            cuda.syncwarp()

    return issue


@cache
def float32_quantizer(
    tokens: int, minimum: bool, staged_k_tiles: int, at_codes: int
) -> tuple[Any, Any, int]:
    """(produce, quantize, blocks of A for which quantize needs local float32 x[..., 8]), for
    `staged_k_tiles` K tiles of A at a time. Codes go to shared memory as int8 [block][token][32]
    from byte at_codes on, d, or d and s, to at_d: [block][token],
    `steps.components.decode_tiles.scale_bytes` each."""
    size_d, row_bytes = scale_bytes(tokens, minimum), 4 * TILE_K * staged_k_tiles
    items_at_once = max(1, min(ITEMS_AT_ONCE, ceil_div(staged_k_tiles * BLOCKS * tokens, 8)))

    @cuda.jit(device=True, forceinline=True)
    def produce(smem, destination, bar, lane, a, M, k, count):
        """`count` values of each token from k on -> shared memory, float32, by bulk copies; or lane
        by lane, where A is not aligned for them."""
        K = int32(a.shape[1])
        if address(a, 0) & 15 == 0:
            if lane == 0:
                mbarrier_arrive_expect(smem, bar, int32(count * (4 * tokens)))
                for m in range(tokens):
                    offset = int64(min(int32(m), int32(M - 1))) * K + k
                    bulk_copy(
                        smem, destination + m * row_bytes, a, offset, int32(4 * count), smem, bar
                    )
        else:
            for m in range(tokens):
                offset, i = int64(min(int32(m), int32(M - 1))) * K + k, lane
                while i < count:
                    store_f32(smem, destination + m * row_bytes + 4 * i, load_f32(a, offset + i))
                    i = int32(i + 32)
            fence_proxy_async()  # bulk copies of weights will go to the same place
            cuda.syncwarp()
            if lane == 0:
                mbarrier_arrive(smem, bar)

    @cuda.jit(device=True, forceinline=True)
    def quantize(x, smem, raw, at_d, lane, k, k_tiles, blocks_k):
        """Float32 A at byte `raw`, so many K tiles, the first of them tile k -> Q8_1; zeros from
        block `blocks_k` of K on. A warp has eight blocks side by side, four lanes each."""
        group, quad = int32(lane >> 2), int32(lane & 3)
        start, count = int32(0), int32(k_tiles * (BLOCKS * tokens))
        while start < count:
            for j in range(items_at_once):
                item = int32(min(int32(start + 8 * j + group), int32(count - 1)))
                offset = int32(item // tokens * (4 * BLOCK) + item % tokens * row_bytes + 16 * quad)
                x[j, 0], x[j, 1], x[j, 2], x[j, 3] = load_f32x4(smem, raw + offset)
                x[j, 4], x[j, 5], x[j, 6], x[j, 7] = load_f32x4(smem, raw + offset + 2 * BLOCK)
            for j in range(items_at_once):
                item = int32(min(int32(start + 8 * j + group), int32(count - 1)))
                item = int32(item + int32(k * (BLOCKS * tokens)))
                low, high, d = quantized(x, j)
                if int32(item // tokens) >= blocks_k:
                    low, high, d = uint32(0), uint32(0), float32(0)
                s = sum_of_codes(low, high, d) if minimum else d
                store_u32x2(smem, at_codes + item * BLOCK + 8 * quad, low, high)
                if minimum:
                    store_f32x2(smem, at_d + item * size_d, d, s)
                else:
                    store_f32(smem, at_d + item * size_d, d)
            start = int32(start + 8 * items_at_once)
        cuda.syncwarp()

    return produce, quantize, items_at_once
