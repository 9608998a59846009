"""The records of `qformats.repack.tiles` by their rows."""

from __future__ import annotations

import numpy as np

from qformats.repack import TILE_GROUP


def by_row_tile(records: np.ndarray, deep: int, size: int) -> np.ndarray:
    """Flat records of `size`, `deep` of them along K, in bands -> [row tile, K tile, size]."""
    in_groups = records.reshape(-1, deep, TILE_GROUP, size)
    return np.ascontiguousarray(in_groups.transpose(0, 2, 1, 3)).reshape(-1, deep, size)
