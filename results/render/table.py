"""A table is columns and lines, defined once: as text for a person, as Markdown for a page.

On a terminal a table has colours (NO_COLOR is honoured); in a pipe the same cells come out as
aligned plain text, never wrapped, never cut. `page.html.jinja` writes it as HTML. Cells, titles and
notes of tables for pages are Markdown: links, bold, code.

Progress goes to stderr, and only where that is a terminal: logs stay clean.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TextIO

Tone = Literal["", "good", "bad", "faint"]
_STYLES: Final[dict[str, str]] = {"good": "green", "bad": "bold red", "faint": "dim", "": ""}
ABSENT: Final = "-"  # what a cell says where nothing was measured


@dataclass(frozen=True, slots=True)
class Column:
    """A heading; numbers are aligned right, words left. `of`: its cell for a record."""

    name: str
    of: Callable[[Any], str] = str
    words: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """The cells of one row, as text, and how the row as a whole is meant."""

    cells: tuple[str, ...]
    tone: Tone = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Columns and lines; `title` above, `notes` below, one sentence a line."""

    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    title: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for line in self.lines:
            if len(line.cells) != len(self.columns):
                raise ValueError(
                    f"{len(line.cells)} cells for {len(self.columns)} columns: {line.cells}"
                )


def of_records(
    columns: Sequence[Column],
    records: Iterable[Any],
    title: str = "",
    notes: Sequence[str] = (),
    tone: Callable[[Any], Tone] = lambda _: "",
) -> Table:
    """A line for each record, with what each column makes of it."""
    lines = (Line(tuple(column.of(one) for column in columns), tone(one)) for one in records)
    return Table(tuple(columns), tuple(lines), title, tuple(notes))


def plain(table: Table) -> str:
    """The table as aligned text without trailing blanks."""
    rows = [tuple(c.name for c in table.columns), *(line.cells for line in table.lines)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.columns))]

    def text(cells: Sequence[str]) -> str:
        aligned = (
            cell.ljust(width) if column.words else cell.rjust(width)
            for cell, width, column in zip(cells, widths, table.columns, strict=True)
        )
        return "  ".join(aligned).rstrip()

    rule = "  ".join("-" * width for width in widths)
    body = [text(rows[0]), rule, *(text(row) for row in rows[1:])]
    return "\n".join([*([table.title, ""] if table.title else []), *body, *table.notes])


def markdown(table: Table) -> str:
    """The table as Markdown, its title and its notes as paragraphs."""
    rule = "|".join(":--" if column.words else "--:" for column in table.columns)
    rows = [[column.name for column in table.columns], *(line.cells for line in table.lines)]
    head, *body = ["| " + " | ".join(cells) + " |" for cells in rows]
    above = [table.title, ""] if table.title else []
    return "\n".join([*above, head, f"|{rule}|", *body, *(["", *table.notes] * bool(table.notes))])


def show(table: Table, file: TextIO | None = None) -> None:
    """Print the table: with colours on a terminal where it fits, plain elsewhere."""
    file = file or sys.stdout
    if not (file.isatty() and _drawn(table, file)):
        print(plain(table), file=file)


def _drawn(table: Table, file: TextIO) -> bool:
    """Draw with rich; False where the table would not fit the terminal."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table as RichTable

    console = Console(file=file)
    drawn = RichTable(box=box.SIMPLE_HEAD)
    for column in table.columns:
        drawn.add_column(column.name, justify="left" if column.words else "right", no_wrap=True)
    for line in table.lines:
        drawn.add_row(*map(escape, line.cells), style=_STYLES[line.tone])
    unlimited = console.options.update(width=10_000)
    if console.measure(drawn, options=unlimited).maximum > console.width:
        return False  # a long line that the terminal wraps loses nothing; a cell cut short does
    if table.title:
        console.print(escape(table.title), highlight=False)
    console.print(drawn)
    for note in table.notes:
        console.print(escape(note), highlight=False)
    return True


class Progress:
    """`[ 3/30] what is being done` on one line of a terminal's stderr; silent elsewhere."""

    def __init__(self, total: int, file: TextIO | None = None) -> None:
        self.total, self.done = total, 0
        self._file = file or sys.stderr
        self._shown = self._file.isatty()

    def __call__(self, what: str, done: int | None = None) -> None:
        """done: how many are, where it is not one more than before."""
        self.done = self.done + 1 if done is None else done
        self._put(f"[{self.done:{len(str(self.total))}}/{self.total}] {what}")

    def clear(self) -> None:
        self._put("")

    def _put(self, text: str) -> None:
        if self._shown:
            print(f"\r\x1b[2K{text}", end="", flush=True, file=self._file)


@contextlib.contextmanager
def progress(total: int) -> Iterator[Progress]:
    """A `Progress` whose line is gone afterwards, whatever happened."""
    shown = Progress(total)
    try:
        yield shown
    finally:
        shown.clear()


# --- numbers as cells -----------------------------------------------------------------------------


def number(x: float) -> str:
    """Three significant digits, no exponent, alike for neighbours: 0.042, 0.90, 1.20, 12.0, 188."""
    if 0 < x < 0.1:
        return f"{x:.{1 - math.floor(math.log10(x))}f}"
    return f"{x:.0f}" if x >= 99.95 else f"{x:.1f}" if x >= 9.995 else f"{x:.2f}"


def cell(value: float | None) -> str:
    return ABSENT if value is None or not math.isfinite(value) else number(value)


def whole(value: int | None) -> str:
    return ABSENT if value is None else str(value)


def ratio(value: float | None) -> str:
    """ "1.02x", "20x", "89x"."""
    return ABSENT if value is None else f"{value:.0f}x" if value >= 19.5 else f"{number(value)}x"


def percent(share: float | None) -> str:
    """ "12 %"; below one per cent with a digit after the point."""
    if share is None:
        return ABSENT
    return f"{100 * share:.0f} %" if share >= 0.0095 else f"{100 * share:.1f} %"


def scientific(value: float | None) -> str:
    """An error, such as "1.2e-12"; infinite ones are said, not hidden."""
    return ABSENT if value is None else f"{value:.1e}" if value else "0"


def span(values: Iterable[float | None], written: Callable[[float], str] = ratio) -> str:
    """From the least to the most, "2.10x to 2.40x"; "2.10x" where they agree, "-" for none."""
    known = [value for value in values if value is not None]
    ends = dict.fromkeys(written(end(known)) for end in (min, max)) if known else [ABSENT]
    return " to ".join(ends)


def dims(size: Sequence[int]) -> str:
    """ "512 x 4096 x 4096": M x N x K."""
    return " x ".join(map(str, size))
