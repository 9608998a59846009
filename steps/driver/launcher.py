"""Launching on a GPU: the driver's own call, on the kernel that Numba compiled.

Numba's launcher works out at every call what it knew at the last one: the types of the arguments,
the machine code for them, the address, shape and strides of each array. With four arrays that takes
the host longer than a decode kernel takes the GPU. Here it is done once:

    loaded = load(launch)      # compiles, loads, lays the arguments out
    loaded(stream)             # launches, again and again, on any stream

A loaded launch allocates nothing and makes no call to the driver but the launch, so it may also run
while a stream is captured into a CUDA graph.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np
from cuda.bindings import driver
from cuda.core import ObjectCode
from numba import cuda
from numba.cuda import types
from numba.cuda.cudadrv.devicearray import DeviceNDArray
from numba.cuda.cudadrv.driver import CudaAPIError

from steps.compile.compiler import architecture, compiled, signature_of
from steps.compile.dry_run import Placeholder
from steps.compile.kernel_cache import CompiledKernel
from steps.contract import Launch
from steps.driver.encode_map import EncodedMap, driver_library
from steps.instructions.tensor_map import PADDING_WORDS, PARAMETER_WORDS, TensorMap

DEFAULT_SHARED_BYTES: Final = 48 * 1024
"""Static and dynamic shared memory that a block may have without raising the kernel's limit."""

OVERLAP_CC: Final = (9, 0)
"""The first compute capability that has programmatic dependent launch; others run in order."""

STREAM_AT: Final = 32
"""Bytes of `CUlaunchConfig` before its hStream: seven unsigned int and a gap (cuda.h)."""

_thread = threading.local()
_on_gpus: WeakKeyDictionary[CompiledKernel, dict[int, Any]] = WeakKeyDictionary()  # by device
_allowed: WeakKeyDictionary[CompiledKernel, dict[int, int]] = WeakKeyDictionary()  # bytes by device


class Loaded:
    """A `Launch` with its machine code on the GPU and its arguments laid out; call it to launch.

    `arguments` are the kernel's parameters one by one, in 64 bits each;
    `steps.product.prepared.Prepared` writes the addresses of each call there. A `TensorMap` is
    encoded here; that of a placeholder when it gets an address (`put_mapped`). `source` keeps the
    arrays of the launch alive. One host thread at a time.
    """

    __slots__ = (
        *("_config", "_launch", "_map", "_operands", "_pointers", "_stream"),
        *("arguments", "kernel", "source"),
    )

    def __init__(
        self, source: Launch, kernel: Any, function: Any, config: Any, arguments: Sequence[Any]
    ) -> None:
        """function: the driver's handle. config: a `CUlaunchConfig` of cuda.bindings."""
        self.source, self.kernel = source, kernel
        count = len(arguments)
        self.arguments = (ctypes.c_uint64 * count)()
        for i, argument in enumerate(arguments):
            self.arguments[i] = int.from_bytes(argument.tobytes(), "little")
        start = ctypes.addressof(self.arguments)
        self._pointers = (ctypes.c_void_p * count)(*range(start, start + 8 * count, 8))
        self._config, self._launch = config, launch_function()
        at = int(config.getPtr())
        self._stream = ctypes.c_void_p.from_address(at + STREAM_AT)
        self._operands = (at, function, ctypes.addressof(self._pointers), None)
        self._map: EncodedMap | None = None
        if (tensor_map := mapped(source)) is not None:
            self._map = EncodedMap(tensor_map, start + 8 * PADDING_WORDS)
            if not isinstance(tensor_map.array, Placeholder):
                self.put_mapped(address_of(tensor_map.array))

    def __call__(self, stream: Any = 0) -> None:
        """Queue the launch on a stream: anything that `stream_handle` takes."""
        _require_context()
        self._stream.value = stream if type(stream) is int else stream_handle(stream)
        if error := self._launch(*self._operands):
            found, name = driver.CUresult(error), self.source.kernel.__name__
            raise CudaAPIError(found, f"{name} was not launched: {found.name}")

    def resources(self) -> dict[str, int]:
        """Registers of a thread, bytes of its local memory, and shared memory of a block."""
        found = self.kernel.attrs
        shared_bytes = found.shared + self.source.shared_bytes
        return {
            "registers": found.regs,
            "spill_bytes": found.local,
            "smem_bytes": shared_bytes,
        }

    def within(self, start: int, size: int) -> list[tuple[int, int]]:
        """(index, offset) of each argument that is an address in the `size` bytes at `start`. The
        words of a tensor map are left out."""
        words = range(PARAMETER_WORDS if self._map else 0)
        return [
            (index, argument - start)
            for index, argument in enumerate(self.arguments)
            if start <= argument < start + size and index not in words
        ]

    def mapped_within(self, start: int, size: int) -> int | None:
        """The offset of the tensor map's matrix in those bytes, if it is there."""
        tensor_map = mapped(self.source)
        if tensor_map is None:
            return None
        offset = address_of(tensor_map.array) - start
        return offset if 0 <= offset < size else None

    def put_mapped(self, address: int) -> None:
        """Set the address of the tensor map's matrix from here on; ValueError, and the map is as it
        was, where the hardware takes no matrix."""
        assert self._map is not None, "this launch has no tensor map"
        _require_context()
        self._map.put(address)


@cache
def launch_function() -> Any:
    """cuLaunchKernelEx."""
    function = driver_library().cuLaunchKernelEx
    function.restype, function.argtypes = ctypes.c_int, (ctypes.c_void_p,) * 4
    return function


def mapped(launch: Launch) -> TensorMap | None:
    """The tensor map among the arguments of a launch: the first or none."""
    first = launch.args[0] if launch.args else None
    return first if isinstance(first, TensorMap) else None


def _require_context() -> None:
    """Make a context current, without which a thread can neither launch nor encode a map."""
    if not getattr(_thread, "has_context", False):
        cuda.current_context()
        _thread.has_context = True


def load(source: Launch) -> Loaded:
    """Compile a launch for the types of its arguments, load it, and lay the arguments out.

    TypeError for an argument that a kernel cannot take from here, such as a NumPy array;
    RuntimeError where the GPU has less shared memory than asked for, or no room for all blocks of a
    launch whose blocks wait for each other.
    """
    for i, argument in enumerate(source.args):
        if isinstance(argument, TensorMap):
            argument = argument.array
        if isinstance(argument, np.ndarray):
            raise TypeError(
                f"argument {i} of {source.kernel.__name__} is a NumPy array of shape "
                f"{argument.shape}: a GPU reads its own memory, so copy it there (Gpu.array)"
            )
    signature = signature_of(source.args)
    arch = architecture(cuda.get_current_device().compute_capability)
    code = compiled(source.kernel, signature, arch)
    kernel = _on_gpu(code)
    # Otherwise the driver loads code at its first launch, which a capture may not survive.
    error, function = driver.cuKernelGetFunction(kernel.handle)
    _must(error, f"loading {source.kernel.__name__}")
    _allow_shared(code, kernel, source)
    if source.together:
        _require_room(source, function)
    config = _config(source, code.cooperative)
    arguments = parameters(signature, source.args)
    return Loaded(source, kernel, int(function), config, arguments)


def _on_gpu(code: CompiledKernel) -> Any:
    """The kernel in the current context, loaded once in each."""
    context = cuda.current_context()
    loaded = _on_gpus.setdefault(code, {})
    if context.device.id not in loaded:
        module = context.create_module_image(ObjectCode.from_cubin(code.cubin))
        loaded[context.device.id] = module.get_function(code.name)
    return loaded[context.device.id]


def _config(source: Launch, cooperative: bool) -> Any:
    """Grid, block, shared memory and attributes as the driver takes them."""
    config, attributes = driver.CUlaunchConfig(), []
    config.gridDimX, config.gridDimY, config.gridDimZ = (*source.grid, 1, 1)[:3]
    config.blockDimX, config.blockDimY, config.blockDimZ = (*source.block, 1, 1)[:3]
    config.sharedMemBytes = source.shared_bytes
    names = driver.CUlaunchAttributeID
    if source.overlap and cuda.get_current_device().compute_capability >= OVERLAP_CC:
        overlap = driver.CUlaunchAttribute()
        overlap.id = names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        overlap.value.programmaticStreamSerializationAllowed = 1
        attributes.append(overlap)
    if cooperative:
        together = driver.CUlaunchAttribute()
        together.id = names.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        together.value.cooperative = 1
        attributes.append(together)
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


def parameters(signature: Sequence[Any], args: Sequence[Any]) -> list[np.generic]:
    """The parameters that a kernel compiled for `signature` reads, in their order.

    An array is (meminfo, parent, number of items, bytes of an item, address, *shape, *strides in
    bytes), each of 64 bits, the first two unused on a GPU; a scalar is itself in its own width; a
    tuple is what it holds. The layout is that of Numba's data model for arrays. The words of a
    tensor map are zeros here.
    """
    flat: list[np.generic] = []
    for kind, value in zip(signature, args, strict=True):
        if isinstance(kind, types.Array):
            array = _array(value)
            address = address_of(array)
            facts = (0, 0, array.size, array.dtype.itemsize, address, *array.shape, *array.strides)
            flat += map(np.int64, facts)
        elif isinstance(value, TensorMap):
            flat += [np.uint64(0)] * PARAMETER_WORDS
        elif isinstance(kind, types.BaseTuple):
            flat += parameters(tuple(kind), value)
        elif isinstance(kind, types.Integer | types.Float):
            flat.append(np.dtype(str(kind)).type(value))
        elif isinstance(kind, types.Boolean):
            flat.append(np.bool_(value))
        else:
            raise TypeError(f"a kernel cannot be launched with {value!r}, which Numba calls {kind}")
    return flat


def _array(value: Any) -> Any:
    """A placeholder, or Numba's array on the memory of an array of any library."""
    if isinstance(value, Placeholder | DeviceNDArray):
        return value
    return cuda.as_cuda_array(value, sync=False)


def address_of(value: Any) -> int:
    """Where an array begins on the GPU; a placeholder, where it pretends to."""
    array = _array(value)
    if isinstance(array, Placeholder):
        return array.address
    return array.device_ctypes_pointer.value or 0


def stream_handle(stream: Any) -> int:
    """The driver's handle of a stream of any library.

    0 or None is the default stream and an int a handle. Of other objects it is what
    `__cuda_stream__` (Numba, cuda.core, its graph builders), `cuda_stream` (torch) or `ptr` (CuPy)
    says; they must outlive the work on them. TypeError for what is not a stream.
    """
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


def _allow_shared(code: CompiledKernel, kernel: Any, source: Launch) -> None:
    """Raise the kernel's limit of dynamic shared memory, once for each size that needs it.

    Above 48 KB in all a launch fails with CUDA_ERROR_INVALID_VALUE until the function's attribute
    is raised, which numba-cuda does not do (its issue 94).
    """
    size = source.shared_bytes
    if kernel.attrs.shared + size <= DEFAULT_SHARED_BYTES:
        return
    device = cuda.get_current_device().id
    allowed = _allowed.setdefault(code, {})
    if size <= allowed.get(device, 0):
        return
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (error,) = driver.cuKernelSetAttribute(attribute, size, kernel.handle, device)
    _must(error, f"{source.kernel.__name__} with {size} bytes of dynamic shared memory")
    allowed[device] = size


def _require_room(source: Launch, function: Any) -> None:
    """No cooperative launch, which would check this too: that begins when the launch before it has
    ended, whatever `overlap` says."""
    threads, blocks = prod(source.block), prod(source.grid)
    of_sm = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor
    error, most = of_sm(driver.CUfunction(int(function)), threads, source.shared_bytes)
    _must(error, f"counting the thread blocks of {source.kernel.__name__} on an SM")
    room = int(most) * int(cuda.get_current_device().MULTIPROCESSOR_COUNT)
    if blocks > room:
        raise RuntimeError(
            f"{source.kernel.__name__} has {blocks} thread blocks that wait for each other, and "
            f"this GPU has room for {room} at once"
        )


def _must(error: Any, what: str) -> None:
    if error:
        raise RuntimeError(f"{what} is not possible on this GPU: {error.name}")
