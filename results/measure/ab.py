"""Duels: a step's kernel and a rival's at the same shape, timed in turn within one run.

Two figures that were measured minutes apart compare two temperatures of a GPU as much as two
kernels: at 700 W an H200 lowers its clock by a quarter under long work on tensor cores. So both
sides are CUDA graphs over rotated copies of their weights (`results.measure.protocol`), captured first and
then run one after the other, round by round, each side beginning every second round. What counts is
the ratio of the two times of a round: whatever drifts slowly is in both.

    sustained   graphs of some milliseconds without a pause, for a second after a warm-up: the clock
                is what the power limit leaves, of which each side's half of the load is a cause
    burst       single short graphs, before each a pause long enough for the clock to recover

A rival multiplies the same A with the same weights, dequantized, and its result is compared with
the same float64 product; both results are looked at before the rounds and after.

Only `CublasFp16` needs a GPU (and torch). The rounds themselves know a `Captures` and two lists of
launches, so they are tested with a fake clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from results.measure.protocol import Captures, Group, Replay, slots_for, turns
from results.record.schema import Pace

FIRST_LOOK: Final = 8  # products of the graph by which a side learns how long one takes


@dataclass(frozen=True, slots=True)
class Schedule:
    """How a duel is fought. Times are of the device, in seconds."""

    pace: Pace
    chunk_seconds: float  # of one graph
    warm_seconds: float  # of rounds that do not count; there is one at least
    seconds: float  # of rounds that count
    least: int  # of them, whatever they take, and at most
    most: int
    pause_seconds: float = 0.0  # of the host, before each graph


SUSTAINED: Final = Schedule("sustained", 5e-3, 0.3, 1.0, least=15, most=400)
BURST: Final = Schedule("burst", 5e-4, 0.0, 0.0, least=15, most=15, pause_seconds=0.02)
"""A fortieth of the time at work, so that the clock is that of a GPU with nothing else to do."""


class Side:
    """One of the two: graphs over all copies of its weights, captured here and used in turn, so
    that every copy is read before any is again.

    work  : slot -> the launches of one product with that copy of the weights.
    slots : how many copies there are.
    """

    def __init__(
        self,
        stopwatch: Captures,
        work: Callable[[int], Sequence[Any]],
        slots: int,
        chunk_seconds: float,
    ) -> None:
        look = Group(stopwatch, lambda i: work(i % slots), range(FIRST_LOOK))
        once = max(min(look.replay.seconds() for _ in range(2)) / FIRST_LOOK, 1e-7)
        groups = turns(slots, math.ceil(chunk_seconds / once))
        self._groups = [Group(stopwatch, lambda i: work(i % slots), turn) for turn in groups]
        self._replays = [group.replay for group in self._groups]  # nothing is captured in a round
        self._next = 0

    def run(self) -> tuple[float, float]:
        """One graph, the next in turn: (device seconds, seconds of a product)."""
        at = self._next
        self._next = (at + 1) % len(self._replays)
        took = self._replays[at].seconds()
        return took, took / self._groups[at].repetitions

    @property
    def products(self) -> int:
        """In one graph; the last of several may have fewer."""
        return self._groups[0].repetitions

    @property
    def replay(self) -> Replay:
        """The first of its graphs."""
        return self._replays[0]


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds of a product, of either side."""

    ours: float
    rival: float


def fight(
    ours: Side, rival: Side, schedule: Schedule, rest: Callable[[float], None] = time.sleep
) -> list[Round]:
    """The rounds that count, in their order. `rest` is what a pause is."""
    sides, spent = (ours, rival), 0.0

    def once(number: int) -> Round:
        nonlocal spent
        each = [0.0, 0.0]
        for i in (0, 1) if number % 2 == 0 else (1, 0):
            if schedule.pause_seconds:
                rest(schedule.pause_seconds)
            took, each[i] = sides[i].run()
            spent += took
        return Round(*each)

    number = 0
    while number == 0 or spent < schedule.warm_seconds:
        once(number)
        number += 1
    rounds: list[Round] = []
    spent = 0.0
    while len(rounds) < schedule.least or (
        spent < schedule.seconds and len(rounds) < schedule.most
    ):
        rounds.append(once(number + len(rounds)))
    return rounds


def figures(rounds: Sequence[Round]) -> dict[str, Any]:
    """The fields of a `results.record.schema.Duel` that the rounds give."""
    ours = np.array([each.ours for each in rounds]) * 1e6
    rival = np.array([each.rival for each in rounds]) * 1e6

    def three(name: str, values: np.ndarray, unit: str = "_us") -> dict[str, float]:
        p20, median, p80 = (float(x) for x in np.quantile(values, [0.2, 0.5, 0.8]))
        prefix = f"{name}_" if name else ""
        whole = name + unit if name else unit[1:]
        return {whole: median, f"{prefix}p20{unit}": p20, f"{prefix}p80{unit}": p80}

    return {
        "rounds": len(rounds),
        **three("", ours),
        **three("rival", rival),
        **three("x_rival", rival / ours, ""),
    }


# ---------------------------------------------------------------------------------------- the rival


class Rival(Protocol):
    """Somebody else's product C[M, N] = A[M, K] @ W[N, K]^T, ready to be captured."""

    name: str  # a peer's
    source: str
    slots: int

    @property
    def stopwatch(self) -> Captures: ...

    def work(self, slot: int) -> Sequence[Any]: ...

    def result(self) -> np.ndarray:
        """C of the last launch, on the host; it is NaN from then on until the next one."""
        ...

    def sm_mhz(self, replay: Replay) -> float | None:
        """The SM clock while a replay of its runs, if the machine tells."""
        ...


class CublasFp16:
    """cuBLAS through torch: float16 operands and result, as `results.baselines.peers.cublas_fp16`."""

    name = "cublas_fp16"

    def __init__(self, weights: Sequence[Any], a: np.ndarray, clock: Any = None) -> None:
        """weights: of `cublas_weights`. a: float32 [M, K], rounded to float16 here.

        clock: () -> MHz of a busy GPU, or None.
        """
        import torch

        from results.baselines.peers import TorchStopwatch

        self.stopwatch, self._weights, self._clock = TorchStopwatch(), weights, clock
        self.slots = len(weights)
        self._a = torch.from_numpy(np.array(a)).cuda().half()
        shape = (a.shape[0], weights[0].shape[0])
        self._c = torch.full(shape, math.nan, device="cuda", dtype=torch.float16)
        self.source = (
            f"torch {torch.__version__}, CUDA {torch.version.cuda}, kernel only, float16 "
            "operands and result, graph"
        )
        self.work(0)[0]()  # cuBLAS picks its kernel and allocates its workspace before capture

    def work(self, slot: int) -> Sequence[Callable[[], Any]]:
        import torch

        return (lambda: torch.matmul(self._a, self._weights[slot].T, out=self._c),)

    def result(self) -> np.ndarray:
        import torch

        torch.cuda.synchronize()
        c = np.asarray(self._c.cpu().numpy())
        self._c.fill_(math.nan)
        torch.cuda.synchronize()
        return c

    def sm_mhz(self, replay: Any) -> float | None:
        if self._clock is None:
            return None
        import torch

        replay.start()
        try:
            return float(self._clock())
        finally:
            torch.cuda.synchronize()


def cublas_weights(w: np.ndarray) -> list[Any]:
    """Copies of float32 w[N, K] in float16 on the GPU, as many as fill the rotation."""
    import torch

    from results.baselines.peers import TorchStopwatch

    first = torch.from_numpy(np.array(w)).cuda().half()
    slots = slots_for(2 * w.size, TorchStopwatch().l2_bytes)
    return [first, *(first.clone() for _ in range(slots - 1))]
