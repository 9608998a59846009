"""wgmma of int8 on requantized weights, persistent ("fast").

Taught by `steps.step15_wgmma_int8`; here with all formats, dtypes and biases that callers use.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, Final

import numpy as np
from numba import cuda, int32, int64, uint8, uint32

from qformats import Format
from qformats.repack import KNOWN, TILE_GROUP, TILE_K, TILE_ROWS, byte_storage_format, byte_tiles
from steps.contract import Family, Kernel, Launch, Shape, ceil_div, dtype_name, multiprocessors
from steps.instructions import (
    TensorMap,
    barrier_arrive,
    barrier_sync,
    bulk_copy,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    prefetch_tensor_map,
    setmaxnreg_dec,
    setmaxnreg_inc,
    shfl,
    swizzled_descriptor,
    tensor_copy,
    tensor_map_address,
    wgmma_wait,
    zeros_i32,
)
from steps.kernels.parts.activations.layouts import int8_rows
from steps.kernels.parts.epilogue.bias import bias_operand
from steps.kernels.parts.epilogue.wgmma import ACC_HALF_TOKENS, WARPGROUP, finish_wgmma_tile
from steps.kernels.parts.stream_k import scheduler
from steps.kernels.parts.weights.int8 import byte_format
from steps.kernels.prefill import wgmma_tiles
from steps.kernels.prefill.ring import mbarrier_ring
from steps.kernels.prefill.wgmma_products import NEXT_32_K, byte_half_stage

BN: Final = TILE_GROUP * TILE_ROWS  # features of a tile: 128, whose weights are one piece of memory
TILES: Final = tuple((BN, bm) for bm in (*wgmma_tiles.TOKENS, 256))  # 256: two accumulator halves
STAGES: Final = 8  # of the ring, at most
STAGGER: Final = 2  # stages: about as long as the end of a tile, which they hide
STAGGER_BARRIER: Final = 3  # a named barrier: 0 is of all threads, 1 and 2 of the end of a tile
CONSUMERS: Final = 2 * WARPGROUP  # threads that multiply, 64 features a warpgroup
WARPS: Final = CONSUMERS // 32  # of the consumers; the producers' come behind them
REGISTERS: Final = (240, 24)  # of consumers and producers: 2 x 240 + 24 are the 504 of 3 x 168
INSTRUCTIONS: Final = {4: 152, 5: 183, 8: 68}  # of a warp and 128 K, by bits: seen in machine code


@cache
def kernel(
    name: str, output: str, of_bias: str | None, bm: int, slices: int, stages: int, stagger: int
) -> tuple[Any, int]:
    """(kernel for tiles of `bm` tokens; its shared memory in bytes). Arguments as in step 14."""
    form = byte_half_stage(name)
    load, multiply, tile_bytes = form.load, form.multiply, form.tile_bytes
    tile, a_bytes, w_bytes = (BN, bm), TILE_K * bm, TILE_GROUP * tile_bytes
    weights_at = stages * a_bytes  # in shared memory, behind the tokens of all stages
    ring = mbarrier_ring(stages, weights_at + stages * w_bytes)
    make_ring, next_stage, wait_empty = ring.make, ring.next_stage, ring.wait_empty
    expect, full, wait_full, release = ring.expect, ring.full, ring.wait_full, ring.release
    area_at = ceil_div(ring.end, 128) * 128
    finish, shared_bytes = finish_wgmma_tile(tile, area_at, output, slices, True, of_bias, int32)
    n_sums = min(bm, ACC_HALF_TOKENS) // 2  # accumulators of an accumulator half
    find, no_sums = scheduler(BN, bm), zeros_i32(bm // 2)
    first_work, next_work = find.first_work, find.next_work
    tile_origin, contributors = find.tile_origin, find.contributors
    wait_for_all, wait_for_all_but_one = wgmma_wait(0), wgmma_wait(1)
    inc_registers, dec_registers = setmaxnreg_inc(REGISTERS[0]), setmaxnreg_dec(REGISTERS[1])

    @cuda.jit(launch_bounds=(CONSUMERS + WARPGROUP, 1))
    def w4a8_wgmma(
        a_map, w, row_scales, token_scales, bias, c, steps, tiles_c, schedule, partials, arrived
    ):  # fmt: skip
        """c[M, N] = a @ dequantize(w)[N, K]^T; w of byte_tiles, a_map of int8 a[M, K]."""
        memory = cuda.shared.array(0, uint8, alignment=1024)
        a = tensor_map_address(a_map)
        N, t = int32(c.shape[1]), int32(cuda.threadIdx.x)
        warp, lane = shfl(int32(t >> 5), 0), int32(t & 31)  # shuffled: one value for the whole warp
        steps, shared_tiles, rate = int32(steps), int32(schedule[0]), schedule[1]
        tiles_n = int32(uint32(N + BN - 1) // uint32(BN))
        tile_id, k0, count, left = first_work(shared_tiles, rate, steps)
        if t == 0:
            make_ring(memory, WARPS)
        cuda.syncthreads()
        griddepcontrol_launch_dependents()
        stage, parity = int32(0), int32(0)
        if warp >= WARPS:  # producers: one lane of warp WARPS for weights, of the next for tokens
            dec_registers()
            if warp > WARPS + 1 or lane > 0:
                return
            if warp > WARPS:
                prefetch_tensor_map(a)
                griddepcontrol_wait()  # the launch before quantizes the tokens
            while tile_id < tiles_c:
                m0, n0 = tile_origin(tile_id, tiles_n)
                for step in range(k0, k0 + count):
                    wait_empty(memory, stage, parity)
                    if warp == WARPS:
                        expect(memory, stage, a_bytes + w_bytes)  # both producers' copies
                        source = int64(n0 // BN * steps + step) * w_bytes
                        to = weights_at + stage * w_bytes
                        bulk_copy(memory, to, w, source, w_bytes, memory, full(stage))
                    else:
                        to, k = stage * a_bytes, int32(step * TILE_K)
                        tensor_copy(memory, to, a, k, m0, memory, full(stage))
                    stage, parity = next_stage(stage, parity)
                tile_id, k0, count, left = next_work(tile_id, left, shared_tiles, steps)
            return

        inc_registers()
        griddepcontrol_wait()
        others_begin = int32(-1)  # the other warpgroup begins after this step of the first tile
        if stagger:
            if warp < WARPS // 2:
                others_begin = int32(min(stagger, count) - 1)
            else:
                barrier_sync(STAGGER_BARRIER, CONSUMERS)
        previous, destination = int32(0), (row_scales, token_scales, bias, c, partials, arrived)
        while tile_id < tiles_c:
            m0, n0 = tile_origin(tile_id, tiles_n)
            first_block = last_block = slot = int32(0)
            if count < steps:  # these blocks share the tile
                first_block, last_block, slot = contributors(tile_id, shared_tiles, rate, steps)
            acc, step = no_sums(), int32(0)
            while True:
                wait_full(memory, stage, parity)
                at = weights_at + stage * w_bytes + warp * tile_bytes
                b = swizzled_descriptor(memory, stage * a_bytes)
                lower, upper = load(memory, at, lane, 0), load(memory, at, lane, 1)
                # a wait for the registers that PRMTs write: the rest of unpacking comes before it
                acc = wait_for_all_but_one(acc)
                acc = multiply(acc, lower, b)
                acc = wait_for_all_but_one(acc)
                release(memory, previous, lane == 0 and step > 0)
                acc = multiply(acc, upper, b + 2 * NEXT_32_K)
                if stagger and step == others_begin:
                    barrier_arrive(STAGGER_BARRIER, CONSUMERS)
                previous = stage
                stage, parity = next_stage(stage, parity)
                step = int32(step + 1)
                if step == count:
                    break
            others_begin = int32(-1)
            acc = wait_for_all(acc)
            release(memory, previous, lane == 0)
            finish(acc[:n_sums], 0, tile_id, m0, n0, first_block, last_block, slot, destination)
            if bm > ACC_HALF_TOKENS:
                finish(acc[n_sums:], 1, tile_id, m0, n0, first_block, last_block, slot, destination)
            tile_id, k0, count, left = next_work(tile_id, left, shared_tiles, steps)

    return w4a8_wgmma, shared_bytes


def tiling(fmt: Format, shape: Shape) -> wgmma_tiles.TileConfiguration:
    instructions, tile_bytes = INSTRUCTIONS[fmt.bits], byte_format(fmt.name).tile_bytes
    cycles = partial(wgmma_tiles.int8_stage_cycles, tile_bytes, instructions)
    return wgmma_tiles.fewest_cycles(TILES, shape, multiprocessors(), cycles)


def scratch(fmt: Format, family: Family, shape: Shape) -> tuple[tuple[tuple[int, ...], Any], ...]:
    return wgmma_tiles.scratch_arrays(tiling(byte_storage_format(fmt), shape), np.int32)


def launch(
    fmt: Format, family: Family, shape: Shape, weights: tuple, activations: tuple, out: Any,
    scratch: tuple,
) -> Launch:  # fmt: skip
    of_bias, (packed, row_scales, bias) = bias_operand(weights)
    stored_as, (a, token_scales) = byte_storage_format(fmt), activations
    chosen = tiling(stored_as, shape)
    (_, bm), slices = chosen[0], wgmma_tiles.reduction_slices(chosen)
    make = partial(kernel, stored_as.name, dtype_name(out), of_bias, bm, slices)
    operands = TensorMap(a, (bm, TILE_K)), packed, row_scales, token_scales, bias, out
    return wgmma_tiles.launch_that_fits(make, STAGES, STAGGER, chosen, shape.k, operands, scratch)


KERNEL = Kernel(
    number=15,
    name="wgmma_int8",
    title="W4A8 with wgmma: one scale a row, one a token, one integer sum",
    families=("A8",),
    unit={"A8": "tensor_int8"},
    pack=byte_tiles,
    activations={"A8": int8_rows},
    launch=launch,
    scratch=scratch,
    formats=KNOWN,
    outputs=("float32", "float16", "bfloat16"),
    adds_bias=True,
    accuracy="fast",
    most_k=wgmma_tiles.INT8_MOST_K,
    min_cc=(9, 0),
    max_cc=(9, 0),  # later ones have no wgmma
    chosen_untuned=True,
)
