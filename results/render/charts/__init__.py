"""Charts: pure functions of one run. What is not in the run is not in a picture.

    python -m results charts [--run run.json] [--out results/charts] [--png]

    ladder.svg      each step at its home shape, a panel per branch, cuBLAS and llama.cpp as lines
    as_called.svg   what a caller gets, times as fast as cuBLAS float16, against tokens
    tokens.svg      its time at every number of tokens, and the step that was chosen
    error.svg       the error of the product, then of the kernel
    roofline.svg    the last step of each branch under the limits measured on this GPU

The file of its name draws each, `called.py` as_called.svg; `style.py` has colours and axes.

The same run gives the same bytes with the same matplotlib: ids are salted with a constant, and no
date of drawing is written. Text stays text, so a chart can be searched and diffed. The background
is white, so a chart reads the same on a dark page. Each file names the run it was drawn from by a
digest, by which `drifts` finds charts of another run.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Final

from results.record import ROOT
from results.record.codec import to_json
from results.record.schema import Run
from results.render.charts import called, error, ladder, roofline, tokens
from results.render.charts.style import STYLE
from results.render.query import ladder as panels_of
from results.render.query import tabled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER: Final = ROOT / "results" / "charts"
CURE: Final = "run `make charts`"


def plans(run: Run) -> dict[str, Callable[[Run], Figure]]:
    """The charts that the run has data for: file name without its ending -> drawing."""
    made: dict[str, Callable[[Run], Figure]] = {}
    if panels_of(run):
        made["ladder"] = ladder.draw
    if tabled(run):
        made["as_called"] = called.draw
    if tokens.sizes(run):
        made["tokens"] = tokens.draw
    if error.rungs(run):
        made["error"] = error.draw
    if roofline.rows_of(run):
        made["roofline"] = roofline.draw
    return made


def digest(run: Run) -> str:
    """Names what a chart was drawn from."""
    return f"run {hashlib.sha256(to_json(run).encode()).hexdigest()[:12]}"


def render(run: Run, kind: str = "svg", only: Collection[str] | None = None) -> dict[str, bytes]:
    """The charts as files: {"ladder.svg": bytes, ...}, or those of the names in `only`."""
    import matplotlib as mpl

    files = {}
    with mpl.rc_context(STYLE):
        for name, draw in plans(run).items():
            if only is not None and name not in only:
                continue
            buffer = io.BytesIO()
            about = {"Date": None, "Creator": None, "Description": digest(run)}
            metadata = about if kind == "svg" else None
            draw(run).savefig(buffer, format=kind, metadata=metadata, dpi=110)
            data = buffer.getvalue()
            if kind == "svg":  # without matplotlib's font a browser would take its serif default
                data = data.replace(b"'DejaVu Sans'", b"'DejaVu Sans', Arial, sans-serif")
            files[f"{name}.{kind}"] = data
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


def write(run: Run | None, folder: Path = FOLDER, kinds: Collection[str] = ("svg",)) -> list[Path]:
    """Draw all charts of the run into a folder; those that have no data any more are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for kind in kinds:
        files = render(run, kind) if run else {}
        for path in folder.glob(f"*.{kind}"):
            if path.name not in files:
                path.unlink()
        for name, data in files.items():
            (folder / name).write_bytes(data)
            written.append(folder / name)
    return written
