"""Fragment-packed tiles for int8 tensor cores: weights requantized to int8, one scale per row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qformats.codec import BLOCK, FILE_FORMATS, FORMATS, Blocks, Floats, Format
from qformats.repack.fields import matrix_format
from qformats.repack.fragments import (
    HALF_SCALE,
    NATURAL_ORDER,
    TILE_K,
    TILE_ROWS,
    in_groups,
    pack_tiles,
    row_tiles,
)
from qformats.threads import by_rows

BYTE_SCALE = 2.0**-13

BYTE_ZERO = 1280
"""A magic constant: a float16 in [1/8, 1/4) is a multiple of BYTE_SCALE, and the low byte of 1280
+ n of them is n in two's complement. Adding it in float16 rounds to an integer; the low byte is the
int8."""

CENTRE = {"q4_0": 8, "q5_0": 16}
"""The code of 0, in formats that have neither minima nor signed codes."""


@by_rows
def byte_tiles(blocks: Blocks) -> tuple[NDArray[np.uint8], Floats]:
    """`tiles` for kernels that make int8 weights, and one scale per row: (packed, row_scales).

    packed: the tiles of `tiles` with K in its natural order, as of int8 A that
    `steps.kernels.parts.activations.rows` makes, and with d and m from which a kernel makes the
    int8 of `byte_weights` by one multiply-add in float16,

        code * (HALF_SCALE d') + m' = BYTE_SCALE * (BYTE_ZERO + int8)

    with m' = BYTE_SCALE * BYTE_ZERO - centre * HALF_SCALE d', which is exact, in q4_0 and q5_0.
    Codes of q4_0 are not centred, so one mask finds them. The codes of q8_0, and of file formats,
    are the int8 already, each with its highest bit flipped, and their tiles have no scales.
    row_scales: float32 [N rounded up to whole groups].
    """
    fmt = matrix_format("byte_tiles", blocks)
    row_scales = np.ones(row_tiles(len(blocks)) * TILE_ROWS, np.float32)
    storage = byte_storage_format(fmt)
    if storage.bits == 8:
        codes, row_scales[: len(blocks)] = byte_weights(blocks)
        made = np.zeros((len(blocks), codes.shape[1] // BLOCK), storage.dtype)
        made["qs"] = codes.reshape(made["qs"].shape)
        packed = pack_tiles(made, storage, NATURAL_ORDER)[:, : TILE_ROWS * TILE_K] ^ np.uint8(128)
    else:
        maps, made = _byte_maps(fmt, blocks), np.array(blocks, order="C")
        made["d"] = maps.slope * (BYTE_SCALE / HALF_SCALE)
        if "m" in (fmt.dtype.names or ()):
            made["m"] = (maps.offset + BYTE_ZERO) * BYTE_SCALE
        row_scales[: len(blocks)] = maps.factor
        if fmt.name == "q4_0":
            made["qs"] ^= np.uint8(0x88)  # which `pack_tiles` does once more
        packed = pack_tiles(made, fmt, NATURAL_ORDER)
    return in_groups(packed, row_tiles(len(blocks))), row_scales


def byte_storage_format(fmt: Format) -> Format:
    """The format of the blocks in `byte_tiles`: the format itself, or 8 bits."""
    return FORMATS["q8_0"] if fmt.name in FILE_FORMATS else fmt


def byte_weights(blocks: Blocks) -> tuple[NDArray[np.int8], Floats]:
    """Blocks [N, K//32] requantized to 8 bits: (int8 [N, K], float32 [N]), value = int8 * factor.

    With f the factor of a row, a weight is rounded, halves to even, once:

        q4_0, q5_0   (code - c) k / c, c = 8 or 16, k = c d / f rounded to an integer, |k| <= 127
        q4_1, q5_1   code d' + m', m' = m / f rounded to an integer, and d' = d / f in float16,
                     shifted so that both roundings together are least over all codes
        q8_0         code d / f
        others       value / f

    f is the smallest for which no code that the format has leaves [-127, 127] (q8_0 and others: no
    weight of the row [-128, 127]), which is off by about one percent of what Q4_0 itself is; a
    power of two that loses nothing at all is preferred. Where a d or m is no number the row is 0
    times NaN.
    """
    fmt = matrix_format("byte_weights", blocks)
    if fmt.name in FILE_FORMATS:
        return _bytes_of_values(fmt.dequantize(blocks))
    maps = _byte_maps(fmt, blocks)
    codes = fmt.codes(blocks).reshape(*blocks.shape, BLOCK)
    w = np.rint(codes * maps.slope[..., None] + maps.offset[..., None])
    return w.astype(np.int8).reshape(len(blocks), -1), maps.factor


def _bytes_of_values(w: Floats) -> tuple[NDArray[np.int8], Floats]:
    """`byte_weights` of weights [N, K] themselves."""
    factor = np.ones(len(w), np.float32)
    codes = np.zeros(w.shape, np.int8)
    for row, values, row_index in zip(codes, w, range(len(w)), strict=True):
        if not np.isfinite(values).all():
            factor[row_index] = np.nan
            continue
        x = values.astype(np.float64)
        least = max(x.max() / 127, x.min() / -128)
        if least > 0:
            power = 2.0 ** np.ceil(np.log2(least))
            lossless = (np.rint(x / power) == x / power).all()
            factor[row_index] = power if lossless else least
            row[:] = np.clip(np.rint(x / factor[row_index]), -128, 127)
    return codes, factor


@dataclass(frozen=True, slots=True, eq=False)
class _ByteMaps:
    """int8 = code * slope + offset, rounded: float64 [N, K//32] both, and factor float32 [N]."""

    slope: NDArray[np.float64]
    offset: NDArray[np.float64]
    factor: Floats


def _byte_maps(fmt: Format, blocks: Blocks) -> _ByteMaps:
    numbers = np.isfinite(fmt.scale(blocks)).all(axis=1, keepdims=True)
    numbers &= np.isfinite(fmt.offset(blocks)).all(axis=1, keepdims=True)
    d = np.where(numbers, fmt.scale(blocks), 0).astype(np.float64)
    m = np.where(numbers, fmt.offset(blocks), 0).astype(np.float64)
    top = 2**fmt.bits - 1
    if fmt.bits == 8:
        w = fmt.codes(blocks).reshape(*blocks.shape, BLOCK) * d[..., None]
        reach = np.maximum(w.max(axis=2), w.min(axis=2) * (-127 / 128))
    elif fmt.name in CENTRE:
        reach = np.abs(m)  # = c |d|
    else:
        reach = np.maximum(np.abs(m), np.abs(m + top * d))
    least = reach.max(axis=1, keepdims=True) / 127
    least = np.where(least > 0, least, 1)
    if fmt.bits < 8:
        power = np.exp2(np.ceil(np.log2(least)))
        lossless = (np.rint(d / power) == d / power) & (np.rint(m / power) == m / power)
        least = np.where(lossless.all(axis=1, keepdims=True), power, least)
    factor = least.astype(np.float32).astype(np.float64)
    if fmt.bits == 8:
        slope, offset = d / factor, np.zeros_like(d)
    elif fmt.name in CENTRE:
        offset = np.rint(m / factor)
        slope = offset / -CENTRE[fmt.name]
    else:
        offset, codes = np.rint(m / factor), np.arange(top + 1.0)
        slope = (d + (m - offset * factor) * codes.sum() / (codes**2).sum()) / factor
        slope = slope.astype(np.float16).astype(np.float64)
    factor = np.where(numbers, factor, np.nan)
    return _ByteMaps(slope, offset, factor[:, 0].astype(np.float32))
