"""Which step multiplies: the one named, else the fastest measured, else a default.

`make tune` measures every step at many M on a GPU and writes a table
(`steps.product.tuning_table`). A step that the table has a time for is chosen by its time. A format
that the table lacks uses the times of the format stored most like it (`qformats.storage`). Without
any time the default is the highest step that the GPU can run, as each step is meant to be faster
than the one before it; up to the M that a step is made for, that step. A new step is no default
until it says so (`Step.chosen_untuned`).

Both families are considered unless one is named. Steps that change the weights ("fast") are
considered only where that is asked for.

A in 16 bits (float16, bfloat16) is for steps that read it as it is. Where the caller can make
float32 of it, the others count too, with the time that this takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from qformats.storage import nearest_weight_format
from steps.contract import (
    ACCURACIES,
    Accuracy,
    Family,
    Kernel,
    Launch,
    Shape,
    Work,
    known_accuracy,
    scheme,
)
from steps.kernels.parts.activations.layouts import inputs
from steps.product import tuning_table as tuning
from steps.product.operands import one_of
from steps.registry import find, kernels, lessons


@dataclass(frozen=True, slots=True)
class Choice:
    """A step for a product, and why. `str` of it is a sentence.

    configuration: blocks, threads and shared memory of its launch; empty before there is one.
    """

    step: Kernel
    family: Family
    format: str
    shape: Shape
    why: str
    configuration: str = ""

    @property
    def work(self) -> Work:
        return Work(
            self.step,  # type: ignore[arg-type]
            self.family,
            self.format,
        )

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
    among: Sequence[Kernel] | None = None,
    output: str = "float32",
    accuracy: str = "exact",
    input: str = "float32",
    cast_us: float | None = None,
    biased: bool = False,
) -> Choice:
    """The step for a product of this format and shape on a machine (its `name`, `cc`, `sms`).

    step, family : only this one; a step alone is taken in the family that continues the ladder, or
                   the one that reads A.
    among        : only these, such as all that read weights as they are packed. A single one is
                   taken whatever its accuracy: packing for it asked for that.
    output       : the dtype of C.
    accuracy     : "fast" also considers fast steps.
    input        : the dtype of A, which the step reads as it is ...
    cast_us      : ... or as float32 that the caller makes of it, in so many microseconds.
    biased       : only steps that add a bias (`Step.adds_bias`).
    shape.invariant : up to `Step.most_tokens` tokens the highest step that heeds it, whatever the
                   table says: which step it is must not depend on M either.
    ValueError with a step's own reason where there is none.
    """
    cc: tuple[int, int] | None = machine.cc
    known_accuracy(accuracy)
    asked = Asked(format_name, family, cc, output, input, cast_us, shape.k, biased)
    if shape.invariant and (found := _invariant(asked, shape, among, step)):
        return found
    if step is not None:
        one = find(step)
        if why := asked.why_not(one):
            raise ValueError(why)
        return Choice(one, asked.families(one)[-1], format_name, shape, "asked for by number")

    if among is not None and len(among) == 1:
        only = asked.supporting(among, among[0].accuracy)[0]
        why = "w is packed for this step alone"
        return Choice(only, asked.families(only)[-1], format_name, shape, why)
    possible = asked.supporting(among, accuracy)
    table = None
    if cc is not None:
        table = tuning.nearest(tuning.known(), machine.name, cc, machine.sms)
    entry = None
    if table is not None:
        size, alike = (shape.m, shape.n, shape.k), nearest_weight_format(format_name)
        entry = table.entry(format_name, *size) or table.entry(alike, *size)
    times = _times(entry, possible, asked)
    if table and entry and times:
        us, best, of_family = min(times, key=lambda time: time[0])
        why = f"fastest of {_count(len({one.number for _, one, _ in times}), 'step')} measured at "
        cast = asked.cast_us and not asked.reads(best, of_family)
        why += f"{entry.where} on the {table.gpu} ({us:.3g} us"
        why += ", with the cast of A to float32)" if cast else ")"
        if entry.format != format_name:
            why += f" in {entry.format}, stored most like {format_name}"
        if table.gpu != machine.name:
            why += f", the tuned GPU most like the {machine.name}"
        every = _times(entry, asked.supporting(among, ACCURACIES[-1]), asked)
        why += _passed_over(us, every, known_accuracy(accuracy))
        return Choice(best, of_family, format_name, shape, why)

    untuned = defaults(possible)
    for_few = [one for one in untuned if shape.m <= (one.most_tokens or 0)]
    for_any = [one for one in untuned if one.most_tokens is None]
    best = (for_few or for_any or untuned)[-1]
    of_family = _measured_family(best, asked)
    limit = f" for M up to {best.most_tokens}" if for_few else ""
    packing = "" if among is None else " of this packing"
    why = f"the highest default step{packing}{limit} on the {machine.name}"
    if table is not None:
        why += f"; the table of the {table.gpu} has no time for it (run make tune)"
    elif cc is not None:
        why += "; no tuning table covers this GPU (run make tune)"
    return Choice(best, of_family, format_name, shape, why)


def _invariant(
    asked: Asked, shape: Shape, among: Sequence[Kernel] | None, step: int | None
) -> Choice | None:
    """The choice where a row must have the same bits at every M; None for too many tokens."""
    known = [one for one in kernels() if one.invariant]
    if shape.m > max(one.most_tokens or 0 for one in known):
        return None
    possible = kernels() if among is None else among
    found = [
        (one, of_family)
        for one in known
        for of_family in one.invariant
        if one in possible and step in (None, one.number)
        if asked.family in (None, of_family) and not replace(asked, family=of_family).why_not(one)
    ]
    if not found:
        raise ValueError(
            f"rows of {asked.format} have the same bits at every M in {step_numbers(known)} alone, "
            f"in family {known[-1].invariant[0]}, and these cannot be taken here"
        )
    best, of_family = found[-1]
    why = f"a row has the same bits at every M up to {best.most_tokens} there"
    return Choice(best, of_family, asked.format, shape, why)


def choose_packed(
    format_name: str,
    shape: Shape,
    packed: Iterable[str],
    machine: Any,
    accuracy: str = "exact",
    input: str = "float32",
    cast_us: float | None = None,
    output: str = "float32",
    family: str | None = None,
) -> Choice:
    """`choose` among the steps that read one of the packings that are there, by their names."""
    names = set(packed)
    among = [one for one in (*lessons(), *kernels()) if one.pack.__name__ in names]
    options: dict[str, Any] = {"accuracy": accuracy, "input": input, "cast_us": cast_us}
    options["family"] = family
    return choose(format_name, shape, machine, among=among, output=output, **options)


def choose_uncast(
    format_name: str,
    shape: Shape,
    packed: Iterable[str],
    machine: Any,
    accuracy: str = "exact",
    dtype: str = "float32",
    family: str | None = None,
) -> Choice:
    """`choose_packed` for A and C of one dtype, by a step that reads and writes it. Where the GPU
    has none it is one of float32, and the caller casts."""
    rest = format_name, shape, tuple(packed), machine, accuracy
    try:
        return choose_packed(*rest, dtype, output=dtype, family=family)
    except ValueError:
        if dtype == "float32":
            raise
        return choose_packed(*rest, family=family)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a step must be able to do, see `choose`."""

    format: str
    family: str | None = None
    cc: tuple[int, int] | None = None
    output: str = "float32"
    input: str = "float32"
    cast_us: float | None = None
    k: int | None = None
    biased: bool = False

    def reads(self, step: Kernel, family: Family) -> bool:
        """Whether it reads A as it is."""
        return self.input in inputs(step, family)

    def families(self, step: Kernel) -> list[Family]:
        """The families in which it can do this; those that read A as it is last."""
        families = [one for one in step.families if self.family in (None, one)]
        reading = [one for one in families if self.reads(step, one)]
        others = [one for one in families if one not in reading and self.cast_us is not None]
        return others + reading

    def why_not(self, step: Kernel) -> str | None:
        """None, or one sentence saying why the step cannot do this."""
        family = known_family(self.family or step.families[-1])
        why = step.supports(self.format, family, self.cc, self.output)
        if why is None and step.most_k is not None and (self.k or 0) > step.most_k:
            why = (
                f"step {step.number} adds up products of int8 in int32, which holds "
                f"{step.most_k} of them, and K={self.k}: take an exact step, or parts of K"
            )
        if why is None and not self.families(step):
            known = one_of(inputs(step, family))
            where = f" in family {family}" if step.families[1:] else ""
            why = f"step {step.number} reads A as {known}{where}, not {self.input}"
        if why is None and self.biased and not step.adds_bias:
            adding = step_numbers([one for one in kernels() if one.adds_bias])
            why = f"step {step.number} adds no bias: take one of {adding}, or add it to C yourself"
        return why

    def supporting(self, among: Sequence[Kernel] | None, accuracy: str) -> list[Kernel]:
        """The steps that can, lowest first; ValueError where there is none."""
        found: list[Kernel] = []
        refused: list[Kernel] = []
        why, lowest = "there is no step", ACCURACIES.index(known_accuracy(accuracy))
        for one in kernels() if among is None else among:
            reason = self.why_not(one)
            if reason is None and ACCURACIES.index(one.accuracy) <= lowest:
                found.append(one)
            elif reason is None:
                refused.append(one)
            else:
                why = reason
        if self.biased and not found:
            unbiased = replace(self, biased=False)
            others = [one for one in among or kernels() if unbiased.why_not(one) is None]
            if others:
                add = "add" if others[1:] else "adds"
                why = f"{step_numbers(others)} {add} no bias: add it to C yourself"
        if refused:
            best = min(refused, key=lambda one: ACCURACIES.index(one.accuracy))
            why = f"step {best.number} is not exact: ask for it with accuracy={best.accuracy!r}"
        if not found and among is None:
            return self.supporting(lessons(), accuracy)
        if not found:
            raise ValueError(f"no step can do this: {why}")
        return found


def supporting(
    format_name: str,
    family: str | None,
    cc: tuple[int, int] | None,
    among: Sequence[Kernel] | None = None,
    output: str = "float32",
    accuracy: str = "exact",
    k: int | None = None,
) -> list[Kernel]:
    """The steps that can run a format, lowest first; ValueError where there is none. k: where the
    K of the products is known, only steps whose sums hold it."""
    return Asked(format_name, family, cc, output, k=k).supporting(among, accuracy)


def defaults(possible: Sequence[Kernel]) -> list[Kernel]:
    """Those that may be chosen without a measurement; ValueError where none may."""
    found = [one for one in possible if one.chosen_untuned]
    if not found:
        raise ValueError(
            f"only {step_numbers(possible)} can do this, never measured on such a GPU: name a "
            f"step, as in step={possible[-1].number}, or run make tune"
        )
    return found


def packing_step(
    format_name: str,
    family: str | None,
    cc: tuple[int, int] | None,
    accuracy: str,
    k: int | None = None,
) -> Kernel:
    """The step whose layout weights are packed in where none is named: of the defaults with the
    lowest accuracy that is allowed, the highest. k: as for `supporting`."""
    allowed = defaults(supporting(format_name, family, cc, accuracy=accuracy, k=k))
    return max(allowed, key=lambda one: (ACCURACIES.index(one.accuracy), one.number))


def packings(
    format_name: str, cc: tuple[int, int] | None, accuracy: str, k: int | None = None
) -> tuple[Kernel, ...]:
    """A step for each packing that products of this accuracy want: of exact steps first, then of
    less exact ones where these are allowed and read another packing. k: as for `supporting`."""
    exact, lowest = (packing_step(format_name, None, cc, each, k) for each in ("exact", accuracy))
    return (exact,) if lowest.pack is exact.pack else (exact, lowest)


def written_dtype(step: Kernel, wanted: str) -> str:
    """The dtype of C that is wanted where the step writes it, else float32."""
    return wanted if wanted in step.outputs else "float32"


Time = tuple[float, Kernel, Family]
"""Microseconds of a step in a family."""

BFLOAT16_FEW: Final = 1.07
BFLOAT16_MANY: Final = 1.13
"""A table has no times of bfloat16. So much longer than in float16 a product takes that makes
bfloat16 weights, in a decode step and in others: medians over formats and shapes on an H200, run
dceeb1ed."""


def _times(entry: tuning.Entry | None, possible: Sequence[Kernel], asked: Asked) -> list[Time]:
    """What an entry of the table says of some steps. A step that reads A as it is takes no longer
    than from float32."""
    found: list[Time] = []
    if entry is None:
        return found
    for one in possible:
        for family in asked.families(one):
            reads = asked.reads(one, family)
            us = entry.us(one.number, family, asked.input if reads else "float32")
            if us is None:
                continue
            if reads and family == "A16" and asked.input == "bfloat16":
                us *= BFLOAT16_MANY if one.most_tokens is None else BFLOAT16_FEW
            found.append((us if reads else us + (asked.cast_us or 0.0), one, family))
    return found


def _measured_family(step: Kernel, asked: Asked) -> Family:
    """The family of a step that has no time here: of those with a time in some table, or else of
    all, the last."""
    families, tables = asked.families(step), tuning.known()
    measured = [one for one in families if any(table.has(step.number, one) for table in tables)]
    return (measured or families)[-1]


def _passed_over(us: float, times: Sequence[Time], accuracy: Accuracy) -> str:
    """The fastest step of the next lower accuracy, if it is faster, and how to get it."""
    lower = ACCURACIES[ACCURACIES.index(accuracy) + 1 :][:1]
    faster = [time for time in times if time[1].accuracy in lower and time[0] < us]
    if not faster:
        return ""
    fast, one, _ = min(faster, key=lambda time: time[0])
    return f"; with accuracy={one.accuracy!r} step {one.number} would take {fast:.3g} us"


def known_family(name: str) -> Family:
    """ValueError for a name that is no family."""
    if name == "A16":
        return "A16"
    if name == "A8":
        return "A8"
    raise ValueError(f"family is {name!r}: it must be A16 or A8")


def step_numbers(steps: Sequence[Kernel]) -> str:
    """ "step 2", "steps 7, 9 and 17"."""
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
