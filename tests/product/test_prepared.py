"""Prepared launches: those of `steps.product.plan`, with every address brought by the call."""

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
from steps import find
from steps.compile.dry_run import WORKSPACE, ZEROED, DryRun
from steps.contract import ACCURACIES, FLOATS, Activations, Launch, Shape
from steps.instructions import TensorMap
from steps.instructions.tensor_map import PADDING_WORDS, PARAMETER_WORDS
from steps.kernels.prefill import wgmma_float16
from steps.product.choice import Choice, Request, choose, packings
from steps.product.prepared import Kept, Prepared, prepare
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


def made_of(
    gpu: FakeGpu, m: int, accuracy: str = "exact", name: str = "q4_0", **options: Any
) -> tuple[Choice, Prepared]:
    """The launches that a layer would have."""
    packed = packed_types(name, packings(name, gpu.cc, accuracy))
    asked = Request(name, m, N, K, accuracy=accuracy, layouts=tuple(packed), caller_casts=True)
    choice = choose(replace(asked, **options), gpu)
    return prepare(choice, packed[choice.layout])


@pytest.fixture
def shared_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks share each tile of step 14, and need partial sums and counters."""
    monkeypatch.setattr(wgmma_float16, "tiling", lambda *_: ((128, 128), 3, 6, 3))


def made_by(
    number: int, gpu: FakeGpu, m: int, a: str = "float32", c: str = "float32"
) -> tuple[Choice, Prepared]:
    """Those of a step, whatever a table says."""
    choice = choose(Request("q4_0", m, N, K, a, c, step=number), gpu)
    return prepare(choice, packed_types("q4_0", [choice.kernel])[choice.layout])


def test_what_was_used_longest_ago_gives_way() -> None:
    kept: Kept[str] = Kept(2)
    assert [kept.put(key, key.upper()) for key in "ab"] == ["A", "B"]
    assert kept.get("a") == "A", "which is then the one used last"
    assert kept.of("c", lambda: "C") == "C"
    assert (kept.get("a"), kept.get("b"), kept.get("c"), len(kept)) == ("A", None, "C", 2)
    assert kept.of("a", lambda: "another") == kept.put("a", "another") == "A"
    kept.clear()
    assert (kept.get("a"), len(kept)) == (None, 0)


@pytest.mark.parametrize("m", [1, 40, 300])
@pytest.mark.parametrize("accuracy", ACCURACIES)
def test_each_array_of_the_packing_is_read_and_memory_is_as_large_as_was_asked_for(
    gpu: FakeGpu, m: int, accuracy: str
) -> None:
    for name in WEIGHT_FORMATS:
        choice, made = made_of(gpu, m, accuracy, name)
        count = len(packed_types(name, [choice.kernel])[choice.layout])
        weights = [3 * HERE + 256 * i for i in range(count)]
        gpu.launched.clear()
        made((HERE, 2 * HERE, *weights), MEMORY, MEMORY + made.zeroed, 5)
        used = gpu.values()
        assert {2 * HERE, *weights} <= used
        assert max((v for v in used if MEMORY <= v < HERE), default=0) < (
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
    choice, made = made_by(14, gpu, 300)
    own, family = choice.kernel, choice.family
    assert own.scratch is not None
    a = device_array((300, K), np.float32, HERE)
    sizes = [int(np.prod(s)) * np.dtype(t).itemsize for s, t in own.scratch(fmt, family, shape)]
    *others, counters = sizes
    others = [*(array.nbytes for array in own.activations[family](a, gpu).arrays), *others]
    assert len(others) == 3
    *starts, end = np.cumsum([0, *(-(-size // 256) * 256 for size in others)])
    zeros, workspace = MEMORY, MEMORY + (1 << 30)
    made((HERE, 2 * HERE, 3 * HERE, 4 * HERE), zeros, workspace, 0)
    used = {v - workspace for _, _, values in gpu.launched for v in values if MEMORY <= v < HERE}
    assert used == {*starts, zeros - workspace}
    assert (made.zeroed, made.nbytes) == (-(-counters // 256) * 256, end)


@pytest.mark.parametrize("gpu_name", ["NVIDIA H200", "an untuned GPU"])
@pytest.mark.parametrize("accuracy", ["exact", "fast"])
def test_how_many_launches_a_product_is(gpu: FakeGpu, gpu_name: str, accuracy: str) -> None:
    """A and C of one dtype: one, but a pass of its own for float32 and bfloat16 where they are
    rounded (bfloat16 from 9 tokens on), and for what quantizes A to int8 with a scale per token. No
    dtype needs a cast."""
    gpu.name = gpu_name
    for name in ("q4_0", "q5_1", "q8_0"):
        packed = tuple(one.pack.__name__ for one in packings(name, gpu.cc, accuracy))
        for (n, k), m, dtype in itertools.product(
            ((4096, 4096), (4096, 14336), (14336, 4096)), (1, 2, 16, 17, 128, 4096), FLOATS
        ):
            asked = Request(name, m, n, k, dtype, dtype, accuracy=accuracy, layouts=packed)
            choice = choose(replace(asked, caller_casts=True), gpu)
            assert (choice.reading.source, choice.writes) == (dtype, dtype)
            *before, _ = choice.launches()
            exact = choice.kernel.accuracy == "exact"
            few = choice.kernel.most_tokens is not None
            own = few and m < 9 and dtype == "bfloat16"
            one_launch = exact and (dtype == "float16" or m <= 2 or own)
            assert len(before) <= (0 if one_launch else 1), choice


def test_nothing_is_asked_for_where_nothing_needs_it(gpu: FakeGpu) -> None:
    """Float16 A is read where it lies: no rounded rows, no scales; step 12 has no counters, and
    step 14 none where no blocks share a tile."""
    for number, m in ((12, 1), (14, 300)):
        _, made = made_by(number, gpu, m, "float16", "float16")
        assert (made.zeroed, made.nbytes, len(made.loaded)) == (0, 0, 1)


def test_counters_are_asked_for_as_zeros_and_partial_sums_are_not(
    gpu: FakeGpu, shared_tiles: None
) -> None:
    many = {input: made_by(14, gpu, 300, input)[1] for input in FLOATS}
    assert [len(made.loaded) for made in many.values()] == [2, 1, 2]
    partials, counters = wgmma_float16.KERNEL.scratch(FORMATS["q4_0"], "A16", Shape(300, N, K))
    in_bytes = [int(np.prod(s)) * np.dtype(t).itemsize for s, t in (partials, counters)]
    plain = many.pop("float16")
    assert [plain.nbytes, plain.zeroed] == [-(-size // 256) * 256 for size in in_bytes]
    for made in many.values():  # A is rounded
        assert made.nbytes - plain.nbytes >= 2 * 300 * K + 4 * 300
        assert made.zeroed == plain.zeroed > 0


def test_threads_bring_their_addresses_one_after_another(gpu: FakeGpu) -> None:
    """No launch has an address of another thread's call."""
    (_, made), calls = made_of(gpu, 300), 400
    per_call = len(made.loaded)

    def call(i: int) -> None:
        weights = [HERE * i + 32, HERE * i + 48]
        made((HERE * i, HERE * i + 16, *weights), HERE * i + 64, HERE * i + 512, i)

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


def test_bfloat16_that_a_step_does_not_multiply_is_read_as_float32(gpu: FakeGpu) -> None:
    """Never as the float16 that the same bits would be."""
    choice, _ = made_by(14, gpu, 20, "bfloat16", "bfloat16")
    assert choice.reading.source == "bfloat16"
    older = replace(choice.kernel, outputs=("float32", "float16"))
    found = Choice.of(older, "A16", choice.request)
    assert (found.reading.source, found.writes, len(found.launches())) == ("float32", "float32", 2)


def test_gates_are_computed_where_the_pass_can(gpu: FakeGpu) -> None:
    for accuracy, m, source in (("exact", 300, "gated"), ("fast", 300, "float16")):
        choice, made = made_of(gpu, m, accuracy, a="gated", c="float16")
        assert choice.reading.source == source
        if source == "gated":
            assert made.loaded[0].source.args[0].shape == (m, 2 * K)
    of_q8_1 = replace(choice.request, m=1, accuracy="exact", family="A8", c="float32")
    assert choose(of_q8_1, gpu).reading.source == "float32"


def test_a_bias_that_a_kernel_does_not_add_leaves_float32(gpu: FakeGpu) -> None:
    choice, _ = made_of(gpu, 300, c="float16", a="float16", bias="float16")
    assert (choice.bias, choice.writes) == ("float16", "float16")
    older = Choice.of(replace(choice.kernel, adds_bias=False), "A16", choice.request)
    assert (older.bias, older.writes) == (None, "float32"), "the caller's sum is rounded once"


def mapped_launches(gpu: FakeGpu, m: int, pass_first: bool) -> Prepared:
    """Of a step that reads A, or what a pass made of it, through a tensor map."""

    def rows(a: Any, machine: Any) -> Activations:
        if not pass_first:
            return Activations((a,))
        halves = machine.empty((m, K), np.float16)
        rounder = SimpleNamespace(__name__="rounder")
        return Activations((halves,), (Launch(rounder, (1,), (32,), (a, halves)),))

    def launch(fmt: Any, family: Any, shape: Any, w: Any, activations: Any, out: Any) -> Launch:
        a = replace(activations[0], dtype=np.dtype(np.float16))  # as one of float16 has it
        own = SimpleNamespace(__name__="own")
        return Launch(own, (1,), (32,), (TensorMap(a, (16, 64)), *w, out))

    step = replace(find(1), activations={"A16": rows}, launch=launch, scratch=None)
    choice = Choice.of(step, "A16", Request("q4_0", m, N, K))
    return prepare(choice, packed_types("q4_0", [step])[choice.layout])[1]


@pytest.mark.parametrize("pass_first", [False, True])
def test_a_tensor_map_moves_with_its_matrix(gpu: FakeGpu, pass_first: bool) -> None:
    made = mapped_launches(gpu, 20, pass_first)
    for a in (HERE, HERE + 32):
        workspace = MEMORY + a - HERE
        gpu.launched.clear()
        made((a, 2 * HERE, 3 * HERE), 4 * HERE, workspace, 0)
        assert len(gpu.launched) == 1 + pass_first
        *_, (name, _, values) = gpu.launched
        assert name == "own"
        words = encoded(workspace if pass_first else a, 20, K, 16)
        assert values[:PARAMETER_WORDS] == (*[0] * PADDING_WORDS, *words)


@pytest.mark.parametrize(("pass_first", "a", "workspace"), [(False, 8, 0), (True, 0, 8)])
def test_a_matrix_that_a_tensor_map_cannot_have_launches_nothing(
    gpu: FakeGpu, pass_first: bool, a: int, workspace: int
) -> None:
    made = mapped_launches(gpu, 20, pass_first)
    with pytest.raises(ValueError, match="a multiple of 16 bytes; this one lies 8 bytes after one"):
        made((HERE + a, 2 * HERE, 3 * HERE), 4 * HERE, MEMORY + workspace, 0)
    assert not gpu.launched
