"""Plans: all that products of one shape need, made once; a call then only launches.

    plan = gemm.plan(m, w)          # w: blocks, or what `pack` made of them
    plan(a, out)                    # a: float32 [m, K], out: float32 [m, N], both on the GPU

A call checks type, shape, contiguity and address of both arrays, puts the two addresses where the
kernels expect them and launches: one kernel, or two for a step with an activation pass, at a few
microseconds of host time each. Nothing is allocated, copied or waited for, no value looked at. The
arrays may be Numba's, torch's or CuPy's, others in each call. The work is queued on the stream on
which their library works at that moment, or on the `stream` that the plan or the call names.

A call may be captured into a CUDA graph, which replays it with the addresses it had then:

    with torch.cuda.graph(graph):               builder.begin_building()      # cuda.core
        plan(a, out)                            plan(a, out, stream=builder)
    graph.replay()                              graph = builder.end_building().complete()

Keep the plan, `a` and `out` as long as the graph. The quantized activations lie in memory of the
plan, so its calls must run one after the other: one stream at a time, one host thread at a time.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from qformats import FORMATS
from steps.api import gemm as door
from steps.api.choice import Choice, cut
from steps.api.operands import (
    OUTPUTS,
    address,
    blocks_of,
    output_dtype,
    require_grid,
    require_matrix,
    require_place,
    stream_of,
)
from steps.contract import Accuracy, Family, Shape

if TYPE_CHECKING:
    from qformats.gguf_file import Tensor
    from steps.api.machines import Gpu, Simulator

A: Final = 1 << 60
OUT: Final = 1 << 61
"""Addresses that no array has: they stand in the arguments of a plan where a and out will be."""


def plan(
    m: int,
    w: np.ndarray | Tensor | door.Packed,
    *,
    dtype: Any = np.float32,
    step: int | None = None,
    family: Family | None = None,
    accuracy: Accuracy | None = None,
    stream: Any = None,
    machine: Gpu | Simulator | None = None,
) -> Plan:
    """A prepared product of `m` tokens with weights `w`: call it with (a, out).

    m            : the tokens of each call, at least 1.
    w            : blocks [N, K/32] of a dtype of `qformats`, a tensor of a file, or what
                   `steps.pack` made of them; many plans may share one handle.
    dtype        : of `out`, float32 or float16, see `steps.gemm`.
    step, family, accuracy : as for `steps.gemm`, decided now and told by `plan.choice`.
    stream       : where every call is queued, see `steps.gemm`; by default the stream on which the
                   library of `a` works when it is called.
    """
    if isinstance(m, bool) or not isinstance(m, int | np.integer) or m < 1:
        raise ValueError(f"a plan is for a number of tokens from 1 up, got {m!r}")
    w = blocks_of(w)
    fmt, n, k = door.weights_shape(w)
    where = door.machine_for(machine, w)
    output = output_dtype(dtype)
    choice = door.choice_for(
        fmt, Shape(int(m), n, k), w, where, step, family, output.name, accuracy
    )
    packed = (
        w if isinstance(w, door.Packed) else door.pack(w, step=choice.step.number, machine=where)
    )
    return Plan(choice, packed, where, stream, output)


class Plan:
    """A prepared product, see `plan`. `choice` says which step it is and why."""

    def __init__(
        self,
        choice: Choice,
        weights: door.Packed,
        machine: Gpu | Simulator,
        stream: Any = None,
        dtype: np.dtype[Any] = OUTPUTS[0],
    ) -> None:
        m, n, k = choice.shape.m, choice.shape.n, choice.shape.k
        on_gpu = machine.cc is not None
        self._machine, self._stream, self._dtype = machine, stream, dtype
        self._a_shape, self._out_shape = (m, k), (m, n)
        self._a_bytes, self._out_bytes = 4 * m * k, dtype.itemsize * m * n
        self._a = nowhere(A, (m, k)) if on_gpu else machine.empty((m, k), np.float32)
        self._out = nowhere(OUT, (m, n), dtype) if on_gpu else machine.empty((m, n), dtype)
        activations = choice.step.activations(choice.family, self._a, machine)
        own = choice.step.prepare(
            machine,
            FORMATS[choice.format],
            choice.family,
            choice.shape,
            weights.arrays,
            activations.arrays,
            self._out,
        )
        self.choice = replace(choice, cut=cut(own))
        self._launches = (*activations.launches, own)
        for launch in self._launches:
            require_grid(launch, m, n)
        if on_gpu:
            self._load()
        machine.synchronize()  # what was set to zero may be used on any stream from here on

    def __repr__(self) -> str:
        return f"Plan({self.choice})"

    def __call__(self, a: Any, out: Any, *, stream: Any = None) -> None:
        """Queue out[:] = a @ dequantize(W)^T; returns before it is done.

        a      : float32 [M, K] of the plan, C-contiguous, on the GPU.
        out    : [M, N] of the plan's dtype, C-contiguous, on the GPU, at a multiple of 16 bytes,
                 apart from a.
        stream : for this call alone, such as a cuda.core graph builder.
        TypeError or ValueError, and nothing launched, for arrays that the plan is not made for.
        """
        if self._machine.cc is None:
            return self._simulate(a, out)
        source = address("a", a, self._a_shape, self._device)
        target = address("out", out, self._out_shape, self._device, self._dtype)
        require_place(target, self._out_bytes, source, self._a_bytes)
        for arguments, i, of_a, offset in self._places:
            arguments[i] = (source if of_a else target) + offset
        if stream is None:
            stream = stream_of(a) if self._stream is None else self._stream
        handle = self._handle_of(stream)
        for loaded in self._loaded:
            loaded(handle)
        return None

    def _load(self) -> None:
        """Compile and lay out both launches, and note where the addresses of a and out stand."""
        from steps.api.launcher import load, stream_handle

        self._handle_of, self._device = stream_handle, current_device()
        self._loaded = [load(launch) for launch in self._launches]
        self._places = [
            (loaded.arguments, i, start == A, offset)  # arguments[i] = address + offset
            for loaded in self._loaded
            for start, size in ((A, self._a_bytes), (OUT, self._out_bytes))
            for i, offset in loaded.within(start, size)
        ]

    def _simulate(self, a: Any, out: Any) -> None:
        """The same in the simulator, whose arrays are NumPy's."""
        for name, x, shape, dtype in (
            ("a", a, self._a_shape, OUTPUTS[0]),
            ("out", out, self._out_shape, self._dtype),
        ):
            if require_matrix(name, x, False, dtype) != shape:
                raise ValueError(f"{name} must have the plan's shape {shape}, got {x.shape}")
        self._a[...] = a
        for launch in self._launches:
            self._machine.run(launch)
        out[...] = self._out


def current_device() -> int:
    """The number of the GPU that launches go to."""
    from numba import cuda

    return int(cuda.get_current_device().id)


def nowhere(start: int, shape: tuple[int, ...], dtype: np.dtype[Any] = OUTPUTS[0]) -> Any:
    """An array that is nowhere, for laying out arguments."""
    from numba import cuda

    facts = {"shape": shape, "typestr": dtype.str, "data": (start, False), "strides": None}
    return cuda.as_cuda_array(SimpleNamespace(__cuda_array_interface__={**facts, "version": 3}))
