"""What each of several ranks does with a model that they share: see `test_parallel.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from steps.decoder import files, kernel_operations, parallel
from steps.decoder.compare import checks
from steps.decoder.model import generate, step_products, torch_products
from steps.decoder.parallel import Gathered, Ranks, Summed
from steps.nn import all_reduce


def ranks() -> Ranks:
    return Ranks(distributed.get_rank(), distributed.get_world_size(), torch.device("cpu"))


def logits_of(path: Any, dtype: Any, ranks: Ranks | None = None, exchange: Any = None) -> Any:
    """Of a prompt, then of tokens that follow, one by one: [T + steps, V] and the tokens.

    exchange: of two ranks, who halve the prompt then."""
    model = files.load(
        path,
        torch_products(dtype=dtype),
        requantize="float32",
        residual_dtype=dtype,
        cache_dtype=dtype,
        ranks=ranks,
    )
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


def on_two_gpus(path: Any) -> dict[int, dict[str, Any]]:
    """Of 1 and 4 sequences: logits [steps, B, V] of tokens with sums within the products, those of
    the same tokens with sums that are launches, and of these products `taken` in a token."""
    from numba import cuda

    rank = distributed.get_rank()
    torch.cuda.set_device(rank)
    cuda.select_device(rank)
    here, do = Ranks(rank, 2, torch.device("cuda", rank)), kernel_operations.Kernels()
    model = files.load(path, step_products(), device="cuda", operations=do, ranks=here)
    if rank == 0:
        model.compile_ahead([("exact", 1), ("exact", 4)], 8, say=lambda _: None)
    here.wait()
    found: dict[int, dict[str, Any]] = {}
    for batch in (1, 4):
        ids, of = torch.arange(3, 3 + batch, device="cuda")[:, None], found.setdefault(batch, {})
        with torch.no_grad():
            tokens, logits = generate(model, ids, 200, keep=True)
            of["within"] = torch.stack(logits).cpu()
            of["again"] = torch.stack(generate(model, ids, 200, keep=True)[1]).cpu()
            h = torch.zeros(batch, model.config.width, device="cuda")
            norms = [one[:3] for one in model._norms()]
            of["taken"] = sum(do.deferred.takes(a, b, h, weight) for a, weight, b in norms)
            deferred, do.deferred = do.deferred, None
            cache = model.cache(batch, 201)
            launched = [model.prefill(ids, cache)]
            launched += [model.step(one, cache) for one in tokens.T[:-1]]
            of["launched"] = torch.stack(launched).cpu()
            do.deferred = deferred
    return found


class CopiedByTheLibrary:
    """An `all_reduce.Exchange` of two ranks on the CPU: what is sent goes to the other at once, and
    is there as long as that class promises."""

    def __init__(self) -> None:
        self.slots = [torch.zeros(1 << 20, dtype=torch.uint8) for _ in range(2)]
        self.sizes: list[int] = []

    def begin(self, values: Any) -> Any:
        assert values.is_contiguous()
        pair = [torch.empty_like(values) for _ in range(2)]
        distributed.all_gather(pair, values)
        self.slots.reverse()
        here = self.slots[0].fill_(255)[: values.nbytes]  # NaN
        here.copy_(pair[1 - distributed.get_rank()].view(-1).view(torch.uint8))
        self.sizes.append(len(values))
        return lambda: here.view(values.dtype).view(values.shape)


def halved(paths: list[Any]) -> list[Any]:
    """(logits in float64, tokens, tokens of each sum) of each file, whose prompt of 7 tokens goes
    through the layers in two parts."""
    many, tile = parallel.MANY_TOKENS, parallel.TILE
    parallel.MANY_TOKENS, parallel.TILE = 7, 2
    found = []
    for path in paths:
        exchange = CopiedByTheLibrary()
        found.append((*logits_of(path, torch.float64, ranks(), exchange), exchange.sizes))
    parallel.MANY_TOKENS, parallel.TILE = many, tile
    return found


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
