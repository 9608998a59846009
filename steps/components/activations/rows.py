"""The passes that round A row by row: to float16, or to int8 with one scale per token.

`half_rounder` and `token_quantizer` are one kernel, `row_kernel`, with other arithmetic. The first
takes float32 A, the second float16 too (`steps.components.activations.chunks.SOURCES`). Step 11
teaches the first, step 13 the second.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from numba import cuda, float32, int32, int64, uint32

from qformats.repack import CHUNK, CHUNK_HALVES, TILE_K, TOKEN_GROUP
from steps.components.activations.chunks import SOURCES, Source, token_chunk
from steps.components.activations.q8_1 import FOUR_ONES, four_codes, twice_inverse
from steps.instructions import (
    as_bits,
    as_float,
    dp4a,
    floats_to_halves,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    shfl_xor,
    store_u32,
)

ROWS: Final = 2  # tokens of a thread block: 32 bytes of a store, a sector, are one piece
HALF_THREADS: Final = 512  # of a thread block, at most
HALF_WARPS: Final = HALF_THREADS // 32
H200_LOADS: Final = 14  # of a lane in flight, kept until they can be rounded; measured on an H200
ROW_STEP: Final = HALF_THREADS // ROWS * 4  # values of a row that the threads take at a time
LEAST_EXPONENT: Final = 15
"""Biased, of a row's largest: below it the scale would have no float32 inverse."""


@cuda.jit(device=True, forceinline=True)
def size_bits(x):
    """The bits of |x|: as integers they order floats, and NaN comes last."""
    return int32(as_bits(x) & uint32(0x7FFFFFFF))


@cuda.jit(device=True, forceinline=True)
def largest_bits(x, largest_so_far):
    for value in x:
        largest_so_far = max(largest_so_far, size_bits(value))
    return largest_so_far


def row_kernel(
    loads: int,
    read: Source,
    size: Any,
    scale: Any,
    token_scale: Any,
    store_4: Any,
    sums: bool = False,
) -> Any:
    """kernel(a, chunks, token_scales), of `half_rounder` and `token_quantizer`: each row of A[M, K]
    with a scale of its own. K is a multiple of 4.

    A lane keeps `loads` times four values of a row until the row's largest is known. The rest of a
    longer row is read again, from the caches. With `Launch.overlap` the kernel may follow the one
    that makes A, and be followed, with no gap. The device functions make the difference:

    size(largest): from the bits of a row's largest |x| (`size_bits`), what the next two take
    scale(size), token_scale(size): by what values are multiplied; token_scales[m], float32
    store_4(chunks, rows, m, k, t, x, scale) -> int32
        stores x, four values of token m of `rows` from column k on; t is which four of their 16 K
        they are. Returns the sum of the stored codes, for token_scales[M + m] with `sums`.
    """
    words, is_aligned, load_4, values = read.words, read.aligned, read.load, read.values

    @cuda.jit(device=True, forceinline=True)
    def load(x, i, a, m, k, aligned):
        """x[i] = the words of a[m, k..k+3], zeros outside of a."""
        rows, columns = uint32(a.shape[0]), uint32(a.shape[1])
        for j in range(words):
            x[i, j] = 0
        if m < rows and k < columns:
            load_4(x, i, a, int64(m) * columns + k, aligned)

    @cuda.jit
    def rows_to_chunks(a, chunks, token_scales):
        griddepcontrol_launch_dependents()
        x = cuda.local.array((loads, words), uint32)
        largest = cuda.shared.array(ROWS, int32)
        thread = uint32(cuda.threadIdx.x)
        # four lanes for 16 K of a row, beside them the other row, then the next 16 K
        t, row = uint32(thread & uint32(3)), uint32(thread >> uint32(2) & uint32(ROWS - 1))
        first = uint32(thread // uint32(4 * ROWS) * 16 + 4 * t)
        m = uint32(cuda.blockIdx.x * ROWS + row)
        rows, columns = uint32(a.shape[0]), uint32(a.shape[1])
        padded = uint32(uint32(columns + uint32(TILE_K - 1)) // uint32(TILE_K) * TILE_K)
        aligned = is_aligned(a)
        if thread < ROWS:
            largest[thread] = 0
        griddepcontrol_wait()
        for i in range(loads):
            load(x, i, a, m, uint32(first + i * ROW_STEP), aligned)
        largest_so_far = int32(0)
        for i in range(loads):
            largest_so_far = largest_bits(values(x, i), largest_so_far)
        for k in range(first + loads * ROW_STEP, columns, ROW_STEP):
            y = cuda.local.array((1, words), uint32)
            load(y, 0, a, m, uint32(k), aligned)
            largest_so_far = largest_bits(values(y, 0), largest_so_far)
        cuda.syncthreads()
        cuda.atomic.max(largest, row, largest_so_far)
        cuda.syncthreads()

        row_size = size(largest[row])
        times, total = scale(row_size), int32(0)
        for i in range(loads):
            if first + i * ROW_STEP < padded:
                k = first + i * ROW_STEP
                total = int32(total + store_4(chunks, rows, m, k, t, values(x, i), times))
        for k in range(first + loads * ROW_STEP, padded, ROW_STEP):
            y = cuda.local.array((1, words), uint32)
            load(y, 0, a, m, uint32(k), aligned)
            total = int32(total + store_4(chunks, rows, m, k, t, values(y, 0), times))
        if first == 0 and m < rows:
            token_scales[m] = token_scale(row_size)
        if sums:
            for apart in (1, 2, 8, 16):  # lanes of one row
                total = int32(total + shfl_xor(total, apart))
            warp_totals = cuda.shared.array((HALF_WARPS, ROWS), int32)
            if t == 0 and thread & 24 == 0:
                warp_totals[thread >> 5, row] = total
            cuda.syncthreads()
            if first == 0 and m < rows:
                for warp in range(1, cuda.blockDim.x >> 5):
                    total = int32(total + warp_totals[warp, row])
                token_scales[rows + m] = float32(total)

    return rows_to_chunks


@cache
def half_rounder(loads: int) -> Any:
    """The kernel that rounds float32 A[M, K], C-contiguous, to float16; `half_grid` for its launch.

    kernel(a, chunks, token_scales): float16 [K/128, M/8, 16, 8, 8], flat: of 8 tokens and 128 K
    first 8 values of each token, then the next 8 of each, all before the next tokens; M and K
    rounded up, and zeros beyond; float32 [M]. The values of a row are multiplied by a power of two
    that brings the largest into [2^14, 2^15), and token_scales[m] is its inverse (see
    `reference.Halves`). Of 16 K a chunk has k and k + 2 for k = 0, 4, 8, 12, the next one for
    k = 1, 5, 9, 13: the order in which `half_format` unpacks weights. See `row_kernel`; `loads` is
    `half_loads`.

    Inf and NaN spoil their own row: they count as the largest, and stay what they are.
    """

    @cuda.jit(device=True, forceinline=True)
    def exponent(largest):
        return max(int32(largest >> 23), LEAST_EXPONENT)

    @cuda.jit(device=True, forceinline=True)
    def scale(exponent):
        """2^(141 - e), which brings 2^(e - 127) to 2^14."""
        return as_float(uint32(268 - exponent) << uint32(23))

    @cuda.jit(device=True, forceinline=True)
    def inverse(exponent):
        return as_float(uint32(exponent - 14) << uint32(23))

    @cuda.jit(device=True, forceinline=True)
    def store_4(chunks, rows, m, k, t, x, scale):
        offset = (
            token_chunk(rows, m, k, TILE_K // CHUNK_HALVES, uint32(k) >> uint32(3) & uint32(14))
            * CHUNK_HALVES
        )
        even = floats_to_halves(x[0] * scale, x[2] * scale)
        odd = floats_to_halves(x[1] * scale, x[3] * scale)
        store_u32(chunks, offset + 2 * t, even)
        store_u32(chunks, offset + TOKEN_GROUP * CHUNK_HALVES + 2 * t, odd)
        return int32(0)

    return row_kernel(loads, SOURCES["float32"], exponent, scale, inverse, store_4)


def half_loads(k: int) -> int:
    """`loads` of `half_rounder` and `token_quantizer` for rows of k: all of a row, if it can be."""
    return max(1, min(H200_LOADS, -(-k // ROW_STEP)))


def half_grid(m: int, k: int) -> tuple[tuple[int], tuple[int]]:
    """(grid, block) of `half_rounder` and `token_quantizer` for A[m, k]: whole groups of eight
    tokens, with zeros for those that there are not; no more threads than a row has work for."""
    threads = min(HALF_THREADS, -(-k // TILE_K) * TILE_K // 4 * ROWS)
    return (-(-m // TOKEN_GROUP) * (TOKEN_GROUP // ROWS),), (threads,)


@cache
def token_quantizer(loads: int, of: str = "float32", sums: bool = False) -> Any:
    """The kernel that quantizes A[M, K], C-contiguous and `of` this dtype, to int8 with one scale
    for each token; `half_grid` for its launch.

    kernel(a, chunks, token_scales): int8 [K/128, M/8, 8, 8, 16], flat: of 8 tokens and 128 K first
    16 codes of each token, then the next 16 of each, all before the next tokens; M and K rounded
    up, and zeros beyond; float32 [M], d = amax / 127 of the row. The recipe is that of Q8_1, with a
    row for a block; see `reference.Tokens`. See `row_kernel`; `loads` is `half_loads`.

    With `sums` there are 2 M of them: the second M are the sum of the codes of each token, as
    floats, which is exact up to K = 132104 (127 K < 2^24); see `reference.SummedTokens`.

    A row with an Inf or NaN has no inverse, so codes of 0, and an Inf or NaN for d, which spoils it
    and no other.
    """

    @cuda.jit(device=True, forceinline=True)
    def d_of(largest):
        return as_float(uint32(largest)) / float32(127)

    @cuda.jit(device=True, forceinline=True)
    def d_itself(d):
        return d

    @cuda.jit(device=True, forceinline=True)
    def store_4(chunks, rows, m, k, t, x, twice):
        chunk = token_chunk(rows, m, k, TILE_K // CHUNK, uint32(k) >> uint32(4) & uint32(7))
        codes = four_codes(x, twice)
        store_u32(chunks, chunk * CHUNK + 4 * t, codes)
        return dp4a(int32(codes), FOUR_ONES, 0)

    return row_kernel(loads, SOURCES[of], d_of, twice_inverse, d_itself, store_4, sums)
