"""The command `counters`: which launches, and what Nsight Compute printed of them."""

from __future__ import annotations

import json
from argparse import Namespace

import pytest

from results.measure.bench import Wanted
from steps.cli import counters
from steps.contract import Work
from steps.registry import find

CC = (9, 0)


def wanted(*numbers: int) -> list[Wanted]:
    asked = Namespace(steps=[str(number) for number in numbers], format=[])
    return counters.launched(asked, CC)


def printed(*launches: dict[str, str]) -> str:
    """As ncu prints them: what it says of itself, names, units, and a line for each launch."""
    names = ["ID", "Kernel Name", *{name: None for each in launches for name in each}]
    lines = ["==PROF== Connected to process 7", ",".join(f'"{name}"' for name in names)]
    lines.append(",".join('""' if i < 2 else '"unit"' for i, _ in enumerate(names)))
    for i, each in enumerate(launches):
        own = {"ID": str(i), "Kernel Name": "step06_dp4a::w4a8_dp4a[abi](Array<float>)", **each}
        lines.append(",".join(f'"{own.get(name, "")}"' for name in names))
    return "\n".join(lines) + "\n"


def test_each_step_is_launched_at_home_once() -> None:
    for number in (6, 9, 12):
        step = find(number)
        found = wanted(number)
        assert {one.size for one in found} >= set(step.home_shapes)
        assert len({one.size for one in found}) == len(found), "no shape twice"
        assert {one.input for one in found} == {"float16" if number == 12 else "float32"}
        assert {one.work.format for one in found} == {"q4_0"}


def test_the_kernel_is_named_and_not_its_pass() -> None:
    assert counters.names(wanted(6, 12)) == ["w4a16_wgmma", "w4a8_dp4a"]


def test_figures_of_launches() -> None:
    one = Wanted(Work(find(6), "A8", "q4_0"), (512, 4096, 4096))
    text = printed(
        {
            "gpu__time_duration.sum": "221,312",
            "sm__cycles_elapsed.avg.per_second": "1,974,900,000.5",
            "smsp__inst_executed.sum": "1,579,776",
            counters.ACTIVE: "900",
            counters.ELAPSED: "1,000",
            "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio": "0.881",
            "smsp__average_warps_issue_stalled_sleeping_per_issue_active.ratio": "0.04",
            "dram__throughput.avg.pct_of_peak_sustained_elapsed": "n/a",
        }
    )
    assert counters.figures(text, [one]) == [
        {
            "step": 6,
            "family": "A8",
            "format": "q4_0",
            "M": 512,
            "N": 4096,
            "K": 4096,
            "output": "float32",
            "kernel": "w4a8_dp4a",
            "duration_us": 221.31,
            "sm_mhz": 1974.9,
            "instructions": 1579776,
            "sm_cycles_active_of_elapsed": 0.9,
            "stall_wait_warps_per_issue": 0.88,
        }
    ]
    with pytest.raises(ValueError, match="ncu saw 1 launches of 2"):
        counters.figures(text, [one, one])


def test_metrics_that_have_no_value_are_named() -> None:
    """One that some launch has is counted."""
    every = dict.fromkeys(counters.METRICS, 0)
    some = {name: 0 for name in counters.METRICS if name not in ("l2_bytes", "dram_bytes")}
    assert counters.uncounted([some, every]) == []
    assert counters.uncounted([some, some]) == ["dram__bytes.sum", "lts__t_bytes.sum"]


def test_the_file_has_a_line_for_each_launch() -> None:
    text = counters.to_json("A GPU", "abc", [{"step": 1, "M": 2}, {"step": 3, "M": 4}])
    assert json.loads(text)["kernels"] == [{"step": 1, "M": 2}, {"step": 3, "M": 4}]
    assert json.loads(text)["commit"] == "abc"
    assert '  {"step": 1, "M": 2},\n' in text
