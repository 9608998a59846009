"""What a step's file adds to its parent's: the lesson, for `make diff` and the report page."""

from __future__ import annotations

import ast

from steps.contract import Step
from steps.registry import source


def imported(step: Step, parent: Step) -> set[str]:
    """The names that a step's file imports from its parent's."""
    return {
        alias.name
        for node in ast.walk(ast.parse("".join(source(step))))
        if isinstance(node, ast.ImportFrom) and node.module == f"steps.{parent.name}"
        for alias in node.names
    }


def without(lines: list[str], names: set[str]) -> list[int]:
    """Which of a module's lines are left, counted from 0, without its functions and constants of
    these names and the comments that stand right above them."""
    left_out: set[int] = set()
    for node in ast.parse("".join(lines)).body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)]) - 1
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.target) in names:
            first = node.lineno - 1
        else:
            continue
        while lines[first - 1].startswith("#"):
            first -= 1
        left_out.update(range(first, node.end_lineno or node.lineno))
    return [i for i in range(len(lines)) if i not in left_out]
