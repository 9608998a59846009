"""Rows of weights as operators of torch, embeddings, and the kernels of transformers'
interface: on the CPU, and as on a GPU, with kernels in the simulator."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch

from qformats import FILE_FORMATS, FORMATS, WEIGHT_FORMATS
from qformats import dequantize as by_codec
from qformats.gguf_file import GGML_TYPES
from reference.drawn import random_blocks
from reference.problem import Problem
from steps.nn import ggml_kernels, rows
from steps.nn.linear import QuantLinear
from steps.nn.rows import QuantEmbedding, dequantize, get_rows

NAMES = (*WEIGHT_FORMATS, *FILE_FORMATS)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
N, IDS = 6, torch.tensor([[5, 0, 6], [-1, 3, 3]])
KNOWN = (IDS >= 0) & (IDS < N)


def blocks_of(name: str, n: int = N, blocks: int = 2) -> tuple[Any, Any]:
    """(bytes of a format, float32 values)"""
    k = blocks * FORMATS[name].elements
    if FORMATS[name].written:
        made = Problem(1, n, k, name).blocks
    else:
        made = random_blocks(np.random.default_rng(0), n, k, name)
    return torch.from_numpy(made.view(np.uint8).copy()), torch.from_numpy(by_codec(made))


@pytest.fixture
def gpu(host: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One on which a layer is packed wherever it is moved."""

    def moved(layer: Any, device: Any) -> Any:
        layer._move(torch.device("cuda"))
        return layer

    monkeypatch.setattr(QuantLinear, "to", moved)
    ggml_kernels._packed.clear()
    yield host
    ggml_kernels._packed.clear()


@pytest.mark.parametrize("name", NAMES)
def test_values_on_the_cpu_and_on_a_gpu(gpu: Any, name: str) -> None:
    """Those of the codec, rounded once as torch does."""
    held, values = blocks_of(name)
    for dtype in DTYPES:
        for of in (dequantize, rows._dequantize_on_gpu):
            assert torch.equal(of(held, name, dtype), values.to(dtype))
        for of in (get_rows, rows._get_rows_on_gpu):
            found = of(held, IDS, name, dtype)
            assert torch.equal(found[KNOWN], values[IDS[KNOWN]].to(dtype))
            assert found[~KNOWN].isnan().all()
    assert [one for one, _, _ in gpu.launched] == ["dequantize_rows"] * 6


def test_any_place_and_kind_of_ids(gpu: Any) -> None:
    """Bytes at an odd address and every second row are copied; int32 ids are read as they are."""
    held, values = blocks_of("q6_k")
    odd = torch.empty(held.numel() + 1, dtype=torch.uint8)[1:].view(held.shape).copy_(held)
    for given, wanted in ((odd, values), (held[::2], values[::2])):
        for of in (dequantize, rows._dequantize_on_gpu):
            assert torch.equal(of(given, "q6_k", torch.float32), wanted)
    for of in (get_rows, rows._get_rows_on_gpu):
        ids = torch.tensor([4, 1], dtype=torch.int32)
        assert torch.equal(of(held, ids, "q6_k", torch.float32), values[[4, 1]])
        assert of(held, IDS[:0], "q6_k", torch.float32).shape == (0, 3, 512)
        assert of(held, IDS.T, "q6_k", torch.float32).shape == (3, 2, 512)


def test_what_does_not_fit_is_refused() -> None:
    held, _ = blocks_of("q4_0")
    with pytest.raises(ValueError, match="format is 'q9': it must be one of q4_0, "):
        dequantize(held, "q9", torch.float32)
    with pytest.raises(
        TypeError, match=r"dtype must be float32, float16 or bfloat16, got torch\.int8"
    ):
        dequantize(held, "q4_0", torch.int8)
    with pytest.raises(ValueError, match="rows of 36 bytes, and a block of q6_k has 210"):
        dequantize(held, "q6_k", torch.float32)
    with pytest.raises(
        TypeError, match=r"blocks must be uint8 \[N, bytes of a row\], got torch.int8"
    ):
        dequantize(held.view(torch.int8), "q4_0", torch.float32)
    with pytest.raises(TypeError, match=r"ids must be int32 or int64 on cpu, got torch\.float32"):
        get_rows(held, IDS.float(), "q4_0", torch.float32)
    with pytest.raises(
        ValueError, match=r"q5_1 needs uint8 \[N, bytes of a row\], a multiple of 24"
    ):
        QuantLinear.from_bytes(held, "q5_1")


def test_an_embedding() -> None:
    held, values = blocks_of("q5_0")
    layer = QuantEmbedding(held, "q5_0", torch.float32, torch.tensor(3.3))
    ids = IDS[KNOWN]
    assert torch.equal(layer(ids), values[ids] * 3.3)
    half = layer.to(torch.bfloat16)(ids)
    assert torch.equal(half, values[ids].bfloat16() * torch.tensor(3.3).bfloat16())
    other = QuantEmbedding(torch.zeros_like(held), "q5_0", torch.bfloat16, torch.tensor(3.3))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(ids), half)
    with pytest.raises(RuntimeError, match="blocks are float32, and blocks are bytes"):
        other.load_state_dict({**layer.state_dict(), "blocks": torch.full(held.shape, np.nan)})
    assert torch.equal(other(ids), half)
    wrong = QuantEmbedding(blocks_of("q5_1")[0], "q5_1", torch.float32)
    with pytest.raises(
        ValueError, match="the state holds q5_0, version 1, and the layer takes q5_1"
    ):
        wrong.set_extra_state(layer.get_extra_state())
    whole = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(whole(ids), half)


def test_the_weight_of_an_embedding() -> None:
    """Of which code asks the dtype, an output layer that is tied to it the values."""
    held, values = blocks_of("q5_0")
    layer = QuantEmbedding(held, "q5_0", torch.float32, torch.tensor(3.3)).half()
    assert isinstance(layer, torch.nn.Embedding)
    w, x = layer.weight, torch.randn(2, 64, generator=torch.Generator().manual_seed(1)).half()
    assert (w.shape, w.dtype, w.device.type) == ((6, 64), torch.float16, "cpu")
    assert torch.equal(w.clone(), values.half())
    assert torch.equal(torch.nn.functional.linear(x, w), x @ values.half().T)
    assert torch.equal(torch.nn.functional.embedding(IDS[0, :2], w), values.half()[IDS[0, :2]])
    assert not list(layer.parameters())
    for write in (
        lambda: w.data.zero_(),
        lambda: torch.nn.init.normal_(layer.weight),
        lambda: setattr(layer, "weight", torch.nn.Parameter(values)),
    ):
        with pytest.raises(RuntimeError, match=r"is read-only, as that of a QuantEmbedding: they"):
            write()
    whole = torch.compile(lambda x: x @ layer.weight.T, fullgraph=True, backend="aot_eager")
    assert torch.equal(whole(x), x @ values.half().T)


def test_lora_over_an_embedding() -> None:
    """Whose rows are multiplied, as Gemma's are: those of the adapter, too."""
    peft = pytest.importorskip("peft")
    held, _ = blocks_of("q8_0")
    table = QuantEmbedding(held, "q8_0", torch.float32, torch.tensor(3.0))
    model = torch.nn.Sequential(table, torch.nn.LayerNorm(64))  # PEFT asks a parameter's device
    ids = torch.arange(N)
    config = peft.LoraConfig(target_modules=["0"], r=4, init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    layer = adapted.base_model.model[0]
    a, b = (one["default"] for one in (layer.lora_embedding_A, layer.lora_embedding_B))
    added = 3.0 * layer.scaling["default"] * (b @ a).T
    torch.testing.assert_close(layer(ids), table(ids) + added)
    adapted(ids).sum().backward()
    assert a.grad is not None
    with pytest.raises(RuntimeError, match="is read-only"):
        adapted.merge_and_unload()


def test_the_kernels_that_transformers_asks_for(gpu: Any) -> None:
    held, values = blocks_of("q8_0", 40, 4)
    kind = next(one for one, name in GGML_TYPES.items() if name == "q8_0")
    assert kind in ggml_kernels.GEMV_TYPES
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(1))
    wanted = x @ values.T
    torch.testing.assert_close(ggml_kernels.mul_mat_vec(held, x, kind, 40), wanted)
    whole = ggml_kernels.dequantize(held.view(-1), kind, 40, 128, torch.float16)
    assert torch.equal(whole, values.half())
    some = ggml_kernels.get_rows(held, IDS[KNOWN], kind, 128, torch.float32)
    assert torch.equal(some, values[IDS[KNOWN]])
    with pytest.raises(ValueError, match=r"ggml type 16 is none .*: these are q4_0 \(2\), "):
        ggml_kernels.mul_mat_vec(held, x, 16, 40)


def test_packed_weights_go_with_their_blocks(gpu: Any) -> None:
    """And are made anew when these change; memory that was freed may come again."""
    held, values = blocks_of("q4_0", 40)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).half()

    def product() -> None:
        y = ggml_kernels._product_on_gpu(held, x, "q4_0")
        assert y.dtype == torch.float16
        torch.testing.assert_close(y.float(), x.float() @ values.T, rtol=1e-2, atol=1e-2)

    product()
    first = ggml_kernels._packed_of(held, "q4_0")
    assert ggml_kernels._packed_of(held.detach(), "q4_0") is first
    held.copy_(held.flip(0))
    values = values.flip(0)
    product()
    assert ggml_kernels._packed_of(held, "q4_0") is not first
    assert len(ggml_kernels._packed) == 1
    del held, first
    gc.collect()
    held, values = blocks_of("q4_0", 39)
    product()
    assert len(ggml_kernels._packed) == 1, "those of memory that is gone went with it"


def test_a_layer_of_bytes() -> None:
    """Those on the CPU are not copied."""
    held, values = blocks_of("q4_k")
    layer = QuantLinear.from_bytes(held, "q4_k", torch.ones(N))
    assert layer.blocks.data_ptr() == held.data_ptr()
    x = torch.ones(1, 512)
    torch.testing.assert_close(layer(x), x @ values.T + 1)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu(cuda: Any, name: str) -> None:
    """The same bits as on the CPU, captured into a graph, too."""
    held, values = blocks_of(name)
    there, ids = held.to(cuda), IDS.to(cuda)
    for dtype in DTYPES:
        assert torch.equal(dequantize(there, name, dtype).cpu(), values.to(dtype))
        found = get_rows(there, ids, name, dtype).cpu()
        assert torch.equal(found[KNOWN], values[IDS[KNOWN]].to(dtype))
        assert found[~KNOWN].isnan().all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows_of_graph = get_rows(there, ids, name, torch.float32)
    ids.copy_(IDS.flip(1))
    graph.replay()
    flipped = IDS.flip(1)
    inside = (flipped >= 0) & (flipped < N)
    assert torch.equal(rows_of_graph.cpu()[inside], values[flipped[inside]])
    kind = next((one for one, of in GGML_TYPES.items() if of == name), None)
    x = torch.randn(3, values.shape[1], generator=torch.Generator().manual_seed(1))
    wanted = x @ values.T
    most = float(x.norm(dim=1).max() * values.norm(dim=1).max())
    if kind is not None:
        y = ggml_kernels.mul_mat_vec(there, x.to(cuda), kind, N).cpu()
        assert (y - wanted).abs().max() < 0.01 * most
