"""Rows of A that a product rounds beside its tiles: the bits of the pass, and the same product."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from qformats import quantize
from reference import Problem
from reference.bfloat16 import bfloat16_bits
from steps.checks.verify import multiply, prepare, verify
from steps.compile.compiler import machine_code, signature_of
from steps.contract import Kernel, Shape, Work
from steps.driver.machines import Gpu, Simulator
from steps.kernels.parts.activations import beside, layouts
from steps.kernels.parts.activations.beside import rows_operand
from steps.kernels.parts.activations.layouts import all_float16_rows, float16_rows_of_many
from steps.kernels.prefill import wgmma_float16
from steps.product.choice import Choice
from steps.registry import kernel_of

# (M, K, rows of the pass, SMs, tiles of 16 tokens, of which so many are shared). The last tile
# short; the first rows end within a tile, and a row of several loads of a lane; shared tiles that
# need rows rounded here.
WORKS = ((37, 160, 16, 2, 3, 0), (20, 1312, 5, 1, 2, 0), (33, 160, 16, 2, 3, 1))


def given(m: int, k: int) -> np.ndarray:
    """Rows of very different sizes, one of zeros."""
    rng = np.random.default_rng(m)
    a = rng.standard_normal((m, k), dtype=np.float32)
    a *= np.float32(2.0) ** rng.integers(-9, 9, (m, 1)).astype(np.float32)
    a[m - 3] = 0
    return bfloat16_bits(a)


@pytest.mark.parametrize("order", [5, *(pytest.param(o, marks=pytest.mark.every) for o in (0, -1))])
@pytest.mark.parametrize("work", WORKS, ids=lambda work: "-".join(map(str, work)))
def test_rows_and_products_are_those_of_the_pass(
    work: Any, order: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice: with counters that were not set back no row would be rounded, or waited for."""
    m, k, first_rows, sms, tiles, shared = work
    kernel = kernel_of(14)
    monkeypatch.setattr(wgmma_float16, "tiling", lambda *_: ((128, 16), tiles, sms, shared))
    for module in (beside, layouts):
        monkeypatch.setattr(module, "H200_FIRST_ROWS", first_rows)
    a = given(m, k)
    w = quantize(np.random.default_rng(1).standard_normal((20, k), dtype=np.float32), "q4_1")

    def of(one: Kernel, machine: Simulator, times: int) -> tuple[np.ndarray, Any]:
        prepared = prepare(one, "A16", "q4_1", a, w, machine)
        for _ in range(times):
            c = multiply(prepared, machine)
        return c, tuple(machine.host(each) for each in prepared.activations.arrays)

    by_pass = replace(kernel, activations={"A16": all_float16_rows})
    want, (rows, scales) = of(by_pass, Simulator(), 1)
    got, (_, made, made_scales, counters) = of(kernel, Simulator(order), 2)
    np.testing.assert_array_equal(made, rows)
    np.testing.assert_array_equal(made_scales, scales)
    np.testing.assert_array_equal(got, want)
    assert not counters.any()


def test_the_pass_of_many_rows_is_of_the_first() -> None:
    """Of twice 1152 rows the pass rounds all; of one more 1152."""
    few, many = (np.zeros((m, 32), np.uint16) for m in (2304, 2305))
    whole, first = (float16_rows_of_many(a, Simulator()) for a in (few, many))
    (one,), (other,) = whole.launches, first.launches
    assert (one.grid, other.grid) == ((2304,), (1152,))
    assert one.kernel is other.kernel
    assert [array.shape for array in whole.arrays] == [(2304, 32), (2304,)]
    a, rows, scales, counters = first.arrays
    assert a is many
    assert (rows.shape, scales.shape) == ((2305, 32), (2305,))
    assert counters.dtype == np.int32
    assert not counters.any()
    assert rows_operand(whole.arrays, "unread") == (None, *whole.arrays)
    assert rows_operand(first.arrays, "unread") == (32, rows, (*first.arrays, 1152))


def test_a_product_with_many_features_leaves_all_rows_to_the_pass() -> None:
    for n, make in ((8192, float16_rows_of_many), (8193, all_float16_rows)):
        shape = Shape(4096, n, 4096)
        reading = layouts.reading_of(kernel_of(14), "bfloat16", "A16", "q4_0", shape)
        assert reading.make is make


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_rows_of_other_dtypes_are_as_ever(dtype: Any) -> None:
    """Float16 is multiplied as it is. Of float32, whose rows are twice as long, a pass rounds
    all."""
    a = np.zeros((2305, 32), dtype)
    made = float16_rows_of_many(a, Simulator())
    assert [launch.grid for launch in made.launches] == [(2305,)] * (dtype == np.float32)
    how, rows, _ = rows_operand(made.arrays, "unread")
    assert how is None
    assert rows is made.arrays[0]


@pytest.mark.gpu
@pytest.mark.parametrize("distribution", ["integer", "normal", "llm"])
def test_many_rows_on_a_gpu(distribution: str) -> None:
    """Launched with other products between, which find their counters at zero."""
    machine = Gpu()
    for m, k in ((2400, 1024), (3000, 2080), (2400, 1024)):
        problem = Problem(m, 640, k, "q5_1", distribution, input="bfloat16")
        found = verify(kernel_of(14), "A16", problem, machine, dtype="bfloat16")
        assert found.ok, found.verdict


@pytest.mark.slow
def test_machine_code_keeps_to_its_registers() -> None:
    """The two warps have 40 each: nothing is spilled."""
    work = Work(kernel_of(14), "A16", "q5_1")
    launch = Choice.of_work(work, (4096, 4096, 4096), "bfloat16", "bfloat16").launches()[-1]
    code = machine_code(launch.kernel, signature_of(launch.args), "sm_90a")
    assert code.log.count("warning") == 0
    assert (code.stack_bytes, code.spill_store_bytes, code.spill_load_bytes) == (0, 0, 0)
    assert code.count("NANOSLEEP") == 1
