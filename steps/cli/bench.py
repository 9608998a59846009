"""The command `bench`: measures what is missing or stale of the matrix, and keeps the rest.

What is measured in which order is in `results.measure.bench` and `results.measure.as_called`.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from results.measure import as_called
from results.measure import bench as benching
from results.measure.bench import Bench, Recorder, Wanted
from results.record import store
from results.record.environment import environment
from results.record.schema import Size
from results.render import query, table
from steps.checks.run import fatal
from steps.checks.select import UsageError, select
from steps.cli import exercises, report
from steps.cli.arguments import formats_of, is_shape_asked, machines, shape_of, steps_of
from steps.cli.run import remark
from steps.compile.parallel_compile import compile_ahead
from steps.registry import kernel_of, ladder


def bench(args: Namespace) -> int:
    """Rows that are missing or stale, into this GPU's run; 1 if any row failed. Of a file of the
    user's its time beside the step, which is not recorded."""
    if args.file is not None:
        return exercises.bench(args)
    if args.dist or args.seed:
        raise UsageError("a bench draws normal data of seed 0: `run` takes --dist and --seed")
    _, machine, _ = machines("gpu")
    gpu: Any = machine(0)
    env = environment()
    path: Path = args.out or store.path_for(env)
    run = benching.begin(path, env, ladder())
    wanted = rows_of(args, gpu.cc)
    calls = calls_of(args)
    if not args.fresh:
        wanted = benching.missing(wanted, run)
        calls = as_called.missing(calls, run, gpu)
    if not wanted and not calls:
        print(f"{path} is up to date: --fresh (make bench FRESH=1) measures all of it again")
        return 0
    recorder = Recorder(path, env, run)
    broken = _measured(args, gpu, recorder, wanted, calls)
    if recorder.written:  # else it ended before its first loop did
        title = f"{env.where}: {len(recorder.added)} rows measured now"
        if recorder.added:
            keys = {row.key for row in recorder.added}
            rows = [row for row in recorder.run.rows if row.key in keys]
            table.show(report.run_table(title, (), rows, set()))
        print(f"wrote {path}")
    said = benching.failures(recorder.added)
    for sentence in [*said, *([f"the run ended early: {broken}"] if broken else [])]:
        remark(sentence)
    for one, more in query.cliffs(recorder.run) if calls else ():
        remark(f"time jumps: {query.jump(one, more)}")
    return 1 if said or broken else 0


def rows_of(args: Namespace, cc: tuple[int, int] | None) -> list[Wanted]:
    """The rows of the matrix that are asked for; of a shape that the matrix does not have, all
    works."""
    formats = formats_of(args.format)
    if args.only not in (None, "steps", "home"):
        return []
    asked = steps_of(args.steps)
    works = select(asked, formats, args.scheme, cc)
    taught = (kernel_of(step.number) for step in asked)  # some have families that no lesson has
    every = select((*asked, *taught), formats, args.scheme, cc)
    named = {(work.step.number, work.family, work.format) for work in every}
    homes = {size for step in ladder() for size in step.home_shapes}
    found = [
        one
        for one in benching.matrix(ladder(), formats, cc)
        if (one.work.step.number, one.work.family, one.work.format) in named
        and _asked(args, one.size)
        and (args.only != "home" or one.size in homes)
    ]
    if found or not is_shape_asked(args):
        return found
    size = shape_of(args, benching.DEFAULT_SHAPE)
    return [one for work in works for one in benching.wanted_of(work, size)]


def calls_of(args: Namespace) -> list[as_called.Call]:
    """The calls that are asked for: none where steps are named, or there is no torch."""
    from results.measure.torch_graphs import torch_version

    sets = {"calls": as_called.TABLED, "sweep": as_called.SWEEP}
    formats = formats_of(args.format)
    found = [
        (size, way)
        for name, calls in sets.items()
        if args.only in (None, name)
        for size, way in calls
        if way.format in formats and _asked(args, size)
    ]
    if args.scheme or (args.steps and "all" not in args.steps):
        return []
    if found and torch_version() is None:
        remark("what a caller gets is not measured: there is no torch with a GPU")
        return []
    return found


def _asked(args: Namespace, size: Size) -> bool:
    given = (args.m, args.n, args.k)
    return all(one in (None, own) for one, own in zip(given, size, strict=True))


def _measured(
    args: Namespace, gpu: Any, recorder: Recorder, wanted: list[Wanted], calls: list[as_called.Call]
) -> str | None:
    """The CUDA error that ended it, if one did. All that is finished is in the file, however it
    ends."""
    loops = benching.in_loops(wanted)
    count = len(loops) + len(as_called.in_loops(calls))
    launched = [way.choice(size, gpu) for size, way in calls]
    launched += [one.launched for one in wanted]
    remark(f"{len(wanted)} rows and {len(calls)} calls in {count} loops")
    compile_ahead(launched, gpu, remark)
    broken = None
    try:
        measuring = Bench.here(benching.Budget(), remark)
        recorder.limits = measuring.limits
        with table.progress(count) as progress:
            beside = store.recorded(recorder.env.gpu)
            for rows in as_called.measure(measuring, calls, report=progress):
                recorder.add(as_called=rows, peers=beside)
            for found, peers in benching.measure_loops(measuring, loops, report=progress):
                recorder.add(found, [*beside, *peers])
    except Exception as error:
        if not fatal(error):
            raise
        broken = f"{type(error).__name__}: {error}"
    return broken
