"""Float16 tensor cores by mma.sync, split-K where tiles are few.

Taught by `steps.step11_mma_fp16`; here with all formats, dtypes and biases that callers use.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from numba import cuda, float32, int32, uint8, uint32

from qformats import Format
from qformats.repack import KNOWN, TILE_GROUP, TILE_K, TILE_ROWS, tiles
from qformats.storage import StorageFormat, storage_format
from steps.contract import Family, Kernel, Launch, Shape, ceil_div, dtype_name
from steps.instructions import (
    cp_async_commit,
    cp_async_wait,
    ldmatrix_x4,
    mma_m16n8k16_f16,
)
from steps.kernels.parts.activations.layouts import all_float16_rows
from steps.kernels.parts.epilogue.bias import bias_operand
from steps.kernels.parts.epilogue.mma import finish_mma_tile, stage_sums
from steps.kernels.parts.weights.storage_formats import half_format
from steps.kernels.prefill.mma_tiles import BN, TILES, scratch_arrays, tiling
from steps.kernels.prefill.row_tiles import ROW, box_bytes, copy_packed_tiles, copy_row_tile

WARP: Final = 64  # features and, at most, tokens of a warp: 128 accumulators a thread
WARPS_N: Final = BN // WARP  # warps side by side along the features
ROW_TILES: Final = WARP // TILE_ROWS  # packed tiles that a warp multiplies


# Which warp multiplies what of a stage:
#
#     tiles of 128 tokens                             tiles of 64 tokens, or fewer
#                        tokens 0..63   64..127                         K 0..63   K 64..127
#     features  0..63       warp 0       warp 2       features  0..63    warp 0     warp 2
#     features 64..127      warp 1       warp 3       features 64..127   warp 1     warp 3
@cache
def kernel(
    fmt: StorageFormat, output: str, scaled: bool, of_bias: str | None, bm: int, stages: int
) -> tuple[Any, int]:
    """(kernel for C of dtype `output`, a bias of dtype `of_bias` or none, tiles of `bm` tokens, and
    a ring of `stages`; threads of a block). scaled: tokens have scales."""
    form, mma = half_format(fmt.name), mma_m16n8k16_f16
    tile_bytes, words, scales = form.tile_bytes, form.words, form.scales
    multipliers, fragments = form.multipliers, form.fragments
    n_words, n_scales = form.n_words, form.n_scales
    blocks_per_sm, warps_k = TILES[bm]
    tokens, warps_m = min(bm, WARP), ceil_div(bm, WARP)  # of a warp; warps side by side
    halves, columns = 2 // warps_k, tokens // 8  # of a warp: halves of a stage; mma side by side
    threads = 32 * WARPS_N * warps_m * warps_k
    n_acc, n_b = 4 * ROW_TILES * columns, 2 * columns
    box, weight_bytes = box_bytes(bm), TILE_GROUP * tile_bytes
    stage_bytes, last_stage = 2 * box + weight_bytes, (stages - 1) * (2 * box + weight_bytes)
    copy_tokens, copy_weights = copy_row_tile(bm, threads), copy_packed_tiles(weight_bytes, threads)
    stage_warp = stage_sums(ROW_TILES, columns, BN)
    finish = finish_mma_tile(BN, bm, warps_k, threads, output, scaled, of_bias)
    wait_for_first, wait_for_next = cp_async_wait(stages - 1), cp_async_wait(stages - 2)

    @cuda.jit(device=True, forceinline=True)
    def load_tokens(b, ring, at, step):
        """B fragments of 16 K, `step` 0 to 3 of 64 K: two chunks of each token. Chunk 2 step + i of
        row r lies at (2 step) ^ i ^ (r & 7); `at` is where this lane's chunk of step 0 lies."""
        for j in range(0, n_b, 4):
            # --- 16 tokens: four words of each lane, b0 and b1 of either eight
            x = ldmatrix_x4(ring, (at ^ (32 * step)) + 4 * j * ROW)
            b[j], b[j + 1], b[j + 2], b[j + 3] = x

    @cuda.jit(device=True, forceinline=True)
    def load_weights(w, s, ring, at, lane, half):
        """w, s = codes and scales of 64 K, half 0 or 1 of the warp's packed tiles at byte `at`."""
        for i in range(ROW_TILES):
            x = words(ring, at + i * tile_bytes, lane, half)
            y = scales(ring, at + i * tile_bytes, lane, half)
            for j in range(n_words):
                w[i, j] = x[j]
            for j in range(n_scales):
                s[i, j] = y[j]

    @cuda.jit(device=True, forceinline=True)
    def multiply(acc, w, s, b, step):
        """acc += 16 K: the weights of a packed tile become float16 and meet all tokens."""
        for i in range(ROW_TILES):
            # --- make the weights of 16 K float16, then multiply them with the tokens of each
            # column of mma: four sums for each packed tile and column
            a0, a1, a2, a3 = fragments(w[i], step, multipliers(s[i], step >> 1))
            for j in range(columns):
                r, b0, b1 = 4 * (i * columns + j), b[2 * j], b[2 * j + 1]
                x0, x1, x2, x3 = acc[r], acc[r + 1], acc[r + 2], acc[r + 3]
                x = mma(a0, a1, a2, a3, b0, b1, x0, x1, x2, x3)
                acc[r], acc[r + 1], acc[r + 2], acc[r + 3] = x

    @cuda.jit(launch_bounds=(threads, blocks_per_sm))
    def w4a16_mma(w, row_scales, a, token_scales, bias, c, steps, partials, arrived):
        """c[M, N] = a[M, K] @ dequantize(w)[N, K]^T; w of qformats.repack.tiles."""
        ring = cuda.shared.array(0, uint8, alignment=1024)
        sums = cuda.shared.array(0, float32, alignment=1024)  # the same memory, when K is done
        acc = cuda.local.array(n_acc, float32)
        codes = cuda.local.array((ROW_TILES, n_words), uint32)
        s = cuda.local.array((ROW_TILES, n_scales), uint32)
        b_even, b_odd = cuda.local.array(n_b, uint32), cuda.local.array(n_b, uint32)
        t = int32(cuda.threadIdx.x)
        warp, lane = t >> 5, t & 31
        n0, m0 = int32(cuda.blockIdx.x * BN), int32(cuda.blockIdx.y * bm)
        # this block's share of K, in stages, and the first of its groups of packed tiles
        split, splits = uint32(cuda.blockIdx.z), uint32(cuda.gridDim.z)
        k0 = int32(uint32(steps * split) // splits)
        count = int32(int32(uint32(steps * (split + 1)) // splits) - k0)
        group = int32(cuda.blockIdx.x * steps + k0)
        # what this warp multiplies: 64 features, tokens from `first_token` on, and of a stage both
        # halves of K, or this one
        warp_n, first_token = warp % WARPS_N, warp // WARPS_N % warps_m * tokens
        warp_k = int32(warp // (WARPS_N * warps_m))
        half, weights_at = warp_k, 2 * box + warp_n * (ROW_TILES * tile_bytes)
        # lane 8i + r addresses row r of ldmatrix's matrix i: chunk i & 1, tokens from 8 (i >> 1) on
        row = lane & 7
        b_at = (first_token + (lane >> 4) * 8 + row) * ROW + (lane >> 3 & 1 ^ row) * 16
        for i in range(n_acc):
            acc[i] = 0

        # --- issue the copies of the first stages. A group is closed for each, even for those
        # beyond K: the waits count groups
        for step in range(stages):
            if step < count:
                copy_tokens(ring, step * stage_bytes, a, m0, (k0 + step) * TILE_K, t)
                copy_weights(ring, step * stage_bytes + 2 * box, w, group + step, t)
            cp_async_commit()

        # --- wait for stage 0, and load its weights and first tokens
        wait_for_first()
        cuda.syncthreads()
        base, ahead = int32(0), int32(stages)  # byte of the stage in use; step to be copied next
        load_weights(codes, s, ring, weights_at, lane, half)
        load_tokens(b_even, ring, b_at + half * box, 0)
        for _ in range(int32(count * halves)):  # 64 K each
            # --- multiply 48 K; the tokens of the next 16 are on their way meanwhile
            at = base + b_at + half * box
            load_tokens(b_odd, ring, at, 1)
            multiply(acc, codes, s, b_even, 0)
            load_tokens(b_even, ring, at, 2)
            multiply(acc, codes, s, b_odd, 1)
            load_tokens(b_odd, ring, at, 3)
            multiply(acc, codes, s, b_even, 2)
            half = int32(half ^ (halves - 1))
            if halves == 1 or half == 0:
                # --- go on to the next stage of the ring when it has arrived for all threads, and
                # all have read this one, which is refilled: with stage `ahead`, which is counted on
                wait_for_next()
                cuda.syncthreads()
                if ahead < count:
                    copy_tokens(ring, base, a, m0, (k0 + ahead) * TILE_K, t)
                    copy_weights(ring, base + 2 * box, w, group + ahead, t)
                cp_async_commit()
                ahead = int32(ahead + 1)
                base = int32(base + stage_bytes if base < last_stage else 0)
            load_tokens(b_even, ring, base + b_at + half * box, 0)
            multiply(acc, codes, s, b_odd, 3)
            load_weights(codes, s, ring, base + weights_at, lane, half)

        # --- registers -> shared -> global: the sums of all warps, then of all blocks of the tile
        cuda.syncthreads()  # nobody reads the ring any more
        stage_warp(sums, acc, warp_k * bm + first_token, warp_n * WARP, lane)
        cuda.syncthreads()
        tile = int32(cuda.blockIdx.y * cuda.gridDim.x + cuda.blockIdx.x)
        scales_and_bias = row_scales, token_scales, bias
        finish(sums, c, m0, n0, *scales_and_bias, split, splits, tile, partials, arrived)

    return w4a16_mma, threads


def scratch(fmt: Format, family: Family, shape: Shape) -> tuple[tuple[tuple[int, ...], Any], ...]:
    return scratch_arrays(storage_format(fmt), shape)


def launch(
    fmt: Format, family: Family, shape: Shape, weights: tuple, activations: tuple, out: Any,
    scratch: tuple,
) -> Launch:  # fmt: skip
    of_bias, (packed, row_scales, bias) = bias_operand(weights)
    stored_as, (a, *scales) = storage_format(fmt), activations
    scaled = bool(scales)  # A came as float32 or bfloat16: a pass of its own made it float16
    bm, splits, ring = tiling(stored_as, shape)
    run, threads = kernel(stored_as, dtype_name(out), scaled, of_bias, bm, ring.stages)
    grid = (ceil_div(shape.n, BN), ceil_div(shape.m, bm), splits)
    token_scales = scales[0] if scaled else row_scales  # where there are none, something unread
    operands, steps = (packed, row_scales, a, token_scales, bias, out), ceil_div(shape.k, TILE_K)
    return Launch(run, grid, (threads,), (*operands, steps, *scratch), ring.shared_bytes)


KERNEL = Kernel(
    number=11,
    name="mma_float16",
    title="W4A16 on tensor cores: float16 weights made in registers",
    families=("A16",),
    unit={"A16": "tensor_fp16"},
    pack=tiles,
    activations={"A16": all_float16_rows},
    launch=launch,
    scratch=scratch,
    formats=KNOWN,
    outputs=("float32", "float16", "bfloat16"),
    adds_bias=True,
    min_cc=(8, 0),
    chosen_untuned=True,
)
