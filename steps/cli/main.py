"""The command line of the ladder: `python -m steps list | run | check | bench | diff | sass ...`.

0 when all is right, 1 when a check failed, 2 after one sentence when the request cannot be met.
Commands are imported when they are asked for, so that `--help` and `doctor` need no package at all.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

Command = Callable[[argparse.Namespace], int]


class Parser(argparse.ArgumentParser):
    """argparse, but an error is one sentence without the usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    args, others = _parser().parse_known_args(argv)
    if others and args.command != "pitfalls":
        _parser().error(f"{args.command} does not know {' '.join(others)}; see `{args.command} -h`")
    args.others = others
    where = f"python -m steps {args.command}"
    try:
        status: int = _command(args.runs)(args)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print(f"\n{where}: interrupted", file=sys.stderr)
        # Where Ctrl-C came while a string was executed, as when a dataclass is made, Python would
        # die of the signal at its end, whoever catches it: the next string makes it forget that.
        exec("")
        return 130
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ModuleNotFoundError as error:
        print(f"{where}: {error}; `make doctor` says what is missing", file=sys.stderr)
        return 2
    except Exception as error:
        if not _is_said_to_the_user(error):
            raise
        print(f"{where}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _command(name: str) -> Command:
    """ "run:check" -> the function `check` of steps/cli/run.py."""
    module, function = name.split(":")
    found: Command = getattr(import_module(f"steps.cli.{module}"), function)
    return found


def _is_said_to_the_user(error: Exception) -> bool:
    """Whether it is the sentence of a refused request, and not a bug whose traceback is wanted."""
    if isinstance(error, ImportError):
        return error.name is None  # the registry's own, about a file that is no step
    return type(error).__name__ in ("UsageError", "RecordError") or isinstance(error, OSError)


# --- arguments ------------------------------------------------------------------------------------


def _positive(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _part(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,4})/([0-9]{1,4})", text)
    if match is None or not 0 < int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is no part such as 2/4")
    return int(match[1]), int(match[2])


def _duration(text: str) -> float:
    if not re.fullmatch(r"[0-9]{0,5}\.?[0-9]{1,3}", text) or float(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds such as 0.5 or 2")
    return float(text)


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
    """What to multiply."""
    one = Parser(add_help=False)
    one.add_argument(
        "--format",
        "--formats",
        action="append",
        default=[],
        metavar="F",
        help="q4_0,q4_1,q5_0,q5_1,q8_0, or all of these (default); or mxfp4,iq4_nl,q2_k ... q6_k",
    )
    one.add_argument("--scheme", help="W4A16, W4A8, W5A8, W8A16 ...; or A16, A8 (default: all)")
    one.add_argument("--m", type=_positive, metavar="M", help="tokens")
    one.add_argument("--n", type=_positive, metavar="N", help="output features")
    one.add_argument("--k", type=_positive, metavar="K", help="the reduction, a multiple of 32")
    one.add_argument("--dist", metavar="D", help="normal, uniform, llm, integer, golden")
    one.add_argument("--seed", type=_seed, default=0, help="of the data (default 0)")
    return one


def _parser() -> Parser:
    parser = Parser(prog="python -m steps", description="A ladder of quantized GEMM kernels.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(
        name: str, runs: str, text: str, *parents: Parser, steps: str | None = None, **options: Any
    ) -> argparse.ArgumentParser:
        one = commands.add_parser(
            name, help=text, description=text, parents=list(parents), **options
        )
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
    save = Parser(add_help=False)
    save.add_argument("--save", action="store_true", help="write the rows to results/<gpu>/")

    file = Parser(add_help=False)
    file.add_argument(
        "--gguf", type=Path, metavar="FILE", help="take the weights from this file, not drawn"
    )
    file.add_argument("--tensor", metavar="NAME", help="of the file's tensors this one")

    command("list", "run:list_steps", "the ladder: its steps and what each runs on", as_json)
    command(
        "run",
        "run:run",
        "check steps in all formats, then measure them where there is a GPU",
        _data(),
        file,
        order,
        as_json,
        save,
        steps="*",
    )
    command("ladder", "run:run", "run every step", _data(), file, order, as_json, save)

    one = command(
        "check", "run:check", "the checks alone", _data(), file, order, as_json, steps="*"
    )
    one.add_argument(
        "--machine",
        choices=("auto", "gpu", "simulator"),
        default="auto",
        help="where (default auto)",
    )
    one.add_argument("--quick", action="store_true", help="a third of the shapes for each format")
    one.add_argument("--small", action="store_true", help="the simulator's shapes on a GPU too")

    one = command(
        "bench", "bench:bench", "measure the whole matrix, with peers", _data(), as_json, steps="*"
    )
    one.add_argument(
        "--out", type=Path, metavar="PATH", help="the file (default results/<gpu>/...)"
    )
    one.add_argument(
        "--seconds", type=_positive, help="device time to aim at (slow kernels take what they take)"
    )
    one.add_argument("--no-peers", action="store_true", help="no cuBLAS, no llama.cpp, no duels")
    one.add_argument("--no-duels", action="store_true", help="no kernels in turn with cuBLAS's")
    several = one.add_mutually_exclusive_group()
    several.add_argument(
        "--gpus",
        type=_positive,
        metavar="N",
        help="on so many GPUs of one kind at once (default 1)",
    )
    several.add_argument(
        "--part", type=_part, metavar="I/N", help="only the I-th of N parts; `join` joins them"
    )

    one = command("join", "bench:join", "put the parts of a bench together")
    one.add_argument("parts", nargs="+", type=Path, metavar="PART", help="files of `bench --part`")
    one.add_argument(
        "--out", type=Path, metavar="PATH", help="the file (default results/<gpu>/...)"
    )

    one = command(
        "duel",
        "compare:compare",
        "kernels against cuBLAS's, in turn and round by round, sustained and in bursts",
        _data(),
        as_json,
        steps="*",
    )
    one.add_argument(
        "--shapes",
        nargs="+",
        default=[],
        metavar="MxNxK",
        help="such as 512x4096x4096 (default: 32 to 4096 tokens, three sizes of weights)",
    )
    one.add_argument(
        "--output",
        action="append",
        choices=("float32", "float16"),
        help="the type of C (default: all that a step writes)",
    )
    one.add_argument(
        "--pace", action="append", choices=("sustained", "burst"), default=[], help="default both"
    )
    one.add_argument(
        "--seconds", type=_duration, help="device time of a sustained duel (default 1)"
    )
    one.add_argument(
        "--overlap",
        action="store_true",
        help="let our launches begin under the one before, as in a chain",
    )
    one.add_argument(
        "--out", type=Path, metavar="PATH", help="add them to the run in this file, or begin one"
    )

    one = command(
        "tune",
        "tune:tune",
        "time the steps at many M, for the front door to choose by",
        _data(),
        steps="*",
    )
    one.add_argument(
        "--run", type=Path, metavar="PATH", help="take the times of a bench, and measure nothing"
    )

    one = command("diff", "listing:diff", "a step's file against its parent's", steps="1")
    one.add_argument(
        "--against", type=_positive, metavar="STEP", help="another one than its parent"
    )
    one.add_argument("--lines", type=_seed, default=3, help="lines of context (default 3)")

    for name, text in (("ptx", "the PTX of a step"), ("sass", "what the GPU executes")):
        one = command(name, f"listing:{name}", f"{text}; needs no GPU", _data(), as_json, steps="1")
        one.add_argument(
            "--arch",
            type=_architecture,
            default="sm_90a",
            help="sm_75, sm_80, sm_90a (default) ...",
        )
        one.add_argument("--summary", action="store_true", help="the figures without the listing")
        one.add_argument("--activations", action="store_true", help="the activation pass instead")

    one = command("profile", "tools:profile", "Nsight Compute on one launch", _data(), steps="1")
    one.add_argument("--set", default="detailed", help="ncu's set of sections (default detailed)")
    one.add_argument("--out", type=Path, metavar="PATH", help="write ncu's report there")

    one = command("sanitize", "tools:sanitize", "Compute Sanitizer over the checks", steps="*")
    one.add_argument(
        "--tool",
        nargs="+",
        choices=("memcheck", "racecheck", "initcheck", "synccheck"),
        help="some of its tools (default all four)",
    )
    one.add_argument("--format", action="append", default=[], metavar="F", help="default all")
    one.add_argument("--scheme", help="W4A16, A8 ... (default all)")
    one.add_argument("--quick", action="store_true", help="a third of the shapes for each format")

    command("launch", "run:launch", "launch a step once on the GPU", _data(), steps="1")
    command("doctor", "doctor:doctor", "what this machine can run, and why not the rest", as_json)
    command("pitfalls", "tools:pitfalls", "the museum of this problem's bugs", add_help=False)
    return parser
