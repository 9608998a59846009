"""What charts, tables and captions ask of a run.

A figure that is shown comes from here, so a chart, a table and a caption cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from results.record.schema import FORMATS, AsCalled, Peer, Row, Run, Size
from results.render.table import number, ratio
from steps.checks.select import branches

MAIN_FORMAT: Final = "q4_0"  # the format of charts and tables that show one
CUBLAS: Final = "cublas_fp16"
LLAMA_CPP: Final = "ggml"
BASELINES: Final = {CUBLAS: "cuBLAS float16", LLAMA_CPP: "llama.cpp"}  # beside every step
W4A16: Final = "humming_w4a16"
W4A8: Final = "humming_w4a8"
LAYERS: Final = {W4A16: "Humming W4A16", W4A8: "Humming W4A8"}
"""Beside what a caller gets: layers called with float16 A and C. W4A8 is less exact: one scale for
a row of 4-bit weights, one for a token of int8 activations. Measured once, by code that is in git
history (commit 1ec61969: results/measure/humming.py)."""
WEIGHTS: Final = {CUBLAS: "f16", W4A16: "int4_group32", W4A8: "int4_row"}
"""The one weight format of some baselines, which stand beside every format of ours."""
UNITS: Final = {
    "fp32": "float32 multiply-add",
    "int32": "int32 multiply-add",
    "packed_int32": "int32, two products packed",
    "dp4a": "dp4a",
    "tensor_int8": "int8 tensor cores",
    "tensor_fp16": "float16 tensor cores",
    "tensor_sparse": "float16 tensor cores, sparse",
}


# --------------------------------------------------------------------------------------------- rows


def timed(rows: Iterable[Row]) -> list[Row]:
    """The rows that have a figure: checked, timed, possible."""
    return [row for row in rows if row.status == "ok" and row.kernel_us is not None]


def of_one_dtype(rows: Iterable[Row]) -> list[Row]:
    """One row of each step, scheme, format and shape: the one from float32 A to float32 C where
    there is one, as only those compare with all other steps."""
    chosen: dict[tuple[object, ...], Row] = {}

    def rank(row: Row) -> tuple[bool, bool]:
        return row.output != "float32", row.input != "float32"

    for row in rows:
        key = (row.step, row.scheme, row.format, row.shape)
        if key not in chosen or rank(row) < rank(chosen[key]):
            chosen[key] = row
    return list(chosen.values())


def formats(rows: Iterable[Row | AsCalled]) -> list[str]:
    have = {row.format for row in rows}
    return [name for name in FORMATS if name in have] + sorted(have - set(FORMATS))


def main_format(rows: Iterable[Row | AsCalled]) -> str:
    """Q4_0, or the first format there is where that was not measured."""
    have = formats(rows)
    return MAIN_FORMAT if MAIN_FORMAT in have or not have else have[0]


def in_order(sizes: Iterable[Size]) -> list[Size]:
    """Each size once, by its weights and then by its tokens."""
    return sorted(set(sizes), key=lambda size: (size[1] * size[2], size[1], size[0]))


def baseline(run: Run, name: str, format_name: str, size: Size) -> Peer | None:
    """A baseline's figure for the same work (`WEIGHTS`)."""
    key = name, WEIGHTS.get(name, format_name), size
    return next((p for p in run.peers if p.key == key), None)


def baseline_us(run: Run, name: str, format_name: str, size: Size) -> float | None:
    found = baseline(run, name, format_name, size)
    return None if found is None else found.us


def called(
    run: Run, api: str, accuracy: str, dtype: str, size: Size, format_name: str = MAIN_FORMAT
) -> AsCalled | None:
    """What a caller gets at a size."""
    key = (api, accuracy, dtype, format_name, size)
    return next((one for one in run.as_called if one.key == key), None)


def tabled(run: Run) -> list[AsCalled]:
    """The calls at the M that are tabled: those of the sweep are drawn."""
    return [one for one in run.as_called if not one.swept]


def sweep(run: Run, accuracy: str, n: int, k: int) -> list[AsCalled]:
    """A float16 QuantLinear in the format of the sweep, by M, up to the tabled M that may follow
    the last one that was swept; tabled M that were measured again since are left out."""
    swept = [one for one in run.as_called if one.swept]
    commits = {one.commit for one in swept}
    last = max((one.M for one in swept), default=-1)
    own = ("QuantLinear", accuracy, "float16", main_format(swept))
    found = [
        one
        for one in run.as_called
        if (one.api, one.accuracy, one.dtype, one.format) == own
        and one.commit in commits
        and one.shape == (min(one.M, last + 1), n, k)
    ]
    return sorted(found, key=lambda one: one.M)


CLIFF: Final = 1.15  # one more token is to take at most so many times as long


def cliffs(run: Run) -> list[tuple[AsCalled, AsCalled]]:
    """Where one token more takes longer than `CLIFF` times: (the call at M, that at M + 1) of the
    same API, accuracy, dtypes, format, N and K, measured at one commit; the worst first."""
    at = {one.key: one for one in run.as_called}
    pairs = [
        (one, more)
        for one in run.as_called
        if (more := at.get((*one.key[:-1], (one.M + 1, one.N, one.K))))
        and more.commit == one.commit
        and more.us > CLIFF * one.us
    ]
    return sorted(pairs, key=lambda pair: pair[0].us / pair[1].us)


# ------------------------------------------------------------------------------------- the ladder


@dataclass(frozen=True, slots=True)
class Rung:
    """A step at its home shape: in the main format, and in all that were measured there."""

    row: Row
    every: tuple[Row, ...]
    parent: Row | None  # its parent in the same format at the same shape

    @property
    def away(self) -> bool:
        """Whether its home is not the first one of its branch."""
        return self.row.shape != branches()[self.row.branch].homes[0]


@dataclass(frozen=True, slots=True)
class Panel:
    """A branch of the ladder with its steps."""

    branch: str
    title: str
    home: Size
    rungs: tuple[Rung, ...]


def ladder(run: Run) -> list[Panel]:
    """The branches in the order of the ladder, each step once: in the family that continues the
    ladder, at the first home shape of its branch, or of its own homes at the smallest of that N and
    K, if there is one."""
    rows = of_one_dtype(run.rows)
    format_name = main_format(row for row in rows if row.home)
    panels = []
    for key, branch in branches().items():
        own, first = [row for row in rows if row.home and row.branch == key], branch.homes[0]
        rungs = (_rung(rows, own, n, first, format_name) for n in sorted({r.step for r in own}))
        panels.append(Panel(key, branch.title, first, tuple(rung for rung in rungs if rung)))
    return [panel for panel in panels if panel.rungs]


def _rung(
    rows: Sequence[Row], homes: Sequence[Row], step: int, first: Size, format_name: str
) -> Rung | None:
    own = [row for row in homes if row.step == step]
    shape = min(
        (row.shape for row in own), key=lambda one: (one != first, one[1:] != first[1:], one)
    )
    own = [row for row in own if row.shape == shape]
    family = max(own, key=lambda row: (row.parent or 0, row.family)).family
    every = tuple(row for row in own if row.family == family)
    row = next((row for row in every if row.format == format_name), None)
    if row is None:
        return None
    above = [
        other
        for other in timed(rows)
        if (other.step, other.format, other.shape) == (row.parent, row.format, row.shape)
    ]
    parent = next((other for other in above if other.family == family), None)
    return Rung(row, every, parent or min(above, key=lambda r: r.kernel_us or 0, default=None))


def relative_error(run: Run, row: Row) -> float | None:
    """The NMSE of a product over that of its format, which is the least that an exact step has of
    the same problem."""
    same = [
        other.nmse_float
        for other in run.rows
        if (other.format, other.shape, other.accuracy) == (row.format, row.shape, "exact")
        and other.nmse_float
    ]
    return row.nmse_float / min(same) if row.nmse_float and same else None


def tops(run: Run) -> list[int]:
    """The steps that were measured at the most shapes: of each branch and accuracy the last one
    that was at the home of its branch."""
    found: dict[tuple[str, str], int] = {}
    homes = {name: branch.homes[0] for name, branch in branches().items()}
    for row in (row for row in timed(run.rows) if row.shape == homes.get(row.branch)):
        place = (row.branch, row.accuracy)
        found[place] = max(found.get(place, 0), row.step)
    return sorted(found.values())


# ---------------------------------------------------------------------------------------- in words


def idea(row: Row) -> str:
    """What the step is, from its title; one that is not exact says so."""
    name = row.title or row.name
    return name if row.accuracy == "exact" else f"{name} ({row.accuracy})"


def when(records: Iterable[Row | AsCalled | Peer]) -> str:
    """The dates and the commit of measurements: "2026-11-22, commit fcc1489e"."""
    records = list(records)
    days = sorted({one.utc[:10] for one in records if one.utc})
    commits = sorted({one.commit for one in records if one.commit})
    dates = [] if not days else [days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"]
    if len(commits) == 1:
        dates.append(f"commit {commits[0]}")
    elif commits:
        dates.append(f"{len(commits)} commits")
    return ", ".join(dates)


def kind_name(kind: tuple[str, str, str]) -> str:
    """ "QuantLinear float16, fast", of (api, accuracy, dtype of A and C)."""
    api, accuracy, dtype = kind
    return f"{api} {dtype}" + ("" if accuracy == "exact" else f", {accuracy}")


def jump(one: AsCalled, more: AsCalled) -> str:
    """One of `cliffs` in words."""
    return (
        f"{kind_name((one.api, one.accuracy, one.dtype))}, {one.format.upper()}, N x K = {one.N} x "
        f"{one.K}: M={one.M} {number(one.us)} us with step {one.step}, M={more.M} "
        f"{number(more.us)} us with step {more.step}, {ratio(more.us / one.us)}"
    )
