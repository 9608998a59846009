"""Packed tiles whose blocks are none of ggml's (`qformats.storage`): how kernels read them.

`tile_format` and `half_format` serve every storage format; for the weight formats they are those of
`steps.kernels.parts.weights.codes` and `halves`. The packed formats differ in two ways:

a scale for 16 elements: a float16 mma multiplies 16 K, so it costs only three instructions more a
    block and row. An int8 mma multiplies 32 K, so each block takes two, with zeros for the other 16
    K (`steps.kernels.decode.product`);
a sign, two bits of exponent and one of fraction (MXFP4): they are those of a float16, so masks
    make numbers of codes. A register of two costs one and a half masks and 0.75 multiplications;
    one of four int8 codes, which are no such numbers, 7.5 instructions.

Step 11 teaches this: it is the first step on tensor cores that takes these formats.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
from numba import cuda, uint32, uint64

from qformats.repack import CODE_SCALE, E2M1_PLACES, MINIMUM_SCALE, TILE_K, TILE_ROWS
from qformats.storage import PackedFormat, storage_format_named
from steps.instructions import (
    and_xor,
    hfma2,
    high2half2,
    hmul2,
    load_u16,
    load_u32x2,
    low2half2,
    prmt,
)
from steps.kernels.parts.weights import codes, halves
from steps.kernels.parts.weights.codes import TileFormat, fragments_4, highs, load_4, lows, shifted
from steps.kernels.parts.weights.halves import LOWER_BYTES, SIXTEENTH, HalfFormat, two_of_four

LOWEST_TWO = 0x0C0C0C0C  # the two bits below the upper nibble of each byte
SCALES_OF_HALF = 128  # bytes of the scales of one half: 16 rows, 4 groups
ROWS_APART = 64  # bytes from the scales of row g to those of row g + 8


@cache
def tile_format(name: str) -> TileFormat:
    """The packed tile of a storage format, for capture in a kernel factory."""
    kind = storage_format_named(name)
    if not isinstance(kind, PackedFormat):
        return codes.tile_format(name)
    if name == "e2m1":
        return _e2m1()
    minimum, bits = "m" in (kind.dtype.names or ()), kind.bits
    tile_bytes = kind.block_bytes * TILE_ROWS * TILE_K // 32
    bits_at = TILE_ROWS * TILE_K // 2
    scales_at = TILE_ROWS * TILE_K * bits // 8

    @cuda.jit(device=True, forceinline=True)
    def load_6(m, offset, lane, half):
        w0, w1, w2, w3 = load_4(m, offset, lane, half)
        b0, b1 = load_u32x2(m, offset + bits_at + half * 256 + lane * 8)
        return w0, w1, w2, w3, b0, b1

    @cuda.jit(device=True, forceinline=True)
    def two(bits, up):
        """The lowest two bits of four codes, so many bits up."""
        return uint32(shifted(uint32(bits), up) & uint32(LOWEST_TWO))

    @cuda.jit(device=True, forceinline=True)
    def fragments_6(w):
        w0, w1, w2, w3, b0, b1 = w
        return (
            lows(w0) | two(b0, 2),
            lows(w1) | two(b0, 0),
            highs(w0) | two(b0, -2),
            highs(w1) | two(b0, -4),
            lows(w2) | two(b1, 2),
            lows(w3) | two(b1, 0),
            highs(w2) | two(b1, -2),
            highs(w3) | two(b1, -4),
        )

    return TileFormat(
        tile_bytes=tile_bytes,
        bits_at=bits_at,
        scales_at=scales_at,
        minima_at=tile_bytes - 2 * SCALES_OF_HALF,
        code_scale=CODE_SCALE[bits],
        signed=not minimum,
        minimum=minimum,
        load={4: load_4, 6: load_6}[bits],
        fragments={4: fragments_4, 6: fragments_6}[bits],
        group=kind.group,
    )


@cache
def half_format(name: str) -> HalfFormat:
    """The float16 weights of a storage format, for capture in a kernel factory."""
    kind = storage_format_named(name)
    if not isinstance(kind, PackedFormat):
        return halves.half_format(name)
    tile = tile_format(name)
    if name == "e2m1":
        return _half_e2m1(tile)
    scales_at, minima_at, minimum = tile.scales_at, tile.minima_at, tile.minimum
    minus_zero, flip = (0x8000 | kind.zero) * 0x00010001, kind.zero * 0x00010001
    minimum_unit = int(np.float16(MINIMUM_SCALE).view(np.uint16)) * 0x00010001

    @cuda.jit(device=True, forceinline=True)
    def scales_alone(m, offset, lane, half):
        """Of two blocks: those of row g, then those of row g + 8."""
        row_g = offset + scales_at + half * SCALES_OF_HALF + (lane >> 2) * 8
        g0, g1 = load_u32x2(m, row_g)
        h0, h1 = load_u32x2(m, row_g + ROWS_APART)
        return g0, g1, h0, h1

    @cuda.jit(device=True, forceinline=True)
    def scales_and_minima(m, offset, lane, half):
        d0, d1, d2, d3 = scales_alone(m, offset, lane, half)
        m0, m1, m2, m3 = scales_alone(m, offset + minima_at - scales_at, lane, half)
        return d0, d1, d2, d3, m0, m1, m2, m3

    @cuda.jit(device=True, forceinline=True)
    def both(word):
        """Each of two halves, twice: of the lower 16 K of a block, and of the upper."""
        return low2half2(word), high2half2(word)

    @cuda.jit(device=True, forceinline=True)
    def of_row(scales, row, block):
        """(d, offset) of codes where they are, and of codes 4 bits up."""
        d, e = both(scales[2 * row + block])
        if minimum:
            m, n = both(scales[4 + 2 * row + block])
            return d, hmul2(m, minimum_unit), hmul2(e, SIXTEENTH), hmul2(n, minimum_unit)
        return d, hmul2(d, minus_zero), hmul2(e, SIXTEENTH), hmul2(e, minus_zero)

    @cuda.jit(device=True, forceinline=True)
    def multipliers(scales, block):
        return of_row(scales, 0, block), of_row(scales, 1, block)

    @cuda.jit(device=True, forceinline=True)
    def two_of_six(words, block, row, up, odd):
        """A nibble, two bits up, and below it the lowest two."""
        word, shift = shifted(uint32(words[2 * block + row]), -6 if odd else 2), 4 * up
        two = uint32(words[4 + block]) >> uint32(8 * odd + 2 * row)
        return and_xor(word, 0x003C003C << shift, and_xor(two, 0x00030003 << shift, flip << shift))

    codes = two_of_four(flip) if kind.bits == 4 else two_of_six

    @cuda.jit(device=True, forceinline=True)
    def fragments(w, step, multipliers):
        of_g, of_h = multipliers
        x, p = (of_g[2], of_g[3]) if step & 1 else (of_g[0], of_g[1])
        y, q = (of_h[2], of_h[3]) if step & 1 else (of_h[0], of_h[1])
        return (
            hfma2(codes(w, step >> 1, 0, step & 1, 0), x, p),
            hfma2(codes(w, step >> 1, 1, step & 1, 0), y, q),
            hfma2(codes(w, step >> 1, 0, step & 1, 1), x, p),
            hfma2(codes(w, step >> 1, 1, step & 1, 1), y, q),
        )

    return HalfFormat(
        tile_bytes=tile.tile_bytes,
        words=tile.load,
        scales=scales_and_minima if minimum else scales_alone,
        multipliers=multipliers,
        fragments=fragments,
        n_words=kind.bits,
        n_scales=8 if minimum else 4,
    )


# --- E2M1 -----------------------------------------------------------------------------------------
#
# Two bits of a code are an exponent and one a fraction. Where they are the lowest two bits of a
# number's exponent and the highest one of its fraction, and its other bits are zero, the number is
# the level times a power of two, as numbers with an exponent of 0 are subnormal.
#
#                sign exponent  fraction
#     float16      s  000ee     m000000000      2^-15 times the level
#     bfloat16     s  000000ee  m000000         2^-127 times
SIGNS: Final = 0x80008000
SIZES: Final = 0x00070007


@cache
def e2m1_numbers(lowest: int) -> Any:
    """two(word, second, odd): the numbers of two codes, of the first four of a half of the word or
    of the others, as `E2M1_PLACES` has them, of bytes 0 and 2 or of 1 and 3 (odd). lowest: the bit
    of the lowest bit of the fraction that a code has.

    Shifts to the left are multiplications, for which a GPU has other units than for masks: those
    are what is scarce."""

    def maker(size_at: int, sign_at: int) -> Any:
        up, sign_up = lowest - size_at, 15 - sign_at
        sizes, both = SIZES << lowest, SIZES << lowest | SIGNS
        before = SIZES << size_at | SIGNS >> 15 - sign_at
        at_once = up >= 0 and abs(up - sign_up) >= 3  # then copies do not meet
        factor = uint64(2 ** max(up, 0) + 2**sign_up)

        @cuda.jit(device=True, forceinline=True)
        def alike(word):
            return uint32(shifted(word, up) & uint32(both))

        @cuda.jit(device=True, forceinline=True)
        def by_a_product(word):
            copies = uint64(uint32(word) & uint32(before)) * factor
            return uint32(uint32(copies & uint64(0xFFFFFFFF)) & uint32(both))

        @cuda.jit(device=True, forceinline=True)
        def apart(word):
            sign = uint32(shifted(word, sign_up) & uint32(SIGNS))
            return and_xor(shifted(word, up), sizes, sign)

        return alike if up == sign_up else by_a_product if at_once else apart

    first, second_, third, fourth = (maker(*places) for places in E2M1_PLACES)

    @cuda.jit(device=True, forceinline=True)
    def two(word, second, odd):
        if second:
            return fourth(word) if odd else third(word)
        return second_(word) if odd else first(word)

    return two


E2M1_HALVES: Final = e2m1_numbers(9)
"""Float16 numbers, 2^-15 times levels."""


def _e2m1() -> TileFormat:
    halves, to_integers, around = E2M1_HALVES, 0x78007800, 0x66006600  # 2^15; 1536

    @cuda.jit(device=True, forceinline=True)
    def four(word, second):
        """Of 1536 + level the lower byte is the level."""
        even = hfma2(halves(word, second, 0), to_integers, around)
        odd = hfma2(halves(word, second, 1), to_integers, around)
        return prmt(even, odd, LOWER_BYTES)

    @cuda.jit(device=True, forceinline=True)
    def fragments(w):
        return (
            four(w[0], 0),
            four(w[1], 0),
            four(w[0], 1),
            four(w[1], 1),
            four(w[2], 0),
            four(w[3], 0),
            four(w[2], 1),
            four(w[3], 1),
        )

    scales_at = TILE_ROWS * TILE_K // 2
    return TileFormat(
        tile_bytes=storage_format_named("e2m1").block_bytes * TILE_ROWS * TILE_K // 32,
        bits_at=scales_at,
        scales_at=scales_at,
        minima_at=scales_at,
        code_scale=1,
        signed=True,
        minimum=False,
        load=load_4,
        fragments=fragments,
        scale_bytes=1,
    )


def _half_e2m1(tile: TileFormat) -> HalfFormat:
    scales_at, halves = tile.scales_at, E2M1_HALVES
    two_to_minus_9 = 0x18001800  # so that products are multiples of 2^-24, as those of other codes

    @cuda.jit(device=True, forceinline=True)
    def scales(m, offset, lane, half):
        row_g = offset + scales_at + (lane >> 2) * 8 + 2 * half
        return uint32(load_u16(m, row_g)), uint32(load_u16(m, row_g + 4))

    @cuda.jit(device=True, forceinline=True)
    def multipliers(scales, block):
        upper = 0x1414 if block else 0x0404
        return (
            hmul2(prmt(scales[0], 0, upper), two_to_minus_9),
            hmul2(prmt(scales[1], 0, upper), two_to_minus_9),
        )

    @cuda.jit(device=True, forceinline=True)
    def fragments(w, step, multipliers):
        g, h = w[2 * (step >> 1)], w[2 * (step >> 1) + 1]
        of_g, of_h = multipliers
        return (
            hmul2(halves(g, step & 1, 0), of_g),
            hmul2(halves(h, step & 1, 0), of_h),
            hmul2(halves(g, step & 1, 1), of_g),
            hmul2(halves(h, step & 1, 1), of_h),
        )

    return HalfFormat(
        tile_bytes=tile.tile_bytes,
        words=tile.load,
        scales=scales,
        multipliers=multipliers,
        fragments=fragments,
        n_words=4,
        n_scales=2,
    )
