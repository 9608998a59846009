"""Packed tiles times Q8_1 A: exact sums of a block of 32 K, then the scales of both.

One mma multiplies 16 rows of weights, 32 K and eight tokens: a block. Its integer sums become
float32, times the scale of the weights' block and that of A's. Where 16 K have scales of their own,
the lower and the upper half of a block are two mma, each with zeros for the other half of A.

A single token is in all eight columns, so the four lanes of a quad have the same sums. Each then
scales those of another block of K, a quarter of the work, and at the end the quad adds up.

A lies as `steps.kernels.parts.activations.layouts.q8_1_mma_order` has it: codes [16 K][token][16],
scales and sums [32 K][token][2]. Step 7 teaches the mma, step 17 this use of it.
"""

from __future__ import annotations

from functools import cache

from numba import cuda, float32, int32, uint32

from qformats import BLOCK
from qformats.repack import CHUNK, HALF_SCALE, MINIMUM_SCALE
from steps.instructions import (
    ldmatrix_x4,
    load_f32,
    load_f32x2,
    mma_m16n8k32_s8,
    mma_m16n8k32_u8,
    shfl_xor,
)
from steps.kernels.decode.block_scales import block_scales
from steps.kernels.decode.product import PAIR, Product
from steps.kernels.parts.weights.storage_formats import tile_format

SCALE_BYTES = 8  # of a block of a token: d and s


@cache
def product_a8(name: str, tokens: int) -> Product:
    """The product of a storage format, for capture in a kernel factory. Not of c4m: what a minimum
    of 16 would be multiplied by is the sum of half a block of A, which Q8_1 does not have."""
    tile, scales = tile_format(name), block_scales(name)
    tile_bytes, scales_at, minima_at = tile.tile_bytes, tile.scales_at, tile.minima_at
    load, fragments, minimum = tile.load, tile.fragments, tile.minimum
    load_scales, of_block, n_scales = scales.load, scales.of_block, scales.words
    apart = tile.group < BLOCK  # 16 K have scales of their own
    assert not (apart and minimum)
    groups = max(1, tokens // 8)  # of eight tokens, the columns of an mma
    columns = min(2, tokens)  # of a lane; a single token is in all columns
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
        The last token stands in for those beyond it."""
        matrix, last = int32(lane >> 3), int32(here - 1)
        chunk = matrix & 1 if groups == 2 else matrix
        token = (lane & 7) + 8 * (matrix >> 1) if groups == 2 else lane & 7
        codes = int32((chunk * here + min(int32(token), last)) * CHUNK)
        first = int32(2 * (lane & 3))
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
    def multiply(acc, smem, weights, a, a_scales, offsets, here, lane):
        u, b = cuda.local.array((PAIR, 8), uint32), cuda.local.array(4, uint32)
        d = cuda.local.array((PAIR, n_scales), uint32)
        m = cuda.local.array((PAIR, n_scales), uint32)
        for half in range(2):
            for r in range(PAIR):
                at = weights + r * tile_bytes
                words = fragments(load(smem, at, lane, half))
                for i in range(8):
                    u[r, i] = words[i]
                scales = load_scales(smem, at + scales_at, lane, half)
                for i in range(n_scales):
                    d[r, i] = scales[i]
                if minimum:
                    minima = load_scales(smem, at + minima_at, lane, half)
                    for i in range(n_scales):
                        m[r, i] = minima[i]
            # written out, so that whatever the compiler unrolls `odd` is a constant
            at, at_scales = a + 4 * CHUNK * here * half, a_scales + 2 * SCALE_BYTES * here * half
            multiply_block(acc, u, d, m, b, smem, at, at_scales, offsets, here, 0)
            multiply_block(acc, u, d, m, b, smem, at, at_scales, offsets, here, 1)

    @cuda.jit(device=True, forceinline=True)
    def multiply_one(acc, smem, weights, a, a_scales, offsets, here, lane):
        """Of one token, which is in all columns: lane t of a quad keeps the sums of block t, and
        only these are scaled."""
        v_of, b = cuda.local.array((PAIR, 2), int32), cuda.local.array(4, uint32)
        quad = int32(lane & 3)
        for half in range(2):
            b[0], b[1], b[2], b[3] = ldmatrix_x4(smem, a + offsets[0] + 4 * CHUNK * half)
            for r in range(PAIR):
                u = fragments(load(smem, weights + r * tile_bytes, lane, half))
                for odd in range(2):
                    v = times(u, odd, b[2 * odd], b[2 * odd + 1])
                    own = quad == 2 * half + odd
                    v_of[r, 0] = v[0] if own or half + odd == 0 else v_of[r, 0]
                    v_of[r, 1] = v[2] if own or half + odd == 0 else v_of[r, 1]
        e, s = load_f32x2(smem, a_scales + SCALE_BYTES * quad)
        for r in range(PAIR):
            at, half, odd = weights + r * tile_bytes, int32(quad >> 1), int32(quad & 1)
            d = by(unit, of_block(load_scales(smem, at + scales_at, lane, half), odd, 1))
            acc[4 * r] += float32(v_of[r, 0]) * (d[0] * e)
            acc[4 * r + 2] += float32(v_of[r, 1]) * (d[1] * e)
            if minimum:
                words = load_scales(smem, at + minima_at, lane, half)
                m = by(unit_of_minima, of_block(words, odd, 1))
                acc[4 * r] += m[0] * s
                acc[4 * r + 2] += m[1] * s

    one = tokens == 1 and not apart

    @cuda.jit(device=True, forceinline=True)
    def finish(acc):
        if one:
            for r in range(0, 4 * PAIR, 2):
                acc[r] += shfl_xor(acc[r], 1)
                acc[r] += shfl_xor(acc[r], 2)

    return Product(4 * PAIR * groups, 1.0, places, multiply_one if one else multiply, finish)
