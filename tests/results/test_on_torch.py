"""What is measured of torch and transformers themselves, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

from results.baselines import humming
from results.measure import as_called
from results.measure import transformers_llama as llama
from results.measure.as_called import WAYS
from results.measure.transformers_llama import BASELINE
from steps.nn import operator
from tests.results.fake_stopwatch import FakeStopwatch
from tests.results.test_as_called import QUICK, bench, is_layer


@pytest.mark.slow
def test_a_small_llama_is_measured_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    monkeypatch.setattr(llama, "ROUNDS", {"prefill": 2, "decode": 1, "decode, compiled": 1})
    called: list[str] = []
    made = llama.calls
    monkeypatch.setattr(
        llama,
        "calls",
        lambda model, case, device: lambda: called.append(case) or made(model, case, device)(),
    )
    monkeypatch.setattr(llama, "STEPS", 3)
    said: list[str] = []
    rows, facts = llama.measure("q4_0", llama.LLAMA_3_2_1B | small, "cpu", said.append)
    assert [(one.case, one.side) for one in rows] == [
        ("prefill, 512 tokens", BASELINE),
        ("prefill, 512 tokens", "q4_0"),
        ("prefill, 512 tokens", "q4_0, fast"),
        ("decode, batch 1", BASELINE),
        ("decode, batch 1", "q4_0"),
        ("decode, compiled, batch 1", BASELINE),
        ("decode, compiled, batch 1", "q4_0"),
    ]
    assert said == [llama.line(one) for one in rows]
    assert called.count("decode") == 2 * (1 + 2 + 1), "the first, two that do not count, a round"
    for side in ("q4_0", "q4_0, fast"):
        off, bound = (
            facts[f"{what}, {side}"] for what in ("rms difference of logits", "bound of it")
        )
        assert bound / 8 < off < bound


@pytest.mark.slow
def test_layers_of_torch_itself_are_right_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where layers multiply dequantized weights."""
    watch = FakeStopwatch(simulated=False, l2_bytes=30_000)

    class Captures:
        def __init__(self, stopwatch: FakeStopwatch) -> None:
            self.capture = stopwatch.capture

        def warm_up(self, call: Any) -> Any:
            return call()

    monkeypatch.setattr(as_called, "DEVICE", "cpu")
    monkeypatch.setattr(as_called, "TorchCaptures", Captures)
    monkeypatch.setattr(as_called, "release", lambda: None)
    reserved: list[Any] = []
    monkeypatch.setattr(operator, "reserve_counters", lambda *asked: reserved.append(asked))
    monkeypatch.setattr(as_called, "host_us", lambda call, _: call() is None or 1.0)
    monkeypatch.setattr(humming, "why_not", lambda: "it needs a GPU")
    ways = [way for way in WAYS if is_layer(way) and way.format in ("q4_0", "q5_1")]
    wanted = [((2, 128, 256), way) for way in ways]
    wanted += [((m, 128, 256), way) for m in (3, 5) for way in as_called.SWEEP_WAYS]
    said: list[str] = []
    loops = list(as_called.measure(bench(watch, said.append), wanted, QUICK))
    assert [len(rows) for rows, _ in loops] == [len(ways), 4]
    assert [(str(device), size) for device, size in reserved] == 2 * [("cpu", as_called.COUNTERS)]
    assert said == ["Humming is not measured: it needs a GPU"]
