"""Step 19: mixtures of experts - one launch for all experts, which ids on the GPU name.

What is new
    In a mixture of experts W is E matrices [N, K], and a *router* has chosen some for each token:
    ids[T, S] says which. Row p of C, a *pair*, is token p // S times the matrix of expert ids[p].
    A loop of step 18 reads ids on the host and launches a product for each expert. Here the grid
    has a column of thread blocks for every pair, and each finds out on the GPU what it has to do:

        pair p          0   1   2   3   4   5   6   7         two tokens of four experts each
        token p // 4    0   0   0   0   1   1   1   1
        expert ids[p]   7   2   9   4   2   5   7   1
        earlier pairs   0   0   0   0   1   0   1   0         of the same expert
                                        |       '-- leaves: pair 0 multiplies it, too
                                        '---------- leaves: pair 1 multiplies it, too

    Tokens that chose the same expert share its weights: of each eight pairs of an expert the first
    one *leads*. The leader's thread blocks multiply all eight at once, as an mma has eight columns;
    the thread blocks of the other seven leave. A warp compares 32 ids with its own at a time:
    `ballot` gives all lanes a bit for each lane that found the same expert, so the bits below a
    lane's own say how many pairs came earlier. No list is made, no barrier is needed, and the host
    knows nothing of ids: the launch is the same whatever they are, and a CUDA graph may hold it.

        lane        0  1  2  3  4  5  6  7  8 ... 31
        its id      7  2  9  4  2  5  7  1  -      -        of expert 7, pair 0 leads
        ballot      1  .  .  .  .  .  1  .  .      .        lane 6 has one bit below its own: it is
                                                            member 1 of the group
Why it should help
    One token of Qwen3-30B-A3B has eight experts of 1536 x 2048 (gate and up): 14.2 MB of Q4_0, 3.5
    us of memory at 4.1 TB/s. In a loop each expert is a launch of 48 thread blocks for 132 SMs. It
    takes 2.5 us, and memory is busy for a fifth of them: 20 us for all eight, and before the first
    one the host has waited for ids. In one launch 384 thread blocks of eight warps run at once,
    three an SM. All have issued all copies of their 2048 K, two tiles a warp, as soon as they know
    their expert. To the 3.5 us come 1.2 between launches, 0.7 for ids, which weights wait for, and
    1.2 for the first bytes and the last sums: expect 6.6 us, 3 times the loop.
What it costs
    Weights cannot be asked for while the launch before still runs, as ids come from it; step 18
    asks for its first ones then. A group may be one token: then seven of eight columns are
    multiplied for nothing. Every pair that does not lead still starts a thread block for each 32
    rows of W, which leaves at once: this is for few tokens.
Machine code
    VOTE and POPC before the first UBLKCP, which copies weights and rows of A; no UTMALDG; the loop
    of step 18.
Prerequisites
    Step 18 (bulk copies, mbarriers, launches that overlap).
"""

from __future__ import annotations

from functools import cache
from math import nan
from typing import Any, Final

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32

from qformats import Format
from qformats.repack import TILE_GROUP, TILE_K, TILE_ROWS, tiles
from steps.blocks.experts import RowsByIds
from steps.blocks.halves import half_weights
from steps.contract import Branch, Family, Launch, Shape, Step, ceil_div
from steps.instructions import (
    bulk_copy,
    fence_mbarrier_init,
    float_to_half,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    ldmatrix_x4,
    load_f32,
    load_u32,
    mbarrier_arrive_expect,
    mbarrier_init,
    mbarrier_wait,
    mma_m16n8k16_f16,
    shfl,
    store_f32,
    store_u16,
    store_u32x4,
)

LANES: Final = 32  # of a warp
EVERY_LANE: Final = 0xFFFFFFFF
WARPS: Final = 8  # of a thread block, side by side along K
THREADS: Final = LANES * WARPS
BLOCKS_PER_SM: Final = 3  # 132 SMs run all 384 blocks of eight experts at once
MEMBERS: Final = 8  # pairs of a group: the columns of an mma
ROW_TILES: Final = 2  # packed tiles side by side: what is read of A serves both
ROWS: Final = ROW_TILES * TILE_ROWS  # of W, of a thread block
SLOTS: Final = 2  # of a warp's ring: those of eight warps hold 2048 K
CHUNK: Final = 16  # bytes: 8 float16
MBARRIER: Final = 8  # bytes
A_BYTES: Final = 2 * TILE_K  # of a token, 128 K
# From token to token in shared memory: with one chunk more, the eight rows of an ldmatrix are in
# different banks
A_ROW: Final = A_BYTES + CHUNK
# Floats of a token at the end: with four more than it has features, the lanes of a warp store into
# all 32 banks
SUMS_ROW: Final = ROWS + 4

# Gate and up of Qwen3-30B-A3B's experts, for 1 and for 4096 tokens
BRANCH: Final = Branch("mixtures of experts, 8 of 128", ((8, 1536, 2048), (32768, 1536, 2048)))


def tiles_of_experts(blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    """Blocks [E, N, K/32], or [N, K/32] of one expert -> (packed, row_scales): `tiles` of each
    expert, one after another. Each has whole groups of 128 rows and 128 K."""
    each = blocks.reshape(-1, *blocks.shape[-2:])
    packed, row_scales = zip(*map(tiles, each), strict=True)
    return np.concatenate(packed), np.concatenate(row_scales)


@cache
def kernel(format_name: str) -> tuple[Any, int]:
    """(the kernel, its bytes of shared memory)."""
    weights = half_weights(format_name)
    tile_bytes, load, fragment = weights.tile_bytes, weights.load, weights.fragment
    # Shared memory: A of all slots of all rings; then their packed tiles, then their mbarriers
    a_bytes, w_bytes = MEMBERS * A_ROW, ROW_TILES * tile_bytes  # of a slot
    weights_begin = WARPS * SLOTS * a_bytes
    bars_begin = WARPS * SLOTS * (a_bytes + w_bytes)
    shared_bytes = bars_begin + WARPS * SLOTS * MBARRIER
    group_bytes = TILE_GROUP * tile_bytes  # of 128 rows and 128 K of W
    n_acc = 4 * ROW_TILES
    warp_sums = MEMBERS * SUMS_ROW

    @cuda.jit(device=True, forceinline=True)
    def earlier_pairs(ids, pair, expert, lane):
        """By a warp: how many pairs before this one have its expert."""
        # --- compare 32 ids at a time, and count the lanes that found the same
        found = int32(0)
        for first in range(0, pair, LANES):
            i = int32(first + lane)
            same = i < pair and load_u32(ids, i) == expert
            found = int32(found + cuda.popc(cuda.ballot_sync(EVERY_LANE, same)))
        return found

    @cuda.jit(device=True, forceinline=True)
    def find_members(members, ids, pair, pairs, expert, lane):
        """By a warp: the pairs from this one on that have its expert, to members[0 .. 7]. Returns
        how many there are, eight at most."""
        # --- compare 32 ids at a time; the bits below a lane's own are the members before it
        found, first, below = int32(0), pair, uint32((1 << lane) - 1)
        while first < pairs and found < MEMBERS:
            i = int32(first + lane)
            same = i < pairs and load_u32(ids, i) == expert
            votes = uint32(cuda.ballot_sync(EVERY_LANE, same))
            place = int32(found + cuda.popc(votes & below))
            if same and place < MEMBERS:
                members[place] = i
            found = int32(found + cuda.popc(votes))
            first = int32(first + LANES)
        cuda.syncwarp()  # for all lanes; and lane 0 has made the mbarriers
        return int32(min(found, MEMBERS))

    @cuda.jit(device=True, forceinline=True)
    def copy_slot(shared, slot_a, slot_w, a, w, row, source, k_tile, count, bar, lane):
        """A warp issues the copies of 128 K: lane 0 that of the packed tiles, each of the first
        `count` lanes that of a token, row `row` of A. Beyond K it stores zeros: weights are zeros
        there, but what lies in shared memory may be NaN, and 0 * NaN is NaN."""
        K = int32(a.shape[1])
        size = int32(min(A_BYTES, 2 * (K - k_tile * TILE_K)))
        if lane == 0:
            mbarrier_arrive_expect(shared, bar, w_bytes + count * size)
            bulk_copy(shared, slot_w, w, source, w_bytes, shared, bar)
        # Bytes may arrive before lane 0 has said how many: they count all the same
        if lane < count:
            destination = slot_a + lane * A_ROW
            bulk_copy(shared, destination, a, int64(row) * K + k_tile * TILE_K, size, shared, bar)
            zero = uint32(0)
            for i in range(size, A_BYTES, CHUNK):
                store_u32x4(shared, destination + i, zero, zero, zero, zero)

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

    @cuda.jit(launch_bounds=(THREADS, BLOCKS_PER_SM))
    def w4a16_grouped_decode(w, row_scales, a, ids, c, k_tiles):
        """c[T S, N] = a[T, K] @ dequantize(w[ids])[N, K]^T; w and row_scales of `tiles_of_experts`,
        with `k_tiles` tiles of 128 K. ids: int32 [T, S]; rows of c whose id is no expert are NaN.
        a and c are float16; a begins at a multiple of 16 bytes."""
        griddepcontrol_launch_dependents()  # the next launch may begin wherever an SM is free
        shared = cuda.shared.array(0, uint8, alignment=128)  # all of the dynamic shared memory
        sums = cuda.shared.array(0, float32, alignment=128)  # the same, when K is done
        group = cuda.shared.array((WARPS, MEMBERS), int32)  # each warp finds it for itself
        acc = cuda.local.array(n_acc, float32)
        t, k_tiles = int32(cuda.threadIdx.x), int32(k_tiles)
        # shuffled, so that the compiler knows it is one value for the whole warp
        warp, lane = shfl(int32(t >> 5), 0), int32(t & 31)
        pair, n0 = int32(cuda.blockIdx.x), int32(cuda.blockIdx.y * ROWS)
        pairs, N = int32(c.shape[0]), int32(c.shape[1])
        of_expert = int32((N + TILE_GROUP * TILE_ROWS - 1) // (TILE_GROUP * TILE_ROWS))  # groups
        own_a, own_w = warp * (SLOTS * a_bytes), weights_begin + warp * (SLOTS * w_bytes)
        own_bars = bars_begin + warp * (SLOTS * MBARRIER)
        for r in range(n_acc):
            acc[r] = 0

        # --- make the warp's mbarriers
        if lane == 0:
            for s in range(SLOTS):
                mbarrier_init(shared, own_bars + MBARRIER * s, 1)
            fence_mbarrier_init()

        # --- when the launch before, which may make ids and A, has ended: leave if an earlier pair
        # leads; all warps find the same
        griddepcontrol_wait()
        expert = load_u32(ids, pair)
        if earlier_pairs(ids, pair, expert, lane) % MEMBERS != 0:
            return

        # --- the tokens of the group: row of A of the lane's member, and how many there are
        members = group[warp]
        count = find_members(members, ids, pair, pairs, expert, lane)
        row = int32(members[min(lane, int32(count - 1))] // ids.shape[1])
        known = expert < uint32(row_scales.shape[0] // (of_expert * TILE_GROUP * TILE_ROWS))

        # --- the expert's weights: tiles of K of this warp, none if there is no such expert; and
        # the byte of the first ones in W
        steps = int32((k_tiles - warp + (WARPS - 1)) // WARPS if known else 0)
        row_tile = n0 // TILE_ROWS
        first_group = int64(expert) * of_expert + row_tile // TILE_GROUP
        source = (first_group * k_tiles + warp) * group_bytes
        source += row_tile % TILE_GROUP * tile_bytes
        stride = WARPS * group_bytes  # from one tile of this warp to its next

        # --- global -> shared: the first slots
        k_tile = warp
        for s in range(SLOTS):
            if s < steps:
                slot_a, slot_w = own_a + s * a_bytes, own_w + s * w_bytes
                bar = own_bars + MBARRIER * s
                copy_slot(shared, slot_a, slot_w, a, w, row, source, k_tile, count, bar, lane)
            source += stride
            k_tile = int32(k_tile + WARPS)
        cuda.syncwarp()  # zeros beyond K are there for all lanes

        # Lane 8i + r gives ldmatrix the address of row r of matrix i, a chunk. Columns without a
        # token repeat the last one's, and are not stored
        slot, parity = int32(0), int32(0)
        own_row = min(lane & 7, int32(count - 1)) * A_ROW + (lane >> 3) * CHUNK
        for i in range(steps):
            # --- wait for the oldest slot
            slot_a, slot_w = own_a + slot * a_bytes, own_w + slot * w_bytes
            bar = own_bars + MBARRIER * slot
            mbarrier_wait(shared, bar, parity)

            # --- multiply: 64 K of both packed tiles, then the other 64
            for half in range(2):
                row_at = slot_a + own_row + half * (A_BYTES // 2)
                b = ldmatrix_x4(shared, row_at) + ldmatrix_x4(shared, row_at + 4 * CHUNK)
                for j in range(ROW_TILES):
                    words = load(shared, slot_w + j * tile_bytes, lane, half)
                    multiply(acc, 4 * j, words, b)

            # --- refill the slot, when all lanes have read it
            cuda.syncwarp()
            if i + SLOTS < steps:
                copy_slot(shared, slot_a, slot_w, a, w, row, source, k_tile, count, bar, lane)
            source += stride
            k_tile = int32(k_tile + WARPS)
            slot = int32(slot + 1)
            if slot == SLOTS:
                slot, parity = int32(0), int32(parity ^ 1)

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

        # --- shared -> global: a warp has a member of the group, and a lane adds up one output
        n = int32(n0 + lane)
        if warp < count and n < N:
            total = float32(0 if known else nan)
            for i in range(WARPS):
                total += load_f32(sums, i * warp_sums + warp * SUMS_ROW + lane)
            if known:
                total *= load_f32(row_scales, int32(expert) * (of_expert * 128) + n)
            store_u16(c, int64(members[warp]) * N + n, float_to_half(total))

    return w4a16_grouped_decode, shared_bytes


def launch(
    fmt: Format, family: Family, shape: Shape, weights: tuple, activations: tuple, out: Any
) -> Launch:
    run, shared_bytes = kernel(fmt.name)
    # Pairs on x: thread blocks of the same rows follow each other, and those that leave do so early
    grid = (shape.m, ceil_div(shape.n, ROWS))
    args = (*weights, *activations, out, ceil_div(shape.k, TILE_K))
    return Launch(run, grid, (THREADS,), args, shared_bytes, overlap=True)


STEP = Step(
    number=19,
    name="step19_grouped_decode",
    title="experts of few tokens: one launch, ids found on the GPU",
    branch="experts",
    families=("A16",),
    parents={"A16": 18},
    homes=BRANCH.homes[:1],
    unit={"A16": "tensor_fp16"},
    pack=tiles_of_experts,
    activations={"A16": RowsByIds(experts=128, chosen=8)},
    launch=launch,
    inputs=("float16",),
    outputs=("float16",),
    min_cc=(9, 0),
    idea=("cuda.ballot_sync", "cuda.popc", "bulk_copy", "mbarrier_wait"),
    contains={"A16": ("HMMA.16816.F32", "HFMA2", "LDSM.16.M88.4", "VOTE", "POPC", "UBLKCP")},
    forbids={"A16": ("IMMA", "LDGSTS", "UTMALDG", "LDL", "STL")},
)
