"""What a kernel must leave alone: memory around C, weights and activations; dtypes of checks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from reference import Problem
from reference.bfloat16 import bfloat16_values
from steps.checks.cases import Case
from steps.checks.run import check_works
from steps.checks.verify import GUARD, multiply, prepare, require_unchanged, result
from steps.contract import Launch, Work, dtype_name
from steps.driver.machines import Simulator
from steps.registry import find, kernel_of

PROBLEM = Problem(2, 3, 32, "q4_0")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_store_outside_c_is_found_on_either_side(dtype: str) -> None:
    machine, step = Simulator(), find(11)
    prepared = prepare(step, "A16", "q4_0", PROBLEM.a, PROBLEM.blocks, machine, dtype=dtype)
    unwritten = result(prepared, machine)
    assert unwritten.shape == (2, 3)
    values = bfloat16_values(unwritten) if dtype == "bfloat16" else unwritten
    assert np.isnan(values).all(), "an output that no thread writes is no number"
    for at, where in (
        (GUARD - 1, "1 before"),
        (0, f"{GUARD} before"),
        (GUARD + 6, "0 after"),
        (-1, f"{GUARD - 1} after"),
    ):
        kept = prepared.guarded[at]
        prepared.guarded[at] = 0
        with pytest.raises(RuntimeError, match=f"the kernel wrote outside C, {where} its 6"):
            result(prepared, machine)
        prepared.guarded[at] = kept
    assert result(prepared, machine).shape == (2, 3)


def test_a_changed_operand_is_found() -> None:
    machine, step = Simulator(), find(1)
    prepared = prepare(step, "A16", "q4_0", PROBLEM.a, PROBLEM.blocks, machine)
    multiply(prepared, machine)
    operands = machine, step, PROBLEM.a, step.pack(PROBLEM.blocks)
    require_unchanged(prepared, *operands)
    for array, what in ((prepared.weights[0], "weights"), (prepared.a, "activations")):
        byte = array.reshape(-1).view(np.uint8)[-1:]
        byte ^= 1
        with pytest.raises(RuntimeError, match=f"step 1 changed its {what}"):
            require_unchanged(prepared, *operands)
        byte ^= 1
    require_unchanged(prepared, *operands)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_works_are_checked_in_a_dtype(dtype: str) -> None:
    """C is of it, and A where the kernel reads it; what is wrong is told."""
    seen: list[tuple[str, str]] = []
    right = kernel_of(17)

    def launch(*given: Any) -> Launch:
        activations, out = given[4:6]
        seen.append((dtype_name(activations[0]), dtype_name(out)))
        return right.launch(*given)

    def off(blocks: np.ndarray) -> Any:
        more = blocks.copy()
        more["d"] *= np.float16(1.05)
        return right.pack(more)

    case, given = Case((3, 5, 64), "normal", 7), Problem(3, 5, 64, "q4_1", input=dtype)
    for pack, ok in ((right.pack, True), (off, False)):
        work = Work(replace(right, launch=launch, pack=pack), "A16", "q4_1")
        for problem_of in (None, lambda _: given):
            found = check_works(
                [work], lambda _: [case], Simulator, lambda _: None, problem_of, dtype
            )
            assert found.ok == ok
    assert set(seen) == {(dtype if dtype != "float32" else "float16", dtype)}, "as rows"
