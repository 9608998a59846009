"""A bench in parts: what a part has, how parts become a run, and a process for each GPU."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qformats import WEIGHT_FORMATS
from reference import BENCH_SHAPES
from results.measure import shards as parts
from results.record import schema as record
from results.record.schema import Environment, Git, Peer, RecordError, Run
from steps import registry
from steps.checks.select import UsageError, select
from steps.cli import bench as matrix
from steps.cli import main as cli
from tests.results.test_bench import asked
from tests.results.test_record import make_duel, make_row

ENV = Environment(
    gpu="a GPU", git=Git(sha="1234abcd", dirty=False), command="bench", utc="2026-01-02T03:04:05Z"
)


@pytest.fixture(scope="module")
def whole() -> tuple[parts.Group, ...]:
    return parts.groups(select(registry.ladder(), list(WEIGHT_FORMATS)), list(BENCH_SHAPES))


# --- what a part has ------------------------------------------------------------------------------


def test_a_group_is_a_formats_weights_of_one_size(whole) -> None:
    assert len(whole) == 5 * 3
    for group in whole:
        assert {work.format for work in group.works} == {group.format}
        assert len({shape[1:] for shape in group.shapes}) == 1
    assert {s for group in whole for s in group.shapes} == set(BENCH_SHAPES)
    assert [group.format for group in whole[::3]] == list(WEIGHT_FORMATS), "in their order"


@pytest.mark.parametrize("count", [1, 2, 4, 15, 20])
def test_every_group_is_in_one_part_and_none_has_much_more(whole, count: int) -> None:
    each = [parts.part_of(whole, (number, count)) for number in range(1, count + 1)]
    assert sorted((*g.shapes[0][1:], g.format) for own in each for g in own) == sorted(
        (*g.shapes[0][1:], g.format) for g in whole
    )
    costs = [sum(group.cost for group in own) for own in each]
    assert max(costs) <= sum(costs) / count + max(group.cost for group in whole)
    assert parts.part_of(whole, None) == whole
    formats = [len({group.format for group in own}) for own in each]
    assert sum(formats) < len(WEIGHT_FORMATS) + count, "a format is cut where a part ends"


def test_the_shapes_of_a_bench_can_be_narrowed() -> None:
    def shapes(m: int | None, n: int | None, k: int | None) -> list[Any]:
        return matrix.shapes_of(Namespace(m=m, n=n, k=k))

    assert shapes(None, None, None) == list(BENCH_SHAPES)
    assert shapes(None, 14336, 4096) == [s for s in BENCH_SHAPES if s[1:] == (14336, 4096)]
    assert {s[0] for s in shapes(16, None, None)} == {16}
    assert shapes(7, None, None) == [(7, 4096, 4096)], "not of the bench: the one shape"
    with pytest.raises(UsageError, match="multiple of the block of 32"):
        shapes(None, None, 33)


def test_a_bench_has_duels_at_more_m_than_rows(whole) -> None:
    def shapes(m: int | None, no_duels: bool = False, group: parts.Group = whole[0]) -> list[Any]:
        asked = Namespace(m=m, no_peers=False, no_duels=no_duels)
        works, found = matrix._duels(group, asked)
        assert [work.step.number for work in works] == ([12, 13, 14] if found else [])
        return list(found)

    assert {m for m, _, _ in shapes(None)} == {32, 64, 128, 512, 4096}
    assert {shape[1:] for shape in shapes(None)} == {whole[0].shapes[0][1:]}
    assert not shapes(None, no_duels=True)
    one = parts.Group(whole[0].works, ((512, 4096, 4096),))
    assert shapes(512, group=one) == [(512, 4096, 4096)]
    other = parts.Group(whole[0].works, ((512, 64, 128),))
    assert shapes(None, group=other) == [(512, 64, 128)]


@pytest.mark.parametrize("text", ["0/4", "5/4", "2", "a/b", "1/0"])
def test_a_part_that_is_none_is_one_sentence(text: str, capsys) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["bench", "--part", text])
    assert left.value.code == 2
    assert "is no part such as 2/4" in capsys.readouterr().err


# --- put together ---------------------------------------------------------------------------------


def run_of(name: str, **env: Any) -> Run:
    peer = Peer(
        peer="ggml", format=name, M=512, N=4096, K=4096, us=80.0, same_run=True, source="measured"
    )
    duels = (make_duel(format=name),)
    return Run(env=replace(ENV, **env), rows=(make_row(format=name),), peers=(peer,), duels=duels)


def test_parts_become_one_run(tmp_path: Path, capsys) -> None:
    one, other = run_of("q4_0"), run_of("q8_0", utc="2026-01-02T03:00:00Z")
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for run, file in zip((one, other), files, strict=True):
        record.write(run, path=file)
    out = tmp_path / "whole.json"
    assert cli.main(["join", *map(str, files), "--out", str(out)]) == 0
    found = record.read(out)
    assert [row.format for row in found.rows] == ["q4_0", "q8_0"]
    assert [duel.format for duel in found.duels] == ["q4_0", "q8_0"]
    assert [peer.format for peer in found.peers] == ["q4_0", "q8_0"]
    assert found.env.utc == "2026-01-02T03:00:00Z", "when the first of them began"
    assert "2 rows, 2 duels" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"gpu": "another"}, "gpu is a GPU in the first and another"),
        ({"git": Git(sha="feedbeef", dirty=False)}, "git is"),
        ({"driver": "1"}, "driver is None in the first and 1"),
        ({"power_limit_w": 350.0}, "power_limit_w"),
    ],
)
def test_what_is_not_of_one_run_is_refused(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(RecordError, match=named):
        parts.joined([run_of("q4_0"), run_of("q8_0", **changed)])


def test_nothing_may_be_in_two_parts() -> None:
    one, other = run_of("q4_0"), run_of("q8_0")
    with pytest.raises(RecordError, match="measured twice"):
        parts.joined([one, replace(other, rows=one.rows)])
    with pytest.raises(RecordError, match="fought twice"):
        parts.joined([one, replace(other, duels=one.duels)])
    with pytest.raises(RecordError, match="figure of ggml in q4_0"):
        parts.joined([one, replace(other, peers=one.peers)])


# --- a process for each GPU -----------------------------------------------------------------------


class Started:
    """A bench that writes its part at once and has ended at the second question."""

    def __init__(self, part: Run | None, status: int, command: list[str], **how: Any) -> None:
        self.command, self.how, self.returncode, self._asked = command, how, status, 0
        self.cores = os.sched_getaffinity(0)
        if part is not None:
            record.write(part, path=Path(command[command.index("--out") + 1]))
        how["stderr"].write(f"{part.rows[0].format if part else 'nothing'} is done\n")

    def poll(self) -> int | None:
        self._asked += 1
        return self.returncode if self._asked > 1 else None


@pytest.fixture
def started(monkeypatch) -> list[Started]:
    monkeypatch.setattr(parts, "visible", lambda: ["3", "7"])
    monkeypatch.setattr(parts, "POLL_SECONDS", 0.0)
    return []


def begin(started: list[Started], runs: list[Run | None], status: int = 0) -> Any:
    def start(command: list[str], **how: Any) -> Started:
        started.append(Started(runs[len(started)], status, command, **how))
        return started[-1]

    return start


def test_each_gpu_has_a_process_with_cores_of_its_own(whole, started, tmp_path, capsys) -> None:
    args = asked(steps=["5"], gpus=2, out=tmp_path / "run.json", seconds=9, m=None, n=None, k=None)
    args.no_peers, args.no_duels = False, True
    before = os.sched_getaffinity(0)
    runs: list[Run | None] = [run_of("q4_0"), run_of("q8_0")]
    found, path, status = parts.on_gpus(args, whole, begin(started, runs))
    assert (path, status) == (tmp_path / "run.json", 0)
    assert record.read(path) == found
    assert found.env.gpus == 2
    assert [row.format for row in found.rows] == ["q4_0", "q8_0"]
    assert [one.how["env"]["CUDA_VISIBLE_DEVICES"] for one in started] == ["3", "7"]
    assert capsys.readouterr().err == "q4_0 is done\nq8_0 is done\n"
    assert sorted(tmp_path.iterdir()) == [path], "the parts are gone"
    assert os.sched_getaffinity(0) == before
    if len(before) > 1:
        assert not started[0].cores & started[1].cores
    first = started[0].command
    assert first[:5] == [sys.executable, "-m", "steps", "bench", "5"]
    assert first[first.index("--part") + 1] == "1/2"
    asks = cli._parser().parse_args(first[3:])  # what it is told is what was asked for
    assert (asks.seconds, asks.format, asks.no_duels, asks.no_peers) == (9, ["q4_0"], True, False)
    assert (asks.m, asks.n, asks.k, asks.gpus, asks.seed) == (None, None, None, None, 0)


def test_what_one_gpu_has_measured_is_kept_when_the_other_fails(whole, started, tmp_path) -> None:
    args = asked(gpus=2, out=tmp_path / "run.json", seconds=None, no_peers=True, no_duels=True)
    found, _, status = parts.on_gpus(args, whole, begin(started, [run_of("q5_0"), None], 1))
    assert status == 1
    assert [row.format for row in found.rows] == ["q5_0"]
    started.clear()
    with pytest.raises(UsageError, match="nothing was measured on 2 GPUs"):
        parts.on_gpus(args, whole, begin(started, [None, None], 1))


def test_more_gpus_than_there_are_is_one_sentence(whole, started) -> None:
    with pytest.raises(UsageError, match="3 GPUs are asked for, and 2 can be used here"):
        parts.on_gpus(asked(gpus=3), whole, begin(started, []))
