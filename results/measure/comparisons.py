"""Which kernels duel with which rival, and the command: `python -m steps duel 12 --format q4_0`.

How a duel is fought is `results.measure.ab`; this file prepares both sides of it. In a bench it is the
steps that multiply on float16 tensor cores, and those that are not exact, which meet cuBLAS's
float16. A step that is named duels whatever it is.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any, Final

import numpy as np

from qformats import FORMATS
from reference import Problem, nmse
from reference.check import check
from results.measure import bench as benching
from results.measure import protocol as measure
from results.measure.ab import (
    BURST,
    SUSTAINED,
    CublasFp16,
    Rival,
    Schedule,
    Side,
    cublas_weights,
    fight,
    figures,
)
from results.measure.bench import Bench, FirstTokens, Task, by_weights
from results.measure.protocol import Packed, Traffic, overlapping, pack_weights
from results.record import schema as record
from results.record.schema import Duel, Run
from results.render import text as table
from results.render.text import Column, Line, Table
from steps.checks.run import fatal
from steps.checks.select import UsageError, select
from steps.components.activations.layouts import decode
from steps.contract import Family, Shape, Size, Work

SHAPES: Final[tuple[Size, ...]] = tuple(
    (m, n, k)
    for m in (32, 64, 128, 512, 4096)
    for n, k in ((4096, 4096), (4096, 14336), (14336, 4096))
)
"""What the command takes where it is not told. Of fewer tokens bytes decide, and cuBLAS has four
times as many to read: no duel is needed to see that."""

FEWEST: Final = min(m for m, _, _ in SHAPES)
MANY: Final = 512
SCHEDULES: Final = (SUSTAINED, BURST)

RIVAL_NMSE: Final = 1e-6
"""The rival's error against the float64 product of float32 A with the dequantized weights: float16
operands and a float16 result come to some 1e-7."""

Which = Callable[[Work, Size, str], bool]
"""(work, M N K, dtype of C) -> whether that is a duel."""

MakeRival = Callable[[np.ndarray], Callable[[np.ndarray], Rival]]
"""float32 W[N, K] -> float32 A[M, K] -> their rival; W is prepared once for all M."""


def meant_to(works: Sequence[Work]) -> tuple[Work, ...]:
    """The works that duel in a bench: those on float16 tensor cores or not exact, if they have
    wgmma, as mma.sync stops at two thirds of what cuBLAS has."""
    return tuple(
        work
        for work in works
        if work.step.unit.get(work.family) == "tensor_fp16" or work.step.accuracy != "exact"
        if work.step.min_cc >= (9, 0)
    )


def meant(work: Work, shape: Size, output: str) -> bool:
    """Of these the duels that a bench holds: C as cuBLAS writes it; in float32 what is exact, and
    of as many tokens that C counts."""
    return output == "float16" or (work.step.accuracy == "exact" and shape[0] >= MANY)


def cublas(clock: Callable[[], float] | None = None) -> MakeRival:
    """cuBLAS through torch."""

    def of_weights(w: np.ndarray) -> Callable[[np.ndarray], Rival]:
        weights = cublas_weights(w)
        return lambda a: CublasFp16(weights, a, clock)

    return of_weights


def why_no_rival() -> str | None:
    """None, or why there is nobody to duel with."""
    from results.baselines.peers import torch_version

    return None if torch_version() else "there is no torch with a GPU, whose cuBLAS is the rival"


# --- the two sides --------------------------------------------------------------------------------


class Ours:
    """A work's kernel on every copy of the weights, with its activations, and who judges it."""

    def __init__(
        self, bench: Bench, work: Work, task: Task, packed: Packed, output: str, overlap: bool
    ) -> None:
        problem, machine = task.reference.problem, bench.machine
        step, family, fmt = work.step, work.family, FORMATS[work.format]
        shape = Shape(problem.m, problem.n, problem.k)
        self._bench, self._task, self._family = bench, task, family
        self._blank = np.full((shape.m, shape.n), np.nan, output)
        copies = packed.copies(machine, bench.stopwatch)
        self._given = step.activations(family, task.a, machine)
        sizes = step.scratch(fmt, family, shape) if step.scratch else None
        scratch = (
            () if sizes is None else (tuple(machine.array(np.zeros(*each)) for each in sizes),)
        )

        def launch(weights: tuple[Any, ...], out: Any) -> Any:
            own = step.launch(fmt, family, shape, weights, self._given.arrays, out, *scratch)
            return overlapping(own, own.overlap and overlap)

        self._checked, self._out = machine.array(self._blank), machine.array(self._blank)
        self._first = launch(copies[0], self._checked)
        self._launches = [launch(weights, self._out) for weights in copies]
        self.slots = len(copies)
        self.overlap = self._launches[0].overlap
        arrays = self._given.arrays
        moved = Traffic(
            weights=packed.nbytes,
            activations=sum(int(array.nbytes) for array in arrays),
            out=self._blank.nbytes,
        )
        self._floor = measure.floor_us(
            2 * shape.m * shape.n * shape.k,
            step.unit.get(family, ""),
            moved.from_dram(bench.stopwatch.l2_bytes),
            bench.limits,
        )

    def work(self, slot: int) -> Sequence[Any]:
        return (self._launches[slot % self.slots],)

    def wrong_at_first(self) -> str | None:
        """Runs the activation pass and one launch; what is wrong with the result."""
        for each in self._given.launches:
            self._bench.machine.run(each)
        self._bench.stopwatch.wait()
        self._bench.stopwatch.issue_and_wait(overlapping(self._first, False))
        return self._wrong(self._checked)

    def wrong_after(self, us: float | None) -> str | None:
        """The same of what the timed launches wrote, and of their time."""
        self._bench.stopwatch.wait()
        if why := self._wrong(self._out):
            return f"right before timing, wrong after: {why}"
        return None if us is None else measure.impossible(us, self._floor)

    def _wrong(self, out: Any) -> str | None:
        problem, layout = self._task.reference.problem, self._given.layout
        host, bits = self._bench.machine.host, None
        if layout is not None:
            arrays = tuple(np.array(host(array)) for array in self._given.arrays)
            bits = decode(layout, arrays, problem.m, problem.k)
        found = check(host(out), problem, self._family, bits, reference=self._task.reference)
        return None if found.ok else found.verdict


class Theirs:
    """A rival at one problem, its sides captured once for all that duel with it."""

    def __init__(self, rival: Rival, task: Task) -> None:
        self.rival, self._task = rival, task
        self._sides: dict[Schedule, Side] = {}

    def side(self, schedule: Schedule) -> Side:
        if schedule not in self._sides:
            rival = self.rival
            self._sides[schedule] = Side(
                rival.stopwatch, rival.work, rival.slots, schedule.chunk_seconds
            )
        return self._sides[schedule]

    @cached_property
    def _expected(self) -> np.ndarray:
        reference = self._task.reference
        return reference.expected(None, reference.problem.a, False).same

    @cached_property
    def wrong_at_first(self) -> str | None:
        """What is wrong with its result, before anybody duelled with it."""
        return self.wrong()

    def wrong(self) -> str | None:
        """What is wrong with its last result."""
        reference, c = self._task.reference, self.rival.result()
        if not np.isfinite(c).all():
            return f"{np.count_nonzero(~np.isfinite(c))} outputs of {self.rival.name} not finite"
        part = c[np.ix_(reference.rows, reference.columns)].astype(np.float64)
        error = nmse(part, self._expected)
        if error <= RIVAL_NMSE:
            return None
        return f"{self.rival.name} is wrong: NMSE {error:.1e}, more than {RIVAL_NMSE:.0e}"


# --- the duels ------------------------------------------------------------------------------------


def duels(
    bench: Bench,
    works: Sequence[Work],
    shapes: Sequence[Size],
    rivals: MakeRival,
    *,
    which: Which = lambda *_: True,
    schedules: Sequence[Schedule] = SCHEDULES,
    overlap: bool = False,
    distribution: str = "normal",
    seed: int = 0,
    wrong: Mapping[tuple[int, Family, str], str] | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Iterator[Duel]:
    """Every work at every shape with each dtype of C that it writes, if `which` says so, at each
    pace; weights outermost, as `results.measure.bench.rows`.

    overlap: let our launches begin under the one before, where the step can; the rival's never do.
    wrong: (step, family, format) -> why it must not be timed. A CUDA error is raised.
    """
    for name in dict.fromkeys(work.format for work in works):
        own = [work for work in works if work.format == name]
        for (n, k), group in itertools.groupby(by_weights(shapes), key=lambda s: s[1:]):
            tokens = sorted({m for m, _, _ in group})
            whole = Problem(tokens[-1], n, k, name, distribution, seed)
            packed: dict[Any, Packed] = {}  # by the function that packs, which steps share
            against = rivals(FORMATS[name].dequantize(whole.blocks).astype(np.float32))
            for m in tokens:
                some = FirstTokens(m, n, k, name, distribution, seed, of=whole)
                task = Task.of(whole if m == whole.m else some, bench.machine)
                theirs = Theirs(against(task.reference.problem.a), task)
                for work in own:
                    if work.step.pack not in packed:
                        packed[work.step.pack] = pack_weights(work.step, whole.blocks)
                    for output in work.step.outputs:
                        if not which(work, (m, n, k), output):
                            continue
                        report(f"{work} to {output} at M={m} N={n} K={k}")
                        blank = [
                            _blank(work, (m, n, k), output, theirs.rival, each)
                            for each in schedules
                        ]
                        if why := (wrong or {}).get((work.step.number, work.family, name)):
                            yield from (_failed(duel, why) for duel in blank)
                            continue
                        try:
                            ours = Ours(bench, work, task, packed[work.step.pack], output, overlap)
                            yield from _fought(bench, ours, theirs, blank, schedules)
                        except Exception as error:
                            if fatal(error):
                                raise
                            sentence = f"{type(error).__name__}: {error}"
                            yield from (_failed(duel, sentence) for duel in blank)


def _fought(
    bench: Bench, ours: Ours, theirs: Theirs, blank: Sequence[Duel], schedules: Sequence[Schedule]
) -> list[Duel]:
    """The duels of one kernel, one for each schedule, with their results."""
    if why := ours.wrong_at_first() or theirs.wrong_at_first:
        return [_failed(duel, why) for duel in blank]
    done = []
    for duel, schedule in zip(blank, schedules, strict=True):
        own = Side(bench.stopwatch, ours.work, ours.slots, schedule.chunk_seconds)
        other = theirs.side(schedule)
        found = figures(fight(own, other, schedule))
        clocks: dict[str, float | None] = {}
        if not schedule.pause_seconds:  # a burst is over before the clock has been asked for
            clocks["ours"] = bench.stopwatch.sm_mhz(own.replay)
            clocks["rival"] = theirs.rival.sm_mhz(other.replay)
        done.append(
            replace(
                duel,
                status="ok",
                why=None,
                overlap=ours.overlap,
                launches=own.products,
                rival_launches=other.products,
                pause_us=schedule.pause_seconds * 1e6,
                **found,
                sm_mhz=clocks.get("ours"),
                rival_sm_mhz=clocks.get("rival"),
            )
        )
    least = min((duel.us for duel in done if duel.us), default=None)
    if why := ours.wrong_after(least) or theirs.wrong():
        return [_failed(duel, why) for duel in blank]
    return done


def _blank(work: Work, shape: Size, output: str, rival: Rival, schedule: Schedule) -> Duel:
    m, n, k = shape
    return Duel(
        step=work.step.number,
        name=work.step.name,
        scheme=work.scheme,
        format=work.format,
        M=m,
        N=n,
        K=k,
        output=output,
        accuracy=work.step.accuracy,
        rival=rival.name,
        pace=schedule.pace,
        status="failed",
        why="not fought",
        source=rival.source,
        source_hash=record.source_hash(work.step.number),
    )


def _failed(duel: Duel, why: str) -> Duel:
    return replace(duel, status="failed", why=" ".join(why.split()) or "no reason was given")


def fights(
    works: Sequence[Work], shapes: Sequence[Size], which: Which = lambda *_: True
) -> list[tuple[Work, Size, str]]:
    """What `duels` reports of, one by one."""
    each = [(work, shape, x) for shape in shapes for work in works for x in work.step.outputs]
    return [one for one in each if which(*one)]


# --- the command ----------------------------------------------------------------------------------


def duel(args: Namespace) -> int:
    """Duels on this GPU, into a table, JSON or a run's file; 1 if one failed."""
    from steps.cli import run

    shapes = shapes_of(args.shapes) or (
        [run.shape_of(args)] if run.asked_shape(args) else list(SHAPES)
    )
    outputs = tuple(args.output or ("float32", "float16"))
    _, machine, _ = run.machines("gpu")
    if why := why_no_rival():
        raise UsageError(f"a duel takes two: {why}")
    steps = run.named(args.steps)
    works = select(steps, run.formats_of(args.format), args.scheme, machine(0).cc)  # type: ignore[attr-defined]
    works = works if args.steps else meant_to(works)

    def which(work: Work, shape: Size, output: str) -> bool:
        return output in outputs

    if not (count := len(fights(works, shapes, which))):
        raise UsageError(f"no step here writes C as {' or '.join(outputs)}")
    env = record.environment()
    before = _run_to_join(args.out, env) if args.out else None
    measuring = Bench.here(benching.Budget())
    schedules = scheduled(args.seconds, args.pace)
    found: list[Duel] = []
    with table.progress(count) as report:
        each = duels(
            measuring,
            works,
            shapes,
            cublas(measuring.stopwatch.clock),  # type: ignore[attr-defined]
            which=which,
            schedules=schedules,
            overlap=args.overlap,
            distribution=run.timed_distribution(args),
            seed=args.seed,
            report=report,
        )
        for one in each:
            found.append(one)
            if before is not None and one.pace == schedules[-1].pace:
                before = joined(before, found)
                record.write(before, path=args.out)
    if args.json:
        print(json.dumps([asdict(one) for one in found], indent=1))
    else:
        table.show(as_table(f"{env.where}: kernels against cuBLAS fp16", found))
        if args.out:
            print(f"wrote {args.out}")
    bad = [one for one in found if one.status != "ok"]
    for one in bad:
        where = f"step {one.step} {one.scheme} {one.format} {one.shape}"
        print(f"{where} to {one.output}, {one.pace}: {one.why}", file=sys.stderr)
    return 1 if bad else 0


def shapes_of(texts: Sequence[str]) -> list[Size]:
    """ "512x4096x14336", commas or several arguments; UsageError for what is not M x N x K."""
    found = []
    for text in (part for one in texts for part in one.split(",") if part):
        match = re.fullmatch(r"([1-9]\d{0,8})x([1-9]\d{0,8})x([1-9]\d{0,8})", text.lower())
        if match is None:
            raise UsageError(f"{text!r} is not a shape: write M x N x K like 512x4096x14336")
        shape = (int(match[1]), int(match[2]), int(match[3]))
        if shape[2] % 32:
            raise UsageError(f"K={shape[2]} of {text} is not a multiple of the block of 32")
        found.append(shape)
    return list(dict.fromkeys(found))


def scheduled(seconds: float | None = None, paces: Sequence[str] = ()) -> tuple[Schedule, ...]:
    """The schedules of these paces (none: all), sustained ones of so many seconds."""
    wanted = [each for each in SCHEDULES if not paces or each.pace in paces]
    return tuple(
        replace(each, seconds=seconds) if seconds and each.seconds else each for each in wanted
    )


def _run_to_join(path: Any, env: record.Environment) -> Run:
    """The run that the duels are added to: of the same sources on the same GPU, or a new one."""
    if not path.exists():
        return Run(env=env)
    run = record.read(path)
    ours, theirs = (env.gpu, env.git.sha), (run.env.gpu, run.env.git.sha)
    if ours != theirs:
        raise UsageError(
            f"{path} is a run of {theirs[1]} on {theirs[0]}, and this is {ours[1]} on {ours[0]}: "
            "duels are added to a run of the same commit and GPU only"
        )
    return run


def joined(run: Run, found: Sequence[Duel]) -> Run:
    """The run with these duels, in place of those it had of the same."""
    new = {one.key: one for one in found}
    return replace(run, duels=sorted_duels([d for d in run.duels if d.key not in new] + [*found]))


def sorted_duels(found: Sequence[Duel]) -> tuple[Duel, ...]:
    """Ordered for reading: shape, format, step, dtype of C, pace."""
    return tuple(
        sorted(
            found,
            key=lambda d: (d.N * d.K, d.N, d.M, d.format, d.step, d.output, d.pace != "sustained"),
        )
    )


def as_table(title: str, found: Sequence[Duel]) -> Table:
    """A line for each."""
    columns = [Column("step"), Column("scheme", words=True), Column("format", words=True)]
    columns += [Column("M"), Column("N"), Column("K"), Column("C", words=True)]
    columns += [Column("pace", words=True), Column("ours"), Column("TFLOPS"), Column("rival")]
    columns += [Column("x rival"), Column("p20"), Column("p80"), Column("rounds"), Column("MHz")]
    lines = [Line(_cells(one), "" if one.status == "ok" else "bad") for one in found]
    return Table(tuple(columns), tuple(lines), title)


def _cells(one: Duel) -> tuple[str, ...]:
    ratios = (one.x_rival, one.x_rival_p20, one.x_rival_p80)
    return (
        str(one.step),
        one.scheme,
        one.format,
        *map(str, one.shape),
        one.output,
        one.pace + (", overlapping" if one.overlap else ""),
        table.microseconds(one.us),
        table.figure(one.tflops),
        table.microseconds(one.rival_us),
        *(table.ABSENT if x is None else f"{x:.3f}x" for x in ratios),
        str(one.rounds) if one.status == "ok" else "FAILED",
        table.figure(one.sm_mhz, 4),
    )
