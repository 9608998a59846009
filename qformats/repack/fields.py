"""Codes, scales and offsets of weight blocks, each in an array of its own.

ggml interleaves scales and codes, so that the codes of q4_0, q5_0 and q8_0 lie at 2-byte addresses
and no load wider than 16 bits is safe. Put apart, the codes are aligned for 128-bit loads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from qformats.codec import FILE_FORMATS, WEIGHT_FORMATS, Blocks, Floats, Format, format_of

KNOWN: Final = (*WEIGHT_FORMATS, *FILE_FORMATS)
"""Formats that `as_bytes`, `tiles` and `byte_tiles` take; the others take the first five."""

CHUNK = 16
"""Bytes of a chunk, which a GPU thread loads at once: the codes of a block of 4 or 5 bits, or half
of 8."""


@dataclass(frozen=True, slots=True, eq=False)
class Planes:
    """One matrix of weight blocks [N, K//32], each kind of content in an array of its own.

    `qs` keeps ggml's order inside a block: nibble formats uint8[N, K//32, 16], byte j holding
    element j (low) and element j+16 (high); q8_0 int8[N, K//32, 32]. `qh` is uint32[N, K//32],
    bit j the fifth bit of element j, and uint32[N, 0] in formats without one. `scale` and `offset`
    are float32[N, K//32] with value = scale * code + offset. All are C-contiguous copies.
    """

    format: Format
    qs: NDArray[Any]
    qh: NDArray[np.uint32]
    scale: Floats
    offset: Floats

    @property
    def nbytes(self) -> int:
        """Bytes of the planes a kernel needs: `offset` counts only where it is a minimum."""
        offset = self.offset.nbytes if "m" in (self.format.dtype.names or ()) else 0
        return self.qs.nbytes + self.qh.nbytes + self.scale.nbytes + offset


def planes(blocks: Blocks) -> Planes:
    """Quants, fifth bits, scales and offsets of weight blocks [..., K//32], apart.

    Raises TypeError where `blocks` is no array of a weight format (q8_1 holds activations, whose s
    has no plane), ValueError where it is empty.
    """
    fmt = _weight_format(blocks)
    scale, offset = fmt.scale(blocks), fmt.offset(blocks)
    if "qh" in (fmt.dtype.names or ()):
        qh = np.ascontiguousarray(blocks["qh"]).view("<u4")[..., 0]
    else:
        qh = np.empty((*blocks.shape[:-1], 0), np.uint32)
    return Planes(fmt, np.array(blocks["qs"], order="C"), qh, scale, offset)


def from_planes(apart: Planes) -> Blocks:
    """The blocks that `planes` took apart, bit for bit (where d and m are not NaN).

    Raises ValueError where a scale or offset is not a float16 any more, naming it, since the
    block could not hold it.
    """
    fmt = apart.format
    blocks: Blocks = np.zeros(apart.scale.shape, fmt.dtype)
    blocks["d"] = _as_half(apart.scale, "scale")
    blocks["qs"] = apart.qs
    names = fmt.dtype.names or ()
    if "m" in names:
        blocks["m"] = _as_half(apart.offset, "offset")
    if "qh" in names:
        blocks["qh"] = np.ascontiguousarray(apart.qh)[..., None].view(np.uint8)
    return blocks


def _weight_format(
    blocks: Blocks, taker: str = "planes", known: tuple[str, ...] = WEIGHT_FORMATS
) -> Format:
    fmt = format_of(blocks)
    if fmt.name not in known:
        raise TypeError(
            f"{taker} takes weight blocks ({', '.join(known)}), and these are {fmt.name}"
        )
    return fmt


def matrix_format(taker: str, blocks: Blocks, known: tuple[str, ...] = WEIGHT_FORMATS) -> Format:
    """The format of a matrix of blocks [N, K//elements]. TypeError where it is none of `known`,
    ValueError for another number of dimensions and for an empty matrix; both name `taker`."""
    if blocks.ndim != 2:
        raise ValueError(
            f"{taker} takes a matrix of blocks [N, K//32], got {blocks.ndim} dimensions"
        )
    fmt = _weight_format(blocks, taker, known)
    if blocks.size == 0:
        raise ValueError(f"blocks of shape {blocks.shape} hold nothing; pass [N, K//32] of them")
    return fmt


def _as_half(value: Floats, what: str) -> NDArray[np.float16]:
    with np.errstate(all="ignore"):
        half = value.astype(np.float16)
        changed = half.astype(np.float32) != value
    if changed.any():
        index = tuple(int(i) for i in np.argwhere(changed)[0])
        raise ValueError(f"{what} = {value[index]} at block {index} is not a float16")
    return half


def as_bytes(blocks: Blocks) -> tuple[NDArray[np.uint8]]:
    """Blocks [..., K//elements] as they lie in memory, uint8[blocks * block_bytes]; nothing is
    copied where they are C-contiguous. TypeError for what are no blocks of `KNOWN` formats."""
    fmt = _weight_format(blocks, "as_bytes", KNOWN)
    return (np.ascontiguousarray(blocks).view(np.uint8).reshape(blocks.size * fmt.block_bytes),)


def k_outermost(blocks: Blocks) -> tuple[NDArray[np.uint8], NDArray[np.uint32], Floats, Floats]:
    """Planes of blocks [N, K//32] with K outermost: one step along K reads one piece of memory.

    (qs, qh, scale, offset), each flat: qs uint8[K//32 * chunks, N, 16], where 16 bytes of row n are
    followed by 16 bytes of row n + 1, so that 32 lanes with a row each load 512 bytes in one piece,
    all aligned (chunks = 1 for nibble formats, 2 for q8_0); qh uint32[K//32, N], a single 0 in
    formats without one; scale and offset float32[K//32, N].
    """
    matrix_format("k_outermost", blocks)
    apart = planes(blocks)
    n = blocks.shape[0]
    chunks = apart.qs.view(np.uint8).reshape(n, -1, CHUNK).transpose(1, 0, 2)
    qh = apart.qh.T if apart.qh.size else np.zeros(1, np.uint32)
    return tuple(  # type: ignore[return-value]
        np.ascontiguousarray(plane).reshape(-1)
        for plane in (chunks, qh, apart.scale.T, apart.offset.T)
    )
