"""Step 22: sparse weights - two of each four are kept, and the tensor cores skip the others.

What is new
    Of each four neighbours along K the two largest weights are kept, the others become 0: the
    weights are *pruned* 2 of 4 (qformats.repack.prune). Stored are the codes of those kept, their
    positions, and the scales of Q4_0: 3.5 bits a weight instead of 4.5.

        K               0    1    2    3    4    5    6    7    8  ...
        codes of Q4_0   9    1    8   13    8    8    4   11    7
        weights, d =    1   -7    0    5    0    0   -4    3   -1
        kept                -7         5             -4    3
        codes                1        13              4   11
        positions            1         3              2    3          two bits each: *metadata*

    wgmma has a variant for a sparse first operand. The operand's fragments hold kept weights alone,
    one register for each four K; a further register holds their positions. Of each four activations
    the tensor cores take the two that the positions name: 32 K in the time of 16.

        wgmma           a0 a1 a2 a3: 16 of K    tokens: 16 of K    64 x 128 x 16    64 cycles
        wgmma sparse    a0 a1 a2 a3: 32 of K    tokens: 32 of K    64 x 128 x 32    64 cycles

    The K of one sparse wgmma is one block of Q4_0: its fragments have one scale a row. The
    positions of two wgmma lie in one register, in lanes 0 and 1 of each four for the first, in
    lanes 2 and 3 for the second: the instruction's *selector* says which.
    Tiles have 256 features, so that the L2 keeps up (below). A consumer warpgroup has 64 of them in
    one accumulator half and 64 in the other. While the tensor cores multiply one half, the weights
    of the other become float16. Blocks are persistent as in step 14, but share no tiles.
Why it should help
    128 K of a tile of 256 x 128 are 16 sparse wgmma, 1024 cycles, where step 14 takes 2048 for as
    much. Each reads 64 bytes of each of 128 tokens in its 64 cycles, which is all that shared
    memory gives: the weights must come from registers. The copies of a stage, 46 KB, have half the
    time of step 14's: an SM gets some 45 bytes a cycle from the L2, just enough. (A tile of 128 x
    128 would need 39 KB in 512 cycles.) Half as many multiplications take less power; as many
    activations are read. 1.3x was expected at (4096,4096,4096), on the assumption that copies into
    shared memory take cycles from those reads. They do not, and the gain is larger (the worklog has
    both).
What it costs
    Accuracy: pruning takes 0.136 of the energy of normal weights, an NMSE twenty times that of Q4_0
    itself, and 0.204 of uniform ones. A model is of no use then, unless it is trained again:
    SmolLM2-135M has a perplexity of 3454 where Q4_0 has 26.3, and a mean KL of 5.0 nats where it
    has 0.25. So this is a lesson, and gemm never prunes. A NaN in A does not reach C where all
    weights it meets are pruned. Few tokens make few tiles, of which none is shared: SMs are idle.
Machine code
    HGMMA.SP, eight a stage, with no wait but WARPGROUP.DEPBAR; no spills with 2 x 64 sums a thread.
Prerequisites
    Step 14 (persistent blocks), step 11 (two codes of a word become float16).
    steps/instructions/warpgroup.py has the fragments and the metadata bit by bit.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from numba import cuda, float32, int32, int64, uint8, uint32

from qformats import Format
from qformats.repack import PRUNED_GROUP, PRUNED_TILE_BYTES, TILE_K, TILE_ROWS, pruned_tiles
from steps.contract import Family, Launch, Shape, Step, ceil_div, multiprocessors, plain_rows
from steps.instructions import (
    BOX_K,
    TensorMap,
    barrier_sync,
    bulk_copy,
    fence_mbarrier_init,
    floats_to_halves,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    hfma2,
    hmul2,
    load_f32,
    load_u32x2,
    load_u32x4,
    mbarrier_arrive,
    mbarrier_arrive_expect,
    mbarrier_init,
    mbarrier_wait,
    prefetch_tensor_map,
    prmt,
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
    wgmma_fence,
    wgmma_sparse_f16,
    wgmma_wait,
    zeros_f32,
)

BLOCK_M: Final = 128  # tokens of a tile of C, at most: 2 x 64 sums a thread
BLOCK_N: Final = PRUNED_GROUP * TILE_ROWS  # features: 256, whose weights are one piece of memory
HALF_N: Final = BLOCK_N // 2  # features: 64 of each warpgroup, whose sums are one set
HALF_TILES: Final = PRUNED_GROUP // 2  # packed tiles: one of each consumer warp
BLOCK_K: Final = TILE_K  # of a stage: 128, four blocks
W_BYTES: Final = PRUNED_GROUP * PRUNED_TILE_BYTES  # of a stage
WARPGROUP: Final = 128  # threads
CONSUMER_WARPS: Final = 8  # two warpgroups; the producer's comes behind them
CONSUMERS: Final = 32 * CONSUMER_WARPS  # threads
THREADS: Final = CONSUMERS + WARPGROUP
CONSUMER_REGISTERS: Final = 232  # of a thread: 2 x 232 + 40 are the 504 of 3 x 168
PRODUCER_REGISTERS: Final = 40
SHARED_BYTES: Final = 227 * 1024  # of a thread block of Hopper, at most
MOST_STAGES: Final = 8  # with small tiles more would not arrive sooner
MBARRIER: Final = 8  # bytes

POSITIONS: Final = 16 * 32  # bytes of a packed tile before the positions, and before the scales
SCALES: Final = POSITIONS + 8 * 32
BOTH: Final = 0x00010001  # times 16 bits: the same in both halves of a register
TWO_TO_MINUS_4: Final = 0x2C00 * BOTH  # float16
MINUS_EIGHT: Final = 0x8008 * BOTH  # -8 * 2^-24: the code of 0 is 8

CHUNK: Final = 16  # bytes that a thread stores at once: 8 float16
C_ROW: Final = 128  # bytes of a token of 64 features of the finished tile
NEXT_32_K: Final = 4  # of a descriptor, which counts chunks

sparse_0, sparse_1 = wgmma_sparse_f16(0), wgmma_sparse_f16(1)


@cache
def kernel(block_m: int) -> tuple[Any, int]:
    """(the kernel for tiles of `block_m` tokens, a multiple of 16; its bytes of shared memory)."""
    # Shared memory: the tokens of all stages, as boxes begin at multiples of 1024 bytes; then the
    # weights of all stages; 64 features of C for each warpgroup; and the mbarriers, `full` of all
    # stages, then `empty` of all
    box_bytes = 2 * BOX_K * block_m
    a_bytes, c_bytes = 2 * box_bytes, C_ROW * block_m
    stages = min(MOST_STAGES, (SHARED_BYTES - 1024 - 2 * c_bytes) // (a_bytes + W_BYTES))
    weights_begin, c_begin = stages * a_bytes, stages * (a_bytes + W_BYTES)
    full, empty = c_begin + 2 * c_bytes, c_begin + 2 * c_bytes + stages * MBARRIER
    shared_bytes = empty + stages * MBARRIER
    n_acc = block_m // 2  # of a thread and half: 64 features x block_m tokens by 128 threads
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
    def quotient(x, y):
        """x // y of numbers that are not negative, unsigned: a signed one takes more code."""
        return int32(uint32(x) // uint32(y))

    @cuda.jit(device=True, forceinline=True)
    def produce(shared, a, w, tile_id, tiles_c, steps, tiles_n):
        """One thread: the copies of all steps of this block's tiles."""
        prefetch_tensor_map(a)
        stage, parity = int32(0), int32(0)
        while tile_id < tiles_c:
            tile_m = quotient(tile_id, tiles_n)
            m0, tile_n = int32(tile_m * block_m), tile_id - tile_m * tiles_n
            for step in range(steps):
                # --- wait until the stage is empty
                mbarrier_wait(shared, empty + MBARRIER * stage, parity ^ 1)

                # --- issue its copies: the weights in one piece, and two boxes of tokens
                bar, k = int32(full + MBARRIER * stage), int32(step * BLOCK_K)
                destination = stage * a_bytes
                mbarrier_arrive_expect(shared, bar, a_bytes + W_BYTES)
                source = int64(tile_n * steps + step) * W_BYTES
                bulk_copy(shared, weights_begin + stage * W_BYTES, w, source, W_BYTES, shared, bar)
                griddepcontrol_wait()  # A may be made by the launch before this one; W is not
                tensor_copy(shared, destination, a, k, m0, shared, bar)
                tensor_copy(shared, destination + box_bytes, a, int32(k + BOX_K), m0, shared, bar)
                stage, parity = next_stage(stage, parity)
            tile_id = int32(tile_id + cuda.gridDim.x)

    @cuda.jit(device=True, forceinline=True)
    def fragment(codes, scales, block):
        """The kept weights of 32 K, one block, as wgmma takes them: (a0, a1, a2, a3)."""
        # --- the scale d of rows g and g + 8 in both halves, -8 d, and the codes of 16 K each
        high = 0x3232 if block & 1 else 0x1010
        d = prmt(scales[block >> 1], scales[block >> 1], high)
        d8 = prmt(scales[2 + (block >> 1)], scales[2 + (block >> 1)], high)
        zero, zero8 = hmul2(d, MINUS_EIGHT), hmul2(d8, MINUS_EIGHT)
        d8_16 = hmul2(d8, TWO_TO_MINUS_4)  # its codes stand four bits too high
        lower, upper = codes[block], codes[block] >> uint32(8)
        return (
            hfma2(lower & uint32(0x000F000F), d, zero),
            hfma2(lower & uint32(0x00F000F0), d8_16, zero8),
            hfma2(upper & uint32(0x000F000F), d, zero),
            hfma2(upper & uint32(0x00F000F0), d8_16, zero8),
        )

    @cuda.jit(device=True, forceinline=True)
    def multiply(acc, codes, scales, shared, positions_at, descriptor):
        """acc += 128 K of packed weights times the activations that the descriptor points to. wgmma
        reads the positions while it runs, so they are loaded here: no product that still runs has
        these registers."""
        positions, further = load_u32x2(shared, positions_at), descriptor + box_bytes // CHUNK
        w0, w1 = fragment(codes, scales, 0), fragment(codes, scales, 1)
        w2, w3 = fragment(codes, scales, 2), fragment(codes, scales, 3)

        # --- four products of 32 K, two for each register of positions and each box of tokens
        p01, p23 = positions[0], positions[1]
        wgmma_fence()
        acc = sparse_0(acc, w0[0], w0[1], w0[2], w0[3], descriptor, p01, 1)
        acc = sparse_1(acc, w1[0], w1[1], w1[2], w1[3], descriptor + NEXT_32_K, p01, 1)
        acc = sparse_0(acc, w2[0], w2[1], w2[2], w2[3], further, p23, 1)
        acc = sparse_1(acc, w3[0], w3[1], w3[2], w3[3], further + NEXT_32_K, p23, 1)
        wgmma_commit()
        return acc

    @cuda.jit(device=True, forceinline=True)
    def consume(shared, warp, lane, steps, stage, parity):
        """A warpgroup -> the sums of its 2 x 64 features and all tokens, and the stage and parity
        behind them. While the tensor cores multiply the first 64 features of a stage, the weights
        of the second 64 become float16."""
        acc, acc_2 = no_sums(), no_sums()
        previous, step = int32(0), int32(0)
        while True:  # not `for`: a loop that may have no turn makes ptxas wait at every wgmma
            # --- wait until the stage is full
            mbarrier_wait(shared, full + MBARRIER * stage, parity)
            tile = weights_begin + stage * W_BYTES + warp * PRUNED_TILE_BYTES
            tile_2 = tile + HALF_TILES * PRUNED_TILE_BYTES
            descriptor = swizzled_descriptor(shared, stage * a_bytes)
            codes = load_u32x4(shared, tile + 16 * lane)
            codes_2 = load_u32x4(shared, tile_2 + 16 * lane)
            scales = load_u32x4(shared, tile + SCALES + 16 * (lane >> 2))
            scales_2 = load_u32x4(shared, tile_2 + SCALES + 16 * (lane >> 2))

            # --- multiply the first 64 features
            acc = wait_for_all_but_one(acc)  # done: those of the last stage, their registers free
            acc = multiply(acc, codes, scales, shared, tile + POSITIONS + 8 * lane, descriptor)

            # --- the previous stage has been multiplied: the warp says so
            acc_2 = wait_for_all_but_one(acc_2)
            cuda.syncwarp()  # all lanes have loaded their weights of it: one speaks for the warp
            if lane == 0 and step > 0:
                mbarrier_arrive(shared, empty + MBARRIER * previous)

            # --- multiply the second 64 features
            positions_at = tile_2 + POSITIONS + 8 * lane
            acc_2 = multiply(acc_2, codes_2, scales_2, shared, positions_at, descriptor)
            previous = stage
            stage, parity = next_stage(stage, parity)
            step = int32(step + 1)
            if step == steps:
                break
        acc, acc_2 = wait_for_all(acc), wait_for_all(acc_2)
        cuda.syncwarp()
        if lane == 0:
            mbarrier_arrive(shared, empty + MBARRIER * previous)
        return acc, acc_2, stage, parity

    @cuda.jit(device=True, forceinline=True)
    def store(shared, c, sums, scale_g, scale_g8, m0, n0, warp, lane):
        """64 features of C, by a warpgroup, in an area of its own and with a barrier of its own."""
        group, warp = warp >> 2, warp & 3
        area = c_begin + group * c_bytes

        # --- registers -> shared: sums times row scales, as float16, transposed, as in step 12
        token, chunk = (lane >> 4) * 8 + (lane & 7), 2 * warp + (lane >> 3 & 1)
        destination = area + token * C_ROW + (chunk ^ (token & 7)) * CHUNK
        barrier_sync(1 + group, WARPGROUP)  # nobody loads the features before any more
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
        barrier_sync(1 + group, WARPGROUP)

        # --- shared -> global: 8 threads store 128 bytes of a token, 16 tokens at a time
        M, N = int32(c.shape[0]), int32(c.shape[1])
        out_row, out_chunk = 4 * warp + (lane >> 3), lane & 7
        source = area + out_row * C_ROW + (out_chunk ^ (out_row & 7)) * CHUNK
        n = int32(n0 + 64 * group + 8 * out_chunk)
        for j in range(0, block_m, 16):
            m = int32(m0 + out_row + j)
            if m < M and n < N:
                eight = load_u32x4(shared, source + j * C_ROW)  # float16
                if N % 8 == 0:
                    store_u32x4(c, int64(m) * N + n, eight[0], eight[1], eight[2], eight[3])
                else:  # rows of C do not begin at multiples of 16 bytes
                    for i in range(8):
                        if n + i < N:
                            value = eight[i // 2] >> uint32(16 * (i % 2))
                            store_u16(c, int64(m) * N + (n + i), value)

    @cuda.jit(launch_bounds=(THREADS, 1))
    def w4a16_sparse(a_map, w, row_scales, c, steps):
        """c[M, N] = a[M, K] @ dequantize(pruned)[N, K]^T; w and row_scales of
        qformats.repack.pruned_tiles, a_map of a; steps of 128 K. a and c are float16 and begin at
        multiples of 16 bytes."""
        shared = cuda.shared.array(0, uint8, alignment=1024)  # all of the dynamic shared memory
        a = tensor_map_address(a_map)
        t, steps = int32(cuda.threadIdx.x), int32(steps)
        # shuffled, so that the compiler knows it is one value for the whole warp
        warp, lane = shfl(int32(t >> 5), 0), int32(t & 31)
        tiles_n = quotient(int32(c.shape[1]) + (BLOCK_N - 1), BLOCK_N)
        tiles_c = int32(tiles_n * quotient(int32(c.shape[0]) + (block_m - 1), block_m))
        tile_id = int32(cuda.blockIdx.x)

        # --- make the mbarriers: one producer fills a stage, every consumer warp empties it
        if t == 0:
            for stage in range(stages):
                mbarrier_init(shared, full + MBARRIER * stage, 1)
                mbarrier_init(shared, empty + MBARRIER * stage, CONSUMER_WARPS)
            fence_mbarrier_init()
        cuda.syncthreads()  # the only barrier of all threads
        griddepcontrol_launch_dependents()  # the next launch may begin wherever an SM is free

        # --- the producer's warpgroup: one thread works, and it needs few registers
        if warp >= CONSUMER_WARPS:
            fewer_registers()
            if warp == CONSUMER_WARPS and lane == 0:
                produce(shared, a, w, tile_id, tiles_c, steps, tiles_n)
            return

        # --- the consumers: tile after tile
        more_registers()
        griddepcontrol_wait()  # the launch before may still read what C overwrites
        sums = cuda.local.array(n_acc, float32)
        stage, parity = int32(0), int32(0)
        while tile_id < tiles_c:
            tile_m = quotient(tile_id, tiles_n)
            m0, n0 = int32(tile_m * block_m), int32((tile_id - tile_m * tiles_n) * BLOCK_N)
            row = int32(n0 + 16 * warp + (lane >> 2))
            scale_g, scale_g8 = load_f32(row_scales, row), load_f32(row_scales, row + 8)
            row_2 = int32(row + HALF_N)
            scale_2g, scale_2g8 = load_f32(row_scales, row_2), load_f32(row_scales, row_2 + 8)
            acc, acc_2, stage, parity = consume(shared, warp, lane, steps, stage, parity)

            # --- the finished tile: the first 64 features of each warpgroup, then the others
            spread(sums, acc)
            store(shared, c, sums, scale_g, scale_g8, m0, n0, warp, lane)
            spread(sums, acc_2)
            store(shared, c, sums, scale_2g, scale_2g8, m0, int32(n0 + HALF_N), warp, lane)
            tile_id = int32(tile_id + cuda.gridDim.x)

    return w4a16_sparse, shared_bytes


def launch(
    fmt: Format, family: Family, shape: Shape, weights: tuple, activations: tuple, out: Any
) -> Launch:
    block_m = min(BLOCK_M, ceil_div(shape.m, 16) * 16)  # less where tokens are few
    blocks = min(ceil_div(shape.n, BLOCK_N) * ceil_div(shape.m, block_m), multiprocessors())
    run, shared_bytes = kernel(block_m)
    (a,) = activations
    args = (TensorMap(a, (block_m, BOX_K)), *weights, out, ceil_div(shape.k, BLOCK_K))
    return Launch(run, (blocks,), (THREADS,), args, shared_bytes, overlap=True)


STEP = Step(
    number=22,
    name="step22_sparse_weights",
    title="W4A16 sparse: two of each four weights, and K twice as long",
    branch="float16",
    families=("A16",),
    parents={"A16": 14},
    homes=((4096, 4096, 4096),),
    unit={"A16": "tensor_sparse"},
    pack=pruned_tiles,
    activations={"A16": plain_rows},
    launch=launch,
    formats=("q4_0",),
    inputs=("float16",),
    outputs=("float16",),
    accuracy="pruned",
    min_cc=(9, 0),
    max_cc=(9, 0),  # others have no wgmma, later ones neither
    idea=("sparse_0", "sparse_1"),
    contains={"A16": ("HGMMA.SP", "UTMALDG", "UBLKCP", "SYNCS", "USETMAXREG")},
    forbids={"A16": ("IMMA", "HMMA", "LDGSTS", "LDSM")},
)
