"""`steps` itself: what a caller imports, when it is loaded, and what help() says of it."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import steps
from steps.driver import machines

ROOT = Path(__file__).resolve().parents[2]


def test_import_steps_loads_no_numba() -> None:
    code = "import sys, steps; print(sorted({'numba', 'numpy'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "[]\n"


def test_every_name_is_there() -> None:
    assert {name for name in steps.__all__ if callable(getattr(steps, name))} == set(steps.__all__)
    with pytest.raises(AttributeError, match="module 'steps' has no attribute 'gem'"):
        _ = steps.gem


@pytest.mark.parametrize("call", [steps.gemm, steps.pack, steps.gemm.plan])
def test_help_names_every_argument(call: object) -> None:
    assert callable(call)
    text = inspect.getdoc(call) or ""
    lines = re.findall(r"(?m)^(\w+(?:, \w+)*) *: ", text)
    said = {name for line in lines for name in line.split(", ")}
    assert said == set(inspect.signature(call).parameters)
    assert "\nRaises " in text


def test_without_a_gpu_the_error_names_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "why_no_gpu", lambda: "no driver")
    with pytest.raises(
        RuntimeError, match=r"used here: no driver; machine=steps.driver.machines.Sim"
    ):
        machines.Gpu()
