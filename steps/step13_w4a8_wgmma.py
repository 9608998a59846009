"""Step 13: W4A8 with wgmma - a row and a token have one scale each, and K is one integer sum.

What is new
    Weights become int8 with one scale a row, tokens with one scale each: what is left of a product
    is an integer sum over all of K, with two factors at its end and nothing between two wgmma. The
    scale of a block goes into its weights, which are rounded to int8 on their way, in registers: a
    nibble taken as a float16, times k / 8 (k = 8 d / scale, at most 127), plus a constant so large
    that a float16 has no bits for fractions beside it. Its lower byte is the weight. Eight of them
    take 14 instructions. Q8_0, and what else files come in, is rounded once, when it is packed.
Why it should help
    The tensor cores multiply int8 twice as fast as float16: 128 x 128 outputs and 128 K are 512
    cycles. Two warps a scheduler issue 2 x 171 instructions meanwhile (5 bits: 2 x 208, 8 bits:
    2 x 50), but each waits for its own results, for longer than its neighbour's product lasts; so
    the tile is 128 x 256, 1024 cycles, where there are enough of them. Steps 7 to 9 paid three
    instructions for each sum every 32 of K.
What it costs
    Exactness. Requantized weights are off by 8.5e-5 (NMSE) of normal data, Q4_0 itself by 7.3e-3;
    int8 tokens by as much, and by 3.2e-3 where a few channels are 20 times the others. So it is
    used only when asked for: gemm(..., accuracy="fast"). But integers add up alike in any order:
    the bits are the same however K is cut, on any number of SMs.
Machine code
    IGMMA between HFMA2, LOP3 and PRMT, with no wait but WARPGROUP.DEPBAR; no I2FP before the end.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, Final

import numpy as np
from numba import cuda, int32, int64, uint8

from qformats import Format
from qformats.repack import KNOWN, TILE_GROUP, TILE_K, TOKEN_GROUP, byte_storage_format, byte_tiles
from steps.components import wgmma_tiles
from steps.components.activations.layouts import int8_chunks
from steps.components.epilogue.wgmma import ACC_HALF_TOKENS, WARPGROUP, finish_wgmma_tile
from steps.components.stream_k import scheduler
from steps.components.unpack.int8 import ByteFormat, byte_format
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
    wgmma_fence,
    wgmma_s8,
    wgmma_u8,
    wgmma_wait,
    zeros_i32,
)

TILES: Final = (  # (features, tokens) of a tile of C
    (128, 16),
    (128, 32),
    (128, 64),
    (128, 128),
    (128, 256),  # long enough a product to make the next weights beside it
)
STAGES: Final = 8  # of the ring, at most
AHEAD: Final = 2  # stages of one warpgroup before the other: the end of a tile, hidden behind it
WARPS: Final = 2 * WARPGROUP // 32  # that multiply; the warps of the third warpgroup bring


@cache
def kernel(
    form: ByteFormat, in_half: bool, tile: tuple[int, int], strips: int, stages: int, ahead: int
) -> tuple[Any, int]:
    """(kernel for tiles (features, tokens), shared ones cut into `strips`, and a ring of `stages`,
    the first warpgroup `ahead` of the second by so many; its shared memory in bytes)"""
    bn, bm = tile
    record, words = form.tile_bytes, form.words
    scales, fragments = form.scales, form.fragments
    mma = wgmma_u8 if form.zero else wgmma_s8
    prefetch = form.unpacked  # operands as they are must not come while others are multiplied
    at_tokens, group_bytes = TILE_GROUP * record, TILE_K * TOKEN_GROUP
    stage_bytes = at_tokens + TILE_K * bm
    full = stages * stage_bytes  # the ring, then its mbarriers, then what the end of a tile needs
    empty = full + 8 * stages
    first_word = (empty + 8 * stages + 127) // 128 * 32
    finish, words_used = finish_wgmma_tile(tile, first_word, in_half, strips, int32, form.zero)
    find, no_sums = scheduler(bn, bm), zeros_i32(bm // 2)
    lot = min(bm, ACC_HALF_TOKENS) // 2  # accumulators whose end comes at a time
    begin, go_on = find.first_work, find.next_work
    corner, sharers = find.tile_origin, find.contributors
    wait_for_all, wait_for_all_but_one = wgmma_wait(0), wgmma_wait(1)
    more_registers, fewer_registers = setmaxnreg_inc(240), setmaxnreg_dec(24)  # of 512 for three

    @cuda.jit(device=True, forceinline=True)
    def fetch(ring, weights, lane, half):
        return words(ring, weights, lane, half), scales(ring, weights, lane, half)

    @cuda.jit(device=True, forceinline=True)
    def multiply(acc, fetched, where):
        """acc += 64 K: weights become int8 in registers and meet all tokens of the tile."""
        a, b = fragments(fetched[0], fetched[1], 0), fragments(fetched[0], fetched[1], 1)
        wgmma_fence()
        acc = mma(acc, a[0], a[1], a[2], a[3], where, 1)
        acc = mma(acc, b[0], b[1], b[2], b[3], where + 16, 1)
        wgmma_commit()
        return acc

    @cuda.jit(launch_bounds=(3 * WARPGROUP, 1))
    def w4a8_wgmma(w, of_rows, a, of_tokens, c, steps, stretch, partials, arrived):
        """c[M, N] = a @ dequantize(w)[N, K]^T; w of qformats.repack.byte_tiles, a of
        activations.layouts.int8_chunks; stretch: stream_k.work_rate."""
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
                mbarrier_init(ring, empty + 8 * s, WARPS)
            fence_mbarrier_init()
        cuda.syncthreads()
        griddepcontrol_launch_dependents()
        s, parity = int32(0), int32(0)
        if warp >= WARPS:
            # --- global -> shared: one thread brings weights, one tokens, in large pieces
            fewer_registers()
            if warp > WARPS + 1 or lane > 0:
                return
            if warp > WARPS:
                griddepcontrol_wait()  # the activations have just been quantized
            groups = int32((M + TOKEN_GROUP - 1) // TOKEN_GROUP)
            while number < total:
                m0, n0 = corner(number, tiles_n)
                group, band = int32(m0 // TOKEN_GROUP), int32(n0 // bn)
                token_bytes = int32(min(groups - group, bm // TOKEN_GROUP) * group_bytes)
                for step in range(k0, k0 + count):
                    mbarrier_wait(ring, empty + 8 * s, parity ^ 1)
                    to, bar = s * stage_bytes, full + 8 * s
                    if warp == WARPS:
                        mbarrier_arrive_expect(ring, bar, at_tokens + token_bytes)
                        at = int64(int32(band * steps + step)) * at_tokens
                        bulk_copy(ring, to, w, at, at_tokens, ring, bar)
                    else:
                        at = int64(int32(step * groups + group)) * (TOKEN_GROUP * TILE_K)
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
            if warp < WARPS // 2:
                until = int32(min(ahead, count) - 1)
            else:
                barrier_sync(3, 2 * WARPGROUP)
        before, own = int32(0), int32(warp * record)
        while number < total:
            m0, n0 = corner(number, tiles_n)
            first = last = early = int32(0)
            if count < steps:
                first, last, early = sharers(number, tail, rate, steps)
            acc = no_sums()
            step, at = int32(0), int32(s * stage_bytes)
            mbarrier_wait(ring, full + 8 * s, parity)
            lower = fetch(ring, at + own, lane, 0)
            while True:
                b = matrix_descriptor(ring, at + at_tokens, 128, group_bytes)
                if prefetch:  # the next weights come while these are made
                    upper = fetch(ring, at + own, lane, 1)
                acc = multiply(acc, lower, b)
                acc = wait_for_all_but_one(acc)
                if not prefetch:
                    upper = fetch(ring, at + own, lane, 1)
                if lane == 0 and step > 0:
                    mbarrier_arrive(ring, empty + 8 * before)
                acc = multiply(acc, upper, b + 32)
                if ahead and step == until:
                    barrier_arrive(3, 2 * WARPGROUP)
                before = s
                s = int32(s + 1)
                if s == stages:
                    s, parity = int32(0), int32(parity ^ 1)
                step, at = int32(step + 1), int32(s * stage_bytes)
                if step >= count:
                    break
                mbarrier_wait(ring, full + 8 * s, parity)
                if prefetch:
                    lower = fetch(ring, at + own, lane, 0)
                acc = wait_for_all_but_one(acc)
                if not prefetch:
                    lower = fetch(ring, at + own, lane, 0)
            until = int32(-1)
            acc = wait_for_all(acc)
            if lane == 0:
                mbarrier_arrive(ring, empty + 8 * before)
            to = of_rows, of_tokens, c, partials, arrived
            finish(acc[:lot], 0, number, m0, n0, first, last, early, to)
            if bm > ACC_HALF_TOKENS:
                finish(acc[lot:], 1, number, m0, n0, first, last, early, to)
            number, k0, count, left = go_on(number, left, tail, steps)

    return w4a8_wgmma, 4 * words_used


def stage(bits: int, unpack: int, bn: int, bm: int) -> int:
    """Cycles of 128 K of a tile: on tensor cores; for `unpack` instructions for 16 x 16 weights,
    three slots each, as a warp waits for its own results; for bytes from the L2, 40 a cycle."""
    bring = (bn * bits // 8 + bm) * TILE_K // 40
    return max(bn * max(bm, 32) // 32, 3 * bn * unpack // 8, bring)


def tiling(fmt: Format, shape: Shape) -> wgmma_tiles.TileConfiguration:
    cycles = partial(stage, fmt.bits, {4: 16, 5: 20, 8: 4}[fmt.bits])
    return wgmma_tiles.fewest_cycles(TILES, shape, multiprocessors(), cycles)


def scratch(fmt: Format, family: Family, shape: Shape) -> tuple[tuple[tuple[int, ...], Any], ...]:
    return wgmma_tiles.scratch_arrays(tiling(byte_storage_format(fmt), shape), np.int32)


def launch(
    fmt: Format, family: Family, shape: Shape, weights: tuple, activations: tuple, out: Any,
    scratch: tuple,
) -> Launch:  # fmt: skip
    held = byte_storage_format(fmt)
    cut = tiling(held, shape)
    in_half, slices = out.dtype == np.float16, wgmma_tiles.reduction_slices(cut)
    make = partial(kernel, byte_format(held.name), in_half, cut[0], slices)
    operands = (*weights, *activations, out)
    return wgmma_tiles.launch_of(make, STAGES, AHEAD, cut, shape.k, operands, scratch)


STEP = Step(
    number=13,
    name="step13_w4a8_wgmma",
    title="W4A8 with wgmma: one scale a row, one a token, one integer sum",
    branch="float16",
    families=("A8",),
    parents={"A8": 12},
    unit={"A8": "tensor_int8"},
    pack=byte_tiles,
    activations=int8_chunks,
    launch=launch,
    scratch=scratch,
    formats=KNOWN,
    outputs=("float32", "float16"),
    accuracy="fast",
    min_cc=(9, 0),
    max_cc=(9, 0),  # others have no wgmma, later ones neither
    contains={"A8": ("IGMMA", "UBLKCP", "SYNCS", "USETMAXREG")},
    forbids={"A8": ("IMMA", "HMMA", "HGMMA", "LDGSTS", "LDSM")},
    chosen_untuned=True,
)
