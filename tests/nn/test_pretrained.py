"""Quantized models of transformers through its `save_pretrained` and `from_pretrained`."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.integrations import accelerate
from transformers.quantizers import auto

from steps.nn import pretrained
from steps.nn.experts import QuantExperts
from steps.nn.linear import QuantLinear, quantize_model
from tests.nn.test_experts import model_of

IDS = torch.tensor([[1, 5, 33, 70, 7, 2, 90]])
SIZES: Any = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96,
}  # fmt: skip


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **options)).eval()


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(IDS).logits


def layers_of(model: Any) -> dict[str, QuantLinear]:
    return {name: one for name, one in model.named_modules() if isinstance(one, QuantLinear)}


def require_same(model: Any, again: Any) -> None:
    before, after = layers_of(model), layers_of(again)
    assert {name: str(one) for name, one in before.items()} == {
        name: str(one) for name, one in after.items()
    }
    for name, one in before.items():
        assert torch.equal(one.blocks, after[name].blocks), name
        assert one.dtype is after[name].dtype
    floats = dict(again.named_parameters())
    for name, one in model.named_parameters():
        assert torch.equal(one, floats[name]), name
    assert dict(model.named_parameters()).keys() == floats.keys()


@pytest.fixture(autouse=True)
def quiet(caplog: Any, monkeypatch: Any) -> Any:
    """What transformers logs is kept: it reports keys that are missing or unexpected so."""
    transformers.utils.logging.disable_progress_bar()
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    return caplog


@pytest.mark.parametrize("case", ["plain", "biased", "head too", "fast", "bfloat16", "in shards"])
def test_the_same_bits_come_back(case: str, tmp_path: Path, quiet: Any) -> None:
    model = llama(attention_bias=case == "biased")
    if case == "bfloat16":
        model.save_pretrained(tmp_path / "floats")
        model = LlamaForCausalLM.from_pretrained(tmp_path / "floats", dtype=torch.bfloat16)
    report = quantize_model(
        model,
        "q8_0",
        () if case == "head too" else ("lm_head",),
        accuracy="fast" if case == "fast" else "exact",
        invariant=case == "biased",
    )
    assert len(report.replaced) == 14 + (case == "head too")
    for one in layers_of(model).values():
        if one.bias is not None:
            nn.init.normal_(one.bias)
    right = logits(model)
    model.save_pretrained(tmp_path, max_shard_size="50KB" if case == "in shards" else "1GB")
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (case == "in shards")

    again = LlamaForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert torch.equal(logits(again), right)
    require_same(model, again)
    assert not quiet.records, quiet.text

    again.save_pretrained(tmp_path / "twice")
    twice = LlamaForCausalLM.from_pretrained(tmp_path / "twice", dtype="auto")
    assert torch.equal(logits(twice), right)
    assert twice.half().model.norm.weight.dtype is torch.float16


def test_several_formats_and_layers_that_are_one(tmp_path: Path) -> None:
    model = llama(tie_word_embeddings=True).requires_grad_(False)
    first, second = model.model.layers
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    first.mlp.down_proj = QuantLinear.from_float(first.mlp.down_proj, "q4_1")
    quantize_model(model, "mxfp4", skip=("q_proj", "lm_head"))
    assert second.mlp.up_proj is first.mlp.up_proj
    right = logits(model)
    model.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again), right)
    assert type(again.model.layers[0].self_attn.q_proj) is nn.Linear
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_a_body_and_a_head(tmp_path: Path, quiet: Any) -> None:
    """As with floats, the body of a saved model loads alone, and a body into a model with a head;
    a body is also what was quantized alone."""
    model = llama()
    quantize_model(model.model, "q5_0")
    model.save_pretrained(tmp_path / "model")
    require_same(model, LlamaForCausalLM.from_pretrained(tmp_path / "model"))
    body = LlamaModel.from_pretrained(tmp_path / "model")
    require_same(model.model, body)
    body.save_pretrained(tmp_path / "body")
    headed = LlamaForCausalLM.from_pretrained(tmp_path / "body")
    require_same(model.model, headed.model)
    assert "lm_head" in quiet.text  # its own report, as with floats
    assert "_proj" not in quiet.text


def test_layers_that_stay_wide_in_a_narrow_model(tmp_path: Path) -> None:
    """T5 keeps some Linears in float32, and asks for their dtype."""
    torch.manual_seed(0)
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 1, "num_heads": 4}
    transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, vocab_size=96, decoder_start_token_id=0)
    ).save_pretrained(tmp_path / "floats")
    load = transformers.T5ForConditionalGeneration.from_pretrained
    model = load(tmp_path / "floats", dtype=torch.float16)
    quantize_model(model, "q8_0")
    wide = [one for name, one in layers_of(model).items() if name.endswith(".wo")]
    assert {one.dtype for one in wide} == {torch.float32}
    model.save_pretrained(tmp_path / "blocks")
    again = load(tmp_path / "blocks", dtype=torch.float16)
    require_same(model, again)
    with torch.no_grad():
        y, y_again = (
            one(input_ids=IDS, decoder_input_ids=IDS).logits for one in (model.eval(), again)
        )
    assert torch.equal(y, y_again)


def test_a_model_made_float_again_is_saved_as_floats(tmp_path: Path) -> None:
    model = llama()
    quantize_model(model, "q8_0", skip=("model.layers.1", "lm_head"))
    for name, layer in layers_of(model).items():
        linear = nn.Linear(layer.in_features, layer.out_features, bias=False)
        linear.weight = nn.Parameter(layer.dequantize())
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, linear)
    model.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    assert not layers_of(again)
    assert torch.equal(logits(again), logits(model))


@pytest.mark.gpu
def test_blocks_that_were_loaded_to_a_gpu_are_packed(
    cuda: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(accelerate, "is_accelerate_available", lambda: True)  # asked, not used
    model = llama()
    quantize_model(model, "q8_0")
    model.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path, device_map={"": cuda})
    assert {one.device.type for one in layers_of(again).values()} == {"cuda"}
    assert all(one.packed and not one.blocks.is_cuda for one in layers_of(again).values())
    with torch.no_grad():
        assert torch.equal(again(IDS.to(cuda)).logits, model.to(cuda)(IDS.to(cuda)).logits)


# --- what is refused ------------------------------------------------------------------------------


def test_without_the_import_nothing_loads_silently(
    tmp_path: Path, quiet: Any, monkeypatch: Any
) -> None:
    model = llama()
    quantize_model(model, "q8_0")
    model.save_pretrained(tmp_path)
    monkeypatch.delitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "steps.nn.pretrained")
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        LlamaForCausalLM.from_pretrained(tmp_path)
    assert "Unknown quantization type, got steps.nn.pretrained" in quiet.text


def edited(folder: Path, change: Any) -> Path:
    """The file of a saved model after a change of its tensors."""
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_what_a_folder_lacks_or_has_wrong(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj"

    def saved() -> Path:
        model = llama()
        quantize_model(model, "q8_0")
        model.save_pretrained(tmp_path)
        return tmp_path

    def refuses(folder: Path, said: str, **options: Any) -> None:
        with pytest.raises(ValueError, match=said):
            LlamaForCausalLM.from_pretrained(folder, **options)

    refuses(
        edited(saved(), lambda state: state.pop(f"{name}.blocks")),
        f"the config says that {name} is q8_0, and the checkpoint has no {name}.blocks: load",
    )
    infinite = torch.from_numpy(np.array([np.inf], np.float16).view(np.uint8))
    refuses(
        edited(saved(), lambda state: state[f"{name}.blocks"][0, :2].copy_(infinite)),
        rf"{name}.blocks: w has d = inf in block 0 of row 0: it must be finite",
    )
    config = saved() / "config.json"
    facts = json.loads(config.read_text())
    facts["quantization_config"]["layers"][name]["format"] = "q5_1"
    config.write_text(json.dumps(facts))
    refuses(tmp_path, "the state holds q8_0, version 1, and the layer takes q5_1, version 1")
    facts["quantization_config"]["layers"] = {"other.up": {"format": "q8_0"}}
    config.write_text(json.dumps(facts))
    refuses(tmp_path, "names 1 quantized layers, such as other.up, and a LlamaForCausalLM has no")
    llama().save_pretrained(tmp_path / "floats")
    refuses(
        tmp_path / "floats",
        "quantizes no floats: load the floats, then call",
        quantization_config=pretrained.BlocksConfig({}),
    )


@pytest.mark.parametrize(
    "skip", [("lm_head",), ("lm_head", "self_attn", "router", "gate")], ids=str
)
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_experts_come_back(kind: str, skip: tuple[str, ...], tmp_path: Path) -> None:
    """With the same bits, also where nothing else is quantized; biases are those of the file."""
    model = model_of(kind)
    quantize_model(model, "q4_0", skip)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    require_same(model, again)
    found = {name: one for name, one in again.named_modules() if isinstance(one, QuantExperts)}
    assert len(found) == 2
    for name, one in model.named_modules():
        if isinstance(one, QuantExperts):
            assert str(one) == str(found[name])
            for part, blocks in one.named_buffers():
                assert torch.equal(blocks, found[name].get_buffer(part)), part
    assert torch.equal(logits(model), logits(again))
