"""What a time may be at least, the rotation of weights, and a GPU's stopwatch."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from results.measure import protocol
from results.measure.loop import Contestant, round_robin
from results.measure.protocol import Budget
from results.record.schema import Limits

MB = 1_000_000


def test_rotation_fills_four_times_the_l2() -> None:
    for weight_bytes in (1, 300_000, 9_437_184, 33 * MB, 500 * MB):
        slots = protocol.slots_for(weight_bytes, 50 * MB)
        assert slots * weight_bytes >= 4 * 50 * MB
        assert slots == 1 or (slots - 1) * weight_bytes < 4 * 50 * MB
    assert protocol.slots_for(500 * MB, 50 * MB) == 1


def test_floor_is_the_larger_of_traffic_and_arithmetic() -> None:
    """Of the traffic what cannot come from the L2 counts."""
    limits = Limits(copy_tbps=4.0, read_tbps=4.2, tops={"fp32": 60.0})
    assert protocol.floor_us(60 * 10**6, "fp32", 0, 0, 0, limits) == pytest.approx(1.0)
    assert protocol.floor_us(60, "fp32", 32 * MB, 60 * MB, 50 * MB, limits) == pytest.approx(10.0)
    assert protocol.floor_us(60, "fp32", 42 * MB, 5 * MB, 50 * MB, limits) == pytest.approx(10.0)
    assert protocol.floor_us(60 * 10**6, "unmeasured", 0, 0, 0, Limits()) is None


def test_faster_than_the_machine_is_a_sentence() -> None:
    assert protocol.impossible(10.0, None) is None
    assert protocol.impossible(9.8, 10.0) is None  # within what a limit is known to
    least = 10.0 / protocol.TOLERANCE
    assert protocol.impossible(least + 1e-6, 10.0) is None
    assert protocol.impossible(least - 1e-6, 10.0) is not None
    assert least > 9.5
    why = protocol.impossible(5.0, 10.0)
    assert why is not None
    assert "5 us is less than the 10 us" in why


class Device:
    """A stream and its events, by what is queued; nothing has happened until one is waited for."""

    def __init__(self) -> None:
        self.queued: list[str] = []
        self.log: list[str] = []
        self.now = 0.0

    def event(self) -> Event:
        return Event(self)

    def stopwatch(self) -> protocol.GpuStopwatch:
        made = object.__new__(protocol.GpuStopwatch)
        made._cuda, made._stream, made._events = self, "stream", []
        return made


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.at = device, 0.0

    def record(self, stream: str) -> None:
        assert stream == "stream"
        self.device.log.append("event")
        self.at = self.device.now

    def synchronize(self) -> None:
        self.device.log.append("wait")

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


def test_a_round_is_queued_whole_before_it_is_waited_for() -> None:
    device = Device()
    stopwatch = device.stopwatch()

    def replay(name: str, ms: float) -> protocol.GpuReplay:
        def start() -> None:
            device.log.append(name)
            device.now += ms

        return protocol.GpuReplay(stopwatch, start, None)

    replays = [replay("a", 2.0), replay("b", 0.5), replay("c", 1.0)]
    assert stopwatch.round(replays) == pytest.approx([2e-3, 0.5e-3, 1e-3])
    assert device.log == [
        *("event", "a", "event", "event", "b", "event", "event", "c", "event"),
        "wait",
    ]
    device.log.clear()
    assert stopwatch.round(replays[:1]) == pytest.approx([2e-3]), "events are used again"
    assert device.log == ["event", "a", "event", "wait"]
    assert stopwatch.round([]) == []


def test_a_graph_is_captured_when_its_operands_are_there() -> None:
    """They are made on another stream, and loading waits for the GPU, which a capture forbids."""
    log: list[str] = []

    class Builder:
        def begin_building(self) -> None:
            log.append("begin")

        def end_building(self) -> None:
            log.append("end")

        def complete(self) -> SimpleNamespace:
            return SimpleNamespace(
                upload=lambda stream: log.append(f"upload to {stream}"),
                launch=lambda stream: log.append(f"replay on {stream}"),
            )

    def load(launch: str) -> Callable[[Builder], None]:
        log.append(f"load {launch}")
        return lambda builder: log.append(launch)

    stopwatch = Device().stopwatch()
    stopwatch._cuda = SimpleNamespace(synchronize=lambda: log.append("wait"))
    stopwatch._device, stopwatch._load = SimpleNamespace(create_graph_builder=Builder), load
    a, b = "a", "b"
    stopwatch.capture([a, b, a]).start()
    assert log == [
        *("wait", "load a", "load b", "begin", "a", "b", "a", "end"),
        *("upload to stream", "replay on stream"),
    ]


def test_calls_of_torch_are_captured_apart_and_replayed_on_the_stopwatchs_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from results.measure import torch_graphs

    log: list[str] = []
    current = ["default"]

    @contextmanager
    def on(stream: str) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    class Graph:
        def capture_begin(self, capture_error_mode: str) -> None:
            assert not gc.isenabled(), "nothing is freed within a capture"
            log.append(f"begin {capture_error_mode} on {current[-1]}")

        def capture_end(self) -> None:
            log.append("end")

        def replay(self) -> None:
            log.append(f"replay on {current[-1]}")

    cuda = SimpleNamespace(
        CUDAGraph=Graph,
        ExternalStream=lambda handle: f"stream {handle}",
        Stream=lambda: "side",
        stream=on,
        synchronize=lambda: log.append("wait"),
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))  # type: ignore[arg-type]
    torch_graphs._side_stream.cache_clear()
    captures = torch_graphs.TorchCaptures(SimpleNamespace(stream=7))  # type: ignore[arg-type]

    def call() -> str:
        log.append(f"call on {current[-1]}")
        return "result"

    assert captures.warm_up(call, 2) == "result"
    replay = captures.capture([call, call])
    replay.start()
    torch_graphs._side_stream.cache_clear()
    assert log == [
        *("wait", "call on side", "call on side", "wait"),
        *("wait", "begin relaxed on side", "call on side", "call on side", "end"),
        "replay on stream 7",
    ]
    assert gc.isenabled()


def gpu() -> protocol.GpuStopwatch:
    from steps.contract import why_no_gpu

    if reason := why_no_gpu():
        pytest.skip(reason)
    return protocol.GpuStopwatch()


@pytest.mark.gpu
@pytest.mark.alone
def test_a_round_on_this_gpu_times_each_graph_by_itself() -> None:
    """Two lengths of one loop take turns, in graphs that are queued together. A GPU with other
    processes gives each a turn of its own, which either graph may meet."""
    from results.measure import limits
    from steps.driver.machines import Gpu

    stopwatch, machine = gpu(), Gpu()
    (fp32,) = (ceiling for ceiling in limits.CEILINGS if ceiling.unit == "fp32")
    seeds = machine.array(limits.seeds_for(fp32))
    out = machine.empty((limits.THREADS * 1024,), np.float32)
    short, long = (limits.launch_of(fp32, seeds, out, 1024, rounds) for rounds in (64, 256))
    budget = replace(Budget(), warm_seconds=0.05, seconds=0.1, min_rounds=5)
    both = [Contestant(stopwatch, lambda _, la=la: (la,), 1, budget) for la in (short, long)]
    round_robin(stopwatch, both, budget)
    assert 2.5 < both[1].timing.us / both[0].timing.us < 4.5


@pytest.mark.gpu
def test_a_bench_on_this_gpu() -> None:
    """Real steps, captured in graphs, rotated, checked before and after; cuBLAS where torch is."""
    from results.measure.bench import Bench, in_loops, measure_loops, wanted_at
    from steps import find
    from steps.contract import Work

    gpu()
    budget = replace(Budget(), warm_seconds=0.05, seconds=0.2, min_rounds=5)
    bench = Bench.here(budget)
    works = [Work(find(1), "A16", "q4_1"), Work(find(2), "A8", "q4_1"), Work(find(6), "A8", "q8_0")]
    ((rows, peers),) = measure_loops(bench, in_loops(wanted_at(works, (16, 1024, 2048), None)))
    assert [row.status for row in rows] == ["ok"] * 3, [row.why for row in rows]
    for row in rows:
        assert row.kernel_us is not None
        assert row.total_us is not None
        assert 0 < row.kernel_us <= row.total_us * 1.05
        assert row.registers is not None
        assert (row.x_cublas is not None) == bench.torch
    assert len(peers) == bench.torch
