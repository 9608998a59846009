"""Duels, with a fake clock: who is timed when, what counts, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from results.measure import ab as fighting
from results.measure import comparisons as duel
from results.measure.ab import BURST, SUSTAINED, Round, Schedule, Side, fight, figures
from results.measure.bench import Bench
from results.measure.protocol import Budget
from results.record import schema as record
from results.record.schema import Environment, Git, Limits, Run
from steps import find, ladder
from steps.api.machines import Simulator
from steps.checks.select import UsageError
from steps.cli import run
from steps.contract import Work, why_no_gpu

SHORT = Schedule("sustained", 1e-3, 0.0, 0.0, least=4, most=4)


@dataclass
class Clock:
    """A device whose every graph takes `factor` times as long as the one before."""

    factor: float = 1.0
    log: list[Any] = field(default_factory=list)
    slow: float = 1.0

    def capture(self, launches: Sequence[tuple[str, int, float]]) -> Any:
        return Captured(self, tuple(launches))

    def rest(self, seconds: float) -> None:
        self.log.append(seconds)


@dataclass
class Captured:
    clock: Clock
    parts: tuple[tuple[str, int, float], ...]
    how: str = "graph"

    @property
    def launches(self) -> int:
        return len(self.parts)

    def seconds(self) -> float:
        self.clock.log.append((self.parts[0][0], [slot for _, slot, _ in self.parts]))
        self.clock.slow *= self.clock.factor
        return sum(seconds for _, _, seconds in self.parts) * self.clock.slow


def side(clock: Clock, name: str, us: float, slots: int = 3, chunk: float = 1e-3) -> Side:
    made = Side(clock, lambda slot: ((name, slot, us * 1e-6),), slots, chunk)
    clock.log.clear()
    return made


# --- the rounds -----------------------------------------------------------------------------------


def test_sides_take_turns_and_each_begins_every_second_round() -> None:
    clock = Clock()
    ours, rival = side(clock, "ours", 100), side(clock, "rival", 120)
    rounds = fight(ours, rival, SHORT)
    assert [name for name, _ in clock.log] == ["ours", "rival", "rival", "ours"] * 2 + [
        "ours",
        "rival",
    ], "one round is the warm-up"
    assert len(rounds) == 4
    for each in rounds:
        assert (each.ours, each.rival) == pytest.approx((100e-6, 120e-6))


def test_a_pause_comes_before_every_graph_of_a_burst_and_none_in_sustained_rounds() -> None:
    clock = Clock()
    ours, rival = side(clock, "ours", 100), side(clock, "rival", 100)
    fight(ours, rival, replace(SHORT, pause_seconds=0.02), clock.rest)
    assert clock.log[::2] == [0.02] * 10
    assert all(isinstance(entry, tuple) for entry in clock.log[1::2])
    clock.log.clear()
    fight(ours, rival, SHORT, clock.rest)
    assert 0.02 not in clock.log
    assert SUSTAINED.pause_seconds == 0 < BURST.pause_seconds
    assert BURST.chunk_seconds < BURST.pause_seconds / 10
    assert SUSTAINED.seconds >= 1


def test_a_drift_is_in_both_sides_of_a_round() -> None:
    """A device that gets 2 % slower with every graph: the ratio stays what it is."""
    clock = Clock()
    ours, rival = side(clock, "ours", 100), side(clock, "rival", 130)
    clock.factor = 1.02
    found = figures(fight(ours, rival, replace(SHORT, least=20, most=20)))
    assert found["p80_us"] > 1.3 * found["p20_us"]
    assert found["x_rival"] == pytest.approx(1.3, rel=0.01)


def test_rounds_go_on_for_their_time_and_the_warm_up_does_not_count() -> None:
    clock = Clock()
    ours, rival = side(clock, "ours", 100, slots=1), side(clock, "rival", 100, slots=1)
    rounds = fight(ours, rival, replace(SHORT, seconds=0.05, most=1000))
    assert len(rounds) == 25, "50 ms in rounds of two graphs of 1 ms"
    assert len(fight(ours, rival, replace(SHORT, seconds=9.0, most=7))) == 7
    clock.log.clear()
    fight(ours, rival, replace(SHORT, warm_seconds=0.02))
    assert len(clock.log) == 2 * (10 + 4)


@pytest.mark.parametrize(("slots", "us"), [(1, 10), (3, 100), (7, 400), (27, 900), (600, 3)])
def test_every_copy_is_read_before_any_is_read_again(slots: int, us: float) -> None:
    clock = Clock()
    one = side(clock, "ours", us, slots)
    for _ in range(40):
        one.run()
    read = [slot for _, graph in clock.log for slot in graph]
    assert read == [i % slots for i in range(len(read))]
    assert (one.products - 1) * us <= 1000, (
        "a graph takes its millisecond, and one product at least"
    )


def test_a_graph_is_captured_before_the_rounds_begin() -> None:
    clock = Clock()
    one = side(clock, "ours", 400, slots=30)

    def refuse(launches: Any) -> Any:
        raise AssertionError("captured in a round")

    clock.capture = refuse  # type: ignore[method-assign]
    for _ in range(20):
        one.run()


def test_the_median_is_of_the_ratios() -> None:
    """One slow round of each side: the ratio of two medians would be another."""
    rounds = [Round(1e-6, 2e-6), Round(2e-6, 2e-6), Round(2e-6, 6e-6), Round(1e-6, 1e-6)]
    found = figures(rounds[:3])
    assert found["us"] == pytest.approx(2.0)
    assert found["rival_us"] == pytest.approx(2.0)
    assert found["x_rival"] == pytest.approx(2.0)
    assert found["x_rival_p20"] == pytest.approx(1.4)
    assert found["x_rival_p80"] == pytest.approx(2.6)
    assert figures(rounds)["rounds"] == 4


# --- steps against a rival, in the simulator ------------------------------------------------------


@dataclass
class SimulatedClock:
    """Runs launches and takes what their kernel takes; NaN-proof against sides that do nothing."""

    us: float = 20.0
    l2_bytes: int = 1
    broken_after: int = 10**9
    runs: int = 0

    def capture(self, launches: Sequence[Any]) -> Any:
        watch = self

        class Replay:
            how = "graph"

            def __init__(self) -> None:
                self.launches = len(launches)

            def seconds(self) -> float:
                watch.issue(launches[-1])
                return watch.us * 1e-6 * len(launches)

        return Replay()

    def issue(self, launch: Any) -> float:
        self.runs += 1
        Simulator().run(launch)
        if self.runs > self.broken_after:
            out = next(x for x in launch.args if getattr(x, "shape", ()) == SHAPE[:2])
            out[0, 0] += 1
        return 1e-5

    def issue_and_wait(self, launch: Any) -> tuple[float, float]:
        return self.issue(launch), 1.0

    def duplicate(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def wait(self) -> None:
        pass

    def sm_mhz(self, replay: Any) -> float:
        return 1500.0


SHAPE = (3, 6, 64)


class NumpyRival:
    name, source, slots = "numpy", "numpy, in float32", 2

    def __init__(self, w: np.ndarray, a: np.ndarray, us: float, off: float) -> None:
        self.c, self._right = np.full((a.shape[0], w.shape[0]), np.nan, np.float32), a @ w.T + off
        self.stopwatch = self
        self.us, self.captures = us, 0

    def work(self, slot: int) -> Sequence[Any]:
        return (slot,)

    def capture(self, launches: Sequence[Any]) -> Any:
        rival, count = self, len(launches)
        self.captures += 1

        class Replay:
            how, launches = "graph", count

            def seconds(self) -> float:
                rival.c[...] = rival._right
                return rival.us * 1e-6 * count

        self.c[...] = self._right
        return Replay()

    def result(self) -> np.ndarray:
        c, self.c = self.c.copy(), np.full_like(self.c, np.nan)
        self.c[...] = self._right if self.captures == 0 else np.nan
        return c

    def sm_mhz(self, replay: Any) -> float:
        return 1400.0


def rivals(us: float = 25.0, off: float = 0.0) -> Callable[[np.ndarray], Any]:
    def of_weights(w: np.ndarray) -> Any:
        def of(a: np.ndarray) -> NumpyRival:
            made = NumpyRival(w, a, us, off)
            made.c[...] = made._right  # as cuBLAS has run once when it is there
            return made

        return of

    return of_weights


def bench_of(clock: SimulatedClock, limits: Limits | None = None) -> Bench:
    return Bench(Simulator(), clock, limits or Limits(), Budget())


BOTH = replace(find(5), outputs=("float32", "float16"), accuracy="fast")
FEW = (
    Schedule("sustained", 4e-5, 0.0, 0.0, least=2, most=2),
    Schedule("burst", 2e-5, 0.0, 0.0, least=1, most=1, pause_seconds=1e-6),
)


def fought(clock: SimulatedClock, rival: Any = None, **options: Any) -> list[record.Duel]:
    step = options.pop("step", find(5))
    works = [Work(step, "A8", "q4_0")]
    limits = options.pop("limits", None)
    bench = bench_of(clock, limits)
    return list(duel.duels(bench, works, [SHAPE], rival or rivals(), schedules=FEW, **options))


def test_a_step_meets_its_rival_at_each_pace() -> None:
    told: list[str] = []
    sustained, burst = fought(SimulatedClock(), report=told.append)
    assert told == ["step 5 W4A8 q4_0 to float32 at M=3 N=6 K=64"]
    assert [one.status for one in (sustained, burst)] == ["ok", "ok"], sustained.why
    assert (sustained.pace, burst.pace) == ("sustained", "burst")
    assert (sustained.rounds, burst.rounds) == (2, 1)
    assert (sustained.us, sustained.rival_us) == pytest.approx((20.0, 25.0))
    assert sustained.x_rival == pytest.approx(1.25)
    assert (sustained.sm_mhz, sustained.rival_sm_mhz) == (1500.0, 1400.0)
    assert (burst.sm_mhz, burst.pause_us) == (None, 1.0)
    assert (sustained.rival, sustained.source) == ("numpy", "numpy, in float32")
    assert sustained.source_hash == record.source_hash(5)
    text = record.to_json(Run(env=Environment(), duels=(sustained, burst)))
    assert record.from_json(text).duels[0].rounds == 2


def test_each_type_of_c_is_a_duel_unless_one_is_asked_for(monkeypatch) -> None:
    monkeypatch.setattr(duel, "_fought", lambda bench, ours, theirs, blank, schedules: blank)
    found = fought(SimulatedClock(), step=BOTH)
    assert [(one.output, one.pace) for one in found] == [
        ("float32", "sustained"),
        ("float32", "burst"),
        ("float16", "sustained"),
        ("float16", "burst"),
    ]
    assert {one.accuracy for one in found} == {"fast"}
    found = fought(
        SimulatedClock(), step=BOTH, which=lambda work, shape, output: output == "float16"
    )
    assert {one.output for one in found} == {"float16"}
    assert len(duel.fights([Work(BOTH, "A8", "q4_0")], [SHAPE] * 3)) == 6


def test_who_is_wrong_has_no_time() -> None:
    (one, two) = fought(SimulatedClock(broken_after=0))
    assert {one.status, two.status} == {"failed"}
    assert one.us is None
    assert "wrong" in (one.why or "")
    (one, _) = fought(SimulatedClock(broken_after=1))
    assert (one.why or "").startswith("right before timing, wrong after: wrong")
    (one, _) = fought(SimulatedClock(), rivals(off=0.01))
    assert "numpy is wrong: NMSE" in (one.why or "")
    (one, _) = fought(SimulatedClock(), rivals(off=np.nan))
    assert "18 outputs of numpy not finite" in (one.why or "")
    (one, _) = fought(SimulatedClock(), wrong={(5, "A8", "q4_0"): "it was wrong"})
    assert one.why == "it was wrong"


def test_a_time_that_cannot_be_is_refused() -> None:
    (one, _) = fought(SimulatedClock(us=1e-3), limits=Limits(copy_tbps=1e-3))
    assert one.status == "failed"
    assert "limits of this GPU" in (one.why or "")


def test_an_error_is_a_failed_duel_and_a_lost_context_ends_them(monkeypatch) -> None:
    def lost(*_: Any) -> Any:
        raise RuntimeError("no\nluck")

    monkeypatch.setattr(duel, "fight", lost)
    assert [one.why for one in fought(SimulatedClock())] == ["RuntimeError: no luck"] * 2
    monkeypatch.setattr(duel, "fatal", lambda _: True)
    with pytest.raises(RuntimeError):
        fought(SimulatedClock())


def test_in_a_bench_duel_those_with_wgmma_whose_products_are_cublas_s() -> None:
    works = [Work(step, step.families[-1], "q4_0") for step in ladder()]
    meant = duel.meant_to(works)
    assert [work.step.number for work in meant] == [12, 13, 14]
    found = duel.fights(meant, [(128, 64, 64), (512, 64, 64)], duel.meant)
    assert [(work.step.number, m) for work, (m, _, _), c in found if c == "float16"] == [
        (12, 128), (13, 128), (14, 128), (12, 512), (13, 512), (14, 512)
    ]  # fmt: skip
    assert [(w.step.number, m) for w, (m, _, _), c in found if c == "float32"] == [(12, 512)]


# --- the command ----------------------------------------------------------------------------------


def test_shapes_are_read_and_refused() -> None:
    assert duel.shapes_of(["512x4096x14336,1x32x32", "1X32X32"]) == [
        (512, 4096, 14336),
        (1, 32, 32),
    ]
    for text, said in (("5x4", "not a shape"), ("0x1x32", "not a shape"), ("1x1x33", "K=33")):
        with pytest.raises(UsageError, match=said):
            duel.shapes_of([text])


def test_schedules_are_chosen_and_lengthened() -> None:
    assert duel.scheduled() == (SUSTAINED, BURST)
    (one,) = duel.scheduled(3, ["sustained"])
    assert one == replace(SUSTAINED, seconds=3.0)
    assert duel.scheduled(3)[1] == BURST


def test_duels_join_a_run_of_the_same_commit_and_gpu(tmp_path: Path) -> None:
    first, other = fought(SimulatedClock())
    env = Environment(gpu="G", git=Git(sha="1"), utc="2026-01-02T00:00:00Z")
    path = record.write(Run(env=env, duels=(replace(first, us=99.0), other)), tmp_path)
    joined = duel.joined(duel._run_to_join(path, env), [first])
    assert [(one.pace, one.us) for one in joined.duels] == [
        ("sustained", pytest.approx(20.0)),
        ("burst", pytest.approx(20.0)),
    ]
    record.validate(joined)
    assert duel._run_to_join(tmp_path / "new.json", env) == Run(env=env)
    for change in ({"gpu": "H"}, {"git": Git(sha="2")}):
        with pytest.raises(UsageError, match="same commit and GPU"):
            duel._run_to_join(path, replace(env, **change))


@pytest.fixture
def on_a_gpu(monkeypatch) -> SimulatedClock:
    class Pretended(Simulator):
        name = "Pretended GPU"
        cc = (9, 0)

    clock = SimulatedClock()
    clock.clock = None  # type: ignore[attr-defined]
    monkeypatch.setattr(run, "machines", lambda _: ("Pretended GPU", lambda _: Pretended(), None))
    monkeypatch.setattr(Bench, "here", classmethod(lambda cls, budget: bench_of(clock)))
    monkeypatch.setattr(duel, "why_no_rival", lambda: None)
    monkeypatch.setattr(duel, "cublas", lambda clock: rivals())
    monkeypatch.setattr(duel, "SCHEDULES", FEW)
    return clock


def command(capsys: Any, *words: str) -> tuple[int, str, str]:
    from steps.cli.main import main

    status = main(["duel", *words])
    return status, *capsys.readouterr()


@pytest.mark.usefixtures("on_a_gpu")
def test_the_command_prints_and_adds_to_a_run(tmp_path: Path, capsys: Any) -> None:
    asked = ["5", "--formats", "q4_0", "--shapes", "3x6x64"]
    out = tmp_path / "run.json"
    status, printed, errors = command(capsys, *asked, "--out", str(out))
    assert (status, errors) == (0, "")
    assert printed.count("1.250x") == 6
    assert printed.endswith(f"wrote {out}\n")
    assert [one.pace for one in record.read(out).duels] == ["sustained", "burst"]
    status, printed, _ = command(capsys, *asked, "--json", "--pace", "burst")
    (one,) = json.loads(printed)
    assert (one["pace"], one["step"], one["x_rival"]) == ("burst", 5, pytest.approx(1.25))
    status, printed, errors = command(capsys, *asked, "--output", "float16")
    assert (status, printed) == (2, "")
    assert errors == "python -m steps duel: no step here writes C as float16\n"


def test_without_a_rival_the_command_is_one_sentence(on_a_gpu, monkeypatch, capsys) -> None:
    monkeypatch.setattr(duel, "why_no_rival", lambda: "there is no torch")
    status, _, errors = command(capsys, "5")
    assert (status, errors) == (2, "python -m steps duel: a duel takes two: there is no torch\n")


def test_a_failed_duel_is_said(on_a_gpu, capsys) -> None:
    on_a_gpu.broken_after = 0
    status, printed, errors = command(capsys, "5", "--format", "q4_0", "--shapes", "3x6x64")
    assert status == 1
    assert printed.count("FAILED") == 2
    assert errors.startswith("step 5 W4A8 q4_0 (3, 6, 64) to float32, sustained: wrong")


@pytest.mark.gpu
def test_a_duel_with_cublas_on_this_gpu() -> None:
    """Both sides right, timed in turn, and neither time below what the GPU allows."""
    pytest.importorskip("torch")
    if why := why_no_gpu() or duel.why_no_rival():
        pytest.skip(why)
    from steps.api.machines import Gpu

    bench, cc = Bench.here(Budget()), Gpu().cc
    able = [s for s in ladder() if not s.supports("q4_0", s.families[-1], cc, "float16")]
    if not able:
        pytest.skip("no step writes float16 here")
    step = able[-1]
    works = [Work(step, step.families[-1], "q4_0")]
    schedules = (
        replace(SUSTAINED, warm_seconds=0.02, seconds=0.1),
        replace(BURST, least=3, most=3),
    )
    found = list(
        duel.duels(
            bench, works, [(64, 512, 1024)], duel.cublas(bench.stopwatch.clock), schedules=schedules
        )
    )
    assert [one.status for one in found] == ["ok"] * 2 * len(step.outputs), [o.why for o in found]
    assert all(0.05 < (one.x_rival or 0) < 20 for one in found)


def test_a_rival_is_right_in_float16() -> None:
    """What a float16 product of float16 operands errs by is far below what is tolerated."""
    rng = np.random.default_rng(0)
    a, w = rng.standard_normal((16, 512)), rng.standard_normal((32, 512))
    c = a.astype(np.float16).astype(float) @ w.astype(np.float16).astype(float).T
    from reference import nmse

    assert nmse(c.astype(np.float16).astype(float), a @ w.T) < duel.RIVAL_NMSE / 3


def test_importing_the_rounds_needs_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, results.measure.ab; print('torch' in sys.modules, 'numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
    assert fighting.FIRST_LOOK > 1
