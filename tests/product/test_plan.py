"""Plans: the product of `gemm`; only two addresses change; arrays that do not fit are refused."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import steps
from qformats import WEIGHT_FORMATS
from reference import Problem
from reference.bfloat16 import bfloat16_bits
from steps import gemm, ladder, pack
from steps.compile.dry_run import REGION
from steps.contract import Family, Kernel, array_dtype
from steps.driver.machines import Simulator
from steps.instructions.tensor_map import PADDING_WORDS, PARAMETER_WORDS
from steps.product.choice import of_gemm
from steps.product.plan import Plan
from steps.registry import kernel_of, kernels
from tests.driver.fake_gpu import FakeGpu, Tensor, device_array, encoded
from tests.steps.works import TAKEN, input_of

ONCE = [work for work in TAKEN if work.values[2] == "q5_1"]
"""All that `gemm` takes for a number, in every family, in one format."""

M, N, K = 3, 5, 96
PROBLEM = Problem(M, N, K, "q4_1")
SOMEWHERE = 1 << 44


def problem_of(step: Kernel, family: Family, of: tuple[Any, ...], seed: int = 0) -> Problem:
    """One with A as the kernel reads it. of: M, N, K and the format."""
    return Problem(*of, seed=seed, input=input_of(step, family))


# --- in the simulator -----------------------------------------------------------------------------


@pytest.mark.parametrize(("step", "family", "name"), ONCE)
def test_a_plan_equals_gemm_in_every_step(step: Kernel, family: Family, name: str) -> None:
    problem, machine = problem_of(step, family, (M, N, K, name)), Simulator()
    handle, dtype = pack(problem.blocks, step=step.number, machine=machine), step.outputs[0]
    plan = gemm.plan(M, handle, family=family, input=problem.input, dtype=dtype)
    assert (plan.choice.kernel.number, plan.choice.family) == (step.number, family)
    out = np.full((M, N), np.nan, dtype)
    plan(problem_of(step, family, (M, N, K, name), seed=1).a, out)
    plan(problem.a, out)  # in memory that the first call has used
    np.testing.assert_array_equal(out, gemm(problem.a, handle, family=family, dtype=dtype))


def test_a_plan_may_be_of_blocks_and_comes_from_the_package() -> None:
    machine = Simulator()
    plan = steps.plan(M, PROBLEM.blocks, machine=machine)
    assert gemm.plan is steps.plan
    out = np.empty((M, N), np.float32)
    assert plan(PROBLEM.a, out) is None
    np.testing.assert_array_equal(out, gemm(PROBLEM.a, PROBLEM.blocks, machine=machine))
    assert repr(plan) == f"Plan({plan.choice})"
    assert re.search(r"M=3 N=5 K=96, launched as \d+(x\d+)* blocks of \d+ threads", repr(plan))


def test_one_handle_serves_every_step_of_its_packing() -> None:
    machine = Simulator()
    taken = [one for one in ladder() if of_gemm(one)]
    for layout in {step.pack: step for step in taken}:
        alike = [one for one in taken if one.pack is layout]
        handle = pack(PROBLEM.blocks, step=alike[-1].number, machine=machine)
        for other in (alike[0], *alike[1:][-1:]):
            c, choice = gemm(PROBLEM.a, handle, step=other.number, explain=True)
            assert choice.kernel.number == other.number
            np.testing.assert_array_equal(
                c, gemm(PROBLEM.a, PROBLEM.blocks, step=other.number, machine=machine)
            )
    assert pack(PROBLEM.blocks, machine=machine).layout == "tiles"


def test_a_plan_may_write_float16() -> None:
    machine, (*_, step) = Simulator(), (one for one in kernels() if "float16" in one.outputs)
    plan = gemm.plan(M, PROBLEM.blocks, dtype=np.float16, step=step.number, machine=machine)
    out = np.zeros((M, N), np.float16)
    plan(PROBLEM.a, out)
    wanted = gemm(PROBLEM.a, PROBLEM.blocks, step=step.number, machine=machine)
    np.testing.assert_array_equal(out, wanted.astype(np.float16))
    with pytest.raises(TypeError, match="out must be float16, got float32"):
        plan(PROBLEM.a, wanted)
    with pytest.raises(TypeError, match=r"^dtype must be float32, float16 or bfloat16, got .*64"):
        gemm.plan(M, PROBLEM.blocks, dtype=np.float64, machine=machine)
    with pytest.raises(TypeError, match="input must be float32, float16 or bfloat16, got 'q8_1'"):
        gemm.plan(M, PROBLEM.blocks, input="q8_1", machine=machine)


@pytest.mark.parametrize("input", ["float16", "bfloat16"])
def test_a_plan_may_read_16_bits(input: str) -> None:
    machine, bits = Simulator(), input == "bfloat16"
    a = bfloat16_bits(PROBLEM.a) if bits else PROBLEM.a.astype(np.float16)
    plan = gemm.plan(M, PROBLEM.blocks, input=input, dtype=a.dtype, machine=machine)
    out = np.zeros((M, N), a.dtype)
    plan(a, out)
    wanted = gemm(a, PROBLEM.blocks, dtype=input, machine=machine)
    np.testing.assert_array_equal(out, wanted, strict=True)
    assert plan.choice.reading.source == input
    assert len(plan._launches) == 1
    with pytest.raises(TypeError, match=f"a must be {input}, got float32"):
        plan(PROBLEM.a, out)


def test_explain_says_which_step_it_was_and_why() -> None:
    machine = Simulator()
    c, choice = gemm(PROBLEM.a, PROBLEM.blocks, step=1, machine=machine, explain=True)
    assert c.shape == (M, N)
    assert (choice.kernel.number, choice.family, choice.request.format) == (1, "A16", "q4_1")
    assert str(choice) == (
        "step 1 (naive W4A16: one thread, one output) as W4A16 for M=3 N=5 K=96, "
        "launched as 1x1 blocks of 256 threads: asked for by number"
    )
    handle = pack(PROBLEM.blocks, step=5, machine=machine)
    assert gemm(PROBLEM.a, handle, explain=True)[1].why == "asked for by number"
    _, free = gemm(PROBLEM.a, PROBLEM.blocks, machine=machine, explain=True)
    assert free.why == "the highest default step for M up to 16 on the simulator"


@pytest.mark.parametrize("m", [0, -1, 1.5, True, "3", None])
def test_a_plan_is_for_one_token_or_more(m: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"^m is {m!r}: a plan needs a number of tokens from 1 up$"
    ):
        gemm.plan(m, PROBLEM.blocks, machine=Simulator())


def test_what_a_plan_cannot_be_made_of_is_refused() -> None:
    machine = Simulator()
    with pytest.raises(TypeError, match="w must be a NumPy array of blocks"):
        gemm.plan(M, PROBLEM.blocks.tobytes(), machine=machine)
    with pytest.raises(ValueError, match="there is no step 99"):
        gemm.plan(M, PROBLEM.blocks, step=99, machine=machine)
    handle = pack(PROBLEM.blocks, step=2, machine=machine)
    with pytest.raises(ValueError, match="w is packed for step 2, not for step 5"):
        gemm.plan(M, handle, step=5)


def test_too_many_blocks_are_refused_when_the_plan_is_made(gpu: FakeGpu) -> None:
    handle = pack(PROBLEM.blocks, step=1, machine=gpu)
    with pytest.raises(ValueError, match="thread blocks along y and CUDA launches at most 65535"):
        gemm.plan(2**22, handle)


# --- on a GPU that is not there -------------------------------------------------------------------


def planned(gpu: FakeGpu, step: int = 5, **options: Any) -> Plan:
    return gemm.plan(M, pack(PROBLEM.blocks, step=step, machine=gpu), **options)


@pytest.mark.parametrize(("step", "family", "name"), ONCE)
def test_only_the_two_addresses_change(step, family, name, gpu: FakeGpu) -> None:
    handle = pack(Problem(M, N, K, name).blocks, step=step.number, machine=gpu)
    source, dtype = input_of(step, family), step.outputs[0]
    plan = gemm.plan(M, handle, family=family, input=source, dtype=dtype)
    begins = 4 if source == "float32" else 16
    seen = []
    for i in (1, 2):
        a = device_array((M, K), array_dtype(source), SOMEWHERE * i + begins)
        out = device_array((M, N), array_dtype(dtype), SOMEWHERE * i + (1 << 20))
        gpu.launched.clear()
        plan(a, out)
        assert {SOMEWHERE * i + begins, SOMEWHERE * i + (1 << 20)} <= gpu.values()
        assert not any(REGION <= value < 16 * REGION for value in gpu.values()), "a placeholder"
        seen.append([values for _, _, values in gpu.launched])
    changed = [
        {one, two}
        for first, second in zip(*seen, strict=True)
        for one, two in zip(first, second, strict=True)
        if one != two
    ]
    assert len(changed) == 2, "one place of a and one of out, among all launches"
    before = len(gpu.launched)
    plan(a, out)
    assert len(gpu.launched) == 2 * before


def test_an_output_of_float16_has_half_the_bytes(gpu: FakeGpu, torch) -> None:
    plan = planned(gpu, 11, dtype="float16")
    a = on(SOMEWHERE, (M, K))
    for out in (
        on(SOMEWHERE - 48, (M, N), dtype="float16"),
        device_array((M, N), np.float16, SOMEWHERE - 48),
    ):
        gpu.launched.clear()
        plan(a, out)  # 30 bytes: it ends before a; float32 would not
        assert {SOMEWHERE, SOMEWHERE - 48} <= gpu.values()
    with pytest.raises(ValueError, match=r"out .* overlaps a "):
        plan(a, on(SOMEWHERE - 16, (M, N), dtype="float16"))
    for out in (on(2 * SOMEWHERE, (M, N)), device_array((M, N), np.float32, 2 * SOMEWHERE)):
        with pytest.raises(TypeError, match="out must be float16, got float32"):
            plan(a, out)


def test_an_output_may_begin_where_a_ends_and_end_where_a_begins(gpu: FakeGpu, torch) -> None:
    plan = planned(gpu)
    for a, out in ((SOMEWHERE, SOMEWHERE + 4 * M * K), (SOMEWHERE + 4 * M * N, SOMEWHERE)):
        gpu.launched.clear()
        plan(on(a, (M, K)), on(out, (M, N)))
        assert {a, out} <= gpu.values()


def test_nothing_is_allocated_by_a_call(gpu: FakeGpu) -> None:
    plan = planned(gpu)
    free = next(gpu.addresses)
    plan(
        device_array((M, K), np.float32, SOMEWHERE),
        device_array((M, N), np.float32, 2 * SOMEWHERE),
    )
    assert next(gpu.addresses) == free + (1 << 24)


def halves(gpu: FakeGpu, step: int = 14, name: str = "float16") -> Plan:
    return planned(gpu, step, input=name, dtype=name)


@pytest.mark.parametrize(
    ("step", "name"), [(11, "float16"), (14, "float16"), (18, "float16"), (18, "bfloat16")]
)
def test_one_launch_reads_a_of_16_bits_where_it_lies(
    step: int, name: str, gpu: FakeGpu, torch
) -> None:
    """By its address in a parameter, or by a tensor map that is encoded for each address."""
    plan = halves(gpu, step, name)
    tokens = 16  # of a box
    for at in (SOMEWHERE, SOMEWHERE + 32):
        gpu.launched.clear()
        plan(on(at, (M, K), dtype=name), on(3 * SOMEWHERE, (M, N), dtype=name))
        ((_, stream, values),) = gpu.launched
        assert stream == 4711
        assert 3 * SOMEWHERE in values
        if step == 14:
            assert values[PADDING_WORDS:PARAMETER_WORDS] == encoded(at, M, K, tokens)
        else:
            assert at in values


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("step", [11, 14])
def test_a_of_16_bits_begins_at_a_multiple_of_16_bytes(step, name, gpu, torch) -> None:
    plan = halves(gpu, step, name)
    out = on(3 * SOMEWHERE, (M, N), dtype=name)
    arrays = [on(SOMEWHERE + 8, (M, K), dtype=name)]
    arrays += [device_array((M, K), array_dtype(name), SOMEWHERE + 8)]
    for a in arrays:
        with pytest.raises(
            ValueError,
            match=rf"^a begins at {SOMEWHERE + 8:#x}, 8 bytes past a multiple of 16, and kernels "
            rf"copy {name} 16 bytes at a time: make an aligned copy, in torch a.clone\(\)$",
        ):
            plan(a, out)
    with pytest.raises(ValueError, match=f"a begins 1 bytes past a multiple of 2, .*{name} only"):
        plan(on(SOMEWHERE + 1, (M, K), dtype=name), out)
    with pytest.raises(ValueError, match=r"a must be C-contiguous.* make a contiguous copy"):
        plan(on(SOMEWHERE, (M, K), dtype=name, contiguous=False), out)
    for wrong in {"float32", "float16", "bfloat16"} - {name}:
        with pytest.raises(TypeError, match=f"a must be {name}, got {wrong}"):
            plan(on(SOMEWHERE, (M, K), dtype=wrong), out)
    assert gpu.launched == []


def test_tensors_are_multiplied_on_torchs_current_stream(gpu, torch) -> None:
    plan = planned(gpu)
    plan(Tensor((M, K), SOMEWHERE), Tensor((M, N), 2 * SOMEWHERE))
    assert {stream for _, stream, _ in gpu.launched} == {4711}
    assert {SOMEWHERE, 2 * SOMEWHERE} <= gpu.values()


def test_a_named_stream_counts_more_the_one_of_the_call_most(gpu, torch) -> None:
    a, out = Tensor((M, K), SOMEWHERE), Tensor((M, N), 2 * SOMEWHERE)
    plan = planned(gpu, stream=SimpleNamespace(cuda_stream=12))
    plan(a, out)
    assert {stream for _, stream, _ in gpu.launched} == {12}
    gpu.launched.clear()
    plan(a, out, stream=SimpleNamespace(__cuda_stream__=lambda: (0, 13)))
    assert {stream for _, stream, _ in gpu.launched} == {13}
    gpu.launched.clear()
    plan(a, out, stream=0)
    assert {stream for _, stream, _ in gpu.launched} == {0}


def test_arrays_of_others_are_multiplied_on_the_stream_that_they_name(gpu) -> None:
    plan = planned(gpu)
    out = device_array((M, N), np.float32, 2 * SOMEWHERE)
    a = device_array((M, K), np.float32, SOMEWHERE)
    plan(a, out)
    assert {stream for _, stream, _ in gpu.launched} == {0}
    gpu.launched.clear()
    facts = {**a.__cuda_array_interface__, "stream": 99}
    plan(SimpleNamespace(__cuda_array_interface__=facts), out)
    assert {stream for _, stream, _ in gpu.launched} == {99}


def on(address: int, shape: tuple[int, int], **changes: Any) -> Tensor:
    return Tensor(shape, address, **changes)


@pytest.mark.parametrize(
    ("a", "out", "error", "said"),
    [
        (on(SOMEWHERE, (M + 1, K)), None, ValueError, r"a must have shape \[3, 96\]"),
        (on(SOMEWHERE, (M, K + 32)), None, ValueError, r"shape \[3, 96\], got \[3, 128\]"),
        (on(SOMEWHERE, (M * K,)), None, ValueError, "a must have 2 dimensions, got 1"),
        (on(SOMEWHERE, (M, K), dtype="float16"), None, TypeError, "a must be float32, got float16"),
        (on(SOMEWHERE, (M, K), contiguous=False), None, ValueError, "a must be C-contiguous"),
        (on(SOMEWHERE, (M, K), is_cuda=False), None, TypeError, "a must be on the GPU .* Tensor"),
        (on(SOMEWHERE, (M, K), device_index=1), None, ValueError, "a is on GPU 1 .* on GPU 0"),
        (on(SOMEWHERE + 2, (M, K)), None, ValueError, "a begins 2 bytes past a multiple of 4"),
        (np.zeros((M, K), np.float32), None, TypeError, "a must be on the GPU .* ndarray"),
        ([1.0], None, TypeError, "a must be on the GPU .* list"),
        (None, on(SOMEWHERE, (N, M)), ValueError, r"out must have shape \[3, 5\]"),
        (None, on(SOMEWHERE + 8, (M, N)), ValueError, "out begins 8 bytes past a multiple of 16"),
        (None, on(2 * SOMEWHERE + 1024, (M, N)), ValueError, "out .* overlaps a "),
        (None, np.zeros((M, N), np.float32), TypeError, "out must be on the GPU"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_launched(
    a,
    out,
    error,
    said,
    gpu,
    torch,
) -> None:
    plan = planned(gpu)
    a = on(2 * SOMEWHERE, (M, K)) if a is None else a
    out = on(3 * SOMEWHERE, (M, N)) if out is None else out
    with pytest.raises(error, match=said) as refused:
        plan(a, out)
    assert "\n" not in str(refused.value)
    assert gpu.launched == []


def test_numbas_arrays_are_contiguous(gpu: FakeGpu) -> None:
    columns = device_array((M, K), np.float32, SOMEWHERE, strides=(4, 4 * M))
    with pytest.raises(ValueError, match="a must be C-contiguous"):
        planned(gpu)(columns, device_array((M, N), np.float32, 2 * SOMEWHERE))
    assert gpu.launched == []


def test_an_output_that_is_read_only_is_refused(gpu: FakeGpu) -> None:
    facts = device_array((M, N), np.float32, SOMEWHERE).__cuda_array_interface__
    locked = SimpleNamespace(__cuda_array_interface__={**facts, "data": (SOMEWHERE, True)})
    with pytest.raises(ValueError, match=r"out \[3, 5\] is read-only"):
        planned(gpu)(device_array((M, K), np.float32, 2 * SOMEWHERE), locked)


@pytest.mark.parametrize(
    ("a", "said"),
    [
        (
            np.zeros((M + 1, K), np.float32),
            r"a must have shape \[3, 96\], got \[4, 96\]",
        ),
        (np.zeros((M, K)), "a must be float32, got float64"),
        (np.zeros((M, 2 * K), np.float32)[:, ::2], "a must be C-contiguous"),
    ],
)
def test_the_simulator_refuses_the_same(a: np.ndarray, said: str) -> None:
    plan = gemm.plan(M, PROBLEM.blocks, step=1, machine=Simulator())
    out = np.full((M, N), -7, np.float32)
    with pytest.raises((TypeError, ValueError), match=said):
        plan(a, out)
    assert (out == -7).all()
    own = np.full((M, K), -7, np.float32)
    with pytest.raises(ValueError, match="out overlaps a, which the product reads"):
        plan(own, own.reshape(-1)[: M * N].reshape(M, N))
    assert (own == -7).all()
    out.flags.writeable = False
    with pytest.raises(ValueError, match=r"out \[3, 5\] is read-only"):
        plan(np.zeros((M, K), np.float32), out)


# --- on a GPU -------------------------------------------------------------------------------------


def on_gpu(problem: Problem, dtype: str = "float32") -> tuple[Any, Any, Any]:
    """(a, out, a function that fetches out)"""
    from numba import cuda

    out = cuda.to_device(np.full((problem.m, problem.n), np.nan, dtype))
    return cuda.to_device(problem.a), out, out.copy_to_host


@pytest.mark.gpu
@pytest.mark.parametrize(("step", "family", "name"), TAKEN)
def test_a_plan_equals_gemm_bit_for_bit_on_a_gpu(step: Kernel, family: Family, name: str) -> None:
    from numba import cuda

    for m in (1, 17):
        problem, dtype = problem_of(step, family, (m, 68, 288, name)), step.outputs[0]
        handle = pack(problem.blocks, step=step.number)
        plan = gemm.plan(m, handle, family=family, input=problem.input, dtype=dtype)
        a, out, fetched = on_gpu(problem, dtype)
        wanted = gemm(problem.a, handle, family=family, dtype=dtype)
        for stream in (None, cuda.stream()):
            out.copy_to_device(np.full(out.shape, np.nan, dtype))
            plan(a, out, stream=stream)
            cuda.synchronize()
            np.testing.assert_array_equal(fetched(), wanted)


IN_LAST_FAMILY = [
    pytest.param(one, one.families[-1], id=one.name)
    for one in (kernel_of(step.number) for step in ladder() if of_gemm(step))
]


@pytest.mark.gpu
@pytest.mark.parametrize(("step", "family"), IN_LAST_FAMILY)
def test_a_plan_in_a_graph_of_cuda_core(step: Kernel, family: Family) -> None:
    from cuda.core import Device

    problem, dtype = problem_of(step, family, (5, 68, 288, "q4_0")), step.outputs[0]
    handle = pack(problem.blocks, step=step.number)
    plan = gemm.plan(5, handle, input=problem.input, dtype=dtype)
    a, out, fetched = on_gpu(problem, dtype)
    wanted = gemm(problem.a, handle, dtype=dtype)
    device = Device()
    device.set_current()
    builder, stream = device.create_graph_builder(), device.create_stream()
    builder.begin_building()
    plan(a, out, stream=builder)
    plan(a, out, stream=builder)
    builder.end_building()
    graph = builder.complete()
    assert np.isnan(fetched()).all(), "a captured call must not run"
    for _ in range(3):
        graph.launch(stream)
    stream.sync()
    np.testing.assert_array_equal(fetched(), wanted)


@pytest.mark.gpu
def test_calls_in_a_row_do_not_disturb_each_other() -> None:
    """Many products on one stream, the next queued before the last is done."""
    from numba import cuda

    for step, family in (one.values for one in IN_LAST_FAMILY):
        of, dtype = (4, 516, 1056, "q8_0"), step.outputs[0]
        handle = pack(Problem(*of).blocks, step=step.number)
        plan = gemm.plan(4, handle, input=input_of(step, family), dtype=dtype)
        problems = [problem_of(step, family, of, seed) for seed in range(4)]
        pairs = [on_gpu(problem, dtype) for problem in problems]
        cuda.synchronize()
        for _ in range(5):
            for a, out, _ in pairs:
                plan(a, out)
        cuda.synchronize()
        for problem, (_, _, fetched) in zip(problems, pairs, strict=True):
            np.testing.assert_array_equal(fetched(), gemm(problem.a, handle, dtype=dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_torch_on_a_side_stream_and_in_a_graph_of_its_own(name: str) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    problem = Problem(6, 68, 288, name)
    handle = pack(problem.blocks)
    plan = gemm.plan(6, handle)
    wanted = gemm(problem.a, handle)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        half = torch.tensor(problem.a, device="cuda") / 2
        a = half + half  # the plan has to come after this, on the same stream
        out = torch.full((6, 68), float("nan"), device="cuda")
        plan(a, out)
        c = torch.as_tensor(gemm(a, handle), device="cuda")
    side.synchronize()
    np.testing.assert_array_equal(out.cpu().numpy(), wanted)
    np.testing.assert_array_equal(c.cpu().numpy(), wanted)
    out.fill_(float("nan"))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan(a, out)
    torch.cuda.synchronize()
    assert torch.isnan(out).all()
    graph.replay()
    torch.cuda.synchronize()
    np.testing.assert_array_equal(out.cpu().numpy(), wanted)
