"""The same checks on a real GPU: every step, every format, larger ragged shapes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

import steps
from reference import GOLDEN, GPU_CHECK_SHAPES, Problem, nmse, same_operands_a16, unquantized
from steps.machines import Gpu
from steps.step import Family, Step
from steps.verify import multiply, prepare, verify

pytestmark = pytest.mark.gpu


def works() -> Iterator[pytest.param]:
    for step in steps.ladder():
        for family, name in itertools.product(step.families, step.formats):
            yield pytest.param(step, family, name, id=f"step{step.number:02d}-{family}-{name}")


@pytest.mark.parametrize(("step", "family", "name"), list(works()))
def test_right_on_every_check_shape(step: Step, family: Family, name: str) -> None:
    machine = Gpu()
    distributions = itertools.cycle(("integer", "normal", "llm", "integer", "uniform"))
    cases = zip(GPU_CHECK_SHAPES, distributions, strict=False)
    for seed, ((m, n, k), distribution) in enumerate(cases):
        problem = Problem(m, n, k, name, distribution, seed)
        verdict = verify(step, family, problem, machine)
        assert verdict.ok, f"M={m} N={n} K={k} {distribution} seed {seed}: {verdict}"


@pytest.mark.parametrize(("step", "family", "name"), list(works()))
def test_golden_case(step: Step, family: Family, name: str) -> None:
    golden, machine = GOLDEN[name], Gpu()
    prepared = prepare(step, family, name, golden.a, golden.blocks, machine, golden.q81)
    assert multiply(prepared, machine)[0, 0] == golden.value


@pytest.mark.parametrize(("step", "family", "name"), list(works()))
def test_classical_acceptance(step: Step, family: Family, name: str) -> None:
    problem, machine = Problem(4, 512, 1024, name, "uniform"), Gpu()
    prepared = prepare(step, family, name, problem.a, problem.blocks, machine)
    c = multiply(prepared, machine)
    assert nmse(c, unquantized(problem.a, problem.w)) < 0.01
    if family == "A8":
        assert nmse(c, same_operands_a16(problem.a, problem.blocks)) < 1e-4


@pytest.mark.parametrize(("step", "family", "name"), list(works()))
def test_bit_identical_from_run_to_run(step: Step, family: Family, name: str) -> None:
    problem, machine = Problem(130, 200, 544, name, "normal"), Gpu()
    prepared = prepare(step, family, name, problem.a, problem.blocks, machine)
    first = multiply(prepared, machine).copy()
    for _ in range(3):
        np.testing.assert_array_equal(first, multiply(prepared, machine))
