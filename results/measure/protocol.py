"""The one way of timing, and the GPU that is timed. Every published figure comes from it.

1. Compile and check first: a kernel whose output is wrong is not timed.
2. The weights are rotated over copies of at least four times the L2, so that every launch finds
   them in DRAM, as the layers of a model do. (Twice would be enough if the L2 were LRU; with random
   replacement a cyclic walk over r L2-sizes still hits with the probability h that solves
   h = exp(-r (1 - h)): 20 % at r = 2, 2 % at r = 4.)
3. Launches are captured in CUDA graphs that run for milliseconds, so that neither the host's launch
   cost nor the resolution of an event is in a figure.
4. All that is compared at one shape takes turns in one loop (`results.measure.loop`), back to back,
   so that every contestant meets the same clock and temperature. Reported are the median of the
   rounds and the 20 % and 80 % quantiles.
5. A row has three contestants: the kernel alone, the activation pass, and both in one graph
   ("total"). Launches overlap as a plan's do (`Launch.overlap`) in all of them.
6. The output, pre-filled with NaN, is checked again after the timed launches have written it.
7. A time below what the measured limits of this GPU allow is a failure, and so is a total below its
   kernel.

The device is behind a small protocol, `Stopwatch`, so that the regime itself is tested with a fake
clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from results.record.schema import Limits

ROTATION: Final = 4  # copies of the weights fill this many L2s; see 2. above
MAX_LAUNCHES: Final = 512  # in one graph: loading and capturing one costs the host some 50 us
TOLERANCE: Final = 1.05  # a limit is itself a measurement, on a clock that moves by a few per cent


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How long a loop takes. Times are of the device, in seconds."""

    replay_seconds: float = 2.5e-3  # of one graph: 0.2 % of it is its start (about 6 us)
    warm_seconds: float = 0.4  # of rounds that do not count, until the clock has settled
    seconds: float = 2.5  # of rounds that count, of all contestants together
    min_rounds: int = 11  # whatever they take
    max_rounds: int = 150
    slow_seconds: float = 0.05  # a contestant whose graph takes longer is slow,
    slow_rounds: int = 3  # and takes part in so many rounds
    relative_error: float = 0.002  # rounds end early when every median is known as well as this


# ----------------------------------------------------------------------------- what a device offers


class Captures(Protocol):
    """What a contestant needs of a device; a launch is whatever that device takes for one."""

    def capture(self, launches: Sequence[Any]) -> Any:
        """The launches as one, whose `seconds()` runs them once and gives the device time they took
        together."""
        ...


class Stopwatch(Captures, Protocol):
    """A device on which rows can be timed: GpuStopwatch, or a fake in the tests."""

    l2_bytes: int

    def round(self, replays: Sequence[Any]) -> list[float]:
        """Run what was captured in this order, back to back; the device seconds of each."""
        ...

    def duplicate(self, array: Any) -> Any: ...

    def wait(self) -> None: ...


def slots_for(weight_bytes: int, l2_bytes: int) -> int:
    """How many copies of the weights fill ROTATION times the L2."""
    return max(1, math.ceil(ROTATION * l2_bytes / max(weight_bytes, 1)))


# ------------------------------------------------------------------------------------------- limits


def floor_us(
    operations: int, unit: str, weights: int, others: int, l2_bytes: int, limits: Limits
) -> float | None:
    """The least microseconds this GPU could need: the larger of bytes / bandwidth and
    operations / peak of the unit. None where neither limit was measured.

    weights, others: bytes of the packed weights; of A as the kernel reads it and of C. Those that
    cannot come from the L2 count: the rotated weights, and what of the others is larger than it.
    """
    bandwidth = max(limits.copy_tbps or 0.0, limits.read_tbps or 0.0)
    peak = limits.tops.get(unit, 0.0)
    moved = weights + max(0, others - l2_bytes)
    times = [moved / bandwidth * 1e-6] if bandwidth else []
    times += [operations / peak * 1e-6] if peak else []
    return max(times) if times else None


def impossible(kernel_us: float, floor: float | None) -> str | None:
    """A sentence if a time is below what the measured limits allow, else None."""
    if floor is None or kernel_us * TOLERANCE >= floor:
        return None
    return (
        f"{kernel_us:.4g} us is less than the {floor:.4g} us that the measured limits of this GPU "
        "allow: the timing, the counted work or the limit is wrong"
    )


# ------------------------------------------------------------------------------------------ the GPU


class GpuStopwatch:
    """CUDA graphs and events on a stream of its own."""

    def __init__(self) -> None:
        from cuda.core import Device
        from numba import cuda

        from steps.driver.launcher import load, stream_handle

        cuda.current_context()  # cuda.core and Numba then share the primary context
        device = cuda.get_current_device()
        self.l2_bytes = int(device.L2_CACHE_SIZE)
        self._cuda = cuda
        self._load = load
        self._device = Device(device.id)
        self._device.set_current()
        self._stream = self._device.create_stream()
        self.stream = stream_handle(self._stream)
        self._events: list[Any] = []

    def capture(self, launches: Sequence[Any]) -> GpuReplay:
        """A CUDA graph, which keeps what it works on: loaded before the capture begins, each
        distinct launch once, as a graph repeats a few many times."""
        self.wait()  # operands are prepared on the default stream
        distinct = {id(launch): launch for launch in launches}
        loaded = {key: self._load(launch) for key, launch in distinct.items()}
        builder = self._device.create_graph_builder()
        builder.begin_building()
        try:
            for launch in launches:
                loaded[id(launch)](builder)
        finally:
            builder.end_building()
        graph = builder.complete()
        graph.upload(self._stream)
        start = lambda: graph.launch(self._stream)  # noqa: E731
        return GpuReplay(self, start, loaded)

    def round(self, replays: Sequence[GpuReplay]) -> list[float]:
        """All are queued before the first has ended: the GPU does not wait for the host."""
        while len(self._events) < 2 * len(replays):
            self._events.append(self._cuda.event())
        pairs = list(zip(self._events[::2], self._events[1::2], strict=False))[: len(replays)]
        for replay, (begin, end) in zip(replays, pairs, strict=True):
            begin.record(self._stream)
            replay.start()
            end.record(self._stream)
        if pairs:
            pairs[-1][1].synchronize()
        return [float(begin.elapsed_time(end)) * 1e-3 for begin, end in pairs]

    def duplicate(self, array: Any) -> Any:
        twin = self._cuda.device_array_like(array)
        twin.copy_to_device(array)
        return twin

    def wait(self) -> None:
        self._cuda.synchronize()


@dataclass(frozen=True, slots=True)
class GpuReplay:
    """What was captured for a GpuStopwatch; `start` queues it on the stopwatch's stream."""

    stopwatch: GpuStopwatch
    start: Callable[[], None]
    keeps: Any  # a graph does not own the arrays it works on

    def seconds(self) -> float:
        return self.stopwatch.round([self])[0]
