"""Step 16: a warp per row - 32 lanes read one row of W together, 512 bytes in one piece.

What is new
    With one token nothing is used twice: a product is as fast as its weights arrive. Step 2 gives
    neighbouring lanes neighbouring *rows* of W. Here they get neighbouring 16-byte *chunks* of one
    row: a warp computes one feature of one token, and its lanes share K.

        row n of W   |chunk 0 |chunk 1 |chunk 2 | ... |chunk 31|chunk 32|chunk 33| ...
        lane             0        1        2              31       0        1
                     '--------- one load: 512 bytes ----------'--- the next load ...
        codes of A   |0 .. 31 |32 .. 63|64 .. 95| ...             two chunks for each one of W

    A chunk has the codes of one block (in Q8_0 of half a block). A lane does for its chunk what a
    thread of step 2 does for a block: an integer dot product, now by dp4a, then scale and
    compensation. At the end each lane has the sum of every 32nd chunk, and five shuffles add up the
    32 sums: lane l adds what lane l ^ 16 has, then l ^ 8, l ^ 4, l ^ 2 and l ^ 1.
    ggml's blocks have 18 to 34 bytes, so their codes are aligned to 2 bytes (in Q4_1 to 4, in Q5_1
    to 8), and a load of 16 bytes wants 16.
    `row_planes` puts codes, fifth bits and scales into arrays of their own, where chunks are
    aligned. It adds no byte.
Why it should help
    A load of step 2 touches 32 rows, a sector of 32 bytes in each, and uses one byte of it. A load
    of chunks touches 16 sectors and uses all 512 bytes. What is left is the speed of memory: 33 MB
    of Q4_0 at 4.1 TB/s take 8.1 us. Are enough bytes in flight? 4.1 TB/s x 0.8 us / 132 SMs are 25
    KB an SM. All 4096 warps are resident, 31 an SM, and a lane asks for AHEAD = 4 chunks before it
    uses the first: 31 x 4 x 576 bytes are 71 KB, in flight about half of the time. Enough
    instructions? Four chunks take a warp 220; an SM issues 530 while their 2304 bytes arrive.
    With 2.2 us for the launch and the first bytes, and 1.2 us until the last warp ends, expect 11.5
    us, 70 % of the speed of memory and 25 times step 2; Q8_0 18.6 us, 82 %.
What it costs
    Repacked weights. For 576 bytes of W a warp reads 1280 of A, from the L1 cache. Weights are read
    once, so they are loaded past it (`load_u32x4_once`) and do not push A out.
    Every token reads all of W again, at best from the L2. And A lies K-outermost: with M tokens
    neighbouring lanes load 32 M bytes apart (Q8_0: 16 M), up to a line of the cache for each lane.
Machine code
    Four LDG.E.NA.128 of weights (NA: not allocated in the L1) before the first IDP.4A; five
    SHFL.BFLY; no LDS, no BAR.SYNC.
Prerequisites
    Steps 2 (compensation, the Q8_1 pass) and 6 (dp4a).
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
from numba import cuda, float32, int64, uint16, uint32

from qformats import BLOCK, Format
from qformats.repack import CHUNK
from steps.blocks.q8_1 import q8_1_k_outermost
from steps.contract import Family, Launch, Shape, Step, ceil_div
from steps.instructions import (
    dp4a,
    half_to_float,
    load_f32x2,
    load_u16,
    load_u32,
    load_u32x4,
    load_u32x4_once,
    shfl_xor,
)

LANES: Final = 32  # of a warp, which has a row of W
WARPS: Final = 8  # of a thread block; they share nothing but A, in the L1 cache
BLOCKS_PER_SM: Final = 4  # 32 warps: 4096 rows are resident at once. A lane may have 64 registers
AHEAD: Final = 4  # chunks that a lane asks for before it uses the first: bytes in flight
NIBBLES: Final = 0x0F0F0F0F  # the low nibble of each byte of a word
OFFSET_IN_D: Final = {"q4_0": -8, "q5_0": -16}  # the offset z of these formats, in units of d


def row_planes(blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    """Blocks [N, K/32] -> (codes, fifths, scales), flat: uint8 [N, K/32, 16], of q8_0 [N, K/32,
    32]; uint32 [N, K/32], or a single 0 where there are no fifth bits; uint16 [N, K/32], the bits
    of d, or [N, K/32, 2], of d and m."""
    names = blocks.dtype.names or ()
    codes = np.ascontiguousarray(blocks["qs"]).view(np.uint8)
    fifths = np.zeros(1, np.uint32)
    if "qh" in names:
        fifths = np.ascontiguousarray(blocks["qh"]).view("<u4")
    scales = np.stack([blocks[name] for name in ("d", "m") if name in names], axis=-1)
    return codes.reshape(-1), fifths.reshape(-1), scales.view(np.uint16).reshape(-1)


@cache
def kernel(fmt: Format) -> Any:
    five_bits, has_minimum = fmt.bits == 5, "m" in (fmt.dtype.names or ())
    half_blocks = fmt.bits == 8  # a chunk is half a block
    shift = int(half_blocks)  # block = chunk >> shift
    offset_in_d = float32(OFFSET_IN_D.get(fmt.name, 0))

    @cuda.jit(device=True, forceinline=True)
    def fifth_bits(four):
        """Four bits -> bit 4 of each byte of a word. The product is four copies of them, each 7
        bits further, so bit i of copy i is bit 4 of byte i; the mask keeps these."""
        return uint32((uint32(four & uint32(15)) * uint32(0x02040810)) & uint32(0x10101010))

    @cuda.jit(device=True, forceinline=True)
    def add_products(total, word, fifths, a_low, a_high):
        """total + the codes of a word, which are of elements j and j + 16, times two words of A."""
        low, high = word & uint32(NIBBLES), (word >> uint32(4)) & uint32(NIBBLES)
        if five_bits:
            low, high = low | fifth_bits(fifths), high | fifth_bits(fifths >> uint32(16))
        return dp4a(high, a_high, dp4a(low, a_low, total))

    @cuda.jit(launch_bounds=(LANES * WARPS, BLOCKS_PER_SM))
    def w4a8_warp_per_row(codes, fifths, scales, qa, ds, c, chunks):
        """c[M, N] = a @ dequantize(w)[N, K]^T; codes, fifths, scales of `row_planes`, each row
        of `chunks` chunks; qa, ds: Q8_1 A, K-outermost: int8 [K/16, M, 16], (d, s) [K/32, M, 2]."""
        words = cuda.local.array((AHEAD, 4), uint32)
        chunk_fifths = cuda.local.array(AHEAD, uint32)
        chunk_scales = cuda.local.array(AHEAD, uint32)
        lane, m, n = cuda.threadIdx.x, cuda.blockIdx.x, cuda.blockIdx.y * WARPS + cuda.threadIdx.y
        if n >= c.shape[1]:  # a whole warp leaves: the others' shuffles have all their lanes
            return
        # Chunks are counted in 32 bits, bytes in 64: one instruction makes an address of a chunk
        M, row_begin = uint32(c.shape[0]), uint32(n * chunks)  # the row's first chunk in W
        acc = float32(0)
        for first in range(0, chunks, LANES * AHEAD):
            # --- global -> registers: the next chunks, all of them before the first is used
            for i in range(AHEAD):
                chunk = uint32(first + LANES * i + lane)
                if chunk < chunks:
                    at = uint32(row_begin + chunk)
                    four = load_u32x4_once(codes, int64(at) * CHUNK)
                    words[i, 0], words[i, 1], words[i, 2], words[i, 3] = four
                    if five_bits:
                        chunk_fifths[i] = fifths[at]
                    if has_minimum:
                        chunk_scales[i] = load_u32(scales, 2 * int64(at))
                    else:
                        chunk_scales[i] = load_u16(scales, at >> shift)

            # --- multiply: the integers of a block, then its scales
            for i in range(AHEAD):
                chunk = uint32(first + LANES * i + lane)
                if chunk < chunks:
                    d = half_to_float(uint16(chunk_scales[i]))
                    da, s = load_f32x2(ds, 2 * int64(uint32((chunk >> shift) * M + m)))
                    if half_blocks:
                        a = load_u32x4(qa, int64(uint32(chunk * M + m)) * CHUNK)
                        total = dp4a(words[i, 1], a[1], dp4a(words[i, 0], a[0], 0))
                        total = dp4a(words[i, 3], a[3], dp4a(words[i, 2], a[2], total))
                    else:
                        a_at = uint32(2 * chunk * M + m)  # the first of two chunks of A
                        a_low = load_u32x4(qa, int64(a_at) * CHUNK)
                        a_high = load_u32x4(qa, int64(uint32(a_at + M)) * CHUNK)
                        fifth0 = chunk_fifths[i] if five_bits else uint32(0)  # of word 0
                        fifth1, fifth2 = fifth0 >> uint32(4), fifth0 >> uint32(8)
                        fifth3 = fifth0 >> uint32(12)
                        total = add_products(0, words[i, 0], fifth0, a_low[0], a_high[0])
                        total = add_products(total, words[i, 1], fifth1, a_low[1], a_high[1])
                        total = add_products(total, words[i, 2], fifth2, a_low[2], a_high[2])
                        total = add_products(total, words[i, 3], fifth3, a_low[3], a_high[3])
                        if has_minimum:
                            acc += half_to_float(uint16(chunk_scales[i] >> uint32(16))) * s
                        else:
                            acc += offset_in_d * d * s
                    acc += d * da * float32(total)

        # --- add up the warp: with each shuffle, a lane's sum is that of twice as many lanes
        for i in range(5):
            acc += shfl_xor(acc, 16 >> i)

        # --- registers -> global
        if lane == 0:
            c[m, n] = acc

    return w4a8_warp_per_row


def launch(
    fmt: Format, family: Family, shape: Shape, weights: tuple, activations: tuple, out: Any
) -> Launch:
    # Tokens on x: thread blocks that read the same rows follow each other, so the L2 has them
    grid = (shape.m, ceil_div(shape.n, WARPS))
    chunks = shape.k // BLOCK * (2 if fmt.bits == 8 else 1)
    return Launch(kernel(fmt), grid, (LANES, WARPS), (*weights, *activations, out, chunks))


STEP = Step(
    number=16,
    name="step16_warp_per_row",
    title="decode: a warp per row, coalesced loads, sums by shuffles",
    branch="decode",
    families=("A8",),
    parents={"A8": 2},
    unit={"A8": "dp4a"},
    pack=row_planes,
    activations={"A8": q8_1_k_outermost},
    launch=launch,
    idea=("load_u32x4_once", "shfl_xor"),
    contains={"A8": ("LDG.E.NA.128", "IDP.4A.S8.S8", "SHFL.BFLY")},
    forbids={"A8": ("LDS", "STS", "BAR", "IMMA", "HMMA", "LDL", "STL")},
)
