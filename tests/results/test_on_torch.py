"""Calls beside torch, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from results.measure import as_called
from results.measure.as_called import WAYS
from results.record import provenance
from steps.nn import operator
from tests.results.fake_stopwatch import FakeStopwatch
from tests.results.test_as_called import QUICK, bench, is_layer


def cost(call: Any) -> float:
    """Seconds of a call by whose layer it is."""
    return {None: 3e-3, "exact": 2e-3, "fast": 1e-3}[getattr(call.func, "accuracy", None)]


@pytest.mark.slow
def test_calls_are_measured_beside_torch_and_left_out_where_they_are_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU, where layers multiply dequantized weights, and those of Q8_0 are wrong; an invented
    clock. A plan needs a GPU."""
    watch = FakeStopwatch(cost, simulated=False, l2_bytes=30_000)

    class Captures:
        def __init__(self, stopwatch: FakeStopwatch) -> None:
            self.capture = stopwatch.capture

        def warm_up(self, call: Any) -> Any:
            wrong = getattr(call.func, "format", None) == "q8_0"
            return call() + 9 * wrong

    monkeypatch.setattr(as_called, "DEVICE", "cpu")
    monkeypatch.setattr(as_called, "TorchCaptures", Captures)
    monkeypatch.setattr(as_called, "release", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    reserved: list[Any] = []
    monkeypatch.setattr(operator, "reserve_counters", lambda *asked: reserved.append(asked))
    plan = as_called.Way("gemm.plan", "exact", "float16")
    ways = [way for way in WAYS if is_layer(way) and way.format in ("q4_0", "q5_1")]
    wrong = as_called.Way("QuantLinear", "exact", "float16", "q8_0")
    wanted = [((m, 128, 256), way) for m in (2, 4) for way in [*ways, plan, wrong]]
    wanted += [((m, 128, 256), way) for m in (3, 5) for way in as_called.SWEEP_WAYS]
    said: list[str] = []
    heard: list[str] = []
    loops = list(as_called.measure(bench(watch, said.append), wanted, QUICK, heard.append))
    assert heard == [f"calls at M={m} N=128 K=256" for m in ("2", "4", "3-5")]
    for rows, m in zip(loops[:2], (2, 4), strict=True):
        assert [(one.api, one.accuracy, one.dtype, one.format) for one in rows] == [
            (way.api, way.accuracy, way.dtype, way.format) for way in ways
        ]
        for one in rows:
            assert (one.shape, one.swept, one.rounds) == ((m, 128, 256), False, 3)
            assert one.us == pytest.approx(1000 if one.accuracy == "fast" else 2000)
            assert one.cublas_us == pytest.approx(3000)
            assert one.x_cublas == pytest.approx(3.0 if one.accuracy == "fast" else 1.5)
            assert min(one.host_us or 0, one.torch_host_us or 0) > 0
            assert one.source_hash == provenance.called_hash(one.api, one.step)
    assert [(one.M, one.accuracy) for one in loops[2]] == [
        (size[0], way.accuracy) for size, way in wanted[-4:]
    ]
    assert all(one.swept and one.torch_host_us is None for one in loops[2])
    dtypes = len({way.dtype for way in ways})
    assert {len(each) for each in watch.rounds if len(each) > 1} == {
        len(ways) + dtypes,  # torch once for each dtype
        4 + 2,  # and once for each M
    }
    assert [(str(device), size) for device, size in reserved] == 3 * [("cpu", as_called.COUNTERS)]
    assert len(said) == 4
    assert said[0].startswith("gemm.plan exact float16 q4_0 at (2, 128, 256) was not measured: ")
    assert said[1].startswith("QuantLinear exact float16 q8_0 at (2, 128, 256) was not measured: ")
    assert "RuntimeError: it is wrong: NMSE" in said[1]
