"""A launch run once more, in the same order of lanes, under the eyes of somebody who is told of
each access to memory: what the simulator's error does not know."""

from __future__ import annotations

import math
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final

import numpy as np

from steps.checks.verify import Prepared
from steps.contract import Step
from steps.driver.machines import Simulator
from steps.learn.exercises.trial import Array, Subject, limit, patience, prepared_for
from steps.learn.trace.traced import hand_over
from steps.simulator import banks
from steps.simulator.arrays import CheckedArray, owner
from steps.simulator.banks import APART, Gatherer
from steps.simulator.lanes import Lane
from steps.simulator.launch import simulate

LOADS: Final = ("load", "ldmatrix")  # all other kinds of access store


class Watch(Gatherer):
    """Told of the allocations of some spaces and of each access to them. `allocations`: by the
    identity of their owner, the name of their first array and their bytes."""

    def __init__(self, path: Path, *spaces: str) -> None:
        super().__init__()
        self.path, self.spaces = path, spaces
        self.allocations: dict[int, tuple[str, Array]] = {}

    def allocated(self, whole: int, name: str, data: Any, space: str) -> None:
        """A new one; data: its first array."""

    def accessed(self, lane: Lane, what: banks.Access, whole: int, at: int) -> None:
        """An access to what.size bytes from byte `at`."""

    def lines(self) -> tuple[int, ...]:
        """The lines of the file on the way to here, the innermost first."""
        frame: FrameType | None = sys._getframe(1)
        found = []
        while frame is not None:
            if frame.f_code.co_filename == str(self.path):
                found.append(frame.f_lineno)
            frame = frame.f_back
        return tuple(found)

    # --- what the simulator calls
    def array(self, data: Any, name: str, space: str, alignment: int | None = None) -> CheckedArray:
        whole = owner(data)
        if space in self.spaces and id(whole) not in self.allocations:
            self.allocations[id(whole)] = name, whole.reshape(-1).view(np.uint8)
            self.allocated(id(whole), name, data, space)
        return super().array(data, name, space, alignment)

    def add(self, lane: Lane, what: banks.Access, address: int) -> None:
        whole, at = divmod(address, APART)
        if whole in self.allocations:
            self.accessed(lane, what, whole, at)


def run_again(step: Step, subject: Subject, **eyes: Any) -> Prepared:
    """A product once more, up to its fault if it has one. eyes: `banks=` or `trace=`, a Gatherer,
    as `simulate` takes them."""
    machine = Simulator(subject.case.order)
    prepared = prepared_for(step, subject, machine)
    for launch in prepared.activations.launches:
        machine.run(launch)
    launch = prepared.launch
    if "trace" in eyes:
        hand_over(launch)
    with (
        suppress(Exception),
        limit(patience(subject.case)),
    ):  # of a faulty kernel what was seen until then is what counts
        simulate(
            launch.kernel,
            launch.grid,
            launch.block,
            launch.args,
            order=subject.case.order,
            shared_bytes=launch.shared_bytes,
            resident=math.prod(launch.grid) if launch.together else 1,
            **eyes,
        )
    return prepared
