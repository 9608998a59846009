"""What a right kernel could do better: its requests to memory beside the step's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from steps.checks.cases import Case
from steps.contract import Step
from steps.driver.machines import Simulator
from steps.learn.exercises.trial import Subject, prepared_for
from steps.simulator.launch import simulate
from steps.simulator.trace import Instruction, Recorder

CASE: Final = Case((40, 36, 64), "integer", 2)

COUNTED: Final[tuple[tuple[str, Callable[[Instruction], int]], ...]] = (
    ("sectors of global memory", lambda one: one.sectors),
    ("bank conflicts", lambda one: one.conflicts),
)


def memory_traffic(step: Step, reference: Step) -> Iterator[str]:
    """A sentence for each family and figure of which the first warp has more than that of the
    reference."""
    for family in step.families:
        subject = Subject(family, "q4_0", CASE)
        own, others = _instructions(step, subject), _instructions(reference, subject)
        for what, of in COUNTED:
            mine, theirs = sum(map(of, own)), sum(map(of, others))
            if mine <= theirs:
                continue
            most = max(own, key=of)
            yield (
                f"the first warp has {mine} {what} in family {family}, that of the step {theirs}: "
                f"{of(most)} of them in {most.requests} requests at {most.place}"
            )


def _instructions(step: Step, subject: Subject) -> list[Instruction]:
    """The memory instructions of the first warp."""
    machine, recorder = Simulator(), Recorder()
    prepared = prepared_for(step, subject, machine)
    for launch in prepared.activations.launches:
        machine.run(launch)
    launch = prepared.launch
    simulate(
        launch.kernel,
        launch.grid,
        launch.block,
        launch.args,
        shared_bytes=launch.shared_bytes,
        trace=recorder,
    )
    return recorder.instructions()
