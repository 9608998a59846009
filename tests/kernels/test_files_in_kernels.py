"""File formats in kernels: elements of blocks, the contents of packed tiles, products.

Expectations come from the codec, which is held to `gguf` bit for bit, and from float64.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from numba import cuda, float32

from qformats import FILE_FORMATS, FORMATS, dequantize, quantize
from qformats.repack import (
    HALF_SCALE,
    TILE_GROUP,
    byte_tiles,
    byte_weights,
    tiles,
)
from qformats.storage import storage_format, stored_weights
from reference import Problem, check
from reference.product import least_half, same_operands
from steps import gemm
from steps.blocks.elements import device_elements
from steps.checks.cases import SUPER_CHECK_SHAPES, cases
from steps.checks.select import UsageError
from steps.checks.verify import multiply, operands, prepare, verify
from steps.cli.arguments import formats_of
from steps.driver.machines import Simulator
from steps.kernels.parts.weights.storage_formats import tile_format
from steps.product import tuning_table as tuning
from steps.product.choice import Request, choose
from steps.registry import find, kernel_of
from steps.simulator.launch import simulate
from tests.kernels.packed_tiles import codes_in_registers, weights_in_registers
from tests.kernels.passes import RemembersPasses

of_each = pytest.mark.parametrize("name", FILE_FORMATS)
WORKS = [
    # of a step every fifth format in `make test`
    pytest.param(n, name, marks=pytest.mark.every if (n + i) % 5 else pytest.mark.slow)
    for n in (1, 10, 11, 13, 14, 15, 17, 18)
    for i, name in enumerate(FILE_FORMATS)
    if name in kernel_of(n).formats
]


def random_blocks(name: str, n: int, k: int, seed: int = 0) -> np.ndarray:
    """Any bytes, but d and dmin numbers of either sign, some of them subnormal, and 2^-20 to 2^19
    for MXFP4's scales."""
    fmt = FORMATS[name]
    rng = np.random.default_rng([seed, n, k])
    size = (n, k // fmt.elements * fmt.block_bytes)
    blocks = rng.integers(0, 256, size, np.uint8).view(fmt.dtype).copy()
    for field in fmt.dtype.names:
        if fmt.dtype[field] == np.float16:
            blocks[field] = rng.standard_normal(blocks.shape) * 2.0 ** rng.integers(-18, 4)
    if name == "mxfp4":
        blocks["e"] = rng.integers(108, 148, blocks.shape)
    return blocks


# --- ggml's own bytes ---


@cache
def reader(name: str) -> Any:
    """kernel(w, values): each block's values, one thread a block."""
    fmt, fields = FORMATS[name], device_elements(name)
    level, scale, offset = fields.level, fields.scale, fields.offset
    size, elements, group = fmt.block_bytes, fmt.elements, fmt.group

    @cuda.jit
    def read(w, values):
        b = cuda.threadIdx.x
        for j in range(elements):
            at, g = b * size, j // group
            product = scale(w, at, g) * float32(level(w, at, j))
            values[b * elements + j] = product + offset(w, at, g)

    return read


@of_each
def test_elements_are_those_of_the_codec_bit_for_bit(name: str) -> None:
    blocks = random_blocks(name, 1, 6 * 256)
    if name == "mxfp4":
        blocks["e"][0, :4] = 0, 1, 2, 255  # both subnormal scales, and the largest
    values = np.zeros(6 * 256, np.float32)
    with np.errstate(over="ignore"):
        simulate(reader(name), 1, blocks.size, (blocks.view(np.uint8).reshape(-1), values))
    np.testing.assert_array_equal(values, dequantize(blocks)[0])


# --- packed tiles ---


def terms_of(stored: Any) -> tuple[np.ndarray, Any]:
    """level * scale and offset of each weight."""
    group = stored.levels.shape[1] // stored.scale.shape[1]
    products = stored.levels * np.repeat(stored.scale, group, axis=1)
    return products, 0.0 if stored.offset is None else np.repeat(stored.offset, group, axis=1)


@of_each
def test_what_records_hold_is_within_a_rounding_of_the_scales(name: str) -> None:
    blocks = random_blocks(name, 5, 1024)
    exact, (products, offsets) = (
        dequantize(blocks).astype(np.float64),
        terms_of(stored_weights(blocks)),
    )
    off = np.abs(products + offsets - exact)
    ulp = np.abs(exact) * 2.0**-24  # of the float32 in which the codec adds them up
    assert (off <= 2.0**-11 * (np.abs(products) + np.abs(offsets)) + ulp).all()
    if not any(field.startswith("scales") for field in blocks.dtype.names):
        assert not off.any()
        return
    assert off.max() > ulp.max(), "d times an integer has more bits than a float16"
    blocks["d"] = 0.25
    if "dmin" in blocks.dtype.names:
        blocks["dmin"] = -2.0
    np.testing.assert_array_equal(sum(terms_of(stored_weights(blocks))), dequantize(blocks))


@of_each
def test_a_record_gives_its_levels_and_its_float16_weights(name: str) -> None:
    """By every lane, as `mma` takes them: rows g and g + 8, K as the docstrings have it."""
    n, k = 13, 256  # three rows less than a packed tile
    blocks = random_blocks(name, n, k)
    if name == "mxfp4":
        blocks["e"] = np.random.default_rng(1).integers(118, 134, blocks.shape)
    stored, kind = stored_weights(blocks), storage_format(FORMATS[name]).name
    found = codes_in_registers(tiles(blocks)[0], kind, n, k)
    np.testing.assert_array_equal(found, tile_format(kind).code_scale * stored.levels)

    halves, factors = weights_in_registers(blocks)
    products, offsets = terms_of(stored)
    least = least_half(blocks)[:, None]
    off = np.abs(halves * factors[:, None] - products - offsets)
    assert (off <= 2.0**-11 * np.maximum(np.abs(products) + np.abs(offsets), 2.0**11 * least)).all()
    if name == "mxfp4":  # 16 powers of two, of which all are float16 multiples of HALF_SCALE
        assert not off.any()


def test_mxfp4_scales_far_below_the_largest_are_lost_and_no_others() -> None:
    blocks = quantize(np.ones((1, 256), np.float32), "mxfp4")
    blocks["e"] = [[100, 99, 90, 86, 85, 69, 68, 40]]
    packed, factors = tiles(blocks)
    tile = tile_format("e2m1")
    first = packed[: tile.tile_bytes][tile.scales_at :][:4]
    second = packed[TILE_GROUP * tile.tile_bytes :][: tile.tile_bytes][tile.scales_at :][:4]
    d = (np.concatenate([first, second]).astype(np.uint16) << 8).view(np.float16)
    kept = d.astype(np.float64) * HALF_SCALE * factors[0]
    right = 2.0 ** (blocks["e"][0].astype(np.float64) - 128)
    np.testing.assert_array_equal(kept[:6], right[:6])
    assert kept[6] == kept[7] == 0, "2^-32 of the row's largest"


@of_each
def test_int8_weights_are_within_half_a_step_of_a_row(name: str) -> None:
    blocks = random_blocks(name, 9, 512)
    codes, factor = byte_weights(blocks)
    w = dequantize(blocks).astype(np.float64)
    off = np.abs(codes * factor[:, None].astype(np.float64) - w)
    assert (off <= factor[:, None] * 0.5001).all()
    assert (factor <= np.abs(w).max(axis=1) / 126).all(), "the range of int8 is used"
    packed, factors = byte_tiles(blocks)
    assert packed.size == 128 * 512
    np.testing.assert_array_equal(factors[:9], factor)
    # the highest bit of each byte is flipped; K | tile block g t part r i
    flat = (packed ^ np.uint8(128)).view(np.int8).reshape(4, TILE_GROUP, 4, 8, 4, 2, 2, 4)
    rows = flat.transpose(1, 6, 3, 0, 2, 5, 4, 7).reshape(128, 512)
    np.testing.assert_array_equal(rows[:9], codes)
    assert not rows[9:].any()


# --- products ---


@pytest.mark.parametrize(("number", "name"), WORKS)
def test_products(number: int, name: str) -> None:
    """Ragged in M and N; whole numbers, which must come out bit for bit, and others."""
    step, shapes = kernel_of(number), [((3, 21, 256), "integer"), ((1, 17, 512), "llm")]
    if number in (17, 18):  # up to four tokens, eight, sixteen
        shapes += [((7, 33, 256), "uniform"), ((19, 5, 256), "integer")]
    for order, (shape, distribution) in enumerate(shapes):
        problem = Problem(*shape, name, distribution, seed=order)
        found = verify(step, step.families[-1], problem, RemembersPasses(order))
        assert found.ok, found.verdict


@pytest.mark.parametrize("number", [14, 17, 18])
def test_scales_that_change_places_are_found(number: int) -> None:
    """Scales of lower and upper halves of blocks swapped, in Q6_K: the product is wrong by that."""
    step = kernel_of(number)
    at = tile_format("c6").scales_at

    def swapped(blocks: np.ndarray) -> tuple[np.ndarray, ...]:
        packed, factors = step.pack(blocks)
        each = packed.reshape(-1, tile_format("c6").tile_bytes).copy()
        each[:, at:] = each[:, at:].reshape(len(each), -1, 2, 2)[:, :, ::-1].reshape(len(each), -1)
        return each.reshape(-1), factors

    problem = Problem(3, 16, 256, "q6_k", "normal")
    broken = replace(step, pack=swapped)
    assert verify(step, step.families[-1], problem, Simulator()).ok
    found = verify(broken, step.families[-1], problem, Simulator())
    assert {"bound", "nmse"} <= set(found.failures)


def test_the_sharp_limit_is_against_what_records_hold() -> None:
    """A Q4_K product with exact scales would be further from the operands than is let through: the
    check knows which of both a step multiplied."""
    problem, step = Problem(5, 40, 512, "q4_k", "normal"), kernel_of(17)
    machine = Simulator()
    given = prepare(step, "A8", "q4_k", problem.a, problem.blocks, machine)
    c, bits = multiply(given, machine), operands(given, machine)
    assert check(c, problem, "A8", bits).ok
    exact = same_operands(bits.values(), problem.blocks)[0].astype(np.float32)
    assert "nmse" in check(exact, problem, "A8", bits).failures
    off = np.sum((c - exact.astype(np.float64)) ** 2) / np.sum(exact.astype(np.float64) ** 2)
    assert 1e-8 < off < 16 * 2.0**-22, "what rounding the scales costs, and no more than is said"


def test_the_front_door_takes_them() -> None:
    for name in ("q4_k", "mxfp4"):
        problem = Problem(2, 20, 256, name, "normal")
        c, choice = gemm(problem.a, problem.blocks, machine=Simulator(), explain=True)
        assert choice.kernel.number == 18
        right = problem.a.astype(np.float64) @ dequantize(problem.blocks).T
        assert np.sum((c - right) ** 2) < 1e-3 * np.sum(right**2)
    with pytest.raises(ValueError, match="w has 1 blocks of 256 in a row, K=256"):
        gemm(np.ones((1, 32), np.float32), problem_blocks("q4_k"), machine=Simulator())


def problem_blocks(name: str) -> np.ndarray:
    return Problem(1, 4, 256, name, "normal").blocks


class Hopper:
    name, cc, sms = "NVIDIA H200", (9, 0), 132


@of_each
def test_few_tokens_are_decoded_and_many_multiplied_by_wgmma(name: str) -> None:
    few = choose(Request(name, 1, 4096, 14336), Hopper())
    many = choose(Request(name, 2048, 4096, 4096), Hopper())
    assert few.kernel.most_tokens == (16 if name != "q2_k" else None)
    assert many.kernel.number == 14
    tuned = {entry.format for table in tuning.known() for entry in table.entries}
    assert (f"stored most like {name}" in many.why) == (name not in tuned)


# --- what cannot be ---


def test_refusals_are_one_sentence() -> None:
    assert formats_of(["all"]) == formats_of([]) == find(2).formats
    assert formats_of(["q6_k,q4_0"]) == ("q4_0", "q6_k")
    with pytest.raises(UsageError, match="unknown format 'q7_k'"):
        formats_of(["q7_k"])
    assert find(4).supports("q4_k", "A8").startswith("step 4 has no q4_k: it takes q4_0")
    assert kernel_of(17).supports("q2_k", "A8").startswith("step 17 has no q2_k")
    with pytest.raises(
        UsageError, match="K=96 is not a multiple of 256, the block of q4_k: use 256"
    ):
        cases("q4_k", simulated=True, shape=(1, 1, 96))
    with pytest.raises(ValueError, match="K=96 is not a multiple of the block of 256: use 256"):
        Problem(1, 1, 96, "q6_k")
    with pytest.raises(ValueError, match="there is no golden case of mxfp4"):
        Problem(1, 1, 32, "mxfp4", "golden")
    blocks = quantize(np.ones((2, 64), np.float32), "mxfp4")
    blocks["e"][1, 1] = 254
    with pytest.raises(ValueError, match=r"block 1 of row 1 has a scale of 2\^126"):
        tiles(blocks)
    blocks = problem_blocks("q5_k").copy()
    blocks["dmin"][2, 0] = np.inf
    with pytest.raises(ValueError, match="w has dmin = inf in block 0 of row 2"):
        gemm(np.ones((1, 256), np.float32), blocks, machine=Simulator())


@of_each
def test_the_cases_of_a_check(name: str) -> None:
    every = cases(name, simulated=True)
    assert all(case.shape[2] % FORMATS[name].elements == 0 for case in every)
    assert all(case.distribution != "golden" for case in every)
    if FORMATS[name].elements == 256:
        assert tuple(case.shape for case in every[1:]) == SUPER_CHECK_SHAPES


def test_elements_of_a_format_that_has_none_are_refused() -> None:
    with pytest.raises(ValueError, match="q8_1 has no device functions of its elements"):
        device_elements("q8_1")
