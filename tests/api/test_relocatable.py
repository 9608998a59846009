"""Plans of a shape alone: the launches of `steps.api.plan`, with every address brought by the call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qformats import FORMATS, WEIGHT_FORMATS
from reference import Problem
from steps import find, gemm, ladder, pack
from steps.api import relocatable
from steps.api.relocatable import Relocatable, packings
from steps.contract import Shape
from tests.api.fake_gpu import FakeGpu, device_array

N, K = 68, 288
HERE = 1 << 44
WORK = 1 << 40  # where a FakeGpu begins to allocate


def places(arrays: Any) -> tuple[Any, ...]:
    return tuple((array.shape, str(array.dtype)) for array in arrays)


def launched(gpu: FakeGpu, weights: list[int]) -> list[tuple[str, int, tuple[Any, ...]]]:
    """What was launched, in words where the machines differ: the weights, the working memory."""
    named = {address: f"weights {i}" for i, address in enumerate(weights)}
    return [
        (name, stream, tuple(named.get(v, "memory" if WORK <= v < HERE else v) for v in values))
        for name, stream, values in gpu.launched
    ]


@pytest.mark.parametrize("m", [1, 8, 40, 300])
@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@pytest.mark.parametrize("accuracy", ["exact", "fast"])
def test_it_launches_what_a_plan_of_the_same_weights_does(gpu, m, name, accuracy) -> None:
    blocks = Problem(m, N, K, name).blocks
    steps = packings(name, gpu.cc, accuracy)
    packed = {step.pack.__name__: step.pack(blocks) for step in steps}
    offered = {pack_name: places(arrays) for pack_name, arrays in packed.items()}
    made = Relocatable(name, Shape(m, N, K), offered, gpu, accuracy)
    number = made.choice.step.number
    handle = pack(blocks, step=number, machine=gpu)
    plan = gemm.plan(m, handle, family=made.choice.family)
    a, out = HERE, 2 * HERE
    plan(device_array((m, K), np.float32, a), device_array((m, N), np.float32, out), stream=5)
    wanted = launched(gpu, [one.device_ctypes_pointer.value for one in handle.arrays])
    gpu.launched.clear()
    weights = [3 * HERE + 256 * i for i in range(len(offered[made.packing]))]
    made(a, out, weights, WORK, 5)
    assert launched(gpu, weights) == wanted
    at_all = {v for _, _, values in gpu.launched for v in values}
    assert set(weights) <= at_all, "each array of the packing is read"
    assert max((v for v in at_all if WORK <= v < HERE), default=0) < WORK + made.nbytes


def test_zeros_come_first_and_memory_is_apart(gpu: FakeGpu) -> None:
    memory = relocatable._Nowhere(gpu)
    memory.empty((3,), np.float16)
    memory.array(np.zeros((2, 100), np.int32))
    second = memory.array(np.zeros(1, np.float32))
    assert memory.used == {relocatable.ZEROED: 1024 + 256, relocatable.WORK: 256}
    assert second.device_ctypes_pointer.value == relocatable.ZEROED + 1024
    with pytest.raises(TypeError, match="must be all zero at first"):
        memory.array(np.ones(1))


def test_arrays_lie_side_by_side_in_the_memory_of_the_call(gpu: FakeGpu) -> None:
    shape, fmt = Shape(300, N, K), FORMATS["q4_0"]
    step = packings("q4_0", gpu.cc, "exact")[0]
    offered = {step.pack.__name__: places(step.pack(Problem(1, N, K, "q4_0").blocks))}
    made = Relocatable("q4_0", shape, offered, gpu)
    own, family = made.choice.step, made.choice.family
    assert own.scratch is not None
    a = device_array((300, K), np.float32, HERE)
    sizes = [int(np.prod(s)) * np.dtype(t).itemsize for s, t in own.scratch(fmt, family, shape)]
    sizes += [array.nbytes for array in own.activations(family, a, gpu).arrays]
    assert len(sizes) == 4
    *starts, end = np.cumsum([0, *(-(-size // 256) * 256 for size in sizes)])
    made(HERE, 2 * HERE, [3 * HERE, 4 * HERE], WORK, 0)
    used = {v - WORK for _, _, values in gpu.launched for v in values if WORK <= v < HERE}
    assert used == set(starts)
    assert (made.zeroed, made.nbytes) == (starts[2], end)


def test_scratch_memory_is_asked_for_as_zeros(gpu: FakeGpu) -> None:
    step = packings("q4_0", gpu.cc, "exact")[0]
    offered = {step.pack.__name__: places(step.pack(Problem(1, N, K, "q4_0").blocks))}
    shape = Shape(20, N, K)  # more tokens than the steps take that hand no sums to another block
    made = Relocatable("q4_0", shape, offered, gpu)
    assert made.choice.step.scratch is not None
    sizes = made.choice.step.scratch(FORMATS["q4_0"], made.choice.family, shape)
    assert made.zeroed >= sum(int(np.prod(s)) * np.dtype(t).itemsize for s, t in sizes) > 0
    made(HERE, 2 * HERE, [3 * HERE, 4 * HERE], WORK, 0)
    assert WORK in {v for _, _, values in gpu.launched for v in values}


def test_packings_are_one_or_with_fast_two() -> None:
    exact = [one for one in ladder() if one.accuracy == "exact"][-1]
    assert packings("q4_0", (9, 0), "exact") == (exact,)
    one, two = packings("q4_0", (9, 0), "fast")
    assert one is exact
    assert (two.accuracy, two.pack.__name__) == ("fast", "byte_tiles")
    assert packings("q4_0", (8, 0), "fast") == packings("q4_0", (8, 0), "exact")
    assert packings("q4_0", (7, 5), "exact") == (find(6),)
    with pytest.raises(ValueError, match="unknown accuracy 'good'"):
        packings("q4_0", (9, 0), "good")


def test_float16_is_written_where_the_step_can(gpu: FakeGpu) -> None:
    step = packings("q4_0", gpu.cc, "exact")[0]
    offered = {step.pack.__name__: places(step.pack(Problem(1, N, K, "q4_0").blocks))}
    for m in (1, 300):
        made = Relocatable("q4_0", Shape(m, N, K), offered, gpu, half=True)
        assert made.half == ("float16" in made.choice.step.outputs)
        assert Relocatable("q4_0", Shape(m, N, K), offered, gpu).half is False


@pytest.mark.parametrize("accuracy", ["exact", "fast", "coarse"])
def test_float16_is_taken_where_the_pass_can(gpu: FakeGpu, accuracy: str) -> None:
    steps = packings("q4_0", gpu.cc, accuracy)
    blocks = Problem(1, N, K, "q4_0").blocks
    offered = {step.pack.__name__: places(step.pack(blocks)) for step in steps}
    for m, takes in ((1, "float32"), (300, "float16")):
        made = Relocatable("q4_0", Shape(m, N, K), offered, gpu, accuracy, given="float16")
        assert made.takes == takes
        first, *_ = made.loaded
        assert str(first.source.args[0].dtype) == takes or m == 1
        assert Relocatable("q4_0", Shape(m, N, K), offered, gpu, accuracy).takes == "float32"


def test_gates_are_computed_where_the_pass_can(gpu: FakeGpu) -> None:
    for accuracy, m, takes in (
        ("exact", 1, "float32"),
        ("exact", 300, "gated"),
        ("fast", 300, "float16"),
    ):
        steps = packings("q4_0", gpu.cc, accuracy)
        blocks = Problem(1, N, K, "q4_0").blocks
        offered = {step.pack.__name__: places(step.pack(blocks)) for step in steps}
        made = Relocatable("q4_0", Shape(m, N, K), offered, gpu, accuracy, given="gated")
        assert made.takes == takes
        if takes == "gated":
            assert made.loaded[0].source.args[0].shape == (m, 2 * K)


def test_a_packing_that_the_gpu_cannot_use_is_refused(gpu: FakeGpu) -> None:
    gpu.cc = (7, 5)
    offered = {"tiles": places(find(7).pack(Problem(1, N, K, "q4_0").blocks))}
    with pytest.raises(ValueError, match=r"needs compute capability .* this GPU has 7.5"):
        Relocatable("q4_0", Shape(1, N, K), offered, gpu)
