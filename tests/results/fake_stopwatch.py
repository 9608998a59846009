"""A stopwatch that runs launches in the simulator and tells an invented time, for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from steps.driver.machines import Simulator


def no_effect(launches: Sequence[Any]) -> None:
    """Nothing but the launches themselves."""


@dataclass
class FakeReplay:
    watch: FakeStopwatch
    parts: tuple[Any, ...]

    def seconds(self) -> float:
        return self.watch.round([self])[0]


@dataclass
class FakeStopwatch:
    """`cost` gives the seconds of a launch; each launch is simulated the first time it is timed.

    `rounds` has the replays of every round, `effect` is called with what was launched in one.
    """

    cost: Callable[[Any], float] = lambda _: 1e-3
    effect: Callable[[Sequence[Any]], None] = no_effect
    l2_bytes: int = 1
    rounds: list[list[FakeReplay]] = field(default_factory=list)
    copies: int = 0
    simulated: bool = True
    ran: dict[int, Any] = field(default_factory=dict)

    def capture(self, launches: Sequence[Any]) -> FakeReplay:
        return FakeReplay(self, tuple(launches))

    def round(self, replays: Sequence[FakeReplay]) -> list[float]:
        self.rounds.append(list(replays))
        for replay in replays:
            for launch in replay.parts if self.simulated else ():
                if id(launch) not in self.ran:
                    Simulator().run(launch)
                    self.ran[id(launch)] = launch
            self.effect(replay.parts)
        return [sum(map(self.cost, replay.parts)) for replay in replays]

    def duplicate(self, array: Any) -> Any:
        self.copies += 1
        return array.copy()

    def wait(self) -> None:
        pass


def by_kernel(times: dict[str, float]) -> Callable[[Any], float]:
    """Seconds by the name of a launch's kernel."""
    return lambda launch: times.get(launch.kernel.__name__, 1e-3)
