"""What the simulator does in a shorter way gives what the long way gives."""

from __future__ import annotations

import gc
import math

import numpy as np
import pytest
from numba import cuda
from numba.cuda.types import float32, int32, uint8, uint32

from steps.instructions import as_bits, load_u32, shfl_xor
from steps.simulator.arrays import CheckedArray
from steps.simulator.c_types import UNCHANGED, cast_to
from steps.simulator.launch import OutOfRange, SimulatorError, simulate
from steps.simulator.local_arrays import local_array

VALUES = (
    *(sign * ((1 << bits) + more) for bits in range(65) for more in (-1, 0, 1) for sign in (1, -1)),
    *(0.5, -1.5, 3e9, -3e9, 1e30, math.inf, -math.inf, math.nan),
    *(np.float32(7.9), np.float32(-1e20), np.int64(-1), np.uint8(200), np.bool_(True), True),
)


@pytest.mark.parametrize(
    "dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8"]
)
def test_a_value_taken_as_unchanged_is_what_the_cast_returns(dtype: str) -> None:
    cast = cast_to(np.dtype(dtype))
    expression = UNCHANGED[cast].format(value="value", cast="cast")
    taken = 0
    for value in (*VALUES, *map(cast, VALUES[:20])):
        if eval(expression, {"value": value, "cast": cast}):
            taken += 1
            assert type(cast(value)) is type(value)
            np.testing.assert_array_equal(cast(value), value)
    assert taken  # the expression is true of some


@pytest.mark.parametrize("dtype", ["i1", "u1", "i4", "u4", "i8", "f2", "f4", "f8"])
@pytest.mark.parametrize("shape", [(5,), (2, 3)])
def test_a_local_array_stores_and_loads_as_an_array_in_memory(
    dtype: str, shape: tuple[int, ...]
) -> None:
    at = 4 if len(shape) == 1 else (1, 2)
    for value in VALUES:
        local = local_array(shape, np.dtype(dtype))
        memory = CheckedArray(np.zeros(shape, dtype), "memory")
        with np.errstate(all="ignore"):
            local[at] = memory[at] = value
            if len(shape) == 2:  # through a row, which shares its values
                local[at] = 0
                local[1][2] = value
                np.testing.assert_array_equal(local[1][2], memory[at])
        assert type(local[at]) is type(memory[at])
        np.testing.assert_array_equal(local[at], memory[at])
        np.testing.assert_array_equal(local.data[at], memory.data[at])  # in memory from here on
        assert type(local) is CheckedArray


@pytest.mark.parametrize("key", [5, -1, (0, 0), 1.0])
def test_a_local_array_checks_its_index(key: object) -> None:
    local, row = local_array(5, np.dtype("f4")), local_array((2, 5), np.dtype("f4"))[1]
    said = []
    for array in (local, row, CheckedArray(np.zeros(5, np.float32), "local array", "local")):
        with pytest.raises(SimulatorError) as error:
            array[key]
        said.append((type(error.value), str(error.value)))
        with pytest.raises(SimulatorError):
            array[key] = 1.0
    assert said[0] == said[1] == said[2]


def test_a_local_array_begins_as_garbage_and_keeps_what_it_held() -> None:
    local = local_array((2, 2), np.dtype("f4"))
    assert math.isnan(local[1, 1])
    local[0, 1] = 2.0
    row, other = local[0], local[1]  # share its values
    row[0] = 3.0
    assert (local[0, 0], local[0, 1]) == (3.0, 2.0)
    for each in (row, local):  # and its memory, once there is some
        assert each.data.dtype == np.float32
        row[1], other[1] = 4.0, 5.0
        assert (local[0, 1], local[1, 1], row[0]) == (4.0, 5.0, 3.0)
    assert local_array(1, np.dtype("i1"))[0] == -91


@cuda.jit
def bits_of_a_local_array(out):
    x = cuda.local.array(2, float32)
    codes = cuda.local.array(4, uint8, alignment=4)
    x[1] = float32(out.size)
    for i in range(4):
        codes[i] = uint8(300 + i)
    out[2 * cuda.threadIdx.x] = uint32(load_u32(x, 1) - as_bits(float32(out.size)))
    out[2 * cuda.threadIdx.x + 1] = load_u32(codes, 0)


def test_instructions_read_the_bytes_of_a_local_array() -> None:
    out = np.ones(8, np.uint32)
    simulate(bits_of_a_local_array, 1, 4, (out,))
    np.testing.assert_array_equal(out.reshape(4, 2), [[0, 0x2F2E2D2C]] * 4)


@cuda.jit
def wait_often(out, times):
    x = int32(cuda.threadIdx.x)
    for _ in range(times):
        cuda.syncthreads()
        x = int32(x + shfl_xor(x, 1))
    out[cuda.threadIdx.x] = uint32(x)


@pytest.mark.parametrize("order", [0, -1, 1])
def test_a_whole_block_of_waiting_lanes(order: int) -> None:
    """Each lane begins in the wait of the one before: a thousand deep if one began in another."""
    out = np.zeros(1024, np.uint32)
    simulate(wait_often, 2, 1024, (out, 3), order=order)
    pairs = np.arange(1024) | 1
    np.testing.assert_array_equal(out, 4 * (2 * pairs - 1))


@cuda.jit
def out_of_range(out):
    out[cuda.threadIdx.x] = 0


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_as_before(enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        simulate(wait_often, 1, 32, (np.zeros(32, np.uint32), 1))
        with pytest.raises(OutOfRange):
            simulate(out_of_range, 1, 8, (np.zeros(4, np.uint32),))
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
