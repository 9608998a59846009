"""What blocks decode to, against `gguf`; and MXFP4, IQ4_NL and the K-quants, of files alone."""

from __future__ import annotations

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize

from qformats import FILE_FORMATS, FORMATS, WEIGHT_FORMATS, dequantize, format_of, quantize
from qformats.format import RUN, Packed
from qformats.storage import _rounded, storage_format_named, stored_weights

READ_ONLY = tuple(name for name in FILE_FORMATS if not FORMATS[name].written)
IQ4_NL = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
E2M1 = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]
TABLES = {
    **{"mxfp4": E2M1, "iq4_nl": IQ4_NL, "iq4_xs": IQ4_NL, "nvfp4": E2M1},
    **{"q1_0": [-1, 1], "tq2_0": [-1, 0, 1, 2]},
}
PART, PARTS = 10_000, 10  # 10^5 random blocks of each format, a part at a time
ZEROS = {
    "q4_0": 8,
    "q5_0": 16,
    "q8_0": 0,
    "q8_1": 0,
    "q3_k": 4,
    "q6_k": 32,
    "mxfp4": 0,
    "iq4_nl": 0,
    "iq4_xs": 0,
    "nvfp4": 0,
    "q1_0": 0,
    "tq2_0": 0,
}
name_of_format = pytest.mark.parametrize("name", list(FORMATS))
name_of_read_only = pytest.mark.parametrize("name", READ_ONLY)


def random_blocks(name, n, seed=0, finite=False):
    """structured[n] of random bytes: every code, every scale. One float16 in 32 is NaN and a few
    are set to inf, unless `finite`."""
    fmt = FORMATS[name]
    rng = np.random.default_rng([seed, list(FORMATS).index(name)])
    blocks = rng.integers(0, 256, n * fmt.block_bytes, np.uint8).view(fmt.dtype)
    halves = [field for field in fmt.dtype.names if fmt.dtype[field] == np.float16]
    for k, field in enumerate(halves):
        if finite:
            half = blocks[field]
            blocks[field] = np.where(np.isfinite(half), half, np.float16(-0.375))
        else:
            blocks[field][k::500] = np.inf
            blocks[field][k + 1 :: 700] = -np.inf
    return blocks


def as_bytes(blocks):
    return blocks.view(np.uint8).reshape(len(blocks), -1)


# --- bit-exactness ---


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", [*WEIGHT_FORMATS, *FILE_FORMATS])
def test_dequantized_bit_exact_to_gguf(name, part):
    """Also where d or dmin is NaN or inf (the NaN's own bits are the processor's affair)."""
    blocks = random_blocks(name, PART, seed=part)
    with np.errstate(all="ignore"):
        if name == "q1_0":  # gguf has no codec of it: ggml's own, bit j of the field for element j
            signs = np.unpackbits(blocks["qs"], axis=-1, bitorder="little").astype(bool)
            d = blocks["d"].astype(np.float32)[:, None]
            theirs = np.where(signs, d, -d)
        else:
            theirs = gguf_dequantize(as_bytes(blocks), GGMLQuantizationType[name.upper()])
    ours = FORMATS[name].dequantize(blocks).reshape(theirs.shape)
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))
    number = ~np.isnan(ours)
    np.testing.assert_array_equal(ours[number].view(np.uint32), theirs[number].view(np.uint32))
    assert number.mean() > 0.9
    no_nan = name in ("mxfp4", "nvfp4")
    assert np.isinf(ours).any() == (name != "nvfp4")
    assert number.all() == no_nan, "MXFP4's and NVFP4's scales know no NaN, the others do"


@name_of_format
def test_scale_times_level_plus_offset_is_the_value(name):
    """Exactly, in float32, for any bytes with finite scales."""
    fmt = FORMATS[name]
    blocks = random_blocks(name, 6000, finite=True).reshape(3000, 2)
    scale, offset, levels = fmt.scale(blocks), fmt.offset(blocks), fmt.levels(blocks)
    groups = fmt.elements // fmt.group * 2
    assert (scale.dtype, offset.dtype, levels.dtype) == (np.float32, np.float32, np.int32)
    assert scale.shape == offset.shape == (3000, groups)
    with np.errstate(over="ignore"):  # MXFP4's largest exponents
        value = scale[..., None] * levels.reshape(3000, groups, -1).astype(np.float32)
    value += offset[..., None]
    np.testing.assert_array_equal(value.reshape(3000, -1), fmt.dequantize(blocks))
    codes = fmt.codes(blocks)
    assert codes.dtype == np.int32
    eight = fmt.bits == 8
    assert (codes.min(), codes.max()) == ((-128, 127) if eight else (0, 2**fmt.bits - 1))
    table = TABLES.get(name, fmt.codebook)  # of a new format its own, which gguf's answers check
    np.testing.assert_array_equal(codes if table is None else np.array(table)[codes], levels)
    if name in ZEROS:
        np.testing.assert_array_equal(offset, -ZEROS[name] * scale)
    elif "m" in fmt.dtype.names:
        np.testing.assert_array_equal(offset, blocks["m"].astype(np.float32))


@name_of_format
def test_shapes_and_runs(name):
    """Leading axes survive, runs show nowhere, and blocks stay as they are."""
    fmt = FORMATS[name]
    blocks = random_blocks(name, 2 * 3 * (RUN // 5), finite=True).reshape(2, 3, -1)
    raw = blocks.tobytes()
    blocks.flags.writeable = False
    back = fmt.dequantize(blocks)
    assert back.shape == (2, 3, RUN // 5 * fmt.elements)
    for index in ((0, 0), (1, 2), (0, 2)):
        np.testing.assert_array_equal(dequantize(blocks[index]), back[index])
    odd = blocks[:, ::2, ::3]
    assert fmt.codes(odd).shape == (2, 2, odd.shape[2] * fmt.elements)
    np.testing.assert_array_equal(
        fmt.dequantize(odd).reshape(*odd.shape, -1), back.reshape(*blocks.shape, -1)[:, ::2, ::3]
    )
    for of in (fmt.codes, fmt.levels, fmt.scale, fmt.offset):
        of(blocks)[:] = 0
    assert blocks.tobytes() == raw


def test_formats_of_equal_size_are_told_apart():
    """iq4_nl and q4_0 have 18 bytes each, d and then qs: their dtypes differ all the same."""
    x = np.linspace(-1, 1, 64, dtype=np.float32)
    for name in ("q4_0", "iq4_nl"):
        blocks = quantize(x, name)
        for same in (blocks, blocks[::2], blocks.copy(), np.concatenate([blocks, blocks])):
            assert format_of(same).name == name
        raw = blocks.view(np.uint8)
        assert format_of(raw.view(FORMATS[name].dtype)).name == name
    with pytest.raises(TypeError, match="q4_0 takes an array of 18-byte block_q4_0"):
        FORMATS["q4_0"].dequantize(quantize(x, "iq4_nl"))


@name_of_read_only
def test_formats_of_searched_scales_are_read_not_written(name):
    sentence = f"{name} blocks are read here, not written: quantize to a format of 32 elements, or "
    with pytest.raises(ValueError, match=sentence) as caught:
        quantize(np.ones(256, np.float32), name)
    assert "\n" not in str(caught.value)


def test_packed_places_are_where_unpack_looks():
    for packed in (Packed("qs", 4, 16), Packed("qh", 1, 1), Packed("ql", 4, 64), Packed("h", 2, 8)):
        size = 2 * packed.run
        for element in range(size * 8 // packed.bits):
            raw = np.zeros((1, size), np.uint8)
            byte, low = packed.place(element)
            raw[0, byte] = 1 << low
            assert np.flatnonzero(packed.unpack(raw)).tolist() == [element]
            assert packed.unpack(raw)[0, element] == 1


# --- MXFP4 and IQ4_NL are written too ---


def test_mxfp4_exponents_follow_the_rounded_logarithm():
    """One float below 8 the logarithm is 3 already; below 4 it is not yet 2."""
    x = np.zeros((4, 32), np.float32)
    x[:, 0] = 8, np.nextafter(np.float32(8), 0), 4, np.nextafter(np.float32(4), 0)
    assert quantize(x, "mxfp4")["e"][:, 0].tolist() == [128, 128, 127, 126]


def test_mxfp4_blocks_too_small_for_an_exponent_have_the_smallest():
    """Below 2^-125 the exponent would be negative. Half of 2^-126 is one step of the scale."""
    x = np.zeros((3, 32), np.float32)
    x[:, 0] = 2.0**-124, 2.0**-126, -(2.0**-149)
    blocks = quantize(x, "mxfp4")
    assert blocks["e"][:, 0].tolist() == [1, 0, 0]
    np.testing.assert_array_equal(dequantize(blocks)[:, 0], [2.0**-124, 2.0**-126, 0])


def test_mxfp4_never_picks_a_level_beyond_float32():
    """Where the logarithm of the largest floats rounds up to 128, 8 and 12 scales would be inf."""
    x = np.full(32, np.finfo(np.float32).max)
    x[1::2] *= -1
    blocks = quantize(x, "mxfp4")
    assert blocks["e"][0] == 253
    np.testing.assert_array_equal(np.abs(dequantize(blocks)), np.float32(6 * 2.0**125))


def test_iq4_nl_ties_go_to_the_upper_level():
    """Values half-way between two levels, under an inverse scale of exactly -1."""
    x = np.zeros((15, 32), np.float32)
    x[:, 0] = 127  # given level -127
    x[:, 1] = -(np.array(IQ4_NL[:15]) + np.array(IQ4_NL[1:])) / 2
    blocks = quantize(x, "iq4_nl")
    assert FORMATS["iq4_nl"].codes(blocks)[:, 1].tolist() == list(range(1, 16))
    x[:, 1] = np.nextafter(x[:, 1], np.float32(1000))  # the level falls
    assert FORMATS["iq4_nl"].codes(quantize(x, "iq4_nl"))[:, 1].tolist() == list(range(15))


def test_iq4_nl_blocks_below_its_epsilon_are_zero():
    for largest in (0.0, 9e-16):
        x = np.full(32, largest, np.float32)
        assert quantize(x, "iq4_nl").tobytes() == bytes(2) + b"\x88" * 16
    x = np.full(32, 1.1e-15, np.float32)
    assert quantize(x, "iq4_nl").tobytes() != bytes(2) + b"\x88" * 16


@pytest.mark.parametrize("largest", [1e8, 1e13, 3e38])
def test_iq4_nl_scales_beyond_float16_are_refused(largest):
    """Also where the sums of the fit overflow a float32."""
    x = np.ones((2, 32), np.float32)
    x[1, 3] = largest
    with pytest.raises(
        ValueError, match=r"iq4_nl needs d = [\d.e+-]+ for block \(1, 0\), beyond f"
    ):
        quantize(x, "iq4_nl")


@pytest.mark.parametrize(
    ("name", "least", "most"), [("mxfp4", 1.2e-2, 1.4e-2), ("iq4_nl", 6.0e-3, 6.4e-3)]
)
def test_error_of_normal_weights(name, least, most):
    """NMSE of standard normal data, beside q4_0's 7.4e-3: the denser levels around 0 are worth it,
    a scale that is a power of two costs."""
    x = np.random.default_rng(0).standard_normal((4096, 32)).astype(np.float32)
    error = np.square(x.astype(np.float64) - dequantize(quantize(x, name))).sum()
    assert least < error / np.square(x.astype(np.float64)).sum() < most


def test_scales_of_k_quants_are_rounded_as_float16_is():
    """Halves to even: 2049 lies between 2048 and 2050."""
    x = np.array([2047, 2049, 2051, -2049, 4098, 1 / 3, 0.0])
    np.testing.assert_array_equal(_rounded(x), x.astype(np.float16).astype(np.float64))


def test_the_largest_scale_of_mxfp4_is_two_to_the_hundredth():
    blocks = quantize(np.ones((2, 64), np.float32), "mxfp4")
    blocks["e"][1, 1] = 228
    assert stored_weights(blocks).scale.max() == 2.0**100
    blocks["e"][1, 1] = 229
    with pytest.raises(
        ValueError, match=r"block 1 of row 1 has a scale of 2\^101, and the largest"
    ):
        stored_weights(blocks)


def test_storage_is_of_file_formats():
    blocks = quantize(np.ones((1, 32), np.float32), "q4_1")
    with pytest.raises(TypeError, match=r"takes blocks of mxfp4.* q6_k.*, and these are q4_1"):
        stored_weights(blocks)
    assert storage_format_named("c6").bits == 6
    with pytest.raises(ValueError, match="no format is called 'c7'"):
        storage_format_named("c7")
