"""A GPU as host code sees it, without one: arrays without memory, launches that are recorded."""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import steps.instructions  # noqa: F401  (before numba.cuda)
from steps.compile.compiler import signature_of
from steps.compile.dry_run import Placeholder
from steps.contract import Launch
from steps.driver import encode_map, launcher
from steps.product import gemm as gemm_api


def device_array(shape: tuple[int, ...], dtype: Any, address: int, strides: Any = None) -> Any:
    """A Numba device array at an address where nothing is; one without items takes a GPU to make,
    so a placeholder stands for it."""
    if not np.prod(shape):
        return Placeholder(0, shape, np.dtype(dtype))
    from cuda.bindings.driver import CUdeviceptr
    from numba.cuda.cudadrv.devicearray import DeviceNDArray
    from numba.cuda.cudadrv.driver import MemoryPointer

    like = np.lib.stride_tricks.as_strided(np.empty(1, dtype), shape, strides)
    strides = strides or np.empty(shape, dtype).strides
    memory = MemoryPointer(None, CUdeviceptr(address), max(like.nbytes, 1))
    return DeviceNDArray(shape, strides, np.dtype(dtype), gpu_data=memory)


TYPESTR = {
    **{"float32": "<f4", "float16": "<f2", "uint16": "<u2"},
    **{"uint8": "|u1", "int32": "<i4", "int64": "<i8"},
}


class Tensor:
    """A float32 tensor as torch has it. `__cuda_array_interface__` knows no bfloat16, as that of
    NumPy's dtypes does not."""

    def __init__(self, shape: tuple[int, ...], address: int, **changes: Any) -> None:
        self.shape, self.dtype, self.is_cuda = shape, "float32", True
        self.address, self.contiguous, self.device_index = address, True, 0
        self.requires_grad = False
        self.__dict__.update(changes)

    def data_ptr(self) -> int:
        return self.address

    def is_contiguous(self) -> bool:
        return self.contiguous

    def get_device(self) -> int:
        return self.device_index

    def view(self, dtype: str) -> Tensor:
        return Tensor(**{**self.__dict__, "dtype": dtype})

    def detach(self) -> Tensor:
        return Tensor(**{**self.__dict__, "requires_grad": False})

    def new_empty(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        return Tensor(shape, next(NEW), dtype=dtype)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if not self.is_cuda:
            raise AttributeError("this tensor is on the CPU")
        if self.requires_grad:
            raise RuntimeError("Can't get __cuda_array_interface__ on Variable that requires grad.")
        typestr = TYPESTR[self.dtype]
        strides = None if self.contiguous else (4, 4 * self.shape[0])
        return {
            "shape": self.shape,
            "typestr": typestr,
            "data": (self.address, False),
            "strides": strides,
            "version": 2,
        }


NEW = itertools.count(1 << 47, 1 << 24)
"""Addresses of new tensors."""


def torch_of(current_stream: int, grad_enabled: bool = True) -> Any:
    """As much of torch as is asked for here."""
    raw = SimpleNamespace(_cuda_getCurrentRawStream=lambda device: current_stream)
    names = (*TYPESTR, "bfloat16")
    return SimpleNamespace(
        Tensor=Tensor,
        _C=raw,
        is_grad_enabled=lambda: grad_enabled,
        **{name: name for name in names},
    )


@dataclass
class FakeGpu:
    """A machine without memory; `launched` has (kernel, stream, parameters) in order."""

    name: str = "Fake GPU"
    cc: tuple[int, int] | None = (9, 0)
    sms: int = 132
    launched: list[tuple[str, int, tuple[int, ...]]] = field(default_factory=list)
    addresses: Iterator[int] = field(default_factory=lambda: itertools.count(1 << 40, 1 << 24))

    def array(self, host: np.ndarray) -> Any:
        return device_array(host.shape, host.dtype, next(self.addresses))

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return device_array(shape, dtype, next(self.addresses))

    def values(self) -> set[int]:
        """Every value that the launches were given."""
        return {value for _, _, values in self.launched for value in values}

    def synchronize(self) -> None:
        pass

    def on(self, stream: Any) -> FakeGpu:
        return self

    def is_captured(self) -> bool:
        """As its arrays cannot be fetched."""
        return True

    def load(self, launch: Launch) -> launcher.Loaded:
        """`steps.driver.launcher.load`, but nothing is compiled."""
        from cuda.bindings.driver import CUlaunchConfig

        arguments = launcher.parameters(signature_of(launch.args), launch.args)
        return launcher.Loaded(launch, None, (self, launch), CUlaunchConfig(), arguments)


def stream_in(config: int) -> int:
    """The hStream of a `CUlaunchConfig` at an address."""
    return ctypes.c_void_p.from_address(config + launcher.STREAM_AT).value or 0


def record_launch(config: int, function: Any, pointers: int, extra: None) -> int:
    """cuLaunchKernelEx, which reads the parameters through their pointers."""
    gpu, launch = function
    count = len(launcher.parameters(signature_of(launch.args), launch.args))
    table = (ctypes.c_void_p * count).from_address(pointers)
    values = tuple(ctypes.c_uint64.from_address(at).value for at in table)
    gpu.launched.append((launch.kernel.__name__, stream_in(config), values))
    return 0


def encode(at: int, kind: int, rank: int, address: int, *described: Any) -> int:
    """cuTensorMapEncodeTiled; the map says in plain words what it was told."""
    assert at % 64 == 0, "the driver refuses another place"
    extents, row_bytes, box, element_strides, *modes = described
    words = [address, *extents, *row_bytes, *box, *element_strides, kind, rank, *modes, 0, 0]
    (ctypes.c_uint64 * 16).from_address(at)[:] = words
    return 0


def encoded(address: int, m: int, k: int, tokens: int) -> tuple[int, ...]:
    """The map of A[m, k] as `encode` leaves it: float16 in two dimensions, boxes of 64 K, element
    by element, not interleaved, swizzled over 128 bytes, 256 bytes of L2, zeros beyond."""
    return (address, k, m, 2 * k, 64, tokens, 1, 1, 6, 2, 0, 3, 3, 0, 0, 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """A machine for plans; the driver under `steps.driver.launcher` records launches."""
    fake = FakeGpu()
    monkeypatch.setattr(launcher, "load", fake.load)
    monkeypatch.setattr(launcher, "launch_function", lambda: record_launch)
    monkeypatch.setattr(encode_map, "driver_function", lambda: encode)
    monkeypatch.setattr(launcher, "_thread", SimpleNamespace(has_context=True))
    monkeypatch.setattr(gemm_api, "current_device", lambda: 0)
    monkeypatch.setattr(gemm_api, "_memory", {})
    return fake


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torch, whose current stream is 4711."""
    module = torch_of(current_stream=4711)
    monkeypatch.setitem(sys.modules, "torch", module)
    return module
