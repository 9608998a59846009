"""The one way in which a `Launch` reaches a GPU: through cuda.core, on the kernel that Numba made.

Numba's own launcher finds out at every call what it knew at the last one: the types of the
arguments, the machine code that belongs to them, the address, shape and strides of each array. With
four arrays that takes the host longer than a decode kernel takes the GPU. Here it is done once:

    loaded = load(launch)      # compiles, loads, lays the arguments out
    loaded(stream)             # launches, again and again, on any stream

A loaded launch allocates nothing and asks the driver for nothing but the launch, so it may also run
while a stream is being captured into a CUDA graph.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np
from cuda.bindings import driver
from cuda.core import LaunchConfig, Stream, launch
from numba import cuda
from numba.cuda import types
from numba.cuda.cudadrv.devicearray import DeviceNDArray

from steps.instructions.compile import signature_of
from steps.step import Launch

DEFAULT_SHARED_BYTES: Final = 48 * 1024
"""Static and dynamic shared memory that a block may have without the driver being asked."""

OVERLAP_CC: Final = (9, 0)
"""The first compute capability that has programmatic dependent launch; others run in order."""

_thread = threading.local()
_allowed: WeakKeyDictionary[Any, dict[int, int]] = WeakKeyDictionary()  # kernel -> device -> bytes


@dataclass(frozen=True, slots=True)
class Loaded:
    """A `Launch` with its machine code on the GPU and its arguments laid out; call it to launch.

    `arguments` are the kernel's parameters one by one. They are a list so that a `Plan` may put
    other addresses in; `source` keeps the arrays alive that they point to.
    """

    source: Launch
    kernel: Any
    config: LaunchConfig
    arguments: list[Any]

    def __call__(self, stream: Any = 0) -> None:
        """Queue it on a stream: anything that `core_stream` takes."""
        if not getattr(_thread, "has_context", False):
            cuda.current_context()  # a thread that never used CUDA has none, and cannot launch
            _thread.has_context = True
        launch(core_stream(stream), self.config, self.kernel, *self.arguments)

    def within(self, start: int, size: int) -> list[tuple[int, int]]:
        """(position, offset) of each argument that is an address in the `size` bytes at `start`."""
        return [
            (position, int(argument) - start)
            for position, argument in enumerate(self.arguments)
            if isinstance(argument, int | np.integer) and start <= argument < start + size
        ]


def load(source: Launch) -> Loaded:
    """Compile a launch for the types of its arguments, load it, and lay the arguments out.

    TypeError for an argument that a kernel cannot take from here, such as a NumPy array;
    RuntimeError where the GPU has less shared memory than asked for.
    """
    for i, argument in enumerate(source.args):
        if isinstance(argument, np.ndarray):
            raise TypeError(
                f"argument {i} of {source.kernel.__name__} is a NumPy array of shape "
                f"{argument.shape}: a GPU reads its own memory, so move it there (Gpu.array)"
            )
    signature = signature_of(source.args)
    compiled = source.kernel.compile(signature)
    function = compiled._codelibrary.get_cufunc()
    # Code is otherwise loaded when it is first launched, which a capture may not survive.
    _must(driver.cuKernelGetFunction(function.handle), f"loading {source.kernel.__name__}")
    _allow_shared(compiled, function, source)
    options: dict[str, Any] = {"is_cooperative": True} if compiled.cooperative else {}
    if source.overlap and cuda.get_current_device().compute_capability >= OVERLAP_CC:
        options["programmatic_stream_serialization"] = True
    config = LaunchConfig(
        grid=source.grid, block=source.block, shmem_size=source.shared_bytes, **options
    )
    return Loaded(source, function.kernel, config, parameters(signature, source.args))


def parameters(signature: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """The parameters that a kernel compiled for `signature` reads, in their order.

    An array is (meminfo, parent, number of items, bytes of an item, address, *shape, *strides in
    bytes), each of 64 bits, the first two unused on a GPU; a scalar is itself in its own width; a
    tuple is what it holds. The layout is that of Numba's data model for arrays.
    """
    flat: list[Any] = []
    for kind, value in zip(signature, args, strict=True):
        if isinstance(kind, types.Array):
            ours = isinstance(value, DeviceNDArray)
            array = value if ours else cuda.as_cuda_array(value, sync=False)
            address = array.device_ctypes_pointer.value or 0
            flat += (0, 0, array.size, array.dtype.itemsize, address, *array.shape, *array.strides)
        elif isinstance(kind, types.BaseTuple):
            flat += parameters(tuple(kind), value)
        elif isinstance(kind, types.Integer | types.Float):
            flat.append(np.dtype(str(kind)).type(value))
        elif isinstance(kind, types.Boolean):
            flat.append(np.bool_(value))
        else:
            raise TypeError(f"a kernel cannot be launched with {value!r}, which Numba calls {kind}")
    return flat


def core_stream(stream: Any) -> Stream:
    """A stream of any library as cuda.core's.

    0 or None is the default stream and an int the handle of one. Of other objects the handle is
    what `__cuda_stream__` (Numba, cuda.core, its graph builders), `cuda_stream` (torch) or `ptr`
    (CuPy) says; the object must outlive the work on it.
    """
    if isinstance(stream, Stream):
        return stream
    return _stream_of_handle(stream_handle(stream))


def stream_handle(stream: Any) -> int:
    """The driver's handle of a stream, see `core_stream`; TypeError for what is not one."""
    if stream is None:
        return 0
    if isinstance(stream, int):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    for name in ("cuda_stream", "ptr"):
        if isinstance(handle := getattr(stream, name, None), int):
            return handle
    raise TypeError(
        f"stream must be 0, a handle, or a stream of Numba, cuda.core, torch or CuPy, "
        f"got {type(stream).__name__}"
    )


@lru_cache(maxsize=128)
def _stream_of_handle(handle: int) -> Stream:
    return Stream.from_handle(handle)


def _allow_shared(compiled: Any, function: Any, source: Launch) -> None:
    """Raise the kernel's limit of dynamic shared memory, once for each size that needs it.

    Above 48 KB in all a launch fails with CUDA_ERROR_INVALID_VALUE until the function's attribute
    is raised, which numba-cuda does not do (its issue 94).
    """
    size = source.shared_bytes
    if function.attrs.shared + size <= DEFAULT_SHARED_BYTES:
        return
    device = cuda.get_current_device().id
    allowed = _allowed.setdefault(compiled, {})
    if size <= allowed.get(device, 0):
        return
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    what = f"{source.kernel.__name__} with {size} bytes of dynamic shared memory"
    _must(driver.cuKernelSetAttribute(attribute, size, function.handle, device), what)
    allowed[device] = size


def _must(answer: tuple[Any, ...], what: str) -> None:
    if error := answer[0]:
        raise RuntimeError(f"{what} is not possible on this GPU: {error.name}")
