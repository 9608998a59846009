"""One exhibit: a wrong kernel, the right one, and what the checks say of both.

The layers that can catch a bug: those of `reference.check` (nan, exact, bound, nmse, float,
weights, activations), the simulator's own (misaligned, out of range, barrier, race), and two found
by comparing runs: "golden value" (the hand-computed block) and "golden bytes" (a codec against
ggml's bytes).
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from reference import GOLDEN, Q81, Problem, check
from steps.learn.pitfalls import right
from steps.simulator.launch import (
    BarrierDivergence,
    Misaligned,
    OutOfRange,
    Race,
    SimulatorError,
    simulate,
)

Array = np.ndarray[Any, np.dtype[Any]]
Multiply = Callable[[Array, Q81], Array]  # (blocks[N, K/32], activations) -> C float32[M, N]
TILE: Final = 4  # a block of threads covers TILE x TILE outputs
SHAPE: Final = (5, 7, 96)  # ragged against TILE, three K blocks, all three sizes different


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
    return lambda blocks, q81: launch(kernel, blocks, q81, **options)


RIGHT: Final = {
    "q4_0": product(right.kernel(right.q4_0)),
    "q5_0": product(right.kernel(right.q5_0)),
}
WRONG_VALUES: Final = ("golden value", "exact", "bound", "nmse")
"""The layers that find outputs that are far off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pitfall:
    """One bug.

    number, title   as the museum's table shows them
    story           what happens, why it gets written, what a user sees
    wrong           a product that differs from that of `RIGHT` in a line or two
    golden          what it returns for the golden block (NaN: nothing was written)
    format          weight format it is shown on
    right           what the wrong one should have been
    caught_by       the layers that must catch it, at least
    problems        what it is shown on, besides the golden block
    activations     the wrong one's quantizer of A, where the bug is in it
    extra           () -> {layer: sentence} of further layers, for the wrong and the right one
    """

    number: int
    title: str
    story: str
    wrong: Multiply
    golden: float
    format: str = "q4_0"
    right: Multiply = RIGHT["q4_0"]
    caught_by: tuple[str, ...] = WRONG_VALUES
    problems: tuple[Problem, ...] = ()
    activations: Callable[[Array], Q81] = Q81.of_values
    extra: Callable[[], tuple[dict[str, str], dict[str, str]]] | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """What the checks found in one pitfall.

    golden      the wrong product's value on the golden block, `expected` the right one
    nmse        its error against the same operands on a small normal problem (inf: NaN or Inf;
                NaN: the simulator stopped it)
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


def pitfalls() -> tuple[Pitfall, ...]:
    """Every exhibit, by number: the modules steps/learn/pitfalls/pNN_*.py."""
    package = importlib.import_module("steps.learn.pitfalls")
    names = sorted(m.name for m in pkgutil.iter_modules(package.__path__) if m.name[0] == "p")
    return tuple(importlib.import_module(f"steps.learn.pitfalls.{name}").PITFALL for name in names)


def examine(pitfall: Pitfall) -> Finding:
    """Runs the wrong and the right one in the simulator and collects what the checks say."""
    golden = GOLDEN[pitfall.format]
    value, nmse, layers = _judge(pitfall, pitfall.wrong, pitfall.activations)
    right_value, _, complaints = _judge(pitfall, pitfall.right, Q81.of_values)
    if pitfall.extra is not None:
        of_wrong, of_right = pitfall.extra()
        layers, complaints = layers | of_wrong, complaints | of_right
    told = set(pitfall.caught_by) <= set(layers) and not complaints
    same = np.array_equal(value, pitfall.golden, equal_nan=True) and right_value == golden.value
    return Finding(value, golden.value, nmse, layers, complaints, told and same)


def _judge(
    pitfall: Pitfall, multiply: Multiply, quantize: Callable[[Array], Q81]
) -> tuple[float, float, dict[str, str]]:
    """The value on the golden block, the error on the last problem (NaN: there is none), and the
    sentence of every layer that finds the bug."""
    golden, value, nmse = GOLDEN[pitfall.format], math.nan, math.nan
    layers: dict[str, str] = {}
    try:
        value = float(multiply(golden.blocks, golden.q81)[0, 0])
        if value != golden.value:
            layers["golden value"] = f"{value:g} instead of {golden.value:g}"
    except SimulatorError as error:
        layers[_LAYERS[type(error)]] = str(error)
    problems = pitfall.problems or (
        Problem(*SHAPE, pitfall.format, "integer"),
        Problem(*SHAPE, pitfall.format, "normal"),
    )
    for problem in problems:
        q81 = quantize(problem.a)
        try:
            verdict = check(multiply(problem.blocks, q81), problem, "A8", q81)
        except SimulatorError as error:
            layers.setdefault(_LAYERS[type(error)], str(error))
            continue
        nmse = verdict.nmse_same_operands
        for name, reason in zip(verdict.failures, verdict.reasons, strict=True):
            layers.setdefault(name, reason)
    return value, nmse, layers


_LAYERS: Final[dict[type[SimulatorError], str]] = {
    Misaligned: "misaligned",
    OutOfRange: "out of range",
    BarrierDivergence: "barrier",
    Race: "race",
}


def value_of(finding: Finding) -> str:
    """The wrong one's value on the golden block, as a cell."""
    if not math.isnan(finding.golden):
        return f"{finding.golden:g}"
    return "trap" if "misaligned" in finding.layers else "NaN"


def error_of(nmse: float) -> str:
    """Its NMSE, as a cell."""
    return "-" if math.isnan(nmse) else f"{nmse:.1e}" if math.isfinite(nmse) else "NaN/Inf"
