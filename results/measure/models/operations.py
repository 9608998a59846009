"""What the operations between a decoder's products take: this project's kernels beside torch's.

    python -m steps decoder --bench --parts between

For each operation two figures of either side, both of CUDA graphs whose rounds take turns:

    alone   a graph of `ALONE` launches one behind the other, on memory that is in the L2
    chain   what it adds to the products: a graph of all layers, with products and all operations,
            less the same graph without this one

In a chain a product may load its first weights while an operation runs, so the second figure may be
the smaller one. "products" is the time of a layer's products with nothing between them. Torch's
side is compiled by Inductor, autotuned, with programmatic dependent launch where torch has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

from results.measure.loop import Timing
from results.measure.models.one_gpu import (
    CONTEXT,
    STEPS,
    RandomInputs,
    captured,
    in_turn,
    models,
)
from steps.decoder import kernel_operations as between
from steps.decoder import operations
from steps.decoder.model import LLAMA_3_8B, Cache, Config, Decoder, torch
from steps.decoder.operations import Operations

SIDES: Final = ("kernels", "torch")
NAMES: Final = ("add_and_norm", "attention", "swiglu")
TOKENS: Final = (1, 16, 512)
"""Up to 16 a token each of as many sequences, which have `CONTEXT` tokens before it; 512 of a
prompt, where attention is torch's on either side and is left out."""
CONTEXTS: Final = (CONTEXT, 700, 4095)
"""Tokens before the one, for attention alone."""
ALONE: Final = 64
ROUNDS: Final = 15


class Inputs(RandomInputs):
    """What operations and products of one number of tokens read; the same in every layer."""

    def __init__(self, model: Decoder, tokens: int, context: int) -> None:
        super().__init__(model, tokens)
        config, device = model.config, model.device
        self.model, self.tokens = model, tokens
        self.cache: Cache = model.cache(tokens if tokens <= 16 else 1, context + STEPS)
        for keys_values in self.cache.layers:
            keys_values.normal_()
        self.cache.position.fill_(context)
        self.h = torch.randn((tokens, config.width), device=device)
        self.y = torch.randn((tokens, config.width), device=device, dtype=torch.float16)
        self.qkv = torch.randn((tokens, config.qkv), device=device, dtype=torch.float16)
        self.gates = torch.randn((tokens, 2 * config.hidden), device=device, dtype=torch.float16)

    def call(self, do: Operations, name: str, layer: int, y: Any = None) -> Any:
        """What the next product reads: an operation of a layer, on what the product before it made,
        or on random values."""
        config, one, cache = self.model.config, self.model.layers[layer], self.cache
        if name == "attention":
            cached = cache.layers[layer], cache.position, cache.cos, cache.sin
            wanted = one.out.input_dtype(self.tokens)
            return do.attention(self.qkv if y is None else y, *cached, config.heads, wanted)
        if name == "swiglu":
            wanted = one.down.input_dtype(self.tokens)
            return do.swiglu(self.gates if y is None else y, wanted)
        wanted = one.qkv.input_dtype(self.tokens)
        y = self.y if y is None else y
        return do.add_and_norm(self.h, y, one.before_attention, config.epsilon, wanted)[1]

    def layers(self, do: Operations, names: tuple[str, ...]) -> None:
        """All layers, with these operations between the products."""
        y: Any = None

        def of(name: str, product: Any, i: int) -> Any:
            return self.call(do, name, i, y) if name in names else self.x(product)

        for i, layer in enumerate(self.model.layers):
            y = layer.qkv(of("add_and_norm", layer.qkv, i))
            y = layer.out(of("attention", layer.out, i))
            y = layer.gate_up(of("add_and_norm", layer.gate_up, i))
            y = layer.down(of("swiglu", layer.down, i))


def _us(works: list[Callable[[], None]], calls: int) -> list[float]:
    took = in_turn([captured(work) for work in works], ROUNDS)
    return [Timing.of(one).us / calls for one in took]


def _alone(inputs: Inputs, sides: tuple[Operations, ...], name: str) -> dict[str, float]:
    def work(do: Operations) -> Callable[[], None]:
        def run() -> None:
            for _ in range(ALONE):
                inputs.call(do, name, 0)

        return run

    return dict(zip(SIDES, _us([work(do) for do in sides], ALONE), strict=True))


def _row(
    operation: str,
    tokens: int,
    context: int,
    alone: dict[str, float],
    chain: dict[str, float] | None = None,
) -> dict[str, Any]:
    """An operation in microseconds of a call, by side: medians. `chain` is None where it is not
    measured."""
    return {
        "operation": operation,
        "tokens": tokens,
        "context": context,
        "alone": alone,
        "chain": chain,
    }


def _rows(model: Decoder, sides: tuple[Operations, ...], tokens: int) -> Iterator[dict[str, Any]]:
    """The rows of one number of tokens; the one of the products comes first."""
    names, layers = NAMES if tokens <= 16 else ("add_and_norm", "swiglu"), len(model.layers)
    inputs = Inputs(model, tokens, CONTEXT)
    chains = [(do, left) for do in sides for left in (None, *names)]
    works: list[Callable[[], None]] = [lambda: inputs.layers(sides[0], ())]
    for do, left in chains:
        kept = tuple(name for name in names if name != left)
        works.append(partial(inputs.layers, do, kept))
    products, *times = _us(works, layers)
    yield _row("products", tokens, CONTEXT, dict.fromkeys(SIDES, products))
    found = dict(zip(((do.mode, left) for do, left in chains), times, strict=True))
    for name in names:
        count = 2 if name == "add_and_norm" else 1
        chain = {
            side: (found[do.mode, None] - found[do.mode, name]) / count
            for side, do in zip(SIDES, sides, strict=True)
        }
        yield _row(name, tokens, CONTEXT, _alone(inputs, sides, name), chain)
    for context in CONTEXTS[1:] if tokens <= 16 else ():
        there = Inputs(model, tokens, context)
        yield _row("attention", tokens, context, _alone(there, sides, "attention"))


@torch.no_grad()
def measure(
    format_name: str = "q4_0",
    config: Config = LLAMA_3_8B,
    jobs: int = 1,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """All rows as data, see `_row`."""
    sides = between.Kernels().operations(), operations.compiled(None, True)
    model, _ = models(config, format_name, sides[0], torch.device("cuda"))
    if jobs > 1:
        count = model.compile_ahead([("exact", tokens) for tokens in TOKENS], jobs, say)
        say(f"{count} kernels compiled by other processes")
    rows = []
    for tokens in TOKENS:
        for row in _rows(model, sides, tokens):
            say(line(row))
            rows.append(row)
    return {
        "shapes": "Llama 3 8B" if config == LLAMA_3_8B else str(config),
        "format": format_name,
        "sides": {side: do.mode for side, do in zip(SIDES, sides, strict=True)},
        "rows": rows,
    }


def line(row: Mapping[str, Any]) -> str:
    """A row in a sentence."""
    alone, chain = row["alone"], row["chain"]
    if row["operation"] == "products":
        return f"{row['tokens']} tokens: the products of a layer take {alone['kernels']:.1f} us"
    text = f"{row['tokens']} tokens, {row['operation']}"
    text += f" after {row['context']}" if row["operation"] == "attention" else ""
    of = [
        f"{side} {alone[side]:.2f} us alone" + (f", {chain[side]:.2f} in a chain" if chain else "")
        for side in SIDES
    ]
    return f"{text}: {'; '.join(of)}"
