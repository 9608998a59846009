"""Imports the text of an exercise as a step, as if it stood among the steps."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Final

from steps.contract import Step
from steps.learn.exercises.trial import limit, line_of

PATIENCE: Final = 10.0  # seconds after which an import is taken to run for ever


class Unloadable(Exception):
    """The file cannot be imported; `line` of the file is where, `why` says what Python says, and
    `advice` what to do."""

    def __init__(
        self,
        line: int,
        why: str,
        advice: str = "Python cannot read the file: mend this line, or the one above it.",
    ):
        super().__init__(line, why, advice)
        self.line, self.why, self.advice = line, why, advice


def load(text: str, path: Path, rows: Sequence[int]) -> Step:
    """The STEP of the text; rows: its lines' places in the file at `path`, which messages and
    tracebacks name. Unloadable where Python refuses it."""

    def row(line: int | None) -> int:
        return rows[min(line or 1, len(rows)) - 1] if rows else 1

    name = f"exercise_{path.stem}"
    try:
        tree = ast.parse(text, str(path))
    except SyntaxError as error:
        raise Unloadable(row(error.lineno), error.msg) from None
    except (ValueError, MemoryError, RecursionError) as error:
        raise Unloadable(1, f"Python cannot parse it ({type(error).__name__})") from None
    _place(tree, rows)
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    try:
        with limit(PATIENCE, waits=True):
            exec(compile(tree, str(path), "exec"), module.__dict__)
    except SyntaxError as error:
        raise Unloadable(error.lineno or 1, error.msg) from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit is no Exception
        why = f"{type(error).__name__}: {error}"
        advice = "The import of the file ends here, before its STEP can be used."
        raise Unloadable(line_of(error, path) or 1, why, advice) from None
    step = getattr(module, "STEP", None)
    if not isinstance(step, Step):
        raise Unloadable(row(len(rows)), "the file ends without STEP = Step(...)")
    return step


def _place(tree: ast.Module, rows: Sequence[int]) -> None:
    """Give each node the line that it comes from. The columns of lines that come from elsewhere
    mean nothing, so all are 0."""
    for node in ast.walk(tree):
        if isinstance(node, ast.expr | ast.stmt | ast.arg | ast.keyword | ast.alias):
            node.lineno, node.col_offset = rows[node.lineno - 1], 0
            node.end_lineno, node.end_col_offset = rows[(node.end_lineno or 1) - 1], 0
