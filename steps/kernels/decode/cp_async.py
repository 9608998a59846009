"""Few tokens: cp.async rings of weights, a ring for each warp.

Taught by `steps.step17_few_tokens`; here with all formats, dtypes and biases that callers use.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int32, uint8

from qformats import Format
from qformats.repack import KNOWN, TILE_K, TILE_ROWS, tiles
from qformats.storage import storage_format
from steps.contract import Family, Kernel, Launch, Shape, dtype_name
from steps.instructions import cp_async_16, cp_async_commit, cp_async_wait
from steps.kernels.decode.copies import ROW_BYTES, SIDE_BY_SIDE, async_copy, float32_quantizer
from steps.kernels.decode.final_sum import final_sum
from steps.kernels.decode.product import BLOCKS, PAIR, SCALE_BYTES
from steps.kernels.decode.tiles import (
    MOST_TOKENS,
    Variant,
    activations,
    pair_walk,
    product_of,
    tile_configuration,
)
from steps.kernels.parts.epilogue.bias import bias_operand
from steps.kernels.parts.weights.storage_formats import tile_format


@cache
def kernel(
    name: str, variant: Variant, kind: str, output: str, scaled: bool, of_bias: str | None
) -> Any:
    """The kernel of a storage format. variant: the placement of A in shared memory, and the K range
    of each warp. kind, output, of_bias: dtypes of A, C and the bias, which may be None. scaled:
    tokens have scales."""
    tokens, warps, warps_n, stages = variant.tokens, variant.warps, variant.warps_n, variant.stages
    prefetched, slot_bytes = variant.prefetched, variant.slot_bytes
    a_at, ahead = variant.a_at, variant.ahead
    a8, quantized = variant.family == "A8", variant.place == "quantized"
    with_weights = variant.place == "with_weights"
    product = product_of(name, variant, kind)
    places, multiply, finish = product.places, product.multiply, product.finish
    n_acc = product.sums
    end_of = final_sum(tokens, warps, warps // warps_n, product.scale, scaled, output, of_bias)
    store_sums, load_ahead, n_loads = end_of.store, end_of.load_ahead, end_of.n_loads
    prologue, write = end_of.prologue, end_of.write
    walks = pair_walk(tile_format(name).tile_bytes, warps_n)
    own_part, start, advance, is_over = walks.own_part, walks.start, walks.advance, walks.is_over
    weights, row_tile_sums = PAIR * tile_format(name).tile_bytes, 4 * TILE_ROWS * tokens
    copy, (load, quantize) = async_copy(variant.family, tokens), float32_quantizer(tokens, ahead)
    wait_for_oldest, wait_for_all = cp_async_wait(stages - 1), cp_async_wait(0)

    @cuda.jit(device=True, forceinline=True)
    def issue(smem, slot, w, walk, part, lane):
        """Issue copies of the next packed tiles, if any are left -> the walk behind them."""
        # --- walk is (byte of w, bytes to copy, byte in the slot, tile of K, pair). The lanes of a
        # warp copy 512 bytes at a time, 16 bytes each
        if not is_over(walk, part):
            at, size, into, _, _ = walk
            to, source = int32(slot + into + 16 * lane), at + 16 * lane
            for i in range(0, weights, 512):
                if int32(size - 16 * lane) > i:
                    cp_async_16(smem, to + i, w, source + i)
            walk = advance(walk, part)
        return walk

    @cuda.jit(device=True, forceinline=True)
    def issue_a(smem, slot, walk, part, pitch, a, a_scales, rows, lane):
        """Issue copies of the 128 K of A that meet these packed tiles, if A is in slots."""
        if with_weights and not is_over(walk, part):
            to, (_, _, _, k_tile, _), (_, _, here) = int32(slot + weights), walk, rows
            copy(smem, to, to + TILE_K * here, pitch, a, a_scales, rows, k_tile, lane)

    @cuda.jit(launch_bounds=(32 * warps, 1))
    def decode(w, row_scales, a, a_scales, c, sizes, bias):
        """c[M, N] = a @ dequantize(w)[N, K]^T; w, row_scales: qformats.repack.tiles; a, a_scales:
        float16 or bfloat16 and scales of tokens, Q8_1 in MMA_ORDER, or float32 alone; sizes:
        those of a `TileConfiguration`; bias [N] is added, if there is one."""
        smem = cuda.shared.array(0, uint8, alignment=128)
        acc, x = cuda.local.array(n_acc, float32), cuda.local.array((ahead, 8), float32)
        loaded = cuda.local.array(n_loads, float32)
        t = int32(cuda.threadIdx.x)
        lane, warp = int32(t & 31), int32(t >> 5)
        M, N, m0 = int32(c.shape[0]), int32(c.shape[1]), int32(MOST_TOKENS * cuda.blockIdx.z)
        here = int32(min(int32(M - m0), tokens))  # tokens of this thread block
        rows, a_rows = (M, m0, here), int32(tokens) if quantized else here
        pair, part = own_part(sizes, N, warp)
        first, end, k0, count, _ = part  # row tiles of the block; K tiles of the warp from k0 on
        _, k_tiles, _, pitch, part_bytes, row_scales_at, sums_at, sums_stride = sizes
        k_part, sums = int32(warp // warps_n), (sums_at, sums_stride)
        ring = int32(warp * (stages * slot_bytes))
        ring_end = int32(ring + stages * slot_bytes)

        # the first weights, and row scales
        first_walk = start(pair, part)
        walk, i = first_walk, t
        for s in range(prefetched):
            walk = issue(smem, ring + s * slot_bytes, w, walk, part, lane)
        while i < (end - first) * (TILE_ROWS // 4):
            cp_async_16(smem, row_scales_at + 16 * i, row_scales, first * TILE_ROWS + 4 * i)
            i = int32(i + 32 * warps)

        # A and the other slots. A and all that was issued before it are one group of cp.async.
        # Where the warp's A and its scales begin, and bytes from each K tile of them to the next:
        own_a, step = int32(a_at + k_part * part_bytes), int32(TILE_K * a_rows if a8 else ROW_BYTES)
        own_scales, scales_step = own_a + k_tiles * step, int32(BLOCKS * SCALE_BYTES * a_rows)
        if quantized:
            load(x, a, k0, 0, lane)
        elif with_weights:
            issue_a(smem, ring, first_walk, part, pitch, a, a_scales, rows, lane)
        else:
            i = int32(warp % warps_n)
            while i < count:
                to, to_scales = int32(own_a + i * step), int32(own_scales + i * scales_step)
                copy(smem, to, to_scales, pitch, a, a_scales, rows, int32(k0 + i), lane)
                i = int32(i + warps_n)
        for s in range(stages):
            if s >= prefetched:
                issue_a(smem, ring + s * slot_bytes, walk, part, pitch, a, a_scales, rows, lane)
                walk = issue(smem, ring + s * slot_bytes, w, walk, part, lane)
            cp_async_commit()
        if quantized:
            i = int32(0)
            while i < count * (BLOCKS * tokens):
                if i > 0:
                    load(x, a, k0, i, lane)
                quantize(smem, own_a, own_scales, x, a, k0, count, i, lane)
                i = int32(i + ahead * SIDE_BY_SIDE)
        elif warps_n > 1 and not with_weights:  # other warps have copied parts of this one's A
            wait_for_oldest()
            cuda.syncthreads()
        load_ahead(loaded, c, a_scales, bias, m0, first, end, t)
        own = prologue(loaded, bias, t)

        # the stream of weights
        offsets, slot = places(lane, a_rows, pitch), ring
        while pair < end:
            for r in range(n_acc):
                acc[r] = 0
            i = int32(0)
            while i < count:
                # --- multiply the oldest slot when its copies have arrived, those of all lanes. A
                # lies in memory of its own, or in the slot behind the weights, its scales behind it
                wait_for_oldest()
                cuda.syncwarp()
                at, at_scales = int32(own_a + i * step), int32(own_scales + i * scales_step)
                if with_weights:
                    at, at_scales = int32(slot + weights), int32(slot + weights + TILE_K * here)
                multiply(acc, smem, slot, at, at_scales, offsets, a_rows, lane)

                # --- refill the slot when all lanes have read it, and go on to the next. A group is
                # closed in any case: the waits count groups
                cuda.syncwarp()
                issue_a(smem, slot, walk, part, pitch, a, a_scales, rows, lane)
                walk = issue(smem, slot, w, walk, part, lane)
                cp_async_commit()
                i, slot = int32(i + 1), int32(slot + slot_bytes)
                if slot == ring_end:
                    slot = ring

            # --- store the sums of row tiles low to high of the pair, and go on to the warp's next
            # pair: its warps_n warps side by side take pairs in turn
            low, high = int32(max(pair, first) - pair), int32(min(int32(end - pair), PAIR))
            to = int32(sums[0] + k_part * sums[1] + (pair + low - first) * row_tile_sums)
            finish(acc)
            store_sums(acc, smem, to, lane, low, high)
            pair = int32(pair + PAIR * warps_n)

        # --- the sums of all warps along K to C, when all copies have arrived (row scales are among
        # them) and all warps have stored theirs
        wait_for_all()
        cuda.syncthreads()
        write(smem, sums, row_scales_at, c, a_scales, bias, own, m0, here, first, end, t)

    return decode


def launch(
    fmt: Format, family: Family, shape: Shape, weights: tuple, activations: tuple, out: Any
) -> Launch:
    of_bias, (packed, row_scales, bias) = bias_operand(weights)
    stored_as, (a, *scales) = storage_format(fmt), activations
    quantized, scaled = family == "A8" and not scales, family == "A16" and bool(scales)
    found = tile_configuration(stored_as, shape, family, quantized, kind=dtype_name(a))
    run = kernel(stored_as.name, found.variant, dtype_name(a), dtype_name(out), scaled, of_bias)
    a_scales = scales[0] if scales else row_scales  # where there are none, something unread
    args = (packed, row_scales, a, a_scales, out, found.sizes(shape.k), bias)
    block = (32 * found.variant.warps,)
    return Launch(run, found.grid(shape.m, shape.n), block, args, found.shared)


KERNEL = Kernel(
    number=17,
    name="decode_cp_async",
    title="decode: weights stream to warps of their own",
    families=("A8", "A16"),
    unit={"A8": "tensor_int8", "A16": "tensor_fp16"},
    pack=tiles,
    activations=activations,
    launch=launch,
    most_tokens=MOST_TOKENS,
    invariant=("A16",),
    outputs=("float32", "float16", "bfloat16"),
    adds_bias=True,
    formats=tuple(name for name in KNOWN if name != "q2_k"),  # kernels.decode.product: why
    min_cc=(8, 0),
    chosen_untuned=True,
)
