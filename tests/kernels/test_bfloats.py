"""bfloat16 weights made of packed tiles in registers: the float16 ones, rounded once more."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from numba import cuda, uint8, uint32

from qformats import FILE_FORMATS, FORMATS, WEIGHT_FORMATS, format_of
from qformats.repack import TILE_K, TILE_ROWS, tiles
from qformats.storage import storage_format
from reference import Problem, bfloat16_values
from reference.bfloat16 import rounded_to_bfloat16
from reference.product import least_half
from steps.compile.compiler import machine_code
from steps.instructions import store_u32x4
from steps.kernels.parts.weights.bfloats import float_format, halves_to_bfloats
from steps.simulator.launch import simulate
from tests.kernels.packed_tiles import by_row_tile
from tests.kernels.test_halves import blocks_with, exact_weights

KINDS = "float16", "bfloat16"


@cache
def fragment_reader(name: str, kind: str) -> Any:
    """kernel(packed, out[tile, half, step, lane, register]): one warp a packed tile."""
    form = float_format(name, kind)
    words, scales, size = form.words, form.scales, form.tile_bytes
    multipliers, fragments = form.multipliers, form.fragments

    @cuda.jit(device=True, forceinline=True)
    def put(out, i, half, step, lane, f):
        store_u32x4(out, (((i * 2 + half) * 4 + step) * 32 + lane) * 4, f[0], f[1], f[2], f[3])

    @cuda.jit
    def read(packed, out):
        lane, i = cuda.threadIdx.x, cuda.blockIdx.x
        for half in range(2):
            w, s = words(packed, i * size, lane, half), scales(packed, i * size, lane, half)
            first, second = multipliers(s, 0), multipliers(s, 1)
            put(out, i, half, 0, lane, fragments(w, 0, first))
            put(out, i, half, 1, lane, fragments(w, 1, first))
            put(out, i, half, 2, lane, fragments(w, 2, second))
            put(out, i, half, 3, lane, fragments(w, 3, second))

    return read


def registers(blocks: np.ndarray, stored: str, kind: str) -> np.ndarray:
    """uint16 [row tile * K tile, half, step, lane, register, half of it] of whole packed tiles."""
    k = blocks.shape[1] * format_of(blocks).elements
    rows, k_tiles = len(blocks) // TILE_ROWS, k // TILE_K
    size = float_format(stored, kind).tile_bytes
    packed = by_row_tile(tiles(blocks)[0], k_tiles, size)[:rows].reshape(-1)
    out = np.zeros((rows * k_tiles, 2, 4, 32, 4), np.uint32)
    simulate(fragment_reader(stored, kind), len(out), 32, (packed, out))
    return out.view(np.uint16).reshape(*out.shape, 2)


@pytest.mark.parametrize("name", [*WEIGHT_FORMATS, *FILE_FORMATS])
def test_they_are_the_float16_ones_rounded_once_more(name: str) -> None:
    blocks = Problem(1, 32, 256, name, "normal").blocks
    stored = storage_format(FORMATS[name]).name
    halves, bfloats = (registers(blocks, stored, kind) for kind in KINDS)
    wanted = rounded_to_bfloat16(halves.view(np.float16).astype(np.float32))
    np.testing.assert_array_equal(bfloat16_values(bfloats), wanted)
    assert np.abs(wanted).max() > 0


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_a_weight_is_off_by_what_the_check_allows(name: str) -> None:
    """Scales of very different size in a row, too."""
    rng = np.random.default_rng(2)
    d = rng.standard_normal((32, 8)) * 2.0 ** rng.integers(-20, 1, (32, 8))
    blocks = blocks_with(name, 32, 8, d, rng.standard_normal((32, 8)) * 2.0 ** rng.integers(-9, 9))
    parts = bfloat16_values(registers(blocks, name, "bfloat16")).astype(np.float64)
    # row tile, K tile, half, step, g, t, eight, row g or g + 8, half of the register
    parts = parts.reshape(2, 2, 2, 4, 8, 4, 2, 2, 2)
    got = parts.transpose(0, 7, 4, 1, 2, 3, 6, 5, 8).reshape(32, 256)
    exact, least = exact_weights(blocks), least_half(blocks)[:, None]
    off = np.abs(got * tiles(blocks)[1][:32, None] - exact)
    relative = (1 + 2.0**-8) * (1 + 2.0**-11) - 1
    assert (off <= relative * np.abs(exact) + (1 + 2.0**-8) * least).all()
    assert off.max() > 2.0**-10 * np.abs(exact).max(), "they are no float16"


def test_every_float16_becomes_the_nearest_bfloat16() -> None:
    @cuda.jit
    def convert(x, out):
        i = cuda.grid(1)
        out[i] = halves_to_bfloats(x[i])

    halves = np.arange(1 << 16, dtype=np.uint16)
    out = np.zeros(1 << 15, np.uint32)
    simulate(convert, 128, 256, (halves.view(np.uint32), out))
    values = halves.view(np.float16).astype(np.float32)
    got, wanted = bfloat16_values(out.view(np.uint16)), rounded_to_bfloat16(values)
    np.testing.assert_array_equal(got, wanted)  # NaN for NaN


@pytest.mark.slow
@pytest.mark.parametrize("name", ["q4_0", "q5_1", "q8_0", "c5"])
def test_three_instructions_more_for_two_weights(name: str) -> None:
    reads = uint8[::1], uint32[:, :, :, :, ::1]
    half, bfloat = (machine_code(fragment_reader(name, kind), reads, "sm_90a") for kind in KINDS)
    assert bfloat.count("HADD2.F32") == 64
    assert bfloat.count("F2FP.BF16") == 32
    for opcode in ("LOP3", "HFMA2", "HMUL2", "PRMT", "SHF"):
        assert bfloat.count(opcode) <= half.count(opcode) + 2
    assert bfloat.stack_bytes == bfloat.spill_store_bytes == 0
