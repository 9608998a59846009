"""Steps that trade accuracy for speed are used where they are asked for, and nowhere else."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import steps
from qformats import WEIGHT_FORMATS
from qformats.repack import byte_weights
from reference import Problem, Tokens
from steps.cli import main as cli
from steps.driver.machines import Simulator
from steps.product import tuning_table as tuning
from steps.product.choice import Request, choose, supporting
from steps.registry import kernels

FAST = [step for step in kernels() if step.accuracy == "fast"]
HOPPER = SimpleNamespace(name="NVIDIA H200", cc=(9, 0), sms=132)
SIZE = (512, 4096, 4096)


class Everything:
    """A table in which a fast step is the fastest, and of the others the higher is the slower."""

    gpu = "NVIDIA H200"

    def entry(self, name: str, *shape: Any) -> Any:
        fast = {step.number for step in FAST}
        return SimpleNamespace(
            format=name,
            where="here",
            times={},
            us=lambda number, *_: number + (0 if number in fast else 99),
        )


@pytest.fixture(params=["measured", "not measured"])
def table(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Everything() if request.param == "measured" else None
    monkeypatch.setattr(tuning, "nearest", lambda *_: found)


@pytest.mark.parametrize("family", [None, "A8"])
@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@pytest.mark.usefixtures("table")
def test_none_is_chosen_unasked(name: str, family: str | None) -> None:
    for output in ("float32", "float16"):
        if output == "float16" and family:
            continue  # of this family only a fast step writes it
        choice = choose(Request(name, *SIZE, c=output, family=family), HOPPER)
        assert choice.kernel.accuracy == "exact", str(choice)
        fast = choose(replace(choice.request, accuracy="fast"), HOPPER)
        assert fast.kernel in FAST, str(fast)
    for accuracy, more in (("exact", []), ("fast", FAST)):
        found = supporting(Request(name, *SIZE, accuracy=accuracy), (9, 0))
        assert [step for step in found if step.accuracy != "exact"] == more


def test_what_was_passed_over_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "nearest", lambda *_: Everything())
    why = [choose(Request("q4_0", *SIZE, accuracy=a), HOPPER).why for a in ("exact", "fast")]
    assert why[0].endswith("; with accuracy='fast' step 15 would take 15 us")
    assert why[1].endswith("(15 us)")


def test_where_there_is_nothing_else_it_is_a_sentence() -> None:
    with pytest.raises(ValueError, match="15 is not exact: ask for it with accuracy='fast'"):
        choose(Request("q4_0", *SIZE, c="float16", layouts=("byte_tiles",)), HOPPER)
    with pytest.raises(ValueError, match=r"accuracy is 'low': it must be one of exact, fast$"):
        choose(Request("q4_0", *SIZE, accuracy="low"), HOPPER)
    old = SimpleNamespace(name="older", cc=(8, 0), sms=108)
    assert choose(Request("q4_0", *SIZE, accuracy="fast"), old).kernel.accuracy == "exact"


def test_what_is_asked_for_by_number_is_given() -> None:
    assert choose(Request("q4_0", *SIZE, step=15), HOPPER).kernel.number == 15


def test_gemm_pack_and_plan_keep_to_the_accuracy() -> None:
    """gemm, pack and plan: exact by default, int8 when told to; a handle keeps to its packing. For
    fewer tokens the decode step is the fastest, exact as it is."""
    problem, machine = Problem(19, 20, 96, "q4_1"), Simulator()
    tokens = Tokens.of_values(problem.a)
    w, factor = byte_weights(problem.blocks)
    fast = (tokens.q.astype(np.int64) @ w.T.astype(np.int64)).astype(np.float32)
    fast = fast * factor * tokens.d[:, None]
    asked = {"accuracy": "fast"}

    _, choice = steps.gemm(problem.a, problem.blocks, machine=machine, explain=True)
    assert choice.kernel.accuracy == "exact"
    handles = [steps.pack(problem.blocks, machine=machine, **of) for of in ({"step": 15}, asked)]
    for handle in (problem.blocks, *handles):
        c, choice = steps.gemm(problem.a, handle, machine=machine, accuracy="fast", explain=True)
        assert choice.kernel in FAST
        np.testing.assert_array_equal(c, fast)
    assert handle.layout == "byte_tiles"
    np.testing.assert_array_equal(steps.gemm(problem.a, handle), fast)
    refused = "step 15 is not exact: ask for it with accuracy='fast'"
    with pytest.raises(ValueError, match=refused):
        steps.gemm(problem.a, handle, accuracy="exact")
    with pytest.raises(ValueError, match=refused):
        steps.plan(19, handle, accuracy="exact")
    exact = steps.pack(problem.blocks, machine=machine)
    assert exact.layout == "tiles"
    c, choice = steps.gemm(problem.a, exact, accuracy="fast", explain=True)
    assert choice.kernel.accuracy == "exact", "its weights are not there"

    out = np.empty((19, 20), np.float32)
    plan = steps.plan(19, problem.blocks, machine=machine, accuracy="fast")
    plan(problem.a, out)
    np.testing.assert_array_equal(out, fast)
    assert steps.plan(19, problem.blocks, machine=machine).choice.kernel.accuracy == "exact"


def test_an_accuracy_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    """In one sentence, wherever it can be named."""
    a, w = np.zeros((1, 64), np.float32), Problem(1, 2, 64, "q4_0").blocks
    machine = Simulator()
    told = "accuracy is 'coarse': it must be one of exact, fast"
    kept = steps.pack(w, machine=machine)
    for call in (
        lambda: steps.gemm(a, w, machine=machine, accuracy="coarse"),
        lambda: steps.gemm(a, kept, accuracy="coarse"),
        lambda: steps.pack(w, machine=machine, accuracy="coarse"),
        lambda: steps.plan(1, w, machine=machine, accuracy="coarse"),
        lambda: steps.plan(1, kept, accuracy="coarse"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(told)}$"):
            call()
    for command in (["warm", "--n", "64", "--k", "64"], ["chat"]):
        with pytest.raises(SystemExit):
            cli.main([*command, "--accuracy", "coarse"])
    assert capsys.readouterr().err.count(told) == 2
