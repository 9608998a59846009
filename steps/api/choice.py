"""Which step multiplies: the one named, else the fastest measured, else a default.

`make tune` measures every step at many M on a GPU and writes a table (`steps.api.tuning_table`). A
step that the table has a time for is chosen by its time. A format that the table lacks uses the
times of the format stored most like it (`qformats.storage`). Without any time the default is the
highest step that the GPU can run, as each step is meant to be faster than the one before it; up to
the M that a step is made for, that step. A new step is no default until it says so
(`Step.chosen_untuned`).

Both families are considered unless one is named. Steps that change the weights ("fast", "coarse")
are considered only where their accuracy, or a lower one, is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from qformats.storage import nearest_weight_format
from steps.api import tuning_table as tuning
from steps.contract import ACCURACIES, Accuracy, Family, Launch, Shape, Step, Work, scheme
from steps.registry import find, ladder


@dataclass(frozen=True, slots=True)
class Choice:
    """A step for a product, and why. `str` of it is a sentence.

    configuration: blocks, threads and shared memory of its launch; empty before there is one.
    """

    step: Step
    family: Family
    format: str
    shape: Shape
    why: str
    configuration: str = ""

    @property
    def work(self) -> Work:
        return Work(self.step, self.family, self.format)

    def __str__(self) -> str:
        m, n, k = self.shape.m, self.shape.n, self.shape.k
        launch = self.configuration and f", launched as {self.configuration}"
        return (
            f"step {self.step.number} ({self.step.title}) as {scheme(self.format, self.family)} "
            f"for M={m} N={n} K={k}{launch}: {self.why}"
        )


def choose(
    format_name: str,
    shape: Shape,
    machine: Any,
    *,
    step: int | None = None,
    family: str | None = None,
    among: Sequence[Step] | None = None,
    output: str = "float32",
    accuracy: str = "exact",
) -> Choice:
    """The step for a product of this format and shape on a machine (its `name`, `cc`, `sms`).

    step, family : only this one; a step alone is taken in the family that continues the ladder.
    among        : only these, such as all that read weights as they are packed. A single one is
                   taken whatever its accuracy: packing for it asked for that.
    output       : the dtype of C.
    accuracy     : "fast" also considers fast steps, "coarse" fast and coarse ones.
    ValueError with a step's own reason where there is none.
    """
    cc: tuple[int, int] | None = machine.cc
    known_accuracy(accuracy)
    if step is not None:
        one = find(step)
        wanted = known_family(family or one.families[-1])
        if why := one.supports(format_name, wanted, cc, output):
            raise ValueError(why)
        return Choice(one, wanted, format_name, shape, "asked for by number")

    if among is not None and len(among) == 1:
        only = supporting(format_name, family, cc, among, output, among[0].accuracy)[0]
        wanted = known_family(family or only.families[-1])
        return Choice(only, wanted, format_name, shape, "w is packed for this step alone")
    possible = supporting(format_name, family, cc, among, output, accuracy)
    table = None
    if cc is not None:
        table = tuning.nearest(tuning.known(), machine.name, cc, machine.sms)
    entry = None
    if table is not None:
        size, alike = (shape.m, shape.n, shape.k), nearest_weight_format(format_name)
        entry = table.entry(format_name, *size) or table.entry(alike, *size)
    times = _times(entry, possible, family)
    if table and entry and times:
        us, best, of_family = min(times, key=lambda time: time[0])
        why = f"fastest of {_count(len({one.number for _, one, _ in times}), 'step')} measured at "
        why += f"{entry.where} on the {table.gpu} ({us:.3g} us)"
        if entry.format != format_name:
            why += f" in {entry.format}, stored most like {format_name}"
        if table.gpu != machine.name:
            why += f", the tuned GPU most like the {machine.name}"
        every = supporting(format_name, family, cc, among, output, ACCURACIES[-1])
        why += _passed_over(us, _times(entry, every, family), known_accuracy(accuracy))
        return Choice(best, of_family, format_name, shape, why)

    untuned = defaults(possible)
    for_few = [one for one in untuned if shape.m <= (one.most_tokens or 0)]
    for_any = [one for one in untuned if one.most_tokens is None]
    best = (for_few or for_any or untuned)[-1]
    limit = f" for M up to {best.most_tokens}" if for_few else ""
    packing = "" if among is None else " of this packing"
    why = f"the highest default step{packing}{limit} on the {machine.name}"
    if table is not None:
        why += f"; the table of the {table.gpu} has no time for it (run make tune)"
    elif cc is not None:
        why += "; no tuning table covers this GPU (run make tune)"
    return Choice(best, known_family(family or best.families[-1]), format_name, shape, why)


def choose_packed(
    format_name: str, shape: Shape, packed: Iterable[str], machine: Any, accuracy: str = "exact"
) -> Choice:
    """`choose` among the steps that read one of the packings that are there, by their names."""
    names = set(packed)
    among = [one for one in ladder() if one.pack.__name__ in names]
    return choose(format_name, shape, machine, among=among, accuracy=accuracy)


def supporting(
    format_name: str,
    family: str | None,
    cc: tuple[int, int] | None,
    among: Sequence[Step] | None = None,
    output: str = "float32",
    accuracy: str = "exact",
) -> list[Step]:
    """The steps that can run a format, lowest first; ValueError where there is none."""
    found: list[Step] = []
    refused: list[Step] = []
    why, asked = "there is no step", ACCURACIES.index(known_accuracy(accuracy))
    for one in ladder() if among is None else among:
        reason = one.supports(format_name, known_family(family or one.families[-1]), cc, output)
        if reason is None and ACCURACIES.index(one.accuracy) <= asked:
            found.append(one)
        elif reason is None:
            refused.append(one)
        else:
            why = reason
    if refused:
        best = min(refused, key=lambda one: ACCURACIES.index(one.accuracy))
        why = f"step {best.number} is not exact: ask for it with accuracy={best.accuracy!r}"
    if not found:
        raise ValueError(f"no step can do this: {why}")
    return found


def defaults(possible: Sequence[Step]) -> list[Step]:
    """Those that may be chosen without a measurement; ValueError where none may."""
    found = [one for one in possible if one.chosen_untuned]
    if not found:
        raise ValueError(
            f"only {step_numbers(possible)} can do this, never measured on such a GPU: name a "
            f"step, as in step={possible[-1].number}, or run make tune"
        )
    return found


def packing_step(
    format_name: str, family: str | None, cc: tuple[int, int] | None, accuracy: str
) -> Step:
    """The step whose layout weights are packed in where none is named: of the defaults with the
    lowest accuracy that is allowed, the highest."""
    allowed = defaults(supporting(format_name, family, cc, accuracy=accuracy))
    return max(allowed, key=lambda one: (ACCURACIES.index(one.accuracy), one.number))


def packings(format_name: str, cc: tuple[int, int] | None, accuracy: str) -> tuple[Step, ...]:
    """A step for each packing that products of this accuracy want: of exact steps first, then of
    less exact ones where these are allowed and read another packing."""
    exact, lowest = (packing_step(format_name, None, cc, each) for each in ("exact", accuracy))
    return (exact,) if lowest.pack is exact.pack else (exact, lowest)


def written_dtype(step: Step, wanted: str) -> str:
    """The dtype of C that is wanted where the step writes it, else float32."""
    return wanted if wanted in step.outputs else "float32"


Time = tuple[float, Step, Family]
"""Microseconds of a step in a family."""


def _times(entry: tuning.Entry | None, possible: Sequence[Step], family: str | None) -> list[Time]:
    """What an entry of the table says of some steps."""
    if entry is None:
        return []
    return [
        (us, one, each)
        for one in possible
        for each in one.families
        if family in (None, each) and (us := entry.us(one.number, each)) is not None
    ]


def _passed_over(us: float, times: Sequence[Time], accuracy: Accuracy) -> str:
    """The fastest step of the next lower accuracy, if it is faster, and how to get it."""
    lower = ACCURACIES[ACCURACIES.index(accuracy) + 1 :][:1]
    faster = [time for time in times if time[1].accuracy in lower and time[0] < us]
    if not faster:
        return ""
    fast, one, _ = min(faster, key=lambda time: time[0])
    return f"; with accuracy={one.accuracy!r} step {one.number} would take {fast:.3g} us"


def known_accuracy(name: str) -> Accuracy:
    """ValueError for a name that is no accuracy."""
    for accuracy in ACCURACIES:
        if name == accuracy:
            return accuracy
    raise ValueError(f"accuracy is {name!r}: it must be one of {', '.join(ACCURACIES)}")


def known_family(name: str) -> Family:
    """ValueError for a name that is no family."""
    if name == "A16":
        return "A16"
    if name == "A8":
        return "A8"
    raise ValueError(f"family is {name!r}: it must be A16 or A8")


def step_numbers(steps: Sequence[Step]) -> str:
    """ "step 2", "steps 7, 8 and 10"."""
    *first, last = (str(step.number) for step in steps)
    return f"steps {', '.join(first)} and {last}" if first else f"step {last}"


def launch_configuration(launch: Launch) -> str:
    """ "32x4 blocks of 256 threads with 65536 bytes of shared memory"."""
    grid = "x".join(map(str, launch.grid))
    threads = math.prod(launch.block)
    shared = launch.shared_bytes and f" with {launch.shared_bytes} bytes of shared memory"
    return f"{grid} blocks of {threads} threads{shared or ''}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
