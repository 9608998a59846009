"""The host's time of calls: batches take turns, rows say who took what, the file goes round."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from results.measure import host_time
from results.measure.host_time import BATCH, WARM_UP, in_turn, rows_of
from results.record import host_rows
from results.record.host_rows import HostRun
from results.record.schema import Environment, RecordError


def test_calls_take_turns_batch_by_batch_with_the_queue_drained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, order = [0.0], []

    def call(name: str, us: float) -> Any:
        def run() -> None:
            order.append(name)
            clock[0] += us * 1e-6

        return run

    def drain() -> None:
        order.append("drain")
        clock[0] += 1.0

    monkeypatch.setattr(host_time.time, "perf_counter", lambda: clock[0])
    taken = in_turn([call("ours", 10.0), call("theirs", 20.0)], drain, rounds=2)
    batch = ["drain", *["ours"] * BATCH, "drain", *["theirs"] * BATCH]
    assert order == [*["ours"] * WARM_UP, *["theirs"] * WARM_UP, *batch, *batch, "drain"]
    assert [[len(one) for one in of_call] for of_call in taken] == [[BATCH, BATCH]] * 2
    assert taken[0][1] == pytest.approx([10.0] * BATCH)
    (row,) = rows_of(["gemm"], taken, (1, 2, 3), "float16", "q4_0")
    assert (row.api, row.dtype, row.M, row.N, row.K) == ("gemm", "float16", 1, 2, 3)
    assert (row.us, row.p20_us, row.p80_us) == pytest.approx((10.0,) * 3)
    assert (row.torch_us, row.x_torch) == pytest.approx((20.0, 0.5))
    assert row.calls == 2 * BATCH


def test_a_slow_round_of_both_sides_does_not_change_the_ratio() -> None:
    ours, theirs = [[1.0] * 3, [10.0] * 3, [1.0] * 3], [[2.0] * 3, [20.0] * 3, [2.0] * 3]
    (row,) = rows_of(["gemm.plan"], [ours, theirs], (1, 2, 3), "float32", "q4_0")
    assert (row.us, row.torch_us, row.x_torch) == (1.0, 2.0, 0.5)


def test_a_run_is_written_and_read(tmp_path: Path) -> None:
    taken = [[[1.0]], [[2.0]]]
    rows = tuple(rows_of(["gemm"], taken, (1, 2, 3), "float16", "q4_0"))
    run = HostRun(env=Environment(gpu="NVIDIA H200"), torch="9.9", rows=rows)
    path = host_rows.write(run, tmp_path / "new" / host_rows.NAME)
    assert host_rows.read(path) == run
    for change, said in (
        ({"schema": 2}, "schema is 2, expected 1"),
        ({"rows": [{"api": "x"}]}, r"rows\[0\]"),
        ({"more": 1}, "unexpected keyword argument 'more'"),
    ):
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        with pytest.raises(RecordError, match=rf"host_time.json: .*{said}"):
            host_rows.read(path)
        host_rows.write(run, path)


def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: it is an extra")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert host_time.main([]) == 2
    assert "nothing is measured" in capsys.readouterr().err
