"""The kernels between products against float64, in the simulator, in several orders of lanes."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from qformats import FORMATS
from qformats.repack import tiles
from reference import Problem as Product
from reference.limits import nmse
from steps.driver.machines import Simulator
from steps.kernels.between import add_and_norm, attention, deferred_norm, gated_product
from steps.kernels.decode import tiles as heuristics
from steps.simulator.errors import SimulatorError
from tests.kernels.between_problems import (
    Heads,
    Matrix,
    argmax_problem,
    attention_problem,
    choice_problem,
    factor,
    gated_problem,
    norm_problem,
    normed_problem,
    residual_problem,
    rotary_problem,
    router_problem,
    swiglu_problem,
)

ORDERS = (0, -1, 1, 2)


@pytest.mark.parametrize(
    ("m", "width"), [(1, 4096), (3, 64), (16, 96), (2, 8), (1, 264), (2, 520), (1, 1032), (3, 2048)]
)
def test_norms(m: int, width: int) -> None:
    norm_problem(m, width, "float16", "float16", m).run(Simulator(ORDERS[m % 4]))


@pytest.mark.parametrize(
    ("of_y", "of_x"), [*product((None, "float32", "float16", "bfloat16"), ("float32", "bfloat16"))]
)
def test_norms_of_every_dtype(of_y: str | None, of_x: str) -> None:
    norm_problem(2, 72, of_y, of_x).run(Simulator(1))


@pytest.mark.parametrize("of_y", ["float32", "float16", "bfloat16"])
def test_norms_of_a_sum_of_two_terms(of_y: str) -> None:
    norm_problem(3, 264, of_y, "float16", two=True).run(Simulator(2))


@pytest.mark.parametrize(("m", "width", "parts"), [(3, 264, 9), (1, 64, 128), (2, 1032, 1)])
def test_norms_leave_what_deferred_ones_read(m: int, width: int, parts: int) -> None:
    norm_problem(m, width, "float16", "float16", parts=parts).run(Simulator(m))
    norm_problem(m, width, None, "float16", parts=parts).run(Simulator(-1))


TOKENS = (1, 2, 5, 8)


def few_multiprocessors(monkeypatch: Any, count: int) -> None:
    monkeypatch.setattr(heuristics, "multiprocessors", lambda: count)


@pytest.mark.parametrize(
    ("m", "name", "k", "exact"),
    [
        pytest.param(m, name, k, exact, marks=() if often else pytest.mark.every)
        for i, m in enumerate(TOKENS)
        for j, (name, k) in enumerate([("q4_0", 288), ("q4_k", 512)])
        for exact in (True, False)
        for often in [i > 1 and (i + j) % 2 == 0 and exact == (i < 3)]
    ],
)
def test_products_around_a_deferred_norm(m: int, name: str, k: int, exact: bool) -> None:
    """N ends inside a row tile; with `exact`, bit for bit but for sums of squares."""
    of = Matrix(m, 40, k, name, "integer" if exact else "normal")
    order = ORDERS[m % 4]
    residual_problem(of, exact=exact).run(Simulator(order))
    normed_problem(of, "float32", exact=exact).run(Simulator(order))
    normed_problem(of, parts=70).run(Simulator(order))


@pytest.mark.parametrize(("m", "exact"), [(1, True), (5, False)])
def test_terms_of_two_gpus_are_added_before_a_deferred_norm(m: int, exact: bool) -> None:
    """The own ones go to the other's memory; those that have come are taken out of it."""
    of = Matrix(m, 40, 288, "q4_0", "integer" if exact else "normal")
    residual_problem(of, exact=exact, shared=True).run(Simulator(ORDERS[m % 4]))


def test_a_term_of_another_gpu_is_waited_for() -> None:
    problem = residual_problem(Matrix(1, 40, 96, "q4_0"), shared=True)
    problem.outputs[3].array.view(np.uint32)[7] = deferred_norm.NOTHING
    with pytest.raises(SimulatorError, match=r"deadlock|gives up|wait"):
        problem.run(Simulator())


@pytest.mark.parametrize(
    ("m", "n", "sms"),
    [
        (1, 600, 1),
        (5, 168, 2),
        *(pytest.param(*one, marks=pytest.mark.every) for one in ((2, 300, 1), (8, 200, 3))),
    ],
)
def test_a_thread_with_several_outputs(monkeypatch: Any, m: int, n: int, sms: int) -> None:
    """Row tiles of one thread block are more than its threads have outputs at a time."""
    few_multiprocessors(monkeypatch, sms)
    of = Matrix(m, n, 128, "q5_1")
    assert deferred_norm.partial_sums(FORMATS["q5_1"], m, n, 128) == sms
    residual_problem(of, parts=40).run(Simulator(m))
    normed_problem(of, parts=40).run(Simulator(m))


@pytest.mark.parametrize("of_bias", ["float32", "float16", "bfloat16"])
def test_a_bias_is_added_behind_the_scales(of_bias: str) -> None:
    of = Matrix(3, 40, 96, "q8_0", "integer", of_bias)
    residual_problem(of, exact=True).run(Simulator())
    normed_problem(of, "float32", exact=True).run(Simulator())


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("in_h", [False, True])
def test_a_spoiled_token_spoils_no_other(value: float, in_h: bool) -> None:
    def spoil(a: np.ndarray, h: np.ndarray) -> None:
        (h if in_h else a)[1, 5] = value

    problem = residual_problem(Matrix(4, 40, 96, "q4_0"), spoil=spoil)
    problem.run(Simulator(), verify=False)
    h, x, after = (one.array for one in problem.outputs)
    for one in (h, x, after):
        assert np.isfinite(one[[0, 2, 3]]).all()
    assert not np.isfinite(after[1]).all()


def test_a_deferred_norm_has_the_same_bits_again() -> None:
    """In any order of lanes and thread blocks."""
    found = []
    for order in ORDERS:
        problem = residual_problem(Matrix(5, 72, 64, "q4_0"))
        problem.run(Simulator(order), verify=False)
        found.append([one.array.tobytes() for one in problem.outputs])
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize("growth", [pytest.param(1.0, marks=pytest.mark.every), 0.03, 5e3])
def test_deferred_norms_beside_launched_ones(growth: float) -> None:
    """Two layers' worth of residual: the same but for the rounding of x, also where the first makes
    it larger by so much or more, or takes most of it away."""
    rng, m, width, k, machine = np.random.default_rng(1), 3, 72, 64, Simulator(2)
    fmt, blocks = FORMATS["q4_0"], Product(3, 72, 64, "q4_0").blocks
    w = [np.array(one) for one in tiles(blocks)]
    parts = deferred_norm.partial_sums(fmt, m, width, k)
    h = rng.standard_normal((m, width)).astype(np.float32)
    weights = 1 + 0.1 * rng.standard_normal((3, width)).astype(np.float32)
    inputs = rng.standard_normal((2, m, k)).astype(np.float16)
    dequantized = fmt.dequantize(blocks).astype(np.float64)
    if growth > 1:
        inputs[0] *= growth
    if growth < 1:
        h = (growth * h - inputs[0].astype(np.float64) @ dequantized.T).astype(np.float32)
    exact, mine = h.astype(np.float64), h.copy()
    norm, x = np.zeros((m, 1 + parts), np.float32), np.zeros((m, width), np.float16)
    machine.run(add_and_norm.launch(mine, None, weights[0], 1e-5, x, norm=norm))
    largest = float(np.abs(inputs).max()) * np.abs(dequantized).sum(-1).max()
    for a, weight in zip(inputs, weights[1:], strict=True):
        after, x = np.zeros_like(norm), np.zeros_like(x)
        machine.run(
            deferred_norm.launch_residual(fmt, tuple(w), a, mine, weight, norm, 1e-5, after, x)
        )
        norm, exact = after, exact + a.astype(np.float64) @ dequantized.T
        np.testing.assert_allclose(mine, exact, rtol=0, atol=1e-3 * largest)
        r = 1 / np.sqrt((mine.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5)
        found = x * (factor(norm, width, 1e-5) / norm[:, 0])[:, None]
        assert nmse(found, mine * r * weight) < 2e-7


def test_more_tokens_than_a_thread_has_one_of_are_refused() -> None:
    with pytest.raises(ValueError, match="deferred for up to 8 tokens, not 9"):
        residual_problem(Matrix(9, 32, 32, "q4_0"))
    of = Matrix(1, 32, 32, "q4_0")
    h, x = np.zeros((1, 32), np.float32), np.zeros((1, 32), np.float16)
    with pytest.raises(ValueError, match="2 thread blocks leave a sum each of 1 tokens: after"):
        deferred_norm.launch_residual(
            FORMATS["q4_0"], of.weights, of.a, h, h[0], h[:, :2], 1e-5, h[:, :2], x
        )


@pytest.mark.parametrize(
    ("m", "name", "hidden", "k", "sms"),
    [
        pytest.param(1, "q4_0", 128, 288, 4, marks=pytest.mark.every),
        (2, "q4_k", 128, 256, 8),
        (5, "q8_0", 128, 96, 3),
        (8, "q5_1", 256, 64, 2),
    ],
)
def test_gates_in_the_product(
    monkeypatch: Any, m: int, name: str, hidden: int, k: int, sms: int
) -> None:
    """Several pairs of row tiles in a thread block, or one; the last one of three has fewer."""
    few_multiprocessors(monkeypatch, sms)
    gated_problem(Matrix(m, 2 * hidden, k, name)).run(Simulator(ORDERS[m % 4]))


def test_gates_that_no_product_takes_are_refused(monkeypatch: Any) -> None:
    fmt = FORMATS["q4_0"]
    assert gated_product.supports(fmt, 1, 14336, 4096)
    assert not gated_product.supports(fmt, 9, 14336, 4096)
    assert not gated_product.supports(fmt, 1, 96, 4096)
    with pytest.raises(ValueError, match=r"multiples of 128 hidden features.*1 tokens and 96"):
        gated_problem(Matrix(1, 192, 64, "q4_0")).make(Simulator())
    few_multiprocessors(monkeypatch, 6)  # 16 row tiles, 3 each
    with pytest.raises(ValueError, match="an even number of row tiles"):
        gated_problem(Matrix(1, 256, 64, "q4_0")).make(Simulator())


def test_rows_wider_than_threads_hold_twice() -> None:
    assert add_and_norm.row_threads(4096) == (256, 2)
    assert add_and_norm.row_threads(16384) == (1024, 2)
    assert add_and_norm.row_threads(20480) == (1024, 3)
    norm_problem(1, 20480, "float16", "float16").run(Simulator())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize("in_y", [False, True])
def test_a_spoiled_row_spoils_no_other(value: float, in_y: bool) -> None:
    def spoil(h: np.ndarray, y: np.ndarray | None) -> None:
        assert y is not None
        (y if in_y else h)[1, 5] = value

    problem = norm_problem(3, 128, "float32", "float32", spoil=spoil)
    problem.run(Simulator(), verify=False)
    x = problem.outputs[1].array
    assert np.isfinite(x[[0, 2]]).all()
    # the squares of 1e30 are infinite: the row is zero, as it is in torch
    assert (x[1] == 0).all() if value == 1e30 else np.isnan(x[1, 5])


@pytest.mark.parametrize(("m", "width"), [(1, 2048), (3, 8), (16, 96), (2, 1032)])
@pytest.mark.parametrize("of_x", ["float16", "float32"])
def test_gates(m: int, width: int, of_x: str) -> None:
    swiglu_problem(m, width, "float16", of_x, m).run(Simulator(ORDERS[m % 4]))


@pytest.mark.parametrize(
    ("of_y", "of_x"), [*product(("float32", "bfloat16"), ("float16", "float32", "bfloat16"))]
)
def test_gates_of_every_dtype(of_y: str, of_x: str) -> None:
    swiglu_problem(2, 40, of_y, of_x).run(Simulator(2))


def test_gates_at_the_ends_of_floats() -> None:
    gates = [np.inf, -np.inf, np.nan, 1e30, -1e30, 200, -200, 0.0]
    ups = [1, 1, 1, -2, 1, np.inf, 3, np.nan]

    def spoil(y: np.ndarray) -> None:
        y[0, :8], y[0, 8:] = gates, ups

    swiglu_problem(1, 8, "float32", "float32", spoil=spoil).run(Simulator())


POSITIONS = (0, 1, 127, 128, 700)
SHAPES = [
    (1, 2, 1, 64),
    (2, 2, 2, 128),
    (1, 4, 1, 128),
    (1, 8, 1, 64),
    (2, 7, 1, 16),
    (1, 3, 1, 256),
]


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("shape", [(1, 2, 1, 64), (1, 1, 1, 128)])
def test_attention_at_positions(shape: tuple[int, ...], position: int) -> None:
    of = Heads(*shape, 768, position)
    attention_problem(of).run(Simulator(ORDERS[position % 4]))


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_of_heads(shape: tuple[int, ...]) -> None:
    attention_problem(Heads(*shape, 256, 65), of_out="float16").run(Simulator(3))


@pytest.mark.parametrize("shape", [(1, 2, 1, 64), (1, 8, 1, 256)])
def test_attention_that_polls(shape: tuple[int, ...]) -> None:
    """Of 256 values and eight queries a thread has two turns."""
    for position in (0, 90, 300):
        of = Heads(*shape, 512, position)
        attention_problem(of, of_out="float16", polled=True).run(Simulator(2))


@pytest.mark.parametrize(
    ("of_qkv", "of_out", "normed"),
    [("float32", "float16", False), ("bfloat16", "bfloat16", True), ("float16", "float32", True)],
)
def test_attention_of_every_dtype(of_qkv: str, of_out: str, normed: bool) -> None:
    attention_problem(Heads(1, 4, 2, 64, 256, 90), of_qkv, of_out, normed).run(Simulator(1))


def test_attention_again_finds_its_counters_at_zero() -> None:
    """Of a launch that follows at once; partial sums are what the first one left."""
    attention_problem(Heads(1, 2, 2, 64, 128, 100)).run(Simulator(2), rounds=3)


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 2, 3, 7, 16])
def test_attention_in_any_number_of_splits(monkeypatch: Any, splits: int) -> None:
    monkeypatch.setattr(attention, "split_count", lambda *_: splits)
    for position in (31, 32, 33, 100):
        attention_problem(Heads(1, 2, 1, 64, 128, position)).run(Simulator(splits))


@pytest.mark.parametrize(
    ("what", "value"), [("key", np.nan), ("value", np.nan), ("value", np.inf), ("query", np.nan)]
)
def test_what_is_not_a_number_stays_in_its_sequence_and_head(what: str, value: float) -> None:
    of = Heads(2, 4, 2, 64, 256, 30)

    def spoil(qkv: np.ndarray, cache: np.ndarray) -> None:
        if what == "query":
            qkv[1, 2 * 64 + 3] = value  # of head 2, which has the keys of head 1
        else:
            cache[1, 1 if what == "key" else 3, 20, 3] = value

    problem = attention_problem(of, spoil=spoil)
    problem.run(Simulator(), verify=False)
    out = problem.outputs[1].array.reshape(2, 4, 64)
    spoiled = ~np.isfinite(out)
    assert spoiled[1, 2].any()
    assert not spoiled[0].any()
    assert not spoiled[1, :2].any()
    if what == "query":
        assert not spoiled[1, 3].any()


def test_heads_that_no_kernel_takes_are_refused() -> None:
    problem = attention_problem(Heads(1, 9, 1, 64, 256, 0))
    with pytest.raises(ValueError, match="up to 8 of queries to one of keys, not 9 to 1 of 64"):
        problem.make(Simulator())
    assert not attention.supports(4, 4, 80)
    assert not attention.supports(7, 2, 64)


@pytest.mark.parametrize(
    ("batch", "kv", "length", "splits"),
    [(1, 8, 4096, 16), (1, 8, 512, 4), (1, 8, 64, 1), (4, 8, 4096, 4), (16, 8, 4096, 1)],
)
def test_splits_fill_the_gpu(batch: int, kv: int, length: int, splits: int) -> None:
    assert attention.split_count(batch, kv, length) == splits


@pytest.mark.parametrize(
    ("of", "tokens", "of_qkv", "normed"),
    [
        (Heads(2, 4, 2, 64, 16, 0), 3, "float16", False),
        (Heads(1, 3, 1, 128, 8, 2), 5, "float16", True),
        (Heads(1, 3, 3, 16, 8, 0), 7, "float32", False),
        (Heads(1, 2, 1, 256, 8, 1), 2, "bfloat16", True),
    ],
)
def test_prompts_are_rotated(of: Heads, tokens: int, of_qkv: str, normed: bool) -> None:
    rotary_problem(of, tokens, of_qkv, normed).run(Simulator(tokens))


@pytest.mark.parametrize(("m", "count"), [(1, 1), (3, 77), (2, 4096), (1, 4100), (2, 20001)])
def test_the_largest_logit_is_found(m: int, count: int) -> None:
    argmax_problem(m, count).run(Simulator(ORDERS[m % 4]), rounds=2)


@pytest.mark.parametrize(
    ("values", "largest"),
    [
        ({5: 7.0, 4090: 7.0, 9000: 7.0}, 5),
        ({8000: np.inf, 3: 9.0}, 8000),
        ({8000: np.nan, 3: np.inf, 9500: -np.nan}, 8000),
        (dict.fromkeys(range(10000), -np.inf), 0),
        ({i: -0.0 if i < 4000 else 0.0 for i in range(10000)}, 0),
    ],
)
def test_the_first_of_equal_logits_is_the_largest(values: dict[int, float], largest: int) -> None:
    """And NaN is above all, as in NumPy and torch."""

    def spoil(logits: np.ndarray) -> None:
        logits[0, list(values)] = list(values.values())
        assert logits[0].argmax() == largest

    argmax_problem(1, 10000, spoil).run(Simulator(2))


@pytest.mark.parametrize(
    ("m", "width", "experts", "chosen", "normed"),
    [
        (1, 64, 8, 2, True),
        (3, 264, 5, 5, False),
        (2, 8, 33, 8, True),
        (2, 520, 1, 1, True),
        (1, 4104, 3, 2, False),  # a thread has two chunks
    ],
)
def test_routers(m: int, width: int, experts: int, chosen: int, normed: bool) -> None:
    """The second launch finds the counters of the first at zero."""
    problem = router_problem(m, width, experts, chosen, normed=normed)
    problem.run(Simulator(ORDERS[m % 4]), rounds=2)


@pytest.mark.parametrize(("of_y", "of_x"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_routers_of_every_dtype(of_y: str, of_x: str) -> None:
    router_problem(2, 72, 6, 3, of_y, of_x).run(Simulator(1))


def test_a_router_gives_a_spoiled_token_experts_and_no_shares() -> None:
    """Numbers of experts all the same: no weights beyond an array are read for it."""

    def spoil(h: np.ndarray, of: np.ndarray) -> None:
        h[1, 5] = np.nan

    problem = router_problem(3, 64, 6, 2, spoil=spoil)
    problem.run(Simulator(2), verify=False)
    shares = problem.outputs[2].array
    assert np.isnan(shares[1]).all()
    assert np.isfinite(shares[[0, 2]]).all()


def test_experts_of_logits() -> None:
    """More of them than threads; equal ones, also 0 and -0, in their order; infinite ones."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((3, 300)).astype(np.float32)
    logits[0] = np.round(logits[0])
    logits[1, ::7], logits[1, 3] = 0.0, -0.0
    logits[2, 100:] = -np.inf
    for normed in (True, False):
        choice_problem(logits, 8, normed).run(Simulator(1))
    choice_problem(logits[:, :4].copy(), 4).run(Simulator(0))
