"""The table of the fastest steps: which entry counts, what a file may hold, and who is chosen."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from results.record import schema as record
from results.record.schema import Environment
from steps import find
from steps.api import tuning_table as tuning
from steps.api.machines import Simulator
from steps.api.tuning_table import Entry, Tuning, TuningError
from steps.contract import why_no_gpu

SIZES = ((4096, 4096), (4096, 14336), (14336, 4096))


def entry(m: int, n: int = 4096, k: int = 4096, name: str = "q4_0", **times: float) -> Entry:
    """An entry with the times of steps: s5A8=12.0 is step 5 in family A8."""
    named = {key[1:].replace("A", " A"): us for key, us in times.items()}
    return Entry(name, n, k, m, named or {"1 A16": 100.0})


def table(*entries: Entry, gpu: str = "NVIDIA H200", cc: Any = (9, 0), sms: int = 132) -> Tuning:
    return Tuning(Environment(gpu=gpu, cc=cc, sms=sms), entries)


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch):
    """Sets the tables that are known."""

    def known(*tables: Tuning) -> None:
        monkeypatch.setattr(tuning, "known", lambda: tables)

    known()
    return known


# --- which entry counts ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("m", "counts"),
    [(1, 1), (2, 2), (3, 4), (9, 16), (16, 16), (17, 32), (513, 1024), (1025, 4096), (9999, 4096)],
)
def test_the_next_m_upwards_counts_and_above_the_last_the_last(m: int, counts: int) -> None:
    full = table(*(entry(tokens) for tokens in reversed(tuning.TOKENS)))
    found = full.entry("q4_0", m, 4096, 4096)
    assert found is not None
    assert found.m == counts


@pytest.mark.parametrize(
    ("size", "counts"),
    [
        ((4096, 4096), (4096, 4096)),
        ((1, 32), (4096, 4096)),
        ((4096, 11008), (4096, 14336)),
        ((11008, 4096), (14336, 4096)),
        ((28672, 8192), (14336, 4096)),
        ((8192, 28672), (4096, 14336)),
        ((5120, 5120), (4096, 4096)),
    ],
)
def test_the_nearest_n_and_k_count(size: tuple[int, int], counts: tuple[int, int]) -> None:
    full = table(*(entry(1, n, k) for n, k in SIZES))
    found = full.entry("q4_0", 1, *size)
    assert found is not None
    assert (found.n, found.k) == counts


def test_n_and_k_count_before_m_and_only_in_the_same_format() -> None:
    sparse = table(entry(16), entry(1, 14336, 4096), entry(4, 4096, 4096, "q8_0"))
    found = sparse.entry("q4_0", 1, 4096, 4096)
    assert found is not None
    assert found.m == 16
    assert sparse.entry("q5_1", 1, 4096, 4096) is None


def test_the_nearest_gpu_is_this_one_or_one_like_it() -> None:
    own = table(gpu="NVIDIA H200", sms=132)
    half = table(gpu="NVIDIA H100 PCIe", sms=114)
    other = table(gpu="NVIDIA L4", cc=(8, 9), sms=58)
    tables = (half, other, own)
    assert tuning.nearest(tables, "NVIDIA H200", (9, 0), 132) is own
    assert tuning.nearest(tables, "NVIDIA GH200", (9, 0), 130) is own
    assert tuning.nearest(tables, "NVIDIA H20", (9, 0), 78) is half
    assert tuning.nearest(tables, "NVIDIA L4", (8, 9), 58) is other
    assert tuning.nearest(tables, "NVIDIA A100", (8, 0), 108) is None
    assert tuning.nearest((), "NVIDIA A100", (8, 0), 108) is None


# --- the file -------------------------------------------------------------------------------------


def test_a_table_is_read_as_it_was_written_sorted_and_a_line_an_entry(tmp_path: Path) -> None:
    entries = (entry(16, s10A8=4.1, s3A16=300.0, s3A8=290.0), entry(1, s10A8=3.7512345))
    path = tuning.write(table(*entries), tmp_path)
    assert path == tmp_path / "nvidia-h200" / "tuning.json"
    assert not list(path.parent.glob("*.tmp"))
    text = path.read_text()
    lines = [json.loads(line.strip(" ,")) for line in text.splitlines() if '"us"' in line]
    assert [line["M"] for line in lines] == [1, 16]
    assert list(lines[1]["us"]) == ["3 A16", "3 A8", "10 A8"]
    assert lines[0]["us"] == {"10 A8": 3.751}
    read = tuning.read(path)
    assert (read.gpu, read.env.cc, read.env.sms) == ("NVIDIA H200", (9, 0), 132)
    assert read.entries[1] == entries[0]
    assert tuning.to_json(read) == text
    assert record.runs(tmp_path) == [], "a table is not a run"


def test_a_step_tuned_again_replaces_its_own_times_alone(tmp_path: Path) -> None:
    tuning.write(table(entry(1, s5A8=20.0, s6A8=15.0), entry(2, s5A8=21.0)), tmp_path)
    again = tuning.write(table(entry(1, s6A8=14.0, s7A8=9.0), entry(4, s7A8=9.5)), tmp_path)
    assert tuning.read(again).entries == (
        entry(1, s5A8=20.0, s6A8=14.0, s7A8=9.0),
        entry(4, s7A8=9.5),
    ), "where step 7 was not measured nobody knows who is fastest"
    least = tuning.write(table(entry(4, s3A8=90.0), entry(8, s3A8=99.0)), tmp_path)
    assert tuning.read(least).entries == (
        entry(1, s5A8=20.0, s6A8=14.0, s7A8=9.0),
        entry(4, s3A8=90.0, s7A8=9.5),
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data.update(schema=99), "schema is 99"),
        (lambda data: data.pop("rows"), "no 'rows'"),
        (lambda data: data["rows"][0].pop("us"), "no 'us'"),
        (lambda data: data["rows"][0]["us"].update({"5 A8": -1}), "not positive at M=1 N=4096"),
        (lambda data: data["rows"][0].update(M=0), "not positive"),
        (lambda data: data["env"].update(cc="9.0"), "env.cc is '9.0'"),
    ],
)
def test_a_file_that_is_no_table_is_named(change, said: str, tmp_path: Path) -> None:
    path = tuning.write(table(entry(1, s5A8=20.0)), tmp_path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(TuningError, match=said) as refused:
        tuning.read(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "tuning.json").write_text("not JSON")
    with pytest.raises(TuningError, match="is not a tuning table"):
        tuning.read(tmp_path / "tuning.json")


def test_committed_tables_are_tables_of_their_folder() -> None:
    for path in tuning.RESULTS.glob("*/tuning.json"):
        found = tuning.read(path)
        assert record.slug(found.env.gpu) == path.parent.name
        assert tuning.to_json(found) == path.read_text(encoding="utf-8")


# --- the tuner ------------------------------------------------------------------------------------


class Timed(Simulator):
    """The simulator and a stopwatch in one: kernels run, and take the time that they are given."""

    l2_bytes = 1

    def __init__(self, us: dict[str, float], wrong: str) -> None:
        super().__init__()
        self.us, self.wrong = us, wrong

    def run(self, launch: Any) -> None:
        super().run(launch)
        if launch.kernel.__name__ == self.wrong:
            next(x for x in launch.args if getattr(x, "ndim", 0) == 2)[...] = 0

    def capture(self, launches: Any) -> Any:
        def seconds() -> float:
            for launch in {id(each): each for each in launches}.values():  # once is enough
                self.run(launch)
            return sum(self.us[launch.kernel.__name__] for launch in launches) * 1e-6

        return SimpleNamespace(launches=len(launches), how="graph", seconds=seconds)

    def issue(self, launch: Any) -> float:
        return 5e-6

    def issue_and_wait(self, launch: Any) -> tuple[float, float]:
        self.run(launch)
        return 5e-6, self.us[launch.kernel.__name__] * 1e-6

    def duplicate(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def wait(self) -> None:
        pass

    def sm_mhz(self, replay: Any) -> None:
        return None


def test_the_tuner_times_what_may_win_and_drops_what_is_wrong(monkeypatch) -> None:
    from steps.checks.select import select

    monkeypatch.setattr(tuning, "BUDGET", replace(tuning.BUDGET, settled_samples=3, warm_seconds=0))
    us = {"w4a16_naive": 50.0, "w4a8_naive": 1.0, "w4a8_vectorized": 8.0}
    us |= {"q8_1_blocks": 1.0, "q8_1_k_outermost": 1.0}
    machine = Timed(us, wrong="w4a8_naive")
    works = select([find(1), find(2), find(5)], ["q4_0"])
    said: list[str] = []
    found = list(tuning._entries(machine, machine, works, 5, 64, (1, 2), said.append))
    assert said == ["q4_0 at M=1 N=5 K=64", "q4_0 at M=2 N=5 K=64"]
    for m, (one, failures) in zip((1, 2), found, strict=True):
        assert (one.m, one.n, one.k) == (m, 5, 64)
        assert one.times == pytest.approx({"5 A8": 9.0, "1 A16": 50.0})
        assert len(failures) == 1
        assert failures[0].startswith(f"step 2 W4A8 q4_0 at M={m} N=5 K=64: ")


@pytest.mark.skipif(why_no_gpu() is None, reason="this machine has a GPU")
def test_without_a_gpu_the_command_is_one_sentence() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "steps", "tune"],
        cwd=record.ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "no CUDA GPU can be used here" in done.stderr


# --- from a bench ---------------------------------------------------------------------------------
def test_a_bench_gives_its_totals(tmp_path: Path) -> None:
    from tests.results.synthetic_run import make_run

    run = make_run()
    entries = tuning.entries_of(run)
    assert entries, "the synthetic run has rows"
    for one in entries:
        assert dict(one.times) == {
            f"{row.step} {row.family}": row.total_us
            for row in run.rows
            if (row.format, row.N, row.K, row.M) == (one.format, one.n, one.k, one.m)
            and row.status == "ok"
            and row.output == "float32"
        }
    wrong = replace(run, rows=tuple(replace(row, status="failed") for row in run.rows))
    assert tuning.entries_of(wrong) == ()


def test_every_entry_of_a_committed_table_has_the_highest_step_of_its_format() -> None:
    for table in tuning.known():
        highest: dict[str, int] = {}
        for one in table.entries:
            highest[one.format] = max(highest.get(one.format, 0), one.highest)
        for one in table.entries:
            assert one.highest == highest[one.format], (one.format, one.where)


def test_the_command_takes_a_bench_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.results.synthetic_run import make_run

    run = make_run()
    path = record.write(run, path=tmp_path / "run.json")
    written = tmp_path / "tuning.json"
    monkeypatch.setattr(tuning, "write", lambda table: written.write_text(tuning.to_json(table)))
    assert tuning.tune(SimpleNamespace(run=path)) == 0
    again = tuning.read(written)
    assert {e.where for e in again.entries} == {e.where for e in tuning.entries_of(run)}
    assert again.gpu == run.env.gpu
