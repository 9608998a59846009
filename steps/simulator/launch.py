"""Run a kernel on the CPU, one lane at a time, and find the faults that a GPU leaves to chance.

`simulate` takes the same `@cuda.jit` kernel that a GPU runs. It rebuilds the Python functions
behind it with other globals and closures: `cuda` becomes a simulated module, device functions their
rebuilt selves, instructions their NumPy twins, Numba types C casts. Nothing is patched, so one
process simulates, compiles and launches. It simulates one kernel at a time: threads wait for each
other.

What it checks: indices (negative ones too), alignment, barriers that not all threads reach,
deadlocks, shared and local memory read before it is written (it begins as garbage), arrivals, bytes
and parities of mbarriers, accumulators of `wgmma` touched before the wait. And races: two accesses
to one place, one of them a store, that no barrier, fence or wait orders, in whatever order the
lanes run here (`steps.simulator.ordering`); asynchronous copies, `wgmma` and the launches before
this one take part in them.

It counts bank conflicts for a `BankCounter` (`steps.simulator.banks`), and records what a warp does
to memory for a `Recorder` (`steps.simulator.trace`).

It does not model speed, FMA contraction, or the types Numba infers between two casts. There
float32 * 0.1 is float64 and int64 + uint64 is float64 too, which the tests of machine code look
for; and uint32 - uint32 is a huge uint64 where it would be negative, so compare and shift such a
difference only after `int32(...)` or `uint32(...)`.
"""

import builtins
import inspect
import math
import os
import types as python_types
from collections.abc import Callable, Hashable, Sequence
from functools import partial

import numpy as np
from numba import cuda
from numba.cuda import types
from numba.cuda.dispatcher import CUDADispatcher

from steps.simulator.arrays import CheckedArray
from steps.simulator.banks import Gatherer
from steps.simulator.c_types import as_dtype, cast_to
from steps.simulator.calls import call_of
from steps.simulator.cuda import CUDA
from steps.simulator.errors import (
    BarrierDivergence,
    Deadlock,
    Misaligned,
    OutOfRange,
    Race,
    SimulatorError,
)
from steps.simulator.lanes import WARP, Dim3, kernel_codes
from steps.simulator.scheduler import Schedule
from steps.simulator.stream import Stream
from steps.simulator.trace import Recorder
from steps.simulator.tracked import GlobalArray
from steps.simulator.twins import ARGUMENTS, INSTRUCTIONS

__all__ = [
    "BarrierDivergence",
    "Deadlock",
    "Misaligned",
    "OutOfRange",
    "Race",
    "SimulatorError",
    "simulate",
]

_MAX_THREADS = 1024  # of a block, on every GPU so far


def simulate(
    kernel: CUDADispatcher,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    args: Sequence,
    *,
    order: int = 0,
    shared_bytes: int = 0,
    resident: int = 1,
    banks: Gatherer | None = None,
    trace: Recorder | None = None,
    stream: Stream | None = None,
    overlap: bool = False,
) -> None:
    """Run `kernel[grid, block, 0, shared_bytes](*args)` on the CPU, writing NumPy arrays in place.

    order: 0 runs lanes in ascending order, -1 in descending order, any other number in an order
        shuffled by that seed (blocks too). A kernel is right only if all orders agree; a missing
        barrier shows up in at least one of them.
    resident: how many blocks are in flight together; more than 1 only matters to kernels whose
    blocks wait for each other.
    banks: counts what the kernel's accesses cost in shared memory (`steps.simulator.banks`), and
        does not look for races there.
    trace: records the accesses of warps of a block (`steps.simulator.trace`), does not look for
        races, and runs that block alone.
    stream: the launches before this one; `overlap`: it may begin while they still run.

    Barriers are judged strictly: a `syncthreads` that some threads of the block will not reach,
    because they have exited or wait elsewhere, is BarrierDivergence. Hardware since Volta lets
    threads, and so whole warps, that have exited count as arrived; relying on it makes a kernel
    fragile, and a thread that leaves too early is the commonest barrier bug. Warp-wide instructions
    need all 32 lanes (all that exist, in a partial last warp), or all of their mask, at one place
    in the source.

    Raises SimulatorError or one of its subclasses; the message names block, thread and source line.
    """
    if not isinstance(kernel, CUDADispatcher) or kernel.targetoptions.get("device"):
        raise TypeError(f"simulate takes a @cuda.jit kernel, not {kernel!r}")
    grid_dim, block_dim = _dim3("grid", grid), _dim3("block", block)
    threads = block_dim.x * block_dim.y * block_dim.z
    if threads > _MAX_THREADS:
        raise ValueError(
            f"a block of {block_dim} has {threads} threads; the limit is {_MAX_THREADS}"
        )
    names = list(inspect.signature(kernel.py_func).parameters)
    if len(names) != len(args):
        raise TypeError(
            f"{kernel.__name__} takes {len(names)} arguments ({', '.join(names)}), got {len(args)}"
        )
    seen: Callable = GlobalArray if trace is None else partial(trace.array, space="global")
    arguments = tuple(_argument(a, name, seen) for a, name in zip(args, names, strict=True))
    arrays = _arrays(arguments)
    stored = {_memory_of(array.data): array for array in arrays}  # a kernel may store what it maps
    mapped = {}
    for argument, name in zip(arguments, names, strict=True):
        if type(argument) in ARGUMENTS:
            seen_too = stored.get(_memory_of(argument.array))
            mapped[id(argument)] = seen_too or GlobalArray(argument.array, name)
    watched = list({id(array): array for array in (*arrays, *mapped.values())}.values())
    with Schedule.turn:
        if stream is not None:
            stream.begin(overlap)
            for array in watched:
                if in_use := stream.in_use(array.data):
                    array.guard(in_use)
        function = _rebuilt(kernel.py_func)
        if trace is None:
            schedule = Schedule(function, arguments, mapped, grid_dim, block_dim, order, banks)
            schedule.run(shared_bytes, resident)
        else:
            _require_there(trace, grid_dim, threads)
            schedule = Schedule(function, arguments, mapped, grid_dim, block_dim, order, trace)
            schedule.run(shared_bytes, resident, trace.block)
        if stream is not None:
            stream.ended(kernel.__name__, [(array.data, array.stored) for array in watched])


def _arrays(arguments: tuple) -> list[GlobalArray]:
    """The arrays among the arguments, those within tuples too."""
    found: list[GlobalArray] = []
    for argument in arguments:
        if isinstance(argument, GlobalArray):
            found.append(argument)
        elif isinstance(argument, tuple):
            found += _arrays(argument)
    return found


def _memory_of(array: np.ndarray) -> tuple[int, int]:
    """Where an array begins, and its bytes."""
    return array.__array_interface__["data"][0], array.nbytes


def _require_there(trace: Recorder, grid: Dim3, threads: int) -> None:
    """ValueError unless the launch has the block and the warps that are to be recorded."""
    if any(not 0 <= at < extent for at, extent in zip(trace.block, grid, strict=True)):
        raise ValueError(f"block {trace.block} is not in a grid of {grid}: it counts from 0")
    warps = -(-threads // WARP)
    for warp in trace.warps or ():
        if not 0 <= warp < warps:
            raise ValueError(f"a block of {threads} threads has warps 0 to {warps - 1}, no {warp}")


def _dim3(what: str, extent) -> Dim3:
    parts = (extent,) if isinstance(extent, int | np.integer) else tuple(extent)
    if not 1 <= len(parts) <= 3 or any(int(p) < 1 for p in parts):
        raise ValueError(f"{what} is {extent}; it takes one to three extents of at least 1")
    return Dim3(*(int(p) for p in parts))


def _argument(value, name: str, array: Callable):
    """A kernel argument as the kernel sees it; `array` makes what it sees of an array."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biuf":
            raise TypeError(
                f"argument {name} has elements of {value.dtype}; a kernel takes integers, floats "
                "and bool here, and of records their bytes: .view(np.uint8)"
            )
        return array(value, name)
    if isinstance(value, tuple):
        return tuple(_argument(v, f"{name}[{i}]", array) for i, v in enumerate(value))
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        return value
    if type(value) in ARGUMENTS:
        return ARGUMENTS[type(value)](value)
    raise TypeError(
        f"argument {name} is a {type(value).__name__}; the simulator takes NumPy arrays and scalars"
    )


# --- rebuilding


_REBUILT: dict[Callable, Callable] = {}
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_REBUILT.clear)  # another thread may have been at it


def _rebuilt(function: Callable) -> Callable:
    """The function with everything it refers to replaced by what it means here; kept."""
    if function in _REBUILT:
        return _REBUILT[function]
    # A code object of its own: shared arrays are told apart by the code that declares them, and two
    # functions made by one factory share theirs.
    code = function.__code__.replace()
    kernel_codes[id(code)] = code
    names: dict = {"__builtins__": builtins}
    cells = tuple(python_types.CellType() for _ in code.co_freevars)
    rebuilt = python_types.FunctionType(
        code, names, function.__name__, function.__defaults__, cells
    )
    rebuilt.__kwdefaults__ = function.__kwdefaults__
    _REBUILT[function] = rebuilt  # before looking inside, so that recursion ends
    names |= {
        n: substitute(function.__globals__[n])
        for n in _global_names(code)
        if n in function.__globals__
    }
    for cell, original in zip(cells, function.__closure__ or (), strict=True):
        cell.cell_contents = substitute(original.cell_contents)
    return rebuilt


def _global_names(code: python_types.CodeType) -> set[str]:
    """All names the code and functions inside it may look up as globals (and attributes, too)."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, python_types.CodeType):
            names |= _global_names(constant)
    return names


def substitute(value):
    """What a global or closure variable of a kernel means in the simulator."""
    if value is cuda:
        return CUDA
    if value is math:
        return _Math()
    if isinstance(value, python_types.ModuleType):
        return _Module(value)
    if isinstance(value, CUDADispatcher):
        if value.targetoptions.get("device"):
            return _rebuilt(value.py_func)
        return _refuse(
            f"{value.__name__} is a kernel; a kernel calls device functions (device=True) only"
        )
    if isinstance(value, Hashable) and value in INSTRUCTIONS:
        return call_of(INSTRUCTIONS[value].twin)
    if isinstance(value, types.Number | types.Boolean) or (
        isinstance(value, type) and issubclass(value, np.generic)
    ):
        dtype = as_dtype(value)
        return cast_to(dtype) if dtype.kind in "biuf" else value
    if isinstance(value, np.ndarray):  # Numba freezes it into the constants of the kernel
        frozen = value.copy()
        frozen.flags.writeable = False
        return CheckedArray(frozen, "constant array", "constant")
    if type(value) is tuple:
        return tuple(map(substitute, value))
    return value


class _Module:
    """A module whose attributes are substituted when a kernel reads them."""

    def __init__(self, module: python_types.ModuleType):
        self.__dict__["_module"] = module

    def __getattr__(self, name: str):
        value = self.__dict__[name] = substitute(getattr(self._module, name))
        return value


class _Math(_Module):
    """`math`, giving float32 for float32 operands as Numba does."""

    def __init__(self):
        super().__init__(math)

    def __getattr__(self, name: str):
        original = getattr(math, name)
        if not callable(original):
            return original

        def narrowed(*operands):
            try:
                result = original(*operands)
            except (ValueError, OverflowError):  # the GPU has no exceptions here
                result = math.nan
            single = isinstance(result, float) and all(isinstance(x, np.float32) for x in operands)
            return np.float32(result) if single else result

        self.__dict__[name] = narrowed
        return narrowed


def _refuse(sentence: str) -> Callable:
    def called(*operands):
        raise SimulatorError(sentence)

    return called
