"""The codecs against llama.cpp's own `gguf` package, their properties, and bad input.

What only the formats of files have (tables, K-quants) is in `test_file_formats`.
"""

from __future__ import annotations

import struct

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize
from gguf.quants import quantize as gguf_quantize
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

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
name_of_format = pytest.mark.parametrize("name", LINEAR)
name_of_written = pytest.mark.parametrize("name", [*LINEAR, "mxfp4", "iq4_nl"])


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


@name_of_format
def test_where_one_over_d_overflows_every_code_is_zero(name):
    """C leaves inf -> int undefined; x86-64 and this codec make it 0. The values are 0 anyway."""
    x = np.arange(-16, 16).astype(np.float32) * np.float32(2.0**-146)
    blocks = FORMATS[name].quantize(x)
    assert not FORMATS[name].codes(blocks).any()
    assert not FORMATS[name].dequantize(blocks).any()
    assert FORMATS[name].codes(FORMATS[name].quantize(x * np.float32(2.0**30))).any()


def test_codes_under_an_infinite_inverse_do_not_depend_on_the_processor():
    """x86-64 happens to turn inf and NaN into 0; others saturate. So the cast never decides."""
    y = np.full((32, 2), 5.7, np.float32)
    codes = _truncated(y, np.array([np.inf, 1], np.float32), np.uint8)
    np.testing.assert_array_equal(codes, np.tile([0, 5], (32, 1)))


def test_half_away_from_zero_for_every_code():
    """Where d is 1: k + 1/2 goes up, the float before it stays."""
    half = np.arange(127, dtype=np.float32) + np.float32(0.5)
    for x, up in ((half, 1), (np.nextafter(half, np.float32(0)), 0)):
        row = np.zeros((127, 32), np.float32)
        row[:, 0], row[:, 1], row[:, 2] = 127, x, -x
        codes = FORMATS["q8_0"].codes(FORMATS["q8_0"].quantize(row))
        np.testing.assert_array_equal(codes[:, 1], np.arange(127) + up)
        np.testing.assert_array_equal(codes[:, 2], -np.arange(127) - up)


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


WRITTEN = (*WEIGHT_FORMATS, "q8_1", "mxfp4", "iq4_nl")


def test_the_registry():
    assert tuple(FORMATS) == (*WEIGHT_FORMATS, "q8_1", *FILE_FORMATS)
    for name, fmt in FORMATS.items():
        assert (fmt.elements, fmt.block_bytes) == (
            GGML_QUANT_SIZES[kind(name)] if name != "q8_1" else (32, 36)  # gguf has an older one
        )
        assert fmt.name == name
        assert fmt.written == (name in WRITTEN)
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


def test_infinite_scales_are_decoded_as_ggml_does():
    blocks = quantize(np.linspace(-1, 1, 32, dtype=np.float32), "q4_0")
    blocks["d"] = np.inf
    value, codes = dequantize(blocks), FORMATS["q4_0"].codes(blocks)
    assert np.isnan(value[codes == 8]).all()
    assert np.isinf(value[codes != 8]).all()


# --- properties ---

rows = st.integers(1, 3).flatmap(
    lambda n: arrays(
        np.float32,
        (n, 32),
        elements=st.one_of(
            st.floats(-1800, 1800, width=32),
            st.floats(-(2.0**-14), 2.0**-14, width=32),
            st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 2.0**-126, -(2.0**-149)]),
        ),
    )
)
quick = settings(deadline=None, max_examples=150, derandomize=True)


@name_of_format
@quick
@given(x=rows, exponent=st.integers(-6, 0))
def test_any_blocks_are_quantized_well(name, x, exponent):
    fmt = FORMATS[name]
    blocks = fmt.quantize(x)
    code, values = fmt.codes(blocks), fmt.dequantize(blocks)
    error_is_bounded_by_the_scale(fmt, x, blocks)
    codes_use_the_whole_range(fmt, x, code)

    # Values of blocks are their own quantization: the extreme element returns d, and d every code.
    # With a minimum, that holds while d is not lost in the rounding of values of m's size.
    steps = np.ptp(values, axis=1)
    if "m" not in fmt.dtype.names or (np.abs(values).max(axis=1) <= 2.0**8 * steps).all():
        np.testing.assert_array_equal(fmt.dequantize(fmt.quantize(values)), values)

    # A power of two only moves the scale.
    x = np.where(np.abs(x) < 2.0**-60, np.float32(0), x)  # keep clear of float32's own underflow
    factor = np.float32(2.0**exponent)
    np.testing.assert_array_equal(fmt.codes(fmt.quantize(x * factor)), fmt.codes(fmt.quantize(x)))


def error_is_bounded_by_the_scale(fmt, x, blocks):
    """|x - value| is half a step (a whole one at the end which code 2 zero - 1 cannot reach), plus
    what rounding d and m to float16 moves a code's value, plus a few float32 roundings."""
    name, code = fmt.name, fmt.codes(blocks)
    d = np.abs(fmt.scale(blocks).astype(np.float64))
    top = {4: 15, 5: 31, 8: 127}[fmt.bits]
    step = np.where((code == top) & (name in ("q4_0", "q5_0")), 1.0, 0.5)
    half_ulp = np.maximum(d * 2.0**-11, 2.0**-25)  # of a float16, normal or subnormal
    reach = top // 2 + 1 if name in ("q4_0", "q5_0") else top
    bound = step * (d + half_ulp) + reach * half_ulp
    if "m" in fmt.dtype.names:
        bound = bound + np.maximum(np.abs(fmt.offset(blocks)) * 2.0**-11, 2.0**-25)
    bound = bound + 2.0**-20 * np.abs(x).max(axis=1, keepdims=True)
    error = np.abs(fmt.dequantize(blocks).astype(np.float64) - x)
    assert (error <= bound).all(), (error - bound).max()


def codes_use_the_whole_range(fmt, x, code):
    """The extreme of a block gets the extreme code: smaller d would cut it, larger waste codes."""
    with np.errstate(all="ignore"):
        lives = np.ptp(x, axis=1) > 2.0**-115 if "m" in fmt.dtype.names else x.any(axis=1)
        lives &= np.abs(x).max(axis=1) > 2.0**-115
    if fmt.bits == 8:
        assert (np.abs(code).max(axis=1)[lives] == 127).all()
        assert (np.abs(code) <= 127).all()
    else:
        assert (code.min(axis=1)[lives] == 0).all()
        if "m" in fmt.dtype.names:
            assert (code.max(axis=1)[lives] == 2**fmt.bits - 1).all()


@name_of_format
@quick
@given(raw=st.data())
def test_any_bytes_decode_as_struct_says(name, raw):
    """One block of arbitrary bytes, decoded by hand with `struct`."""
    fmt = FORMATS[name]
    body = raw.draw(st.binary(min_size=fmt.block_bytes - 2, max_size=fmt.block_bytes - 2))
    blob = struct.pack("<e", raw.draw(st.floats(-100, 100, width=16))) + body
    block = np.frombuffer(blob, fmt.dtype)
    d = struct.unpack_from("<e", blob)[0]
    m = struct.unpack_from("<e", blob, 2)[0] if name in ("q4_1", "q5_1") else 0.0
    assume(np.isfinite(m))
    qs = blob[-16:]
    for j, value in enumerate(fmt.dequantize(block).tolist()):
        if fmt.bits == 8:
            expected = struct.unpack_from("<32b", blob, fmt.block_bytes - 32)[j] * d
        else:
            q = qs[j % 16] >> (4 if j >= 16 else 0) & 15
            if fmt.bits == 5:
                q |= (struct.unpack_from("<I", blob, fmt.block_bytes - 20)[0] >> j & 1) << 4
            expected = (q - (0 if name[3] == "1" else 2 ** (fmt.bits - 1))) * d + m
        assert value == np.float32(expected)
