"""Rows of a matrix on several cores: NumPy lets other threads run while it computes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, wraps
from typing import Any, Final, TypeVar

import numpy as np

ROWS: Final = 512
"""Of a part of a matrix: whole groups of packed tiles, and some MB of a core's cache."""

NAME: Final = "rows of a matrix"
"""Of the threads."""

T = TypeVar("T")


def cores() -> int:
    """How many this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def in_parts(work: Callable[[int, int], T], count: int, size: int) -> list[T]:
    """work(first, stop) for 0 .. count in parts of `size`, in order; the error of the first part
    that has one. One part, one core, or parts of a part need no threads."""
    firsts = range(0, count, size)
    if min(cores(), len(firsts)) < 2 or threading.current_thread().name.startswith(NAME):
        return [work(first, min(first + size, count)) for first in firsts]
    part = lambda first: work(first, min(first + size, count))  # noqa: E731
    try:
        parts = _pool(cores()).map(part, firsts)
    except RuntimeError:  # Python is ending, or the system has no thread left
        parts = map(part, firsts)
    return list(parts)


@cache
def _pool(workers: int) -> ThreadPoolExecutor:
    """Threads that stay: to start and to end them takes longer than a small matrix."""
    return ThreadPoolExecutor(workers, NAME)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of the threads


def by_rows(pack: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A packing of blocks [N, K//32] whose arrays are those of its first `ROWS` rows, then those of
    the next, and so on: the same arrays, made part by part."""

    @wraps(pack)
    def packed(blocks: Any) -> Any:
        if blocks.ndim != 2 or len(blocks) <= ROWS:
            return pack(blocks)
        try:
            parts = in_parts(lambda first, stop: pack(blocks[first:stop]), len(blocks), ROWS)
        except ValueError:  # it numbers the rows of a part: the whole has the same error
            return pack(blocks)
        return tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))

    return packed
