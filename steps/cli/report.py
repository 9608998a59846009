"""What `run`, `ladder` and `check` print: one line a step, or one line a format, or JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from results.record.codec import plain
from results.record.schema import Row
from results.render import table
from results.render.rows import of_rows
from results.render.table import Column, Table, Tone
from steps.checks.run import Outcome, Outcomes
from steps.checks.select import ALL_FORMATS
from steps.contract import Family, Size, Step, Work
from steps.registry import lesson_of

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

    def median(self, of: Callable[[Row], float | None]) -> float | None:
        known = [x for row in self.rows.values() if (x := of(row)) is not None]
        return statistics.median(known) if known else None

    @property
    def wrong(self) -> list[str]:
        """The formats that failed."""
        wrong = [name for name, outcome in self.outcomes.items() if not outcome.ok]
        return wrong + [name for name, row in self.rows.items() if row.status == "failed"]

    @property
    def verdict(self) -> str:
        """ "ok, 14 cases", or the formats that failed."""
        if self.wrong:
            return f"FAILED {', '.join(dict.fromkeys(self.wrong))}"
        return f"ok, {_cases(sum(outcome.cases for outcome in self.outcomes.values()))}"


def folded(
    title: str, outcomes: Sequence[Outcome], rows: Sequence[Row], notes: Sequence[str] = ()
) -> Table:
    """One line for each step and family, and each shape where it was measured; formats are
    columns."""
    names = sorted({o.work.format for o in outcomes}, key=ALL_FORMATS.index)
    columns = [
        Column("step", lambda rung: str(rung.step.number)),
        Column("name", lambda rung: rung.step.name[len("stepNN_") :], words=True),
        Column("A", lambda rung: rung.family, words=True),
    ]
    if rows:
        columns += [
            Column("MxNxK", lambda rung: shape_text(rung.shape) if rung.shape else table.ABSENT),
            *(Column(name, _time_in(name)) for name in names),
            Column("x parent", lambda rung: table.ratio(rung.median(lambda row: row.x_parent))),
            Column("x cuBLAS", lambda rung: table.ratio(rung.median(lambda row: row.x_cublas))),
            Column("of limit", lambda rung: table.percent(rung.median(lambda r: r.limit_share))),
        ]
    else:
        columns += [Column(name, _error_in(name)) for name in names]
    columns.append(Column("verdict", lambda rung: rung.verdict, words=True))
    notes = (FAMILIES, *(OF_TIMES if rows else OF_CHECKS), *notes)
    return table.of_records(
        columns, _rungs(outcomes, rows), title, notes, lambda one: "bad" if one.wrong else ""
    )


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
        _Rung(lesson_of(works[key].step), works[key].family, shape, checked[key], own)
        for key in works
        for shape, own in (measured[key] or {None: {}}).items()
    ]


def _time_in(name: str) -> Callable[[_Rung], str]:
    def text(rung: _Rung) -> str:
        row = rung.rows.get(name)
        if row is None:
            return table.ABSENT
        return table.cell(row.kernel_us) if row.status == "ok" else "FAILED"

    return text


def _error_in(name: str) -> Callable[[_Rung], str]:
    def text(rung: _Rung) -> str:
        outcome = rung.outcomes.get(name)
        if outcome is None:
            return table.ABSENT
        return table.scientific(outcome.nmse_same_operands) if outcome.ok else "FAILED"

    return text


# --- one line a format ----------------------------------------------------------------------------

_CHECK = (
    Column("step", lambda outcome: str(outcome.work.step.number)),
    Column("scheme", lambda outcome: outcome.work.scheme, words=True),
    Column("format", lambda outcome: outcome.work.format, words=True),
)
_ROW = (
    *of_rows("step", "scheme"),
    Column("format", lambda row: row.format, words=True),
    Column("MxNxK", lambda row: shape_text(row.shape)),
)
_ERRORS = of_rows("NMSE, kernel", "NMSE, product")
_MEASURED = of_rows(
    *("kernel us", "total us", "TFLOPS", "GB/s"),
    *("of its limit", "x parent", "x cuBLAS", "registers"),
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
    if not rows:  # without a GPU the columns of times would only say that nothing was measured
        columns = (
            *_CHECK,
            *_ERRORS,
            Column("verdict", lambda o: _verdict("ok" if o.ok else "failed", o), words=True),
        )
        return table.of_records(columns, outcomes, title, notes, lambda o: "" if o.ok else "bad")
    checked = {(o.work.step.number, o.work.scheme, o.work.format): o for o in outcomes}
    named = set(asked)

    def verdict(row: Row) -> str:
        return _verdict(row.status, checked.get((row.step, row.scheme, row.format)))

    def tone(row: Row) -> Tone:
        other = named and row.step not in named
        return "bad" if row.status == "failed" else "faint" if other else ""

    several = any((row.input, row.output) != ("float32", "float32") for row in rows)
    from_to = (Column("A to C", lambda row: f"{row.input} to {row.output}", words=True),) * several
    ends = Column("verdict", verdict, words=True)
    columns = (*_ROW, *from_to, *_ERRORS, *_MEASURED, ends)
    return table.of_records(columns, rows, title, notes, tone)


def _verdict(status: str, outcome: Outcome | None) -> str:
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
    """All checks and all rows, no NaN in them; tensor: whose weights were multiplied, if any's."""
    data = {
        "machine": machine,
        **({"tensor": tensor} if tensor else {}),
        "ok": outcomes.ok and all(row.status != "failed" for row in rows),
        "broken": outcomes.broken,
        "checks": [outcome.as_json() for outcome in outcomes.each],
        "rows": [asdict(row) for row in rows],
    }
    return json.dumps(plain(data), indent=1)
