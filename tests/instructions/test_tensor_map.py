"""Boxes by tensor map: what the hardware takes, and each wrong way to use them found and named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import cuda, float32, int32, uint8

from steps.instructions import (
    BOX_K,
    TensorMap,
    fence_mbarrier_init,
    fence_proxy_async,
    mbarrier_arrive_expect,
    mbarrier_init,
    mbarrier_wait,
    spread,
    stmatrix_x4_trans,
    swizzled_descriptor,
    tensor_copy,
    tensor_map_address,
    wgmma_commit,
    wgmma_f16,
    wgmma_fence,
    wgmma_wait,
    zeros_f32,
)
from steps.simulator.banks import BankCounter
from steps.simulator.launch import Misaligned, Race, SimulatorError, simulate

TOKENS = 8
BOX = 2 * TOKENS * BOX_K
ORDERS = (0, -1, 1, 2)
no_sums = zeros_f32(TOKENS // 2)
wait_for_all = wgmma_wait(0)
OFFSETS = {"unaligned box": 512, "unaligned descriptor": 0}
AHEAD = {"half a step of K": 1, "the second row": 8, "another swizzle": 1 << 62}


def product(fault: str | None = None) -> Any:
    """c[8] = the first sums of w[64, 16] a[8, 16]^T, w all ones: A by a box, with a fault built in.
    A thread of the warpgroup copies."""
    expected = {"too few bytes expected": BOX - 16, "bytes of the matrix": BOX - 128}
    size = expected.get(fault or "", BOX)
    offset = OFFSETS.get(fault or "", 1024)
    descriptor = 1024 + 128 if fault == "unaligned descriptor" else offset
    ahead = AHEAD.get(fault or "", 0)
    alignment = 128 if fault == "declared as 128" else 1024

    @cuda.jit(device=True)
    def of_device(a_map):
        return tensor_map_address(a_map)

    @cuda.jit
    def kernel(a_map, c):
        ring = cuda.shared.array(4096, uint8, alignment=alignment)
        full = cuda.shared.array(1, np.uint64)
        out = cuda.local.array(4, float32)
        t = int32(cuda.threadIdx.x)
        a = of_device(a_map) if fault == "in a device function" else tensor_map_address(a_map)
        if fault == "the number of a map":
            a = 4096
        if t == 0:
            mbarrier_init(full, 0, 1)
            if fault != "no fence after init":
                fence_mbarrier_init()
        if fault == "stored without a fence":
            ring[offset + t] = 0
        cuda.syncthreads()
        if t == 0:
            mbarrier_arrive_expect(full, 0, size)
            if fault != "stored without a fence":
                tensor_copy(ring, offset, a, 0, 0, full, 0)
            if fault == "twice to one place":
                tensor_copy(ring, offset, a, 64, 0, full, 0)
        if fault not in ("no wait", "stored without a fence"):
            mbarrier_wait(full, 0, 0)
        one = 0x3C003C00
        acc = no_sums()
        wgmma_fence()
        where = swizzled_descriptor(ring, descriptor) + ahead
        acc = wgmma_f16(acc, one, one, one, one, where, 1)
        wgmma_commit()
        acc = wait_for_all(acc)
        spread(out, acc)
        if t < 4:
            c[2 * t], c[2 * t + 1] = out[0], out[1]

    return kernel


def matrix(m: int = 5, k: int = 72) -> np.ndarray:
    return np.random.default_rng(m).integers(-63, 64, (m, k)).astype(np.float16)


@pytest.mark.parametrize("order", ORDERS)
def test_the_right_kernel_is_right_in_every_order(order: int) -> None:
    a, c = matrix(), np.full(8, np.nan, np.float32)
    simulate(product(), 1, 128, (TensorMap(a, (TOKENS, BOX_K)), c), order=order)
    wanted = np.zeros(8)
    wanted[:5] = a[:, :16].astype(np.float64).sum(axis=1)
    np.testing.assert_array_equal(c, wanted)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("fault", "kind", "sentence"),
    [
        ("no fence after init", SimulatorError, "tensor_copy reports to mbarrier .*full"),
        ("unaligned box", Misaligned, "512 past a multiple of 1024"),
        ("unaligned descriptor", Misaligned, "128 past a multiple of 1024"),
        ("declared as 128", Misaligned, "declare it with alignment=1024"),
        ("too few bytes expected", SimulatorError, "bring 16 bytes more than its arrivals expect"),
        ("bytes of the matrix", SimulatorError, "bring 128 bytes more than its arrivals expect"),
        ("twice to one place", Race, "a copy to byte 1024 of ring, which a copy"),
        ("no wait", Race, r"wgmma .*mbarrier"),
        ("stored without a fence", SimulatorError, "fence_proxy_async and a barrier"),
        ("in a device function", SimulatorError, "for the kernel itself, not for its device"),
        ("the number of a map", SimulatorError, "takes the address of a TensorMap, not 4096"),
        ("half a step of K", SimulatorError, "has no layout known here"),
        ("the second row", SimulatorError, "has no layout known here"),
        ("another swizzle", SimulatorError, "has no layout known here"),
    ],
)
def test_a_fault_is_found(fault: str, kind: type, sentence: str, order: int) -> None:
    a, c = TensorMap(matrix(), (TOKENS, BOX_K)), np.zeros(8, np.float32)
    with pytest.raises(kind, match=sentence):
        simulate(product(fault), 1, 128, (a, c), order=order)


def test_the_map_is_the_first_parameter() -> None:
    @cuda.jit
    def kernel(c, a_map):
        tensor_map_address(a_map)

    a = TensorMap(matrix(), (TOKENS, BOX_K))
    with pytest.raises(SimulatorError, match="a tensor map is the kernel's first parameter"):
        simulate(kernel, 1, 1, (np.zeros(1), a))


def test_the_matrix_begins_at_a_multiple_of_16_bytes() -> None:
    flat = np.zeros(5 * 72 + 12, np.float16)
    for first, fits in ((8, True), (12, False), (4, False)):
        a = TensorMap(flat[first : first + 360].reshape(5, 72), (TOKENS, BOX_K))
        if fits:
            simulate(product(), 1, 128, (a, np.zeros(8, np.float32)))
        else:
            with pytest.raises(
                ValueError, match="multiple of 16 bytes; this one lies 8 bytes after"
            ):
                simulate(product(), 1, 128, (a, np.zeros(8, np.float32)))


@pytest.mark.parametrize(
    ("array", "box", "sentence"),
    [
        (np.zeros((5, 72), np.float32), (8, 64), "or 16-bit numbers, not an array of float32"),
        (np.zeros(72, np.float16), (8, 64), r"or 16-bit numbers, .* of shape \(72,\)"),
        (np.zeros((5, 72), np.float16)[:, ::2], (8, 64), "C-contiguous matrix"),
        (np.zeros((5, 72), np.float16)[:, :64], (8, 64), "C-contiguous matrix"),
        (np.zeros((5, 76), np.float16), (8, 64), "K = 76 gives rows of 152"),
        (np.zeros((5, 72), np.float16), (8, 32), "1 to 256 tokens by 64 of K, not 8 by 32"),
        (np.zeros((5, 72), np.float16), (257, 64), "1 to 256 tokens by 64 of K, not 257 by 64"),
        (np.zeros((5, 72), np.float16), (0, 64), "1 to 256 tokens by 64 of K, not 0 by 64"),
        (np.zeros((5, 144), np.int8), (8, 64), "1 to 256 tokens by 128 of K, not 8 by 64"),
        (np.zeros((5, 72), np.int8), (8, 128), "K = 72 gives rows of 72"),
        (np.zeros((5, 288), np.int8)[:, :144], (8, 128), "C-contiguous matrix"),
    ],
)
def test_what_the_hardware_does_not_take_is_refused(
    array: np.ndarray, box: tuple[int, int], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        TensorMap(array, box)


# --- operands of wgmma that threads stored


@cuda.jit
def stored_kernel(a, c):
    """c[4, 8] = sums over each 16 of K of a[8, 64], which threads store swizzled."""
    ring = cuda.shared.array(1024, uint8, alignment=1024)
    out = cuda.local.array(4, float32)
    t = int32(cuda.threadIdx.x)
    for i in range(t, 1024, 128):
        row = i >> 7
        ring[i ^ (row & 7) << 4] = a[i]
    fence_proxy_async()
    cuda.syncthreads()
    one = 0x3C003C00
    where = swizzled_descriptor(ring, 0)
    for i in range(4):
        acc = no_sums()
        wgmma_fence()
        acc = wgmma_f16(acc, one, one, one, one, where + 2 * i, 1)
        wgmma_commit()
        acc = wait_for_all(acc)
        spread(out, acc)
        if t < 4:
            c[i, 2 * t], c[i, 2 * t + 1] = out[0], out[1]


def test_each_16_of_k_is_two_further_in_the_descriptor() -> None:
    a, c = matrix(8, 64), np.zeros((4, 8), np.float32)
    simulate(stored_kernel, 1, 128, (a.view(np.uint8).reshape(-1), c))
    np.testing.assert_array_equal(c, a.astype(np.float64).reshape(8, 4, 16).sum(axis=2).T)


# --- stmatrix


def stores(pitch: int, swizzled: bool) -> Any:
    size = 32 * pitch

    @cuda.jit
    def kernel(out):
        stage = cuda.shared.array(size, uint8, alignment=16)
        t = int32(cuda.threadIdx.x)
        chunk = (t >> 3) ^ (t & 7) if swizzled else t >> 3
        stmatrix_x4_trans(stage, (t & 7) * pitch + 16 * chunk, t, t, t, t)
        out[t] = 0

    return kernel


@pytest.mark.parametrize(("swizzled", "conflicts"), [(True, 0), (False, 28)])
def test_bank_conflicts_of_stmatrix_are_counted(swizzled: bool, conflicts: int) -> None:
    counter = BankCounter()
    simulate(stores(128, swizzled), 1, 32, (np.ones(32, np.int32),), banks=counter)
    assert (counter.ideal, counter.conflicts) == (4, conflicts), counter.report()
