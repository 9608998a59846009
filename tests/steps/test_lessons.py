"""A lesson is one file that is read alone: its idea stands in it, and it runs with nothing but what
`steps.contract` says it may import."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from steps.contract import Step
from steps.registry import ladder, path_of
from tests.steps.works import in_turn

ROOT = Path(__file__).resolve().parents[2]
LESSONS = [step for step in ladder() if step.idea]
BESIDE = (
    *("qformats", "steps/contract.py", "steps/blocks", "steps/instructions"),
    *("steps/simulator", "reference"),  # what instructions are without a GPU
)

# An integer problem has one right result, bit for bit. The shape is ragged in every direction.
ALONE = """
import importlib, shutil, sys
from math import prod
from pathlib import Path

import numpy as np
from numba import cuda

from qformats import FORMATS
from qformats.repack import byte_weights
from reference import Problem, Tokens
from steps.contract import Shape
from steps.simulator.launch import simulate

class Machine:
    array = staticmethod(np.array)
    empty = staticmethod(np.zeros)

    def run(launch):
        simulate(launch.kernel, launch.grid, launch.block, launch.args,
                 shared_bytes=launch.shared_bytes,
                 resident=prod(launch.grid) if launch.together else 1)

def check(step, name):
    for family in step.families:
        given = (step.inputs or ("float32",))[0]
        pruned = step.accuracy == "pruned"
        problem = Problem(3, 21, 64, name, "integer", 0, given, pruned=pruned)
        c = np.full((3, 21), np.nan, step.outputs[0])
        given = (np.array(problem.a), Machine)
        if step.branch == "experts":  # one: that of all rows
            given += (np.zeros((3, 1), np.int32),)
        a = step.activations[family](*given)
        launch = step.prepare(Machine, FORMATS[name], family, Shape(3, 21, 64),
                              step.pack(problem.blocks), a.arrays, c)
        for one in (*a.launches, launch):
            Machine.run(one)
        w = FORMATS[name].dequantize(problem.blocks).astype(np.float64)
        x, exact = problem.a.astype(np.float64), step.accuracy != "fast"
        if not exact:  # what it multiplies; the scales of rows are no powers of two
            codes, scales = byte_weights(problem.blocks)
            w = codes * scales.astype(np.float64)[:, None]
            x = Tokens.of_values(problem.a.astype(np.float32)).values()
        right = x @ w.T
        off = np.abs(c - (right.astype(c.dtype) if exact else right))
        assert (off <= (0 if exact else 2**-11 * np.abs(right) * 1.01)).all(), (family, name, off)

for lesson in sys.argv[1:]:
    source, name = lesson.split("=")
    file = Path("steps", Path(source).name)
    shutil.copy(source, file)
    importlib.invalidate_caches()
    step = importlib.import_module(f"steps.{file.stem}").STEP
    check(step, name)
    project = {m.split(".")[1] for m in sys.modules if m.startswith("steps.") and m.count(".") == 1}
    print(step.name, *sorted(project))
    file.unlink()
    del sys.modules[f"steps.{file.stem}"]
    delattr(sys.modules["steps"], file.stem)
"""


@pytest.fixture(params=LESSONS, ids=lambda step: step.name)
def step(request: pytest.FixtureRequest) -> Step:
    return request.param


def is_on_gpu(node: ast.AST) -> bool:
    """Whether it is a kernel or a device function: `@cuda.jit` or `@cuda.jit(...)`."""
    decorators = getattr(node, "decorator_list", [])
    return any(ast.unparse(one).startswith("cuda.jit") for one in decorators)


def test_what_a_step_is_about_stands_in_its_kernel(step: Step) -> None:
    tree = ast.parse(path_of(step).read_text(encoding="utf-8"))
    called = {
        ast.unparse(call.func)
        for function in ast.walk(tree)
        if is_on_gpu(function)
        for call in ast.walk(function)
        if isinstance(call, ast.Call)
    }
    assert set(step.idea) <= called


@pytest.mark.parametrize("half", [0, 1])
def test_a_step_runs_alone(half: int, tmp_path: Path) -> None:
    """In a folder that has no other: one process for half of the lessons, each in one format."""
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "__init__.py").touch()
    for one in BESIDE:
        copy = shutil.copytree if (ROOT / one).is_dir() else shutil.copy
        copy(ROOT / one, tmp_path / one)
    some = LESSONS[half::2]
    lessons = [f"{path_of(one)}={in_turn(one.number, one.formats[:5])}" for one in some]
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *lessons],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = [line.split() for line in done.stdout.splitlines()]
    assert [name for name, *_ in told] == [one.name for one in some]
    for name, *imported in told:
        assert set(imported) <= {"blocks", "contract", "instructions", "simulator", name}
