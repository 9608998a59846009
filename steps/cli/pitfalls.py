"""The command `pitfalls`: the museum of wrong kernels, and what caught each."""

from __future__ import annotations

import sys
import textwrap
from argparse import Namespace
from typing import Final

from results.render import table
from results.render.table import Column
from steps.learn.pitfalls import Finding, Pitfall, examine, pitfalls
from steps.learn.pitfalls.exhibit import error_of, value_of

WIDTH: Final = 100
COLUMNS: Final = (
    Column("", lambda pair: str(pair[0].number)),
    Column("pitfall", lambda pair: pair[0].title, words=True),
    Column("format", lambda pair: pair[0].format.upper(), words=True),
    Column("right", lambda pair: f"{pair[1].expected:g}"),
    Column("wrong", lambda pair: value_of(pair[1])),
    Column("NMSE", lambda pair: error_of(pair[1].nmse)),
    Column(
        "caught by",
        lambda pair: ", ".join(pair[1].layers) if pair[1].caught else "NOT CAUGHT",
        words=True,
    ),
)


def show(_: Namespace) -> int:
    """A table and the stories; 1 if the checks miss a bug."""
    museum = [(pitfall, examine(pitfall)) for pitfall in pitfalls()]
    note = "right, wrong: the golden block. NMSE: a small random problem."
    table.show(
        table.of_records(
            COLUMNS, museum, notes=(note,), tone=lambda pair: "" if pair[1].caught else "bad"
        )
    )
    for pair in museum:
        _tell(*pair)
    escaped = [str(pitfall.number) for pitfall, finding in museum if not finding.caught]
    if escaped:
        print(f"not caught as its story says: pitfall {', '.join(escaped)}", file=sys.stderr)
    return 1 if escaped else 0


def _tell(pitfall: Pitfall, finding: Finding) -> None:
    """The story in one paragraph, and the sentences of the first two layers."""
    print(f"\n{pitfall.number}. {pitfall.title}")
    story = " ".join(pitfall.story.split())
    print(textwrap.fill(story, WIDTH, initial_indent="   ", subsequent_indent="   "))
    for layer, said in [*finding.layers.items()][:2]:
        heard = f"{layer}: {said}"
        print(textwrap.fill(heard, WIDTH, initial_indent="   > ", subsequent_indent="     "))
