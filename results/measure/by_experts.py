"""Products of experts (`steps.blocks.experts`) made ready to be timed, as
`results.measure.products` does it for others.

A step that knows of no experts multiplies them in a loop: a launch for each expert that was chosen,
on rows of A that lie sorted by expert, to rows of C that lie so. It is not charged for sorting them
and for reading ids on the host.

To quantize 128 experts would take minutes, so a few matrices are drawn, and each is that of many
experts. An id may so be replaced by that of another expert of the same matrix: C stays, and weights
come from elsewhere. Each repetition has ids of its own, as tokens in turn choose other experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy as np

from qformats import FORMATS
from reference import ExpertsProblem, Problem
from results.measure.products import THREADS, Data, Packed, Shared
from steps.blocks.experts import RowsByIds
from steps.checks.cases import Routing, routing
from steps.contract import Activations, Launch, Shape, Work, plain_rows
from steps.kernels.parts.activations.layouts import decode

DRAWN: Final = 8  # matrices, where experts are a multiple of it
REPETITIONS: Final = 24  # with ids of their own


class RepeatedExperts(ExpertsProblem):
    """Experts e, e + DRAWN, e + 2 DRAWN ... have the same weights."""

    @cached_property
    def drawn(self) -> tuple[Problem, ...]:
        count = self.experts if self.experts % DRAWN else DRAWN
        own = (1, self.n, self.k, self.format, self.distribution)
        return tuple(Problem(*own, self.seed + e) for e in range(count))

    @cached_property
    def each(self) -> tuple[Problem, ...]:
        return self.drawn * (self.experts // len(self.drawn))

    @cached_property
    def _of_tokens(self) -> Problem:
        """The same A in all formats."""
        own = (self.n, self.k, "q4_0", self.distribution, self.seed, self.input)
        return Problem(self.m // self.chosen, *own)

    def others(self, repetition: int) -> np.ndarray:
        """For each expert one of the same weights, another in each repetition: int32[E]."""
        rng, at = np.random.default_rng(repetition), np.arange(self.experts)
        for first in range(len(self.drawn) if repetition else 0):
            own = at[first :: len(self.drawn)]
            at[first :: len(self.drawn)] = rng.permutation(own)
        return at.astype(np.int32)


class ExpertsData(Data):
    """A and W of all problems with so many experts of one (N, K)."""

    def __init__(
        self, tokens: int, n: int, k: int, distribution: str, seed: int, routed: Routing
    ) -> None:
        super().__init__(tokens, n, k, distribution, seed)
        self.routed = routed
        self.problem = lru_cache(maxsize=None)(self._problem)

    def _problem(self, format_name: str, m: int, dtype: str) -> RepeatedExperts:
        given = (m, self.n, self.k, format_name, self.distribution, self.seed, dtype)
        return RepeatedExperts(*given, *self.routed)

    def _pack(self, work: Work) -> tuple[np.ndarray, ...]:
        one = self.problem(work.format, self.tokens, "float16")
        each = [work.step.pack(own.blocks) for own in one.drawn]
        times = one.experts // len(each)
        return tuple(np.concatenate(own * times) for own in zip(*each, strict=True))

    def prepare(self, works: Iterable[Work]) -> None:
        needed = {(work.step.pack, work.format): work for work in works}
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(self.packed, needed.values()))

    def shared(self, m: int, machine: Any, stopwatch: Any) -> ExpertsShared:
        return ExpertsShared(self, m, machine, stopwatch)


class ExpertsShared(Shared):
    """What all products of one problem of experts share on the machine."""

    data: ExpertsData
    beside_cublas = False  # which would need a loop of its own

    def __init__(self, data: ExpertsData, m: int, machine: Any, stopwatch: Any) -> None:
        super().__init__(data, m, machine, stopwatch)
        ids = data.problem("q4_0", m, "float16").ids.reshape(-1)
        self.order = np.argsort(ids, kind="stable")  # rows of a loop
        self.experts, self.counts = np.unique(ids, return_counts=True)

    def activations(self, work: Work, input: str) -> tuple[tuple[Any, ...], Any]:
        """(what names it, A): a row for each token, or one for each row of a loop."""
        make = work.step.activations[work.family]
        key = (make, input)
        if key not in self._activations:
            problem = self.data.problem(work.format, self.m, input)
            if isinstance(make, RowsByIds):
                ids = self.machine.array(problem.ids)
                a = self.machine.array(problem.tokens)
                made = make(a, self.machine, ids, problem.experts)
            elif make is plain_rows:
                made = make(self.machine.array(problem.given[self.order]), self.machine)
            else:
                raise ValueError(f"{work} has a pass over A, and a loop over experts has none")
            for launch in made.launches:
                self.machine.run(launch)
            self.stopwatch.wait()
            self._activations[key] = made
        return key, self._activations[key]

    def launches(
        self, work: Work, copies: Sequence[tuple[Any, ...]], activations: Activations, out: Any
    ) -> list[tuple[Launch, ...]]:
        problem = self.data.problem(work.format, self.m, "float16")
        fmt, step, scratch = FORMATS[work.format], work.step, {}
        make = step.activations[work.family]
        found: list[tuple[Launch, ...]] = []
        some = len(self.experts) < problem.experts
        for repetition in range(REPETITIONS if some else len(copies)):
            weights = copies[repetition % len(copies)]
            others = problem.others(repetition)
            if isinstance(make, RowsByIds):
                arrays = activations.arrays
                if make.sorted_by is None:
                    arrays = (*arrays[:-1], self.machine.array(others[problem.ids]))
                given = (fmt, work.family, Shape(*self.shape), weights, arrays)
                found.append((step.launch(*given, out),))
                continue
            own, at = [], 0
            for e, count in zip(others[self.experts], map(int, self.counts), strict=True):
                shape = Shape(count, *self.shape[1:])
                if count not in scratch:
                    scratch[count] = step.scratch_memory(self.machine, fmt, work.family, shape)
                parts = tuple(_part(array, int(e), problem.experts) for array in weights)
                a = (activations.arrays[0][at : at + count],)
                c = out[at : at + count]
                own.append(step.launch(fmt, work.family, shape, parts, a, c, *scratch[count]))
                at += count
            found.append(tuple(own))
        return found

    def in_order(self, work: Work, c: np.ndarray) -> np.ndarray:
        if routing(work.step, self.shape) is not None:
            return c
        sorted_back = np.empty_like(c)
        sorted_back[self.order] = c
        return sorted_back

    def _multiplied(self, activations: Any) -> Any:
        """Of all rows of C. A lesson may sort A, and changes no number."""
        if activations.layout is None:
            return None
        a = self.data.problem("q4_0", self.m, "float16").a
        return decode(activations.layout, (a,), self.m, self.data.k)

    def _problem(self, work: Work, dtype: str) -> Problem:
        return self.data.problem(work.format, self.m, dtype)

    def bytes_read(self, packed: Packed) -> int:
        return packed.nbytes * len(self.experts) // self.data.routed.experts


def _part(array: Any, index: int, parts: int) -> Any:
    """One of the equal parts of an array."""
    size = len(array) // parts
    return array[index * size : (index + 1) * size]
