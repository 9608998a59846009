"""int8 operands: weights requantized to one scale a row, made of records in registers; activations
with one scale a token, made on the GPU; and the verdict on their product.

The expectation is worked out here, from ggml's blocks and from float32 A, in float64.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from numba import cuda, uint8, uint32

from qformats import BLOCK, FORMATS, WEIGHT_FORMATS, quantize
from qformats.repack import TILE_K, TILE_ROWS, byte_tiles, byte_weights
from reference import GOLDEN, Problem, Tokens, check, nmse, same_operands
from reference.recipes import complaint
from steps.compile.compiler import machine_code, signature_of
from steps.driver.machines import Gpu, Simulator
from steps.instructions import store_u32x4
from steps.kernels.parts.activations.layouts import decode, encode, int8_rows
from steps.kernels.parts.activations.rows import token_quantizer
from steps.kernels.parts.weights.codes import tile_format
from steps.kernels.parts.weights.int8 import ByteFormat, byte_format
from steps.simulator.launch import simulate
from tests.formats.test_file_formats import random_blocks
from tests.kernels.packed_tiles import blocks_with, by_row_tile, exact_weights
from tests.kernels.passes import what_it_makes, writes_what_is_its_own

weight_format = pytest.mark.parametrize("name", WEIGHT_FORMATS)
READS = uint8[::1], uint32[:, :, :, :, ::1]
MACHINES = [Simulator, pytest.param(Gpu, marks=pytest.mark.gpu)]


# --- requantized weights --------------------------------------------------------------------------


@weight_format
def test_every_weight_is_within_one_step_of_what_it_was(name: str) -> None:
    """Half a step for the last rounding, and as much for those of k or of m'."""
    for seed, spread in enumerate((0, 2, 9)):
        rng = np.random.default_rng(seed)
        d = rng.standard_normal((32, 9)) * 2.0 ** -rng.integers(0, spread + 1, (32, 9))
        blocks = blocks_with(name, 32, 9, d, -d * rng.uniform(0, 17, d.shape))
        w, factor = byte_weights(blocks)
        assert (w.dtype, w.shape) == (np.int8, (32, 9 * BLOCK))
        assert (factor.dtype, factor.shape) == (np.float32, (32,))
        exact = exact_weights(blocks)
        off = np.abs(w * factor.astype(np.float64)[:, None] - exact) / factor[:, None]
        assert off.max() <= (0.5 if name == "q8_0" else 1.0) + 1e-4
        assert np.sqrt((off**2).mean()) < 0.36, "about 1/12 of a squared step each"


@weight_format
def test_the_factor_is_the_least_that_the_codes_allow(name: str) -> None:
    """127 of them reach the largest weight that the formats' codes could stand for."""
    blocks = random_blocks(name, 120, finite=True).reshape(20, 6)
    blocks["d"] = np.random.default_rng(0).uniform(-1, 1, (20, 6))
    _, factor = byte_weights(blocks)
    d = blocks["d"].astype(np.float64)
    if name == "q8_0":
        w = exact_weights(blocks)
        reach = np.maximum(w.max(axis=1), w.min(axis=1) * -127 / 128)
    elif name in ("q4_0", "q5_0"):
        reach = np.abs(d).max(axis=1) * {"q4_0": 8, "q5_0": 16}[name]
    else:
        m, top = blocks["m"].astype(np.float64), {"q4_1": 15, "q5_1": 31}[name]
        reach = np.maximum(np.abs(m), np.abs(m + top * d)).max(axis=1)
    np.testing.assert_allclose(factor, reach / 127, rtol=1e-7)


@weight_format
def test_what_fits_is_kept_as_it_is(name: str) -> None:
    """The integer problems, but for Q8_0 blocks whose neighbours have twice their scale."""
    blocks = Problem(1, 40, 256, name, "integer").blocks
    w, factor = byte_weights(blocks)
    assert (np.frexp(factor)[0] == 0.5).all(), "powers of two"
    got, exact = w * factor.astype(np.float64)[:, None], exact_weights(blocks)
    if name == "q8_0":
        large = np.repeat(blocks["d"] == blocks["d"].max(), BLOCK, axis=1)
        got, exact = got[large], exact[large]
    np.testing.assert_array_equal(got, exact)


@weight_format
def test_rows_without_a_number_or_without_a_weight(name: str) -> None:
    blocks = blocks_with(name, 6, 3, 0.5, 1.0)
    want, factors = byte_weights(blocks)
    blocks["d"][1, 2], blocks["d"][2, 0], blocks["d"][4] = np.nan, -np.inf, 0
    if "m" in blocks.dtype.names:
        blocks["m"][4] = 0
    w, factor = byte_weights(blocks)
    assert not np.isfinite(factor[[1, 2]]).any()
    assert not w[[1, 2, 4]].any()
    assert np.isfinite(factor[4])
    for other in (0, 3, 5):
        np.testing.assert_array_equal(w[other], want[other])
        assert factor[other] == factors[other]


def test_what_is_refused() -> None:
    for function in (byte_tiles, byte_weights):
        with pytest.raises(ValueError, match=rf"{function.__name__} takes a matrix .* got 1 dim"):
            function(random_blocks("q4_0", 6, finite=True).reshape(3, 2)[0])
        with pytest.raises(TypeError, match="these are q8_1"):
            function(np.zeros((2, 2), FORMATS["q8_1"].dtype))


# --- what a kernel makes of them ------------------------------------------------------------------


@cache
def byte_reader(form: ByteFormat) -> Any:
    """kernel(records, out[record, block, lane, register]): one warp a record."""
    words, scales, size, fragments = form.words, form.scales, form.tile_bytes, form.fragments

    @cuda.jit
    def read(records, out):
        lane, i = cuda.threadIdx.x, cuda.blockIdx.x
        for half in range(2):
            w, s = words(records, i * size, lane, half), scales(records, i * size, lane, half)
            f, g = fragments(w, s, 0), fragments(w, s, 1)
            at = ((4 * i + 2 * half) * 32 + lane) * 4
            store_u32x4(out, at, f[0], f[1], f[2], f[3])
            store_u32x4(out, at + 128, g[0], g[1], g[2], g[3])

    return read


@weight_format
def test_a_kernel_makes_the_very_bytes_of_the_recipe(name: str) -> None:
    """Every code with scales of every size, ties of the rounding among them."""
    rng = np.random.default_rng(5)
    for n, blocks_k, d in (
        (32, 8, rng.standard_normal((32, 8)) * 2.0 ** -rng.integers(0, 12, (32, 8))),
        (20, 5, rng.integers(-9, 9, (20, 5)) / 8.0),
    ):
        blocks = blocks_with(name, n, blocks_k, d, rng.standard_normal(d.shape))
        want, _ = byte_weights(blocks)
        deep, rows = -(-blocks_k // 4), -(-n // TILE_ROWS)
        records, factors = byte_tiles(blocks)
        np.testing.assert_array_equal(factors[:n], byte_weights(blocks)[1])
        records = by_row_tile(records, deep, byte_format(name).tile_bytes)[:rows].reshape(-1)
        out = np.zeros((rows * deep, 4, 32, 4), np.uint32)
        simulate(byte_reader(byte_format(name)), len(out), 32, (records, out))
        # row tile, K tile, block, g, t, upper half of the block, row g or g + 8, byte
        parts = out.view(np.int8).reshape(rows, deep, 4, 8, 4, 2, 2, 4)
        got = parts.transpose(0, 6, 3, 1, 2, 5, 4, 7).reshape(rows * TILE_ROWS, deep * TILE_K)
        np.testing.assert_array_equal(got[:n, : blocks_k * BLOCK], want)
        assert not got[n:].any()
        assert not got[:, blocks_k * BLOCK :].any()


@pytest.mark.slow
@weight_format
def test_instructions_of_64_weights(name: str) -> None:
    """Of a lane, in a whole packed tile: 11 for eight codes (15 of five bits), and for a word of
    two scales one (two in formats without minima)."""
    code = machine_code(byte_reader(byte_format(name)), READS, "sm_90a")
    bits, words = FORMATS[name].bits, 8
    made, of_scales = bits < 8, 4 if tile_format(name).minimum else 8
    assert code.count("LOP3") <= {4: 32, 5: 48, 8: 16}[bits] + 6
    assert code.count("HFMA2", "HMUL2") <= made * (4 * words + of_scales) + 4  # as moves
    assert code.count("PRMT") <= made * 2 * words
    shifts = made * (words if bits == 4 else 2 * words + words)
    assert code.count("SHF", "IMAD.SHL", "IMAD.U32") <= shifts + 6
    assert code.stack_bytes == code.spill_store_bytes == 0


# --- activations ----------------------------------------------------------------------------------


def quantized(machine: Any, a: np.ndarray, offset: int = 0) -> tuple[np.ndarray, ...]:
    return what_it_makes(int8_rows, "tokens", machine, a, offset)


def odd_rows(m: int, k: int, seed: int = 0) -> np.ndarray:
    """Of every size that has a scale in float32, one of zeros."""
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((m, k), dtype=np.float32)
    a *= np.float32(2.0) ** rng.integers(-115, 120, (m, 1)).astype(np.float32)
    a[m // 2] = 0
    return a


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
@pytest.mark.parametrize("shape", [(1, 32), (5, 160), (9, 96), (3, 4192)])
@pytest.mark.parametrize("machine", MACHINES)
def test_activations_are_the_recipe_bit_for_bit(
    machine: Any, shape: tuple[int, int], offset: int
) -> None:
    a = odd_rows(*shape, seed=offset)
    got, want = decode("tokens", quantized(machine(), a, offset), *shape), Tokens.of_values(a)
    assert isinstance(got, Tokens)
    np.testing.assert_array_equal(got.q, want.q)
    np.testing.assert_array_equal(got.d, want.d)
    right = np.rint(a / np.where(want.d == 0, 1, want.d)[:, None].astype(np.float64))
    assert (np.abs(got.q - right) <= 1).all()
    assert (np.abs(got.q).max(axis=1) == np.where(a.any(axis=1), 127, 0)).all()


@pytest.mark.parametrize("machine", MACHINES)
def test_what_is_no_number_spoils_its_own_row_only(machine: Any) -> None:
    a = odd_rows(6, 64)
    want = Tokens.of_values(a)
    a[1, 5], a[2, 40], a[4, 0] = np.nan, np.inf, -np.inf
    a[4, 1], a[5] = np.nan, 1e-41
    got = decode("tokens", quantized(machine(), a), 6, 64)
    assert not np.isfinite(got.d[[1, 2, 4]]).any()
    assert not got.q[[1, 2, 4]].any()
    assert not got.q[5].any(), "its scale has no inverse"
    for m in (0, 3):
        np.testing.assert_array_equal(got.q[m], want.q[m])
        assert got.d[m] == want.d[m]


def test_the_pass_writes_its_codes_and_nothing_else() -> None:
    a = odd_rows(7, 96)
    writes_what_is_its_own(token_quantizer(1), a, *encode("tokens", Tokens.of_values(a)))


def test_machine_code_of_the_pass() -> None:
    (launch,) = int8_rows(np.zeros((4, 4096), np.float32), Simulator()).launches
    code = machine_code(launch.kernel, signature_of(launch.args), "sm_90a")
    assert (code.stack_bytes, code.spill_store_bytes, code.spill_load_bytes) == (0, 0, 0)
    assert code.registers * 256 * 4 <= 65536
    assert code.count("ACQBULK") == code.count("PREEXIT") == 1
    loads = [i for i, line in enumerate(code.sass.splitlines()) if "LDG.E.128" in line]
    assert loads[3] - loads[0] < 48, "one behind the other"


def test_tokens_are_made_of_what_they_hold() -> None:
    tokens = Tokens.of_values(odd_rows(2, 32))
    for layout in ("k_outermost", "rows", "inside"):
        with pytest.raises(ValueError, match=f"layout '{layout}' are not made of Tokens"):
            encode(layout, tokens)


# --- the verdict ----------------------------------------------------------------------------------


def product(tokens: Tokens, blocks: np.ndarray) -> np.ndarray:
    """As a kernel does it: an integer sum, then two factors in float32."""
    w, factor = byte_weights(blocks)
    sums = (tokens.q.astype(np.int64) @ w.astype(np.int64).T).astype(np.float32)
    return sums * factor * tokens.d[:, None]


@weight_format
@pytest.mark.parametrize(
    "distribution",
    ["llm", *(pytest.param(d, marks=pytest.mark.slow) for d in ("uniform", "normal", "integer"))],
)
def test_a_right_product_is_right(distribution: str, name: str) -> None:
    for shape in ((33, 40, 1024), (3, 5, 64), (16, 24, 4096)):
        problem = Problem(*shape, name, distribution)
        tokens = Tokens.of_values(problem.a)
        found = check(product(tokens, problem.blocks), problem, "A8", tokens)
        assert found.ok, found.verdict
        assert found.nmse_same_operands < 1e-14
        half = check(product(tokens, problem.blocks).astype(np.float16), problem, "A8", tokens)
        assert half.ok, half.verdict


@weight_format
def test_a_wrong_one_is_named(name: str) -> None:
    problem = Problem(33, 40, 256, name)
    tokens = Tokens.of_values(problem.a)
    right = product(tokens, problem.blocks)
    exact = (tokens.values() @ exact_weights(problem.blocks).T).astype(np.float32)
    assert "nmse" in check(exact, problem, "A8", tokens).failures, "other weights than it says"
    assert "nmse" in check(right * np.float32(1 + 1e-6), problem, "A8", tokens).failures
    off = right.copy()
    off[3, 4] += 1e-4
    assert "bound" in check(off, problem, "A8", tokens).failures
    one = tokens.q.copy()
    one[5, 6] ^= 2
    bad = replace(tokens, q=one)
    found = check(product(bad, problem.blocks), problem, "A8", bad)
    assert found.failures == ("activations",)
    assert "int8 codes differ from the recipe, the most at (5, 6)" in found.verdict
    d = tokens.d.copy()
    d[7] *= np.float32(1 + 1e-5)
    assert "d are wrong, the first at (7): got" in str(complaint(Tokens(tokens.q, d), problem.a))
    with pytest.raises(TypeError, match="against float activations, got Tokens"):
        check(right, problem, "A16", tokens)
    with pytest.raises(ValueError, match=r"int8 activations must be \[M, K\] = \(33, 256\)"):
        check(right, problem, "A8", Tokens(tokens.q[:4], tokens.d[:4]))


@weight_format
def test_the_golden_case(name: str) -> None:
    golden = GOLDEN[name]
    tokens = Tokens.of_q81(golden.q81)
    c = product(tokens, golden.blocks)
    assert c[0, 0] == golden.value
    problem = Problem(1, 1, 32, name, "golden")
    assert check(c, problem, "A8", tokens).ok
    assert check(c + np.float32(2.0**-10), problem, "A8", tokens).failures[0] == "exact"


# --- what it costs --------------------------------------------------------------------------------


def drawn(distribution: str, rows: int, k: int, of_weights: bool) -> np.ndarray:
    """float32 [rows, k]: as the name says, where it speaks of these operands, else normal."""
    rng = np.random.default_rng(int(of_weights))
    x = rng.standard_normal((rows, k), dtype=np.float32)
    if distribution == "outlier channels" and not of_weights:
        x[:, rng.choice(k, 4, replace=False)] *= 20
    if distribution == "1 % channels x10" and of_weights:
        x[:, rng.choice(k, k // 100, replace=False)] *= 10
    if distribution == "lognormal blocks" and of_weights:
        x *= np.repeat(np.exp(0.5 * rng.standard_normal((rows, k // BLOCK))), BLOCK, axis=1)
    return x.astype(np.float32)


# of the float product, K = 4096: what requantizing the weights adds at most, and in the whole
COSTS = {
    "normal": (1e-4, 1.02),
    "outlier channels": (2e-4, 1.02),
    "1 % channels x10": (2.1e-3, 1.12),
    "lognormal blocks": (4e-4, 1.06),
}


@pytest.mark.parametrize("distribution", COSTS)
@weight_format
def test_the_error_beside_that_of_the_exact_weights(name: str, distribution: str) -> None:
    a, w = drawn(distribution, 64, 4096, False), drawn(distribution, 64, 4096, True)
    blocks = quantize(w, name)
    tokens = Tokens.of_values(a)
    meant = a.astype(np.float64) @ w.astype(np.float64).T
    same = nmse(same_operands(tokens, blocks)[0], meant)
    exact = nmse(tokens.values() @ exact_weights(blocks).T, meant)
    added, times = COSTS[distribution]
    assert exact < same < 1.01 * exact + 1.1 * added
    if name == "q4_0":
        assert same < times * exact
