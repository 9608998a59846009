"""What a kernel needs to know of a block: Numba device functions, made once for each format.

`device_format("q5_1")` gives the same five names for every weight format, so that one kernel
factory, which captures them, serves all five:

    code(w, at, j)   -> int32         stored code of element j (0..31), by single bytes
    codes(w, at, j)  -> int32, int32  those of elements j and j + 16 (j < 16): a nibble format keeps
                                      them in one byte, which is loaded once
    words(w, at, i)  -> int32, int32  codes of elements 4i.. and 16 + 4i.. (i = 0..3), one a byte
    scale(w, at)     -> float32       d
    offset(w, at)    -> float32       z, such that every format's value is  d * code + z

`w` is the weight matrix as plain bytes (uint8, 1-D) and `at` the byte where a block begins. A dot
product with one Q8_1 block (scale da, codes qa, sum s) is then, for every format,

    d * da * sum(code * qa)  +  z * s

where z * s is the *compensation*: -8 d s in Q4_0, -16 d s in Q5_0, m s in Q4_1 and Q5_1, 0 in Q8_0.

**Loads.** A Q4_0 block is 18 bytes long and its quants begin at byte 2, so a 4-byte load there
would be misaligned in every other block (CUDA error 716). A 32-bit word is therefore fetched in
the widest pieces which the layout guarantees: `b1` four bytes, `b2` two halves, `b4` the whole
word. `safe_load` derives the choice from the block's size and the field's offset; it is not a
table to get wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numba import cuda, float32, int8, int32, int64, uint32

from qformats import BLOCK, FORMATS
from qformats.integer_scales import INTEGER_ZERO
from qformats.repack import (
    BAND,
    BYTE_UNIT,
    BYTE_ZERO,
    CENTRE,
    CODE_UNIT,
    MINIMUM_UNIT,
    TILE_K,
    TILE_ROWS,
)
from steps.instructions import (
    address,
    and_xor,
    dp4a,
    float_to_half,
    half_to_float,
    hfma2,
    hmul2,
    let_next_start,
    load_f32,
    load_f32x4,
    load_u16,
    load_u32,
    load_u32x4,
    prmt,
    select_bits,
    shfl_xor,
    store_f32x2,
    store_u16,
    store_u32,
    wait_for_previous,
)

HALF = BLOCK // 2  # byte j of qs holds elements j and j + 16
NIBBLES = 0x0F0F0F0F  # the low nibble of each byte of a word


# --- safe 32-bit loads ----------------------------------------------------------------------------
@cuda.jit(device=True, forceinline=True)
def b1(p, i):
    """The 32-bit word at byte i, from single bytes: any alignment."""
    return int32(
        uint32(p[i])
        | (uint32(p[i + 1]) << uint32(8))
        | (uint32(p[i + 2]) << uint32(16))
        | (uint32(p[i + 3]) << uint32(24))
    )


@cuda.jit(device=True, forceinline=True)
def b2(p, i):
    """The 32-bit word at byte i, from two halves: i even."""
    return int32(uint32(load_u16(p, i)) | (uint32(load_u16(p, i + 2)) << uint32(16)))


@cuda.jit(device=True, forceinline=True)
def b4(p, i):
    """The 32-bit word at byte i, at once: i a multiple of four."""
    return int32(load_u32(p, i))


def safe_load(format_name: str, field: str) -> Callable[[Any, Any], Any]:
    """b1, b2 or b4: the widest load of `field` that is aligned in *every* block of an array."""
    dtype = FORMATS[format_name].dtype
    offset = dtype.fields[field][1]  # type: ignore[index]
    return {1: b1, 2: b2}.get(math.gcd(dtype.itemsize, offset, 4), b4)


# --- codes ----------------------------------------------------------------------------------------
@cuda.jit(device=True, forceinline=True)
def fifth_bits(four):
    """Four bits -> the fifth bit (value 16) of each byte of a word.

    The product lays copies of the nibble 7 bits apart, so that bit j lands on bit 8j + 4; copies
    never overlap, so nothing carries, and the mask keeps the one bit of each copy that is wanted.
    """
    return int32((uint32(four) * uint32(0x02040810)) & uint32(0x10101010))


@dataclass(frozen=True, slots=True)
class DeviceFormat:
    """The device functions of one weight format; see the module's docstring."""

    code: Any
    codes: Any
    words: Any
    scale: Any
    offset: Any


@cache
def device_format(format_name: str) -> DeviceFormat:
    """The device functions of a weight format, for capture in a kernel factory."""
    fmt = FORMATS[format_name]
    fields = {name: at for name, (_, at, *_) in fmt.dtype.fields.items()}  # type: ignore[union-attr]
    D, QS, QH, M = fields["d"], fields["qs"], fields.get("qh", 0), fields.get("m", 0)
    load_qs = safe_load(format_name, "qs")
    load_qh = safe_load(format_name, "qh") if "qh" in fields else b1
    centre = float32({"q4_0": -8.0, "q5_0": -16.0}.get(format_name, 0.0))

    @cuda.jit(device=True, forceinline=True)
    def nibble(w, at, j):
        # shifts and masks, not // and %: Python's floor division costs extra for a signed j
        return int32((uint32(w[at + QS + (j & 15)]) >> uint32((j >> 4) << 2)) & uint32(15))

    @cuda.jit(device=True, forceinline=True)
    def nibbles(w, at, j):
        byte = uint32(w[at + QS + j])
        return int32(byte & uint32(15)), int32(byte >> uint32(4))

    @cuda.jit(device=True, forceinline=True)
    def nibble_words(w, at, i):
        q = uint32(load_qs(w, at + QS + 4 * i))
        return int32(q & uint32(NIBBLES)), int32((q >> uint32(4)) & uint32(NIBBLES))

    @cuda.jit(device=True, forceinline=True)
    def five_bit(w, at, j):
        fifth = (uint32(w[at + QH + (j >> 3)]) >> uint32(j & 7)) & uint32(1)
        return int32(nibble(w, at, j) | int32(fifth << uint32(4)))

    @cuda.jit(device=True, forceinline=True)
    def five_bits(w, at, j):
        low, high = nibbles(w, at, j)
        low |= ((uint32(w[at + QH + (j >> 3)]) >> uint32(j & 7)) & uint32(1)) << uint32(4)
        high |= ((uint32(w[at + QH + 2 + (j >> 3)]) >> uint32(j & 7)) & uint32(1)) << uint32(4)
        return int32(low), int32(high)

    @cuda.jit(device=True, forceinline=True)
    def five_bit_words(w, at, i):
        low, high = nibble_words(w, at, i)
        qh = uint32(load_qh(w, at + QH)) >> uint32(4 * i)
        low |= fifth_bits(qh & uint32(15))
        high |= fifth_bits((qh >> uint32(HALF)) & uint32(15))
        return int32(low), int32(high)

    @cuda.jit(device=True, forceinline=True)
    def signed_byte(w, at, j):
        return int32(int8(w[at + QS + j]))  # int8 read as unsigned is one of the classical bugs

    @cuda.jit(device=True, forceinline=True)
    def signed_bytes(w, at, j):
        return signed_byte(w, at, j), signed_byte(w, at, j + HALF)

    @cuda.jit(device=True, forceinline=True)
    def signed_words(w, at, i):
        return load_qs(w, at + QS + 4 * i), load_qs(w, at + QS + HALF + 4 * i)

    @cuda.jit(device=True, forceinline=True)
    def scale(w, at):
        return half_to_float(load_u16(w, at + D))

    @cuda.jit(device=True, forceinline=True)
    def minimum(w, at):
        return half_to_float(load_u16(w, at + M))

    @cuda.jit(device=True, forceinline=True)
    def centred(w, at):
        return centre * half_to_float(load_u16(w, at + D))

    code, codes, words = {
        4: (nibble, nibbles, nibble_words),
        5: (five_bit, five_bits, five_bit_words),
        8: (signed_byte, signed_bytes, signed_words),
    }[fmt.bits]
    return DeviceFormat(code, codes, words, scale, minimum if "m" in fields else centred)


# --- Q8_1 on the GPU ------------------------------------------------------------------------------
LANES = 4  # lanes of a block of 32: each takes four neighbours of either half, 128 bits a load
TOKENS = 32 // LANES  # of a warp: the codes that one store of it writes are 128 bytes without a gap
WARPS = 8  # of a thread block, side by side along K
AHEAD = 2  # blocks of a lane, whose loads are all under way before the first is used
SMALLEST_NORMAL = np.finfo(np.float32).tiny  # below it 1/d is infinite: such a block is zero
BLOCK_Q8_1 = FORMATS["q8_1"].block_bytes
FOUR_ONES = 0x01010101  # dp4a with it adds up four codes
TILE_BLOCKS = TILE_K // BLOCK


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
    """Whether every row of A[M, K] begins at a multiple of 16 bytes: `load_values` may be wide."""
    return a.shape[1] & 3 == 0 and address(a, 0) & 15 == 0


@cuda.jit(device=True, forceinline=True)
def load_values(x, i, a, m, k, wide):
    """x[i, 0..3] = a[m, k..k+3] and x[i, 4..7] = a[m, k+16..k+19], zeros outside of a."""
    rows, columns = uint32(a.shape[0]), uint32(a.shape[1])
    at = int64(m) * columns + k
    for j in range(8):
        x[i, j] = 0
    for half in range(2):
        j, far = 4 * half, HALF * half
        if wide:
            if m < rows and uint32(k + far) < columns:
                x[i, j], x[i, j + 1], x[i, j + 2], x[i, j + 3] = load_f32x4(a, at + far)
        else:
            for n in range(4):
                if m < rows and uint32(k + far + n) < columns:
                    x[i, j + n] = load_f32(a, at + far + n)


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
def quantized(x, i):
    """x[i] of the four lanes of a block -> the lane's codes of x[i, 0..3] and of x[i, 4..7], a word
    each, and d (alike in the four)."""
    largest = abs(x[i, 0])
    for j in range(1, 8):
        largest = max(largest, abs(x[i, j]))
    largest = max(largest, shfl_xor(largest, 1))
    largest = max(largest, shfl_xor(largest, 2))
    d = largest / float32(127)
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


@cuda.jit(device=True, forceinline=True)
def sum_of_values(x, i):
    """s = sum(x) of a block, from the values of its four lanes."""
    total = x[i, 0]
    for j in range(1, 8):
        total += x[i, j]
    total += shfl_xor(total, 1)
    total += shfl_xor(total, 2)
    return total


@cache
def q8_1_quantizer(layout: str = "blocks", s: str = "codes") -> Any:
    """The kernel that quantizes float32 A[M, K], C-contiguous, to Q8_1; `q8_1_grid` for its launch.

    layout "blocks": kernel(a, blocks)
        ggml's 36-byte blocks as bytes, uint8 [M * ceil(K/32) * 36]; d and s are rounded to f16
        there, and s overflows at 65504.
    layout "slabs": kernel(a, qs, ds)
        int8 [K/16, M, 16], 16 codes of row m followed by 16 of row m + 1, and float32 [K/32, M, 2]
        (d and s), both flat: aligned for 128-bit loads, not rounded. K is rounded up to a multiple
        of 128, the depth of a stage of the steps that copy them without looking; the rest is zero.

    s "codes": s = d * sum(q), as ggml's CPU reference; "values": s = sum of the raw values, as
    llama.cpp's CUDA kernels. Columns at or past K count as zeros: K needs no padding. d, the codes
    and the s of "codes" are the codec's bit for bit; but where d is subnormal the codes are 0.

    A warp quantizes blocks of eight tokens side by side, four lanes a block. Where rows of A begin
    at multiples of 16 bytes they are read 128 bits at a time, else value by value. With
    `Launch.overlap` the kernel may follow the one that makes A, and be followed, without a gap.
    """
    if layout not in ("blocks", "slabs") or s not in ("codes", "values"):
        raise ValueError(
            f"no Q8_1 quantizer of layout {layout!r} with s {s!r}: layouts are 'blocks' and "
            "'slabs', s is of 'codes' or 'values'"
        )
    blocks, of_codes = layout == "blocks", s == "codes"

    @cuda.jit(device=True, forceinline=True)
    def place():
        """(lane t of a block, the token m, the first of AHEAD blocks along K) of this thread."""
        lane = uint32(cuda.threadIdx.x)  # unsigned: a division by four is one shift
        m = uint32(cuda.blockIdx.x * TOKENS + lane // uint32(LANES))
        first = uint32((cuda.blockIdx.y * WARPS + cuda.threadIdx.y) * AHEAD)
        return uint32(lane % uint32(LANES)), m, first

    @cuda.jit
    def q8_1_blocks(a, out):
        let_next_start()
        x = cuda.local.array((AHEAD, 8), float32)
        t, m, first = place()
        rows, blocks_k = uint32(a.shape[0]), uint32(uint32(a.shape[1] + BLOCK - 1) // uint32(BLOCK))
        wide = rows_are_aligned(a)
        wait_for_previous()
        for i in range(AHEAD):
            load_values(x, i, a, m, uint32((first + i) * BLOCK + 4 * t), wide)
        for i in range(AHEAD):
            low, high, d = quantized(x, i)
            s = sum_of_codes(low, high, d) if of_codes else sum_of_values(x, i)
            block = uint32(first + i)
            if m < rows and block < blocks_k:
                at = (int64(m) * blocks_k + block) * BLOCK_Q8_1
                store_u32(out, at + 4 + 4 * t, low)
                store_u32(out, at + 4 + HALF + 4 * t, high)
                if t == 0:
                    store_u16(out, at, float_to_half(d))
                    store_u16(out, at + 2, float_to_half(s))

    @cuda.jit
    def q8_1_slabs(a, qs, ds):
        let_next_start()
        x = cuda.local.array((AHEAD, 8), float32)
        t, m, first = place()
        rows, columns = uint32(a.shape[0]), uint32(a.shape[1])
        blocks_k = uint32(uint32(columns + uint32(TILE_K - 1)) // uint32(TILE_K)) * TILE_BLOCKS
        wide = rows_are_aligned(a)
        wait_for_previous()
        for i in range(AHEAD):
            load_values(x, i, a, m, uint32((first + i) * BLOCK + 4 * t), wide)
        for i in range(AHEAD):
            low, high, d = quantized(x, i)
            s = sum_of_codes(low, high, d) if of_codes else sum_of_values(x, i)
            block = uint32(first + i)
            if m < rows and block < blocks_k:
                at = int64(block) * rows
                store_u32(qs, (2 * at + m) * HALF + 4 * t, low)
                store_u32(qs, (2 * at + rows + m) * HALF + 4 * t, high)
                if t == 0:
                    store_f32x2(ds, (at + m) * 2, d, s)

    return q8_1_blocks if blocks else q8_1_slabs


def q8_1_grid(m: int, k: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """(grid, block) of the quantizer for A[m, k]; tokens on x, which may have the most blocks."""
    return (-(-m // TOKENS), -(-k // (BLOCK * WARPS * AHEAD))), (32, WARPS)


# --- records of qformats.repack.tiles -------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class TileFormat:
    """Where the parts of a record of `qformats.repack.tiles` lie, and how lanes read them.

    record_bytes : bytes of one record; bits_at, scales_at, minima_at: where those parts begin.
    unit         : the bytes of `fragments` are codes times this (`qformats.repack.CODE_UNIT`)
    signed       : whether they are signed; unsigned bytes go to `mma_m16n8k32_u8` or `dp4a_us`
    minimum      : whether there are minima
    group        : elements that share a scale, 32 or 16
    scale_bytes  : 2; or 1, of a float16 the upper
    load(m, at, lane, half)
        what one lane needs of the record at byte `at` of array m for one half of 64 K
    fragments(words) -> (a0, a1, a2, a3) of its first block of 32 K and of its second
    """

    record_bytes: int
    bits_at: int
    scales_at: int
    minima_at: int
    unit: int
    signed: bool
    minimum: bool
    load: Any
    fragments: Any
    group: int = BLOCK
    scale_bytes: int = 2


@cuda.jit(device=True, forceinline=True)
def record_number(row_tile, step, steps):
    """Which record of `qformats.repack.tiles`: of a row tile and a step of 128 K, of `steps`."""
    return int32(int32((row_tile >> 3) * steps + step) * BAND + (row_tile & 7))


HIGH_NIBBLES = 0xF0F0F0F0
LOWER_FOUR, HIGHEST, LOWEST = 0x78787878, 0x80808080, 0x08080808  # of a code in the upper five bits


@cuda.jit(device=True, forceinline=True)
def load_4(m, at, lane, half):
    """The four words of a lane that hold nibbles, the first of all records but those of 8 bits."""
    return load_u32x4(m, at + half * 512 + lane * 16)


@cuda.jit(device=True, forceinline=True)
def lows(word):
    """The low nibble of each byte, moved up."""
    return uint32(uint32(word << uint32(4)) & uint32(HIGH_NIBBLES))


@cuda.jit(device=True, forceinline=True)
def highs(word):
    return uint32(uint32(word) & uint32(HIGH_NIBBLES))


@cuda.jit(device=True, forceinline=True)
def fragments_4(w):
    w0, w1, w2, w3 = w
    return lows(w0), lows(w1), highs(w0), highs(w1), lows(w2), lows(w3), highs(w2), highs(w3)


@cuda.jit(device=True, forceinline=True)
def shifted(word, up):
    """A word moved up so many bits, or down where they are negative: a constant."""
    return uint32(word << uint32(up)) if up >= 0 else uint32(word >> uint32(-up))


@cache
def tile_format(format_name: str) -> TileFormat:
    """The record of a weight format, for capture in a kernel factory."""
    fmt = FORMATS[format_name]
    minimum = "m" in (fmt.dtype.names or ())
    record = fmt.block_bytes * TILE_ROWS * TILE_K // BLOCK
    scale_bytes = TILE_ROWS * (TILE_K // BLOCK) * 2
    scales_at = record - (2 if minimum else 1) * scale_bytes
    bits_at = TILE_ROWS * TILE_K // 2
    flip_5 = HIGHEST if format_name == "q5_0" else 0  # makes two's complement of code - 16

    @cuda.jit(device=True, forceinline=True)
    def load_5(m, at, lane, half):
        w0, w1, w2, w3 = load_4(m, at, lane, half)
        return w0, w1, w2, w3, load_u32(m, at + bits_at + half * 128 + lane * 4)

    @cuda.jit(device=True, forceinline=True)
    def load_8(m, at, lane, half):
        a0, a1, a2, a3 = load_u32x4(m, at + half * 1024 + lane * 16)
        b0, b1, b2, b3 = load_u32x4(m, at + half * 1024 + 512 + lane * 16)
        return a0, a1, a2, a3, b0, b1, b2, b3

    @cuda.jit(device=True, forceinline=True)
    def low_5(w, i):
        return and_xor(
            shifted(w[4], 6 - 2 * i), HIGHEST, and_xor(w[i] << uint32(3), LOWER_FOUR, flip_5)
        )

    @cuda.jit(device=True, forceinline=True)
    def high_5(w, i):
        return and_xor(shifted(w[4], 3 - 2 * i), LOWEST, and_xor(w[i], HIGH_NIBBLES, flip_5))

    @cuda.jit(device=True, forceinline=True)
    def fragments_5(w):
        return (
            low_5(w, 0),
            low_5(w, 1),
            high_5(w, 0),
            high_5(w, 1),
            low_5(w, 2),
            low_5(w, 3),
            high_5(w, 2),
            high_5(w, 3),
        )

    @cuda.jit(device=True, forceinline=True)
    def fragments_8(w):
        return w

    load, fragments = {
        4: (load_4, fragments_4),
        5: (load_5, fragments_5),
        8: (load_8, fragments_8),
    }[fmt.bits]
    return TileFormat(
        record_bytes=record,
        bits_at=bits_at,
        scales_at=scales_at,
        minima_at=record - scale_bytes,
        unit=CODE_UNIT[fmt.bits],
        signed=not minimum,
        minimum=minimum,
        load=load,
        fragments=fragments,
    )


# --- the same records as float16 ------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class HalfFormat:
    """How lanes make float16 weights of a record of `qformats.repack.tiles`.

    record_bytes : bytes of one record
    words(m, at, lane, half) -> `n_words` words
        what one lane needs of the codes of the record at byte `at` of m, for one half of 64 K
    scales(m, at, lane, half) -> `n_scales` words
        likewise of the scales and minima
    multipliers(scales, block) -> (of row g, of row g + 8), each (low, high, offset), two halves a
        register, of block 0 or 1 of that half
    fragments(words, step, multipliers) -> (a0, a1, a2, a3)
        of `mma_m16n8k16_f16` for step 0 to 3 of 16 K of that half, whose block the multipliers are
        of. With g = lane // 4, t = lane % 4 the registers hold

                         lower half   upper half
            row g          a0: 4t       4t + 2          of these 16 K
            row g + 8      a1: 4t       4t + 2
            row g          a2: 4t + 1   4t + 3
            row g + 8      a3: 4t + 1   4t + 3

        and not neighbours, because so a mask finds both codes of a register in one word. B must
        have its K in the same order: `float16_units` writes it so.
    `block` and `step` are to be constants. A register, or two weights, costs a LOP3, an
    HFMA2 and a fourth (4 bits) or half (8 bits) of a shift, with 5 bits a half of a LOP3 and of a
    shift more where both steps of a block are made; multipliers are three quarters of an
    instruction besides.
    """

    record_bytes: int
    words: Any
    scales: Any
    multipliers: Any
    fragments: Any
    n_words: int
    n_scales: int


SIXTEENTH = 0x2C002C00  # 2^-4 twice: what a code read 4 bits too high is to be multiplied by
EIGHTH = 0x30003000  # 2^-3 twice
FIFTH_BITS = 0x00180018  # of two codes at bit 3 the lowest, of two at bit 0 the highest


@cuda.jit(device=True, forceinline=True)
def two_of_five(words, block, row, up, odd):
    """Codes of 5 bits in bytes 0 and 2 of a word, or 1 and 3, of its low nibbles, or 8 times those
    of its high ones: nibbles where they are, and above the low ones the highest bit, below the high
    ones the lowest. These lie side by side, so one shift and one mask serve both, as either's
    nibble covers the other's bit."""
    number = 2 * block + row
    at = 8 * odd + 2 * number - 3
    bits = uint32(words[4]) >> uint32(at) if at >= 0 else uint32(words[4]) << uint32(-at)
    nibbles = uint32(words[number]) >> uint32(8 * odd)
    return select_bits(0x000F000F << 4 * up, nibbles, bits & uint32(FIFTH_BITS))


@cache
def two_of_four(flip: int) -> Any:
    """The same with 4 bits: codes as integers, or 16 times as much where `up` is 1. flip: what has
    been flipped in codes that are kept as two's complement."""

    @cuda.jit(device=True, forceinline=True)
    def codes(words, block, row, up, odd):
        nibbles = uint32(words[2 * block + row]) >> uint32(8 * odd)
        return and_xor(nibbles, 0x000F000F << 4 * up, flip << 4 * up)

    return codes


@cache
def half_format(format_name: str) -> HalfFormat:
    """The float16 weights of a format, for capture in a kernel factory."""
    tile = tile_format(format_name)
    scales_at, minima_at, minimum = tile.scales_at, tile.minima_at, tile.minimum
    bits = FORMATS[format_name].bits
    # the code that stands for 0: as a float16, negative, times d' it is the offset ...
    centre = {"q4_0": 8, "q5_0": 16, "q8_0": 128}.get(format_name, 0)
    minus_centre = (0x8000 | centre) * 0x00010001
    too_high = EIGHTH if bits == 5 else SIXTEENTH  # codes of upper nibbles
    # ... and what has been flipped in codes that are kept as two's complement
    flip = centre * 0x00010001
    minimum_unit = int(np.float16(MINIMUM_UNIT).view(np.uint16)) * 0x00010001

    @cuda.jit(device=True, forceinline=True)
    def scales_alone(m, at, lane, half):
        row_g = at + scales_at + (lane >> 2) * 16 + 4 * half
        return load_u32(m, row_g), load_u32(m, row_g + 8)

    @cuda.jit(device=True, forceinline=True)
    def scales_and_minima(m, at, lane, half):
        d_g, d_h = scales_alone(m, at, lane, half)
        row_g = at + minima_at + (lane >> 2) * 16 + 4 * half
        return d_g, d_h, load_u32(m, row_g), load_u32(m, row_g + 8)

    @cuda.jit(device=True, forceinline=True)
    def twice(word, block):
        return prmt(word, word, 0x3232 if block else 0x1010)

    @cuda.jit(device=True, forceinline=True)
    def of_row(scales, row, block):
        d = twice(scales[row], block)
        if minimum:
            offset = hmul2(twice(scales[2 + row], block), minimum_unit)
        else:
            offset = hmul2(d, minus_centre)
        return d, hmul2(d, too_high), offset

    @cuda.jit(device=True, forceinline=True)
    def multipliers(scales, block):
        return of_row(scales, 0, block), of_row(scales, 1, block)

    codes = two_of_five if bits == 5 else two_of_four(flip)

    @cuda.jit(device=True, forceinline=True)
    def fragments(w, step, multipliers):
        (low_g, high_g, off_g), (low_h, high_h, off_h) = multipliers
        x, y = (high_g, high_h) if step & 1 else (low_g, low_h)
        return (
            hfma2(codes(w, step >> 1, 0, step & 1, 0), x, off_g),
            hfma2(codes(w, step >> 1, 1, step & 1, 0), y, off_h),
            hfma2(codes(w, step >> 1, 0, step & 1, 1), x, off_g),
            hfma2(codes(w, step >> 1, 1, step & 1, 1), y, off_h),
        )

    @cuda.jit(device=True, forceinline=True)
    def codes_8(word, odd):
        return and_xor(uint32(word) >> uint32(8 * odd), 0x00FF00FF, flip)

    @cuda.jit(device=True, forceinline=True)
    def fragments_8(w, step, multipliers):
        g, h = w[2 * step], w[2 * step + 1]
        (x, _, off_g), (y, _, off_h) = multipliers
        return (
            hfma2(codes_8(g, 0), x, off_g),
            hfma2(codes_8(h, 0), y, off_h),
            hfma2(codes_8(g, 1), x, off_g),
            hfma2(codes_8(h, 1), y, off_h),
        )

    return HalfFormat(
        record_bytes=tile.record_bytes,
        words=tile.load,
        scales=scales_and_minima if minimum else scales_alone,
        multipliers=multipliers,
        fragments=fragments_8 if bits == 8 else fragments,
        n_words=bits,
        n_scales=4 if minimum else 2,
    )


# --- the same records as bytes --------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class ByteFormat:
    """How lanes make the byte weights of a record of `qformats.repack.byte_tiles`, or of
    `qformats.integer_scales.integer_tiles`.

    record_bytes : of one record
    zero         : the byte that stands for 0: of signed ones 0, else they are unsigned
    unpacked     : whether there is anything to be made, and bytes are not operands as they are
    words(m, at, lane, half), scales(m, at, lane, half)
        what one lane needs of the record at byte `at` of m, for one half of 64 K
    fragments(words, scales, block) -> (a0, a1, a2, a3)
        of block 0 or 1 of that half, as `wgmma_s8` takes them, or `wgmma_u8`

    Of `byte_tiles`: in one register two codes, each taken as a float16 below 2^-13, are multiplied
    by d' and added to m', which leaves an int8 in the lower byte of each; a PRMT makes four of two.
    Eight codes cost a shift, four LOP3, four HFMA2 and two PRMT, with 5 bits two LOP3 and two
    shifts more; and three instructions for what depends on the scale.

    Of `integer_tiles`: in one register four codes are multiplied at once. Eight of them cost a
    shift, two LOP3 and two IMAD, with 5 bits one LOP3 and three quarters of a shift more; and two
    PRMT for what depends on the scale.
    """

    record_bytes: int
    zero: int
    unpacked: bool
    words: Any
    scales: Any
    fragments: Any


LOWER_BYTES = 0x6240  # prmt: of two words with two numbers each the lower bytes, in turns
ZERO_BITS = int(np.float16(BYTE_UNIT * BYTE_ZERO).view(np.uint16)) * 0x00010001


@cache
def byte_format(format_name: str) -> ByteFormat:
    """The int8 weights of a format, for capture in a kernel factory."""
    tile, half = tile_format(format_name), half_format(format_name)
    minimum, bits = tile.minimum, FORMATS[format_name].bits
    flip = 0x00080008 if format_name == "q4_0" else 0  # what `tiles` did to nibbles
    too_high = SIXTEENTH if bits == 4 else EIGHTH  # codes of upper nibbles
    minus_centre = CENTRE.get(format_name, 0) * 0x00010001 | 0x80008000

    @cuda.jit(device=True, forceinline=True)
    def no_scales(m, at, lane, half):
        return (uint32(0),)

    @cuda.jit(device=True, forceinline=True)
    def of_row(scales, row, block):
        """(d' for codes where they are, for codes of high nibbles, m')"""
        pick = 0x3232 if block else 0x1010
        d = prmt(scales[row], scales[row], pick)
        if minimum:
            return d, hmul2(d, too_high), prmt(scales[2 + row], scales[2 + row], pick)
        return d, hmul2(d, too_high), hfma2(d, minus_centre, ZERO_BITS)

    codes = two_of_four(flip) if bits == 4 else two_of_five

    @cuda.jit(device=True, forceinline=True)
    def four(words, block, row, up, scale, offset):
        even = hfma2(codes(words, block, row, up, 0), scale, offset)
        odd = hfma2(codes(words, block, row, up, 1), scale, offset)
        return prmt(even, odd, LOWER_BYTES)

    @cuda.jit(device=True, forceinline=True)
    def fragments(words, scales, block):
        low_g, high_g, off_g = of_row(scales, 0, block)
        low_h, high_h, off_h = of_row(scales, 1, block)
        return (
            four(words, block, 0, 0, low_g, off_g),
            four(words, block, 1, 0, low_h, off_h),
            four(words, block, 0, 1, high_g, off_g),
            four(words, block, 1, 1, high_h, off_h),
        )

    @cuda.jit(device=True, forceinline=True)
    def fragments_8(words, scales, block):
        return words[4 * block], words[4 * block + 1], words[4 * block + 2], words[4 * block + 3]

    return ByteFormat(
        record_bytes=tile.scales_at if bits == 8 else tile.record_bytes,
        zero=0,
        unpacked=bits < 8,
        words=tile.load,
        scales=no_scales if bits == 8 else half.scales,
        fragments=fragments_8 if bits == 8 else fragments,
    )


LOW_FIVE, UPPER_BITS = 0x1F1F1F1F, 0x07070707  # of each byte: a code, and three bits moved down


@cache
def integer_format(format_name: str) -> ByteFormat:
    """The unsigned byte weights of a format, for capture in a kernel factory."""
    tile, bytes_8 = tile_format(format_name), byte_format(format_name)
    bits, scales_at = FORMATS[format_name].bits, tile.scales_at

    @cuda.jit(device=True, forceinline=True)
    def scales(m, at, lane, half):
        row_g = at + scales_at + (lane >> 2) * 16 + 4 * half
        return load_u32(m, row_g), load_u32(m, row_g + 8)

    @cuda.jit(device=True, forceinline=True)
    def codes_4(words, block, row, up):
        return uint32(uint32(words[2 * block + row]) >> uint32(4 * up)) & uint32(NIBBLES)

    @cuda.jit(device=True, forceinline=True)
    def left_over(word, down, mask, others):
        """Bits of a word that other codes' bytes had room for, beside `others`."""
        return and_xor(uint32(word) >> uint32(down), mask, others)

    @cuda.jit(device=True, forceinline=True)
    def codes_5(words, block, row, up):
        number = 4 * block + 2 * up + row
        if number < 5:
            return uint32(words[number]) & uint32(LOW_FIVE)
        three = left_over(words[2 * number - 10], 5, UPPER_BITS, uint32(0))
        if number < 7:
            return left_over(words[2 * number - 9], 3, 0x18181818, three)
        return left_over(words[1], 2, 0x08080808, left_over(words[3], 1, 0x10101010, three))

    codes = codes_4 if bits == 4 else codes_5

    @cuda.jit(device=True, forceinline=True)
    def fragments(words, scales, block):
        r_g = prmt(scales[0], 0, 0xAAA2 if block else 0x8880)  # one byte, its sign above it
        r_h = prmt(scales[1], 0, 0xAAA2 if block else 0x8880)
        c_g = prmt(scales[0], 0, 0x3333 if block else 0x1111)  # one byte four times
        c_h = prmt(scales[1], 0, 0x3333 if block else 0x1111)
        return (
            uint32(codes(words, block, 0, 0) * r_g + c_g),
            uint32(codes(words, block, 1, 0) * r_h + c_h),
            uint32(codes(words, block, 0, 1) * r_g + c_g),
            uint32(codes(words, block, 1, 1) * r_h + c_h),
        )

    return ByteFormat(
        record_bytes=scales_at + (0 if bits == 8 else TILE_ROWS * TILE_BLOCKS * 2),
        zero=INTEGER_ZERO,
        unpacked=bits < 8,
        words=tile.load,
        scales=bytes_8.scales if bits == 8 else scales,
        fragments=bytes_8.fragments if bits == 8 else fragments,
    )
