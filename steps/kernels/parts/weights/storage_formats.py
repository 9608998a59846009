"""Packed tiles whose blocks are none of ggml's (`qformats.storage`): how kernels read them.

`tile_format` and `half_format` serve every storage format; for the weight formats they are those of
`steps.kernels.parts.weights.codes` and `halves`. The packed formats differ in two ways:

a scale for 16 elements: a float16 mma multiplies 16 K, so it costs only three instructions more a
    block and row. An int8 mma multiplies 32 K, so each block takes two, with zeros for the other 16
    K (`steps.kernels.decode.product`);
three codes of 5 bits in 16 bits (MXFP4): in two of three places a mask finds a code, in the third
    it takes a shift besides. The sixteenth of a lane's pairs of codes is gathered from the bits
    that the others leave. A register costs 2.8 instructions; it is 4.3 where fifth bits lie apart.

Step 11 teaches this: it is the first step on tensor cores that takes these formats.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import cuda, uint32

from qformats.repack import CODE_SCALE, MINIMUM_SCALE, TILE_K, TILE_ROWS
from qformats.storage import PackedFormat, storage_format_named
from steps.instructions import and_xor, hfma2, hmul2, load_u16, load_u32x2, prmt
from steps.kernels.parts.weights import codes, halves
from steps.kernels.parts.weights.codes import TileFormat, fragments_4, highs, load_4, lows, shifted
from steps.kernels.parts.weights.halves import SIXTEENTH, HalfFormat, two_of_four

LOWEST_TWO = 0x0C0C0C0C  # the two bits below the upper nibble of each byte
SCALES_OF_HALF = 128  # bytes of the scales of one half: 16 rows, 4 groups
ROWS_APART = 64  # bytes from the scales of row g to those of row g + 8


@cache
def tile_format(name: str) -> TileFormat:
    """The packed tile of a storage format, for capture in a kernel factory."""
    kind = storage_format_named(name)
    if not isinstance(kind, PackedFormat):
        return codes.tile_format(name)
    if kind.bits == 5:
        return _fives()
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
    if kind.bits == 5:
        return _half_fives(tile)
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


# --- three codes of 5 bits to 16 bits -------------------------------------------------------------
LAST = 15  # of the sixteen pairs of a lane: it has the spare bit of each word


@cuda.jit(device=True, forceinline=True)
def last_pair(w):
    """Of five words the bits 15 and 31, as two codes in the lowest bits of the halves."""
    x = uint32(0)
    for i in range(5):
        x = and_xor(uint32(w[i]) >> uint32(15 - i), 0x00010001 << i, x)
    return uint32(x)


def _fives() -> TileFormat:
    old = codes.tile_format("q5_0")  # in which a lane's five words lie alike

    @cuda.jit(device=True, forceinline=True)
    def pair(w, n, bit):
        """Pair n, moved so that its lower code begins at bit `bit`: other bits are to be masked."""
        if n == LAST:
            return uint32(last_pair(w) << uint32(bit))
        return shifted(uint32(w[n // 3]), bit - n % 3 * 5)

    @cuda.jit(device=True, forceinline=True)
    def four(w, n):
        """Bytes 0 and 2 of pair n, bytes 1 and 3 of pair n + 2; code 16 is 0."""
        even = and_xor(pair(w, n, 3), 0x00F800F8, 0x80808080)
        return uint32(and_xor(pair(w, n + 2, 11), 0xF800F800, even))

    @cuda.jit(device=True, forceinline=True)
    def fragments(w):
        return (
            four(w, 0),
            four(w, 1),
            four(w, 4),
            four(w, 5),
            four(w, 8),
            four(w, 9),
            four(w, 12),
            four(w, 13),
        )

    return TileFormat(
        tile_bytes=storage_format_named("c5").block_bytes * TILE_ROWS * TILE_K // 32,
        bits_at=old.bits_at,
        scales_at=old.scales_at,
        minima_at=old.scales_at,
        code_scale=old.code_scale,
        signed=True,
        minimum=False,
        load=old.load,
        fragments=fragments,
        scale_bytes=1,
    )


def _half_fives(tile: TileFormat) -> HalfFormat:
    scales_at = tile.scales_at
    minus_zero, thirty_second = 0x80108010, 0x28002800  # -16 * 2^-24, and 2^-5

    @cuda.jit(device=True, forceinline=True)
    def scales(m, offset, lane, half):
        row_g = offset + scales_at + (lane >> 2) * 8 + 2 * half
        return uint32(load_u16(m, row_g)), uint32(load_u16(m, row_g + 4))

    @cuda.jit(device=True, forceinline=True)
    def of_row(scales, row, block):
        """(for codes where they are, for codes 5 bits up, offset)"""
        d = prmt(scales[row], 0, 0x1414 if block else 0x0404)
        return d, hmul2(d, thirty_second), hmul2(d, minus_zero)

    @cuda.jit(device=True, forceinline=True)
    def multipliers(scales, block):
        return of_row(scales, 0, block), of_row(scales, 1, block)

    @cuda.jit(device=True, forceinline=True)
    def weights(w, n, of_row):
        low, high, offset = of_row
        if n == LAST:
            return hfma2(last_pair(w), low, offset)
        word = uint32(w[n // 3])
        if n % 3 == 1:
            return hfma2(word & uint32(0x03E003E0), high, offset)
        if n % 3 == 2:
            word = word >> uint32(10)
        return hfma2(word & uint32(0x001F001F), low, offset)

    @cuda.jit(device=True, forceinline=True)
    def fragments(w, step, multipliers):
        n, (of_g, of_h) = 4 * step, multipliers
        return (
            weights(w, n, of_g),
            weights(w, n + 1, of_h),
            weights(w, n + 2, of_g),
            weights(w, n + 3, of_h),
        )

    return HalfFormat(
        tile_bytes=tile.tile_bytes,
        words=tile.load,
        scales=scales,
        multipliers=multipliers,
        fragments=fragments,
        n_words=5,
        n_scales=2,
    )
