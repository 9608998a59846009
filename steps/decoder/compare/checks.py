"""Is a decoder right? Against torch on the dequantized weights.

Logits are compared along one sequence of tokens, so that an early difference does not grow: the
root mean square of all differences, divided by that of the logits.

The bound is made of what the products state, and of the model:
`steps.decoder.compare.stated_errors` says how. `expected` is by how much the logits change where
each product of the reference is off by what it states, and the bound is `SAFETY` times that.

Each side also decodes on its own. Where the tokens differ first, both tokens are named, with the
distance of their logits in the reference. The difference is explained if that distance is no more
than the errors of both logits together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from steps.decoder import files
from steps.decoder.compare import stated_errors
from steps.decoder.compare.stated_errors import SAFETY
from steps.decoder.model import Decoder, generate, step_products, torch, torch_products
from steps.decoder.operations import PLAIN, Operations

STEPS: Final = 64
PROMPT: Final = 192  # tokens: more than the decode steps are for


def reference(path: Any, device: Any = "cpu", requantize: str | None = None) -> Decoder:
    """The decoder by torch on the dequantized weights, in float64."""
    return files.load(
        path,
        torch_products(device, torch.float64),
        requantize=requantize or "float32",
        device=device,
        residual_dtype=torch.float64,
        cache_dtype=torch.float64,
    )


def prompt(vocabulary: int, count: int = PROMPT, seed: int = 0) -> list[int]:
    """A token 1, then random ones."""
    rng = np.random.default_rng(seed)
    first, least = min(1, vocabulary - 1), min(3, vocabulary - 1)
    return [first, *map(int, rng.integers(least, vocabulary, count - 1))]


@torch.no_grad()
def expected(trusted: Decoder, ids: Sequence[int], rounding: str, seed: int = 0) -> float:
    """By how much the logits along ids change, relative to them, in root mean square, where each
    product of the reference is off by what it states."""
    given = torch.tensor([list(ids)], device=trusted.device)

    def logits() -> np.ndarray:
        filled = trusted.prefill(given, trusted.cache(1, len(ids)), every=True)
        values: np.ndarray = filled[0].cpu().numpy()
        return values

    right = logits()
    plain = [one for each in trusted.products for one in getattr(each, "products", [each])]
    with stated_errors.disturbed(plain, rounding, seed):
        return relative(logits(), right)


def relative(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Root mean square of the differences over that of `theirs`."""
    return float(np.sqrt(((ours - theirs) ** 2).mean() / (theirs**2).mean()))


def first_difference(
    ours: Sequence[int], theirs: Sequence[int], logits: np.ndarray, off: np.ndarray
) -> dict[str, Any] | None:
    """The first place where two lists of tokens differ; None where they are the same.

    logits : the reference's [steps, V], along `ours`.
    off    : the compared logits minus these, [steps, V].
    """
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a != b:
            margin = float(abs(logits[i, a] - logits[i, b]))
            both = float(abs(off[i, a]) + abs(off[i, b]))
            return {
                "step": i,
                "tokens": [a, b],
                "margin": margin,
                "both_off_by": both,
                "explained": margin <= both,
            }
    return None


@torch.no_grad()
def against_torch(
    path: Any,
    ids: Sequence[int],
    *,
    accuracy: str = "exact",
    requantize: str | None = None,
    device: Any = "cuda",
    operations: Operations = PLAIN,
    steps: int = STEPS,
    jobs: int = 1,
    ranks: Any = None,
) -> dict[str, Any]:
    """The steps on a GPU, or on those of `ranks`, against `reference`: logits of a prompt and of
    `steps` tokens."""
    file = files.Model(path)
    ours = files.load(
        file,
        step_products(device, accuracy),
        requantize=requantize,
        device=device,
        operations=operations,
        ranks=ranks,
    )
    if jobs > 1:
        ours.compile_ahead([(accuracy, 1), (accuracy, len(ids))], jobs)
    trusted = reference(file, device, requantize)
    prompt_ids = torch.tensor([list(ids)], device=device)
    tokens, kept = generate(ours, prompt_ids, steps, keep=True)
    theirs, _ = generate(trusted, prompt_ids, steps, graph=False)
    whole = torch.cat([prompt_ids, tokens[:, :-1]], 1)
    right = trusted.prefill(whole, trusted.cache(1, whole.shape[1]), every=True)[0].cpu().numpy()
    filled = ours.prefill(prompt_ids, ours.cache(1, len(ids)), every=True)[0].double().cpu().numpy()
    stepped = torch.cat(kept).double().cpu().numpy()
    behind = right[len(ids) - 1 :]
    bound = SAFETY * expected(trusted, whole[0].tolist(), accuracy)
    off = [relative(filled, right[: len(ids)]), relative(stepped, behind)]
    mine, others = tokens[0].tolist(), theirs[0].tolist()
    difference = first_difference(mine, others, behind, stepped - behind)
    explained = difference is None or difference["explained"]
    return {
        "accuracy": accuracy,
        "prompt_tokens": len(ids),
        "steps": steps,
        "bound": bound,
        "rms_difference_of_prompt": off[0],
        "rms_difference_of_steps": off[1],
        "largest_difference": float(np.abs(stepped - behind).max()),
        "tokens": mine,
        "same_tokens": mine == others,
        "first_difference": difference,
        "right": max(off) <= bound and explained,
    }
