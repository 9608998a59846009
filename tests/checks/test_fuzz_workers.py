"""Fuzzing by several processes: what they report, and what is told of those that end early."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from steps.checks import fuzz, fuzz_workers
from steps.checks.fuzz_cases import FuzzCase
from steps.checks.fuzz_workers import Totals, Worker, supervised
from steps.driver.machines import Simulator
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


def _worker(seconds: float, sent: list[tuple[Any, ...]]) -> Worker:
    line, until = SimpleNamespace(value=b""), time.monotonic() + seconds
    return Worker(Simulator(), [1, 16], [0, 1], until, line, sent.append)


def test_a_worker_counts_its_products_and_its_seconds(monkeypatch: Any) -> None:
    """Every case is right."""
    monkeypatch.setattr(fuzz_workers, "SHARED", 2)
    sent: list[tuple[Any, ...]] = []
    worker = _worker(10, sent)
    worker.run()
    worker.tell_sum()
    assert {one[0] for one in sent} == {"sum"}, sent
    assert sum(products for _, products, _, _ in sent) > 1
    assert set().union(*(spent for *_, spent in sent)) >= {"drawing", "multiplying", "judging"}
    FuzzCase.parse(worker.at)


@pytest.mark.parametrize("alone", [True, False])
def test_what_a_worker_finds_is_judged_again_alone(alone: bool, monkeypatch: Any) -> None:
    def complaints(case: Any, machine: Any, weights: Any = None, spent: Any = None) -> list[str]:
        return ["it is off"] if alone or weights else []

    monkeypatch.setattr(fuzz, "complaints", complaints)
    sent: list[tuple[Any, ...]] = []
    _worker(0.2, sent).run()
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
