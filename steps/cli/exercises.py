"""The commands of somebody who learns: `exercise`, `exercises`, and `check`, `diff`, `bench` of a
file of their own."""

from __future__ import annotations

import difflib
import sys
import textwrap
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from qformats import WEIGHT_FORMATS
from results.measure.bench import wanted_in
from results.measure.loop import Contestant, ratio, round_robin
from results.measure.products import Data, Product, Shared
from results.measure.protocol import Budget, Stopwatch
from results.render import table
from results.render.table import Column
from steps.checks.cases import Case, cases
from steps.checks.select import UsageError, select
from steps.cli import arguments
from steps.cli.arguments import (
    formats_of,
    home_shapes_of,
    is_shape_asked,
    machines,
    one_step,
    refusing,
    shape_of,
)
from steps.cli.report import shape_text
from steps.contract import Family, Size, Step, Work, why_no_gpu
from steps.learn.exercises import progress
from steps.learn.exercises.check import Asked, Report, count, lines, loaded
from steps.learn.exercises.check import check as checked
from steps.learn.exercises.load import Unloadable
from steps.learn.exercises.text import Exercise, ExerciseError, make, outline, solutions
from steps.registry import label_of, ladder, source

BUDGET: Final = Budget(warm_seconds=0.3, seconds=1.5, min_rounds=7)


def exercise(args: Namespace) -> int:
    """Write a step with holes, where no file is yet."""
    step = one_step(args.steps)
    path = args.out or progress.path_for(step)
    with refusing(ExerciseError):
        text = make(step)
    if path.exists():
        raise UsageError(
            f"{path} is there, and your work may be in it: remove it, or name another file (OUT=)"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(f"wrote {path}: step {step.number}, {step.title}")
    print(f"Fill in its {len(solutions(step.number))} TODOs, each as soon as you like, and run")
    print(f"  make check FILE={path}")
    return 0


def exercises(args: Namespace) -> int:
    """A line for each exercise: how far it is."""
    every = tuple(progress.progress())
    right = sum(one.right for one in every)
    note = f"{right} of {len(every)} right. make exercise STEP=1 begins one."
    told = table.of_records(
        COLUMNS,
        every,
        notes=(note,),
        tone=lambda one: "good" if one.right else "bad" if "wrong" in one.state else "",
    )
    table.show(told)
    return 0


COLUMNS: Final = (
    Column("step", lambda one: str(one.step.number)),
    Column("idea", lambda one: one.step.title, words=True),
    Column("filled in", lambda one: f"{one.filled} of {one.holes}"),
    Column("state", lambda one: one.state, words=True),
)


def opened(path: Path) -> Exercise:
    """The file of --file; UsageError where it is none."""
    try:
        found = Exercise.read(path)
        _ = found.number, found.holes
    except ExerciseError as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    return found


def own_step(path: Path) -> tuple[Exercise, Step]:
    """A file and the step in it; UsageError where it is not finished or cannot be imported."""
    found = opened(path)
    if found.unfilled:
        raise UsageError(
            f"TODO {found.unfilled[0]} of {path} is not filled in yet: make check FILE={path}"
        )
    try:
        return found, loaded(found)
    except Unloadable as error:
        raise UsageError(f"{path.name}:{error.line}: {error.why}") from None


def work_of(args: Namespace) -> Work:
    """One work of the file of --file, or of the step that is named."""
    if args.file is None:
        return arguments.work_of(args, one_step(args.steps))
    if args.steps:
        raise UsageError("name a step or a file, not both")
    return arguments.work_of(args, own_step(args.file)[1])


def _reference(found: Exercise) -> Step:
    """The step that a file is to become; UsageError where the ladder has none."""
    if found.reference is None:
        raise UsageError(f"the ladder has no step {found.number} to compare {found.path} with")
    return found.reference


def check(args: Namespace) -> int:
    """What is right and what is wrong with a file; 1 unless all of it is right."""
    found = opened(args.file)
    if args.solution:
        print("".join(solution(found)), end="")
        return 0
    asked = _asked(args, found.reference)
    with table.progress(0 if found.reference is None else count(found.reference, asked)) as told:
        report = checked(found, told, asked)
    if asked == Asked() or not report.ok:  # a part of the check does not make it right
        progress.remember(report)
    print(*lines(report), sep="\n")
    if args.hint:
        print(hint(report))
    if report.ok and found.reference is not None and why_no_gpu() is None:
        _show_times(args, own_step(args.file)[1], found.reference)
    return 0 if report.ok else 1


def _asked(args: Namespace, reference: Step | None) -> Asked:
    """What --format, --scheme, a shape and data limit the check to; UsageError for what no step of
    that number has, and for options that a file's check does not heed."""
    unheeded = ("gguf", "tensor", "json", "long", "quick", "small", "dtype", "order")
    if given := [name for name in unheeded if getattr(args, name) not in (None, False)]:
        raise UsageError(f"the check of a file does not heed {given[0].upper()}=: leave it out")
    formats: tuple[str, ...] | None = None
    family: Family | None = None
    if args.format or args.scheme:
        known = ladder() if reference is None else (reference,)
        works = select(known, formats_of(args.format), args.scheme)
        own = [work for work in works if work.step in known]
        if not own and reference is not None:
            work = works[0]
            raise UsageError(str(reference.supports(work.format, work.family)))
        formats = tuple(dict.fromkeys(work.format for work in own))
        family = own[0].family if args.scheme else None
    if not is_shape_asked(args) and args.dist is None:
        return Asked(formats, family)

    def some(name: str) -> Sequence[Case]:
        shape = shape_of(args, SMALL) if is_shape_asked(args) else None
        return cases(
            name, simulated=True, quick=True, shape=shape, distribution=args.dist, seed=args.seed
        )

    for name in formats or (WEIGHT_FORMATS if reference is None else reference.formats):
        some(name)  # a request that cannot be met is refused before anything runs
    return Asked(formats, family, some)


SMALL: Final[Size] = (4, 64, 64)  # what --m --n --k leave open where the simulator checks


def hint(report: Report) -> str:
    """The outline of the hole that is next, or wrong."""
    number = report.exercise.number
    if report.hole is None:
        return "There is nothing left to hint at."
    own = textwrap.indent(outline(solutions(number)[report.hole]), "    ")
    return f"\nTODO {report.hole} in outline, operands left out:\n\n{own}"


def solution(found: Exercise) -> list[str]:
    """The diff from the file to the step."""
    step = _reference(found)
    if found.holes:
        solved, _ = found.composed(tuple(found.holes))
    else:
        solved = "".join(source(step))
    texts = (found.lines, solved.splitlines(keepends=True))
    return list(difflib.unified_diff(*texts, str(found.path), label_of(step), n=2))


def diff(args: Namespace) -> list[str]:
    """The diff of `diff --file`: the step against the file."""
    found = opened(args.file)
    step = _reference(found)
    labels = label_of(step), str(found.path)
    return list(difflib.unified_diff(source(step), found.lines, *labels, n=args.lines))


# --- timing ---------------------------------------------------------------------------------------


def bench(args: Namespace) -> int:
    """The file beside the step that it is to become, timed in turn; nothing is recorded."""
    machines("gpu")
    found, step = own_step(args.file)
    _show_times(args, step, _reference(found))
    return 0


def _show_times(args: Namespace, step: Step, reference: Step) -> None:
    """A line for each family, at its home shape or that of --m --n --k, in the first format."""
    from results.measure.protocol import GpuStopwatch

    _, machine, _ = machines("gpu")
    gpu, stopwatch = machine(0), GpuStopwatch()
    size, name = home_shapes_of(args, step)[0], formats_of(args.format)[0]
    for family in step.families:
        works = Work(step, family, name), Work(reference, family, name)
        try:
            ours, theirs = beside(*works, size, gpu, stopwatch, BUDGET)
        except ValueError as error:
            print(f"not timed: {works[0].scheme} {name}: {error}", file=sys.stderr)
            continue
        print(time_line(works[0], size, ours, theirs))


def time_line(work: Work, size: Size, ours: Contestant, theirs: Contestant) -> str:
    """ "W4A16 q4_0 512x4096x4096: yours 19673 us, the step 19650 us: 1.00x its speed", of the
    kernels alone: the speed is the median over the rounds, above 1 where ours is faster."""
    return (
        f"{work.scheme} {work.format} {shape_text(size)}: yours {ours.timing.us:.4g} us, the step "
        f"{theirs.timing.us:.4g} us: {ratio(theirs.times, ours.times):.2f}x its speed"
    )


def beside(
    ours: Work, theirs: Work, size: Size, machine: Any, stopwatch: Stopwatch, budget: Budget
) -> list[Contestant]:
    """Both timed at one shape, on the same weights and activations.

    ValueError, with the sentence of the check, where one of them is wrong at this shape, or where
    the machine has not what it takes.
    """
    m, n, k = size
    shared = Shared(Data(m, n, k), m, machine, stopwatch)
    timed = []
    for work in (ours, theirs):
        product = Product(wanted_in(work, size, "float32").row(), work, shared)
        product.first_run()
        found = product.check()
        if not found.ok:
            raise ValueError(f"M={m} N={n} K={k}: {found.verdict}")
        product.enter(budget)
        timed += [product.kernel] if product.kernel else []
    round_robin(stopwatch, timed, budget)
    return timed
