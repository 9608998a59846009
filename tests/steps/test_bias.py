"""The bias of a layer: a step adds it itself, before C is rounded; no pass, no launch more."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import steps
from qformats import FORMATS
from reference import Problem
from reference.bfloat16 import bfloat16_bits, bfloat16_values
from steps.api.compile import machine_code, signature_of
from steps.api.dry_run import launches, packed_types
from steps.api.machines import Simulator
from steps.contract import FLOATS, Family, Shape, Step, Work, array_dtype
from tests.steps.test_steps_machine_code import no_local_memory_where_it_counts

M, N, K, FORMAT = 3, 21, 96, "q5_1"
ADDING = [step for step in steps.ladder() if step.adds_bias]


def works() -> Iterator[pytest.param]:
    """Every step in every family that adds one, with each dtype of a bias in turn."""
    for step in ADDING:
        for family in step.families:
            for i, of_bias in enumerate(FLOATS):
                output = FLOATS[(i + step.number) % len(FLOATS)]
                label = f"step{step.number}-{family}-{of_bias}-to-{output}"
                yield pytest.param(step, family, of_bias, output, id=label)


def of(values: np.ndarray, dtype: str) -> np.ndarray:
    return bfloat16_bits(values) if dtype == "bfloat16" else values.astype(dtype)


def floats(array: np.ndarray) -> np.ndarray:
    return bfloat16_values(array) if array.dtype == np.uint16 else array.astype(np.float32)


@pytest.mark.parametrize(("step", "family", "of_bias", "output"), list(works()))
def test_a_bias_is_added_and_the_sum_rounded_once(
    step: Step, family: Family, of_bias: str, output: str
) -> None:
    problem, machine = Problem(M, N, K, FORMAT), Simulator()
    bias = of(np.linspace(-300, 300, N, dtype=np.float32), of_bias)
    packed = tuple(machine.array(array) for array in step.pack(problem.blocks))

    def product(weights: tuple[np.ndarray, ...], dtype: str) -> tuple[np.ndarray, int]:
        out = machine.empty((M, N), array_dtype(dtype))
        made = step.activations(family, machine.array(problem.a), machine)
        shape = Shape(M, N, K)
        own = step.prepare(machine, FORMATS[FORMAT], family, shape, weights, made.arrays, out)
        for launch in (*made.launches, own):
            machine.run(launch)
        return machine.host(out), len(made.launches)

    plain, passes = product(packed, "float32")
    biased, same = product((*packed, machine.array(bias)), output)
    assert same == passes
    np.testing.assert_array_equal(biased, of(plain + floats(bias), output), strict=True)
    assert np.abs(floats(biased) - plain).max() > 100, "the bias is not lost"


@pytest.mark.slow
@pytest.mark.parametrize("step", ADDING, ids=lambda step: step.name)
def test_a_bias_costs_no_local_memory_and_few_instructions(step: Step) -> None:
    for family in step.families:
        codes = []
        for bias in ((), (((4096,), array_dtype("bfloat16")),)):
            types = (*packed_types(step.pack, "q4_1"), *bias)
            size = 16, 4096, 4096
            _, own = launches(Work(step, family, "q4_1"), size, weights=types)
            code = machine_code(own.kernel, signature_of(own.args), "sm_90a")
            assert no_local_memory_where_it_counts(code)
            codes.append(code)
        plain, biased = codes
        assert biased.count("LDG") > plain.count("LDG")
        more = sum(biased.instructions.values()) - sum(plain.instructions.values())
        assert more < 60, "of some 1500; fewer where the compiler unrolls the end less"
        assert biased.registers <= max(plain.registers, 128)
