"""Packed weights as floats again: columns of W[N, K] in a panel, for a product that sums over N.

The kernels of products make numbers of packed tiles (step 7) in registers, as operands of sums over
K. The gradient of x, dX[M, K] = dY[M, N] @ W[N, K], sums over N. Here a kernel writes columns of W
to memory, all N rows of them and mostly all K, and a float product makes the same columns of dX of
them: whole sums. The layer's own packed tiles are read, so there is no second copy of the weights,
and nothing comes from the host.

A warp has 16 rows and 64 K, one half of a packed tile. A lane's codes are of two rows and four
neighbouring pairs of K. They pass through shared memory, so that a warp stores rows of 128 bytes,
or of 256 in float32. 14336 x 4096 take 40.5 us of an H200, whose memory takes 37 for their bytes.

**The values** are those of `qformats.dequantize`, rounded once to the panel's dtype, of each format
that packed tiles hold without loss. Of the others they are `qformats.storage.stored_weights`, which
products multiply: scales and minima of K-quants and of iq4_xs are rounded to 11 bits, each by
2^-11 of itself at most. In every format scales and minima that are too small beside the largest of
their row become less exact: minima below 2^-29 of it, and scales of mxfp4 below 2^-31, which are 0
(`qformats.repack.tiles`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Final

from numba import cuda, float32, int32, int64, uint32

from qformats import FORMATS
from qformats.repack import HALF_SCALE, MINIMUM_SCALE, TILE_GROUP, TILE_K, TILE_ROWS
from qformats.storage import storage_format
from steps.contract import Launch, ceil_div, dtype_name
from steps.instructions import (
    as_bits,
    as_float,
    floats_to_bfloats,
    floats_to_halves,
    half_to_float,
    load_f32,
    load_u32,
    load_u32x2,
    load_u32x4,
    prmt,
    store_u32,
    store_u32x2,
    store_u32x4,
)
from steps.kernels import rows
from steps.kernels.between.eight import EIGHT, OF_DTYPE
from steps.kernels.parts.weights.codes import tile_index
from steps.kernels.parts.weights.storage_formats import half_format, tile_format

HALF_K: Final = TILE_K // 2
"""K of a warp's half of a packed tile; panels begin at a multiple of it."""

WARPS: Final = TILE_GROUP
THREADS: Final = 128
"""Of a thread block, where K is outermost."""

AS_FLOAT, BYTES_OF = 0x4B000000, 0x7650  # the float32 2^23 + n, and where its bytes come from


@cuda.jit(device=True, forceinline=True)
def four_signed(word):
    """The four int8 of a word as float32: n + 128 is a byte that counts up from 2^23."""
    return four_from(uint32(word) ^ uint32(0x80808080), float32(8388608 + 128))


@cuda.jit(device=True, forceinline=True)
def four_unsigned(word):
    return four_from(uint32(word), float32(8388608))


@cuda.jit(device=True, forceinline=True)
def four_from(word, zero):
    return (
        as_float(prmt(word, AS_FLOAT, BYTES_OF)) - zero,
        as_float(prmt(word, AS_FLOAT, BYTES_OF | 1)) - zero,
        as_float(prmt(word, AS_FLOAT, BYTES_OF | 2)) - zero,
        as_float(prmt(word, AS_FLOAT, BYTES_OF | 3)) - zero,
    )


@cache
def of_tiles(stored: str, dtype: str) -> Any:
    """The kernel for packed tiles of a storage format and panels of a dtype."""
    tile = tile_format(stored)
    load, fragments, scales_of = tile.load, tile.fragments, half_format(stored).scales
    four = four_signed if tile.signed else four_unsigned
    unit, unit_of_minima = float32(HALF_SCALE / tile.code_scale), float32(MINIMUM_SCALE)
    minimum, by_16, by_bytes = tile.minimum, tile.group < 32, tile.scale_bytes == 1
    tile_bytes, minima_at = tile.tile_bytes, 4 if by_16 else 2
    wide = dtype == "float32"
    PAIR, CHUNKS, PER = (2, 16, 4) if wide else (1, 8, 8)  # words of two values; 16-byte chunks
    ROW = HALF_K // 2 * PAIR + 4 * PAIR  # words of a row: those of eight rows are in other banks
    OF_WARP, STAGE, AT_ONCE = TILE_ROWS * ROW, WARPS * TILE_ROWS * ROW, 32 // CHUNKS
    rounded = floats_to_halves if dtype == "float16" else floats_to_bfloats

    @cuda.jit(device=True, forceinline=True)
    def put(stage, at, x, y):
        """Two neighbouring values."""
        if wide:
            store_u32x2(stage, at, as_bits(x), as_bits(y))
        else:
            store_u32(stage, at, rounded(x, y))

    @cuda.jit(device=True, forceinline=True)
    def number(words, row, block, sixteen):
        """Of the scales or minima of a lane that of a row, a block and its lower or upper 16 K."""
        if by_bytes:
            return half_to_float(
                (uint32(words[row]) >> uint32(8 * block) & uint32(255)) << uint32(8)
            )
        word, odd = (words[2 * row + block], sixteen) if by_16 else (words[row], block)
        return half_to_float(uint32(word) >> uint32(16 * odd) & uint32(0xFFFF))

    @cuda.jit(device=True, forceinline=True)
    def sixteen_of_row(stage, at, word, scales, row, block, sixteen, row_scale):
        """Four values of a lane: two pairs, 8 K apart."""
        x0, x1, x2, x3 = four(word)
        scale = number(scales, row, block, sixteen) * unit * row_scale
        at += 8 * PAIR * (2 * block + sixteen)
        if minimum:
            m = number(scales[minima_at:], row, block, sixteen) * unit_of_minima * row_scale
            put(stage, at, x0 * scale + m, x2 * scale + m)
            put(stage, at + 4 * PAIR, x1 * scale + m, x3 * scale + m)
        else:
            put(stage, at, x0 * scale, x2 * scale)
            put(stage, at + 4 * PAIR, x1 * scale, x3 * scale)

    @cuda.jit(launch_bounds=(32 * WARPS, 1))
    def unpack_tiles(packed, row_scales, n, k_tiles, first, panel):
        """panel[N, width] = columns first, first + 1, ... of the weights of packed tiles; `packed`
        and `row_scales` of `qformats.repack.tiles`, `k_tiles` of a row."""
        stage = cuda.shared.array(STAGE, uint32, alignment=16)
        warp, lane = int32(cuda.threadIdx.x >> 5), int32(cuda.threadIdx.x & 31)
        g, t, own = lane >> 2, lane & 3, warp * OF_WARP

        # --- values of a lane: rows g and g + 8
        half = int32(first // HALF_K + cuda.blockIdx.x)
        row_tile = int32(cuda.blockIdx.y * TILE_GROUP + warp)
        at = int64(tile_index(row_tile, half >> 1, k_tiles)) * tile_bytes
        w = fragments(load(packed, at, lane, half & 1))
        s = scales_of(packed, at, lane, half & 1)
        row = row_tile * TILE_ROWS
        of_g, of_h = load_f32(row_scales, row + g), load_f32(row_scales, row + g + 8)
        to_g, to_h = own + g * ROW + t * PAIR, own + (g + 8) * ROW + t * PAIR
        sixteen_of_row(stage, to_g, w[0], s, 0, 0, 0, of_g)
        sixteen_of_row(stage, to_h, w[1], s, 1, 0, 0, of_h)
        sixteen_of_row(stage, to_g, w[2], s, 0, 0, 1, of_g)
        sixteen_of_row(stage, to_h, w[3], s, 1, 0, 1, of_h)
        sixteen_of_row(stage, to_g, w[4], s, 0, 1, 0, of_g)
        sixteen_of_row(stage, to_h, w[5], s, 1, 1, 0, of_h)
        sixteen_of_row(stage, to_g, w[6], s, 0, 1, 1, of_g)
        sixteen_of_row(stage, to_h, w[7], s, 1, 1, 1, of_h)
        cuda.syncwarp()

        # --- whole rows of 64 K
        width = int32(panel.shape[1])
        chunk, below = lane % CHUNKS, lane // CHUNKS
        column = int32(cuda.blockIdx.x * HALF_K + chunk * PER)
        for i in range(0, TILE_ROWS, AT_ONCE):
            r = int32(i + below)
            if row + r < n and column < width:
                x0, x1, x2, x3 = load_u32x4(stage, own + r * ROW + 4 * chunk)
                store_u32x4(panel, int64(row + r) * width + column, x0, x1, x2, x3)

    return unpack_tiles


@cache
def of_k_outermost(format_name: str, dtype: str) -> Any:
    """The kernel for planes of `qformats.repack.k_outermost`, of a weight format, and W of a
    dtype: a thread makes eight neighbouring values of a row."""
    bits, store = FORMATS[format_name].bits, OF_DTYPE[dtype].store
    CHUNKS = 2 if bits == 8 else 1

    @cuda.jit(device=True, forceinline=True)
    def value(scale, offset, word, fifth, i):
        """That of byte or nibble i, in bits 8 i and above; bit i of `fifth` is its highest bit."""
        code = uint32(word) >> uint32(8 * (i & 3))
        if bits == 8:
            return scale * (float32((code ^ uint32(128)) & uint32(255)) - float32(128)) + offset
        code = code & uint32(15)
        if bits == 5:
            code |= (uint32(fifth) >> uint32(i) & uint32(1)) << uint32(4)
        return scale * float32(code) + offset

    @cuda.jit(launch_bounds=(THREADS, 1))
    def unpack_k_outermost(qs, qh, scales, offsets, w):
        """w[N, K]."""
        n, eight = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x), int32(cuda.blockIdx.y)
        rows_of_w, k = int32(w.shape[0]), int32(w.shape[1])
        block, part = eight >> 2, eight & 3
        if n < rows_of_w:
            at = int64(block) * rows_of_w + n
            if bits == 8:
                chunk = int64(CHUNKS * block + (part >> 1)) * rows_of_w + n
                x, y = load_u32x2(qs, chunk * 16 + 8 * (part & 1))
            else:
                x, y = load_u32x2(qs, at * 16 + 8 * (part & 1))
                x, y = uint32(x) >> uint32(4 * (part >> 1)), uint32(y) >> uint32(4 * (part >> 1))
            fifth = uint32(0)
            if bits == 5:
                fifth = uint32(load_u32(qh, at)) >> uint32(8 * part)
            d, z = load_f32(scales, at), load_f32(offsets, at)
            first = (value(d, z, x, fifth, 0), value(d, z, x, fifth, 1))
            first += (value(d, z, x, fifth, 2), value(d, z, x, fifth, 3))
            second = (value(d, z, y, fifth, 4), value(d, z, y, fifth, 5))
            second += (value(d, z, y, fifth, 6), value(d, z, y, fifth, 7))
            store(w, int64(n) * k + EIGHT * eight, first + second)

    return unpack_k_outermost


def launch(
    layout: str, format_name: str, arrays: Sequence[Any], k: int, first: int, panel: Any
) -> Launch:
    """Columns first, first + 1, ... of weights [N, K] to panel[N, width], float32, float16 or
    bfloat16.

    layout, arrays: what exact kernels read, `qformats.repack.tiles`, or before compute capability
        8.0 `k_outermost` or `as_bytes`, by its name, and its arrays.
    first: a multiple of `HALF_K`; where the layout is not "tiles" 0, and the panel is the whole W.
    """
    (n, width), dtype = panel.shape, dtype_name(panel)
    if layout == "tiles":
        packed, row_scales = arrays
        run = of_tiles(storage_format(FORMATS[format_name]).name, dtype)
        grid = ceil_div(width, HALF_K), ceil_div(n, TILE_GROUP * TILE_ROWS)
        args = (packed, row_scales, n, ceil_div(k, TILE_K), first, panel)
        return Launch(run, grid, (32 * WARPS,), args)
    if first or width != k:
        raise ValueError(f"columns {first} to {first + width} of {k}: {layout} is unpacked whole")
    if layout == "as_bytes":
        (w,) = arrays
        return rows.launch(format_name, w, panel)
    grid = ceil_div(n, THREADS), k // EIGHT
    return Launch(of_k_outermost(format_name, dtype), grid, (THREADS,), (*arrays, panel))
