"""NVIDIA's tools on a step: Nsight Compute (`profile`), Compute Sanitizer (`sanitize`).

A tool must start the process that it examines, so both start this command line again.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from steps.checks.select import UsageError
from steps.cli.arguments import home_shapes_of, launches_of, machines, one_step, work_of

WHERE: Final = (
    "/usr/local/cuda/bin",
    "/opt/nvidia/nsight-compute",
    "/usr/local/cuda/compute-sanitizer",
)
"""Folders where the tools often are, though not on PATH."""

SANITIZERS: Final[dict[str, tuple[str, ...]]] = {
    # cuda-bindings asks the driver for functions that only later drivers have. Each such question
    # would count as an error, and Python raises for a call that fails anyway.
    "memcheck": ("--report-api-errors", "no"),
    "racecheck": (),
    "initcheck": (),
    "synccheck": (),
}
"""The tools of Compute Sanitizer, with the options each needs here."""

ROOT: Final = Path(__file__).resolve().parents[2]
NO_COUNTERS: Final = (
    "profiling counters may need root or the driver option NVreg_RestrictProfilingToAdminUsers=0"
)


def find_tool(name: str) -> str | None:
    """The path of a tool: on PATH, or where the toolkit's installer puts it."""
    if found := shutil.which(name):
        return found
    for folder in map(Path, WHERE):
        for candidate in (folder / name, *sorted(folder.glob(f"*/{name}"), reverse=True)):
            if candidate.is_file() and os.access(candidate, os.X_OK):
                return str(candidate)
    return None


def required(name: str) -> str:
    """The path of "ncu" or "compute-sanitizer". UsageError where it is not installed."""
    if tool := find_tool(name):
        return tool
    of = "Nsight Compute (it is part of" if name == "ncu" else "it (part of"
    raise UsageError(
        f"{name} was not found: install {of} the CUDA toolkit, not of the Python wheels) and put "
        "it on PATH"
    )


def this(*arguments: str) -> list[str]:
    """This command line."""
    return [sys.executable, "-m", "steps", *arguments]


def checking(*check: str) -> list[str]:
    """The command of a `check` on the GPU, small enough for the sanitizer."""
    return this("check", *check, "--machine", "gpu", "--small")


def sanitizing(tool: str, name: str, command: Sequence[str]) -> list[str]:
    """The command by which Compute Sanitizer, at the path `tool`, looks at another."""
    return [tool, "--tool", name, *SANITIZERS[name], "--error-exitcode", "1", *command]


def profile(args: Namespace) -> int:
    """Nsight Compute on one launch of the step's kernel; clocks are left as they are."""
    work = work_of(args, one_step(args.steps))
    shape = home_shapes_of(args, work.step)[0]
    machines("gpu")
    *_, own = launches_of(work, shape, args.dtype)
    command = [
        required("ncu"),
        *("--clock-control", "none"),  # as in every measurement here: clocks are not locked
        *("--kernel-name", f"regex:{own.kernel.__name__}", "--launch-count", "1"),
        *("--set", args.set),
        *(["--export", str(args.out), "--force-overwrite"] if args.out else []),
        *this("launch", str(work.step.number), "--format", work.format, "--scheme", work.scheme),
        *(f"--{name}={extent}" for name, extent in zip("mnk", shape, strict=True)),
        *(["--dtype", args.dtype] if args.dtype else []),
    ]
    return _run(command, NO_COUNTERS)


def sanitize(args: Namespace) -> int:
    """Compute Sanitizer over the checks, all of its tools or some; 1 if one finds anything."""
    machines("gpu")
    tool = required("compute-sanitizer")
    checks = [
        *(args.steps or ["all"]),
        *(["--quick"] if args.quick else []),
        *(["--format", ",".join(args.format)] if args.format else []),
        *(["--scheme", args.scheme] if args.scheme else []),
        *(["--dtype", args.dtype] if args.dtype else []),
    ]
    names = [one for several in args.tool or [SANITIZERS] for one in several]
    if bad := [name for name in names if _run(sanitizing(tool, name, checking(*checks)))]:
        print(f"compute-sanitizer found errors with {', '.join(bad)}", file=sys.stderr)
    return 1 if bad else 0


def _run(command: Sequence[str], hint: str = "") -> int:
    print(f"$ {shlex.join(command)}", flush=True)
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code and hint:
        print(f"{Path(command[0]).name} ended with {code}: {hint}", file=sys.stderr)
    return 1 if code else 0
