"""Adapters over quantized layers: PEFT trains LoRA over a `QuantLinear` as over any Linear.

    config = fused(LoraConfig(target_modules="all-linear"))     # or LoraConfig.from_pretrained(...)
    model = get_peft_model(quantized, config)   # or PeftModel.from_pretrained(..., config=config)
    merged = merge_adapters(model, into="q8_0")                 # or "float"

`fused` has PEFT put a layer of this project on quantized ones (`steps.nn.lora`): with up to 16
tokens the product and the low-rank term are one launch. On an H200, in CUDA graphs, a layer of
4096 x 4096 in Q4_0 with an adapter of rank 16 then takes 1.4 times as long as alone at one token;
by PEFT's own forward, without `fused`, 5.6 times (results/nvidia-h200/adapters.json).

PEFT's own `merge_and_unload` writes to the weights, which raises: blocks cannot be written to.
"""

from __future__ import annotations

from typing import Any

from steps.nn.linear import QuantLinear, _written_format, nn, torch


def fused(config: Any) -> Any:
    """Have PEFT put `steps.nn.lora.LoraLinear` on `QuantLinear`s with this LoraConfig, which is
    returned: up to 16 tokens on a GPU, a layer and its adapter are one launch."""
    from steps.nn.lora import LoraLinear  # imports PEFT

    config._register_custom_module({QuantLinear: LoraLinear})
    return config


def merge_adapters(model: Any, into: str = "float") -> Any:
    """Merge the active adapters of a PeftModel into its weights; returns the model without PEFT.

    into : what layers that were quantized become: "float", torch's Linears in the layer's dtype, or
           a format that floats can be quantized to. That rounds the sum of weights and adapter, so
           y changes by the format's error.

    Each layer is made float, merged by PEFT itself and quantized again before the next one. Raises
    ValueError for another format, and where there is no adapter.
    """
    if into != "float":
        _written_format(into)
    adapted = [
        one for one in model.modules() if hasattr(one, "base_layer") and hasattr(one, "merge")
    ]
    if not adapted or not hasattr(model, "merge_and_unload"):
        raise ValueError(f"{type(model).__name__} has no adapters of PEFT to merge")
    for one in adapted:
        base = one.get_base_layer()
        quantized = isinstance(base, QuantLinear)
        if quantized:
            one.base_layer = _float(base)
        if not one.merged:
            one.merge(safe_merge=True)
        if quantized and into != "float":
            options = {"accuracy": base.accuracy, "invariant": base.invariant}
            one.base_layer = QuantLinear.from_float(one.base_layer, into, **options)
    return model.unload()  # of adapters that are merged


def _float(layer: QuantLinear) -> Any:
    """torch's Linear of the dequantized weights."""
    with torch.device("meta"):
        linear = nn.Linear(layer.in_features, layer.out_features, bias=False, dtype=layer.dtype)
    linear.weight = nn.Parameter(layer.weight.clone(), requires_grad=False)
    linear.bias = layer.bias
    return linear.train(layer.training)
