"""Experts as operators and as a layer: on the CPU, and as on a GPU, with kernels in the simulator;
in models of transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from qformats import FORMATS, dequantize, quantize
from reference import nmse
from steps.kernels.experts import few
from steps.nn import experts, ggml_kernels
from steps.nn.experts import QuantExperts, mul_mat_id
from steps.nn.linear import quantize_model
from tests.nn.test_rows import blocks_of

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
IDS = torch.tensor([[4, 0, 5], [-1, 2, 2]])
silu = torch.nn.functional.silu


@pytest.fixture
def gpu(host: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One whose kernels run in the simulator, on tensors of the CPU."""
    monkeypatch.setattr(experts, "_product", experts._on_gpu)
    monkeypatch.setattr(few, "multiprocessors", lambda: 3)  # each thread block sorts all ids
    experts._prepared.clear()
    experts._of_blocks.clear()
    yield host
    experts._prepared.clear()
    experts._of_blocks.clear()


def of_experts(name: str, e: int, n: int, blocks: int) -> tuple[Any, Any]:
    """(bytes [E, N, of a row], float32 values)"""
    held, values = blocks_of(name, e * n, blocks)
    return held.view(e, n, -1), values.view(e, n, -1)


def by_loop(values: Any, x: Any, ids: Any) -> Any:
    """float64 [T, S, N], NaN for ids that are none."""
    rows = x if x.ndim == 3 else x[:, None].expand(*ids.shape, -1)
    y = torch.full((*ids.shape, values.shape[1]), torch.nan, dtype=torch.float64)
    for t, s in np.ndindex(*ids.shape):
        if 0 <= ids[t, s] < len(values):
            y[t, s] = values[ids[t, s]].double() @ rows[t, s].double()
    return y


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("per_slot", [False, True])
def test_products_by_experts(gpu: Any, dtype: Any, per_slot: bool) -> None:
    """On the CPU and on a GPU; a number that is none of theirs gives NaN."""
    held, values = of_experts("q4_1", 5, 7, 2)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*((2, 3, 64) if per_slot else (2, 64)), generator=generator).to(dtype)
    wanted = by_loop(values, x, IDS)
    for of in (mul_mat_id, experts._products_on_gpu):
        y = of(held, x, IDS, "q4_1")
        assert (y.shape, y.dtype) == ((2, 3, 7), dtype)
        torch.testing.assert_close(y.double(), wanted, rtol=2e-2, atol=2e-2, equal_nan=True)
    assert len(experts._of_blocks) == 1
    held[0] = 0  # packed anew
    values[0] = 0
    y = experts._products_on_gpu(held, x, IDS, "q4_1")
    wanted = by_loop(values, x, IDS)
    torch.testing.assert_close(y.double(), wanted, rtol=2e-2, atol=2e-2, equal_nan=True)


def test_no_tokens(gpu: Any) -> None:
    held, _ = of_experts("q4_0", 2, 32, 1)
    for of in (mul_mat_id, experts._products_on_gpu):
        y = of(held, torch.zeros(0, 32), torch.zeros(0, 3, dtype=torch.int64), "q4_0")
        assert y.shape == (0, 3, 32)


def test_what_is_refused() -> None:
    held, _ = of_experts("q4_0", 5, 32, 2)
    x = torch.zeros(2, 64)
    with pytest.raises(ValueError, match=r"x must have shape \[T, 64\] or .*got \[2, 32\] and"):
        mul_mat_id(held, torch.zeros(2, 32), IDS, "q4_0")
    with pytest.raises(TypeError, match=r"ids must be int32 or int64, got torch\.float32"):
        mul_mat_id(held, x, IDS.float(), "q4_0")
    with pytest.raises(TypeError, match=r"blocks must be uint8 \[E, N, bytes of a row\]"):
        mul_mat_id(held[0], x, IDS, "q4_0")
    with pytest.raises(ValueError, match=r"down has shape \[5, 32, 64\] and gate .*\[5, 64, 32\]"):
        QuantExperts((held, "q4_0"), (held, "q4_0"), (held, "q4_0"))


def test_experts_of_a_file() -> None:
    """Blocks bit for bit, biases by their values."""
    made, given = [], []
    for name, n, blocks in (("q4_0", 32, 2), ("q4_1", 32, 2), ("q8_0", 64, 1)):
        held, _ = of_experts(name, 5, n, blocks)
        array = held.numpy().view(FORMATS[name].dtype)
        made.append(SimpleNamespace(name=name, type=name, shape=(5, n, 32 * blocks), array=array))
        given.append((held, name))
    biases = [np.ones((5, n), np.float32) * n for n in (32, 32, 64)]
    of_file = [SimpleNamespace(values=lambda one=one: one) for one in biases]
    layer = QuantExperts.from_gguf(*made, "clamped", of_file, accuracy="fast")
    wanted = QuantExperts(*given, "clamped", tuple(map(torch.from_numpy, biases)))
    assert layer.accuracy == "fast"
    found = layer.state_dict()
    assert all(torch.equal(found[key], one) for key, one in wanted.state_dict().items())
    with pytest.raises(
        ValueError, match=r"the bias of down must have shape \[5, 64\], got \[5, 32"
    ):
        QuantExperts.from_gguf(*made, "clamped", of_file[:2] + of_file[:1])
    made[1].type = "f16"
    with pytest.raises(ValueError, match="q4_1 is f16 and the kernels take q4_0"):
        QuantExperts.from_gguf(*made)
    made[0].shape = (5, 64)
    with pytest.raises(ValueError, match=r"q4_0 has shape \[5, 64\]: experts are \[E, N, K\]"):
        QuantExperts.from_gguf(*made)


def test_a_debug_check_of_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    held, _ = of_experts("q4_0", 5, 32, 2)
    monkeypatch.setattr(experts, "check_ids", True)
    with pytest.raises(ValueError, match="2 ids are no expert's, such as 5: there are 5, from 0"):
        mul_mat_id(held, torch.zeros(2, 64), IDS, "q4_0")
    mul_mat_id(held, torch.zeros(2, 64), IDS.clamp(0, 4), "q4_0")


def layer_of(formats: tuple[str, str, str], act_fn: Any, biased: bool) -> tuple[Any, Any]:
    """(layer, [values of gates, ups, downs])"""
    sizes = ((32, 2), (32, 2), (64, 1))
    made = [of_experts(name, 4, *size) for name, size in zip(formats, sizes, strict=True)]
    parts = [(blocks, name) for (blocks, _), name in zip(made, formats, strict=True)]
    generator = torch.Generator().manual_seed(2)
    biases = None
    if biased:
        biases = tuple(torch.randn(4, n, generator=generator) for n, _ in sizes)
    return QuantExperts(*parts, act_fn, biases), [values for _, values in made]


def expected(layer: Any, values: Any, x: Any, ids: Any, router: Any) -> Any:
    def product(i: int, name: str, x: Any) -> Any:
        bias = getattr(layer, f"{name}_bias")
        y = by_loop(values[i], x, ids)
        return y if bias is None else y + bias[ids].double()

    gate, up = product(0, "gate", x), product(1, "up", x)
    if layer.act_fn == "clamped":
        gate, up = gate.clamp(max=7), up.clamp(-7, 7) + 1
        hidden = gate * torch.sigmoid(1.702 * gate) * up
    else:
        hidden = layer.act_fn(gate) * up
    return (product(2, "down", hidden) * router.double().unsqueeze(-1)).sum(1)


@pytest.mark.parametrize(
    ("formats", "act_fn", "launches"),
    [
        (("q4_0", "q4_0", "q8_0"), silu, 3),
        (("q4_0", "q4_0", "q4_0"), "clamped", 3),
        (("q4_0", "q5_0", "q8_0"), silu, 4),
        (("q4_0", "q4_0", "q8_0"), nn.GELU(), 4),
    ],
    ids=["fused", "clamped", "two formats", "another function"],
)
def test_a_layer(gpu: Any, formats: Any, act_fn: Any, launches: int) -> None:
    """On the CPU and on a GPU: the same launches whoever chose which experts."""
    layer, values = layer_of(formats, act_fn, biased=act_fn == "clamped")
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(3, 64, generator=generator)
    ids, router = torch.tensor([[1, 3], [0, 1], [2, 2]]), torch.rand(3, 2, generator=generator)
    wanted = expected(layer, values, x, ids, router)
    off = (layer(x, ids, router).double() - wanted).abs().max() / wanted.abs().max()
    assert off < 1e-5
    layer._move(torch.device("cuda"))
    off = (layer(x, ids, router).double() - wanted).abs().max() / wanted.abs().max()
    assert off < 2e-3, "two roundings of activations to float16"
    assert len([name for name, *_ in gpu.launched if name != "by_rows"]) == launches
    gpu.runs = False
    assert layer(x.half(), ids, router).dtype == torch.float16
    layer._move(torch.device("cpu"))
    assert not layer._on_gpu
    assert layer.device_bytes == sum(one.nbytes for one in layer.buffers())


def test_a_fast_layer(gpu: Any) -> None:
    """Many tokens are rounded to int8, few are not; a second packing counts."""
    exact, values = layer_of(("q4_0", "q4_0", "q8_0"), silu, biased=False)
    parts = [(getattr(exact, f"{name}_blocks"), exact.formats[name]) for name in experts.PARTS]
    fast = QuantExperts(*parts, accuracy="fast")
    assert "accuracy=fast" in repr(fast)
    for layer in (exact, fast):
        layer._move(torch.device("cuda"))
    assert fast.device_bytes > 1.9 * exact.device_bytes
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(70, 64, generator=generator).half()
    ids, router = torch.randint(4, (70, 2), generator=generator), torch.rand(70, 2)
    wanted = expected(exact, values, x, ids, router)
    errors = [
        nmse(layer(x, ids, router).double().numpy(), wanted.numpy()) for layer in (exact, fast)
    ]
    assert errors[0] < 1e-6 < 2e-5 < errors[1] < 5e-4
    assert torch.equal(fast(x[:3], ids[:3], router[:3]), exact(x[:3], ids[:3], router[:3]))
    with pytest.raises(ValueError, match="accuracy is 'quick': it must be one of exact, fast"):
        QuantExperts(*parts, accuracy="quick")


def test_clamped_gates_of_bfloat16_rows_are_float16(gpu: Any) -> None:
    """So one product rounds its rows, and the next one finds them as it reads them."""
    layer, values = layer_of(("q4_0", "q4_0", "q8_0"), "clamped", biased=True)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(40, 64, generator=generator).bfloat16()
    ids, router = torch.randint(4, (40, 2), generator=generator), torch.rand(40, 2)
    wanted = expected(layer, values, x, ids, router)
    layer._move(torch.device("cuda"))
    y = layer(x, ids, router)
    assert y.dtype == torch.bfloat16
    assert nmse(y.double().numpy(), wanted.numpy()) < 1e-5
    names = [name for name, *_ in gpu.launched]
    assert names.count("experts_many") == 2
    assert names.count("by_expert") == 1


def test_a_state_dict_says_its_formats(gpu: Any) -> None:
    layer, _ = layer_of(("q4_0", "q4_1", "q8_0"), silu, biased=True)
    on_gpu, _ = layer_of(("q4_0", "q4_1", "q8_0"), silu, biased=True)
    on_gpu.gate_blocks.zero_()
    on_gpu._move(torch.device("cuda"))
    before = on_gpu.gate_0.clone()
    on_gpu.load_state_dict(layer.state_dict())
    assert on_gpu.state_dict().keys() == layer.state_dict().keys()
    assert not torch.equal(on_gpu.gate_0, before), "packed anew"
    as_floats = {**layer.state_dict(), "up_blocks": layer.up_blocks.half()}
    with pytest.raises(RuntimeError, match="up_blocks are float16, and blocks are bytes"):
        on_gpu.load_state_dict(as_floats)
    other, _ = layer_of(("iq4_nl", "q4_1", "q8_0"), silu, biased=True)
    match = r"the state holds gate q4_0, .*the layer takes gate iq4_nl"
    with pytest.raises(ValueError, match=match):
        other.load_state_dict(layer.state_dict())


def test_dtypes_change_biases_alone() -> None:
    layer, _ = layer_of(("q4_0", "q4_0", "q8_0"), "clamped", biased=True)
    layer.to(torch.bfloat16)
    assert layer.down_bias.dtype == torch.bfloat16
    assert layer.gate_blocks.dtype == torch.uint8


def test_a_graph_of_torch_sees_a_node(gpu: Any) -> None:
    layer, _ = layer_of(("q4_0", "q4_0", "q8_0"), silu, biased=False)
    x, router = torch.randn(3, 64), torch.rand(3, 2)
    ids = torch.tensor([[1, 3], [0, 1], [2, 2]])
    whole = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(whole(x, ids, router), layer(x, ids, router))


# --- models of transformers -----------------------------------------------------------------------


def model_of(kind: str) -> Any:
    """A tiny one with random weights."""
    import transformers as tf

    common = {
        "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "num_experts_per_tok": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    torch.manual_seed(0)
    if kind == "qwen3_moe":
        config: Any = tf.Qwen3MoeConfig(
            num_experts=4, moe_intermediate_size=32, intermediate_size=64, head_dim=32,
            decoder_sparse_step=1, mlp_only_layers=[], **common,
        )  # fmt: skip
    elif kind == "mixtral":
        config = tf.MixtralConfig(num_local_experts=4, intermediate_size=32, **common)
    else:
        config = tf.GptOssConfig(
            num_local_experts=4, intermediate_size=32, head_dim=32,
            layer_types=["full_attention"] * 2, **common,
        )  # fmt: skip
    model = tf.AutoModelForCausalLM.from_config(config).eval()
    for name, one in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(one)
    return model


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_experts_of_a_model_are_replaced(kind: str) -> None:
    """And the model answers as the same one with the dequantized weights."""
    model, ids = model_of(kind), torch.arange(7)[None]
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "gate_up_proj"):
                for part in (module.gate_up_proj, module.down_proj):
                    along = part.transpose(1, 2) if kind == "gpt_oss" else part
                    for one in along:
                        values = one.detach().contiguous().numpy()
                        one.copy_(torch.from_numpy(dequantize(quantize(values, "q8_0"))))
        wanted = model(ids).logits
    report = quantize_model(model, "q8_0", skip=("lm_head", "self_attn"), accuracy="fast")
    found = [name for name, one in model.named_modules() if isinstance(one, QuantExperts)]
    assert len(found) == 2
    assert set(found) <= {one.name for one in report.replaced}
    said = model.config.quantization_config.layers
    assert {said[name]["accuracy"] for name in found} == {"fast"}
    left_alone = set(model._ddp_params_and_buffers_to_ignore)
    assert {f"{name}.{part}_blocks" for name in found for part in experts.PARTS} <= left_alone
    with torch.no_grad():
        got = model(ids).logits
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)


def test_experts_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """By skip, for a size, and where a gate is another: each with its reason."""
    model = model_of("gpt_oss")
    model.model.layers[1].mlp.experts.limit = 5.0
    report = quantize_model(model, "q4_0", skip=("lm_head", "layers.0"))
    reasons = dict(report.skipped)
    assert reasons["model.layers.0.mlp.experts"] == "skip='layers.0'"
    assert "alpha 1.702 and limit 7" in reasons["model.layers.1.mlp.experts"]
    assert not any(isinstance(one, QuantExperts) for one in model.modules())


def test_ggml_kernels_have_no_loop(gpu: Any) -> None:
    held, values = of_experts("q8_0", 5, 32, 2)
    kind = next(one for one, name in ggml_kernels.GGML_TYPES.items() if name == "q8_0")
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    y = ggml_kernels.mul_mat_id(held, x, IDS, kind, 32)
    torch.testing.assert_close(
        y.double(), by_loop(values, x, IDS), rtol=1e-3, atol=1e-3, equal_nan=True
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["q4_0", "q6_k", "mxfp4"])
def test_on_a_gpu(cuda: Any, name: str) -> None:
    """Products of blocks there, in a graph with other ids, and a layer."""
    held, values = of_experts(name, 5, 48, 1 if FORMATS[name].elements > 32 else 6)
    k = values.shape[2]
    x = torch.randn(2, k, generator=torch.Generator().manual_seed(1)).half()
    there, ids = held.to(cuda), IDS.to(cuda)
    most = float(x.float().norm(dim=1).max() * values.norm(dim=2).max())

    def right(y: Any, ids: Any) -> bool:
        wanted = by_loop(values, x, ids)
        off = (y.cpu().double() - wanted).abs()
        return bool(
            (y.cpu().isnan() == wanted.isnan()).all() and off.nan_to_num().max() < 2e-3 * most
        )

    given = x.to(cuda)
    assert right(mul_mat_id(there, given, ids, name), IDS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = mul_mat_id(there, given, ids, name)
    ids.copy_(IDS.flip(1))
    graph.replay()
    torch.cuda.synchronize()
    assert right(y, IDS.flip(1))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("act_fn", [silu, "clamped"], ids=["silu", "clamped"])
def test_a_layer_on_a_gpu(cuda: Any, act_fn: Any, dtype: Any) -> None:
    layer, values = layer_of(("q4_0", "q4_0", "q8_0"), act_fn, biased=act_fn == "clamped")
    generator = torch.Generator().manual_seed(3)
    for tokens in (1, 2, 9, 70):
        x = (torch.randn(tokens, 64, generator=generator) / 8).to(dtype)
        ids = torch.randint(4, (tokens, 2), generator=generator)
        router = torch.rand(tokens, 2, generator=generator)
        wanted = expected(layer.cpu(), values, x, ids, router)
        y = layer.to(cuda)(x.to(cuda), ids.to(cuda), router.to(cuda)).cpu()
        most = 1e-2 if dtype == torch.float16 else float(wanted.abs().max()) / 64
        torch.testing.assert_close(y.double(), wanted, rtol=1e-2, atol=most)
