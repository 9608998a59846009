"""Tokens a second with the shapes of Llama 3 8B and random weights, beside float16 torch.matmul.

Two decoders differ in their products: ours over blocks, and torch's over the same weights in
float16. At batch 1 ours also has norms and gates within them (`steps.decoder.deferred`). Weights
are random bytes with sensible scales, not quantized floats: 1024 rows of each kind of matrix are
drawn and packed. Each layer repeats them in memory of its own, from another row on, so that all
weights come from memory.

Each case is a CUDA graph of either side. Rounds take turns, and medians are reported:

    decode    one graph is a step of greedy decoding, argmax included; a round is `STEPS` of them
              after `CONTEXT` tokens, batch 1 and 16
    prefill   one graph is a prompt of 512 or 4096 tokens, with the logits of the last one

"fast" is the same decoder with accuracy="fast", whose steps requantize the weights to int8 with one
scale per row. It is for prompts: decoding takes the same step either way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from qformats import FORMATS
from qformats.repack import TILE_GROUP, TILE_ROWS
from results.measure import loop
from results.measure.loop import Timing, ratio
from steps.decoder.model import (
    LLAMA_3_8B,
    CapturedGraph,
    Config,
    Decoder,
    Embedding,
    Greedy,
    Layer,
    Plain,
    Product,
    torch,
)
from steps.decoder.operations import Operations
from steps.nn import operator as operator
from steps.product.choice import packings

DRAWN: Final = 1024  # rows of each kind of matrix
ROWS: Final = TILE_GROUP * TILE_ROWS  # the rows of one piece of a fragment-packed layout
BATCHES: Final = (1, 16)
PROMPTS: Final = (512, 4096)
CONTEXT: Final = 128
STEPS: Final = 64
ROUNDS: Final = {"decode": 9, "prefill 512": 15, "prefill 4096": 5, "products": 15}
WEIGHT: Final = 0.02  # root mean square of a weight


@dataclass(frozen=True, slots=True)
class Row:
    """A case: tokens a second of each side (medians of `rounds`), and their ratio to the baseline,
    float16 torch (medians of the rounds' ratios). None: not measured.

    ms: of a graph, by side: exact, fp16 and perhaps fast; products_ms: of its products alone, one
    after another, with nothing between them.
    """

    case: str
    exact: float
    fast: float | None
    fp16: float
    x_exact: float
    x_fast: float | None
    rounds: int
    spread: float  # (80 % quantile - 20 % quantile) / median of our exact side
    ms: dict[str, float]
    products_ms: dict[str, float]


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
        cls,
        format_name: str,
        k: int,
        rng: np.random.Generator,
        device: Any,
        accuracy: str = "fast",
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
        embedding: Embedding,
        operations: Operations,
        make: Callable[[str, Drawn, int, int], Any],
        output: Any,
    ) -> Decoder:
        """make: (name, drawn, n, layer) -> a product. output: the last product."""
        layers, norm = [], self._norm
        for i in range(self._config.layers):
            qkv, out, gate_up, down = (make(name, drawn, n, i) for name, drawn, n in self.kinds)
            layers.append(Layer(norm, qkv, out, norm, gate_up, down))
        return Decoder(self._config, embedding, layers, norm, output, operations=operations)


def models(
    config: Config, format_name: str, operations: Operations, device: Any
) -> tuple[Decoder, Decoder]:
    """(our decoder, the float16 baseline); they share embedding and norms."""
    drawn, count = Weights(config, format_name, device), config.vocabulary
    table = random_blocks(format_name, count, config.width, drawn.rng)
    embedding = Embedding.of(table, device, torch.float32, operations.embedding_rows)
    rest = embedding, operations
    return (
        drawn.decoder(
            *rest, lambda _, one, n, i: one.product(n, i), drawn.last.product(count, 0, True)
        ),
        drawn.decoder(*rest, lambda _, one, n, i: one.plain(n, i), drawn.last.plain(count, 0)),
    )


# --- timing ---------------------------------------------------------------------------------------


def seconds(work: Callable[[], None]) -> float:
    """GPU time of work that is queued here."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3


def in_turn(sides: Sequence[Callable[[], None]], rounds: int) -> list[list[float]]:
    """GPU seconds of each side in each round, after one that does not count."""
    return loop.in_turn([partial(seconds, side) for side in sides], rounds, warm_up=1)


SIDES: Final = ("exact", "fp16", "fast")


def row(
    case: str,
    tokens: int,
    graphs: int,
    took: Sequence[Sequence[float]],
    alone: Sequence[Sequence[float]],
) -> Row:
    """took: seconds of each side (exact, fp16 and perhaps fast) in each round of `tokens` and so
    many graphs. alone: those of the products of one graph."""
    timings = {name: Timing.of(one) for name, one in zip(SIDES, took, strict=False)}
    rate = {name: tokens / timing.us * 1e6 for name, timing in timings.items()}
    x = {name: ratio(took[1], one) for name, one in zip(SIDES, took, strict=False)}
    return Row(
        case,
        rate["exact"],
        rate.get("fast"),
        rate["fp16"],
        x["exact"],
        x.get("fast"),
        timings["exact"].rounds,
        timings["exact"].spread,
        {name: timing.us / graphs * 1e-3 for name, timing in timings.items()},
        {name: Timing.of(s).us * 1e-3 for name, s in zip(SIDES, alone, strict=False)},
    )


def decoding(model: Decoder, batch: int) -> Callable[[], None]:
    """A round: `STEPS` tokens of each of `batch` sequences, after `CONTEXT` tokens."""
    cache = model.cache(batch, CONTEXT + STEPS)
    for keys_values in cache.layers:
        keys_values.normal_()
    cache.position.fill_(CONTEXT)
    token = torch.arange(batch, device=model.device)
    steps = Greedy(model, cache, token)
    steps.capture()

    def work() -> None:
        cache.position.fill_(CONTEXT)
        for _ in range(STEPS):
            steps.run()

    return work


def prefilling(model: Decoder, tokens: int, accuracy: str) -> tuple[Callable[[], None], Any]:
    """(a round, which is one prompt; the logits that it writes)."""
    model.set_accuracy(accuracy)
    cache = model.cache(1, tokens)
    ids = torch.arange(tokens, device=model.device)[None] * 31 % model.config.vocabulary
    kept: list[Any] = []

    def work() -> None:
        kept[:] = [model.prefill(ids, cache)]

    work()
    graph = CapturedGraph(work)
    model.set_accuracy("exact")
    return graph.replay, kept[0]


def products(model: Decoder, tokens: int, sequences: int, accuracy: str) -> Callable[[], None]:
    """The products of a graph alone, on random inputs, without what ranks tell each other."""
    model.set_accuracy(accuracy)
    inputs: dict[Any, Any] = {}

    def multiply(product: Any, m: int) -> None:
        for one in getattr(product, "products", [product]):
            key = (m, one.k), one.input_dtype(m)
            if key not in inputs:
                inputs[key] = torch.randn(key[0], device=model.device, dtype=key[1])
            one(inputs[key])

    def work() -> None:
        for layer in model.layers:
            for product in layer.products:
                multiply(product, tokens)
        multiply(model.output, sequences)

    work()
    graph = CapturedGraph(work)
    model.set_accuracy("exact")
    return graph.replay


@torch.no_grad()
def measure(
    operations: Operations,
    format_name: str = "q4_0",
    config: Config = LLAMA_3_8B,
    parts: Sequence[str] = ("decode", "prefill"),
    jobs: int = 1,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """All cases as data, see `Row`."""
    start = time.perf_counter()

    def tell(what: str) -> None:
        say(f"{time.perf_counter() - start:6.1f} s  {what}")

    ours, baseline = models(config, format_name, operations, torch.device("cuda"))
    torch.cuda.synchronize()
    weights = sum(
        one.nbytes
        for product in ours.products
        for one in product.packed[next(iter(product.packed))]
    )
    tell(f"{config.layers} layers, {weights / 1e9:.2f} GB of weights in {format_name}")
    cases = [("exact", m) for m in BATCHES if "decode" in parts]
    cases += [(name, m) for name in ("exact", "fast") for m in PROMPTS if "prefill" in parts]
    if jobs > 1:
        count = ours.compile_ahead(cases, jobs, tell)
        tell(f"{count} kernels compiled by other processes")
    rows: list[Row] = []
    differences: dict[str, float] = {}
    for batch in BATCHES if "decode" in parts else ():
        sides = [decoding(model, batch) for model in (ours, baseline)]
        tell(f"decode, batch {batch}: compiled and captured")
        took = in_turn(sides, ROUNDS["decode"])
        inner = [products(model, batch, batch, "exact") for model in (ours, baseline)]
        alone = in_turn(inner, ROUNDS["products"])
        rows.append(row(f"decode, batch {batch}", batch * STEPS, STEPS, took, alone))
        tell(line(rows[-1]))
    for tokens in PROMPTS if "prefill" in parts else ():
        case = f"prefill {tokens}"
        each = ((ours, "exact"), (baseline, "exact"), (ours, "fast"))
        works = [prefilling(model, tokens, accuracy) for model, accuracy in each]
        tell(f"{case}: compiled and captured")
        took = in_turn([work for work, _ in works], ROUNDS[case])
        inner = [products(model, tokens, 1, accuracy) for model, accuracy in each]
        alone = in_turn(inner, ROUNDS[case])
        rows.append(row(case, tokens, 1, took, alone))
        logits = [one.float() for _, one in works]
        size = logits[1].square().mean().sqrt()
        for i, name in ((0, "exact"), (2, "fast")):
            difference = (logits[i] - logits[1]).square().mean().sqrt() / size
            differences[f"{case}, {name}"] = float(difference)
        tell(line(rows[-1]))
    choices = {}
    for accuracy, m in cases:
        ours.set_accuracy(accuracy)
        for one in ours.layers[0].products:
            choices[f"{accuracy}, M={m} N={one.n} K={one.k}"] = str(one.choice(m))
    return {
        "shapes": "Llama 3 8B" if config == LLAMA_3_8B else str(config),
        "format": format_name,
        "weights_gb": weights / 1e9,
        "between_products": operations.mode,
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "context": CONTEXT,
        "steps": STEPS,
        "seconds": time.perf_counter() - start,
        "rows": [asdict(one) for one in rows],
        "rms_difference_of_logits_from_fp16": differences,
        "choices": choices,
    }


def line(one: Row) -> str:
    """A row in a sentence."""
    fast = "" if one.fast is None else f", fast {one.fast:,.0f} ({one.x_fast:.2f}x)"
    return (
        f"{one.case}: exact {one.exact:,.0f} tokens/s ({one.x_exact:.2f}x){fast}, "
        f"fp16 torch {one.fp16:,.0f}; ms {_ms(one.ms)}, of which products {_ms(one.products_ms)}"
    )


def _ms(sides: dict[str, float]) -> str:
    return " ".join(f"{name} {ms:.3g}" for name, ms in sides.items())


def table(found: dict[str, Any]) -> str:
    """The rows as a Markdown table."""
    lines = ["| | exact | fast | fp16 torch.matmul |", "|:--|--:|--:|--:|"]
    for one in found["rows"]:
        fast = "-" if one["fast"] is None else f"{one['fast']:,.0f} tokens/s, {one['x_fast']:.2f}x"
        lines.append(
            f"| {one['case']} | {one['exact']:,.0f} tokens/s, {one['x_exact']:.2f}x | {fast} "
            f"| {one['fp16']:,.0f} tokens/s |"
        )
    return "\n".join(lines)
