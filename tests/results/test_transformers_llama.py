"""A llama of transformers: its loop, its record, its table; the model itself where packages are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from results.measure import transformers_llama as llama
from results.measure.transformers_llama import BASELINE, WrongLogits
from results.record import model_rows, store
from results.record.model_rows import ModelRow, ModelRun
from results.record.schema import Environment, Git, RecordError
from results.render import complete
from tests.results.synthetic_run import make_run


def test_sides_take_turns_in_beginning_a_round_after_two_calls_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, order = [0.0], []

    def call(name: str, seconds: float) -> Any:
        def run() -> str:
            order.append(name)
            clock[0] += seconds
            return name

        return run

    monkeypatch.setattr(llama.time, "perf_counter", lambda: clock[0])
    sides = {"a": call("a", 1.0), "b": call("b", 2.0)}
    assert llama.timed(sides["b"], lambda: None) == (2.0, "b")
    order.clear()
    took = llama.in_turn(sides, 3, lambda: None)
    assert "".join(order) == "abab" + "ab" + "ba" + "ab"
    assert took == {"a": [1.0] * 3, "b": [2.0] * 3}


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
        with pytest.raises(WrongLogits, match=told):
            llama.differences({BASELINE: own, side: logits(wrong)}, stated)


def test_without_its_packages_or_a_gpu_it_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(llama.sys.modules, "torch", None)  # type: ignore[arg-type]
    assert llama.main([]) == 2
    assert "pip install torch transformers" in capsys.readouterr().err
    torch = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False), __version__="9")
    monkeypatch.setitem(llama.sys.modules, "torch", torch)  # type: ignore[arg-type]
    monkeypatch.setitem(llama.sys.modules, "transformers", SimpleNamespace(__version__="9"))  # type: ignore[arg-type]
    assert llama.main([]) == 2
    assert capsys.readouterr().err == "torch finds no CUDA GPU: nothing is measured\n"


# --- the record -----------------------------------------------------------------------------------


def a_run() -> ModelRun:
    row = ModelRow(
        case="prefill, 512 tokens",
        side="q4_0",
        ms=20.0,
        p20_ms=19.0,
        p80_ms=21.0,
        tokens_per_s=25600.0,
        x_bfloat16=1.5,
        rounds=9,
        first_s=3.0,
    )
    return ModelRun(
        env=Environment(gpu="NVIDIA H200", git=Git(sha="0123abcd"), utc="2026-01-02T03:04:05Z"),
        versions={"torch": "9.9"},
        model="a llama",
        format="q4_0",
        facts={"quantize_model s, q4_0": 2.5},
        rows=(row, replace(row, side="bfloat16", x_bfloat16=1.0)),
    )


def test_a_run_is_written_and_read(tmp_path: Path) -> None:
    path = model_rows.write(a_run(), tmp_path / "new" / "transformers.json")
    assert model_rows.read(path) == a_run()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "schema is 2, expected 1"),
        ({"rows": [{"case": "x"}]}, r"rows\[0\]"),
        ({"env": None}, "env must be a JSON object"),
        ({"more": 1}, "unexpected keyword argument 'more'"),
    ],
)
def test_a_file_that_is_none_is_refused_by_name(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = model_rows.write(a_run(), tmp_path / "transformers.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(RecordError, match=rf"transformers.json: .*{message}"):
        model_rows.read(path)


def test_results_have_its_table_where_it_was_measured(tmp_path: Path) -> None:
    run = make_run(shapes=((1, 4096, 4096),), formats=("q4_0",), peers=False)
    path = store.write(run, tmp_path / "results" / "nvidia-h200" / "run.json")
    assert "A model of transformers" not in complete.page(tmp_path)
    model_rows.write(a_run(), path.with_name(model_rows.NAME))
    section = complete.page(tmp_path).split("### A model of transformers")[1].split("\n###")[0]
    assert "a llama, torch 9.9, on an NVIDIA H200, 2026-01-02, commit 0123abcd." in section
    line = "| prefill, 512 tokens | q4_0 | 20.0 ms | 19.0-21.0 | 25,600 | 1.50x | 3.00 s |"
    assert line in section
    assert "- quantize_model s, q4_0: 2.5" in section


# --- the model itself -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_small_llama_is_measured_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    small = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    monkeypatch.setattr(llama, "ROUNDS", {"prefill": 2, "decode": 1, "decode, compiled": 1})
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
    for side in ("q4_0", "q4_0, fast"):
        off, bound = (
            facts[f"{what}, {side}"] for what in ("rms difference of logits", "bound of it")
        )
        assert bound / 8 < off < bound
