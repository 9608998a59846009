"""What the charts of a run say, in words and in tables: for captions, and for who cannot see.

Every number is the run's. A sentence about what was not measured is not made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from results.record.schema import Row, Run
from results.render import charts
from results.render.charts import called, error, roofline, tokens
from results.render.charts.ladder import DECODE
from results.render.query import (
    BASELINES,
    CLIFF,
    Panel,
    baseline_us,
    cliffs,
    in_order,
    ladder,
    tabled,
)
from results.render.table import (
    ABSENT,
    Column,
    Table,
    cell,
    dims,
    number,
    of_records,
    percent,
    ratio,
    scientific,
    span,
)


@dataclass(frozen=True, slots=True)
class Caption:
    """A chart in words: its title, what one sees at a glance, and its figures one by one."""

    title: str
    finding: str
    figures: Table


def step_name(row: Row) -> str:
    """ "step 15 (fast)": one that is not exact says so."""
    return f"step {row.step}" + ("" if row.accuracy == "exact" else f" ({row.accuracy})")


def _sentence(parts: Iterable[str]) -> str:
    return "; ".join(part for part in parts if part) + "."


Curve = tuple[str, Sequence[tuple[int, float]]]
"""A name, and a figure for some M."""


def _against_tokens(
    curves: Iterable[Curve],
    written: Callable[[float], str],
    title: str,
    few: Callable[[int], bool] = lambda m: True,
) -> Table:
    """A line per curve, a column per M."""
    curves = list(curves)
    ms = sorted({m for _, points in curves for m, _ in points if few(m)})

    def at(m: int) -> Callable[[Curve], str]:
        return lambda curve: written(found[m]) if m in (found := dict(curve[1])) else ABSENT

    names = Column("", lambda curve: curve[0], words=True)
    return of_records([names, *(Column(f"M={m}", at(m)) for m in ms)], curves, title)


def _ladder(run: Run) -> Caption:
    panels, seen = ladder(run), []
    for panel in panels:
        rows = [r.row for r in panel.rungs if not r.away and r.row.kernel_us]
        exact = [row for row in rows if row.accuracy == "exact"] or rows
        if exact:
            best = min(exact, key=lambda row: row.kernel_us or 0)
            share = best.limit_share if panel.branch == DECODE else None
            speed = f"{cell(best.tflops)} TFLOPS"
            if share is not None:
                speed = f"{percent(share)} of memory bandwidth, {cell(best.kernel_us)} us"
            seen.append(f"step {best.step} reaches {speed} ({panel.title})")

    def us(name: str) -> Callable[[Panel], str]:
        return lambda panel: cell(
            baseline_us(run, name, panel.rungs[0].row.format, panel.home), " us"
        )

    columns = (
        Column("branch", lambda panel: panel.title, words=True),
        Column("M x N x K", lambda panel: dims(panel.home)),
        *(Column(label, us(name)) for name, label in BASELINES.items()),
    )
    return Caption(
        "The ladder: each step at its home shape",
        "Each step from its parent's speed to its own. " + _sentence(seen),
        of_records(columns, panels, "The steps are in the table above; the others:"),
    )


def _called(run: Run) -> Caption:
    sizes = [(n, k) for _, n, k in in_order((1, one.N, one.K) for one in tabled(run))]
    every = [(label, dims(size), p) for size in sizes for label, p in called.curves(run, *size)]
    own = [x for label, _, points in every if label == called.LINES[0][3] for _, x in points]
    seen = f"QuantLinear is {ratio(min(own))} to {ratio(max(own))} as fast" if own else ""
    return Caption(
        "What a caller gets",
        "Tensor in to tensor out, beside cuBLAS float16 in the same loop. " + _sentence([seen]),
        _against_tokens(
            ((f"{label} at {at}", points) for label, at, points in every),
            ratio,
            "Times as fast as cuBLAS float16, against tokens",
        ),
    )


def _tokens(run: Run) -> Caption:
    every = [
        (f"{label} at {dims(size)}", points)
        for size in tokens.sizes(run)
        for label, points in tokens.curves(run, *size)
    ]
    last = max(points[-1][0] for _, points in every)
    worst = [ratio(more.us / one.us) + f" from M={one.M}" for one, more in cliffs(run)[:1]]
    seen = f"one token more takes at most {worst[0]} as long" if worst else ""
    none = f"nowhere does one token more take more than {CLIFF:g} times as long"
    return Caption(
        "Time of a call against its tokens",
        "Every number of tokens, beside cuBLAS float16. " + _sentence([seen or none]),
        _against_tokens(every, number, "Microseconds", lambda m: m in (1, 8, 16, 32, 64, last)),
    )


def _error(run: Run) -> Caption:
    rungs = error.rungs(run)

    def products(rung: Any) -> list[float]:
        return [x for row in rung.every if (x := error.relative(run, row))]

    kinds = {
        kind: [x for rung in rungs if rung.row.accuracy == kind for x in products(rung)]
        for kind in dict.fromkeys(rung.row.accuracy for rung in rungs)
    }
    seen = [f"{kind} steps {span(values)}" for kind, values in kinds.items() if values]
    columns = (
        Column("", lambda rung: step_name(rung.row), words=True),
        Column("product, x its format's", lambda rung: span(products(rung))),
        Column(
            "kernel alone",
            lambda rung: span((row.nmse_same_operands for row in rung.every), scientific),
        ),
    )
    return Caption(
        "Error: of the product, and of the kernel",
        "NMSE of the product over that of its format, over all formats: " + _sentence(seen),
        of_records(columns, rungs, "NMSE"),
    )


def _roofline(run: Run) -> Caption:
    rows = sorted(roofline.rows_of(run), key=lambda row: (row.step, row.M))
    few, many = min(row.M for row in rows), max(row.M for row in rows)
    first = max((row for row in rows if few == row.M), key=lambda row: row.gbps or 0)
    last = max((row for row in rows if many == row.M), key=lambda row: row.tflops or 0)
    seen = [
        f"at M={few} {step_name(first)} moves {number((first.gbps or 0) / 1e3)} TB/s",
        f"at M={many} {step_name(last)} does {cell(last.tflops)} TFLOPS",
    ]
    curves = {
        step_name(row): [(own.M, own.tflops or 0) for own in rows if own.step == row.step]
        for row in rows
    }
    return Caption(
        "Roofline: the last step of each branch",
        f"Under the limits measured on this GPU, N x K = {rows[0].N} x {rows[0].K}: "
        + _sentence(seen),
        _against_tokens(
            curves.items(), number, "TFLOPS. The limits are below, with the machine's facts"
        ),
    )


CAPTIONS: Final[Mapping[str, Callable[[Run], Caption]]] = {
    "ladder": _ladder,
    "as_called": _called,
    "tokens": _tokens,
    "error": _error,
    "roofline": _roofline,
}


def chart_captions(run: Run) -> dict[str, Caption]:
    """The captions of the charts there are, by the names of `charts.plans`."""
    return {name: CAPTIONS[name](run) for name in charts.plans(run)}
