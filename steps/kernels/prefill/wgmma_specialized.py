"""wgmma, a tile a thread block: a producer warp and two consumer warpgroups.

Taught by `steps.step13_warp_specialized`; here with all formats, dtypes and biases that callers
use.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, Final

from numba import cuda, int32, int64, uint8

from qformats import Format
from qformats.repack import KNOWN, TILE_GROUP, TILE_K, TILE_ROWS, tiles
from qformats.storage import StorageFormat, storage_format
from steps.contract import (
    Family,
    Kernel,
    Launch,
    Shape,
    ceil_div,
    dtype_name,
    multiprocessors,
    shared_memory,
)
from steps.instructions import (
    BOX_K,
    TensorMap,
    bulk_copy,
    prefetch_tensor_map,
    setmaxnreg_dec,
    setmaxnreg_inc,
    shfl,
    swizzled_descriptor,
    tensor_copy,
    tensor_map_address,
    wgmma_wait,
    zeros_f32,
)
from steps.kernels.parts.activations.layouts import all_float16_rows
from steps.kernels.parts.epilogue.bias import bias_operand
from steps.kernels.parts.epilogue.half_tile import (
    WARPGROUP,
    half_tile_bytes,
    store_float_tile,
    store_half_tile,
)
from steps.kernels.prefill.ring import mbarrier_ring
from steps.kernels.prefill.wgmma_products import half_stage
from steps.kernels.prefill.wgmma_tiles import float16_stage_cycles

BN: Final = TILE_GROUP * TILE_ROWS  # features of a tile: 128, whose weights are one piece of memory
TOKENS: Final = (16, 32, 64, 128)  # of a tile: more sums than 64 a thread leave too few registers
STAGES: Final = 8  # of the ring at most: with small tiles more would not arrive sooner
CONSUMERS: Final = 2  # warpgroups that multiply, 64 features each
WARPS: Final = CONSUMERS * WARPGROUP // 32  # of the consumers; the producer's come behind them
REGISTERS: Final = (232, 40)  # of consumers and producer: 2 x 232 + 40 are the 504 of 3 x 168
TILE_ENDS: Final = 5000  # cycles before the first product and after the last one: an estimate

assert BN == CONSUMERS * 64, "a wgmma has 64 features"


@cache
def kernel(
    fmt: StorageFormat, output: str, scaled: bool, of_bias: str | None, bm: int, stages: int
) -> tuple[Any, int]:
    """(kernel for C of dtype `output`, a bias of dtype `of_bias` or none, tiles of `bm` tokens and
    a ring of `stages`; its shared memory in bytes). scaled: tokens have scales."""
    form = half_stage(fmt.name, in_pairs=True)
    load, multiply, tile_bytes = form.load, form.multiply, form.tile_bytes
    # Shared memory: the tokens of all stages, as boxes begin at multiples of 1024 bytes; then the
    # weights of all stages, the mbarriers, and the area through which the end of the tile passes.
    box_bytes, w_bytes = 2 * BOX_K * bm, TILE_GROUP * tile_bytes
    a_bytes = 2 * box_bytes
    weights_at = stages * a_bytes
    ring = mbarrier_ring(stages, weights_at + stages * w_bytes)
    make_ring, next_stage = ring.make, ring.next_stage
    wait_empty, expect, full = ring.wait_empty, ring.expect, ring.full
    wait_full, release = ring.wait_full, ring.release
    area_at = ceil_div(ring.end, 128) * 128
    if output == "float32":
        store, area_bytes = store_float_tile(bm, scaled, of_bias), 0
    else:
        store = store_half_tile(bm, area_at, scaled, of_bias, output)
        area_bytes = CONSUMERS * half_tile_bytes(bm)
    inc_registers, dec_registers = setmaxnreg_inc(REGISTERS[0]), setmaxnreg_dec(REGISTERS[1])
    no_sums = zeros_f32(bm // 2)
    wait_for_all, wait_for_all_but_one = wgmma_wait(0), wgmma_wait(1)

    @cuda.jit(device=True, forceinline=True)
    def produce(memory, w, a, m0, group, steps):
        """One thread: the tokens from m0 on and the weights of a group of 128 rows, all of K."""
        prefetch_tensor_map(a)
        stage, parity = int32(0), int32(0)
        for step in range(steps):
            wait_empty(memory, stage, parity)
            expect(memory, stage, a_bytes + w_bytes)
            k, to, bar = int32(step * TILE_K), stage * a_bytes, full(stage)
            tensor_copy(memory, to, a, k, m0, memory, bar)
            tensor_copy(memory, to + box_bytes, a, int32(k + BOX_K), m0, memory, bar)
            source = int64(group * steps + step) * w_bytes
            bulk_copy(memory, weights_at + stage * w_bytes, w, source, w_bytes, memory, bar)
            stage, parity = next_stage(stage, parity)

    @cuda.jit(device=True, forceinline=True)
    def consume(memory, warp, lane, steps):
        """A warpgroup: the sums of its 64 features and all tokens. While one half of a stage is
        multiplied, the weights of the other half become float16."""
        acc = no_sums()
        stage, parity, previous, step = int32(0), int32(0), int32(0), int32(0)
        while True:  # at least once: with a `for`, ptxas makes every wgmma wait for itself
            wait_full(memory, stage, parity)
            at = weights_at + stage * w_bytes + warp * tile_bytes
            b = swizzled_descriptor(memory, stage * a_bytes)
            lower, upper = load(memory, at, lane, 0), load(memory, at, lane, 1)
            acc = wait_for_all_but_one(acc)  # done: the last step's lower half, its registers free
            acc = multiply(acc, lower, b)
            acc = wait_for_all_but_one(acc)  # done: the last step's upper half, its stage read
            release(memory, previous, lane == 0 and step > 0)
            acc = multiply(acc, upper, b + box_bytes // 16)
            previous = stage
            stage, parity = next_stage(stage, parity)
            step = int32(step + 1)
            if step == steps:
                return wait_for_all(acc)

    @cuda.jit(launch_bounds=((CONSUMERS + 1) * WARPGROUP, 1))
    def w4a16_specialized(a_map, w, row_scales, token_scales, bias, c, steps):
        """c[M, N] = a @ dequantize(w)[N, K]^T; w of qformats.repack.tiles, a_map of float16
        a[M, K], steps of 128 K."""
        memory = cuda.shared.array(0, uint8, alignment=1024)
        a = tensor_map_address(a_map)
        t = int32(cuda.threadIdx.x)
        warp, lane = shfl(int32(t >> 5), 0), int32(t & 31)  # shuffled: one value for the whole warp
        group, m0 = int32(cuda.blockIdx.x), int32(cuda.blockIdx.y * bm)
        if t == 0:
            make_ring(memory, WARPS)  # every warp of a consumer releases for itself
        cuda.syncthreads()  # the only barrier of all threads
        if warp >= WARPS:
            dec_registers()
            if warp == WARPS and lane == 0:
                produce(memory, w, a, m0, group, int32(steps))
        else:
            inc_registers()
            acc = consume(memory, warp, lane, int32(steps))
            n0 = int32(group * BN + warp // 4 * 64)
            store(acc, c, m0, n0, row_scales, token_scales, bias)

    return w4a16_specialized, area_at + area_bytes


def tile_tokens(fmt: StorageFormat, shape: Shape) -> int:
    """The tokens of a tile with which all tiles should take the fewest cycles, an SM one tile after
    the other."""

    def cycles(bm: int) -> int:
        rounds = ceil_div(ceil_div(shape.n, BN) * ceil_div(shape.m, bm), multiprocessors())
        stage_cycles = float16_stage_cycles(fmt.bits, BN, bm)
        return rounds * (ceil_div(shape.k, TILE_K) * stage_cycles + TILE_ENDS)

    return min(TOKENS, key=cycles)


def launch(
    fmt: Format, family: Family, shape: Shape, weights: tuple, activations: tuple, out: Any
) -> Launch:
    of_bias, (packed, row_scales, bias) = bias_operand(weights)
    stored_as, (a, *scales) = storage_format(fmt), activations
    scaled, bm, stages = bool(scales), tile_tokens(stored_as, shape), STAGES
    make = partial(kernel, stored_as, dtype_name(out), scaled, of_bias, bm)
    while make(stages)[1] > shared_memory():  # as many as fit
        stages -= 1
    run, shared_bytes = make(stages)
    token_scales = scales[0] if scaled else row_scales  # where there are none, something unread
    steps = ceil_div(shape.k, TILE_K)
    args = (TensorMap(a, (bm, BOX_K)), packed, row_scales, token_scales, bias, out, steps)
    grid = ceil_div(shape.n, BN), ceil_div(shape.m, bm)
    return Launch(run, grid, ((CONSUMERS + 1) * WARPGROUP,), args, shared_bytes)


KERNEL = Kernel(
    number=13,
    name="wgmma_specialized",
    title="W4A16 warp-specialized: producer, consumers, an mbarrier ring",
    families=("A16",),
    unit={"A16": "tensor_fp16"},
    pack=tiles,
    activations={"A16": all_float16_rows},
    launch=launch,
    formats=KNOWN,
    outputs=("float32", "float16", "bfloat16"),
    adds_bias=True,
    min_cc=(9, 0),
    max_cc=(9, 0),  # others have no wgmma, later ones neither
)
