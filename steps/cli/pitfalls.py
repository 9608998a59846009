"""The command `pitfalls`: the museum of wrong kernels, and what caught each."""

from __future__ import annotations

import sys
import textwrap
from argparse import Namespace
from typing import Final

from results.render import table
from results.render.table import Column, Line, Table
from steps.learn.pitfalls import Finding, Pitfall, examine, pitfalls
from steps.learn.pitfalls.exhibit import error_of, value_of

WIDTH: Final = 100
COLUMNS: Final = (
    *(Column(""), Column("pitfall", words=True), Column("format", words=True), Column("right")),
    *(Column("wrong"), Column("NMSE"), Column("caught by", words=True)),
)


def show(_: Namespace) -> int:
    """A table and the stories; 1 if the checks miss a bug."""
    museum = [(pitfall, examine(pitfall)) for pitfall in pitfalls()]
    note = "right, wrong: the golden block. NMSE: a small random problem."
    table.show(Table(COLUMNS, tuple(_line(*pair) for pair in museum), notes=(note,)))
    for pair in museum:
        _tell(*pair)
    escaped = [str(pitfall.number) for pitfall, finding in museum if not finding.caught]
    if escaped:
        print(f"not caught as its story says: pitfall {', '.join(escaped)}", file=sys.stderr)
    return 1 if escaped else 0


def _line(pitfall: Pitfall, finding: Finding) -> Line:
    cells = (
        f"{pitfall.number}",
        pitfall.title,
        pitfall.format.upper(),
        f"{finding.expected:g}",
        value_of(finding),
        error_of(finding.nmse),
        ", ".join(finding.layers) if finding.caught else "NOT CAUGHT",
    )
    return Line(cells, "" if finding.caught else "bad")


def _tell(pitfall: Pitfall, finding: Finding) -> None:
    """The story in one paragraph, and the sentences of the first two layers."""
    print(f"\n{pitfall.number}. {pitfall.title}")
    story = f"{' '.join(pitfall.story.split())} {finding.aside}".strip()
    print(textwrap.fill(story, WIDTH, initial_indent="   ", subsequent_indent="   "))
    for layer, said in [*finding.layers.items()][:2]:
        heard = f"{layer}: {said}"
        print(textwrap.fill(heard, WIDTH, initial_indent="   > ", subsequent_indent="     "))
