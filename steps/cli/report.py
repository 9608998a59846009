"""What `run`, `ladder` and `check` print: one line a step, or one line a format, or JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from results.record.schema import Row
from results.render import text as table
from results.render.text import Column, Line, Table, Tone
from steps.checks.run import Outcome, Outcomes
from steps.checks.select import ALL_FORMATS
from steps.contract import Family, Size, Step, Work

FAMILIES = "A16: activations in floating point. A8: quantized to int8."
OF_CHECKS = (
    "Numbers: the kernel's error, as NMSE against the float64 product of the same operands.",
)
OF_TIMES = (
    "Times: microseconds of the kernel alone; x cuBLAS counts the activation pass too.",
    "Ratios and shares: the median over the formats.",
)


def shape_text(shape: Size) -> str:
    """ "512x4096x4096"."""
    return "x".join(map(str, shape))


# --- one line a step ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Rung:
    """A line of the folded table: one step in one family, at one shape where it was measured."""

    step: Step
    family: Family
    shape: Size | None
    outcomes: dict[str, Outcome]
    rows: dict[str, Row]

    @property
    def ok(self) -> bool:
        checked = all(outcome.ok for outcome in self.outcomes.values())
        return checked and all(row.status != "failed" for row in self.rows.values())

    def median(self, of: Callable[[Row], float | None]) -> float | None:
        known = [x for row in self.rows.values() if (x := of(row)) is not None]
        return statistics.median(known) if known else None

    @property
    def verdict(self) -> str:
        """ "ok, 14 cases", or the formats that failed."""
        wrong = [name for name, outcome in self.outcomes.items() if not outcome.ok]
        wrong += [name for name, row in self.rows.items() if row.status == "failed"]
        if wrong:
            return f"FAILED {', '.join(dict.fromkeys(wrong))}"
        return f"ok, {_cases(sum(outcome.cases for outcome in self.outcomes.values()))}"


def folded(
    title: str, outcomes: Sequence[Outcome], rows: Sequence[Row], notes: Sequence[str] = ()
) -> Table:
    """One line for each step and family, and each shape where it was measured; formats are
    columns."""
    names = sorted({o.work.format for o in outcomes}, key=ALL_FORMATS.index)
    head = [Column("step"), Column("name", words=True), Column("A", words=True)]
    head += [Column("MxNxK")] if rows else []
    head += [Column(name) for name in names]
    head += [Column(name) for name in ("x parent", "x cuBLAS", "of limit")] if rows else []
    head += [Column("verdict", words=True)]
    lines = []
    for rung in _rungs(outcomes, rows):
        cells = [str(rung.step.number), rung.step.name[len("stepNN_") :], rung.family]
        if rows:
            cells += [shape_text(rung.shape) if rung.shape else table.ABSENT]
            cells += [_time(rung.rows.get(name)) for name in names]
            cells += [
                table.times(rung.median(lambda row: row.x_parent)),
                table.times(rung.median(lambda row: row.x_cublas)),
                table.share(rung.median(lambda row: row.limit_share)),
            ]
        else:
            cells += [_error(rung.outcomes.get(name)) for name in names]
        lines.append(Line((*cells, rung.verdict), "" if rung.ok else "bad"))
    notes = (FAMILIES, *(OF_TIMES if rows else OF_CHECKS), *notes)
    return Table(tuple(head), tuple(lines), title, notes)


def _rungs(outcomes: Iterable[Outcome], rows: Sequence[Row]) -> list[_Rung]:
    """The lines of the folded table, in the order of the outcomes and of the rows: those from
    float32 to float32, or where one dtype was asked for those in it."""
    checked: dict[tuple[int, str], dict[str, Outcome]] = {}
    works: dict[tuple[int, str], Work] = {}
    for outcome in outcomes:
        key = outcome.work.step.number, outcome.work.family
        works.setdefault(key, outcome.work)
        checked.setdefault(key, {})[outcome.work.format] = outcome
    measured: dict[tuple[int, str], dict[Size | None, dict[str, Row]]] = {key: {} for key in works}
    outputs = {row.output for row in rows}
    for row in rows:
        if row.output == "float32" or "float32" not in outputs:
            at = measured[row.step, row.family]
            at.setdefault(row.shape, {})[row.format] = row
    return [
        _Rung(works[key].step, works[key].family, shape, checked[key], own)
        for key in works
        for shape, own in (measured[key] or {None: {}}).items()
    ]


def _time(row: Row | None) -> str:
    if row is None or row.status == "unsupported":
        return table.ABSENT
    return table.figure(row.kernel_us) if row.status == "ok" else "FAILED"


def _error(outcome: Outcome | None) -> str:
    if outcome is None:
        return table.ABSENT
    return table.error(outcome.nmse_same_operands) if outcome.ok else "FAILED"


# --- one line a format ----------------------------------------------------------------------------

_MEASURED: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("kernel", lambda row: table.microseconds(row.kernel_us)),
    ("total", lambda row: table.microseconds(row.total_us)),
    ("TFLOPS", lambda row: table.figure(row.tflops)),
    ("GB/s", lambda row: table.figure(row.gbps)),
    ("of limit", lambda row: table.share(row.limit_share)),
    ("x parent", lambda row: table.times(row.x_parent)),
    ("x cuBLAS", lambda row: table.times(row.x_cublas)),
    ("registers", lambda row: table.ABSENT if row.registers is None else str(row.registers)),
)


def run_table(
    title: str,
    outcomes: Sequence[Outcome],
    rows: Sequence[Row],
    asked: Iterable[int] = (),
    notes: Sequence[str] = (),
) -> Table:
    """One line a work: its rows where it was measured, else its checks.

    asked: the steps that were named; others, measured to compare with, are faint.
    """
    head = [Column("step"), Column("scheme", words=True), Column("format", words=True)]
    several = any((row.input, row.output) != ("float32", "float32") for row in rows)
    if rows:
        head += [Column("MxNxK")]
    if several:
        head += [Column("A to C", words=True)]
    head += [Column("kernel error"), Column("format error")]
    if rows:  # without a GPU these columns would only say that nothing was measured
        head += [Column(name) for name, _ in _MEASURED]
    head += [Column("verdict", words=True)]
    checked = {(o.work.step.number, o.work.scheme, o.work.format): o for o in outcomes}
    wanted = set(asked)
    lines = []
    for row in rows:
        cells = [str(row.step), row.scheme, row.format, shape_text(row.shape)]
        if several:
            cells += [f"{row.input} to {row.output}"]
        cells += [table.error(row.nmse_same_operands), table.error(row.nmse_float)]
        cells += [text(row) for _, text in _MEASURED]
        cells += [_verdict(row.status, checked.get((row.step, row.scheme, row.format)))]
        tone: Tone = "bad" if row.status == "failed" else ""
        if not tone and wanted and row.step not in wanted:
            tone = "faint"
        lines.append(Line(tuple(cells), tone))
    for outcome in () if rows else outcomes:
        work = outcome.work
        cells = [str(work.step.number), work.scheme, work.format]
        cells += [table.error(outcome.nmse_same_operands), table.error(outcome.nmse_float)]
        cells += [_verdict("ok" if outcome.ok else "failed", outcome)]
        lines.append(Line(tuple(cells), "" if outcome.ok else "bad"))
    return Table(tuple(head), tuple(lines), title, tuple(notes))


def _verdict(status: str, outcome: Outcome | None) -> str:
    if status == "unsupported":
        return status
    if outcome is None:
        return "ok" if status == "ok" else "FAILED"
    if outcome.failures:
        return f"FAILED {len(outcome.failures)} of {_cases(outcome.cases)}"
    return f"ok, {_cases(outcome.cases)}" if status == "ok" else "FAILED"


def _cases(count: int) -> str:
    return f"{count} case{'' if count == 1 else 's'}"


# --- what was wrong, and all of it as data --------------------------------------------------------


def failed(outcomes: Sequence[Outcome], rows: Sequence[Row]) -> set[int]:
    """The numbers of the steps of which something failed."""
    wrong = {outcome.work.step.number for outcome in outcomes if not outcome.ok}
    return wrong | {row.step for row in rows if row.status == "failed"}


def sentences(outcomes: Outcomes, rows: Sequence[Row]) -> list[str]:
    """What was wrong, one sentence each."""
    said = [sentence for outcome in outcomes.each for sentence in outcome.failures]
    said += [
        f"step {row.step} {row.scheme} {row.format} at {shape_text(row.shape)}: {row.why}"
        for row in rows
        if row.status == "failed" and row.why not in said
    ]
    return said + ([f"the run ended early: {outcomes.broken}"] if outcomes.broken else [])


def as_json(
    machine: str, outcomes: Outcomes, rows: Sequence[Row], tensor: dict[str, Any] | None
) -> str:
    """All checks and all rows; `tensor` is the one whose weights were multiplied, if any."""
    data = {
        "machine": machine,
        **({"tensor": tensor} if tensor else {}),
        "ok": outcomes.ok and all(row.status != "failed" for row in rows),
        "broken": outcomes.broken,
        "checks": [outcome.as_json() for outcome in outcomes.each],
        "rows": [asdict(row) for row in rows],
    }
    return json.dumps(_finite(data), indent=1)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null instead."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and value - value != 0:
        return None
    return value
