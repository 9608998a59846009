"""`gemm` and `pack`: checked products over ggml's blocks, by the best step for this machine.

    from steps import gemm, pack

    c = gemm(a, w)                  # a: floats [M, K]; w: blocks [N, K/32] of qformats
    packed = pack(w)                # repacked and uploaded once ...
    c = gemm(a, packed)             # ... for any number of products
    plan = gemm.plan(m, packed)     # all that products of M tokens need, made once ...
    plan(a, out)                    # ... and launched in microseconds: see `steps.product.plan`

NumPy in, NumPy out; a tensor of torch or an array of CuPy in, the same out. For another array on
the GPU (Numba's: anything that has `__cuda_array_interface__`) the result is Numba's. The work is
queued on the caller's stream. `a` in float16 or bfloat16 goes to steps that read it as it is:
nothing here casts it. NumPy has no bfloat16: such arrays are uint16.

Products on the GPU with weights that `pack` made are prepared once: `Packed` keeps the launches of
the `CALLS` last ones, by shape, dtype and options. A call like an earlier one finds them by these,
checks what may differ (the arrays' layout and addresses), and launches. What kernels work in
besides is kept for each stream, so a call that is captured into a CUDA graph should be a plan's.

All arguments are checked before a launch, and an error leaves `out` as it was. Values on the GPU
are not checked for NaN and infinity, as that would cost a pass over them: a NaN makes its row of C
NaN, an infinity makes it NaN or infinite, in every step, and other rows are what they are without
it. The one exception are the steps that keep activations in 36-byte blocks, whose float16 scales
and sums can overflow: for them `a` is fetched and checked, and values below 4e-6 may count as 0. No
such step is chosen for its speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from qformats import FORMATS, Format
from steps.contract import (
    ACCURACIES,
    Accuracy,
    Activations,
    Family,
    Kernel,
    Launch,
    Shape,
    known_accuracy,
)
from steps.driver.kept import Kept
from steps.kernels.parts.activations.layouts import q8_1_blocks, reading_of
from steps.product.choice import (
    Asked,
    Choice,
    choose,
    launch_configuration,
    packing_step,
    step_numbers,
    supporting,
)
from steps.product.operands import (
    ARRAYS,
    activations_facts,
    address,
    as_array,
    bias_dtype,
    blocks_of,
    empty_beside,
    float_name,
    is_device_array,
    require_finite,
    require_grid,
    require_out,
    require_place,
    require_start_of_a,
    stream_of,
    weight_format,
)
from steps.registry import find

if TYPE_CHECKING:
    from qformats.gguf_file import Tensor
    from steps.driver.machines import Gpu, Simulator


CALLS: Final = 512
"""Prepared products that packed weights keep: some KB of host memory each, none of the GPU's."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Weights [N, K] of one format on one machine, in the layout that all of `steps` read. Made by
    `pack`; M decides which of these steps multiplies.

    family   : the only family of products with them, None for either.
    accuracy : of products that do not name one.
    """

    steps: tuple[Kernel, ...]
    family: Family | None
    accuracy: Accuracy
    format: str
    n: int
    k: int
    arrays: tuple[Any, ...]
    machine: Gpu | Simulator
    calls: Kept[_Call] = field(init=False, default_factory=lambda: Kept(CALLS), compare=False)

    def __repr__(self) -> str:
        return f"Packed({self.format} [{self.n}, {self.k}] for {step_numbers(self.steps)})"


def pack(
    w: np.ndarray | Tensor,
    *,
    step: int | None = None,
    family: Family | None = None,
    accuracy: Accuracy = "exact",
    machine: Gpu | Simulator | None = None,
) -> Packed:
    """Weights, repacked as steps read them and uploaded once, for any number of products.

    w        : blocks, a NumPy array [N, K/32], of K-quants [N, K/256], or a tensor of a file
               (`qformats.gguf_file`).
    step     : pack for this step alone. By default the layout is that of the highest default step
               (`steps.product.choice`), and serves every step that reads it.
    family   : "A16" or "A8": products with these weights are of this family; by default of either.
    accuracy : "exact" or "fast", see `gemm`: of products that do not name one. The layout is that
               of a step of this accuracy, if there is one.
    machine  : by default the current GPU; `steps.driver.machines.Simulator()` needs none, and is
    slow.

    Raises TypeError for what are no blocks, ValueError for blocks without a finite scale and where
    no step can multiply them, RuntimeError without a GPU.
    """
    blocks = blocks_of(w)
    fmt = weight_format(blocks)
    where = machine_for(machine)
    known_accuracy(accuracy)
    n, k = blocks.shape[0], blocks.shape[1] * fmt.elements
    if step is None:
        layout = packing_step(fmt.name, family, where.cc, accuracy, k).pack
        every = supporting(fmt.name, family, where.cc, accuracy=ACCURACIES[-1], k=k)
        steps = tuple(one for one in every if one.pack is layout)
    else:
        steps = (find(step),)
        if why := Asked(fmt.name, family, where.cc, k=k).why_not(steps[0]):
            raise ValueError(why)
    arrays = tuple(where.array(array) for array in steps[0].pack(blocks))
    where.synchronize()  # an upload may be read on any stream from here on
    return Packed(steps, family, accuracy, fmt.name, n, k, arrays, where)


def gemm(
    a: Any,
    w: np.ndarray | Tensor | Packed,
    *,
    bias: Any = None,
    step: int | None = None,
    out: Any = None,
    dtype: Any = np.float32,
    family: Family | None = None,
    accuracy: Accuracy | None = None,
    invariant: bool = False,
    machine: Gpu | Simulator | None = None,
    stream: Any = None,
    explain: bool = False,
) -> Any:
    """C[M, N] = A[M, K] @ dequantize(W)[N, K]^T + bias[N].

    a       : float32, float16 or bfloat16 [M, K], C-contiguous, NumPy or on the GPU, there in 16
              bits at a multiple of 16 bytes; M is at least 1.
    w       : blocks [N, K/32], of K-quants [N, K/256], a NumPy array of a dtype of `qformats` (a
              view too); a tensor of a file, see `pack`; or what `pack` made of them.
    bias    : None, or float32, float16 or bfloat16 [N], C-contiguous, of the same kind as `a`. The
              step adds it to sums in float32, before C is rounded. ValueError for another shape,
              and where no step that can do the rest adds one.
    step    : the number of one step. By default the fastest that was measured at such a shape on
              such a GPU (`make tune`), else the highest default step that the GPU can run.
    out     : where to write C: [M, N] of `dtype`, C-contiguous, of the same kind as `a`.
    dtype   : of C: float32, float16 or bfloat16, which not every step writes. Values beyond 65504
              become infinite in float16.
    family  : "A16" multiplies floats; float32 is rounded to float16 by steps on tensor cores. "A8"
              quantizes them to int8 with a scale per 32 values (Q8_1). By default the faster.
    accuracy: "exact", the default, multiplies the weights that the format stores (scales of
              K-quants rounded to float16, `qformats.storage`). "fast" allows steps that requantize
              the weights to int8 with one scale per row, and `a` to int8 with one per token: on
              normal data that adds 2 % to the error of Q4_0, and several times its own to that of
              Q8_0; where a few channels of `a` are 20 times the others, 50 % to that of Q4_0.
              It is never used unless it is asked for, here, by `step` or in `pack`; nor for K
              beyond 132096, more than the integer sums hold.
    invariant : up to M=16 a row of C has the same bits whatever M is and whatever the other rows
              are, as whoever verifies drafted tokens needs. Such products are of the highest decode
              step and of family A16, and may take longer. ValueError where there is none.
    machine : where to multiply; by default the current GPU.
    stream  : where to queue the work: a stream of Numba, cuda.core, torch or CuPy, or a handle. By
              default the current stream of the library of `a` (torch, CuPy), else the default
              stream.
    explain : return (C, `steps.product.choice.Choice`); `print` of the latter says which step it
              was, how it was launched and why.

    Returns C: `out` where it was given, else a new array of the library of `a`.
    Raises TypeError for arrays of a wrong kind or dtype, ValueError for wrong shapes, values or
    options, RuntimeError without a GPU. Each is one sentence that names the numbers.
    """
    key = _key(a, step, dtype, family, accuracy, invariant, getattr(bias, "dtype", bias))
    if key and type(w) is Packed and machine in (None, w.machine) and not explain:
        known = w.calls.get(key)
        if known is not None:
            return known(a, out, stream, bias)
    w, given, result, added = blocks_of(w), a, out, bias
    a, out, bias = as_array("a", a), as_array("out", out), as_array("bias", bias)
    on_device = is_device_array(a)
    m, k, input = activations_facts(a, on_device)
    fmt, n, packed_k = weights_shape(w)
    if packed_k != k:
        raise ValueError(
            f"a has K={k} columns and w has {packed_k // fmt.elements} blocks of {fmt.elements} in "
            f"a row, K={packed_k}: they must be equal"
        )
    if not on_device:
        require_finite("a", a, input)
    of_bias = None if bias is None else bias_dtype(bias, n, on_device)
    output = float_name(dtype)
    require_out(out, a, m, n, on_device, output)

    where = machine_for(machine, w)
    if on_device and where.cc is None:
        raise TypeError(f"a is on a GPU and the machine is the {where.name}: pass a NumPy array")
    shape = Shape(m, n, k, invariant)
    biased = bias is not None
    choice = choice_for(fmt, shape, w, where, step, family, output, accuracy, input, biased)
    weights = w if isinstance(w, Packed) else pack(w, step=choice.step.number, machine=where)
    if on_device:
        call = _Call(choice, weights, input, output, of_bias)
        if key:
            call = weights.calls.put(key, call)
        c = call(given, result, stream, added)
        return (c, call.choice) if explain else c

    if stream is not None:
        where = where.on(stream)
    source, target = where.array(a), where.empty((m, n), ARRAYS[output])
    arrays = (*weights.arrays, where.array(bias)) if biased else weights.arrays
    activations, own = prepare(choice, where, arrays, source, target)
    if uses_blocks(choice, input):
        require_sums_in_blocks(a)
    for launch in (*activations.launches, own):
        where.run(launch)
    c = where.host(target)
    if out is not None:
        out[...] = c
        c = out
    return (c, replace(choice, configuration=launch_configuration(own))) if explain else c


def prepare(
    choice: Choice, machine: Gpu | Simulator, weights: Sequence[Any], a: Any, out: Any
) -> tuple[Activations, Launch]:
    """The activations and the step's own launch of a product, on arrays of the machine; a bias
    stands behind the packed weights. ValueError for more thread blocks than CUDA launches."""
    step, shape = choice.step, choice.shape
    activations = step.activations(choice.family, a, machine)
    own = step.prepare(
        machine,
        FORMATS[choice.format],
        choice.family,
        shape,
        tuple(weights),
        activations.arrays,
        out,
    )
    for launch in (*activations.launches, own):
        require_grid(launch, shape.m, shape.n)
    return activations, own


def uses_blocks(choice: Choice, input: str) -> bool:
    """Whether a product keeps A in 36-byte blocks, whose float16 d and s end at 65504."""
    return reading_of(choice.step, input, choice.family)[0] is q8_1_blocks


def require_sums_in_blocks(a: np.ndarray) -> None:
    """ValueError for what would overflow the float16 d or s of a 36-byte block. Rows with a NaN or
    infinity are let pass: their outputs are not finite."""
    finite = np.isfinite(a).all(axis=1, keepdims=True)
    FORMATS["q8_1"].quantize(np.where(finite, a, np.float32(0)))


def require_sums_on_gpu(a: Any, machine: Any, stream: int) -> None:
    """The same of an array on the GPU, which is fetched. In a stream that is captured into a CUDA
    graph nothing can be: overflows are infinite or NaN there."""
    where = machine.on(stream)
    if not where.is_captured():
        require_sums_in_blocks(where.host(_as_numba(as_array("a", a))))


# --- on a GPU, with packed weights ----------------------------------------------------------------


def _key(a: Any, *options: Any) -> tuple[Any, ...] | None:
    """What the launches of a product depend on; None for a NumPy array, whose products are not
    prepared, and for what cannot be a key."""
    if type(a) is np.ndarray:
        return None
    try:
        key = (type(a), a.shape, a.dtype, *options)
        hash(key)
    except (AttributeError, TypeError):
        return None
    return key


class _Call:
    """A product of arrays on the GPU, prepared: call it with (a, out, stream, bias)."""

    __slots__ = (
        "_a_bytes", "_a_shape", "_bias_bytes", "_device", "_handle_of", "_in_blocks", "_input",
        "_machine", "_of_bias", "_out_bytes", "_out_shape", "_output", "_template", "_weights",
        "choice",
    )  # fmt: skip

    def __init__(
        self, choice: Choice, weights: Packed, input: str, output: str, of_bias: str | None
    ) -> None:
        from steps.driver.launcher import address_of, stream_handle
        from steps.product.launch_template import LaunchTemplate

        m, n, k = choice.shape.m, choice.shape.n, choice.shape.k
        types = [(array.shape, array.dtype) for array in weights.arrays]
        self._template = LaunchTemplate(choice, types, output=output, input=input, bias=of_bias)
        self.choice, self._machine = self._template.choice, weights.machine
        self._weights = tuple(map(address_of, weights.arrays))
        self._device, self._handle_of = current_device(), stream_handle
        self._input, self._a_shape, self._a_bytes = input, (m, k), ARRAYS[input].itemsize * m * k
        self._output, self._out_shape = output, (m, n)
        self._out_bytes = ARRAYS[output].itemsize * m * n
        self._of_bias = of_bias
        self._bias_bytes = ARRAYS[of_bias].itemsize * n if of_bias else 0
        self._in_blocks = uses_blocks(choice, input)

    def __call__(self, a: Any, out: Any, stream: Any, bias: Any) -> Any:
        """C, `out` or a new array; errors as of `gemm`."""
        source = address("a", a, self._a_shape, self._device, self._input)
        require_start_of_a(source, self._input)
        weights = self._weights
        if self._of_bias:
            added = address("bias", bias, self._out_shape[1:], self._device, self._of_bias)
            weights = (*weights, added)
        if out is None:
            out = empty_beside(a, self._out_shape, self._output, self._machine)
            target = address("out", out, self._out_shape, self._device, self._output)
        else:
            target = address("out", out, self._out_shape, self._device, self._output)
            require_place(target, self._out_bytes, source, self._a_bytes)
            if self._of_bias:
                require_place(target, self._out_bytes, added, self._bias_bytes, "bias")
        template = self._template
        handle = self._handle_of(stream_of(a) if stream is None else stream)
        if self._in_blocks:
            require_sums_on_gpu(a, self._machine, handle)
        memory = _memory_of(self._machine, (self._device, handle), template)
        template(source, target, weights, memory.zeros, memory.workspace, handle)
        return out


class _Memory(NamedTuple):
    """What kernels of a stream work in, which run one after the other: arrays and addresses."""

    arrays: tuple[Any, Any]
    zeroed: int
    nbytes: int
    zeros: int
    workspace: int


_memory: dict[tuple[int, int], _Memory] = {}  # by (device, stream)


def _memory_of(machine: Gpu | Simulator, key: tuple[int, int], template: Any) -> _Memory:
    """Zeros that kernels leave zero, and a workspace; at least what a template needs."""
    found = _memory.get(key)
    if found is None or found.zeroed < template.zeroed or found.nbytes < template.nbytes:
        from steps.driver.launcher import address_of

        zeroed, nbytes = template.zeroed, template.nbytes
        if found is not None:  # freed when all that was queued is done
            zeroed, nbytes = max(zeroed, found.zeroed), max(nbytes, found.nbytes)
        zeros = machine.array(np.zeros(max(zeroed, 1), np.uint8))
        workspace = machine.empty((max(nbytes, 1),), np.uint8)
        machine.synchronize()  # what was set to zero may be used on any stream from here on
        places = address_of(zeros), address_of(workspace)
        found = _memory[key] = _Memory((zeros, workspace), zeroed, nbytes, *places)
    return found


def current_device() -> int:
    """The number of the GPU that launches go to."""
    from numba import cuda

    return int(cuda.get_current_device().id)


# --- what a product needs to know -----------------------------------------------------------------


def choice_for(
    fmt: Format,
    shape: Shape,
    w: Any,
    machine: Gpu | Simulator,
    step: int | None,
    family: Family | None,
    output: str = "float32",
    accuracy: Accuracy | None = None,
    input: str = "float32",
    biased: bool = False,
) -> Choice:
    """`steps.product.choice.choose`, among the steps that can read `w` where it is packed
    already."""
    among = None
    if isinstance(w, Packed):
        if step is not None and find(step).pack is not w.steps[0].pack:
            raise ValueError(f"w is packed for {step_numbers(w.steps)}, not for step {step}")
        among, family = w.steps, family or w.family
        if step is None and accuracy is not None:  # counts more than what w was packed for
            asked = Asked(fmt.name, family, machine.cc, output, input, k=shape.k, biased=biased)
            asked.supporting(among, accuracy)
        accuracy = accuracy or w.accuracy
    return choose(
        fmt.name,
        shape,
        machine,
        step=step,
        family=family,
        among=among,
        output=output,
        accuracy=accuracy or "exact",
        input=input,
        biased=biased,
    )


def weights_shape(w: Any) -> tuple[Format, int, int]:
    """(format, N, K)"""
    if isinstance(w, Packed):
        return FORMATS[w.format], w.n, w.k
    fmt = weight_format(w)
    return fmt, w.shape[0], w.shape[1] * fmt.elements


def machine_for(asked: Gpu | Simulator | None, w: Any = None) -> Gpu | Simulator:
    """The machine to multiply on; packed weights lie on one already."""
    if isinstance(w, Packed):
        if asked is not None and asked is not w.machine:
            raise ValueError(f"w is packed on {w.machine.name}, not on {asked.name}")
        return w.machine
    if asked is not None:
        return asked
    from steps.driver.machines import Gpu

    return Gpu()


def _as_numba(array: Any) -> Any:
    from numba import cuda

    # Not waited for: the work is queued on the stream that the array's own work is on.
    return cuda.as_cuda_array(array, sync=False)
