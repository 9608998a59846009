"""A run as data: what is written can be read back, nothing is overwritten, stale rows are known."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from results.record import schema as record
from results.record.schema import (
    Clocks,
    Duel,
    Environment,
    Git,
    Limits,
    Peer,
    RecordError,
    Row,
    Run,
)


def make_row(**changes) -> Row:
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
        samples=9,
        nmse_float=7.4e-3,
    )
    return replace(row, **changes)


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
    peer = Peer(
        peer="ggml", format="q4_0", M=1, N=4096, K=4096, us=7.5, same_run=False, source="given"
    )
    return Run(env=env, rows=rows or (make_row(),), peers=(peer,))


def test_round_trip():
    run = make_run(
        make_row(), make_row(step=2, scheme="W4A8", status="failed", why="NaN", kernel_us=None)
    )
    assert record.from_json(record.to_json(run)) == run


def test_schema_has_the_documented_keys():
    data = json.loads(record.to_json(make_run()))
    assert list(data) == ["schema", "env", "rows", "peers", "duels"]
    assert data["schema"] == 2
    assert {"gpu", "cc", "sms", "driver", "cuda", "numba_cuda", "numpy", "python"} < set(
        data["env"]
    )
    assert {"power_limit_w", "clocks_mhz", "copy_tbps", "git", "command", "utc"} < set(data["env"])
    assert set(data["env"]["clocks_mhz"]) == {"before", "after", "max"}
    documented = [
        "step",
        "name",
        "scheme",
        "format",
        "M",
        "N",
        "K",
        "status",
        "why",
        "kernel_us",
        "activation_us",
        "total_us",
        "chain_us",
        "pack_us",
        "p20_us",
        "p80_us",
        "samples",
        "tflops",
        "gbps",
        "limit_share",
        "x_parent",
        "x_step1",
        "nmse_same_operands",
        "nmse_float",
        "registers",
        "spill_bytes",
        "smem_bytes",
        "source_hash",
    ]
    assert set(documented) <= set(data["rows"][0])
    assert set(data["peers"][0]) == {"peer", "format", "M", "N", "K", "us", "same_run", "source"}


def test_runs_from_before_a_field_was_recorded_are_read():
    data = json.loads(record.to_json(make_run()))
    for row in data["rows"]:
        del row["chain_us"]
    assert record.from_json(json.dumps(data)).rows[0].chain_us is None
    first = {**data, "schema": 1}
    with pytest.raises(RecordError, match=r"unknown keys \['duels'\]"):
        record.from_json(json.dumps(first))
    del first["duels"]
    assert record.from_json(json.dumps(first)).duels == ()
    committed = record.headline()
    assert committed is not None
    assert record.read(committed).rows


def test_one_row_per_line_and_six_digits():
    text = record.to_json(make_run(make_row(kernel_us=1 / 3), make_row(step=2, kernel_us=math.pi)))
    assert sum('"step": ' in line for line in text.splitlines()) == 2
    assert '"kernel_us": 0.333333,' in text


def test_nan_becomes_null():
    run = make_run(make_row(status="failed", why="NaN in C", nmse_float=float("nan")))
    assert record.from_json(record.to_json(run)).rows[0].nmse_float is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"status": "ok", "kernel_us": None}, "positive kernel_us"),
        ({"status": "failed", "why": None}, "must say why"),
        ({"status": "great"}, r"rows\[0\].status is 'great'"),
        ({"scheme": "A16W4"}, "scheme must be like W4A16"),
        ({"M": 0}, "positive"),
        ({"M": "512"}, r"rows\[0\].M is '512', expected int"),
        ({"M": True}, "expected int"),
    ],
)
def test_a_lying_row_is_refused(changes, message, tmp_path):
    with pytest.raises(RecordError, match=message):
        record.write(make_run(make_row(**changes)), tmp_path)
    assert list(tmp_path.rglob("*.*")) == []


def test_other_files_are_refused():
    text = record.to_json(make_run())
    for broken, message in (
        (
            text.replace('"schema": 2', '"schema": 3'),
            "schema is 3; this version reads schema 1 and 2",
        ),
        (text[:-4], "must be JSON"),
        ("[]", "JSON object"),
        (text.replace('"sms"', '"smx"'), "unknown fields"),
        (text.replace('"rows"', '"lines"'), "unknown keys"),
        (text.replace('"kernel_us": 100.0', '"kernel_us": NaN'), "expected"),
    ):
        with pytest.raises(RecordError, match=message):
            record.from_json(broken)


def test_measured_twice_is_refused():
    with pytest.raises(RecordError, match="measured twice"):
        record.validate(make_run(make_row(), make_row()))


def test_write_names_the_file_and_never_overwrites(tmp_path):
    first = record.write(make_run(), tmp_path)
    assert first == tmp_path / "nvidia-h200" / "2026-01-02-0123abcd.json"
    before = first.read_bytes()
    second = record.write(make_run(make_row(kernel_us=50.0)), tmp_path)
    assert second.name == "2026-01-02-0123abcd-2.json"
    assert first.read_bytes() == before
    assert record.read(second).rows[0].kernel_us == 50.0
    record.write(make_run(make_row(kernel_us=40.0)), path=first)
    assert record.read(first).rows[0].kernel_us == 40.0
    assert sorted(p.name for p in first.parent.iterdir()) == [second.name, first.name]


def test_a_crash_while_writing_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = record.write(make_run(), tmp_path)
    before = path.read_bytes()

    def crash(_):
        raise OSError("disk full")

    monkeypatch.setattr(record.os, "fsync", crash)
    with pytest.raises(OSError, match="disk full"):
        record.write(make_run(make_row(kernel_us=1.0)), path=path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_without_hard_links_nothing_is_overwritten_either(tmp_path, monkeypatch):
    def no_links(*_):
        raise OSError("not supported")

    monkeypatch.setattr(record.os, "link", no_links)
    names = [record.write(make_run(), tmp_path).name for _ in range(3)]
    assert len(set(names)) == 3


def test_latest_goes_by_the_runs_own_clock(tmp_path):
    assert record.latest(tmp_path) is None
    run = make_run()
    new = record.write(replace(run, env=replace(run.env, utc="2026-02-01T00:00:00Z")), tmp_path)
    record.write(run, tmp_path)
    assert record.latest(tmp_path) == new


def test_ratios_compare_with_the_same_family_else_the_faster():
    rows = record.with_ratios(
        [
            make_row(),
            make_row(step=2, parent=1, scheme="W4A8", kernel_us=80.0),
            make_row(step=3, parent=2, scheme="W4A16", kernel_us=50.0),
            make_row(step=3, parent=2, scheme="W4A8", kernel_us=40.0),
            make_row(step=4, parent=3, scheme="W4A8", kernel_us=20.0),
            make_row(step=5, parent=3, scheme="W4A4", kernel_us=10.0),
            make_row(step=6, parent=9, scheme="W4A8", kernel_us=5.0),
            make_row(step=7, parent=1, scheme="W4A8", M=1, kernel_us=5.0),
            make_row(step=8, parent=1, status="failed", why="wrong", kernel_us=5.0),
        ]
    )
    assert [r.x_parent for r in rows] == [None, 1.25, 1.6, 2.0, 2.0, 4.0, None, None, None]
    assert [r.x_step1 for r in rows] == [1.0, 1.25, 2.0, 2.5, 5.0, 10.0, 20.0, None, None]


def test_ratios_are_of_one_type_of_c():
    rows = record.with_ratios(
        [
            make_row(),
            make_row(step=2, parent=1, kernel_us=50.0),
            make_row(step=2, parent=1, kernel_us=40.0, output="float16"),
            make_row(step=3, parent=2, kernel_us=25.0),
            make_row(step=3, parent=2, kernel_us=10.0, output="float16"),
        ]
    )
    assert [r.x_parent for r in rows] == [None, 2.0, None, 2.0, 4.0]
    assert [r.x_step1 for r in rows] == [1.0, 2.0, None, 4.0, None]


def make_duel(**changes) -> Duel:
    duel = Duel(
        step=12,
        name="step12_w4a16_wgmma",
        scheme="W4A16",
        format="q4_0",
        M=512,
        N=4096,
        K=4096,
        output="float16",
        rival="cublas_fp16",
        pace="sustained",
        status="ok",
        rounds=100,
        us=27.5,
        rival_us=28.0,
        x_rival=1.02,
        source="torch 9.9",
        source_hash="0" * 12,
    )
    return replace(duel, **changes)


def test_duels_are_written_and_read():
    duels = (make_duel(), make_duel(pace="burst"), make_duel(output="float32"))
    run = replace(make_run(), duels=duels)
    text = record.to_json(run)
    assert record.from_json(text) == run
    assert sum('"pace": ' in line for line in text.splitlines()) == 3
    assert duels[0].tflops == pytest.approx(624.7, rel=1e-3)
    assert record.stale_steps(run) >= {12}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_rival": None}, "needs rounds and positive times"),
        ({"rounds": 0}, "needs rounds and positive times"),
        ({"rival_us": -1.0}, "needs rounds and positive times"),
        ({"status": "failed"}, "must say why"),
        ({"scheme": "12"}, "scheme must be like"),
        ({"pace": "slow"}, r"duels\[0\].pace is 'slow'"),
    ],
)
def test_a_lying_duel_is_refused(changes, message):
    run = replace(make_run(), duels=(make_duel(**changes),))
    with pytest.raises(RecordError, match=message):
        record.from_json(record.to_json(run))
    with pytest.raises(RecordError, match="fought twice"):
        record.validate(replace(run, duels=(make_duel(), make_duel(us=9.0))))


def lay_sources(root, body="x = 1\n"):
    for folder in ("steps/instructions", "qformats"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "steps" / "step07_idea.py").write_text(body)
    (root / "qformats" / "device.py").write_text("d = 1\n")
    (root / "steps" / "instructions" / "arithmetic.py").write_text("a = 1\n")
    (root / "steps" / "instructions" / "simulator.py").write_text("s = 1\n")


def test_a_hash_follows_code_and_not_prose(tmp_path):
    code = 'def f(x):\n    return f"{x} # not a comment"\n'
    lay_sources(tmp_path, code)
    first = record.source_hash(7, tmp_path)
    assert first is not None
    assert len(first) == 12

    prose = '"""A module."""\n\n# why\ndef f(x):\n    """Two\n    lines."""\n\n'
    lay_sources(tmp_path, prose + '    return f"{x} # not a comment"  # said so\n')
    assert record.source_hash(7, tmp_path) == first
    (tmp_path / "steps" / "instructions" / "simulator.py").write_text("s = 2\n")
    assert record.source_hash(7, tmp_path) == first

    lay_sources(tmp_path, code.replace("not a", "a"))
    assert record.source_hash(7, tmp_path) != first
    lay_sources(tmp_path, code)
    (tmp_path / "qformats" / "device.py").write_text("d = 2\n")
    assert record.source_hash(7, tmp_path) != first
    assert record.source_hash(8, tmp_path) is None
    lay_sources(tmp_path, "def broken(:\n")
    assert record.source_hash(7, tmp_path) not in (None, first)


def test_a_hash_follows_what_a_step_imports(tmp_path):
    """Another step, and what that one imports in turn, in whatever form; no host code."""
    lay_sources(tmp_path, "from steps.step06_tile import tile\nfrom steps import machines\n")
    folder, host = tmp_path / "steps", ("machines", "step", "table")
    (folder / "step06_tile.py").write_text(
        "import numpy\nimport steps.first\nfrom .second import x\nfrom . import third, step\n"
    )
    (folder / "first.py").write_text("def f():\n    from steps.step07_idea import g\n")
    for name in ("second", "third", *host):
        (folder / f"{name}.py").write_text("x = 1\n")
    names = [path.name for path in record.step_sources(7, tmp_path)]
    assert sorted(names[:5]) == sorted(
        ["step07_idea.py", "step06_tile.py", "first.py", "second.py", "third.py"]
    )
    assert names[5:] == ["device.py", "arithmetic.py"]
    assert names[0] == "step07_idea.py"

    fresh = make_row(step=7, source_hash=record.source_hash(7, tmp_path))
    for name in host:
        (folder / f"{name}.py").write_text("x = 2\n")
    assert not record.is_stale(fresh, tmp_path)
    for name in ("step06_tile", "first", "second", "third"):
        path = folder / f"{name}.py"
        before = path.read_text()
        path.write_text(before + "y = 2\n")
        assert record.is_stale(fresh, tmp_path), name
        path.write_text(before)
        assert not record.is_stale(fresh, tmp_path)


def test_the_sources_of_the_ladder():
    def sources(step):
        return {path.stem for path in record.step_sources(step)}

    assert {"activations", "device", "repack", "memory"} <= sources(1)
    assert not sources(1) & {"epilogue", "stretches", "step", "machines"}
    assert {"define", "_numpy_shim"} <= sources(1)
    assert not sources(1) & {"_scheduler", "_arrays", "banks", "simulator"}, "no GPU ran those"
    assert "step08_async_pipeline" in sources(9)
    assert {"stretches", "epilogue"} <= sources(13)


def test_stale_rows_are_known(tmp_path):
    lay_sources(tmp_path)
    now = record.source_hash(7, tmp_path)
    fresh = make_row(step=7, source_hash=now)
    assert not record.is_stale(fresh, tmp_path)
    assert record.is_stale(replace(fresh, source_hash=None), tmp_path)
    run = make_run(fresh, make_row(step=8, source_hash="feed"), make_row(step=9))
    assert record.stale_steps(run, tmp_path) == {8, 9}


def test_git_from_the_environment_or_nothing(tmp_path):
    given = {record.GIT_SHA_VARIABLE: "0a1b2c3-dirty"}
    assert record.git_state(environ=given) == Git(sha="0a1b2c3", dirty=True)
    assert record.git_state(tmp_path, environ={}) == Git()  # a folder without .git


def test_nvidia_smi_is_asked_once_and_believed_only_in_numbers():
    def smi(command, **_):
        assert command[0] == "nvidia-smi"
        return subprocess.CompletedProcess(command, 0, stdout="580.1, 700.00, [N/A]\n")

    answer = record.nvidia_smi(("driver_version", "power.limit", "clocks.sm"), run=smi)
    assert answer == {"driver_version": "580.1", "power.limit": "700.00"}

    def absent(*_, **__):
        raise FileNotFoundError("nvidia-smi")

    assert record.nvidia_smi(run=absent) == {}


def test_environment_never_raises_and_knows_the_software(monkeypatch):
    monkeypatch.setattr(record, "nvidia_smi", lambda *_, **__: {})
    env = record.environment("make ladder")
    assert env.command == "make ladder"
    assert env.numpy
    assert env.power_limit_w is None
    after = record.finished(env, Limits(copy_tbps=4.0))
    assert after.copy_tbps == 4.0
    assert after.clocks_mhz.after is None


def test_a_command_names_no_place_of_the_machine(monkeypatch):
    called = [
        "/usr/bin/python3",
        "-m",
        "steps",
        "bench",
        "--out",
        "/a/b/run.json",
        "12",
        "c/d.json",
    ]
    monkeypatch.setattr(sys, "orig_argv", [*called, "--json=/a/e.json"])
    wanted = "python3 -m steps bench --out run.json 12 c/d.json --json=e.json"
    assert record.environment().command == wanted


def test_nothing_committed_names_a_place_of_a_machine():
    """Of what was measured, or wrote it down: a path from the root of some disk."""
    files = [*(record.ROOT / "results").rglob("*.json"), *(record.ROOT / "results").rglob("*.txt")]
    assert len(files) > 20
    for file in files:
        found = re.findall(r"(?<![\w./:])/(?:root|home|work|tmp|opt|usr)/\S*", file.read_text())
        assert found == [], file
