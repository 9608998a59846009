"""A race in words: both threads and both lines, and the wait or barrier that is missing.

The simulator finds a race at its second access and knows the thread of the first, not its line. So
the launch is run once more, and every access to that byte noted.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from steps.contract import Step
from steps.learn.exercises.rerun import LOADS, Watch, run_again
from steps.learn.exercises.trial import Diagnosis, Fault, File, Subject
from steps.simulator import banks
from steps.simulator.arrays import CheckedArray, offset_in_allocation, owner
from steps.simulator.lanes import Lane

_RACE: Final = re.compile(
    r"(?P<doing>.*?) byte (?P<byte>\d+) of (?P<name>\w+).*?thread (?P<other>\d+) (?P<did>\w+)",
    re.DOTALL,
)


class Access(NamedTuple):
    """Of a thread, by its index in the block: the line of the file, and whether it stores."""

    thread: int
    line: int
    stores: bool


class Copy(NamedTuple):
    """A cp.async under way: the line that issued it, and its group, the newest of the thread being
    1; 0 where it is not committed."""

    line: int
    group: int


class Witness(Watch):
    """Notes the accesses of one block to one byte of the allocation whose first array is called
    `name`. `element` is how the kernel calls that byte, "" where it cannot be said. `copies`: by
    thread and line of an access and by thread that copies, the copy that was under way then."""

    def __init__(self, path: Path, block: str, name: str, byte: int) -> None:
        super().__init__(path, "shared", "global")
        self.block, self.name, self.byte = block, name, byte
        self.accesses: list[Access] = []
        self.element = ""
        self.copies: dict[tuple[int, int, int], Copy] = {}
        self._copying: dict[int, tuple[Lane, int]] = {}  # by thread; the line of its last cp.async

    def before(self, thread: int, line: int, other: int, stores: bool) -> Access | None:
        """The last access of `other` of that kind before the first one of `thread` at `line` that
        follows it."""
        last: Access | None = None
        for access in self.accesses:
            if access.thread == other and access.stores == stores:
                last = access
            elif last is not None and (access.thread, access.line) == (thread, line):
                return last
        return last

    def array(self, data: Any, name: str, space: str, alignment: int | None = None) -> CheckedArray:
        made = super().array(data, name, space, alignment)
        if self._is_mine(data) and not self.element:
            at = (self.byte - offset_in_allocation(data)) // data.itemsize
            if 0 <= at < data.size:
                place = map(str, np.unravel_index(at, data.shape))
                self.element = f"{name}[{', '.join(place)}]"
        return made

    def accessed(self, lane: Lane, what: banks.Access, whole: int, at: int) -> None:
        if self.allocations[whole][0] != self.name or not at <= self.byte < at + what.size:
            return
        if ", ".join(map(str, lane.block.index)) != self.block:
            return
        line = next(iter(self.lines()), 0)
        self.accesses.append(Access(lane.index, line, what.kind not in LOADS))
        for thread, (issuer, issued) in self._copying.items():
            if (group := self._group_of(issuer)) is not None:
                self.copies.setdefault((lane.index, line, thread), Copy(issued, group))
        if what.kind == "cp.async":
            self._copying[lane.index] = lane, line

    def _is_mine(self, data: Any) -> bool:
        name, _ = self.allocations.get(id(owner(data)), ("", None))
        return name == self.name

    def _group_of(self, lane: Lane) -> int | None:
        """That of the lane's cp.async to this byte, if it has not arrived."""
        for newer, group in enumerate([lane.copies, *reversed(lane.groups)]):
            for destination, at, size, *_ in group:
                first = offset_in_allocation(destination.data) + at
                if self._is_mine(destination.data) and 0 <= self.byte - first < size:
                    return newer
        return None


def race(fault: Fault, subject: Subject, step: Step, file: File) -> Diagnosis:
    """Both threads and both lines, where they can be had."""
    _, _, hint = fault.what.rpartition(": ")
    hint = re.sub(r"^a barrier\b", "a barrier (cuda.syncthreads())", hint)
    advice = (
        f"Nothing orders the two, so on a GPU either may come first: {hint}; see pitfall 9 of "
        "`make pitfalls`."
    )
    said = f"{subject}: race: {fault.what}.", file.place(fault), advice
    found = _RACE.match(fault.what)
    if found is None:
        return Diagnosis("race", fault.line, said)
    other = int(found["other"])
    if found["name"] == "c":
        advice = (
            "Two threads store different values to one element of C: each element must have one "
            "thread, that of its m and n."
        )
        return Diagnosis("race", fault.line, (*said[:2], advice))
    witness, thread = _witnessed(found, fault, subject, step, file)
    element = witness.element or found["name"]
    mine = "stores to it" if found["doing"].endswith("to") else "loads it"
    copy, stored = witness.copies.get((thread, fault.line, other)), found["did"].startswith("stor")
    if copy is not None and stored:
        first = (
            f"{subject}: race on {element}: thread {thread} {mine} at {file.line(fault.line)}, "
            f"while a copy of thread {other} to it, issued at {file.line(copy.line)}, may still be "
            "under way."
        )
        over = mine.startswith("stores")
        cause, advice = _OVERWRITTEN if over else _not_awaited(copy, thread, other)
        return Diagnosis(cause, fault.line, (first, advice))
    seen = witness.before(thread, fault.line, other, stored)
    if seen is None:
        return Diagnosis("race", fault.line, said)
    theirs = "stores to it" if seen.stores else "loads it"
    if seen.line == fault.line and seen.stores and mine.startswith("stores"):
        advice = (
            "Two threads come to this line with one index, and no barrier helps: each element of "
            f"{found['name']} must have one thread that stores to it, that of its row or column."
        )
    first = (
        f"{subject}: race on {element}: thread {thread} {mine} at "
        f"{file.line(fault.line)}, thread {other} {theirs} at {file.line(seen.line)}."
    )
    return Diagnosis("race", fault.line, (first, advice))


def _witnessed(
    found: re.Match[str], fault: Fault, subject: Subject, step: Step, file: File
) -> tuple[Witness, int]:
    """(who touched that byte, the index of the thread at fault), from a second run."""
    witness = Witness(file.path, fault.block, found["name"], int(found["byte"]))
    launch = run_again(step, subject, banks=witness).launch
    x, y, z = map(int, fault.thread.split(","))
    width, height, _ = (*launch.block, 1, 1)[:3]
    return witness, x + width * (y + height * z)


def _not_awaited(copy: Copy, thread: int, other: int) -> tuple[str, str]:
    """(cause, what to do) of a copy that has not arrived."""
    if not copy.group:
        return "copy not committed", (
            f"Thread {other} has not committed it: cp_async_commit closes copies into a group, and "
            "cp_async_wait waits for groups alone."
        )
    newer, missing = copy.group - 1, "that wait"
    said = (
        f"Thread {other} has committed {newer} group{'' if newer == 1 else 's'} after that copy's"
    )
    said += f", so cp_async_wait({newer}){' or less' if newer else ''} of that thread waits for it"
    if thread != other:
        said, missing = (
            f"{said}, and a barrier behind it tells the others",
            "the wait or the barrier",
        )
    return "copy not awaited", (
        f"{said}. Either {missing} is missing before this line, or commits are: each turn commits, "
        "also one that has nothing to copy."
    )


_OVERWRITTEN: Final = (
    "copy overwritten",
    "One of the two is lost: each stage has a place of its own, and is stored to again only when "
    "the copy before has arrived and all threads have read it.",
)
