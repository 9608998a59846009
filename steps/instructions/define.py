"""How an instruction is defined: its PTX above, its meaning in NumPy below, one name for both.

    @ptx("dp4a.s32.s32 $0, $1, $2, $3;", returns=int32, takes=(int32, int32, int32))
    def dp4a(a, b, c):
        return c + sum(x * y for x, y in zip(int8s(a), int8s(b)))

In a kernel compiled for the GPU the name stands for the PTX (a Numba intrinsic around LLVM's inline
assembly); in the simulator for the Python function, its *twin*. Memory operands are (array, index)
pairs in both worlds, so that the simulator can check range and alignment; `takes` says `SHARED` or
`GLOBAL` for such a pair.

Operands of the PTX text: results are numbered first ($0, ...), then the operands, one number for an
address; `{}` is literal. Immediates must be in the text: make one instruction per value with a
function around the decorator (`cp_async_wait`).
"""

import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba.cuda import cgutils, types
from numba.cuda.core import targetconfig
from numba.cuda.extending import intrinsic

from steps.simulator.c_types import UNCHANGED, as_dtype, cast_to
from steps.simulator.errors import SimulatorError
from steps.simulator.twins import INSTRUCTIONS, Definition, Twin

_REGISTER = {
    types.int16: "h",
    types.uint16: "h",
    types.int32: "r",
    types.uint32: "r",
    types.int64: "l",
    types.uint64: "l",
    types.float32: "f",
    types.float64: "d",
}  # PTX ISA: the register class letters of inline assembly


@dataclass(frozen=True, slots=True)
class Address:
    """An (array, index) operand: the address of one element, in the given state space."""

    space: str  # "shared": a 32-bit address in the shared window; "global": a 64-bit one

    def check(self, array):
        """The array, if it lies in this space: on the GPU, another one's address means nothing."""
        if array.space != self.space:
            raise SimulatorError(
                f"{array.name} is in {array.space} memory; "
                f"the instruction takes {self.space} memory"
            )
        return array

    def lower(self, context, builder, array_type, array, index):
        """LLVM: the integer address of `array[index]`, the array being taken as flat."""
        pointer = element_pointer(context, builder, array_type, array, index)
        if self.space == "global":  # a generic address of global memory is its global address
            return builder.ptrtoint(pointer, ir.IntType(64))
        shared = builder.addrspacecast(pointer, ir.PointerType(pointer.type.pointee, addrspace=3))
        return builder.ptrtoint(shared, ir.IntType(32))


@dataclass(frozen=True, slots=True)
class Handle:
    """A 64-bit address that only instructions use; in the simulator it is an object of a class."""

    of: type

    def check(self, value):
        """The object, if it is one: on the GPU, any other number means nothing."""
        if not isinstance(value, self.of):
            raise SimulatorError(
                f"the instruction takes the address of a {self.of.__name__}, not {value!r}"
            )
        return value


SHARED = Address("shared")
GLOBAL = Address("global")
UNCHANGED[SHARED.check] = "{value}.space == 'shared'"
UNCHANGED[GLOBAL.check] = "{value}.space == 'global'"


_COLLECTIVE = ("warp", "warpgroup")
_POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD


def ptx(
    text: str,
    *,
    returns=None,
    takes: tuple = (),
    scope: str | None = None,
    memory: bool = False,
    min_cc: tuple[int, int] = (7, 5),
    only: str | None = None,
    optional: bool = False,
) -> Callable:
    """Decorator: make an instruction of this PTX `text` and of the function, its twin.

    returns: a Numba scalar type, a tuple of them (the kernel gets a tuple), or None.
    takes: a Numba scalar type or a Handle per register operand, SHARED or GLOBAL per (array, index)
    pair.
    scope: None, "lane", "warp" or "warpgroup": see `Twin`.
    memory: it reads or writes memory, so LLVM must keep it in order with loads, stores and
    barriers.
    min_cc: the first compute capability that has it; offline compilation for an older one fails
    with a sentence.
    only: the one architecture that has it, such as "sm_90a"; likewise.
    optional: an older one does without: no code is made for it there (and nothing returned).
    """
    results = () if returns is None else returns if isinstance(returns, tuple) else (returns,)
    constraints = ["=" + _REGISTER[t] for t in results]
    constraints += [_register(t) for t in takes]
    if memory:
        constraints.append("~{memory}")
    # Convergent: LLVM must not move or duplicate a warp-wide instruction into divergent control
    # flow.
    ordered = memory or returns is None or scope is not None
    attributes = ("convergent",) if ordered else ()

    def lower(context, builder, signature, arguments):
        if optional and targetconfig.ConfigStack().top().compute_capability[:2] < min_cc:
            return context.get_dummy_value()
        values, position = [], 0
        for operand in takes:
            if isinstance(operand, Address):
                array, index = arguments[position : position + 2]
                values.append(
                    operand.lower(context, builder, signature.args[position], array, index)
                )
                position += 2
            else:
                values.append(arguments[position])
                position += 1
        outputs = [context.get_value_type(t) for t in results]
        kind = (
            ir.VoidType()
            if not outputs
            else outputs[0]
            if len(outputs) == 1
            else ir.LiteralStructType(outputs)
        )
        assembly = ir.InlineAsm(
            ir.FunctionType(kind, [v.type for v in values]),
            text,
            ",".join(constraints),
            side_effect=ordered,
        )
        result = builder.call(assembly, values, attrs=attributes)
        if returns is None:
            return context.get_dummy_value()
        if not isinstance(returns, tuple):
            return result
        parts = (
            [result]
            if len(results) == 1
            else [builder.extract_value(result, i) for i in range(len(results))]
        )
        return pack(context, builder, signature.return_type, parts)

    return_type = _tuple_type(results) if isinstance(returns, tuple) else returns or types.void

    def typing(given):
        wanted, position = [], 0
        for operand in takes:
            if isinstance(operand, Address):
                if not isinstance(given[position], types.Array):
                    return None
                wanted += [given[position], types.int64]
                position += 2
            else:
                wanted.append(types.uint64 if isinstance(operand, Handle) else operand)
                position += 1
        return return_type, wanted

    casts: list = []
    for operand in takes:
        if isinstance(operand, Address):
            casts += [operand.check, index]
        else:
            casts.append(operand.check if isinstance(operand, Handle) else cast_of(operand))

    def decorate(twin: Callable):
        return define(
            twin,
            text,
            scope=scope,
            casts=tuple(casts),
            results=tuple(map(cast_of, results)),
            is_tuple=isinstance(returns, tuple),
            typing=typing,
            lower=lower,
            min_cc=min_cc,
            only=only,
        )

    return decorate


def define(
    twin: Callable,
    text: str,
    *,
    casts: tuple[Callable, ...],
    results: tuple[Callable, ...],
    typing: Callable,
    lower: Callable,
    is_tuple: bool = False,
    scope: str | None = None,
    min_cc: tuple[int, int] = (7, 5),
    only: str | None = None,
):
    """Register an instruction from its twin and its two Numba halves; returns the intrinsic.

    typing: the Numba types of a call -> (return type, argument types), or None where it does not
    fit.
    lower: (context, builder, signature, arguments) -> LLVM value, as Numba's intrinsics have it.
    """
    parameters = list(inspect.signature(twin).parameters.values())
    if scope == "lane":
        parameters = parameters[1:]
    elif scope in _COLLECTIVE:  # the twin sees all lanes at once; a kernel passes one's operands
        parameters = [inspect.Parameter(f"x{i}", _POSITIONAL) for i in range(len(casts))]
    if len(parameters) != len(casts):
        raise TypeError(
            f"the twin of {twin.__name__} takes {len(parameters)} operands, its PTX {len(casts)}"
        )

    def typed(typing_context, *given):
        found = typing(given)
        return None if found is None else (found[0](*found[1]), lower)

    described: Any = typed  # Numba reads name and parameters from the function
    described.__name__ = described.__qualname__ = twin.__name__
    described.__doc__, described.__module__ = twin.__doc__, twin.__module__
    context_parameter = inspect.Parameter("typing_context", _POSITIONAL)
    described.__signature__ = inspect.Signature([context_parameter, *parameters])
    instruction = intrinsic(typed)
    meaning = Twin(twin.__name__, twin, scope, casts, results, is_tuple)
    INSTRUCTIONS[instruction] = Definition(twin.__name__, text, min_cc, only, meaning)
    return instruction


def element_pointer(context, builder, array_type, array, index):
    """LLVM: a byte pointer to element `index` of an array taken as flat (C-contiguous)."""
    data = context.make_array(array_type)(context, builder, value=array).data
    pointer = builder.bitcast(data, ir.IntType(8).as_pointer())
    itemsize = context.get_abi_sizeof(context.get_data_type(array_type.dtype))
    offset = builder.mul(index, ir.Constant(index.type, itemsize))
    return builder.gep(pointer, [offset], inbounds=True)


def pack(context, builder, tuple_type, parts):
    """LLVM: a Numba tuple of the given values."""
    if isinstance(tuple_type, types.UniTuple):
        return cgutils.pack_array(builder, parts)
    return context.make_tuple(builder, tuple_type, parts)


def as_it_is(value):
    """The cast of an operand or result of any type."""
    return value


index = operator.index  # an index is an integer: no silent truncation of a float

UNCHANGED[as_it_is] = "True"
UNCHANGED[index] = "type({value}) is int"


def _tuple_type(parts: tuple):
    uniform = len(set(parts)) == 1
    return types.UniTuple(parts[0], len(parts)) if uniform else types.Tuple(parts)


def cast_of(numba_type) -> Callable:
    """The C cast of a Numba scalar type."""
    return cast_to(as_dtype(numba_type))


def _register(operand) -> str:
    """The register class of an operand of `takes`."""
    if isinstance(operand, Address):
        return "r" if operand.space == "shared" else "l"
    return "l" if isinstance(operand, Handle) else _REGISTER[operand]
