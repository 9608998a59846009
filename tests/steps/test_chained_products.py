"""What a lesson on two products in one launch does that others cannot: both of them, thread blocks
that wait for each other, and a hand-over that is empty again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qformats import FORMATS, WEIGHT_FORMATS
from reference import Problem
from steps import gemm
from steps.blocks.chained import identity, tiles_of_both
from steps.contract import Launch, Shape
from steps.driver.machines import Simulator
from steps.registry import find
from steps.simulator.errors import Deadlock
from steps.simulator.launch import simulate

STEP = find(21)


def launch_of(
    m: int, n: int, k: int, name: str, machine: Simulator, scale: float = 1 / 16
) -> tuple[Launch, tuple[Any, ...]]:
    """A launch of both products, and what their weights and A are: float64."""
    fmt, rng = FORMATS[name], np.random.default_rng(k)
    v = Problem(1, k, k, name, "normal", 1).blocks
    w = Problem(1, n, k, name, "normal", 2).blocks
    a = (scale * rng.standard_normal((m, k))).astype(np.float16)
    out, shape = np.full((m, n), np.nan, np.float16), Shape(m, n, k)
    given = fmt, "A16", shape, tiles_of_both(w, before=v), (a,), out
    launch = STEP.launch(*given, *STEP.scratch_memory(machine, fmt, "A16", shape))
    return launch, tuple(x.astype(np.float64) for x in (a, fmt.dequantize(v), fmt.dequantize(w)))


@pytest.mark.parametrize(("name", "order"), [("q4_0", 0), ("q8_0", -1), ("q5_1", 1)])
def test_both_products_again_and_again(monkeypatch: Any, name: str, order: int) -> None:
    """By two blocks, which both have rows of both matrices, in launches behind each other."""
    monkeypatch.setattr("steps.step21_chained_products.multiprocessors", lambda: 2)
    machine = Simulator(order)
    launch, (a, v, w) = launch_of(2, 100, 96, name, machine)
    out, h, handed = launch.args[-3:]
    assert launch.grid == (2,)
    for _ in range(2):
        h[...], out[...] = np.nan, np.nan
        machine.run(launch)
        assert not handed.any(), "the next launch finds zeros"
        np.testing.assert_allclose(h, a @ v.T, atol=2e-3, rtol=2e-3)
        np.testing.assert_allclose(out, h.astype(np.float64) @ w.T, atol=2e-2, rtol=2e-3)


def test_blocks_that_do_not_all_run_wait_for_ever(monkeypatch: Any) -> None:
    """The simulator says so; a GPU gives up after so many looks."""
    monkeypatch.setattr("steps.step21_chained_products.multiprocessors", lambda: 3)
    launch, _ = launch_of(1, 40, 96, "q4_0", Simulator())
    with pytest.raises(Deadlock, match="poll and nothing changes any more; 1 of the 3 blocks have"):
        simulate(
            launch.kernel, launch.grid, launch.block, launch.args,
            shared_bytes=launch.shared_bytes, resident=2,
        )  # fmt: skip


def test_a_token_that_does_not_fit_is_refused() -> None:
    fmt, shape = FORMATS["q8_0"], Shape(1, 1, 120_000)
    given = (np.zeros(1, np.uint8), np.zeros(1, np.float32)) * 2
    with pytest.raises(ValueError, match=r"K=120000: a token takes 245760 bytes .* 232448"):
        STEP.launch(
            fmt, "A16", shape, given, (np.zeros((1, 120_000), np.float16),), None, (None,) * 2
        )


def test_gemm_does_not_multiply_twice() -> None:
    problem = Problem(2, 3, 32, "q4_0")
    with pytest.raises(ValueError, match="step 21 multiplies by two matrices, and is a lesson: ge"):
        gemm(problem.a, problem.blocks, step=21, machine=Simulator())


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_without_a_matrix_before_it_is_one(name: str) -> None:
    np.testing.assert_array_equal(FORMATS[name].dequantize(identity(FORMATS[name], 96)), np.eye(96))
