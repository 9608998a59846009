"""The layouts of activations: as they are, rounded to float16, quantized to Q8_1 or to int8.

A step names one of these functions (or `by_family` of two); the harness runs and times the launches
they return apart from the step's own. `encode` and `decode` go between a layout and plain arrays
(`Q81`, `Halves`, `Bfloats`, `Tokens`), so that the checker can read the very bits a kernel
multiplied and a test can hand it bits of its own.

A layout is taught by the first step that reads it: float32 rows by step 1, Q8_1 by step 2, its
K-outermost form by step 5 and MMA_ORDER by step 7, float16 rows by step 11, int8 rows by step 15.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np

from qformats import BLOCK, block_q8_1
from qformats.repack import CHUNK, MMA_ORDER, TILE_K
from reference.bfloat16 import bfloat16_bits, bfloat16_values
from reference.operands import Q81, Bfloats, Halves, Tokens
from steps.blocks.q8_1 import BLOCK_Q8_1, q8_1_grid, q8_1_quantizer
from steps.contract import (
    FLOATS,
    Activations,
    Family,
    Kernel,
    Launch,
    Machine,
    MakeActivations,
    ceil_div,
    dtype_name,
)
from steps.kernels.parts.activations.gated import gated_grid, gated_to_rows
from steps.kernels.parts.activations.rows import (
    row_grid,
    row_loads,
    row_rounder,
    token_quantizer,
)


def float32_rows(family: Family, a: Any, machine: Machine) -> Activations:
    """A16: the caller's float32 A[M, K] itself."""
    return Activations((a,))


def q8_1_blocks(family: Family, a: Any, machine: Machine) -> Activations:
    """A8: ggml's 36-byte Q8_1 blocks, uint8[M * K/32 * 36], with s = d * sum(q): four to six times
    as accurate as the sum of the raw values in formats with a minimum. d and s are float16: a value
    may be off by 127 * 2^-25, so that a block below 4e-6 throughout is 0, and beyond 65504 they
    overflow, which `steps.gemm` and plans refuse."""
    m, k = a.shape
    blocks = machine.empty((m * ceil_div(k, BLOCK) * BLOCK_Q8_1,), np.uint8)
    launch = Launch(q8_1_quantizer("blocks"), *q8_1_grid(m, k), (a, blocks))
    return Activations((blocks,), (launch,), "blocks")


def q8_1_k_outermost(family: Family, a: Any, machine: Machine) -> Activations:
    """A8 with codes and scales apart and K outermost, like `qformats.repack.k_outermost`: int8
    [K/16, M, 16] and float32 [K/32, M, 2] (d and s side by side), K rounded up to a multiple of
    128 and zeros beyond. d and s are not rounded to f16."""
    return _k_outermost("k_outermost", a, machine)


def q8_1_mma_order(family: Family, a: Any, machine: Machine) -> Activations:
    """`q8_1_k_outermost` with the codes of each 16 K in `qformats.repack.MMA_ORDER`, that of packed
    weights."""
    return _k_outermost("mma_order", a, machine)


def _k_outermost(layout: str, a: Any, machine: Machine) -> Activations:
    m, k = a.shape
    values = m * ceil_div(k, TILE_K) * TILE_K
    qs = machine.empty((values,), np.int8)
    ds = machine.empty((values // BLOCK * 2,), np.float32)
    launch = Launch(q8_1_quantizer(layout), *q8_1_grid(m, k), (a, qs, ds))
    return Activations((qs, ds), (launch,), layout)


def float32_quantized_inside(family: Family, a: Any, machine: Machine) -> Activations:
    """A8 without a pass: the kernel reads float32 A[M, K] and quantizes it to Q8_1 itself, by the
    recipe of `q8_1_mma_order`."""
    return Activations((a,), layout="inside")


def float16_rows(family: Family, a: Any, machine: Machine) -> Activations:
    """A16 in 16 bits: A[M, K] itself where it is float16 or bfloat16. Float32 A is rounded to
    float16 [M, K], each token in a power of two of its own
    (`steps.kernels.parts.activations.rows.row_rounder`): token_scales float32 [M] follows, by which
    each token's products are to be multiplied."""
    if dtype_name(a) != "float32":
        return Activations((a,), layout="rows")
    m, k = a.shape
    rounded = machine.empty((m, k), np.float16)
    token_scales = machine.empty((m,), np.float32)
    launch = Launch(row_rounder(row_loads(k)), *row_grid(m, k), (a, rounded, token_scales))
    return Activations((rounded, token_scales), (launch,), "rows")


def gated_rows(family: Family, y: Any, machine: Machine) -> Activations:
    """`float16_rows` of silu(gate) * up, which is computed on the way, of float16 y[M, 2 K], K
    gates and K ups."""
    m, k = y.shape[0], y.shape[1] // 2
    x = machine.empty((m, k), np.float16)
    launch = Launch(gated_to_rows, *gated_grid(m, k), (y, x))
    return Activations((x,), (launch,), "rows")


def int8_rows(family: Family, a: Any, machine: Machine) -> Activations:
    """A8 with one scale for each token: int8 [M, K] and float32 [M]. A is float32, float16 or
    bfloat16. See `steps.kernels.parts.activations.rows.token_quantizer`."""
    m, k = a.shape
    codes, scales = machine.empty((m, k), np.int8), machine.empty((m,), np.float32)
    kernel = token_quantizer(row_loads(k), dtype_name(a))
    launch = Launch(kernel, *row_grid(m, k), (a, codes, scales))
    return Activations((codes, scales), (launch,), "tokens")


GATED: Final = "gated"


@dataclass(frozen=True, slots=True)
class ByFamily:
    """The functions of `by_family`."""

    a16: MakeActivations
    a8: MakeActivations

    def __call__(self, family: Family, a: Any, machine: Machine) -> Activations:
        return self.of(family)(family, a, machine)

    def of(self, family: Family) -> MakeActivations:
        """The function for one of them."""
        return self.a16 if family == "A16" else self.a8


def by_family(a16: MakeActivations, a8: MakeActivations) -> ByFamily:
    """One function for a step of both families."""
    return ByFamily(a16, a8)


class Reading(NamedTuple):
    """How a kernel reads A.

    make  : makes the activations that it multiplies.
    source: how A comes: "float32", "float16", "bfloat16" or "gated" (y of `gated_rows`).
    columns, dtype: of what `make` is given: so many columns for each K.
    """

    make: MakeActivations
    source: str
    columns: int
    dtype: str


def reading(make: MakeActivations, source: str, family: Family) -> Reading:
    """How a kernel that names `make` reads an A of a source. One that cannot read it so reads
    something else: `Reading.source`."""
    make = make.of(family) if isinstance(make, ByFamily) else make
    if make is float16_rows and source == GATED:
        return Reading(gated_rows, GATED, 2, "float16")
    if make is float16_rows:
        return Reading(make, source, 1, source)
    takes = "float32"
    if make is int8_rows:
        takes = "float16" if source == GATED else source
    return Reading(make, takes, 1, takes)


def inputs(step: Kernel, family: Family) -> tuple[str, ...]:
    """The dtypes of A that a step reads as they are, float32 first. Kernels that read rows of A
    multiply bfloat16 if they write it, too."""
    return _inputs(step.activations, family, "bfloat16" in step.outputs)


@cache
def _inputs(make: MakeActivations, family: Family, bfloat16: bool) -> tuple[str, ...]:
    taken = [name for name in FLOATS if reading(make, name, family).source == name]
    if reading(make, GATED, family).make is gated_rows and not bfloat16:
        taken.remove("bfloat16")
    return tuple(taken)


def reading_of(step: Kernel, source: str, family: Family) -> Reading:
    """`reading` of a step, which takes a dtype that it does not read (`inputs`) as float32."""
    reads = source == GATED or source in inputs(step, family)
    return reading(step.activations, source if reads else "float32", family)


# Other layouts are made of Q81.
_MADE_OF = {"rows": (Halves, Bfloats), "tokens": (Tokens,)}
Operands = Q81 | Halves | Bfloats | Tokens


def encode(layout: str, operands: Operands) -> tuple[np.ndarray, ...]:
    """(q, d, s), halves, bfloats or tokens -> the arrays of a layout, as the GPU would have left
    them."""
    if type(operands) not in _MADE_OF.get(layout, (Q81,)) or layout == "inside":
        raise ValueError(
            f"activations of layout {layout!r} are not made of {type(operands).__name__}"
        )
    if isinstance(operands, Bfloats):
        return (bfloat16_bits(operands.b),)
    if isinstance(operands, Halves):
        return operands.h, operands.factor
    if isinstance(operands, Tokens):
        return operands.q, operands.d
    m, k = operands.q.shape
    if layout in ("k_outermost", "mma_order"):
        more = -k % TILE_K
        chunks = np.pad(operands.q.astype(np.int8), ((0, 0), (0, more))).reshape(m, -1, CHUNK)
        if layout == "mma_order":
            chunks = chunks[..., MMA_ORDER]
        codes = np.ascontiguousarray(chunks.transpose(1, 0, 2)).reshape(-1)
        ds = np.stack([operands.d.T, operands.s.T], axis=-1).astype(np.float32)
        ds = np.pad(ds, ((0, more // BLOCK), (0, 0), (0, 0)))
        return codes, ds.reshape(-1)
    blocks = np.empty((m, k // BLOCK), block_q8_1)
    blocks["d"], blocks["s"] = operands.d, operands.s
    blocks["qs"] = operands.q.reshape(m, k // BLOCK, BLOCK)
    return (blocks.view(np.uint8).reshape(-1),)


def decode(layout: str, arrays: tuple[np.ndarray, ...], m: int, k: int) -> Operands:
    """The arrays of a layout -> (q, d, s), halves, bfloats or tokens: the bits that the kernel
    really read; where it made them itself ("inside"), those the recipe prescribes."""
    if layout == "inside":
        return Q81.of_values(arrays[0].reshape(m, k))
    if layout == "rows" and dtype_name(arrays[0]) == "bfloat16":
        return Bfloats(bfloat16_values(arrays[0]))
    if layout == "rows":
        factor = arrays[1] if len(arrays) == 2 else np.ones(m, np.float32)
        return Halves(arrays[0], factor)
    if layout == "tokens":
        return Tokens(*arrays)
    if layout in ("k_outermost", "mma_order"):
        qs, ds = arrays
        chunks = qs.reshape(-1, m, CHUNK)[: k // CHUNK]
        if layout == "mma_order":
            chunks = chunks[..., np.argsort(MMA_ORDER)]
        q = chunks.transpose(1, 0, 2).reshape(m, k)
        ds = ds.reshape(-1, m, 2)[: k // BLOCK]
        return Q81(q=q, d=ds[..., 0].T, s=ds[..., 1].T)
    blocks = arrays[0].view(block_q8_1).reshape(m, k // BLOCK)
    q = blocks["qs"].reshape(m, k).view(np.int8)
    return Q81(q=q, d=blocks["d"].astype(np.float32), s=blocks["s"].astype(np.float32))
