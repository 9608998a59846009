"""Step 11: W4A16 on tensor cores - the scale goes into the weights, and the sums are never touched.

What is new
    A weight is made float16 in registers, times its scale and with its offset, and the tensor core
    adds up all of K in float32 by itself. The code needs no conversion: taken as the bits of a
    float16 it is code * 2^-24, so a mask and one multiply-add make two weights of a word. A is
    rounded to float16 once, each token in a power of two of its own; powers of two of features and
    tokens are multiplied back at the end. A warp has 64 x 64 outputs, so that a fragment serves
    four or eight mma; where tiles are small, half of the warps take one half of a stage's K.
Why it should help
    Steps 7 to 9 pay three instructions for each sum every 32 of K. Here 32 HMMA of a warp (16 of K)
    take the tensor core 214 cycles and come with 70 other instructions (5 bits: 90), for which two
    warps of a scheduler have four times the room. This instruction alone was measured at 568 TFLOPS
    on an H200; less 3 % of idle SMs, 8 % for a tile's beginning and end, 7 % for barriers: 470. And
    nothing is lost but the rounding of A and W: NMSE 3e-8, a thousandth of what Q8_1 costs.
What it costs
    250 registers, eight warps an SM. A takes twice the bytes of Q8_1; C passes through shared
    memory, to be added up and written in full lines. Blocks whose scale is far below the largest of
    their row lose precision (qformats.repack.tiles says how much).
Machine code
    HMMA.16816.F32, HFMA2, LOP3 and LDSM in the loop, and no I2FP, no FFMA.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32

from qformats import BLOCK, Format
from qformats.repack import KNOWN, TILE_GROUP, TILE_K, TILE_ROWS, TOKEN_GROUP, tiles
from qformats.storage import StorageFormat, storage_format
from steps.components.activations.layouts import float16_chunks
from steps.components.epilogue.mma import finish_mma_tile
from steps.components.epilogue.write import PAD
from steps.components.unpack.storage_formats import half_format
from steps.contract import Family, Launch, Shape, Step, ceil_div, multiprocessors, shared_memory
from steps.instructions import (
    cp_async_16,
    cp_async_commit,
    cp_async_wait,
    ldmatrix_x4,
    mma_m16n8k16_f16,
    store_f32,
)

BN: Final = TILE_GROUP * TILE_ROWS  # features of a tile of C: 128, of a band
TILES: Final = {  # its tokens: blocks an SM; groups of warps, for as many parts of a stage's K
    128: (2, 1),
    64: (2, 2),
    32: (3, 2),
    16: (4, 2),
}
WARP: Final = 64  # features and, at most, tokens of a warp: 128 accumulators a thread
STAGES: Final = 4  # of the ring, at most
PARTS: Final = 16  # of K at most: more would take longer to add up
GROUP: Final = TOKEN_GROUP * TILE_K  # float16 of a stage that eight tokens have
ROW_TILES: Final = WARP // TILE_ROWS  # records that a warp multiplies


#     128 tokens    K 0..127 of a stage      64 tokens    K 0..63 of a stage    K 64..127
#     features   0..63   warp 0   warp 2     features   0..63   warp 0           warp 2
#     features  64..127  warp 1   warp 3     features  64..127  warp 1           warp 3
#                tokens   0..63  64..127                tokens   0..63            0..63
@cache
def kernel(fmt: StorageFormat, bm: int, stages: int, in_half: bool) -> Any:
    """(kernel for tiles of `bm` tokens and a ring of `stages`, threads of a block)"""
    form = half_format(fmt.name)
    record, words, scales = form.tile_bytes, form.words, form.scales
    multipliers, fragments = form.multipliers, form.fragments
    n_words, n_scales = form.n_words, form.n_scales
    tokens = min(bm, WARP)  # of a warp
    side, deep = BN // WARP, bm // tokens  # warps along the features and along the tokens
    blocks, groups = TILES[bm]
    warps = side * deep * groups
    threads, turns = 32 * warps, 2 // groups  # halves of a stage that a warp multiplies
    # bytes: of weights; that threads copy at a time
    band, together = TILE_GROUP * record, 16 * threads
    stage_bytes = band + 2 * TILE_K * bm
    columns, pairs = tokens // 8, tokens // 16  # B fragments; ldmatrix brings two at once
    n_acc, n_b = 4 * ROW_TILES * columns, 2 * columns
    finish, pitch = finish_mma_tile(BN, bm, groups, threads, in_half), BN + PAD
    wait_for_first, wait_for_next = cp_async_wait(stages - 1), cp_async_wait(stages - 2)

    # --- global -> shared: ask for the operands of one stage
    @cuda.jit(device=True, forceinline=True)
    def copy_weights(ring, base, t, w, own):
        at = int64(own) * band + 16 * t
        for chunk in range(0, band, together):
            if chunk + together <= band or 16 * t < band - chunk:
                cp_async_16(ring, base + chunk + 16 * t, w, at + chunk)

    @cuda.jit(device=True, forceinline=True)
    def copy_tokens(ring, base, t, a, group, size):
        """The tile's groups of eight tokens from number `group` on, `size` bytes."""
        for chunk in range(0, 2 * TILE_K * bm, together):
            at = chunk + 16 * t
            if at < size:
                cp_async_16(ring, base + band + at, a, int64(group) * GROUP + (at >> 1))

    # --- shared -> registers
    @cuda.jit(device=True, forceinline=True)
    def fetch_tokens(b, ring, at, step):
        """B fragments of one step of 16 K: two units."""
        for j in range(pairs):
            b0, b1, b2, b3 = ldmatrix_x4(ring, at + 256 * step + 4 * GROUP * j)
            b[4 * j], b[4 * j + 1], b[4 * j + 2], b[4 * j + 3] = b0, b1, b2, b3

    @cuda.jit(device=True, forceinline=True)
    def fetch_weights(w, s, ring, at, lane, half):
        for i in range(ROW_TILES):
            x = words(ring, at + i * record, lane, half)
            y = scales(ring, at + i * record, lane, half)
            for j in range(n_words):
                w[i, j] = x[j]
            for j in range(n_scales):
                s[i, j] = y[j]

    # --- multiply
    @cuda.jit(device=True, forceinline=True)
    def multiply(acc, w, s, b, step):
        """acc += 16 K: the weights of a record become float16 and meet all tokens of the warp."""
        for i in range(ROW_TILES):
            a0, a1, a2, a3 = fragments(w[i], step, multipliers(s[i], step >> 1))
            for j in range(columns):
                r = 4 * (i * columns + j)
                acc[r], acc[r + 1], acc[r + 2], acc[r + 3] = mma_m16n8k16_f16(
                    a0,
                    a1,
                    a2,
                    a3,
                    b[2 * j],
                    b[2 * j + 1],
                    acc[r],
                    acc[r + 1],
                    acc[r + 2],
                    acc[r + 3],
                )

    @cuda.jit(device=True, forceinline=True)
    def put_sums(sums, acc, token, feature):
        """Of each mma a thread holds tokens m, m + 1 of features n, n + 8."""
        for i in range(ROW_TILES):
            for j in range(columns):
                r, at = 4 * (i * columns + j), (token + 8 * j) * pitch + feature + TILE_ROWS * i
                store_f32(sums, at, acc[r])
                store_f32(sums, at + pitch, acc[r + 1])
                store_f32(sums, at + 8, acc[r + 2])
                store_f32(sums, at + pitch + 8, acc[r + 3])

    @cuda.jit(launch_bounds=(threads, blocks))
    def w4a16_tensor_core(w, of_rows, a, of_tokens, c, steps, partials, arrived):
        """c[M, N] = a @ dequantize(w)[N, K]^T; w of qformats.repack.tiles, a of
        steps.components.activations.layouts.float16_chunks."""
        ring = cuda.shared.array(0, uint8, alignment=128)
        sums = cuda.shared.array(0, float32, alignment=128)  # the same memory, when K is done
        acc = cuda.local.array(n_acc, float32)
        codes = cuda.local.array((ROW_TILES, n_words), uint32)
        s = cuda.local.array((ROW_TILES, n_scales), uint32)
        b_even = cuda.local.array(n_b, uint32)
        b_odd = cuda.local.array(n_b, uint32)
        M = int32(c.shape[0])
        t = int32(cuda.threadIdx.x)
        warp, lane = t >> 5, t & 31
        n0, m0 = int32(cuda.blockIdx.x * BN), int32(cuda.blockIdx.y * bm)
        # this block's share of K, in stages
        part, parts = uint32(cuda.blockIdx.z), uint32(cuda.gridDim.z)
        k0 = int32(uint32(steps * part) // parts)
        count = int32(int32(uint32(steps * (part + 1)) // parts) - k0)
        # what this warp multiplies: these features and tokens, of a stage from this half on
        feature, group = warp % side * WARP, warp // (side * deep)
        first = warp // side % deep * tokens
        half = group
        weights = warp % side * ROW_TILES * record
        # a row of ldmatrix's four matrices: of a group two units of 8 K, then of the next group
        b_at = band + (first // TOKEN_GROUP + (lane >> 4)) * (2 * GROUP)
        b_at += (lane >> 3 & 1) * 128 + (lane & 7) * 16
        # where it copies from
        own = int32(cuda.blockIdx.x * steps + k0)
        eights, first8 = int32((M + TOKEN_GROUP - 1) // TOKEN_GROUP), int32(m0 // TOKEN_GROUP)
        size = int32((eights - first8) * (2 * GROUP))
        for i in range(n_acc):
            acc[i] = 0

        for step in range(stages):
            if step < count:
                copy_weights(ring, step * stage_bytes, t, w, own + step)
                copy_tokens(ring, step * stage_bytes, t, a, (k0 + step) * eights + first8, size)
            cp_async_commit()
        wait_for_first()
        cuda.syncthreads()
        base, ahead = int32(0), int32(stages)
        fetch_weights(codes, s, ring, weights, lane, half)
        fetch_tokens(b_even, ring, b_at, 4 * half)
        for _ in range(int32(count * turns)):
            # the tokens of the next 16 K are on their way while these are multiplied
            fetch_tokens(b_odd, ring, base + b_at, 4 * half + 1)
            multiply(acc, codes, s, b_even, 0)
            fetch_tokens(b_even, ring, base + b_at, 4 * half + 2)
            multiply(acc, codes, s, b_odd, 1)
            fetch_tokens(b_odd, ring, base + b_at, 4 * half + 3)
            multiply(acc, codes, s, b_even, 2)
            if turns == 2:
                half = int32(half ^ 1)
            if turns == 1 or half == 0:
                # --- the next stage is there for all, and all have read the last of this one
                wait_for_next()
                cuda.syncthreads()
                if ahead < count:
                    copy_weights(ring, base, t, w, own + ahead)
                    copy_tokens(ring, base, t, a, (k0 + ahead) * eights + first8, size)
                cp_async_commit()
                ahead = int32(ahead + 1)
                base = int32(base + stage_bytes)
                if base == stages * stage_bytes:
                    base = int32(0)
            fetch_tokens(b_even, ring, base + b_at, 4 * half)
            multiply(acc, codes, s, b_odd, 3)
            fetch_weights(codes, s, ring, base + weights, lane, half)

        # --- registers -> shared -> global; nobody reads the ring any more
        cuda.syncthreads()
        put_sums(sums, acc, group * bm + first + 2 * (lane & 3), feature + (lane >> 2))
        cuda.syncthreads()
        at = int32(cuda.blockIdx.y * cuda.gridDim.x + cuda.blockIdx.x)
        finish(sums, c, m0, n0, of_rows, of_tokens, part, parts, at, partials, arrived)

    return w4a16_tensor_core, threads


def ring_for(fmt: StorageFormat, bm: int) -> tuple[int, int, int]:
    """(blocks an SM, stages, bytes of each block): room for two stages, and for the sums."""
    stage = BN * fmt.block_bytes * TILE_K // BLOCK + 2 * TILE_K * bm
    most, groups = TILES[bm]
    sums = groups * bm * (BN + PAD) * 4
    for blocks in range(most, 0, -1):
        # an SM keeps 1 KB of every block, and `finish` has a word
        share = (shared_memory() + 1024) // blocks - 1024 - 16
        stages = min(STAGES, share // stage)
        if stages >= 2 and sums <= share:
            return blocks, stages, max(stages * stage, sums)
    return 0, 0, 0


def tiling(fmt: StorageFormat, shape: Shape) -> tuple[int, int, int]:
    """(tokens of a tile, how many tiles, parts of K) that should take the fewest cycles."""
    steps, least, best = ceil_div(shape.k, TILE_K), float("inf"), (0, 0, 0)
    for bm in TILES:
        resident, _, _ = ring_for(fmt, bm)
        if not resident:
            continue
        count = ceil_div(shape.n, BN) * ceil_div(shape.m, bm)
        # an SM's tensor cores have 16 x 8 x 16 done every 1.9 cycles; 40 bytes a cycle reach it
        stage = max(BN * bm * 15 // 128, (BN * fmt.bits // 8 + 2 * bm) * TILE_K // 40)
        for parts in range(1, min(PARTS, steps) + 1):
            # the beginning and end of a tile, and its parts' way back at 48 bytes a cycle, which
            # other blocks on the SM hide in part; a block that has it to itself is slower for it
            ends = 4000 + (2000 + parts * BN * bm * 4 // 48 if parts > 1 else 0)
            blocks = ceil_div(count * parts, multiprocessors())
            cycles = blocks * (ceil_div(steps, parts) * stage + ends // resident)
            cycles = cycles * 6 // 5 if blocks < resident else cycles
            if cycles < least:
                least, best = cycles, (bm, count, parts)
    return best


def scratch(fmt: Format, family: Family, shape: Shape) -> tuple[tuple[tuple[int, ...], Any], ...]:
    """The sums of each part of a tile, and a count for each tile."""
    bm, count, parts = tiling(storage_format(fmt), shape)
    return ((count * parts * bm * BN if parts > 1 else 4,), np.float32), ((count,), np.int32)


def launch(
    fmt: Format,
    family: Family,
    shape: Shape,
    weights: tuple,
    activations: tuple,
    out: Any,
    scratch: tuple,
) -> Launch:
    held = storage_format(fmt)
    bm, _, parts = tiling(held, shape)
    _, stages, shared = ring_for(held, bm)
    run, threads = kernel(held, bm, stages, out.dtype == np.float16)
    grid = (ceil_div(shape.n, BN), ceil_div(shape.m, bm), parts)
    args = (*weights, *activations, out, ceil_div(shape.k, TILE_K), *scratch)
    return Launch(run, grid, (threads,), args, shared)


STEP = Step(
    number=11,
    name="step11_w4a16_tensor_core",
    title="W4A16 on tensor cores: float16 weights made in registers",
    branch="float16",
    families=("A16",),
    parents={"A16": 9},
    unit={"A16": "tensor_fp16"},
    pack=tiles,
    activations=float16_chunks,
    launch=launch,
    scratch=scratch,
    formats=KNOWN,
    outputs=("float32", "float16"),
    min_cc=(8, 0),
    contains={"A16": ("HMMA.16816.F32", "HFMA2", "LDGSTS.E.BYPASS.128", "LDSM.16.M88.4", "MEMBAR")},
    forbids={"A16": ("IMMA", "I2FP", "FFMA")},
    chosen_untuned=True,
)
