"""Rearranged weights: every bit where the docstring says, and nothing lost on the way back."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from qformats import FORMATS, WEIGHT_FORMATS, quantize
from qformats.repack import as_bytes, from_planes, k_outermost, planes

weight_format = pytest.mark.parametrize("name", WEIGHT_FORMATS)


def any_blocks(name, shape=(7, 5), seed=4):
    """structured[shape] of random bytes, d and m finite."""
    fmt = FORMATS[name]
    rng = np.random.default_rng(seed)
    size = int(np.prod(shape)) * fmt.block_bytes
    blocks = rng.integers(0, 256, size, np.uint8).view(fmt.dtype).reshape(shape)
    for field in {"d", "m"} & set(fmt.dtype.names):
        blocks[field] = np.where(np.isfinite(blocks[field]), blocks[field], np.float16(-0.5))
    return blocks


@weight_format
def test_shapes_dtypes_and_layout(name):
    apart = planes(any_blocks(name))
    assert apart.format == FORMATS[name]
    codes = ((7, 5, 32), np.int8) if name == "q8_0" else ((7, 5, 16), np.uint8)
    assert (apart.qs.shape, apart.qs.dtype) == codes
    assert apart.qh.dtype == np.uint32
    assert apart.qh.shape == ((7, 5) if name.startswith("q5") else (7, 0))
    for plane in (apart.scale, apart.offset):
        assert (plane.shape, plane.dtype) == ((7, 5), np.float32)
    for plane in (apart.qs, apart.qh, apart.scale, apart.offset):
        assert plane.flags.c_contiguous


@weight_format
def test_values_follow_from_the_planes_alone(name):
    """Element by element, as a kernel would: scale * code + offset."""
    blocks = any_blocks(name, (3, 4))
    apart = planes(blocks)
    value = FORMATS[name].dequantize(blocks).reshape(3, 4, 32)
    for n, b, j in np.ndindex(3, 4, 32):
        if name == "q8_0":
            code = int(apart.qs[n, b, j])
        else:
            code = int(apart.qs[n, b, j % 16]) >> (0 if j < 16 else 4) & 15
        if name.startswith("q5"):
            code += 16 * (int(apart.qh[n, b]) >> j & 1)
        assert apart.scale[n, b] * np.float32(code) + apart.offset[n, b] == value[n, b, j]


@weight_format
def test_nothing_is_lost(name):
    blocks = any_blocks(name, (11, 3))
    assert from_planes(planes(blocks)).tobytes() == blocks.tobytes()


@weight_format
def test_every_finite_float16_scale_survives(name):
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)]
    blocks = np.zeros((1, halves.size), FORMATS[name].dtype)
    blocks["d"] = halves
    if "m" in FORMATS[name].dtype.names:
        blocks["m"] = halves[::-1]
    assert from_planes(planes(blocks)).tobytes() == blocks.tobytes()


@weight_format
def test_planes_are_copies_of_any_strides(name):
    blocks = any_blocks(name, (8, 6))
    part = planes(blocks[::2, 1::2])
    assert from_planes(part).tobytes() == np.ascontiguousarray(blocks[::2, 1::2]).tobytes()
    before = blocks.tobytes()
    part.qs[:] = 0
    part.qh[:] = 0
    part.scale[:] = 0
    part.offset[:] = 0
    assert blocks.tobytes() == before


def test_bytes_that_a_kernel_reads():
    blocks = {name: any_blocks(name, (4, 8)) for name in WEIGHT_FORMATS}
    per_block = {name: planes(b).nbytes / b.size for name, b in blocks.items()}
    assert per_block == {"q4_0": 20, "q4_1": 24, "q5_0": 24, "q5_1": 28, "q8_0": 36}


@weight_format
def test_bytes_as_they_lie(name):
    blocks = any_blocks(name)
    (raw,) = as_bytes(blocks)
    assert raw.dtype == np.uint8
    assert raw.tobytes() == blocks.tobytes()
    assert np.shares_memory(raw, blocks)


@weight_format
def test_k_outermost_is_one_piece_for_each_step_along_k(name):
    """Unit u of block b of row n: 16 bytes at ((b units + u) N + n) 16; others at b N + n."""
    blocks = any_blocks(name, (7, 5))
    apart = planes(blocks)
    qs, qh, scale, offset = k_outermost(blocks)
    assert all(plane.ndim == 1 for plane in (qs, qh, scale, offset))
    units = 2 if name == "q8_0" else 1
    assert (qs.dtype, qs.size) == (np.uint8, 7 * 5 * 16 * units)
    for n, b in np.ndindex(7, 5):
        for u in range(units):
            at = ((b * units + u) * 7 + n) * 16
            expected = apart.qs[n, b].view(np.uint8)[16 * u : 16 * u + 16]
            np.testing.assert_array_equal(qs[at : at + 16], expected)
        assert scale[b * 7 + n] == apart.scale[n, b]
        assert offset[b * 7 + n] == apart.offset[n, b]
        if name.startswith("q5"):
            assert qh[b * 7 + n] == apart.qh[n, b]


def test_what_is_refused():
    x = np.ones((2, 64), np.float32)
    with pytest.raises(TypeError, match=r"weight blocks \(q4_0, .*\), and these are q8_1"):
        planes(quantize(x, "q8_1"))
    with pytest.raises(TypeError, match="dtype float32 is no block format"):
        planes(x)
    with pytest.raises(ValueError, match=r"shape \(0, 2\) hold nothing"):
        planes(quantize(x, "q5_0")[:0])


def test_a_scale_that_no_block_can_hold_is_refused():
    apart = planes(quantize(np.ones((2, 64), np.float32), "q5_1"))
    scale = apart.scale.copy()
    scale[1, 0] = 1e-9
    with pytest.raises(ValueError, match=r"scale = 9.99.*e-10 at block \(1, 0\) is not a float16"):
        from_planes(dataclasses.replace(apart, scale=scale))
    with pytest.raises(ValueError, match=r"offset = .* at block \(0, 0\) is not a float16"):
        from_planes(dataclasses.replace(apart, offset=apart.offset * np.float32(1.0001)))


def test_k_outermost_takes_a_matrix() -> None:
    row = quantize(np.ones(64, np.float32), "q4_0")
    with pytest.raises(ValueError, match=r"a matrix of blocks \[N, K//32\], got 1 dimensions"):
        k_outermost(row)
