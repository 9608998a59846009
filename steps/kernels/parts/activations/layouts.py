"""The layouts of activations: as they are, rounded to float16, quantized to Q8_1 or to int8.

A kernel names one of these functions, or one of `steps.blocks.q8_1`, for each of its families. Its
launches run, and are timed, apart from the kernel's own. `encode` and `decode` go between a layout
and plain arrays (`Q81`, `Halves`, `Bfloats`, `Tokens`), so that the checker can read the very bits
a kernel multiplied and a test can hand it bits of its own.

A layout is taught by the first step that reads it: float32 rows by step 1, Q8_1 by step 2, its
K-outermost form by step 5 and MMA_ORDER by step 7, float16 rows by step 11, int8 rows by step 15.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np

from qformats import BLOCK, FORMATS, block_q8_1
from qformats.repack import CHUNK, MMA_ORDER, TILE_K
from qformats.storage import storage_format
from reference.bfloat16 import bfloat16_bits, bfloat16_values
from reference.operands import Q81, Bfloats, Halves, Tokens
from steps.contract import (
    FLOATS,
    Activations,
    Family,
    Kernel,
    Launch,
    Machine,
    MakeActivations,
    Shape,
    ceil_div,
    dtype_name,
)
from steps.kernels.parts.activations.beside import (
    H200_BESIDE_FEATURES,
    H200_FIRST_ROWS,
    LEAST_TOKENS,
    ROUNDED_ROWS,
)
from steps.kernels.parts.activations.gated import gated_grid, gated_to_rows
from steps.kernels.parts.activations.rows import (
    row_grid,
    row_loads,
    row_rounder,
    token_quantizer,
)

H200_OVERLAP_K: Final = 32
"""K for each row up to which the pass of bfloat16 A is launched with overlap. Where rows are fewer
and longer, its blocks come so early that they hold up the product before."""

ROUNDED_TOKENS: Final = 9
H200_ROUNDED_WEIGHTS: Final = 6144 * 4096
H200_NATIVE_FEATURES: Final = 4096
H200_NATIVE_K: Final = 8192
"""Tokens and weights (N K) from which bfloat16 A takes the pass of `all_float16_rows` in a decode
kernel, beyond N or K of the last two. Float16 meets scaled weights there, bfloat16 scaled sums; of
fewer weights the pass costs more than that, and so it does of weights of four bits without minima.
N counts once for each 16 tokens, as those are blocks of their own."""


def float32_quantized_inside(a: Any, machine: Machine) -> Activations:
    """A8 without a pass: the kernel reads float32 A[M, K] and quantizes it to Q8_1 itself, by the
    recipe of `q8_1_mma_order`."""
    return Activations((a,), layout="inside")


def float16_rows(a: Any, machine: Machine) -> Activations:
    """A16 in 16 bits: A[M, K] itself where it is float16 or bfloat16. Float32 A is rounded to
    float16 [M, K], each token in a power of two of its own
    (`steps.kernels.parts.activations.rows.row_rounder`): token_scales float32 [M] follows, by which
    each token's products are to be multiplied."""
    if dtype_name(a) != "float32":
        return Activations((a,), layout="rows")
    return _rounded(a, machine)


def all_float16_rows(a: Any, machine: Machine) -> Activations:
    """`float16_rows`, but bfloat16 A takes the pass, too: its numbers are float16's in a power of
    two of their row. So weights need not become bfloat16, which has 8 bits for their 11."""
    if dtype_name(a) == "float16":
        return Activations((a,), layout="rows")
    return _rounded(a, machine)


def _rounded(a: Any, machine: Machine) -> Activations:
    """The pass of `float16_rows`. Of bfloat16 it may begin while the launch before ends."""
    m, k = a.shape
    rounded = machine.empty((m, k), np.float16)
    token_scales = machine.empty((m,), np.float32)
    of = dtype_name(a)
    run, grid = row_rounder(row_loads(k, of), of), row_grid(m, k, of)
    overlap = of == "bfloat16" and k <= H200_OVERLAP_K * m
    launch = Launch(run, *grid, (a, rounded, token_scales), overlap=overlap)
    return Activations((rounded, token_scales), (launch,), "rows")


def float16_rows_of_many(a: Any, machine: Machine) -> Activations:
    """`all_float16_rows`, but of many rows of bfloat16 A the pass rounds the first, and the kernel
    the others (`steps.kernels.parts.activations.beside`): A comes before the arrays of the pass,
    counters, int32 and zero between launches, behind them."""
    made, (m, _) = all_float16_rows(a, machine), a.shape
    if dtype_name(a) != "bfloat16" or m <= 2 * H200_FIRST_ROWS:
        return made
    counters = machine.array(np.zeros(ROUNDED_ROWS + ceil_div(m, LEAST_TOKENS), np.int32))
    first = replace(made.launches[0], grid=(H200_FIRST_ROWS,), overlap=False)
    return Activations((a, *made.arrays, counters), (first,), made.layout)


def gated_rows(y: Any, machine: Machine) -> Activations:
    """`float16_rows` of silu(gate) * up, which is computed on the way, of float16 y[M, 2 K], K
    gates and K ups."""
    m, k = y.shape[0], y.shape[1] // 2
    x = machine.empty((m, k), np.float16)
    launch = Launch(gated_to_rows, *gated_grid(m, k), (y, x))
    return Activations((x,), (launch,), "rows")


def int8_rows(a: Any, machine: Machine) -> Activations:
    """A8 with one scale for each token: int8 [M, K] and float32 [M]. A is float32, float16 or
    bfloat16. See `steps.kernels.parts.activations.rows.token_quantizer`."""
    m, k = a.shape
    codes, scales = machine.empty((m, k), np.int8), machine.empty((m,), np.float32)
    of = dtype_name(a)
    run, grid = token_quantizer(row_loads(k, of), of), row_grid(m, k, of)
    launch = Launch(run, *grid, (a, codes, scales))
    return Activations((codes, scales), (launch,), "tokens")


GATED: Final = "gated"


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


def reading(make: MakeActivations, source: str) -> Reading:
    """How a kernel that names `make` reads an A of a source. One that cannot read it so reads
    something else: `Reading.source`."""
    if make in (float16_rows, all_float16_rows, float16_rows_of_many):
        if source == GATED:
            return Reading(gated_rows, GATED, 2, "float16")
        return Reading(make, source, 1, source)
    takes = "float32"
    if make is int8_rows:
        takes = "float16" if source == GATED else source
    return Reading(make, takes, 1, takes)


def inputs(step: Kernel, family: Family) -> tuple[str, ...]:
    """The dtypes of A that a step reads as they are. Kernels that read rows of A multiply bfloat16
    if they write it, too."""
    return step.inputs or _inputs(step.activations[family], "bfloat16" in step.outputs)


@cache
def _inputs(make: MakeActivations, bfloat16: bool) -> tuple[str, ...]:
    taken = [name for name in FLOATS if reading(make, name).source == name]
    if reading(make, GATED).make is gated_rows and not bfloat16:
        taken.remove("bfloat16")
    return tuple(taken)


def reading_of(
    step: Kernel, source: str, family: Family, format_name: str = "", shape: Shape | None = None
) -> Reading:
    """`reading` of a step, for a product with these weights. A dtype that it does not read
    (`inputs`) it takes as float32, and a lesson without float32 as its own dtype."""
    make, taken = step.activations[family], inputs(step, family)
    if make is float16_rows_of_many and shape and shape.n > H200_BESIDE_FEATURES:
        make = all_float16_rows
    if make is float16_rows and shape and _rounds_first(format_name, shape):
        make = all_float16_rows
    if step.inputs:
        takes = source if source in taken else taken[0]
        return Reading(make, takes, 1, takes)
    return reading(make, source if source == GATED or source in taken else "float32")


def _rounds_first(format_name: str, shape: Shape) -> bool:
    """Whether bfloat16 A is rounded to float16 before a decode kernel. Of an invariant product the
    number of tokens must not decide it."""
    fmt = storage_format(FORMATS[format_name])
    plain = fmt.bits == 4 and "m" not in (fmt.dtype.names or ())
    if plain or shape.invariant or shape.m < ROUNDED_TOKENS:
        return False
    n = shape.n * ceil_div(shape.m, 16)
    many = n > H200_NATIVE_FEATURES or shape.k > H200_NATIVE_K
    return many and n * shape.k >= H200_ROUNDED_WEIGHTS


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
    if len(arrays) == 4:  # rounded beside
        arrays = arrays[1:3]
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
