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
    In Q4_1 and Q5_1 step 7 adds m * s to each sum once a block. Here one tf32 mma adds those of all
    four blocks of a stage, for 16 features x 8 tokens (`add_minima`).
Why it should help
    Step 7 has 18.9 instructions for an IMMA, the IMMA and the 12 of its scaling among them. Wider
    loads, and fragments that are used twice, leave 15.8. An IMMA holds a scheduler for 6.8 cycles,
    any other instruction for one: 21.6 cycles instead of 24.7. In each stage a block also waits 900
    cycles for its loads and first fragments. The SM's other block hides that while it multiplies.
    Predicted: 64 us where step 7 takes 74, 1.16x.
What it costs
    250 registers a thread: two blocks of four warps on an SM. 18 to 26 KB for a stage.
Machine code
    LDSM; IMMA, I2FP, FMUL, FFMA and little else between the barriers; LDG and STS, no LDGSTS.
Prerequisites
    Step 7 (fragments, scales; `write_sums` is its end). Taught here: kernels.prefill.shared_stage
    (where things lie in a stage) and kernels.prefill.warp_tile (fragments, products and scales of a
    warp). From here on a layer's bias may be added to the sums (kernels.parts.epilogue.bias): skip
    it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from numba import cuda, float32, int32, uint8, uint32

from qformats import Format
from qformats.repack import CHUNK, TILE_K, tiles
from steps.blocks.q8_1 import q8_1_mma_order
from steps.contract import Family, Launch, Shape, Step, ceil_div
from steps.instructions import load_u32, load_u32x4, store_u32, store_u32x4
from steps.kernels.parts.epilogue.bias import bias_operand
from steps.kernels.parts.epilogue.mma import write_sums
from steps.kernels.parts.weights.codes import tile_format
from steps.kernels.prefill.shared_stage import BN, THREADS, stage_copies, stage_layout
from steps.kernels.prefill.warp_tile import A_WORDS, ROW_TILES, SCALE_WORDS, WARP_N, warp_tile

BM: Final = 64  # tokens of a tile, and of each of its four warps
COLUMNS: Final = BM // 8  # mma of a warp side by side along the tokens
SUMS: Final = 4 * ROW_TILES * COLUMNS  # of a thread: 64, a quarter of its registers
B_WORDS: Final = 2 * COLUMNS  # registers for the B fragments of a block, or for token scales
BLOCKS_PER_SM: Final = 2  # one multiplies while the other loads; more would need more registers


@cuda.jit(device=True, forceinline=True)
def copy_16(stage, to, array, offset):
    """16 bytes from flat array[offset] on to byte `to` of the stage, through four registers."""
    # --- global -> registers -> shared
    x = load_u32x4(array, offset)
    store_u32x4(stage, to, x[0], x[1], x[2], x[3])


@cuda.jit(device=True, forceinline=True)
def copy_4(stage, to, array, offset):
    """The same for 4 bytes: a scale or a sum, or the rest of the weights."""
    store_u32(stage, to, load_u32(array, offset))


@cache
def kernel(fmt: Format, of_bias: str | None) -> Any:
    """The kernel for a bias of dtype `of_bias` or none."""
    tile, stage_bytes = tile_format(fmt.name), stage_layout(fmt, BM).stage_bytes
    minimum, warp_bytes = tile.minimum, ROW_TILES * tile.tile_bytes
    first_source, next_source, copy_weights, copy_tokens = stage_copies(fmt, BM, copy_16, copy_4)
    wt = warp_tile(fmt, BM)
    load_weights, load_scales, load_tokens = wt.load_weights, wt.load_scales, wt.load_tokens
    load_token_scales, multiply, add_minima = wt.load_token_scales, wt.multiply, wt.add_minima
    write = write_sums(ROW_TILES, COLUMNS, of_bias)

    @cuda.jit(launch_bounds=(THREADS, BLOCKS_PER_SM))
    def w4a8_ldmatrix(w, row_scales, bias, qa, ds, c, steps):
        """c[M, N] = a @ dequantize(w)[N, K]^T; w, row_scales: qformats.repack.tiles,
        a: K-outermost."""
        stage = cuda.shared.array(stage_bytes, uint8, alignment=128)
        acc = cuda.local.array(SUMS, float32)
        a = cuda.local.array(A_WORDS, uint32)  # A fragments (weights) of two blocks of K
        scales = cuda.local.array(SCALE_WORDS, uint32)  # of the weights, for all four blocks
        b_even = cuda.local.array(B_WORDS, uint32)  # B fragments (tokens) of blocks 0 and 2
        b_odd = cuda.local.array(B_WORDS, uint32)  # of blocks 1 and 3
        token_scales = cuda.local.array(B_WORDS, float32)  # scales d of the tokens, of one block
        t, M = int32(cuda.threadIdx.x), int32(c.shape[0])
        warp, lane = t >> 5, t & 31
        m0, n0 = int32(cuda.blockIdx.y * BM), int32(cuda.blockIdx.x * BN)
        # --- where in a stage this lane reads. Of tokens: row r of matrix i, of lane 8i + r; the
        # chunk is i & 1, the tokens begin at 8 (i >> 1), and all BM tokens of a chunk come before
        # those of the next
        weights_at = warp * warp_bytes  # the two packed tiles of the warp
        row_at = ((lane >> 3 & 1) * BM + (lane >> 4) * 8 + (lane & 7)) * CHUNK
        scales_at = 16 * (lane & 3)  # d of the tokens of its sums
        source = first_source(t, m0, n0, 0, int32(steps), M)  # where it copies from: w, qa and ds
        for i in range(SUMS):
            acc[i] = 0
        for _ in range(int32(steps)):
            # --- global -> shared; every thread waits for its own loads before it stores them, and
            # then for all threads
            copy_weights(stage, 16 * t, w, source)
            copy_tokens(stage, 16 * t, qa, ds, source, M)
            cuda.syncthreads()

            # --- shared -> registers -> tensor cores: the next block's fragments are on their way
            # while one is multiplied. Registers for weights hold two blocks, those for token scales
            # one: load the next when these were multiplied
            load_weights(a, stage, weights_at, lane, 0)
            load_scales(scales, stage, weights_at, lane)
            load_tokens(b_even, stage, row_at, 0)
            load_token_scales(token_scales, stage, scales_at, 0)
            load_tokens(b_odd, stage, row_at, 1)
            multiply(acc, a, b_even, token_scales, scales, 0)
            if minimum:
                add_minima(acc, stage, 0, weights_at, lane)
            load_token_scales(token_scales, stage, scales_at, 1)
            load_tokens(b_even, stage, row_at, 2)
            multiply(acc, a, b_odd, token_scales, scales, 1)
            load_weights(a, stage, weights_at, lane, 1)
            load_token_scales(token_scales, stage, scales_at, 2)
            load_tokens(b_odd, stage, row_at, 3)
            multiply(acc, a, b_even, token_scales, scales, 2)
            load_token_scales(token_scales, stage, scales_at, 3)
            multiply(acc, a, b_odd, token_scales, scales, 3)
            cuda.syncthreads()
            source = next_source(source, M)
        write(c, m0, n0 + WARP_N * warp, lane, acc, row_scales, bias)

    return w4a8_ldmatrix


def launch(
    fmt: Format, family: Family, shape: Shape, weights: tuple, activations: tuple, out: Any
) -> Launch:
    grid = (ceil_div(shape.n, BN), ceil_div(shape.m, BM))
    of_bias, weights = bias_operand(weights)
    args = (*weights, *activations, out, ceil_div(shape.k, TILE_K))
    return Launch(kernel(fmt, of_bias), grid, (THREADS,), args)


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
    adds_bias=True,
    min_cc=(8, 0),
    contains={"A8": ("IMMA.16832", "LDSM.16.M88.4", "LDG.E.128", "STS.128", "BAR.SYNC")},
    forbids={"A8": ("IDP", "LDGSTS")},
)
