"""The front door: a checked GEMM over ggml's blocks, by the best step that this machine can run.

    from steps import gemm, pack

    c = gemm(a, w)                  # a: float32 [M, K]; w: blocks [N, K/32] of qformats
    handle = pack(w)                # repacked and uploaded once ...
    c = gemm(a, handle)             # ... for any number of products

NumPy in, NumPy out. For `a` on the GPU (a Numba, torch or CuPy array: anything that has
`__cuda_array_interface__`) the result is a Numba device array, which those libraries take without a
copy; the work is queued on the default stream. Everything is checked before anything is launched,
and nothing is written on an error. One thing is not checked: whether values on the GPU are finite,
as that would cost a pass over them. (Only where a step keeps activations in 36-byte blocks, in
which large sums overflow, are they fetched and looked at: no such step is taken for its speed.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from qformats import BLOCK, FORMATS, WEIGHT_FORMATS, Format, format_of
from steps.registry import find, ladder
from steps.step import Family, Launch, Machine, Shape, Step

GRID_LIMITS: Final = (2**31 - 1, 65535, 65535)
"""Thread blocks along x, y and z that CUDA launches at most."""

ALIGNMENT: Final = 16
"""Bytes of the widest access of any step: an output must begin at a multiple of it."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Weights [N, K] of one format, packed for one step on one machine. Made by `pack`."""

    step: Step
    format: str
    n: int
    k: int
    arrays: tuple[Any, ...]
    machine: Machine

    def __repr__(self) -> str:
        return f"Packed({self.format} [{self.n}, {self.k}] for step {self.step.number})"


def pack(
    w: np.ndarray,
    *,
    step: int | None = None,
    family: Family | None = None,
    machine: Machine | None = None,
) -> Packed:
    """Blocks [N, K/32] -> a handle whose weights lie on the machine as the step reads them.

    step, family : one in particular; by default the best there is, see `gemm`.
    machine      : by default the current GPU; `steps.machines.Simulator()` needs none, and is slow.
    """
    fmt = _weight_format(w)
    where = _machine(machine)
    chosen, _ = choose(fmt.name, step, family, _capability(where))
    n, blocks_k = w.shape
    arrays = tuple(where.array(array) for array in chosen.pack(w))
    return Packed(chosen, fmt.name, n, blocks_k * BLOCK, arrays, where)


def gemm(
    a: Any,
    w: np.ndarray | Packed,
    *,
    step: int | None = None,
    out: Any = None,
    family: Family | None = None,
    machine: Machine | None = None,
) -> Any:
    """C[M, N] = A[M, K] @ dequantize(W)[N, K]^T in float32.

    a       : float32 [M, K], C-contiguous, NumPy or on the GPU.
    w       : blocks [N, K/32], a NumPy array of a dtype of `qformats` (a view too), or what `pack`
              made of them.
    step    : the number of one step; by default the highest that takes the format on this device.
    family  : "A16" multiplies float32 activations, "A8" quantizes them to Q8_1 first; by default
              whichever the step does best.
    out     : where to write C: float32 [M, N], C-contiguous, of the same kind as `a`.
    machine : where to multiply; by default the current GPU.

    Returns C: `out` where it was given, else a new array of the same kind as `a`.
    Raises TypeError, ValueError (one sentence that names the numbers) or RuntimeError (no GPU).
    """
    on_device = _is_device_array(a)
    m, k = _activations_shape(a, on_device)
    fmt, n, packed_k = _weights_shape(w)
    if packed_k != k:
        raise ValueError(
            f"a has K={k} columns and w has {packed_k // BLOCK} blocks of {BLOCK} in a row, "
            f"K={packed_k}: they must be equal"
        )
    if not on_device and not np.isfinite(a).all():
        raise ValueError(f"a has {np.count_nonzero(~np.isfinite(a))} values that are NaN or Inf")
    _require_out(out, a, m, n, on_device)

    where = _machine(machine, w.machine if isinstance(w, Packed) else None)
    if on_device and _capability(where) is None:
        raise TypeError(f"a lies on a GPU and the machine is the {where.name}: pass a NumPy array")
    if isinstance(w, Packed):
        weights, chosen = w, w.step
        if step not in (None, chosen.number):
            raise ValueError(f"w is packed for step {chosen.number}, not for step {step}")
        _, of_family = choose(fmt.name, chosen.number, family, _capability(where))
    else:
        chosen, of_family = choose(fmt.name, step, family, _capability(where))
        weights = pack(w, step=chosen.number, machine=where)

    source = _as_numba(a) if on_device else where.array(a)
    target = _as_numba(out) if on_device and out is not None else where.empty((m, n), np.float32)
    activations = chosen.activations(of_family, source, where)
    if activations.layout == "blocks":
        # refuses what would overflow the f16 d or s of a 36-byte block
        FORMATS["q8_1"].quantize(where.host(source) if on_device else a)
    own = chosen.prepare(
        where, fmt, of_family, Shape(m, n, k), weights.arrays, activations.arrays, target
    )
    launches = (*activations.launches, own)
    for launch in launches:
        _require_grid(launch, m, n)
    for launch in launches:
        where.run(launch)
    if on_device:
        return target if out is None else out
    c = where.host(target)
    if out is None:
        return c
    out[...] = c
    return out


def choose(
    format_name: str,
    step: int | None = None,
    family: str | None = None,
    cc: tuple[int, int] | None = None,
) -> tuple[Step, Family]:
    """(step, family): the one asked for, or the highest step that supports the work.

    ValueError with the step's own reason where there is none.
    """
    if family not in (None, "A16", "A8"):
        raise ValueError(f"unknown family {family!r}: use A16 or A8")
    candidates: Sequence[Step] = ladder()[::-1] if step is None else (find(step),)
    why = "there is no step"
    for candidate in candidates:
        wanted = family or candidate.families[-1]
        reason = candidate.supports(format_name, wanted, cc)
        if reason is None:
            return candidate, wanted  # type: ignore[return-value]
        why = reason
    raise ValueError(why if step is not None else f"no step can do this: {why}")


# --- what comes through the door ------------------------------------------------------------------


def _is_device_array(x: Any) -> bool:
    return not isinstance(x, np.ndarray) and hasattr(x, "__cuda_array_interface__")


def _activations_shape(a: Any, on_device: bool) -> tuple[int, int]:
    """(M, K) of activations that a kernel can read."""
    shape = _require_matrix("a", a, on_device)
    m, k = shape
    if m < 1 or k < 1:
        raise ValueError(f"a is empty: its shape is {shape}")
    if k % BLOCK:
        raise ValueError(
            f"K={k} is not a multiple of the block of {BLOCK}: pad a with zeros to "
            f"{-(-k // BLOCK) * BLOCK} columns"
        )
    return m, k


def _require_matrix(name: str, x: Any, on_device: bool) -> tuple[int, int]:
    """The shape of a float32, 2-dimensional, C-contiguous array; an error names what it is not."""
    if not on_device and not isinstance(x, np.ndarray):
        raise TypeError(
            f"{name} must be a NumPy array or one on the GPU (with __cuda_array_interface__), "
            f"got {type(x).__name__}"
        )
    facts = x.__cuda_array_interface__ if on_device else x.__array_interface__
    dtype, shape = np.dtype(facts["typestr"]), tuple(facts["shape"])
    if dtype != np.float32 or not dtype.isnative:
        raise TypeError(f"{name} must be float32, got {dtype}")
    if len(shape) != 2:
        raise ValueError(f"{name} must have 2 dimensions, got {len(shape)}: its shape is {shape}")
    strides = facts.get("strides")
    contiguous = (shape[1] * dtype.itemsize, dtype.itemsize)
    if strides is not None and 0 not in shape and tuple(strides) != contiguous:
        ok = all(s == c or e == 1 for s, c, e in zip(strides, contiguous, shape, strict=True))
        if not ok:
            raise ValueError(
                f"{name} must be C-contiguous, got strides {tuple(strides)} for shape {shape}: "
                "make a contiguous copy"
            )
    if on_device and (past := facts["data"][0] % dtype.itemsize):
        raise ValueError(
            f"{name} begins {past} bytes past a multiple of {dtype.itemsize}, where a GPU reads no "
            f"{dtype}: make an aligned copy"
        )
    return shape[0], shape[1]


def _weight_format(w: Any) -> Format:
    """The format of host blocks [N, K/32]."""
    if not isinstance(w, np.ndarray):
        raise TypeError(
            f"w must be blocks as a NumPy array, or what steps.door.pack made of them, got "
            f"{type(w).__name__}"
        )
    known = {FORMATS[name].dtype: FORMATS[name] for name in WEIGHT_FORMATS}
    if w.dtype not in known:
        what = "a Q8_1 block is for activations" if w.dtype == FORMATS["q8_1"].dtype else w.dtype
        raise TypeError(
            f"w must hold blocks of {', '.join(WEIGHT_FORMATS)} (see qformats.quantize), got {what}"
        )
    if w.ndim != 2:
        raise ValueError(f"w must have shape [N, K/32], got {w.ndim} dimensions: {w.shape}")
    if w.size == 0:
        raise ValueError(f"w is empty: its shape is {w.shape}")
    for field in ("d", "m"):
        if field in (w.dtype.names or ()) and not np.isfinite(w[field]).all():
            n, b = np.argwhere(~np.isfinite(w[field]))[0]
            raise ValueError(f"w has {field} = {w[field][n, b]} in block {b} of row {n}")
    return format_of(w)


def _weights_shape(w: Any) -> tuple[Format, int, int]:
    """(format, N, K)"""
    if isinstance(w, Packed):
        return FORMATS[w.format], w.n, w.k
    fmt = _weight_format(w)
    return fmt, w.shape[0], w.shape[1] * BLOCK


def _require_out(out: Any, a: Any, m: int, n: int, on_device: bool) -> None:
    if out is None:
        return
    if _is_device_array(out) != on_device:
        kinds = ("on the GPU", "a NumPy array")
        raise TypeError(f"out must be {kinds[not on_device]}, as a is")
    shape = _require_matrix("out", out, on_device)
    if shape != (m, n):
        raise ValueError(f"out must have shape [M, N] = [{m}, {n}], got {list(shape)}")
    if on_device:
        start, read_only = out.__cuda_array_interface__["data"]
        source = a.__cuda_array_interface__["data"][0]
        k = a.__cuda_array_interface__["shape"][1]
        if start < source + 4 * m * k and source < start + 4 * m * n:
            raise ValueError("out overlaps a: a kernel would overwrite what it still reads")
    else:
        read_only = not out.flags.writeable
    if read_only:
        raise ValueError("out is read-only")
    if on_device and start % ALIGNMENT:
        raise ValueError(
            f"out begins {start % ALIGNMENT} bytes past a multiple of {ALIGNMENT}, where 128-bit "
            "stores must begin: use an array of its own, or a view that skips whole groups of 4"
        )


def _machine(asked: Machine | None, of_weights: Machine | None = None) -> Machine:
    """The machine to multiply on; packed weights lie on one already."""
    if of_weights is not None:
        if asked is not None and asked is not of_weights:
            raise ValueError(f"w is packed on {of_weights.name}, not on {asked.name}")
        return of_weights
    if asked is not None:
        return asked
    from steps.machines import Gpu

    return Gpu()


def _capability(machine: Machine) -> tuple[int, int] | None:
    """The compute capability of a GPU; None for the simulator."""
    return getattr(machine, "cc", None)


def _as_numba(array: Any) -> Any:
    from numba import cuda

    return cuda.as_cuda_array(array)


def _require_grid(launch: Launch, m: int, n: int) -> None:
    """ValueError for a product with more thread blocks than CUDA launches."""
    for axis, extent, limit in zip("xyz", launch.grid, GRID_LIMITS, strict=False):
        if extent > limit:
            raise ValueError(
                f"M={m}, N={n} needs {extent} thread blocks along {axis}, CUDA launches at most "
                f"{limit}: multiply fewer tokens at a time"
            )
