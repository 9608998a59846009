"""Quantizing A to Q8_1: the pass of the W4A8 steps, and the device functions that make it.

Step 2 teaches the quantizer, step 5 its K-outermost layout. From step 7 on codes of each 16 K are
in `qformats.repack.MMA_ORDER`, as those of packed weights are.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from qformats import BLOCK, FORMATS
from qformats.repack import TILE_K
from steps.blocks.codes import HALF
from steps.contract import Activations, Launch, Machine, ceil_div
from steps.instructions import (
    address,
    as_bits,
    as_float,
    dp4a,
    float_to_half,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    load_f32,
    load_f32x2,
    load_f32x4,
    prmt,
    shfl_xor,
    store_f32x2,
    store_u16,
    store_u32,
)

# --- Q8_1 on the GPU ------------------------------------------------------------------------------
LANES = 4  # lanes of a block of 32: each makes a word of four codes of either half
TOKENS = 32 // LANES  # of a warp: the codes that one store of it writes are 128 bytes without a gap
WARPS = 8  # of a thread block, side by side along K
AHEAD = 2  # blocks of a lane, all loaded before the first is used (H200)
SMALLEST_NORMAL = np.finfo(np.float32).tiny  # below it 1/d is infinite: such a block is zero
BLOCK_Q8_1 = FORMATS["q8_1"].block_bytes
FOUR_ONES = 0x01010101  # dp4a with it adds up four codes
TILE_BLOCKS = TILE_K // BLOCK
PAIRS_APART = 8  # K between the neighbours that a lane has in MMA_ORDER


@cuda.jit(device=True, forceinline=True)
def round_half_away(twice):
    """C's roundf of x = twice / 2: halves go away from zero.

    |2x| cut to an integer t gives (t + 1) >> 1, because x rounds to n + 1 and not to n as soon as
    2x reaches 2n + 1. A negative t is shifted as it is: >> rounds down, away from zero. No float is
    added: 0.49999997 + 0.5 would be 1, and a compiler may contract a sum with the product before.
    """
    t = int32(twice)
    return int32(int32(t + 1 + int32(t >> 31)) >> 1)


@cuda.jit(device=True, forceinline=True)
def rows_are_aligned(a):
    """Whether every row of A[M, K] begins at a multiple of 16 bytes: loads may be wide."""
    return a.shape[1] & 3 == 0 and address(a, 0) & 15 == 0


# A lane has the values whose codes are its two words, and so nobody exchanges codes. x[i, 0..3]
# makes the first word, x[i, 4..7] the word of 16 K later.
@cuda.jit(device=True, forceinline=True)
def load_values(x, i, a, m, k, wide):
    """In natural order: x[i, 0..3] = a[m, k..k+3] and x[i, 4..7] = a[m, k+16..k+19], zeros outside
    of a. k is that of the block + 4t."""
    rows, columns = uint32(a.shape[0]), uint32(a.shape[1])
    offset = int64(m) * columns + k
    for j in range(8):
        x[i, j] = 0
    for half in range(2):
        j, far = 4 * half, HALF * half
        if wide:
            if m < rows and uint32(k + far) < columns:
                x[i, j], x[i, j + 1], x[i, j + 2], x[i, j + 3] = load_f32x4(a, offset + far)
        else:
            for n in range(4):
                if m < rows and uint32(k + far + n) < columns:
                    x[i, j + n] = load_f32(a, offset + far + n)


@cuda.jit(device=True, forceinline=True)
def load_values_mma(x, i, a, m, k, wide):
    """In MMA_ORDER: x[i, 0..3] = a[m, k + (0, 8, 1, 9)] and x[i, 4..7] those 16 further, zeros
    outside of a. k is that of the block + 2t."""
    rows, columns = uint32(a.shape[0]), uint32(a.shape[1])
    offset = int64(m) * columns + k
    for j in range(8):
        x[i, j] = 0
    for quarter in range(4):
        j, far = quarter + quarter // 2 * 2, PAIRS_APART * quarter
        if wide:
            if m < rows and uint32(k + far) < columns:
                x[i, j], x[i, j + 2] = load_f32x2(a, offset + far)
        else:
            for n in range(2):
                if m < rows and uint32(k + far + n) < columns:
                    x[i, j + 2 * n] = load_f32(a, offset + far + n)


@cuda.jit(device=True, forceinline=True)
def four_codes(x, twice):
    """Codes of four values as the bytes of a word; `twice` is 2 / d."""
    q0, q1 = round_half_away(x[0] * twice), round_half_away(x[1] * twice)
    q2, q3 = round_half_away(x[2] * twice), round_half_away(x[3] * twice)
    return prmt(prmt(q0, q1, 0x0040), prmt(q2, q3, 0x0040), 0x5410)


@cuda.jit(device=True, forceinline=True)
def twice_inverse(d):
    """2 / d, and 0 where 1 / d would be infinite."""
    inverse = float32(1) / d if d >= SMALLEST_NORMAL else float32(0)
    return inverse + inverse


@cuda.jit(device=True, forceinline=True)
def size_bits(x):
    """The bits of |x|: as integers they order floats, and NaN comes last. A maximum of floats would
    drop it."""
    return int32(as_bits(x) & uint32(0x7FFFFFFF))


@cuda.jit(device=True, forceinline=True)
def quantized(x, i):
    """x[i] of the four lanes of a block -> the lane's codes of x[i, 0..3] and of x[i, 4..7], a word
    each, and d (alike in the four). A NaN or infinity in the block is its d, and codes are 0."""
    largest = size_bits(x[i, 0])
    for j in range(1, 8):
        largest = max(largest, size_bits(x[i, j]))
    largest = max(largest, shfl_xor(largest, 1))
    largest = max(largest, shfl_xor(largest, 2))
    d = as_float(uint32(largest)) / float32(127)
    twice = twice_inverse(d)
    low = four_codes((x[i, 0], x[i, 1], x[i, 2], x[i, 3]), twice)
    high = four_codes((x[i, 4], x[i, 5], x[i, 6], x[i, 7]), twice)
    return low, high, d


@cuda.jit(device=True, forceinline=True)
def sum_of_codes(low, high, d):
    """s = d * sum(q) of a block, from the words of its four lanes."""
    count = dp4a(low, FOUR_ONES, dp4a(high, FOUR_ONES, 0))
    count = int32(count + shfl_xor(count, 1))
    return d * float32(int32(count + shfl_xor(count, 2)))


LAYOUTS = "blocks", "k_outermost", "mma_order"


@cache
def q8_1_quantizer(layout: str) -> Any:
    """The kernel that quantizes float32 A[M, K], C-contiguous, to Q8_1; `q8_1_grid` for its launch.

    layout "blocks": kernel(a, blocks)
        ggml's 36-byte blocks as bytes, uint8 [M * ceil(K/32) * 36]; d and s are rounded to f16
        there, and s overflows at 65504.
    layout "k_outermost" or "mma_order": kernel(a, qs, ds)
        int8 [K/16, M, 16], 16 codes of row m followed by 16 of row m + 1, and float32 [K/32, M, 2]
        (d and s), both flat: aligned for 128-bit loads, not rounded. K is rounded up to a multiple
        of 128, the depth of a stage of the steps that copy them without looking; the rest is zero.
        The 16 codes are in natural order, or in `qformats.repack.MMA_ORDER`.

    s = d * sum(q), as of ggml's CPU reference. Columns at or past K count as zeros: K needs no
    padding. d, the codes and s are the codec's bit for bit; but where d is subnormal the codes are
    0.

    A warp quantizes blocks of eight tokens side by side, four lanes a block. Where rows of A begin
    at multiples of 16 bytes they are read 128 bits at a time, in MMA_ORDER 64 bits, else value by
    value. With `Launch.overlap` the kernel may follow the one that makes A, and be followed,
    without a gap.
    """
    if layout not in LAYOUTS:
        raise ValueError(
            f"no Q8_1 quantizer of layout {layout!r}: layouts are {', '.join(map(repr, LAYOUTS))}"
        )
    mma_order = layout == "mma_order"
    load, t_columns = (load_values_mma, 2) if mma_order else (load_values, 4)

    @cuda.jit(device=True, forceinline=True)
    def place():
        """(lane t of a block, the token m, the first of AHEAD blocks along K) of this thread."""
        lane = uint32(cuda.threadIdx.x)  # unsigned: a division by four is one shift
        m = uint32(cuda.blockIdx.x * TOKENS + lane // uint32(LANES))
        first = uint32((cuda.blockIdx.y * WARPS + cuda.threadIdx.y) * AHEAD)
        return uint32(lane % uint32(LANES)), m, first

    @cuda.jit
    def q8_1_blocks(a, out):
        griddepcontrol_launch_dependents()
        x = cuda.local.array((AHEAD, 8), float32)
        t, m, first = place()
        rows, blocks_k = uint32(a.shape[0]), uint32(uint32(a.shape[1] + BLOCK - 1) // uint32(BLOCK))
        wide = rows_are_aligned(a)
        griddepcontrol_wait()
        for i in range(AHEAD):
            load_values(x, i, a, m, uint32((first + i) * BLOCK + 4 * t), wide)
        for i in range(AHEAD):
            low, high, d = quantized(x, i)
            s = sum_of_codes(low, high, d)
            block = uint32(first + i)
            if m < rows and block < blocks_k:
                offset = (int64(m) * blocks_k + block) * BLOCK_Q8_1
                store_u32(out, offset + 4 + 4 * t, low)
                store_u32(out, offset + 4 + HALF + 4 * t, high)
                if t == 0:
                    store_u16(out, offset, float_to_half(d))
                    store_u16(out, offset + 2, float_to_half(s))

    @cuda.jit
    def q8_1_k_outermost(a, qs, ds):
        griddepcontrol_launch_dependents()
        x = cuda.local.array((AHEAD, 8), float32)
        t, m, first = place()
        rows, columns = uint32(a.shape[0]), uint32(a.shape[1])
        blocks_k = uint32(uint32(columns + uint32(TILE_K - 1)) // uint32(TILE_K)) * TILE_BLOCKS
        wide = rows_are_aligned(a)
        griddepcontrol_wait()
        for i in range(AHEAD):
            load(x, i, a, m, uint32((first + i) * BLOCK + t_columns * t), wide)
        for i in range(AHEAD):
            low, high, d = quantized(x, i)
            s = sum_of_codes(low, high, d)
            block = uint32(first + i)
            if m < rows and block < blocks_k:
                offset = int64(block) * rows
                store_u32(qs, (2 * offset + m) * HALF + 4 * t, low)
                store_u32(qs, (2 * offset + rows + m) * HALF + 4 * t, high)
                if t == 0:
                    store_f32x2(ds, (offset + m) * 2, d, s)

    return q8_1_blocks if layout == "blocks" else q8_1_k_outermost


def q8_1_grid(m: int, k: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """(grid, block) of the quantizer for A[m, k]; tokens on x, which may have the most blocks."""
    return (-(-m // TOKENS), -(-k // (BLOCK * WARPS * AHEAD))), (32, WARPS)


# --- float32 A[M, K] -> the arrays that a kernel reads --------------------------------------------
def q8_1_blocks(a: Any, machine: Machine) -> Activations:
    """A8: ggml's 36-byte Q8_1 blocks, uint8[M * K/32 * 36], with s = d * sum(q): four to six times
    as accurate as the sum of the raw values in formats with a minimum. d and s are float16: a value
    may be off by 127 * 2^-25, so that a block below 4e-6 throughout is 0, and beyond 65504 they
    overflow, which `steps.gemm` and plans refuse."""
    m, k = a.shape
    blocks = machine.empty((m * ceil_div(k, BLOCK) * BLOCK_Q8_1,), np.uint8)
    launch = Launch(q8_1_quantizer("blocks"), *q8_1_grid(m, k), (a, blocks))
    return Activations((blocks,), (launch,), "blocks")


def q8_1_k_outermost(a: Any, machine: Machine) -> Activations:
    """A8 with codes and scales apart and K outermost, like `qformats.repack.k_outermost`: int8
    [K/16, M, 16] and float32 [K/32, M, 2] (d and s side by side), K rounded up to a multiple of
    128 and zeros beyond. d and s are not rounded to f16."""
    return _k_outermost("k_outermost", a, machine)


def q8_1_mma_order(a: Any, machine: Machine) -> Activations:
    """`q8_1_k_outermost` with the codes of each 16 K in `qformats.repack.MMA_ORDER`, that of packed
    weights."""
    return _k_outermost("mma_order", a, machine)


def _k_outermost(layout: str, a: Any, machine: Machine) -> Activations:
    m, k = a.shape
    values = m * ceil_div(k, TILE_K) * TILE_K
    qs = machine.empty((values,), np.int8)
    ds = machine.empty((values // BLOCK * 2,), np.float32)
    launch = Launch(q8_1_quantizer(layout), *q8_1_grid(m, k), (a, qs, ds))
    return Activations((qs, ds), (launch,), layout)
