"""The command `gpu-tests`: whether everything is right on this GPU, into results/<gpu>/.

The GPU tests, Compute Sanitizer over the checks of each step, and fuzzing run side by side: they
share the cores, and the GPU takes them in turn. Then come the tests that measure their own time.

    gpu-tests.txt   tests passed in each file, what failed and why, what was skipped, and fuzzing
    sanitizer.txt   each command of Compute Sanitizer, and how it ended
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from results.record import store
from results.record.environment import environment
from results.record.schema import Environment
from steps.checks.fuzz_experts import SANITIZED
from steps.cli.arguments import machines
from steps.cli.run import remark
from steps.cli.tools import ROOT, SANITIZERS, checking, required, sanitizing, this
from steps.registry import kernel_of, ladder

TESTS: Final = ("-m", "pytest", "-p", "no:benchmark", "--dist", "loadgroup", "tests", "-v", "-m")
ALONE: Final = 60.0
"""Seconds that the tests which measure their own time have, after all else has ended."""
FORMATS: Final = ("q4_0", "q5_1")  # of the sanitizer: without and with minima and fifth bits
SEED: Final = 0  # of fuzzing
LEFT: Final = 15.0  # seconds that a command of the sanitizer takes: with less time none is begun
LATE: Final = "its time was up"


@dataclass(frozen=True, slots=True)
class Ended:
    """A command that ran: what it printed, and its exit status; None where its time was up."""

    command: tuple[str, ...]
    text: str
    status: int | None

    @property
    def line(self) -> str:
        """The command as a person would type it."""
        named = ["python3" if word == sys.executable else word for word in self.command]
        return f"$ {shlex.join([Path(named[0]).name, *named[1:]])}"


def gpu_tests(args: Namespace) -> int:
    """Run all of it for `args.seconds` at most and write both files; 1 if anything was wrong."""
    machines("gpu")
    sanitizer = required("compute-sanitizer")
    env = environment()
    folder: Path = args.out or store.path_for(env).parent
    until, cores = time.monotonic() + args.seconds, os.cpu_count() or 1
    jobs = max(1, cores // 3)
    tests = [sys.executable, *TESTS, "gpu and not alone", "-n", str(max(1, cores - jobs))]
    seconds, fuzzers = max(1, args.seconds * 3 // 5), max(1, cores // 4)
    fuzz = this("fuzz", "--jobs", str(fuzzers), "--seconds", str(seconds), "--seed", str(SEED))
    remark(f"tests, sanitizer and fuzzing side by side, {args.seconds:.0f} s at most")
    with ThreadPoolExecutor(jobs + 2) as pool:
        try:
            suite = pool.submit(_run, tests, until)
            fuzzed = pool.submit(_run, fuzz, until)
            checked = sanitized([*sanitizer_commands(sanitizer)], until, pool.submit)
        except KeyboardInterrupt:  # which commands in groups of their own do not get
            pool.shutdown(wait=False, cancel_futures=True)
            for leader in [*_running]:
                _kill(leader)
            raise
    alone = _run([sys.executable, *TESTS, "gpu and alone", "-n", "0"], time.monotonic() + ALONE)
    folder.mkdir(parents=True, exist_ok=True)
    bad = 0
    for name, text, wrong in (
        ("gpu-tests.txt", *suite_record(suite.result(), alone, fuzzed.result(), env)),
        ("sanitizer.txt", *sanitizer_record(checked, env)),
    ):
        (folder / name).write_text(text, encoding="utf-8")
        print(f"{folder / name}: {wrong or 'nothing'} wrong")
        bad += wrong
    return 1 if bad else 0


def sanitizer_commands(tool: str) -> Iterator[list[str]]:
    """Each tool over products of experts, and over the checks of each step, the newest steps first;
    and of the kernel that it teaches, by a dtype that the lesson does not write."""
    for kind in SANITIZERS:
        yield sanitizing(tool, kind, this("fuzz", "--case", *SANITIZED))
    for name in FORMATS:
        for kind in SANITIZERS:
            for step in (one for one in reversed(ladder()) if name in one.formats):
                others = [one for one in kernel_of(step.number).outputs if one not in step.outputs]
                for dtype in ([], *(["--dtype", one] for one in others[:1])):
                    check = str(step.number), "--quick", "--format", name, *dtype
                    yield sanitizing(tool, kind, checking(*check))


def sanitized(
    commands: Sequence[Sequence[str]], until: float, submit: Callable[..., Future[Ended | None]]
) -> list[Ended | None]:
    """How each command ended; None for those that were not begun before the time was up."""

    def one(command: Sequence[str]) -> Ended | None:
        return _run(command, until) if until - time.monotonic() > LEFT else None

    return [each.result() for each in [submit(one, command) for command in commands]]


def _run(command: Sequence[str], until: float) -> Ended:
    """A command, which is killed when its time is up, and all that it began with it: what still
    runs would keep the GPU busy."""
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        _running.add(process.pid)
        try:
            text, _ = process.communicate(timeout=max(1.0, until - time.monotonic()))
            status: int | None = process.returncode
        except subprocess.TimeoutExpired:
            _kill(process.pid)
            text, status = process.communicate()[0], None
        _running.discard(process.pid)
    return Ended(tuple(command), text, status)


_running: Final[set[int]] = set()  # processes that lead a group of their own


def _kill(leader: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


# --- what is written ------------------------------------------------------------------------------


def suite_record(suite: Ended, alone: Ended, fuzzed: Ended, env: Environment) -> tuple[str, int]:
    """(the file, how much of it was wrong). alone: the tests that ran after all else."""
    lines, wrong = _tests(suite, f"({_where(env)}; beside the sanitizer and fuzzing)")
    for told, bad in (_tests(alone, "(after all else)"), _fuzzing(fuzzed)):
        lines += ["", *told]
        wrong += bad
    return "\n".join(lines) + "\n", wrong


def _tests(suite: Ended, how: str) -> tuple[list[str], int]:
    """(lines, tests that failed) of a run of pytest."""
    passed = Counter(re.findall(r"\bPASSED (tests/[\w/]+\.py)::", suite.text))
    passed += Counter(re.findall(r"^(tests/[\w/]+\.py)::\S+ PASSED", suite.text, re.MULTILINE))
    told = re.findall(r"^(?:FAILED|ERROR|SKIPPED) .*$", suite.text, re.MULTILINE)
    lines = [f"{suite.line}    {how}"]
    lines += [f"{count:4}  {file}" for file, count in sorted(passed.items())]
    lines += told
    ends = re.findall(r"^=+ .*\b(?:passed|failed|error)\b.* =+$", suite.text, re.MULTILINE)
    if suite.status is None:
        lines.append(LATE)
    else:
        lines.append(ends[-1] if ends else f"no summary; exit status {suite.status}")
    failed = sum(not one.startswith("SKIPPED") for one in told)
    return lines, failed or int(suite.status != 0)


def _fuzzing(one: Ended) -> tuple[list[str], int]:
    """(lines, 1 if anything was wrong) of fuzzing: how many products of how many works, and all
    wrong cases."""
    said = [text for text in one.text.splitlines() if text]
    if one.status is None:
        said.append(LATE)
    told = said[-1:] if one.status == 0 else said
    return [one.line, *(f"    {text}" for text in told)], int(one.status != 0)


def sanitizer_record(checked: Sequence[Ended | None], env: Environment) -> tuple[str, int]:
    """(the file, how many commands found something)."""
    ended = [one for one in checked if one is not None and one.status is not None]
    bad = [one for one in ended if one.status]
    late = len(checked) - len(ended)
    left = f", {late} more did not fit the time" if late else ""
    lines = [
        f"compute-sanitizer over the checks of steps ({_where(env)}): {len(ended)} commands{left}, "
        + (f"{len(bad)} of them found something" if bad else "all of exit status 0"),
        "",
    ]
    for one in sorted(ended, key=lambda each: each.line):
        found = re.findall(r"^=+ ((?:ERROR|RACECHECK) SUMMARY: .*)$", one.text, re.MULTILINE)
        lines += [one.line, f"    {found[-1] if found else 'no summary'}; exit status {one.status}"]
    return "\n".join(lines) + "\n", len(bad)


def _where(env: Environment) -> str:
    sha = env.git.sha
    return f"{env.gpu}, commit {sha}{' and changes' if env.git.dirty else ''}" if sha else env.where
