"""The decoder with the kernels between its products: the same numbers as with torch's operations.

The kernels run in the simulator here, on the memory of tensors.
"""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from results.measure.models import one_gpu as bench
from steps.compile.compiler import signature_of
from steps.compile.dry_run import OfArrays
from steps.decoder import chained, deferred, files, operations
from steps.decoder import kernel_operations as between
from steps.decoder import model as parts
from steps.decoder.compare import checks
from steps.decoder.model import (
    Concatenated,
    Decoder,
    Greedy,
    Turns,
    embedding_of,
    generate,
    step_products,
    torch_products,
)
from steps.decoder.parallel import Gathered, Summed
from steps.driver.machines import Simulator
from steps.kernels.between import chain
from steps.kernels.decode import bulk, tiles
from steps.nn import operator as torch_operator
from steps.product.choice import Choice, Request

LLAMA = {"block_count": 2, "embedding_length": 64, "feed_forward_length": 96}


class InSimulator:
    """As `between.prepared`, but launches run here; `launched` gets the names of their kernels."""

    def __init__(self, make: Any, arrays: Any, machine: Simulator, launched: list[str]) -> None:
        self._make, self._machine, self._launched = make, machine, launched

    def __call__(self, arrays: Sequence[Any]) -> None:
        given = [one.numpy() if one.shape else one.numpy().reshape(1) for one in arrays]
        launch = self._make(*given, machine=self._machine)
        self._launched.append(launch.kernel.__name__)
        self._machine.run(launch)


def simulated(order: int = 0) -> tuple[Any, list[str]]:
    """(operations by kernels in the simulator, the names of those that ran)."""
    launched: list[str] = []
    prepare = partial(InSimulator, machine=Simulator(order), launched=launched)
    return between.Kernels(prepare), launched


def changed(do: Any, **changes: Any) -> Any:
    """The operations, with others of their attributes."""
    made = copy.copy(do)
    vars(made).update(changes)
    return made


def launched_by_equal_answers(path: Any, tokens: int) -> list[str]:
    """Names of the kernels of a decoder in the simulator, which says the same as torch: two prompts
    of so many tokens, and two tokens of an answer."""
    do, launched = simulated(1)
    ids = torch.tensor([checks.prompt(files.WORDS, tokens), checks.prompt(files.WORDS, tokens, 1)])
    found = []
    for one in (operations.PLAIN, do):
        made = files.load(path, torch_products(dtype=torch.float32), operations=one)
        found.append(generate(made, ids, 2, keep=True))
    (said, logits), (others, of_kernels) = found
    assert torch.equal(said, others)
    for a, b in zip(logits, of_kernels, strict=True):
        torch.testing.assert_close(b, a, atol=2e-3 * float(a.std()), rtol=0)
    return launched


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_decoder_says_the_same_with_kernels(tmp_path: Any, architecture: str) -> None:
    """Greedy tokens and logits; float16 in the cache on either side."""
    path = files.write_tiny(
        tmp_path / "tiny.gguf", "q8_0", architecture=architecture,
        **LLAMA, **{"attention.head_count": 4, "attention.head_count_kv": 2},
    )  # fmt: skip
    launched = launched_by_equal_answers(path, 3)
    layers = LLAMA["block_count"]
    # a prompt and two tokens
    assert launched.count("rotary") == layers
    assert launched.count("attention") == 2 * layers
    assert launched.count("argmax") == 3
    assert launched.count("swiglu") == 3 * layers
    assert launched.count("add_and_norm") == 3 * (2 * layers + 1)


# --- norms that are no launches -------------------------------------------------------------------


def norms_and_products(launched: list[Any]) -> list[str]:
    """The names of these launches of a step, in order; A of a product may come in boxes."""
    of = "add_and_norm", "decode_bulk", "swiglu"
    return [kind for name, *_ in launched if (kind := name.removesuffix("_boxes")) in of]


def by_bulk_copies(request: Request, machine: Any) -> Choice:
    """`choose`."""
    return Choice.of(bulk.KERNEL, "A16", request, "asked for")


@pytest.fixture
def by_step_18(kernels: Any, monkeypatch: Any) -> Any:
    """All products of few tokens are step 18's."""
    monkeypatch.setattr(torch_operator, "choose", by_bulk_copies)
    monkeypatch.setattr(parts, "Gpu", lambda: kernels)
    return kernels


@pytest.mark.parametrize(
    ("architecture", "name", "batch"),
    [("llama", "q4_0", 1), ("qwen2", "q5_1", 2), ("qwen3", "q8_0", 5)],
)
def test_deferred_norms_in_a_decoder(
    by_step_18: Any, monkeypatch: Any, tmp_path: Any, architecture: str, name: str, batch: int
) -> None:
    """The logits of launched norms within the rounding of x, and only the first norm is one; where
    hidden features are a multiple of 128, gates are none."""
    monkeypatch.setattr(tiles, "multiprocessors", lambda: 8)  # two row tiles of gates and ups each
    layers = 2 if architecture == "llama" else 1
    sizes = LLAMA | {"feed_forward_length": 96 if architecture == "qwen3" else 128}
    sizes |= {"block_count": layers}
    path = files.write_tiny(tmp_path / "tiny.gguf", name, architecture=architecture, **sizes)
    ids = torch.tensor(checks.prompt(files.WORDS, batch))
    in_float64 = {"residual_dtype": torch.float64, "cache_dtype": torch.float64}
    exact = files.load(path, torch_products(dtype=torch.float64), **in_float64)
    found: dict[str, Any] = {"exact": exact.step(ids, exact.cache(batch, 4))}
    do = between.Kernels()
    for case, one in (("launched", changed(do, deferred=None)), ("deferred", do)):
        model = files.load(path, step_products("cpu"), operations=one)
        by_step_18.launched.clear()
        found[case] = model.step(ids, model.cache(batch, 4)).double()
        found[f"{case}, names"] = norms_and_products(by_step_18.launched)
    product = "decode_bulk"
    gates = ["swiglu"] if architecture == "qwen3" else []
    of_layer = [product, product, product, *gates, product]
    assert found["deferred, names"] == ["add_and_norm", *layers * of_layer, product]
    assert found["launched, names"].count("add_and_norm") == 2 * layers + 1
    mine, theirs, right = (found[case] for case in ("deferred", "launched", "exact"))
    assert 0 < checks.relative(mine.numpy(), theirs.numpy()) < 2e-3
    off, before = (checks.relative(one.numpy(), right.numpy()) for one in (mine, theirs))
    assert off < 1.5 * before


def test_norms_are_deferred_where_both_products_can(by_step_18: Any, tmp_path: Any) -> None:
    """Behind products of another kind, or before them, a norm is a launch, and leaves what the next
    one needs."""
    path = files.write_tiny(tmp_path / "tiny.gguf", "q4_0", **LLAMA)
    do, found = between.Kernels(), []
    for one in (do, changed(do, deferred=None)):
        model = files.load(path, step_products("cpu"), operations=one)
        qkv = model.layers[1].qkv
        model.layers[1].qkv = Concatenated([qkv])
        model.layers[0].out = NotAlone(model.layers[0].out)
        cache = model.cache(1, 4)
        by_step_18.launched.clear()
        found.append(model.step(torch.tensor([3]), cache))
        names = norms_and_products(by_step_18.launched)
        if one is do:
            product = "decode_bulk"
            assert names == [
                *("add_and_norm", product, product),  # out is of a kind that is not known
                *("add_and_norm", product, "swiglu", product),  # qkv is several
                *("add_and_norm", product, product),
                *(product, "swiglu", product, product),
            ]
    torch.testing.assert_close(found[0], found[1], atol=4e-3 * float(found[1].std()), rtol=0)


class Mirrored:
    """An `AllReduce` of two GPUs whose terms are equal: what one sends comes back to it."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.memory = torch.full((2, 8 * 256), -1, dtype=torch.int32).view(torch.float32)

    def places(self, count: int, turn: int) -> tuple[Any, Any]:
        self.asked.append(turn)
        return self.memory[turn, :count], self.memory[turn, :count]

    def begin(self, y: Any) -> Any:
        return lambda: (y, y)


@pytest.mark.parametrize("batch", [1, 3])
def test_norms_are_deferred_behind_sums_of_two_gpus(
    by_step_18: Any, monkeypatch: Any, tmp_path: Any, batch: int
) -> None:
    """All sums are within products, and logits are gathered behind the last norm."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 1)
    monkeypatch.setattr(
        torch.distributed, "all_gather_into_tensor", lambda y, mine, group: y.copy_(mine)
    )
    path = files.write_tiny(tmp_path / "tiny.gguf", "q4_0", **LLAMA)
    do, found, ids = between.Kernels(), [], torch.tensor(checks.prompt(files.WORDS, batch))
    for one in (do, changed(do, deferred=None)):
        model, sums = files.load(path, step_products("cpu"), operations=one), Mirrored()
        for layer in model.layers:
            layer.out = Summed(layer.out, sums, layer.out.n, 0)
            layer.down = Summed(layer.down, sums, layer.down.n, 1)
        model.output = Gathered(model.output, None, model.config.vocabulary)
        asked: list[Any] = []
        monkeypatch.setattr(
            parts.parallel_compile,
            "compile_ahead",
            lambda wanted, *_, into=asked, **__: into.extend(wanted),
        )
        model.compile_ahead([("exact", batch)], 2)
        assert len([one for one in asked if isinstance(one, OfArrays)]) == (6 if one is do else 0)
        sums.asked.clear()
        by_step_18.launched.clear()
        found.append(model.step(ids, model.cache(batch, 4)))
        launched = norms_and_products(by_step_18.launched).count("add_and_norm")
        if one is do:
            assert launched == 1
            turns = [turn for turn, _ in itertools.groupby(sums.asked)]
            assert turns == [0, 1] * len(model.layers)
            assert (sums.memory.view(torch.int32) == -1).all()
        else:
            assert launched == 2 * len(model.layers) + 1
    torch.testing.assert_close(found[0], found[1], atol=4e-3 * float(found[1].std()), rtol=0)


def compiled_ahead(
    host: Any, monkeypatch: Any, path: Any, ids: list[int], *modules: Any
) -> tuple[int, int]:
    """(launches that these modules ask for ahead of a step, kinds of kernels among them), which
    are all that it launches; of products the first alone is asked for besides."""
    asked: list[Any] = []
    monkeypatch.setattr(
        parts.parallel_compile, "compile_ahead", lambda wanted, *_, **__: asked.extend(wanted)
    )
    do, batch = between.Kernels(), len(ids)
    model = files.load(path, step_products("cpu"), operations=do)
    model.compile_ahead([("exact", batch)], 2)
    made = [pickle.loads(pickle.dumps(one)) for one in asked if isinstance(one, OfArrays)]
    assert not do._prepared, "nothing is loaded for that"
    host.runs = False
    model.step(torch.tensor(ids), model.cache(batch, 4))
    names = [module.__name__ for module in modules]
    loaded = [
        one.source
        for (make, *_), launch in do._prepared.items()
        for one in launch.args[0].loaded
        if make.__module__ in names
    ]
    ahead, later = (
        {(one.kernel, signature_of(one.args)) for one in launches}
        for launches in ([one.launches()[0] for one in made], loaded)
    )
    assert ahead == later
    (qkv,) = [one for one in asked if not isinstance(one, OfArrays)]
    assert qkv == model.layers[0].qkv.choice(batch)
    return len(made), len(ahead)


def test_kernels_around_deferred_norms_are_compiled_ahead(
    by_step_18: Any, monkeypatch: Any, tmp_path: Any
) -> None:
    monkeypatch.setattr(tiles, "multiprocessors", lambda: 8)
    sizes = LLAMA | {"feed_forward_length": 128}
    path = files.write_tiny(tmp_path / "tiny.gguf", "q4_0", **sizes)
    made, ahead = compiled_ahead(by_step_18, monkeypatch, path, [3, 4], deferred)
    assert made == 6, "a norm, two before one, gates, qkv and logits"
    assert ahead == 5, "those before a norm are alike here"


@pytest.fixture
def chained_layers(by_step_18: Any, monkeypatch: Any) -> Any:
    """A GPU of six SMs, where chains of two thread blocks run."""
    for module in (tiles, chained):
        monkeypatch.setattr(module, "multiprocessors", lambda: 2 + chain.BESIDE)
    monkeypatch.setattr(chain, "runs_here", lambda: True)
    monkeypatch.setattr(chain, "launch", partial(chain.launch, warps=4))  # the simulator is slow
    return by_step_18


SIZES_OF_CHAINS = LLAMA | {"embedding_length": 128, "feed_forward_length": 128, "block_count": 2}


def test_chains_in_a_decoder(chained_layers: Any, tmp_path: Any) -> None:
    """Two tokens, one after the other, as without chains. Where a product is none of step 18's,
    there are none."""
    path = files.write_tiny(tmp_path / "tiny.gguf", "q8_0", architecture="qwen2", **SIZES_OF_CHAINS)
    do, found = between.Kernels(), []
    for one in (do, changed(do, chains=None)):
        model = files.load(path, step_products("cpu"), operations=one)
        cache = model.cache(1, 4)
        chained_layers.launched.clear()
        found.append([model.step(torch.tensor([token]), cache) for token in (3, 5)])
        names = [name for name, *_ in chained_layers.launched]
        if one is do:
            of_layers = ["attention", "chain"] * 2
            assert names == ["add_and_norm", "decode_bulk", *of_layers, "decode_bulk"] * 2
        else:
            assert "chain" not in names
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, atol=4e-3 * float(theirs.std()), rtol=0)
    assert do.chains.takes(model.layers)
    model.layers[1].down = NotAlone(model.layers[1].down)
    assert not do.chains.takes(model.layers)


def test_chains_of_several_formats(chained_layers: Any, tmp_path: Any) -> None:
    """As of a Q4_K_M: downs and values of some layers are in another format. One kernel for all."""
    others = "blk.0.ffn_down", "blk.1.attn_v", "blk.1.attn_output"
    path = files.write_tiny(
        tmp_path / "tiny.gguf", "q8_0", architecture="qwen2", **SIZES_OF_CHAINS,
        formats={f"{one}.weight": "q5_1" for one in others},
    )  # fmt: skip
    do, found = between.Kernels(), []
    for one in (do, changed(do, chains=None)):
        model = files.load(path, step_products("cpu"), operations=one)
        assert do.chains.takes(model.layers)
        cache = model.cache(1, 4)
        chained_layers.launched.clear()
        found.append([model.step(torch.tensor([token]), cache) for token in (3, 5)])
        chains = [name for name, *_ in chained_layers.launched].count("chain")
        assert chains == (4 if one is do else 0)
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, atol=4e-3 * float(theirs.std()), rtol=0)


def test_chains_are_compiled_ahead(chained_layers: Any, monkeypatch: Any, tmp_path: Any) -> None:
    path = files.write_tiny(tmp_path / "tiny.gguf", "q8_0", **SIZES_OF_CHAINS)
    _, ahead = compiled_ahead(chained_layers, monkeypatch, path, [3], deferred, chained)
    assert ahead == 4, "a norm, attention, a chain and logits"


class NotAlone(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A product that something else is done with."""

    def __init__(self, product: Any) -> None:
        super().__init__()
        self.product, self.input_dtype = product, product.input_dtype
        self.accuracy = product.accuracy

    def forward(self, x: Any) -> Any:
        return self.product(x)


@pytest.mark.parametrize(
    ("h", "weight", "why"),
    [
        (torch.ones(9, 64), torch.ones(64), "more than eight tokens"),
        (torch.ones(2, 64).double(), torch.ones(64).double(), "float64"),
        (torch.ones(64, 2).T, torch.ones(64), "not contiguous"),
    ],
)
def test_which_norms_are_launches(h: Any, weight: Any, why: str) -> None:
    """Whatever the products are."""
    assert not between.Kernels().deferred.takes(None, None, h, weight), why


@pytest.mark.parametrize(
    ("h", "weight", "why"),
    [
        (torch.ones(2, 36), torch.ones(36), "not a multiple of 8 values"),
        (torch.ones(2, 32).double(), torch.ones(32).double(), "float64"),
        (torch.ones(32, 2).T, torch.ones(32), "not contiguous"),
        (torch.ones(65)[1:].view(2, 32), torch.ones(32), "not at a multiple of 16 bytes"),
    ],
)
def test_what_no_kernel_takes_is_torchs(h: Any, weight: Any, why: str) -> None:
    do, launched = simulated()
    y = torch.full_like(h, 0.5, dtype=torch.float16)
    found = do.add_and_norm(h, y, weight, 1e-5, torch.float16)
    wanted = operations.PLAIN.add_and_norm(h, y, weight, 1e-5, torch.float16)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), why
    assert not launched, why


@pytest.mark.parametrize(("cc", "mode"), [((7, 5), "plain"), ((8, 0), "kernels")])
def test_kernels_are_the_default_where_they_run(
    monkeypatch: Any, cc: tuple[int, int], mode: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: cc)
    made = between.chosen()
    assert (made.mode, made.swiglu_overlaps) == (mode, mode == "kernels")
    assert between.chosen("plain") is operations.PLAIN
    if mode != "kernels":
        with pytest.raises(ValueError, match="a GPU of compute capability"):
            between.chosen("kernels")


def test_a_launch_takes_addresses(gpu: Any, monkeypatch: Any) -> None:
    """What a call launches has the addresses of its tensors, zeros and workspace, and no others."""
    monkeypatch.setattr(between.operator, "current_stream", lambda device: 7)
    zeros = torch.zeros(256, dtype=torch.uint8)
    asked: list[int] = []
    counters = lambda size, *_: asked.append(size) or zeros  # noqa: E731
    monkeypatch.setattr(between.operator, "counters", counters)
    qkv, cache = torch.zeros(2, 6 * 64, dtype=torch.float16), torch.zeros(2, 2, 512, 64).half()
    table, position = torch.zeros(512, 64), torch.zeros((), dtype=torch.int64)
    y = torch.zeros(2, 4 * 64, dtype=torch.float16)
    arrays = (qkv, cache, position, table, table.clone(), y)
    launch = between.prepared(
        lambda *a, machine: between.of_attention(0.0, *a, machine=machine), arrays
    )
    launch(arrays)
    ((name, stream, values),) = gpu.launched
    assert (name, stream, asked) == ("attention", 7, [256])
    assert {one.data_ptr() for one in (*arrays, zeros)} <= set(values)


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 3, 16, 512])
def test_rows_on_a_gpu(cuda: Any, m: int) -> None:
    """Norms and gates beside torch's, each launched several times, with shapes of Llama 3 8B."""
    do, plain = between.Kernels(), operations.PLAIN
    made = torch.Generator(cuda).manual_seed(m)
    h = torch.randn((m, 4096), device=cuda, generator=made)
    weight = torch.rand(4096, device=cuda, generator=made)
    gates = torch.randn((m, 2 * 14336), device=cuda, generator=made).half()
    for _ in range(3):
        y = torch.randn((m, 4096), device=cuda, generator=made).half()
        wanted, x = plain.add_and_norm(h, y, weight, 1e-5, torch.float16)
        h, found = do.add_and_norm(h, y, weight, 1e-5, torch.float16)
        assert torch.equal(h, wanted)
        torch.testing.assert_close(found, x, rtol=2e-3, atol=1e-6)
        torch.testing.assert_close(
            do.rms_norm(h, weight, 1e-5, torch.float32),
            plain.rms_norm(h, weight, 1e-5, torch.float32), rtol=1e-5, atol=1e-6,
        )  # fmt: skip
        a, b = (one.swiglu(gates, torch.float16) for one in (do, plain))
        torch.testing.assert_close(a, b, rtol=2e-3, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 2, 5, 8])
@pytest.mark.parametrize("name", ["q4_0", "q5_1"])
def test_deferred_norms_on_a_gpu(cuda: Any, monkeypatch: Any, name: str, m: int) -> None:
    """Beside launched ones, with shapes of Llama 3 8B, and the same bits in a CUDA graph. Whatever
    the table of this GPU says, step 18 multiplies."""
    monkeypatch.setattr(torch_operator, "choose", by_bulk_copies)
    do, rng, epsilon = between.Kernels(), np.random.default_rng(m), 1e-5
    make, width, hidden = step_products(cuda), 4096, 14336
    down = make(bench.random_blocks(name, width, hidden, rng), False)
    gate_up = make(bench.random_blocks(name, 2 * hidden, width, rng), False)
    made = torch.Generator(cuda).manual_seed(m)
    h = torch.randn((m, width), device=cuda, generator=made)
    first, second = torch.rand((2, width), device=cuda, generator=made)
    a = torch.randn((m, hidden), device=cuda, generator=made).half()
    assert do.deferred.takes(down, gate_up, h, first)

    def deferred(h: Any) -> Any:
        _, left = do.deferred.launched((h,), first, epsilon, torch.float16, down)
        x, left = do.deferred.before(down, a, h, second, epsilon, left)
        y = do.deferred.after(gate_up, x, left, epsilon)
        return torch.cat([y, do.deferred.gated(gate_up, x, left, epsilon)], -1)

    launched, mine, again = h.clone(), h.clone(), h.clone()
    launched, x = do.add_and_norm(launched, down(a), second, epsilon, torch.float16)
    assert do.deferred.takes_gates(gate_up, down, m)
    found = deferred(mine)
    y, gates = found.split([2 * hidden, hidden], -1)
    right = gate_up(x)
    gate, up = right.float().chunk(2, -1)
    torch.testing.assert_close(mine, launched, rtol=1e-3, atol=1e-3 * float(launched.std()))
    atol = 5e-3 * float(right.float().std())
    torch.testing.assert_close(y, right, rtol=0, atol=atol)
    # gate and up may be off by as much, and no slope of silu is above 1.1
    off = (gates.float() - do.swiglu(right, torch.float16).float()).abs()
    assert (off <= atol * (1.1 * up.abs() + gate.abs()) + 2**-10 * gates.float().abs()).all()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = deferred(again)
    for _ in range(20):
        again.copy_(h)
        graph.replay()
        assert torch.equal(captured, found)
        assert torch.equal(again, mine)


def drawn_llama(name: str, layers: int, device: Any) -> Decoder:
    """Shapes of Llama 3 8B, random weights."""
    config = replace(bench.LLAMA_3_8B, layers=layers, vocabulary=4096)
    do, drawn = between.Kernels(), bench.Weights(config, name, device, "exact")
    table = bench.random_blocks(name, config.vocabulary, config.width, drawn.rng)
    rows = embedding_of(table, device)
    output = drawn.last.product(config.vocabulary, 0, True)
    return drawn.decoder(rows, do, lambda _, one, n, i: one.product(n, i), output)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["q4_0", "q5_1", "q8_0"])
def test_chains_on_a_gpu(cuda: Any, monkeypatch: Any, name: str) -> None:
    """Beside deferred norms, and then of two sequences, whose tokens are queued on two streams at
    once as CUDA graphs: the same tokens as one after the other."""
    monkeypatch.setattr(torch_operator, "choose", by_bulk_copies)
    model = drawn_llama(name, 3, cuda)
    if not model.operations.chains.takes(model.layers):
        pytest.skip("this GPU has no chains")
    found = []
    for one in (model.operations, changed(model.operations, chains=None)):
        model.operations = one
        cache = model.cache(1, 8)
        found.append([model.step(torch.tensor([i], device=cuda), cache).clone() for i in (3, 5, 7)])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, atol=4e-3 * float(theirs.std()), rtol=0)

    model.operations = changed(model.operations, chains=between.Kernels().chains)
    streams, of = [torch.cuda.Stream() for _ in range(2)], []
    for i, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            of.append(Greedy(model, model.cache(1, 256), torch.tensor([i], device=cuda)))
            of[-1].capture()
    kept = []
    for turns in ([0] * 200 + [1] * 200, [0, 1] * 200):
        torch.cuda.synchronize()
        for i, steps in enumerate(of):
            steps.cache.position.zero_()
            steps.token.fill_(i)
        torch.cuda.synchronize()
        for i in turns:
            with torch.cuda.stream(streams[i]):
                of[i].run()
        torch.cuda.synchronize()
        kept.append([steps.tokens.clone() for steps in of])
    for alone, at_once in zip(*kept, strict=True):
        assert torch.equal(alone, at_once)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 3, 16])
@pytest.mark.parametrize("shape", [(32, 8, 128), (14, 2, 64), (9, 3, 64), (16, 16, 128)])
def test_attention_on_a_gpu(cuda: Any, batch: int, shape: tuple[int, int, int]) -> None:
    """One CUDA graph at many positions; what lies behind the position is NaN for the kernel."""
    heads, kv, size = shape
    do, plain = between.Kernels(), operations.PLAIN
    made = torch.Generator(cuda).manual_seed(batch)
    length = 4352
    cache = torch.randn((batch, 2 * kv, length, size), device=cuda, generator=made).half()
    angles = torch.rand((length, size // 2), device=cuda, generator=made).repeat_interleave(2, 1)
    sign = torch.tensor([-1.0, 1.0], device=cuda).repeat(size // 2)
    tables = angles.cos().contiguous(), (angles.sin() * sign).contiguous()
    position = torch.zeros((), dtype=torch.int64, device=cuda)
    features = (heads + 2 * kv) * size
    qkv = torch.randn((batch, features), device=cuda, generator=made).half()
    own = cache.clone()

    def run(one: Any, into: Any) -> Any:
        return one.attention(qkv, into, position, *tables, heads, torch.float32)

    run(do, own)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(do, own)
    for at in (0, 1, 31, 127, 128, 700, 4095, 5):
        position.fill_(at)
        qkv.copy_(torch.randn((batch, features), device=cuda, generator=made))
        own.copy_(cache)
        own[:, :, at:] = torch.nan
        expected = cache.clone()
        wanted = run(plain, expected)
        graph.replay()
        # plain torch rounds queries and shares to float16
        torch.testing.assert_close(found, wanted, rtol=5e-3, atol=5e-3)
        torch.testing.assert_close(own[:, :, at], expected[:, :, at], rtol=1e-3, atol=1e-4)
        assert torch.equal(own[:, :, :at], cache[:, :, :at])


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 1000, 128255, 128256])
def test_the_likeliest_token_on_a_gpu(cuda: Any, count: int) -> None:
    do = between.Kernels()
    made = torch.Generator(cuda).manual_seed(count)
    for _ in range(3):
        logits = torch.randn((16, count), device=cuda, generator=made)
        assert torch.equal(do.argmax_of_rows(logits), logits.argmax(-1))


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "tokens"), [(1, 512), (3, 33), (1, 2)])
@pytest.mark.parametrize("shape", [(32, 8, 128), (9, 3, 64)])
def test_prompts_on_a_gpu(cuda: Any, batch: int, tokens: int, shape: tuple[int, int, int]) -> None:
    heads, kv, size = shape
    made = torch.Generator(cuda).manual_seed(tokens)
    features = (heads + 2 * kv) * size
    qkv = torch.randn((batch * tokens, features), device=cuda, generator=made).half()
    angles = torch.rand((768, size // 2), device=cuda, generator=made).repeat_interleave(2, 1)
    sin = angles.sin() * torch.tensor([-1.0, 1.0], device=cuda).repeat(size // 2)
    position = torch.zeros((), dtype=torch.int64, device=cuda)
    found = []
    for one in (between.Kernels(), operations.PLAIN):
        cache = torch.zeros((batch, 2 * kv, 768, size), device=cuda).half()
        y = one.attention(qkv, cache, position, angles.cos(), sin, heads, torch.float16)
        found.append((y, cache))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-3, atol=2e-3)


def test_tokens_on_two_streams_take_turns(monkeypatch: Any) -> None:
    """A chain needs all multiprocessors: the next one, of whatever stream, waits for it. What is
    captured waits when it is replayed."""

    class Stream:
        device_index = 0

        def __init__(self) -> None:
            self.waited: list[Stream] = []

        def wait_stream(self, other: Stream) -> None:
            self.waited.append(other)

    turns, device, one, two = Turns(), torch.device("cuda", 0), Stream(), Stream()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for stream in (one, one, two, two, one):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, found=stream: found)
        with turns.taken(device):
            pass
    assert (one.waited, two.waited, turns.captured) == ([two], [one], 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with turns.taken(device), turns.taken(torch.device("cpu")):
        pass
    assert (one.waited, two.waited, turns.captured) == ([two], [one], 1)
