"""Problems are reproducible and what they say they are; products are right; the figures of the
field come out (NMSE of each format, by ggml's recipes, on uniform and on normal data)."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qformats import BLOCK, FORMATS, WEIGHT_FORMATS, dequantize, quantize
from reference import (
    BENCH_SHAPES,
    CHECK_SHAPES,
    DISTRIBUTIONS,
    GOLDEN,
    GPU_CHECK_SHAPES,
    Q81,
    Bfloats,
    Halves,
    Problem,
    Tokens,
    magnitude_a8,
    magnitude_a16,
    nmse,
    same_operands_a8,
    same_operands_a16,
    sample,
    unquantized,
)
from reference.exact import EXACT_QUANTA
from reference.problem import OUTLIER_FACTOR

RANDOM = ("uniform", "normal", "llm")

# --- problems -------------------------------------------------------------------------------------


@pytest.mark.parametrize("distribution", [*RANDOM, "integer"])
@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_a_problem_is_its_parameters(name: str, distribution: str) -> None:
    one, two = (Problem(3, 5, 96, name, distribution, seed=4) for _ in range(2))
    assert one == two
    assert one.a.shape == (3, 96)
    assert one.a.dtype == one.w.dtype == np.float32
    assert one.w.shape == (5, 96)
    assert one.blocks.shape == (5, 3)
    assert one.blocks.dtype == FORMATS[name].dtype
    np.testing.assert_array_equal(one.a, two.a)
    assert one.blocks.tobytes() == two.blocks.tobytes()
    assert not one.a.flags.writeable
    assert not one.blocks.flags.writeable


def test_every_parameter_changes_the_numbers() -> None:
    base = Problem(4, 6, 64, "q4_0", "normal", 0)
    others = (
        Problem(4, 6, 64, "q4_0", "normal", 1),
        Problem(4, 6, 64, "q4_1", "normal", 0),
        Problem(4, 6, 64, "q4_0", "llm", 0),
        Problem(5, 6, 64, "q4_0", "normal", 0),
        Problem(4, 7, 64, "q4_0", "normal", 0),
        Problem(4, 6, 96, "q4_0", "normal", 0),
    )
    for other in others:
        assert not np.isin(base.a[0, :4], other.a[0, :4]).any(), other
        assert not np.isin(base.w[0, :4], other.w[0, :4]).any(), other
    assert not np.isin(base.a[0, :4], base.w[0, :4]).any()


def test_numbers_stay_what_they_are() -> None:
    """Committed results name a seed; whoever changes these must say so in the record."""
    normal = Problem(1, 1, 32, "q4_0", "normal")
    assert normal.a[0, :3].tolist() == pytest.approx([0.7168824, -0.0082734, -0.6174126], abs=1e-6)
    integer = Problem(1, 1, 32, "q5_1", "integer")
    assert integer.blocks.tobytes().hex() == "0030c0c392aff68cc71af64ea95bd95152b7631e8d800d55"


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ((0, 1, 32, "q4_0"), ValueError, "M=0, N=1, K=32"),
        ((1, -2, 32, "q4_0"), ValueError, "N=-2"),
        ((1, 1, 33, "q4_0"), ValueError, "K=33 is not a multiple of the block of 32: use 64 or 32"),
        ((1, 1, 31, "q4_0"), ValueError, "use 32$"),
        ((1, 1, 32, "q4_2"), ValueError, "'q4_2'.*q4_0, q4_1, q5_0, q5_1, q8_0"),
        ((1, 1, 32, "q8_1"), ValueError, "'q8_1'"),
        ((1, 1, 32, "q4_0", "gauss"), ValueError, "'gauss'.*uniform, normal, llm, integer"),
        ((1, 1, 32, "q4_0", "normal", -1), ValueError, "seed must not be negative, got -1"),
        ((1.5, 1, 32, "q4_0"), TypeError, "m must be an int, got 1.5"),
        ((1, True, 32, "q4_0"), TypeError, "n must be an int, got True"),
        ((2, 1, 32, "q4_0", "golden"), ValueError, "1 x 1 x 32, got 2 x 1 x 32"),
    ],
)
def test_bad_problems_are_refused_in_one_sentence(arguments, error, says) -> None:
    with pytest.raises(error, match=says) as caught:
        Problem(*arguments)
    assert "\n" not in str(caught.value)


def test_llm_has_a_few_loud_channels_in_a_only() -> None:
    p = Problem(64, 32, 2048, "q8_0", "llm")
    assert p.outlier_channels.size == 2
    deviation = p.a.std(axis=0)
    loud = np.zeros(p.k, dtype=bool)
    loud[p.outlier_channels] = True
    assert deviation[loud].min() > OUTLIER_FACTOR / 2
    assert deviation[~loud].max() < 2
    assert p.w.std(axis=0).max() < 2.5


def test_shape_lists_cover_what_they_are_for() -> None:
    assert all(m * n * k <= 20_480 for m, n, k in CHECK_SHAPES)
    for shapes in (CHECK_SHAPES, GPU_CHECK_SHAPES):
        assert len(set(shapes)) == len(shapes)
        assert all(k % BLOCK == 0 for _, _, k in shapes)
        assert {32, 96} <= {k for _, _, k in shapes}
        assert any(m == 1 < n for m, n, _ in shapes)
        assert any(n == 1 < m for m, n, _ in shapes)
    assert set(CHECK_SHAPES) < set(GPU_CHECK_SHAPES)
    for tile in (16, 32, 64, 128):
        assert any(m > tile and m % tile for m, _, _ in GPU_CHECK_SHAPES)
        assert any(n > tile and n % tile for _, n, _ in GPU_CHECK_SHAPES)
    assert sum(k % 256 != 0 for _, _, k in GPU_CHECK_SHAPES) > len(GPU_CHECK_SHAPES) // 2
    assert all(m * n <= 2**18 for m, n, _ in GPU_CHECK_SHAPES)  # `check` compares them in full
    assert len(BENCH_SHAPES) == 18
    assert (512, 4096, 4096) in BENCH_SHAPES
    assert (4096, 14336, 4096) in BENCH_SHAPES


# --- the exact case -------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [32, 96, 1024, 14336, 57344])
@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_integer_problems_are_exact_for_every_step(name: str, k: int) -> None:
    p = Problem(3, 5, k, name, "integer")
    by_recipe = [
        Q81.of_values(p.a, "codes"),
        Q81.of_values(p.a, "values"),
        Q81.of_blocks(FORMATS["q8_1"].quantize(p.a)),
        Q81.of_blocks(FORMATS["q8_1"].quantize(p.a, "values")),
    ]
    for q81 in by_recipe:  # d, s and all codes without rounding, s even in f16
        np.testing.assert_array_equal(q81.values(), p.a)
        np.testing.assert_array_equal(q81.s, p.a.reshape(3, -1, BLOCK).sum(axis=-1))
    product = unquantized(p.a, p.w)
    np.testing.assert_array_equal(same_operands_a16(p.a, p.blocks), product)
    np.testing.assert_array_equal(same_operands_a8(by_recipe[0], p.blocks), product)
    np.testing.assert_array_equal(product, product.astype(np.float32))
    # No order of summation can round: all partial sums are integers, in units, below 2^24.
    unit = 2.0**-7
    for size in (magnitude_a16(p.a, p.blocks), magnitude_a8(by_recipe[0], p.blocks)):
        assert size.max() / unit < EXACT_QUANTA
    np.testing.assert_array_equal(product, np.round(product / unit) * unit)
    assert np.count_nonzero(product) > product.size // 2
    # in f16, for the steps that multiply in it
    np.testing.assert_array_equal(p.w, p.w.astype(np.float16))
    np.testing.assert_array_equal(p.a, p.a.astype(np.float16))


@pytest.mark.parametrize("name", ["mxfp4", "iq4_nl"])
def test_products_of_formats_with_a_table_are_of_its_levels(name: str) -> None:
    rng = np.random.default_rng(0)
    blocks = quantize(rng.standard_normal((5, 96)).astype(np.float32), name)
    q81 = Q81.of_values(rng.standard_normal((3, 96)).astype(np.float32))
    exact = q81.values().astype(np.float64) @ dequantize(blocks).astype(np.float64).T
    np.testing.assert_allclose(same_operands_a8(q81, blocks), exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_integer_sums_are_exact_in_float32_in_any_order(name: str) -> None:
    p = Problem(4, 3, 1024, name, "integer", seed=1)
    terms = p.a[:, None, :] * p.w[None, :, :]  # float32
    rng = np.random.default_rng(0)
    want = unquantized(p.a, p.w)
    for _ in range(5):
        shuffled = terms[..., rng.permutation(p.k)]
        np.testing.assert_array_equal(np.cumsum(shuffled, axis=-1, dtype=np.float32)[..., -1], want)


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_integer_weights_cover_every_code_and_sign(name: str) -> None:
    p = Problem(1, 64, 256, name, "integer")
    fmt = FORMATS[name]
    codes = fmt.codes(p.blocks)
    low, high = {4: (0, 15), 5: (0, 31), 8: (-128, 127)}[fmt.bits]
    assert set(np.unique(codes)) == set(range(low, high + 1))
    by_block = codes.reshape(64, -1, BLOCK)
    assert (by_block.min(axis=-1) == low).all()
    assert (by_block.max(axis=-1) == high).all()
    scale = fmt.scale(p.blocks)
    assert (scale < 0).any() == (name in ("q4_0", "q5_0"))
    assert np.unique(np.abs(scale)).size == 2
    # packed by hand, read by the codec: value = scale * code + offset
    values = codes * np.repeat(scale, BLOCK, axis=1) + np.repeat(
        fmt.offset(p.blocks), BLOCK, axis=1
    )
    np.testing.assert_array_equal(values, dequantize(p.blocks))


# --- the golden block -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_golden_values(name: str) -> None:
    golden = GOLDEN[name]
    by_hand = {"q4_0": 141.0, "q4_1": 137.0, "q5_0": 342.0, "q5_1": 334.0, "q8_0": 2736.0}
    assert golden.value == by_hand[name]
    assert same_operands_a8(golden.q81, golden.blocks).tolist() == [[golden.value]]
    assert same_operands_a16(golden.a, golden.blocks).tolist() == [[golden.value]]
    p = Problem(1, 1, 32, name, "golden")
    np.testing.assert_array_equal(p.a, golden.a)
    assert p.blocks.tobytes() == golden.blocks.tobytes()
    np.testing.assert_array_equal(golden.q81.values(), golden.a)
    assert golden.gave(Q81.of_blocks(golden.q8_1))
    assert not golden.gave(Q81.of_values(golden.a))


def test_the_golden_block_as_the_story_tells_it() -> None:
    golden = GOLDEN["q4_0"]
    codes = FORMATS["q4_0"].codes(golden.blocks)[0]
    assert codes.tolist() == [0, *(code for code in range(1, 16) for _ in range(2)), 0]
    assert golden.q81.q[0].tolist() == list(range(-16, 16))
    assert int(codes @ golden.q81.q[0].astype(int)) == 1000
    assert (golden.q81.d[0, 0], golden.q81.s[0, 0]) == (0.5, -8.0)
    assert golden.q8_1.tobytes()[:4].hex() == "003800c8"


# --- products -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_products_agree_with_their_definition(name: str) -> None:
    """One element at a time, in exact integers and Python floats."""
    p = Problem(2, 3, 64, name, "normal", seed=9)
    q81 = Q81.of_values(p.a, "values")
    fmt = FORMATS[name]
    codes = fmt.codes(p.blocks).reshape(3, 2, BLOCK).tolist()
    scale, offset = fmt.scale(p.blocks).tolist(), fmt.offset(p.blocks).tolist()
    q = q81.q.reshape(2, 2, BLOCK).tolist()
    w = dequantize(p.blocks).tolist()
    for m in range(2):
        for n in range(3):
            a8 = a8_size = 0.0
            for b in range(2):
                dot = sum(x * y for x, y in zip(codes[n][b], q[m][b], strict=True))
                size = sum(abs(x * y) for x, y in zip(codes[n][b], q[m][b], strict=True))
                d, s = float(q81.d[m, b]), float(q81.s[m, b])
                a8 += scale[n][b] * d * dot + offset[n][b] * s
                a8_size += abs(scale[n][b] * d) * size + abs(offset[n][b] * s)
            a16 = sum(x * y for x, y in zip(p.a[m].tolist(), w[n], strict=True))
            assert same_operands_a8(q81, p.blocks)[m, n] == pytest.approx(a8, rel=1e-12)
            assert magnitude_a8(q81, p.blocks)[m, n] == pytest.approx(a8_size, rel=1e-12)
            assert same_operands_a16(p.a, p.blocks)[m, n] == pytest.approx(a16, rel=1e-12)
            assert magnitude_a16(p.a, p.blocks)[m, n] >= abs(a16)
            float_size = float(np.abs(p.a[m].astype(float) * w[n]).sum())
            assert magnitude_a16(p.a, p.blocks)[m, n] >= float_size * (1 - 1e-6)


@given(
    st.lists(
        st.floats(-1e3, 1e3, width=32).filter(lambda x: x == 0 or abs(x) > 1e-20),
        min_size=32,
        max_size=32,
    )
)
@settings(max_examples=200, deadline=None)
def test_q81_is_the_codec_with_wider_scales(values: list[float]) -> None:
    a = np.array([values], dtype=np.float32)
    for s in ("codes", "values"):
        wide, narrow = Q81.of_values(a, s), Q81.of_blocks(FORMATS["q8_1"].quantize(a, s))
        np.testing.assert_array_equal(wide.q, narrow.q)
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(wide.d.astype(np.float16), narrow.d)
            np.testing.assert_allclose(wide.s, narrow.s, rtol=2e-3, atol=0.1)
    assert np.abs(wide.values() - a).max() <= 0.5 * wide.d[0, 0] * (1 + 1e-4)


def test_q81_refuses_what_it_is_not() -> None:
    q, d = np.zeros((2, 64), np.int8), np.zeros((2, 2), np.float32)
    Q81(q, d, d)
    with pytest.raises(TypeError, match=r"Q81\.q must be a int8 array, got int32"):
        Q81(q.astype(np.int32), d, d)
    with pytest.raises(TypeError, match=r"Q81\.s must be a float32 array, got float16"):
        Q81(q, d, d.astype(np.float16))
    with pytest.raises(ValueError, match=r"\(2, 2\), got \(2, 2\) and \(2, 1\)"):
        Q81(q, d, d[:, :1])
    with pytest.raises(ValueError, match="K % 32 == 0"):
        Q81(q[:, :33], d, d)
    with pytest.raises(ValueError, match="'sum'"):
        Q81.of_values(np.zeros((1, 32), np.float32), "sum")


@pytest.mark.parametrize("kind", [Q81, Halves, Bfloats, Tokens])
def test_recipes_refuse_what_is_no_matrix(kind: type[Q81 | Halves | Bfloats | Tokens]) -> None:
    for shape in ((64,), (0, 64), (1, 2, 64)):
        with pytest.raises(ValueError, match=re.escape(f"== 0, got {list(shape)}")):
            kind.of_values(np.zeros(shape, np.float32))
    if kind is Q81:
        with pytest.raises(ValueError, match=r"K % 32 == 0, got \[2, 48\]"):
            kind.of_values(np.zeros((2, 48), np.float32))


def test_products_refuse_operands_of_different_k() -> None:
    blocks = Problem(1, 4, 96, "q4_0").blocks
    both = r"\[M, K\] and the blocks \[N, K/32\] with the same K, got \[1, 64\] and \[4, 3\]"
    a = np.zeros((1, 64), np.float32)
    with pytest.raises(ValueError, match=both):
        same_operands_a16(a, blocks)
    with pytest.raises(ValueError, match=both):
        same_operands_a8(Q81.of_values(a), blocks)
    with pytest.raises(ValueError, match=r"got \[64\] and \[4, 3\]"):
        same_operands_a16(a[0], blocks)
    for w in (np.zeros((4, 96), np.float32), np.zeros(64, np.float32)):
        with pytest.raises(ValueError, match=r"w \[N, K\] with the same K, got \[1, 64\] and"):
            unquantized(a, w)


@given(st.integers(1, 20_000), st.integers(1, 20_000), st.integers(1, 2**18))
@settings(max_examples=200, deadline=None)
def test_samples_hold_the_edges_and_stay_small(m: int, n: int, limit: int) -> None:
    for picked, size in zip(sample(m, n, limit), (m, n), strict=True):
        assert (np.diff(picked) > 0).all()
        assert {0, size - 1} <= set(picked.tolist())
        assert picked.dtype == np.int64
        assert set(picked.tolist()) <= set(range(size))
        if picked.size < size:
            for tile in (16, 32, 64, 128):
                last = (size - 1) // tile * tile
                assert {last, max(0, last - 1)} <= set(picked.tolist())
    rows, columns = sample(m, n, limit)
    assert rows.size * columns.size <= max(limit, 22 * 22, 22 * limit // max(1, min(m, n)))


def test_samples_are_everything_when_that_is_little() -> None:
    rows, columns = sample(100, 60, 6000)
    assert (rows.size, columns.size) == (100, 60)
    assert sample(4096, 4096)[0].size * sample(4096, 4096)[1].size <= 2**18
    np.testing.assert_array_equal(sample(4096, 999)[0], sample(4096, 999)[0])
    with pytest.raises(ValueError, match="got 0, 5, 10"):
        sample(0, 5, 10)


# --- the figures of the field ---------------------------------------------------------------------

FIGURES = {
    "uniform": dict(zip(WEIGHT_FORMATS, (4.2e-3, 3.7e-3, 9.7e-4, 8.6e-4, 1.4e-5), strict=True)),
    "normal": dict(zip(WEIGHT_FORMATS, (7.4e-3, 6.1e-3, 1.8e-3, 1.4e-3, 2.9e-5), strict=True)),
}


@pytest.mark.parametrize("distribution", ["uniform", "normal"])
@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_quantization_error_of_each_format(name: str, distribution: str) -> None:
    """The published figures have two digits: 2.5 % for their rounding, the rest is sampling.

    Sampling: 2^19 weights, deviation 0.3 %; 64 x 512 outputs, deviation 2 / sqrt(2^15) = 1.1 %.
    """
    p = Problem(64, 512, 1024, name, distribution)
    figure = FIGURES[distribution][name]
    assert nmse(dequantize(p.blocks), p.w) == pytest.approx(figure, rel=0.025 + 0.015)
    product = nmse(same_operands_a16(p.a, p.blocks), unquantized(p.a, p.w))
    assert product == pytest.approx(figure, rel=0.025 + 0.045)


def test_the_simpler_q4_0_recipe_is_another_one() -> None:
    """d = amax / 7, as the classical report has it: 4.66e-3, 10 % from ggml's and told apart."""
    w = Problem(1, 512, 1024, "q4_0", "uniform").w
    ggml = nmse(dequantize(quantize(w, "q4_0")), w)
    simpler = nmse(amax_over_7(w), w)
    assert ggml == pytest.approx(4.227e-3, rel=0.015)
    assert simpler == pytest.approx(4.66e-3, rel=0.015)


def amax_over_7(w: np.ndarray) -> np.ndarray:
    x = w.reshape(w.shape[0], -1, BLOCK)
    d = np.abs(x).max(axis=-1, keepdims=True) / np.float32(7)
    return (
        (np.clip(np.round(x / d), -8, 7) * d.astype(np.float16)).astype(np.float32).reshape(w.shape)
    )


@pytest.mark.parametrize(
    ("distribution", "codes", "values"),
    [
        ("uniform", 1.4e-5, 5.2e-5),
        ("normal", 2.9e-5, 1.75e-4),
    ],
)
def test_activation_error_and_the_two_sums(distribution: str, codes: float, values: float) -> None:
    """Q8_1 adds 1.4e-5 / 2.9e-5 with s = d * sum(q), 4-6 times that with llama.cpp's sum of x."""
    p = Problem(64, 512, 1024, "q4_1", distribution)
    exact = same_operands_a16(p.a, p.blocks)
    errors = [
        nmse(same_operands_a8(Q81.of_values(p.a, s), p.blocks), exact) for s in ("codes", "values")
    ]
    assert errors == [pytest.approx(codes, rel=0.1), pytest.approx(values, rel=0.2)]
    assert errors[0] < 5e-5
    assert 3 < errors[1] / errors[0] < 7


def test_distributions_are_all_tested_here() -> None:
    assert {*RANDOM, "integer", "golden"} == set(DISTRIBUTIONS)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_spoils_its_own_block_or_token(bad: float) -> None:
    """Its d is NaN or infinite and its codes are 0; nothing warns."""
    a = np.ones((2, 96), np.float32)
    a[1, 40] = bad
    q81, tokens = Q81.of_values(a), Tokens.of_values(a)
    assert np.isfinite(q81.d).tolist() == [[True, True, True], [True, False, True]]
    assert np.isnan(q81.s[1, 1])
    assert np.isfinite(tokens.d).tolist() == [True, False]
    assert not q81.q[1, 32:64].any()
    assert not tokens.q[1].any()
    assert (q81.q[0] == 127).all()


def test_a_scale_without_an_inverse_has_codes_of_zero() -> None:
    assert not Q81.of_values(np.full((1, 32), 1e-38, np.float32) * np.float32(1e-3)).q.any()
