"""Step 3: shared-memory tiles - fetch an element once for 32 outputs.

What is new
    A thread block stages a 32 x 32 tile of A and of W (one block of 32 along K) in shared memory;
    each of its 1024 threads stages one element of each and then reads 64 from the tile. Weights are
    decoded on the way in: to float32 (W4A16) or to int8 (W4A8).
Why it should help
    A weight is fetched and decoded once for 32 tokens, and the gathers that bound steps 1 and 2
    become coalesced rows. What remains is two shared loads for each multiply-add. Napkin: shared
    memory serves 32 lanes a cycle and SM, so 16 multiply-adds a cycle: 132 x 1.9 GHz x 16 x 2 = 8
    TFLOPS.
What it costs
    Two barriers for every 32 of K, and 1024 threads whose last tile may be mostly empty. Rows of a
    tile are padded (33 floats, 36 bytes): 32 lanes reading a column of unpadded rows would meet in
    one bank; with an odd number of words from row to row each lane has a bank of its own.
Machine code
    STS and BAR.SYNC appear; LDS stands beside every FFMA (W4A16). In W4A8 ptxas notices four byte
    products in a row and packs them into IDP.4A by itself, at the price of 6 PRMT and 8 LDS.U8
    each.
Prerequisites
    Steps 1 and 2; shared memory and barriers.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from numba import cuda, float32, int8, int32

from qformats import BLOCK, Format
from qformats.repack import as_bytes
from steps.blocks.codes import device_format
from steps.blocks.q8_1 import BLOCK_Q8_1, q8_1_blocks
from steps.contract import Family, Launch, Shape, Step, ceil_div, plain_rows
from steps.instructions import half_to_float, load_u16

BLOCKS_PER_SM: Final = (
    # caps a thread at 32 registers, so that one block multiplies while the other stages
    2
)
TILE: Final = 32  # tokens and features of a tile: one warp stages one row, 1024 threads the tile
ROW_F32: Final = BLOCK + 1  # floats from one tile row to the next: odd, so a column has 32 banks
ROW_I8: Final = BLOCK + 4  # bytes from one tile row to the next: 9 words, odd for the same reason
QA: Final = 4  # a Q8_1 block: f16 d at byte 0, f16 s at byte 2, then the 32 codes
assert TILE * TILE <= 1024, "a thread block holds at most 1024 threads"
assert TILE == BLOCK, "a warp stages one block of a row, and a row of the tile, with one lane each"


@cache
def kernel_a16(fmt: Format) -> Any:
    fields = device_format(fmt.name)
    code, scale, offset = fields.code, fields.scale, fields.offset
    block_bytes = fmt.block_bytes

    @cuda.jit(launch_bounds=(TILE * TILE, BLOCKS_PER_SM))
    def w4a16_tiled(w, a, c):
        """c[M, N] = a[M, K] @ dequantize(w)[N, K]^T"""
        tile_a = cuda.shared.array((TILE, ROW_F32), float32)
        tile_w = cuda.shared.array((TILE, ROW_F32), float32)
        tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
        m0, n0 = cuda.blockIdx.y * TILE, cuda.blockIdx.x * TILE
        blocks_k = a.shape[1] // BLOCK
        acc = float32(0)
        for b in range(blocks_k):
            # --- global -> shared: row ty of each tile, element tx of the block, or 0 where A or W
            # has no such row; then wait until all threads have staged theirs
            x = float32(0)
            if m0 + ty < c.shape[0]:
                x = a[m0 + ty, b * BLOCK + tx]
            tile_a[ty, tx] = x
            v = float32(0)
            if n0 + ty < c.shape[1]:
                at = ((n0 + ty) * blocks_k + b) * block_bytes
                v = scale(w, at) * float32(code(w, at, tx)) + offset(w, at)
            tile_w[ty, tx] = v
            cuda.syncthreads()

            # --- multiply: token ty, feature tx; a whole warp rests where there is no such token.
            # Then wait until all have read the tiles: the next turn overwrites them
            if m0 + ty < c.shape[0]:
                for j in range(BLOCK):
                    acc += tile_a[ty, j] * tile_w[tx, j]
            cuda.syncthreads()

        # --- registers -> global: token ty, feature tx, where C has them
        if m0 + ty < c.shape[0] and n0 + tx < c.shape[1]:
            c[m0 + ty, n0 + tx] = acc

    return w4a16_tiled


@cache
def kernel_a8(fmt: Format) -> Any:
    fields = device_format(fmt.name)
    code, scale, offset = fields.code, fields.scale, fields.offset
    block_bytes = fmt.block_bytes

    @cuda.jit(launch_bounds=(TILE * TILE, BLOCKS_PER_SM))
    def w4a8_tiled(w, a, c, blocks_k):
        """c[M, N] = a @ dequantize(w)[N, K]^T; a holds the Q8_1 blocks of row m in a row."""
        tile_a = cuda.shared.array((TILE, ROW_I8), int8)
        tile_w = cuda.shared.array((TILE, ROW_I8), int8)
        scale_a = cuda.shared.array(TILE, float32)
        sum_a = cuda.shared.array(TILE, float32)
        scale_w = cuda.shared.array(TILE, float32)
        offset_w = cuda.shared.array(TILE, float32)
        tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
        m0, n0 = cuda.blockIdx.y * TILE, cuda.blockIdx.x * TILE
        acc = float32(0)
        for b in range(blocks_k):
            # --- A, global -> shared: row ty of the tile, element tx of the block; one thread of a
            # row also stages the scale and the sum of its token
            if m0 + ty < c.shape[0]:
                at = ((m0 + ty) * blocks_k + b) * BLOCK_Q8_1
                qa, da, s = a[at + QA + tx], load_u16(a, at), load_u16(a, at + 2)
                tile_a[ty, tx] = int8(qa)
                if tx == 0:  # (all lanes have loaded: one branch less to wait in)
                    scale_a[ty] = half_to_float(da)
                    sum_a[ty] = half_to_float(s)

            # --- W, global -> shared: the same with scale and offset of a feature; then wait until
            # all threads have staged theirs
            if n0 + ty < c.shape[1]:
                at = ((n0 + ty) * blocks_k + b) * block_bytes
                q, d, z = code(w, at, tx), scale(w, at), offset(w, at)
                tile_w[ty, tx] = int8(q)
                if tx == 0:
                    scale_w[ty] = d
                    offset_w[ty] = z
            cuda.syncthreads()

            # --- multiply: token ty, feature tx; a whole warp rests where there is no such token.
            # An integer sum, then its scales and the compensation; then wait until all have read
            if m0 + ty < c.shape[0]:  # (features past the edge are leftovers that are never stored)
                total = int32(0)
                for j in range(BLOCK):
                    total = int32(total + int32(tile_a[ty, j]) * int32(tile_w[tx, j]))
                acc += scale_w[tx] * scale_a[ty] * float32(total) + offset_w[tx] * sum_a[ty]
            cuda.syncthreads()

        # --- registers -> global: token ty, feature tx, where C has them
        if m0 + ty < c.shape[0] and n0 + tx < c.shape[1]:
            c[m0 + ty, n0 + tx] = acc

    return w4a8_tiled


def launch(
    fmt: Format, family: Family, shape: Shape, weights: tuple, activations: tuple, out: Any
) -> Launch:
    grid = (ceil_div(shape.n, TILE), ceil_div(shape.m, TILE))
    if family == "A16":
        return Launch(kernel_a16(fmt), grid, (TILE, TILE), (*weights, *activations, out))
    args = (*weights, *activations, out, shape.k // BLOCK)
    return Launch(kernel_a8(fmt), grid, (TILE, TILE), args)


STEP = Step(
    number=3,
    name="step03_shared_tiled",
    title="shared-memory tiles",
    branch="cuda_cores",
    families=("A16", "A8"),
    parents={"A16": 1, "A8": 2},
    unit={"A16": "fp32", "A8": "int32"},
    pack=as_bytes,
    activations={"A16": plain_rows, "A8": q8_1_blocks},
    launch=launch,
    idea=("cuda.shared.array", "cuda.syncthreads"),
    contains={
        "A16": ("STS", "LDS", "BAR.SYNC", "FFMA"),
        "A8": ("STS.U8", "LDS", "BAR.SYNC", "IMAD"),
    },
    forbids={"A16": ("IDP", "IMMA", "HMMA"), "A8": ("IMMA", "HMMA")},
    chosen_untuned=True,
)
