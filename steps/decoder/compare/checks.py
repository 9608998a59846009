"""Is a decoder right? Against torch on the dequantized weights, and against llama.cpp.

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

import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np

from steps.decoder import files
from steps.decoder.compare import stated_errors
from steps.decoder.compare.stated_errors import SAFETY
from steps.decoder.model import (
    Decoder,
    generate,
    step_products,
    torch,
    torch_products,
)
from steps.decoder.operations import PLAIN, Operations

FLOATS: Final = 1e-5
"""The bound where llama.cpp has float32 weights and cache, and rounds nothing to 8 bits."""
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
    facts = {
        "accuracy": accuracy,
        "prompt_tokens": len(ids),
        "steps": steps,
        "bound": SAFETY * expected(trusted, whole[0].tolist(), accuracy),
        "rms_difference_of_prompt": relative(filled, right[: len(ids)]),
        "rms_difference_of_steps": relative(stepped, behind),
    }
    return _judged(facts, tokens[0].tolist(), theirs[0].tolist(), behind, stepped - behind)


def _judged(
    facts: dict[str, Any],
    ours: list[int],
    theirs: list[int],
    logits: np.ndarray,
    off: np.ndarray,
) -> dict[str, Any]:
    """facts, with a "bound" and relative differences, and what the tokens say; see
    `first_difference`."""
    difference = first_difference(ours, theirs, logits, off)
    within = [x <= facts["bound"] for name, x in facts.items() if name.startswith("rms_")]
    return facts | {
        "largest_difference": float(np.abs(off).max()),
        "tokens": ours,
        "same_tokens": ours == theirs,
        "first_difference": difference,
        "right": all(within) and (difference is None or difference["explained"]),
    }


def llama_cpp() -> Any:
    """llama.cpp's package. ModuleNotFoundError where it is not installed."""
    try:
        return import_module("llama_cpp")
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            "--against-llama-cpp needs llama.cpp: pip install llama-cpp-python", name="llama_cpp"
        ) from missing


@torch.no_grad()
def against_llama_cpp(
    path: str | os.PathLike[str], ids: Sequence[int], *, floats: bool = False, steps: int = STEPS
) -> dict[str, Any]:
    """llama.cpp on the CPU against `reference`, on the same file.

    floats: llama.cpp keeps its cache in float32 too, for a file of float32, so that nothing is
    rounded.
    """
    package = llama_cpp()
    kind = 0 if floats else 1  # of ggml's: float32 or float16
    theirs = package.Llama(
        str(path),
        n_ctx=-(-(len(ids) + steps) // 256) * 256,
        n_batch=512,
        n_gpu_layers=0,
        type_k=kind,
        type_v=kind,
        verbose=False,
    )
    theirs.eval(list(ids))
    tokens, kept = [], []
    for _ in range(steps):
        at = package.llama_get_logits_ith(theirs.ctx, -1)
        kept.append(np.ctypeslib.as_array(at, (theirs.n_vocab(),)).astype(np.float64))
        tokens.append(int(kept[-1].argmax()))
        theirs.eval(tokens[-1:])
    trusted = reference(path)
    prompt_ids = torch.tensor([list(ids)])
    ours, _ = generate(trusted, prompt_ids, steps)
    whole = torch.tensor([[*ids, *tokens[:-1]]])
    right = trusted.prefill(whole, trusted.cache(1, whole.shape[1]), every=True)[0, len(ids) - 1 :]
    logits = right.numpy()
    facts = {
        "file": Path(path).name,
        "prompt": list(ids),
        "steps": steps,
        "llama.cpp's keys and values": "float32" if floats else "float16",
        "bound": FLOATS if floats else SAFETY * expected(trusted, whole[0].tolist(), "Q8_1"),
        "rms_difference": relative(np.stack(kept), logits),
    }
    return _judged(facts, tokens, ours[0].tolist(), logits, np.stack(kept) - logits)
