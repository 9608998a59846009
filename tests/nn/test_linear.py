"""The layer for torch: right values everywhere, one node to torch.compile, whole models, refusals.

The code that runs on a GPU is also run here, its kernels in the simulator, on tensors of the CPU.
"""

from __future__ import annotations

import copy
import itertools
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import func, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import steps
from qformats import FILE_FORMATS, FORMATS, WEIGHT_FORMATS, dequantize, quantize
from qformats.storage import stored_weights
from reference.drawn import random_blocks
from steps.compile import compiler, kernel_cache, parallel_compile
from steps.compile.compiler import signature_of
from steps.compile.kernel_cache import CompiledKernel
from steps.driver import launcher
from steps.driver.machines import Simulator
from steps.nn import linear
from steps.nn import operator as torch_operator
from steps.nn.linear import QuantLinear, quantize_model
from steps.product import tuning_table
from steps.product.prepared import Kept
from steps.registry import kernel_of
from tests.nn.on_the_host import forget
from tests.product.test_gemm_on_device import MOST_US, python_us

N, K = 20, 96
NAMES = torch_operator.NAMES
DTYPES = tuple(NAMES)
ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def blocks_of(name: str = "q4_0", n: int = N, k: int = K, seed: int = 1) -> np.ndarray:
    w = np.random.default_rng(seed).standard_normal((n, k), dtype=np.float32)
    return quantize(w, name)


def tensor(*shape: int, dtype: Any = torch.float32, seed: int = 0) -> Any:
    made = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return torch.from_numpy(made).to(dtype)


def within(
    y: Any, x: Any, blocks: np.ndarray, bias: Any = None, *, x_rounding: float = 0.0
) -> bool:
    """Whether y is the float64 product of the dequantized weights but for rounding.

    K products are added up in float32, the bias once, and the sum is rounded once to y's dtype;
    x_rounding is what a step may take from an element of x, as a share of the size of x's row.
    """
    w = torch.from_numpy(dequantize(blocks)).double()
    exact, rows = x.cpu().double() @ w.T, x.cpu().double().abs()
    size = rows @ w.abs().T
    allowed = (K + 2) * 2.0**-24 * size
    if x_rounding:
        allowed = allowed + x_rounding * rows.amax(-1, keepdim=True) * w.abs().sum(1)
    if bias is not None:
        exact = exact + bias.detach().cpu().double()
        allowed = allowed + 2.0**-23 * exact.abs()
    allowed = allowed + ROUNDING[y.dtype] * (exact.abs() + allowed) + 2.0**-25
    return bool(((y.detach().cpu().double() - exact).abs() <= allowed).all())


# --- values, on the CPU ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_values_in_every_format_and_dtype(name: str, dtype: Any) -> None:
    blocks, bias = blocks_of(name), nn.Parameter(tensor(N, seed=2))
    for shape in ((), (1,), (7,), (2, 3), (2, 1, 3)):
        x = tensor(*shape, K, dtype=dtype)
        for b in (None, bias):
            y = QuantLinear.from_blocks(blocks, b)(x)
            assert (y.shape, y.dtype) == ((*shape, N), dtype)
            assert within(y, x, blocks, b)
    assert not within(y + 0.1 * y.abs().max(), x, blocks, bias), "the bound is not met by anything"


def test_rows_are_dequantized_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, x = blocks_of(n=1030), tensor(3, K)
    assert within(QuantLinear.from_blocks(blocks)(x), x, blocks)
    fmt, seen = type(FORMATS["q4_0"]), []
    original = fmt.dequantize
    monkeypatch.setattr(fmt, "dequantize", lambda s, b: seen.append(len(b)) or original(s, b))
    QuantLinear.from_blocks(blocks)(x)
    assert seen == [512, 512, 6]


def test_x_need_not_be_contiguous_and_comes_back_unchanged() -> None:
    blocks = blocks_of()
    layer = QuantLinear.from_blocks(blocks)
    whole = tensor(K, 6)
    for x in (whole.T, tensor(4, 2 * K)[:, ::2], tensor(3, 2, K).transpose(0, 1), whole.T[:0]):
        before = x.clone()
        y = layer(x)
        assert y.is_contiguous()
        assert y.shape == (*x.shape[:-1], N)
        assert within(y, x, blocks)
        assert torch.equal(x, before)


def test_without_gradients() -> None:
    layer = QuantLinear.from_blocks(blocks_of(), nn.Parameter(tensor(N)))
    x = tensor(2, K, dtype=torch.float32).requires_grad_()
    wanted = layer(x)
    assert wanted.requires_grad
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = layer(x)
            assert not y.requires_grad
            assert torch.equal(y, wanted)


def test_the_gradient_of_x_and_of_the_bias() -> None:
    blocks = blocks_of(n=5, k=32)
    layer = QuantLinear.from_blocks(blocks, nn.Parameter(tensor(5)))
    x = tensor(2, 3, 32).requires_grad_()
    upstream = tensor(2, 3, 5, seed=3)
    layer(x).backward(upstream)
    torch.testing.assert_close(x.grad, upstream @ torch.from_numpy(dequantize(blocks)))
    torch.testing.assert_close(layer.bias.grad, upstream.sum((0, 1)))
    layer.bias.grad = None
    half = x.detach().to(torch.float16).requires_grad_()
    layer(half).sum().backward()
    assert half.grad.dtype == torch.float16
    assert layer.bias.grad.dtype == torch.float32


@pytest.mark.filterwarnings("ignore:Input #. requires gradient and is not a double")
def test_gradcheck() -> None:
    """The layer is linear: differences of any step are exact, but for float32's rounding."""
    layer = QuantLinear.from_blocks(blocks_of("q5_1", 5, 64), nn.Parameter(tensor(5)))
    x, bias = tensor(3, 64).requires_grad_(), layer.bias

    def product(x: Any, bias: Any) -> Any:
        layer._parameters["bias"] = bias
        return layer(x)

    assert torch.autograd.gradcheck(product, (x, bias), eps=0.5, atol=1e-3, rtol=1e-3)


# --- transforms and modes -------------------------------------------------------------------------


def beside_torchs(n: int = 5, k: int = 64) -> tuple[Any, Any]:
    """A layer, and torch's Linear of its dequantized weights and its bias."""
    layer = QuantLinear.from_blocks(blocks_of(n=n, k=k), nn.Parameter(tensor(n, seed=2)))
    plain = nn.Linear(k, n)
    plain.weight, plain.bias = nn.Parameter(layer.dequantize()), layer.bias
    return layer, plain


def cubes(layer: Any) -> Any:
    return lambda x: layer(x).pow(3).sum()


def with_bias(layer: Any, x: Any) -> Any:
    return lambda bias: func.functional_call(layer, {"bias": bias}, (x,))


def of_dual(layer: Any) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(layer(forward_ad.make_dual(X, T)))


def twice_backward(layer: Any) -> Any:
    x = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(cubes(layer)(x), x, create_graph=True)
    return torch.autograd.grad(gradient.square().sum(), x)


def outside_vmap(layer: Any) -> Any:
    x = torch.stack([X, T]).requires_grad_()
    y = torch.vmap(layer)(x)
    return y, *torch.autograd.grad(y.square().sum(), x)


X, T, BIASES = tensor(3, 64), tensor(3, 64, seed=1), tensor(3, 5, seed=4)
TRANSFORMS = {
    "jvp": lambda f: func.jvp(f, (X,), (T,)),
    "forward mode": of_dual,
    "jvp of the bias": lambda f: func.jvp(with_bias(f, X), (BIASES[0],), (BIASES[1],)),
    "jacfwd": lambda f: func.jacfwd(f)(X),
    "jacrev": lambda f: func.jacrev(f)(X),
    "vjp": lambda f: func.vjp(f, X)[1](BIASES),
    "vmap": lambda f: torch.vmap(f, in_dims=1, out_dims=1)(torch.stack([X, T], 1)),
    "vmap of vmap": lambda f: torch.vmap(torch.vmap(f))(torch.stack([X, T])),
    "vmap of the bias": lambda f: torch.vmap(with_bias(f, X))(BIASES),
    "vmap of x and the bias": lambda f: torch.vmap(lambda b, x: with_bias(f, x)(b))(BIASES, X),
    "gradients of samples": lambda f: torch.vmap(func.grad(cubes(f)))(X),
    "gradient of vmap": outside_vmap,
    "hessian": lambda f: func.hessian(cubes(f))(X[0]),
    "jacfwd of jacfwd": lambda f: func.jacfwd(func.jacfwd(cubes(f)))(X[0]),
    "jacrev of jacrev": lambda f: func.jacrev(func.jacrev(cubes(f)))(X[0]),
    "double backward": twice_backward,
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # in torch's forward mode
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_those_of_torchs_linear(name: str) -> None:
    layer, plain = beside_torchs()
    found, wanted = (tree_leaves(TRANSFORMS[name](one)) for one in (layer, plain))
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * float(other.detach().std()))
        assert other.any(), "zeros would pass"


def test_what_transforms_cannot_batch_is_said() -> None:
    layer, _ = beside_torchs()
    with pytest.raises(ValueError, match="vmap over the blocks of a QuantLinear: only x and bias"):
        torch.vmap(lambda blocks: func.functional_call(layer, {"blocks": blocks}, (X,)))(
            torch.stack([layer.blocks, layer.blocks])
        )


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_compiled_transform_is_right_or_refused() -> None:
    layer, plain = beside_torchs()
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: func.jvp(layer, (x,), (T,)), backend="aot_eager")
    for one, other in zip(compiled(X), func.jvp(plain, (X,), (T,)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_autocast_gives_its_dtype(dtype: Any) -> None:
    layer, plain = beside_torchs()
    x = X.clone().requires_grad_()
    for grad in (True, False):
        with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype):
            y = layer(x)
            assert (y.dtype, plain(x).dtype) == (dtype, dtype)
            assert layer(x.to(torch.float16)).dtype == dtype
        assert within(y, x.detach().to(dtype), blocks_of(n=5, k=64), layer.bias)
    with torch.autocast("cpu", dtype):
        layer(x).sum().backward()
    assert x.grad.dtype == torch.float32
    with torch.autocast("cpu", dtype, enabled=False):
        assert layer(x).dtype == torch.float32
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.no_grad(), torch.autocast("cpu", dtype):
        assert torch.equal(compiled(X), y)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_a_trace_is_the_layer() -> None:
    """torch checks it without gradients, so both must take one operator."""
    for layer in (beside_torchs()[0], QuantLinear.from_blocks(blocks_of(n=5, k=64))):
        traced = torch.jit.trace(layer, X)
        assert torch.equal(traced(T), layer(T))


def test_gradients_have_the_same_bits_each_time_and_in_checkpoints() -> None:
    from torch.utils.checkpoint import checkpoint

    layer, found = QuantLinear.from_blocks(blocks_of(n=1030)), []
    calls = [layer, layer, *(lambda x, r=r: checkpoint(layer, x, use_reentrant=r) for r in (0, 1))]
    for call in calls:
        x = tensor(3, K).requires_grad_()
        call(x).square().sum().backward()
        found.append(x.grad)
    assert all(torch.equal(one, found[0]) for one in found)


# --- made of what, and kept how -------------------------------------------------------------------


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_from_a_linear_a_matrix_or_blocks(name: str) -> None:
    plain = nn.Linear(K, N)
    w = plain.weight.detach()
    layer = QuantLinear.from_float(plain, name)
    assert layer.bias is plain.bias
    wanted = dequantize(quantize(w.numpy(), name))
    for one in (
        layer,
        QuantLinear.from_float(w, name, bias=plain.bias),
        QuantLinear.from_float(w.numpy(), name, bias=plain.bias.detach().numpy()),
        QuantLinear.from_blocks(quantize(w.numpy(), name), plain.bias),
    ):
        assert one.dequantize().dtype == torch.float32
        np.testing.assert_array_equal(one.dequantize().numpy(), wanted)
        assert torch.equal(one.weight, one.dequantize())
        assert torch.equal(one.bias, plain.bias)
        assert one.blocks.nbytes == N * K // 32 * FORMATS[name].block_bytes == one.device_bytes
    half = QuantLinear.from_float(nn.Linear(K, N, dtype=torch.bfloat16), name)
    assert half.bias.dtype == torch.bfloat16


def test_the_weight_is_a_tensor_that_is_dequantized_where_it_is_used(monkeypatch: Any) -> None:
    layer = QuantLinear.from_float(nn.Linear(K, N).bfloat16(), "q4_0")
    wanted, x, made = layer.dequantize().bfloat16(), tensor(2, K, dtype=torch.bfloat16), []
    original = torch_operator.dequantize
    monkeypatch.setattr(torch_operator, "dequantize", lambda *of: made.append(1) or original(*of))
    w = layer.weight
    assert isinstance(layer, nn.Linear)
    assert (w.dtype, w.shape, w.device) == (torch.bfloat16, (N, K), torch.device("cpu"))
    assert not w.requires_grad
    assert repr(w) == f"Weight([{N}, {K}], torch.bfloat16, cpu, read-only)"
    assert torch.equal(nn.functional.linear(x, w, layer.bias), layer(x)), "by its own product"
    assert torch.equal(nn.functional.linear(x, weight=w), layer._product(x, None))
    assert made == []
    assert torch.equal(w, wanted)
    assert made == [1]
    assert torch.equal(x @ w.T, x @ wanted.T)
    assert torch.equal(w[3:5].t().float(), wanted[3:5].t().float())
    assert torch.equal(w.split(5)[1], wanted.split(5)[1])
    assert w.tolist() == wanted.tolist()
    for copied in (copy.deepcopy(w), pickle.loads(pickle.dumps(w)), w.clone()):
        assert type(copied) is torch.Tensor
        assert torch.equal(copied, wanted)
    assert layer.float().weight.dtype == torch.float32
    assert layer.to(torch.float16).weight.dtype == torch.float16
    assert QuantLinear(64, 5, bias=False, dtype=torch.float16).weight.dtype == torch.float16
    assert QuantLinear.from_blocks(blocks_of()).bfloat16().weight.dtype == torch.bfloat16
    torch._dynamo.reset()
    bare = QuantLinear.from_blocks(blocks_of()).half()
    compiled = torch.compile(
        lambda x: bare(x.to(bare.weight.dtype)), backend="aot_eager", fullgraph=True
    )
    assert torch.equal(compiled(tensor(2, K)), bare(tensor(2, K).half()))


WRITES = {
    "in place": lambda layer: layer.weight.zero_(),
    "its data": lambda layer: layer.weight.data.zero_(),
    "detached": lambda layer: layer.weight.detach().zero_(),
    "a copy": lambda layer: layer.weight.copy_(torch.zeros(N, K)),
    "an initialization": lambda layer: nn.init.zeros_(layer.weight),
    "another": lambda layer: layer.reset_parameters(),
    "an item": lambda layer: layer.weight.__setitem__(0, 1),
    "a row": lambda layer: layer.weight[0].zero_(),
    "the transpose": lambda layer: layer.weight.T.add_(1),
    "a part": lambda layer: layer.weight.unbind()[0].zero_(),
    "many": lambda layer: torch._foreach_zero_([layer.weight]),
    "out": lambda layer: torch.add(torch.ones(N, K), 1, out=layer.weight),
    "a Parameter": lambda layer: setattr(layer, "weight", nn.Parameter(torch.zeros(N, K))),
    "data": lambda layer: setattr(layer.weight, "data", torch.zeros(N, K)),
    "a gradient": lambda layer: layer.weight.requires_grad_(),
}


@pytest.mark.parametrize("how", WRITES)
def test_writing_to_the_weight_raises(how: str) -> None:
    layer = QuantLinear.from_blocks(blocks_of())
    with pytest.raises(RuntimeError, match="the weight of a QuantLinear is read-only") as refused:
        WRITES[how](layer)
    assert "\n" not in str(refused.value)
    layer.weight.requires_grad_(False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_encoder_layer_of_torch_runs_by_the_layers(dtype: Any, monkeypatch: Any) -> None:
    """In eval() it reads `linear1.weight` itself, where nothing tells it not to."""
    encoder = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval().to(dtype)
    quantize_model(encoder, "q8_0")
    called, forward = [], QuantLinear.forward
    monkeypatch.setattr(QuantLinear, "forward", lambda s, x: called.append(1) or forward(s, x))
    with torch.no_grad():
        y = encoder(tensor(2, 5, 64, dtype=dtype))
    assert (y.dtype, len(called)) == (dtype, 2)


def test_the_layer_has_blocks_of_its_own() -> None:
    blocks = blocks_of()
    layer = QuantLinear.from_blocks(blocks)
    before = layer.dequantize()
    blocks["d"] = 0
    assert torch.equal(layer.dequantize(), before)


def gguf(kind: str, array: np.ndarray, name: str = "blk.0.ffn_up.weight") -> Any:
    from qformats.gguf_file import Tensor

    shape = (*array.shape[:-1], array.shape[-1] * FORMATS[kind].elements) if kind != "f32" else ()
    array.setflags(write=False)
    return Tensor(name, kind, shape or array.shape, array.nbytes, 0, array.view(np.uint8))


def test_from_a_gguf_tensor() -> None:
    blocks = blocks_of("q5_0")
    bias = gguf("f32", np.arange(N, dtype=np.float32), "blk.0.ffn_up.bias")
    layer = QuantLinear.from_gguf(gguf("q5_0", blocks), bias)
    assert layer.format == "q5_0"
    np.testing.assert_array_equal(layer.dequantize().numpy(), dequantize(blocks))
    np.testing.assert_array_equal(layer.bias.detach().numpy(), np.arange(N))
    assert QuantLinear.from_gguf(gguf("q5_0", blocks)).bias is None
    k_quant = QuantLinear.from_gguf(gguf("q4_k", np.zeros((3, 2), FORMATS["q4_k"].dtype)))
    assert (k_quant.format, k_quant.in_features, k_quant.out_features) == ("q4_k", 512, 3)
    with pytest.raises(ValueError, match=r"blk.0.ffn_up.weight is f32 and the kernels take q4_0"):
        QuantLinear.from_gguf(gguf("f32", np.zeros((3, 2), np.float32)))
    again = QuantLinear.from_float(gguf("q5_0", blocks).values(), "q8_0")
    assert again.format == "q8_0"


def test_it_is_shown_as_a_linear_with_its_format() -> None:
    layer = QuantLinear.from_blocks(blocks_of("q4_1"), tensor(N))
    assert repr(layer) == f"QuantLinear(in_features={K}, out_features={N}, bias=True, format=q4_1)"
    fast = QuantLinear(64, 3, bias=False, accuracy="fast")
    assert repr(fast) == (
        "QuantLinear(in_features=64, out_features=3, bias=False, format=q4_0, accuracy=fast)"
    )
    assert "torch multiplies dequantized weights" in layer.explain(1)


def test_state_dicts_go_round() -> None:
    layer = QuantLinear.from_blocks(blocks_of(), tensor(N))
    state = layer.state_dict()
    assert sorted(state) == ["_extra_state", "bias", "blocks"]
    fresh = QuantLinear(K, N)
    assert not fresh.dequantize().any()
    fresh.load_state_dict(state)
    x = tensor(3, K)
    assert torch.equal(fresh(x), layer(x))
    with pytest.raises(RuntimeError, match="size mismatch for blocks"):
        QuantLinear(K, N + 1).load_state_dict(state)
    with torch.device("meta"):
        empty = QuantLinear(K, N)
    assert empty.blocks.is_meta
    assert empty.bias.is_meta
    empty.to_empty(device="cpu").load_state_dict(state)
    assert torch.equal(empty(x), layer(x))


def test_a_state_dict_with_scales_that_are_not_finite_is_refused() -> None:
    good, bad = QuantLinear.from_blocks(blocks_of()), blocks_of()
    bad["d"][5, 2] = np.nan
    model = nn.Sequential(good)
    state = {**model.state_dict(), "0.blocks": torch.from_numpy(bad.view(np.uint8).copy())}
    before = good.blocks.clone()
    said = r"0\.blocks: w has d = nan in block 2 of row 5: it must be finite"
    for assign in (False, True):
        with pytest.raises(RuntimeError, match=said):
            model.load_state_dict(state, assign=assign)
        assert torch.equal(good.blocks, before)
    bad["d"][5, 2] = 1
    model.load_state_dict({**state, "0.blocks": torch.from_numpy(bad.view(np.uint8).copy())})
    assert good.dequantize()[5].abs().max() > 1


@pytest.mark.parametrize("value", [float("nan"), 0.5, 7.0])
def test_blocks_that_were_cast_are_refused(value: float) -> None:
    """Also where they hold whole numbers: a cast by another hand may have rounded them."""
    model = nn.Sequential(QuantLinear.from_blocks(blocks_of()))
    before = model[0].blocks.clone()
    for dtype in (torch.float32, torch.float16, torch.int32):
        blocks = torch.full(before.shape, value).to(dtype)
        said = str(dtype).removeprefix("torch.")
        for assign in (False, True):
            with pytest.raises(RuntimeError, match=rf"0\.blocks are {said}, and blocks are bytes"):
                model.load_state_dict({**model.state_dict(), "0.blocks": blocks}, assign=assign)
            assert torch.equal(model[0].blocks, before)


def test_what_is_no_tensor_is_refused_by_name() -> None:
    layer = QuantLinear(64, 20)
    for x, name in ((np.zeros((1, 64)), "numpy.ndarray"), ([[0.0] * 64], "builtins.list")):
        with pytest.raises(TypeError, match=f"x is a {name}, and a layer takes a torch.Tensor"):
            layer(x)


def one_size() -> list[tuple[str, str]]:
    """Pairs of formats whose blocks of a row have one size, so that only their name differs."""
    sizes = {name: FORMATS[name].block_bytes / FORMATS[name].elements for name in linear.TAKEN}
    return [pair for pair in itertools.permutations(sizes, 2) if sizes[pair[0]] == sizes[pair[1]]]


@pytest.mark.parametrize(("name", "other"), one_size())
def test_blocks_of_another_format_are_refused_by_both_names(name: str, other: str) -> None:
    model = nn.Sequential(QuantLinear(512, 4, format=other))
    state = nn.Sequential(QuantLinear(512, 4, format=name)).state_dict()
    said = f"0.blocks: the state holds {name}, version 1, and the layer takes {other}, version 1: "
    for strict, assign in itertools.product((False, True), repeat=2):
        with pytest.raises(RuntimeError, match=said):
            model.load_state_dict(state, strict=strict, assign=assign)


def test_a_state_dict_says_format_and_version_through_files(tmp_path: Any) -> None:
    from safetensors.torch import load_file, save_file

    layer = QuantLinear.from_blocks(blocks_of("q5_1"), tensor(N))
    assert bytes(layer.get_extra_state().tolist()) == b"q5_1, version 1"
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    safe, pickled = load_file(tmp_path / "layer.safetensors"), torch.load(tmp_path / "layer.pt")
    for state in (safe, pickled):
        for assign in (False, True):
            again = QuantLinear(K, N, format="q5_1")
            again.load_state_dict(state, assign=assign)
            assert torch.equal(again.blocks, layer.blocks)
            assert torch.equal(again.bias, layer.bias)
    later = {**safe, "_extra_state": torch.tensor(list(b"q5_1, version 2"), dtype=torch.uint8)}
    with pytest.raises(RuntimeError, match="holds q5_1, version 2, and the layer takes q5_1, vers"):
        again.load_state_dict(later)
    del safe["_extra_state"]
    with pytest.raises(RuntimeError, match="blocks are of a file that does not say their form"):
        again.load_state_dict(safe, strict=False)
    again.load_state_dict({**safe, "_extra_state": again.get_extra_state()})
    assert torch.equal(again.blocks, layer.blocks)
    with pytest.raises(ValueError, match="the state holds 7, and the layer takes q5_1, version 1"):
        again.set_extra_state(7)


def test_pickles_and_copies_go_round(tmp_path: Any) -> None:
    layer = QuantLinear.from_blocks(blocks_of("q5_1"), tensor(N), accuracy="fast")
    x = tensor(3, K)
    torch.save(layer, tmp_path / "layer.pt")
    for again in (
        pickle.loads(pickle.dumps(layer)),
        copy.deepcopy(layer),
        torch.load(tmp_path / "layer.pt", weights_only=False),
    ):
        assert again.blocks.data_ptr() != layer.blocks.data_ptr()
        assert repr(again) == repr(layer)
        assert torch.equal(again(x), layer(x))


def test_casts_change_the_bias_and_no_block() -> None:
    layer = QuantLinear.from_blocks(blocks_of(), tensor(N))
    before = layer.blocks.clone()
    for cast in (layer.half, layer.bfloat16, layer.double, lambda: layer.type(torch.float16)):
        assert cast() is layer
        assert layer.blocks.dtype == torch.uint8
        assert torch.equal(layer.blocks, before)
    assert layer.bias.dtype == torch.float16
    assert layer.share_memory().blocks.is_shared()


# --- one node to torch ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # in opcheck of torch 2.14
@pytest.mark.parametrize("gradient", [False, True])
def test_opcheck(gradient: bool) -> None:
    layer = QuantLinear.from_blocks(blocks_of(n=5, k=64), nn.Parameter(tensor(5)))
    rest = (layer.blocks, [], [], "", "exact", "q4_0", 5, 64)
    for x in (tensor(2, 3, 64), tensor(0, 64), tensor(64, 4).T, tensor(2, 64, dtype=torch.float16)):
        for bias in (None, layer.bias):
            torch.library.opcheck(
                torch.ops.quantized_gemm.linear.default,
                (x.detach().requires_grad_(gradient), bias, *rest),
            )
            if not gradient:
                torch.library.opcheck(
                    torch.ops.quantized_gemm.product.default,
                    (x, None if bias is None else bias.detach(), *rest),
                )
    torch.library.opcheck(
        torch.ops.quantized_gemm.linear_input_gradient.default,
        (tensor(2, 3, 5).requires_grad_(gradient), layer.blocks, [], "", "q4_0", 5, 64),
    )


def test_torch_compile_sees_one_node() -> None:
    model = nn.Sequential(QuantLinear.from_blocks(blocks_of(), tensor(N)), nn.ReLU())
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for m in (1, 2, 9):
        x = tensor(m, K)
        assert torch.equal(compiled(x), model(x))
    wanted, x = tensor(2, K).requires_grad_(), tensor(2, K).requires_grad_()
    model(wanted).sum().backward()
    compiled(x).sum().backward()
    torch.testing.assert_close(x.grad, wanted.grad)


def test_shapes_on_a_gpu_are_known_without_one() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(2, 3, 64, device="cuda", dtype=torch.float16)
        records = torch.empty(9, dtype=torch.uint8, device="cuda")
        y = torch_operator.linear(x, None, None, [records], [], "tiles", "exact", "q4_0", 5, 64)
        assert (y.shape, y.dtype, y.device.type) == ((2, 3, 5), torch.float16, "cuda")
        of = None, [records], "tiles", "q4_0", 5, 64
        back = torch_operator.linear_input_gradient(y, *of)
        assert (back.shape, back.dtype, back.device.type) == (x.shape, x.dtype, "cuda")
        w = torch_operator.dequantize(*of, torch.bfloat16)
        assert (w.shape, w.dtype, w.device.type) == ((5, 64), torch.bfloat16, "cuda")


# --- refused --------------------------------------------------------------------------------------

BAD = blocks_of(n=2, k=64)
BAD["d"][1, 0] = np.nan


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: QuantLinear(33, 5), "^in_features=33, .* in q4_0 needs a multiple of 32"),
        (lambda: QuantLinear(32, 0), "out_features=0: .* out_features from 1 up$"),
        (
            lambda: QuantLinear(32.0, "a"),
            "in_features=32.0, out_features='a': a layer in q4_0 needs",
        ),
        (lambda: QuantLinear(32, 5, format="q9_k"), "format is 'q9_k': it must be one of q4_0, "),
        (lambda: QuantLinear(32, 5, format="q4_k"), "32, .* in q4_k needs a multiple of 256"),
        (lambda: QuantLinear(32, 5, accuracy="good"), "'good': it must be one of exact, fast"),
        (lambda: QuantLinear.from_float(nn.Linear(33, 5), "q4_0"), "in_features=33, .*"),
        (lambda: QuantLinear.from_float(nn.Linear(32, 5), "q8_1"), "format is 'q8_1'"),
        (lambda: QuantLinear.from_float(nn.Conv2d(3, 4, 3), "q4_0"), "source is a Conv2d: give a"),
        (lambda: QuantLinear.from_float(tensor(32), "q4_0"), r"shape \[32\] cannot be quantized"),
        (
            lambda: QuantLinear.from_float(nn.Linear(32, 5, device="meta"), "q4_0"),
            "meta device, wi",
        ),
        (lambda: QuantLinear.from_blocks(BAD), "w has d = nan in block 0 of row 1"),
        (lambda: QuantLinear.from_blocks(tensor(2, 32).numpy()), "must hold blocks"),
        (lambda: QuantLinear.from_blocks(blocks_of(), tensor(3)), r"\[20\], got \[3\]"),
        (lambda: QuantLinear(32, 5, device="meta")(tensor(1, 32)), "x is on cpu and the layer is"),
    ],
)
def test_what_cannot_be_a_layer(make: Any, said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said) as refused:
        make()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("x", "error", "said"),
    [
        (tensor(2, K + 32), ValueError, r"x must have shape \[..., 96\], got \[2, 128\]"),
        (tensor(K, 2), ValueError, r"got \[96, 2\]"),
        (torch.tensor(1.0), ValueError, r"got \[\]"),
        (tensor(2, K, dtype=torch.float64), TypeError, "float32, float16 or bfloat16, got torch.f"),
        (torch.ones(2, K, dtype=torch.int8), TypeError, "got torch.int8"),
    ],
)
def test_activations_that_do_not_fit(x: Any, error: type[Exception], said: str) -> None:
    layer = QuantLinear.from_blocks(blocks_of())
    with pytest.raises(error, match=said):
        layer(x)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=said):
        torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=False)(x)


def test_without_blocks_there_is_neither_product_nor_gradient_on_a_cpu() -> None:
    rest = (None, None, [], [], "", "exact", "q4_0", 5, 64)
    with pytest.raises(ValueError, match="on the CPU needs the blocks"):
        torch_operator.linear(tensor(2, 64), *rest)


def test_torch_is_told_to_be_missing_in_one_sentence() -> None:
    code = "import sys; sys.modules['torch'] = None; import steps.nn.linear"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    last = ran.stderr.strip().splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: steps.nn.linear needs torch"), ran.stderr
    fine = "import sys; from steps.product import gemm, plan; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", fine], check=False).returncode == 0


# --- what runs on a GPU, with its kernels in the simulator ----------------------------------------


def uploaded(blocks: np.ndarray, bias: Any = None, accuracy: str = "exact") -> Any:
    layer = QuantLinear.from_blocks(blocks, bias, accuracy=accuracy)
    layer._move(torch.device("cuda"))
    return layer


def multiplied(layer: Any, x: Any) -> Any:
    """What the operator's kernel for CUDA makes of it."""
    return torch_operator._on_gpu(
        x, layer.bias, None, layer._arrays("weights"), layer._arrays("fast"), layer.packings,
        layer.accuracy, layer.format, layer.out_features, layer.in_features, layer.invariant,
    )  # fmt: skip


def choice_of(layer: Any, m: int, a: str = "float32", c: str = "float32", **more: str) -> Any:
    return layer._on_gpu().choice(m, a, c, **more)


@pytest.mark.parametrize(
    ("m", "name", "accuracy"),
    [*((1, name, "exact") for name in WEIGHT_FORMATS), (40, "q5_1", "exact"), (70, "q4_0", "fast")],
)
def test_the_gpus_path_is_the_product_of_gemm(host, m: int, name: str, accuracy: str) -> None:
    blocks = blocks_of(name)
    layer, x = uploaded(blocks, accuracy=accuracy), tensor(m, K)
    choice = choice_of(layer, m)
    assert choice.kernel.accuracy == accuracy, "at 70 tokens the fast step is the faster"
    wanted = steps.gemm(
        x.numpy(), blocks, step=choice.kernel.number, family=choice.family, machine=Simulator()
    )
    np.testing.assert_array_equal(multiplied(layer, x).numpy(), wanted)
    assert {stream for _, stream, _ in host.launched} == {77}


@pytest.mark.parametrize(
    ("m", "accuracy", "dtype", "launches"),
    [(40, "exact", torch.float16, 1), (70, "fast", torch.float32, 2)],
)
def test_a_bias_of_many_tokens_takes_no_launch_more(host, m, accuracy, dtype, launches) -> None:
    """It is the product of gemm with a bias; int8 has a pass over x before it, bias or not."""
    blocks, bias, name = blocks_of(), tensor(N, seed=2, dtype=torch.float16), NAMES[dtype]
    layer, x = uploaded(blocks, bias, accuracy), tensor(m, K, dtype=dtype)
    choice = choice_of(layer, m, name, name, bias="float16")
    assert (choice.kernel.accuracy, choice.kernel.most_tokens) == (accuracy, None)
    wanted = steps.gemm(
        x.numpy(), blocks, bias=bias.numpy(), step=choice.kernel.number, dtype=name,
        machine=Simulator(),
    )  # fmt: skip
    np.testing.assert_array_equal(multiplied(layer, x).numpy(), wanted, strict=True)
    assert len(host.launched) == launches


def test_an_invariant_layer_gives_a_row_the_same_bits_at_every_m(host: Any) -> None:
    layer = QuantLinear.from_blocks(blocks_of("q4_0", k=1024), invariant=True)
    layer._move(torch.device("cuda"))
    x = tensor(16, 1024).to(torch.float16)
    assert "invariant=True" in repr(layer)
    whole = multiplied(layer, x)
    for m in (1, 3):
        assert choice_of(layer, m, "float16").request.invariant
        assert torch.equal(multiplied(layer, x[:m]), whole[:m])


def test_sums_of_blocks_that_share_a_tile_begin_at_zero(host: Any) -> None:
    """Where scratch memory matters: many K and few outputs."""
    n, k, m = 20, 1056, 40
    blocks = blocks_of(n=n, k=k)
    layer, x = uploaded(blocks), tensor(m, k)
    choice = choice_of(layer, m)
    sums, _ = choice.kernel.scratch(FORMATS["q4_0"], choice.family, choice.request.shape)
    assert np.prod(sums[0]) > 4, "shared tiles"
    y = multiplied(layer, x)
    assert within(y, x, blocks, x_rounding=2.0**-12)
    assert torch.equal(multiplied(layer, x), y)
    (counters,) = torch_operator._counters.values()
    assert not counters.any(), "as they were found"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_the_gpus_path_in_every_dtype(host: Any, dtype: Any, biased: bool) -> None:
    """A step rounds x to 8 bits of the largest of 32, half a unit of 1/127, or to float16."""
    blocks, bias = blocks_of("q4_1"), tensor(N, seed=2).to(dtype) if biased else None
    layer = uploaded(blocks, bias)
    for shape in ((2, 2), (0, 3), ()):
        x = tensor(*shape, K, dtype=dtype)
        y = multiplied(layer, x)
        assert (y.shape, y.dtype) == ((*shape, N), dtype)
        if 0 not in shape:
            assert within(y, x, blocks, bias, x_rounding=0.5 / 127)
    x = tensor(K, 1, 1, dtype=dtype).expand(K, 2, 1).permute(1, 2, 0)
    assert within(multiplied(layer, x), x, blocks, bias, x_rounding=0.5 / 127)


@pytest.mark.parametrize("m", [1, 40])
def test_sums_that_are_not_complete_are_float32(host: Any, m: int) -> None:
    """A layer that ranks share reads float16 and writes what is not rounded, past the operator,
    through it and to torch.compile."""
    blocks, x = blocks_of(), tensor(m, K, dtype=torch.float16)
    layer = uploaded(blocks)
    made = choice_of(layer, m, "float16")
    assert (made.reading.source, made.writes) == ("float16", "float32")
    y = layer._product(x, None, wide=True)
    assert y.dtype == torch.float32
    assert within(y, x, blocks, x_rounding=0.5 / 127)
    assert torch.equal(y.half(), layer._product(x, None))
    arguments = (
        *(x, None, None, layer._arrays("weights"), [], layer.packings, "exact", "q4_0", N, K),
        *(False, True),
    )
    assert torch.equal(torch_operator._on_gpu(*arguments), y)
    assert torch_operator._shape_of(*arguments).dtype == torch.float32
    assert torch_operator._shape_of(*arguments[:-1]).dtype == torch.float16


def test_a_packing_for_each_accuracy_and_none_of_it_saved(host: Any) -> None:
    layer = uploaded(blocks_of(), accuracy="fast")
    assert layer.packings == "tiles byte_tiles"
    assert sorted(layer.state_dict()) == ["_extra_state", "blocks"]
    assert layer.device_bytes == sum(
        array.nbytes for step in (kernel_of(14), kernel_of(15)) for array in step.pack(blocks_of())
    )
    exact = uploaded(blocks_of())
    assert exact.packings == "tiles"
    assert exact.device_bytes < layer.device_bytes
    before = exact._arrays("weights")
    exact.half()
    assert all(a is b for a, b in zip(exact._arrays("weights"), before, strict=True))
    assert [one.dtype for one in before] == [torch.uint8, torch.float32]
    exact._move(torch.device("cpu"))
    assert (exact.packings, exact._arrays("weights")) == ("", [])


def test_what_is_loaded_is_packed_again(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a layer on a GPU would go on with the weights that it had."""
    where = property(lambda layer: torch.device("cuda" if layer.packings else "cpu"))
    monkeypatch.setattr(QuantLinear, "device", where)
    other = QuantLinear.from_blocks(blocks_of(seed=5), accuracy="fast")
    layer = QuantLinear.from_blocks(blocks_of(), accuracy="fast")
    layer._move(torch.device("cuda"))
    before = [array.clone() for kind in linear.KINDS for array in layer._arrays(kind)]
    layer.load_state_dict(other.state_dict())
    other._move(torch.device("cuda"))
    after = [array for kind in linear.KINDS for array in layer._arrays(kind)]
    wanted = [array for kind in linear.KINDS for array in other._arrays(kind)]
    assert len(before) == len(after) == len(wanted) > 2
    for one, another in zip(after, wanted, strict=True):
        assert torch.equal(one, another)
    assert not torch.equal(before[0], after[0])


def test_torch_compile_takes_the_packings_along(host: Any) -> None:
    layer, x = uploaded(blocks_of(), accuracy="fast"), tensor(2, K)
    nodes: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        nodes.extend(node for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch._dynamo.reset()
    with torch.no_grad():
        y = torch.compile(layer, backend=backend, fullgraph=True)(x)
    (node,) = nodes
    assert node.target is torch.ops.quantized_gemm.product.default
    assert [len(node.args[3]), len(node.args[4]), node.args[5]] == [2, 2, "tiles byte_tiles"]
    assert host.launched == [], "x is a tensor of the CPU to torch, and the node its operator there"
    assert within(y, x, blocks_of())


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("accuracy", ["exact", "fast"])
def test_x_of_16_bits_goes_to_the_kernel_as_it_is(
    host: Any, dtype: Any, accuracy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One launch, and y of its dtype; where int8 is made of x, or float16 of bfloat16, a launch
    before it."""
    monkeypatch.setattr(tuning_table, "known", lambda: ())  # the highest step that is allowed
    blocks, x = blocks_of(), tensor(70, K, dtype=dtype)
    layer = uploaded(blocks, accuracy=accuracy)
    made = choice_of(layer, 70, NAMES[dtype], NAMES[dtype])
    assert (made.kernel.accuracy, made.reading.source, made.writes) == (
        accuracy,
        *[NAMES[dtype]] * 2,
    )
    y = multiplied(layer, x)
    assert len(host.launched) == (1 if (accuracy, dtype) == ("exact", torch.float16) else 2)
    given = x.view(torch.uint16).numpy() if dtype is torch.bfloat16 else x.numpy()
    wanted = steps.gemm(
        given, blocks, step=made.kernel.number, dtype=NAMES[dtype], machine=Simulator()
    )
    np.testing.assert_array_equal(y.view(torch.uint16).numpy(), wanted.view(np.uint16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_x_that_kernels_cannot_read_where_it_is(host: Any, dtype: Any) -> None:
    """A copy of x that does not begin at a multiple of 16 bytes; none of one that does."""
    layer, m = uploaded(blocks_of()), 40
    given, whole = tensor(m, K, dtype=dtype), torch.zeros(m * K + 8, dtype=dtype)
    assert given.data_ptr() % 16 == whole.data_ptr() % 16 == 0
    wanted = multiplied(layer, given)
    for off in (1, 4, 8):
        x = whole[off : off + m * K].view(m, K).copy_(given)
        copied = x.data_ptr() % 16 != 0 and dtype is not torch.float32
        with Asked() as asked:
            y = multiplied(layer, x)
        assert ("clone" in asked.names) == copied
        assert torch.equal(y, wanted)


def test_x_is_made_contiguous_and_cast_where_no_step_reads_it(host: Any) -> None:
    layer = uploaded(blocks_of())
    x = tensor(K, 3, dtype=torch.bfloat16).T
    with Asked() as asked:
        y = multiplied(layer, x)
    assert [name for name in asked.names if name in ("clone", "_to_copy")] == ["clone"]
    assert torch.equal(y, multiplied(layer, x.contiguous()))
    host.cc, host.sms = (7, 5), 40  # whose steps read and write float32 alone
    older = uploaded(blocks_of())
    with Asked() as asked:
        y = multiplied(older, x)
    assert [name for name in asked.names if name in ("clone", "_to_copy")] == ["_to_copy"] * 2
    assert within(y, x, blocks_of(), x_rounding=0.5 / 127)


# --- counters -------------------------------------------------------------------------------------


def test_launches_of_a_stream_share_counters(host: Any, monkeypatch: Any) -> None:
    like = torch.zeros(1)
    torch_operator.reserve_counters(like.device)
    first = torch_operator.counters(100, like, 7)
    assert len(first) == torch_operator.COUNTERS
    assert torch_operator.counters(4096, like, 7) is first
    other = torch_operator.counters(1, like, 8)
    larger = torch_operator.counters(5000, like, 7)
    assert len(larger) == 8192
    assert torch_operator.counters(1, like, 7) is larger
    captures = iter([1, 1, 2])
    monkeypatch.setattr(torch_operator, "_capture_of", lambda stream: next(captures))
    captured = [torch_operator.counters(1, like, 7) for _ in range(3)]
    assert captured[0] is captured[1]
    pieces = sorted(
        (one.data_ptr(), len(one)) for one in (first, other, larger, captured[0], captured[2])
    )
    for (at, size), (following, _) in itertools.pairwise(pieces):
        assert at + size <= following, "no byte belongs to two"
    assert all(at % 256 == pieces[0][0] % 256 for at, _ in pieces)


def test_a_reserve_that_is_used_up_is_made_anew_but_not_in_a_capture(host, monkeypatch) -> None:
    """So no call sets memory to zero; what is captured then does, in its graph."""
    monkeypatch.setattr(torch_operator, "RESERVE", 3 * torch_operator.COUNTERS)
    like, size = torch.zeros(1), torch_operator.COUNTERS
    torch_operator.reserve_counters(like.device)
    kept = [torch_operator.counters(1, like, stream) for stream in range(7)]
    assert list(torch_operator._counters.values()) == kept
    assert len({one.data_ptr() for one in kept}) == 7
    large = torch_operator.counters(5 * size, like, 9)
    assert len(large) == 8 * size
    assert not large.any()
    monkeypatch.setattr(torch_operator, "_capture_of", lambda stream: 12)
    torch_operator._reserves.clear()
    with Asked() as asked:
        none = torch_operator.counters(100, like, 1)
    assert "new_zeros" in asked.names
    assert torch.equal(none, torch.zeros(100, dtype=torch.uint8))
    assert list(torch_operator._counters.values()) == [*kept, large]


class Asked(TorchDispatchMode):
    """Notes what torch is asked for: each is a kernel, an allocation or at least a microsecond."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(
    ("m", "dtype", "biased"),
    [
        (1, torch.float32, False),
        (1, torch.float16, False),
        (1, torch.float32, True),
        (1, torch.bfloat16, True),
        (300, torch.float32, False),
        (300, torch.float16, False),
        (300, torch.bfloat16, False),
        (300, torch.float32, True),
        (300, torch.bfloat16, True),
    ],
)
def test_a_call_asks_torch_for_no_more_than_it_needs(
    host: Any, m: int, dtype: Any, biased: bool
) -> None:
    """C, and where a pass rounds x memory for its rows: no block hands sums to another here, and
    kernels add the bias."""
    bias = tensor(N, seed=2).to(dtype) if biased else None
    layer, x = uploaded(blocks_of(), bias), tensor(m, K, dtype=dtype)
    host.runs = False
    multiplied(layer, x)
    host.launched.clear()
    with torch.no_grad(), Asked() as asked:
        multiplied(layer, x)
    launches = 2 if m > 16 and dtype is not torch.float16 else 1
    assert len(host.launched) == launches
    made = [name for name in asked.names if name != "fill_"]  # memory is filled in `host`
    assert made == ["empty_strided"] * launches


def test_an_eager_call_goes_past_torchs_dispatcher(host: Any, monkeypatch: Any) -> None:
    """To `multiply`, where nobody looks on: the operators are for all others."""
    host.runs = False
    x, bias = tensor(2, K), nn.Parameter(tensor(N))
    layer, trained = uploaded(blocks_of()), uploaded(blocks_of(), bias)
    called: list[str] = []
    for name in ("linear", "product", "multiply"):
        original = getattr(torch_operator, name)
        monkeypatch.setattr(
            torch_operator, name, lambda *a, n=name, o=original: called.append(n) or o(*a)
        )
    graded = torch_operator.Multiplied.forward

    def forward(*given: Any) -> Any:
        called.append("with a gradient")
        return graded(*given)

    monkeypatch.setattr(torch_operator.Multiplied, "forward", staticmethod(forward))

    def calls(call: Any) -> list[str]:
        called.clear()
        call()
        return [name for name in called if name != "multiply"] or called[:1]

    assert calls(lambda: layer(x)) == ["multiply"]
    assert calls(lambda: layer(x.clone().requires_grad_())) == ["with a gradient"]
    assert calls(lambda: trained(x)) == ["with a gradient"], "the bias has one"
    with Asked():
        assert calls(lambda: trained(x)) == ["linear"]
    with torch.no_grad():
        assert calls(lambda: trained(x)) == ["multiply"]
        assert calls(lambda: layer(nn.Parameter(x))) == ["multiply"]
        assert calls(lambda: layer(x[0])) == ["multiply"]
        assert calls(lambda: copy.deepcopy(layer)(x)) == ["multiply"]
        assert calls(lambda: pickle.loads(pickle.dumps(layer))(x)) == ["multiply"]
        with Asked():
            assert calls(lambda: layer(x)) == ["product"]
        assert calls(lambda: torch.vmap(layer)(x)) == ["product"]
        with forward_ad.dual_level():
            assert calls(lambda: layer(x)) == ["product"]
        with torch.autocast("cpu", torch.bfloat16):
            assert calls(lambda: layer(x)) == ["multiply"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit.trace goes out of use
            assert calls(lambda: torch.jit.trace(layer, x, check_trace=False)) == ["linear"]
        assert calls(lambda: layer(x.as_subclass(type("Own", (torch.Tensor,), {})))) == ["product"]
        for wrong in (tensor(2, K + 32), torch.tensor(1.0), torch.ones(2, K, dtype=torch.int8)):
            with pytest.raises((TypeError, ValueError), match="x must "):
                layer(wrong)


@pytest.mark.alone
def test_an_eager_call_takes_the_host_little_time(host: Any, monkeypatch: Any) -> None:
    """Python's work alone, as in tests/product/test_gemm_on_device; nn.Linear takes 21 us or more
    on the host of an H100, driver and all."""
    monkeypatch.setattr(launcher, "launch_function", lambda: lambda *_: 0)
    monkeypatch.setattr(torch_operator, "new_array", torch._C._dynamo.guards._empty_strided_cpu)
    with torch.no_grad():
        for m in (1, 512):
            for dtype in DTYPES:
                layer, x = uploaded(blocks_of()), tensor(m, K, dtype=dtype)
                us = python_us(lambda: layer(x))  # noqa: B023
                print(f"M={m} {dtype}: {us:.1f} us")
                assert us < MOST_US


def test_a_copy_of_a_layer_multiplies_with_its_own_arrays(host: Any) -> None:
    layer, x = uploaded(blocks_of()), tensor(1, K)
    wanted = layer(x)
    other = copy.deepcopy(layer)
    for array in layer._arrays("weights"):
        array.zero_()
    assert torch.equal(other(x), wanted)
    assert not layer(x).any()
    layer._move(torch.device("cuda"))
    assert torch.equal(layer(x), wanted), "packed anew: other addresses"
    swapped = {f"weights_{i}": one for i, one in enumerate(other._arrays("weights"))}
    assert torch.equal(torch.func.functional_call(layer, swapped, (x,)), wanted)


def test_a_gradient_is_paid_for_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    for name in ("linear", "product"):
        original = getattr(torch_operator, name)
        monkeypatch.setattr(
            torch_operator, name, lambda *a, n=name, o=original: called.append(n) or o(*a)
        )
    x, wanted = tensor(2, K), tensor(2, K).requires_grad_()
    layer = QuantLinear.from_blocks(blocks_of())
    trained = QuantLinear.from_blocks(blocks_of(), nn.Parameter(tensor(N)))
    layer(x), layer(wanted), trained(x)
    with torch.no_grad():
        layer(wanted), trained(x)
    assert called == ["product", "linear", "linear", "product", "product"]


def test_the_launches_used_last_are_kept(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_operator, "_prepared", Kept(3))
    layer = uploaded(blocks_of())

    def made(m: int) -> Any:
        return torch_operator.prepared(layer._on_gpu(), m, "float32", "float32")[1]

    before = {m: made(m) for m in (1, 2, 3)}
    assert made(1) is before[1]
    made(4)
    assert len(torch_operator._prepared) == 3
    assert made(1) is before[1]
    assert made(2) is not before[2], "it was the one used longest ago"


def test_the_first_product_asks_for_those_of_other_layers(host: Any, monkeypatch: Any) -> None:
    """And for those of the tokens that follow a prompt, after all of the prompt's."""
    host.runs, asked = False, []
    monkeypatch.setenv(kernel_cache.VARIABLE, "off")
    monkeypatch.setattr(kernel_cache, "_known", type(kernel_cache._known)())
    monkeypatch.setattr(compiler, "compile_kernel", lambda *_: CompiledKernel("", b"", False))
    monkeypatch.setattr(parallel_compile, "start", lambda gpu: asked.append("start"))
    compile_meanwhile = lambda wanted, gpu: asked.append([*wanted])  # noqa: E731
    monkeypatch.setattr(parallel_compile, "compile_meanwhile", compile_meanwhile)

    def load(launch: Any) -> Any:
        compiler.compiled(launch.kernel, signature_of(launch.args), "sm_90a")
        return host.load(launch)

    monkeypatch.setattr(launcher, "load", load)

    def asked_by(layer: Any, x: Any) -> Any:
        kernel_cache._known.clear()
        torch_operator._prepared.clear()
        layer(x)
        return asked.pop()

    def of(layer: Any, m: int) -> Any:
        bias = None if layer.bias is None else "float16"
        return choice_of(layer, m, "float16", "float16", bias=bias)

    alike = [uploaded(blocks_of()) for _ in range(2)]
    assert asked == ["start"], "once for layers that are alike"
    other = uploaded(blocks_of("q8_0"), nn.Parameter(tensor(N, dtype=torch.float16)))
    gone = uploaded(blocks_of("q5_0"))
    gone._move(torch.device("cpu"))
    asked.clear()
    x = tensor(2, 20, K, dtype=torch.float16)
    with torch.no_grad():
        prompts, following = [of(other, 40), of(alike[0], 40)], [of(alike[0], 2), of(other, 2)]
        assert asked_by(other, x) == [*prompts, *following]
        assert asked_by(alike[1], x.view(40, K)) == prompts[::-1], "no prompt"
    for layer, learns in zip(alike, (False, True), strict=True):
        own = x.clone().requires_grad_(learns)
        assert asked_by(layer, own) == prompts[::-1], "no tokens follow where gradients are made"
    torch_operator._prepared.clear()
    layer(tensor(4, 10, K, dtype=torch.float16))
    uploaded(blocks_of())
    assert not asked, "all of it is compiled"


def input_gradient(layer: Any, gradient: Any) -> Any:
    """What the operator's kernel for CUDA makes of it."""
    return torch_operator._input_gradient_on_gpu(gradient, *layer.unpacked_from)


def is_gradient(found: Any, gradient: Any, w: Any) -> bool:
    """Whether it is the float64 product of a gradient [..., N] and weights [N, K], rounded to its
    dtype first, but for N sums in float32, in which a tensor core may truncate, and a rounding."""
    w = w.to(found.dtype).cpu().double()
    rows = gradient.detach().cpu().double()
    exact, size = rows @ w, rows.abs() @ w.abs()
    allowed = (len(w) + 2) * 2.0**-23 * size
    allowed = allowed + ROUNDING[found.dtype] * (exact.abs() + allowed) + 2.0**-25
    return bool(((found.detach().cpu().double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize("cc", [(9, 0), (7, 5)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gradient_on_a_gpu_is_a_product_by_panels(
    host: Any, dtype: Any, cc: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 64 columns here; of all of them where the layout is not that of tensor cores."""
    monkeypatch.setattr(torch_operator, "capability", lambda device: cc)
    monkeypatch.setattr(torch_operator, "panel_width", lambda n, k, itemsize: 64)
    blocks = blocks_of("q5_1")
    layer, w = uploaded(blocks, accuracy="fast"), torch.from_numpy(dequantize(blocks))
    g = tensor(3, 5, N, dtype=dtype)
    for gradient in (g, g[0].T.contiguous().T, g[0, :1].expand(4, N), g[0, 0], g[:, :0]):
        found = input_gradient(layer, gradient)
        assert (found.shape, found.dtype) == ((*gradient.shape[:-1], K), dtype)
        assert is_gradient(found, gradient, w)
    panels = ["unpack_tiles"] * -(-K // 64) if cc >= (8, 0) else ["unpack_k_outermost"]
    assert [name for name, _, _ in host.launched] == panels * 4
    with pytest.raises(ValueError, match=r"gradient must have shape \[..., 20\], got \[2, 19\]"):
        input_gradient(layer, tensor(2, N - 1, dtype=dtype))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_eager_gradients_on_a_gpu(host: Any, dtype: Any, wide: bool) -> None:
    """Of x and of a bias, or of one of them, through torch's autograd; x of 16 bits gets its dtype
    where y is float32."""
    blocks = blocks_of("q4_1")
    layer, w = uploaded(blocks, nn.Parameter(tensor(N))), torch.from_numpy(dequantize(blocks))
    x = tensor(2, 3, K, dtype=dtype).requires_grad_()
    y = layer._product(x, layer.bias, wide=wide)
    assert y.dtype == (torch.float32 if wide else dtype)
    assert within(y, x.detach(), blocks, layer.bias, x_rounding=0.5 / 127)
    upstream = tensor(2, 3, N, dtype=dtype, seed=3).to(y.dtype)
    y.backward(upstream)
    assert x.grad.dtype == dtype
    assert is_gradient(x.grad, upstream, w)
    torch.testing.assert_close(layer.bias.grad, upstream.float().sum((0, 1)))
    assert host.launched[-1][0] == "unpack_tiles"
    x.grad = layer.bias.grad = None
    layer(x.detach()).backward(upstream.to(dtype))
    layer.bias.requires_grad_(False)
    layer(x).backward(upstream.to(dtype))
    assert is_gradient(x.grad, upstream, w)
    assert layer.bias.grad is not None


def test_a_panel_is_the_whole_of_most_layers() -> None:
    width = torch_operator.panel_width
    assert width(14336, 4096, 2) == 4096
    assert width(14336, 4128, 4) == 4128
    assert width(28672, 8192, 2) == 4096
    assert width(128256, 4096, 2) == 1024
    assert width(1 << 30, 288, 4) == 64


@pytest.mark.parametrize("name", ["q4_0", "q6_k"])
def test_weights_on_a_gpu_are_those_of_its_kernels(host: Any, name: str) -> None:
    """Of q6_k with scales of 11 bits; in any dtype."""
    blocks = (
        blocks_of() if name == "q4_0" else random_blocks(np.random.default_rng(0), 5, 512, name)
    )
    layer, wanted = uploaded(blocks), torch.from_numpy(dequantize(blocks))
    if name == "q6_k":
        held = stored_weights(blocks)
        groups = held.levels.reshape(*held.scale.shape, -1) * held.scale[..., None]
        wanted = torch.from_numpy(groups.reshape(wanted.shape).astype(np.float32))
    for dtype in (*DTYPES, torch.float64):
        found = torch_operator._dequantize_on_gpu(*layer.unpacked_from, dtype)
        assert torch.equal(found, wanted.to(dtype))


def test_layers_of_one_shape_share_their_launches(host: Any) -> None:
    one, other = uploaded(blocks_of(seed=1)), uploaded(blocks_of(seed=2))
    x = tensor(1, K)
    first, second = multiplied(one, x), multiplied(other, x)
    assert len(torch_operator._prepared) == 1
    assert within(first, x, blocks_of(seed=1), x_rounding=0.5 / 127)
    assert within(second, x, blocks_of(seed=2), x_rounding=0.5 / 127)


def test_kernels_that_a_capture_does_not_survive(host: Any, monkeypatch: Any) -> None:
    def fails() -> Any:
        raise OverflowError("out of something")  # of no type that is expected

    monkeypatch.setattr(torch_operator, "_machine", fails)
    layer = uploaded(blocks_of())
    for capturing, error, said in (
        (True, RuntimeError, "for 3 tokens could not .* multiply 3 tokens once before the capt"),
        (False, OverflowError, "^out of something$"),
    ):
        monkeypatch.setattr(torch_operator, "is_capturing", lambda c=capturing: c)
        with pytest.raises(error, match=said):
            multiplied(layer, tensor(3, K))


# --- whole models ---------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64, bias=False)
        self.gate = nn.Linear(64, 3)
        self.odd = nn.Linear(33, 64)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.relu(self.up(x))) * self.gate(x).mean()


class Model(nn.Module):
    """An embedding, two blocks, and an output layer with the embedding's weights, or its own."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 64)
        self.layers = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(64, 11, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def test_a_model_is_quantized_and_says_what_was() -> None:
    torch.manual_seed(0)
    model = Model().eval()
    tokens = torch.arange(11)
    before = model(tokens)
    report = quantize_model(model, "q8_0", skip=("lm_head", "gate"))
    names = [f"layers.{i}.{last}" for i in (0, 1) for last in ("up", "down")]
    assert [one.name for one in report.replaced] == names
    assert dict(report.skipped) == {
        **{f"layers.{i}.gate": "skip='gate'" for i in (0, 1)},
        **{f"layers.{i}.odd": "K=33 is not a multiple of 32, the block of q8_0" for i in (0, 1)},
        "lm_head": "skip='lm_head'",
    }
    assert report.saved == 4 * (4 * 96 * 64 - 96 * 64 // 32 * 34)
    assert "4 layers are q8_0 now: 98,304 -> 26,112 bytes of weights, 72,192 saved" in str(report)
    assert "lm_head is unchanged: skip='lm_head'" in str(report)
    assert isinstance(model.layers[1].up, QuantLinear)
    assert not model.layers[1].up.training
    assert type(model.layers[0].gate) is nn.Linear
    assert model.lm_head.weight is model.embed.weight
    after = model(tokens)
    assert 0 < (after - before).abs().max() < 0.02 * before.abs().max()
    again = quantize_model(model, "q8_0", skip=("lm_head", "gate", "typo"))
    assert again.replaced == ()
    assert again.unused == ("typo",)
    assert "skip='typo' matches no layer" in str(again)


@pytest.mark.parametrize(
    ("skip", "left"),
    [
        ((), set()),
        ("lm_head", {"lm_head"}),
        (("up",), {"layers.0.up", "layers.1.up"}),
        (("layers.0",), {"layers.0.up", "layers.0.down", "layers.0.gate"}),
        (("1.down",), {"layers.1.down"}),
        (("own",), set()),
        (("*own",), {"layers.0.down", "layers.1.down"}),
        (
            ("layers.[1-9].*", "lm_head"),
            {"layers.1.up", "layers.1.down", "layers.1.gate", "lm_head"},
        ),
    ],
)
def test_what_skip_means(skip: Any, left: set[str]) -> None:
    model = Model(tied=False)
    quantize_model(model, skip=skip)
    odd = {"layers.0.odd", "layers.1.odd"}
    assert {n for n, m in model.named_modules() if type(m) is nn.Linear} - odd == left


def test_tied_weights_stay_tied() -> None:
    model = Model()
    report = quantize_model(model, skip=())
    assert dict(report.skipped)["lm_head"] == "its weights are tied to embed.weight, which stays"
    assert model.lm_head.weight is model.embed.weight
    loose = Model()  # tied by memory alone
    loose.lm_head.weight = nn.Parameter(loose.embed.weight.detach())
    assert "tied to embed.weight" in dict(quantize_model(loose, skip=()).skipped)["lm_head"]


@pytest.mark.parametrize("view", ["part", "transpose", "reshaped"])
def test_layers_that_share_memory_and_not_weights_stay_two(view: str) -> None:
    model = nn.ModuleDict({"whole": nn.Linear(32, 64, bias=False)})
    w = model["whole"].weight.detach()
    w = {"part": w[:8], "transpose": w.t(), "reshaped": w.reshape(32, 64)}[view]
    model["view"] = nn.Linear(w.shape[1], w.shape[0], bias=False)
    model["view"].weight = nn.Parameter(w)
    wanted = w.clone()
    report = quantize_model(model, "q8_0")
    assert [(one.name, one.before) for one in report.replaced] == [("whole", 8192), ("view", 0)]
    assert model["view"].dequantize().shape == wanted.shape
    assert (model["view"].dequantize() - wanted).abs().max() < 0.01 * wanted.abs().max()


def test_linears_tied_to_each_other_become_one() -> None:
    model = nn.ModuleDict({name: nn.Linear(64, 5, bias=False) for name in "abc"})
    model["b"].weight = model["a"].weight
    model["again"] = model["c"]
    report = quantize_model(model)
    assert model["a"] is model["b"]
    assert model["c"] is model["again"]
    assert model["a"] is not model["c"]
    found = [(one.name, one.before, one.after) for one in report.replaced]
    assert found == [("a", 1280, 180), ("b", 0, 0), ("c", 1280, 180)]
    torn = nn.ModuleDict({name: nn.Linear(64, 5) for name in "ab"})
    torn["b"].weight = torn["a"].weight
    report = quantize_model(torn, skip=("b",))
    assert dict(report.skipped)["a"] == "its weights are tied to b.weight, which stays"
    report = quantize_model(torn, skip=())
    assert torn["a"] is not torn["b"], "they have biases of their own"
    assert [one.before for one in report.replaced] == [1280, 0]


def test_layers_that_may_do_more_are_left_alone() -> None:
    class Special(nn.Linear):
        pass

    model = nn.Sequential(Special(32, 3), nn.Linear(32, 3), nn.Linear(32, 3))
    model[1].register_forward_hook(lambda *_: None)
    report = quantize_model(model)
    assert dict(report.skipped) == {
        "0": "a Special may do more than a Linear",
        "1": "it has hooks, which the new layer would not have",
    }
    attention = nn.MultiheadAttention(32, 2)
    assert "out_proj" in dict(quantize_model(attention).skipped)


HOOKS = [name for name in dir(nn.Module) if name.startswith("register_") and "hook" in name]


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_of_every_kind_are_kept(name: str) -> None:
    model = nn.Sequential(nn.Linear(32, 3))
    getattr(model[0], name)(lambda *_, **__: None)
    assert dict(quantize_model(model).skipped) == {
        "0": "it has hooks, which the new layer would not have"
    }


@pytest.mark.parametrize("name", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_weights_are_kept(name: str) -> None:
    model = nn.Sequential(nn.Linear(32, 3))
    getattr(model[0].weight, name)(lambda *_: None)
    assert type(model[0]) is nn.Linear
    assert "it has hooks" in dict(quantize_model(model).skipped)["0"]


class Adapted(nn.Module):
    """A Linear with a low-rank product beside it, named as PEFT's are."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(64, 64)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(64, 32, bias=False)})


@pytest.mark.parametrize("trained", [False, True])
def test_adapters_are_left_alone(trained: bool) -> None:
    model = nn.ModuleDict({"q": Adapted(), "own": nn.Linear(64, 32), "other": nn.Linear(64, 32)})
    model.requires_grad_(False)
    model["own"].requires_grad_(trained)
    report = quantize_model(model)
    left = {"q.lora_A.default": "it is part of an adapter of q"}
    if trained:
        left["own"] = "it is being trained, and other Linears are frozen"
    assert dict(report.skipped) == left
    assert isinstance(model["q"].base_layer, QuantLinear)
    assert "q.lora_A.default is unchanged: it is part of an adapter of q" in str(report)


def test_matrices_that_are_no_linears_are_named() -> None:
    from transformers.pytorch_utils import Conv1D

    model = nn.ModuleDict({"c_attn": Conv1D(96, 32), "attn": nn.MultiheadAttention(32, 2)})
    said = dict(quantize_model(model).skipped)
    assert said["c_attn.weight"] == "a Conv1D multiplies it itself; only Linears are replaced"
    assert said["attn.in_proj_weight"].startswith("a MultiheadAttention multiplies it itself")


def test_a_skeleton_on_the_meta_device_takes_a_state_dict() -> None:
    model = nn.Sequential(nn.Linear(64, 5, dtype=torch.bfloat16), nn.Linear(32, 3, bias=False))
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(64, 5, dtype=torch.bfloat16), nn.Linear(32, 3, bias=False))
    quantize_model(model, "q5_0"), quantize_model(empty, "q5_0")
    assert empty[0].blocks.is_meta
    assert empty[0].weight.dtype == torch.bfloat16
    empty.load_state_dict(model.state_dict(), assign=True)
    for one, other in zip(empty, model, strict=True):
        assert torch.equal(one.weight, other.weight)
    assert torch.equal(empty[0](X), model[0](X))


def test_a_model_that_cannot_be_quantized() -> None:
    with pytest.raises(ValueError, match="the model is itself a Linear"):
        quantize_model(nn.Linear(32, 3))
    with pytest.raises(TypeError, match=r"model is a NoneType: it must be a torch.nn.Module"):
        quantize_model(None)
    with pytest.raises(TypeError, match="skip has 0: it must be names of layers"):
        quantize_model(nn.Sequential(nn.Linear(32, 3)), skip=(0,))
    model = nn.ModuleDict({"good": nn.Linear(32, 3), "bad": nn.Linear(32, 3)})
    with pytest.raises(ValueError, match=r"^q6_k is only read from files: quantize to one of q4_0"):
        quantize_model(model, "q6_k")
    with torch.no_grad():
        model["bad"].weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"^bad: .*(NaN|nan|finite)"):
        quantize_model(model)
    assert isinstance(model["good"], QuantLinear)
    assert type(model["bad"]) is nn.Linear


def test_float_weights_are_let_go_one_by_one() -> None:
    import weakref

    model = nn.Sequential(*(nn.Linear(32, 3) for _ in range(3)))
    seen = [weakref.ref(one.weight) for one in model]
    alive = []
    original = linear.QuantLinear.from_float.__func__

    def counting(cls: Any, *args: Any, **options: Any) -> Any:
        alive.append(sum(ref() is not None for ref in seen))
        return original(cls, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear.QuantLinear, "from_float", classmethod(counting))
        quantize_model(model)
    assert alive == [3, 2, 1]


# --- on a GPU -------------------------------------------------------------------------------------


def on_gpu(name: str = "q4_0", bias: bool = True, **options: Any) -> Any:
    made = QuantLinear.from_blocks(blocks_of(name), tensor(N, seed=2) if bias else None, **options)
    return made.to("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_values_on_a_gpu(cuda: Any, name: str, dtype: Any) -> None:
    for bias in (False, True):
        layer = on_gpu(name, bias)
        for shape in ((), (1,), (2, 3), (300,), (0, 2)):
            x = tensor(*shape, K, dtype=dtype).to(cuda)
            y = layer(x)
            assert (y.shape, y.dtype, y.device) == ((*shape, N), dtype, x.device)
            if 0 not in shape:
                assert within(y, x, blocks_of(name), layer.bias, x_rounding=0.5 / 127)
    x = tensor(K, 5, dtype=dtype).to(cuda).T
    assert torch.equal(layer(x), layer(x.contiguous()))


@pytest.mark.gpu
def test_fast_on_a_gpu_only_where_asked_for(cuda: Any) -> None:
    assert "fast" not in on_gpu().explain(4096).partition(":")[0]
    layer = on_gpu(accuracy="fast")
    x = tensor(300, K).to(cuda)
    assert within(layer(x), x, blocks_of(), layer.bias, x_rounding=1.5 / 127)


@pytest.mark.gpu
def test_moves_casts_and_loads_on_a_gpu(cuda: Any) -> None:
    layer, x = on_gpu(), tensor(3, K).to(cuda)
    wanted = layer(x)
    assert layer.blocks.device.type == "cpu"
    assert torch.equal(layer.cpu().cuda()(x), wanted)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), wanted)
    fresh = QuantLinear(K, N, device=cuda)
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh(x), wanted)
    assert fresh.half()(x.half()).dtype == torch.float16
    with pytest.raises(ValueError, match="x is on cpu and the layer is on cuda:0"):
        layer(x.cpu())
    moved = QuantLinear.from_blocks(blocks_of())
    moved.blocks.data = moved.blocks.to(cuda)  # as torch's fully_shard does
    with pytest.raises(ValueError, match="blocks are on cuda:0 and not packed, as something other"):
        moved(x)


@pytest.fixture
def whole_sums() -> Iterator[None]:
    """Sums of cuBLAS are float32 to the end, where torch else lets it round parts of them."""
    names = "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"
    for one in names:
        setattr(torch.backends.cuda.matmul, one, False)
    yield
    for one in names:
        setattr(torch.backends.cuda.matmul, one, True)


@contextmanager
def nothing_waits() -> Iterator[None]:
    """RuntimeError from torch where its work would wait for the GPU."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.bfloat16) for name in (*WEIGHT_FORMATS, *FILE_FORMATS)]
    + [("q5_1", torch.float16), ("q5_1", torch.float32)],
)
@pytest.mark.usefixtures("whole_sums")
def test_gradients_on_a_gpu(cuda: Any, name: str, dtype: Any, monkeypatch: Any) -> None:
    """By several panels, ragged in N; the same bits each time; nothing waits for the GPU."""
    monkeypatch.setattr(torch_operator, "panel_width", lambda n, k, itemsize: 320)
    if FORMATS[name].written:
        blocks = blocks_of(name, 516, 1024)
    else:
        blocks = random_blocks(np.random.default_rng(0), 516, 1024, name)
    layer = QuantLinear.from_blocks(blocks, tensor(516)).to(cuda)
    w, codec = layer.dequantize(), torch.from_numpy(dequantize(blocks)).to(cuda)
    rounded = name in ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs")
    assert torch.equal(w, codec) is not rounded
    torch.testing.assert_close(w, codec, rtol=0, atol=2.0**-10 * float(codec.abs().max()))
    assert torch.equal(layer.weight, w.to(layer.dtype))
    x = tensor(2, 40, 1024, dtype=dtype).to(cuda).requires_grad_()
    upstream, found = tensor(2, 40, 516, dtype=dtype, seed=3).to(cuda), []
    layer(x).backward(upstream)
    for _ in range(3):
        y, x.grad = layer(x), None
        with nothing_waits():
            y.backward(upstream)
        found.append(x.grad)
    assert found[0].dtype == dtype
    assert is_gradient(found[0], upstream, w)
    assert all(torch.equal(one, found[0]) for one in found)
    for m in (1, 300):
        upstream = tensor(m, 516, dtype=dtype, seed=4).to(cuda)
        assert is_gradient(input_gradient(layer, upstream), upstream, w)


class WithAdapter(nn.Module):
    """A frozen quantized layer and an adapter of rank 8 beside it."""

    def __init__(self, blocks: np.ndarray) -> None:
        super().__init__()
        self.base = QuantLinear.from_blocks(blocks)
        n, k = self.base.out_features, self.base.in_features
        self.before = nn.Linear(k, k, bias=False)
        self.down, self.up = nn.Linear(k, 8, bias=False), nn.Linear(8, n, bias=False)

    def forward(self, x: Any) -> Any:
        x = self.before(x)  # so that the quantized layer's input has a gradient
        return self.base(x) + self.up(self.down(x))


def adapted(device: Any, dtype: Any) -> Any:
    torch.manual_seed(0)
    return WithAdapter(blocks_of("q5_1", 516, 1024)).to(device, dtype)


def trained(model: Any, x: Any, optimizer: Any) -> Any:
    """One step; the loss."""
    optimizer.zero_grad(set_to_none=True)
    loss = model(x).float().square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_whole_step_of_training_is_captured(cuda: Any, dtype: Any) -> None:
    """Forward, backward and update in one CUDA graph: the bits of eager steps."""
    xs = [tensor(40, 1024, dtype=dtype, seed=i).to(cuda) for i in range(4)]
    model, other = adapted(cuda, dtype), adapted(cuda, dtype)
    rate = {"lr": 1e-3, "momentum": 0.9, "foreach": True}
    optimizer, eager = (torch.optim.SGD(one.parameters(), **rate) for one in (model, other))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for x in xs[:2]:
            trained(model, x, optimizer)
    torch.cuda.current_stream().wait_stream(side)
    x, graph = xs[0].clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = trained(model, x, optimizer)
    losses = [trained(other, one, eager) for one in xs[:2]]
    for one in xs[2:]:
        x.copy_(one)
        graph.replay()
        losses.append(trained(other, one, eager))
        assert torch.equal(loss, losses[-1])
    for one, another in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, another)
    assert losses[-1] < losses[0]


@pytest.mark.gpu
def test_a_gradient_of_kernels_not_loaded_is_captured(cuda: Any) -> None:
    layer = QuantLinear.from_blocks(blocks_of("q5_0", 516, 1024)).to(cuda)
    x, upstream = tensor(40, 1024).to(cuda).requires_grad_(), tensor(40, 516).to(cuda)
    wanted = upstream @ layer.dequantize()
    torch_operator._unpacking.clear()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (found,) = torch.autograd.grad(layer(x), x, upstream)
    graph.replay()
    torch.testing.assert_close(found, wanted)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_training_is_compiled_on_a_gpu(cuda: Any, mode: str) -> None:
    """The quantized layer's part has the same bits; what is around it is torch's."""
    layer = QuantLinear.from_blocks(blocks_of("q5_1", 516, 1024)).to(cuda)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    for seed in range(4):  # the first ones warm up and record
        torch.compiler.cudagraph_mark_step_begin()
        x = tensor(40, 1024, dtype=torch.bfloat16, seed=seed).to(cuda).requires_grad_()
        upstream = tensor(40, 516, dtype=torch.bfloat16, seed=seed + 9).to(cuda)
        (found,) = torch.autograd.grad(compiled(x), x, upstream)
        assert torch.equal(found, torch.autograd.grad(layer(x), x, upstream)[0])


@pytest.mark.gpu
@pytest.mark.usefixtures("whole_sums")
def test_checkpoints_and_autocast_on_a_gpu(cuda: Any) -> None:
    from torch.utils.checkpoint import checkpoint

    layer, found = QuantLinear.from_blocks(blocks_of("q5_1", 516, 1024)).to(cuda), []
    upstream = tensor(40, 516, dtype=torch.bfloat16, seed=3).to(cuda)
    calls = [layer, *(lambda x, r=r: checkpoint(layer, x, use_reentrant=r) for r in (0, 1))]
    for call in calls:
        x = tensor(40, 1024).to(cuda).requires_grad_()
        with torch.autocast("cuda", torch.bfloat16):
            y = call(x)
            assert y.dtype == torch.bfloat16
            y.backward(upstream)  # in float32 it must stay what it is within autocast, too
        found.append(x.grad)
    assert all(torch.equal(one, found[0]) for one in found)
    assert found[0].dtype == torch.float32
    assert is_gradient(found[0].bfloat16(), upstream, layer.dequantize())
    x = tensor(40, 1024).to(cuda).requires_grad_()
    y = layer(x)
    with torch.autocast("cuda", torch.bfloat16):
        y.backward(upstream.float())
    assert is_gradient(x.grad, upstream, layer.dequantize())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_derivatives_of_gradients_on_a_gpu(cuda: Any) -> None:
    layer, plain = (one.to(cuda) for one in beside_torchs())
    x = X.to(cuda)

    def twice(f: Any) -> Any:
        (gradient,) = torch.autograd.grad(
            cubes(f)(t := x.clone().requires_grad_()), t, create_graph=True
        )
        return torch.autograd.grad(gradient.square().sum(), t)

    ways = {
        "double backward": twice,
        "hessian": lambda f: func.hessian(cubes(f))(x[0]),
        "gradients of samples": lambda f: torch.vmap(func.grad(cubes(f)))(x),
        "jvp": lambda f: func.jvp(f, (x,), (x,)),
    }
    for name, way in ways.items():
        found, wanted = (tree_leaves(way(one)) for one in (layer, plain))
        for one, other in zip(found, wanted, strict=True):
            off = 0.02 * float(other.detach().abs().max())  # kernels round x to int8
            torch.testing.assert_close(one, other, rtol=0, atol=off, msg=lambda m, n=name: n + m)


@pytest.mark.gpu
def test_two_streams_at_once_on_a_gpu(cuda: Any) -> None:
    layer = QuantLinear.from_blocks(blocks_of(n=516, k=4128)).to(cuda)  # blocks share tiles
    given = [tensor(m, 4128, seed=m).to(cuda) for m in (1, 8, 40, 300)]
    wanted = [layer(x) for x in given]
    torch.cuda.synchronize()
    streams, got = [torch.cuda.Stream() for _ in range(2)], []
    for _ in range(50):
        for stream in streams:
            with torch.cuda.stream(stream):
                got += [(layer(x), c) for x, c in zip(given, wanted, strict=True)]
    torch.cuda.synchronize()
    assert all(torch.equal(y, c) for y, c in got)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 40, 300])
@pytest.mark.parametrize("warm", [True, False])
def test_a_graph_is_captured_and_replayed(cuda: Any, m: int, warm: bool) -> None:
    """Also where the number of tokens was never seen before, and where plans were forgotten."""
    k = 4128
    layer = QuantLinear.from_blocks(blocks_of("q5_1", 516, k)).to(cuda)  # blocks share tiles
    x = tensor(m, k).to(cuda)
    if warm:
        layer(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(layer(x)[:, :1] + x)
    forget()
    junk = [torch.full((1 << 16,), 255, dtype=torch.uint8, device=cuda) for _ in range(64)]
    for seed in (5, 6):
        x.copy_(tensor(m, k, seed=seed))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, layer(layer(x)[:, :1] + x))
    del junk


@pytest.mark.gpu
# torch captures an empty graph on purpose where it sets up its memory pool, and means to ignore it
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_torch_compile_on_a_gpu(cuda: Any, mode: str) -> None:
    layer = on_gpu()
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: torch.relu(layer(x)) * 2, fullgraph=True, mode=mode)
    with torch.no_grad():
        for seed in range(4):  # the first ones warm up and record
            x = tensor(8, K, seed=seed).to(cuda)
            torch.testing.assert_close(compiled(x), torch.relu(layer(x)) * 2)


@pytest.mark.gpu
def test_a_model_on_a_gpu(cuda: Any) -> None:
    model = Model().to(cuda).eval()
    tokens = torch.arange(11, device=cuda)
    with torch.inference_mode():
        before = model(tokens)
        report = quantize_model(model, "q8_0")
        assert (model(tokens) - before).abs().max() < 0.05 * before.abs().max()
    assert model.layers[0].up.device.type == "cuda"
    assert report.replaced
