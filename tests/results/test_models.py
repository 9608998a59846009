"""The tables of whole models, from made-up records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from results.record import ROOT, store
from results.render import complete, models, table
from results.render.staleness import Measured

ENV = {
    "gpu": "NVIDIA H9",
    "power_limit_w": 650.0,
    "utc": "2031-02-03T04:05:06Z",
    "git": {"sha": "0123abcd", "dirty": False},
}
BENCH = {
    "shapes": "Llama 9",
    "format": "q5_1",
    "weights_gb": 1.234,
    "rows": [
        {
            "case": "decode",
            "exact": 1234.5,
            "fast": None,
            "fp16": 50.0,
            "x_exact": 2.5,
            "x_fast": None,
        },
        {
            "case": "prefill",
            "exact": 9.0,
            "fast": 99.0,
            "fp16": 10.0,
            "x_exact": 0.9,
            "x_fast": 1.6,
        },
    ],
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


def test_a_decoder_stands_beside_float16(tmp_path: Path) -> None:
    text = told(models.of_decoder(write(tmp_path / "decoder.json", bench=BENCH)))
    assert text[0].startswith(
        "Shapes of Llama 9, random weights in Q5_1, 1.23 GB, on an NVIDIA H9 @ "
    )
    assert "650 W, 2031-02-03, commit 0123abcd." in text[0]
    assert text[-2:] == [
        "| decode | 1,234 | 2.50x | - | - | 50 |",
        "| prefill | 9 | 0.90x | 99 | 1.60x | 10 |",
    ]


def test_several_gpus_stand_beside_one(tmp_path: Path) -> None:
    parts = {"one": 100.0, "all": 60.5, "products": 50.0, "sums": 8.25}
    row = {"model": "Llama 9", "case": "prefill 7", "one": 1234.5, "all": 2345.6, "x": 1.9}
    rows = [row | {"gpus": 3, "rounds": 7, "spread": 0.1, "ms": parts}]
    bench = {"format": "q5_1", "gpus": 3, "sums": "by hand", "rows": rows}
    path = write(tmp_path / "gpus.json", **{"bench on GPUs": bench})
    text = told(models.of_gpus(path))
    assert "in Q5_1, shared by 3 GPUs, on an NVIDIA H9" in text[0]
    assert "Sums: by hand." in text[0]
    assert text[-1] == "| Llama 9 | prefill 7 | 1,234 | 2,346 | 1.90x | 100 | 60.5 | 50.0 | 8.25 |"


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


@pytest.mark.parametrize(
    "made", [models.of_decoder, models.of_gpus, models.of_quality, models.of_transformers]
)
def test_what_was_not_measured_is_left_out(tmp_path: Path, made: Any) -> None:
    assert made(tmp_path / "nothing.json") is None


def test_results_have_them() -> None:
    path = ROOT / "results" / "nvidia-h200" / "run.json"
    page = complete.page([Measured(path, store.read(path), ())])
    for title, made, name in models.TABLES:
        found = made(ROOT / "results" / "nvidia-h200" / name)
        assert "\n".join([f"### {title}", "", *told(found)]) in page
