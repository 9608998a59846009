"""Named rearrangements of weight blocks, done once on the host before a kernel sees them.

fields.py         codes, scales and offsets apart; K outermost (steps 1 to 6)
fragments.py      fragment-packed tiles of 16 rows x 128 K, as tensor cores take them (from step 7)
pruned.py         the same of Q4_0 of which two of each four weights are kept (step 22)
requantized.py    the same of weights requantized to int8 (from step 15)

`k_outermost`, `tiles`, `byte_tiles` and `byte_weights` take a matrix of blocks, structured
[N, K//32] or, of K-quants, [N, K//256]. They raise TypeError for blocks of a format that they do
not take, and ValueError for what is no matrix.
"""

from qformats.repack.fields import (
    CHUNK,
    KNOWN,
    as_bytes,
    k_outermost,
)
from qformats.repack.fragments import (
    CHUNK_HALVES,
    CODE_SCALE,
    E2M1_PLACES,
    HALF_SCALE,
    MINIMUM_SCALE,
    MMA_ORDER,
    TILE_GROUP,
    TILE_K,
    TILE_ROWS,
    tiles,
)
from qformats.repack.pruned import PRUNED_GROUP, PRUNED_TILE_BYTES, prune, pruned_tiles
from qformats.repack.requantized import (
    BYTE_SCALE,
    BYTE_ZERO,
    CENTRE,
    byte_storage_format,
    byte_tiles,
    byte_weights,
)

__all__ = [
    "BYTE_SCALE",
    "BYTE_ZERO",
    "CENTRE",
    "CHUNK",
    "CHUNK_HALVES",
    "CODE_SCALE",
    "E2M1_PLACES",
    "HALF_SCALE",
    "KNOWN",
    "MINIMUM_SCALE",
    "MMA_ORDER",
    "PRUNED_GROUP",
    "PRUNED_TILE_BYTES",
    "TILE_GROUP",
    "TILE_K",
    "TILE_ROWS",
    "as_bytes",
    "byte_storage_format",
    "byte_tiles",
    "byte_weights",
    "k_outermost",
    "prune",
    "pruned_tiles",
    "tiles",
]
