"""Launch templates: the launches of `steps.product.plan`, with every address brought by the
call."""

from __future__ import annotations

import itertools
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qformats import FORMATS, WEIGHT_FORMATS
from reference import Problem
from steps import find, gemm, pack, step14_persistent
from steps.compile.dry_run import WORKSPACE, ZEROED, DryRun, launches
from steps.contract import FLOATS, Activations, Launch, Shape, dtype_name
from steps.driver.launcher import mapped
from steps.instructions import TensorMap
from steps.instructions.tensor_map import PADDING_WORDS, PARAMETER_WORDS
from steps.kernels.parts.activations.layouts import inputs
from steps.product.choice import choose, choose_packed, choose_uncast, packings
from steps.product.launch_template import LaunchTemplate
from tests.driver.fake_gpu import FakeGpu, device_array, encoded

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


@pytest.fixture
def shared_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks share each tile of step 14, and need partial sums and counters."""
    monkeypatch.setattr(step14_persistent, "tiling", lambda *_: ((128, 128), 3, 6, 3))


def template_of_14(gpu: FakeGpu, m: int, input: str = "float32") -> LaunchTemplate:
    """That of a step with scratch memory, whatever a table says."""
    choice = choose("q4_0", Shape(m, N, K), gpu, step=14, input=input)
    return LaunchTemplate(choice, packed_types("q4_0", [choice.step])["tiles"], input=input)


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
    made(a, out, weights, MEMORY, MEMORY + made.zeroed, 5)
    assert launched(gpu, weights) == wanted
    at_all = {v for _, _, values in gpu.launched for v in values}
    assert set(weights) <= at_all, "each array of the packing is read"
    assert max((v for v in at_all if MEMORY <= v < HERE), default=0) < (
        MEMORY + made.zeroed + made.nbytes
    )


def test_zeros_come_first_and_memory_is_apart() -> None:
    memory = DryRun()
    memory.empty((3,), np.float16)
    memory.array(np.zeros((2, 100), np.int32))
    second = memory.array(np.zeros(1, np.float32))
    third = memory.empty((1,), np.int8)
    assert (memory.zeroed, memory.nbytes) == (1024 + 256, 512)
    assert (second.address, third.address) == (ZEROED + 1024, WORKSPACE + 256)
    with pytest.raises(TypeError, match="must be all zero at first"):
        memory.array(np.ones(1))


def test_arrays_lie_side_by_side_in_the_memory_of_the_call(
    gpu: FakeGpu, shared_tiles: None
) -> None:
    shape, fmt = Shape(300, N, K), FORMATS["q4_0"]
    made = template_of_14(gpu, 300)
    own, family = made.choice.step, made.choice.family
    assert own.scratch is not None
    a = device_array((300, K), np.float32, HERE)
    sizes = [int(np.prod(s)) * np.dtype(t).itemsize for s, t in own.scratch(fmt, family, shape)]
    *others, counters = sizes
    others = [*(array.nbytes for array in own.activations(family, a, gpu).arrays), *others]
    assert len(others) == 3
    *starts, end = np.cumsum([0, *(-(-size // 256) * 256 for size in others)])
    zeros, workspace = MEMORY, MEMORY + (1 << 30)
    made(HERE, 2 * HERE, [3 * HERE, 4 * HERE], zeros, workspace, 0)
    used = {v - workspace for _, _, values in gpu.launched for v in values if MEMORY <= v < HERE}
    assert used == {*starts, zeros - workspace}
    assert (made.zeroed, made.nbytes) == (-(-counters // 256) * 256, end)


@pytest.mark.parametrize("gpu_name", ["NVIDIA H200", "an untuned GPU"])
@pytest.mark.parametrize("accuracy", ["exact", "fast"])
def test_how_many_launches_a_product_is(gpu: FakeGpu, gpu_name: str, accuracy: str) -> None:
    """A and C of one dtype: one, but a pass of its own for float32 where it is rounded for many
    tokens, and for what quantizes A to int8 with a scale per token. No dtype needs a cast."""
    gpu.name = gpu_name
    for name in ("q4_0", "q5_1", "q8_0"):
        packed = [step.pack.__name__ for step in packings(name, gpu.cc, accuracy)]
        for (n, k), m, dtype in itertools.product(
            ((4096, 4096), (4096, 14336), (14336, 4096)), (1, 2, 16, 17, 128, 4096), FLOATS
        ):
            rest = name, Shape(m, n, k), packed, gpu, accuracy, dtype
            choice = choose_uncast(*rest)
            assert dtype in inputs(choice.step, choice.family)
            before, _ = launches(choice.work, (m, n, k), output=dtype, input=dtype)
            exact = choice.step.accuracy == "exact"
            one_launch = exact and (dtype != "float32" or m <= 2)
            assert len(before) <= (0 if one_launch else 1), choice


def test_nothing_is_asked_for_where_nothing_needs_it(gpu: FakeGpu) -> None:
    """Float16 A is read where it lies: no rounded rows, no scales; step 12 has no counters, and
    step 14 none where no blocks share a tile."""
    of_12 = LaunchTemplate(
        choose("q4_0", Shape(1, N, K), gpu, step=12, input="float16"),
        packed_types("q4_0", [find(12)])["tiles"],
        input="float16",
        output="float16",
    )
    assert (of_12.zeroed, of_12.nbytes, len(of_12.loaded)) == (0, 0, 1)
    of_14 = template_of_14(gpu, 300, "float16")
    assert (of_14.zeroed, of_14.nbytes, len(of_14.loaded)) == (0, 0, 1)


def test_counters_are_asked_for_as_zeros_and_partial_sums_are_not(
    gpu: FakeGpu, shared_tiles: None
) -> None:
    many = {input: template_of_14(gpu, 300, input) for input in ("float32", "float16", "bfloat16")}
    assert [len(made.loaded) for made in many.values()] == [2, 1, 1]
    partials, counters = many["float16"].choice.step.scratch(
        FORMATS["q4_0"], "A16", Shape(300, N, K)
    )
    in_bytes = [int(np.prod(s)) * np.dtype(t).itemsize for s, t in (partials, counters)]
    for made in (many["float16"], many["bfloat16"]):
        assert [made.nbytes, made.zeroed] == [-(-size // 256) * 256 for size in in_bytes]
    assert many["float32"].nbytes - many["float16"].nbytes >= 2 * 300 * K + 4 * 300
    assert many["float32"].zeroed == many["float16"].zeroed > 0


def test_threads_bring_their_addresses_one_after_another(gpu: FakeGpu) -> None:
    """No launch has an address of another thread's call."""
    made, calls = template(gpu, 300), 400
    per_call = len(made.loaded)

    def call(i: int) -> None:
        weights = [HERE * i + 32, HERE * i + 48]
        made(HERE * i, HERE * i + 16, weights, HERE * i + 64, HERE * i + 512, i)

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
        for output in ("float16", "bfloat16"):
            made = template(gpu, m, output=output)
            can = output in made.choice.step.outputs
            assert made.writes == (output if can else "float32")
        assert template(gpu, m).writes == "float32"


@pytest.mark.parametrize("input", ["float16", "bfloat16"])
@pytest.mark.parametrize("accuracy", ["exact", "fast"])
def test_16_bits_are_read_where_the_step_can(gpu: FakeGpu, accuracy: str, input: str) -> None:
    for m in (1, 300):
        made = template(gpu, m, accuracy, input=input)
        can = input in inputs(made.choice.step, made.choice.family)
        assert can or m == 1
        assert made.reads == (input if can else "float32")
        first = made.loaded[0].source
        a = mapped(first).array if mapped(first) else first.args[0]
        assert dtype_name(a) == made.reads or m == 1
        assert template(gpu, m, accuracy).reads == "float32"


def test_bfloat16_that_a_step_does_not_multiply_is_read_as_float32(gpu: FakeGpu) -> None:
    """Never as the float16 that the same bits would be."""
    choice = choose("q4_0", Shape(20, N, K), gpu, step=14)
    older = replace(choice, step=replace(choice.step, outputs=("float32", "float16")))
    types = packed_types("q4_0", [choice.step])["tiles"]
    assert LaunchTemplate(choice, types, input="bfloat16").reads == "bfloat16"
    made = LaunchTemplate(older, types, input="bfloat16")
    assert (made.reads, len(made.loaded)) == ("float32", 2)


def test_gates_are_computed_where_the_pass_can(gpu: FakeGpu) -> None:
    for accuracy, m, reads in (
        ("exact", 1, "float32"),  # Q8_1, which the table has times of
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


def mapped_template(gpu: FakeGpu, m: int, pass_first: bool) -> LaunchTemplate:
    """Of a step that reads A, or what a pass made of it, through a tensor map."""

    def rows(family: Any, a: Any, machine: Any) -> Activations:
        if not pass_first:
            return Activations((a,))
        halves = machine.empty((m, K), np.float16)
        rounder = SimpleNamespace(__name__="rounder")
        return Activations((halves,), (Launch(rounder, (1,), (32,), (a, halves)),))

    def launch(fmt: Any, family: Any, shape: Any, w: Any, activations: Any, out: Any) -> Launch:
        a = replace(activations[0], dtype=np.dtype(np.float16))  # as a template of float16 has it
        own = SimpleNamespace(__name__="own")
        return Launch(own, (1,), (32,), (TensorMap(a, (16, 64)), *w, out))

    step = replace(find(1), activations=rows, launch=launch, scratch=None)
    choice = replace(choose("q4_0", Shape(m, N, K), gpu, step=1), step=step)
    return LaunchTemplate(choice, packed_types("q4_0", [step])[step.pack.__name__])


@pytest.mark.parametrize("pass_first", [False, True])
def test_a_tensor_map_moves_with_its_matrix(gpu: FakeGpu, pass_first: bool) -> None:
    made = mapped_template(gpu, 20, pass_first)
    for a in (HERE, HERE + 32):
        workspace = MEMORY + a - HERE
        gpu.launched.clear()
        made(a, 2 * HERE, [3 * HERE], 4 * HERE, workspace, 0)
        assert len(gpu.launched) == 1 + pass_first
        *_, (name, _, values) = gpu.launched
        assert name == "own"
        words = encoded(workspace if pass_first else a, 20, K, 16)
        assert values[:PARAMETER_WORDS] == (*[0] * PADDING_WORDS, *words)


@pytest.mark.parametrize(("pass_first", "a", "workspace"), [(False, 8, 0), (True, 0, 8)])
def test_a_matrix_that_a_tensor_map_cannot_have_launches_nothing(
    gpu: FakeGpu, pass_first: bool, a: int, workspace: int
) -> None:
    made = mapped_template(gpu, 20, pass_first)
    with pytest.raises(ValueError, match="a multiple of 16 bytes; this one lies 8 bytes after one"):
        made(HERE + a, 2 * HERE, [3 * HERE], 4 * HERE, MEMORY + workspace, 0)
    assert not gpu.launched
