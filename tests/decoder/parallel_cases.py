"""What each of several ranks does with a model that they share: see `test_parallel.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed

from results.decoder import between, files, parallel
from results.decoder.compare import checks
from results.decoder.model import CapturedGraph, generate, step_products, torch_products
from results.decoder.operations import PLAIN
from results.decoder.parallel import Gathered, Ranks, Summed
from steps.nn import all_reduce
from tests.decoder.test_between import simulated


def ranks() -> Ranks:
    return Ranks(distributed.get_rank(), distributed.get_world_size(), torch.device("cpu"))


GATES_ALONE = PLAIN._replace(swiglu_overlaps=True)
"""Gates are computed by themselves, as by kernels, and down's y is scattered."""


def loaded(path: Any, dtype: Any, ranks: Ranks | None = None, do: Any = PLAIN) -> Any:
    return files.load(
        path,
        torch_products(dtype=dtype),
        requantize="float32",
        residual_dtype=dtype,
        cache_dtype=dtype,
        operations=do,
        ranks=ranks,
    )


def logits_of(
    path: Any,
    dtype: Any,
    ranks: Ranks | None = None,
    exchange: Any = None,
    do: Any = PLAIN,
) -> Any:
    """Of a prompt, then of tokens that follow, one by one: [T + steps, V] and the tokens.

    exchange: of two ranks, who halve the prompt then."""
    model = loaded(path, dtype, ranks, do)
    if ranks is not None:
        ranks.sums._exchange = exchange
    ids = torch.tensor([checks.prompt(files.WORDS, 7)])
    with torch.no_grad():
        filled = model.prefill(ids, model.cache(1, 7), every=True)[0]
        tokens, kept = generate(model, ids, 4, keep=True)
    return torch.cat([filled, *kept]), tokens


def models(paths: list[Any]) -> list[Any]:
    """(logits in float64, in float32, tokens) of each file."""
    found = []
    for path in paths:
        exact, tokens = logits_of(path, torch.float64, ranks())
        found.append((exact, logits_of(path, torch.float32, ranks())[0], tokens))
    return found


class CopiedByTheLibrary:
    """An `all_reduce.Exchange` of two ranks on the CPU: what is sent goes to the other at once, and
    is there as long as that class promises. What was there before becomes NaN.

    sent: ("y" or "x", rows) of each transfer, "x" where it was written into `room`. waiting: those
    that were not asked for yet."""

    def __init__(self) -> None:
        self.slots = [torch.zeros(1 << 20, dtype=torch.uint8) for _ in range(2)]
        self.sent: list[tuple[str, int]] = []
        self.waiting: set[int] = set()

    def room(self, shape: Any, dtype: Any) -> Any:
        here = self.slots[0].fill_(255)
        return here[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def begin(self, values: Any, shape: Any = None, first: int = 0) -> Any:
        assert values.is_contiguous()
        here, dtype = self.slots[0], values.dtype
        is_x = values.untyped_storage().data_ptr() == here.untyped_storage().data_ptr()
        if not is_x:
            here.fill_(255)
        pair: list[Any] = [None, None]
        distributed.all_gather_object(pair, (values.clone(), first))
        got, start = pair[1 - distributed.get_rank()]
        at = start * dtype.itemsize
        here[at : at + got.nbytes].copy_(got.view(-1).view(torch.uint8))
        self.slots.reverse()
        number, shape = len(self.sent), values.shape if shape is None else shape
        assert number - 2 not in self.waiting, "its slot is filled again"
        self.waiting.add(number)
        self.sent.append(("x" if is_x else "y", len(values)))

        def arrived() -> Any:
            self.waiting.remove(number)
            return here[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

        return arrived


def halved(paths: list[Any]) -> tuple[list[Any], Any]:
    """(logits in float64, tokens, what was sent) of each file, whose prompt of 7 tokens goes
    through the layers in two parts, with gates in the last product's pass and by themselves. And of
    the first file the logits in float32 by kernels, and the names of these."""
    many, tile = parallel.MANY_TOKENS, parallel.TILE
    parallel.MANY_TOKENS, parallel.TILE = 7, 2
    found = []
    for path in paths:
        for do in (PLAIN, GATES_ALONE):
            exchange = CopiedByTheLibrary()
            logits = logits_of(path, torch.float64, ranks(), exchange, do)
            assert not exchange.waiting, "memory may be used again that is still being sent"
            found.append((*logits, exchange.sent))
    do, launched = simulated()
    logits, _ = logits_of(paths[0], torch.float32, ranks(), CopiedByTheLibrary(), do)
    parallel.MANY_TOKENS, parallel.TILE = many, tile
    return found, (logits, launched)


def prompts(shapes: Sequence[tuple[int, int]]) -> list[Any]:
    """ids [sequences, tokens] of each shape."""
    return [
        torch.tensor([checks.prompt(files.WORDS, n, seed) for seed in range(count)])
        for count, n in shapes
    ]


def filled(model: Any, shapes: Sequence[tuple[int, int]]) -> list[tuple[Any, Any, Any]]:
    """(logits after the last tokens, after each token, after one more) of each prompt."""
    found = []
    for ids in prompts(shapes):
        ids = ids.to(model.device)
        cache = model.cache(len(ids), ids.shape[1] + 1)
        with torch.no_grad():
            last, every = model.prefill(ids, cache), model.prefill(ids, cache, every=True)
            found.append((last, every, model.step(ids[:, 0], cache)))
    return found


def long_prompts(path: Any, shapes: Sequence[tuple[int, int]]) -> list[Any]:
    """(`filled`, what was sent) in float64, in float32, and in float64 where a half's values are
    too large to be exchanged, but would not be in 16 bits."""
    here, found, most = ranks(), [], all_reduce.EXCHANGED
    of_prompt = 384 * 256  # values of the largest half
    for dtype, limit in (
        (torch.float64, most),
        (torch.float32, most),
        (torch.float64, 2 * of_prompt),
    ):
        all_reduce.EXCHANGED = limit
        here.sums._exchange = exchange = CopiedByTheLibrary()  # type: ignore[assignment]
        model = loaded(path, dtype, here, GATES_ALONE)
        found.append((filled(model, shapes), exchange.sent))
    all_reduce.EXCHANGED, here.sums._exchange = most, None
    return found


def on_gpus(path: Any, shapes: Sequence[tuple[int, int]]) -> list[Any]:
    """`filled` by kernels on a GPU each, of the whole model and of a share, how sums are made, and
    the last prompt's logits from a CUDA graph of the share, replayed several times."""
    from numba import cuda

    rank = distributed.get_rank()
    torch.cuda.set_device(rank)
    cuda.select_device(rank)
    here, do = Ranks(rank, 2, torch.device("cuda", rank)), between.chosen()
    whole, shared = (
        files.load(path, step_products(here.device), device=here.device, operations=do, ranks=one)
        for one in (None, here)
    )
    found: list[Any] = [filled(one, shapes) for one in (whole, shared)]
    ids = prompts(shapes)[-1].to(here.device)
    cache, kept = shared.cache(*ids.shape), torch.zeros_like(found[1][-1][0])
    replayed = []
    with torch.no_grad():
        graph = CapturedGraph(lambda: kept.copy_(shared.prefill(ids, cache)))
        for turn in range(6):
            if turn % 2 == rank:
                torch.cuda._sleep(1_000_000)  # the other rank waits, or sends what comes too early
            kept.zero_()
            graph.replay()
            replayed.append(kept.cpu())
    found = [[tuple(one.cpu() for one in logits) for logits in each] for each in found]
    return [*found, here.sums.how, replayed]


def begun() -> list[tuple[Any, Any]]:
    """(sums, right) of pairs of which the second is begun before the first is asked for: both are
    exchanged, one is too large, none is, and one is of float32."""
    here, found, most = ranks(), [], all_reduce.EXCHANGED
    for limit, dtype in (
        (most, torch.half),
        (63, torch.half),
        (0, torch.half),
        (most, torch.float),
    ):
        sums = all_reduce.AllReduce(here.group, here.device)
        sums._exchange = CopiedByTheLibrary() if limit else None  # type: ignore[assignment]
        all_reduce.EXCHANGED = limit
        for turn in range(3):
            values = [torch.arange(n * 8.0).view(n, 8).to(dtype) + turn for n in (4, 3)]
            pair = [sums.begin(one * (1 + here.rank)) for one in values]
            found += [(sum(one()), 3 * value) for one, value in zip(pair, values, strict=True)]
    all_reduce.EXCHANGED = most
    return found


def joined() -> dict[str, Any]:
    """Sums and logits of one product, whose numbers tell whose they are."""

    class Product(torch.nn.Module):
        accuracy = "exact"

        def __init__(self, n: int, dtype: Any) -> None:
            super().__init__()
            self.n, self.dtype = n, dtype

        def forward(self, x: Any) -> Any:
            at = torch.arange(self.n) + 100 * distributed.get_rank()
            return (x[:, :1] * 0 + at).to(self.dtype)

    here, x = ranks(), torch.zeros(3, 2)
    few, many = Product(8, torch.float32), Product(8, torch.float16)
    found: dict[str, Any] = {}
    summed = Summed(few, here.sums, 8)
    found["wide"] = few.wide, all_reduce.ONE_SHOT // 4 // 8
    found["sum"] = summed(x), Summed(many, here.sums, 8)(x)
    found["gathered"] = Gathered(Product(4, torch.float32), here.group, 7)(x)
    found["first"] = here.of_first(f"said by {here.rank}")
    here.wait()
    return found
