"""Rows of quantized matrices by the kernel, in the simulator, against the codec."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qformats import FILE_FORMATS, FORMATS, WEIGHT_FORMATS, dequantize, quantize
from reference.drawn import random_blocks
from steps.compile.compiler import machine_code, signature_of
from steps.driver.machines import Simulator
from steps.kernels import rows
from tests.kernels.between_problems import Output, as_floats, of_dtype

NAMES = (*WEIGHT_FORMATS, *FILE_FORMATS)
DTYPES = ("float32", "float16", "bfloat16")


def blocks_of(name: str, n: int, blocks: int, seed: int = 0) -> np.ndarray:
    """Of random numbers; of random codes and scales in a format that is not written."""
    rng, k = np.random.default_rng(seed), blocks * FORMATS[name].elements
    if FORMATS[name].written:
        return quantize(rng.standard_normal((n, k), np.float32), name)
    return random_blocks(rng, n, k, name)


def run(name: str, blocks: np.ndarray, dtype: str, ids: np.ndarray | None, order: int = 0) -> Any:
    """The rows, whose guard bands are whole."""
    count = len(blocks) if ids is None else len(ids)
    out = Output((count, blocks.shape[1] * FORMATS[name].elements), dtype)
    Simulator(order).run(rows.launch(name, blocks.view(np.uint8).reshape(-1), out.array, ids))
    out.check()
    return out.array


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_every_value_is_the_codecs_rounded_once(name: str, dtype: str) -> None:
    blocks = blocks_of(name, 3, 2)
    right = as_floats(of_dtype(dequantize(blocks), dtype))
    assert len(np.unique(right)) > 3 or name == "q1_0"
    np.testing.assert_array_equal(as_floats(run(name, blocks, dtype, None)), right)


@pytest.mark.parametrize("of_ids", [np.int32, np.int64])
@pytest.mark.parametrize("name", ["q4_0", "q6_k"])
def test_rows_by_id(name: str, of_ids: Any) -> None:
    """In any order and more than once; a row of no such id is NaN, and reads nothing: the simulator
    ends with an error where a kernel reads past an array."""
    blocks, ids = blocks_of(name, 5, 3, 1), np.array([4, 0, 5, 4, -1, 2**31 - 1, -(2**31)], of_ids)
    got, inside = run(name, blocks, "float32", ids, 1), (ids >= 0) & (ids < 5)
    assert np.isnan(got[~inside]).all()
    np.testing.assert_array_equal(got[inside], dequantize(blocks)[ids[inside]])


def test_a_row_of_several_thread_blocks() -> None:
    blocks = blocks_of("q8_0", 2, 2 * rows.EIGHT * rows.THREADS // 32 + 1, 2)
    np.testing.assert_array_equal(run("q8_0", blocks, "float32", None), dequantize(blocks))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["q4_0", "q4_k", "mxfp4"])
def test_machine_code(name: str) -> None:
    """Wide stores, no spills, no division of 64 bits."""
    fmt, ids = FORMATS[name], np.zeros(1, np.int64)
    w, out = (
        np.zeros(4096 // fmt.elements * fmt.block_bytes, np.uint8),
        Output((1, 4096), "float16"),
    )
    launch = rows.launch(name, w, out.array, ids)
    code = machine_code(launch.kernel, signature_of(launch.args), "sm_90a")
    assert (code.stack_bytes, code.spill_store_bytes, code.spill_load_bytes) == (0, 0, 0)
    assert code.count("STG") == code.count("STG.E.128") == 2
    assert not code.count("CALL", "DMUL", "DADD", "F2F")
