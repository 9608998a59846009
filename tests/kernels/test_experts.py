"""Products of experts in the simulator, against float64: ids, groups of tokens, every way out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from qformats import FORMATS, WEIGHT_FORMATS, dequantize, quantize
from qformats.repack import TILE_ROWS
from qformats.storage import storage_format, stored_weights
from reference.drawn import random_blocks
from steps import contract
from steps.compile.compiler import machine_code, signature_of
from steps.driver.machines import Gpu, Simulator
from steps.kernels.experts import few, summed
from steps.kernels.experts.contract import ExpertsOperands, ExpertsRequest
from steps.kernels.experts.gates import gated
from steps.product.experts import choose, packed_arrays
from tests.kernels.between_problems import GUARD, Output, as_floats, of_dtype

NAMES = few.KERNEL.formats
OFTEN = (("q4_0", 8, True), ("mxfp4", 1, False), ("mxfp4", 1, True))
"""(format, tokens, whether the slots of a token are added up): what `make test` compiles."""


@pytest.fixture(autouse=True)
def three_sms(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A small GPU, so that small problems have items of several warps and thread blocks."""
    monkeypatch.setattr(contract, "_pretended", (3, contract.H200_SHARED))
    contract.multiprocessors.cache_clear()
    contract.shared_memory.cache_clear()
    yield
    contract.multiprocessors.cache_clear()
    contract.shared_memory.cache_clear()


def weights(name: str, e: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """(blocks [E, N, ...], float64 values)"""
    rng = np.random.default_rng(e + n + k)
    if FORMATS[name].written:
        made = [quantize(rng.standard_normal((n, k), np.float32), name) for _ in range(e)]
    else:
        made = [random_blocks(rng, n, k, name) for _ in range(e)]
    blocks = np.stack(made)
    return blocks, np.stack([values_of(name, one) for one in blocks])


def values_of(name: str, blocks: np.ndarray) -> np.ndarray:
    """float64 [N, K] as packed tiles hold them: scales of file formats are rounded to float16."""
    if name in WEIGHT_FORMATS:
        return dequantize(blocks).astype(np.float64)
    stored = stored_weights(blocks)
    n, k = stored.levels.shape
    values = stored.levels.reshape(n, stored.scale.shape[1], -1) * stored.scale[..., None]
    if stored.offset is not None:
        values += stored.offset[..., None]
    return values.reshape(n, k)


@dataclass
class Case:
    """A product of experts: arrays, and what it must be."""

    request: ExpertsRequest
    blocks: np.ndarray
    values: np.ndarray
    a: np.ndarray
    ids: np.ndarray
    bias: np.ndarray | None = None
    router: np.ndarray | None = None
    names: Sequence[str] = ()

    def run(self, machine: Any = None) -> np.ndarray:
        """C as float64. Guard bands around it are whole."""
        machine = machine or Simulator()
        asked, packed = self.request, packed_arrays(self.blocks)
        out = Output(asked.out_shape, asked.c)
        given = [*packed, self.a, self.ids, out.array, self.bias, self.router]
        whole = out._whole
        if machine.cc is not None:
            whole = machine.array(out._whole)
            given = [None if x is None else machine.array(x) for x in given]
            given[4] = whole[GUARD:-GUARD].reshape(asked.out_shape)
        launches = few.launches(asked, ExpertsOperands(*given), machine)
        self.names = [launch.kernel.__name__ for launch in launches]
        for launch in launches:
            machine.run(launch)
        if machine.cc is not None:
            out._whole[...] = machine.host(whole)
        out.check()
        return as_floats(out.array).astype(np.float64)

    def right(self) -> tuple[np.ndarray, np.ndarray]:
        """(C, by how much it may be off), float64; NaN where an id is none."""
        asked, a = self.request, as_floats(self.a).astype(np.float64)
        rows = a.reshape(asked.tokens, -1, asked.k)
        rows = np.broadcast_to(rows, (asked.tokens, asked.chosen, asked.k))
        known = (self.ids >= 0) & (self.ids < asked.experts)
        w = self.values[np.where(known, self.ids, 0)]
        c = np.einsum("tsk,tsnk->tsn", rows, w)
        size = np.einsum("tsk,tsnk->tsn", np.abs(rows), np.abs(w))
        # float32 A is rounded to float16 first; sums of K products and offsets in float32
        step = 2.0**-11 if asked.a == "float32" else 0
        bound = (step + (asked.k + 200) * 2.0**-24) * size
        if self.bias is not None:
            c = c + as_floats(self.bias)[np.where(known, self.ids, 0)]
        if asked.gate is not None:
            pairs = c.reshape(asked.tokens, asked.chosen, -1, 2, TILE_ROWS)
            of = bound.reshape(pairs.shape)
            gate, up = pairs[..., 0, :], pairs[..., 1, :]
            c = gated(asked.gate, gate, up)
            slope = 1.2 * of[..., 0, :] * (np.abs(up) + 1) + (np.abs(gate) + 1) * of[..., 1, :]
            shape = (asked.tokens, asked.chosen, asked.outputs)
            c, bound = c.reshape(shape), (slope + 2.0**-20 * np.abs(c)).reshape(shape)
        c[~known] = np.nan
        if self.router is not None:
            share = as_floats(self.router).astype(np.float64)[..., None]
            bound = (np.abs(share) * (bound + 2.0**-20 * np.abs(np.nan_to_num(c)))).sum(1)
            c = (share * c).sum(1)
        roundings = {"float32": 2.0**-22, "float16": 2.0**-10, "bfloat16": 2.0**-7}
        return c, bound + roundings[asked.c] * np.abs(np.nan_to_num(c)) + 1e-7

    def check(self, machine: Any = None) -> np.ndarray:
        got = self.run(machine)
        right, bound = self.right()
        np.testing.assert_array_equal(np.isnan(got), np.isnan(right))
        there = ~np.isnan(right)
        worst = (np.abs(got - right)[there] / bound[there]).max(initial=0)
        assert worst <= 1, f"{worst} times the bound"
        return got


def case(
    t: int, s: int, e: int, n: int, k: int, name: str = "q4_0", a: str = "float16",
    c: str = "float32", ids: Any = None, bias: str | None = None, router: str | None = None,
    **options: Any,
) -> Case:  # fmt: skip
    rng = np.random.default_rng(t + s)
    blocks, values = weights(name, e, n, k)
    ids = np.asarray(rng.integers(0, e, (t, s)) if ids is None else ids)
    request = ExpertsRequest(
        name, t, s, e, n, k, a, c, ids.dtype.name, bias=bias, router=router, **options
    )
    rows = rng.standard_normal((request.a_rows, k), np.float32)
    of_bias = bias and of_dtype(rng.standard_normal((e, n), np.float32), bias)
    of_router = router and of_dtype(rng.random((t, s), np.float32), router)
    return Case(request, blocks, values, of_dtype(rows, a), ids, of_bias, of_router)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_every_format(name: str) -> None:
    """Of one token and of several that share experts; N and K end inside a tile."""
    k = 256 if FORMATS[name].elements > 32 else 160
    stored = storage_format(FORMATS[name]).name
    tokens = 1 if stored in ("q4_0", "q8_0") and name not in ("q4_0", "q8_0") else 3
    case(tokens, 2, 3, 48, k, name).check()


@pytest.mark.parametrize(("a", "c"), [("float32", "float16"), ("bfloat16", "bfloat16")])
@pytest.mark.parametrize("tokens", [1, 3])
def test_dtypes(tokens: int, a: str, c: str) -> None:
    case(tokens, 2, 4, 40, 160, a=a, c=c).check()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("tokens", [1, 4])
def test_ids_that_are_none(tokens: int, dtype: Any) -> None:
    """Are NaN, and read nothing: the simulator ends with an error where a kernel reads past an
    array. Others may come twice."""
    none = [3, -1, 2**31 - 1, -(2**31)] if dtype == np.int32 else [3, -1, 2**32, -(2**63)]
    ids = np.array([[0, 2, 2, one] for one in none[:tokens]], dtype)
    case(tokens, 4, 3, 48, 128, ids=ids).check()


@pytest.mark.parametrize("tokens", [2, 7, 9, 20])
def test_all_tokens_choose_one_expert(tokens: int) -> None:
    """Groups of up to 2 or 8 tokens, several of them for one expert."""
    case(tokens, 2, 3, 32, 128, ids=np.ones((tokens, 2), np.int32)).check()


@pytest.mark.parametrize(
    ("ways", "tokens", "where"),
    [((), 3, "ring"), ((), 1, "ring"), (few.H200_RESIDENT, 3, "tokens"), (None, 20, "groups")],
)
def test_where_a_lies(ways: Any, tokens: int, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows come with the weights, or are copied once: of all tokens, or of a block's groups."""
    monkeypatch.setattr(few, "H200_RESIDENT", few.H200_RESIDENT if ways is None else ways)
    one = case(tokens, 2, 3, 48, 160, per_slot=where == "groups")
    variant = few.variant_of(one.request, False)
    assert where == ("ring" if not variant.resident else "tokens" if variant.by_token else "groups")
    one.check()


@pytest.mark.parametrize("ways", [few.H200_RESIDENT, ()])
def test_a_warp_goes_on_to_another_group(ways: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 items of ten groups for 16 warps."""
    monkeypatch.setattr(few, "H200_RESIDENT", ways)
    monkeypatch.setattr(few, "multiprocessors", lambda: 1)
    ids = np.arange(20).reshape(10, 2) % 10
    case(10, 2, 10, 100, 32, ids=ids, per_slot=True).check()


def test_rows_of_all_groups_of_a_thread_block_have_room() -> None:
    rng = np.random.default_rng(3)
    most = 0.0
    for _ in range(400):
        tokens, chosen, experts = (int(rng.integers(1, top)) for top in (100, 9, 60))
        n, columns = int(rng.integers(1, 1500)), 1 if tokens == 1 else 8
        ids = rng.integers(0, experts if rng.random() < 0.7 else 1, tokens * chosen)
        request = ExpertsRequest("q4_0", tokens, chosen, experts, n, 32, per_slot=True)
        room, by_token = few.resident_rows(request, columns, 1024)
        counts = np.ones(chosen, int) if tokens == 1 else np.bincount(ids)
        groups = [min(columns, count - i) for count in counts for i in range(0, count, columns)]
        pairs = -(-n // 32)
        blocks, items = min(3, request.slots * pairs), len(groups) * pairs
        shares = [(items * b // blocks, items * (b + 1) // blocks) for b in range(blocks)]
        rows = max(sum(groups[i // pairs : (end - 1) // pairs + 1]) for i, end in shares if i < end)
        assert rows <= room
        assert not by_token
        most = max(most, rows / room)
    assert most == 1.0


@pytest.mark.parametrize("experts", [2, 40])
def test_a_warp_makes_the_groups_of_a_thread_block(
    experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 32 slots are grouped by a warp. The same bits: repeated ids in a token, an expert with
    more slots than a group holds, ids that are none."""
    ids = np.random.default_rng(1).integers(-1, experts + 1, (4, 8))
    one = case(4, 8, experts, 40, 64, ids=ids)
    found = one.check()
    monkeypatch.setattr(few, "ROOM", (128,))
    np.testing.assert_array_equal(one.run(), found)


def test_more_slots_than_a_table_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few, "ROOM", (16,))
    case(13, 3, 4, 32, 64).check()


def test_more_experts_than_threads() -> None:
    ids = np.array([[1200, 0, 700], [1299, 700, 1300]])
    case(2, 3, 1300, 16, 32, ids=ids).check()


def test_the_same_bits_in_every_order() -> None:
    """Whatever order thread blocks and warps run in: a result is a sum in a fixed order."""
    one = case(14, 2, 3, 40, 256)
    np.testing.assert_array_equal(one.run(), one.run(Simulator(1)))


def test_integers_are_exact() -> None:
    """Scales and activations of small integers: float32 sums hold every product."""
    rng = np.random.default_rng(0)
    w = rng.integers(-7, 8, (3, 48, 160)).astype(np.float32)
    w[..., ::32] = -8  # so that the scale of each block is 1
    one = case(5, 2, 3, 48, 160)
    one.blocks = np.stack([quantize(x, "q4_0") for x in w])
    one.values = np.stack([dequantize(x) for x in one.blocks]).astype(np.float64)
    np.testing.assert_array_equal(one.values, w)
    one.a = rng.integers(-4, 5, (5, 160)).astype(np.float16)
    np.testing.assert_array_equal(one.run(), one.right()[0])


def test_a_nan_stays_in_its_row() -> None:
    """Also in the last 128 K, where the rows of tokens end before the tile does."""
    one = case(3, 2, 3, 32, 160, ids=np.array([[0, 1], [1, 0], [2, 1]]))
    one.a[1, 159] = np.nan
    got = one.run()
    assert np.isnan(got[1]).all()
    assert not np.isnan(got[[0, 2]]).any()


@pytest.mark.parametrize("gate", ["silu", "clamped"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_gates(tokens: int, gate: str) -> None:
    one = case(tokens, 2, 3, 96, 160, gate=gate, bias="float16", c="float16")
    one.a *= np.float16(3)  # some beyond the clamp
    one.check()


@pytest.mark.parametrize(
    ("tokens", "chosen", "kernels"),
    [
        (1, 1, ["summed"]),
        (1, 4, ["summed"]),
        (3, 3, ["few", "weighted"]),
        (7, 3, ["few", "weighted"]),
        *(pytest.param(1, 3, ["summed"], marks=pytest.mark.every),),
        *(
            pytest.param(t, s, ["few", "weighted"], marks=pytest.mark.every)
            for t in (3, 7)
            for s in (1, 4)
        ),
    ],
)
def test_weighted_sums(tokens: int, kernels: list[str], chosen: int) -> None:
    ids = np.random.default_rng(chosen).integers(0, 4, (tokens, chosen))
    ids[-1, -1] = 0 if tokens == 1 else -1
    experts = 4 if tokens == 7 else 48
    one = case(
        tokens, chosen, experts, 48, 416, ids=ids, per_slot=True, bias="bfloat16", router="float32",
        follows=True, c="float16",
    )  # fmt: skip
    one.check()
    assert one.names == kernels


def test_a_weighted_sum_of_float32() -> None:
    """Rows of A have scales of their own."""
    case(1, 3, 4, 48, 160, a="float32", per_slot=True, router="float16").check()
    case(6, 3, 4, 46, 160, a="float32", per_slot=True, router="float16").check()


def test_which_sums_are_in_the_product() -> None:
    """Of one token, where about as many thread blocks as SMs have a row tile each."""

    def suits(tokens: int, row_tiles: int) -> bool:
        return summed.suits(ExpertsRequest("q4_0", tokens, 8, 128, 16 * row_tiles, 32))

    assert [suits(t, 3) for t in (1, 2, 4)] == [True, False, False]
    assert [suits(1, n) for n in (1, 2, 4, 5, 6)] == [False, False, False, False, True]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tokens", "summed"),
    [
        pytest.param(*one, marks=() if one in OFTEN else pytest.mark.every)
        for one in itertools.product(("q4_0", "mxfp4"), (1, 8), (False, True))
    ],
)
def test_machine_code(name: str, tokens: int, summed: bool) -> None:
    """Bulk copies and tensor cores; nothing spilled."""
    options: dict[str, Any] = {"router": "float32", "per_slot": True} if summed else {}
    request = ExpertsRequest(name, tokens, 8, 128, 2048, 768, "float16", "float16", **options)
    for launch in choose(request, Simulator()).launches():
        code = machine_code(launch.kernel, signature_of(launch.args), "sm_90a")
        assert (code.stack_bytes, code.spill_store_bytes, code.spill_load_bytes) == (0, 0, 0)
        if launch.kernel.__name__ != "weighted":
            assert code.count("UBLKCP")
            assert code.count("HMMA")


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.fixture
def gpu_machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The GPU, sized as it is."""
    monkeypatch.setattr(contract, "_pretended", None)
    contract.multiprocessors.cache_clear()
    contract.shared_memory.cache_clear()
    return Gpu()


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_every_format_on_a_gpu(gpu_machine: Any, name: str) -> None:
    """Of one token, of few that share experts, and of many slots, twice with the same bits."""
    k = 512 if FORMATS[name].elements > 32 else 416
    for tokens, dtype in ((1, "float16"), (3, "bfloat16"), (9, "float16"), (80, "float16")):
        one = case(tokens, 4, 16, 208, k, name, dtype, "float16")
        np.testing.assert_array_equal(one.check(gpu_machine), one.run(gpu_machine))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 33])
def test_both_products_of_a_layer_on_a_gpu(gpu_machine: Any, tokens: int) -> None:
    for gate in ("silu", "clamped"):
        options: dict[str, Any] = {"bias": "float16", "c": "float16"}
        case(tokens, 8, 32, 512, 416, gate=gate, **options).check(gpu_machine)
        options |= {"per_slot": True, "router": "float32", "follows": True}
        case(tokens, 8, 32, 2048, 256, **options).check(gpu_machine)
        case(tokens, 3, 32, 2040, 256, a="float32", **options).check(gpu_machine)
