"""bfloat16: its numbers, A in it, and the verdict on products of it."""

from __future__ import annotations

import numpy as np
import pytest

from qformats import FILE_FORMATS, WEIGHT_FORMATS, dequantize
from reference import Bfloats, Problem, bfloat16_bits, bfloat16_values, check
from reference.bfloat16 import rounded_to_bfloat16
from reference.recipes import check_rounded


def test_all_numbers_of_bfloat16_stay_what_they_are() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = bfloat16_values(bits)
    assert values.dtype == np.float32
    again = bfloat16_bits(values)
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(again[numbers], bits[numbers])
    assert np.isnan(bfloat16_values(again[~numbers])).all()


@pytest.mark.parametrize(
    ("x", "bits"),
    [
        (1.0, 0x3F80),
        (-2.0, 0xC000),
        (1 + 2**-8, 0x3F80),  # half way: to even
        (1 + 3 * 2**-8, 0x3F82),
        (1 + 2**-8 + 2**-20, 0x3F81),
        (255.5, 0x4380),
        (2.0**-133, 1),  # the smallest
        (2.0**-134, 0),
        (3.5e38, 0x7F80),
        (3.39e38, 0x7F7F),
        (np.inf, 0x7F80),
        (-0.0, 0x8000),
    ],
)
def test_rounding(x: float, bits: int) -> None:
    with np.errstate(over="ignore"):
        assert bfloat16_bits(np.float64([x]))[0] == bits


def test_rounding_is_to_the_nearest() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 4096, np.uint32)
    x = bits.view(np.float32)
    x = x[np.isfinite(x) & (np.abs(x) < 3e38)].astype(np.float64)
    got = rounded_to_bfloat16(x)
    below = bfloat16_values((x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16))
    above = bfloat16_values((x.astype(np.float32).view(np.uint32) + 65536 >> 16).astype(np.uint16))
    nearest = np.minimum(np.abs(below - x), np.abs(above - x))
    np.testing.assert_array_equal(np.abs(got - x), nearest)


# --- A ---


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
    with pytest.raises(ValueError, match="unknown input 'f16': use one of float32, float16, bfl"):
        Problem(1, 1, 32, "q4_0", input="f16")


@pytest.mark.parametrize("name", [*WEIGHT_FORMATS, *FILE_FORMATS])
def test_integers_are_exact_in_all_of_them(name: str) -> None:
    a = Problem(3, 1, 512, name, "integer").a
    for dtype in ("float16", "bfloat16"):
        np.testing.assert_array_equal(Problem(3, 1, 512, name, "integer", input=dtype).a, a)


def test_bfloats_are_made_of_what_bfloat16_has() -> None:
    a = np.random.default_rng(0).standard_normal((3, 32)).astype(np.float32)
    right = Bfloats.of_values(a)
    np.testing.assert_array_equal(right.values(), rounded_to_bfloat16(a).astype(np.float64))
    np.testing.assert_array_equal(right.rows(slice(1, 2)).b, right.b[1:2])
    with pytest.raises(TypeError, match=r"Bfloats\.b must be a float32 array, got uint16"):
        Bfloats(bfloat16_bits(a))
    with pytest.raises(ValueError, match=r"need b \[M, K\], got \(32,\)"):
        Bfloats(right.b[0])
    with pytest.raises(ValueError, match="numbers that bfloat16 has not"):
        Bfloats(a)
    wrong = right.b.copy()
    wrong[2, 7] *= 2
    assert check_rounded(right, a) is None
    assert "bfloat16 activations (b) differ" in (check_rounded(Bfloats(wrong), a) or "")
    assert "first at (2, 7)" in (check_rounded(Bfloats(wrong), a) or "")


# --- the verdict ---


@pytest.mark.parametrize("distribution", ["normal", "uniform", "llm", "integer"])
@pytest.mark.parametrize("output", ["float32", "bfloat16"])
def test_products_are_judged_as_they_were_given(distribution: str, output: str) -> None:
    """Weights are rounded to float16 and then to bfloat16, and C may be."""

    def written(c: np.ndarray) -> np.ndarray:
        c = c.astype(np.float32)
        return bfloat16_bits(c) if output == "bfloat16" else c

    for name in WEIGHT_FORMATS:
        problem = Problem(32, 48, 256, name, distribution, input="bfloat16")
        bfloats = Bfloats.of_values(problem.a)
        halves = dequantize(problem.blocks).astype(np.float16)
        c = bfloats.values() @ rounded_to_bfloat16(halves).astype(np.float64).T
        verdict = check(written(c), problem, "A16", bfloats)
        assert verdict, verdict.verdict
        assert verdict.nmse_same_operands < 1e-5
        off = 1.02 if output == "bfloat16" else 1.01
        assert "nmse" in check(written(c * off), problem, "A16", bfloats).failures
        c[5, 7] += 0.2 * np.abs(c).max()
        assert "bound" in check(written(c), problem, "A16", bfloats).failures
        if distribution == "integer":
            one = written(bfloats.values() @ dequantize(problem.blocks).astype(np.float64).T)
            assert check(one, problem, "A16", bfloats).ok
            if output == "bfloat16":
                one[5, 7] += 1
            else:
                one[5, 7] = np.nextafter(one[5, 7], np.float32(np.inf))
            assert check(one, problem, "A16", bfloats).failures == ("exact",)


def test_what_is_no_number_is_found_in_bfloat16() -> None:
    problem = Problem(3, 4, 64, "q4_0", "integer", input="bfloat16")
    bfloats = Bfloats.of_values(problem.a)
    c = bfloat16_bits(bfloats.values() @ dequantize(problem.blocks).astype(np.float64).T)
    assert check(c, problem, "A16", bfloats).ok
    for bits in (0x7FC0, 0x7F80, 0xFF80):
        wrong = c.copy()
        wrong[1, 2] = bits
        assert "nan" in check(wrong, problem, "A16", bfloats).failures
    with pytest.raises(ValueError, match=r"bfloat16 activations must be \[M, K\] = \(3, 64\)"):
        check(c, problem, "A16", Bfloats.of_values(problem.a[:, :32]))
