"""What a caller gets: which step a call chooses, what is stale, and what is in one loop.

The loops themselves run in `tests.results.test_on_torch`."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from results.measure import as_called
from results.measure.as_called import SWEEP, TABLED, WAYS, Way, in_loops, missing
from results.measure.bench import Bench
from results.measure.protocol import Budget
from results.record import provenance
from results.record.schema import AsCalled, Environment, Limits, Run
from tests.results.fake_stopwatch import FakeStopwatch

H200 = SimpleNamespace(name="NVIDIA H200", cc=(9, 0), sms=132)
QUICK = Budget(
    replay_seconds=1e-3, warm_seconds=0.0, seconds=0.0, min_rounds=3, max_rounds=3, slow_rounds=1
)
SIZES = {(4096, 4096), (4096, 14336), (14336, 4096)}


def is_layer(way: Way) -> bool:
    return way.api == "QuantLinear"


def test_with_the_sweep_every_m_up_to_128_is_measured_once() -> None:
    calls = [*TABLED, *SWEEP]
    assert len(set(calls)) == len(calls)
    for accuracy in ("exact", "fast"):
        way = Way("QuantLinear", accuracy, "float16", "q4_0")
        for n, k in SIZES:
            ms = {m for (m, *nk), one in calls if one == way and tuple(nk) == (n, k)}
            assert set(range(1, 129)) <= ms


def test_a_loop_is_of_one_tabled_m_or_of_neighbours_in_the_sweep() -> None:
    loops = in_loops(reversed([*TABLED, *SWEEP]))
    assert sorted(map(str, (call for loop in loops for call in loop))) == sorted(
        map(str, [*TABLED, *SWEEP])
    )
    weights = [loop[0][0][1:] for loop in loops]
    assert weights == sorted(weights), "weights are packed once"
    for loop in loops:
        ms = [size[0] for size, _ in loop]
        if ms[0] in as_called.TOKENS:
            assert set(ms) == {ms[0]}
            assert len(loop) == len(WAYS)
        else:
            assert ms == sorted(ms)
            assert len(set(ms)) <= as_called.TOGETHER
            assert not set(ms) & set(as_called.TOKENS)
    assert in_loops([]) == []


@pytest.mark.parametrize("way", [way for way in WAYS if way.format in ("q4_0", "q8_0")], ids=str)
@pytest.mark.parametrize("m", [1, 512])
def test_what_is_compiled_is_what_the_call_launches(way: Way, m: int) -> None:
    choice = way.choice((m, 4096, 4096), H200)
    assert choice.runs_on(H200.cc)
    assert (choice.reading.source, choice.writes) == (way.dtype, way.dtype), "nothing is cast"
    assert choice.kernel.accuracy in ("exact", way.accuracy)


def row(size: Any, way: Way, **changes: Any) -> AsCalled:
    m, n, k = size
    step = way.choice(size, H200).kernel.number
    call = AsCalled(
        api=way.api,
        accuracy=way.accuracy,
        dtype=way.dtype,
        format=way.format,
        M=m,
        N=n,
        K=k,
        step=step,
        us=1.0,
        p20_us=1.0,
        p80_us=1.0,
        cublas_us=1.0,
        x_cublas=1.0,
        host_us=1.0,
        torch_host_us=1.0,
        rounds=3,
        source_hash=provenance.called_hash(way.api, step),
    )
    return replace(call, **changes)


def test_only_calls_that_are_missing_or_stale_are_measured() -> None:
    four = list(TABLED[:4])
    rows = (
        row(*four[0]),
        row(*four[1], source_hash="0" * 12),
        row(*four[2], step=1),
    )
    run = Run(env=Environment(), as_called=rows)
    assert missing(four, run, H200) == four[1:]
    assert missing([], run, None) == []


def bench(watch: FakeStopwatch, say: Any = lambda _: None) -> Bench:
    return Bench(H200, watch, Limits(), QUICK, say=say)


def test_host_time_is_of_calls_and_the_queue_is_drained_outside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, order = [0.0], []

    def spent(name: str, seconds: float) -> Any:
        def run() -> None:
            order.append(name)
            clock[0] += seconds

        return run

    monkeypatch.setattr(as_called.time, "perf_counter", lambda: clock[0])
    assert as_called.host_us(spent("a", 7e-6), spent("drain", 1.0)) == pytest.approx(7.0)
    assert order == [*["drain", *"a" * as_called.DRAINED] * as_called.DRAINS, "drain"]
