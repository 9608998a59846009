"""LoRA of PEFT over quantized layers: found, trained, never lost, merged on request, and one launch
with its layer at few tokens."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

import pytest
import torch
from torch import nn

from steps.nn import operator as torch_operator
from steps.nn.adapters import fused, merge_adapters
from steps.nn.linear import QuantLinear, quantize_model
from steps.registry import kernel_of
from steps.simulator.launch import simulate
from tests.nn import on_the_host

peft = pytest.importorskip("peft")

from steps.nn import lora  # noqa: E402 - imports peft


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


# --- one launch -----------------------------------------------------------------------------------

N, K = 24, 96
HALF = torch.float16


class One(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(K, N, bias=bias)
        self.other = nn.Parameter(torch.ones(1))  # PEFT asks where the first parameter is

    def forward(self, x: Any) -> Any:
        return self.up(x)


def one_layer(dtype: Any = HALF, bias: bool = True, cast: bool = False, **options: Any) -> Any:
    """A PeftModel of one quantized layer in a dtype, in eval. A and B are float32 unless `cast`."""
    torch.manual_seed(2)
    net = One(bias).to(dtype)
    quantize_model(net, "q4_0")
    settings = {"r": 8, "target_modules": ["up"], "init_lora_weights": False, **options}
    model = peft.get_peft_model(
        net, fused(peft.LoraConfig(**settings)), autocast_adapter_dtype=not cast
    )
    return (model.to(dtype) if cast else model).eval()


def layer_of(model: Any) -> Any:
    return model.base_model.model.up


def on_host(model: Any) -> Any:
    layer_of(model).base_layer._move(torch.device("cuda"))
    return layer_of(model)


def tokens(*shape: int, dtype: Any = HALF) -> Any:
    return torch.randn(*shape, K, generator=torch.Generator().manual_seed(3)).to(dtype)


def pefts(layer: Any, x: Any) -> Any:
    """y of PEFT's own forward in float32, of the same x and A and B; blocks are on the host."""
    exact = copy.deepcopy(layer)
    exact.base_layer._move(torch.device("cpu"))
    exact = exact.float()
    with torch.no_grad():
        return super(lora.LoraLinear, exact).forward(x.float())


def close(y: Any, right: Any, dtype: Any = HALF) -> None:
    """A and B are rounded to 16 bits, x and y are of 16 bits: some roundings of the largest y."""
    rounding = 2.0**-8 if dtype is torch.bfloat16 else 2.0**-11
    assert y.dtype is dtype
    assert (y.float() - right).abs().max() <= 4 * rounding * right.abs().max()


@pytest.fixture
def together(host: Any, monkeypatch: Any) -> Any:
    """`host`, whose thread blocks are in flight together."""

    def run(kernel: Any, grid: Any, *rest: Any, **options: Any) -> None:
        simulate(kernel, grid, *rest, **options | {"resident": prod(grid)})

    monkeypatch.setattr(on_the_host, "simulate", run)
    kept: Any = (lora._prepared, lora._factors, lora._words, lora._unused)
    for one in kept:
        one.clear()
    yield host
    for one in kept:
        one.clear()


def launches(host: Any) -> int:
    """Of the kernel since last asked, and of nothing else."""
    count = len(host.launched)
    host.launched.clear()
    return count


@pytest.mark.parametrize(("dtype", "bias", "cast", "options"), [
    (HALF, True, False, {}),
    (torch.bfloat16, False, True, {"r": 6, "use_rslora": True, "lora_dropout": 0.5}),
])  # fmt: skip
def test_a_layer_and_its_adapter_are_one_launch(
    together: Any, dtype: Any, bias: bool, cast: bool, options: Any
) -> None:
    layer, x = on_host(one_layer(dtype, bias, cast, **options)), tokens(1, 2, dtype=dtype)
    with torch.no_grad():
        y = layer(x)
    assert [name for name, *_ in together.launched] == ["decode_bulk_boxes"]
    assert y.shape == (1, 2, N)
    close(y, pefts(layer, x), dtype)


def test_one_launch_where_another_kernel_is_faster_alone(together: Any, monkeypatch: Any) -> None:
    """PEFT's way would be three launches more."""
    chosen, other = torch_operator.Weights.choice, kernel_of(14)

    def choice(self: Any, *asked: Any) -> Any:
        return replace(chosen(self, *asked), kernel=other)

    monkeypatch.setattr(torch_operator.Weights, "choice", choice)
    layer, x = on_host(one_layer()), tokens(2)
    with torch.no_grad():
        y = layer(x)
    assert [name for name, *_ in together.launched] == ["decode_bulk_boxes"]
    close(y, pefts(layer, x), HALF)


def test_copies_follow_their_parameters(together: Any, monkeypatch: Any) -> None:
    """Through every way in which they change, in place, and not while a graph is captured."""
    together.runs = False
    layer, x = on_host(one_layer()), tokens(1)
    down = layer.lora_A["default"].weight

    def called() -> Any:
        with torch.no_grad():
            layer(x)
        right = down.detach().half()
        return layer._term, torch.equal(layer._term.down, right)

    term, same = called()
    assert same
    address = term.down.data_ptr()
    with torch.no_grad():
        down.mul_(2)
    assert called() == (term, True), "a version"
    down.data = down.data + 1
    assert called() == (term, True), "other memory"
    layer.lora_A["default"].weight = down = nn.Parameter(down.detach() - 3)
    assert called() == (term, True), "another parameter"
    layer.scale_layer(2.0)
    assert called() == (term, True)
    assert set(term.factors.tolist()) == {2 * layer.lora_alpha["default"] / 8}
    assert term.down.data_ptr() == address
    assert launches(together) == 5
    monkeypatch.setattr(torch_operator, "is_capturing", lambda: True)
    monkeypatch.setattr(torch_operator, "_capture_of", lambda stream: 1)
    before = lora.words_of(x, 78)
    assert called() == (term, True)
    assert launches(together) == 1
    assert lora.words_of(x, 77) is not before, "a capture has words of its own"
    assert len({one.data_ptr() for one in lora._words.values()}) == 3
    with torch.no_grad():
        down.add_(1)
    assert called() == (term, False)
    assert [name for name, *_ in together.launched] == ["decode_bulk"], "the base layer's own"
    layer._term = None
    with torch.no_grad():
        layer(x)
    assert layer._term is None, "copies are not made there either"


def test_parameters_of_the_right_kind_are_read_where_they_are(together: Any) -> None:
    together.runs = False
    layer, x = on_host(one_layer(cast=True)), tokens(1)
    with torch.no_grad():
        layer(x)
    term = layer._term
    assert term.down.data_ptr() == layer.lora_A["default"].weight.data_ptr()
    assert term.up.data_ptr() == layer.lora_B["default"].weight.data_ptr()
    layer.lora_B["default"].weight.data = layer.lora_B["default"].weight.data.clone()
    with torch.no_grad():
        layer(x)
    assert layer._term.up.data_ptr() == layer.lora_B["default"].weight.data_ptr()
    assert launches(together) == 2


def test_several_active_adapters_are_one_term(together: Any) -> None:
    model = one_layer()
    model.add_adapter("other", fused(peft.LoraConfig(
        r=5, lora_alpha=20, target_modules=["up"], init_lora_weights=False,
    )))  # fmt: skip
    model.base_model.set_adapter(["default", "other"])
    layer, x = on_host(model.eval()), tokens(2)
    with torch.no_grad():
        y = layer(x)
    assert launches(together) == 1
    assert layer._term.down.shape == (16, K)
    assert layer._term.factors.tolist() == [1.0] * 8 + [4.0] * 5 + [1.0] * 3
    close(y, pefts(layer, x))


WAYS: Any = {
    "too many tokens": ({}, lambda layer: None, 17),
    "disabled": ({}, lambda layer: layer.enable_adapters(False), 2),
    "a bias": ({"lora_bias": True}, lambda layer: None, 2),
    "DoRA": ({"use_dora": True}, lambda layer: None, 2),
    "rank 65": ({"r": 65}, lambda layer: None, 2),
    "dropout in training": ({"lora_dropout": 0.5}, lambda layer: layer.train(), 2),
    "a hook": (
        {},
        lambda layer: layer.lora_A["default"].register_forward_hook(lambda *_: None),
        2,
    ),
    "no casts": ({}, lambda layer: setattr(layer, "cast_input_dtype_enabled", False), 2),
    "float32": ({}, lambda layer: None, 2),
    "a gradient": ({}, lambda layer: layer.requires_grad_(True), 2),
}


@pytest.mark.parametrize("why", WAYS)
def test_everything_else_takes_pefts_way(together: Any, why: str, monkeypatch: Any) -> None:
    options, change, count = WAYS[why]
    together.runs = False
    layer = on_host(one_layer(cast=why != "float32", **options))
    x = tokens(count, dtype=torch.float32 if why == "float32" else HALF)
    change(layer)
    taken = []
    monkeypatch.setattr(lora.Linear, "forward", lambda self, x: taken.append(why))
    with torch.set_grad_enabled(why == "a gradient"):
        layer(x)
    assert taken == [why]
    assert layer._term is None


def test_other_adapters_by_name_take_pefts_way(together: Any) -> None:
    model = one_layer(cast=True)
    layer, x = on_host(model), tokens(2)
    with torch.no_grad():
        y = model(x, adapter_names=["default", "__base__"])
        assert layer._term is None
        close(y[1:], layer.base_layer(x[1:]).float())


def test_what_is_kept_is_not_copied_saved_or_moved(together: Any) -> None:
    together.runs = False
    layer, x = on_host(one_layer()), tokens(1)
    with torch.no_grad():
        layer(x)
    assert layer._term is not None
    assert copy.deepcopy(layer)._term is None
    assert not any("term" in name for name in layer.state_dict())
    assert pickle.loads(pickle.dumps(layer))._term is None
    layer.to(torch.bfloat16)
    assert layer._term is None


def test_the_operator_has_the_shape_of_the_product() -> None:
    x = torch.empty(2, 3, K, dtype=HALF, device="meta")
    arguments = (x, None, [], [], "tiles", "exact", "q4_0", N, K, False, x, x, [1.0])
    y = torch.ops.quantized_gemm.low_rank(*arguments)
    assert (y.shape, y.dtype, y.device.type) == ((2, 3, N), HALF, "meta")


@pytest.mark.parametrize("cast", [True, False])
def test_torch_compile_sees_one_product(together: Any, cast: bool) -> None:
    """And casts, where A and B are not of x's dtype; with many tokens PEFT's way."""
    layer, targets = on_host(one_layer(cast=cast, r=5 if cast else 8)), []

    def backend(graph: Any, inputs: Any) -> Any:
        targets.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return lambda *_: (torch.zeros(2, N, dtype=HALF),)

    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(layer, backend=backend, fullgraph=True)
        compiled(tokens(2))
        compiled(tokens(17))
    few, many = targets
    assert torch.ops.quantized_gemm.low_rank.default in few
    assert torch.ops.quantized_gemm.product.default not in few
    assert torch.ops.quantized_gemm.product.default in many


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_small_llama_generates_as_pefts_own_layers_do(tmp_path: Any) -> None:
    """On a CPU, in float32: the same logits and tokens, also of an adapter that was saved."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128}
    config = transformers.LlamaConfig(
        **sizes, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    options = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}

    def made(change: Any, folder: Any = None) -> Any:
        torch.manual_seed(5)
        model = transformers.LlamaForCausalLM(config).eval()
        quantize_model(model, "q8_0")
        if folder is not None:
            own = change(peft.LoraConfig.from_pretrained(folder))
            return peft.PeftModel.from_pretrained(model, folder, config=own).eval()
        return peft.get_peft_model(model, change(peft.LoraConfig(**options))).eval()

    plain, quick = made(lambda config: config), made(fused)
    quick.save_pretrained(tmp_path)
    again, ids = made(fused, tmp_path), torch.tensor([[3, 14, 15, 92]])
    kinds = [type(one) for one in quick.modules() if hasattr(one, "lora_A")]
    assert set(kinds) == {lora.LoraLinear}
    assert len(kinds) == 14
    with torch.no_grad():
        wanted = [plain(ids).logits, plain.base_model.model(ids).logits]
        for model in (quick, again):
            assert torch.equal(model(ids).logits, wanted[0])
    with plain.disable_adapter(), torch.no_grad():
        assert not torch.equal(plain(ids).logits, wanted[0])
    said = [
        one.generate(input_ids=ids, max_new_tokens=8, do_sample=False)
        for one in (plain, quick, again)
    ]
    assert all(torch.equal(one, other) for one, other in pairwise(said))


# --- on a GPU -------------------------------------------------------------------------------------


def real(r: int = 16, name: str = "q4_0", n: int = 4096, k: int = 4096, **options: Any) -> Any:
    """An adapted layer on the GPU, float16, in eval, without gradients."""
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(k, n)).half()
    quantize_model(net, name)
    settings = {"r": r, "target_modules": ["0"], "init_lora_weights": False, **options}
    model = peft.get_peft_model(net.cuda(), fused(peft.LoraConfig(**settings)))
    return model.base_model.model[0].eval().requires_grad_(False)


def of_peft(layer: Any, x: Any) -> Any:
    return super(lora.LoraLinear, layer).forward(x)


def hopper(cuda: Any) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel needs compute capability 9.0")


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 3, 8, 16])
@pytest.mark.parametrize(("r", "name"), [(8, "q8_0"), (24, "q4_0"), (64, "q5_1")])
def test_values_on_a_gpu(cuda: Any, m: int, r: int, name: str) -> None:
    hopper(cuda)
    layer = real(r, name, 1000, 1536)
    x = torch.randn(m, 1536, device=cuda).half()
    y = layer(x)
    assert layer._term is not None
    assert all(torch.equal(layer(x), y) for _ in range(20)), "the same bits"
    right = (x.float() @ layer.base_layer.dequantize().T + layer.base_layer.bias).float()
    a, b = layer.lora_A["default"].weight.float(), layer.lora_B["default"].weight.float()
    close(y, right + layer.scaling["default"] * (x.float() @ a.T) @ b.T)


@pytest.mark.gpu
def test_two_streams_at_once_on_a_gpu(cuda: Any) -> None:
    hopper(cuda)
    layer = real()
    given = [torch.randn(m, 4096, device=cuda).half() for m in (1, 8)]
    wanted = [layer(x) for x in given]
    torch.cuda.synchronize()
    streams, got = [torch.cuda.Stream(priority=-i) for i in range(2)], []
    for _ in range(200):
        for stream in streams:
            with torch.cuda.stream(stream):
                got += [(layer(x), y) for x, y in zip(given, wanted, strict=True)]
    torch.cuda.synchronize()
    assert all(torch.equal(y, right) for y, right in got)


@pytest.mark.gpu
@pytest.mark.parametrize("warm", [True, False])
def test_a_graph_on_a_gpu(cuda: Any, warm: bool) -> None:
    """It follows copies that are made anew in place; one that was captured cold is PEFT's."""
    hopper(cuda)
    layer, x = real(), torch.randn(2, 4096, device=cuda).half()
    layer.base_layer(x)
    of_peft(layer, x)
    if warm:
        layer(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    assert (layer._term is not None) == warm
    for _ in range(3):
        with torch.no_grad():
            layer.lora_B["default"].weight.mul_(-2)
        right = layer(x)
        graph.replay()
        torch.cuda.synchronize()
        close(y, right.float())


@pytest.mark.gpu
def test_compiled_on_a_gpu(cuda: Any) -> None:
    hopper(cuda)
    layer = real(24)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for m in (1, 8, 40):
            x = torch.randn(m, 4096, device=cuda).half()
            close(compiled(x), layer(x).float())


@pytest.mark.gpu
def test_a_moved_layer_on_a_gpu(cuda: Any) -> None:
    hopper(cuda)
    layer, x = real(), torch.randn(2, 4096, device=cuda).half()
    y = layer(x)
    assert torch.equal(layer.cpu().cuda()(x), y)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), y)
