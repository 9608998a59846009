"""`generate` of transformers with a GGUF file: its own float weights beside the file's blocks.

    python -m results.measure.models.transformers_gguf model.gguf --out gguf.json
    python -m results.measure.models.transformers_gguf --random llama-3.2-1b --format q4_0

needs a GPU, transformers and accelerate. Two models are loaded, in one dtype:
as transformers makes it, which is float weights of the whole file, and after `use_gguf`. Of each:

    bytes       of its parameters and buffers on the GPU, those that share memory once
    tokens_s    by `generate`, eager and compiled (a static cache, which transformers compiles for):
                tokens after the first by the time that they add to it, the median of some rounds
    first_s     seconds to the first token of the prompt
    cold        with --cold, which leaves no kernel on disk: seconds that the first prefill takes,
                and the first tokens by `generate`, with all that is compiled for them

and how far the second's logits are from the first's: KL divergence, and how many tokens are equal.
--random writes a file with the shapes of a model and random weights, for which speed and memory are
those of the model's own file; its name says so. A record that exists keeps the rows of other files.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Final

from qformats import WEIGHT_FORMATS
from qformats.gguf_file import metadata
from results.record.environment import environment, finished
from steps.compile.kernel_cache import VARIABLE
from steps.decoder.files import write_tiny
from steps.nn import operator as operator
from steps.nn.gguf import use_gguf

torch = operator.torch

WAYS: Final = ("transformers", "blocks")
MODES: Final = ("eager", "compiled")
ROUNDS: Final = 5
FIRST: Final = 8
"""Tokens of which `cold` says how long the first ones take."""


def _llama(layers: int, width: int, hidden: int, heads: int, kv_heads: int) -> dict[str, int]:
    return {
        "block_count": layers,
        "embedding_length": width,
        "feed_forward_length": hidden,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
    }


SHAPES: Final[dict[str, dict[str, Any]]] = {
    "smollm2-135m": _llama(30, 576, 1536, 9, 3) | {"words": 49152},
    "llama-3.2-1b": _llama(16, 2048, 8192, 32, 8) | {"words": 128256},
}
"""Of models whose embedding is their output layer, too."""


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


def nbytes(model: Any, device: Any) -> int:
    held = [*model.parameters(), *model.buffers()]
    storages = {one.data_ptr(): one for one in (each.untyped_storage() for each in held)}
    return sum(one.nbytes() for one in storages.values() if one.device.type == device.type)


def speeds(models: dict[str, Any], prompt: Any, tokens: int, mode: str) -> dict[str, Any]:
    """Of each way, by rounds in which they take turns: the host, which is busy in eager calls, is
    not equally fast at all times."""
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    if mode == "compiled":
        options["cache_implementation"] = "static"

    def took(way: str, count: int) -> float:
        def generate() -> None:
            models[way].generate(prompt, min_new_tokens=count, max_new_tokens=count, **options)

        return seconds(generate, prompt.device)

    counts = 1, tokens
    times: dict[str, dict[int, list[float]]] = {}
    for way in models:
        # the first one compiles, and makes a static cache that is long enough for all others
        for count in (tokens, *counts):
            took(way, count)
        times[way] = {count: [] for count in counts}
    for _ in range(ROUNDS):
        for way, own in times.items():
            for count in counts:
                own[count].append(took(way, count))
    found = {}
    for way, own in times.items():
        one, all_ = (median(own[count]) for count in counts)
        found[way] = {"first_s": one, "tokens_s": (tokens - 1) / (all_ - one)}
        print(mode, way, found[way], flush=True)
    return found


def measure(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    on_gpu = device.type == "cuda"
    modes = MODES if on_gpu else MODES[:1]
    found: dict[str, Any] = {
        "file": path.name,
        "name": str(metadata(path).get("general.name")),
        "file_bytes": path.stat().st_size,
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "dtype": args.dtype,
        "prompt": args.prompt,
        "tokens": args.tokens,
    }
    logits, answers, models = [], [], {}
    for way in WAYS:
        print(way, flush=True)
        model = loaded(path, way, dtype, device)
        generator = torch.Generator().manual_seed(0)
        most = model.config.get_text_config().vocab_size
        prompt = torch.randint(most, (1, args.prompt), generator=generator).to(device)
        found[way], models[way] = {"bytes": nbytes(model, device)}, model
        with torch.no_grad():
            if args.cold:
                generate = partial(model.generate, prompt, max_new_tokens=FIRST, do_sample=False)
                calls = partial(model, prompt), generate
                found[way]["cold"] = [seconds(call, device) for call in calls]
            logits.append(model(prompt).logits[0].float().log_softmax(-1).cpu())
            ids = model.generate(prompt, max_new_tokens=args.tokens, do_sample=False)
            answers.append(ids[0, args.prompt :].tolist())
    with torch.no_grad():
        for mode in modes:
            for way, one in speeds(models, prompt, args.tokens, mode).items():
                found[way][mode] = one
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
    parser.add_argument("file", type=Path, nargs="?", help="a GGUF file")
    parser.add_argument("--random", choices=SHAPES, help="a file of random weights instead")
    parser.add_argument("--format", default="q4_0", choices=WEIGHT_FORMATS, help="of --random")
    parser.add_argument("--out", type=Path, help="where to write JSON")
    parser.add_argument("--dtype", default="float16", choices=operator.NAMES.values())
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens that follow")
    parser.add_argument("--cold", action="store_true", help="with no compiled kernel on disk")
    args = parser.parse_args()
    if (args.file is None) == (args.random is None):
        parser.error("name a file, or --random and a model of which it has the shapes")
    env = environment()
    with tempfile.TemporaryDirectory() as folder:
        if args.cold:
            os.environ[VARIABLE] = f"{folder}/kernels"
        path = args.file
        if path is None:
            path = Path(folder) / f"{args.random}-{args.format}.gguf"
            write_tiny(path, args.format, tied=True, **SHAPES[args.random])
        found = measure(path.resolve(), args)
    print(json.dumps(found, indent=1))
    if args.out:
        rows = json.loads(args.out.read_text("utf-8"))["rows"] if args.out.exists() else []
        rows = [*(one for one in rows if one["file"] != found["file"]), found]
        record = {"schema": 1, "env": asdict(finished(env)), "rows": rows}
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
