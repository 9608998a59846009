"""Few tokens on Hopper: bulk copies, launches that overlap.

Taught by `steps.step18_bulk_copies`; here with all formats, dtypes and biases that callers use.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int32, uint8

from qformats import Format
from qformats.repack import KNOWN, TILE_K, TILE_ROWS, tiles
from qformats.storage import storage_format
from steps.contract import Family, Kernel, Launch, Shape, dtype_name
from steps.instructions import (
    TensorMap,
    elect_one,
    fence_mbarrier_init,
    fence_proxy_async,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    mbarrier_arrive_expect,
    mbarrier_init,
    mbarrier_wait,
    shfl,
    tensor_map_address,
)
from steps.kernels.decode.copies import (
    ROW_BYTES,
    SIDE_BY_SIDE,
    box_copies,
    bulk_copies,
    float32_quantizer,
)
from steps.kernels.decode.final_sum import FinalSum, final_sum
from steps.kernels.decode.product import (
    BLOCKS,
    BOX_K,
    PAIR,
    SCALE_BYTES,
    box_rows,
    boxes_bytes,
    boxes_stride,
)
from steps.kernels.decode.tiles import (
    H200_LEAST_TILES,
    MOST_TOKENS,
    Variant,
    activations,
    gated_walk,
    pair_walk,
    product_of,
    tile_configuration,
)
from steps.kernels.parts.epilogue.bias import bias_operand
from steps.kernels.parts.weights.storage_formats import tile_format


def arguments(variant: Variant, w: Any, row_scales: Any, a: Any, *others: Any) -> tuple[Any, ...]:
    """Those of a kernel: where it copies A in boxes, a tensor map of A comes first."""
    if variant.in_boxes:
        rows = box_rows(variant.tokens, a.shape[0], variant.scaled)
        return TensorMap(a, (rows, BOX_K)), w, row_scales, *others
    return w, row_scales, a, *others


@cache
def kernel(name: str, variant: Variant, kind: str, end_of: FinalSum, gated: bool = False) -> Any:
    """The kernel of a storage format. kind: dtype of A; end_of: what becomes of the sums;
    gated: a pair is a row tile of gates and the same one of ups (`gated_walk`)."""
    tokens, warps, warps_n, stages = variant.tokens, variant.warps, variant.warps_n, variant.stages
    prefetched, slot_bytes = variant.prefetched, variant.slot_bytes
    a_at, ahead = variant.a_at, variant.ahead
    a8, quantized = variant.family == "A8", variant.place == "quantized"
    with_weights, in_boxes = variant.place == "with_weights", variant.in_boxes
    kept_boxes = variant.place == "kept_boxes"
    alignment, bounds = (1024 if in_boxes else 128), (32 * warps + end_of.beside, 1)
    product = product_of(name, variant, kind)
    places, multiply = product.places, product.multiply
    finish, n_acc = product.finish, product.sums
    store_sums, load_ahead, n_loads = end_of.store, end_of.load_ahead, end_of.n_loads
    prologue, write = end_of.prologue, end_of.write
    walks = (gated_walk if gated else pair_walk)(tile_format(name).tile_bytes, warps_n)
    copy_weights, copy_row_scales = walks.bulk_copy, walks.bulk_copy_scales
    own_part, start, advance, is_over = walks.own_part, walks.start, walks.advance, walks.is_over
    weights, row_tile_sums = PAIR * tile_format(name).tile_bytes, 4 * TILE_ROWS * tokens
    copies, (load, quantize) = bulk_copies(variant.family), float32_quantizer(tokens, ahead)
    size_of_a, copy_a = copies.size, copies.issue
    has_tail, zero_tail = copies.has_tail, copies.zero_tail
    copy_boxes, of_boxes, of_row = box_copies(tokens), boxes_bytes(tokens), boxes_bytes(1)
    as_many_rows = box_rows(tokens, 1, variant.scaled) < tokens
    boxes_apart = boxes_stride(tokens)
    bars_at, bars_of_warp = variant.bars_at, 8 * (stages + 1)  # one for each slot, and one for A

    @cuda.jit(device=True, forceinline=True)
    def issue(smem, slot, boxes, bar, w, walk, part, a, rows, more_bytes, pair, lane):
        """Issue a copy of the next packed tiles, if any are left -> the walk behind them. Where A
        is in boxes, copies of its 128 K to byte `boxes` go before, unless that is -1; where they
        are kept, the warp's begin there, and only its first pair of row tiles, from tile `pair` on,
        brings them. more_bytes: of other copies that report to the same mbarrier."""
        if not is_over(walk, part):
            at, size, into, k_tile, of_pair = walk
            # elected: the compiler then knows it is one lane (step 18's worklog: not at one token)
            if (elect_one() != 0) if in_boxes else (lane == 0):
                brings_a = in_boxes and (of_pair == pair or not kept_boxes)
                if with_weights:
                    more_bytes += size_of_a(a, rows, k_tile, 1)
                elif brings_a:
                    more_bytes += of_row * min(rows[0], tokens) if as_many_rows else of_boxes
                mbarrier_arrive_expect(smem, bar, int32(size + more_bytes))
                if brings_a and boxes >= 0:
                    if kept_boxes:
                        boxes = int32(boxes + int32(k_tile - part[2]) * boxes_apart)
                    copy_boxes(smem, boxes, bar, a, rows[1], k_tile)
                copy_weights(smem, slot + into, w, at, size, bar)
            walk = advance(walk, part)
        return walk

    @cuda.jit(device=True, forceinline=True)
    def issue_a(smem, slot, bar, walk, part, pitch, a, a_scales, rows, lane):
        """Issue copies of the 128 K of A that meet these packed tiles, if A is in slots."""
        if with_weights and not is_over(walk, part):
            to, (_, _, _, k_tile, _), (_, _, here) = int32(slot + weights), walk, rows
            copy_a(smem, to, to + TILE_K * here, pitch, bar, a, a_scales, rows, k_tile, 1, lane)

    @cuda.jit(device=True, forceinline=True)
    def decode(w, row_scales, a, a_scales, c, sizes, reads):
        """As `decode` of step 17. a: where it is in boxes, the address of its tensor map. reads:
        what `end_of` reads, such as a bias."""
        smem = cuda.shared.array(0, uint8, alignment=alignment)
        acc, x = cuda.local.array(n_acc, float32), cuda.local.array((ahead, 8), float32)
        loaded = cuda.local.array(n_loads, float32)
        griddepcontrol_launch_dependents()
        t = int32(cuda.threadIdx.x)
        lane, warp = int32(t & 31), shfl(int32(t >> 5), 0)  # the same in all lanes: one register
        M, N, m0 = int32(c.shape[0]), int32(c.shape[1]), int32(MOST_TOKENS * cuda.blockIdx.z)
        here = int32(min(int32(M - m0), tokens))  # tokens of this thread block
        rows, a_rows = (M, m0, here), int32(tokens) if quantized else here
        pair, part = own_part(sizes, N, warp)
        first, end, k0, count, all_k_tiles = part
        _, k_tiles, _, pitch, part_bytes, row_scales_at, sums_at, sums_stride = sizes
        k_part, sums = int32(warp // warps_n), (sums_at, sums_stride)
        ring, bars = int32(warp * (stages * slot_bytes)), int32(bars_at + warp * bars_of_warp)
        a_warp = int32(k_part * warps_n)  # it copies A for all warps with the same part of K
        copies_a, bar_of_a = warp == a_warp, int32(bars_at + a_warp * bars_of_warp + 8 * stages)

        # the first weights: they do not depend on the launch before this one
        if lane == 0:
            for s in range(stages + 1):
                mbarrier_init(smem, bars + 8 * s, 1)
            fence_mbarrier_init()
        cuda.syncwarp()
        first_walk, first_pair = start(pair, part), pair
        walk, scale_bytes = first_walk, int32(4 * TILE_ROWS * (end - first))
        for s in range(prefetched):
            more = scale_bytes if s == 0 and warp == 0 else int32(0)
            slot, bar = ring + s * slot_bytes, bars + 8 * s
            walk = issue(smem, slot, int32(-1), bar, w, walk, part, a, rows, more, first_pair, lane)
        if with_weights and has_tail(a):
            to = int32(ring + weights)
            for _ in range(stages):
                zero_tail(smem, to, pitch, a, rows, int32(all_k_tiles - 1), 1, lane)
                to = int32(to + slot_bytes)
            fence_proxy_async()
            cuda.syncwarp()
        griddepcontrol_wait()

        # what the end needs, then A, before the weights of other slots
        load_ahead(loaded, c, a_scales, reads, m0, first, end, t)
        own_a, step = int32(a_at + k_part * part_bytes), int32(TILE_K * a_rows if a8 else ROW_BYTES)
        if in_boxes:
            own_a, step = int32(a_at + warp * part_bytes), int32(boxes_apart)
        own_scales, scales_step = own_a + k_tiles * step, int32(BLOCKS * SCALE_BYTES * a_rows)
        if quantized:
            load(x, a, k0, 0, lane)
        elif with_weights:
            issue_a(smem, ring, bars, first_walk, part, pitch, a, a_scales, rows, lane)
        elif in_boxes:
            if lane == 0 and not is_over(first_walk, part):
                copy_boxes(smem, own_a, bars, a, m0, k0)
        elif copies_a and count > 0:
            if lane == 0:
                mbarrier_arrive_expect(smem, bar_of_a, size_of_a(a, rows, k0, count))
            copy_a(smem, own_a, own_scales, pitch, bar_of_a, a, a_scales, rows, k0, count, lane)

        # the other slots and row scales
        for s in range(prefetched, stages):
            slot, bar = ring + s * slot_bytes, bars + 8 * s
            boxes = own_a if kept_boxes else int32(own_a + s * step)
            issue_a(smem, slot, bar, walk, part, pitch, a, a_scales, rows, lane)
            walk = issue(smem, slot, boxes, bar, w, walk, part, a, rows, int32(0), first_pair, lane)
        if t == 0:
            copy_row_scales(smem, row_scales_at, row_scales, first, scale_bytes, bars)
        own = prologue(loaded, reads, t)
        if quantized:
            i = int32(0)
            while i < count * (BLOCKS * tokens):
                if i > 0:
                    load(x, a, k0, i, lane)
                quantize(smem, own_a, own_scales, x, a, k0, count, i, lane)
                i = int32(i + ahead * SIDE_BY_SIDE)
        elif not (with_weights or in_boxes):
            if copies_a and count > 0:
                zero_tail(smem, own_a, pitch, a, rows, k0, count, lane)
            if warps_n > 1:  # the mbarrier, and the zeros, may be another warp's
                cuda.syncthreads()
            if count > 0:
                mbarrier_wait(smem, bar_of_a, 0)
        cuda.syncwarp()  # what lanes have stored of A

        # the stream
        offsets, s, parity = places(lane, a_rows, pitch), int32(0), int32(0)
        while pair < end:
            for r in range(n_acc):
                acc[r] = 0
            i = int32(0)
            while i < count:
                slot, bar = int32(ring + s * slot_bytes), int32(bars + 8 * s)
                mbarrier_wait(smem, bar, parity)
                tile = s if in_boxes and not kept_boxes else i
                at, at_scales = int32(own_a + tile * step), int32(own_scales + i * scales_step)
                if with_weights:
                    at, at_scales = int32(slot + weights), int32(slot + weights + TILE_K * here)
                multiply(acc, smem, slot, at, at_scales, offsets, a_rows, lane)
                cuda.syncwarp()
                issue_a(smem, slot, bar, walk, part, pitch, a, a_scales, rows, lane)
                to = own_a if kept_boxes else at
                walk = issue(
                    smem, slot, to, bar, w, walk, part, a, rows, int32(0), first_pair, lane
                )
                i, s = int32(i + 1), int32(s + 1)
                if s == stages:
                    s, parity = int32(0), int32(parity ^ 1)
            low, high = int32(max(pair, first) - pair), int32(min(int32(end - pair), PAIR))
            to = int32(sums[0] + k_part * sums[1] + (pair + low - first) * row_tile_sums)
            finish(acc)
            store_sums(acc, smem, to, lane, low, high)
            pair = int32(pair + PAIR * warps_n)

        # the sums of all warps along K to C
        cuda.syncthreads()
        write(smem, sums, row_scales_at, c, a_scales, reads, own, m0, here, first, end, t)

    @cuda.jit(launch_bounds=bounds)
    def decode_bulk(w, row_scales, a, a_scales, c, sizes, reads):
        decode(w, row_scales, a, a_scales, c, sizes, reads)

    @cuda.jit(launch_bounds=bounds)
    def decode_bulk_boxes(a_map, w, row_scales, a_scales, c, sizes, reads):
        decode(w, row_scales, tensor_map_address(a_map), a_scales, c, sizes, reads)

    return decode_bulk_boxes if in_boxes else decode_bulk


def launch(
    fmt: Format, family: Family, shape: Shape, weights: tuple, activations: tuple, out: Any
) -> Launch:
    of_bias, (packed, row_scales, bias) = bias_operand(weights)
    stored_as, (a, *scales) = storage_format(fmt), activations
    quantized, scaled = family == "A8" and not scales, family == "A16" and bool(scales)
    kind, output = dtype_name(a), dtype_name(out)
    found = tile_configuration(
        stored_as, shape, family, quantized, mapped=True, kind=kind, least_tiles=H200_LEAST_TILES
    )
    variant = found.variant
    scale = product_of(stored_as.name, variant, kind).scale
    end_of = final_sum(
        variant.tokens, variant.warps, variant.warps_k, scale, scaled, output, of_bias
    )
    run = kernel(stored_as.name, variant, kind, end_of)
    a_scales = scales[0] if scales else row_scales  # where there are none, something unread
    args = arguments(variant, packed, row_scales, a, a_scales, out, found.sizes(shape.k), bias)
    block = (32 * variant.warps,)
    return Launch(run, found.grid(shape.m, shape.n), block, args, found.shared, overlap=True)


KERNEL = Kernel(
    number=18,
    name="decode_bulk",
    title="decode on Hopper: bulk copies, launches that overlap",
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
    min_cc=(9, 0),
    chosen_untuned=True,
)
