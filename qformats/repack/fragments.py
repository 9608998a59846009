"""Fragment-packed tiles: 16 rows x 128 K of weights, laid out as tensor cores take them.

**The order of K.** Of each row and each 16 K a lane 4g + t holds one word of four codes. For int8
products the word is an operand as it is. For float16 products a lane needs two registers of two
weights: k = 2t, 2t + 1 and k = 2t + 8, 2t + 9. A mask finds every second byte of a word, so the
lower and the upper eight K are interleaved:

    lane t          0              1              2              3
    position    0  1  2  3     4  5  6  7     8  9 10 11    12 13 14 15
    k           0  8  1  9     2 10  3 11     4 12  5 13     6 14  7 15      MMA_ORDER

    word                      |  2t  | 2t + 8 | 2t + 1 | 2t + 9 |
    word      & 0x00FF00FF    |  2t  |        | 2t + 1 |        |    a0: neighbours
    word >> 8 & 0x00FF00FF    | 2t+8 |        | 2t + 9 |        |    a2: neighbours

So float16 A is read in its natural order. Int8 products are the same in every order, as long as the
codes of A have it too: `steps.kernels.parts.activations.layouts.q8_1_mma_order` writes them so.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qformats.codec import BLOCK, FILE_FORMATS, Blocks, Floats
from qformats.repack.fields import matrix_format
from qformats.storage import StorageFormat, storage_format, to_storage_format
from qformats.threads import by_rows

TILE_ROWS, TILE_K = 16, 128
"""A fragment-packed tile: the rows of an mma's A operand, and four blocks along K."""

TILE_GROUP = 8
"""Row tiles whose packed tiles of the same 128 K lie side by side: a step along K of 128 rows is
one piece of memory, one bulk copy."""

CODE_SCALE = {4: 16, 5: 8, 6: 4, 8: 1}
"""By bits of W: the factor of a code in the bytes that a tensor core multiplies. A nibble
stays in the upper half of its byte (one mask, no shift down), further bits go right below it."""

E2M1_PLACES = ((9, 15), (6, 12), (0, 13), (3, 14))
"""(lowest bit of the size, bit of the sign) of MXFP4's codes in 16 bits. Those of a float16 are 9
to 11 and 15: a mask finds the first code, a shift by 3 and a mask the second."""

CHUNK_HALVES = 8
"""float16 of a 16-byte chunk."""

MMA_ORDER = (0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15)
"""The k at each position of 16 in a packed tile: position 4t + i has k = 2t + (0, 8, 1, 9)[i]."""

NATURAL_ORDER = tuple(range(16))

HALF_SCALE = 2.0**-24
"""The smallest float16, and all that is below 2^-13 are multiples of it: read as float16, the
integer n < 2048 is n * HALF_SCALE, so that a mask alone makes a number of a code."""

MINIMUM_SCALE = 2.0**-15
"""By which the minima of a packed tile are to be multiplied. At HALF_SCALE float16 could not hold
them as finely as the weights that they are added to."""


@by_rows
def tiles(blocks: Blocks) -> tuple[NDArray[np.uint8], Floats]:
    """Blocks [N, K//32] as fragment-packed tiles of 16 rows x 128 K, laid out as `mma.m16n8k32`
    takes its A, and the row scales for a kernel's sums: (packed, row_scales).

    packed: uint8 [ceil(N/128), ceil(K/128), 8, bytes of a tile], flat: in groups of 128 rows; 128 K
    of a whole group come before the next 128 K. A tile has as many bytes as ggml needs for its 64
    blocks, in another order. Rows and blocks beyond the matrix have scale 0. For lane 4g + t and
    with each 16 K in MMA_ORDER (see the module's docstring) it is

        codes   4 and 5 bits: for each half of 64 K, 16 bytes a lane: for its two blocks a word of
                row g, one of row g + 8; byte i of a word holds the codes of k = o (low nibble) and
                k = 16 + o (high), where o = MMA_ORDER[4t + i], as byte o of a ggml block does
                8 bits: for each block, 16 bytes a lane: registers a0, a1, a2, a3 of an int8 mma,
                byte i of them with k = o, o, 16 + o, 16 + o
        bits    5 bits only: for each half a word a lane; bits 8i + 2w and 8i + 2w + 1 belong to the
                two codes in byte i of word w: the lowest bit of the code whose other four are the
                high nibble, and the highest of the one whose other four are the low nibble
        scales  float16 [8 g][row g, row g + 8][4 blocks]: d'
        minima  q4_1 and q5_1 only: likewise m'

    Codes of q4_0 are centred: two's complement of code - 8.

    File formats are stored as `qformats.storage` says. Where 16 elements share a scale

        scales  float16 [2 halves of 64 K][row g, row g + 8][8 g][4 groups]: d'; minima likewise
        codes   6 bits: the upper four as a format of 4 bits, and
        bits    for each half, block 0 and then block 1 in 8 bytes a lane: in byte i of a word bits
                4u + 2r and above are the lower two of the code in byte i of row g + 8r, of its
                lower (u = 0) or upper nibble

    and MXFP4 has

        codes   words of the same blocks and rows, where E2M1_PLACES says: of the codes of bytes 0
                (low nibble), 1 (low), 0 (high) and 1 (high) three bits of size, and the sign; 16
                bits further those of bytes 2 and 3
        scales  bytes [8 g][row g, row g + 8][4 blocks]: the upper half of the float16 d'

    row_scales: float32 [N rounded up to whole groups], a power of two for each row, by which its
    scales and minima are divided:

        d' = d / (row_scale * HALF_SCALE)      m' = m / (row_scale * MINIMUM_SCALE)

    so that a kernel can make float16 weights of them, code * HALF_SCALE * d' + MINIMUM_SCALE * m',
    with one multiply-add on the bits of a code taken as a float16 (formats without minima have -8,
    -16 or -128 times HALF_SCALE * d' in their place). The row scale brings the row's largest |d'|
    or |m'| into [2^15, 2^16): nothing overflows.

    d' is exact, and so is m' unless it is below 2^-14, 2^-29 of the row's largest weight or so. Of
    the float16 weights those above 2^-14 keep 11 bits; those below are multiples of HALF_SCALE. So
    a block whose d is down to 2^-9 of the row's largest loses nothing against its own largest
    weight, and however small it is, a weight is off by no more than 2^-15 of the row's largest |d|
    (2^-24 of its largest |m|, if that is more). A row of zeros, d = 0 and m = 0, has scale 2^-15.
    NaN and Inf in d and m stay, and do not count as the largest.
    """
    fmt = matrix_format("tiles", blocks)
    if fmt.name in FILE_FORMATS:
        scaled, d, m = to_storage_format(blocks)
    else:
        scaled, d = blocks.copy(), blocks["d"].astype(np.float64)
        m = blocks["m"].astype(np.float64) if "m" in (fmt.dtype.names or ()) else None
    with np.errstate(invalid="ignore"):  # a NaN of any kind is a NaN
        power = 15 - largest_exponent(d, -128 if fmt.name == "mxfp4" else -24)
        if m is not None:
            power = np.minimum(power, 24 - largest_exponent(m, -24))
        row_power = power.reshape(-1, *[1] * (d.ndim - 1))
        scaled["d"] = _as_scales(np.ldexp(d, row_power), scaled.dtype["d"])
        if m is not None:
            scaled["m"] = np.ldexp(m, row_power - 9)
    row_scales = np.ones(row_tiles(len(blocks)) * TILE_ROWS, np.float32)
    row_scales[: len(blocks)] = np.ldexp(1.0, 24 - power)
    return in_groups(pack_tiles(scaled, storage_format(fmt)), row_tiles(len(blocks))), row_scales


def _as_scales(d: NDArray[np.float64], dtype: Any) -> NDArray[Any]:
    """d' as a packed tile holds it: float16, or the upper byte of one."""
    return (d.astype(np.float16).view(np.uint16) >> 8).astype(np.uint8) if dtype == np.uint8 else d


def largest_exponent(x: NDArray[np.float64], least: int) -> NDArray[np.int32]:
    """floor(log2) of the largest finite |value| of each row, at least `least`, the exponent of the
    smallest scale there is."""
    size = np.abs(x.reshape(len(x), -1))
    largest = np.where(np.isfinite(size), size, 0.0).max(axis=1, initial=2.0**least)
    return np.frexp(largest)[1] - 1


def row_tiles(n: int) -> int:
    """The row tiles of n rows, rounded up to whole groups."""
    return -(-n // (TILE_GROUP * TILE_ROWS)) * TILE_GROUP


def in_groups(packed: NDArray[np.uint8], rows: int) -> NDArray[np.uint8]:
    """[row tile * K tile, bytes] of `rows` row tiles -> [group, K tile, row tile of it, bytes],
    flat."""
    by_row = packed.reshape(rows // TILE_GROUP, TILE_GROUP, -1, packed.shape[1])
    return np.ascontiguousarray(by_row.transpose(0, 2, 1, 3)).reshape(-1)


def pack_tiles(
    blocks: Blocks, fmt: StorageFormat, order: tuple[int, ...] = MMA_ORDER
) -> NDArray[np.uint8]:
    """The packed tiles of `tiles`, uint8 [row tile * K tile, bytes], in whole groups of rows; or
    with each 16 K in another order."""
    n, blocks_k = blocks.shape
    rows, k_tiles = row_tiles(n), -(-blocks_k * BLOCK // TILE_K)
    padded = blocks
    if (n, blocks_k) != (rows * TILE_ROWS, k_tiles * 4):
        padded = np.zeros((rows * TILE_ROWS, k_tiles * 4), blocks.dtype)
        padded[:n, :blocks_k] = blocks
    # axes of a plane: row tile, row g or g + 8, g, K tile, block
    by_tile = (rows, 2, 8, k_tiles, 4)
    qs = _ordered(np.ascontiguousarray(padded["qs"]).view(np.uint8), order)
    planes = []
    if fmt.bits == 8:  # ... half of the block, t, byte
        words = qs.view("<u4").reshape(*by_tile, 2, 4)
        planes.append(words.transpose(0, 3, 4, 2, 6, 5, 1))
    else:
        if fmt.bits == 5:
            bits = np.unpackbits(np.ascontiguousarray(padded["qh"]), axis=-1, bitorder="little")
            bits = _ordered(bits, order)
            pairs = np.stack([qs >> 4 & 1, bits[..., :16]], axis=-2)  # [..., which, 16 bytes]
            qs = np.asarray(qs & 15 | (qs >> 5 | bits[..., 16:] << 3) << 4, np.uint8)
        elif fmt.name == "e2m1":
            qs = _sizes_and_signs(qs)
        elif fmt.name == "q4_0":
            qs = qs ^ np.uint8(0x88)
        # ... half of the tile, block of that half, t
        words = np.ascontiguousarray(qs).view("<u4").reshape(rows, 2, 8, k_tiles, 2, 2, 4)
        planes.append(words.transpose(0, 3, 4, 2, 6, 5, 1))
        if fmt.bits == 5:
            pairs = pairs.reshape(rows, 2, 8, k_tiles, 2, 2, 2, 4, 4)  # r h g K | half b which t i
            # word of a half and lane: byte i, bit 4 b + 2 (row g + 8) + which
            octets = pairs.transpose(0, 3, 4, 2, 7, 8, 5, 1, 6).reshape(rows, k_tiles, 2, 32, 4, 8)
            planes.append(np.packbits(octets, axis=-1, bitorder="little"))
        elif fmt.bits == 6:
            shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
            lowest = np.asarray(padded["qh"][..., None, :] >> shifts & 3, np.uint8)
            two = _ordered(lowest.reshape(*padded.shape, BLOCK), order)
            two = two.reshape(rows, 2, 8, k_tiles, 2, 2, 2, 4, 4)  # r g K | half b u t i
            places = np.array([[0, 4], [2, 6]], np.uint8)[:, None, None, None, None, :, None, None]
            words = np.bitwise_or.reduce(two << places, axis=(1, 6))  # rows g K | half b t i
            planes.append(words.transpose(0, 2, 3, 1, 5, 4, 6))
    own = [field for field in ("d", "m") if field in (fmt.dtype.names or ())]
    if fmt.group < BLOCK:  # ... half of the tile, two blocks of two groups
        by_group = (rows, 2, 8, k_tiles, 2, 4)
        planes += [padded[f].reshape(by_group).transpose(0, 3, 4, 1, 2, 5) for f in own]
    else:
        planes += [padded[field].reshape(by_tile).transpose(0, 3, 2, 1, 4) for field in own]
    flat = [
        np.ascontiguousarray(part).reshape(rows * k_tiles, -1).view(np.uint8) for part in planes
    ]
    return np.concatenate(flat, axis=1)


def _ordered(codes: NDArray[np.uint8], order: tuple[int, ...]) -> NDArray[np.uint8]:
    """Of [..., 16] or [..., 32] each 16 in this order."""
    if order == NATURAL_ORDER:
        return codes
    sixteens = codes.reshape(*codes.shape[:-1], -1, len(order))
    return np.ascontiguousarray(sixteens[..., order]).reshape(codes.shape)


def _sizes_and_signs(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Of bytes [..., 16] with codes of E2M1, in words of four, their words."""
    four = codes.reshape(*codes.shape[:-1], 4, 4).astype(np.uint32)
    words = np.zeros(four.shape[:-1], np.uint32)
    for n, (size_at, sign_at) in enumerate(E2M1_PLACES):
        for half in range(2):
            code = four[..., 2 * half + n % 2] >> 4 * (n // 2) & 15
            words |= ((code & 7) << size_at | (code >> 3) << sign_at) << 16 * half
    return words.astype("<u4").view(np.uint8).reshape(codes.shape)
