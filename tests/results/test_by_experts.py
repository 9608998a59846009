"""Products of experts: one launch beside a loop of launches, a launch for each expert."""

from __future__ import annotations

import pytest

from results.measure import bench as benching
from results.measure.bench import Bench
from results.measure.by_experts import ExpertsData
from results.record.schema import Limits
from steps.checks.cases import Routing
from steps.contract import Work
from steps.driver.machines import Simulator
from steps.registry import find
from tests.results.fake_stopwatch import FakeStopwatch
from tests.results.test_by_chain import QUICK

SIZE = (8, 20, 96)
ROUTED = Routing(16, 4)


@pytest.mark.parametrize("numbers", [(18, 19), (14, 20)])
def test_one_launch_beside_a_loop_over_experts(numbers: tuple[int, int]) -> None:
    """Rows that are right, whatever the order in which a loop has them; weights of the experts
    that were chosen count as read."""
    works = [Work(find(number), "A16", "q4_0") for number in numbers]
    data = ExpertsData(SIZE[0], *SIZE[1:], "normal", 0, ROUTED)
    wanted = benching.wanted_at(works, SIZE, "float16")
    bench = Bench(Simulator(), FakeStopwatch(l2_bytes=4000), Limits(), QUICK)
    rows, peers = bench.loop(data, SIZE[0], wanted)
    assert not peers
    assert [(row.step, row.status, row.why) for row in rows] == [(n, "ok", None) for n in numbers]
    ids = data.problem("q4_0", SIZE[0], "float16").ids
    distinct = len({*ids.reshape(-1).tolist()})
    assert [row.kernel_us for row in rows] == pytest.approx([1000 * distinct, 1000])
    for row in rows:
        assert 0 < (row.nmse_same_operands or 0) < 1e-6 < (row.nmse_float or 0) < 0.02
