"""The checker: a right result passes, each kind of wrong one fails, and for the right reason."""

from __future__ import annotations

import importlib
import math
import re
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qformats import BLOCK, FILE_FORMATS, FORMATS, WEIGHT_FORMATS, dequantize
from reference import (
    CHECK_SHAPES,
    GOLDEN,
    Q81,
    Bfloats,
    Halves,
    Problem,
    Reference,
    Tokens,
    bfloat16_bits,
    bound,
    check,
    limits,
    nmse,
    same_operands,
)
from reference.bfloat16 import rounded_to_bfloat16
from reference.exact import pack_block
from reference.limits import CLASSICAL, WEIGHT_NMSE
from reference.operands import Operands
from reference.recipes import complaint

checking = importlib.import_module("reference.check")  # reference.check is its function
FAMILIES = ("A16", "A8")


def q81_of(problem: Problem, family: str) -> Q81 | None:
    return Q81.of_values(problem.a) if family == "A8" else None


def answer(problem: Problem, family: str, q81: Q81 | None) -> np.ndarray:
    """What a right kernel returns: float32 all the way, block by block."""
    if family == "A16":
        return (problem.a @ dequantize(problem.blocks).T).astype(np.float32)
    fmt, blocks = FORMATS[problem.format], problem.k // BLOCK
    codes = fmt.codes(problem.blocks).reshape(problem.n, blocks, BLOCK).astype(np.int64)
    q = q81.q.reshape(problem.m, blocks, BLOCK).astype(np.int64)
    scale, offset = fmt.scale(problem.blocks), fmt.offset(problem.blocks)
    c = np.zeros((problem.m, problem.n), np.float32)
    for b in range(blocks):
        dots = (q[:, b] @ codes[:, b].T).astype(np.float32)
        c += scale[:, b] * (q81.d[:, b, None] * dots) + offset[:, b] * q81.s[:, b, None]
    return c


# --- right results pass ---------------------------------------------------------------------------


@pytest.mark.parametrize("turn", range(5))
@pytest.mark.parametrize("family", FAMILIES)
def test_right_results_pass(family: str, turn: int) -> None:
    """Every shape in one format and distribution, in five turns in all of them."""
    shapes = (*CHECK_SHAPES, (4, 512, 1024), (33, 65, 2080))
    for i, shape in enumerate(shapes):
        name = WEIGHT_FORMATS[(i + turn) % 5]
        problem = Problem(*shape, name, ("llm", "uniform", "normal", "integer")[(i + turn) % 4])
        used: list[Q81 | None] = [None]
        if family == "A8":  # and what a step on 36-byte blocks multiplies: d and s in float16
            used = [Q81.of_values(problem.a)]
            blocks = [FORMATS["q8_1"].quantize(problem.a, s) for s in ("codes", "values")]
            used += map(Q81.of_blocks, blocks)
        for q81 in used:
            verdict = check(answer(problem, family, q81), problem, family, q81)
            assert verdict, (name, shape, verdict.verdict)
            assert verdict.failures == ()
            assert verdict.worst_bound_ratio < 0.2
            assert verdict.verdict.startswith("right: ")
            assert verdict.compared == shape[0] * shape[1]


@pytest.mark.parametrize("seed", [0, 83, 103, 166])
def test_single_outputs_that_cancel_pass(seed: int) -> None:
    """1 x 1: the result may be near zero by chance, as of these seeds but the first, and its
    relative error large for no fault."""
    for family in FAMILIES:
        problem = Problem(1, 1, 4096, "q4_0", "normal", seed)
        q81 = q81_of(problem, family)
        verdict = check(answer(problem, family, q81), problem, family, q81)
        assert verdict, verdict.verdict


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_the_golden_block_must_be_exact(name: str) -> None:
    problem, golden = Problem(1, 1, 32, name, "golden"), GOLDEN[name]
    right = np.full((1, 1), golden.value, np.float32)
    assert check(right, problem, "A16")
    assert check(right, problem, "A8", golden.q81)
    for wrong in (np.nextafter(right, np.float32(0)), right - 16):
        assert "exact" in check(wrong, problem, "A16").failures
        assert "exact" in check(wrong, problem, "A8", golden.q81).failures
    requantized = Q81.of_values(golden.a)
    assert check(answer(problem, "A8", requantized), problem, "A8", requantized)


# --- wrong results fail ---------------------------------------------------------------------------


def put(c: np.ndarray, at: Any, value: float) -> np.ndarray:
    c[at] = value
    return c


WRONG = {
    "one NaN": (lambda c: put(c, (3, 7), math.nan), "nan"),
    "one Inf": (lambda c: put(c, (3, 7), math.inf), "nan"),
    "all NaN": (lambda c: np.full_like(c, np.nan), "nan"),
    "one wrong element": (lambda c: put(c, (-1, -1), c[-1, -1] + 1), "bound"),
    "last tile zero": (lambda c: put(c, slice(16, None), 0), "bound"),
    "last tile NaN": (lambda c: put(c, np.s_[:, 16:], math.nan), "nan"),
    "transposed": (lambda c: np.ascontiguousarray(c.T).reshape(c.shape), "bound"),
    "zeros": (np.zeros_like, "bound"),
    "scaled by 1.001": (lambda c: c * np.float32(1.001), "nmse"),
    "negated": (np.negative, "bound"),
    "rows reversed": (lambda c: c[::-1].copy(), "bound"),
    "columns shifted": (lambda c: np.roll(c, 1, axis=1), "bound"),
    "rounded to f16": (lambda c: c.astype(np.float16).astype(np.float32), "nmse"),
    "rounded to bf16": (rounded_to_bfloat16, "nmse"),
}


@pytest.mark.parametrize("distribution", ["normal", "integer"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_results_fail(wrong: str, family: str, distribution: str) -> None:
    problem = Problem(17, 40, 96, "q5_1", distribution)
    q81 = q81_of(problem, family)
    c = answer(problem, family, q81)
    assert check(c, problem, family, q81)
    change, layer = WRONG[wrong]
    verdict = check(change(c.copy()), problem, family, q81)
    assert not verdict
    assert (layer if distribution == "normal" else "exact") in verdict.failures
    assert verdict.verdict.startswith("wrong: ")
    assert "\n" not in verdict.verdict
    assert len(verdict.reasons) == len(verdict.failures)
    if layer == "nan":
        assert verdict.failures[0] == "nan"
        assert verdict.nmse_same_operands == verdict.nmse_float == math.inf


def test_what_is_wrong_is_counted_and_placed() -> None:
    problem = Problem(17, 40, 96, "q4_0")
    right = answer(problem, "A16", None)
    c = right.copy()
    c[16, 3:6] = np.nan
    c[16, 39] = -np.inf
    verdict = check(c, problem, "A16")
    assert "4 of 680 outputs are not finite (3 NaN, 1 Inf), the first at (16, 3)" in verdict.verdict
    assert "rows 16-16, columns 3-39" in verdict.verdict
    assert verdict.worst[0] == 16
    assert verdict.worst_bound_ratio == math.inf

    c = right.copy()
    c[11, 29] += 3
    verdict = check(c, problem, "A16")
    assert (verdict.worst, verdict.got) == ((11, 29), c[11, 29])
    assert verdict.expected == pytest.approx(c[11, 29] - 3, abs=1e-4)
    assert "rows 11-11, columns 29-29" in verdict.verdict
    assert verdict.worst_bound_ratio > 100


def test_a_sample_sees_dropped_tiles_and_every_nan() -> None:
    problem = Problem(260, 300, 64, "q8_0")
    c, sampled = answer(problem, "A16", None), Reference(problem, limit=1000)
    assert check(c, problem, "A16", reference=sampled).compared <= 1000
    wrong = Halves.of_values(problem.a)
    wrong.h[259, 3] *= 2
    verdict = check(c, problem, "A16", wrong, reference=sampled)
    assert "activations (h) differ from the recipe, the first at (259, 3)" in verdict.verdict
    for m in range(0, 260, 37):
        spoiled = put(c.copy(), (m, 141), math.nan)
        assert "nan" in check(spoiled, problem, "A16", reference=sampled).failures
    for tile in (16, 32, 64, 128):
        for dropped in (np.s_[260 // tile * tile :], np.s_[:, 300 // tile * tile :]):
            verdict = check(put(c.copy(), dropped, 0), problem, "A16", reference=sampled)
            assert "bound" in verdict.failures


def test_zero_against_zero_is_right_and_anything_else_is_not() -> None:
    class Silent(Problem):
        @property
        def a(self) -> np.ndarray:  # type: ignore[override]
            return np.zeros((self.m, self.k), np.float32)

    problem = Silent(3, 4, 64, "q4_1")
    q81 = Q81.of_values(problem.a)
    zeros = np.zeros((3, 4), np.float32)
    for family, given_q81 in (("A16", None), ("A8", q81)):
        verdict = check(zeros, problem, family, given_q81)
        assert verdict, verdict.verdict
        assert verdict.nmse_same_operands == verdict.nmse_float == 0
        wrong = zeros.copy()
        wrong[2, 1] = 1e-30
        verdict = check(wrong, problem, family, given_q81)
        assert not verdict
        assert verdict.nmse_same_operands == math.inf


def test_nmse_of_special_cases() -> None:
    one, zero = np.ones((2, 2)), np.zeros((2, 2))
    assert nmse(one, one) == nmse(zero, zero) == 0
    assert nmse(one, zero) == math.inf
    assert nmse(zero, one) == 1
    for bad in (math.nan, math.inf):
        spoiled = np.array([[1, bad], [1, 1]])
        assert nmse(spoiled, one) == nmse(one, spoiled) == nmse(spoiled, spoiled) == math.inf
    for other in (np.ones(2), one[:0]):  # NumPy would spread one, and sum nothing of the other
        with pytest.raises(ValueError, match=r"got \[2, 2\] and \["):
            nmse(one, other)
    with pytest.raises(ValueError, match=r"got \[0, 2\] and \[0, 2\]"):
        nmse(one[:0], one[:0])


@given(st.integers(0, 16), st.integers(0, 39), st.floats(width=32))
@settings(max_examples=150, deadline=None)
def test_no_single_wrong_value_passes(m: int, n: int, value: float) -> None:
    """Any float32 in any place, unless it is the right one within the bound."""
    c = SMALL_ANSWER.copy()
    c[m, n] = value
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verdict = check(c, SMALL, "A16")
    close = abs(value - float(SMALL_ANSWER[m, n])) <= 2e-4
    assert close or not verdict


SMALL = Problem(17, 40, 96, "q5_1")
SMALL_ANSWER = answer(SMALL, "A16", None)


# --- codecs and quantizers ------------------------------------------------------------------------


def amax_over_7(w: np.ndarray) -> np.ndarray:
    """Q4_0 with d = amax / 7, as the classical report has it."""
    x = w.reshape(len(w), -1, BLOCK)
    d = np.abs(x).max(axis=-1) / np.float32(7)
    return pack_block("q4_0", np.clip(np.round(x / d[..., None]), -8, 7).astype(np.int64) + 8, d)


@pytest.mark.parametrize(
    ("name", "recipe"), [("q4_0", amax_over_7), ("q5_0", FORMATS["q4_0"].quantize)]
)
def test_a_wrong_weight_recipe_is_seen_whatever_the_kernel_does(name: str, recipe: Any) -> None:
    """The kernel agrees with its blocks perfectly, and is within 1 % of the float product."""
    problem = Problem(64, 512, 1024, name, "uniform")
    blocks = recipe(problem.w)
    c = same_operands(problem.a, blocks)[0].astype(np.float32)
    verdict = check(c, problem, "A16", reference=Reference(problem, blocks=blocks))
    assert set(verdict.failures) == {"float", "weights"}
    assert verdict.nmse_same_operands < 1e-13
    assert verdict.nmse_float < CLASSICAL
    assert f"not ggml's {name}" in verdict.verdict


def nearest_scale(x: np.ndarray) -> np.ndarray:
    """Q4_0 with less error than ggml's: of each block the best scale of some."""
    x = x.reshape(len(x), -1, BLOCK)
    extreme = np.take_along_axis(x, np.abs(x).argmax(axis=-1, keepdims=True), axis=-1)[..., 0]
    best, least = np.zeros(()), np.full(extreme.shape, np.inf)
    parts = np.linspace(0.7, 1.1, 9, dtype=np.float32)
    for part in (*parts, *-parts):
        d = part * extreme / np.float32(-8)
        codes = np.clip(np.round(x / d[..., None]), -8, 7).astype(np.int64) + 8
        blocks = pack_block("q4_0", codes, d)
        error = np.square(dequantize(blocks).reshape(x.shape) - x).sum(axis=-1)
        best = np.where(error < least, blocks, best) if best.ndim else blocks
        least = np.minimum(error, least)
    return best


def test_less_error_than_the_recipe_has_is_as_wrong_as_more() -> None:
    """Blocks of another codec, such as of one that searches for its scales."""
    problem = Problem(64, 1024, 1024, "q4_0", "normal")
    blocks = nearest_scale(problem.w)
    c = same_operands(problem.a, blocks)[0].astype(np.float32)
    verdict = check(c, problem, "A16", reference=Reference(problem, blocks=blocks))
    assert set(verdict.failures) == {"float", "weights"}
    assert verdict.nmse_float < limits(problem, "A16").nmse_float[0]


def _changed(q81: Q81, **fields: np.ndarray) -> Q81:
    return Q81(**{"q": q81.q.copy(), "d": q81.d.copy(), "s": q81.s.copy(), **fields})


def test_wrong_activation_bits_are_seen() -> None:
    """`same operands` trusts the bits it is given, so they are checked too."""
    problem = Problem(8, 16, 512, "q4_0", "normal")
    good = Q81.of_values(problem.a)
    off = good.q.copy()
    off[3, 40] += 2
    truncated = np.trunc(problem.a.reshape(8, -1, BLOCK) / good.d[..., None])
    wrong = {
        "codes": (_changed(good, q=off), r"1 of 4096 Q8_1 codes differ.*\(3, 40\)"),
        "truncation": (_changed(good, q=truncated.astype(np.int8).reshape(8, 512)), "codes differ"),
        "d": (_changed(good, d=good.d * np.float32(1.01)), r"128 of 128 Q8_1 scales d are wrong"),
        "s": (_changed(good, s=np.zeros_like(good.s)), "Q8_1 sums s are wrong"),
        "s of codes, not of values": (_changed(good, s=good.s / good.d), "Q8_1 sums s are wrong"),
        "NaN": (_changed(good, s=good.s * np.float32(np.nan)), "fields s are not finite"),
    }
    assert complaint(good, problem.a) is None
    for name, (q81, says) in wrong.items():
        verdict = check(answer(problem, "A8", q81), problem, "A8", q81)
        assert "activations" in verdict.failures, name
        assert not verdict
        with pytest.raises(AssertionError, match=says):
            raise AssertionError(verdict.verdict)


def test_a_code_at_a_tie_may_round_either_way() -> None:
    """One in 10^4 values, by one, with an s that follows; none where the case is exact."""

    def moved(q81: Q81, columns: int) -> Q81:
        q = q81.q.copy()
        q[3, :columns] -= np.sign(q[3, :columns])
        return _changed(q81, q=q, s=q81.d * q.reshape(8, -1, BLOCK).sum(axis=-1, dtype=np.float32))

    normal, exact = (Problem(8, 16, 512, "q4_0", kind) for kind in ("normal", "integer"))
    good, bits = Q81.of_values(normal.a), Q81.of_values(exact.a)
    assert complaint(moved(good, 1), normal.a) is None
    assert "codes differ" in str(complaint(moved(good, 9), normal.a))
    assert complaint(moved(bits, 1), exact.a) is None
    assert "codes differ" in str(complaint(moved(bits, 1), exact.a, exact=True))


# --- the bound and the limits ---------------------------------------------------------------------


@pytest.mark.parametrize("order", ["ascending", "descending", "by size", "pairwise", "shuffled"])
def test_the_bound_holds_in_any_order_and_is_not_absurd(order: str) -> None:
    rng = np.random.default_rng(3)
    problem = Problem(8, 9, 512, "q4_1", "normal")
    terms = problem.a[:, None] * dequantize(problem.blocks)[None]
    if order == "descending":
        terms = terms[..., ::-1]
    elif order == "by size":  # the worst for cancellation: all positive ones first
        terms = np.sort(terms, axis=-1)
    elif order == "shuffled":
        terms = terms[..., rng.permutation(512)]
    if order == "pairwise":
        while terms.shape[-1] > 1:
            terms = terms[..., ::2] + terms[..., 1::2]
        c = terms[..., 0]
    else:
        c = np.cumsum(terms, axis=-1, dtype=np.float32)[..., -1]
    permitted = bound("A16", 512, same_operands(problem.a, problem.blocks)[1])
    error = np.abs(c - same_operands(problem.a, problem.blocks)[0])
    assert (error <= permitted).all()
    assert (error > permitted * 1e-6).any()


def test_the_bound_by_hand() -> None:
    u = 2.0**-24
    assert bound("A16", 96, np.float64(2.0)) == pytest.approx(2 * 100 * u / (1 - 100 * u))
    assert bound("A8", 96, np.float64(1.0)) == pytest.approx(31 * u, rel=1e-5)
    halves = bound("A16", 96, np.float64(1.0), "f16_weights")
    assert halves == pytest.approx(2.0**-11 + 200 * u, rel=1e-3)
    assert bound("A8", 96, np.float64(1.0), "int8") == pytest.approx(4 * u, rel=1e-5)


def test_limits_say_where_they_come_from() -> None:
    for distribution in ("uniform", "normal", "llm", "integer"):
        for name in WEIGHT_FORMATS:
            for family in FAMILIES:
                found = limits(Problem(64, 2048, 1024, name, distribution), family)
                assert found.nmse_same_operands <= 2e-11
                if distribution == "integer":
                    assert found.nmse_float is None
                    continue
                low, high = found.nmse_float
                assert low < high <= CLASSICAL
                assert WEIGHT_NMSE[distribution][name] < high
                assert family == "A8" or low < WEIGHT_NMSE[distribution][name]
    assert limits(Problem(64, 512, 1024, "q4_0"), "A8").nmse_same_operands == 1e-11
    deep = limits(Problem(64, 512, 160000, "q4_0"), "A8")  # a sum of 5000 blocks
    few = 1 + 2 * (12 / (64 * 512)) ** 0.5 + 24 / (64 * 512)
    assert deep.nmse_same_operands == pytest.approx(16 / 6 * 5000 * 2.0**-48 * few)
    small = limits(Problem(1, 5, 96, "q4_0"), "A16")
    assert small.nmse_float is None


def _summed_by_blocks(problem: Problem, q81: Q81) -> tuple[np.ndarray, np.ndarray]:
    """(C [1, 1], its terms), as a thread adds one block of Q8_0 after the other in float32."""
    levels = FORMATS["q8_0"].levels(problem.blocks).reshape(-1, 32).astype(np.int64)
    dots = (levels * q81.q.reshape(-1, 32)).sum(axis=1).astype(np.float32)
    terms = problem.blocks["d"][0].astype(np.float32) * q81.d[0].astype(np.float32) * dots
    return np.cumsum(terms, dtype=np.float32)[-1:].reshape(1, 1), terms


@pytest.mark.parametrize(("k", "seed"), [(160000, 8), (160000, 9), (160000, 1), (16384, 70)])
def test_one_output_may_lose_what_its_sum_does_but_not_a_block(k: int, seed: int) -> None:
    """The first two and the last lose more than sums of many outputs do; one is near zero."""
    problem = Problem(1, 1, k, "q8_0", "normal", seed)
    q81 = Q81.of_values(problem.a)
    c, terms = _summed_by_blocks(problem, q81)
    assert check(c, problem, "A8", q81).ok
    assert "nmse" in check(c - terms[77], problem, "A8", q81).failures
    rough = c + np.float32(2e-4 * float(np.mean(terms**2) * terms.size) ** 0.5)
    assert "nmse" in check(rough, problem, "A8", q81).failures, "2e-4 of what sums come to"


def test_a_row_that_is_larger_than_the_others_counts_alone() -> None:
    """Columns of nine outputs of weights rounded to float16, one of them 1000 times the others."""
    problem = Problem(9, 4096, 256, "q8_0", "normal", 2)
    used = Halves.of_values(problem.a)
    a, w = used.values().astype(np.float64), dequantize(problem.blocks).astype(np.float64)
    a[3] *= 1000
    c = (a @ w.astype(np.float16).astype(np.float64).T).astype(np.float32)
    same, size = a @ w.T, np.abs(a) @ np.abs(w).T
    many = limits(problem, "A16", "f16_weights", (9, 1)).nmse_same_operands
    beyond = wrong = 0
    for n in range(4096):
        one = np.s_[:, n : n + 1]
        allowed = limits(problem, "A16", "f16_weights", (9, 1), size[one]).nmse_same_operands
        cancelled = checking._cancellation(size[one], same[one], 256)
        assert nmse(c[one], same[one]) <= allowed * cancelled, n
        beyond += nmse(c[one], same[one]) > many * cancelled
        off = c[one] + 2e-2 * float(np.mean(same**2)) ** 0.5  # a hundred times what rounding costs
        wrong += nmse(off, same[one]) > allowed * cancelled
    assert beyond, "as if all nine counted"
    assert wrong > 0.9 * 4096


def test_few_outputs_that_cancel_may_lose_what_others_do() -> None:
    """Each output by itself, of weights rounded to float16: also where it is near zero."""
    problem = Problem(96, 96, 256, "q8_0", "normal", 2)
    used = Halves.of_values(problem.a)
    a, w = used.values().astype(np.float64), dequantize(problem.blocks).astype(np.float64)
    c = (a @ w.astype(np.float16).astype(np.float64).T).astype(np.float32)
    same, size = same_operands(used, problem.blocks)
    allowed = limits(problem, "A16", "f16_weights", (1, 1)).nmse_same_operands
    wrong = 0
    for m, n in np.ndindex(96, 96):
        one = np.s_[m : m + 1, n : n + 1]
        most = allowed * checking._cancellation(size[one], same[one], 256)
        assert nmse(c[one], same[one]) <= most, (m, n)
        off = c[one] + 2e-2 * float(np.mean(same**2)) ** 0.5  # a hundred times what rounding costs
        wrong += nmse(off, same[one]) > most
    assert wrong > 0.9 * c.size
    assert checking._cancellation(size, same, 256) == 1


def test_int8_weights_of_more_than_127_quanta_are_not_exact() -> None:
    """IQ4_XS has 254: the scale of such a row is no power of two, and three roundings are left."""
    problem = Problem(2, 600, 256, "iq4_xs", "integer", 74524)
    tokens = Tokens.of_values(problem.a)
    right = same_operands(tokens, problem.blocks)[0]
    c = right.astype(np.float32)
    assert (c != right).any()
    assert check(c, problem, "A8", tokens).ok
    assert check(c * np.float32(1 + 2**-21), problem, "A8", tokens).failures == ("nmse",)


# --- misuse ---------------------------------------------------------------------------------------


def test_what_is_no_answer_is_an_error_not_a_verdict() -> None:
    problem = Problem(3, 4, 64, "q4_0")
    c, q81 = np.zeros((3, 4), np.float32), Q81.of_values(problem.a)
    with pytest.raises(ValueError, match=r"\(M, N\) = \(3, 4\), got \(4, 3\)"):
        check(c.T, problem, "A16")
    with pytest.raises(ValueError, match=r"got \(12,\)"):
        check(c.ravel(), problem, "A16")
    with pytest.raises(
        TypeError, match=r"float32, float16 or bfloat16 \(uint16\) array, got float64"
    ):
        check(c.astype(np.float64), problem, "A16")
    with pytest.raises(TypeError, match=r"\(uint16\) array, got list"):
        check(c.tolist(), problem, "A16")
    with pytest.raises(ValueError, match="'W4A16': use one of A16, A8"):
        check(c, problem, "W4A16")
    with pytest.raises(TypeError, match=r"pass activations=Q81\(q, d, s\), got NoneType"):
        check(c, problem, "A8")
    with pytest.raises(TypeError, match="float activations, got Q81"):
        check(c, problem, "A16", q81)
    with pytest.raises(ValueError, match=r"\(3, 64\), got \(2, 64\)"):
        check(c, problem, "A8", q81.rows(slice(0, 2)))
    with pytest.raises(
        ValueError, match=r"bfloat16 activations must be .* \(3, 64\), got \(3, 32\)"
    ):
        check(c, problem, "A16", Bfloats.of_values(problem.a[:, :32]))
    with pytest.raises(ValueError, match="'f8': use one of f32, f16_weights"):
        limits(problem, "A16", "f8")


# --- one reference for many answers ---------------------------------------------------------------


WRITTEN = {
    "float32": lambda c: c.astype(np.float32),
    "float16": lambda c: np.clip(c, -6e4, 6e4).astype(np.float16),
    "bfloat16": lambda c: bfloat16_bits(c.astype(np.float32)),
}


@pytest.mark.parametrize("distribution", ["normal", "uniform", "llm", "integer"])
@pytest.mark.parametrize("output", WRITTEN)
@pytest.mark.parametrize("kind", [Halves, Bfloats])
def test_16_bits_are_judged_as_they_were_given(
    kind: type[Operands], output: str, distribution: str
) -> None:
    """One rounding is left, of the weights to float16, and one of C. Weights in bfloat16 are not
    exact."""
    written, bfloats = WRITTEN[output], kind is Bfloats
    for name in WEIGHT_FORMATS:
        problem = Problem(
            32, 48, 256, name, distribution, input="bfloat16" if bfloats else "float32"
        )
        used = kind.of_values(problem.a)
        w = dequantize(problem.blocks).astype(np.float16)
        c = used.values() @ w.astype(np.float64).T
        verdict = check(written(c), problem, "A16", used)
        assert verdict, verdict.verdict
        if distribution == "normal" and output != "bfloat16":
            coarse = used.values() @ rounded_to_bfloat16(w).astype(np.float64).T
            assert "nmse" in check(written(coarse), problem, "A16", used).failures
        off = 1.02 if output == "bfloat16" else 1.001
        assert "nmse" in check(written(c * off), problem, "A16", used).failures
        one = put(c.copy(), (5, 7), c[5, 7] + 0.2 * np.abs(c).max())
        assert "bound" in check(written(one), problem, "A16", used).failures
        if distribution == "integer":
            exact = written(used.values() @ dequantize(problem.blocks).astype(np.float64).T)
            assert check(exact, problem, "A16", used).ok
            next_one = (
                exact[5, 7] + 1
                if output == "bfloat16"
                else np.nextafter(exact[5, 7], exact.dtype.type(np.inf))
            )
            assert check(put(exact, (5, 7), next_one), problem, "A16", used).failures == ("exact",)


@pytest.mark.parametrize("output", ["float16", "bfloat16"])
def test_the_next_number_is_not_the_nearest(output: str) -> None:
    """Half of the step between two numbers is all that the rounding of C may be off. A whole step
    is most of a number near a power of two."""
    problem = Problem(8, 64, 64, "q4_0", "integer")
    exact = problem.a.astype(np.float64) @ dequantize(problem.blocks).T
    c = WRITTEN[output](exact)
    significand, exponent = np.frexp(exact)
    bits = 11 if output == "float16" else 8
    near = (significand > 0.5) & (significand < 0.55) & (np.ldexp(significand, bits) % 1 == 0)
    at = np.unravel_index(np.argmax(np.where(near & (exponent < 16), exact, 0)), exact.shape)
    ulp = 2.0 ** (exponent[at] - bits)
    for steps, failures in ((0, ()), (1, ("exact", "bound"))):
        value = WRITTEN[output](np.array([exact[at] + steps * ulp]))[0]
        assert check(put(c.copy(), at, value), problem, "A16").failures == failures


def test_an_expected_value_that_is_no_number_is_out_of_bounds() -> None:
    problem = Problem(2, 3, 64, "q4_0")
    good = Q81.of_values(problem.a)
    for value in (np.inf, np.nan):
        bad = _changed(good, d=put(good.d.copy(), (1, 0), value))
        verdict = check(np.ones((2, 3), np.float32), problem, "A8", bad)
        assert {"bound", "nmse", "activations"} <= set(verdict.failures)
        assert verdict.worst_bound_ratio == math.inf
        assert verdict.worst[0] == 1


def test_what_is_no_number_is_found_in_bfloat16() -> None:
    problem = Problem(3, 4, 64, "q4_0", "integer", input="bfloat16")
    bfloats = Bfloats.of_values(problem.a)
    c = bfloat16_bits(bfloats.values() @ dequantize(problem.blocks).astype(np.float64).T)
    assert check(c, problem, "A16", bfloats).ok
    for bits in (0x7FC0, 0x7F80, 0xFF80):
        assert "nan" in check(put(c.copy(), (1, 2), bits), problem, "A16", bfloats).failures


@pytest.mark.parametrize(
    ("kind", "array", "at", "says"),
    [
        (Halves, 0, (2, 9), r"1 of 256 float16 activations \(h\) differ .* the first at \(2, 9\)"),
        (Halves, 1, (3,), r"1 of 4 float16 activations \(factor\) differ .* the first at \(3\)"),
        (Bfloats, 0, (2, 7), r"1 of 256 bfloat16 activations \(b\) differ .* first at \(2, 7\)"),
        (Tokens, 0, (1, 4), r"1 of 256 int8 codes differ from the recipe, the most at \(1, 4\)"),
        (Tokens, 1, (2,), r"1 of 4 int8 scales d are wrong, the first at \(2\)"),
    ],
)
def test_operands_that_are_not_the_recipe_are_found(
    kind: type[Operands], array: int, at: tuple[int, ...], says: str
) -> None:
    problem = Problem(4, 6, 64, "q5_0")
    right = kind.of_values(problem.a)
    assert complaint(right, problem.a) is None
    arrays = [each.copy() for each in right.arrays]
    arrays[array][at] = arrays[array][at] * 2 if arrays[array].dtype != np.int8 else 99
    wrong = kind(*arrays)
    c = np.zeros((4, 6), np.float32)
    found = check(c, problem, "A8" if kind is Tokens else "A16", wrong)
    assert "activations" in found.failures
    assert re.search(says, found.verdict)


def test_answers_to_one_problem_share_its_products(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    for name in ("same_operands", "unquantized"):
        real = getattr(checking, name)
        monkeypatch.setattr(
            checking, name, lambda *args, n=name, f=real: (made.append(n), f(*args))[1]
        )
    problem = Problem(5, 34, 96, "q5_1")
    reference = Reference(problem)
    f32, f16 = Q81.of_values(problem.a), Q81.of_blocks(FORMATS["q8_1"].quantize(problem.a))
    for q81 in (f32, f16, f32, f16, None, None):
        family = "A16" if q81 is None else "A8"
        c = answer(problem, family, q81)
        assert check(c, problem, family, q81, reference=reference) == check(
            c, problem, family, q81, reference=Reference(problem)
        )
    assert made.count("same_operands") == 3 + 6
    assert made.count("unquantized") == 1 + 6


def test_a_shared_reference_still_sees_other_bits_and_other_problems() -> None:
    problem = Problem(5, 34, 96, "q4_0")
    reference, q81 = Reference(problem), Q81.of_values(problem.a)
    c = answer(problem, "A8", q81)
    assert check(c, problem, "A8", q81, reference=reference)
    wrong = Q81(q81.q, q81.d * np.float32(1.01), q81.s)
    assert not check(c, problem, "A8", wrong, reference=reference)
    q81.q[0, 0] ^= 64  # the same arrays with other contents
    assert not check(c, problem, "A8", q81, reference=reference)
    with pytest.raises(ValueError, match="cannot judge"):
        check(c, Problem(5, 34, 96, "q4_0", seed=1), "A8", q81, reference=reference)


@pytest.mark.parametrize("name", [name for name in FILE_FORMATS if not FORMATS[name].written])
@pytest.mark.parametrize("distribution", ["uniform", "normal"])
def test_int8_of_drawn_blocks_is_within_its_limits(name: str, distribution: str) -> None:
    """Of K-quants, whose rows have larger outliers than those that the table was made of."""
    problem = Problem(32, 64, 16384, name, distribution, 1)
    tokens = Tokens.of_values(problem.a)
    same = same_operands(tokens, problem.blocks)[0]
    meant = same_operands(problem.a.astype(np.float64), problem.blocks)[0]
    allowed = limits(problem, "A8", "int8").nmse_float
    assert allowed is not None
    assert allowed[0] < nmse(same, meant) < allowed[1]


def test_minima_that_tensor_cores_add_are_truncated() -> None:
    """At K = 160000 a sum that is truncated once in 128 K is right; one of tf32 sums is not."""
    problem = Problem(2, 16, 160000, "q5_1", "normal", 7)
    used = Q81.of_values(problem.a)
    fmt, blocks = FORMATS["q5_1"], problem.blocks
    levels = fmt.levels(blocks).reshape(16, -1, BLOCK).astype(np.float64)
    dots = np.einsum("mbi,nbi->mnb", used.q.reshape(2, -1, BLOCK), levels)
    scaled = dots * used.d[:, None].astype(np.float64) * fmt.scale(blocks)
    offset = fmt.offset(blocks).astype(np.float64)

    def summed(sums: Any, toward_zero: bool) -> Any:
        terms = (scaled + sums[:, None].astype(np.float64) * offset).reshape(2, 16, -1, 4).sum(3)
        c = np.zeros((2, 16), np.float32)
        for i in range(terms.shape[2]):
            exact = c + terms[:, :, i]
            c = exact.astype(np.float32)
            beyond = toward_zero & (np.abs(c) > np.abs(exact))
            c[beyond] = np.nextafter(c[beyond], np.float32(0))
        return c

    right, truncated = summed(used.s, False), summed(used.s, True)
    assert check(right, problem, "A8", used).nmse_same_operands < 1e-11
    found = check(truncated, problem, "A8", used)
    assert found
    assert found.nmse_same_operands > 1e-10
    of_tf32 = (used.s.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    assert check(summed(of_tf32, False), problem, "A8", used).failures == ("nmse",)
