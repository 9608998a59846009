"""Products in float64, and the magnitudes their rounding errors are measured against.

Three answers to "what should C be", for three questions:

    unquantized(a, w)               what the float model meant: its distance is the *format's* error
    same_operands_a16(a, blocks)    float A, dequantized W:    } their distance is the *kernel's*
    same_operands_a8(q81, blocks)   the Q8_1 bits it was given } error, and must be tiny

The activations are those of `reference.operands`. Of `Halves` and `Bfloats` A is `values()`;
`both_tokens` is the product of `Tokens` with int8 weights.

Every sum is a float64 matrix product. Each term of the last two is exact in float64 (at most
24 + 24 bits of significand for A16, 8 + 24 + 8 + 11 for A8), so their error is that of float64
sums: K * 2^-53 relative to the magnitudes, 2^29 times below float32's.

Blocks are structured [N, K/32], of K-quants [N, K/256]. All raise TypeError for what are no blocks
and ValueError for what are no matrices of one K.
"""

from __future__ import annotations

from collections.abc import Callable
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


def same_operands_a16(a: Array, blocks: Array, stored: bool = False) -> Array:
    """A[M, K] of floats times the dequantized blocks, in float64[M, N]. `stored`: times the weights
    as fragment-packed tiles hold them, which for file formats are those of `qformats.storage`. Not
    rounded to float16."""
    return _in_pieces(a.astype(np.float64), blocks, lambda part: _weights(part, stored))


def magnitude_a16(a: Array, blocks: Array, stored: bool = False) -> Array:
    """sum_k |a| * (|scale * code| + |offset|), float64[M, N]: what rounding errors are relative to.

    Scale and offset apart, so that it covers a kernel that takes the scale out of a block's sum as
    well as one that dequantizes each weight first (whose terms |a * w| are never larger). `stored`:
    of the weights as fragment-packed tiles hold them, see `same_operands_a16`.
    """
    return _in_pieces(np.abs(a).astype(np.float64), blocks, lambda part: _sizes(part, stored))


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


def magnitude_half(a: Array, blocks: Array, bits: int = 11) -> Array:
    """As `magnitude_a16`, each weight counted as 2^11 `least_half` at least, float64[M, N]: with
    one rounding of 2^-11 that is what rounding the weights to float16 may cost. `bits` 8: with the
    roundings to float16 and then to bfloat16, 2^-8 and a little."""
    return _in_pieces(np.abs(a).astype(np.float64), blocks, lambda part: _half_sizes(part, bits))


def same_operands_a8(q81: Q81, blocks: Array) -> Array:
    """The product on the given Q8_1 bits, float64[M, N].

    Per block  scale * da * sum(code * q) + offset * s,  the identity every A8 kernel computes in
    its own way; summed over the K/32 blocks. Of file formats scale, code and offset are those of
    `qformats.storage`.
    """
    return both_a8(q81, blocks)[0]


def magnitude_a8(q81: Q81, blocks: Array) -> Array:
    """sum_b (|scale * da| * sum |code * q| + |offset * s|), float64[M, N].

    By elements, not by blocks: it bounds the partial sums of a kernel that turns part of a block
    (one packed word, say) into float32 as well as those of one that sums a whole block in int32.
    Kernels may centre codes of 4 and 5 bits first, code - 8 or - 16; then it is the larger of both.
    """
    return both_a8(q81, blocks)[1]


def both_a8(q81: Q81, blocks: Array) -> tuple[Array, Array]:
    """(same_operands_a8, magnitude_a8): the weights are made float64 once for both."""
    return both(q81, blocks)


def both_tokens(tokens: Tokens, blocks: Array) -> tuple[Array, Array]:
    """(the product of these int8 with `byte_weights`, sum |terms|), float64[M, N]."""
    return both(tokens, blocks)


# --- any operands ---------------------------------------------------------------------------------

Operands = Q81 | Halves | Bfloats | Tokens


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
    `Bfloats`, `Q81` or `Tokens`. See `magnitude_a16`, `magnitude_half` and `magnitude_a8`."""
    if issubclass(kind, np.ndarray):
        return Terms(_weights(blocks, False), (_sizes(blocks, False),))
    if issubclass(kind, Tokens):
        codes, factor = byte_weights(blocks)
        weights = codes * factor.astype(np.float64)[:, None]
        return Terms(weights, (np.abs(weights),))
    if issubclass(kind, Halves | Bfloats):
        bits = 11 if issubclass(kind, Halves) else 8
        return Terms(_weights(blocks, True), (_half_sizes(blocks, bits),))
    return _terms_a8(blocks)


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


def both(used: Operands | Array, blocks: Array) -> tuple[Array, Array]:
    """(the product of these operands, its magnitude), float64[M, N]: weights are made float64 once
    for both."""
    x = factors(used)
    _same_k(used if isinstance(used, np.ndarray) else used.arrays[0], blocks)
    size_of_x = np.abs(x)
    same = np.empty((x.shape[0], blocks.shape[0]))
    size = np.empty_like(same)
    for part in pieces(blocks.shape[0], x.shape[1]):
        of = terms(type(used), blocks[part])
        same[:, part] = x @ of.same.T
        size[:, part] = np.max([size_of_x @ one.T for one in of.sizes], axis=0)
    return same, size


# --- weights in float64 ---------------------------------------------------------------------------


def _in_pieces(x: Array, blocks: Array, made: Callable[[Array], Array]) -> Array:
    """x[M, K] times what is made of the blocks, [N, K], a part of N at a time."""
    _same_k(x, blocks)
    c = np.empty((x.shape[0], blocks.shape[0]))
    for part in pieces(blocks.shape[0], x.shape[1]):
        c[:, part] = x @ made(blocks[part]).T
    return c


def _weights(blocks: Array, stored: bool) -> Array:
    """The dequantized weights [N, K]; stored: as fragment-packed tiles hold them."""
    fmt = format_of(blocks)
    if stored and fmt.name in FILE_FORMATS:
        weights, offset = _stored_operands(blocks)
        return weights + _spread(offset, weights.shape[1])
    return fmt.dequantize(blocks).astype(np.float64)


def _sizes(blocks: Array, stored: bool) -> Array:
    """|scale * code| + |offset| of each weight, [N, K]."""
    weights, offset = (_stored_operands if stored else _operands)(blocks)
    size = np.abs(weights, out=weights).reshape(*offset.shape, -1)
    size += np.abs(offset)[..., None]
    return weights


def _half_sizes(blocks: Array, bits: int) -> Array:
    """The same with what rounding to float16 costs, see `magnitude_half`."""
    return _sizes(blocks, True) + 2.0**bits * least_half(blocks)[:, None]


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
