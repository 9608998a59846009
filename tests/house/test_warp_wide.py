"""Instructions of a whole warp stand where Python does not copy them.

From 3.12 on Python copies the end of `return f(x if odd else y)` into both branches, and Numba
compiles two calls. Lanes then execute two different `ldmatrix`, and the warp waits for ever. The
simulator calls what Python calls, so it cannot see it.
"""

from __future__ import annotations

import ast
from pathlib import Path

import steps.instructions  # noqa: F401  (fills INSTRUCTIONS)
from steps.simulator.twins import INSTRUCTIONS

ROOT = Path(__file__).resolve().parents[2]
WARP_WIDE = {one.name for one in INSTRUCTIONS.values() if ".sync" in one.text}


def copied(text: str) -> list[int]:
    """Lines of returns that have a conditional and, behind it, an instruction of a whole warp."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Return)
        and any(isinstance(one, ast.IfExp) for one in ast.walk(node))
        and WARP_WIDE & {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    ]


def test_no_instruction_of_a_warp_is_copied_into_branches() -> None:
    assert {"ldmatrix_x4", "shfl_xor", "mma_m16n8k16_f16"} <= WARP_WIDE
    assert copied("def f(a, b, odd):\n    return shfl_xor(a if odd else b, 1)") == [2]
    found = {
        f"{path}:{line}"
        for path in (ROOT / "steps").rglob("*.py")
        for line in copied(path.read_text())
    }
    assert not found
