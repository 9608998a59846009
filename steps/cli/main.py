"""The command line of the ladder: `python -m steps list | run | check | bench | diff | sass ...`.

Exit status: 0 when all is right, 1 when a check failed, 2 after one sentence when the request
cannot be met. A command's module is imported when it runs, so `--help` and `doctor` need no
package.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

Command = Callable[[argparse.Namespace], int]


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one sentence, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    args, others = _parser().parse_known_args(argv)
    if others:
        _parser().error(f"{args.command} does not know {' '.join(others)}; see `{args.command} -h`")
    where = f"python -m steps {args.command}"
    try:
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
        print(f"{where}: {' '.join(str(error).split())}", file=sys.stderr)
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


# --- arguments ------------------------------------------------------------------------------------


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


def _data() -> Parser:
    """The options that say what to multiply."""
    one = Parser(add_help=False)
    one.add_argument(
        "--format",
        "--formats",
        action="append",
        default=[],
        metavar="F",
        help="q4_0 q4_1 q5_0 q5_1 q8_0, or all of these (default); mxfp4 iq4_nl q2_k ... q6_k",
    )
    one.add_argument("--scheme", help="W4A16, W4A8, W5A8 ..., or A16, A8 (default all)")
    one.add_argument("--m", type=_positive, metavar="M", help="tokens (default: home shape)")
    one.add_argument("--n", type=_positive, metavar="N", help="output features")
    one.add_argument("--k", type=_positive, metavar="K", help="input features, a multiple of 32")
    one.add_argument("--dist", metavar="D", help="normal, uniform, llm, integer, golden")
    one.add_argument("--seed", type=_seed, default=0, help="of the data (default 0)")
    return one


def _parser() -> Parser:
    parser = Parser(prog="python -m steps", description="A ladder of quantized GEMM kernels.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(
        name: str, runs: str, text: str, *parents: Parser, steps: str | None = None
    ) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=text, description=text, parents=list(parents))
        one.set_defaults(runs=runs, steps=[])
        if steps == "*":
            one.add_argument("steps", nargs="*", metavar="STEP", help="numbers, or all (default)")
        elif steps == "1":
            one.add_argument("steps", nargs=1, metavar="STEP", help="a number")
        return one

    order = Parser(add_help=False)
    order.add_argument(
        "--order", type=int, help="seed of the simulator's lane order (0 ascending, -1 descending)"
    )
    as_json = Parser(add_help=False)
    as_json.add_argument("--json", action="store_true", help="print JSON instead of a table")
    long = Parser(add_help=False)
    long.add_argument("--long", action="store_true", help="a line for each format of each step")

    dtype = Parser(add_help=False)
    dtype.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        help="of C, and of A where the step reads it (default float32; `run` and `warm`: all)",
    )

    file = Parser(add_help=False)
    file.add_argument(
        "--gguf", type=Path, metavar="FILE", help="weights of this file, not random ones"
    )
    file.add_argument("--tensor", metavar="NAME", help="the tensor in that file")

    own = Parser(add_help=False)
    own.add_argument(
        "--file", type=Path, metavar="FILE", help="a step of your own, such as an exercise"
    )

    command("list", "listing:list_steps", "the steps, their branches and home shapes", as_json)
    command(
        "run",
        "run:run",
        "check steps; with a GPU, time them",
        _data(),
        dtype,
        file,
        order,
        as_json,
        long,
        steps="*",
    )
    command(
        "ladder",
        "run:run",
        "run every step; with a GPU, draw build/ladder.svg",
        _data(),
        dtype,
        file,
        order,
        as_json,
        long,
    )

    one = command(
        "check",
        "run:check",
        "check steps, or a file of your own; time nothing",
        own,
        _data(),
        dtype,
        file,
        order,
        as_json,
        long,
        steps="*",
    )
    one.add_argument(
        "--machine",
        choices=("auto", "gpu", "simulator"),
        default="auto",
        help="where to run (default auto: a GPU if there is one)",
    )
    one.add_argument("--quick", action="store_true", help="a third of the shapes per format")
    one.add_argument("--small", action="store_true", help="the simulator's shapes on a GPU too")
    one.add_argument("--hint", action="store_true", help="of --file: the idea of its next TODO")
    one.add_argument("--solution", action="store_true", help="of --file: the diff to the step")

    one = command(
        "bench",
        "bench:bench",
        "measure what is missing or stale of the matrix, beside cuBLAS and Humming",
        own,
        _data(),
        as_json,
        steps="*",
    )
    one.add_argument("--fresh", action="store_true", help="measure all of it again")
    one.add_argument(
        "--seconds", type=_positive, help="aim at so long a run (compiling takes what it takes)"
    )
    one.add_argument("--no-baselines", action="store_true", help="no cuBLAS, llama.cpp or torch")
    one.add_argument(
        "--only",
        choices=("steps", "home", "calls", "sweep"),
        help="the steps' rows, those at the home shapes of branches, what a caller gets, or that "
        "at every M up to 128",
    )
    one.add_argument(
        "--out", type=Path, metavar="PATH", help="the file (default results/<gpu>/run.json)"
    )

    one = command("fuzz", "fuzz:fuzz", "random products, checked and repeated", steps="*")
    one.add_argument("--seconds", type=_positive, default=60, help="how long (default 60)")
    one.add_argument("--seed", type=_seed, help="of the cases (default: another each time)")
    one.add_argument("--case", metavar="LINE", help="this one alone, as a failure names it")

    one = command(
        "tune",
        "tune:tune",
        "time the steps at many M, by which gemm chooses",
        _data(),
        steps="*",
    )
    one.add_argument(
        "--run", type=Path, metavar="FILE", help="take the times of this run.json; needs no GPU"
    )

    one = command(
        "warm",
        "warm:warm",
        "compile what a model or a product needs into the cache, on all cores",
        dtype,
        as_json,
    )
    one.add_argument("--gguf", type=Path, metavar="FILE", help="the weights of this model")
    one.add_argument("--n", type=_positive, metavar="N", help="or weights [N, K]: output features")
    one.add_argument("--k", type=_positive, metavar="K", help="input features, a multiple of 32")
    one.add_argument("--format", action="append", default=[], metavar="F", help="of these weights")
    one.add_argument("--bias", action="store_true", help="of a layer with a bias")
    one.add_argument(
        "--m", type=_positive, nargs="+", metavar="M", help="tokens (default: 1 to 4096)"
    )
    one.add_argument(
        "--accuracy",
        default="exact",
        help="of the products: exact or fast (default exact)",
    )
    one.add_argument(
        "--arch", type=_architecture, help="for another GPU than this machine's, such as sm_90a"
    )
    one = command("cache", "cache:cache", "the compiled kernels kept on disk", as_json)
    one.add_argument("--clear", action="store_true", help="remove them")

    one = command(
        "exercise", "exercises:exercise", "a step with holes to fill in, as a file", steps="1"
    )
    one.add_argument(
        "--out", type=Path, metavar="PATH", help="the file (default build/exercises/<step>.py)"
    )
    command("exercises", "exercises:exercises", "how far the exercises are")

    text = "what a step's file changes in its parent's, or yours in a step's"
    one = command("diff", "listing:diff", text, own, steps="*")
    one.add_argument("--against", type=_positive, metavar="STEP", help="compare with this step")
    one.add_argument("--lines", type=_seed, default=3, help="lines of context (default 3)")

    for name, text in (("ptx", "a kernel's PTX"), ("sass", "a kernel's machine code")):
        one = command(
            name,
            f"listing:{name}",
            f"{text}; needs no GPU",
            own,
            _data(),
            dtype,
            as_json,
            steps="*",
        )
        one.add_argument(
            "--arch",
            type=_architecture,
            default="sm_90a",
            help="sm_75, sm_80, sm_90a (default) ...",
        )
        one.add_argument("--summary", action="store_true", help="registers and opcode counts alone")
        one.add_argument(
            "--activations", action="store_true", help="the activation pass, not the kernel"
        )

    one = command(
        "trace",
        "trace:trace",
        "what a warp of a step loads and stores, lane by lane; needs no GPU",
        _data(),
        dtype,
        as_json,
        steps="1",
    )
    one.add_argument("--line", type=_positive, help="of the step's file: this line alone")
    one.add_argument(
        "--warp", type=_seed, help="of the block (default: the first of each warpgroup)"
    )
    one.add_argument(
        "--out",
        type=Path,
        default=Path("build", "trace.html"),
        metavar="PATH",
        help="the page of pictures (default build/trace.html)",
    )

    one = command(
        "profile", "tools:profile", "Nsight Compute on one launch", _data(), dtype, steps="1"
    )
    one.add_argument("--set", default="detailed", help="sections to collect (default detailed)")
    one.add_argument("--out", type=Path, metavar="PATH", help="write ncu's report there")

    one = command(
        "counters",
        "counters:counters",
        "Nsight Compute's counters of the launches of a bench, into results/<gpu>/ncu.json",
        steps="*",
    )
    one.add_argument("--format", action="append", default=[], metavar="F", help="default q4_0")
    one.add_argument("--out", type=Path, metavar="PATH", help="the file")
    one.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)

    one = command(
        "sanitize", "tools:sanitize", "Compute Sanitizer over the checks", dtype, steps="*"
    )
    one.add_argument(
        "--tool",
        nargs="+",
        choices=("memcheck", "racecheck", "initcheck", "synccheck"),
        help="some of its tools (default all four)",
    )
    one.add_argument("--format", action="append", default=[], metavar="F", help="default all")
    one.add_argument("--scheme", help="W4A16, A8 ... (default all)")
    one.add_argument("--quick", action="store_true", help="a third of the shapes per format")

    one = command(
        "gpu-tests",
        "gpu_tests:gpu_tests",
        "the GPU tests, Compute Sanitizer and fuzzing side by side, on record in results/<gpu>/",
    )
    one.add_argument("--seconds", type=_positive, default=540, help="at most (default 540)")
    one.add_argument("--out", type=Path, metavar="FOLDER", help="where the record goes")

    command("launch", "run:launch", "launch a step once, for a profiler", _data(), dtype, steps="1")
    command("doctor", "doctor:doctor", "what runs on this machine, and what is missing", as_json)
    command("pitfalls", "pitfalls:show", "known bugs, and what catches each", as_json)
    return parser
