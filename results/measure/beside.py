"""Two kernels for one product, timed in turn: a reader's own beside the step it is to become.

The regime is that of every figure here (`results.measure.protocol`), checks included; nothing is
recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from results.measure.bench import wanted_in
from results.measure.loop import Timing, ratio, round_robin
from results.measure.products import Data, Product, Shared
from results.measure.protocol import Budget, Stopwatch
from steps.contract import Size, Work


@dataclass(frozen=True, slots=True)
class Beside:
    """The times of the two kernels alone; `ratio` is the median over the rounds of theirs over
    ours: above 1 ours is faster."""

    ours: Timing
    theirs: Timing
    ratio: float


def beside(
    ours: Work, theirs: Work, size: Size, machine: Any, stopwatch: Stopwatch, budget: Budget
) -> Beside:
    """Time both at one shape, on the same weights and activations.

    ValueError, with the sentence of the check, where one of them is wrong at this shape, or where
    the machine has not what it takes.
    """
    m, n, k = size
    shared = Shared(Data(m, n, k), m, machine, stopwatch)
    products = [
        Product(wanted_in(one, size, "float32").row(), one, shared) for one in (ours, theirs)
    ]
    for product in products:
        product.first_run()
        found = product.check()
        if not found.ok:
            raise ValueError(f"M={m} N={n} K={k}: {found.verdict}")
        product.enter({}, budget)
    contestants = [each for product in products if (each := product.kernel) is not None]
    round_robin(stopwatch, contestants, budget)
    first, second = contestants
    return Beside(first.timing, second.timing, ratio(second.times, first.times))
