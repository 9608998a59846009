"""Rows of quantized weights as floats: `dequantize` for all of a matrix, `get_rows` by number.

    from steps.product.rows import dequantize, get_rows

    values = dequantize(blocks)                 # float32 [N, K] of blocks of qformats, on the GPU
    rows = get_rows(blocks, ids)                # float32 [M, K] of the rows ids[M]
    rows = get_rows(w, ids, "q6_k", dtype="float16")    # w: uint8 [N, bytes of a row] on the GPU

Every value is what `qformats.dequantize` makes, rounded once to the dtype asked for. Layers of
torch have the same as operators: `steps.nn.rows`. The kernel is that of `steps.kernels.rows`; its
launches are prepared once for each shape. `prepared_columns` prepares those of
`steps.kernels.unpack`, for columns of packed weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from qformats import FILE_FORMATS, FORMATS, WEIGHT_FORMATS, Format
from steps.compile.dry_run import ArrayType, DryRun, OfArrays, operands
from steps.contract import Launch
from steps.driver.launcher import stream_handle
from steps.kernels import rows as kernel
from steps.kernels import unpack
from steps.product.gemm import current_device, machine_for
from steps.product.operands import (
    ARRAYS,
    address,
    as_array,
    blocks_of,
    empty_beside,
    float_name,
    is_device_array,
    require_array,
    stream_of,
    weight_format,
)
from steps.product.prepared import Kept, Prepared

if TYPE_CHECKING:
    from qformats.gguf_file import Tensor
    from steps.driver.machines import Gpu, Simulator

IDS: Final = ("int32", "int64")
TAKEN: Final = (*WEIGHT_FORMATS, *FILE_FORMATS)
PREPARED: Final = 512
"""Prepared launches that are kept, those used last."""


def dequantize(
    w: np.ndarray | Tensor | Any,
    format: str | None = None,
    *,
    dtype: Any = np.float32,
    machine: Gpu | Simulator | None = None,
    stream: Any = None,
) -> Any:
    """The values [N, K] of quantized weights.

    w       : blocks [N, K/32], of K-quants [N, K/256], a NumPy array or a tensor of a file; or
              their bytes on the GPU, uint8 [N, bytes of a row], C-contiguous, from an even address
              on.
    format  : of bytes on the GPU the name of their format; blocks say it themselves.
    dtype   : float32, float16 or bfloat16. Values are rounded to nearest, ties to even.
    machine : where it is done; by default the current GPU.
    stream  : where to queue the work, see `steps.gemm`.

    Returns a NumPy array for one, else an array on the GPU, of the library of `w` (torch, CuPy,
    else Numba). NumPy and Numba have no bfloat16: those arrays are uint16.
    Raises TypeError and ValueError for arguments that do not fit, RuntimeError without a GPU.
    """
    return _rows(w, None, format, dtype, machine, stream)


def get_rows(
    w: np.ndarray | Tensor | Any,
    ids: Any,
    format: str | None = None,
    *,
    dtype: Any = np.float32,
    machine: Gpu | Simulator | None = None,
    stream: Any = None,
) -> Any:
    """Rows [M, K] of quantized weights, such as embeddings of tokens.

    ids     : int32 or int64 [M], C-contiguous, where `w` is: NumPy or on the GPU. A row whose
              number is not one from 0 to N - 1 is NaN, and nothing is read for it.
    w, format, dtype, machine, stream : see `dequantize`.

    Returns and raises what `dequantize` does.
    """
    return _rows(w, ids, format, dtype, machine, stream)


def _rows(w: Any, ids: Any, format: str | None, dtype: Any, machine: Any, stream: Any) -> Any:
    output, source = float_name(dtype), blocks_of(w)
    if is_device_array(source):
        return _on_gpu(source, ids, format, output, machine_for(machine), stream)
    fmt = weight_format(source)
    if format not in (None, fmt.name):
        raise ValueError(f"w holds blocks of {fmt.name} and format is {format!r}: leave it out")
    if ids is not None:
        require_array("ids", ids, False, IDS, 1)
    shape = len(source if ids is None else ids), source.shape[1] * fmt.elements
    if not shape[0]:
        return np.empty(shape, ARRAYS[output])
    where = machine_for(machine)
    where = where if stream is None else where.on(stream)
    given = where.array(np.ascontiguousarray(source).view(np.uint8))
    numbers, rows = None if ids is None else where.array(ids), where.empty(shape, ARRAYS[output])
    where.run(kernel.launch(fmt.name, given.reshape(-1), rows, numbers))
    return where.host(rows)


def _on_gpu(w: Any, ids: Any, format: str | None, dtype: str, machine: Any, stream: Any) -> Any:
    if machine.cc is None:
        raise TypeError(f"w is on a GPU and the machine is the {machine.name}: pass blocks")
    (n, row_bytes), _ = require_array("w", as_array("w", w), True, ("uint8",), 2)
    fmt = known_format(format)
    k = row_width(fmt, row_bytes)
    m, device = n, current_device()
    types: list[ArrayType] = [((n * row_bytes,), "uint8")]
    if ids is not None:
        if not is_device_array(ids):
            raise TypeError(f"ids must be on the GPU, as w is, got {type(ids).__name__}")
        (m,), of_ids = require_array("ids", as_array("ids", ids), True, IDS, 1)
    rows = empty_beside(w, (m, k), dtype, machine)
    if not m:
        return rows
    if not n:
        raise ValueError(f"w is empty: its shape is {(n, row_bytes)}")
    addresses = [address("w", w, (n, row_bytes), device, "uint8")]
    require_even(addresses[0], fmt)
    addresses.append(address("out", rows, (m, k), device, dtype))
    types.append(((m, k), dtype))
    if ids is not None:
        addresses.append(address("ids", ids, (m,), device, of_ids))
        types.append(((m,), of_ids))
    made = prepared(fmt.name, types, device)
    made(addresses, 0, 0, stream_handle(stream_of(w) if stream is None else stream))
    return rows


def known_format(name: Any) -> Format:
    """ValueError for a name of no format of weights."""
    if name not in TAKEN:
        raise ValueError(f"format is {name!r}: bytes on a GPU need one of {', '.join(TAKEN)}")
    return FORMATS[name]


def row_width(fmt: Format, row_bytes: int) -> int:
    """K of rows of so many bytes; ValueError where these are no blocks."""
    if not row_bytes or row_bytes % fmt.block_bytes:
        raise ValueError(
            f"w has rows of {row_bytes} bytes, and a block of {fmt.name} has {fmt.block_bytes}: "
            "pass uint8 [N, bytes of a row]"
        )
    return row_bytes // fmt.block_bytes * fmt.elements


def require_even(start: int, fmt: Format) -> None:
    """ValueError where blocks that hold float16 begin at an odd address."""
    if start % 2 and fmt.block_bytes % 2 == 0:
        raise ValueError(
            f"w begins at {start:#x}, an odd address, and {fmt.name} holds float16: make an "
            "aligned copy"
        )


_prepared: Kept[Prepared] = Kept(PREPARED)


def prepared(format: str, arrays: Sequence[ArrayType], device: int) -> Prepared:
    """The launch for bytes of weights, rows and perhaps ids of these shapes and dtypes, on the
    current GPU, whose number is `device`; a call brings their addresses. Kept for the next one."""
    make = partial(_launch, format)
    return _prepared.of((format, tuple(arrays), device), lambda: _made(make, arrays))


def _made(make: Callable[..., Launch], arrays: Sequence[ArrayType]) -> Prepared:
    recipe, memory = OfArrays(make, tuple(arrays)), DryRun()
    return Prepared(recipe.launches(memory), memory, operands(len(arrays)))


def prepared_columns(
    layout: str, format: str, k: int, first: int, arrays: Sequence[ArrayType]
) -> Prepared:
    """The launch for columns `first` and on of weights [N, K] packed in a layout
    (`steps.kernels.unpack`), on the current GPU: of the packed arrays and the panel that these
    columns go to. Not kept."""
    return _made(partial(_launch_columns, layout, format, k, first), arrays)


def _launch_columns(
    layout: str, format: str, k: int, first: int, *arrays: Any, machine: Any
) -> Launch:
    *packed, panel = arrays
    return unpack.launch(layout, format, packed, k, first, panel)


def _launch(format: str, w: Any, rows: Any, ids: Any = None, *, machine: Any) -> Launch:
    return kernel.launch(format, w, rows, ids)
