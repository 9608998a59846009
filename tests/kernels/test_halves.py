"""Operands of 16 bits: weights made of packed tiles in registers, activations rounded on the GPU.

The expectation is the float64 value of each weight from ggml's block, and `reference.Halves`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import uint8, uint32

from qformats import BLOCK, FORMATS, WEIGHT_FORMATS
from qformats.repack import HALF_SCALE, MINIMUM_SCALE, TILE_K, tiles
from reference import Bfloats, Halves, Problem, bfloat16_values
from reference.bfloat16 import bfloat16_bits
from reference.product import least_half
from steps.blocks.q8_1 import q8_1_blocks
from steps.compile.compiler import machine_code, signature_of
from steps.contract import Shape, array_dtype
from steps.driver.machines import Gpu, Simulator
from steps.kernels.parts.activations.gated import gated_grid, gated_to_rows
from steps.kernels.parts.activations.layouts import (
    GATED,
    all_float16_rows,
    decode,
    encode,
    float16_rows,
    float16_rows_of_many,
    gated_rows,
    int8_rows,
    reading,
    reading_of,
)
from steps.kernels.parts.activations.rows import (
    ROW_THREADS,
    row_loads,
    row_rounder,
)
from steps.kernels.parts.weights.codes import tile_format
from steps.registry import kernel_of
from tests.kernels.packed_tiles import (
    blocks_with,
    by_row_tile,
    exact_weights,
    half_reader,
    weights_in_registers,
)
from tests.kernels.passes import what_it_makes, writes_what_is_its_own

weight_format = pytest.mark.parametrize("name", WEIGHT_FORMATS)
MACHINES = [Simulator, pytest.param(Gpu, marks=pytest.mark.gpu)]


def fields(name: str, packed: np.ndarray, n: int, blocks_k: int) -> list[np.ndarray]:
    """d', and m' where there are minima, float16 [n, blocks_k] of packed tiles."""
    tile, k_tiles = tile_format(name), -(-blocks_k * BLOCK // TILE_K)
    by_record = by_row_tile(packed, k_tiles, tile.tile_bytes)
    found = []
    for at in (tile.scales_at, tile.minima_at)[: 1 + tile.minimum]:
        halves = np.ascontiguousarray(by_record[:, :, at : at + 128]).view(np.float16)
        halves = halves.reshape(-1, k_tiles, 8, 2, 4).transpose(0, 3, 2, 1, 4)
        found.append(halves.reshape(-1, k_tiles * 4)[:n, :blocks_k])
    return found


# --- the packed tiles -----------------------------------------------------------------------------


@weight_format
def test_scales_are_exact_and_the_largest_of_a_row_is_below_overflow(name: str) -> None:
    rng = np.random.default_rng(1)
    d = rng.standard_normal((37, 9)) * 2.0 ** rng.integers(-20, 14, (37, 9))
    m = rng.standard_normal((37, 9)) * 2.0 ** rng.integers(-20, 14, (37, 9))
    m[0], d[1], d[2], m[2], d[3], m[3] = 6e4, 2.0**-24, 65504, -65504, 0, 0
    m[4], d[4] = 6e4, 2.0**-24
    blocks = blocks_with(name, 37, 9, d, m)
    packed, factors = tiles(blocks)
    factors = factors[:37, None].astype(np.float64)
    assert (np.frexp(factors)[0] == 0.5).all(), "powers of two"
    scaled = fields(name, packed, 37, 9)
    assert (scaled[0].astype(np.float64) * factors * HALF_SCALE == blocks["d"]).all()
    top = np.abs(scaled[0].astype(np.float64)).max(axis=1)
    full = (top >= 2.0**15) & (top < 2.0**16)
    if "m" in blocks.dtype.names:
        off = np.abs(scaled[1] * factors * MINIMUM_SCALE - blocks["m"].astype(np.float64))
        assert (off <= factors * MINIMUM_SCALE * 2.0**-25).all()
        top_m = np.abs(scaled[1].astype(np.float64)).max(axis=1)
        full |= top_m >= 2.0**15
        assert not top[4] >= 2.0**15, "the minimum of 6e4 is what fills float16 there"
    assert (full == (np.arange(37) != 3)).all()


@weight_format
def test_what_is_no_number_stays_so_and_the_others_as_they_were(name: str) -> None:
    blocks = blocks_with(name, 18, 4, 0.25, 2.0)
    wanted = fields(name, tiles(blocks)[0], 18, 4)
    for field in {"d", "m"} & set(blocks.dtype.names):
        for value in (np.inf, -np.inf, np.nan):
            odd = blocks.copy()
            odd[field][3, 1] = value
            packed, factors = tiles(odd)
            assert (factors == tiles(blocks)[1]).all()
            for was, now in zip(wanted, fields(name, packed, 18, 4), strict=True):
                other = now != was
                assert np.count_nonzero(other) <= 1
                assert not np.isfinite(now[other]).any()


# --- what a kernel makes of them ------------------------------------------------------------------


@weight_format
def test_a_weight_is_rounded_once(name: str) -> None:
    """To the nearest float16 of the exact value, down to the smallest normal one; and scales of
    very different size in a row lose no more than `least_half` says."""
    rng = np.random.default_rng(2)
    d = rng.standard_normal((32, 8)) * 2.0 ** rng.integers(-3, 1, (32, 8))
    blocks = blocks_with(name, 32, 8, d, -d * 8)
    got, factors = weights_in_registers(blocks)
    exact = exact_weights(blocks) / factors[:, None]
    normal = np.abs(exact) >= 2.0**-13
    np.testing.assert_array_equal(got[normal], exact[normal].astype(np.float16))
    assert np.count_nonzero(normal) > 0.7 * got.size

    d *= 2.0 ** rng.integers(-20, 1, (32, 8))
    blocks = blocks_with(name, 32, 8, d, rng.standard_normal((32, 8)) * 2.0 ** rng.integers(-9, 9))
    got, factors = weights_in_registers(blocks)
    exact, least = exact_weights(blocks), least_half(blocks)[:, None]
    off = np.abs(got * factors[:, None].astype(np.float64) - exact)
    assert (off <= 2.0**-11 * np.abs(exact) + least).all()


@weight_format
def test_powers_of_two_are_exact(name: str) -> None:
    """What the integer problems rest on."""
    blocks = Problem(1, 32, 256, name, "integer").blocks
    got, factors = weights_in_registers(blocks)
    np.testing.assert_array_equal(got * factors[:, None], exact_weights(blocks))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("q4_0", "q5_1", "q8_0", "e2m1"),
        *(pytest.param(one, marks=pytest.mark.every) for one in ("q4_1", "q5_0")),
    ],
)
def test_instructions_of_a_fragment(name: str) -> None:
    """For 64 weights of a lane: LOP3 and HFMA2 one for two weights, LOP3 a half more of 5 bits and
    of E2M1."""
    reads = uint8[::1], uint32[:, :, :, :, ::1]
    code = machine_code(half_reader(name), reads, "sm_90a")
    if name in WEIGHT_FORMATS:
        bits = FORMATS[name].bits
        rows_blocks = 8  # each with a splat of d, and two products or one and the minimum
        assert code.count("LOP3") <= (48 if bits == 5 else 32) + 3
        assert code.count("HFMA2", "HMUL2") <= 32 + 2 * rows_blocks + 4
        assert code.count("PRMT") <= 3 * rows_blocks
        assert code.count("SHF") + code.count("IMAD.SHL") <= {4: 8, 5: 24, 8: 16}[bits] + 5
        assert code.stack_bytes == code.spill_store_bytes == 0
    if name == "e2m1":
        assert code.count("LOP3") <= 48 + 3
        assert code.count("PRMT") <= 8  # scales


# --- activations ----------------------------------------------------------------------------------


def rounded(machine: Any, a: np.ndarray, offset: int = 0) -> tuple[np.ndarray, ...]:
    return what_it_makes(float16_rows, "rows", machine, a, offset)


def rounded_too(machine: Any, a: np.ndarray, offset: int = 0) -> tuple[np.ndarray, ...]:
    return what_it_makes(all_float16_rows, "rows", machine, a, offset)


def odd_rows(m: int, k: int, seed: int = 0) -> np.ndarray:
    """Of every size that float32 has, one of zeros."""
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((m, k), dtype=np.float32)
    with np.errstate(under="ignore"):
        a *= np.float32(2.0) ** rng.integers(-148, 120, (m, 1)).astype(np.float32)
    a[m // 2] = 0
    return a


def any_halves(m: int, k: int, seed: int = 0) -> np.ndarray:
    """Any 16 bits; in row 0 zeros of both signs, the smallest subnormal, infinities and a NaN."""
    a = np.random.default_rng(seed).integers(0, 1 << 16, (m, k), np.uint16)
    a[0, 1:7] = 0, 0x8000, 1, 0x7C00, 0xFC00, 0x7E01
    return a.view(np.float16)


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
@pytest.mark.parametrize("shape", [(1, 32), (5, 160), (9, 96), (3, 4192), (1, 28704)])
@pytest.mark.parametrize("machine", MACHINES)
def test_activations_are_the_recipe_bit_for_bit(
    machine: Any, shape: tuple[int, int], offset: int
) -> None:
    a = odd_rows(*shape, seed=offset)
    made, factors = rounded(machine(), a, offset)
    got, want = decode("rows", (made, factors), *shape), Halves.of_values(a)
    assert isinstance(got, Halves)
    np.testing.assert_array_equal(got.h, want.h)
    np.testing.assert_array_equal(got.factor, want.factor)
    np.testing.assert_array_equal(made, encode("rows", want)[0])


@pytest.mark.parametrize("offset", [0, 8])
@pytest.mark.parametrize("shape", [(5, 160), (3, 4192)])
@pytest.mark.parametrize("machine", MACHINES)
def test_bfloat16_becomes_float16_in_a_power_of_two_of_its_row(
    machine: Any, shape: tuple[int, int], offset: int
) -> None:
    """Nothing is lost, of rows of any size, but far below a row's largest."""
    bits = bfloat16_bits(odd_rows(*shape, seed=offset))
    made = decode("rows", rounded_too(machine(), bits, offset), *shape)
    a = bfloat16_values(bits)
    want = Halves.of_values(a)
    assert isinstance(made, Halves)
    np.testing.assert_array_equal(made.h, want.h)
    np.testing.assert_array_equal(made.factor, want.factor)
    lost = np.abs(made.values() - a.astype(np.float64))
    largest = np.abs(a).max(axis=1, keepdims=True)
    assert (lost <= 2.0**-38 * largest).all()
    normal = np.abs(a) >= 2.0**-30 * np.maximum(largest, 2.0**-112)
    assert normal.any()
    assert (lost[normal] == 0).all()


def test_float16_takes_no_pass() -> None:
    a = any_halves(9, 160)
    made = all_float16_rows(a, Simulator())
    assert (made.launches, made.layout) == ((), "rows")
    assert made.arrays[0] is a


@pytest.mark.parametrize("dtype", [np.float16, np.uint16])
def test_what_has_16_bits_is_read_as_it_is(dtype: Any) -> None:
    """Float16 and bfloat16, in natural order: no pass, and nothing to multiply by."""
    a = any_halves(9, 160).view(dtype)
    made = float16_rows(a, Simulator())
    assert made.launches == ()
    assert len(made.arrays) == 1
    assert made.arrays[0] is a
    assert made.layout == "rows"
    got = decode("rows", made.arrays, 9, 160)
    if dtype is np.float16:
        np.testing.assert_array_equal(got.h.view(np.uint16), a.view(np.uint16))
        np.testing.assert_array_equal(got.factor, np.ones(9, np.float32))
    else:
        np.testing.assert_array_equal(got.b, bfloat16_values(a))
        numbers = Bfloats(np.where(np.isnan(got.b), 1, got.b))
        (again,) = encode("rows", numbers)
        np.testing.assert_array_equal(bfloat16_values(again), numbers.b)


def test_which_passes_overlap() -> None:
    """Of bfloat16 with a row for each 32 K, but not where the product rounds most rows itself."""
    for m, k, dtype, overlap in (
        (128, 4096, np.uint16, True), (127, 4096, np.uint16, False), (448, 14336, np.uint16, True),
        (512, 4096, np.float32, False), (2305, 4096, np.uint16, False),
    ):  # fmt: skip
        (launch,) = float16_rows_of_many(np.zeros((m, k), dtype), Simulator()).launches
        assert launch.overlap == overlap


def test_how_rows_are_read() -> None:
    makes = float16_rows, all_float16_rows, float16_rows_of_many
    for source in ("float32", "float16", "bfloat16"):
        for make in makes:
            assert reading(make, source) == (make, source, 1, source)
    for make in makes:
        assert reading(make, GATED) == (gated_rows, GATED, 2, "float16")


def test_bfloat16_is_rounded_before_a_decode_product_of_many_weights() -> None:
    """But not for weights of four bits without minima, nor where rows have the same bits at every
    M."""
    for fmt, m, n, k, invariant, make in (
        ("q5_1", 16, 4096, 14336, False, all_float16_rows),
        ("q8_0", 9, 6144, 4096, False, all_float16_rows),
        ("q6_k", 9, 4096, 8224, False, all_float16_rows),
        ("q4_k", 32, 14336, 4096, False, all_float16_rows),
        ("q5_1", 8, 4096, 14336, False, float16_rows),
        ("q5_1", 16, 4096, 8192, False, float16_rows),
        ("q5_1", 32, 4096, 4096, False, all_float16_rows),
        ("q5_1", 32, 2048, 2048, False, float16_rows),
        ("q4_0", 16, 4096, 14336, False, float16_rows),
        ("mxfp4", 16, 4096, 14336, False, float16_rows),
        ("q5_1", 16, 4096, 14336, True, float16_rows),
    ):
        shape = Shape(m, n, k, invariant)
        assert reading_of(kernel_of(18), "bfloat16", "A16", fmt, shape).make is make


@pytest.mark.parametrize("shape", [(1, 32), (9, 160), (3, 4128)])
@pytest.mark.parametrize("machine", MACHINES)
def test_gates_are_computed_on_the_way(machine: Any, shape: tuple[int, int]) -> None:
    """silu(gate) * up to a float32 and then to a float16, so half a last place and a little more;
    what is no number spoils itself only."""
    m, k = shape
    y = np.random.default_rng(k).standard_normal((m, 2 * k)).astype(np.float16) * np.float16(4)
    y[0, 1:8] = 0, -0.0, 2**-24, 65504, -65504, 88, -88
    y[0, 8:13], y[0, k + 10] = (np.nan, np.inf, np.inf, 3, -np.inf), 0
    y[0, k + 11] = np.nan
    (got,) = what_it_makes(gated_rows, "rows", machine(), y, 0)
    with np.errstate(over="ignore", invalid="ignore"):
        gate, up = y[:, :k].astype(np.float64), y[:, k:].astype(np.float64)
        exact = gate / (1 + np.exp(-gate)) * up
        exact[np.abs(exact) >= 65520] *= np.inf
    finite = np.isfinite(exact)
    assert 5 <= np.count_nonzero(~finite) <= 6
    np.testing.assert_array_equal(np.isnan(got), np.isnan(exact))
    np.testing.assert_array_equal(got[~finite], exact[~finite])
    place = np.maximum(2.0 ** (np.frexp(exact[finite])[1] - 11), 2.0**-24)
    assert (np.abs(got[finite] - exact[finite]) <= 0.51 * place).all()


def test_gates_are_read_by_what_has_that_pass() -> None:
    assert reading(int8_rows, GATED) == (int8_rows, "float16", 1, "float16")
    assert reading(q8_1_blocks, GATED) == (q8_1_blocks, "float32", 1, "float32")


@pytest.mark.parametrize("offset", [0, 8])
@pytest.mark.parametrize("machine", MACHINES)
def test_float16_activations_are_read_as_what_they_are(machine: Any, offset: int) -> None:
    """The bits that the same values in float32 lead to; subnormals, zeros and no numbers too."""
    a = any_halves(9, 160, seed=offset)
    a = np.where(np.isfinite(a), a, np.float16(0.1))
    a[2] *= np.float16(2**-14)
    a[5] = 0
    a[6, 3], a[7, 100] = np.nan, -np.inf
    on = machine()
    assert reading(int8_rows, "float16") == (int8_rows, "float16", 1, "float16")
    got = what_it_makes(int8_rows, "tokens", on, a, offset)
    want = what_it_makes(int8_rows, "tokens", on, a.astype(np.float32), 0)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("offset", [0, 8])
@pytest.mark.parametrize("machine", MACHINES)
def test_bfloat16_activations_are_read_as_what_they_are(machine: Any, offset: int) -> None:
    """The same: values of any 16 bits, beyond what float16 has too."""
    a = np.random.default_rng(offset).integers(0, 1 << 16, (9, 160), np.uint16)
    values = (a.astype(np.uint32) << 16).view(np.float32)
    a[~np.isfinite(values)] = 0x3F80
    a[5], a[6, 3], a[7, 100] = 0, 0x7FC0, 0xFF80
    values = (a.astype(np.uint32) << 16).view(np.float32)
    assert np.isnan(values[6, 3])
    assert np.isinf(values[7, 100])
    on = machine()
    assert reading(int8_rows, "bfloat16") == (int8_rows, "bfloat16", 1, "bfloat16")
    got = what_it_makes(int8_rows, "tokens", on, a, offset)
    want = what_it_makes(int8_rows, "tokens", on, values, 0)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("machine", MACHINES)
def test_what_is_no_number_spoils_its_own_row_only(machine: Any) -> None:
    a = odd_rows(6, 64)
    want = Halves.of_values(a)
    a[1, 5], a[2, 40], a[4, 0] = np.nan, np.inf, -np.inf
    a[4, 1] = np.nan
    got = decode("rows", rounded(machine(), a), 6, 64)
    for m in range(6):
        if m in (1, 2, 4):
            np.testing.assert_array_equal(np.isfinite(got.h[m]), np.isfinite(a[m]))
            assert np.isfinite(got.factor[m])
        else:
            np.testing.assert_array_equal(got.h[m], want.h[m])
            assert got.factor[m] == want.factor[m]


def test_the_pass_writes_its_units_and_nothing_else() -> None:
    a = odd_rows(7, 96)
    for shape in ((1, 32), (7, 96), (3, 4128)):
        a = odd_rows(*shape)
        wanted = encode("rows", Halves.of_values(a))
        writes_what_is_its_own(row_rounder(row_loads(shape[1], "float32")), a, *wanted)


def test_layouts_are_made_of_what_they_hold() -> None:
    halves = Halves.of_values(odd_rows(2, 32))
    with pytest.raises(ValueError, match="layout 'k_outermost' are not made of Halves"):
        encode("k_outermost", halves)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "k", "held", "dtype", "blocks"),
    [
        (float16_rows, 4096, 4, "float32", 4),
        (float16_rows, 14336, 14, "float32", 2),
        pytest.param(float16_rows, 57344, 15, "float32", 2, marks=pytest.mark.every),
        (int8_rows, 4096, 2, "float16", 6),
        pytest.param(int8_rows, 14336, 7, "float16", 4, marks=pytest.mark.every),
        (int8_rows, 14336, 7, "bfloat16", 4),
    ],
)
def test_machine_code_of_the_pass(make: Any, k: int, held: int, dtype: str, blocks: int) -> None:
    """All loads that a lane holds before the first is looked at; so many blocks fit an SM. A row
    that lanes do not hold is read twice from where they end."""
    assert row_loads(k, dtype) == held
    (launch,) = make(np.zeros((4, k), array_dtype(dtype)), Simulator()).launches
    code = machine_code(launch.kernel, signature_of(launch.args), "sm_90a")
    assert (code.stack_bytes, code.spill_store_bytes, code.spill_load_bytes) == (0, 0, 0)
    assert code.registers * ROW_THREADS * blocks <= 65536
    assert code.count("F2FP") >= 2 or make is int8_rows
    assert code.count("ACQBULK") == code.count("PREEXIT") == 1
    loads = [i for i, line in enumerate(code.sass.splitlines()) if "LDG.E.128" in line]
    assert len(loads) == held + 2 * (k > 14336)
    assert loads[held - 1] - loads[0] < 12 * held, "one behind the other"


def test_machine_code_of_the_gated_pass() -> None:
    """Both loads before the store, of 16 bytes each; an SM is full of such threads."""
    (launch,) = gated_rows(np.zeros((4, 8192), np.float16), Simulator()).launches
    assert (launch.kernel, launch.block) == (gated_to_rows, (256,))
    assert gated_grid(1 << 20, 32)[0] == (1 << 20, 1), "more rows than y has"
    code = machine_code(launch.kernel, signature_of(launch.args), "sm_90a")
    assert (code.stack_bytes, code.spill_store_bytes, code.spill_load_bytes) == (0, 0, 0)
    assert code.registers * 2048 <= 65536
    assert code.count("BAR", "LDS", "STS", "LDL", "STL") == 0
    assert code.count("LDG.E.128") == 2
    assert code.count("STG.E.128") == 1
    assert code.count("ACQBULK") == code.count("PREEXIT") == 1
