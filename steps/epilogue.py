"""From a tile of sums to C: through shared memory, parts of K added up, units taken back.

Steps whose operands are float16 share this. Their accumulators hold products in units of a feature
and of a token, powers of two (`qformats.repack.tiles`, `steps.activations.float16_units`), lie
scattered over a warp, and C may be float32 or float16. So they go to shared memory first, and each
thread then takes four neighbouring features of a token, as C has them.

Steps 8 and 9 write theirs from where they lie (`write_sums`).
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from numba import cuda, float32, int32, int64

from steps.instructions import (
    barrier_sync,
    fence,
    float_to_half,
    floats_to_halves,
    load_f32,
    load_f32x4,
    load_u32x4,
    shfl,
    spread,
    store_f32,
    store_f32x4,
    store_u16,
    store_u32,
    store_u32x2,
    store_u32x4,
)

PAD: Final = 4
"""Floats between one token's sums and the next's: the quads of an mma in four sets of banks."""


@cache
def write_row(in_half: bool) -> Any:
    """write(c, at, there, x): x, four float32, to flat c from `at` on; only the first `there`."""

    @cuda.jit(device=True, forceinline=True)
    def write(c, at, there, x):
        if c.shape[1] & 3 == 0:
            if there > 0:
                if in_half:
                    store_u32x2(c, at, floats_to_halves(x[0], x[1]), floats_to_halves(x[2], x[3]))
                else:
                    store_f32x4(c, at, x[0], x[1], x[2], x[3])
        else:
            for i in range(4):
                if i < there:
                    if in_half:
                        store_u16(c, at + i, float_to_half(x[i]))
                    else:
                        store_f32(c, at + i, x[i])

    return write


@cache
def write_four(in_half: bool) -> Any:
    """write(c, m, n, x): x, four float32, to c[m, n..n+3]; nothing beyond the edges. n % 4 == 0."""

    row = write_row(in_half)

    @cuda.jit(device=True, forceinline=True)
    def write(c, m, n, x):
        M, N = c.shape
        if m < M:
            row(c, int64(m) * N + n, N - n, x)

    return write


@cache
def finish_tile(features: int, tokens: int, groups: int, threads: int, in_half: bool) -> Any:
    """finish(sums, c, m0, n0, of_rows, of_tokens, part, parts, tile, partials, arrived): the end of
    a kernel, for all threads of a block.

    sums       : shared float32 [groups, tokens, features + PAD], all written; they are added up.
    m0, n0     : the tile's first token and feature.
    of_rows    : float32, what features are multiplied by, as many as whole records have.
    of_tokens  : float32 [M], likewise.
    part, parts: which part of K these are the sums of. Where there is more than one the blocks of a
                 tile leave them in `partials`, float32 [tiles, parts, tokens, features], and the
                 last to come, by the count `arrived`, int32 [tiles], adds up all of them in the
                 order of K: the same bits in every run. The count is left at zero.
    """
    write, width = write_four(in_half), features // 4
    pitch, size = features + PAD, features * tokens

    @cuda.jit(device=True, forceinline=True)
    def write_scaled(c, m, n, of_rows, of_tokens, x):
        if m < c.shape[0] and n < c.shape[1]:
            u, v = load_f32x4(of_rows, n), of_tokens[m]
            y = x[0] * u[0] * v, x[1] * u[1] * v, x[2] * u[2] * v, x[3] * u[3] * v
            write(c, m, n, y)

    @cuda.jit(device=True, forceinline=True)
    def finish(sums, c, m0, n0, of_rows, of_tokens, part, parts, tile, partials, arrived):
        t = int32(cuda.threadIdx.x)
        before = cuda.shared.array(1, int32)  # how many of the tile's blocks were done before this
        for i in range(t, size // 4, threads):
            m, n = i // width, i % width * 4
            x = load_f32x4(sums, m * pitch + n)
            for group in range(1, groups):
                y = load_f32x4(sums, (group * tokens + m) * pitch + n)
                x = x[0] + y[0], x[1] + y[1], x[2] + y[2], x[3] + y[3]
            if parts == 1:
                write_scaled(c, m0 + m, n0 + n, of_rows, of_tokens, x)
            else:
                at = (int64(tile) * parts + part) * size + 4 * i
                store_f32x4(partials, at, x[0], x[1], x[2], x[3])
        if parts == 1:
            return
        fence()
        cuda.syncthreads()
        if t == 0:
            before[0] = cuda.atomic.add(arrived, tile, 1)
        cuda.syncthreads()
        if before[0] == parts - 1:
            fence()
            for i in range(t, size // 4, threads):
                x = float32(0), float32(0), float32(0), float32(0)
                for each in range(parts):
                    y = load_f32x4(partials, (int64(tile) * parts + each) * size + 4 * i)
                    x = x[0] + y[0], x[1] + y[1], x[2] + y[2], x[3] + y[3]
                write_scaled(c, m0 + i // width, n0 + i % width * 4, of_rows, of_tokens, x)
            if t == 0:
                arrived[tile] = 0  # for the next launch

    return finish


# --- the same for warpgroups ----------------------------------------------------------------------
GROUP: Final = 128
"""Threads of a warpgroup."""

ROWS: Final = 64
"""Features of a `wgmma`, rows of its D."""

LOT: Final = 128
"""Tokens of a lot at most, 64 accumulators: of more, compilers keep some in local memory."""

SLICE: Final = 16
"""Tokens of a warpgroup's sums that lie in shared memory at a time."""

IN_FLIGHT: Final = 64
"""Registers for sums of other blocks on their way."""


@cuda.jit(device=True, forceinline=True)
def load_i32x4(array, at):
    x = load_u32x4(array, at)
    return int32(x[0]), int32(x[1]), int32(x[2]), int32(x[3])


@cache
def finish_wgmma(
    tile: tuple[int, int], first_word: int, in_half: bool, kind: Any = float32, zero: int = 0
) -> tuple[Any, int]:
    """(finish, the first word of dynamic shared memory behind what it uses from `first_word` on).

    finish(acc, lot, number, m0, n0, first, last, early, to): the end of a tile, or of a part of it
    (`steps.stretches`), for two warpgroups with 64 features each and all tokens of the tile, a
    *lot*; a tile of 256 features has two lots.

    acc        : the accumulators of `wgmma`, all there, of this `kind`: float32 or int32.
    number ... : of the tile; first, last, early: `Stretches.sharers`, first = last where these are
                 the sums of all K.
    to         : (of_rows, of_tokens, c, partials, arrived), see `finish_tile`; but partials is
                 `kind` [blocks, 2, bn, bm] and arrived int32 [tiles, bn / 64]. The blocks leave
                 parts of a tile there, and the last to come adds up all of them in the order of K.

    Where operands are off by `zero`, unsigned ones for signed, so many times the sum of a token's
    is too much: of_tokens has the sums behind the factors, float32 [2 M].
    """
    bn, bm = tile
    tokens = min(bm, LOT)
    lots, side = bn // (2 * ROWS) * (bm // tokens), bn > 2 * ROWS  # side by side, or token by token
    n_acc, n_tokens = tokens // 2, tokens // 8  # of a thread: sums of a lot, tokens that it writes
    piece, pitch = min(tokens, SLICE), ROWS + PAD
    counts_at = first_word + 2 * piece * pitch
    some = min(n_acc, IN_FLIGHT // lots)  # of a part's sums are loaded together
    at_once = IN_FLIGHT // lots // some  # of so many parts
    loaded = at_once * some
    write = write_row(in_half)
    floats = kind == float32
    load, store = (load_f32x4, store_f32x4) if floats else (load_i32x4, store_u32x4)
    put_one = store_f32 if floats else store_u32

    @cuda.jit(device=True, forceinline=True)
    def turn(acc, x, sums, group, t):
        """Of each 8 tokens a thread holds m, m + 1 of features n and n + 8 of 64; afterwards, in x,
        four neighbouring features of tokens m, m + 8, m + 16 ..."""
        out = cuda.local.array(n_acc, kind)
        spread(out, acc)
        base = first_word + group * piece * pitch
        put = base + 2 * (t & 3) * pitch + (t >> 5) * 16 + (t >> 2 & 7)
        get = base + (t >> 4) * pitch + (t & 15) * 4
        for first in range(0, tokens, piece):
            barrier_sync(1 + group, GROUP)
            for j in range(0, piece, 8):
                r, to = (first + j) // 2, put + j * pitch
                put_one(sums, to, out[r])
                put_one(sums, to + pitch, out[r + 1])
                put_one(sums, to + 8, out[r + 2])
                put_one(sums, to + pitch + 8, out[r + 3])
            barrier_sync(1 + group, GROUP)
            for j in range(0, piece, 8):
                r = (first + j) // 2
                x[r], x[r + 1], x[r + 2], x[r + 3] = load(sums, get + j * pitch)

    @cuda.jit(device=True, forceinline=True)
    def place(block, first, early, own):
        """Where in `partials` a block leaves its part of a tile."""
        return int64(2 * block + (early if block == first else 0)) * (bn * bm) + own

    @cuda.jit(device=True, forceinline=True)
    def last_to_come(arrived, i, others, counts, group, t):
        """Whether all other blocks' sums are there; the count is left at zero."""
        barrier_sync(1 + group, GROUP)
        if t == 0:  # its fences hold for all whom the barriers order before and after it
            fence()
            earlier = cuda.atomic.add(arrived, i, 1)
            if earlier == others:
                arrived[i] = 0  # for the next launch
            counts[counts_at + group] = earlier
            fence()
        barrier_sync(1 + group, GROUP)
        # shuffled, so that the compiler knows: the same for all lanes
        return shfl(counts[counts_at + group], 0) == others

    @cuda.jit(device=True, forceinline=True)
    def add_up(x, partials, own, first, last, early):
        """x = the sums of blocks `first` to `last`, in this order."""
        part = cuda.local.array(loaded, kind)
        for begin in range(0, n_acc, some):
            for r in range(some):
                x[begin + r] = 0
            for block in range(first, last + 1, at_once):
                for i in range(at_once):
                    one = int32(min(block + i, last))
                    at = place(one, first, early, own) + begin * GROUP
                    for r in range(0, some, 4):
                        p, q = load(partials, at + r * GROUP), i * some + r
                        part[q], part[q + 1], part[q + 2], part[q + 3] = p[0], p[1], p[2], p[3]
                for i in range(at_once):
                    if block + i <= last:
                        for r in range(some):
                            x[begin + r] += part[i * some + r]

    @cuda.jit(device=True, forceinline=True)
    def finish(acc, lot, number, m0, n0, first, last, early, to):
        of_rows, of_tokens, c, partials, arrived = to
        sums = cuda.shared.array(0, kind, alignment=128)  # all of the dynamic shared memory
        counts = cuda.shared.array(0, int32, alignment=128)  # the same
        x = cuda.local.array(n_acc, kind)
        v = cuda.local.array(n_tokens, float32)
        too_much = cuda.local.array(n_tokens, int32)
        M, N = int32(c.shape[0]), int32(c.shape[1])
        group, t = int32(cuda.threadIdx.x >> 7), int32(cuda.threadIdx.x & (GROUP - 1))
        # shuffled, so that addresses are not kept in registers from one lot to the next
        m, n = shfl(m0, 0) + (t >> 4), shfl(n0, 0) + group * ROWS + (t & 15) * 4
        m = int32(m + (0 if side else lot * tokens))
        n = int32(n + (lot * 2 * ROWS if side else 0))
        u = load_f32x4(of_rows, min(n, of_rows.size - 4))
        for i in range(n_tokens):
            of_one = int32(min(int32(m + 8 * i), int32(M - 1)))
            v[i] = load_f32(of_tokens, of_one)
            if zero:
                too_much[i] = zero * int32(load_f32(of_tokens, int32(M + of_one)))
        turn(acc, x, sums, group, t)
        whole = first == last
        if not whole:
            own = int32((2 * lot + group) * GROUP * n_acc + 4 * t)
            at = place(int32(cuda.blockIdx.x), first, early, own)
            for r in range(0, n_acc, 4):
                store(partials, at + r * GROUP, x[r], x[r + 1], x[r + 2], x[r + 3])
            count = (number * lots + lot) * 2 + group
            whole = last_to_come(arrived, count, last - first, counts, group, t)
            if whole:
                add_up(x, partials, own, first, last, early)
        if whole:
            at, ahead = int64(m) * N + n, int64(8) * N
            for i in range(n_tokens):
                r = 4 * i
                if zero:
                    for j in range(r, r + 4):
                        x[j] = int32(x[j] - too_much[i])
                y0, y1 = float32(x[r]) * u[0] * v[i], float32(x[r + 1]) * u[1] * v[i]
                y2, y3 = float32(x[r + 2]) * u[2] * v[i], float32(x[r + 3]) * u[3] * v[i]
                if int32(m + 8 * i) < M:
                    write(c, at, int32(N - n), (y0, y1, y2, y3))
                at += ahead

    return finish, counts_at + 2


# --- straight from the accumulators of mma.sync ---------------------------------------------------
@cache
def write_sums(rows: int, columns: int, unit: float) -> Any:
    """write(c, m0, n0, lane, acc, of_rows): the sums of a warp, `rows` x `columns` mma of 16
    features x 8 tokens, to c, float32 [M, N], from token m0 and feature n0 on; nothing beyond the
    edges.

    acc    : float32 [4 * rows * columns], of this lane: of each mma tokens m, m + 1 of feature n,
             then of feature n + 8.
    of_rows: float32, what features are multiplied by, and all of them by `unit`.
    """

    @cuda.jit(device=True, forceinline=True)
    def store(c, m, n, value, of_rows):
        if m < c.shape[0] and n < c.shape[1]:
            value *= of_rows[n] * float32(unit)
            store_f32(c, m * c.shape[1] + n, value)

    @cuda.jit(device=True, forceinline=True)
    def write(c, m0, n0, lane, acc, of_rows):
        m, n = m0 + 2 * (lane & 3), n0 + (lane >> 2)
        for i in range(rows):
            for j in range(columns):
                r = 4 * (i * columns + j)
                store(c, m + 8 * j, n + 16 * i, acc[r], of_rows)
                store(c, m + 8 * j + 1, n + 16 * i, acc[r + 1], of_rows)
                store(c, m + 8 * j, n + 16 * i + 8, acc[r + 2], of_rows)
                store(c, m + 8 * j + 1, n + 16 * i + 8, acc[r + 3], of_rows)

    return write
