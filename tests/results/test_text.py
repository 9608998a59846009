"""Text tables, progress and numbers in cells, for terminals and for pipes."""

from __future__ import annotations

import io
import sys

import pytest

from results.render import text as table
from results.render.text import Column, Line, Table

EXAMPLE = Table(
    (Column("step"), Column("idea", words=True), Column("us")),
    (Line(("1", "naive", "12.5")), Line(("10", "a [long] idea", "-"), "bad")),
    title="A title",
    notes=("a note",),
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_tables_are_aligned_and_complete() -> None:
    assert table.plain(EXAMPLE) == (
        "A title\n\n"
        "step  idea             us\n"
        "----  -------------  ----\n"
        "   1  naive          12.5\n"
        "  10  a [long] idea     -\n"
        "a note"
    )


def test_a_terminal_gets_colours_unless_it_asks_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
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


def test_a_narrow_terminal_cuts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    narrow = Terminal()
    table.show(EXAMPLE, narrow)
    assert "  10  a [long] idea     -" in narrow.getvalue()


def test_tables_do_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("rich", "rich.console", "rich.table"):
        monkeypatch.setitem(sys.modules, name, None)
    terminal = Terminal()
    table.show(EXAMPLE, terminal)
    assert terminal.getvalue() == table.plain(EXAMPLE) + "\n"


def test_a_line_must_fit_its_columns() -> None:
    with pytest.raises(ValueError, match="2 cells for 1 columns"):
        Table((Column("a"),), (Line(("1", "2")),))


def test_progress_is_for_terminals_only() -> None:
    terminal, pipe = Terminal(), io.StringIO()
    for file in (terminal, pipe):
        shown = table.Progress(12, file)
        shown("step 1")
        shown.clear()
    assert "[ 1/12] step 1" in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b[2K")
    assert pipe.getvalue() == ""


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (table.figure(0.01234), "0.0123"),
        (table.figure(1.2345), "1.23"),
        (table.figure(123.45), "123"),
        (table.figure(12345.6), "12346"),
        (table.figure(None), "-"),
        (table.figure(float("nan")), "-"),
        (table.microseconds(12.34), "12.3 us"),
        (table.microseconds(1234.5), "1.23 ms"),
        (table.microseconds(2.5e6), "2.50 s"),
        (table.share(0.256), "26 %"),
        (table.times(1.25), "1.25x"),
        (table.times(0.00126), "0.0013x"),
        (table.error(1.234e-12), "1.2e-12"),
        (table.error(float("inf")), "inf"),
    ],
)
def test_numbers_in_cells(shown: str, expected: str) -> None:
    assert shown == expected
