"""Tables and links of Markdown pages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def grid(head: Sequence[str], align: str, lines: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table. `align` has a letter per column: l or r."""
    rule = "|".join(":--" if side == "l" else "--:" for side in align)
    rows = ["| " + " | ".join(cells) + " |" for cells in lines]
    return ["| " + " | ".join(head) + " |", f"|{rule}|", *rows]


def link(path: Path, base: Path) -> str:
    """A file as a page in the folder `base` links it."""
    path = path.resolve()
    return (path.relative_to(base) if path.is_relative_to(base) else Path(path.name)).as_posix()
