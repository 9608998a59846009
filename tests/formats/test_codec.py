"""The codecs against llama.cpp's own `gguf` package, and bad input.

What only the formats of files have (tables, K-quants) is in `test_file_formats`.
"""

from __future__ import annotations

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize
from gguf.quants import quantize as gguf_quantize

from qformats import (
    FILE_FORMATS,
    FORMATS,
    WEIGHT_FORMATS,
    dequantize,
    format_named,
    format_of,
    quantize,
)
from qformats.codec import _truncated
from qformats.format import RUN

BLOCKS = 14_000  # of each distribution and format: with nine distributions, above 10^5 a format
# The largest |x| whose scale still rounds to float16's 65504; 65520 is half-way to the next.
LARGEST = {"q4_0": 8 * 65519.0, "q4_1": 65519.0, "q5_0": 16 * 65519.0, "q5_1": 65519.0}
LARGEST |= {"q8_0": 127 * 65519.0, "q8_1": 65519.0 / 33}  # q8_1: s adds up 32 codes

LARGEST |= {"mxfp4": 3.4e38, "iq4_nl": 113 * 65519.0}

LINEAR = (*WEIGHT_FORMATS, "q8_1")
WRITTEN = [name for name, fmt in FORMATS.items() if fmt.written]
name_of_written = pytest.mark.parametrize("name", WRITTEN)


def normal(rng, n, name):
    return rng.standard_normal((n, 32))


def uniform(rng, n, name):
    return rng.uniform(-1, 1, (n, 32))


def heavy_tailed(rng, n, name):
    x = rng.standard_t(1.5, (n, 32))
    x[rng.random((n, 32)) < 0.01] *= 50
    return x.clip(-1500, 1500)


def constant(rng, n, name):
    return np.repeat(rng.standard_normal((n, 1)), 32, axis=1)


def all_zero(rng, n, name):
    return np.zeros((n, 32))


def denormal_sized(rng, n, name):
    """From where d is a float16 subnormal down to where x is a float32 subnormal and 1/d inf."""
    exponent = np.concatenate([rng.integers(-149, -118, n // 2), rng.integers(-40, -8, n - n // 2)])
    return rng.standard_normal((n, 32)) * 2.0 ** exponent[:, None]


def exact_ties(rng, n, name):
    """Multiples of d/2: each value lies on a code or half-way between two; extremes tie too."""
    top = {4: 8, 5: 16, 8: 127}[FORMATS[name].bits]
    x = rng.integers(-2 * top, 2 * top + 1, (n, 32)) / 2
    x[: n // 2, 9], x[: n // 2, 20] = top, -top + (name[3] == "1")
    return x * 2.0 ** rng.integers(-12, 3, (n, 1))


def near_ties(rng, n, name):
    """Within an ulp or two of half-way for an arbitrary d: x * (1/d), x / d and FMA differ here."""
    top = {4: 8, 5: 16, 8: 127}[FORMATS[name].bits]
    d = rng.uniform(0.01, 0.02, (n, 1)).astype(np.float32)
    x = (rng.integers(-top, top, (n, 32)) + np.float32(0.5)) * d
    x *= 1 + rng.integers(-2, 3, (n, 32)) * np.float32(2.0**-23)
    x[:, :1] = -top * d  # the extremes give d back
    if name[3] == "1":
        x[:, 1:2] = (top - 1) * d
    return x


def huge(rng, n, name):
    """Scales all the way up to float16's limit."""
    return rng.uniform(-1, 1, (n, 32)) * LARGEST[name] * rng.choice([1, 0.9, 0.1], (n, 1))


DISTRIBUTIONS = [
    normal,
    uniform,
    heavy_tailed,
    constant,
    all_zero,
    denormal_sized,
    exact_ties,
    near_ties,
    huge,
]
every_distribution = pytest.mark.parametrize(
    "draw", DISTRIBUTIONS, ids=[draw.__name__ for draw in DISTRIBUTIONS]
)


def data(draw, name, n=BLOCKS):
    """float32[n, 32], the same on each run. Zeros are all +0: gguf's min and argmax disagree with
    ggml's scans where zeros of both signs meet (`test_golden_bytes` has those)."""
    seed = DISTRIBUTIONS.index(draw) * 10 + list(FORMATS).index(name)
    return draw(np.random.default_rng(seed), n, name).astype(np.float32) + np.float32(0)


def kind(name):
    return GGMLQuantizationType[name.upper()]


def as_bytes(blocks):
    return blocks.view(np.uint8).reshape(len(blocks), -1)


# --- bit-exactness ---


@every_distribution
@pytest.mark.parametrize("name", [*WEIGHT_FORMATS, "mxfp4"])
def test_bit_exact_to_gguf(name, draw):
    x = data(draw, name)
    if name == "mxfp4":  # below 2^-125 its exponent is left open by C, and by gguf to NumPy's cast
        largest = np.abs(x).max(axis=1)
        x = np.ascontiguousarray(x[(largest == 0) | (largest >= 2.0**-125)])
    with np.errstate(all="ignore"):  # 1/d overflows in gguf too
        theirs = gguf_quantize(x, kind(name))
        back = gguf_dequantize(theirs, kind(name))
    blocks = FORMATS[name].quantize(x)
    differing = np.flatnonzero((as_bytes(blocks) != theirs).any(axis=1))
    assert differing.size == 0, f"{differing.size} blocks differ, the first is {differing[0]}"
    np.testing.assert_array_equal(
        FORMATS[name].dequantize(blocks).view(np.uint32), back.view(np.uint32)
    )


@every_distribution
def test_q8_1_against_its_parts(draw):
    """d and qs are gguf's Q8_0; s is recomputed from the codes and the unrounded d."""
    x = data(draw, "q8_1")
    with np.errstate(all="ignore"):
        theirs = gguf_quantize(x, GGMLQuantizationType.Q8_0)
    blocks = FORMATS["q8_1"].quantize(x)[:, 0]
    np.testing.assert_array_equal(as_bytes(blocks)[:, :2], theirs[:, :2])
    np.testing.assert_array_equal(as_bytes(blocks)[:, 4:], theirs[:, 2:])
    codes = theirs[:, 2:].view(np.int8).astype(np.int64)
    d = np.abs(x).max(axis=1) / np.float32(127)
    s = (codes.sum(axis=1).astype(np.float32) * d).astype(np.float16)
    np.testing.assert_array_equal(blocks["s"], s)


def test_codes_under_an_infinite_inverse_do_not_depend_on_the_processor():
    """x86-64 happens to turn inf and NaN into 0; others saturate. So the cast never decides."""
    y = np.full((32, 2), 5.7, np.float32)
    codes = _truncated(y, np.array([np.inf, 1], np.float32), np.uint8)
    np.testing.assert_array_equal(codes, np.tile([0, 5], (32, 1)))


def test_s_of_the_values_is_the_butterfly_sum():
    x = np.random.default_rng(5).standard_normal((50, 32)).astype(np.float32)
    x *= np.float32(1e-3)
    pair = np.arange(50) % 16
    x[np.arange(50), pair] += 1000
    x[np.arange(50), pair + 16] -= 1000  # cancels at once in this order and in no other
    blocks = FORMATS["q8_1"].quantize(x, s="values")
    for i in range(50):
        lanes = x[i].copy()
        for distance in (16, 8, 4, 2, 1):  # as 32 lanes do it: each adds its partner's value
            lanes = np.array([lanes[j] + lanes[j ^ distance] for j in range(32)], np.float32)
        assert blocks["s"][i, 0] == np.float16(lanes[0])
    other = FORMATS["q8_1"].quantize(x)
    assert (other["s"] != blocks["s"]).any()
    for field in ("d", "qs"):
        np.testing.assert_array_equal(other[field], blocks[field])
    with pytest.raises(ValueError, match='s is "codes" or "values", not \'sum\''):
        FORMATS["q8_1"].quantize(x, s="sum")


# --- the interface ---


@name_of_written
def test_shapes_and_runs_of_values(name):
    """Leading axes survive, cutting the work into runs of RUN blocks shows nowhere, and values stay
    as they are."""
    fmt = FORMATS[name]
    x = np.random.default_rng(1).standard_normal((2, 3, RUN // 2, 64)).astype(np.float32)
    before = x.copy()
    x.flags.writeable = False
    blocks = fmt.quantize(x)
    np.testing.assert_array_equal(x, before)
    assert (blocks.shape, blocks.dtype) == ((2, 3, RUN // 2, 2), fmt.dtype)
    for index in ((0, 0, 0), (1, 2, RUN // 2 - 1), (0, 2, 5)):
        np.testing.assert_array_equal(fmt.quantize(x[index]), blocks[index])


def test_the_registry():
    assert tuple(FORMATS) == (*WEIGHT_FORMATS, "q8_1", *FILE_FORMATS)
    assert [*LINEAR, "mxfp4", "iq4_nl"] == WRITTEN
    for name, fmt in FORMATS.items():
        assert (fmt.elements, fmt.block_bytes) == (
            GGML_QUANT_SIZES[kind(name)] if name != "q8_1" else (32, 36)  # gguf has an older one
        )
        assert fmt.name == name
        assert sum(packed.bits for packed in fmt.packed) == fmt.bits
        assert format_of(fmt.dtype) == fmt == format_named(name)
        with pytest.raises((AttributeError, TypeError)):
            fmt.name = "other"
    assert len({fmt.dtype for fmt in FORMATS.values()}) == len(FORMATS)


# --- what is refused ---

FINE = np.ones((4, 64), np.float32)


def with_value(value):
    x = FINE.copy()
    x[2, 37] = value
    return x


BAD_INPUT = {
    "NaN": (with_value(np.nan), ValueError, r"x is nan at element 5 of block \(2, 1\)"),
    "inf": (with_value(np.inf), ValueError, r"x is inf at element 5 of block \(2, 1\)"),
    "minus inf": (with_value(-np.inf), ValueError, r"x is -inf at element 5 of block \(2, 1\)"),
    "K": (np.ones((4, 60), np.float32), ValueError, "K = 60 is not a multiple of 32.*pad K to 64"),
    "float64": (np.ones(32), TypeError, "x is float64.*float32"),
    "float16": (np.ones(32, np.float16), TypeError, "x is float16.*float32"),
    "integers": (np.ones(32, np.int32), TypeError, "x is int32.*float32"),
    "byte order": (np.ones(32, ">f4"), TypeError, "x is >f4.*float32"),
    "list": ([1.0] * 32, TypeError, "x is a list.*NumPy array"),
    "masked": (np.ma.ones(32, np.float32), TypeError, "x is a MaskedArray"),
    "rank": (np.array(1, np.float32), ValueError, "x has no dimensions"),
    "empty": (np.ones((0, 32), np.float32), ValueError, r"x of shape \(0, 32\) is empty"),
    "empty K": (np.ones((3, 0), np.float32), ValueError, r"x of shape \(3, 0\) is empty"),
    "transposed": (np.ones((32, 64), np.float32).T, ValueError, r"strides \(4, 256\).*contiguous"),
    "strided": (np.ones((4, 128), np.float32)[:, ::2], ValueError, "contiguous"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
@name_of_written
def test_bad_input_is_refused_in_one_sentence(name, case):
    x, error, message = BAD_INPUT[case]
    with pytest.raises(error, match=message) as caught:
        quantize(x, name)
    assert "\n" not in str(caught.value)


def test_bad_input_far_into_a_matrix_is_found():
    x = np.ones((3, 32 * (RUN + 7)), np.float32)
    x[2, 32 * (RUN + 3) + 11] = np.nan
    with pytest.raises(ValueError, match=rf"element 11 of block \(2, {RUN + 3}\)"):
        quantize(x, "q4_1")


OVERFLOWS = [
    # format, value at element 0 that still fits, the field, what the limit applies to
    ("q4_0", np.float32(8 * 65520), "d", "d = -65520"),
    ("q5_0", np.float32(16 * 65520), "d", "d = -65520"),
    ("q8_0", np.float32(127 * 65520), "d", "d = 65520"),
    ("q4_1", np.float32(15 * 65520), "d", "d = 65520"),
    ("q5_1", np.float32(31 * 65520), "d", "d = 65520"),
    ("q4_1", np.float32(-65520), "m", "m = -65520"),
    ("q5_1", np.float32(-65520), "m", "m = -65520"),
    ("q8_1", np.float32(65520), "s", "s = 65520"),
]


@pytest.mark.parametrize(("name", "limit", "field", "message"), OVERFLOWS)
def test_a_scale_beyond_float16_is_refused(name, limit, field, message):
    """65520 is the first value that rounds past 65504; one float32 below it all is well."""
    x = np.zeros((2, 64), np.float32)
    x[1, 32] = np.nextafter(limit, np.float32(0))
    assert abs(quantize(x, name)[field][1, 1]) == 65504
    x[1, 32] = limit
    sentence = rf"{name} needs {message} for block \(1, 1\), beyond float16's limit of 65504"
    with pytest.raises(ValueError, match=sentence):
        quantize(x, name)


def test_a_range_beyond_float32_is_refused():
    x = np.zeros(32, np.float32)
    x[0], x[1] = 3e38, -3e38
    with pytest.raises(ValueError, match="q4_1 needs d = inf for block 0, beyond float16's limit"):
        quantize(x, "q4_1")


def test_blocks_of_another_format_are_refused():
    blocks = quantize(FINE, "q4_0")
    with pytest.raises(TypeError, match="q5_1 takes an array of 24-byte block_q5_1, not"):
        FORMATS["q5_1"].dequantize(blocks)
    with np.errstate(
        over="ignore"
    ):  # NumPy's own value for what is masked is too large for float16
        masked = np.ma.masked_array(blocks)
    with pytest.raises(TypeError, match="block_q4_0, not MaskedArray"):
        dequantize(masked)
    with pytest.raises(TypeError, match="block_q4_0, not void"):
        FORMATS["q4_0"].codes(blocks[0, 0])
    with pytest.raises(ValueError, match=r"shape \(0, 2\) hold nothing"):
        FORMATS["q4_0"].scale(blocks[:0])
    with pytest.raises(TypeError, match="dtype float32 is no block format"):
        dequantize(FINE)
    with pytest.raises(TypeError, match="list is no block format"):
        dequantize([1, 2])
    with pytest.raises(ValueError, match="no format is called 'q6_0'; there are q4_0, q4_1"):
        quantize(FINE, "q6_0")
    with pytest.raises(ValueError, match="no format is called 4"):
        quantize(FINE, 4)
