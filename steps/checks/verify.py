"""Runs a step on a problem and says whether the result is right, before anybody believes its speed.

The output is pre-filled with NaN and lies between two guard bands; the inputs must come back
unchanged. What is compared with what, and the limits, are in `reference.check`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from qformats import FORMATS
from reference import Q81, Bfloats, Check, Halves, Problem, Tokens, check
from steps.blocks.experts import RowsByIds
from steps.contract import Activations, Family, Kernel, Launch, Machine, Shape, array_dtype
from steps.kernels.parts.activations.layouts import decode, encode

GUARD = 1024
"""Floats on each side of the output that no kernel may touch; KBs, so C is as aligned as alone."""

_CANARY = {
    np.dtype(np.float32): np.float32(-7.25e30),
    np.dtype(np.float16): np.float16(-7.25e3),
    np.dtype(np.uint16): np.uint16(0xF2B7),  # a bfloat16 near the float32
}
_NAN = {np.dtype(np.uint16): np.uint16(0x7FFF)}


@dataclass(frozen=True, slots=True)
class Prepared:
    """One step's operands on a machine, ready to launch: what is checked is what is timed."""

    shape: Shape
    weights: tuple[Any, ...]
    a: Any
    ids: Any
    activations: Activations
    out: Any
    guarded: Any
    launch: Launch


def prepare(
    step: Kernel,
    family: Family,
    format_name: str,
    a: np.ndarray,
    blocks: np.ndarray,
    machine: Machine,
    q81: Q81 | None = None,
    dtype: Any = None,
    packed: Sequence[Any] | None = None,
    ids: np.ndarray | None = None,
) -> Prepared:
    """Operands of C = a[M, K] @ dequantize(blocks[N, K/32])^T on the machine; nothing is launched.
    With `ids`, of blocks [E, N, K/32] of experts, see `steps.blocks.experts`; a lesson on these
    takes the ordinary product for that of one expert.

    `q81`: Q8_1 bits to multiply, and not what the machine would make of `a` (A8 only; where a
    token has one scale, those of tokens of one block).
    `a`: float32, float16, or bfloat16 as uint16. `dtype`: of C, one of `step.outputs`,
    by default the first. `packed`: what `step.pack` makes of the blocks, where it is on the machine
    already.
    """
    shape = Shape(a.shape[0] if ids is None else ids.size, blocks.shape[-2], a.shape[1])
    weights = tuple(packed or (machine.array(array) for array in step.pack(blocks)))
    on_machine = machine.array(a)
    make, chosen = step.activations[family], None
    if isinstance(make, RowsByIds):
        chosen = machine.array(np.zeros((len(a), 1), np.int32) if ids is None else ids)
        experts = blocks.shape[0] if blocks.ndim == 3 else 1
        activations = make(on_machine, machine, chosen, experts)
    else:
        activations = make(on_machine, machine)
    if q81 is not None and activations.layout not in (None, "inside", "rows"):
        bits = Tokens.of_q81(q81) if activations.layout == "tokens" else q81
        arrays = tuple(machine.array(x) for x in encode(activations.layout, bits))
        activations = replace(activations, arrays=arrays, launches=())
    c_dtype = array_dtype(step.outputs[0] if dtype is None else dtype)
    guarded = machine.array(_guarded_nan(shape.m * shape.n, c_dtype))
    out = guarded[GUARD : GUARD + shape.m * shape.n].reshape(shape.m, shape.n)
    launch = step.prepare(
        machine, FORMATS[format_name], family, shape, weights, activations.arrays, out
    )
    return Prepared(shape, weights, on_machine, chosen, activations, out, guarded, launch)


def multiply(prepared: Prepared, machine: Machine) -> np.ndarray:
    """Runs the activation pass and the step; C [M, N] on the host."""
    # In a chain of products the launch before stores A, and may still run when the next one begins.
    # Where there are ids it stores those, too: no row of A is read before them.
    follow = getattr(machine, "follow", None)  # the simulator's
    if follow is not None:
        follow(prepared.a if prepared.ids is None else prepared.ids)
    for launch in (*prepared.activations.launches, prepared.launch):
        machine.run(launch)
    return result(prepared, machine)


def result(prepared: Prepared, machine: Machine) -> np.ndarray:
    """C on the host; RuntimeError if a kernel wrote outside it."""
    host = machine.host(prepared.guarded)
    size = prepared.shape.m * prepared.shape.n
    outside = np.concatenate([host[:GUARD], host[GUARD + size :]])
    if not (outside == _CANARY[host.dtype]).all():
        where = int(np.flatnonzero(outside != _CANARY[host.dtype])[0])
        side = f"{GUARD - where} before" if where < GUARD else f"{where - GUARD} after"
        raise RuntimeError(f"the kernel wrote outside C, {side} its {size} floats")
    return host[GUARD : GUARD + size].reshape(prepared.shape.m, prepared.shape.n)


def verify(
    step: Kernel,
    family: Family,
    problem: Problem,
    machine: Machine,
    q81: Q81 | None = None,
    dtype: Any = None,
) -> Check:
    """Checks one step on one problem: values, guard bands, and that its inputs are unchanged.
    A comes as `problem.input`, C is written as `dtype`."""
    a, blocks, ids = problem.tokens, problem.blocks, problem.ids
    prepared = prepare(step, family, problem.format, a, blocks, machine, q81, dtype, ids=ids)
    c = multiply(prepared, machine)
    require_unchanged(prepared, machine, step, a, step.pack(blocks), ids)
    return check(c, problem, family, operands(prepared, machine))


def require_unchanged(
    prepared: Prepared,
    machine: Machine,
    step: Kernel,
    a: np.ndarray,
    packed: Sequence[np.ndarray],
    ids: np.ndarray | None = None,
) -> None:
    """RuntimeError if a product has changed its weights, its activations or ids. packed: the
    weights as they were."""
    for array, kept in zip(prepared.weights, packed, strict=True):
        if machine.host(array).tobytes() != kept.tobytes():
            raise RuntimeError(f"step {step.number} changed its weights")
    if machine.host(prepared.a).tobytes() != a.tobytes():
        raise RuntimeError(f"step {step.number} changed its activations")
    if ids is not None and machine.host(prepared.ids).tobytes() != ids.tobytes():
        raise RuntimeError(f"step {step.number} changed the ids")


def operands(prepared: Prepared, machine: Machine) -> Q81 | Halves | Bfloats | Tokens | None:
    """What the kernel multiplied, read back: Q8_1 bits, halves, bfloats or tokens; None where it
    was float32 A."""
    layout, m, k = prepared.activations.layout, prepared.shape.m, prepared.shape.k
    if layout is None:
        return None
    if prepared.ids is not None:  # a lesson may sort A by ids, and changes no number
        tokens, chosen = prepared.ids.shape
        a = (machine.host(prepared.a),)
        return decode(layout, a, tokens, k).rows(np.arange(m) // chosen)
    arrays = tuple(machine.host(array) for array in prepared.activations.arrays)
    return decode(layout, arrays, m, k)


def _guarded_nan(size: int, dtype: np.dtype) -> np.ndarray:
    filled = np.full(size + 2 * GUARD, _NAN.get(dtype, np.nan), dtype)
    filled[:GUARD] = filled[GUARD + size :] = _CANARY[dtype]
    return filled
