"""Kernels compiled by other processes: those that a run launches, the same code, and no excuse."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qformats import FORMATS, WEIGHT_FORMATS, quantize
from reference import BENCH_SHAPES, Problem
from steps import contract
from steps.api import dry_run, relocatable
from steps.api import parallel_compile as ahead
from steps.api.machines import Gpu
from steps.api.compile import disassemble, machine_code, opcodes, signature_of
from steps.api.parallel_compile import architecture, compile_ahead
from steps.api.relocatable import Relocatable
from steps.checks.cases import Case
from steps.checks.select import select
from steps.cli import bench as matrix
from steps.cli import run
from steps.components.activations.rows import half_rounder
from steps.contract import Shape, Work
from steps.registry import find, ladder
from tests.api.fake_gpu import FakeGpu
from tests.results.test_bench import asked, on_a_gpu  # noqa: F401

HOPPER = SimpleNamespace(cc=(9, 0))
SIZE = (1, 64, 256)


@pytest.fixture
def forgotten() -> Any:
    """Kernels by name, as nobody has compiled them before or will have after."""
    kernels: dict[str, Any] = {}
    for work in select((find(1), find(2)), ["q4_0"]):
        for launch, _ in ahead._launches(work, SIZE, "float32"):
            kernels[launch.kernel.__name__] = launch.kernel
    before = {name: dict(kernel.overloads) for name, kernel in kernels.items()}
    for kernel in kernels.values():
        kernel.overloads.clear()
    yield kernels
    for name, kernel in kernels.items():
        kernel.overloads.clear()
        kernel.overloads.update(before[name])


def test_another_processs_kernel_is_the_one_that_would_be_compiled_here(
    forgotten: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "FEWEST", 3)
    monkeypatch.setattr(ahead.os, "sched_getaffinity", lambda _: {0, 1})
    works = select((find(1), find(2)), ["q4_0"])
    said: list[str] = []
    assert compile_ahead([(w, SIZE, "float32") for w in works], HOPPER, said.append) == 3
    assert said == []
    for work in works:
        before, own = dry_run.launches(work, SIZE)
        for launch in (*before, own):
            signature = signature_of(launch.args)
            made = launch.kernel.overloads[signature]
            assert launch.kernel.compile(signature) is made, "nothing is compiled again"
            cubin = made._codelibrary.get_cubin(cc=(9, 0, "a")).code
            here = machine_code(launch.kernel, signature, "sm_90a")
            assert opcodes(disassemble(bytes(cubin))) == here.instructions
    assert compile_ahead([(w, SIZE, "float32") for w in works], HOPPER, said.append) == 0


@pytest.mark.gpu
def test_a_plan_finds_what_other_processes_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "FEWEST", 1)
    gpu, size, step = Gpu(), (40, 68, 288), find(12)
    for factory in (sys.modules[step.launch.__module__].kernel, half_rounder):
        factory.cache_clear()  # what other tests have compiled
    packed = step.pack(quantize(Problem(*size, "q4_0").w, "q4_0"))
    places = {step.pack.__name__: tuple((one.shape, str(one.dtype)) for one in packed)}
    # this step, whatever the table of this GPU has to say of so small a product
    monkeypatch.setattr(relocatable, "ladder", lambda: (step,))
    wanted = [(Work(step, "A16", "q4_0"), size, output) for output in step.outputs]
    assert compile_ahead(wanted, gpu, print, 2) == 3
    for half in (False, True):
        made = Relocatable("q4_0", Shape(*size), places, gpu, half=half)
        assert made.choice.step is step
        for one in made.loaded:
            found = one.source.kernel.overloads[signature_of(one.source.args)]
            assert found._type_annotation is None, "it was not compiled here"


def test_what_another_process_cannot_compile_is_said(
    forgotten: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "FEWEST", 1)
    monkeypatch.setattr(ahead.os, "sched_getaffinity", lambda _: {0, 1})
    unknown = Work(replace(find(2), number=99), "A8", "q4_0")
    said: list[str] = []
    assert compile_ahead([(unknown, SIZE, "float32")], HOPPER, said.append) == 0
    (sentence,) = said
    assert sentence.startswith("2 kernels were not compiled ahead: ValueError: there is no step 99")
    assert not any(kernel.overloads for kernel in forgotten.values())


@pytest.mark.parametrize(("fewest", "cores"), [(4, 2), (1, 1)])
def test_few_kernels_or_one_core_are_no_reason_to_start_processes(
    forgotten: Any, fewest: int, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "FEWEST", fewest)
    monkeypatch.setattr(ahead.os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(ahead, "ProcessPoolExecutor", None)
    works = select((find(1), find(2)), ["q4_0"])
    assert compile_ahead([(w, SIZE, "float32") for w in works], HOPPER, print) == 0


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_small_weights_lead_to_the_kernels_of_large_ones(name: str) -> None:
    """Launches are made with few weights here; nothing but their types may be read of them."""
    for work in select(ladder(), [name]):
        for size in ((1, 1056, 4128), (300, 1056, 4128)):
            before, own = dry_run.launches(work, size)
            wanted = [(one.kernel, signature_of(one.args)) for one in (*before, own)]
            found = [(o.kernel, s) for o, s in ahead._launches(work, size, "float32")]
            assert found == wanted


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_they_are_compiled_for_the_types_that_a_gpu_has(name: str) -> None:
    fmt = FORMATS[name]
    for work in select(ladder(), [name]):
        gpu, step = FakeGpu(), work.step
        weights = tuple(gpu.array(array) for array in dry_run._packed(step.pack, name))
        for output in step.outputs:
            activations = step.activations(work.family, gpu.empty((1, 256), np.float32), gpu)
            own = step.prepare(
                gpu, fmt, work.family, Shape(*SIZE), weights, activations.arrays,
                gpu.empty((1, 64), np.dtype(output)),
            )  # fmt: skip
            wanted = [(one.kernel, signature_of(one.args)) for one in (*activations.launches, own)]
            assert [(o.kernel, s) for o, s in ahead._launches(work, SIZE, output)] == wanted


def test_what_a_gpu_cannot_run_is_not_compiled_for_it() -> None:
    works = select((find(12),), ["q4_0"])
    wanted = [(works[0], (512, 4096, 4096), "float32")]
    assert len(ahead._kernels(wanted, (9, 0))) == 2
    assert ahead._kernels(wanted, (8, 0)) == {}
    assert [architecture(cc) for cc in ((7, 5), (8, 9), (9, 0))] == ["sm_75", "sm_89", "sm_90a"]


def test_each_kernel_is_compiled_once() -> None:
    works = select((find(1), find(2), find(3)), ["q4_0"])
    wanted = [(work, size, "float32") for work in works for size in BENCH_SHAPES]
    found = ahead._kernels(wanted, (9, 0))
    assert len(found) == 5, "of three steps, one of them of two families, and one pass"
    assert len({kernel for kernel, _ in found}) == 5


def test_a_process_is_told_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "_pretended", None)
    monkeypatch.setattr(ahead, "_arch", "")
    monkeypatch.setattr(ahead.signal, "signal", lambda *_: None)
    before = contract.multiprocessors(), contract.shared_memory()
    try:
        ahead._begin("sm_80", 108, 163 * 1024)
        assert (contract.multiprocessors(), contract.shared_memory()) == (108, 163 * 1024)
    finally:
        contract._pretended = None
        contract.multiprocessors.cache_clear()
        contract.shared_memory.cache_clear()
    assert (contract.multiprocessors(), contract.shared_memory()) == before


@pytest.mark.usefixtures("on_a_gpu")
def test_a_run_has_all_that_it_launches_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(run, "compile_ahead", lambda wanted, gpu, say: seen.extend(wanted))
    monkeypatch.setattr(run, "cases", lambda *_, **__: (Case((3, 2, 32), "normal"),))
    assert run.run(asked()) == 0
    assert {(w.step.number, size, output) for w, size, output in seen} == {
        (number, size, "float32") for number in (1, 4, 5) for size in ((3, 2, 32), (2, 8, 32))
    }


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("duels", [True, False])
def test_a_bench_has_the_kernels_of_its_duels_compiled_too(
    duels: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Seen(Exception):
        pass

    def noted(wanted: Any, gpu: Any, say: Any) -> None:
        raise Seen({output for _, size, output in wanted if size == (512, 64, 128)})

    monkeypatch.setattr(run, "compile_ahead", noted)
    args = asked(command="bench", steps=["12"], m=512, n=64, k=128, out=tmp_path / "run.json")
    args.seconds, args.no_peers, args.no_duels = None, False, not duels
    with pytest.raises(Seen) as seen:
        matrix.bench(args)
    assert seen.value.args[0] == ({"float32", "float16"} if duels else {"float32"})
