"""Step 7: mma_int8 - a warp multiplies 16 x 8 x 32 bytes in one instruction.

What is new
    `mma.sync.m16n8k32`: each of 32 lanes holds a *fragment* of three small matrices, and the tensor
    core multiplies them. For lane 4g + t (g = 0..7, t = 0..3), a register being four bytes:

        W  16 features x 32 K                A  32 K x 8 tokens        C  16 features x 8 tokens
                   k = 4t..  16+4t..                     token g                  token 2t  2t+1
        row g    |   a0    |   a2    |       k =    4t.. |  b0  |       row g    |   c0   |  c1  |
        row g+8  |   a1    |   a3    |       k = 16+4t.. |  b1  |       row g+8  |   c2   |  c3  |

    Weights are in *fragment-packed tiles*, 16 features x 128 K in just this order: a lane loads 16
    bytes (4 bits a code), a few masks and shifts make a0..a3 of two blocks of them, and no other
    lane needs them. So weights do not pass through shared memory. Activations do, as every warp
    needs all of them: K-outermost, 16 K of a token and then of the next. Where 32 lanes load their
    b0 from there, these are 128 bytes in one piece: conflict-free.
Why it should help
    One IMMA does the work of 32 IDP.4A. Scales still differ from block to block, so the 4 sums of a
    lane are scaled after each IMMA: I2F, FMUL and FFMA for a sum, twelve instructions for an IMMA.
    These are the bound now, not the products. With the loads of fragments an IMMA takes 19 issue
    slots, and 132 SMs x 4 schedulers x 1.8 GHz / 19 x 8192 operations are 410 TOPS; waiting for
    memory and at barriers will take half.
What it costs
    Compute capability 8.0, and weights in an order that serves this instruction only.
Machine code
    IMMA.16832; no IDP, and no LDS.128 either: fragments are single words, 128 bytes for a warp.
Prerequisites
    Step 6. Taught here: fragment-packed tiles (qformats.repack.tiles) and how their codes become
    bytes (steps.blocks.integers). Inside each 16 K both operands have the same order, which is not
    that of K (MMA_ORDER, made for step 11). A sum over K is the same in any order, so the kernel
    need not know it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from numba import cuda, float32, int32, int64, uint32

from qformats import BLOCK, Format
from qformats.repack import CHUNK, TILE_GROUP, TILE_K, TILE_ROWS, tiles
from steps.blocks.integers import integer_weights
from steps.blocks.q8_1 import q8_1_mma_order
from steps.contract import Family, Launch, Shape, Step, ceil_div
from steps.instructions import (
    load_f32x2,
    load_u32,
    load_u32x4,
    mma_m16n8k32_s8,
    mma_m16n8k32_u8,
    store_u32x4,
)

TOKENS: Final = 8  # of one mma
BLOCKS: Final = TILE_K // BLOCK  # of K in a packed tile, and in a stage
CHUNKS: Final = TILE_K // CHUNK  # of 16 activations in a stage
FEW: Final = 16  # tokens up to which a tile of 64 would be mostly empty
# few -> warps of a block, each with one packed tile (16 features); groups of 8 tokens of a tile
TILES: Final = {True: (4, 2), False: (8, 8)}
BLOCKS_PER_SM: Final = {True: 4, False: 2}  # few -> the others multiply while one waits


@cache
def kernel(format_name: str, warps: int, token_groups: int, blocks_per_sm: int) -> Any:
    """The kernel for tiles of `warps` times 16 features x `token_groups` times 8 tokens."""
    weights = integer_weights(format_name)
    tile_bytes, has_minimum = weights.tile_bytes, weights.has_minimum
    load, fragment, scale, minimum = weights.load, weights.fragment, weights.scale, weights.minimum
    scales_at, minima_at = weights.scales_at, weights.minima_at
    mma = mma_m16n8k32_u8 if has_minimum else mma_m16n8k32_s8
    threads, bm = 32 * warps, token_groups * TOKENS
    assert threads % bm == 0, "a thread stages chunks of one token"
    words_a, floats_a = CHUNKS * bm * 4, BLOCKS * bm
    floats_s = floats_a if has_minimum else 2  # the others have no use for s
    all_stage_scales = BLOCKS * bm % threads == 0  # every thread has a scale to stage
    chunks_a, scales_a = CHUNKS * bm // threads, ceil_div(BLOCKS * bm, threads)  # of one thread

    @cuda.jit(device=True, forceinline=True)
    def multiply(acc, tile_a, d_a, s_a, block, lane, words, scales, minima):
        """acc += block 0 to 3 of the stage's K. words: the codes of its half of the stage. scales
        and minima: two float16 in a word, of the four blocks of row g, then of row g + 8."""
        # --- codes -> bytes
        a0, a1, a2, a3 = fragment(words, block & 1)
        d_g, d_g8 = scale(scales[block // 2], block & 1), scale(scales[2 + block // 2], block & 1)
        min_g = minimum(minima[block // 2], block & 1)
        min_g8 = minimum(minima[2 + block // 2], block & 1)
        for j in range(token_groups):
            # --- shared -> registers -> tensor cores: word t of token g lies at 4 g + t
            first = (2 * block * bm + j * TOKENS) * 4 + lane
            b0, b1 = load_u32(tile_a, first), load_u32(tile_a, first + 4 * bm)
            c0, c1, c2, c3 = mma(a0, a1, a2, a3, b0, b1, 0, 0, 0, 0)

            # --- scale the four sums, add them up
            token = block * bm + j * TOKENS + 2 * (lane % 4)
            da, da1 = load_f32x2(d_a, token)
            acc[j, 0] += d_g * da * float32(c0)
            acc[j, 1] += d_g * da1 * float32(c1)
            acc[j, 2] += d_g8 * da * float32(c2)
            acc[j, 3] += d_g8 * da1 * float32(c3)
            if has_minimum:
                s, s1 = load_f32x2(s_a, token)
                acc[j, 0] += min_g * s
                acc[j, 1] += min_g * s1
                acc[j, 2] += min_g8 * s
                acc[j, 3] += min_g8 * s1

    @cuda.jit(launch_bounds=(threads, blocks_per_sm))
    def w4a8_mma_int8(w, row_scales, qa, ds, c, blocks_k):
        """c[M, N] = a @ dequantize(w)[N, K]^T, in `blocks_k` of 32 K; w and row_scales of
        qformats.repack.tiles. a is Q8_1, K-outermost: qa int8 [K/16, M, 16], the codes, and ds
        float32 [K/32, M, 2]: of a block its scale d, and s, d times the sum of its codes."""
        tile_a = cuda.shared.array(words_a, uint32, alignment=16)  # [chunk][token][word]
        d_a = cuda.shared.array(floats_a, float32, alignment=16)  # [block][token]
        s_a = cuda.shared.array(floats_s, float32, alignment=16)
        acc = cuda.local.array((token_groups, 4), float32)
        M, N = c.shape
        lane, warp = cuda.threadIdx.x, cuda.threadIdx.y
        t = uint32(warp * 32 + lane)  # unsigned: division by a power of two is then one shift
        m0, row_tile = cuda.blockIdx.y * bm, cuda.blockIdx.x * warps + warp
        n = row_tile * TILE_ROWS + lane // 4
        steps = (blocks_k + BLOCKS - 1) // BLOCKS
        # The byte of the warp's first packed tile. W has whole groups of 8 of them side by side:
        # those beyond N have scales of 0
        group = int32(row_tile) // TILE_GROUP
        tile_at = int64(int32(group * steps) * TILE_GROUP + row_tile % TILE_GROUP) * tile_bytes
        for j in range(token_groups):
            for i in range(4):
                acc[j, i] = 0

        row = t % bm
        m = min(m0 + row, M - 1)
        for b in range(0, blocks_k, BLOCKS):  # the first block of a stage
            # --- W: global -> registers, issued first as it comes from furthest away
            lower, upper = load(w, tile_at, lane, 0), load(w, tile_at, lane, 1)
            scales = load_u32x4(w, tile_at + scales_at + 16 * (lane // 4))
            minima = scales  # not used
            if has_minimum:
                minima = load_u32x4(w, tile_at + minima_at + 16 * (lane // 4))
            tile_at += TILE_GROUP * tile_bytes

            # --- A: global -> shared. Beyond K both operands hold zeros; beyond M, where nobody
            # looks, the last row is read again: without a branch no load waits for another
            for i in range(chunks_a):
                chunk = t // bm + i * (threads // bm)
                x = load_u32x4(qa, ((2 * b + chunk) * M + m) * CHUNK)
                store_u32x4(tile_a, (chunk * bm + row) * 4, x[0], x[1], x[2], x[3])
            for i in range(scales_a):
                block = t // bm + i * (threads // bm)
                if all_stage_scales or block < BLOCKS:
                    da, s = load_f32x2(ds, ((b + block) * M + m) * 2)
                    d_a[block * bm + row] = da
                    if has_minimum:
                        s_a[block * bm + row] = s
            cuda.syncthreads()

            # --- multiply
            multiply(acc, tile_a, d_a, s_a, 0, lane, lower, scales, minima)
            multiply(acc, tile_a, d_a, s_a, 1, lane, lower, scales, minima)
            multiply(acc, tile_a, d_a, s_a, 2, lane, upper, scales, minima)
            multiply(acc, tile_a, d_a, s_a, 3, lane, upper, scales, minima)
            cuda.syncthreads()

        # --- registers -> global
        for j in range(token_groups):
            for i in range(4):
                token, feature = m0 + j * TOKENS + 2 * (lane % 4) + i % 2, n + i // 2 * 8
                if token < M and feature < N:
                    c[token, feature] = acc[j, i] * row_scales[feature]

    return w4a8_mma_int8


def launch(
    fmt: Format, family: Family, shape: Shape, weights: tuple, activations: tuple, out: Any
) -> Launch:
    few = shape.m <= FEW
    warps, token_groups = TILES[few]
    grid = (ceil_div(shape.n, warps * TILE_ROWS), ceil_div(shape.m, token_groups * TOKENS))
    args = (*weights, *activations, out, shape.k // BLOCK)
    return Launch(
        kernel(fmt.name, warps, token_groups, BLOCKS_PER_SM[few]), grid, (32, warps), args
    )


STEP = Step(
    number=7,
    name="step07_mma_int8",
    title="int8 tensor cores: mma.sync m16n8k32, scales once a block",
    branch="int8",
    families=("A8",),
    parents={"A8": 6},
    unit={"A8": "tensor_int8"},
    pack=tiles,
    activations={"A8": q8_1_mma_order},
    launch=launch,
    min_cc=(8, 0),
    idea=("mma", "fragment"),
    contains={"A8": ("IMMA.16832", "LDG.E.128", "STS.128", "I2F", "BAR.SYNC")},
    forbids={"A8": ("IDP", "HMMA", "LDSM", "LDGSTS")},
    chosen_untuned=True,
)
