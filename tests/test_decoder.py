"""The decoder of GGUF files: its arithmetic, its products by the kernels, what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.test_linear import host  # noqa: F401 - a fixture

torch = pytest.importorskip("torch", reason="torch is not installed: it is an extra")

from results.decoder import checks, files  # noqa: E402
from results.decoder.model import by_steps, by_torch, generate  # noqa: E402
from steps.linear import QuantLinear  # noqa: E402

SMALL = {
    "block_count": 1,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
}


@pytest.fixture
def kernels(host: Any, monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: F811
    """Products by the kernels, in the simulator."""

    def moved(layer: Any, device: Any) -> Any:
        layer._move(torch.device("cuda"))
        return layer

    monkeypatch.setattr(QuantLinear, "to", moved)
    return host


@torch.no_grad()
def test_products_by_the_kernels(kernels: Any, tmp_path: Any) -> None:
    path = files.write_tiny(tmp_path / "tiny.gguf", "q4_0", **SMALL)
    ours = files.load(path, by_steps("cpu"))
    judge = checks.reference(path)
    ids = torch.tensor([checks.prompt(288, 3)])
    tokens, kept = generate(ours, ids, 3, keep=True)
    whole = torch.cat([ids, tokens[:, :-1]], 1)
    right = judge.prefill(whole, judge.cache(1, 6), every=True)[0]
    print(checks.relative(torch.cat(kept).double().numpy(), right[2:].numpy()))
    print(len(kernels.launched), {name for name, _, _ in kernels.launched})
