"""The kernel that quantizes activations: all layouts, any K, any alignment.

Its codes, d and s = d * sum(q) are the codec's bit for bit, on a GPU as in the simulator: there is
no product and sum that a compiler could contract.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import cuda, float32, int8, uint8

from qformats import BLOCK, FORMATS
from reference import Q81, Problem
from steps.blocks.q8_1 import (
    AHEAD,
    LAYOUTS,
    q8_1_grid,
    q8_1_quantizer,
    round_half_away,
)
from steps.compile.compiler import machine_code
from steps.contract import Launch
from steps.driver.machines import Gpu, Simulator
from steps.kernels.parts.activations.layouts import decode, encode

MACHINES = [
    pytest.param(Simulator, (3, 64), id="simulator"),
    pytest.param(Gpu, (64, 4096), marks=pytest.mark.gpu, id="gpu"),
]


def quantized(machine: Any, a: np.ndarray, layout: str) -> Q81:
    """What the kernel makes of float32 A[M, K], its K padded to whole blocks."""
    m, k = a.shape
    blocks_k = -(-k // BLOCK)
    empty = Q81(
        q=np.zeros((m, blocks_k * BLOCK), np.int8),
        d=np.zeros((m, blocks_k), np.float32),
        s=np.zeros((m, blocks_k), np.float32),
    )
    arrays = [machine.array(np.full_like(x, 0x55)) for x in encode(layout, empty)]
    machine.run(Launch(q8_1_quantizer(layout), *q8_1_grid(m, k), (machine.array(a), *arrays)))
    host = tuple(machine.host(x) for x in arrays)
    return decode(layout, host, m, blocks_k * BLOCK)


@pytest.mark.parametrize(("distribution", "cut"), [("uniform", 0), ("normal", 1), ("llm", 17)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kind", "shape"), MACHINES)
def test_agrees_with_the_codec(
    kind: type, shape: tuple[int, int], layout: str, distribution: str, cut: int
) -> None:
    m, k = shape
    a = np.ascontiguousarray(Problem(m, 1, k, "q8_0", distribution).a[:, : k - cut])
    padded = np.pad(a, ((0, 0), (0, cut)))
    got = quantized(kind(), a, layout)
    want = (
        Q81.of_blocks(FORMATS["q8_1"].quantize(padded))
        if layout == "blocks"
        else Q81.of_values(padded)
    )
    np.testing.assert_array_equal(got.q, want.q)
    np.testing.assert_array_equal(got.d, want.d)
    np.testing.assert_array_equal(got.s, want.s)


@cuda.jit
def rounded(x, out):
    i = cuda.grid(1)
    out[i] = round_half_away(x[i] + x[i])


def hard_to_round() -> np.ndarray:
    """float32 around every integer and half up to 128, of both signs, and what lies near zero."""
    x = np.arange(0, 257, dtype=np.float32) / 2
    x = np.concatenate([x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(0))])
    x = np.concatenate([x, np.float32([1e-45, 1e-38, 2.0**-26, 2.0**-25, 0.1, 0.9])])
    x = np.concatenate([x, np.random.default_rng(0).uniform(0, 128, 2048).astype(np.float32)])
    x = np.concatenate([x, -x])
    return np.resize(x, -(-x.size // 256) * 256)


@pytest.mark.parametrize("kind", [Simulator, pytest.param(Gpu, marks=pytest.mark.gpu)])
def test_halves_go_away_from_zero(kind: type) -> None:
    machine, x = kind(), hard_to_round()
    out = machine.array(np.zeros(x.size, np.int32))
    machine.run(Launch(rounded, (x.size // 256,), (256,), (machine.array(x), out)))
    want = np.sign(x) * np.floor(np.abs(x.astype(np.float64)) + 0.5)
    np.testing.assert_array_equal(machine.host(out), want)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("offset", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", [Simulator, pytest.param(Gpu, marks=pytest.mark.gpu)])
def test_a_view_may_begin_at_any_float(kind: type, offset: int, layout: str) -> None:
    """128-bit loads fault there (the simulator says so too): the kernel must not use them."""
    m, k = 3, 64
    a = Problem(m, 1, k, "q8_0").a
    machine = kind()
    room = np.full(m * k + 4, np.nan, np.float32)
    room[offset : offset + m * k] = a.reshape(-1)
    view = machine.array(room)[offset : offset + m * k].reshape(m, k)
    arrays = [machine.array(x) for x in encode(layout, Q81.of_values(np.zeros_like(a)))]
    machine.run(Launch(q8_1_quantizer(layout), *q8_1_grid(m, k), (view, *arrays)))
    got = decode(layout, tuple(machine.host(x) for x in arrays), m, k)
    want = quantized(machine, a, layout)
    for x, y in ((got.q, want.q), (got.d, want.d), (got.s, want.s)):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(("m", "k"), [(1, 1), (1, 32), (8, 36), (9, 512), (17, 544), (5, 1028)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_writes_every_block_and_nothing_else(layout: str, m: int, k: int) -> None:
    """Ragged in every way a warp, a thread block and a 128-bit load can be."""
    a = Problem(m, 1, -(-k // BLOCK) * BLOCK, "q8_0").a[:, :k].copy()
    padded = np.pad(a, ((0, 0), (0, -k % BLOCK)))
    want = Q81.of_values(padded)
    arrays = [np.full(x.size + 64, 0x55, x.dtype) for x in encode(layout, want)]
    Simulator(order=3).run(Launch(q8_1_quantizer(layout), *q8_1_grid(m, k), (a, *arrays)))
    assert all((x[-64:] == 0x55).all() for x in arrays)
    for got, wanted in zip(arrays, encode(layout, want), strict=True):
        np.testing.assert_array_equal(
            got[:-64], wanted
        )  # zeros beyond K in K-outermost layouts included


@pytest.mark.parametrize("layout", LAYOUTS)
def test_machine_code(layout: str) -> None:
    """Four 128-bit loads in flight a thread, or eight of 64 bits, and nothing spilled."""
    outputs = (uint8[::1],) if layout == "blocks" else (int8[::1], float32[::1])
    code = machine_code(q8_1_quantizer(layout), (float32[:, ::1], *outputs), "sm_90a")
    assert (code.stack_bytes, code.spill_store_bytes, code.spill_load_bytes) == (0, 0, 0)
    load, loads = ("LDG.E.64", 4 * AHEAD) if layout == "mma_order" else ("LDG.E.128", 2 * AHEAD)
    assert code.count(load) == loads
    assert code.registers <= 40, "six blocks of 256 threads on an SM"
    assert code.count("ACQBULK") == code.count("PREEXIT") == 1
    first_sum = code.sass.index("SHFL")
    assert code.sass.rindex(load) < first_sum, "all loads before the first use"


def test_codes_of_16_in_mma_order() -> None:
    """Position 4t + i of each 16 is that of k = 2t + (0, 8, 1, 9)[i]; elsewhere nothing differs."""
    a = Problem(3, 1, 160, "q8_0").a
    made = {}
    for layout in ("k_outermost", "mma_order"):
        arrays = encode(layout, Q81.of_values(np.zeros_like(a)))
        Simulator().run(Launch(q8_1_quantizer(layout), *q8_1_grid(3, 160), (a, *arrays)))
        made[layout] = arrays
    natural, mma = (made[layout][0].reshape(-1, 16) for layout in made)
    for t in range(4):
        for i, k in enumerate((0, 8, 1, 9)):
            np.testing.assert_array_equal(mma[:, 4 * t + i], natural[:, 2 * t + k])
    np.testing.assert_array_equal(made["mma_order"][1], made["k_outermost"][1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bit_exact_in_the_simulator(layout: str) -> None:
    """Where nothing is contracted the kernel is the codec, ties and both signs of zero included."""
    a = np.zeros((4, 96), np.float32)
    a[0, :32] = np.arange(32) - 15.5  # ties after the scale of 127 / 15.5 ...
    a[0, 0] = -127.0  # ... and here the scale is 1, so that every half is a tie
    a[1] = np.float32(-0.0)
    a[2, 5] = 1e-40  # below the smallest normal: 1/d would be infinite
    a[3] = Problem(1, 1, 96, "q8_0").a[0]
    got = quantized(Simulator(), a, layout)
    if layout == "blocks":
        want = Q81.of_blocks(FORMATS["q8_1"].quantize(a))
        np.testing.assert_array_equal(got.d, want.d)
        np.testing.assert_array_equal(got.s, want.s)
        np.testing.assert_array_equal(got.q, want.q)
    np.testing.assert_array_equal(got.q[1], 0)
    np.testing.assert_array_equal(got.q[2], 0)
    np.testing.assert_array_equal(got.q[0, 1:4], [-15, -14, -13])  # halves go away from zero


def test_what_there_is_not() -> None:
    with pytest.raises(ValueError, match=r"layout 'rows': layouts are .*'mma_order'"):
        q8_1_quantizer("rows")
