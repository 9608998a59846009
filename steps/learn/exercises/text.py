"""A step's file with holes, as text: made of the step, and read back when somebody has filled some.

In a step's file a hole lies between two comments, in an exercise between two others:

    # hole 2                                    # TODO 2: add up the products of ...
    for j in range(BLOCK):                      total = int32(0)
        total = ...                             # end of TODO 2
    # end of hole 2

A line or two stand in for what was there, so that the file can be imported and a reader sees which
names the rest of the kernel wants.
"""

from __future__ import annotations

import ast
import re
import textwrap
import tomllib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Final

from steps.contract import Step
from steps.registry import HOLE, find, ladder, path_of, source

WIDTH: Final = 100
_TODO: Final = re.compile(r" *# (?P<end>end of )?TODO (?P<number>\d+)\b")
_NUMBER: Final = re.compile(r"^ {4}number=(\d+),", re.MULTILINE)
_FOLDER: Final = Path(__file__).parent


class ExerciseError(Exception):
    """A file that is no exercise any more; its text is the one sentence the user sees."""


@dataclass(frozen=True, slots=True)
class Task:
    """What one hole asks for: `todo` stands in the exercise, `hint` is shown on request, `instead`
    are the lines that stand in for the step's own."""

    todo: str
    hint: str
    instead: str = "pass"


@dataclass(frozen=True, slots=True)
class Hole:
    """The lines between two markers: `first` is the line of the first marker, from 1, `body` is
    what stands between them, `indent` the blanks before the markers."""

    number: int
    first: int
    indent: str
    body: tuple[str, ...]

    @property
    def last(self) -> int:
        """The line of the second marker."""
        return self.first + len(self.body) + 1


def numbers() -> tuple[int, ...]:
    """The steps that have exercises."""
    return tuple(step.number for step in ladder() if _tasks_file(step.number).exists())


def _tasks_file(number: int) -> Path:
    return _FOLDER / f"step{number:02d}.toml"


@cache
def tasks(number: int) -> dict[int, Task]:
    """Hole -> what it asks for."""
    data = tomllib.loads(_tasks_file(number).read_text(encoding="utf-8"))
    return {i: Task(**each) for i, each in enumerate(data["hole"], start=1)}


@cache
def solutions(number: int) -> dict[int, Hole]:
    """Hole -> the step's own lines."""
    return {hole.number: hole for hole in holes(text_of(find(number)), HOLE)}


def text_of(step: Step) -> list[str]:
    """The lines of the file that has its kernel, under the docstring of the lesson."""
    kernel, lesson = path_of(step), Path(__file__).parents[2] / f"{step.name}.py"
    lines = source(step)
    if kernel == lesson:
        return lines
    own = lesson.read_text(encoding="utf-8").splitlines(keepends=True)
    return [*own[: _docstring_ends(own)], *lines[_docstring_ends(lines) :]]


def _docstring_ends(lines: Sequence[str]) -> int:
    return ast.parse("".join(lines)).body[0].end_lineno or 0


def holes(lines: Sequence[str], marker: re.Pattern[str]) -> Iterator[Hole]:
    """The holes of a file. ExerciseError where a marker has lost its partner."""
    opened: tuple[int, int, str] | None = None  # number, line, indent
    for row, line in enumerate(lines, start=1):
        found = marker.match(line)
        if found is None:
            continue
        number, indent = int(found["number"]), line[: len(line) - len(line.lstrip())]
        if not found["end"]:
            if opened is not None:
                raise _unpaired(*opened[:2])
            opened = number, row, indent
        elif opened is None or opened[0] != number:
            raise ExerciseError(
                f"line {row} ends TODO {number}, which nothing begins: put `# TODO {number}` back "
                "above what you wrote for it"
            )
        else:
            yield Hole(*opened, tuple(lines[opened[1] : row - 1]))
            opened = None
    if opened is not None:
        raise _unpaired(*opened[:2])


def _unpaired(number: int, row: int) -> ExerciseError:
    return ExerciseError(
        f"TODO {number} of line {row} has no end: put `# end of TODO {number}` back below what you "
        "wrote for it"
    )


def make(step: Step, solved: Collection[int] = ()) -> str:
    """The exercise of a step; the holes `solved` hold the step's own lines.

    ExerciseError for a step that has none.
    """
    if step.number not in numbers():
        raise ExerciseError(
            f"step {step.number} has no exercise: these have one: {', '.join(map(str, numbers()))}"
        )
    lines, made = text_of(step), []
    at = 0
    for hole in solutions(step.number).values():
        made += lines[at : hole.first - 1]
        made += _todo(hole, tasks(step.number)[hole.number])
        made += hole.body if hole.number in solved else _instead(step.number, hole)
        made.append(f"{hole.indent}# end of TODO {hole.number}\n")
        at = hole.last
    return "".join((*made, *lines[at:]))


def _todo(hole: Hole, task: Task) -> list[str]:
    """The comment that says what a hole asks for, a sentence or list item a line."""
    start, rest = f"{hole.indent}# TODO {hole.number}: ", f"{hole.indent}#   "
    lines: list[str] = []
    for paragraph in task.todo.strip().splitlines():
        lines += textwrap.wrap(
            paragraph,
            WIDTH,
            initial_indent=rest if lines else start,
            subsequent_indent=rest,
            break_on_hyphens=False,
        )
    return [f"{line}\n" for line in lines]


def _instead(number: int, hole: Hole) -> list[str]:
    task = tasks(number)[hole.number]
    return [f"{hole.indent}{line}\n" for line in task.instead.strip().splitlines()]


@dataclass(frozen=True)
class Exercise:
    """A file that somebody works on. `path` is how messages call it."""

    path: Path
    text: str

    @classmethod
    def read(cls, path: Path) -> Exercise:
        """OSError where it cannot be read, ExerciseError where it is no text."""
        try:
            return cls(path, path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            raise ExerciseError(f"{path} is no Python file: it is not UTF-8 text") from None

    @cached_property
    def number(self) -> int:
        """The step that it is to become. ExerciseError where it does not say."""
        found = _NUMBER.search(self.text)
        if found is None:
            raise ExerciseError(
                f"{self.path} has no `STEP = Step(number=...` on lines of their own: make an "
                "exercise with `make exercise STEP=3`, or copy a step"
            )
        return int(found[1])

    @cached_property
    def reference(self) -> Step | None:
        """The step itself; None for a number that the ladder has not."""
        return next((step for step in ladder() if step.number == self.number), None)

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines(keepends=True)

    @cached_property
    def holes(self) -> dict[int, Hole]:
        """Those that are still between their markers, by number."""
        found = {hole.number: hole for hole in holes(self.lines, _TODO)}
        if self.number not in numbers():
            return {}
        return {n: hole for n, hole in found.items() if n in solutions(self.number)}

    @cached_property
    def unfilled(self) -> tuple[int, ...]:
        """Holes that hold what stood in them at the beginning, or nothing."""
        return tuple(n for n, hole in self.holes.items() if not self._is_filled(hole))

    @property
    def filled(self) -> tuple[int, ...]:
        return tuple(n for n in self.holes if n not in self.unfilled)

    def _is_filled(self, hole: Hole) -> bool:
        code = _code(hole.body)
        return bool(code) and code != _code(_instead(self.number, hole))

    def hole_at(self, line: int) -> int | None:
        """The hole that a line of the file lies in."""
        return next((n for n, hole in self.holes.items() if hole.first <= line <= hole.last), None)

    def code_line(self, number: int) -> int:
        """The first line of code in a hole: where to look, or to begin."""
        hole = self.holes[number]
        for row, line in enumerate(hole.body, start=hole.first + 1):
            if line.strip() and not _is_comment(line):
                return row
        return hole.first

    def composed(self, solved: Collection[int]) -> tuple[str, list[int]]:
        """The text with the step's own lines in some holes, and of each line where it comes from:
        its line in the file, which of the step's own lines is the hole's first line of code."""
        text: list[str] = []
        rows: list[int] = []
        at = 0
        for hole in self.holes.values():
            if hole.number not in solved:
                continue
            said = next((i for i, each in enumerate(hole.body) if not _is_comment(each)), 0)
            text += self.lines[at : hole.first + said]
            rows += range(at + 1, hole.first + said + 1)
            body = solutions(self.number)[hole.number].body
            text += body
            rows += [self.code_line(hole.number)] * len(body)
            at = hole.last - 1
        text += self.lines[at:]
        rows += range(at + 1, len(self.lines) + 1)
        return "".join(text), rows


def _code(lines: Sequence[str]) -> list[str]:
    """Lines without those that are blank or comments alone."""
    return [line.strip() for line in lines if line.strip() and not _is_comment(line)]


def _is_comment(line: str) -> bool:
    return line.lstrip().startswith("#")
