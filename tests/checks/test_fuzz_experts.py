"""Fuzzing of experts: a short run, what is drawn, and that what is made wrong is found."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from steps.checks import fuzz, fuzz_workers
from steps.checks.fuzz_experts import (
    OUTPUTS,
    ROUTING,
    SANITIZED,
    SIMULATED,
    TERMS,
    WEIGHTS,
    ExpertsCase,
    ExpertsWeights,
    _Problem,
    complaints,
    sharing,
)
from steps.checks.select import UsageError
from steps.driver.machines import Simulator
from steps.kernels.experts import few
from steps.product.experts import choose

SMALL = "experts=3 format=q4_0 t=2 s=2 n=20 k=64 seed=1"
RNG = np.random.default_rng(5)


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread block of 512 threads sorts all ids: of many the simulator does little else."""
    monkeypatch.setattr(few, "multiprocessors", lambda: 3)


@pytest.mark.parametrize(
    "line",
    [
        *(
            "experts=2 format=q5_k t=3 s=2 n=18 k=256 routing=none ids=int64 nan=1",
            SMALL + " nan=1",
        ),
        "experts=4 format=nvfp4 t=1 s=4 n=32 k=64 gate=clamped bias=float32 c=bfloat16",
        "experts=2 format=q4_1 t=3 s=3 n=17 k=160 a=float32 per_slot=1 router=float16 routing=one",
        "experts=2 format=q8_0 t=12 s=1 n=40 k=64 a=bfloat16 routing=same order=2",
    ],
)
def test_a_short_run(line: str) -> None:
    case = ExpertsCase.parse(line)
    assert ExpertsCase.parse(str(case)) == case
    assert not complaints(case, Simulator(case.order))


def test_what_is_drawn_can_be_run_and_stays_in_bounds() -> None:
    seen: set[Any] = set()
    for simulated in (True, False):
        for _ in range(300):
            first, second = sharing(RNG, simulated, 2)
            assert ExpertsCase.parse(str(first)) == first
            assert first.request == second.request
            assert (first.w, first.data) == (second.w, second.data)
            terms = first.t * first.s * first.n * first.k
            smallest = max(first.k, 256) * 32  # of a K-quant and a gate
            assert terms <= max(SIMULATED if simulated else TERMS, first.t * first.s * smallest)
            assert simulated or first.experts * first.n * first.k <= max(
                WEIGHTS, first.experts * smallest
            )
            assert first.t * first.s * first.n <= max(OUTPUTS, first.t * first.s * 32)
            kernel = choose(first.request, Simulator()).kernel.name
            seen |= {first.routing, first.data, first.gate, first.router != "", first.nan, kernel}
    assert seen >= {*ROUTING, "normal", "integer", "silu", "clamped", True, "few", "many"}


def test_ids_are_routed_as_they_are_named() -> None:
    def ids(routing: str) -> np.ndarray:
        case = ExpertsCase.parse(f"experts=9 format=q4_0 t=60 s=4 n=1 k=32 routing={routing}")
        return _Problem(case, ExpertsWeights(case, None)).ids

    assert len(np.unique(ids("one"))) == 1
    assert (ids("same") == ids("same")[0]).all()
    assert (ids("skewed") == 8).mean() > 0.6
    assert not ((ids("none") >= 0) & (ids("none") < 9)).any()
    found = ids("random")
    assert {*range(-1, 10)} <= {*found.ravel().tolist()}, "also -1 and E"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("experts=2 format=q4_0 t=1", "the case lacks s, n, k"),
        ("experts=2 format=q2_k t=1 s=1 n=1 k=256", "format=q2_k is none of q4_0"),
        (SMALL + " gate=relu", "gate=relu is none of silu, clamped"),
        (SMALL + " gate=silu", "N=20 rows of gates and ups"),
        ("experts=2 format=q4_0 t=1 s=1 n=1 k=33", "K=33 is not a multiple of the block of 32"),
        (SMALL + " step=1", "'step=1' is none of experts=, format="),
    ],
)
def test_a_line_of_no_case_is_refused(line: str, why: str) -> None:
    with pytest.raises(UsageError) as refused:
        ExpertsCase.parse(line)
    assert why in str(refused.value)


def test_the_sanitizer_sees_every_kernel() -> None:
    seen = {
        launch.kernel.__name__
        for line in SANITIZED
        for launch in choose(ExpertsCase.parse(line).request, Simulator()).launches()
    }
    assert seen >= {"few", "summed", "weighted", "experts_many", "route"}, seen


class Wrong(Simulator):
    """Changes all of C, its guards among it, after each launch of the product."""

    def __init__(self, change: Callable[[np.ndarray, int], None]) -> None:
        super().__init__()
        self._change, self._runs = change, 0

    def run(self, launch: Any) -> None:
        super().run(launch)
        whole = next(x.base for x in launch.args if getattr(x, "shape", None) == (2, 2, 20))
        self._runs += 1
        self._change(whole, self._runs)


def _set(at: int, to: float) -> Callable[[np.ndarray, int], None]:
    def change(whole: np.ndarray, _: int) -> None:
        whole[at] = to

    return change


def _other_bits(whole: np.ndarray, run: int) -> None:
    if run == 2:
        whole[130] = np.nextafter(whole[130], np.float32(0))


@pytest.mark.parametrize(
    ("change", "line", "said"),
    [
        (_set(127, 0), SMALL, "values beside C are written"),
        (_set(-128, 0), SMALL, "values beside C are written"),
        (_set(129, 9), SMALL, "1 of 80 outputs are beyond their bound, the first at (0, 0, 1): go"),
        (_set(129, np.nan), SMALL, "1 of 80 outputs are NaN where they must not be"),
        (_set(129, np.inf), SMALL, "1 of 80 outputs are beyond their bound"),
        (_set(129, 9), SMALL + " routing=none", "1 of 80 outputs are NaN where they must not be"),
        (_other_bits, SMALL, "again C has other bits, the first at (0, 0, 2)"),
    ],
)
def test_what_is_wrong_is_found(
    change: Callable[[np.ndarray, int], None], line: str, said: str
) -> None:
    found, lost = fuzz.judged(ExpertsCase.parse(line), Wrong(change))
    assert len(found) == 1, found
    assert found[0].startswith(said), found
    assert not lost


def test_products_beyond_float16_may_be_infinite() -> None:
    line = "experts=2 format=q4_0 t=1 s=1 n=64 k=4096 c=float16 gate=silu"
    case = ExpertsCase.parse(line)
    problem = _Problem(case, ExpertsWeights(case, Simulator()))
    beyond = problem.right()[2]
    assert beyond.shape == (1, 1, 32)
    assert not complaints(case, Simulator())
    problem.a[...] *= np.float16(100)
    problem._values *= np.float32(100)
    assert problem.right()[2].any()


def test_integers_must_be_exact() -> None:
    def off(whole: np.ndarray, _: int) -> None:
        whole[129] += 2.0**-3

    case = ExpertsCase.parse(SMALL + " data=integer")
    assert not complaints(case, Simulator())
    (said,) = complaints(case, Wrong(off))
    assert "by 0 at most" in said


def test_operands_that_change_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Changing(Simulator):
        def run(self, launch: Any) -> None:
            super().run(launch)
            launch.args[4][0, 0] = 77

    assert "ids changed" in complaints(ExpertsCase.parse(SMALL), Changing())


def test_a_worker_draws_others_of_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is made for few requests."""
    sent: list[tuple[Any, ...]] = []
    judged: list[tuple[ExpertsCase, Any]] = []

    def is_right(case: ExpertsCase, _: Any, weights: Any) -> tuple[list[str], bool]:
        judged.append((case, weights))
        return [], False

    monkeypatch.setattr(fuzz, "judged", is_right)
    monkeypatch.setattr(fuzz_workers, "ExpertsWeights", lambda case, _: case.w)
    some = [one for _ in range(2) for one in sharing(RNG, False, 1)]
    line = SimpleNamespace(value=b"")
    fuzz_workers.multiply(Simulator(), some, [0], time.monotonic() + 60, 300, line, sent.append)
    assert len(sent) == len(judged) == 300
    assert {case.request for case, _ in judged} == {one.request for one in some}
    assert len({case.w for case, _ in judged}) > 5
    assert all(weights == case.w for case, weights in judged)
    assert str(judged[-1][0]) == line.value.decode()
