"""From a tile of sums to C: through shared memory, parts of K added up, units taken back.

Steps whose operands are float16 share this. Their accumulators hold products in units of a feature
and of a token, powers of two (`qformats.repack.tiles`, `steps.components.activations.layouts.float16_chunks`), lie
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
def finish_mma_tile(features: int, tokens: int, groups: int, threads: int, in_half: bool) -> Any:
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


def warpgroups(features: int) -> int:
    """How many warpgroups multiply a tile of so many features: three where two cannot share it."""
    return 3 if features % (2 * ROWS) else 2


LOT: Final = 128
"""Tokens of a lot at most, 64 accumulators: of more, compilers keep some in local memory."""

SLICE: Final = 16
"""Tokens of a warpgroup's sums that lie in shared memory at a time."""

PATIENCE: Final = 12
"""Questions to the L2, some 700 cycles each, before a block leaves its strip to those who come
later."""

IN_FLIGHT: Final = 64
"""Registers for sums of other blocks on their way."""


@cuda.jit(device=True, forceinline=True)
def load_i32x4(array, at):
    x = load_u32x4(array, at)
    return int32(x[0]), int32(x[1]), int32(x[2]), int32(x[3])


@cache
def scale_and_write(count: int, in_half: bool, zero: int) -> tuple[Any, Any]:
    """(units, write) for four neighbouring features of `count` tokens m, m + 8, m + 16 ...

    units(v, too_much, of_tokens, m, M): the tokens' units, and what is too much in their sums.
    write(x, v, too_much, u, c, m, n, M, N): x, times these and the features' units u, to C.
    """
    row = write_row(in_half)

    @cuda.jit(device=True, forceinline=True)
    def units(v, too_much, of_tokens, m, M):
        for i in range(count):
            of_one = int32(min(int32(m + 8 * i), int32(M - 1)))
            v[i] = load_f32(of_tokens, of_one)
            if zero:
                too_much[i] = zero * int32(load_f32(of_tokens, int32(M + of_one)))

    @cuda.jit(device=True, forceinline=True)
    def write(x, v, too_much, u, c, m, n, M, N):
        at, ahead = int64(m) * N + n, int64(8) * N
        for i in range(count):
            r = 4 * i
            if zero:
                for j in range(r, r + 4):
                    x[j] = int32(x[j] - too_much[i])
            y0, y1 = float32(x[r]) * u[0] * v[i], float32(x[r + 1]) * u[1] * v[i]
            y2, y3 = float32(x[r + 2]) * u[2] * v[i], float32(x[r + 3]) * u[3] * v[i]
            if int32(m + 8 * i) < M:
                row(c, at, int32(N - n), (y0, y1, y2, y3))
            at += ahead

    return units, write


@cache
def turned(tokens: int, first_word: int, kind: Any) -> Any:
    """turn(x, sums, group, t): of each 8 of so many tokens a thread holds, in x, m and m + 1 of
    features n and n + 8 of 64; afterwards four neighbouring features of tokens m, m + 8, m + 16 ...

    sums: all of the dynamic shared memory, of which SLICE tokens are used from `first_word` on, for
    each warpgroup.
    """
    piece, pitch = min(tokens, SLICE), ROWS + PAD
    load = load_f32x4 if kind == float32 else load_i32x4
    put_one = store_f32 if kind == float32 else store_u32

    @cuda.jit(device=True, forceinline=True)
    def turn(x, sums, group, t):
        base = first_word + group * piece * pitch
        put = base + 2 * (t & 3) * pitch + (t >> 5) * 16 + (t >> 2 & 7)
        get = base + (t >> 4) * pitch + (t & 15) * 4
        for first in range(0, tokens, piece):
            barrier_sync(1 + group, GROUP)
            for j in range(0, piece, 8):
                r, to = (first + j) // 2, put + j * pitch
                put_one(sums, to, x[r])
                put_one(sums, to + pitch, x[r + 1])
                put_one(sums, to + 8, x[r + 2])
                put_one(sums, to + pitch + 8, x[r + 3])
            barrier_sync(1 + group, GROUP)
            for j in range(0, piece, 8):
                r = (first + j) // 2
                x[r], x[r + 1], x[r + 2], x[r + 3] = load(sums, get + j * pitch)

    return turn


@cache
def finish_wgmma_tile(
    tile: tuple[int, int],
    first_word: int,
    in_half: bool,
    strips: int,
    kind: Any = float32,
    zero: int = 0,
) -> tuple[Any, int]:
    """(finish, the first word of dynamic shared memory behind what it uses from `first_word` on).

    finish(acc, lot, number, m0, n0, first, last, early, to): the end of a tile, or of a part of it
    (`steps.components.stream_k`), for its two or three `warpgroups` with 64 features each and all tokens of
    the tile, a *lot*; a tile of 256 features has two lots.

    acc        : the accumulators of `wgmma`, all there, of this `kind`: float32 or int32.
    number ... : of the tile; first, last, early: `Stretches.sharers`, first = last where these are
                 the sums of all K.
    to         : (of_rows, of_tokens, c, partials, arrived), see `finish_mma_tile`; but partials is
                 `kind` [blocks, 2, bn, bm] and arrived int32 [tiles, bn / 64 strips].

    The blocks that share a tile leave their sums in `partials`. A lot is cut into `strips`, some of
    its tokens, and the last to come to a strip adds it up, in the order of K. Of several strips a
    block comes to its own last, when all others have been there or it has asked PATIENCE times: so
    blocks that are done together add up side by side, and nobody waits for one that may not have
    begun.

    Where operands are off by `zero`, unsigned ones for signed, so many times the sum of a token's
    is too much: of_tokens has the sums behind the factors, float32 [2 M].
    """
    bn, bm = tile
    tokens, groups = min(bm, LOT), warpgroups(bn)
    width = groups * ROWS
    lots, side = bn // width * (bm // tokens), bn > width  # side by side, or token by token
    n_acc, n_tokens = tokens // 2, tokens // 8  # of a thread: sums of a lot, tokens that it writes
    in_strip, of_strip = n_acc // strips, n_tokens // strips
    in_flight = IN_FLIGHT // max(lots, groups - 1)
    some = min(in_strip, in_flight)  # of a part's sums are loaded together
    at_once = in_flight // some  # of so many parts
    loaded = at_once * some
    keep = in_strip <= 16  # the sums of its own strip: more, and they lie in local memory
    pitch = ROWS + PAD
    counts_at = first_word + groups * min(tokens, SLICE) * pitch
    turn, turn_strip = turned(tokens, first_word, kind), turned(tokens // strips, first_word, kind)
    units, write = scale_and_write(n_tokens, in_half, zero)
    units_of_strip, write_strip = scale_and_write(of_strip, in_half, zero)
    load, store = (load_f32x4, store_f32x4) if kind == float32 else (load_i32x4, store_u32x4)

    @cuda.jit(device=True, forceinline=True)
    def place(block, first, early, own):
        """Where in `partials` a block leaves its part of a tile."""
        return int64(2 * block + (early if block == first else 0)) * (bn * bm) + own

    @cuda.jit(device=True, forceinline=True)
    def arrive(arrived, at, others, me, counts, group, t):
        """To each strip: how many were there before is in shared memory then; who finds all others
        adds it up. Counts are left at zero."""
        barrier_sync(1 + group, GROUP)
        if t < strips:  # fences of these hold for all whom the barriers order before and after
            fence()
            questions = int32(PATIENCE if strips > 1 and t == me else 0)
            earlier = cuda.atomic.add(arrived, at + t, 0 if questions > 0 else 1)
            while questions > 0 and earlier < others:
                questions = int32(questions - 1)
                earlier = cuda.atomic.add(arrived, at + t, 0 if questions > 0 else 1)
            if earlier == others:
                arrived[at + t] = 0  # for the next launch
            counts[counts_at + strips * group + t] = earlier
            fence()
        barrier_sync(1 + group, GROUP)

    @cuda.jit(device=True, forceinline=True)
    def add_up(x, mine, kept, partials, own, first, last, early):
        """x = a strip's sums of blocks `first` to `last`, in this order; those of block `kept` are
        `mine`."""
        part = cuda.local.array(loaded, kind)
        for begin in range(0, in_strip, some):
            for r in range(some):
                x[begin + r] = 0
            for block in range(first, last + 1, at_once):
                for i in range(at_once):
                    one, q = int32(min(block + i, last)), i * some
                    if not keep or one != kept:
                        at = place(one, first, early, own) + begin * GROUP
                        for r in range(0, some, 4):
                            p = load(partials, at + r * GROUP)
                            part[q + r], part[q + r + 1] = p[0], p[1]
                            part[q + r + 2], part[q + r + 3] = p[2], p[3]
                    else:
                        for r in range(some):
                            part[q + r] = mine[begin + r]
                for i in range(at_once):
                    if block + i <= last:
                        for r in range(some):
                            x[begin + r] += part[i * some + r]

    @cuda.jit(device=True, forceinline=True)
    def finish(acc, lot, number, m0, n0, first, last, early, to):
        of_rows, of_tokens, c, partials, arrived = to
        sums = cuda.shared.array(0, kind, alignment=128)  # all of the dynamic shared memory
        counts = cuda.shared.array(0, int32, alignment=128)  # the same
        x, mine = cuda.local.array(n_acc, kind), cuda.local.array(in_strip, kind)
        v, too_much = cuda.local.array(n_tokens, float32), cuda.local.array(n_tokens, int32)
        M, N = int32(c.shape[0]), int32(c.shape[1])
        group, t = int32(cuda.threadIdx.x >> 7), int32(cuda.threadIdx.x & (GROUP - 1))
        # shuffled, so that addresses are not kept in registers from one lot to the next
        m, n = shfl(m0, 0) + (t >> 4), shfl(n0, 0) + group * ROWS + (t & 15) * 4
        m = int32(m + (0 if side else lot * tokens))
        n = int32(n + (lot * width if side else 0))
        u = load_f32x4(of_rows, min(n, of_rows.size - 4))
        spread(x, acc)
        if first == last:
            units(v, too_much, of_tokens, m, M)
            turn(x, sums, group, t)
            write(x, v, too_much, u, c, m, n, M, N)
            return
        own = int32((groups * lot + group) * GROUP * n_acc + 4 * t)
        at = place(int32(cuda.blockIdx.x), first, early, own)
        for r in range(0, n_acc, 4):
            store(partials, at + r * GROUP, x[r], x[r + 1], x[r + 2], x[r + 3])
        others, me = int32(last - first), int32(int32(cuda.blockIdx.x) - first)
        strip = int32(me if me < strips else 0)
        if keep:
            for r in range(in_strip):
                mine[r] = x[r]
                for other in range(1, strips):
                    if other == strip:
                        mine[r] = x[other * in_strip + r]
        units_of_strip(v, too_much, of_tokens, int32(m + 8 * of_strip * strip), M)
        count = int32(((number * lots + lot) * groups + group) * strips)
        arrive(arrived, count, others, me, counts, group, t)
        for i in range(strips):  # its own first, of which the units are there
            # shuffled, so that the compiler knows: the same for all lanes
            if shfl(counts[counts_at + strips * group + strip], 0) == others:
                m_strip = int32(m + 8 * of_strip * strip)
                kept = int32(cuda.blockIdx.x if keep and i == 0 else -1)
                if i > 0:
                    units_of_strip(v, too_much, of_tokens, m_strip, M)
                at = own + strip * in_strip * GROUP
                add_up(x, mine, kept, partials, at, first, last, early)
                turn_strip(x, sums, group, t)
                write_strip(x, v, too_much, u, c, m_strip, n, M, N)
            strip = int32(strip + 1 if strip < strips - 1 else 0)

    return finish, counts_at + groups * strips


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
