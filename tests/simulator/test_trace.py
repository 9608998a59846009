"""What is recorded of a warp: kernels whose accesses are known by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import cuda, float32, uint8

from steps.instructions import (
    bulk_copy,
    cp_async_16,
    cp_async_commit,
    cp_async_wait,
    fence_mbarrier_init,
    ldmatrix_x4,
    load_f32x4,
    mbarrier_arrive_expect,
    mbarrier_init,
    mbarrier_wait,
)
from steps.simulator.banks import lanes_together, sectors, served
from steps.simulator.launch import simulate
from steps.simulator.trace import Instruction, Recorder, first_warps

LANES = range(32)


def recorded(
    kernel: Any, grid: Any, block: Any, args: tuple, recorder: Recorder | None = None
) -> list[Instruction]:
    recorder = recorder or Recorder()
    simulate(kernel, grid, block, args, trace=recorder)
    return recorder.instructions()


# --- sectors, and which word is served when -------------------------------------------------------
@pytest.mark.parametrize(
    ("addresses", "size", "expected"),
    [
        pytest.param([4 * i for i in LANES], 4, 4, id="a row of words"),
        pytest.param([16 * i for i in LANES], 16, 16, id="128 bits"),
        pytest.param([2 * i for i in LANES], 2, 2, id="halves"),
        pytest.param([64] * 32, 4, 1, id="one word for all"),
        pytest.param([18 * i for i in LANES], 2, 18, id="scales of blocks of 18 bytes"),
        pytest.param([4096 * i for i in LANES], 1, 32, id="a column of bytes"),
        pytest.param([32 * i - 4 for i in range(1, 33)], 8, 33, id="across the border"),
        pytest.param([None] * 31 + [0], 4, 1, id="one lane"),
        pytest.param([0] + [None] * 31, 2304, 72, id="a bulk copy"),
    ],
)
def test_sectors_by_hand(addresses: list[int | None], size: int, expected: int) -> None:
    assert sectors(addresses, size) == expected


@given(data=st.data(), size=st.sampled_from([1, 2, 4, 8, 16]))
def test_each_word_is_served_once_and_no_bank_twice_a_cycle(data: st.DataObject, size: int) -> None:
    lane = st.none() | st.integers(0, 256).map(lambda i: i * size)
    addresses = data.draw(st.lists(lane, max_size=32))
    parts = served(addresses, size)
    together = lanes_together(addresses, size)
    for i, part in enumerate(parts):
        own = [a for a in addresses[i * together : (i + 1) * together] if a is not None]
        words = [word for cycle in part for word in cycle]
        assert sorted(words) == sorted({(a + at) // 4 for a in own for at in range(size)})
        assert all(len({word % 32 for word in cycle}) == len(cycle) for cycle in part)
        banks = Counter(word % 32 for word in words)
        assert len(part) == max(banks.values(), default=0), (
            "no cycle more than the fullest bank has"
        )


# --- kernels --------------------------------------------------------------------------------------
@cuda.jit
def transpose(a, out):
    tile = cuda.shared.array((32, 32), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    for j in range(0, 32, 8):
        tile[y + j, x] = a[y + j, x]
    cuda.syncthreads()
    for j in range(0, 32, 8):
        out[x, y + j] = tile[x, y + j]


def test_a_transpose_lane_by_lane() -> None:
    a = np.arange(32 * 32, dtype=np.float32).reshape(32, 32)
    out = np.zeros_like(a)
    load, store, column, scattered = recorded(transpose, 1, (32, 8), (a, out), Recorder(warps=(3,)))
    np.testing.assert_array_equal(out, a)
    assert [each.kind for each in (load, store, column, scattered)] == ["load", "store"] * 2
    assert [each.array for each in (load, store, column, scattered)] == ["a", "tile", "tile", "out"]
    assert {each.requests for each in (load, store, column, scattered)} == {4}
    assert {each.warp for each in (load, store, column, scattered)} == {3}
    assert load.lanes == [4 * (3 * 32 + i) for i in LANES], "of the first request: row 3"
    assert (load.sectors_per_request, load.bytes_used) == (4, 128)
    assert (store.wavefronts, store.conflicts) == (4, 0)
    assert (column.wavefronts, column.conflicts) == (4 * 32, 4 * 31)
    assert scattered.lanes == [4 * (32 * i + 3) for i in LANES]
    assert scattered.sectors == 4 * 32
    assert column.place.text == "out[x, y + j] = tile[x, y + j]"
    assert column.place.name.startswith("test_trace.py:")


def test_one_block_runs_and_the_others_do_not() -> None:
    @cuda.jit
    def kernel(out):
        out[cuda.blockIdx.x, cuda.threadIdx.x] = 1

    out = np.zeros((3, 64), np.float32)
    (store,) = recorded(kernel, 3, 64, (out,), Recorder(block=(1, 0, 0), warps=(1,)))
    assert out.sum(axis=1).tolist() == [0, 64, 0]
    assert store.lanes == [4 * (64 + 32 + i) for i in LANES]


def test_warps_are_told_apart_and_the_first_is_shown() -> None:
    @cuda.jit
    def kernel(x, out):
        t = cuda.threadIdx.x
        if t >= 32:
            out[t] = x[2 * t]
        out[t] = x[t]

    x = np.zeros(256, np.float32)
    found = recorded(kernel, 1, 96, (x, x.copy()), Recorder(warps=None))
    assert sorted(each.warp for each in found) == [0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    shown = first_warps(found)
    assert [(each.warp, each.kind) for each in shown] == [
        *((1, "load"), (1, "store")),
        *((0, "load"), (0, "store")),
    ]
    assert shown[0].sectors == 8


def test_lanes_that_take_no_part_and_turns_of_a_loop() -> None:
    @cuda.jit
    def kernel(x, out):
        t = cuda.threadIdx.x
        for i in range(t % 4 + 1):
            out[t] = x[i]

    x = np.zeros(64, np.float32)
    load, store = recorded(kernel, 1, 32, (x, x.copy()))
    assert (load.requests, store.requests) == (4, 4)
    assert load.sectors == 4, "one word for all lanes"
    assert store.sectors == 4 * 4, "lanes 0-31, 1-3 5-7 .., 2 3 6 7 .., 3 7 ..: four sectors each"
    assert None not in store.lanes


def test_the_way_through_device_functions() -> None:
    @cuda.jit(device=True)
    def get(x, i):
        return x[i]

    @cuda.jit
    def kernel(x, out):
        t = cuda.threadIdx.x
        out[t] = get(x, t) + get(x, 0)

    x = np.zeros(32, np.float32)
    found = recorded(kernel, 1, 32, (x, x.copy()))
    loads = [each for each in found if each.kind == "load"]
    assert [each.sectors for each in loads] == [4, 1]
    assert {len(each.way) for each in loads} == {2}
    assert {each.way[0].text for each in loads} == {"return x[i]"}
    assert {each.place.text for each in loads} == {"out[t] = get(x, t) + get(x, 0)"}


def test_two_loads_of_one_address_leave_one_trail() -> None:
    @cuda.jit
    def kernel(x, out):
        t = cuda.threadIdx.x
        out[t] = x[t] + x[t] + x[t + 1]

    found = recorded(kernel, 1, 32, (np.zeros(64, np.float32), np.zeros(64, np.float32)))
    first, again, other = (each for each in found if each.kind == "load")
    assert first.trail == again.trail != other.trail


def test_instructions_by_kind() -> None:
    wait = cp_async_wait(0)

    @cuda.jit
    def kernel(source, out, counter):
        stage = cuda.shared.array(32 * 32, uint8, alignment=16)
        lane = cuda.threadIdx.x
        cp_async_16(stage, lane * 32, source, 16 * lane)
        cp_async_commit()
        wait()
        cuda.syncthreads()
        x = ldmatrix_x4(stage, lane * 32)
        y = load_f32x4(stage, lane * 32)
        cuda.atomic.add(counter, 0, 1)
        out[lane] = x[0] + y[0]

    args = (np.zeros(512, np.uint8), np.zeros(32, np.float32), np.zeros(1, np.int32))
    found = recorded(kernel, 1, 32, args)
    assert args[2][0] == 32
    assert [(each.kind, each.array, each.size) for each in found] == [
        ("cp.async", "source", 16),
        ("cp.async", "stage", 16),
        ("ldmatrix", "stage", 16),
        ("load", "stage", 16),
        ("atomic", "counter", 4),
        ("store", "out", 4),
    ]
    _, copy, matrix, load, atomic, _ = found
    assert [each.conflicts for each in (copy, matrix, load)] == [4, 4, 4]
    assert (atomic.requests, atomic.sectors) == (1, 1)


def test_a_bulk_copy_is_one_lane_and_all_of_its_bytes() -> None:
    @cuda.jit
    def kernel(source, out):
        memory = cuda.shared.array(1024 + 8, uint8, alignment=128)
        lane = cuda.threadIdx.x
        if lane == 0:
            mbarrier_init(memory, 1024, 1)
            fence_mbarrier_init()
        cuda.syncthreads()
        if lane == 0:
            mbarrier_arrive_expect(memory, 1024, 1024)
            bulk_copy(memory, 0, source, 64, 1024, memory, 1024)
        mbarrier_wait(memory, 1024, 0)
        out[lane] = memory[lane]

    found = recorded(kernel, 1, 32, (np.ones(2048, np.uint8), np.zeros(32, np.uint8)))
    source, destination, *_ = sorted(found, key=lambda each: each.kind)
    assert {source.kind, destination.kind} == {"bulk copy"}
    source, destination = sorted((source, destination), key=lambda each: each.space)
    assert (source.array, source.size, source.sectors) == ("source", 1024, 32)
    assert source.lanes == [64] + [None] * 31
    assert (destination.array, destination.lanes[0]) == ("memory", 0)
    assert (destination.wavefronts, destination.conflicts) == (0, 0)


def test_a_block_or_a_warp_that_is_not_there() -> None:
    x = np.zeros((32, 32), np.float32)
    with pytest.raises(ValueError, match=r"block \(1, 0, 0\) is not in a grid of \(1, 1, 1\)"):
        recorded(transpose, 1, (32, 8), (x, x), Recorder(block=(1, 0, 0)))
    with pytest.raises(ValueError, match="256 threads has warps 0 to 7, no 8"):
        recorded(transpose, 1, (32, 8), (x, x), Recorder(warps=(8,)))
