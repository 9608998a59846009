"""Products in float64, and the magnitudes their rounding errors are measured against.

Two answers to "what should C be", for two questions:

    unquantized(a, w)              what the float model meant: its distance is the *format's* error
    same_operands(used, blocks)    the very operands that a kernel multiplied: its distance is the
                                   *kernel's* error, and must be tiny

Every sum is a float64 matrix product. Each term of the second is exact in float64 (at most 24 + 24
bits of significand for A16, 8 + 24 + 8 + 11 for A8), so its error is that of float64 sums:
K * 2^-53 relative to the magnitudes, 2^29 times below float32's.

Blocks are structured [N, K/32], of K-quants [N, K/256]. Both raise TypeError for what are no blocks
and ValueError for what are no matrices of one K.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from qformats import BLOCK, FILE_FORMATS, WEIGHT_FORMATS, format_of
from qformats.repack import byte_weights
from qformats.storage import stored_weights
from reference.operands import Q81, Bfloats, Halves, Tokens
from reference.sampling import pieces

Array = np.ndarray[Any, np.dtype[Any]]


def unquantized(a: Array, w: Array) -> Array:
    """A @ W^T of floats [M, K] and [N, K], in float64[M, N]."""
    if a.ndim != 2 or w.ndim != 2 or a.shape[1] != w.shape[1]:
        raise ValueError(
            f"a must be [M, K] and w [N, K] with the same K, got {list(a.shape)} and "
            f"{list(w.shape)}"
        )
    a = a.astype(np.float64)
    c = np.empty((a.shape[0], w.shape[0]))
    for part in pieces(w.shape[0], w.shape[1]):
        c[:, part] = a @ w[part].astype(np.float64).T
    return c


def least_half(blocks: Array) -> Array:
    """What a weight may be off by however small it is, float64[N], where it is rounded to float16.

    A row of the blocks is scaled so that its largest |d| is float16 2^-9 at least, and its
    largest |m| 2^14 where that would overflow. There weight and minimum are rounded to multiples of
    2^-24 at worst, by 2^-24 both together: 2^-15 of the largest |d|, 2^-24 of the largest |m|.
    """
    if format_of(blocks).name in FILE_FORMATS:
        weights = stored_weights(blocks)
        d, m = weights.scale, weights.offset
    else:
        d = blocks["d"].astype(np.float64)
        m = blocks["m"].astype(np.float64) if "m" in (blocks.dtype.names or ()) else None
    least = np.abs(d).max(axis=1) * 2.0**-15
    if m is not None:
        least = np.maximum(least, np.abs(m).max(axis=1) * 2.0**-24)
    return np.asarray(least)


Operands = Q81 | Halves | Bfloats | Tokens


def same_operands(used: Operands | Array, blocks: Array) -> tuple[Array, Array]:
    """(C, its magnitude), float64[M, N], of float32 A[M, K] or of activations as a kernel had them.

    The weights are the dequantized ones; for `Halves` and `Bfloats` as fragment-packed tiles hold
    them (`qformats.storage`), not rounded to 16 bits; for `Tokens` the int8 of `byte_weights`. Of
    `Q81` a block is  scale * da * sum(code * q) + offset * s,  the identity every A8 kernel
    computes in its own way.

    The magnitude is sum |terms|, with scale * code and offset apart: it covers a kernel that takes
    the scale out of a block's sum as well as one that dequantizes each weight first, and partial
    sums of any part of a block. Kernels may centre codes of 4 and 5 bits before they multiply Q8_1:
    then it is the larger of both. Each weight that is rounded to float16 counts as 2^11
    `least_half` at least (to bfloat16 then: 2^8), so that with one rounding of 2^-11 it is what
    rounding the weights may cost.
    """
    x = factors(used)
    _same_k(used if isinstance(used, np.ndarray) else used.arrays[0], blocks)
    size_of_x = np.abs(x)
    same = np.empty((x.shape[0], blocks.shape[0]))
    size = np.empty_like(same)
    for part in pieces(blocks.shape[0], x.shape[1]):  # weights are made float64 once for both
        of = terms(type(used), blocks[part])
        same[:, part] = x @ of.same.T
        size[:, part] = np.max([size_of_x @ one.T for one in of.sizes], axis=0)
    return same, size


@dataclass(frozen=True, slots=True)
class Terms:
    """What `factors` of activations are multiplied by, float64[N, K + sums]:

    C = factors @ same^T          its magnitude = max over sizes of |factors| @ size^T
    """

    same: Array
    sizes: tuple[Array, ...]


def factors(used: Operands | Array) -> Array:
    """Activations as one matrix, float64[M, K]; of Q8_1 the sums follow, [M, K + K/32]."""
    if isinstance(used, np.ndarray):
        return used.astype(np.float64)
    values = used.values()
    if isinstance(used, Q81):
        return np.concatenate([values, used.s.astype(np.float64)], axis=1)
    return values


def terms(kind: type, blocks: Array) -> Terms:
    """Those of blocks [N, K/32], for activations of a kind: an array's (float32 A), `Halves`,
    `Bfloats`, `Q81` or `Tokens`."""
    if issubclass(kind, np.ndarray):
        weights, offset = _operands(blocks)
        dequantized = format_of(blocks).dequantize(blocks).astype(np.float64)
        return Terms(dequantized, (_sizes(weights, offset),))
    if issubclass(kind, Tokens):
        codes, factor = byte_weights(blocks)
        weights = codes * factor.astype(np.float64)[:, None]
        return Terms(weights, (np.abs(weights),))
    if issubclass(kind, Halves | Bfloats):
        return _terms_half(blocks, 11 if issubclass(kind, Halves) else 8)
    return _terms_a8(blocks)


def _terms_half(blocks: Array, bits: int) -> Terms:
    weights, offset = _stored_operands(blocks)
    if format_of(blocks).name in FILE_FORMATS:
        same = weights + _spread(offset, weights.shape[1])
    else:
        same = format_of(blocks).dequantize(blocks).astype(np.float64)
    return Terms(same, (_sizes(weights, offset) + 2.0**bits * least_half(blocks)[:, None],))


def _terms_a8(blocks: Array) -> Terms:
    fmt = format_of(blocks)
    weights, offset = _stored_operands(blocks)
    sums = weights.shape[1] // BLOCK
    if offset.shape[1] != sums:
        if offset.any():
            raise ValueError(f"{fmt.name} has minima for 16 elements, and Q8_1 sums of {BLOCK}")
        offset = offset[:, :sums]
    same = np.concatenate([weights, offset], axis=1)
    sizes = [np.abs(same)]
    if fmt.name in WEIGHT_FORMATS and fmt.bits < 8:  # kernels may centre codes first
        moved = (1 << fmt.bits - 1) * fmt.scale(blocks).astype(np.float64)
        centred = weights - _spread(moved, weights.shape[1]), offset + moved
        sizes.append(np.abs(np.concatenate(centred, axis=1)))
    return Terms(same, tuple(sizes))


# --- weights in float64 ---------------------------------------------------------------------------


def _sizes(weights: Array, offset: Array) -> Array:
    """|scale * code| + |offset| of each weight, [N, K]."""
    return np.abs(weights) + _spread(np.abs(offset), weights.shape[1])


def _operands(blocks: Array) -> tuple[Array, Array]:
    """scale * level [N, K] and offset [N, groups of K] in float64."""
    layout = format_of(blocks)
    scale, offset = layout.scale(blocks).astype(np.float64), layout.offset(blocks)
    weights = layout.levels(blocks).reshape(*scale.shape, -1) * scale[..., None]
    return weights.reshape(blocks.shape[0], -1), offset.astype(np.float64)


def _stored_operands(blocks: Array) -> tuple[Array, Array]:
    """The same, as fragment-packed tiles hold them."""
    if format_of(blocks).name not in FILE_FORMATS:
        return _operands(blocks)
    made = stored_weights(blocks)
    weights = made.levels.reshape(*made.scale.shape, -1) * made.scale[..., None]
    offset = np.zeros_like(made.scale) if made.offset is None else made.offset
    return weights.reshape(blocks.shape[0], -1), offset


def _spread(offset: Array, k: int) -> Array:
    """Of groups [N, groups] for each element [N, K]."""
    return np.repeat(offset, k // offset.shape[1], axis=1)


def _same_k(a: Array, blocks: Array) -> None:
    size = format_of(blocks).elements
    if a.ndim != 2 or blocks.ndim != 2 or blocks.shape[1] * size != a.shape[1]:
        raise ValueError(
            f"a must be [M, K] and the blocks [N, K/{size}] with the same K, got {list(a.shape)} "
            f"and {list(blocks.shape)}"
        )
