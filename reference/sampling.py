"""The outputs of a large product that are compared, and its weights in pieces that fit a cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

# Tiles a kernel may use, whose last, partial one is where a ragged edge goes wrong.
TILES: Final = (8, 16, 32, 64, 128, 256)


def sample(m: int, n: int, limit: int = 2**18) -> tuple[Array, Array]:
    """Rows and columns of C[M, N] to check: all of them, or a fair choice of about `limit` outputs.

    A float64 product of 4096 x 4096 x 14336 takes minutes, so large results are checked on
    rows x columns: always the first and last, both sides of the edge of the last tile of
    8 ... 256 (`TILES`), and a seeded random choice of the others. Returns two sorted int64 arrays;
    rows.size * columns.size <= limit unless the edges alone are more.
    """
    if min(m, n, limit) < 1:
        raise ValueError(f"M, N and limit must be positive, got {m}, {n}, {limit}")
    if m * n <= limit:
        return np.arange(m), np.arange(n)
    rng = np.random.default_rng([m, n, limit])
    side = int(limit**0.5)
    rows = _choose(m, max(side, limit // n), rng)
    return rows, _choose(n, max(1, limit // rows.size), rng)


def _choose(size: int, count: int, rng: np.random.Generator) -> Array:
    if count >= size:
        return np.arange(size)
    edges = {0, 1, size - 2, size - 1}
    for tile in TILES:
        last = (size - 1) // tile * tile
        edges |= {last - 1, last, last + 1}
    kept = np.array(sorted(edge for edge in edges if 0 <= edge < size))
    others = np.setdiff1d(np.arange(size), kept)
    extra = min(max(0, count - kept.size), others.size)
    return np.sort(np.concatenate([kept, rng.choice(others, extra, replace=False)]))


PIECE: Final = 2**18  # weights of a product that are float64 at a time: 2 MB


def pieces(n: int, k: int) -> Iterator[slice]:
    """N in parts whose weights in float64 stay in a cache: several times as fast as all at once."""
    step = max(1, PIECE // k)
    for start in range(0, n, step):
        yield slice(start, start + step)
