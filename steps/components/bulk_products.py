"""The product of the records of two row tiles and one of A, for few tokens: step 15's.

As `steps.components.decode_products`, where an mma of eight columns and the blocks of K that share them are
drawn; but B and what it is scaled by are fetched once for both row tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from numba import cuda, float32, int32, uint32

from qformats import BLOCK
from qformats.repack import CHUNK, HALF_SCALE, MINIMUM_SCALE, TILE_ROWS
from steps.components.decode_products import no_sums, scale_readers, weights_times
from steps.components.decode_tiles import BLOCKS, scale_bytes
from steps.components.unpack.storage_formats import tile_format
from steps.instructions import (
    ldmatrix_x4,
    load_f32,
    load_f32x2,
    load_f32x4,
    load_u32x2,
    shfl_xor,
    store_f32,
)

PAIR: Final = 2
"""Row tiles whose records lie side by side (`qformats.repack.TILE_GROUP`), and come as one piece."""


@dataclass(frozen=True, slots=True)
class PairProducts:
    """Device functions of a warp, for two row tiles and up to `tokens` tokens.

    sums, of_b, of_scales: how many a lane needs in `acc` and `d`, local float32, and `b`, uint32
    unit  : what the sums of `leave` are to be multiplied by, beside the factors of features
    places(lane, M) -> (codes, scales)
        where in a record of A the lane begins to read: bytes from its first code and first scale
    fetch(b, d, smem, codes, scales, lane, M)
        B and the scales of the record of A at these places. M: tokens that there are of 8 or 16.
    multiply(acc, b, d, smem, slot, lane)
        acc += the two records of weights at byte `slot` times B
    leave(acc, smem, at, lane, low, high)
        the sums of row tiles low to `high` of the two -> shared memory, 16 * tokens float32 a row
        tile, from byte `at` on, in an order in which no two lanes meet in a bank
    place(i) -> (token, row)
        whose is number i of a row tile's sums in that order
    """

    sums: int
    of_b: int
    of_scales: int
    unit: float
    places: Any
    fetch: Any
    multiply: Any
    leave: Any
    place: Any


@cache
def pair_products(format_name: str, tokens: int) -> PairProducts:
    """The device functions, for capture in a kernel factory. tokens: 1, 2 or 4, of A as
    `steps.step15_decode_bulk` quantizes it, or 8 or 16, of A in slabs."""
    tile, read = tile_format(format_name), scale_readers(format_name)
    of_two_rows, of_record = read.of_two_rows, read.of_record
    of_block, of_groups, width = read.of_block, read.of_groups, tile.scale_bytes
    record, scales_at, minima_at = tile.tile_bytes, tile.scales_at, tile.minima_at
    unpack, times = weights_times(format_name)
    of_minima = float32(MINIMUM_SCALE * tile.unit / HALF_SCALE)  # of minima, against scales
    minimum, few, single = (
        tile.minimum,
        tokens <= 4,
        tokens == 1,
    )  # one token has both columns of a block
    halves = tile.group < BLOCK  # 16 K have scales of their own: see decode_products
    share = {1: 4, 2: 4, 4: 2}.get(tokens, 1)  # blocks of K that share the columns of B
    columns, turns = 8 // share, BLOCKS // share
    groups, of_tile = max(1, tokens // 8), 4 * max(1, tokens // 8)  # mma side by side; their sums
    own, holders = 1 if single else 2, turns if few else BLOCKS  # tokens of a lane; lanes with sums
    size_d = scale_bytes(tokens, minimum)
    quads = max(1, tokens // 2)  # of lanes, with two tokens each
    per = 2 * (own if few else 2 * groups)  # scales and sums of A that go with an mma's columns

    # --- A: up to four tokens [block][token][32], scales as decode_split.scale_bytes has them
    @cuda.jit(device=True, forceinline=True)
    def places_of_few(lane, M):
        group, quad = int32(lane >> 2), int32(lane & 3)
        row = int32(group // 2 if single else group)
        return int32(row * BLOCK + 8 * quad), int32(quad * (16 if minimum else 8))

    @cuda.jit(device=True, forceinline=True)
    def fetch_few(b, d, smem, codes, scales, lane, M):
        turn = int32(int32(lane >> 2) // columns)  # the block that these columns are of
        for i in range(turns):
            b0, b1 = load_u32x2(smem, codes + i * (share * tokens * BLOCK))
            for j in range(share):
                at = 2 * (i * share + j)
                if halves and single:
                    b[at] = b0 if int32(lane >> 2) == 2 * j else uint32(0)
                    b[at + 1] = b1 if int32(lane >> 2) == 2 * j + 1 else uint32(0)
                else:
                    b[at], b[at + 1] = (b0, b1) if turn == j else (uint32(0), uint32(0))
            at = scales + i * (share * tokens * size_d)
            if single:
                d[2 * i], d[2 * i + 1] = load_f32x2(smem, at)
            elif minimum:
                d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3] = load_f32x4(smem, at)
            else:
                d[4 * i], d[4 * i + 2] = load_f32x2(smem, at)

    # --- A in slabs: units of 16 K [unit][token][16], d and s [block][token][2]
    @cuda.jit(device=True, forceinline=True)
    def places_of_many(lane, M):
        matrix, row = int32(lane >> 3), int32(lane & 7)
        unit = int32(matrix & 1 if groups == 2 else matrix)
        token = int32(row + 8 * (matrix >> 1) if groups == 2 else row)
        return (unit * M + min(token, int32(M - 1))) * CHUNK, int32(0)

    @cuda.jit(device=True, forceinline=True)
    def fetch_many(b, d, smem, codes, scales, lane, M):
        for i in range(0, BLOCKS, 3 - groups):  # four matrices: of two blocks, or two of tokens
            at = 4 * i * groups // 2
            to = codes + 2 * CHUNK * (i * M)
            b[at], b[at + 1], b[at + 2], b[at + 3] = ldmatrix_x4(smem, to)
        for i in range(BLOCKS):
            for j in range(2 * groups):
                token = min(int32(2 * (lane & 3) + j // 2 * 8 + j % 2), int32(M - 1))
                at, to = per * i + 2 * j, scales + 8 * (i * M + token)
                if minimum:
                    d[at], d[at + 1] = load_f32x2(smem, to)
                else:
                    d[at] = load_f32(smem, to)

    @cuda.jit(device=True, forceinline=True)
    def promote(acc, r, v, w, m, d, i):
        """acc[r + ...] += an mma's sums, of rows g and g + 8 and one or two tokens."""
        acc[r] += float32(v[0]) * (w[0] * d[i])
        acc[r + 2] += float32(v[2]) * (w[1] * d[i])
        if own == 2:
            acc[r + 1] += float32(v[1]) * (w[0] * d[i + 2])
            acc[r + 3] += float32(v[3]) * (w[1] * d[i + 2])
        if minimum:
            s0 = d[i + 1] * of_minima
            acc[r] += m[0] * s0
            acc[r + 2] += m[1] * s0
            if own == 2:
                s1 = d[i + 3] * of_minima
                acc[r + 1] += m[0] * s1
                acc[r + 3] += m[1] * s1

    @cuda.jit(device=True, forceinline=True)
    def multiply_few(acc, b, d, smem, slot, lane):
        u = cuda.local.array(8, uint32)
        group, shared = int32(lane >> 2), int32((lane & 3) * share >> 2)
        for r in range(PAIR):
            at, v = slot + r * record, no_sums()
            for block in range(BLOCKS):
                unpack(u, smem, at, lane, block)
                v = times(u, block, b[2 * block], b[2 * block + 1], v)
                if block % share == share - 1:
                    to = at + width * (8 * group + block - share + 1 + shared)
                    w = of_two_rows(smem, to + scales_at)
                    m = of_two_rows(smem, to + minima_at) if minimum else w
                    promote(acc, 4 * r, v, w, m, d, block // share * per)
                    v = no_sums()

    @cuda.jit(device=True, forceinline=True)
    def multiply_few_16(acc, b, d, smem, slot, lane):
        """With scales of 16: v are the sums of lower halves of blocks, x of upper ones."""
        u, zero = cuda.local.array(8, uint32), uint32(0)
        group, shared = int32(lane >> 2), int32((lane & 3) * share >> 2)
        for r in range(PAIR):
            at, v, x = slot + r * record, no_sums(), no_sums()
            for block in range(BLOCKS):
                unpack(u, smem, at, lane, block)
                b0, b1 = b[2 * block], b[2 * block + 1]
                if single:  # in two columns
                    v = times(u, block, b0, b1, v)
                else:
                    v, x = times(u, block, b0, zero, v), times(u, block, zero, b1, x)
                if block % share == share - 1:
                    low, high = of_groups(smem, at, block - share + 1 + shared, group)
                    i, to = block // share * per, 4 * r
                    if single:
                        s = d[i]
                        acc[to] += float32(v[0]) * (low[0] * s) + float32(v[1]) * (high[0] * s)
                        acc[to + 2] += float32(v[2]) * (low[1] * s) + float32(v[3]) * (high[1] * s)
                    else:
                        promote(acc, to, v, low, low, d, i)
                        promote(acc, to, x, high, high, d, i)
                    v = x = no_sums()

    @cuda.jit(device=True, forceinline=True)
    def multiply_many_16(acc, b, d, smem, slot, lane):
        u, zero = cuda.local.array(8, uint32), uint32(0)
        for r in range(PAIR):
            at = slot + r * record
            for block in range(BLOCKS):
                unpack(u, smem, at, lane, block)
                low, high = of_groups(smem, at, block, int32(lane >> 2))
                for j in range(groups):
                    p, i, to = 2 * (block * groups + j), per * block + 4 * j, of_tile * r + 4 * j
                    promote(acc, to, times(u, block, b[p], zero, no_sums()), low, low, d, i)
                    promote(acc, to, times(u, block, zero, b[p + 1], no_sums()), high, high, d, i)

    @cuda.jit(device=True, forceinline=True)
    def multiply_many(acc, b, d, smem, slot, lane):
        u = cuda.local.array(8, uint32)
        for r in range(PAIR):
            at = slot + r * record
            scales = of_record(smem, at + scales_at, int32(lane >> 2))
            minima = of_record(smem, at + minima_at, int32(lane >> 2)) if minimum else scales
            for block in range(BLOCKS):
                unpack(u, smem, at, lane, block)
                w, m = of_block(scales, block), of_block(minima, block)
                for j in range(groups):
                    p, i, to = 2 * (block * groups + j), per * block + 4 * j, of_tile * r + 4 * j
                    promote(acc, to, times(u, block, b[p], b[p + 1], no_sums()), w, m, d, i)

    @cuda.jit(device=True, forceinline=True)
    def leave(acc, smem, at, lane, low, high):
        group, quad = int32(lane >> 2), int32(lane & 3)
        for r in range(PAIR):
            for j in range(of_tile):
                if j % 2 < own:  # sums of the blocks of K that shared columns
                    if holders == 1:
                        acc[of_tile * r + j] += shfl_xor(acc[of_tile * r + j], 1)
                    if holders < 4:
                        acc[of_tile * r + j] += shfl_xor(acc[of_tile * r + j], 2)
            if low <= r and r < high and quad < holders:
                for j in range(of_tile):
                    if j % 2 < own:
                        # eights of rows: of all pairs of tokens, first the lower, then the upper
                        eight = int32(quad + j // 4 * 4 + quads * (j // 2 % 2 + 2 * (j % 2)))
                        place = int32((r - low) * (tokens * TILE_ROWS) + 8 * eight + group)
                        store_f32(smem, at + 4 * place, acc[of_tile * r + j])

    @cuda.jit(device=True, forceinline=True)
    def place(i):
        eight = uint32(i) >> uint32(3)
        turn, pair = eight // uint32(quads), eight % uint32(quads)
        token = int32(2 * pair + (turn >> uint32(1)))
        return token, int32((turn & uint32(1)) * uint32(8) + (uint32(i) & uint32(7)))

    if tile.group == BLOCK:
        multiply = multiply_few if few else multiply_many
    else:
        multiply = multiply_few_16 if few else multiply_many_16
    return PairProducts(
        sums=PAIR * of_tile,
        of_b=2 * BLOCKS * groups,
        of_scales=per * (turns if few else BLOCKS),
        unit=HALF_SCALE / tile.unit,
        places=places_of_few if few else places_of_many,
        fetch=fetch_few if few else fetch_many,
        multiply=multiply,
        leave=leave,
        place=place,
    )
