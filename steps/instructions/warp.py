"""Shuffles: a value from another lane of the warp, through registers (PTX ISA 9.7.9.6, shfl.sync).

The full warp takes part. The value is int32, uint32 or float32 and keeps its type; an int64, which
is what Numba makes of most integer arithmetic, is refused: write `int32(x)` or `uint32(x)`.
"""

import numpy as np
from llvmlite import ir
from numba.cuda.core.errors import TypingError
from numba.cuda.types import float32, int32, uint32

from steps.instructions.define import as_it_is, define, ptx
from steps.simulator.c_types import UNCHANGED, cast_to
from steps.simulator.cuda import exchange
from steps.simulator.errors import SimulatorError

_LETTER = {int32: "r", uint32: "r", float32: "f"}
_INT32 = cast_to(np.dtype(np.int32))


def _value(x):
    """The operand, checked; whether it is int32 or uint32 a Python int does not know."""
    if isinstance(x, (float, np.floating)):
        return np.float32(x)
    if not -(1 << 31) <= x < 1 << 32:
        raise SimulatorError(f"a shuffle moves 32 bits and the value is {x}")
    return int(x)


UNCHANGED[_value] = f"type({{value}}) is int and {-(1 << 31)} <= {{value}} < {1 << 32}"


def _shuffle(name: str, mode: str, clamp: int, source_of, doc: str):
    text = f"shfl.sync.{mode}.b32 $0, $1, $2, {clamp:#x}, 0xffffffff;"

    def twin(lanes):
        return exchange(name, source_of, [(i, *operands) for i, operands in enumerate(lanes)])

    def typing(given):
        if given[0] not in _LETTER:
            raise TypingError(
                f"{name} takes an int32, uint32 or float32, not {given[0]}; write int32(x)"
            )
        return given[0], (given[0], int32)

    def lower(context, builder, signature, arguments):
        letter = _LETTER[signature.return_type]
        kind = arguments[0].type
        function = ir.FunctionType(kind, [kind, ir.IntType(32)])
        assembly = ir.InlineAsm(function, text, f"={letter},{letter},r", side_effect=True)
        return builder.call(assembly, arguments, attrs=("convergent",))

    twin.__name__, twin.__doc__ = name, doc
    return define(
        twin,
        text,
        scope="warp",
        casts=(_value, _INT32),
        results=(as_it_is,),
        typing=typing,
        lower=lower,
    )


shfl = _shuffle(
    "shfl", "idx", 0x1F, lambda lane, x: x % 32, "(value, lane): the value of lane `lane` % 32."
)
shfl_xor = _shuffle(
    "shfl_xor",
    "bfly",
    0x1F,
    lambda lane, x: lane ^ x,
    "(value, mask): the value of lane `lane ^ mask`: the butterfly of a reduction. SHFL.BFLY.",
)
shfl_up = _shuffle(
    "shfl_up",
    "up",
    0x00,
    lambda lane, x: lane - x,
    "(value, delta): the value of lane `lane - delta`; the first `delta` lanes keep their own.",
)


@ptx("mov.u32 $0, %tid.x;", returns=int32, scope="lane", memory=True)
def thread_index(lane):
    """`cuda.threadIdx.x`, read anew: the compiler keeps no register for it from one use to the
    next. S2R."""
    return lane.index


@ptx(
    "{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 $0, 1, 0, p;}",
    returns=uint32,
    takes=(),
    scope="warp",
    memory=True,
    min_cc=(9, 0),
)
def elect_one(lanes):
    """1 in one lane of the warp, 0 in the others. What that lane alone does the compiler knows to
    be done by one lane, as it does not of `lane == 0`: copies take their operands from uniform
    registers. ELECT."""
    return [1] + [0] * (len(lanes) - 1)
