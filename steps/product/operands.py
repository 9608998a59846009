"""Argument checks: what the operands of a product are, or an error of one sentence.

Arrays on a GPU may be of any library with `__cuda_array_interface__`: Numba, torch, CuPy. bfloat16
is uint16 in all but torch (`steps.contract.dtype_name`), and a tensor of it is read as uint16.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np

from qformats import BLOCK, FILE_FORMATS, FORMATS, WEIGHT_FORMATS, Format, format_of
from qformats.format import is_numpy
from reference.bfloat16 import bfloat16_values
from steps.contract import FLOATS, Launch, array_dtype

GRID_LIMITS: Final = (2**31 - 1, 65535, 65535)
"""The most thread blocks that CUDA launches along x, y and z."""

ARRAYS: Final = {name: array_dtype(name) for name in FLOATS}
"""The dtypes that A and C may have, by name; a kernel says which it reads and writes."""

BYTES: Final = {name: np.dtype(name).itemsize for name in ("uint8", "int32", "int64")} | {
    name: dtype.itemsize for name, dtype in ARRAYS.items()
}
"""Bytes of an item of any array on a GPU that is read or written here."""

ALIGNMENT: Final = 16
"""Bytes of the widest store of any kernel, and of its copies of a 16-bit A: C, and an A in 16 bits,
must begin at a multiple of it."""


def is_device_array(x: Any) -> bool:
    return not isinstance(x, np.ndarray) and hasattr(x, "__cuda_array_interface__")


def as_array(name: str, x: Any) -> Any:
    """A tensor of bfloat16 as one of uint16, and without its gradient, on the same memory; anything
    else as it is. ValueError for a tensor whose gradient would be lost."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(x, torch.Tensor):
        return x
    if x.requires_grad:
        x = _without_gradient(name, x, torch)
    return x.view(torch.uint16) if x.dtype is torch.bfloat16 else x


def _without_gradient(name: str, x: Any, torch: Any) -> Any:
    if torch.is_grad_enabled():
        raise ValueError(
            f"{name} requires a gradient, which gemm and plans do not compute: pass "
            f"{name}.detach(), or call under torch.no_grad(); steps.nn.linear.QuantLinear has one"
        )
    return x.detach()


def activations_facts(a: Any, on_device: bool) -> tuple[int, int, str]:
    """(M, K, dtype by name) of activations [M, K]; an error where no kernel can read them."""
    (m, k), name = require_array("a", a, on_device, FLOATS, 2)
    if k < 1:
        raise ValueError(f"a has no columns: its shape is {(m, k)}")
    if k % BLOCK:
        raise ValueError(
            f"K={k} is not a multiple of the block of {BLOCK}: pad a with zeros to "
            f"{-(-k // BLOCK) * BLOCK} columns"
        )
    if on_device:
        require_start_of_a(a.__cuda_array_interface__["data"][0], name)
    return m, k, name


def float_name(dtype: Any, what: str = "dtype") -> str:
    """One of FLOATS, given as a name or as a dtype of NumPy (uint16 for bfloat16) or torch;
    TypeError for anything else."""
    name = str(dtype).removeprefix("torch.")
    if name in FLOATS:
        return name
    with suppress(TypeError):
        if (found := name_of(np.dtype(dtype))) in FLOATS:
            return found
    raise TypeError(f"{what} must be {one_of(FLOATS)}, got {dtype!r}")


def name_of(dtype: np.dtype[Any]) -> str:
    """What the numbers of an array are called here: one of FLOATS, else what NumPy says."""
    return next((name for name in FLOATS if dtype == ARRAYS[name]), str(dtype))


def one_of(names: Sequence[str]) -> str:
    """ "float32, float16 or bfloat16"."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def require_array(
    name: str, x: Any, on_device: bool, wanted: Sequence[str], dimensions: int
) -> tuple[tuple[int, ...], str]:
    """(shape, dtype) of a C-contiguous array of so many dimensions and of one of the dtypes
    `wanted`; TypeError for another dtype or no array, ValueError for other shapes and strides."""
    if not on_device and not is_numpy(x):
        raise TypeError(
            f"{name} must be a NumPy array or one on the GPU (with __cuda_array_interface__), "
            f"got {type(x).__name__}"
        )
    facts = x.__cuda_array_interface__ if on_device else x.__array_interface__
    dtype, shape = np.dtype(facts["typestr"]), tuple(facts["shape"])
    found = name_of(dtype)
    if found not in wanted:
        raise TypeError(f"{name} must be {one_of(wanted)}, got {found}")
    if len(shape) != dimensions:
        many = "1 dimension" if dimensions == 1 else f"{dimensions} dimensions"
        raise ValueError(f"{name} must have {many}, got {len(shape)}: its shape is {shape}")
    strides = facts.get("strides")
    contiguous = [dtype.itemsize * math.prod(shape[i + 1 :]) for i in range(dimensions)]
    if strides is not None and 0 not in shape and list(strides) != contiguous:
        ok = all(s == c or e == 1 for s, c, e in zip(strides, contiguous, shape, strict=True))
        if not ok:
            raise ValueError(
                f"{name} must be C-contiguous, got strides {tuple(strides)} for shape {shape}: "
                "make a contiguous copy"
            )
    if on_device and (past := facts["data"][0] % dtype.itemsize):
        raise ValueError(
            f"{name} begins {past} bytes past a multiple of {dtype.itemsize}, and a GPU reads "
            f"{found} only at such multiples: make an aligned copy"
        )
    return shape, found


def blocks_of(w: Any) -> Any:
    """The blocks of a tensor of a file (`qformats.gguf_file.Tensor`), not copied; anything else is
    returned as it is. TypeError for a tensor without blocks."""
    file = sys.modules.get("qformats.gguf_file")  # without it there is no such tensor
    if file is None or not isinstance(w, file.Tensor):
        return w
    if w.type not in FORMATS:
        raise TypeError(f"{w.name} is {w.type}: w must hold blocks of {', '.join(WEIGHT_FORMATS)}")
    return w.array


def weight_format(w: Any) -> Format:
    """The format of host blocks [N, K/32], of K-quants [N, K/256]. TypeError for anything else than
    blocks, ValueError for other shapes and for scales that are not finite."""
    if not is_numpy(w):
        raise TypeError(
            f"w must be a NumPy array of blocks (qformats.quantize makes them), or what steps.pack "
            f"made of one for gemm and steps.pack_experts for experts, got {type(w).__name__}"
        )
    names = (*WEIGHT_FORMATS, *FILE_FORMATS)
    if w.dtype not in {FORMATS[name].dtype for name in names}:
        what = "q8_1, which is for activations" if w.dtype == FORMATS["q8_1"].dtype else w.dtype
        raise TypeError(
            f"w must hold blocks of {', '.join(names)} (qformats.quantize makes them), got {what}"
        )
    if w.ndim != 2:
        raise ValueError(f"w must have shape [N, K/32], got {w.ndim} dimensions: {w.shape}")
    if w.size == 0:
        raise ValueError(f"w is empty: its shape is {w.shape}")
    for field in ("d", "m", "dmin"):
        if field in (w.dtype.names or ()) and not np.isfinite(w[field]).all():
            n, b = np.argwhere(~np.isfinite(w[field]))[0]
            raise ValueError(
                f"w has {field} = {w[field][n, b]} in block {b} of row {n}: it must be finite"
            )
    return format_of(w)


def require_start_of_a(start: int, dtype: str) -> None:
    """ValueError unless kernels can read an A of this dtype that begins at `start` on a GPU."""
    if start % ALIGNMENT and dtype != "float32":
        raise ValueError(
            f"a begins at {start:#x}, {start % ALIGNMENT} bytes past a multiple of {ALIGNMENT}, "
            f"and kernels copy {dtype} {ALIGNMENT} bytes at a time: make an aligned copy, in torch "
            "a.clone()"
        )


def require_out(out: Any, shape: tuple[int, ...], on_device: bool, dtype: str) -> None:
    """TypeError or ValueError unless C of this shape may be written to out, or out is None. Its
    place on a GPU is looked at by who knows the places of all operands (`require_place`)."""
    if out is None:
        return
    if is_device_array(out) != on_device:
        raise TypeError(f"out must be {('a NumPy array', 'on the GPU')[on_device]}, as a is")
    found, _ = require_array("out", out, on_device, (dtype,), len(shape))
    if found != shape:
        raise ValueError(f"out must have shape {list(shape)}, got {list(found)}")
    if out.__cuda_array_interface__["data"][1] if on_device else not out.flags.writeable:
        raise _read_only(shape)


def require_apart(out: Any, **read: Any) -> None:
    """ValueError where `out` shares memory of the host with an array that the product reads."""
    for name, x in read.items():
        if (
            isinstance(out, np.ndarray)
            and isinstance(x, np.ndarray)
            and np.may_share_memory(out, x)
        ):
            raise ValueError(
                f"out overlaps {name}, which the product reads: use an array of its own"
            )


def bias_dtype(bias: Any, n: int, on_device: bool) -> str:
    """The dtype by name of a bias [n]; TypeError or ValueError where no kernel can add it."""
    if is_device_array(bias) != on_device:
        raise TypeError(f"bias must be {('a NumPy array', 'on the GPU')[on_device]}, as a is")
    shape, name = require_array("bias", bias, on_device, FLOATS, 1)
    if shape != (n,):
        raise ValueError(f"bias must have shape [N] = [{n}], got {list(shape)}")
    if not on_device:
        require_finite("bias", bias, name)
    return name


def require_finite(name: str, x: np.ndarray, dtype: str) -> None:
    """ValueError for NaN and infinity in an array of the host."""
    finite = np.isfinite(bfloat16_values(x) if dtype == "bfloat16" else x)
    if not finite.all():
        raise ValueError(f"{name} has {np.count_nonzero(~finite)} values that are NaN or Inf")


def _read_only(shape: Sequence[int]) -> ValueError:
    return ValueError(f"out {list(shape)} is read-only: C needs an array that may be written")


def require_place(start: int, size: int, read: int, size_read: int, name: str = "a") -> None:
    """ValueError unless an output of `size` bytes may be written at `start` on a GPU, where kernels
    read an array of that name."""
    if start < read + size_read and read < start + size:
        raise ValueError(
            f"out ({size} bytes at {start:#x}) overlaps {name} ({size_read} bytes at {read:#x}): a "
            "kernel would overwrite what it still reads, so use an array of its own"
        )
    if start % ALIGNMENT:
        raise ValueError(
            f"out begins {start % ALIGNMENT} bytes past a multiple of {ALIGNMENT}, where 128-bit "
            "stores must begin: use an array of its own, or a view that skips whole groups of "
            f"{ALIGNMENT} bytes"
        )


def address(
    name: str,
    x: Any,
    shape: tuple[int, ...],
    device: int = 0,
    dtype: str = "float32",
) -> int:
    """Where an array of this shape and dtype begins on a GPU; TypeError or ValueError for others.

    Arrays are checked at each call, so this takes less than a microsecond for arrays of torch
    and Numba, whose `__cuda_array_interface__` is slow. Only torch says on which `device` one is.
    """
    torch = sys.modules.get("torch")
    start: int
    if torch is not None and isinstance(x, torch.Tensor):
        if x.requires_grad:
            x = _without_gradient(name, x, torch)
        kind = getattr(torch, dtype)
        fits = x.is_cuda and x.dtype is kind and x.shape == shape and x.is_contiguous()
        if fits and (on := x.get_device()) != device:
            raise ValueError(f"{name} is on GPU {on} and the weights are on GPU {device}")
        if fits and not (start := x.data_ptr()) % BYTES[dtype]:
            return start
    elif getattr(x, "__cuda_ndarray__", False):  # Numba's
        fits = x.dtype == ARRAYS.get(dtype, dtype) and x.shape == shape and x.is_c_contiguous()
        if fits and not (start := x.device_ctypes_pointer.value or 0) % BYTES[dtype]:
            return start
    x = as_array(name, x)
    if not is_device_array(x):
        raise TypeError(
            f"{name} must be on the GPU (with __cuda_array_interface__), got {type(x).__name__}"
        )
    if require_array(name, x, True, (dtype,), len(shape))[0] != shape:
        have = x.__cuda_array_interface__["shape"]
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(have)}")
    facts = x.__cuda_array_interface__["data"]
    if name == "out" and facts[1]:
        raise _read_only(shape)
    return int(facts[0])


def empty_beside(a: Any, shape: tuple[int, ...], dtype: str, machine: Any) -> Any:
    """A new array of the library of `a`, on its GPU: NumPy, torch, CuPy, else Numba. Memory of
    torch and CuPy is of their own pools and in the order of their current stream."""
    if isinstance(a, np.ndarray):
        return np.empty(shape, ARRAYS[dtype])
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and isinstance(a, torch.Tensor):
        return a.new_empty(shape, dtype=getattr(torch, dtype))
    if cupy is not None and isinstance(a, cupy.ndarray):
        return cupy.empty(shape, ARRAYS[dtype])
    return machine.empty(shape, ARRAYS[dtype])


def stream_of(array: Any) -> int:
    """The handle of the stream to queue work on for an array; 0 is the default stream.

    It is the current stream of torch or CuPy, for other arrays the one that the array names.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        current = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # 0.1 us; the other takes 2
        if current is not None:
            return int(current(array.get_device()))
        return int(torch.cuda.current_stream(array.device).cuda_stream)
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(array, cupy.ndarray):
        return int(cupy.cuda.get_current_stream().ptr)
    if getattr(array, "__cuda_ndarray__", False) and not array.stream:  # Numba's
        return 0
    return array.__cuda_array_interface__.get("stream") or 0


def require_grid(launch: Launch, m: int, n: int) -> None:
    """ValueError for a product with more thread blocks than CUDA launches."""
    for axis, extent, limit in zip("xyz", launch.grid, GRID_LIMITS, strict=False):
        if extent > limit:
            raise ValueError(
                f"M={m} N={n} needs {extent} thread blocks along {axis} and CUDA launches at most "
                f"{limit}: multiply fewer tokens at a time"
            )
