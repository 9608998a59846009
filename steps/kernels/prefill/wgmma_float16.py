"""wgmma, persistent: stream-K, staggered warpgroups, programmatic launch.

Taught by `steps.step14_persistent`; here with all formats, dtypes and biases that callers use.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, Final

import numpy as np
from numba import cuda, int32, uint8, uint32

from qformats import Format
from qformats.repack import KNOWN, TILE_K, tiles
from qformats.storage import StorageFormat, storage_format
from steps.contract import Family, Kernel, Launch, Shape, ceil_div, dtype_name, multiprocessors
from steps.instructions import (
    BOX_K,
    TensorMap,
    barrier_arrive,
    barrier_sync,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    prefetch_tensor_map,
    setmaxnreg_dec,
    setmaxnreg_inc,
    shfl,
    swizzled_descriptor,
    tensor_map_address,
    wgmma_wait,
    zeros_f32,
)
from steps.kernels.parts.activations.beside import rows_beside, rows_operand
from steps.kernels.parts.activations.layouts import float16_rows_of_many
from steps.kernels.parts.epilogue.bias import bias_operand
from steps.kernels.parts.epilogue.wgmma import WARPGROUP, WGMMA_ROWS, finish_wgmma_tile, warpgroups
from steps.kernels.parts.stream_k import scheduler
from steps.kernels.prefill import wgmma_tiles
from steps.kernels.prefill.ring import mbarrier_ring
from steps.kernels.prefill.stage_copies import box_copies, weight_copies
from steps.kernels.prefill.wgmma_products import half_stage

# (features, tokens) of a tile of C: 192 where N would leave SMs idle, 256 read the least a product
TILES: Final = (*((128, bm) for bm in wgmma_tiles.TOKENS), (192, 128), (256, 128))
STAGES: Final = 8  # of the ring, at most
STAGGER: Final = 2  # stages: about as long as the end of a tile, which they hide


@cache
def kernel(
    fmt: StorageFormat, output: str, scaled: bool, of_bias: str | None, tile: wgmma_tiles.Tile,
    slices: int, beside_k: int | None, stages: int, stagger: int,
) -> tuple[Any, int]:  # fmt: skip
    """(kernel for C of dtype `output`, a bias of dtype `of_bias` or none, tiles (features, tokens),
    shared ones added up in `slices`, a ring of `stages`, and the first warpgroup `stagger` of them
    before the others; its shared memory in bytes). scaled: tokens have scales."""
    (bn, bm), groups, form = tile, warpgroups(tile[0]), half_stage(fmt.name, in_pairs=True)
    load, multiply, tile_bytes = form.load, form.multiply, form.tile_bytes
    consumers, warps = groups * WARPGROUP, groups * WARPGROUP // 32
    acc_halves = bn // (groups * WGMMA_ROWS)  # accumulator halves of a warpgroup
    acc_half_bytes = warps * tile_bytes  # from the weights of the first to those of the second
    box_bytes, w_bytes = 2 * BOX_K * bm, acc_halves * acc_half_bytes
    a_bytes, weights_at = 2 * box_bytes, stages * 2 * box_bytes
    copy_weights, copy_boxes = weight_copies(bn, tile_bytes), box_copies(bm)
    ring = mbarrier_ring(stages, weights_at + stages * w_bytes)
    make_ring, next_stage, wait_empty = ring.make, ring.next_stage, ring.wait_empty
    expect, full, wait_full, release = ring.expect, ring.full, ring.wait_full, ring.release
    area_at = ceil_div(ring.end, 128) * 128
    rounding = rows_beside(beside_k, bm)
    token_scales_of, round_rows = rounding.parts, rounding.round_rows
    wait_for_rows, leave = rounding.wait_for_rows, rounding.leave
    finish, shared_bytes = finish_wgmma_tile(tile, area_at, output, slices, scaled, of_bias)
    find, no_sums = scheduler(bn, bm), zeros_f32(bm // 2)
    first_work, next_work = find.first_work, find.next_work
    tile_origin, contributors = find.tile_origin, find.contributors
    wait_for_all, wait_for_all_but_one = wgmma_wait(0), wgmma_wait(1)
    inc_registers = setmaxnreg_inc(232 if groups == 2 else 160)  # 2 x 232 + 40 are 3 x 168,
    dec_registers = setmaxnreg_dec(40 if groups == 2 else 32)  # and 3 x 160 + 32 are 4 x 128
    stagger_barrier = 1 + groups  # the named barrier behind those of `finish`

    @cuda.jit(launch_bounds=(consumers + WARPGROUP, 1))
    def w4a16_persistent(
        a_map, w, row_scales, rows, bias, c, steps, tiles_c, schedule, partials, arrived
    ):  # fmt: skip
        """c[M, N] = a @ dequantize(w)[N, K]^T; w of qformats.repack.tiles, a_map of float16
        a[M, K], steps of 128 K, tiles_c tiles of C, schedule of stream_k.work_rate."""
        memory = cuda.shared.array(0, uint8, alignment=1024)
        a = tensor_map_address(a_map)
        token_scales, others = token_scales_of(rows)
        N, t = int32(c.shape[1]), int32(cuda.threadIdx.x)
        warp, lane = shfl(int32(t >> 5), 0), int32(t & 31)  # shuffled: one value for the whole warp
        steps, shared_tiles, rate = int32(steps), int32(schedule[0]), schedule[1]
        tiles_n = int32(uint32(N + bn - 1) // uint32(bn))
        tile_id, k0, count, left = first_work(shared_tiles, rate, steps)
        if t == 0:
            make_ring(memory, warps)
        cuda.syncthreads()
        griddepcontrol_launch_dependents()
        stage, parity = int32(0), int32(0)
        if warp >= warps:  # producers: one lane of warp `warps` for weights, of the next for tokens
            dec_registers()
            if warp > warps + 1:
                round_rows(others, lane)
                return
            if lane > 0:
                return
            if warp > warps:
                prefetch_tensor_map(a)
                griddepcontrol_wait()  # the launch before may have made the tokens
            while tile_id < tiles_c:
                m0, n0 = tile_origin(tile_id, tiles_n)
                if warp > warps:
                    wait_for_rows(others, m0)
                for step in range(k0, k0 + count):
                    wait_empty(memory, stage, parity)
                    if warp == warps:
                        to = weights_at + stage * w_bytes
                        copy_weights(memory, to, w, n0, N, step, steps, full(stage))
                    else:
                        expect(memory, stage, a_bytes + w_bytes)  # both producers' copies
                        copy_boxes(memory, stage * a_bytes, a, m0, step * TILE_K, full(stage))
                    stage, parity = next_stage(stage, parity)
                tile_id, k0, count, left = next_work(tile_id, left, shared_tiles, steps)
            if warp > warps:
                leave(others)
            return

        inc_registers()
        griddepcontrol_wait()
        others_begin = int32(-1)  # the other warpgroups begin after this step of the first tile
        if stagger:
            if warp < WARPGROUP // 32:
                others_begin = int32(min(stagger, count) - 1)
            else:
                barrier_sync(stagger_barrier, consumers)
        previous, destination = int32(0), (row_scales, token_scales, bias, c, partials, arrived)
        while tile_id < tiles_c:
            m0, n0 = tile_origin(tile_id, tiles_n)
            first_block = last_block = slot = int32(0)
            if count < steps:  # these blocks share the tile
                first_block, last_block, slot = contributors(tile_id, shared_tiles, rate, steps)
            acc, acc1, step = no_sums(), no_sums(), int32(0)  # of both accumulator halves
            while True:
                wait_full(memory, stage, parity)
                at = weights_at + stage * w_bytes + warp * tile_bytes
                b = swizzled_descriptor(memory, stage * a_bytes)
                # Four products of 64 K in turn: acc's lower, acc1's lower1, acc's upper, acc1's
                # upper1. A wait leaves only the newest running: registers of the others are free.
                lower, upper = load(memory, at, lane, 0), load(memory, at, lane, 1)
                if acc_halves == 2:
                    lower1 = load(memory, at + acc_half_bytes, lane, 0)
                    acc1 = wait_for_all_but_one(acc1)
                else:
                    acc = wait_for_all_but_one(acc)
                acc = multiply(acc, lower, b)
                acc = wait_for_all_but_one(acc)
                # the stage before has been multiplied
                release(memory, previous, lane == 0 and step > 0)
                if acc_halves == 2:
                    acc1 = multiply(acc1, lower1, b)
                    upper1 = load(memory, at + acc_half_bytes, lane, 1)
                    acc1 = wait_for_all_but_one(acc1)
                acc = multiply(acc, upper, b + box_bytes // 16)
                if acc_halves == 2:
                    acc = wait_for_all_but_one(acc)
                    acc1 = multiply(acc1, upper1, b + box_bytes // 16)
                if stagger and step == others_begin:
                    barrier_arrive(stagger_barrier, consumers)
                previous = stage
                stage, parity = next_stage(stage, parity)
                step = int32(step + 1)
                if step == count:
                    break
            others_begin = int32(-1)
            acc, acc1 = wait_for_all(acc), wait_for_all(acc1)
            release(memory, previous, lane == 0)
            finish(acc, 0, tile_id, m0, n0, first_block, last_block, slot, destination)
            if acc_halves == 2:
                finish(acc1, 1, tile_id, m0, n0, first_block, last_block, slot, destination)
            tile_id, k0, count, left = next_work(tile_id, left, shared_tiles, steps)

    return w4a16_persistent, shared_bytes


def tiling(fmt: StorageFormat, shape: Shape) -> wgmma_tiles.TileConfiguration:
    cycles = partial(wgmma_tiles.float16_stage_cycles, fmt.bits)
    return wgmma_tiles.fewest_cycles(TILES, shape, multiprocessors(), cycles)


def scratch(fmt: Format, family: Family, shape: Shape) -> tuple[tuple[tuple[int, ...], Any], ...]:
    return wgmma_tiles.scratch_arrays(tiling(storage_format(fmt), shape), np.float32)


def launch(
    fmt: Format, family: Family, shape: Shape, weights: tuple, activations: tuple, out: Any,
    scratch: tuple,
) -> Launch:  # fmt: skip
    of_bias, (packed, row_scales, bias) = bias_operand(weights)
    stored_as, chosen = storage_format(fmt), tiling(storage_format(fmt), shape)
    tile, slices = chosen[0], wgmma_tiles.reduction_slices(chosen)
    beside_k, a, operand = rows_operand(activations, row_scales)
    scaled = len(activations) > 1
    make = partial(kernel, stored_as, dtype_name(out), scaled, of_bias, tile, slices, beside_k)
    operands = TensorMap(a, (tile[1], BOX_K)), packed, row_scales, operand, bias, out
    return wgmma_tiles.launch_that_fits(make, STAGES, STAGGER, chosen, shape.k, operands, scratch)


KERNEL = Kernel(
    number=14,
    name="wgmma_float16",
    title="W4A16 persistent: stream-K, staggered warpgroups, programmatic launch",
    families=("A16",),
    unit={"A16": "tensor_fp16"},
    pack=tiles,
    activations={"A16": float16_rows_of_many},
    launch=launch,
    scratch=scratch,
    formats=KNOWN,
    outputs=("float32", "float16", "bfloat16"),
    adds_bias=True,
    min_cc=(9, 0),
    max_cc=(9, 0),  # others have no wgmma, later ones neither
    chosen_untuned=True,
)
