"""What the charts and the figures of a run say, in words: for captions, and for who cannot see.

Every number is the run's. A sentence about what was not measured is not made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from results.baselines.peers import LABELS
from results.record.schema import Row, Run
from results.render import charts
from results.render.charts import (
    MAIN_FORMAT,
    UNIT_LABELS,
    Shape,
    dims,
    formats,
    main_shape,
    number,
    peer_us,
    peers_of,
    rungs,
    timed,
)
from results.render.tables import percent, span
from steps.contract import ACCURACIES


@dataclass(frozen=True, slots=True)
class Said:
    """A chart in words: what it is, what one sees at a glance, and its figures one by one."""

    title: str
    finding: str
    figures: str


def sentence(parts: Iterable[str]) -> str:
    return "; ".join(part for part in parts if part) + "."


def step_words(row: Row) -> str:
    """ "step 13 (fast)": one that is not exact says so."""
    return f"step {row.step}" + ("" if row.accuracy == "exact" else f" ({row.accuracy})")


def scientific(value: float) -> str:
    return f"{value:.1e}"


def fastest(rows: Iterable[Row], time: str = "kernel_us", accuracy: str = "exact") -> Row | None:
    own = [row for row in rows if row.accuracy == accuracy and getattr(row, time)]
    return min(own, key=lambda row: float(getattr(row, time)), default=None)


def ladder_words(run: Run, shape: Shape) -> Said:
    rows = [row for row in timed(run) if row.shape == shape]
    figures, best = [], []
    for rung in rungs(rows):
        own = [row for row in rows if (row.step, row.family) == rung and row.x_step1]
        if own:
            figures.append(f"{step_words(own[0])} {rung[1]} {span(row.x_step1 for row in own)}")
    for accuracy in ACCURACIES:
        what = "the fastest exact one" if accuracy == "exact" else f"of the {accuracy} ones"
        top = fastest(rows, accuracy=accuracy)
        if top is not None and top.x_step1:
            own = [row for row in rows if (row.step, row.family) == (top.step, top.family)]
            best.append(f"{what} is step {top.step}, {span(row.x_step1 for row in own)}")
    for peer in peers_of(run):
        base = {row.format: row.kernel_us for row in rows if row.step == 1}
        ratios = [
            us0 / us
            for name, us0 in base.items()
            if us0 and (us := peer_us(run, peer, name, shape)) is not None
        ]
        if ratios:
            figures.append(f"{charts.peer_label(peer)} {span(ratios)}")
    return Said(
        f"Speed over step 1 at {dims(shape)}",
        "Times as fast as step 1, over the formats: " + sentence(best),
        "A group of bars for each step, a bar for each format, on a log scale: "
        + sentence(figures),
    )


def _one_format(run: Run) -> tuple[str, list[Row]]:
    """The format and the rows that the roofline and the large chart of times show."""
    rows = timed(run)
    have, shape = formats(rows), main_shape(rows)
    name = MAIN_FORMAT if MAIN_FORMAT in have else have[0]
    same = [row for row in rows if shape and row.shape[1:] == shape[1:] and row.format == name]
    return name, same


def roofline_words(run: Run) -> Said:
    name, rows = _one_format(run)
    limits = run.env.limits
    few, many = min(row.M for row in rows), max(row.M for row in rows)
    seen, figures = [], []
    decode = fastest(row for row in rows if few == row.M)
    if decode is not None and decode.gbps and limits.copy_tbps:
        seen.append(
            f"at M={few} {step_words(decode)} moves {number(decode.gbps / 1e3)} of the "
            f"{number(limits.copy_tbps)} TB/s that a copy does"
        )
    for accuracy in ACCURACIES:
        top = fastest((row for row in rows if many == row.M), accuracy=accuracy)
        if top is None or not top.tflops:
            continue
        text = f"at M={many} {step_words(top)} does {number(top.tflops)} TFLOPS"
        if roof := limits.tops.get(top.unit):
            text += f" under a roof of {number(roof)} ({UNIT_LABELS.get(top.unit, top.unit)})"
        seen.append(text)
    for m in sorted({row.M for row in rows}):
        own = [row for row in rows if m == row.M and row.tflops]
        figures.append(
            f"M={m}: "
            + ", ".join(
                f"{step_words(row)} {row.family} {number(row.tflops or 0)}"
                for row in sorted(own, key=lambda row: (row.step, row.family))
            )
        )
    roofs = [
        f"{UNIT_LABELS.get(unit, unit)} {number(top)}" for unit, top in sorted(limits.tops.items())
    ]
    copy = f"copy {number(limits.copy_tbps)} TB/s" if limits.copy_tbps else ""
    n, k = rows[0].N, rows[0].K
    return Said(
        f"Roofline: {name}, N={n}, K={k}",
        "Every step at every M under the limits measured on this GPU: " + sentence(seen),
        "TFLOPS against operations per byte, log scales. Limits: "
        + sentence([copy, *roofs])
        + " TFLOPS of the steps: "
        + sentence(figures),
    )


def time_words(run: Run) -> Said:
    name, rows = _one_format(run)
    n, k = rows[0].N, rows[0].K
    seen, figures = [], []
    ms = sorted({row.M for row in rows})
    for m in ms:
        own = [row for row in rows if m == row.M and (row.total_us or row.kernel_us)]
        best = fastest(own, "total_us")
        if best is not None and best.total_us:
            us = peer_us(run, "ggml", name, (m, n, k))
            beside = f" ({LABELS['ggml']} {number(us)})" if us else ""
            seen.append(f"M={m} {step_words(best)} {number(best.total_us)} us{beside}")
        texts = [
            f"{step_words(row)} {row.family} {number(row.total_us or row.kernel_us or 0)}"
            for row in sorted(own, key=lambda row: (row.step, row.family))
        ]
        texts += [
            f"{LABELS[peer]} {number(us)}"
            for peer in peers_of(run)
            if (us := peer_us(run, peer, name, (m, n, k)))
        ]
        figures.append(f"M={m}: " + ", ".join(texts))
    return Said(
        f"Time against M: {name}, N={n}, K={k}",
        "From float32 A to float32 C, the fastest exact step: " + sentence(seen),
        "Microseconds against tokens, log scales, a line for each step: " + sentence(figures),
    )


def error_words(run: Run) -> Said:
    rows = [row for row in run.rows if row.nmse_float is not None and row.output == "float32"]
    shape = main_shape(rows)
    rows = [row for row in rows if row.shape == shape]
    figures = []
    for name in formats(rows):
        own = [row for row in rows if row.format == name]
        kernels = [row.nmse_same_operands for row in own if row.nmse_same_operands]
        text = f"{name} {_ends([row.nmse_float or 0 for row in own])}"
        figures.append(text + (f", kernels {_ends(kernels)}" if kernels else ""))
    formats_error = [row.nmse_float or 0 for row in rows if row.accuracy == "exact"]
    shares = [
        (row.nmse_same_operands / row.nmse_float, row)
        for row in rows
        if row.nmse_same_operands and row.nmse_float and row.accuracy == "exact"
    ]
    seen = [f"The formats cost an NMSE of {_ends(formats_error)}"] if formats_error else []
    if shares:
        share, worst = max(shares, key=lambda pair: pair[0])
        seen.append(
            f"the kernel of an exact step adds at most {100 * share:.2g} % of that "
            f"({step_words(worst)}, {worst.format})"
        )
    return Said(
        f"Error at {dims(shape)}" if shape else "Error",
        "Whose error is it? " + (sentence(seen) if seen else ""),
        "NMSE against the unquantized product, then of the kernels against the same operands: "
        + sentence(figures),
    )


def _ends(values: Sequence[float]) -> str:
    low, high = scientific(min(values)), scientific(max(values))
    return low if low == high else f"{low} to {high}"


def chart_words(run: Run) -> dict[str, Said]:
    """The charts of a page about this run, by the names `charts.plans` has for them."""
    plans, rows = charts.plans(run), timed(run)
    shape = main_shape(rows)
    said: dict[str, Said] = {}
    if shape is not None:
        name = "ladder-m{}-n{}-k{}".format(*shape)
        if name in plans:
            said[name] = ladder_words(run, shape)
        said["roofline"] = roofline_words(run)
        chosen, _ = _one_format(run)
        said["time-{}-n{}-k{}".format(chosen, *shape[1:])] = time_words(run)
    if "error" in plans:
        said["error"] = error_words(run)
    return said


# --- a step ---------------------------------------------------------------------------------------


def shape_of_interest(run: Run, most_tokens: int | None) -> Shape | None:
    """Where a step is shown: the main shape, or for a step meant for few tokens the largest M that
    was measured and is meant."""
    rows = timed(run)
    shape = main_shape(rows)
    if shape is None or most_tokens is None or shape[0] <= most_tokens:
        return shape
    fewer = [row.M for row in rows if most_tokens >= row.M and row.shape[1:] == shape[1:]]
    return (max(fewer), *shape[1:]) if fewer else shape


def best_words(run: Run, step: int) -> list[tuple[str, str]]:
    """(of what, the best figure of a step and where): over all formats and shapes of the run."""
    rows = [row for row in timed(run) if row.step == step]
    if not rows:
        return []

    def where(row: Row) -> str:
        return f"{row.format.upper()}, {dims(row.shape)}"

    found = []
    top = max(rows, key=lambda row: row.tflops or 0)
    if top.tflops:
        found.append(("Most TFLOPS", f"{number(top.tflops)} ({where(top)})"))
    parents = [row for row in rows if row.x_parent]
    if parents:
        least, most = (f(parents, key=lambda row: row.x_parent or 0) for f in (min, max))
        families = sorted({row.parent for row in parents if row.parent is not None})
        words = " and ".join(f"step {parent}" for parent in families)
        found.append(
            (
                f"Kernel against {words}",
                f"{number(least.x_parent or 0)}x ({where(least)}) to "
                f"{number(most.x_parent or 0)}x ({where(most)})",
            )
        )
    against = [
        (us / row.total_us, row)
        for row in rows
        if row.total_us and (us := peer_us(run, "ggml", row.format, row.shape))
    ]
    if against:
        ratio, row = max(against, key=lambda pair: pair[0])
        found.append(
            (f"Total against {LABELS['ggml']}, at best", f"{number(ratio)}x ({where(row)})")
        )
    shares = [row.limit_share for row in rows if row.limit_share is not None]
    if shares:
        found.append(("Of what this GPU allows", percent(shares)))
    return found
