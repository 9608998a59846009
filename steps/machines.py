"""Where a `Launch` runs: a GPU, or the simulator on any CPU. Nothing else in the house cares.

machine = best_machine()                 # a GPU where there is one
a = machine.array(numpy_array)
machine.run(launch)
c = machine.host(out)
"""

from __future__ import annotations

from copy import copy
from functools import cache
from typing import Any

import numpy as np
from numba import cuda

from steps.instructions.banks import BankCounter
from steps.instructions.simulator import simulate
from steps.launcher import load, stream_handle
from steps.step import Launch

H200_SMS = 132
H200_SHARED = 227 * 1024


class Simulator:
    """Runs kernels in Python, one lane at a time; `order` seeds the order of the lanes, and `banks`
    counts their bank conflicts in shared memory."""

    name = "simulator"
    cc: tuple[int, int] | None = None

    def __init__(self, order: int = 0, banks: BankCounter | None = None) -> None:
        self.order = order
        self.banks = banks

    def array(self, host: np.ndarray) -> np.ndarray:
        return np.array(host, order="C")

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Uninitialised memory: garbage, so that reading it unwritten shows."""
        return np.full(shape, 0xA5, np.uint8).repeat(np.dtype(dtype).itemsize, -1).view(dtype)

    def host(self, array: np.ndarray) -> np.ndarray:
        return array

    def run(self, launch: Launch) -> None:
        simulate(
            launch.kernel,
            launch.grid,
            launch.block,
            launch.args,
            order=self.order,
            shared_bytes=launch.shared_bytes,
            banks=self.banks,
        )

    def synchronize(self) -> None:
        pass

    def on(self, stream: Any) -> Simulator:
        return self


class Gpu:
    """Runs kernels on the current CUDA device, and copies, on one stream.

    `stream`: 0, the default stream; a handle; or a stream of Numba, cuda.core, torch or CuPy.
    """

    def __init__(self, stream: Any = 0) -> None:
        reason = why_no_gpu()
        if reason is not None:
            raise RuntimeError(f"no CUDA GPU can be used here: {reason}")
        device = cuda.get_current_device()
        name = device.name
        self.name = name.decode() if isinstance(name, bytes) else str(name)
        major, minor = device.compute_capability
        self.cc: tuple[int, int] | None = (int(major), int(minor))
        self.sms = int(device.MULTIPROCESSOR_COUNT)
        self._use(stream)

    def _use(self, stream: Any) -> None:
        self.stream = stream_handle(stream)
        self._numba_stream: Any = cuda.external_stream(self.stream) if self.stream else 0
        self._owner = stream  # its handle alone would not keep it alive

    def on(self, stream: Any) -> Gpu:
        """The same GPU, on another stream."""
        other = copy(self)
        other._use(stream)
        return other

    def array(self, host: np.ndarray) -> Any:
        return cuda.to_device(np.ascontiguousarray(host), stream=self._numba_stream)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return cuda.device_array(shape, dtype, stream=self._numba_stream)

    def host(self, array: Any) -> np.ndarray:
        values: np.ndarray = array.copy_to_host(stream=self._numba_stream)
        if self._numba_stream:
            self._numba_stream.synchronize()  # on a stream of its own a copy is only queued
        return values

    def run(self, launch: Launch) -> None:
        load(launch)(self.stream)

    def synchronize(self) -> None:
        cuda.synchronize()


def why_no_gpu() -> str | None:
    """None where a CUDA GPU can be used, else why not, in words that can end a sentence."""
    try:
        if cuda.is_available():
            return None
        error = cuda.cuda_error()
        return str(error).strip().splitlines()[0].rstrip(".") if error else "no device was found"
    except Exception as error:  # a broken driver raises many types; each is a reason, none a crash
        return f"{type(error).__name__}: {error}"


def best_machine() -> Simulator | Gpu:
    """A GPU where there is one, else the simulator."""
    return Simulator() if why_no_gpu() else Gpu()


_pretended: tuple[int, int] | None = None


def pretend(sms: int, shared_bytes: int) -> None:
    """Size kernels for such a GPU, from here on: for a process that compiles and has none."""
    global _pretended
    _pretended = sms, shared_bytes
    multiprocessors.cache_clear()
    shared_memory.cache_clear()


@cache
def multiprocessors() -> int:
    """The SMs of the current GPU; without one those of an H200, for which kernels are sized."""
    if _pretended:
        return _pretended[0]
    return H200_SMS if why_no_gpu() else int(cuda.get_current_device().MULTIPROCESSOR_COUNT)


@cache
def shared_memory() -> int:
    """Bytes of shared memory that one thread block of the current GPU can be given; see above."""
    if _pretended:
        return _pretended[1]
    if why_no_gpu():
        return H200_SHARED
    return int(cuda.get_current_device().MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
