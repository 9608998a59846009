"""A bench in parts: on all GPUs of a host at once, or in several calls, and put together after.

A part is some *groups*: a format's weights of one size, with every step, peer and duel on them. So
figures that are compared with each other come from one GPU, within minutes of each other.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from results.measure.bench import by_weights, sorted_rows
from results.measure.comparisons import sorted_duels
from results.record import schema as record
from results.record.schema import RecordError, Run
from results.render import text as table
from steps.checks.select import UsageError
from steps.contract import Size, Work

SLOW: Final = 2.0e11
"""Products M N K that cost a bench as much as a row's other work: steps 1 to 5 take seconds."""
POLL_SECONDS: Final = 2.0
SAME: Final = (
    *("gpu", "cc", "sms", "memory_bytes", "driver", "cuda", "numba", "numba_cuda", "numpy"),
    *("python", "power_limit_w", "git"),
)
"""What the environments of parts must have in common."""


@dataclass(frozen=True, slots=True)
class Group:
    """Works on one format, shapes with one (N, K)."""

    works: tuple[Work, ...]
    shapes: tuple[Size, ...]

    @property
    def format(self) -> str:
        return self.works[0].format

    @property
    def rows(self) -> int:
        return len(self.works) * len(self.shapes)

    @property
    def cost(self) -> float:
        """About how long it takes, as a multiple of what a row of few tokens does."""
        return len(self.works) * sum(1 + m * n * k / SLOW for m, n, k in self.shapes)


def groups(works: Sequence[Work], shapes: Sequence[Size]) -> tuple[Group, ...]:
    """The matrix, format by format and one size of weights after another."""
    found: dict[tuple[str, int, int], list[Size]] = {}
    for name in dict.fromkeys(work.format for work in works):
        for shape in by_weights(shapes):
            found.setdefault((name, *shape[1:]), []).append(shape)
    return tuple(
        Group(tuple(work for work in works if work.format == name), tuple(own))
        for (name, _, _), own in found.items()
    )


def part_of(whole: Sequence[Group], part: tuple[int, int] | None) -> tuple[Group, ...]:
    """The groups of part (i, n), i from 1; None is all of them. Neighbours, so that a part has few
    formats, whose kernels it has to compile and check; every group is in one part."""
    if part is None:
        return tuple(whole)
    number, count = part
    total, before, mine = sum(group.cost for group in whole), 0.0, []
    for group in whole:
        if int((before + group.cost / 2) / total * count) == number - 1:
            mine.append(group)
        before += group.cost
    return tuple(mine)


# --- put together ---------------------------------------------------------------------------------


def joined(runs: Sequence[Run], *, gpus: int | None = None, command: str | None = None) -> Run:
    """One run of several that have nothing in common but what they ran on.

    gpus, command: of the whole, instead of the first run's. RecordError where GPU, software or
    commit differ, or a row, duel or peer stands in two of them.
    """
    first = runs[0].env
    for other in (run.env for run in runs[1:]):
        for name in SAME:
            if (ours := getattr(first, name)) != (theirs := getattr(other, name)):
                raise RecordError(
                    f"these are not parts of one run: {name} is {ours} in the first and {theirs} "
                    "in another; measure them on the same GPU with the same software and commit"
                )
    peers = [peer for run in runs for peer in run.peers]
    named = [(peer.peer, peer.format, peer.shape) for peer in peers]
    if twice := next((key for key in named if named.count(key) > 1), None):
        raise RecordError(f"the figure of {twice[0]} in {twice[1]} at {twice[2]} is in two parts")
    env = replace(
        first,
        utc=min((run.env.utc for run in runs if run.env.utc), default=None),
        gpus=gpus or first.gpus,
        command=command or first.command,
    )
    whole = Run(
        env=env,
        rows=sorted_rows([row for run in runs for row in run.rows]),
        peers=tuple(peers),
        duels=sorted_duels([duel for run in runs for duel in run.duels]),
    )
    record.validate(whole)
    return whole


def join(args: Namespace) -> int:
    """The command: files of parts, written as one."""
    whole = joined([record.read(path) for path in args.parts])
    path = record.write(whole, path=args.out)
    print(f"wrote {path}: {len(whole.rows)} rows, {len(whole.duels)} duels")
    return 0


# --- on all GPUs of a host ------------------------------------------------------------------------


def visible(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    from numba import cuda

    if named := environ.get("CUDA_VISIBLE_DEVICES"):
        return named.split(",")
    return [str(number) for number in range(len(cuda.gpus))]


def command_of(args: Namespace, part: tuple[int, int], out: Path) -> list[str]:
    """The bench that measures one part of what `args` asks for."""
    given: list[str] = [*args.steps]
    for name in ("format", "scheme", "m", "n", "k", "dist", "seed", "seconds"):
        value = getattr(args, name)
        for each in value if isinstance(value, list) else [value]:
            given += [] if each is None else [f"--{name}", str(each)]
    given += ["--no-peers"] if args.no_peers else []
    given += ["--no-duels"] if args.no_duels else []
    own = ["--part", f"{part[0]}/{part[1]}", "--out", str(out)]
    return [sys.executable, "-m", "steps", "bench", *given, *own]


@contextmanager
def on_cores(part: tuple[int, int]) -> Iterator[None]:
    """This process, and what it starts, on an equal part of the cores it may use."""
    cores = sorted(os.sched_getaffinity(0))
    number, count = part
    try:
        os.sched_setaffinity(0, cores[number - 1 :: count] or cores)
        yield
    finally:
        os.sched_setaffinity(0, cores)


def on_gpus(
    args: Namespace, whole: Sequence[Group], start: Callable[..., Any] = subprocess.Popen
) -> tuple[Run, Path, int]:
    """A bench by one process on each of args.gpus GPUs: (run, its file, 1 if a process failed).

    What they say goes to stderr when they have ended. Parts are kept beside args.out until they
    are put together: if this process is killed, `join` does that. UsageError where there are fewer
    GPUs, or nothing was measured.
    """
    devices, count = visible(), min(args.gpus, len(whole))
    if len(devices) < args.gpus:
        raise UsageError(f"{args.gpus} GPUs are asked for, and {len(devices)} can be used here")
    git = record.git_state()
    sha = {record.GIT_SHA_VARIABLE: git.sha + ("-dirty" if git.dirty else "")} if git.sha else {}
    folder = Path(tempfile.mkdtemp(prefix="bench-")) if args.out is None else args.out.parent
    folder.mkdir(parents=True, exist_ok=True)
    stem = "run" if args.out is None else args.out.stem
    files = [folder / f"{stem}.part{i + 1}of{count}.json" for i in range(count)]
    with ExitStack() as open_files, table.progress(sum(group.rows for group in whole)) as report:
        heard = [open_files.enter_context(tempfile.TemporaryFile("w+")) for _ in files]
        started: list[Any] = []
        try:
            for i, (file, words) in enumerate(zip(files, heard, strict=True)):
                file.unlink(missing_ok=True)
                part, own = (i + 1, count), {"CUDA_VISIBLE_DEVICES": devices[i]}
                with on_cores(part):
                    started.append(
                        start(
                            command_of(args, part, file),
                            env=os.environ | sha | own,
                            stdout=subprocess.DEVNULL,
                            stderr=words,
                        )
                    )
            while any(each.poll() is None for each in started):
                time.sleep(POLL_SECONDS)
                report(f"rows, on {count} GPUs", sum(len(run.rows) for run in _read(files)))
        finally:
            for each in started:
                if each.poll() is None:
                    each.terminate()
            report.clear()
            for words in heard:
                words.seek(0)
                print(words.read(), end="", file=sys.stderr)
    if not (runs := _read(files)):
        raise UsageError(f"nothing was measured on {count} GPUs; each of them has said why")
    found = joined(runs, gpus=count, command=record.command_line())
    path = record.write(found, path=args.out)
    for file in files:
        file.unlink(missing_ok=True)
    return found, path, int(any(each.returncode for each in started))


def _read(files: Sequence[Path]) -> list[Run]:
    return [record.read(file) for file in files if file.exists()]
