"""Weights in the order of tensor-core fragments: every byte where the docstring puts it.

The expectation is a second reading of `qformats.repack.tiles`, one code at a time in plain Python,
from the bytes of ggml's blocks alone.
"""

from __future__ import annotations

import itertools
import math
import struct
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import cuda

from qformats import BLOCK, FORMATS, WEIGHT_FORMATS, quantize
from qformats.repack import TILE_GROUP, TILE_K, TILE_ROWS, tiles
from steps.kernels.parts.weights.codes import tile_format
from steps.simulator.launch import simulate
from tests.kernels.packed_tiles import by_row_tile

weight_format = pytest.mark.parametrize("name", WEIGHT_FORMATS)
BITS = {"q4_0": 4, "q4_1": 4, "q5_0": 5, "q5_1": 5, "q8_0": 8}
CENTRE = {"q4_0": 8, "q4_1": 0, "q5_0": 16, "q5_1": 0, "q8_0": 0}
BLOCKS = TILE_K // BLOCK  # of one row in a packed tile


def any_blocks(name: str, n: int, blocks_k: int, seed: int = 0) -> np.ndarray:
    """Blocks [n, blocks_k] of random bytes; d and m are any bits, a NaN's too."""
    fmt = FORMATS[name]
    raw = np.random.default_rng(seed).integers(0, 256, n * blocks_k * fmt.block_bytes, np.uint8)
    return raw.view(fmt.dtype).reshape(n, blocks_k)


# --- the second reading ---------------------------------------------------------------------------


def stored(name: str, block: bytes) -> tuple[bytes, bytes, list[int]]:
    """(d, m, the 32 codes less their centre) of one block of ggml; m is empty where it has none."""
    d, rest = block[:2], block[2:]
    m = b""
    if name.endswith("_1"):
        m, rest = rest[:2], rest[2:]
    if name == "q8_0":
        return d, m, list(struct.unpack("32b", rest))
    fifth = 0
    if BITS[name] == 5:
        (fifth,) = struct.unpack("<I", rest[:4])
        rest = rest[4:]
    codes = [rest[j] & 15 if j < 16 else rest[j - 16] >> 4 for j in range(32)]
    return d, m, [c + 16 * (fifth >> j & 1) - CENTRE[name] for j, c in enumerate(codes)]


def k_of(t: int, i: int) -> int:
    """The k, of 16, of byte i in a word of lane 4g + t."""
    return 2 * t + (0, 8, 1, 9)[i]


def packed_tile(name: str, blocks: dict[tuple[int, int], tuple[bytes, bytes, list[int]]]) -> bytes:
    """The packed tile of the 16 x 4 blocks (row, block along K)."""
    out = bytearray()
    bits, rows, lanes = BITS[name], ("g", "g + 8"), [(g, t) for g in range(8) for t in range(4)]
    if bits == 8:
        for b in range(4):
            for g, t in lanes:
                for register in range(4):
                    codes = blocks[g + 8 * (register & 1), b][2]
                    sixteen = codes[16 * (register >> 1) :]
                    out += struct.pack("4b", *(sixteen[k_of(t, i)] for i in range(4)))
    else:
        for half in range(2):
            for g, t in lanes:
                for b in range(2):
                    for row in range(len(rows)):
                        codes = blocks[g + 8 * row, 2 * half + b][2]
                        for i in range(4):
                            low, high = codes[k_of(t, i)], codes[16 + k_of(t, i)]
                            if bits == 5:  # the lower four, the upper four
                                high = (high + CENTRE[name]) >> 1
                            out.append((low & 15) | (high & 15) << 4)
    if bits == 5:
        for half in range(2):
            for g, t in lanes:
                word = 0
                for b in range(2):
                    for row in range(len(rows)):
                        codes = blocks[g + 8 * row, 2 * half + b][2]
                        for i in range(4):
                            lowest = codes[16 + k_of(t, i)] & 1
                            highest = (codes[k_of(t, i)] + CENTRE[name]) >> 4
                            word |= (lowest | highest << 1) << (8 * i + 2 * (2 * b + row))
                out += struct.pack("<I", word)
    for field in range(2 if name.endswith("_1") else 1):
        for g in range(8):
            for row in range(len(rows)):
                for b in range(4):
                    out += blocks[g + 8 * row, b][field]
    return bytes(out)


def exponent(values: list[float]) -> int:
    """floor(log2) of the largest of them that is a number, or of the smallest float16."""
    return math.frexp(max([abs(v) for v in values if math.isfinite(v)] + [2.0**-24]))[1] - 1


def in_units_of_the_row(name: str, blocks: np.ndarray) -> tuple[np.ndarray, list[float]]:
    """Blocks whose d and m are d' and m', and the factor of each row."""
    blocks, factors = blocks.copy(), []
    for row in blocks:
        power = 15 - exponent(row["d"].tolist())
        with np.errstate(invalid="ignore"):
            if name.endswith("_1"):
                power = min(power, 24 - exponent(row["m"].tolist()))
                row["m"] = row["m"].astype(np.float64) * 2.0 ** (power - 9)
            row["d"] = row["d"].astype(np.float64) * 2.0**power
        factors.append(2.0 ** (24 - power))
    return blocks, factors


def expected(name: str, blocks: np.ndarray) -> bytes:
    """All packed tiles; beyond the matrix lie blocks of zero bytes."""
    n, blocks_k = blocks.shape
    size = FORMATS[name].block_bytes
    out = b""
    for group in range(0, n, TILE_GROUP * TILE_ROWS):
        places = itertools.product(range(0, blocks_k, BLOCKS), range(TILE_GROUP))
        for first, row_tile in places:
            row, parts = group + row_tile * TILE_ROWS, {}
            for r in range(TILE_ROWS):
                for b in range(BLOCKS):
                    inside = row + r < n and first + b < blocks_k
                    raw = blocks[row + r, first + b].tobytes() if inside else bytes(size)
                    parts[r, b] = stored(name, raw)
            out += packed_tile(name, parts)
    return out


@weight_format
@settings(max_examples=12, deadline=None)
@given(n=st.integers(1, 150), blocks_k=st.integers(1, 9), seed=st.integers(0, 99))
def test_every_byte_lies_where_the_docstring_says(
    name: str, n: int, blocks_k: int, seed: int
) -> None:
    blocks = any_blocks(name, n, blocks_k, seed)
    before = blocks.tobytes()
    packed, factors = tiles(blocks)
    assert packed.dtype == np.uint8
    assert packed.ndim == 1
    assert packed.flags.c_contiguous
    scaled, of_rows = in_units_of_the_row(name, blocks)
    assert packed.tobytes() == expected(name, scaled)
    assert factors.dtype == np.float32
    assert factors.shape == (-(-n // 128) * 128,)
    assert factors[:n].tolist() == of_rows
    assert blocks.tobytes() == before


@weight_format
def test_whole_records_take_the_bytes_of_ggml(name: str) -> None:
    """And every bit of a block is somewhere: two matrices never have the same tiles."""
    blocks = any_blocks(name, TILE_GROUP * TILE_ROWS, 3 * BLOCKS)
    packed, factors = tiles(blocks)
    of_codes = {"qs", "qh"} & set(blocks.dtype.names)
    spans = [blocks.dtype.fields[field] for field in of_codes]
    codes = {at + i for dtype, at in spans for i in range(dtype.itemsize)}
    assert packed.nbytes == blocks.nbytes == 24 * tile_format(name).tile_bytes
    bits = np.unpackbits(packed).sum()
    raw = blocks.view(np.uint8).reshape(blocks.size, -1)
    for byte in range(raw.shape[1]):
        raw[5, byte] ^= 16
        other, others = tiles(blocks)
        if byte in codes:
            assert np.unpackbits(other ^ packed).sum() == 1
        assert (other != packed).any() or (others != factors).any()
        raw[5, byte] ^= 16
    assert bits == np.unpackbits(tiles(blocks)[0]).sum()


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


# --- what a kernel reads of a packed tile ---------------------------------------------------------


@cache
def fragment_reader(name: str) -> Any:
    """kernel(packed, out[tile, half, lane, block, register]): one warp a packed tile."""
    form = tile_format(name)
    load, fragments, size = form.load, form.fragments, form.tile_bytes

    @cuda.jit
    def read(packed, out):
        lane, i = cuda.threadIdx.x, cuda.blockIdx.x
        for half in range(2):
            words = fragments(load(packed, i * size, lane, half))
            for r in range(8):
                out[i, half, lane, r // 4, r % 4] = words[r]

    return read


@weight_format
def test_fragments_are_the_codes(name: str) -> None:
    """Byte i of register r: row g + 8 (r & 1), k = 16 (r >> 1) + k_of(t, i), times code_scale."""
    form = tile_format(name)
    blocks = any_blocks(name, 2 * TILE_ROWS, 2 * BLOCKS)
    codes = FORMATS[name].codes(blocks) - CENTRE[name]
    packed = by_row_tile(tiles(blocks)[0], 2, form.tile_bytes)[:2].reshape(-1)
    out = np.zeros((4, 2, 32, 2, 4), np.uint32)
    simulate(fragment_reader(name), 4, 32, (packed, out))
    got = out.view(np.int8 if form.signed else np.uint8).reshape(*out.shape, 4).astype(int)
    for at in np.ndindex(got.shape):
        tile, half, lane, b, register, i = at
        g, t = lane // 4, lane % 4
        row = tile // 2 * TILE_ROWS + g + 8 * (register & 1)
        k = tile % 2 * TILE_K + 64 * half + 32 * b + 16 * (register >> 1) + k_of(t, i)
        assert got[at] == form.code_scale * codes[row, k], at


@weight_format
def test_the_parts_of_a_record(name: str) -> None:
    form = tile_format(name)
    codes = TILE_ROWS * TILE_K * (4 if BITS[name] < 8 else 8) // 8
    bits = TILE_ROWS * TILE_K // 8 if BITS[name] == 5 else 0
    assert form.scales_at == codes + bits
    assert form.minimum == name.endswith("_1")
    assert form.signed != form.minimum
    if bits:
        assert form.bits_at == codes
    if form.minimum:
        assert form.minima_at == form.scales_at + 128
    assert form.tile_bytes == form.scales_at + 128 * (1 + form.minimum)
    assert form.tile_bytes % 16 == 0, "every packed tile begins where 128-bit loads may"
    assert form.scales_at % 8 == 0, "four scales of a row are one 64-bit load"
