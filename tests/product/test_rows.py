"""`dequantize` and `get_rows`: values of the codec on any machine, launches on a GPU, refusals."""

from __future__ import annotations

import inspect
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qformats import dequantize as by_codec
from qformats import quantize
from reference.bfloat16 import bfloat16_bits
from steps.driver.machines import Simulator
from steps.product import rows as api
from steps.product.rows import dequantize, get_rows
from tests.driver.fake_gpu import FakeGpu, Tensor, device_array

N, K = 5, 96
HERE = 1 << 44
BLOCKS = quantize(np.random.default_rng(0).standard_normal((N, K), np.float32), "q5_1")
BYTES = BLOCKS.view(np.uint8)
IDS = np.array([4, 4, 0])


@pytest.fixture
def fresh(gpu: FakeGpu, torch: Any, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """A GPU that launches are prepared for anew."""
    api._prepared.clear()
    monkeypatch.setattr(api, "current_device", lambda: 0)
    yield gpu
    api._prepared.clear()


def test_blocks_give_the_values_of_the_codec() -> None:
    machine = Simulator()
    right = by_codec(BLOCKS)
    np.testing.assert_array_equal(dequantize(BLOCKS, machine=machine), right)
    half = dequantize(BLOCKS, dtype="float16", machine=machine)
    assert half.dtype == np.float16
    np.testing.assert_array_equal(half, right.astype(np.float16))
    np.testing.assert_array_equal(get_rows(BLOCKS, IDS, machine=machine), right[IDS])
    bits = get_rows(BLOCKS[::2], IDS[2:], "q5_1", dtype="bfloat16", machine=machine)
    np.testing.assert_array_equal(bits, bfloat16_bits(right[:1]))
    assert get_rows(BLOCKS, IDS[:0], machine=machine).shape == (0, K)


def test_on_a_gpu_rows_are_launched_where_arrays_lie(fresh: FakeGpu) -> None:
    """Prepared once for a shape; on the stream of torch, or the one that is named."""
    w, ids = Tensor(BYTES.shape, HERE, dtype="uint8"), Tensor((3,), 2 * HERE, dtype="int64")
    for stream in (4711, 4711, 12):
        fresh.launched.clear()
        given = None if stream == 4711 else SimpleNamespace(cuda_stream=stream)
        rows = get_rows(w, ids, "q5_1", dtype="bfloat16", machine=fresh, stream=given)
        assert (type(rows), rows.shape, rows.dtype) == (Tensor, (3, K), "bfloat16")
        assert {HERE, 2 * HERE, rows.address} <= fresh.values()
        ((name, on, _),) = fresh.launched
        assert (name, on) == ("dequantize_rows", stream)
    assert len(api._prepared) == 1
    whole = dequantize(device_array(BYTES.shape, np.uint8, HERE), "q5_1", machine=fresh)
    assert (whole.shape, whole.dtype) == ((N, K), np.float32)
    assert len(api._prepared) == 2
    assert get_rows(w, Tensor((0,), HERE, dtype="int64"), "q5_1", machine=fresh).shape == (0, K)


def test_what_does_not_fit_is_refused(fresh: FakeGpu) -> None:
    def tensor(shape: tuple[int, ...] = BYTES.shape, at: int = HERE, dtype: str = "uint8") -> Any:
        return Tensor(shape, at, dtype=dtype)

    wrong: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
        (ValueError, "format is None: bytes on a GPU need one of q4_0, ", tensor(), {}),
        (ValueError, "rows of 72 bytes, and a block of q6_k has 210", tensor(), {"format": "q6_k"}),
        (ValueError, "0x100000000001, an odd address, and q5_1", tensor(at=HERE + 1), {}),
        (TypeError, "w must be uint8, got float32", tensor(dtype="float32"), {}),
        (ValueError, "w must have 2 dimensions, got 1", tensor((72,)), {}),
        (TypeError, "dtype must be float32, float16 or bfloat16", tensor(), {"dtype": np.int8}),
        (
            TypeError,
            "the machine is the simulator: pass blocks",
            tensor(),
            {"machine": Simulator()},
        ),
        (ValueError, "w holds blocks of q5_1 and format is 'q4_0'", BLOCKS, {"format": "q4_0"}),
        (TypeError, "w must hold blocks of q4_0, .*got uint8", BYTES, {}),
    ]
    for kind, message, w, options in wrong:
        given = {"machine": fresh} | options
        if isinstance(w, Tensor) and not message.startswith("format is None"):
            given = {"format": "q5_1"} | given
        with pytest.raises(kind, match=message):
            dequantize(w, **given)
    with pytest.raises(TypeError, match="ids must be on the GPU, as w is, got ndarray"):
        get_rows(tensor(), IDS, "q5_1", machine=fresh)
    with pytest.raises(ValueError, match=r"w is empty: its shape is \(0, 72\)"):
        get_rows(tensor((0, 72)), Tensor((3,), HERE, dtype="int64"), "q5_1", machine=fresh)
    with pytest.raises(TypeError, match="ids must be int32 or int64, got float64"):
        get_rows(BLOCKS, IDS.astype(float), machine=fresh)
    assert fresh.launched == []


@pytest.mark.parametrize("call", [dequantize, get_rows])
def test_help_names_every_argument(call: Any) -> None:
    lines = re.findall(r"(?m)^(\w+(?:, \w+)*) *: ", inspect.getdoc(call) or "")
    said = {name for line in lines for name in line.split(", ")}
    assert said == set(inspect.signature(call).parameters)
