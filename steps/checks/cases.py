"""The problems that a work must solve: shapes, distributions of the data, orders of the lanes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from math import gcd
from typing import Final, NamedTuple

from qformats import FORMATS, SUPER
from reference import CHECK_SHAPES, DEEP_CHECK_SHAPE, GOLDEN, GPU_CHECK_SHAPES
from steps.blocks.chained import multiplies_twice
from steps.blocks.experts import RowsByIds
from steps.checks.select import ALL_FORMATS, UsageError
from steps.contract import Kernel, Size, Step
from steps.registry import lesson_of

SIMULATOR_LIMIT: Final = 2**20
"""The most M * N * K that the simulator accepts: about a minute of Python per step."""

DISTRIBUTION_CYCLE: Final = ("integer", "normal", "uniform", "integer", "llm")
"""Distributions in turn, where none is asked for: exact problems find what rounding would hide."""

ORDERS: Final = (0, -1, 1, 2)  # lane orders in turn: ascending, descending, shuffled

# CHECK_SHAPES for blocks of 256: K is no multiple of a kernel's 128 alone, no tile of M or N is
# full.
SUPER_CHECK_SHAPES: Final = (
    (1, 1, 256),
    (1, 33, 512),
    (2, 65, 256),
    (5, 20, 256),
    (9, 5, 768),
    (17, 3, 256),
    (3, 130, 256),
    (33, 18, 256),
)

EXTREME: Final = (4, 4)  # outputs of an extreme problem: all kinds of rows of A and of W meet
INTEGER_K: Final = 1280
"""In the simulator, of steps whose integer sums run over K: beyond what a float32 would hold."""

QUICK: Final = 3
"""A quick check gives each format every third shape, so that three formats cover all of them."""


FEW_EXPERTS: Final = 5
"""Of the problems that check a lesson on experts: one token leaves some unchosen, 130 give each
several groups."""


class Routing(NamedTuple):
    """How many experts there are, and how many a token has: E and S."""

    experts: int
    chosen: int


def routing(step: Kernel, size: Size) -> Routing | None:
    """That of a step's problem with so many rows of C; None for a step that knows no experts. At
    the weights of a home there are as many as the step says; a token has as many of them as divide
    M."""
    reads = step.activations[step.families[-1]]
    if not isinstance(reads, RowsByIds):
        return None
    at_home = size[1:] in {home[1:] for home in lesson_of(step).home_shapes}
    return Routing(reads.experts if at_home else FEW_EXPERTS, gcd(size[0], reads.chosen))


@dataclass(frozen=True, slots=True)
class Case:
    """One problem, apart from its format; `order` is the simulator's order of lanes."""

    shape: Size
    distribution: str
    seed: int = 0
    order: int = 0

    def __str__(self) -> str:
        m, n, k = self.shape
        return f"M={m} N={n} K={k} {self.distribution} seed {self.seed} order {self.order}"


def cases(
    format_name: str,
    *,
    simulated: bool,
    quick: bool = False,
    small: bool = False,
    shape: Size | None = None,
    distribution: str | None = None,
    seed: int = 0,
    order: int | None = None,
    step: Kernel | None = None,
) -> tuple[Case, ...]:
    """The problems of a format: one shape, or the machine's check shapes, the golden case and one
    of the largest sums. step: for which they are, if they are for one: its largest sums may run
    over K, and in the simulator a kernel of few tokens has a deeper K than others.

    quick: a third of the shapes, another third for the next format. small: a GPU gets the
    simulator's shapes too (for tools that slow it down a hundredfold).
    """
    if distribution == "golden":
        return (Case((1, 1, 32), "golden", seed, order or 0),)
    if shape is not None:
        require_depth(format_name, shape[2])
        if simulated and shape[0] * shape[1] * shape[2] > SIMULATOR_LIMIT:
            raise UsageError(
                f"M*N*K = {shape[0] * shape[1] * shape[2]} multiply-adds are too many for the "
                f"simulator, which does some ten thousand a second: use at most {SIMULATOR_LIMIT}"
            )
        return (Case(shape, distribution or "normal", seed, order or 0),)
    shapes = _check_shapes(format_name, simulated or small, step)
    if quick:
        shapes = shapes[ALL_FORMATS.index(format_name) % QUICK :: QUICK]
    drawn = itertools.cycle((distribution,) if distribution else DISTRIBUTION_CYCLE)
    orders = itertools.cycle(ORDERS if order is None else (order,))
    regular = [
        Case(each, name, seed + i, lanes)
        for i, (each, name, lanes) in enumerate(zip(shapes, drawn, orders, strict=False))
    ]
    if distribution is not None:
        return tuple(regular)
    golden = [Case((1, 1, 32), "golden", 0, order or 0)] if format_name in GOLDEN else []
    extreme = extreme_case(format_name, step.most_k if step else None, simulated or small)
    return (*golden, replace(extreme, seed=seed, order=order or 0), *regular)


def extreme_case(format_name: str, most_k: int | None, small: bool) -> Case:
    """The case of the largest integer sums: a whole chain of them, which ends with a block, or with
    K where a step has a largest K. small: for the simulator."""
    depth = max(64, elements := FORMATS[format_name].elements)
    if most_k is not None:
        depth = INTEGER_K if small else most_k // elements * elements
    return Case((*EXTREME, depth), "extreme")


def _check_shapes(format_name: str, small: bool, step: Kernel | None) -> tuple[Size, ...]:
    size = FORMATS[format_name].elements
    shapes = CHECK_SHAPES if small else GPU_CHECK_SHAPES
    if small and step is not None and multiplies_twice(step):  # by K x K weights, token by token
        shapes = tuple((min(m, 3), n, min(k, 416)) for m, n, k in CHECK_SHAPES)
    elif small and step is not None and of_few_tokens(step):
        shapes = (*CHECK_SHAPES[:-1], DEEP_CHECK_SHAPE)
    if size < SUPER:
        return tuple(dict.fromkeys((m, n, -(-k // size) * size) for m, n, k in shapes))
    if small:
        return SUPER_CHECK_SHAPES
    rounded = ((m, n, -(-k // SUPER) * SUPER) for m, n, k in shapes if k >= SUPER)
    return (*SUPER_CHECK_SHAPES, *rounded)


def of_few_tokens(kernel: Kernel) -> bool:
    """Whether it is a kernel of decode."""
    if isinstance(kernel, Step):
        return kernel.branch in ("decode", "experts")
    return kernel.most_tokens is not None


def require_depth(format_name: str, k: int) -> None:
    """UsageError where K is not a multiple of a format's block."""
    size = FORMATS[format_name].elements
    if k % size:
        raise UsageError(
            f"K={k} is not a multiple of {size}, the block of {format_name}: "
            f"use {k // size * size + size}"
        )
