"""What a caller gets beside cuBLAS float16: times as fast at the tabled numbers of tokens, and time
at every number of tokens that was swept, with the step that was chosen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from results.record.schema import AsCalled, Run
from results.render import query
from results.render.charts import style
from results.render.charts.style import Curve
from results.render.table import dims, number, ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OWN: Final = {
    "QuantLinear": ("QuantLinear", "exact", "float16"),
    "QuantLinear, fast": ("QuantLinear", "fast", "float16"),
    "gemm.plan, float32": ("gemm.plan", "exact", "float32"),
}
"""How our calls are named: (api, accuracy, dtype)."""
SWEPT: Final = {name: accuracy for name, (_, accuracy, dtype) in OWN.items() if dtype == "float16"}
MARKS: Final = dict(zip(OWN, "os^", strict=True))
COLORS: Final = dict(zip(OWN, (style.BLUE, style.ORANGE, style.GREEN), strict=True))
COLORS.update({name: style.BASELINE_COLORS[key] for key, name in query.BASELINES.items()})
COLORS.update(style.LAYER_COLORS)
DASHES: Final = {name: style.BASELINE_DASHES[key] for key, name in query.BASELINES.items()}
PANEL: Final = 1.75
LEFT: Final = 0.66
ACROSS: Final = style.COLUMN - LEFT - 1.72
BAR: Final = 0.17  # the steps of one line
Weights = tuple[int, int]  # N, K


def weights(calls: Iterable[AsCalled]) -> list[Weights]:
    return [(n, k) for _, n, k in query.in_order((1, one.N, one.K) for one in calls)]


def _axes(figure: Figure, top: float, size: Weights) -> Axes:
    axes = style.box(figure, LEFT, top, ACROSS, PANEL)
    axes.set_title(f"N x K: {dims(size)}", fontsize=10, fontweight="bold", loc="left")
    return axes


def _plot(axes: Axes, curves: Sequence[Curve], **looks: Any) -> None:
    """Each line and its name beside its end. The axes have their limits by now."""
    ends = []
    for label, points in curves:
        line = {"color": COLORS[label], "linestyle": DASHES.get(label, "-")}
        axes.plot(*zip(*points, strict=True), **looks.get(label, {}), **line)
        place = axes.transAxes.inverted().transform(axes.transData.transform(points[-1]))
        ends.append(((float(place[0]), float(place[1])), label, COLORS[label]))
    style.named_ends(axes, ends, 0.17 / PANEL)


# --- times as fast --------------------------------------------------------------------------------


def speeds(run: Run, n: int, k: int) -> list[Curve]:
    """(name, [(tokens, times as fast as cuBLAS)]) at one size of weights."""
    calls = query.tabled(run)
    name = query.main_format(calls)
    sizes = [(m, n, k) for m in sorted({one.M for one in calls if (n, k) == (one.N, one.K)})]
    ours = {
        label: {size[0]: one for size in sizes if (one := query.called(run, *kind, size, name))}
        for label, kind in OWN.items()
    }
    found = [(label, [(m, c.x_cublas) for m, c in own.items()]) for label, own in ours.items()]
    for other, label in {query.LLAMA_CPP: query.BASELINES[query.LLAMA_CPP], **query.LAYERS}.items():
        times = (
            (c, query.baseline_us(run, other, name, c.shape)) for c in ours["QuantLinear"].values()
        )
        found.append((label, [(c.M, c.cublas_us / us) for c, us in times if us]))
    return [(label, points) for label, points in found if points]


def draw_speeds(run: Run) -> Figure:
    from matplotlib.ticker import NullFormatter

    sizes = weights(query.tabled(run))
    height = style.HEAD + len(sizes) * (PANEL + 0.62) + 0.42
    note = f"{query.main_format(query.tabled(run)).upper()}, float16 in and out"
    figure = style.new_figure(height, "What a caller gets, tensor in to tensor out", run, note)
    drawn = {size: speeds(run, *size) for size in sizes}
    values = [x for each in drawn.values() for _, points in each for _, x in points] + [1.0]
    low, high = min(values) / 1.15, max(values) * 1.15
    marks = {label: {"marker": mark, "markersize": 5} for label, mark in MARKS.items()}
    top = style.HEAD + 0.28
    for size, curves in drawn.items():
        axes = _axes(figure, top, size)
        ms = sorted({m for _, points in curves for m, _ in points})
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlim(ms[0] / 1.5, ms[-1] * 1.5)
        axes.set_ylim(low, high)
        axes.set_xticks(ms, [str(m) for m in ms])
        axes.xaxis.set_minor_formatter(NullFormatter())
        style.plain_log(axes.yaxis)
        ticks = [x for x in (0.25, 0.5, 1, 2, 4, 8) if low < x < high]
        axes.set_yticks(ticks, [f"{x:g}x" for x in ticks])
        torch = (query.BASELINES[query.CUBLAS], [(m, 1.0) for m in (ms[0], ms[-1])])
        _plot(axes, [torch, *curves], **marks)
        top += PANEL + 0.62
    axes.set_xlabel("M, tokens", fontsize=9.5)
    told = "Times as fast as cuBLAS float16. gemm.plan and llama.cpp: float32 in and out."
    style.foot(figure, told)
    return figure


def tell_speeds(run: Run) -> str:
    curves = (dict(speeds(run, *n_k)) for n_k in weights(query.tabled(run)))
    own = [x for each in curves for _, x in each.get("QuantLinear", ())]
    seen = f" QuantLinear is {ratio(min(own))} to {ratio(max(own))} as fast." if own else ""
    return f"Tensor in to tensor out, beside cuBLAS float16 in the same loop.{seen}"


# --- time at every number of tokens ---------------------------------------------------------------


def swept(run: Run) -> list[Weights]:
    """The (N, K) that were swept."""
    return weights(one for one in run.as_called if one.swept)


def times(run: Run, n: int, k: int) -> list[Curve]:
    """(name, [(tokens, us)]) at one size of weights; torch's are those beside the exact layer."""
    own = {label: query.sweep(run, accuracy, n, k) for label, accuracy in SWEPT.items()}
    found = [(label, [(one.M, one.us) for one in calls]) for label, calls in own.items()]
    beside = next((calls for calls in own.values() if calls), [])
    found.append((query.BASELINES[query.CUBLAS], [(one.M, one.cublas_us) for one in beside]))
    for name, label in query.LAYERS.items():
        layers = [(one.M, query.baseline_us(run, name, one.format, one.shape)) for one in beside]
        found.append((label, [(m, us) for m, us in layers if us is not None]))
    return [(label, points) for label, points in found if points]


def ranges_of_steps(calls: Sequence[AsCalled]) -> list[tuple[int, int, int]]:
    """(step, the first M it was chosen for, the last) from left to right."""
    groups = (list(own) for _, own in groupby(calls, key=lambda one: one.step))
    return [(own[0].step, own[0].M, own[-1].M) for own in groups]


def draw_times(run: Run) -> Figure:
    sizes = swept(run)
    own_height = PANEL + len(SWEPT) * BAR + 0.64
    height = style.HEAD + len(sizes) * own_height + 0.42
    found = [one for one in run.as_called if one.swept]
    commits = ", ".join(sorted({one.commit or "unknown" for one in found}))
    note = f"{query.main_format(found).upper()}, float16 in and out, commit {commits}"
    figure = style.new_figure(height, "Time of a call against its tokens", run, note)
    few = {label: {"marker": "o", "markersize": 3.5} for label in style.LAYER_COLORS}
    for i, size in enumerate(sizes):
        top = style.HEAD + 0.26 + i * own_height
        axes = _axes(figure, top, size)
        curves = times(run, *size)
        end = max(m for _, points in curves for m, _ in points)
        axes.set_xlim(0, end)
        axes.set_ylim(0, max(us for _, points in curves for _, us in points) * 1.06)
        axes.set_ylabel("us", fontsize=9.5, labelpad=2)
        ticks = [1, *range(16, end + 1, 16)]
        axes.set_xticks(ticks, [])
        _plot(axes, curves, **few)
        for row, (label, accuracy) in enumerate(SWEPT.items()):
            bar = style.box(figure, LEFT, top + PANEL + 0.05 + row * BAR, ACROSS, BAR)
            _bar(bar, ranges_of_steps(query.sweep(run, accuracy, *size)), COLORS[label], end)
        bar.set_xticks(ticks, [str(m) for m in ticks])
    bar.set_xlabel("M, tokens", fontsize=9.5)
    style.foot(figure, "GPU time, tensor in to tensor out. Bars: the step that was chosen.")
    return figure


def _bar(axes: Axes, found: Sequence[tuple[int, int, int]], color: str, end: int) -> None:
    """A bar for each range of M with one step, and its number where there is room."""
    axes.set_xlim(0, end)
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.set_xticks([])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    for step, first, last in found:
        axes.barh(0.5, last - first + 0.8, 0.72, first - 0.9, color=color, alpha=0.25)
        if last - first >= 4:
            axes.text((first + last) / 2, 0.47, str(step), ha="center", va="center", fontsize=8)


def tell_times(run: Run) -> str:
    seen = f"Nowhere does one token more take more than {query.CLIFF:g} times as long"
    for one, more in query.cliffs(run)[:1]:
        most = number(more.us / one.us)
        seen = f"One token more takes at most {most} times as long, from M={one.M} to {more.M}"
    return f"Every number of tokens, beside cuBLAS float16. {seen}."


AS_CALLED: Final = style.Chart("What a caller gets", query.tabled, draw_speeds, tell_speeds)
TOKENS: Final = style.Chart("Time of a call against its tokens", swept, draw_times, tell_times)
