"""The GPU's path of layers without one: kernels run in the simulator, on tensors of the CPU."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from steps.compile.compiler import signature_of
from steps.driver import encode_map, launcher
from steps.instructions.tensor_map import PADDING_WORDS, PARAMETER_WORDS, TensorMap
from steps.nn import operator as torch_operator
from steps.product import rows as product_rows
from steps.simulator.launch import simulate
from tests.driver.fake_gpu import FakeGpu, encode, stream_in


class OnTheHost(FakeGpu):
    """A GPU whose memory is the host's: kernels run in the simulator at the addresses they get."""

    def launch(self, config: int, function: Any, pointers: int, extra: None) -> int:
        _, launch = function
        count = len(launcher.parameters(signature_of(launch.args), launch.args))
        table = (ctypes.c_void_p * count).from_address(pointers)
        values = iter([ctypes.c_uint64.from_address(at).value for at in table])
        args = tuple(self.argument(given, values) for given in launch.args)
        self.launched.append((launch.kernel.__name__, stream_in(config), ()))
        if self.runs:
            resident = prod(launch.grid) if launch.together else 1
            rest = {"shared_bytes": launch.shared_bytes, "resident": resident}
            simulate(launch.kernel, launch.grid, launch.block, args, **rest)
        return 0

    runs = True
    """Whether launches run, or are noted alone."""

    def argument(self, given: Any, values: Any) -> Any:
        """An argument as the simulator takes it; arrays where their address says."""
        if isinstance(given, tuple):
            return tuple(self.argument(one, values) for one in given)
        if isinstance(given, TensorMap):
            words = [next(values) for _ in range(PARAMETER_WORDS)]
            return TensorMap(self.array_at(words[PADDING_WORDS], given.array), given.box)
        if isinstance(given, np.generic) or not hasattr(given, "dtype"):  # a number
            next(values)
            return given
        _, _, _, _, address = (next(values) for _ in range(5))
        for _ in range(2 * given.ndim):
            next(values)
        return self.array_at(address, given)

    def array_at(self, address: int, like: Any) -> np.ndarray:
        memory = (ctypes.c_uint8 * (like.size * like.dtype.itemsize)).from_address(address)
        return np.frombuffer(memory, like.dtype).reshape(like.shape)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As much of a GPU as `steps.nn.operator` asks for, all of it on the CPU."""
    fake = OnTheHost()
    monkeypatch.setattr(launcher, "load", fake.load)
    monkeypatch.setattr(launcher, "launch_function", lambda: fake.launch)
    monkeypatch.setattr(encode_map, "driver_function", lambda: encode)
    monkeypatch.setattr(launcher, "_thread", SimpleNamespace(has_context=True))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch_operator, "_machine", lambda: fake)
    monkeypatch.setattr(torch_operator, "_loading_allowed", nullcontext)
    monkeypatch.setattr(torch_operator, "current_stream", lambda device: 77)
    monkeypatch.setattr(torch_operator, "capability", lambda device: fake.cc)
    monkeypatch.setattr(torch_operator, "current_device", lambda: -1)  # a tensor's of the CPU
    monkeypatch.setattr(torch_operator, "upload", lambda array, device: torch.from_numpy(array))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch_operator, "is_capturing", lambda: False)
    monkeypatch.setattr(torch_operator, "_reserves", {})
    monkeypatch.setattr(torch_operator, "_counters", {})
    monkeypatch.setattr(
        torch_operator,
        "new_array",  # in memory that was used before
        lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype).fill_(77),
    )
    forget()
    yield fake
    forget()


def forget() -> None:
    """What is kept of choices and prepared launches."""
    torch_operator._choices.clear()
    torch_operator._prepared.clear()
    torch_operator._unpacking.clear()
    torch_operator._layers.clear()
    torch_operator._looked_for.clear()
    product_rows._prepared.clear()


@pytest.fixture
def cuda() -> Any:
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    forget()
    return torch.device("cuda")
