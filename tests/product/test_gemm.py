"""gemm and pack: right products come out, wrong requests are refused and nothing is written."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import steps
from qformats import BLOCK, FORMATS, WEIGHT_FORMATS, quantize
from reference import Problem, nmse, same_operands
from reference.bfloat16 import bfloat16_bits, rounded_to_bfloat16
from steps.contract import Kernel, why_no_gpu
from steps.driver.machines import Simulator
from steps.kernels.parts.activations.layouts import (
    all_float16_rows,
    float16_rows_of_many,
    inputs,
)
from steps.product import gemm as api
from steps.product.choice import Request
from steps.registry import kernels

MACHINE = Simulator()
A8_WITHIN_A16 = 1e-4
SENTINEL = np.float32(-7.0)


class Untouched:
    """A machine on which nothing may happen; `cc` None as the simulator's."""

    name = "untouched"
    cc = None

    def __getattr__(self, name: str):
        raise AssertionError(f"a refused request used machine.{name}")


class OnDevice:
    """What gemm sees of an array on a GPU: its __cuda_array_interface__."""

    def __init__(self, shape, typestr="<f4", strides=None, address=4096, read_only=False) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": typestr,
            "strides": strides,
            "data": (address, read_only),
            "version": 3,
        }


def activations(m: int = 2, k: int = 64) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((m, k), dtype=np.float32)


def weights(n: int = 3, k: int = 64, name: str = "q4_0") -> np.ndarray:
    return quantize(np.random.default_rng(1).standard_normal((n, k), dtype=np.float32), name)


# --- right products -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float16, "bfloat16"])
def test_no_tokens_give_an_empty_product(dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    w, packed, bias = weights(), api.pack(weights(), machine=MACHINE), np.ones(3, np.float32)
    monkeypatch.setattr(Simulator, "run", lambda *_: pytest.fail("a launch"))
    kind, a = np.uint16 if dtype == "bfloat16" else dtype, activations(0)
    for given_w in (w, packed):
        options = {"dtype": dtype, "bias": bias, "machine": MACHINE}
        c, choice = api.gemm(a, given_w, explain=True, **options)
        assert (c.shape, c.dtype) == ((0, 3), kind)
        assert "for M=1 N=3 K=64" in str(choice)
        out = np.empty((0, 3), kind)
        assert api.gemm(a, given_w, out=out, **options) is out


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@pytest.mark.parametrize("step", [None, 1, 3])
def test_products_in_every_format(name: str, step: int | None) -> None:
    problem = Problem(3, 5, 96, name)
    before = problem.a.tobytes(), problem.blocks.tobytes()
    c = api.gemm(problem.a, problem.blocks, step=step, machine=MACHINE)
    assert (problem.a.tobytes(), problem.blocks.tobytes()) == before
    assert c.dtype == np.float32
    assert c.shape == (3, 5)
    assert nmse(c, same_operands(problem.a, problem.blocks)[0]) < A8_WITHIN_A16


@pytest.mark.parametrize(
    "name",
    [
        *("q4_0", "q5_1", "q8_0"),
        *(
            pytest.param(one, marks=pytest.mark.every)
            for one in ("q4_1", "q5_0", "mxfp4", "iq4_nl", "nvfp4")
        ),
    ],
)
def test_weights_are_rounded_to_float16_at_most(name: str) -> None:
    """What `exact` promises, in every kernel and with A of each dtype: row i of A is 1 at K = 7 i
    alone, so a sum is one weight."""
    w = Problem(1, 24, 128, name, "normal").blocks
    for m in (1, 16):
        a, columns = np.zeros((m, 128), np.float32), 7 * np.arange(m)
        a[np.arange(m), columns] = 1
        right = FORMATS[name].dequantize(w).astype(np.float64)[:, columns].T
        given_as = {"float32": a, "float16": a.astype(np.float16), "bfloat16": bfloat16_bits(a)}
        for kernel in (one for one in kernels() if "A16" in one.families and name in one.formats):
            if kernel.accuracy != "exact" or m > (kernel.most_tokens or m):
                continue
            for dtype in inputs(kernel, "A16"):
                step = kernel.number
                c = api.gemm(given_as[dtype], w, step=step, family="A16", machine=MACHINE)
                off = np.abs(c - right)
                assert (off <= 2.0**-11 * np.abs(right) + 2.0**-24 * np.abs(right).max()).all()


@settings(max_examples=15, deadline=None)
@given(
    m=st.integers(1, 5),
    n=st.integers(1, 9),
    blocks_k=st.integers(1, 3),
    name=st.sampled_from(WEIGHT_FORMATS),
    family=st.sampled_from([None, "A16", "A8"]),
    packed=st.booleans(),
)
def test_any_small_shape(m, n, blocks_k, name, family, packed) -> None:
    a, w = activations(m, blocks_k * BLOCK), weights(n, blocks_k * BLOCK, name)
    step = 3 if family else None
    held = api.pack(w, step=step, family=family, machine=MACHINE) if packed else w
    c = api.gemm(a, held, step=step, family=family, machine=MACHINE)
    want = same_operands(a, w)[0]
    size = np.abs(a) @ np.abs(FORMATS[name].dequantize(w)).T
    assert (np.abs(c - want) <= 0.02 * size).all(), "Q8_1 rounds an activation to half of 1/127"


def test_one_pack_serves_many_products() -> None:
    w = weights()
    handle = api.pack(w, machine=MACHINE)
    assert repr(handle) == "Packed(q4_0 [3, 64] for steps 10, 11, 13, 14, 17 and 18)"
    for m in (1, 4):
        a = activations(m)
        np.testing.assert_array_equal(
            api.gemm(a, handle), api.gemm(a, w, machine=MACHINE), strict=True
        )


def test_out_is_filled_and_returned() -> None:
    a, w = activations(), weights()
    out = np.full((2, 3), SENTINEL, np.float32)
    assert api.gemm(a, w, out=out, machine=MACHINE) is out
    np.testing.assert_array_equal(out, api.gemm(a, w, machine=MACHINE))


def test_c_may_be_float16_where_a_step_writes_it() -> None:
    """Rounded once from the float32 that it writes otherwise."""
    a, w = activations(), weights()
    for step in (one for one in kernels() if "float16" in one.outputs):
        out, full = np.zeros((2, 3), np.float16), api.gemm(a, w, step=step.number, machine=MACHINE)
        handle = api.pack(w, step=step.number, machine=MACHINE)
        assert api.gemm(a, handle, out=out, dtype=np.float16) is out
        np.testing.assert_array_equal(out, full.astype(np.float16))
    _, choice = api.gemm(a, w, dtype=np.float16, machine=MACHINE, explain=True)
    assert choice.writes == "float16"


READERS = [one for one in kernels() if "float16" in inputs(one, one.families[-1])]


@pytest.mark.parametrize("step", READERS, ids=lambda step: step.name)
def test_a_may_be_of_16_bits_where_a_step_reads_it(step: Kernel) -> None:
    """It is multiplied as it is: one launch of A16, whose products are those of its numbers. Only
    where bfloat16 becomes float16 there is a pass, and weights keep their 11 bits."""
    family, w = step.families[-1], weights()
    rounded = activations().astype(np.float16).astype(np.float32)
    for input in inputs(step, family)[1:]:
        bits = input == "bfloat16"
        numbers = rounded_to_bfloat16(rounded) if bits else rounded
        a = bfloat16_bits(numbers) if bits else numbers.astype(np.float16)
        machine = Counts()
        c, choice = api.gemm(a, w, step=step.number, machine=machine, explain=True)
        assert choice.family == family
        made = step.activations[family]
        passes = bits and made in (all_float16_rows, float16_rows_of_many)
        assert machine.ran == (1 if family == "A16" and not passes else 2)
        same = same_operands(numbers, w)[0]
        limit = 1e-5 if bits and not passes else 1e-6  # weights are rounded as A is
        assert nmse(c, same) < (limit if family == "A16" else 1e-3)
        if input in step.outputs:
            half = api.gemm(a, w, step=step.number, dtype=input, machine=machine)
            want = bfloat16_bits(c) if bits else c.astype(np.float16)
            np.testing.assert_array_equal(half, want, strict=True)


class Counts(Simulator):
    """`ran`: the launches so far."""

    def __init__(self) -> None:
        super().__init__()
        self.ran = 0

    def run(self, launch) -> None:
        self.ran += 1
        super().run(launch)


def test_the_step_is_one_that_reads_a() -> None:
    w = weights()
    for a in (activations(17).astype(np.float16), bfloat16_bits(activations(17))):
        _, choice = api.gemm(a, w, machine=MACHINE, explain=True)
        assert choice.reading.source == ("bfloat16" if a.dtype == np.uint16 else "float16")
    half = activations().astype(np.float16)
    _, choice = api.gemm(half, w, machine=MACHINE, explain=True)
    assert choice.reading.source == "float16"
    assert choice.kernel.most_tokens is not None
    handle = api.pack(w, step=5, machine=MACHINE)
    with pytest.raises(ValueError, match="step 5 reads A as float32, not float16"):
        api.gemm(half, handle)


def test_a_dtype_that_no_step_writes_is_refused() -> None:
    a, w = activations(), weights()
    for dtype in (np.float64, np.int8, "half a float", None):
        with pytest.raises(TypeError, match="dtype must be float32, float16 or bfloat16, got "):
            api.gemm(a, w, dtype=dtype, machine=Untouched())
    with pytest.raises(ValueError, match="step 5 writes C as float32, not float16"):
        api.gemm(a, w, step=5, dtype=np.float16, machine=Untouched())
    with pytest.raises(TypeError, match="out must be float32, got float16"):
        api.gemm(a, w, out=np.zeros((2, 3), np.float16), machine=Untouched())
    with pytest.raises(TypeError, match="out must be float16, got float32"):
        api.gemm(a, w, out=np.zeros((2, 3), np.float32), dtype="float16", machine=Untouched())
    handle = api.pack(w, step=7, machine=MACHINE)
    with pytest.raises(ValueError, match="step 7 writes C as float32, not float16"):
        api.gemm(a, handle, dtype=np.float16)


def test_the_package_exports_the_same_functions() -> None:
    handle = steps.pack(weights(), step=2, machine=MACHINE)
    assert steps.gemm(activations(), handle, family="A8").shape == (2, 3)
    if why_no_gpu() is None:
        c = steps.gemm(activations(), weights())
        assert c.shape == (2, 3)
    else:
        with pytest.raises(RuntimeError, match="no CUDA GPU can be used here"):
            steps.gemm(activations(), weights())


# --- refused requests -----------------------------------------------------------------------------

A, W = activations(), weights()
NAN = A.copy()
NAN[1, 5] = np.nan
BAD_SCALE = W.copy()
BAD_SCALE["d"][2, 1] = np.inf
with np.errstate(over="ignore"):  # NumPy's own value for what is masked is too large for float16
    MASKED = np.ma.masked_array(W)
BIAS = np.zeros(8, np.float32)
READ_ONLY = np.zeros((2, 3), np.float32)
READ_ONLY.setflags(write=False)


@pytest.mark.parametrize(
    ("a", "w", "options", "error", "said"),
    [
        (A.tolist(), W, {}, TypeError, "a must be a NumPy array or one on the GPU"),
        (A.astype(np.float64), W, {}, TypeError, "a must be float32, .* bfloat16, got float64"),
        (A.astype(">f4"), W, {}, TypeError, "a must be float32, float16 or bfloat16, got >f4"),
        (A[0], W, {}, ValueError, "a must have 2 dimensions, got 1"),
        (A[None], W, {}, ValueError, "a must have 2 dimensions, got 3"),
        (A[:, ::2], W, {}, ValueError, r"a must be C-contiguous, got strides \(256, 8\)"),
        (np.asfortranarray(A), W, {}, ValueError, "a must be C-contiguous"),
        (A[:, :0], W, {}, ValueError, r"a has no columns: its shape is \(2, 0\)"),
        (A[:0, :32], W, {}, ValueError, "a has K=32 columns and w has 2 blocks .* K=64"),
        (A[:0], W, {"step": 99}, ValueError, "there is no step 99"),
        (A[:0], W, {"out": np.zeros((2, 3), np.float32)}, ValueError, r"\[0, 3\], got \[2, 3\]"),
        (A[:, :33].copy(), W, {}, ValueError, "K=33 is not a multiple .* to 64 columns"),
        (A[:, :32].copy(), W, {}, ValueError, "a has K=32 columns and w has 2 blocks .* K=64"),
        (NAN, W, {}, ValueError, "a has 1 values that are NaN or Inf"),
        (A, W.view(np.uint8), {}, TypeError, "w must hold blocks of q4_0, .* got uint8"),
        (A, quantize(A, "q8_1"), {}, TypeError, "got q8_1, which is for activations"),
        (A, A, {}, TypeError, "w must hold blocks"),
        (
            A,
            "q4_0",
            {},
            TypeError,
            "w must be a NumPy array of blocks .* or what steps.pack made of one .*, got str",
        ),
        (A, W[0], {}, ValueError, r"w must have shape \[N, K/32\], got 1 dimensions"),
        (A, W[:0], {}, ValueError, "w is empty"),
        (A, BAD_SCALE, {}, ValueError, "w has d = inf in block 1 of row 2: it must be finite"),
        (A, W, {"step": 99}, ValueError, "there is no step 99"),
        (A, W, {"step": True}, TypeError, "step is True: it must be the number of a step"),
        (A, W, {"step": 3.0}, TypeError, "step is 3.0: it must be the number of a step"),
        (A, W, {"family": []}, ValueError, r"family is \[\]: it must be A16 or A8"),
        (A, W, {"accuracy": ""}, ValueError, "accuracy is '': it must be one of exact, fast"),
        (np.ma.masked_array(A), W, {}, TypeError, "a must be a NumPy array .* got MaskedArray"),
        (A, MASKED, {}, TypeError, "w must be a NumPy array .* got MaskedArray"),
        (A, W, {"bias": np.ma.zeros(3, "f4")}, TypeError, "bias must be .* got MaskedArray"),
        (A, W, {"out": A.reshape(-1)[64:70].reshape(2, 3)}, ValueError, "out overlaps a, which"),
        (A, W, {"out": BIAS[:6].reshape(2, 3), "bias": BIAS[5:8]}, ValueError, "overlaps bias,"),
        (A, W, {"out": np.frombuffer(W, "f4")[3:9].reshape(2, 3)}, ValueError, "overlaps w,"),
        (A, W, {"out": np.zeros((3, 2), np.float32)}, ValueError, r"\[2, 3\], got \[3, 2\]"),
        (A, W, {"out": np.zeros((2, 3))}, TypeError, "out must be float32, got float64"),
        (A, W, {"out": np.zeros((2, 6), np.float32)[:, ::2]}, ValueError, "C-contiguous"),
        (
            A,
            W,
            {"out": READ_ONLY},
            ValueError,
            r"out \[2, 3\] is read-only: C needs an array that may be written",
        ),
        (A, W, {"out": [0.0]}, TypeError, "out must be a NumPy array"),
        (A, W, {"out": OnDevice((2, 3))}, TypeError, "out must be a NumPy array, as a is"),
        (OnDevice((2, 64)), W, {}, TypeError, "a is on a GPU and the machine is"),
        (OnDevice((2, 64), "<f8"), W, {}, TypeError, "a must be float32, .* got float64"),
        (OnDevice((2, 64), address=4098), W, {}, ValueError, "a begins 2 bytes past .* of 4,"),
        (
            OnDevice((2, 64), "<f2", address=4104),
            W,
            {},
            ValueError,
            "a begins at 0x1008, 8 bytes past a multiple of 16, and kernels copy float16 16 bytes "
            r"at a time: make an aligned copy, in torch a.clone\(\)",
        ),
        (OnDevice((2, 64), "<u2", address=4098), W, {}, ValueError, "kernels copy bfloat16 16 "),
        (OnDevice((2, 64), "<f2", strides=(2, 4)), W, {}, ValueError, "make a contiguous copy"),
        (NAN.astype(np.float16), W, {}, ValueError, "a has 1 values that are NaN or Inf"),
        (bfloat16_bits(NAN), W, {}, ValueError, "a has 1 values that are NaN or Inf"),
        (OnDevice((2, 64), strides=(4, 8)), W, {}, ValueError, "C-contiguous"),
        (OnDevice((2, 64)), W, {"out": A}, TypeError, "out must be on the GPU, as a is"),
        (
            OnDevice((2, 64)),
            W,
            {"out": OnDevice((2, 3), address=9000, read_only=True)},
            ValueError,
            r"out \[2, 3\] is read-only",
        ),
    ],
)
def test_refused_with_one_sentence_and_nothing_written(a, w, options, error, said) -> None:
    out = options.get("out")
    before = out.copy() if isinstance(out, np.ndarray) else None
    with pytest.raises(error, match=said) as refused:
        api.gemm(a, w, machine=Untouched(), **options)
    assert "\n" not in str(refused.value)
    if before is not None:
        np.testing.assert_array_equal(out, before)


def test_what_is_no_machine_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"machine is 'gpu': it must be Gpu\(\) or Simulator\(\) of"
    ):
        api.gemm(A, W, machine="gpu")
    with pytest.raises(TypeError, match=r"Simulator'>: it must be Gpu\(\) or Simulator\(\) of"):
        api.gemm(A, W, machine=type(MACHINE))
    with pytest.raises(ValueError, match="packed on simulator, not on gpu"):
        api.gemm(A, api.pack(W, machine=MACHINE), machine="gpu")


def test_a_side_that_int32_does_not_hold_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^M=2147483648 and kernels count to 2147483647: multiply"
    ):
        steps.plan(2**31, W, machine=Untouched())
    for side in ("n", "k"):
        with pytest.raises(ValueError, match=f"^{side.upper()}=2147483648 and kernels count to"):
            Request("q4_0", **{"m": 1, "n": 32, "k": 32, side: 2**31})
    Request("q4_0", 2**31 - 1, 32, 32)


def test_packed_weights_are_themselves_alone() -> None:
    """They lie on a machine."""
    one, other = api.pack(W, machine=MACHINE), api.pack(W, machine=MACHINE)
    assert {one: 1, other: 2}[one] == 1
    assert one != other
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"^Packed\(q4_0 .* neither copied nor pickled: keep"):
            copied(one)


def test_packed_weights_stay_where_they_are() -> None:
    handle = api.pack(W, step=2, machine=MACHINE)
    with pytest.raises(ValueError, match="packed for step 2, not for step 5"):
        api.gemm(A, handle, step=5)
    with pytest.raises(ValueError, match="packed on simulator, not on untouched"):
        api.gemm(A, handle, machine=Untouched())
    with pytest.raises(ValueError, match="step 2 is of family A8, not A16"):
        api.gemm(A, handle, family="A16")


def test_a_kernel_that_fails_leaves_out_alone() -> None:
    class Failing(Simulator):
        def run(self, launch) -> None:
            raise RuntimeError("the launch failed")

    out = np.full((2, 3), SENTINEL, np.float32)
    with pytest.raises(RuntimeError, match="the launch failed"):
        api.gemm(A, W, out=out, machine=Failing())
    assert (out == SENTINEL).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_on_a_gpu(name: str) -> None:
    from numba import cuda

    problem = Problem(33, 66, 96, name)
    want = same_operands(problem.a, problem.blocks)[0]
    c = steps.gemm(problem.a, problem.blocks)
    assert nmse(c, want) < A8_WITHIN_A16
    handle = api.pack(problem.blocks)
    on_device = cuda.to_device(problem.a)
    result = api.gemm(on_device, handle)
    np.testing.assert_array_equal(result.copy_to_host(), c)
    out = cuda.device_array((33, 66), np.float32)
    assert api.gemm(on_device, handle, out=out) is out
    np.testing.assert_array_equal(out.copy_to_host(), c)


def test_a_row_of_an_invariant_product_has_the_same_bits_at_every_m() -> None:
    """On its own, in a plan, and whatever the other rows are."""
    problem, machine = Problem(5, 40, 288, "q4_0", input="float16"), Simulator()
    w = steps.pack(problem.blocks, machine=machine)
    a = problem.given
    every = steps.gemm(a, w, invariant=True)
    for m in (1, 3):
        assert np.array_equal(steps.gemm(a[:m], w, invariant=True), every[:m])
        others = np.concatenate([a[:m], 7 * a[m:]])
        assert np.array_equal(steps.gemm(others, w, invariant=True)[:m], every[:m])
        out = np.empty((m, 40), np.float32)
        steps.plan(m, w, input="float16", invariant=True)(np.ascontiguousarray(a[:m]), out)
        assert np.array_equal(out, every[:m])
