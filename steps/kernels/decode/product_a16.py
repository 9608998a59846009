"""Packed tiles times float16 or bfloat16 A: scales multiply sums of blocks, and nothing is rounded.

An mma multiplies 16 rows of weights, 16 K and eight tokens. The weights are codes as numbers with
an offset, such as 1024 + code and 64 + code (`steps.kernels.parts.weights.offset_numbers`). What
the
offsets add is taken off in the same accumulator: products of A with a tile of constants, the
negative offsets, are what the products with the codes begin with. All rows of them are equal, so
they serve every row tile of the warp.

                     constants                            codes of a row tile
                 K 0..15          K 16..31            K 0..15        K 16..31
    rows g       -(1024 + zero)   -(64 + zero)        1024 + code    64 + code
    rows g + 8   the same, or 512 with minima         1024 + code    64 + code

    z = constants * A           v = z + codes * A          sum += scale * v (+ minimum * sum of A)

Where a format has minima, rows g + 8 of the constants add up A instead, times the ratio of the
units of minima and scales. The terms that cancel are up to 130 times as large as the result; in
float32 that costs a hundredth of what rounding A to float16 costs. Step 17 teaches this.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import cuda, float32, int32, uint32

from qformats import BLOCK
from qformats.repack import HALF_SCALE, MINIMUM_SCALE
from qformats.storage import storage_format_named
from steps.instructions import ldmatrix_x4, mma_m16n8k16_bf16, mma_m16n8k16_f16
from steps.kernels.decode.block_scales import block_scales
from steps.kernels.decode.product import PAIR, Product
from steps.kernels.parts.weights.offset_numbers import both, offset_numbers
from steps.kernels.parts.weights.storage_formats import tile_format

BLOCK_BYTES = 2 * BLOCK  # of a token's A


def word_of(x: float, kind: str) -> int:
    """A number that float16 or bfloat16 has, in both halves of a word."""
    if kind == "float16":
        return both(int(np.float16(x).view(np.uint16)))
    return both(int(np.float32(x).view(np.uint32)) >> 16)


@cache
def product_a16(name: str, kind: str, tokens: int) -> Product:
    """The product of a storage format, for capture in a kernel factory. A is `kind`, in rows."""
    tile, numbers, scales = tile_format(name), offset_numbers(name, kind), block_scales(name)
    tile_bytes, scales_at, minima_at = tile.tile_bytes, tile.scales_at, tile.minima_at
    load, fragments, n_words = tile.load, numbers.fragments, storage_format_named(name).bits
    load_scales, of_block, n_scales = scales.load, scales.of_block, scales.words
    minimum, apart = tile.minimum, tile.group < BLOCK  # apart: each 16 K have scales of their own
    terms, multiply_16 = numbers.terms, mma_m16n8k16_f16 if kind == "float16" else mma_m16n8k16_bf16
    groups = max(1, tokens // 8)  # of eight tokens, the columns of an mma
    columns = min(2, tokens)  # of a lane; a single token is in all columns
    n_b, n_codes = 4 * groups, 2 * terms
    unit = numbers.unit
    sum_of_a = MINIMUM_SCALE / HALF_SCALE * unit
    constants = tuple(
        tuple(
            word_of(sum_of_a if minimum and r % 2 else -x * unit, kind)
            for r, x in enumerate(registers)
        )
        for of_step in numbers.offsets
        for registers in of_step
    )
    distinct = tuple(dict.fromkeys(constants))
    which = tuple(distinct.index(registers) for registers in constants)
    low, high = distinct[0], distinct[-1]
    # in registers: minima leave none, and with eight tokens it is slower
    stay = len(distinct) <= 2 and tokens == 1 and not minimum

    @cuda.jit(device=True, forceinline=True)
    def mma(a, b, j, part, v):
        """v + 16 K, part 0 or 1 of a block, of weights a and the tokens of group j."""
        i = 4 * j + 2 * part
        return multiply_16(a[0], a[1], a[2], a[3], b[i], b[i + 1], v[0], v[1], v[2], v[3])

    @cuda.jit(device=True, forceinline=True)
    def offset_sums(z, b, offsets, step, part, more):
        """z = the negative offsets of a step's numbers times A, or z + that (`more`)."""
        for j in range(groups):
            v = float32(0), float32(0), float32(0), float32(0)
            if more:
                v = z[j, 0], z[j, 1], z[j, 2], z[j, 3]
            for term in range(terms):
                i = terms * step + term
                if stay:
                    v = mma(offsets[2] if which[i] else offsets[1], b, j, part, v)
                else:
                    v = mma(constants[i], b, j, part, v)
            z[j, 0], z[j, 1], z[j, 2], z[j, 3] = v

    @cuda.jit(device=True, forceinline=True)
    def make_numbers(a, first, words, step):
        """The numbers of a step to a[first], a[first + 1] ..., by terms."""
        for term in range(terms):
            x = fragments(words, step, term)
            for i in range(4):
                a[first + term, i] = x[i]

    @cuda.jit(device=True, forceinline=True)
    def beginning_with(z):
        """What sums of codes begin with: with minima, rows g + 8 of z hold sums of A instead of
        offsets, so all rows take those of rows g."""
        return (z[0], z[1], z[0], z[1]) if minimum else (z[0], z[1], z[2], z[3])

    @cuda.jit(device=True, forceinline=True)
    def add_scaled(acc, first, v, z, d, m):
        """acc += the sums of a block, with scales and minima of rows g and g + 8."""
        for column in range(columns):
            acc[first + column] += d[0] * v[column]
            acc[first + 2 + column] += d[1] * v[2 + column]
            if minimum:
                acc[first + column] += m[0] * z[2 + column]
                acc[first + 2 + column] += m[1] * z[2 + column]

    @cuda.jit(device=True, forceinline=True)
    def in_registers(x, here):
        """Four constants, kept in registers. Constants that the compiler knows it makes anew at
        each use, four instructions a fragment. So upper bits of `here` are mixed in: they are 0, as
        `here` is at most 16, but the compiler cannot know that."""
        return (
            uint32(x[0] ^ uint32(here >> 28)),
            uint32(x[1] ^ uint32(here >> 29)),
            uint32(x[2] ^ uint32(here >> 30)),
            uint32(x[3] ^ uint32(here >> 31)),
        )

    @cuda.jit(device=True, forceinline=True)
    def places(lane, here, pitch):
        """Row r of `ldmatrix`'s matrix i: 8 K of token r, from 8i on. The last token stands in for
        those beyond it. Then the tiles of constants."""
        first = min(int32(lane & 7), int32(here - 1)) * pitch
        second = min(int32((lane & 7) + 8), int32(here - 1)) * pitch
        first, second = int32(first + 16 * (lane >> 3)), int32(second + 16 * (lane >> 3))
        if not stay:
            return ((first, second),)
        return (first, second), in_registers(low, here), in_registers(high, here)

    @cuda.jit(device=True, forceinline=True)
    def multiply_block(acc, words, d, m, smem, a, offsets, odd):
        """acc += the first or the second block of 64 K, whose A begins at byte `a`."""
        b, z = cuda.local.array(n_b, uint32), cuda.local.array((groups, 4), float32)
        codes, step = cuda.local.array((n_codes, 4), uint32), 2 * odd
        for j in range(groups):
            at, i = a + offsets[0][j] + BLOCK_BYTES * odd, 4 * j
            b[i], b[i + 1], b[i + 2], b[i + 3] = ldmatrix_x4(smem, at)
        if not apart:
            offset_sums(z, b, offsets, step, 0, False)
            offset_sums(z, b, offsets, step + 1, 1, True)
            for r in range(PAIR):
                make_numbers(codes, 0, words[r], step)
                make_numbers(codes, terms, words[r], step + 1)
                d32, m32 = of_block(d[r], odd, 0), of_block(m[r], odd, 0)
                for j in range(groups):
                    v = beginning_with(z[j])
                    for i in range(2 * terms):
                        v = mma(codes[i], b, j, i // terms, v)
                    add_scaled(acc, 4 * (groups * r + j), v, z[j], d32, m32)
        else:
            for part in range(2):
                offset_sums(z, b, offsets, step + part, part, False)
                for r in range(PAIR):
                    make_numbers(codes, 0, words[r], step + part)
                    d16, m16 = of_block(d[r], odd, part), of_block(m[r], odd, part)
                    for j in range(groups):
                        v = beginning_with(z[j])
                        for i in range(terms):
                            v = mma(codes[i], b, j, part, v)
                        add_scaled(acc, 4 * (groups * r + j), v, z[j], d16, m16)

    @cuda.jit(device=True, forceinline=True)
    def multiply(acc, smem, weights, a, a_scales, offsets, here, lane):
        words = cuda.local.array((PAIR, n_words), uint32)
        d = cuda.local.array((PAIR, n_scales), uint32)
        m = cuda.local.array((PAIR, n_scales), uint32)
        # Sixteen tokens need so many registers that this may not be unrolled: the compiler does not
        # know that the number is 2.
        half, halves = int32(0), int32(2 if groups == 1 else 1 + min(int32(here), 1))
        while half < halves:
            for r in range(PAIR):
                at = weights + r * tile_bytes
                x = load(smem, at, lane, half)
                for i in range(n_words):
                    words[r, i] = x[i]
                y = load_scales(smem, at + scales_at, lane, half)
                for i in range(n_scales):
                    d[r, i] = y[i]
                if minimum:
                    y = load_scales(smem, at + minima_at, lane, half)
                    for i in range(n_scales):
                        m[r, i] = y[i]
            # written out, so that whatever the compiler unrolls `odd` is a constant
            at = a + 2 * BLOCK_BYTES * half
            multiply_block(acc, words, d, m, smem, at, offsets, 0)
            multiply_block(acc, words, d, m, smem, at, offsets, 1)
            half = int32(half + 1)

    @cuda.jit(device=True, forceinline=True)
    def finish(acc):
        pass

    return Product(4 * PAIR * groups, HALF_SCALE / unit, places, multiply, finish)
