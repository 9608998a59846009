"""Step 17: few tokens - eight float16 tokens at once on tensor cores, and copies always in flight.

What is new
    Step 16 reads all of W for every token. Here a thread block has 32 rows of W and eight tokens,
    the columns of an mma, and its 16 warps share K: warp i takes tiles i, i + 16, i + 32 ... of 128
    K. Each has a *ring* of its own in shared memory, of two stages, which are called *slots* here.
    No barrier of the block stops a warp until K is done: a slot is refilled as soon as its warp has
    multiplied it, while the copies of the other slot go on.

        warp 0     tiles 0, 16, 32 ...     32 x 8 sums  ---.
        warp 1     tiles 1, 17, 33 ...     32 x 8 sums  ---+--->  C: 8 tokens x 32 features
        warp 15    tiles 15, 31, 47 ...    32 x 8 sums  ---'

    A slot has two fragment-packed tiles of 16 rows, which are one piece of memory, and the A that
    they meet. In shared memory A of all slots comes first, then the tiles of all slots:

        |8 tokens x 64 K|8 tokens x 64 K|   ...   |rows 0 .. 15 x 128 K|rows 16 .. 31 x 128 K|
              1024            1024                         1152                 1152 bytes (Q4_0)

    As in step 11 a mask and a multiply-add make two float16 weights in a lane's registers. A is
    float16 and multiplied as it is (step 16 has Q8_1), and each B fragment serves both tiles. One
    `ldmatrix` loads the fragments of 32 K: its matrix i is chunk i of the eight tokens. Of each 64
    K, chunk c of token r is stored at place c ^ r, so that the eight rows of a matrix are in
    different banks.
    Sums stay in the warps until K is done. Then each stores its 32 x 8, over the rings that nobody
    needs any more, and a thread adds up the 16 sums of one output.
Why it should help
    For eight tokens step 16 sends 264 MB of weights through the L2. That was expected to take 60 us
    (it takes more than twice as long, and the worklog says why). Here each weight is read once. To
    the 11 us of one token come 0.7 us for the sums of 16 warps. A byte of weights takes 1.7 times
    as many instructions as in step 16, which still issue while the next bytes arrive. Expect 11.7
    us, 5 times as fast. One token takes hardly less: the same weights are read.
What it costs
    A thread block reads all of A through the L2: 229 KB, beside 260 KB of weights.
Machine code
    LDGSTS of weights and A, LDSM, HFMA2 and HMMA; no BAR.SYNC in the loop.
Prerequisites
    Steps 16, 9 (cp.async, a ring) and 11 (float16 weights, ldmatrix and its swizzle).
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
    float_to_half,
    ldmatrix_x4,
    load_f32,
    mma_m16n8k16_f16,
    shfl,
    store_f32,
    store_u16,
)

LANES: Final = 32  # of a warp
WARPS: Final = 16  # of a thread block, side by side along K
THREADS: Final = LANES * WARPS
TOKENS: Final = 8  # of a thread block: the columns of an mma
ROW_TILES: Final = 2  # packed tiles side by side: what is read of A serves both
ROWS: Final = ROW_TILES * TILE_ROWS  # of W, of a thread block: 128 blocks for 4096 rows
SLOTS: Final = 2  # of a warp's ring
CHUNK: Final = 16  # bytes: 8 float16
A_ROW: Final = 128  # bytes: 64 K of a token, the width of the swizzle
A_HALF: Final = A_ROW * TOKENS  # bytes: 64 K of eight tokens
# Floats of a token at the end: with four more than it has features, the lanes of a warp store into
# all 32 banks
SUMS_ROW: Final = ROWS + 4


@cache
def kernel(format_name: str) -> tuple[Any, int]:
    """(the kernel, its bytes of shared memory)."""
    weights = half_weights(format_name)
    tile_bytes, load, fragment = weights.tile_bytes, weights.load, weights.fragment
    # Shared memory: A of all slots of all warps, then their packed tiles
    a_bytes, w_bytes = 2 * A_HALF, ROW_TILES * tile_bytes  # of a slot
    weights_begin = WARPS * SLOTS * a_bytes
    shared_bytes = WARPS * SLOTS * (a_bytes + w_bytes)
    group_bytes = TILE_GROUP * tile_bytes  # of 128 rows and 128 K of W
    n_acc = 4 * ROW_TILES
    warp_sums = TOKENS * SUMS_ROW
    wait_for_oldest = cp_async_wait(SLOTS - 1)

    @cuda.jit(device=True, forceinline=True)
    def copy_slot(shared, slot_a, slot_w, a, w, m0, source, k_tile, lane):
        """A warp issues the copies of 128 K to a slot: A to byte `slot_a` of shared memory, weights
        from byte `source` of w to byte `slot_w`."""
        # --- A: 16 lanes copy 256 bytes of a token. Beyond M and K they write zeros. Weights beyond
        # K are zeros, but what lies in shared memory may be NaN, and 0 * NaN is NaN
        M, K = int32(a.shape[0]), int32(a.shape[1])
        chunk = lane & 15
        k = int32(k_tile * TILE_K + 8 * chunk)
        for i in range(0, TOKENS, LANES // 16):
            token = (lane >> 4) + i
            size = uint32(CHUNK if m0 + token < M and k < K else 0)
            destination = slot_a + (chunk >> 3) * A_HALF + token * A_ROW
            destination += ((chunk & 7) ^ token) * CHUNK
            cp_async_16_zfill(shared, destination, a, int64(m0 + token) * K + k, size)
        # --- W: one piece of memory
        for i in range(0, w_bytes, LANES * CHUNK):
            if i + CHUNK * lane < w_bytes:
                cp_async_16(shared, slot_w + i + CHUNK * lane, w, source + (i + CHUNK * lane))

    @cuda.jit(device=True, forceinline=True)
    def load_tokens(shared, row_at, chunk, token):
        """The B fragments of 64 K of a slot: (b0, b1) of each 16 K. Lane 8i + r gives ldmatrix the
        address of row r, a token, of matrix i, a chunk. row_at: the byte of that token's 64 K."""
        low = ldmatrix_x4(shared, row_at + (chunk ^ token) * CHUNK)
        return low + ldmatrix_x4(shared, row_at + ((4 + chunk) ^ token) * CHUNK)

    @cuda.jit(device=True, forceinline=True)
    def multiply(acc, r, words, b):
        """acc[r .. r + 3] += 64 K of a packed tile times the tokens of the B fragments."""
        # --- codes -> float16 -> tensor cores
        w0, w1 = fragment(words, 0), fragment(words, 1)
        w2, w3 = fragment(words, 2), fragment(words, 3)
        x = acc[r], acc[r + 1], acc[r + 2], acc[r + 3]
        x = mma_m16n8k16_f16(w0[0], w0[1], w0[2], w0[3], b[0], b[1], x[0], x[1], x[2], x[3])
        x = mma_m16n8k16_f16(w1[0], w1[1], w1[2], w1[3], b[2], b[3], x[0], x[1], x[2], x[3])
        x = mma_m16n8k16_f16(w2[0], w2[1], w2[2], w2[3], b[4], b[5], x[0], x[1], x[2], x[3])
        x = mma_m16n8k16_f16(w3[0], w3[1], w3[2], w3[3], b[6], b[7], x[0], x[1], x[2], x[3])
        acc[r], acc[r + 1], acc[r + 2], acc[r + 3] = x

    @cuda.jit(launch_bounds=(THREADS, 1))
    def w4a16_few_tokens(w, row_scales, a, c, k_tiles):
        """c[M, N] = a[M, K] @ dequantize(w)[N, K]^T; w and row_scales of qformats.repack.tiles,
        with `k_tiles` tiles of 128 K. a and c are float16; a begins at a multiple of 16 bytes."""
        shared = cuda.shared.array(0, uint8, alignment=128)  # all of the dynamic shared memory
        sums = cuda.shared.array(0, float32, alignment=128)  # the same, when K is done
        acc = cuda.local.array(n_acc, float32)
        t, k_tiles = int32(cuda.threadIdx.x), int32(k_tiles)
        # shuffled, so that the compiler knows it is one value for the whole warp
        warp, lane = shfl(int32(t >> 5), 0), int32(t & 31)
        m0, n0 = int32(cuda.blockIdx.x * TOKENS), int32(cuda.blockIdx.y * ROWS)
        count = int32((k_tiles - warp + (WARPS - 1)) // WARPS)  # tiles of K of this warp
        # The byte of this warp's next weights in W, which has 128 K of 8 row tiles side by side,
        # then their next 128 K; and the bytes of the warp's slots in shared memory
        row_tile = n0 // TILE_ROWS
        source = (int64(row_tile // TILE_GROUP) * k_tiles + warp) * group_bytes
        source += row_tile % TILE_GROUP * tile_bytes
        stride = WARPS * group_bytes  # from one tile of this warp to its next
        own_a, own_w = warp * (SLOTS * a_bytes), weights_begin + warp * (SLOTS * w_bytes)
        for r in range(n_acc):
            acc[r] = 0

        # --- global -> shared: the first slots. A group of copies is closed for each slot, even an
        # empty one: the wait counts groups
        k_tile = warp
        for s in range(SLOTS):
            if s < count:
                slot_a, slot_w = own_a + s * a_bytes, own_w + s * w_bytes
                copy_slot(shared, slot_a, slot_w, a, w, m0, source, k_tile, lane)
            source += stride
            k_tile = int32(k_tile + WARPS)
            cp_async_commit()

        slot, chunk, token = int32(0), lane >> 3, lane & 7
        for i in range(count):
            # --- wait for the oldest slot: for this lane's copies, then (syncwarp) for all lanes'
            wait_for_oldest()
            cuda.syncwarp()

            # --- multiply: 64 K of both packed tiles, then the other 64
            slot_a, slot_w = own_a + slot * a_bytes, own_w + slot * w_bytes
            for half in range(2):
                b = load_tokens(shared, slot_a + half * A_HALF + token * A_ROW, chunk, token)
                for j in range(ROW_TILES):
                    words = load(shared, slot_w + j * tile_bytes, lane, half)
                    multiply(acc, 4 * j, words, b)

            # --- refill the slot, when all lanes have read it
            cuda.syncwarp()
            if i + SLOTS < count:
                copy_slot(shared, slot_a, slot_w, a, w, m0, source, k_tile, lane)
            source += stride
            k_tile = int32(k_tile + WARPS)
            cp_async_commit()
            slot = int32(slot + 1 if slot < SLOTS - 1 else 0)

        # --- registers -> shared: the sums of each warp, [warp][token][feature]
        cuda.syncthreads()  # nobody reads a ring any more, and no copy is on its way
        first = warp * warp_sums + 2 * (lane & 3) * SUMS_ROW + (lane >> 2)
        for j in range(ROW_TILES):
            place = first + j * TILE_ROWS
            store_f32(sums, place, acc[4 * j])
            store_f32(sums, place + SUMS_ROW, acc[4 * j + 1])
            store_f32(sums, place + 8, acc[4 * j + 2])
            store_f32(sums, place + SUMS_ROW + 8, acc[4 * j + 3])
        cuda.syncthreads()

        # --- shared -> global: eight warps have a token each, and a lane adds up one output
        m, n = int32(m0 + warp), int32(n0 + lane)
        if warp < TOKENS and m < c.shape[0] and n < c.shape[1]:
            total = float32(0)
            for i in range(WARPS):
                total += load_f32(sums, i * warp_sums + warp * SUMS_ROW + lane)
            at = int64(m) * c.shape[1] + n
            store_u16(c, at, float_to_half(total * load_f32(row_scales, n)))

    return w4a16_few_tokens, shared_bytes


def launch(
    fmt: Format, family: Family, shape: Shape, weights: tuple, activations: tuple, out: Any
) -> Launch:
    run, shared_bytes = kernel(fmt.name)
    # Tokens on x: thread blocks that read the same rows follow each other, and meet them in the L2
    grid = (ceil_div(shape.m, TOKENS), ceil_div(shape.n, ROWS))
    args = (*weights, *activations, out, ceil_div(shape.k, TILE_K))
    return Launch(run, grid, (THREADS,), args, shared_bytes)


STEP = Step(
    number=17,
    name="step17_few_tokens",
    title="decode: eight float16 tokens at once on tensor cores",
    branch="decode",
    families=("A16",),
    parents={"A16": 16},
    homes=((8, 4096, 14336), (8, 4096, 4096)),
    unit={"A16": "tensor_fp16"},
    pack=tiles,
    activations={"A16": plain_rows},
    launch=launch,
    inputs=("float16",),
    outputs=("float16",),
    min_cc=(8, 0),
    idea=("mma_m16n8k16_f16", "ldmatrix_x4", "fragment"),
    contains={"A16": ("HMMA.16816.F32", "HFMA2", "LDSM.16.M88.4", "LDGSTS.E.BYPASS.128")},
    forbids={"A16": ("IMMA", "LDL", "STL")},
)
