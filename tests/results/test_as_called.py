"""What a caller gets: which step a call chooses, what is stale, and a loop of calls on an invented
clock with NumPy in torch's place."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from results.measure import as_called
from results.measure.as_called import SHAPES, WAYS, Way, host_us, missing
from results.measure.protocol import Budget
from results.record import provenance
from results.record.schema import AsCalled, Environment, Run
from steps.components.activations.layouts import inputs
from tests.results.fake_stopwatch import FakeStopwatch

H200 = SimpleNamespace(name="NVIDIA H200", cc=(9, 0), sms=132)
QUICK = Budget(
    replay_seconds=1e-3, warm_seconds=0.0, seconds=0.0, min_rounds=3, max_rounds=3, slow_rounds=1
)
CALLS = [(size, way) for size in SHAPES for way in WAYS]


def test_calls_are_of_three_sizes_of_weights_from_one_token_to_4096() -> None:
    assert len(SHAPES) == 24
    assert {(n, k) for _, n, k in SHAPES} == {(4096, 4096), (4096, 14336), (14336, 4096)}
    assert {m for m, _, _ in SHAPES} == {1, 8, 16, 32, 64, 128, 512, 4096}
    assert {str(way) for way in WAYS} == {
        "gemm.plan exact float32",
        "gemm.plan exact float16",
        "QuantLinear exact float32",
        "QuantLinear exact float16",
        "QuantLinear exact bfloat16",
        "QuantLinear fast float16",
    }


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("m", [1, 512])
def test_what_is_compiled_is_what_the_call_launches(way: Way, m: int) -> None:
    work, size, output, input = way.wanted((m, 4096, 4096), H200)
    choice = way.choice(size, H200)
    assert (work.step, work.family, work.format) == (choice.step, choice.family, "q4_0")
    assert choice.step.supports("q4_0", work.family, H200.cc, output) is None
    reads, writes = inputs(choice.step, choice.family), choice.step.outputs
    assert input == (way.dtype if way.dtype in reads else "float32")
    assert output == (way.dtype if way.dtype in writes else "float32")
    if way.api == "gemm.plan" or m == 512:
        assert (output, input) == (way.dtype, way.dtype), "nothing is cast"
    assert choice.step.accuracy in ("exact", way.accuracy)


def row(size: Any, way: Way, **changes: Any) -> AsCalled:
    m, n, k = size
    step = way.choice(size, H200).step.number
    call = AsCalled(
        api=way.api,
        accuracy=way.accuracy,
        dtype=way.dtype,
        format="q4_0",
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
    four = CALLS[:4]
    rows = (
        row(*four[0]),
        row(*four[1], source_hash="0" * 12),
        row(*four[2], step=1),
    )
    run = Run(env=Environment(), as_called=rows)
    assert missing(four, run, H200) == four[1:]
    assert missing([], run, None) == []


def test_host_time_is_of_a_call_and_the_queue_is_drained_outside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    calls: list[float] = []

    def call() -> None:
        calls.append(clock[0])
        clock[0] += 7e-6

    def drain() -> None:
        clock[0] += 1.0

    monkeypatch.setattr(as_called.time, "perf_counter", lambda: clock[0])
    assert host_us(call, drain) == pytest.approx(7.0)
    assert len(calls) == as_called.DRAINED * as_called.DRAINS


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

    def cuda(self) -> Tensor:
        return self

    cpu = double = cuda

    def numpy(self) -> np.ndarray:
        return self.values.astype(np.float64)

    def all(self) -> bool:
        return bool(self.values.all())


class FakeCalls:
    """Both sides by NumPy; `costs` are the seconds of a call by who it is."""

    def __init__(self, data: Any, stopwatch: Any, machine: Any) -> None:
        self.torch = SimpleNamespace(
            from_numpy=Tensor,
            isfinite=lambda x: Tensor(np.isfinite(x.values)),
            cuda=SimpleNamespace(synchronize=lambda: None),
        )
        self.data, self.stopwatch, self.machine = data, stopwatch, machine
        self.w = as_called.FORMATS["q4_0"].dequantize(data.blocks("q4_0"))
        self.captures = SimpleNamespace(capture=stopwatch.capture, warm_up=lambda call: call())
        self.made: list[Any] = []

    def _product(self, who: str, m: int, off: float = 0.0) -> Any:
        a = self.data.a("float32")[:m]

        def call() -> Tensor:
            return Tensor(a @ self.w.T + off)

        call.who = who  # type: ignore[attr-defined]
        return call

    def ours(self, way: Way, m: int) -> tuple[list[Any], int]:
        off = 9.0 if way.dtype == "bfloat16" else 0.0
        return [self._product(str(way), m, off)] * 3, 10

    def torchs(self, way: Way, m: int) -> list[Any]:
        self.made.append(str(way))
        return [self._product("torch", m)] * 2

    def release(self) -> None:
        pass


def test_a_loop_has_every_way_beside_torch_and_leaves_out_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cost(call: Any) -> float:
        return 3e-3 if call.who == "torch" else 1e-3 if "fast" in call.who else 2e-3

    watch = FakeStopwatch(cost=cost, simulated=False)
    monkeypatch.setattr(as_called, "Calls", FakeCalls)
    monkeypatch.setattr(as_called, "TOKENS", (2, 4))
    monkeypatch.setattr(as_called, "release", lambda: None)
    said: list[str] = []
    heard: list[str] = []
    sizes = [(2, 8, 64), (4, 8, 64)]
    loops = list(
        as_called.measure(
            [(size, way) for size in sizes for way in WAYS],
            H200,
            watch,
            QUICK,
            heard.append,
            said.append,
        )
    )
    assert heard == ["calls at M=2 N=8 K=64", "calls at M=4 N=8 K=64"]
    assert [len(rows) for rows in loops] == [5, 5]
    for rows, size in zip(loops, sizes, strict=True):
        assert {one.shape for one in rows} == {size}
        for one in rows:
            assert one.us == pytest.approx(1000 if one.accuracy == "fast" else 2000)
            assert one.cublas_us == pytest.approx(3000)
            assert one.x_cublas == pytest.approx(3.0 if one.accuracy == "fast" else 1.5)
            assert one.rounds == 3
            assert min(one.host_us, one.torch_host_us) > 0
            assert one.source_hash == provenance.called_hash(one.api, 10)
    assert len(said) == 2
    assert said[0].startswith("QuantLinear exact bfloat16 at (2, 8, 64) was not measured: ")
    assert "NMSE" in said[0]
    counted = max(watch.rounds, key=len)
    assert len(counted) == 5 + 3, "torch once for both plans, and once for each dtype of layers"
