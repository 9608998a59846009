"""Storage formats: what fragment-packed tiles hold of the formats that files come in.

Kernels on tensor cores read fragment-packed tiles (`qformats.repack.tiles`), not ggml's blocks. So
each format has a *storage format*: codes of 4, 5, 6 or 8 bits, with a float16 scale, and a minimum
where there is one, for 32 elements or 16. Most formats are stored as a weight format, for which
kernels exist; others as a `PackedFormat`:

    file     stored as bits a weight of a file, of a packed tile
    mxfp4    e2m1      4.25     4.25      the codes as they are, a scale is one byte
    iq4_nl   q8_0      4.5      8.5       the codes are the levels, -127 to 113
    q4_k     q4_1      4.5      5.0
    q5_k     q5_1      5.5      6.0
    q6_k     c6        6.5625   7.0       a scale for 16 elements
    q3_k     c4        3.4375   5.0       the same, codes of 3 bits as 4
    q2_k     c4m       2.625    6.0       the same, a minimum too, codes of 2 bits as 4
    iq4_xs   q8_0      4.25     8.5       as iq4_nl, with scales as a K-quant's
    nvfp4    c6        4.5      7.0       levels as mxfp4's, a scale for 16 elements
    q1_0     q4_0      1.125    4.5       levels -1 and 1
    tq2_0    q4_0      2.0625   4.5       levels -1 to 2

**What is lost.** Codes and levels are exact. So are scales that are float16 or powers of two: those
of iq4_nl, nvfp4, q1_0, tq2_0, and those of mxfp4 down to 2^-31 of the largest in their row (smaller
ones are 0). A scale of a K-quant or of iq4_xs is the product of a float16 and an integer of up to 8
bits. It is rounded to the 11 bits of a float16, and so is its minimum. A weight w = scale level +
offset is therefore off by at most 2^-11 (|scale level| + |offset|): some 1e-7 of NMSE where A is
random. The weights of a group share the error of their scale, and that of their minimum, so with an
A that is constant over K the errors of a group add up: 1.3e-5 of sum a^2 w^2 was measured.
`stored_weights` are the rounded weights, and kernels are held to them as closely as to any others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from qformats.blocks import BLOCK, BlockDtype
from qformats.codec import FILE_FORMATS, Blocks, Format, format_named, format_of

GROUP: Final = 16
"""Elements that share a scale in Q2_K, Q3_K and Q6_K: the K of one mma of float16."""

SIGNIFICAND_BITS: Final = 11
"""Of a float16's significand."""

E2M1_SIZES: Final = (0, 1, 2, 3, 4, 6, 8, 12)
"""Of the levels of E2M1, twice what the format says, so that they are integers."""

LARGEST_SCALE: Final = 2.0**100
"""The largest scale of a packed tile: float32 sums of products with larger ones overflow."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedFormat:
    """A block of 32 that only fragment-packed tiles hold; attributes as of a `Format`. `zero` is
    the code of 0; it is 0 where there is a minimum."""

    name: str
    bits: int
    dtype: BlockDtype
    zero: int
    group: int = GROUP

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.dtype.itemsize


StorageFormat = Format | PackedFormat
"""The formats of blocks in fragment-packed tiles."""

_PAIR: Final = ("<f2", (2,))
_PACKED: Final = {
    made.name: made
    for made in (
        # a sign above the number of one of eight sizes; d: the upper byte of a float16, enough for
        # a power of two from 2^-16 up
        PackedFormat("e2m1", 4, np.dtype([("d", "u1"), ("qs", "u1", (16,))]), 0, BLOCK),
        PackedFormat("c4", 4, np.dtype([("d", *_PAIR), ("qs", "u1", (16,))]), 8),
        PackedFormat("c4m", 4, np.dtype([("d", *_PAIR), ("m", *_PAIR), ("qs", "u1", (16,))]), 0),
        # qs: the upper four bits; qh: byte j % 8 has the lower two of element j
        PackedFormat(
            "c6", 6, np.dtype([("d", *_PAIR), ("qh", "u1", (8,)), ("qs", "u1", (16,))]), 32
        ),
    )
}
_STORED_AS: Final = {
    "mxfp4": "e2m1",
    "iq4_nl": "q8_0",
    "q2_k": "c4m",
    "q3_k": "c4",
    "q4_k": "q4_1",
    "q5_k": "q5_1",
    "q6_k": "c6",
    "iq4_xs": "q8_0",
    "nvfp4": "c6",
    "q1_0": "q4_0",
    "tq2_0": "q4_0",
}


@cache
def storage_format_named(name: str) -> StorageFormat:
    """The storage format of this name, or ValueError."""
    return _PACKED.get(name) or format_named(name)


def nearest_weight_format(name: str) -> str:
    """The format of `WEIGHT_FORMATS` whose packed tiles are nearest in size and work. Its
    measurements stand for a file format that was not measured."""
    return {"c4": "q4_0", "c4m": "q4_1", "c6": "q8_0", "e2m1": "q4_0"}.get(
        stored_as := storage_format(storage_format_named(name)).name, stored_as
    )


def storage_format(fmt: StorageFormat) -> StorageFormat:
    """The storage format of a format: itself, or another that stores it."""
    return storage_format_named(_STORED_AS.get(fmt.name, fmt.name))


@dataclass(frozen=True, slots=True, eq=False)
class StoredWeights:
    """Weights [N, K] as fragment-packed tiles hold them: scale * level + offset.

    levels: integers [N, K]. scale, offset: float64 [N, K/32] or [N, K/16]; offset is None where the
    storage format has no minimum.
    """

    levels: NDArray[Any]
    scale: NDArray[np.float64]
    offset: NDArray[np.float64] | None


def stored_weights(blocks: Blocks) -> StoredWeights:
    """Blocks [N, K/32] or [N, K/256] of a file format as fragment-packed tiles hold them.

    Scales and offsets of K-quants are rounded to 11 bits, halves to even. NaN and Inf stay. Raises
    TypeError for blocks of no file format, ValueError for a scale above `LARGEST_SCALE`.
    """
    fmt = format_of(blocks)
    if fmt.name not in FILE_FORMATS:
        raise TypeError(
            f"stored_weights takes blocks of {', '.join(FILE_FORMATS)}, and these are {fmt.name}: "
            f"fragment-packed tiles hold their values as they are"
        )
    if fmt.name == "mxfp4" and (wrong := fmt.scale(blocks) > LARGEST_SCALE).any():
        n, b = (int(i) for i in np.argwhere(wrong)[0])
        e = int(blocks["e"][n, b])
        raise ValueError(
            f"block {b} of row {n} has a scale of 2^{e - 128}, and the largest is 2^100: "
            f"float32 sums would overflow"
        )
    levels, scale = fmt.levels(blocks), fmt.scale(blocks).astype(np.float64)
    if "dmin" in (fmt.dtype.names or ()):
        return StoredWeights(
            levels, _rounded(scale), _rounded(fmt.offset(blocks).astype(np.float64))
        )
    if fmt.codebook is None:
        levels = levels - fmt.zero  # type: ignore[attr-defined]
    if fmt.name != "mxfp4":  # whose powers of two may lie beyond a float16
        scale = _rounded(scale)  # changes none that is one
    return StoredWeights(levels, scale, None)


def _rounded(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """x with SIGNIFICAND_BITS bits of significand."""
    fraction, exponent = np.frexp(x)
    return np.ldexp(np.rint(fraction * 2.0**SIGNIFICAND_BITS), exponent - SIGNIFICAND_BITS)


def to_storage_format(
    blocks: Blocks,
) -> tuple[Blocks, NDArray[np.float64], NDArray[np.float64] | None]:
    """Blocks [N, K/32] or [N, K/256] of a file format -> (blocks [N, K/32] of its storage format,
    without scales; their scales and minima, float64 [N, K/32] or [N, K/32, 2]; None where there are
    no minima). Raises what `stored_weights` does."""
    weights, stored_as = stored_weights(blocks), storage_format(format_of(blocks))
    n, k = weights.levels.shape
    made: Blocks = np.zeros((n, k // BLOCK), stored_as.dtype)
    shape = (
        (n, k // BLOCK) if stored_as.group == BLOCK else (n, k // BLOCK, BLOCK // stored_as.group)
    )
    codes = weights.levels.reshape(n, k // BLOCK, BLOCK)
    if stored_as.bits == 8:
        made["qs"] = codes
    else:
        if stored_as.name == "e2m1":
            codes = np.where(codes < 0, 8, 0) + np.searchsorted(E2M1_SIZES, np.abs(codes))
        codes = (codes + (8 if stored_as.name == "q4_0" else 0)).astype(np.uint8)
        codes &= np.uint8(2**stored_as.bits - 1)
        if stored_as.bits == 6:
            two = (codes & 3).reshape(n, -1, 4, 8) << np.array([0, 2, 4, 6], np.uint8)[:, None]
            made["qh"] = np.bitwise_or.reduce(two, axis=2)
            codes >>= np.uint8(2)
        elif stored_as.bits == 5:
            made["qh"] = np.packbits(codes >> 4, axis=-1, bitorder="little")
        made["qs"] = codes[..., :16] & 15 | codes[..., 16:] << 4
    offset = weights.offset
    return made, weights.scale.reshape(shape), None if offset is None else offset.reshape(shape)
