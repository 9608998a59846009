"""Is a decoder right? Against torch on the dequantized weights, and against llama.cpp.

Logits are compared along one sequence of tokens, so that a difference does not grow by what it
chose: the root mean square of all differences over that of the logits. What is allowed is what
rounding activations costs, which is all that the products do besides adding up in float32:

    exact   `BOUND["exact"]`: 8 bits and a scale for 32 values are off by 1/2 of 1/127 of the
            largest at most, 0.5 % of normal values in root mean square; a layer's two branches
            are sums of several such products, whose errors add up as independent ones do
    fast    `BOUND["fast"]`: one scale for all values of a token, whose largest is twice that of 32
            of them, and weights rounded once more

Tokens are the likeliest ones of each side, on its own. Where they differ first, the two that were
chosen are named with the distance of their logits in the reference: the difference is explained
where that is no more than both logits are off together.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np

from results.decoder import files
from results.decoder.model import Decoder, by_steps, by_torch, generate, torch
from results.decoder.operations import PLAIN, Operations

BOUND: Final = {"exact": 0.03, "fast": 0.06}
FLOATS: Final = 1e-5
"""The bound where llama.cpp has float32 weights and keys, and rounds nothing to 8 bits."""
STEPS: Final = 64
PROMPT: Final = 192  # tokens: more than the step for few of them takes


def reference(path: Any, device: Any = "cpu", requantize: str | None = None) -> Decoder:
    """torch on the dequantized weights in float64."""
    return files.load(
        path,
        by_torch(device, torch.float64),
        requantize=requantize or "float32",
        device=device,
        wide=torch.float64,
        keys=torch.float64,
    )


def prompt(vocabulary: int, count: int = PROMPT, seed: int = 0) -> list[int]:
    """A token 1, then random ones."""
    rng = np.random.default_rng(seed)
    return [1, *map(int, rng.integers(3, vocabulary, count - 1))]


def relative(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Root mean square of the differences over that of `theirs`."""
    return float(np.sqrt(((ours - theirs) ** 2).mean() / (theirs**2).mean()))


def first_difference(
    ours: Sequence[int], theirs: Sequence[int], logits: np.ndarray, off: np.ndarray
) -> dict[str, Any] | None:
    """Where two lists of tokens differ first, if they do.

    logits : the reference's [steps, V], along ours up to there.
    off    : by how much the compared logits are off from these, [steps, V].
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
) -> dict[str, Any]:
    """Ours on the GPU against `reference`: logits of a prompt and of `steps` steps, and tokens."""
    file = files.Model(path)
    ours = files.load(
        file,
        by_steps(device, accuracy),
        requantize=requantize,
        device=device,
        operations=operations,
    )
    if jobs > 1:
        ours.compile_ahead([(accuracy, 1), (accuracy, len(ids))], jobs)
    judge = reference(file, device, requantize)
    given = torch.tensor([list(ids)], device=device)
    tokens, kept = generate(ours, given, steps, keep=True)
    theirs, _ = generate(judge, given, steps, graph=False)
    whole = torch.cat([given, tokens[:, :-1]], 1)
    right = judge.prefill(whole, judge.cache(1, whole.shape[1]), every=True)[0].cpu().numpy()
    filled = ours.prefill(given, ours.cache(1, len(ids)), every=True)[0].double().cpu().numpy()
    stepped = torch.cat(kept).double().cpu().numpy()
    behind = right[len(ids) - 1 :]
    found = {
        "accuracy": accuracy,
        "prompt_tokens": len(ids),
        "steps": steps,
        "bound": BOUND[accuracy],
        "rms_difference_of_prompt": relative(filled, right[: len(ids)]),
        "rms_difference_of_steps": relative(stepped, behind),
        "largest_difference": float(np.abs(stepped - behind).max()),
        "tokens": tokens[0].tolist(),
        "same_tokens": torch.equal(tokens, theirs),
        "first_difference": first_difference(
            tokens[0].tolist(), theirs[0].tolist(), behind, stepped - behind
        ),
    }
    off = max(found["rms_difference_of_prompt"], found["rms_difference_of_steps"])
    found["right"] = off <= BOUND[accuracy] and _explained(found)
    return found


def _explained(found: dict[str, Any]) -> bool:
    difference = found["first_difference"]
    return difference is None or difference["explained"]


@torch.no_grad()
def against_llama_cpp(
    path: str | os.PathLike[str], ids: Sequence[int], *, floats: bool = False, steps: int = STEPS
) -> dict[str, Any]:
    """llama.cpp on the CPU against `reference`, on the same file.

    floats: keys and values in float32 too, for a file of float32, of which nothing is rounded.
    """
    try:
        llama_cpp: Any = import_module("llama_cpp")
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            "this comparison needs llama.cpp: pip install llama-cpp-python", name="llama_cpp"
        ) from missing

    kind = 0 if floats else 1  # of ggml's: float32 or float16
    theirs = llama_cpp.Llama(
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
        at = llama_cpp.llama_get_logits_ith(theirs.ctx, -1)
        kept.append(np.ctypeslib.as_array(at, (theirs.n_vocab(),)).astype(np.float64))
        tokens.append(int(kept[-1].argmax()))
        theirs.eval(tokens[-1:])
    judge = reference(path)
    given = torch.tensor([list(ids)])
    ours, _ = generate(judge, given, steps)
    whole = torch.tensor([[*ids, *tokens[:-1]]])
    right = judge.prefill(whole, judge.cache(1, whole.shape[1]), every=True)[0, len(ids) - 1 :]
    logits = right.numpy()
    off = np.stack(kept) - logits
    found = {
        "file": Path(path).name,
        "prompt": list(ids),
        "steps": steps,
        "llama.cpp's keys and values": "float32" if floats else "float16",
        "bound": FLOATS if floats else BOUND["exact"],
        "rms_difference": relative(np.stack(kept), logits),
        "largest_difference": float(np.abs(off).max()),
        "tokens": tokens,
        "same_tokens": tokens == ours[0].tolist(),
        "first_difference": first_difference(tokens, ours[0].tolist(), logits, off),
    }
    found["right"] = found["rms_difference"] <= found["bound"] and _explained(found)
    return found
