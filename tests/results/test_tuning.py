"""The table of the fastest steps: which entry counts, what its file holds, and how it is made."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from results.measure import tune
from results.measure.bench import Bench, Wanted
from results.measure.protocol import Budget
from results.record import store
from results.record.provenance import source_hash
from results.record.schema import Environment, Limits, Row, Run
from steps import find
from steps.checks.select import select
from steps.cli import tune as command
from steps.cli.main import main
from steps.contract import Work
from steps.driver.machines import Simulator
from steps.product import tuning_table as tuning
from steps.product.tuning_table import Entry, Tuning, TuningError
from steps.registry import kernel_of
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
    alike = [replace(own, gpu=gpu) for gpu in ("NVIDIA H100 80GB HBM3", "NVIDIA H200")]
    for one in alike:  # which have as many multiprocessors
        for given in (alike, alike[::-1]):
            assert tuning.nearest(given, one.gpu, (9, 0), 132) is one


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
    assert store.ranked(tmp_path) == [], "a table is not a run"


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
            most = {step: kernel_of(step).most_tokens for step in timed[one.format]}
            highest = max(step for step, m in most.items() if m is None or one.m <= m)
            assert highest in one.steps, (one.format, one.where)


# --- the tuner ------------------------------------------------------------------------------------


QUICK = Budget(
    replay_seconds=1e-4, warm_seconds=0.0, seconds=0.0, min_rounds=3, max_rounds=3, slow_rounds=1
)
COSTS = {"w4a16_naive": 50e-6, "w4a8_vectorized": 8e-6, "q8_1_k_outermost": 1e-6}


class WrongStep2(Simulator):
    name, cc = "NVIDIA H200", (9, 0)

    def run(self, launch: Any) -> None:
        super().run(launch)
        if launch.kernel.__name__ == "w4a8_naive":
            next(x for x in launch.args if getattr(x, "ndim", 0) == 2)[...] = 0


def test_the_command_times_steps_and_drops_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """On a fake GPU: totals in float32 and, where a step reads and writes these, in 16 bits."""
    asked: list[Any] = []

    def here(budget: Budget, say: Any, torch: bool) -> Bench:
        asked.append((budget, torch))
        watch = FakeStopwatch(cost=by_kernel(COSTS | {"w4a16_specialized": 4e-6}))
        return Bench(WrongStep2(), watch, Limits(), QUICK)

    monkeypatch.setattr(Bench, "here", here)
    monkeypatch.setattr(command, "machines", lambda _: ("", lambda _: WrongStep2(), None))
    monkeypatch.setattr(command, "environment", lambda: ENV)
    monkeypatch.setattr(command, "compile_ahead", lambda wanted, *_: asked.append(len(wanted)))
    monkeypatch.setattr(tune.write, "__defaults__", (tmp_path,))
    arguments = ["1", "2", "5", "13", "--format", "q4_0", "--m", "2", "--n", "5", "--k", "64"]
    assert main(["tune", *arguments]) == 1
    printed = capsys.readouterr()
    assert asked == [(tune.BUDGET, False), 6], "kernel 13 three times"
    assert printed.err.startswith("step 2 W4A8 q4_0 (2, 5, 64) float32 to float32: wrong: ")
    (one,) = tuning.read(tmp_path / "nvidia-h200" / "tuning.json").entries
    assert (one.format, one.m, one.n, one.k) == ("q4_0", 2, 5, 64)
    assert list(one.times) == ["1 A16", "5 A8", "13 A16", "13 A16 bfloat16", "13 A16 float16"]
    assert [one.us(1, "A16"), one.us(5, "A8")] == pytest.approx([50.0, 9.0])
    half, single = one.us(13, "A16", "float16"), one.us(13, "A16")
    assert half == pytest.approx(4.0)
    assert half < single, "A that is rounded by a pass"
    assert one.us(5, "A8", "float16") == one.us(5, "A8")
    assert one.us(13, "A8", "float16") is None
    assert one.steps == {1, 5, 13}
    assert table(one).has(13, "A16")
    assert not table(one).has(13, "A8")
    with_float16 = [line.split() for line in printed.out.splitlines() if " float16 " in line]
    assert with_float16 == [["q4_0", "5", "64", "float16", "13", "A16"]]
    assert printed.out.splitlines()[-1].startswith("wrote ")


def test_loops_are_of_one_format_and_shape() -> None:
    works = select([find(5), kernel_of(14)], ["q4_0", "q8_0"])
    loops = tune.loops(works, [(5, 64), (6, 64)], (1, 2))
    assert len(loops) == 2 * 2 * 2
    for size, own in loops:
        assert {one.size for one in own} == {size}
        assert len({one.work.format for one in own}) == 1
        assert [(one.work.step.number, one.input, one.output) for one in own] == [
            (5, "float32", "float32"), (14, "float32", "float32"), (14, "float16", "float16"),
            (14, "bfloat16", "bfloat16"),
        ]  # fmt: skip


def bench_rows(tokens: tuple[int, ...], k: int = 4096, **changes: Any) -> list[Row]:
    """Rows of steps 14 and 18 at M x 4096 x k, whose totals are M and 2 M microseconds."""
    rows = []
    for step, family, share in ((kernel_of(14), "A16", 1), (kernel_of(18), "A8", 2)):
        for m in tokens:
            for dtype in ("float32", "float16", *(("bfloat16",) if m == 8 else ())):
                wanted = Wanted(Work(step, family, "q4_0"), (m, 4096, k), dtype, dtype)
                facts = {
                    "status": "ok",
                    "why": None,
                    "kernel_us": 0.5,
                    "total_us": float(share * m),
                }
                now = source_hash(step.number, step.name)
                row = replace(wanted.row(), **facts, source_hash=now)
                rows.append(replace(row, **changes))
    return rows


WHOLE = (1, 8, 16, 128, 512, 4096)


def test_a_run_gives_the_entries_that_it_has_whole() -> None:
    mixed = [replace(row, output="float32", total_us=9.0) for row in bench_rows((8,))[1:2]]
    rows = [*bench_rows(WHOLE), *bench_rows(WHOLE[1:], 14336), *mixed]
    found = tune.of_run(Run(env=ENV, rows=tuple(rows)))
    assert [(one.k, one.m) for one in found] == [
        *((4096, m) for m in WHOLE), *((14336, m) for m in WHOLE[1:])
    ]  # fmt: skip
    assert dict(found[1].times) == {
        "14 A16": 8.0, "14 A16 float16": 8.0, "18 A8": 16.0, "18 A8 float16": 16.0
    }  # fmt: skip
    for stale in ({"source_hash": "0" * 12}, {"status": "failed", "why": "wrong"}):
        rows = [*bench_rows(WHOLE[:-1]), *bench_rows(WHOLE[-1:], **stale)]
        found = tune.of_run(Run(env=ENV, rows=tuple(rows)))
        assert [one.m for one in found] == [*WHOLE[:-1]]
    without = [row for row in bench_rows(WHOLE) if (row.step, row.M) != (14, 512)]
    assert 512 not in [one.m for one in tune.of_run(Run(env=ENV, rows=tuple(without)))]


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
    stale = bench_rows(WHOLE, source_hash="0" * 12)
    store.write(Run(env=ENV, rows=tuple(stale)), path)
    assert main(["tune", "--run", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.endswith("run make bench on that GPU first\n")
    assert said.count("\n") == 1


def test_a_step_for_few_tokens_is_not_missed_where_there_are_more(tmp_path: Path) -> None:
    few = Entry("q4_0", 64, 64, 16, {"14 A16": 5.0, "18 A16": 4.0})
    without = Entry("q4_0", 64, 64, 8, {"14 A16": 5.0})
    many = Entry("q4_0", 64, 64, 128, {"14 A16": 9.0})
    older = Entry("q4_0", 64, 64, 512, {"9 A8": 9.0})
    path = tune.write(ENV, [few, without, many, older], tmp_path)
    assert [one.m for one in tuning.read(path).entries] == [16, 128]
