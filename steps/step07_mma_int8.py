"""Step 7: mma_int8 - a warp multiplies 16 x 8 x 32 bytes in one instruction.

What is new
    `mma.sync.m16n8k32`: each of 32 lanes holds a *fragment* of three small matrices, and the tensor
    core multiplies them. For lane 4g + t (g = 0..7, t = 0..3), a register being four bytes:

        W  16 features x 32 K                A  32 K x 8 tokens        C  16 features x 8 tokens
                   k = 4t..  16+4t..                     token g                  token 2t  2t+1
        row g    |   a0    |   a2    |       k =    4t.. |  b0  |       row g    |   c0   |  c1  |
        row g+8  |   a1    |   a3    |       k = 16+4t.. |  b1  |       row g+8  |   c2   |  c3  |

    Weights are in *fragment-packed tiles*, 16 features x 128 K in just this order: a lane loads 16
    bytes, a few masks and shifts make a0..a3 of them, and no other lane needs them. So they never
    see shared memory. Activations do, as every warp needs all of them: K-outermost, 16 K of a token
    and then of the next. b0 of 32 lanes is 128 bytes in one piece: conflict-free.
Why it should help
    One IMMA does the work of 32 IDP.4A. Scales still differ from block to block, so each of its
    4 sums a lane is scaled before the next: I2F, FMUL, FFMA, twelve instructions beside one IMMA.
    They are the bound now, not the products: with the fragments 19 issue slots for an IMMA, or
    132 SM x 4 x 1.8 GHz / 19 x 8192 operations = 410 TOPS; memory and barriers will take half.
What it costs
    Compute capability 8.0, and weights in an order that serves this instruction only.
Machine code
    IMMA.16832; no IDP, and no LDS.128 either: fragments are single words, 128 bytes for a warp.
Prerequisites
    Step 6. Taught here: fragment-packed tiles (qformats.repack.tiles) and how their codes become
    bytes (steps.blocks.integers). Inside each 16 K both operands are in one other order (MMA_ORDER,
    for step 11): the kernel need not know it.
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
# few -> warps of a block, one packed tile (16 features) each; mma of a warp side by side along M
TILES: Final = {True: (4, 2), False: (8, 8)}
BLOCKS_PER_SM: Final = {True: 4, False: 2}  # few -> the others multiply while one waits


@cache
def kernel(format_name: str, warps: int, columns: int, blocks_per_sm: int) -> Any:
    """The kernel for tiles of `warps` times 16 features x `columns` times 8 tokens."""
    weights = integer_weights(format_name)
    tile_bytes, has_minimum = weights.tile_bytes, weights.has_minimum
    load, fragment, scale, minimum = weights.load, weights.fragment, weights.scale, weights.minimum
    scales_at, minima_at = weights.scales_at, weights.minima_at
    mma = mma_m16n8k32_u8 if has_minimum else mma_m16n8k32_s8
    threads, bm = 32 * warps, columns * TOKENS
    assert threads % bm == 0, "a thread stages chunks of one token"
    words_a, floats_a = CHUNKS * bm * 4, BLOCKS * bm
    floats_s = floats_a if has_minimum else 2  # the others have no use for s
    everyone = BLOCKS * bm % threads == 0  # has a scale to stage
    chunks_a, scales_a = CHUNKS * bm // threads, ceil_div(BLOCKS * bm, threads)  # of one thread

    @cuda.jit(device=True, forceinline=True)
    def multiply(acc, tile_a, d_a, s_a, block, lane, words, scales, minima):
        """acc += one block of K. Of scales and minima, two in a word, the first two words are of
        row g, the others of row g + 8."""
        # --- codes -> bytes
        a0, a1, a2, a3 = fragment(words, block & 1)
        d, d8 = scale(scales[block // 2], block & 1), scale(scales[2 + block // 2], block & 1)
        z, z8 = minimum(minima[block // 2], block & 1), minimum(minima[2 + block // 2], block & 1)
        for j in range(columns):
            # --- shared -> registers -> tensor cores: word t of token g lies at 4 g + t
            first = (2 * block * bm + j * TOKENS) * 4 + lane
            b0, b1 = load_u32(tile_a, first), load_u32(tile_a, first + 4 * bm)
            c0, c1, c2, c3 = mma(a0, a1, a2, a3, b0, b1, 0, 0, 0, 0)

            # --- scale the four sums, add them up
            token = block * bm + j * TOKENS + 2 * (lane % 4)
            da, da1 = load_f32x2(d_a, token)
            acc[j, 0] += d * da * float32(c0)
            acc[j, 1] += d * da1 * float32(c1)
            acc[j, 2] += d8 * da * float32(c2)
            acc[j, 3] += d8 * da1 * float32(c3)
            if has_minimum:
                s, s1 = load_f32x2(s_a, token)
                acc[j, 0] += z * s
                acc[j, 1] += z * s1
                acc[j, 2] += z8 * s
                acc[j, 3] += z8 * s1

    @cuda.jit(launch_bounds=(threads, blocks_per_sm))
    def w4a8_mma_int8(w, row_scales, qa, ds, c, blocks_k):
        """c[M, N] = a @ dequantize(w)[N, K]^T; w, row_scales: qformats.repack.tiles,
        a: K-outermost."""
        tile_a = cuda.shared.array(words_a, uint32, alignment=16)  # [chunk][token][word]
        d_a = cuda.shared.array(floats_a, float32, alignment=16)  # [block][token]
        s_a = cuda.shared.array(floats_s, float32, alignment=16)
        acc = cuda.local.array((columns, 4), float32)
        M, N = c.shape
        lane, warp = cuda.threadIdx.x, cuda.threadIdx.y
        t = uint32(warp * 32 + lane)  # unsigned: division by a power of two is then one shift
        m0, row_tile = cuda.blockIdx.y * bm, cuda.blockIdx.x * warps + warp
        n = row_tile * TILE_ROWS + lane // 4
        steps = (blocks_k + BLOCKS - 1) // BLOCKS
        # The warp's first packed tile. Beyond N there are some too, up to a whole group of 8, with
        # scales of 0
        group = int32(row_tile) // TILE_GROUP
        tile = int64(int32(group * steps) * TILE_GROUP + row_tile % TILE_GROUP) * tile_bytes
        for j in range(columns):
            for i in range(4):
                acc[j, i] = 0

        row = t % bm
        m = min(m0 + row, M - 1)
        for k in range(0, blocks_k, BLOCKS):
            # --- W: global -> registers, issued first as it comes from furthest away
            low, high = load(w, tile, lane, 0), load(w, tile, lane, 1)
            scales = load_u32x4(w, tile + scales_at + 16 * (lane // 4))
            minima = scales
            if has_minimum:
                minima = load_u32x4(w, tile + minima_at + 16 * (lane // 4))
            tile += TILE_GROUP * tile_bytes

            # --- A: global -> shared. Beyond K both operands hold zeros; beyond M, where nobody
            # looks, the last row is read again: without a branch no load waits for another
            for i in range(chunks_a):
                chunk = t // bm + i * (threads // bm)
                x = load_u32x4(qa, ((2 * k + chunk) * M + m) * CHUNK)
                store_u32x4(tile_a, (chunk * bm + row) * 4, x[0], x[1], x[2], x[3])
            for i in range(scales_a):
                block = t // bm + i * (threads // bm)
                if everyone or block < BLOCKS:
                    d, s = load_f32x2(ds, ((k + block) * M + m) * 2)
                    d_a[block * bm + row] = d
                    if has_minimum:
                        s_a[block * bm + row] = s
            cuda.syncthreads()

            # --- multiply
            multiply(acc, tile_a, d_a, s_a, 0, lane, low, scales, minima)
            multiply(acc, tile_a, d_a, s_a, 1, lane, low, scales, minima)
            multiply(acc, tile_a, d_a, s_a, 2, lane, high, scales, minima)
            multiply(acc, tile_a, d_a, s_a, 3, lane, high, scales, minima)
            cuda.syncthreads()

        # --- registers -> global
        for j in range(columns):
            for i in range(4):
                token, feature = m0 + j * TOKENS + 2 * (lane % 4) + i % 2, n + i // 2 * 8
                if token < M and feature < N:
                    c[token, feature] = acc[j, i] * row_scales[feature]

    return w4a8_mma_int8


def launch(
    fmt: Format, family: Family, shape: Shape, weights: tuple, activations: tuple, out: Any
) -> Launch:
    few = shape.m <= FEW
    warps, columns = TILES[few]
    grid = (ceil_div(shape.n, warps * TILE_ROWS), ceil_div(shape.m, columns * TOKENS))
    args = (*weights, *activations, out, shape.k // BLOCK)
    return Launch(kernel(fmt.name, warps, columns, BLOCKS_PER_SM[few]), grid, (32, warps), args)


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
