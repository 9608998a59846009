"""The product of a packed tile of weights and 128 K of A, for few tokens: how the eight columns of
an mma are filled. Step 10 teaches this.

A block of K has its own scales, so its sums are promoted before those of the next are added. Eight
tokens or more fill the columns. For fewer several blocks of K share them, and one promotion serves
them all. B for one token: the weights of block j meet zeros in the columns of the other blocks.

              n = 0    1    2    3    4    5    6    7
    mma 0   |  block 0  |     0     |     0     |     0     |    all four add to one C, where the
    mma 1   |     0     |  block 1  |     0     |     0     |    columns 2t and 2t + 1 are sums of
    mma 2   |     0     |     0     |  block 2  |     0     |    block t, and lie in lane (g, t),
    mma 3   |     0     |     0     |     0     |  block 3  |    which scales them: no lane idles

Where 16 K have scales of their own (`qformats.storage`) the lower and the upper half of a block
are summed apart: with one token in its block's two columns, which costs nothing, else by two mma,
each with zeros for the other half.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from numba import cuda, float32, int32, uint32

from qformats import BLOCK
from qformats.repack import CHUNK, HALF_SCALE, MINIMUM_SCALE
from steps.components.decode_tiles import BLOCKS, scale_bytes
from steps.components.unpack.storage_formats import ROWS_APART, SCALES_OF_HALF, tile_format
from steps.instructions import (
    half_to_float,
    ldmatrix_x4,
    load_f32x2,
    load_f32x4,
    load_u16,
    load_u32,
    load_u32x2,
    load_u32x4,
    mma_m16n8k32_s8,
    mma_m16n8k32_u8,
    prmt,
    shfl_xor,
)


@dataclass(frozen=True, slots=True)
class Products:
    """Device functions of a warp, for a row tile and up to `tokens` tokens.

    sums  : how many a lane has in `acc`, local float32
    lanes_with_sums: of four lanes so many, the first, have sums in the end (`add_columns`): lane
            (g, t) of features g and g + 8, tokens 2t and 2t + 1, and then tokens 8 further on
    read_offsets(lane) -> (b, d)
        where the lane begins to read in 128 K of A: bytes from the first of its codes, and from the
        first of its scales, both as `steps.components.decode_activations` stores them
    multiply(acc, smem, slot, at_b, at_d, lane)
        acc += the packed tile of weights at byte `slot` times the 128 K of A whose codes and scales
        this lane reads from bytes at_b and at_d on
    add_columns(acc)
        at the end: adds up the blocks of K that shared columns; all in MINIMUM_SCALE
    """

    sums: int
    lanes_with_sums: int
    read_offsets: Any
    multiply: Any
    add_columns: Any


@dataclass(frozen=True, slots=True)
class ScaleReaders:
    """Device functions that read the scales of a packed tile, or its minima, as float32.

    of_two_rows(smem, offset)       -> (of row g, of row g + 8) of one block, the first at `offset`
    of_tile(smem, offset, g)        -> those of all four blocks, from byte `offset` on, in words
    of_block(words, block)          -> of these words (of row g, of row g + 8) of one block
    of_groups(smem, slot, block, g) -> where 16 K have their own, ((of the lower half of row g, of
                                       row g + 8), (of the upper halves)); slot: byte of the tile
    """

    of_two_rows: Any
    of_tile: Any
    of_block: Any
    of_groups: Any


@cache
def scale_readers(format_name: str) -> ScaleReaders:
    """The device functions, for capture in a kernel factory."""
    tile = tile_format(format_name)
    scales_at, width = tile.scales_at, tile.scale_bytes

    @cuda.jit(device=True, forceinline=True)
    def of_two_rows(smem, offset):
        """Scales or minima of rows g and g + 8."""
        if width == 1:
            low, high = uint32(smem[offset]) << uint32(8), uint32(smem[offset + 4]) << uint32(8)
            return half_to_float(low), half_to_float(high)
        return half_to_float(load_u16(smem, offset)), half_to_float(load_u16(smem, offset + 8))

    @cuda.jit(device=True, forceinline=True)
    def of_tile(smem, offset, group):
        """Scales or minima of rows g and g + 8, all four of each."""
        if width == 1:
            low, high = load_u32x2(smem, offset + 8 * group)
            return (
                prmt(low, 0, 0x1404),
                prmt(low, 0, 0x3424),
                prmt(high, 0, 0x1404),
                prmt(high, 0, 0x3424),
            )
        return load_u32x4(smem, offset + 16 * group)

    @cuda.jit(device=True, forceinline=True)
    def of_block(q, block):
        """Of two rows' scales or minima, four float16 a row, those of one block."""
        low, high = q[block // 2], q[2 + block // 2]
        return half_to_float(low >> (block % 2 * 16)), half_to_float(high >> (block % 2 * 16))

    @cuda.jit(device=True, forceinline=True)
    def of_groups(smem, slot, block, group):
        """The scales of a block's lower and upper half, of row g and of row g + 8."""
        offset = slot + scales_at + (block >> 1) * SCALES_OF_HALF + 8 * group + 4 * (block & 1)
        g, h = uint32(load_u32(smem, offset)), uint32(load_u32(smem, offset + ROWS_APART))
        low = half_to_float(g), half_to_float(h)
        return low, (half_to_float(g >> uint32(16)), half_to_float(h >> uint32(16)))

    return ScaleReaders(of_two_rows, of_tile, of_block, of_groups)


@cuda.jit(device=True, forceinline=True)
def zero_sums():
    """What the sums of an mma begin with."""
    return int32(0), int32(0), int32(0), int32(0)


@cache
def weights_times(format_name: str) -> tuple[Any, Any]:
    """(unpack, times), device functions of a warp, for capture in a kernel factory.

    unpack(u, smem, slot, lane, block)
        where `block` is even: it and the next of the tile at byte `slot` -> u, local uint32 [8]
    times(u, block, b0, b1, v) -> v + this block of them times 32 K of eight columns; v: int32 [4]
    """
    tile = tile_format(format_name)
    load, fragments = tile.load, tile.fragments
    mma = mma_m16n8k32_s8 if tile.signed else mma_m16n8k32_u8

    @cuda.jit(device=True, forceinline=True)
    def unpack(u, smem, slot, lane, block):
        if block % 2 == 0:
            f = fragments(load(smem, slot, lane, block // 2))
            u[0], u[1], u[2], u[3], u[4], u[5], u[6], u[7] = f

    @cuda.jit(device=True, forceinline=True)
    def times(u, block, b0, b1, v):
        q = block % 2 * 4
        return mma(u[q], u[q + 1], u[q + 2], u[q + 3], b0, b1, v[0], v[1], v[2], v[3])

    return unpack, times


@cache
def products(format_name: str, tokens: int) -> Products:
    """The device functions, for capture in a kernel factory. Not of c4m: what a minimum of 16 would
    be multiplied by is the sum of half a block of A, which Q8_1 does not have."""
    tile = tile_format(format_name)
    scales_at, minima_at = tile.scales_at, tile.minima_at
    unpack, times = weights_times(format_name)
    minimum, width, read = tile.minimum, tile.scale_bytes, scale_readers(format_name)
    of_two_rows, of_tile = read.of_two_rows, read.of_tile
    of_block, of_groups = read.of_block, read.of_groups
    # of scales, against minima
    scale = float32(HALF_SCALE / MINIMUM_SCALE / tile.code_scale)
    sharing = {1: 4, 2: 4, 4: 2}.get(tokens, 1)  # blocks of K that share the columns of B
    columns, groups = 8 // sharing, max(1, tokens // 8)  # of a block; mma side by side
    single = tokens == 1  # both columns of a block are the one token, and half the sums unused
    n_acc, values = 4 * groups, 2 if single else 4 * groups
    lanes_with_sums, size_d = 4 // sharing, scale_bytes(tokens, minimum)
    next_pair = 8 if groups == 2 else 16  # chunks of A between two pairs of ldmatrix's matrices

    @cuda.jit(device=True, forceinline=True)
    def promote(acc, r, v, w, m, smem, offset):
        """acc[r + ...] += an mma's sums, with the scales w and minima m of two rows and
        those of two tokens, from byte `offset` on."""
        if minimum:
            d0, s0, d1, s1 = load_f32x4(smem, offset)
        else:
            d0, d1 = s0, s1 = load_f32x2(smem, offset)
        acc[r] += float32(v[0]) * (w[0] * d0)
        acc[r + 1] += float32(v[2]) * (w[1] * d0)
        acc[r + 2] += float32(v[1]) * (w[0] * d1)
        acc[r + 3] += float32(v[3]) * (w[1] * d1)
        if minimum:
            acc[r] += m[0] * s0
            acc[r + 1] += m[1] * s0
            acc[r + 2] += m[0] * s1
            acc[r + 3] += m[1] * s1

    @cuda.jit(device=True, forceinline=True)
    def multiply_few_16(acc, smem, slot, at_b, at_d, lane):
        """As multiply_few, with scales of 16: v are the sums of lower halves, x of upper ones."""
        u, b = cuda.local.array(8, uint32), cuda.local.array(2, uint32)
        group, quad, zero = int32(lane >> 2), int32(lane & 3), uint32(0)
        v = x = zero_sums()
        for block in range(BLOCKS):
            unpack(u, smem, slot, lane, block)
            owner = block % sharing  # whose columns are not zero
            if owner == 0:
                b[0], b[1] = load_u32x2(smem, at_b + block * tokens * BLOCK)
                v = x = zero_sums()
            if single:  # its two columns
                b0 = b[0] if group == 2 * owner else zero
                b1 = b[1] if group == 2 * owner + 1 else zero
                v = times(u, block, b0, b1, v)
            else:
                b0, b1 = (b[0], b[1]) if group // columns == owner else (zero, zero)
                v, x = times(u, block, b0, zero, v), times(u, block, zero, b1, x)
            if owner == sharing - 1:
                first = block - owner
                low, high = of_groups(smem, slot, first + (quad * sharing >> 2), group)
                offset = at_d + first * tokens * size_d
                if single:
                    d, _ = load_f32x2(smem, offset)
                    acc[0] += float32(v[0]) * (low[0] * d) + float32(v[1]) * (high[0] * d)
                    acc[1] += float32(v[2]) * (low[1] * d) + float32(v[3]) * (high[1] * d)
                else:
                    promote(acc, 0, v, low, low, smem, offset)
                    promote(acc, 0, x, high, high, smem, offset)

    @cuda.jit(device=True, forceinline=True)
    def multiply_many_16(acc, smem, slot, at_b, at_d, lane):
        """As multiply_many, with scales of 16."""
        u, b = cuda.local.array(8, uint32), cuda.local.array(4, uint32)
        group, zero = int32(lane >> 2), uint32(0)
        for block in range(BLOCKS):
            unpack(u, smem, slot, lane, block)
            if block * groups % 2 == 0:  # four matrices: two blocks of 8 tokens, or one of 16
                b[0], b[1], b[2], b[3] = ldmatrix_x4(smem, at_b + 2 * block * tokens * CHUNK)
            low, high = of_groups(smem, slot, block, group)
            for j in range(groups):
                p = 2 * (j if groups == 2 else block % 2)
                offset = at_d + (block * tokens + 8 * j) * size_d
                promote(
                    acc, 4 * j, times(u, block, b[p], zero, zero_sums()), low, low, smem, offset
                )
                promote(
                    acc,
                    4 * j,
                    times(u, block, zero, b[p + 1], zero_sums()),
                    high,
                    high,
                    smem,
                    offset,
                )

    @cuda.jit(device=True, forceinline=True)
    def multiply_few(acc, smem, slot, at_b, at_d, lane):
        """For up to four tokens."""
        u, b = cuda.local.array(8, uint32), cuda.local.array(2, uint32)
        group, quad, v = int32(lane >> 2), int32(lane & 3), zero_sums()
        for block in range(BLOCKS):
            unpack(u, smem, slot, lane, block)
            owner = block % sharing  # whose columns are not zero
            if owner == 0:
                b[0], b[1] = load_u32x2(smem, at_b + block * tokens * BLOCK)
                v = zero_sums()
            b0, b1 = (b[0], b[1]) if group // columns == owner else (uint32(0), uint32(0))
            v = times(u, block, b0, b1, v)
            if owner == sharing - 1:
                first = block - owner
                offset = slot + 8 * width * group + width * (first + (quad * sharing >> 2))
                w = of_two_rows(smem, offset + scales_at)
                m = of_two_rows(smem, offset + minima_at) if minimum else w
                if minimum:
                    w = w[0] * scale, w[1] * scale
                promote(acc, 0, v, w, m, smem, at_d + first * tokens * size_d)

    @cuda.jit(device=True, forceinline=True)
    def multiply_many(acc, smem, slot, at_b, at_d, lane):
        """For eight or sixteen: a block of K has all columns to itself."""
        u, b = cuda.local.array(8, uint32), cuda.local.array(4, uint32)
        scales = of_tile(smem, slot + scales_at, lane >> 2)
        minima = of_tile(smem, slot + minima_at, lane >> 2) if minimum else scales
        for block in range(BLOCKS):
            unpack(u, smem, slot, lane, block)
            if block * groups % 2 == 0:  # four matrices: two blocks of 8 tokens, or one of 16
                b[0], b[1], b[2], b[3] = ldmatrix_x4(smem, at_b + 2 * block * tokens * CHUNK)
            w, m = of_block(scales, block), of_block(minima, block)
            if minimum:  # the sums take it otherwise
                w = w[0] * scale, w[1] * scale
            for j in range(groups):
                p = 2 * (j if groups == 2 else block % 2)
                offset = at_d + (block * tokens + 8 * j) * size_d
                promote(
                    acc, 4 * j, times(u, block, b[p], b[p + 1], zero_sums()), w, m, smem, offset
                )

    # Inlined by Numba, as if it stood in the kernel: what LLVM inlines it simplifies first, and the
    # code that came of this took other registers.
    @cuda.jit(device=True, inline="always")
    def read_offsets(lane):
        group, quad = int32(lane >> 2), int32(lane & 3)
        b = int32((group // 2 if single else group) * BLOCK + 8 * quad)
        if sharing == 1:  # a row of ldmatrix's four matrices: chunk 0, chunk 1, and the next pair
            b = int32((lane >> 3 & 1) * tokens + (lane >> 4) * next_pair + (lane & 7)) * CHUNK
        return b, int32(quad * (16 if minimum else 8))

    @cuda.jit(device=True, forceinline=True)
    def add_columns(acc):
        for r in range(values):
            if not minimum:
                acc[r] *= scale
            if lanes_with_sums == 1:
                acc[r] += shfl_xor(acc[r], 1)
            if lanes_with_sums < 4:
                acc[r] += shfl_xor(acc[r], 2)

    if tile.group == BLOCK:
        multiply = multiply_many if sharing == 1 else multiply_few
    else:
        multiply = multiply_many_16 if sharing == 1 else multiply_few_16
    return Products(n_acc, lanes_with_sums, read_offsets, multiply, add_columns)
