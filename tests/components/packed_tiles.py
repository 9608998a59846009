"""The packed tiles of `qformats.repack.tiles` by their rows."""

from __future__ import annotations

import numpy as np

from qformats.repack import TILE_GROUP


def by_row_tile(packed: np.ndarray, k_tiles: int, size: int) -> np.ndarray:
    """Flat packed tiles of `size` bytes, `k_tiles` along K -> [row tile, K tile, size]."""
    in_groups = packed.reshape(-1, k_tiles, TILE_GROUP, size)
    return np.ascontiguousarray(in_groups.transpose(0, 2, 1, 3)).reshape(-1, k_tiles, size)
