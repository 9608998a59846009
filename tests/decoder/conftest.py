"""What tests of the decoder share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from steps.kernels.decode import tiles
from steps.kernels.experts import few
from steps.nn import experts
from steps.nn.linear import QuantLinear
from tests.nn.on_the_host import cuda, host  # noqa: F401 - fixtures


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.no_grad():
        yield


@pytest.fixture
def kernels(host: Any, monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: F811
    """Products by the kernels, in the simulator, on tensors of the CPU."""

    def moved(layer: Any, device: Any) -> Any:
        layer._move(torch.device("cuda"))
        return layer

    monkeypatch.setattr(QuantLinear, "to", moved)
    monkeypatch.setattr(experts.QuantExperts, "to", moved)
    monkeypatch.setattr(experts, "_product", experts._on_gpu)
    # Few thread blocks: each of them sorts all ids of experts, or reads all of A
    monkeypatch.setattr(few, "multiprocessors", lambda: 3)
    monkeypatch.setattr(tiles, "multiprocessors", lambda: 8)
    experts._prepared.clear()
    yield host
    experts._prepared.clear()
