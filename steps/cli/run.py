"""The commands that run steps: `run`, `ladder` and `check`.

First all checks, then the clock, then one table. Without a GPU the simulator checks at small shapes
and nothing is timed, which the output says.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from results.measure import bench as benching
from results.measure.bench import Wanted
from results.record.environment import environment, finished
from results.record.schema import Environment, Peer, Row, Run, in_order
from results.render import table
from steps.checks.cases import Case, cases
from steps.checks.run import Outcomes, check_works, fatal
from steps.checks.select import select, with_parents
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
from steps.contract import Family, Size, Step, Work

SIMULATED = "checked in the simulator at small shapes, not timed"


def run(args: Namespace) -> int:
    """Checks, then measures where there is a GPU; 1 if anything is wrong."""
    steps = steps_of(args.steps)
    name, machine, why_not = where = machines("auto")
    if why_not is not None:
        return _checked_only(args, steps, where, quick=True)
    weights = gguf_weights.of(args, steps, False)
    cc = machine(0).cc
    works = select(steps, _formats(args, weights), args.scheme, cc, args.dtype)
    at = problems(args, works, weights, cc, every_home=len(steps) == 1)
    wanted = [
        one for shape, own in at.items() for one in benching.wanted_at(own, shape, args.dtype)
    ]
    every = with_parents(works, cc, args.dtype)
    ahead = [one.launched for one in wanted]
    outcomes = checked(every, machine, False, args, weights, ahead=ahead)
    measured = Run(env=Environment())
    if outcomes.broken is None:
        measured = _measured(wanted, outcomes, args, weights)
    tell(args, steps, name, outcomes, measured.rows, weights)
    if args.command == "ladder" and not args.json and (path := _chart(measured)):
        print(f"the ladder as a chart: {path}")
    return 0 if outcomes.ok and all(row.status != "failed" for row in measured.rows) else 1


def check(args: Namespace) -> int:
    """The checks alone; 1 if anything is wrong."""
    if args.file is not None:
        return exercises.check(args)
    return _checked_only(args, steps_of(args.steps), machines(args.machine), quick=args.quick)


def _checked_only(
    args: Namespace, steps: Sequence[Step], where: tuple[str, MachineOf, str | None], *, quick: bool
) -> int:
    name, machine, why_not = where
    simulated = why_not is not None
    weights = gguf_weights.of(args, steps, simulated)
    cc = None if simulated else machine(0).cc
    works = select(steps, _formats(args, weights), args.scheme, cc, args.dtype)
    outcomes = checked(works, machine, simulated, args, weights, quick=quick)
    tell(args, steps, name, outcomes, (), weights, why_not)
    return 0 if outcomes.ok else 1


def _formats(args: Namespace, weights: FileWeights | None) -> tuple[str, ...]:
    """Those asked for; of a file's tensor its own."""
    return formats_of(args.format) if weights is None else (weights.tensor.type,)


def remark(sentence: str) -> None:
    """Something for people, beside the output."""
    print(sentence, file=sys.stderr)


# --- checking -------------------------------------------------------------------------------------


def checked(
    works: Sequence[Work],
    machine: MachineOf,
    simulated: bool,
    args: Namespace,
    weights: FileWeights | None,
    *,
    quick: bool = False,
    ahead: Sequence[Recipe] = (),
) -> Outcomes:
    """The checks of works. ahead: what is launched afterwards, compiled with them on a GPU."""
    only_checked = simulated or args.command == "check"
    asked = shape_of(args, exercises.SMALL) if only_checked and is_shape_asked(args) else None
    order = getattr(args, "order", None)

    def cases_of(work: Work) -> tuple[Case, ...]:
        if weights is not None:
            return (weights.case(order),)
        return cases(
            work.format,
            simulated=simulated,
            quick=quick,
            small=getattr(args, "small", False),
            shape=asked,
            distribution=args.dist,
            seed=args.seed,
            order=order,
            step=work.step,
        )

    cases_of(works[0])  # a request that cannot be met is refused before anything runs
    if not simulated:
        every = [(w, one.shape) for w in works for one in cases_of(w)]
        wanted = [benching.wanted_in(w, at, w.output(args.dtype)).launched for w, at in every]
        compile_ahead((*wanted, *ahead), machine(0), remark)
    problem_of = weights.of_input if weights else None
    with table.progress(len(works)) as progress:
        return check_works(works, cases_of, machine, progress, problem_of, args.dtype)


def wrong(outcomes: Outcomes) -> dict[tuple[int, Family, str], str]:
    """Why works must not be timed: (step, family, format) -> the first sentence."""
    return {
        (o.work.step.number, o.work.family, o.work.format): o.failures[0]
        for o in outcomes.each
        if not o.ok
    }


# --- measuring ------------------------------------------------------------------------------------


def problems(
    args: Namespace,
    works: Sequence[Work],
    weights: FileWeights | None,
    cc: tuple[int, int] | None,
    *,
    every_home: bool,
) -> dict[Size, tuple[Work, ...]]:
    """The shapes to measure at, and what is measured there: the works at home, and their parents.

    every_home: at all home shapes of a step, and not only at the one that charts show.
    """
    at: dict[Size, list[Work]] = {}
    for work in works:
        homes = (weights.problem.shape,) if weights else home_shapes_of(args, work.step)
        for shape in homes if every_home else homes[:1]:
            at.setdefault(shape, []).append(work)
    return {shape: with_parents(own, cc, args.dtype) for shape, own in at.items()}


def _measured(
    wanted: Sequence[Wanted], outcomes: Outcomes, args: Namespace, weights: FileWeights | None
) -> Run:
    """The rows, with ratios, and cuBLAS beside them. A CUDA error ends it and is noted in
    `outcomes`."""
    env = environment()
    measuring = benching.Bench.here(benching.RUN_BUDGET, remark)
    rows: list[Row] = []
    peers: list[Peer] = []
    try:
        with table.progress(len({one.size for one in wanted})) as progress:
            for found, beside in benching.measure_loops(
                measuring,
                benching.in_loops(wanted),
                distribution="normal" if args.dist in (None, "golden") else args.dist,
                seed=args.seed,
                wrong=wrong(outcomes),
                given=weights.problem if weights else None,
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


def tell(
    args: Namespace,
    steps: Sequence[Step],
    name: str,
    outcomes: Outcomes,
    rows: Sequence[Row],
    weights: FileWeights | None,
    why_not: str | None = None,
) -> None:
    """Prints what came out: folded for several steps, a line for each format of a single step, of a
    failed one, and where --long asks for it. What was wrong goes to stderr."""
    if args.json:
        tensor = weights.as_json() if weights else None
        print(report.as_json(name, outcomes, rows, tensor))
        return
    title = _title(args, name, rows, weights, why_not)
    notes = gguf_weights.NOTES if weights else ()
    asked = {step.number for step in steps}
    if len(steps) == 1 or args.long:
        table.show(report.run_table(title, outcomes.each, rows, asked, notes))
    else:
        table.show(report.folded(title, outcomes.each, rows, notes))
        if bad := report.failed(outcomes.each, rows):
            each = [outcome for outcome in outcomes.each if outcome.work.step.number in bad]
            own = [row for row in rows if row.step in bad]
            print()
            table.show(report.run_table("What failed, by format", each, own))
    for sentence in report.sentences(outcomes, rows):
        remark(sentence)


def _title(
    args: Namespace,
    name: str,
    rows: Sequence[Row],
    weights: FileWeights | None,
    why_not: str | None,
) -> str:
    dtype = f", C in {args.dtype}" if args.dtype else ""
    if why_not is not None:
        what = f"{gguf_weights.PART} {weights}" if weights else SIMULATED
        return f"No GPU ({why_not}): {what}{dtype}."
    if not rows:
        return f"{name}: checked, not timed{dtype}" + (f", {weights}" if weights else "")
    where = "at the shape asked for" if is_shape_asked(args) else "each step at its home shape"
    return f"{name}, {weights or where}{dtype}"


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
