"""Plans: all that products of one shape need, made once; a call then only launches.

A call checks type, shape, contiguity and address of both arrays, puts the two addresses into its
launches (`steps.product.prepared`) and launches one or two kernels, at a few microseconds of host
time each. It allocates nothing, copies nothing, waits for nothing and looks at no value (but for
steps 2 to 4, see `steps.product.gemm`). The arrays may be Numba's, torch's or CuPy's, others in
each call.

A call may be captured into a CUDA graph, which replays it with the addresses it had then:

    with torch.cuda.graph(graph):               builder.begin_building()      # cuda.core
        plan(a, out)                            plan(a, out, stream=builder)
    graph.replay()                              graph = builder.end_building().complete()

Keep the plan, `a` and `out` as long as the graph. A plan owns the workspace of its kernels, so its
calls must run one after the other: one stream at a time, one host thread at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from steps.contract import Accuracy, Family
from steps.product.choice import Request
from steps.product.gemm import (
    Packed,
    asked_of,
    chosen,
    machine_for,
    new_memory,
    product_of,
    reads_blocks,
    require_sums_in_blocks,
    weights_shape,
)
from steps.product.operands import (
    ARRAYS,
    as_array,
    bias_dtype,
    blocks_of,
    float_name,
    is_device_array,
    require_apart,
    require_array,
    require_out,
)

if TYPE_CHECKING:
    from qformats.gguf_file import Tensor
    from steps.driver.machines import Gpu, Simulator


def plan(
    m: int,
    w: np.ndarray | Tensor | Packed,
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
    fmt, n, k = weights_shape(w)
    where = machine_for(machine, w)
    output, read, given = float_name(dtype), float_name(input, "input"), as_array("bias", bias)
    on_device = is_device_array(given)
    of_bias = None if bias is None else bias_dtype(given, n, on_device)
    if on_device and where.cc is None:
        raise TypeError(f"bias is on a GPU and the machine is the {where.name}: pass a NumPy array")
    request = Request(
        fmt.name, int(m), n, k, read, output, of_bias, "exact" if accuracy is None else accuracy,
        family, step, invariant=invariant,
    )  # fmt: skip
    request = asked_of(w, request, named=accuracy is not None)
    return Plan(w, request, where, stream, bias)


class Plan:
    """A prepared product, see `plan`. `choice` says which kernel it is and why."""

    def __init__(
        self, w: Any, request: Request, machine: Gpu | Simulator, stream: Any, bias: Any
    ) -> None:
        self._machine, self._stream = machine, stream
        if machine.cc is None:
            self._prepare(w, request, bias)
            return
        self._product = product_of(w, request, machine)
        self.choice, made = self._product.choice, self._product.made
        self._bias = machine.array(bias) if isinstance(bias, np.ndarray) else bias
        if request.bias:
            self._product.address_of_bias(self._bias)
        self._memory = new_memory(machine, made.zeroed, made.nbytes)

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
        if out is None:
            raise TypeError("out must be on the GPU (with __cuda_array_interface__), got NoneType")
        stream = self._stream if stream is None else stream
        self._product(a, out, stream, self._bias, self._memory)
        return None

    # --- in the simulator, whose arrays are NumPy's ---

    def _prepare(self, w: Any, request: Request, bias: np.ndarray | None) -> None:
        """Make the launches, on arrays of the plan."""
        choice, weights = chosen(w, request, self._machine)
        self._a = self._machine.empty((request.m, request.k), ARRAYS[request.a])
        self._out = self._machine.empty((request.m, request.n), ARRAYS[request.c])
        arrays = weights.arrays if bias is None else (*weights.arrays, self._machine.array(bias))
        activations, own = choice.on(self._machine, arrays, self._a, self._out)
        self._launches = (*activations.launches, own)
        self.choice = choice.launched(own)

    def _simulate(self, a: Any, out: Any) -> None:
        """The same as a call on a GPU."""
        asked = self.choice.request
        for name, x, own, dtype in (("a", a, self._a, asked.a), ("out", out, self._out, asked.c)):
            if require_array(name, x, False, (dtype,), 2)[0] != own.shape:
                raise ValueError(f"{name} must have shape {list(own.shape)}, got {list(x.shape)}")
        require_out(out, self._out.shape, False, asked.c)
        require_apart(out, a=a)
        if reads_blocks(self.choice):
            require_sums_in_blocks(a)
        self._a[...] = a
        for launch in self._launches:
            self._machine.run(launch)
        out[...] = self._out
