"""Step 4: dp4a emulated - two products ride in one 32-bit multiply-add.

What is new
    Weights and activations travel as 32-bit words of four int8, and their dot products use plain
    integer instructions only. The trick is that a 32-bit product has room for a sum: put two codes
    of W in the halves of one register and two of A, *crossed*, in the halves of another,
        (w0 + w1 2^16) * (a1 + a0 2^16) = w0 a1  +  (w0 a0 + w1 a1) 2^16  +  w1 a0 2^32
    The last term falls off the register, the middle one is the dot product wanted, and the first is
    in the way but small. Accumulate v += ..., and at the end
        sum = (v + 2^15) >> 16                   exact while both sums stay below 2^15 in magnitude.
    How many pairs fit before that? 4-bit codes: 8 pairs, 8 x 2 x 15 x 127 = 30480, half a block;
    5-bit: 4 pairs, 31496; 8-bit: a single one, 2 x 128 x 127 = 32512.
Why it should help
    Step 3 issues two 1-byte shared loads for each multiply-add; here two 4-byte loads and one IMAD
    serve two. Napkin: the shared-memory bound doubles to 32 a cycle and SM, 16 TFLOPS.
What it costs
    Splitting words into pairs when a tile is staged, once for 32 uses; twice the shared bytes.
Machine code
    32-bit LDS and IMAD; PRMT makes the pairs. No IDP: that is the instruction emulated here.
Prerequisites
    Step 3; PRMT, which picks bytes of two words (steps.instructions).
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from numba import cuda, float32, int32

from qformats import BLOCK, Format
from qformats.repack import as_bytes
from steps.blocks.codes import b4, device_format
from steps.blocks.q8_1 import BLOCK_Q8_1, q8_1_blocks
from steps.contract import Family, Launch, Shape, Step, ceil_div
from steps.instructions import half_to_float, load_u16, prmt

BLOCKS_PER_SM: Final = (
    # caps a thread at 32 registers, so that one block multiplies while the other stages
    2
)
TILE: Final = 32  # tokens and features of a tile, 1024 threads with one output each, as in step 3
WORDS: Final = BLOCK // 4  # words of four int8 in one row of a tile
PAIRS: Final = BLOCK // 2  # pairs in one row, which is how they are kept
ROW: Final = PAIRS + 1  # words from one tile row to the next: odd, so a column has 32 banks
QA: Final = 4  # a Q8_1 block: f16 d at byte 0, f16 s at byte 2, then the 32 codes
LARGEST: Final = {4: 15, 5: 31, 8: 128}  # |code| of W, by bits; those of A reach 127
CHAIN: Final = {4: 8, 5: 4, 8: 1}  # pair products that one accumulator carries, by bits of W
ROUND: Final = (
    # lifts the low half above zero, so that it borrows nothing from the sum above
    1 << 15
)

for _bits, _chain in CHAIN.items():
    assert 2 * _chain * LARGEST[_bits] * 127 < 1 << 15, "a chain's sum must fit the upper half"

# Which threads stage what: whole warps with one role each, so that none diverges
STAGE_A: Final = TILE * WORDS  # a word of A each
STAGE_W: Final = STAGE_A + TILE * WORDS // 2  # two words of W each, elements 4i.. and 16 + 4i..
SCALE_A: Final = STAGE_W + TILE  # a token's scale and sum each
SCALE_W: Final = SCALE_A + TILE  # a feature's scale and offset each
assert SCALE_W <= TILE * TILE, "one thread for each thing to stage"


# --- words of four int8 -> pairs ------------------------------------------------------------------
# PRMT picks the four bytes of its result by a selector nibble each, out of two registers: 0-3 are
# the word's bytes, 4 is a zero, and bit 3 of a nibble asks for the picked byte's sign, eight times.
@cuda.jit(device=True, forceinline=True)
def pairs(word):
    """Bytes w0 w1 w2 w3 -> w0 + w1 2^16 and w2 + w3 2^16."""
    # --- a byte with its sign is a low half; two zero bytes, then a byte with its sign a high half
    w0, w1 = int32(prmt(word, 0, 0x8880)), int32(prmt(word, 0, 0x9144))
    w2, w3 = int32(prmt(word, 0, 0xAAA2)), int32(prmt(word, 0, 0xB344))
    return int32(w0 + w1), int32(w2 + w3)


@cuda.jit(device=True, forceinline=True)
def crossed_pairs(word):
    """Bytes a0 a1 a2 a3 -> a1 + a0 2^16 and a3 + a2 2^16."""
    # --- the same with the bytes exchanged
    a1, a0 = int32(prmt(word, 0, 0x9991)), int32(prmt(word, 0, 0x8044))
    a3, a2 = int32(prmt(word, 0, 0xBBB3)), int32(prmt(word, 0, 0xA244))
    return int32(a1 + a0), int32(a3 + a2)


@cache
def kernel(fmt: Format) -> Any:
    fields = device_format(fmt.name)
    words, scale, offset = fields.words, fields.scale, fields.offset
    block_bytes = fmt.block_bytes
    chain = CHAIN[fmt.bits]

    @cuda.jit(launch_bounds=(TILE * TILE, BLOCKS_PER_SM))
    def w4a8_dp4a_emulated(w, a, c, blocks_k):
        """c[M, N] = a @ dequantize(w)[N, K]^T; a holds the Q8_1 blocks of row m in a row."""
        tile_a = cuda.shared.array((TILE, ROW), int32)
        tile_w = cuda.shared.array((TILE, ROW), int32)
        scale_a = cuda.shared.array(TILE, float32)
        sum_a = cuda.shared.array(TILE, float32)
        scale_w = cuda.shared.array(TILE, float32)
        offset_w = cuda.shared.array(TILE, float32)
        tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
        t = ty * TILE + tx
        m0, n0 = cuda.blockIdx.y * TILE, cuda.blockIdx.x * TILE
        acc = float32(0)
        for b in range(blocks_k):
            # --- global -> shared
            if t < STAGE_A:
                # --- A: word i of a row as two crossed pairs
                row, i = t // WORDS, t % WORDS
                if m0 + row < c.shape[0]:
                    at = ((m0 + row) * blocks_k + b) * BLOCK_Q8_1
                    first, second = crossed_pairs(b4(a, at + QA + 4 * i))
                    tile_a[row, 2 * i] = first
                    tile_a[row, 2 * i + 1] = second
            elif t < STAGE_W:
                # --- W: two words of a row, elements 4i.. and 16 + 4i.., as two pairs each
                row, i = (t - STAGE_A) // (WORDS // 2), t % (WORDS // 2)
                if n0 + row < c.shape[1]:
                    low, high = words(w, ((n0 + row) * blocks_k + b) * block_bytes, i)
                    first, second = pairs(low)
                    tile_w[row, 2 * i] = first
                    tile_w[row, 2 * i + 1] = second
                    first, second = pairs(high)
                    tile_w[row, WORDS + 2 * i] = first
                    tile_w[row, WORDS + 2 * i + 1] = second
            elif t < SCALE_A:
                if m0 + tx < c.shape[0]:
                    at = ((m0 + tx) * blocks_k + b) * BLOCK_Q8_1
                    scale_a[tx] = half_to_float(load_u16(a, at))
                    sum_a[tx] = half_to_float(load_u16(a, at + 2))
            elif t < SCALE_W:
                if n0 + tx < c.shape[1]:
                    at = ((n0 + tx) * blocks_k + b) * block_bytes
                    scale_w[tx] = scale(w, at)
                    offset_w[tx] = offset(w, at)
            cuda.syncthreads()

            # --- multiply: token ty, feature tx; a whole warp rests where there is no such token.
            # Chains of `chain` pairs, each of them from ROUND on; then scales and compensation
            if m0 + ty < c.shape[0]:  # (features past the edge are leftovers that are never stored)
                total = int32(0)
                for first in range(0, PAIRS, chain):
                    v = int32(ROUND)
                    for p in range(first, first + chain):
                        v = int32(v + tile_a[ty, p] * tile_w[tx, p])
                    total = int32(total + (v >> int32(16)))
                acc += scale_w[tx] * scale_a[ty] * float32(total) + offset_w[tx] * sum_a[ty]
            cuda.syncthreads()

        # --- registers -> global: token ty, feature tx, where C has them
        if m0 + ty < c.shape[0] and n0 + tx < c.shape[1]:
            c[m0 + ty, n0 + tx] = acc

    return w4a8_dp4a_emulated


def launch(
    fmt: Format, family: Family, shape: Shape, weights: tuple, activations: tuple, out: Any
) -> Launch:
    grid = (ceil_div(shape.n, TILE), ceil_div(shape.m, TILE))
    args = (*weights, *activations, out, shape.k // BLOCK)
    return Launch(kernel(fmt), grid, (TILE, TILE), args)


STEP = Step(
    number=4,
    name="step04_dp4a_emulated",
    title="dp4a emulated: two products in one multiply-add",
    branch="cuda_cores",
    families=("A8",),
    parents={"A8": 3},
    unit={"A8": "packed_int32"},
    pack=as_bytes,
    activations={"A8": q8_1_blocks},
    launch=launch,
    idea=("pairs", "crossed_pairs"),
    contains={"A8": ("PRMT", "STS", "LDS", "IMAD", "BAR.SYNC")},
    forbids={"A8": ("IDP", "IMMA", "HMMA", "LDS.U8", "LDS.S8")},
    chosen_untuned=True,
)
