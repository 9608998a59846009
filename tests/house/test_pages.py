"""Pages that people write: the worklog, the glossary, how to add things; what a package says that
it holds. What they name exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORKLOG = ROOT / "results" / "worklog"
STEP_PAGES = sorted(WORKLOG.glob("step*.md"))
PAGES = [*STEP_PAGES, WORKLOG / "README.md", *sorted((ROOT / "steps").glob("*.md"))]
INDEX = (WORKLOG / "README.md").read_text(encoding="utf-8")
ANOTHERS = r"step23_my_idea|steps/stepNN|step23\.md|run\.json|<gpu>"  # names that stand for others


def page_id(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_paths_in_code_marks_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for path in re.findall(r"`((?:qformats|reference|steps|results|tests)/[^`\s:]+)`", text):
        assert re.search(ANOTHERS, path) or (ROOT / path).exists(), path


def test_names_in_code_marks_stand_beside_a_file_that_has_them() -> None:
    """In a line of CONTRIBUTING that names files, a constant or function is in one of these."""
    for line in (ROOT / "steps" / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines():
        marks = re.findall(r"`([^`]+)`", line)
        files = [ROOT / mark for mark in marks if (ROOT / mark).suffix == ".py"]
        text = "".join(path.read_text(encoding="utf-8") for path in files if path.exists())
        for name in marks:
            if text and re.fullmatch(r"[A-Z_]*_[A-Z_]+|[A-Z]{3,}|[a-z]+_[a-z_]+", name):
                assert re.search(rf"\b{name}\b", text), f"{name} in: {line}"


def test_commands_are_targets_of_the_makefile() -> None:
    targets = re.findall(r"(?m)^([a-z%-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"))
    for page in PAGES:
        for name in re.findall(r"(?:`|^ +)make ([a-z-]+)", page.read_text(encoding="utf-8"), re.M):
            assert name in targets or (name == "step" and "step%" in targets), f"{page}: {name}"


@pytest.mark.parametrize("page", STEP_PAGES, ids=page_id)
def test_a_page_of_a_step(page: Path) -> None:
    """Its title and idea, where it is listed, and what was tried and failed."""
    text, number = page.read_text(encoding="utf-8"), int(page.stem.removeprefix("step"))
    assert list((ROOT / "steps").glob(f"step{number:02d}_*.py")), "the page of no step"
    assert re.match(rf"# Step {number}: .+\n\n[A-Z].+\.\n", text)
    assert f"]({page.name})" in INDEX
    assert "\n## Tried and failed\n" in text


@pytest.mark.parametrize("page", STEP_PAGES, ids=page_id)
def test_runs_that_a_page_names_are_in_the_index(page: Path) -> None:
    known = set(re.findall(r"(?m)^\| ([0-9a-f]{8}) \|", INDEX))
    named = set(re.findall(r"\b[Rr]uns? ([0-9a-f]{8})\b", page.read_text(encoding="utf-8")))
    assert named, "a figure is of a run"
    assert named <= known


def test_words_are_in_alphabetical_order() -> None:
    text = (ROOT / "steps" / "GLOSSARY.md").read_text(encoding="utf-8")
    words = [word.lower() for word in re.findall(r"(?m)^\| (?!word |:--)([^|]+) \|", text)]
    assert len(words) > 20
    assert words == sorted(words)


ROOMS = [
    path.parent
    for top in ("qformats", "reference", "steps", "results")
    for path in sorted((ROOT / top).rglob("__init__.py"))
]
LISTED_BY_THEMSELVES = r"__\w+__|step\d\d_\w+|p\d\d_\w+"  # by `make list` and `make pitfalls`


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.relative_to(ROOT).as_posix())
def test_a_room_says_what_it_holds(room: Path) -> None:
    said = ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8"))) or ""
    modules = {path.stem for path in room.glob("*.py")}
    rooms = {path.parent.name for path in room.glob("*/__init__.py")}
    names = {name for name in modules | rooms if not re.fullmatch(LISTED_BY_THEMSELVES, name)}
    assert {name for name in names if not re.search(rf"\b{name}\b", said)} == set()
    assert set(re.findall(r"(?m)^(?:step \d+)? *(\w+)\.py\b", said)) <= modules


@pytest.mark.parametrize("lesson", sorted((ROOT / "steps").glob("step*.py")), ids=lambda x: x.stem)
def test_kernels_that_a_lesson_names_exist(lesson: Path) -> None:
    said = ast.get_docstring(ast.parse(lesson.read_text(encoding="utf-8"))) or ""
    for name in re.findall(r"\bkernels(?:[./]\w+)+", said):
        path = ROOT / "steps" / re.sub(r"\.py$", "", name).replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").exists(), name
