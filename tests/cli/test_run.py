"""`run` and `ladder` on a GPU: what is measured at which shape, and what is printed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from results.record.schema import Limits
from steps.checks.run import Outcome, Outcomes
from steps.cli import main as cli
from steps.cli import run
from steps.registry import find, ladder
from tests.cli.pretended import PretendedGpu, row

CHEAP = ["--format", "q4_0"]


@pytest.fixture
def unchecked(monkeypatch: Any) -> None:
    """Every check passes, without a kernel."""
    monkeypatch.setattr(
        run, "check_works", lambda works, *_: Outcomes([Outcome(work, 2) for work in works])
    )


def numbers(works: Any) -> list[int]:
    return [work.step.number for work in works]


def test_a_step_is_measured_at_its_home_shapes_with_its_parent(
    measured: list[Any], capsys: Any
) -> None:
    assert cli.main(["run", "5", *CHEAP]) == 0
    (at,) = measured
    assert {shape: numbers(works) for shape, works in at.items()} == {(512, 4096, 4096): [4, 5]}
    title, _, head, _, *lines = capsys.readouterr().out.splitlines()
    assert title == "Pretended GPU, each step at its home shape"
    for name in (
        "MxNxK",
        "NMSE, kernel",
        "kernel us",
        "total us",
        "x parent",
        "x cuBLAS",
        "verdict",
    ):
        assert name in head
    assert [line.split()[0] for line in lines] == ["4", "5"]
    assert "2.00x" in lines[-1]
    assert lines[-1].endswith("ok, 2 cases")
    assert cli.main(["run", "5", *CHEAP, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [check["step"] for check in data["checks"]] == [4, 5]
    assert [row["step"] for row in data["rows"]] == [4, 5]
    assert all(row["kernel_us"] > 0 for row in data["rows"])


@pytest.mark.usefixtures("unchecked")
def test_the_ladder_measures_every_step_at_the_home_that_charts_show(
    measured: list[Any], capsys: Any
) -> None:
    assert cli.main(["ladder", *CHEAP]) == 0
    (at,) = measured
    for step in ladder():
        assert step.number in numbers(at[step.home_shapes[0]])
        for parent in step.parents.values():
            assert parent in numbers(at[step.home_shapes[0]])
    assert set(at) == {step.home_shapes[0] for step in ladder()}
    lines = capsys.readouterr().out.splitlines()
    for step in ladder():
        home = "x".join(map(str, step.home_shapes[0]))
        assert sum(line.split()[:2] == [str(step.number), step.name[7:]] for line in lines) >= 1
        assert any(line.startswith(f"{step.number:4}  ") and home in line for line in lines)


@pytest.mark.usefixtures("unchecked")
def test_a_single_step_has_all_of_its_homes_and_m_n_and_k_replace_theirs(
    measured: list[Any], capsys: Any
) -> None:
    step = next(one for one in ladder() if len(one.home_shapes) > 1)
    assert cli.main(["run", str(step.number), *CHEAP]) == 0
    assert tuple(measured.pop()) == step.home_shapes
    capsys.readouterr()
    assert cli.main(["run", "2", "17", *CHEAP, "--m", "4"]) == 0
    assert {shape: numbers(works) for shape, works in measured[0].items()} == {
        (4, 4096, 4096): [1, 2],
        (4, 4096, 14336): [16, 17],
    }
    assert "at the shape asked for" in capsys.readouterr().out.splitlines()[0]


@pytest.mark.usefixtures("unchecked", "measured")
def test_several_steps_are_folded_unless_long_is_asked_for(capsys: Any) -> None:
    assert cli.main(["run", "1", "2"]) == 0
    assert re.search(r"naive_w4a8 +A8 +512x4096x4096", capsys.readouterr().out)
    assert cli.main(["run", "1", "2", "--long"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.split()[:2] == ["2", "W5A8"] for line in lines) == 2


@pytest.mark.usefixtures("measured")
def test_what_failed_is_shown_by_format_and_said(monkeypatch: Any, capsys: Any) -> None:
    def wrong(works: Any, *_: Any) -> Outcomes:
        failures = {find(2).number: ("step 2 is wrong",)}
        return Outcomes(
            [Outcome(work, 2, failures=failures.get(work.step.number, ())) for work in works]
        )

    monkeypatch.setattr(run, "check_works", wrong)
    assert cli.main(["run", "1", "2", *CHEAP]) == 1
    printed = capsys.readouterr()
    folded, _, details = printed.out.partition("What failed, by format")
    assert "FAILED q4_0" in folded
    assert "FAILED 1 of 2 cases" in details
    assert "W4A16" not in details, "step 1 is right"
    assert printed.err == "step 2 is wrong\n"


def test_a_lost_gpu_ends_the_run_before_anything_is_timed(
    measured: list[Any], monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(run, "check_works", lambda *_: Outcomes([], "an illegal address"))
    assert cli.main(["run", "1", *CHEAP]) == 1
    assert measured == []
    assert capsys.readouterr().err == "the run ended early: an illegal address\n"


@pytest.mark.usefixtures("unchecked", "measured")
def test_the_ladder_ends_with_its_chart(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["ladder", *CHEAP]) == 0
    drawn = tmp_path / "build" / "ladder.svg"
    assert capsys.readouterr().out.splitlines()[-1] == "the ladder as a chart: build/ladder.svg"
    assert drawn.read_text(encoding="utf-8").startswith("<?xml")
    drawn.unlink()
    assert cli.main(["ladder", *CHEAP, "--m", "3"]) == 0
    assert not drawn.exists(), "no step is at home there"
    assert cli.main(["run", "1", "2", *CHEAP]) == 0
    assert not drawn.exists(), "two steps are no ladder"


def size_of(choice: Any) -> Any:
    return choice.request.m, choice.request.n, choice.request.k


@pytest.mark.usefixtures("measured")
def test_all_that_a_run_launches_is_compiled_first(monkeypatch: Any) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(run, "compile_ahead", lambda wanted, gpu, say: seen.extend(wanted))
    assert cli.main(["run", "5", *CHEAP]) == 0
    shapes = ((1, 2, 32), (3, 2, 32), (512, 4096, 4096))
    assert {(one.kernel.number, size_of(one), one.writes) for one in seen} == {
        (number, size, "float32") for number in (4, 5) for size in shapes
    }


@pytest.mark.usefixtures("unchecked")
def test_of_a_dtype_that_is_asked_for_nothing_else_is_measured(
    measured: list[Any], monkeypatch: Any, capsys: Any
) -> None:
    """Steps and parents that write it, checked and timed; A comes so where they read it."""
    seen: list[Any] = []
    checked: list[Any] = []

    def passed(works: Any, *rest: Any) -> Outcomes:
        checked.append(rest[-1])
        return Outcomes([Outcome(work, 2) for work in works])

    monkeypatch.setattr(run, "compile_ahead", lambda wanted, gpu, say: seen.extend(wanted))
    monkeypatch.setattr(run, "check_works", passed)
    home = find(11).home_shapes[0]
    for dtype in ("float16", "bfloat16"):
        assert cli.main(["run", "5", "11", "13", *CHEAP, "--dtype", dtype]) == 0
        with_parents = [11, 12, 13] if dtype == "float16" else [11, 13]  # 12 has no other
        assert {at: numbers(works) for at, works in measured.pop().items()} == {home: with_parents}
        assert capsys.readouterr().out.startswith(
            f"Pretended GPU, each step at its home shape, C in {dtype}\n"
        )
        assert {(one.writes, one.reading.source) for one in seen} == {(dtype, dtype)}
        assert {size_of(one) for one in seen} == {home, (1, 2, 32), (3, 2, 32)}
        seen.clear()
    assert checked == ["float16", "bfloat16"]
    assert cli.main(["run", "13", *CHEAP]) == 0
    of_run = {(one.writes, one.reading.source) for one in seen if size_of(one) == home}
    assert of_run == {(find(13).outputs[0], find(13).inputs[0])}
    assert checked[2] is None, "each step in its own"


def test_a_gpu_that_is_lost_while_it_measures_leaves_what_was_measured(
    monkeypatch: Any, capsys: Any
) -> None:
    gpu = PretendedGpu()
    asked: list[Any] = []

    def measured_loops(bench: Any, loops: Any, *, wrong: Any, report: Any, **data: Any) -> Any:
        asked.append(([size for size, _ in loops], wrong, data))
        shape, own = loops[0]
        yield [row(one.work, shape) for one in own], []
        raise RuntimeError("an illegal address")

    monkeypatch.setattr(run, "machines", lambda _: (gpu.name, lambda _: gpu, None))
    monkeypatch.setattr(run, "compile_ahead", lambda *_: 0)
    monkeypatch.setattr(
        run,
        "check_works",
        lambda works, *_: Outcomes(
            [Outcome(w, 1, failures=("no",) * (w.format == "q8_0")) for w in works]
        ),
    )
    monkeypatch.setattr(run, "fatal", lambda error: "illegal" in str(error))
    here = SimpleNamespace(limits=Limits())
    monkeypatch.setattr(run.benching.Bench, "here", classmethod(lambda *_: here))
    monkeypatch.setattr(run.benching, "measure_loops", measured_loops)
    command = ["run", "2", "17", "--format", "q4_0,q8_0", "--dist", "llm", "--seed", "3", "--long"]
    assert cli.main(command) == 1
    printed = capsys.readouterr()
    assert printed.err.splitlines() == ["no"] * 4 + [
        "the run ended early: RuntimeError: an illegal address"
    ]
    assert "2.00x" in printed.out, "step 2 beside step 1"
    ((shapes, wrong, data),) = asked
    assert shapes == [(512, 4096, 4096), (8, 4096, 14336)]
    assert {key[2] for key in wrong} == {"q8_0"}
    assert data == {"distribution": "llm", "seed": 3, "given": None}
