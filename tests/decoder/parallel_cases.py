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
