"""Fuzzing by several processes: what they report, and what is told of those that end early."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from numba import cuda

from steps.checks import fuzz, fuzz_workers
from steps.checks.fuzz_cases import FuzzCase, dealt, works
from steps.checks.fuzz_workers import Totals, gpus_of, multiply, supervised
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
    assert totals == Totals(10, {"work", *(f"work {i}" for i in range(5))}, len(told))
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
        fuzz_workers._work(*(8, line, pipe, (1,), 0, 12, (4, 5, 7), time.monotonic() + 60, None))
    assert chosen == [7]
    ((kind, at, (sentence,)),) = sent
    assert (kind, at) == ("wrong", "case 7")
    assert re.match(r"RuntimeError: no CUDA GPU can be used here \(.*workers\.py:\d+\)", sentence)


def _multiplied(seconds: float, most: int | None = None) -> tuple[list[tuple[Any, ...]], str]:
    """(what is sent, the last line) of a worker in the simulator."""
    some = works([kernel_of(number) for number in (1, 16)], None)
    line, sent = SimpleNamespace(value=b""), []
    until = time.monotonic() + seconds
    multiply(Simulator(), some, [0, 1], until, most, line, sent.append)
    return sent, line.value.decode()


def test_a_worker_counts_its_products_and_ends_with_the_last() -> None:
    """Every case is right."""
    sent, line = _multiplied(100, 3)
    assert [kind for kind, _ in sent] == ["product"] * 3, sent
    assert FuzzCase.parse(line)
    assert {work.split()[0] for _, work in sent} <= {"step=1", "step=16"}


@pytest.mark.parametrize("alone", [True, False])
def test_what_a_worker_finds_is_judged_again_alone(alone: bool, monkeypatch: Any) -> None:
    def complaints(case: Any, machine: Any, weights: Any = None) -> list[str]:
        return ["it is off"] if alone or weights else []

    monkeypatch.setattr(fuzz, "complaints", complaints)
    (kind, line, sentences), (product, _), *_ = _multiplied(100, 2)[0]
    assert (kind, product) == ("wrong", "product")
    assert FuzzCase.parse(line)
    again = "(judged again, by itself, it is right)"
    assert sentences == (["it is off"] if alone else ["it is off", again])


def test_a_worker_ends_when_the_gpu_is_lost(monkeypatch: Any) -> None:
    monkeypatch.setattr(fuzz, "judged", lambda *_: (["CudaAPIError: gone"], True))
    (wrong, _), _ = _multiplied(60)
    assert (wrong[0], wrong[2]) == ("wrong", ["CudaAPIError: gone"])


def test_a_worker_ends_when_its_time_is_up(monkeypatch: Any) -> None:
    monkeypatch.setattr(fuzz, "judged", lambda *_: ([], False))
    begin = time.monotonic()
    sent, _ = _multiplied(0.5)
    assert 0.5 <= time.monotonic() - begin < 10
    assert sent


class Pretended(Simulator):
    """A GPU of compute capability 9.0, as far as a worker looks before it multiplies."""

    cc = (9, 0)


def test_a_worker_compiles_for_half_of_its_time(monkeypatch: Any) -> None:
    """Meanwhile it multiplies what it has kernels for; each is compiled once."""
    clock, compilations, judged = [0.0], [], []

    def compiled(*key: Any) -> None:
        clock[0] += 8
        compilations.append(key)

    def is_right(case: FuzzCase, *_: Any) -> tuple[list[str], bool]:
        clock[0] += 0.2
        judged.append(case)
        return [], False

    monkeypatch.setattr(fuzz_workers, "monotonic", lambda: clock[0])
    monkeypatch.setattr(fuzz_workers, "compiled", compiled)
    monkeypatch.setattr(fuzz_workers, "Weights", lambda *_, **__: object())
    monkeypatch.setattr(fuzz, "judged", is_right)
    some = works([kernel_of(step.number) for step in ladder()], (9, 0))
    line, sent = SimpleNamespace(value=b""), []
    multiply(Pretended(), some, [0, 1], 200.0, None, line, sent.append)
    assert 9 <= len(compilations) <= 14, "a product of some kernels needs two"
    assert len(compilations) == len(set(compilations))
    assert len(judged) == len(sent) > 30 * len(compilations)
    assert len({(c.step, c.family, c.format, c.a, c.c) for c in judged}) > 5
    assert {c.k for c in judged} != {judged[0].k}


def test_processes_share_a_count(monkeypatch: Any) -> None:
    shares: list[int] = []

    class Exited(BaseException):
        pass

    def ended(status: int) -> None:
        assert status == 0
        raise Exited

    monkeypatch.setattr(machines, "Gpu", lambda: SimpleNamespace(cc=(9, 0)))
    monkeypatch.setattr(cuda, "select_device", lambda _: None)
    monkeypatch.setattr(fuzz_workers, "multiply", lambda *given: shares.append(given[4]))
    monkeypatch.setattr(fuzz_workers.os, "_exit", ended)
    monkeypatch.setattr(fuzz_workers.signal, "signal", lambda *_: None)
    for index in range(3):
        line, pipe = SimpleNamespace(value=b""), SimpleNamespace(send=print)
        with pytest.raises(Exited):
            fuzz_workers._work(index, line, pipe, (1,), 0, 3, (0,), 9.0, 100)
    assert shares == [34, 33, 33]


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
