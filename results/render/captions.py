"""What the charts and the figures of a run say, in words: for captions, and for who cannot see.

Every number is the run's. A sentence about what was not measured is not made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from results.record.schema import Row, Run, Size
from results.render import charts
from results.render.charts import called, error, roofline, tokens
from results.render.charts.ladder import DECODE
from results.render.query import (
    BASELINES,
    CLIFF,
    LLAMA_CPP,
    UNITS,
    Panel,
    baseline_us,
    cliffs,
    in_order,
    ladder,
    of_one_dtype,
    tabled,
    timed,
)
from results.render.table import dims, number, percent, ratio


@dataclass(frozen=True, slots=True)
class Caption:
    """A chart in words: its title, what one sees at a glance, and its figures one by one."""

    title: str
    finding: str
    figures: str


def sentence(parts: Iterable[str]) -> str:
    return "; ".join(part for part in parts if part) + "."


def step_name(row: Row) -> str:
    """ "step 13 (fast)": one that is not exact says so."""
    return f"step {row.step}" + ("" if row.accuracy == "exact" else f" ({row.accuracy})")


def _last(panel: Panel) -> Row | None:
    """The fastest exact step at the home shape of its branch."""
    rows = [r.row for r in panel.rungs if not r.away and r.row.kernel_us]
    exact = [row for row in rows if row.accuracy == "exact"] or rows
    return min(exact, key=lambda row: row.kernel_us or 0, default=None)


def ladder_caption(run: Run) -> Caption:
    seen, figures = [], []
    for panel in ladder(run):
        format_name = panel.rungs[0].row.format
        best = _last(panel)
        if best:
            share = best.limit_share if panel.branch == DECODE else None
            speed = (
                f"{percent(share)} of memory bandwidth, {number(best.kernel_us or 0)} us"
                if share is not None
                else f"{number(best.tflops or 0)} TFLOPS"
            )
            seen.append(f"step {best.step} reaches {speed} ({panel.title})")
        texts = [
            f"{step_name(rung.row)} {number(rung.row.kernel_us)} us, "
            f"{number(rung.row.tflops or 0)} TFLOPS"
            + (f", {ratio(rung.row.x_parent)} its parent" if rung.row.x_parent else "")
            + (f" at {dims(rung.row.shape)}" if rung.away else "")
            for rung in panel.rungs
            if rung.row.kernel_us
        ]
        texts += [
            f"{label} {number(us)} us"
            for name, label in BASELINES.items()
            if (us := baseline_us(run, name, format_name, panel.home))
        ]
        figures.append(f"{panel.title}, {dims(panel.home)}: " + ", ".join(texts))
    return Caption(
        "The ladder: each step at its home shape",
        "Each step from its parent's speed to its own. " + sentence(seen),
        "Kernel times of one format, M x N x K: " + sentence(figures),
    )


def called_caption(run: Run) -> Caption:
    figures, every = [], []
    for _, n, k in in_order((1, one.N, one.K) for one in tabled(run)):
        for label, points in called.curves(run, n, k):
            if label == called.LINES[0][3]:
                every += [x for _, x in points]
            told = ", ".join(f"M={m} {ratio(x)}" for m, x in points)
            figures.append(f"{label} at {n} x {k}: {told}")
    seen = f"QuantLinear is {ratio(min(every))} to {ratio(max(every))} as fast" if every else ""
    return Caption(
        "What a caller gets",
        "Tensor in to tensor out, beside cuBLAS float16 in the same loop. " + sentence([seen]),
        "Times as fast as cuBLAS float16, against tokens: " + sentence(figures),
    )


def tokens_caption(run: Run) -> Caption:
    figures = []
    for n, k in tokens.sizes(run):
        for label, points in tokens.curves(run, n, k):
            told = ", ".join(f"M={m} {number(us)}" for m, us in points if m in (1, points[-1][0]))
            figures.append(f"{label} at {n} x {k}: {told}")
    found = cliffs(run)
    worst = [ratio(more.us / one.us) + f" from M={one.M}" for one, more in found[:1]]
    seen = f"one token more takes at most {worst[0]} as long" if worst else ""
    none = f"nowhere does one token more take more than {CLIFF:g} times as long"
    return Caption(
        "Time of a call against its tokens",
        "Every number of tokens, beside cuBLAS float16. " + sentence([seen or none]),
        "Microseconds at the first and the last: " + sentence(figures),
    )


def error_caption(run: Run) -> Caption:
    steps = error.rungs(run)
    figures: list[str] = []
    kinds: dict[str, list[float]] = {}
    for rung in steps:
        own = [x for row in rung.every if (x := error.relative(run, row))]
        kernel = [row.nmse_same_operands for row in rung.every if row.nmse_same_operands]
        kinds.setdefault(rung.row.accuracy, []).extend(own)
        parts = [f"{_ends(own, ratio)} its format's"] if own else []
        parts += [f"kernel {_ends(kernel, scientific)}"] if kernel else []
        figures.append(f"{step_name(rung.row)} " + ", ".join(parts))
    seen = [f"{kind} steps {_ends(values, ratio)}" for kind, values in kinds.items() if values]
    return Caption(
        "Error: of the product, and of the kernel",
        "NMSE of the product over that of its format, over all formats: " + sentence(seen),
        "NMSE of the product over that of its format, then NMSE of the kernel: "
        + sentence(figures),
    )


def roofline_caption(run: Run) -> Caption:
    rows = roofline.rows_of(run)
    limits = run.env.limits
    figures = []
    for step in sorted({row.step for row in rows}):
        own = sorted((row for row in rows if row.step == step), key=lambda row: row.M)
        told = ", ".join(f"M={row.M} {number(row.tflops or 0)}" for row in own)
        figures.append(f"{step_name(own[0])}: {told}")
    few, many = min(row.M for row in rows), max(row.M for row in rows)
    first = max((row for row in rows if few == row.M), key=lambda row: row.gbps or 0)
    last = max((row for row in rows if many == row.M), key=lambda row: row.tflops or 0)
    seen = [f"at M={few} {step_name(first)} moves {number((first.gbps or 0) / 1e3)} TB/s"]
    seen.append(f"at M={many} {step_name(last)} does {number(last.tflops or 0)} TFLOPS")
    copy = f"copy {number(limits.copy_tbps)} TB/s" if limits.copy_tbps else ""
    roofs = [f"{UNITS.get(unit, unit)} {number(top)}" for unit, top in sorted(limits.tops.items())]
    return Caption(
        "Roofline: the last step of each branch",
        f"Under the limits measured on this GPU, N x K = {rows[0].N} x {rows[0].K}: "
        + sentence(seen),
        "TFLOPS against operations per byte, log scales. Limits: "
        + sentence([copy, *roofs])
        + " TFLOPS: "
        + sentence(figures),
    )


def scientific(value: float) -> str:
    return f"{value:.1e}"


def _ends(values: Sequence[float], written: Callable[[float], str]) -> str:
    low, high = written(min(values)), written(max(values))
    return low if low == high else f"{low} to {high}"


CAPTIONS: Final[Mapping[str, Callable[[Run], Caption]]] = {
    "ladder": ladder_caption,
    "as_called": called_caption,
    "tokens": tokens_caption,
    "error": error_caption,
    "roofline": roofline_caption,
}


def chart_captions(run: Run) -> dict[str, Caption]:
    """The captions of the charts there are, by the names of `charts.plans`."""
    return {name: CAPTIONS[name](run) for name in charts.plans(run)}


# --- a step ---------------------------------------------------------------------------------------


def home_of(run: Run, step: int) -> Size | None:
    """Where a step is shown."""
    return next(
        (rung.row.shape for panel in ladder(run) for rung in panel.rungs if rung.row.step == step),
        None,
    )


def step_facts(run: Run, step: int) -> list[tuple[str, str]]:
    """(of what, a step's figure and where): over the formats and shapes of the run."""
    rows = [row for row in of_one_dtype(timed(run.rows)) if row.step == step]
    if not rows:
        return []

    def where(row: Row) -> str:
        return f"{row.format.upper()}, {dims(row.shape)}"

    found = []
    top = max(rows, key=lambda row: row.tflops or 0)
    if top.tflops:
        found.append(("Most TFLOPS", f"{number(top.tflops)} ({where(top)})"))
    parents = [row for row in rows if row.home and row.x_parent]
    if parents:
        least, most = (f(parents, key=lambda row: row.x_parent or 0) for f in (min, max))
        numbers = sorted({row.parent for row in parents if row.parent is not None})
        ends = [f"{ratio(row.x_parent)} ({where(row)})" for row in (least, most)]
        against = "Against " + " and ".join(f"step {parent}" for parent in numbers)
        found.append((against, " to ".join(dict.fromkeys(ends))))
    totals = [
        (us / row.total_us, row)
        for row in rows
        if row.total_us and (us := baseline_us(run, LLAMA_CPP, row.format, row.shape))
    ]
    if totals:
        times, row = max(totals, key=lambda pair: pair[0])
        found.append(
            (f"Total against {BASELINES[LLAMA_CPP]}, at best", f"{ratio(times)} ({where(row)})")
        )
    shares = [row.limit_share for row in rows if row.home and row.limit_share is not None]
    if shares:
        low, high = percent(min(shares)), percent(max(shares))
        found.append(("Of its limit at home", low if low == high else f"{low} to {high}"))
    return found
