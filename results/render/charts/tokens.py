"""Time against the number of tokens, at every one that was swept, and the step that was chosen."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from results.record.schema import AsCalled, Run
from results.render.charts import style
from results.render.query import (
    BASELINES,
    CUBLAS,
    LAYERS,
    baseline_us,
    in_order,
    main_format,
    sweep,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LINES: Final = (
    ("exact", "QuantLinear", style.BLUE),
    ("fast", "QuantLinear, fast", style.ORANGE),
)
"""(accuracy, how it is named and drawn)."""
PANEL: Final = 1.75
BAR: Final = 0.17  # the steps of one line
LEFT, RIGHT = 0.68, 1.62
BELOW: Final = 0.34  # tick labels


def sizes(run: Run) -> list[tuple[int, int]]:
    """The (N, K) that were swept."""
    return [(n, k) for _, n, k in in_order((1, c.N, c.K) for c in run.as_called if c.swept)]


def curves(run: Run, n: int, k: int) -> list[tuple[str, list[tuple[int, float]]]]:
    """(name, [(tokens, us)]) at one size of weights; torch's are those beside the exact layer."""
    own = {accuracy: sweep(run, accuracy, n, k) for accuracy, *_ in LINES}
    found = [(label, [(one.M, one.us) for one in own[name]]) for name, label, _ in LINES]
    beside = own["exact"] or own["fast"]
    found.append((BASELINES[CUBLAS], [(one.M, one.cublas_us) for one in beside]))
    for name, label in LAYERS.items():
        times = [(one.M, baseline_us(run, name, one.format, one.shape)) for one in beside]
        found.append((label, [(m, us) for m, us in times if us is not None]))
    return [(label, points) for label, points in found if points]


def ranges_of_steps(calls: Sequence[AsCalled]) -> list[tuple[int, int, int]]:
    """(step, the first M it was chosen for, the last) from left to right."""
    groups = (list(own) for _, own in groupby(calls, key=lambda one: one.step))
    return [(own[0].step, own[0].M, own[-1].M) for own in groups]


def draw(run: Run) -> Figure:
    drawn = sizes(run)
    format_name = main_format(one for one in run.as_called if one.swept).upper()
    own_height = PANEL + len(LINES) * BAR + BELOW + 0.3
    height = style.HEAD + len(drawn) * own_height + 0.42
    title, note = "Time of a call against its tokens", "float16 in and out"
    figure = style.new_figure(height, title, run, f"{format_name}, {note}")
    top = style.HEAD + 0.26
    for i, (n, k) in enumerate(drawn):
        _panel(figure, run, n, k, top, last=i + 1 == len(drawn))
        top += own_height
    style.foot(figure, "GPU time, tensor in to tensor out. Bars: the step that was chosen.")
    return figure


def _panel(figure: Figure, run: Run, n: int, k: int, top: float, last: bool) -> None:
    colors: dict[str, Any] = {label: color for _, label, color in LINES}
    colors |= {BASELINES[CUBLAS]: style.BASELINE_COLORS[CUBLAS]} | style.LAYER_COLORS
    across = style.COLUMN - LEFT - RIGHT
    axes = style.box(figure, LEFT, top, across, PANEL)
    axes.set_title(f"N x K: {n} x {k}", fontsize=10, fontweight="bold", loc="left")
    lines = curves(run, n, k)
    end = max(m for _, points in lines for m, _ in points)
    high = max(us for _, points in lines for _, us in points) * 1.06
    ends = []
    for label, points in lines:
        measured_at_few = label in style.LAYER_COLORS
        looks: dict[str, Any] = {"marker": "o", "markersize": 3.5} if measured_at_few else {}
        if label == BASELINES[CUBLAS]:
            looks["linestyle"] = style.BASELINE_DASHES[CUBLAS]
        axes.plot(*zip(*points, strict=True), color=colors[label], linewidth=1.4, **looks)
        ends.append((points[-1][1] / high, label, colors[label]))
    axes.set_xlim(0, end)
    axes.set_ylim(0, high)
    axes.set_ylabel("us", fontsize=9.5, labelpad=2)
    ticks = [1, *range(16, end + 1, 16)]
    axes.set_xticks(ticks, [])
    style.named_ends(axes, ends, 0.17 / PANEL)
    below = top + PANEL + 0.05
    for accuracy, _, color in LINES:
        bar = style.box(figure, LEFT, below, across, BAR)
        _bar(bar, ranges_of_steps(sweep(run, accuracy, n, k)), color, end)
        below += BAR
    bar.set_xticks(ticks, [str(m) for m in ticks])
    if last:
        bar.set_xlabel("M, tokens", fontsize=9.5)


def _bar(axes: Any, found: Sequence[tuple[int, int, int]], color: str, end: int) -> None:
    """A bar for each range of M with one step, and its number where there is room."""
    axes.set_xlim(0, end)
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.set_xticks([])
    axes.grid(visible=False)
    for side in axes.spines.values():
        side.set_visible(False)
    for step, first, last in found:
        axes.barh(0.5, last - first + 0.8, 0.72, first - 0.9, color=color, alpha=0.25)
        if last - first >= 4:
            axes.text((first + last) / 2, 0.47, str(step), ha="center", va="center", fontsize=8)
