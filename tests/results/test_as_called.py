"""What a caller gets: which step a call chooses, what is stale, and a loop of calls on an invented
clock with NumPy in torch's place."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qformats import FORMATS
from reference.product import unquantized
from results.baselines import humming
from results.measure import as_called
from results.measure.as_called import SWEEP, TABLED, WAYS, Way, in_loops, missing
from results.measure.bench import Bench
from results.measure.protocol import Budget
from results.record import provenance
from results.record.schema import AsCalled, Environment, Limits, Run
from tests.results.fake_stopwatch import FakeStopwatch

H200 = SimpleNamespace(name="NVIDIA H200", cc=(9, 0), sms=132)
QUICK = Budget(
    replay_seconds=1e-3, warm_seconds=0.0, seconds=0.0, min_rounds=3, max_rounds=3, slow_rounds=1
)
SIZES = {(4096, 4096), (4096, 14336), (14336, 4096)}


def is_layer(way: Way) -> bool:
    return way.api == "QuantLinear"


def test_with_the_sweep_every_m_up_to_128_is_measured_once() -> None:
    calls = [*TABLED, *SWEEP]
    assert len(set(calls)) == len(calls)
    for accuracy in ("exact", "fast"):
        way = Way("QuantLinear", accuracy, "float16", "q4_0")
        for n, k in SIZES:
            ms = {m for (m, *nk), one in calls if one == way and tuple(nk) == (n, k)}
            assert set(range(1, 129)) <= ms


def test_a_loop_is_of_one_tabled_m_or_of_neighbours_in_the_sweep() -> None:
    loops = in_loops(reversed([*TABLED, *SWEEP]))
    assert sorted(map(str, (call for loop in loops for call in loop))) == sorted(
        map(str, [*TABLED, *SWEEP])
    )
    weights = [loop[0][0][1:] for loop in loops]
    assert weights == sorted(weights), "weights are packed once"
    for loop in loops:
        ms = [size[0] for size, _ in loop]
        if ms[0] in as_called.TOKENS:
            assert set(ms) == {ms[0]}
            assert len(loop) == len(WAYS)
        else:
            assert ms == sorted(ms)
            assert len(set(ms)) <= as_called.TOGETHER
            assert not set(ms) & set(as_called.TOKENS)
    assert in_loops([]) == []


@pytest.mark.parametrize("way", [way for way in WAYS if way.format in ("q4_0", "q8_0")], ids=str)
@pytest.mark.parametrize("m", [1, 512])
def test_what_is_compiled_is_what_the_call_launches(way: Way, m: int) -> None:
    choice = way.choice((m, 4096, 4096), H200)
    assert choice.runs_on(H200.cc)
    assert (choice.reading.source, choice.writes) == (way.dtype, way.dtype), "nothing is cast"
    assert choice.kernel.accuracy in ("exact", way.accuracy)


def row(size: Any, way: Way, **changes: Any) -> AsCalled:
    m, n, k = size
    step = way.choice(size, H200).kernel.number
    call = AsCalled(
        api=way.api,
        accuracy=way.accuracy,
        dtype=way.dtype,
        format=way.format,
        M=m,
        N=n,
        K=k,
        step=step,
        us=1.0,
        p20_us=1.0,
        p80_us=1.0,
        cublas_us=1.0,
        x_cublas=1.0,
        host_us=1.0,
        torch_host_us=1.0,
        rounds=3,
        source_hash=provenance.called_hash(way.api, step),
    )
    return replace(call, **changes)


def test_only_calls_that_are_missing_or_stale_are_measured() -> None:
    four = list(TABLED[:4])
    rows = (
        row(*four[0]),
        row(*four[1], source_hash="0" * 12),
        row(*four[2], step=1),
    )
    run = Run(env=Environment(), as_called=rows)
    assert missing(four, run, H200) == four[1:]
    assert missing([], run, None) == []


# --- a loop ---------------------------------------------------------------------------------------


class Tensor:
    """What a loop asks of a tensor."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __getitem__(self, at: Any) -> Tensor:
        index = tuple(x.values if isinstance(x, Tensor) else x for x in np.atleast_1d(at))
        if isinstance(at, tuple):
            return Tensor(self.values[index])
        return Tensor(self.values[at.values])

    def to(self, *_: Any) -> Tensor:
        return self

    cpu = double = to

    def numpy(self) -> np.ndarray:
        return self.values.astype(np.float64)

    def all(self) -> bool:
        return bool(self.values.all())


class FakeCalls:
    """Both sides by NumPy."""

    def __init__(self, data: Any, stopwatch: Any, machine: Any) -> None:
        self.torch = SimpleNamespace(
            from_numpy=Tensor,
            isfinite=lambda x: Tensor(np.isfinite(x.values)),
            cuda=SimpleNamespace(synchronize=lambda: None),
            no_grad=nullcontext,
        )
        self.data, self.stopwatch, self.machine = data, stopwatch, machine
        self.captures = SimpleNamespace(capture=stopwatch.capture, warm_up=lambda call: call())
        made.append(self)
        self.prepared: list[Way] = []
        self.rivals: list[tuple[int, str]] = []
        self.begun = self.released = 0

    def prepare(self, ways: Any) -> None:
        self.prepared += ways

    def _w(self, name: str) -> np.ndarray:
        return FORMATS[name].dequantize(self.data.blocks(name))

    def _product(self, who: str, m: int, name: str, off: float = 0.0) -> Any:
        a, w = self.data.a("float32")[:m], self._w(name)

        def call() -> Tensor:
            return Tensor(a @ w.T + off)

        call.who = who  # type: ignore[attr-defined]
        return call

    def meant(self, name: str, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        return unquantized(self.data.a("float32")[rows], self._w(name)[columns])

    def ours(self, way: Way, m: int) -> tuple[list[Any], int]:
        off = 9.0 if way.dtype == "bfloat16" else 0.0
        return [self._product(f"{way} {m}", m, way.format, off)] * 3, 10

    def torchs(self, way: Way, m: int) -> list[Any]:
        self.rivals.append((m, way.dtype if is_layer(way) else "plan"))
        return [self._product("torch", m, "q4_0")] * 2

    def hummings(self, name: str, m: int) -> list[Any]:
        return [self._product(name, m, "q4_0", 9.0 if name == humming.W4A8 else 0.0)] * 2

    def begin_loop(self) -> None:
        self.begun += 1

    def end_loop(self) -> None:
        self.released += 1

    def release(self) -> None:
        pass


made: list[FakeCalls] = []


def cost(call: Any) -> float:
    """Seconds of a call by who makes it."""
    if call.who.startswith("humming"):
        return 4e-3
    return 3e-3 if call.who == "torch" else 1e-3 if "fast" in call.who else 2e-3


def bench(watch: FakeStopwatch, say: Any = lambda _: None) -> Bench:
    return Bench(H200, watch, Limits(), QUICK, say=say)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> FakeStopwatch:
    made.clear()
    monkeypatch.setattr(as_called, "Calls", FakeCalls)
    monkeypatch.setattr(as_called, "TOKENS", (2, 4))
    monkeypatch.setattr(humming, "why_not", lambda: None)
    return FakeStopwatch(cost=cost, simulated=False)


def test_a_loop_has_every_way_beside_torch_and_leaves_out_what_is_wrong(
    watch: FakeStopwatch,
) -> None:
    said: list[str] = []
    heard: list[str] = []
    ways = [way for way in WAYS if way.format in ("q4_0", "q8_0")]
    sizes = [(2, 8, 64), (4, 8, 64)]
    wanted = [(size, way) for size in sizes for way in ways]
    loops = list(as_called.measure(bench(watch, said.append), wanted, QUICK, heard.append))
    assert heard == ["calls at M=2 N=8 K=64", "calls at M=4 N=8 K=64"]
    right = [way for way in ways if way.dtype != "bfloat16"]
    for (rows, peers), size in zip(loops, sizes, strict=True):
        assert {(one.api, one.accuracy, one.dtype, one.format) for one in rows} == {
            (way.api, way.accuracy, way.dtype, way.format) for way in right
        }
        for one in rows:
            assert one.shape == size
            assert not one.swept
            assert one.us == pytest.approx(1000 if one.accuracy == "fast" else 2000)
            assert one.cublas_us == pytest.approx(3000)
            assert one.x_cublas == pytest.approx(3.0 if one.accuracy == "fast" else 1.5)
            assert one.rounds == 3
            assert min(one.host_us or 0, one.torch_host_us or 0) > 0
            assert one.source_hash == provenance.called_hash(one.api, 10)
        (beside,) = peers
        assert (beside.peer, beside.format) == (humming.W4A16, "int4_group32")
        assert (beside.shape, beside.us, beside.same_run) == (size, pytest.approx(4000), True)
    (calls,) = made
    assert set(calls.prepared) == set(ways), "once for both loops"
    assert calls.begun == calls.released == 2
    wrong = 2 * (len(ways) - len(right)) + 2
    assert len(said) == wrong
    assert said[0].startswith("gemm.plan exact bfloat16 q4_0 at (2, 8, 64) was not measured: ")
    assert all("NMSE" in one for one in said)
    counted = max(watch.rounds, key=len)
    assert len(counted) == len(right) + 3 + 1, "torch once for plans and once for each dtype"


def test_the_sweep_has_several_m_in_a_loop_and_no_host_time(watch: FakeStopwatch) -> None:
    wanted = [((m, 8, 64), way) for m in (1, 3, 5, 6) for way in as_called.SWEEP_WAYS]
    heard: list[str] = []
    ((rows, peers),) = as_called.measure(bench(watch), wanted, QUICK, heard.append)
    assert heard == ["calls at M=1-6 N=8 K=64"]
    assert [(one.M, one.accuracy) for one in rows] == [
        (size[0], way.accuracy) for size, way in wanted
    ]
    assert all(one.swept and one.torch_host_us is None for one in rows)
    assert all(one.x_cublas == pytest.approx(3e-3 / (one.us * 1e-6)) for one in rows)
    assert made[0].rivals == [(1, "float16"), (3, "float16"), (5, "float16"), (6, "float16")]
    assert peers == []
    assert len(max(watch.rounds, key=len)) == len(wanted) + 4


def test_without_its_package_humming_is_one_sentence(
    watch: FakeStopwatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(humming, "why_not", lambda: "it is not installed")
    said: list[str] = []
    wanted = [((m, 8, 64), WAYS[0]) for m in (2, 4)]
    loops = list(as_called.measure(bench(watch, said.append), wanted, QUICK))
    assert [peers for _, peers in loops] == [[], []]
    assert said == ["Humming is not measured: it is not installed"]
    assert list(as_called.measure(bench(watch, said.append), [], QUICK)) == []
    assert len(said) == 1
