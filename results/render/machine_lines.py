"""A step's source beside its machine code: which instructions are of which line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from results.render.markup import Code, trimmed
from steps.registry import HOLE


@dataclass(frozen=True, slots=True)
class Instructions:
    """Neighbouring instructions of one line of the source; 0 where the compiler does not say."""

    line: int
    texts: list[str]


@dataclass(frozen=True, slots=True)
class SourceLine:
    code: Code
    instructions: int  # of this line


@dataclass(frozen=True, slots=True)
class Beside:
    """The lines of a kernel, and its instructions in their order."""

    source: list[SourceLine]
    machine: list[Instructions]


def beside(code: Sequence[Code], listing: Sequence[tuple[int | None, str]]) -> Beside:
    """The lines of a file from the first that has instructions to the last, without the marks of
    its exercise."""
    of_line = Counter(line for line, _ in listing if line)
    if not of_line:
        return Beside([], [])
    first, last = min(of_line), max(of_line)
    own = [each for each in code if first <= each.number <= last and not HOLE.match(each.text)]
    runs = groupby(listing, key=lambda each: each[0] or 0)
    return Beside(
        [SourceLine(each, of_line[each.number]) for each in trimmed(own)],
        [Instructions(line, [text for _, text in run]) for line, run in runs],
    )
