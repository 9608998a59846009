"""Kernels compiled by other processes: those that are launched, with the same machine code."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qformats import FORMATS, WEIGHT_FORMATS, quantize
from reference import BENCH_SHAPES, Problem
from steps import contract
from steps.checks.select import select
from steps.compile import compiler as compiling
from steps.compile import dry_run, kernel_cache, other_processes, parallel_compile
from steps.compile.compiler import architecture, compiled, machine_code, signature_of
from steps.compile.dry_run import OfArrays
from steps.compile.kernel_cache import CompiledKernel
from steps.compile.other_processes import Compilers
from steps.compile.parallel_compile import compile_ahead, compile_meanwhile
from steps.contract import Shape, Work, array_dtype
from steps.driver.machines import Gpu
from steps.kernels.between import swiglu
from steps.kernels.parts.activations.rows import row_rounder
from steps.product.choice import Choice
from steps.product.prepared import prepare
from steps.registry import find, kernel_of, ladder
from tests.compile.cubins import text_of
from tests.driver.fake_gpu import FakeGpu
from tests.steps.works import ENGINEERED

HOPPER = SimpleNamespace(cc=(9, 0))
SIZE = (1, 64, 256)


def products(steps: Any, size: Any = SIZE) -> list[Choice]:
    """Those of steps in all their families, on Q4_0."""
    return [Choice.of_work(work, size) for work in select(steps, ["q4_0"])]


@dataclass
class OnlyHere:
    """A recipe that fails in another process, which knows the architecture to compile for."""

    recipe: Choice

    def launches(self) -> Any:
        if other_processes._arch:
            raise ValueError("not here")
        return self.recipe.launches()

    def runs_on(self, cc: Any) -> bool:
        return True


@pytest.fixture(autouse=True)
def nothing_on_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LADDER_CACHE", "off")


@pytest.fixture
def forgotten() -> Any:
    """Kernels by name, as nobody has compiled them before or will have after."""
    kernels: dict[str, Any] = {}
    for work in select((find(1), find(2), find(3)), ["q4_0"]):
        for launch in Choice.of_work(work, SIZE).launches():
            kernels[launch.kernel.__name__] = launch.kernel
    before = {kernel: kernel_cache._known.pop(kernel, {}) for kernel in kernels.values()}
    yield kernels
    kernel_cache._known.update(before)


def test_another_processs_kernel_is_the_one_that_would_be_compiled_here(
    forgotten: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of products, and of launches that are none; each once. Some are compiled nowhere else."""
    monkeypatch.setattr(parallel_compile.os, "sched_getaffinity", lambda _: {0, 1})
    said: list[str] = []
    of = (((4, 64), "float16"), ((4, 32), "float16")), (((4, 64), "float32"), ((4, 32), "float16"))
    others = [OfArrays(of_swiglu, types) for types in of]
    kernels = {one.launches()[0].kernel for one in others}
    before = {kernel: kernel_cache._known.pop(kernel, {}) for kernel in kernels}
    wanted = [*products((find(1), find(2))), *others, *others]
    lost = [OnlyHere(one) for one in products([find(3)])]
    steps: list[tuple[int, int]] = []
    report = lambda *done: steps.append(done)  # noqa: E731
    try:
        asked = [*wanted, *lost]
        assert compile_ahead(asked, HOPPER, said.append, fewest=7, report=report) == 5
        assert said == ["2 kernels were not compiled by other processes: ValueError: not here"]
        assert (len(steps), steps[-1]) == (7, (5, 7))
        for one in lost:
            own = one.recipe.launches()[-1].kernel
            assert own in forgotten.values()
            assert not kernel_cache._known.get(own)
        for one in wanted:
            for launch in one.launches():
                signature = signature_of(launch.args)
                made = kernel_cache._known[launch.kernel][signature, "sm_90a"]
                assert made is kernel_cache.find(launch.kernel, signature, "sm_90a")
                here = machine_code(launch.kernel, signature, "sm_90a")
                assert text_of(made.cubin) == text_of(here.cubin)
                assert made.name.encode() in made.cubin
        assert compile_ahead(wanted, HOPPER, print, fewest=1) == 0, "all of it is known"
    finally:
        kernel_cache._known.update(before)


def of_swiglu(y: Any, x: Any, *, machine: Any) -> Any:
    return swiglu.launch(y, x)


@pytest.mark.gpu
def test_a_plan_finds_what_other_processes_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, size, step = Gpu(), (40, 68, 288), kernel_of(14)
    for factory in (sys.modules[step.launch.__module__].kernel, row_rounder):
        factory.cache_clear()  # what other tests have compiled
    packed = step.pack(quantize(Problem(*size, "q4_0").w, "q4_0"))
    types = tuple((one.shape, one.dtype) for one in packed)
    wanted = [Choice.of_work(Work(step, "A16", "q4_0"), size, c=each) for each in step.outputs]
    assert compile_ahead(wanted, gpu, print, 2, fewest=1) == 1 + len(step.outputs), "and the pass"
    monkeypatch.setattr(compiling, "compile_kernel", None)  # nothing is compiled here
    for one in wanted:
        prepare(one, types)


@pytest.mark.parametrize(("fewest", "cores"), [(4, 2), (1, 1)])
def test_few_kernels_or_one_core_are_no_reason_to_start_processes(
    forgotten: Any, fewest: int, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_compile.os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(parallel_compile, "Compilers", None)
    wanted = products((find(1), find(2)))
    assert compile_ahead(wanted, HOPPER, print, fewest=fewest) == 0


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_launches_depend_on_no_shape_of_packed_weights(name: str) -> None:
    """A dry run has the types of a few weights, whatever the product."""
    n, k, fmt = 1056, 4128, FORMATS[name]
    large: dict[Any, Any] = {}
    for work in select((*ladder(), *ENGINEERED), [name]):
        if (pack := work.step.pack) not in large:
            arrays = pack(np.zeros((n, k // fmt.elements), fmt.dtype))
            large[pack] = [(array.shape, array.dtype) for array in arrays]
        for m in (1, 300):
            made = [
                [
                    (one.kernel, one.grid, one.shared_bytes, signature_of(one.args))
                    for one in Choice.of_work(work, (m, n, k)).launches(weights=weights)
                ]
                for weights in (None, large[pack])
            ]
            assert made[0] == made[1]


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_they_are_compiled_for_the_types_that_a_gpu_has(name: str) -> None:
    fmt = FORMATS[name]
    for work in select((*ladder(), *ENGINEERED), [name]):
        gpu, step = FakeGpu(), work.step
        weights = tuple(gpu.empty(*one) for one in dry_run.packed_types(step.pack, name))
        for output in step.outputs:
            wanted = Choice.of_work(work, SIZE, c=output)
            a = gpu.empty((1, 256), array_dtype(wanted.reading.dtype))
            activations = step.activations[work.family](a, gpu)
            own = step.prepare(
                gpu, fmt, work.family, Shape(*SIZE), weights, activations.arrays,
                gpu.empty((1, 64), array_dtype(output)),
            )  # fmt: skip
            real = [(one.kernel, signature_of(one.args)) for one in (*activations.launches, own)]
            made = wanted.launches()
            assert [(one.kernel, signature_of(one.args)) for one in made] == real


def test_what_a_gpu_cannot_run_is_not_compiled_for_it() -> None:
    wanted = products([kernel_of(14)], (512, 4096, 4096))
    assert len(parallel_compile.missing_kernels(wanted, (9, 0))) == 2
    assert parallel_compile.missing_kernels(wanted, (8, 0)) == {}
    assert [architecture(cc) for cc in ((7, 5), (8, 9), (9, 0))] == ["sm_75", "sm_89", "sm_90a"]


def test_each_kernel_is_compiled_once() -> None:
    some = (find(1), find(2), find(3))
    wanted = [one for size in BENCH_SHAPES for one in products(some, size)]
    found = parallel_compile.missing_kernels(wanted, (9, 0))
    assert len(found) == 5, "of three steps, one of them of two families, and one pass"
    assert len({kernel for kernel, _ in found}) == 5


@dataclass
class Telling:
    """A recipe that fails, and tells what the process knows that tries."""

    def launches(self) -> Any:
        known = other_processes._arch, contract.multiprocessors(), contract.shared_memory()
        raise ValueError(f"{known} {os.getsid(0)}")

    def runs_on(self, cc: Any) -> bool:
        return True


def test_a_process_is_told_of_the_gpu_and_ends_with_who_asked() -> None:
    with Compilers(2, "sm_80", 108, 163 * 1024) as compilers:
        why = str(compilers.submit(Telling(), 0).exception())
        told, _, session = why.rpartition(" ")
        assert told == f"ValueError: ('sm_80', 108, {163 * 1024})"
        assert int(session) == compilers._process.pid, "Ctrl-C is for the process that asks"
        os.kill(int(session), 0)
    with pytest.raises(ProcessLookupError):
        os.killpg(int(session), 0)
    assert "ended" in str(compilers.submit(Telling(), 0).exception())
    assert "pickle" in str(Compilers.submit(compilers, lambda: None, 0).exception()), "but no error"


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernels that this process compiles. Two others may, and end with the test."""
    compiled_here: list[Any] = []

    def noted(kernel: Any, signature: Any, arch: str) -> CompiledKernel:
        compiled_here.append(kernel)
        return CompiledKernel("here", b"", False)

    monkeypatch.setattr(compiling, "compile_kernel", noted)
    monkeypatch.setenv(parallel_compile.VARIABLE, "2")
    monkeypatch.setattr(parallel_compile, "_compilers", None)
    yield compiled_here
    if parallel_compile._compilers is not None:
        parallel_compile._compilers.close()


def test_launches_wait_for_what_is_compiled_meanwhile(forgotten: Any, here: list[Any]) -> None:
    wanted = products((find(1), find(2)))
    lost = [OnlyHere(one) for one in products([find(3)])]
    missing = parallel_compile.missing_kernels([*wanted, *lost], (9, 0))
    assert compile_meanwhile([*wanted, *lost], HOPPER) == len(missing)
    assert compile_meanwhile([*wanted, *lost], HOPPER) == 0, "they are coming"
    first = parallel_compile._compilers
    made = {key: compiled(*key, "sm_90a") for key in missing}
    own = {find_kernel(one.recipe) for one in lost}
    assert {kernel for (kernel, _), code in made.items() if code.name == "here"} == own
    assert {*here} == own, "what the other processes cannot compile"
    for key, code in made.items():
        assert code is kernel_cache.find(*key, "sm_90a")
        assert key[0] in own or code.name.encode() in code.cubin
    assert not kernel_cache._expected

    kernel_cache._known.pop(find_kernel(wanted[0]))
    assert compile_meanwhile(wanted[:1], HOPPER) == 1, "one is enough where they run"
    assert parallel_compile._compilers is first
    parallel_compile._compilers.close()  # with the kernel unfinished
    launch = wanted[0].launches()[-1]
    assert compiled(launch.kernel, signature_of(launch.args), "sm_90a").name == "here"


def test_another_architecture_has_processes_of_its_own(
    here: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that run were told what they compile for when they began."""

    def told(processes: int, arch: str, *_: int) -> Any:
        return SimpleNamespace(arch=arch, ended=False, close=lambda: None)

    monkeypatch.setattr(parallel_compile, "Compilers", told)
    asked = ["sm_90a", "sm_90a", "sm_80", "sm_90a"]
    running = [parallel_compile._running(2, arch) for arch in asked]
    assert [one.arch for one in running if one] == asked
    assert running[0] is running[1]


def find_kernel(choice: Choice) -> Any:
    return choice.launches()[-1].kernel


@pytest.mark.parametrize(("processes", "kernels"), [("1", 2), ("2", 1)])
def test_one_process_or_one_kernel_is_compiled_here(
    forgotten: Any, here: list[Any], processes: str, kernels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(parallel_compile.VARIABLE, processes)
    assert compile_meanwhile(products([find(1), find(2)][:kernels]), HOPPER) == 0
    assert parallel_compile._compilers is None


def test_a_wrong_number_of_processes_is_one_sentence(
    forgotten: Any, here: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(parallel_compile.VARIABLE, "all")
    with pytest.raises(ValueError, match="LADDER_PROCESSES is 'all': it must be a number"):
        compile_meanwhile(products((find(1), find(2))), HOPPER)


def test_a_forked_process_expects_nothing_from_those_of_its_parent(
    forgotten: Any, here: list[Any]
) -> None:
    assert compile_meanwhile(products((find(1), find(2))), HOPPER)
    assert kernel_cache._expected
    child = os.fork()
    if not child:
        os._exit(bool(kernel_cache._expected) or parallel_compile._compilers is not None)
    assert os.waitpid(child, 0)[1] == 0
