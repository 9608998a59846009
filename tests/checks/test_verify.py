"""What a kernel must leave alone: memory around C, its weights and its activations."""

from __future__ import annotations

import numpy as np
import pytest

from reference import Problem
from steps.checks.verify import GUARD, multiply, prepare, require_unchanged, result
from steps.driver.machines import Simulator
from steps.registry import find

PROBLEM = Problem(2, 3, 32, "q4_0")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_store_outside_c_is_found_on_either_side(dtype: str) -> None:
    machine, step = Simulator(), find(11)
    prepared = prepare(step, "A16", "q4_0", PROBLEM.a, PROBLEM.blocks, machine, dtype=dtype)
    assert result(prepared, machine).shape == (2, 3)
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
