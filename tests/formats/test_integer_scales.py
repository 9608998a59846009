"""Weights of codes and integer scales: how they are chosen, how a kernel makes them, the verdict on
their product.

The expectation is worked out here, from ggml's blocks and from float32 A, in integers or float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qformats import BLOCK, FORMATS, WEIGHT_FORMATS, quantize
from qformats.integer_scales import Grid, integer_grid, integer_tiles, integer_weights
from qformats.repack import TILE_K, TILE_ROWS, byte_tiles, byte_weights
from reference import GOLDEN, CoarseTokens, Problem, Tokens, both_tokens, check, nmse
from reference.recipes import check_tokens
from steps.compile.compiler import machine_code
from steps.kernels.parts.activations.layouts import coarse_int8_rows, decode, encode
from steps.kernels.parts.weights.integer_scales import integer_format
from steps.simulator.launch import simulate
from tests.formats.test_repack import any_blocks
from tests.kernels.packed_tiles import by_row_tile
from tests.kernels.passes import what_it_makes
from tests.kernels.test_halves import blocks_with, exact_weights
from tests.steps.test_bytes import MACHINES, READS, byte_reader, drawn, odd_rows

weight_format = pytest.mark.parametrize("name", WEIGHT_FORMATS)
unpacked_format = pytest.mark.parametrize("name", WEIGHT_FORMATS[:4])


def blocks_of_all_sizes(name: str, n: int, blocks_k: int, seed: int = 5) -> np.ndarray:
    """Scales of either sign and many sizes, minima far from -d and near it, blocks of zeros."""
    rng = np.random.default_rng(seed)
    d = rng.standard_normal((n, blocks_k)) * 2.0 ** -rng.integers(0, 12, (n, blocks_k))
    d[rng.random(d.shape) < 0.1] = 0
    m = np.where(rng.random(d.shape) < 0.5, -d * rng.uniform(0, 31, d.shape), 4 * d[::-1])
    return blocks_with(name, n, blocks_k, d, m)


def is_in_range(grid: Grid, top: int) -> np.ndarray:
    """Whether every code that the format has stays in its byte."""
    ends = np.stack([grid.c, grid.c + grid.r.astype(int) * top])
    return (ends.min(axis=0) >= -128) & (ends.max(axis=0) <= 127)


# --- how they are chosen --------------------------------------------------------------------------


@unpacked_format
def test_no_code_of_the_format_leaves_its_byte(name: str) -> None:
    top = 2 ** FORMATS[name].bits - 1
    for seed in range(4):
        grid = integer_grid(blocks_of_all_sizes(name, 40, 9, seed))
        assert is_in_range(grid, top).all()
        assert (grid.codes <= top).all()
        if "m" not in FORMATS[name].dtype.names:  # where weights are about as large on both sides
            assert np.abs(grid.r).max() in (255 // top - 1, 255 // top), "as fine as bytes allow"


def test_one_multiply_makes_four_weights_of_any_codes() -> None:
    """All r and c in range, for every pair of neighbours and ends that a carry would spoil."""
    for top in (15, 31):
        codes = np.array(np.meshgrid([0, top], [0, top], [0, 1, top], [0, top - 1, top])).reshape(
            4, -1
        )
        word = sum(codes[i].astype(np.uint32) << np.uint32(8 * i) for i in range(4))
        for r in range(-(255 // top), 255 // top + 1):
            for c in range(max(0, -top * r), 256 - max(0, top * r)):
                made = word * np.uint32(r % 2**32) + np.uint32(c * 0x01010101)
                want = np.stack([codes[i] * r + c for i in range(4)], axis=-1).astype(np.uint8)
                np.testing.assert_array_equal(made.view(np.uint8).reshape(-1, 4), want)


@unpacked_format
def test_codes_are_the_nearest_that_r_and_c_allow(name: str) -> None:
    """And each weight within half a step of what it was, where no block is cut."""
    top = 2 ** FORMATS[name].bits - 1
    blocks = blocks_of_all_sizes(name, 24, 7)
    grid, exact = integer_grid(blocks), exact_weights(blocks).reshape(24, 7, BLOCK)
    factor = grid.factor.astype(np.float64)[:, None, None]
    r, c = grid.r[..., None].astype(int), grid.c[..., None].astype(int)
    off = np.abs((grid.codes * r + c) * factor - exact)
    for code in range(top + 1):
        assert (off <= np.abs((code * r + c) * factor - exact) * (1 + 1e-5) + 1e-5 * factor).all()
    assert (off <= (0.5 * np.abs(r) + 1e-4) * factor).mean() > 0.9


@weight_format
def test_what_fits_is_kept_as_it_is(name: str) -> None:
    """The integer problems; of Q8_0, see `byte_weights`."""
    blocks = Problem(1, 40, 256, name, "integer").blocks
    w, factor = integer_weights(blocks)
    assert (w.dtype, w.shape, factor.dtype) == (np.int8, (40, 256), np.float32)
    if name == "q8_0":
        for got, want in zip((w, factor), byte_weights(blocks), strict=True):
            np.testing.assert_array_equal(got, want)
        return
    assert (np.frexp(factor)[0] == 0.5).all(), "powers of two"
    np.testing.assert_array_equal(w * factor.astype(np.float64)[:, None], exact_weights(blocks))


@weight_format
def test_a_row_is_the_same_in_any_matrix(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = blocks_of_all_sizes(name, 33, 5)
    w, factor = integer_weights(blocks)
    for pick in (slice(4, 5), slice(7, 30, 3)):
        again = integer_weights(blocks[pick])
        np.testing.assert_array_equal(again[0], w[pick])
        np.testing.assert_array_equal(again[1], factor[pick])
    monkeypatch.setattr("qformats.integer_scales.PART", 7 * 5 * BLOCK)
    np.testing.assert_array_equal(integer_weights(blocks)[0], w)


@weight_format
def test_rows_without_a_number_or_without_a_weight(name: str) -> None:
    blocks = blocks_with(name, 6, 3, 0.5, 1.0)
    want, factors = integer_weights(blocks)
    blocks["d"][1, 2], blocks["d"][2, 0], blocks["d"][4] = np.nan, -np.inf, 0
    if "m" in blocks.dtype.names:
        blocks["m"][4] = 0
    w, factor = integer_weights(blocks)
    assert not np.isfinite(factor[[1, 2]]).any()
    assert not w[[1, 2, 4]].any()
    assert np.isfinite(factor[4])
    for other in (0, 3, 5):
        np.testing.assert_array_equal(w[other], want[other])
        assert factor[other] == factors[other]


def test_what_is_refused() -> None:
    for function in (integer_tiles, integer_weights, integer_grid):
        with pytest.raises(ValueError, match=rf"{function.__name__} takes a matrix .* got 1 dim"):
            function(any_blocks("q4_0", (3, 2))[0])
        with pytest.raises(TypeError, match="these are q8_1"):
            function(np.zeros((2, 2), FORMATS["q8_1"].dtype))


# --- the packed tiles, and what a kernel makes of them --------------------------------------------


@weight_format
def test_records_are_what_the_docstring_says(name: str) -> None:
    blocks = blocks_of_all_sizes(name, 20, 6)
    packed, factors = integer_tiles(blocks)
    size, bits = integer_format(name).tile_bytes, FORMATS[name].bits
    assert (packed.dtype, factors.shape) == (np.uint8, (128,))
    np.testing.assert_array_equal(factors[:20], integer_weights(blocks)[1])
    if bits == 8:
        np.testing.assert_array_equal(packed, byte_tiles(blocks)[0])
        return
    grid = integer_grid(blocks)
    packed = by_row_tile(packed, 2, size)
    assert size == {4: 1024, 5: 1280}[bits] + 128
    for n, block in np.ndindex(20, 6):
        (row_tile, row), (k_tile, of_tile) = divmod(n, 16), divmod(block, 4)
        (r, g), (half, b) = divmod(row, 8), divmod(of_tile, 2)
        packed_tile = packed[row_tile, k_tile]
        pair = packed_tile[size - 128 + 16 * g + 8 * r + 2 * of_tile :][:2]
        assert (pair[:1].view(np.int8)[0], int(pair[1]) - 128) == (
            grid.r[n, block],
            grid.c[n, block],
        )
        for j in range(BLOCK):
            u, (t, i) = j // 16, divmod(j % 16, 4)
            lane = 4 * g + t

            def byte(word: int, at: int = half, lane: int = lane, i: int = i) -> int:
                """Byte i of a word of this lane's."""
                if word == 4:
                    return int(packed_tile[1024 + 128 * at + 4 * lane + i])  # noqa: B023
                return int(packed_tile[512 * at + 16 * lane + 4 * word + i])  # noqa: B023

            if bits == 4:
                code = byte(2 * b + r) >> 4 * u & 15
            else:
                x = [byte(word) >> 5 for word in range(5)]
                number = 4 * b + 2 * u + r
                code = (
                    byte(number) & 31
                    if number < 5
                    else (
                        x[0] + 8 * (x[1] >> 1),
                        x[2] + 8 * (x[3] >> 1),
                        x[4] + 8 * (x[1] & 1) + 16 * (x[3] & 1),
                    )[number - 5]
                )
            assert code == grid.codes[n, block, j]


@weight_format
def test_a_kernel_makes_the_very_bytes(name: str) -> None:
    for n, blocks_k in ((32, 8), (20, 5)):
        blocks = blocks_of_all_sizes(name, n, blocks_k)
        want, _ = integer_weights(blocks)
        k_tiles, rows = -(-blocks_k // 4), -(-n // TILE_ROWS)
        form = integer_format(name)
        packed = by_row_tile(integer_tiles(blocks)[0], k_tiles, form.tile_bytes)
        packed = packed[:rows].reshape(-1)
        out = np.zeros((rows * k_tiles, 4, 32, 4), np.uint32)
        simulate(byte_reader(form), len(out), 32, (packed, out))
        # row tile, K tile, block, g, t, upper half of the block, row g or g + 8, byte
        parts = out.view(np.int8).reshape(rows, k_tiles, 4, 8, 4, 2, 2, 4)
        got = parts.transpose(0, 6, 3, 1, 2, 5, 4, 7).reshape(rows * TILE_ROWS, k_tiles * TILE_K)
        np.testing.assert_array_equal(got[:n, : blocks_k * BLOCK], want)


@pytest.mark.slow
@weight_format
def test_instructions_of_64_weights(name: str) -> None:
    """Of a lane, in a whole packed tile: 7 for eight codes (8.75 of five bits), two for a scale."""
    code = machine_code(byte_reader(integer_format(name)), READS, "sm_90a")
    bits = FORMATS[name].bits
    assert code.count("HFMA2", "HMUL2") <= 4, "constants"
    assert code.count("LOP3") <= {4: 32, 5: 40, 8: 16}[bits] + 6
    assert code.count("SHF") <= {4: 8, 5: 14, 8: 0}[bits] + 6
    assert code.count("PRMT") <= {4: 16, 5: 16, 8: 0}[bits] + 4
    assert code.count("IMAD") - code.count("IMAD.MOV", "IMAD.SHL", "IMAD.U32") <= 16 + 8
    assert code.stack_bytes == code.spill_store_bytes == 0


# --- activations ----------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", MACHINES)
def test_activations_are_tokens_for_other_weights(machine: Any) -> None:
    a = odd_rows(5, 160)
    arrays = what_it_makes(coarse_int8_rows, "A8", "coarse_tokens", machine(), a, 0)
    got, want = decode("coarse_tokens", arrays, 5, 160), CoarseTokens.of_values(a)
    assert type(got) is type(want) is CoarseTokens
    assert type(got.rows(np.arange(2))) is CoarseTokens
    np.testing.assert_array_equal(got.q, want.q)
    np.testing.assert_array_equal(got.d, want.d)
    for given, made in zip(arrays, encode("coarse_tokens", want), strict=True):
        np.testing.assert_array_equal(given, made)


def test_tokens_are_not_taken_for_each_other() -> None:
    a = odd_rows(2, 32)
    with pytest.raises(ValueError, match="layout 'coarse_tokens' are not made of Tokens"):
        encode("coarse_tokens", Tokens.of_values(a))
    with pytest.raises(ValueError, match="layout 'tokens' are not made of CoarseTokens"):
        encode("tokens", CoarseTokens.of_values(a))


# --- the verdict ----------------------------------------------------------------------------------


def product(tokens: Tokens, blocks: np.ndarray) -> np.ndarray:
    """As a kernel does it: an integer sum, then two factors in float32."""
    w, factor = integer_weights(blocks)
    sums = tokens.q.astype(np.int64) @ w.astype(np.int64).T
    return sums.astype(np.float32) * factor * tokens.d[:, None]


@weight_format
@pytest.mark.parametrize(
    "distribution",
    ["llm", *(pytest.param(d, marks=pytest.mark.slow) for d in ("uniform", "normal", "integer"))],
)
def test_a_right_product_is_right(distribution: str, name: str) -> None:
    for shape in ((33, 40, 1024), (3, 5, 64), (64, 96, 4096)):
        problem = Problem(*shape, name, distribution)
        tokens = CoarseTokens.of_values(problem.a)
        found = check(product(tokens, problem.blocks), problem, "A8", tokens)
        assert found.ok, found.verdict
        assert found.nmse_same_operands < 1e-14
        half = check(product(tokens, problem.blocks).astype(np.float16), problem, "A8", tokens)
        assert half.ok, half.verdict


@unpacked_format
def test_a_wrong_one_is_named(name: str) -> None:
    problem = Problem(33, 40, 256, name)
    tokens = CoarseTokens.of_values(problem.a)
    right = product(tokens, problem.blocks)
    w, factor = byte_weights(problem.blocks)
    finer = tokens.values() @ (w * factor.astype(np.float64)[:, None]).T
    assert "nmse" in check(finer.astype(np.float32), problem, "A8", tokens).failures
    assert "nmse" in check(right, problem, "A8", Tokens(tokens.q, tokens.d)).failures
    assert "nmse" in check(right * np.float32(1 + 1e-6), problem, "A8", tokens).failures
    assert check_tokens(tokens, problem.a) is None


@weight_format
def test_the_golden_case(name: str) -> None:
    golden = GOLDEN[name]
    tokens = CoarseTokens.of_q81(golden.q81)
    c = product(tokens, golden.blocks)
    assert c[0, 0] == golden.value
    problem = Problem(1, 1, 32, name, "golden")
    assert check(c, problem, "A8", tokens).ok
    assert check(c + np.float32(2.0**-10), problem, "A8", tokens).failures[0] == "exact"


# --- what it costs --------------------------------------------------------------------------------

# of the float product, K = 4096: what is added to the exact weights' error at most, in Q4_0 and
# Q4_1, and in Q5_0 and Q5_1
COSTS = {
    "normal": (1.2e-3, 1.6e-3),
    "outlier channels": (1.2e-3, 1.6e-3),
    "1 % channels x10": (6.5e-3, 3.5e-3),
    "lognormal blocks": (2.8e-3, 2.1e-3),
}


@pytest.mark.slow
@pytest.mark.parametrize("distribution", COSTS)
@unpacked_format
def test_the_error_beside_that_of_the_exact_weights(name: str, distribution: str) -> None:
    """More than that of requantizing to 8 bits, and no more than is told."""
    a, w = drawn(distribution, 64, 4096, False), drawn(distribution, 64, 4096, True)
    blocks = quantize(w, name)
    tokens = CoarseTokens.of_values(a)
    meant = a.astype(np.float64) @ w.astype(np.float64).T
    same = nmse(both_tokens(tokens, blocks)[0], meant)
    fast = nmse(both_tokens(Tokens(tokens.q, tokens.d), blocks)[0], meant)
    exact = nmse(tokens.values() @ exact_weights(blocks).T, meant)
    assert fast < same < 1.02 * exact + COSTS[distribution][FORMATS[name].bits == 5]
