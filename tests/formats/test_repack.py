"""Rearranged weights: every bit where the docstring says."""

from __future__ import annotations

import numpy as np
import pytest

from qformats import FORMATS, WEIGHT_FORMATS, quantize
from qformats.repack import as_bytes, k_outermost, prune, pruned_tiles
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


def test_two_of_four_are_kept():
    """The largest, of equal ones the first; others are 0, and what is kept stays."""
    blocks = random_blocks("q4_0", 210, finite=True).reshape(42, 5)
    before, value = blocks.tobytes(), FORMATS["q4_0"].dequantize(blocks).reshape(42, -1, 4)
    kept = FORMATS["q4_0"].dequantize(made := prune(blocks)).reshape(42, -1, 4)
    for four, left in zip(value.reshape(-1, 4), kept.reshape(-1, 4), strict=True):
        two = sorted(range(4), key=lambda i: (-abs(four[i]), i))[:2]
        assert list(left) == [four[i] if i in two else 0 for i in range(4)]
    assert blocks.tobytes() == before, "they are a copy"
    assert prune(made).tobytes() == made.tobytes()
    with pytest.raises(TypeError, match=r"prune takes weight blocks \(q4_0\), and these are q5_0"):
        prune(quantize(np.ones((2, 64), np.float32), "q5_0"))


def test_pruned_tiles_are_what_a_sparse_product_takes():
    """Each kept weight and its position, lane by lane as the docstring says; rows and blocks beyond
    the matrix are 0. Several hundred rows are packed by several cores."""
    blocks = random_blocks("q4_0", 2600, finite=True).reshape(520, 5)
    packed, row_scales = pruned_tiles(blocks)
    dense = np.zeros((768, 256))
    tiles = packed.reshape(3, 2, 16, 896)
    assert np.log2(row_scales).tolist() == np.log2(row_scales).round().tolist()
    for group, k_tile, tile in np.ndindex(3, 2, 16):
        own = tiles[group, k_tile, tile]
        codes = own[:512].view(np.uint32).reshape(8, 4, 4)  # [g, t, block]
        positions = own[512:768].view(np.uint32).reshape(8, 4, 2)  # [g, t, word]
        scales = own[768:].view(np.float16).reshape(8, 2, 4)  # [g, row, block]
        for g, t, block, i in np.ndindex(8, 4, 4, 4):
            row, four = 8 * (i % 2) + g, 4 * (i // 2) + t
            lane = 2 * (block % 2) + four // 4
            pair = int(positions[g, lane, block // 2]) >> 16 * (i % 2) + 4 * (four % 4) & 15
            assert pair & 3 < pair >> 2, "two positions, ascending"
            at = 256 * group + 16 * tile + row, 128 * k_tile + 32 * block + 4 * four
            for half in range(2):
                code = int(codes[g, t, block]) >> 4 * i + 16 * half & 15
                scale = float(scales[g, i % 2, block]) * float(row_scales[at[0]]) * 2.0**-24
                dense[at[0], at[1] + (pair >> 2 * half & 3)] = (code - 8) * scale
    wanted = np.zeros_like(dense)
    wanted[:520, :160] = FORMATS["q4_0"].dequantize(prune(blocks))
    np.testing.assert_array_equal(dense, wanted)


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
