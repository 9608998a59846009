"""Error: of the whole product first, then of the kernel alone.

The first panel is what a caller sees: the error against the product of the unquantized weights,
relative to the best exact step. So a step that requantizes the weights stands where it belongs. The
second is what the kernel adds to the product of its own operands.

Only the formats that every step takes are drawn. K-quants are read and never quantized here, so
they have no error of their own to compare with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from qformats import WEIGHT_FORMATS
from results.record.schema import Row, Run
from results.render.charts import style
from results.render.charts.ladder import short
from results.render.query import Rung, formats, ladder
from results.render.table import Column, Table, of_records, scientific, span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLE: Final = "Error: of the product, and of the kernel"
LINE: Final = 0.25
LEFT: Final = 2.32
ACROSS: Final = style.COLUMN - LEFT - 0.2


def rungs(run: Run) -> list[Rung]:
    """The steps whose error was measured, as the ladder has them, by number."""
    every = [rung for panel in ladder(run) for rung in panel.rungs]
    known = [rung for rung in every if any(row.nmse_float for row in rows_of(rung))]
    return sorted(known, key=lambda rung: rung.row.step)


def rows_of(rung: Rung) -> list[Row]:
    """Its rows in the formats that are drawn, in their order."""
    rows = [row for row in rung.every if row.format in WEIGHT_FORMATS]
    return sorted(rows, key=lambda row: WEIGHT_FORMATS.index(row.format))


def relative(run: Run, row: Row) -> float | None:
    """The error of a product over that of its format: over the least that an exact step made of
    the same problem."""
    same = [
        other.nmse_float
        for other in run.rows
        if (other.format, other.shape, other.accuracy) == (row.format, row.shape, "exact")
        and other.nmse_float
    ]
    return row.nmse_float / min(same) if row.nmse_float and same else None


def draw(run: Run) -> Figure:
    steps = rungs(run)
    names = formats(row for rung in steps for row in rows_of(rung))
    panel = LINE * len(steps)
    height = style.HEAD + 2 * (panel + 0.95) + 0.32
    figure = style.new_figure(height, TITLE, run, "NMSE")
    top = style.HEAD + 0.62
    for title, made, label in (
        (
            "The product, relative to an exact step (1 = the format's own error)",
            lambda row: relative(run, row),
            "NMSE / NMSE of the format, log scale",
        ),
        (
            "The kernel alone, against the float64 product of its operands",
            lambda row: row.nmse_same_operands,
            "NMSE, log scale",
        ),
    ):
        figure.text(0.02, 1 - (top - 0.14) / height, title, fontweight="bold", fontsize=10)
        axes = style.box(figure, LEFT, top, ACROSS, panel)
        _lines(axes, steps)
        values = []
        for y, rung in enumerate(steps):
            rows = rows_of(rung)
            for i, row in enumerate(rows):
                if value := made(row):
                    values.append(value)
                    looks: dict[str, Any] = {"markersize": 4.5, "markeredgewidth": 0}
                    at = y + (i - (len(rows) - 1) / 2) * 0.13
                    axes.plot([value], [at], **_look(row.format), **looks)
        axes.set_xscale("log")
        if values:
            pad = 1.15 if min(values) >= 1 else 3
            axes.set_xlim(min(values) / pad, max(values) * pad)
            if pad < 2:
                _few(axes, min(values), max(values))
        axes.set_xlabel(label, fontsize=9.5)
        top += panel + 0.95
    _key(figure, names, height)
    return figure


def tell(run: Run) -> tuple[str, Table]:
    steps = rungs(run)

    def products(rung: Rung) -> list[float]:
        return [x for row in rows_of(rung) if (x := relative(run, row))]

    kinds = {
        kind: [x for rung in steps if rung.row.accuracy == kind for x in products(rung)]
        for kind in dict.fromkeys(rung.row.accuracy for rung in steps)
    }
    seen = "; ".join(f"{kind} steps {span(values)}" for kind, values in kinds.items() if values)
    columns = (
        Column("", lambda rung: short(rung.row), words=True),
        Column("product, x its format's", lambda rung: span(products(rung))),
        Column(
            "kernel alone",
            lambda rung: span((row.nmse_same_operands for row in rung.every), scientific),
        ),
    )
    told = "NMSE of the product over that of its format, over these formats: "
    return f"{told}{seen}.", of_records(columns, steps, "NMSE")


def _look(name: str) -> dict[str, Any]:
    """How a format's points are drawn."""
    color = style.FORMAT_COLORS.get(name, style.PALE)
    return {"marker": style.FORMAT_MARKERS.get(name, "o"), "color": color, "linestyle": "none"}


def _lines(axes: Axes, steps: list[Rung]) -> None:
    colors = {True: style.INK, False: style.ORANGE}
    named = [(short(rung.row), colors[rung.row.accuracy == "exact"]) for rung in steps]
    style.row_names(axes, LEFT, ACROSS, named)
    for y in range(0, len(steps), 2):
        axes.axhspan(y - 0.5, y + 0.5, color="#f6f6f6", zorder=0)


def _few(axes: Axes, low: float, high: float) -> None:
    """Ticks for a range of a decade or two."""
    ticks = [tick for tick in (1, 1.5, 2, 3, 5, 10, 20, 50, 100) if low / 1.1 < tick < high * 1.2]
    style.plain_log(axes.xaxis)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])


def _key(figure: Figure, names: list[str], height: float) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=name.upper(), **_look(name)) for name in names]
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0.0, 1 - 0.56 / height)}
    spaces = {"handletextpad": 0.1, "columnspacing": 1.0}
    figure.legend(handles=handles, ncols=len(names) or 1, fontsize=9.5, **place, **spaces)


ERROR: Final = style.Chart(TITLE, rungs, draw, tell)
