"""A bias of gemm and of plans: added by the step, checked like other operands, never in silence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from qformats import dequantize
from reference import Problem
from reference.bfloat16 import bfloat16_bits
from steps import gemm, ladder, pack, plan
from steps.contract import FLOATS, Kernel, array_dtype
from steps.driver.machines import Gpu, Simulator
from steps.product import gemm as gemm_file
from steps.product.choice import Request, choose
from steps.registry import kernel_of
from tests.driver.fake_gpu import FakeGpu, Tensor, device_array
from tests.product.test_gemm import OnDevice, Untouched

M, N, K = 3, 21, 96
PROBLEM = Problem(M, N, K, "q4_1", "integer")
A, W = PROBLEM.a, PROBLEM.blocks
BIAS = np.arange(-10, 11, dtype=np.float32)
EXPECTED = A.astype(np.float64) @ dequantize(W).astype(np.float64).T + BIAS
"""All of it integers times a power of two, which float32 holds in any order of adding."""
HERE = 1 << 44


def of(dtype: str) -> np.ndarray:
    return bfloat16_bits(BIAS) if dtype == "bfloat16" else BIAS.astype(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_bias_of_integers_is_added_to_the_bit(dtype: str) -> None:
    """On blocks, on packed weights and in a plan, for one token and for many."""
    machine, bias = Simulator(), of(dtype)
    np.testing.assert_array_equal(gemm(A, W, bias=bias, machine=machine), EXPECTED)
    handle, out = pack(W, machine=machine), np.zeros((M, N), np.float32)
    c, choice = gemm(A, handle, bias=bias, step=14, explain=True)
    np.testing.assert_array_equal(c, EXPECTED)
    assert choice.kernel.number == 14
    made = plan(M, handle, bias=bias, step=11)
    bias[:] = 0  # a plan has its own copy
    made(A, out)
    np.testing.assert_array_equal(out, EXPECTED)


ADDING = [one for one in (kernel_of(step.number) for step in ladder()) if one.adds_bias]
EXACT = [one for one in ADDING if one.accuracy == "exact"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("step", EXACT, ids=lambda step: step.name)
def test_every_step_adds_one_on_a_gpu(step: Kernel, dtype: str) -> None:
    from numba import cuda

    if why := step.supports("q4_1", step.families[-1], Gpu().cc):
        pytest.skip(why)
    handle = pack(W, step=step.number)
    np.testing.assert_array_equal(gemm(A, handle, bias=of(dtype)), EXPECTED)
    c = gemm(cuda.to_device(A), handle, bias=cuda.to_device(of(dtype)))
    np.testing.assert_array_equal(c.copy_to_host(), EXPECTED)


def test_only_steps_that_add_a_bias_are_chosen() -> None:
    class Old:
        name, cc, sms = "a GPU without a table", (7, 5), 40

    few = Request("q4_0", M, N, K)
    assert not choose(few, Old).kernel.adds_bias
    with pytest.raises(
        ValueError, match=r"^no step can do this: steps 1, .* and 16 add no bias: add"
    ):
        choose(replace(few, bias="float32"), Old)
    for m in (1, 300):
        assert choose(replace(few, m=m, bias="float32"), Simulator()).bias == "float32"


@pytest.mark.parametrize(
    ("bias", "options", "error", "said"),
    [
        (BIAS[1:].copy(), {}, ValueError, r"bias must have shape \[N\] = \[21\], got \[20\]"),
        (BIAS[None], {}, ValueError, r"bias must have 1 dimension, got 2: its shape is \(1, 21\)"),
        (BIAS.astype(np.float64), {}, TypeError, "bias must be float32, .* got float64"),
        (np.repeat(BIAS, 2)[::2], {}, ValueError, r"bias must be C-contiguous, got strides \(8,\)"),
        (
            np.append(BIAS[1:], np.nan).astype("f4"),
            {},
            ValueError,
            "bias has 1 values that are NaN",
        ),
        (BIAS.tolist(), {}, TypeError, "bias must be a NumPy array or one on the GPU .* got list"),
        (OnDevice((N,)), {}, TypeError, "bias (must be a NumPy array|is on a GPU and the machine)"),
        (
            BIAS,
            {"step": 5},
            ValueError,
            "step 5 adds no bias: take one of steps 10, 11, .* 17 and 18, or add it to C yourself$",
        ),
    ],
)
def test_refused_with_one_sentence(bias: Any, options: Any, error: Any, said: str) -> None:
    with pytest.raises(error, match=f"^{said}") as refused:
        gemm(A, W, bias=bias, machine=Untouched(), **options)  # type: ignore[arg-type]
    assert "\n" not in str(refused.value)
    with pytest.raises(error, match=f"^{said}"):
        plan(M, W, bias=bias, machine=Untouched(), **options)  # type: ignore[arg-type]


def test_weights_packed_for_a_step_without_one_are_refused() -> None:
    handle = pack(W, step=5, machine=Simulator())
    for call in (lambda: gemm(A, handle, bias=BIAS), lambda: plan(M, handle, bias=BIAS)):
        with pytest.raises(ValueError, match=r"^step 5 adds no bias: take one of steps 10, "):
            call()


# --- on a GPU that is not there -------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 300])
@pytest.mark.parametrize("dtype", FLOATS)
def test_one_launch_reads_a_bias_where_it_lies(
    gpu: FakeGpu, torch: Any, monkeypatch: Any, m: int, dtype: str
) -> None:
    """Other products have other launches; the address is that of the call."""
    made: list[Any] = []
    original = gemm_file.prepare
    noted = lambda *given: made.append(original(*given)) or made[-1]  # noqa: E731
    monkeypatch.setattr(gemm_file, "prepare", noted)
    handle = pack(W, machine=gpu)
    a = Tensor((m, K), HERE, dtype="float16")
    gemm(a, handle)
    for at in (2 * HERE, 3 * HERE):
        gpu.launched.clear()
        gemm(a, handle, bias=Tensor((N,), at, dtype=dtype))
        assert len(gpu.launched) == 1
        assert at in gpu.values()
    gpu.launched.clear()
    out = Tensor((m, N), 5 * HERE)
    plan(m, handle, bias=device_array((N,), array_dtype(dtype), 4 * HERE), input="float16")(a, out)
    assert len(gpu.launched) == 1
    assert 4 * HERE in gpu.values()
    assert [choice.bias for choice, _ in made] == [None, dtype], "a plan takes what gemm prepared"


def test_what_changes_from_call_to_call_is_checked_at_each(gpu: FakeGpu, torch: Any) -> None:
    handle = pack(W, machine=gpu)
    a, out, good = Tensor((M, K), HERE), Tensor((M, N), 2 * HERE), Tensor((N,), 3 * HERE)
    for known in (False, True):
        if known:
            gemm(a, handle, out=out, bias=good)
            gpu.launched.clear()
        for bias, error, said in (
            (Tensor((N + 1,), 3 * HERE), ValueError, r"bias must have shape .*\[21\], got \[22\]"),
            (Tensor((N,), 3 * HERE, device_index=1), ValueError, "bias is on GPU 1 and the weigh"),
            (Tensor((N,), 3 * HERE + 2), ValueError, "bias begins 2 bytes past a multiple of 4"),
            (Tensor((N,), 2 * HERE + 16), ValueError, r"out .* overlaps bias \(84 bytes at"),
            (BIAS, TypeError, "bias must be on the GPU"),
            (Tensor((N,), 3 * HERE, requires_grad=True), ValueError, "^bias requires a gradient"),
        ):
            with pytest.raises(error, match=said):
                gemm(a, handle, out=out, bias=bias)
    made = plan(M, handle, bias=Tensor((N,), 2 * HERE + 16))
    with pytest.raises(ValueError, match=r"out .* overlaps bias \(84 bytes at"):
        made(a, out)
    assert gpu.launched == []
