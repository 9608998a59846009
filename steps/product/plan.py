"""Plans: all that products of one shape need, made once; a call then only launches.

    plan = gemm.plan(m, w)          # w: blocks, or what `pack` made of them
    plan(a, out)                    # a: float32 [m, K], out: float32 [m, N], both on the GPU

    plan = gemm.plan(m, w, input="float16", dtype="float16")        # a and out as most models do

A call checks type, shape, contiguity and address of both arrays, puts the two addresses into a
launch template (`steps.product.launch_template`) and launches one or two kernels, at a few
microseconds of host time each. It allocates nothing, copies nothing, waits for nothing and looks at
no value. (Steps with 36-byte blocks are the exception, as in `steps.product.gemm`: outside of a
graph `a` is fetched and checked.)
The arrays may be Numba's, torch's or CuPy's, others in each call. The work is queued on the current
stream of their library, or on the `stream` that the plan or the call names.

A call may be captured into a CUDA graph, which replays it with the addresses it had then:

    with torch.cuda.graph(graph):               builder.begin_building()      # cuda.core
        plan(a, out)                            plan(a, out, stream=builder)
    graph.replay()                              graph = builder.end_building().complete()

Keep the plan, `a` and `out` as long as the graph. A plan owns the workspace of its kernels, so its
calls must run one after the other: one stream at a time, one host thread at a time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from steps.contract import Accuracy, Family, Shape
from steps.product import gemm as api
from steps.product.choice import Choice, launch_configuration
from steps.product.launch_template import LaunchTemplate
from steps.product.operands import (
    ARRAYS,
    address,
    as_array,
    bias_dtype,
    blocks_of,
    float_name,
    is_device_array,
    require_matrix,
    require_place,
    require_start_of_a,
    stream_of,
)

if TYPE_CHECKING:
    from qformats.gguf_file import Tensor
    from steps.driver.machines import Gpu, Simulator


def plan(
    m: int,
    w: np.ndarray | Tensor | api.Packed,
    *,
    bias: Any = None,
    dtype: Any = np.float32,
    input: Any = np.float32,
    step: int | None = None,
    family: Family | None = None,
    accuracy: Accuracy | None = None,
    invariant: bool = False,
    stream: Any = None,
    machine: Gpu | Simulator | None = None,
) -> Plan:
    """A prepared product of `m` tokens with weights `w`: call it with (a, out).

    m       : tokens of each call, at least 1.
    w       : blocks [N, K/32], of K-quants [N, K/256], of a dtype of `qformats`; a tensor of a
              file; or what `steps.pack` made of them, which many plans may share.
    bias    : None, or float32, float16 or bfloat16 [N], which every call adds, see `steps.gemm`: a
              NumPy array, which is uploaded now, or one on the GPU, which calls read where it lies.
    dtype   : of `out`, see `steps.gemm`: float32, float16 or bfloat16.
    input   : the dtype of `a`, likewise.
    step, family, accuracy, invariant : as for `steps.gemm`; the choice is made now, `plan.choice`
              tells it.
    stream  : where every call is queued, see `steps.gemm`; by default the current stream of the
              library of `a`.
    machine : where to multiply, see `steps.gemm`.

    Raises what `steps.gemm` does. Kernels that were not used before are compiled, in seconds.
    """
    if isinstance(m, bool) or not isinstance(m, int | np.integer) or m < 1:
        raise ValueError(f"m is {m!r}: a plan needs a number of tokens from 1 up")
    w = blocks_of(w)
    fmt, n, k = api.weights_shape(w)
    where = api.machine_for(machine, w)
    floats = float_name(dtype), float_name(input, "input")
    shape, biased, given = Shape(int(m), n, k, invariant), bias is not None, as_array("bias", bias)
    on_device = is_device_array(given)
    of_bias = bias_dtype(given, n, on_device) if biased else None
    if on_device and where.cc is None:
        raise TypeError(f"bias is on a GPU and the machine is the {where.name}: pass a NumPy array")
    choice = api.choice_for(
        fmt, shape, w, where, step, family, floats[0], accuracy, floats[1], biased
    )
    packed = w if isinstance(w, api.Packed) else api.pack(w, step=choice.step.number, machine=where)
    if biased and not on_device:
        bias = where.array(given)
    return Plan(choice, packed, where, stream, *floats, bias=bias, of_bias=of_bias)


class Plan:
    """A prepared product, see `plan`. `choice` says which step it is and why."""

    def __init__(
        self,
        choice: Choice,
        weights: api.Packed,
        machine: Gpu | Simulator,
        stream: Any = None,
        output: str = "float32",
        input: str = "float32",
        bias: Any = None,
        of_bias: str | None = None,
    ) -> None:
        m, n, k = choice.shape.m, choice.shape.n, choice.shape.k
        self._machine, self._stream = machine, stream
        self._input, self._output = input, output
        self._a_shape, self._out_shape = (m, k), (m, n)
        self._a_bytes = ARRAYS[input].itemsize * m * k
        self._out_bytes = ARRAYS[output].itemsize * m * n
        self._weights, self._bias, self._of_bias = weights, bias, of_bias
        self._in_blocks = api.uses_blocks(choice, input)
        self.choice = self._prepare(choice) if machine.cc is None else self._load(choice)
        machine.synchronize()  # what was set to zero may be used on any stream from here on

    def __repr__(self) -> str:
        return f"Plan({self.choice})"

    def __call__(self, a: Any, out: Any, *, stream: Any = None) -> None:
        """Queue out[:] = a @ dequantize(W)^T + bias; returns before it is done.

        a      : [M, K] of the plan's input, C-contiguous, on the GPU; in 16 bits at a multiple of
                 16 bytes.
        out    : [M, N] of the plan's dtype, C-contiguous, on the GPU, at a multiple of 16 bytes,
                 apart from a.
        stream : for this call alone, such as a cuda.core graph builder.
        Raises TypeError or ValueError, and launches nothing, for arrays that do not fit.
        """
        if self._machine.cc is None:
            return self._simulate(a, out)
        source = address("a", a, self._a_shape, self._device, self._input)
        target = address("out", out, self._out_shape, self._device, self._output)
        require_start_of_a(source, self._input)
        require_place(target, self._out_bytes, source, self._a_bytes)
        if self._of_bias:
            require_place(target, self._out_bytes, self._packed[-1], self._bias_bytes, "bias")
        if stream is None:
            stream = stream_of(a) if self._stream is None else self._stream
        handle = self._handle_of(stream)
        if self._in_blocks:
            api.require_sums_on_gpu(a, self._machine, handle)
        zeros, workspace = self._work_in
        self._template(source, target, self._packed, zeros, workspace, handle)
        return None

    # --- on a GPU ---

    def _load(self, choice: Choice) -> Choice:
        """Load the kernels, and find all addresses but those of a and out."""
        from steps.driver.launcher import address_of, stream_handle

        self._handle_of, self._device = stream_handle, api.current_device()
        weights = self._weights.arrays
        types = [(array.shape, array.dtype) for array in weights]
        template = LaunchTemplate(
            choice, types, output=self._output, input=self._input, bias=self._of_bias
        )
        zeros = (
            self._machine.array(np.zeros(template.zeroed, np.uint8)) if template.zeroed else None
        )
        workspace = self._machine.empty((template.nbytes,), np.uint8) if template.nbytes else None
        self._template, self._memory = template, (zeros, workspace)
        self._packed = tuple(map(address_of, weights))
        if self._of_bias:
            n = self._out_shape[1:]
            self._packed += (address("bias", self._bias, n, self._device, self._of_bias),)
            self._bias_bytes = ARRAYS[self._of_bias].itemsize * n[0]
        self._work_in = [0 if array is None else address_of(array) for array in self._memory]
        return template.choice

    # --- in the simulator, whose arrays are NumPy's ---

    def _prepare(self, choice: Choice) -> Choice:
        """Make the launches, on arrays of the plan."""
        self._a = self._machine.empty(self._a_shape, ARRAYS[self._input])
        self._out = self._machine.empty(self._out_shape, ARRAYS[self._output])
        weights = self._weights.arrays
        if self._bias is not None:
            weights = (*weights, self._bias)
        activations, own = api.prepare(choice, self._machine, weights, self._a, self._out)
        self._launches = (*activations.launches, own)
        return replace(choice, configuration=launch_configuration(own))

    def _simulate(self, a: Any, out: Any) -> None:
        """The same as a call on a GPU."""
        for name, x, shape, dtype in (
            ("a", a, self._a_shape, self._input),
            ("out", out, self._out_shape, self._output),
        ):
            if require_matrix(name, x, False, (dtype,))[:2] != shape:
                raise ValueError(f"{name} must have shape {list(shape)}, got {list(x.shape)}")
        if self._in_blocks:
            api.require_sums_in_blocks(a)
        self._a[...] = a
        for launch in self._launches:
            self._machine.run(launch)
        out[...] = self._out
