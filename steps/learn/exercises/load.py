"""Imports the text of an exercise as a step, as if it stood among the steps.

A file that defines an engineered KERNEL has the place of the lesson that teaches it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType

from steps.contract import Kernel, Step
from steps.registry import find


class Unloadable(Exception):
    """The file cannot be imported; `line` of the file is where, `why` says what Python says."""

    def __init__(self, line: int, why: str):
        super().__init__(f"line {line}: {why}")
        self.line, self.why = line, why


def load(text: str, path: Path, rows: Sequence[int]) -> Step:
    """The STEP of the text, or that of its KERNEL; rows: its lines' places in the file at `path`,
    which messages and tracebacks name. Unloadable where Python refuses it."""

    def row(line: int | None) -> int:
        return rows[min(line or 1, len(rows)) - 1] if rows else 1

    name = f"exercise_{path.stem}"
    try:
        tree = ast.parse(text, str(path))
    except SyntaxError as error:
        raise Unloadable(row(error.lineno), error.msg) from None
    _place(tree, rows)
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    try:
        exec(compile(tree, str(path), "exec"), module.__dict__)
    except Exception as error:
        raise _refused(error, path) from None
    step = getattr(module, "STEP", None)
    if isinstance(step, Step):
        return step
    kernel = getattr(module, "KERNEL", None)
    if not isinstance(kernel, Kernel):
        raise Unloadable(row(len(rows)), "the file ends without STEP = Step(...)")
    try:
        place = find(kernel.number)
    except ValueError as error:
        raise Unloadable(row(len(rows)), str(error)) from None
    own = {one.name: getattr(kernel, one.name) for one in fields(Kernel) if one.name != "name"}
    return replace(place, **own)


def _place(tree: ast.Module, rows: Sequence[int]) -> None:
    """Give each node the line that it comes from. The columns of lines that come from elsewhere
    mean nothing, so all are 0."""
    for node in ast.walk(tree):
        if isinstance(node, ast.expr | ast.stmt | ast.arg | ast.keyword | ast.alias):
            node.lineno, node.col_offset = rows[node.lineno - 1], 0
            node.end_lineno, node.end_col_offset = rows[(node.end_lineno or 1) - 1], 0


def _refused(error: Exception, path: Path) -> Unloadable:
    """What went wrong at import, at the last line of the file that took part."""
    line, step = 1, error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename == str(path):
            line = step.tb_lineno
        step = step.tb_next
    if isinstance(error, SyntaxError):
        return Unloadable(error.lineno or line, error.msg)
    return Unloadable(line, f"{type(error).__name__}: {error}")
