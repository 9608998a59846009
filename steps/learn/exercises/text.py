"""A step's file with holes, as text: made of the step, and read back when somebody has filled some.

A hole is a phase of a kernel, of its device functions or of its launch. A phase begins with a
comment such as `# --- multiply` and goes on to the next such comment, or to where the indentation
falls below it. A phase that begins with one that has phases of its own is a heading, no hole.

    # --- multiply: token ty, feature tx       # TODO 2: multiply: token ty, feature tx
    for j in range(BLOCK):                     pass
        acc += ...                             # end of TODO 2
"""

from __future__ import annotations

import ast
import io
import re
import stat
import textwrap
import tokenize
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final

from steps.contract import Step
from steps.registry import find, ladder, source

WIDTH: Final = 100
MOST_BYTES: Final = 1 << 20  # of an exercise
INSTEAD: Final = "pass"  # stands in for the step's own lines
_PHASE: Final = re.compile(r" +# --- (?P<text>.*\S)")
_TODO: Final = re.compile(r" *# (?P<end>end of )?TODO (?P<number>\d+)\b")
_NUMBER: Final = re.compile(r"^ {4}number=(\d+),", re.MULTILINE)
_GOES_ON: Final = (")", "]", "}", "else:", "elif ", "except", "finally:")  # with the line before


class ExerciseError(Exception):
    """A file that is no exercise any more; its text is the one sentence the user sees."""


@dataclass(frozen=True, slots=True)
class Hole:
    """A phase of a step, or what stands in its place in an exercise. `first`: the line of its
    comment, from 1; `indent`: the blanks before it; `body`: the lines behind it, in an exercise
    with the rest of the comment; `text`: of a phase, its comment in one line."""

    number: int
    first: int
    indent: str
    body: tuple[str, ...]
    text: str = ""
    comment_lines: int = 1

    @property
    def last(self) -> int:
        """The first line behind it: in an exercise that of the second marker."""
        return self.first + self.comment_lines + len(self.body)


# --- phases of a step -----------------------------------------------------------------------------


def phases(lines: Sequence[str]) -> Iterator[Hole]:
    """The phases of a file that are holes, numbered in order."""
    number = 0
    for row, line in enumerate(lines):
        found = _PHASE.match(line)
        if found is None:
            continue
        indent, comment = _indent(line), [found["text"]]
        start = row + 1
        while _is_comment(lines[start]) and not _PHASE.match(lines[start]):
            comment.append(lines[start].strip()[1:].strip())
            start += 1
        body = lines[start : _end(lines, start, len(indent))]
        if body:
            number += 1
            yield Hole(number, row + 1, indent, tuple(body), " ".join(comment), start - row)


def _end(lines: Sequence[str], start: int, indent: int) -> int:
    """Behind the last line of a phase whose first is `start`: without a `return` that ends it and
    tells what the phase is to make, and without blank lines and comments."""
    statements: list[int] = []  # rows at which statements of its own indentation begin
    end = start
    for row in range(start, len(lines)):
        line = lines[row]
        if not line.strip():
            continue
        own = len(_indent(line))
        if own < indent or (own == indent and _PHASE.match(line)):
            break
        if _PHASE.match(line):  # within a statement that has phases of its own
            end = statements.pop()
            break
        if own == indent and not _is_comment(line) and not line.strip().startswith(_GOES_ON):
            statements.append(row)
        end = row + 1
    if len(statements) > 1 and lines[statements[-1]].strip().startswith("return"):
        end = min(end, statements[-1])
    while end > start and (not lines[end - 1].strip() or _is_comment(lines[end - 1])):
        end -= 1
    return end


@cache
def solutions(number: int) -> dict[int, Hole]:
    """Hole -> the step's own lines; none where its kernel has no phases."""
    return {hole.number: hole for hole in phases(source(find(number)))}


@cache
def numbers() -> tuple[int, ...]:
    """The steps that have exercises."""
    return tuple(step.number for step in ladder() if solutions(step.number))


@cache
def names_made(number: int) -> dict[int, tuple[str, ...]]:
    """Hole -> the names that it sets and that are read behind it before they are set again, or in
    the next turn of a loop around it."""
    tree = ast.parse("".join(source(find(number))))
    return {hole.number: _names_made(tree, hole) for hole in solutions(number).values()}


def _names_made(tree: ast.Module, hole: Hole) -> tuple[str, ...]:
    own = range(hole.first + hole.comment_lines, hole.last)

    def around(kind: Any, within: ast.AST) -> list[Any]:
        every = (node for node in ast.walk(within) if isinstance(node, kind))
        return [one for one in every if one.lineno < own.start and own.stop <= one.end_lineno + 1]

    function = max(around(ast.FunctionDef, tree), key=lambda one: one.lineno)
    names = [one for one in ast.walk(function) if isinstance(one, ast.Name)]
    augmented = {id(one.target) for one in ast.walk(function) if isinstance(one, ast.AugAssign)}
    made = {one.id: None for one in names if one.lineno in own and _sets(one)}

    def is_read(name: str, turn: range) -> bool:
        """Whether it is read, before it is set, behind the hole or in the next turn of a loop."""
        uses = [one for one in names if one.id == name and one.lineno in turn]
        others = [one for one in uses if one.lineno not in own]
        if not others:
            return False
        following = min(others, key=lambda one: (one.lineno < own.start, one.lineno, _sets(one)))
        return not _sets(following) or id(following) in augmented

    loops = around((ast.For, ast.While), function)
    turns = [range(one.lineno, one.end_lineno + 1) for one in loops]
    turns.append(range(own.start, (function.end_lineno or 0) + 1))
    return tuple(name for name in sorted(made) if any(is_read(name, turn) for turn in turns))


def _sets(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def outline(hole: Hole) -> str:
    """The step's own lines without their operands, and what their comments say."""
    text = textwrap.dedent("".join(hole.body))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [one.string for one in tokens if one.type == tokenize.COMMENT]
    code = ast.unparse(_Outline().visit(ast.parse(text)))
    return "\n".join([*comments, *code.splitlines()])


class _Outline(ast.NodeTransformer):
    """Keeps what is called, with which names, and what is set."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        args = [ast.Constant(...) if isinstance(one, ast.Constant) else one for one in node.args]
        return ast.Call(node.func, args, node.keywords)

    def _omit(self, node: ast.expr) -> ast.AST:
        return ast.Constant(...)

    visit_BinOp = visit_BoolOp = visit_Compare = visit_UnaryOp = visit_IfExp = _omit

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        return ast.Subscript(node.value, ast.Constant(...), node.ctx)


# --- exercises ------------------------------------------------------------------------------------


def make(step: Step, solved: Collection[int] = ()) -> str:
    """The exercise of a step; the holes `solved` hold the step's own lines.

    ExerciseError for a step that has none.
    """
    if step.number not in numbers():
        raise ExerciseError(
            f"step {step.number} has no exercise: these have one: {', '.join(map(str, numbers()))}"
        )
    lines, made = source(step), []
    at = 0
    for hole in solutions(step.number).values():
        made += lines[at : hole.first - 1]
        made += _todo(hole, names_made(step.number)[hole.number])
        made += hole.body if hole.number in solved else [f"{hole.indent}{INSTEAD}\n"]
        made.append(f"{hole.indent}# end of TODO {hole.number}\n")
        at = hole.last - 1
    return "".join((*made, *lines[at:]))


def _todo(hole: Hole, names: Sequence[str]) -> list[str]:
    """The comment that says what a hole asks for."""
    text = hole.text + (f". What follows uses {', '.join(names)}" if names else "")
    lines = textwrap.wrap(
        text,
        WIDTH,
        initial_indent=f"{hole.indent}# TODO {hole.number}: ",
        subsequent_indent=f"{hole.indent}#   ",
        break_on_hyphens=False,
    )
    return [f"{line}\n" for line in lines]


def _marked(lines: Sequence[str]) -> Iterator[Hole]:
    """The holes of an exercise. ExerciseError where a marker has lost its partner."""
    opened: Hole | None = None
    for row, line in enumerate(lines, start=1):
        found = _TODO.match(line)
        if found is None:
            continue
        number = int(found["number"])
        if not found["end"]:
            if opened is not None:
                raise _unpaired(opened)
            opened = Hole(number, row, _indent(line), ())
        elif opened is None or opened.number != number:
            raise ExerciseError(
                f"line {row} ends TODO {number}, which nothing begins: put `# TODO {number}` back "
                "above what you wrote for it"
            )
        else:
            yield replace(opened, body=tuple(lines[opened.first : row - 1]))
            opened = None
    if opened is not None:
        raise _unpaired(opened)


def _unpaired(hole: Hole) -> ExerciseError:
    return ExerciseError(
        f"TODO {hole.number} of line {hole.first} has no end: put `# end of TODO {hole.number}` "
        "back below what you wrote for it"
    )


@dataclass(frozen=True)
class Exercise:
    """A file that somebody works on. `path` is how messages call it."""

    path: Path
    text: str

    @classmethod
    def read(cls, path: Path) -> Exercise:
        """OSError where it cannot be read, ExerciseError where it is no text."""
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise ExerciseError(f"{path} is a folder, pipe or device: name a file")
        if found.st_size > MOST_BYTES:
            raise ExerciseError(
                f"{path} has {found.st_size} bytes: an exercise has {MOST_BYTES} at most"
            )
        try:
            return cls(path, path.read_text(encoding="utf-8-sig"))
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
        known = solutions(self.number) if self.reference is not None else {}
        return {hole.number: hole for hole in _marked(self.lines) if hole.number in known}

    @cached_property
    def unfilled(self) -> tuple[int, ...]:
        """Holes that hold what stood in them at the beginning, or nothing."""
        return tuple(
            n
            for n, hole in self.holes.items()
            if {text for _, text in _code_lines(hole.body)} <= {INSTEAD}
        )

    @property
    def filled(self) -> tuple[int, ...]:
        return tuple(n for n in self.holes if n not in self.unfilled)

    def hole_at(self, line: int) -> int | None:
        """The hole that a line of the file lies in."""
        return next((n for n, hole in self.holes.items() if hole.first <= line <= hole.last), None)

    def code_line(self, number: int) -> int:
        """The first line of code in a hole: where to look, or to begin."""
        hole = self.holes[number]
        return hole.first + next((i for i, _ in _code_lines(hole.body)), 0)

    def composed(self, solved: Collection[int]) -> tuple[str, list[int]]:
        """The text with the step's own lines in some holes, and of each line where it comes from:
        its line in the file, which of the step's own lines is the hole's first line of code."""
        text: list[str] = []
        rows: list[int] = []
        at = 0
        for hole in self.holes.values():
            if hole.number in solved:
                code = max(self.code_line(hole.number), hole.first + 1)
                text += self.lines[at : code - 1]
                rows += range(at + 1, code)
                body = solutions(self.number)[hole.number].body
                text += body
                rows += [code] * len(body)
                at = hole.last - 1
        text += self.lines[at:]
        rows += range(at + 1, len(self.lines) + 1)
        return "".join(text), rows


def _code_lines(lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    """(which line, from 1; its text) of those that are neither blank nor a comment alone."""
    for i, line in enumerate(lines, start=1):
        if line.strip() and not _is_comment(line):
            yield i, line.strip()


def _is_comment(line: str) -> bool:
    return line.lstrip().startswith("#")


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]
