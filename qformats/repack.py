"""Named rearrangements of weight blocks, done once on the host before a kernel sees them.

ggml interleaves scales and codes, so that the codes of q4_0, q5_0 and q8_0 lie at 2-byte addresses
and no load wider than 16 bits is safe. Put apart, the codes are aligned for 128-bit loads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from qformats.codec import (
    BLOCK,
    FILE_FORMATS,
    FORMATS,
    WEIGHT_FORMATS,
    Blocks,
    Floats,
    Format,
    format_of,
)
from qformats.storage import PackedFormat, StorageFormat, storage_format, to_storage_format

KNOWN: Final = (*WEIGHT_FORMATS, *FILE_FORMATS)
"""Formats that `as_bytes`, `tiles` and `byte_tiles` take; the others take the first five."""


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
    """The blocks as they lie in memory, uint8[blocks * block_bytes]; nothing is copied."""
    fmt = _weight_format(blocks, "as_bytes", KNOWN)
    return (np.ascontiguousarray(blocks).view(np.uint8).reshape(blocks.size * fmt.block_bytes),)


CHUNK = 16
"""Bytes that a GPU thread can load at once: the codes of one block of 4 or 5 bits, or half of 8."""


def k_outermost(blocks: Blocks) -> tuple[NDArray[np.uint8], NDArray[np.uint32], Floats, Floats]:
    """Planes of blocks [N, K//32] with K outermost: what one step along K reads of all rows lies
    together.

    (qs, qh, scale, offset), each flat: qs uint8[K//32 * units, N, 16], where 16 bytes of row n are
    followed by 16 bytes of row n + 1, so that 32 lanes with a row each load 512 bytes in one piece,
    all aligned (units = 1 for nibble formats, 2 for q8_0); qh uint32[K//32, N], a single 0 in
    formats without one; scale and offset float32[K//32, N].
    """
    matrix_format("k_outermost", blocks)
    apart = planes(blocks)
    n = blocks.shape[0]
    units = apart.qs.view(np.uint8).reshape(n, -1, CHUNK).transpose(1, 0, 2)
    qh = apart.qh.T if apart.qh.size else np.zeros(1, np.uint32)
    return tuple(  # type: ignore[return-value]
        np.ascontiguousarray(plane).reshape(-1)
        for plane in (units, qh, apart.scale.T, apart.offset.T)
    )


TILE_ROWS, TILE_K = 16, 128
"""One record of `tiles`: the rows of an mma's A operand, and four blocks along K."""

TILE_GROUP = 8
"""Row tiles whose records of the same 128 K lie side by side: what 128 rows have for a step along K
is one piece, which one bulk copy can bring."""

CODE_SCALE = {4: 16, 5: 8, 6: 4, 8: 1}
"""By bits of W: what a code is multiplied by in the bytes that a tensor core is given. A nibble
stays in the upper half of its byte (one mask, no shift down), further bits go right below it."""


CHUNK_HALVES = 8
"""float16 in a unit."""

TOKEN_GROUP = 8
"""Tokens in a group of activations: units of 16 bytes of so many, side by side, are 128 bytes, and
so lie in all banks of shared memory."""

HALF_SCALE = 2.0**-24
"""The smallest float16, and all that is below 2^-13 are multiples of it: read as float16, the
integer n < 2048 is n * HALF_SCALE, so that a mask alone makes a number of a code."""

MINIMUM_SCALE = 2.0**-15
"""What minima in a record are to be multiplied by beside scales * HALF_SCALE: float16 could not hold
them as finely as the weights they are added to."""


def tiles(blocks: Blocks) -> tuple[NDArray[np.uint8], Floats]:
    """Blocks [N, K//32] as records of 16 rows x 128 K, laid out as `mma.m16n8k32` wants its A, and
    what a kernel's sums are to be multiplied by.

    records: uint8 [ceil(N/128), ceil(K/128), 8, record], flat: in bands of 128 rows, what all of
    them have of 128 K before the next 128 K. A record has as many bytes as ggml needs for 64
    blocks, in another order; rows and blocks beyond the matrix have scale 0. For lane 4g + t it is

        codes   4 and 5 bits: for each half of 64 K, 16 bytes a lane: for its two blocks a word of
                row g, one of row g + 8; byte i of a word holds the codes of k = 4t + i (low nibble)
                and k = 16 + 4t + i (high), as byte 4t + i of a ggml block does
                8 bits: for each block, 16 bytes a lane: registers a0, a1, a2, a3 as they are
        bits    5 bits only: for each half a word a lane; bits 8i + 2w and 8i + 2w + 1 belong to the
                two codes in byte i of word w: the lowest bit of the code whose other four are the
                high nibble, and the highest of the one whose other four are the low nibble
        scales  float16 [8 g][row g, row g + 8][4 blocks]: d'
        minima  q4_1 and q5_1 only: likewise m'

    Codes of q4_0 are centred: two's complement of code - 8.

    Formats that files come in are held as `qformats.storage` says. Where 16 elements share a scale

        scales  float16 [2 halves of 64 K][row g, row g + 8][8 g][4 groups]: d'; minima likewise
        codes   6 bits: the upper four as a format of 4 bits, and
        bits    for each half, block 0 and then block 1 in 8 bytes a lane: in byte i of a word bits
                4u + 2r and above are the lower two of the code in byte i of row g + 8r, of its
                lower (u = 0) or upper nibble

    and MXFP4 has

        codes   for each half of 64 K 16 bytes a lane: words 0 to 3; then for each half word 4.
                Codes are 0 to 31 for -16 to 15, two of them 16 bits apart, of bytes o and o + 2 as
                above: pair n = 8b + 4u + 2o + r < 15 of block b, row g + 8r and nibble u stands in
                word n // 3 from bit n % 3 * 5 on; bit i of pair 15 is bit 15 of word i
        scales  bytes [8 g][row g, row g + 8][4 blocks]: the upper half of the float16 d'

    factors: float32 [N rounded up to whole bands], a power of two for each row, in units of which
    its scales and minima are kept,

        d' = d / (factor * HALF_SCALE)      m' = m / (factor * MINIMUM_SCALE)

    so that a kernel can make float16 weights of them, code * HALF_SCALE * d' + MINIMUM_SCALE * m',
    with one multiply-add on the bits of a code taken as a float16 (formats without minima have -8,
    -16 or -128 times HALF_SCALE * d' in their place). The factor is such that the row's largest |d'|
    or |m'| lies in [2^15, 2^16): nothing overflows.

    d' is exact, and so is m' unless it is below 2^-14, 2^-29 of the row's largest weight or so. Of
    the float16 weights those above 2^-14 keep 11 bits; below, they are multiples of HALF_SCALE. So a
    block whose d is down to 2^-9 of the row's largest loses nothing against its own largest weight,
    and however small it is, a weight is off by no more than 2^-15 of the row's largest |d| (2^-24
    of its largest |m|, if that is more). A row whose blocks all have d = 0, m = 0 has factor 2^-15.
    d and m that are no numbers stay so, spoil what multiplies them, and do not count as the
    largest.
    """
    fmt = matrix_format("tiles", blocks, KNOWN)
    if fmt.name in FILE_FORMATS:
        scaled, d, m = to_storage_format(blocks)
    else:
        scaled, d = blocks.copy(), blocks["d"].astype(np.float64)
        m = blocks["m"].astype(np.float64) if "m" in (fmt.dtype.names or ()) else None
    with np.errstate(invalid="ignore"):  # a NaN of any kind is a NaN
        power = 15 - _exponent(d, -128 if fmt.name == "mxfp4" else -24)
        if m is not None:
            power = np.minimum(power, 24 - _exponent(m, -24))
        of_row = power.reshape(-1, *[1] * (d.ndim - 1))
        scaled["d"] = _as_scales(np.ldexp(d, of_row), scaled.dtype["d"])
        if m is not None:
            scaled["m"] = np.ldexp(m, of_row - 9)
    factors = np.ones(row_tiles(len(blocks)) * TILE_ROWS, np.float32)
    factors[: len(blocks)] = np.ldexp(1.0, 24 - power)
    return in_groups(_records(scaled, storage_format(fmt)), row_tiles(len(blocks))), factors


def _as_scales(d: NDArray[np.float64], dtype: Any) -> NDArray[Any]:
    """d' as a record holds it: float16, or the upper byte of one."""
    return (d.astype(np.float16).view(np.uint16) >> 8).astype(np.uint8) if dtype == np.uint8 else d


def _exponent(x: NDArray[np.float64], least: int) -> NDArray[np.int32]:
    """floor(log2) of the largest finite |value| of each row, at least `least`, the exponent of the
    smallest scale there is."""
    size = np.abs(x.reshape(len(x), -1))
    largest = np.where(np.isfinite(size), size, 0.0).max(axis=1, initial=2.0**least)
    return np.frexp(largest)[1] - 1


def row_tiles(n: int) -> int:
    """Of n rows and what they lack to whole bands."""
    return -(-n // (TILE_GROUP * TILE_ROWS)) * TILE_GROUP


def in_groups(records: NDArray[np.uint8], rows: int) -> NDArray[np.uint8]:
    """[row tile * K tile, record] of `rows` row tiles -> [band, K tile, row tile of it, record],
    flat."""
    by_row = records.reshape(rows // TILE_GROUP, TILE_GROUP, -1, records.shape[1])
    return np.ascontiguousarray(by_row.transpose(0, 2, 1, 3)).reshape(-1)


def _records(blocks: Blocks, fmt: StorageFormat) -> NDArray[np.uint8]:
    """Those of `tiles`, uint8 [row tile * K tile, record], all of whole bands."""
    n, blocks_k = blocks.shape
    rows, deep = row_tiles(n), -(-blocks_k * BLOCK // TILE_K)
    padded = blocks
    if (n, blocks_k) != (rows * TILE_ROWS, deep * 4):
        padded = np.zeros((rows * TILE_ROWS, deep * 4), blocks.dtype)
        padded[:n, :blocks_k] = blocks
    # axes of a plane: row tile, row g or g + 8, g, K tile, block
    by_tile = (rows, 2, 8, deep, 4)
    qs = np.ascontiguousarray(padded["qs"]).view(np.uint8)
    parts = []
    if fmt.bits == 8:  # ... half of the block, t, byte
        words = qs.view("<u4").reshape(*by_tile, 2, 4)
        parts.append(words.transpose(0, 3, 4, 2, 6, 5, 1))
    else:
        if fmt.bits == 5:
            bits = np.unpackbits(np.ascontiguousarray(padded["qh"]), axis=-1, bitorder="little")
            if fmt.name == "c5":
                low, high = qs & 15 | bits[..., :16] << 4, qs >> 4 | bits[..., 16:] << 4
                return _threes(np.stack([low, high], axis=-2), padded["d"], rows, deep)
            pairs = np.stack([qs >> 4 & 1, bits[..., :16]], axis=-2)  # [..., which, 16 bytes]
            qs = np.asarray(qs & 15 | (qs >> 5 | bits[..., 16:] << 3) << 4, np.uint8)
        elif fmt.name == "q4_0":
            qs = qs ^ np.uint8(0x88)
        # ... half of the record, block of that half, t
        words = np.ascontiguousarray(qs).view("<u4").reshape(rows, 2, 8, deep, 2, 2, 4)
        parts.append(words.transpose(0, 3, 4, 2, 6, 5, 1))
        if fmt.bits == 5:
            pairs = pairs.reshape(rows, 2, 8, deep, 2, 2, 2, 4, 4)  # r h g K | half b which t i
            # word of a half and lane: byte i, bit 4 b + 2 (row g + 8) + which
            octets = pairs.transpose(0, 3, 4, 2, 7, 8, 5, 1, 6).reshape(rows, deep, 2, 32, 4, 8)
            parts.append(np.packbits(octets, axis=-1, bitorder="little"))
        elif fmt.bits == 6:
            two = padded["qh"][..., None, :] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
            two = two.reshape(rows, 2, 8, deep, 2, 2, 2, 4, 4)  # r g K | half b u t i
            places = np.array([[0, 4], [2, 6]], np.uint8)[:, None, None, None, None, :, None, None]
            words = np.bitwise_or.reduce(two << places, axis=(1, 6))  # rows g K | half b t i
            parts.append(words.transpose(0, 2, 3, 1, 5, 4, 6))
    own = [field for field in ("d", "m") if field in (fmt.dtype.names or ())]
    if isinstance(fmt, PackedFormat):  # ... half of the record, two blocks of two groups
        of_groups = (rows, 2, 8, deep, 2, 4)
        parts += [padded[f].reshape(of_groups).transpose(0, 3, 4, 1, 2, 5) for f in own]
    else:
        parts += [padded[field].reshape(by_tile).transpose(0, 3, 2, 1, 4) for field in own]
    flat = [np.ascontiguousarray(part).reshape(rows * deep, -1).view(np.uint8) for part in parts]
    return np.concatenate(flat, axis=1)


def _threes(
    codes: NDArray[np.uint8], scales: NDArray[np.uint8], rows: int, deep: int
) -> NDArray[np.uint8]:
    """Those of 5 bits in words of three codes, of codes [rows * 16, deep * 4, 2, 16] and scales
    [rows * 16, deep * 4]."""
    by_place = codes.reshape(rows, 2, 8, deep, 2, 2, 2, 4, 2, 2)  # r g K | half b u t h o
    pairs = by_place.transpose(0, 3, 4, 2, 7, 5, 6, 9, 1, 8).astype(np.uint32)
    pairs = pairs.reshape(rows, deep, 2, 32, 16, 2)
    both = pairs[..., 0] | pairs[..., 1] << 16
    words = both[..., 0:15:3] | both[..., 1:15:3] << 5 | both[..., 2:15:3] << 10
    words |= (both[..., 15:] >> np.arange(5, dtype=np.uint32) & 0x00010001) << 15
    of_rows = scales.reshape(rows, 2, 8, deep, 4).transpose(0, 3, 2, 1, 4)
    parts = words[..., :4], words[..., 4], of_rows
    flat = [np.ascontiguousarray(part).reshape(rows * deep, -1).view(np.uint8) for part in parts]
    return np.concatenate(flat, axis=1)


# --- bytes: what an int8 tensor core multiplies, with one scale a row ----------------------------

BYTE_SCALE = 2.0**-13
BYTE_ZERO = 1280
"""A float16 in [1/8, 1/4) is a multiple of BYTE_SCALE, and of 1280 + n of them the lower byte of its
bits is n in two's complement: adding up in float16 with that constant rounds to int8."""

CENTRE = {"q4_0": 8, "q5_0": 16}
"""The code that stands for 0, in formats that have neither minima nor signed codes."""


def byte_tiles(blocks: Blocks) -> tuple[NDArray[np.uint8], Floats]:
    """`tiles` for kernels that make int8 weights, and the one scale that each row then has.

    (records, factors): the records of `tiles`, where d and m are numbers from which a kernel makes
    the int8 of `byte_weights` by one multiply-add in float16,

        code * (HALF_SCALE d') + m' = BYTE_SCALE * (BYTE_ZERO + int8)

    with m' = BYTE_SCALE * BYTE_ZERO - centre * HALF_SCALE d', which is exact, in q4_0 and q5_0. The
    codes of q8_0, and of formats that files come in, are the int8 already, and their records have
    no scales. factors: float32 [N rounded up to whole bands].
    """
    fmt = matrix_format("byte_tiles", blocks, KNOWN)
    factors = np.ones(row_tiles(len(blocks)) * TILE_ROWS, np.float32)
    to = byte_storage_format(fmt)
    if to.bits == 8:
        codes, factors[: len(blocks)] = byte_weights(blocks)
        made = np.zeros((len(blocks), codes.shape[1] // BLOCK), to.dtype)
        made["qs"] = codes.reshape(made["qs"].shape)
        records = _records(made, to)[:, : TILE_ROWS * TILE_K]
    else:
        maps, made = _byte_maps(fmt, blocks), np.array(blocks, order="C")
        made["d"] = maps.slope * (BYTE_SCALE / HALF_SCALE)
        if "m" in (fmt.dtype.names or ()):
            made["m"] = (maps.offset + BYTE_ZERO) * BYTE_SCALE
        factors[: len(blocks)] = maps.factor
        records = _records(made, fmt)
    return in_groups(records, row_tiles(len(blocks))), factors


def byte_storage_format(fmt: Format) -> Format:
    """What the records of `byte_tiles` hold of a format: itself, or 8 bits."""
    return FORMATS["q8_0"] if fmt.name in FILE_FORMATS else fmt


def byte_weights(blocks: Blocks) -> tuple[NDArray[np.int8], Floats]:
    """Blocks [N, K//32] requantized to 8 bits: (int8 [N, K], float32 [N]), value = int8 * factor.

    With f the factor of a row, a weight is rounded, halves to even, once:

        q4_0, q5_0   (code - c) k / c, c = 8 or 16, k = c d / f rounded to an integer, |k| <= 127
        q4_1, q5_1   code d' + m', m' = m / f rounded to an integer, and d' = d / f in float16,
                     shifted so that both roundings together are least over all codes
        q8_0         code d / f
        others       value / f

    f is the smallest for which no code that the format has leaves [-127, 127] (q8_0 and others: no
    weight of the row [-128, 127]), which is off by about one percent of what Q4_0 itself is; a
    power of two that loses nothing at all is preferred. Where a d or m is no number the row is 0
    times NaN.
    """
    fmt = matrix_format("byte_weights", blocks, KNOWN)
    if fmt.name in FILE_FORMATS:
        return _bytes_of_values(fmt.dequantize(blocks))
    maps = _byte_maps(fmt, blocks)
    codes = fmt.codes(blocks).reshape(*blocks.shape, BLOCK)
    w = np.rint(codes * maps.slope[..., None] + maps.offset[..., None])
    return w.astype(np.int8).reshape(len(blocks), -1), maps.factor


def _bytes_of_values(w: Floats) -> tuple[NDArray[np.int8], Floats]:
    """`byte_weights` of weights [N, K] themselves."""
    factor = np.ones(len(w), np.float32)
    codes = np.zeros(w.shape, np.int8)
    for row, values, one in zip(codes, w, range(len(w)), strict=True):
        if not np.isfinite(values).all():
            factor[one] = np.nan
            continue
        x = values.astype(np.float64)
        least = max(x.max() / 127, x.min() / -128)
        if least > 0:
            power = 2.0 ** np.ceil(np.log2(least))
            lossless = (np.rint(x / power) == x / power).all()
            factor[one] = power if lossless else least
            row[:] = np.clip(np.rint(x / factor[one]), -128, 127)
    return codes, factor


@dataclass(frozen=True, slots=True, eq=False)
class _ByteMaps:
    """int8 = code * slope + offset, rounded: float64 [N, K//32] both, and factor float32 [N]."""

    slope: NDArray[np.float64]
    offset: NDArray[np.float64]
    factor: Floats


def _byte_maps(fmt: Format, blocks: Blocks) -> _ByteMaps:
    numbers = np.isfinite(fmt.scale(blocks)).all(axis=1, keepdims=True)
    numbers &= np.isfinite(fmt.offset(blocks)).all(axis=1, keepdims=True)
    d = np.where(numbers, fmt.scale(blocks), 0).astype(np.float64)
    m = np.where(numbers, fmt.offset(blocks), 0).astype(np.float64)
    top = 2**fmt.bits - 1
    if fmt.bits == 8:
        w = fmt.codes(blocks).reshape(*blocks.shape, BLOCK) * d[..., None]
        reach = np.maximum(w.max(axis=2), w.min(axis=2) * (-127 / 128))
    elif fmt.name in CENTRE:
        reach = np.abs(m)  # = c |d|
    else:
        reach = np.maximum(np.abs(m), np.abs(m + top * d))
    least = reach.max(axis=1, keepdims=True) / 127
    least = np.where(least > 0, least, 1)
    if fmt.bits < 8:
        power = np.exp2(np.ceil(np.log2(least)))
        lossless = (np.rint(d / power) == d / power) & (np.rint(m / power) == m / power)
        least = np.where(lossless.all(axis=1, keepdims=True), power, least)
    factor = least.astype(np.float32).astype(np.float64)
    if fmt.bits == 8:
        slope, offset = d / factor, np.zeros_like(d)
    elif fmt.name in CENTRE:
        offset = np.rint(m / factor)
        slope = offset / -CENTRE[fmt.name]
    else:
        offset, codes = np.rint(m / factor), np.arange(top + 1.0)
        slope = (d + (m - offset * factor) * codes.sum() / (codes**2).sum()) / factor
        slope = slope.astype(np.float16).astype(np.float64)
    factor = np.where(numbers, factor, np.nan)
    return _ByteMaps(slope, offset, factor[:, 0].astype(np.float32))
