"""Which step multiplies: the one asked for, the fastest where it was measured, else the highest.

`make tune` measures every step at many M on a GPU and leaves a table (`steps.api.tuning_table`). A format
that it lacks goes by the one whose records are most like its own (`qformats.storage`). Where no
table knows the GPU, the highest step of the ladder that it can run is taken, as each step is meant
to be faster than the one before; up to the M that a step is made for, that one.

Both families are considered where none is asked for: they differ by what their activations are
rounded to, and the steps of either multiply the weights that the format stores. Steps that do not
("fast", "coarse") are considered only where that accuracy, or a lower one, is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qformats.storage import nearest_weight_format
from steps.api import tuning_table as tuning
from steps.contract import ACCURACIES, Accuracy, Family, Launch, Shape, Step, scheme
from steps.registry import find, ladder


@dataclass(frozen=True, slots=True)
class Choice:
    """A step for a product, and why. `str` of it is a sentence.

    cut: grid, threads of a block and shared memory of its launch; empty before there is one.
    """

    step: Step
    family: Family
    format: str
    shape: Shape
    why: str
    cut: str = ""

    def __str__(self) -> str:
        m, n, k = self.shape.m, self.shape.n, self.shape.k
        return (
            f"step {self.step.number} ({self.step.title}) as {scheme(self.format, self.family)} "
            f"for M={m} N={n} K={k}{self.cut and f', {self.cut}'}: {self.why}"
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
    among        : only these, such as all that read weights as they are packed.
    output       : the dtype of C.
    accuracy     : "fast" considers steps that are not exact too, "coarse" even those that are less
                   than fast. One that is named, or the only one that weights are packed for, was
                   asked for already.
    ValueError with a step's own reason where there is none.
    """
    cc: tuple[int, int] | None = machine.cc
    known_accuracy(accuracy)
    if step is not None:
        one = find(step)
        wanted = family or one.families[-1]
        if why := one.supports(format_name, known_family(wanted), cc, output):
            raise ValueError(why)
        return Choice(one, known_family(wanted), format_name, shape, "it was asked for")

    if among is not None and len(among) == 1:
        why = "it is the one that w is packed for"
        only = supporting(format_name, family, cc, among, output, among[0].accuracy)[0]
        return Choice(only, known_family(family or only.families[-1]), format_name, shape, why)
    possible = supporting(format_name, family, cc, among, output, accuracy)
    table = None
    if cc is not None:
        table = tuning.nearest(tuning.known(), machine.name, cc, machine.sms)
    entry = table and table.entry(format_name, shape.m, shape.n, shape.k)
    stands_in = nearest_weight_format(format_name)
    if table and entry is None:
        entry = table.entry(stands_in, shape.m, shape.n, shape.k)
    timed = [
        (us, one, each)
        for one in possible
        for each in one.families
        if family in (None, each) and entry and (us := entry.us(one.number, each)) is not None
    ]
    if table and entry and timed:
        us, best, of_family = min(timed, key=lambda work: work[0])
        why = f"the fastest of {len(timed)} measured at {entry.where} on {table.gpu}, {us:.3g} us"
        if entry is not None and entry.format != format_name:
            why += f" with {stands_in}, whose records are like those of {format_name}"
        if table.gpu != machine.name:
            why += f", the nearest to {machine.name} tuned"
        why += _faster_if_asked(entry, us, format_name, family, cc, among, output, accuracy)
        return Choice(best, of_family, format_name, shape, why)

    meant = [one for one in possible if one.most_tokens is None or shape.m <= one.most_tokens]
    made_for_few = [one for one in meant if one.most_tokens is not None]
    best = (made_for_few or meant or possible)[-1]
    kind = "step" if among is None else "step of this packing"
    few = "made for so few tokens" if made_for_few else "for so many tokens"
    why = f"the highest {kind} {few} that runs on {machine.name}"
    if table is not None:
        why += f", as the table of {table.gpu} has no time for it"
    elif cc is not None:
        why += ", as no GPU like it was tuned (make tune)"
    return Choice(best, known_family(family or best.families[-1]), format_name, shape, why)


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


def _faster_if_asked(
    entry: tuning.Entry,
    us: float,
    format_name: str,
    family: str | None,
    cc: tuple[int, int] | None,
    among: Sequence[Step] | None,
    output: str,
    accuracy: str,
) -> str:
    """What is said of the fastest step of the next accuracy below: it was passed over."""
    below = ACCURACIES[ACCURACIES.index(known_accuracy(accuracy)) + 1 :]
    try:
        every = supporting(format_name, family, cc, among, output, ACCURACIES[-1])
    except ValueError:
        return ""
    times = [
        (fast, one.number)
        for one in every
        for each in one.families
        if one.accuracy in below[:1]
        and family in (None, each)
        and (fast := entry.us(one.number, each)) is not None
    ]
    fast, number = min(times, default=(us, 0))
    what = "not exact" if accuracy == "exact" else below and below[0]
    return f"; step {number}, which is {what}, took {fast:.3g} us" if fast < us else ""


def known_accuracy(name: str) -> Accuracy:
    """ValueError for what is neither exact nor fast nor coarse."""
    for accuracy in ACCURACIES:
        if name == accuracy:
            return accuracy
    raise ValueError(f"unknown accuracy {name!r}: use exact, fast or coarse")


def known_family(name: str) -> Family:
    """ValueError for what is neither A16 nor A8."""
    if name == "A16":
        return "A16"
    if name == "A8":
        return "A8"
    raise ValueError(f"unknown family {name!r}: use A16 or A8")


def cut(launch: Launch) -> str:
    """How a launch cuts the product: "grid 32x4 of 256 threads, 65536 bytes of shared memory"."""
    grid = "x".join(map(str, launch.grid))
    threads = 1
    for extent in launch.block:
        threads *= extent
    shared = f", {launch.shared_bytes} bytes of shared memory" if launch.shared_bytes else ""
    return f"grid {grid} of {threads} threads{shared}"
