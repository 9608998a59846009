"""The ladder: a panel per branch, a line per step, from its parent's speed to its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from results.record.schema import Row, Run
from results.render.charts import style
from results.render.query import BASELINES, Panel, Rung, baseline_us, ladder
from results.render.table import ABSENT, cell, dims, number, ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DECODE: Final = "decode"
"""The branch that memory bounds: drawn as a share of its bandwidth."""
LINE: Final = 0.27  # inches for a step
LEFT: Final = 2.32  # the steps' names
RIGHT: Final = 1.3  # their figures
TITLE: Final = 0.34  # a panel's title
LABELS: Final = 0.42  # the names of two baselines
AXIS: Final = 0.5  # tick labels and the axis' name
NOTES: Final = (
    "Hollow: the parent at the same shape. Pale: all formats. Orange: requantized\n"
    "weights, less exact. Steps and cuBLAS: the kernel alone."
)


def short(row: Row) -> str:
    """ "12 W4A16 wgmma", from the step's number and its module's name."""
    words = row.name.removeprefix("step").split("_")[1:]
    text = " ".join(word.upper() if word.startswith("w4a") else word for word in words)
    return f"{row.step} {text or row.name}" + (
        "" if row.accuracy == "exact" else f" ({row.accuracy})"
    )


def draw(run: Run) -> Figure:
    panels = ladder(run)
    heights = [_height(panel, i, panels) for i, panel in enumerate(panels)]
    format_name = panels[0].rungs[0].row.format.upper()
    height = style.HEAD + sum(heights) + 0.46
    figure = style.new_figure(height, "The ladder: each step at its home shape", run, format_name)
    prefill = [panel for panel in panels if panel.branch != DECODE]
    limits = _limits(run, prefill)
    top = style.HEAD
    for i, (panel, own) in enumerate(zip(panels, heights, strict=True)):
        decode = panel.branch == DECODE
        labelled = decode or i == 0
        above = TITLE + (LABELS if labelled else 0.0)
        axes = style.box(
            figure, LEFT, top + above, style.COLUMN - LEFT - RIGHT, LINE * len(panel.rungs)
        )
        _panel(figure, axes, panel, top)
        if decode:
            _shares(run, axes, panel)
        else:
            _speeds(run, axes, panel, limits, labelled, last=panel is prefill[-1])
        top += own
    figure.text(0.02, 0.1 / height, NOTES, fontsize=9, color=style.FAINT, va="bottom")
    return figure


def _height(panel: Panel, i: int, panels: Sequence[Panel]) -> float:
    """Of a panel in inches. Prefill panels share one axis, below the last of them."""
    decode = panel.branch == DECODE
    last = decode or i + 1 == len(panels) or panels[i + 1].branch == DECODE
    labels = LABELS if decode or i == 0 else 0.0
    return TITLE + labels + LINE * len(panel.rungs) + (AXIS if last else 0.08)


def _limits(run: Run, panels: Sequence[Panel]) -> tuple[float, float]:
    values = [
        row.tflops
        for panel in panels
        for rung in panel.rungs
        for row in (*rung.every, *([rung.parent] if rung.parent else []))
        if row.tflops
    ]
    for panel in panels:
        work = 2 * panel.home[0] * panel.home[1] * panel.home[2]
        times = (_us(run, name, panel) for name in BASELINES)
        values += [work / us * 1e-6 for us in times if us]
    return (min(values) / 1.5, max(values) * 1.35) if values else (0.1, 10.0)


def _us(run: Run, name: str, panel: Panel) -> float | None:
    return baseline_us(run, name, panel.rungs[0].row.format, panel.home)


def _panel(figure: Figure, axes: Axes, panel: Panel, top: float) -> None:
    """Its title, the names of its steps, and the heads of the figures beside them."""
    height = figure.get_size_inches()[1]
    y = 1 - (top + 0.22) / height
    figure.text(0.02, y, panel.title, fontweight="bold", fontsize=10.5)
    figure.text(
        1 - 0.02, y, f"M x N x K: {dims(panel.home)}", fontsize=9, color=style.FAINT, ha="right"
    )
    axes.set_ylim(len(panel.rungs) - 0.5, -0.5)
    axes.set_yticks([])
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    across = style.COLUMN - LEFT - RIGHT
    for y_step, rung in enumerate(panel.rungs):
        label = short(rung.row) + (f", M={rung.row.M}" if rung.away else "")
        axes.text(
            (0.12 - LEFT) / across,
            y_step,
            label,
            transform=_beside(axes),
            va="center",
            fontsize=9.5,
        )


def _beside(axes: Axes) -> Any:
    """x in axes' widths, y in data."""
    return axes.get_yaxis_transform()


def _speeds(
    run: Run, axes: Axes, panel: Panel, limits: tuple[float, float], labelled: bool, last: bool
) -> None:
    axes.set_xscale("log")
    axes.set_xlim(*limits)
    style.plain_log(axes.xaxis)
    for y, rung in enumerate(panel.rungs):
        _dumbbell(axes, y, rung, "tflops")
        _figures(axes, y, cell(rung.row.tflops), rung)
    work = 2 * panel.home[0] * panel.home[1] * panel.home[2]
    _baselines(
        axes,
        {name: work / us * 1e-6 for name in BASELINES if (us := _us(run, name, panel))},
        labelled,
        lambda value, _: number(value),
    )
    if labelled:
        _heads(axes, "TFLOPS")
    if last:
        axes.set_xlabel("TFLOPS, log scale", fontsize=9.5)
    else:
        axes.tick_params(labelbottom=False)


def _shares(run: Run, axes: Axes, panel: Panel) -> None:
    axes.set_xlim(0, 1.05)  # a limit is a measurement, too: chained launches pass it by 2 %
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25", "50", "75", "100 %"])
    for y, rung in enumerate(panel.rungs):
        _dumbbell(axes, y, rung, "limit_share")
        _figures(axes, y, cell(rung.row.kernel_us), rung)
    least = next(
        (
            rung.row.limit_share * rung.row.kernel_us
            for rung in panel.rungs
            if rung.row.limit_share and rung.row.kernel_us and not rung.away
        ),
        None,
    )
    times = {name: us for name in BASELINES if (us := _us(run, name, panel))}
    if least:
        _baselines(
            axes,
            {name: least / us for name, us in times.items()},
            True,
            lambda _, name: f"{number(times[name])} us",
        )
    _heads(axes, "us")
    format_name = panel.rungs[0].row.format.upper()
    axes.set_xlabel(f"time to read the {format_name} weights once / time", fontsize=9.5)


def _dumbbell(axes: Axes, y: int, rung: Rung, field: str) -> None:
    """From the parent's figure to the step's, and how far the formats lie apart."""
    values = [value for row in rung.every if (value := getattr(row, field))]
    own = getattr(rung.row, field)
    color = style.BLUE if rung.row.accuracy == "exact" else style.ORANGE
    if values:
        axes.plot(
            [min(values), max(values)],
            [y, y],
            color=color,
            alpha=0.22,
            linewidth=9,
            solid_capstyle="round",
            zorder=1.5,
        )
    if own is None:
        return
    before = getattr(rung.parent, field) if rung.parent else None
    if before:
        axes.plot([before, own], [y, y], color=color, linewidth=1.4, zorder=2)
        axes.plot(
            [before], [y], "o", markersize=4.5, markerfacecolor="white", color=color, zorder=2.5
        )
    axes.plot([own], [y], "o", markersize=7, color=color, zorder=3)


def _figures(axes: Axes, y: int, figure: str, rung: Rung) -> None:
    across = style.COLUMN - LEFT - RIGHT
    shown = figure if rung.row.status == "ok" else rung.row.status
    for inches, text in ((0.64, shown), (1.2, ratio(rung.row.x_parent))):
        axes.text(
            1 + inches / across,
            y,
            text if text != ABSENT else "",
            transform=_beside(axes),
            ha="right",
            va="center",
        )


def _heads(axes: Axes, figure: str) -> None:
    across = style.COLUMN - LEFT - RIGHT
    for inches, text in ((0.64, figure), (1.2, "x parent")):
        axes.text(
            1 + inches / across,
            -0.72,
            text,
            transform=_beside(axes),
            ha="right",
            fontsize=8.5,
            color=style.FAINT,
        )


def _baselines(axes: Axes, values: dict[str, float], labelled: bool, written: Any) -> None:
    """One line for each, named above the panel at its left, the one farther right higher up: so no
    line runs through a name."""
    count = axes.get_ylim()[0] + 0.5
    for row, (name, value) in enumerate(sorted(values.items(), key=lambda pair: pair[1])):
        rise = 0.0
        if labelled:
            rise = (0.06 + 0.18 * row) / LINE
            axes.text(
                value,
                -0.5 - rise,
                f"{BASELINES[name]} {written(value, name)} ",
                ha="right",
                va="bottom",
                fontsize=9,
                color=style.BASELINE_COLORS[name],
            )
            rise += 0.13 / LINE
        axes.plot(
            [value, value],
            [count - 0.5, -0.5 - rise],
            color=style.BASELINE_COLORS[name],
            linestyle=style.BASELINE_DASHES[name],
            linewidth=1.5,
            clip_on=False,
            zorder=1.8,
        )
