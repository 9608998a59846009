"""What a product of the decode steps is: two row tiles of weights times the tokens of a block.

`product_a16` and `product_a8` make it for the two families. Step 17 teaches this.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
from numba import cuda, float32, int32, uint32

from qformats import BLOCK
from qformats.repack import CHUNK, HALF_SCALE, MINIMUM_SCALE, TILE_K
from qformats.storage import storage_format_named
from steps.instructions import (
    BOX_K,
    half_to_float,
    ldmatrix_x4,
    load_f32,
    load_f32x2,
    load_u16,
    load_u32,
    load_u32x2,
    mma_m16n8k16_bf16,
    mma_m16n8k16_f16,
    mma_m16n8k32_s8,
    mma_m16n8k32_u8,
    prmt,
    shfl_xor,
)
from steps.instructions.tensor_map import BOX_ALIGNMENT
from steps.kernels.parts.weights.offset_numbers import both, offset_numbers
from steps.kernels.parts.weights.storage_formats import (
    ROWS_APART,
    SCALES_OF_HALF,
    half_format,
    tile_format,
)

PAIR: Final = 2
"""Row tiles that are multiplied together, so that what is read of A serves both. Those whose packed
tiles lie side by side (`qformats.repack.TILE_GROUP`) are one piece of memory."""

BLOCKS: Final = TILE_K // BLOCK
"""Blocks of K in a packed tile."""

BOX_ROW: Final = 2 * BOX_K
"""Bytes of a token in a box of float16 A: 64 K."""


def box_rows(tokens: int, m: int, scaled: bool) -> int:
    """Of a box of a thread block of so many columns, for `m` tokens. Each row takes time, whether
    or not it is there: of more than eight there are no more than tokens, where weights are scaled.
    What further columns read behind a box ends in sums that nobody reads."""
    return min(tokens, m) if scaled and tokens > 8 else tokens


def boxes_bytes(rows: int) -> int:
    """Of the two boxes of 128 K."""
    return 2 * BOX_ROW * rows


def boxes_stride(tokens: int) -> int:
    """Bytes from the boxes of 128 K to the next. Each box begins at a multiple of 1024, so that its
    swizzle begins with its first row."""
    return 2 * max(BOX_ALIGNMENT, BOX_ROW * tokens)


@dataclass(frozen=True, slots=True)
class Product:
    """Device functions of a warp, for a pair of row tiles and up to `tokens` tokens.

    sums  : float32 of a lane in `acc`. Of row tile r and token group j of eight, from
            4 (r * groups + j) on: row g tokens 2t, 2t + 1, row g + 8 tokens 2t, 2t + 1
    scale : by which sums are to be multiplied, beside the row scales
    places(lane, here, pitch) -> offsets
        where the lane reads in a tile of A, from its first byte; `here` tokens of `tokens` are
        there, `pitch` bytes apart where they lie in rows
    multiply(acc, smem, weights, a, a_scales, offsets, here, lane)
        acc += the packed tiles at byte `weights` times the 128 K of A at byte `a`, whose scales
        begin at byte `a_scales`
    finish(acc)
        acc = the sums, from what `multiply` has left in the lanes
    """

    sums: int
    scale: float
    places: Any
    multiply: Any
    finish: Any


# --- scales and minima of the blocks of a packed tile as float32: they multiply sums, not weights -
#
# Step 17 teaches this.


@dataclass(frozen=True, slots=True)
class BlockScales:
    """Device functions that read scales, or minima, of a packed tile's rows g and g + 8, where the
    lane is 4g + t.

    load(smem, offset, lane, half) -> `words` words
        those of the two blocks of one half, 64 K, where all of the tile begin at byte `offset`
    load_both(d, m, r, smem, tile, lane, half)
        d[r], m[r] = scales and, if there are any, minima of the packed tile at byte `tile`
    of_block(words, odd, part) -> (of row g, of row g + 8)
        float32, of the first or the second of these blocks; of its part 0 or 1 of 16 K where these
        have scales of their own
    """

    words: int
    load: Any
    load_both: Any
    of_block: Any


@cache
def block_scales(name: str) -> BlockScales:
    """The device functions of a storage format, for capture in a kernel factory."""
    tile = tile_format(name)
    scales_at, minima_at, minimum = tile.scales_at, tile.minima_at, tile.minimum

    @cuda.jit(device=True, forceinline=True)
    def load_32(smem, offset, lane, half):
        """Two float16 of row g, two of row g + 8."""
        first = offset + 16 * (lane >> 2) + 4 * half
        return load_u32(smem, first), load_u32(smem, first + 8)

    @cuda.jit(device=True, forceinline=True)
    def load_bytes(smem, offset, lane, half):
        """The same of upper bytes of float16."""
        first = offset + 8 * (lane >> 2) + 2 * half
        g, h = uint32(load_u16(smem, first)), uint32(load_u16(smem, first + 4))
        return prmt(g, 0, 0x1404), prmt(h, 0, 0x1404)

    @cuda.jit(device=True, forceinline=True)
    def of_block_32(words, odd, part):
        up = uint32(16 * odd)
        return half_to_float(uint32(words[0]) >> up), half_to_float(uint32(words[1]) >> up)

    @cuda.jit(device=True, forceinline=True)
    def load_16(smem, offset, lane, half):
        """Four float16 of row g, four of row g + 8."""
        first = offset + half * SCALES_OF_HALF + 8 * (lane >> 2)
        g, h = load_u32x2(smem, first), load_u32x2(smem, first + ROWS_APART)
        return g[0], g[1], h[0], h[1]

    @cuda.jit(device=True, forceinline=True)
    def of_block_16(words, odd, part):
        up = uint32(16 * part)
        return half_to_float(uint32(words[odd]) >> up), half_to_float(uint32(words[2 + odd]) >> up)

    load, n_words, of_block = load_32, 2, of_block_32
    if tile.group < BLOCK:
        load, n_words, of_block = load_16, 4, of_block_16
    elif tile.scale_bytes == 1:
        load = load_bytes

    @cuda.jit(device=True, forceinline=True)
    def load_both(d, m, r, smem, tile, lane, half):
        words = load(smem, tile + scales_at, lane, half)
        for i in range(n_words):
            d[r, i] = words[i]
        if minimum:
            words = load(smem, tile + minima_at, lane, half)
            for i in range(n_words):
                m[r, i] = words[i]

    return BlockScales(n_words, load, load_both, of_block)


# --- packed tiles times 16-bit A: scales multiply sums of blocks, nothing is rounded --------------
#
# An mma multiplies 16 rows of weights, 16 K and eight tokens. The weights are codes as numbers with
# an offset, such as 1024 + code and 64 + code (`steps.kernels.parts.weights.offset_numbers`). What
# the
# offsets add is taken off in the same accumulator: products of A with a tile of constants, the
# negative offsets, are what the products with the codes begin with. All rows of them are equal, so
# they serve every row tile of the warp.
#
#                      constants                            codes of a row tile
#                  K 0..15          K 16..31            K 0..15        K 16..31
#     rows g       -(1024 + zero)   -(64 + zero)        1024 + code    64 + code
#     rows g + 8   the same, or 512 with minima         1024 + code    64 + code
#
#     z = constants * A           v = z + codes * A          sum += scale * v (+ minimum * sum of A)
#
# Where a format has minima, rows g + 8 of the constants add up A instead, times the ratio of the
# units of minima and scales. The terms that cancel are up to 130 times as large as the result; in
# float32 that costs a hundredth of what rounding A to float16 costs. Step 17 teaches this.
#
# Minima, five bits and a second group of eight tokens make this long. There weights are multiplied
# by their scales and rounded to float16 instead (`scaled`), as in the lesson and in steps 11 to 14:
# all of K is one sum.

BLOCK_BYTES = 2 * BLOCK  # of a token's A


def word_of(x: float, kind: str) -> int:
    """A number that float16 or bfloat16 has, in both halves of a word."""
    if kind == "float16":
        return both(int(np.float16(x).view(np.uint16)))
    return both(int(np.float32(x).view(np.uint32)) >> 16)


@cache
def product_a16(
    name: str, kind: str, tokens: int, in_boxes: bool = False, scaled: bool = False
) -> Product:
    """The product of a storage format, for capture in a kernel factory. A is `kind`, in rows, or
    in the boxes of a tensor map. scaled: weights are multiplied by their scales and rounded to
    float16 (`steps.kernels.parts.weights.halves`), and sums are not; of float16 A alone."""
    tile, numbers, scales = tile_format(name), offset_numbers(name, kind), block_scales(name)
    tile_bytes, load, n_words = tile.tile_bytes, tile.load, storage_format_named(name).bits
    fragments, load_scales = numbers.fragments, scales.load_both
    of_block, n_scales = scales.of_block, scales.words
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
    offset = distinct != ((0, 0, 0, 0),)  # else sums of codes begin with zeros
    # in registers: minima leave none, and with eight tokens it is slower
    few = offset and len(distinct) <= 2 and not minimum
    stay = few and not scaled and (tokens == 1 or (in_boxes and groups == 2))
    form = half_format(name)
    half_words, half_scales = form.words, form.scales
    multipliers, half_fragments = form.multipliers, form.fragments
    n_half_words, n_factors = form.n_words, form.n_scales

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
        if not offset:
            return float32(0), float32(0), float32(0), float32(0)
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

    # bytes from 64 K of A to the next, and from a group of tokens to the next in boxes
    half_bytes = boxes_stride(tokens) // 2 if in_boxes else 2 * BLOCK_BYTES
    group_bytes = 8 * BOX_ROW

    @cuda.jit(device=True, forceinline=True)
    def place_in_row(a, offsets, half, odd, j):
        return a + half_bytes * half + offsets[0][j] + BLOCK_BYTES * odd

    @cuda.jit(device=True, forceinline=True)
    def place_in_box(a, offsets, half, odd, j):
        return a + half_bytes * half + offsets[0][odd] + group_bytes * j

    place = place_in_box if in_boxes else place_in_row

    @cuda.jit(device=True, forceinline=True)
    def places_in_boxes(lane, here, pitch):
        """Row r of `ldmatrix`'s matrix i: 8 K of token r, the first block's chunk i, swizzled; then
        the second block's. A box of fewer than eight has its last one in all further columns."""
        token = min(int32(lane & 7), int32(min(tokens, 8) - 1))
        first = int32(BOX_ROW * token + CHUNK * ((lane >> 3) ^ token))
        at = first, int32(first ^ BLOCK_BYTES)
        if not stay:
            return (at,)
        return at, in_registers(low, here), in_registers(high, here)

    @cuda.jit(device=True, forceinline=True)
    def places_in_rows(lane, here, pitch):
        """Row r of `ldmatrix`'s matrix i: 8 K of token r, from 8i on. The last token stands in for
        those beyond it. Then the tiles of constants."""
        first = min(int32(lane & 7), int32(here - 1)) * pitch
        second = min(int32((lane & 7) + 8), int32(here - 1)) * pitch
        first, second = int32(first + 16 * (lane >> 3)), int32(second + 16 * (lane >> 3))
        if not stay:
            return ((first, second),)
        return (first, second), in_registers(low, here), in_registers(high, here)

    @cuda.jit(device=True, forceinline=True)
    def multiply_block(acc, words, d, m, smem, a, offsets, half, odd):
        """acc += the first or the second block of a half, of the 128 K of A from byte `a` on."""
        b, z = cuda.local.array(n_b, uint32), cuda.local.array((groups, 4), float32)
        codes, step = cuda.local.array((n_codes, 4), uint32), 2 * odd
        for j in range(groups):
            at, i = place(a, offsets, half, odd, j), 4 * j
            b[i], b[i + 1], b[i + 2], b[i + 3] = ldmatrix_x4(smem, at)
        if not apart:
            if offset:
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
    def multiply_sums(acc, smem, weights, a, offsets, lane, half):
        words = cuda.local.array((PAIR, n_words), uint32)
        d = cuda.local.array((PAIR, n_scales), uint32)
        m = cuda.local.array((PAIR, n_scales), uint32)
        for r in range(PAIR):
            at = weights + r * tile_bytes
            x = load(smem, at, lane, half)
            for i in range(n_words):
                words[r, i] = x[i]
            load_scales(d, m, r, smem, at, lane, half)
        # written out, so that whatever the compiler unrolls `odd` is a constant
        multiply_block(acc, words, d, m, smem, a, offsets, half, 0)
        multiply_block(acc, words, d, m, smem, a, offsets, half, 1)

    @cuda.jit(device=True, forceinline=True)
    def multiply(acc, smem, weights, a, a_scales, offsets, here, lane):
        if apart and 1 < tokens < 16:  # written out: the compiler would leave a loop
            multiply_sums(acc, smem, weights, a, offsets, lane, 0)
            multiply_sums(acc, smem, weights, a, offsets, lane, 1)
        else:
            # Sixteen tokens need so many registers that this may not be unrolled: the compiler does
            # not know that the number is 2.
            half, halves = int32(0), int32(2 if groups == 1 else 1 + min(int32(here), 1))
            while half < halves:
                multiply_sums(acc, smem, weights, a, offsets, lane, half)
                half = int32(half + 1)

    @cuda.jit(device=True, forceinline=True)
    def multiply_half(acc, smem, weights, a, offsets, lane, half):
        words = cuda.local.array((PAIR, n_half_words), uint32)
        factors = cuda.local.array((PAIR, n_factors), uint32)
        b = cuda.local.array(n_b, uint32)
        for r in range(PAIR):
            x = half_words(smem, weights + r * tile_bytes, lane, half)
            for i in range(n_half_words):
                words[r, i] = x[i]
            y = half_scales(smem, weights + r * tile_bytes, lane, half)
            for i in range(n_factors):
                factors[r, i] = y[i]
        for odd in range(2):
            for j in range(groups):
                at, i = place(a, offsets, half, odd, j), 4 * j
                b[i], b[i + 1], b[i + 2], b[i + 3] = ldmatrix_x4(smem, at)
            for r in range(PAIR):
                d = multipliers(factors[r], odd)
                for part in range(2):
                    x = half_fragments(words[r], 2 * odd + part, d)
                    for j in range(groups):
                        i = 4 * (groups * r + j)
                        v = acc[i], acc[i + 1], acc[i + 2], acc[i + 3]
                        v = mma(x, b, j, part, v)
                        acc[i], acc[i + 1], acc[i + 2], acc[i + 3] = v

    @cuda.jit(device=True, forceinline=True)
    def as_one(a, offset):
        """a + offset, which the compiler cannot take apart. It would add `a` and each constant
        first, and no address would be a register and a constant."""
        return int32(prmt(uint32(int32(a + offset)), 0, 0x3210))

    @cuda.jit(device=True, forceinline=True)
    def multiply_scaled(acc, smem, weights, a, a_scales, offsets, here, lane):
        if in_boxes:
            first, second = offsets[0]
            offsets, a = ((as_one(a, first), as_one(a, second)),), int32(0)
        # written out, as the compiler would leave a loop
        multiply_half(acc, smem, weights, a, offsets, lane, 0)
        multiply_half(acc, smem, weights, a, offsets, lane, 1)

    @cuda.jit(device=True, forceinline=True)
    def finish(acc):
        pass

    places = places_in_boxes if in_boxes else places_in_rows
    if scaled:
        return Product(4 * PAIR * groups, 1.0, places, multiply_scaled, finish)
    return Product(4 * PAIR * groups, HALF_SCALE / unit, places, multiply, finish)


# --- packed tiles times Q8_1 A: exact sums of a block of 32 K, then the scales of both ------------
#
# One mma multiplies 16 rows of weights, 32 K and eight tokens: a block. Its integer sums become
# float32, times the scale of the weights' block and that of A's. Where 16 K have scales of their
# own, the lower and the upper half of a block are two mma, each with zeros for the other half of A.
#
# One or two tokens repeat in the eight columns, so the four lanes of a quad have the same sums.
# Each then scales those of another block of K, a quarter of the work, and at the end the quad adds
# up. Of four tokens two lanes have the same.
#
# A lies as `steps.kernels.parts.activations.layouts.q8_1_mma_order` has it: codes [16
# K][token][16], scales and sums [32 K][token][2]. Step 7 teaches the mma, step 17 this use of it.

SCALE_BYTES = 8  # of a block of a token: d and s


@cache
def product_a8(name: str, tokens: int) -> Product:
    """The product of a storage format, for capture in a kernel factory. Not of c4m: what a minimum
    of 16 would be multiplied by is the sum of half a block of A, which Q8_1 does not have."""
    tile, scales = tile_format(name), block_scales(name)
    tile_bytes, scales_at, minima_at = tile.tile_bytes, tile.scales_at, tile.minima_at
    load, fragments, minimum = tile.load, tile.fragments, tile.minimum
    load_scales, load_both = scales.load, scales.load_both
    of_block, n_scales = scales.of_block, scales.words
    apart = tile.group < BLOCK  # 16 K have scales of their own
    assert not (apart and minimum)
    groups = max(1, tokens // 8)  # of eight tokens, the columns of an mma
    columns = min(2, tokens)  # of a lane; a single token is in all columns
    # Lanes of a quad that have the same sums; where 16 K have scales of their own, tokens do not
    # repeat
    copies = 1 if apart else {1: 4, 2: 4, 4: 2}.get(tokens, 1)
    repeats = tokens - 1 if copies > 1 else 7
    mma = mma_m16n8k32_s8 if tile.signed else mma_m16n8k32_u8
    # Packed tiles hold scales and minima in units of their own. Times these, sums are C but for the
    # row scale: a large A overflows nothing on the way.
    unit, unit_of_minima = float32(HALF_SCALE / tile.code_scale), float32(MINIMUM_SCALE)

    @cuda.jit(device=True, forceinline=True)
    def times(u, odd, b0, b1):
        """The integer sums of the first or the second block of 64 K; b0, b1: its tokens."""
        i, zero = 4 * odd, int32(0)
        return mma(u[i], u[i + 1], u[i + 2], u[i + 3], b0, b1, zero, zero, zero, zero)

    @cuda.jit(device=True, forceinline=True)
    def by(unit, scales):
        """Scales in C's unit. Those of a tiny A would lose bits: a float32 is 1e-38 or more."""
        return scales[0] * unit, scales[1] * unit

    @cuda.jit(device=True, forceinline=True)
    def add_scaled(acc, first, v, d, m, e, s):
        """acc += the sums of a block, with scales and minima of rows g and g + 8, and scales and
        sums of A of the lane's tokens."""
        for column in range(columns):
            acc[first + column] += float32(v[column]) * (d[0] * e[column])
            acc[first + 2 + column] += float32(v[2 + column]) * (d[1] * e[column])
            if minimum:
                acc[first + column] += m[0] * s[column]
                acc[first + 2 + column] += m[1] * s[column]

    @cuda.jit(device=True, forceinline=True)
    def places(lane, here, pitch):
        """Row r of `ldmatrix`'s matrix i, 16 K: of eight tokens chunks 0 to 3, or of sixteen
        chunks 0 and 1 of the first eight and of the others. Then the scales of the lane's tokens.
        The last token stands in for those beyond it, and few tokens repeat."""
        matrix, last = int32(lane >> 3), int32(here - 1)
        chunk = matrix & 1 if groups == 2 else matrix
        token = (lane & 7) + 8 * (matrix >> 1) if groups == 2 else lane & repeats
        codes = int32((chunk * here + min(int32(token), last)) * CHUNK)
        first = int32(2 * (lane & 3) & repeats)
        return (
            codes,
            int32(min(first, last) * SCALE_BYTES),
            int32(min(int32(first + 1), last) * SCALE_BYTES),
            int32(min(int32(first + 8), last) * SCALE_BYTES),
            int32(min(int32(first + 9), last) * SCALE_BYTES),
        )

    @cuda.jit(device=True, forceinline=True)
    def multiply_block(acc, u, d, m, b, smem, a, a_scales, offsets, here, odd):
        """acc += the first or the second block of 64 K, whose A begins at bytes `a` and `a_scales`;
        b: what `ldmatrix` has read of A."""
        e, s = cuda.local.array((groups, 2), float32), cuda.local.array((groups, 2), float32)
        if groups == 2 or odd == 0:
            at = a + offsets[0] + 2 * CHUNK * here * odd
            b[0], b[1], b[2], b[3] = ldmatrix_x4(smem, at)
        for j in range(groups):
            for column in range(columns):
                at = a_scales + offsets[1 + 2 * j + column] + SCALE_BYTES * here * odd
                if minimum:
                    e[j, column], s[j, column] = load_f32x2(smem, at)
                else:
                    e[j, column] = load_f32(smem, at)
        for r in range(PAIR):
            for j in range(groups):
                i, k = 4 * (groups * r + j), 2 * (j if groups == 2 else odd)
                b0, upper = b[k], by(unit, of_block(d[r], odd, 1))
                if apart:
                    v = times(u[r], odd, b0, uint32(0))
                    add_scaled(acc, i, v, by(unit, of_block(d[r], odd, 0)), upper, e[j], s[j])
                    b0 = uint32(0)
                v = times(u[r], odd, b0, b[k + 1])
                minima = by(unit_of_minima, of_block(m[r], odd, 1))
                add_scaled(acc, i, v, upper, minima, e[j], s[j])

    @cuda.jit(device=True, forceinline=True)
    def multiply_half(acc, smem, weights, a, a_scales, offsets, here, lane, half):
        u, b = cuda.local.array((PAIR, 8), uint32), cuda.local.array(4, uint32)
        d = cuda.local.array((PAIR, n_scales), uint32)
        m = cuda.local.array((PAIR, n_scales), uint32)
        for r in range(PAIR):
            at = weights + r * tile_bytes
            words = fragments(load(smem, at, lane, half))
            for i in range(8):
                u[r, i] = words[i]
            load_both(d, m, r, smem, at, lane, half)
        # written out, so that whatever the compiler unrolls `odd` is a constant
        at, at_scales = a + 4 * CHUNK * here * half, a_scales + 2 * SCALE_BYTES * here * half
        multiply_block(acc, u, d, m, b, smem, at, at_scales, offsets, here, 0)
        multiply_block(acc, u, d, m, b, smem, at, at_scales, offsets, here, 1)

    @cuda.jit(device=True, forceinline=True)
    def multiply(acc, smem, weights, a, a_scales, offsets, here, lane):
        multiply_half(acc, smem, weights, a, a_scales, offsets, here, lane, 0)
        multiply_half(acc, smem, weights, a, a_scales, offsets, here, lane, 1)

    @cuda.jit(device=True, forceinline=True)
    def keep(v_of, smem, weights, a, offsets, here, lane, copy, half):
        """v_of = the sums of the block that the lane scales, where this half has it."""
        b = cuda.local.array(4, uint32)
        b[0], b[1], b[2], b[3] = ldmatrix_x4(smem, a + offsets[0] + 4 * CHUNK * here * half)
        for r in range(PAIR):
            u = fragments(load(smem, weights + r * tile_bytes, lane, half))
            for odd in range(2):
                v = times(u, odd, b[2 * odd], b[2 * odd + 1])
                block = (2 * half + odd) % copies
                own = copy == block or block == 0
                for i in range(0, 4, 3 - columns):
                    v_of[r, i] = v[i] if own else v_of[r, i]

    @cuda.jit(device=True, forceinline=True)
    def add_block(acc, v_of, smem, weights, a_scales, offsets, here, lane, block):
        e, s = cuda.local.array(2, float32), cuda.local.array(2, float32)
        for column in range(columns):
            at = a_scales + offsets[1 + column] + SCALE_BYTES * here * block
            if minimum:
                e[column], s[column] = load_f32x2(smem, at)
            else:
                e[column] = load_f32(smem, at)
        for r in range(PAIR):
            at, half, odd = weights + r * tile_bytes, int32(block >> 1), int32(block & 1)
            d = by(unit, of_block(load_scales(smem, at + scales_at, lane, half), odd, 1))
            m = d
            if minimum:
                words = load_scales(smem, at + minima_at, lane, half)
                m = by(unit_of_minima, of_block(words, odd, 1))
            add_scaled(acc, 4 * r, v_of[r], d, m, e, s)

    @cuda.jit(device=True, forceinline=True)
    def multiply_few(acc, smem, weights, a, a_scales, offsets, here, lane):
        """Of one, two or four tokens, which repeat in the columns: of the lanes of a quad with the
        same sums each keeps and scales those of another block."""
        v_of = cuda.local.array((PAIR, 4), int32)
        copy = int32((lane & 3) // (4 // copies))
        keep(v_of, smem, weights, a, offsets, here, lane, copy, 0)
        if copies == 2:
            add_block(acc, v_of, smem, weights, a_scales, offsets, here, lane, copy)
        keep(v_of, smem, weights, a, offsets, here, lane, copy, 1)
        block = int32(copy + BLOCKS - copies)
        add_block(acc, v_of, smem, weights, a_scales, offsets, here, lane, block)

    @cuda.jit(device=True, forceinline=True)
    def finish(acc):
        for r in range(0, 4 * PAIR * groups, 3 - columns):
            if copies == 4:
                acc[r] += shfl_xor(acc[r], 1)
            if copies > 1:
                acc[r] += shfl_xor(acc[r], 2)

    few = multiply_few if copies > 1 else multiply
    return Product(4 * PAIR * groups, 1.0, places, few, finish)
