"""The loop, on a fake clock: who runs when, what counts, and when it ends."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import pytest

from results.measure import loop
from results.measure.loop import (
    Contestant,
    Timing,
    ratio,
    round_robin,
    turns,
)
from results.measure.protocol import MAX_LAUNCHES, Budget

SHORT = Budget(
    replay_seconds=1e-3, warm_seconds=0.0, seconds=0.0, min_rounds=4, max_rounds=4, slow_rounds=2
)


@dataclass
class Clock:
    """A device of launches (name, slot, seconds), every round of which is `drift` times as long as
    the one before."""

    drift: float = 1.0
    noise: Callable[[], float] = lambda: 1.0
    slower: float = 1.0
    rounds: list[list[tuple[str, list[int]]]] = field(default_factory=list)

    def capture(self, launches: Sequence[tuple[str, int, float]]) -> Any:
        return Captured(self, tuple(launches))

    def round(self, replays: Sequence[Any]) -> list[float]:
        self.rounds.append([(r.parts[0][0], [slot for _, slot, _ in r.parts]) for r in replays])
        self.slower *= self.drift
        return [r.seconds() for r in replays]


@dataclass
class Captured:
    clock: Clock
    parts: tuple[tuple[str, int, float], ...]

    def seconds(self) -> float:
        return sum(each for _, _, each in self.parts) * self.clock.slower * self.clock.noise()


def contestant(
    clock: Clock, name: str, us: float, slots: int = 3, budget: Budget = SHORT
) -> Contestant:
    return Contestant(clock, lambda slot: ((name, slot, us * 1e-6),), slots, budget)


def names(clock: Clock) -> list[list[str]]:
    return [[name for name, _ in each] for each in clock.rounds]


def test_everyone_runs_once_a_round_in_an_order_that_changes() -> None:
    clock = Clock()
    everyone = [contestant(clock, name, 100) for name in "abcdef"]
    round_robin(clock, everyone, replace(SHORT, min_rounds=20, max_rounds=20))
    counted = names(clock)[1:]
    assert len(counted) == 20
    assert all(sorted(each) == list("abcdef") for each in counted)
    assert len({tuple(each) for each in counted}) > 15
    first = {each[0] for each in counted}
    assert len(first) >= 4, "no contestant always follows the same one"
    assert [len(one.times) for one in everyone] == [20] * 6


def test_a_drift_is_in_both_sides_of_a_round() -> None:
    """A device that gets 2 % slower with every round: the ratio stays what it is."""
    clock = Clock()
    ours, theirs = contestant(clock, "ours", 100), contestant(clock, "theirs", 130)
    clock.drift = 1.02
    round_robin(clock, [ours, theirs], replace(SHORT, min_rounds=20, max_rounds=20))
    assert ours.timing.p80_us > 1.2 * ours.timing.p20_us
    assert ratio(theirs.times, ours.times) == pytest.approx(1.3)


def test_warm_up_rounds_do_not_count_and_go_on_until_the_clock_has_settled() -> None:
    clock = Clock()
    one = contestant(clock, "a", 100, slots=1)
    round_robin(clock, [one], replace(SHORT, warm_seconds=0.02))
    assert len(clock.rounds) == 20 + 4, "20 ms of rounds of 1 ms"
    assert one.timing.rounds == 4
    clock = Clock(drift=1.05)
    one = contestant(clock, "a", 100, slots=1)
    round_robin(clock, [one], replace(SHORT, warm_seconds=0.02))
    spent = sum(1e-3 * 1.05**i for i in range(1, len(clock.rounds) - 4 + 1))
    assert 0.06 < spent < 0.1, "never settled: four times as long"


def test_a_steady_loop_ends_early_and_a_noisy_one_uses_its_time() -> None:
    budget = replace(SHORT, seconds=0.1, min_rounds=5, max_rounds=1000)
    clock = Clock()
    one = contestant(clock, "a", 100, slots=1)
    round_robin(clock, [one], budget)
    assert one.timing.rounds == 5
    rng = random.Random(0)
    clock = Clock()
    one = contestant(clock, "a", 100, slots=1)
    clock.noise = lambda: rng.choice([0.5, 1.5])
    round_robin(clock, [one], budget)
    assert sum(one.times) * len(one.replay.parts) == pytest.approx(0.1, rel=0.05)
    assert one.timing.p20_us < 100 < one.timing.p80_us
    clock = Clock(noise=lambda: rng.uniform(0.1, 2.0))
    one = contestant(clock, "a", 100, slots=1)
    round_robin(clock, [one], replace(budget, seconds=1e9, max_rounds=40))
    assert one.timing.rounds == 40


def test_a_slow_contestant_sits_most_rounds_out() -> None:
    clock = Clock()
    fast, slow = contestant(clock, "fast", 100), contestant(clock, "slow", 80_000)
    round_robin(clock, [fast, slow], replace(SHORT, min_rounds=12, max_rounds=12))
    assert [each.count("slow") for each in names(clock)[1:]] == [1] * 2 + [0] * 10
    assert names(clock)[0] == ["fast"], "nor does it warm anything up"
    assert (fast.timing.rounds, slow.timing.rounds) == (12, 2)
    assert slow.timing.us == pytest.approx(80_000)
    assert ratio(slow.times, fast.times) == pytest.approx(800), "of the rounds in which both ran"
    clock = Clock()
    slow = contestant(clock, "slow", 80_000)
    round_robin(clock, [slow], SHORT)
    assert slow.timing.rounds == 2, "alone it is no slower"


@pytest.mark.parametrize(("slots", "us"), [(1, 10), (3, 100), (7, 400), (27, 900), (600, 3)])
def test_every_copy_is_read_before_any_is_read_again(slots: int, us: float) -> None:
    clock = Clock()
    one = contestant(clock, "a", us, slots)
    round_robin(clock, [one], replace(SHORT, min_rounds=40, max_rounds=40))
    read = [slot for each in clock.rounds for _, graph in each for slot in graph]
    assert read == [i % slots for i in range(len(read))]
    assert one.timing.us == pytest.approx(us)


@pytest.mark.parametrize("slots", [1, 2, 7, 22, 26, 600])
@pytest.mark.parametrize("wanted", [1, 3, 4, 7, 100, 10**6])
def test_graphs_of_a_contestant_are_as_long_as_each_other(slots: int, wanted: int) -> None:
    plan = turns(slots, wanted)
    used = [repetition % slots for turn in plan for repetition in turn]
    assert used == [i % slots for i in range(len(used))]
    assert len(used) % slots == 0
    lengths = [len(turn) for turn in plan]
    assert max(lengths) - min(lengths) <= 1
    assert max(lengths) <= max(1, min(wanted, MAX_LAUNCHES))


def test_a_graph_lasts_as_long_as_the_budget_says() -> None:
    clock = Clock()
    one = contestant(clock, "a", 7, slots=22)
    one.capture()
    assert len(one.replay.parts) % 22 == 0
    assert one.replay.seconds() == pytest.approx(1e-3, rel=0.2)


def test_nothing_is_captured_in_a_round() -> None:
    clock = Clock()
    one = contestant(clock, "a", 400, slots=30)
    rounds, capture = clock.round, clock.capture

    def refuse(launches: Any) -> Any:
        raise AssertionError("captured in a round")

    def round_of(replays: Sequence[Any]) -> list[float]:
        clock.capture = refuse  # type: ignore[method-assign]
        try:
            return rounds(replays)
        finally:
            clock.capture = capture  # type: ignore[method-assign]

    clock.round = round_of  # type: ignore[method-assign]
    round_robin(clock, [one], replace(SHORT, min_rounds=40, max_rounds=40))
    assert one.timing.rounds == 40


def test_a_figure_is_the_median_of_rounds_and_a_ratio_that_of_their_ratios() -> None:
    assert ratio([2.0, 2.0, 6.0, 9.0], [1.0, 2.0, 2.0, math.nan]) == 2.0, "2, 1 and 3"
    timing = Timing.of([0.2, math.nan, 0.1, 0.4, 0.3, 0.5])
    assert astuple(timing) == pytest.approx((0.3e6, 0.18e6, 0.42e6, 5))
    assert timing.spread == pytest.approx(0.8)


def test_a_median_is_known_by_its_standard_error() -> None:
    """1.25 sigma / sqrt(n): 1.25 / 10 of 100 times of 9 and 11."""
    times = [9.0, 11.0] * 50
    assert loop._known(times, Budget(relative_error=0.01251))
    assert not loop._known(times, Budget(relative_error=0.01249))
