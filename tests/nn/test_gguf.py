"""Models of transformers with the blocks of their GGUF files: logits, tokens, memory."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from qformats.gguf_file import tensors
from steps.decoder.files import write_tiny
from steps.nn import ggml_kernels, gguf
from steps.nn import operator as operator
from steps.nn.experts import QuantExperts
from steps.nn.gguf import PermutedLinear, use_gguf
from steps.nn.linear import QuantLinear
from steps.nn.rows import QuantEmbedding, dequantize
from tests.decoder.smollm2 import smollm2
from tests.nn.gguf_models import installed_gemma, write_gemma3, write_lfm2, write_qwen3moe

IDS = torch.tensor([[1, 5, 33, 70, 7, 2, 90]])


@pytest.fixture(autouse=True)
def loaders(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers without what it asks for before it loads a file on the CPU, and as if nobody had
    registered kernels, which those before 5.24 do not know."""
    from transformers import modeling_utils

    monkeypatch.setattr(modeling_utils, "is_accelerate_available", lambda: True)
    name = "transformers.integrations.gguf.kernels"
    if find_spec("transformers.integrations.gguf") is not None:
        monkeypatch.setattr(import_module(name), "_gguf_kernel", False)


def loaded(path: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    options = {"attn_implementation": "eager"} | options
    return AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, **options
    ).eval()


def answers(model: Any, ids: Any = IDS, count: int = 12) -> tuple[Any, Any]:
    """(logits, tokens that follow greedily)"""
    with torch.no_grad():
        tokens = model.generate(
            ids, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        return model(ids).logits, tokens


def same(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    """Tokens are equal, logits but for the order of float32 sums."""
    assert torch.equal(one[1], other[1])
    size = one[0].abs().max().item()
    torch.testing.assert_close(other[0], one[0], rtol=0, atol=2e-5 * size)


@pytest.mark.parametrize(("name", "tied"), [("q4_0", True), ("q5_1", False)])
def test_a_llama_takes_the_blocks_of_its_file(tmp_path: Path, name: str, tied: bool) -> None:
    """Its queries and keys in the order of rows that transformers gives them."""
    path = write_tiny(tmp_path / "tiny.gguf", name, tied=tied)
    model = loaded(path)
    before, floats = answers(model), dict(model.named_parameters())
    done = use_gguf(model, path)
    assert (done.kept, done.unused) == ((), ())
    same(before, answers(model))
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantLinear)}
    assert len(layers) == 2 * 7 + 1
    for n, layer in layers.items():
        wanted = floats.get(f"{n}.weight", floats["model.embed_tokens.weight"])
        assert torch.equal(layer.dequantize(), wanted)
    assert isinstance(model.get_input_embeddings(), QuantEmbedding)
    assert not [n for n, one in model.named_parameters() if one.ndim > 1], "floats of weights"
    held = sum(one.nbytes for one in tensors(path).values() if one.type == name)
    assert sum(one.after for one in done.taken) == held, "each block once"
    first, *rest = done.summary().splitlines()
    assert f"-> {held:,} bytes of weights" in first
    assert not rest
    assert f"model.layers.1.mlp.up_proj: {name} of blk.1.ffn_up.weight" in str(done)
    if tied:
        assert layers["lm_head"].blocks.data_ptr() == model.model.embed_tokens.blocks.data_ptr()


def test_another_file_is_not_taken(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf")
    other = write_tiny(tmp_path / "other.gguf", seed=1)
    model = loaded(path)
    before = answers(model)
    done = use_gguf(model, other)
    assert not done.taken
    assert len(done.kept) == 16
    assert done.kept[1] == (
        "model.layers.0.self_attn.q_proj",
        "its values are not those of blk.0.attn_q.weight",
    )
    assert "token_embd.weight" in done.unused
    assert "lm_head is unchanged: its values are not those of output.weight" in str(done)
    same(before, answers(model))


def test_rows_in_the_order_of_the_file_are_not_those_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where transformers' order of rows is not heeded, the values say so."""
    path = write_tiny(tmp_path / "tiny.gguf")
    model = loaded(path)
    plain = gguf._by_names

    def unordered(*given: Any) -> Any:
        found = plain(*given)
        assert any(one.order is not None for (one,) in found.values())
        return {name: [one._replace(order=None) for one in of] for name, of in found.items()}

    monkeypatch.setattr(gguf, "_by_names", unordered)
    done = use_gguf(model, path)
    kept = {name.rsplit(".", 1)[1] for name, _ in done.kept}
    assert kept == {"q_proj", "k_proj"}


def test_modules_that_stay_are_named(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf")
    model = loaded(path)
    layer = model.model.layers[0]
    layer.self_attn.v_proj.register_forward_hook(lambda *_: None)

    class Other(nn.Linear):
        pass

    layer.mlp.up_proj.__class__ = Other
    model.extra = nn.Linear(8, 8)
    assert dict(use_gguf(model, path).kept) == {
        "model.layers.0.self_attn.v_proj": "it has hooks, which the new one would not have",
        "model.layers.0.mlp.up_proj": "a Other may do more than a Linear",
        "extra": "the file has no blocks for it that transformers maps to its name",
    }


def test_a_model_in_bfloat16(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", "q8_0")
    model = loaded(path, dtype=torch.bfloat16)
    done = use_gguf(model, path)
    assert done.kept == ()
    with torch.no_grad():
        assert model.model.embed_tokens(IDS).dtype == model(IDS).logits.dtype == torch.bfloat16
        assert nn.Sequential(model.model.embed_tokens).float()(IDS).dtype == torch.float32


def test_k_quants_and_an_embedding_that_is_multiplied(tmp_path: Path) -> None:
    path = write_gemma3(tmp_path / "gemma3.gguf")
    model = loaded(path)
    before = answers(model)
    done = use_gguf(model, path)
    assert (done.kept, done.unused) == ((), ())
    formats = {one for taken in done.taken for one in taken.formats}
    assert formats == {"q3_k", "q4_k", "q5_0", "q5_k", "q6_k"}
    same(before, answers(model))


def test_types_that_no_kernel_takes_stay_and_are_named(tmp_path: Path) -> None:
    path = write_gemma3(tmp_path / "gemma3.gguf", down="iq2_xs")
    model = loaded(path)
    kept = dict(use_gguf(model, path).kept)
    assert list(kept) == [f"model.layers.{i}.mlp.down_proj" for i in range(2)]
    assert kept["model.layers.0.mlp.down_proj"] == (
        "blk.0.ffn_down.weight is iq2_xs, which no kernel takes: QuantLinear.from_float quantizes "
        "the module's floats to another format"
    )
    layer = QuantLinear.from_float(model.model.layers[0].mlp.down_proj, "q5_0")
    assert (layer.in_features, layer.out_features) == (512, 256)
    with pytest.raises(ValueError, match=r"is iq2_xs, which is not read here: take a file in q4_0"):
        QuantLinear.from_gguf(tensors(path)["blk.0.ffn_down.weight"])


def test_experts(tmp_path: Path) -> None:
    path = write_qwen3moe(tmp_path / "moe.gguf")
    model = loaded(path)
    before = answers(model)
    done = use_gguf(model, path)
    assert (done.kept, done.unused) == ((), ())
    experts = [m for m in model.modules() if isinstance(m, QuantExperts)]
    assert [m.formats for m in experts] == [dict.fromkeys(("gate", "up", "down"), "q4_0")] * 2
    same(before, answers(model))


@pytest.mark.parametrize("packed", [True, False])
def test_the_newer_loader(tmp_path: Path, packed: bool) -> None:
    """Which keeps blocks where kernels are registered; here on a CPU."""
    path = write_lfm2(tmp_path / "lfm2.gguf")
    floats = answers(loaded(path))
    if packed:
        ggml_kernels.register()
    model = loaded(path)
    kinds = [type(m).__name__ for m in model.modules()]
    assert kinds.count("GgufLinear") == (13 if packed else 0)
    same(floats, answers(model))
    done = use_gguf(model, path)
    assert (done.kept, done.unused) == ((), ())
    assert "GgufLinear" not in [type(m).__name__ for m in model.modules()]
    same(floats, answers(model))


def test_one_graph_under_torch_compile(tmp_path: Path) -> None:
    path = write_qwen3moe(tmp_path / "moe.gguf")
    model = loaded(path)
    use_gguf(model, path)
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        wanted, got = (of(IDS, use_cache=False).logits for of in (model, run))
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("cut", [False, True])
def test_columns_in_another_order(tmp_path: Path, cut: bool) -> None:
    """Blocks are reordered where the order keeps them whole; else what they multiply is."""
    path = write_tiny(tmp_path / "tiny.gguf")
    tensor = tensors(path)["blk.0.ffn_down.weight"]
    k, run = tensor.shape[1], 16 if cut else 64
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(k // run, generator=generator)[:, None] * run + torch.arange(run)
    order = order.reshape(-1)
    source = gguf._Source(tensor, None, order)
    blocks, values = source.blocks(), torch.from_numpy(tensor.values())
    linear = nn.Linear(k, len(values), bias=False)
    linear.weight.data = values[:, torch.argsort(order)]
    assert gguf._same(linear.weight, blocks, "q4_0", order)
    assert not gguf._same(linear.weight, blocks, "q4_0")
    work = gguf._Replacing(nn.Module(), "", {}, {}, {})
    layer = work._made(linear, source, blocks)
    assert isinstance(layer, PermutedLinear if cut else QuantLinear)
    if not cut:
        assert torch.equal(dequantize(layer.blocks, "q4_0", torch.float32), linear.weight)
    x = torch.randn(3, k, generator=generator)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), linear(x))


def test_what_is_not_such_a_model_or_file(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf")
    with pytest.raises(ValueError, match="a Linear has no config: use_gguf takes a model of trans"):
        use_gguf(nn.Linear(8, 8), path)
    (tmp_path / "none.gguf").write_bytes(b"GGUX")
    with pytest.raises(ValueError, match="is not a GGUF file"):
        use_gguf(nn.Linear(8, 8), tmp_path / "none.gguf")


# --- real models ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("which", ["smollm2", "gemma"])
def test_real_models(tmp_path: Path, which: str) -> None:
    """Against transformers' own float weights of the file: logits, tokens, KL divergence."""
    path = smollm2() if which == "smollm2" else installed_gemma(tmp_path)
    model = loaded(path)
    ids = torch.tensor([[2, 651, 5656, 576, 6081, 603, 476, 3413, 576]])
    before = answers(model, ids)
    done = use_gguf(model, path)
    assert (done.kept, done.unused) == ((), ())
    after = answers(model, ids)
    same(before, after)
    p, q = (one[0].double().log_softmax(-1) for one in (before, after))
    assert (p.exp() * (p - q)).sum(-1).abs().max() < 1e-9


@pytest.mark.gpu
@pytest.mark.parametrize("which", ["llama", "gemma3", "qwen3moe", "lfm2", "smollm2", "gemma"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_on_a_gpu(cuda: Any, tmp_path: Path, which: str, dtype: Any) -> None:
    """Against transformers' float32 weights: logits, KL divergence; a module's floats are gone."""
    writers: dict[str, Any] = {
        "llama": write_tiny, "gemma3": write_gemma3,
        "qwen3moe": write_qwen3moe, "lfm2": write_lfm2,
        "gemma": lambda path: installed_gemma(tmp_path), "smollm2": lambda path: smollm2(),
    }  # fmt: skip
    path = writers[which](tmp_path / "tiny.gguf")
    ids = IDS.to(cuda)
    with torch.no_grad():
        wanted = loaded(path).to(cuda)(ids).logits
        model = loaded(path, dtype=dtype).to(cuda)
        operator.reserve_counters(torch.device("cuda", 0))
        model(ids)  # torch keeps room for products of this dtype
        floats = torch.cuda.memory_allocated()
        done = use_gguf(model, path)
        assert done.kept == ()
        freed = floats - torch.cuda.memory_allocated()
        rounding = 4 * 512 * len(done.taken)  # each array takes a multiple of 512 bytes
        assert freed >= sum(one.before - one.after for one in done.taken) - rounding
        logits = model(ids).logits.float()
    p, q = (one[0].double().log_softmax(-1) for one in (wanted, logits))
    assert (p.exp() * (p - q)).sum(-1).mean() < 1e-3
    assert (logits - wanted).abs().max() < 0.02 * wanted.abs().max()
