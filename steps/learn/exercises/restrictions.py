"""What a kernel may not have of Python, found in its text before it runs; and what it prints.

Numba would refuse it too, in sixty lines of its own.
"""

from __future__ import annotations

import ast
import contextlib
import linecache
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, TextIO

from steps.learn.exercises.trial import Diagnosis

_TABLE: Final = (
    (
        (ast.Import, ast.ImportFrom),
        "a kernel cannot import",
        "Import it at the top of the file, outside of the kernel.",
    ),
    (
        (ast.Global, ast.Nonlocal),
        "a kernel cannot set a name outside of it",
        "Threads share arrays alone: store to one, or use a name of the kernel's own.",
    ),
    (
        (ast.Try, ast.TryStar, ast.With),
        "a kernel has no exceptions",
        "Ask first, with an `if`, whether the index or the value is one that is allowed.",
    ),
    (
        (ast.List, ast.ListComp, ast.Set, ast.SetComp, ast.Dict, ast.DictComp, ast.GeneratorExp),
        "a kernel has no lists, sets and dicts",
        "Values of one thread that change are a cuda.local.array(4, float32), those that do not "
        "a tuple.",
    ),
    (
        (ast.JoinedStr,),
        "a kernel cannot make strings",
        "Leave the f-string out: print takes values, and an `assert` a plain string.",
    ),
    (
        (ast.Yield, ast.YieldFrom, ast.Await, ast.ClassDef),
        "a kernel cannot do that",
        "Numba compiles functions of numbers and arrays.",
    ),
)

PRINTED: Final = 12  # lines that kernels print, of which more are only counted


def not_compiled(text: str, rows: Sequence[int], path: Path) -> Diagnosis | None:
    """The first thing in a kernel or device function of the text that is never compiled. rows: the
    lines' places in the file at `path`."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef) or not any(map(_is_jit, node.decorator_list)):
            continue
        for part in ast.walk(node):
            for kinds, what, advice in _TABLE:
                if isinstance(part, kinds):
                    line = rows[getattr(part, "lineno", node.lineno) - 1]
                    source = linecache.getline(str(path), line).strip()
                    said = f"{path.name}:{line} `{source}`: {what}."
                    return Diagnosis("not compiled", line, (said, advice))
    return None


def _is_jit(decorator: ast.expr) -> bool:
    return "jit" in ast.unparse(decorator)


class _Few:
    """A stream that passes some lines on, and counts the others."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.lines = stream, 0

    def write(self, text: str) -> int:
        for line in text.splitlines(keepends=True):
            if self.lines < PRINTED:
                self.stream.write(line)
            self.lines += line.endswith("\n")
        return len(text)

    def flush(self) -> None:
        self.stream.flush()


@contextlib.contextmanager
def few_lines() -> Iterator[None]:
    """Of what is printed meanwhile the first lines and a count: threads of a kernel are many."""
    few = _Few(sys.stdout)
    try:
        with contextlib.redirect_stdout(few):  # type: ignore[type-var]
            yield
    finally:
        if few.lines > PRINTED:
            print(f"... and {few.lines - PRINTED} lines more that the kernel prints")
