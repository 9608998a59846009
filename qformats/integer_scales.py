"""Weights as codes times a small integer, with one scale per row: one multiplication makes four.

    weight = factor * (code * r + c)        code 0..15 or 0..31; r and c of a block, factor of a row

with -128 <= code * r + c <= 127 for every code that the format has. So the bytes c + 128 + code * r
are all in 0..255, and of four codes in the bytes of a word

    codes * r + (c + 128) * 0x01010101      modulo 2^32

is the four of them side by side: as integers both sides are the sum of byte_i * 256^i, which is in
0..2^32 - 1, so whatever is carried or borrowed on the way has come back at the end, for a negative
r too. The highest bits flipped, they are signed bytes without the 128.

What it costs is accuracy. r is 16 or so at most with 4 bits, 8 with 5, so a block's scale is off by
3 to 8 %. Codes are therefore rounded anew to the multiples of r, and every c is free: a weight is
then off by a half of r * factor at most, as it was by a half of d, unless the block's range had to
be cut, and by little where r happens to fit. Of some factors about the least that cuts nothing the
best is taken for each row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from qformats.codec import BLOCK, Blocks, Floats, Format
from qformats.repack import (
    TILE_K,
    TILE_ROWS,
    byte_tiles,
    byte_weights,
    in_groups,
    matrix_format,
    row_tiles,
)
from qformats.threads import by_rows

INTEGER_ZERO: Final = 128
"""The unsigned byte that stands for 0 until the highest bits are flipped."""

FACTORS: Final = (0.94, 0.98, 1.02, 1.06)
"""Of the least factor that cuts nothing: below 1 some weights of the largest blocks are cut, and
all others finer. The best of these loses a tenth less than 1 alone on normal data, a third less on
uniform; twice as many factors gain another 2 %."""

PART: Final = 2**17
"""Weights worked on at a time, so that they stay in a cache."""


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """int8 = code * r + c: codes uint8 [N, K//32, 32]; r, c int8 [N, K//32]; factor float32 [N]."""

    codes: NDArray[np.uint8]
    r: NDArray[np.int8]
    c: NDArray[np.int8]
    factor: Floats


def integer_weights(blocks: Blocks) -> tuple[NDArray[np.int8], Floats]:
    """Blocks [N, K//32] as a kernel multiplies them: (int8 [N, K], float32 [N]), value = int8 *
    factor. q8_0: `byte_weights`, which has nothing to unpack. Where a d or m is no number the row
    is 0 times NaN. TypeError or ValueError for what is no matrix of a weight format."""
    fmt = matrix_format("integer_weights", blocks)
    if fmt.bits == 8:
        return byte_weights(blocks)
    grid = integer_grid(blocks)
    w = grid.codes.astype(np.int16) * grid.r[..., None] + grid.c[..., None]
    return w.astype(np.int8).reshape(len(blocks), -1), grid.factor


@by_rows
def integer_tiles(blocks: Blocks) -> tuple[NDArray[np.uint8], Floats]:
    """Blocks [N, K//32] as packed tiles of 16 rows x 128 K, and the scale of each row: (packed,
    row_scales).

    packed: uint8 [ceil(N/128), ceil(K/128), 8, bytes of a tile], flat, in groups as those of
    `qformats.repack.tiles`. For lane 4g + t a tile is

        codes   for each half of 64 K, 16 bytes a lane, four words. A register a_(2u+r) of block b
                is to have in byte i the code of row g + 8r, k = 16u + 4t + i of that block.
                4 bits: word 2b + r holds a_r in its low nibbles, a_(2+r) in its high ones
                5 bits: registers 0 to 3 of block 0 and 0 of block 1 are the lower five bits of each
                byte of words 0 to 4 (word 4 follows, behind all codes of both halves); with x the
                three upper bits of a byte of word x, registers 1 to 3 of block 1 are
                    0 + 8 (1 >> 1)    2 + 8 (3 >> 1)    4 + 8 (1 & 1) + 16 (3 & 1)
                8 bits: for each block its registers; words 0 to 3 and then 4 to 7
        scales  uint8 [8 g][row g, row g + 8][4 blocks][r, c + 128], r in two's complement; none in
                q8_0, whose bytes are weights + 128

    row_scales: float32 [N rounded up to whole groups]. Beyond the matrix all is 0, or in q8_0 the
    byte that stands for 0: it meets zeros among the activations, or is no row of C.

    It takes 1.4 s for 4096 x 4096 on one core, twenty times what `byte_tiles` takes: each of the
    FACTORS is tried with r rounded down and up, and all codes rounded anew.
    """
    fmt = matrix_format("integer_tiles", blocks)
    if fmt.bits == 8:
        return byte_tiles(blocks)
    grid, (n, blocks_k) = integer_grid(blocks), blocks.shape
    rows, k_tiles = row_tiles(n), -(-blocks_k * BLOCK // TILE_K)
    space = ((0, rows * TILE_ROWS - n), (0, k_tiles * 4 - blocks_k), (0, 0))
    codes = np.pad(grid.codes, space).reshape(rows, 2, 8, k_tiles, 2, 2, 2, 4, 4)
    # row tile, K tile, half, g, t | block, u, r | byte
    lanes = codes.transpose(0, 3, 4, 2, 7, 5, 6, 1, 8).reshape(rows * k_tiles, 2, 32, 8, 4)
    words = _nibbles(lanes) if fmt.bits == 4 else _fives(lanes)
    offset = (grid.c.astype(np.int16) + INTEGER_ZERO).astype(np.uint8)
    pairs = np.pad(np.stack([grid.r.view(np.uint8), offset], axis=-1), space)
    pairs = pairs.reshape(rows, 2, 8, k_tiles, 4, 2).transpose(0, 3, 2, 1, 4, 5)
    planes = [words[..., :4, :], words[..., 4:, :], pairs]
    packed = np.concatenate([part.reshape(rows * k_tiles, -1) for part in planes], axis=1)
    row_scales = np.ones(rows * TILE_ROWS, np.float32)
    row_scales[:n] = grid.factor
    return in_groups(packed, rows), row_scales


def _nibbles(lanes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """uint8 [..., 8, 4], registers of two blocks -> their four words, [..., 4, 4]."""
    blocks = lanes.reshape(*lanes.shape[:-2], 2, 2, 2, 4)
    words = np.asarray(blocks[..., 0, :, :] | blocks[..., 1, :, :] << 4, np.uint8)
    return words.reshape(*lanes.shape[:-2], 4, 4)


def _fives(lanes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """uint8 [..., 8, 4], registers of two blocks -> their five words, [..., 5, 4]."""
    words = lanes[..., :5, :].copy()
    x, y, z = lanes[..., 5, :], lanes[..., 6, :], lanes[..., 7, :]
    upper = x & 7, x >> 3 << 1 | z >> 3 & 1, y & 7, y >> 3 << 1 | z >> 4, z & 7
    for i, bits in enumerate(upper):
        words[..., i, :] |= bits << 5
    return words


def integer_grid(blocks: Blocks) -> Grid:
    """The codes, integers and factors of blocks [N, K//32] of 4 or 5 bits, rows apart from each
    other: one has the same in whichever matrix it stands.

    A power of two that loses nothing at all is preferred."""
    fmt, (n, blocks_k) = matrix_format("integer_grid", blocks), blocks.shape
    size = (n, blocks_k)
    grid = Grid(
        np.empty((*size, BLOCK), np.uint8),
        np.empty(size, np.int8),
        np.empty(size, np.int8),
        np.empty(n, np.float32),
    )
    step = max(1, PART // (blocks_k * BLOCK))
    for start in range(0, n, step):
        part = slice(start, start + step)
        _fit(fmt, blocks[part], grid.codes[part], grid.r[part], grid.c[part], grid.factor[part])
    return grid


def _fit(fmt: Format, blocks: Blocks, *out: NDArray[Any]) -> None:
    """Writes the codes, r, c and factors of some rows."""
    top = 2**fmt.bits - 1
    d, m = fmt.scale(blocks).astype(np.float64), fmt.offset(blocks).astype(np.float64)
    numbers = np.asarray(np.isfinite(d).all(axis=1) & np.isfinite(m).all(axis=1))
    d, m = np.where(numbers[:, None], d, 0), np.where(numbers[:, None], m, 0)
    codes = fmt.codes(blocks).reshape(*blocks.shape, BLOCK).astype(np.float32)
    least = np.maximum(np.abs(m), np.abs(m + top * d)).max(axis=1, keepdims=True) / 127
    least = np.where(least > 0, least, 1)
    power = np.exp2(np.ceil(np.log2(least)))
    lossless = ((np.rint(d / power) == d / power) & (np.rint(m / power) == m / power)).all(axis=1)
    fewest = np.full(len(blocks), np.inf)
    for times in FACTORS:
        factor = (
            np.where(lossless[:, None], power, least * times).astype(np.float32).astype(np.float64)
        )
        found, lost = _rounded(codes, d / factor, m / factor, top)
        lost *= factor[:, 0] ** 2
        better = lost < fewest
        fewest[better] = lost[better]
        for array, new in zip(out, (*found, factor[:, 0]), strict=True):
            array[better] = new[better]
    out[-1][~numbers] = np.nan


def _rounded(
    codes: Floats, d: NDArray[np.float64], m: NDArray[np.float64], top: int
) -> tuple[tuple[NDArray[Any], ...], NDArray[np.float64]]:
    """((codes, r, c) nearest to codes * d + m, the squares that each row is off by): r is |d|
    rounded down or up, for each block whichever is better."""
    wanted = codes * d[..., None].astype(np.float32) + m[..., None].astype(np.float32)
    mean = codes.mean(axis=-1, dtype=np.float64)
    sign, best = np.where(d < 0, -1.0, 1.0), None
    for size in (np.floor(np.abs(d)), np.ceil(np.abs(d))):
        r = sign * np.clip(size, 1, 255 // top)  # 0 would make all weights alike
        low, high = np.minimum(top * r, 0), np.maximum(top * r, 0)
        c = np.clip(np.rint(m + mean * (d - r)), -128 - low, 127 - high)
        steps, off = (x[..., None].astype(np.float32) for x in (r, c))
        q = wanted - off
        q /= steps
        np.clip(np.rint(q, out=q), 0, top, out=q)
        rest = q * steps
        rest += off
        rest -= wanted
        lost = np.square(rest, out=rest).sum(axis=-1)
        if best is None:
            best = [q, r, c, lost]
        else:
            better = lost < best[3]
            for array, new in zip(best, (q, r, c, lost), strict=True):
                array[better] = new[better]
    assert best is not None
    q, r, c, lost = best
    return (q, r, c), lost.sum(axis=1, dtype=np.float64)
