"""`exercise`, `exercises`, and `check`, `diff`, `sass`, `bench` with --file, as a user types."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from results.measure.protocol import Budget
from steps.cli import exercises
from steps.cli import main as cli
from steps.cli.exercises import beside
from steps.contract import Work, why_no_gpu
from steps.driver.machines import Simulator
from steps.learn.exercises.text import Exercise, make, solutions
from steps.registry import find
from tests.results.fake_stopwatch import FakeStopwatch

pytestmark = pytest.mark.usefixtures("golden_alone", "not_compiled")

STEP = find(1)
NAME = f"{STEP.name}.py"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files are written under the current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def filled(text: str | None = None) -> str:
    """A file with all holes filled, right or as given."""
    Path("own.py").write_text(text or make(STEP, tuple(solutions(1))), encoding="utf-8")
    return "own.py"


def test_an_exercise_is_written_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["exercise", "1"]) == 0
    path = Path("build", "exercises", NAME)
    assert path.read_text(encoding="utf-8") == make(STEP)
    assert f"make check FILE={path}" in capsys.readouterr().out
    path.write_text("mine", encoding="utf-8")
    assert cli.main(["exercise", "1"]) == 2
    assert "your work may be in it" in capsys.readouterr().err
    assert path.read_text(encoding="utf-8") == "mine"
    assert cli.main(["exercise", "1", "--out", "there/one.py"]) == 0
    assert Path("there", "one.py").exists()


def test_a_step_without_an_exercise_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("steps.learn.exercises.text.numbers", lambda: (1, 2, 3))
    assert cli.main(["exercise", "18"]) == 2
    assert "step 18 has no exercise: these have one: 1, 2, 3" in capsys.readouterr().err


def test_hints_come_one_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["exercise", "1", "--out", "own.py"])
    assert cli.main(["check", "--file", "own.py"]) == 1
    assert " in outline" not in capsys.readouterr().out
    assert cli.main(["check", "--file", "own.py", "--hint"]) == 1
    out = capsys.readouterr().out
    assert re.findall(r"TODO (\d) in outline", out) == ["1"]
    assert "    n, m = cuda.grid(...)\n" in out
    assert cli.main(["check", "--hint", "--file", filled(make(STEP, (1, 2)))]) == 1
    assert re.findall(r"TODO (\d) in outline", capsys.readouterr().out) == ["3"]
    assert cli.main(["check", "--hint", "--file", filled()]) == 0
    assert "nothing left to hint at" in capsys.readouterr().out


def test_the_solution_is_a_diff_to_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--solution", "--file", filled(make(STEP, (1, 2, 3, 5)))]) == 0
    changed = [line for line in capsys.readouterr().out.splitlines() if re.match(r"[+-] ", line)]
    assert changed == ["-        pass", "+        c[m, n] = acc"]


def test_progress_is_remembered_until_the_file_changes(capsys: pytest.CaptureFixture[str]) -> None:
    def told() -> str:
        assert cli.main(["exercises"]) == 0
        line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("   1"))
        return re.sub(r" {2,}", "|", line.strip()).split("|", 2)[2]

    assert told() == "0 of 5|not made"
    cli.main(["exercise", "1"])
    capsys.readouterr()
    assert told() == "0 of 5|not begun"
    path = Path("build", "exercises", NAME)
    for text, status, state in (
        (make(STEP, (1, 2)), 1, "2 of 5|right so far"),
        (make(STEP, (1, 2, 3)).replace(" + z)", ")"), 1, "3 of 5|wrong: no compensation, TODO 3"),
        (make(STEP, (1, 2, 3, 4, 5)), 0, "5 of 5|right"),
    ):
        path.write_text(text, encoding="utf-8")
        assert told().endswith("|not checked")
        assert cli.main(["check", "--file", str(path)]) == status
        capsys.readouterr()
        assert told() == state
    assert json.loads(Path("build/exercises/progress.json").read_text(encoding="utf-8"))


def test_a_file_is_compared_with_its_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diff", "--lines", "0", "--file", filled()]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"--- steps/{NAME}\n+++ own.py\n")
    assert len(re.findall(r"(?m)^\+ .*# TODO \d:", out)) == 5


def test_what_a_file_loads_and_stores(capsys: pytest.CaptureFixture[str]) -> None:
    text = make(STEP, tuple(solutions(1)))
    line = 1 + next(i for i, one in enumerate(text.splitlines()) if "c[m, n] = acc" in one)
    assert cli.main(["trace", "--file", filled(), "--line", str(line)]) == 0
    assert re.search(rf"(?m)^ *{line}  c\[m, n\] = acc .* store ", capsys.readouterr().out)


def test_the_machine_code_of_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sass", "--summary", "--file", filled()]) == 0
    assert re.search(r"(?m)^I2F\S* ", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["sass", "--file", "empty.py"], "TODO 1 of empty.py is not filled in yet"),
        (["sass", "1", "--file", "own.py"], "name a step or a file, not both"),
        (["check", "--file", "nowhere.py"], "nowhere.py cannot be read: No such file"),
        (["check", "--file", "text.md"], "text.md has no `STEP = Step(number=...`"),
        (["ptx", "--file", "broken.py"], "broken.py:1: invalid syntax"),
        (["trace", "1", "--file", "own.py"], "name a step or a file, not both"),
        (["check", "--file", "own.py", "--format", "q9"], "unknown format 'q9'"),
        (["check", "--file", "own.py", "--scheme", "A8"], "step 1 is of family A16, not A8"),
        (["check", "--file", "own.py", "--dtype", "float16"], "does not heed DTYPE=: leave it"),
        (["sass", "1", "--arch", "sm_999"], "the compiler has no architecture 'sm_999': it has"),
        (["sass", "--file", "numba.py"], "it does not compile"),
        (["diff", "--file", "other.py"], "the ladder has no step 77 to compare other.py with"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    filled()
    Path("empty.py").write_text(make(STEP), encoding="utf-8")
    Path("text.md").write_text("# Title\n", encoding="utf-8")
    Path("broken.py").write_text("def\n    number=1,\n", encoding="utf-8")
    Path("other.py").write_text(make(STEP).replace("number=1,", "number=77,"), encoding="utf-8")
    refused = make(STEP, tuple(solutions(1))).replace("= acc\n", "= acc + ord(str(m)[0])\n")
    Path("numba.py").write_text(refused, encoding="utf-8")
    assert cli.main(arguments) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1


@pytest.mark.skipif(why_no_gpu() is None, reason="this machine has a GPU")
def test_a_bench_of_a_file_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--file", filled()]) == 2
    assert "no CUDA GPU can be used here" in capsys.readouterr().err


# --- beside the step ------------------------------------------------------------------------------


def own_step(text: str) -> Work:
    path = Path(filled(text))
    return Work(exercises.own_step(path)[1], "A16", "q4_0")


def test_two_kernels_take_turns() -> None:
    """An invented clock that gives the file's kernel half of the step's time."""
    own = own_step(make(STEP, tuple(solutions(1))).replace("w4a16_naive", "w4a16_mine"))
    seconds = {"w4a16_mine": 1e-3, "w4a16_naive": 2e-3}
    watch = FakeStopwatch(lambda launch: seconds[launch.kernel.__name__])
    budget = Budget(warm_seconds=0.0, seconds=0.05, min_rounds=3)
    ours, theirs = beside(own, Work(STEP, "A16", "q4_0"), (3, 5, 64), Simulator(), watch, budget)
    assert ours.timing.us == pytest.approx(1000)
    assert theirs.timing.us == pytest.approx(2000)
    said = exercises.time_line(own, (3, 5, 64), ours, theirs)
    assert said == "W4A16 q4_0 3x5x64: yours 1000 us, the step 2000 us: 2.00x its speed"


def test_a_wrong_kernel_is_not_timed() -> None:
    own = own_step(make(STEP, tuple(solutions(1))).replace(" + z)", ")"))
    theirs = Work(STEP, "A16", "q4_0")
    with pytest.raises(ValueError, match="M=3 N=5 K=64: wrong: "):
        beside(own, theirs, (3, 5, 64), Simulator(), FakeStopwatch(), Budget())


def test_on_a_gpu_a_right_file_is_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    timed: list[tuple[str, str]] = []
    monkeypatch.setattr(exercises, "why_no_gpu", lambda: None)
    monkeypatch.setattr(
        exercises, "_show_times", lambda args, own, step: timed.append((own.name, step.name))
    )
    assert cli.main(["check", "--file", filled(make(STEP, (1,)))]) == 1
    assert timed == []
    assert cli.main(["check", "--file", filled()]) == 0
    assert timed == [(STEP.name, STEP.name)]


def test_a_file_as_a_work_takes_what_is_asked_for() -> None:
    args = SimpleNamespace(file=Path(filled()), steps=[], scheme=None, format=["q8_0"], dtype=None)
    work = exercises.work_of(args)
    assert (work.family, work.format) == ("A16", "q8_0")
    assert work.step.launch.__code__.co_filename == "own.py"
    assert Exercise.read(Path("own.py")).reference is STEP
