"""Step 18: bulk copies - one lane fills a slot, and launches overlap.

What is new
    As in step 17, a thread block has 32 rows of W and eight tokens. Each of its 16 warps has every
    16th piece of 128 K, and a ring of two *slots*: room for two fragment-packed tiles of 16 rows x
    128 K, and for the A that they meet. There each lane finds its own addresses and issues nine
    copies for a slot (Q4_0). Here one lane issues three: the packed tiles are one piece of memory,
    a bulk copy; A is two boxes of 64 K, which the tensor map swizzles and fills with zeros beyond M
    and K. They report to the slot's mbarrier. A wait for it is enough: the bytes are there for all
    lanes.
    And launches overlap as in step 14. Weights do not depend on the launch before. So a warp issues
    the copy of its first weights as soon as it has an SM, and only then waits for that launch:

        make mbarriers | weights of slot 0 | wait for the launch before | A | next slot | multiply
                         one copy            griddepcontrol.wait

    Memory serves copies in the order in which they come, and until A is there nothing can be
    multiplied. So A is asked for before the weights of the second slot: it waits behind the first
    weights of all warps of all SMs, and behind no others.
Why it should help
    Between two launches memory is idle: during the last sums, the start of new thread blocks,
    their first instructions, and the latency of the first weights. The last two now pass while
    blocks of the launch before still run on other SMs: 0.8 us less. A refill takes one lane some 40
    instructions where it took the warp 100. Expect 1.2 times the speed of step 17.
What it costs
    Hopper or later.
Machine code
    UBLKCP of weights before ACQBULK, the wait for the launch before; UTMALDG of A; in the loop
    SYNCS (mbarriers) and no BAR.SYNC.
Prerequisites
    Steps 17, 13 (bulk copies, tensor maps, mbarriers) and 14 (launches that overlap).
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from numba import cuda, float32, int32, int64, uint8

from qformats import Format
from qformats.repack import TILE_GROUP, TILE_K, TILE_ROWS, tiles
from steps.blocks.halves import half_weights
from steps.contract import Family, Launch, Shape, Step, ceil_div, plain_rows
from steps.instructions import (
    BOX_K,
    TensorMap,
    bulk_copy,
    fence_mbarrier_init,
    float_to_half,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    ldmatrix_x4,
    load_f32,
    mbarrier_arrive_expect,
    mbarrier_init,
    mbarrier_wait,
    mma_m16n8k16_f16,
    shfl,
    store_f32,
    store_u16,
    tensor_copy,
    tensor_map_address,
)

LANES: Final = 32  # of a warp
WARPS: Final = 16  # of a thread block, side by side along K
THREADS: Final = LANES * WARPS
TOKENS: Final = 8  # of a thread block: the columns of an mma
ROW_TILES: Final = 2  # packed tiles side by side: what is read of A serves both
ROWS: Final = ROW_TILES * TILE_ROWS  # of W, of a thread block: 128 blocks for 4096 rows
SLOTS: Final = 2  # of a warp's ring
CHUNK: Final = 16  # bytes: 8 float16
MBARRIER: Final = 8  # bytes
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
    # Shared memory: A of all slots of all warps, as boxes begin at multiples of 1024 bytes; then
    # their packed tiles, then their mbarriers
    a_bytes, w_bytes = 2 * A_HALF, ROW_TILES * tile_bytes  # of a slot
    weights_begin = WARPS * SLOTS * a_bytes
    bars_begin = WARPS * SLOTS * (a_bytes + w_bytes)
    shared_bytes = bars_begin + WARPS * SLOTS * MBARRIER
    group_bytes = TILE_GROUP * tile_bytes  # of 128 rows and 128 K of W
    n_acc = 4 * ROW_TILES
    warp_sums = TOKENS * SUMS_ROW

    @cuda.jit(device=True, forceinline=True)
    def copy_weights(shared, slot_w, w, source, bar):
        """One lane issues the copy of a slot's packed tiles, and tells its mbarrier, `bar`, how
        many bytes to wait for, A's included: `copy_tokens` follows."""
        mbarrier_arrive_expect(shared, bar, a_bytes + w_bytes)
        bulk_copy(shared, slot_w, w, source, w_bytes, shared, bar)

    @cuda.jit(device=True, forceinline=True)
    def copy_tokens(shared, slot_a, a, m0, k_tile, bar):
        """One lane issues the copies of a slot's A, two boxes of 64 K. Beyond M and K a box is
        zeros."""
        k = int32(k_tile * TILE_K)
        tensor_copy(shared, slot_a, a, k, m0, shared, bar)
        tensor_copy(shared, slot_a + A_HALF, a, int32(k + BOX_K), m0, shared, bar)

    @cuda.jit(device=True, forceinline=True)
    def load_tokens(shared, row_at, chunk, token):
        """The B fragments of 64 K of a slot: (b0, b1) of each 16 K. Lane 8i + r gives ldmatrix the
        address of row r, a token, of matrix i, a chunk. row_at: the byte of that token's 64 K. The
        tensor map has put its chunk c at place c ^ r, so the rows of a matrix share no banks."""
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
    def w4a16_bulk_copies(a_map, w, row_scales, c, k_tiles):
        """c[M, N] = a[M, K] @ dequantize(w)[N, K]^T; w and row_scales of qformats.repack.tiles,
        with `k_tiles` tiles of 128 K, a_map of a. a and c are float16; a begins at a multiple of
        16 bytes."""
        griddepcontrol_launch_dependents()  # the next launch may begin wherever an SM is free
        shared = cuda.shared.array(0, uint8, alignment=1024)  # all of the dynamic shared memory
        sums = cuda.shared.array(0, float32, alignment=1024)  # the same, when K is done
        acc = cuda.local.array(n_acc, float32)
        a = tensor_map_address(a_map)
        t, k_tiles = int32(cuda.threadIdx.x), int32(k_tiles)
        # shuffled, so that the compiler knows it is one value for the whole warp
        warp, lane = shfl(int32(t >> 5), 0), int32(t & 31)
        m0, n0 = int32(cuda.blockIdx.x * TOKENS), int32(cuda.blockIdx.y * ROWS)
        count = int32((k_tiles - warp + (WARPS - 1)) // WARPS)  # tiles of K of this warp
        # The bytes of this warp's next weights in W, and of its slots in shared memory
        row_tile = n0 // TILE_ROWS
        source = (int64(row_tile // TILE_GROUP) * k_tiles + warp) * group_bytes
        source += row_tile % TILE_GROUP * tile_bytes
        stride = WARPS * group_bytes  # from one tile of this warp to its next
        own_a, own_w = warp * (SLOTS * a_bytes), weights_begin + warp * (SLOTS * w_bytes)
        own_bars = bars_begin + warp * (SLOTS * MBARRIER)
        for r in range(n_acc):
            acc[r] = 0

        # --- make the warp's mbarriers, and issue the copy of its first weights: they arrive while
        # the launch before this one, which may make A, still runs
        if lane == 0:
            for s in range(SLOTS):
                mbarrier_init(shared, own_bars + MBARRIER * s, 1)
            fence_mbarrier_init()
            if count > 0:
                copy_weights(shared, own_w, w, source, own_bars)

        # --- when that launch has ended: A of the first slot, and the other slots
        griddepcontrol_wait()
        if lane == 0:
            for s in range(SLOTS):
                if s < count:
                    bar = own_bars + MBARRIER * s
                    if s > 0:
                        copy_weights(shared, own_w + s * w_bytes, w, source + s * stride, bar)
                    copy_tokens(shared, own_a + s * a_bytes, a, m0, int32(warp + s * WARPS), bar)
        cuda.syncwarp()  # lane 0 has made the mbarriers: other lanes may wait for them
        source += SLOTS * stride
        k_tile = int32(warp + SLOTS * WARPS)

        # parity: of the phase that a mbarrier completes next, 0, 1, 0 ... in each turn of the ring
        slot, parity, chunk, token = int32(0), int32(0), lane >> 3, lane & 7
        for i in range(count):
            # --- wait for the oldest slot
            slot_a, slot_w = own_a + slot * a_bytes, own_w + slot * w_bytes
            bar = own_bars + MBARRIER * slot
            mbarrier_wait(shared, bar, parity)

            # --- multiply: 64 K of both packed tiles, then the other 64
            for half in range(2):
                b = load_tokens(shared, slot_a + half * A_HALF + token * A_ROW, chunk, token)
                for j in range(ROW_TILES):
                    words = load(shared, slot_w + j * tile_bytes, lane, half)
                    multiply(acc, 4 * j, words, b)

            # --- refill the slot, when all lanes have read it. Its mbarrier has completed a phase,
            # so one lane may arm it for the next
            cuda.syncwarp()
            if lane == 0 and i + SLOTS < count:
                copy_weights(shared, slot_w, w, source, bar)
                copy_tokens(shared, slot_a, a, m0, k_tile, bar)
            source += stride
            k_tile = int32(k_tile + WARPS)
            slot = int32(slot + 1)
            if slot == SLOTS:
                slot, parity = int32(0), int32(parity ^ 1)

        # --- registers -> shared: the sums of each warp, [warp][token][feature]
        cuda.syncthreads()  # nobody reads a ring any more, and no copy is on its way
        # Of a packed tile a lane has rows lane >> 2 and 8 more, of tokens 2 (lane & 3) and 1 more
        first = warp * warp_sums + 2 * (lane & 3) * SUMS_ROW + (lane >> 2)
        for j in range(ROW_TILES):
            place = first + j * TILE_ROWS
            store_f32(sums, place, acc[4 * j])
            store_f32(sums, place + SUMS_ROW, acc[4 * j + 1])
            store_f32(sums, place + 8, acc[4 * j + 2])
            store_f32(sums, place + SUMS_ROW + 8, acc[4 * j + 3])
        cuda.syncthreads()

        # --- shared -> global: a warp has a token, and a lane adds up one output. Its row scale is
        # the power of two by which `tiles` divided all scales of the row, to fit float16
        m, n = int32(m0 + warp), int32(n0 + lane)
        if warp < TOKENS and m < c.shape[0] and n < c.shape[1]:
            total = float32(0)
            for i in range(WARPS):
                total += load_f32(sums, i * warp_sums + warp * SUMS_ROW + lane)
            at = int64(m) * c.shape[1] + n
            store_u16(c, at, float_to_half(total * load_f32(row_scales, n)))

    return w4a16_bulk_copies, shared_bytes


def launch(
    fmt: Format, family: Family, shape: Shape, weights: tuple, activations: tuple, out: Any
) -> Launch:
    run, shared_bytes = kernel(fmt.name)
    # Tokens on x: thread blocks that read the same rows follow each other, and meet them in the L2
    grid = (ceil_div(shape.m, TOKENS), ceil_div(shape.n, ROWS))
    (a,) = activations
    args = (TensorMap(a, (TOKENS, BOX_K)), *weights, out, ceil_div(shape.k, TILE_K))
    return Launch(run, grid, (THREADS,), args, shared_bytes, overlap=True)


STEP = Step(
    number=18,
    name="step18_bulk_copies",
    title="decode on Hopper: bulk copies, launches that overlap",
    branch="decode",
    families=("A16",),
    parents={"A16": 17},
    homes=((8, 4096, 14336), (8, 4096, 4096)),
    unit={"A16": "tensor_fp16"},
    pack=tiles,
    activations={"A16": plain_rows},
    launch=launch,
    inputs=("float16",),
    outputs=("float16",),
    min_cc=(9, 0),
    idea=("bulk_copy", "tensor_copy", "mbarrier_wait", "griddepcontrol_wait"),
    contains={"A16": ("HMMA.16816.F32", "HFMA2", "LDSM.16.M88.4", "UTMALDG", "UBLKCP", "ACQBULK")},
    forbids={"A16": ("IMMA", "LDGSTS", "LDL", "STL")},
)
