"""Weights in the order of tensor-core fragments: kernels read the codes of ggml's blocks, and zeros
beyond the matrix.

Where a byte lies is for `qformats.repack.tiles` and the readers of kernels to agree on: tested is
what these read, in every lane, of ragged matrices.
"""

from __future__ import annotations

import numpy as np
import pytest

from qformats import FORMATS, WEIGHT_FORMATS, quantize
from qformats.repack import TILE_GROUP, TILE_K, TILE_ROWS, tiles
from steps.kernels.parts.weights.codes import tile_format
from tests.formats.test_file_formats import random_blocks
from tests.kernels.packed_tiles import by_row_tile, codes_in_registers

weight_format = pytest.mark.parametrize("name", WEIGHT_FORMATS)
CENTRE = {"q4_0": 8, "q5_0": 16}  # codes are stored less it
BLOCKS = TILE_K // 32  # of one row in a packed tile


def any_blocks(name: str, n: int, blocks_k: int) -> np.ndarray:
    """Blocks [n, blocks_k] of random bytes; d and m are any bits, a NaN's too."""
    return random_blocks(name, n * blocks_k).reshape(n, blocks_k)


@weight_format
@pytest.mark.parametrize(("n", "blocks_k"), [(1, 1), (21, 9), (133, 4)])
def test_kernels_read_the_codes(name: str, n: int, blocks_k: int) -> None:
    blocks = any_blocks(name, n, blocks_k)
    before, form = blocks.tobytes(), tile_format(name)
    packed, factors = tiles(blocks)
    assert (packed.dtype, packed.ndim, packed.flags.c_contiguous) == (np.uint8, 1, True)
    assert form.tile_bytes == TILE_ROWS * BLOCKS * FORMATS[name].block_bytes, "nothing is added"
    of_rows = -(-n // (TILE_GROUP * TILE_ROWS)) * TILE_GROUP
    assert packed.size == of_rows * -(-blocks_k // BLOCKS) * form.tile_bytes
    assert (factors.dtype, factors.shape) == (np.float32, (of_rows * TILE_ROWS,))
    codes = FORMATS[name].codes(blocks).astype(np.int64).reshape(n, -1) - CENTRE.get(name, 0)
    found = codes_in_registers(packed, name, n, codes.shape[1])
    np.testing.assert_array_equal(found, form.code_scale * codes)
    assert blocks.tobytes() == before


@weight_format
@pytest.mark.parametrize(("n", "blocks_k"), [(1, 1), (17, 4), (128, 5), (133, 7)])
def test_rows_and_blocks_beyond_the_matrix_have_scale_zero(
    name: str, n: int, blocks_k: int
) -> None:
    """So whatever their codes are multiplied with, they add nothing."""
    blocks = any_blocks(name, n, blocks_k)
    blocks["d"] = 1.5
    if "m" in blocks.dtype.names:
        blocks["m"] = 2
    f = tile_format(name)
    rows, k_tiles = -(-n // 128) * TILE_GROUP, -(-blocks_k // BLOCKS)
    packed = by_row_tile(tiles(blocks)[0], k_tiles, f.tile_bytes)
    assert len(packed) == rows
    size = TILE_ROWS * BLOCKS * 2
    d, m = 1.5 * 2.0**15, 2 * 2.0**6
    parts = {f.scales_at: d, f.minima_at: m} if f.minimum else {f.scales_at: d}
    for at, value in parts.items():
        halves = np.ascontiguousarray(packed[:, :, at : at + size]).view(np.float16)
        halves = halves.reshape(rows, k_tiles, 8, 2, BLOCKS)  # row tile, K tile, g, half, block
        by_row = halves.transpose(0, 3, 2, 1, 4).reshape(rows * TILE_ROWS, k_tiles * BLOCKS)
        assert (by_row[:n, :blocks_k] == value).all()
        assert not by_row[n:].view(np.uint16).any()
        assert not by_row[:, blocks_k:].copy().view(np.uint16).any()


@weight_format
def test_blocks_of_any_strides(name: str) -> None:
    blocks = any_blocks(name, 40, 12)
    part = blocks[1::2, ::3]
    assert tiles(part)[0].tobytes() == tiles(np.ascontiguousarray(part))[0].tobytes()


def test_what_is_refused() -> None:
    blocks = quantize(np.ones((2, 3, 64), np.float32), "q4_0")
    with pytest.raises(ValueError, match=r"a matrix of blocks \[N, K//32\], got 3 dimensions"):
        tiles(blocks)
    with pytest.raises(TypeError, match=r"weight blocks \(q4_0, .*\), and these are q8_1"):
        tiles(quantize(np.ones((2, 64), np.float32), "q8_1"))
    with pytest.raises(TypeError, match="dtype float32 is no block format"):
        tiles(np.ones((2, 64), np.float32))
    with pytest.raises(ValueError, match=r"shape \(0, 2\) hold nothing"):
        tiles(blocks[:0, 0])
