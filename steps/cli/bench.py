"""The command `bench`: every step in every format at every shape, peers and duels, in one file.

What is measured in which order is here, how in `results.measure.bench` and `results.measure.comparisons`. Weights are
outermost: a format's weights of one size meet all steps, then their peers, then cuBLAS in duels.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reference import BENCH_SHAPES
from results.measure import bench as benching
from results.measure import comparisons as dueling
from results.measure import shards as parts
from results.measure.bench import DEFAULT_SHAPE, Bench, Recorder
from results.measure.shards import Group
from results.record import schema as record
from results.record.schema import Duel, Peer, Row
from results.render import text as table
from steps.checks.run import fatal
from steps.checks.select import select
from steps.cli import arguments, report, run
from steps.contract import Size, Work

SAVE_SECONDS = 30.0
"""A bench is saved as often as this, so that little is lost with it. Asking nvidia-smi for clocks
and writing a thousand rows takes a second."""

DUEL_SECONDS = 0.5
"""Of a sustained duel, of which a bench has hundreds."""


def bench(args: Namespace) -> int:
    """The whole matrix with peers, into one JSON file; 1 if any row failed."""
    arguments.machines("gpu")
    works = select(arguments.steps_of(args.steps), arguments.formats_of(args.format), args.scheme)
    whole = parts.groups(works, shapes_of(args))
    if (args.gpus or 1) > 1:
        found, path, status = parts.on_gpus(args, whole)
        said: list[str] = []
    else:
        growing = _measured(args, whole)
        found, path, said = growing.run, growing.path, growing.failures
        status = 1 if said else 0
    if args.json:
        print(path.read_text(encoding="utf-8"), end="")
    else:
        title = f"{found.env.where}, {arguments.distribution_of(args)} data"
        table.show(report.run_table(title, (), found.rows))
        print(f"wrote {path}")
        if found.duels:
            title = f"{found.env.where}: kernels against cuBLAS fp16"
            table.show(dueling.as_table(title, found.duels))
    for sentence in said:
        print(sentence, file=sys.stderr)
    return status


def shapes_of(args: Namespace) -> list[Size]:
    """The shapes of a bench that have the M, N and K asked for; where there is none, the one asked
    for."""
    asked = args.m, args.n, args.k
    found = [
        shape
        for shape in BENCH_SHAPES
        if all(size in (None, own) for size, own in zip(asked, shape, strict=True))
    ]
    return found or [arguments.shape_of(args, DEFAULT_SHAPE)]


@dataclass(slots=True)
class _Growing:
    """A run while it is measured, and the file where it is kept."""

    recorder: Recorder
    rows: list[Row] = field(default_factory=list)
    peers: list[Peer] = field(default_factory=list)
    duels: list[Duel] = field(default_factory=list)
    broken: str | None = None  # the CUDA error that ended it
    _saved: float = field(default_factory=time.monotonic)

    def add(self, found: Iterable[Row | Duel]) -> None:
        """As they come."""
        for one in found:
            if isinstance(one, Row):
                self.rows.append(one)
            else:
                self.duels.append(one)
            self.keep()

    def keep(self, now: bool = False) -> None:
        if now or time.monotonic() - self._saved >= SAVE_SECONDS:
            self.recorder.save(self.rows, self.peers, dueling.sorted_duels(self.duels))
            self._saved = time.monotonic()

    @property
    def path(self) -> Path:
        assert self.recorder.path is not None, "kept at least once"
        return self.recorder.path

    @property
    def run(self) -> record.Run:
        return record.read(self.path)

    @property
    def failures(self) -> list[str]:
        each: list[Row | Duel] = [*self.rows, *self.duels]
        each = [one for one in each if one.status == "failed"]
        said = [f"step {one.step} {one.scheme} {one.format} {one.shape}: {one.why}" for one in each]
        return [*said, f"the run ended early: {self.broken}"] if self.broken else said


def _measured(args: Namespace, whole: Sequence[Group]) -> _Growing:
    """The groups of args.part, on this GPU."""
    _, machine, _ = arguments.machines("gpu")
    mine = parts.part_of(whole, args.part)
    works = tuple({str(work): work for group in mine for work in group.works}.values())
    duels = [_duels(group, args) for group in mine]
    fights = [dueling.fights(*each, dueling.meant) for each in duels]
    ahead = [(w, shape, w.step.outputs[0]) for g in mine for w in g.works for shape in g.shapes]
    ahead += [fight for each in fights for fight in each]
    outcomes = run.checked(works, machine, False, args, None, quick=True, ahead=ahead)
    budget = benching.Budget()
    if args.seconds:
        budget = benching.budget_for(args.seconds, sum(group.rows for group in whole))
    env, measuring, say = record.environment(), Bench.here(budget), _once()
    growing = _Growing(Recorder(env, measuring.limits, args.out), broken=outcomes.broken)
    if any(fights) and (why := dueling.why_no_rival()):
        say(f"no duels: {why}")
        fights = [[] for _ in mine]
    count = sum(group.rows for group in mine) + sum(len(each) for each in fights)
    drawn: dict[str, Any] = {"distribution": arguments.distribution_of(args), "seed": args.seed}
    drawn["wrong"] = run.wrong(outcomes)

    def peers(group: Group) -> tuple[Peer, ...]:
        first, l2_bytes = group.format == whole[0].format, measuring.stopwatch.l2_bytes
        asked = env.gpu, group.shapes, (group.format,), budget, l2_bytes, say
        return benching.same_work_by_others(*asked, cublas=first)

    def of_duels(works: Sequence[Work], shapes: Sequence[Size]) -> Iterable[Duel]:
        rival = dueling.cublas(getattr(measuring.stopwatch, "clock", None))
        how: dict[str, Any] = {"which": dueling.meant, "schedules": dueling.scheduled(DUEL_SECONDS)}
        return dueling.duels(measuring, works, shapes, rival, overlap=True, **how, **drawn)

    try:
        with table.progress(count) as report:
            drawn["report"] = report
            for i, group in enumerate(mine if growing.broken is None else ()):
                # what a float16 C gains is the duels' to say
                matrix = group.works, group.shapes
                growing.add(benching.rows(measuring, *matrix, all_outputs=False, **drawn))
                if not args.no_peers:
                    growing.keep(now=True)  # a peer's failure must not cost the rows
                    growing.peers += peers(group)
                if fights[i]:
                    growing.add(of_duels(*duels[i]))
    except Exception as error:  # what was measured before it is still worth keeping
        if not fatal(error):
            raise
        growing.broken = f"{type(error).__name__}: {error}"
    finally:
        growing.keep(now=True)
    return growing


def _duels(group: Group, args: Namespace) -> tuple[Sequence[Work], Sequence[Size]]:
    """Whose duels, and where: at more M than a bench has, unless one is asked for."""
    if args.no_peers or args.no_duels:
        return (), ()
    shapes = [shape for shape in group.shapes if shape[0] >= dueling.FEWEST]
    more = [shape for shape in dueling.SHAPES if shape[1:] == group.shapes[0][1:]]
    return dueling.meant_to(group.works), more if more and args.m is None else shapes


def _once() -> Any:
    """`run.remark`, but a sentence only once."""
    heard: set[str] = set()

    def say(sentence: str) -> None:
        if sentence not in heard:
            heard.add(sentence)
            run.remark(sentence)

    return say
