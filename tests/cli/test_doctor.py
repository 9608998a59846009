"""`python -m steps doctor`: it always prints, whatever is broken."""

from __future__ import annotations

import re
import sys

import pytest

from steps.cli import doctor
from steps.cli import main as cli
from steps.registry import ladder
from tests.cli.typed import typed


def test_doctor_always_prints() -> None:
    done = typed("doctor")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"(?m)^check steps in the simulator +yes$", done.stdout)
    assert re.search(r"(?m)^show PTX and machine code +yes: PTX \d+\.\d+ for sm_75", done.stdout)
    assert re.search(r"(?m)^numba-cuda +0\.", done.stdout)
    assert "problem: " not in done.stdout
    found = doctor.examine()
    assert [*found.steps] == [step.number for step in ladder()]


def test_doctor_on_a_broken_machine(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """No numba at all: the doctor says so, and that nothing runs."""
    for name in (
        "numba",
        "steps.driver.machines",
        "steps.compile.compiler",
        "results.record.schema",
    ):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("steps.ladder", lambda: (_ for _ in ()).throw(ImportError("no numba")))
    assert cli.main(["doctor"]) == 1
    printed = capsys.readouterr().out
    for what in ("on a GPU", "in the simulator", "machine code"):
        assert re.search(rf"{what} +no: ", printed)
    assert "problem: steps could not be examined: ImportError: no numba" in printed


def test_numbas_own_simulator_is_refused_by_name() -> None:
    """Which has no PTX, and claims a GPU."""
    sentence = "unset NUMBA_ENABLE_CUDASIM: Numba's simulator cannot run these kernels"
    done = typed("doctor", NUMBA_ENABLE_CUDASIM="1")
    assert (done.returncode, done.stderr) == (1, "")
    assert len(re.findall(rf"(?m)^\w.* +no: ImportError: {sentence}", done.stdout)) == 4
    done = typed("check", "1", NUMBA_ENABLE_CUDASIM="1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"python -m steps check: {sentence}")
    assert done.stderr.count("\n") == 1


def test_doctor_compares_the_driver_with_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    monkeypatch.setattr(driver, "cuDriverGetVersion", lambda: (0, 12040))
    found = doctor.Findings(ptx="9.0")
    doctor._driver(found)
    assert found.driver == {"cuda": "12.4", "ptx": "8.4"}
    (problem,) = found.problems
    assert "PTX 9.0" in problem
    assert "CUDA=12" in problem


def test_doctor_names_the_steps_that_this_gpu_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    steps = {1: None, 2: "step 2 needs compute capability 9.0; this GPU has 8.6"}
    doctor._print(doctor.Findings(steps=steps, env={"gpu": "A GPU", "l2_bytes": 2**20}))
    printed = capsys.readouterr().out
    assert re.search(r"on a GPU +yes, 1 of 2 steps; step 2 needs compute capability 9.0", printed)
    assert re.search(r"l2_bytes +1 MiB", printed)
