"""Problems are reproducible and what they say they are; operands and products are right."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qformats import BLOCK, FILE_FORMATS, FORMATS, WEIGHT_FORMATS, dequantize
from reference import (
    BENCH_SHAPES,
    CHECK_SHAPES,
    GOLDEN,
    GPU_CHECK_SHAPES,
    Q81,
    Bfloats,
    Halves,
    Problem,
    Tokens,
    bfloat16_bits,
    bfloat16_values,
    same_operands,
    sample,
    unquantized,
)
from reference.bfloat16 import rounded_to_bfloat16
from reference.exact import EXACT_QUANTA
from reference.operands import Operands
from reference.problem import OUTLIER_FACTOR

# --- problems -------------------------------------------------------------------------------------


@pytest.mark.parametrize("distribution", ["uniform", "normal", "llm", "integer", "extreme"])
@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_a_problem_is_its_parameters(name: str, distribution: str) -> None:
    one, two = (Problem(3, 5, 96, name, distribution, seed=4) for _ in range(2))
    assert one == two
    assert (one.a.shape, one.w.shape, one.blocks.shape) == ((3, 96), (5, 96), (5, 3))
    assert one.a.dtype == one.w.dtype == np.float32
    assert one.blocks.dtype == FORMATS[name].dtype
    np.testing.assert_array_equal(one.a, two.a)
    assert one.blocks.tobytes() == two.blocks.tobytes()
    assert not one.a.flags.writeable
    assert not one.blocks.flags.writeable


def test_every_parameter_changes_the_numbers() -> None:
    base = 4, 6, 64, "q4_0", "normal", 0
    first = Problem(*base)
    for i, value in enumerate((5, 7, 96, "q4_1", "llm", 1)):
        other = Problem(*base[:i], value, *base[i + 1 :])
        assert not np.isin(first.a[0, :4], other.a[0, :4]).any(), other
        assert not np.isin(first.w[0, :4], other.w[0, :4]).any(), other
    assert not np.isin(first.a[0, :4], first.w[0, :4]).any()


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
        ((1, 1, 32, "q4_0", "normal", 0, "f16"), ValueError, "'f16': use one of float32, float16"),
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
    assert deviation[p.outlier_channels].min() > OUTLIER_FACTOR / 2
    assert np.delete(deviation, p.outlier_channels).max() < 2
    assert p.w.std(axis=0).max() < 2.5


def test_a_comes_in_three_dtypes() -> None:
    wide = Problem(5, 2, 64, "q4_0", "llm")
    half, brief = (Problem(5, 2, 64, "q4_0", "llm", input=i) for i in ("float16", "bfloat16"))
    assert (wide.given.dtype, half.given.dtype, brief.given.dtype) == ("f4", "f2", "u2")
    np.testing.assert_array_equal(half.a, wide.a.astype(np.float16), strict=True)
    np.testing.assert_array_equal(brief.a, rounded_to_bfloat16(wide.a), strict=True)
    np.testing.assert_array_equal(bfloat16_values(brief.given), brief.a)
    for problem in (wide, half, brief):
        np.testing.assert_array_equal(problem.blocks, wide.blocks)
        assert not problem.a.flags.writeable


def test_shape_lists_cover_what_they_are_for() -> None:
    assert all(m * n * k <= 20_480 for m, n, k in CHECK_SHAPES), "what a simulator can afford"
    assert set(CHECK_SHAPES) < set(GPU_CHECK_SHAPES)
    for shapes in (CHECK_SHAPES, GPU_CHECK_SHAPES):
        assert any(m == 1 < n for m, n, _ in shapes)
        assert any(n == 1 < m for m, n, _ in shapes)
    for tile in (16, 32, 64, 128):
        assert any(m > tile and m % tile for m, _, _ in GPU_CHECK_SHAPES)
        assert any(n > tile and n % tile for _, n, _ in GPU_CHECK_SHAPES)
    assert all(m * n <= 2**18 for m, n, _ in GPU_CHECK_SHAPES), "`check` compares them in full"
    assert {(512, 4096, 4096), (4096, 14336, 4096)} < set(BENCH_SHAPES)


# --- the exact case, and the golden one -----------------------------------------------------------


@pytest.mark.parametrize("k", [32, 96, 1024, 14336, 57344])
@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_integer_problems_are_exact_for_every_step(name: str, k: int) -> None:
    p = Problem(3, 5, k, name, "integer")
    by_recipe = [
        Q81.of_values(p.a),
        Q81.of_blocks(FORMATS["q8_1"].quantize(p.a)),
        Q81.of_blocks(FORMATS["q8_1"].quantize(p.a, "values")),
    ]
    for q81 in by_recipe:  # d, s and all codes without rounding, s even in f16
        np.testing.assert_array_equal(q81.values(), p.a)
        np.testing.assert_array_equal(q81.s, p.a.reshape(3, -1, BLOCK).sum(axis=-1))
    product = unquantized(p.a, p.w)
    np.testing.assert_array_equal(same_operands(p.a, p.blocks)[0], product)
    np.testing.assert_array_equal(same_operands(by_recipe[0], p.blocks)[0], product)
    np.testing.assert_array_equal(product, product.astype(np.float32))
    # No order of summation can round: all partial sums are integers, in units, below 2^24.
    unit = 2.0**-7
    for size in (same_operands(p.a, p.blocks)[1], same_operands(by_recipe[0], p.blocks)[1]):
        assert size.max() / unit < EXACT_QUANTA
    np.testing.assert_array_equal(product, np.round(product / unit) * unit)
    assert np.count_nonzero(product) > product.size // 2
    np.testing.assert_array_equal(p.w, p.w.astype(np.float16))  # for steps that multiply in it


@pytest.mark.parametrize("name", [*WEIGHT_FORMATS, *FILE_FORMATS])
def test_integers_are_exact_in_all_dtypes_of_a(name: str) -> None:
    a = Problem(3, 1, 512, name, "integer").a
    for dtype in ("float16", "bfloat16"):
        np.testing.assert_array_equal(Problem(3, 1, 512, name, "integer", input=dtype).a, a)


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_integer_weights_cover_every_code_and_sign(name: str) -> None:
    p = Problem(1, 64, 256, name, "integer")
    fmt = FORMATS[name]
    codes = fmt.codes(p.blocks).reshape(64, -1, BLOCK)
    low, high = {4: (0, 15), 5: (0, 31), 8: (-128, 127)}[fmt.bits]
    assert set(np.unique(codes)) == set(range(low, high + 1))
    assert (codes.min(axis=-1) == low).all()
    assert (codes.max(axis=-1) == high).all()
    scale = fmt.scale(p.blocks)
    assert (scale < 0).any() == (name in ("q4_0", "q5_0"))
    assert np.unique(np.abs(scale)).size == 2


@pytest.mark.parametrize("name", [*WEIGHT_FORMATS, *FILE_FORMATS])
def test_an_extreme_problem_has_nothing_but_the_largest_numbers(name: str) -> None:
    """Rows with the largest sums of either sign; exact, and no float16 C overflows."""
    fmt = FORMATS[name]
    p = Problem(4, 4, 256, name, "extreme")
    levels = fmt.levels(p.blocks).reshape(4, -1)
    ends = {levels.min(), levels.max()}
    drawn = Problem(9, 64, 256, name, "integer").blocks
    assert ends == {fmt.levels(drawn).min(), fmt.levels(drawn).max()}
    assert {*np.unique(levels)} == ends
    assert len(np.unique(levels[:2])) == 2, "a row of each"
    q81 = Q81.of_values(p.a)
    np.testing.assert_array_equal(q81.values(), p.a)
    assert set(np.unique(q81.q)) == {-127, 127}
    assert {127 * 256, -127 * 256} <= set(q81.q.sum(axis=1, dtype=int))
    np.testing.assert_array_equal(q81.s.astype(np.float16), q81.s)
    assert p.exact
    assert not Problem(4, 4, 2**18, name, "extreme").exact, "sums beyond 24 bits"
    deep = Problem(1, 1, 2**17, name, "extreme")
    assert np.abs(deep.a.astype(np.float64) @ deep.w.T.astype(np.float64)).max() < 65504


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_golden_values(name: str) -> None:
    golden = GOLDEN[name]
    assert same_operands(golden.q81, golden.blocks)[0].tolist() == [[golden.value]]
    assert same_operands(golden.a, golden.blocks)[0].tolist() == [[golden.value]]
    p = Problem(1, 1, 32, name, "golden")
    np.testing.assert_array_equal(p.a, golden.a)
    assert p.blocks.tobytes() == golden.blocks.tobytes()
    np.testing.assert_array_equal(golden.q81.values(), golden.a)
    assert golden.gave(golden.q81)
    assert not golden.gave(Q81.of_values(golden.a))


# --- products -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_products_agree_with_their_definition(name: str) -> None:
    """One element at a time, in exact integers and Python floats."""
    p = Problem(2, 3, 64, name, "normal", seed=9)
    q81 = Q81.of_values(p.a)
    fmt = FORMATS[name]
    codes = fmt.codes(p.blocks).reshape(3, 2, BLOCK).tolist()
    scale, offset = fmt.scale(p.blocks).tolist(), fmt.offset(p.blocks).tolist()
    q = q81.q.reshape(2, 2, BLOCK).tolist()
    w = dequantize(p.blocks).tolist()
    for m, n in np.ndindex(2, 3):
        a8 = a8_size = 0.0
        for b in range(2):
            products = [x * y for x, y in zip(codes[n][b], q[m][b], strict=True)]
            d, s = float(q81.d[m, b]), float(q81.s[m, b])
            a8 += scale[n][b] * d * sum(products) + offset[n][b] * s
            a8_size += abs(scale[n][b] * d) * sum(map(abs, products)) + abs(offset[n][b] * s)
        terms = [x * y for x, y in zip(p.a[m].tolist(), w[n], strict=True)]
        assert same_operands(q81, p.blocks)[0][m, n] == pytest.approx(a8, rel=1e-12)
        assert same_operands(q81, p.blocks)[1][m, n] == pytest.approx(a8_size, rel=1e-12)
        assert same_operands(p.a, p.blocks)[0][m, n] == pytest.approx(sum(terms), rel=1e-12)
        assert same_operands(p.a, p.blocks)[1][m, n] >= sum(map(abs, terms)) * (1 - 1e-6)


def test_kernels_may_centre_codes() -> None:
    """All codes are 0, and -16 once they are centred: then half a block is a float by itself."""
    blocks = FORMATS["q5_0"].quantize(np.full((1, BLOCK), -0.125, np.float32))
    assert not FORMATS["q5_0"].codes(blocks).any()
    q81 = Q81.of_values(Problem(1, 1, BLOCK, "q5_0", "normal").a)
    assert same_operands(q81, blocks)[1] == 0.125 * np.abs(q81.values()).sum()


@pytest.mark.parametrize("name", [name for name in FORMATS if FORMATS[name].codebook])
def test_products_of_formats_with_a_table_are_of_its_levels(name: str) -> None:
    problem = Problem(3, 5, 256, name, "normal")
    q81, w = Q81.of_values(problem.a), dequantize(problem.blocks).astype(np.float64)
    a = q81.values().astype(np.float64)
    lost = {"iq4_xs": 2.0**-11}.get(name, 1e-12)  # its scales are stored rounded to 11 bits
    off = np.abs(same_operands(q81, problem.blocks)[0] - a @ w.T)
    assert (off <= lost * (np.abs(a) @ np.abs(w).T)).all()


def test_products_refuse_operands_of_different_k() -> None:
    blocks = Problem(1, 4, 96, "q4_0").blocks
    both = r"\[M, K\] and the blocks \[N, K/32\] with the same K, got \[1, 64\] and \[4, 3\]"
    a = np.zeros((1, 64), np.float32)
    with pytest.raises(ValueError, match=both):
        same_operands(a, blocks)[0]
    with pytest.raises(ValueError, match=both):
        same_operands(Q81.of_values(a), blocks)[0]
    with pytest.raises(ValueError, match=r"got \[64\] and \[4, 3\]"):
        same_operands(a[0], blocks)[0]
    for w in (np.zeros((4, 96), np.float32), np.zeros(64, np.float32)):
        with pytest.raises(ValueError, match=r"w \[N, K\] with the same K, got \[1, 64\] and"):
            unquantized(a, w)


# --- operands -------------------------------------------------------------------------------------


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
    wide, narrow = Q81.of_values(a), Q81.of_blocks(FORMATS["q8_1"].quantize(a))
    np.testing.assert_array_equal(wide.q, narrow.q)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(wide.d.astype(np.float16), narrow.d)
        np.testing.assert_allclose(wide.s, narrow.s, rtol=2e-3, atol=0.1)
    assert np.abs(wide.values() - a).max() <= 0.5 * wide.d[0, 0] * (1 + 1e-4)


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
    no_inverse = np.full((1, 32), 1e-38, np.float32) * np.float32(1e-3)
    assert not Q81.of_values(no_inverse).q.any()


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30, 2.0**-140])
def test_halves_keep_eleven_bits_of_the_largest(scale: float) -> None:
    a = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)
    a[1] = 0
    a *= np.float32(scale)
    halves = Halves.of_values(a)
    largest = np.abs(a.astype(np.float64)).max(axis=1)
    h = np.abs(halves.h.astype(np.float64)).max(axis=1)
    least = 2.0**-38 * largest[:, None] + 2.0**-151
    assert (np.abs(halves.values() - a) <= np.maximum(2.0**-11 * np.abs(a), least)).all()
    if scale > 1e-32:
        assert ((h >= 2.0**14) & (h <= 2.0**15))[largest > 0].all()
    assert (np.frexp(halves.factor)[0] == 0.5).all(), "powers of two"


Q, D = np.zeros((2, 64), np.int8), np.zeros((2, 2), np.float32)
MISFITS = {
    "q of 32 bits": (Q81, (Q.astype(np.int32), D, D), TypeError, "Q81.q must be a int8 array, got"),
    "s of 16": (Q81, (Q, D, D.astype(np.float16)), TypeError, "Q81.s must be a float32 array, got"),
    "a list": (Tokens, ([[0]], D[:, 0]), TypeError, "Tokens.q must be a int8 array, got list"),
    "s short": (Q81, (Q, D, D[:, :1]), ValueError, "need scales of [2, 2], got [2, 2] and [2, 1]"),
    "K": (Q81, (Q[:, :33], D, D), ValueError, "K % 32 == 0, got [2, 33]"),
    "scales": (Tokens, (Q, D), ValueError, "Tokens of [2, 64] need scales of [2], got [2, 2]"),
    "one token": (Bfloats, (D[0],), ValueError, "Bfloats need [M, K] with K % 1 == 0, got [2]"),
    "bits": (Bfloats, (bfloat16_bits(D),), TypeError, "Bfloats.b must be a float32 array, got"),
    "no bfloat16": (Bfloats, (D + np.float32(0.1),), ValueError, "numbers that bfloat16 has not"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_operands_refuse_what_they_are_not(case: str) -> None:
    kind, arrays, error, says = MISFITS[case]
    with pytest.raises(error, match=re.escape(says)):
        kind(*arrays)


@pytest.mark.parametrize("kind", [Q81, Halves, Bfloats, Tokens])
def test_recipes_refuse_what_is_no_matrix(kind: type[Operands]) -> None:
    for shape in ((64,), (0, 64), (1, 2, 64)):
        with pytest.raises(ValueError, match=re.escape(f"== 0, got {list(shape)}")):
            kind.of_values(np.zeros(shape, np.float32))
    if kind is Q81:
        with pytest.raises(ValueError, match=r"K % 32 == 0, got \[2, 48\]"):
            kind.of_values(np.zeros((2, 48), np.float32))


# --- bfloat16 -------------------------------------------------------------------------------------


def test_all_numbers_of_bfloat16_stay_what_they_are() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = bfloat16_values(bits)
    again = bfloat16_bits(values)
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(again[numbers], bits[numbers])
    assert np.isnan(bfloat16_values(again[~numbers])).all()


def test_rounding_to_bfloat16() -> None:
    right = {
        1.0: 0x3F80,
        -2.0: 0xC000,
        1 + 2**-8: 0x3F80,  # half way: to even
        1 + 3 * 2**-8: 0x3F82,
        1 + 2**-8 + 2**-20: 0x3F81,
        2.0**-133: 1,  # the smallest
        2.0**-134: 0,
        3.5e38: 0x7F80,
        3.39e38: 0x7F7F,
        np.inf: 0x7F80,
        -0.0: 0x8000,
    }
    assert bfloat16_bits(np.float64(list(right))).tolist() == list(right.values())
    x = np.random.default_rng(0).integers(0, 1 << 32, 4096, np.uint32).view(np.float32)
    x = x[np.isfinite(x) & (np.abs(x) < 3e38)]
    around = [
        bfloat16_values((x.view(np.uint32) + up >> 16).astype(np.uint16)) for up in (0, 1 << 16)
    ]
    nearest = np.min([np.abs(each.astype(np.float64) - x) for each in around], axis=0)
    np.testing.assert_array_equal(np.abs(rounded_to_bfloat16(x).astype(np.float64) - x), nearest)


# --- samples --------------------------------------------------------------------------------------


@given(st.integers(1, 20_000), st.integers(1, 20_000), st.integers(1, 2**18))
@settings(max_examples=200, deadline=None)
def test_samples_hold_the_edges_and_stay_small(m: int, n: int, limit: int) -> None:
    for picked, size in zip(sample(m, n, limit), (m, n), strict=True):
        assert (np.diff(picked) > 0).all()
        assert {0, size - 1} <= set(picked.tolist()) <= set(range(size))
        assert picked.dtype == np.int64
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
