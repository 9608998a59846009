"""A llama of transformers: its loop, its record, its table."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from results.measure import command, host_time
from results.measure import transformers_llama as llama
from results.measure.command import Wrong
from results.measure.transformers_llama import BASELINE
from results.record import store
from results.record.schema import Environment, HostRun, ModelRun
from results.render import complete
from results.render.staleness import measured
from tests.results.synthetic_run import make_run
from tests.results.test_record import MODEL


def test_a_call_is_timed_until_its_kernels_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, queued = [0.0], [5.0]

    def wait() -> None:
        clock[0] += queued.pop() if queued else 0.0

    monkeypatch.setattr(llama.time, "perf_counter", lambda: clock[0])
    taken, _ = llama.timed(lambda: queued.append(2.0), wait)
    assert taken == 2.0, "what was queued before it is not in it"


def test_a_row_is_of_medians_and_of_the_ratios_within_rounds() -> None:
    took = {BASELINE: [0.2, 0.4, 0.8], "q4_0": [0.1, 0.1, 0.4]}
    one, two = llama.rows("decode", 64, {BASELINE: 1.0, "q4_0": 9.0}, took)
    assert (one.side, one.ms, one.x_bfloat16, one.first_s) == (BASELINE, 400.0, 1.0, 1.0)
    assert (two.side, two.ms, two.rounds, two.first_s) == ("q4_0", 100.0, 3, 9.0)
    assert two.x_bfloat16 == pytest.approx(2.0)
    assert two.tokens_per_s == pytest.approx(640.0)
    assert two.p20_ms <= two.ms <= two.p80_ms
    assert llama.line(two) == (
        "decode: q4_0 100 ms, 640 tokens/s, 2.00x of bfloat16, first call 9.0 s"
    )


class Logits(np.ndarray[Any, Any]):
    """What is asked of a tensor."""

    def float(self) -> Logits:
        return self

    def square(self) -> Logits:
        return self**2

    def sqrt(self) -> Any:
        return np.sqrt(self)


def logits(values: Any) -> Logits:
    return np.asarray(values, float).view(Logits)


def test_logits_that_are_of_another_model_are_an_error() -> None:
    own, stated = logits([3.0, -4.0]), {"exact": 0.006, "fast": 0.05}
    found = llama.differences({BASELINE: own, "q4_0": logits([3.0, -4.05])}, stated)
    assert found == {
        "rms difference of logits, q4_0": pytest.approx(0.01),
        "bound of it, q4_0": 0.012,
    }
    llama.differences({BASELINE: own, "q4_0, fast": logits([3.0, -4.45])}, stated)
    for side, wrong, bound in (
        ("q4_0", [3.0, -4.45], "0.012"),
        ("q4_0", [np.nan, -4.0], "0.012"),
        ("q4_0, fast", [4.0, -4.0], "0.1"),
    ):
        told = f"the logits of {side} differ by .* bound is {bound}:"
        with pytest.raises(Wrong, match=told):
            llama.differences({BASELINE: own, side: logits(wrong)}, stated)


def test_the_command_writes_what_it_measured_or_says_why_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def measure(name: str) -> dict[str, Any]:
        if name == "q8_0":
            raise Wrong("logits differ")
        return {"torch": "9.9", "rows": ()}

    def called(*arguments: str) -> tuple[int, str]:
        status = command.main(HostRun, ("torch", "transformers"), measure, arguments)
        return status, capsys.readouterr().err

    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace())  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "torch", None)  # type: ignore[arg-type]
    assert called() == (2, "torch is not installed: pip install torch transformers\n")
    cuda = SimpleNamespace(is_available=lambda: False)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))  # type: ignore[arg-type]
    assert called() == (2, "torch finds no CUDA GPU: nothing is measured\n")
    cuda.is_available = lambda: True
    monkeypatch.setattr(command, "environment", lambda: Environment(gpu="A GPU"))
    monkeypatch.setattr(store.path_for, "__defaults__", (tmp_path, "run.json"))
    assert called("--json", "--format", "q8_0") == (1, "logits differ\n")
    assert called() == (0, "")
    assert list(tmp_path.iterdir()) == []
    assert called("--json") == (0, "")
    assert store.read(tmp_path / "a-gpu" / "host_time.json", HostRun).torch == "9.9"


def test_a_slow_round_of_both_sides_does_not_change_the_ratio_of_host_times() -> None:
    ours, theirs = [[1e-6] * 3, [1e-5] * 3, [1e-6] * 3], [[2e-6] * 3, [2e-5] * 3, [2e-6] * 3]
    (row,) = host_time.rows_of(["gemm.plan"], [ours, theirs], (1, 2, 3), "float32", "q4_0")
    assert (row.api, row.dtype, row.shape, row.calls) == ("gemm.plan", "float32", (1, 2, 3), 9)
    assert (row.us, row.p20_us, row.torch_us) == pytest.approx((1.0, 1.0, 2.0))
    assert row.p80_us > 5
    assert row.x_torch == pytest.approx(0.5)


def test_results_have_its_table_where_it_was_measured(tmp_path: Path) -> None:
    run = make_run(shapes=((1, 4096, 4096),), formats=("q4_0",), peers=False)
    path = store.write(run, tmp_path / "results" / "nvidia-h200" / "run.json")
    assert "A model of transformers" not in complete.page(measured(tmp_path))
    store.write(MODEL, path.with_name(ModelRun.NAME))
    section = (
        complete.page(measured(tmp_path)).split("### A model of transformers")[1].split("\n###")[0]
    )
    assert "a llama, torch 9.9, on an NVIDIA H200, 2026-01-02, commit 0123abcd." in section
    line = "| prefill, 512 tokens | q4_0 | 20.0 ms | 19.0-21.0 | 25,600 | 1.50x | 3.00 s |"
    assert line in section
    assert "quantize_model s, q4_0: 2.5" in section
