"""What makes a step file a lesson: its form, for every step there is."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from typing import get_args

import pytest

from qformats import FILE_FORMATS, WEIGHT_FORMATS
from steps.contract import Step, Unit
from steps.registry import ladder

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "steps").glob("step[0-9][0-9]_*.py"))
HEADINGS = (
    "What is new",
    "Why it should help",
    "What it costs",
    "Machine code",
    "Prerequisites",
)
ALLOWED = {
    "__future__",
    "collections",
    "dataclasses",
    "functools",
    "math",
    "numba",
    "numpy",
    "qformats",
    "steps",
    "typing",
}
SHARED = {"steps.blocks", "steps.kernels", "steps.contract", "steps.instructions"}
UNITS = set(get_args(Unit))


def imported(tree: ast.Module) -> set[str]:
    """The modules a file imports, wherever in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a step names what it imports in full"
            found.add(node.module or "")
    return found


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def source(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@pytest.fixture
def tree(source: str) -> ast.Module:
    return ast.parse(source)


@pytest.fixture
def step(path: Path) -> Step:
    return importlib.import_module(f"steps.{path.stem}").STEP


def test_the_registry_finds_every_file() -> None:
    assert [step.name for step in ladder()] == [path.stem for path in FILES]
    numbers = [step.number for step in ladder()]
    assert numbers == sorted(set(numbers))


def test_docstring_has_its_headings_in_order(path: Path, tree: ast.Module) -> None:
    text = ast.get_docstring(tree) or ""
    number = int(path.stem[4:6])
    assert re.match(rf"Step {number}: .+ - .+\.\n\n", text), "first line: Step N: name - the idea."
    # a heading stands at the margin, its text beside or below it
    pieces = re.split(rf"^({'|'.join(HEADINGS)})\b", text, flags=re.MULTILINE)
    assert pieces[1::2] == list(HEADINGS)
    parts = pieces[2::2]
    for heading, part in zip(HEADINGS, parts, strict=True):
        assert len(part.strip()) > 8, f"{heading} says nothing"


def test_a_step_imports_the_vocabulary_and_no_other_step(tree: ast.Module) -> None:
    modules = imported(tree)
    assert {module.split(".")[0] for module in modules} <= ALLOWED
    ours = {module for module in modules if module.split(".")[0] == "steps"}
    assert all(any(m == s or m.startswith(s + ".") for s in SHARED) for m in ours), ours


def test_a_step_neither_prints_nor_times_nor_draws_data(tree: ast.Module) -> None:
    called = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not called & {"print", "input", "open", "exec", "eval"}
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not names & {"random", "default_rng", "perf_counter", "synchronize"}


def test_a_step_reads_from_the_top_down(tree: ast.Module) -> None:
    """Constants, then kernels, then `launch`, then `STEP` at the end; or `STEP` alone over an
    engineered kernel, which does so."""
    order = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            order.append(node.name)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            order.append(node.targets[0].id)
    assert order == ["STEP"] or order[-2:] == ["launch", "STEP"]


def test_constants_are_final_and_say_why(source: str, tree: ast.Module) -> None:
    """A tile size without its reason is a number nobody dares to change."""
    lines = source.splitlines()
    for node in tree.body:
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            assert not (
                isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Name)
                and node.targets[0].id not in ("STEP",)
            ), f"line {node.lineno}: annotate it as Final"
            continue
        name = node.target.id
        assert name.isupper(), f"{name} is a constant"
        assert ast.unparse(node.annotation) == "Final", f"{name} is Final"
        derived = any(isinstance(n, ast.Name) for n in ast.walk(node.value or node))
        commented = any(
            "#" in lines[row] for row in range(node.lineno - 2, node.end_lineno or node.lineno)
        )
        assert commented or derived, f"{name} lacks its reason"


def test_step_fields_are_complete(step: Step, path: Path) -> None:
    assert step.name == path.stem
    assert step.number == int(path.stem[4:6])
    assert 5 < len(step.title) < 70
    assert step.families
    assert set(step.families) <= {"A16", "A8"}
    assert set(step.unit) == set(step.families)
    assert set(step.unit.values()) <= UNITS
    assert set(step.parents) <= set(step.families)
    if step.number > 1:
        assert set(step.parents) == set(step.families), "every family has something to beat"
    assert all(0 < parent < step.number for parent in step.parents.values())
    assert set(step.contains) == set(step.forbids) == set(step.families)
    assert all(step.contains.values()), "machine code must prove the idea"
    all_five = step.formats[:5] == WEIGHT_FORMATS
    assert all_five or step.accuracy == "pruned", "all five weight formats in every step"
    assert set(step.formats[5:]) <= set(FILE_FORMATS)
    assert step.min_cc >= (7, 5)


def test_supports_answers_none_or_a_sentence(step: Step) -> None:
    for family in step.families:
        for name in step.formats:
            assert step.supports(name, family) is None
            assert step.supports(name, family, (9, 0)) is None
    assert "q8_1" in (step.supports("q8_1", step.families[0]) or "")
    assert "compute capability" in (step.supports("q4_0", step.families[0], (5, 0)) or "")
    newer = step.supports("q4_0", step.families[0], (10, 0))
    if step.max_cc is None:
        assert newer is None
    else:
        least, most = ("{}.{}".format(*cc) for cc in (step.min_cc, step.max_cc))
        assert (
            newer
            == f"step {step.number} needs compute capability {most} at most; this GPU has 10.0"
        )
        assert f"capability {least}; this" in step.supports("q4_0", step.families[0], (8, 6))
