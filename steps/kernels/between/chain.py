"""One stream of weights: the products of a layer from attention to attention in one launch.

    out  | + h, norm | gates, ups | silu * | down | + h, norm | qkv of the next layer

What is new
    One thread block an SM, and each knows from the beginning which weights it will multiply: a
    share of every product, in pairs of row tiles. Producers copy them into one long ring, product
    after product, whatever the others wait for; sixteen warps share K. Nothing between two products
    is a barrier of the grid: what one of them makes lies in memory that is full of a value that no
    product stores (`NOTHING`), and a warp polls just the K that it multiplies until all is there.

        ring of an SM     | out | gates and ups ....... | down ... | qkv |    filled ahead
        16 warps            ^ A   ^ x, polled             ^ polled   ^ x, polled

    Norms are deferred as in `steps.kernels.between.deferred_norm`: x = h * weight * s, and r / s
    behind the next product. The sums of h^2 of each pair of row tiles are polled likewise, by one
    warp of each block. Rows of the residual stay with the block that has them from out to down.
    A block begins where one of the chain before has ended, while attention runs on SMs of its own
    (`BESIDE`): meanwhile the rings fill.
Why it should help
    Behind every product memory idles until A has come and the first weights have. Four products and
    attention took 40.3 us of a layer of Llama 3 8B on an H200, where its 123 MB of weights take 28.
    Expect 35 us. Measured: 37.2, and why, in results/worklog/decoder.md.
What it costs
    All blocks must be on the GPU at once: `runs_here`. 227 KB of shared memory, so nothing else
    runs on an SM beside it. One token.
Machine code
    UBLKCP in the producer; LDG.E.128.STRONG.GPU for polls; HMMA with no LDG in the stream; no
    spills: what comes out of the L1 waits there behind the weights of the whole SM.
Prerequisites
    Step 18, `deferred_norm`, and of step 13 producers and setmaxnreg.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
)
from steps.instructions.approximate import reciprocal, rsqrt
from steps.instructions.warpgroup import setmaxnreg_dec, setmaxnreg_inc
from steps.kernels.between.deferred_norm import ROOM
from steps.kernels.between.polled import missing, poll, poll_u32
from steps.kernels.decode.one_token import ZEROS, product_of_one, row_of_quad
from steps.kernels.decode.product import PAIR
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
MOST_CHUNK: Final = 5120
MOST_FORMATS: Final = 2
"""Of a kernel, for a chain to be chosen: one of more has not run on a GPU."""
BESIDE: Final = 4
"""SMs without a block: there is attention, two blocks on each, and waits while a chain still runs.
So the next chain gets the SMs of this one, each as soon as its block ends, and streams weights at
once. A block that began behind attention would be late by 4 us of weights, and all wait for it."""
EVEN: Final = 0.9
"""Of the largest share of a product the average one must be."""
FIELDS: Final = 4
"""Of a product in shared memory: pairs of the block, the first, chunks of a pair, and which of the
kernel's kinds its weights are."""
TABLES: Final = 5
"""Out, gates and ups, down, and queries, keys and values in up to two formats, one behind the other
in the same turn of the warps."""
fewer, more = setmaxnreg_dec(24), setmaxnreg_inc(112)  # 128 * 24 + 512 * 112 <= 640 * 96
wait_all = cp_async_wait(0)


@dataclass(frozen=True, slots=True)
class Chain:
    """What a kernel is compiled for.

    kinds  : (storage format, K tiles of a chunk) of the products of all layers; which one is which,
             a launch says
    warps  : that multiply
    slots  : of the ring
    a_bytes: of the longest A
    even, odd : pairs of a block at most, in products 0 and 2, and in 1 and 3
    loads  : sums of h^2 of a lane
    biases : pairs of a block at most whose queries, keys and values have a bias
    """

    kinds: tuple[tuple[str, int], ...]
    warps: int
    slots: int
    a_bytes: int
    even: int
    odd: int
    loads: int
    biases: int

    @property
    def threads(self) -> int:
        return 32 * (self.warps + 4)

    @property
    def chunk(self) -> int:
        """Bytes of a slot: of the longest chunk."""
        return max(deep * bytes_of_pair(name) for name, deep in self.kinds)

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
        return self.h_at + 4 * ROWS * self.even

    @property
    def squares_at(self) -> int:
        return self.weights_at + 4 * ROWS * self.even

    @property
    def norms_at(self) -> int:
        """r of the norms before out, before gates and before qkv."""
        return self.squares_at + 128 * self.loads

    @property
    def table_at(self) -> int:
        return self.norms_at + 16

    @property
    def zeros_at(self) -> int:
        return ceil_div(self.table_at + 4 * TABLES * FIELDS, ZEROS) * ZEROS

    @property
    def shared(self) -> int:
        return self.zeros_at + ZEROS


@cuda.jit(device=True, forceinline=True)
def put(smem, at, x):
    low, high = uint64(x[0]), uint64(x[1])
    upper = uint64(32)
    store_u32x4(smem, at, uint32(low), uint32(low >> upper), uint32(high), uint32(high >> upper))


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


def bytes_of_pair(name: str) -> int:
    """Of packed tiles."""
    return PAIR * tile_format(name).tile_bytes


def of_kinds(values: Sequence[Any]) -> Any:
    """of_kind(kind): a device function, the one of these values."""
    value, *others = values
    if not others:

        @cuda.jit(device=True, forceinline=True)
        def the_only(kind):
            return value

        return the_only
    other = of_kinds(others)

    @cuda.jit(device=True, forceinline=True)
    def of_kind(kind):
        return value if kind == 0 else other(kind - 1)

    return of_kind


def multiply_of(kinds: Sequence[tuple[str, int]]) -> Any:
    """multiply(kind, acc, smem, weights, a, zeros, lane): a device function, as of
    `product_of_one`, of one of these kinds."""
    first, *others = kinds
    multiply_first, _ = product_of_one(*first)
    if not others:

        @cuda.jit(device=True, forceinline=True)
        def multiply(kind, acc, smem, weights, a, zeros, lane):
            multiply_first(acc, smem, weights, a, zeros, lane)

        return multiply
    other = multiply_of(others)

    @cuda.jit(device=True, forceinline=True)
    def multiply_one(kind, acc, smem, weights, a, zeros, lane):
        if kind == 0:
            multiply_first(acc, smem, weights, a, zeros, lane)
        else:
            other(int32(kind - 1), acc, smem, weights, a, zeros, lane)

    return multiply_one


@cache
def kernel(layout: Chain) -> Any:
    warps, slots, chunk = layout.warps, layout.slots, layout.chunk
    a_at, sums_at, bars_at, rows_at = layout.a_at, layout.sums_at, layout.bars_at, layout.rows_at
    bias_at, h_at, weights_at = layout.bias_at, layout.h_at, layout.weights_at
    squares_at, norms_at, table_at = layout.squares_at, layout.norms_at, layout.table_at
    empty_at, loads, biased = bars_at + 8 * slots, layout.loads, layout.biases > 0
    of_pair = 4 * ROWS  # bytes of sums
    even_bytes, odd_bytes = of_pair * layout.even, of_pair * layout.odd
    odd_at = sums_at + warps * even_bytes
    several, deeps = len(layout.kinds) > 1, [deep for _, deep in layout.kinds]
    more_parts = ceil_div(layout.a_bytes // 2 // (min(deeps) * TILE_K), warps)
    multiply, zeros_at = multiply_of(layout.kinds), layout.zeros_at
    k_tiles_of = of_kinds(deeps)
    tile_bytes_of = of_kinds([tile_format(name).tile_bytes for name, _ in layout.kinds])
    scale_of = of_kinds([product_of_one(*one)[1] for one in layout.kinds])

    @cuda.jit(device=True, forceinline=True)
    def entry(smem, p, field):
        return int32(load_u32(smem, table_at + 4 * (FIELDS * p + field)))

    @cuda.jit(device=True, forceinline=True)
    def write_table(smem, p, pairs, last, k, kind):
        own, first = share(pairs, last)
        at = table_at + 4 * FIELDS * p
        store_u32(smem, at, uint32(own))
        store_u32(smem, at + 4, uint32(first))
        store_u32(smem, at + 8, uint32(uint32(k) // uint32(k_tiles_of(kind) * TILE_K)))
        store_u32(smem, at + 12, uint32(kind))

    @cuda.jit(device=True, forceinline=True)
    def pairs_of(smem, p):
        """Of this block in a turn of the warps."""
        pairs = entry(smem, p, 0)
        if several and p == 3:
            pairs = int32(pairs + entry(smem, int32(4), 0))
        return pairs

    @cuda.jit(device=True, forceinline=True)
    def pair_of_last(smem, pair):
        """The pair in the last format of qkv that is the block's pair of both."""
        return int32(pair - entry(smem, int32(3), 0) + entry(smem, int32(4), 1))

    @cuda.jit(device=True, forceinline=True)
    def kind_of(smem, p, pair):
        """The format of the block's pair of a product."""
        return entry(smem, p + 1 if p == 3 and pair >= entry(smem, p, 0) else p, 3)

    @cuda.jit(device=True, forceinline=True)
    def k_of_chunk(smem, p):
        """Of a product, in all its kinds."""
        return int32(TILE_K * k_tiles_of(entry(smem, p, 3) if several else int32(0)))

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
        pieces = PAIR if gated else 1

        @cuda.jit(device=True, forceinline=True)
        def stream(smem, w, p, window, own, state):
            index, begin, slot, turn, landed, landed_turn = state
            kind = int32(0)
            if several:
                kind = entry(smem, p, 3)
            tile_bytes, deep = int32(tile_bytes_of(kind)), int32(k_tiles_of(kind))
            piece, pair_bytes = int32(PAIR // pieces * tile_bytes), int32(PAIR * tile_bytes)
            chunks = entry(smem, p, 2)
            end = int32(begin + entry(smem, p, 0) * chunks)
            pair, c = entry(smem, p, 1), int32(index - begin)
            half = int64(w.size) >> 1
            while index < end:
                while c >= chunks:
                    pair, c = int32(pair + 1), int32(c - chunks)
                tile = pair if gated else int32(PAIR * pair)
                at = int64(tile_index(tile, int32(deep * c), int32(deep * chunks))) * tile_bytes
                bar, to = int32(bars_at + 8 * slot), int32(slot * chunk)
                mbarrier_wait_bounded(smem, empty_at + 8 * slot, turn)
                if index >= window:
                    mbarrier_wait_bounded(smem, bars_at + 8 * landed, landed_turn)
                    landed = int32(landed + PRODUCERS)
                    if landed >= slots:
                        landed, landed_turn = own, int32(landed_turn ^ 1)
                mbarrier_arrive_expect(smem, bar, deep * pair_bytes)
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
    def copy_rows(smem, scales, weights, bias, p, pair, hidden, warp, lane):
        """What rows of this warp's pair have: row scales, and weights of a norm or a bias."""
        row = int32(ROWS * pair + lane)
        if p == 1:
            row = int32(TILE_ROWS * pair + (lane & 15) + (lane >> 4) * hidden)
        place = of_pair * warp + 4 * lane
        cp_async_4(smem, rows_at + place, scales, row)
        if p & 1 == 0:
            cp_async_4(smem, weights_at + place, weights, row)
        if biased and p == 3:
            cp_async_4(smem, bias_at + place, bias, row)

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
            if x[i] == uint32(0xFFFFFFFF):
                x[i] = poll_u32(squares, int32(first + 32 * i + lane))
            total += as_float(x[i])
        for i in range(5):
            total += shfl_xor(total, 1 << i)
        return rsqrt(total * mean_of + epsilon)

    @cuda.jit(device=True, forceinline=True)
    def factor_of(smem, p):
        """By which what a product makes is scaled: s before a norm, r / s behind it."""
        if p == 0:
            return load_f32(smem, norms_at) * float32(ROOM)
        if p == 1:
            return load_f32(smem, norms_at + 4) * reciprocal(
                load_f32(smem, norms_at) * float32(ROOM)
            )
        r = load_f32(smem, norms_at + 4) * float32(ROOM)
        return r if p == 2 else load_f32(smem, norms_at + 8) * reciprocal(r)

    @cuda.jit(launch_bounds=(layout.threads, 1))
    def chain(
        w_out, w_gates, w_down, w_qkv, w_last,
        scales_out, scales_gates, scales_down, scales_qkv, scales_last, bias, bias_last,
        weights_hidden, weights_next, a, h, before, x_hidden, gates, x_next, squares, left, h_next,
        y, sizes, kinds, epsilon,
    ):  # fmt: skip
        """See `launch`. sizes: (width, hidden, K of out, N of qkv in one format and in the last
        one, window, whether to wait for launches before). kinds: of each product, in those of
        `Chain`."""
        smem = cuda.shared.array(0, uint8, alignment=128)
        acc = cuda.local.array(4, float32)
        griddepcontrol_launch_dependents()
        width, hidden, k_out, n_qkv, n_last, window, waits = sizes
        products = int32(4 if n_qkv > 0 else 3)
        t = int32(cuda.threadIdx.x)
        lane, warp = int32(t & 31), shfl(int32(t >> 5), 0)
        pairs_of_x = int32(uint32(width) // uint32(ROWS))
        if t == 0:
            write_table(smem, int32(0), pairs_of_x, False, k_out, kinds[0])
        elif t == 32:
            pairs = int32(uint32(hidden) // uint32(TILE_ROWS))
            write_table(smem, int32(1), pairs, False, width, kinds[1])
        elif t == 64:
            write_table(smem, int32(2), pairs_of_x, False, hidden, kinds[2])
        elif t == 96:
            pairs = int32(uint32(n_qkv) // uint32(ROWS))
            write_table(smem, int32(3), pairs, True, width, kinds[3])
            if several:  # by blocks that have fewer of the others
                pairs = int32(uint32(n_last) // uint32(ROWS))
                write_table(smem, int32(4), pairs, False, width, kinds[4])
        elif t == 32 * warps + 32:
            store_u32x4(smem, zeros_at, uint32(0), uint32(0), uint32(0), uint32(0))
        elif t == 32 * warps:
            for i in range(2 * slots):
                mbarrier_init(smem, bars_at + 8 * i, 1)
            fence_mbarrier_init()
        cuda.syncthreads()

        if warp >= warps:
            # --- the producers
            fewer()
            if lane == 0:
                own = int32(warp - warps)
                state = own, int32(0), own, int32(1), own, int32(0)
                state = stream_pairs(smem, w_out, int32(0), window, own, state)
                state = stream_gated(smem, w_gates, int32(1), window, own, state)
                state = stream_pairs(smem, w_down, int32(2), window, own, state)
                if products == 4:
                    state = stream_pairs(smem, w_qkv, int32(3), window, own, state)
                    if several:
                        stream_pairs(smem, w_last, int32(4), window, own, state)
        else:
            # --- the warps that multiply
            more()
            parts = int32(uint32(width) // uint32(ROWS))
            p, index = int32(0), int32(0)
            while p < products:
                # read anew in each phase, or one is spilled, and waits behind weights in the L1
                t = thread_index()
                lane, warp = int32(t & 31), int32(t >> 5)
                pairs, first, chunks = pairs_of(smem, p), entry(smem, p, 1), entry(smem, p, 2)
                if warp < pairs:
                    pair = int32(first + warp)
                    if p == 0:
                        copy_rows(
                            smem, scales_out, weights_hidden, bias, p, pair, hidden, warp, lane
                        )
                    elif p == 1:
                        copy_rows(
                            smem, scales_gates, weights_next, bias, p, pair, hidden, warp, lane
                        )
                    elif p == 2:
                        copy_rows(
                            smem, scales_down, weights_next, bias, p, pair, hidden, warp, lane
                        )
                    elif several and warp >= entry(smem, p, 0):
                        pair = pair_of_last(smem, warp)
                        copy_rows(
                            smem, scales_last, weights_next, bias_last, p, pair, hidden, warp, lane
                        )
                    else:
                        copy_rows(smem, scales_qkv, weights_next, bias, p, pair, hidden, warp, lane)
                if p == 0 and waits:
                    griddepcontrol_wait()

                # --- this warp's part of A; further parts arrive meanwhile
                if pairs > 0:
                    source = a
                    if p == 1:
                        source = x_hidden
                    elif p == 2:
                        source = gates
                    elif p == 3:
                        source = x_next
                    of_chunk = k_of_chunk(smem, p)
                    k = int32(of_chunk * warp + 8 * lane)
                    to = int32(a_at + 2 * k)
                    if 8 * lane < of_chunk:
                        if warp < chunks:
                            put(smem, to, poll(source, k))
                        for i in range(1, more_parts):
                            if warp + warps * i < chunks:
                                ahead = of_chunk * warps * i
                                cp_async_16(smem, to + 2 * ahead, source, k + ahead)
                if p == 0:  # behind A, so that they are there, too
                    if warp < pairs:
                        row = int32(ROWS * (first + warp) + lane)
                        cp_async_4(smem, h_at + of_pair * warp + 4 * lane, h, row)
                    if warp == warps - 1:
                        copy_squares(smem, before, 1, int32(before.size - 1), lane)
                cp_async_commit()
                cuda.syncwarp()

                # --- the stream
                t = thread_index()
                lane, warp, pair = int32(t & 31), int32(t >> 5), int32(0)
                while pair < pairs:
                    if warp == warps - 1:  # now most sums of h^2 are there
                        if p == 1 and pair == 1:
                            copy_squares(smem, squares, 0, parts, lane)
                        elif p == 3 and pair == 0:
                            copy_squares(smem, left, 1, parts, lane)
                        cp_async_commit()
                    for r in range(4):
                        acc[r] = 0
                    kind, of_chunk = int32(0), k_of_chunk(smem, p)
                    if several:
                        kind = kind_of(smem, p, pair)
                    c = warp
                    while c < chunks:
                        slot, turn = slot_of(int32(index + pair * chunks + c))
                        mbarrier_wait_bounded(smem, bars_at + 8 * slot, turn)
                        if pair == 0 and c >= warps:
                            wait_all()
                            k = int32(of_chunk * c + 8 * lane)
                            if 8 * lane < of_chunk:
                                x0, x1, x2, x3 = load_u32x4(smem, a_at + 2 * k)
                                upper = uint64(32)
                                low = uint64(x0) | uint64(x1) << upper
                                high = uint64(x2) | uint64(x3) << upper
                                if missing((low, high)):
                                    source = a
                                    if p == 1:
                                        source = x_hidden
                                    elif p == 2:
                                        source = gates
                                    elif p == 3:
                                        source = x_next
                                    put(smem, a_at + 2 * k, poll(source, k))
                            cuda.syncwarp()
                        at = a_at + 2 * of_chunk * c
                        multiply(kind, acc, smem, slot * chunk, at, zeros_at, lane)
                        cuda.syncwarp()
                        if lane == 0:
                            mbarrier_arrive(smem, empty_at + 8 * slot)
                        c = int32(c + warps)
                    t = thread_index()
                    to = int32(sums_at + (t >> 5) * even_bytes)
                    if p & 1:
                        to = int32(odd_at + (t >> 5) * odd_bytes)
                    to = int32(to + of_pair * pair + 32 * (t & 3) + (t & 28))
                    store_f32(smem, to, row_of_quad(acc, t))
                    pair = int32(pair + 1)
                index = int32(index + pairs * chunks)

                # --- the norm, by one warp, for all
                if warp == warps - 1 and p != 2:
                    wait_all()
                    mean_of = reciprocal(float32(width))
                    at, r = norms_at, float32(0)
                    if p == 0:
                        n = int32(before.size - 1)
                        r = norm_of(smem, before, 1, n, True, mean_of, epsilon, lane)
                    elif p == 1:
                        at, early = norms_at + 4, pairs > 1
                        r = norm_of(smem, squares, 0, parts, early, mean_of, epsilon, lane)
                    elif p == 3:
                        at = norms_at + 8
                        r = norm_of(smem, left, 1, parts, pairs > 0, mean_of, epsilon, lane)
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
                    kind = int32(0)
                    if several:
                        kind = kind_of(smem, p, warp)
                    total *= load_f32(smem, rows_at + place) * float32(scale_of(kind))
                    factor, pair = factor_of(smem, p), int32(entry(smem, p, 1) + warp)
                    if p & 1 == 0:
                        row = int32(ROWS * pair + lane)
                        of_h = load_u32(smem, h_at + place)
                        if of_h == uint32(0xFFFFFFFF):
                            of_h = poll_u32(h, row)
                        total += as_float(of_h)
                        x = float_to_half(total * factor * load_f32(smem, weights_at + place))
                        own = total * total
                        for i in range(5):
                            own += shfl_xor(own, 1 << i)
                        if p == 0:
                            store_u16_relaxed(x_hidden, row, x)
                            if lane == 0:
                                store_u32_relaxed(squares, pair, as_bits(own))
                            store_f32(smem, h_at + place, total)
                        else:
                            store_u16_relaxed(x_next, row, x)
                            if lane == 0:
                                store_u32_relaxed(left, int32(1 + pair), as_bits(own))
                            store_u32_relaxed(h_next, row, as_bits(total))
                            if pair == 0 and lane == 0:
                                store_f32(left, 0, factor)
                    else:
                        total *= factor
                        if p == 1:
                            up = shfl(total, int32(lane + 16) & 31)
                            total = silu_times(total, up)
                            if lane < TILE_ROWS:
                                row = int32(TILE_ROWS * pair + lane)
                                store_u16_relaxed(gates, row, float_to_half(total))
                        else:
                            if biased:
                                total += load_f32(smem, bias_at + place)
                            row = int32(ROWS * pair + lane)
                            if several and warp >= entry(smem, p, 0):
                                row = int32(n_qkv + ROWS * pair_of_last(smem, warp) + lane)
                            store_u16_relaxed(y, row, float_to_half(total))
                p = int32(p + 1)
            if not waits:  # who waits for this launch waits for those before, too
                griddepcontrol_wait()

    return chain


def chain_of(
    formats: Sequence[str], width: int, hidden: int, k_out: int, qkv: Sequence[int], biased: bool,
    blocks: int, warps: int = WARPS,
) -> Chain:  # fmt: skip
    """What is compiled for layers in these storage formats, for so many thread blocks. qkv:
    features of the next layer's queries, keys and values, in one format or the first ones and the
    last ones; none behind the last layer.

    ValueError where the sizes do not divide into pairs of row tiles and chunks, where a block
    would have more pairs than warps, or where shared memory does not hold A and a ring."""
    names, deepest = ", ".join(formats), max(map(deep_of, formats))
    if width % ROWS or hidden % (TILE_GROUP * TILE_ROWS) or any(n % ROWS for n in qkv):
        raise ValueError(
            f"a chain has multiples of {ROWS} features and of {TILE_GROUP * TILE_ROWS} hidden "
            f"ones, not {', '.join(map(str, (width, *qkv)))} and {hidden}"
        )
    if len(qkv) > 2 or len(qkv) > len(formats):
        raise ValueError(
            f"queries, keys and values of a chain have two formats of the kernel's at most, not "
            f"{len(qkv)} of {names}"
        )
    if any(k % (deepest * TILE_K) for k in (width, hidden, k_out)):
        raise ValueError(
            f"a chain of {names} takes K in multiples of {deepest * TILE_K}, not {k_out}, {width} "
            f"and {hidden}"
        )
    numbers = numbers_of_pairs(width, hidden)
    pairs = *(ceil_div(n, blocks) for n in numbers), pairs_of_qkv(qkv, blocks)
    if max(pairs) > warps:
        raise ValueError(
            f"a block of a chain has up to {warps} pairs of row tiles of a product, not "
            f"{max(pairs)}"
        )
    work = max(pairs[::2]), max(pairs[1::2]), ceil_div(max(numbers[0], blocks + BESIDE), 32)
    rest = 2 * max(width, hidden, k_out), *work, pairs[3] if biased else 0
    without = Chain(kinds_of(formats), warps, 0, *rest)
    slots = (shared_memory() - without.shared) // (without.chunk + 16) // PRODUCERS * PRODUCERS
    # A warp looks for a chunk that is a turn of the warps behind the one it had last, and up to two
    # where its pair ends between. The chunk whose slot that is must have landed by then, or it
    # takes the old one for the new.
    chunks = {k // (deep * TILE_K) for _, deep in without.kinds for k in (width, hidden, k_out)}
    rest_of_turn = max(n % warps for n in chunks)
    least = warps + rest_of_turn + window_of(without)
    if slots < least:
        raise ValueError(
            f"a chain needs a ring of {least} chunks of {without.chunk} bytes "
            f"beside {without.shared}, and there are {shared_memory()} bytes of shared memory"
        )
    return replace(without, slots=slots)


def deep_of(name: str) -> int:
    """K tiles of a chunk in a storage format."""
    return DEEP if DEEP * bytes_of_pair(name) <= MOST_CHUNK else 1


def kinds_of(formats: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """(storage format, K tiles of a chunk): in a turn of the warps beside a format of short chunks,
    others have short ones, too."""
    shortest = min(map(deep_of, formats))
    return tuple(sorted({(name, deep) for name in formats for deep in (shortest, deep_of(name))}))


def window_of(layout: Chain) -> int:
    """Chunks under way at a time."""
    return max(1, round(H200_UNDER_WAY / (layout.chunk * PRODUCERS))) * PRODUCERS


def numbers_of_pairs(width: int, hidden: int) -> tuple[int, int, int]:
    """Of out, of gates and ups, and of down."""
    return width // ROWS, hidden // TILE_ROWS, width // ROWS


def pairs_of_qkv(qkv: Sequence[int], blocks: int) -> int:
    """Of a block at most: the last blocks have one more in the first format, the first ones in the
    last format."""
    each, more = zip(*(divmod(n // ROWS, blocks) for n in (*qkv, 0)), strict=True)
    return sum(each) + (max(map(bool, more)) if sum(more) <= blocks else 2)


def supports(
    formats: Sequence[str], width: int, hidden: int, k_out: int, qkv: Sequence[int], biased: bool,
    blocks: int,
) -> bool:  # fmt: skip
    """Whether there is a chain for such a layer, blocks get shares that are about equal, and it has
    `MOST_FORMATS` at most."""
    try:
        chain_of(formats, width, hidden, k_out, qkv, biased, blocks)
    except ValueError:
        return False
    numbers = numbers_of_pairs(width, hidden)
    even = all(n >= EVEN * blocks * ceil_div(n, blocks) for n in numbers)
    return even and len(formats) <= MOST_FORMATS


def launch(
    formats: Sequence[str], names: Sequence[str], weights: Any, scales: Any, norms: Any, place: Any,
    y: Any, biases: Any, qkv: Sequence[int], epsilon: float, blocks: int,
    window: int | None = None, warps: int = WARPS, waits: bool = True,
) -> Launch:  # fmt: skip
    """h' = h + a @ W_out^T; g = silu(gate) * up of its norm; h' += g @ W_down^T; y = the norm of
    h' @ W_qkv^T (+ bias). All arrays have one dimension.

    formats : storage formats that the kernel is for. names: of them, those of the weights.
    weights, scales : of out, gates and ups, down, and qkv, in one part or two: packed by
              `qformats.repack.tiles`, rows of gates before as many of ups.
    norms   : float32 [width], weights of the norm before gates and of that before qkv.
    place   : a, float16 [K]. h, float32 [width]. before, float32 [1 + any]: what the norm before
              `a` has left, see `steps.kernels.between.deferred_norm`. And where blocks show each
              other what they have, full of `NOTHING`: float16 [width] x before gates, [hidden] g,
              [width] x before qkv; float32 [width / 32] sums of h^2 before gates; float32
              [1 + width / 32] what the norm before qkv leaves; float32 [width] h behind down.
    y       : float16 [N]; None behind the last layer: then there is no product behind the norm.
    biases  : float32, of each part of qkv, or none.
    qkv     : N of each part.
    blocks  : see `thread_blocks`. window: chunks under way in a block, a multiple of `PRODUCERS`.
    waits   : for launches before. Else a, h and `before` are polled, too: they were full of
              `NOTHING`, and what a is made of was stored behind h and `before`, or was polled.
    ValueError as of `chain_of`.
    """
    a, h, before, _, gates, x_next, *_ = place
    layout = chain_of(formats, h.size, gates.size, a.size, qkv, bool(biases), blocks, warps)
    if before.size - 1 > 32 * layout.loads:
        raise ValueError(
            f"the norm before has left {before.size - 1} sums, and a chain of {blocks} blocks adds "
            f"up {32 * layout.loads}"
        )
    first, last = (*qkv, 0, 0)[:2]
    sizes = h.size, gates.size, a.size, first, last, window or window_of(layout), waits
    of_products, of_qkv = [(one, deep_of(one)) for one in names[:3]], names[3:]
    shortest = min(map(deep_of, of_qkv), default=1)
    kinds = [
        layout.kinds.index(one) for one in (*of_products, *((one, shortest) for one in of_qkv))
    ]

    def five(of_products: Sequence[Any]) -> tuple[Any, ...]:
        """With something in place of parts that there are not."""
        return *of_products, *[of_products[-1]] * (TABLES - len(of_products))

    args = (
        *five(weights), *five(scales), *(*biases, *scales[:2])[:2], *norms, *place,
        x_next if y is None else y, tuple(map(np.int32, sizes)), tuple(map(np.int32, five(kinds))),
        np.float32(epsilon),
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
    launches could keep some of the blocks out for ever.

    A MIG instance needs no case of its own: the driver counts its SMs alone, which no other
    instance uses, and it says MPS_ENABLED where processes share one. The launcher compares all
    blocks with the room on these SMs.
    """
    if why_no_gpu():
        return False
    device = cuda.get_current_device()
    return tuple(device.compute_capability) == (9, 0) and not device.MPS_ENABLED
