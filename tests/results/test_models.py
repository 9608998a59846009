"""The tables of whole models, from made-up records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from results.record import ROOT
from results.render import complete, models, table

ENV = {
    "gpu": "NVIDIA H9",
    "power_limit_w": 650.0,
    "utc": "2031-02-03T04:05:06Z",
    "git": {"sha": "0123abcd", "dirty": False},
}
QUALITY = {
    "file": "model.gguf",
    "text": "book.txt",
    "predictions": 77,
    "rows": [
        {"side": "float32", "perplexity": 5.0, "mean_kl": 0.0, "kl_999": 0.0, "same_top": 1.0},
        {"side": "exact", "perplexity": 5.125, "mean_kl": 2e-5, "kl_999": 3e-4, "same_top": 0.9876},
    ],
}


def told(made: table.Table | None) -> list[str]:
    assert made is not None
    return table.markdown(made).splitlines()


def write(path: Path, **parts: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schema": 1, "env": ENV, **parts}))
    return path


def test_a_model_stands_beside_float32_and_llama_cpp(tmp_path: Path) -> None:
    path = write(tmp_path / "h9" / "quality.json", quality=QUALITY)
    text = told(models.of_quality(path))
    assert text[0].startswith("model.gguf, 77 predictions of book.txt, on an NVIDIA H9")
    assert text[-2:] == [
        "| float32 | 5.000 |  |  |  |",
        "| exact | 5.125 | 2.0e-05 | 3.0e-04 | 98.8 % |",
    ]
    theirs = QUALITY["rows"][1] | {"side": models.LLAMA_CPP, "same_top": 0.5}  # type: ignore[operator,index]
    beside = QUALITY | {"rows": [theirs], "predictions": 11}
    write(tmp_path / models.CPU, quality=beside)
    assert told(models.of_quality(path)) == [
        *text,
        "",
        "llama.cpp itself, on a CPU and the first 11 of these: mean KL 2.0e-05, 99.9 % KL 3.0e-04, "
        "same top token 50.0 %.",
    ]
    write(tmp_path / models.CPU, quality=beside | {"file": "other.gguf"})
    assert told(models.of_quality(path)) == text


def test_experts_stand_beside_torch_by_tokens(tmp_path: Path) -> None:
    rows = [
        {
            **{"layer": name, "experts": 9, "chosen": 2, "hidden": 64, "inner": 32},
            **{"format": "q4_0", "dtype": "float16", "routing": routing, "tokens": t},
            "pair_us": 1.5 * t * (i + 1) * (2 if routing == "same" else 1),
            "x_torch": 4.0 / t,
            **({"fast_us": 3.0 * t, "fast_x_torch": 2.0} if routing == "same" else {}),
        }
        for i, name in enumerate(("small", "large"))
        for t in (1, 8)
        for routing in (("random", "same") if t == 8 else ("random",))
    ]
    text = told(models.of_experts(write(tmp_path / "h9" / "experts.json", rows=rows)))
    assert "small: 9 of 64 x 32, 2 a token, Q4_0; large: 9 of" in text[0]
    assert text[2:] == [
        "| tokens | small | large |",
        "|--:|--:|--:|",
        "| 1 | 1.50 (4.00x) | 3.00 (4.00x) |",
        "| 8 | 12.0 (0.50x) | 24.0 (0.50x) |",
        "| 8, all the same experts | 24.0 (0.50x), fast 24.0 (2.00x) "
        "| 48.0 (0.50x), fast 24.0 (2.00x) |",
    ]


@pytest.mark.parametrize(
    "made",
    [models.of_decoder, models.of_gpus, models.of_quality, models.of_experts],
)
def test_what_was_not_measured_is_left_out(tmp_path: Path, made: Any) -> None:
    assert made(tmp_path / "nothing.json") is None


def test_results_have_them() -> None:
    """As they were written: a table that says something else has to be looked at there."""
    page = (ROOT / "results" / complete.NAME).read_text(encoding="utf-8")
    for title, made, name in models.TABLES:
        found = made(ROOT / "results" / "nvidia-h200" / name)
        assert "\n".join([f"### {title}", "", *told(found), ""]) in page
