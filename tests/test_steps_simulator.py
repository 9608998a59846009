"""Every step, every format, ragged shapes, several lane orders, in the simulator."""

from __future__ import annotations

import numpy as np
import pytest

import steps
from qformats import WEIGHT_FORMATS
from reference import CHECK_SHAPES, GOLDEN, Problem
from steps.checks import Work, cases, check_works
from steps.machines import Simulator
from steps.step import Family, Step
from steps.verify import multiply, prepare, verify
from tests.works import WORKS

DESCENDING = -1


@pytest.mark.parametrize(("step", "family", "name"), WORKS)
def test_right_on_every_check_shape(step: Step, family: Family, name: str) -> None:
    """Distributions, seeds and lane orders go round, so that the shapes meet each of them."""
    outcomes = check_works(
        [Work(step, family, name)], lambda name: cases(name, simulated=True), Simulator
    )
    assert outcomes.each[0].cases == 1 + len(CHECK_SHAPES)  # and the golden one
    assert outcomes.ok, "\n".join(outcomes.each[0].failures)


@pytest.mark.parametrize(("step", "family", "name"), WORKS)
def test_integer_problem_is_exact_in_any_lane_order(step: Step, family: Family, name: str) -> None:
    """A missing barrier would show in at least one of these orders."""
    problem = Problem(3, 35, 96, name, "integer", seed=7)
    results = []
    for order in (0, DESCENDING, 3, 4):
        machine = Simulator(order)
        prepared = prepare(step, family, name, problem.a, problem.blocks, machine)
        results.append(multiply(prepared, machine))
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)
    assert verify(step, family, problem, Simulator()).ok


@pytest.mark.parametrize(("step", "family", "name"), WORKS)
def test_golden_case(step: Step, family: Family, name: str) -> None:
    """1 x 1 x 32 by hand: 141 in Q4_0."""
    golden = GOLDEN[name]
    machine = Simulator()
    prepared = prepare(step, family, name, golden.a, golden.blocks, machine, golden.q81)
    c = multiply(prepared, machine)
    assert c.shape == (1, 1)
    if prepared.activations.layout == "inside":  # no bits can be given: it makes some of its own
        assert verify(step, family, Problem(1, 1, 32, name, "golden"), machine).ok
        return
    assert c[0, 0] == golden.value
    if name == "q4_0":
        assert golden.value == 141


# One more row and column than the tile of each step that has a large one, and K beyond a stage.
EDGES = ((5, (129, 65, 32)), (6, (129, 65, 32)), (7, (65, 129, 160)))


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@pytest.mark.parametrize(("number", "shape"), EDGES)
def test_a_tile_edge_in_both_directions(
    number: int, shape: tuple[int, int, int], name: str
) -> None:
    problem = Problem(*shape, name, "integer", seed=1)
    assert verify(steps.find(number), "A8", problem, Simulator(5)).ok
