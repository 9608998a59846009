"""Chained products (`steps.blocks.chained`) made ready to be timed, as `results.measure.products`
does it for others.

    H = A @ dequantize(V)[K, K]^T        rounded to float16
    C = H @ dequantize(W)[N, K]^T

A step that multiplies by one matrix takes two launches, right behind each other in one graph, the
second of which reads what the first one writes. So a row at such a shape is of both products.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np

from qformats import FORMATS
from reference import Problem, check
from results.measure.products import Data, Shared
from steps.blocks.chained import multiplies_twice
from steps.checks.fuzz_cases import GivenProblem
from steps.contract import Activations, Launch, Shape, Work
from steps.kernels.parts.activations.layouts import decode

DRAWN: Final = 4096  # rows of W, which are repeated where N is a multiple of them


class ChainedData(Data):
    """A, V and W of all chained products with one (N, K)."""

    @cached_property
    def _drawn(self) -> Problem:
        rows = self.n if self.n % DRAWN else DRAWN
        return Problem(self.tokens, rows, self.k, "q4_0", self.distribution, self.seed)

    @cached_property
    def w(self) -> np.ndarray:
        return np.tile(self._drawn.w, (self.n // self._drawn.n, 1))

    def before(self, format_name: str) -> np.ndarray:
        """Blocks of V."""
        own = (1, self.k, self.k, format_name, self.distribution, self.seed + 1)
        return Problem(*own).blocks

    def blocks(self, format_name: str) -> np.ndarray:
        if format_name not in self._blocks:
            one = FORMATS[format_name].quantize(self._drawn.w)
            self._blocks[format_name] = np.tile(one, (self.n // len(one), 1))
        return self._blocks[format_name]

    def _pack(self, work: Work) -> tuple[np.ndarray, ...]:
        """Of V, then of W, for a step that multiplies by one matrix, too."""
        pack = work.step.pack
        v, w = self.before(work.format), self.blocks(work.format)
        if multiplies_twice(work.step):
            return tuple(pack(w, before=v))  # type: ignore[call-arg]
        return (*pack(v), *pack(w))

    def shared(self, m: int, machine: Any, stopwatch: Any) -> ChainedShared:
        return ChainedShared(self, m, machine, stopwatch)


class ChainedShared(Shared):
    """What all products of one shape share on the machine."""

    data: ChainedData
    beside_cublas = False  # which would need two launches of its own

    def __init__(self, data: ChainedData, m: int, machine: Any, stopwatch: Any) -> None:
        super().__init__(data, m, machine, stopwatch)
        self._works: dict[int, Work] = {}  # by the identity of its activations
        self._memory: dict[Any, tuple[Any, ...]] = {}  # H, then what a launch works in besides

    def activations(self, work: Work, input: str) -> tuple[tuple[Any, ...], Any]:
        """(what names it, A); each work has its own, as each makes an H."""
        made = work.step.activations[work.family](self.a(input), self.machine)
        key = (*named(work), input)
        if key not in self._activations:
            self._activations[key], self._works[id(made)] = made, work
        return key, self._activations[key]

    def memory(self, work: Work) -> tuple[Any, ...]:
        """H, and the counters of a launch of both products."""
        key = named(work)
        if key not in self._memory:
            if multiplies_twice(work.step):
                given = self.machine, FORMATS[work.format], work.family, Shape(*self.shape)
                (self._memory[key],) = work.step.scratch_memory(*given)
            else:
                h = self.machine.empty((self.m, self.data.k), np.float16)
                self._memory[key] = (h,)
        return self._memory[key]

    def launches(
        self, work: Work, copies: Sequence[tuple[Any, ...]], activations: Activations, out: Any
    ) -> list[tuple[Launch, ...]]:
        fmt, family, arrays = FORMATS[work.format], work.family, activations.arrays
        (m, n, k), memory, step = self.shape, self.memory(work), work.step
        if multiplies_twice(step):
            given = fmt, family, Shape(m, n, k)
            return [(step.launch(*given, both, arrays, out, memory),) for both in copies]
        found: list[tuple[Launch, ...]] = []
        (h,) = memory
        for both in copies:
            v, w = both[: len(both) // 2], both[len(both) // 2 :]
            first = step.launch(fmt, family, Shape(m, k, k), v, arrays, h)
            found.append((first, step.launch(fmt, family, Shape(m, n, k), w, (h,), out)))
        return found

    @property
    def operations(self) -> int:
        m, _, k = self.shape
        return super().operations + 2 * m * k * k

    def _multiplied(self, activations: Any) -> Any:
        """H, as the first product left it. ValueError where that is wrong."""
        work = self._works[id(activations)]
        h = np.array(self.machine.host(self.memory(work)[0]))
        a = self.data.a("float16")[: self.m]
        first = GivenProblem(a, self.data.before(work.format), "float16")
        found = check(h, first, work.family, decode("rows", (a,), *a.shape))
        if not found.ok:
            raise ValueError(f"the first of two products is {found.verdict}")
        return decode("rows", (h,), *h.shape)

    def _named(self, work: Work, dtype: str) -> tuple[Any, ...]:
        return (*named(work), dtype)

    def _problem(self, work: Work, dtype: str) -> Problem:
        """For the H that this work has made."""
        problem = super()._problem(work, dtype)
        problem.__dict__["a"] = self.multiplied(self._activations[*named(work), dtype]).h
        return problem


def named(work: Work) -> tuple[str, str]:
    """What tells works apart."""
    return work.step.name, work.format
