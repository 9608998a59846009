"""Lists and ranges in sentences, cut off where they would be long."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

SHOWN: Final = 4


def runs(indices: Iterable[int]) -> Iterator[tuple[int, int]]:
    """(first, last) of neighbours."""
    found: list[list[int]] = []
    for i in indices:
        if found and found[-1][1] == i - 1:
            found[-1][1] = i
        else:
            found.append([i, i])
    yield from ((first, last) for first, last in found)


def span(first: int, last: int) -> str:
    """ "3", "3 to 5"."""
    return str(first) if first == last else f"{first} to {last}"


def listed(parts: Sequence[str], shown: int = SHOWN) -> str:
    """ "1, 3 to 5, 7, 9 ..."."""
    return ", ".join(parts[:shown]) + (" ..." if len(parts) > shown else "")
