"""The end of a tile of many experts' product: from accumulators to rows of C anywhere.

A tile has the rows of one expert that lie side by side in the order of `routing`; row r of C is
rows[first + r], or first + r itself where C keeps this order. The sums go through shared memory as
in `steps.kernels.parts.epilogue.half_tile`, whose pictures hold here too; only the rows of C
differ. For a gate a thread has the same features and tokens of gates and of ups in its two
accumulator halves, so what it stores is their product.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from numba import cuda, float32, int32, int64, uint8

from steps.contract import ceil_div
from steps.instructions import (
    barrier_sync,
    load_f32,
    load_u32,
    load_u32x4,
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
    load_tokens(rows, token_scales, first, there) -> tokens
        rows of C and scales of two tokens: the thread's number in its warpgroup, and 128 more;
        where C is in order no rows
    put_tokens(tokens)
        the same of all tokens to the area, before `sums`
    load_features(row_scales, bias, expert, n, groups, N, half) -> u, as of `load_two_features`
        row scales and biases of the thread's two features, of the warpgroup's 64 from feature n
        of C on; where there is a gate, of the gates (half 0) or of the ups (1)
    sums(x, acc, u)
        x = the accumulators of `wgmma`, a local array of `kind`, times all scales, plus the bias
    gated(x, y)
        x = the gate of gates x and ups y
    store(x, c, first, there, n, N)
        x to features n .. n + 63 of flat c[P, N], of a tile whose first row is `first`; nothing
        beyond its first `there` tokens and N
    wait_for_stores()
        before `store` of a second half
    """

    area_bytes: int
    load_tokens: Any
    put_tokens: Any
    load_features: Any
    sums: Any
    gated: Any
    store: Any
    wait_for_stores: Any


@cache
def scatter(
    tokens: int, first_byte: int, staging: tuple[int, int], output: str, scaled: bool,
    of_bias: str | None, gate: str | None, kind: Any = float32, ordered: bool = False,
) -> Scatter:  # fmt: skip
    """For tiles of `tokens` tokens, sums of `kind`, float32 or int32, C of dtype `output`, a bias
    of dtype `of_bias` or none, a gate of this name or none. scaled: tokens have scales. staging:
    tokens of a buffer, at most, and buffers, one or two: with two one barrier serves both sides.
    ordered: rows of C stay in the order of `routing`.
    The areas of the warpgroups begin at `first_byte` of dynamic shared memory."""
    staged = max(n for n in range(16, staging[0] + 1, 16) if tokens % n == 0)
    n_acc, buffers_of_area = tokens // 2, staging[1]
    buffer_bytes, to_floats = ROW * staged, output == "float32"
    areas = 0 if to_floats else buffers_of_area * buffer_bytes
    # behind the buffers, 4 bytes for each token: scales, and rows of C
    table = ceil_div(tokens, 32) * 32
    rows_at = table if scaled else 0
    area_bytes = areas + 4 * (rows_at + (0 if ordered else table))
    each = ceil_div(tokens, WARPGROUP)  # tokens of a thread
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
    def load_token(rows, token_scales, first, r, there):
        row = int32(first + min(r, int32(there - 1)))
        row_of_c = int32(0) if ordered else int32(load_u32(rows, row))
        return row_of_c, load_f32(token_scales, row) if scaled else float32(1)

    @cuda.jit(device=True, forceinline=True)
    def load_tokens(rows, token_scales, first, there):
        t = int32(cuda.threadIdx.x & (WARPGROUP - 1))
        one = load_token(rows, token_scales, first, t, there)
        if tokens > WARPGROUP:
            other = load_token(rows, token_scales, first, int32(WARPGROUP + t), there)
            return one, other
        return one, one

    @cuda.jit(device=True, forceinline=True)
    def table_at():
        """The word of shared memory where the warpgroup's table begins."""
        return int32((first_byte + areas) // 4 + cuda.threadIdx.x // WARPGROUP * (area_bytes // 4))

    @cuda.jit(device=True, forceinline=True)
    def wait_for_stores():
        barrier_sync(1 + int32(cuda.threadIdx.x // WARPGROUP), WARPGROUP)

    @cuda.jit(device=True, forceinline=True)
    def put_tokens(loaded):
        """Once nobody reads the area of the tile before. Rows and scales are in registers long
        before a tile ends: loads between the stores to C would each take a trip to the L2."""
        rows_of_c = cuda.shared.array(0, int32, alignment=128)  # all of the dynamic shared memory
        scales = cuda.shared.array(0, float32, alignment=128)
        t, at = int32(cuda.threadIdx.x & (WARPGROUP - 1)), table_at()
        wait_for_stores()
        for i in range(each):
            if i * WARPGROUP + t < tokens:
                if not ordered:
                    rows_of_c[at + rows_at + i * WARPGROUP + t] = loaded[i][0]
                if scaled:
                    scales[at + i * WARPGROUP + t] = loaded[i][1]
        if scaled or (
            to_floats and not ordered
        ):  # else the barrier between stores to the area and loads serves
            wait_for_stores()

    @cuda.jit(device=True, forceinline=True)
    def sums(x, acc, u):
        scales = cuda.shared.array(0, float32, alignment=128)
        at = int32(table_at() + 2 * (cuda.threadIdx.x & 3))
        for r in range(0, n_acc, 4):
            x[r], x[r + 1] = float32(acc[r]) * u[0], float32(acc[r + 1]) * u[0]
            x[r + 2], x[r + 3] = float32(acc[r + 2]) * u[1], float32(acc[r + 3]) * u[1]
            if scaled:  # last: the sums times these alone may overflow
                v, w = scales[at + 2 * r], scales[at + 2 * r + 1]
                x[r], x[r + 1] = x[r] * v, x[r + 1] * w
                x[r + 2], x[r + 3] = x[r + 2] * v, x[r + 3] * w
            x[r], x[r + 1] = add(x[r], u[2]), add(x[r + 1], u[2])
            x[r + 2], x[r + 3] = add(x[r + 2], u[3]), add(x[r + 3], u[3])

    @cuda.jit(device=True, forceinline=True)
    def gated(x, y):
        for r in range(n_acc):
            x[r] = times(x[r], y[r])

    @cuda.jit(device=True, forceinline=True)
    def store_halves(x, c, first, there, n, N):
        rows_of_c = cuda.shared.array(0, int32, alignment=128)
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
        at, in_order = int32(table_at() + rows_at), int64(first + row) * N + feature
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
                    offset = in_order
                    if not ordered:
                        offset = int64(rows_of_c[at + r]) * N + feature
                    store_eight(c, offset, y, wide, left)
                in_order += 16 * int64(N)

    @cuda.jit(device=True, forceinline=True)
    def store_floats(x, c, first, there, n, N):
        rows_of_c = cuda.shared.array(0, int32, alignment=128)
        at = int32(table_at() + rows_at)
        t = int32(cuda.threadIdx.x & (WARPGROUP - 1))
        feature = int32(n + (t >> 5) * 16 + (t >> 2 & 7))
        for j in range(tokens // 8):
            for i in range(2):
                r = int32(2 * (t & 3) + 8 * j + i)
                if r < there:
                    row_of_c = int32(first + r) if ordered else rows_of_c[at + r]
                    offset = int64(row_of_c) * N + feature
                    if feature < N:
                        store_f32(c, offset, x[4 * j + i])
                    if feature + 8 < N:
                        store_f32(c, offset + 8, x[4 * j + i + 2])

    store = store_floats if to_floats else store_halves
    return Scatter(
        area_bytes, load_tokens, put_tokens, load_features, sums, gated, store, wait_for_stores
    )
