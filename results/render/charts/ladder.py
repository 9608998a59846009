"""The ladder: a panel per branch, a line per step, from its parent's speed to its own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from results.record.schema import Row, Run
from results.render.charts import style
from results.render.query import BASELINES, Panel, Rung, baseline_us, ladder
from results.render.table import (
    ABSENT,
    cell,
    dims,
    number,
    percent,
    ratio,
)
from steps.contract import Size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLE: Final = "The ladder: each step at its home shape"
DECODE: Final = "decode"  # the branch that memory bounds: drawn as a share of its bandwidth
LINE: Final = 0.27  # inches for a step
LEFT: Final = 2.32  # the steps' names
RIGHT: Final = 1.3  # their figures
ACROSS: Final = style.COLUMN - LEFT - RIGHT
HEAD: Final = 0.34  # a panel's title
LABELS: Final = 0.42  # the names of two baselines
AXIS: Final = 0.5  # tick labels and the axis' name
NOTES: Final = (
    "Hollow: the parent at the same shape. Pale: all formats. Orange: requantized\n"
    "weights, less exact. Steps and cuBLAS: the kernel alone, at each line's own M.\n"
    "Shares end at 100 %: the bandwidth is a measurement, too."
)


def short(row: Row) -> str:
    """ "12 W4A16 wgmma", from the step's number and its module's name."""
    words = row.name.removeprefix("step").split("_")[1:]
    text = " ".join(word.upper() if word.startswith("w4a") else word for word in words)
    return f"{row.step} {text or row.name}" + (" (fast)" if row.accuracy == "fast" else "")


def draw(run: Run) -> Figure:
    panels = ladder(run)
    heights = [_height(panels, i) for i in range(len(panels))]
    format_name = panels[0].rungs[0].row.format.upper()
    height = style.HEAD + sum(heights) + 0.62
    figure = style.new_figure(height, TITLE, run, format_name)
    prefill = [panel for panel in panels if panel.branch != DECODE]
    limits = _limits(run, prefill)
    top = style.HEAD
    for i, (panel, own) in enumerate(zip(panels, heights, strict=True)):
        decode = panel.branch == DECODE
        labelled = _begins(panels, i)
        above = HEAD + (LABELS if labelled else 0.0)
        axes = style.box(figure, LEFT, top + above, ACROSS, LINE * len(panel.rungs))
        y = 1 - (top + 0.22) / height
        figure.text(0.02, y, panel.title, fontweight="bold", fontsize=10.5)
        at = f"M x N x K: {dims(panel.home)}"
        figure.text(1 - 0.02, y, at, fontsize=9, color=style.FAINT, ha="right")
        axes.grid(visible=False, axis="y")
        axes.set_ylim(len(panel.rungs) - 0.5, -0.5)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        for line, rung in enumerate(panel.rungs):
            name = short(rung.row) + (f", M={rung.row.M}" if rung.away else "")
            style.beside(axes, (0.12 - LEFT) / ACROSS, line, name, fontsize=9.5)
        if decode:
            axes.set_xlim(0, 1.05)
            axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25", "50", "75", "100 %"])
            label = "time to read the format's weights once / time"
        else:
            axes.set_xscale("log")
            axes.set_xlim(*limits)
            style.plain_log(axes.xaxis)
            label = "TFLOPS, log scale"
        _lines(run, axes, panel, labelled)
        if _ends(panels, i):
            axes.set_xlabel(label, fontsize=9.5)
        else:
            axes.tick_params(labelbottom=False)
        top += own
    figure.text(0.02, 0.1 / height, NOTES, fontsize=9, color=style.FAINT, va="bottom")
    return figure


def _height(panels: Sequence[Panel], i: int) -> float:
    """Of a panel in inches."""
    above, below = LABELS if _begins(panels, i) else 0.0, AXIS if _ends(panels, i) else 0.08
    return HEAD + above + LINE * len(panels[i].rungs) + below


def _begins(panels: Sequence[Panel], i: int) -> bool:
    """Whether a panel says what its columns and lines are: it has not the axis of the one above."""
    return i == 0 or DECODE in (panels[i].branch, panels[i - 1].branch)


def _ends(panels: Sequence[Panel], i: int) -> bool:
    """Whether the next panel has another axis."""
    return i + 1 == len(panels) or _begins(panels, i + 1)


def _limits(run: Run, panels: Sequence[Panel]) -> tuple[float, float]:
    rungs = [rung for panel in panels for rung in panel.rungs]
    rows = [row for rung in rungs for row in (*rung.every, rung.parent) if row]
    values = [row.tflops for row in rows if row.tflops]
    for panel in panels:
        values += [_work(panel) / us for us in _baselines_us(run, panel).values()]
    return (min(values) / 1.5, max(values) * 1.35) if values else (0.1, 10.0)


def _work(panel: Panel) -> float:
    """Operations of its products in 1e6, which over us are TFLOPS."""
    return 2 * math.prod(panel.home) * 1e-6


def _baselines_us(run: Run, panel: Panel, shape: Size | None = None) -> dict[str, float]:
    """At the panel's shape, or at another one."""
    name, at = panel.rungs[0].row.format, shape or panel.home
    return {each: us for each in BASELINES if (us := baseline_us(run, each, name, at))}


def _lines(run: Run, axes: Axes, panel: Panel, labelled: bool) -> None:
    """The steps and the baselines: by speed, in the panel of decode by their share of the limit."""
    decode = panel.branch == DECODE
    drawn, said, unit = (
        ("limit_share", "kernel_us", "us") if decode else (*["tflops"] * 2, "TFLOPS")
    )
    for y, rung in enumerate(panel.rungs):
        _dumbbell(axes, y, rung, drawn)
        row = rung.row
        figure = cell(getattr(row, said)) if row.status == "ok" else row.status
        texts = (text if text != ABSENT else "" for text in (figure, ratio(row.x_parent)))
        _texts(axes, y, texts)
    times = _baselines_us(run, panel)
    scale, written = _work(panel), {name: number(_work(panel) / us) for name, us in times.items()}
    if decode:
        rows = [rung.row for rung in panel.rungs if not rung.away]
        known = (r.limit_share * r.kernel_us for r in rows if r.limit_share and r.kernel_us)
        scale, written = next(known, 0.0), {name: f"{number(us)} us" for name, us in times.items()}
    if scale:
        away = [y for y, rung in enumerate(panel.rungs) if rung.away]
        _baselines(axes, {name: scale / us for name, us in times.items()}, labelled, written, away)
    for y, rung in enumerate(panel.rungs):
        if rung.away:  # at a shape of its own cuBLAS is as fast as it is there
            row = rung.row
            work = 2 * math.prod(row.shape) * 1e-6
            if decode:
                work = (row.limit_share or 0.0) * (row.kernel_us or 0.0)
            for name, us in _baselines_us(run, panel, row.shape).items():
                axes.plot([work / us] * 2, [y - 0.45, y + 0.45], **_line_of(name))
    if labelled:
        _texts(axes, -0.72, (unit, "x parent"), va="baseline", fontsize=8.5, color=style.FAINT)


def _dumbbell(axes: Axes, y: int, rung: Rung, field: str) -> None:
    """From the parent's figure to the step's, and how far the formats lie apart."""
    most = 1.0 if field == "limit_share" else math.inf
    values = [min(value, most) for row in rung.every if (value := getattr(row, field))]
    own = getattr(rung.row, field)
    color = style.BLUE if rung.row.accuracy == "exact" else style.ORANGE
    if values:
        looks: dict[str, Any] = {"linewidth": 9, "solid_capstyle": "butt", "zorder": 1.5}
        axes.plot([min(values), max(values)], [y, y], color=color, alpha=0.22, **looks)
    if own is None:
        return
    before = getattr(rung.parent, field) if rung.parent else None
    if before:
        axes.plot([before, own], [y, y], color=color, linewidth=1.4, zorder=2)
        hollow: dict[str, Any] = {"markersize": 4.5, "markerfacecolor": "white", "zorder": 2.5}
        axes.plot([before], [y], "o", color=color, **hollow)
    axes.plot([own], [y], "o", markersize=7, color=color, zorder=3)


def _texts(axes: Axes, y: float, texts: Iterable[str], **looks: Any) -> None:
    """The two columns right of a panel."""
    for inches, text in zip((0.64, 1.2), texts, strict=True):
        style.beside(axes, 1 + inches / ACROSS, y, text, ha="right", **looks)


def _line_of(name: str) -> dict[str, Any]:
    looks = {"color": style.BASELINE_COLORS[name], "linestyle": style.BASELINE_DASHES[name]}
    return {**looks, "linewidth": 1.5, "zorder": 1.8}


def _baselines(
    axes: Axes,
    values: dict[str, float],
    labelled: bool,
    written: dict[str, str],
    away: Sequence[int],
) -> None:
    """One line for each, named above the panel at its left, the one farther right higher up: so no
    line runs through a name. It leaves out the lines `away`, of other shapes."""
    count = axes.get_ylim()[0] + 0.5
    for row, (name, value) in enumerate(sorted(values.items(), key=lambda pair: pair[1])):
        rise = 0.0
        if labelled:
            rise = (0.06 + 0.18 * row) / LINE
            text, color = f"{BASELINES[name]} {written[name]} ", style.BASELINE_COLORS[name]
            axes.text(value, -0.5 - rise, text, ha="right", va="bottom", fontsize=9, color=color)
            rise += 0.13 / LINE
        ends = [-0.5 - rise, *(y + part for y in sorted(away) for part in (-0.5, 0.5)), count - 0.5]
        for top, bottom in zip(ends[::2], ends[1::2], strict=True):
            axes.plot([value, value], [top, bottom], clip_on=False, **_line_of(name))


def tell(run: Run) -> str:
    panels, seen = ladder(run), ["Each step from its parent's speed to its own."]
    for panel in panels:
        rows = [r.row for r in panel.rungs if not r.away and r.row.kernel_us]
        exact = [row for row in rows if row.accuracy == "exact"] or rows
        if exact:
            best = min(exact, key=lambda row: row.kernel_us or 0)
            speed = f"{cell(best.tflops)} TFLOPS"
            if panel.branch == DECODE and best.limit_share is not None:
                speed = (
                    f"{percent(best.limit_share)} of memory bandwidth, {cell(best.kernel_us)} us"
                )
            seen.append(f"{panel.title}: step {best.step} reaches {speed}.")
    return " ".join(seen)


LADDER: Final = style.Chart(TITLE, ladder, draw, tell)
