"""What a right kernel could do better: memory traffic beside the reference's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from steps.api.machines import Simulator
from steps.checks.cases import Case
from steps.contract import Step
from steps.exercises.trial import Subject, prepared_for
from steps.simulator.banks import BankCounter

CASE: Final = Case((5, 35, 96), "integer", 2)


def bank_conflicts(step: Step, reference: Step, path: Path) -> Iterator[str]:
    """A sentence for each family that has more bank conflicts than the reference."""
    for family in step.families:
        own, others = (_counted(each, Subject(family, "q4_0", CASE)) for each in (step, reference))
        if own.conflicts <= others.conflicts:
            continue
        site, worst = max(own.sites.items(), key=lambda item: item[1].conflicts)
        yield (
            f"{own.conflicts} bank conflicts in family {family}, the step has {others.conflicts}: "
            f"{worst.conflicts} of them in {worst.accesses} accesses at {site}"
        )


def _counted(step: Step, subject: Subject) -> BankCounter:
    machine, counter = Simulator(), BankCounter()
    prepared = prepared_for(step, subject, machine)
    for launch in prepared.activations.launches:
        machine.run(launch)
    machine.banks = counter
    machine.run(prepared.launch)
    return counter
