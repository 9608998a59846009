"""Logits of tiny llamas and Qwens, beside those of transformers' own models with the same weights.

The models of transformers are made from their configurations, with the dequantized weights of a
random file. Nothing is fetched.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from qformats.gguf_file import GGUFError
from results.measure.models import one_gpu as bench
from steps import registry
from steps.decoder import files, rotary
from steps.decoder import model as parts
from steps.decoder.compare import checks
from steps.decoder.model import generate, step_products, torch_products
from tests.decoder.test_decoder import SMALL, filled, reference

WIDE = SMALL | {"attention.key_length": 32}
"""Heads of 32 values, four of them, of a width of 64."""
LONG = {"context_length": 256}
KINDS = {"qwen2moe": "Qwen2Moe", "qwen3moe": "Qwen3Moe"}
"""What transformers calls architectures of several words."""
LLAMA_3_1 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def of_transformers(path: Any, rope: dict[str, Any]) -> Any:
    """transformers' model of a file's architecture with its weights, in float64."""
    file = files.Model(path)
    config, kind = file.config, KINDS.get(file.architecture) or file.architecture.capitalize()
    tied, of_experts = "output.weight" not in file.tensors, {}
    if config.experts:
        of_experts = {
            "experts_implementation": "eager",  # others have no float64
            "num_experts": config.experts,
            "num_experts_per_tok": config.chosen,
            "moe_intermediate_size": config.hidden,
            "norm_topk_prob": kind == "Qwen3Moe",
        }
        if kind == "Qwen2Moe":
            inner = file.needed("expert_shared_feed_forward_length")
            of_experts["shared_expert_intermediate_size"] = inner
    made = getattr(transformers, f"{kind}Config")(
        **of_experts,
        vocab_size=config.vocabulary,
        hidden_size=config.width,
        intermediate_size=config.hidden,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.epsilon,
        max_position_embeddings=config.context,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": config.base} | rope,
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(made).double().eval()
    names = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "output": "lm_head",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_output": "self_attn.o_proj",
        **{f"attn_{one}": f"self_attn.{one}_proj" for one in "qkv"},
        **{f"attn_{one}_norm": f"self_attn.{one}_norm" for one in "qk"},
        **{f"ffn_{one}": f"mlp.{one}_proj" for one in ("gate", "up", "down")},
        **{f"ffn_{one}_shexp": f"mlp.shared_expert.{one}_proj" for one in ("gate", "up", "down")},
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    }
    state, gates = {}, {}
    for name, tensor in file.tensors.items():
        *at, one, kind = name.split(".")
        values = tensor.values().astype(np.float64)
        if one.endswith("_exps"):  # parameters, of gates and ups one
            experts = f"model.layers.{at[1]}.mlp.experts"
            if one == "ffn_down_exps":
                state[f"{experts}.down_proj"] = torch.from_numpy(values)
            else:
                gates[experts, one] = torch.from_numpy(values)
            continue
        if one == "ffn_gate_inp_shexp":
            values = values[None]
        if file.architecture == "llama" and one in ("attn_q", "attn_k"):
            heads = len(values) // config.head_dim  # rows as before conversion
            values = values.reshape(heads, config.head_dim // 2, 2, -1).swapaxes(1, 2)
            values = values.reshape(heads * config.head_dim, -1)
        where = f"model.layers.{at[1]}." if at else ""
        if one != "rope_freqs":
            state[f"{where}{names[one]}.{kind}"] = torch.from_numpy(np.array(values))
    for experts in {experts for experts, _ in gates}:
        both = [gates[experts, f"ffn_{name}_exps"] for name in ("gate", "up")]
        state[f"{experts}.gate_up_proj"] = torch.cat(both, 1)
    if tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model


def llama_3_1_factors(pairs: int, base: float) -> np.ndarray:
    """What llama.cpp's converter writes to rope_freqs.weight."""
    scale, low, high = (LLAMA_3_1[one] for one in ("factor", "low_freq_factor", "high_freq_factor"))
    first, found = LLAMA_3_1["original_max_position_embeddings"], []
    for frequency in base ** (-np.arange(pairs) / pairs):
        length = 2 * np.pi / frequency
        if length < first / high:
            found.append(1.0)
        elif length > first / low:
            found.append(scale)
        else:
            smooth = (first / length - low) / (high - low)
            found.append(1 / ((1 - smooth) / scale + smooth))
    return np.array(found)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
KEYS_OF_YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
}
NARROW = {"beta_fast": 4.0, "beta_slow": 2.0, "attention_factor": 0.75}
KEYS_OF_NARROW = {
    "rope.scaling.yarn_beta_fast": 4.0,
    "rope.scaling.yarn_beta_slow": 2.0,
    "rope.scaling.yarn_attn_factor": 0.75,
}
LINEAR = {"rope_type": "linear", "factor": 2.0}
KEYS_OF_LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({"architecture": "llama"}, {}),
    "llama, linear": ({"architecture": "llama"} | KEYS_OF_LINEAR, LINEAR),
    "llama, Llama 3.1": ({"architecture": "llama", "factors": llama_3_1_factors}, LLAMA_3_1),
    "llama, yarn": ({"architecture": "llama"} | KEYS_OF_YARN, YARN),
    "qwen2": ({"architecture": "qwen2", "tied": True}, {}),
    "qwen2, yarn": ({"architecture": "qwen2"} | KEYS_OF_YARN, YARN),
    "qwen2moe": ({"architecture": "qwen2moe"}, {}),
    "qwen3": ({"architecture": "qwen3"}, {}),
    "qwen3moe": ({"architecture": "qwen3moe", "expert_count": 8, "expert_used_count": 3}, {}),
    "qwen3, tied": ({"architecture": "qwen3", "tied": True}, {}),
    "qwen3, narrow yarn": (
        {"architecture": "qwen3"} | KEYS_OF_YARN | KEYS_OF_NARROW,
        YARN | NARROW,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(tmp_path: Any, case: str) -> None:
    keys, rope = CASES[case]
    wide = SMALL if keys["architecture"].startswith("qwen2") else WIDE
    if "factors" in keys:
        keys = keys | {"factors": keys["factors"](16, 10000.0)}
    path = files.write_tiny(tmp_path / "tiny.gguf", "q5_1", **wide | LONG | keys)
    # beyond the first context of scaled ones. transformers' angles are float32: 1e-5 of them there
    ids = checks.prompt(files.WORDS, 100)
    theirs = of_transformers(path, rope)(torch.tensor([ids])).logits[0].numpy()
    ours = filled(reference(path), ids)
    assert theirs.std() > 0.5
    assert checks.relative(ours, theirs) < 1e-5
    if rope:
        other = reference(path)
        other.config = replace(other.config, scaling=rotary.UNSCALED)
        other.frequencies = parts.rotary_frequencies(other.config)
        assert checks.relative(filled(other, ids), theirs) > 1e-2, "scaling matters"


def test_biases_by_the_kernels(kernels: Any, tmp_path: Any) -> None:
    """Of a step that adds them before it rounds, at 3 tokens and at 1."""
    keys = SMALL | {"block_count": 1, "architecture": "qwen2"}
    path = files.write_tiny(tmp_path / "tiny.gguf", **keys)
    ours, ids = files.load(path, step_products("cpu")), checks.prompt(files.WORDS, 3)
    assert ours.layers[0].qkv.choice(3).bias == "float32"
    assert ours.layers[0].out.bias is None
    tokens, kept = generate(ours, torch.tensor([ids]), 2, keep=True)
    trusted, whole = reference(path), [*ids, *tokens[0].tolist()]
    off = checks.relative(torch.cat(kept).double().numpy(), filled(trusted, whole)[2:-1])
    assert off < checks.SAFETY * checks.expected(trusted, whole, "exact")


def test_a_bias_is_added_behind_a_step_that_adds_none(kernels: Any, monkeypatch: Any) -> None:
    blocks = bench.random_blocks("q4_0", 20, 64, np.random.default_rng(0))
    bias = np.linspace(-1, 1, 20, dtype=np.float32)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).half()
    added = step_products("cpu")(blocks, False, bias)
    within = added(x)
    kernel = added.choice(3).kernel
    every = registry.kernels()
    others = [replace(one, adds_bias=False) if one is kernel else one for one in every]
    monkeypatch.setattr("steps.product.choice.kernels", lambda: others)
    for kept in (parts.operator._choices, parts.operator._prepared):
        kept.clear()
    behind = step_products("cpu")(blocks, False, bias)
    y = behind(x)
    assert (within.dtype, y.dtype) == (torch.float16, torch.float32)
    torch.testing.assert_close(y, within.float(), rtol=1e-3, atol=1e-3)
    assert (behind.choice(3).writes, behind.choice(3).bias) == ("float32", None)


def test_what_is_not_of_the_architecture_is_refused(tmp_path: Any) -> None:
    path = files.write_tiny(tmp_path / "tiny.gguf", architecture="qwen3", **SMALL)
    file = files.Model(path)
    file.tensors["blk.0.attn_sinks.weight"] = file.tensors["output_norm.weight"]
    with pytest.raises(GGUFError, match=r"has blk.0.attn_sinks.weight, which no qwen3 known here"):
        files.load(file, torch_products())
    file = files.Model(path)
    del file.tensors["blk.1.attn_k_norm.weight"]
    with pytest.raises(GGUFError, match=r"lacks blk.1.attn_k_norm.weight: it is not a complete"):
        files.load(file, torch_products())


def test_a_yarn_that_stretches_nothing_changes_no_magnitude() -> None:
    assert rotary.yarn_magnitude(0.5) == 1
