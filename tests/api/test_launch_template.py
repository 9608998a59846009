"""Launch templates: the launches of `steps.api.plan`, with every address brought by the call."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from qformats import FORMATS, WEIGHT_FORMATS
from reference import Problem
from steps import find, gemm, pack
from steps.api.choice import choose, choose_packed, packings
from steps.api.dry_run import WORKSPACE, ZEROED, DryRun
from steps.api.launch_template import LaunchTemplate
from steps.contract import Shape
from tests.api.fake_gpu import FakeGpu, device_array

N, K = 68, 288
HERE = 1 << 44
MEMORY = 1 << 40  # where a FakeGpu begins to allocate


def types(arrays: Any) -> tuple[Any, ...]:
    return tuple((array.shape, str(array.dtype)) for array in arrays)


def packed_types(name: str, steps: Any) -> dict[str, tuple[Any, ...]]:
    """The types of the weights [N, K] by packing, as a layer has them."""
    blocks = Problem(1, N, K, name).blocks
    return {step.pack.__name__: types(step.pack(blocks)) for step in steps}


def template(
    gpu: FakeGpu, m: int, accuracy: str = "exact", name: str = "q4_0", **options: Any
) -> LaunchTemplate:
    """The template that a layer would have."""
    packed = packed_types(name, packings(name, gpu.cc, accuracy))
    choice = choose_packed(name, Shape(m, N, K), packed, gpu, accuracy)
    return LaunchTemplate(choice, packed[choice.step.pack.__name__], **options)


def launched(gpu: FakeGpu, weights: list[int]) -> list[tuple[str, int, tuple[Any, ...]]]:
    """What was launched, with names for the addresses that differ: of weights and workspace."""
    named = {address: f"weights {i}" for i, address in enumerate(weights)}
    return [
        (name, stream, tuple(named.get(v, "memory" if MEMORY <= v < HERE else v) for v in values))
        for name, stream, values in gpu.launched
    ]


@pytest.mark.parametrize("m", [1, 8, 40, 300])
@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@pytest.mark.parametrize("accuracy", ["exact", "fast"])
def test_it_launches_what_a_plan_of_the_same_weights_does(gpu, m, name, accuracy) -> None:
    made, blocks = template(gpu, m, accuracy, name), Problem(m, N, K, name).blocks
    number = made.choice.step.number
    handle = pack(blocks, step=number, machine=gpu)
    plan = gemm.plan(m, handle, family=made.choice.family)
    a, out = HERE, 2 * HERE
    plan(device_array((m, K), np.float32, a), device_array((m, N), np.float32, out), stream=5)
    wanted = launched(gpu, [one.device_ctypes_pointer.value for one in handle.arrays])
    gpu.launched.clear()
    weights = [3 * HERE + 256 * i for i in range(len(handle.arrays))]
    made(a, out, weights, MEMORY, 5)
    assert launched(gpu, weights) == wanted
    at_all = {v for _, _, values in gpu.launched for v in values}
    assert set(weights) <= at_all, "each array of the packing is read"
    assert max((v for v in at_all if MEMORY <= v < HERE), default=0) < MEMORY + made.nbytes


def test_zeros_come_first_and_memory_is_apart() -> None:
    memory = DryRun()
    memory.empty((3,), np.float16)
    memory.array(np.zeros((2, 100), np.int32))
    second = memory.array(np.zeros(1, np.float32))
    third = memory.empty((1,), np.int8)
    assert (memory.zeroed, memory.nbytes) == (1024 + 256, 1024 + 256 + 512)
    assert (second.address, third.address) == (ZEROED + 1024, WORKSPACE + 256)
    with pytest.raises(TypeError, match="must be all zero at first"):
        memory.array(np.ones(1))


def test_arrays_lie_side_by_side_in_the_workspace_of_the_call(gpu: FakeGpu) -> None:
    shape, fmt = Shape(300, N, K), FORMATS["q4_0"]
    made = template(gpu, 300)
    own, family = made.choice.step, made.choice.family
    assert own.scratch is not None
    a = device_array((300, K), np.float32, HERE)
    sizes = [int(np.prod(s)) * np.dtype(t).itemsize for s, t in own.scratch(fmt, family, shape)]
    sizes += [array.nbytes for array in own.activations(family, a, gpu).arrays]
    assert len(sizes) == 4
    *starts, end = np.cumsum([0, *(-(-size // 256) * 256 for size in sizes)])
    made(HERE, 2 * HERE, [3 * HERE, 4 * HERE], MEMORY, 0)
    used = {v - MEMORY for _, _, values in gpu.launched for v in values if MEMORY <= v < HERE}
    assert used == set(starts)
    assert (made.zeroed, made.nbytes) == (starts[2], end)


def test_scratch_memory_is_asked_for_as_zeros(gpu: FakeGpu) -> None:
    shape = Shape(20, N, K)  # more tokens than for steps without scratch memory
    made = template(gpu, 20)
    assert made.choice.step.scratch is not None
    sizes = made.choice.step.scratch(FORMATS["q4_0"], made.choice.family, shape)
    assert made.zeroed >= sum(int(np.prod(s)) * np.dtype(t).itemsize for s, t in sizes) > 0
    made(HERE, 2 * HERE, [3 * HERE, 4 * HERE], MEMORY, 0)
    assert MEMORY in {v for _, _, values in gpu.launched for v in values}


def test_threads_bring_their_addresses_one_after_another(gpu: FakeGpu) -> None:
    """No launch has an address of another thread's call."""
    made, calls = template(gpu, 300), 400
    per_call = len(made.loaded)

    def call(i: int) -> None:
        made(HERE * i, HERE * i + 16, [HERE * i + 32, HERE * i + 48], HERE * i + 64, i)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that threads meet within a call
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(call, range(1, calls + 1)))
    finally:
        sys.setswitchinterval(before)
    assert len(gpu.launched) == calls * per_call
    for at in range(0, len(gpu.launched), per_call):
        streams = {stream for _, stream, _ in gpu.launched[at : at + per_call]}
        assert len(streams) == 1, "the launches of a call are in a row"
    for _, stream, values in gpu.launched:
        addresses = [value for value in values if HERE <= value < 1 << 62]
        assert addresses
        assert {value // HERE for value in addresses} == {stream}


def test_float16_is_written_where_the_step_can(gpu: FakeGpu) -> None:
    for m in (1, 300):
        made = template(gpu, m, output="float16")
        can = "float16" in made.choice.step.outputs
        assert made.writes == ("float16" if can else "float32")
        assert template(gpu, m).writes == "float32"


@pytest.mark.parametrize("accuracy", ["exact", "fast", "coarse"])
def test_float16_is_read_where_the_pass_can(gpu: FakeGpu, accuracy: str) -> None:
    for m, reads in ((1, "float32"), (300, "float16")):
        made = template(gpu, m, accuracy, input="float16")
        assert made.reads == reads
        first, *_ = made.loaded
        assert str(first.source.args[0].dtype) == reads or m == 1
        assert template(gpu, m, accuracy).reads == "float32"


def test_gates_are_computed_where_the_pass_can(gpu: FakeGpu) -> None:
    for accuracy, m, reads in (
        ("exact", 1, "float32"),
        ("exact", 300, "gated"),
        ("fast", 300, "float16"),
    ):
        made = template(gpu, m, accuracy, input="gated")
        assert made.reads == reads
        if reads == "gated":
            assert made.loaded[0].source.args[0].shape == (m, 2 * K)


def test_a_packing_that_the_gpu_cannot_use_is_refused(gpu: FakeGpu) -> None:
    gpu.cc = (7, 5)
    with pytest.raises(ValueError, match=r"needs compute capability .* this GPU has 7.5"):
        choose_packed("q4_0", Shape(1, N, K), ["tiles"], gpu)


def test_too_many_blocks_are_refused(gpu: FakeGpu) -> None:
    choice = choose("q4_0", Shape(2**22, N, K), gpu, step=1)
    with pytest.raises(ValueError, match="thread blocks along y and CUDA launches at most 65535"):
        LaunchTemplate(choice, packed_types("q4_0", [find(1)])[find(1).pack.__name__])
