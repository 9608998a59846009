"""The tables of README.md. Each stands between two markers and is never edited by hand:

<!-- ladder:begin -->       a line per step at its home shape, in one format
<!-- ladder:end -->
<!-- called:begin -->       what a caller gets: tensor in to tensor out, beside the baselines, and
                            a layer of experts beside torch's
<!-- called:end -->
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from results.record.schema import AsCalled, Row, Run, Size
from results.render import models, query
from results.render.rows import time_of
from results.render.staleness import STALE, STALE_NOTE, Keys, Measured
from results.render.table import ABSENT, Column, Line, Table, cell, dims, markdown, percent, ratio

NOTHING: Final = (
    "Nothing is measured yet: `make bench` on a machine with a CUDA GPU, then `make charts`."
)
RATIO_NOTE: Final = "x parent: of two times of one loop."
CALLED: Final[tuple[Size, ...]] = (
    (1, 4096, 14336),
    (16, 4096, 14336),
    (128, 4096, 4096),
    (512, 4096, 4096),
    (512, 4096, 14336),
    (4096, 4096, 14336),
)
"""The sizes of the README's table: the weights of the two home shapes."""
OF_LADDER: Final = (
    Column("step"),
    Column("idea", words=True),
    *map(Column, ("time (us)", "TFLOPS", "x parent", "of its limit")),
)
OF_CALLED: Final = (
    Column("tokens"),
    Column("N x K", words=True),
    *map(
        Column,
        (
            "this project",
            "fast",
            query.BASELINES[query.CUBLAS],
            query.BASELINES[query.LLAMA_CPP],
            query.LAYERS[query.W4A16],
        ),
    ),
)


def ladder_table(
    run: Run,
    source: str,
    stale: Keys = (),
    href: Callable[[int, str], str] = lambda _, name: f"steps/{name}.py",
) -> Table | None:
    """A line per step in one format at its home shape; None where none was measured.

    source: the run's file as linked. href: where the link of a step leads, by its number and name.
    """
    panels = query.ladder(run)
    shown = [rung.row for panel in panels for rung in panel.rungs]
    title = []
    if shown:
        title.append(
            f"{shown[0].format.upper()} on an {run.env.where}, {query.when(shown)} "
            f"([run]({source})). The kernel alone, at the M x N x K of its branch."
        )
    if any(row.parent and not row.x_parent and row.status == "ok" for row in shown):
        title[0] += f" {RATIO_NOTE}"
    if any(row.key in stale for row in shown):
        title.append(STALE_NOTE)
    lines = []
    for panel in panels:
        lines.append(Line(("", f"**{panel.title}**, {dims(panel.home)}", *[""] * 4)))
        for rung in panel.rungs:
            row = rung.row
            away = f", at {dims(row.shape)}" * rung.away
            cells = (
                f"[{row.step}]({href(row.step, row.name)})",
                f"{query.idea(row)}{away}{_mark(row, stale)}",
                time_of(row),
                cell(row.tflops),
                ratio(row.x_parent) if row.x_parent else "",
                percent(row.limit_share),
            )
            lines.append(Line(cells))
    return Table(OF_LADDER, tuple(lines), "\n".join(title)) if lines else None


def _mark(one: Row | AsCalled, stale: Keys) -> str:
    return f" {STALE}" if one.key in stale else ""


def called_table(run: Run, source: str, stale: Keys = ()) -> Table | None:
    """What a caller of QuantLinear gets, in microseconds, beside cuBLAS float16, llama.cpp and
    Humming's W4A16; None where nothing was measured."""
    name = query.main_format(query.tabled(run))
    found: list[AsCalled] = []
    lines = []
    for size in CALLED:
        both = [
            query.called(run, "QuantLinear", how, "float16", size, name)
            for how in ("exact", "fast")
        ]
        beside = [query.baseline(run, peer, name, size) for peer in (query.LLAMA_CPP, query.W4A16)]
        own = [one for one in both if one]
        found += own
        times = [cell(one.us) + _mark(one, stale) if one else ABSENT for one in both]
        torch = cell(own[0].cublas_us if own else None)
        theirs = [cell(peer.us if peer else None) for peer in beside]
        lines.append(Line((str(size[0]), dims(size[1:]), *times, torch, *theirs)))
    title = [
        f"{name.upper()}, float16 in and out, in us, on an {run.env.where}, {query.when(found)} "
        f"([run]({source})). llama.cpp, from float32 to float32, and Humming: from other runs."
    ]
    title += [STALE_NOTE] * any(one.key in stale for one in found)
    return Table(OF_CALLED, tuple(lines), "\n".join(title)) if found else None


# --- between the markers --------------------------------------------------------------------------


def filled(text: str, shown: Measured | None, root: Path) -> str:
    """README.md in `root` with the tables of a run; ValueError where a marker is missing."""
    for name, made in (("ladder", ladder_table), ("called", called_table)):
        table = None
        if shown:
            link = shown.path.resolve().relative_to(root.resolve()).as_posix()
            table = made(shown.run, link, shown.stale)
        made_of = markdown(table) if table else NOTHING
        if shown and name == "called":
            more = models.experts_in_short(shown.path.parent / "experts.json")
            made_of += f"\n\n{more}" if more else ""
        before, _, after = split(text, name)
        text = f"{before}\n{made_of}\n{after}"
    return text


def split(text: str, name: str) -> tuple[str, str, str]:
    """(before, between, after) the markers; ValueError unless there is one of each, in order."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"README.md needs one {begin} and after it one {end}")
    before, rest = text.split(begin)
    between, after = rest.split(end)
    return before + begin, between, end + after
