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
    cycles. Two warps a scheduler issue 2 x 171 instructions meanwhile (5 bits: 2 x 224, 8 bits:
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
Read next
    What all of them cost and gain, side by side: the README's table
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
from numba import cuda, int32, int64, uint8

from qformats import Format
from qformats.device import byte_format
from qformats.repack import BAND, KNOWN, TILE_K, TOKEN_GROUP, byte_carrier, byte_tiles
from steps.activations import int8_units
from steps.epilogue import GROUP, LOT, ROWS, finish_wgmma
from steps.instructions import (
    barrier_arrive,
    barrier_sync,
    bulk_copy,
    fence_mbarrier_init,
    let_next_start,
    matrix_descriptor,
    mbarrier_arrive,
    mbarrier_arrive_expect,
    mbarrier_init,
    mbarrier_wait,
    setmaxnreg_dec,
    setmaxnreg_inc,
    shfl,
    wait_for_previous,
    wgmma_commit,
    wgmma_fence,
    wgmma_s8,
    wgmma_wait,
    zeros_i32,
)
from steps.machines import multiprocessors, shared_memory
from steps.step import Family, Launch, Shape, Step, ceil_div
from steps.stretches import cuts, shares, stretches

TILES: Final = (  # (features, tokens) of a tile of C
    (128, 16),
    (128, 32),
    (128, 64),
    (128, 128),
    (128, 256),  # long enough a product to make the next weights beside it
)
STAGES: Final = 8  # of the ring, at most
AHEAD: Final = 2  # stages of one warpgroup before the other: the end of a tile, hidden behind it
WARPS: Final = 2 * GROUP // 32  # that multiply; the warps of the third warpgroup bring
END: Final = 2000  # cycles from a tile's last product to the next one's first
SHARE: Final = 3000  # cycles for handing over a part of a tile, and waiting for others' sums
UNEVEN: Final = 6  # a sixth more, where blocks share tiles in other than equal parts


@cache
def kernel(
    fmt: Format, tile: tuple[int, int], stages: int, ahead: int, in_half: bool
) -> tuple[Any, int]:
    """(kernel for tiles (features, tokens) and a ring of `stages`, the first warpgroup `ahead` of
    the second by so many; its shared memory in bytes)"""
    bn, bm = tile
    form = byte_format(fmt.name)
    record, words = form.record_bytes, form.words
    scales, fragments = form.scales, form.fragments
    prefetch = fmt.bits < 8  # what is an operand as it is must not come while others are multiplied
    at_tokens, group_bytes = BAND * record, TILE_K * TOKEN_GROUP
    stage_bytes = at_tokens + TILE_K * bm
    full = stages * stage_bytes  # the ring, then its mbarriers, then what the end of a tile needs
    empty = full + 8 * stages
    first_word = (empty + 8 * stages + 127) // 128 * 32
    finish, words_used = finish_wgmma(tile, first_word, in_half, int32)
    find, no_sums = stretches(bn, bm), zeros_i32(bm // 2)
    lot = min(bm, LOT) // 2  # accumulators whose end comes at a time
    begin, go_on, corner, sharers = find.begin, find.go_on, find.corner, find.sharers
    wait_for_all, wait_for_all_but_one = wgmma_wait(0), wgmma_wait(1)
    more_registers, fewer_registers = setmaxnreg_inc(232), setmaxnreg_dec(40)  # of 512 for three

    @cuda.jit(device=True, forceinline=True)
    def fetch(ring, weights, lane, half):
        return words(ring, weights, lane, half), scales(ring, weights, lane, half)

    @cuda.jit(device=True, forceinline=True)
    def multiply(acc, fetched, where):
        """acc += 64 K: weights become int8 in registers and meet all tokens of the tile."""
        a, b = fragments(fetched[0], fetched[1], 0), fragments(fetched[0], fetched[1], 1)
        wgmma_fence()
        acc = wgmma_s8(acc, a[0], a[1], a[2], a[3], where, 1)
        acc = wgmma_s8(acc, b[0], b[1], b[2], b[3], where + 16, 1)
        wgmma_commit()
        return acc

    @cuda.jit(launch_bounds=(3 * GROUP, 1))
    def w4a8_wgmma(w, of_rows, a, of_tokens, c, steps, stretch, partials, arrived):
        """c[M, N] = a @ dequantize(w)[N, K]^T; w of qformats.repack.byte_tiles, a of
        steps.activations.int8_units; stretch as of steps.stretches.shares."""
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
        let_next_start()
        s, parity = int32(0), int32(0)
        if warp >= WARPS:
            # --- global -> shared: one thread brings weights, one tokens, in large pieces
            fewer_registers()
            if warp > WARPS + 1 or lane > 0:
                return
            if warp > WARPS:
                wait_for_previous()  # the activations have just been quantized
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
        wait_for_previous()
        until = int32(-1)
        if ahead:
            # one warpgroup begins later, so that tensor cores are busy while the other ends a tile
            if warp < WARPS // 2:
                until = int32(min(ahead, count) - 1)
            else:
                barrier_sync(3, 2 * GROUP)
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
                    barrier_arrive(3, 2 * GROUP)
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
            if bm > LOT:
                finish(acc[lot:], 1, number, m0, n0, first, last, early, to)
            number, k0, count, left = go_on(number, left, tail, steps)

    return w4a8_wgmma, 4 * words_used


def tiling(fmt: Format, shape: Shape) -> tuple[tuple[int, int], int, int, int]:
    """(tile, how many of them, thread blocks, tiles that all blocks share) that should take the
    fewest cycles."""
    steps, least, best = ceil_div(shape.k, TILE_K), float("inf"), ((0, 0), 0, 0, 0)
    unpack = {4: 16, 5: 22, 8: 4}[fmt.bits]  # instructions that make 16 x 16 weights
    for bn, bm in TILES:
        total = ceil_div(shape.n, bn) * ceil_div(shape.m, bm)
        # cycles of 128 K: of the tensor cores, of unpacking (which takes three times its
        # issue slots, as a warp waits for its own results), of 40 bytes a cycle from the L2
        bring = (bn * fmt.bits // 8 + bm) * TILE_K // 40
        stage = max(bn * max(bm, 32) // 32, 3 * bn * unpack // 8, bring)
        for blocks, tail, count, pieces in cuts(total, steps, multiprocessors()):
            cycles = count * stage + pieces * END
            if tail:  # the way of a tile's parts to the L2 and back, at 24 bytes a cycle
                cycles += SHARE + (ceil_div(blocks, tail) + 1) * bn * bm * 4 // 24
            if tail and blocks % tail:  # some come late: more waiting than can be planned
                cycles += cycles // UNEVEN
            if cycles < least:
                least, best = cycles, ((bn, bm), total, blocks, tail)
    return best


def scratch(fmt: Format, family: Family, shape: Shape) -> tuple[tuple[tuple[int, ...], Any], ...]:
    """Two tiles for each block, and a count for each 64 features of a tile or half of it."""
    (bn, bm), total, blocks, tail = tiling(byte_carrier(fmt), shape)
    counts = total * bn // ROWS * ceil_div(bm, LOT)
    return ((2 * blocks * bn * bm if tail else 4,), np.int32), ((counts,), np.int32)


def launch(
    fmt: Format, family: Family, shape: Shape, weights: tuple, activations: tuple, out: Any,
    scratch: tuple,
) -> Launch:  # fmt: skip
    fmt = byte_carrier(fmt)
    tile, total, blocks, tail = tiling(fmt, shape)
    in_half, stages = out.dtype == np.float16, STAGES
    while kernel(fmt, tile, stages, 0, in_half)[1] > shared_memory():
        stages -= 1
    ahead = min(AHEAD, stages - 2) if total > blocks else 0
    run, shared_bytes = kernel(fmt, tile, stages, ahead, in_half)
    steps = ceil_div(shape.k, TILE_K)
    args = (*weights, *activations, out, steps, shares(tail, steps, blocks), *scratch)
    return Launch(run, (blocks,), (3 * GROUP,), args, shared_bytes, overlap=True)


STEP = Step(
    number=13,
    name="step13_w4a8_wgmma",
    title="W4A8 with wgmma: one scale a row, one a token, one integer sum",
    families=("A8",),
    parents={"A8": 9},
    unit={"A8": "tensor_int8"},
    pack=byte_tiles,
    activations=int8_units,
    launch=launch,
    scratch=scratch,
    formats=KNOWN,
    outputs=("float32", "float16"),
    accuracy="fast",
    min_cc=(9, 0),
    max_cc=(9, 0),  # others have no wgmma, later ones neither
    contains={"A8": ("IGMMA", "UBLKCP", "SYNCS", "USETMAXREG")},
    forbids={"A8": ("IMMA", "HMMA", "HGMMA", "LDGSTS", "LDSM")},
)
