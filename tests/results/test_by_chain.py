"""Two products where one makes the A of the other: timed as one launch beside two."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from results.measure import bench as benching
from results.measure.bench import Bench
from results.measure.by_chain import ChainedData
from results.measure.protocol import Budget
from results.record.schema import Limits, Row
from steps.contract import Launch, Work
from steps.driver.machines import Simulator
from steps.registry import find, ladder
from tests.results.fake_stopwatch import FakeStopwatch

SIZE = (1, 20, 96)
QUICK = Budget(replay_seconds=1e-3, warm_seconds=0, seconds=1e-3, min_rounds=2, max_rounds=2)
WORKS = [Work(find(number), "A16", "q4_1") for number in (18, 21)]


def measured(machine: Simulator, **watch: Any) -> tuple[list[Row], FakeStopwatch]:
    stopwatch = FakeStopwatch(l2_bytes=4000, **watch)
    wanted = benching.wanted_at(WORKS, SIZE, None)
    rows, peers = Bench(machine, stopwatch, Limits(), QUICK).loop(
        ChainedData(1, *SIZE[1:]), 1, wanted
    )
    assert not peers
    return rows, stopwatch


def test_one_launch_beside_two_which_read_the_same_weights() -> None:
    rows, stopwatch = measured(Simulator())
    assert [(row.step, row.status, row.why) for row in rows] == [(18, "ok", None), (21, "ok", None)]
    two, one = rows
    assert (two.kernel_us, one.kernel_us) == pytest.approx((2000, 1000))
    operations = 2 * (20 * 96 + 96 * 96)
    assert one.tflops == pytest.approx(operations / 1000 * 1e-6)
    assert two.gbps == pytest.approx((one.gbps or 0) / 2)
    for row in rows:
        assert 0 < (row.nmse_same_operands or 0) < 1e-6 < (row.nmse_float or 0) < 0.05
    first, second = next(
        replay.parts[:2]
        for replays in stopwatch.rounds
        for replay in replays
        if "bulk" in replay.parts[0].kernel.__name__
    )
    assert first.args[3] is second.args[0].array, "what the first writes the second reads"


def spoil(launches: Any) -> None:
    """H of the first launch of two, which the second does not read any more."""
    first = launches[0]
    if "bulk" in first.kernel.__name__:
        first.args[3][0, 5] += 1


def test_a_wrong_first_product_is_told() -> None:
    two, one = measured(Simulator(), effect=spoil)[0]
    assert "the first of two products is wrong: " in (two.why or "")
    assert one.status == "ok"


class Early(Simulator):
    """Where H has other numbers when the second product reads it."""

    def run(self, launch: Launch) -> None:
        if launch.kernel.__name__ == "w4a16_bulk_copies" and launch.args[3].shape == SIZE[:2]:
            a = launch.args[0]
            a = replace(a, array=(a.array * 2).astype(np.float16))
            launch = replace(launch, args=(a, *launch.args[1:]))
        super().run(launch)


def test_a_wrong_second_product_is_told() -> None:
    two, one = measured(Early())[0]
    assert (two.why or "").startswith("wrong: ")
    assert one.status == "ok"


def test_the_home_of_such_a_lesson_and_no_other_shape_is_of_two_products() -> None:
    wanted = benching.matrix(ladder(), ("q4_0",))
    for size, own in benching.in_loops(wanted):
        steps = {one.work.step.number for one in own}
        chained = benching.kind_of(size, own) == "chained"
        assert chained == (21 in steps)
        if chained:
            assert (size, steps) == ((1, 28672, 4096), {18, 21})
            assert {one.work.family for one in own} == {"A16"}


def test_weights_of_both_matrices() -> None:
    """Drawn rows of W are repeated; V is another matrix; a step of one matrix gets both in turn."""
    data = ChainedData(1, 8192, 32)
    blocks = data.blocks("q4_0")
    np.testing.assert_array_equal(blocks[:4096], blocks[4096:])
    assert data.w.shape == (8192, 32)
    both = [data.packed(Work(find(number), "A16", "q4_0")).arrays for number in (18, 21)]
    assert len(both[0]) == 4
    for one, other in zip(*both, strict=True):
        np.testing.assert_array_equal(one, other)
