"""A llama: products of this project or of torch, everything else the same for both.

    model = files.load("model.gguf", on_gpu())              # or any other maker of products
    tokens, _ = generate(model, ids, 64)                    # greedy, in a CUDA graph on a GPU

A `Product` is a layer's place in a model that decodes: its calls follow each other on one stream,
which `steps.nn.linear.QuantLinear` cannot know of its own. So the memory in which thread blocks leave
sums for each other is set to zero once and not at each call, and nothing is cast that the functions
between products can write as it is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from qformats import WEIGHT_FORMATS
from qformats.codec import format_of
from results.decoder.operations import PLAIN, Operations
from steps.api import parallel_compile
from steps.api.choice import choose_packed, written_dtype
from steps.api.launch_template import LaunchTemplate
from steps.api.machines import Gpu
from steps.components.activations.layouts import GATED
from steps.contract import Shape
from steps.nn import operator as operator
from steps.nn.linear import QuantLinear

if TYPE_CHECKING:
    from torch import Tensor, nn

torch = operator.torch
if not TYPE_CHECKING:
    nn = torch.nn

FEW: Final = 16
"""Tokens at a time that are of so many sequences, and not of a prompt."""
ROUNDED_TO: Final = 256
"""Positions that a cache is rounded up to: another length is compiled anew."""


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes of a llama. head: values of a head, of which the first `rotated` are turned; base: of
    the angles; epsilon: of the norms."""

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    epsilon: float = 1e-5
    base: float = 10000.0
    rotated: int = 0

    @property
    def qkv(self) -> int:
        """Features of a layer's queries, keys and values together."""
        return (self.heads + 2 * self.kv_heads) * self.head


LLAMA_3_8B: Final = Config(32, 4096, 14336, 32, 8, 128, 128256, 1e-5, 500000.0, 128)


# --- products -------------------------------------------------------------------------------------


Gate = Callable[["Tensor", Any], "Tensor"]
"""`operations.gated`."""


class Workspace:
    """Memory of plans, for one stream: zero at first, and left as the next call must find it.

    It is kept for good, as CUDA graphs hold its address.
    """

    def __init__(self) -> None:
        self._held: dict[LaunchTemplate, Any] = {}

    def of(self, made: LaunchTemplate, device: Any) -> Tensor:
        """uint8 [at least 1]."""
        if (held := self._held.get(made)) is None:
            held = torch.zeros(max(made.nbytes, 1), dtype=torch.uint8, device=device)
            self._held[made] = held
        return held


class Product(nn.Module):
    """y[M, N] = x[M, K] @ dequantize(W)^T through the plans of the front door.

    packed : name of a packing -> its arrays on the GPU (`steps.api.choice.packings`).
    output : "float16": y is float16 where the step for so many tokens writes it, else float32.
    accuracy : may be changed between calls, where both packings are there.
    """

    def __init__(
        self,
        format: str,
        n: int,
        k: int,
        packed: Mapping[str, Sequence[Tensor]],
        workspace: Workspace,
        accuracy: str = "exact",
        output: str = "float16",
    ) -> None:
        super().__init__()
        self.format, self.n, self.k, self.packed = format, n, k, dict(packed)
        self.workspace, self.accuracy, self.output = workspace, accuracy, output

    def wanted(self, m: int, machine: Any, input: str = "float16") -> parallel_compile.Wanted:
        """The launches for m tokens, as `steps.api.parallel_compile` takes them."""
        size = m, self.n, self.k
        choice = choose_packed(self.format, Shape(*size), self.packed, machine, self.accuracy)
        return choice.work, size, written_dtype(choice.step, self.output), input

    def template(self, m: int, input: str = "float16") -> LaunchTemplate:
        """The launches for m tokens; `input` is how x comes, where the step can read it so."""
        size, device = (m, self.n, self.k), next(iter(self.packed.values()))[0].device
        with torch.cuda.device(device):
            return operator.template(
                self.format, size, self.packed, self.accuracy, device, self.output, input
            )

    def takes(self, m: int) -> Any:
        """The dtype of x for m tokens. In float16, values beyond 65504 are infinite, as they are in
        any float16 llama."""
        return getattr(torch, self.template(m).reads)

    def forward(self, x: Tensor) -> Tensor:
        """x: [M, K] as it `takes` it, contiguous."""
        return self._by(self.template(len(x)), x)

    def gated(self, y: Tensor, gate: Gate) -> Tensor:
        """Of silu(gate) * up, y = [gate, up], [M, 2 K]: in the pass before the product, or by
        `gate` where the step has no such pass."""
        if y.dtype is torch.float16 and (made := self.template(len(y), GATED)).reads == GATED:
            return self._by(made, y)
        return self(gate(y, self.takes(len(y))))

    def _by(self, made: LaunchTemplate, x: Tensor) -> Tensor:
        y = x.new_empty((len(x), self.n), dtype=getattr(torch, made.writes))
        arrays = [one.data_ptr() for one in self.packed[made.packing]]
        work = self.workspace.of(made, x.device)
        made(x.data_ptr(), y.data_ptr(), arrays, work.data_ptr(), operator.stream_of(x))
        return y


class Plain(nn.Module):
    """The same by torch.matmul: weights [N, K] in a float dtype, x and y too."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.k = weight.shape[1]

    def takes(self, m: int) -> Any:
        return self.weight.dtype

    def gated(self, y: Tensor, gate: Gate) -> Tensor:
        return self(gate(y, self.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


class Together(nn.Module):
    """Products of the same x, side by side: of matrices whose types differ."""

    def __init__(self, products: Sequence[Any]) -> None:
        super().__init__()
        self.products = nn.ModuleList(products)

    def takes(self, m: int) -> Any:
        first, *others = (one.takes(m) for one in self.products)
        return first if all(one is first for one in others) else torch.float32

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([one(x.to(one.takes(len(x)))) for one in self.products], -1)


Maker = Callable[[np.ndarray, bool], Any]
"""(blocks [N, K/32] or float32 [N, K], whether these are the logits) -> a product."""


def by_steps(device: Any = "cuda", accuracy: str = "exact") -> Maker:
    """Products through this project. Logits are float32 in any case."""
    workspace = Workspace()

    def make(weights: np.ndarray, last: bool) -> Product:
        layer = QuantLinear.from_blocks(weights, accuracy=accuracy).to(device)
        n, k = layer.out_features, layer.in_features
        return Product(
            layer.format, n, k, layer.packed, workspace, accuracy, "float32" if last else "float16"
        )

    return make


def by_torch(device: Any = "cpu", dtype: Any = torch.float64) -> Maker:
    """Products of the dequantized weights, by torch."""

    def make(weights: np.ndarray, last: bool) -> Plain:
        values = format_of(weights).dequantize(weights) if weights.dtype.names else weights
        return Plain(torch.from_numpy(np.array(values)).to(device, dtype))

    return make


# --- the model ------------------------------------------------------------------------------------


class Embedding(nn.Module):
    """Rows of a table, dequantized when they are looked up: it lies on the device as blocks, its
    fields apart, or as the floats that the file has."""

    def __init__(self, planes: Sequence[Tensor], centre: int, wide: Any, looked_up: Any) -> None:
        super().__init__()
        self.planes, self.centre = tuple(planes), centre
        self.wide, self._looked_up = wide, looked_up

    @classmethod
    def of(cls, table: np.ndarray, device: Any, wide: Any, looked_up: Any) -> Embedding:
        """table: blocks [V, K/32], or floats [V, K], which blocks of other formats become."""
        if table.dtype.names and format_of(table).name not in WEIGHT_FORMATS:
            table = format_of(table).dequantize(table)
        if table.dtype.names is None:
            floats = torch.from_numpy(np.array(table)).to(device)
            return cls([floats], 0, wide, looked_up)
        fmt = format_of(table)
        empty = np.empty(0, np.float16)
        fields = [
            table[name] if name in (fmt.dtype.names or ()) else empty
            for name in ("d", "m", "qs", "qh")
        ]
        planes = [torch.from_numpy(np.array(one)).to(device) for one in fields]
        return cls(planes, {"q4_0": 8, "q5_0": 16}.get(fmt.name, 0), wide, looked_up)

    def forward(self, ids: Tensor) -> Tensor:
        """[*ids, width] of ids, int64."""
        if len(self.planes) == 1:
            return self.planes[0][ids].to(self.wide)
        return self._looked_up(ids, self.planes, self.centre).to(self.wide)


@dataclass(slots=True)
class Layer:
    """The products of a layer, and the weights of its two norms, [width]."""

    before_attention: Tensor
    qkv: Any
    out: Any
    before_hidden: Tensor
    gate_up: Any
    down: Any

    @property
    def products(self) -> tuple[Any, ...]:
        return self.qkv, self.out, self.gate_up, self.down


class Cache:
    """Keys and values of up to `length` positions, and how many there are, on the device.

    layers: [B, 2 kv_heads, length, head] of each layer. cos, sin: [length, head], for
    `operations.turned`.
    """

    def __init__(
        self, config: Config, batch: int, length: int, frequencies: np.ndarray, like: Tensor
    ) -> None:
        shape = (batch, 2 * config.kv_heads, length, config.head)
        self.layers = [torch.zeros_like(like).expand(shape).clone() for _ in range(config.layers)]
        self.at = torch.zeros((), dtype=torch.int64, device=like.device)
        angles = torch.from_numpy(np.arange(length)[:, None] * frequencies.repeat(2))
        signs = torch.tensor([-1.0, 1.0], dtype=torch.float64).repeat(len(frequencies))
        wide = torch.promote_types(like.dtype, torch.float32)
        self.cos = angles.cos().to(like.device, wide)
        self.sin = (angles.sin() * signs).to(like.device, wide)
        self.batch, self.length = batch, length


class Decoder:
    """A llama. keys: the dtype of the cache, float16 unless it is a reference."""

    def __init__(
        self,
        config: Config,
        embedding: Embedding,
        layers: Sequence[Layer],
        norm: Tensor,
        output: Any,
        *,
        frequencies: np.ndarray | None = None,
        keys: Any = torch.float16,
        operations: Operations = PLAIN,
    ) -> None:
        self.config, self.embedding, self.layers = config, embedding, layers
        self.norm, self.output, self.operations, self.keys = norm, output, operations, keys
        self.frequencies = angles(config) if frequencies is None else frequencies

    @property
    def device(self) -> Any:
        return self.norm.device

    @property
    def products(self) -> Iterable[Any]:
        """All of them, but what `Together` has inside."""
        return (*(one for layer in self.layers for one in layer.products), self.output)

    def ask(self, accuracy: str) -> None:
        """The accuracy of all products from now on."""
        for product in self.products:
            for one in getattr(product, "products", [product]):
                one.accuracy = accuracy

    def compile_ahead(
        self, cases: Sequence[tuple[str, int]], jobs: int, say: Callable[[str], None] = print
    ) -> int:
        """Kernels for (accuracy, tokens) of each case in `jobs` processes (`steps.api.parallel_compile`).

        Logits are those of so many sequences as there are tokens where these are few, else of one.
        """
        wanted: list[parallel_compile.Wanted] = []
        before, machine = self.output.accuracy, Gpu()
        inner = [
            (one, GATED if one is layer.down else "float16")
            for layer in self.layers
            for one in layer.products
        ]
        for accuracy, m in cases:
            self.ask(accuracy)
            last = self.output, "float16", m if m <= FEW else 1
            for product, given, tokens in (*((*one, m) for one in inner), last):
                for one in getattr(product, "products", [product]):
                    each = one.wanted(tokens, machine, given)
                    if each not in wanted:  # layers are alike
                        wanted.append(each)
        self.ask(before)
        return parallel_compile.compile_ahead(wanted, machine, say, jobs)

    def cache(self, batch: int, length: int) -> Cache:
        """For at least `length` positions."""
        length = -(-length // ROUNDED_TO) * ROUNDED_TO
        like = torch.empty((), dtype=self.keys, device=self.device)
        return Cache(self.config, batch, length, self.frequencies, like)

    def prefill(self, ids: Tensor, cache: Cache, every: bool = False) -> Tensor:
        """Logits [B, V] behind the last of ids [B, T], or [B, T, V] behind every one of them.

        The cache begins anew and holds T positions then.
        """
        cache.at.zero_()
        logits = self._forward(ids, cache, every)
        cache.at.fill_(ids.shape[1])
        return logits

    def step(self, ids: Tensor, cache: Cache) -> Tensor:
        """Logits [B, V] behind one more token each, ids [B]. Nothing waits for the GPU."""
        logits = self._forward(ids[:, None], cache, False)
        cache.at.add_(1)
        return logits

    def _forward(self, ids: Tensor, cache: Cache, every: bool) -> Tensor:
        config, do = self.config, self.operations
        batch, tokens = ids.shape
        m = batch * tokens
        h = self.embedding(ids).reshape(m, config.width)
        y: Any = None
        for layer, held in zip(self.layers, cache.layers, strict=True):
            takes = layer.qkv.takes(m)
            if y is None:
                x = do.normed(h, layer.before_attention, config.epsilon, takes)
            else:
                h, x = do.added(h, y, layer.before_attention, config.epsilon, takes)
            place = (held, cache.at, cache.cos, cache.sin)
            x = do.attended(layer.qkv(x), *place, config.heads, layer.out.takes(m))
            y = layer.out(x)
            h, x = do.added(h, y, layer.before_hidden, config.epsilon, layer.gate_up.takes(m))
            y = layer.down.gated(layer.gate_up(x), do.gated)
        if not every and tokens > 1:
            h, y = (one.view(batch, tokens, -1)[:, -1].contiguous() for one in (h, y))
        _, x = do.added(h, y, self.norm, config.epsilon, self.output.takes(len(h)))
        logits: Tensor = self.output(x)
        return logits.view(batch, tokens, -1) if every else logits


def angles(config: Config, factors: np.ndarray | None = None) -> np.ndarray:
    """Radians that a position turns each pair of a head by, float64 [head/2]: base^(-2i/rotated) /
    factors, and none for what is beyond `rotated`."""
    rotated = config.rotated or config.head
    turned = config.base ** (-np.arange(0, rotated, 2) / rotated)
    if factors is not None:
        turned = turned / factors
    return np.concatenate([turned, np.zeros((config.head - rotated) // 2)])


# --- greedy generation ----------------------------------------------------------------------------


class Greedy:
    """One token more of each sequence at a `run`, of which nothing comes to the host.

    record: int64 [B, length], the token at each position from `cache.at` on. logits: of the last
    run. On a GPU `capture` puts a run into a CUDA graph, which `run` then replays.
    """

    def __init__(self, model: Decoder, cache: Cache, token: Tensor) -> None:
        self.model, self.cache, self.token = model, cache, token
        self.record = token.new_zeros((cache.batch, cache.length))
        self.logits = token
        self._graph: Captured | None = None

    def run(self) -> None:
        if self._graph is not None:
            self._graph.replay()
            return
        self.record.index_copy_(1, self.cache.at.view(1), self.token[:, None])
        self.logits = self.model.step(self.token, self.cache)
        self.token.copy_(self.model.operations.likeliest(self.logits))

    def capture(self) -> None:
        """A run before it compiles and loads what is needed; it leaves nothing behind."""
        token, at = self.token.clone(), self.cache.at.clone()
        self.run()
        self._graph = Captured(self.run)
        self.token.copy_(token)
        self.cache.at.copy_(at)


class Captured:
    """A CUDA graph of work that has run before; it has not run again. What the work holds is kept,
    for the graph reads it where it lies."""

    def __init__(self, work: Callable[[], Any]) -> None:
        torch.cuda.synchronize()
        self._work, self._graph = work, torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            work()

    def replay(self) -> None:
        self._graph.replay()


@torch.no_grad()
def generate(
    model: Decoder, ids: Tensor, count: int, *, graph: bool | None = None, keep: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """The likeliest `count` tokens behind ids [B, T], one after another: int64 [B, count].

    graph : whether steps are in a CUDA graph; by default on a GPU.
    keep  : also give the logits [B, V] that each token was chosen by.
    """
    _, tokens = ids.shape
    cache = model.cache(len(ids), tokens + count)
    logits = model.prefill(ids, cache)
    steps = Greedy(model, cache, model.operations.likeliest(logits))
    if ids.is_cuda if graph is None else graph:
        steps.capture()
    kept = [logits]
    for _ in range(count):
        steps.run()
        if keep:
            kept.append(steps.logits.clone())
    return steps.record[:, tokens : tokens + count].clone(), kept[:count] if keep else []
