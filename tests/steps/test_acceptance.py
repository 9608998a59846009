"""The classical acceptance: M=4, N=512, K=1024, every format within 1 % of the float product.

The whole product takes a GPU, of whose check shapes it is one. Here each lesson computes 8 of the
512 output features of the same problem in the simulator - features are independent, so these are
the values a GPU would give - and the whole product is checked at the level of the formats, with
NumPy.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from qformats import WEIGHT_FORMATS
from reference import Q81, Problem, nmse, same_operands, unquantized
from steps.checks.verify import multiply, prepare
from steps.contract import Family, Kernel, Step
from tests.kernels.passes import RemembersPasses
from tests.steps.works import WORKS, by_turn, input_of

SHAPE = (4, 512, 1024)
FEATURES = slice(0, 512, 64)
CLASSICAL_LIMIT = 0.01
A8_WITHIN_A16 = 1e-4
LESSONS = [
    work
    for work in WORKS
    for kernel in work.values[:1]
    if isinstance(kernel, Step) and kernel.accuracy != "pruned"  # which is 20 % off
]


@pytest.mark.parametrize("distribution", ["uniform", "normal"])
@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_the_formats_themselves(name: str, distribution: str) -> None:
    problem = Problem(*SHAPE, name, distribution)
    exact = unquantized(problem.a, problem.w)
    a16 = same_operands(problem.a, problem.blocks)[0]
    a8 = same_operands(Q81.of_values(problem.a), problem.blocks)[0]
    assert nmse(a16, exact) < CLASSICAL_LIMIT
    assert nmse(a8, exact) < CLASSICAL_LIMIT
    assert nmse(a8, a16) < A8_WITHIN_A16


@cache
def problem_of(name: str) -> tuple[Problem, np.ndarray]:
    """The whole problem, and the blocks of the features that the simulator computes."""
    problem = Problem(*SHAPE, name, "uniform")
    return problem, np.ascontiguousarray(problem.blocks[FEATURES])


@pytest.mark.slow
@pytest.mark.parametrize(("step", "family", "name"), by_turn(LESSONS, shift=3, formats=1))
def test_every_lesson(step: Kernel, family: Family, name: str) -> None:
    problem, blocks = problem_of(name)
    machine = RemembersPasses()
    a = problem.a.astype(input_of(step, family))
    c = multiply(prepare(step, family, name, a, blocks, machine), machine)
    assert nmse(c, unquantized(problem.a, problem.w[FEATURES])) < CLASSICAL_LIMIT
    if family == "A8":
        assert nmse(c, same_operands(problem.a, blocks)[0]) < A8_WITHIN_A16
