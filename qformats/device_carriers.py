"""Records whose scales serve 16 elements each (`qformats.carriers`), as kernels read them.

`tile_format` and `half_format` are those of `qformats.device` for the records of all carriers: for
scales of 32 elements they are just these. 16 K are what one mma of float16 multiplies, so that a
scale for each costs it three instructions more a block and row; int8's have 32 K, and are done
twice (`steps.decode_products`).
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import cuda, uint32

from qformats import device
from qformats.carriers import Carrier, held
from qformats.device import HIGH_NIBBLES, SIXTEENTH, HalfFormat, TileFormat
from qformats.repack import CODE_UNIT, MINIMUM_UNIT, TILE_K, TILE_ROWS
from steps.instructions import and_xor, hfma2, hmul2, load_u32x2, load_u32x4, prmt

LOWEST_TWO = 0x0C0C0C0C  # the two bits below the upper nibble of each byte
HALF_SCALES = 128  # bytes of the scales of one half: 16 rows, 4 groups
ROWS_APART = 64  # bytes from the scales of row g to those of row g + 8


@cache
def tile_format(name: str) -> TileFormat:
    """The record of a format or carrier, for capture in a kernel factory."""
    kind = held(name)
    if not isinstance(kind, Carrier):
        return device.tile_format(name)
    minimum, bits = "m" in (kind.dtype.names or ()), kind.bits
    record = kind.block_bytes * TILE_ROWS * TILE_K // 32
    bits_at = TILE_ROWS * TILE_K // 2
    scales_at = TILE_ROWS * TILE_K * bits // 8

    @cuda.jit(device=True, forceinline=True)
    def load_4(m, at, lane, half):
        return load_u32x4(m, at + half * 512 + lane * 16)

    @cuda.jit(device=True, forceinline=True)
    def load_6(m, at, lane, half):
        w0, w1, w2, w3 = load_u32x4(m, at + half * 512 + lane * 16)
        b0, b1 = load_u32x2(m, at + bits_at + half * 256 + lane * 8)
        return w0, w1, w2, w3, b0, b1

    @cuda.jit(device=True, forceinline=True)
    def low(word):
        return uint32(uint32(word << uint32(4)) & uint32(HIGH_NIBBLES))

    @cuda.jit(device=True, forceinline=True)
    def high(word):
        return uint32(uint32(word) & uint32(HIGH_NIBBLES))

    @cuda.jit(device=True, forceinline=True)
    def fragments_4(w):
        w0, w1, w2, w3 = w
        return low(w0), low(w1), high(w0), high(w1), low(w2), low(w3), high(w2), high(w3)

    @cuda.jit(device=True, forceinline=True)
    def two(bits, count):
        """The lowest two bits of four codes, `count` bits up, which may be down."""
        up = uint32(bits) << uint32(count) if count >= 0 else uint32(bits) >> uint32(-count)
        return uint32(up & uint32(LOWEST_TWO))

    @cuda.jit(device=True, forceinline=True)
    def fragments_6(w):
        w0, w1, w2, w3, b0, b1 = w
        return (
            low(w0) | two(b0, 2),
            low(w1) | two(b0, 0),
            high(w0) | two(b0, -2),
            high(w1) | two(b0, -4),
            low(w2) | two(b1, 2),
            low(w3) | two(b1, 0),
            high(w2) | two(b1, -2),
            high(w3) | two(b1, -4),
        )

    return TileFormat(
        record_bytes=record,
        bits_at=bits_at,
        scales_at=scales_at,
        minima_at=record - 2 * HALF_SCALES,
        unit=CODE_UNIT[bits],
        signed=not minimum,
        minimum=minimum,
        load={4: load_4, 6: load_6}[bits],
        fragments={4: fragments_4, 6: fragments_6}[bits],
        group=kind.group,
    )


@cache
def half_format(name: str) -> HalfFormat:
    """The float16 weights of a format or carrier, for capture in a kernel factory."""
    kind = held(name)
    if not isinstance(kind, Carrier):
        return device.half_format(name)
    tile = tile_format(name)
    scales_at, minima_at, minimum = tile.scales_at, tile.minima_at, tile.minimum
    minus_zero, flip = (0x8000 | kind.zero) * 0x00010001, kind.zero * 0x00010001
    minimum_unit = int(np.float16(MINIMUM_UNIT).view(np.uint16)) * 0x00010001

    @cuda.jit(device=True, forceinline=True)
    def scales_alone(m, at, lane, half):
        """Of two blocks: those of row g, then those of row g + 8."""
        row_g = at + scales_at + half * HALF_SCALES + (lane >> 2) * 8
        g0, g1 = load_u32x2(m, row_g)
        h0, h1 = load_u32x2(m, row_g + ROWS_APART)
        return g0, g1, h0, h1

    @cuda.jit(device=True, forceinline=True)
    def scales_and_minima(m, at, lane, half):
        d0, d1, d2, d3 = scales_alone(m, at, lane, half)
        m0, m1, m2, m3 = scales_alone(m, at + minima_at - scales_at, lane, half)
        return d0, d1, d2, d3, m0, m1, m2, m3

    @cuda.jit(device=True, forceinline=True)
    def both(word):
        """Each of two halves, twice: of the lower 16 K of a block, and of the upper."""
        return prmt(word, word, 0x1010), prmt(word, word, 0x3232)

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
    def codes_4(w, step, odd, row):
        """Nibbles of bytes 0 and 2, or of 1 and 3, where they are: the upper ones 4 bits up."""
        word, up = uint32(w[2 * (step >> 1) + row]) >> uint32(8 * odd), 4 * (step & 1)
        return and_xor(word, 0x000F000F << up, flip << up)

    @cuda.jit(device=True, forceinline=True)
    def codes_6(w, step, odd, row):
        """A nibble, two bits up, and below it the lowest two."""
        word, up = uint32(w[2 * (step >> 1) + row]), 4 * (step & 1)
        word = word >> uint32(6) if odd else word << uint32(2)
        two = uint32(w[4 + (step >> 1)]) >> uint32(8 * odd + 2 * row)
        return and_xor(word, 0x003C003C << up, and_xor(two, 0x00030003 << up, flip << up))

    codes = {4: codes_4, 6: codes_6}[kind.bits]

    @cuda.jit(device=True, forceinline=True)
    def fragments(w, step, multipliers):
        of_g, of_h = multipliers
        x, p = (of_g[2], of_g[3]) if step & 1 else (of_g[0], of_g[1])
        y, q = (of_h[2], of_h[3]) if step & 1 else (of_h[0], of_h[1])
        return (
            hfma2(codes(w, step, 0, 0), x, p),
            hfma2(codes(w, step, 0, 1), y, q),
            hfma2(codes(w, step, 1, 0), x, p),
            hfma2(codes(w, step, 1, 1), y, q),
        )

    return HalfFormat(
        record_bytes=tile.record_bytes,
        words=tile.load,
        scales=scales_and_minima if minimum else scales_alone,
        multipliers=multipliers,
        fragments=fragments,
        n_words=kind.bits,
        n_scales=8 if minimum else 4,
    )
