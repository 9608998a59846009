"""Steps that trade accuracy for speed are used where they are asked for, and nowhere else: fast
ones by "fast" and "coarse", coarse ones by "coarse" alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import steps
from qformats import WEIGHT_FORMATS
from reference import Problem, Tokens
from steps.contract import ACCURACIES, Shape
from steps.driver.machines import Simulator
from steps.product import tuning_table as tuning
from steps.product.choice import choose, supporting
from tests.steps.works import REQUANTIZED

FAST = [step for step in steps.ladder() if step.accuracy == "fast"]
COARSE = [step for step in steps.ladder() if step.accuracy == "coarse"]
HOPPER = SimpleNamespace(name="NVIDIA H200", cc=(9, 0), sms=132)
SHAPE = Shape(512, 4096, 4096)


class Everything:
    """A table in which a coarse step is the fastest and then a fast one, and of the others the
    higher is the slower."""

    gpu = "NVIDIA H200"

    def entry(self, name: str, *shape: Any) -> Any:
        more = {step.number: 99 for step in steps.ladder() if step.accuracy == "exact"}
        more |= {step.number: 9 for step in FAST}
        return SimpleNamespace(
            format=name, where="here", us=lambda number, *_: 20 + number + more.get(number, -20)
        )


@pytest.fixture(params=["measured", "not measured"])
def table(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Everything() if request.param == "measured" else None
    monkeypatch.setattr(tuning, "nearest", lambda *_: found)


def test_there_are_some() -> None:
    assert [step.number for step in FAST] == [15]
    assert [step.number for step in COARSE] == [16]


@pytest.mark.parametrize("family", [None, "A8"])
@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@pytest.mark.usefixtures("table")
def test_none_is_chosen_unasked(name: str, family: str | None) -> None:
    for output in ("float32", "float16"):
        if output == "float16" and family:
            continue  # of this family only a fast step writes it
        choice = choose(name, SHAPE, HOPPER, family=family, output=output)
        assert choice.step.accuracy == "exact", str(choice)
        fast = choose(name, SHAPE, HOPPER, family=family, output=output, accuracy="fast")
        assert fast.step in FAST, str(fast)
        coarse = choose(name, SHAPE, HOPPER, family=family, output=output, accuracy="coarse")
        assert coarse.step in COARSE, str(coarse)
    for accuracy, more in (("exact", []), ("fast", FAST), ("coarse", FAST + COARSE)):
        found = supporting(name, None, (9, 0), accuracy=accuracy)
        assert [step for step in found if step.accuracy != "exact"] == more


def test_what_was_passed_over_is_of_the_next_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "nearest", lambda *_: Everything())
    why = [choose("q4_0", SHAPE, HOPPER, accuracy=a).why for a in ("exact", "fast", "coarse")]
    assert why[0].endswith("; with accuracy='fast' step 15 would take 44 us")
    assert why[1].endswith("; with accuracy='coarse' step 16 would take 16 us")
    assert why[2].endswith("(16 us)")
    assert ";" not in why[2]


def test_where_there_is_nothing_else_it_is_a_sentence() -> None:
    with pytest.raises(ValueError, match="15 is not exact: ask for it with accuracy='fast'"):
        choose("q4_0", SHAPE, HOPPER, family="A8", output="float16", among=FAST + COARSE)
    with pytest.raises(
        ValueError, match="accuracy is 'low': it must be one of exact, fast, coarse"
    ):
        choose("q4_0", SHAPE, HOPPER, accuracy="low")
    old = SimpleNamespace(name="older", cc=(8, 0), sms=108)
    for accuracy in ("fast", "coarse"):
        assert choose("q4_0", SHAPE, old, accuracy=accuracy).step.accuracy == "exact"


@pytest.mark.parametrize("number", [step.number for step in FAST + COARSE])
def test_what_is_asked_for_by_number_is_given(number: int) -> None:
    assert choose("q4_0", SHAPE, HOPPER, step=number).step.number == number


@pytest.mark.parametrize("accuracy", ["fast", "coarse"])
def test_gemm_pack_and_plan_keep_to_the_accuracy(accuracy: str) -> None:
    """gemm, pack and plan: exact by default, int8 when told to; a handle keeps to its packing. For
    fewer tokens the decode step is the fastest, exact as it is."""
    problem, machine = Problem(19, 20, 96, "q4_1"), Simulator()
    meant = {"fast": FAST, "coarse": COARSE}[accuracy]
    tokens = Tokens.of_values(problem.a)
    w, factor = REQUANTIZED[accuracy](problem.blocks)
    fast = (tokens.q.astype(np.int64) @ w.T.astype(np.int64)).astype(np.float32)
    fast = fast * factor * tokens.d[:, None]

    _, choice = steps.gemm(problem.a, problem.blocks, machine=machine, explain=True)
    assert choice.step.accuracy == "exact"
    for handle in (problem.blocks, steps.pack(problem.blocks, machine=machine, accuracy=accuracy)):
        c, choice = steps.gemm(problem.a, handle, machine=machine, accuracy=accuracy, explain=True)
        assert choice.step in meant
        np.testing.assert_array_equal(c, fast)
    assert handle.steps == tuple(meant)
    np.testing.assert_array_equal(steps.gemm(problem.a, handle), fast)
    for better in ACCURACIES[: ACCURACIES.index(accuracy)]:
        refused = rf"step {meant[0].number} is not exact: ask for it with accuracy='{accuracy}'"
        with pytest.raises(ValueError, match=refused):
            steps.gemm(problem.a, handle, accuracy=better)
        with pytest.raises(ValueError, match=refused):
            steps.plan(19, handle, accuracy=better)
    exact = steps.pack(problem.blocks, machine=machine)
    assert all(step.accuracy == "exact" for step in exact.steps)
    c, choice = steps.gemm(problem.a, exact, accuracy=accuracy, explain=True)
    assert choice.step.accuracy == "exact", "its weights are not there"

    out = np.empty((19, 20), np.float32)
    plan = steps.plan(19, problem.blocks, machine=machine, accuracy=accuracy)
    plan(problem.a, out)
    np.testing.assert_array_equal(out, fast)
    assert steps.plan(19, problem.blocks, machine=machine).choice.step.accuracy == "exact"
