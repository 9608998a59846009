"""What `run`, `ladder` and `check` print: one line a step, the lines of what failed, and JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from qformats import WEIGHT_FORMATS
from results.record.schema import Row
from results.render import table as tables
from steps.checks.run import Outcome, Outcomes
from steps.checks.select import select
from steps.cli import report
from steps.contract import Size, Work
from steps.registry import find
from tests.cli import pretended

HOME = (512, 4096, 4096)
WORKS = select((find(1), find(3)))


def outcome(work: Work, **changes: Any) -> Outcome:
    fields: dict[str, Any] = {"cases": 3, "nmse_same_operands": 1e-14, "nmse_float": 4e-3}
    return Outcome(work, **fields | changes)


def row(work: Work, shape: Size = HOME, **changes: Any) -> Row:
    turn = WEIGHT_FORMATS.index(work.format)
    times = {"kernel_us": 20.0 + turn, "total_us": 30.0, "x_parent": 1.5 + turn / 10}
    return pretended.row(work, shape, **times | changes)


def printed(table: tables.Table) -> list[list[str]]:
    """The cells of each line."""
    return [list(line.cells) for line in table.lines]


def test_checks_are_folded_to_one_line_for_each_step_and_family() -> None:
    table = report.folded("title", [outcome(work) for work in WORKS], ())
    heads = [column.name for column in table.columns]
    assert heads == ["step", "name", "A", *WEIGHT_FORMATS, "verdict"]
    assert printed(table) == [
        ["1", "naive_w4a16", "A16", *["1.0e-14"] * 5, "ok, 15 cases"],
        ["3", "shared_tiled", "A16", *["1.0e-14"] * 5, "ok, 15 cases"],
        ["3", "shared_tiled", "A8", *["1.0e-14"] * 5, "ok, 15 cases"],
    ]


def test_a_format_that_a_step_lacks_is_absent_and_one_that_fails_is_named() -> None:
    one, other = find(1), find(2)
    works = (Work(one, "A16", "q4_0"), Work(one, "A16", "q4_k"), Work(other, "A8", "q4_0"))
    bad = outcome(works[1], failures=("it is wrong",))
    table = report.folded("", [outcome(works[0]), bad, outcome(works[2])], ())
    assert [column.name for column in table.columns][3:-1] == ["q4_0", "q4_k"]
    assert printed(table)[0][3:] == ["1.0e-14", "FAILED", "FAILED q4_k"]
    assert printed(table)[1][3:] == ["1.0e-14", "-", "ok, 3 cases"]
    assert [line.tone for line in table.lines] == ["bad", ""]
    assert report.failed([outcome(works[0]), bad], ()) == {1}


def test_measured_steps_are_folded_with_times_and_medians() -> None:
    rows = [row(work) for work in WORKS]
    table = report.folded("", [outcome(work) for work in WORKS], rows)
    heads = [column.name for column in table.columns]
    assert heads[3:] == ["MxNxK", *WEIGHT_FORMATS, "x parent", "x cuBLAS", "of limit", "verdict"]
    times = ["20.0", "21.0", "22.0", "23.0", "24.0"]
    assert printed(table)[0] == [
        *("1", "naive_w4a16", "A16", "512x4096x4096"),
        *times,
        *("1.70x", "0.50x", "25 %", "ok, 15 cases"),
    ]


def test_a_step_measured_at_two_shapes_has_a_line_for_each() -> None:
    works = select((find(2),), ["q4_0"])
    rows = [row(works[0], shape) for shape in (HOME, (1, 4096, 14336))]
    table = report.folded("", [outcome(works[0])], rows)
    assert [cells[3] for cells in printed(table)] == ["512x4096x4096", "1x4096x14336"]


def test_a_failed_row_is_no_time() -> None:
    works = select((find(2),), ["q4_0", "q8_0"])
    bad = row(works[1], status="failed", why="above the limit", kernel_us=None, x_cublas=None)
    half = row(works[0], output="float16", kernel_us=1.0)
    outcomes = [outcome(work) for work in works]
    table = report.folded("", outcomes, [row(works[0]), half, bad])
    assert printed(table)[0][4:6] == ["20.0", "FAILED"], "a float16 C is not in this table"
    assert printed(table)[0][-1] == "FAILED q8_0"
    assert report.failed(outcomes, [bad]) == {2}
    (sentence,) = report.sentences(Outcomes(outcomes), [bad])
    assert sentence == "step 2 W8A8 q8_0 at 512x4096x4096: above the limit"


def test_the_long_table_has_a_line_for_each_format() -> None:
    rows = [row(work) for work in WORKS]
    table = report.run_table("", [outcome(work) for work in WORKS], rows, asked={3})
    assert len(table.lines) == 15
    assert [line.tone for line in table.lines] == ["faint"] * 5 + [""] * 10
    cells = dict(zip((c.name for c in table.columns), table.lines[0].cells, strict=True))
    assert cells["kernel us"] == "20.0"
    assert cells["NMSE, kernel"] == "-", "these rows have none"
    assert cells["verdict"] == "ok, 3 cases"
    assert "A to C" not in cells
    both = report.run_table("", [], [rows[0], row(WORKS[0], output="float16")])
    assert [line.cells[4] for line in both.lines] == ["float32 to float32", "float32 to float16"]


@pytest.mark.parametrize(
    ("outcomes", "rows", "ok"),
    [
        (Outcomes([outcome(WORKS[0])]), [row(WORKS[0])], True),
        (Outcomes([outcome(WORKS[0], failures=("no",))]), [], False),
        (Outcomes([outcome(WORKS[0])], broken="the GPU is gone"), [], False),
        (Outcomes([outcome(WORKS[0])]), [row(WORKS[0], status="failed", why="no")], False),
    ],
)
def test_json_has_all_of_it(outcomes: Outcomes, rows: list[Row], ok: bool) -> None:
    data = json.loads(report.as_json("A GPU", outcomes, rows, None), parse_constant=pytest.fail)
    assert (data["machine"], data["ok"], data["broken"]) == ("A GPU", ok, outcomes.broken)
    assert len(data["checks"]) == len(outcomes.each)
    assert [one["status"] for one in data["rows"]] == [one.status for one in rows]
    assert "tensor" not in data


def test_json_has_no_nan() -> None:
    bad = Outcomes([outcome(WORKS[0], nmse_same_operands=math.inf, nmse_float=math.nan)])
    data = json.loads(report.as_json("", bad, [], None), parse_constant=pytest.fail)
    assert data["checks"][0]["nmse_same_operands"] is None
