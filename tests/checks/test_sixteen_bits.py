"""`verify` with A and C of 16 bits: what a kernel is given, may not touch, and the verdict."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from numba import cuda, float32, uint16, uint32

import steps
from qformats import dequantize
from reference import Problem
from reference.bfloat16 import rounded_to_bfloat16
from steps.checks.cases import Case
from steps.checks.run import check_works
from steps.checks.verify import verify
from steps.contract import Launch, Step, Work, array_dtype, dtype_name
from steps.driver.machines import Simulator
from steps.instructions import as_float, float_to_half, floats_to_bfloats, half_to_float
from steps.kernels.parts.activations.layouts import float16_rows


@cache
def naive(input: str, output: str, beyond: int) -> Any:
    """C = A @ W^T, a thread an output; writes `beyond` outputs more than there are."""
    half = input != "bfloat16"

    @cuda.jit
    def multiply(w, a, token_scales, c):
        m, n = cuda.blockIdx.x, cuda.threadIdx.x
        total = float32(0)
        for k in range(a.shape[1]):
            x = half_to_float(a[m, k]) if half else as_float(uint32(a[m, k]) << uint32(16))
            total += x * w[n, k]
        if token_scales.shape[0] == a.shape[0]:
            total *= token_scales[m]
        if output == "float32":
            c[m * w.shape[0] + n] = total
        elif output == "float16":
            c[m * w.shape[0] + n] = float_to_half(total)
        else:
            c[m * w.shape[0] + n] = uint16(floats_to_bfloats(total, total))
        if m == 0 and n < beyond:
            c[c.shape[0] - 1 + n] = 0

    return multiply


def step_of(beyond: int = 0, off: float = 1.0) -> Step:
    def pack(blocks: np.ndarray) -> tuple[np.ndarray]:
        return (dequantize(blocks) * np.float32(off),)

    def launch(fmt, family, shape, weights, activations, out) -> Launch:
        a = activations[0]
        kind = dtype_name(a)
        w = weights[0].astype(np.float16).astype(np.float32)
        w = rounded_to_bfloat16(w) if kind == "bfloat16" else w
        scales = activations[1] if len(activations) == 2 else np.zeros(0, np.float32)
        flat = out.base.reshape(-1)  # with its guard bands
        start = (out.__array_interface__["data"][0] - flat.__array_interface__["data"][0]) // (
            out.itemsize
        )
        flat = flat[start : start + out.size + (1 if beyond else 0)]
        output = dtype_name(out)
        if output == "float16":
            flat = flat.view(np.uint16)
        kernel = naive(kind, output, beyond)
        return Launch(kernel, (shape.m,), (shape.n,), (w, a.view(np.uint16), scales, flat))

    return replace(
        steps.find(1), pack=pack, activations={"A16": float16_rows}, launch=launch, outputs=OUTPUTS
    )


OUTPUTS = ("float32", "float16", "bfloat16")


@pytest.mark.parametrize("distribution", ["normal", "integer"])
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("input", OUTPUTS)
def test_each_dtype_of_a_and_of_c(input: str, output: str, distribution: str) -> None:
    problem = Problem(3, 5, 64, "q4_1", distribution, input=input)
    assert problem.given.dtype == array_dtype(input)
    found = verify(step_of(), "A16", problem, Simulator(), dtype=output)
    assert found.ok, found.verdict
    least, most = (0, 3e-7) if input != "bfloat16" else (1e-7, 2e-5)
    if distribution == "normal" and output == "float32":
        assert least <= found.nmse_same_operands <= most
    wrong = verify(step_of(off=1.05), "A16", problem, Simulator(), dtype=output)
    assert "nmse" in wrong.failures


@pytest.mark.parametrize("output", OUTPUTS)
def test_what_is_written_beyond_c_is_found(output: str) -> None:
    problem = Problem(3, 5, 64, "q4_1", "normal", input="bfloat16")
    with pytest.raises(RuntimeError, match="wrote outside C"):
        verify(step_of(beyond=1), "A16", problem, Simulator(), dtype=output)


@pytest.mark.parametrize("dtype", OUTPUTS)
def test_works_are_checked_in_a_dtype(dtype: str) -> None:
    """C is of it, and A where the step reads it; what is wrong is told."""
    seen: list[tuple[str, str]] = []

    def noting(step: Step) -> Step:
        def launch(fmt, family, shape, weights, activations, out) -> Launch:
            seen.append((dtype_name(activations[0]), dtype_name(out)))
            return step.launch(fmt, family, shape, weights, activations, out)

        return replace(step, launch=launch)

    case = Case((3, 5, 64), "normal", 7)
    for step, right in ((step_of(), True), (step_of(off=1.05), False)):
        work = Work(noting(step), "A16", "q4_1")
        found = check_works([work], lambda _: [case], Simulator, dtype=dtype)
        assert found.ok == right
    assert set(seen) == {(dtype if dtype != "float32" else "float16", dtype)}, "as rows"
    seen.clear()
    no_bfloat16 = noting(replace(step_of(), outputs=OUTPUTS[:2]))
    check_works([Work(no_bfloat16, "A16", "q4_1")], lambda _: [case], Simulator, dtype="bfloat16")
    assert seen == [("float16", "bfloat16")], "rows made of float32"
    given = {one: Problem(3, 5, 64, "q4_1", input=one) for one in OUTPUTS}
    work = Work(step_of(), "A16", "q4_1")
    assert check_works([work], lambda _: [case], Simulator, problem_of=given.get, dtype=dtype).ok
