"""Tensor maps: one instruction copies a box of a matrix to shared memory, swizzled.

A *tensor map* describes a matrix in global memory: its address, its extents, the size of the boxes
that are copied out of it, and how a box lies in shared memory (PTX ISA, "Tensors"; compute
capability 9.0). The host makes it, the kernel names a corner: `tensor_copy` (UTMALDG) computes the
addresses of all rows of the box, and writes zeros where the box reaches beyond the matrix. So A
with its rows as the caller has them needs no pass that rearranges it, and no lane compares indices.

    Launch(kernel, grid, block, (TensorMap(a, (tokens, BOX_K)), ...))       on the host

    def kernel(a_map, ...):                                                 a_map: the first one
        a = tensor_map_address(a_map)                                       in the kernel itself
        ...
        mbarrier_arrive_expect(full, s, 2 * BOX_K * tokens)                 one thread
        tensor_copy(ring, at, a, k, m, full, s)

A box is `tokens` rows of A by 64 of K, or by 128 where A is int8: 128 bytes a row. The map is of
the kind SWIZZLE_128B: the eight 16-byte chunks of a row change places, chunk c of row r lies at
chunk c ^ (r & 7). A column of chunks, which is what `wgmma` and `ldmatrix` read of eight rows, so
lies in eight different places of a row, in all 32 banks.

        row 0 |  0  1  2  3  4  5  6  7          the chunk of A that lies there
        row 1 |  1  0  3  2  5  4  7  6
        row 2 |  2  3  0  1  6  7  4  5
        row 3 |  3  2  1  0  7  6  5  4
        ...                                      row 8 is as row 0

`swizzled_descriptor` (steps/instructions/warpgroup.py) tells `wgmma` of this layout; the hardware
takes the swizzle from the bits of the address, so boxes begin at multiples of 1024 bytes. A box of
four rows may begin 512 bytes behind one: its rows are swizzled as rows 4 to 7.

The map goes to the GPU as a parameter of the launch: 16 words of 8 bytes at a multiple of 64. It is
so captured in CUDA graphs and needs no memory of its own. Numba knows no such parameter, so it gets
a tuple of words, the first of which are padding: parameters begin at 0x210 of the constant bank.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba.cuda import types
from numba.cuda.core.errors import TypingError
from numba.cuda.types import int32, uint64

from steps.instructions.bulk_copy import reported_to
from steps.instructions.define import SHARED, Handle, as_it_is, define, ptx
from steps.simulator.arrays import CheckedArray, offset_in_allocation
from steps.simulator.asynchronous import BulkCopy
from steps.simulator.errors import SimulatorError
from steps.simulator.lanes import here, kernel_frame
from steps.simulator.scheduler import now
from steps.simulator.twins import ARGUMENTS

BOX_K = 64
"""K of a box of 16-bit numbers: 128 bytes, the width of the swizzle."""

BOX_ALIGNMENT = 1024
"""Bytes: eight rows of a box, after which the swizzle repeats."""

PARAMETERS_BEGIN = 0x210  # of the constant bank, on compute capability 9.0
MAP_WORDS = 16
PADDING_WORDS = 6  # before the map among the words of the parameter
PARAMETER_WORDS = PADDING_WORDS + MAP_WORDS
assert (PARAMETERS_BEGIN + 8 * PADDING_WORDS) % 64 == 0, "the hardware takes a map at such a place"

_CHUNK = 16  # bytes
_ROW_BYTES = 128
_MOST_TOKENS = 256  # of a box
_HOPPER = (9, 0)


@dataclass(frozen=True, slots=True, eq=False)
class TensorMap:
    """The first argument of a `Launch`: a matrix that its kernel reads in boxes.

    array: [M, K] of 8-bit or 16-bit numbers, C-contiguous, a row a multiple of 16 bytes, at a
           multiple of 16 bytes.
    box: (tokens, columns), the rows and columns of a box: at most 256 tokens, columns of 128 bytes,
         which are BOX_K 16-bit numbers.
    ValueError where the hardware does not take it.
    """

    array: Any
    box: tuple[int, int]

    def __post_init__(self) -> None:
        shape, (tokens, wide) = tuple(self.array.shape), self.box
        dtype = str(self.array.dtype)
        if len(shape) != 2 or not dtype.endswith(("16", "int8")):
            raise ValueError(
                "a tensor map takes a matrix of 8-bit or 16-bit numbers, not an array of "
                f"{self.array.dtype} of shape {shape}"
            )
        strides = getattr(self.array, "strides", None)  # which an array of torch has not
        row_bytes = self.item_bytes * shape[1]
        if strides is not None and shape[0] > 1 and tuple(strides) != (row_bytes, self.item_bytes):
            raise ValueError(
                f"a tensor map takes a C-contiguous matrix, not {shape} with strides {strides}"
            )
        if row_bytes % _CHUNK:
            raise ValueError(
                f"a tensor map takes rows of a multiple of {_CHUNK} bytes; K = {shape[1]} gives "
                f"rows of {row_bytes}"
            )
        columns = _ROW_BYTES // self.item_bytes
        if wide != columns or not 1 <= tokens <= _MOST_TOKENS:
            raise ValueError(
                f"the box of a tensor map is 1 to {_MOST_TOKENS} tokens by {columns} of K, not "
                f"{tokens} by {wide}"
            )

    @property
    def item_bytes(self) -> int:
        """Of a number of the matrix."""
        return 1 if str(self.array.dtype).endswith("int8") else 2

    @property
    def box_bytes(self) -> int:
        """What every copy brings, zeros beyond the matrix included."""
        return self.box[0] * _ROW_BYTES

    def ranges(self, k: int, m: int) -> Iterator[tuple[int, int]]:
        """From the matrix's first byte on, begin and end of what the box at column k and row m has
        of each row."""
        (rows, columns), (tokens, wide), item = self.array.shape, self.box, self.item_bytes
        first, end = max(k, 0), min(k + wide, columns)
        for row in range(max(m, 0), min(m + tokens, rows) if first < end else 0):
            yield item * (row * columns + first), item * (row * columns + end)

    def swizzled(self, k: int, m: int, first: int = 0) -> np.ndarray:
        """The bytes of the box at column k and row m, as a copy leaves them in shared memory, where
        the box begins at row `first` of eight."""
        a, (tokens, wide) = self.array, self.box
        box = np.zeros((tokens, wide), a.dtype)
        rows, columns = m + np.arange(tokens), k + np.arange(wide)
        inside = np.ix_((rows >= 0) & (rows < a.shape[0]), (columns >= 0) & (columns < a.shape[1]))
        box[inside] = a[max(m, 0) : max(m + tokens, 0), max(k, 0) : max(k + wide, 0)]
        row, chunk = np.arange(tokens)[:, None], np.arange(_ROW_BYTES // _CHUNK)
        # The swizzle is its own inverse: chunk c comes from where it would go.
        chunks = box.view(np.uint8).reshape(tokens, -1, _CHUNK)[row, chunk ^ ((first + row) & 7)]
        return chunks.reshape(-1)


def require_map_place(address: int) -> None:
    """ValueError unless a tensor map takes an array at this address."""
    if address % _CHUNK:
        raise ValueError(
            f"a kernel that reads A through a tensor map takes it at a multiple of {_CHUNK} bytes; "
            f"this one lies {address % _CHUNK} bytes after one"
        )


def _in_the_simulator(argument: TensorMap) -> TensorMap:
    """What a simulated kernel sees: the same object."""
    require_map_place(offset_in_allocation(argument.array))
    return argument


ARGUMENTS[TensorMap] = _in_the_simulator
MAP = Handle(TensorMap)


def _define_address():
    def tensor_map_address(parameter):
        """The address of the tensor map that is the kernel's first parameter, for the instructions
        below. Only in the kernel itself: a device function has other parameters."""
        schedule = now()
        if kernel_frame(2).f_code is not schedule.kernel.__code__:
            raise SimulatorError(
                "tensor_map_address is for the kernel itself, not for its device functions"
            )
        first = schedule.arguments[0]
        if parameter is not first or not isinstance(first, TensorMap):
            raise SimulatorError("a tensor map is the kernel's first parameter")
        return parameter

    def typing(given):
        wanted = types.UniTuple(uint64, PARAMETER_WORDS)
        if given[0] != wanted:
            raise TypingError(f"tensor_map_address takes a TensorMap's parameter, not {given[0]}")
        return uint64, (wanted,)

    def lower(context, builder, signature, arguments):
        # The words are the first parameters of the PTX function, which has the LLVM function's name
        name = builder.function.name.replace("$", "$$")
        word = ir.IntType(64)
        text = f"{{.reg .b64 p; mov.b64 p, {name}_param_0; cvta.param.u64 $0, p;}}"
        assembly = ir.InlineAsm(ir.FunctionType(word, []), text, "=l")
        return builder.add(builder.call(assembly, []), word(8 * PADDING_WORDS))

    return define(
        tensor_map_address,
        "cvta.param.u64 ",
        casts=(as_it_is,),
        results=(as_it_is,),
        typing=typing,
        lower=lower,
        only="sm_90a",  # elsewhere parameters begin at other places
    )


tensor_map_address = _define_address()


@ptx("prefetch.tensormap [$0];", takes=(MAP,), scope="lane", memory=True, min_cc=_HOPPER)
def prefetch_tensor_map(lane, tensor_map):
    """Begin to load the map itself, which the first copy would wait for. UTMACCTL.PF."""


@ptx(
    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
    "[$0], [$1, {$2, $3}], [$4];",
    takes=(SHARED, MAP, int32, int32, SHARED),
    scope="lane",
    memory=True,
    min_cc=_HOPPER,
)
def tensor_copy(lane, destination, di, tensor_map, k, m, barrier, bi):
    """Begin to copy the box whose first column and row are k and m to destination[di], a multiple
    of 1024 bytes, or of 128 where a box has fewer than eight rows, to be reported to the mbarrier
    at barrier[bi]: always all bytes of a box, zeros where it is beyond the matrix. UTMALDG."""
    reports_to = reported_to("tensor_copy", lane, barrier, bi)
    size = tensor_map.box_bytes
    now().mapped[id(tensor_map)].require_written(tensor_map.ranges(k, m))
    alignment = BOX_ALIGNMENT if size >= BOX_ALIGNMENT else _ROW_BYTES
    write = CheckedArray.locate(destination, di, size, alignment)
    first = write // _ROW_BYTES

    def read():
        return tensor_map.swizzled(k, m, first).data

    now().copy(BulkCopy(lane, here(), destination, write, read, size, reports_to))
