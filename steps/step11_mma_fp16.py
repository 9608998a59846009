"""Step 11: W4A16 on tensor cores - float16 weights made in registers, one sum over all of K.

What is new
    A weight becomes float16 in registers, its scale and offset included, and the tensor core adds
    up all of K in float32 by itself. Nothing is converted: the bits of an integer n < 2048, read as
    a float16, are the number n 2^-24. So a mask and one multiply-add make two weights of a word
    (steps.blocks.halves); d' is d divided by 2^-24 and by the row's scale, a power of two by which
    the sums are multiplied at the end. In Q4_0, whose code c means c - 8:

        low nibbles of a word      |  k = 2t  |  2t + 8  |  2t + 1  |  2t + 9  |   bytes 0 to 3
        & 0x000F000F ^ 0x00080008  |      code of 2t     |    code of 2t + 1   |   LOP3
        * d' - 8 * 2^-24 d'        |     weight of 2t    |   weight of 2t + 1  |   HFMA2: a0

    A is float16 as the caller has it, row-major, and ldmatrix wants 16-byte *chunks* of eight
    tokens at one place along K. In plain rows of 128 bytes these lie in the same four banks, and
    take eight cycles instead of one. So chunk c of row r is stored at place c ^ (r & 7), which is
    called a *swizzle*: eight chunks of a row lie in all 32 banks, and so do eight of a column.

                 bytes 0   16    32    48    64    80    96    112
        token 0     |  0  |  1  |  2  |  3  |  4  |  5  |  6  |  7  |   chunk: 8 neighbours along K
        token 1     |  1  |  0  |  3  |  2  |  5  |  4  |  7  |  6  |
        token 2     |  2  |  3  |  0  |  1  |  6  |  7  |  4  |  5  |
          ...
        token 7     |  7  |  6  |  5  |  4  |  3  |  2  |  1  |  0  |
        token 8     |  0  |  1  |  ...

    A warp has 64 features x 64 tokens of the tile and one half of a stage's K:

                              K 0 .. 63   K 64 .. 127
        features  0 .. 63       warp 0       warp 2
        features 64 .. 127      warp 1       warp 3

    So an A fragment (weights) meets eight B fragments (tokens), and a B fragment four of A. The two
    sums of an output meet in shared memory at the end.
Why it should help
    Steps 7 to 10 pay three instructions for each sum every 32 K. Here a warp has 32 HMMA for 16 K,
    214 cycles of the tensor core, and 70 other instructions (5 bits: 95): a scheduler issues in
    half of its cycles. (512,4096,4096) are 256 tiles, two an SM, which together take 1715 cycles a
    stage, 54900 for K, if tensor cores never wait. Eight warps hide few latencies, so they will
    wait for 35 % of the time: 84500 cycles at 1.76 GHz are 48 us, 1.2x step 9.
    And nothing is lost but the rounding of A, W and C to float16: NMSE 7e-8 to 9e-8, a
    four-hundredth of what Q8_1 costs.
What it costs
    Some 240 registers, eight warps an SM. A takes 1.6 times the bytes of Q8_1. Blocks whose scale
    is far below the largest of their row lose precision (qformats.repack.tiles says how much).
Machine code
    HMMA.16816.F32, HFMA2, LOP3, LDSM and LDGSTS in the loop, and no I2FP, no FFMA.
Prerequisites
    Steps 8 (ldmatrix, fragments loaded ahead) and 9 (cp.async, a ring of stages). Taught here:
    steps.blocks.halves (packed weights as float16).
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from numba import cuda, float32, int32, int64, uint8, uint32

from qformats import FORMATS, Format
from qformats.repack import TILE_GROUP, TILE_K, TILE_ROWS, tiles
from steps.blocks.halves import half_weights
from steps.contract import Family, Launch, Shape, Step, ceil_div, plain_rows, shared_memory
from steps.instructions import (
    cp_async_16,
    cp_async_16_zfill,
    cp_async_commit,
    cp_async_wait,
    floats_to_halves,
    ldmatrix_x4,
    load_f32x4,
    mma_m16n8k16_f16,
    store_f32,
    store_u16,
    store_u32x2,
)

BLOCK_M: Final = 64  # tokens of a tile of C, at most
BLOCK_N: Final = TILE_GROUP * TILE_ROWS  # features: 128, a group of packed tiles
BLOCK_K: Final = TILE_K  # of a stage: 128
WARP_N: Final = 64  # features of a warp
ROW_TILES: Final = WARP_N // TILE_ROWS  # packed tiles of a warp: 4
THREADS: Final = 128  # four warps: two along the features, two along K
BLOCKS_PER_SM: Final = 2  # 128 sums a thread leave registers for no more
MOST_STAGES: Final = 4  # more hide nothing further

CHUNK: Final = 16  # bytes that a thread copies at once: 8 float16
A_ROW: Final = 128  # bytes: 64 K of a token, the width of the swizzle
# Floats of a token in shared memory at the end. A warp stores 8 features of tokens 0, 2, 4 and 6 at
# once: with four floats more than the tile has, these lie in all 32 banks.
C_ROW: Final = BLOCK_N + 4


@cache
def kernel(format_name: str, block_m: int, most_bytes: int) -> tuple[Any, int]:
    """(the kernel for tiles of `block_m` tokens, a multiple of 16, with a ring of `most_bytes`, but
    of two stages at least; its bytes of shared memory)."""
    weights = half_weights(format_name)
    tile_bytes, load, fragment = weights.tile_bytes, weights.load, weights.fragment
    # Words that a lane loads of half a packed tile: codes, fifth bits, scales, minima
    n_words = FORMATS[format_name].bits + (4 if format_name in ("q4_1", "q5_1") else 2)
    # A stage: K 0..63 of A, K 64..127 of A, then the packed tiles in one piece, as they lie in W
    a_half_bytes, w_bytes = A_ROW * block_m, TILE_GROUP * tile_bytes  # of 64 K; of 128 K
    stage_bytes = 2 * a_half_bytes + w_bytes
    # Two at least: one is multiplied while the other is copied. If these take more than
    # most_bytes, an SM holds one thread block
    stages = max(2, min(MOST_STAGES, most_bytes // stage_bytes))
    last_stage_at = (stages - 1) * stage_bytes
    token_groups = block_m // 8  # of 8 tokens, the columns of an mma
    n_acc = 4 * ROW_TILES * token_groups  # registers for sums
    n_b = 2 * token_groups  # registers for B fragments of 16 K
    shared_bytes = max(stages * stage_bytes, 2 * block_m * C_ROW * 4)
    wait_for_first, wait_for_next = cp_async_wait(stages - 1), cp_async_wait(stages - 2)

    @cuda.jit(device=True, forceinline=True)
    def copy_stage(shared, stage_at, a, w, m0, step, steps, t):
        """Issue the copies of 128 K, step `step` of `steps`, to the stage at byte `stage_at`, and
        close them into a group. Beyond the last step a group is empty: waits count groups."""
        if step < steps:
            # --- A: 16 threads copy 256 bytes of a token, 8 tokens at a time. Beyond M and K they
            # write zeros: weights beyond K are zeros too, but 0 * NaN would be NaN
            M, K = int32(a.shape[0]), int32(a.shape[1])
            row, chunk = int32(t >> 4), int32(t & 15)
            k = int32(step * BLOCK_K + 8 * chunk)
            destination = stage_at + (chunk >> 3) * a_half_bytes + row * A_ROW
            destination += ((chunk ^ row) & 7) * CHUNK
            # Tokens inside of A, from this thread's first one on
            tokens_left = int32(M - m0 - row) if k < K else int32(0)
            a_at, stride = int64(m0 + row) * K + k, int64(THREADS // 16) * K
            for i in range(0, block_m, THREADS // 16):
                size = uint32(CHUNK if int32(i) < tokens_left else 0)  # bytes to read, else zeros
                cp_async_16_zfill(shared, destination + i * A_ROW, a, a_at, size)
                a_at += stride
            # --- W: one piece of memory. The first test, of constants, saves the second
            w_at = int64(cuda.blockIdx.x * steps + step) * w_bytes
            for i in range(0, w_bytes, THREADS * CHUNK):
                if i + THREADS * CHUNK <= w_bytes or t * CHUNK < w_bytes - i:
                    byte = i + t * CHUNK
                    cp_async_16(shared, stage_at + 2 * a_half_bytes + byte, w, w_at + byte)
        cp_async_commit()

    @cuda.jit(device=True, forceinline=True)
    def load_tokens(b, shared, chunk_at, k16):
        """The B fragments of 16 K, k16 = 0 to 3 of 64. `chunk_at`: the byte of this lane's chunk
        for k16 = 0, which is chunk 0 or 1 of its row r, at place (0 or 1) ^ (r & 7). Chunk 2 k16
        or 2 k16 + 1 lies 2 k16 places from there by XOR, and a place has 16 bytes."""
        for j in range(0, n_b, 4):
            x = ldmatrix_x4(shared, (chunk_at ^ (32 * k16)) + 4 * j * A_ROW)
            b[j], b[j + 1], b[j + 2], b[j + 3] = x

    @cuda.jit(device=True, forceinline=True)
    def load_weights(words, shared, tile_at, lane, half):
        """The words of 64 K of the warp's packed tiles, which begin at byte `tile_at`."""
        for i in range(ROW_TILES):
            x = load(shared, tile_at + i * tile_bytes, lane, half)
            for j in range(n_words):
                words[i, j] = x[j]

    @cuda.jit(device=True, forceinline=True)
    def multiply(acc, words, b, k16):
        """acc += 16 K: 64 features times the tokens of the B fragments."""
        for i in range(ROW_TILES):
            # --- codes -> float16 -> tensor cores
            a0, a1, a2, a3 = fragment(words[i], k16)
            for j in range(token_groups):
                r = 4 * (i * token_groups + j)
                x0, x1, x2, x3 = acc[r], acc[r + 1], acc[r + 2], acc[r + 3]
                x = mma_m16n8k16_f16(a0, a1, a2, a3, b[2 * j], b[2 * j + 1], x0, x1, x2, x3)
                acc[r], acc[r + 1], acc[r + 2], acc[r + 3] = x

    @cuda.jit(launch_bounds=(THREADS, BLOCKS_PER_SM))
    def w4a16_mma(w, row_scales, a, c):
        """c[M, N] = a[M, K] @ dequantize(w)[N, K]^T; w and row_scales of qformats.repack.tiles. a
        and c are float16 and begin at multiples of 16 bytes; K is a multiple of 32."""
        shared = cuda.shared.array(0, uint8, alignment=1024)  # all of the dynamic shared memory
        sums = cuda.shared.array(0, float32, alignment=1024)  # the same memory, when K is done
        acc = cuda.local.array(n_acc, float32)
        words = cuda.local.array((ROW_TILES, n_words), uint32)
        b_even, b_odd = cuda.local.array(n_b, uint32), cuda.local.array(n_b, uint32)
        t = int32(cuda.threadIdx.x)
        warp, lane = t >> 5, t & 31
        half, first_n = warp >> 1, (warp & 1) * WARP_N  # of K; the warp's first feature
        n0, m0 = int32(cuda.blockIdx.x * BLOCK_N), int32(cuda.blockIdx.y * block_m)
        steps = int32((int32(a.shape[1]) + (BLOCK_K - 1)) // BLOCK_K)
        # Where in a stage this lane reads. Lane 8i + r addresses row r of ldmatrix's matrix i:
        # chunk i & 1, tokens from 8 (i >> 1) on
        tile_at = 2 * a_half_bytes + (first_n // TILE_ROWS) * tile_bytes
        chunk_at = half * a_half_bytes + ((lane >> 4) * 8 + (lane & 7)) * A_ROW
        chunk_at += ((lane >> 3 & 1) ^ (lane & 7)) * CHUNK
        for i in range(n_acc):
            acc[i] = 0

        # --- issue the copies of all stages
        for step in range(stages):
            copy_stage(shared, step * stage_bytes, a, w, m0, step, steps, t)

        # --- wait for the first stage, load its first fragments
        wait_for_first()
        cuda.syncthreads()
        stage_at = int32(0)  # its first byte in the ring
        load_weights(words, shared, tile_at, lane, half)
        load_tokens(b_even, shared, chunk_at, 0)
        for step in range(steps):
            # --- multiply, while the tokens of the next 16 K are loaded
            load_tokens(b_odd, shared, stage_at + chunk_at, 1)
            multiply(acc, words, b_even, 0)
            load_tokens(b_even, shared, stage_at + chunk_at, 2)
            multiply(acc, words, b_odd, 1)
            load_tokens(b_odd, shared, stage_at + chunk_at, 3)
            multiply(acc, words, b_even, 2)

            # --- wait for the next stage, and until all have read this one: then refill it
            wait_for_next()  # what this thread has copied: all but its newest stages - 2 groups
            cuda.syncthreads()
            copy_stage(shared, stage_at, a, w, m0, int32(step + stages), steps, t)
            stage_at = int32(stage_at + stage_bytes if stage_at < last_stage_at else 0)

            # --- multiply the last 16 K, while the first fragments of the next stage are loaded
            load_tokens(b_even, shared, stage_at + chunk_at, 0)
            multiply(acc, words, b_odd, 3)
            load_weights(words, shared, stage_at + tile_at, lane, half)

        # --- registers -> shared: the sums of each half of K, [half][token][feature]
        cuda.syncthreads()  # nobody reads the ring any more
        first = (half * block_m + 2 * (lane & 3)) * C_ROW + first_n + (lane >> 2)
        for i in range(ROW_TILES):
            for j in range(token_groups):
                r, place = 4 * (i * token_groups + j), first + 8 * j * C_ROW + 16 * i
                store_f32(sums, place, acc[r])
                store_f32(sums, place + C_ROW, acc[r + 1])
                store_f32(sums, place + 8, acc[r + 2])
                store_f32(sums, place + C_ROW + 8, acc[r + 3])
        cuda.syncthreads()

        # --- shared -> global: a warp adds up the 128 features of a token, four a lane
        M, N = int32(c.shape[0]), int32(c.shape[1])
        n = int32(n0 + 4 * lane)
        scale = load_f32x4(row_scales, n)  # row_scales go on to the end of the tile
        for i in range(0, block_m, THREADS // 32):
            m = int32(m0 + warp + i)
            if m < M and n < N:
                lower = load_f32x4(sums, (warp + i) * C_ROW + 4 * lane)
                upper = load_f32x4(sums, (warp + i + block_m) * C_ROW + 4 * lane)
                s0, s1 = (lower[0] + upper[0]) * scale[0], (lower[1] + upper[1]) * scale[1]
                s2, s3 = (lower[2] + upper[2]) * scale[2], (lower[3] + upper[3]) * scale[3]
                pair0, pair1 = floats_to_halves(s0, s1), floats_to_halves(s2, s3)
                if N % 4 == 0:
                    store_u32x2(c, int64(m) * N + n, pair0, pair1)
                else:  # rows of C do not begin at multiples of 8 bytes
                    for j in range(4):
                        if n + j < N:
                            pair = pair1 if j > 1 else pair0
                            store_u16(c, int64(m) * N + (n + j), pair >> uint32(16 * (j % 2)))

    return w4a16_mma, shared_bytes


def launch(
    fmt: Format, family: Family, shape: Shape, weights: tuple, activations: tuple, out: Any
) -> Launch:
    block_m = min(BLOCK_M, ceil_div(shape.m, 16) * 16)  # 16, 32 or 48 where tokens are few
    # An SM has 1 KB more than it can give one thread block, and keeps 1 KB for each that it holds
    most_bytes = (shared_memory() + 1024) // BLOCKS_PER_SM - 1024
    run, shared_bytes = kernel(fmt.name, block_m, most_bytes)
    # Neighbouring thread blocks share the tokens of a tile. The weights, which all rows of tiles
    # read, are small enough to stay in the L2.
    grid = (ceil_div(shape.n, BLOCK_N), ceil_div(shape.m, block_m))
    return Launch(run, grid, (THREADS,), (*weights, *activations, out), shared_bytes)


STEP = Step(
    number=11,
    name="step11_mma_fp16",
    title="W4A16 on tensor cores: float16 weights made in registers",
    branch="float16",
    families=("A16",),
    parents={"A16": 9},
    unit={"A16": "tensor_fp16"},
    pack=tiles,
    activations={"A16": plain_rows},
    launch=launch,
    inputs=("float16",),
    outputs=("float16",),
    min_cc=(8, 0),
    idea=("mma_m16n8k16_f16", "fragment"),
    contains={"A16": ("HMMA.16816.F32", "HFMA2", "LDGSTS.E.BYPASS.128", "LDSM.16.M88.4")},
    forbids={"A16": ("IMMA", "I2FP", "FFMA")},
)
