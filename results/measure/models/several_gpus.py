"""Tokens a second of one GPU and of several that share the model, in one run.

    torchrun --standalone --nproc-per-node 2 -m steps decoder --bench     # or --gpus 2

Weights are random, as in `one_gpu`: rows are drawn, and each rank repeats them on its GPU up to its
share. Rank 0 has the whole model too. The two take turns: while rank 0 runs the whole one the other
GPUs idle, then all of them run the shared one. Both are CUDA graphs, and rank 0's clock counts.

Of what all ranks take, the products of a rank and the sums are also timed alone, one after another
with nothing between them. The rest is norms, which each rank computes for itself, and attention.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from results.measure import loop
from results.measure.loop import Timing, ratio
from results.measure.models import one_gpu
from steps.decoder.model import (
    LLAMA_3_8B,
    CapturedGraph,
    Config,
    Decoder,
    Embedding,
    torch,
)
from steps.decoder.operations import Operations
from steps.decoder.parallel import Ranks, Summed

LLAMA_3_70B: Final = Config(80, 8192, 28672, 64, 8, 128, 128256, 1e-5, 500000.0, 128)
MODELS: Final = (
    ("Llama 3 8B", LLAMA_3_8B, (("decode", 1), ("prefill", 4096))),
    ("Llama 3 70B", LLAMA_3_70B, (("decode", 1), ("prefill", 512))),
)
"""Shapes, and cases: sequences that decode, or tokens of a prompt."""
WANTED: Final = {
    ("Llama 3 8B", "prefill 4096"): 1.75,
    ("Llama 3 70B", "decode, batch 1"): 1.4,
    ("Llama 3 70B", "prefill 512"): 1.7,
}
"""How many times as fast two GPUs are meant to be."""
ROUNDS: Final = 7


@dataclass(frozen=True, slots=True)
class Row:
    """A case: tokens a second of one GPU and of all `gpus` (medians of `rounds`), and how many
    times as fast these are (median of the rounds' ratios).

    ms: of a graph: of one GPU, of all, and of these the products and the sums alone.
    """

    model: str
    case: str
    gpus: int
    one: float
    all: float
    x: float
    rounds: int
    spread: float  # (80 % quantile - 20 % quantile) / median of all GPUs together
    ms: dict[str, float]


def model(
    config: Config,
    format_name: str,
    operations: Operations,
    embedding: Embedding,
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


def sums(decoder: Decoder, tokens: int) -> Callable[[], None]:
    """The sums of a graph alone, of zeros."""
    width = decoder.config.width

    def work() -> None:
        for layer in decoder.layers:
            for product in layer.products:
                if isinstance(product, Summed):
                    wide = tokens <= product.products[0].wide
                    dtype = torch.float32 if wide else torch.float16
                    product.sums(torch.zeros(tokens, width, dtype=dtype, device=decoder.device))

    return captured(work)


def graph(decoder: Decoder, kind: str, count: int) -> Callable[[], None]:
    """A round: a prompt of `count` tokens, or `one_gpu.STEPS` tokens of as many sequences."""
    if kind == "prefill":
        return one_gpu.prefilling(decoder, count, "exact")[0]
    return one_gpu.decoding(decoder, count)


def captured(work: Callable[[], None]) -> Callable[[], None]:
    work()
    return CapturedGraph(work).replay


def in_turn(
    ranks: Ranks, sides: Sequence[Callable[[], None] | None], rounds: int
) -> list[list[float]]:
    """GPU seconds of each side in each round, after one that does not count. Every rank waits for
    the others before each side, also for one that it has no part in (None), which is NaN."""

    def taken(work: Callable[[], None] | None) -> float:
        ranks.wait()
        return math.nan if work is None else one_gpu.seconds(work)

    return loop.in_turn([partial(taken, side) for side in sides], rounds, warm_up=1)


def row(
    name: str,
    case: str,
    gpus: int,
    tokens: int,
    graphs: int,
    took: Sequence[Sequence[float]],
    parts: Mapping[str, Sequence[float]],
) -> Row:
    """took: seconds of one GPU and of all in each round of `tokens` and so many graphs. parts: of
    the products and the sums of one graph."""
    one, every = map(Timing.of, took)
    return Row(
        name,
        case,
        gpus,
        tokens / one.us * 1e6,
        tokens / every.us * 1e6,
        ratio(*took),
        every.rounds,
        every.spread,
        {"one": one.us / graphs * 1e-3, "all": every.us / graphs * 1e-3}
        | {part: Timing.of(s).us * 1e-3 for part, s in parts.items()},
    )


def of_model(
    name: str,
    config: Config,
    cases: Sequence[tuple[str, int]],
    ranks: Ranks,
    operations: Operations,
    format_name: str,
    jobs: int,
    tell: Callable[[str], None],
) -> list[Row]:
    """The cases of one model; rank 0's rows count."""
    rng = np.random.default_rng(1)
    table = one_gpu.random_blocks(format_name, one_gpu.DRAWN, config.width, rng)
    table = table[np.arange(config.vocabulary) % one_gpu.DRAWN]
    rest = torch.device("cuda"), torch.float32, operations.embedding_rows
    embedding = Embedding.of(table, *rest)
    shared = model(config, format_name, operations, embedding, ranks)
    whole = model(config, format_name, operations, embedding) if ranks.rank == 0 else None
    tell(f"{name}: {torch.cuda.memory_allocated() / 1e9:.1f} GB: the whole model and a share")
    if whole is not None and jobs > 1:
        for one in (whole, shared):
            one.compile_ahead([("exact", count) for _, count in cases], jobs, tell)
    rows: list[Row] = []
    for kind, count in cases:
        prompt = kind == "prefill"
        case = f"prefill {count}" if prompt else f"decode, batch {count}"
        alone = None if whole is None else graph(whole, kind, count)
        ranks.wait()
        together = graph(shared, kind, count)
        tell(f"{name}, {case}: compiled and captured")
        took = in_turn(ranks, (alone, together), ROUNDS)
        works = {
            "products": one_gpu.products(shared, count, 1 if prompt else count, "exact"),
            "sums": sums(shared, count),
        }
        parts = {part: in_turn(ranks, (work,), ROUNDS)[0] for part, work in works.items()}
        graphs = 1 if prompt else one_gpu.STEPS
        if ranks.rank == 0:
            rows.append(row(name, case, ranks.count, count * graphs, graphs, took, parts))
            tell(line(rows[-1]))
    return rows


@torch.no_grad()
def measure(
    ranks: Ranks,
    operations: Operations,
    format_name: str = "q4_0",
    models: Sequence[Any] = MODELS,
    parts: Sequence[str] = ("decode", "prefill"),
    jobs: int = 1,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """All cases of the parts as data, see `Row`. Every rank calls this."""
    start = time.perf_counter()

    def tell(what: str) -> None:
        say(f"{time.perf_counter() - start:6.1f} s  {what}")

    rows: list[Row] = []
    for name, config, cases in models:
        wanted = [one for one in cases if one[0] in parts]
        rows += of_model(name, config, wanted, ranks, operations, format_name, jobs, tell)
        gc.collect()  # graphs, and the memory that they hold
        torch.cuda.empty_cache()
    return {
        "format": format_name,
        "gpus": ranks.count,
        "sums": ranks.sums.how,
        "between_products": operations.mode,
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "context": one_gpu.CONTEXT,
        "steps": one_gpu.STEPS,
        "seconds": time.perf_counter() - start,
        "rows": [asdict(one) for one in rows],
    }


def line(one: Row) -> str:
    """A row in a sentence."""
    ms = " ".join(f"{name} {ms:.3g}" for name, ms in one.ms.items())
    return (
        f"{one.model}, {one.case}: {one.gpus} GPUs {one.all:,.0f} tokens/s, {one.x:.2f}x of one "
        f"with {one.one:,.0f}; ms {ms}"
    )


def table(found: dict[str, Any]) -> str:
    """The rows as a Markdown table."""
    count = found["gpus"]
    lines = [f"| | | one GPU | {count} GPUs | | wanted of 2 |", "|:--|:--|--:|--:|--:|--:|"]
    for one in found["rows"]:
        wanted = WANTED.get((one["model"], one["case"]))
        lines.append(
            f"| {one['model']} | {one['case']} | {one['one']:,.0f} tokens/s "
            f"| {one['all']:,.0f} tokens/s | {one['x']:.2f}x | {f'{wanted}x' if wanted else ''} |"
        )
    return "\n".join(lines)
