"""The records of a run by columns: for tables, for CSV files, and for a question such as
`python -m results M=8 FORMAT=q5_1`."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

from results.record.schema import AsCalled, Peer, Row, Run
from results.render.query import BASELINES, LAYERS
from results.render.staleness import STALE, STALE_NOTE, Keys
from results.render.table import (
    ABSENT,
    Column,
    Table,
    cell,
    dims,
    number,
    of_records,
    percent,
    ratio,
    scientific,
    whole,
)

Record = Row | AsCalled | Peer


def spread(low: float | None, high: float | None) -> str:
    """ "12.1-12.4"."""
    return ABSENT if low is None or high is None else f"{number(low)}-{number(high)}"


def time_of(row: Row) -> str:
    """The kernel's time in us, or why there is none."""
    return cell(row.kernel_us) if row.status == "ok" else row.status


def dtypes(row: Row) -> str:
    """ "float16", or "float32, float16" where A and C differ."""
    return row.input if row.input == row.output else f"{row.input}, {row.output}"


SIZE: Final = Column("M x N x K", lambda one: dims(one.shape))
FORMAT: Final = Column("format", lambda one: one.format.upper(), words=True)
OF_ROWS: Final = (
    Column("step", lambda row: str(row.step)),
    Column("scheme", lambda row: row.scheme, words=True),
    FORMAT,
    SIZE,
    Column("A, C", dtypes, words=True),
    Column("kernel us", time_of),
    Column("20-80 %", lambda row: spread(row.p20_us, row.p80_us)),
    Column("pass us", lambda row: cell(row.activation_us)),
    Column("total us", lambda row: cell(row.total_us)),
    Column("x cuBLAS", lambda row: ratio(row.x_cublas)),
    Column("TFLOPS", lambda row: cell(row.tflops)),
    Column("GB/s", lambda row: cell(row.gbps)),
    Column("of its limit", lambda row: percent(row.limit_share)),
    Column("x parent", lambda row: ratio(row.x_parent)),
    Column("NMSE, product", lambda row: scientific(row.nmse_float)),
    Column("NMSE, kernel", lambda row: scientific(row.nmse_same_operands)),
    Column("registers", lambda row: whole(row.registers)),
    Column("spills", lambda row: whole(row.spill_bytes)),
    Column("shared memory", lambda row: whole(row.smem_bytes)),
)
OF_CALLS: Final = (
    Column("API", lambda one: one.api, words=True),
    Column("A, C", lambda one: one.dtype, words=True),
    Column("accuracy", lambda one: one.accuracy, words=True),
    FORMAT,
    SIZE,
    Column("us", lambda one: number(one.us)),
    Column("20-80 %", lambda one: spread(one.p20_us, one.p80_us)),
    Column("torch us", lambda one: number(one.cublas_us)),
    Column("x torch", lambda one: ratio(one.x_cublas)),
    Column("host us", lambda one: cell(one.host_us)),
    Column("torch host us", lambda one: cell(one.torch_host_us)),
    Column("step", lambda one: str(one.step)),
)
NAMES: Final = BASELINES | LAYERS
OF_BASELINES: Final = (
    Column("baseline", lambda one: NAMES.get(one.peer, one.peer), words=True),
    FORMAT,
    SIZE,
    Column("us", lambda one: number(one.us)),
    Column("TFLOPS", lambda one: number(one.tflops)),
    Column("measured", lambda one: "beside ours" if one.same_run else "elsewhere", words=True),
)


def of_rows(*names: str) -> tuple[Column, ...]:
    """Columns of `OF_ROWS` by their names."""
    every = {column.name: column for column in OF_ROWS}
    return tuple(every[name] for name in names)


# --- files ----------------------------------------------------------------------------------------

LEFT_OUT: Final = (
    *("name", "title", "branch", "parent", "unit", "home", "cublas_us"),
    *("rounds", "total_p20_us", "total_p80_us", "utc", "source_hash", "source"),
)
"""Fields of a record that CSV files have not: they say the same of every row of a step or of a
loop, or follow from others. All are in run.json."""
KINDS: Final[Mapping[str, tuple[Callable[[Run], Sequence[Record]], Any, Sequence[Column]]]] = {
    "steps": (lambda run: run.rows, Row, OF_ROWS),
    "calls": (lambda run: run.as_called, AsCalled, OF_CALLS),
    "baselines": (lambda run: run.peers, Peer, OF_BASELINES),
}
"""By the name of their file: a run's records of a kind, that kind, how they are shown."""


def csv_files(run: Run) -> dict[str, str]:
    """ "steps.csv", "calls.csv", "baselines.csv" -> their text: times in us, four digits."""
    found = {}
    for name, (records, kind, _) in KINDS.items():
        if records(run):
            file = io.StringIO()
            writer = csv.writer(file, lineterminator="\n")
            keys = [field.name for field in fields(kind) if field.name not in LEFT_OUT]
            writer.writerow(keys)
            writer.writerows([_digits(getattr(one, key)) for key in keys] for one in records(run))
            found[f"{name}.csv"] = file.getvalue()
    return found


def _digits(value: Any) -> Any:
    if isinstance(value, bool):
        return int(value)
    return f"{value:.4g}" if isinstance(value, float) else value


# --- questions ------------------------------------------------------------------------------------


def tables(run: Run, wanted: Mapping[str, Collection[str]], stale: Keys = ()) -> list[Table]:
    """The records that have one of these values in each of these fields, by kind. Fields and values
    in any case; ValueError for a field that no record has."""
    of_kind = {name: {f.name.lower(): f.name for f in fields(KINDS[name][1])} for name in KINDS}
    known = dict.fromkeys(key for names in of_kind.values() for key in names)
    if unknown := [key for key in wanted if key not in known]:
        raise ValueError(f"no row has {', '.join(unknown)}: rows have {', '.join(known)}")
    made = []
    for name, (records, _, columns) in KINDS.items():
        if all(key in of_kind[name] for key in wanted):
            asked = [(of_kind[name][key], values) for key, values in wanted.items()]
            found = [
                one
                for one in records(run)
                if all(str(getattr(one, key)).lower() in values for key, values in asked)
            ]
            if found:
                made.append(_told(name, found, columns, stale))
    return made


def _told(name: str, found: Sequence[Record], columns: Sequence[Column], stale: Keys) -> Table:
    marked = any(one.key in stale for one in found)
    mark = Column("", lambda one: STALE if one.key in stale else "", words=True)
    return of_records(
        (*columns, *[mark] * marked), found, name.capitalize(), (STALE_NOTE,) * marked
    )
