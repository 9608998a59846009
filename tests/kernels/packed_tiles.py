"""The packed tiles of `qformats.repack.tiles` by their rows."""

from __future__ import annotations

import numpy as np

from qformats.repack import MMA_ORDER, TILE_GROUP


def by_row_tile(packed: np.ndarray, k_tiles: int, size: int) -> np.ndarray:
    """Flat packed tiles of `size` bytes, `k_tiles` along K -> [row tile, K tile, size]."""
    in_groups = packed.reshape(-1, k_tiles, TILE_GROUP, size)
    return np.ascontiguousarray(in_groups.transpose(0, 2, 1, 3)).reshape(-1, k_tiles, size)


def unordered(blocks: np.ndarray) -> np.ndarray:
    """Blocks of a weight format with the code that `blocks` have at position i of each 16 at
    k = MMA_ORDER[i], so that their packed tiles have those of `blocks` in natural order."""
    moved = blocks.copy()
    qs = moved["qs"].view(np.uint8).reshape(*blocks.shape, -1, 16)
    qs[..., MMA_ORDER] = qs.copy()
    moved["qs"] = qs.reshape(*blocks.shape, -1).view(moved["qs"].dtype)
    if "qh" in blocks.dtype.names:
        bits = np.unpackbits(moved["qh"], axis=-1, bitorder="little").reshape(*blocks.shape, 2, 16)
        bits[..., MMA_ORDER] = bits.copy()
        moved["qh"] = np.packbits(bits.reshape(*blocks.shape, 32), axis=-1, bitorder="little")
    return moved
