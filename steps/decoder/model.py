"""A decoder of the llama family whose matrix products are this project's or torch's.

    model = files.load("model.gguf", step_products())       # or torch_products()
    tokens, _ = generate(model, ids, 64)                    # greedy, in a CUDA graph on a GPU

A `Product` multiplies packed weights, made by a `steps.nn.linear.QuantLinear`, and says which
dtypes it reads and writes: so the operations between products write the dtype that the next one
reads. The operations are given to a `Decoder` (`steps.decoder.kernel_operations.chosen`).
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from qformats.codec import format_of
from steps.compile import parallel_compile
from steps.compile.dry_run import Recipe
from steps.decoder import rotary
from steps.decoder.operations import PLAIN, Operations
from steps.driver.machines import Gpu
from steps.kernels.experts.contract import ExpertsRequest
from steps.kernels.parts.activations.layouts import GATED
from steps.nn import operator as operator
from steps.nn.experts import PARTS, QuantExperts
from steps.nn.linear import QuantLinear
from steps.nn.rows import QuantEmbedding
from steps.product.choice import Choice
from steps.product.experts import ExpertsChoice, choose

if TYPE_CHECKING:
    from torch import Tensor, nn

torch = operator.torch
if not TYPE_CHECKING:
    nn = torch.nn

MOST_SEQUENCES: Final = 16
"""Up to so many tokens at a time are one each of as many sequences; more are a prompt."""
CACHE_STEP: Final = 256
"""Positions; lengths of caches are multiples of it."""


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes of a llama. head_dim: values of a head, of which the first `rotated` have a rotary
    embedding with the frequencies' base `base` and their `scaling`; epsilon: of the norms;
    context: positions that the model is made for, 0 where nobody says. experts: of a layer, each
    with `hidden` features, of which a token has `chosen`; 0 where a model is dense."""

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    epsilon: float = 1e-5
    base: float = 10000.0
    rotated: int = 0
    scaling: rotary.Scaling = rotary.UNSCALED
    context: int = 0
    experts: int = 0
    chosen: int = 0

    @property
    def qkv(self) -> int:
        """Features of a layer's queries, keys and values together."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


LLAMA_3_8B: Final = Config(32, 4096, 14336, 32, 8, 128, 128256, 1e-5, 500000.0, 128)
QWEN3_30B_A3B: Final = Config(
    48, 2048, 768, 32, 4, 128, 151936, 1e-6, 1e6, 128, experts=128, chosen=8
)


# --- products -------------------------------------------------------------------------------------


Swiglu = Callable[["Tensor", Any], "Tensor"]
"""`operations.swiglu`."""


class Product(nn.Module):
    """y[M, N] = x[M, K] @ dequantize(W)^T by `steps.nn.operator.multiply`.

    packed : name of a layout -> its arrays on the GPU (`steps.product.choice.packings`).
    output : "float16": y is float16 where the kernel for so many tokens writes it, else float32.
    accuracy : may be changed between calls, where both layouts are there.
    family : "A8" rounds x to Q8_1; by default the kernels that read 16 bits of it as they are.
    bias : float32 [N] on the GPU, added to y.
    wide : y of up to so many tokens is float32, as it is one rank's term of a sum.
    """

    wide = 0

    def __init__(
        self,
        format: str,
        n: int,
        k: int,
        packed: Mapping[str, Sequence[Tensor]],
        accuracy: str = "exact",
        output: str = "float16",
        bias: Tensor | None = None,
        family: str | None = None,
    ) -> None:
        super().__init__()
        self.format, self.n, self.k, self.packed = format, n, k, dict(packed)
        self.accuracy, self.output, self.bias, self.family = accuracy, output, bias, family
        self._weights: dict[str, operator.Weights] = {}

    @property
    def weights(self) -> operator.Weights:
        """The packed weights in the present accuracy."""
        found = self._weights.get(self.accuracy)
        if found is None:
            rest = self.accuracy, self.packed, False, self.family
            found = operator.Weights(self.format, self.n, self.k, *rest)
            self._weights[self.accuracy] = found
        return found

    def choice(self, m: int, input: str = "float16") -> Choice:
        """The kernel for m tokens. input: the dtype of x, or "gated"; where the kernel does not
        read it, `Choice.reading` says what it reads instead."""
        bias = None if self.bias is None else "float32"
        return self.weights.choice(m, input, self._output(m), bias)

    def _output(self, m: int) -> str:
        return "float32" if m <= self.wide else self.output

    def input_dtype(self, m: int) -> Any:
        """The dtype that x must have for m tokens. In float16, values beyond 65504 become infinite,
        as in any float16 llama."""
        return getattr(torch, self.choice(m).reading.dtype)

    def output_dtype(self, m: int) -> Any:
        """The dtype of y for m tokens."""
        choice = self.choice(m)
        adds = self.bias is None or choice.bias is not None
        return getattr(torch, choice.writes if adds else "float32")

    def forward(self, x: Tensor) -> Tensor:
        """y of x [M, K], contiguous, of `input_dtype`."""
        return operator.multiply(x, self.bias, self.weights, self.output_dtype(len(x)))

    def after_swiglu(self, y: Tensor, swiglu: Swiglu) -> Tensor:
        """The product of silu(gate) * up, y = [gate, up] of [M, 2 K]. The kernel's activation pass
        computes that, or `swiglu` where the kernel has no such pass."""
        m = len(y)
        if y.dtype is torch.float16 and self.choice(m, GATED).reading.source == GATED:
            dtype = self.output_dtype(m)
            return operator.multiply(y, self.bias, self.weights, dtype, gated=True)
        return self(swiglu(y, self.input_dtype(m)))


class Plain(nn.Module):
    """A product by torch: weights [N, K], x and y in one float dtype; bias [N] or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias, self.k = bias, weight.shape[1]

    def input_dtype(self, m: int) -> Any:
        return self.weight.dtype

    def after_swiglu(self, y: Tensor, swiglu: Swiglu) -> Tensor:
        return self(swiglu(y, self.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class Concatenated(nn.Module):
    """Products of the same x with matrices of different types, their outputs side by side."""

    def __init__(self, products: Sequence[Any]) -> None:
        super().__init__()
        self.products = nn.ModuleList(products)

    def input_dtype(self, m: int) -> Any:
        first, *others = (one.input_dtype(m) for one in self.products)
        return first if all(one is first for one in others) else torch.float32

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([one(x.to(one.input_dtype(len(x)))) for one in self.products], -1)


class Experts(nn.Module):
    """The experts of a layer, one product after another: a reference.

    products: of gates, of ups and of downs, by expert.
    """

    def __init__(self, gates: Sequence[Any], ups: Sequence[Any], downs: Sequence[Any]) -> None:
        super().__init__()
        self.products, self.count = nn.ModuleList([*gates, *ups, *downs]), len(gates)

    def input_dtype(self, m: int) -> Any:
        return self.products[0].input_dtype(m)

    def forward(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        """y [M, width] of x [M, width]: the sum of `shares` [M, chosen] times what experts `ids`
        make of it. Waits for ids."""
        y = x.new_zeros(x.shape, dtype=shares.dtype)
        for expert in ids.unique().tolist():
            token, slot = (ids == expert).nonzero(as_tuple=True)
            gate, up, down = (self.products[expert + i * self.count] for i in range(3))
            both = torch.cat([gate(x[token]), up(x[token])], -1)
            made = down.after_swiglu(both, PLAIN.swiglu)
            y.index_add_(0, token, shares[token, slot, None] * made)
        return y


class StepExperts(QuantExperts):
    """The experts of a layer by the kernels of `steps.kernels.experts`: two launches, three at
    more tokens. Nothing waits for the GPU."""

    accuracy = "exact"

    @property
    def k(self) -> int:
        return self.hidden

    def input_dtype(self, m: int) -> Any:
        return torch.float16

    def choices(self, m: int, chosen: int) -> list[ExpertsChoice]:
        """The kernels for m tokens, each of which has `chosen` experts."""

        def request(part: str, n: int, k: int, **rest: Any) -> ExpertsRequest:
            size = self.formats[part], m, chosen, self.num_experts, n, k
            return ExpertsRequest(*size, "float16", "float16", "int32", **rest)

        inner, k = self.inner, self.hidden
        together = self.formats["gate"] == self.formats["up"]
        first = [request("gate", 2 * inner, k, gate="silu", leads=True)]
        if not together:
            first = [request(part, inner, k) for part in ("gate", "up")]
        rest: dict[str, Any] = {"per_slot": True, "router": "float32", "follows": together}
        wanted = *first, request("down", k, inner, **rest)
        return [choose(one, operator._machine()) for one in wanted]


@dataclass(frozen=True, slots=True)
class Maker:
    """Makes the products of a decoder.

    product : (blocks [N, K/32] or float32 [N, K], whether y are the logits, bias float32 [N] or
              None) -> a product.
    of_experts : (gates, ups, downs), each blocks [E, N, K/32] -> y of (x, ids, shares), see
              `Experts.forward`; by default a product for each.
    """

    product: Callable[[np.ndarray, bool, np.ndarray | None], Any]
    of_experts: Callable[[np.ndarray, np.ndarray, np.ndarray], Any] | None = None

    def __call__(self, weights: np.ndarray, last: bool, bias: np.ndarray | None = None) -> Any:
        return self.product(weights, last, bias)

    def experts(self, gates: np.ndarray, ups: np.ndarray, downs: np.ndarray) -> Any:
        if self.of_experts is not None:
            return self.of_experts(gates, ups, downs)
        return Experts(*([self(one, False) for one in each] for each in (gates, ups, downs)))


def step_products(
    device: Any = "cuda", accuracy: str = "exact", family: str | None = None
) -> Maker:
    """Makes products by this project's kernels, see `Product`. Logits are always float32."""

    def make(weights: np.ndarray, last: bool, bias: np.ndarray | None = None) -> Product:
        layer = QuantLinear.from_blocks(weights, bias, accuracy=accuracy).to(device)
        size = layer.format, layer.out_features, layer.in_features
        output = "float32" if last else "float16"
        return Product(*size, layer.packed, accuracy, output, layer.bias, family)

    def experts(*parts: np.ndarray) -> StepExperts:
        blocks = (
            (torch.from_numpy(np.array(one).view(np.uint8).reshape(*one.shape[:2], -1)), one)
            for one in parts
        )
        gates, ups, downs = ((raw, format_of(one).name) for raw, one in blocks)
        made: StepExperts = StepExperts(gates, ups, downs).to(device)
        for part in PARTS:  # a GPU has them packed
            setattr(made, f"{part}_blocks", getattr(made, f"{part}_blocks").to("meta"))
        return made

    return Maker(make, experts)


def torch_products(device: Any = "cpu", dtype: Any = torch.float64) -> Maker:
    """Makes products by torch, of the dequantized weights."""

    def moved(values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(values)).to(device, dtype)

    def make(weights: np.ndarray, last: bool, bias: np.ndarray | None = None) -> Plain:
        values = format_of(weights).dequantize(weights) if weights.dtype.names else weights
        return Plain(moved(values), None if bias is None else moved(bias))

    return Maker(make)


# --- the model ------------------------------------------------------------------------------------


def embedding_of(table: np.ndarray, device: Any) -> Any:
    """The embedding of a table on a device: of blocks [V, K/32 or K/256] a `QuantEmbedding`, whose
    rows are float32; of floats [V, K] torch's."""
    if table.dtype.names is None:
        return nn.Embedding.from_pretrained(torch.from_numpy(np.array(table)).to(device))
    blocks = torch.from_numpy(np.array(table).view(np.uint8).reshape(len(table), -1))
    return QuantEmbedding(blocks.to(device), format_of(table).name, torch.float32)


@dataclass(slots=True)
class Mixture:
    """The experts of a layer, in place of products that all tokens have.

    router: [E, width], whose product with a token are the logits of its experts. chosen: how many
    it has. normed: whether their shares add up to 1. experts: an `Experts` or `StepExperts`.
    shared: of the expert that all tokens have, its products of gates and ups and of downs, and the
            weights [1, width] of the sigmoid that multiplies what it makes; None without.
    """

    router: Tensor
    chosen: int
    normed: bool
    experts: Any
    shared: tuple[Any, Any, Tensor] | None = None

    @property
    def products(self) -> tuple[Any, ...]:
        return self.experts, *(() if self.shared is None else self.shared[:2])


@dataclass(slots=True)
class Layer:
    """The products of a layer, and the weights of its two norms, [width].

    gate_up, down: None where there is a `mixture`.
    head_norms: weights [head_dim] of the norms of queries and of keys, and epsilon, or None.
    """

    before_attention: Tensor
    qkv: Any
    out: Any
    before_hidden: Tensor
    gate_up: Any = None
    down: Any = None
    head_norms: tuple[Tensor, Tensor, float] | None = None
    mixture: Mixture | None = None

    @property
    def products(self) -> tuple[Any, ...]:
        """Experts count as one."""
        last = (self.gate_up, self.down) if self.mixture is None else self.mixture.products
        return self.qkv, self.out, *last


class Cache:
    """Keys and values of up to `length` positions, and how many there are, on the device.

    layers: [B, 2 kv_heads, length, head_dim] of each layer. position: int64 [], the next one that
    is written. cos, sin: [length, head_dim], for `operations.rotary`. shown: what launches that run
    at the same time show each other (`chained`, `expert_layers`), once a token has needed it.
    """

    def __init__(
        self, config: Config, batch: int, length: int, frequencies: np.ndarray, like: Tensor
    ) -> None:
        shape = (batch, 2 * config.kv_heads, length, config.head_dim)
        self.layers = [torch.zeros_like(like).expand(shape).clone() for _ in range(config.layers)]
        self.position = torch.zeros((), dtype=torch.int64, device=like.device)
        angles = torch.from_numpy(np.arange(length)[:, None] * frequencies.repeat(2))
        signs = torch.tensor([-1.0, 1.0], dtype=torch.float64).repeat(len(frequencies))
        size = torch.ones_like(signs)
        size[: config.rotated or config.head_dim] = config.scaling.magnitude
        wide = torch.promote_types(like.dtype, torch.float32)
        self.cos = (angles.cos() * size).to(like.device, wide)
        self.sin = (angles.sin() * size * signs).to(like.device, wide)
        self.batch, self.length = batch, length
        self.shown: Any = None


@dataclass(slots=True)
class Part:
    """Tokens of each sequence that go through a layer together: all of them, or half of a prompt.

    first, position: where the first of a prompt stands; for the host, and int64 [] on the device.
    h: the residual [B * tokens, width]. y: what the last product adds to it, None before there is
    one, or a function that returns the terms of which it is the sum (`parallel.Summed.begin`).
    x, left: of deferred norms (`deferred.DeferredNorms`). x: the next norm as the last product
    began it, which has then added y to h already; else None. left: what the last norm left for the
    next.
    """

    tokens: int
    first: int
    position: Tensor
    h: Tensor
    y: Any = None
    x: Tensor | None = None
    left: Tensor | None = None

    def begin(self, product: Any, x: Tensor) -> None:
        """Make y by a product of x, or begin to, where ranks add it up."""
        self.y = getattr(product, "begin", product)(x)

    def terms(self) -> tuple[Tensor, ...]:
        """One tensor or two, whose sum is y."""
        return self.y() if callable(self.y) else (self.y,)


class Decoder:
    """A llama. embedding: see `embedding_of`. norm: of the logits; in the dtype of the residual.
    cache_dtype: float16, or more in a reference."""

    def __init__(
        self,
        config: Config,
        embedding: Any,
        layers: Sequence[Layer],
        norm: Tensor,
        output: Any,
        *,
        frequencies: np.ndarray | None = None,
        cache_dtype: Any = torch.float16,
        operations: Operations = PLAIN,
    ) -> None:
        self.config, self.embedding, self.layers = config, embedding, layers
        self.norm, self.output, self.operations = norm, output, operations
        self.cache_dtype = cache_dtype
        self.frequencies = rotary_frequencies(config) if frequencies is None else frequencies

    @property
    def device(self) -> Any:
        return self.norm.device

    @property
    def products(self) -> Iterable[Any]:
        """All products; a `Concatenated` counts as one, and so do experts."""
        return (*(one for layer in self.layers for one in layer.products), self.output)

    def set_accuracy(self, accuracy: str) -> None:
        """Set the accuracy of all products from here on."""
        for product in self.products:
            for one in getattr(product, "products", [product]):
                one.accuracy = accuracy

    def compile_ahead(
        self,
        cases: Sequence[tuple[str, int]],
        jobs: int,
        say: Callable[[str], None] = print,
        report: Callable[[int, int], None] = lambda done, of: None,
    ) -> int:
        """Compile the kernels of products, and of deferred norms, for (accuracy, tokens) of each
        case in `jobs` processes; returns how many were compiled.

        Up to `MOST_SEQUENCES` tokens are one each of as many sequences, more are one prompt.
        Kernels that are kept on disk are not compiled. say, report: as for
        `steps.compile.parallel_compile.compile_ahead`.
        """
        wanted: list[Recipe] = []
        before, deferred = self.output.accuracy, self.operations.deferred
        inner = [
            (one, GATED if one is layer.down and not self.operations.swiglu_overlaps else "float16")
            for layer in self.layers
            for one in layer.products
        ]
        for accuracy, m in cases:
            self.set_accuracy(accuracy)
            last = self.output, "float16", m if m <= MOST_SEQUENCES else 1
            sizes, others = self._sizes(1, m) if m > MOST_SEQUENCES else [m], set()
            if m == 1 and self._takes_chains():
                rest = self.cache(1, 1), self.config.heads, self.config.epsilon
                chains = self.operations.chains
                chained, others = chains.ahead(self.layers, self.norm, self.output, *rest)
                wanted += chained
            elif deferred is not None and m <= MOST_SEQUENCES:
                norms, others = deferred.ahead(self._norms(), m, self.config.epsilon)
                wanted += norms
            whole = self.operations.expert_layers
            if m == 1 and whole is not None and self.is_whole(made := self.cache(1, 1), m):
                given = self.layers, self.norm, made, self.config.heads, self.config.epsilon
                wanted += whole.ahead(*given)
                others = {one for layer in self.layers for one in layer.products}
                others.discard(self.layers[0].qkv)
            for product, input, tokens in (*((*one, n) for one in inner for n in sizes), last):
                if product in others:
                    continue
                if isinstance(product, StepExperts):
                    choices = product.choices(tokens, self.config.chosen)
                else:
                    several = getattr(product, "products", [product])
                    choices = [one.choice(tokens, input) for one in several]
                wanted += [one for one in choices if one not in wanted]  # layers are alike
        self.set_accuracy(before)
        return parallel_compile.compile_ahead(wanted, Gpu(), say, jobs, report=report)

    def cache(self, batch: int, length: int) -> Cache:
        """A cache for at least `length` positions."""
        length = -(-length // CACHE_STEP) * CACHE_STEP
        like = torch.empty((), dtype=self.cache_dtype, device=self.device)
        return Cache(self.config, batch, length, self.frequencies, like)

    def prefill(self, ids: Tensor, cache: Cache, every: bool = False) -> Tensor:
        """Logits [B, V] after the last of ids [B, T], or, with `every`, [B, T, V] after each one.

        The cache is filled from its first position, with T positions.
        """
        cache.position.zero_()
        logits = self._forward(ids, cache, every)
        cache.position.fill_(ids.shape[1])
        return logits

    def step(self, ids: Tensor, cache: Cache) -> Tensor:
        """Logits [B, V] after one more token each, ids [B]. Nothing waits for the GPU."""
        logits = self._forward(ids[:, None], cache, False)
        cache.position.add_(1)
        return logits

    def _sizes(self, sequences: int, tokens: int) -> list[int]:
        """Tokens of each sequence that go through a layer together, part by part."""
        parts = getattr(self.layers[0].out, "parts", None)
        found: list[int] = parts(sequences, tokens) if parts else [tokens]
        return found

    def _ends(self) -> list[tuple[Tensor, Any]]:
        """For each layer, the weight of the norm behind it, and the product that reads it."""
        ends = [(one.before_attention, one.qkv) for one in self.layers[1:]]
        return [*ends, (self.norm, self.output)]

    def _norms(self) -> Iterator[tuple[Any, Tensor, Any, Any]]:
        """Each norm but the first: (product before, weight, product after, `down` where the product
        after is that of gates and ups, else None)."""
        for layer, end in zip(self.layers, self._ends(), strict=True):
            yield layer.out, layer.before_hidden, layer.gate_up, layer.down
            yield layer.down, *end, None

    def _forward(self, ids: Tensor, cache: Cache, every: bool) -> Tensor:
        parts, first = [], 0
        for some in ids.split(self._sizes(*ids.shape), 1):
            h = self.embedding(some).to(self.norm.dtype).reshape(-1, self.config.width)
            position = cache.position + first if first else cache.position
            parts.append(Part(some.shape[1], first, position, h))
            first += some.shape[1]
        if self.is_whole(cache, len(ids) * ids.shape[1]):
            with TURNS.taken(self.device):
                logits = self._in_two_launches(parts[0].h, cache)
            return logits[:, None] if every else logits
        ends = self._ends()
        if ids.numel() == 1 and self._takes_chains():
            with TURNS.taken(self.device):
                logits = self._chained(parts[0], cache)
            return logits[:, None] if every else logits
        for layer, end, keys_values in zip(self.layers, ends, cache.layers, strict=True):
            for part in parts:
                self._attend(layer, part, keys_values, cache)
            for part in parts:
                self._feed(layer, part, *end)
        if parts[0].x is not None:  # there is one part, of one token of each sequence
            logits = self._of_normed(parts[0], *ends[-1])
            return logits[:, None] if every else logits
        rows = [(part.h, *part.terms()) for part in parts]
        if every:
            shape = len(ids), -1, self.config.vocabulary
            return torch.cat([self._logits(one).view(shape) for one in rows], 1)
        last, tokens = rows[-1], parts[-1].tokens
        if tokens > 1:
            last = tuple(one.view(len(ids), tokens, -1)[:, -1].contiguous() for one in last)
        return self._logits(last)

    def _takes_chains(self) -> bool:
        chains = self.operations.chains
        return chains is not None and chains.takes(self.layers)

    def _chained(self, part: Part, cache: Cache) -> Tensor:
        """Logits after one token, by `chained.Chains`."""
        do, epsilon, ends = self.operations, self.config.epsilon, self._ends()
        if cache.shown is None:
            cache.shown = do.chains.memory(self.layers)
        cache.shown.empty()
        first, last = self.layers[0], self.layers[-1]
        x, left = do.deferred.launched(
            (part.h,), first.before_attention, epsilon, torch.float16, first.out
        )
        qkv = first.qkv(x)
        for layer, (weight, after), keys_values, memory in zip(
            self.layers, ends, cache.layers, cache.shown.layers, strict=True
        ):
            cached = keys_values, part.position, cache.cos, cache.sin
            polls = layer is not first and do.chains.attends(keys_values, self.config.heads)
            if polls:
                a = do.chains.attention(qkv, cached, memory, layer.head_norms)
            else:
                a = do.attention(qkv, *cached, self.config.heads, torch.float16, layer.head_norms)
            following = after if layer is not last else None
            given = a, part.h, left, memory, cache.shown.formats, not polls, epsilon
            qkv = do.chains.of_layer(layer, weight, following, *given)
            x, left, part.h = (memory[i].view(1, -1) for i in (3, 5, 6))
        if self._defers(part, last.down, self.norm, self.output):
            part.x, part.left = x, left
        return self._of_normed(part, self.norm, self.output)

    def is_whole(self, cache: Cache, tokens: int) -> bool:
        """Whether each layer of so many tokens is attention and one launch more."""
        whole = self.operations.expert_layers
        if whole is None or tokens > 1:
            return False
        taken: bool = whole.takes(self.layers, self.config.heads, cache.layers[0])
        return taken

    def _in_two_launches(self, h: Tensor, cache: Cache) -> Tensor:
        """Logits after one token, by `expert_layers.ExpertLayers`."""
        do, first, epsilon = self.operations, self.layers[0], self.config.epsilon
        qkv = first.qkv(do.rms_norm(h, first.before_attention, epsilon, torch.float16))
        heads = self.config.heads
        do.expert_layers.run(self.layers, self.norm, qkv, h, cache, heads, epsilon)
        dtype = self.output.input_dtype(1)
        logits: Tensor = self.output(do.rms_norm(h, self.norm, epsilon, dtype))
        return logits

    def _attend(self, layer: Layer, part: Part, keys_values: Tensor, cache: Cache) -> None:
        """Attention, up to the product behind it."""
        m, do = len(part.h), self.operations
        follows = layer.out, layer.before_hidden, layer.gate_up
        qkv = self._of_normed(part, layer.before_attention, layer.qkv, follows)
        cached = keys_values, part.position, cache.cos, cache.sin
        given = self.config.heads, layer.out.input_dtype(m), layer.head_norms, part.first
        self._add(part, do.attention(qkv, *cached, *given), *follows)

    def _feed(self, layer: Layer, part: Part, weight: Tensor, after: Any) -> None:
        """The feed-forward products. weight, after: of the norm that follows, and the product that
        reads it."""
        if layer.mixture is not None:
            self._mix(layer.mixture, part, layer.before_hidden)
            return
        do, follows, m = self.operations, (layer.down, weight, after), len(part.h)
        if part.x is not None and do.deferred.takes_gates(layer.gate_up, layer.down, m):
            given = layer.gate_up, part.x, part.left, self.config.epsilon
            self._add(part, do.deferred.gated(*given), *follows)
            return
        y = self._of_normed(part, layer.before_hidden, layer.gate_up, follows)
        if do.swiglu_overlaps:
            self._add(part, do.swiglu(y, layer.down.input_dtype(len(y))), *follows)
        else:
            part.y = layer.down.after_swiglu(y, do.swiglu)

    def _mix(self, mixture: Mixture, part: Part, weight: Tensor) -> None:
        """The products of experts, of the norm with this weight."""
        do, (y,) = self.operations, part.terms()
        part.h, x, ids, shares = do.route(
            part.h, y, weight, self.config.epsilon, mixture.experts.input_dtype(len(y)),
            mixture.router, mixture.chosen, mixture.normed,
        )  # fmt: skip
        y = mixture.experts(x, ids, shares)
        part.y = y
        if mixture.shared is not None:
            gate_up, down, gate = mixture.shared
            both = gate_up(x.to(gate_up.input_dtype(len(x))))
            z = down(do.swiglu(both, down.input_dtype(len(x))))
            share = torch.sigmoid(nn.functional.linear(x.to(gate.dtype), gate))
            terms = y, (share * z).to(y.dtype)
            part.y = lambda: terms

    def _defers(self, part: Part, product: Any, weight: Tensor, after: Any) -> bool:
        """Whether the norm between two products is deferred: no launch of its own."""
        deferred = self.operations.deferred
        one_each = deferred is not None and part.tokens == 1
        return one_each and deferred.takes(product, after, part.h, weight)

    def _add(self, part: Part, x: Tensor, product: Any, weight: Tensor, after: Any) -> None:
        """Add a product of x to the residual, or leave that to the norm that follows."""
        if self._defers(part, product, weight, after):
            given = part.h, weight, self.config.epsilon, part.left
            part.x, part.left = self.operations.deferred.before(product, x, *given)
        else:
            part.x = None
            part.begin(product, x)

    def _of_normed(
        self, part: Part, weight: Tensor, product: Any, follows: tuple[Any, ...] | None = None
    ) -> Tensor:
        """A product of the norm of the residual, after y is added to it. follows: the product
        before the next norm, that norm's weight and the product after it."""
        deferred, epsilon = self.operations.deferred, self.config.epsilon
        if part.x is not None:
            y: Tensor = deferred.after(product, part.x, part.left, epsilon)
        elif follows is not None and self._defers(part, *follows):
            rows = part.h, *(() if part.y is None else part.terms())
            rest = weight, epsilon, product.input_dtype(len(part.h)), follows[0]
            x, part.left = deferred.launched(rows, *rest)
            y = product(x)
        else:
            y = product(self._normed(part, weight, product))
        return y

    def _normed(self, part: Part, weight: Tensor, product: Any) -> Tensor:
        """What a product reads: the norm of the residual, after y is added to it."""
        if part.y is None:
            dtype = product.input_dtype(len(part.h))
            return self.operations.rms_norm(part.h, weight, self.config.epsilon, dtype)
        part.h, x = self._add_and_norm((part.h, *part.terms()), weight, product)
        return x

    def _logits(self, rows: Sequence[Tensor]) -> Tensor:
        """Logits [M, V] of the residual, and the terms of what the last product adds to it."""
        _, x = self._add_and_norm(rows, self.norm, self.output)
        logits: Tensor = self.output(x)
        return logits

    def _add_and_norm(
        self, rows: Sequence[Tensor], weight: Tensor, product: Any
    ) -> tuple[Tensor, Tensor]:
        """rows: the residual, and the one or two terms of y."""
        h, y, *other = rows
        rest = weight, self.config.epsilon, product.input_dtype(len(h))
        return self.operations.add_and_norm(h, y, *rest, *other)


def rotary_frequencies(config: Config, factors: np.ndarray | None = None) -> np.ndarray:
    """Radians per position for each pair of a head, float64 [head_dim/2]: `rotary.frequencies`, and
    0 beyond `rotated`."""
    rotated = config.rotated or config.head_dim
    found = rotary.frequencies(rotated, config.base, config.scaling, factors)
    return np.concatenate([found, np.zeros((config.head_dim - rotated) // 2)])


# --- greedy generation ----------------------------------------------------------------------------


class Greedy:
    """Decoding: each `run` adds one token to each sequence. Nothing comes to the host.

    tokens: int64 [B, length], the token at each position. logits: of the last run. choose: tokens
    [B] of logits [B, V]; the likeliest by default. On a GPU `capture` puts a run into a CUDA graph,
    which `run` then replays.
    """

    def __init__(
        self,
        model: Decoder,
        cache: Cache,
        token: Tensor,
        choose: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.model, self.cache, self.token = model, cache, token
        self.choose = choose or model.operations.argmax_of_rows
        self.tokens = token.new_zeros((cache.batch, cache.length))
        self.logits = token
        self._graph: CapturedGraph | None = None

    def run(self) -> None:
        if self._graph is not None:
            self._graph.replay()
            return
        self.tokens.index_copy_(1, self.cache.position.view(1), self.token[:, None])
        self.logits = self.model.step(self.token, self.cache)
        self.token.copy_(self.choose(self.logits))

    @property
    def captured(self) -> bool:
        return self._graph is not None

    def capture(self) -> None:
        """Run once, so that all kernels are compiled and loaded, undo that, and capture a run."""
        token, position = self.token.clone(), self.cache.position.clone()
        self.run()
        self._graph = CapturedGraph(self.run)
        self.token.copy_(token)
        self.cache.position.copy_(position)


class Turns:
    """Tokens that are made by chains take turns on a GPU, whatever streams they are queued on: a
    chain (`steps.kernels.between.chain`) needs all SMs at once, and of two that begin at the same
    time each could hold some of them and wait for the others.

    captured: how often a turn was wanted while a stream was captured. What replays such a graph
    takes the turn then.
    """

    def __init__(self) -> None:
        self._last: dict[int, Any] = {}  # of each GPU, the stream that had the last turn
        self._queueing = threading.Lock()
        self.captured = 0

    @contextmanager
    def taken(self, device: Any) -> Iterator[None]:
        """What is queued on the current stream of a device meanwhile begins when all is done that
        was queued on another stream, up to the end of its last turn."""
        if device.type != "cuda":
            yield
        elif torch.cuda.is_current_stream_capturing():
            self.captured += 1
            yield
        else:
            stream = torch.cuda.current_stream(device)
            with self._queueing:
                last = self._last.get(stream.device_index, stream)
                if last != stream:
                    stream.wait_stream(last)
                self._last[stream.device_index] = stream
                yield


TURNS: Final = Turns()
"""Of this process. Processes do not share a GPU's SMs, but under MPS: see
`steps.kernels.between.chain.runs_here`."""


class CapturedGraph:
    """A CUDA graph of `work`, which has run before. It keeps the memory that the graph uses."""

    def __init__(self, work: Callable[[], Any]) -> None:
        torch.cuda.synchronize()
        gc.collect()  # a graph of no more use that is deleted within the capture would end it
        self._work, self._graph, before = work, torch.cuda.CUDAGraph(), TURNS.captured
        # Of several GPUs: threads of NCCL may ask for events meanwhile.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            work()
        device = torch.device("cuda", torch.cuda.current_device())
        self._turn = partial(TURNS.taken, device) if TURNS.captured > before else nullcontext

    def replay(self) -> None:
        with self._turn():
            self._graph.replay()


@torch.no_grad()
def generate(
    model: Decoder, ids: Tensor, count: int, *, graph: bool | None = None, keep: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """The `count` tokens after ids [B, T] by greedy decoding, int64 [B, count], and logits.

    graph : whether each token's work is replayed from a CUDA graph; by default on a GPU.
    keep  : also return the logits [B, V] that each token was chosen from; else none.
    """
    _, tokens = ids.shape
    cache = model.cache(len(ids), tokens + count)
    logits = model.prefill(ids, cache)
    steps = Greedy(model, cache, model.operations.argmax_of_rows(logits))
    if ids.is_cuda if graph is None else graph:
        steps.capture()
    kept = [logits]
    for _ in range(count):
        steps.run()
        if keep:
            kept.append(steps.logits.clone())
    return steps.tokens[:, tokens : tokens + count].clone(), kept[:count] if keep else []
