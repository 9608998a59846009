"""The loop: everything that is compared at one shape takes turns, round by round.

Two figures measured minutes apart compare two temperatures of a GPU as much as two kernels: at
700 W an H200 lowers its clock by a quarter under long work on tensor cores. So every contestant is
one CUDA graph, or a few, captured before the loop. In each round every contestant runs once, in an
order shuffled by a fixed seed, back to back without pauses. Ratios are taken within a round, so
what drifts slowly is in both sides.

A contestant may be a kernel, an activation pass, both, a product of cuBLAS, or a call of an API.

Every figure is a `Timing`, and every comparison a `ratio`, of such rounds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from results.measure.protocol import MAX_LAUNCHES, Budget, Captures, Stopwatch

FIRST_LOOK: Final = 8  # repetitions by which a contestant learns how long one takes
SETTLED: Final = 0.01  # the clock has settled when a warm-up round takes what the last one took
WARM_AT_MOST: Final = 4  # times Budget.warm_seconds

Work = Callable[[int], Sequence[Any]]
"""slot -> the launches of one repetition on that copy of the weights."""
Times = Sequence[float] | np.ndarray


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one repetition: median and quantiles over the rounds."""

    us: float
    p20_us: float
    p80_us: float
    rounds: int

    @classmethod
    def of(cls, seconds: Times) -> Timing:
        """Of a repetition's seconds in each round, NaN where it sat out."""
        times = np.array([each for each in seconds if not math.isnan(each)]) * 1e6
        p20, median, p80 = (float(x) for x in np.quantile(times, [0.2, 0.5, 0.8]))
        return cls(median, p20, p80, len(times))

    @property
    def spread(self) -> float:
        """(80 % quantile - 20 % quantile) / median."""
        return (self.p80_us - self.p20_us) / self.us


class Contestant:
    """Graphs of some work over all copies of its weights, used in turn, so that every copy is read
    before any is read again.

    work  : slot -> launches.
    slots : how many copies there are.
    `once` is about the seconds of one repetition, known from a first look.
    """

    def __init__(self, device: Captures, work: Work, slots: int, budget: Budget) -> None:
        self._device, self._work, self._slots, self._budget = device, work, slots, budget
        self.once = self._look(1)
        if self.once < budget.replay_seconds / FIRST_LOOK:
            self.once = self._look(FIRST_LOOK)
        self._groups: list[range] = []
        self._replays: list[Any] = []
        self._next = 0
        self.times: list[float] = []  # seconds of a repetition by round, NaN where it sat out
        self.spent = 0.0

    def _look(self, repetitions: int) -> float:
        replay = self._captured(range(repetitions))
        return max(min(replay.seconds() for _ in range(2)) / repetitions, 1e-7)

    def _captured(self, repetitions: range) -> Any:
        return self._device.capture(
            [launch for i in repetitions for launch in self._work(i % self._slots)]
        )

    def capture(self) -> None:
        """Capture its graphs; nothing is captured in a round."""
        count = math.ceil(self._budget.replay_seconds / self.once)
        self._groups = turns(self._slots, count)
        self._replays = [self._captured(group) for group in self._groups]

    @property
    def slow(self) -> bool:
        return self.once * len(self._groups[0]) > self._budget.slow_seconds

    def ready(self) -> Any:
        """The graph that is next in turn."""
        return self._replays[self._next]

    def ran(self, seconds: float, counts: bool) -> None:
        """Its graph ran for so long."""
        if counts:
            self.times.append(seconds / len(self._groups[self._next]))
        self._next = (self._next + 1) % len(self._replays)

    def sat_out(self) -> None:
        self.times.append(math.nan)

    @property
    def replay(self) -> Any:
        """The first of its graphs."""
        return self._replays[0]

    @property
    def timing(self) -> Timing:
        return Timing.of(self.times)


def turns(slots: int, repetitions: int) -> list[range]:
    """Which repetitions (slot = repetition % slots) go into which graph.

    A short kernel gets one graph over all slots, several times round; a long one gets a graph for
    every few slots, to be used in turn. In both cases every copy of the weights is read before any
    is read again.
    """
    repetitions = min(max(repetitions, 1), MAX_LAUNCHES)
    if repetitions >= slots:
        return [range(slots * (repetitions // slots))]
    graphs = math.ceil(slots / repetitions)  # as equal as can be, so that rounds are
    return [range(slots * i // graphs, slots * (i + 1) // graphs) for i in range(graphs)]


def round_robin(device: Stopwatch, contestants: Sequence[Contestant], budget: Budget) -> None:
    """Run the loop; each contestant has its `times` afterwards.

    Warm-up rounds until the clock has settled, then rounds that count: at least
    `budget.min_rounds`, until every median is known or the time is used up. A slow contestant
    takes part in the first `budget.slow_rounds` of them, so that it does not take the time.
    """
    if not contestants:
        return
    for each in contestants:
        each.capture()
    shuffled = random.Random(0)
    _warm_up(device, [each for each in contestants if not each.slow], budget, shuffled)
    spent, number = 0.0, 0
    while not _enough(contestants, spent, number, budget):
        in_turn = [each for each in contestants if not each.slow or number < budget.slow_rounds]
        took = _round(device, in_turn, shuffled, counts=True)
        for each in contestants:
            if len(each.times) == number:
                each.sat_out()
        spent, number = spent + took, number + 1


def _round(
    device: Stopwatch, contestants: Sequence[Contestant], shuffled: random.Random, counts: bool
) -> float:
    """Everyone once, in a new order; the device seconds of all."""
    order = list(contestants)
    shuffled.shuffle(order)
    seconds = device.round([each.ready() for each in order])
    for each, took in zip(order, seconds, strict=True):
        each.ran(took, counts)
    return sum(seconds)


def _warm_up(
    device: Stopwatch, contestants: Sequence[Contestant], budget: Budget, shuffled: random.Random
) -> None:
    """At least one round, and at most `WARM_AT_MOST` times the budget's."""
    spent, last, now = 0.0, 0.0, 0.0
    while contestants:
        last, now = now, _round(device, contestants, shuffled, counts=False)
        spent += now
        settled = abs(now - last) <= SETTLED * now
        if spent >= budget.warm_seconds * (1 if settled else WARM_AT_MOST):
            return


def _enough(contestants: Sequence[Contestant], spent: float, number: int, budget: Budget) -> bool:
    if all(each.slow for each in contestants):
        return number >= budget.slow_rounds
    if number < budget.min_rounds:
        return False
    if spent >= budget.seconds or number >= budget.max_rounds:
        return True
    return all(_known(each.times, budget) for each in contestants if not each.slow)


def _known(times: Sequence[float], budget: Budget) -> bool:
    """Whether the standard error of the median, 1.25 sigma / sqrt(n), is small."""
    error = 1.25 * float(np.std(times)) / math.sqrt(len(times))
    return error <= budget.relative_error * float(np.median(times))


def ratio(theirs: Times, ours: Times) -> float:
    """The median over the rounds of their time over ours; rounds in which one sat out are left
    out."""
    found = np.array(theirs) / np.array(ours)
    return float(np.median(found[np.isfinite(found)]))
