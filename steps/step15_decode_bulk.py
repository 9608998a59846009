"""Step 15: decode on Hopper - few instructions before the weights arrive, few after.

What is new
    Bulk copies bring what 32 lanes had to ask for: one lane asks for the records of two row tiles
    at once, and an mbarrier says that they are there. A warp has a part of K to itself, in all row
    tiles of its thread block, so that it waits for no other warp until all sums are added up.

         warp 0    warp 1    warp 2    ...       in a pair of row tiles one record of 128 K after
       |---------|---------|---------|--         the other, those of both side by side in memory
       | pair 0  | pair 0  | pair 0  |           (qformats.repack.tiles) and in the ring
    N  | pair 1  | pair 1  | pair 1  |
       | pair 2  | pair 2  | pair 2  |
       |---------|---------|---------|--
                      K -->

    Up to four tokens A comes by a bulk copy too, as float32, into slots of the ring that are not
    in use yet; the warp makes Q8_1 of its part, and then asks for the weights that go there. More
    tokens, or A that does not fit, come K-outermost, 128 K of A beside each two packed tiles of
    weights. The tile configuration is in steps.components.bulk_tiles, A's way in bulk_activations,
    the product in bulk_products.
Why it should help
    In a first version, all written out and with A loaded lane by lane, half of the time had passed
    before the first product: thousands of instructions that each run once, fetched from memory like
    data, and loads of A that waited in line behind all weights which the rings had asked for. Here
    it is two slots of weights, A, and the rest when A has come. 33 MB of Q4_0 at 4.1 TB/s take 8.1
    us; with 1.5 us until the first weights are there, and an end: 10.5, in a chain 9.
What it costs
    Hopper or later. A part of K to each warp is coarse: 16 warps cut K = 4096 in two records each.
Machine code
    UBLKCP of weights before ACQBULK, which waits for the launch before; IMMA; in the loop no
    barrier but SYNCS; loops where step 10 had everything written out.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int32, int64, uint8, uint32

from qformats import BLOCK, Format
from qformats.repack import KNOWN, TILE_GROUP, TILE_K, TILE_ROWS
from qformats.repack import tiles as pack
from qformats.storage import StorageFormat, storage_format
from steps.components.activations.layouts import float32_quantized_inside, q8_1_k_outermost
from steps.components.bulk_activations import float32_quantizer, prequantized_loader
from steps.components.bulk_products import PAIR, pair_products
from steps.components.bulk_tiles import PAD, SCALES, WARPS, fused, regions, tile_configuration
from steps.components.decode_tiles import BLOCKS, FUSED, MOST_TOKENS, scale_bytes
from steps.components.unpack.codes import tile_index
from steps.components.unpack.storage_formats import tile_format
from steps.contract import Activations, Family, Launch, Machine, Shape, Step, ceil_div
from steps.instructions import (
    bulk_copy,
    fence_mbarrier_init,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    load_f32,
    mbarrier_arrive_expect,
    mbarrier_init,
    mbarrier_wait,
    shfl,
    shfl_xor,
    store_f32,
)


@cache
def kernel(
    fmt: StorageFormat, tokens: int, across: int, stages: int, before: int, chunk: int
) -> Any:
    """The kernel for `tokens` (1, 2, 4: of float32 A; 8, 16: prequantized), `across` warps along N,
    rings of `stages` slots, of which `before` are asked for before A, and room for `chunk`
    records of float32 A in the others."""
    form, minimum = pair_products(fmt.name, tokens), tile_format(fmt.name).minimum
    places, fetch, multiply = form.read_offsets, form.load, form.multiply
    leave, place = form.store, form.position
    n_acc, n_b, n_d, unit = form.sums, form.b_words, form.d_values, float32(form.scale)
    record, given = tile_format(fmt.name).tile_bytes, tokens > FUSED
    weights, size_d = PAIR * record, scale_bytes(tokens, minimum)
    slot_bytes, at_bars, at_codes = regions(fmt, tokens, stages)
    step_b, step_d = BLOCKS * tokens * BLOCK, BLOCKS * tokens * size_d  # from record to record
    row_bytes = 4 * TILE_K * chunk  # of a token in float32, that a warp has at a time
    ask_for_tokens = prequantized_loader(tokens, weights)
    bring, quantize, at_once = float32_quantizer(tokens, minimum, chunk, at_codes)

    @cuda.jit(device=True, forceinline=True)
    def beginning(row, rows, k, in_row):
        """Of the pair of row tiles from `row` on, those among `rows`: the byte where record k of
        theirs begins, bytes of them, and how far into a slot of the ring they belong."""
        low, high = int32(max(row, rows[0])), int32(min(int32(row + PAIR), rows[1]))
        at = int64(tile_index(low, k, in_row)) * record
        return at, int32((high - low) * record), int32((low - row) * record)

    @cuda.jit(device=True, forceinline=True)
    def ask(smem, slot, bar, lane, w, more_bytes, following, share):
        """Ask for the weights that follow, if any are left; which follow then? more_bytes: of A,
        to come to the same slot."""
        at, size, into, left, row = following
        rows, k0, deep, in_row = share
        if row < rows[1]:
            if lane == 0:
                mbarrier_arrive_expect(smem, bar, int32(size + more_bytes))
                bulk_copy(smem, slot + into, w, at, size, smem, bar)
            at, left = at + TILE_GROUP * record, int32(left - 1)
            if left == 0:
                left, row = deep, int32(row + PAIR * across)
                at, size, into = beginning(row, rows, k0, in_row)
        return at, size, into, left, row

    @cuda.jit(device=True, forceinline=True)
    def place_in_c(i, first):
        """Token and feature of a thread block's sum number i."""
        m, row = place(uint32(i) & uint32(tokens * TILE_ROWS - 1))
        tile_row = int32(uint32(i) // uint32(tokens * TILE_ROWS))
        return m, int32((first + tile_row) * TILE_ROWS + row)

    @cuda.jit(launch_bounds=(32 * WARPS, 1))
    def w4a8_decode_bulk(w, factors, a, ds, c, in_row, each, parts, tall):
        """c[M, N] = a @ dequantize(w)[N, K]^T; w, factors of qformats.repack.tiles, a: float32, or
        with `ds` prequantized, K-outermost.

        A thread block has `tall` row tiles, a warp `each` of the `in_row` records along K, and
        there are `parts` such shares of K.
        """
        smem = cuda.shared.array(0, uint8, alignment=128)
        acc, x = cuda.local.array(n_acc, float32), cuda.local.array((at_once, 8), float32)
        b, d = cuda.local.array(n_b, uint32), cuda.local.array(n_d, float32)
        griddepcontrol_launch_dependents()
        t = int32(cuda.threadIdx.x)
        warp, lane = shfl(int32(t >> 5), 0), int32(t & 31)
        M, N, m0 = int32(c.shape[0]), int32(c.shape[1]), int32(MOST_TOKENS * cuda.blockIdx.z)
        here = int32(min(int32(M - m0), MOST_TOKENS))  # tokens of this thread block

        # --- this warp's share: `deep` records along K from k0 on, of pairs among row tiles `rows`
        in_row, each, tall, parts = int32(in_row), int32(each), int32(tall), int32(parts)
        part = int32(warp // across)
        k0 = int32(min(int32(part * each), in_row))
        deep = int32(min(each, int32(in_row - k0)))
        first = int32(cuda.blockIdx.x * tall)
        rows = first, int32(min(int32(first + tall), int32(int32(N + TILE_ROWS - 1) >> 4)))
        begin = int32((first & -PAIR) + PAIR * (warp % across) if deep > 0 else rows[1])
        share = rows, k0, deep, in_row

        # --- weights, the first: they wait for no launch before this one
        ring, bars = int32(warp * (stages * slot_bytes)), int32(at_bars + 8 * (stages + 1) * warp)
        raw, of_a = int32(ring + (stages * slot_bytes - tokens * row_bytes)), bars + 8 * stages
        if lane == 0:
            for s in range(stages + 1):
                mbarrier_init(smem, bars + 8 * s, 1)
            fence_mbarrier_init()
        at, size, into = beginning(begin, rows, k0, in_row)
        following = at, size, into, deep, begin
        more_bytes = int32(here * (TILE_K + (SCALES if here == M else 0))) if given else int32(0)
        following = ask(smem, ring, bars, lane, w, more_bytes, following, share)
        cuda.syncwarp()
        griddepcontrol_wait()

        # --- A, and the other weights
        at_d = int32(at_codes + in_row * step_b)
        if given:
            s = int32(0)
            while s < stages:
                slot, bar = int32(ring + s * slot_bytes), int32(bars + 8 * s)
                left, row = following[3], following[4]
                if s == 0:  # its weights have been asked for
                    left, row = deep, begin
                else:
                    following = ask(smem, slot, bar, lane, w, more_bytes, following, share)
                if row < rows[1]:
                    ask_for_tokens(smem, slot, bar, lane, a, ds, M, here, int32(k0 + deep - left))
                s = int32(s + 1)
        else:
            K, done, parity = int32(a.shape[1]), int32(0), int32(0)
            while done < deep:
                k, some = int32(k0 + done), int32(min(int32(deep - done), int32(chunk)))
                count = int32(min(int32(some * TILE_K), int32(K - k * TILE_K)))
                bring(smem, raw, of_a, lane, a, M, int32(k * TILE_K), count)
                if done == 0:
                    for s in range(1, before):
                        slot, bar = ring + s * slot_bytes, bars + 8 * s
                        following = ask(smem, slot, bar, lane, w, 0, following, share)
                mbarrier_wait(smem, of_a, parity)
                quantize(x, smem, raw, at_d, lane, k, some, int32(K >> 5))
                done, parity = int32(done + some), int32(parity ^ 1)
            for s in range(before, stages):
                slot, bar = ring + s * slot_bytes, bars + 8 * s
                following = ask(smem, slot, bar, lane, w, 0, following, share)
        # what the end multiplies by would be late there
        own = int32(t >> 2)
        m, n = place_in_c(own, first)
        factor = load_f32(factors, min(n, int32(N - 1)))

        # --- the stream
        codes, scales = places(lane, here)
        at_sums = int32(at_codes if given else at_d + in_row * step_d)
        of_part = int32(tall * (4 * tokens * TILE_ROWS) + PAD)
        mine = int32(at_sums + part * of_part)
        s, parity, pair = int32(0), int32(0), begin
        while pair < rows[1]:
            for r in range(n_acc):
                acc[r] = 0
            i = int32(0)
            while i < deep:
                slot, bar = int32(ring + s * slot_bytes), int32(bars + 8 * s)
                if given:
                    mbarrier_wait(smem, bar, parity)
                    to = slot + weights
                    fetch(b, d, smem, to + codes, to + tokens * TILE_K + scales, lane, here)
                else:
                    to = int32(at_codes + (k0 + i) * step_b), int32(at_d + (k0 + i) * step_d)
                    fetch(b, d, smem, to[0] + codes, to[1] + scales, lane, here)
                    mbarrier_wait(smem, bar, parity)
                multiply(acc, b, d, smem, slot, lane)
                cuda.syncwarp()
                left, row = following[3], following[4]
                following = ask(smem, slot, bar, lane, w, more_bytes, following, share)
                if given and row < rows[1]:
                    ask_for_tokens(smem, slot, bar, lane, a, ds, M, here, int32(k0 + deep - left))
                i, s = int32(i + 1), int32(s + 1)
                if s == stages:
                    s, parity = int32(0), int32(parity ^ 1)
            low, high = int32(max(pair, first) - pair), int32(min(int32(rows[1] - pair), PAIR))
            to = mine + (pair + low - first) * (4 * tokens * TILE_ROWS)
            leave(acc, smem, to, lane, low, high)
            pair = int32(pair + PAIR * across)
        cuda.syncthreads()

        # --- the sums of all warps along K to C: of four lanes each adds up a quarter
        quad, start = int32(lane & 3), int32(8 * warp)
        end = int32(int32(rows[1] - first) * (tokens * TILE_ROWS))
        while start < end:
            total, p = float32(0), quad
            at = int32(at_sums + 4 * min(own, int32(end - 1)) + quad * of_part)
            while p < parts:
                total += load_f32(smem, at)
                at, p = int32(at + 4 * of_part), int32(p + 4)
            total += shfl_xor(total, 1)
            total += shfl_xor(total, 2)
            m, n = place_in_c(own, first)
            if start != 8 * warp:
                factor = load_f32(factors, min(n, int32(N - 1)))
            if quad == 0 and own < end and m < here and n < N:
                store_f32(c, int64(m0 + m) * N + n, total * (factor * unit))
            own, start = int32(own + 8 * WARPS), int32(start + 8 * WARPS)

    return w4a8_decode_bulk


def activations(family: Family, a: Any, machine: Machine) -> Activations:
    """A itself, or prequantized: too much for each thread block to quantize."""
    return (float32_quantized_inside if fused(*a.shape) else q8_1_k_outermost)(family, a, machine)


def launch(
    fmt: Format, family: Family, shape: Shape, weights: tuple, activations: tuple, out: Any
) -> Launch:
    held = storage_format(fmt)
    how = tile_configuration(held, shape)
    run = kernel(held, how.tokens, how.warps_n, how.stages, how.prefetched, how.staged_k_tiles)
    in_row = ceil_div(shape.k, TILE_K)
    a, ds = (*activations, weights[1])[:2]  # float32 A has no scales: any array will do
    args = (*weights, a, ds, out, in_row, how.k_tiles, ceil_div(in_row, how.k_tiles), how.row_tiles)
    rows = ceil_div(shape.n, TILE_ROWS)
    grid = (ceil_div(rows, how.row_tiles), 1, ceil_div(shape.m, MOST_TOKENS))
    return Launch(run, grid, (32 * WARPS,), args, how.shared, overlap=True)


STEP = Step(
    number=15,
    name="step15_decode_bulk",
    title="decode on Hopper: bulk copies, a part of K for each warp",
    branch="decode",
    families=("A8",),
    parents={"A8": 10},
    unit={"A8": "tensor_int8"},
    pack=pack,
    activations=activations,
    launch=launch,
    most_tokens=MOST_TOKENS,
    formats=tuple(
        name for name in KNOWN if name != "q2_k"
    ),  # steps.components.decode_products: why
    min_cc=(9, 0),
    contains={"A8": ("IMMA", "UBLKCP", "SYNCS")},
    forbids={"A8": ("HMMA", "LDGSTS", "LDL", "STL")},
    chosen_untuned=True,
)
