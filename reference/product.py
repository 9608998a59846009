"""Products in float64, and the magnitudes their rounding errors are measured against.

Three answers to "what should C be", for three questions:

    unquantized(a, w)               what the float model meant: its distance is the *format's* error
    same_operands_a16(a, blocks)    float A, dequantized W:    } their distance is the *kernel's*
    same_operands_a8(q81, blocks)   the Q8_1 bits it was given } error, and must be tiny

`Q81`, `Halves`, `Tokens` and `SummedTokens` are activations as kernels are given them; of `Halves`
A is `values()`, and `both_tokens` is the product of the last two with weights in int8.

Every sum is a float64 matrix product. Each term of the last two is exact in float64 (at most
24 + 24 bits of significand for A16, 8 + 24 + 8 + 11 for A8), so their error is that of float64
sums: K * 2^-53 relative to the magnitudes, 2^29 times below float32's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from qformats import BLOCK, FILE_FORMATS, format_of
from qformats.integer_scales import integer_weights
from qformats.repack import byte_weights
from qformats.storage import stored_weights

Array = np.ndarray[Any, np.dtype[Any]]
Pick = Array | slice

PART: Final = 2**18  # weights of a product that are float64 at a time: 2 MB

# Tiles a kernel may use, whose last, partial one is where a ragged edge goes wrong.
TILES: Final = (8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Q81:
    """Q8_1 activations as planes: value = d * q, and s stands for the sum of the block's values.

    q int8[M, K], d float32[M, K/32], s float32[M, K/32]. TypeError or ValueError if they are not.
    """

    q: Array
    d: Array
    s: Array

    def __post_init__(self) -> None:
        for name, dtype in (("q", np.int8), ("d", np.float32), ("s", np.float32)):
            array = getattr(self, name)
            if not isinstance(array, np.ndarray) or array.dtype != dtype:
                found = getattr(array, "dtype", type(array).__name__)
                raise TypeError(f"Q81.{name} must be a {np.dtype(dtype)} array, got {found}")
        if self.q.ndim != 2 or self.q.shape[1] % BLOCK:
            raise ValueError(f"Q81.q must be [M, K] with K % {BLOCK} == 0, got {self.q.shape}")
        blocks = (self.q.shape[0], self.q.shape[1] // BLOCK)
        if self.d.shape != blocks or self.s.shape != blocks:
            raise ValueError(
                f"Q81 with q {self.q.shape} needs d and s of {blocks}, "
                f"got {self.d.shape} and {self.s.shape}"
            )

    @classmethod
    def of_blocks(cls, blocks: Array) -> Q81:
        """From structured[M, K/32] of `block_q8_1` (d and s widened from f16, exactly)."""
        q = np.ascontiguousarray(blocks["qs"]).reshape(blocks.shape[0], -1)
        return cls(q, blocks["d"].astype(np.float32), blocks["s"].astype(np.float32))

    @classmethod
    def of_values(cls, a: Array, s: str = "codes") -> Q81:
        """Quantize float32[M, K] as ggml's reference does, but keep d and s in float32.

        s = "codes" is d * sum(q); s = "values" is the sum of the raw a (llama.cpp on CUDA).
        """
        if s not in ("codes", "values"):
            raise ValueError(f"s must be 'codes' or 'values', got {s!r}")
        planes = zip(*(_quantized(a[part], s) for part in parts(*a.shape)), strict=True)
        q, d, total = (np.concatenate(each) for each in planes)
        return cls(q, d, total)

    def rows(self, pick: Pick) -> Q81:
        """The same, of some tokens only."""
        return Q81(self.q[pick], self.d[pick], self.s[pick])

    def values(self) -> Array:
        """d * q in float64[M, K]."""
        return self.q * np.repeat(self.d.astype(np.float64), BLOCK, axis=1)


@dataclass(frozen=True)
class Halves:
    """Activations in float16 with a power of two for each token: value = h * factor.

    h float16[M, K], factor float32[M]. TypeError or ValueError if they are not.
    """

    h: Array
    factor: Array

    def __post_init__(self) -> None:
        for name, dtype in (("h", np.float16), ("factor", np.float32)):
            array = getattr(self, name)
            if not isinstance(array, np.ndarray) or array.dtype != dtype:
                found = getattr(array, "dtype", type(array).__name__)
                raise TypeError(f"Halves.{name} must be a {np.dtype(dtype)} array, got {found}")
        if self.h.ndim != 2 or self.factor.shape != self.h.shape[:1]:
            raise ValueError(
                f"Halves need h [M, K] and factor [M], got {self.h.shape} and {self.factor.shape}"
            )

    @classmethod
    def of_values(cls, a: Array) -> Halves:
        """Round float32[M, K], each token scaled so that its largest |a| is in [2^14, 2^15).

        A token that is below 2^-112 throughout is scaled by 2^126, the most that has a float32
        inverse; one that holds a NaN or an infinity, by 2^-114. Float16[M, K] is taken as it is,
        h = a, with factors of 1.
        """
        if a.dtype == np.float16:
            return cls(a, np.ones(len(a), np.float32))
        largest = np.abs(a.astype(np.float64)).max(axis=1)
        finite = np.isfinite(largest)
        _, exponent = np.frexp(np.where(finite, largest, 0.0))  # largest < 2^exponent
        shift = np.where(largest == 0, 126, np.minimum(15 - exponent, 126))
        shift = np.where(finite, shift, -114)
        h = np.ldexp(a.astype(np.float64), shift[:, None])
        with np.errstate(over="ignore"):  # beside an infinity
            return cls(h.astype(np.float16), np.ldexp(1.0, -shift).astype(np.float32))

    def rows(self, pick: Pick) -> Halves:
        """The same, of some tokens only."""
        return Halves(self.h[pick], self.factor[pick])

    def values(self) -> Array:
        """h * factor in float64[M, K]."""
        return self.h * self.factor.astype(np.float64)[:, None]


@dataclass(frozen=True)
class Tokens:
    """Activations in int8 with one scale for each token: value = d * q.

    q int8[M, K], d float32[M]. TypeError or ValueError if they are not. They are multiplied by
    weights in int8 with one factor a row, those of `qformats.repack.byte_weights`.
    """

    q: Array
    d: Array

    def __post_init__(self) -> None:
        for name, dtype in (("q", np.int8), ("d", np.float32)):
            array = getattr(self, name)
            if not isinstance(array, np.ndarray) or array.dtype != dtype:
                found = getattr(array, "dtype", type(array).__name__)
                raise TypeError(f"Tokens.{name} must be a {np.dtype(dtype)} array, got {found}")
        if self.q.ndim != 2 or self.d.shape != self.q.shape[:1]:
            raise ValueError(
                f"Tokens need q [M, K] and d [M], got {self.q.shape} and {self.d.shape}"
            )

    @classmethod
    def of_values(cls, a: Array) -> Tokens:
        """Quantize float32[M, K] as Q8_1 is, a row for a block."""
        planes = zip(*(_codes(a[part]) for part in parts(*a.shape)), strict=True)
        q, d = (np.concatenate(each) for each in planes)
        return cls(q, d)

    @classmethod
    def of_q81(cls, q81: Q81) -> Tokens:
        """The same bits, of tokens that are one block long."""
        return cls(q81.q, np.ascontiguousarray(q81.d.reshape(len(q81.q))))

    def rows(self, pick: Pick) -> Tokens:
        """The same, of some tokens only."""
        return Tokens(self.q[pick], self.d[pick])

    def values(self) -> Array:
        """d * q in float64[M, K]."""
        return self.q * self.d.astype(np.float64)[:, None]

    def weights(self, blocks: Array) -> tuple[Array, Array]:
        """What they are multiplied by: int8 [N, K] and a factor for each row."""
        return byte_weights(blocks)


@dataclass(frozen=True)
class SummedTokens(Tokens):
    """`Tokens` with what each token's codes add up to, for weights that are unsigned bytes: those
    of `qformats.integer_scales.integer_weights`, by which they are multiplied, and 128.

    s float32[M], all integers. TypeError or ValueError if it is not.
    """

    s: Array

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.s, np.ndarray) or self.s.dtype != np.float32:
            found = getattr(self.s, "dtype", type(self.s).__name__)
            raise TypeError(f"SummedTokens.s must be a float32 array, got {found}")
        if self.s.shape != self.d.shape:
            raise ValueError(f"SummedTokens need s [M], got {self.s.shape} for d {self.d.shape}")

    @classmethod
    def of_tokens(cls, tokens: Tokens) -> SummedTokens:
        """The same with their sums."""
        return cls(tokens.q, tokens.d, tokens.q.sum(axis=1, dtype=np.int64).astype(np.float32))

    @classmethod
    def of_values(cls, a: Array) -> SummedTokens:
        """As `Tokens.of_values`."""
        return cls.of_tokens(Tokens.of_values(a))

    @classmethod
    def of_q81(cls, q81: Q81) -> SummedTokens:
        """As `Tokens.of_q81`."""
        return cls.of_tokens(Tokens.of_q81(q81))

    def rows(self, pick: Pick) -> SummedTokens:
        """The same, of some tokens only."""
        return SummedTokens(self.q[pick], self.d[pick], self.s[pick])

    def weights(self, blocks: Array) -> tuple[Array, Array]:
        """As `Tokens.weights`."""
        return integer_weights(blocks)


def _codes(x: Array) -> tuple[Array, Array]:
    """q int8[..., K] and d = amax / 127, float32[...], of float32[..., K]."""
    x = np.asarray(x, dtype=np.float32)
    d = np.abs(x).max(axis=-1) / np.float32(127)
    with np.errstate(divide="ignore"):
        inverse = np.where(d > 0, np.float32(1) / d, np.float32(0))
    scaled = x * inverse[..., None]
    # roundf: halves away from zero. |scaled| <= 127.5 - ulp, and floor(|x| + 0.5) in float64
    # cannot round up by accident as it could in float32.
    q = np.sign(scaled) * np.floor(np.abs(scaled.astype(np.float64)) + 0.5)
    return q.astype(np.int8), d


def _quantized(a: Array, s: str) -> tuple[Array, Array, Array]:
    """q int8[M, K], d and s float32[M, K/32] of float32[M, K]."""
    x = np.asarray(a, dtype=np.float32).reshape(a.shape[0], -1, BLOCK)
    q, d = _codes(x)
    total = d * q.sum(axis=-1, dtype=np.float32) if s == "codes" else x.sum(axis=-1)
    return q.reshape(a.shape), d, total.astype(np.float32)


def unquantized(a: Array, w: Array) -> Array:
    """A @ W^T of float32[M, K] and float32[N, K], in float64[M, N]."""
    a = a.astype(np.float64)
    c = np.empty((a.shape[0], w.shape[0]))
    for part in parts(w.shape[0], w.shape[1]):
        c[:, part] = a @ w[part].astype(np.float64).T
    return c


def same_operands_a16(a: Array, blocks: Array) -> Array:
    """A[M, K] of floats times the dequantized blocks[N, K/32], in float64[M, N]."""
    _same_k(a.shape[1], blocks)
    fmt, a = format_of(blocks), a.astype(np.float64)
    c = np.empty((a.shape[0], blocks.shape[0]))
    for part in parts(blocks.shape[0], a.shape[1]):
        c[:, part] = a @ fmt.dequantize(blocks[part]).astype(np.float64).T
    return c


def same_operands_half(a: Array, blocks: Array) -> Array:
    """A[M, K] of floats times the weights as records hold them, before they are made float16:
    dequantized, or of formats that files come in those of `qformats.storage`. float64[M, N]."""
    if format_of(blocks).name not in FILE_FORMATS:
        return same_operands_a16(a, blocks)
    _same_k(a.shape[1], blocks)
    a = a.astype(np.float64)
    c = np.empty((a.shape[0], blocks.shape[0]))
    for part in parts(blocks.shape[0], a.shape[1]):
        weights, offset = _held(blocks[part])
        c[:, part] = a @ (weights + _spread(offset, a.shape[1])).T
    return c


def magnitude_a16(a: Array, blocks: Array, storage_format_named: bool = False) -> Array:
    """sum_k |a| * (|scale * code| + |offset|), float64[M, N]: what rounding errors are relative to.

    Scale and offset apart, so that it covers a kernel that takes the scale out of a block's sum as
    well as one that dequantizes each weight first (whose terms |a * w| are never larger). `storage_format_named`:
    of the weights as records hold them, see `same_operands_half`.
    """
    _same_k(a.shape[1], blocks)
    a = np.abs(a).astype(np.float64)
    c = np.empty((a.shape[0], blocks.shape[0]))
    for part in parts(blocks.shape[0], a.shape[1]):
        weights, offset = (_held if storage_format_named else _operands)(blocks[part])
        size = np.abs(weights, out=weights).reshape(*offset.shape, -1)
        size += np.abs(offset)[..., None]
        c[:, part] = a @ weights.T
    return c


def least_half(blocks: Array) -> Array:
    """What a weight may be off by however small it is, float64[N], where it is rounded to float16.

    A row of blocks[N, K/32] is scaled so that its largest |d| is float16 2^-9 at least, and its
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


def magnitude_half(a: Array, blocks: Array) -> Array:
    """As `magnitude_a16`, each weight counted as 2^11 `least_half` at least, float64[M, N]: with
    one rounding of 2^-11 that is what rounding the weights to float16 may cost."""
    of_rows = np.abs(a).astype(np.float64).sum(axis=1)
    return magnitude_a16(a, blocks, storage_format_named=True) + np.outer(of_rows, 2.0**11 * least_half(blocks))


def same_operands_a8(q81: Q81, blocks: Array) -> Array:
    """The product on the given Q8_1 bits, float64[M, N].

    Per block  scale * da * sum(code * q) + offset * s,  the identity every A8 kernel computes in
    its own way; summed over the K/32 blocks. Of formats that files come in scale, code and offset
    are those of `qformats.storage`.
    """
    return both_a8(q81, blocks)[0]


def magnitude_a8(q81: Q81, blocks: Array) -> Array:
    """sum_b (|scale * da| * sum |code * q| + |offset * s|), float64[M, N].

    By elements, not by blocks: it bounds the partial sums of a kernel that turns part of a block
    (one packed word, say) into float32 as well as those of one that sums a whole block in int32.
    """
    return both_a8(q81, blocks)[1]


def both_a8(q81: Q81, blocks: Array) -> tuple[Array, Array]:
    """(same_operands_a8, magnitude_a8): the weights are made float64 once for both."""
    _same_k(q81.q.shape[1], blocks)
    values, sums = q81.values(), q81.s.astype(np.float64)
    sizes, of_sums = np.abs(values), np.abs(sums)
    same = np.empty((values.shape[0], blocks.shape[0]))
    size = np.empty_like(same)
    for part in parts(blocks.shape[0], values.shape[1]):
        weights, offset = _held(blocks[part])
        if offset.shape[1] != sums.shape[1]:
            if offset.any():
                raise ValueError(
                    f"{format_of(blocks).name} has minima for 16 elements, and Q8_1 sums of {BLOCK}"
                )
            offset = offset[:, : sums.shape[1]]
        same[:, part] = values @ weights.T + sums @ offset.T
        np.abs(weights, out=weights)
        size[:, part] = sizes @ weights.T + of_sums @ np.abs(offset).T
    return same, size


def both_tokens(tokens: Tokens, blocks: Array) -> tuple[Array, Array]:
    """(the product of these int8 with those of their `weights`, sum |terms|), float64[M, N]."""
    _same_k(tokens.q.shape[1], blocks)
    values = tokens.values()
    same = np.empty((values.shape[0], blocks.shape[0]))
    size = np.empty_like(same)
    for part in parts(blocks.shape[0], values.shape[1]):
        codes, factor = tokens.weights(blocks[part])
        weights = codes * factor.astype(np.float64)[:, None]
        same[:, part] = values @ weights.T
        size[:, part] = np.abs(values) @ np.abs(weights).T
    return same, size


def sample(m: int, n: int, limit: int = 2**18, seed: int = 0) -> tuple[Array, Array]:
    """Rows and columns of C[M, N] to check: all of them, or a fair choice of about `limit` outputs.

    A float64 product of 4096 x 4096 x 14336 takes minutes, so large results are checked on
    rows x columns: always the first and last, both sides of the edge of the last tile of
    8 ... 256 (`TILES`), and a seeded random choice of the others. Returns two sorted int64 arrays;
    rows.size * columns.size <= limit unless the edges alone are more.
    """
    if min(m, n, limit) < 1:
        raise ValueError(f"M, N and limit must be positive, got {m}, {n}, {limit}")
    if m * n <= limit:
        return np.arange(m), np.arange(n)
    rng = np.random.default_rng([m, n, limit, seed])
    side = int(limit**0.5)
    rows = _choose(m, max(side, limit // n), rng)
    return rows, _choose(n, max(1, limit // rows.size), rng)


def _choose(size: int, count: int, rng: np.random.Generator) -> Array:
    if count >= size:
        return np.arange(size)
    edges = {0, 1, size - 2, size - 1}
    for tile in TILES:
        last = (size - 1) // tile * tile
        edges |= {last - 1, last, last + 1}
    kept = np.array(sorted(edge for edge in edges if 0 <= edge < size))
    others = np.setdiff1d(np.arange(size), kept)
    extra = min(max(0, count - kept.size), others.size)
    return np.sort(np.concatenate([kept, rng.choice(others, extra, replace=False)]))


def parts(n: int, k: int) -> Iterator[slice]:
    """N in parts whose weights in float64 stay in a cache: several times as fast as all at once."""
    step = max(1, PART // k)
    for start in range(0, n, step):
        yield slice(start, start + step)


def _operands(blocks: Array) -> tuple[Array, Array]:
    """scale * level [N, K] and offset [N, groups of K] in float64."""
    layout = format_of(blocks)
    scale, offset = layout.scale(blocks).astype(np.float64), layout.offset(blocks)
    weights = layout.levels(blocks).reshape(*scale.shape, -1) * scale[..., None]
    return weights.reshape(blocks.shape[0], -1), offset.astype(np.float64)


def _held(blocks: Array) -> tuple[Array, Array]:
    """The same, as records hold them."""
    if format_of(blocks).name not in FILE_FORMATS:
        return _operands(blocks)
    made = stored_weights(blocks)
    weights = made.levels.reshape(*made.scale.shape, -1) * made.scale[..., None]
    offset = np.zeros_like(made.scale) if made.offset is None else made.offset
    return weights.reshape(blocks.shape[0], -1), offset


def _spread(offset: Array, k: int) -> Array:
    """Of groups [N, groups] for each element [N, K]."""
    return np.repeat(offset, k // offset.shape[1], axis=1)


def _same_k(k: int, blocks: Array) -> None:
    size = format_of(blocks).elements
    if blocks.ndim != 2 or blocks.shape[1] * size != k:
        raise ValueError(
            f"activations of K={k} need weight blocks of shape [N, {k // size}], "
            f"got {list(blocks.shape)}"
        )
