"""Imports go one way: every import of the house is read, wherever it stands in a file."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

ROOMS = (
    ("qformats",),
    ("reference",),
    ("steps.simulator",),
    ("steps.instructions",),
    ("steps.contract",),
    ("steps.blocks",),
    ("steps.kernels.parts",),
    ("steps.kernels.prefill", "steps.kernels.decode"),
    ("steps.kernels.between", "steps.kernels"),
    ("steps.kernels.experts",),
    ("steps.stepNN",),
    ("steps.registry",),
    ("steps.compile",),
    ("steps.driver",),
    ("steps.product",),
    ("steps", "steps.checks", "steps.learn", "steps.nn"),
    ("steps.decoder",),
    ("results.record",),
    ("results.measure",),
    ("results.render", "results"),
    ("steps.cli", "steps.__main__"),
)
"""From the ground up: a file imports from its own line and from those above it in this table."""

RANK = {room: rank for rank, line in enumerate(ROOMS) for room in line}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules() -> dict[str, Path]:
    """Every module of the house, by its dotted name."""
    tops = ("qformats", "reference", "steps", "results")
    return {module_of(path): path for top in tops for path in sorted((ROOT / top).rglob("*.py"))}


MODULES = modules()


def room_of(module: str) -> str:
    """The room a module belongs to: the longest name of `ROOMS` that it begins with."""
    if module.startswith("steps.step"):
        return "steps.stepNN"
    parts = module.split(".")
    names = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next(name for name in names if name in RANK)


@cache
def imports_of(path: Path) -> set[str]:
    """The modules of the house that a file names in its imports: at the top, in a function, or
    for types alone."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: imports here are absolute"
            base = node.module or ""
            found |= {
                name if (name := f"{base}.{alias.name}") in MODULES else base
                for alias in node.names
            }
    return {name for name in found if name in MODULES}


def test_no_arrow_runs_back_up() -> None:
    wrong = [
        f"{module} ({room_of(module)}) imports {other} ({room_of(other)})"
        for module, path in MODULES.items()
        for other in sorted(imports_of(path))
        if RANK[room_of(other)] > RANK[room_of(module)]
    ]
    assert not wrong, "\n".join(wrong)


def test_no_circle() -> None:
    graph = {name: imports_of(path) - {name} for name, path in MODULES.items()}
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join((*way[way.index(name) :], name))
        if name not in done:
            for other in sorted(graph[name]):
                visit(other, (*way, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_the_command_line_is_imported_by_nothing_but_its_entry() -> None:
    users = {
        name
        for name, path in MODULES.items()
        if any(room_of(other) == "steps.cli" for other in imports_of(path))
    }
    assert {name for name in users if room_of(name) != "steps.cli"} == {"steps.__main__"}


def test_formats_need_numpy_alone() -> None:
    """And `gguf`, which reads model files, and rich, which draws on a terminal."""
    allowed = {"qformats", "numpy", "gguf", "rich", *sys.stdlib_module_names}
    for module, path in MODULES.items():
        if room_of(module) == "qformats":
            assert top_names_of(path) <= allowed, module


def top_names_of(path: Path) -> set[str]:
    """The packages that a file imports, of the house or not."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


def test_the_ladder_lies_flat_and_alone() -> None:
    flat = {path.name for path in (ROOT / "steps").glob("*.py")}
    steps = {name for name in flat if name.startswith("step")}
    assert flat - steps == {"__init__.py", "__main__.py", "contract.py", "registry.py"}


def test_no_two_packages_have_one_name() -> None:
    names = [path.parent.name for path in MODULES.values() if path.name == "__init__.py"]
    assert sorted(names) == sorted(set(names))


SHORT = 40
FOUND_BY_NAME = re.compile(
    r"steps\.step\d\d_|steps\.learn\.pitfalls\.p\d\d_|steps\.kernels\.|steps\.nn\.adapters"
)
"""Lessons, exhibits and kernels: a file of its own is what each of them is. And a call that only
those import who also use PEFT."""


def lines_of_code(path: Path) -> int:
    """Without blank lines, comments and docstrings."""
    text = path.read_text(encoding="utf-8")
    told: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            told |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    lines = enumerate(text.splitlines(), start=1)
    return sum(
        1 for i, line in lines if line.strip(" #") and line.lstrip()[0] != "#" and i not in told
    )


def test_a_short_file_has_several_users() -> None:
    """One that a single file uses is part of that file."""
    users: dict[str, set[str]] = {name: set() for name in MODULES}
    for name, path in MODULES.items():
        for other in imports_of(path) - {name}:
            users[other].add(name)
    alone = {
        name: used
        for name, used in users.items()
        if len(used) == 1
        and MODULES[name].name not in ("__init__.py", "__main__.py")
        and not FOUND_BY_NAME.match(name)
        and lines_of_code(MODULES[name]) < SHORT
    }
    assert not alone
