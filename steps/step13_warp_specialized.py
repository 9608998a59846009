"""Step 13: warp specialization - some warps only load, the others only multiply.

What is new
    In step 12 every warp issues copies, waits at a barrier for those of all, and multiplies. Here
    one *producer* thread issues all copies, into a ring of up to eight shared-memory stages, and
    two *consumer* warpgroups multiply. Each stage has two *mbarriers*, words of shared memory that
    count arrivals and bytes: `full` completes when the stage's copies have arrived, `empty` when
    all consumers are done with it. Producer and consumers meet nowhere else. With four stages (*:
    a barrier completes):

        stage        0     1     2     3     0         1            2
        producer    [load][load][load][load][load]wait[load] wait  [load] wait ...
        full              *     *     *     *     *         *            *
        consumer 0        [multiply 0 ][multiply 1 ][multiply 2 ][multiply 3 ] ...
        consumer 1          [multiply 0 ][multiply 1 ][multiply 2 ][multiply 3 ] ...
        empty                            *            *            *            *

    A copy is one instruction for kilobytes. The weights of a stage lie in one piece of memory: one
    bulk copy. The tokens are two boxes of 64 K, which the copy engine cuts out of row-major A by a
    tensor map: it computes addresses, swizzles, and writes zeros beyond the edges of A.

        a stage of 128 K    box of K 0..63      tokens x 128 bytes, swizzled       tensor_copy
                            box of K 64..127    the same                           tensor_copy
                            weights             8 fragment-packed tiles            bulk_copy

    An mbarrier completes once in each round through the ring. A wait names the round by its
    *parity*, 0 or 1: a thread is never more than one round away, so one bit tells rounds apart. The
    producer fills a stage in round r after `empty` of round r - 1, which has the other parity. On a
    new barrier the wait for parity 1 returns at once, so the first round is no special case.

        step                           0  1  2  3  4  5  6  7  8  ...
        stage                          0  1  2  3  0  1  2  3  0
        parity                         0  0  0  0  1  1  1  1  0
        the producer waits until step  -  -  -  -  0  1  2  3  4     has been multiplied: `empty`
        a consumer waits until step    0  1  2  3  4  5  6  7  8     has arrived: `full`

    Consumers need registers for sums and weights, the producer needs almost none: `setmaxnreg`
    moves them. A block begins with 168 a thread. The producer's warpgroup keeps 40 of them, and
    each consumer's gets 232.
Why it should help
    In step 12 a thread issues 7 copies of 16 bytes a stage (Q4_0), and at each stage's barrier the
    tensor cores run dry for some 480 cycles. Here a warp of a consumer issues 160 instructions, for
    twice as many tokens, and its next stage has arrived: in a ring of five a copy has the time of
    four stages, 4000 cycles, and the L2 answers in 1500. (512,4096,4096) is one tile of 128 x 128
    for each of 128 SMs, 32 stages of 1024 cycles: 19 us at 1.75 GHz. Two warps of a scheduler do
    not hide all of each other's latencies, which adds 15 %. Both ends of the tile add 5 us, and the
    time between launches 3: expect 30.5 us, 1.2x.
What it costs
    A block takes all registers and most of the shared memory of an SM, so nothing hides the
    beginning and the end of its tile. 128 of its 384 threads never multiply.
Machine code
    UTMALDG (tensor_copy), UBLKCP (bulk_copy) and SYNCS (mbarriers) instead of LDGSTS; HGMMA in a
    loop without loads from global memory; USETMAXREG in both roles.
Prerequisites
    Step 12 (wgmma, descriptors, the end of a tile). steps/instructions/tensor_map.py has the
    picture of a box, steps/instructions/bulk_copy.py says what an mbarrier counts.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from numba import cuda, float32, int32, int64, uint8, uint32

from qformats import Format
from qformats.repack import TILE_GROUP, TILE_K, TILE_ROWS, tiles
from steps.blocks.halves import half_weights
from steps.contract import Family, Launch, Shape, Step, ceil_div, multiprocessors, plain_rows
from steps.instructions import (
    BOX_K,
    TensorMap,
    barrier_sync,
    bulk_copy,
    fence_mbarrier_init,
    floats_to_halves,
    load_f32,
    load_u32x4,
    mbarrier_arrive,
    mbarrier_arrive_expect,
    mbarrier_init,
    mbarrier_wait,
    prefetch_tensor_map,
    setmaxnreg_dec,
    setmaxnreg_inc,
    shfl,
    spread,
    stmatrix_x4_trans,
    store_u16,
    store_u32x4,
    swizzled_descriptor,
    tensor_copy,
    tensor_map_address,
    wgmma_commit,
    wgmma_f16,
    wgmma_fence,
    wgmma_wait,
    zeros_f32,
)

BLOCK_M: Final = 128  # tokens of a tile of C, at most: 64 sums a thread
BLOCK_N: Final = TILE_GROUP * TILE_ROWS  # features: 128, whose weights are one piece of memory
BLOCK_K: Final = TILE_K  # of a stage: 128
WARPGROUP: Final = 128  # threads
CONSUMER_WARPS: Final = 8  # two warpgroups, 64 features each; the producer's comes behind them
CONSUMERS: Final = 32 * CONSUMER_WARPS  # threads
THREADS: Final = CONSUMERS + WARPGROUP
CONSUMER_REGISTERS: Final = 232  # of a thread: 2 x 232 + 40 are the 504 of 3 x 168
PRODUCER_REGISTERS: Final = 40
SHARED_BYTES: Final = 227 * 1024  # of a thread block of Hopper, at most
MOST_STAGES: Final = 8  # with small tiles more would not arrive sooner
MBARRIER: Final = 8  # bytes

CHUNK: Final = 16  # bytes that a thread stores at once: 8 float16
C_ROW: Final = 2 * BLOCK_N  # bytes of a token of the finished tile
NEXT_16_K: Final = 2  # of a descriptor, which counts chunks


@cache
def kernel(format_name: str, block_m: int) -> tuple[Any, int]:
    """(the kernel for tiles of `block_m` tokens, a multiple of 16; its bytes of shared memory)."""
    weights = half_weights(format_name)
    tile_bytes, load, fragment = weights.tile_bytes, weights.load, weights.fragment
    # Shared memory: the tokens of all stages, as boxes begin at multiples of 1024 bytes; then the
    # weights of all stages, and the mbarriers: `full` of all stages, then `empty` of all
    box_bytes, w_bytes = 2 * BOX_K * block_m, TILE_GROUP * tile_bytes
    a_bytes = 2 * box_bytes
    stages = min(MOST_STAGES, (SHARED_BYTES - 1024) // (a_bytes + w_bytes))
    weights_begin = stages * a_bytes
    full, empty = stages * (a_bytes + w_bytes), stages * (a_bytes + w_bytes) + stages * MBARRIER
    shared_bytes = empty + stages * MBARRIER
    n_acc = block_m // 2  # of a thread: 64 features x block_m tokens by 128 threads
    no_sums = zeros_f32(n_acc)
    wait_for_all, wait_for_all_but_one = wgmma_wait(0), wgmma_wait(1)
    more_registers = setmaxnreg_inc(CONSUMER_REGISTERS)
    fewer_registers = setmaxnreg_dec(PRODUCER_REGISTERS)

    @cuda.jit(device=True, forceinline=True)
    def next_stage(stage, parity):
        if stage == stages - 1:
            return int32(0), int32(parity ^ 1)
        return int32(stage + 1), parity

    @cuda.jit(device=True, forceinline=True)
    def produce(shared, a, w, m0, steps):
        """One thread: the copies of all steps."""
        prefetch_tensor_map(a)
        stage, parity = int32(0), int32(0)
        for step in range(steps):
            # --- wait until the stage is empty
            mbarrier_wait(shared, empty + MBARRIER * stage, parity ^ 1)

            # --- issue its copies: two boxes of tokens, and the weights in one piece
            bar, k = int32(full + MBARRIER * stage), int32(step * BLOCK_K)
            destination = stage * a_bytes
            mbarrier_arrive_expect(shared, bar, a_bytes + w_bytes)
            tensor_copy(shared, destination, a, k, m0, shared, bar)
            tensor_copy(shared, destination + box_bytes, a, int32(k + BOX_K), m0, shared, bar)
            source = int64(cuda.blockIdx.x * steps + step) * w_bytes
            bulk_copy(shared, weights_begin + stage * w_bytes, w, source, w_bytes, shared, bar)
            stage, parity = next_stage(stage, parity)

    @cuda.jit(device=True, forceinline=True)
    def multiply(acc, words, descriptor):
        """acc += 64 K of packed weights times the activations that the descriptor points to."""
        w0, w1 = fragment(words, 0), fragment(words, 1)
        w2, w3 = fragment(words, 2), fragment(words, 3)
        wgmma_fence()
        acc = wgmma_f16(acc, w0[0], w0[1], w0[2], w0[3], descriptor, 1)
        acc = wgmma_f16(acc, w1[0], w1[1], w1[2], w1[3], descriptor + NEXT_16_K, 1)
        acc = wgmma_f16(acc, w2[0], w2[1], w2[2], w2[3], descriptor + 2 * NEXT_16_K, 1)
        acc = wgmma_f16(acc, w3[0], w3[1], w3[2], w3[3], descriptor + 3 * NEXT_16_K, 1)
        wgmma_commit()
        return acc

    @cuda.jit(device=True, forceinline=True)
    def consume(shared, warp, lane, steps):
        """A warpgroup -> the sums of its 64 features and all tokens. While the tensor cores
        multiply one half of a stage, the weights of the other half become float16."""
        acc = no_sums()
        stage, parity, previous, step = int32(0), int32(0), int32(0), int32(0)
        while True:  # not `for`: a loop that may have no turn makes ptxas wait at every wgmma
            # --- wait until the stage is full
            mbarrier_wait(shared, full + MBARRIER * stage, parity)
            tile_at = weights_begin + stage * w_bytes + warp * tile_bytes
            descriptor = swizzled_descriptor(shared, stage * a_bytes)
            lower, upper = load(shared, tile_at, lane, 0), load(shared, tile_at, lane, 1)

            # --- multiply its first half
            acc = wait_for_all_but_one(acc)  # done: the last stage's first half, its registers free
            acc = multiply(acc, lower, descriptor)

            # --- the previous stage has been multiplied: the warp says so
            acc = wait_for_all_but_one(acc)
            cuda.syncwarp()  # all lanes have loaded their weights of it: one speaks for the warp
            if lane == 0 and step > 0:
                mbarrier_arrive(shared, empty + MBARRIER * previous)

            # --- multiply the second half
            acc = multiply(acc, upper, descriptor + box_bytes // CHUNK)
            previous = stage
            stage, parity = next_stage(stage, parity)
            step = int32(step + 1)
            if step == steps:
                return wait_for_all(acc)

    @cuda.jit(launch_bounds=(THREADS, 1))
    def w4a16_specialized(a_map, w, row_scales, c, steps):
        """c[M, N] = a[M, K] @ dequantize(w)[N, K]^T; w and row_scales of qformats.repack.tiles,
        a_map of a; steps of 128 K. a and c are float16 and begin at multiples of 16 bytes."""
        shared = cuda.shared.array(0, uint8, alignment=1024)  # all of the dynamic shared memory
        a = tensor_map_address(a_map)
        t, steps = int32(cuda.threadIdx.x), int32(steps)
        # shuffled, so that the compiler knows it is one value for the whole warp
        warp, lane = shfl(int32(t >> 5), 0), int32(t & 31)
        n0, m0 = int32(cuda.blockIdx.x * BLOCK_N), int32(cuda.blockIdx.y * block_m)

        # --- make the mbarriers: one producer fills a stage, every consumer warp empties it
        if t == 0:
            for stage in range(stages):
                mbarrier_init(shared, full + MBARRIER * stage, 1)
                mbarrier_init(shared, empty + MBARRIER * stage, CONSUMER_WARPS)
            fence_mbarrier_init()
        cuda.syncthreads()  # the only barrier of all threads

        # --- the producer's warpgroup: one thread works, and it needs few registers
        if warp >= CONSUMER_WARPS:
            fewer_registers()
            if warp == CONSUMER_WARPS and lane == 0:
                produce(shared, a, w, m0, steps)
            return

        # --- the consumers. What the end needs, the scales of rows g and g + 8, is loaded first
        more_registers()
        feature = int32(n0 + 16 * warp + (lane >> 2))
        scale_g, scale_g8 = load_f32(row_scales, feature), load_f32(row_scales, feature + 8)
        acc = consume(shared, warp, lane, steps)

        # --- registers -> shared: sums times row scales, as float16, transposed, as in step 12
        barrier_sync(1, CONSUMERS)  # all have multiplied: from here on the ring holds the tile of C
        sums = cuda.local.array(n_acc, float32)
        spread(sums, acc)
        token, chunk = (lane >> 4) * 8 + (lane & 7), 2 * warp + (lane >> 3 & 1)
        destination = token * C_ROW + (chunk ^ (token & 7)) * CHUNK
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
        barrier_sync(1, CONSUMERS)

        # --- shared -> global: 16 threads store 256 bytes of a token, 16 tokens at a time
        M, N = int32(c.shape[0]), int32(c.shape[1])
        out_row, out_chunk = int32(t >> 4), int32(t & 15)
        n = int32(n0 + 8 * out_chunk)
        source = out_row * C_ROW + (out_chunk ^ (out_row & 7)) * CHUNK
        for i in range(0, block_m, CONSUMERS // 16):
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

    return w4a16_specialized, shared_bytes


def launch(
    fmt: Format, family: Family, shape: Shape, weights: tuple, activations: tuple, out: Any
) -> Launch:
    block_m = min(BLOCK_M, ceil_div(shape.m, 16) * 16)
    features = ceil_div(shape.n, BLOCK_N)
    # Few tiles leave SMs idle: make more of them, while there is an SM for each
    while block_m > 16 and 2 * features * ceil_div(shape.m, block_m) <= multiprocessors():
        block_m = ceil_div(block_m, 32) * 16
    run, shared_bytes = kernel(fmt.name, block_m)
    grid = (features, ceil_div(shape.m, block_m))
    (a,) = activations
    args = (TensorMap(a, (block_m, BOX_K)), *weights, out, ceil_div(shape.k, BLOCK_K))
    return Launch(run, grid, (THREADS,), args, shared_bytes)


STEP = Step(
    number=13,
    name="step13_warp_specialized",
    title="W4A16 warp-specialized: producer, consumers, an mbarrier ring",
    branch="float16",
    families=("A16",),
    parents={"A16": 12},
    unit={"A16": "tensor_fp16"},
    pack=tiles,
    activations={"A16": plain_rows},
    launch=launch,
    inputs=("float16",),
    outputs=("float16",),
    min_cc=(9, 0),
    max_cc=(9, 0),  # others have no wgmma, later ones neither
    idea=("tensor_copy", "bulk_copy", "mbarrier_wait", "mbarrier_arrive", "more_registers"),
    contains={"A16": ("HGMMA", "UTMALDG", "UBLKCP", "SYNCS", "USETMAXREG")},
    forbids={"A16": ("IMMA", "HMMA", "LDGSTS", "LDSM")},
)
