"""Tokens a second with the shapes of a model and random weights, beside float16 torch.matmul.

Two decoders differ in their products: ours over blocks, and torch's over the same weights in
float16, those of experts by `torch._grouped_mm` in bfloat16. At batch 1 norms and gates of a dense
model are within ours (`steps.decoder.deferred`), and a layer with experts is attention and one
launch more (`steps.decoder.expert_layers`). Weights are random bytes with sensible scales, not
quantized floats: 1024 rows of each kind of matrix are drawn and packed. Each layer repeats them in
memory of its own, from another row on, so that all weights come from memory. torch's experts have
the memory of `COPIES` layers, which is more than a cache holds: all of them would be 58 GB.

Each case is a CUDA graph of either side. Rounds take turns, and medians are reported:

    decode    one graph is a step of greedy decoding, argmax included; a round is `STEPS` of them
              after `CONTEXT` tokens, batch 1 and 16
    prefill   one graph is a prompt of 512 or 4096 tokens, with the logits of the last one

"fast" is the same decoder with accuracy="fast", whose steps requantize the weights to int8 with one
scale per row. It is for prompts: decoding takes the same step either way.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from qformats import FORMATS
from qformats.repack import TILE_GROUP, TILE_ROWS
from results.measure.loop import Timing, ratio
from steps.decoder.model import (
    LLAMA_3_8B,
    QWEN3_30B_A3B,
    CapturedGraph,
    Config,
    Decoder,
    Greedy,
    Layer,
    Mixture,
    Plain,
    Product,
    StepExperts,
    embedding_of,
    nn,
    torch,
)
from steps.decoder.operations import Operations
from steps.nn import operator as operator
from steps.product.choice import packings

SHAPES: Final = {"Llama 3 8B": LLAMA_3_8B, "Qwen3 30B-A3B": QWEN3_30B_A3B}
COPIES: Final = 4
DRAWN: Final = 1024  # rows of each kind of matrix
ROWS: Final = TILE_GROUP * TILE_ROWS  # the rows of one piece of a fragment-packed layout
BATCHES: Final = (1, 16)
PROMPTS: Final = (512, 4096)
CONTEXT: Final = 128
STEPS: Final = 64
ROUNDS: Final = {"decode": 9, "prefill 512": 15, "prefill 4096": 5, "products": 15}
WEIGHT: Final = 0.02  # root mean square of a weight


def random_blocks(format_name: str, n: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """Blocks [n, k/32] whose values have mean 0 and a root mean square of about `WEIGHT`."""
    fmt = FORMATS[format_name]
    raw = rng.integers(0, 256, (n, k // 32 * fmt.block_bytes), np.uint8)
    blocks: np.ndarray = raw.view(fmt.dtype)
    top = 2**fmt.bits - 1
    d = WEIGHT * 12**0.5 / top * rng.uniform(0.8, 1.2, blocks.shape)
    blocks["d"] = d
    if "m" in (fmt.dtype.names or ()):
        blocks["m"] = d * (-top / 2)
    return blocks


@dataclass(slots=True)
class Drawn:
    """Rows of one kind of matrix on the GPU: packed for the steps, and dequantized to float16."""

    format: str
    k: int
    packed: dict[str, list[Any]]
    half: Any

    @classmethod
    def of(
        cls, format_name: str, k: int, rng: np.random.Generator, device: Any, accuracy: str = "fast"
    ) -> Drawn:
        """accuracy: "fast" packs for exact and fast steps, "exact" for these alone."""
        blocks = random_blocks(format_name, DRAWN, k, rng)
        packed = {
            step.pack.__name__: [operator.upload(one, device) for one in step.pack(blocks)]
            for step in packings(format_name, operator.capability(device), accuracy)
        }
        values = torch.from_numpy(FORMATS[format_name].dequantize(blocks))
        return cls(format_name, k, packed, values.to(device, torch.float16))

    def product(self, n: int, first: int, last: bool = False) -> Product:
        """Our product with [n, k], from drawn row `first` * `ROWS` on."""
        packed = {
            name: [_repeated(one, DRAWN // ROWS, -(-n // ROWS), first) for one in arrays]
            for name, arrays in self.packed.items()
        }
        return Product(self.format, n, self.k, packed, "exact", "float32" if last else "float16")

    def plain(self, n: int, first: int) -> Plain:
        """torch's product with the same weights."""
        return Plain(_repeated(self.half, DRAWN // ROWS, -(-n // ROWS), first)[:n])


class GroupedExperts(nn.Module):
    """Experts by `torch._grouped_mm` in bfloat16, as that of float16 waits for the GPU; of weights
    [E, 2 I, K] and [E, K, I]."""

    def __init__(self, gate_up: Any, down: Any) -> None:
        super().__init__()
        self.gate_up, self.down = (one.bfloat16().transpose(1, 2) for one in (gate_up, down))
        self.k = gate_up.shape[2]

    def input_dtype(self, m: int) -> Any:
        return torch.bfloat16

    def forward(self, x: Any, ids: Any, shares: Any) -> Any:
        chosen, order = ids.flatten().sort()
        every = torch.arange(len(self.down), device=ids.device, dtype=ids.dtype)
        ends = torch.searchsorted(chosen, every, right=True, out_int32=True)
        y = torch._grouped_mm(x[order // ids.shape[1]], self.gate_up, offs=ends)
        gate, up = y.chunk(2, -1)
        y = torch._grouped_mm(nn.functional.silu(gate) * up, self.down, offs=ends)
        placed = torch.empty_like(y).index_copy_(0, order, y).view(*ids.shape, -1)
        return torch.bmm(shares.bfloat16()[:, None], placed)[:, 0]


def _repeated(array: Any, parts: int, wanted: int, first: int) -> Any:
    """A copy of `wanted` of the equal `parts` of an array, cyclically from part `first` on."""
    turns = (torch.arange(wanted, device=array.device) + first) % parts
    return array.view(parts, -1)[turns].reshape(-1, *array.shape[1:])


class Weights:
    """Drawn rows of each kind of matrix of a decoder, or of a rank's share of one, by the name of
    the first of such matrices; `last` those of its output."""

    def __init__(self, config: Config, format_name: str, device: Any, accuracy: str = "fast"):
        self.rng, width, hidden = np.random.default_rng(0), config.width, config.hidden
        self.kinds = [
            (name, Drawn.of(format_name, k, self.rng, device, accuracy), n)
            for name, n, k in (
                ("attn_q", config.qkv, width),
                ("attn_output", width, config.heads * config.head_dim),
                ("ffn_up", 2 * hidden, width),
                ("ffn_down", width, hidden),
            )
        ]
        self.last = Drawn.of(format_name, width, self.rng, device, accuracy)
        self._config, self._norm = config, torch.ones(width, device=device)

    def decoder(
        self,
        embedding: Any,
        operations: Operations,
        make: Callable[[str, Drawn, int, int], Any],
        output: Any,
        experts: Callable[[int], Any] | None = None,
    ) -> Decoder:
        """make: (name, drawn, n, layer) -> a product. output: the last product. experts: (layer) ->
        those of a layer, where the model has any: it also has norms of heads then."""
        layers, norm, config = [], self._norm, self._config
        router = torch.randn(config.experts, config.width, device=norm.device) * WEIGHT
        head_norms = (*norm[None, : config.head_dim].expand(2, -1).clone(), config.epsilon)
        for i in range(config.layers):
            kinds = self.kinds if experts is None else self.kinds[:2]
            qkv, out, *rest = (make(name, drawn, n, i) for name, drawn, n in kinds)
            layer = Layer(norm, qkv, out, norm, *rest)
            if experts is not None:
                layer.head_norms = head_norms
                layer.mixture = Mixture(router.roll(i, 0), config.chosen, True, experts(i))
            layers.append(layer)
        return Decoder(config, embedding, layers, norm, output, operations=operations)

    def experts(self, i: int) -> StepExperts:
        """Ours of a layer: packed as one matrix of all experts, which have whole pieces each."""
        count, made = self._config.experts, []
        kinds = dict(zip(("gate_up", "down"), self.kinds[2:], strict=True))
        for _, drawn, n in kinds.values():
            shape = count, n, drawn.k // 32 * FORMATS[drawn.format].block_bytes
            made.append(torch.empty(shape, dtype=torch.uint8, device="meta"))
        up, down = made
        half, of = up[:, : up.shape[1] // 2], self.last.format
        layer = StepExperts((half, of), (half, of), (down, of))
        for part, (_, drawn, n) in kinds.items():
            for j, one in enumerate(drawn.packed["tiles"]):
                pieces = _repeated(one, DRAWN // ROWS, count * n // ROWS, i)
                layer.register_buffer(f"{part}_{j}", pieces, persistent=False)
        return layer

    def grouped(self, i: int) -> GroupedExperts:
        """torch's, of the same weights."""
        count = self._config.experts
        up, down = (
            _repeated(drawn.half, DRAWN // ROWS, count * n // ROWS, i).view(count, n, -1)
            for _, drawn, n in self.kinds[2:]
        )
        pairs = up.view(count, -1, 2, TILE_ROWS, up.shape[-1]).transpose(1, 2)
        return GroupedExperts(pairs.reshape(up.shape), down)


def models(
    config: Config, format_name: str, operations: Operations, device: Any
) -> tuple[Decoder, Decoder]:
    """(our decoder, the float16 baseline); they share embedding and norms."""
    drawn, count = Weights(config, format_name, device), config.vocabulary
    table = random_blocks(format_name, count, config.width, drawn.rng)
    embedding = embedding_of(table, device)
    rest, mixed = (embedding, operations), config.experts > 0
    grouped = [drawn.grouped(i) for i in range(COPIES if mixed else 0)]
    return (
        drawn.decoder(
            *rest,
            lambda _, one, n, i: one.product(n, i),
            drawn.last.product(count, 0, True),
            drawn.experts if mixed else None,
        ),
        drawn.decoder(
            *rest,
            lambda _, one, n, i: one.plain(n, i),
            drawn.last.plain(count, 0),
            (lambda i: grouped[i % COPIES]) if mixed else None,
        ),
    )


# --- timing ---------------------------------------------------------------------------------------

Work = Callable[[], None]


def seconds(work: Work) -> float:
    """GPU time of work that is queued here."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3


def in_turn(
    sides: Sequence[Work | None], rounds: int, wait: Callable[[], Any] = lambda: None
) -> list[list[float]]:
    """GPU seconds of each side in each round, after one that does not count; sides take turns in
    beginning a round. `wait` is called before each side; of one that this process has no part in
    (None) it is all, and NaN counts."""
    took: list[list[float]] = [[] for _ in sides]
    for number in range(-1, rounds):
        for i in range(len(sides)):
            side = (i + number) % len(sides)
            wait()
            work = sides[side]
            one = math.nan if work is None else seconds(work)
            if number >= 0:
                took[side].append(one)
    return took


def ms(took: Mapping[str, Sequence[float]], graphs: int = 1) -> dict[str, float]:
    """Milliseconds of a graph by side, of seconds in each round of so many graphs."""
    return {side: Timing.of(one).us / graphs * 1e-3 for side, one in took.items()}


def row(
    case: str,
    tokens: int,
    graphs: int,
    took: Mapping[str, Sequence[float]],
    alone: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    """A case: tokens a second of each side (medians of `rounds`), and their ratio to the baseline,
    float16 torch (medians of the rounds' ratios). None: not measured.

    took: seconds by side, "exact", "fp16" and perhaps "fast", in each round of `tokens` and so many
    graphs. alone: those of the products of one graph, one after another with nothing between.
    ms, products_ms: of a graph. spread: (80 % - 20 % quantile) / median of the exact side.
    """
    rate = {side: tokens / Timing.of(one).us * 1e6 for side, one in took.items()}
    exact = Timing.of(took["exact"])
    return {
        "case": case,
        "exact": rate["exact"],
        "fast": rate.get("fast"),
        "fp16": rate["fp16"],
        "x_exact": ratio(took["fp16"], took["exact"]),
        "x_fast": ratio(took["fp16"], took["fast"]) if "fast" in took else None,
        "rounds": exact.rounds,
        "spread": exact.spread,
        "ms": ms(took, graphs),
        "products_ms": ms(alone),
    }


def captured(work: Callable[[], Any]) -> Work:
    """A CUDA graph of work that has run once."""
    work()
    return CapturedGraph(work).replay


def graph(model: Decoder, kind: str, count: int, accuracy: str = "exact") -> tuple[Work, Any]:
    """(a round: a prompt of `count` tokens, or `STEPS` tokens of each of as many sequences, after
    `CONTEXT` tokens; the logits that a prompt writes)."""
    if kind == "prefill":
        model.set_accuracy(accuracy)
        cache = model.cache(1, count)
        ids = torch.arange(count, device=model.device)[None] * 31 % model.config.vocabulary
        kept: list[Any] = []

        def prompt() -> None:
            kept[:] = [model.prefill(ids, cache)]

        work = captured(prompt)
        model.set_accuracy("exact")
        return work, kept[0]
    cache = model.cache(count, CONTEXT + STEPS)
    for keys_values in cache.layers:
        keys_values.normal_()
    cache.position.fill_(CONTEXT)
    steps = Greedy(model, cache, torch.arange(count, device=model.device))
    steps.capture()

    def decode() -> None:
        cache.position.fill_(CONTEXT)
        for _ in range(STEPS):
            steps.run()

    return decode, None


class RandomInputs:
    """Random values as products of a decoder read them, the same for all of one kind."""

    def __init__(self, model: Decoder, tokens: int) -> None:
        self._device, self._tokens = model.device, tokens
        self._kept: dict[Any, Any] = {}

    def x(self, product: Any, tokens: int | None = None) -> Any:
        m = tokens or self._tokens
        key = (m, product.k), product.input_dtype(m)
        if key not in self._kept:
            self._kept[key] = torch.randn(key[0], device=self._device, dtype=key[1])
        return self._kept[key]


def products(model: Decoder, kind: str, count: int, accuracy: str = "exact") -> Work:
    """The products of such a graph alone, without what ranks tell each other."""
    model.set_accuracy(accuracy)
    inputs = RandomInputs(model, count)

    ids = torch.randperm(max(1, model.config.experts), device=model.device, dtype=torch.int32)
    ids = torch.stack([ids.roll(17 * i)[: model.config.chosen] for i in range(count)])
    shares = torch.full(ids.shape, 1 / 8, device=model.device)

    def multiply(product: Any, m: int) -> None:
        if isinstance(product, StepExperts | GroupedExperts):
            product(inputs.x(product, m), ids, shares)
            return
        for one in getattr(product, "products", [product]):
            one(inputs.x(one, m))

    def work() -> None:
        for layer in model.layers:
            for product in layer.products:
                multiply(product, count)
        multiply(model.output, 1 if kind == "prefill" else count)

    made = captured(work)
    model.set_accuracy("exact")
    return made


# --- measuring ------------------------------------------------------------------------------------


def case_of(kind: str, count: int) -> tuple[str, int, int]:
    """(what a row calls it, tokens of a round, graphs of a round)."""
    if kind == "prefill":
        return f"prefill {count}", count, 1
    return f"decode, batch {count}", count * STEPS, STEPS


def telling() -> Callable[[str], None]:
    """Prints how long it has taken so far, too."""
    start = time.perf_counter()
    return lambda what: print(f"{time.perf_counter() - start:6.1f} s  {what}")


def facts(operations: Operations) -> dict[str, Any]:
    """What a record says of how it was measured."""
    return {
        "between_products": operations.mode,
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "context": CONTEXT,
        "steps": STEPS,
    }


def bytes_of(product: Product | StepExperts) -> int:
    """Of the packed weights that an exact product reads."""
    if isinstance(product, StepExperts):
        return product.device_bytes
    return sum(one.nbytes for one in product.packed[next(iter(product.packed))])


@torch.no_grad()
def measure(
    operations: Operations,
    format_name: str = "q4_0",
    config: Config = LLAMA_3_8B,
    jobs: int = 1,
) -> dict[str, Any]:
    """All cases as data, see `row`."""
    tell = telling()
    ours, baseline = models(config, format_name, operations, torch.device("cuda"))
    torch.cuda.synchronize()
    weights = sum(map(bytes_of, ours.products))
    tell(f"{config.layers} layers, {weights / 1e9:.2f} GB of weights in {format_name}")
    cases = [*(("decode", m) for m in BATCHES), *(("prefill", m) for m in PROMPTS)]
    asked = [("exact", m) for _, m in cases]
    asked += [("fast", m) for kind, m in cases if kind == "prefill"]
    if jobs > 1:
        count = ours.compile_ahead(asked, jobs, tell)
        tell(f"{count} kernels compiled by other processes")
    rows: list[dict[str, Any]] = []
    differences: dict[str, float] = {}
    for kind, count in cases:
        case, tokens, graphs = case_of(kind, count)
        sides = {"exact": (ours, "exact"), "fp16": (baseline, "exact")}
        if kind == "prefill":
            sides["fast"] = (ours, "fast")
        made = {
            name: graph(model, kind, count, accuracy) for name, (model, accuracy) in sides.items()
        }
        tell(f"{case}: compiled and captured")
        took = in_turn([work for work, _ in made.values()], ROUNDS.get(case) or ROUNDS[kind])
        inner = [products(model, kind, count, accuracy) for model, accuracy in sides.values()]
        alone = in_turn(inner, ROUNDS.get(case) or ROUNDS["products"])
        times = (dict(zip(sides, one, strict=True)) for one in (took, alone))
        rows.append(row(case, tokens, graphs, *times))
        logits = {name: each.float() for name, (_, each) in made.items() if each is not None}
        for name in logits.keys() - {"fp16"}:
            off = (logits[name] - logits["fp16"]).square().mean()
            size = logits["fp16"].square().mean()
            differences[f"{case}, {name}"] = float((off / size).sqrt())
        tell(line(rows[-1]))
    choices = {}
    for accuracy, m in asked:
        ours.set_accuracy(accuracy)
        if m == 1 and ours.is_whole(ours.cache(1, 1), 1):
            choices[f"experts, a layer at T={m}"] = "attention, and one launch behind it"
            continue
        for one in ours.layers[0].products:
            if isinstance(one, StepExperts):
                for each in one.choices(m, config.chosen):
                    asked_for = each.request
                    choices[f"experts, T={m} N={asked_for.n} K={asked_for.k}"] = str(each)
            else:
                choices[f"{accuracy}, M={m} N={one.n} K={one.k}"] = str(one.choice(m))
    return {
        "shapes": next((name for name, one in SHAPES.items() if one == config), str(config)),
        "format": format_name,
        "weights_gb": weights / 1e9,
        **facts(operations),
        "rows": rows,
        "rms_difference_of_logits_from_fp16": differences,
        "choices": choices,
    }


def line(one: Mapping[str, Any]) -> str:
    """A row in a sentence."""
    fast = f", fast {one['fast']:,.0f} ({one['x_fast']:.2f}x)" if one["fast"] else ""
    return (
        f"{one['case']}: exact {one['exact']:,.0f} tokens/s ({one['x_exact']:.2f}x){fast}, fp16 "
        f"torch {one['fp16']:,.0f}; ms {told(one['ms'])}, of which products "
        f"{told(one['products_ms'])}"
    )


def told(sides: Mapping[str, float]) -> str:
    """ "exact 1.38 fp16 4.35"."""
    return " ".join(f"{name} {ms:.3g}" for name, ms in sides.items())
