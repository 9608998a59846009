"""How charts look: colours, sizes, axes, and labels that keep apart.

The colours are Okabe and Ito's, which keep apart under every colour blindness. A chart is
COLUMN wide: a phone shows it at three quarters of its size, where its text is still read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from results.record.schema import Run
from results.render.query import CUBLAS, LAYERS, LLAMA_CPP

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curve = tuple[str, Sequence[tuple[int, float]]]  # a line by its name: (M, a figure)


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart. data: empty where the run has nothing to draw. tell: what one sees at a glance, for
    a caption and for who cannot see."""

    title: str
    data: Callable[[Run], Sequence[Any]]
    draw: Callable[[Run], Figure]
    tell: Callable[[Run], str]


COLUMN: Final = 6.0  # inches
INK: Final = "#222222"
FAINT: Final = "#5f5f5f"
PALE: Final = "#8c8c8c"
BLUE: Final = "#0072B2"
ORANGE: Final = "#D55E00"
GREEN: Final = "#009E73"
PINK: Final = "#CC79A7"
YELLOW: Final = "#E69F00"
BASELINE_COLORS: Final = {CUBLAS: "#3d3d3d", LLAMA_CPP: "#7a3e9d"}
LAYER_COLORS: Final = dict(zip(LAYERS.values(), (PINK, YELLOW), strict=True))
BASELINE_DASHES: Final[dict[str, Any]] = {CUBLAS: (0, (5, 2)), LLAMA_CPP: (0, (1.5, 1.5))}

STYLE: Final[dict[Any, Any]] = {
    "svg.hashsalt": "quantized-gemm-ladder",
    "svg.fonttype": "none",
    "font.family": ["DejaVu Sans"],
    "font.size": 10.0,
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

HEAD: Final = 0.62  # inches that a title and the line below it take


def new_figure(height: float, title: str, run: Run, note: str) -> Figure:
    """A figure whose title says what it shows, its second line of what and on which GPU."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(COLUMN, height), layout=None)
    figure.text(0.02, 1 - 0.12 / height, title, fontsize=13, fontweight="bold", va="top")
    day = (run.env.utc or "")[:10]
    where = ", ".join(part for part in (note, run.env.where, day) if part)
    figure.text(0.02, 1 - 0.38 / height, where, fontsize=9.5, color=FAINT, va="top")
    return figure


def box(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Axes placed in inches, from the top left corner of the figure."""
    across, down = figure.get_size_inches()
    return figure.add_axes(
        (left / across, (down - top - height) / down, width / across, height / down)
    )


def beside(axes: Axes, x: float, y: float, text: str, va: str = "center", **looks: Any) -> None:
    """A text at x in widths of the axes and y in data."""
    axes.text(x, y, text, transform=axes.get_yaxis_transform(), va=va, **looks)


def foot(figure: Figure, text: str) -> None:
    """What has to be said below everything."""
    figure.text(0.02, 0.08 / figure.get_size_inches()[1], text, fontsize=9, color=FAINT)


def plain_log(axis: Any) -> None:
    """A log axis with 0.1, 1, 10, 1000 instead of powers."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}" if x < 1e4 else f"{x:.0e}"))
    axis.set_minor_formatter(NullFormatter())


def named_ends(axes: Any, ends: Sequence[tuple[tuple[float, float], str, Any]], gap: float) -> None:
    """Each line by its name right of the axes, and a thin line from there to its end. ends: (where
    it ends, in axes; name; colour); names are at least `gap` apart."""
    heights = spread([end[1] for end, _, _ in ends], gap)
    for (end, label, color), y in zip(ends, heights, strict=True):
        dashes = "-" if end[0] > 0.95 else (0, (1, 3))  # that of a line that ends early is no data
        axes.annotate(
            label,
            xy=end,
            xycoords="axes fraction",
            xytext=(1.045, y),
            textcoords="axes fraction",
            va="center",
            fontsize=9.5,
            color=color,
            arrowprops={
                "arrowstyle": "-",
                "color": color,
                "linewidth": 0.7,
                "linestyle": dashes,
                "relpos": (0, 0.5),
            },
            annotation_clip=False,
        )


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
