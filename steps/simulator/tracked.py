"""Shared and global arrays that watch over the order of what threads load from and store to them.

Shared memory is watched word by word (`steps.simulator.shadow`). Of global memory only what the
launch itself stores is, and what launches before it, which may still run, use
(`steps.simulator.stream`): an array that a kernel only loads from costs no time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from steps.simulator.arrays import CheckedArray
from steps.simulator.errors import Race
from steps.simulator.ordering import SLOT, SLOT_BITS, Known, knows
from steps.simulator.scheduler import Schedule
from steps.simulator.shadow import Shadow

_RUN: Any = Schedule  # whose `current` is one while a kernel runs


class WatchedArray(CheckedArray):
    """An array that is told of every access: by which lane, its first byte from the start of the
    allocation, the number of bytes, and what kind of access it is."""

    __slots__ = ()

    def _load(self, lane: Any, at: int, size: int, kind: str = "load") -> None:
        raise NotImplementedError

    def _store(self, lane: Any, at: int, size: int, kind: str = "store") -> Race | None:
        """An error unless all bytes are the same as before."""
        raise NotImplementedError

    def _change(self, lane: Any, at: int, size: int) -> None:
        """By an atomic."""
        raise NotImplementedError

    def __getitem__(self, key):
        at = self._byte(key)
        if at >= 0:
            self._load(_RUN.current.lane, self._begin() + at, self.itemsize)
            return self._item(key)
        value = CheckedArray.__getitem__(self, key)
        if not isinstance(value, CheckedArray):  # a part of it, of which nothing is read yet
            self._load(_RUN.current.lane, *self.extent(key))
        return value

    def __setitem__(self, key, value) -> None:
        found = self._store(_RUN.current.lane, *self.extent(key))
        before = found and self.data[key].tobytes()
        CheckedArray.__setitem__(self, key, value)
        if found and self.data[key].tobytes() != before:
            raise found

    def store(self, index: int, data: Any) -> None:
        size, memory = len(data), self.writable_bytes
        offset = CheckedArray.locate(self, index, size)
        found = self._store(_RUN.current.lane, self._begin() + offset, size)
        if found and memory[offset : offset + size] != data:
            raise found
        memory[offset : offset + size] = data

    def exchange(self, index, function: Callable) -> Any:
        self._change(_RUN.current.lane, *self.extent(index))
        old = CheckedArray.__getitem__(self, index)
        CheckedArray.__setitem__(self, index, function(old))
        return old

    def locate(self, index: int, size: int, alignment: int | None = None) -> int:
        offset = CheckedArray.locate(self, index, size, alignment)
        self._load(_RUN.current.lane, self._begin() + offset, size)
        return offset

    def locate_for(self, lane: int, index: int, size: int, *, stores: bool = False) -> int:
        offset = CheckedArray.locate(self, index, size)
        running = _RUN.current.lane
        other, at = running.block.lanes[running.index // 32 * 32 + lane], self._begin() + offset
        if not stores:
            self._load(other, at, size, "ldmatrix")
        elif found := self._store(other, at, size, "stmatrix"):
            raise found
        return offset


class SharedArray(WatchedArray):
    """An array in shared memory."""

    __slots__ = ("_shadow",)

    def __init__(
        self, data: np.ndarray, name: str, space: str, alignment: int | None, shadow: Shadow
    ):
        super().__init__(data, name, space, alignment)
        self._shadow = shadow

    def _share(self, data: np.ndarray) -> CheckedArray:
        return SharedArray(data, self.name, self.space, self.alignment, self._shadow)

    def _load(self, lane: Any, at: int, size: int, kind: str = "load") -> None:
        self._shadow.load(lane, at, size)

    def _store(self, lane: Any, at: int, size: int, kind: str = "store") -> Race | None:
        return self._shadow.store(lane, at, size)

    def _change(self, lane: Any, at: int, size: int) -> None:
        self._shadow.atomic(lane, at, size)

    def begin_async_store(self, lane: Any, offset: int, size: int) -> None:
        self._shadow.begin_async_store(lane, self._begin() + offset, size)

    def end_async_store(self, lane: Any, offset: int, size: int) -> None:
        self._shadow.end_async_store(lane, self._begin() + offset, size)


# --- global memory


_ATOMIC = -1  # of a unit that atomics change
_BLOCK_BITS = 48  # above the access, the block


class _Stored:
    """What a launch stores to one array."""

    __slots__ = ("bits", "by", "counters", "looked")

    def __init__(self, itemsize: int):
        self.bits = min(itemsize, 4).bit_length() - 1
        self.by: dict[int, int] = {}  # unit -> block and access
        self.counters: dict[int, dict[int, Known]] = {}  # place of an atomic -> what it handed on
        # Relaxed loads: unit -> block and slot -> block and access of the last one
        self.looked: dict[int, dict[int, int]] = {}


class GlobalArray(CheckedArray):
    """An argument of the kernel, or a part of one; nothing is stored to it yet."""

    __slots__ = ("_whole", "_writes", "in_use")

    def __init__(self, data: np.ndarray, name: str, whole: GlobalArray | None = None):
        super().__init__(data, name)
        self._whole: GlobalArray = whole or self
        self.in_use: Any = whole and whole.in_use  # by launches before: see `guard`
        self._writes: Any = None  # of the whole: a `_Stored` once it is watched

    def guard(self, in_use: Any) -> None:
        """Launches before this one may still use some of it (`steps.simulator.stream.InUse`)."""
        self.in_use = in_use
        if in_use.stored:
            self._watch()

    def require_written(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Race unless a copy that the lane issues may read these bytes, from begin to end: where
        launches before, or other threads, may still store to them."""

    @property
    def stored(self) -> np.ndarray | None:
        """Of each byte of the whole, whether the kernel stored to it; None where it did not."""
        writes = self._whole._writes
        if writes is None or not writes.by:
            return None
        low, high = np.lib.array_utils.byte_bounds(self._whole.data)
        units = np.zeros(-(-(high - low) >> writes.bits), bool)
        units[list(writes.by)] = True
        return units.repeat(1 << writes.bits)

    def _watch(self) -> None:
        self.__class__ = _WatchedGlobal  # type: ignore[assignment]
        self._stores = -1  # no fast path
        if self._whole._writes is None:
            self._whole._writes = _Stored(self._whole.itemsize)

    def _share(self, data: np.ndarray) -> CheckedArray:
        part = GlobalArray(data, self.name, self._whole)
        part.alignment = self.alignment
        if type(self) is _WatchedGlobal:
            part._watch()
        return part

    def __setitem__(self, key, value) -> None:
        self._watch()
        self[key] = value

    def exchange(self, index, function: Callable) -> Any:
        self._watch()
        return self.exchange(index, function)

    def store(self, index: int, data: Any) -> None:
        self._watch()
        self.store(index, data)

    def locate_relaxed(self, index: int, size: int) -> int:
        self._watch()
        return self.locate_relaxed(index, size)

    def store_relaxed(self, index: int, data: Any) -> None:
        self._watch()
        self.store_relaxed(index, data)


class _WatchedGlobal(WatchedArray, GlobalArray):
    """One that the kernel stores to, or that launches before may still use."""

    __slots__ = ()

    def _units(self, lane: Any, at: int, size: int, *, stores: bool) -> range:
        """Those of the whole that an access is of, which launches before must have left alone."""
        whole, in_use = self._whole, self.in_use
        at -= whole._begin()
        if in_use is not None and not knows(lane, lane.block.order.launches_before):
            in_use.require_free(self.name, at, size, stores=stores)
        bits = whole._writes.bits
        return range(at >> bits, -(-(at + size) >> bits))

    def _load(self, lane: Any, at: int, size: int, kind: str = "load") -> None:
        by, units = self._whole._writes.by, self._units(lane, at, size, stores=False)
        for unit in units if by else ():
            last = by.get(unit, 0)
            if last > 0 and not _known(lane, last):
                raise self._race("a load of", lane, unit, last)

    def require_written(self, ranges: Iterable[tuple[int, int]]) -> None:
        by, lane = self._whole._writes.by, _RUN.current.lane
        for begin, end in ranges:
            units = self._units(lane, self._begin() + begin, end - begin, stores=False)
            for unit in units if by else ():
                last = by.get(unit, 0)
                if last > 0 and not (lane.proxied and _known(lane.proxied, last)):
                    race = self._race("a copy of", lane, unit, last)
                    raise Race(f"{race}; then fence_proxy_async_global in the thread that copies")

    def _store(self, lane: Any, at: int, size: int, kind: str = "store") -> Race | None:
        by, found = self._whole._writes.by, None
        access = lane.block.order.block << _BLOCK_BITS | lane.access
        looked = self._whole._writes.looked
        for unit in self._units(lane, at, size, stores=True):
            for look in looked.get(unit, {}).values() if looked else ():
                if not _known(lane, look):
                    raise self._race("a store to", lane, unit, look, "loads")
            last = by.get(unit, 0)
            if last == _ATOMIC:
                continue
            if last and last != access and not _known(lane, last):
                found = self._race("a store to", lane, unit, last)
            by[unit] = access
        return found

    def _change(self, lane: Any, at: int, size: int) -> None:
        writes, units = self._whole._writes, self._units(lane, at, size, stores=True)
        writes.by.update(dict.fromkeys(units, _ATOMIC))
        lane.block.order.atomic(lane, writes.counters.setdefault(at, {}))

    def exchange(self, index, function: Callable) -> Any:
        old = WatchedArray.exchange(self, index, function)
        if CheckedArray.__getitem__(self, index) != old:
            _RUN.current.changed()
        return old

    def locate_relaxed(self, index: int, size: int) -> int:
        """As `locate`, when all others have run: the lane may be waiting for what they store."""
        _RUN.current.look()
        offset, lane = self.locate(index, size), _RUN.current.lane
        writes, at = self._whole._writes, self._begin() + offset
        for place in range(at, at + size) if writes.counters else ():
            if place in writes.counters:
                lane.block.order.observe(lane, writes.counters[place])
        block = lane.block.order.block << _BLOCK_BITS
        access = block | lane.access & ~SLOT | lane.loads
        for unit in self._units(lane, at, size, stores=False):
            writes.looked.setdefault(unit, {})[block | lane.loads] = access
        return offset

    def store_relaxed(self, index: int, data: Any) -> None:
        lane, size, memory = _RUN.current.lane, len(data), self.writable_bytes
        offset = CheckedArray.locate(self, index, size)
        writes, at = self._whole._writes, self._begin() + offset
        units = self._units(lane, at, size, stores=True)
        writes.by.update(dict.fromkeys(units, _ATOMIC))
        counter: dict[int, Known] = {}  # what others stored there is shown no more
        writes.counters[at] = counter
        lane.block.order.show(lane, counter)
        if memory[offset : offset + size] != data:
            memory[offset : offset + size] = data
            _RUN.current.changed()

    def _race(self, doing: str, lane: Any, unit: int, last: int, did: str = "stores") -> Race:
        block, thread = last >> _BLOCK_BITS, (last & SLOT) % lane.block.order.threads
        byte, which = unit << self._whole._writes.bits, "which" if did == "loads" else "to which"
        there = f"{doing} byte {byte} of {self._whole.name}, {which} thread {thread}"
        if block == lane.block.order.block:
            return Race(f"{there} {did}: a barrier is missing between them")
        return Race(
            f"{there} of block number {block} {did}: between them come, there, a fence and an "
            "atomic or a relaxed store; here, an atomic or a relaxed load that sees it, a fence, "
            "and a barrier with the threads that did neither"
        )


def _known(lane: Any, last: int) -> bool:
    """Whether a store of this launch came before what the thread does now."""
    block, access = last >> _BLOCK_BITS, last & (1 << _BLOCK_BITS) - 1
    if block == lane.block.order.block:
        return knows(lane, access)
    if lane.elsewhere is None:
        return False
    known, slot = lane.elsewhere.seen.get(block, ()), access & SLOT
    return slot < len(known) and known[slot] >= access >> SLOT_BITS
