"""Machine code without a GPU or a driver: what a launch does, up to loading the code.

`compile_kernel(kernel, signature, arch)` runs a `@cuda.jit` kernel through Numba, libNVVM (to
LTO-IR) and nvJitLink (to a cubin), with the options of the dispatcher (`max_registers`,
`launch_bounds`, `fastmath` ...). `compiled` asks the cache first (`steps.compile.kernel_cache`), as
launches do. `machine_code` adds what people read: PTX, ptxas's report, nvdisasm's listing.

Numba asks the driver for the device at two places on the way. While a kernel is compiled, and only
then, both are answered with the architecture that was asked for: so a process with a GPU may
compile for another one. Meanwhile `steps.compile.numba_shortcuts` does once what Numba would
repeat.
"""

import gc
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from cuda import pathfinder
from numba.cuda import codegen, dispatcher, types
from numba.cuda.compiler import compile_cuda
from numba.cuda.core import sigutils
from numba.cuda.core.compiler_lock import global_compiler_lock
from numba.cuda.cudadrv import driver
from numba.cuda.dispatcher import CUDADispatcher
from numba.cuda.np.numpy_support import from_dtype
from numba.cuda.typing.typeof import Purpose, typeof

from steps.compile import kernel_cache
from steps.compile.dry_run import Placeholder
from steps.compile.kernel_cache import CompiledKernel
from steps.compile.numba_shortcuts import SHORTCUTS, replaced
from steps.instructions.tensor_map import PARAMETER_WORDS, TensorMap
from steps.simulator.twins import INSTRUCTIONS

OLDEST = (7, 5)  # what libNVVM 13 still compiles for


@dataclass(frozen=True)
class MachineCode:
    """One kernel for one architecture. Stack and spills are per thread, shared memory per block.

    What takes a process or a compilation of its own is made when asked for: `sass`, `instructions`,
    `ptx`.
    """

    name: str
    arch: str
    library: Any  # Numba's, from which `ptx` is made
    cubin: bytes
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int  # static; a launch adds dynamic shared memory
    log: str  # ptxas -v
    line_info: bool = False

    @cached_property
    def sass(self) -> str:
        """nvdisasm's listing."""
        return disassemble(self.cubin, line_info=self.line_info)

    @cached_property
    def instructions(self) -> Counter[str]:
        """ "IDP.4A.S8.S8" -> its count in the listing."""
        return opcodes(self.sass)

    @property
    def ptx(self) -> str:
        """Without link-time optimization: what is loaded is made of LTO-IR."""
        return "\n".join(self.library.get_asm_strs(cc=capability(self.arch)))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Lines in which ptxas complains, such as C7515 (wgmma serialised)."""
        return tuple(
            line.strip()
            for line in self.log.splitlines()
            if re.search(r"\bC7\d{3}\b|warning", line)
        )

    def count(self, *prefixes: str) -> int:
        """The number of opcodes that are one of `prefixes` or extend one: "IDP" counts IDP.4A."""
        return sum(
            n
            for opcode, n in self.instructions.items()
            if any(opcode == p or opcode.startswith(p + ".") for p in prefixes)
        )


def machine_code(
    kernel: CUDADispatcher, signature: Any, arch: str = "sm_90a", *, line_info: bool = False
) -> MachineCode:
    """Compile `kernel` for `arch` and the argument types `signature` (a tuple, or "void(...)").

    line_info: the listing says of which line of the kernel each instruction is (`source_lines`).
    The instructions are the same. What a device function does is of the line that calls it.

    Repeated calls with the same arguments return the same object. Raises ValueError for an unknown
    architecture or where the kernel uses an instruction that the architecture does not have,
    RuntimeError where nvdisasm is not installed.
    """
    if not isinstance(kernel, CUDADispatcher) or kernel.targetoptions.get("device"):
        raise TypeError(f"machine_code takes a @cuda.jit kernel, not {kernel!r}")
    _disassembler()  # before anything is compiled
    argument_types, _ = sigutils.normalize_signature(signature)
    return _machine_code(kernel, tuple(argument_types), arch, line_info)


def compiled(kernel: CUDADispatcher, signature: tuple, arch: str) -> CompiledKernel:
    """The machine code that a launch loads: what the cache has or another process is compiling
    (`steps.compile.parallel_compile`), else compiled now and kept there.

    Raises what the compiler raises.
    """
    kernel_cache.wait_for(kernel, signature, arch)
    found = kernel_cache.find(kernel, signature, arch)
    if found is None and (ask := _before_compiling.get()) is not None:
        ask()
        kernel_cache.wait_for(kernel, signature, arch)
    with global_compiler_lock:
        found = found or kernel_cache.find(kernel, signature, arch)
        if found is None:
            found = compile_kernel(kernel, signature, arch)
            kernel_cache.store(kernel, signature, arch, found)
    return found


_before_compiling: ContextVar[Callable[[], None] | None] = ContextVar("ask", default=None)


@contextmanager
def before_compiling(ask: Callable[[], None]) -> Iterator[None]:
    """While the block runs, ask() is called where `compiled` would compile a kernel; it may let
    other processes compile it, and more."""
    before = _before_compiling.set(ask)
    try:
        yield
    finally:
        _before_compiling.reset(before)


def compile_kernel(kernel: CUDADispatcher, signature: tuple, arch: str) -> CompiledKernel:
    """As `compiled`, past the cache: compiled anew, and not kept."""
    cc = capability(arch)
    with _compiling_for(cc):
        made = dispatcher._Kernel(kernel.py_func, signature, **kernel.targetoptions)
        cubin = made._codelibrary.get_cubin(cc=cc)
    return CompiledKernel(made.entry_name, bytes(cubin.code), made.cooperative)


def fill_tables(arch: str) -> None:
    """Let Numba fill its tables of types and functions, which it does at a process's first
    compilation: half a second."""
    cc = capability(arch)
    with _compiling_for(cc):
        compile_cuda(_nothing, types.void, (types.int64,), cc=cc[:2])


def _nothing(_: int) -> None:
    pass


@lru_cache(maxsize=512)
def _machine_code(
    kernel: CUDADispatcher, argument_types: tuple, arch: str, line_info: bool
) -> MachineCode:
    cc = capability(arch)
    options = kernel.targetoptions | ({"lineinfo": True} if line_info else {})
    with _compiling_for(cc):
        compiled = dispatcher._Kernel(kernel.py_func, argument_types, **options)
        library = compiled._codelibrary
        _refuse_missing(library.get_llvm_str(), kernel.__name__, cc, arch)
        linker = _ReportingLinker(max_registers=library._max_registers, cc=cc, lto=library._lto)
        library._link_all(linker, cc)
        cubin = bytes(linker.complete().code)
    log = linker.info_log or ""
    return MachineCode(
        name=kernel.__name__,
        arch=arch,
        library=library,
        cubin=cubin,
        registers=_reported(r"Used (\d+) registers", log),
        stack_bytes=_reported(r"(\d+) bytes stack frame", log),
        spill_store_bytes=_reported(r"(\d+) bytes spill stores", log),
        spill_load_bytes=_reported(r"(\d+) bytes spill loads", log),
        shared_bytes=_reported(r"(\d+) bytes smem", log),
        log=log,
        line_info=line_info,
    )


def signature_of(args: Sequence) -> tuple:
    """The Numba types a launch with `args` is compiled for; NumPy arrays and placeholders stand for
    device arrays.

    Python ints are int64, Python floats float64 (pass `np.float32(x)`), arrays are typed by dtype,
    rank and layout. A tensor map is a tuple of words; TypeError unless it is the first argument.
    """
    if any(isinstance(value, TensorMap) for value in args[1:]):
        raise TypeError("a tensor map must be the kernel's first argument")
    return tuple(map(_type_of, args))


def _type_of(value):
    if isinstance(value, Placeholder):
        return types.Array(from_dtype(value.dtype), value.ndim, "C")
    if isinstance(value, np.ndarray):
        layout = "C" if value.flags.c_contiguous else "F" if value.flags.f_contiguous else "A"
        return types.Array(from_dtype(value.dtype), value.ndim, layout)
    if isinstance(value, TensorMap):
        return types.UniTuple(types.uint64, PARAMETER_WORDS)
    if isinstance(value, tuple):
        return types.Tuple(tuple(map(_type_of, value)))
    return typeof(value, Purpose.argument)


def capability(arch: str) -> tuple[int, int, str]:
    """(9, 0, "a") from "sm_90a", which is what a launch on compute capability 9.0 compiles for."""
    match = re.fullmatch(r"sm_(\d+)(\d)(a?)", arch)
    if not match or (int(match[1]), int(match[2])) < OLDEST:
        raise ValueError(
            f"the architecture is {arch!r}: it must be sm_75 or a later one, such as sm_90a"
        )
    return int(match[1]), int(match[2]), match[3]


def architecture(cc: tuple[int, int]) -> str:
    """ "sm_90a" of (9, 0): what Numba compiles for on such a GPU."""
    return f"sm_{cc[0]}{cc[1]}" + ("a" if cc >= (9, 0) else "")


def _disassembler() -> str:
    tool = pathfinder.find_nvidia_binary_utility("nvdisasm")
    if tool is None:
        raise RuntimeError("nvdisasm was not found: pip install nvidia-cuda-nvdisasm")
    return tool


def disassemble(cubin: bytes, *, line_info: bool = False) -> str:
    """nvdisasm's listing of a cubin, with its line information if asked."""
    tool = _disassembler()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        # -ndf: no analysis of branches, a quarter of its time; the listing is the same
        call = [tool, "-c", "-ndf", *(["--print-line-info"] if line_info else []), str(file)]
        done = subprocess.run(call, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"nvdisasm failed: {done.stderr.strip()}")
    return done.stdout


def opcodes(sass: str) -> Counter:
    """The opcodes of a listing with their modifiers, predicates left off."""
    return Counter(
        re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", sass, re.MULTILINE)
    )


def source_lines(sass: str) -> list[tuple[int | None, str]]:
    """(line of the kernel's file, instruction) for each instruction of a listing that was made with
    `line_info`, in its order; None where the compiler does not say."""
    found, line = [], None
    for text in sass.splitlines():
        if of_line := re.search(r'//## File ".*", line (\d+)', text):
            line = int(of_line[1])
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", text):
            found.append((line, instruction[1]))
    return found


@contextmanager
def _compiling_for(cc: tuple[int, int, str]) -> Iterator[None]:
    """Answer numba-cuda's two questions about the current device with `cc`, while no other thread
    compiles. Numba makes millions of objects and few circles: looking for circles meanwhile would
    take a fifth of the time."""
    device = SimpleNamespace(id=0, compute_capability=cc[:2])
    answers = (
        (dispatcher, "get_current_device", lambda: device),
        (codegen.CUDACodeLibrary, "_ensure_cc", lambda _, given: given or cc),
    )
    with global_compiler_lock:
        collects = gc.isenabled()
        gc.disable()
        try:
            with replaced(*answers, *SHORTCUTS):
                yield
        finally:
            if collects:
                gc.enable()


class _ReportingLinker(driver._Linker):
    """The linker of a launch, with ptxas asked for its report."""

    def _get_linker_options(self, ptx):
        return replace(super()._get_linker_options(ptx), ptxas_options=["-v"])


def _refuse_missing(llvm: str, kernel: str, cc: tuple, arch: str) -> None:
    """ValueError where the code holds an instruction that the architecture does not have."""
    missing = []
    for instruction in INSTRUCTIONS.values():
        newer = instruction.min_cc > cc[:2] or instruction.only not in (None, arch)
        if newer and instruction.text in llvm:
            needed = instruction.only or "sm_{}{}".format(*instruction.min_cc)
            missing.append((needed, instruction.name))
    if missing:
        needed, name = max(missing)
        raise ValueError(
            f"{kernel} uses {name}, which needs {needed}; it cannot be compiled for {arch}"
        )


def _reported(pattern: str, log: str) -> int:
    match = re.search(pattern, log)
    return int(match[1]) if match else 0
