"""The tables of README.md. Each stands between two markers and is never edited by hand:

<!-- ladder:begin -->       a line per step at its home shape, in one format
<!-- ladder:end -->
<!-- called:begin -->       what a caller gets: tensor in to tensor out, beside the baselines
<!-- called:end -->
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from results.baselines.humming import W4A16
from results.record import ROOT
from results.record.schema import Run, Size
from results.record.store import headline, read
from results.render.arguments import NOTHING
from results.render.markdown import grid, link
from results.render.query import (
    ABSENT,
    BASELINES,
    CUBLAS,
    LAYERS,
    LLAMA_CPP,
    Rung,
    baseline,
    called,
    cell,
    dims,
    idea,
    ladder,
    main_format,
    percent,
    ratio,
    tabled,
    when,
)
from results.render.staleness import STALE, STALE_NOTE, Keys, stale_keys

RATIO_NOTE: Final = (
    "x parent compares two times of one loop: it is left out where the parent's is of another."
)

CALLED: Final[tuple[Size, ...]] = (
    (1, 4096, 14336),
    (16, 4096, 14336),
    (128, 4096, 4096),
    (512, 4096, 4096),
    (512, 4096, 14336),
    (4096, 4096, 14336),
)
"""The sizes of the README's table: the weights of the two home shapes."""


def ladder_table(run: Run, source: str, stale: Keys = ()) -> str:
    """A line per step in one format at its home shape. `source` is the run's file as linked."""
    panels = ladder(run)
    if not panels:
        return NOTHING
    shown = [rung.row for panel in panels for rung in panel.rungs]
    head = ["step", "idea", "time (us)", "TFLOPS", "x parent", "of its limit"]
    above = [
        f"{shown[0].format.upper()} on an {run.env.where}, {when(shown)} "
        f"([run]({source})). The kernel alone, at the M x N x K of its branch."
    ]
    if any(row.parent and not row.x_parent and row.status == "ok" for row in shown):
        above.append(RATIO_NOTE)
    lines = []
    for panel in panels:
        lines.append(["", f"**{panel.title}**, {dims(panel.home)}", *[""] * (len(head) - 2)])
        lines += [_rung(rung, stale) for rung in panel.rungs]
    marked = [STALE_NOTE] if any(row.key in stale for row in shown) else []
    return "\n".join([*above, *marked, "", *grid(head, "rl" + "r" * (len(head) - 2), lines)])


def _rung(rung: Rung, stale: Keys) -> list[str]:
    row = rung.row
    at = f", at {dims(row.shape)}" if rung.away else ""
    mark = f" {STALE}" if row.key in stale else ""
    return [
        f"[{row.step}](steps/{row.name}.py)",
        idea(row) + at + mark,
        cell(row.kernel_us) if row.status == "ok" else row.status,
        cell(row.tflops),
        ratio(row.x_parent) if row.x_parent else "",
        percent(row.limit_share),
    ]


def called_table(run: Run, source: str, stale: Keys = ()) -> str:
    """What a caller of QuantLinear gets, in microseconds, beside cuBLAS float16, llama.cpp and,
    where it was measured, Humming's W4A16."""
    name = main_format(tabled(run))
    found = {
        (accuracy, size): one
        for accuracy in ("exact", "fast")
        for size in CALLED
        if (one := called(run, "QuantLinear", accuracy, "float16", size, name))
    }
    if not found:
        return NOTHING
    others = {size: baseline(run, LLAMA_CPP, name, size) for size in CALLED}
    layers = {size: peer for size in CALLED if (peer := baseline(run, W4A16, name, size))}
    lines = []
    for size in CALLED:
        exact, fast = found.get(("exact", size)), found.get(("fast", size))
        beside = exact or fast
        theirs = others[size]
        lines.append(
            [
                str(size[0]),
                f"{size[1]} x {size[2]}",
                *(
                    ABSENT if one is None else cell(one.us) + f" {STALE}" * (one.key in stale)
                    for one in (exact, fast)
                ),
                cell(beside.cublas_us if beside else None),
                cell(theirs.us if theirs else None),
                *([cell(layers[size].us if size in layers else None)] if layers else []),
            ]
        )
    above = (
        f"{name.upper()}, float16 in and out, in us, on an {run.env.where}, "
        f"{when(found.values())} ([run]({source}))."
    )
    known = [one for one in others.values() if one]
    if known:
        elsewhere = "" if all(one.same_run for one in known) else ", from another run"
        above += f" {BASELINES[LLAMA_CPP]}: float32 in and out{elsewhere}."
    another_run = not all(one.same_run for one in layers.values())
    notes = [f"{LAYERS[W4A16]}: from another run."] if another_run else []
    notes += [STALE_NOTE] if any(one.key in stale for one in found.values()) else []
    head = ["tokens", "N x K", "this project", "fast", BASELINES[CUBLAS], BASELINES[LLAMA_CPP]]
    head += [LAYERS[W4A16]] if layers else []
    return "\n".join([above, *notes, "", *grid(head, "rl" + "r" * (len(head) - 2), lines)])


TABLES: Final = ("ladder", "called")
"""The names of the markers."""


def readme_tables(root: Path = ROOT) -> dict[str, str]:
    """What belongs between the markers of each name, for the runs in `root`."""
    path = headline(root / "results")
    if path is None:
        return dict.fromkeys(TABLES, NOTHING)
    run = read(path)
    stale = stale_keys(run, root)
    return {
        "ladder": ladder_table(run, link(path, root), stale),
        "called": called_table(run, link(path, root), stale),
    }


def split(text: str, name: str) -> tuple[str, str, str]:
    """(before, between, after) the markers; ValueError unless there is one of each, in order."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"needs one {begin} and after it one {end}")
    before, rest = text.split(begin)
    between, after = rest.split(end)
    return before + begin, between, end + after
