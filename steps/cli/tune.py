"""The command `tune`: times the steps at many M, and writes the table by which `gemm` chooses."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reference import BENCH_SHAPES
from results.measure import tune as tuning
from results.measure.bench import Bench, failures, measure_loops
from results.record import store
from results.record.environment import environment, finished
from results.record.schema import Row
from results.render import table
from steps.checks.select import UsageError, select
from steps.cli.arguments import formats_of, machines, shape_of, steps_of
from steps.cli.run import remark
from steps.compile.parallel_compile import compile_ahead
from steps.product.tuning_table import Entry
from steps.registry import kernel_of


def tune(args: Namespace) -> int:
    """Times the steps on this GPU, or takes the times of a run, and writes the table of that GPU; 1
    if one was wrong, or there is nothing to write."""
    if args.run is not None:
        return _of_run(args.run)

    _, machine, _ = machines("gpu")
    gpu: Any = machine(0)
    tokens = (args.m,) if args.m else tuning.TOKENS
    sizes = list(dict.fromkeys((n, k) for _, n, k in BENCH_SHAPES))
    if args.n or args.k:
        sizes = [shape_of(args, BENCH_SHAPES[0])[1:]]
    kernels = [kernel_of(step.number) for step in steps_of(args.steps)]
    works = select(kernels, formats_of(args.format), args.scheme, gpu.cc)
    env, measuring = environment(), Bench.here(tuning.BUDGET, remark, torch=False)
    loops = tuning.loops(works, sizes, tokens)
    compile_ahead([one.launched for _, own in loops for one in own], gpu, remark)
    rows: list[Row] = []
    path = None
    with table.progress(len(loops)) as progress:
        for found, _ in measure_loops(measuring, loops, report=progress):
            rows += found
            if any(row.status == "ok" for row in found):  # one that is cut short is a table too
                path = tuning.write(finished(env), tuning.entries(rows))
    table.show(fastest(gpu.name, tuning.entries(rows)))
    wrong = failures(rows)
    for sentence in wrong:
        remark(sentence)
    print(f"wrote {path}" if path else "nothing was measured")
    return 1 if wrong or path is None else 0


def _of_run(path: Path) -> int:
    """The table of what a bench has measured; needs no GPU."""
    run = store.read(path)
    found = tuning.of_run(run)
    if not found:
        raise UsageError(
            f"{path} has no format, N x K and M with all kernels of a bench and with the code of "
            "today: run make bench on that GPU first"
        )
    table.show(fastest(run.env.gpu or "an unknown GPU", found))
    print(f"wrote {tuning.write(run.env, found)}")
    return 0


def fastest(gpu: str, entries: Sequence[Entry]) -> table.Table:
    """The fastest step of each entry, one line a format, N, K and dtype of A and C."""
    tokens = sorted({entry.m for entry in entries})
    best: dict[tuple[str, str, str, str], dict[int, tuple[float, str]]] = {}
    for entry in entries:
        for name, us in entry.times.items():
            step, family, *dtype = name.split()
            where = entry.format, str(entry.n), str(entry.k), *(dtype or ["float32"])
            own = best.setdefault(where, {})  # type: ignore[arg-type]
            own[entry.m] = min(own.get(entry.m, (math.inf, "")), (us, f"{step} {family}"))
    lines = [
        table.Line((*where, *(own[m][1] if m in own else table.ABSENT for m in tokens)))
        for where, own in best.items()
    ]
    columns = [table.Column("format", words=True), table.Column("N"), table.Column("K")]
    columns += [table.Column("A, C", words=True)]
    columns += [table.Column(f"M={m}") for m in tokens]
    return table.Table(tuple(columns), tuple(lines), f"The fastest step and family on {gpu}")
