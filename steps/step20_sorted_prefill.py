"""Step 20: experts of many tokens - pairs sorted on the GPU, one persistent launch over all tiles.

What is new
    Step 19 groups eight pairs of a token and its expert. Of 4096 tokens each of 128 experts has
    some 256, which want the tiles of step 14: so pairs that have the same expert must lie side by
    side. Two small launches make that so, and no host looks at ids:

        sort        thread block e counts the pairs of all experts before e. So many lie before its
                    own, which it writes to rows, from place offsets[e] on
        gather      row i of the sorted A is the row of A that pair rows[i] reads

        ids         2 0 | 0 1 | 2 0 | 0 2                   four tokens of two experts each
        pair        0 1   2 3   4 5   6 7
        rows        1 2 5 6 | 3 | 0 4 7                     by experts 0, 1, 2
        offsets     0         4   5       8

    Then comes step 14's kernel. A tile now has rows of one expert and of no other:

        rows        0        300  300         520           of experts 0, 1, 2
        tiles       [144][144][12]  [144][76]               each times the tiles along N
        first tile  0             3  3              5       of expert 0, 1, 2, and of all

    How many tiles there are is known on the GPU alone. Each thread block works out the list of
    first tiles for itself. Thread block b takes tile b, then b + 132, b + 264 ... and finds the
    expert of each by a binary search of the list. A box of A that reaches beyond the expert's rows
    reads those of the next one: columns of the product that are not stored. The rows of C go back
    to their pairs.
    Thread blocks share no tiles: with 4000 of them every SM has nearly as many as any other.
Why it should help
    4096 tokens of 8 experts of 1536 x 2048 are 206 GFLOP: 300 us at 690 TFLOPS, step 14's speed. An
    expert has 240 to 272 rows, most in two tiles of 144: so 1.14 times as many rows are multiplied,
    in 340 us. The sorted A, 134 MB, is written and read once, which takes 60 us, and C, 101 MB,
    takes 20: expect 420 us. A loop of step 14 is 128 launches of 24 tiles of 128 x 128, shared by
    132 SMs. Each takes 6.5 us: 830 us, 2 times as long.
What it costs
    Sorted A is S times as large as A. A kernel that gathers rows itself saves the pass over it, but
    no tensor map gathers on Hopper: four warps have to copy 16 bytes at a time.
    An expert's last tile is partly empty; the more uneven the ids, the more such tiles.
Machine code
    The product has that of step 14: HGMMA in a loop without loads from global memory, UTMALDG,
    UBLKCP; no MEMBAR and no atomics. The sort has VOTE and POPC.
Prerequisites
    Steps 14 (persistent thread blocks, the end of a tile) and 19 (experts, ids, ballot).
"""

from __future__ import annotations

from functools import cache
from math import ceil, gcd, nan, sqrt
from typing import Any, Final

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32

from qformats import Format
from qformats.repack import TILE_GROUP, TILE_K, TILE_ROWS, tiles
from steps.blocks.experts import RowsByIds
from steps.blocks.halves import half_weights
from steps.contract import (
    Activations,
    Family,
    Launch,
    Machine,
    Shape,
    Step,
    ceil_div,
    multiprocessors,
)
from steps.instructions import (
    BOX_K,
    TensorMap,
    barrier_sync,
    bulk_copy,
    fence_mbarrier_init,
    float_to_half,
    floats_to_halves,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    load_f32,
    load_u32,
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

BLOCK_M: Final = 144  # rows of a tile of C, at most: 72 sums a thread
BLOCK_N: Final = TILE_GROUP * TILE_ROWS  # features: 128, whose weights are one piece of memory
BLOCK_K: Final = TILE_K  # of a stage: 128
WARPGROUP: Final = 128  # threads
CONSUMER_WARPS: Final = 8  # two warpgroups, 64 features each; the producer's comes behind them
CONSUMERS: Final = 32 * CONSUMER_WARPS  # threads
THREADS: Final = CONSUMERS + WARPGROUP
CONSUMER_REGISTERS: Final = 232  # of a thread: 2 x 232 + 40 are the 504 of 3 x 168
PRODUCER_REGISTERS: Final = 40
SHARED_BYTES: Final = 227 * 1024  # of a thread block of Hopper, at most
TABLE_BYTES: Final = 4096  # of it, at least, for the lists of tiles: those of 511 experts
MOST_STAGES: Final = 8  # with small tiles more would not arrive sooner
MBARRIER: Final = 8  # bytes
STAGED: Final = 32  # rows of the finished tile in shared memory at a time

CHUNK: Final = 16  # bytes that a thread stores at once: 8 float16
C_ROW: Final = 2 * BLOCK_N  # bytes of a row of the finished tile
NEXT_16_K: Final = 2  # of a descriptor, which counts chunks

EVERY_LANE: Final = 0xFFFFFFFF  # a mask: all 32 lanes vote
SORTING_WARPS: Final = 16  # of a thread block: each has a part of all ids
IN_FLIGHT: Final = 8  # ids that a lane loads before it uses the first: latencies overlap
GATHERERS: Final = 128  # threads, which copy 2 KB of a row at a time


def tiles_of_experts(blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    """Blocks [E, N, K/32], or [N, K/32] of one expert -> (packed, row_scales): `tiles` of each
    expert, one after another. Each has whole groups of 128 rows and 128 K."""
    each = blocks.reshape(-1, *blocks.shape[-2:])
    packed, row_scales = zip(*map(tiles, each), strict=True)
    return np.concatenate(packed), np.concatenate(row_scales)


# --- sorting --------------------------------------------------------------------------------------


@cuda.jit(device=True, forceinline=True)
def load_experts(found, ids, first, end, experts, lane):
    """The experts of 32 * IN_FLIGHT pairs from `first` on, IN_FLIGHT for each lane. An id that is
    none counts as `experts`, a pair from `end` on as `experts + 1`."""
    for j in range(IN_FLIGHT):
        found[j] = load_u32(ids, min(int32(first + 32 * j + lane), int32(end - 1)))
    for j in range(IN_FLIGHT):
        known = uint32(min(uint32(found[j]), uint32(experts)))
        found[j] = known if first + 32 * j + lane < end else uint32(experts + 1)


@cuda.jit(launch_bounds=(32 * SORTING_WARPS, 1))
def sort_pairs(ids, rows, offsets):
    """Thread block e counts the pairs of lesser experts, offsets[e], and writes the pairs of expert
    e to rows, from there on. The last block writes those whose id is no expert. ids: int32, flat or
    [T, S], rows: int32 [T S], offsets: int32 [E + 1]."""
    counts = cuda.shared.array((2, SORTING_WARPS), int32)
    found = cuda.local.array(IN_FLIGHT, uint32)
    pairs, experts = int32(rows.shape[0]), int32(offsets.shape[0] - 1)
    own, t = uint32(cuda.blockIdx.x), int32(cuda.threadIdx.x)
    warp, lane = shfl(int32(t >> 5), 0), int32(t & 31)
    part = int32((pairs + SORTING_WARPS - 1) // SORTING_WARPS)
    begin, end = int32(warp * part), int32(min(int32(warp * part + part), pairs))
    # --- count, in the warp's part of ids, pairs of lesser experts and of this one
    less, equal = int32(0), int32(0)
    for first in range(begin, end, 32 * IN_FLIGHT):
        load_experts(found, ids, int32(first), end, experts, lane)
        for j in range(IN_FLIGHT):
            less = int32(less + cuda.popc(cuda.ballot_sync(EVERY_LANE, found[j] < own)))
            equal = int32(equal + cuda.popc(cuda.ballot_sync(EVERY_LANE, found[j] == own)))
    if lane == 0:
        counts[0, warp], counts[1, warp] = less, equal
    cuda.syncthreads()
    # --- where this warp's pairs begin: behind those of lesser experts, and of the warps before
    place, before = int32(0), int32(0)
    for i in range(SORTING_WARPS):
        place = int32(place + counts[0, i])
        before = int32(before + (counts[1, i] if i < warp else 0))
    if t == 0:
        offsets[cuda.blockIdx.x] = place
    place = int32(place + before)
    # --- write them
    below = uint32((1 << lane) - 1)
    for first in range(begin, end, 32 * IN_FLIGHT):
        load_experts(found, ids, int32(first), end, experts, lane)
        for j in range(IN_FLIGHT):
            votes = uint32(cuda.ballot_sync(EVERY_LANE, found[j] == own))
            if found[j] == own:
                rows[place + cuda.popc(votes & below)] = int32(first + 32 * j + lane)
            place = int32(place + cuda.popc(votes))


@cuda.jit(launch_bounds=(GATHERERS, 1))
def gather(a, rows, sorted_a, chosen):
    """sorted_a[i] = a[rows[i] // chosen], both float16 with rows of a multiple of 16 bytes."""
    i, chunks = int32(cuda.blockIdx.x), int32(a.shape[1] // 8)
    # --- 16 bytes a thread
    source = int64(rows[i] // chosen) * chunks
    for chunk in range(cuda.threadIdx.x, chunks, GATHERERS):
        four = load_u32x4(a, 8 * (source + chunk))
        at = 8 * (int64(i) * chunks + chunk)
        store_u32x4(sorted_a, at, four[0], four[1], four[2], four[3])


def sorted_rows(a: Any, ids: Any, experts: int, machine: Machine) -> Activations:
    """A [T S, K] sorted by experts, of which pairs its rows are, and where each expert's begin."""
    pairs, (tokens, k) = int(ids.shape[0] * ids.shape[1]), a.shape
    sorted_a, rows = machine.empty((pairs, k), a.dtype), machine.empty((pairs,), np.int32)
    offsets = machine.empty((experts + 1,), np.int32)
    sort = Launch(sort_pairs, (experts + 1,), (32 * SORTING_WARPS,), (ids, rows, offsets))
    copy = Launch(gather, (pairs,), (GATHERERS,), (a, rows, sorted_a, pairs // tokens))
    return Activations((sorted_a, rows, offsets), (sort, copy), "rows")


# --- the product ----------------------------------------------------------------------------------


@cache
def kernel(format_name: str, block_m: int, table_bytes: int) -> tuple[Any, int]:
    """(the kernel for tiles of `block_m` rows, a multiple of 16, with room for a list of tiles; its
    bytes of shared memory)."""
    weights = half_weights(format_name)
    tile_bytes, load, fragment = weights.tile_bytes, weights.load, weights.fragment
    # Shared memory: A of all stages, as boxes begin at multiples of 1024 bytes; then the weights of
    # all stages; STAGED rows of C; the mbarriers, `full` of all stages, then `empty` of all; and,
    # counted in int32, the offsets of all experts and their first tiles
    box_bytes, w_bytes = 2 * BOX_K * block_m, TILE_GROUP * tile_bytes
    a_bytes = 2 * box_bytes
    staged = gcd(block_m, STAGED)
    room = SHARED_BYTES - 1024 - table_bytes - staged * C_ROW
    stages = min(MOST_STAGES, room // (a_bytes + w_bytes))
    weights_begin, c_begin = stages * a_bytes, stages * (a_bytes + w_bytes)
    full, empty = c_begin + staged * C_ROW, c_begin + staged * C_ROW + stages * MBARRIER
    offsets_begin = (empty + stages * MBARRIER) // 4
    shared_bytes = empty + stages * MBARRIER + table_bytes
    n_acc = block_m // 2  # of a thread: 64 features x block_m rows by 128 threads
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
    def list_tiles(words, offsets, experts, t):
        """By all threads, to shared memory: offsets, and how many tiles come before each expert."""
        tiles_begin = offsets_begin + experts + 1
        # --- the offsets
        for e in range(t, experts + 1, THREADS):
            words[offsets_begin + e] = offsets[e]
        cuda.syncthreads()
        # --- a thread adds up the tiles of all experts before its own
        for e in range(t, experts + 1, THREADS):
            before, at = int32(0), int32(words[offsets_begin])
            for i in range(e):
                after = int32(words[offsets_begin + i + 1])
                before = int32(before + quotient(after - at + (block_m - 1), block_m))
                at = after
            words[tiles_begin + e] = before
        cuda.syncthreads()

    @cuda.jit(device=True, forceinline=True)
    def find(words, tile_m, experts):
        """(expert, its first row of this tile, how many there are)."""
        tiles_begin = offsets_begin + experts + 1
        # --- halve the list: the first tile of `low` is not behind this one, that of `high` is
        low, high = int32(0), int32(experts)
        while high - low > 1:
            middle = int32((low + high) >> 1)
            if words[tiles_begin + middle] <= tile_m:
                low = middle
            else:
                high = middle
        # --- its rows
        m0 = int32(words[offsets_begin + low] + (tile_m - words[tiles_begin + low]) * block_m)
        return low, m0, int32(min(int32(words[offsets_begin + low + 1] - m0), block_m))

    @cuda.jit(device=True, forceinline=True)
    def produce(shared, words, a, w, tile_id, tiles_c, tiles_n, steps, experts):
        """One thread: the copies of tile `tile_id`, and of each that comes as many further on as
        there are thread blocks."""
        prefetch_tensor_map(a)
        stage, parity = int32(0), int32(0)
        while tile_id < tiles_c:
            tile_m = quotient(tile_id, tiles_n)
            expert, m0, _ = find(words, tile_m, experts)
            group = expert * tiles_n + (tile_id - tile_m * tiles_n)  # of 128 rows of W
            for step in range(steps):
                # --- wait until the stage is empty
                mbarrier_wait(shared, empty + MBARRIER * stage, parity ^ 1)

                # --- issue its copies: the weights in one piece, and two boxes of A
                bar, k = int32(full + MBARRIER * stage), int32(step * BLOCK_K)
                destination = stage * a_bytes
                mbarrier_arrive_expect(shared, bar, a_bytes + w_bytes)
                source = (int64(group) * steps + step) * w_bytes
                bulk_copy(shared, weights_begin + stage * w_bytes, w, source, w_bytes, shared, bar)
                tensor_copy(shared, destination, a, k, m0, shared, bar)
                tensor_copy(shared, destination + box_bytes, a, int32(k + BOX_K), m0, shared, bar)
                stage, parity = next_stage(stage, parity)
            tile_id = int32(tile_id + cuda.gridDim.x)

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
    def consume(shared, warp, lane, steps, stage, parity):
        """A warpgroup -> the sums of its 64 features and all rows of a tile, and the stage and
        parity behind it. While the tensor cores multiply one half of a stage, the weights of the
        other half become float16."""
        acc = no_sums()
        previous, step = int32(0), int32(0)
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
                break
        acc = wait_for_all(acc)
        cuda.syncwarp()
        if lane == 0:
            mbarrier_arrive(shared, empty + MBARRIER * previous)
        return acc, stage, parity

    @cuda.jit(launch_bounds=(THREADS, 1))
    def w4a16_sorted_prefill(a_map, w, row_scales, rows, offsets, c, steps):
        """c[rows[i]] = a[i] @ dequantize(w[e])[N, K]^T for rows i from offsets[e] to offsets[e + 1]
        of all experts e; w and row_scales of `tiles_of_experts`, a_map of sorted a; steps of 128 K.
        Other rows of c are NaN. a and c are float16 and begin at multiples of 16 bytes."""
        shared = cuda.shared.array(0, uint8, alignment=1024)  # all of the dynamic shared memory
        words = cuda.shared.array(0, int32, alignment=1024)  # the same, as int32
        a = tensor_map_address(a_map)
        t, steps = int32(cuda.threadIdx.x), int32(steps)
        # shuffled, so that the compiler knows it is one value for the whole warp
        warp, lane = shfl(int32(t >> 5), 0), int32(t & 31)
        pairs, N, experts = int32(c.shape[0]), int32(c.shape[1]), int32(offsets.shape[0] - 1)
        tiles_n = quotient(N + (BLOCK_N - 1), BLOCK_N)

        # --- make the mbarriers: one producer fills a stage, every consumer warp empties it
        if t == 0:
            for stage in range(stages):
                mbarrier_init(shared, full + MBARRIER * stage, 1)
                mbarrier_init(shared, empty + MBARRIER * stage, CONSUMER_WARPS)
            fence_mbarrier_init()
        griddepcontrol_launch_dependents()  # the next launch may begin wherever an SM is free

        # --- when A has been sorted: the list of tiles
        griddepcontrol_wait()
        list_tiles(words, offsets, experts, t)
        known = int32(words[offsets_begin + experts])
        tiles_c = int32(words[offsets_begin + 2 * experts + 1] * tiles_n)
        tile_id = int32(cuda.blockIdx.x)

        # --- the producer's warpgroup: one thread works, and it needs few registers
        if warp >= CONSUMER_WARPS:
            fewer_registers()
            if warp == CONSUMER_WARPS and lane == 0:
                produce(shared, words, a, w, tile_id, tiles_c, tiles_n, steps, experts)
            return

        # --- the consumers: tile after tile
        more_registers()
        sums = cuda.local.array(n_acc, float32)
        stage, parity = int32(0), int32(0)
        out_row, out_chunk = int32(t >> 4), int32(t & 15)  # of the tile that goes to C
        while tile_id < tiles_c:
            tile_m = quotient(tile_id, tiles_n)
            expert, m0, count = find(words, tile_m, experts)
            n0 = int32((tile_id - tile_m * tiles_n) * BLOCK_N)
            tile_id = int32(tile_id + cuda.gridDim.x)
            feature = int32(expert * (tiles_n * BLOCK_N) + n0 + 16 * warp + (lane >> 2))
            scale_g, scale_g8 = load_f32(row_scales, feature), load_f32(row_scales, feature + 8)
            acc, stage, parity = consume(shared, warp, lane, steps, stage, parity)
            spread(sums, acc)

            # --- registers -> shared -> global, as in step 14, each row to where its pair is
            token, chunk = (lane >> 4) * 8 + (lane & 7), 2 * warp + (lane >> 3 & 1)
            destination = c_begin + token * C_ROW + (chunk ^ (token & 7)) * CHUNK
            source = c_begin + out_row * C_ROW + (out_chunk ^ (out_row & 7)) * CHUNK
            n = int32(n0 + 8 * out_chunk)
            for first_row in range(0, block_m, staged):
                barrier_sync(1, CONSUMERS)  # nobody loads the rows before any more
                for j in range(0, staged, 16):
                    i = (first_row + j) // 2
                    stmatrix_x4_trans(
                        shared,
                        destination + j * C_ROW,
                        floats_to_halves(sums[i] * scale_g, sums[i + 1] * scale_g),
                        floats_to_halves(sums[i + 2] * scale_g8, sums[i + 3] * scale_g8),
                        floats_to_halves(sums[i + 4] * scale_g, sums[i + 5] * scale_g),
                        floats_to_halves(sums[i + 6] * scale_g8, sums[i + 7] * scale_g8),
                    )
                barrier_sync(1, CONSUMERS)
                for j in range(0, staged, CONSUMERS // 16):
                    m = int32(out_row + (first_row + j))
                    if m < count and n < N:
                        at = int64(load_u32(rows, m0 + m)) * N + n
                        eight = load_u32x4(shared, source + j * C_ROW)  # float16
                        if N % 8 == 0:
                            store_u32x4(c, at, eight[0], eight[1], eight[2], eight[3])
                        else:  # rows of C do not begin at multiples of 16 bytes
                            for i in range(8):
                                if n + i < N:
                                    value = eight[i // 2] >> uint32(16 * (i % 2))
                                    store_u16(c, at + i, value)

        # --- rows whose id is no expert
        for i in range(known + cuda.blockIdx.x, pairs, cuda.gridDim.x):
            at = int64(load_u32(rows, i)) * N
            for j in range(t, N, CONSUMERS):
                store_u16(c, at + j, float_to_half(float32(nan)))

    return w4a16_sorted_prefill, shared_bytes


def launch(
    fmt: Format, family: Family, shape: Shape, weights: tuple, activations: tuple, out: Any
) -> Launch:
    a, rows, offsets = activations
    # Few experts have more rows than the mean plus two standard deviations: as few tiles as hold so
    # many, all of one height
    experts = offsets.shape[0] - 1
    likely = max(1, ceil(shape.m / experts + 2 * sqrt(shape.m / experts)))
    block_m = ceil_div(ceil_div(likely, ceil_div(likely, BLOCK_M)), 16) * 16
    table_bytes = ceil_div(8 * (experts + 1), TABLE_BYTES) * TABLE_BYTES
    run, shared_bytes = kernel(fmt.name, block_m, table_bytes)
    args = (TensorMap(a, (block_m, BOX_K)), *weights, rows, offsets, out)
    steps = ceil_div(shape.k, BLOCK_K)
    most = ceil_div(shape.n, BLOCK_N) * (shape.m // block_m + min(shape.m, experts))  # tiles
    blocks = min(multiprocessors(), most)
    return Launch(run, (blocks,), (THREADS,), (*args, steps), shared_bytes, overlap=True)


STEP = Step(
    number=20,
    name="step20_sorted_prefill",
    title="experts of many tokens: sorted on the GPU, one launch of all tiles",
    branch="experts",
    families=("A16",),
    parents={"A16": 14},
    homes=((32768, 1536, 2048),),
    unit={"A16": "tensor_fp16"},
    pack=tiles_of_experts,
    activations={"A16": RowsByIds(experts=128, chosen=8, sorted_by=sorted_rows)},
    launch=launch,
    inputs=("float16",),
    outputs=("float16",),
    min_cc=(9, 0),
    max_cc=(9, 0),  # others have no wgmma, later ones neither
    idea=("cuda.ballot_sync", "cuda.popc", "find", "tensor_copy", "wgmma_f16"),
    contains={"A16": ("HGMMA", "UTMALDG", "UBLKCP", "SYNCS", "USETMAXREG")},
    forbids={"A16": ("IMMA", "HMMA", "LDGSTS", "LDSM", "LDL", "STL", "MEMBAR")},
)
