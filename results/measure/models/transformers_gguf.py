"""`generate` of transformers with a GGUF file: its own float weights beside the file's blocks.

    python -m results.measure.models.transformers_gguf model.gguf --out gguf.json

needs a GPU, transformers and accelerate. Two models are loaded one after the other, in one dtype:
as transformers makes it, which is float weights of the whole file, and after `use_gguf`. Of each:

    load_s      seconds until it is on the GPU, with its blocks
    bytes       of GPU memory that it holds, and the most that loading took
    tokens_s    by `generate`, eager and compiled (a static cache, which transformers compiles for):
                tokens after the first by the time that they add to it, the median of some rounds
    first_s     seconds to the first token of the prompt

and how far the second's logits are from the first's: KL divergence, and how many tokens are equal.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any, Final

from steps.nn import operator as operator
from steps.nn.gguf import use_gguf

torch = operator.torch

WAYS: Final = ("transformers", "blocks")
MODES: Final = ("eager", "compiled")
ROUNDS: Final = 5


def seconds(run: Any, device: Any) -> float:
    """Of a call, with all that it queues."""
    _wait(device)
    begin = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - begin


def _wait(device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def loaded(path: Path, way: str, dtype: Any, device: Any) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=dtype, attn_implementation="sdpa"
    )
    if way == "blocks":
        print(use_gguf(model, path).summary())
    return model.to(device).eval()


def speeds(model: Any, prompt: Any, tokens: int, modes: tuple[str, ...]) -> dict[str, Any]:
    found = {}
    for mode in modes:
        options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        if mode == "compiled":
            options["cache_implementation"] = "static"

        def generate(count: int, options: dict[str, Any] = options) -> Any:
            return model.generate(
                prompt, min_new_tokens=count, max_new_tokens=count, **options
            )  # fmt: skip

        # the first ones compile, for each length of a cache
        for _ in range(2):
            generate(1)
            generate(tokens)
        one = median(seconds(lambda: generate(1), prompt.device) for _ in range(ROUNDS))
        all_ = median(seconds(lambda: generate(tokens), prompt.device) for _ in range(ROUNDS))
        found[mode] = {"first_s": one, "tokens_s": (tokens - 1) / (all_ - one)}
    return found


def measure(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    on_gpu = device.type == "cuda"
    modes = MODES if on_gpu else MODES[:1]
    found: dict[str, Any] = {
        "file": path.name,
        "file_bytes": path.stat().st_size,
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "dtype": args.dtype,
        "prompt": args.prompt,
        "tokens": args.tokens,
    }
    logits, answers = [], []
    for way in WAYS:
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device) if on_gpu else 0
        begin = time.perf_counter()
        model = loaded(path, way, dtype, device)
        _wait(device)
        one: dict[str, Any] = {"load_s": time.perf_counter() - begin}
        if on_gpu:
            one["bytes"] = torch.cuda.memory_allocated(device) - before
            one["most_bytes"] = torch.cuda.max_memory_allocated(device) - before
        generator = torch.Generator().manual_seed(0)
        most = model.config.get_text_config().vocab_size
        prompt = torch.randint(most, (1, args.prompt), generator=generator).to(device)
        with torch.no_grad():
            logits.append(model(prompt).logits[0].float().log_softmax(-1).cpu())
            ids = model.generate(prompt, max_new_tokens=args.tokens, do_sample=False)
            answers.append(ids[0, args.prompt :].tolist())
            found[way] = one | speeds(model, prompt, args.tokens, modes)
        del model
    p, q = logits
    found["kl"] = float((p.exp() * (p - q)).sum(-1).mean())
    same = [a == b for a, b in zip(*answers, strict=False)]
    found["equal_tokens"] = same.index(False) if False in same else len(same)
    for mode in modes:
        ours, theirs = (found[way][mode]["tokens_s"] for way in reversed(WAYS))
        found[f"{mode}_ratio"] = ours / theirs
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="a GGUF file")
    parser.add_argument("--out", type=Path, help="where to write JSON")
    parser.add_argument("--dtype", default="float16", choices=operator.NAMES.values())
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens that follow")
    args = parser.parse_args()
    text = json.dumps(measure(args.file.resolve(), args), indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
