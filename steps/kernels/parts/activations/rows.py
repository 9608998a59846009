"""The passes that round A row by row: to float16, or to int8 with one scale per token.

`row_rounder` and `token_quantizer` are one kernel, `row_kernel`, with other arithmetic and stores.
Rounding takes float32 A, quantizing float16 and bfloat16 too
(`steps.kernels.parts.activations.sources.SOURCES`). Step 11 teaches rounding, step 15 quantizing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from numba import cuda, float32, int32, int64, uint32

from steps.blocks.q8_1 import four_codes, size_bits, twice_inverse
from steps.instructions import (
    as_float,
    floats_to_halves,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    shfl_xor,
    store_u32,
    store_u32x2,
    store_u32x4,
)
from steps.kernels.parts.activations.sources import SOURCES, Source

ROW_THREADS: Final = 256  # of a thread block, at most; it has one row
H200_LOADS: Final = 14  # of a lane in flight, kept until they can be rounded; measured on an H200
LEAST_EXPONENT: Final = 15
"""Biased, of a row's largest: below it the scale would have no float32 inverse."""


@cuda.jit(device=True, forceinline=True)
def largest_bits(x, largest_so_far):
    for value in x:
        largest_so_far = max(largest_so_far, size_bits(value))
    return largest_so_far


@dataclass(frozen=True, slots=True)
class Rounding:
    """What becomes of a row. Device functions:

    size(largest): from the bits of a row's largest |x| (`size_bits`), what the next two take
    scale(size), token_scale(size): by what values are multiplied; token_scales[m], float32
    pack(x, scale) -> a tuple of `words` words: four neighbouring values
    """

    size: Any
    scale: Any
    token_scale: Any
    pack: Any
    words: int


def row_kernel(loads: int, read: Source, rounding: Rounding) -> Any:
    """kernel(a, out, token_scales) of the passes below: each row of A[M, K] with a scale of its
    own, a thread block each. K is a multiple of 8, out is [M, K].

    A lane keeps `loads` times 16 bytes of a row until the row's largest is known. The rest of a
    longer row is read again, from the caches. With `Launch.overlap` the kernel may follow the one
    that makes A, and be followed, with no gap.
    """
    size, scale, token_scale = rounding.size, rounding.scale, rounding.token_scale
    pack, out_words = rounding.pack, rounding.words
    fours, is_aligned, load = read.fours, read.aligned, read.load_16
    four, sizes = read.four, read.sizes
    at_once, stored, longer = row_step(read), fours * out_words, loads > most_loads(read)

    @cuda.jit(device=True, forceinline=True)
    def largest_of(x, i, largest):
        for j in range(fours):
            for one in sizes(x, i, j):
                largest = max(largest, one)
        return largest

    @cuda.jit(device=True, forceinline=True)
    def store(out, offset, x, i, scale):
        y = cuda.local.array(stored, uint32)
        for j in range(fours):
            packed = pack(four(x, i, j), scale)
            for word in range(out_words):
                y[j * out_words + word] = packed[word]
        if stored == 1:
            store_u32(out, offset, y[0])
        elif stored == 2:
            store_u32x2(out, offset, y[0], y[1])
        else:
            store_u32x4(out, offset, y[0], y[1], y[2], y[3])

    @cuda.jit(launch_bounds=(ROW_THREADS, 2 if longer else 2 + fours))  # blocks that fit an SM
    def by_rows(a, out, token_scales):
        griddepcontrol_launch_dependents()
        x = cuda.local.array((loads, 4), uint32)
        largest = cuda.shared.array(1, int32)
        thread, m, columns = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x), uint32(a.shape[1])
        first, row = uint32(4 * fours * thread), int64(m) * columns
        aligned = is_aligned(a)
        if thread == 0:
            largest[0] = 0
        griddepcontrol_wait()
        for i in range(loads):
            for j in range(4):
                x[i, j] = 0
            if first + i * at_once < columns:
                load(x, i, a, row + (first + i * at_once), aligned)
        largest_so_far = int32(0)
        for i in range(loads):
            largest_so_far = largest_of(x, i, largest_so_far)
        if longer:
            for k in range(first + loads * at_once, columns, at_once):
                y = cuda.local.array((1, 4), uint32)
                load(y, 0, a, row + k, aligned)
                largest_so_far = largest_of(y, 0, largest_so_far)
        for apart in (1, 2, 4, 8, 16):
            largest_so_far = max(largest_so_far, shfl_xor(largest_so_far, apart))
        cuda.syncthreads()
        if thread & 31 == 0:
            cuda.atomic.max(largest, 0, largest_so_far)
        cuda.syncthreads()

        row_size = size(largest[0])
        times = scale(row_size)
        for i in range(loads):
            if first + i * at_once < columns:
                store(out, row + (first + i * at_once), x, i, times)
        if longer:
            for k in range(first + loads * at_once, columns, at_once):
                y = cuda.local.array((1, 4), uint32)
                load(y, 0, a, row + k, aligned)
                store(out, row + k, y, 0, times)
        if thread == 0:
            token_scales[m] = token_scale(row_size)

    return by_rows


def row_step(read: Source) -> int:
    """Values of a row that the threads take at a time."""
    return ROW_THREADS * 4 * read.fours


def most_loads(read: Source) -> int:
    """Of a lane, where these are all of a row. Numbers of 16 bits become two registers each while
    they are rounded."""
    return H200_LOADS // read.fours


def row_loads(k: int, of: str) -> int:
    """`loads` of these passes for rows of k values of dtype `of`: all of a row, if it can be, else
    one more than the most."""
    read = SOURCES[of]
    return max(1, min(most_loads(read) + 1, -(-k // row_step(read))))


def row_grid(m: int, k: int, of: str) -> tuple[tuple[int], tuple[int]]:
    """(grid, block) of these passes for A[m, k]: no more threads than a row has work for."""
    return (m,), (min(ROW_THREADS, -(-k // (128 * SOURCES[of].fours)) * 32),)


# --- float16 --------------------------------------------------------------------------------------
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
def four_halves(x, scale):
    first = floats_to_halves(x[0] * scale, x[1] * scale)
    return first, floats_to_halves(x[2] * scale, x[3] * scale)


TO_HALVES: Final = Rounding(exponent, scale, inverse, four_halves, words=2)


@cache
def row_rounder(loads: int, of: str = "float32") -> Any:
    """The kernel that rounds A[M, K], C-contiguous and `of` this dtype, float32 or bfloat16, to
    float16; `row_grid` for its launch.

    kernel(a, rounded, token_scales): float16 [M, K], float32 [M]. The values of a row are
    multiplied by a power of two that brings the largest into [2^14, 2^15), and token_scales[m] is
    its inverse (see `reference.Halves`). A bfloat16 stays what it is, but for bits below 2^-38 of
    the row's largest. See `row_kernel`; `loads` is `row_loads`.

    Inf and NaN spoil their own row: they count as the largest, and stay what they are.
    """
    return row_kernel(loads, SOURCES[of], TO_HALVES)


# --- int8 -----------------------------------------------------------------------------------------
@cuda.jit(device=True, forceinline=True)
def d_of(largest):
    return as_float(uint32(largest)) / float32(127)


@cuda.jit(device=True, forceinline=True)
def d_itself(d):
    return d


@cuda.jit(device=True, forceinline=True)
def one_word(x, twice):
    return (four_codes(x, twice),)


TO_BYTES: Final = Rounding(d_of, twice_inverse, d_itself, one_word, words=1)


@cache
def token_quantizer(loads: int, of: str = "float32") -> Any:
    """The kernel that quantizes A[M, K], C-contiguous and `of` this dtype, one of SOURCES, to int8
    with one scale for each token; `row_grid` for its launch.

    kernel(a, codes, token_scales): int8 [M, K]; float32 [M], d = amax / 127 of the row. The recipe
    is that of Q8_1, with a row for a block; see `reference.Tokens`. See `row_kernel`; `loads` is
    `row_loads`.

    A row with an Inf or NaN has no inverse, so codes of 0, and an Inf or NaN for d, which spoils it
    and no other.
    """
    return row_kernel(loads, SOURCES[of], TO_BYTES)
