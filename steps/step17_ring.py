"""Step 17: ring - the next pieces of a row are always on their way to shared memory.

What is new
    A lane of step 16 asks for four chunks, waits, and uses all four before it asks again: half of
    the time nothing of its warp is on its way. Here a warp has a *ring* of slots in shared memory,
    and copies its row there by cp.async. As soon as a slot has been used, it is refilled, while the
    copy to the other slot goes on. A warp in time:

        slot 0   [....copy....]use[......copy......]use[......copy......]use
        slot 1   [.......copy.......]use[......copy......]use[......copy......]

    What fills a slot is a *piece* of a row: 32 chunks of codes, one for each lane, then the fifth
    bits and the scales of their blocks. `row_pieces` lays these side by side, so that a warp copies
    a piece 512 bytes at a time, 16 a lane:

        |chunk 0|chunk 1| ... |chunk 31|fifth bits 0 .. 31|scales 0 .. 31|
        0                             512                640            704 bytes (Q5_0)

    No other warp touches a ring, so there is no barrier of the thread block. But a lane reads
    scales that another lane has copied. So the warp waits for its copies and then for all its lanes
    (syncwarp), and once more before a slot is refilled.
Why it should help
    Two pieces of 32 warps are 37 KB in flight on an SM, half of what step 16 asks for, but all of
    the time, and 25 KB are enough. What remains is the launch, the first bytes and the end:
    expect 9.7 us for 33 MB of Q4_0, 1.25 times step 16.
What it costs
    Weights pass through shared memory: each byte is stored and loaded once more. Rows are padded to
    whole pieces of 1024 K (Q8_0: 512).
Machine code
    LDGSTS instead of LDG.E.128 of weights; a DEPBAR in the loop, and no BAR.SYNC.
Prerequisites
    Steps 16 and 9 (cp.async).
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint16, uint32

from qformats import BLOCK, Format
from qformats.repack import CHUNK
from steps.blocks.q8_1 import q8_1_k_outermost
from steps.contract import Family, Launch, Shape, Step, ceil_div
from steps.instructions import (
    cp_async_16,
    cp_async_commit,
    cp_async_wait,
    dp4a,
    half_to_float,
    load_f32x2,
    load_u16,
    load_u32,
    load_u32x4,
    shfl_xor,
)

LANES: Final = 32  # of a warp, which has a row of W
WARPS: Final = 8  # of a thread block; they share nothing but A, in the L1 cache
BLOCKS_PER_SM: Final = 4  # 32 warps: 4096 rows are resident at once. A lane may have 64 registers
SLOTS: Final = 2  # of a warp's ring; with more in flight A waits behind the weights (H200)
CODES: Final = LANES * CHUNK  # bytes of codes of a piece: 512
NIBBLES: Final = 0x0F0F0F0F  # the low nibble of each byte of a word
CENTRE: Final = {"q4_0": -8, "q5_0": -16}  # the offset z of these formats, in units of d


def row_pieces(blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    """Blocks [N, K/32] -> pieces, flat uint8 [N, pieces of a row, codes | fifths | scales]. Blocks
    of a piece behind the end of a row are zero."""
    names, (rows, n) = blocks.dtype.names or (), blocks.shape
    of_piece = CODES // blocks["qs"].view(np.uint8).shape[-1]  # blocks: 32, of q8_0 16
    padded = np.zeros((rows, ceil_div(n, of_piece) * of_piece), blocks.dtype)
    padded[:, :n] = blocks
    parts = [padded["qs"]]
    if "qh" in names:
        parts.append(padded["qh"])
    parts.append(np.stack([padded[name] for name in ("d", "m") if name in names], axis=-1))
    pieces = (np.ascontiguousarray(part).view(np.uint8) for part in parts)
    flat = [part.reshape(rows, padded.shape[1] // of_piece, -1) for part in pieces]
    return (np.concatenate(flat, axis=2).reshape(-1),)


def piece_bytes(fmt: Format) -> int:
    """576, 640, 704 or 768 bytes for 1024 K, or 544 for 512 K of Q8_0."""
    return LANES * fmt.block_bytes // (2 if fmt.bits == 8 else 1)


@cache
def kernel(fmt: Format) -> Any:
    five_bits, minimum = fmt.bits == 5, "m" in (fmt.dtype.names or ())
    half_blocks = fmt.bits == 8  # a chunk is half a block
    shift = int(half_blocks)  # block = chunk >> shift
    centre = float32(CENTRE.get(fmt.name, 0))
    piece = piece_bytes(fmt)
    scales_at = CODES + (4 * LANES if five_bits else 0)
    ring_bytes = SLOTS * piece
    rings_bytes = WARPS * ring_bytes
    wait_for_oldest = cp_async_wait(SLOTS - 1)

    @cuda.jit(device=True, forceinline=True)
    def fifth_bits(four):
        """Four bits -> bit 4 of each byte of a word. The product lays copies of the four 7 bits
        apart, and the mask keeps the one bit of each copy that is wanted."""
        return uint32((uint32(four & uint32(15)) * uint32(0x02040810)) & uint32(0x10101010))

    @cuda.jit(device=True, forceinline=True)
    def add_products(total, word, fifths, a_low, a_high):
        """total + the codes of a word, which are of elements j and j + 16, times two words of A."""
        low, high = word & uint32(NIBBLES), (word >> uint32(4)) & uint32(NIBBLES)
        if five_bits:
            low, high = low | fifth_bits(fifths), high | fifth_bits(fifths >> uint32(16))
        return dp4a(high, a_high, dp4a(low, a_low, total))

    @cuda.jit(launch_bounds=(LANES * WARPS, BLOCKS_PER_SM))
    def w4a8_ring(w, qa, ds, c, chunks, pieces):
        """c[M, N] = a @ dequantize(w)[N, K]^T; w of `row_pieces`, a row having so many chunks in so
        many pieces; qa, ds: Q8_1 A, K-outermost: int8 [K/16, M, 16], (d, s) [K/32, M, 2]."""
        rings = cuda.shared.array(rings_bytes, uint8, alignment=16)
        lane, m, n = cuda.threadIdx.x, cuda.blockIdx.x, cuda.blockIdx.y * WARPS + cuda.threadIdx.y
        if n >= c.shape[1]:  # a whole warp leaves: shuffles want all lanes of the others
            return
        M, pieces = uint32(c.shape[0]), int32(pieces)
        ring = int32(cuda.threadIdx.y) * ring_bytes
        source = int64(n) * int64(pieces * piece) + CHUNK * lane
        # --- global -> shared: the first pieces. A group of copies is closed for each slot, even if
        # the row has no piece for it: waiting counts groups
        for s in range(SLOTS):
            if s < pieces:
                for i in range(0, piece, CODES):
                    if i + CHUNK * lane < piece:
                        cp_async_16(rings, ring + s * piece + i + CHUNK * lane, w, source + i)
                source += piece
            cp_async_commit()

        acc, slot, chunk = float32(0), ring, uint32(lane)
        for p in range(pieces):
            # --- wait for the oldest piece: this lane's copies, then those of all lanes
            wait_for_oldest()
            cuda.syncwarp()

            # --- multiply: the integers of a block, then its scales
            if chunk < chunks:
                words = load_u32x4(rings, slot + CHUNK * lane)
                if minimum:
                    scales = load_u32(rings, slot + scales_at + 4 * lane)
                else:
                    scales = uint32(load_u16(rings, slot + scales_at + 2 * (lane >> shift)))
                d = half_to_float(uint16(scales))
                da, s = load_f32x2(ds, 2 * int64(uint32((chunk >> shift) * M + m)))
                if half_blocks:
                    x = load_u32x4(qa, int64(uint32(chunk * M + m)) * CHUNK)
                    total = dp4a(words[1], x[1], dp4a(words[0], x[0], 0))
                    total = dp4a(words[3], x[3], dp4a(words[2], x[2], total))
                else:
                    low = uint32(2 * chunk * M + m)
                    x = load_u32x4(qa, int64(low) * CHUNK)
                    y = load_u32x4(qa, int64(uint32(low + M)) * CHUNK)
                    bits = load_u32(rings, slot + CODES + 4 * lane) if five_bits else uint32(0)
                    total = add_products(0, words[0], bits, x[0], y[0])
                    total = add_products(total, words[1], bits >> uint32(4), x[1], y[1])
                    total = add_products(total, words[2], bits >> uint32(8), x[2], y[2])
                    total = add_products(total, words[3], bits >> uint32(12), x[3], y[3])
                    if minimum:
                        acc += half_to_float(uint16(scales >> uint32(16))) * s
                    else:
                        acc += centre * d * s
                acc += d * da * float32(total)

            # --- refill the slot, when all lanes have read it
            cuda.syncwarp()
            if p + SLOTS < pieces:
                for i in range(0, piece, CODES):
                    if i + CHUNK * lane < piece:
                        cp_async_16(rings, slot + i + CHUNK * lane, w, source + i)
                source += piece
            cp_async_commit()
            chunk = uint32(chunk + LANES)
            slot = int32(slot + piece)
            if slot == ring + ring_bytes:
                slot = ring

        # --- add up the warp: with each shuffle, a lane's sum is that of twice as many lanes
        for i in range(5):
            acc += shfl_xor(acc, 16 >> i)

        # --- registers -> global
        if lane == 0:
            c[m, n] = acc

    return w4a8_ring


def launch(
    fmt: Format, family: Family, shape: Shape, weights: tuple, activations: tuple, out: Any
) -> Launch:
    # Tokens on x: thread blocks that read the same rows follow each other, and meet them in the L2
    grid = (shape.m, ceil_div(shape.n, WARPS))
    chunks = shape.k // BLOCK * (2 if fmt.bits == 8 else 1)
    args = (*weights, *activations, out, chunks, ceil_div(chunks, LANES))
    return Launch(kernel(fmt), grid, (LANES, WARPS), args)


STEP = Step(
    number=17,
    name="step17_ring",
    title="decode: a ring of slots for each warp, copies always in flight",
    branch="decode",
    families=("A8",),
    parents={"A8": 16},
    unit={"A8": "dp4a"},
    pack=row_pieces,
    activations={"A8": q8_1_k_outermost},
    launch=launch,
    min_cc=(8, 0),
    idea=("cp_async_16", "cp_async_commit", "wait_for_oldest"),
    contains={"A8": ("LDGSTS.E.BYPASS.128", "LDGDEPBAR", "IDP.4A.S8.S8", "SHFL.BFLY")},
    forbids={"A8": ("BAR.SYNC", "IMMA", "HMMA", "LDL", "STL")},
)
