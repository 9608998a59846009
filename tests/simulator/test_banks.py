"""Wavefronts of one access, by hand; those of whole kernels, in the simulator."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from numba import cuda, float32, uint8

from qformats import WEIGHT_FORMATS
from reference import Problem
from steps.checks.verify import prepare
from steps.contract import Family, Kernel
from steps.driver.machines import Simulator
from steps.instructions import (
    cp_async_16,
    cp_async_commit,
    cp_async_wait,
    ldmatrix_x4,
    load_f32x4,
    load_u32,
    store_u32x4,
)
from steps.kernels.prefill import mma_tiles, stream_k_tiles
from steps.registry import find, kernel_of
from steps.simulator.banks import BankCounter, wavefronts
from steps.simulator.launch import SimulatorError, simulate
from tests.kernels.passes import RemembersPasses
from tests.steps.works import ENGINEERED, by_turn, input_of, label_of

LANES = range(32)


# --- one access -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("addresses", "size", "expected"),
    [
        pytest.param([4 * i for i in LANES], 4, 1, id="a row of words"),
        pytest.param([4 * (31 - i) for i in LANES], 4, 1, id="backwards"),
        pytest.param([64] * 32, 4, 1, id="one word for all"),
        pytest.param([4 * (i % 2) for i in LANES], 4, 1, id="two words"),
        pytest.param([8 * i for i in LANES], 4, 2, id="every second word"),
        pytest.param([12 * i for i in LANES], 4, 1, id="every third word"),
        pytest.param([16 * i for i in LANES], 4, 4, id="every fourth word"),
        pytest.param([128 * i for i in LANES], 4, 32, id="a column, 32 words a row"),
        pytest.param([132 * i for i in LANES], 4, 1, id="a column, 33 words a row"),
        pytest.param([128 * (i % 4) for i in LANES], 4, 4, id="four words of one bank"),
        pytest.param([128 * i if i < 5 else None for i in LANES], 4, 5, id="five lanes"),
        pytest.param([None] * 32, 4, 0, id="no lane"),
        pytest.param(list(LANES), 1, 1, id="bytes"),
        pytest.param([4 * i for i in LANES], 1, 1, id="bytes, a word each"),
        pytest.param([2 * i for i in LANES], 2, 1, id="halves"),
        pytest.param([8 * i for i in LANES], 8, 2, id="64 bits"),
        pytest.param([128 * i for i in LANES], 8, 32, id="64 bits, a column"),
        pytest.param([8 * (i % 16) for i in LANES], 8, 2, id="64 bits, both halves the same"),
        pytest.param([8 * i if i < 16 else None for i in LANES], 8, 1, id="64 bits, half a warp"),
        pytest.param([8 * (i // 2) for i in LANES], 8, 1, id="64 bits, neighbours the same"),
        pytest.param([8 * (i // 16) for i in LANES], 8, 1, id="64 bits, one for each half"),
        pytest.param([256 * (i // 2) for i in LANES], 8, 16, id="64 bits, pairs in a column"),
        pytest.param([16 * i for i in LANES], 16, 4, id="128 bits"),
        pytest.param([16 * (i // 2) for i in LANES], 16, 2, id="128 bits, neighbours the same"),
        pytest.param(
            [16 * (i // 4 * 2 + i % 2) for i in LANES], 16, 2, id="128 bits, second next the same"
        ),
        pytest.param([16 * (i // 16) for i in LANES], 16, 2, id="128 bits, one for each half"),
        pytest.param([16 * (i % 4) for i in LANES], 16, 4, id="128 bits, fourth next the same"),
        pytest.param(
            [16 * (i // 2) for i in range(30)] + [0, 16], 16, 4, id="128 bits, all pairs but one"
        ),
        pytest.param(
            [0 if i % 2 else None for i in LANES], 16, 2, id="128 bits, every second lane"
        ),
        pytest.param([32 * i for i in LANES], 16, 8, id="128 bits, every second"),
        pytest.param([144 * i for i in LANES], 16, 4, id="128 bits, rows of 128 + 16 bytes"),
        pytest.param([128 * i for i in range(8)], 16, 8, id="ldmatrix, rows of 128 bytes"),
        pytest.param([144 * i for i in range(8)], 16, 1, id="ldmatrix, rows of 144 bytes"),
        pytest.param([128 * i + 16 * (i % 8) for i in LANES], 16, 4, id="ldmatrix_x4, swizzled"),
        pytest.param([32 * i for i in range(16)], 16, 4, id="two matrices, rows of 32 bytes"),
    ],
)
def test_by_hand(addresses: list[int | None], size: int, expected: int) -> None:
    assert wavefronts(addresses, size) == expected


def test_what_no_warp_can_ask() -> None:
    with pytest.raises(ValueError, match="1, 2, 4, 8 or 16 bytes at once, not 12"):
        wavefronts([0], 12)
    with pytest.raises(ValueError, match="a warp has 32 lanes, got 33 addresses"):
        wavefronts([0] * 33, 4)
    with pytest.raises(ValueError, match="8 bytes at address 4 would fault"):
        wavefronts([4], 8)


# --- whole kernels --------------------------------------------------------------------------------
def transpose(pitch: int):
    @cuda.jit
    def kernel(a, out):
        tile = cuda.shared.array((32, pitch), float32)
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        for j in range(0, 32, 8):
            tile[y + j, x] = a[y + j, x]
        cuda.syncthreads()
        for j in range(0, 32, 8):
            out[y + j, x] = tile[x, y + j]

    return kernel


@pytest.mark.parametrize("order", [0, -1, 7])
@pytest.mark.parametrize(("pitch", "conflicts"), [(32, 32 * 31), (33, 0), (34, 32), (40, 32 * 7)])
def test_padding_of_a_transpose(pitch: int, conflicts: int, order: int) -> None:
    a = np.arange(32 * 32, dtype=np.float32).reshape(32, 32)
    out, counter = np.zeros_like(a), BankCounter()
    simulate(transpose(pitch), 1, (32, 8), (a, out), order=order, banks=counter)
    np.testing.assert_array_equal(out, a.T)
    assert counter.ideal == 64
    assert counter.conflicts == counter.wavefronts - 64 == conflicts
    worst = counter.report().splitlines()[0]
    assert f"{conflicts} of them conflicts, in 32 accesses of a warp" in worst
    if conflicts:
        assert "out[y + j, x] = tile[x, y + j]" in worst


def test_blocks_and_kernels_add_up() -> None:
    a = np.zeros((32, 32), np.float32)
    counter = BankCounter()
    simulate(transpose(33), 3, (32, 8), (a, a.copy()), banks=counter)
    assert counter.wavefronts == 3 * 64
    simulate(transpose(33), 2, (32, 8), (a, a.copy()), banks=counter)
    assert counter.wavefronts == 5 * 64


@pytest.mark.parametrize(("pitch", "each"), [(32, 2), (48, 1), (128, 8)])
def test_instructions(pitch: int, each: int) -> None:
    """cp.async, 128-bit and ldmatrix accesses of rows of 16 bytes, `pitch` bytes apart."""
    wait_all = cp_async_wait(0)

    @cuda.jit
    def kernel(source, out):
        stage = cuda.shared.array(32 * pitch, uint8, alignment=16)
        lane = cuda.threadIdx.x
        cp_async_16(stage, lane * pitch, source, 16 * lane)
        cp_async_commit()
        wait_all()
        cuda.syncthreads()
        x = ldmatrix_x4(stage, lane * pitch)
        z = load_f32x4(stage, lane * pitch)
        store_u32x4(stage, lane * pitch, x[0], x[1], x[2], x[3])
        out[lane] = x[0] + z[0]

    counter = BankCounter()
    source = np.zeros(512, np.uint8)
    simulate(kernel, 1, 32, (source, np.zeros(32, np.float32)), banks=counter)
    # four eights of rows each, by copy, ldmatrix, load and store
    if pitch == 48:
        assert counter.report().count(" 0 of them conflicts") == 4
    assert counter.ideal == 4 + 4 + 4 + 4
    assert counter.wavefronts == each * counter.ideal


def test_a_place_is_known_by_the_way_to_it() -> None:
    """Two calls of one function are two accesses, though they are one line of it."""

    @cuda.jit(device=True)
    def get(tile, i):
        return tile[i]

    @cuda.jit
    def kernel(out):
        tile = cuda.shared.array(64, float32)
        lane = cuda.threadIdx.x
        tile[lane] = 0
        tile[lane + 32] = 0
        if lane < 16:
            out[lane] = get(tile, lane)
        out[lane] = get(tile, 2 * lane)

    counter = BankCounter()
    simulate(kernel, 1, 32, (np.zeros(32, np.float32),), banks=counter)
    assert counter.wavefronts == 1 + 1 + 1 + 2
    assert len(counter.sites) == 3


def test_views_and_dynamic_shared_memory() -> None:
    @cuda.jit
    def kernel(out):
        everything = cuda.shared.array(0, float32)
        upper = everything[32:]
        rows = upper.reshape(32, 2)
        lane = cuda.threadIdx.x
        everything[lane] = lane
        rows[lane, 1] = lane  # every second word
        out[lane] = load_u32(upper, lane)

    counter = BankCounter()
    simulate(kernel, 1, 32, (np.zeros(32, np.uint32),), shared_bytes=96 * 4, banks=counter)
    assert counter.wavefronts == 1 + 2 + 1


def test_global_and_local_memory_have_no_banks() -> None:
    @cuda.jit
    def kernel(x, out):
        mine = cuda.local.array(4, float32)
        mine[0] = x[cuda.threadIdx.x * 32]
        out[cuda.threadIdx.x] = mine[0]

    counter = BankCounter()
    arguments = np.zeros(1024, np.float32), np.zeros(32, np.float32)
    simulate(kernel, 1, 32, arguments, banks=counter)
    assert counter.sites == {}
    assert counter.wavefronts == counter.conflicts == 0


def test_what_cannot_be_counted_is_refused() -> None:
    @cuda.jit
    def filled(out):
        stage = cuda.shared.array((4, 8), float32)
        stage[0] = 1
        out[0] = stage[0, 0]

    out = np.zeros(1, np.float32)
    with pytest.raises(SimulatorError, match="stage: storing a part at once is not counted"):
        simulate(filled, 1, 1, (out,), banks=BankCounter())


# --- what steps 7 to 15 say of themselves ---------------------------------------------------------
# Of the kernels of decode: tests.kernels.test_decode.
TENSOR_CORES = range(7, 16)
IN_EVERY_FORMAT = [
    pytest.param(kernel, kernel.families[-1], name, id=f"{label_of(kernel)}-{name}")
    for kernel in (*map(find, TENSOR_CORES), *ENGINEERED)
    if kernel.number in TENSOR_CORES
    for name in WEIGHT_FORMATS
]


@pytest.mark.parametrize(("kernel", "family", "name"), by_turn(IN_EVERY_FORMAT))
def test_tensor_core_steps_have_no_bank_conflicts(
    kernel: Kernel, family: Family, name: str
) -> None:
    counter = _counted(kernel, Problem(40, 128, 256, name), family=family)
    few = "float16" in kernel.outputs  # C in 16 bits, or bulk copies, which are not counted
    assert counter.wavefronts > (300 if few else 900)
    assert counter.conflicts == 0, counter.report()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["q5_0", "q4_1"])
@pytest.mark.parametrize("tokens", stream_k_tiles.BLOCKS_PER_SM)
def test_no_tile_of_kernel_10_has_any(
    tokens: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever it takes for a shape; partial sums included."""
    module = sys.modules[kernel_of(10).launch.__module__]
    monkeypatch.setattr(module, "tiling", lambda *_: (tokens, 1, 2, 1))
    counter = _counted(kernel_of(10), Problem(9, 128, 256, name))
    assert counter.wavefronts > 500
    assert counter.conflicts == 0, counter.report()


@pytest.mark.slow
@pytest.mark.parametrize("output", [np.float32, pytest.param(np.float16, marks=pytest.mark.every)])
@pytest.mark.parametrize(
    ("tokens", "name"), list(zip([128, 64, 32, 16, 128], WEIGHT_FORMATS, strict=True))
)
@pytest.mark.parametrize("number", [11, 13])
def test_no_tile_of_kernels_11_and_13_has_any(
    number: int, tokens: int, name: str, output: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever they take for a shape: rows of A that are swizzled, and sums on their way through
    shared memory. What wgmma does to shared memory is not counted."""
    if number == 13:
        module = sys.modules[kernel_of(number).launch.__module__]
        monkeypatch.setattr(module, "TOKENS", (tokens,))
    else:
        monkeypatch.setattr(mma_tiles, "TILES", {tokens: mma_tiles.TILES[tokens]})
    counter = _counted(kernel_of(number), Problem(20, 64, 256, name), output)
    assert counter.wavefronts > (150 if number == 13 else 500)
    assert counter.conflicts == 0, counter.report()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "output"), [("q4_0", np.float32), ("q5_1", np.float16)])
@pytest.mark.parametrize(
    ("number", "tile"),
    [
        *((14, tile) for tile in ((128, 32), (128, 64), (256, 128))),
        *((15, tile) for tile in ((128, 64), (128, 256))),
    ],
)
def test_no_tile_of_kernels_14_and_15_has_any(
    number: int,
    tile: tuple[int, int],
    name: str,
    output: type,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parts of a tile too; what wgmma and bulk copies do to shared memory is not counted."""
    module = sys.modules[kernel_of(number).launch.__module__]
    monkeypatch.setattr(module, "tiling", lambda *_: (tile, 1, 2, 1))
    counter = _counted(kernel_of(number), Problem(20, 64, 256, name), output)
    assert counter.wavefronts > 300
    assert counter.conflicts == 0, counter.report()


def _counted(
    kernel: Kernel, problem: Problem, output: type | None = None, family: Family | None = None
) -> BankCounter:
    """The kernel's own launch, without its activation pass."""
    counter = BankCounter()
    machine = Simulator(banks=counter)
    family = family or kernel.families[-1]
    a = problem.a.astype(input_of(kernel, family))
    prepared = prepare(kernel, family, problem.format, a, problem.blocks, machine, dtype=output)
    for launch in prepared.activations.launches:
        RemembersPasses().run(launch)
    machine.run(prepared.launch)
    return counter
