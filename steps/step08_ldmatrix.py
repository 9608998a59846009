"""Step 8: ldmatrix - warp tiles of 32 x 64, fragments loaded one block ahead of their products.

What is new
    A warp owns 32 features x 64 tokens of C, 64 sums a thread: twice as much as in step 7, so each
    B fragment meets two A fragments. (A fragments hold weights and B fragments tokens: the letters
    are those of the mma, not of the matrices A and W.) Both operands lie in shared memory, 128 K at
    a time: a *stage*. There are two sets of registers for B fragments: while one block of K is
    multiplied, those of the next are loaded.

    `ldmatrix` loads the B fragments of 16 tokens at once, as four matrices of 8 rows. A row is a
    chunk: 16 K of a token, 16 bytes. Lane 8i + r gives the address of row r of matrix i; lane
    4g + t receives word t of row g of each matrix: its b0 or b1. For one block of K:

                         tokens 0..7         tokens 8..15              tokens 56..63
        K  0..15      | matrix 0: b0  |   | matrix 2: b0  |    ...    |             |    chunk 0
        K 16..31      | matrix 1: b1  |   | matrix 3: b1  |    ...    |             |    chunk 1

    It is conflict-free without a swizzle: the 8 rows of a matrix are 128 bytes in one piece, all 32
    banks. So are the weights: lane l reads the l-th 16 bytes of a fragment-packed tile.

    In Q4_1 and Q5_1 step 7 adds m * s to each sum once a block, a fourth instruction beside I2F,
    FMUL and FFMA. Here one tf32 mma adds those of all four blocks of a stage, for 16 features x 8
    tokens. A tf32 is a float32 of which tensor cores read 11 significant bits, enough for a float16
    m. So each s is split into two of them, which lose less than 2^-21 of it; the two of each of
    four blocks fill the 8 K of the mma:

        k                  0    1    2    3    4    5    6    7
        A, a feature       m of block 0 .. 3  |the same m again
        B, a token         upper 11 bits of s | what they leave     s of block 0 .. 3
Why it should help
    Step 7 issues 18.9 instructions for each IMMA: itself, 12 that scale its sums, and 5.9 others.
    Wider loads, and fragments that are used twice, leave 15.8 in all. An IMMA holds a scheduler for
    6.8 cycles, any other instruction for one: 21.6 cycles instead of 24.7. In each stage a block
    also waits 900 cycles for its loads and first fragments; the SM's other block multiplies then.
    Predicted: 64 us where step 7 takes 74, 1.16x.
What it costs
    250 registers a thread: two blocks of four warps on an SM. 18 to 26 KB for a stage.
Machine code
    LDSM; IMMA, I2FP, FMUL, FFMA and little else between the barriers; LDG and STS, no LDGSTS.
    HMMA in Q4_1 and Q5_1 alone, 16 a stage beside 64 IMMA.
Prerequisites
    Step 7: fragments, scales, steps.blocks.integers.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from numba import cuda, float32, int32, int64, uint8, uint32

from qformats import BLOCK, FORMATS, Format
from qformats.repack import CHUNK, TILE_GROUP, TILE_K, TILE_ROWS, tiles
from steps.blocks.integers import integer_weights
from steps.blocks.q8_1 import q8_1_mma_order
from steps.contract import Family, Launch, Shape, Step, ceil_div
from steps.instructions import (
    as_bits,
    as_float,
    ldmatrix_x4,
    load_f32,
    load_f32x4,
    load_u16,
    load_u32,
    load_u32x4,
    mma_m16n8k8_tf32,
    mma_m16n8k32_s8,
    mma_m16n8k32_u8,
    store_f32,
    store_u32,
    store_u32x4,
)

BLOCK_M: Final = 64  # tokens of a tile of C, and of each of its warps
BLOCK_N: Final = TILE_GROUP * TILE_ROWS  # features: 128, a group of packed tiles
WARP_N: Final = 32  # features of a warp
ROW_TILES: Final = WARP_N // TILE_ROWS  # packed tiles of a warp: 2
BLOCKS: Final = TILE_K // BLOCK  # of K in a stage: 4
CHUNKS: Final = TILE_K // CHUNK  # of 16 K of a token in a stage: 8
THREADS: Final = 128  # four warps, one for each scheduler of an SM
BLOCKS_PER_SM: Final = 2  # one multiplies while the other loads; registers allow no third
TF32: Final = 0xFFFFE000  # the bits of a float32 that a tf32 keeps

# A stage, 128 K:
#
#     weights   8 fragment-packed tiles, in one piece as they lie in memory (qformats.repack.tiles)
#     codes     int8 [8 chunks][token][16 K]
#     d         float32 [4 blocks][token]
#     s         float32 [4 blocks][token], of Q4_1 and Q5_1. A warp reads those of 8 tokens of all
#               four blocks at once. With 8 floats left free after each block, they are in 32 banks


@cuda.jit(device=True, forceinline=True)
def copy_16(shared, destination, array, source):
    """16 bytes, from element `source` of an array to a byte of the stage."""
    x = load_u32x4(array, source)
    store_u32x4(shared, destination, x[0], x[1], x[2], x[3])


@cuda.jit(device=True, forceinline=True)
def copy_4(shared, destination, array, source):
    """The same with 4 bytes."""
    store_u32(shared, destination, load_u32(array, source))


@cuda.jit(device=True, forceinline=True)
def place_of(token):
    """Where a token's d lies among those of its block of K. Tokens 2t, 2t + 1, 2t + 8 and 2t + 9 of
    16 are side by side: a lane loads all four at once."""
    return (token & 0x31) | (token & 6) << 1 | (token >> 2 & 2)


@cache
def kernel(format_name: str) -> Any:
    weights = integer_weights(format_name)
    tile_bytes, has_minimum = weights.tile_bytes, weights.has_minimum
    load, fragment, scale, minimum = weights.load, weights.fragment, weights.scale, weights.minimum
    scales_at, minima_at = weights.scales_at, weights.minima_at
    mma = mma_m16n8k32_u8 if has_minimum else mma_m16n8k32_s8
    n_words = FORMATS[format_name].bits  # 4, 5 or 8 that a lane loads of half a packed tile
    token_groups = BLOCK_M // 8  # of 8 tokens, the columns of an mma
    n_acc = 4 * ROW_TILES * token_groups  # registers for sums
    n_b = 2 * token_groups  # registers for B fragments of a block of K
    n_features = 2 * ROW_TILES  # features of a lane
    # Bytes of the parts of a stage, and where they begin
    w_bytes = TILE_GROUP * tile_bytes
    d_begin = w_bytes + BLOCK_M * TILE_K
    s_begin = d_begin + 4 * BLOCKS * BLOCK_M
    s_block_bytes = 4 * (BLOCK_M + 8)  # from s of one block to s of the next
    stage_bytes = s_begin + (BLOCKS * s_block_bytes if has_minimum else 0)
    # Bytes of the weights that go by 16, as many for every thread; the rest goes by 4
    w_by_16 = w_bytes // (THREADS * CHUNK) * (THREADS * CHUNK)
    at_once = THREADS // BLOCK_M  # chunks or blocks of every token that all threads copy at once

    @cuda.jit(device=True, forceinline=True)
    def first_source(m0, M, steps, t):
        """Where this thread reads its part of the tile's first 128 K: a byte of w, elements of qa
        [K/16, M, 16] and of ds [K/32, M, 2]. Tokens beyond M, where nobody looks, repeat the last
        one; beyond K everything is zero."""
        first = int64(t // BLOCK_M) * M + min(int32(m0 + t % BLOCK_M), M - 1)
        w_at = int64(int32(cuda.blockIdx.x * steps)) * w_bytes + t * CHUNK
        return w_at, first * CHUNK, first * 2

    @cuda.jit(device=True, forceinline=True)
    def next_source(source, M):
        """The same for the next 128 K. A sum costs less than to find all three anew."""
        w_at, qa_at, ds_at = source
        return w_at + w_bytes, qa_at + int64(M) * TILE_K, ds_at + int64(M) * (2 * BLOCKS)

    @cuda.jit(device=True, forceinline=True)
    def copy_stage(shared, w, qa, ds, source, M, t):
        """Copy 128 K."""
        w_at, qa_at, ds_at = source
        # --- W: one piece of memory. The last 1 KB of Q4_0, Q5_0 and Q8_0 goes by 4
        # bytes: 16 for half of the threads would need a branch, which costs more
        for i in range(0, w_by_16, THREADS * CHUNK):
            copy_16(shared, i + t * CHUNK, w, w_at + i)
        for i in range(w_by_16, w_bytes, THREADS * 4):
            copy_4(shared, i + t * 4, w, w_at + (i - t * (CHUNK - 4)))  # w_at has 16 t
        # --- A: each turn copies `at_once` chunks of every token, one a thread; then the d
        # (and s) of `at_once` blocks likewise
        for i in range(0, CHUNKS, at_once):
            destination = w_bytes + (i * BLOCK_M + t) * CHUNK
            copy_16(shared, destination, qa, qa_at + int64(M * CHUNK) * i)
        for i in range(0, BLOCKS, at_once):
            place = (i + t // BLOCK_M) * BLOCK_M + place_of(t % BLOCK_M)
            destination = d_begin + 4 * place
            copy_4(shared, destination, ds, ds_at + int64(M * 2) * i)
            if has_minimum:
                destination = s_begin + (i + t // BLOCK_M) * s_block_bytes + t % BLOCK_M * 4
                copy_4(shared, destination, ds, ds_at + int64(M * 2) * i + 1)

    @cuda.jit(device=True, forceinline=True)
    def load_weights(words, shared, tile_at, lane, half):
        """The words of 64 K of the warp's packed tiles, which begin at byte `tile_at`."""
        for i in range(ROW_TILES):
            x = load(shared, tile_at + i * tile_bytes, lane, half)
            for j in range(n_words):
                words[i, j] = x[j]

    @cuda.jit(device=True, forceinline=True)
    def load_scales(scales, shared, tile_at, lane):
        """The scales of 128 K of the warp's packed tiles."""
        for i in range(ROW_TILES):
            x = load_u32x4(shared, tile_at + i * tile_bytes + scales_at + 16 * (lane >> 2))
            scales[i, 0], scales[i, 1], scales[i, 2], scales[i, 3] = x

    @cuda.jit(device=True, forceinline=True)
    def load_tokens(b, shared, chunk_at, block):
        """The B fragments of a block of K. `chunk_at`: the byte of this lane's row in
        block 0."""
        for j in range(0, n_b, 4):
            x = ldmatrix_x4(shared, chunk_at + (2 * block * BLOCK_M + 4 * j) * CHUNK)
            b[j], b[j + 1], b[j + 2], b[j + 3] = x

    @cuda.jit(device=True, forceinline=True)
    def load_token_scales(token_scales, shared, d_at, block):
        """d of the tokens of this lane's sums, for a block of K. `d_at`: the byte of its first in
        block 0."""
        for j in range(0, n_b, 4):
            x = load_f32x4(shared, d_at + 4 * (block * BLOCK_M + 4 * j))
            token_scales[j], token_scales[j + 1], token_scales[j + 2], token_scales[j + 3] = x

    @cuda.jit(device=True, forceinline=True)
    def multiply(acc, words, b, token_scales, scales, block):
        """acc += one block of K: 32 features times the tokens of the B fragments."""
        for i in range(ROW_TILES):
            # --- codes -> bytes
            a0, a1, a2, a3 = fragment(words[i], block & 1)
            d_g = scale(scales[i, block // 2], block & 1)
            d_g8 = scale(scales[i, 2 + block // 2], block & 1)
            for j in range(token_groups):
                # --- registers -> tensor cores
                c0, c1, c2, c3 = mma(a0, a1, a2, a3, b[2 * j], b[2 * j + 1], 0, 0, 0, 0)

                # --- scale the four sums, add them up
                r = 4 * (i * token_groups + j)
                da, da1 = token_scales[2 * j], token_scales[2 * j + 1]
                acc[r] += d_g * da * float32(c0)
                acc[r + 1] += d_g * da1 * float32(c1)
                acc[r + 2] += d_g8 * da * float32(c2)
                acc[r + 3] += d_g8 * da1 * float32(c3)

    @cuda.jit(device=True, forceinline=True)
    def add_minima(acc, shared, tile_at, s_at, lane):
        """acc += m * s of all four blocks. `s_at`: the byte of s of block t and token g."""
        for i in range(ROW_TILES):
            first = tile_at + i * tile_bytes + minima_at + 16 * (lane >> 2) + 2 * (lane & 3)
            min_g = as_bits(minimum(load_u16(shared, first), 0))  # of row g
            min_g8 = as_bits(minimum(load_u16(shared, first + 8), 0))
            for j in range(token_groups):
                s = load_f32(shared, s_at + 32 * j)
                upper = as_bits(s) & uint32(TF32)
                lower = as_bits(s - as_float(upper))
                r = 4 * (i * token_groups + j)
                x0, x1, x2, x3 = acc[r], acc[r + 1], acc[r + 2], acc[r + 3]
                y = mma_m16n8k8_tf32(min_g, min_g8, min_g, min_g8, upper, lower, x0, x1, x2, x3)
                acc[r], acc[r + 1], acc[r + 2], acc[r + 3] = y

    @cuda.jit(launch_bounds=(THREADS, BLOCKS_PER_SM))
    def w4a8_ldmatrix(w, row_scales, qa, ds, c, steps):
        """c[M, N] = a @ dequantize(w)[N, K]^T, in `steps` of 128 K; w and row_scales of
        qformats.repack.tiles. a is Q8_1, K-outermost: qa int8 [K/16, M, 16], the codes, and ds
        float32 [K/32, M, 2]: of a block its scale d, and s, d times the sum of its codes."""
        shared = cuda.shared.array(stage_bytes, uint8, alignment=128)
        acc = cuda.local.array(n_acc, float32)
        words = cuda.local.array((ROW_TILES, n_words), uint32)
        scales = cuda.local.array((ROW_TILES, 4), uint32)
        b_even, b_odd = cuda.local.array(n_b, uint32), cuda.local.array(n_b, uint32)
        token_scales = cuda.local.array(n_b, float32)
        t, steps = int32(cuda.threadIdx.x), int32(steps)
        warp, lane, M, N = t >> 5, t & 31, int32(c.shape[0]), int32(c.shape[1])
        n0, m0 = int32(cuda.blockIdx.x * BLOCK_N), int32(cuda.blockIdx.y * BLOCK_M)
        # Where in the stage this lane reads. Lane 8i + r addresses row r of ldmatrix's matrix i:
        # chunk i & 1, tokens from 8 (i >> 1) on
        tile_at = warp * (ROW_TILES * tile_bytes)
        chunk_at = w_bytes + ((lane >> 3 & 1) * BLOCK_M + (lane >> 4) * 8 + (lane & 7)) * CHUNK
        d_at = d_begin + 16 * (lane & 3)
        s_at = s_begin + (lane & 3) * s_block_bytes + 4 * (lane >> 2)
        for i in range(n_acc):
            acc[i] = 0

        source = first_source(m0, M, steps, t)
        for _ in range(steps):
            # --- global -> shared: every thread waits for its loads before it stores them
            copy_stage(shared, w, qa, ds, source, M, t)
            source = next_source(source, M)
            cuda.syncthreads()

            # --- multiply, while the tokens of the next block are loaded
            load_weights(words, shared, tile_at, lane, 0)
            load_scales(scales, shared, tile_at, lane)
            load_tokens(b_even, shared, chunk_at, 0)
            load_token_scales(token_scales, shared, d_at, 0)
            load_tokens(b_odd, shared, chunk_at, 1)
            multiply(acc, words, b_even, token_scales, scales, 0)
            if has_minimum:
                add_minima(acc, shared, tile_at, s_at, lane)
            load_token_scales(token_scales, shared, d_at, 1)
            load_tokens(b_even, shared, chunk_at, 2)
            multiply(acc, words, b_odd, token_scales, scales, 1)
            load_weights(words, shared, tile_at, lane, 1)
            load_token_scales(token_scales, shared, d_at, 2)
            load_tokens(b_odd, shared, chunk_at, 3)
            multiply(acc, words, b_even, token_scales, scales, 2)
            load_token_scales(token_scales, shared, d_at, 3)
            multiply(acc, words, b_odd, token_scales, scales, 3)
            cuda.syncthreads()

        # --- registers -> global. The compiler keeps a load behind the stores above it, so the row
        # scales are loaded first; they go on to the end of the tile
        m, n = int32(m0 + 2 * (lane & 3)), int32(n0 + WARP_N * warp + (lane >> 2))
        lane_row_scales = cuda.local.array(n_features, float32)
        for i in range(n_features):
            lane_row_scales[i] = load_f32(row_scales, n + 8 * i)
        for j in range(token_groups):
            for odd in range(2):
                token = int32(m + 8 * j + odd)
                for i in range(n_features):
                    feature = int32(n + 8 * i)
                    if token < M and feature < N:
                        x = acc[4 * (i // 2 * token_groups + j) + 2 * (i % 2) + odd]
                        store_f32(c, int64(token) * N + feature, x * lane_row_scales[i])

    return w4a8_ldmatrix


def launch(
    fmt: Format, family: Family, shape: Shape, weights: tuple, activations: tuple, out: Any
) -> Launch:
    grid = (ceil_div(shape.n, BLOCK_N), ceil_div(shape.m, BLOCK_M))
    args = (*weights, *activations, out, ceil_div(shape.k, TILE_K))
    return Launch(kernel(fmt.name), grid, (THREADS,), args)


STEP = Step(
    number=8,
    name="step08_ldmatrix",
    title="warp tiles: ldmatrix, conflict-free stages, fragments one block ahead",
    branch="int8",
    families=("A8",),
    parents={"A8": 7},
    unit={"A8": "tensor_int8"},
    pack=tiles,
    activations={"A8": q8_1_mma_order},
    launch=launch,
    min_cc=(8, 0),
    idea=("ldmatrix_x4", "mma"),
    contains={"A8": ("IMMA.16832", "LDSM.16.M88.4", "LDG.E.128", "STS.128", "BAR.SYNC")},
    forbids={"A8": ("IDP", "LDGSTS")},
)
