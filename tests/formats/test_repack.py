"""Rearranged weights: every bit where the docstring says."""

from __future__ import annotations

import numpy as np
import pytest

from qformats import FORMATS, WEIGHT_FORMATS, quantize
from qformats.repack import as_bytes, k_outermost
from tests.formats.test_file_formats import random_blocks

weight_format = pytest.mark.parametrize("name", WEIGHT_FORMATS)


@weight_format
def test_bytes_as_they_lie(name):
    blocks = random_blocks(name, 35, finite=True).reshape(7, 5)
    (raw,) = as_bytes(blocks)
    assert raw.dtype == np.uint8
    assert raw.tobytes() == blocks.tobytes()
    assert np.shares_memory(raw, blocks)


@weight_format
def test_k_outermost_is_one_piece_for_each_step_along_k(name):
    """Element by element, as a kernel would: 16 bytes of chunk u of block b of row n lie at
    ((b chunks + u) N + n) 16; its fifth bits, scale and offset at b N + n. Of any strides."""
    blocks = random_blocks(name, 140, finite=True).reshape(14, 10)[::2, ::2]
    value = FORMATS[name].dequantize(blocks).reshape(7, 5, 32)
    before = blocks.tobytes()
    qs, qh, scale, offset = k_outermost(blocks)
    chunks = 2 if name == "q8_0" else 1
    assert [each.dtype for each in (qs, qh, scale, offset)] == ["u1", "u4", "f4", "f4"]
    five = name.startswith("q5")
    assert [each.shape for each in (qs, qh, scale)] == [(560 * chunks,), (35 * five or 1,), (35,)]
    for n, b, j in np.ndindex(7, 5, 32):
        byte = int(qs[((b * chunks + j // 16 % chunks) * 7 + n) * 16 + j % 16])
        code = byte >> (0 if j < 16 else 4) & 15 | (
            16 * (int(qh[b * 7 + n]) >> j & 1) if five else 0
        )
        code = byte - 256 * (byte > 127) if name == "q8_0" else code
        assert scale[b * 7 + n] * np.float32(code) + offset[b * 7 + n] == value[n, b, j]
    for plane in (qs, qh, scale, offset):
        plane[:] = 0
    assert blocks.tobytes() == before, "they are copies"


def test_what_is_refused():
    x = np.ones((2, 64), np.float32)
    with pytest.raises(TypeError, match=r"weight blocks \(q4_0, .*\), and these are q8_1"):
        k_outermost(quantize(x, "q8_1"))
    with pytest.raises(TypeError, match=r"as_bytes takes weight blocks .*, and these are q8_1"):
        as_bytes(quantize(x, "q8_1"))
    with pytest.raises(TypeError, match="dtype float32 is no block format"):
        k_outermost(x)
    with pytest.raises(ValueError, match=r"shape \(0, 2\) hold nothing"):
        k_outermost(quantize(x, "q5_0")[:0])
    with pytest.raises(ValueError, match=r"a matrix of blocks \[N, K//32\], got 1 dimensions"):
        k_outermost(quantize(x[0], "q4_0"))
