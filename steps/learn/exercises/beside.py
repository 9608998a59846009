"""What a thread block loads, beside what it loads in the step's own kernel.

The block that stores a wrong output is run once more in both, and every load is noted. Three things
tell where a kernel goes wrong:

    unwritten   it loads shared memory to which nobody has stored, which is NaN in the simulator
    loads       a thread loads from other places than that of the step's own kernel
    contents    it finds something else in shared memory than the step's own kernel finds there

Later a place of shared memory may hold something else, so the first value that is loaded counts.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from steps.contract import Step
from steps.learn.exercises.rerun import LOADS, Watch, run_again
from steps.learn.exercises.trial import Array, File, Subject
from steps.simulator import banks
from steps.simulator.lanes import WARP, Lane
from steps.simulator.scheduler import now

WORD: Final = 4  # bytes of an array of bytes that are shown as one number
SHIFTS: Final = 64  # elements, up to which a value is sought in another place
BLOCKS: Final = 64  # of a launch, among which the one that stores an output is sought
RANGES: Final = 3  # of elements, that are listed


class Finding(NamedTuple):
    """A cause in a word or two, and the sentence that says it."""

    cause: str
    says: str


@dataclass
class Contents:
    """Of one shared array, by byte: how often it was `stored` to; the first value that was
    `loaded`; how often it `had_been` stored to then, -1 where it never was loaded; and the `line`
    of the last store before. `misser`: (lines, thread) of the first load of what nobody had stored
    to, its thread None for a wgmma."""

    stored: Array
    loaded: Array
    had_been: Array
    line: Array
    misser: tuple[tuple[int, ...], int | None] = ((), None)

    @classmethod
    def of(cls, size: int) -> Contents:
        stored, loaded = np.zeros(size, int), np.zeros(size, np.uint8)
        return cls(stored, loaded, np.full(size, -1), np.zeros(size, int))


class Loads(Watch):
    """Notes all loads of a thread block, and what it stores to C."""

    warps = None  # all of them

    def __init__(self, path: Path, block: tuple[int, ...]) -> None:
        super().__init__(path, "shared", "global")
        self.block = block
        self.shared: dict[str, Contents] = {}
        # by thread, by array: (first byte, bytes) -> the line
        self.loads: defaultdict[int, dict[str, dict[tuple[int, int], int]]]
        self.loads = defaultdict(lambda: defaultdict(dict))
        self.stores: dict[int, int] = {}  # byte of C -> thread
        self.arrays: dict[str, tuple[tuple[int, ...], Any]] = {}  # name -> shape, dtype

    def allocated(self, whole: int, name: str, data: Any, space: str) -> None:
        self.arrays[name] = data.shape, data.dtype
        if space == "shared" and data.nbytes:
            self.shared[name] = Contents.of(self.allocations[whole][1].size)
            allocation: Any = now().lane.block.memory.allocations[whole]
            allocation.shadow = _Shadow(allocation.shadow, self, whole)

    def accessed(self, lane: Lane, what: banks.Access, whole: int, at: int) -> None:
        name = self.allocations[whole][0]
        if what.kind in LOADS:
            line = next(iter(self.lines()), 0)
            self.loads[lane.index][name].setdefault((at, what.size), line)
            if what.space == "shared":
                self.loaded(whole, np.arange(at, at + what.size), lane.index)
            return
        if what.space == "shared":
            found, part = self.shared[name], slice(at, at + what.size)
            found.stored[part] += 1
            if (found.had_been[part] < 0).all():
                found.line[part] = next(iter(self.lines()), 0)
        elif name == "c":
            self.stores |= dict.fromkeys(range(at, at + what.size), lane.index)

    def loaded(self, whole: int, places: Array, thread: int | None) -> None:
        """These bytes of a shared array are; the thread is None for a wgmma."""
        name, data = self.allocations[whole]
        found = self.shared[name]
        new = places[found.had_been[places] < 0]
        if not found.misser[0] and not found.stored[new].all():
            found.misser = self.lines(), thread
        found.loaded[new], found.had_been[new] = data[new], found.stored[new]


class _Shadow:
    """In place of what looks for races: tells of the loads of a wgmma."""

    def __init__(self, shadow: Any, told: Loads, whole: int) -> None:
        self._shadow, self._told, self._whole = shadow, told, whole

    def load_async(self, lanes: Any, places: Array, accesses: Any) -> None:
        self._told.loaded(self._whole, places.reshape(-1), None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shadow, name)


def which_blocks(step: Step, subject: Subject, path: Path) -> str:
    """Of a grid that leaves outputs out: which thread blocks store to one element, or to none."""
    first = Loads(path, (0, 0, 0))
    grid = (*run_again(step, subject, trace=first).launch.grid, 1, 1)[:3]
    stored = {first.block: set(first.stores)}
    for block in islice(np.ndindex(grid), 1, BLOCKS):
        loads = Loads(path, block)
        run_again(step, subject, trace=loads)
        stored[block] = set(loads.stores)
    for axis, (name, extent) in enumerate(zip("xyz", grid, strict=True)):
        others = [block for block in stored if block[axis]]
        if not others or not stored[first.block]:
            continue
        if stored[first.block] & stored[others[0]]:
            return (
                f"Blocks {first.block} and {others[0]} store to the same elements of C: their "
                f"place does not depend on blockIdx.{name}."
            )
        if not any(stored[block] for block in others):
            return (
                f"The grid has {extent} thread blocks along {name}, and only the first of them "
                "store to C: m and n are exchanged, or a guard compares with the wrong extent."
            )
    return ""


class Beside:
    """The block that stores C[m, n], of a file's kernel and of the step's own."""

    def __init__(
        self, step: Step, right: Step, subject: Subject, file: File, m: int, n: int
    ) -> None:
        self.file, self.byte = file, 4 * (m * subject.case.shape[1] + n)
        self.own = Loads(file.path, (0, 0, 0))
        grid = (*run_again(step, subject, trace=self.own).launch.grid, 1, 1)[:3]
        others = islice(np.ndindex(grid), 1, BLOCKS)
        while self.byte not in self.own.stores and (block := next(others, None)) is not None:
            self.own = Loads(file.path, block)
            run_again(step, subject, trace=self.own)
        self.right = Loads(file.path, self.own.block)
        run_again(right, subject, trace=self.right)

    def _shared(self) -> Iterator[tuple[str, Contents, Contents]]:
        """(name, the file's, the step's) of the arrays that both have."""
        for name, found in self.own.shared.items():
            theirs = self.right.shared.get(name)
            if theirs is not None and theirs.stored.size == found.stored.size:
                yield name, found, theirs

    def unwritten(self) -> Finding | None:
        """A load of what nobody has stored to. The step's own kernel may have such loads too, of
        leftovers that are never stored to C."""
        for name, found, theirs in self._shared():
            odd = np.flatnonzero((found.had_been == 0) & (theirs.had_been != 0))
            if len(odd):
                lines, thread = found.misser
                where = ", called at ".join(map(self.file.line, lines))
                who = "A wgmma reads" if thread is None else f"Thread {thread} loads"
                said = f"{who} {self._ranges(name, odd[:1])} at {where}, and nobody has stored to "
                said += f"it: shared memory begins as NaN. {self._stored(name, found)}"
                return Finding("nan", said)
        return None

    def _stored(self, name: str, found: Contents) -> str:
        """Where else something is stored to an array, or could be."""
        if found.stored.any():
            where = self._ranges(name, np.flatnonzero(found.stored))
            return f"Stored to are {where}: is its place right, and is its store?"
        store = re.compile(rf" *{name}\[[^\]]*\] *=[^=]")
        text = self.file.path.read_text(encoding="utf-8").splitlines()
        lines = [self.file.line(i) for i, line in enumerate(text, start=1) if store.match(line)]
        if lines:
            return f"No thread comes to the store at {' or '.join(lines)}: is its branch right?"
        return f"Nothing stores to {name} at all: the store is missing."

    def loads(self) -> Finding | None:
        """A thread that does not load what that of the step's own kernel does: the one that stores
        C[m, n], else one of its warp, else any."""
        index = self.own.stores.get(self.byte, 0)
        for thread in sorted(
            self.right.loads, key=lambda t: (t != index, t // WARP != index // WARP, t)
        ):
            for name, right in self.right.loads[thread].items():
                own = self.own.loads[thread][name]
                missing, extra = _bytes(right) - _bytes(own), _bytes(own) - _bytes(right)
                if missing:
                    odd = own if not extra else {one for one in own if extra & _bytes([one])}
                    lines = sorted({own[one] for one in odd if own[one]})
                    wanted = self._ranges(name, missing)
                    said = f"In the step's own kernel thread {thread} loads {wanted}, here "
                    said += self._ranges(name, extra) if extra else "it does not"
                    where = listed([self.file.line(line) for line in lines], 2)
                    said += f": it loads {name} at {where}" if where else ", as a guard says"
                    said += self._exchanged(name, _bytes(own), _bytes(right))
                    return Finding("loads", f"{said}.")
        return None

    def _exchanged(self, name: str, own: set[int], right: set[int]) -> str:
        """Whether they are the same elements with row and column exchanged."""
        shape, dtype = self.own.arrays[name]
        if len(shape) != 2:
            return ""
        mine, theirs = (
            {divmod(byte // dtype.itemsize, shape[1]) for byte in each} for each in (own, right)
        )
        same = mine == {(j, i) for i, j in theirs} and mine != theirs
        return ". Its row and its column are exchanged" if same else ""

    def contents(self) -> Finding | None:
        """A place of shared memory that holds another value than in the step's own kernel."""
        for name, found, theirs in self._shared():
            both = (found.had_been > 0) & (found.had_been == theirs.had_been)
            differ = np.flatnonzero(both & (found.loaded != theirs.loaded))
            if len(differ):
                stored = f"It is stored at {self.file.line(found.line[differ[0]])}."
                said = self._differ(name, found.loaded, theirs.loaded, differ)
                return Finding("contents", f"{said}. {stored if found.line[differ[0]] else ''}")
        return None

    def _differ(self, name: str, own: Array, right: Array, differ: Array) -> str:
        """Both contents, by byte, and where they differ."""
        dtype = self.own.arrays[name][1]
        shown, size = (np.dtype(np.uint32), WORD) if dtype == np.uint8 else (dtype, dtype.itemsize)
        own, right = (one[: one.size // size * size].view(shown) for one in (own, right))
        places = np.unique(differ // size)
        if self._is_transposed(name, own, right, places):
            return f"{name}[i, j] holds what belongs to {name}[j, i]: row and column are exchanged"
        more = f", and {len(places) - 1} more are wrong" if len(places) > 1 else ""
        same: dict[int, Array] = {}
        most = 0
        for shift in sorted(range(-SHIFTS, SHIFTS + 1), key=abs):
            inside = places[(places + shift >= 0) & (places + shift < right.size)]
            same[shift] = inside[own[inside] == right[inside + shift]]
            most = shift if len(same[shift]) > len(same[most]) else most
        if 3 * len(same[most]) > len(places):
            i = same[most][0]
            mine, theirs = (self._ranges(name, [j * size]) for j in (i, i + most))
            return f"{mine} holds what belongs to {theirs}{more}"
        i = int(places[0])
        form = "#x" if shown == np.uint32 else "g" if shown.kind == "f" else "d"
        mine, theirs = (format(x, form) for x in (own[i], right[i]))
        place = self._ranges(name, [i * size])
        return f"{place} holds {mine}, and {theirs} in the step's own kernel{more}"

    def _is_transposed(self, name: str, own: Array, right: Array, places: Array) -> bool:
        """Whether a matrix has the other's values with row and column exchanged, at these places
        of it."""
        shape, _ = self.own.arrays[name]
        if len(shape) != 2 or own.size != shape[0] * shape[1]:
            return False
        i, j = np.divmod(places, shape[1])
        square = (i < shape[1]) & (j < shape[0])
        theirs = right[j[square] * shape[1] + i[square]]
        return bool(square.any() and (own[places[square]] == theirs).all())

    def _ranges(self, name: str, places: Iterable[int]) -> str:
        """Of bytes, as the kernel calls them: "ring[0] to [13311], ring[13568]"."""
        (shape, dtype), said = self.own.arrays[name], []
        for ends in runs(sorted({int(byte) // dtype.itemsize for byte in places})):
            one, other = (
                ", ".join(map(str, np.unravel_index(i, shape) if len(shape) > 1 else (i,)))
                for i in ends
            )
            said.append(f"{name}[{one}]" + (f" to [{other}]" if one != other else ""))
        return listed(said, RANGES)


def _bytes(loads: Iterable[tuple[int, int]]) -> set[int]:
    return {byte for at, size in loads for byte in range(at, at + size)}


# --- lists and ranges in sentences ----------------------------------------------------------------


def runs(indices: Iterable[int]) -> Iterator[tuple[int, int]]:
    """(first, last) of neighbours."""
    for _, run in groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0]):
        own = [i for _, i in run]
        yield own[0], own[-1]


def span(first: int, last: int) -> str:
    """ "3", "3 to 5"."""
    return str(first) if first == last else f"{first} to {last}"


def listed(parts: Sequence[str], shown: int = 4) -> str:
    """ "1, 3 to 5, 7, 9 ..."."""
    return ", ".join(parts[:shown]) + (" ..." if len(parts) > shown else "")
