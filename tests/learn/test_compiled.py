"""What is right in the simulator and not for the compiler."""

from __future__ import annotations

from pathlib import Path

import pytest

from steps.learn.exercises.check import GOLDEN_CASE, check, lines
from steps.learn.exercises.text import Exercise, make, solutions
from steps.learn.exercises.trial import Subject
from steps.registry import find


@pytest.fixture(autouse=True)
def golden_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator has been asked elsewhere."""
    golden = Subject("A16", "q4_0", GOLDEN_CASE)
    monkeypatch.setattr("steps.learn.exercises.check.subjects", lambda step: iter([golden]))


def own(folder: Path, number: int, old: str, new: str) -> Exercise:
    text = make(find(number), tuple(solutions(number)))
    assert text.count(old) >= 1
    path = folder / f"{find(number).name}.py"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    return Exercise.read(path)


def test_what_numba_refuses_is_wrong(tmp_path: Path) -> None:
    exercise = own(tmp_path, 1, "acc += a[m", "acc += [0.0][0] + a[m")
    report = check(exercise)
    said = "\n".join(lines(report))
    assert (report.ok, report.wrong.cause, report.hole) == (False, "compile", 3), said
    assert "right in the simulator, but it does not compile: NRT required" in said
    assert "[0.0][0]" in exercise.lines[report.wrong.line - 1]


def test_sums_in_float64_are_advice(tmp_path: Path) -> None:
    """0.0 is a float64 in Numba, and so is all that is added to it."""
    report = check(own(tmp_path, 1, "acc = float32(0)", "acc = 0.0"))
    assert report.ok
    assert any("float64 in the machine code of family A16: begin a sum" in x for x in report.advice)


def test_instructions_by_which_a_step_is_known(tmp_path: Path) -> None:
    text = 'contains={"A16": ("LDG.E.U8|LDG.E.S8", "I2F", "FFMA")}'
    report = check(own(tmp_path, 1, text, text.replace('"FFMA"', '"IDP"')))
    assert report.ok
    (sentence,) = report.advice
    assert sentence == "no IDP in the machine code of family A16, by which the step is known"


def test_without_a_compiler_the_check_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> None:
        raise RuntimeError("nvdisasm was not found:\n pip install it")

    monkeypatch.setattr("steps.learn.exercises.advice.machine_code", missing)
    report = check(own(tmp_path, 1, "", ""))
    assert report.ok
    assert report.advice == ("not compiled here: nvdisasm was not found: pip install it",)
