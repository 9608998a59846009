"""Tokens a second of one GPU and of several that share the model, in one run.

    torchrun --standalone --nproc-per-node 2 -m steps decoder --bench     # or --gpus 2

Weights are random, as in `one_gpu`: rows are drawn, and each rank repeats them on its GPU up to its
share. Rank 0 has the whole model too. The two take turns: while rank 0 runs the whole one the other
GPUs idle, then all of them run the shared one. Both are CUDA graphs, and rank 0's clock counts.

Of what all ranks take, the products of a rank and the sums are also timed alone, one after another
with nothing between them. The rest is norms, which each rank computes for itself, and attention.
Sums of few tokens that two GPUs make within products (`steps.decoder.deferred`) have no time alone.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from results.measure.loop import Timing, ratio
from results.measure.models import one_gpu
from steps.decoder.model import LLAMA_3_8B, Config, Decoder, embedding_of, torch
from steps.decoder.operations import Operations
from steps.decoder.parallel import Ranks, Summed

LLAMA_3_70B: Final = Config(80, 8192, 28672, 64, 8, 128, 128256, 1e-5, 500000.0, 128)
MODELS: Final = (
    ("Llama 3 8B", LLAMA_3_8B, (("decode", 1), ("prefill", 4096))),
    ("Llama 3 70B", LLAMA_3_70B, (("decode", 1), ("prefill", 512))),
)
"""Shapes, and cases: sequences that decode, or tokens of a prompt."""
ROUNDS: Final = 7


def model(
    config: Config,
    format_name: str,
    operations: Operations,
    embedding: Any,
    ranks: Ranks | None = None,
) -> Decoder:
    """A decoder of random weights on the current GPU: this rank's share, or, without ranks, all."""
    own = config if ranks is None else ranks.share(config).config
    rows = config.vocabulary if ranks is None else -(-config.vocabulary // ranks.count)
    weights = one_gpu.Weights(own, format_name, torch.device("cuda"), "exact")

    def joined(product: Any, name: str, n: int) -> Any:
        return product if ranks is None else ranks.joined(product, name, n)

    return weights.decoder(
        embedding,
        operations,
        lambda name, drawn, n, i: joined(drawn.product(n, i), f"{name}.weight", n),
        joined(weights.last.product(rows, 0, True), "output.weight", config.vocabulary),
    )


def sums(decoder: Decoder, tokens: int) -> Callable[[], None] | None:
    """The sums of a graph alone, of zeros. None where they are all within products."""
    h = torch.zeros(tokens, decoder.config.width, device=decoder.device)
    deferred = decoder.operations.deferred
    launched = [
        before
        for before, weight, after, _ in decoder._norms()
        if isinstance(before, Summed)
        and not (deferred is not None and deferred.takes(before, after, h, weight))
    ]

    def work() -> None:
        for product in launched:
            wide = tokens <= product.products[0].wide
            product.sums(torch.zeros_like(h, dtype=torch.float32 if wide else torch.float16))

    return one_gpu.captured(work) if launched else None


def row(
    name: str,
    case: str,
    gpus: int,
    tokens: int,
    graphs: int,
    took: Sequence[Sequence[float]],
    parts: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    """A case: tokens a second of one GPU and of all `gpus` (medians of `rounds`), and how many
    times as fast these are (median of the rounds' ratios).

    took: seconds of one GPU and of all in each round of `tokens` and so many graphs. parts: of
    the products and the sums of one graph. ms: of a graph: of one GPU, of all, and of these the
    products and, where these are launches, the sums alone. spread: (80 % - 20 % quantile) / median
    of all GPUs together.
    """
    one, every = map(Timing.of, took)
    return {
        "model": name,
        "case": case,
        "gpus": gpus,
        "one": tokens / one.us * 1e6,
        "all": tokens / every.us * 1e6,
        "x": ratio(*took),
        "rounds": every.rounds,
        "spread": every.spread,
        "ms": one_gpu.ms({"one": took[0], "all": took[1]}, graphs) | one_gpu.ms(parts),
    }


def of_model(
    name: str,
    config: Config,
    cases: Sequence[tuple[str, int]],
    ranks: Ranks,
    operations: Operations,
    format_name: str,
    jobs: int,
    tell: Callable[[str], None],
) -> list[dict[str, Any]]:
    """The cases of one model; rank 0's rows count."""
    rng = np.random.default_rng(1)
    table = one_gpu.random_blocks(format_name, one_gpu.DRAWN, config.width, rng)
    table = table[np.arange(config.vocabulary) % one_gpu.DRAWN]
    embedding = embedding_of(table, "cuda")
    shared = model(config, format_name, operations, embedding, ranks)
    whole = model(config, format_name, operations, embedding) if ranks.rank == 0 else None
    tell(f"{name}: {torch.cuda.memory_allocated() / 1e9:.1f} GB: the whole model and a share")
    if whole is not None and jobs > 1:
        for one in (whole, shared):
            one.compile_ahead([("exact", count) for _, count in cases], jobs, tell)
    rows = []
    for kind, count in cases:
        case, tokens, graphs = one_gpu.case_of(kind, count)
        alone = None if whole is None else one_gpu.graph(whole, kind, count)[0]
        ranks.wait()
        together, _ = one_gpu.graph(shared, kind, count)
        tell(f"{name}, {case}: compiled and captured")
        took = one_gpu.in_turn((alone, together), ROUNDS, ranks.wait)
        works = {"products": one_gpu.products(shared, kind, count), "sums": sums(shared, count)}
        parts = {
            part: one_gpu.in_turn((work,), ROUNDS, ranks.wait)[0]
            for part, work in works.items()
            if work is not None
        }
        if ranks.rank == 0:
            rows.append(row(name, case, ranks.count, tokens, graphs, took, parts))
            tell(line(rows[-1]))
    return rows


@torch.no_grad()
def measure(
    ranks: Ranks,
    operations: Operations,
    format_name: str = "q4_0",
    models: Sequence[Any] = MODELS,
    jobs: int = 1,
) -> dict[str, Any]:
    """All cases as data, see `row`. Every rank calls this."""
    tell = one_gpu.telling()
    rows: list[dict[str, Any]] = []
    for name, config, cases in models:
        rows += of_model(name, config, cases, ranks, operations, format_name, jobs, tell)
        gc.collect()  # graphs, and the memory that they hold
        torch.cuda.empty_cache()
    return {
        "format": format_name,
        "gpus": ranks.count,
        "sums": ranks.sums.how,
        **one_gpu.facts(operations),
        "rows": rows,
    }


def line(one: Mapping[str, Any]) -> str:
    """A row in a sentence."""
    return (
        f"{one['model']}, {one['case']}: {one['gpus']} GPUs {one['all']:,.0f} tokens/s, "
        f"{one['x']:.2f}x of one with {one['one']:,.0f}; ms {one_gpu.told(one['ms'])}"
    )
