"""`experts`, its plans and `pack_experts`: products on any machine, launches on a GPU, refusals."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qformats import FORMATS, dequantize, quantize
from qformats.repack import tiles
from reference import Problem, bfloat16_bits, nmse
from reference.limits import INT8_NMSE
from steps import experts, pack_experts
from steps.driver.machines import Simulator
from steps.kernels.experts import few, many
from steps.kernels.experts.gates import gated
from steps.product import experts as api
from steps.product.experts import ExpertsRequest, choose, gates_and_ups
from tests.driver.fake_gpu import FakeGpu, Tensor

E, N, K, T, S = 3, 48, 160, 2, 2
RNG = np.random.default_rng(0)
BLOCKS = np.stack([quantize(RNG.standard_normal((N, K), np.float32), "q4_0") for _ in range(E)])
VALUES = np.stack([dequantize(one) for one in BLOCKS])
A = RNG.standard_normal((T, K), np.float32).astype(np.float16)
IDS = np.array([[2, 0], [1, 1]], np.int32)
HERE = 1 << 44


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread block of 512 threads sorts all ids: of many the simulator does little else."""
    monkeypatch.setattr(few, "multiprocessors", lambda: 3)


def right(a: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return np.einsum("tk,tsnk->tsn", a.astype(np.float64), VALUES[ids].astype(np.float64))


def near(got: np.ndarray, wanted: np.ndarray) -> bool:
    return bool(np.abs(got - wanted).max() < 1e-4 * np.abs(wanted).max())


def test_each_expert_begins_at_a_multiple_of_row_tiles() -> None:
    """As `pack` packs it alone."""
    packed, row_scales = pack_experts(BLOCKS, machine=Simulator()).arrays
    of_each = [tiles(one) for one in BLOCKS]
    np.testing.assert_array_equal(packed, np.concatenate([one for one, _ in of_each]))
    np.testing.assert_array_equal(row_scales, np.concatenate([one for _, one in of_each]))
    row_tiles = ExpertsRequest("q4_0", 1, 1, E, N, K).row_tiles
    assert row_scales.size == E * row_tiles * 16


def test_packed_experts_are_not_copied() -> None:
    packed = pack_experts(BLOCKS, machine=Simulator())
    assert repr(packed) == "PackedExperts(q4_0 [3, 48, 160])"
    for copied in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match=r"q4_0 \[3, 48, 160\]\) lies on the simulator and is"):
            copied(packed)


@pytest.mark.parametrize("name", ["q4_0", "q5_1", "mxfp4"])
def test_weights_are_rounded_to_float16_at_most(name: str) -> None:
    """What `exact` promises, of few tokens and of many and with A of each dtype: row i of A is 1 at
    K = 7 i alone, so a sum is one weight. Nor is A rounded further where it is beyond float16."""
    w = Problem(1, 24, 128, name, "normal").blocks
    values = FORMATS[name].dequantize(w).astype(np.float64)
    for tokens, kernel in ((2, few.KERNEL), (18, many.KERNEL)):
        ids, columns = np.zeros((tokens, 1), np.int32), 7 * np.arange(tokens)
        for dtype in ("float32", "float16", "bfloat16"):
            size = 1.0 if dtype == "float16" else 2.0**60
            a = np.zeros((tokens, 128), np.float32)
            a[np.arange(tokens), columns] = size
            given = bfloat16_bits(a) if dtype == "bfloat16" else a.astype(dtype)
            c, choice = experts(given, w[None], ids, machine=Simulator(), explain=True)
            assert choice.kernel is kernel
            right, off = values[:, columns].T, np.abs(c[:, 0] / size - values[:, columns].T)
            assert (off <= 2.0**-11 * np.abs(right) + 2.0**-24 * np.abs(right).max()).all()


def test_a_product_a_plan_and_an_output() -> None:
    packed = pack_experts(BLOCKS, machine=Simulator())
    c, choice = experts(A, packed, IDS, explain=True)
    assert near(c, right(A, IDS))
    assert str(choice).startswith("experts of few tokens for T=2 S=2 E=3 N=48 K=160 in q4_0: ")
    out = np.full((T, S, N), np.nan, np.float32)
    assert experts(A, packed, IDS, out=out) is out
    np.testing.assert_array_equal(out, c)
    plan = experts.plan(T, S, packed, input="float16", ids=np.int32)
    again = np.full((T, S, N), np.nan, np.float32)
    plan(A, IDS, again)
    np.testing.assert_array_equal(again, c)
    with pytest.raises(ValueError, match=r"the plan is for ids=int32, got ids=int64"):
        plan(A, IDS.astype(np.int64), again)


def test_no_tokens() -> None:
    none = np.zeros((0, S), np.int64)
    assert experts(A[:0], BLOCKS, none, machine=Simulator()).shape == (0, S, N)
    router = np.zeros((0, S), np.float32)
    c = experts(A[:0], BLOCKS, none, router=router, dtype="float16", machine=Simulator())
    assert (c.shape, c.dtype) == ((0, N), np.float16)


def test_gates_and_ups_of_any_number() -> None:
    """Rows in turn, zeros where there are none; the gate is that of the float64 values."""
    gate, up = BLOCKS[:, :19], BLOCKS[:, 19:38]
    both = gates_and_ups(gate, up)
    assert both.shape == (E, 64, K // 32)
    np.testing.assert_array_equal(both[:, 16:32], up[:, :16])
    np.testing.assert_array_equal(both[:, 32:35], gate[:, 16:])
    assert not both[:, 35:48].view(np.uint8).any()
    c = experts(A, both, IDS, gate="silu", machine=Simulator())
    y = right(A, IDS)
    assert c.shape == (T, S, 32)
    assert near(c[..., :19], gated("silu", y[..., :19], y[..., 19:38]))
    assert not c[..., 19:].any()
    with pytest.raises(ValueError, match=r"and alike, got .*\[3, 19, 5\] and .*\[3, 10, 5\]"):
        gates_and_ups(gate, up[:, :10])
    with pytest.raises(ValueError, match=r"must be \[E, I, ...\] and alike, got float32 \[3\]"):
        gates_and_ups(np.zeros(3, np.float32), np.zeros(3, np.float32))


def test_what_does_not_fit_is_refused() -> None:
    packed, out = pack_experts(BLOCKS, machine=Simulator()), np.zeros((T, S, N), np.float32)
    bias, router = np.zeros((E, N), np.float32), np.zeros((T, S), np.float32)
    read_only = out.copy()
    read_only.flags.writeable = False
    given: dict[str, Any] = {"a": A, "w": packed, "ids": IDS}
    infinite = np.where(A[0, 0] == A, np.inf, A)
    turns = "N=48 rows of gates and ups in turn must be a multiple of 32"
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (TypeError, "ids must be int32 or int64, got float32", {"ids": IDS.astype(np.float32)}),
        (ValueError, r"ids must have 2 dimensions, got 1", {"ids": IDS[0]}),
        (ValueError, r"a has shape \[2, 160\] and ids \[1, 2\]", {"ids": IDS[:1]}),
        (ValueError, r"a has shape \[2, 1, 160\] and ids \[2, 2\]", {"a": A[:, None]}),
        (ValueError, "a has K=96 columns and w has K=160", {"a": A[:, :96].copy()}),
        (TypeError, "a must be float32, float16 or bfloat16", {"a": A.astype(np.float64)}),
        (ValueError, "a has 1 values that are NaN or Inf", {"a": infinite}),
        (ValueError, r"w must have shape \[E, N, K/32\], .*got 2 dimensions", {"w": BLOCKS[0]}),
        (ValueError, r"w is empty: its shape is \(0, 48, 5\)", {"w": BLOCKS[:0]}),
        (TypeError, "w must hold blocks of q4_0", {"w": np.zeros((2, 3, 4))}),
        (ValueError, r"bias must have shape \[E, N\] = \[3, 48\], got", {"bias": bias[:2]}),
        (ValueError, r"router must have the shape of ids, \[2, 2\]", {"router": router[:1]}),
        (ValueError, "gate is 'gelu': it must be one of silu, clamped", {"gate": "gelu"}),
        (ValueError, turns, {"gate": "silu"}),
        (ValueError, "out must have 3 dimensions, got 2", {"out": out[0]}),
        (ValueError, r"out must have shape \[2, 2, 48\]", {"out": out[:1]}),
        (ValueError, r"out \[2, 2, 48\] is read-only", {"out": read_only}),
        (TypeError, "out must be float32, got float16", {"out": out.astype(np.float16)}),
        (ValueError, "w is packed on simulator, not on simulator", {"machine": Simulator()}),
    ]  # fmt: skip
    for kind, message, change in wrong:
        call = given | change
        if isinstance(call["w"], np.ndarray):
            call["machine"] = Simulator()
        with pytest.raises(kind, match=message) as error:
            experts(call.pop("a"), call.pop("w"), call.pop("ids"), **call)
        assert "\n" not in str(error.value)
    assert not out.any()
    both = pack_experts(BLOCKS[:, :32], machine=Simulator())
    with pytest.raises(ValueError, match="gate and router are of two products"):
        experts(A, both, IDS, gate="silu", router=router)
    with pytest.raises(ValueError, match="tokens is 0: a plan needs a number from 1 up"):
        experts.plan(0, S, packed)
    with pytest.raises(TypeError, match="ids must be int32 or int64, got uint8"):
        experts.plan(1, S, packed, ids=np.uint8)
    with pytest.raises(TypeError, match="ids must be int32 or int64, got long"):
        experts.plan(1, S, packed, ids="long ago")
    with pytest.raises(ValueError, match="leads and router: out of a product that leads has a row"):
        experts.plan(1, S, packed, leads=True, router=np.float32)
    with pytest.raises(ValueError, match="follows without per_slot: a is out of the product"):
        experts.plan(1, S, packed, follows=True)


def test_what_no_kernel_takes() -> None:
    blocks = np.zeros((E, N, 1), quantize(np.zeros((1, 256), np.float32), "q4_0").dtype)
    request = ExpertsRequest("q2_k", 1, 1, E, N, 256)
    with pytest.raises(ValueError, match=r"experts are multiplied in q4_0, .*not in q2_k"):
        choose(request, Simulator())
    old = SimpleNamespace(cc=(8, 6), name="an older GPU")
    match = r"experts need compute capability 9\.0, and this GPU has 8\.6: multiply one expert"
    with pytest.raises(ValueError, match=match):
        experts(A[:, :32].copy(), blocks, IDS, machine=old)


def test_many_rows_for_an_expert_are_for_another_kernel() -> None:
    def kernel(tokens: int, count: int = 128) -> str:
        return choose(ExpertsRequest("q4_0", tokens, 8, count, N, K), Simulator()).kernel.name

    most = 16 * many.H200_ROWS
    assert [kernel(t) for t in (1, most, most + 1, 4096)] == ["few", "few", "many", "many"]
    # and more slots than a thread block of `few` has tables for
    assert [kernel(t, 1024) for t in (128, 129)] == ["few", "many"]


def test_fast_is_used_for_many_tokens_and_where_it_is_asked_for() -> None:
    """By name, by what packed weights say; not of K that int32 sums cannot hold."""

    def kernel(tokens: int, accuracy: str, k: int = K) -> str:
        request = ExpertsRequest("q4_0", tokens, 8, 128, N, k, accuracy=accuracy)
        return choose(request, Simulator()).kernel.name

    few, exact_ones = 16 * many.H200_ROWS, 16 * many.H200_FAST_ROWS
    kernels = [kernel(t, "fast") for t in (few, few + 1, exact_ones, exact_ones + 1)]
    assert kernels == ["few", "many", "many", "many_fast"]
    assert kernel(4096, "exact") == "many"
    assert kernel(4096, "fast", 1 << 18) == "many"
    machine = Simulator()
    fast, exact = (pack_experts(BLOCKS, machine=machine, accuracy=x) for x in ("fast", "exact"))

    def planned(w: Any, accuracy: Any = None) -> str:
        plan = experts.plan(60, S, w, accuracy=accuracy, machine=machine)
        return plan.choice.kernel.name

    assert [planned(fast), planned(fast, "exact")] == ["many_fast", "many"]
    assert [planned(exact), planned(exact, "fast")] == ["many", "many"]
    assert [planned(BLOCKS), planned(BLOCKS, "fast")] == ["many", "many_fast"]
    with pytest.raises(ValueError, match="accuracy is 'quick': it must be one of exact, fast"):
        experts(A, fast, IDS, accuracy="quick")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="accuracy is 'quick': it must be one of exact, fast"):
        pack_experts(BLOCKS, accuracy="quick")  # type: ignore[arg-type]


def test_what_fast_adds_to_the_error() -> None:
    """As much as a dense product: NMSE against the dequantized weights."""
    a = RNG.standard_normal((100, K), np.float32).astype(np.float16)
    ids = RNG.integers(0, E, (100, 1)).astype(np.int32)
    c = experts(a, BLOCKS, ids, accuracy="fast", machine=Simulator())
    low, high = INT8_NMSE["normal"]
    assert low < nmse(c, right(a, ids)) < high


# --- on a GPU, without one ------------------------------------------------------------------------


@pytest.fixture
def fresh(gpu: FakeGpu, torch: Any, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """The GPU that calls go to."""
    monkeypatch.setattr(api, "current_device", lambda: 0)
    return gpu


def test_on_a_gpu_a_product_is_prepared_once(fresh: FakeGpu) -> None:
    """For its shapes: a call hands over addresses, on the stream of torch or the one named."""
    packed = pack_experts(BLOCKS, machine=fresh)  # type: ignore[arg-type]
    a, ids = Tensor((T, K), HERE, dtype="float16"), Tensor((T, S), 2 * HERE, dtype="int64")
    router = Tensor((T, S), 3 * HERE)
    for stream in (4711, 4711, 12):
        fresh.launched.clear()
        given = None if stream == 4711 else SimpleNamespace(cuda_stream=stream)
        c = experts(a, packed, ids, router=router, dtype="bfloat16", stream=given)
        assert (type(c), c.shape, c.dtype) == (Tensor, (T, N), "bfloat16")
        assert {HERE, 2 * HERE, 3 * HERE, c.address} <= fresh.values()
        assert [(name, on) for name, on, _ in fresh.launched] == [
            ("few", stream),
            ("weighted", stream),
        ]
    assert len(packed.products) == 1
    none = experts(Tensor((0, K), HERE), packed, Tensor((0, S), HERE, dtype="int64"))
    assert none.shape == (0, S, N)


def test_a_plan_on_a_gpu_and_what_it_refuses(fresh: FakeGpu) -> None:
    packed = pack_experts(BLOCKS, machine=fresh)  # type: ignore[arg-type]
    plan = experts.plan(T, S, packed, input="float16", dtype="float16")
    a, ids = Tensor((T, K), HERE, dtype="float16"), Tensor((T, S), 2 * HERE, dtype="int64")
    out = Tensor((T, S, N), 3 * HERE, dtype="float16")
    plan(a, ids, out)
    assert {HERE, 2 * HERE, 3 * HERE} <= fresh.values()
    fresh.launched.clear()
    wide = Tensor((T, 3), HERE, dtype="int64")
    narrow = Tensor((T, S), HERE, dtype="int32")
    over_a, over_ids = (Tensor((T, S, N), i * HERE, dtype="float16") for i in (1, 2))
    wrong: list[tuple[type[Exception], str, Any]] = [
        (TypeError, "out must be on the GPU", (a, ids, None)),
        (TypeError, "ids must be int64, got int32", (a, narrow, out)),
        (ValueError, r"ids must have shape \[2, 2\]", (a, wide, out)),
        (ValueError, r"out .* overlaps a ", (a, ids, over_a)),
        (ValueError, r"out .* overlaps ids ", (a, ids, over_ids)),
        (ValueError, "a begins at", (Tensor((T, K), HERE + 2, dtype="float16"), ids, out)),
    ]  # fmt: skip
    for kind, message, given in wrong:
        with pytest.raises(kind, match=message):
            plan(*given)
    with pytest.raises(TypeError, match="ids must be on the GPU, as a is, got ndarray"):
        experts(a, packed, IDS)
    assert fresh.launched == []


@pytest.mark.parametrize("call", [experts, experts.plan])
def test_help_names_every_argument(call: Any) -> None:
    lines = re.findall(r"(?m)^(\w+(?:, \w+)*) *: ", inspect.getdoc(call) or "")
    said = {name for line in lines for name in line.split(", ")}
    assert said >= set(inspect.signature(call).parameters) - {"tokens", "chosen", "w"}
