"""Checks an exercise: smallest problem first, up to the first that fails, then which hole it is.

Holes that are not filled in yet hold the step's own code meanwhile, so each hole can be checked as
soon as it is written. A failed one is found by putting the step's own code into the others.
"""

from __future__ import annotations

import linecache
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Final

from qformats import BLOCK, FORMATS
from reference import GOLDEN
from steps.blocks.chained import multiplies_twice
from steps.checks.cases import Case, extreme_case
from steps.checks.select import ALL_FORMATS
from steps.contract import Family, Step
from steps.learn.exercises.advice import idle_blocks, machine_code_advice, memory_traffic, refused
from steps.learn.exercises.diagnose import TELLING, diagnose
from steps.learn.exercises.load import Unloadable, load
from steps.learn.exercises.restrictions import few_lines, not_compiled
from steps.learn.exercises.text import Exercise, solutions
from steps.learn.exercises.trial import Diagnosis, Endless, Fault, File, Subject, Trial, attempt

GOLDEN_CASE: Final = Case((1, 1, 32), "golden")
CASES: Final = (
    Case((5, 51, 96), "integer", 2, -1),
    Case((33, 34, 32), "normal", 4, 2),
    Case((18, 20, 96), "normal", 3, 1),
)
"""More than a tile of 32 features; more than a tile of 32 both ways; more tokens than the tiles for
few. Ragged, in several orders of the lanes."""

LARGE_TILES: Final = Case((40, 20, 64), "integer", 9, 2)
"""On one SM, the larger tiles of a step that chooses: before those that take seconds."""

DEEP: Final = (
    Case((2, 3, 672), "integer", 5),
    Case((1, 300, 672), "integer", 7, 1),
    Case((40, 20, 288), "normal", 8, 2),
)
"""More of K than a ring of four stages holds, more features than the warps of a block take at once,
and large tiles: for the steps with rings, on one SM, which then has all of the work."""

DEEPEST: Final = Case((1, 3, 4256), "integer", 9, 1)
"""More of K than the rings of all warps, where each has one of its own."""

OTHERS: Final = Case((2, 3, 64), "integer", 6)  # of each other format, after its golden case
MOST_PRODUCTS: Final = 1 << 17
"""Of a problem whose K is rounded up to a block of 256: larger ones are left out."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a check is limited to: formats, a family, cases of each format; None: not at all."""

    formats: Sequence[str] | None = None
    family: Family | None = None
    cases: Callable[[str], Sequence[Case]] | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """What a check found. `wrong` is None where all that is filled in is right; `hole` the one to
    look at: the wrong one, or the next to fill in, None where there is none; `suspected` are all
    holes that are wrong by themselves."""

    exercise: Exercise
    cases: int = 0
    seconds: float = 0.0
    wrong: Diagnosis | None = None
    hole: int | None = None
    suspected: tuple[int, ...] = ()
    advice: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Right, and nothing left to do."""
        return self.wrong is None and not self.exercise.unfilled


def subjects(step: Step, asked: Asked = Asked()) -> Iterator[Subject]:
    """What a step is tried on, in this order: each family in Q4_0, then the other formats."""
    families = [asked.family] if asked.family else step.families
    formats = [name for name in ALL_FORMATS if name in (asked.formats or step.formats)]
    if asked.cases is not None:
        for name in formats:
            for family in families:
                yield from (Subject(family, name, case) for case in asked.cases(name))
        return
    for family in families:
        yield from _of_first(step, family, formats[0])
    for name in formats[1:]:
        for family in families:
            yield from _of_format(step, family, name, (OTHERS,))


def _of_first(step: Step, family: Family, name: str) -> Iterator[Subject]:
    """Of the first format, in which all that has to do with places is tried."""
    yield from _of_format(step, family, name, (TELLING,))
    if multiplies_twice(step):  # by K x K weights besides; on one SM its ring is filled again
        few = [replace(one, shape=(min(one.shape[0], 2), *one.shape[1:])) for one in CASES]
        yield from _fitting(family, name, few)
        yield from _fitting(family, name, few[:1], sms=1)
        return
    small = list(_fitting(family, name, CASES))
    rings = (*DEEP, DEEPEST) if step.branch == "decode" else DEEP
    deep = list(_fitting(family, name, (LARGE_TILES, *rings), sms=1))
    if step.branch == "cuda_cores":
        yield from small
    elif step.branch == "decode":  # only many features tell which warp's part is wrong
        yield from (*deep[1:], *deep[:1], *small)
    else:  # deep ones take seconds
        yield from (*small, *deep)


def _of_format(step: Step, family: Family, name: str, some: Sequence[Case]) -> Iterator[Subject]:
    """Of each format: by hand, some, and the largest sums."""
    if name in GOLDEN:
        yield Subject(family, name, GOLDEN_CASE)
    yield from _fitting(family, name, some)
    yield Subject(family, name, extreme_case(name, step.most_k, small=True))


def _fitting(
    family: Family, name: str, some: Sequence[Case], sms: int | None = None
) -> Iterator[Subject]:
    """Cases whose K is rounded up to the block of a format, those that take long left out."""
    size = FORMATS[name].elements
    for case in some:
        m, n, k = case.shape
        k = -(-k // size) * size
        if size == BLOCK or m * n * k <= MOST_PRODUCTS:
            yield Subject(family, name, replace(case, shape=(m, n, k)), sms)


def count(step: Step, asked: Asked) -> int:
    """How many problems a right step is tried on."""
    return len(tuple(subjects(step, asked)))


def check(
    exercise: Exercise, report: Callable[[str], None] = lambda _: None, asked: Asked = Asked()
) -> Report:
    """The whole check; report: is told of each problem before it is tried."""
    with few_lines():
        return _checked(exercise, report, asked)


def _checked(exercise: Exercise, report: Callable[[str], None], asked: Asked) -> Report:
    began = time.perf_counter()
    linecache.checkcache(str(exercise.path))
    if exercise.holes and not exercise.filled:
        return Report(exercise, hole=exercise.unfilled[0])
    try:
        step = loaded(exercise, exercise.unfilled)
    except Unloadable as error:
        wrong, hole = _unloadable(exercise, error)
        return Report(exercise, wrong=wrong, hole=hole, suspected=(hole,) if hole else ())
    if no := not_compiled(*exercise.composed(exercise.unfilled), exercise.path):
        hole = exercise.hole_at(no.line)
        return Report(exercise, wrong=no, hole=hole, suspected=(hole,) if hole else ())
    cases = 0
    for subject in subjects(step, asked):
        report(str(subject))
        trial = attempt(step, subject, exercise.path)
        cases += 1
        if not trial.ok:
            wrong, holes = _blamed(exercise, step, trial)
            hole = holes[0] if holes else exercise.hole_at(wrong.line)
            return Report(exercise, cases, time.perf_counter() - began, wrong, hole, holes)
    unfilled, seconds = exercise.unfilled, time.perf_counter() - began
    if unfilled:
        return Report(exercise, cases, seconds, hole=unfilled[0])
    if no := refused(step, exercise.path):
        hole = exercise.hole_at(no.line)
        for number in () if hole else exercise.holes:  # which one it refuses by itself
            others = [other for other in exercise.holes if other != number]
            if refused(loaded(exercise, others), exercise.path):
                hole = number
                break
        return Report(exercise, cases, seconds, no, hole)
    advice = list(machine_code_advice(step, exercise))
    if exercise.reference is not None:
        advice += idle_blocks(step, exercise.reference)
        advice += memory_traffic(step, exercise.reference)
    return Report(exercise, cases, seconds, advice=tuple(advice))


def loaded(exercise: Exercise, solved: Sequence[int] = ()) -> Step:
    """The step in a file, some holes solved; Unloadable where Python refuses it."""
    text, rows = exercise.composed(solved)
    return load(text, exercise.path, rows)


def _unloadable(exercise: Exercise, error: Unloadable) -> tuple[Diagnosis, int | None]:
    """Python refuses the file."""
    text = linecache.getline(str(exercise.path), error.line).strip()
    where = f"{exercise.path.name}:{error.line}" + (f" `{text}`" if text else "")
    advice = error.advice
    if exercise.hole_at(error.line) is None and exercise.holes:
        advice = "This line is in no TODO: put back what was there, or make the exercise anew."
    diagnosis = Diagnosis("syntax", error.line, (f"{where}: {error.why}.", advice))
    return diagnosis, exercise.hole_at(error.line)


def _blamed(exercise: Exercise, step: Step, trial: Trial) -> tuple[Diagnosis, tuple[int, ...]]:
    """What is wrong, and the holes that are wrong by themselves. Of several the first is diagnosed,
    without the mistakes of the others."""
    bad: list[tuple[int, Step, Trial]] = []
    if len(exercise.filled) == 1:
        bad = [(exercise.filled[0], step, trial)]
    elif isinstance(trial.result, Fault) and trial.result.kind == Endless.__name__:
        hole = exercise.hole_at(trial.result.line)  # not to wait again for each of them
        bad = [(hole, step, trial)] if hole in exercise.filled else []
    elif exercise.filled:
        for hole in exercise.filled:
            others = [number for number in exercise.holes if number != hole]
            try:
                alone = loaded(exercise, others)
            except Unloadable:
                continue
            found = attempt(alone, trial.subject, exercise.path)
            if not found.ok:
                bad.append((hole, alone, found))
    own = exercise.filled
    if len(bad) > 1:
        hole, step, trial = bad[0]
        own = (hole,)
    stands_in = {exercise.code_line(n): n for n in exercise.holes if n not in own}

    @cache
    def again(case: Case) -> Trial:
        subject = Subject(trial.subject.family, trial.subject.format, case)
        return trial if subject == trial.subject else attempt(step, subject, exercise.path)

    wrong = diagnose(trial, step, exercise.reference, File(exercise.path, stands_in), again)
    return wrong, tuple(hole for hole, *_ in bad)


def lines(report: Report) -> list[str]:
    """The report as it is printed."""
    exercise = report.exercise
    said = []
    if report.wrong is not None:
        first, *others = report.wrong.sentences
        said.append(f"wrong: {first}")
        said += [f"  {one}" for one in others if one]
        said += _where(report)
        return said
    if exercise.holes and not exercise.filled:
        said.append(f"0 of {len(exercise.holes)} TODOs are filled in")
    elif exercise.unfilled:
        stand_in = "the step's own code stands in for the others"
        filled = _todos(exercise.filled)
        said.append(f"right so far: {filled} of {len(exercise.holes)}; {stand_in}")
        said.append(f"  {report.cases} problems in {report.seconds:.1f} s")
    else:
        said.append(f"right: {report.cases} problems in {report.seconds:.1f} s")
        said += [f"  advice: {one}" for one in report.advice]
    if report.hole is not None:
        todo = solutions(exercise.number)[report.hole].text
        line = f"{exercise.path.name}:{exercise.code_line(report.hole)}"
        said.append(f"next: TODO {report.hole} is not filled in yet ({line}): {todo}")
        said.append("  HINT=1 shows its outline.")
    return said


def _where(report: Report) -> list[str]:
    """Where to look, and what helps."""
    exercise, said = report.exercise, []
    assert report.wrong is not None
    if report.hole is not None:
        line = f"{exercise.path.name}:{exercise.code_line(report.hole)}"
        if report.suspected and len(exercise.filled) > 1:
            said.append(
                f"  The mistake is in TODO {report.hole} ({line}): with the step's own code "
                "everywhere else it is still there."
            )
        else:
            said.append(f"  Look at TODO {report.hole} ({line}).")
        if len(report.suspected) > 1:
            said.append(f"  After it: {_todos(report.suspected[1:])}, wrong as well.")
        said.append(
            f"  HINT=1 shows the outline of TODO {report.hole}, SOLUTION=1 all of the step."
        )
    elif exercise.filled and not report.wrong.line and report.wrong.cause != "compile":
        said.append(
            "  Each TODO is right by itself, together they are not: compare the names and shapes "
            "that one hands to the next."
        )
    return said


def _todos(holes: Sequence[int]) -> str:
    return "TODO " + ", ".join(map(str, holes))
