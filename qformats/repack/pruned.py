"""Q4_0 pruned 2 of 4, and the packed tiles of what is kept, for sparse tensor cores."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qformats.codec import BLOCK, Blocks, Floats
from qformats.repack.fields import matrix_format
from qformats.repack.fragments import TILE_K, TILE_ROWS, largest_exponent
from qformats.threads import by_rows

PRUNED_GROUP = 16
"""Row tiles whose packed tiles of the same 128 K lie side by side: 256 rows are one piece."""

PRUNED_TILE_BYTES = TILE_ROWS * (TILE_K // 2 * 4 + TILE_K // 2 * 2 + TILE_K // BLOCK * 16) // 8
"""Codes, positions and scales of 16 rows x 128 K: 896 bytes, 3.5 bits a weight."""

ZERO = 8
"""The code of 0."""


def prune(blocks: Blocks) -> Blocks:
    """Q4_0 blocks [N, K//32] of which two of each four weights along K are 0: those of the least
    size, of equal ones the later. TypeError for another format, ValueError for what is no matrix.

    Codes and scales of the others stay. The scale that brings the kept weights nearest to what
    they were is the one that they have, as they are not changed.
    """
    codes = _codes(blocks)
    fours = codes.reshape(*codes.shape[:-1], -1, 4)
    np.put_along_axis(fours, _by_size(fours)[..., 2:], ZERO, axis=-1)
    made = blocks.copy()
    low, high = codes[..., : BLOCK // 2], codes[..., BLOCK // 2 :]
    made["qs"] = low | high << 4
    return made


@by_rows
def pruned_tiles(blocks: Blocks) -> tuple[NDArray[np.uint8], Floats]:
    """The kept weights of `prune(blocks)` as `wgmma_sparse_f16` takes them: (packed, row_scales).

    packed: uint8 [ceil(N/256), ceil(K/128), 16, 896], flat: tiles of 16 rows x 128 K in groups of
    256 rows. A tile has four blocks of 32 K, of each of which 16 weights a row are kept. For lane
    4g + t it is

        codes      16 bytes: for each block a word; bits 4i to 4i + 3 are the first code of a group
                   of four along K, bits 16 + 4i and above the second one: i = 0, 1 of rows g and
                   g + 8, K 4t to 4t + 3, i = 2, 3 likewise 16 + 4t to 16 + 4t + 3
        positions  8 bytes: two words, the metadata of blocks 0 and 1 (lanes t = 0, 1 and t = 2, 3)
                   and of blocks 2 and 3
        scales     float16 [8 g][row g, row g + 8][4 blocks]: d', as of `tiles`

    row_scales: float32 [N rounded up to whole groups], those of `tiles`.
    """
    codes, fours = _codes(blocks), (len(blocks), -1, 8, 4)
    n, blocks_k = blocks.shape
    groups, k_tiles = -(-n // (PRUNED_GROUP * TILE_ROWS)), -(-blocks_k * BLOCK // TILE_K)
    rows = groups * PRUNED_GROUP * TILE_ROWS
    positions = np.sort(_by_size(codes.reshape(fours))[..., :2], axis=-1)
    two = np.take_along_axis(codes.reshape(fours), positions, axis=-1)

    # rows and blocks beyond the matrix: codes of 0, scales 0, positions 0 and 1
    padding = ((0, rows - n), (0, 4 * k_tiles - blocks_k))
    two = np.pad(two, (*padding, (0, 0), (0, 0)), constant_values=ZERO).astype(np.uint32)
    pairs = np.pad(
        positions[..., 0] | positions[..., 1] << 2, (*padding, (0, 0)), constant_values=4
    )
    d = blocks["d"].astype(np.float64)
    powers = 15 - largest_exponent(d, -24)
    with np.errstate(invalid="ignore"):  # a NaN of any kind is a NaN
        d = np.pad(np.ldexp(d, powers[:, None]), padding).astype(np.float16)

    # axes: row tile, row g or g + 8, g, K tile, block, half of 16 K, t
    by_tile = (rows // TILE_ROWS, 2, 8, k_tiles, 4, 2, 4)
    words = np.zeros((rows // TILE_ROWS, k_tiles, 8, 4, 4), np.uint32)  # [..., g, t, block]
    for i in range(4):
        of_register = two.reshape(*by_tile, 2)[:, i % 2, :, :, :, i // 2]  # tile, g, K tile, block,
        of_register = of_register.transpose(0, 2, 1, 4, 3, 5)  # t, first or second
        words |= of_register[..., 0] << np.uint32(4 * i) | of_register[..., 1] << np.uint32(
            4 * i + 16
        )
    shifts = np.arange(0, 16, 4)
    bits = (pairs.reshape(by_tile).astype(np.uint32) << shifts.astype(np.uint32)).sum(-1, np.uint32)
    bits = bits[:, 0] | bits[:, 1] << np.uint32(16)  # tile, g, K tile, block, half of 16 K
    metadata = bits.reshape(*bits.shape[:3], 2, 4).transpose(0, 2, 1, 4, 3)  # tile, K, g, t, word
    scales = d.reshape(by_tile[:5]).transpose(0, 3, 2, 1, 4)
    parts = (words, metadata, scales)
    flat = [
        np.ascontiguousarray(one).view(np.uint8).reshape(-1, k_tiles, one[0, 0].nbytes)
        for one in parts
    ]
    packed = np.concatenate(flat, axis=-1).reshape(groups, PRUNED_GROUP, k_tiles, -1)
    row_scales = np.ones(rows, np.float32)
    row_scales[:n] = np.ldexp(1.0, 24 - powers)
    return np.ascontiguousarray(packed.transpose(0, 2, 1, 3)).reshape(-1), row_scales


def _codes(blocks: Blocks) -> NDArray[np.uint8]:
    """The codes 0 to 15, uint8 [N, K//32, 32], in the order of K."""
    matrix_format("prune", blocks, ("q4_0",))
    return np.concatenate([blocks["qs"] & 15, blocks["qs"] >> 4], axis=-1)


def _by_size(fours: NDArray[np.uint8]) -> NDArray[np.intp]:
    """The positions in each group of four, largest weight first, of equal ones the first."""
    return np.argsort(-np.abs(fours.astype(np.int8) - ZERO), axis=-1, kind="stable")
