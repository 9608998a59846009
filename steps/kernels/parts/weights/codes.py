"""Codes of a fragment-packed tile as bytes in registers: what the int8 tensor cores multiply.

Step 7 teaches this.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from numba import cuda, int32, uint32

from qformats import BLOCK, FORMATS
from qformats.repack import CODE_SCALE, TILE_GROUP, TILE_K, TILE_ROWS
from steps.instructions import and_xor, load_u32, load_u32x4


# --- the packed tiles of qformats.repack.tiles ----------------------------------------------------
@dataclass(frozen=True, slots=True)
class TileFormat:
    """Where the parts of a packed tile of `qformats.repack.tiles` lie, and how lanes read them.

    tile_bytes : bytes of one packed tile; bits_at, scales_at, minima_at: where those parts begin
    code_scale : the bytes of `fragments` are codes times this (`qformats.repack.CODE_SCALE`)
    signed     : whether they are signed; unsigned bytes go to `mma_m16n8k32_u8` or `dp4a_us`
    minimum    : whether there are minima
    group      : elements that share a scale, 32 or 16
    scale_bytes: 2; or 1, the upper byte of a float16
    load(m, offset, lane, half)
        the words of one lane for one half, 64 K, of the packed tile at byte `offset` of array m
    fragments(words) -> (a0, a1, a2, a3) of its first block of 32 K and of its second, each 16 K in
        `qformats.repack.MMA_ORDER`
    """

    tile_bytes: int
    bits_at: int
    scales_at: int
    minima_at: int
    code_scale: int
    signed: bool
    minimum: bool
    load: Any
    fragments: Any
    group: int = BLOCK
    scale_bytes: int = 2


@cuda.jit(device=True, forceinline=True)
def tile_index(row_tile, step, steps):
    """The index of a packed tile of `qformats.repack.tiles`: of a row tile, and step of `steps`."""
    return int32(int32((row_tile >> 3) * steps + step) * TILE_GROUP + (row_tile & 7))


HIGH_NIBBLES = 0xF0F0F0F0
LOWER_FOUR, HIGHEST, LOWEST = 0x78787878, 0x80808080, 0x08080808  # of a code in the upper five bits


@cuda.jit(device=True, forceinline=True)
def load_4(m, offset, lane, half):
    """The four words of a lane that hold nibbles: first in a packed tile, unless it has 8 bits."""
    return load_u32x4(m, offset + half * 512 + lane * 16)


@cuda.jit(device=True, forceinline=True)
def lows(word):
    """The low nibble of each byte, moved up."""
    return uint32(uint32(word << uint32(4)) & uint32(HIGH_NIBBLES))


@cuda.jit(device=True, forceinline=True)
def highs(word):
    return uint32(uint32(word) & uint32(HIGH_NIBBLES))


@cuda.jit(device=True, forceinline=True)
def fragments_4(w):
    w0, w1, w2, w3 = w
    return lows(w0), lows(w1), highs(w0), highs(w1), lows(w2), lows(w3), highs(w2), highs(w3)


@cuda.jit(device=True, forceinline=True)
def shifted(word, up):
    """A word moved up so many bits, or down where they are negative: a constant."""
    return uint32(word << uint32(up)) if up >= 0 else uint32(word >> uint32(-up))


@cache
def tile_format(format_name: str) -> TileFormat:
    """The packed tile of a weight format, for capture in a kernel factory."""
    fmt = FORMATS[format_name]
    minimum = "m" in (fmt.dtype.names or ())
    tile_bytes = fmt.block_bytes * TILE_ROWS * TILE_K // BLOCK
    scale_bytes = TILE_ROWS * (TILE_K // BLOCK) * 2
    scales_at = tile_bytes - (2 if minimum else 1) * scale_bytes
    bits_at = TILE_ROWS * TILE_K // 2
    flip_5 = HIGHEST if format_name == "q5_0" else 0  # makes two's complement of code - 16

    @cuda.jit(device=True, forceinline=True)
    def load_5(m, offset, lane, half):
        w0, w1, w2, w3 = load_4(m, offset, lane, half)
        return w0, w1, w2, w3, load_u32(m, offset + bits_at + half * 128 + lane * 4)

    @cuda.jit(device=True, forceinline=True)
    def load_8(m, offset, lane, half):
        a0, a1, a2, a3 = load_u32x4(m, offset + half * 1024 + lane * 16)
        b0, b1, b2, b3 = load_u32x4(m, offset + half * 1024 + 512 + lane * 16)
        return a0, a1, a2, a3, b0, b1, b2, b3

    @cuda.jit(device=True, forceinline=True)
    def low_5(w, i):
        return and_xor(
            shifted(w[4], 6 - 2 * i), HIGHEST, and_xor(w[i] << uint32(3), LOWER_FOUR, flip_5)
        )

    @cuda.jit(device=True, forceinline=True)
    def high_5(w, i):
        return and_xor(shifted(w[4], 3 - 2 * i), LOWEST, and_xor(w[i], HIGH_NIBBLES, flip_5))

    @cuda.jit(device=True, forceinline=True)
    def fragments_5(w):
        return (
            low_5(w, 0),
            low_5(w, 1),
            high_5(w, 0),
            high_5(w, 1),
            low_5(w, 2),
            low_5(w, 3),
            high_5(w, 2),
            high_5(w, 3),
        )

    @cuda.jit(device=True, forceinline=True)
    def fragments_8(w):
        return w

    load, fragments = {
        4: (load_4, fragments_4),
        5: (load_5, fragments_5),
        8: (load_8, fragments_8),
    }[fmt.bits]
    return TileFormat(
        tile_bytes=tile_bytes,
        bits_at=bits_at,
        scales_at=scales_at,
        minima_at=tile_bytes - scale_bytes,
        code_scale=CODE_SCALE[fmt.bits],
        signed=not minimum,
        minimum=minimum,
        load=load,
        fragments=fragments,
    )
