"""One exhibit: a wrong kernel, the right one, and what the checks say of both.

The layers that can catch a bug: those of `reference.check` (nan, exact, bound, nmse, float,
weights, activations), the simulator's own (misaligned, out of range, barrier, race), and two found
by comparing runs: "golden value" (the hand-computed block) and "golden bytes" (a codec against
ggml's bytes).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np

from reference import GOLDEN, Q81, Problem, check
from steps.simulator.launch import (
    BarrierDivergence,
    Misaligned,
    OutOfRange,
    Race,
    SimulatorError,
    simulate,
)

Array = np.ndarray[Any, np.dtype[Any]]
Multiply = Callable[[Array, Q81], Array]
"""(blocks[N, K/32], activations) -> C float32[M, N]."""

TILE: Final = 4  # a block of threads covers TILE x TILE outputs
SHAPE: Final = (5, 7, 96)  # ragged against TILE, three K blocks, all three sizes different


@dataclass(frozen=True, slots=True, kw_only=True)
class Pitfall:
    """One bug.

    number, title   as the museum's table shows them
    story           what happens, why it gets written, what a user sees
    format          weight format it is shown on
    wrong, right    the two products; they differ in a line or two
    golden          what the wrong one returns for the golden block (NaN: nothing was written)
    caught_by       the layers that must catch it, at least
    problems        what it is shown on, besides the golden block
    activations     the wrong one's quantizer of A, where the bug is in it
    extra           () -> {layer: sentence} of further layers, for the wrong and the right one
    aside           () -> a sentence for the story with computed figures
    """

    number: int
    title: str
    story: str
    format: str
    wrong: Multiply
    right: Multiply
    golden: float
    caught_by: tuple[str, ...]
    problems: tuple[Problem, ...] = ()
    activations: Callable[[Array], Q81] | None = None
    extra: Callable[[], tuple[dict[str, str], dict[str, str]]] | None = None
    aside: Callable[[], str] | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """What the checks found in one pitfall.

    golden      the wrong product's value on the golden block, `expected` the right one
    nmse        its error against the same operands on a small normal problem (inf: NaN or Inf)
    layers      layer -> its sentence about the wrong one
    complaints  layer -> its sentence about the right one: must be empty
    caught      all layers of `caught_by` found it, its value is `golden`, the right one passed
    """

    golden: float
    expected: float
    nmse: float
    layers: Mapping[str, str]
    complaints: Mapping[str, str]
    caught: bool
    aside: str = field(default="")


@dataclass(frozen=True)
class LargeActivations(Problem):
    """A problem whose activations are 2^14 times larger: the sums of a block overflow
    float16."""

    @cached_property
    def a(self) -> Array:
        large: Array = super().a * np.float32(2**14)
        large.setflags(write=False)
        return large


def pitfalls() -> tuple[Pitfall, ...]:
    """Every exhibit, by number: the modules steps/learn/pitfalls/pNN_*.py."""
    package = importlib.import_module("steps.learn.pitfalls")
    names = sorted(m.name for m in pkgutil.iter_modules(package.__path__) if m.name[0] == "p")
    return tuple(importlib.import_module(f"steps.learn.pitfalls.{name}").PITFALL for name in names)


def launch(kernel: Any, blocks: Array, q81: Q81, *, floor: bool = False) -> Array:
    """kernel(w, q, d, s, c) over a grid of TILE x TILE tiles, C pre-filled with NaN.

    w uint8[N, K/32 * block bytes], q int8[M, K], d and s float32[M, K/32], c float32[M, N].
    `floor` forgets the last partial tile (pitfall 12).
    """
    m, n = q81.q.shape[0], blocks.shape[0]
    c = np.full((m, n), np.nan, np.float32)
    w = np.ascontiguousarray(blocks).view(np.uint8).reshape(n, -1)
    grid = (n // TILE, m // TILE) if floor else (-(-n // TILE), -(-m // TILE))
    if all(grid):
        simulate(kernel, grid, (TILE, TILE), (w, q81.q, q81.d, q81.s, c))
    return c


def product(kernel: Any, **options: Any) -> Multiply:
    """The kernel as a `Multiply`."""

    def multiply(blocks: Array, q81: Q81) -> Array:
        return launch(kernel, blocks, q81, **options)

    return multiply


def examine(pitfall: Pitfall) -> Finding:
    """Runs the wrong and the right one in the simulator and collects what the checks say."""
    golden = GOLDEN[pitfall.format]
    value, layers = _judge(pitfall, pitfall.wrong, pitfall.activations)
    right_value, complaints = _judge(pitfall, pitfall.right, None)
    if pitfall.extra is not None:
        of_wrong, of_right = pitfall.extra()
        layers, complaints = layers | of_wrong, complaints | of_right
    same_value = value == pitfall.golden or (np.isnan(value) and np.isnan(pitfall.golden))
    return Finding(
        golden=value,
        expected=golden.value,
        nmse=_kernel_error(pitfall),
        layers=layers,
        complaints=complaints,
        caught=bool(
            same_value
            and right_value == golden.value
            and not complaints
            and set(pitfall.caught_by) <= set(layers)
        ),
        aside=pitfall.aside() if pitfall.aside else "",
    )


def _problems(pitfall: Pitfall) -> tuple[Problem, ...]:
    return pitfall.problems or (
        Problem(*SHAPE, pitfall.format, "integer"),
        Problem(*SHAPE, pitfall.format, "normal"),
    )


def _judge(
    pitfall: Pitfall, multiply: Multiply, quantize: Callable[[Array], Q81] | None
) -> tuple[float, dict[str, str]]:
    """The value on the golden block, and the sentence of every layer that finds the bug."""
    layers: dict[str, str] = {}
    golden = GOLDEN[pitfall.format]
    try:
        value = float(multiply(golden.blocks, golden.q81)[0, 0])
    except SimulatorError as error:
        value = float("nan")
        layers[_layer_of(error)] = str(error)
    else:
        if value != golden.value:
            layers["golden value"] = f"{value:g} instead of {golden.value:g}"
    for problem in _problems(pitfall):
        q81 = (quantize or Q81.of_values)(problem.a)
        try:
            verdict = check(multiply(problem.blocks, q81), problem, "A8", q81)
        except SimulatorError as error:
            layers.setdefault(_layer_of(error), str(error))
            continue
        for name, reason in zip(verdict.failures, verdict.reasons, strict=True):
            layers.setdefault(name, reason)
    return value, layers


def _kernel_error(pitfall: Pitfall) -> float:
    """NMSE against the same operands on the last (the random) problem."""
    problem = _problems(pitfall)[-1]
    q81 = (pitfall.activations or Q81.of_values)(problem.a)
    try:
        return check(pitfall.wrong(problem.blocks, q81), problem, "A8", q81).nmse_same_operands
    except SimulatorError:
        return float("nan")


def _layer_of(error: SimulatorError) -> str:
    names = {
        Misaligned: "misaligned",
        OutOfRange: "out of range",
        BarrierDivergence: "barrier",
        Race: "race",
    }
    return names.get(type(error), "simulator")
