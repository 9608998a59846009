"""From works to rows, on a fake stopwatch: what is measured, in which order, and what is not."""

from __future__ import annotations

import itertools
import json
from argparse import Namespace
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reference import Problem
from results.measure import protocol as measure
from results.measure.protocol import Budget, bench
from results.measure.protocol import comparisons as duel
from results.record import schema as record
from results.record.schema import Environment, Limits
from steps.api.machines import Simulator
from steps.checks import run as checks
from steps.checks.cases import Case
from steps.checks.run import Outcome, Outcomes, check_works
from steps.checks.select import select
from steps.cli import bench as matrix
from steps.cli import run
from steps.contract import Work
from steps.registry import find, ladder

SECONDS = {1: 8e-3, 2: 6e-3, 3: 4e-3, 4: 2e-3, 5: 1e-3}
"""How long a launch of each step takes on the fake clock: every rung goes up."""


@dataclass
class FakeReplay:
    parts: list
    duration: float
    how: str = "graph"

    @property
    def launches(self) -> int:
        return len(self.parts)

    def seconds(self) -> float:
        Simulator().run(self.parts[-1])
        return self.duration


@dataclass
class FakeStopwatch:
    """Runs launches when they are issued, of a replay the last one; the time is that of the step at
    hand."""

    now: int = 1
    l2_bytes: int = 1
    issued: list[str] = field(default_factory=list)

    def capture(self, launches):
        return FakeReplay(list(launches), SECONDS[self.now] * len(launches))

    def issue(self, launch):
        Simulator().run(launch)
        self.issued.append(launch.kernel.__name__)
        return 1e-5

    def issue_and_wait(self, launch):
        return self.issue(launch), 1.0  # "slow": one launch is enough of a warm-up

    def duplicate(self, array):
        return array.copy()

    def wait(self):
        pass

    def sm_mhz(self, replay):
        return None


class TimedBench(bench.Bench):
    """A bench that tells its stopwatch which step is timed."""

    def row(self, work: Work, task: bench.Task, packed: Any, dtype: Any = np.float32) -> record.Row:
        self.stopwatch.now = work.step.number
        return super().row(work, task, packed, dtype)


def fake_bench(limits: Limits | None = None) -> TimedBench:
    return TimedBench(Simulator(), FakeStopwatch(), limits or Limits(), Budget().scaled(0.01))


SHAPES = [(1, 6, 32), (2, 4, 64), (3, 6, 32)]


def test_every_work_at_every_shape_with_its_ratios() -> None:
    works = select(ladder()[:5], ["q4_0"])
    found = bench.sorted_rows(list(bench.rows(fake_bench(), works, SHAPES)))
    assert [row.status for row in found] == ["ok"] * 6 * len(SHAPES), [row.why for row in found]
    assert {row.shape for row in found} == set(SHAPES)
    first = found[:6]
    assert [(row.step, row.family) for row in first] == [
        (1, "A16"),
        (2, "A8"),
        (3, "A16"),
        (3, "A8"),
        (4, "A8"),
        (5, "A8"),
    ]
    assert [row.x_step1 for row in first] == pytest.approx([1, 8 / 6, 2, 2, 4, 8])
    assert [row.x_parent for row in first[1:]] == pytest.approx([8 / 6, 2, 1.5, 2, 2])
    assert all(row.nmse_same_operands < 1e-11 for row in first)


def test_a_step_that_writes_c_in_two_types_has_a_row_for_each(monkeypatch) -> None:
    both = replace(find(5), outputs=("float32", "float16"))
    asked: list[str] = []

    def noted(self: Any, work: Work, task: Any, packed: Any, dtype: Any) -> record.Row:
        asked.append(dtype)
        return measure.blank_row(work.step, "q4_0", work.scheme, (2, 4, 64), dtype)

    monkeypatch.setattr(TimedBench, "row", noted)
    found = list(bench.rows(fake_bench(), [Work(both, "A8", "q4_0")], [(2, 4, 64)]))
    assert asked == [row.output for row in found] == ["float32", "float16"]
    wrong = {(5, "A8", "q4_0"): "no"}
    found = list(bench.rows(fake_bench(), [Work(both, "A8", "q4_0")], [(2, 4, 64)], wrong=wrong))
    record.validate(record.Run(env=Environment(), rows=tuple(found)))
    assert [row.output for row in found] == ["float32", "float16"]
    assert [r.output for r in bench.sorted_rows(found[::-1])] == ["float32", "float16"]


def test_steps_of_one_problem_are_neighbours_and_weights_are_made_once() -> None:
    told: list[str] = []
    works = select((find(1), find(2)), ["q4_0", "q8_0"])
    list(bench.rows(fake_bench(), works, SHAPES, report=told.append))
    assert told[:4] == [
        "step 1 W4A16 q4_0 at M=1 N=6 K=32",
        "step 2 W4A8 q4_0 at M=1 N=6 K=32",
        "step 2 W4A8 q4_0 at M=3 N=6 K=32",
        "step 1 W4A16 q4_0 at M=3 N=6 K=32",
    ]
    assert len(told) == 2 * 2 * len(SHAPES)


def test_the_first_tokens_of_a_problem_share_its_weights() -> None:
    whole = Problem(5, 4, 64, "q5_1")
    part = bench.FirstTokens(2, 4, 64, "q5_1", of=whole)
    assert part.blocks is whole.blocks
    assert part.w is whole.w
    np.testing.assert_array_equal(part.a, whole.a[:2])
    with pytest.raises(ValueError, match="the first 6 tokens"):
        _ = bench.FirstTokens(6, 4, 64, "q5_1", of=whole).a


def test_what_failed_its_checks_is_not_timed() -> None:
    measuring = fake_bench()
    works = select((find(1),), ["q4_0"])
    wrong = {(1, "A16", "q4_0"): "step 1 is wrong at M=1"}
    (row,) = bench.rows(measuring, works, [(2, 4, 32)], wrong=wrong)
    assert (row.status, row.why, row.kernel_us) == ("failed", "step 1 is wrong at M=1", None)
    assert measuring.stopwatch.issued == []


def test_an_error_is_one_failed_row_and_a_lost_context_ends_the_run(monkeypatch) -> None:
    works = select((find(1), find(2)), ["q4_0"])
    measuring = fake_bench()
    monkeypatch.setattr(
        TimedBench, "row", lambda *_: (_ for _ in ()).throw(RuntimeError("out of\nluck"))
    )
    found = list(bench.rows(measuring, works, [(2, 4, 32)]))
    assert [(row.status, row.why) for row in found] == [("failed", "RuntimeError: out of luck")] * 2
    monkeypatch.setattr(bench, "fatal", lambda _: True)
    with pytest.raises(RuntimeError):
        list(bench.rows(measuring, works, [(2, 4, 32)]))


def test_a_time_above_the_machines_limit_is_no_record() -> None:
    limits = Limits(copy_tbps=1e-12, read_tbps=1e-12)
    (row,) = bench.rows(fake_bench(limits), select((find(1),), ["q4_0"]), [(2, 4, 32)])
    assert row.status == "failed"
    assert "limits of this GPU" in (row.why or "")


def test_a_bench_is_saved_as_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    found = list(bench.rows(fake_bench(), select((find(1),), ["q4_0"]), [(2, 4, 32), (1, 4, 32)]))
    recorder = bench.Recorder(Environment(gpu="a GPU", utc="2026-01-02T03:04:05Z"), Limits(), path)
    assert recorder.save(found[:1]) == path
    assert len(record.read(path).rows) == 1
    recorder.save(found)
    assert len(record.read(path).rows) == 2
    assert list(tmp_path.iterdir()) == [path], "one file, replaced whole"


def test_a_time_budget_is_shared_by_the_rows() -> None:
    ten, twenty = bench.budget_for(30, 10), bench.budget_for(30, 20)
    assert ten.kernel_seconds == pytest.approx(2 * twenty.kernel_seconds)
    total = ten.kernel_seconds + ten.total_seconds + ten.activation_seconds + ten.warm_seconds
    assert 10 * total == pytest.approx(30)


# --- checking -------------------------------------------------------------------------------------


class Broken(Simulator):
    def run(self, launch) -> None:
        raise RuntimeError("an unspecified launch failure")


def test_an_exception_is_a_failure_and_the_other_cases_go_on() -> None:
    works = select((find(1),), ["q4_0", "q8_0"])
    some = (Case((1, 2, 32), "normal", order=5), Case((2, 1, 32), "normal"))
    outcomes = check_works(works, lambda _: some, lambda order: (Broken if order else Simulator)())
    assert not outcomes.ok
    assert outcomes.broken is None
    for outcome in outcomes.each:
        assert outcome.cases == 2
        (sentence,) = outcome.failures
        assert "at M=1 N=2 K=32 normal seed 0 order 5: RuntimeError: an unspecified" in sentence


def test_a_lost_context_ends_the_checks(monkeypatch) -> None:
    monkeypatch.setattr(checks, "fatal", lambda _: True)
    works = select((find(1),), ["q4_0", "q8_0"])
    some = (Case((1, 2, 32), "normal"), Case((2, 1, 32), "normal"))
    outcomes = check_works(works, lambda _: some, lambda _: Broken())
    assert not outcomes.ok
    assert len(outcomes.each) == 1, "nothing after it can be trusted"
    assert outcomes.each[0].cases == 1
    assert "launch failure" in (outcomes.broken or "")


def test_only_the_drivers_errors_can_be_fatal() -> None:
    assert not checks.fatal(RuntimeError("no"))
    assert not checks.fatal(MemoryError())


# --- the table and the JSON of a measured run -----------------------------------------------------


@pytest.fixture
def on_a_gpu(monkeypatch) -> None:
    """`run` believes in a GPU: the simulator under another name, and the fake stopwatch."""

    class Pretended(Simulator):
        name = "Pretended GPU"
        cc = (9, 0)

    monkeypatch.setattr(run, "machines", lambda _: ("Pretended GPU", lambda _: Pretended(), None))
    monkeypatch.setattr(run, "compile_ahead", lambda *_: 0)
    monkeypatch.setattr(bench.Bench, "here", classmethod(lambda cls, budget: fake_bench()))
    monkeypatch.setattr(
        run, "cases", lambda *args, **options: (Case((1, 2, 32), "normal"), Case((3, 2, 32), "llm"))
    )


def asked(**changes) -> Namespace:
    fields = {
        "command": "run",
        "steps": ["5"],
        "format": ["q4_0"],
        "scheme": None,
        "m": 2,
        "n": 8,
        "k": 32,
        "dist": None,
        "seed": 0,
        "order": None,
        "gguf": None,
        "tensor": None,
        "json": False,
        "save": False,
        "gpus": None,
        "part": None,
    }
    return Namespace(**fields | changes)


@pytest.mark.usefixtures("on_a_gpu")
def test_a_measured_run_prints_one_table(capsys) -> None:
    assert run.run(asked()) == 0
    title, _, head, _, *lines = capsys.readouterr().out.splitlines()
    assert title == "Pretended GPU, M=2 N=8 K=32"
    for name in (
        "kernel error",
        "format error",
        "kernel",
        "total",
        "chain",
        "TFLOPS",
        "GB/s",
        "of limit",
        "verdict",
    ):
        assert name in head
    assert [line.split()[0] for line in lines] == ["1", "4", "5"], "and what it is compared with"
    assert "2.00x" in lines[-1]
    assert "8.00x" in lines[-1]
    assert lines[-1].endswith("ok, 2 cases")


@pytest.mark.usefixtures("on_a_gpu")
def test_a_measured_run_as_json(capsys) -> None:
    assert run.run(asked(json=True)) == 0
    data = json.loads(capsys.readouterr().out)
    assert [row["step"] for row in data["rows"]] == [1, 4, 5]
    assert all(row["status"] == "ok" and row["kernel_us"] > 0 for row in data["rows"])


@pytest.mark.usefixtures("on_a_gpu")
def test_a_wrong_step_is_shown_but_not_timed(monkeypatch, capsys) -> None:
    def wrong(works, *_):
        each = [Outcome(work, 2, failures=(f"{work} is wrong",)) for work in works]
        return Outcomes(each)

    monkeypatch.setattr(run, "check_works", wrong)
    assert run.run(asked(steps=["1"])) == 1
    printed = capsys.readouterr()
    assert "FAILED 2" not in printed.out
    assert "FAILED 1 of 2 cases" in printed.out
    assert printed.err == "step 1 W4A16 q4_0 is wrong\n"


@pytest.mark.usefixtures("on_a_gpu")
def test_a_bench_checks_measures_records_and_prints(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(bench, "same_work_by_others", lambda *_, **__: ())
    out = tmp_path / "run.json"
    args = asked(command="bench", out=out, seconds=None, no_peers=False, dist="golden")
    args.no_duels = False
    del args.order
    assert matrix.bench(args) == 0
    saved = record.read(out)
    assert [(row.step, row.shape) for row in saved.rows] == [(5, (2, 8, 32))]
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.splitlines()[-1] == f"wrote {out}"
    assert "normal data" in printed.out


@pytest.mark.usefixtures("on_a_gpu")
def test_the_duels_of_a_bench_are_in_its_file(tmp_path, monkeypatch, capsys) -> None:
    from tests.results.test_record import make_duel

    said: list[Any] = []

    def fight(measuring: Any, works: Any, shapes: Any, rivals: Any, **options: Any) -> Any:
        said.append(([work.step.number for work in works], list(shapes), options["wrong"]))
        assert options["overlap"], "as the layers of a model run"
        yield make_duel(pace="burst")
        yield make_duel(status="failed", why="it was wrong", us=None)

    def bench_of(**changes: Any) -> int:
        given = {"command": "bench", "out": out, "seconds": None, "no_peers": False}
        return matrix.bench(asked(**given | {"no_duels": False} | changes))

    out = tmp_path / "run.json"
    monkeypatch.setattr(bench, "same_work_by_others", lambda *_, **__: ())
    monkeypatch.setattr(duel, "duels", fight)
    monkeypatch.setattr(duel, "cublas", lambda clock: None)
    monkeypatch.setattr(duel, "FEWEST", 2)
    assert bench_of(m=2) == 0, "step 5 does not duel"
    assert said == []
    monkeypatch.setattr(duel, "meant_to", lambda works: works)
    monkeypatch.setattr(duel, "meant", lambda *_: True)
    monkeypatch.setattr(duel, "why_no_rival", lambda: "nobody is here")
    capsys.readouterr()
    assert bench_of(m=2) == 0
    assert capsys.readouterr().err == "no duels: nobody is here\n"
    monkeypatch.setattr(duel, "why_no_rival", lambda: None)
    assert bench_of(no_duels=True) == 0
    assert said == []
    assert bench_of(m=2) == 1
    assert said == [([5], [(2, 8, 32)], {})]
    assert [(one.pace, one.status) for one in record.read(out).duels] == [
        ("sustained", "failed"),
        ("burst", "ok"),
    ]
    printed = capsys.readouterr()
    assert "(512, 4096, 4096): it was wrong" in printed.err
    assert "1.020x" in printed.out
    said.clear()
    bench_of(m=1)
    assert said == [], "few tokens need no duel"


@pytest.mark.usefixtures("on_a_gpu")
def test_a_bench_keeps_what_it_had_when_the_gpu_is_lost(tmp_path, monkeypatch, capsys) -> None:
    real = bench.rows

    def lost(*args, **options):
        yield from itertools.islice(real(*args, **options), 1)
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(bench, "rows", lost)
    monkeypatch.setattr(matrix, "fatal", lambda _: True)
    out = tmp_path / "run.json"
    args = asked(command="bench", steps=["1", "2"], out=out, seconds=1, no_peers=False)
    args.no_duels = False
    assert matrix.bench(args) == 1
    assert [row.step for row in record.read(out).rows] == [1]
    assert "the run ended early: RuntimeError: an illegal memory access" in capsys.readouterr().err
