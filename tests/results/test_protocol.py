"""The timing protocol, on a fake device with a fake clock."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from results.measure import protocol as measure
from results.measure.protocol import Budget, Packed, Traffic
from results.record.schema import Limits, Row

MB = 1_000_000


@dataclass
class FakeLaunch:
    name: str
    seconds: float
    shared_bytes: int = 0
    kernel: Any = None
    overlap: bool = False
    effect: Callable[[], None] = lambda: None


@dataclass
class FakeReplay:
    device: FakeDevice
    parts: tuple[FakeLaunch, ...]
    how: str = "graph"

    @property
    def launches(self) -> int:
        return len(self.parts)

    def seconds(self) -> float:
        return self.device.run_all(self.parts)


@dataclass
class FakeDevice:
    """Both a machine and a stopwatch; `log` has every launch that ran, in order.

    A launch that may overlap takes 2 us less.
    """

    cc: tuple[int, int] | None = (9, 0)
    l2_bytes: int = 50 * MB
    noise: Callable[[], float] = lambda: 1.0
    log: list[str] = field(default_factory=list)
    copies: int = 0

    def run_all(self, launches: Sequence[FakeLaunch]) -> float:
        for launch in launches:
            self.log.append(launch.name)
            launch.effect()
        times = (launch.seconds - 2e-6 * launch.overlap for launch in launches)
        return sum(times) * self.noise()

    def capture(self, launches):
        return FakeReplay(self, tuple(launches))

    def issue(self, launch):
        self.run_all([launch])
        return 12e-6

    def issue_and_wait(self, launch):
        return self.issue(launch), launch.seconds

    def duplicate(self, array):
        self.copies += 1
        return array.copy()

    def wait(self):
        pass

    def sm_mhz(self, replay):
        return 1980.0

    def array(self, host):
        return host.copy()

    def host(self, array):
        return array.copy()

    def run(self, launch):
        self.run_all([launch])


def slot_work(seconds: float):
    return lambda slot: (FakeLaunch(f"slot{slot}", seconds),)


def test_rotation_fills_at_least_twice_the_l2():
    for weight_bytes in (1, 300_000, 9_437_184, 33 * MB, 500 * MB):
        slots = measure.slots_for(weight_bytes, 50 * MB)
        assert slots * weight_bytes >= 2 * 50 * MB
    assert measure.slots_for(500 * MB, 50 * MB) == 1


@pytest.mark.parametrize("slots", [1, 2, 7, 22, 600])
@pytest.mark.parametrize("wanted", [1, 3, 7, 100, 10**6])
def test_every_copy_is_read_before_any_is_read_again(slots, wanted):
    plan = measure.turns(slots, wanted)
    used = [repetition % slots for turn in plan for repetition in turn]
    assert used == [i % slots for i in range(len(used))]
    assert len(used) % slots == 0
    assert all(1 <= len(turn) <= measure.MAX_LAUNCHES for turn in plan)


def test_a_steady_kernel_stops_early_and_a_noisy_one_uses_its_time():
    steady = FakeDevice()
    timing, _ = measure.sample(steady, slot_work(20e-6), 22, seconds=1.0)
    assert timing.us == pytest.approx(20.0)
    assert timing.samples == Budget().settled_samples
    assert timing.how == "graph"

    rng = random.Random(0)
    noisy = FakeDevice(noise=lambda: rng.choice([0.5, 1.5]))
    timing, _ = measure.sample(noisy, slot_work(20e-6), 22, seconds=0.2)
    assert timing.samples > 2 * Budget().settled_samples
    assert timing.p20_us < 20 < timing.p80_us


def test_one_slow_outlier_does_not_move_the_median():
    calls = itertools.count()
    device = FakeDevice(noise=lambda: 100.0 if next(calls) == 30 else 1.0)
    timing, _ = measure.sample(device, slot_work(1e-3), 5, seconds=0.2)
    assert timing.us == pytest.approx(1000.0)


def test_a_slow_kernel_takes_one_warm_up_and_three_samples():
    device = FakeDevice()
    timing, _ = measure.sample(device, slot_work(0.8), 22, seconds=0.2, once=0.8)
    assert timing.samples == 3
    assert device.log == ["slot0", "slot1", "slot2"]  # the warm-up was the launch that gave `once`


def test_a_sample_of_a_short_kernel_lasts_milliseconds():
    device = FakeDevice()
    _, replay = measure.sample(device, slot_work(7e-6), 22, seconds=0.05)
    assert replay.seconds() > 2e-3
    assert replay.launches % 22 == 0


def test_the_number_of_samples_is_bounded():
    rng = random.Random(1)
    device = FakeDevice(noise=lambda: rng.uniform(0.1, 2.0))
    timing, _ = measure.sample(device, slot_work(5e-6), 1, seconds=1e9)
    assert timing.samples == Budget().max_samples


def test_budget_scales():
    assert Budget().scaled(0.5).kernel_seconds == Budget().kernel_seconds / 2
    assert Budget().scaled(0.5).min_samples == Budget().min_samples


# ------------------------------------------------------------------------------------------- limits


def test_floor_is_the_larger_of_traffic_and_arithmetic():
    limits = Limits(copy_tbps=4.0, read_tbps=4.2, tops={"fp32": 60.0})
    assert measure.floor_us(60 * 10**6, "fp32", 0, limits) == pytest.approx(1.0)
    assert measure.floor_us(60, "fp32", 42 * MB, limits) == pytest.approx(10.0)
    assert measure.floor_us(60 * 10**6, "unmeasured", 0, Limits()) is None


def test_only_what_cannot_come_from_the_l2_counts():
    assert Traffic(weights=10, activations=20, out=40).from_dram(l2_bytes=50) == 20
    assert Traffic(weights=10, activations=2, out=3).from_dram(l2_bytes=50) == 10


def test_faster_than_the_machine_is_a_sentence():
    assert measure.impossible(10.0, None) is None
    assert measure.impossible(9.8, 10.0) is None  # within what a limit is known to
    why = measure.impossible(5.0, 10.0)
    assert why is not None
    assert "5 us is less than the 10 us" in why


# --------------------------------------------------------------------------------------- whole rows


@dataclass
class FakeVerdict:
    ok: bool
    verdict: str = "as it should be"
    nmse_same_operands: float | None = 1e-13
    nmse_float: float | None = 7e-3


@dataclass
class FakeActivations:
    arrays: tuple
    launches: tuple = ()


def row() -> Row:
    return Row(
        step=4,
        name="step04",
        scheme="W4A8",
        format="q4_0",
        M=16,
        N=64,
        K=1024,
        unit="fp32",
        status="failed",
        why="not run",
    )


def measured(
    device: FakeDevice,
    *,
    seconds: float = 30e-6,
    activation: bool = True,
    overlap: bool = False,
    breaks_after: int | None = None,
    limits: Limits | None = None,
    weight_bytes: int = 10 * MB,
):
    """Run measure.measure on the fake device; returns the row and the outputs that were checked."""
    seen: list[np.ndarray] = []
    launched = itertools.count()

    def launch(weights, arrays, out):
        def effect():
            out[...] = 2.0 if breaks_after is not None and next(launched) >= breaks_after else 1.0

        return FakeLaunch("kernel", seconds, overlap=overlap, effect=effect)

    def check(c, inputs):
        seen.append(c)
        return FakeVerdict(bool((c == 1.0).all()), f"largest value {c.max()}")

    quantize = FakeLaunch("activation", 5e-6)
    inputs = FakeActivations((np.zeros(16 * 1024, np.int8),), (quantize,) if activation else ())
    result = measure.measure(
        row(),
        machine=device,
        stopwatch=device,
        packed=Packed((np.zeros(weight_bytes, np.uint8),), pack_us=123.0),
        activations=lambda: inputs,
        launch=launch,
        check=check,
        limits=limits,
    )
    return result, seen


def test_a_row_is_checked_timed_and_checked_again():
    device = FakeDevice()
    result, seen = measured(device)
    assert result.status == "ok"
    assert result.why is None
    assert len(seen) == 2
    assert device.copies == 19 + 1  # with the original 20 x 10 MB = 4 x the L2; and one output
    assert result.kernel_us == pytest.approx(30.0)
    assert result.activation_us == pytest.approx(5.0)
    assert result.total_us == pytest.approx(35.0)
    assert result.launch_us == pytest.approx(12.0)
    assert result.pack_us == 123.0
    assert result.sm_mhz == 1980.0
    assert result.samples is not None
    assert result.samples >= 3
    assert result.tflops == pytest.approx(2 * 16 * 64 * 1024 / 30.0 * 1e-6)
    traffic = 10 * MB + 16 * 1024 + 4 * 16 * 64
    assert result.gbps == pytest.approx(traffic / 30.0 * 1e-3)
    assert result.limit_share is None


def test_without_an_activation_pass_the_total_is_the_kernel():
    result, _ = measured(FakeDevice(), activation=False)
    assert result.activation_us == 0.0
    assert result.total_us == result.kernel_us


def test_a_kernel_alone_overlaps_nothing_a_total_within_itself_and_a_chain_all_along():
    result, _ = measured(FakeDevice(), overlap=True)
    assert result.kernel_us == pytest.approx(30.0)
    assert result.activation_us == pytest.approx(5.0)
    assert result.total_us == pytest.approx(33.0)  # the kernel begins under the activation pass
    assert result.chain_us == pytest.approx(31.0)  # ... which begins under the kernel before


def test_without_an_activation_pass_only_the_chain_overlaps():
    result, _ = measured(FakeDevice(), overlap=True, activation=False)
    assert result.kernel_us == result.total_us == pytest.approx(30.0)
    assert result.chain_us == pytest.approx(28.0)


@pytest.mark.parametrize(("overlap", "cc"), [(False, (9, 0)), (True, (8, 9)), (True, None)])
def test_no_chain_where_nothing_overlaps(overlap, cc):
    result, _ = measured(FakeDevice(cc=cc), overlap=overlap)
    assert result.status == "ok"
    assert result.chain_us is None


def test_a_chain_faster_than_the_machine_is_no_record():
    limits = Limits(copy_tbps=10 / 30.0, read_tbps=10 / 30.0)  # 10 MB in 30 us
    assert measured(FakeDevice(), limits=limits)[0].status == "ok"
    result, _ = measured(FakeDevice(), limits=limits, overlap=True, activation=False)
    assert result.status == "failed"
    assert "28 us is less than the 30 us" in (result.why or "")


def test_a_slow_row_runs_few_launches():
    device = FakeDevice()
    result, _ = measured(device, seconds=1.0)
    assert result.status == "ok"
    assert result.samples == 3
    assert device.log.count("kernel") == 5  # check and warm-up in one, three samples, total


def test_rows_of_one_packing_share_its_copies():
    device, packed = FakeDevice(), Packed((np.zeros(10 * MB, np.uint8),), pack_us=1.0)
    copies = packed.copies(device, device)
    assert len(copies) == 20
    assert packed.copies(device, device) is copies
    assert device.copies == 19


def test_a_wrong_output_is_never_timed():
    device = FakeDevice()
    result, seen = measured(device, breaks_after=0)
    assert result.status == "failed"
    assert result.why == "largest value 2.0"
    assert result.kernel_us is None
    assert result.nmse_float == 7e-3
    assert len(seen) == 1
    assert device.log.count("kernel") == 1


def test_an_output_that_goes_wrong_while_timed_is_found():
    result, seen = measured(FakeDevice(), breaks_after=40)
    assert result.status == "failed"
    assert "right before timing, wrong after" in (result.why or "")
    assert len(seen) == 2


def test_timed_launches_that_write_nothing_are_found():
    device = FakeDevice()

    def launch(weights, arrays, out):
        first = not device.log

        def effect():
            if first:
                out[...] = 1.0

        return FakeLaunch("kernel", 30e-6, effect=effect)

    verdicts = []

    def check(c, inputs):
        verdicts.append(FakeVerdict(not np.isnan(c).any(), "NaN"))
        return verdicts[-1]

    result = measure.measure(
        row(),
        machine=device,
        stopwatch=device,
        packed=Packed((np.zeros(10 * MB, np.uint8),), pack_us=1.0),
        activations=lambda: FakeActivations((np.zeros(4),)),
        launch=launch,
        check=check,
    )
    assert [v.ok for v in verdicts] == [True, False]
    assert result.status == "failed"


def test_a_row_above_the_machines_limit_is_failed_and_keeps_its_figures():
    result, _ = measured(FakeDevice(), limits=Limits(copy_tbps=0.2, tops={"fp32": 60.0}))
    assert result.status == "failed"
    assert "less than" in (result.why or "")
    assert result.kernel_us == pytest.approx(30.0)
    assert result.limit_share == pytest.approx(50 / 30)
    fine, _ = measured(FakeDevice(), limits=Limits(copy_tbps=4.0, tops={"fp32": 60.0}))
    assert fine.status == "ok"
    assert fine.limit_share == pytest.approx(2.5 / 30)


def test_resources_of_a_dispatcher_and_of_something_else():
    class Kernel:
        def get_regs_per_thread(self):
            return {("int32",): 40, ("int64",): 48}

        def get_local_mem_per_thread(self):
            return {("int32",): 0}

        def get_shared_mem_per_block(self):
            return {("int32",): 1024}

    assert measure.resources(FakeLaunch("k", 0.0, shared_bytes=256, kernel=Kernel())) == {
        "registers": 48,
        "spill_bytes": 0,
        "smem_bytes": 1280,
    }
    assert set(measure.resources(FakeLaunch("k", 0.0)).values()) == {None}


def test_interleaving_pairs_the_steps_and_favours_neither_end():
    order = list(measure.interleaved(["q4_0", "q8_0"], [1, 2, 3]))
    assert order == [
        ("q4_0", 1),
        ("q4_0", 2),
        ("q4_0", 3),
        ("q8_0", 3),
        ("q8_0", 2),
        ("q8_0", 1),
    ]


def test_packing_is_timed_on_the_host():
    class Step:
        @staticmethod
        def pack(blocks):
            return (blocks * 2, blocks[:1])

    packed = measure.pack_weights(Step, np.arange(4))
    assert packed.nbytes == 5 * 8
    assert 0 < packed.pack_us < math.inf


class SimulatorStopwatch(FakeDevice):
    """Runs a real step's launches in the simulator, on an invented clock."""

    def __init__(self):
        from steps.api.machines import Simulator

        super().__init__(l2_bytes=2000)
        self.machine = Simulator()

    def run_all(self, launches):
        for launch in launches:
            self.machine.run(launch)
        return len(launches) * 0.1  # slow, so that few launches are simulated

    def issue_and_wait(self, launch):
        return self.issue(launch), 0.1

    def array(self, host):
        return self.machine.array(host)

    def empty(self, shape, dtype):
        return self.machine.empty(shape, dtype)


@pytest.mark.parametrize(
    ("number", "family", "output"),
    [(1, "A16", "float32"), (2, "A8", "float32"), (11, "A16", "float32"), (11, "A16", "float16")],
)
def test_a_real_step_goes_through_the_protocol(number, family, output):
    import steps
    from reference import Problem, check

    step, problem = steps.find(number), Problem(3, 5, 64, "q5_1")
    device = SimulatorStopwatch()
    result = measure.measure_step(
        step,
        family,
        "q5_1",
        device.array(problem.a),
        problem.n,
        machine=device,
        stopwatch=device,
        packed=measure.pack_weights(step, problem.blocks),
        check=lambda c, given: check(c, problem, family, given),
        dtype=output,
    )
    assert result.status == "ok", result.why
    assert result.output == output
    assert result.scheme == f"W5{family}"
    assert result.parent == step.parents.get(family)
    assert result.source_hash
    assert result.samples == 3
    assert result.nmse_same_operands is not None
    assert result.nmse_float is not None
    least, most = (0, 1e-9) if number < 11 else (1e-9, 1e-6)
    assert least <= result.nmse_same_operands < most < result.nmse_float < 1e-2


def test_a_step_that_cannot_is_unsupported_with_its_reason():
    import steps

    device = SimulatorStopwatch()
    result = measure.measure_step(
        steps.find(1),
        "A8",
        "q4_0",
        np.zeros((1, 32), np.float32),
        1,
        machine=device,
        stopwatch=device,
        packed=Packed((), 0.0),
        check=lambda c, q81: FakeVerdict(True),
    )
    assert result.status == "unsupported"
    assert "not A8" in (result.why or "")
    assert device.log == []


@pytest.mark.gpu
def test_the_protocol_on_this_gpu():
    """A real step, captured in a graph, rotated, checked before and after."""
    from steps.api.machines import Gpu
    from steps.contract import why_no_gpu

    if reason := why_no_gpu():
        pytest.skip(reason)
    import steps
    from reference import Problem, check

    machine, stopwatch = Gpu(), measure.GpuStopwatch()
    for number, family in ((1, "A16"), (2, "A8")):
        step, problem = steps.find(number), Problem(16, 1024, 2048, "q4_1")
        result = measure.measure_step(
            step,
            family,
            "q4_1",
            machine.array(problem.a),
            problem.n,
            machine=machine,
            stopwatch=stopwatch,
            packed=measure.pack_weights(step, problem.blocks),
            check=lambda c, q81, p=problem, f=family: check(c, p, f, q81),
        )
        assert result.status == "ok", result.why
        assert result.timing == "graph", stopwatch.why_no_graph
        assert result.kernel_us is not None
        assert result.total_us is not None
        assert result.launch_us is not None
        assert 0 < result.kernel_us <= result.total_us * 1.02
        assert 0.5 < result.launch_us < 1000
        assert result.registers is not None
