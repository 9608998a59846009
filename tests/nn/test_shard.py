"""Layers that ranks share: several processes on the CPU, over gloo. The cases are in
`shard_cases.py`; here each of them is a test for each number of ranks."""

from __future__ import annotations

import re
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: it is an extra")
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

from steps.nn import all_reduce  # noqa: E402
from steps.nn.all_reduce import ONE_SHOT, AllReduce  # noqa: E402
from steps.nn.linear import QuantLinear  # noqa: E402
from steps.nn.shard import bounds  # noqa: E402
from tests.nn import shard_cases  # noqa: E402
from tests.nn.ranks import run_on_ranks  # noqa: E402

NAMES = [one.__name__.removeprefix("case_") for one in shard_cases.CASES]
RANKS = (2, 3)


@pytest.fixture(scope="module")
def found(tmp_path_factory: Any) -> Any:
    """count -> the traceback of each case on each rank."""
    kept: dict[int, list[dict[str, str]]] = {}

    def of(count: int) -> list[dict[str, str]]:
        if count not in kept:
            folder: Path = tmp_path_factory.mktemp(f"ranks-{count}")
            kept[count] = run_on_ranks(count, shard_cases.run, folder)
        return kept[count]

    return of


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("count", RANKS)
@pytest.mark.parametrize("name", NAMES)
def test_on_ranks(found: Any, count: int, name: str) -> None:
    for rank, one in enumerate(found(count)):
        assert not one[f"case_{name}"], f"rank {rank}: {one[f'case_{name}']}"


@pytest.mark.parametrize(("units", "ranks"), [(9, 2), (9, 4), (8, 8), (7, 1), (448, 3)])
def test_ranks_have_as_many_units_as_the_others_or_one_more(units: int, ranks: int) -> None:
    at = bounds(units, ranks)
    counts = {b - a for a, b in pairwise(at)}
    assert (at[0], at[-1], len(at)) == (0, units, ranks + 1)
    assert max(counts) - min(counts) == bool(units % ranks)


def test_without_ranks_there_is_nothing_to_share() -> None:
    with pytest.raises(ValueError, match=r"no ranks to share .*: call .*init_process_group"):
        QuantLinear(64, 64).shard(None, "column")


def test_small_sums_take_symmetric_memory_and_others_the_library(monkeypatch: Any) -> None:
    """What a GPU with symmetric memory would be asked for; torch's own operator is not run."""
    asked: list[Any] = []
    made = object.__new__(AllReduce)
    made.group = type("Group", (), {"group_name": "7"})()
    made._buffer, made._exchange = torch.zeros(ONE_SHOT // 4), None
    schema = torch.ops.symm_mem.one_shot_all_reduce_copy.default._schema
    assert [one.name for one in schema.arguments] == [
        *("symm_buffer", "local_input"),
        *("reduce_op", "group_name"),
    ]

    def one_shot(buffer: Any, y: Any, *rest: Any) -> Any:
        assert buffer.shape == y.shape
        assert buffer.data_ptr() == made._buffer.data_ptr()
        asked.append(rest)
        return y + 1

    ops = type("Ops", (), {"one_shot_all_reduce_copy": staticmethod(one_shot)})
    monkeypatch.setattr(torch.ops, "symm_mem", ops)
    monkeypatch.setattr(
        torch.distributed,
        "all_reduce",
        lambda y, group: asked.append((y.dtype, group)) or y.add_(2),
    )
    assert made(torch.zeros(3, 8)).eq(1).all()
    assert asked.pop() == ("sum", "7")
    for y in (torch.zeros(ONE_SHOT // 4 + 4), torch.zeros(8, dtype=torch.float16)):
        assert made(y).eq(2).all()
        assert asked.pop() == (y.dtype, made.group)
    assert made.is_small(ONE_SHOT // 4)
    assert not made.is_small(ONE_SHOT // 4 + 1)


def test_rows_are_copied_to_where_the_other_reads_them(monkeypatch: Any) -> None:
    """Two exchanges in one process, with each other's memory, and no GPU: 5 rows, 2 and 3."""
    monkeypatch.setattr(all_reduce, "EXCHANGED", 64)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: group)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    stream = SimpleNamespace(wait_event=lambda done: said.append(done))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda side: nullcontext())
    memory = [torch.zeros(128, dtype=torch.uint8).split(64) for _ in range(2)]
    said: list[Any] = []
    ranks = []
    for rank in range(2):
        exchange = object.__new__(all_reduce.Exchange)
        exchange._slots = list(zip(memory[rank], memory[1 - rank], strict=True))
        exchange._handle = SimpleNamespace(barrier=lambda channel: said.append(channel))
        exchange._side = SimpleNamespace(
            device=None,
            wait_stream=lambda one: said.append("wait"),
            record_event=lambda: "done",
        )
        made = object.__new__(AllReduce)
        made.group, made._buffer, made._exchange = rank, None, exchange
        ranks.append(made)
    rows = torch.arange(20.0).view(5, 4).half()
    for _ in range(3):  # an odd number of transfers, so each is in both slots
        sums = [one.scatter(rows * 10**rank) for rank, one in enumerate(ranks)]
        assert said == ["wait", 0, 1] * 2
        for rank, terms in enumerate(sums):
            mine, theirs = terms()
            own = rows[2 * rank : 2 + 3 * rank]
            assert torch.equal(mine, own * 10**rank)
            assert torch.equal(theirs, own * 10 ** (1 - rank))
        assert said[6:] == ["done"] * 2
        rooms = [one.room(5, 4, torch.half, None) for one in ranks]
        for one, x in zip(ranks, rooms, strict=True):
            one.own(x).copy_(one.own(rows))
        arrived = [one.gather(x) for one, x in zip(ranks, rooms, strict=True)]
        for x in arrived:
            assert torch.equal(x(), rows)
        pair = [one.begin(rows[:3] + rank) for rank, one in enumerate(ranks)]
        for rank, begun in enumerate(pair):
            assert [one[0, 0] for one in begun()] == [rank, 1 - rank]
        said.clear()
    assert ranks[0].room(8, 4, torch.half, None).data_ptr() == memory[0][1].data_ptr()
    too_many = ranks[0].room(9, 4, torch.half, None)
    assert too_many.untyped_storage().nbytes() == 72, "memory of its own"


def test_multicast_is_asked_for_nowhere() -> None:
    """No operator that needs the switch to add up, and torch is told not to map such memory."""
    import steps.nn

    for path in Path(steps.nn.__file__).parent.glob("*.py"):
        assert not re.search(r"multimem|multicast_ptr", path.read_text(encoding="utf-8")), path


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_a_model_of_transformers_is_shared_layer_by_layer(tmp_path: Path) -> None:
    """Nine blocks of hidden features, and 99 logits, on two ranks."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    for alone, shared in run_on_ranks(2, shard_cases.of_transformers, tmp_path):
        assert alone.shape == shared.shape == (1, 12, 99)
        assert not torch.equal(alone, shared), "sums are of two"
        torch.testing.assert_close(alone, shared, rtol=1e-4, atol=1e-4 * float(alone.std()))


@pytest.mark.gpu
def test_layers_on_two_gpus(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    kinds = "cpu:gloo,cuda:nccl"
    for how in run_on_ranks(2, shard_cases.on_gpus, tmp_path, backend=kinds):
        assert how.endswith("nccl"), how
        assert "exchanged" in how, how
