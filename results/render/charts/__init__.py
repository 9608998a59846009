"""Charts: pure functions of one run. What is not in the run is not in a picture.

    python -m results charts [--run run.json] [--out results/charts]

    ladder.svg      each step at its home shape, a panel per branch, cuBLAS and llama.cpp as lines
    as_called.svg   what a caller gets, times as fast as cuBLAS float16, against tokens
    tokens.svg      its time at every number of tokens, and the step that was chosen
    roofline.svg    the last step of each branch under the limits measured on this GPU

`calls.py` draws as_called.svg and tokens.svg, the file of its name each other one; `style.py` has
colours and axes. A chart also tells in words what it shows (`Chart.tell`).

The same run gives the same bytes with the same matplotlib: ids are salted with a constant, and no
date of drawing is written. Text stays text, so a chart can be searched and diffed. The background
is white, so a chart reads the same on a dark page. Each file names the run it was drawn from by a
digest, by which `drifts` finds charts of another run.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Collection
from pathlib import Path
from typing import Final

from results.record import ROOT
from results.record.codec import to_json
from results.record.schema import Run
from results.render.charts.calls import AS_CALLED, TOKENS
from results.render.charts.ladder import LADDER
from results.render.charts.roofline import ROOFLINE
from results.render.charts.style import STYLE, Chart

FOLDER: Final = ROOT / "results" / "charts"
CURE: Final = "run `make charts`"
CHARTS: Final = {"ladder": LADDER, "as_called": AS_CALLED, "tokens": TOKENS, "roofline": ROOFLINE}


def plans(run: Run) -> dict[str, Chart]:
    """The charts that the run has data for, by the name of their files without its ending."""
    return {name: chart for name, chart in CHARTS.items() if chart.data(run)}


def digest(run: Run) -> str:
    """Names what a chart was drawn from."""
    return f"run {hashlib.sha256(to_json(run).encode()).hexdigest()[:12]}"


def render(run: Run, only: Collection[str] = tuple(CHARTS)) -> dict[str, bytes]:
    """The charts as files: {"ladder.svg": bytes, ...}, those of the names in `only`."""
    import matplotlib as mpl

    files = {}
    with mpl.rc_context(STYLE):
        for name, chart in plans(run).items():
            if name in only:
                buffer = io.BytesIO()
                about = {"Date": None, "Creator": None, "Description": digest(run)}
                chart.draw(run).savefig(buffer, format="svg", metadata=about)
                # without matplotlib's font a browser would take its serif default
                fonts = b"'DejaVu Sans', Arial, sans-serif"
                files[f"{name}.svg"] = buffer.getvalue().replace(b"'DejaVu Sans'", fonts)
    return files


def drifts(run: Run | None, folder: Path = FOLDER) -> list[str]:
    """One sentence for each committed chart that is missing, left over, or of another run.

    The pictures themselves are not compared: other versions of matplotlib draw other bytes.
    """
    wanted = plans(run) if run else {}
    found = {path.stem: path for path in folder.glob("*.svg")}
    out = [f"{folder.name}/{name}.svg is missing: {CURE}" for name in wanted if name not in found]
    for name, path in sorted(found.items()):
        if run is None or name not in wanted:
            out.append(f"{folder.name}/{path.name} shows what no run holds: remove it")
        elif digest(run) not in path.read_text(encoding="utf-8"):
            out.append(f"{folder.name}/{path.name} shows another state of the run: {CURE}")
    return out


def write(run: Run | None, folder: Path = FOLDER) -> list[Path]:
    """Draw all charts of the run into a folder; those that have no data any more are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    files = render(run) if run else {}
    for path in folder.glob("*.svg"):
        if path.name not in files:
            path.unlink()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return [folder / name for name in files]
