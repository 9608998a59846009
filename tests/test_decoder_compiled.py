"""Kernels that another process compiled: the same machine code, and nothing compiled here."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from numba import cuda

from qformats import FORMATS, quantize
from qformats.device import half_rounder
from reference import Problem
from results.decoder import compiled as ahead
from steps import find, launcher
from steps.instructions.compile import _pretending_to_be, signature_of
from steps.machines import Simulator
from steps.relocatable import Relocatable
from steps.step import Launch, Shape

CC = (9, 0, "a")


def step_one() -> Launch:
    """A launch of step 1, small and of a kernel that nobody has compiled yet."""
    problem, step, machine = Problem(2, 5, 64, "q4_0"), find(1), Simulator()
    weights = tuple(map(machine.array, step.pack(problem.blocks)))
    out = machine.empty((2, 5), "float32")
    given = step.activations("A16", machine.array(problem.a), machine)
    shape = Shape(2, 5, 64)
    made = step.prepare(machine, FORMATS["q4_0"], "A16", shape, weights, given.arrays, out)
    kernel = cuda.jit(**made.kernel.targetoptions)(made.kernel.py_func)
    return Launch(kernel, made.grid, made.block, made.args)


def compile_without_a_gpu(kernel: Any, signature: Any) -> Any:
    """What `kernel.compile` does, but that nothing is loaded."""
    from numba.cuda.dispatcher import _Kernel

    with _pretending_to_be(CC):
        made = _Kernel(kernel.py_func, signature, **kernel.targetoptions)
        made._codelibrary.get_cubin(CC)
    kernel.add_overload(made, signature)
    return made


def test_what_was_compiled_elsewhere_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = step_one(), step_one()
    signature = signature_of(first.args)
    made = compile_without_a_gpu(first.kernel, signature)
    data = ahead.stored(first.kernel, signature)
    assert not second.kernel.overloads
    monkeypatch.setattr(launcher, "load", lambda source: source.kernel.compile(signature))
    with ahead.offered([data]):
        found = launcher.load(second)
    assert found is second.kernel.overloads[signature]
    assert found._codelibrary.get_cubin(CC).code == made._codelibrary.get_cubin(CC).code
    assert (found.entry_name, found.cooperative) == (made.entry_name, made.cooperative)
    ahead.offer(second.kernel, signature, data)
    assert second.kernel.overloads[signature] is found, "what is there stays"


@pytest.mark.gpu
def test_processes_compile_what_a_plan_loads() -> None:
    shape, step = Shape(40, 68, 288), find(12)
    for factory in (sys.modules[step.launch.__module__].kernel, half_rounder):
        factory.cache_clear()  # what other tests have compiled
    packed = step.pack(quantize(Problem(1, 68, 288, "q4_0").w, "q4_0"))
    places = {step.pack.__name__: tuple((one.shape, str(one.dtype)) for one in packed)}
    from steps.machines import Gpu

    tasks = [("q4_0", shape, places, "exact", half) for half in (False, True)]
    for (*given, half), kernels in zip(tasks, ahead.compiled(tasks, 2), strict=True):
        with ahead.offered(kernels):
            made = Relocatable(*given[:3], Gpu(), given[3], half)
        assert len(made.loaded) == len(kernels)
        for one in made.loaded:
            found = one.source.kernel.overloads[signature_of(one.source.args)]
            assert found._type_annotation is None, "it was not compiled here"
