"""Step 21: chained products - two products in one launch, and one stream of weights.

What is new
    A token goes through one product after another, and each needs what the one before has made.
    Here one launch makes two of them:

        H = A @ V^T     rounded to float16; V is 4096 x 4096, the last product of attention
        C = H @ W^T     W is 28672 x 4096, gate and up of Llama-3-8B

    There is one thread block on each SM. It multiplies some rows of V, then some rows of W, and it
    knows from the start which ones. Weights do not depend on H. So *producer* warps copy them
    through one ring of slots, as in step 13: they wait for free slots, and never for H.

        producers    V V V V W W W W W W W W W W W ...
        consumers      V V V V - - W W W W W W W W ...      - is a wait for H

    Each block makes a part of H, and every block needs all of it. They have no barrier and no flag
    for that: the numbers themselves show that they are there. H is handed over in words of memory
    that are zero at first. A block stores two float16 in a word, with all bits inverted. Such a
    word is never zero: both float16 would have to be 0xFFFF, a NaN that no conversion makes. A
    thread loads the words it needs from the L2, again and again, until none of them is zero. An
    atomic counter counts the blocks that have all of H; the last one stores zeros for the next
    launch.

    A producer has two slots under way at most. More would not be faster, and a load of H would have
    to wait behind them.
Why it should help
    V and W are 75.5 MB in Q4_0, 18.4 us of memory at 4.1 TB/s. Between two launches of step 18
    memory is idle for a microsecond, and whenever one of its thread blocks has ended, the next one
    begins with an empty ring. Here the ring begins empty once. To the 18.4 us come 1 us until the
    first weights are there, and 1 us at the end, where some SMs have seven pairs of row tiles of W
    and others six. Expect 20 us, 1.1 times the speed of two launches of step 18.
What it costs
    All thread blocks must run at once: one that has not begun makes no part of H, and all others
    wait for it. A wait that is too long ends the launch with an error.
    A block has one token at a time. For the next one all weights are read again.
Machine code
    UBLKCP in the producers' loop; LDG.E.128.STRONG.GPU, which looks for H, and STG.E.STRONG.GPU;
    one ATOMG; in the consumers' loop over K SYNCS and no BAR.SYNC.
Prerequisites
    Steps 18 (packed tiles of few tokens, launches that overlap) and 13 (producers, consumers).
    `steps/kernels/between/chain.py` does the same with the products of a decoder's whole layer.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from numba import cuda, float32, int32, int64, uint8, uint32

from qformats import Format
from qformats.repack import TILE_GROUP, TILE_K, TILE_ROWS
from steps.blocks.chained import tiles_of_both
from steps.blocks.halves import half_weights
from steps.contract import (
    Family,
    Launch,
    Shape,
    Step,
    ceil_div,
    multiprocessors,
    plain_rows,
    shared_memory,
)
from steps.instructions import (
    barrier_sync,
    bulk_copy,
    fence,
    fence_mbarrier_init,
    float_to_half,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    ldmatrix_x4,
    load_f32,
    load_u32x4,
    load_u32x4_relaxed,
    mbarrier_arrive,
    mbarrier_arrive_expect,
    mbarrier_init,
    mbarrier_wait,
    mma_m16n8k16_f16,
    shfl,
    shfl_xor,
    store_f32,
    store_u16,
    store_u32_relaxed,
    store_u32x4,
    trap,
)

LANES: Final = 32  # of a warp
CONSUMERS: Final = 16  # warps of a thread block that multiply
PRODUCERS: Final = 4  # warps that issue copies, one lane of each: one on each scheduler
THREADS: Final = LANES * (CONSUMERS + PRODUCERS)
ROW_TILES: Final = 2  # packed tiles side by side: what is read of A serves both
ROWS: Final = ROW_TILES * TILE_ROWS  # of a matrix: a thread block multiplies so many at a time
DEEP: Final = 2  # tiles of K of a slot: 256 numbers of A, of which a lane loads eight
MOST_SLOTS: Final = 2  # of the ring, for each consumer
IN_FLIGHT: Final = 2  # slots that a producer has asked for and that are not full yet, at most
CHUNK: Final = 16  # bytes: 8 float16
MBARRIER: Final = 8  # bytes
A_TILE: Final = 2 * TILE_K  # bytes of A, 128 K
HEAD: Final = 4  # words before h in the hand-over, 16 bytes: the first one counts blocks
LOOKS: Final = 1 << 20  # at words of h before the launch fails, in case they never come: a second


@cache
def kernel(format_name: str, slots: int) -> tuple[Any, int]:
    """(the kernel, its bytes of shared memory without A). slots: a multiple of CONSUMERS."""
    weights = half_weights(format_name)
    tile_bytes, load, fragment = weights.tile_bytes, weights.load, weights.fragment
    # Shared memory: the ring, two sets of sums, mbarriers, A
    w_bytes = ROW_TILES * tile_bytes  # of 128 K
    slot_bytes = DEEP * w_bytes
    sums_begin = slots * slot_bytes
    sums_bytes = 4 * CONSUMERS * ROWS
    full = sums_begin + 2 * sums_bytes
    empty = full + slots * MBARRIER
    a_begin = empty + slots * MBARRIER
    group_bytes = TILE_GROUP * tile_bytes  # of 128 rows and 128 K of a matrix
    n_acc = 4 * ROW_TILES

    @cuda.jit(device=True, forceinline=True)
    def copy_weights(shared, slot, matrix, pair, k_tile, k_tiles):
        """One lane issues the copies of two row tiles, 256 K of them, or what is left: it may be
        nothing, and the slot is full at once."""
        row_tile = pair * ROW_TILES
        source = int64(row_tile // TILE_GROUP) * k_tiles + k_tile
        source = source * group_bytes + row_tile % TILE_GROUP * tile_bytes
        here = max(int32(0), min(int32(DEEP), int32(k_tiles - k_tile)))
        bar = full + slot * MBARRIER
        mbarrier_arrive_expect(shared, bar, here * w_bytes)
        for i in range(here):
            place = slot * slot_bytes + i * w_bytes
            bulk_copy(shared, place, matrix, source + i * group_bytes, w_bytes, shared, bar)

    @cuda.jit(device=True, forceinline=True)
    def wait_for(handed, index):
        """16 bytes of h, when all four words are there."""
        x0, x1, x2, x3 = load_u32x4_relaxed(handed, index)
        looks = int32(0)
        while x0 == 0 or x1 == 0 or x2 == 0 or x3 == 0:
            x0, x1, x2, x3 = load_u32x4_relaxed(handed, index)
            looks = int32(looks + 1)
            if looks == LOOKS:
                trap()
        return ~x0, ~x1, ~x2, ~x3

    @cuda.jit(device=True, forceinline=True)
    def multiply(acc, r, words, b):
        """acc[r .. r + 3] += 64 K of a packed tile times the B fragments: the one token in each of
        the eight columns, so the sums of all columns are the same."""
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
    def w4a16_chained_products(a, v, v_scales, w, w_scales, c, h, handed):
        """h = a[M, K] @ dequantize(v)[K, K]^T, and c[M, N] = h @ dequantize(w)[N, K]^T; v, w and
        their scales of qformats.repack.tiles. a, h and c are float16; a begins at a multiple of 16
        bytes. handed: uint32 [HEAD + M K / 2], zeros before the launch and after it: the way of
        h from block to block. h itself is an output, too."""
        griddepcontrol_launch_dependents()  # the next launch may begin wherever an SM is free
        shared = cuda.shared.array(0, uint8, alignment=128)  # all of the dynamic shared memory
        acc = cuda.local.array(n_acc, float32)
        t, block, blocks = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x), int32(cuda.gridDim.x)
        # shuffled, so that the compiler knows it is one value for the whole warp
        warp, lane = shfl(int32(t >> 5), 0), int32(t & 31)
        M, N, K = int32(c.shape[0]), int32(c.shape[1]), int32(a.shape[1])
        pairs = int32((K + ROWS - 1) // ROWS), int32((N + ROWS - 1) // ROWS)
        k_tiles = int32((K + TILE_K - 1) // TILE_K)
        # slots of each consumer for all K of two row tiles; what is beyond K in the last is empty
        rounds = int32((k_tiles + DEEP * CONSUMERS - 1) // (DEEP * CONSUMERS))

        # --- make the mbarriers
        if t == 0:
            for s in range(2 * slots):
                mbarrier_init(shared, full + MBARRIER * s, 1)
            fence_mbarrier_init()
        cuda.syncthreads()

        if warp >= CONSUMERS:
            # --- the producers: weights of both products, one stream. Producer p fills slots p,
            # p + 4, p + 8 ...
            if lane == 0:
                own = int32(warp - CONSUMERS)
                slot, parity, oldest, oldest_parity = own, int32(1), own, int32(0)
                asked = int32(0)  # slots that may not be full yet, from the oldest on
                for product in range(2 * M):
                    second = int32(product & 1)
                    for pair in range(block, pairs[second], blocks):
                        for i in range(own, rounds * CONSUMERS, PRODUCERS):
                            # --- wait until the slot is free, and not too many are being filled
                            mbarrier_wait(shared, empty + MBARRIER * slot, parity)
                            if asked == IN_FLIGHT:
                                mbarrier_wait(shared, full + MBARRIER * oldest, oldest_parity)
                                oldest = int32(oldest + PRODUCERS)
                                if oldest >= slots:
                                    oldest, oldest_parity = own, int32(oldest_parity ^ 1)
                            else:
                                asked = int32(asked + 1)

                            # --- fill it
                            k_tile = int32(DEEP * i)
                            if second:
                                copy_weights(shared, slot, w, int32(pair), k_tile, k_tiles)
                            else:
                                copy_weights(shared, slot, v, int32(pair), k_tile, k_tiles)
                            slot = int32(slot + PRODUCERS)
                            if slot >= slots:
                                slot, parity = own, int32(parity ^ 1)
            return

        griddepcontrol_wait()
        slot, parity, turn = warp, int32(0), int32(0)
        for product in range(2 * M):
            second, m = int32(product & 1), int32(product >> 1)
            scales = v_scales
            if second:
                scales = w_scales

            # --- A -> shared: the parts of K that this warp alone multiplies, of the token, for V,
            # or of h, for W
            for i in range(rounds):
                k = int32((i * CONSUMERS + warp) * (DEEP * TILE_K) + 8 * lane)
                words = uint32(0), uint32(0), uint32(0), uint32(0)
                if block < pairs[second] and k < K:
                    if second:
                        words = wait_for(handed, HEAD + (int64(m) * K + k) // 2)
                    else:
                        words = load_u32x4(a, int64(m) * K + k)
                store_u32x4(shared, a_begin + 2 * k, words[0], words[1], words[2], words[3])
            cuda.syncwarp()

            for pair in range(block, pairs[second], blocks):
                n = int32(pair * ROWS + lane)
                scale = float32(0)
                if warp == turn % CONSUMERS and n < scales.shape[0]:
                    scale = load_f32(scales, n)
                for r in range(n_acc):
                    acc[r] = 0
                for i in range(rounds):
                    # --- wait for a slot
                    mbarrier_wait(shared, full + MBARRIER * slot, parity)

                    # --- multiply: 64 K of both packed tiles at a time
                    place, tile = slot * slot_bytes, int32((i * CONSUMERS + warp) * DEEP)
                    for k_tile in range(tile, min(int32(tile + DEEP), k_tiles)):
                        for half in range(2):
                            at = a_begin + k_tile * A_TILE + half * (A_TILE // 2)
                            at += (lane >> 3) * CHUNK
                            b = ldmatrix_x4(shared, at) + ldmatrix_x4(shared, at + 4 * CHUNK)
                            for j in range(ROW_TILES):
                                words = load(shared, place + j * tile_bytes, lane, half)
                                multiply(acc, 4 * j, words, b)
                        place += w_bytes

                    # --- give it back, when all lanes have read it
                    cuda.syncwarp()
                    if lane == 0:
                        mbarrier_arrive(shared, empty + MBARRIER * slot)
                    slot = int32(slot + CONSUMERS)
                    if slot >= slots:
                        slot, parity = warp, int32(parity ^ 1)

                # --- registers -> shared: the sums of each warp, those of column 0
                sums = sums_begin + (turn & 1) * sums_bytes  # the other set may still be added up
                if lane & 3 == 0:
                    first = sums + 4 * (warp * ROWS + (lane >> 2))
                    for j in range(ROW_TILES):
                        store_f32(shared, first + 4 * TILE_ROWS * j, acc[4 * j])
                        store_f32(shared, first + 4 * TILE_ROWS * j + 32, acc[4 * j + 2])
                barrier_sync(1, LANES * CONSUMERS)

                # --- shared -> global: a lane adds up one output; the next pair is another warp's
                if warp == turn % CONSUMERS:
                    total = float32(0)
                    for q in range(CONSUMERS):
                        total += load_f32(shared, sums + 4 * (q * ROWS + lane))
                    result = uint32(float_to_half(total * scale))
                    if second:
                        if n < N:
                            store_u16(c, int64(m) * N + n, result)
                    else:
                        both = uint32(result | shfl_xor(result, 1) << uint32(16))
                        at = int64(m) * K + n
                        if n < K:
                            store_u16(h, at, result)
                            if lane & 1 == 0:
                                store_u32_relaxed(handed, HEAD + at // 2, ~both)

                # --- the block has all it needs of h: the last of all blocks to say so leaves zeros
                if second and pair == block and warp == (turn + 1) % CONSUMERS:
                    arrived = int32(0)
                    if lane == 0:
                        fence()
                        arrived = int32(cuda.atomic.add(handed, 0, uint32(1)) + 1)
                    if shfl(arrived, 0) == M * min(blocks, pairs[1]):
                        if lane == 0:
                            fence()
                        cuda.syncwarp()
                        zero = uint32(0)
                        for x in range(4 * lane, HEAD + M * K // 2, 4 * LANES):
                            store_u32x4(handed, x, zero, zero, zero, zero)
                turn = int32(turn + 1)

    return w4a16_chained_products, a_begin


def scratch(fmt: Format, family: Family, shape: Shape) -> tuple:
    """h, and what is handed from the first product to the second."""
    return ((shape.m, shape.k), "float16"), ((HEAD + shape.m * shape.k // 2,), "uint32")


def launch(
    fmt: Format,
    family: Family,
    shape: Shape,
    weights: tuple,
    activations: tuple,
    out: Any,
    scratch: tuple,
) -> Launch:
    part = DEEP * CONSUMERS  # tiles of K of a round
    a_bytes = A_TILE * part * ceil_div(shape.k, part * TILE_K)
    slots = MOST_SLOTS * CONSUMERS
    while kernel(fmt.name, slots)[1] + a_bytes > shared_memory():
        slots -= CONSUMERS
        if slots == 0:
            raise ValueError(
                f"K={shape.k}: a token takes {a_bytes} bytes of shared memory, and a ring as well; "
                f"a thread block has {shared_memory()}"
            )
    run, shared_bytes = kernel(fmt.name, slots)
    # Blocks wait for each other, so all must run at once: one an SM
    blocks = min(multiprocessors(), ceil_div(max(shape.k, shape.n), ROWS))
    args = (*activations, *weights, out, *scratch)
    return Launch(
        run, (blocks,), (THREADS,), args, shared_bytes + a_bytes, overlap=True, together=True
    )


STEP = Step(
    number=21,
    name="step21_chained_products",
    title="decode: two products in one launch, one stream of weights",
    branch="decode",
    families=("A16",),
    parents={"A16": 18},
    homes=((1, 28672, 4096),),
    unit={"A16": "tensor_fp16"},
    pack=tiles_of_both,
    activations={"A16": plain_rows},
    launch=launch,
    scratch=scratch,
    inputs=("float16",),
    outputs=("float16",),
    min_cc=(9, 0),
    idea=("load_u32x4_relaxed", "store_u32_relaxed", "bulk_copy", "mbarrier_wait"),
    contains={
        "A16": ("HMMA.16816.F32", "HFMA2", "LDSM.16.M88.4", "UBLKCP", "LDG.E.128.STRONG.GPU")
    },
    forbids={"A16": ("IMMA", "LDGSTS", "UTMALDG", "LDL", "STL")},
)
