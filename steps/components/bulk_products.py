"""The product of the packed tiles of two row tiles and one of A, for few tokens.

As `steps.components.decode_products`, where an mma of eight columns and the blocks of K that share
them are drawn; but B and its scales are loaded once for both row tiles. Step 15 teaches this.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from numba import cuda, float32, int32, uint32

from qformats import BLOCK
from qformats.repack import CHUNK, HALF_SCALE, MINIMUM_SCALE, TILE_ROWS
from steps.components.decode_products import scale_readers, weights_times, zero_sums
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
"""Row tiles whose packed tiles lie side by side (`qformats.repack.TILE_GROUP`): one bulk copy."""


@dataclass(frozen=True, slots=True)
class PairProducts:
    """Device functions of a warp, for two row tiles and up to `tokens` tokens.

    sums, b_words, d_values: how many a lane needs in `acc` and `d`, local float32, and `b`, uint32
    scale : by which the sums of `store` are to be multiplied, beside the row scales
    read_offsets(lane, M) -> (codes, scales)
        where the lane begins to read in 128 K of A: bytes from the first code and the first scale
    load(b, d, smem, codes, scales, lane, M)
        B and the scales of 128 K of A at these bytes. M: tokens that there are of 8 or 16.
    multiply(acc, b, d, smem, slot, lane)
        acc += the two packed tiles of weights at byte `slot` times B
    store(acc, smem, offset, lane, low, high)
        the sums of row tiles low to `high` of the two -> shared memory, 16 * tokens float32 a row
        tile, from byte `offset` on, in an order without bank conflicts
    position(i) -> (token, row)
        of sum i of a row tile in that order
    """

    sums: int
    b_words: int
    d_values: int
    scale: float
    read_offsets: Any
    load: Any
    multiply: Any
    store: Any
    position: Any


@cache
def pair_products(format_name: str, tokens: int) -> PairProducts:
    """The device functions, for capture in a kernel factory. tokens: 1, 2 or 4, of A as
    `steps.step15_decode_bulk` quantizes it, or 8 or 16, of prequantized A, K-outermost."""
    tile, read = tile_format(format_name), scale_readers(format_name)
    of_two_rows, of_tile = read.of_two_rows, read.of_tile
    of_block, of_groups, width = read.of_block, read.of_groups, tile.scale_bytes
    tile_bytes, scales_at, minima_at = tile.tile_bytes, tile.scales_at, tile.minima_at
    unpack, times = weights_times(format_name)
    # of minima, against scales
    minimum_scale = float32(MINIMUM_SCALE * tile.code_scale / HALF_SCALE)
    minimum, few = tile.minimum, tokens <= 4
    single = tokens == 1  # one token has both columns of a block
    halves = tile.group < BLOCK  # 16 K have scales of their own: see decode_products
    sharing = {1: 4, 2: 4, 4: 2}.get(tokens, 1)  # blocks of K that share the columns of B
    columns, n_shared = 8 // sharing, BLOCKS // sharing
    groups = max(1, tokens // 8)  # mma side by side
    sums_per_tile = 4 * groups
    own = 1 if single else 2  # tokens of a lane
    lanes_with_sums = n_shared if few else BLOCKS  # of four
    size_d = scale_bytes(tokens, minimum)
    quads = max(1, tokens // 2)  # of lanes, with two tokens each
    # scales and sums of A that go with the columns of an mma
    scales_per_mma = 2 * (own if few else 2 * groups)

    # --- A: up to four tokens [block][token][32], scales of `decode_tiles.scale_bytes`
    @cuda.jit(device=True, forceinline=True)
    def read_offsets_few(lane, M):
        group, quad = int32(lane >> 2), int32(lane & 3)
        row = int32(group // 2 if single else group)
        return int32(row * BLOCK + 8 * quad), int32(quad * (16 if minimum else 8))

    @cuda.jit(device=True, forceinline=True)
    def load_few(b, d, smem, codes, scales, lane, M):
        owner = int32(int32(lane >> 2) // columns)  # the block that these columns are of
        for i in range(n_shared):
            b0, b1 = load_u32x2(smem, codes + i * (sharing * tokens * BLOCK))
            for j in range(sharing):
                word = 2 * (i * sharing + j)
                if halves and single:
                    b[word] = b0 if int32(lane >> 2) == 2 * j else uint32(0)
                    b[word + 1] = b1 if int32(lane >> 2) == 2 * j + 1 else uint32(0)
                else:
                    b[word], b[word + 1] = (b0, b1) if owner == j else (uint32(0), uint32(0))
            offset = scales + i * (sharing * tokens * size_d)
            if single:
                d[2 * i], d[2 * i + 1] = load_f32x2(smem, offset)
            elif minimum:
                d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3] = load_f32x4(smem, offset)
            else:
                d[4 * i], d[4 * i + 2] = load_f32x2(smem, offset)

    # --- A, K-outermost: chunks of 16 K [chunk][token][16], d and s [block][token][2]
    @cuda.jit(device=True, forceinline=True)
    def read_offsets_many(lane, M):
        matrix, row = int32(lane >> 3), int32(lane & 7)
        chunk = int32(matrix & 1 if groups == 2 else matrix)
        token = int32(row + 8 * (matrix >> 1) if groups == 2 else row)
        return (chunk * M + min(token, int32(M - 1))) * CHUNK, int32(0)

    @cuda.jit(device=True, forceinline=True)
    def load_many(b, d, smem, codes, scales, lane, M):
        for i in range(0, BLOCKS, 3 - groups):  # four matrices: of two blocks, or two of tokens
            first = 4 * i * groups // 2
            source = codes + 2 * CHUNK * (i * M)
            b[first], b[first + 1], b[first + 2], b[first + 3] = ldmatrix_x4(smem, source)
        for i in range(BLOCKS):
            for j in range(2 * groups):
                token = min(int32(2 * (lane & 3) + j // 2 * 8 + j % 2), int32(M - 1))
                i_d, source = scales_per_mma * i + 2 * j, scales + 8 * (i * M + token)
                if minimum:
                    d[i_d], d[i_d + 1] = load_f32x2(smem, source)
                else:
                    d[i_d] = load_f32(smem, source)

    @cuda.jit(device=True, forceinline=True)
    def promote(acc, r, v, w, m, d, i):
        """acc[r + ...] += an mma's sums, of rows g and g + 8 and one or two tokens."""
        acc[r] += float32(v[0]) * (w[0] * d[i])
        acc[r + 2] += float32(v[2]) * (w[1] * d[i])
        if own == 2:
            acc[r + 1] += float32(v[1]) * (w[0] * d[i + 2])
            acc[r + 3] += float32(v[3]) * (w[1] * d[i + 2])
        if minimum:
            s0 = d[i + 1] * minimum_scale
            acc[r] += m[0] * s0
            acc[r + 2] += m[1] * s0
            if own == 2:
                s1 = d[i + 3] * minimum_scale
                acc[r + 1] += m[0] * s1
                acc[r + 3] += m[1] * s1

    @cuda.jit(device=True, forceinline=True)
    def multiply_few(acc, b, d, smem, slot, lane):
        u = cuda.local.array(8, uint32)
        group, owner = int32(lane >> 2), int32((lane & 3) * sharing >> 2)
        for r in range(PAIR):
            offset, v = slot + r * tile_bytes, zero_sums()
            for block in range(BLOCKS):
                unpack(u, smem, offset, lane, block)
                v = times(u, block, b[2 * block], b[2 * block + 1], v)
                if block % sharing == sharing - 1:
                    destination = offset + width * (8 * group + block - sharing + 1 + owner)
                    w = of_two_rows(smem, destination + scales_at)
                    m = of_two_rows(smem, destination + minima_at) if minimum else w
                    promote(acc, 4 * r, v, w, m, d, block // sharing * scales_per_mma)
                    v = zero_sums()

    @cuda.jit(device=True, forceinline=True)
    def multiply_few_16(acc, b, d, smem, slot, lane):
        """With scales of 16: v are the sums of lower halves of blocks, x of upper ones."""
        u, zero = cuda.local.array(8, uint32), uint32(0)
        group, owner = int32(lane >> 2), int32((lane & 3) * sharing >> 2)
        for r in range(PAIR):
            offset, v, x = slot + r * tile_bytes, zero_sums(), zero_sums()
            for block in range(BLOCKS):
                unpack(u, smem, offset, lane, block)
                b0, b1 = b[2 * block], b[2 * block + 1]
                if single:  # in two columns
                    v = times(u, block, b0, b1, v)
                else:
                    v, x = times(u, block, b0, zero, v), times(u, block, zero, b1, x)
                if block % sharing == sharing - 1:
                    low, high = of_groups(smem, offset, block - sharing + 1 + owner, group)
                    i, first = block // sharing * scales_per_mma, 4 * r
                    if single:
                        s = d[i]
                        acc[first] += float32(v[0]) * (low[0] * s) + float32(v[1]) * (high[0] * s)
                        acc[first + 2] += float32(v[2]) * (low[1] * s) + float32(v[3]) * (
                            high[1] * s
                        )
                    else:
                        promote(acc, first, v, low, low, d, i)
                        promote(acc, first, x, high, high, d, i)
                    v = x = zero_sums()

    @cuda.jit(device=True, forceinline=True)
    def multiply_many_16(acc, b, d, smem, slot, lane):
        u, zero = cuda.local.array(8, uint32), uint32(0)
        for r in range(PAIR):
            offset = slot + r * tile_bytes
            for block in range(BLOCKS):
                unpack(u, smem, offset, lane, block)
                low, high = of_groups(smem, offset, block, int32(lane >> 2))
                for j in range(groups):
                    p, i, first = (
                        2 * (block * groups + j),
                        scales_per_mma * block + 4 * j,
                        sums_per_tile * r + 4 * j,
                    )
                    promote(acc, first, times(u, block, b[p], zero, zero_sums()), low, low, d, i)
                    promote(
                        acc, first, times(u, block, zero, b[p + 1], zero_sums()), high, high, d, i
                    )

    @cuda.jit(device=True, forceinline=True)
    def multiply_many(acc, b, d, smem, slot, lane):
        u = cuda.local.array(8, uint32)
        for r in range(PAIR):
            offset = slot + r * tile_bytes
            scales = of_tile(smem, offset + scales_at, int32(lane >> 2))
            minima = of_tile(smem, offset + minima_at, int32(lane >> 2)) if minimum else scales
            for block in range(BLOCKS):
                unpack(u, smem, offset, lane, block)
                w, m = of_block(scales, block), of_block(minima, block)
                for j in range(groups):
                    p, i, first = (
                        2 * (block * groups + j),
                        scales_per_mma * block + 4 * j,
                        sums_per_tile * r + 4 * j,
                    )
                    promote(acc, first, times(u, block, b[p], b[p + 1], zero_sums()), w, m, d, i)

    @cuda.jit(device=True, forceinline=True)
    def store(acc, smem, offset, lane, low, high):
        group, quad = int32(lane >> 2), int32(lane & 3)
        for r in range(PAIR):
            for j in range(sums_per_tile):
                if j % 2 < own:  # sums of the blocks of K that shared columns
                    if lanes_with_sums == 1:
                        acc[sums_per_tile * r + j] += shfl_xor(acc[sums_per_tile * r + j], 1)
                    if lanes_with_sums < 4:
                        acc[sums_per_tile * r + j] += shfl_xor(acc[sums_per_tile * r + j], 2)
            if low <= r and r < high and quad < lanes_with_sums:
                for j in range(sums_per_tile):
                    if j % 2 < own:
                        # eights of rows: of all pairs of tokens, first the lower, then the upper
                        eight = int32(quad + j // 4 * 4 + quads * (j // 2 % 2 + 2 * (j % 2)))
                        position = int32((r - low) * (tokens * TILE_ROWS) + 8 * eight + group)
                        store_f32(smem, offset + 4 * position, acc[sums_per_tile * r + j])

    @cuda.jit(device=True, forceinline=True)
    def position(i):
        eight = uint32(i) >> uint32(3)
        quarter, pair = eight // uint32(quads), eight % uint32(quads)
        token = int32(2 * pair + (quarter >> uint32(1)))
        return token, int32((quarter & uint32(1)) * uint32(8) + (uint32(i) & uint32(7)))

    if tile.group == BLOCK:
        multiply = multiply_few if few else multiply_many
    else:
        multiply = multiply_few_16 if few else multiply_many_16
    return PairProducts(
        sums=PAIR * sums_per_tile,
        b_words=2 * BLOCKS * groups,
        d_values=scales_per_mma * (n_shared if few else BLOCKS),
        scale=HALF_SCALE / tile.code_scale,
        read_offsets=read_offsets_few if few else read_offsets_many,
        load=load_few if few else load_many,
        multiply=multiply,
        store=store,
        position=position,
    )
