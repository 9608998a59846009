"""Dry runs: placeholders are to launches what device arrays are, and lie nowhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from steps.checks.select import select
from steps.compile.compiler import signature_of
from steps.compile.dry_run import OUT, REGION, WEIGHTS, A, DryRun, Placeholder
from steps.contract import Launch, Work
from steps.driver.launcher import parameters
from steps.instructions import TensorMap
from steps.product.choice import Choice
from steps.registry import ladder
from tests.driver.fake_gpu import device_array
from tests.steps.works import ENGINEERED

BLOCK = np.dtype([("d", np.float16), ("qs", np.uint8, (16,))])


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((5,), np.float32), ((3, 7), np.int8), ((3, 7, 2), np.float16), ((4, 2), BLOCK)],
)
def test_a_placeholder_is_passed_as_a_device_array_is(shape: tuple[int, ...], dtype: Any) -> None:
    address = 1 << 45
    placeholder = Placeholder(address, shape, np.dtype(dtype))
    array = device_array(shape, dtype, address)
    assert signature_of((placeholder,)) == signature_of((array,))
    signature = signature_of((array,))
    assert parameters(signature, (placeholder,)) == parameters(signature, (array,))
    assert (placeholder.ndim, placeholder.size, len(placeholder)) == (
        array.ndim,
        array.size,
        len(array),
    )


def placeholders(launch: Launch) -> list[Placeholder]:
    args = [arg.array if isinstance(arg, TensorMap) else arg for arg in launch.args]
    nested = [arg if isinstance(arg, tuple) else (arg,) for arg in args]
    return [each for group in nested for each in group if isinstance(each, Placeholder)]


@pytest.mark.parametrize("work", select((*ladder(), *ENGINEERED), ["q4_1"]), ids=str)
def test_an_address_says_which_operand_it_belongs_to(work: Work) -> None:
    for m in (1, 300):
        *before, own = Choice.of_work(work, (m, 68, 288)).launches()
        every = [each for launch in (*before, own) for each in placeholders(launch)]
        found = {each.address // REGION * REGION for each in every}
        types = len({each.address for each in every if each.address >= WEIGHTS})
        assert {A, OUT, WEIGHTS} <= found
        assert found & {WEIGHTS + i * REGION for i in range(9)} == {
            WEIGHTS + i * REGION for i in range(types)
        }
        assert next(each for each in every if each.address == A).shape == (m, 288)
        assert next(each for each in every if each.address == OUT).shape == (m, 68)


def test_a_dry_run_has_no_values_and_launches_nothing() -> None:
    machine = DryRun()
    with pytest.raises(RuntimeError, match="have no values"):
        machine.host(machine.empty((3,), np.float32))
    with pytest.raises(RuntimeError, match="launches nothing"):
        machine.run(Launch(None, (1,), (1,), ()))
