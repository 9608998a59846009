"""What a caller gets: times as fast as cuBLAS float16, against the number of tokens."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from results.record.schema import Run
from results.render.charts import style
from results.render.query import (
    BASELINES,
    CUBLAS,
    LAYERS,
    LLAMA_CPP,
    baseline_us,
    called,
    in_order,
    main_format,
    tabled,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LINES: Final = (
    ("QuantLinear", "exact", "float16", "QuantLinear", style.BLUE, "o"),
    ("QuantLinear", "fast", "float16", "QuantLinear, fast", style.ORANGE, "s"),
    ("gemm.plan", "exact", "float32", "gemm.plan, float32", style.GREEN, "^"),
)
"""(api, accuracy, dtype), how it is named and drawn."""
OTHERS: Final = {LLAMA_CPP: BASELINES[LLAMA_CPP], **LAYERS}
PANEL: Final = 1.75
LEFT, RIGHT = 0.62, 1.72


def curves(run: Run, n: int, k: int) -> list[tuple[str, list[tuple[int, float]]]]:
    """(name, [(tokens, times as fast as cuBLAS)]) at one size of weights."""
    calls = tabled(run)
    name = main_format(calls)
    ms = sorted({one.M for one in calls if (n, k) == (one.N, one.K)})
    found = []
    for api, accuracy, dtype, label, *_ in LINES:
        ours = [(m, called(run, api, accuracy, dtype, (m, n, k), name)) for m in ms]
        found.append((label, [(m, one.x_cublas) for m, one in ours if one]))
    for other, label in OTHERS.items():
        points = []
        for m in ms:
            one = called(run, "QuantLinear", "exact", "float16", (m, n, k), name)
            us = baseline_us(run, other, name, (m, n, k))
            if one and us:
                points.append((m, one.cublas_us / us))
        found.append((label, points))
    return [(label, points) for label, points in found if points]


def draw(run: Run) -> Figure:
    from matplotlib.ticker import NullFormatter

    sizes = in_order((1, one.N, one.K) for one in tabled(run))
    format_name = main_format(tabled(run)).upper()
    height = style.HEAD + len(sizes) * (PANEL + 0.62) + 0.42
    title, note = "What a caller gets, tensor in to tensor out", "float16 in and out"
    figure = style.new_figure(height, title, run, f"{format_name}, {note}")
    drawn = {(n, k): curves(run, n, k) for _, n, k in sizes}
    values = [x for each in drawn.values() for _, points in each for _, x in points] + [1.0]
    low, high = min(values) / 1.15, max(values) * 1.15
    looks: dict[str, Any] = {label: (color, mark) for *_, label, color, mark in LINES}
    looks |= {label: (color, "") for label, color in style.LAYER_COLORS.items()}
    scale = math.log(high / low)
    top = style.HEAD + 0.28
    for _, n, k in sizes:
        axes = style.box(figure, LEFT, top, style.COLUMN - LEFT - RIGHT, PANEL)
        axes.set_title(f"N x K: {n} x {k}", fontsize=10, fontweight="bold", loc="left")
        ends = [(math.log(1 / low) / scale, BASELINES[CUBLAS], style.BASELINE_COLORS[CUBLAS])]
        axes.axhline(1, color=style.BASELINE_COLORS[CUBLAS], dashes=(5, 2), linewidth=1.5)
        for label, points in drawn[n, k]:
            color, mark = looks.get(label, (style.BASELINE_COLORS[LLAMA_CPP], ""))
            dashes = {} if mark else {"linestyle": style.BASELINE_DASHES[LLAMA_CPP]}
            axes.plot(*zip(*points, strict=True), marker=mark, color=color, markersize=5, **dashes)
            ends.append((math.log(points[-1][1] / low) / scale, label, color))
        ms = sorted({m for _, points in drawn[n, k] for m, _ in points})
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_ylim(low, high)
        axes.set_xticks(ms, [str(m) for m in ms])
        axes.xaxis.set_minor_formatter(NullFormatter())
        style.plain_log(axes.yaxis)
        ticks = [x for x in (0.25, 0.5, 1, 2, 4, 8) if low < x < high]
        axes.set_yticks(ticks, [f"{x:g}x" for x in ticks])
        style.named_ends(axes, ends, 0.17 / PANEL)
        top += PANEL + 0.62
    axes.set_xlabel("M, tokens", fontsize=9.5)
    told = "Times as fast as cuBLAS float16. gemm.plan and llama.cpp: float32 in and out."
    style.foot(figure, told)
    return figure
