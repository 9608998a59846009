"""The front door: a checked GEMM over ggml's blocks, by the best step that this machine can run.

    from steps import gemm, pack

    c = gemm(a, w)                  # a: float32 [M, K]; w: blocks [N, K/32] of qformats
    handle = pack(w)                # repacked and uploaded once ...
    c = gemm(a, handle)             # ... for any number of products
    plan = gemm.plan(m, handle)     # all that a product of M tokens needs, made once ...
    plan(a, out)                    # ... and launched in microseconds: see `steps.api.plan`

NumPy in, NumPy out. For `a` on the GPU (a Numba, torch or CuPy array: anything that has
`__cuda_array_interface__`) the result is a Numba device array, which those libraries take without a
copy; the work is queued on the caller's stream. Everything is checked before anything is launched,
and nothing is written on an error. One thing is not checked: whether values on the GPU are finite,
as that would cost a pass over them. (Only where a step keeps activations in 36-byte blocks, in
which large sums overflow, are they fetched and looked at: no such step is taken for its speed.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from qformats import FORMATS, Format
from steps.api.choice import Choice, choose, cut, known_accuracy, supporting
from steps.api.operands import (
    activations_shape,
    blocks_of,
    is_device_array,
    output_dtype,
    require_grid,
    require_out,
    stream_of,
    weight_format,
)
from steps.contract import ACCURACIES, Accuracy, Family, Shape, Step
from steps.registry import find

if TYPE_CHECKING:
    from qformats.gguf_file import Tensor
    from steps.api.machines import Gpu, Simulator


@dataclass(frozen=True, slots=True)
class Packed:
    """Weights [N, K] of one format on one machine, laid out for all of `steps`. Made by `pack`.

    Steps that name the same `pack` read the same layout, so one handle serves each of them, and
    which of them multiplies is decided by M. `family` is the one asked for, None for any, and
    `accuracy` what products have where they do not ask for another.
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
        return f"Packed({self.format} [{self.n}, {self.k}] for {numbers(self.steps)})"


def pack(
    w: np.ndarray | Tensor,
    *,
    step: int | None = None,
    family: Family | None = None,
    accuracy: Accuracy = "exact",
    machine: Gpu | Simulator | None = None,
) -> Packed:
    """Blocks [N, K/32] or [N, K/256] -> a handle: weights on the machine, as steps read them.

    w        : blocks, or a tensor of a file (`qformats.gguf_file`), packed from where it is mapped.
    step     : for this one alone; by default for all that share the layout of the highest one.
    family   : for products of this family alone, see `gemm`.
    accuracy : of products with it that do not say another, see `gemm`; the highest step is one of
               this accuracy.
    machine  : by default the current GPU; `steps.api.machines.Simulator()` needs none, and is slow.
    """
    blocks = blocks_of(w)
    fmt = weight_format(blocks)
    where = machine_for(machine)
    known_accuracy(accuracy)
    if step is None:
        allowed = supporting(fmt.name, family, where.cc, accuracy=accuracy)
        # a higher one may be exact all the same, as one for few tokens is
        highest = next((one for one in reversed(allowed) if one.accuracy == accuracy), allowed[-1])
        every = supporting(fmt.name, family, where.cc, accuracy=ACCURACIES[-1])
        steps = tuple(one for one in every if one.pack is highest.pack)
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
    """C[M, N] = A[M, K] @ dequantize(W)[N, K]^T, in float32 or float16.

    a       : float32 [M, K], C-contiguous, NumPy or on the GPU; M is at least 1.
    w       : blocks [N, K/32], of K-quants [N, K/256], a NumPy array of a dtype of `qformats` (a
              view too); a tensor of a file, see `pack`; or what `pack` made of them.
    step    : the number of one step; by default the fastest that was measured at such a shape on
              such a GPU (`make tune`), else the highest that the GPU can run.
    family  : "A16" multiplies float32 activations, rounded to float16 by the steps on tensor cores;
              "A8" quantizes them to Q8_1 first; by default whichever is the faster.
    accuracy: "exact", the default, multiplies the weights that the format stores (K-quants' scales
              rounded to float16, `qformats.storage`); "fast" allows
              steps that requantize them, and `a`, to int8 with one scale a row. That adds 2 % to
              the error of Q4_0 on normal data, half of it where a few channels of `a` are 20 times
              the others, and several times its own to that of Q8_0. "coarse" allows steps that make
              weights of codes and small integers, too: on normal data 12 and 17 % more of Q4_0's
              error and Q4_1's, 76 and 93 % of Q5_0's and Q5_1's. Neither is ever done unasked, and
              weights packed for such a step alone are refused where "exact" is asked for.
    out     : where to write C: [M, N] of `dtype`, C-contiguous, of the same kind as `a`.
    dtype   : of C: float32, or float16, which not every step writes; what is larger than 65504
              becomes infinite there.
    machine : where to multiply; by default the current GPU.
    stream  : where to queue the work: a stream of Numba, cuda.core, torch or CuPy, or a handle. By
              default the stream on which the caller's library works (torch's and CuPy's current
              one), else the default stream.
    explain : return (C, `steps.api.choice.Choice`): which step it was, in which family, cut how, and
              why; `print` of it is a sentence.

    Returns C: `out` where it was given, else a new array of the same kind as `a`.
    Raises TypeError, ValueError (one sentence that names the numbers) or RuntimeError (no GPU).
    """
    w = blocks_of(w)
    on_device = is_device_array(a)
    m, k = activations_shape(a, on_device)
    fmt, n, packed_k = weights_shape(w)
    if packed_k != k:
        raise ValueError(
            f"a has K={k} columns and w has {packed_k // fmt.elements} blocks of {fmt.elements} in "
            f"a row, K={packed_k}: they must be equal"
        )
    if not on_device and not np.isfinite(a).all():
        raise ValueError(f"a has {np.count_nonzero(~np.isfinite(a))} values that are NaN or Inf")
    dtype = output_dtype(dtype)
    require_out(out, a, m, n, on_device, dtype)

    where = machine_for(machine, w)
    if on_device and where.cc is None:
        raise TypeError(f"a lies on a GPU and the machine is the {where.name}: pass a NumPy array")
    choice = choice_for(fmt, Shape(m, n, k), w, where, step, family, dtype.name, accuracy)
    weights = w if isinstance(w, Packed) else pack(w, step=choice.step.number, machine=where)
    if stream is None and on_device:
        stream = stream_of(a)
    if stream is not None:
        where = where.on(stream)

    source = _as_numba(a) if on_device else where.array(a)
    target = _as_numba(out) if on_device and out is not None else where.empty((m, n), dtype)
    activations = choice.step.activations(choice.family, source, where)
    if activations.layout == "blocks":
        # refuses what would overflow the f16 d or s of a 36-byte block
        FORMATS["q8_1"].quantize(where.host(source) if on_device else a)
    own = choice.step.prepare(
        where, fmt, choice.family, choice.shape, weights.arrays, activations.arrays, target
    )
    launches = (*activations.launches, own)
    for launch in launches:
        require_grid(launch, m, n)
    for launch in launches:
        where.run(launch)
    if on_device:
        c = target if out is None else out
    else:
        c = where.host(target)
        if out is not None:
            out[...] = c
            c = out
    return (c, replace(choice, cut=cut(own))) if explain else c


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
) -> Choice:
    """`steps.api.choice.choose`, among the steps that can read `w` where it is packed already."""
    if not isinstance(w, Packed):
        wanted = accuracy or "exact"
        return choose(
            fmt.name, shape, machine, step=step, family=family, output=output, accuracy=wanted
        )
    if step is not None and find(step).pack is not w.steps[0].pack:
        raise ValueError(f"w is packed for {numbers(w.steps)}, not for step {step}")
    asked = family or w.family
    if step is None and accuracy is not None:  # what was packed for one step is no licence any more
        supporting(fmt.name, asked, machine.cc, w.steps, output, accuracy)
    return choose(
        fmt.name,
        shape,
        machine,
        step=step,
        family=asked,
        among=w.steps,
        output=output,
        accuracy=accuracy or w.accuracy,
    )


def numbers(steps: Sequence[Step]) -> str:
    """ "step 2", "steps 7, 8 and 10"."""
    *first, last = (str(step.number) for step in steps)
    return f"steps {', '.join(first)} and {last}" if first else f"step {last}"


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
