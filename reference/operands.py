"""Activations as kernels are given them: Q8_1, 16-bit floats, or int8 with one scale per token.

`Q81`, `Halves`, `Bfloats` and `Tokens` hold the very bits that a kernel multiplied. `of_values` is
the recipe of each; it raises ValueError for what is no matrix [M, K].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from qformats import BLOCK
from reference.bfloat16 import rounded_to_bfloat16
from reference.sampling import pieces

Array = np.ndarray[Any, np.dtype[Any]]
Pick = Array | slice


class Operands:
    """What all of them are: arrays, the first of them [M, K] and all with a row for each token.

    TypeError where an array has another dtype than `DTYPES` says, ValueError for another shape.
    """

    DTYPES: ClassVar[dict[str, type[np.generic]]]
    KIND: ClassVar[str]  # in sentences
    BLOCK: ClassVar[int | None] = None  # elements of K that share a scale, None for all of them

    def __post_init__(self) -> None:
        own = type(self).__name__
        for name, dtype in self.DTYPES.items():
            array = getattr(self, name)
            if not isinstance(array, np.ndarray) or array.dtype != dtype:
                found = getattr(array, "dtype", type(array).__name__)
                raise TypeError(f"{own}.{name} must be a {np.dtype(dtype)} array, got {found}")
        shape, *others = (array.shape for array in self.arrays)
        size = self.BLOCK or 1
        if len(shape) != 2 or shape[1] % size:
            raise ValueError(f"{own} need [M, K] with K % {size} == 0, got {list(shape)}")
        scales = shape[:1] if self.BLOCK is None else (shape[0], shape[1] // size)
        if any(other != scales for other in others):
            raise ValueError(
                f"{own} of {list(shape)} need scales of {list(scales)}, got "
                + " and ".join(str(list(other)) for other in others)
            )

    @property
    def arrays(self) -> tuple[Array, ...]:
        """Its arrays, that of [M, K] first."""
        return tuple(getattr(self, name) for name in self.DTYPES)

    def rows(self, pick: Pick) -> Self:
        """The same, of some tokens only."""
        return type(self)(*(array[pick] for array in self.arrays))


@dataclass(frozen=True)
class Q81(Operands):
    """Q8_1 activations as planes: value = d * q, and s stands for the sum of the block's values.

    q int8[M, K], d float32[M, K/32], s float32[M, K/32].
    """

    q: Array
    d: Array
    s: Array
    DTYPES = {"q": np.int8, "d": np.float32, "s": np.float32}  # noqa: RUF012 - a ClassVar
    KIND = "Q8_1"
    BLOCK = BLOCK

    @classmethod
    def of_blocks(cls, blocks: Array) -> Q81:
        """From structured[M, K/32] of `block_q8_1` (d and s widened from f16, exactly)."""
        q = np.ascontiguousarray(blocks["qs"]).reshape(blocks.shape[0], -1)
        return cls(q, blocks["d"].astype(np.float32), blocks["s"].astype(np.float32))

    @classmethod
    def of_values(cls, a: Array) -> Q81:
        """Quantize float32[M, K], K a multiple of 32, as ggml's reference does, but keep d and
        s = d * sum(q) in float32."""
        _require_matrix(a, BLOCK)
        planes = zip(*(_quantized(a[part]) for part in pieces(*a.shape)), strict=True)
        q, d, total = (np.concatenate(each) for each in planes)
        return cls(q, d, total)

    def values(self) -> Array:
        """d * q in float64[M, K]."""
        return self.q * np.repeat(self.d.astype(np.float64), BLOCK, axis=1)


@dataclass(frozen=True)
class Halves(Operands):
    """Activations in float16 with a power of two for each token: value = h * factor.

    h float16[M, K], factor float32[M].
    """

    h: Array
    factor: Array
    DTYPES = {"h": np.float16, "factor": np.float32}  # noqa: RUF012 - a ClassVar
    KIND = "float16"

    @classmethod
    def of_values(cls, a: Array) -> Halves:
        """Round float32[M, K], each token scaled so that its largest |a| is in [2^14, 2^15).

        A token that is below 2^-112 throughout is scaled by 2^126, the most that has a float32
        inverse; one that holds a NaN or an infinity, by 2^-114. Float16[M, K] is taken as it is,
        h = a, with factors of 1.
        """
        _require_matrix(a)
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

    def values(self) -> Array:
        """h * factor in float64[M, K]."""
        return self.h * self.factor.astype(np.float64)[:, None]


@dataclass(frozen=True)
class Bfloats(Operands):
    """Activations in bfloat16, as a caller gave them.

    b float32[M, K], all of them numbers that bfloat16 has; ValueError if they are not.
    """

    b: Array
    DTYPES = {"b": np.float32}  # noqa: RUF012 - a ClassVar
    KIND = "bfloat16"

    def __post_init__(self) -> None:
        super().__post_init__()
        if (np.ascontiguousarray(self.b).view(np.uint32) & 0xFFFF).any():
            raise ValueError("Bfloats.b has numbers that bfloat16 has not")

    @classmethod
    def of_values(cls, a: Array) -> Bfloats:
        """Round float32[M, K]; what is bfloat16 already stays what it is."""
        _require_matrix(a)
        return cls(rounded_to_bfloat16(a))

    def values(self) -> Array:
        """b in float64[M, K]."""
        return self.b.astype(np.float64)


@dataclass(frozen=True)
class Tokens(Operands):
    """Activations in int8 with one scale for each token: value = d * q.

    q int8[M, K], d float32[M]. They are multiplied by weights in int8 with one factor a row, those
    of `qformats.repack.byte_weights`.
    """

    q: Array
    d: Array
    DTYPES = {"q": np.int8, "d": np.float32}  # noqa: RUF012 - a ClassVar
    KIND = "int8"

    @classmethod
    def of_values(cls, a: Array) -> Tokens:
        """Quantize float32[M, K] as Q8_1 is, a row for a block."""
        _require_matrix(a)
        planes = zip(*(_codes(a[part]) for part in pieces(*a.shape)), strict=True)
        q, d = (np.concatenate(each) for each in planes)
        return cls(q, d)

    @classmethod
    def of_q81(cls, q81: Q81) -> Tokens:
        """The same bits, of tokens that are one block long."""
        return cls(q81.q, np.ascontiguousarray(q81.d.reshape(len(q81.q))))

    def values(self) -> Array:
        """d * q in float64[M, K]."""
        return self.q * self.d.astype(np.float64)[:, None]


def _require_matrix(a: Array, multiple: int = 1) -> None:
    if a.ndim != 2 or not a.size or a.shape[1] % multiple:
        raise ValueError(f"a must be [M, K] with K % {multiple} == 0, got {list(a.shape)}")


def _codes(x: Array) -> tuple[Array, Array]:
    """q int8[..., K] and d = amax / 127, float32[...], of float32[..., K]. A NaN or infinity among
    the K is their d, and all their codes are 0, as where 1 / d overflows."""
    x = np.asarray(x, dtype=np.float32)
    d = np.abs(x).max(axis=-1) / np.float32(127)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / d
    known = np.isfinite(d) & np.isfinite(inverse)
    inverse = np.where(known, inverse, np.float32(0))
    scaled = np.where(known[..., None], x, np.float32(0)) * inverse[..., None]
    # roundf: halves away from zero. |scaled| <= 127.5 - ulp, and floor(|x| + 0.5) in float64
    # cannot round up by accident as it could in float32.
    q = np.sign(scaled) * np.floor(np.abs(scaled.astype(np.float64)) + 0.5)
    return q.astype(np.int8), d


def _quantized(a: Array) -> tuple[Array, Array, Array]:
    """q int8[M, K], d and s float32[M, K/32] of float32[M, K]."""
    x = np.asarray(a, dtype=np.float32).reshape(a.shape[0], -1, BLOCK)
    q, d = _codes(x)
    with np.errstate(invalid="ignore"):  # an infinite d times 0
        s = d * q.sum(axis=-1, dtype=np.float32)
    return q.reshape(a.shape), d, s
