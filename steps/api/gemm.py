"""`gemm` and `pack`: checked products over ggml's blocks, by the best step for this machine.

    from steps import gemm, pack

    c = gemm(a, w)                  # a: floats [M, K]; w: blocks [N, K/32] of qformats
    packed = pack(w)                # repacked and uploaded once ...
    c = gemm(a, packed)             # ... for any number of products
    plan = gemm.plan(m, packed)     # all that products of M tokens need, made once ...
    plan(a, out)                    # ... and launched in microseconds: see `steps.api.plan`

NumPy in, NumPy out. For `a` on the GPU (a Numba, torch or CuPy array: anything that has
`__cuda_array_interface__`) the result is a Numba device array, which those libraries take without a
copy; the work is queued on the caller's stream. `a` in float16 or bfloat16 goes to steps that read
it as it is: nothing here casts it. NumPy has no bfloat16: such arrays are uint16.

All arguments are checked before a launch, and an error leaves `out` as it was. Values on the GPU
are not checked for NaN and infinity, as that would cost a pass over them. The one exception are the
steps that keep activations in 36-byte blocks, whose float16 sums can overflow: for them `a` is
fetched and checked. No such step is chosen for its speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from qformats import FORMATS, Format
from reference.bfloat16 import bfloat16_values
from steps.api.choice import (
    Asked,
    Choice,
    choose,
    known_accuracy,
    launch_configuration,
    packing_step,
    step_numbers,
    supporting,
)
from steps.api.operands import (
    ARRAYS,
    activations_facts,
    as_array,
    blocks_of,
    float_name,
    is_device_array,
    require_grid,
    require_out,
    stream_of,
    weight_format,
)
from steps.contract import ACCURACIES, Accuracy, Activations, Family, Launch, Shape, Step
from steps.registry import find

if TYPE_CHECKING:
    from qformats.gguf_file import Tensor
    from steps.api.machines import Gpu, Simulator


@dataclass(frozen=True, slots=True)
class Packed:
    """Weights [N, K] of one format on one machine, in the layout that all of `steps` read. Made by
    `pack`; M decides which of these steps multiplies.

    family   : the only family of products with them, None for either.
    accuracy : of products that do not name one.
    """

    steps: tuple[Step, ...]
    family: Family | None
    accuracy: Accuracy
    format: str
    n: int
    k: int
    arrays: tuple[Any, ...]
    machine: Gpu | Simulator

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
               (`steps.api.choice`), and serves every step that reads it.
    family   : "A16" or "A8": products with these weights are of this family; by default of either.
    accuracy : "exact", "fast" or "coarse", see `gemm`: of products that do not name one. The layout
               is that of a step of this accuracy, if there is one.
    machine  : by default the current GPU; `steps.api.machines.Simulator()` needs none, and is slow.

    Raises TypeError for what are no blocks, ValueError for blocks without a finite scale and where
    no step can multiply them, RuntimeError without a GPU.
    """
    blocks = blocks_of(w)
    fmt = weight_format(blocks)
    where = machine_for(machine)
    known_accuracy(accuracy)
    if step is None:
        layout = packing_step(fmt.name, family, where.cc, accuracy).pack
        every = supporting(fmt.name, family, where.cc, accuracy=ACCURACIES[-1])
        steps = tuple(one for one in every if one.pack is layout)
    else:
        steps = (find(step),)
        if why := steps[0].supports(fmt.name, family or steps[0].families[-1], where.cc):
            raise ValueError(why)
    n, blocks_k = blocks.shape
    arrays = tuple(where.array(array) for array in steps[0].pack(blocks))
    where.synchronize()  # an upload may be read on any stream from here on
    return Packed(steps, family, accuracy, fmt.name, n, blocks_k * fmt.elements, arrays, where)


def gemm(
    a: Any,
    w: np.ndarray | Tensor | Packed,
    *,
    step: int | None = None,
    out: Any = None,
    dtype: Any = np.float32,
    family: Family | None = None,
    accuracy: Accuracy | None = None,
    machine: Gpu | Simulator | None = None,
    stream: Any = None,
    explain: bool = False,
) -> Any:
    """C[M, N] = A[M, K] @ dequantize(W)[N, K]^T.

    a       : float32, float16 or bfloat16 [M, K], C-contiguous, NumPy or on the GPU, there in 16
              bits at a multiple of 16 bytes; M is at least 1.
    w       : blocks [N, K/32], of K-quants [N, K/256], a NumPy array of a dtype of `qformats` (a
              view too); a tensor of a file, see `pack`; or what `pack` made of them.
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
              "coarse" also allows steps that approximate block scales by small integers: on normal
              data it adds 12 % to the error of Q4_0, 17 % to Q4_1, 76 % to Q5_0 and 93 % to Q5_1.
              Neither is ever used unless it is asked for, here, by `step` or in `pack`.
    machine : where to multiply; by default the current GPU.
    stream  : where to queue the work: a stream of Numba, cuda.core, torch or CuPy, or a handle. By
              default the current stream of the library of `a` (torch, CuPy), else the default
              stream.
    explain : return (C, `steps.api.choice.Choice`); `print` of the latter says which step it was,
              how it was launched and why.

    Returns C: `out` where it was given, else a new array of the same kind as `a`.
    Raises TypeError for arrays of a wrong kind or dtype, ValueError for wrong shapes, values or
    options, RuntimeError without a GPU. Each is one sentence that names the numbers.
    """
    w, a = blocks_of(w), as_array(a)
    result, out = out, as_array(out)
    on_device = is_device_array(a)
    m, k, input = activations_facts(a, on_device)
    fmt, n, packed_k = weights_shape(w)
    if packed_k != k:
        raise ValueError(
            f"a has K={k} columns and w has {packed_k // fmt.elements} blocks of {fmt.elements} in "
            f"a row, K={packed_k}: they must be equal"
        )
    if not on_device:
        finite = np.isfinite(bfloat16_values(a) if input == "bfloat16" else a)
        if not finite.all():
            raise ValueError(f"a has {np.count_nonzero(~finite)} values that are NaN or Inf")
    output = float_name(dtype)
    require_out(out, a, m, n, on_device, output)

    where = machine_for(machine, w)
    if on_device and where.cc is None:
        raise TypeError(f"a is on a GPU and the machine is the {where.name}: pass a NumPy array")
    choice = choice_for(fmt, Shape(m, n, k), w, where, step, family, output, accuracy, input)
    weights = w if isinstance(w, Packed) else pack(w, step=choice.step.number, machine=where)
    if stream is None and on_device:
        stream = stream_of(a)
    if stream is not None:
        where = where.on(stream)

    source = _as_numba(a) if on_device else where.array(a)
    if on_device and out is not None:
        target = _as_numba(out)
    else:
        target = where.empty((m, n), ARRAYS[output])
    activations, own = prepare(choice, where, weights.arrays, source, target)
    if activations.layout == "blocks":
        # refuses what would overflow the float16 d or s of a 36-byte block
        FORMATS["q8_1"].quantize(where.host(source) if on_device else a)
    for launch in (*activations.launches, own):
        where.run(launch)
    c = target if on_device else where.host(target)
    if out is not None:
        if not on_device:
            out[...] = c
        c = result
    return (c, replace(choice, configuration=launch_configuration(own))) if explain else c


def prepare(
    choice: Choice, machine: Gpu | Simulator, weights: Sequence[Any], a: Any, out: Any
) -> tuple[Activations, Launch]:
    """The activations and the step's own launch of a product, on arrays of the machine. ValueError
    for more thread blocks than CUDA launches."""
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
) -> Choice:
    """`steps.api.choice.choose`, among the steps that can read `w` where it is packed already."""
    among = None
    if isinstance(w, Packed):
        if step is not None and find(step).pack is not w.steps[0].pack:
            raise ValueError(f"w is packed for {step_numbers(w.steps)}, not for step {step}")
        among, family = w.steps, family or w.family
        if step is None and accuracy is not None:  # counts more than what w was packed for
            asked = Asked(fmt.name, family, machine.cc, output, input)
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
    from steps.api.machines import Gpu

    return Gpu()


def _as_numba(array: Any) -> Any:
    from numba import cuda

    # Not waited for: the work is queued on the stream that the array's own work is on.
    return cuda.as_cuda_array(array, sync=False)
