"""Quantized models of transformers through its own `save_pretrained` and `from_pretrained`.

    quantize_model(model, "q4_0")
    model.save_pretrained(folder)                       # blocks, and which layers have which format

    import steps.nn.pretrained                          # in the program that loads: this one line
    model = AutoModelForCausalLM.from_pretrained(folder)        # the same bits

The config says which layers are quantized, and how, under the name of this module, which the
import makes known to transformers. No float weights are made.

Without the import transformers warns of "Unknown quantization type, got steps.nn.pretrained" and
would go on with random float layers. So the file has a `weight` of no values for one of the layers,
whose shape makes it raise instead.

The file's names are those of the model's modules: where transformers renames or merges tensors of a
checkpoint, these are left as they are.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from qformats import FORMATS
from steps.nn import operator as operator
from steps.nn.experts import PARTS, QuantExperts
from steps.nn.linear import QuantLinear, empty_layer, nn, torch
from steps.product.operands import weight_format

if TYPE_CHECKING:
    from torch import Tensor

METHOD: Final = "steps.nn.pretrained"


@register_quantization_config(METHOD)
class BlocksConfig(QuantizationConfigMixin):
    """What a config says. layers: the options of `QuantLinear` for each, by its name; for experts
    their `formats` and accuracy."""

    def __init__(self, layers: dict[str, dict[str, Any]], quant_method: str = METHOD) -> None:
        self.quant_method, self.layers = METHOD, layers


@register_quantizer(METHOD)
class Blocks(HfQuantizer):
    """What transformers asks when it saves and loads a model with `QuantLinear`s and experts."""

    is_trainable = True
    is_compileable = True

    def is_serializable(self) -> bool:
        return True

    def validate_environment(self, *_: Any, **__: Any) -> None:
        if not self.pre_quantized:
            raise ValueError(
                "from_pretrained loads blocks and quantizes no floats: load the floats, then call "
                "steps.nn.linear.quantize_model(model, format)"
            )

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor] | None, Any]:
        """The state dict, in which no two tensors share memory and one layer has a `weight`."""
        layers = _tell(model)
        if not layers or getattr(model, "_hf_peft_config_loaded", False):
            return None, {}  # floats again, or adapters alone
        state, seen = model.state_dict(), set()
        for layer in layers:
            for key in [key for key in state if key.rpartition(".")[0] == layer]:
                if (tensor := state.get(key)) is not None:
                    state[key] = tensor.clone() if tensor.data_ptr() in seen else tensor
                    seen.add(tensor.data_ptr())
        state[_marker(layers)] = torch.empty(0)
        return state, {}

    def update_weight_conversions(self, weight_conversions: Any, *_: Any) -> list[Any]:
        return []

    def _process_model_before_weight_loading(self, model: Any, **__: Any) -> None:
        """Put layers without values in the place of Linears."""
        modules, layers = dict(model.named_modules()), self.quantization_config.layers
        made = set()
        for name, options in layers.items():
            if (found := _name_in(model, modules, name, options)) is None:
                continue  # of a head, which this class of the model has not
            layer: Any
            if "formats" in options:
                layer = QuantExperts.empty(modules[found], **options)
            else:
                layer = empty_layer(modules[found], **options)
            layer._is_hf_initialized = True  # else transformers initializes the weights
            parent, _, last = found.rpartition(".")
            setattr(modules[parent], last, layer.train(modules[found].training))
            made.add(found)
        if not made:
            raise ValueError(
                f"the config names {len(layers)} quantized layers, such as {min(layers)}, "
                f"and a {type(model).__name__} has no layer of any of these names"
            )
        tied = model.all_tied_weights_keys.items()  # each layer has its own blocks in the file
        model.all_tied_weights_keys = {
            one: other
            for one, other in tied
            if not made & {one.rpartition(".")[0], other.rpartition(".")[0]}
        }
        ignored = model._keys_to_ignore_on_load_unexpected or ()
        marker = re.escape(_marker(layers).removeprefix(f"{model.base_model_prefix}."))
        model._keys_to_ignore_on_load_unexpected = {*ignored, f"{marker}$"}

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        """Pack blocks that were loaded to a GPU."""
        for name, layer in model.named_modules():
            if not _is_quantized(layer):
                continue
            del layer._is_hf_initialized  # from here on an initialization raises
            for key, format in _blocks(layer).items():
                blocks = layer._buffers[key]
                if not getattr(blocks, "_is_hf_initialized", False):
                    raise ValueError(
                        f"the config says that {name} is {format}, and the checkpoint has no "
                        f"{name}.{key}: load it with a config that has no quantization_config"
                    )
                device, host = blocks.device, blocks.cpu()
                layer._buffers[key] = host
                try:
                    weight_format(operator.host_blocks(host.flatten(0, -2), FORMATS[format]))
                except ValueError as error:
                    raise ValueError(f"{name}.{key}: {error}") from error
            layer._move(device)
        del model.is_quantized  # for which .half() and .float() would raise
        tell_transformers(model)
        return model


def tell_transformers(model: Any) -> None:
    """Let `save_pretrained` of a model, and of models of transformers in it, save its blocks.

    `quantize_model` calls it. Call it for a model into which you put `QuantLinear`s yourself. A
    model that another quantizer of transformers made keeps that one, which then saves it.
    """
    told: list[str] = []
    for name, one in model.named_modules():
        if not isinstance(one, PreTrainedModel) or not any(map(_is_quantized, one.modules())):
            continue
        if getattr(one, "hf_quantizer", None) is None:
            one.hf_quantizer = Blocks(BlocksConfig({}))
        if not isinstance(one.hf_quantizer, Blocks):
            continue
        inner = any(outer == "" or name.startswith(f"{outer}.") for outer in told)
        if not inner:  # its config may be a part of the outer one's
            told.append(name)
            _tell(one)


def _tell(model: Any) -> dict[str, dict[str, Any]]:
    """Write into the config which layers are quantized; returns what it says of them."""
    layers: dict[str, dict[str, Any]] = {}
    floats = [one.dtype for one in model.parameters() if one.is_floating_point()]
    for name, one in model.named_modules(remove_duplicate=False):
        if isinstance(one, QuantExperts):
            layers[name] = {"formats": dict(one.formats)}
            if one.accuracy != "exact":
                layers[name]["accuracy"] = one.accuracy
        elif _is_quantized(one):
            options: dict[str, Any] = {"format": one.format}
            if one.accuracy != "exact":
                options["accuracy"] = one.accuracy
            if one.invariant:
                options["invariant"] = True
            if [one.dtype] != floats[:1]:
                options["dtype"] = str(one.dtype).removeprefix("torch.")
            layers[name] = options
    model.hf_quantizer.quantization_config = BlocksConfig(layers)
    if layers:
        model.config.quantization_config = model.hf_quantizer.quantization_config
        model._weight_conversions = []
    elif hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
        model.__dict__.pop("_weight_conversions", None)
    return layers


def _is_quantized(module: Any) -> bool:
    return isinstance(module, QuantLinear | QuantExperts)


def _blocks(layer: Any) -> dict[str, str]:
    """The names of a layer's buffers of blocks, and their formats."""
    if isinstance(layer, QuantExperts):
        return {f"{name}_blocks": layer.formats[name] for name in PARTS}
    return {"blocks": layer.format}


def _marker(layers: dict[str, dict[str, Any]]) -> str:
    """The name of a float tensor that the model would have without quantized layers."""
    linears = [name for name, options in layers.items() if "formats" not in options]
    return f"{min(linears)}.weight" if linears else f"{min(layers)}.gate_up_proj"


def _name_in(model: Any, modules: dict[str, Any], name: str, options: dict[str, Any]) -> str | None:
    """The name of a Linear, or of experts, in a model that may be the body of the one that was
    saved, or have it as its body."""
    prefix = f"{model.base_model_prefix}."
    for one in (name, prefix + name, name.removeprefix(prefix)):
        module = modules.get(one)
        if isinstance(module, nn.Linear):
            return one
        if "formats" in options and hasattr(module, "gate_up_proj"):
            return one
    return None
