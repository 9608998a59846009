"""Calls beside torch, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from results.measure import as_called, gradients, humming
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
    """On a CPU, where layers multiply dequantized weights; an invented clock. Humming's W4A16 is a
    layer of torch, its W4A8 a wrong one, and a plan needs a GPU."""
    watch = FakeStopwatch(cost, simulated=False, l2_bytes=30_000)

    class Captures:
        def __init__(self, stopwatch: FakeStopwatch) -> None:
            self.capture = stopwatch.capture

        def warm_up(self, call: Any) -> Any:
            return call()

    def hummings(name: str, values: Any) -> Any:
        layer = torch.nn.Linear(*reversed(values.shape), bias=False)
        layer.weight.data = values + 9 * (name == humming.W4A8)
        return layer

    monkeypatch.setattr(as_called, "DEVICE", "cpu")
    monkeypatch.setattr(as_called, "TorchCaptures", Captures)
    monkeypatch.setattr(as_called, "release", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    reserved: list[Any] = []
    monkeypatch.setattr(operator, "reserve_counters", lambda *asked: reserved.append(asked))
    monkeypatch.setattr(humming, "why_not", lambda: None)
    monkeypatch.setattr(humming, "layer", hummings)
    plan = as_called.Way("gemm.plan", "exact", "float16")
    ways = [way for way in WAYS if is_layer(way) and way.format in ("q4_0", "q5_1")]
    wanted = [((m, 128, 256), way) for m in (2, 4) for way in [*ways, plan]]
    wanted += [((m, 128, 256), way) for m in (3, 5) for way in as_called.SWEEP_WAYS]
    said: list[str] = []
    heard: list[str] = []
    loops = list(as_called.measure(bench(watch, said.append), wanted, QUICK, heard.append))
    assert heard == [f"calls at M={m} N=128 K=256" for m in ("2", "4", "3-5")]
    for (rows, peers), m in zip(loops[:2], (2, 4), strict=True):
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
        (beside,) = peers
        assert (beside.peer, beside.format) == (humming.W4A16, "int4_group32")
        assert (beside.shape, beside.us, beside.same_run) == ((m, 128, 256), 3000, True)
    rows, peers = loops[2]
    assert [(one.M, one.accuracy) for one in rows] == [
        (size[0], way.accuracy) for size, way in wanted[-4:]
    ]
    assert all(one.swept and one.torch_host_us is None for one in rows)
    assert peers == []
    dtypes = len({way.dtype for way in ways})
    assert {len(each) for each in watch.rounds if len(each) > 1} == {
        len(ways) + dtypes + 1,  # torch once for each dtype, and Humming
        4 + 2,  # and once for each M
    }
    assert [(str(device), size) for device, size in reserved] == 3 * [("cpu", as_called.COUNTERS)]
    assert len(said) == 4
    assert said[0].startswith("gemm.plan exact float16 q4_0 at (2, 128, 256) was not measured: ")
    assert said[1].startswith("humming_w4a8 at (2, 128, 256) was not measured: RuntimeError: it is")
    assert "NMSE" in said[1]


# --- gradients ------------------------------------------------------------------------------------

SECONDS = {"matmul": 2e-3, "step": 5e-3}
"""Of a call by the name of its function; 3 ms of `linear_input_gradient`."""


def cost_of_gradient(call: Any) -> float:
    return SECONDS.get(getattr(call.func, "__name__", ""), 3e-3)


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> FakeStopwatch:
    watch = FakeStopwatch(cost_of_gradient, simulated=False, l2_bytes=30_000)

    class Captures:
        def __init__(self, stopwatch: FakeStopwatch) -> None:
            self.capture = stopwatch.capture

        def warm_up(self, call: Any) -> Any:
            return call()

    monkeypatch.setattr(gradients, "DEVICE", "cpu")
    monkeypatch.setattr(gradients, "TorchCaptures", Captures)
    monkeypatch.setattr(gradients, "release", lambda: None)
    monkeypatch.setattr(gradients, "GpuStopwatch", lambda: watch)
    monkeypatch.setattr(operator, "reserve_counters", lambda *_: None)
    monkeypatch.setattr(gradients, "SIZES", ((2, 64, 256), (3, 64, 256)))
    monkeypatch.setattr(gradients, "DRAWN", 48)
    every = gradients.measure
    monkeypatch.setattr(gradients, "measure", lambda s: every(s, gradients.SIZES, QUICK))
    return watch


def test_every_row_stands_beside_torch_in_its_loop(
    on_the_cpu: FakeStopwatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gradients.json"
    assert gradients.main(["--json", str(path)]) == 0
    record = json.loads(path.read_text())
    assert record["versions"] == {"torch": torch.__version__}
    assert [tuple(row[key] for key in ("dtype", "M", "format")) for row in record["rows"]] == [
        (dtype, m, name)
        for dtype in gradients.DTYPES
        for m in (2, 3)
        for name in gradients.FORMATS_MEASURED
    ]
    for row in record["rows"]:
        assert (row["N"], row["K"]) == (64, 256)
        for what, ours, theirs in (("gradient", 3000, 2000), ("step", 5000, 5000)):
            figures = row[what]
            assert (figures["us"], figures["torch_us"]) == (ours, theirs)
            assert figures["x_torch"] == pytest.approx(theirs / ours)
            assert figures["rounds"] == 3
    assert {len(each) for each in on_the_cpu.rounds if len(each) > 1} == {8}
    assert capsys.readouterr().out.count("gradient 3000.0 us, torch 2000.0; step 5000.0 us") == 12


def test_a_wrong_gradient_is_not_timed(on_the_cpu: FakeStopwatch, monkeypatch: Any) -> None:
    right = operator.linear_input_gradient
    monkeypatch.setattr(operator, "linear_input_gradient", lambda *given: 1.01 * right(*given))
    with pytest.raises(RuntimeError, match=r"dX is wrong: NMSE 9.*e-05, the limit is 2e-05"):
        gradients.main([])
