"""Charts: pure functions of one run's JSON. What is not in the file is not in the picture.

    python -m results.render.charts [run.json] --out results/charts [--png]

    ladder-m512-n4096-k4096.svg ...   speed over step 1, per step and format; one for each shape
    tflops.svg                        TFLOPS per format at the main shape
    roofline.svg                      every step under the limits measured on this GPU
    error.svg                         the format's error and the kernel's error, apart
    time.svg                          time from float32 to float32 against M, a panel per format
    time-q4_0-n4096-k4096.svg ...     the same of one format, large; one for each (N, K)

The same file gives the same bytes with the same matplotlib: ids are salted with a constant, and no
date or version is written. Text stays text, so a chart can be searched and diffed. The colours are
Okabe and Ito's, which keep apart under every colour blindness, and lines and families differ in
shape as well; the background is white, so a chart reads the same on a dark page.
"""

from __future__ import annotations

import argparse
import io
import math
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from results.baselines.peers import KIND, LABELS
from results.record import ROOT
from results.record.schema import Peer, Row, Run
from results.record.store import headline, read

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS: Final = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0")
COLORS: Final = dict(
    zip(FORMATS, ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00"), strict=True)
)
INK: Final = "#222222"
PALE: Final = "#8c8c8c"
PEER_GREY: Final = "#6b6b6b"
PEER_COLORS: Final = {"ggml": "#7a3e9d", "cublas_fp16": "#444444"}
MAIN_SHAPE: Final = (512, 4096, 4096)
MAIN_FORMAT: Final = "q4_0"

UNIT_LABELS: Final = {
    "fp32": "fp32 FMA",
    "int32": "int32 multiply-add",
    "packed_int32": "int32, two products packed",
    "dp4a": "dp4a",
    "tensor_int8": "int8 tensor cores",
    "tensor_fp16": "fp16 tensor cores",
}

ROOFS: Final = ("fp32", "tensor_fp16", "tensor_int8")
"""The three limits that the families of steps end at; the others are drawn paler."""

STYLE: Final[dict[Any, Any]] = {
    "svg.hashsalt": "quantized-gemm-ladder",
    "svg.fonttype": "none",
    "font.family": ["DejaVu Sans"],
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": PALE,
    "axes.labelcolor": INK,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.which": "major",
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.minor.size": 0.0,
    "ytick.minor.size": 0.0,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "legend.frameon": False,
}

Rung = tuple[int, str]  # (step number, family): one rung of the ladder
Shape = tuple[int, int, int]


# ---------------------------------------------------------------------------- what the run holds


def timed(run: Run, output: str = "float32") -> list[Row]:
    """The rows that have a figure: checked, timed, possible; of one dtype of C, as times of two
    are not compared."""
    good = (row for row in run.rows if row.status == "ok" and row.kernel_us is not None)
    return [row for row in good if row.output == output]


def rungs(rows: Iterable[Row]) -> list[Rung]:
    return sorted({(row.step, row.family) for row in rows})


def rung_label(rung: Rung, rows: Sequence[Row], separator: str = " ") -> str:
    """ "3 shared tiled A8", from the step's number and module name and the family; a step that is
    not exact says so."""
    step, family = rung
    name, accuracy = next((row.name, row.accuracy) for row in rows if row.step == step)
    words = [word for word in name.split("_") if word not in ("w4a16", "w4a8")]
    if words[0].startswith("step"):
        words = words[1:]
    return separator.join([str(step), *words, family, *([accuracy] if accuracy != "exact" else [])])


def shapes(rows: Iterable[Row]) -> list[Shape]:
    return sorted({row.shape for row in rows}, key=lambda s: (s[1] * s[2], s[1], s[0]))


def formats(rows: Iterable[Row]) -> list[str]:
    have = {row.format for row in rows}
    return [f for f in FORMATS if f in have] + sorted(have - set(FORMATS))


def main_shape(rows: Sequence[Row]) -> Shape | None:
    """MAIN_SHAPE if it was measured, else the shape with the most rows (of these the largest)."""
    found = {shape: sum(row.shape == shape for row in rows) for shape in shapes(rows)}
    if MAIN_SHAPE in found:
        return MAIN_SHAPE
    return max(found, key=lambda shape: (found[shape], shape), default=None)


def peer_at(run: Run, peer: str, format_name: str, shape: Shape) -> Peer | None:
    """A peer's figure for the same work, of the same run where there is one.

    cuBLAS fp16 stands beside every format.
    """
    wanted = "f16" if peer == "cublas_fp16" else format_name
    same = [p for p in run.peers if (p.peer, p.format, p.shape) == (peer, wanted, shape)]
    return max(same, key=lambda p: p.same_run, default=None)


def peer_us(run: Run, peer: str, format_name: str, shape: Shape) -> float | None:
    """Its time in microseconds."""
    found = peer_at(run, peer, format_name, shape)
    return None if found is None else found.us


def peers_of(run: Run) -> list[str]:
    return [peer for peer in LABELS if any(p.peer == peer for p in run.peers)]


def peer_label(peer: str) -> str:
    return f"{LABELS[peer]} ({KIND[peer]})"


def number(x: float) -> str:
    """Three significant digits, no exponent, alike for neighbours: 0.042, 0.90, 1.20, 12.0, 188."""
    if x < 0.1:
        return f"{x:.2g}"
    return f"{x:.0f}" if x >= 99.95 else f"{x:.1f}" if x >= 9.995 else f"{x:.2f}"


def duration(us: float) -> str:
    """ "10 us", "1 ms", "2.5 s"."""
    for limit, unit in ((1e3, "us"), (1e6, "ms")):
        if us < limit:
            return f"{us / limit * 1e3:g} {unit}"
    return f"{us / 1e6:g} s"


def dims(shape: Shape) -> str:
    return f"M={shape[0]}, N={shape[1]}, K={shape[2]}"


# --------------------------------------------------------------------------------- drawing helpers


def new_figure(width: float, height: float, title: str, run: Run, source: str) -> Figure:
    """A figure whose title says what, its second line on which GPU and from which file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout=None)
    figure.text(0.02, 1 - 0.14 / height, title, fontsize=12, fontweight="bold", va="top")
    where = f"{run.env.where}   |   {source}"
    figure.text(0.02, 1 - 0.40 / height, where, fontsize=8.5, color="#555555", va="top")
    return figure


def plain_log(axis: Any) -> None:
    """Log axis with 0.1, 1, 10, 1000 instead of powers."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}" if x < 1e4 else f"{x:.0e}"))
    axis.set_minor_formatter(NullFormatter())


def spread(values: Sequence[float], gap: float) -> list[float]:
    """Positions as near to `values` as may be, at least `gap` apart, in the same order.

    For labels beside line ends. Groups that collide are merged and laid out around their mean.
    """
    order = sorted(range(len(values)), key=lambda i: values[i])
    groups: list[tuple[float, list[int]]] = []  # (centre, members)
    for i in order:
        groups.append((values[i], [i]))
        while len(groups) > 1:
            (low, a), (high, b) = groups[-2], groups[-1]
            if high - low >= gap * (len(a) + len(b)) / 2:
                break
            centre = (low * len(a) + high * len(b)) / (len(a) + len(b))
            groups[-2:] = [(centre, a + b)]
    out = [0.0] * len(values)
    for centre, members in groups:
        for position, i in enumerate(members):
            out[i] = centre + (position - (len(members) - 1) / 2) * gap
    return out


def step_color(rung: Rung, all_rungs: Sequence[Rung]) -> Any:
    """From pale to dark up the ladder, in viridis, which keeps its order in grey."""
    from matplotlib import colormaps

    steps = sorted({step for step, _ in all_rungs})
    at = steps.index(rung[0]) / max(len(steps) - 1, 1)
    return colormaps["viridis"](0.85 - 0.85 * at)


# ------------------------------------------------------------------------------------- the charts


def ladder_chart(run: Run, source: str, shape: Shape) -> Figure:
    """Speed over step 1 at one shape: a group of bars per rung, a bar per format, log scale."""
    from matplotlib.ticker import LogLocator

    rows = [row for row in timed(run) if row.shape == shape]
    names, ladder = formats(rows), rungs(rows)
    base = {row.format: row.kernel_us for row in rows if row.step == 1 and row.kernel_us}
    figure = new_figure(
        max(7.5, 2.6 + 0.84 * len(ladder)), 4.9, f"Speed over step 1 at {dims(shape)}", run, source
    )
    across = figure.get_size_inches()[0]
    axes = figure.add_axes((0.75 / across, 0.2, 1 - 2.1 / across, 0.62))
    width = 0.8 / max(len(names), 1)
    top, low = 1.0, 1.0
    for x, rung in enumerate(ladder):
        values = []
        for i, name in enumerate(names):
            row = next((r for r in rows if (r.step, r.family) == rung and r.format == name), None)
            if row is None or not row.kernel_us or name not in base:
                continue
            ratio = base[name] / row.kernel_us
            values.append(ratio)
            axes.bar(
                x + (i - (len(names) - 1) / 2) * width,
                ratio - 1,
                width * 0.92,
                bottom=1,
                color=COLORS.get(name, PALE),
            )
        if not values:
            axes.text(x, 1.04, "-", ha="center", va="bottom", color=PALE)
            continue
        top, low = max(top, *values), min(low, *values)
        text = number(min(values))
        if number(max(values)) != text:
            text = f"{text}-{number(max(values))}"
        axes.text(
            x,
            max(1.0, *values) * 1.06,
            f"{text}x",
            ha="center",
            va="bottom",
            fontsize=8.5,
            zorder=5,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85},
        )
    marks = []
    for peer in peers_of(run):
        ratios = [
            us0 / us
            for name, us0 in base.items()
            if (us := peer_us(run, peer, name, shape)) is not None
        ]
        if ratios:
            marks.append((peer, min(ratios), max(ratios)))
            top, low = max(top, max(ratios)), min(low, min(ratios))
    axes.set_yscale("log")
    axes.set_ylim(low / 1.25, top * 1.6)
    if top / low < 100:
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    plain_log(axes.yaxis)
    bottom, ceiling = axes.get_ylim()
    scale = math.log(ceiling / bottom)
    centres = [math.log((a * b) ** 0.5 / bottom) / scale for _, a, b in marks]
    for (peer, least, most), y in zip(marks, spread(centres, 0.17), strict=True):
        color = PEER_COLORS.get(peer, PALE)
        axes.axhspan(least, most, color=color, alpha=0.16, linewidth=0, zorder=0.5)
        for value in {least, most}:
            axes.axhline(value, color=color, linewidth=1.0, linestyle=(0, (5, 2)))
        span = number(least) if number(least) == number(most) else f"{number(least)}-{number(most)}"
        axes.text(
            1.015,
            y,
            f"{LABELS[peer]}\n{span}x\n({KIND[peer]})",
            transform=axes.transAxes,
            color=color,
            va="center",
            fontsize=8.5,
        )
    axes.axhline(1, color=INK, linewidth=1.0)
    axes.set_xticks(range(len(ladder)), [rung_label(r, rows, "\n") for r in ladder])
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")
    axes.set_ylabel("kernel time of step 1 / kernel time")
    axes.set_xlim(-0.6, len(ladder) - 0.4)
    key(figure, names)
    return figure


def key(figure: Figure, names: Sequence[str]) -> None:
    """The formats' colours, top right under the title."""
    from matplotlib.patches import Patch

    handles = [Patch(color=COLORS.get(name, PALE), label=name) for name in names]
    height = figure.get_size_inches()[1]
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.075, 1 - 0.55 / height),
        ncols=len(names) or 1,
        fontsize=8.5,
        handlelength=1.1,
        columnspacing=1.2,
    )


def tflops_chart(run: Run, source: str) -> Figure:
    """TFLOPS of the kernels at the main shape: a panel per format, a bar per rung."""
    rows = [row for row in timed(run) if row.shape == main_shape(timed(run))]
    shape = rows[0].shape
    names, ladder = formats(rows), rungs(rows)
    height = 2.2 + 0.34 * (len(ladder) + len(peers_of(run)))
    figure = new_figure(11, height, f"TFLOPS per format at {dims(shape)}", run, source)
    peers = peers_of(run)
    values = [row.tflops or 0.0 for row in rows]
    values += [p.tflops for p in run.peers if p.shape == shape and p.format in (*names, "f16")]
    lo, hi = min(v for v in values if v > 0) / 2, max(values) * 7
    left, right = 0.175, 0.99
    for i, name in enumerate(names):
        width = (right - left) / len(names)
        axes = figure.add_axes(
            (left + i * width, 0.62 / height, width * 0.93, (height - 1.45) / height)
        )
        labels, y = [], 0
        for rung in ladder:
            row = next((r for r in rows if (r.step, r.family) == rung and r.format == name), None)
            labels.append(rung_label(rung, rows))
            _bar(axes, y, row.tflops if row else None, lo, step_color(rung, ladder))
            y += 1
        for peer in peers:
            us = peer_us(run, peer, name, shape)
            labels.append(peer_label(peer))
            tflops = None if us is None else 2 * shape[0] * shape[1] * shape[2] / us * 1e-6
            _bar(axes, y, tflops, lo, "white", edge=PEER_COLORS[peer])
            y += 1
        axes.set_xscale("log")
        axes.set_xlim(lo, hi)
        plain_log(axes.xaxis)
        axes.set_ylim(y - 0.4, -0.6)
        axes.set_yticks(range(y), labels if i == 0 else [""] * y)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.set_title(name, fontsize=10, fontweight="bold", loc="left")
    figure.text(
        (left + right) / 2,
        0.16 / height,
        "TFLOPS = 2 M N K / time, log scale; steps and cuBLAS: the kernel alone",
        ha="center",
    )
    return figure


def _bar(
    axes: Axes, y: float, value: float | None, left: float, color: Any, edge: Any = None
) -> None:
    if value is None:
        axes.text(left * 1.15, y, "-", va="center", color=PALE)
        return
    axes.barh(y, value - left, 0.68, left=left, color=color, edgecolor=edge, linewidth=1.2)
    axes.text(value * 1.1, y, number(value), va="center", fontsize=8.5)


def roofline_chart(run: Run, source: str) -> Figure:
    """Every rung at every M under the limits measured on this GPU, for one format and (N, K)."""
    every = timed(run)
    shape = main_shape(every)
    have = formats(every)
    name = MAIN_FORMAT if MAIN_FORMAT in have else have[0]
    rows = [
        r
        for r in every
        if r.format == name and shape is not None and r.shape[1:] == shape[1:] and r.gbps
    ]
    ms = sorted({row.M for row in rows})
    figure = new_figure(
        12.5,
        6.2,
        f"Roofline: every step, {name}, N={shape[1] if shape else 0}, K={shape[2] if shape else 0}",
        run,
        source,
    )
    axes = figure.add_axes((0.06, 0.1, 0.525, 0.76))
    points = [(row, row.tflops * 1e3 / row.gbps) for row in rows if row.tflops and row.gbps]
    limits = run.env.limits
    bandwidth = limits.copy_tbps or run.env.copy_tbps
    roofs = sorted(limits.tops.items(), key=lambda item: item[1])
    xs = [x for _, x in points] or [1.0]
    ys = [row.tflops or 1.0 for row, _ in points] or [1.0]
    x0, x1 = min(xs) / 2.2, max(xs) * 2.6
    y0, y1 = min(ys) / 2.5, max([*ys, *(top for _, top in roofs)]) * 1.8
    if bandwidth:
        end = min(x1, y1 / bandwidth)
        axes.plot([x0, end], [x0 * bandwidth, end * bandwidth], color=INK, linewidth=1.6)
    scale = math.log(y1 / y0)
    heights = spread([math.log(top / y0) / scale for _, top in roofs], 0.05)
    for (unit, top), y in zip(roofs, heights, strict=True):
        start = max(x0, top / bandwidth) if bandwidth else x0
        main = unit in ROOFS
        axes.plot(
            [start, x1],
            [top, top],
            color=INK if main else PALE,
            linewidth=1.6 if main else 0.9,
            linestyle="-" if main else (0, (4, 3)),
        )
        axes.annotate(
            f"{number(top)}  {UNIT_LABELS.get(unit, unit)}",
            xy=(x1, top),
            xytext=(1.02, y),
            textcoords=axes.transAxes,
            va="center",
            fontsize=8.5,
            fontweight="bold" if main else "normal",
            color=INK if main else "#777777",
            arrowprops={"arrowstyle": "-", "color": "#cccccc", "linewidth": 0.8},
            annotation_clip=False,
        )
    ladder = rungs(rows)
    width = math.log(x1 / x0)
    apart: dict[tuple[int, str], list[tuple[Row, float]]] = {}  # numbers that may lie on another
    for row, x in points:
        apart.setdefault((row.M, row.family), []).append((row, x))
    for (_, family), column in apart.items():
        square = family == "A16"
        tops = [math.log((row.tflops or 1.0) / y0) / scale for row, _ in column]
        for (row, x), y in zip(column, spread(tops, 0.033), strict=True):
            assert row.tflops is not None
            color = step_color((row.step, family), ladder)
            axes.annotate(  # a little to the side, so that the two families of a step stay apart
                str(row.step),
                (x, row.tflops),
                xytext=(math.log(x / x0) / width + (-0.021 if square else 0.021), y),
                textcoords=axes.transAxes,
                ha="center",
                va="center_baseline",
                fontsize=7.5,
                fontweight="bold",
                color="white" if sum(color[:3]) < 1.5 else INK,
                bbox={
                    "boxstyle": "square,pad=0.25" if square else "circle,pad=0.2",
                    "facecolor": color,
                    "edgecolor": "white",
                    "linewidth": 0.6,
                },
                arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.8},
                annotation_clip=False,
            )
            axes.plot([x], [row.tflops], marker="o", markersize=3, color=color, zorder=4)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(x0, x1)
    axes.set_ylim(y0, y1)
    plain_log(axes.xaxis)
    plain_log(axes.yaxis)
    if bandwidth:  # its name along it, once the axes have their size
        p, q = axes.transData.transform([(x0, x0 * bandwidth), (x0 * 10, x0 * 10 * bandwidth)])
        angle = math.degrees(math.atan2(q[1] - p[1], q[0] - p[0]))
        axes.text(
            x0 * 1.5,
            x0 * 1.5 * bandwidth * 1.25,
            f"copy {bandwidth:.2f} TB/s",
            rotation=angle,
            rotation_mode="anchor",
            fontsize=8.5,
        )
    columns = [[math.log(x / x0) / width for row, x in points if m == row.M] for m in ms]
    middles = spread([sum(column) / len(column) for column in columns], 0.09)
    for m, middle in zip(ms, middles, strict=True):
        axes.text(
            middle,
            0.015,
            f"M={m}",
            transform=axes.transAxes,
            ha="center",
            va="bottom",
            color="#555555",
        )
    axes.set_xlabel("operations per byte of weights, activations and output (2 M N K / bytes)")
    axes.set_ylabel("TFLOPS (of integers: TOPS)")
    rung_key(figure, ladder, rows, 0.775, 0.87)
    figure.text(
        0.785,
        0.1,
        "square: activations in float32 or float16 (A16)\n"
        "circle: activations in int8 (A8)\n"
        "dot: what was measured, its number beside it",
        fontsize=8,
        color="#555555",
    )
    return figure


def error_chart(run: Run, source: str) -> Figure:
    """NMSE against the unquantized product (the format's) and the same operands (the kernel's)."""
    from matplotlib.ticker import NullFormatter

    rows = [row for row in run.rows if row.nmse_float is not None and row.output == "float32"]
    shape = main_shape(rows)
    rows = [row for row in rows if row.shape == shape]
    names, ladder = formats(rows), rungs(rows)
    figure = new_figure(
        11.4, 4.9, f"Error at {dims(shape) if shape else '-'}: whose is it?", run, source
    )
    panels = (
        ("nmse_float", "the format's: against the unquantized product", (0.07, 0.1, 0.315, 0.68)),
        (
            "nmse_same_operands",
            "the kernel's: against the same operands",
            (0.445, 0.1, 0.315, 0.68),
        ),
    )
    for attribute, title, box in panels:
        axes = figure.add_axes(box)
        values = [v for row in rows if (v := getattr(row, attribute))]
        for i, name in enumerate(names):
            for j, rung in enumerate(ladder):
                row = next(
                    (r for r in rows if (r.step, r.family) == rung and r.format == name), None
                )
                value = getattr(row, attribute) if row else None
                if not value:
                    continue
                square = rung[1] == "A16"
                axes.plot(
                    [i + (j - (len(ladder) - 1) / 2) * 0.8 / len(ladder)],
                    [value],
                    marker="s" if square else "o",
                    markersize=5.5 if square else 6,
                    color=step_color(rung, ladder),
                    linestyle="none",
                )
        axes.set_yscale("log")
        if values:
            axes.set_ylim(min(values) / 6, max(values) * 6)
            axes.yaxis.set_minor_formatter(NullFormatter())
        else:
            axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=PALE)
        axes.set_xlim(-0.5, len(names) - 0.5)
        axes.set_xticks(range(len(names)), names)
        axes.tick_params(axis="x", length=0)
        axes.grid(visible=False, axis="x")
        axes.set_title(title, fontsize=10, loc="left", pad=8)
        if attribute == "nmse_float":
            axes.set_ylabel("NMSE, log scale")
    rung_key(figure, ladder, rows, 0.775, 0.78)
    return figure


def rung_key(
    figure: Figure, ladder: Sequence[Rung], rows: Sequence[Row], x: float, y: float
) -> None:
    """Markers and names of the rungs, top of the ladder first."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D(
            [],
            [],
            marker="s" if rung[1] == "A16" else "o",
            color=step_color(rung, ladder),
            linestyle="none",
            label=rung_label(rung, rows),
        )
        for rung in ladder[::-1]
    ]
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(x, y), fontsize=8.5, handletextpad=0.3
    )


def time_chart(run: Run, source: str) -> Figure:
    """Time from float32 A to float32 C against M: a panel per format, a line per rung."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    every = timed(run)
    shape = main_shape(every)
    assert shape is not None
    rows = [row for row in every if row.shape[1:] == shape[1:]]
    names, ladder = formats(rows), rungs(rows)
    columns = 3
    lines = math.ceil((len(names) + 1) / columns)
    panel = max(2.2, 0.185 * (len(ladder) + len(peers_of(run))))  # a line for every label
    pitch = panel + 0.7
    height = 0.9 + pitch * lines
    figure = new_figure(
        12, height, f"Time against M at N={shape[1]}, K={shape[2]}: float32 to float32", run, source
    )
    ms = sorted({row.M for row in rows})
    times = [t for row in rows if (t := row.total_us or row.kernel_us)]
    times += [p.us for p in run.peers if p.shape[1:] == shape[1:] and p.M in ms]
    lo, hi = min(times) / 1.6, max(times) * 1.6
    for i, name in enumerate(names):
        column, line = i % columns, i // columns
        axes = figure.add_axes(
            (
                0.06 + column * 0.32,
                (height - 0.95 - pitch * line - panel) / height,
                0.225,
                panel / height,
            )
        )
        ends: list[tuple[float, str, Any]] = []
        for rung in ladder:
            curve = sorted(
                (row.M, row.total_us or row.kernel_us)
                for row in rows
                if (row.step, row.family) == rung and row.format == name
            )
            if not curve:
                continue
            x, y = zip(*curve, strict=True)
            color = step_color(rung, ladder)
            axes.plot(
                x,
                y,
                color=color,
                linewidth=1.5,
                marker="s" if rung[1] == "A16" else "o",
                markersize=3.5,
            )
            ends.append((y[-1], f"{rung[0]} {rung[1]}", color))
        for peer in peers_of(run):
            curve = [(m, us) for m in ms if (us := peer_us(run, peer, name, (m, *shape[1:])))]
            if curve:
                x, y = zip(*curve, strict=True)
                axes.plot(x, y, color=PEER_COLORS[peer], linewidth=1.3, linestyle=(0, (5, 2)))
                ends.append((y[-1], LABELS[peer].split()[0], PEER_COLORS[peer]))
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(min(ms) / 1.5, max(ms) * 1.5)
        axes.set_ylim(lo, hi)
        axes.set_xticks(ms, [str(m) for m in ms])
        axes.xaxis.set_minor_formatter(NullFormatter())
        plain_log(axes.yaxis)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda us, _: duration(us)))
        axes.set_title(name, fontsize=10, fontweight="bold", loc="left")
        scale = math.log(hi / lo)
        heights = spread([math.log(end / lo) / scale for end, _, _ in ends], 0.15 / panel)
        for (_, text, color), y_label in zip(ends, heights, strict=True):
            axes.text(
                1.02, y_label, text, transform=axes.transAxes, va="center", color=color, fontsize=8
            )
        if i >= len(names) - columns:
            axes.set_xlabel("M, tokens")
    i = len(names)
    rung_key(
        figure,
        ladder,
        rows,
        0.05 + (i % columns) * 0.32,
        (height - 0.95 - pitch * (i // columns) + 0.1) / height,
    )
    if "cublas_fp16" in peers_of(run):
        figure.text(
            0.06 + (i % columns) * 0.32,
            0.12 / height,
            "Steps and llama.cpp: activation pass included.\n"
            "cuBLAS fp16: kernel only, operands already float16.",
            fontsize=8.5,
            color="#555555",
        )
    return figure


def steps_chart(run: Run, source: str, n: int, k: int) -> Figure:
    """Total time against M in one format: a line per rung, peers grey, each named at its end."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    rows = [row for row in timed(run) if row.shape[1:] == (n, k)]
    have = formats(rows)
    name = MAIN_FORMAT if MAIN_FORMAT in have else have[0]
    rows = [row for row in rows if row.format == name]
    ladder, ms = rungs(rows), sorted({row.M for row in rows})
    lines: list[tuple[str, Any, dict[str, Any], list[tuple[int, float]]]] = []
    for rung in ladder:
        points = sorted(
            (row.M, row.total_us or row.kernel_us or 0.0)
            for row in rows
            if (row.step, row.family) == rung
        )
        marker = {"marker": "s" if rung[1] == "A16" else "o", "markersize": 4.5, "linewidth": 1.8}
        lines.append((rung_label(rung, rows), step_color(rung, ladder), marker, points))
    for peer, dashes in zip(peers_of(run), ((0, (6, 2)), (0, (2, 2))), strict=False):
        points = [(m, us) for m in ms if (us := peer_us(run, peer, name, (m, n, k)))]
        if points:
            dashed = {"linestyle": dashes, "linewidth": 2.2, "zorder": 3}
            lines.append((LABELS[peer], PEER_GREY, dashed, points))
    figure = new_figure(
        9.5,
        6.6,
        f"Time against M, all steps: {name}, N={n}, K={k}, float32 to float32",
        run,
        source,
    )
    axes = figure.add_axes((0.085, 0.125, 0.655, 0.755))
    for _, color, how, points in lines:
        axes.plot(*zip(*points, strict=True), color=color, **how)
    times = [us for *_, points in lines for _, us in points]
    lo, hi = min(times) / 1.4, max(times) * 1.4
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(min(ms) / 1.35, max(ms) * 1.35)
    axes.set_ylim(lo, hi)
    axes.set_xticks(ms, [str(m) for m in ms])
    axes.xaxis.set_minor_formatter(NullFormatter())
    plain_log(axes.yaxis)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda us, _: duration(us)))
    scale = math.log(hi / lo)
    heights = spread([math.log(points[-1][1] / lo) / scale for *_, points in lines], 0.042)
    for (label, color, _, points), y in zip(lines, heights, strict=True):
        axes.annotate(
            label,
            xy=points[-1],
            xytext=(1.045, y),
            textcoords=axes.transAxes,
            va="center",
            fontsize=9,
            color=color,
            fontweight="bold" if color == PEER_GREY else "normal",
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.7, "relpos": (0, 0.5)},
            annotation_clip=False,
        )
    axes.set_xlabel("M, tokens")
    figure.text(
        0.02,
        0.02,
        "Activation pass included. Squares: A16. Dashed: llama.cpp, the same work; cuBLAS, the "
        "kernel alone on float16 operands.",
        fontsize=8.5,
        color="#555555",
    )
    return figure


# ------------------------------------------------------------------------------------------- files


def plans(run: Run) -> dict[str, Callable[[str], Figure]]:
    """Every chart that the run has data for: file name without its ending -> (source -> figure)."""
    rows = timed(run)
    made: dict[str, Callable[[str], Figure]] = {}
    for shape in shapes(rows):
        if any(row.step == 1 for row in rows if row.shape == shape):
            name = "ladder-m{}-n{}-k{}".format(*shape)
            made[name] = partial(_ladder_at, run, shape)
    if rows:
        made["tflops"] = lambda source: tflops_chart(run, source)
        made["roofline"] = lambda source: roofline_chart(run, source)
        made["time"] = lambda source: time_chart(run, source)
        for n, k in dict.fromkeys(shape[1:] for shape in shapes(rows)):
            have = formats(row for row in rows if row.shape[1:] == (n, k))
            name = MAIN_FORMAT if MAIN_FORMAT in have else have[0]
            made[f"time-{name}-n{n}-k{k}"] = partial(_steps_at, run, n, k)
    if any(row.nmse_float is not None for row in run.rows):
        made["error"] = lambda source: error_chart(run, source)
    return made


def _ladder_at(run: Run, shape: Shape, source: str) -> Figure:
    return ladder_chart(run, source, shape)


def _steps_at(run: Run, n: int, k: int, source: str) -> Figure:
    return steps_chart(run, source, n, k)


def render(
    run: Run, source: str, kind: str = "svg", only: Collection[str] | None = None
) -> dict[str, bytes]:
    """The charts as files: {"tflops.svg": bytes, ...}, or those of the names in `only`. `source` is
    the run's name in the titles."""
    import matplotlib

    files = {}
    with matplotlib.rc_context(STYLE):
        for name, figure in plans(run).items():
            if only is not None and name not in only:
                continue
            buffer = io.BytesIO()
            metadata = {"Date": None, "Creator": None} if kind == "svg" else None
            figure(source).savefig(buffer, format=kind, metadata=metadata, dpi=110)
            data = buffer.getvalue()
            if kind == "svg":  # without matplotlib's font a browser would take its serif default
                data = data.replace(b"'DejaVu Sans'", b"'DejaVu Sans', Arial, sans-serif")
            files[f"{name}.{kind}"] = data
    return files


def drifts(folder: Path = ROOT / "results" / "charts", run: Path | None = None) -> list[str]:
    """One sentence for each committed chart that is missing, left over, or of another run.

    The pictures themselves are not compared: other versions of matplotlib draw other bytes.
    """
    run = run or headline()
    if run is None:
        return []
    wanted, found = plans(read(run)), {path.stem: path for path in folder.glob("*.svg")}
    source, cure = source_name(run), "run `make charts`"
    out = [f"{folder.name}/{name}.svg is missing: {cure}" for name in wanted if name not in found]
    for name, path in sorted(found.items()):
        if name not in wanted:
            out.append(f"{folder.name}/{path.name} has no data in {source}: remove it")
        elif source not in path.read_text(encoding="utf-8"):
            out.append(f"{folder.name}/{path.name} does not show {source}: {cure}")
    return out


def source_name(path: Path) -> str:
    """ "nvidia-h200/2026-01-02-0123abcd.json"."""
    return f"{path.resolve().parent.name}/{path.name}"


def parser_of(name: str, doc: str | None) -> argparse.ArgumentParser:
    """The command line of a module here that shows a run, which it may be given."""
    parser = argparse.ArgumentParser(prog=f"python -m results.{name}", description=doc)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run", nargs="?", type=Path, help="a run's JSON (default: the largest)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("charts", __doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "charts")
    parser.add_argument("--png", action="store_true", help="PNG files too, for looking at")
    options = parser.parse_args(arguments)
    path = options.run or headline()
    if path is None:
        print("no run to draw: measure one first with `make ladder` on a GPU", file=sys.stderr)
        return 1
    run = read(path)
    options.out.mkdir(parents=True, exist_ok=True)
    for kind in ("svg", "png") if options.png else ("svg",):
        for name, data in render(run, source_name(path), kind).items():
            (options.out / name).write_bytes(data)
            print(options.out / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
