"""A llama of transformers by `quantize_model`, beside its bfloat16: what a user of a model gets.

    python -m results.measure.transformers_llama [--json]     # --json: into results/<gpu>/

Weights are random, in the shapes of Llama 3.2 1B. The sides are the model in bfloat16 and copies of
it after `quantize_model`; bfloat16 has the dequantized weights, so that logits can be compared.
Everything is called as its documentation says, and timed by the host's clock, which is what a user
waits for:

    prefill            model(ids, logits_to_keep=1), eager
    decode             model.generate, greedy, eager: a short prompt and then `STEPS` tokens
    decode, compiled   the same with cache_implementation="static", which compiles the model with
                       torch.compile(mode="reduce-overhead")

Rounds take turns, and medians are reported. Where a side's logits are wrong, nothing is: they may
be off by `SAFETY` times what errors as large as the products state change in those of bfloat16.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from results.measure.command import Wrong, main
from results.measure.loop import Timing, in_turn, ratio
from results.measure.products import THREADS
from results.record.schema import ModelRow, ModelRun
from steps.decoder.compare.stated_errors import BFLOAT16, SAFETY, disturbed

LLAMA_3_2_1B: Final[Mapping[str, Any]] = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
}
BASELINE: Final = "bfloat16"
PROMPT: Final = 512
FEW: Final = 16  # tokens of the prompt before decoding
STEPS: Final = 64
ROUNDS: Final = {"prefill": 15, "decode": 5, "decode, compiled": 9}
Call = Callable[[], Any]


def models(
    format_name: str, config: Mapping[str, Any], device: Any
) -> tuple[dict[str, Any], list[str], dict[str, float]]:
    """(side -> model, names of what is quantized in it, what quantizing and packing took)."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from steps.nn.linear import QuantLinear, quantize_model

    torch.manual_seed(0)
    with torch.device(device):
        baseline = LlamaForCausalLM(LlamaConfig(**config)).to(torch.bfloat16).eval()
    sides: dict[str, Any] = {BASELINE: baseline}
    facts: dict[str, float] = {}
    for accuracy, name in (("exact", format_name), ("fast", f"{format_name}, fast")):
        model = copy.deepcopy(baseline).cpu()
        begin = time.perf_counter()
        quantize_model(model, format_name, accuracy=accuracy)
        made = time.perf_counter()
        sides[name] = model.to(device)
        _wait(device)
        facts[f"quantize_model s, {name}"] = made - begin
        facts[f'.to("cuda") s, {name}'] = time.perf_counter() - made
    layers = {
        name: one
        for name, one in sides[format_name].named_modules()
        if isinstance(one, QuantLinear)
    }
    with ThreadPoolExecutor(THREADS) as pool:
        values = dict(zip(layers, pool.map(QuantLinear.dequantize, layers.values()), strict=True))
    for name, value in values.items():
        baseline.get_submodule(name).weight.data.copy_(value)
    return sides, list(values), facts


def calls(model: Any, case: str, device: Any) -> Call:
    """What a round of a case does."""
    import torch

    tokens = PROMPT if case == "prefill" else FEW
    ids = torch.arange(tokens, device=device)[None] * 31 % model.config.vocab_size
    if case == "prefill":
        return partial(model, ids, logits_to_keep=1)
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
    options |= {"min_new_tokens": STEPS, "max_new_tokens": STEPS}
    if case == "decode, compiled":
        options["cache_implementation"] = "static"
    return partial(model.generate, ids, attention_mask=torch.ones_like(ids), **options)


def relative(logits: Any, theirs: Any) -> float:
    """Root mean square of the difference over that of `theirs`."""
    off = (logits.float() - theirs.float()).square().mean() / theirs.float().square().mean()
    return float(off.sqrt())


def expected(baseline: Any, quantized: Iterable[str], call: Call, right: Any) -> dict[str, float]:
    """Accuracy -> by how much logits are off, relative to `right`, where those modules of the
    baseline that others have `quantized` are off by what products in bfloat16 state."""
    products = [baseline.get_submodule(name) for name in quantized]
    found = {}
    for accuracy in ("exact", "fast"):
        with disturbed(products, accuracy, unit=BFLOAT16):
            found[accuracy] = relative(call().logits, right)
    return found


def differences(logits: Mapping[str, Any], stated: Mapping[str, float]) -> dict[str, float]:
    """Of each side from `BASELINE`, and their bounds: root mean square of the difference over that
    of the logits. stated: accuracy -> what is `expected`. Wrong beyond a bound."""
    facts = {}
    for name in [name for name in logits if name != BASELINE]:
        off = relative(logits[name], logits[BASELINE])
        bound = SAFETY * stated["fast" if name.endswith(", fast") else "exact"]
        facts[f"rms difference of logits, {name}"] = off
        facts[f"bound of it, {name}"] = bound
        if not off <= bound:
            raise Wrong(
                f"the logits of {name} differ by {off:.3g} of their root mean square from those of "
                f"{BASELINE}, the bound is {bound:.3g}: nothing more was timed"
            )
    return facts


def timed(call: Call, wait: Call) -> tuple[float, Any]:
    """(seconds from a call to the end of its last kernel, what it returned)."""
    wait()
    begin = time.perf_counter()
    got = call()
    wait()
    return time.perf_counter() - begin, got


def seconds(call: Call, wait: Call) -> float:
    return timed(call, wait)[0]


def rows(
    case: str, tokens: int, first: Mapping[str, float], took: Mapping[str, Sequence[float]]
) -> list[ModelRow]:
    """A row for each side of a case."""
    found = []
    for side, times in took.items():
        timing = Timing.of(times)
        found.append(
            ModelRow(
                case=case,
                side=side,
                ms=timing.us * 1e-3,
                p20_ms=timing.p20_us * 1e-3,
                p80_ms=timing.p80_us * 1e-3,
                tokens_per_s=tokens / timing.us * 1e6,
                x_bfloat16=ratio(took[BASELINE], times),
                rounds=timing.rounds,
                first_s=first[side],
            )
        )
    return found


def measure(
    format_name: str = "q4_0",
    config: Mapping[str, Any] = LLAMA_3_2_1B,
    device: str = "cuda",
    say: Callable[[str], None] = print,
) -> tuple[list[ModelRow], dict[str, float]]:
    """(rows, facts). Wrong where a side's are; of a case that fails, a sentence."""
    import torch

    with torch.no_grad():
        sides, quantized, facts = models(format_name, config, device)
        wait, found = partial(_wait, device), []
        for case, rounds in ROUNDS.items():
            # at one token "fast" selects the steps that exact layers do
            own = sides if case == "prefill" else {n: sides[n] for n in (BASELINE, format_name)}
            work = {name: calls(model, case, device) for name, model in own.items()}
            try:
                begun = {name: timed(call, wait) for name, call in work.items()}
                if case == "prefill":
                    logits = {name: got.logits for name, (_, got) in begun.items()}
                    right = logits[BASELINE]
                    stated = expected(sides[BASELINE], quantized, work[BASELINE], right)
                    facts |= differences(logits, stated)
                for call in 2 * list(work.values()):
                    call()
                sides_of = [partial(seconds, call, wait) for call in work.values()]
                took = dict(zip(work, in_turn(sides_of, rounds), strict=True))
            except Wrong:
                raise
            except Exception as error:  # of the compiler, of any type
                say(f"{case} was not measured: {type(error).__name__}: {error}")
                continue
            first = {name: taken for name, (taken, _) in begun.items()}
            title = f"{case}, {PROMPT} tokens" if case == "prefill" else f"{case}, batch 1"
            new = rows(title, PROMPT if case == "prefill" else STEPS, first, took)
            for one in new:
                say(line(one))
            found += new
    return found, facts


def _wait(device: Any) -> None:
    import torch

    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def line(one: ModelRow) -> str:
    """A row in a sentence."""
    return (
        f"{one.case}: {one.side} {one.ms:.3g} ms, {one.tokens_per_s:,.0f} tokens/s, "
        f"{one.x_bfloat16:.2f}x of {BASELINE}, first call {one.first_s:.1f} s"
    )


def _found(format_name: str) -> dict[str, Any]:
    import torch
    import transformers

    rows, facts = measure(format_name)
    return {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "model": "Llama 3.2 1B, random weights",
        "format": format_name,
        "facts": facts,
        "rows": tuple(rows),
    }


if __name__ == "__main__":
    sys.exit(main(ModelRun, ("torch", "transformers"), _found))
