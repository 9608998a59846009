"""Rows of bfloat16 A that become float16 beside the tiles of a product, where there are many.

A pass over A (`steps.kernels.parts.activations.rows`) and the product after it do not overlap: a
block of `wgmma` takes all registers of its SM. With 4096 tokens the pass takes a tenth of the
product. But the first tiles need the first rows alone. So the pass rounds these, and two warps of
each block, which would be idle, the others, before their tiles come:

    the pass               [first rows]
    producer of tokens                 [boxes of the first tiles ...  ][poll: all rows there?][boxes
    consumers                          [multiply the first tiles ...                      ][multiply
    two warps                          [round the other rows, in their order ...

A warp takes the next row by a *ticket*, so that a row belongs to a warp that runs already: a block
waits for no block that may not have begun, and any number of blocks is right. Counters, int32, are
zero before and after a launch:

    0       tickets
    1       warps that need the counters no more: the last one sets all of them back
    2 ...   rows rounded here, of each `bm`

A row is stored, counted behind a fence, and read by tensor copies behind two more: one for what
other threads wrote, one for copies. Token scales follow the same way: who waits for a stage of the
ring knows what its producer knew.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from numba import cuda, int32, int64, uint32

from steps.contract import ceil_div
from steps.instructions import (
    fence,
    fence_proxy_async_global,
    griddepcontrol_wait,
    shfl,
    shfl_xor,
    store_u32x2,
)
from steps.kernels.parts.activations.rows import (
    exponent,
    four_halves,
    inverse,
    largest_bits,
    scale,
)
from steps.kernels.parts.activations.sources import SOURCES

H200_FIRST_ROWS: Final = 1152
"""Of the pass: with tiles of 256 features and 128 tokens those of the first tile of each of 132
blocks, where N is 4096. Of up to twice as many it rounds all: the others gain nothing there."""

H200_BESIDE_FEATURES: Final = 8192
"""N up to which rows are rounded beside the tiles. Beyond it the pass is a small part of the
product, and costs less than warps that hold up the tiles."""

TICKETS, LEFT, ROUNDED_ROWS = range(3)
"""The counters, of which the last are many."""

LEAST_TOKENS: Final = 16
"""Of a tile: there are counters of rows for so many."""

WARPS: Final = 2
"""Of a block, that round rows."""

LANES_K: Final = 128
"""Values of a row that the lanes of a warp load at a time, four each."""

LOADS: Final = 8
"""Of a lane in flight: 16 registers of the 40 that it has."""


@dataclass(frozen=True, slots=True)
class RowsBeside:
    """Device functions of a kernel whose warps behind its two producers round rows.

    parts(operand) -> (token_scales, others)
        of the operand of `rows_operand`; the others take `others`
    round_rows(others, lane)
        the two warps
    wait_for_rows(others, m0)
        the producer of tokens: rows m0 to m0 + bm - 1 are there, for tensor copies too
    leave(others)
        the producer of tokens, at its end
    """

    parts: Any
    round_rows: Any
    wait_for_rows: Any
    leave: Any


@cuda.jit(device=True, forceinline=True)
def _nothing(*_):
    pass


@cuda.jit(device=True, forceinline=True)
def _token_scales_alone(token_scales):
    return token_scales, token_scales


@cache
def row_rounder(k: int) -> Any:
    """round_row(a, out, token_scales, m, lane): row m of bfloat16 A[M, k] by a warp, as the pass
    does it. It reads the row twice."""
    load_4, values = SOURCES["bfloat16"].load, SOURCES["bfloat16"].values
    loads = min(LOADS, ceil_div(k, LANES_K))

    @cuda.jit(device=True, forceinline=True)
    def load(x, a, row, first):
        for i in range(loads):
            x[i, 0] = x[i, 1] = 0
            if first + LANES_K * i < k:
                load_4(x, i, a, row + (first + LANES_K * i), True)

    @cuda.jit(device=True, forceinline=True)
    def round_row(a, out, token_scales, m, lane):
        x, row = cuda.local.array((loads, 2), uint32), int64(m) * k
        largest, at = int32(0), int32(4 * lane)
        while at < k:
            load(x, a, row, at)
            for i in range(loads):
                largest = largest_bits(values(x, i), largest)
            at = int32(at + loads * LANES_K)
        for apart in (1, 2, 4, 8, 16):
            largest = max(largest, shfl_xor(largest, apart))
        row_exponent = exponent(largest)
        times, at = scale(row_exponent), int32(4 * lane)
        while at < k:
            load(x, a, row, at)
            for i in range(loads):
                if at + LANES_K * i < k:
                    first, second = four_halves(values(x, i), times)
                    store_u32x2(out, row + (at + LANES_K * i), first, second)
            at = int32(at + loads * LANES_K)
        if lane == 0:
            token_scales[m] = inverse(row_exponent)

    return round_row


@cache
def rows_beside(k: int | None, bm: int) -> RowsBeside:
    """The device functions, which do nothing where k is None: all rows are there. k: of a row of
    bfloat16 A; bm: tokens of a tile."""
    if k is None:
        return RowsBeside(_token_scales_alone, *[_nothing] * 3)
    round_row = row_rounder(k)

    @cuda.jit(device=True, forceinline=True)
    def parts(operand):
        return operand[2], operand

    @cuda.jit(device=True, forceinline=True)
    def leave(others):
        a, _, _, counters, _ = others
        fence()
        if cuda.atomic.add(counters, LEFT, 1) == (WARPS + 1) * cuda.gridDim.x - 1:
            fence()
            for i in range(ROUNDED_ROWS + int32(uint32(a.shape[0] + bm - 1) // uint32(bm))):
                counters[i] = 0

    @cuda.jit(device=True, forceinline=True)
    def next_row(counters, first_rows, lane):
        ticket = int32(0)
        if lane == 0:
            ticket = cuda.atomic.add(counters, TICKETS, 1)
        return int32(first_rows + shfl(ticket, 0))

    @cuda.jit(device=True, forceinline=True)
    def round_rows(others, lane):
        a, out, token_scales, counters, first_rows = others
        griddepcontrol_wait()
        m = next_row(counters, first_rows, lane)
        while m < a.shape[0]:
            round_row(a, out, token_scales, m, lane)
            cuda.syncwarp()
            if lane == 0:
                fence()
                tile = int32(uint32(m) // uint32(bm))
                cuda.atomic.add(counters, ROUNDED_ROWS + tile, 1)
            m = next_row(counters, first_rows, lane)
        if lane == 0:
            leave(others)

    @cuda.jit(device=True, forceinline=True)
    def wait_for_rows(others, m0):
        a, _, _, counters, first_rows = others
        end = int32(min(int32(m0 + bm), a.shape[0]))
        rows = int32(min(bm, int32(end - max(int32(m0), int32(first_rows)))))
        if rows > 0:
            tile = ROUNDED_ROWS + int32(uint32(m0) // uint32(bm))
            while cuda.atomic.add(counters, tile, 0) < rows:
                cuda.nanosleep(32)
            fence()
            fence_proxy_async_global()

    return RowsBeside(parts, round_rows, wait_for_rows, leave)


def rows_operand(activations: tuple[Any, ...], unread: Any) -> tuple[int | None, Any, Any]:
    """(K of rows that are rounded beside, if there are any; the rows that tensor copies read; the
    kernel's operand: token scales, `unread` where there are none, or what rows are made of).

    activations: the rows, perhaps with token scales, or what
    `steps.kernels.parts.activations.layouts.float16_rows_of_many` makes of many."""
    if len(activations) < 4:
        rows, scales = (*activations, unread)[:2]
        return None, rows, scales
    a, rows, _, _ = activations
    return a.shape[1], rows, (*activations, H200_FIRST_ROWS)
