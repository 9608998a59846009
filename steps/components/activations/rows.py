"""The passes that round A: each row to float16 or int8, in units of its own, in tiles of tokens.

`half_rounder` and `token_quantizer` are one kernel, `row_kernel`, with other arithmetic: the first
is for float32 A, the second for float16 too (`SOURCES`). Float16 A that is to stay so need only be
put in another order, which is `halves_to_chunks`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from numba import cuda, float32, int32, int64, uint16, uint32

from qformats.repack import CHUNK, CHUNK_HALVES, TILE_K, TOKEN_GROUP
from steps.components.activations.q8_1 import FOUR_ONES, four_codes, twice_inverse
from steps.instructions import (
    address,
    as_bits,
    as_float,
    dp4a,
    floats_to_halves,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    half_to_float,
    load_u16,
    load_u32,
    load_u32x2,
    load_u32x4,
    prmt,
    shfl_xor,
    store_u32,
    store_u32x4,
)

ROWS: Final = 2  # tokens of a thread block: 32 bytes of a store, a sector, are one piece
HALF_THREADS: Final = 512  # of a thread block, at most
HALF_WARPS: Final = HALF_THREADS // 32
MOST_LOADS: Final = 14  # loads of a lane under way at once, kept until they can be rounded
ROW_STEP: Final = HALF_THREADS // ROWS * 4  # values of a row that the threads take at a time
CHUNK_THREADS: Final = 256  # of a thread block of `halves_to_chunks`, at most
CHUNK_STEP: Final = CHUNK_THREADS // TOKEN_GROUP * 16  # K that such a block has of each token
EVEN: Final = 0x5410  # for `prmt`: of two words of float16 A those of even k, the lower halves
ODD: Final = 0x7632
LEAST_EXPONENT: Final = 15
"""Biased, of a row's largest: below it the scale would have no float32 inverse."""


# --- what is read ---------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Source:
    """How four neighbouring values of A, C-contiguous, are read. `words` of 32 bits hold them until
    they are looked at. Device functions:

    aligned(a) -> whether they can be loaded at once, from every column that is a multiple of four
    load(x, i, a, at, aligned): the words x[i, 0 .. words - 1] of flat a from `at` on
    values(x, i) -> the four as float32
    """

    words: int
    aligned: Any
    load: Any
    values: Any


def _of_floats() -> Source:
    @cuda.jit(device=True, forceinline=True)
    def aligned(a):
        return a.shape[1] & 3 == 0 and address(a, 0) & 15 == 0

    @cuda.jit(device=True, forceinline=True)
    def load(x, i, a, at, aligned):
        if aligned:
            x[i, 0], x[i, 1], x[i, 2], x[i, 3] = load_u32x4(a, at)
        else:
            for j in range(4):
                x[i, j] = load_u32(a, at + j)

    @cuda.jit(device=True, forceinline=True)
    def values(x, i):
        return as_float(x[i, 0]), as_float(x[i, 1]), as_float(x[i, 2]), as_float(x[i, 3])

    return Source(4, aligned, load, values)


@cuda.jit(device=True, forceinline=True)
def two_halves(a, at):
    """The word that flat float16 a has from `at` on, wherever in memory that is."""
    low, high = load_u16(a, at), load_u16(a, at + 1)
    return uint32(uint32(low) | uint32(high) << uint32(16))


def _of_halves() -> Source:
    @cuda.jit(device=True, forceinline=True)
    def aligned(a):
        return a.shape[1] & 3 == 0 and address(a, 0) & 7 == 0

    @cuda.jit(device=True, forceinline=True)
    def load(x, i, a, at, aligned):
        if aligned:
            x[i, 0], x[i, 1] = load_u32x2(a, at)
        else:
            for j in range(2):
                x[i, j] = two_halves(a, at + 2 * j)

    @cuda.jit(device=True, forceinline=True)
    def values(x, i):
        low, high = x[i, 0], x[i, 1]
        first, third = half_to_float(uint16(low)), half_to_float(uint16(high))
        return first, half_to_float(uint16(low >> 16)), third, half_to_float(uint16(high >> 16))

    return Source(2, aligned, load, values)


SOURCES: Final = {"float32": _of_floats(), "float16": _of_halves()}
"""By the dtype of A."""


# --- the pass -------------------------------------------------------------------------------------
@cuda.jit(device=True, forceinline=True)
def token_chunk(rows, m, k, units, unit):
    """Which unit of 16 bytes it is: of token m and of `units` that it has of 128 K, number `unit`,
    where tokens are in groups of eight and all groups come before the next 128 K."""
    groups = uint32(uint32(rows + uint32(TOKEN_GROUP - 1)) >> uint32(3))
    group = int64(uint32(k) >> uint32(7)) * groups + (uint32(m) >> uint32(3))
    return (group * units + unit) * TOKEN_GROUP + (uint32(m) & uint32(7))


@cuda.jit(device=True, forceinline=True)
def size_bits(x):
    """The bits of |x|: as integers they order floats, and NaN comes last."""
    return int32(as_bits(x) & uint32(0x7FFFFFFF))


@cuda.jit(device=True, forceinline=True)
def largest_bits(x, most):
    for value in x:
        most = max(most, size_bits(value))
    return most


def row_kernel(
    held: int, read: Source, size: Any, scale: Any, factor: Any, store_4: Any, sums: bool = False
) -> Any:
    """kernel(a, units, factors), of `half_rounder` and `token_quantizer`: each row of A[M, K] in
    units of its own. K is a multiple of 4.

    A lane holds `held` times four values of a row until its largest is known; of what that does not
    reach the end of, the rest is read again, from the caches. With `Launch.overlap` the kernel may
    follow the one that makes A, and be followed, with no gap. What differs are device functions:

    size(largest): of the largest |x| of a row as bits (`size_bits`), what the next two are made of
    scale(size), factor(size): what values are multiplied by, and what goes to factors[m], float32
    store_4(units, rows, m, k, t, x, scale) -> int32
        x, four values of token m of `rows` from column k on, to their place; t is the number of
        these four in their 16 K. The sum of what was stored, which goes to factors[M + m] with
        `sums`.
    """
    words, may_be_wide, load_4, values = read.words, read.aligned, read.load, read.values

    @cuda.jit(device=True, forceinline=True)
    def load(x, i, a, m, k, aligned):
        """x[i] = the words of a[m, k..k+3], zeros outside of a."""
        rows, columns = uint32(a.shape[0]), uint32(a.shape[1])
        for j in range(words):
            x[i, j] = 0
        if m < rows and k < columns:
            load_4(x, i, a, int64(m) * columns + k, aligned)

    @cuda.jit
    def rows_to_chunks(a, units, factors):
        griddepcontrol_launch_dependents()
        x = cuda.local.array((held, words), uint32)
        largest = cuda.shared.array(ROWS, int32)
        thread = uint32(cuda.threadIdx.x)
        # four lanes for 16 K of a row, beside them the other row, then the next 16 K
        t, row = uint32(thread & uint32(3)), uint32(thread >> uint32(2) & uint32(ROWS - 1))
        first = uint32(thread // uint32(4 * ROWS) * 16 + 4 * t)
        m = uint32(cuda.blockIdx.x * ROWS + row)
        rows, columns = uint32(a.shape[0]), uint32(a.shape[1])
        padded = uint32(uint32(columns + uint32(TILE_K - 1)) // uint32(TILE_K) * TILE_K)
        aligned = may_be_wide(a)
        if thread < ROWS:
            largest[thread] = 0
        griddepcontrol_wait()
        for i in range(held):
            load(x, i, a, m, uint32(first + i * ROW_STEP), aligned)
        most = int32(0)
        for i in range(held):
            most = largest_bits(values(x, i), most)
        for k in range(first + held * ROW_STEP, columns, ROW_STEP):
            y = cuda.local.array((1, words), uint32)
            load(y, 0, a, m, uint32(k), aligned)
            most = largest_bits(values(y, 0), most)
        cuda.syncthreads()
        cuda.atomic.max(largest, row, most)
        cuda.syncthreads()

        of_row = size(largest[row])
        times, total = scale(of_row), int32(0)
        for i in range(held):
            if first + i * ROW_STEP < padded:
                k = first + i * ROW_STEP
                total = int32(total + store_4(units, rows, m, k, t, values(x, i), times))
        for k in range(first + held * ROW_STEP, padded, ROW_STEP):
            y = cuda.local.array((1, words), uint32)
            load(y, 0, a, m, uint32(k), aligned)
            total = int32(total + store_4(units, rows, m, k, t, values(y, 0), times))
        if first == 0 and m < rows:
            factors[m] = factor(of_row)
        if sums:
            for apart in (1, 2, 8, 16):  # lanes of one row
                total = int32(total + shfl_xor(total, apart))
            of_warps = cuda.shared.array((HALF_WARPS, ROWS), int32)
            if t == 0 and thread & 24 == 0:
                of_warps[thread >> 5, row] = total
            cuda.syncthreads()
            if first == 0 and m < rows:
                for warp in range(1, cuda.blockDim.x >> 5):
                    total = int32(total + of_warps[warp, row])
                factors[rows + m] = float32(total)

    return rows_to_chunks


@cache
def half_rounder(held: int) -> Any:
    """The kernel that rounds float32 A[M, K], C-contiguous, to float16; `half_grid` for its launch.

    kernel(a, units, factors): float16 [K/128, M/8, 16, 8, 8], flat: of 8 tokens and 128 K first 8
    values of each token, then the next 8 of each, all before the next tokens; M and K rounded up,
    and zeros beyond; float32 [M]. The values of a row are multiplied by a power of two that brings
    the largest into [2^14, 2^15), factors[m] is its inverse (see `reference.Halves`). In a unit
    stand, of 16 K, first k, then k + 2 for k = 0, 4, 8, 12, in the next unit for k = 1, 5, 9, 13:
    the order in which `half_format` unpacks weights. See `row_kernel`; `held` is `half_loads`.

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
    def store_4(units, rows, m, k, t, x, scale):
        at = token_chunk(rows, m, k, TILE_K // CHUNK_HALVES, uint32(k) >> uint32(3) & uint32(14)) * CHUNK_HALVES
        even = floats_to_halves(x[0] * scale, x[2] * scale)
        odd = floats_to_halves(x[1] * scale, x[3] * scale)
        store_u32(units, at + 2 * t, even)
        store_u32(units, at + TOKEN_GROUP * CHUNK_HALVES + 2 * t, odd)
        return int32(0)

    return row_kernel(held, SOURCES["float32"], exponent, scale, inverse, store_4)


def half_loads(k: int) -> int:
    """`held` of `half_rounder` and `token_quantizer` for rows of k: all of a row, if it can be."""
    return max(1, min(MOST_LOADS, -(-k // ROW_STEP)))


def half_grid(m: int, k: int) -> tuple[tuple[int], tuple[int]]:
    """(grid, block) of `half_rounder` and `token_quantizer` for A[m, k]: whole groups of eight
    tokens, with zeros for those that there are not; no more threads than a row has work for."""
    threads = min(HALF_THREADS, -(-k // TILE_K) * TILE_K // 4 * ROWS)
    return (-(-m // TOKEN_GROUP) * (TOKEN_GROUP // ROWS),), (threads,)


@cuda.jit(device=True, forceinline=True)
def eight_halves(a, at, aligned):
    """The four words that flat float16 a has from `at` on; `aligned`: a multiple of 16 bytes."""
    if aligned:
        return load_u32x4(a, at)
    first, second = two_halves(a, at), two_halves(a, at + 2)
    return first, second, two_halves(a, at + 4), two_halves(a, at + 6)


@cuda.jit(device=True, forceinline=True)
def store_chunk(units, at, x, y, which):
    """Of 16 values in the words x and y those of even or odd k, to units[at..at+7]."""
    first, second = prmt(x[0], x[1], which), prmt(x[2], x[3], which)
    store_u32x4(units, at, first, second, prmt(y[0], y[1], which), prmt(y[2], y[3], which))


@cuda.jit(device=True, forceinline=True)
def sixteen_halves(a, at):
    """The eight words of values that flat float16 a has from `at` on."""
    aligned = address(a, 0) & 15 == 0
    return eight_halves(a, at, aligned), eight_halves(a, at + 8, aligned)


def order_kernel(read: Any, wide: int = 1) -> Any:
    """kernel(a, units, factors), as that of `half_rounder`, where values are in units of 1: they
    need only be put in order. `chunk_grid` for its launch.

    a          : float16 [M, wide * K], C-contiguous, K a multiple of 32.
    read(a, at): device function, two times four words: the 16 values of A that a has from `at` on,
                 of the first K columns.

    A thread has 16 K of a token, 32 bytes, and makes two units of them. A warp has 64 K of eight
    tokens: it reads 128 bytes of each and writes 1 KB.
    """

    @cuda.jit
    def halves_to_chunks(a, units, factors):
        griddepcontrol_launch_dependents()
        thread = uint32(cuda.threadIdx.x)
        # four lanes for 64 K of a token, beside them the other seven, then the next 64 K
        m = uint32(cuda.blockIdx.x * TOKEN_GROUP + (thread >> 2 & 7))
        k = uint32(cuda.blockIdx.y * CHUNK_STEP + (thread >> 5) * 64 + (thread & 3) * 16)
        rows, columns = uint32(a.shape[0]), uint32(a.shape[1] // wide)
        padded = uint32(uint32(columns + uint32(TILE_K - 1)) // uint32(TILE_K) * TILE_K)
        x = y = (uint32(0), uint32(0), uint32(0), uint32(0))
        griddepcontrol_wait()
        if m < rows and k < columns:
            x, y = read(a, int64(m) * (wide * columns) + k)
        if k < padded:
            unit = token_chunk(rows, m, k, TILE_K // CHUNK_HALVES, uint32(k) >> uint32(3) & uint32(14))
            store_chunk(units, unit * CHUNK_HALVES, x, y, EVEN)
            store_chunk(units, (unit + TOKEN_GROUP) * CHUNK_HALVES, x, y, ODD)
        if k == 0 and m < rows:
            factors[m] = 1

    return halves_to_chunks


halves_to_chunks: Final = order_kernel(sixteen_halves)
"""Float16 A[M, K] in order: values stay what they are, and all factors[M] are 1."""


def chunk_grid(m: int, k: int) -> tuple[tuple[int, int], tuple[int]]:
    """(grid, block) of `halves_to_chunks` for A[m, k]: whole groups of eight tokens and 128 K; no
    more threads than a group has work for."""
    threads = min(CHUNK_THREADS, -(-k // TILE_K) * TILE_K // 16 * TOKEN_GROUP)
    return (-(-m // TOKEN_GROUP), -(-k // CHUNK_STEP)), (threads,)


@cache
def token_quantizer(held: int, of: str = "float32", sums: bool = False) -> Any:
    """The kernel that quantizes A[M, K], C-contiguous and `of` this dtype, to int8 with one scale
    for each token; `half_grid` for its launch.

    kernel(a, units, scales): int8 [K/128, M/8, 8, 8, 16], flat: of 8 tokens and 128 K first 16
    codes of each token, then the next 16 of each, all before the next tokens; M and K rounded up,
    and zeros beyond; float32 [M], d = amax / 127 of the row. The recipe is that of Q8_1, with a row
    for a block; see `reference.Tokens`. See `row_kernel`; `held` is `half_loads`.

    With `sums` there are 2 M scales: the second M are what the codes of each token add up to, as
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
    def store_4(units, rows, m, k, t, x, twice):
        unit = token_chunk(rows, m, k, TILE_K // CHUNK, uint32(k) >> uint32(4) & uint32(7))
        codes = four_codes(x, twice)
        store_u32(units, unit * CHUNK + 4 * t, codes)
        return dp4a(int32(codes), FOUR_ONES, 0)

    return row_kernel(held, SOURCES[of], d_of, twice_inverse, d_itself, store_4, sums)
