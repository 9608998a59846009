"""Layers that ranks share: several processes on the CPU, over gloo. The cases are in
`shard_cases.py`; here each of them is a test for each number of ranks."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from steps.nn import fsdp as steps_fsdp
from steps.nn.all_reduce import ONE_SHOT, AllReduce
from steps.nn.linear import QuantLinear
from steps.nn.shard import bounds
from tests.nn import shard_cases
from tests.nn.ranks import run_on_ranks

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


def test_multicast_is_asked_for_nowhere() -> None:
    """No operator that needs the switch to add up, and torch is told not to map such memory."""
    import steps.nn

    for path in Path(steps.nn.__file__).parent.glob("*.py"):
        assert not re.search(r"multimem|multicast_ptr", path.read_text(encoding="utf-8")), path


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_a_model_of_transformers_is_shared_layer_by_layer(tmp_path: Path) -> None:
    """Nine blocks of hidden features, and 99 logits, on two ranks."""
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


@pytest.mark.gpu
def test_training_on_two_gpus(tmp_path: Path) -> None:
    """Over NCCL. Four matrices of 4 million weights: with FSDP2 a GPU holds half of them, and two
    whole ones at a time."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    if steps_fsdp.too_old():
        pytest.skip(f"needs torch {steps_fsdp.FIRST_TORCH}")
    kinds = "cpu:gloo,cuda:nccl"
    for bytes_of in run_on_ranks(2, shard_cases.of_training, tmp_path, backend=kinds):
        alone, fsdp = (bytes_of[name]["before"] for name in ("alone", "fsdp"))
        assert alone > 9.4e6
        assert fsdp < 0.6 * alone, bytes_of
