"""Who touched a byte of shared memory, thread by thread: the other line of a race.

The simulator finds a race at its second access and knows the thread of the first, not its line. The
same launch is run once more, in the same order of lanes, and every access to that byte noted.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

import numpy as np

from steps.checks.verify import Prepared
from steps.contract import Step
from steps.driver.machines import Simulator
from steps.learn.exercises.trial import Subject, prepared_for
from steps.simulator import banks
from steps.simulator.arrays import CheckedArray, offset_in_allocation, owner
from steps.simulator.banks import APART, Gatherer
from steps.simulator.lanes import Lane
from steps.simulator.launch import simulate

LOADS: Final = ("load", "ldmatrix")  # all other kinds of access store


def run_again(step: Step, subject: Subject, gatherer: Gatherer) -> Prepared:
    """A product once more, in the same order of lanes, under the eyes of a gatherer."""
    machine = Simulator(subject.case.order)
    prepared = prepared_for(step, subject, machine)
    for launch in prepared.activations.launches:
        machine.run(launch)
    launch = prepared.launch
    with suppress(Exception):  # of a faulty kernel what was seen until then is what counts
        simulate(
            launch.kernel,
            launch.grid,
            launch.block,
            launch.args,
            order=subject.case.order,
            shared_bytes=launch.shared_bytes,
            banks=gatherer,
        )
    return prepared


def lines_of(path: Path) -> tuple[int, ...]:
    """The lines of the file on the way to the caller's caller, the innermost first."""
    frame: FrameType | None = sys._getframe(2)
    lines = []
    while frame is not None:
        if frame.f_code.co_filename == str(path):
            lines.append(frame.f_lineno)
        frame = frame.f_back
    return tuple(lines)


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


class Witness(Gatherer):
    """Notes the accesses of one block to one byte of the allocation whose first array is called
    `name`. `element` is how the kernel calls that byte, "" where it cannot be said. `copies`: by
    thread and line of an access and by thread that copies, the copy that was under way then."""

    def __init__(self, path: Path, block: str, name: str, byte: int) -> None:
        super().__init__()
        self.path, self.block, self.name, self.byte = path, block, name, byte
        self.accesses: list[Access] = []
        self.element = ""
        self._names: dict[int, str] = {}  # of allocations, by the identity of their owner
        self._lanes: dict[int, Lane] = {}  # that issued a cp.async to the byte, and where last
        self._lines: dict[int, int] = {}
        self.copies: dict[tuple[int, int, int], Copy] = {}

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

    def _copy_of(self, lane: Lane) -> Copy | None:
        """The cp.async of the lane to this byte that has not arrived."""
        for newer, group in enumerate([lane.copies, *reversed(lane.groups)]):
            for destination, at, size, *_ in group:
                mine = self._names.get(id(owner(destination.data))) == self.name
                if mine and 0 <= self.byte - offset_in_allocation(destination.data) - at < size:
                    return Copy(self._lines[lane.index], newer)
        return None

    # --- what the simulator calls
    def array(self, data: Any, name: str, space: str, alignment: int | None = None) -> CheckedArray:
        called = self._names.setdefault(id(owner(data)), name)
        if called == self.name and not self.element:
            self.element = _element(data, name, self.byte)
        return super().array(data, name, space, alignment)

    def add(self, lane: Lane, what: banks.Access, address: int) -> None:
        whole, at = divmod(address, APART)
        if self._names.get(whole) != self.name or not at <= self.byte < at + what.size:
            return
        if ", ".join(map(str, lane.block.index)) == self.block:
            line = next(iter(lines_of(self.path)), 0)
            self.accesses.append(Access(lane.index, line, what.kind not in LOADS))
            for other, issuer in self._lanes.items():
                if copy := self._copy_of(issuer):
                    self.copies.setdefault((lane.index, line, other), copy)
            if what.kind == "cp.async":
                self._lanes[lane.index], self._lines[lane.index] = lane, line


def _element(data: Any, name: str, byte: int) -> str:
    """ "tile_a[1, 0]"."""
    at = (byte - offset_in_allocation(data)) // data.itemsize
    if not 0 <= at < data.size:
        return ""
    return f"{name}[{', '.join(map(str, np.unravel_index(at, data.shape)))}]"
