"""Tensor cores as Hopper has them: four warps multiply a tile, asynchronously.

A *warpgroup* is four warps, the first of them a multiple of four. All 128 threads execute `wgmma`
together (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions", sm_90a only): D[64, N] +=
A[64, K] B[K, N], where a row of A and a column of B are 32 bytes along K: 16 float16 or bfloat16,
or 32 int8. N is 8, 16, 24, 32 or a multiple of 16 up to 256.

    A, in registers: warp w of the four holds rows 16 w to 16 w + 15 in the fragments of
    `mma_m16n8k16_f16` or `mma_m16n8k32_s8` (steps/instructions/tensor_core.py): a0, a1, a2, a3.

    D, in registers: a tuple of N / 2 values; with g = lane // 4 and t = lane % 4

             D[64, N]          n = 8j + 2t     8j + 2t + 1
             row 16w + g      |   d[4j]     |   d[4j + 1]   |
             row 16w + g + 8  |   d[4j + 2] |   d[4j + 3]   |

    B, in shared memory, where a *descriptor* says (`matrix_descriptor`, `swizzled_descriptor`).

A product whose A is *sparse*, `wgmma_sparse_f16`, has a K twice as long in the same time: of each
four neighbours along K at most two are not zero, and A holds those alone, with their positions
beside them ("metadata").

It returns at once. Multiplications are closed into groups (`wgmma_commit`) and waited for
(`wgmma_wait`), and until then the accumulators belong to the tensor cores and B must stay as it is:

    wgmma_fence()                                  before the first wgmma of a group
    for u in range(4):
        acc = wgmma_f16(acc, a0, a1, a2, a3, b + u * (2 * leading >> 4), 1)
    wgmma_commit()
    acc = wgmma_wait_all(acc)                      wgmma_wait_all = wgmma_wait(0), at module level

The accumulators go through every instruction as a tuple, which is how the compilers know that they
change. Where ptxas finds accumulators or A fragments touched while they may be in use, it makes
every `wgmma` wait for itself and says so only in a remark (C7510 to C7519), which the tests of
machine code look for. A fragments carried from one turn of a loop to the next are such a touch;
made and used in one turn they are not. Then ptxas waits for nothing: the next turn writes the same
registers, so their product must have been waited for, and products differ from run to run if not.
Two products a turn have registers of their own. Tests of machine code follow them all.
"""

from functools import cache

import numpy as np
from llvmlite import ir
from numba.cuda import cgutils, types
from numba.cuda.core.errors import TypingError
from numba.cuda.types import float32, int32, int64, uint32

from steps.instructions.define import SHARED, as_it_is, cast_of, define, index, pack, ptx
from steps.simulator.arrays import CheckedArray
from steps.simulator.errors import SimulatorError
from steps.simulator.lanes import REGISTERS, WARPGROUP
from steps.simulator.scheduler import now
from steps.simulator.warpgroup_mma import SWIZZLE_128B, SWIZZLED_ROW, begin, wait

_HOPPER = "sm_90a"  # and no other: later ones multiply otherwise
_UNIT = 16  # bytes: what descriptors count in
_LETTER = {float32: "f", int32: "r"}
_WIDTHS = (8, 24, *range(16, 257, 16))  # what both kinds of numbers have


def _asm(builder, text, results, operands, constraints):
    kind = ir.LiteralStructType(results)
    function = ir.FunctionType(kind, [v.type for v in operands])
    assembly = ir.InlineAsm(function, text, constraints, side_effect=True)
    value = builder.call(assembly, operands, attrs=("convergent",))
    return [builder.extract_value(value, i) for i in range(len(results))]


def _through(context, builder, tuple_type, values, text, operands=(), constraints=()):
    """LLVM: assembly that changes a tuple of accumulators in their registers."""
    count = len(values)
    letter = _LETTER[tuple_type.dtype]
    kind = context.get_value_type(tuple_type.dtype)
    tied = [f"={letter}"] * count + [str(i) for i in range(count)]
    parts = _asm(
        builder,
        text,
        [kind] * count,
        [*values, *operands],
        ",".join([*tied, *constraints]),
    )
    return pack(context, builder, tuple_type, parts)


def _wgmma(
    name: str,
    shape: str,
    numbers: str,
    accumulator,
    tail: str,
    dtypes: tuple,
    doc: str,
    selector: int | None = None,
):
    """One of the multiplications: its PTX for every N, and its twin. selector: of a sparse A, whose
    metadata is an operand behind the descriptor."""
    sparse, metadata = ("", "") if selector is None else (".sp", f" ${{}}, {selector},")
    operands = (*[uint32] * 4, int64, *([] if selector is None else [uint32]), int32)
    host = np.float32 if accumulator == float32 else np.int32

    def typing(given):
        acc = given[0]
        if not (isinstance(acc, types.UniTuple) and acc.dtype == accumulator):
            raise TypingError(f"{name} accumulates in a tuple of {accumulator}, not in {acc}")
        if 2 * acc.count not in _WIDTHS:
            raise TypingError(
                f"{name} got {acc.count} accumulators, half of N: N is 8, 16, 24, 32 or a multiple "
                "of 16 up to 256"
            )
        return acc, (acc, *operands)

    def lower(context, builder, signature, arguments):
        tuple_type = signature.return_type
        count = tuple_type.count
        values = cgutils.unpack_tuple(builder, arguments[0], count)
        d = ",".join(f"${i}" for i in range(count))
        a0 = 2 * count
        a = ",".join(f"${a0 + i}" for i in range(4))
        text = (
            f"{{.reg .pred p; setp.ne.b32 p, ${a0 + len(operands) - 1}, 0; "
            f"wgmma.mma_async{sparse}.sync.aligned.m64n{2 * count}{shape}.{numbers} "
            f"{{{d}}}, {{{a}}}, ${a0 + 4},{metadata.format(a0 + 5)} p{tail};}}"
        )
        constraints = ("l" if each is int64 else "r" for each in operands)
        return _through(context, builder, tuple_type, values, text, arguments[1:], constraints)

    def twin(lanes):
        return begin(lanes, dtypes, host, selector)

    twin.__name__, twin.__doc__ = name, doc
    casts = (as_it_is, *map(cast_of, operands))
    return define(
        twin,
        f".{numbers} ",
        scope="warpgroup",
        casts=casts,
        results=(as_it_is,),
        typing=typing,
        lower=lower,
        only=_HOPPER,
    )


wgmma_f16 = _wgmma(
    "wgmma_f16",
    "k16",
    "f32.f16.f16",
    float32,
    ", 1, 1, 0",
    (np.float16, np.float16),
    "(acc, a0..a3, descriptor, accumulate) -> acc + A @ B, or A @ B where accumulate is 0; float16 "
    "with float32 sums. HGMMA.",
)
wgmma_s8 = _wgmma(
    "wgmma_s8",
    "k32",
    "s32.s8.s8",
    int32,
    "",
    (np.int8, np.int8),
    "(acc, a0..a3, descriptor, accumulate) -> acc + A @ B in int32, modulo 2^32; bytes of A and B "
    "signed. IGMMA.",
)


@cache
def wgmma_sparse_f16(selector: int):
    """The instruction (acc, a0..a3, descriptor, metadata, accumulate) -> acc + A @ B, or A @ B
    where accumulate is 0, of a sparse A[64, 32] and B[32, N] in float16, with float32 sums.

    Of four neighbours along K, A has two: the fragments a0..a3 are those of a matrix [64, 16], the
    kept numbers of each row in the order of K. So a register of lane 4g + t is one group of four:

        a0   row g       K 4t .. 4t + 3           a2   row g       K 16 + 4t .. 16 + 4t + 3
        a1   row g + 8   the same                 a3   row g + 8   the same

    metadata, a word of two lanes of each four (quads), has four bits for each group of four along
    K, the lowest bits for the first group: the position 0 to 3 of the lower half of the register,
    then that of the upper half, which is another.

        lane 4g + 2 selector         bits 0-15: row g, K 0 to 15      bits 16-31: row g + 8
        lane 4g + 2 selector + 1     bits 0-15: row g, K 16 to 31     bits 16-31: row g + 8

    The words of the other two lanes are not read. So one register a lane is the metadata of two
    products: a factory, as PTX takes the selector, 0 or 1, as an immediate (PTX ISA, "Asynchronous
    warpgroup-level multiply-and-accumulate operation using wgmma.mma_async.sp"). B has 64 bytes
    along K: with rows of 128 bytes, swizzled, the second product is at descriptor + 4.
    """
    if selector not in (0, 1):
        raise ValueError(f"wgmma_sparse_f16 takes 0 or 1 for a selector, got {selector}")
    return _wgmma(
        f"wgmma_sparse_f16_{selector}",
        "k32",
        "f32.f16.f16",
        float32,
        ", 1, 1, 0",
        (np.float16, np.float16),
        f"wgmma with a sparse A whose metadata lanes 4g + {2 * selector} and 4g + "
        f"{2 * selector + 1} hold.",
        selector,
    )


@ptx("wgmma.fence.sync.aligned;", scope="lane", memory=True, only=_HOPPER)
def wgmma_fence(lane):
    """Before the first `wgmma` of a group: registers written so far may be read by it."""
    lane.fenced = True


@ptx("wgmma.commit_group.sync.aligned;", scope="lane", memory=True, only=_HOPPER)
def wgmma_commit(lane):
    """Close the multiplications since the last commit into a group."""
    lane.commits += 1
    lane.fenced = False


@cache
def wgmma_wait(newest: int):
    """The instruction acc -> acc that waits until at most the `newest` youngest groups run.

    A factory, since PTX takes the number as an immediate. The accumulators that it returns may be
    read if all of their groups are done; the others must be passed on to `wgmma` or another wait.
    """
    if not 0 <= newest <= 7:
        raise ValueError(f"wgmma_wait takes a number of groups from 0 to 7, got {newest}")

    def typing(given):
        acc = given[0]
        if not (isinstance(acc, types.UniTuple) and acc.dtype in _LETTER):
            raise TypingError(f"wgmma_wait takes a tuple of accumulators, not {acc}")
        return acc, (acc,)

    text = f"wgmma.wait_group.sync.aligned {newest};"

    def lower(context, builder, signature, arguments):
        kind = signature.return_type
        values = cgutils.unpack_tuple(builder, arguments[0], kind.count)
        return _through(context, builder, kind, values, text, (), ("~{memory}",))

    name = f"wgmma_wait_{newest}"

    def twin(lane, acc):
        now().pause()  # whoever was let go too early writes now to what is being read
        return now().meet_warpgroup(name, lambda handed: wait(handed, newest), acc)

    twin.__name__ = name
    twin.__doc__ = f"Wait until at most {newest} groups of this warpgroup run."
    return define(
        twin,
        text,
        scope="lane",
        casts=(as_it_is,),
        results=(as_it_is,),
        typing=typing,
        lower=lower,
        only=_HOPPER,
    )


# --- accumulators


def _zeros(name: str, dtype):
    @cache
    def factory(count: int):
        kind = types.UniTuple(dtype, count)
        zeros = (cast_of(dtype)(0),) * count

        def twin():
            return zeros

        def lower(context, builder, signature, arguments):
            return ir.Constant(ir.ArrayType(context.get_value_type(dtype), count), None)

        twin.__name__ = f"{name}_{count}"
        twin.__doc__ = f"A tuple of {count} zeros."
        return define(
            twin,
            f"zeroinitializer {count}",
            casts=(),
            results=(as_it_is,),
            typing=lambda given: (kind, ()),
            lower=lower,
        )

    factory.__name__ = name
    return factory


zeros_f32 = _zeros("zeros_f32", float32)
zeros_i32 = _zeros("zeros_i32", int32)


def _define_spread():
    def spread(array, values):
        """array[i] = values[i] for a tuple, such as accumulators; a loop may then index them. The
        array is a `cuda.local.array` of its length and type, which stays in registers."""
        if len(array) != len(values):
            raise SimulatorError(
                f"spread of {len(values)} values into {array.name}, which has {len(array)}"
            )
        for i, value in enumerate(values):
            array[i] = value

    def typing(given):
        array, values = given
        if not (isinstance(array, types.Array) and isinstance(values, types.UniTuple)):
            return None
        if array.dtype != values.dtype:
            raise TypingError(f"spread of {values} into an array of {array.dtype}")
        return types.void, (array, values)

    def lower(context, builder, signature, arguments):
        array_type, tuple_type = signature.args
        data = context.make_array(array_type)(context, builder, value=arguments[0]).data
        for i, value in enumerate(cgutils.unpack_tuple(builder, arguments[1], tuple_type.count)):
            builder.store(value, builder.gep(data, [ir.Constant(ir.IntType(64), i)]))
        return context.get_dummy_value()

    return define(
        spread,
        "store",
        casts=(as_it_is, as_it_is),
        results=(),
        typing=typing,
        lower=lower,
    )


spread = _define_spread()


# --- where B lies


def _field(builder, value, bit):
    """LLVM: a distance or an address, counted in 16 bytes, at that bit of a descriptor."""
    word, wide = ir.IntType(32), ir.IntType(64)
    units = builder.lshr(builder.and_(value, ir.Constant(word, 0x3FFFF)), word(4))
    return builder.shl(builder.zext(units, wide), wide(bit))


def _define_descriptor():
    def matrix_descriptor(array, index, leading, stride):
        """The descriptor of B at array[index] in shared memory, an int64, for `wgmma`.

        B is cut into *core matrices* of 8 columns of B (tokens) by 16 bytes along K, each of them
        128 bytes in one piece, column after column:

                         K bytes 0..15              K bytes 16..31
            n  0..7   | 8 x 16 B, at 0       |   | 8 x 16 B, at leading          |
            n  8..15  | 8 x 16 B, at stride  |   | 8 x 16 B, at leading + stride |
            ...
            n  N-8..  | at (N/8 - 1) stride  |   | at leading + (N/8 - 1) stride |

        `leading` is the distance in bytes of core matrices that are neighbours along K, `stride` of
        neighbours along N (PTX ISA, "Matrix Descriptor Format", K-major, no swizzle: the
        "leading-dimension" and the "stride-dimension byte offset"); they and the address are
        multiples of 16. With 16-byte chunks in groups of eight tokens, [tokens/8, chunks, 8, 16]:
        leading = 128, stride = 128 * chunks.

        In the descriptor addresses are counted in 16 bytes: the next 32 bytes along K are at
        descriptor + (2 * leading >> 4).
        """
        offset = CheckedArray.locate(array, index, _UNIT)
        start = now().lane.block.memory.address(array, offset)
        for name, bytes_ in (("leading", leading), ("stride", stride)):
            if bytes_ % _UNIT or not 0 <= bytes_ < 1 << 18:
                raise SimulatorError(
                    f"{name} of a matrix_descriptor is a multiple of 16 below 2^18, got {bytes_}"
                )
        return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32

    def typing(given):
        fits = isinstance(given[0], types.Array)
        return (int64, (given[0], int64, int32, int32)) if fits else None

    def lower(context, builder, signature, arguments):
        array, at, leading, stride = arguments
        address = SHARED.lower(context, builder, signature.args[0], array, at)
        low = builder.or_(_field(builder, address, 0), _field(builder, leading, 16))
        return builder.or_(low, _field(builder, stride, 32))

    return define(
        matrix_descriptor,
        "matrix_descriptor",
        casts=(SHARED.check, index, cast_of(int32), cast_of(int32)),
        results=(cast_of(int64),),
        typing=typing,
        lower=lower,
    )


matrix_descriptor = _define_descriptor()


def _define_swizzled_descriptor():
    eight_rows = 8 * SWIZZLED_ROW  # after which the swizzle repeats
    # The leading dimension means nothing here: 32 bytes along K are two chunks of one row.
    layout = 1 << 16 | eight_rows // _UNIT << 32 | SWIZZLE_128B << 62

    def swizzled_descriptor(array, index):
        """The descriptor of B at array[index] in shared memory, an int64, for `wgmma`: tokens in
        rows of 128 bytes along K, swizzled as `tensor_copy` leaves them
        (steps/instructions/tensor_map.py), from a multiple of 1024 bytes on.

        The next 32 bytes along K are at descriptor + 2: `wgmma` swizzles the address that results.
        So the four products of a row of 128 bytes take it + 0, + 2, + 4 and + 6. The next box of
        `tokens` rows is at descriptor + 8 * tokens.
        """
        offset = CheckedArray.locate(array, index, SWIZZLED_ROW, eight_rows)
        return now().lane.block.memory.address(array, offset) >> 4 | layout

    def typing(given):
        fits = isinstance(given[0], types.Array)
        return (int64, (given[0], int64)) if fits else None

    def lower(context, builder, signature, arguments):
        address = SHARED.lower(context, builder, signature.args[0], *arguments)
        return builder.or_(_field(builder, address, 0), ir.Constant(ir.IntType(64), layout))

    return define(
        swizzled_descriptor,
        "swizzled_descriptor",
        casts=(SHARED.check, index),
        results=(cast_of(int64),),
        typing=typing,
        lower=lower,
    )


swizzled_descriptor = _define_swizzled_descriptor()


# --- registers and barriers of a warpgroup


def _setmaxnreg(change: str):
    @cache
    def factory(registers: int):
        if registers % 8 or not 24 <= registers <= 256:
            raise ValueError(
                f"setmaxnreg takes a multiple of 8 from 24 to 256 registers, got {registers}"
            )

        def twin(lanes):
            block, group = now().lane.block, now().lane.index // WARPGROUP
            block.registers[group] = change, registers
            total = WARPGROUP * sum(each for _, each in block.registers.values())
            if total > REGISTERS:
                raise SimulatorError(
                    f"setmaxnreg_{change}({registers}): the block's warpgroups would have {total} "
                    f"registers, more than the {REGISTERS} of a multiprocessor: this one would "
                    "wait for ever"
                )
            return [None] * len(lanes)

        twin.__name__ = f"setmaxnreg_{change}_{registers}"
        twin.__doc__ = f"Each thread of this warpgroup has {registers} registers from now on."
        return ptx(
            f"setmaxnreg.{change}.sync.aligned.u32 {registers};",
            scope="warpgroup",
            memory=True,
            only=_HOPPER,
        )(twin)

    factory.__name__ = f"setmaxnreg_{change}"
    return factory


setmaxnreg_dec = _setmaxnreg("dec")
setmaxnreg_inc = _setmaxnreg("inc")


@ptx("bar.sync $0, $1;", takes=(int32, int32), scope="lane", memory=True)
def barrier_sync(lane, barrier, threads):
    """Wait at barrier 1..15 until `threads` threads (whole warps) have come there. BAR.SYNC."""
    now().count_at_barrier(barrier, threads, stay=True)


@ptx("bar.arrive $0, $1;", takes=(int32, int32), scope="lane", memory=True)
def barrier_arrive(lane, barrier, threads):
    """Count this warp at a barrier where others wait (`barrier_sync`), and go on. BAR.ARV."""
    now().count_at_barrier(barrier, threads, stay=False)
