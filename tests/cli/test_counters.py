"""The command `counters`: which launches, and what Nsight Compute printed of them."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from results.measure.bench import Wanted
from results.record.schema import Environment, Git
from steps.cli import counters, tools
from steps.cli.main import main
from steps.contract import Work
from steps.driver.machines import Simulator
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


class Noting(Simulator):
    """A GPU that says what it launched."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    def run(self, launch: Any) -> None:
        self.ran.append(launch.kernel.__name__)
        super().run(launch)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Noting:
    made = Noting()
    for command in (counters, tools):
        monkeypatch.setattr(command, "machines", lambda _: ("A GPU", lambda _: made, None))
    monkeypatch.setattr(counters, "compile_ahead", lambda *_: 0)
    monkeypatch.setattr(tools, "find_tool", lambda name: f"/opt/{name}")
    return made


SMALL = ["--format", "q5_1", "--m", "2", "--n", "3", "--k", "64"]


def test_a_step_is_launched_once_for_a_profiler(
    gpu: Noting, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """As `profile` has it started, by the command line that it makes."""
    commands: list[list[str]] = []
    monkeypatch.setattr(tools, "_run", lambda command, hint: commands.append(command) or 0)
    assert main(["profile", "5", *SMALL]) == 0
    ((tool, *rest),) = commands
    assert tool == "/opt/ncu"
    assert "regex:w4a8_vectorized" in rest
    assert main(rest[rest.index("launch") :]) == 0
    assert gpu.ran == ["q8_1_k_outermost", "w4a8_vectorized"]
    assert capsys.readouterr().out == "launched step 5 W5A8 q5_1 at M=2 N=3 K=64\n"


def test_counters_are_written_a_line_for_each_launch(
    gpu: Noting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    asked = [Wanted(Work(find(n), find(n).families[-1], "q4_0"), (2, 3, 64)) for n in (1, 2)]
    monkeypatch.setattr(counters, "launched", lambda *_: asked)
    status = [0, 1]

    def ncu(command: list[str], **_: Any) -> Any:
        """It starts the command line again, which launches them."""
        assert main(command[command.index("counters") :]) == 0
        text = printed(*({counters.ACTIVE: "5", counters.ELAPSED: "10"} for _ in asked))
        return SimpleNamespace(returncode=status.pop(0), stdout=text)

    monkeypatch.setattr(counters.subprocess, "run", ncu)
    monkeypatch.setattr(counters, "environment", lambda: Environment(gpu="H9", git=Git(sha="abc")))
    out = tmp_path / "new" / "ncu.json"
    assert main(["counters", "1", "2", "--out", str(out)]) == 0
    assert gpu.ran == ["w4a16_naive", "q8_1_blocks", "w4a8_naive"]
    found = json.loads(out.read_text())
    assert (found["gpu"], found["commit"]) == ("H9", "abc")
    assert [one["step"] for one in found["kernels"]] == [1, 2]
    assert all(one["sm_cycles_active_of_elapsed"] == 0.5 for one in found["kernels"])
    assert len([line for line in out.read_text().splitlines() if '"step"' in line]) == 2
    assert "does not count gpu__time_duration.sum" in capsys.readouterr().err
    assert main(["counters", "1", "2", "--out", str(out)]) == 1
    assert "NVreg_RestrictProfilingToAdminUsers" in capsys.readouterr().err
