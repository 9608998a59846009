"""From works and shapes to measured rows: for `run` after its checks, for the matrix of `bench`.

The protocol is `results.measure.protocol`; this file only decides what is measured in which order, so that
steps that are compared with each other are measured within seconds of each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

from reference import Check, Problem, Reference, check
from results.measure import protocol as measure
from results.measure.protocol import Budget, Packed, Stopwatch, interleaved, pack_weights
from results.record import schema as record
from results.record.schema import Environment, Limits, Peer, Row, Run
from steps.checks.run import fatal
from steps.contract import Family, Size, Work

DEFAULT_SHAPE: Final[Size] = (512, 4096, 4096)
"""What a run measures unless told otherwise: the shape that this ladder is usually quoted at."""


COMPARED: Final = 2**16
"""Outputs compared before and after a row is timed, NaN being sought in all of them: the float64
reference would otherwise take longer than the timing. The check shapes compare every output."""


@dataclass(frozen=True)
class FirstTokens(Problem):
    """The first `m` tokens of another problem: its weights are drawn and quantized only once."""

    of: Problem | None = None

    @cached_property
    def a(self) -> np.ndarray:
        return self._whole.a[: self.m]

    @cached_property
    def w(self) -> np.ndarray:
        return self._whole.w

    @cached_property
    def blocks(self) -> np.ndarray:
        return self._whole.blocks

    @property
    def knows_floats(self) -> bool:
        return self._whole.knows_floats

    @property
    def _whole(self) -> Problem:
        if self.of is None or self.m > self.of.m:
            raise ValueError(f"the first {self.m} tokens of {self.of} do not exist")
        return self.of


@dataclass(frozen=True, slots=True)
class Task:
    """One problem for all steps: what is right, worked out once, and A on the machine."""

    reference: Reference
    a: Any

    @classmethod
    def of(cls, problem: Problem, machine: Any) -> Task:
        return cls(Reference(problem, COMPARED), machine.array(problem.a))


@dataclass(frozen=True, slots=True)
class Bench:
    """What measures: a machine, its stopwatch, its measured limits, and how long to take."""

    machine: Any
    stopwatch: Stopwatch
    limits: Limits
    budget: Budget

    @classmethod
    def here(cls, budget: Budget) -> Bench:
        """On this machine's GPU, whose limits are measured first."""
        from results.measure.limits import measure_limits
        from steps.api.machines import Gpu

        machine, stopwatch = Gpu(), measure.GpuStopwatch()
        return cls(machine, stopwatch, measure_limits(stopwatch, machine), budget)

    def row(self, work: Work, task: Task, packed: Packed, dtype: Any = np.float32) -> Row:
        """One row, checked before and after it is timed; `dtype` is C's."""
        problem = task.reference.problem

        def judged(c: np.ndarray, given: Any) -> Check:
            return check(c, problem, work.family, given, reference=task.reference)

        return measure.measure_step(
            work.step,
            work.family,
            work.format,
            task.a,
            problem.n,
            machine=self.machine,
            stopwatch=self.stopwatch,
            packed=packed,
            check=judged,
            limits=self.limits,
            budget=self.budget,
            dtype=dtype,
        )


def rows(
    bench: Bench,
    works: Sequence[Work],
    shapes: Sequence[Size],
    *,
    distribution: str = "normal",
    seed: int = 0,
    wrong: Mapping[tuple[int, Family, str], str] | None = None,
    all_outputs: bool = True,
    given: Problem | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Iterator[Row]:
    """Every work at every shape, weights outermost, the steps of one problem next to each other; of
    a step that writes C in several types a row for each, or of the first only.

    wrong: (step, family, format) -> why it must not be timed, because its checks failed.
    given: the problem of the one format and shape, where it is not drawn.
    A CUDA error is raised: nothing measured after it could be trusted.
    """
    wrong = wrong or {}
    for name in dict.fromkeys(work.format for work in works):
        own = [work for work in works if work.format == name]
        for (n, k), group in itertools.groupby(by_weights(shapes), key=lambda s: s[1:]):
            tokens = sorted({m for m, _, _ in group})
            whole = given or Problem(tokens[-1], n, k, name, distribution, seed)
            packed: dict[Any, Packed] = {}  # by the function that packs, which steps share
            task: Task | None = None
            for m, work in interleaved(tokens, own):
                report(f"{work} at M={m} N={n} K={k}")
                for output in work.step.outputs[: None if all_outputs else 1]:
                    blank = measure.blank_row(work.step, name, work.scheme, (m, n, k), output)
                    if why := wrong.get((work.step.number, work.family, name)):
                        yield measure.without_result(blank, "failed", why)
                        continue
                    try:
                        if task is None or task.reference.problem.m != m:
                            some = FirstTokens(m, n, k, name, distribution, seed, of=whole)
                            task = Task.of(whole if m == whole.m else some, bench.machine)
                        if work.step.pack not in packed:
                            packed[work.step.pack] = pack_weights(work.step, whole.blocks)
                        yield bench.row(work, task, packed[work.step.pack], output)
                    except Exception as error:
                        if fatal(error):
                            raise
                        sentence = f"{type(error).__name__}: {error}"
                        yield measure.without_result(blank, "failed", sentence)


def by_weights(shapes: Sequence[Size]) -> list[Size]:
    """In the given order of (N, K), the shapes that share them together."""
    seen = list(dict.fromkeys(shape[1:] for shape in shapes))
    return sorted(shapes, key=lambda shape: seen.index(shape[1:]))


def sorted_rows(found: Sequence[Row]) -> tuple[Row, ...]:
    """Rows with their ratios, ordered for reading: shape, format, step, scheme."""
    from steps.checks.select import ALL_FORMATS

    return tuple(
        sorted(
            record.with_ratios(found),
            key=lambda r: (
                r.N * r.K,
                r.N,
                r.M,
                ALL_FORMATS.index(r.format),
                r.step,
                r.family == "A8",
                r.output != "float32",
            ),
        )
    )


def budget_for(seconds: float, count: int) -> Budget:
    """A budget by which `count` rows take about `seconds` of device time (slow kernels take longer:
    three samples of each are the least)."""
    whole = Budget()
    per_row = (
        whole.kernel_seconds + whole.total_seconds + whole.activation_seconds + whole.warm_seconds
    )
    return whole.scaled(seconds / (per_row * max(count, 1)))


@dataclass(slots=True)
class Recorder:
    """Writes a run as it grows, so that a killed bench leaves the rows it had.

    path: the file; None for results/<gpu>/<date>-<sha>.json, chosen by the first `save`.
    """

    env: Environment
    limits: Limits
    path: Path | None = None

    def save(
        self, found: Sequence[Row], peers: Sequence[Peer] = (), duels: Sequence[Duel] = ()
    ) -> Path:
        env = record.finished(self.env, self.limits)
        run = Run(env=env, rows=sorted_rows(found), peers=tuple(peers), duels=tuple(duels))
        self.path = record.write(run, path=self.path)
        return self.path


def same_work_by_others(
    gpu: str | None,
    shapes: Sequence[Size],
    formats: Sequence[str],
    budget: Budget,
    l2_bytes: int,
    say: Callable[[str], None],
    *,
    cublas: bool = True,
) -> tuple[Peer, ...]:
    """cuBLAS, if wanted, through torch where it is installed, measured now; llama.cpp's, measured
    now where llama-cpp-python is installed with CUDA, else from another run. `say` hears why not
    now."""
    from results.baselines.peers import cublas_fp16, ggml

    halves = cublas_fp16(shapes, budget) if cublas else ()
    llama_cpp, why = ggml(gpu, shapes, formats, l2_bytes, budget)
    if why:
        say(f"llama.cpp's figures are those given, where there are any: {why}")
    return (*halves, *llama_cpp)
