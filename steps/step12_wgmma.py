"""Step 12: warpgroup MMA - weights from registers, activations straight from shared memory.

What is new
    `wgmma`: the four warps of a *warpgroup* multiply together, 64 features x 16 K of weights in
    their registers by 16 K x all tokens of the tile in shared memory. A *matrix descriptor* says
    where the activations lie: address, distance from eight rows to the next eight, 128-byte
    swizzle. So no warp loads fragments of activations any more: no ldmatrix. Lane 4g + t of warp w,
    tokens in groups j of eight:

                          weights, 64 features x 16 K        accumulators, 64 features x tokens
                          k = 2t, 2t + 1    2t + 8, 2t + 9   token 8j + 2t    8j + 2t + 1
        feature 16w + g         a0                a2          acc[4j]          acc[4j + 1]
        feature 16w + g + 8     a1                a3          acc[4j + 2]      acc[4j + 3]

    These are the fragments of mma.m16n8k16, those of warp w below those of warp w - 1. So weights
    become float16 as in step 11, and each of the eight warps has one packed tile of 16 features.

    wgmma returns at once. While the tensor cores multiply one half of a stage, all threads issue
    the copies of a later stage and unpack the other half:

        tensor cores              [half 0: 256 cycles][half 1: 256 cycles]               [half 0 ..
        warpgroup 0   [unpack 0]wgmma[copies][unpack 1]wgmma     wait    |barrier[unpack 0]wgmma ..
        warpgroup 1   [unpack 0]wgmma[copies][unpack 1]wgmma     wait    |barrier[unpack 0]wgmma ..
Why it should help
    mma.sync reaches two thirds of what Hopper's tensor cores can do. 64 tokens x 128 features x
    128 K are 512 cycles of wgmma. Between stages the tensor cores wait for the barrier and the
    first unpacked weights, some 480 cycles more; the SM's second thread block multiplies in that
    time. A scheduler has two warps of each block, and a warp issues 210 instructions a stage (5
    bits: 250), so a stage of both blocks takes it 840 to 1000 cycles. The L2, with 40 bytes a
    cycle, takes 1280 and is the limit. (512,4096,4096) are 32 of these, and 5000 cycles for the
    ends of a tile: 46000 cycles, 26 us at 1.76 GHz. Such a count knows no latencies: step 11 takes
    half as long again as its count. Two fifths are added here: expect 36 us, 1.3x.
What it costs
    wgmma exists on compute capability 9.0 only. Unlike in step 10, blocks do not share a tile's K:
    few tokens leave SMs idle.
Machine code
    HGMMA with weights in registers, HFMA2, LOP3, LDGSTS in the loop; STSM at the end; no HMMA, no
    LDSM.
Prerequisites
    Steps 9 (cp.async, a ring of stages) and 11 (swizzle; steps.blocks.halves: float16 weights).
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from numba import cuda, float32, int32, int64, uint8, uint32

from qformats import Format
from qformats.repack import TILE_GROUP, TILE_K, TILE_ROWS, tiles
from steps.blocks.halves import half_weights
from steps.contract import Family, Launch, Shape, Step, ceil_div, plain_rows
from steps.instructions import (
    cp_async_16,
    cp_async_16_zfill,
    cp_async_commit,
    cp_async_wait,
    fence_proxy_async,
    floats_to_halves,
    load_f32,
    load_u32x4,
    shfl,
    spread,
    stmatrix_x4_trans,
    store_u16,
    store_u32x4,
    swizzled_descriptor,
    wgmma_commit,
    wgmma_f16,
    wgmma_fence,
    wgmma_wait,
    zeros_f32,
)

BLOCK_M: Final = 64  # tokens of a tile of C, at most
BLOCK_N: Final = TILE_GROUP * TILE_ROWS  # features: 128, a packed tile for each warp
BLOCK_K: Final = TILE_K  # of a stage: 128
THREADS: Final = 256  # two warpgroups, 64 features each
BLOCKS_PER_SM: Final = 2  # one multiplies while the other waits
# An SM of Hopper has 228 KB of shared memory, and keeps 1 KB of it for each thread block.
SHARED_BYTES: Final = 228 * 1024 // BLOCKS_PER_SM - 1024
MOST_STAGES: Final = 4  # more hide nothing further

CHUNK: Final = 16  # bytes that a thread copies at once: 8 float16
A_ROW: Final = 128  # bytes: 64 K of a token, the width of the swizzle
C_ROW: Final = 2 * BLOCK_N  # bytes of a token of the finished tile
NEXT_16_K: Final = 2  # of a descriptor, which counts chunks

# A stage of the ring, 128 K:
#
#     A, K  0 .. 63     a row of 128 bytes for each token, swizzled
#     A, K 64 .. 127    the same
#     W                 8 packed tiles, in one piece as they lie in memory (qformats.repack.tiles)
#
# Chunk c of row r lies at c ^ (r & 7). So the eight chunks of a token lie in all 32 banks, and so
# does one chunk of eight tokens, which the tensor cores read together:
#
#         bytes  0     16      32      48      64      80      96      112
#     token 0    | 0..7  | 8..15 |16..23 |24..31 |32..39 |40..47 |48..55 |56..63 |    K
#     token 1    | 8..15 | 0..7  |24..31 |16..23 |40..47 |32..39 |56..63 |48..55 |
#     token 2    |16..23 |24..31 | 0..7  | 8..15 |48..55 |56..63 |32..39 |40..47 |
#       ...


@cache
def kernel(format_name: str, block_m: int) -> tuple[Any, int]:
    """(the kernel for tiles of `block_m` tokens, a multiple of 16; its bytes of shared memory)."""
    weights = half_weights(format_name)
    tile_bytes, load, fragment = weights.tile_bytes, weights.load, weights.fragment
    a_half_bytes, w_bytes = A_ROW * block_m, TILE_GROUP * tile_bytes  # of 64 K; of 128 K
    stage_bytes = 2 * a_half_bytes + w_bytes
    assert stage_bytes % 1024 == 0, "the swizzle repeats every 1024 bytes, counted from address 0"
    stages = min(MOST_STAGES, SHARED_BYTES // stage_bytes)
    assert stages >= 2, "one is multiplied while others are copied"
    last_stage_at = (stages - 1) * stage_bytes
    n_acc = block_m // 2  # of a thread: 64 features x block_m tokens by 128 threads
    no_sums = zeros_f32(n_acc)
    wait_for_stage, wait_for_products = cp_async_wait(stages - 2), wgmma_wait(0)

    @cuda.jit(device=True, forceinline=True)
    def copy_stage(shared, stage_at, a, w, m0, step, steps, t):
        """Issue the copies of 128 K, step `step` of `steps`, to the stage at byte `stage_at`, and
        close them into a group. Beyond the last step a group is empty: waits count groups."""
        if step < steps:
            # --- A: 16 threads copy 256 bytes of a token, 16 tokens at a time. Beyond M and K they
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
    def multiply(acc, shared, tile_at, lane, half, descriptor):
        """acc += 64 K: half 0 or 1 of the packed tile at byte `tile_at`, times the
        activations that the descriptor points to."""
        # --- shared -> registers, codes -> float16
        words = load(shared, tile_at, lane, half)
        w0, w1 = fragment(words, 0), fragment(words, 1)
        w2, w3 = fragment(words, 2), fragment(words, 3)

        # --- registers and shared -> tensor cores: 16 K each, closed into a group
        wgmma_fence()  # what has been written to the registers may be read
        acc = wgmma_f16(acc, w0[0], w0[1], w0[2], w0[3], descriptor, 1)
        acc = wgmma_f16(acc, w1[0], w1[1], w1[2], w1[3], descriptor + NEXT_16_K, 1)
        acc = wgmma_f16(acc, w2[0], w2[1], w2[2], w2[3], descriptor + 2 * NEXT_16_K, 1)
        acc = wgmma_f16(acc, w3[0], w3[1], w3[2], w3[3], descriptor + 3 * NEXT_16_K, 1)
        wgmma_commit()
        return acc

    @cuda.jit(launch_bounds=(THREADS, BLOCKS_PER_SM))
    def w4a16_wgmma(w, row_scales, a, c):
        """c[M, N] = a[M, K] @ dequantize(w)[N, K]^T; w and row_scales of qformats.repack.tiles. a
        and c are float16 and begin at multiples of 16 bytes; K is a multiple of 32."""
        shared = cuda.shared.array(0, uint8, alignment=1024)  # all of the dynamic shared memory
        t = int32(cuda.threadIdx.x)
        # shuffled, so that the compiler knows it is one value for the whole warp
        warp, lane = shfl(int32(t >> 5), 0), int32(t & 31)
        n0, m0 = int32(cuda.blockIdx.x * BLOCK_N), int32(cuda.blockIdx.y * block_m)
        steps = int32((int32(a.shape[1]) + (BLOCK_K - 1)) // BLOCK_K)
        tile_at = 2 * a_half_bytes + warp * tile_bytes  # the warp's packed tile in a stage

        # --- issue the copies of all stages but one
        for step in range(stages - 1):
            copy_stage(shared, step * stage_bytes, a, w, m0, step, steps, t)

        # --- load what the end needs: the scales of this lane's rows g and g + 8
        feature = int32(n0 + 16 * warp + (lane >> 2))  # row_scales go on to the end of the tile
        scale_g, scale_g8 = load_f32(row_scales, feature), load_f32(row_scales, feature + 8)

        acc = no_sums()
        stage_at, previous_at = int32(0), int32(last_stage_at)  # first bytes, in the ring
        for step in range(steps):
            # --- wait until the stage is there
            wait_for_stage()  # what this thread has copied: all but its newest stages - 2 groups
            fence_proxy_async()  # wgmma reads shared memory by another path, the async proxy
            cuda.syncthreads()  # what all have copied; and all have multiplied the previous stage

            # --- multiply its first half
            descriptor = swizzled_descriptor(shared, stage_at)
            acc = multiply(acc, shared, stage_at + tile_at, lane, 0, descriptor)

            # --- refill the previous stage, while the tensor cores multiply
            copy_stage(shared, previous_at, a, w, m0, int32(step + (stages - 1)), steps, t)

            # --- multiply the second half
            descriptor += a_half_bytes // CHUNK
            acc = multiply(acc, shared, stage_at + tile_at, lane, 1, descriptor)

            # --- wait for the tensor cores: then the stage may be filled again
            acc = wait_for_products(acc)
            previous_at = stage_at
            stage_at = int32(stage_at + stage_bytes if stage_at < last_stage_at else 0)

        # --- registers -> shared: sums times row scales, as float16, transposed. A lane has two
        # features of many tokens, and C has the features of a token side by side. stmatrix stores
        # four matrices of 8 x 8, and lane 8i + r says where row r of matrix i goes: matrices 0 and
        # 1 are features 0..7 and 8..15 of the warp for eight tokens, 2 and 3 for the next eight
        cuda.syncthreads()  # nobody reads the ring any more: from here on it holds the tile of C
        sums = cuda.local.array(n_acc, float32)
        spread(sums, acc)  # a loop can index an array, not a tuple; it stays in registers
        token, chunk = (lane >> 4) * 8 + (lane & 7), 2 * warp + (lane >> 3 & 1)
        destination = token * C_ROW + (chunk ^ (token & 7)) * CHUNK  # swizzled, like A
        for j in range(0, block_m, 16):
            i = j // 2
            stmatrix_x4_trans(
                shared,
                destination + j * C_ROW,
                floats_to_halves(sums[i] * scale_g, sums[i + 1] * scale_g),
                floats_to_halves(sums[i + 2] * scale_g8, sums[i + 3] * scale_g8),
                floats_to_halves(sums[i + 4] * scale_g, sums[i + 5] * scale_g),
                floats_to_halves(sums[i + 6] * scale_g8, sums[i + 7] * scale_g8),
            )
        cuda.syncthreads()

        # --- shared -> global: 16 threads store 256 bytes of a token, 16 tokens at a time
        M, N = int32(c.shape[0]), int32(c.shape[1])
        out_row, out_chunk = int32(t >> 4), int32(t & 15)
        n = int32(n0 + 8 * out_chunk)
        source = out_row * C_ROW + (out_chunk ^ (out_row & 7)) * CHUNK
        for i in range(0, block_m, THREADS // 16):
            m = int32(m0 + out_row + i)
            if m < M and n < N:
                eight = load_u32x4(shared, source + i * C_ROW)  # float16
                if N % 8 == 0:
                    store_u32x4(c, int64(m) * N + n, eight[0], eight[1], eight[2], eight[3])
                else:  # rows of C do not begin at multiples of 16 bytes
                    for j in range(8):
                        if n + j < N:
                            value = eight[j // 2] >> uint32(16 * (j % 2))
                            store_u16(c, int64(m) * N + (n + j), value)

    return w4a16_wgmma, stages * stage_bytes


def launch(
    fmt: Format, family: Family, shape: Shape, weights: tuple, activations: tuple, out: Any
) -> Launch:
    block_m = min(BLOCK_M, ceil_div(shape.m, 16) * 16)  # 16, 32 or 48 where tokens are few
    run, shared_bytes = kernel(fmt.name, block_m)
    # Neighbouring thread blocks share the tokens of a tile. The weights, which all rows of tiles
    # read, are small enough to stay in the L2.
    grid = (ceil_div(shape.n, BLOCK_N), ceil_div(shape.m, block_m))
    return Launch(run, grid, (THREADS,), (*weights, *activations, out), shared_bytes)


STEP = Step(
    number=12,
    name="step12_wgmma",
    title="W4A16 with wgmma: weights in registers, tokens in shared memory",
    branch="float16",
    families=("A16",),
    parents={"A16": 11},
    unit={"A16": "tensor_fp16"},
    pack=tiles,
    activations={"A16": plain_rows},
    launch=launch,
    inputs=("float16",),
    outputs=("float16",),
    min_cc=(9, 0),
    max_cc=(9, 0),  # others have no wgmma, later ones neither
    idea=("wgmma_f16", "swizzled_descriptor"),
    contains={"A16": ("HGMMA", "HFMA2", "LDGSTS.E.BYPASS.128", "STSM")},
    forbids={"A16": ("IMMA", "HMMA", "LDSM", "UBLKCP", "SYNCS")},
)
