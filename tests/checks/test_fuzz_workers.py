"""Fuzzing by several processes: what they report, and what is told of those that end early."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import pytest
from numba import cuda

from steps.checks import fuzz, fuzz_workers
from steps.checks.fuzz_cases import FuzzCase, dealt, works
from steps.checks.fuzz_workers import Goal, Totals, Worker, gpus_of, supervised
from steps.driver import machines
from steps.driver.machines import Simulator
from steps.registry import kernel_of, ladder
from tests.checks.pretended import pretend


def test_processes_are_added_up_and_those_that_die_are_told() -> None:
    told: list[tuple[str, list[str]]] = []
    reports: list[int] = []
    ends = ("well", "killed", "exits", "hangs", "wrong")
    begin = time.monotonic()
    totals = supervised(
        *(pretend, (ends,), len(ends), begin + 15),
        lambda line, sentences: told.append((line, sentences)),
        lambda totals: reports.append(totals.products),
    )
    assert time.monotonic() - begin < 60, "what hangs is stopped"
    assert totals == Totals(
        10, {"code", *(f"code {i}" for i in range(5))}, {"judging": 2.5}, len(told)
    )
    assert sorted(told) == [
        ("case 1", ["a process was ended by SIGKILL at this case"]),
        ("case 2", ["a process ended with exit status 3 at this case"]),
        ("case 3", ["a process is still at this 60 s later"]),
        ("case x", ["is off"]),
    ]
    assert max(reports) == 10


def test_an_error_of_a_process_is_told_where_it_was(monkeypatch: Any) -> None:
    """Such as here, where there is no GPU, or it cannot be used."""

    def no_gpu() -> None:
        raise RuntimeError("no CUDA GPU can be used here")

    class Exited(BaseException):
        pass

    def ended(status: int) -> None:
        raise Exited

    chosen: list[int] = []
    monkeypatch.setattr(machines, "Gpu", no_gpu)
    monkeypatch.setattr(cuda, "select_device", chosen.append)
    monkeypatch.setattr(fuzz_workers.os, "_exit", ended)
    monkeypatch.setattr(fuzz_workers.signal, "signal", lambda *_: None)
    sent: list[tuple[Any, ...]] = []
    line, pipe = SimpleNamespace(value=b"case 7"), SimpleNamespace(send=sent.append)
    with pytest.raises(Exited):
        fuzz_workers._work(8, line, pipe, (1,), 0, 12, (4, 5, 7), Goal(60, time.monotonic() + 60))
    assert chosen == [7]
    (kind, at, (sentence,)), end = sent
    assert (kind, at, end) == ("wrong", "case 7", ("end",))
    assert re.match(r"RuntimeError: no CUDA GPU can be used here \(.*workers\.py:\d+\)", sentence)


def _worker(seconds: float, sent: list[tuple[Any, ...]], line: Any = None) -> Worker:
    some = works([kernel_of(number) for number in (1, 16)], None)
    line, goal = line or SimpleNamespace(value=b""), Goal(seconds, time.monotonic() + seconds)
    return Worker(Simulator(), some, [0, 1], goal, line, sent.append)


def test_a_worker_counts_its_products_and_its_seconds(monkeypatch: Any) -> None:
    """Every case is right."""
    sent: list[tuple[Any, ...]] = []
    line = SimpleNamespace(value=b"")
    worker = _worker(10, sent, line)
    worker.run()
    worker.tell_sum()
    assert {one[0] for one in sent} == {"sum"}, sent
    assert sum(products for _, products, _, _ in sent) > 1
    spent = {"drawing", "packing", "multiplying", "multiplying in float64", "judging"}
    assert spent <= {what for *_, spent in sent for what in spent}
    FuzzCase.parse(line.value.decode())


@pytest.mark.parametrize("alone", [True, False])
def test_what_a_worker_finds_is_judged_again_alone(alone: bool, monkeypatch: Any) -> None:
    def complaints(case: Any, machine: Any, weights: Any = None, spent: Any = None) -> list[str]:
        return ["it is off"] if alone or weights else []

    monkeypatch.setattr(fuzz, "complaints", complaints)
    sent: list[tuple[Any, ...]] = []
    _worker(3, sent).run()
    kind, line, sentences = sent[0]
    assert kind == "wrong"
    assert FuzzCase.parse(line)
    again = "(judged again, by NumPy and by itself, it is right)"
    assert sentences == (["it is off"] if alone else ["it is off", again])


def test_a_worker_ends_when_the_gpu_is_lost(monkeypatch: Any) -> None:
    monkeypatch.setattr(fuzz, "judged", lambda *_: (["CudaAPIError: gone"], True))
    sent: list[tuple[Any, ...]] = []
    _worker(60, sent).run()
    (one,) = sent
    assert one[0] == "wrong"
    assert one[2] == ["CudaAPIError: gone"]


class Pretended(Simulator):
    """A GPU of compute capability 9.0, as far as a worker looks before it multiplies."""

    cc = (9, 0)


@pytest.mark.parametrize("count", [0, 3000])
def test_a_worker_compiles_for_half_of_its_time(count: int, monkeypatch: Any) -> None:
    """Or for less, where products would be too few. What is on disk is used at once; a kernel is
    asked for once."""
    clock, asked, compilations, judged = [0.0], [], [], []
    code = SimpleNamespace(cubin=b"code")

    def find(*key: Any) -> Any:
        asked.append(key)
        return code if len(asked) % 4 == 0 else None

    def compiled(*key: Any) -> Any:
        clock[0] += 8
        compilations.append(key)
        return code

    def is_right(case: FuzzCase, *_: Any) -> tuple[list[str], bool]:
        clock[0] += 0.05 if count else 0.02
        judged.append(case)
        return [], False

    monkeypatch.setattr(fuzz_workers, "monotonic", lambda: clock[0])
    monkeypatch.setattr(fuzz_workers.kernel_cache, "find", find)
    monkeypatch.setattr(fuzz_workers, "compiled", compiled)
    monkeypatch.setattr(fuzz_workers, "Weights", lambda *_, **__: None)
    monkeypatch.setattr(fuzz, "judged", is_right)
    some = works([kernel_of(step.number) for step in ladder()], (9, 0))
    line, sent = SimpleNamespace(value=b""), []
    left = get_context("spawn").Value("q", count) if count else None
    Worker(Pretended(), some, [0, 1], Goal(200, 200, count, left), line, sent.append).run()
    if count:
        assert len(judged) == count, "and no more"
        assert 3 <= len(compilations) <= 7, "150 s of 200 multiply"
    else:
        assert 9 <= len(compilations) <= 14, "a product of some kernels needs two"
        assert len(judged) > 300 * len(compilations)
        assert len({(c.step, c.family, c.format, c.a, c.c) for c in judged}) > 5
    assert len(asked) == len(set(asked)), "asking takes long"
    assert {c.k for c in judged} != {judged[0].k}
    assert sent


def test_all_works_are_dealt_and_no_kernel_twice() -> None:
    some = works([kernel_of(step.number) for step in ladder()], (9, 0))
    hands = [dealt(some, index, 64, 7) for index in range(64)]
    assert sorted(str(work) for hand in hands for work in hand) == sorted(map(str, some))
    assert len({work.step for work in hands[0]}) > 1
    one = next(work for work in some if (work.step, work.format) == (13, "q4_1"))
    also = replace(one, format="q4_k")  # stored as q4_1
    assert [one in hand for hand in hands] == [also in hand for hand in hands]
    assert all(dealt(some[:1], index, 64, 7) == some[:1] for index in range(64))


def test_processes_take_gpus_of_one_kind(monkeypatch: Any) -> None:
    three = [SimpleNamespace(id=i, compute_capability=cc) for i, cc in enumerate([(9, 0), (8, 0)])]
    monkeypatch.setattr(cuda, "gpus", [*three, SimpleNamespace(id=2, compute_capability=(9, 0))])
    assert gpus_of((9, 0)) == [0, 2]
