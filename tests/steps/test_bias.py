"""The bias of a layer: a kernel adds it itself, before C is rounded; no pass, no launch more."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pytest

from qformats import FORMATS, dequantize
from reference import Problem
from reference.bfloat16 import bfloat16_bits, bfloat16_values
from steps.contract import FLOATS, Family, Kernel, Shape, array_dtype
from steps.driver.machines import Simulator
from steps.product.choice import Choice, Request
from steps.registry import kernel_of, ladder
from tests.steps.test_steps_machine_code import sound

M, N, K, FORMAT = 3, 21, 96, "q5_1"
ADDING = [one for one in map(kernel_of, (step.number for step in ladder())) if one.adds_bias]


def works() -> Iterator[pytest.param]:
    """Every step in every family that adds one, with each dtype of a bias in turn; of these
    `make test` takes one, and the next step another."""
    for step in ADDING:
        for family in step.families:
            for i, of_bias in enumerate(FLOATS):
                output = step.outputs[(i + step.number) % len(step.outputs)]
                label = f"step{step.number}-{family}-{of_bias}-to-{output}"
                marks = () if i == step.number % 3 else pytest.mark.every
                yield pytest.param(step, family, of_bias, output, id=label, marks=marks)


def of(values: np.ndarray, dtype: str) -> np.ndarray:
    return bfloat16_bits(values) if dtype == "bfloat16" else values.astype(dtype)


def floats(array: np.ndarray) -> np.ndarray:
    return bfloat16_values(array) if array.dtype == np.uint16 else array.astype(np.float32)


def multiplied(
    step: Kernel, family: Family, problem: Problem, bias: tuple[np.ndarray, ...], output: str
) -> tuple[np.ndarray, int, int]:
    """(C in the simulator, launches before the step's own, thread blocks of its own)"""
    machine, shape = Simulator(), Shape(problem.m, problem.n, problem.k)
    weights = tuple(map(machine.array, (*step.pack(problem.blocks), *bias)))
    out = machine.empty((shape.m, shape.n), array_dtype(output))
    made = step.activations[family](machine.array(problem.a), machine)
    own = step.prepare(machine, FORMATS[FORMAT], family, shape, weights, made.arrays, out)
    for launch in (*made.launches, own):
        machine.run(launch)
    return machine.host(out), len(made.launches), math.prod(own.grid)


@pytest.mark.parametrize(("step", "family", "of_bias", "output"), list(works()))
def test_a_bias_is_added_and_the_sum_rounded_once(
    step: Kernel, family: Family, of_bias: str, output: str
) -> None:
    problem = Problem(M, N, K, FORMAT)
    bias = of(np.linspace(-300, 300, N, dtype=np.float32), of_bias)
    plain, passes, _ = multiplied(step, family, problem, (), "float32")
    biased, same, _ = multiplied(step, family, problem, (bias,), output)
    assert same == passes
    np.testing.assert_array_equal(biased, of(plain + floats(bias), output), strict=True)
    assert np.abs(floats(biased) - plain).max() > 100, "the bias is not lost"


SHARED: Final = {
    10: ((17, 20, 416), None),
    11: ((17, 20, 416), None),
    14: ((40, 20, 160), ((128, 64), 1, 2, 1)),  # each block adds up a slice of the tile
    15: ((17, 20, 160), ((128, 32), 1, 2, 1)),  # the last to arrive adds up all of it
}
"""Products, and the tiling, in which two thread blocks or more share the one tile of C along K."""


@pytest.mark.parametrize("number", SHARED)
def test_blocks_that_share_a_tile_add_a_bias_once(number: int, monkeypatch: Any) -> None:
    """Of integers: sums are exact in any order, so C is right to the bit."""
    (m, n, k), tiling = SHARED[number]
    step, of_bias = kernel_of(number), FLOATS[number % len(FLOATS)]
    assert {one.number for one in ADDING if one.scratch is not None} == set(SHARED)
    if tiling is not None:
        monkeypatch.setattr(sys.modules[step.launch.__module__], "tiling", lambda *_: tiling)
    problem, family = Problem(m, n, k, FORMAT, "integer", seed=number), step.families[-1]
    bias = of(np.arange(n, dtype=np.float32) * 8 - 60, of_bias)
    if step.accuracy == "exact":
        plain = problem.a.astype(np.float64) @ dequantize(problem.blocks).astype(np.float64).T
    else:
        plain, _, _ = multiplied(step, family, problem, (), "float32")
    biased, _, blocks = multiplied(step, family, problem, (bias,), "float32")
    assert blocks > 1, "K is shared out"
    np.testing.assert_array_equal(biased, plain + floats(bias))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "family"),
    [
        pytest.param(step, family, id=f"{step.name}-{family}", marks=marks)
        for i, step in enumerate(reversed(ADDING))
        for family in step.families
        # one of each way to multiply many tokens
        for often in [i % 3 == 0 and i > 0 and family == step.families[-1]]
        for marks in [() if often else pytest.mark.every]
    ],
)
def test_a_bias_costs_no_local_memory_and_few_instructions(step: Kernel, family: Family) -> None:
    codes = []
    for bias in (None, "bfloat16"):
        choice = Choice.of(step, family, Request("q4_1", 16, 4096, 4096, bias=bias))
        codes.append(sound(choice.launches()[-1]))
    plain, biased = codes
    assert biased.count("LDG") > plain.count("LDG")
    more = sum(biased.instructions.values()) - sum(plain.instructions.values())
    most = 80 if step.number == 8 else 59  # measured: only step 8 takes more than 59
    assert more <= most, "of some 1500; fewer where the compiler unrolls the end less"
    spare = 4 if step.number == 11 else 0  # below what its launch bounds leave it
    assert biased.registers <= max(plain.registers + spare, 128)
