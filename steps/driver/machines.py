"""Machines: where a `Launch` runs, on a GPU or in the simulator on any CPU.

    machine = best_machine()                 # a GPU where there is one
    a = machine.array(numpy_array)
    machine.run(launch)
    c = machine.host(out)

Both kinds have the methods of `steps.contract.Machine`, `synchronize`, and `on(stream)`.
"""

from __future__ import annotations

from copy import copy
from math import prod
from typing import Any

import numpy as np
from numba import cuda

from steps.contract import Launch, why_no_gpu
from steps.driver.launcher import load, stream_handle
from steps.simulator.banks import BankCounter
from steps.simulator.launch import simulate
from steps.simulator.stream import Stream


class Simulator:
    """Runs kernels in Python, one lane at a time; threads wait for each other. `order` seeds the
    order of the lanes, and `banks` counts their bank conflicts in shared memory. `launches`: those
    that may still run where the next one may overlap with them; copies to and from the host wait
    for all of them."""

    name = "simulator"
    cc: tuple[int, int] | None = None

    def __init__(self, order: int = 0, banks: BankCounter | None = None) -> None:
        self.order = order
        self.banks = banks
        self.launches = Stream()

    def array(self, host: np.ndarray) -> np.ndarray:
        self.synchronize()
        return np.array(host, order="C")

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Memory full of garbage, NaN in floats, so that a kernel that reads it before writing is
        noticed."""
        dtype = np.dtype(dtype)
        byte = 0xFF if dtype.kind == "f" else 0xA5
        return np.full((*shape, dtype.itemsize), byte, np.uint8).view(dtype)[..., 0]

    def host(self, array: np.ndarray) -> np.ndarray:
        self.synchronize()
        return array

    def run(self, launch: Launch) -> None:
        simulate(
            launch.kernel,
            launch.grid,
            launch.block,
            launch.args,
            order=self.order,
            shared_bytes=launch.shared_bytes,
            resident=prod(launch.grid) if launch.together else 1,
            banks=self.banks,
            stream=self.launches,
            overlap=launch.overlap,
        )

    def follow(self, array: np.ndarray) -> None:
        """The next launch comes right after one that stores to this array."""
        self.launches.begin(overlap=False)
        self.launches.ended("another kernel", [(array, True)])

    def synchronize(self) -> None:
        self.launches.synchronize()

    def on(self, stream: Any) -> Simulator:
        return self


class Gpu:
    """Runs kernels on the current CUDA device, and copies, on one stream.

    `stream`: 0, the default stream; a handle; or a stream of Numba, cuda.core, torch or CuPy.
    RuntimeError where there is no GPU.
    """

    def __init__(self, stream: Any = 0) -> None:
        reason = why_no_gpu()
        if reason is not None:
            raise RuntimeError(
                f"no CUDA GPU can be used here: {reason}; "
                "machine=steps.driver.machines.Simulator() needs none, and is slow"
            )
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
        self._owner = stream  # keeps it alive: its handle alone would not

    def on(self, stream: Any) -> Gpu:
        """The same GPU, on another stream."""
        other = copy(self)
        other._use(stream)
        return other

    def is_captured(self) -> bool:
        """Whether the stream is recorded into a CUDA graph: nothing on it can be waited for."""
        from cuda.bindings import driver

        error, status = driver.cuStreamIsCapturing(self.stream)
        none = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
        return bool(error) or status != none

    def array(self, host: np.ndarray) -> Any:
        return cuda.to_device(np.ascontiguousarray(host), stream=self._numba_stream)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return cuda.device_array(shape, dtype, stream=self._numba_stream)

    def host(self, array: Any) -> np.ndarray:
        values: np.ndarray = array.copy_to_host(stream=self._numba_stream)
        if self._numba_stream:
            self._numba_stream.synchronize()  # on a named stream a copy is only queued
        return values

    def run(self, launch: Launch) -> None:
        load(launch)(self.stream)

    def resources(self, launch: Launch) -> dict[str, int]:
        """What a launch's kernel takes: `steps.driver.launcher.Loaded.resources`."""
        return load(launch).resources()

    def synchronize(self) -> None:
        cuda.synchronize()


def best_machine() -> Simulator | Gpu:
    """A GPU where there is one, else the simulator."""
    return Simulator() if why_no_gpu() else Gpu()
