"""The record of the GPU tests, the sanitizer and fuzzing, of commands that are pretended."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from results.record.schema import Environment, Git
from steps.checks.fuzz_experts import SANITIZED
from steps.cli import gpu_tests, tools
from steps.cli.gpu_tests import Ended, sanitized, sanitizer_record, suite_record
from steps.cli.main import main
from steps.registry import kernel_of

ENV = Environment(gpu="H9", git=Git(sha="0123abcd", dirty=False))
SUITE = """tests/a/test_b.py::test_one[x]
[gw0] [ 20%] PASSED tests/a/test_b.py::test_one[x]
[gw1] [ 40%] PASSED tests/a/test_b.py::test_two
[gw1] [ 60%] FAILED tests/a/test_c.py::test_three[q4_0-1]
[gw1] [ 80%] SKIPPED tests/a/test_c.py::test_four
=================================== FAILURES ===================================
_______________________________ test_three[q4_0-1] _______________________________
[gw1] linux -- Python 3.12.3

    def test_three():
>       assert sum([0.5, 0.5]) == 2
E       assert 1.0 == 2
E        +  where 1.0 = sum([0.5, 0.5])

tests/a/test_c.py:3: AssertionError
_______________________________ test_three[q4_0-10] ______________________________
E       another's
SKIPPED [1] tests/a/test_c.py:9: needs two GPUs
FAILED tests/a/test_c.py::test_three[q4_0-1] - assert 1.0 == 2
===== 1 failed, 2 passed, 1 skipped in 3.00s =====
"""


ALONE = """tests/a/test_d.py::test_five PASSED [100%]
===== 1 passed in 1.00s =====
"""


def ended(text: str, status: int | None, *command: str) -> Ended:
    return Ended((sys.executable, *command), text, status)


def test_the_suite_is_told_by_file_with_what_failed() -> None:
    suite = ended(SUITE, 1, "-m", "pytest", "-m", "gpu")
    alone = ended(ALONE, 0, "-m", "pytest")
    said = "9 products of 2 works by 3 processes on the H9: none wrong\n"
    text, wrong = suite_record(suite, alone, ended(said, 0, "-m", "steps", "fuzz"), ENV)
    assert text.splitlines() == [
        "$ python3 -m pytest -m gpu    (H9, commit 0123abcd; beside the sanitizer and fuzzing)",
        "   2  tests/a/test_b.py",
        "SKIPPED [1] tests/a/test_c.py:9: needs two GPUs",
        "FAILED tests/a/test_c.py::test_three[q4_0-1] - assert 1.0 == 2",
        "===== 1 failed, 2 passed, 1 skipped in 3.00s =====",
        "",
        "$ python3 -m pytest    (after all else)",
        "   1  tests/a/test_d.py",
        "===== 1 passed in 1.00s =====",
        "",
        "$ python3 -m steps fuzz",
        "    9 products of 2 works by 3 processes on the H9: none wrong",
    ]
    assert wrong == 1


def test_fuzzing_that_is_late_or_finds_something_is_wrong() -> None:
    good = ended(ALONE, 0, "-m", "pytest")
    text, wrong = suite_record(good, good, ended("", None, "-m", "steps", "fuzz"), ENV)
    assert text.splitlines()[-2:] == ["$ python3 -m steps fuzz", "    its time was up"]
    assert wrong == 1
    bad = ended("step=1\n  off by 2\n\n7 products: 1 wrong\n", 1, "fuzz")
    text, wrong = suite_record(good, good, bad, ENV)
    told = ["    step=1", "      off by 2", "    7 products: 1 wrong"]
    assert text.splitlines()[-4:] == ["$ python3 fuzz", *told]
    assert wrong == 1


@pytest.mark.parametrize(
    ("status", "last"), [(None, "its time was up"), (3, "no summary; exit status 3")]
)
def test_a_suite_that_did_not_end_well_is_wrong(status: int | None, last: str) -> None:
    bad, good = ended("[gw0] PASSED tests/a/test_b.py::test_one", status), ended(ALONE, 0)
    fuzzed = ended("9 products", 0, "fuzz")
    text, wrong = suite_record(bad, good, fuzzed, ENV)
    assert last in text.splitlines()
    assert wrong == 1
    text, wrong = suite_record(good, bad, fuzzed, ENV)
    assert text.splitlines()[-4] == last
    assert wrong == 1


def test_the_sanitizer_is_told_command_by_command() -> None:
    good = ended("...\n========= ERROR SUMMARY: 0 errors\n", 0, "--tool", "memcheck")
    race = "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n"
    checked = [ended(race, 1, "--tool", "racecheck"), good, None, ended("", None, "x")]
    text, wrong = sanitizer_record(checked, ENV)
    assert text.splitlines() == [
        "compute-sanitizer over the checks of steps (H9, commit 0123abcd): 2 commands, 2 more "
        "did not fit the time, 1 of them found something",
        "",
        "$ python3 --tool memcheck",
        "    ERROR SUMMARY: 0 errors; exit status 0",
        "$ python3 --tool racecheck",
        "    RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings); exit status 1",
    ]
    assert wrong == 1
    text, wrong = sanitizer_record([good], ENV)
    assert text.startswith("compute-sanitizer over the checks of steps (H9, commit 0123abcd): 1 ")
    assert "1 commands, all of exit status 0" in text
    assert wrong == 0


def test_no_command_is_begun_when_the_time_is_up() -> None:
    command = [sys.executable, "-c", "print('right')"]
    with ThreadPoolExecutor(1) as pool:
        late = sanitized([command], time.monotonic() + 0.5 * gpu_tests.LEFT, pool.submit)
        (one,) = sanitized([command], time.monotonic() + 60, pool.submit)
    assert late == [None]
    assert one is not None
    assert (one.text, one.status) == ("right\n", 0)


def test_what_a_command_began_is_stopped_with_it(tmp_path: Path) -> None:
    """It would keep the GPU busy."""
    end = tmp_path / "end"
    late = f"import time, pathlib; time.sleep(3); pathlib.Path({str(end)!r}).touch()"
    wait = f"import subprocess; subprocess.run([{sys.executable!r}, '-c', {late!r}])"
    slow, before = [sys.executable, "-c", f"print('so far', flush=True); {wait}"], time.monotonic()
    assert gpu_tests._run(slow, before + 1) == Ended(tuple(slow), "so far\n", None)
    time.sleep(4)
    assert not end.exists()


def test_all_of_it_runs_and_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], until: float) -> Ended:
        ran.append(command)
        told = "===== 3 passed in 1s =====" if "pytest" in command else "ERROR SUMMARY: 0 errors"
        return Ended(tuple(command), told, int("racecheck" in command and "17" in command))

    monkeypatch.setattr(gpu_tests, "machines", lambda name: ("H9", None, None))
    monkeypatch.setattr(tools, "find_tool", lambda name: f"/opt/{name}")
    monkeypatch.setattr(gpu_tests, "environment", lambda: ENV)
    monkeypatch.setattr(gpu_tests, "_run", run)
    out = tmp_path / "new"
    assert main(["gpu-tests", "--seconds", "100", "--out", str(out)]) == 1
    checks = [command for command in ran if "check" in command]
    wanted = sum(
        1 + bool({*kernel_of(step.number).outputs} - {*step.outputs})
        for step in gpu_tests.ladder()
        for name in gpu_tests.FORMATS
        if name in step.formats  # step 22 has one
    )
    assert len(checks) == wanted * len(gpu_tests.SANITIZERS)
    experts = [command for command in ran if "--case" in command]
    assert [command[command.index("--tool") + 1] for command in experts] == [*gpu_tests.SANITIZERS]
    assert all(command[-len(SANITIZED) :] == [*SANITIZED] for command in experts)
    assert len(ran) == len(checks) + len(experts) + 3
    assert ran[-1][-3:] == ["gpu and alone", "-n", "0"]
    (fuzzed,) = (command for command in ran if "fuzz" in command and command not in experts)
    assert fuzzed[-3] == "60"
    assert (out / "gpu-tests.txt").read_text().count("3 passed") == 2
    wrong = sum("racecheck" in command and "17" in command for command in checks)
    assert wrong == 2 * len(gpu_tests.FORMATS), "the lesson and its kernel"
    assert f"{wrong} of them found something" in (out / "sanitizer.txt").read_text()
    said = capsys.readouterr()
    assert said.out.splitlines() == [
        f"{out / 'gpu-tests.txt'}: nothing wrong",
        f"{out / 'sanitizer.txt'}: {wrong} wrong",
    ]
    assert said.err == "tests, sanitizer and fuzzing side by side, 100 s at most\n"


def test_without_the_sanitizer_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(gpu_tests, "machines", lambda name: ("H9", None, None))
    monkeypatch.setattr(tools, "find_tool", lambda name: None)
    assert main(["gpu-tests"]) == 2
    assert "compute-sanitizer was not found" in capsys.readouterr().err
