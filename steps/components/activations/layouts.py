"""The layouts of activations: as they are, rounded to float16, quantized to Q8_1 or to int8.

A step names one of these functions (or `by_family` of two); the harness runs and times the launches
they return apart from the step's own. `encode` and `decode` go between a layout and plain arrays
(`Q81`, `Halves`, `Tokens`, `SummedTokens`), so that the checker can read the very bits a kernel
multiplied and a test can hand it bits of its own.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from qformats import BLOCK, block_q8_1
from qformats.repack import CHUNK, TILE_K, TOKEN_GROUP
from reference.operands import Q81, Halves, SummedTokens, Tokens
from steps.components.activations.gated import gated_to_chunks
from steps.components.activations.q8_1 import BLOCK_Q8_1, q8_1_grid, q8_1_quantizer
from steps.components.activations.reorder import chunk_grid, halves_to_chunks
from steps.components.activations.rows import (
    half_grid,
    half_loads,
    half_rounder,
    token_quantizer,
)
from steps.contract import Activations, Family, Launch, Machine, MakeActivations, ceil_div


def float32_rows(family: Family, a: Any, machine: Machine) -> Activations:
    """A16: the caller's float32 A[M, K] itself."""
    return Activations((a,))


def q8_1_blocks(family: Family, a: Any, machine: Machine) -> Activations:
    """A8: ggml's 36-byte Q8_1 blocks, uint8[M * K/32 * 36], with s = d * sum(q): four to six times
    as accurate as the sum of the raw values in formats with a minimum."""
    m, k = a.shape
    blocks = machine.empty((m * ceil_div(k, BLOCK) * BLOCK_Q8_1,), np.uint8)
    launch = Launch(q8_1_quantizer("blocks"), *q8_1_grid(m, k), (a, blocks))
    return Activations((blocks,), (launch,), "blocks")


def q8_1_k_outermost(family: Family, a: Any, machine: Machine) -> Activations:
    """A8 with codes and scales apart and K outermost, like `qformats.repack.k_outermost`: int8
    [K/16, M, 16] and float32 [K/32, M, 2] (d and s side by side), K rounded up to a multiple of
    128 and zeros beyond. d and s are not rounded to f16."""
    m, k = a.shape
    values = m * ceil_div(k, TILE_K) * TILE_K
    qs = machine.empty((values,), np.int8)
    ds = machine.empty((values // BLOCK * 2,), np.float32)
    launch = Launch(q8_1_quantizer("k_outermost"), *q8_1_grid(m, k), (a, qs, ds))
    return Activations((qs, ds), (launch,), "k_outermost")


def float32_quantized_inside(family: Family, a: Any, machine: Machine) -> Activations:
    """A8 without a pass: the kernel reads float32 A[M, K] and quantizes it to Q8_1 itself, by the
    recipe of `q8_1_k_outermost`."""
    return Activations((a,), layout="inside")


def _whole(m: int, k: int) -> int:
    """Values of A[m, k] in whole groups of eight tokens and 128 K."""
    return ceil_div(m, TOKEN_GROUP) * TOKEN_GROUP * ceil_div(k, TILE_K) * TILE_K


def float16_chunks(family: Family, a: Any, machine: Machine) -> Activations:
    """A16 in float16, in 16-byte chunks: float16 [K/128, M/8, 16, 8, 8], M and K rounded up and
    zeros beyond, and token_scales float32 [M], by which each token's products are to be multiplied.
    128 K of 8 tokens are 2 KB in one piece, and so are 128 K of a whole tile of tokens. Each 128
    bytes are a core matrix of `wgmma` or the eight rows of an `ldmatrix`. For the order of K and
    the powers of two see `steps.components.activations.rows.half_rounder`. A may be float16: its
    values stay the same, and the scales are 1."""
    m, k = a.shape
    if a.dtype == np.float16:
        return _halves(a, k, machine, halves_to_chunks, chunk_grid(m, k))
    return _halves(a, k, machine, half_rounder(half_loads(k)), half_grid(m, k))


def gated_chunks(family: Family, y: Any, machine: Machine) -> Activations:
    """`float16_chunks` of silu(gate) * up, which is computed on the way, of float16 y[M, 2 K], K
    gates and K ups."""
    m, k = y.shape[0], y.shape[1] // 2
    return _halves(y, k, machine, gated_to_chunks, chunk_grid(m, k))


def _halves(a: Any, k: int, machine: Machine, kernel: Any, grid: tuple[Any, Any]) -> Activations:
    m = len(a)
    halves = machine.empty((_whole(m, k),), np.float16)
    token_scales = machine.empty((m,), np.float32)
    launch = Launch(kernel, *grid, (a, halves, token_scales))
    return Activations((halves, token_scales), (launch,), "halves")


def int8_chunks(family: Family, a: Any, machine: Machine) -> Activations:
    """A8 with one scale for each token, in chunks as `float16_chunks`: int8 [K/128, M/8, 8, 8, 16]
    and float32 [M]. See `steps.components.activations.rows.token_quantizer`."""
    m, k = a.shape
    codes = machine.empty((_whole(m, k),), np.int8)
    scales = machine.empty((m,), np.float32)
    kernel = token_quantizer(half_loads(k), str(a.dtype))
    launch = Launch(kernel, *half_grid(m, k), (a, codes, scales))
    return Activations((codes, scales), (launch,), "tokens")


def int8_chunks_and_sums(family: Family, a: Any, machine: Machine) -> Activations:
    """`int8_chunks`, and behind the scales the sum of the codes of each token: float32 [2 M]."""
    m, k = a.shape
    codes = machine.empty((_whole(m, k),), np.int8)
    scales = machine.empty((2 * m,), np.float32)
    kernel = token_quantizer(half_loads(k), str(a.dtype), sums=True)
    launch = Launch(kernel, *half_grid(m, k), (a, codes, scales))
    return Activations((codes, scales), (launch,), "summed")


GATED: Final = "gated"


def reading(make: MakeActivations, source: str) -> tuple[MakeActivations, str, tuple[int, str]]:
    """How a step that names `make` reads an A whose `source` is "float32", "float16", or "gated"
    (y of `gated_chunks`): (the function to call instead, the source that it reads, (columns for
    each K, dtype) of its input)."""
    if source == GATED and make is float16_chunks:
        return gated_chunks, GATED, (2, "float16")
    half = source != "float32" and make in (float16_chunks, int8_chunks, int8_chunks_and_sums)
    takes = "float16" if half else "float32"
    return make, takes, (1, takes)


def by_family(a16: MakeActivations, a8: MakeActivations) -> MakeActivations:
    """One function for a step of both families."""

    def activations(family: Family, a: Any, machine: Machine) -> Activations:
        return (a16 if family == "A16" else a8)(family, a, machine)

    return activations


# Other layouts are made of Q81.
_MADE_OF = {"halves": Halves, "tokens": Tokens, "summed": SummedTokens}


def encode(layout: str, operands: Q81 | Halves | Tokens) -> tuple[np.ndarray, ...]:
    """(q, d, s), halves or tokens -> the arrays of a layout, as the GPU would have left them."""
    if type(operands) is not _MADE_OF.get(layout, Q81) or layout == "inside":
        raise ValueError(
            f"activations of layout {layout!r} are not made of {type(operands).__name__}"
        )
    if isinstance(operands, Halves):
        m, k = operands.h.shape
        h = np.pad(operands.h, ((0, -m % TOKEN_GROUP), (0, -k % TILE_K)))
        # group, token, step of 128 K, 16 K of it, and of these k = 4 t + 2 i + odd
        h = h.reshape(-1, TOKEN_GROUP, ceil_div(k, TILE_K), 8, 4, 2, 2)
        return h.transpose(2, 0, 3, 6, 1, 4, 5).reshape(-1), operands.factor
    m, k = operands.q.shape
    if isinstance(operands, Tokens):
        q = np.pad(operands.q.astype(np.int8), ((0, -m % TOKEN_GROUP), (0, -k % TILE_K)))
        q = q.reshape(-1, TOKEN_GROUP, ceil_div(k, TILE_K), TILE_K // CHUNK, CHUNK)
        scales = operands.d
        if isinstance(operands, SummedTokens):
            scales = np.concatenate([operands.d, operands.s])
        return q.transpose(2, 0, 3, 1, 4).reshape(-1), scales
    if layout == "k_outermost":
        more = -k % TILE_K
        chunks = np.pad(operands.q.astype(np.int8), ((0, 0), (0, more))).reshape(m, -1, CHUNK)
        codes = np.ascontiguousarray(chunks.transpose(1, 0, 2)).reshape(-1)
        ds = np.stack([operands.d.T, operands.s.T], axis=-1).astype(np.float32)
        ds = np.pad(ds, ((0, more // BLOCK), (0, 0), (0, 0)))
        return codes, ds.reshape(-1)
    blocks = np.empty((m, k // BLOCK), block_q8_1)
    blocks["d"], blocks["s"] = operands.d, operands.s
    blocks["qs"] = operands.q.reshape(m, k // BLOCK, BLOCK)
    return (blocks.view(np.uint8).reshape(-1),)


def decode(layout: str, arrays: tuple[np.ndarray, ...], m: int, k: int) -> Q81 | Halves | Tokens:
    """The arrays of a layout -> (q, d, s), halves or tokens: the bits that the kernel really read;
    where it made them itself ("inside"), those the recipe prescribes."""
    if layout == "inside":
        return Q81.of_values(arrays[0].reshape(m, k))
    if layout == "halves":
        chunks, factor = arrays
        h = chunks.reshape(ceil_div(k, TILE_K), -1, 8, 2, TOKEN_GROUP, 4, 2)
        h = h.transpose(1, 4, 0, 2, 5, 6, 3).reshape(-1, ceil_div(k, TILE_K) * TILE_K)
        return Halves(h[:m, :k], factor)
    if layout in ("tokens", "summed"):
        codes, scales = arrays
        q = codes.reshape(ceil_div(k, TILE_K), -1, TILE_K // CHUNK, TOKEN_GROUP, CHUNK)
        q = q.transpose(1, 3, 0, 2, 4).reshape(-1, ceil_div(k, TILE_K) * TILE_K)
        if layout == "summed":
            return SummedTokens(q[:m, :k], scales[:m], scales[m:])
        return Tokens(q[:m, :k], scales)
    if layout == "k_outermost":
        qs, ds = arrays
        q = qs.reshape(-1, m, CHUNK)[: k // CHUNK].transpose(1, 0, 2).reshape(m, k)
        ds = ds.reshape(-1, m, 2)[: k // BLOCK]
        return Q81(q=q, d=ds[..., 0].T, s=ds[..., 1].T)
    blocks = arrays[0].view(block_q8_1).reshape(m, k // BLOCK)
    q = blocks["qs"].reshape(m, k).view(np.int8)
    return Q81(q=q, d=blocks["d"].astype(np.float32), s=blocks["s"].astype(np.float32))
