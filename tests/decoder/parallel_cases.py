"""What each of several ranks does with a model that they share: see `test_parallel.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from results.decoder import files
from results.decoder.compare import checks
from results.decoder.model import generate, torch_products
from results.decoder.parallel import Gathered, Ranks, Summed
from steps.nn import all_reduce


def ranks() -> Ranks:
    return Ranks(distributed.get_rank(), distributed.get_world_size(), torch.device("cpu"))


def logits_of(path: Any, dtype: Any, ranks: Ranks | None = None) -> Any:
    """Of a prompt, then of tokens that follow, one by one: [T + steps, V] and the tokens."""
    model = files.load(
        path,
        torch_products(dtype=dtype),
        requantize="float32",
        residual_dtype=dtype,
        cache_dtype=dtype,
        ranks=ranks,
    )
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
    """An `all_reduce.Exchange` of two ranks on the CPU: what is sent goes to the other at once."""

    def __init__(self) -> None:
        self.got = torch.zeros(1 << 20, dtype=torch.uint8)
        self.sizes: list[int] = []

    def begin(self) -> None:
        self.got.fill_(255)  # NaN

    def send(self, values: Any, at: int) -> None:
        assert values.is_contiguous()
        pair = [torch.empty_like(values) for _ in range(2)]
        distributed.all_gather(pair, values)
        data = pair[1 - distributed.get_rank()].view(-1).view(torch.uint8)
        self.got[at : at + len(data)] = data
        self.sizes.append(len(values))

    def received(self, like: Any) -> Any:
        return self.got[: like.nbytes].view(like.dtype).view(like.shape)


def exchanged() -> list[tuple[Any, Any, list[int], list[int]]]:
    """Sums of many tokens: (y, right, tokens in each part, tokens sent), of one that is exchanged,
    one too large for that, one of few tokens, and one without an exchange."""

    class Product(torch.nn.Module):
        accuracy = "exact"

        def __init__(self) -> None:
            super().__init__()
            self.given: list[int] = []

        def forward(self, x: Any) -> Any:
            self.given.append(len(x))
            return (x * (1 + distributed.get_rank())).half()

        def after_swiglu(self, y: Any, swiglu: Any) -> Any:
            return self(swiglu(y))

    here, found = ranks(), []
    most = all_reduce.EXCHANGED
    for tokens, limit, how in (
        (1100, most, "forward"),
        (1100, most, "after_swiglu"),
        (1100, 1100 * 8 * 2 - 1, "forward"),
        (1023, most, "forward"),
        (1100, 0, "forward"),
    ):
        sums = all_reduce.AllReduce(here.group, here.device)
        exchange = CopiedByTheLibrary()
        sums._exchange = exchange if limit else None  # type: ignore[assignment]
        all_reduce.EXCHANGED = limit
        product = Product()
        summed = Summed(product, sums, 8)
        x = torch.arange(tokens * 8.0).view(tokens, 8) % 97
        y = summed(x) if how == "forward" else summed.after_swiglu(x, lambda y: y)
        found.append((y, 3 * x.half(), product.given, exchange.sizes))
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
