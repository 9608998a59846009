"""Which load makes a NaN: one of shared memory to which nobody has stored.

Shared memory begins as NaN in the simulator. The launch is run once more and every load of bytes
that nobody has stored to is noted. Right kernels have such loads too, of leftovers that are never
stored to C. So it is run again for each of them, with zeros everywhere but there: the one with
which C is still NaN is the cause.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np

from steps.contract import Launch, Step
from steps.learn.exercises.rerun import LOADS, Watch, run_again
from steps.learn.exercises.trial import Array, File, Subject
from steps.learn.exercises.wording import listed, runs
from steps.simulator import banks
from steps.simulator.lanes import Lane
from steps.simulator.scheduler import now

MOST: Final = 16  # loads that are tried


@dataclass(frozen=True, slots=True)
class Load:
    """A load of what nobody has stored to. `lines`: of the file, the innermost first; `thread`: its
    index in the block, or None where it is a wgmma's; `missing`: by byte of the array."""

    lines: tuple[int, ...]
    name: str
    thread: int | None
    missing: Array


class Unwritten(Watch):
    """Notes the loads of shared memory that nobody has stored to. With `only`, all of it begins as
    zeros but the bytes that this load misses."""

    def __init__(self, path: Path, only: Load | None = None) -> None:
        super().__init__(path, "shared")
        self.only = only
        self.loads: dict[tuple[tuple[int, ...], str], Load] = {}
        self.stored: dict[int, Array] = {}  # by byte
        self.itemsize: dict[str, int] = {}

    def missed(self, whole: int, places: Any, thread: int | None) -> None:
        """A load of these bytes."""
        stored = self.stored[whole]
        if stored[places].all():
            return
        key = self.lines(), self.allocations[whole][0]
        load = self.loads.setdefault(key, Load(*key, thread, np.zeros(stored.size, bool)))
        load.missing[places] |= ~stored[places]

    def allocated(self, whole: int, name: str, data: Any) -> None:
        content = self.allocations[whole][1]
        self.itemsize[name] = data.itemsize
        self.stored[whole] = np.zeros(content.size, bool)
        if self.only is not None:
            same = name == self.only.name and content.size == self.only.missing.size
            content[~self.only.missing if same else slice(None)] = 0
        if content.size:
            allocation: Any = now().lane.block.memory.allocations[whole]
            allocation.shadow = _Shadow(allocation.shadow, self, whole)

    def accessed(self, lane: Lane, what: banks.Access, whole: int, at: int) -> None:
        if what.kind in LOADS:
            self.missed(whole, slice(at, at + what.size), lane.index)
        else:
            self.stored[whole][at : at + what.size] = True


class _Shadow:
    """In place of what looks for races: tells of the loads of a wgmma."""

    def __init__(self, shadow: Any, told: Unwritten, whole: int) -> None:
        self._shadow, self._told, self._whole = shadow, told, whole

    def load_async(self, lanes: Any, places: Array, accesses: Any) -> None:
        self._told.missed(self._whole, places.reshape(-1), None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shadow, name)


def unwritten(step: Step, subject: Subject, file: File, m: int, n: int) -> tuple[int, str] | None:
    """(line, sentences) of the load that makes C[m, n] NaN; None where that is none of shared
    memory."""
    first = Unwritten(file.path)
    launch = run_again(step, subject, banks=first).launch
    for load in islice(first.loads.values(), MOST):
        alone = run_again(step, subject, banks=Unwritten(file.path, load))
        if np.isnan(alone.out[m, n]):
            return load.lines[0] if load.lines else 0, _said(load, first, launch, file)
    return None


def _said(load: Load, found: Unwritten, launch: Launch, file: File) -> str:
    name, size = load.name, found.itemsize[load.name]
    where = ", called at ".join(map(file.line, load.lines))
    element = f"{name}[{int(np.argmax(load.missing)) // size}]"
    more = np.count_nonzero(load.missing) // size - 1
    if load.thread is None:
        others = f" and {more} more bytes" if more else ""
        said = f"A wgmma reads {element}{others} at {where}"
    else:
        said = f"Thread {load.thread} loads {element} at {where}"
    said += ", and nobody has stored to it: shared memory begins as NaN."
    stored = np.zeros_like(load.missing)
    for whole, mask in found.stored.items():
        if found.allocations[whole][0] == name and mask.size == stored.size:
            stored |= mask
    if stored.any():
        ranges = [
            f"[{a}]" if a == b else f"[{a}] to [{b}]"
            for a, b in runs(np.unique(np.flatnonzero(stored) // size).tolist())
        ]
        shown = f"{name}{listed(ranges, 3)}"
        return f"{said} Stored to are {shown}: is its place right, and is its store?"
    lines = [file.line(line) for line in _stores(name, launch, file)]
    if lines:
        return f"{said} No thread comes to the store at {' or '.join(lines)}: is its branch right?"
    return f"{said} Nothing stores to {name} at all: the store is missing."


def _stores(name: str, launch: Launch, file: File) -> Iterator[int]:
    """The lines of the kernel that store to an array."""
    code = launch.kernel.py_func.__code__
    for line in sorted({line for *_, line in code.co_lines() if line}):
        if re.search(rf"`{name}\[[^\]]*\] *=[^=]", file.line(line)):
            yield line
