"""The roofline: the last step of each branch at every M, under the limits measured on this GPU."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from results.record.schema import Row, Run
from results.render.charts import style
from results.render.charts.ladder import short
from results.render.query import UNITS, main_format, of_one_dtype, timed, tops
from results.render.table import cell, dims, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLE: Final = "Roofline: the last step of each branch"
MAIN_WEIGHTS: Final = (4096, 4096)  # N and K of the chart, where they were measured
ROOFS: Final = ("fp32", "dp4a", "tensor_fp16", "tensor_int8")
COLORS: Final = (style.BLUE, style.GREEN, style.ORANGE, style.PINK, style.YELLOW, "#56B4E9")
MARKS: Final = ("o", "^", "s", "D", "v", "P")
PANEL: Final = 4.4
LEFT, RIGHT = 0.76, 1.65


def rows_of(run: Run) -> list[Row]:
    """The rows of the chart: the last steps of all branches in one format at one (N, K)."""
    rows = [row for row in of_one_dtype(timed(run.rows)) if row.gbps and row.tflops]
    last = tops(run)
    rows = [row for row in rows if row.step in last]
    name = main_format(rows)
    rows = [row for row in rows if row.format == name]
    sizes: dict[tuple[int, int], int] = {}
    for row in rows:
        sizes[row.N, row.K] = sizes.get((row.N, row.K), 0) + 1
    if not sizes:
        return []
    weights = MAIN_WEIGHTS if MAIN_WEIGHTS in sizes else max(sizes, key=lambda nk: (sizes[nk], nk))
    return [row for row in rows if weights == (row.N, row.K)]


def intensity(row: Row) -> float:
    """Operations per byte of weights, activations and C."""
    return (row.tflops or 0.0) * 1e3 / (row.gbps or 1.0)


def fastest(rows: list[Row], step: int) -> list[Row]:
    """Of a step the fastest row of each M, in its order: families and dtypes of C are several."""
    best: dict[int, Row] = {}
    for row in sorted((row for row in rows if row.step == step), key=lambda row: row.tflops or 0.0):
        best[row.M] = row
    return [best[m] for m in sorted(best)]


def curves(run: Run) -> dict[str, list[Row]]:
    """The rows of each step by its name, that of its lesson where that was measured."""
    rows, named = rows_of(run), {row.step: row for row in run.rows if row.name.startswith("step")}
    found = {step: fastest(rows, step) for step in sorted({row.step for row in rows})}
    return {short(named.get(step, own[0])): own for step, own in found.items()}


def draw(run: Run) -> Figure:
    rows = rows_of(run)
    height = style.HEAD + PANEL + 0.75
    note = f"{rows[0].format.upper()}, N x K: {dims(rows[0].shape[1:])}"
    figure = style.new_figure(height, TITLE, run, note)
    axes = style.box(figure, LEFT, style.HEAD + 0.1, style.COLUMN - LEFT - RIGHT, PANEL)
    limits = run.env.limits
    bandwidth = max(limits.copy_tbps or 0.0, limits.read_tbps or 0.0)
    roofs: dict[str, float] = {unit: limits.tops[unit] for unit in ROOFS if unit in limits.tops}
    x0, x1 = min(map(intensity, rows)) / 1.8, max(map(intensity, rows)) * 1.8
    speeds = [row.tflops or 1.0 for row in rows]
    y0, y1 = min(speeds) / 2.2, max([*speeds, *roofs.values()]) * 1.7
    handles = []
    for i, (label, own) in enumerate(curves(run).items()):
        points = zip(*((intensity(row), row.tflops or 0.0) for row in own), strict=True)
        looks: dict[str, Any] = {"marker": MARKS[i % len(MARKS)], "color": COLORS[i % len(COLORS)]}
        looks |= {"markerfacecolor": "none", "markeredgewidth": 1.4}  # none hides another
        handles += axes.plot(*points, linewidth=1.1, markersize=6.5, label=label, **looks)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(x0, x1)
    axes.set_ylim(y0, y1)
    style.plain_log(axes.xaxis)
    style.plain_log(axes.yaxis)
    _roofs(axes, bandwidth, roofs)
    _tokens(axes, rows)
    axes.legend(handles=handles, loc="upper left", fontsize=9.5, handlelength=1.4)
    axes.set_xlabel("operations per byte of weights, activations and C", fontsize=9.5)
    axes.set_ylabel("TFLOPS (int8: TOPS), log scale", fontsize=9.5)
    return figure


def _tokens(axes: Axes, rows: list[Row]) -> None:
    """M of the points above, along the axis."""
    x0, x1 = axes.get_xlim()
    width = math.log(x1 / x0)
    ms = sorted({row.M for row in rows})
    columns = [[intensity(row) for row in rows if m == row.M] for m in ms]
    middles = [sum(math.log(x / x0) / width for x in each) / len(each) for each in columns]
    for m, middle in zip(ms, style.spread(middles, 0.165), strict=True):
        place: dict[str, Any] = {"transform": axes.transAxes, "ha": "center"}
        axes.text(middle, 0.02, f"M={m}", fontsize=9, color=style.FAINT, **place)


def _roofs(axes: Axes, bandwidth: float, roofs: dict[str, float]) -> None:
    """The limits, each named along its line. The axes have their limits by now."""
    x0, x1 = axes.get_xlim()
    top = axes.get_ylim()[1]
    line: dict[str, Any] = {"color": style.INK, "linewidth": 1.2}
    if bandwidth:
        end = min(x1, top / bandwidth)
        axes.plot([x0, end], [x0 * bandwidth, end * bandwidth], **line)
        p, q = axes.transData.transform([(x, x * bandwidth) for x in (x0, end)])
        angle = math.degrees(math.atan2(q[1] - p[1], q[0] - p[0]))
        looks: dict[str, Any] = {"rotation": angle, "rotation_mode": "anchor", "fontsize": 9}
        at, text = x0 * 1.5, f"memory, {bandwidth:.2f} TB/s"
        axes.text(at, at * bandwidth * 1.2, text, **looks)
    bottom = axes.get_ylim()[0]
    ends = []
    for unit, roof in roofs.items():
        start = max(x0, roof / bandwidth) if bandwidth else x0
        axes.plot([start, x1], [roof, roof], **line)
        height = math.log(roof / bottom) / math.log(top / bottom)
        ends.append(((1.0, height), f"{UNITS.get(unit, unit)}\n{number(roof)}", style.INK))
    style.named_ends(axes, ends, 0.34 / PANEL)


def tell(run: Run) -> str:
    rows = sorted(rows_of(run), key=lambda row: (row.step, row.M))
    few, many = min(row.M for row in rows), max(row.M for row in rows)
    first = max((row for row in rows if few == row.M), key=lambda row: row.gbps or 0)
    last = max((row for row in rows if many == row.M), key=lambda row: row.tflops or 0)
    return (
        f"Under the limits measured on this GPU, N x K = {dims(rows[0].shape[1:])}: "
        f"at M={few} step {first.step} moves {number((first.gbps or 0) / 1e3)} TB/s; "
        f"at M={many} step {last.step} does {cell(last.tflops)} TFLOPS."
    )


ROOFLINE: Final = style.Chart(TITLE, rows_of, draw, tell)
