"""Shared and global arrays that watch over the order of what threads load from and store to them.

Shared memory is watched word by word (`steps.simulator.shadow`). Of global memory only what the
launch itself stores is, and what launches before it, which may still run, use
(`steps.simulator.stream`): an array that a kernel only loads from costs no time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from steps.simulator.arrays import CheckedArray, offset_in_allocation
from steps.simulator.errors import Race, SimulatorError
from steps.simulator.ordering import SLOT, SLOT_BITS, Known, knows
from steps.simulator.scheduler import Schedule
from steps.simulator.shadow import Shadow

_RUN: Any = Schedule  # whose `current` is one while a kernel runs


class SharedArray(CheckedArray):
    """An array in shared memory."""

    __slots__ = ("_from", "_shadow", "_strides")

    def __init__(
        self, data: np.ndarray, name: str, space: str, alignment: int | None, shadow: Shadow
    ):
        super().__init__(data, name, space, alignment)
        self._shadow, self._from = shadow, offset_in_allocation(data)
        self._strides = data.strides

    def _share(self, data: np.ndarray) -> CheckedArray:
        return SharedArray(data, self.name, self.space, self.alignment, self._shadow)

    def _place(self, key: Any) -> tuple[int, int]:
        """The first byte and the number of bytes of elements side by side that the key names."""
        keys = key if type(key) is tuple else (key,)
        if len(keys) == self.ndim and not any(isinstance(i, slice) for i in keys):
            place = sum(int(i) * stride for i, stride in zip(keys, self._strides, strict=True))
            return self._from + place, self.itemsize
        part = self.data[keys]
        if not part.flags.c_contiguous:
            raise SimulatorError(f"{self.name}: a part that is not in one piece is stored at once")
        return offset_in_allocation(part), part.nbytes

    def __getitem__(self, key):
        if type(key) is int:
            if 0 <= key < self._length:
                self._load(self._from + key * self.itemsize)
                return self._item(key)
        elif type(key) is tuple and len(key) == 2 == self.ndim:
            (i, j), (rows, columns) = key, self.shape
            if type(i) is int and type(j) is int and 0 <= i < rows and 0 <= j < columns:
                row, column = self._strides
                self._load(self._from + i * row + j * column)
                return self._item(key)
        value = super().__getitem__(key)
        if not isinstance(value, CheckedArray):  # a part of it, of which nothing is read yet
            self._shadow.load(_RUN.current.lane, *self._place(key))
        return value

    def _load(self, at: int) -> None:
        """A thread loads the element there. Most of the time others have, who know the same."""
        shadow, lane, itemsize = self._shadow, _RUN.current.lane, self.itemsize
        if itemsize == 1 << shadow.bits:
            loads = shadow.loaded[at >> shadow.bits]
            if lane.epoch in loads:
                loads[lane.epoch] |= lane.bit
                return
        shadow.load(lane, at, itemsize)

    def __setitem__(self, key, value) -> None:
        self._checked(key)
        found = self._shadow.store(_RUN.current.lane, *self._place(key))
        before = found and self.data[key].tobytes()
        super().__setitem__(key, value)
        if found and self.data[key].tobytes() != before:
            raise found

    def store(self, index: int, data: Any) -> None:
        size = len(data)
        offset = CheckedArray.locate(self, index, size)
        found = self._shadow.store(_RUN.current.lane, self._from + offset, size)
        memory = self.writable_bytes
        if found and memory[offset : offset + size] != data:
            raise found
        memory[offset : offset + size] = data

    def exchange(self, index, function: Callable) -> Any:
        self._checked(index)
        self._shadow.atomic(_RUN.current.lane, *self._place(index))
        old = super().__getitem__(index)
        super().__setitem__(index, function(old))
        return old

    def locate(self, index: int, size: int, alignment: int | None = None) -> int:
        offset = CheckedArray.locate(self, index, size, alignment)
        self._shadow.load(_RUN.current.lane, self._from + offset, size)
        return offset

    def locate_for(self, lane: int, index: int, size: int, *, stores: bool = False) -> int:
        offset = CheckedArray.locate(self, index, size)
        running = _RUN.current.lane
        other = running.block.lanes[running.index // 32 * 32 + lane]
        if not stores:
            self._shadow.load(other, self._from + offset, size)
        elif found := self._shadow.store(other, self._from + offset, size):
            raise found
        return offset

    def begin_async_store(self, lane: Any, offset: int, size: int) -> None:
        self._shadow.begin_async_store(lane, self._from + offset, size)

    def end_async_store(self, lane: Any, offset: int, size: int) -> None:
        self._shadow.end_async_store(lane, self._from + offset, size)


# --- global memory


_ATOMIC = -1  # of a unit that atomics change
_BLOCK_BITS = 48  # above the access, the block


class _Stored:
    """What a launch stores to one array."""

    __slots__ = ("bits", "by", "counters")

    def __init__(self, itemsize: int):
        self.bits = min(itemsize, 4).bit_length() - 1
        self.by: dict[int, int] = {}  # unit -> block and access
        self.counters: dict[int, dict[int, Known]] = {}  # place of an atomic -> what it handed on


class GlobalArray(CheckedArray):
    """An argument of the kernel, or a part of one; nothing is stored to it yet."""

    __slots__ = ("_from", "_whole", "_writes", "in_use")

    def __init__(self, data: np.ndarray, name: str, whole: GlobalArray | None = None):
        super().__init__(data, name)
        self._whole: GlobalArray = whole or self
        self._from = offset_in_allocation(data) - offset_in_allocation(self._whole.data)
        self.in_use: Any = whole and whole.in_use  # by launches before: see `guard`
        self._writes: _Stored | None = None  # of the whole

    def guard(self, in_use: Any) -> None:
        """Launches before this one may still use some of it (`steps.simulator.stream.InUse`)."""
        self.in_use = in_use
        if in_use.stored:
            self._watch()

    def require_written(self) -> None:
        """Race where launches before may still store to it: for a load of any part of it."""
        if self.in_use is not None:
            self._require_free(_RUN.current.lane, 0, self.nbytes, stores=False)

    @property
    def stored(self) -> np.ndarray | None:
        """Of each byte of the whole, whether the kernel stored to it; None where it did not."""
        writes = self._whole._writes
        if writes is None:
            return None
        low, high = np.lib.array_utils.byte_bounds(self._whole.data)
        units = np.zeros(-(-(high - low) >> writes.bits), bool)
        units[list(writes.by)] = True
        return units.repeat(1 << writes.bits)

    def _watch(self) -> None:
        self.__class__ = _Watched  # type: ignore[assignment]
        self._length = self._stores = -1  # no fast path

    def _share(self, data: np.ndarray) -> CheckedArray:
        part = GlobalArray(data, self.name, self._whole)
        part.alignment = self.alignment
        if type(self) is _Watched:
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

    def _require_free(self, lane: Any, at: int, size: int, *, stores: bool) -> None:
        in_use = self.in_use
        if in_use is not None and not knows(lane, lane.block.order.launches_before):
            in_use.require_free(self.name, at, size, stores=stores)


class _Watched(GlobalArray):
    """One that the kernel stores to, or that launches before may still use."""

    __slots__ = ()

    def _places(self, key: Any) -> tuple[int, int]:
        """The first byte and the number of bytes that the key names, from the whole's first."""
        part = self.data[key if type(key) is tuple else (key,)]
        keys = key if type(key) is tuple else (key,)
        if part.ndim:
            if not part.flags.c_contiguous:
                raise SimulatorError(f"{self.name}: a part that is not in one piece is stored")
            first = offset_in_allocation(part) - offset_in_allocation(self._whole.data)
            return first, part.nbytes
        place = sum(int(i) * stride for i, stride in zip(keys, self.data.strides, strict=True))
        return self._from + place, self.itemsize

    def __getitem__(self, key):
        value = super().__getitem__(key)
        if not isinstance(value, CheckedArray):
            self._load(*self._places(key))
        return value

    def __setitem__(self, key, value) -> None:
        self._checked(key)
        found = self._store(*self._places(key))
        before = found and self.data[key].tobytes()
        CheckedArray.__setitem__(self, key, value)
        if found and self.data[key].tobytes() != before:
            raise found

    def exchange(self, index, function: Callable) -> Any:
        lane = _RUN.current.lane
        old = CheckedArray.__getitem__(self, index)
        CheckedArray.__setitem__(self, index, function(old))
        at, size = self._places(index)
        self._require_free(lane, at, size, stores=True)
        writes = self._written()
        for unit in range(at >> writes.bits, -(-(at + size) >> writes.bits)):
            writes.by[unit] = _ATOMIC
        lane.block.order.atomic(lane, writes.counters.setdefault(at, {}))
        return old

    def locate(self, index: int, size: int, alignment: int | None = None) -> int:
        offset = CheckedArray.locate(self, index, size, alignment)
        self._load(self._from + offset, size)
        return offset

    def store(self, index: int, data: Any) -> None:
        offset, size = CheckedArray.locate(self, index, len(data)), len(data)
        memory = self.writable_bytes
        found = self._store(self._from + offset, size)
        if found and memory[offset : offset + size] != data:
            raise found
        memory[offset : offset + size] = data

    def _written(self) -> _Stored:
        whole = self._whole
        if whole._writes is None:
            whole._writes = _Stored(whole.itemsize)
        return whole._writes

    def _load(self, at: int, size: int) -> None:
        lane = _RUN.current.lane
        self._require_free(lane, at, size, stores=False)
        writes = self._whole._writes
        if writes is None:
            return
        for unit in range(at >> writes.bits, -(-(at + size) >> writes.bits)):
            last = writes.by.get(unit, 0)
            if last > 0 and not _known(lane, last):
                raise self._race("a load of", lane, unit, last)

    def _store(self, at: int, size: int) -> Race | None:
        """An error unless all bytes are the same as before."""
        lane, found = _RUN.current.lane, None
        self._require_free(lane, at, size, stores=True)
        writes = self._written()
        by, access = writes.by, lane.block.order.block << _BLOCK_BITS | lane.access
        for unit in range(at >> writes.bits, -(-(at + size) >> writes.bits)):
            last = by.get(unit, 0)
            if last == _ATOMIC:
                continue
            if last and last != access and not _known(lane, last):
                found = self._race("a store to", lane, unit, last)
            by[unit] = access
        return found

    def _race(self, doing: str, lane: Any, unit: int, last: int) -> Race:
        block, slot = last >> _BLOCK_BITS, last & SLOT
        bits = self._whole._writes.bits  # type: ignore[union-attr]
        there = f"{doing} byte {unit << bits} of {self._whole.name}, to which thread {slot}"
        if block == lane.block.order.block:
            return Race(f"{there} stores: a barrier is missing between them")
        return Race(
            f"{there} of block number {block} stores: between them come, there, a fence and an "
            "atomic that counts the arrival; here, an atomic that sees it, a fence, and a barrier "
            "with the threads that did neither"
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
