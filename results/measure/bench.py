"""What a bench measures, in which order, and what it leaves as it is.

The matrix: every lesson at its home shapes in all formats, with what it is compared with there, and
at all other shapes the engineered kernels of the branches' top steps. All that is compared at one
shape is in one loop (`results.measure.loop`). Where every row of a shape and format was measured
with the code of today on this GPU, they are left as they are. After every loop the run is written,
so a bench that is killed keeps what it had.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from qformats import WEIGHT_FORMATS
from reference import BENCH_SHAPES, Problem
from reference.problem import PrequantizedProblem
from results.measure import cublas
from results.measure.by_chain import ChainedData
from results.measure.by_experts import ExpertsData
from results.measure.loop import ratio, round_robin
from results.measure.products import Data, Product, Shared, attempt, failed, in_threads
from results.measure.protocol import Budget, Stopwatch
from results.measure.torch_graphs import release
from results.record.environment import finished, utc_now
from results.record.provenance import remembered, source_hash
from results.record.schema import AsCalled, Environment, Limits, Peer, Row, Run, mnk
from results.record.store import merge, read, write
from steps.blocks.chained import multiplies_twice
from steps.checks.cases import Routing, routing
from steps.checks.select import branches
from steps.contract import Family, Kernel, Size, Step, Work
from steps.kernels.parts.activations.layouts import reading_of
from steps.product.choice import Choice, of_gemm
from steps.registry import kernel_of, kernels, lesson_of
from steps.registry import ladder as all_steps

DEFAULT_SHAPE: Final[Size] = (512, 4096, 4096)
"""What a run measures unless told otherwise: the shape that this ladder is usually quoted at."""

FIRST_SHAPES: Final[tuple[Size, ...]] = tuple(
    dict.fromkeys(branch.homes[0] for branch in branches().values())
)
"""Measured first: a bench that is killed has the headline."""

RUN_BUDGET: Final = Budget(warm_seconds=0.3, seconds=1.5, min_rounds=7)
"""Of the loops of `run` and `ladder`."""

FEW_TOKENS: Final = 16
SOME_TOKENS: Final = 8
"""At all shapes, the top step of decode is measured up to the first M, others from the second."""

BFLOAT16_FORMAT: Final = "q4_0"  # the format that is measured in bfloat16


# --------------------------------------------------------------------------------------- the matrix


@dataclass(frozen=True, slots=True)
class Wanted:
    """A row that is to be measured."""

    work: Work
    size: Size
    input: str = "float32"
    output: str = "float32"

    @property
    def key(self) -> tuple[Any, ...]:
        """`Row.key` of its row."""
        return (
            self.work.step.number,
            self.work.scheme,
            self.work.format,
            self.size,
            self.input,
            self.output,
        )

    @property
    def launched(self) -> Choice:
        """What it launches, for `compile_ahead`."""
        return Choice.of_work(self.work, self.size, self.input, self.output)

    @property
    def at_home(self) -> bool:
        return self.size in lesson_of(self.work.step).home_shapes

    def row(self) -> Row:
        """What is known of it before anything ran; `status` says so until it is replaced."""
        work, step, family = self.work, self.work.step, self.work.family
        lesson = lesson_of(step)
        return Row(
            step=step.number,
            name=step.name,
            title=step.title,
            branch=lesson.branch,
            parent=lesson.parents.get(family),
            unit=step.unit.get(family, ""),
            scheme=work.scheme,
            format=work.format,
            **mnk(self.size),
            home=self.at_home,
            input=self.input,
            output=self.output,
            accuracy=step.accuracy,
            status="failed",
            why="not run",
        )


def wanted_in(work: Work, size: Size, output: str) -> Wanted:
    """The row for a dtype of C; A is of that dtype where the step reads it."""
    return Wanted(work, size, reading_of(work.step, output, work.family).source, output)


def wanted_of(work: Work, size: Size) -> list[Wanted]:
    """A row for each dtype of C that a step writes. bfloat16 takes what float16 does: a row at home
    in one format, of a step that reads it, shows that."""
    rows = [wanted_in(work, size, output) for output in work.step.outputs]
    shows = work.format == BFLOAT16_FORMAT and size in lesson_of(work.step).home_shapes
    return [one for one in rows if one.output != "bfloat16" or (shows and one.input == one.output)]


def wanted_at(works: Iterable[Work], size: Size, output: str | None) -> list[Wanted]:
    """The rows of works at a shape, in one dtype of C or in all."""
    if output is not None:
        return [wanted_in(work, size, output) for work in works]
    return [one for work in works for one in wanted_of(work, size)]


def matrix(
    ladder: Sequence[Step],
    formats: Sequence[str] = WEIGHT_FORMATS,
    cc: tuple[int, int] | None = None,
) -> tuple[Wanted, ...]:
    """Every row of a whole bench: of lessons at home shapes, theirs and those of the steps that are
    compared with them; of engineered kernels at the others, and in formats that no lesson has."""
    by_number = {step.number: step for step in ladder}
    sizes: dict[int, dict[Size, None]] = {step.number: {} for step in ladder}
    for step in ladder:
        for number in (step.number, *step.parents.values()):
            if number in sizes:
                sizes[number] |= dict.fromkeys(step.home_shapes)
    homes = {number: frozenset(own) for number, own in sizes.items()}
    alone = {  # where lessons are compared that do more than one product
        size
        for step in ladder
        for size in step.home_shapes
        if routing(step, size) or multiplies_twice(step)
    }
    for step in top_steps(ladder, cc):
        sizes[step.number] |= dict.fromkeys(size for size in BENCH_SHAPES if for_top(step, size[0]))
    return tuple(
        one
        for number, own in sizes.items()
        for family in dict.fromkeys((*by_number[number].families, *kernel_of(number).families))
        for name in formats
        for size in own
        for step in (
            _able([by_number[number]], name, family, cc)
            if size in alone
            else _taken(by_number[number], name, family, cc, size in homes[number])
        )
        for one in wanted_of(Work(step, family, name), size)
    )


def _taken(
    step: Step, name: str, family: Family, cc: tuple[int, int] | None, at_home: bool
) -> list[Kernel]:
    """What is measured of a step: at home the lesson, if it can, else its engineered kernel; where
    neither can, nothing."""
    candidates = (step, kernel_of(step.number)) if at_home else (kernel_of(step.number),)
    return _able(candidates, name, family, cc)


def _able(
    candidates: Sequence[Kernel], name: str, family: Family, cc: tuple[int, int] | None
) -> list[Kernel]:
    """The first that can, if any. At homes of experts and of two products lessons alone: no pass
    over A is between launches."""
    return [one for one in candidates if one.supports(name, family, cc) is None][:1]


def top_steps(ladder: Sequence[Step], cc: tuple[int, int] | None = None) -> tuple[Step, ...]:
    """The highest step of each branch and accuracy that runs on this GPU, CUDA cores left out, and
    what `gemm` does not call."""
    found = {
        (step.branch, step.accuracy): step
        for step in ladder
        if step.branch != "cuda_cores"
        and of_gemm(step)
        and step.supports(step.formats[0], step.families[-1], cc) is None
    }
    return tuple(found.values())


def for_top(step: Kernel, m: int) -> bool:
    """Whether a top step is measured at all shapes of m tokens."""
    return m >= SOME_TOKENS if kernel_of(step.number).most_tokens is None else m <= FEW_TOKENS


def in_loops(wanted: Iterable[Wanted]) -> list[tuple[Size, tuple[Wanted, ...]]]:
    """By shape: the headline's first, then home shapes, then the others by (N, K)."""
    by_size: dict[Size, list[Wanted]] = {}
    for one in wanted:
        by_size.setdefault(one.size, []).append(one)
    homes = {size for size, own in by_size.items() if any(one.at_home for one in own)}

    def place(size: Size) -> tuple[Any, ...]:
        m, n, k = size
        if size in FIRST_SHAPES:
            return (0, FIRST_SHAPES.index(size))
        return (1 if size in homes else 2, n * k, n, m)

    return [(size, tuple(by_size[size])) for size in sorted(by_size, key=place)]


# ---------------------------------------------------------------------------- what need not be done


def same_machine(ours: Environment, theirs: Environment) -> bool:
    """Whether rows of one may stand beside rows of the other."""

    def facts(env: Environment) -> tuple[Any, ...]:
        return env.gpu, env.numba_cuda, (env.driver or "").split(".")[0]

    return facts(ours) == facts(theirs)


def begin(path: Path, env: Environment, ladder: Sequence[Step]) -> Run:
    """The run of this GPU, to be merged with: without rows of what is no longer there, such as of a
    dtype or format that a step no longer has, and without any where GPU, numba-cuda or the driver's
    major version have changed."""
    if not path.exists() or not same_machine(env, (run := read(path)).env):
        return Run(env=env)
    numbers = {step.number for step in ladder}
    known = {(one.number, one.name): one for one in (*ladder, *kernels())}

    def still_there(row: Row) -> bool:
        one = known.get((row.step, row.name))
        return one is not None and row.format in one.formats and row.output in one.outputs

    rows = tuple(filter(still_there, run.rows))
    return replace(run, rows=rows, as_called=tuple(c for c in run.as_called if c.step in numbers))


def missing(wanted: Iterable[Wanted], run: Run) -> list[Wanted]:
    """Those without a good row that was measured with the code of today, and beside each the others
    of its shape and format: what is compared is measured in one loop."""
    now, wanted = remembered(source_hash), list(wanted)
    good = {
        row.key
        for row in run.rows
        if row.status == "ok" and row.source_hash == now(row.step, row.name)
    }
    again = {(one.size, one.work.format) for one in wanted if one.key not in good}
    return [one for one in wanted if (one.size, one.work.format) in again]


# ---------------------------------------------------------------------------------------- measuring


@dataclass(frozen=True, slots=True)
class Bench:
    """What measures: a machine, its stopwatch, its measured limits, and how long to take.

    torch: whether cuBLAS takes part. say: hears in a sentence why it does not.
    """

    machine: Any
    stopwatch: Stopwatch
    limits: Limits
    budget: Budget
    torch: bool = False
    say: Callable[[str], None] = lambda _: None

    @classmethod
    def here(
        cls, budget: Budget, say: Callable[[str], None] = lambda _: None, torch: bool = True
    ) -> Bench:
        """On this machine's GPU, whose limits are measured first."""
        from results.measure.limits import measure_limits
        from results.measure.protocol import GpuStopwatch
        from steps.driver.machines import Gpu

        machine, stopwatch = Gpu(), GpuStopwatch()
        limits = measure_limits(stopwatch, machine)
        why = cublas.why_not()
        if torch and why:
            say(f"no cuBLAS beside the rows: {why}")
        return cls(machine, stopwatch, limits, budget, torch and why is None, say)

    def loop(
        self,
        data: Data,
        m: int,
        wanted: Sequence[Wanted],
        wrong: Mapping[tuple[int, Family, str], str] | None = None,
    ) -> tuple[list[Row], list[Peer]]:
        """The rows of one shape, and cuBLAS beside them: checked, timed in one loop, checked.

        wrong: (step, family, format) -> why it must not be timed, because its checks failed.
        A CUDA error that takes the context with it is raised: nothing after it could be trusted.
        """
        with suppress(Exception):  # the row whose weights cannot be packed will say so
            data.prepare(one.work for one in wanted)
        why: list[str] = []
        measured = partial(self._loop, data, m, wanted, wrong or {})
        done: tuple[list[Row], list[Peer]] | None = attempt(measured, why.append, "the loop failed")
        return done or ([failed(one.row(), why[0]) for one in wanted], [])

    def _loop(
        self,
        data: Data,
        m: int,
        wanted: Sequence[Wanted],
        wrong: Mapping[tuple[int, Family, str], str],
    ) -> tuple[list[Row], list[Peer]]:
        shared = data.shared(m, self.machine, self.stopwatch)
        every = [Product(one.row(), one.work, shared) for one in wanted]
        for one in every:
            if why := wrong.get((one.work.step.number, one.work.family, one.work.format)):
                one.row = failed(one.row, why)

        running = self._each([one for one in every if one.row.why == "not run"], Product.first_run)
        running = self._judged(running, "")
        running = self._each(running, lambda one: one.enter(self.budget))
        beside = self._cublas(shared) if running and self.torch and shared.beside_cublas else None
        contestants = [each for one in running for each in one.contestants]
        contestants += shared.passes.values()
        if beside is not None:
            contestants.append(beside.contestant)
        round_robin(self.stopwatch, contestants, self.budget)
        self.stopwatch.wait()

        for one in running:
            one.row = one.timed(self.limits, self.stopwatch.l2_bytes)
        shared.forget_bits()
        running = self._each(running, Product.last_run)
        self._judged(running, "right before timing, wrong after: ")
        peers: list[Peer] = []
        if beside is not None and self._right(beside):
            us, peers = beside.contestant.timing.us, [beside.peer()]
            for one in running:
                assert one.total is not None
                x = ratio(beside.contestant.times, one.total.times)
                one.row = replace(one.row, cublas_us=us, x_cublas=x)
        return [one.row for one in every], peers

    def _each(self, some: Sequence[Product], act: Callable[[Product], None]) -> list[Product]:
        """Those for which it went well; an error is a failed row, and a lost context is raised."""
        good = []
        for one in some:
            why: list[str] = []
            attempt(partial(act, one), why.append)
            if why:
                one.row = failed(one.row, why[0])
            else:
                good.append(one)
        return good

    def _judged(self, some: Sequence[Product], when: str) -> list[Product]:
        """Those whose last result is right."""
        good = []
        for one, found in zip(some, in_threads(Product.check, some), strict=True):
            if isinstance(found, Exception):
                one.row = failed(one.row, f"{type(found).__name__}: {found}")
                continue
            if not when:  # the first check is the one that is recorded
                errors = found.nmse_same_operands, found.nmse_float
                one.row = replace(one.row, nmse_same_operands=errors[0], nmse_float=errors[1])
            if found.ok:
                good.append(one)
            else:
                one.row = failed(one.row, when + found.verdict)
        return good

    def _cublas(self, shared: Shared) -> cublas.Cublas | None:
        """cuBLAS at this shape, if its result is right."""
        made = partial(cublas.Cublas, shared, self.budget)
        one: cublas.Cublas | None = attempt(made, self.say, f"no cuBLAS at {shared.shape}")
        return one if one is not None and self._right(one) else None

    def _right(self, made: cublas.Cublas) -> bool:
        why = made.wrong()
        if why:
            self.say(f"no cuBLAS at {made.shape}: {why}")
        return why is None

    def tidy(self) -> None:
        """Give back the memory of a loop: its graphs and what they hold."""
        if self.torch:
            release()
        else:
            gc.collect()


def measure_loops(
    bench: Bench,
    loops: Sequence[tuple[Size, Sequence[Wanted]]],
    *,
    distribution: str = "normal",
    seed: int = 0,
    wrong: Mapping[tuple[int, Family, str], str] | None = None,
    given: Problem | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Iterator[tuple[list[Row], list[Peer]]]:
    """(rows, peers) of each loop. Data of one (N, K) is kept until its last loop, copies on the GPU
    until a loop of other weights.

    distribution : what A and W are drawn from; of what is made of integers nothing is timed, so
                   "normal" stands in.
    wrong        : (step, family, format) -> why it must not be timed, because its checks failed.
    given        : the problem of the one format and shape, where its weights are not drawn.
    """
    if distribution not in PrequantizedProblem.DISTRIBUTIONS:
        distribution = "normal"
    kept: dict[tuple[Any, ...], Data] = {}
    now = remembered(source_hash)
    of = [(*size[1:], kind_of(size, wanted)) for size, wanted in loops]
    formats = ({one.work.format for one in wanted} for _, wanted in loops)
    weights = list(zip(of, formats, strict=True))
    for i, ((m, n, k), wanted) in enumerate(loops):
        report(f"M={m} N={n} K={k}: {len(wanted)} rows")
        own, kind = of[i], of[i][-1]
        if own not in kept:
            tokens = max(size[0] for each, (size, _) in zip(of, loops, strict=True) if each == own)
            if isinstance(kind, Routing):
                kept[own] = ExpertsData(tokens, n, k, distribution, seed, kind)
            elif kind == "chained":
                kept[own] = ChainedData(tokens, n, k, distribution, seed)
            else:
                kept[own] = Data(tokens, n, k, distribution, seed, given)
        rows, peers = bench.loop(kept[own], m, wanted, wrong)
        if weights[i + 1 : i + 2] != [weights[i]]:
            kept[own].release()
        rest = {each for each, _ in weights[i + 1 :]}
        kept = {each: data for each, data in kept.items() if each in rest}
        bench.tidy()
        yield [replace(row, source_hash=now(row.step, row.name)) for row in rows], peers


def kind_of(size: Size, wanted: Sequence[Wanted]) -> Routing | Literal["chained"] | None:
    """How the problem of a loop routes tokens to experts, if one of its steps multiplies those;
    "chained" at the home of one that multiplies by two matrices; None for an ordinary product."""
    if any(multiplies_twice(one) and size in one.home_shapes for one in all_steps()):
        return "chained"
    found = (routing(one.work.step, size) for one in wanted)
    return next((one for one in found if one is not None), None)


def failures(rows: Iterable[Row]) -> list[str]:
    """A sentence for each row that failed."""
    return [
        f"step {row.step} {row.scheme} {row.format} {row.shape} {row.input} to {row.output}: "
        f"{row.why}"
        for row in rows
        if row.status == "failed"
    ]


# ---------------------------------------------------------------------------------------- recording


@dataclass(slots=True)
class Recorder:
    """A run as it grows, written after every loop."""

    path: Path
    env: Environment
    run: Run
    limits: Limits | None = None
    added: list[Row] = field(default_factory=list)
    written: bool = False

    def add(
        self,
        rows: Iterable[Row] = (),
        peers: Iterable[Peer] = (),
        as_called: Iterable[AsCalled] = (),
    ) -> None:
        """Merge what was measured now, by this commit, and write the file."""
        git, utc = self.env.git, utc_now()
        commit = None if git.sha is None else git.sha + ("-dirty" if git.dirty else "")

        def stamped(records: Iterable[Any]) -> list[Any]:
            return [replace(one, commit=commit, utc=utc) for one in records]

        new = stamped(rows)
        self.added += new
        mine = [peer if not peer.same_run else stamped([peer])[0] for peer in peers]
        env = replace(finished(self.env, self.limits), utc=utc)
        self.run = merge(self.run, env=env, rows=new, peers=mine, as_called=stamped(as_called))
        write(self.run, self.path)
        self.written = True
