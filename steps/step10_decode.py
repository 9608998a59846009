"""Step 10: decode - a handful of tokens, where all that counts is how fast the weights arrive.

What is new
    A warp asks for its first records of weights before it looks at anything else, and keeps a ring
    of them on their way in shared memory of its own, so that no barrier holds the stream up. Up to
    four tokens it is one launch from float32 A to C: each thread block quantizes what it needs of
    A meanwhile; more tokens come K-outermost, 128 K of A beside each packed tile of weights. An mma
    has eight columns: for one or two tokens four blocks of K share them, and one promotion serves
    128 K (steps.components.decode_products). The tile configuration is in decode_tiles there, A's
    way to shared memory in decode_activations, and the sums' way to C in decode_reduction: the last
    thread block to arrive adds up all, in order.
Why it should help
    At M = 1 a weight is read once and used once: 33 MB of Q4_0 at 4.2 TB/s take 7.9 us, and that is
    all. For a record of 2048 weights a warp issues some 100 instructions, less than half of what an
    SM could while the record arrives; for 16 tokens some 210, four fifths of it.
What it costs
    Thread blocks that quantize the same A each for itself. 150 KB of shared memory, or 220 with A:
    where two blocks fit an SM, some SMs get two and take twice as long.
Machine code
    LDGSTS of weights before the first LDG of A, IMMA, and no BAR.SYNC in the loop.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, float32, int32, int64, uint8

from qformats import BLOCK, Format
from qformats.repack import KNOWN, TILE_GROUP, TILE_K, TILE_ROWS, tiles
from qformats.storage import StorageFormat, storage_format
from steps.components.activations.layouts import float32_quantized_inside, q8_1_k_outermost
from steps.components.decode_activations import float32_quantizer, prequantized_loader
from steps.components.decode_products import products
from steps.components.decode_reduction import finish_rows
from steps.components.decode_tiles import (
    BLOCKS,
    FUSED,
    MOST_TOKENS,
    scale_bytes,
    tile_configuration,
)
from steps.components.unpack.codes import tile_index
from steps.components.unpack.storage_formats import tile_format
from steps.contract import Activations, Family, Launch, Machine, Shape, Step, ceil_div
from steps.instructions import (
    cp_async_16,
    cp_async_commit,
    cp_async_wait,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
)


@cache
def kernel(
    fmt: StorageFormat, tokens: int, warps: int, across: int, stages: int, early: int, ahead: int
) -> Any:
    """The kernel of a `TileConfiguration`; for more than FUSED tokens A is prequantized."""
    tile, product = tile_format(fmt.name), products(fmt.name, tokens)
    record, minimum, along = tile.tile_bytes, tile.minimum, warps // across
    n_acc, holders = product.sums, product.lanes_with_sums
    places, multiply, add_up = product.read_offsets, product.multiply, product.add_columns
    given = tokens > FUSED
    private = given and across == 1  # A comes record by record, for no other warp needs it
    size_d = scale_bytes(tokens, minimum)
    step_b, step_d = BLOCKS * tokens * BLOCK, BLOCKS * tokens * size_d  # from record to record
    at_codes, stride = warps * stages * record, 8 * across  # blocks of A between a lane's
    copy = prequantized_loader(tokens, minimum, at_codes)
    fetch, quantize = float32_quantizer(tokens, minimum, at_codes, ahead, stride)
    leave, finish = finish_rows(tokens, holders, warps, along)
    wait_for_oldest, wait_for_a = cp_async_wait(stages - 1), cp_async_wait(stages - early)

    @cuda.jit(device=True, forceinline=True)
    def ask(smem, slot, w, at, left, more, next_row, share, lane):
        """Ask for the record at byte `at` of w, if any is left; where is the next one? `share`: of
        this warp (first record along K, how many, records of a row tile)."""
        first_k, deep, in_row = share
        if more > 0:
            for i in range(0, record, 512):
                if i + 512 <= record or i + 16 * lane < record:
                    cp_async_16(smem, slot + i + 16 * lane, w, at + i + 16 * lane)
            at, left, more = at + TILE_GROUP * record, int32(left - 1), int32(more - 1)
            if left == 0:
                at = int64(tile_index(next_row, first_k, in_row)) * record
                left, next_row = deep, int32(next_row + across)
        cp_async_commit()
        return at, left, more, next_row

    # Inlined by Numba, not by LLVM, which simplifies a function before it inlines it: the kernel
    # that comes of this takes more or fewer registers than one in which all stands written out.
    @cuda.jit(device=True, inline="always")
    def fill(smem, ring, first, last, w, at, left, more, next_row, share, lane):
        """Ask for what goes to places `first` to `last` of the ring."""
        for i in range(first, last):
            to = int32(ring + i * record)
            at, left, more, next_row = ask(smem, to, w, at, left, more, next_row, share, lane)
        return at, left, more, next_row

    @cuda.jit(launch_bounds=(32 * warps, 1))
    def w4a8_decode(w, factors, a, ds, c, in_row, rows, records, sums, arrived):
        """c[M, N] = a @ dequantize(w)[N, K]^T; w, factors: qformats.repack.tiles; a: float32, or
        with `ds` prequantized, K-outermost.

        A thread block has `rows` row tiles and `records` records along K. sums, arrived: `scratch`.
        """
        smem = cuda.shared.array(0, uint8, alignment=128)
        x = cuda.local.array((ahead, 8), float32)
        acc = cuda.local.array(n_acc, float32)
        griddepcontrol_launch_dependents()
        t = int32(cuda.threadIdx.x)
        lane, warp = int32(t & 31), int32(t >> 5)
        group, quad = int32(lane >> 2), int32(lane & 3)

        # --- this warp's share: row tiles `row`, + across ... before `end`, records k0 .. k0 + deep
        row_tiles = int32((c.shape[1] + TILE_ROWS - 1) // TILE_ROWS)
        first_k, first_row = int32(cuda.blockIdx.y * records), int32(cuda.blockIdx.x * rows)
        here = int32(min(records, in_row - first_k))
        each = int32((here + along - 1) // along)
        k0 = int32(min(here, warp // across * each))
        deep = int32(min(here - k0, each))
        row, end = int32(first_row + warp % across), int32(min(first_row + rows, row_tiles))
        more = int32(max(0, end - row + across - 1) // across * deep)  # records to ask for
        in_row, from_k = int32(in_row), int32(first_k + k0)
        at = int64(tile_index(row, from_k, in_row)) * record
        left, next_row, share = deep, int32(row + across), (from_k, deep, in_row)
        slot = ring = int32(warp * (stages * record))

        # --- weights, the first: they wait for no launch before this one
        at, left, more, next_row = fill(
            smem, ring, 0, early, w, at, left, more, next_row, share, lane
        )
        griddepcontrol_wait()

        # --- A -> shared memory as Q8_1 [block][token]; a warp has 8 side by side, 4 lanes each
        at_d = int32(at_codes + int32(records) * step_b)
        at_sums = int32(at_d + int32(records) * step_d)
        at_scales, M = at_d, int32(c.shape[0])
        if private:  # as the weights: a record of A lies in the group of a later one of weights
            for i in range(stages):
                if i < deep:
                    copy(smem, at_d, a, ds, M, first_k, k0 + i, lane)
                if early + i < stages:
                    to = int32(ring + (early + i) * record)
                    at, left, more, next_row = ask(
                        smem, to, w, at, left, more, next_row, share, lane
                    )
                else:
                    cp_async_commit()
        elif given:
            for i in range(warp % across, deep, across):
                copy(smem, at_d, a, ds, M, first_k, k0 + i, lane)
            cp_async_commit()
            at, left, more, next_row = fill(
                smem, ring, early, stages, w, at, left, more, next_row, share, lane
            )
            wait_for_a()
        else:
            begin = int32(k0 * (BLOCKS * tokens) + warp % across * 8)
            stop = int32((k0 + deep) * (BLOCKS * tokens))
            for start in range(begin, max(stop, begin + 1), stride * ahead):
                fetch(x, a, start + group, stop, first_k * BLOCKS, quad)
                if start == begin:  # now that A is asked for, the other records
                    at, left, more, next_row = fill(
                        smem, ring, early, stages, w, at, left, more, next_row, share, lane
                    )
                quantize(smem, at_d, x, a, start, stop, first_k * BLOCKS, group, quad)
        if across == 1:
            cuda.syncwarp()
        else:
            cuda.syncthreads()

        # --- the stream
        b, d = places(lane)
        at_b, at_d = int32(at_codes + k0 * step_b + b), int32(at_d + k0 * step_d + d)
        own, whole = int32((group * holders + quad) * 2), cuda.gridDim.y == 1
        for tile_row in range(row, end if deep > 0 else row, across):
            for r in range(n_acc):
                acc[r] = 0
            for i in range(deep):
                wait_for_oldest()
                cuda.syncwarp()
                multiply(acc, smem, slot, at_b, at_d, lane)
                cuda.syncwarp()
                if private:
                    if tile_row == row and i + stages < deep:
                        k = k0 + i + stages
                        copy(smem, at_scales, a, ds, M, first_k, k, lane)
                at_b, at_d = int32(at_b + step_b), int32(at_d + step_d)
                at, left, more, next_row = ask(smem, slot, w, at, left, more, next_row, share, lane)
                slot = int32(slot + record if slot < ring + (stages - 1) * record else ring)
            at_b, at_d = int32(at_b - deep * step_b), int32(at_d - deep * step_d)
            add_up(acc)
            if quad < holders:
                place = int32(warp // across * rows + tile_row - first_row)
                leave(
                    acc, smem, at_sums, place, own, factors, c, sums, tile_row, row_tiles,
                    lane, whole,
                )  # fmt: skip

        # --- the sums of the warps along K, then those of the thread blocks along K
        finish(
            acc, smem, at_sums, own, factors, c, sums, arrived, first_row, end, rows, here, each,
            row_tiles, warp, lane, whole,
        )  # fmt: skip

    return w4a8_decode


def activations(family: Family, a: Any, machine: Machine) -> Activations:
    """A itself for few tokens, else prequantized: too much for each block to quantize."""
    return (float32_quantized_inside if a.shape[0] <= FUSED else q8_1_k_outermost)(
        family, a, machine
    )


def scratch(fmt: Format, family: Family, shape: Shape) -> tuple:
    """Sums of slices, float32 [M/16, N/16, slices, 16 * tokens], in the order of lanes; how many
    slices of a row tile have arrived, int32 [M/16, N/16]."""
    cut = tile_configuration(storage_format(fmt), shape)
    row_tiles = ceil_div(shape.m, MOST_TOKENS) * ceil_div(shape.n, TILE_ROWS)
    sums = row_tiles * cut.splits * TILE_ROWS * cut.tokens if cut.splits > 1 else 1
    return ((sums,), np.float32), ((row_tiles,), np.int32)


def launch(
    fmt: Format, family: Family, shape: Shape, weights: tuple, activations: tuple, out: Any,
    workspace: tuple,
) -> Launch:  # fmt: skip
    held = storage_format(fmt)
    cut = tile_configuration(held, shape)
    rows, tokens = ceil_div(shape.n, TILE_ROWS), ceil_div(shape.m, MOST_TOKENS)
    a, ds = (*activations, workspace[0])[:2]  # float32 A has no scales: any array will do
    args = (*weights, a, ds, out, ceil_div(shape.k, TILE_K), cut.row_tiles, cut.k_tiles, *workspace)
    made = kernel(held, cut.tokens, cut.warps, cut.warps_n, cut.stages, cut.prefetched, cut.ahead)
    grid = (ceil_div(rows, cut.row_tiles), cut.splits, tokens)
    return Launch(made, grid, (32 * cut.warps,), args, cut.shared, overlap=True)


STEP = Step(
    number=10,
    name="step10_decode",
    title="decode: weights stream to warps of their own, one launch",
    branch="decode",
    families=("A8",),
    parents={"A8": 2},
    diff_from=9,
    unit={"A8": "tensor_int8"},
    pack=tiles,
    activations=activations,
    launch=launch,
    scratch=scratch,
    most_tokens=MOST_TOKENS,
    formats=tuple(
        name for name in KNOWN if name != "q2_k"
    ),  # steps.components.decode_products: why
    min_cc=(8, 0),
    contains={"A8": ("IMMA", "LDGSTS.E.BYPASS.128", "LDGDEPBAR")},
    forbids={"A8": ("HMMA", "LDL", "STL")},
    chosen_untuned=True,
)
