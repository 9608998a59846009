"""One token times a pair of row tiles: groups of K are the columns of an mma.

An mma multiplies 16 K of 16 rows of weights by eight columns, and a token is one of them. Here each
column is another group of K of the same token, of 32 K or 16 as the format has scales, and is zeros
where the weights are of other groups:

    weights of K        columns of A:    0          1           2        ...
    0..31                                A 0..31    0           0
    32..63                               0          A 32..63    0

So sums of eight groups lie side by side in one accumulator, and each lane of four scales two of
them, where `steps.kernels.decode.product` has all four scale all. What the offsets of codes add is
one product of constants with all columns, instead of one for each group. Zeros cost nothing but the
choice of an address for `ldmatrix`. A lane then has sums of its own groups of K:
`row_of_quad` adds up four lanes, once for all K.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int32

from qformats import BLOCK
from qformats.repack import CHUNK, HALF_SCALE, MINIMUM_SCALE
from steps.instructions import ldmatrix_x4, mma_m16n8k16_f16, shfl_xor
from steps.kernels.decode.product import BLOCK_BYTES, BLOCKS, PAIR, block_scales, word_of
from steps.kernels.parts.weights.offset_numbers import offset_numbers
from steps.kernels.parts.weights.storage_formats import tile_format

ZEROS = CHUNK
"""Bytes of zeros in shared memory that `multiply` needs."""


@cache
def product_of_one(name: str, deep: int) -> tuple[Any, float]:
    """(multiply, scale) of a storage format and float16 A, for capture in a kernel factory.

    scale: by which sums are to be multiplied, beside the row scales
    multiply(acc, smem, weights, a, zeros, lane)
        acc[0], acc[1] += rows g and g + 8 of the first row tile, acc[2], acc[3] of the second: what
        the lane has of `deep` K tiles, one or two. Their pairs lie one behind the other from byte
        `weights` on, A from byte `a` on, and `ZEROS` from byte `zeros` on.
    """
    tile, numbers, scales = tile_format(name), offset_numbers(name, "float16"), block_scales(name)
    tile_bytes, pair_bytes, minimum = tile.tile_bytes, PAIR * tile.tile_bytes, tile.minimum
    scales_at, minima_at, apart = tile.scales_at, tile.minima_at, tile.group < BLOCK
    load, fragments = tile.load, numbers.fragments
    load_scales, of_block = scales.load, scales.of_block
    assert numbers.terms == 1
    at_once = 1 if apart else deep  # K tiles whose groups are the columns
    used = BLOCKS * at_once * BLOCK // tile.group  # columns
    group_bytes = BLOCK_BYTES * tile.group // BLOCK
    sum_of_a = MINIMUM_SCALE / HALF_SCALE * numbers.unit
    (x, *_), (y, *_) = (numbers.offsets[step][0] for step in range(2))
    first, second = (word_of(-one * numbers.unit, "float16") for one in (x, y))
    first_h, second_h = (word_of(sum_of_a, "float16"),) * 2 if minimum else (first, second)
    offset = (x, y) != (0, 0)

    @cuda.jit(device=True, forceinline=True)
    def mma(x, b0, b1, v):
        return mma_m16n8k16_f16(x[0], x[1], x[2], x[3], b0, b1, v[0], v[1], v[2], v[3])

    @cuda.jit(device=True, forceinline=True)
    def plus(v, w):
        return v[0] + w[0], v[1] + w[1], v[2] + w[2], v[3] + w[3]

    @cuda.jit(device=True, forceinline=True)
    def block_of_a(smem, mine, zeros, lane, block):
        """A block's 32 K in its columns, zeros in the others."""
        column = int32(block)
        if apart:
            column = int32(2 * block + (lane >> 4))
        # not as an argument: Python 3.12 copies `return` into both branches of a conditional, and
        # all lanes of a warp must execute the same ldmatrix
        at = mine if lane & 7 == column else zeros
        return ldmatrix_x4(smem, at)

    @cuda.jit(device=True, forceinline=True)
    def multiply_half(v, w, smem, weights, mine, zeros, lane, number):
        """(v, w) + half `number` of the K tiles, of the first row tile and of the second."""
        at = weights + (number >> 1) * pair_bytes
        x, y = load(smem, at, lane, number & 1), load(smem, at + tile_bytes, lane, number & 1)
        b0, b1, b2, b3 = block_of_a(smem, mine, zeros, lane, 2 * number)
        c0, c1, c2, c3 = block_of_a(smem, mine, zeros, lane, 2 * number + 1)
        v, w = mma(fragments(x, 0, 0), b0, b1, v), mma(fragments(y, 0, 0), b0, b1, w)
        v, w = mma(fragments(x, 1, 0), b2, b3, v), mma(fragments(y, 1, 0), b2, b3, w)
        v, w = mma(fragments(x, 2, 0), c0, c1, v), mma(fragments(y, 2, 0), c0, c1, w)
        return mma(fragments(x, 3, 0), c2, c3, v), mma(fragments(y, 3, 0), c2, c3, w)

    @cuda.jit(device=True, forceinline=True)
    def of_columns(smem, at, lane):
        """Scales, or minima, of a row tile: rows g and g + 8 of the lane's first column, then of
        its second."""
        two = int32(lane & 3)
        if apart:
            x = load_scales(smem, at, lane, int32(two >> 1))
            g, h = (x[1], x[3]) if two & 1 else (x[0], x[2])
            x = g, g, h, h
            return of_block(x, 0, 0), of_block(x, 0, 1)
        x = load_scales(smem, at + ((two >> 1) & (deep - 1)) * pair_bytes, lane, int32(two & 1))
        return of_block(x, 0, 0), of_block(x, 1, 0)

    @cuda.jit(device=True, forceinline=True)
    def add_scaled(acc, i, smem, at, v, z, lane):
        d, e = of_columns(smem, at + scales_at, lane)
        acc[i] += d[0] * v[0] + e[0] * v[1]
        acc[i + 1] += d[1] * v[2] + e[1] * v[3]
        if minimum:
            d, e = of_columns(smem, at + minima_at, lane)
            acc[i] += d[0] * z[2] + e[0] * z[3]
            acc[i + 1] += d[1] * z[2] + e[1] * z[3]

    @cuda.jit(device=True, forceinline=True)
    def multiply_at_once(acc, smem, weights, a, zeros, lane):
        column, part = int32(lane & 7), int32(lane >> 3)
        if apart:
            part = int32(part & 1)
        mine = int32(a + group_bytes * column + CHUNK * part)
        if used < 8 and column >= used:
            mine = int32(zeros)
        z = float32(0), float32(0), float32(0), float32(0)
        if offset:
            here = mine
            if apart and (column ^ (lane >> 4)) & 1:  # even groups, then odd ones
                here = int32(zeros)
            b0, b1, b2, b3 = ldmatrix_x4(smem, here)
            z = mma((first, first_h, first, first_h), b0, b1, z)
            z = mma((second, second_h, second, second_h), b2, b3, z)
        # two sums of each row tile: one alone would be 16 mma that wait for each other
        none = float32(0), float32(0), float32(0), float32(0)
        x = (z[0], z[1], z[0], z[1]) if minimum else z
        v, w = multiply_half(x, x, smem, weights, mine, zeros, lane, 0)
        x, y = multiply_half(none, none, smem, weights, mine, zeros, lane, 1)
        if at_once == 2:
            v, w = multiply_half(v, w, smem, weights, mine, zeros, lane, 2)
            x, y = multiply_half(x, y, smem, weights, mine, zeros, lane, 3)
        v, w = plus(v, x), plus(w, y)
        add_scaled(acc, 0, smem, weights, v, z, lane)
        add_scaled(acc, 2, smem, weights + tile_bytes, w, z, lane)

    @cuda.jit(device=True, forceinline=True)
    def multiply(acc, smem, weights, a, zeros, lane):
        multiply_at_once(acc, smem, weights, a, zeros, lane)
        if at_once < deep:
            a = a + BLOCKS * BLOCK_BYTES
            multiply_at_once(acc, smem, weights + pair_bytes, a, zeros, lane)

    return multiply, HALF_SCALE / numbers.unit


@cuda.jit(device=True, forceinline=True)
def row_of_quad(acc, lane):
    """acc[lane & 3] of lanes 4g to 4g + 3 together: row g + 8 (lane & 3) of the pair."""
    upper, odd = lane & 2 != 0, lane & 1 != 0
    x0, x1 = (acc[2], acc[3]) if upper else (acc[0], acc[1])
    y0, y1 = (acc[0], acc[1]) if upper else (acc[2], acc[3])
    x0, x1 = x0 + shfl_xor(y0, 2), x1 + shfl_xor(y1, 2)
    own, other = (x1, x0) if odd else (x0, x1)
    return own + shfl_xor(other, 1)
