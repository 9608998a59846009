"""What lessons on experts do that others cannot: ids of all kinds, and what is said of them."""

from __future__ import annotations

import numpy as np
import pytest

import steps
from reference import ExpertsProblem
from steps.checks.cases import routing
from steps.checks.verify import multiply, prepare
from steps.driver.machines import Simulator
from steps.registry import find, ladder

LESSONS = [one for one in ladder() if routing(one, one.home_shapes[0]) is not None]
EXPERTS = 3


def product(number: int, ids: np.ndarray, order: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(C, what it should be) of an integer problem with these ids [T, S]."""
    chosen = ids.shape[1]
    p = ExpertsProblem(ids.size, 20, 160, "q5_1", "integer", 2, "float16", EXPERTS, chosen)
    machine = Simulator(order)
    given = ("A16", "q5_1", p.tokens, p.blocks, machine)
    c = multiply(prepare(find(number), *given, ids=ids), machine)
    known = (ids >= 0) & (ids < EXPERTS)
    w = p.w[np.where(known, ids, 0)].astype(np.float64)
    right = np.einsum("tk,tsnk->tsn", p.tokens.astype(np.float64), w)
    right[~known] = np.nan
    return c, right.reshape(ids.size, 20).astype(np.float16)


@pytest.mark.parametrize("number", [one.number for one in LESSONS])
@pytest.mark.parametrize(
    "ids",
    [
        [[2]],
        [[1, 1], [1, 1], [0, 1], [1, 1], [1, 1], [1, 0]],  # ten of one: a group of eight, and two
        [[0, 3], [-1, 1], [2**31 - 1, 0], [-(2**31), 3]],  # some are no experts
        [[5, 5], [5, 5]],  # none is
    ],
    ids=["one", "repeated", "unknown", "none"],
)
def test_ids_of_all_kinds(number: int, ids: list[list[int]]) -> None:
    for order in (0, -1):
        np.testing.assert_array_equal(*product(number, np.array(ids, np.int32), order))


@pytest.mark.parametrize("step", LESSONS, ids=lambda one: one.name)
def test_as_many_experts_as_its_home_has(step: steps.Step) -> None:
    for m, n, k in step.home_shapes:
        assert routing(step, (m, n, k)) == (128, 8)
        assert routing(step, (2 * m + 4, n, k)) == (128, 4)
    assert routing(step, (3, 5, 96)) == (5, 1)
    assert routing(find(18), step.home_shapes[0]) is None


@pytest.mark.parametrize("step", LESSONS, ids=lambda one: one.name)
def test_gemm_says_what_to_call_instead(step: steps.Step) -> None:
    p = ExpertsProblem(2, 3, 32, "q4_0", experts=1, chosen=1)
    with pytest.raises(
        ValueError, match=rf"step {step.number} multiplies experts, .*steps\.experts"
    ):
        steps.gemm(p.a, p.blocks[0], step=step.number, machine=Simulator())
