"""The product of a record of weights and of A, for few tokens: an mma of eight columns, filled.

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

    sums   : how many a lane has in `acc`, local float32
    holders: of four lanes the first so many have sums in the end (`add_up`): lane (g, t) of
             features g and g + 8, tokens 2t and 2t + 1, and then tokens 8 further on
    places(lane) -> (b, d)
        where the lane begins to read in a record of A: bytes from the first of its codes, and from
        the first of its scales, both as `steps.components.decode_activations` leaves them
    multiply(acc, smem, slot, at_b, at_d, lane)
        acc += the record of weights at byte `slot` times the record of A whose codes and scales
        this lane reads from at_b and at_d on
    add_up(acc)
        at the end: the sums of the blocks of K that shared columns; all in MINIMUM_SCALE
    """

    sums: int
    holders: int
    places: Any
    multiply: Any
    add_up: Any


@dataclass(frozen=True, slots=True)
class ScaleReaders:
    """Device functions that read a record's scales, or its minima, as float32.

    of_two_rows(smem, at)           -> (of row g, of row g + 8) of one block, the first at byte `at`
    of_record(smem, at, g)          -> those of all four blocks, of the part at byte `at`, in words
    of_block(words, block)          -> of these (of row g, of row g + 8) of one block
    of_groups(smem, slot, block, g) -> where 16 K have their own, ((of the lower half of row g, of
                                       row g + 8), (of the upper halves)); slot: byte of the record
    """

    of_two_rows: Any
    of_record: Any
    of_block: Any
    of_groups: Any


@cache
def scale_readers(format_name: str) -> ScaleReaders:
    """The device functions, for capture in a kernel factory."""
    tile = tile_format(format_name)
    scales_at, width = tile.scales_at, tile.scale_bytes

    @cuda.jit(device=True, forceinline=True)
    def of_two_rows(smem, at):
        """Scales or minima of rows g and g + 8."""
        if width == 1:
            low, high = uint32(smem[at]) << uint32(8), uint32(smem[at + 4]) << uint32(8)
            return half_to_float(low), half_to_float(high)
        return half_to_float(load_u16(smem, at)), half_to_float(load_u16(smem, at + 8))

    @cuda.jit(device=True, forceinline=True)
    def of_record(smem, at, group):
        """Scales or minima of rows g and g + 8, all four of each."""
        if width == 1:
            low, high = load_u32x2(smem, at + 8 * group)
            return (
                prmt(low, 0, 0x1404),
                prmt(low, 0, 0x3424),
                prmt(high, 0, 0x1404),
                prmt(high, 0, 0x3424),
            )
        return load_u32x4(smem, at + 16 * group)

    @cuda.jit(device=True, forceinline=True)
    def of_block(q, block):
        """Of two rows' scales or minima, four float16 a row, those of one block."""
        low, high = q[block // 2], q[2 + block // 2]
        return half_to_float(low >> (block % 2 * 16)), half_to_float(high >> (block % 2 * 16))

    @cuda.jit(device=True, forceinline=True)
    def of_groups(smem, slot, block, group):
        """The scales of a block's lower and upper half, of row g and of row g + 8."""
        at = slot + scales_at + (block >> 1) * SCALES_OF_HALF + 8 * group + 4 * (block & 1)
        g, h = uint32(load_u32(smem, at)), uint32(load_u32(smem, at + ROWS_APART))
        low = half_to_float(g), half_to_float(h)
        return low, (half_to_float(g >> uint32(16)), half_to_float(h >> uint32(16)))

    return ScaleReaders(of_two_rows, of_record, of_block, of_groups)


@cuda.jit(device=True, forceinline=True)
def no_sums():
    """What the sums of an mma begin with."""
    return int32(0), int32(0), int32(0), int32(0)


@cache
def weights_times(format_name: str) -> tuple[Any, Any]:
    """(unpack, times), device functions of a warp, for capture in a kernel factory.

    unpack(u, smem, slot, lane, block)
        where `block` is even: it and the next of the record at byte `slot` -> u, local uint32 [8]
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
    of_two_rows, of_record = read.of_two_rows, read.of_record
    of_block, of_groups = read.of_block, read.of_groups
    unit = float32(HALF_SCALE / MINIMUM_SCALE / tile.unit)  # of scales, against that of minima
    share = {1: 4, 2: 4, 4: 2}.get(tokens, 1)  # blocks of K that share the columns of B
    columns, groups = 8 // share, max(1, tokens // 8)  # of a block; mma side by side
    single = tokens == 1  # both columns of a block are the one token, and half the sums unused
    n_acc, values = 4 * groups, 2 if single else 4 * groups
    holders, size_d = 4 // share, scale_bytes(tokens, minimum)
    again = 8 if groups == 2 else 16  # units of A from two of ldmatrix's matrices to the others

    @cuda.jit(device=True, forceinline=True)
    def promote(acc, r, v, w, m, smem, at):
        """acc[r + ...] += an mma's sums, with the scales w and minima m of two rows and, at `at`,
        those of two tokens."""
        if minimum:
            d0, s0, d1, s1 = load_f32x4(smem, at)
        else:
            d0, d1 = s0, s1 = load_f32x2(smem, at)
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
        v = x = no_sums()
        for block in range(BLOCKS):
            unpack(u, smem, slot, lane, block)
            turn = block % share  # whose columns are not zero
            if turn == 0:
                b[0], b[1] = load_u32x2(smem, at_b + block * tokens * BLOCK)
                v = x = no_sums()
            if single:  # its two columns
                b0 = b[0] if group == 2 * turn else zero
                b1 = b[1] if group == 2 * turn + 1 else zero
                v = times(u, block, b0, b1, v)
            else:
                b0, b1 = (b[0], b[1]) if group // columns == turn else (zero, zero)
                v, x = times(u, block, b0, zero, v), times(u, block, zero, b1, x)
            if turn == share - 1:
                first = block - turn
                low, high = of_groups(smem, slot, first + (quad * share >> 2), group)
                at = at_d + first * tokens * size_d
                if single:
                    d, _ = load_f32x2(smem, at)
                    acc[0] += float32(v[0]) * (low[0] * d) + float32(v[1]) * (high[0] * d)
                    acc[1] += float32(v[2]) * (low[1] * d) + float32(v[3]) * (high[1] * d)
                else:
                    promote(acc, 0, v, low, low, smem, at)
                    promote(acc, 0, x, high, high, smem, at)

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
                at = at_d + (block * tokens + 8 * j) * size_d
                promote(acc, 4 * j, times(u, block, b[p], zero, no_sums()), low, low, smem, at)
                promote(
                    acc, 4 * j, times(u, block, zero, b[p + 1], no_sums()), high, high, smem, at
                )

    @cuda.jit(device=True, forceinline=True)
    def multiply_few(acc, smem, slot, at_b, at_d, lane):
        """For up to four tokens."""
        u, b = cuda.local.array(8, uint32), cuda.local.array(2, uint32)
        group, quad, v = int32(lane >> 2), int32(lane & 3), no_sums()
        for block in range(BLOCKS):
            unpack(u, smem, slot, lane, block)
            turn = block % share  # whose columns are not zero
            if turn == 0:
                b[0], b[1] = load_u32x2(smem, at_b + block * tokens * BLOCK)
                v = no_sums()
            b0, b1 = (b[0], b[1]) if group // columns == turn else (uint32(0), uint32(0))
            v = times(u, block, b0, b1, v)
            if turn == share - 1:
                first = block - turn
                at = slot + 8 * width * group + width * (first + (quad * share >> 2))
                w = of_two_rows(smem, at + scales_at)
                m = of_two_rows(smem, at + minima_at) if minimum else w
                if minimum:
                    w = w[0] * unit, w[1] * unit
                promote(acc, 0, v, w, m, smem, at_d + first * tokens * size_d)

    @cuda.jit(device=True, forceinline=True)
    def multiply_many(acc, smem, slot, at_b, at_d, lane):
        """For eight or sixteen: a block of K has all columns to itself."""
        u, b = cuda.local.array(8, uint32), cuda.local.array(4, uint32)
        scales = of_record(smem, slot + scales_at, lane >> 2)
        minima = of_record(smem, slot + minima_at, lane >> 2) if minimum else scales
        for block in range(BLOCKS):
            unpack(u, smem, slot, lane, block)
            if block * groups % 2 == 0:  # four matrices: two blocks of 8 tokens, or one of 16
                b[0], b[1], b[2], b[3] = ldmatrix_x4(smem, at_b + 2 * block * tokens * CHUNK)
            w, m = of_block(scales, block), of_block(minima, block)
            if minimum:  # the sums take it otherwise
                w = w[0] * unit, w[1] * unit
            for j in range(groups):
                p = 2 * (j if groups == 2 else block % 2)
                at = at_d + (block * tokens + 8 * j) * size_d
                promote(acc, 4 * j, times(u, block, b[p], b[p + 1], no_sums()), w, m, smem, at)

    # Inlined by Numba, as if it stood in the kernel: what LLVM inlines it simplifies first, and the
    # code that came of this took other registers.
    @cuda.jit(device=True, inline="always")
    def places(lane):
        group, quad = int32(lane >> 2), int32(lane & 3)
        b = int32((group // 2 if single else group) * BLOCK + 8 * quad)
        if share == 1:  # a row of ldmatrix's four matrices: unit 0, unit 1, and again
            b = int32((lane >> 3 & 1) * tokens + (lane >> 4) * again + (lane & 7)) * CHUNK
        return b, int32(quad * (16 if minimum else 8))

    @cuda.jit(device=True, forceinline=True)
    def add_up(acc):
        for r in range(values):
            if not minimum:
                acc[r] *= unit
            if holders == 1:
                acc[r] += shfl_xor(acc[r], 1)
            if holders < 4:
                acc[r] += shfl_xor(acc[r], 2)

    if tile.group == BLOCK:
        multiply = multiply_many if share == 1 else multiply_few
    else:
        multiply = multiply_many_16 if share == 1 else multiply_few_16
    return Products(n_acc, holders, places, multiply, add_up)
