"""Tables as text and as Markdown, progress and numbers in cells."""

from __future__ import annotations

import io

import pytest

from results.render import table
from results.render.table import Column, Line, Table

EXAMPLE = Table(
    (Column("step"), Column("idea", words=True), Column("us")),
    (Line(("1", "naive", "12.5")), Line(("10", "a [long] idea", "-"), "bad")),
    title="A title",
    notes=("a note",),
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_one_table_as_text_and_as_markdown() -> None:
    assert table.plain(EXAMPLE) == (
        "A title\n\n"
        "step  idea             us\n"
        "----  -------------  ----\n"
        "   1  naive          12.5\n"
        "  10  a [long] idea     -\n"
        "a note"
    )
    assert table.markdown(EXAMPLE) == (
        "A title\n\n"
        "| step | idea | us |\n"
        "|--:|:--|--:|\n"
        "| 1 | naive | 12.5 |\n"
        "| 10 | a [long] idea | - |\n\n"
        "a note"
    )
    columns = (Column("n"), Column("double", lambda n: str(2 * n)))
    made = table.of_records(columns, (1, 4), tone=lambda n: "bad" if n > 2 else "")
    assert made.lines == (Line(("1", "2")), Line(("4", "8"), "bad"))
    with pytest.raises(ValueError, match="2 cells for 1 columns"):
        Table((Column("a"),), (Line(("1", "2")),))


def test_a_terminal_gets_colours_unless_it_asks_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = Terminal()
    table.show(EXAMPLE, coloured)
    assert "\x1b[1;31m" in coloured.getvalue()
    assert "a [long] idea" in coloured.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    without = Terminal()
    table.show(EXAMPLE, without)
    assert "31m" not in without.getvalue()
    monkeypatch.setenv("COLUMNS", "20")
    narrow = Terminal()
    table.show(EXAMPLE, narrow)
    assert "  10  a [long] idea     -" in narrow.getvalue(), "nothing is cut"


def test_progress_is_for_terminals_only() -> None:
    terminal, pipe = Terminal(), io.StringIO()
    for file in (terminal, pipe):
        shown = table.Progress(12, file)
        shown("step 1")
        shown.clear()
    assert "[ 1/12] step 1" in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b[2K")
    assert pipe.getvalue() == ""


def test_numbers_in_cells() -> None:
    numbers = (0.00042, 0.042, 0.5, 0.996, 1, 9.999, 12, 99.97, 188.4, 12345.6)
    assert [table.number(x) for x in numbers] == [
        *("0.00042", "0.042", "0.50", "1.00", "1.00", "10.0", "12.0", "100", "188", "12346"),
    ]
    assert [table.cell(x) for x in (None, float("nan"), 1.2345)] == ["-", "-", "1.23"]
    ratios = (None, 0.5, 1.018, 19.4, 53.2)
    assert [table.ratio(x) for x in ratios] == ["-", "0.50x", "1.02x", "19.4x", "53x"]
    assert [table.percent(x) for x in (None, 0.004, 0.42)] == ["-", "0.4 %", "42 %"]
    errors = (None, 0.0, 1.234e-12, float("inf"))
    assert [table.scientific(x) for x in errors] == ["-", "0", "1.2e-12", "inf"]
    assert [table.span(x) for x in ((), (None, 2.0), (2.0, 1.5))] == [
        "-",
        "2.00x",
        "1.50x to 2.00x",
    ]
