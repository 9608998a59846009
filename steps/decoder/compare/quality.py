"""What a model loses by its products: perplexity of a text, and how far its predictions are from
those of the dequantized weights in float32.

The definitions are those of llama.cpp's tool (tools/perplexity, its README and perplexity.cpp). The
text is cut into chunks of `CONTEXT` tokens, the first of which is the one that texts begin with, if
the vocabulary has one. In each chunk the model predicts the tokens of the second half:

    perplexity       exp of the mean of -ln p(the token that follows)
    KL divergence    sum over the vocabulary of p ln(p / q), p being float32's, in nats: its mean
                     over the predictions, and the value that 99.9 % of them stay below
    same top token   share of predictions whose likeliest token is that of float32

The default text is chapters I and II of Alice's Adventures in Wonderland by Lewis Carroll, of 1865,
in the public domain: `alice.txt`, from alice29.txt of the Canterbury corpus, its lines joined.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from steps.decoder import files
from steps.decoder.model import Decoder, Maker, Product, torch, torch_products
from steps.decoder.operations import PLAIN, Operations

if TYPE_CHECKING:
    from torch import Tensor

CONTEXT: Final = 512
TEXT: Final = Path(__file__).parent / "alice.txt"
QUANTILE: Final = 0.999
FLOAT32: Final = "float32"


@dataclass(frozen=True, slots=True)
class Quality:
    """One row. mean_kl, kl_999: in nats. same_top: from 0 to 1. steps: which ones multiplied the
    tokens of a chunk, where steps did."""

    side: str
    perplexity: float
    mean_kl: float
    kl_999: float
    same_top: float
    steps: str = ""


def chunks(ids: Sequence[int], begin: int | None) -> list[list[int]]:
    """All whole chunks of a text's tokens. ValueError for a text that is shorter than one."""
    if len(ids) < CONTEXT:
        raise ValueError(
            f"the text has {len(ids)} tokens and a chunk {CONTEXT}: give a longer one with --text"
        )
    found = [list(ids[i : i + CONTEXT]) for i in range(0, len(ids) - CONTEXT + 1, CONTEXT)]
    return [one if begin is None else [begin, *one[1:]] for one in found]


class Tally:
    """Predictions of a model beside those of float32, chunk by chunk.

    The first side, float32 itself, is given without `others`.
    """

    def __init__(self) -> None:
        self.lost: list[float] = []
        self.divergences: list[float] = []
        self.same: list[bool] = []

    def add(self, logits: Tensor, ids: Sequence[int], base: Tensor | None = None) -> Tensor:
        """Count a chunk; the logarithms of its probabilities [predictions, V], float32.

        logits : [T, V] behind each of its tokens `ids` [T]; those of the second half count, but the
                 last, which no token follows.
        base   : what this returned for float32, on any device; by default these are float32's.
        """
        first = len(ids) // 2
        shares = logits[first : len(ids) - 1].float().log_softmax(-1)
        base = shares if base is None else base.to(shares.device)
        follow = torch.tensor(list(ids[first + 1 :]), device=shares.device)
        self.lost += (-shares.gather(1, follow[:, None])[:, 0]).tolist()
        apart = (base.double().exp() * (base.double() - shares.double())).sum(-1)
        self.divergences += apart.tolist()
        self.same += (base.argmax(-1) == shares.argmax(-1)).tolist()
        return shares

    def quality(self, side: str, steps: str = "") -> Quality:
        with np.errstate(over="ignore"):  # infinite, where a model says that it is impossible
            perplexity = float(np.exp(np.mean(self.lost)))
        return Quality(
            side,
            perplexity,
            float(np.mean(self.divergences)),
            float(np.quantile(self.divergences, QUANTILE)),
            float(np.mean(self.same)),
            steps,
        )


Side = tuple[str, Callable[[Sequence[int]], "Tensor"], str]
"""(name, logits [T, V] of a chunk's tokens, which steps)"""


@torch.no_grad()
def measure(
    parts: Sequence[Sequence[int]],
    sides: Iterable[Side],
    say: Callable[[str], None] = lambda text: None,
) -> list[Quality]:
    """A row for each of the sides, which are made one after the other; the first is float32."""
    base: list[Tensor] = []
    rows: list[Quality] = []
    for name, logits, steps in sides:
        tally = Tally()
        for i, ids in enumerate(parts):
            shares = tally.add(logits(ids), ids, base[i] if rows else None)
            if not rows:
                base.append(shares.cpu())
        del logits  # and with it the model, before the next one is made
        rows.append(tally.quality(name, steps))
        say(sentence(rows[-1]))
    return rows


def logits_of(model: Decoder) -> Callable[[Sequence[int]], Tensor]:
    """A function that computes all logits of a chunk's tokens."""

    def logits(ids: Sequence[int]) -> Tensor:
        given = torch.tensor([list(ids)], device=model.device)
        found: Tensor = model.prefill(given, model.cache(1, len(ids)), every=True)[0]
        return found

    return logits


def sides(
    file: files.Model,
    makers: Sequence[tuple[str, Maker]],
    *,
    device: Any,
    operations: Operations = PLAIN,
    requantize: str | None = None,
    llama_cpp: bool = False,
    jobs: int = 1,
) -> Iterator[Side]:
    """Float32, then the model with products of each maker, then perhaps llama.cpp on the CPU.

    A model is in memory while its chunks are measured, and no other one. jobs: processes that
    compile kernels.
    """
    exact = torch_products(device, torch.float32)
    rest = {"device": device, "operations": PLAIN, "cache_dtype": torch.float32}
    model = files.load(file, exact, requantize=requantize or "float32", **rest)
    yield FLOAT32, logits_of(model), ""
    for name, make in makers:
        del model
        if torch.device(device).type == "cuda":
            torch.cuda.empty_cache()
        model = files.load(file, make, requantize=requantize, device=device, operations=operations)
        if isinstance(model.output, Product) and jobs > 1:
            model.compile_ahead([(model.output.accuracy, CONTEXT)], jobs)
        yield name, logits_of(model), _steps(model)
    if llama_cpp:
        yield "llama.cpp, CPU", logits_of_llama_cpp(file.path), ""


def _steps(model: Decoder) -> str:
    """The steps that multiply the tokens of a chunk in the first layer."""
    found: dict[str, None] = {}
    for product in model.layers[0].products:
        for one in getattr(product, "products", [product]):
            if isinstance(one, Product):
                choice = one.choice(CONTEXT)
                found[f"{choice.kernel.number} {choice.family}"] = None
    return ", ".join(found)


def logits_of_llama_cpp(path: str | os.PathLike[str]) -> Callable[[Sequence[int]], Tensor]:
    """llama.cpp on the CPU. ModuleNotFoundError without its package."""
    try:
        package = import_module("llama_cpp")
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            "--against-llama-cpp needs llama.cpp: pip install llama-cpp-python", name="llama_cpp"
        ) from missing
    made = package.Llama(
        str(path), n_ctx=CONTEXT, n_batch=CONTEXT, n_gpu_layers=0, logits_all=True, verbose=False
    )

    def logits(ids: Sequence[int]) -> Tensor:
        made.reset()
        made.eval(list(ids))
        return torch.from_numpy(np.array(made.scores[: len(ids)], np.float32))

    return logits


def sentence(row: Quality) -> str:
    found = f"{row.side}: perplexity {row.perplexity:.4f}"
    if row.side == FLOAT32:
        return found
    return (
        f"{found}, KL divergence {row.mean_kl:.2e} on average, 99.9 % below {row.kl_999:.2e}, "
        f"same top token {row.same_top:.2%}"
    )


def record(
    file: files.Model, text: Path, parts: Sequence[Sequence[int]], rows: Sequence[Quality]
) -> dict[str, Any]:
    """What was measured, as data."""
    return {
        "file": file.path.name,
        "text": text.name,
        "context": CONTEXT,
        "chunks": len(parts),
        "predictions": sum(len(one) - 1 - len(one) // 2 for one in parts),
        "rows": [asdict(row) for row in rows],
    }
