"""What records (`qformats.repack.tiles`) hold of the formats that files come in.

Kernels on tensor cores read no ggml blocks but records, so that a format needs a *carrier*: codes
of 4, 5, 6 or 8 bits, with a float16 scale, and a minimum where there is one, for 32 elements or 16.
Most are carried as an older format, by its own kernels:

    file     carrier   bits a weight of a file, of a record
    mxfp4    c5        4.25     5.25      levels are integers from -12 to 12, a scale is one byte
    iq4_nl   q8_0      4.5      8.5       so they are here, -127 to 113
    q4_k     q4_1      4.5      5.0
    q5_k     q5_1      5.5      6.0
    q6_k     c6        6.5625   7.0       a scale for 16 elements
    q3_k     c4        3.4375   5.0       likewise, codes of 3 bits as 4
    q2_k     c4m       2.625    6.0       likewise, a minimum too, codes of 2 bits as 4

**What is lost.** Codes and levels are exact. So are scales that are float16 or powers of two: those
of iq4_nl, and those of mxfp4 down to 2^-31 of the largest in their row (smaller ones are 0). A
K-quant's scale is the product of a float16 and an integer of up to 8 bits; it, and its minimum
likewise, is rounded to the 11 bits of a float16, so that a weight w = scale level + offset is off
by at most 2^-11 (|scale level| + |offset|): some 1e-7 of NMSE. `stored_weights` is what is multiplied
then, to which kernels are held as closely as to any other weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from qformats.blocks import BLOCK, BlockDtype
from qformats.codec import FORMATS, Blocks, Format, format_of

GROUP: Final = 16
"""Elements that share a scale in Q2_K, Q3_K and Q6_K: the K of one mma of float16."""

SIGNIFICAND_BITS: Final = 11
"""Of a float16's significand."""

LARGEST_SCALE: Final = 2.0**100
"""Of scales that records take: float32 sums of products with larger ones would overflow."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedFormat:
    """A block of 32 that only records hold; attributes as of a `Format`. `zero`: the code of 0, as
    far as a code is not negative; 0 where there is a minimum."""

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
"""What a record holds blocks of."""

_PAIR: Final = ("<f2", (2,))
_PACKED: Final = {
    made.name: made
    for made in (
        # d: the upper byte of a float16, enough for a power of two from 2^-16 up
        PackedFormat(
            "c5", 5, np.dtype([("d", "u1"), ("qh", "u1", (4,)), ("qs", "u1", (16,))]), 16, BLOCK
        ),
        PackedFormat("c4", 4, np.dtype([("d", *_PAIR), ("qs", "u1", (16,))]), 8),
        PackedFormat("c4m", 4, np.dtype([("d", *_PAIR), ("m", *_PAIR), ("qs", "u1", (16,))]), 0),
        # qs: the upper four bits; qh: byte j % 8 has the lower two of element j
        PackedFormat("c6", 6, np.dtype([("d", *_PAIR), ("qh", "u1", (8,)), ("qs", "u1", (16,))]), 32),
    )
}
_STORED_AS: Final = {
    "mxfp4": "c5",
    "iq4_nl": "q8_0",
    "q2_k": "c4m",
    "q3_k": "c4",
    "q4_k": "q4_1",
    "q5_k": "q5_1",
    "q6_k": "c6",
}


@cache
def storage_format_named(name: str) -> StorageFormat:
    """The format or carrier of this name."""
    return _PACKED.get(name) or FORMATS[name]


def nearest_weight_format(name: str) -> str:
    """The format of `WEIGHT_FORMATS` whose records are the nearest in size and work: what was
    measured of it stands for a format of files that was not."""
    return {"c4": "q4_0", "c4m": "q4_1", "c5": "q5_0", "c6": "q8_0"}.get(
        to := storage_format(storage_format_named(name)).name, to
    )


def storage_format(fmt: StorageFormat) -> StorageFormat:
    """What records hold of a format: itself, or what it is carried as."""
    return storage_format_named(_STORED_AS.get(fmt.name, fmt.name))


@dataclass(frozen=True, slots=True, eq=False)
class StoredWeights:
    """Weights [N, K] as records hold them: scale * level + offset.

    levels: integers [N, K]. scale, offset: float64 [N, K/32] or [N, K/16]; offset is None where a
    carrier has no minimum.
    """

    levels: NDArray[Any]
    scale: NDArray[np.float64]
    offset: NDArray[np.float64] | None


def stored_weights(blocks: Blocks) -> StoredWeights:
    """Of blocks [N, K/32] or [N, K/256] of a format that files come in: what records hold of them.

    Scales and offsets of K-quants have been rounded to 11 bits, halves to even. Those that are no
    numbers stay so.
    """
    fmt = format_of(blocks)
    if fmt.name == "mxfp4" and (wrong := fmt.scale(blocks) > LARGEST_SCALE).any():
        n, b = (int(i) for i in np.argwhere(wrong)[0])
        e = int(blocks["e"][n, b])
        raise ValueError(
            f"block {b} of row {n} has a scale of 2^{e - 128}, and records hold up to 2^100: sums "
            f"of float32 would overflow"
        )
    levels, scale = fmt.levels(blocks), fmt.scale(blocks).astype(np.float64)
    if "dmin" in (fmt.dtype.names or ()):
        return StoredWeights(levels, _rounded(scale), _rounded(fmt.offset(blocks).astype(np.float64)))
    if fmt.codebook is None:
        return StoredWeights(levels - fmt.zero, _rounded(scale), None)  # type: ignore[attr-defined]
    return StoredWeights(levels, scale, None)


def _rounded(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """x with SIGNIFICAND_BITS bits of significand."""
    fraction, exponent = np.frexp(x)
    return np.ldexp(np.rint(fraction * 2.0**SIGNIFICAND_BITS), exponent - SIGNIFICAND_BITS)


def to_storage_format(blocks: Blocks) -> tuple[Blocks, NDArray[np.float64], NDArray[np.float64] | None]:
    """(blocks [N, K/32] of the carrier, without scales; their scales and minima, float64 [N, K/32]
    or [N, K/32, 2])."""
    weights, to = stored_weights(blocks), storage_format(format_of(blocks))
    n, k = weights.levels.shape
    made: Blocks = np.zeros((n, k // BLOCK), to.dtype)
    each = (n, k // BLOCK) if to.group == BLOCK else (n, k // BLOCK, BLOCK // to.group)
    codes = weights.levels.reshape(n, k // BLOCK, BLOCK)
    if to.bits == 8:
        made["qs"] = codes
    else:
        codes = (codes + (16 if to.name == "c5" else 0)).astype(np.uint8)
        codes &= np.uint8(2**to.bits - 1)
        if to.bits == 6:
            two = (codes & 3).reshape(n, -1, 4, 8) << np.array([0, 2, 4, 6], np.uint8)[:, None]
            made["qh"] = np.bitwise_or.reduce(two, axis=2)
            codes >>= np.uint8(2)
        elif to.bits == 5:
            made["qh"] = np.packbits(codes >> 4, axis=-1, bitorder="little")
        made["qs"] = codes[..., :16] & 15 | codes[..., 16:] << 4
    offset = weights.offset
    return made, weights.scale.reshape(each), None if offset is None else offset.reshape(each)
