"""Experts of many tokens: the sort of positions by expert, and products against the same operands
in float64, of any routing, in the simulator and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qformats import FORMATS
from qformats.repack import byte_storage_format, byte_tiles, tiles
from qformats.storage import storage_format
from reference import Halves, Problem, Tokens
from reference.bfloat16 import bfloat16_bits, bfloat16_values
from reference.limits import bound
from reference.product import same_operands
from steps.compile.compiler import machine_code, signature_of
from steps.contract import Launch, array_dtype
from steps.driver.machines import Gpu, Simulator
from steps.kernels.experts import few, many, routing, sorted_rows
from steps.kernels.experts.contract import ExpertsOperands, ExpertsRequest
from steps.kernels.experts.gates import gated
from steps.product.experts import choose
from tests.steps.test_steps_machine_code import no_wgmma_loses_its_weights
from tests.steps.works import STORED

GUARD = 128
"""Values on each side of C that no kernel may touch: its address stays a multiple of 16."""
ROUNDOFF = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@pytest.fixture
def few_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a thread block has several tiles."""
    monkeypatch.setattr(many, "multiprocessors", lambda: 3)


# --- the sort -------------------------------------------------------------------------------------


def sorted_by_numpy(ids: np.ndarray, experts: int) -> tuple[np.ndarray, np.ndarray]:
    key = np.where((ids < 0) | (ids >= experts), experts, ids).reshape(-1)
    rows = np.argsort(key, kind="stable")
    return rows, np.searchsorted(key[rows], np.arange(experts + 1))


def check_routing(ids: np.ndarray, experts: int, machine: Any) -> None:
    rows, places = (machine.array(np.full(ids.size + 8, -7, np.int32)) for _ in range(2))
    offsets, n = machine.array(np.full(experts + 9, -7, np.int32)), ids.size
    made = rows[:n], offsets[: experts + 1], places[:n]
    machine.run(routing.launch(machine.array(ids), *made))
    wanted, begin = sorted_by_numpy(ids, experts)
    np.testing.assert_array_equal(machine.host(rows), [*wanted, *[-7] * 8])
    np.testing.assert_array_equal(machine.host(offsets), [*begin, *[-7] * 8])
    np.testing.assert_array_equal(machine.host(places), [*np.argsort(wanted), *[-7] * 8])


@pytest.mark.parametrize(
    ("shape", "experts", "dtype"),
    [((1, 1), 1, "int32"), ((37, 3), 5, "int64"), ((700, 7), 3, "int32"), ((2, 2), 40, "int32")],
)
def test_positions_by_expert(shape: tuple[int, int], experts: int, dtype: str) -> None:
    rng = np.random.default_rng(experts)
    ids = rng.integers(-1, experts, shape, endpoint=True).astype(dtype)
    if dtype == "int64":
        ids[0] = 1 << 32, -(1 << 63), 1  # the lower half of the first is expert 0
    check_routing(ids, experts, Simulator(1))


def test_more_ids_than_a_block_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WARPS", 1), ("THREADS", 32), ("KEPT", 1)):
        monkeypatch.setattr(routing, name, value)
    made = routing.kernel.__wrapped__
    monkeypatch.setattr(routing, "kernel", made)
    ids = np.random.default_rng(2).integers(-1, 2, (601, 3), endpoint=True).astype(np.int32)
    check_routing(ids, 2, Simulator(4))


@pytest.mark.gpu
def test_positions_by_expert_on_a_gpu() -> None:
    machine, rng = Gpu(), np.random.default_rng(0)
    for shape, experts in (((4096, 8), 512), ((9999, 7), 128), ((1, 1), 1), ((511, 4), 32)):
        for dtype in ("int32", "int64"):
            ids = rng.integers(-1, experts, shape, endpoint=True).astype(dtype)
            check_routing(ids, experts, machine)
    check_routing(np.zeros((4096, 8), np.int32), 128, machine)


# --- A in the order of experts --------------------------------------------------------------------


@pytest.mark.parametrize("fast", [False, True], ids=["exact", "fast"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rows_in_the_order_of_experts(
    dtype: str, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit what dense products make of them, of rows that a block does not fill and of which
    registers hold a part: a NaN and an infinity spoil their own rows. Rows that are large and small
    for float16 become halves of a power of two of their own."""
    monkeypatch.setattr(sorted_rows, "MOST_LOADS", 2)
    given = np.random.default_rng(1).standard_normal((11, 288), dtype=np.float32)
    given[3, 7], given[5, 287], given[8] = np.nan, np.inf, 0
    if dtype != "float16":
        given[1], given[2] = given[1] * 1e30, given[2] * 1e-30
    given = as_dtype(given, dtype)
    for a, slots, ordered in ((given, 3, False), (given[:6], 1, True)):
        m, machine = len(a), Simulator(3)
        places = np.random.default_rng(2).permutation(m * slots).astype(np.int32)
        made, launches = sorted_rows.sorted_rows(
            machine.array(a), machine.array(places), m * slots, machine, ordered=ordered, fast=fast
        )
        for launch in launches:
            machine.run(launch)
        rows = np.arange(m) if ordered else np.argsort(places) // slots
        values = float64_of(a).astype(np.float32)
        wanted: tuple[np.ndarray, ...] = (a,)
        if fast:
            tokens = Tokens.of_values(values)
            wanted = tokens.q, tokens.d
        elif dtype != "float16":
            halves = Halves.of_values(values)
            wanted = halves.h, halves.factor
        assert len(made) == len(wanted)
        for got, want in zip(made, wanted, strict=True):
            np.testing.assert_array_equal(machine.host(got), want[rows])


def test_rows_that_lie_in_order_need_no_pass() -> None:
    a = np.zeros((4, 64), np.float16)
    made, launches = sorted_rows.sorted_rows(a, None, 4, Simulator(1), ordered=True, fast=False)
    assert made == (a,)
    assert not launches


# --- products -------------------------------------------------------------------------------------


def routed(how: str, request: ExpertsRequest) -> np.ndarray:
    """ids[T, S]: at random with some out of range; all tokens the same; most of them the last."""
    rng = np.random.default_rng(request.tokens)
    shape, experts = (request.tokens, request.chosen), request.experts
    if how == "same":
        ids = np.broadcast_to(np.arange(request.chosen) % experts, shape)
    elif how == "skewed":
        ids = np.where(rng.random(shape) < 0.7, experts - 1, rng.integers(0, experts, shape))
    else:
        ids = rng.integers(-1, experts, shape, endpoint=True)
    return ids.astype(request.ids)


def float64_of(x: np.ndarray) -> np.ndarray:
    return (bfloat16_values(x) if x.dtype == np.uint16 else x).astype(np.float64)


def as_dtype(x: np.ndarray, name: str) -> np.ndarray:
    return bfloat16_bits(x.astype(np.float32)) if name == "bfloat16" else x.astype(name)


class Case:
    """The operands of a request, what C is in float64, and how far off it may be."""

    def __init__(
        self, request: ExpertsRequest, how: str = "random", distribution: str = "normal"
    ) -> None:
        r, rng = request, np.random.default_rng(5)
        self.request, self.exact, self.ids = r, distribution == "integer", routed(how, request)
        problems = [
            Problem(r.a_rows, r.n, r.k, r.format, distribution, e, r.a) for e in range(r.experts)
        ]
        self.blocks = [problem.blocks for problem in problems]
        self.a = problems[0].given
        self.fast = r.accuracy == "fast"
        operands: Any = Halves.of_values(self.a if r.a == "float16" else problems[0].a)
        if self.fast:
            operands = Tokens.of_values(problems[0].a)
        self.bias = self.router = None
        if r.bias:
            self.bias = as_dtype(rng.standard_normal((r.experts, r.n)), r.bias)
        if r.router:
            self.router = as_dtype(rng.random((r.tokens, r.chosen)), r.router)
        y, off = (np.full((r.slots, r.outputs), np.nan) for _ in range(2))
        rows, ids = np.arange(r.slots) // (1 if r.per_slot else r.chosen), self.ids.reshape(-1)
        for e, blocks in enumerate(self.blocks):
            own = ids == e
            if not own.any():
                continue
            same, size = same_operands(operands.rows(rows[own]), blocks)
            error = bound("A16", r.k, size, "f16_weights")
            if self.fast:
                error = bound("A8", r.k, size, "int8")
            if self.bias is not None:
                same = same + float64_of(self.bias[e])
                error = error + 2.0**-23 * np.abs(same)
            if r.gate:
                same, error = gate_of(r.gate, same, error)
            y[own], off[own] = same, error
        want, error = (x.reshape(r.tokens, r.chosen, r.outputs) for x in (y, off))
        if self.router is not None:
            weights = float64_of(self.router)[..., None]
            error = error + (ROUNDOFF[r.c] + 2.0**-20) * (np.abs(want) + error)  # of each product
            error = (error * weights).sum(1)
            want = (want * weights).sum(1)
        self.order = sorted_by_numpy(self.ids, r.experts)[0]
        if r.leads:
            want, error = (
                x.reshape(r.slots, -1)[self.order].reshape(x.shape) for x in (want, error)
            )
        self.want, self.off = want, error + ROUNDOFF[r.c] * (np.abs(want) + error) + 2.0**-25

    def launches(self, machine: Any) -> tuple[Any, Any]:
        """(the launches, C between its guards)"""
        r = self.request
        packed, scales = zip(*map(byte_tiles if self.fast else tiles, self.blocks), strict=True)
        size = self.want.size
        around = np.full(size + 2 * GUARD, 7, array_dtype(r.c))
        around[GUARD:-GUARD] = np.nan if r.c != "bfloat16" else 0x7FC0
        guarded = machine.array(around)
        out = guarded[GUARD : GUARD + size].reshape(*self.want.shape)
        given = [np.concatenate(packed), np.concatenate(scales), self.a, self.ids]
        if r.follows:
            given[2] = self.a[self.order]
        packed, scales, a, ids = (machine.array(np.ascontiguousarray(x)) for x in given)
        bias, router = (None if x is None else machine.array(x) for x in (self.bias, self.router))
        operands = ExpertsOperands(packed, scales, a, ids, out, bias, router)
        return many.launches(r, operands, machine, self.fast), guarded

    def check(self, machine: Any) -> np.ndarray:
        launches, guarded = self.launches(machine)
        for launch in launches:
            machine.run(launch)
        around = machine.host(guarded)
        assert (around[:GUARD] == 7).all()
        assert (around[-GUARD:] == 7).all()
        c = around[GUARD:-GUARD]
        got = float64_of(c).reshape(self.want.shape)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(self.want))
        there = ~np.isnan(self.want)
        if self.exact:
            rounded = self.want.astype(np.float32)
            if self.request.c == "bfloat16":
                rounded = bfloat16_values(bfloat16_bits(rounded))
            rounded = rounded.astype(np.float16) if self.request.c == "float16" else rounded
            np.testing.assert_array_equal(got[there], rounded.astype(np.float64)[there])
        assert (np.abs(got - self.want)[there] <= self.off[there]).all()
        return c


def gate_of(name: str, same: np.ndarray, error: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What a gate makes of products, and how far off it may be: its slope is below 1.2."""
    (gate, up), (off_gate, off_up) = (
        x.reshape(len(x), -1, 2, 16).transpose(2, 0, 1, 3).reshape(2, len(x), -1)
        for x in (same, error)
    )
    y = gated(name, gate, up)
    slope = 1.2 * (np.abs(up) + 1) * off_gate + (np.abs(gate) + 1) * off_up
    return y, slope + 1.2 * off_gate * off_up + 2.0**-19 * np.abs(y)


SMALL = ExpertsRequest("q4_0", 21, 2, 3, 200, 160, "float16", "float16")
"""Three experts, ragged along N and K, of 14 rows on average."""

NARROW = replace(SMALL, a="bfloat16", c="bfloat16", format="q5_1", n=72, k=160, ids="int64")
CASES = {
    "float16": (SMALL, "random"),
    "bfloat16, rows of slots, bias": (replace(NARROW, bias="float16", per_slot=True), "skewed"),
    "gated, one expert has all": (
        replace(SMALL, format="q8_0", tokens=40, chosen=1, n=320, k=160, gate="silu"),
        "same",
    ),
    "clamped, bias, to float32": (
        replace(NARROW, c="float32", format="mxfp4", n=288, bias="bfloat16", gate="clamped"),
        "same",
    ),
    "float32, a sum over slots": (
        replace(SMALL, a="float32", c="float16", format="iq4_nl", n=136, router="float32"),
        "random",
    ),
    "a sum of odd sizes": (replace(NARROW, n=71, k=672, router="bfloat16"), "skewed"),
    "leads": (replace(SMALL, n=160, gate="silu", leads=True), "random"),
    "follows": (replace(SMALL, per_slot=True, follows=True), "random"),
    "fast": (replace(SMALL, accuracy="fast"), "random"),
    "fast, follows, leads": (
        replace(NARROW, c="float32", per_slot=True, follows=True, leads=True, accuracy="fast"),
        "skewed",
    ),
    "fast, gated, bias, bfloat16": (
        replace(NARROW, n=288, gate="silu", bias="float16", per_slot=True, accuracy="fast"),
        "skewed",
    ),
    "fast, a sum, to float32": (
        replace(
            SMALL, a="float32", c="float32", format="mxfp4", router="float32", n=71, accuracy="fast"
        ),
        "random",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_products_of_the_same_operands(name: str, few_sms: None) -> None:
    request, how = CASES[name]
    Case(request, how).check(Simulator(len(name)))


def test_integers_are_exact_and_repeat_in_any_order_of_lanes(few_sms: None) -> None:
    case = Case(replace(SMALL, n=128, k=160, c="float32"), distribution="integer")
    first, second = case.check(Simulator(1)), case.check(Simulator(2))
    assert first.tobytes() == second.tobytes()


@pytest.mark.slow
def test_a_ring_of_three_stages(few_sms: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As large tiles have it: an expert's rows in several tiles, of two experts of four."""
    monkeypatch.setattr(many, "STAGES", 3)
    monkeypatch.setattr(many, "TOKENS", (32,))
    Case(replace(SMALL, tokens=50, experts=4, n=136, k=416), "same").check(Simulator(5))


@pytest.mark.parametrize("output", ["float16", "float32"])
def test_tiles_of_more_tokens_than_a_warpgroup_has_threads(
    output: str, few_sms: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second position for each thread, and one buffer through which all tokens pass."""
    monkeypatch.setattr(many, "TOKENS", (144,))
    monkeypatch.setattr(many, "STAGINGS", ((16, 1),))
    request = replace(SMALL, tokens=301, chosen=1, experts=1, n=40, k=32, c=output)
    Case(request, "same").check(Simulator(6))


@pytest.mark.parametrize("how", ["random", "skewed"])
@pytest.mark.parametrize("gate", [None, "silu"])
def test_tiles_of_an_expert_are_alike_and_narrow_ones_multiply_less(
    how: str, gate: str | None, few_sms: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 32 tokens, or 16: experts of 27 rows in one tile of 32, of 60 in two of 30, of 9 in one of
    16."""
    monkeypatch.setattr(many, "TOKENS", (32,))
    monkeypatch.setattr(many, "LEAST_NARROW", 32)
    request = replace(SMALL, tokens=60, chosen=1, n=160, k=160, gate=gate)
    Case(request, how).check(Simulator(7))


@pytest.mark.parametrize(
    ("rows", "bm", "tiles_of"),
    [(0.01, 64, 0.0), (32, 64, 1.0), (64, 64, 1.5), (256, 128, 2.5), (250, 320, 1.0)],
)
def test_likely_rows_of_an_expert(rows: float, bm: int, tiles_of: float) -> None:
    found = sum(-(-r // bm) * likely for r, likely in many.likely_rows(rows))
    assert found == pytest.approx(tiles_of, abs=0.05)


def test_tiles_hold_the_rows_of_an_expert() -> None:
    """48 for 32 rows, which vary by 6; twice 144 for 256, or 128, four times for 512."""
    q4_0 = FORMATS["q4_0"]
    assert many.tile_tokens(q4_0, False, 32, 256, 16, 144) == 48
    assert many.tile_tokens(q4_0, False, 256, 256, 16, 144) == 144
    assert many.tile_tokens(q4_0, False, 512, 256, 16, 144) == 144
    assert many.tile_tokens(q4_0, False, 1, 256, 16, 144) == 16
    assert many.tile_tokens(q4_0, False, 512, 256, 16, 128) == 128
    assert many.tile_tokens(q4_0, True, 256, 256, 16, 144) == 144


@pytest.mark.parametrize(
    ("tokens", "experts", "cc", "kernel"),
    [
        (64, 128, (9, 0), few.KERNEL),
        (512, 128, (9, 0), many.KERNEL),
        (512, 128, (10, 0), few.KERNEL),
        (128, 1024, (9, 0), few.KERNEL),
        (512, 1024, (9, 0), many.KERNEL),
        (40, 8, None, many.KERNEL),
    ],
)
def test_experts_with_many_rows_are_of_this_kernel(
    tokens: int, experts: int, cc: tuple[int, int] | None, kernel: Any
) -> None:
    request = replace(SMALL, tokens=tokens, experts=experts, chosen=8)
    assert choose(request, SimpleNamespace(name="GPU", cc=cc)).kernel is kernel


COMPILED = {
    "float16, gated": replace(SMALL, tokens=4096, chosen=8, experts=128, gate="silu", n=1536),
    "bfloat16": replace(
        SMALL, a="bfloat16", c="bfloat16", tokens=4096, chosen=8, experts=128, format="q5_1"
    ),
    "float32": replace(SMALL, a="float32", c="float32", tokens=9999, format="q8_0", bias="float32"),
    "fast, gated": replace(
        SMALL, tokens=4096, chosen=8, experts=128, gate="silu", n=1536, accuracy="fast"
    ),
    "fast": replace(
        SMALL, tokens=4096, chosen=8, experts=128, n=2048, per_slot=True, accuracy="fast"
    ),
}


def launches_of(request: ExpertsRequest) -> tuple[Launch, ...]:
    """To compile: of operands without values."""
    a, out = np.zeros((1, 32), array_dtype(request.a)), np.zeros((1, 1, 1), array_dtype(request.c))
    packed, scales = np.zeros(16, np.uint8), np.zeros(4, np.float32)
    bias, router = (
        np.zeros((1, 1), array_dtype(dtype)) if dtype else None
        for dtype in (request.bias, request.router)
    )
    given = ExpertsOperands(packed, scales, a, np.zeros((1, 1), np.int32), out, bias, router)
    return many.launches(request, given, Simulator(), request.accuracy == "fast")


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[pytest.mark.every] * (x in ("float32", "fast"))) for x in COMPILED],
)
def test_no_spills_and_products_that_run_on(name: str) -> None:
    request = COMPILED[name]
    fast, launches = request.accuracy == "fast", launches_of(request)
    for launch in launches:
        code = machine_code(launch.kernel, signature_of(launch.args))
        assert (code.stack_bytes, code.spill_store_bytes, code.spill_load_bytes) == (0, 0, 0)
        assert not code.warnings
        assert not code.count("DADD", "DMUL", "DFMA", "LDL", "STL")
        # A to int8 divides by a scale, of which an odd one is a call
        assert not code.count("CALL") or launch.kernel.__name__ == "by_expert"
    no_wgmma_loses_its_weights(code)
    # 64 K of two accumulator halves, of wide tiles, and of narrow ones where there are such
    widths = 1 if request.bias and not request.gate else 2
    wanted = (0, 4 * widths) if fast else (8 * widths, 0)
    assert (code.count("HGMMA"), code.count("IGMMA")) == wanted
    assert code.count("UTMALDG")
    assert not code.count("LDGSTS", "LDG.E.128")
    assert launches[-1].shared_bytes <= 227 * 1024


def every_tile() -> Iterator[pytest.param]:
    """(request, tokens of a tile) of one accumulator half, of two, of gates, and of downs whose
    scales of tokens are left to the sum: with ALL=1 every tile, some of them in every format and
    others in one. `make test` takes one half, exact and fast; those above have two."""
    kinds: dict[str, dict[str, Any]] = {
        "half": {"n": 128},
        "halves": {"n": 256, "a": "float32"},
        "bias": {"n": 256, "a": "float32", "bias": "float32"},
        "gated": {"n": 256, "gate": "silu"},
        "scaled gates": {"n": 256, "gate": "silu", "a": "bfloat16", "c": "bfloat16"},
        "clamped": {"n": 256, "gate": "clamped", "bias": "bfloat16", "a": "bfloat16"},
        "sum": {"n": 256, "per_slot": True, "router": "float32", "a": "bfloat16", "c": "bfloat16"},
    }
    for accuracy, (kind, given), (i, tokens) in product(
        ("exact", "fast"), kinds.items(), enumerate(many.TOKENS)
    ):
        fast = accuracy == "fast"
        stored_as = byte_storage_format if fast else storage_format
        names = {stored_as(FORMATS[name]).name: name for name in reversed(STORED)}.values()
        for j, name in enumerate(names):
            request = replace(SMALL, format=name, accuracy=accuracy, **given)
            scaled = kind != "sum" and (fast or request.a != "float16")
            of = stored_as(FORMATS[name]), fast, scaled, request.gate is not None
            if tokens <= many.most_tokens(*of, request.bias is not None) and (
                tokens in (32, 128, many.MOST_TOKENS) or j == i % len(names)
            ):
                often = kind == "half" and (name, tokens) == ("q8_0" if fast else "q4_0", 128)
                label = f"{accuracy}-{kind}-{name}-{tokens}"
                marks = [] if often else [pytest.mark.every]
                yield pytest.param(request, tokens, id=label, marks=marks)


@pytest.mark.parametrize(("request_", "tokens"), list(every_tile()))
def test_nothing_writes_what_a_running_wgmma_reads(
    request_: ExpertsRequest, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(many, "TOKENS", (tokens,))
    launch = next(x for x in launches_of(request_) if x.kernel.__name__ == "experts_many")
    code = machine_code(launch.kernel, signature_of(launch.args))
    assert f"64x{tokens}x" in code.sass
    no_wgmma_loses_its_weights(code)
    if (request_.accuracy, request_.format, tokens) != ("fast", "q8_0", 128):
        assert not code.warnings  # of those each wgmma waits (C7519): found, and not mended


# --- on a GPU -------------------------------------------------------------------------------------

LARGE = ExpertsRequest("q4_0", 700, 3, 20, 544, 544, "float16", "float16")
BFLOATS = replace(LARGE, a="bfloat16", c="bfloat16", ids="int64")
ON_A_GPU = {
    "float16": replace(LARGE, n=520),
    "bfloat16, gated": replace(BFLOATS, format="q5_1", gate="silu"),
    "clamped": replace(BFLOATS, c="float16", format="mxfp4", bias="bfloat16", gate="clamped"),
    "float32": replace(LARGE, a="float32", c="float32", format="q8_0", per_slot=True, n=130),
    "sum": replace(LARGE, format="q4_1", per_slot=True, router="float16"),
    "leads": replace(BFLOATS, gate="silu", leads=True),
    "follows": replace(LARGE, per_slot=True, router="float16", follows=True),
    "q6_k": replace(LARGE, format="q6_k", k=768, tokens=3000),
    "fast": replace(LARGE, n=520, accuracy="fast"),
    "fast, clamped": replace(
        BFLOATS, c="float16", format="mxfp4", bias="bfloat16", gate="clamped", accuracy="fast"
    ),
    "fast, leads": replace(LARGE, gate="silu", leads=True, accuracy="fast"),
    "fast sum that follows": replace(
        LARGE, per_slot=True, router="float32", follows=True, accuracy="fast"
    ),
    "fast sum": replace(LARGE, format="q5_1", per_slot=True, router="float16", accuracy="fast"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["random", "skewed", "same"])
@pytest.mark.parametrize("name", ON_A_GPU)
def test_products_on_a_gpu(name: str, how: str) -> None:
    machine = Gpu()
    if machine.cc != (9, 0):
        pytest.skip(
            f"experts of many tokens need compute capability 9.0; this GPU has {machine.cc}"
        )
    case = Case(ON_A_GPU[name], how)
    first, second = case.check(machine), case.check(machine)
    assert first.tobytes() == second.tobytes()
