"""LoRA of PEFT over quantized layers: found, trained, never lost, merged on request."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from steps.nn.adapters import merge_adapters
from steps.nn.linear import QuantLinear, quantize_model

peft = pytest.importorskip("peft")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Any) -> Any:
        return self.down(torch.relu(self.up(x)))


def adapted(**options: Any) -> Any:
    """A quantized net with adapters that change its y."""
    torch.manual_seed(1)
    net = Net()
    quantize_model(net, "q4_0")
    config = peft.LoraConfig(r=4, target_modules=["up", "down"], init_lora_weights=False, **options)
    return peft.get_peft_model(net, config)


X = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))


def test_adapters_are_trained_and_blocks_are_not() -> None:
    model, target = adapted(), torch.ones(8, 64)
    blocks = [one.blocks.clone() for one in model.modules() if isinstance(one, QuantLinear)]
    trained = [one for one in model.parameters() if one.requires_grad]
    assert len(trained) == 4
    optimizer, losses = torch.optim.Adam(trained, 1e-2), []
    for _ in range(20):
        loss = (model(X) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    after = [one.blocks for one in model.modules() if isinstance(one, QuantLinear)]
    assert all(torch.equal(one, other) for one, other in zip(blocks, after, strict=True))


def test_pefts_own_merge_raises_and_loses_nothing() -> None:
    model = adapted()
    before = model(X)
    for merge in (model.merge_adapter, lambda: model.merge_and_unload(safe_merge=True)):
        with pytest.raises(RuntimeError, match="the weight of a QuantLinear is read-only"):
            merge()
        assert torch.equal(model(X), before)


@pytest.mark.parametrize(("into", "error"), [("float", 1e-5), ("q8_0", 0.02)])
@pytest.mark.parametrize("dora", [False, True])
def test_merging_on_request(into: str, error: float, dora: bool) -> None:
    model = adapted(use_dora=dora)
    before = model(X).detach()
    merged = merge_adapters(model, into)
    assert type(merged) is Net
    assert isinstance(merged.up, QuantLinear) == (into != "float")
    assert (merged(X) - before).abs().max() <= error * before.abs().max()


def test_what_cannot_be_merged() -> None:
    with pytest.raises(ValueError, match="Net has no adapters of PEFT to merge"):
        merge_adapters(Net())
    with pytest.raises(ValueError, match="q4_k is only read from files"):
        merge_adapters(adapted(), "q4_k")
