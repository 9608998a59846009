"""Tables and progress for a person at a terminal, plain text for everything else.

With `rich` installed and stdout a terminal, a table has colours (NO_COLOR is honoured); in a pipe,
or without `rich`, the same cells come out as aligned plain text, never wrapped, never cut.
Progress goes to stderr, and only where that is a terminal: logs stay clean.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TextIO

Tone = Literal["", "good", "bad", "faint"]
_STYLES: Final[dict[str, str]] = {"good": "green", "bad": "bold red", "faint": "dim", "": ""}
ABSENT: Final = "-"
"""What a cell says where nothing was measured."""


@dataclass(frozen=True, slots=True)
class Column:
    """A heading; numbers are aligned right, words left."""

    name: str
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
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        for line in self.lines:
            if len(line.cells) != len(self.columns):
                raise ValueError(
                    f"{len(line.cells)} cells for {len(self.columns)} columns: {line.cells}"
                )


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


def show(table: Table, file: TextIO | None = None) -> None:
    """Print the table: with `rich` on a terminal, plain elsewhere."""
    file = file or sys.stdout
    if not (file.isatty() and _drawn(table, file)):
        print(plain(table), file=file)


def _drawn(table: Table, file: TextIO) -> bool:
    """Draw with rich; False where it is not installed or the table would not fit the terminal."""
    try:
        from rich import box
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table as RichTable
    except ImportError:
        return False
    console = Console(file=file)
    drawn = RichTable(box=box.SIMPLE_HEAD)
    for column in table.columns:
        justify: Literal["left", "right"] = "left" if column.words else "right"
        drawn.add_column(column.name, justify=justify, no_wrap=True)
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
        if self._shown:
            width = len(str(self.total))
            print(
                f"\r\x1b[2K[{self.done:{width}}/{self.total}] {what}",
                end="",
                flush=True,
                file=self._file,
            )

    def clear(self) -> None:
        if self._shown:
            print("\r\x1b[2K", end="", flush=True, file=self._file)


@contextlib.contextmanager
def progress(total: int) -> Iterator[Progress]:
    """A `Progress` whose line is gone afterwards, whatever happened."""
    shown = Progress(total)
    try:
        yield shown
    finally:
        shown.clear()


# --- numbers as cells -----------------------------------------------------------------------------


def figure(value: float | None, digits: int = 3) -> str:
    """Three significant digits without an exponent: 0.0123, 1.23, 123, 12345."""
    if value is None or not math.isfinite(value):
        return ABSENT
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}"


def error(value: float | None) -> str:
    """An error in scientific notation; infinite ones are said, not hidden."""
    if value is None:
        return ABSENT
    return "0" if value == 0 else f"{value:.1e}"


def microseconds(us: float | None) -> str:
    """12.3 us, 1.23 ms, 1.23 s."""
    if us is None:
        return ABSENT
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{figure(us / size)} {unit}"
    return f"{figure(us)} us"


def share(value: float | None) -> str:
    """A part of the whole in per cent."""
    return ABSENT if value is None else f"{100 * value:.0f} %"


def times(value: float | None) -> str:
    """A ratio: 1.25x, 0.0013x."""
    if value is None:
        return ABSENT
    return f"{value:.2f}x" if value >= 0.1 else f"{figure(value, 2)}x"
