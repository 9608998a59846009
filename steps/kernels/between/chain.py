"""One stream of weights: all layers of a token in one launch.

    qkv | attention | out | + h, norm | gates, ups | silu * | down | + h, norm | qkv | attention ...

What is new
    One thread block an SM, and each knows from the beginning which weights it will multiply: a
    share of every product, in pairs of row tiles. Producers copy them into one long ring, product
    after product and layer after layer, whatever the others wait for; sixteen warps share K.
    Nothing between two products is a barrier of the grid: what one of them makes lies in memory
    that is full of a value that no product stores (`polled.NOTHING`), and a warp polls just the K
    that it multiplies until all is there.

        ring of an SM   | qkv |         out | gates and ups ....... | down ... | qkv |  filled ahead
        16 warps          ^ x  attention ^ a  ^ x, polled             ^ polled   ^ x

    Norms are deferred as in `steps.kernels.between.deferred_norm`: x = h * weight * s, and r / s
    behind the next product. The sums of h^2 of each pair of row tiles are polled likewise, by one
    warp of each block. Rows of the residual stay with the block that has them. Attention is a stage
    of the same warps (`steps.kernels.between.chain_attention`): meanwhile the rings fill.
Why it should help
    Behind every product memory idles until A has come and the first weights have. Four products and
    attention took 40.3 us of a layer of Llama 3 8B on an H200, where its 123 MB of weights take 28.
    With a launch a layer, and attention another one, a layer took 37.2: the ring ended with each
    launch, and then memory idled for 5 to 6 us. Expect 34 us.
What it costs
    All blocks must be on the GPU at once: `runs_here`. 227 KB of shared memory, so nothing else
    runs on an SM beside it. One token. Weights of all layers lie one behind the other.
Machine code
    UBLKCP in the producer; LDG.E.128.STRONG.GPU for polls; HMMA with no LDG in the stream; no
    spills: what comes out of the L1 waits there behind the weights of the whole SM.
Prerequisites
    Step 18, `deferred_norm`, `attention`, and of step 13 producers and setmaxnreg.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32, uint64

from qformats.repack import TILE_GROUP, TILE_K, TILE_ROWS
from steps.contract import Launch, ceil_div, shared_memory, why_no_gpu
from steps.instructions import (
    as_bits,
    as_float,
    barrier_sync,
    bulk_copy,
    cp_async_4,
    cp_async_16,
    cp_async_commit,
    cp_async_wait,
    fence_mbarrier_init,
    float_to_half,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    load_f32,
    load_u32,
    load_u32_relaxed,
    load_u32x4,
    mbarrier_arrive,
    mbarrier_arrive_expect,
    mbarrier_init,
    mbarrier_wait_bounded,
    shfl,
    shfl_xor,
    store_f32,
    store_u16_relaxed,
    store_u32,
    store_u32_relaxed,
    store_u32x4,
    thread_index,
    trap,
)
from steps.instructions.approximate import reciprocal, rsqrt
from steps.instructions.warpgroup import setmaxnreg_dec, setmaxnreg_inc
from steps.kernels.between.chain_attention import (
    MOST_QUERIES,
    MOST_SPLITS,
    SIZES,
    attention_stage,
    over,
)
from steps.kernels.between.deferred_norm import ROOM
from steps.kernels.between.polled import POLLS, missing, poll
from steps.kernels.decode.product import PAIR, product_a16
from steps.kernels.parts.activations.gated import silu_times
from steps.kernels.parts.weights.codes import tile_index
from steps.kernels.parts.weights.storage_formats import tile_format

WARPS: Final = 16
"""That multiply. A warpgroup more has the producers."""
PRODUCERS: Final = 4
"""Lanes that issue copies, one on each scheduler: one alone is too slow beside 16 warps."""
ROWS: Final = PAIR * TILE_ROWS
"""Of a pair of row tiles."""
H200_UNDER_WAY: Final = 8 * 4608
"""Bytes of weights asked for at a time, on an SM: A waits behind them."""
DEEP: Final = 2
"""K tiles of a chunk, where that is `MOST_CHUNK` bytes at most."""
MOST_CHUNK: Final = 4608
BESIDE: Final = 4
"""SMs without a block, so that none waits for an SM on which the launch before has one: it would be
late, and all wait for it. Of 132 SMs 128 have equal shares of Llama 3 8B."""
EVEN: Final = 0.9
"""Of the largest share of a product the average one must be."""
FIELDS: Final = 5
"""Of a product in shared memory: pairs of the block, the first, chunks of a pair, K tiles, and
chunks of the products before it in a layer. Behind the last one: the position, and a layer's
chunks."""
fewer, more = setmaxnreg_dec(24), setmaxnreg_inc(112)  # 128 * 24 + 512 * 112 <= 640 * 96
wait_all = cp_async_wait(0)


@dataclass(frozen=True, slots=True)
class Chain:
    """What a kernel is compiled for.

    format : storage format of all products
    warps  : that multiply
    deep   : K tiles of a chunk
    slots  : of the ring
    a_bytes: of the longest A
    even, odd : pairs of a block at most, in products 0 and 2, and in 1 and 3
    loads  : sums of h^2 of a lane
    biases : pairs of a block at most whose queries, keys and values have a bias
    queries, size : that share a key, and values of a head
    normed : whether queries and keys have a norm of their own
    """

    format: str
    warps: int
    deep: int
    slots: int
    a_bytes: int
    even: int
    odd: int
    loads: int
    biases: int
    queries: int
    size: int
    normed: bool

    @property
    def threads(self) -> int:
        return 32 * (self.warps + 4)

    @property
    def pair_bytes(self) -> int:
        return PAIR * tile_format(self.format).tile_bytes

    @property
    def chunk(self) -> int:
        return self.deep * self.pair_bytes

    @property
    def a_at(self) -> int:
        return self.slots * self.chunk

    @property
    def sums_at(self) -> int:
        return self.a_at + self.a_bytes

    @property
    def bars_at(self) -> int:
        """Sums of products 0 and 2, then those of 1 and 3."""
        return self.sums_at + self.warps * 4 * ROWS * (self.even + self.odd)

    @property
    def rows_at(self) -> int:
        """Behind two mbarriers for each slot: row scales of pairs, then biases, h and weights."""
        return self.bars_at + 16 * self.slots

    @property
    def bias_at(self) -> int:
        return self.rows_at + 4 * ROWS * max(self.even, self.odd)

    @property
    def h_at(self) -> int:
        return self.bias_at + 4 * ROWS * self.biases

    @property
    def weights_at(self) -> int:
        return self.h_at + 4 * ROWS * self.odd

    @property
    def squares_at(self) -> int:
        return self.weights_at + 4 * ROWS * self.odd

    @property
    def norms_at(self) -> int:
        """r of the norms before qkv and before gates."""
        return self.squares_at + 128 * self.loads

    @property
    def table_at(self) -> int:
        return self.norms_at + 16

    @property
    def shares_at(self) -> int:
        """Of attention, in place of A: behind the queries, the new key and the new value what each
        warp has found, and its largest scores and sums of shares."""
        return self.a_at + 4 * self.queries * self.size + 4 * self.size

    @property
    def states_at(self) -> int:
        return self.shares_at + 4 * self.warps * self.queries * self.size

    @property
    def attention_bytes(self) -> int:
        return self.states_at + 8 * self.warps * self.queries - self.a_at

    @property
    def shared(self) -> int:
        return self.table_at + 4 * 5 * FIELDS


@cuda.jit(device=True, forceinline=True)
def share(pairs, last):
    """(this block's pairs of so many, the first of them): as even as can be, where blocks that
    have one more come first, or last."""
    block, blocks = int32(cuda.blockIdx.x), int32(cuda.gridDim.x)
    each = int32(uint32(pairs) // uint32(blocks))
    rest = int32(pairs - each * blocks)
    if last:
        begin = int32(blocks - rest)
        own = int32(each + 1) if block >= begin else each
        return own, int32(each * block + max(int32(block - begin), int32(0)))
    own = int32(each + 1) if block < rest else each
    return own, int32(each * block + min(block, rest))


@cache
def kernel(layout: Chain) -> Any:
    warps, deep, slots, chunk, pair_bytes = (
        layout.warps,
        layout.deep,
        layout.slots,
        layout.chunk,
        layout.pair_bytes,
    )
    a_at, sums_at, bars_at, rows_at = layout.a_at, layout.sums_at, layout.bars_at, layout.rows_at
    bias_at, h_at, weights_at = layout.bias_at, layout.h_at, layout.weights_at
    squares_at, norms_at, table_at = layout.squares_at, layout.norms_at, layout.table_at
    empty_at, loads, biased = bars_at + 8 * slots, layout.loads, layout.biases > 0
    of_pair, of_chunk = 4 * ROWS, deep * TILE_K  # bytes of sums; K
    lanes_of_a = of_chunk // 8
    even_bytes, odd_bytes = of_pair * layout.even, of_pair * layout.odd
    odd_at = sums_at + warps * even_bytes
    more_parts = ceil_div(layout.a_bytes // 2 // of_chunk, warps)
    of_heads = layout.queries, layout.size, layout.normed
    attend, prefetch = attention_stage(warps, *of_heads, a_at, layout.shares_at, layout.states_at)
    keys_of = layout.queries * layout.size
    product = product_a16(layout.format, "float16", 1)
    places, multiply, scale_of_format = product.places, product.multiply, product.scale
    tile_bytes = tile_format(layout.format).tile_bytes

    @cuda.jit(device=True, forceinline=True)
    def entry(smem, p, field):
        return int32(load_u32(smem, table_at + 4 * (FIELDS * p + field)))

    @cuda.jit(device=True, forceinline=True)
    def write_table(smem, p, pairs, last, k, before):
        own, first = share(pairs, last)
        at, k_tiles = table_at + 4 * FIELDS * p, int32(uint32(k) // uint32(TILE_K))
        store_u32(smem, at, uint32(own))
        store_u32(smem, at + 4, uint32(first))
        chunks = int32(uint32(k_tiles) // uint32(deep))
        store_u32(smem, at + 8, uint32(chunks))
        store_u32(smem, at + 12, uint32(k_tiles))
        store_u32(smem, at + 16, uint32(before))
        return int32(before + own * chunks)

    @cuda.jit(device=True, forceinline=True)
    def slot_of(index):
        turn = uint32(index) // uint32(slots)
        return int32(uint32(index) - turn * uint32(slots)), int32(turn & uint32(1))

    def streamed(gated):
        """stream(smem, w, p, window, own, state) -> state: one lane copies its chunks of a product,
        every `PRODUCERS`-th of the block's. gated: a pair is a row tile of gates and the same one
        of ups, half of the matrix apart; else two that lie side by side.

        state: (the next chunk, where the product begins; its slot, and the parity of the wait for
        it; the slot of the chunk `window` before, likewise)."""
        pieces, piece = (2, tile_bytes) if gated else (1, pair_bytes)

        @cuda.jit(device=True, forceinline=True)
        def stream(smem, w, layer, all_pairs, p, window, own, state):
            index, begin, slot, turn, landed, landed_turn = state
            chunks, k_tiles = entry(smem, p, 2), entry(smem, p, 3)
            end = int32(begin + entry(smem, p, 0) * chunks)
            pair, c = entry(smem, p, 1), int32(index - begin)
            whole = int64(all_pairs) * (k_tiles * pair_bytes)
            half, of_layer = whole >> 1, whole * layer
            while index < end:
                while c >= chunks:
                    pair, c = int32(pair + 1), int32(c - chunks)
                tile = pair if gated else int32(PAIR * pair)
                at = of_layer + int64(tile_index(tile, int32(deep * c), k_tiles)) * tile_bytes
                bar, to = int32(bars_at + 8 * slot), int32(slot * chunk)
                mbarrier_wait_bounded(smem, empty_at + 8 * slot, turn)
                if index >= window:
                    mbarrier_wait_bounded(smem, bars_at + 8 * landed, landed_turn)
                    landed = int32(landed + PRODUCERS)
                    if landed >= slots:
                        landed, landed_turn = own, int32(landed_turn ^ 1)
                mbarrier_arrive_expect(smem, bar, chunk)
                for i in range(deep):
                    for j in range(pieces):
                        into = int32(to + i * pair_bytes + j * piece)
                        place = at + i * (TILE_GROUP * tile_bytes) + j * half
                        bulk_copy(smem, into, w, place, piece, smem, bar)
                index, c = int32(index + PRODUCERS), int32(c + PRODUCERS)
                slot = int32(slot + PRODUCERS)
                if slot >= slots:
                    slot, turn = own, int32(turn ^ 1)
            return index, end, slot, turn, landed, landed_turn

        return stream

    stream_pairs, stream_gated = streamed(False), streamed(True)

    @cuda.jit(device=True, forceinline=True)
    def source_of(p, layer, sizes, x_first, x_next, a, x_hidden, gates):
        """A of a product: (array, where it begins)."""
        _, width, hidden, k_out, _, _, _ = sizes
        if p == 1:
            return a, int32(layer * k_out)
        if p == 2:
            return x_hidden, int32(layer * width)
        if p == 3:
            return gates, int32(layer * hidden)
        if layer > 0:
            return x_next, int32((layer - 1) * width)
        return x_first, int32(0)

    @cuda.jit(device=True, forceinline=True)
    def copy_squares(smem, squares, first, parts, lane):
        for i in range(loads):
            if lane + 32 * i < parts:
                to = squares_at + 128 * i + 4 * lane
                cp_async_4(smem, to, squares, int32(first + 32 * i + lane))

    @cuda.jit(device=True, forceinline=True)
    def norm_of(smem, squares, first, parts, copied, mean_of, epsilon, lane):
        """r of a norm, of sums of h^2 that `copy_squares` has brought, if `copied`. Those that had
        not been there are polled, all of them at once: each trip to the L2 takes a microsecond."""
        x, total = cuda.local.array(loads, uint32), float32(0)
        for i in range(loads):
            x[i] = uint32(0)
            if lane + 32 * i < parts:
                x[i] = uint32(0xFFFFFFFF)
                if copied:
                    x[i] = load_u32(smem, squares_at + 128 * i + 4 * lane)
        for i in range(loads):
            if x[i] == uint32(0xFFFFFFFF):
                x[i] = load_u32_relaxed(squares, int32(first + 32 * i + lane))
        for i in range(loads):
            polls = int32(0)
            while x[i] == uint32(0xFFFFFFFF):
                x[i] = load_u32_relaxed(squares, int32(first + 32 * i + lane))
                polls = int32(polls + 1)
                if polls > int32(POLLS):
                    trap()
            total += as_float(x[i])
        for i in range(5):
            total += shfl_xor(total, 1 << i)
        return rsqrt(total * mean_of + epsilon)

    @cuda.jit(device=True, forceinline=True)
    def factor_of(smem, p, layer):
        """By which what a product makes is scaled: s before a norm, r / s behind it. In front of
        the first layer is a norm that is whole."""
        here = load_f32(smem, norms_at + 4 * (p >> 1))
        if p & 1:
            return here * float32(ROOM)
        if p == 0 and layer == 0:
            return float32(1)
        return here * reciprocal(load_f32(smem, norms_at + 4 - 4 * (p >> 1)) * float32(ROOM))

    @cuda.jit(launch_bounds=(layout.threads, 1))
    def chain(
        w_qkv, w_out, w_gates, w_down, scales_qkv, scales_out, scales_gates, scales_down, bias,
        weights_hidden, weights_next, x_first, before, h, x_hidden, gates, x_next, y, a, squares,
        left, words, cache, position, cos, sin, of_queries, of_keys, sizes, epsilon, scale,
        of_heads,
    ):  # fmt: skip
        """See `launch`. sizes: (layers, width, hidden, K of out, N of qkv, length
        of the cache, window)."""
        smem = cuda.shared.array(0, uint8, alignment=128)
        acc = cuda.local.array(8, float32)
        griddepcontrol_launch_dependents()
        layers, width, hidden, k_out, n_qkv, length, window = sizes
        t = int32(cuda.threadIdx.x)
        lane, warp = int32(t & 31), shfl(int32(t >> 5), 0)
        if t == 0:
            n = over(width, int32(ROWS))
            end = write_table(smem, int32(0), over(n_qkv, int32(ROWS)), True, width, int32(0))
            end = write_table(smem, int32(1), n, False, k_out, end)
            end = write_table(smem, int32(2), over(hidden, int32(TILE_ROWS)), False, width, end)
            end = write_table(smem, int32(3), n, False, hidden, end)
            store_u32(smem, table_at + 4 * (4 * FIELDS + 4), uint32(end))
            store_u32(smem, table_at + 4 * (4 * FIELDS), uint32(position[0]))
        elif t == 32 * warps:
            for i in range(2 * slots):
                mbarrier_init(smem, bars_at + 8 * i, 1)
            fence_mbarrier_init()
        cuda.syncthreads()

        if warp >= warps:
            # --- the producers
            fewer()
            if lane == 0:
                own, layer = int32(warp - warps), int32(0)
                state = own, int32(0), own, int32(1), own, int32(0)
                while layer < layers:
                    if own == 0:
                        at = entry(smem, int32(4), 0)
                        prefetch(cache, at, layer, length, over(k_out, int32(keys_of)))
                    n = over(n_qkv, int32(ROWS))
                    state = stream_pairs(smem, w_qkv, layer, n, int32(0), window, own, state)
                    n = over(width, int32(ROWS))
                    state = stream_pairs(smem, w_out, layer, n, int32(1), window, own, state)
                    n = over(hidden, int32(TILE_ROWS))
                    state = stream_gated(smem, w_gates, layer, n, int32(2), window, own, state)
                    n = over(width, int32(ROWS))
                    state = stream_pairs(smem, w_down, layer, n, int32(3), window, own, state)
                    layer = int32(layer + 1)
        else:
            # --- the warps that multiply
            more()
            parts = int32(uint32(width) // uint32(ROWS))
            # one token: from shared memory, or the compiler makes constants anew at each use
            here = int32(min(entry(smem, int32(0), 3), int32(1)))
            offsets = places(lane, here, int32(0))
            stage = int32(0)
            griddepcontrol_wait()
            while stage < 4 * layers:
                p, layer = int32(stage & 3), int32(stage >> 2)
                # read anew in each phase, or one is spilled, and waits behind weights in the L1
                t = thread_index()
                lane, warp = int32(t & 31), int32(t >> 5)
                pairs, first, chunks = entry(smem, p, 0), entry(smem, p, 1), entry(smem, p, 2)
                if warp < pairs:
                    row = int32(ROWS * (first + warp) + lane)
                    place, scales = of_pair * warp + 4 * lane, scales_qkv
                    if p == 0:
                        at = int32(layer * n_qkv + row)
                        if biased:
                            cp_async_4(smem, bias_at + place, bias, at)
                    elif p == 2:
                        scales = scales_gates
                        at = int32(TILE_ROWS * (first + warp) + (lane & 15) + (lane >> 4) * hidden)
                        at = int32(2 * hidden * layer + at)
                    else:
                        scales, weights = scales_out, weights_hidden
                        if p == 3:
                            scales, weights = scales_down, weights_next
                        at = int32(layer * width + row)
                        cp_async_4(smem, weights_at + place, weights, at)
                    cp_async_4(smem, rows_at + place, scales, at)
                    if p == 1 and layer == 0:
                        cp_async_4(smem, h_at + place, h, row)

                # --- this warp's part of A; further parts arrive meanwhile
                source, at = source_of(p, layer, sizes, x_first, x_next, a, x_hidden, gates)
                if pairs > 0:
                    k = int32(of_chunk * warp + 8 * lane)
                    to = int32(a_at + 2 * k)
                    if lane < lanes_of_a:
                        if warp < chunks:
                            store_u32x4(smem, to, *poll(source, at + k))
                        for i in range(1, more_parts):
                            if warp + warps * i < chunks:
                                ahead = of_chunk * warps * i
                                cp_async_16(smem, to + 2 * ahead, source, at + k + ahead)
                if warp == warps - 1 and p == 0 and layer == 0:
                    copy_squares(smem, before, 1, int32(before.size - 1), lane)
                cp_async_commit()
                cuda.syncwarp()

                # --- the stream
                t = thread_index()
                lane, warp, pair = int32(t & 31), int32(t >> 5), int32(0)
                index = int32(layer * entry(smem, int32(4), 4) + entry(smem, p, 4))
                while pair < pairs:
                    if p == 2 and pair == 1 and warp == warps - 1:  # now they are there
                        copy_squares(smem, squares, int32(layer * parts), parts, lane)
                        cp_async_commit()
                    for r in range(8):
                        acc[r] = 0
                    c = warp
                    while c < chunks:
                        slot, turn = slot_of(int32(index + pair * chunks + c))
                        mbarrier_wait_bounded(smem, bars_at + 8 * slot, turn)
                        if pair == 0 and c >= warps:
                            wait_all()
                            k = int32(of_chunk * c + 8 * lane)
                            if lane < lanes_of_a:
                                x0, x1, x2, x3 = load_u32x4(smem, a_at + 2 * k)
                                upper = uint64(32)
                                low = uint64(x0) | uint64(x1) << upper
                                high = uint64(x2) | uint64(x3) << upper
                                if missing((low, high)):
                                    source, at = source_of(
                                        p, layer, sizes, x_first, x_next, a, x_hidden, gates
                                    )
                                    store_u32x4(smem, a_at + 2 * k, *poll(source, at + k))
                            cuda.syncwarp()
                        k = int32(0)
                        while k < deep * here:  # not unrolled: registers
                            multiply(
                                acc, smem, slot * chunk + k * pair_bytes,
                                a_at + 2 * (of_chunk * c + TILE_K * k), int32(0),
                                offsets, here, lane,
                            )  # fmt: skip
                            k = int32(k + 1)
                        cuda.syncwarp()
                        if lane == 0:
                            mbarrier_arrive(smem, empty_at + 8 * slot)
                        c = int32(c + warps)
                    t = thread_index()
                    if t & 3 == 0:
                        to = int32(sums_at + (t >> 5) * even_bytes)
                        if p & 1:
                            to = int32(odd_at + (t >> 5) * odd_bytes)
                        to = int32(to + of_pair * pair + (t & 31))
                        store_f32(smem, to, acc[0])
                        store_f32(smem, to + 32, acc[2])
                        store_f32(smem, to + 64, acc[4])
                        store_f32(smem, to + 96, acc[6])
                    pair = int32(pair + 1)

                # --- the norm, by one warp, for all
                if warp == warps - 1 and p & 1 == 0:
                    wait_all()
                    mean_of = reciprocal(float32(width))
                    at, r = norms_at, float32(0)
                    if p == 2:
                        at, early, row = norms_at + 4, pairs > 1, int32(layer * parts)
                        r = norm_of(smem, squares, row, parts, early, mean_of, epsilon, lane)
                    elif layer == 0:
                        n = int32(before.size - 1)
                        r = norm_of(smem, before, 1, n, True, mean_of, epsilon, lane)
                    else:
                        row = int32((layer - 1) * (parts + 1) + 1)
                        r = norm_of(smem, left, row, parts, False, mean_of, epsilon, lane)
                    if lane == 0:
                        store_f32(smem, at, r)

                # --- the sums of all warps
                barrier_sync(1, 32 * warps)
                t = thread_index()
                lane, warp = int32(t & 31), int32(t >> 5)
                if warp < pairs:
                    total, place = float32(0), int32(of_pair * warp + 4 * lane)
                    at, step = int32(sums_at + place), int32(even_bytes)
                    if p & 1:
                        at, step = int32(odd_at + place), int32(odd_bytes)
                    for i in range(warps):
                        total += load_f32(smem, at + step * i)
                    wait_all()
                    total *= load_f32(smem, rows_at + place) * float32(scale_of_format)
                    factor, pair = factor_of(smem, p, layer), int32(entry(smem, p, 1) + warp)
                    if p & 1:
                        total += load_f32(smem, h_at + place)
                        row = int32(ROWS * pair + lane)
                        x = float_to_half(total * factor * load_f32(smem, weights_at + place))
                        own = total * total
                        for i in range(5):
                            own += shfl_xor(own, 1 << i)
                        store_f32(smem, h_at + place, total)
                        if p == 1:
                            store_u16_relaxed(x_hidden, layer * width + row, x)
                            if lane == 0:
                                store_u32_relaxed(squares, layer * parts + pair, as_bits(own))
                        else:
                            store_u16_relaxed(x_next, layer * width + row, x)
                            if lane == 0:
                                to = int32(layer * (parts + 1) + 1 + pair)
                                store_u32_relaxed(left, to, as_bits(own))
                            if layer == layers - 1:
                                store_f32(h, row, total)
                                if pair == 0 and lane == 0:
                                    store_f32(left, layer * (parts + 1), factor)
                    else:
                        total *= factor
                        if p == 2:
                            up = shfl(total, int32(lane + 16) & 31)
                            total = silu_times(total, up)
                            if lane < TILE_ROWS:
                                row = int32(layer * hidden + TILE_ROWS * pair + lane)
                                store_u16_relaxed(gates, row, float_to_half(total))
                        else:
                            if biased:
                                total += load_f32(smem, bias_at + place)
                            row = int32(layer * n_qkv + ROWS * pair + lane)
                            store_u16_relaxed(y, row, float_to_half(total))
                if p == 0:
                    at = entry(smem, int32(4), 0)
                    attend(
                        smem, y, a, words, cache, at, cos, sin, of_queries, of_keys, scale,
                        of_heads, layer, length, over(k_out, int32(keys_of)),
                    )  # fmt: skip
                stage = int32(stage + 1)

    return chain


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a layer: values of the residual, hidden features, heads of queries and of keys, and values
    of a head; whether queries, keys and values have a bias, and heads a norm."""

    width: int
    hidden: int
    heads: int
    kv: int
    size: int
    biased: bool = False
    normed: bool = False

    @property
    def k_out(self) -> int:
        return self.heads * self.size

    @property
    def n_qkv(self) -> int:
        return (self.heads + 2 * self.kv) * self.size

    @property
    def pairs(self) -> tuple[int, int, int, int]:
        """Pairs of row tiles of each product."""
        return self.n_qkv // ROWS, self.width // ROWS, self.hidden // TILE_ROWS, self.width // ROWS


def chain_of(name: str, sizes: Sizes, blocks: int, warps: int = WARPS) -> Chain:
    """What is compiled for layers in a storage format, for so many thread blocks.

    ValueError where the sizes do not divide into pairs of row tiles and chunks, where a block
    would have more pairs than warps, or where shared memory does not hold A and a ring."""
    width, hidden, k_out, n_qkv = sizes.width, sizes.hidden, sizes.k_out, sizes.n_qkv
    pair_bytes = PAIR * tile_format(name).tile_bytes
    deep = DEEP if DEEP * pair_bytes <= MOST_CHUNK else 1
    if width % ROWS or hidden % (TILE_GROUP * TILE_ROWS) or n_qkv % ROWS:
        raise ValueError(
            f"a chain has multiples of {ROWS} features and of {TILE_GROUP * TILE_ROWS} hidden "
            f"ones, not {width}, {n_qkv} and {hidden}"
        )
    if any(k % (deep * TILE_K) for k in (width, hidden, k_out)):
        raise ValueError(
            f"a chain of {name} takes K in multiples of {deep * TILE_K}, not {k_out}, {width} and "
            f"{hidden}"
        )
    queries = sizes.heads // sizes.kv
    if sizes.size not in SIZES or sizes.heads % sizes.kv or queries > MOST_QUERIES:
        raise ValueError(
            f"a chain takes heads of {', '.join(map(str, SIZES))} values, and up to {MOST_QUERIES} "
            f"of queries to one of keys, not {sizes.heads} to {sizes.kv} of {sizes.size} values"
        )
    if sizes.kv > blocks:
        raise ValueError(f"a chain of {blocks} blocks has no block for each of {sizes.kv} heads")
    pairs = tuple(ceil_div(n, blocks) for n in sizes.pairs)
    if max(pairs) > warps:
        raise ValueError(
            f"a block of a chain has up to {warps} pairs of row tiles of a product, not "
            f"{max(pairs)}"
        )
    work = max(pairs[::2]), max(pairs[1::2])
    loads = ceil_div(max(sizes.pairs[1], blocks + BESIDE), 32)
    of_heads = queries, sizes.size, sizes.normed
    rest = *work, loads, pairs[0] if sizes.biased else 0, *of_heads
    sums = warps * 4 * ROWS * sum(work)
    attends = Chain(name, warps, deep, 0, 0, *rest)
    a_bytes = max(
        2 * max(width, hidden, k_out),
        attends.shares_at - attends.a_at,  # in place of A, while sums are still read
        ceil_div(attends.attention_bytes - sums, 128) * 128,
    )
    without = Chain(name, warps, deep, 0, a_bytes, *rest)
    slots = (shared_memory() - without.shared) // (without.chunk + 16) // PRODUCERS * PRODUCERS
    # A warp looks for a chunk that is up to two turns of the warps behind the one it had last. The
    # chunk whose slot that is must have landed by then, or it takes the old one for the new.
    least = 2 * warps + window_of(without)
    if slots < least:
        raise ValueError(
            f"a chain needs a ring of {least} chunks of {without.chunk} bytes "
            f"beside {without.shared}, and there are {shared_memory()} bytes of shared memory"
        )
    return Chain(name, warps, deep, slots, a_bytes, *rest)


def window_of(layout: Chain) -> int:
    """Chunks under way at a time."""
    return max(1, round(H200_UNDER_WAY / (layout.chunk * PRODUCERS))) * PRODUCERS


def supports(name: str, sizes: Sizes, blocks: int) -> bool:
    """Whether there is a chain for such layers, and blocks get shares that are about equal."""
    try:
        chain_of(name, sizes, blocks)
    except ValueError:
        return False
    return all(n >= EVEN * blocks * ceil_div(n, blocks) for n in sizes.pairs[1:])


def words_of(sizes: Sizes, blocks: int) -> int:
    """Words in which blocks show each other the attention of their positions."""
    splits = min(blocks // sizes.kv, MOST_SPLITS)
    return splits * sizes.heads * (2 * sizes.size + 4)


def launch(
    name: str, sizes: Sizes, layers: int, weights: Any, scales: Any, norms: Any, place: Any,
    shown: Any, attention: Any, bias: Any, epsilons: tuple[float, float], blocks: int,
    window: int | None = None, warps: int = WARPS,
) -> Launch:  # fmt: skip
    """All layers of a token: for each one y = x @ W_qkv^T (+ bias), a = its attention,
    h += a @ W_out^T; g = silu(gate) * up of the norm of h; h += g @ W_down^T; x = the norm of that.
    All arrays have one dimension, in which layers follow each other.

    name    : storage format of all weights.
    weights, scales : of qkv, out, gates and ups, down: packed by `qformats.repack.tiles`, rows of
              gates before as many of ups.
    norms   : float32 [layers * width], weights of the norms before gates, and of those behind down.
    place   : x, float16 [width], the norm before the first layer. before, float32 [1 + any]: what
              that norm has left, see `steps.kernels.between.deferred_norm`. h, float32 [width].
    shown   : where blocks show each other what they have, full of `NOTHING`: of each layer,
              float16, x before gates [width], [hidden] g, [width] x behind down, y, and a; float32
              [width / 32] sums of h^2 before gates, and [1 + width / 32] what the norm behind down
              leaves. And uint32 [`words_of`], once for all layers.
    attention : the cache, float16 [layers, 2 kv, length, size], keys and values, position, cos and
              sin as `steps.kernels.between.attention` has them, and weights [layers * size] of the
              norms of queries and of keys, or cos and sin again.
    bias    : float32 [layers * N], or None.
    epsilons: of norms, and of those of heads.
    blocks  : see `thread_blocks`. window: chunks under way in a block, a multiple of `PRODUCERS`.
    ValueError as of `chain_of`.
    """
    _, before, _ = place
    layout = chain_of(name, sizes, blocks, warps)
    if before.size - 1 > 32 * layout.loads:
        raise ValueError(
            f"the norm before has left {before.size - 1} sums, and a chain of {blocks} blocks adds "
            f"up {32 * layout.loads}"
        )
    cache, *_ = attention
    length = cache.size // (2 * sizes.kv * sizes.size * layers)
    of_layer = sizes.width, sizes.hidden, sizes.k_out, sizes.n_qkv
    numbers = tuple(map(np.int32, (layers, *of_layer, length, window or window_of(layout))))
    epsilon, of_heads = map(np.float32, epsilons)
    scale = np.float32(math.log2(math.e) / math.sqrt(sizes.size))
    args = (
        *weights, *scales, scales[0] if bias is None else bias, *norms, *place, *shown, *attention,
        numbers, epsilon, scale, of_heads,
    )  # fmt: skip
    return Launch(
        kernel(layout), (blocks,), (layout.threads,), args, layout.shared, True, together=True
    )


def thread_blocks(sms: int) -> int:
    """Of a chain on a GPU of so many SMs."""
    return max(1, sms - BESIDE)


@cache
def runs_here() -> bool:
    """Whether this GPU runs chains: Hopper, and not shared with other processes by MPS, whose
    launches could keep some of the blocks out for ever."""
    if why_no_gpu():
        return False
    device = cuda.get_current_device()
    return tuple(device.compute_capability) == (9, 0) and not device.MPS_ENABLED
