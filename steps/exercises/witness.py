"""Who touched a byte of shared memory, thread by thread: the other line of a race.

The simulator finds a race at its second access and knows the thread of the first, not its line. The
same launch is run once more, in the same order of lanes, and every access to that byte noted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from steps.simulator.arrays import CheckedArray, offset_in_allocation, owner
from steps.simulator.lanes import Block, Lane
from steps.simulator.scheduler import now


@dataclass(frozen=True, slots=True)
class Access:
    """Of a thread, by its index in the block: the line of the file, and whether it stores."""

    thread: int
    line: int
    stores: bool


@dataclass
class Witness:
    """In place of a `BankCounter` of `simulate`: notes the accesses of one block to one byte of the
    allocation that is called `name`. `element` is how the kernel calls that byte."""

    path: Path
    block: str
    name: str
    byte: int
    accesses: list[Access] = field(default_factory=list)
    element: str = ""
    _names: dict[int, str] = field(default_factory=dict)  # of allocations, by their owner

    def before(self, thread: int, line: int, other: int) -> Access | None:
        """The last access of `other` before the first one of `thread` at `line` that follows it."""
        last: Access | None = None
        for access in self.accesses:
            if access.thread == other:
                last = access
            elif last is not None and (access.thread, access.line) == (thread, line):
                return last
        return last

    # --- what the simulator calls
    def array(self, data: Any, name: str, space: str, alignment: int) -> CheckedArray:
        called = self._names.setdefault(id(owner(data)), name)
        if called == self.name and not self.element:
            self.element = _element(data, name, self.byte)
        return _Witnessed(data, name, space, alignment, self, called == self.name)

    def close(self, blocks: Iterable[Block]) -> None:
        """Nothing is put together at a barrier."""

    def closing(self, block: Block, function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    def note(self, lane: Lane, at: int, size: int, stores: bool) -> None:
        block = ", ".join(map(str, lane.block.index))
        if at <= self.byte < at + size and block == self.block:
            self.accesses.append(Access(lane.index, self._line(), stores))

    def _line(self) -> int:
        frame: FrameType | None = sys._getframe(3)
        while frame is not None and frame.f_code.co_filename != str(self.path):
            frame = frame.f_back
        return 0 if frame is None else frame.f_lineno


def _element(data: Any, name: str, byte: int) -> str:
    """ "tile_a[1, 0]", or the byte where the array has no such element."""
    at = (byte - offset_in_allocation(data)) // data.itemsize
    if not 0 <= at < data.size:
        return ""
    index = ", ".join(map(str, np.unravel_index(at, data.shape)))
    return f"{name}[{index}]"


class _Witnessed(CheckedArray):
    """A shared array that tells a witness of its accesses, if it is the one that is watched."""

    __slots__ = ("_from", "_watched", "_witness")

    def __init__(
        self,
        data: Any,
        name: str,
        space: str,
        alignment: int | None,
        witness: Witness,
        watched: bool,
    ):
        super().__init__(data, name, space, alignment)
        self._witness, self._watched = witness, watched
        self._from = offset_in_allocation(data)

    def _share(self, data: Any, name: str | None = None) -> CheckedArray:
        name = name or self.name
        return _Witnessed(data, name, self.space, self.alignment, self._witness, self._watched)

    def _note(self, offset: int, size: int, *, stores: bool, lane: Lane | None = None) -> None:
        if self._watched:
            self._witness.note(lane or now().lane, self._from + offset, size, stores)

    def _key(self, key: Any) -> tuple[int, int]:
        part = self.data[key if isinstance(key, tuple) else (key,)]
        if part.ndim:
            return offset_in_allocation(part) - self._from, part.nbytes
        keys = key if isinstance(key, tuple) else (key,)
        place = sum(int(i) * s for i, s in zip(keys, self.data.strides, strict=True))
        return place, self.itemsize

    def __getitem__(self, key: Any) -> Any:
        value = super().__getitem__(key)
        if not isinstance(value, CheckedArray):
            self._note(*self._key(key), stores=False)
        return value

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self._note(*self._key(key), stores=True)

    def locate(self, index: int, size: int, alignment: int | None = None) -> int:
        offset = CheckedArray.locate(self, index, size, alignment)
        self._note(offset, size, stores=False)
        return offset

    def store(self, index: int, data: Any) -> None:
        offset, size = CheckedArray.locate(self, index, len(data)), len(data)
        self.writable_bytes[offset : offset + size] = data
        self._note(offset, size, stores=True)

    def begin_async_store(self, lane: Any, offset: int, size: int) -> None:
        self._note(offset, size, stores=True, lane=lane)

    def locate_for(self, lane: int, index: int, size: int, *, stores: bool = False) -> int:
        offset = CheckedArray.locate(self, index, size)
        running = now().lane
        other = running.block.lanes[running.index // 32 * 32 + lane]
        self._note(offset, size, stores=stores, lane=other)
        return offset
