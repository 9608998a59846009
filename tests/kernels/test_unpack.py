"""What kernels read of a block against what the codec reads: any bytes, any place."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import cuda

from qformats import BLOCK, FORMATS, WEIGHT_FORMATS
from steps.blocks.codes import b1, b2, b4, device_format, safe_load
from steps.simulator.launch import Misaligned, simulate

BLOCKS = 3  # so that a block lies at each alignment its size allows


@cache
def reader(name: str) -> Any:
    """kernel(bytes, at, code[32], codes[32], words[32 bytes], floats[2])"""
    fields = device_format(name)
    code, codes, words = fields.code, fields.codes, fields.words
    scale, offset = fields.scale, fields.offset

    @cuda.jit
    def read(w, at, by_code, by_pair, by_word, floats):
        for j in range(BLOCK):
            by_code[j] = code(w, at, j)
        for j in range(16):
            by_pair[j], by_pair[16 + j] = codes(w, at, j)
        for i in range(4):
            by_word[i], by_word[4 + i] = words(w, at, i)
        floats[0] = scale(w, at)
        floats[1] = offset(w, at)

    return read


def blocks_of(name: str, raw: bytes) -> np.ndarray:
    """Blocks of any bytes, but with finite scales (a NaN would equal nothing)."""
    blocks = np.frombuffer(raw, FORMATS[name].dtype).copy()
    for field in ("d", "m"):
        if field in blocks.dtype.names:
            blocks[field] = np.nan_to_num(blocks[field], nan=1.5, posinf=2.0, neginf=-2.0)
    return blocks


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_kernels_read_what_the_codec_reads(name: str, data: st.DataObject) -> None:
    fmt = FORMATS[name]
    size = BLOCKS * fmt.block_bytes
    blocks = blocks_of(name, data.draw(st.binary(min_size=size, max_size=size)))
    block = data.draw(st.integers(0, BLOCKS - 1))
    out = [np.zeros(BLOCK, np.int32), np.zeros(BLOCK, np.int32), np.zeros(8, np.int32)]
    floats = np.zeros(2, np.float32)
    simulate(reader(name), 1, 1, (blocks.view(np.uint8), block * fmt.block_bytes, *out, floats))
    want = fmt.codes(blocks[block : block + 1]).reshape(BLOCK)
    np.testing.assert_array_equal(out[0], want)
    np.testing.assert_array_equal(out[1], want)
    np.testing.assert_array_equal(out[2].view(np.int8 if fmt.bits == 8 else np.uint8), want)
    assert floats[0] == fmt.scale(blocks)[block]
    assert floats[1] == fmt.offset(blocks)[block]


@cuda.jit
def load_words(w, at, out):
    out[0] = b1(w, at)
    out[1] = b2(w, at)
    out[2] = b4(w, at)


@given(raw=st.binary(min_size=12, max_size=12), at=st.integers(0, 8))
@settings(max_examples=40, deadline=None)
def test_b1_b2_b4_read_the_same_word_where_they_may(raw: bytes, at: int) -> None:
    """b1 anywhere, b2 at even bytes, b4 at multiples of four; elsewhere the simulator traps."""
    w, out = np.frombuffer(raw, np.uint8).copy(), np.zeros(3, np.int32)
    word = int.from_bytes(raw[at : at + 4], "little", signed=True)
    if at % 4:
        with pytest.raises(Misaligned):
            simulate(load_words, 1, 1, (w, at, out))
    else:
        simulate(load_words, 1, 1, (w, at, out))
    right = {0: 3, 2: 2}.get(at % 4, 1)  # how many of the three loads were aligned
    assert out[:right].tolist() == [word] * right


def test_the_safe_load_of_each_field() -> None:
    chosen = {
        (name, field): safe_load(name, field).py_func.__name__
        for name in WEIGHT_FORMATS
        for field in ("qs", "qh")
        if field in FORMATS[name].dtype.names
    }
    assert chosen == {
        ("q4_0", "qs"): "b2",
        ("q4_1", "qs"): "b4",
        ("q5_0", "qs"): "b2",
        ("q5_0", "qh"): "b2",
        ("q5_1", "qs"): "b4",
        ("q5_1", "qh"): "b4",
        ("q8_0", "qs"): "b2",
    }
