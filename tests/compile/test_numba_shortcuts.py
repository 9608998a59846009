"""The shortcuts through Numba give the machine code that Numba gives."""

import hashlib
import inspect
from typing import Any, ClassVar

import pytest
from numba import cuda, float32, int64, types
from numba.cuda import dispatcher, utils
from numba.cuda.compiler import CUDAFlags
from numba.cuda.core.targetconfig import ConfigStack
from numba.cuda.dispatcher import CUDADispatcher
from numba.cuda.typing import signature

from steps.compile import compiler, numba_shortcuts
from steps.compile.numba_shortcuts import SHORTCUTS, replaced
from steps.instructions import griddepcontrol_wait, shfl_xor
from tests.compile.cubins import INSTRUCTION_BYTES, text_of

WRITTEN_FOR = {
    "CUDACodeLibrary.llvm_strs": "780385c4e565",
    "CUDACodeLibrary.get_asm_str": "464e51ced2fb",
    "BaseFunction.get_call_type": "6559c167bfc0",
    "CUDADispatcher.compile_device": "d3bf986f8d20",
    "BaseContext.get_abi_sizeof": "d62321a8ccf3",
    "TargetConfig.values": "824f3c925f1c",
    "TargetConfig.__eq__": "6d8774572d07",
    "TargetConfig.__hash__": "4d15a6c75137",
    "PostProcessor.run": "92f6a4793180",
    "Inst._rec_list_vars": "043539bffabc",
}
"""Hashes of the functions that shortcuts replace. After a change of Numba's version: read what
changed, and write the shortcut for it or drop it."""


def of_numba(owner: type, name: str) -> Any:
    found = vars(owner)[name]
    return found.fget if isinstance(found, property) else found


def test_what_they_replace_is_what_they_were_written_for() -> None:
    found = {
        f"{owner.__name__}.{name}": hashlib.sha256(
            inspect.getsource(of_numba(owner, name)).encode()
        ).hexdigest()[:12]
        for owner, name, _ in SHORTCUTS
        if owner is not utils
    }
    assert found == WRITTEN_FOR
    assert utils.pysignature is inspect.signature


def kernel(factor: int = 2) -> CUDADispatcher:
    """New functions each time, as Numba keeps what it compiled of one: loops, branches, tuples,
    arrays, types that differ from call to call, a function called by two others."""

    @cuda.jit(device=True, forceinline=True)
    def scaled(x, y):
        return x * y + x // types.int32(3)

    @cuda.jit(device=True, forceinline=True)
    def pair(x):
        return scaled(x, types.int32(factor)), scaled(x, types.int32(5))

    @cuda.jit(device=True)
    def total(values, n):
        sums = (float32(0), float32(1))
        for i in range(n):
            if values[i] > sums[0] and i & 1:
                sums = (sums[0] + values[i], sums[1] * values[i])
            elif not i % 7:
                continue
        return sums[0] - sums[1]

    @cuda.jit
    def all_of_it(values, out):
        tile = cuda.shared.array((4, 33), float32)
        thread = types.int32(cuda.threadIdx.x)
        a, b = pair(thread)
        tile[a & 3, b & 31] = total(values, thread) + float32(scaled(int64(thread), int64(2)))
        cuda.syncthreads()
        out[thread] = shfl_xor(tile[thread & 3, thread & 31], 1)

    return all_of_it


SIGNATURE = (float32[::1], float32[::1])


def test_the_machine_code_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    short = [compiler.compile_kernel(kernel(), SIGNATURE, "sm_90a") for _ in range(2)]
    monkeypatch.setattr(compiler, "SHORTCUTS", ())  # nothing that was compiled before is shared
    long = compiler.compile_kernel(kernel(), SIGNATURE, "sm_90a")
    first, second, third = (text_of(code.cubin) for code in (*short, long))
    assert first == second == third
    assert len(first) > 100 * INSTRUCTION_BYTES


def test_a_second_kernel_does_not_type_equal_functions_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    typed: list[str] = []
    compile_cuda = dispatcher.compile_cuda

    def noted(function: Any, *rest: Any, **options: Any) -> Any:
        typed.append(function.__name__)
        return compile_cuda(function, *rest, **options)

    monkeypatch.setattr(dispatcher, "compile_cuda", noted)
    monkeypatch.setattr(numba_shortcuts, "_compiled", {})

    def machine_code(factor: int, arch: str = "sm_90a") -> bytes:
        typed.clear()
        return text_of(compiler.compile_kernel(kernel(factor), SIGNATURE, arch).cubin)

    first = machine_code(2)
    assert sorted(typed) == ["all_of_it", "pair", "scaled", "scaled", "total"]
    assert machine_code(2) == first
    assert typed == ["all_of_it"], "new functions, equal to those before"
    assert machine_code(3) != first
    assert sorted(typed) == ["all_of_it", "pair"], "what captures something else, and who calls it"
    machine_code(2, "sm_80")
    assert sorted(typed) == ["all_of_it", "pair", "scaled", "scaled", "total"]


def test_each_architecture_has_device_functions_of_its_own() -> None:
    """One kernel, whose device function is compiled for sm_90a and then for sm_80, which has not
    the instruction. `overloads` of a function has no architecture."""

    @cuda.jit(device=True)
    def waits(x):
        griddepcontrol_wait()
        return x * x

    @cuda.jit
    def square(out):
        out[0] = waits(out[0])

    def machine_code(arch: str) -> tuple[bytes, int]:
        found = compiler.machine_code(square, (float32[::1],), arch)
        return text_of(found.cubin), found.count("ACQBULK")

    newer, older = machine_code("sm_90a"), machine_code("sm_80")
    assert (newer[1], older[1]) == (1, 0)
    again = compiler.compile_kernel(square, (float32[::1],), "sm_90a")
    assert text_of(again.cubin) == newer[0]


def test_a_call_is_remembered_by_its_types_and_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Function:
        """Each time it is asked, its implementation is another."""

        _impl_keys: ClassVar[dict] = {}

        def get_impl_key(self, signature):
            return self._impl_keys[signature.args]

    def ask(function, context, args, kws):
        asked.append(args)
        function._impl_keys[args] = len(asked)
        return signature(args[0], *args)

    monkeypatch.setattr(numba_shortcuts, "_get_call_type", ask)
    function, context = Function(), object()

    def implementation(args, kws, **flags):
        with ConfigStack().enter(CUDAFlags()) as _, replaced(*SHORTCUTS):
            for name, value in flags.items():
                setattr(ConfigStack().top(), name, value)
            found = numba_shortcuts._typed_before(function, context, args, kws)
        return function.get_impl_key(found)

    one, other = (types.int32, types.int32), (types.int32, types.int64)
    assert implementation(one, {}) == implementation(one, {}) == 1
    assert implementation(other, {}) == 2
    assert implementation(one, {}, fastmath=True) == 3
    assert implementation(one, {}) == 1, "as before the one of other flags"
    assert implementation(one, {}, fastmath=True) == 3
    assert implementation(one, {"k": types.int32}) == 4, "by name: asked each time"
    assert len(asked) == 4
