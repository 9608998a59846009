"""The command line of the decoder: `python -m results.decoder MODEL.gguf`, or `--bench`.

It exits with 0, with 1 where a comparison fails, and with 2 after one sentence where the request
cannot be met.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from qformats import WEIGHT_FORMATS
from results.record.environment import environment, finished


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one sentence, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is asked for and return its exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        return _run(args)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"{parser.prog}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _parser() -> Parser:
    one = Parser(
        prog="python -m results.decoder",
        description="Run a llama from a GGUF file with this project's kernels.",
    )
    one.add_argument("model", nargs="?", type=Path, help="a .gguf file of the architecture llama")
    one.add_argument("--prompt", help="text to continue")
    one.add_argument(
        "--ids", type=_ids, help="tokens to continue: 1,2,3 (default: the one that begins texts)"
    )
    one.add_argument("--tokens", type=_count, default=64, help="how many to generate (default 64)")
    one.add_argument("--accuracy", choices=("exact", "fast"), default="exact")
    one.add_argument(
        "--requantize",
        choices=WEIGHT_FORMATS,
        metavar="F",
        help="quantize matrices of types that no kernel takes again, to this format",
    )
    one.add_argument(
        "--reference", action="store_true", help="multiply dequantized weights by torch, on the CPU"
    )
    one.add_argument(
        "--check",
        action="store_true",
        help="compare with torch on the dequantized weights; without MODEL, of a small random one",
    )
    one.add_argument(
        "--against-llama-cpp",
        action="store_true",
        help="compare torch on the dequantized weights with llama.cpp, on the CPU; without MODEL "
        "likewise",
    )
    one.add_argument("--bench", action="store_true", help="measure with the shapes of Llama 3 8B")
    one.add_argument(
        "--format", choices=WEIGHT_FORMATS, default="q4_0", help="format of random weights"
    )
    one.add_argument(
        "--parts", type=lambda text: text.split(","), default=["decode", "prefill"],
        help="what to measure: decode,prefill",
    )  # fmt: skip
    one.add_argument(
        "--between", choices=("plain", "compiled", "overlapped"),
        help="how norms and attention run on a GPU (default: overlapped where torch can)",
    )  # fmt: skip
    one.add_argument(
        "--jobs", type=_count, default=min(os.cpu_count() or 1, 16),
        help="processes that compile kernels for --check and --bench (default: cores, at most 16)",
    )  # fmt: skip
    one.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    return one


def _ids(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    if not words or not all(word.isdecimal() for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of tokens like 1,2,3")
    return [int(word) for word in words]


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 20:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 1048575")
    return int(text)


def _run(args: argparse.Namespace) -> int:
    from results.decoder import operations  # without torch it raises one sentence

    torch = operations.torch
    jobs = args.check or args.against_llama_cpp or args.bench
    if args.model is None and not jobs:
        raise ValueError("name a model: make decoder GGUF=model.gguf")
    on_gpu = not (args.reference or args.against_llama_cpp)
    if on_gpu and not torch.cuda.is_available():
        raise ValueError(
            "torch finds no CUDA GPU: use one, or --reference for dequantized weights on the CPU"
        )
    do = operations.compiled(args.between, autotuned=args.bench) if on_gpu else operations.PLAIN
    env = environment()
    found: dict[str, Any] = {}
    status = 0
    with tempfile.TemporaryDirectory() as folder:
        if args.check:
            found["against torch on the dequantized weights"] = _check(args, do, Path(folder))
        if args.against_llama_cpp:
            found["against llama.cpp"] = _against_llama_cpp(args, Path(folder))
    for comparisons in found.values():
        for one in comparisons:
            status |= not one["right"]
            print(_sentence(one))
    if args.bench:
        from results.decoder import bench

        found["bench"] = bench.measure(do, args.format, parts=args.parts, jobs=args.jobs)
        print(bench.table(found["bench"]))
    if not jobs:
        found = _generate(args, do)
    if args.json:
        versions = {"torch": torch.__version__}
        if args.against_llama_cpp:
            versions["llama-cpp-python"] = metadata.version("llama-cpp-python")
        record = {"schema": 1, "env": asdict(finished(env)), "versions": versions, **found}
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return status


def _check(args: argparse.Namespace, do: Any, folder: Path) -> list[dict[str, Any]]:
    from results.decoder import checks, files

    path = args.model or files.write_tiny(folder / f"tiny-{args.format}.gguf", args.format)
    ids = args.ids or checks.prompt(files.Model(path).config.vocabulary)
    return [
        {"file": path.name}
        | checks.against_torch(
            path,
            ids,
            accuracy=accuracy,
            requantize=args.requantize,
            operations=do,
            steps=args.tokens,
            jobs=args.jobs,
        )
        for accuracy in ("exact", "fast")
    ]


def _against_llama_cpp(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """The comparison of MODEL; without one, of random weights and of the same in float32."""
    from results.decoder import checks, files

    name, steps = args.format, args.tokens
    if args.model is not None:
        ids = args.ids or checks.prompt(files.Model(args.model).config.vocabulary)
        return [checks.against_llama_cpp(args.model, ids, steps=steps)]
    ids = args.ids or checks.prompt(files.WORDS)
    blocks = files.write_tiny(folder / f"tiny-{name}.gguf", name)
    floats = files.write_tiny(folder / f"tiny-{name}-as-f32.gguf", name, dequantized=True)
    return [
        checks.against_llama_cpp(blocks, ids, steps=steps),
        checks.against_llama_cpp(floats, ids, floats=True, steps=steps),
    ]


def _sentence(found: dict[str, Any]) -> str:
    """The result of a comparison, in a sentence."""
    names = ("rms_difference", "rms_difference_of_prompt", "rms_difference_of_steps")
    off = max(found[name] for name in names if name in found)
    tokens = f"the same {found['steps']} tokens"
    if one := found["first_difference"]:
        tokens = (
            f"tokens differ from step {one['step']} on, where the two logits are "
            f"{one['margin']:.3g} apart and their errors add up to {one['both_off_by']:.3g}"
        )
    which = f", {found['accuracy']}" if "accuracy" in found else ""
    verdict = "right" if found["right"] else "WRONG"
    return (
        f"{found['file']}{which}: {verdict}: the error of the logits is {off:.3g} of their root "
        f"mean square (bound {found['bound']:g}), {tokens}"
    )


def _generate(args: argparse.Namespace, do: Any) -> dict[str, Any]:
    from results.decoder import files
    from results.decoder.checks import reference
    from results.decoder.model import generate, step_products, torch

    file = files.Model(args.model)
    if args.prompt is not None and args.ids is not None:
        raise ValueError("give --prompt or --ids, not both")
    ids = args.ids or [file.first]
    if args.prompt is not None:
        ids = file.vocabulary.ids(args.prompt) or ids
    if max(ids) >= file.config.vocabulary:
        raise ValueError(
            f"--ids has {max(ids)} and {args.model} has tokens 0 to {file.config.vocabulary - 1}: "
            "give tokens of its vocabulary"
        )
    device = "cpu" if args.reference else "cuda"
    if args.reference:
        model = reference(file, requantize=args.requantize)
    else:
        model = files.load(
            file,
            step_products(device, args.accuracy),
            requantize=args.requantize,
            device=device,
            operations=do,
        )
    start = time.perf_counter()
    prompt_ids = torch.tensor([ids], device=device)
    tokens = generate(model, prompt_ids, args.tokens)[0][0].tolist()
    took = time.perf_counter() - start
    found = {"file": args.model.name, "ids": ids, "tokens": tokens}
    if args.prompt is not None:
        ends = [at for at, one in enumerate(tokens) if one in file.vocabulary.ends]
        found["text"] = file.vocabulary.text([*ids, *tokens[: min(ends, default=None)]])
    print(found.get("text", " ".join(map(str, tokens))))
    print(
        f"{len(tokens)} tokens in {took:.2f} s, compiling and capturing included",
        file=sys.stderr,
    )
    return found


if __name__ == "__main__":
    sys.exit(main())
