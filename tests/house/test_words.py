"""One thing has one name, and it is the field's: private names of earlier days do not come back."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

STEPS = Path(__file__).resolve().parents[2] / "steps"
ROOMS = ("components", "between")
FILES = sorted(
    [
        *STEPS.glob("step[0-9][0-9]_*.py"),
        *(path for room in ROOMS for path in (STEPS / room).rglob("*.py")),
    ]
)
INSTEAD = {
    "ask": "issue",
    "band": "fragment-packed tile",
    "beginning": "range_start, offset",
    "bring": "produce, prefetch",
    "carrier": "storage_format",
    "corner": "tile_origin",
    "cut": "tile configuration",
    "early": "partial_slot",
    "fewer_registers": "setmaxnreg_dec",
    "give_back": "release",
    "go_on": "next_work",
    "held": "storage_format",
    "leave": "store",
    "lot": "accumulator half",
    "lots": "accumulator halves",
    "more_registers": "setmaxnreg_inc",
    "of_rows": "row_scales",
    "of_tokens": "token_scales",
    "record": "tile, tile_bytes",
    "sharers": "contributors",
    "sign": "a named barrier",
    "stretch": "work range",
    "strip": "reduction slice",
    "strips": "reduction slices",
    "tail": "shared_tiles",
    "tall": "row_tiles",
    "turned": "transposed",
}
"""A name that nothing in a step or a component has, and what it is called instead."""


def names(path: Path) -> set[str]:
    """Every variable, argument and function of a file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.FunctionDef):
            found.add(node.name)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(STEPS)))
def test_names_are_those_of_the_field(path: Path) -> None:
    private = {name: INSTEAD[name] for name in names(path) & set(INSTEAD)}
    assert not private, f"{path.name}: use {private}"
