"""The same checks on a real GPU: every lesson and every engineered kernel, every format, larger
ragged shapes."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from reference import GOLDEN, GPU_CHECK_SHAPES, Problem
from steps.checks.cases import cases
from steps.checks.run import check_works
from steps.checks.verify import multiply, prepare, verify
from steps.contract import Family, Kernel, Work
from steps.driver.machines import Gpu
from steps.registry import kernel_of
from tests.steps.works import WORKS, drawn_for, input_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("step", "family", "name"), WORKS)
def test_right_on_every_check_shape(step: Kernel, family: Family, name: str) -> None:
    outcomes = check_works(
        [Work(step, family, name)],
        lambda _: cases(name, simulated=False, step=step),
        lambda order: Gpu(),
    )
    assert outcomes.each[0].cases == 2 + len(GPU_CHECK_SHAPES)  # and golden, extreme
    assert outcomes.ok, "\n".join(outcomes.each[0].failures)


@pytest.mark.parametrize(("step", "family", "name"), WORKS)
def test_golden_case(step: Kernel, family: Family, name: str) -> None:
    golden, machine = GOLDEN[name], Gpu()
    a = golden.a.astype(input_of(step, family))
    prepared = prepare(step, family, name, a, golden.blocks, machine, golden.q81)
    if prepared.activations.layout == "inside" or step.accuracy == "pruned":
        # No bits can be given, as it makes some of its own; or it leaves out some of the weights.
        problem = drawn_for(step, 1, 1, 32, name, "golden", input=input_of(step, family))
        assert verify(step, family, problem, machine).ok
        return
    assert multiply(prepared, machine)[0, 0] == golden.value


@pytest.mark.parametrize(("step", "family", "name"), WORKS)
def test_bit_identical_from_run_to_run(step: Kernel, family: Family, name: str) -> None:
    problem = Problem(130, 200, 544, name, "normal", input=input_of(step, family))
    machine = Gpu()
    prepared = prepare(step, family, name, problem.a, problem.blocks, machine)
    first = multiply(prepared, machine).copy()
    for _ in range(3):
        np.testing.assert_array_equal(first, multiply(prepared, machine))


@pytest.mark.parametrize("name", ["q4_0", "q5_1", "q8_0"])
@pytest.mark.parametrize(
    ("number", "cut"),
    [
        (14, ((128, 128), 24, 120, 24)),
        (14, ((128, 48), 56, 112, 56)),
        (14, ((128, 80), 32, 128, 32)),
        (14, ((128, 96), 32, 50, 32)),
        (14, ((128, 112), 24, 96, 24)),
        (14, ((192, 128), 18, 10, 0)),
        (14, ((192, 128), 18, 54, 18)),
        (14, ((256, 128), 12, 12, 0)),
        (14, ((256, 128), 12, 50, 12)),
        (15, ((128, 128), 24, 120, 24)),
        (15, ((128, 80), 32, 128, 32)),
        (15, ((128, 256), 16, 16, 0)),
        (15, ((128, 112), 24, 96, 24)),
        (15, ((128, 256), 16, 60, 16)),
    ],
)
def test_the_tiles_of_large_products(
    number: int, cut: tuple, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which no check shape is large enough for: whole, or shared by blocks, equally or not."""
    step = kernel_of(number)
    monkeypatch.setattr(sys.modules[step.launch.__module__], "tiling", lambda *_: cut)
    for output in (np.float32, np.float16):
        problem = Problem(300, 1000, 672, name)
        found = verify(step, step.families[-1], problem, Gpu(), dtype=output)
        assert found.ok, found.verdict
