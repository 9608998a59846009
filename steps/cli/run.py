"""The commands that run steps: `run`, `ladder` and `check`.

First all checks, then the clock, then one table. Without a GPU the simulator checks at small shapes
and nothing is timed, which the output says.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from results.measure import bench as benching
from results.measure.bench import Wanted
from results.record.environment import environment, finished
from results.record.schema import Environment, Peer, Row, Run, in_order
from results.render import table
from steps.checks.cases import Case, cases
from steps.checks.run import Outcomes, check_works, fatal
from steps.checks.select import UsageError, select, with_parents
from steps.cli import exercises, gguf_weights, report
from steps.cli.arguments import (
    MachineOf,
    formats_of,
    home_shapes_of,
    is_shape_asked,
    machines,
    shape_of,
    steps_of,
)
from steps.cli.gguf_weights import FileWeights
from steps.compile.dry_run import Recipe
from steps.compile.parallel_compile import compile_ahead
from steps.contract import Size, Step, Work

SIMULATED = "checked in the simulator at small shapes, not timed"


@dataclass(frozen=True, slots=True)
class Asked:
    """What a command line asks for, and where it runs: `why_not` says why that is no GPU. weights:
    those of a file, if they are not drawn."""

    args: Namespace
    steps: Sequence[Step]
    name: str
    machine: MachineOf
    why_not: str | None
    weights: FileWeights | None
    cc: tuple[int, int] | None
    works: tuple[Work, ...]

    @classmethod
    def on(cls, where: tuple[str, MachineOf, str | None], args: Namespace) -> Asked:
        """UsageError for what no step can do there."""
        name, machine, why_not = where
        steps = steps_of(args.steps)
        weights = gguf_weights.of(args, steps, why_not is not None)
        formats = formats_of(args.format) if weights is None else (weights.tensor.type,)
        cc = None if why_not is not None else machine(0).cc
        works = select(steps, formats, args.scheme, cc, args.dtype)
        return cls(args, steps, name, machine, why_not, weights, cc, works)


def run(args: Namespace) -> int:
    """Checks, then measures where there is a GPU; 1 if anything is wrong."""
    asked = Asked.on(machines("auto"), args)
    if asked.why_not is not None:
        return _checked_only(asked, quick=True)
    wanted = [
        one
        for shape, own in problems(asked).items()
        for one in benching.wanted_at(own, shape, args.dtype)
    ]
    every = with_parents(asked.works, asked.cc, args.dtype)
    outcomes = checked(asked, every, ahead=[one.launched for one in wanted])
    measured = Run(env=Environment())
    if outcomes.broken is None:
        measured = _measured(wanted, outcomes, asked)
    tell(asked, outcomes, measured.rows)
    if args.command == "ladder" and not args.json and (path := _chart(measured)):
        print(f"the ladder as a chart: {path}")
    return 0 if outcomes.ok and all(row.status != "failed" for row in measured.rows) else 1


def check(args: Namespace) -> int:
    """The checks alone; 1 if anything is wrong."""
    if args.file is not None:
        return exercises.check(args)
    if args.hint or args.solution:
        raise UsageError("hints and solutions are for a file of your own: name it, --file (FILE=)")
    return _checked_only(Asked.on(machines(args.machine), args), quick=args.quick)


def _checked_only(asked: Asked, quick: bool) -> int:
    outcomes = checked(asked, asked.works, quick=quick)
    tell(asked, outcomes, ())
    return 0 if outcomes.ok else 1


def remark(sentence: str) -> None:
    """Something for people, beside the output."""
    print(sentence, file=sys.stderr)


# --- checking -------------------------------------------------------------------------------------


def checked(
    asked: Asked, works: Sequence[Work], quick: bool = False, ahead: Sequence[Recipe] = ()
) -> Outcomes:
    """The checks of works. ahead: what is launched afterwards, compiled with them on a GPU."""
    args, weights, simulated = asked.args, asked.weights, asked.why_not is not None
    only_checked = simulated or args.command == "check"
    shape = shape_of(args, exercises.SMALL) if only_checked and is_shape_asked(args) else None
    order = getattr(args, "order", None)

    def cases_of(work: Work) -> tuple[Case, ...]:
        if weights is not None:
            return (weights.case(order),)
        return cases(
            work.format,
            simulated=simulated,
            quick=quick,
            small=getattr(args, "small", False),
            shape=shape,
            distribution=args.dist,
            seed=args.seed,
            order=order,
            step=work.step,
        )

    cases_of(works[0])  # a request that cannot be met is refused before anything runs
    if not simulated:
        every = [(w, one.shape) for w in works for one in cases_of(w)]
        wanted = [benching.wanted_in(w, at, w.output(args.dtype)).launched for w, at in every]
        compile_ahead((*wanted, *ahead), asked.machine(0), remark)
    problem_of = weights.of_input if weights else None
    with table.progress(len(works)) as progress:
        return check_works(works, cases_of, asked.machine, progress, problem_of, args.dtype)


# --- measuring ------------------------------------------------------------------------------------


def problems(asked: Asked) -> dict[Size, tuple[Work, ...]]:
    """The shapes to measure at, and what is measured there: the works at home, and their parents.
    A single step is measured at all of its home shapes, others at the one that charts show."""
    args, at = asked.args, dict[Size, list[Work]]()
    for work in asked.works:
        homes = (asked.weights.problem.shape,) if asked.weights else home_shapes_of(args, work.step)
        for shape in homes if len(asked.steps) == 1 else homes[:1]:
            at.setdefault(shape, []).append(work)
    return {shape: with_parents(own, asked.cc, args.dtype) for shape, own in at.items()}


def _measured(wanted: Sequence[Wanted], outcomes: Outcomes, asked: Asked) -> Run:
    """The rows, with ratios, and cuBLAS beside them. A CUDA error ends it and is noted in
    `outcomes`."""
    env, args = environment(), asked.args
    measuring = benching.Bench.here(benching.RUN_BUDGET, remark)
    wrong = {
        (o.work.step.number, o.work.family, o.work.format): o.failures[0]
        for o in outcomes.each
        if not o.ok
    }
    rows: list[Row] = []
    peers: list[Peer] = []
    try:
        with table.progress(len({one.size for one in wanted})) as progress:
            for found, beside in benching.measure_loops(
                measuring,
                benching.in_loops(wanted),
                distribution="normal" if args.dist in (None, "golden") else args.dist,
                seed=args.seed,
                wrong=wrong,
                given=asked.weights.problem if asked.weights else None,
                report=progress,
            ):
                rows += found
                peers += beside
    except Exception as error:
        if not fatal(error):
            raise
        outcomes.broken = f"{type(error).__name__}: {error}"
    run = Run(env=finished(env, measuring.limits), rows=tuple(rows), peers=tuple(peers))
    return in_order(run)


# --- telling --------------------------------------------------------------------------------------


def tell(asked: Asked, outcomes: Outcomes, rows: Sequence[Row]) -> None:
    """Prints what came out: folded for several steps, a line for each format of a single step, of a
    failed one, and where --long asks for it. What was wrong goes to stderr."""
    args, weights = asked.args, asked.weights
    if args.json:
        tensor = weights.as_json() if weights else None
        print(report.as_json(asked.name, outcomes, rows, tensor))
        return
    title = _title(asked, rows)
    notes = gguf_weights.NOTES if weights else ()
    if len(asked.steps) == 1 or args.long:
        named = {step.number for step in asked.steps}
        table.show(report.run_table(title, outcomes.each, rows, named, notes))
    else:
        table.show(report.folded(title, outcomes.each, rows, notes))
        if bad := report.failed(outcomes.each, rows):
            each = [outcome for outcome in outcomes.each if outcome.work.step.number in bad]
            own = [row for row in rows if row.step in bad]
            print()
            table.show(report.run_table("What failed, by format", each, own))
    for sentence in report.sentences(outcomes, rows):
        remark(sentence)


def _title(asked: Asked, rows: Sequence[Row]) -> str:
    weights = asked.weights
    dtype = f", C in {asked.args.dtype}" if asked.args.dtype else ""
    if asked.why_not is not None:
        what = f"{gguf_weights.PART} {weights}" if weights else SIMULATED
        return f"No GPU ({asked.why_not}): {what}{dtype}."
    if not rows:
        return f"{asked.name}: checked, not timed{dtype}" + (f", {weights}" if weights else "")
    at_home = "each step at its home shape"
    where = "at the shape asked for" if is_shape_asked(asked.args) else at_home
    return f"{asked.name}, {weights or where}{dtype}"


def _chart(run: Run) -> Path | None:
    """Draws the run into build/ladder.svg; None where it has no step at its home shape to draw."""
    from results.render import charts

    path = Path("build", "ladder.svg")
    drawn = charts.render(run, only={"ladder"})
    if path.name not in drawn:
        return None
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(drawn[path.name])
    return path
