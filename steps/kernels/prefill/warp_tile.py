"""The tile of a warp, 32 features x up to 64 tokens of C: fragments, products, scales.

The operands are in a stage in shared memory (`steps.kernels.prefill.shared_stage`). A warp has two
fragment-packed tiles of 16 features, so each B fragment, of 8 tokens, serves two A fragments. Step
8 teaches this; steps 9 and 10 use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from numba import cuda, float32, uint32

from qformats import Format
from qformats.repack import CHUNK, HALF_SCALE, MINIMUM_SCALE, TILE_ROWS
from steps.instructions import (
    as_bits,
    as_float,
    half_to_float,
    ldmatrix_x4,
    load_f32,
    load_f32x4,
    load_u16,
    load_u32x4,
    mma_m16n8k8_tf32,
    mma_m16n8k32_s8,
    mma_m16n8k32_u8,
)
from steps.kernels.parts.weights.codes import tile_format
from steps.kernels.prefill.shared_stage import BN, THREADS, s_slot, stage_layout

WARP_N: Final = BN // (THREADS // 32)
"""Features of a warp: 32."""

ROW_TILES: Final = WARP_N // TILE_ROWS
"""Fragment-packed tiles of a warp, side by side along the features."""

A_WORDS: Final = 8 * ROW_TILES
"""Registers for the A fragments of two blocks of K."""

SCALE_WORDS: Final = 4 * ROW_TILES
"""Registers for the float16 scales of four blocks, two in a word."""

TF32: Final = 0xFFFFE000
"""The bits of a float32 that a tf32 operand keeps."""


@dataclass(frozen=True, slots=True)
class WarpTile:
    """Device functions of a warp. `stage` is the array of shared memory, `at` a byte of it, and
    `block`, 0 to 3, one of the four blocks of K of a stage.

    load_weights(a, stage, at, lane, half)
        the A fragments of blocks 2 half and 2 half + 1; `at`: the warp's packed tiles
    load_scales(scales, stage, at, lane)
        the float16 scales of rows g and g + 8 for four blocks; `at` as above
    load_tokens(b, stage, at, block)
        the B fragments of a block, by ldmatrix: b0 and b1 of 8 tokens, then of the next 8. `at`:
        where the stage begins, plus where among its codes this lane's row of block 0 lies
    load_token_scales(x, stage, at, block)
        d of the tokens of the lane's sums; `at`: where the stage begins, plus 16 (lane % 4)
    multiply(acc, a, b, x, scales, block)
        acc += one block of K: for each mma, its four integer sums times their scales
    add_minima(acc, stage, at, weights_at, lane)
        acc += sum over the stage's four blocks of m * s; `at`: where the stage begins
    """

    load_weights: Any
    load_scales: Any
    load_tokens: Any
    load_token_scales: Any
    multiply: Any
    add_minima: Any


@cache
def warp_tile(fmt: Format, bm: int) -> WarpTile:
    """The device functions, for capture in a kernel factory."""
    tile, layout = tile_format(fmt.name), stage_layout(fmt, bm)
    tile_bytes, scales_at, minima_at = tile.tile_bytes, tile.scales_at, tile.minima_at
    codes_at, d_at, s_at, slot = layout.codes_at, layout.d_at, layout.s_at, s_slot(bm)
    load, fragments = tile.load, tile.fragments
    mma = mma_m16n8k32_s8 if tile.signed else mma_m16n8k32_u8
    # Packed tiles hold scales and minima in units of their own. With these factors the sums are C
    # but for the row scale, so nothing overflows on the way where A is large.
    unit, unit_of_minima = float32(HALF_SCALE / tile.code_scale), float32(MINIMUM_SCALE)
    columns = bm // 8  # mma side by side along the tokens

    @cuda.jit(device=True, forceinline=True)
    def load_weights(a, stage, at, lane, half):
        for i in range(ROW_TILES):
            f = fragments(load(stage, at + i * tile_bytes, lane, half))
            a[8 * i], a[8 * i + 1], a[8 * i + 2], a[8 * i + 3] = f[0], f[1], f[2], f[3]
            a[8 * i + 4], a[8 * i + 5], a[8 * i + 6], a[8 * i + 7] = f[4], f[5], f[6], f[7]

    @cuda.jit(device=True, forceinline=True)
    def load_scales(scales, stage, at, lane):
        for i in range(ROW_TILES):
            s = load_u32x4(stage, at + i * tile_bytes + scales_at + 16 * (lane >> 2))
            scales[4 * i], scales[4 * i + 1] = s[0], s[1]
            scales[4 * i + 2], scales[4 * i + 3] = s[2], s[3]

    @cuda.jit(device=True, forceinline=True)
    def load_tokens(b, stage, at, block):
        first = at + codes_at + 2 * block * (bm * CHUNK)
        for j in range(0, 2 * columns, 4):
            b[j], b[j + 1], b[j + 2], b[j + 3] = ldmatrix_x4(stage, first + 4 * CHUNK * j)

    @cuda.jit(device=True, forceinline=True)
    def load_token_scales(x, stage, at, block):
        first = at + d_at + 4 * block * bm
        for j in range(0, 2 * columns, 4):
            x[j], x[j + 1], x[j + 2], x[j + 3] = load_f32x4(stage, first + 16 * j)

    @cuda.jit(device=True, forceinline=True)
    def scale_of(word, odd):
        """Of a word's two float16 scales that of its even or its odd block, as float32."""
        bits = uint32(word) >> uint32(16) if odd else uint32(word) & uint32(0xFFFF)
        return half_to_float(bits) * unit

    @cuda.jit(device=True, forceinline=True)
    def multiply(acc, a, b, x, scales, block):
        for i in range(ROW_TILES):
            q, word = 8 * i + 4 * (block & 1), 4 * i + block // 2
            w0, w8 = scale_of(scales[word], block & 1), scale_of(scales[word + 2], block & 1)
            for j in range(columns):
                v = mma(a[q], a[q + 1], a[q + 2], a[q + 3], b[2 * j], b[2 * j + 1], 0, 0, 0, 0)
                r = 4 * (i * columns + j)
                acc[r] += float32(v[0]) * (w0 * x[2 * j])
                acc[r + 1] += float32(v[1]) * (w0 * x[2 * j + 1])
                acc[r + 2] += float32(v[2]) * (w8 * x[2 * j])
                acc[r + 3] += float32(v[3]) * (w8 * x[2 * j + 1])

    # The sum of m * s over four blocks is a product of its own, 16 features x 4 blocks x 8 tokens.
    # tf32 keeps 11 bits, enough for a float16 m. So s is the sum of two tf32, and they fill the 8
    # K of the mma: m beside m, upper above lower. 2^-22 of s is lost.
    @cuda.jit(device=True, forceinline=True)
    def add_minima(acc, stage, at, weights_at, lane):
        group, quad = lane >> 2, lane & 3
        for i in range(ROW_TILES):
            m_at = weights_at + i * tile_bytes + minima_at + 16 * group + 2 * quad
            m0 = as_bits(half_to_float(load_u16(stage, m_at)) * unit_of_minima)
            m8 = as_bits(half_to_float(load_u16(stage, m_at + 8)) * unit_of_minima)
            for j in range(columns):
                s = load_f32(stage, at + s_at + 4 * slot(quad, 8 * j + group))
                upper = as_bits(s) & uint32(TF32)
                lower = as_bits(s - as_float(upper))
                r = 4 * (i * columns + j)
                acc[r], acc[r + 1], acc[r + 2], acc[r + 3] = mma_m16n8k8_tf32(
                    m0, m8, m0, m8, upper, lower, acc[r], acc[r + 1], acc[r + 2], acc[r + 3]
                )

    return WarpTile(load_weights, load_scales, load_tokens, load_token_scales, multiply, add_minima)
