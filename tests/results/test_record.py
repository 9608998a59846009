"""A run as data: what is written can be read back, merged row by row, and is written whole."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from results.record import ROOT, codec, environment, schema, store
from results.record.codec import RecordError
from results.record.schema import (
    AsCalled,
    Clocks,
    Environment,
    Git,
    Limits,
    Peer,
    Row,
    Run,
    total_below_kernel,
    with_ratios,
)


def make_row(**changes: Any) -> Row:
    row = Row(
        step=1,
        name="step01_naive_w4a16",
        scheme="W4A16",
        format="q4_0",
        M=512,
        N=4096,
        K=4096,
        status="ok",
        kernel_us=100.0,
        p20_us=99.0,
        p80_us=101.0,
        total_us=110.0,
        total_p20_us=109.0,
        total_p80_us=112.0,
        rounds=9,
        nmse_float=7.4e-3,
        commit="0123abcd",
        utc="2026-01-02T03:04:05Z",
    )
    return replace(row, **changes)


def timed(us: float, **changes: Any) -> Row:
    return make_row(kernel_us=us, total_us=us, **changes)


def make_call(**changes: Any) -> AsCalled:
    call = AsCalled(
        api="gemm.plan",
        accuracy="exact",
        dtype="float32",
        format="q4_0",
        M=8,
        N=4096,
        K=4096,
        step=10,
        us=7.5,
        p20_us=7.4,
        p80_us=7.7,
        cublas_us=13.6,
        x_cublas=1.8,
        host_us=6.0,
        torch_host_us=9.0,
        rounds=30,
        source_hash="0" * 12,
    )
    return replace(call, **changes)


def make_peer(**changes: Any) -> Peer:
    peer = Peer(
        peer="ggml", format="q4_0", M=1, N=4096, K=4096, us=7.5, same_run=False, source="recorded"
    )
    return replace(peer, **changes)


def make_run(*rows: Row) -> Run:
    env = Environment(
        gpu="NVIDIA H200",
        cc=(9, 0),
        sms=132,
        power_limit_w=700.0,
        clocks_mhz=Clocks(before=345.0, after=1980.0, max=1980.0),
        copy_tbps=4.26,
        limits=Limits(copy_tbps=4.26, tops={"fp32": 60.0}),
        git=Git(sha="0123abcd", dirty=False),
        utc="2026-01-02T03:04:05Z",
    )
    return Run(env=env, rows=rows or (make_row(),), peers=(make_peer(),), as_called=(make_call(),))


# --- the files ------------------------------------------------------------------------------------


def test_a_run_is_written_and_read(tmp_path: Path) -> None:
    failed = make_row(step=2, scheme="W4A8", status="failed", why="NaN", kernel_us=None)
    run, path = make_run(make_row(), failed), tmp_path / "new" / "a.json"
    assert store.write(run, path) == path
    assert store.read(path) == run
    data = json.loads(path.read_text())
    assert list(data) == ["schema", *(one.name for one in fields(Run))]
    for line, one in zip(data["rows"], run.rows, strict=True):
        assert list(line) == [field.name for field in fields(one)]
        assert json.dumps(line) in path.read_text(), "a record a line"
    for change, message in (
        ({"schema": 7}, "schema is 7; this version reads schema 3"),
        ({"duels": []}, r"the file has unknown fields \['duels'\]"),
        ({"rows": None}, "rows is None, expected tuple"),
        ({"rows": [{"x": 1}]}, r"rows\[0\] has unknown fields"),
        ({"rows": [{"format": "q4_0"}]}, r"rows\[0\]: .*missing"),
        ({"rows": 2 * data["rows"][:1]}, r"rows\[1\] .*: measured twice"),
        ({"env": None}, "env must be a JSON object, not None"),
        ({"env": {"smx": 1}}, r"env has unknown fields \['smx'\]"),
    ):
        path.write_text(json.dumps(data | change))
        with pytest.raises(RecordError, match=rf"^{re.escape(str(path))}: .*{message}"):
            store.read(path)
    path.write_bytes(b"\xff")
    with pytest.raises(RecordError, match=rf"^{re.escape(str(path))}: 'utf-8' codec can't decode"):
        store.read(path)
    for text, message in (
        ("{", "must be JSON"),
        ("[]", "a JSON object, not list"),
        (json.dumps({key: data[key] for key in data if key != "rows"}), r"keys \['rows'\]"),
    ):
        with pytest.raises(RecordError, match=message):
            codec.from_json(Run, text)


def test_numbers_have_six_digits_and_what_is_none_is_null() -> None:
    text = codec.to_json(make_run(timed(1 / 3), timed(math.pi, step=2, nmse_float=math.nan)))
    assert '"kernel_us": 0.333333,' in text
    assert [row.nmse_float for row in codec.from_json(Run, text).rows] == [7.4e-3, None]
    with pytest.raises(RecordError, match="kernel_us is nan, expected float"):
        codec.from_json(Run, text.replace('"kernel_us": 0.333333', '"kernel_us": NaN'))


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (make_row, {"kernel_us": None}, "positive kernel_us"),
        (make_row, {"total_us": None}, "positive kernel_us and total_us"),
        (make_row, {"total_us": 90.0, "total_p20_us": 89.0, "total_p80_us": 91.0}, "the 100 us"),
        (make_row, {"status": "failed", "why": None}, "must say why"),
        (make_row, {"status": "great"}, r"rows\[0\].status is 'great'"),
        (make_row, {"scheme": "A16W4"}, r"rows\[0\].scheme is 'A16W4', expected like W4A16"),
        (make_row, {"M": 0}, r"rows\[0\].M is 0, expected positive"),
        (make_row, {"M": "512"}, r"rows\[0\].M is '512', expected int"),
        (make_row, {"M": True}, "expected int"),
        (make_peer, {"us": True}, r"peers\[0\].us is True, expected float"),
        *((make_call, {name: 0}, f"{name} is 0, expected pos") for name in ("us", "M", "host_us")),
        (make_call, {"cublas_us": -1.0}, r"as_called\[0\].cublas_us is -1.0, expected positive"),
        (make_peer, {"us": 0.0}, r"peers\[0\].us is 0.0, expected positive"),
        (make_peer, {"same_run": 1}, r"peers\[0\].same_run is 1, expected bool"),
    ],
)
def test_a_lying_record_is_refused_and_nothing_written(
    make: Any, changes: Any, message: str, tmp_path: Path
) -> None:
    field = {make_row: "rows", make_peer: "peers", make_call: "as_called"}[make]
    run = replace(make_run(), **{field: (make(**changes),)})
    with pytest.raises(RecordError, match=message):
        store.write(run, tmp_path / "run.json")
    assert list(tmp_path.rglob("*.*")) == []


def test_texts_of_a_run_are_as_a_terminal_may_show_them(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    text = codec.to_json(replace(make_run(), env=Environment(gpu="a GPU\x1b]0;mine\n")))
    path.write_text(text)
    assert store.read(path).env.gpu == "a GPU\\x1b]0;mine\n"
    path.write_text(text.replace('"gpu"', '"\\u001b[2J"'))
    with pytest.raises(RecordError, match=re.escape(r"unknown fields ['\x1b[2J']")):
        store.read(path)


def test_a_total_below_its_kernel_is_a_lie_unless_noise_says_nothing() -> None:
    assert total_below_kernel(make_row()) is None
    close = make_row(total_us=98.5, total_p20_us=98.0, total_p80_us=99.0)
    assert total_below_kernel(close) is None, "2 % say nothing"
    lie = make_row(total_us=95.0, total_p20_us=94.5, total_p80_us=95.5)
    assert "total of 95 us is below the 100 us" in (total_below_kernel(lie) or "")
    noisy = make_row(total_us=95.0, total_p20_us=91.0, total_p80_us=96.0)
    assert total_below_kernel(noisy) is None, "2 and 5 us of spread"


# --- ratios ---------------------------------------------------------------------------------------


def test_ratios_compare_with_the_same_family_else_the_faster() -> None:
    rows = with_ratios(
        [
            timed(100.0),
            timed(80.0, step=2, parent=1, scheme="W4A8"),
            timed(50.0, step=3, parent=2, scheme="W4A16"),
            timed(40.0, step=3, parent=2, scheme="W4A8"),
            timed(20.0, step=4, parent=3, scheme="W4A8"),
            timed(10.0, step=5, parent=3, scheme="W4A4"),
            timed(5.0, step=6, parent=99, scheme="W4A8"),
            timed(5.0, step=7, parent=1, scheme="W4A8", M=1),
            timed(5.0, step=8, parent=1, status="failed", why="wrong"),
            timed(5.0, step=9, parent=1, scheme="W4A8", output="float16"),
            timed(4.0, step=10, parent=2, scheme="W4A16", output="float16"),
            timed(2.0, step=10, name="kernel", scheme="W4A8"),  # float32, as step 2: not the lesson
        ]
    )
    ratios = [None, 1.25, 1.6, 2.0, 2.0, 4.0, *[None] * 3, 20.0, 20.0, None]
    assert [r.x_parent for r in rows] == ratios


# --- the store ------------------------------------------------------------------------------------


def test_merging_replaces_what_has_the_same_key_and_keeps_the_rest() -> None:
    run = make_run(timed(100.0), timed(50.0, step=2, parent=1, scheme="W4A8"))
    stamp = {"commit": "new", "utc": "2027-01-01T00:00:00Z"}
    new = timed(80.0, **stamp)
    merged = store.merge(
        run,
        env=replace(run.env, utc="2027-01-01T00:00:00Z"),
        rows=[new, timed(5.0, step=3, parent=1, scheme="W4A8", **stamp)],
        as_called=[make_call(us=7.0), make_call(dtype="float16", api="QuantLinear")],
    )
    assert [(row.step, row.kernel_us, row.commit) for row in merged.rows] == [
        (1, 80.0, "new"),
        (2, 50.0, "0123abcd"),
        (3, 5.0, "new"),
    ]
    assert [row.x_parent for row in run.rows] == [None, None], "what merges works them out"
    assert [row.x_parent for row in merged.rows] == [None, None, 16.0], "2 is of another loop"
    assert [(call.api, call.us) for call in merged.as_called] == [
        ("QuantLinear", 7.5),
        ("gemm.plan", 7.0),
    ]
    assert merged.env.utc == "2027-01-01T00:00:00Z"
    assert store.merge(merged).rows == merged.rows


def test_a_recorded_figure_does_not_replace_a_measured_one() -> None:
    ours, theirs = make_peer(us=5.0, same_run=True), make_peer(us=9.0)
    run = replace(make_run(), peers=(ours,))
    assert store.merge(run, peers=[theirs]).peers == (ours,)
    assert store.merge(replace(run, peers=(theirs,)), peers=[ours]).peers == (ours,)
    newer = replace(ours, us=4.0)
    assert store.merge(run, peers=[newer]).peers == (newer,)


def test_a_crash_while_writing_leaves_the_old_file_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store.write(make_run(), tmp_path / "run.json")
    before = path.read_bytes()

    def crash(_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(store.os, "fsync", crash)
    with pytest.raises(OSError, match="disk full"):
        store.write(make_run(timed(1.0)), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_the_headline_is_the_run_with_most_good_rows(tmp_path: Path) -> None:
    assert store.headline(tmp_path) is None
    for gpu, utc, count in (("A", "2026-02", 2), ("B", "2026-03", 2), ("C", "2026-04", 1)):
        rows = [make_row(step=i) for i in range(count)]
        bad = make_row(step=9, status="failed", why="wrong")
        run = make_run(*rows, *[replace(bad, M=m) for m in range(1, 6)])
        env = replace(run.env, gpu=gpu, utc=utc)
        store.write(replace(run, env=env), store.path_for(env, tmp_path))
    ranked = [path for path, _ in store.ranked(tmp_path)]
    assert [path.parent.name for path in ranked] == ["b", "a", "c"], "of two as large the newer"
    assert store.headline(tmp_path) == ranked[0]


def test_committed_files_are_read_written_alike_and_in_order() -> None:
    for path, run in store.ranked():
        assert store.path_for(run.env) == path
        same = codec.to_json(run) == path.read_text(encoding="utf-8")
        assert same, f"{path} is written anew otherwise"  # not compared by pytest: a megabyte
        again = schema.in_order(replace(run, rows=run.rows[::-1])).rows
        assert [row.key for row in again] == [row.key for row in run.rows]
        # a file has six digits of both times and of their ratio: each is rounded by 5e-6 at most
        ratios = [[row.x_parent for row in rows] for rows in (again, run.rows)]
        assert [x is None for x in ratios[0]] == [x is None for x in ratios[1]]
        assert [x for x in ratios[0] if x] == pytest.approx(
            [x for x in ratios[1] if x], rel=3 * 5e-6
        )


# --- the environment ------------------------------------------------------------------------------


def test_git_from_the_environment_or_nothing(tmp_path: Path) -> None:
    given = {environment.GIT_SHA_VARIABLE: "0a1b2c3-dirty"}
    assert environment.git_state(environ=given) == Git(sha="0a1b2c3", dirty=True)
    assert environment.git_state(tmp_path, environ={}) == Git()  # a folder without .git


def test_what_a_bench_writes_does_not_make_a_tree_dirty(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        name = ["-c", "user.name=x", "-c", "user.email=x@y"]
        subprocess.run(["git", *name, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    (tmp_path / "code.py").write_text("x = 1\n")
    git("add", "code.py")
    git("commit", "-m", "one")
    folder = tmp_path / "results" / "a-gpu"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    assert environment.git_state(tmp_path, environ={}).dirty is False
    assert environment.git_state(folder, environ={}) == Git(), "another project's commit"
    (tmp_path / "code.py").write_text("x = 2\n")
    assert environment.git_state(tmp_path, environ={}).dirty is True


def test_nvidia_smi_is_asked_once_and_believed_only_in_numbers() -> None:
    def smi(command: Any, **_: Any) -> Any:
        assert command[0] == "nvidia-smi"
        return subprocess.CompletedProcess(command, 0, stdout="580.1, 700.00, [N/A]\n")

    answer = environment.nvidia_smi(("driver_version", "power.limit", "clocks.sm"), run=smi)
    assert answer == {"driver_version": "580.1", "power.limit": "700.00"}

    def absent(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError("nvidia-smi")

    assert environment.nvidia_smi(run=absent) == {}


def test_environment_never_raises_and_knows_the_software(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "nvidia_smi", lambda *_, **__: {})
    env = environment.environment("make ladder")
    assert env.command == "make ladder"
    assert env.numpy
    assert env.power_limit_w is None
    after = environment.finished(env, Limits(copy_tbps=4.0))
    assert after.copy_tbps == 4.0
    assert after.clocks_mhz.after is None


def test_a_command_names_no_place_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    called = ["/usr/bin/python3", "-m", "steps", "bench"]
    called += ["--out", "/a/b/run.json", "12", "c/d.json", "--json=/a/e.json"]
    monkeypatch.setattr(sys, "orig_argv", called)
    wanted = "python3 -m steps bench --out run.json 12 c/d.json --json=e.json"
    assert environment.environment().command == wanted


def test_nothing_committed_names_a_place_of_a_machine() -> None:
    """Of what was measured, or wrote it down: a path from the root of some disk."""
    files = [*(ROOT / "results").rglob("*.json"), *(ROOT / "results").rglob("*.txt")]
    assert len(files) > 3
    for file in files:
        found = re.findall(r"(?<![\w./:])/(?:root|home|work|tmp|opt|usr)/\S*", file.read_text())
        assert found == [], file
