"""The table of the fastest steps: which entry counts, what its file holds, and how it is made."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from results.measure import tune
from results.measure.bench import Wanted
from results.measure.protocol import Budget
from results.record import store
from results.record.provenance import source_hash
from results.record.schema import Environment, Row, Run
from steps import find
from steps.checks.select import select
from steps.cli.main import main
from steps.contract import Work, why_no_gpu
from steps.driver.machines import Simulator
from steps.product import tuning_table as tuning
from steps.product.tuning_table import Entry, Tuning, TuningError
from tests.results.fake_stopwatch import FakeStopwatch, by_kernel

ENV = Environment(gpu="NVIDIA H200", cc=(9, 0), sms=132)
SIZES = ((4096, 4096), (4096, 14336), (14336, 4096))


def entry(m: int, n: int = 4096, k: int = 4096, name: str = "q4_0", **times: float) -> Entry:
    """An entry with the times of steps: s5A8=12.0 is step 5 in family A8."""
    named = {key[1:].replace("A", " A"): us for key, us in times.items()}
    return Entry(name, n, k, m, named or {"1 A16": 100.0})


def table(*entries: Entry, gpu: str = "NVIDIA H200", cc: Any = (9, 0), sms: int = 132) -> Tuning:
    return Tuning(gpu, cc, sms, entries)


# --- which entry counts ---------------------------------------------------------------------------


def test_the_nearest_n_and_k_count_then_the_next_m_upwards_and_above_the_last_the_last() -> None:
    full = table(*(entry(m, n, k) for m in reversed(tune.TOKENS) for n, k in SIZES))
    for m, counts in (
        *((1, 1), (2, 2), (3, 4), (9, 16), (16, 16), (17, 32), (513, 1024), (1025, 4096)),
        (9999, 4096),
    ):
        found = full.entry("q4_0", m, 4096, 4096)
        assert found is not None
        assert found.m == counts
    for size, nearest in (
        ((4096, 4096), (4096, 4096)),
        ((1, 32), (4096, 4096)),
        ((4096, 11008), (4096, 14336)),
        ((11008, 4096), (14336, 4096)),
        ((28672, 8192), (14336, 4096)),
        ((8192, 28672), (4096, 14336)),
        ((5120, 5120), (4096, 4096)),
    ):
        found = full.entry("q4_0", 1, *size)
        assert found is not None
        assert (found.n, found.k) == nearest
    sparse = table(entry(16), entry(1, 14336, 4096), entry(4, 4096, 4096, "q8_0"))
    found = sparse.entry("q4_0", 1, 4096, 4096)
    assert found is not None
    assert found.m == 16, "N and K count before M, and only in the same format"
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
    path = tune.write(ENV, entries, tmp_path)
    assert path == tmp_path / "nvidia-h200" / "tuning.json"
    assert not list(path.parent.glob("*.tmp"))
    text = path.read_text()
    lines = [json.loads(line.strip(" ,")) for line in text.splitlines() if '"us"' in line]
    assert [line["M"] for line in lines] == [1, 16]
    assert list(lines[1]["us"]) == ["3 A16", "3 A8", "10 A8"]
    assert lines[0]["us"] == {"10 A8": 3.751}
    read = tuning.read(path)
    assert (read.gpu, read.cc, read.sms) == ("NVIDIA H200", (9, 0), 132)
    assert read.entries[1] == entries[0]
    assert tune.to_json(ENV, read.entries) == text
    assert store.runs(tmp_path) == [], "a table is not a run"


def test_a_step_tuned_again_replaces_its_own_times_alone(tmp_path: Path) -> None:
    tune.write(ENV, [entry(1, s5A8=20.0, s6A8=15.0), entry(2, s5A8=21.0)], tmp_path)
    again = tune.write(ENV, [entry(1, s6A8=14.0, s7A8=9.0), entry(4, s7A8=9.5)], tmp_path)
    assert tuning.read(again).entries == (
        entry(1, s5A8=20.0, s6A8=14.0, s7A8=9.0),
        entry(4, s7A8=9.5),
    ), "where step 7 was not measured nobody knows who is fastest"
    least = tune.write(ENV, [entry(4, s3A8=90.0), entry(8, s3A8=99.0)], tmp_path)
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
        (lambda data: data["env"].update(cc=[9, 0, 0]), "env.cc is"),
        (lambda data: data["env"].update(sms=0), "env.sms is 0"),
        (lambda data: data["env"].pop("gpu"), "no 'gpu'"),
    ],
)
def test_a_file_that_is_no_table_is_named(change, said: str, tmp_path: Path) -> None:
    path = tune.write(ENV, [entry(1, s5A8=20.0)], tmp_path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(TuningError, match=said) as refused:
        tuning.read(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)
    path.write_text("not JSON")
    with pytest.raises(TuningError, match="is not a tuning table"):
        tuning.read(path)


def test_committed_tables_are_of_their_folder_and_have_the_highest_step_of_each_format() -> None:
    for path in tuning.RESULTS.glob("*/tuning.json"):
        found = tuning.read(path)
        assert store.slug(found.gpu) == path.parent.name
        rows = tune.to_json(ENV, found.entries).split('"rows": [')[1]
        assert path.read_text(encoding="utf-8").endswith(rows)
        timed = {one.format: set[int]() for one in found.entries}
        for one in found.entries:
            timed[one.format] |= one.steps
        for one in found.entries:
            most = {step: find(step).most_tokens for step in timed[one.format]}
            highest = max(step for step, m in most.items() if m is None or one.m <= m)
            assert highest in one.steps, (one.format, one.where)


# --- the tuner ------------------------------------------------------------------------------------


QUICK = Budget(
    replay_seconds=1e-4, warm_seconds=0.0, seconds=0.0, min_rounds=3, max_rounds=3, slow_rounds=1
)
COSTS = {
    "w4a16_naive": 50e-6,
    "w4a8_naive": 1e-6,
    "w4a8_vectorized": 8e-6,
    "q8_1_blocks": 1e-6,
    "q8_1_k_outermost": 1e-6,
}


class WrongStep2(Simulator):
    def run(self, launch: Any) -> None:
        super().run(launch)
        if launch.kernel.__name__ == "w4a8_naive":
            next(x for x in launch.args if getattr(x, "ndim", 0) == 2)[...] = 0


def test_the_tuner_times_what_may_win_and_drops_what_is_wrong() -> None:
    watch = FakeStopwatch(cost=by_kernel(COSTS))
    works = select([find(1), find(2), find(5)], ["q4_0"])
    said: list[str] = []
    found = list(tune.entries(WrongStep2(), watch, works, [(5, 64)], (1, 2), QUICK, said.append))
    assert said == ["q4_0 at M=1 N=5 K=64", "q4_0 at M=2 N=5 K=64"]
    for m, measured in zip((1, 2), found, strict=True):
        one = measured.entry
        assert (one.format, one.m, one.n, one.k) == ("q4_0", m, 5, 64)
        assert one.times == pytest.approx({"1 A16": 50.0, "5 A8": 9.0})
        (failure,) = measured.failures
        assert failure.startswith(f"step 2 W4A8 q4_0 at M={m} N=5 K=64: ")
        assert "wrong: " in failure
    timed = {
        launch.kernel.__name__ for each in watch.rounds[-3:] for r in each for launch in r.parts
    }
    assert timed == {"w4a8_vectorized", "q8_1_k_outermost"}, "step 1 is far slower"


def test_a_step_that_reads_float16_is_timed_in_float16_too() -> None:
    """With no pass, so that it takes less; and looked up by the dtype of A."""
    watch = FakeStopwatch(cost=lambda _: 4e-6)
    works = select([find(5), find(12)], ["q4_0"])
    (measured,) = tune.entries(Simulator(), watch, works, [(5, 64)], (2,), QUICK)
    assert measured.failures == ()
    one = measured.entry
    assert list(one.times) == ["5 A8", "12 A16", "12 A16 float16"]
    assert one.times == pytest.approx({"5 A8": 8.0, "12 A16": 8.0, "12 A16 float16": 4.0})
    assert one.us(12, "A16") == pytest.approx(8.0)
    for input in ("float16", "bfloat16"):
        assert one.us(12, "A16", input) == pytest.approx(4.0)
        assert one.us(5, "A8", input) == pytest.approx(8.0)
        assert one.us(12, "A8", input) is None
    assert one.steps == {5, 12}
    assert table(one).has(12, "A16")
    assert not table(one).has(12, "A8")
    launched = [x.launched for work in works for x in tune.wanted_of(work, (2, 5, 64))]
    assert [(x.kernel.number, x.request.a, x.writes) for x in launched] == [
        (5, "float32", "float32"),
        (12, "float32", "float32"),
        (12, "float16", "float16"),
    ]


def test_a_float16_product_that_is_wrong_is_dropped_alone() -> None:
    class Wrong(Simulator):
        def run(self, launch: Any) -> None:
            super().run(launch)
            for x in launch.args:
                if getattr(x, "shape", ()) == (2, 5) and x.dtype == np.float16:
                    x[...] = 7

    works = select([find(12)], ["q4_0"])
    (measured,) = tune.entries(Wrong(), FakeStopwatch(), works, [(5, 64)], (2,), QUICK)
    assert list(measured.entry.times) == ["12 A16"]
    (failure,) = measured.failures
    assert failure.startswith("step 12 W4A16 q4_0 in float16 at M=2 N=5 K=64: ")


def test_a_step_that_goes_wrong_while_timed_is_dropped() -> None:
    def spoil(launches: Any) -> None:
        out = next(x for x in launches[-1].args if getattr(x, "shape", ()) == (2, 5))
        out[...] = np.nan

    watch = FakeStopwatch(cost=by_kernel(COSTS), effect=spoil)
    works = select([find(1)], ["q4_0"])
    (measured,) = tune.entries(Simulator(), watch, works, [(5, 64)], (2,), QUICK)
    assert measured.entry.times == {}
    assert len(measured.failures) == 1
    assert "not finite" in measured.failures[0]


def bench_rows(tokens: tuple[int, ...], k: int = 4096, **changes: Any) -> list[Row]:
    """Rows of steps 14 and 18 at M x 4096 x k, whose totals are M and 2 M microseconds."""
    rows = []
    for step, family, share in ((find(14), "A16", 1), (find(18), "A8", 2)):
        for m in tokens:
            for dtype in ("float32", "float16"):
                wanted = Wanted(Work(step, family, "q4_0"), (m, 4096, k), dtype, dtype)
                facts = {
                    "status": "ok",
                    "why": None,
                    "kernel_us": 0.5,
                    "total_us": float(share * m),
                }
                row = replace(wanted.row(), **facts, source_hash=source_hash(step.number))
                rows.append(replace(row, **changes))
    return rows


WHOLE = (1, 8, 16, 128, 512, 4096)


def test_a_run_gives_the_entries_that_it_has_whole() -> None:
    mixed = [replace(row, output="float32", total_us=9.0) for row in bench_rows((8,))[1:2]]
    rows = [*bench_rows(WHOLE), *bench_rows(WHOLE[1:], 14336), *mixed]
    found = tune.of_run(Run(env=ENV, rows=tuple(rows)))
    assert [(one.n, one.k, one.m) for one in found] == [(4096, 4096, m) for m in WHOLE]
    assert dict(found[1].times) == {
        "14 A16": 8.0, "14 A16 float16": 8.0, "18 A8": 16.0, "18 A8 float16": 16.0
    }  # fmt: skip
    for stale in ({"source_hash": "0" * 12}, {"status": "failed", "why": "wrong"}):
        rows = [*bench_rows(WHOLE[:-1]), *bench_rows(WHOLE[-1:], **stale)]
        assert tune.of_run(Run(env=ENV, rows=tuple(rows))) == []


def test_the_command_takes_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(tune.write, "__defaults__", (tmp_path,))
    path = store.write(Run(env=ENV, rows=tuple(bench_rows(WHOLE))), tmp_path / "run.json")
    assert main(["tune", "--run", str(path)]) == 0
    said = capsys.readouterr().out
    assert "The fastest step and family on NVIDIA H200" in said
    assert f"wrote {tmp_path / 'nvidia-h200' / 'tuning.json'}" in said.replace("\n", "")
    assert len(tuning.read(tmp_path / "nvidia-h200" / "tuning.json").entries) == len(WHOLE)
    store.write(Run(env=ENV, rows=tuple(bench_rows(WHOLE[1:]))), path)
    assert main(["tune", "--run", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.endswith("run make bench on that GPU first\n")
    assert said.count("\n") == 1


@pytest.mark.skipif(why_no_gpu() is None, reason="this machine has a GPU")
def test_without_a_gpu_the_command_is_one_sentence(capsys: Any) -> None:
    assert main(["tune"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "no CUDA GPU can be used here" in said


def test_a_step_for_few_tokens_is_not_missed_where_there_are_more(tmp_path: Path) -> None:
    few = Entry("q4_0", 64, 64, 16, {"14 A16": 5.0, "18 A16": 4.0})
    without = Entry("q4_0", 64, 64, 8, {"14 A16": 5.0})
    many = Entry("q4_0", 64, 64, 128, {"14 A16": 9.0})
    older = Entry("q4_0", 64, 64, 512, {"9 A8": 9.0})
    path = tune.write(ENV, [few, without, many, older], tmp_path)
    assert [one.m for one in tuning.read(path).entries] == [16, 128]


def test_the_command_prints_the_fastest_of_each_entry() -> None:
    from results.render import table
    from steps.cli.tune import fastest

    half = Entry("q4_0", 4096, 4096, 16, {"5 A8": 21.0, "12 A16": 22.0, "12 A16 float16": 8.0})
    entries = [entry(1, s5A8=20.0, s3A16=9.0), half]
    lines = table.plain(fastest("NVIDIA H200", entries)).splitlines()
    assert lines[0] == "The fastest step and family on NVIDIA H200"
    assert lines[-2].split() == ["q4_0", "4096", "4096", "float32", "3", "A16", "5", "A8"]
    assert lines[-1].split() == ["q4_0", "4096", "4096", "float16", "-", "12", "A16"]
