"""Step 12: W4A16 with wgmma - warps no longer multiply, they hand over.

What is new
    wgmma: four warps together give the tensor cores 64 features x 16 K from registers, and all
    tokens of the tile from shared memory, where they lie as they came, and go on. So weights never
    pass through shared memory as float16, and nobody loads a fragment of tokens. While one half of
    a stage is multiplied the other half's weights are made. The last warpgroup gives its registers
    away and asks for bulk copies, far ahead and into the next tile: thread blocks stay, tile after
    tile, and one warpgroup is behind the other, so that tensor cores are busy at a tile's end too.
    Tiles that would leave SMs idle are shared out evenly (steps.components.stream_k).
Why it should help
    mma.sync stops at two thirds of what Hopper's tensor cores can do. 128 x 128 outputs and 128 K
    are 1024 of their cycles, in which two warps a scheduler issue 2 x 157 instructions (5 bits: 2 x
    192), and 41 bytes a cycle come from the L2, in two pieces of memory. For few tokens what counts
    is how soon weights are asked for: before the launch that rounds the activations has ended.
What it costs
    One block of 384 or 512 threads and all shared memory an SM; one GPU: wgmma is of compute
    capability 9.0 and no other. Shares depend on the number of SMs, and so do the last bits.
Machine code
    HGMMA, HFMA2 and LOP3 in one basic block, waits only for the group before (WARPGROUP.DEPBAR);
    UBLKCP and SYNCS, no LDSM, no LDGSTS.
"""

from __future__ import annotations

from functools import cache, partial
from math import gcd
from typing import Any, Final

import numpy as np
from numba import cuda, int32, int64, uint8

from qformats import Format
from qformats.repack import KNOWN, TILE_GROUP, TILE_K, TILE_ROWS, TOKEN_GROUP, tiles
from qformats.storage import StorageFormat, storage_format
from steps.components import wgmma_tiles
from steps.components.activations.layouts import float16_chunks
from steps.components.epilogue.wgmma import WARPGROUP, WGMMA_ROWS, finish_wgmma_tile, warpgroups
from steps.components.stream_k import scheduler
from steps.components.unpack.storage_formats import half_format
from steps.contract import Family, Launch, Shape, Step, multiprocessors
from steps.instructions import (
    barrier_arrive,
    barrier_sync,
    bulk_copy,
    fence_mbarrier_init,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    matrix_descriptor,
    mbarrier_arrive,
    mbarrier_arrive_expect,
    mbarrier_init,
    mbarrier_wait,
    setmaxnreg_dec,
    setmaxnreg_inc,
    shfl,
    wgmma_commit,
    wgmma_f16,
    wgmma_fence,
    wgmma_wait,
    zeros_f32,
)

TILES: Final = (  # (features, tokens) of a tile of C
    (128, 16),
    (128, 32),
    (128, 64),
    (128, 128),
    (192, 128),  # of three warpgroups, for N that leave SMs idle otherwise
    (256, 128),  # reads the least for what it multiplies
)
STAGES: Final = 8  # of the ring, at most
AHEAD: Final = 2  # stages of one warpgroup before others: the end of a tile, hidden behind them
HALF: Final = 64  # in a matrix descriptor: 64 K, 8 units of 128 bytes, in 16 bytes


@cache
def kernel(
    fmt: StorageFormat, in_half: bool, tile: tuple[int, int], strips: int, stages: int, ahead: int
) -> tuple[Any, int]:
    """(kernel for tiles (features, tokens), shared ones cut into `strips`, and a ring of `stages`,
    the first warpgroup `ahead` of the others by so many; its shared memory in bytes)"""
    bn, bm = tile
    form = half_format(fmt.name)
    record, words, scales = form.tile_bytes, form.words, form.scales
    multipliers, fragments = form.multipliers, form.fragments
    groups = warpgroups(bn)
    lots, warps = bn // (groups * WGMMA_ROWS), groups * WARPGROUP // 32
    piece = gcd(bn, TILE_GROUP * TILE_ROWS)  # features whose weights come at once
    in_band, piece_bytes = TILE_GROUP * TILE_ROWS // piece, piece // TILE_ROWS * record
    pieces, lot_bytes = bn // piece, warps * record
    at_tokens, group_bytes = lots * lot_bytes, 2 * TILE_K * TOKEN_GROUP
    stage_bytes = at_tokens + 2 * TILE_K * bm
    full = stages * stage_bytes  # the ring, then its mbarriers, then what the end of a tile needs
    empty = full + 8 * stages
    first_word = (empty + 8 * stages + 127) // 128 * 32
    finish, words_used = finish_wgmma_tile(tile, first_word, in_half, strips)
    find, no_sums = scheduler(bn, bm), zeros_f32(bm // 2)
    begin, go_on = find.first_work, find.next_work
    corner, sharers = find.tile_origin, find.contributors
    wait_for_all, wait_for_all_but_one = wgmma_wait(0), wgmma_wait(1)
    # of 512 for all warpgroups
    more_registers = setmaxnreg_inc(232 if groups == 2 else 160)
    fewer_registers = setmaxnreg_dec(40 if groups == 2 else 32)
    sign = 1 + groups  # the named barrier behind those of `finish`

    @cuda.jit(device=True, forceinline=True)
    def fetch(ring, weights, lane, half):
        return words(ring, weights, lane, half), scales(ring, weights, lane, half)

    @cuda.jit(device=True, forceinline=True)
    def multiply(acc, fetched, where):
        """acc += 64 K: weights become float16 in registers and meet all tokens of the tile."""
        w, s = fetched
        even, odd = multipliers(s, 0), multipliers(s, 1)
        a, b = fragments(w, 0, even), fragments(w, 1, even)
        x, y = fragments(w, 2, odd), fragments(w, 3, odd)
        wgmma_fence()
        acc = wgmma_f16(acc, a[0], a[1], a[2], a[3], where, 1)
        acc = wgmma_f16(acc, b[0], b[1], b[2], b[3], where + 16, 1)
        acc = wgmma_f16(acc, x[0], x[1], x[2], x[3], where + 32, 1)
        acc = wgmma_f16(acc, y[0], y[1], y[2], y[3], where + 48, 1)
        wgmma_commit()
        return acc

    @cuda.jit(launch_bounds=((groups + 1) * WARPGROUP, 1))
    def w4a16_wgmma(w, of_rows, a, of_tokens, c, steps, stretch, partials, arrived):
        """c[M, N] = a @ dequantize(w)[N, K]^T; w of qformats.repack.tiles, a of
        activations.layouts.float16_chunks; stretch: stream_k.work_rate."""
        ring = cuda.shared.array(0, uint8, alignment=128)
        M, N = int32(c.shape[0]), int32(c.shape[1])
        t = int32(cuda.threadIdx.x)
        warp, lane = shfl(int32(t >> 5), 0), int32(t & 31)  # so the compiler knows: one for all
        steps, tail, rate = int32(steps), int32(stretch[0]), stretch[1]
        tiles_n = int32((N + bn - 1) // bn)
        total = int32((M + bm - 1) // bm * tiles_n)
        number, k0, count, left = begin(tail, rate, steps)
        if t == 0:
            for s in range(stages):
                mbarrier_init(ring, full + 8 * s, 1)
                mbarrier_init(ring, empty + 8 * s, warps)
            fence_mbarrier_init()
        cuda.syncthreads()
        griddepcontrol_launch_dependents()
        s, parity = int32(0), int32(0)
        if warp >= warps:
            # --- global -> shared: one thread brings weights, one tokens, in large pieces
            fewer_registers()
            if warp > warps + 1 or lane > 0:
                return
            if warp > warps:
                griddepcontrol_wait()  # the activations have just been rounded
            last = int32((N - 1) // (TILE_GROUP * TILE_ROWS) * in_band + in_band - 1)
            token_groups = int32((M + TOKEN_GROUP - 1) // TOKEN_GROUP)
            while number < total:
                m0, n0 = corner(number, tiles_n)
                group, first_piece = int32(m0 // TOKEN_GROUP), int32(n0 // piece)
                token_bytes = int32(min(token_groups - group, bm // TOKEN_GROUP) * group_bytes)
                for step in range(k0, k0 + count):
                    mbarrier_wait(ring, empty + 8 * s, parity ^ 1)
                    to, bar = s * stage_bytes, full + 8 * s
                    if warp == warps:
                        mbarrier_arrive_expect(ring, bar, at_tokens + token_bytes)
                        for i in range(pieces):
                            number_of = int32(min(first_piece + i, last))
                            band, part = number_of // in_band, number_of % in_band
                            at = int64(int32((band * steps + step) * in_band + part)) * piece_bytes
                            bulk_copy(ring, to + i * piece_bytes, w, at, piece_bytes, ring, bar)
                    else:
                        at = int64(int32(step * token_groups + group)) * (TOKEN_GROUP * TILE_K)
                        bulk_copy(ring, to + at_tokens, a, at, token_bytes, ring, bar)
                    s = int32(s + 1)
                    if s == stages:
                        s, parity = int32(0), int32(parity ^ 1)
                number, k0, count, left = go_on(number, left, tail, steps)
            return

        more_registers()
        griddepcontrol_wait()
        until = int32(-1)
        if ahead:
            # one warpgroup begins later, so that tensor cores are busy while the other ends a tile
            if warp < WARPGROUP // 32:
                until = int32(min(ahead, count) - 1)
            else:
                barrier_sync(sign, groups * WARPGROUP)
        before, weights = int32(0), int32(warp * record)
        while number < total:
            m0, n0 = corner(number, tiles_n)
            first = last = early = int32(0)
            if count < steps:
                first, last, early = sharers(number, tail, rate, steps)
            acc, more = no_sums(), no_sums()  # of the first lot of features and of the second
            step, at = int32(0), int32(s * stage_bytes)
            mbarrier_wait(ring, full + 8 * s, parity)
            lower = fetch(ring, at + weights, lane, 0)
            while True:
                # the next weights come while these are made float16
                b = matrix_descriptor(ring, at + at_tokens, 128, group_bytes)
                if lots == 2:
                    other = fetch(ring, at + lot_bytes + weights, lane, 0)
                upper = fetch(ring, at + weights, lane, 1)
                acc = multiply(acc, lower, b)
                acc = wait_for_all_but_one(acc)
                if lane == 0 and step > 0:
                    mbarrier_arrive(ring, empty + 8 * before)
                if lots == 2:
                    more = multiply(more, other, b)
                    other = fetch(ring, at + lot_bytes + weights, lane, 1)
                    more = wait_for_all_but_one(more)
                acc = multiply(acc, upper, b + HALF)
                if lots == 2:
                    acc = wait_for_all_but_one(acc)
                    more = multiply(more, other, b + HALF)
                if ahead and step == until:
                    barrier_arrive(sign, groups * WARPGROUP)
                before = s
                s = int32(s + 1)
                if s == stages:
                    s, parity = int32(0), int32(parity ^ 1)
                step, at = int32(step + 1), int32(s * stage_bytes)
                if step >= count:
                    break
                mbarrier_wait(ring, full + 8 * s, parity)
                lower = fetch(ring, at + weights, lane, 0)
                if lots == 2:
                    more = wait_for_all_but_one(more)
                else:
                    acc = wait_for_all_but_one(acc)
            until = int32(-1)
            acc, more = wait_for_all(acc), wait_for_all(more)
            if lane == 0:
                mbarrier_arrive(ring, empty + 8 * before)
            to = of_rows, of_tokens, c, partials, arrived
            finish(acc, 0, number, m0, n0, first, last, early, to)
            if lots == 2:
                finish(more, 1, number, m0, n0, first, last, early, to)
            number, k0, count, left = go_on(number, left, tail, steps)

    return w4a16_wgmma, 4 * words_used


def tiling(fmt: StorageFormat, shape: Shape) -> wgmma_tiles.TileConfiguration:
    unpack = {5: 24, 6: 32}.get(fmt.bits, 20)  # instructions that make 16 x 16 weights

    def stage(bn: int, bm: int) -> int:
        """Cycles of the tensor cores; of a warp that unpacks and asks for products, of which most
        are latencies; of 40 bytes a cycle from the L2."""
        bring = (bn * fmt.bits // 8 + 2 * bm) * TILE_K // 40
        most = max(bn * bm // 16, bn * (35 * unpack + 10 * bm // 3) // 128, bring)
        return most * 33 // 32 if warpgroups(bn) == 3 else most  # for the same work: measured

    return wgmma_tiles.fewest_cycles(TILES, shape, multiprocessors(), stage)


def scratch(fmt: Format, family: Family, shape: Shape) -> tuple[tuple[tuple[int, ...], Any], ...]:
    return wgmma_tiles.scratch_arrays(tiling(storage_format(fmt), shape), np.float32)


def launch(
    fmt: Format, family: Family, shape: Shape, weights: tuple, activations: tuple, out: Any,
    scratch: tuple,
) -> Launch:  # fmt: skip
    held = storage_format(fmt)
    cut = tiling(held, shape)
    make = partial(kernel, held, out.dtype == np.float16, cut[0], wgmma_tiles.reduction_slices(cut))
    operands = (*weights, *activations, out)
    return wgmma_tiles.launch_of(make, STAGES, AHEAD, cut, shape.k, operands, scratch)


STEP = Step(
    number=12,
    name="step12_w4a16_wgmma",
    title="W4A16 with wgmma: weights in registers, tokens in shared memory",
    branch="float16",
    families=("A16",),
    parents={"A16": 11},
    unit={"A16": "tensor_fp16"},
    pack=tiles,
    activations=float16_chunks,
    launch=launch,
    scratch=scratch,
    formats=KNOWN,
    outputs=("float32", "float16"),
    min_cc=(9, 0),
    max_cc=(9, 0),  # others have no wgmma, later ones neither
    contains={"A16": ("HGMMA", "HFMA2", "UBLKCP", "SYNCS", "USETMAXREG")},
    forbids={"A16": ("IMMA", "HMMA", "LDGSTS", "LDSM")},
    chosen_untuned=True,
)
