"""A thread-safe LRU cache."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Kept(Generic[T]):
    """At most `most` values; the one used longest ago gives way. Threads may share it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[Hashable, T] = OrderedDict()
        self._changing = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable) -> T | None:
        """The value of a key, which is then the one used last; None where it is not kept."""
        try:
            value = self._values[key]
            self._values.move_to_end(key)
        except KeyError:  # never kept, or another thread's `put` has just dropped it
            return None
        return value

    def put(self, key: Hashable, value: T) -> T:
        """Keep a value. Returns the one that is kept: of two threads with one key the first's."""
        with self._changing:
            value = self._values.setdefault(key, value)
            while len(self._values) > self._most:
                self._values.popitem(last=False)
        return value

    def of(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of a key, made if it is not kept."""
        found = self.get(key)
        return self.put(key, make()) if found is None else found

    def clear(self) -> None:
        with self._changing:
            self._values.clear()
