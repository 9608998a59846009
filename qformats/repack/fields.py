"""Blocks as they lie, and their codes, scales and offsets each in an array of its own.

ggml interleaves scales and codes, so that the codes of q4_0, q5_0 and q8_0 lie at 2-byte addresses
and no load wider than 16 bits is safe. Put apart, the codes are aligned for 128-bit loads.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from qformats.codec import FILE_FORMATS, WEIGHT_FORMATS, Blocks, Floats, Format, format_of

KNOWN: Final = (*WEIGHT_FORMATS, *FILE_FORMATS)
"""Formats that `as_bytes`, `tiles` and `byte_tiles` take; `k_outermost` takes the first five."""

CHUNK = 16
"""Bytes of a chunk, which a GPU thread loads at once: the codes of a block of 4 or 5 bits, or half
of 8."""


def known_format(taker: str, blocks: Blocks, known: tuple[str, ...] = KNOWN) -> Format:
    """The format of blocks; TypeError, which names `taker`, where it is none of `known`."""
    fmt = format_of(blocks)
    if fmt.name not in known:
        raise TypeError(
            f"{taker} takes weight blocks ({', '.join(known)}), and these are {fmt.name}"
        )
    return fmt


def matrix_format(taker: str, blocks: Blocks, known: tuple[str, ...] = KNOWN) -> Format:
    """The format of a matrix of blocks [N, K//elements]. TypeError where it is none of `known`,
    ValueError for another number of dimensions and for an empty matrix; both name `taker`."""
    if blocks.ndim != 2:
        raise ValueError(
            f"{taker} takes a matrix of blocks [N, K//32], got {blocks.ndim} dimensions"
        )
    fmt = known_format(taker, blocks, known)
    if blocks.size == 0:
        raise ValueError(f"blocks of shape {blocks.shape} hold nothing; pass [N, K//32] of them")
    return fmt


def as_bytes(blocks: Blocks) -> tuple[NDArray[np.uint8]]:
    """Blocks [..., K//elements] as they lie in memory, uint8[blocks * block_bytes]; nothing is
    copied where they are C-contiguous. TypeError for what are no blocks of `KNOWN` formats."""
    fmt = known_format("as_bytes", blocks)
    return (np.ascontiguousarray(blocks).view(np.uint8).reshape(blocks.size * fmt.block_bytes),)


def k_outermost(blocks: Blocks) -> tuple[NDArray[np.uint8], NDArray[np.uint32], Floats, Floats]:
    """Planes of blocks [N, K//32] with K outermost: one step along K reads one piece of memory.

    (qs, qh, scale, offset), each flat: qs uint8[K//32 * chunks, N, 16] in ggml's order inside a
    block, where 16 bytes of row n are followed by 16 bytes of row n + 1, so that 32 lanes with a
    row each load 512 bytes in one piece, all aligned (chunks = 1 for nibble formats, 2 for q8_0);
    qh uint32[K//32, N], bit j the fifth bit of element j, a single 0 in formats without one; scale
    and offset float32[K//32, N] with value = scale * code + offset.
    """
    fmt = matrix_format("k_outermost", blocks, WEIGHT_FORMATS)
    codes = np.ascontiguousarray(blocks["qs"]).view(np.uint8).reshape(len(blocks), -1, CHUNK)
    qh = np.zeros((1, 1), np.uint32)
    if fmt.bits == 5:
        qh = np.ascontiguousarray(blocks["qh"]).view("<u4")[..., 0]
    return tuple(  # type: ignore[return-value]
        np.ascontiguousarray(plane.swapaxes(0, 1)).reshape(-1)
        for plane in (codes, qh, fmt.scale(blocks), fmt.offset(blocks))
    )
