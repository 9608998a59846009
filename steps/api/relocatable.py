"""Plans of a shape alone: where weights, activations, output and memory lie comes with each call.

A `steps.api.plan.Plan` belongs to one matrix and owns the memory in which its kernels leave things for
each other. That is what a caller with an allocator of its own must not have: torch's layers of one
shape share a plan, their calls may be on several streams at once, and what a CUDA graph writes must
come from that graph's pool. So this one owns nothing: the caller brings `nbytes` of memory, the
first `zeroed` of them set to zero, for each call.

    made = Relocatable("q4_0", Shape(m, n, k), {"tiles": places}, machine)
    made(a, out, weights, work, stream)     # addresses; a: float32 [M, K], out: float32 [M, N]

A caller whose activations are float16 anyway says so, and keeps them where the step's pass reads
that.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from qformats import FORMATS
from steps.api import plan as plans
from steps.api.choice import Choice, choose, cut, known_accuracy, supporting
from steps.api.operands import require_grid
from steps.components.activations.layouts import reading
from steps.contract import Shape, Step
from steps.registry import ladder

APART: Final = 1 << 52
"""Between the addresses that no array has and that stand for those to come, one for each of them:
more than an array can have bytes."""
A, OUT, ZEROED, WORK, WEIGHTS = (APART * (1 + i) for i in range(5))

ALIGNED: Final = 256
"""Bytes at a multiple of which each array of the working memory begins, as CUDA's own do."""

Place = tuple[tuple[int, ...], str]
"""(shape, dtype) of an array that lies nowhere yet."""


def packings(format_name: str, cc: tuple[int, int] | None, accuracy: str) -> tuple[Step, ...]:
    """One step for each packing that products of this accuracy want: the highest exact one, then,
    if less exact ones are allowed and read another packing, the highest of these."""
    exact = supporting(format_name, None, cc)[-1]
    allowed = supporting(format_name, None, cc, accuracy=known_accuracy(accuracy))
    highest = next((one for one in reversed(allowed) if one.accuracy != "exact"), exact)
    return (exact,) if highest.pack is exact.pack else (exact, highest)


def chosen(
    format_name: str,
    shape: Shape,
    offered: Iterable[str],
    machine: Any,
    accuracy: str = "exact",
    half: bool = False,
) -> tuple[Choice, str]:
    """The step for a product with weights in the packings that are offered, and C's dtype: float16
    where it may be, with `half`, and the step can write that."""
    among = [one for one in ladder() if one.pack.__name__ in offered]
    choice = choose(format_name, shape, machine, among=among, accuracy=accuracy)
    return choice, "float16" if half and "float16" in choice.step.outputs else "float32"


class Relocatable:
    """A prepared product of M tokens with any weights [N, K] of a format.

    choice  : the step, and why.
    packing : the name of the packing that it reads, one of those offered.
    takes   : how A is read: as it is `given`, "float16" or "gated", where the step can, or what is
              nearest to it that it can (`steps.components.activations.layouts.reading`).
    half    : whether C is float16, else it is float32.
    nbytes  : of working memory that a call needs, `zeroed` of them zero, at a multiple of 256.
    loaded  : the launches of a call, in their order.

    One call at a time changes the arguments and launches; threads wait for each other.
    """

    def __init__(
        self,
        format_name: str,
        shape: Shape,
        offered: Mapping[str, Sequence[Place]],
        machine: Any,
        accuracy: str = "exact",
        half: bool = False,
        given: str = "float32",
    ) -> None:
        choice, output = chosen(format_name, shape, offered, machine, accuracy, half)
        step, m, n, k = choice.step, shape.m, shape.n, shape.k
        self.packing = step.pack.__name__
        self.half = output == "float16"
        memory: Any = _Nowhere(machine)  # what launches are laid out with, and never run on
        weights = tuple(
            plans.nowhere(WEIGHTS + i * APART, place, np.dtype(dtype))
            for i, (place, dtype) in enumerate(offered[self.packing])
        )
        make, self.takes, (wide, dtype) = reading(step.activations, given)
        a = plans.nowhere(A, (m, wide * k), np.dtype(dtype))
        out = plans.nowhere(OUT, (m, n), np.dtype(output))
        activations = make(choice.family, a, memory)
        fmt = FORMATS[format_name]
        own = step.prepare(memory, fmt, choice.family, shape, weights, activations.arrays, out)
        self.choice = replace(choice, cut=cut(own))
        self.zeroed, self.nbytes = memory.used[ZEROED], sum(memory.used.values())
        launches = (*activations.launches, own)
        for launch in launches:
            require_grid(launch, m, n)

        from steps.api.launcher import load

        self.loaded = [load(launch) for launch in launches]
        starts = (A, OUT, ZEROED, WORK, *(WEIGHTS + i * APART for i in range(len(weights))))
        self._places = [
            (loaded.arguments, i, number, offset)  # arguments[i] = address of that number + offset
            for loaded in self.loaded
            for number, start in enumerate(starts)
            for i, offset in loaded.within(start, APART)
        ]
        self._lock = threading.Lock()

    def __call__(self, a: int, out: int, weights: Sequence[int], work: int, stream: int) -> None:
        """Queue out[:] = a @ dequantize(W)^T on a stream; returns before it is done.

        Addresses on the GPU, unchecked: a, [M, K] as it `takes` it, gated at a multiple of 16; out,
        [M, N], apart from a and at a multiple of 16; the arrays of `packing`; `work`, see `nbytes`.
        """
        addresses = (a, out, work, work + self.zeroed, *weights)
        with self._lock:
            for arguments, i, number, offset in self._places:
                arguments[i] = addresses[number] + offset
            for loaded in self.loaded:
                loaded(stream)


class _Nowhere:
    """A machine that notes what memory is asked for: zeros apart from what may hold anything."""

    def __init__(self, machine: Any) -> None:
        self.name = machine.name
        self.used = {ZEROED: 0, WORK: 0}

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return self._array(WORK, shape, np.dtype(dtype))

    def array(self, host: np.ndarray) -> Any:
        if host.any():
            raise TypeError("a step's memory must be all zero at first, or hold anything")
        return self._array(ZEROED, host.shape, host.dtype)

    def _array(self, kind: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        start = kind + self.used[kind]
        self.used[kind] += -(-math.prod(shape) * dtype.itemsize // ALIGNED) * ALIGNED
        return plans.nowhere(start, shape, dtype)
