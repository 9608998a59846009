"""results/RESULTS.md: what people look for, for every GPU. All rows are in CSV files beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from results.record.schema import AsCalled, Environment, Row, Run, Size
from results.render import charts, models
from results.render.charts import tokens
from results.render.query import (
    CLIFF,
    UNITS,
    Rung,
    called,
    cliffs,
    formats,
    in_order,
    jump,
    kind_name,
    ladder,
    main_format,
    of_one_dtype,
    sweep,
    tabled,
    timed,
    tops,
    when,
)
from results.render.readme import NOTHING
from results.render.rows import NAMES, csv_files
from results.render.staleness import STALE, STALE_NOTE, Keys, Measured
from results.render.table import (
    ABSENT,
    Column,
    Table,
    cell,
    dims,
    markdown,
    number,
    of_records,
    ratio,
    span,
)

NAME: Final = "RESULTS.md"
HEAD: Final = """# Results

What people look for, by GPU. Every row is in the CSV files beside each `run.json`, and
`python -m results M=8 FORMAT=q5_1` prints any of them. `make charts` writes all of it from the
runs; nobody edits it. README.md says how it is measured.
"""
COMPARED: Final = tuple(
    ("QuantLinear", accuracy, dtype)
    for accuracy in ("exact", "fast")
    for dtype in ("float16", "bfloat16")
)
"""Calls that are told of all formats: (api, accuracy, dtype of A and C)."""
WEIGHTS: Final = (4096, 14336)
"""N and K of the tables of one size."""
JUMPS: Final = 3
"""Places where time jumps that are told, the worst."""


Part = str | Table | None
"""Of a section: a paragraph or a table; None where nothing was measured."""


def page(every: Sequence[Measured]) -> str:
    """The file, a section for each of these runs; charts are of the first."""
    if not every:
        return f"{HEAD}\n{NOTHING}\n"
    return "\n".join([HEAD, *(text for i, one in enumerate(every) for text in _gpu(one, i == 0))])


def _gpu(one: Measured, pictured: bool) -> list[str]:
    path, run, stale = one.path, one.run, one.stale
    records: list[Row | AsCalled] = [*run.rows, *run.as_called]
    folder = path.parent.name
    files = ", ".join(f"[{name}]({folder}/{name})" for name in (path.name, *csv_files(run)))
    lines = [f"## {run.env.where}", "", f"{files}: {len(run.rows)} rows of steps, "]
    lines[-1] += f"{len(run.as_called)} of calls" + f", {when(records)}" * bool(when(records)) + "."
    lines += [STALE_NOTE] * any(r.key in stale for r in records) + [""]
    for name in charts.plans(run) if pictured else ():
        lines += [f"![{name}](charts/{name}.svg)"]
    lines += [""] * pictured
    of_models: list[tuple[str, Part]] = [
        (title, made(path.with_name(name))) for title, made, name in models.TABLES
    ]
    sections: list[tuple[str, list[Part]]] = [
        ("What a caller gets", _calls(run, stale)),
        ("Every number of tokens", _swept(run, stale)),
        *((title, [table]) for title, table in of_models),
        ("Each step at home, in every format", [_homes(run, stale)]),
        ("The last step of each branch", [None if run.as_called else _everywhere(run, stale)]),
        ("Limits and environment", _machine(run)),
        ("Failed, not possible, stale", _exceptions(run, stale)),
    ]
    for title, parts in sections:
        told = [markdown(part) if isinstance(part, Table) else part for part in parts if part]
        lines += [f"### {title}", "", "\n\n".join(told), ""] if told else []
    return lines


def _mark(one: Row | AsCalled, stale: Keys) -> str:
    return f" {STALE}" if one.key in stale else ""


# ------------------------------------------------------------------------------ what a caller gets


def _kind(one: AsCalled) -> tuple[str, str, str]:
    return one.api, one.accuracy, one.dtype


def _calls(run: Run, stale: Keys) -> list[Part]:
    """The least over all sizes by M, then one size of weights in all formats."""
    calls = tabled(run)
    if not calls:
        return []
    kinds = [kind for kind in COMPARED if any(_kind(one) == kind for one in calls)]
    ms = sorted({one.M for one in calls})

    def least(kind: tuple[str, str, str]) -> Callable[[int], str]:
        def text(m: int) -> str:
            own = [one for one in calls if _kind(one) == kind and m == one.M]
            return span(min(c.x_cublas for c in own if c.format == f) for f in formats(own))

        return text

    n, k = _weights(one.shape for one in calls)
    layer = ("QuantLinear", "exact", "float16")

    def told(name: str) -> Callable[[int], str]:
        def text(m: int) -> str:
            one = called(run, *layer, (m, n, k), name)
            return f"{number(one.us)}, {ratio(one.x_cublas)}{_mark(one, stale)}" if one else ABSENT

        return text

    tokens_column = Column("M")
    return [
        "GPU time of one call in us, tensor in to tensor out, casts and passes included, and how "
        "many times as fast that is as torch with dequantized weights in the same loop.",
        of_records(
            [tokens_column, *(Column(kind_name(kind), least(kind)) for kind in kinds)],
            ms,
            "The least over all N x K, from the format where it is least to the one where it is "
            "most:",
        ),
        of_records(
            [tokens_column, *(Column(f.upper(), told(f)) for f in formats(calls))],
            ms,
            f"{kind_name(layer)}, N x K = {n} x {k}, by format:",
        ),
    ]


def _weights(sizes: Iterable[Size]) -> tuple[int, int]:
    """`WEIGHTS`, or the largest there are."""
    every = [(n, k) for _, n, k in in_order(sizes)]
    return WEIGHTS if WEIGHTS in every else every[-1]


def _swept(run: Run, stale: Keys) -> list[Part]:
    """Where a step is chosen at the M of the sweep, and where time jumps."""
    drawn = tokens.sizes(run)
    if not drawn:
        return []
    old = any(one.swept and one.key in stale for one in run.as_called)

    def steps(line: tuple[int, int, str, str]) -> str:
        n, k, accuracy, _ = line
        own = tokens.ranges_of_steps(sweep(run, accuracy, n, k))
        return ", ".join(f"{step} (M={low}-{high})" for step, low, high in own)

    found = cliffs(run)
    most = f"{CLIFF:g} times"
    told = [f"One token more takes more than {most} as long in {len(found)} places; the worst:", ""]
    told += [f"- {jump(*pair)}" for pair in found[:JUMPS]]
    return [
        of_records(
            (
                Column("", lambda line: line[3], words=True),
                Column("N x K", lambda line: dims(line[:2]), words=True),
                Column("steps", steps, words=True),
            ),
            [(*size, accuracy, label) for size in drawn for accuracy, label, _ in tokens.LINES],
            f"Time against M is drawn in tokens.svg{f' {STALE}' * old}. The step that was chosen:",
        ),
        "\n".join(told) if found else f"Nowhere does one token more take more than {most} as long.",
    ]


# ------------------------------------------------------------------------------------ the steps


def _homes(run: Run, stale: Keys) -> Part:
    """A line per format, a column per step: the kernel's time at the step's home."""
    panels = ladder(run)
    rungs = [rung for panel in panels for rung in panel.rungs]

    def us(rung: Rung) -> Callable[[str], str]:
        rows = {row.format: row for row in rung.every}

        def text(name: str) -> str:
            row = rows.get(name)
            return (
                cell(row.kernel_us) if row and row.status == "ok" else row.status if row else ABSENT
            )

        return text

    columns = [Column("step", str.upper, words=True)]
    columns += [Column(f"{rung.row.step}{_mark(rung.row, stale)}", us(rung)) for rung in rungs]
    homes = [f"{panel.title}: {dims(panel.home)}" for panel in panels]
    away = [f"step {rung.row.step}: {dims(rung.row.shape)}" for rung in rungs if rung.away]
    title = f"Microseconds of the kernel alone, at M x N x K of {'; '.join([*homes, *away])}."
    names = formats(row for rung in rungs for row in rung.every)
    return of_records(columns, names, title) if rungs else None


def _everywhere(run: Run, stale: Keys) -> Part:
    """A line per M: kernel and total of the last steps in one format at one size of weights."""
    rows = [row for row in of_one_dtype(timed(run.rows)) if row.step in tops(run)]
    rows = [row for row in rows if row.format == main_format(rows)]
    if not rows:
        return None
    weights = _weights(row.shape for row in rows)
    at = {(row.M, row.step): row for row in rows if weights == (row.N, row.K)}

    def text(step: int) -> Callable[[int], str]:
        def told(m: int) -> str:
            row = at.get((m, step))
            if row is None:
                return ABSENT
            times = f"{cell(row.kernel_us)} / {cell(row.total_us)}, {ratio(row.x_cublas)}"
            return times + _mark(row, stale)

        return told

    steps = sorted({step for _, step in at})
    return of_records(
        [Column("M"), *(Column(f"step {step}", text(step)) for step in steps)],
        sorted({m for m, _ in at}),
        f"Microseconds, kernel / total, then how many times as fast as cuBLAS; "
        f"{rows[0].format.upper()}, N x K = {dims(weights)}.",
    )


# ------------------------------------------------------------------------------------- the machine


def limits(env: Environment) -> list[tuple[str, str]]:
    """What the GPU did at most, one fact a line."""
    rates = (("copy", env.limits.copy_tbps), ("read", env.limits.read_tbps))
    found = [(what, f"{number(rate)} TB/s") for what, rate in rates if rate]
    units = sorted(env.limits.tops.items(), key=lambda item: item[1])
    return found + [(UNITS.get(unit, unit), f"{number(x)} T operations/s") for unit, x in units]


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


def _machine(run: Run) -> list[Part]:
    sources = dict.fromkeys(
        f"{NAMES.get(peer.peer, peer.peer)}: {peer.source}"
        + ("" if peer.same_run else ". From another run on the same GPU model")
        for peer in run.peers
    )
    parts = [limits(run.env), facts(run.env)]
    told = ["; ".join(f"{what}: {value}" for what, value in pairs) for pairs in parts if pairs]
    return ["\n".join(f"- {line}" for line in [*told, *sources])]


def _exceptions(run: Run, stale: Keys) -> list[Part]:
    """What the tables above have no figure for, and what is no fact about this tree."""
    said: Counter[str] = Counter()
    old: Counter[str] = Counter()
    records: Sequence[Row | AsCalled] = [*sorted(run.rows, key=lambda r: r.step), *run.as_called]
    for one in records:
        what = f"step {one.step}" if isinstance(one, Row) else f"{one.api} with step {one.step}"
        if isinstance(one, Row) and one.status != "ok":
            said[f"{what}, {one.status}: {one.why}"] += 1
        old[what] += one.key in stale
    lines = [f"- {text} ({count} rows)" for text, count in said.items()]
    counts = ", ".join(f"{what} ({count})" for what, count in old.items() if count)
    return ["\n".join([*lines, *([f"- Rows older than their code: {counts}."] * bool(counts))])]
