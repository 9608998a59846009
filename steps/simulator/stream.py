"""Launches one after the other, as far as they may overlap.

With programmatic dependent launch (`steps.contract.Launch.overlap`) a launch may begin while those
before it still run: the one before it, and while that one may overlap with its own predecessor,
that one too. Until a thread knows of a `griddepcontrol_wait`, its own or that of a thread it met at
a barrier, it must not load what they store, nor store to what they use at all. A launch that may
not overlap begins when all before it have ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from steps.simulator.errors import Race


@dataclass(frozen=True, slots=True)
class Region:
    """An array that a launch uses. It is kept, so that its memory is not given to another.

    stored: of each of its bytes, whether the launch stored to it; None where it stored to none.
    """

    array: np.ndarray
    launch: str
    stored: np.ndarray | None

    @property
    def bounds(self) -> tuple[int, int]:
        return np.lib.array_utils.byte_bounds(self.array)

    def stores_to(self, first: int, end: int) -> bool:
        """Whether the launch stored to any byte of a range, counted from the array's first."""
        return self.stored is not None and bool(self.stored[max(first, 0) : max(end, 0)].any())


class InUse:
    """The part of one argument that launches before may still use."""

    __slots__ = ("regions", "stored")

    def __init__(self, regions: Sequence[tuple[int, int, Region]]):
        self.regions = regions  # first byte and end within the argument
        self.stored = any(region.stored is not None for _, _, region in regions)

    def require_free(self, name: str, at: int, size: int, *, stores: bool) -> None:
        """Race where a thread that has not waited must not access these bytes."""
        for first, end, region in self.regions:
            if not (at < end and first < at + size):
                continue
            clashes = region.stores_to(at - first, at + size - first)
            if stores or clashes:
                doing = "a store to" if stores else "a load of"
                does = "stores to" if clashes else "uses"
                raise Race(
                    f"{doing} byte {at} of {name}, which the launch of {region.launch} before "
                    f"{does} and may still be running: griddepcontrol_wait comes first"
                )


class Stream:
    """What was launched last. `last`: the arrays of the last launch."""

    def __init__(self) -> None:
        self.last: list[Region] = []
        self._regions: list[Region] = []

    def synchronize(self) -> None:
        """All launches have ended."""
        self.last, self._regions = [], []

    def begin(self, overlap: bool) -> None:
        """The next launch; unless it may overlap, all before have ended."""
        if not overlap:
            self.synchronize()

    def in_use(self, array: np.ndarray) -> InUse | None:
        """What launches before may still use of it."""
        if not self._regions:
            return None
        low, high = np.lib.array_utils.byte_bounds(array)
        found = []
        for region in self._regions:
            first, end = region.bounds
            if first < high and low < end:
                found.append((first - low, end - low, region))
        return InUse(found) if found else None

    def ended(
        self, launch: str, arrays: Iterable[tuple[np.ndarray, np.ndarray | bool | None]]
    ) -> None:
        """The launch used these arrays, and stored to these of their bytes (`Region.stored`), or,
        where that is True, to all of them."""
        self.last = []
        for array, stored in arrays:
            if isinstance(stored, bool):
                stored = np.ones(array.nbytes, bool) if stored else None
            self.last.append(Region(array, launch, stored))
        self._regions += self.last
