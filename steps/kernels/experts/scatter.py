"""The end of a tile of many experts' product: from accumulators to rows of C anywhere.

A tile has the rows of one expert that lie side by side in the order of `routing`; row r of C is
rows[first + r]. The sums go through shared memory as in `steps.kernels.parts.epilogue.half_tile`,
whose pictures hold here too; only the rows of C differ. For a gate a thread has the same features
and tokens of gates and of ups in its two accumulator halves, so what it stores is their product.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import Any

from numba import cuda, int32, int64, uint8, uint32

from steps.contract import ceil_div
from steps.instructions import (
    barrier_sync,
    load_f32,
    load_u32,
    load_u32x4,
    spread,
    stmatrix_x4_trans,
    store_f32,
)
from steps.kernels.experts.contract import GROUP_ROWS
from steps.kernels.experts.gates import GATE_OF
from steps.kernels.parts.epilogue.bias import bias_of
from steps.kernels.parts.epilogue.half_tile import PAIRS, ROW, WARPGROUP
from steps.kernels.parts.epilogue.rounded import store_eight


@dataclass(frozen=True, slots=True)
class Scatter:
    """Device functions of a warpgroup with 64 features of a tile of some tokens.

    area_bytes: of shared memory for each warpgroup, from a multiple of 128 on
    load_features(row_scales, bias, expert, n, groups, N, half) -> u, as of `load_two_features`
        row scales and biases of the thread's two features, of the warpgroup's 64 from feature n
        of C on; where there is a gate, of the gates (half 0) or of the ups (1)
    sums(x, acc, u, tile_positions)
        x = the accumulators of `wgmma`, all there, times all scales, plus the bias;
        tile_positions = (token_scales, rows, first, there, slots)
    gated(x, y)
        x = the gate of gates x and ups y
    load_positions(rows, first, there) -> positions
        rows of C of two tokens: the thread's number in its warpgroup, and 128 more
    store(x, c, positions, there, n, N)
        x to features n .. n + 63 of flat c[P, N]; nothing beyond the first `there` tokens and N
    """

    area_bytes: int
    load_features: Any
    load_positions: Any
    sums: Any
    gated: Any
    store: Any


@cache
def scatter(
    tokens: int, first_byte: int, staging: tuple[int, int], output: str, scaled: bool,
    of_bias: str | None, gate: str | None,
) -> Scatter:  # fmt: skip
    """For tiles of `tokens` tokens, C of dtype `output`, a bias of dtype `of_bias` or none, a gate
    of this name or none. scaled: tokens have scales. staging: tokens of a buffer, at most, and
    buffers, one or two: with two one barrier serves both sides. The areas of the warpgroups begin
    at `first_byte` of dynamic shared memory."""
    n_acc, staged, buffers_of_area = tokens // 2, gcd(tokens, staging[0]), staging[1]
    buffer_bytes = ROW * staged
    areas = 0 if output == "float32" else buffers_of_area * buffer_bytes
    area_bytes = (
        areas + 4 * ceil_div(tokens, 32) * 32
    )  # with a table of positions behind the buffers
    load_bias, add = bias_of(of_bias)
    times, is_gated = GATE_OF[gate or "silu"], gate is not None
    pair = PAIRS.get(output)

    @cuda.jit(device=True, forceinline=True)
    def load_features(row_scales, bias, expert, n, groups, N, half):
        t = int32(cuda.threadIdx.x & (WARPGROUP - 1))
        own = int32(n + (t >> 5) * 16 + (t >> 2 & 7))
        if is_gated:  # 16 rows of gates, then 16 of ups
            own = int32(own + n + (t >> 5) * 16 + 16 * half)
        at = int64(expert) * (groups * GROUP_ROWS) + own
        last = int64(row_scales.size - 1)
        u, v = load_f32(row_scales, min(at, last)), load_f32(row_scales, min(at + 8, last))
        end = int32(2 * N if is_gated else N)
        first = int32(expert * end)
        d = load_bias(bias, first + min(own, int32(end - 1)))
        return u, v, d, load_bias(bias, first + min(int32(own + 8), int32(end - 1)))

    @cuda.jit(device=True, forceinline=True)
    def token_scale(tile_positions, r):
        token_scales, rows, first, there, slots = tile_positions
        position = load_u32(rows, int32(first + min(r, int32(there - 1))))
        return load_f32(token_scales, int32(position // uint32(slots)))

    @cuda.jit(device=True, forceinline=True)
    def sums(x, acc, u, tile_positions):
        spread(x, acc)
        for r in range(0, n_acc, 4):
            x[r], x[r + 1] = x[r] * u[0], x[r + 1] * u[0]
            x[r + 2], x[r + 3] = x[r + 2] * u[1], x[r + 3] * u[1]
            if scaled:  # last: the sums times these alone may overflow
                token = int32(2 * (cuda.threadIdx.x & 3) + 2 * r)
                v, w = (
                    token_scale(tile_positions, token),
                    token_scale(tile_positions, int32(token + 1)),
                )
                x[r], x[r + 1] = x[r] * v, x[r + 1] * w
                x[r + 2], x[r + 3] = x[r + 2] * v, x[r + 3] * w
            x[r], x[r + 1] = add(x[r], u[2]), add(x[r + 1], u[2])
            x[r + 2], x[r + 3] = add(x[r + 2], u[3]), add(x[r + 3], u[3])

    @cuda.jit(device=True, forceinline=True)
    def gated(x, y):
        for r in range(n_acc):
            x[r] = times(x[r], y[r])

    @cuda.jit(device=True, forceinline=True)
    def load_positions(rows, first, there):
        t, last = int32(cuda.threadIdx.x & (WARPGROUP - 1)), int32(there - 1)
        position = int32(load_u32(rows, int32(first + min(t, last))))
        if tokens > WARPGROUP:
            other = load_u32(rows, int32(first + min(int32(WARPGROUP + t), last)))
            return position, int32(other)
        return position, int32(0)

    @cuda.jit(device=True, forceinline=True)
    def put_positions(positions):
        """Once nobody loads from the area any more. Returns where the warpgroup's table begins; a
        barrier must follow. The positions of all tokens are in registers long before a tile ends:
        loads between the stores to C would each take a trip to the L2."""
        table = cuda.shared.array(0, int32, alignment=128)  # all of the dynamic shared memory
        warpgroup = int32(cuda.threadIdx.x // WARPGROUP)
        t = int32(cuda.threadIdx.x & (WARPGROUP - 1))
        at = int32((first_byte + areas) // 4 + warpgroup * (area_bytes // 4))
        barrier_sync(1 + warpgroup, WARPGROUP)
        if t < tokens:
            table[at + t] = positions[0]
        if WARPGROUP + t < tokens:
            table[at + WARPGROUP + t] = positions[1]
        return at

    @cuda.jit(device=True, forceinline=True)
    def store_halves(x, c, positions, there, n, N):
        table = cuda.shared.array(0, int32, alignment=128)
        buffers = cuda.shared.array(0, uint8, alignment=128)  # all of the dynamic shared memory
        warpgroup = int32(cuda.threadIdx.x // WARPGROUP)
        t = int32(cuda.threadIdx.x & (WARPGROUP - 1))
        warp, lane = int32(t >> 5), int32(t & 31)
        base = first_byte + warpgroup * area_bytes
        # lane 8i + r addresses row r of matrix i: features 0..7 of eight tokens, features 8..15,
        # then of the next eight tokens
        token, chunk = int32((lane >> 4) * 8 + (lane & 7)), int32(2 * warp + (lane >> 3 & 1))
        destination = base + token * ROW + (chunk ^ (token & 7)) * 16
        # and thread t loads and stores eight features of one token
        row, eight = int32(t >> 3), int32(t & 7)
        source = base + row * ROW + (eight ^ (row & 7)) * 16
        feature = int32(n + 8 * eight)
        wide, left = N & 7 == 0, int32(N - feature)
        table_at = put_positions(positions)
        for begin in range(0, tokens, staged):
            buffer = begin // staged % buffers_of_area * buffer_bytes
            if begin > 0 and buffers_of_area == 1:
                barrier_sync(1 + warpgroup, WARPGROUP)  # the tokens before are in C
            for j in range(0, staged, 16):
                r = (begin + j) // 2
                stmatrix_x4_trans(
                    buffers,
                    destination + buffer + j * ROW,
                    pair(x[r], x[r + 1]),
                    pair(x[r + 2], x[r + 3]),
                    pair(x[r + 4], x[r + 5]),
                    pair(x[r + 6], x[r + 7]),
                )
            barrier_sync(1 + warpgroup, WARPGROUP)
            for j in range(0, staged, 16):
                r = int32(row + (begin + j))
                if r < there:
                    y = load_u32x4(buffers, source + buffer + j * ROW)
                    store_eight(c, int64(table[table_at + r]) * N + feature, y, wide, left)

    @cuda.jit(device=True, forceinline=True)
    def store_floats(x, c, positions, there, n, N):
        table = cuda.shared.array(0, int32, alignment=128)
        table_at = put_positions(positions)
        barrier_sync(1 + int32(cuda.threadIdx.x // WARPGROUP), WARPGROUP)
        t = int32(cuda.threadIdx.x & (WARPGROUP - 1))
        feature = int32(n + (t >> 5) * 16 + (t >> 2 & 7))
        for j in range(tokens // 8):
            for i in range(2):
                r = int32(2 * (t & 3) + 8 * j + i)
                if r < there:
                    offset = int64(table[table_at + r]) * N + feature
                    if feature < N:
                        store_f32(c, offset, x[4 * j + i])
                    if feature + 8 < N:
                        store_f32(c, offset + 8, x[4 * j + i + 2])

    store = store_floats if output == "float32" else store_halves
    return Scatter(area_bytes, load_features, load_positions, sums, gated, store)
