"""The kernel that quantizes activations: both layouts, both sums, any K; simulator and GPU.

The limits are those of two IEEE implementations, of which one (a GPU's) may contract a multiply and
a subtract: a code may differ by one, on at most one value in ten thousand, where it lies on a tie.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qformats import BLOCK, FORMATS
from qformats.device import q8_1_grid, q8_1_quantizer
from reference import Q81, Problem
from steps.activations import decode, encode
from steps.machines import Gpu, Simulator
from steps.step import Launch

MACHINES = [
    pytest.param(Simulator, (3, 64), id="simulator"),
    pytest.param(Gpu, (64, 4096), marks=pytest.mark.gpu, id="gpu"),
]


def quantized(machine: Any, a: np.ndarray, layout: str, s: str) -> Q81:
    """What the kernel makes of float32 A[M, K], its K padded to whole blocks."""
    m, k = a.shape
    blocks_k = -(-k // BLOCK)
    empty = Q81(
        q=np.zeros((m, blocks_k * BLOCK), np.int8),
        d=np.zeros((m, blocks_k), np.float32),
        s=np.zeros((m, blocks_k), np.float32),
    )
    arrays = [machine.array(np.full_like(x, 0x55)) for x in encode(layout, empty)]
    machine.run(Launch(q8_1_quantizer(layout, s), *q8_1_grid(m, k), (machine.array(a), *arrays)))
    host = tuple(machine.host(x) for x in arrays)
    return decode(layout, host, m, blocks_k * BLOCK)


@pytest.mark.parametrize("cut", [0, 1, 17], ids=lambda cut: f"K-{cut}")
@pytest.mark.parametrize("distribution", ["uniform", "normal", "llm"])
@pytest.mark.parametrize("s", ["codes", "values"])
@pytest.mark.parametrize("layout", ["blocks", "slabs"])
@pytest.mark.parametrize(("kind", "shape"), MACHINES)
def test_agrees_with_the_codec(
    kind: type, shape: tuple[int, int], layout: str, s: str, distribution: str, cut: int
) -> None:
    m, k = shape
    a = np.ascontiguousarray(Problem(m, 1, k, "q8_0", distribution).a[:, : k - cut])
    padded = np.pad(a, ((0, 0), (0, cut)))
    got = quantized(kind(), a, layout, s)
    want = (
        Q81.of_blocks(FORMATS["q8_1"].quantize(padded, s=s))
        if layout == "blocks"
        else Q81.of_values(padded, s)
    )
    off = np.abs(got.q.astype(int) - want.q)
    assert off.max() <= 1
    assert off.astype(bool).mean() <= 1e-4
    np.testing.assert_allclose(got.d, want.d, rtol=1e-6)

    half = 2.0**-10 if layout == "blocks" else 0.0  # d and s were each rounded to f16
    size = np.abs(padded.astype(np.float64)).reshape(m, -1, BLOCK).sum(axis=-1)
    exact = (
        got.d.astype(np.float64) * got.q.reshape(m, -1, BLOCK).sum(axis=-1)
        if s == "codes"
        else padded.astype(np.float64).reshape(m, -1, BLOCK).sum(axis=-1)
    )
    assert (np.abs(got.s - exact) <= half * np.abs(exact) + BLOCK * 2.0**-24 * size).all()


@pytest.mark.parametrize("layout", ["blocks", "slabs"])
def test_bit_exact_in_the_simulator(layout: str) -> None:
    """Where nothing is contracted the kernel is the codec, ties and both signs of zero included."""
    a = np.zeros((4, 96), np.float32)
    a[0, :32] = np.arange(32) - 15.5  # ties after the scale of 127 / 15.5 ...
    a[0, 0] = -127.0  # ... and here the scale is 1, so that every half is a tie
    a[1] = np.float32(-0.0)
    a[2, 5] = 1e-40  # below the smallest normal: 1/d would be infinite
    a[3] = Problem(1, 1, 96, "q8_0").a[0]
    got = quantized(Simulator(), a, layout, "codes")
    if layout == "blocks":
        want = Q81.of_blocks(FORMATS["q8_1"].quantize(a))
        np.testing.assert_array_equal(got.d, want.d)
        np.testing.assert_array_equal(got.s, want.s)
        np.testing.assert_array_equal(got.q, want.q)
    np.testing.assert_array_equal(got.q[1], 0)
    np.testing.assert_array_equal(got.q[2], 0)
    np.testing.assert_array_equal(got.q[0, 1:4], [-15, -14, -13])  # halves go away from zero


def test_what_there_is_not() -> None:
    with pytest.raises(ValueError, match="no Q8_1 quantizer of layout 'rows' with s 'codes'"):
        q8_1_quantizer("rows")
    with pytest.raises(ValueError, match="layout 'slabs' with s 'raw'"):
        q8_1_quantizer("slabs", "raw")
