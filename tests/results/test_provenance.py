"""Provenance: a row's hash follows the code of all that its step imports, and nothing else."""

from __future__ import annotations

import ast
import re
import shutil
from functools import cache
from pathlib import Path

import pytest

from results.record import ROOT, provenance
from results.record.provenance import OUTSIDE_OF_STEPS, source_hash, step_module
from steps.compile.import_closure import ROOMS, import_closure
from steps.registry import find, ladder
from tests.results.test_record import make_call

STEPS = [step.number for step in ladder()]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the code that steps are made of."""
    for room in ROOMS:
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@cache
def sources(step: int) -> dict[str, Path]:
    module = step_module(step)
    assert module is not None
    found = import_closure([module], without=OUTSIDE_OF_STEPS)
    return {name: path.relative_to(ROOT) for name, path in found.items()}


def hashes(tree: Path = ROOT) -> dict[int, str | None]:
    return {step: source_hash(step, root=tree) for step in STEPS}


EVERY = sorted({path for step in STEPS for path in sources(step).values()})


def test_a_line_of_code_in_any_file_of_a_closure_changes_the_hash_of_that_step(tree: Path) -> None:
    """And of no other, whether the line stands in a file of another step's closure or of none."""
    first = hashes(tree)
    assert first == hashes()
    assert all(re.fullmatch(r"[0-9a-f]{12}", each or "") for each in first.values())
    assert len(EVERY) > 40
    for file in EVERY:
        path = tree / file
        before = path.read_text(encoding="utf-8")
        path.write_text(before + "\n_one_more = 1\n", encoding="utf-8")
        now = hashes(tree)
        path.write_text(before, encoding="utf-8")
        changed = {step for step in STEPS if now[step] != first[step]}
        assert changed == {step for step in STEPS if file in sources(step).values()}, file


def test_a_closure_is_what_the_imports_say_and_has_no_host_code() -> None:
    """Followed by hand: every import of a file in the closure leads into it."""
    outside = ("steps.simulator", "steps.product", "steps.nn", "results", "reference", "numba")
    decoders = ("steps.blocks.", "steps.kernels.parts.weights.")
    for step in STEPS:
        names = sources(step)
        assert "steps.instructions.define" in names
        own = find(step).accuracy == "pruned"  # it unpacks its weights itself
        assert own or any(name.startswith(decoders) for name in names)
        assert not any(name.startswith(outside) for name in names)
        for path in names.values():
            for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
                base = node.module or "" if isinstance(node, ast.ImportFrom) else ""
                if base.startswith(("steps.kernels", "qformats.")):
                    each = {f"{base}.{alias.name}" for alias in node.names} | {base}  # type: ignore[attr-defined]
                    assert each & {*names, *OUTSIDE_OF_STEPS}, (path, base)


def test_a_call_is_of_its_api_and_of_the_step_it_chose(tree: Path) -> None:
    plan = provenance.called_hash("gemm.plan", 14, tree)
    assert plan != provenance.called_hash("gemm.plan", 9, tree)
    layer = provenance.called_hash("QuantLinear", 14, tree)
    assert plan != layer
    for module in provenance.OUTSIDE_OF_CALLS:
        path = tree / f"{module.replace('.', '/')}.py"
        path.write_text(path.read_text(encoding="utf-8") + "_one_more = 1\n")
    assert provenance.called_hash("gemm.plan", 14, tree) == plan
    assert provenance.called_hash("QuantLinear", 14, tree) == layer
    path = tree / "steps" / "nn" / "operator.py"
    path.write_text(path.read_text(encoding="utf-8") + "_one_more = 1\n")
    assert provenance.called_hash("gemm.plan", 14, tree) == plan
    assert provenance.called_hash("QuantLinear", 14, tree) != layer
    path = tree / "steps" / "kernels" / "prefill" / "wgmma_float16.py"
    path.write_text(path.read_text(encoding="utf-8") + "_one_more = 1\n")
    assert provenance.called_hash("gemm.plan", 14, tree) != plan
    assert provenance.called_hash("gemm.plan", 77, tree) is source_hash(77, root=tree) is None
    for api in provenance.API_MODULES.values():
        assert not any(name.startswith("steps.cli") for name in import_closure([api]))
    assert make_call().api in provenance.API_MODULES


def test_a_hash_that_is_remembered_is_read_once(tree: Path) -> None:
    now = provenance.remembered(source_hash, tree)
    first = now(7)
    path = tree / sources(7)["steps.contract"]
    path.write_text(path.read_text(encoding="utf-8") + "_one_more = 1\n")
    assert now(7) == first != source_hash(7, root=tree)
