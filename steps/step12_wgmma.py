"""Step 12: warpgroup MMA - weights come from registers, activations straight from shared memory.

What is new
    `wgmma`: the four warps of a *warpgroup* together multiply 64 features x 16 K in their registers
    by 16 K x all `bm` tokens of the tile in shared memory. A *matrix descriptor* says where the
    tokens lie: address, distance of eight rows, 128-byte swizzle. So no warp loads fragments of
    tokens any more (no ldmatrix). Lane 4g + t of warp w, tokens in groups j of eight:

                              weights: 64 features x 16 K         sums: 64 features x bm tokens
                              k = 2t, 2t + 1    2t + 8, 2t + 9    token 8j + 2t    8j + 2t + 1
        feature 16w + g             a0                a2             d[4j]          d[4j + 1]
        feature 16w + g + 8         a1                a3             d[4j + 2]      d[4j + 3]

    These are the fragments of mma.m16n8k16, those of warp w below those of warp w - 1. So weights
    are unpacked as in step 11: warp w of warpgroup i has packed tile 4i + w of the stage's eight.

    wgmma returns at once. While one half of a stage is multiplied, all threads issue the copies of
    a later stage and unpack the other half:

        tensor cores              [half 0: 512 cycles][half 1: 512 cycles]               [half 0 ..
        warpgroup 0   [unpack 0]wgmma[copies][unpack 1]wgmma     wait    |barrier[unpack 0]wgmma ..
        warpgroup 1   [unpack 0]wgmma[copies][unpack 1]wgmma     wait    |barrier[unpack 0]wgmma ..
Why it should help
    mma.sync reaches two thirds of what Hopper's tensor cores can do. 128 x 128 outputs and 128 K
    are 1024 cycles of wgmma, in which each of the two warps of a scheduler issues 226 instructions
    (5 bits: 262), 50 of them for copies. Between stages the tensor cores wait for the barrier and
    the first unpacked weights, some 480 cycles: 1500 a stage. Two tiles of 64 tokens an SM hide
    each other's waits. Their limit is the L2 with 40 bytes a cycle: 1280 cycles for a stage of
    both. (512,4096,4096) are 32 of these, and 5000 cycles for the ends of a tile: 46000 cycles, 26
    us at 1.76 GHz. Such a count knows no latencies. Step 11 takes 1.5 times its own, so expect 36
    us, 1.3x.
What it costs
    wgmma exists on compute capability 9.0 only. No split-K: tiles of few tokens leave SMs idle.
Machine code
    HGMMA with A in registers, HFMA2, LOP3, LDGSTS; no HMMA, no LDSM; STSM where C is float16.
Prerequisites
    Step 11 (float16 weights, kernels.prefill.row_tiles); steps/instructions/warpgroup.py (wgmma).
    Taught here: kernels.parts.epilogue.half_tile (from a warpgroup's sums to C in 16 or 32 bits).
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from numba import cuda, int32, uint8

from qformats import BLOCK, Format
from qformats.repack import KNOWN, TILE_GROUP, TILE_K, TILE_ROWS, tiles
from qformats.storage import StorageFormat, storage_format
from steps.contract import (
    Family,
    Launch,
    Shape,
    Step,
    ceil_div,
    dtype_name,
    multiprocessors,
    shared_memory,
)
from steps.instructions import (
    cp_async_commit,
    cp_async_wait,
    fence_proxy_async,
    shfl,
    swizzled_descriptor,
    wgmma_bf16,
    wgmma_commit,
    wgmma_f16,
    wgmma_fence,
    wgmma_wait,
    zeros_f32,
)
from steps.kernels.parts.activations.layouts import float16_rows
from steps.kernels.parts.epilogue.bias import bias_operand
from steps.kernels.parts.epilogue.half_tile import WARPGROUP, store_float_tile, store_half_tile
from steps.kernels.parts.weights.bfloats import float_format
from steps.kernels.prefill.row_tiles import ROW, box_bytes, copy_packed_tiles, copy_row_tile

BN: Final = TILE_GROUP * TILE_ROWS  # features of a tile of C: 128, a group of packed tiles
WGMMA_ROWS: Final = 64  # of them, the rows of a wgmma: those of a warpgroup
THREADS: Final = BN // WGMMA_ROWS * WARPGROUP  # two warpgroups
# tokens of a tile: blocks an SM. A stage of 128 tokens leaves shared memory for one ring only.
TILES: Final = {128: 1, 64: 2, 32: 2, 16: 2}
STAGES: Final = 4  # of the ring, at most
WGMMA: Final = {"float16": wgmma_f16, "bfloat16": wgmma_bf16}  # by the kind of A
NEXT_16_K: Final = 2  # in a swizzled descriptor, which counts 16 bytes: 16 K of a row
ALIGNMENT: Final = 8 * ROW  # bytes, of a box: the swizzle repeats after eight rows


def bytes_of_stage(fmt: StorageFormat, bm: int) -> int:
    """Two boxes of tokens, then a group of packed tiles; and what aligns the next stage."""
    size = 2 * box_bytes(bm) + BN * TILE_K // BLOCK * fmt.block_bytes
    return ceil_div(size, ALIGNMENT) * ALIGNMENT


@cache
def kernel(
    fmt: StorageFormat, kind: str, output: str, scaled: bool, of_bias: str | None, bm: int,
    stages: int,
) -> Any:  # fmt: skip
    """The kernel for A of dtype `kind`, C of dtype `output`, a bias of dtype `of_bias` or none,
    tiles of `bm` tokens, and a ring of `stages`. scaled: tokens have scales."""
    form, wgmma = float_format(fmt.name, kind), WGMMA[kind]
    tile_bytes, words, scales = form.tile_bytes, form.words, form.scales
    multipliers, fragments = form.multipliers, form.fragments
    box, stage_bytes = box_bytes(bm), bytes_of_stage(fmt, bm)
    last_stage = (stages - 1) * stage_bytes
    copy_tokens = copy_row_tile(bm, THREADS)
    copy_weights = copy_packed_tiles(TILE_GROUP * tile_bytes, THREADS)
    no_sums = zeros_f32(bm // 2)
    wait_for_copies, wait_for_products = cp_async_wait(stages - 2), wgmma_wait(0)
    if output == "float32":
        store = store_float_tile(bm, scaled, of_bias)
    else:
        store = store_half_tile(bm, 0, scaled, of_bias, output)

    @cuda.jit(device=True, forceinline=True)
    def multiply(acc, ring, weights_at, lane, half, b):
        """acc += 64 K: weights become float16 and meet all tokens of the box at descriptor b."""
        # --- shared -> registers -> float16: steps 0 and 1 are of block 0, 2 and 3 of block 1
        w, s = words(ring, weights_at, lane, half), scales(ring, weights_at, lane, half)
        block0, block1 = multipliers(s, 0), multipliers(s, 1)
        w0, w1 = fragments(w, 0, block0), fragments(w, 1, block0)
        w2, w3 = fragments(w, 2, block1), fragments(w, 3, block1)

        # --- multiply: a fence, four wgmma of 16 K, and a commit, which makes them one group
        wgmma_fence()  # registers written so far may be read
        acc = wgmma(acc, w0[0], w0[1], w0[2], w0[3], b, 1)
        acc = wgmma(acc, w1[0], w1[1], w1[2], w1[3], b + NEXT_16_K, 1)
        acc = wgmma(acc, w2[0], w2[1], w2[2], w2[3], b + 2 * NEXT_16_K, 1)
        acc = wgmma(acc, w3[0], w3[1], w3[2], w3[3], b + 3 * NEXT_16_K, 1)
        wgmma_commit()
        return acc

    @cuda.jit(launch_bounds=(THREADS, TILES[bm]))
    def w4a16_wgmma(w, row_scales, a, token_scales, bias, c, steps):
        """c[M, N] = a[M, K] @ dequantize(w)[N, K]^T; w of qformats.repack.tiles."""
        ring = cuda.shared.array(0, uint8, alignment=ALIGNMENT)
        t = int32(cuda.threadIdx.x)
        warp, lane = shfl(int32(t >> 5), 0), int32(t & 31)  # shuffled: one value for the whole warp
        n0, m0 = int32(cuda.blockIdx.x * BN), int32(cuda.blockIdx.y * bm)
        steps, group = int32(steps), int32(cuda.blockIdx.x * steps)
        weights_at = 2 * box + warp * tile_bytes  # of this warp's packed tile, in a stage

        # --- issue the copies of all stages but one. A group is closed for each, even for those
        # beyond K: the waits count groups
        for step in range(stages - 1):
            if step < steps:
                copy_tokens(ring, step * stage_bytes, a, m0, step * TILE_K, t)
                copy_weights(ring, step * stage_bytes + 2 * box, w, group + step, t)
            cp_async_commit()
        # bytes of the stage that is multiplied, and of the one that the next copies may fill
        base, free = int32(0), int32(last_stage)
        acc = no_sums()
        for step in range(steps):
            # --- wait until the stage at `base` has arrived, for all threads and for wgmma
            wait_for_copies()  # of this thread
            fence_proxy_async()  # wgmma reads shared memory by another path: it may read them now
            cuda.syncthreads()  # so may those of all threads; and all have multiplied stage `free`

            # --- multiply the first half of the stage
            b = swizzled_descriptor(ring, base)
            acc = multiply(acc, ring, base + weights_at, lane, 0, b)

            # --- fill the free stage with a later one, while the tensor cores multiply
            ahead = int32(step + (stages - 1))
            if ahead < steps:
                copy_tokens(ring, free, a, m0, ahead * TILE_K, t)
                copy_weights(ring, free + 2 * box, w, group + ahead, t)
            cp_async_commit()

            # --- multiply the second half, wait for the tensor cores, and go on in the ring
            acc = multiply(acc, ring, base + weights_at, lane, 1, b + box // 16)
            acc = wait_for_products(acc)
            free, base = base, int32(base + stage_bytes if base < last_stage else 0)

        # --- registers -> shared -> global
        cuda.syncthreads()  # nobody reads the ring any more: what follows may use its memory
        store(acc, c, m0, n0 + warp // 4 * WGMMA_ROWS, row_scales, token_scales, bias)

    return w4a16_wgmma


def tiling(fmt: StorageFormat, shape: Shape) -> tuple[int, int]:
    """(tokens of a tile, stages of the ring) that should take the fewest cycles."""
    steps, least, best = ceil_div(shape.k, TILE_K), float("inf"), (0, 0)
    for bm, resident in TILES.items():
        # an SM keeps 1 KB of every block
        stages = ((shared_memory() + 1024) // resident - 1024) // bytes_of_stage(fmt, bm)
        tiles_of_sm = ceil_div(ceil_div(shape.n, BN) * ceil_div(shape.m, bm), multiprocessors())
        blocks = min(resident, tiles_of_sm)
        # the longest of four: the tensor cores; two warps a scheduler and block, 220 instructions
        # each; 40 bytes a cycle from the L2; a block alone, which waits between stages
        copied = (BN * fmt.bits // 8 + 2 * bm) * TILE_K
        stage_cycles = max(blocks * max(8 * bm, 2 * 220, copied // 40), 8 * bm + 480)
        cycles = ceil_div(tiles_of_sm, blocks) * (steps * stage_cycles + 5000)
        if cycles < least:
            least, best = cycles, (bm, min(STAGES, stages))
    return best


def launch(
    fmt: Format, family: Family, shape: Shape, weights: tuple, activations: tuple, out: Any
) -> Launch:
    of_bias, (packed, row_scales, bias) = bias_operand(weights)
    stored_as, (a, *scales) = storage_format(fmt), activations
    scaled = bool(scales)  # A came as float32, and was rounded to float16 in a pass of its own
    bm, stages = tiling(stored_as, shape)
    run = kernel(stored_as, dtype_name(a), dtype_name(out), scaled, of_bias, bm, stages)
    # Consecutive blocks share the tokens of a tile. The weights, which all rows of tiles read, are
    # small enough to stay in the L2.
    grid = (ceil_div(shape.n, BN), ceil_div(shape.m, bm))
    token_scales = scales[0] if scaled else row_scales  # where there are none, something unread
    args = (packed, row_scales, a, token_scales, bias, out, ceil_div(shape.k, TILE_K))
    return Launch(run, grid, (THREADS,), args, stages * bytes_of_stage(stored_as, bm))


STEP = Step(
    number=12,
    name="step12_wgmma",
    title="W4A16 with wgmma: weights in registers, tokens in shared memory",
    branch="float16",
    families=("A16",),
    parents={"A16": 11},
    unit={"A16": "tensor_fp16"},
    pack=tiles,
    activations={"A16": float16_rows},
    launch=launch,
    formats=KNOWN,
    outputs=("float32", "float16", "bfloat16"),
    adds_bias=True,
    min_cc=(9, 0),
    max_cc=(9, 0),  # others have no wgmma, later ones neither
    contains={"A16": ("HGMMA", "HFMA2", "LDGSTS.E.BYPASS.128")},
    forbids={"A16": ("IMMA", "HMMA", "LDSM", "UBLKCP", "SYNCS")},
)
