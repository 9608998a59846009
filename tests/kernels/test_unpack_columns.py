"""Packed weights as floats again, in the simulator: every format and layout against the codec."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from qformats import FILE_FORMATS, FORMATS, WEIGHT_FORMATS, dequantize, format_of
from qformats.repack import as_bytes, k_outermost, tiles
from qformats.storage import stored_weights
from steps.compile.compiler import machine_code, signature_of
from steps.contract import array_dtype
from steps.driver.machines import Simulator
from steps.kernels import unpack
from steps.product.choice import packings
from tests.kernels.between_problems import ROUNDING, Output, as_floats, of_dtype
from tests.kernels.packed_tiles import blocks_with
from tests.kernels.test_rows import DTYPES, NAMES, blocks_of

ROUNDED = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs")
"""Formats whose scales packed tiles round to 11 bits."""
LAYOUTS = {pack.__name__: pack for pack in (tiles, k_outermost, as_bytes)}


def run(
    blocks: np.ndarray, dtype: str, layout: str = "tiles", first: int = 0, width: int | None = None
) -> np.ndarray:
    """Columns of the weights, whose guard bands are whole; all rows from `first` on by default."""
    fmt = format_of(blocks)
    k = blocks.shape[1] * fmt.elements
    out = Output((len(blocks), k - first if width is None else width), dtype)
    arrays = LAYOUTS[layout](blocks)
    Simulator(first).run(unpack.launch(layout, fmt.name, arrays, k, first, out.array))
    out.check()
    return out.array


def stored(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Float64 weights [N, K] as packed tiles hold them, and |scale level| + |offset|."""
    fmt = format_of(blocks)
    if fmt.name in WEIGHT_FORMATS:
        w = dequantize(blocks).astype(np.float64)
        return w, np.abs(w)
    held = stored_weights(blocks)
    shape = *held.scale.shape, -1
    product = (held.levels.reshape(shape) * held.scale[..., None]).reshape(held.levels.shape)
    offset = np.zeros_like(held.scale) if held.offset is None else held.offset
    offsets = np.repeat(offset, product.shape[1] // offset.shape[1], axis=1)
    return product + offsets, np.abs(product) + np.abs(offsets)


EACH = [
    pytest.param(name, dtype, marks=() if j == i % len(DTYPES) else pytest.mark.every)
    for i, name in enumerate(NAMES)
    for j, dtype in enumerate(DTYPES)
]
"""Every format in one dtype, and the next in another: loads are of a format, stores of a dtype."""


@pytest.mark.parametrize(("name", "dtype"), EACH)
def test_values_are_those_of_the_packed_tiles_rounded_once(name: str, dtype: str) -> None:
    """All columns of a ragged matrix, and some of them. They are the codec's, but where scales are
    rounded: there each scale and each minimum is off by 2^-11 of itself at most."""
    elements = FORMATS[name].elements
    blocks = blocks_of(name, 133 if name == "q4_1" else 21, 192 // elements + 1)
    codec, (held, size) = dequantize(blocks), stored(blocks)
    right = as_floats(of_dtype(held.astype(np.float32), dtype))
    assert len(np.unique(right)) > 3 or name == "q1_0"
    k = right.shape[1]
    for first, width in ((0, k), (64, 96)):
        found = as_floats(run(blocks, dtype, first=first, width=width))
        np.testing.assert_array_equal(found, right[:, first : first + width])
    same = np.array_equal(right, as_floats(of_dtype(codec, dtype)))
    assert same is (name not in ROUNDED)
    relative, least = ROUNDING[dtype]
    off = np.abs(right - codec.astype(np.float64))
    assert (off <= 2.0**-11 * size + relative * (1 + 2.0**-11) * size + least).all()


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_scales_of_any_size(name: str) -> None:
    """From the smallest float16 on, of both signs, beside the largest in their row."""
    d = np.ldexp(1.0, np.arange(-24, 16, 3)).astype(np.float16)
    d = np.stack([d, -d, np.full_like(d, 65504), d[::-1]])
    blocks = blocks_with(name, *d.shape, d, m=np.float16(-3) * d[:, ::-1].clip(-1e4, 1e4))
    minima = "m" in blocks.dtype.names
    if minima:  # smaller ones beside the largest are less exact
        blocks["m"][np.abs(blocks["m"]) < 0.25] = 0
    np.testing.assert_array_equal(run(blocks, "float32"), dequantize(blocks))
    with np.errstate(over="ignore"):
        half = dequantize(blocks).astype(np.float16)
    np.testing.assert_array_equal(run(blocks, "float16"), half)
    assert np.isinf(half).any(), "beyond float16"


def test_scales_of_mxfp4_that_are_too_small_are_zero() -> None:
    """From 2^-31 of the largest in their row down, and with them their weights."""
    blocks = blocks_of("mxfp4", 1, 3)
    blocks["e"] = [[140, 140 - 31, 140 - 32]]
    found, right = run(blocks, "float32"), dequantize(blocks)
    np.testing.assert_array_equal(found[:, :64], right[:, :64])
    assert right[:, 64:].any()
    assert not found[:, 64:].any()


@pytest.mark.parametrize(("name", "dtype"), EACH)
def test_layouts_before_compute_capability_8(name: str, dtype: str) -> None:
    """The whole matrix at once."""
    (kernel,) = packings(name, (7, 5), "fast")
    layout = kernel.pack.__name__
    assert layout == ("k_outermost" if name in WEIGHT_FORMATS else "as_bytes")
    blocks = blocks_of(name, 131, 64 // FORMATS[name].elements or 1)
    right = as_floats(of_dtype(dequantize(blocks), dtype))
    np.testing.assert_array_equal(as_floats(run(blocks, dtype, layout)), right)
    with pytest.raises(ValueError, match=f"columns 32 to 64 of .*: {layout} is unpacked whole"):
        run(blocks, dtype, layout, 32, 32)


@pytest.mark.parametrize("cc", [(7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_what_a_layer_packs_first_can_be_unpacked(cc: tuple[int, int]) -> None:
    """Whatever a layer packs besides, its first packing is one of these."""
    first = {
        packings(name, cc, accuracy)[0].pack.__name__
        for name in (*WEIGHT_FORMATS, *FILE_FORMATS)
        for accuracy in ("exact", "fast")
    }
    assert first == ({"k_outermost", "as_bytes"} if cc < (8, 0) else {"tiles"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(*one, marks=() if i in (1, 2, 4, 7) else pytest.mark.every)
        for i, one in enumerate(
            itertools.product(("q4_0", "q5_1", "q6_k", "mxfp4"), ("bfloat16", "float32"))
        )
    ],
)
def test_machine_code(name: str, dtype: str) -> None:
    """Wide accesses of global memory for codes and values, no spills, no arithmetic in float64."""
    arrays = tiles(np.zeros((128, 4096 // FORMATS[name].elements), FORMATS[name].dtype))
    panel = np.zeros((128, 1024), array_dtype(dtype))
    made: Any = unpack.launch("tiles", name, arrays, 4096, 0, panel)
    code = machine_code(made.kernel, signature_of(made.args), "sm_90a")
    assert (code.stack_bytes, code.spill_store_bytes, code.spill_load_bytes) == (0, 0, 0)
    assert code.count("STG") == code.count("STG.E.128") > 0
    assert code.count("LDS") == code.count("LDS.128") > 0
    assert code.count("LDG.E.128") > 0
    assert not code.count("CALL", "DMUL", "DADD", "I2F")
