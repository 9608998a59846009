"""results/RESULTS.md: what people look for, for every GPU. All rows are in CSV files beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

from qformats import WEIGHT_FORMATS
from results.record.schema import Environment, Run
from results.render import charts, models, query
from results.render.readme import NOTHING
from results.render.rows import csv_files, time_of
from results.render.staleness import Keys, Measured
from results.render.table import (
    ABSENT,
    Column,
    Table,
    dims,
    markdown,
    number,
    of_records,
    ratio,
    span,
)

NAME: Final = "RESULTS.md"
HEAD: Final = """# Results

What people look for, by GPU. Every row is in the CSV files beside each `run.json`, which also says
where figures of others come from; `python -m results M=8 FORMAT=q5_1` prints any of them. `make
charts` writes all of it from the runs; nobody edits it. [README.md] says how it is measured.
[Layers of torch](worklog/layers.md) has gradients, adapters and models of transformers.

[README.md]: ../README.md#how-it-is-checked-and-measured-and-where-it-runs
"""
COMPARED: Final = tuple(
    ("QuantLinear", accuracy, dtype)
    for accuracy in ("exact", "fast")
    for dtype in ("float16", "bfloat16")
)
"""Calls that are told of all formats: (api, accuracy, dtype of A and C)."""
WEIGHTS: Final = (4096, 14336)  # N and K of the tables of one size, where they were measured
TOKENS: Final = (1, 8, 16, 128, 512, 4096)
"""The M of what a caller gets; calls.csv has the others too."""
Part = str | Table | None  # of a section: a paragraph or a table; None where nothing was measured


def page(every: Sequence[Measured]) -> str:
    """The file, a section for each of these runs; charts and errors are of the first, as errors are
    the same on every GPU."""
    if not every:
        return f"{HEAD}\n{NOTHING}\n"
    return "\n".join([HEAD, *(text for i, one in enumerate(every) for text in _gpu(one, i == 0))])


def _gpu(one: Measured, pictured: bool) -> list[str]:
    path, run = one.path, one.run
    folder = path.parent.name
    files = ", ".join(f"[{name}]({folder}/{name})" for name in (path.name, *csv_files(run)))
    measured = query.when([*run.rows, *run.as_called])
    lines = [f"## {run.env.where}", "", f"{files}: {len(run.rows)} rows of steps, "]
    lines[-1] += f"{len(run.as_called)} of calls" + f", {measured}" * bool(measured) + "."
    lines += [*_older(run, one.stale), "", _machine(run.env), ""]
    if pictured:
        lines += [*(f"![{name}](charts/{name}.svg)" for name in charts.plans(run)), ""]
    whole: list[tuple[str, list[Part]]] = [
        (title, [made(path.with_name(name))]) for title, made, name in models.TABLES
    ]
    sections: list[tuple[str, list[Part]]] = [
        ("What a caller gets", _calls(run)),
        *whole,
        ("Each step at home, in every format", _homes(run, with_errors=pictured)),
        ("Failed", [_failed(run)]),
    ]
    for title, parts in sections:
        told = [markdown(part) if isinstance(part, Table) else part for part in parts if part]
        lines += [f"### {title}", "", "\n\n".join(told), ""] if told else []
    return lines


def _older(run: Run, stale: Keys) -> list[str]:
    """Of what the run has figures of another code than this tree's."""
    count: Counter[str] = Counter()
    for row in sorted(run.rows, key=lambda row: row.step):
        count[f"step {row.step}"] += row.key in stale
    for one in run.as_called:
        count[f"{one.api} with step {one.step}"] += one.key in stale
    told = ", ".join(f"{what} ({rows})" for what, rows in count.items() if rows)
    sentence = f"Rows older than their code, which `make bench` measures again: {told}."
    return [sentence] if told else []


# ------------------------------------------------------------------------------ what a caller gets


def _calls(run: Run) -> list[Part]:
    """The least over all sizes by M, one size of weights in all formats, and where time jumps."""
    calls = [one for one in query.tabled(run) if one.M in TOKENS]
    if not calls:
        return []
    kinds = [one for one in COMPARED if any((c.api, c.accuracy, c.dtype) == one for c in calls)]
    ms = sorted({one.M for one in calls})

    def least(kind: tuple[str, str, str]) -> Callable[[int], str]:
        def text(m: int) -> str:
            own = [c for c in calls if (c.api, c.accuracy, c.dtype) == kind and m == c.M]
            return span(min(c.x_cublas for c in own if c.format == f) for f in query.formats(own))

        return text

    sizes = [(n, k) for _, n, k in query.in_order(one.shape for one in calls)]
    n, k = WEIGHTS if WEIGHTS in sizes else sizes[-1]
    layer = ("QuantLinear", "exact", "float16")

    def told(name: str) -> Callable[[int], str]:
        def text(m: int) -> str:
            one = query.called(run, *layer, (m, n, k), name)
            return f"{number(one.us)}, {ratio(one.x_cublas)}" if one else ABSENT

        return text

    return [
        "GPU time of one call in us, tensor in to tensor out, casts and passes included, and how "
        "many times as fast that is as torch with dequantized weights in the same loop.",
        of_records(
            [Column("M"), *(Column(query.kind_name(kind), least(kind)) for kind in kinds)],
            ms,
            "The least over all N x K, from the format where it is least to the one where it is "
            "most:",
        ),
        of_records(
            [Column("M"), *(Column(f.upper(), told(f)) for f in query.formats(calls))],
            ms,
            f"{query.kind_name(layer)}, N x K = {n} x {k}, by format:",
        ),
        _jumps(run),
    ]


def _jumps(run: Run) -> Part:
    if not any(one.swept for one in run.as_called):
        return None
    if not (found := query.cliffs(run)):
        return f"Nowhere does one token more take more than {query.CLIFF:g} times as long."
    more = f"One token more takes more than {query.CLIFF:g} times as long in {len(found)} places"
    return f"{more}, at most here: {query.jump(*found[0])}."


# ------------------------------------------------------------------------------------- the steps


def _homes(run: Run, with_errors: bool) -> list[Part]:
    """A line per format, a column per step: the kernel's time at the step's home."""
    panels = query.ladder(run)
    rungs = [rung for panel in panels for rung in panel.rungs]

    def column(rung: query.Rung) -> Column:
        rows = {row.format: time_of(row) for row in rung.every}
        return Column(str(rung.row.step), lambda name: rows.get(name, ABSENT))

    at: dict[str, list[str]] = {}  # M x N x K -> the branches whose home it is, and steps
    for panel in panels:
        at.setdefault(dims(panel.home), []).append(panel.title)
    for rung in rungs:
        if rung.away:
            at.setdefault(dims(rung.row.shape), []).append(f"step {rung.row.step}")
    homes = [f"{size} ({'; '.join(who)})" for size, who in at.items()]
    names = query.formats(row for rung in rungs for row in rung.every)
    if not rungs:
        return []
    times = of_records(
        [Column("step", str.upper, True), *map(column, rungs)],
        names,
        f"Time of the kernel alone in us, at M x N x K = {', '.join(homes)}.",
    )
    return [times, *[_errors(run, rungs)] * with_errors]


def _errors(run: Run, rungs: Sequence[query.Rung]) -> str:
    """By how much products are off. Formats that are only read have no error of their own."""
    rows = [row for rung in rungs for row in rung.every if row.format in WEIGHT_FORMATS]
    told = [
        "Error of the product, as a multiple of the format's own (NMSE; 1.00x: all of it is the "
        "format's):",
        "",
    ]
    kinds = ("A16", "activations in floating point"), ("A8", "rounded to 8 bits")
    others = ("fast", "the weights too"), ("pruned", "two of each four weights left")
    for kind, what in (*kinds, *others):
        errors: dict[str, list[float | None]] = {name: [] for name in query.formats(rows)}
        for row in rows:
            if kind == (row.family if row.accuracy == "exact" else row.accuracy):
                errors[row.format].append(query.relative_error(run, row))
        each = [f"{name.upper()} {span(own)}" for name, own in errors.items() if own]
        told += [f"- {kind}, {what}: {', '.join(each)}"] * bool(each)
    return "\n".join(told)


def _failed(run: Run) -> Part:
    """What the tables above have no figure for."""
    rows = sorted(run.rows, key=lambda row: row.step)
    said = Counter(f"step {r.step}: {r.why}" for r in rows if r.status != "ok")
    return "\n".join(f"- {text} ({count} rows)" for text, count in said.items())


# ------------------------------------------------------------------------------------- the machine


def limits(env: Environment) -> list[tuple[str, str]]:
    """What the GPU did at most, one fact a line."""
    rates = (("copy", env.limits.copy_tbps), ("read", env.limits.read_tbps))
    found = [(what, f"{number(rate)} TB/s") for what, rate in rates if rate]
    units = sorted(env.limits.tops.items(), key=lambda item: item[1])
    return found + [
        (query.UNITS.get(unit, unit), f"{number(x)} T operations/s") for unit, x in units
    ]


def facts(env: Environment) -> list[tuple[str, str]]:
    """The machine of a run and its software, one line each; what is not known is left out."""
    clocks = env.clocks_mhz
    given: list[tuple[str, Any]] = [
        ("GPU", env.where),
        ("Compute capability", env.cc and "{}.{}".format(*env.cc)),
        ("SMs", env.sms),
        ("L2 cache", env.l2_bytes and f"{env.l2_bytes / 2**20:.0f} MiB"),
        ("Memory", env.memory_bytes and f"{env.memory_bytes / 2**30:.0f} GiB"),
        ("SM clock before", clocks.before and f"{clocks.before:.0f} MHz"),
        ("SM clock after", clocks.after and f"{clocks.after:.0f} MHz"),
        ("SM clock at most", clocks.max and f"{clocks.max:.0f} MHz"),
        ("Power after the run", env.power_draw_w and f"{env.power_draw_w:.0f} W"),
        ("Reasons for lower clocks", env.throttle),
        ("Driver", env.driver),
        ("CUDA toolkit", env.cuda),
        ("numba-cuda", env.numba_cuda),
        ("Numba", env.numba),
        ("NumPy", env.numpy),
        ("Python", env.python),
        ("Commit", env.git.sha and env.git.sha + (" and changes" if env.git.dirty else "")),
        ("Command", env.command),
        ("Date", env.utc),
    ]
    return [(what, str(value)) for what, value in given if value is not None]


LEFT_OUT: Final = ("GPU", "SM clock", "Power", "Reasons", "NumPy", "Commit", "Command", "Date")
"""What of `facts` a section leaves to run.json."""


def _machine(env: Environment) -> str:
    """Limits, then facts, a line each."""
    told = [fact for fact in facts(env) if not fact[0].startswith(LEFT_OUT)]
    pairs = filter(None, (limits(env), told))
    return "\n".join(f"- {'; '.join(f'{what}: {x}' for what, x in each)}" for each in pairs)
