"""What may go wrong at the edges: every step gives the right result, or the door one sentence.

Small problems in which everything odd comes together: weights with a scale of 0, of the ends of
float16, negative, with all codes at an extreme; tokens that are zero, tiny, huge, of one element;
activations that begin anywhere in a larger buffer; views of weights. Then what no kernel can do,
which `gemm` refuses before anything is launched.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import numpy as np
import pytest

import steps
from qformats import BLOCK, FORMATS, WEIGHT_FORMATS, format_of
from qformats.repack import byte_weights
from reference import (
    Halves,
    Problem,
    Tokens,
    bound,
    same_operands,
)
from reference.exact import pack_block
from steps.contract import Family, Kernel, Machine, Shape
from steps.driver.machines import Simulator
from steps.kernels.parts.activations.layouts import decode
from steps.product import gemm as door
from tests.driver.fake_gpu import FakeGpu
from tests.product.test_gemm import OnDevice, Untouched
from tests.steps.works import FLOAT32, TAKEN, WORKS, by_turn

MACHINE = Simulator()
K = 64
OFFSETS = (0, 1, 2, 3)  # floats from a multiple of 16 bytes

SMALLEST_HALF, LARGEST_HALF = 2.0**-24, 65504.0
LARGEST_SUM = 65504.0  # of a block of activations, where it is kept in float16


# --- odd operands ---------------------------------------------------------------------------------


@cache
def odd_weights(name: str) -> np.ndarray:
    """Blocks [8, K/32], each row odd in its own way."""
    low, high = {4: (0, 15), 5: (0, 31), 8: (-128, 127)}[FORMATS[name].bits]
    rng = np.random.default_rng(3)
    codes = rng.integers(low, high, size=(8, K // BLOCK, BLOCK), endpoint=True)
    scale = np.full(codes.shape[:2], 2.0**-3)
    m = np.full(codes.shape[:2], -0.5)
    codes[0], codes[1] = low, high
    codes[2] = np.where(np.arange(BLOCK) % 2, low, high)
    scale[3] = 0.0
    scale[4, 0], m[4, 0] = 0.0, 0.0  # an empty block beside a full one
    scale[5], m[5] = SMALLEST_HALF, -SMALLEST_HALF
    scale[6], m[6] = LARGEST_HALF, -LARGEST_HALF
    scale[7], m[7] = (-LARGEST_HALF, LARGEST_HALF) if name in ("q4_0", "q5_0") else (1.0, 3.0)
    return pack_block(name, codes, scale, m if "m" in (FORMATS[name].dtype.names or ()) else None)


@cache
def odd_tokens(in_half: bool) -> np.ndarray:
    """float32 [6, K], each token odd in its own way.

    in_half: d and s of every block fit in float16, as Q8_1 in 36-byte blocks needs.
    """
    rng = np.random.default_rng(4)
    a = rng.standard_normal((6, K), dtype=np.float32)
    a[1] = 0
    a[2] *= np.float32(1e-30)
    a[3, 1:] = 0  # one element of one block; the other block is empty
    if in_half:
        a[4] *= np.float32(1e3)
        a[5, :BLOCK] = LARGEST_SUM / BLOCK
    else:
        a[4] *= np.float32(1e28)
        a[5] = 1e5  # beyond float16, and so is the sum of a block
    return a


def multiplied(
    step: Kernel,
    family: Family,
    a: np.ndarray,
    blocks: np.ndarray,
    machine: Machine,
    offset: int = 0,
) -> tuple[np.ndarray, Any]:
    """(C on the host, the Q8_1 bits, halves or int8 multiplied, None where it was A itself).

    A begins `offset` floats into a larger buffer of NaN, C lies in one too.
    """
    shape = Shape(a.shape[0], blocks.shape[0], a.shape[1])
    weights = tuple(machine.array(array) for array in step.pack(blocks))
    around = np.full(offset + a.size + 64, np.nan, np.float32)
    around[offset : offset + a.size] = a.reshape(-1)
    source = machine.array(around)[offset : offset + a.size].reshape(*a.shape)
    out = machine.array(np.full((shape.m, shape.n), np.nan, np.float32))
    activations = step.activations[family](source, machine)
    own = step.prepare(machine, format_of(blocks), family, shape, weights, activations.arrays, out)
    for launch in (*activations.launches, own):
        machine.run(launch)
    if activations.layout is None:
        return machine.host(out), None
    arrays = tuple(machine.host(array) for array in activations.arrays)
    return machine.host(out), decode(activations.layout, arrays, shape.m, shape.k)


def require_right(c: np.ndarray, family: Family, a: np.ndarray, blocks: np.ndarray, given: Any):
    """Every output within the rounding bound of the product of the same operands."""
    operands = {Halves: "f16_weights", Tokens: "int8"}.get(type(given), "f32")
    wanted, size = same_operands(a if given is None else given, blocks)
    _require_within(c, wanted, bound(family, a.shape[1], size, operands))


def require_near(
    c: np.ndarray,
    family: Family,
    a: np.ndarray,
    blocks: np.ndarray,
    in_half: bool,
    accuracy: str = "exact",
):
    """The same, where the bits of A are not seen: within what they may lose of the product.

    A code is off by half of d = amax / 127 at most. float16 rounds d and s by 2^-11, and below
    2^-14 more: such tokens are left out. A16 may round A and W to float16: A by 2^-11, or by 2^-39
    of the token's largest.
    A step that is not exact has one d for all of a token, and weights in int8.
    """
    wanted, size = same_operands(a, blocks)
    allowed = bound(family, a.shape[1], size)
    if family == "A16":
        most = np.broadcast_to(np.abs(a).max(axis=1, keepdims=True), a.shape)
        least = 2.0**-39 * same_operands(most, blocks)[1]
        _, size = same_operands(Halves.of_values(a), blocks)
        allowed = (1 + 2.0**-11) * bound(family, a.shape[1], size, "f16_weights")
        allowed += 2.0**-11 * size + least
    if accuracy == "fast":
        exact = FORMATS[format_of(blocks).name].dequantize(blocks).astype(np.float64)
        codes, factor = byte_weights(blocks)
        off = np.abs(codes * factor.astype(np.float64)[:, None] - exact)
        half_step = np.abs(a).max(axis=1, keepdims=True).astype(np.float64) / 127 / 2
        lost = half_step @ np.abs(exact).sum(axis=1)[None] + (np.abs(a) + half_step) @ off.T
        allowed = 2 * allowed + 1.01 * lost
    elif family == "A8":
        amax = np.abs(a).reshape(len(a), -1, BLOCK).max(axis=-1).astype(np.float64)
        weights = np.abs(FORMATS[format_of(blocks).name].dequantize(blocks)).astype(np.float64)
        lost = amax / 127 / 2 @ weights.reshape(len(blocks), -1, BLOCK).sum(axis=-1).T
        largest = np.repeat(amax, BLOCK, axis=1).astype(np.float32)
        allowed = 2 * allowed + 1.01 * lost
        if in_half:
            allowed += 2.0**-10 * same_operands(largest, blocks)[1]
            allowed[((amax > 0) & (amax / 127 < 2.0**-14)).any(axis=1)] = np.inf
    _require_within(c, wanted, allowed)


def _require_within(c: np.ndarray, wanted: np.ndarray, allowed: np.ndarray) -> None:
    assert np.isfinite(c).all(), f"not finite at [token, feature] {np.argwhere(~np.isfinite(c))[0]}"
    wrong = ~(np.abs(c - wanted) <= allowed)
    if wrong.any():
        m, n = np.argwhere(wrong)[0]
        raise AssertionError(f"C[{m}, {n}] is {c[m, n]} and not {wanted[m, n]}")


def keeps_sums_in_half(step: Kernel, family: Family) -> bool:
    """Whether its activations are 36-byte blocks, where d and s are float16."""
    activations = step.activations[family](MACHINE.array(np.zeros((1, 32), np.float32)), MACHINE)
    return activations.layout == "blocks"


# --- every step, in the simulator -----------------------------------------------------------------


@pytest.mark.parametrize(("step", "family", "name"), by_turn(FLOAT32))
def test_odd_weights_and_odd_tokens_that_begin_anywhere(
    step: Kernel, family: Family, name: str
) -> None:
    """The offset of A goes round the formats, the lane orders round the steps."""
    half = keeps_sums_in_half(step, family)
    a, blocks = odd_tokens(half), odd_weights(name)
    offset = OFFSETS[WEIGHT_FORMATS.index(name) % len(OFFSETS)]
    c, q81 = multiplied(step, family, a, blocks, Simulator(step.number), offset)
    require_right(c, family, a, blocks, q81)
    require_near(c, family, a, blocks, half, step.accuracy)


@pytest.mark.parametrize(("step", "family", "name"), by_turn(WORKS))
def test_weights_may_be_any_view(step: Kernel, family: Family, name: str) -> None:
    """Non-contiguous, unaligned, backwards, read-only: packing copies."""
    blocks = Problem(4, 6, 2 * K, name).blocks
    wanted = [array.tobytes() for array in step.pack(blocks)]
    for view in views(blocks):
        np.testing.assert_array_equal(view, blocks)
        packed = step.pack(view)
        assert [array.tobytes() for array in packed] == wanted
        assert all(array.flags.c_contiguous for array in packed)


def views(array: np.ndarray) -> list[np.ndarray]:
    """The same values in other places: every other row and column, other orders, odd addresses."""
    n, k = array.shape
    spread = np.zeros((2 * n, 3 * k), array.dtype)
    spread[::2, 1::3] = array
    backwards = array[::-1, ::-1].copy()[::-1, ::-1]
    odd = np.zeros(array.nbytes + 3, np.uint8)
    odd[3:] = np.frombuffer(array.tobytes(), np.uint8)
    unaligned = odd[3:].view(array.dtype).reshape(n, k)
    return [spread[::2, 1::3], np.asfortranarray(array), backwards, unaligned]


# --- gemm -----------------------------------------------------------------------------------------

GIVEN = [work for work in TAKEN if work in FLOAT32]
ONCE = [work for work in GIVEN if work.values[2] == "q4_1"]
"""All that `gemm` takes float32 A for, in every family, in one format."""


@pytest.mark.parametrize(("step", "family", "name"), ONCE)
def test_activations_beyond_half_precision_are_right_or_refused(
    step: Kernel, family: Family, name: str
) -> None:
    """3275 a value: the sum of a block overflows; 1e7: its scale too; 1e30: the value itself."""
    w = Problem(1, 3, BLOCK, name).blocks
    ask: dict[str, Any] = {"step": step.number, "family": family, "machine": Simulator()}
    a = np.repeat(np.float32([[LARGEST_SUM / 20], [1e7], [1e30]]), BLOCK, axis=1)
    if keeps_sums_in_half(step, family):
        for token in a:
            with pytest.raises(ValueError, match=r"q8_1 needs .* limit of 65504") as refused:
                door.gemm(token[None], w, **ask)
            assert "\n" not in str(refused.value)
    else:
        require_near(door.gemm(a, w, **ask), family, a, w, False, step.accuracy)


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_weight_block_without_a_finite_scale_is_refused(name: str, value: float) -> None:
    for field in ("d", "m"):
        w = Problem(1, 3, K, name).blocks.copy()
        if field not in (w.dtype.names or ()):
            continue
        w[field][2, 1] = value
        said = rf"w has {field} = {value} in block 1 of row 2: it must be finite$"
        with pytest.raises(ValueError, match=said):
            door.gemm(np.ones((1, K), np.float32), w, machine=Untouched())
        with pytest.raises(ValueError, match=said):
            door.pack(w, machine=Untouched())


@pytest.mark.parametrize("shape", [(2, 0), (0, 0)])
def test_no_columns_is_a_sentence(shape: tuple[int, int]) -> None:
    w = Problem(1, 3, K, "q4_0").blocks
    for a in (np.zeros(shape, np.float32), OnDevice(shape)):
        said = rf"a has no columns: its shape is \({shape[0]}, 0\)"
        with pytest.raises(ValueError, match=said):
            door.gemm(a, w, machine=Untouched())
    with pytest.raises(ValueError, match=r"w is empty: its shape is \(0, 2\)"):
        door.gemm(np.zeros((2, K), np.float32), w[:0], machine=Untouched())


@pytest.mark.parametrize("past", [1, 2, 3])
def test_addresses_that_no_kernel_can_use_are_refused(past: int, gpu: FakeGpu) -> None:
    """An output of 128-bit stores begins at 16 bytes, a float32 anywhere at four."""
    w, a = Problem(1, 3, K, "q4_0").blocks, OnDevice((2, K), address=2**16)
    out = OnDevice((2, 3), address=4096 + 4 * past)
    with pytest.raises(ValueError, match=f"out begins {4 * past} bytes past a multiple of 16"):
        door.gemm(a, w, out=out, machine=gpu)
    assert not gpu.launched
    out = OnDevice((2, 3), address=4096 + past)
    with pytest.raises(ValueError, match=f"out begins {past} bytes past a multiple of 4"):
        door.gemm(a, w, out=out, machine=Untouched())
    with pytest.raises(ValueError, match=f"a begins {past} bytes past a multiple of 4"):
        door.gemm(OnDevice((2, K), address=2**16 + past), w, machine=Untouched())


@pytest.mark.parametrize("offset", OFFSETS)
def test_views_on_the_host_may_begin_anywhere(offset: int) -> None:
    problem = Problem(2, 3, K, "q5_1")
    w = views(problem.blocks)[offset]
    wanted = door.gemm(problem.a, problem.blocks, step=5, machine=Simulator())
    a = np.zeros(2 * K + offset, np.float32)[offset:].reshape(2, K)
    a[:] = problem.a
    around = np.zeros(6 + 2 * offset, np.float32)
    out = around[offset : offset + 6].reshape(2, 3)
    out[:] = np.nan
    assert door.gemm(a, w, step=5, out=out, machine=Simulator()) is out
    np.testing.assert_array_equal(out, wanted)
    assert not around[:offset].any()
    assert not around[offset + 6 :].any()
    unaligned = np.frombuffer(b"..." + problem.a.tobytes(), np.float32, offset=3).reshape(2, K)
    c = door.gemm(unaligned, problem.blocks, step=5, machine=Simulator())
    np.testing.assert_array_equal(c, wanted)


# --- on a GPU -------------------------------------------------------------------------------------

ENDS = (
    *((m, n, k) for m, n, k in itertools.product((1, 2, 16, 17), (1, 3, 33), (32, 96))),
    (1, 1, 14336),
    (3, 1, 4128),
    (300, 1, 32),
    (1, 4099, 32),
    (513, 5, 32),
)
"""K = 32, one feature, one token, and both sides of where a step changes its tile."""


@pytest.mark.gpu
@pytest.mark.parametrize(("step", "family", "name"), FLOAT32)
def test_odd_operands_on_a_gpu(step: Kernel, family: Family, name: str) -> None:
    from steps.driver.machines import Gpu

    half = keeps_sums_in_half(step, family)
    a, blocks, machine = odd_tokens(half), odd_weights(name), Gpu()
    for offset in OFFSETS:
        c, q81 = multiplied(step, family, a, blocks, machine, offset)
        require_right(c, family, a, blocks, q81)
        require_near(c, family, a, blocks, half, step.accuracy)


@pytest.mark.gpu
@pytest.mark.parametrize(("step", "family", "name"), GIVEN)
def test_the_ends_of_every_shape_on_a_gpu(step: Kernel, family: Family, name: str) -> None:
    """Through `gemm`, on views that begin anywhere; C is written where it was asked for."""
    from numba import cuda

    half = keeps_sums_in_half(step, family)
    for at, (m, n, k) in enumerate(ENDS):
        problem = Problem(m, n, k, name, seed=at)
        offset = at % len(OFFSETS)
        host = np.full(m * k + offset + 5, np.nan, np.float32)
        host[offset : offset + m * k] = problem.a.reshape(-1)
        a = cuda.to_device(host)[offset : offset + m * k].reshape(m, k)
        around = cuda.to_device(np.full(m * n + 8, -7, np.float32))
        out = around[4 : 4 + m * n].reshape(m, n)
        handle = steps.pack(problem.blocks, step=step.number, family=family)
        assert steps.gemm(a, handle, family=family, out=out) is out
        c = around.copy_to_host()
        assert (c[:4] == -7).all()
        assert (c[4 + m * n :] == -7).all()
        require_near(
            c[4 : 4 + m * n].reshape(m, n),
            family,
            problem.a,
            problem.blocks,
            half,
            step.accuracy,
        )
        out.copy_to_device(np.full((m, n), np.nan, np.float32))
        steps.plan(m, handle, family=family)(a, out)
        np.testing.assert_array_equal(around.copy_to_host(), c)


@pytest.mark.gpu
@pytest.mark.parametrize(("step", "family", "name"), ONCE)
def test_what_is_refused_on_a_gpu_writes_nothing(step: Kernel, family: Family, name: str) -> None:
    from numba import cuda

    problem = Problem(2, 6, BLOCK, name)
    a = cuda.to_device(problem.a)
    around = cuda.to_device(np.full(64, -7, np.float32))
    plan = steps.plan(2, problem.blocks, step=step.number, family=family)
    for offset in (1, 2, 3):
        out = around[offset : offset + 12].reshape(2, 6)
        with pytest.raises(ValueError, match=f"out begins {4 * offset} bytes past"):
            steps.gemm(a, problem.blocks, step=step.number, family=family, out=out)
        with pytest.raises(ValueError, match=f"out begins {4 * offset} bytes past"):
            plan(a, out)
    loud = np.full((2, BLOCK), 1e30, np.float32)
    out = around[:12].reshape(2, 6)
    ask = {"step": step.number, "family": family, "out": out}
    if keeps_sums_in_half(step, family):
        with pytest.raises(ValueError, match=r"q8_1 needs .* limit of 65504"):
            steps.gemm(cuda.to_device(loud), problem.blocks, **ask)
        assert (around.copy_to_host() == -7).all()
    else:
        steps.gemm(cuda.to_device(loud), problem.blocks, **ask)
        c = out.copy_to_host()
        require_near(c, family, loud, problem.blocks, False, step.accuracy)
    nothing = steps.gemm(a[:0], problem.blocks, step=step.number, family=family)
    assert nothing.shape == (0, 6)
