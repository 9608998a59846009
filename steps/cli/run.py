"""The commands that run steps: `run`, `ladder`, `check`, and `launch` for the profiler.

Check first, then measure, then say it in one table. Without a GPU the simulator checks at small
shapes and nothing is timed, which the output says.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qformats import FILE_FORMATS, WEIGHT_FORMATS
from reference import DISTRIBUTIONS
from results.measure import bench as benching
from results.measure.bench import DEFAULT_SHAPE
from results.render import text as table
from results.render.text import Column, Line, Table, Tone
from steps.api.parallel_compile import Wanted, compile_ahead
from steps.checks.works import (
    Case,
    Outcome,
    Outcomes,
    UsageError,
    cases,
    check_works,
    fatal,
    problem,
    select,
    with_ancestors,
)
from steps.cli import gguf_weights as giving
from steps.cli.gguf_weights import Given
from steps.contract import Family, Machine, Size, Step, Work, scheme

SIMULATED = "checked in the simulator at small shapes; nothing is timed, as speed takes a GPU"
OF_A_FILE = "checked in the simulator, and not timed, on a cut of"


# --- where and what -------------------------------------------------------------------------------


def machines(asked: str) -> tuple[str, Callable[[int], Machine], str | None]:
    """(name, order -> machine, why it is not a GPU) for "gpu", "simulator" or "auto".

    UsageError where a GPU is asked for and there is none, or where the simulator cannot run.
    """
    from steps.api.machines import Gpu, Simulator
    from steps.contract import why_no_gpu

    reason = why_no_gpu() if asked != "simulator" else None
    if asked == "gpu" and reason:
        raise UsageError(f"no CUDA GPU can be used here: {reason}")
    if asked == "gpu" or (asked == "auto" and reason is None):
        gpu = Gpu()
        return gpu.name, lambda _: gpu, None
    try:
        import greenlet  # noqa: F401
    except ImportError:
        raise UsageError(
            "the simulator needs the package greenlet: pip install greenlet, or run `make doctor`"
        ) from None
    return "simulator", Simulator, reason or "the simulator was asked for"


def named(texts: Sequence[str]) -> tuple[Step, ...]:
    """Steps by number ("4", "04", "step4") or "all"; UsageError for one that does not exist."""
    import steps

    if not texts or "all" in texts:
        return steps.ladder()
    found = {}
    for text in texts:
        number = text.lower().removeprefix("step")
        if not number.isascii() or not number.isdigit():
            raise UsageError(f"{text!r} is not a step: give a number, such as 4, or all")
        try:
            step = steps.find(int(number))
        except ValueError as error:
            raise UsageError(str(error)) from None
        found[step.number] = step
    return tuple(found[number] for number in sorted(found))


def formats_of(texts: Sequence[str]) -> tuple[str, ...]:
    """Format names, commas or blanks between them; none, or "all", means those that every step
    has. Others, in which files come, are to be named."""
    asked = [name for text in texts for name in text.lower().replace(",", " ").split()]
    known = (*WEIGHT_FORMATS, *FILE_FORMATS)
    for name in asked:
        if name not in (*known, "all"):
            raise UsageError(
                f"unknown format {name!r}: use {', '.join(known)}, or all for the first "
                f"{len(WEIGHT_FORMATS)}"
            )
    if not asked or "all" in asked:
        return WEIGHT_FORMATS
    return tuple(name for name in known if name in asked)


def _formats(args: Namespace, given: Given | None) -> tuple[str, ...]:
    """Those asked for; of a file's tensor its own."""
    return formats_of(args.format) if given is None else (given.tensor.type,)


def asked_shape(args: Namespace, default: Size = (4, 64, 64)) -> Size | None:
    """The shape of --m --n --k, the rest of it from `default`; None where none of them is given."""
    return None if args.m is args.n is args.k is None else shape_of(args, default)


def shape_of(args: Namespace, default: Size = DEFAULT_SHAPE) -> Size:
    """The shape of --m --n --k, and what they leave open from `default`."""
    shape = (args.m or default[0], args.n or default[1], args.k or default[2])
    if shape[2] % 32:
        raise UsageError(
            f"K={shape[2]} is not a multiple of the block of 32: use {shape[2] // 32 * 32 + 32}"
        )
    return shape


def timed_distribution(args: Namespace) -> str:
    """What timed data is drawn from: --dist, or normal (for golden too, which has one shape)."""
    asked: str | None = args.dist
    if asked is not None and asked not in DISTRIBUTIONS:
        raise UsageError(f"unknown distribution {asked!r}: use one of {', '.join(DISTRIBUTIONS)}")
    return "normal" if asked in (None, "golden") else asked


# --- commands -------------------------------------------------------------------------------------


def list_steps(args: Namespace) -> int:
    """The ladder, from the registry."""
    ladder = named(())
    if args.json:
        print(json.dumps([_step_as_json(step) for step in ladder], indent=1))
        return 0
    columns = (
        Column("step"),
        Column("families", words=True),
        Column("parent", words=True),
        Column("unit", words=True),
        Column("cc"),
        Column("title", words=True),
    )
    lines = tuple(
        Line(
            (
                str(step.number),
                " ".join(step.families),
                " ".join(str(p) for p in dict.fromkeys(step.parents.values())) or table.ABSENT,
                " ".join(dict.fromkeys(step.unit.values())),
                "{}.{}".format(*step.min_cc),
                step.title,
            )
        )
        for step in ladder
    )
    table.show(Table(columns, lines))
    return 0


def _step_as_json(step: Step) -> dict[str, Any]:
    return {
        "number": step.number,
        "name": step.name,
        "title": step.title,
        "families": list(step.families),
        "schemes": [scheme(name, family) for family in step.families for name in step.formats],
        "parents": dict(step.parents),
        "unit": dict(step.unit),
        "outputs": list(step.outputs),
        "accuracy": step.accuracy,
        "min_cc": list(step.min_cc),
        "formats": list(step.formats),
    }


def run(args: Namespace) -> int:
    """Checks, then measures where there is a GPU; 1 if anything is wrong."""
    steps = named(args.steps)
    given = giving.given(args, steps, DEFAULT_SHAPE[0])
    name, machine, why_not = machines("auto")
    simulated = why_not is not None
    if args.save and simulated:
        raise UsageError(f"there is nothing to save: {why_not}, and only a GPU is measured")
    cc = None if simulated else machine(0).cc  # type: ignore[attr-defined]
    works = select(steps, _formats(args, given), args.scheme, cc)
    if not simulated:
        works = with_ancestors(works, named(()))

    ahead = []
    if not simulated:
        shape = given.whole.shape if given else shape_of(args)
        ahead = [(work, shape, output) for work in works for output in work.step.outputs]
    outcomes = checked(works, machine, simulated, args, given, quick=simulated, ahead=ahead)
    found: tuple[Any, ...] = ()
    saved: Path | None = None
    if not simulated and outcomes.broken is None:
        found, saved = _measured(works, outcomes, args, given)
    if args.json:
        _print_json(name, outcomes, found, given.as_json(simulated) if given else None)
    else:
        asked = {step.number for step in steps}
        of = given.told(simulated) if given else None
        _print_run(name, why_not, outcomes, found, asked, saved, of)
    return 0 if outcomes.ok and all(row.status != "failed" for row in found) else 1


def check(args: Namespace) -> int:
    """The checks alone; 1 if anything is wrong."""
    steps = named(args.steps)
    given = giving.given(args, steps, DEFAULT_SHAPE[0])
    name, machine, why_not = machines(args.machine)
    simulated = why_not is not None
    cc = None if simulated else machine(0).cc  # type: ignore[attr-defined]
    works = select(steps, _formats(args, given), args.scheme, cc)
    outcomes = checked(works, machine, simulated, args, given, quick=args.quick)
    if args.json:
        _print_json(name, outcomes, (), given.as_json(simulated) if given else None)
    else:
        of = given.told(simulated) if given else None
        _print_run(name, why_not, outcomes, (), {w.step.number for w in works}, None, of)
    return 0 if outcomes.ok else 1


def launch(args: Namespace) -> int:
    """Launches one step once on the GPU, after compiling it: what a profiler looks at."""
    from steps.checks.verify import prepare

    _, machine, _ = machines("gpu")
    work = one_work(args)
    gpu = machine(0)
    shape = shape_of(args)
    posed = problem(work.format, shape, timed_distribution(args), args.seed)
    prepared = prepare(work.step, work.family, work.format, posed.a, posed.blocks, gpu)
    for each in (*prepared.activations.launches, prepared.launch):
        gpu.run(each)
    gpu.synchronize()  # type: ignore[attr-defined]
    m, n, k = shape
    print(f"launched {prepared.launch.kernel.__name__} ({work}) at M={m} N={n} K={k}")
    return 0


def one_work(args: Namespace) -> Work:
    """The single work that --format and --scheme leave of one step.

    By default it is the first format, of the family that continues the ladder.
    """
    steps = named(args.steps)
    if len(steps) != 1:
        raise UsageError("name one step, such as 4")
    names = formats_of(args.format)
    family = None if args.scheme else steps[0].families[-1]
    return select(steps, names, args.scheme or family)[0]


def remark(sentence: str) -> None:
    """Something for people, beside the output."""
    print(sentence, file=sys.stderr)


def checked(
    works: Sequence[Work],
    machine: Callable[[int], Machine],
    simulated: bool,
    args: Namespace,
    given: Given | None,
    *,
    quick: bool,
    ahead: Sequence[Wanted] = (),
) -> Outcomes:
    """ahead: what will be launched afterwards, so that all is compiled at once on a GPU."""
    asked = asked_shape(args) if simulated or args.command == "check" else None

    def cases_of(format_name: str) -> tuple[Case, ...]:
        if given is not None:
            return (given.case(simulated, getattr(args, "order", None)),)
        return cases(
            format_name,
            simulated=simulated,
            quick=quick,
            small=getattr(args, "small", False),
            shape=asked,
            distribution=args.dist,
            seed=args.seed,
            order=getattr(args, "order", None),
        )

    cases_of(works[0].format)  # a request that cannot be met is refused before anything runs
    if not simulated:
        checked = [(w, one.shape, "float32") for w in works for one in cases_of(w.format)]
        compile_ahead((*checked, *ahead), machine(0), remark)
    posed = given.posed(simulated) if given else None
    with table.progress(len(works)) as report:
        return check_works(works, cases_of, machine, report, posed)


def wrong(outcomes: Outcomes) -> dict[tuple[int, Family, str], str]:
    """Why works must not be timed: (step, family, format) -> the first sentence."""
    return {
        (o.work.step.number, o.work.family, o.work.format): o.failures[0]
        for o in outcomes.each
        if not o.ok
    }


def _measured(
    works: Sequence[Work], outcomes: Outcomes, args: Namespace, given: Given | None
) -> tuple[tuple[Any, ...], Path | None]:
    """(rows with ratios, where they were saved). A CUDA error ends it and is in `outcomes`."""
    from results.record import schema as record

    shape = shape_of(args) if given is None else given.whole.shape
    env = record.environment()
    measuring = benching.Bench.here(benching.Budget())
    found: list[Any] = []
    with table.progress(len(works)) as report:
        rows = benching.rows(
            measuring,
            works,
            [shape],
            distribution=timed_distribution(args),
            seed=args.seed,
            wrong=wrong(outcomes),
            given=given.whole if given else None,
            report=report,
        )
        try:
            for row in rows:
                found.append(row)  # noqa: PERF402 - those before an error are kept
        except Exception as error:
            if not fatal(error):
                raise
            outcomes.broken = f"{type(error).__name__}: {error}"
    saved = None
    if args.save:
        recorder = benching.Recorder(env, measuring.limits)
        saved = recorder.save(found)
        if outcomes.broken is None:
            names = formats_of(args.format)
            others = benching.same_work_by_others(
                env.gpu, [shape], names, measuring.budget, measuring.stopwatch.l2_bytes, remark
            )
            recorder.save(found, others)
    return benching.sorted_rows(found), saved


# --- what is printed ------------------------------------------------------------------------------

_MEASURED = (
    "kernel",
    "total",
    "chain",
    "TFLOPS",
    "GB/s",
    "of limit",
    "x parent",
    "x step 1",
    "registers",
)


def run_table(
    title: str,
    outcomes: Sequence[Outcome],
    rows: Sequence[Any],
    asked: set[int],
    *,
    shapes: bool = False,
    notes: Sequence[str] = (),
) -> Table:
    """One line a work: from its row where it was measured, else from its checks."""
    head = [Column("step"), Column("scheme", words=True), Column("format", words=True)]
    if shapes:
        head += [Column("M"), Column("N"), Column("K")]
    several = any(row.output != "float32" for row in rows)
    if several:
        head += [Column("C", words=True)]
    head += [Column("kernel error"), Column("format error")]
    if rows:  # without a GPU these columns would only say that nothing was measured
        head += [Column(name) for name in _MEASURED]
    head += [Column("verdict", words=True)]
    checked = {(o.work.step.number, o.work.scheme, o.work.format): o for o in outcomes}
    lines = []
    for row in rows:
        outcome = checked.get((row.step, row.scheme, row.format))
        verdict = _verdict(row.status, outcome)
        cells = [str(row.step), row.scheme, row.format]
        if shapes:
            cells += [str(row.M), str(row.N), str(row.K)]
        if several:
            cells += [row.output]
        cells += [
            table.error(row.nmse_same_operands),
            table.error(row.nmse_float),
            table.microseconds(row.kernel_us),
            table.microseconds(row.total_us),
            table.microseconds(row.chain_us),
            table.figure(row.tflops),
            table.figure(row.gbps),
            table.share(row.limit_share),
            table.times(row.x_parent),
            table.times(row.x_step1),
            table.ABSENT if row.registers is None else str(row.registers),
            verdict,
        ]
        tone: Tone = "bad" if row.status == "failed" else ""
        if not tone and asked and row.step not in asked:
            tone = "faint"
        lines.append(Line(tuple(cells), tone))
    if not rows:
        for outcome in outcomes:
            work = outcome.work
            cells = [str(work.step.number), work.scheme, work.format]
            cells += [table.error(outcome.nmse_same_operands), table.error(outcome.nmse_float)]
            cells += [_verdict("ok" if outcome.ok else "failed", outcome)]
            lines.append(Line(tuple(cells), "" if outcome.ok else "bad"))
    return Table(tuple(head), tuple(lines), title, tuple(notes))


def _verdict(status: str, outcome: Outcome | None) -> str:
    if status == "unsupported":
        return status
    if outcome is None:
        return "ok" if status == "ok" else "FAILED"
    count = f"{outcome.cases} case" + ("s" if outcome.cases != 1 else "")
    if outcome.failures:
        return f"FAILED {len(outcome.failures)} of {count}"
    return f"ok, {count}" if status == "ok" else "FAILED"


def _print_run(
    name: str,
    why_not: str | None,
    outcomes: Outcomes,
    rows: Sequence[Any],
    asked: set[int],
    saved: Path | None,
    of: str | None = None,
) -> None:
    """of: what of a file's tensor was multiplied, where the weights are not drawn."""
    if rows:
        title = f"{name}, {of or f'M={rows[0].M} N={rows[0].N} K={rows[0].K}'}"
    elif why_not is not None:
        title = f"No GPU ({why_not}): {f'{OF_A_FILE} {of}' if of else SIMULATED}."
    else:
        title = f"{name}: checked, not timed" + (f", {of}" if of else "")
    notes = giving.NOTES if of else ()
    table.show(run_table(title, outcomes.each, rows, asked, notes=notes))
    sentences = [sentence for outcome in outcomes.each for sentence in outcome.failures]
    sentences += [
        f"step {row.step} {row.scheme} {row.format}: {row.why}"
        for row in rows
        if row.status == "failed" and row.why not in sentences
    ]
    if outcomes.broken:
        sentences.append(f"the run ended early: {outcomes.broken}")
    for sentence in sentences:
        print(sentence, file=sys.stderr)
    if saved:
        print(f"wrote {saved}")


def _print_json(
    name: str, outcomes: Outcomes, rows: Sequence[Any], tensor: dict[str, Any] | None = None
) -> None:
    data = {
        "machine": name,
        **({"tensor": tensor} if tensor else {}),
        "ok": outcomes.ok and all(row.status != "failed" for row in rows),
        "broken": outcomes.broken,
        "checks": [outcome.as_json() for outcome in outcomes.each],
        "rows": [asdict(row) for row in rows],
    }
    print(json.dumps(_finite(data), indent=1))


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null instead."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and value - value != 0:
        return None
    return value
