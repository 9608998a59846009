"""Loads and stores of 2 to 16 bytes of any array in one access, and the address they would use.

Operands are (array, index); `index` counts elements of the array, which is taken as flat. The
address must be a multiple of the size of the access: the GPU faults otherwise (CUDA error 716), a
CPU would not notice, the simulator raises `Misaligned`. A shared array gives that promise when
declared with `cuda.shared.array(..., alignment=16)`; one from the device allocator begins at a
multiple of 256.

They are LLVM loads and stores of vectors, not inline PTX, because LLVM can then see through them:
it infers global or shared memory, folds constant offsets into the address, merges and moves them.
In SASS: LDG.E.128, LDS.128, STS.128 and so on.

Programmatic dependent launch (PTX ISA 9.7.13.13, griddepcontrol) says when memory that the kernel
before wrote may be read. With `Launch.overlap` a kernel's blocks may become resident once every
block of the kernel before it in the stream has called `griddepcontrol_launch_dependents` or ended,
and there is room for them. What that kernel writes may be read only after `griddepcontrol_wait`,
which returns when all of it is done and visible. Everything else, such as loads of weights, may
come before. Without `Launch.overlap` both instructions do nothing. GPUs before compute capability
9.0 lack them, and no code is generated there. In the simulator a launch begins when the one before
it has ended, but what that one stored may not be read before the wait, and what it used may not be
overwritten: see `steps.simulator.stream`.
"""

import struct
from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.types import float32, uint16, uint32, uint64

from steps.instructions.define import (
    GLOBAL,
    as_it_is,
    cast_of,
    define,
    element_pointer,
    index,
    pack,
    ptx,
)
from steps.simulator.errors import SimulatorError

_CODE = {uint16: "H", uint32: "I", float32: "f"}  # letters of the struct module


def _vector(context, element, count: int):
    kind = context.get_value_type(element)
    return kind if count == 1 else ir.VectorType(kind, count)


def _load(name: str, element, count: int, doc: str):
    """An instruction (array, index) -> `count` values of type `element`, read in one access."""
    layout = struct.Struct(f"<{count}{_CODE[element]}")
    size = layout.size
    returns = element if count == 1 else types.UniTuple(element, count)

    def twin(array, index):
        values = layout.unpack_from(array.bytes, array.locate(index, size))
        return values if count > 1 else values[0]

    def typing(given):
        fits = isinstance(given[0], types.Array)
        return (returns, (given[0], types.int64)) if fits else None

    def lower(context, builder, signature, arguments):
        pointer = element_pointer(context, builder, signature.args[0], *arguments)
        kind = _vector(context, element, count)
        value = builder.load(builder.bitcast(pointer, kind.as_pointer()), align=size)
        if count == 1:
            return value
        places = [ir.Constant(ir.IntType(32), i) for i in range(count)]
        parts = [builder.extract_element(value, i) for i in places]
        return pack(context, builder, signature.return_type, parts)

    twin.__name__, twin.__doc__ = name, doc
    return define(
        twin,
        f"ld.v{count}.b{8 * size // count}",
        casts=(as_it_is, index),
        results=(cast_of(element),) * count,
        is_tuple=count > 1,
        typing=typing,
        lower=lower,
    )


def _store(name: str, element, count: int, doc: str):
    """An instruction (array, index, value, ...) -> None: `count` values written in one access."""
    layout = struct.Struct(f"<{count}{_CODE[element]}")
    size = layout.size

    def write(array, index, *values):
        array.store(index, layout.pack(*values))

    twin: Any = {  # with parameters by name, which Numba takes from the twin
        1: lambda array, index, x0: write(array, index, x0),
        2: lambda array, index, x0, x1: write(array, index, x0, x1),
        4: lambda array, index, x0, x1, x2, x3: write(array, index, x0, x1, x2, x3),
    }[count]

    def typing(given):
        fits = isinstance(given[0], types.Array)
        return (types.void, (given[0], types.int64, *[element] * count)) if fits else None

    def lower(context, builder, signature, arguments):
        array, index, *values = arguments
        pointer = element_pointer(context, builder, signature.args[0], array, index)
        kind = _vector(context, element, count)
        value = values[0]
        if count > 1:
            value = ir.Constant(kind, ir.Undefined)
            for i, part in enumerate(values):
                value = builder.insert_element(value, part, ir.Constant(ir.IntType(32), i))
        builder.store(value, builder.bitcast(pointer, kind.as_pointer()), align=size)
        return context.get_dummy_value()

    twin.__name__, twin.__doc__ = name, doc
    return define(
        twin,
        f"st.v{count}.b{8 * size // count}",
        casts=(as_it_is, index) + (cast_of(element),) * count,
        results=(),
        typing=typing,
        lower=lower,
    )


load_u16 = _load("load_u16", uint16, 1, "2 bytes at array[index] as an unsigned integer.")
load_u32 = _load("load_u32", uint32, 1, "4 bytes at array[index] as an unsigned integer.")
load_u32x2 = _load("load_u32x2", uint32, 2, "8 bytes at array[index] as two 32-bit words.")
load_u32x4 = _load("load_u32x4", uint32, 4, "16 bytes at array[index] as four 32-bit words.")


@ptx(
    "ld.global.L1::no_allocate.v4.u32 {$0, $1, $2, $3}, [$4];",
    returns=(uint32, uint32, uint32, uint32),
    takes=(GLOBAL,),
    memory=True,
)
def load_u32x4_once(array, index):
    """As `load_u32x4`, of global memory that is read once: what else is in the L1 stays there.
    LDG.E.NA.128."""
    return struct.unpack_from("<4I", array.bytes, array.locate(index, 16))


load_f32 = _load("load_f32", float32, 1, "4 bytes at array[index] as a float32.")
load_f32x2 = _load("load_f32x2", float32, 2, "8 bytes at array[index] as two float32.")
load_f32x4 = _load("load_f32x4", float32, 4, "16 bytes at array[index] as four float32.")

store_u16 = _store("store_u16", uint16, 1, "The low 16 bits of x0 to array[index].")
store_u32 = _store("store_u32", uint32, 1, "A 32-bit word to the 4 bytes at array[index].")
store_u32x2 = _store("store_u32x2", uint32, 2, "Two words to the 8 bytes at array[index].")
store_u32x4 = _store("store_u32x4", uint32, 4, "Four words to the 16 bytes at array[index].")
store_f32 = _store("store_f32", float32, 1, "A float32 to the 4 bytes at array[index].")
store_f32x2 = _store("store_f32x2", float32, 2, "Two float32 to the 8 bytes at array[index].")
store_f32x4 = _store("store_f32x4", float32, 4, "Four float32 to the 16 bytes at array[index].")


def _define_address():
    def address(array, index):
        """Where array[index] lies, in bytes: for a kernel that reads wide only where it may. In the
        simulator it is counted from the start of the allocation, a multiple of 256."""
        return array.address(index)

    def typing(given):
        fits = isinstance(given[0], types.Array)
        return (types.int64, (given[0], types.int64)) if fits else None

    def lower(context, builder, signature, arguments):
        pointer = element_pointer(context, builder, signature.args[0], *arguments)
        return builder.ptrtoint(pointer, ir.IntType(64))

    return define(
        address,
        "ptrtoint",
        casts=(as_it_is, index),
        results=(cast_of(types.int64),),
        typing=typing,
        lower=lower,
    )


address = _define_address()


@ptx("fence.acq_rel.gpu;", scope="lane", memory=True)
def fence(lane):
    """What this thread wrote before is seen by whoever sees what it writes after: by thread blocks
    on other SMs too, if they call it in between likewise. MEMBAR.ALL.GPU, a lighter one than
    `cuda.threadfence` (MEMBAR.SC.GPU), which orders all fences of the GPU besides."""
    lane.block.order.fence(lane)


# --- what thread blocks show each other (PTX ISA 9.7.9, relaxed loads and stores) -----------------
#
# A relaxed store goes to the L2, and a relaxed load reads there, past the L1. Neither says anything
# about other memory: `fence` does, before the store and after the load that sees it. In the
# simulator a relaxed load lets all other threads run first, and hundreds of them in a row, of every
# thread that can go on, while nothing changes, are a deadlock.


@ptx(
    "ld.relaxed.gpu.global.v2.u64 {$0, $1}, [$2];",
    returns=(uint64, uint64),
    takes=(GLOBAL,),
    scope="lane",
    memory=True,
)
def load_u64x2_relaxed(lane, array, index):
    """16 bytes at array[index], either half as it is in the L2 now. LDG.E.128.STRONG.GPU."""
    return struct.unpack_from("<2Q", array.bytes, array.locate_relaxed(index, 16))


@ptx(
    "ld.relaxed.gpu.global.v4.u32 {$0, $1, $2, $3}, [$4];",
    returns=(uint32, uint32, uint32, uint32),
    takes=(GLOBAL,),
    scope="lane",
    memory=True,
)
def load_u32x4_relaxed(lane, array, index):
    """16 bytes at array[index], each word as it is in the L2 now. LDG.E.128.STRONG.GPU."""
    return struct.unpack_from("<4I", array.bytes, array.locate_relaxed(index, 16))


@ptx("st.relaxed.gpu.global.u64 [$0], $1;", takes=(GLOBAL, uint64), scope="lane", memory=True)
def store_u64_relaxed(lane, array, index, value):
    """8 bytes to array[index] of uint32, for relaxed loads of other blocks. STG.E.64.STRONG.GPU."""
    array.store_relaxed(index, struct.pack("<Q", value))


@ptx("st.relaxed.gpu.global.u32 [$0], $1;", takes=(GLOBAL, uint32), scope="lane", memory=True)
def store_u32_relaxed(lane, array, index, value):
    """4 bytes to array[index], likewise. STG.E.STRONG.GPU."""
    array.store_relaxed(index, struct.pack("<I", value))


@ptx(
    "ld.relaxed.gpu.global.u32 $0, [$1];",
    returns=uint32,
    takes=(GLOBAL,),
    scope="lane",
    memory=True,
)
def load_u32_relaxed(lane, array, index):
    """4 bytes at array[index] as they are in the L2 now. LDG.E.STRONG.GPU."""
    return struct.unpack_from("<I", array.bytes, array.locate_relaxed(index, 4))[0]


@ptx("st.relaxed.gpu.global.u16 [$0], $1;", takes=(GLOBAL, uint16), scope="lane", memory=True)
def store_u16_relaxed(lane, array, index, value):
    """2 bytes to array[index], for relaxed loads of other blocks. STG.E.U16.STRONG.GPU."""
    array.store_relaxed(index, struct.pack("<H", value))


@ptx("st.relaxed.sys.global.u32 [$0], $1;", takes=(GLOBAL, uint32), scope="lane", memory=True)
def store_u32_system(lane, array, index, value):
    """4 bytes to array[index], which may be of another GPU. STG.E.STRONG.SYS."""
    array.store_relaxed(index, struct.pack("<I", value))


@ptx(
    "ld.relaxed.sys.global.u32 $0, [$1];",
    returns=uint32,
    takes=(GLOBAL,),
    scope="lane",
    memory=True,
)
def load_u32_system(lane, array, index):
    """4 bytes at array[index], where another GPU may store. LDG.E.STRONG.SYS."""
    return struct.unpack_from("<I", array.bytes, array.locate_relaxed(index, 4))[0]


@ptx("trap;", scope="lane", memory=True)
def trap(lane):
    """End the launch with an error, in place of a wait without end. The context is lost, as after a
    bad address. BPT.TRAP."""
    raise SimulatorError("the kernel gives up (trap)")


# --- order of launches ----------------------------------------------------------------------------


@ptx("griddepcontrol.wait;", scope="lane", memory=True, min_cc=(9, 0), optional=True)
def griddepcontrol_wait(lane):
    """Wait until the launches before this one have ended and their writes are visible. ACQBULK."""
    lane.block.order.waited_for_launches(lane)


@ptx("griddepcontrol.launch_dependents;", scope="lane", memory=True, min_cc=(9, 0), optional=True)
def griddepcontrol_launch_dependents(lane):
    """Allow the next launch of the stream to begin once all blocks have called this. PREEXIT."""
