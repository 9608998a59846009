"""Step 5: vectorized - 128 bits an access, a small tile of C in each thread's registers.

What is new
    A thread owns 8 tokens x 4 features. For every pair of K it reads 12 words from shared memory in
    three 128-bit loads and multiplies each of the 8 with each of the 4. Global memory is read 128
    bits at a time too: the weights are repacked once into *slabs* (codes, fifth bits, scales and
    offsets apart, K outermost), in which 16 bytes of one row are followed by 16 bytes of the next,
    so that every address is aligned and 32 lanes read 512 bytes in one piece. Q8_1 arrives alike.
Why it should help
    In step 4 two shared words fed one IMAD; here 12 words feed 32, so shared memory is no longer
    the bound and the multiplier is. Napkin: 64 IMAD a cycle and SM, two products each, is 132 SM x
    1.9 GHz x 64 x 4 = 64 TOPS; staging, scaling and barriers will leave about half.
What it costs
    About 120 registers a thread, so two blocks of 256 threads share an SM; a repack of the weights
    (timed apart). For few tokens a tile of 128 would be mostly empty: a thread then owns one token.
Machine code
    LDG.E.128, LDS.128 and STG.E.128 where step 4 had 32-bit ones; IMAD fills the loop.
Read next
    The hardware's own dp4a would do with one instruction what two multiply-adds do here. What would
    you add next?
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from numba import cuda, float32, int32, uint32

from qformats import BLOCK, Format
from qformats.device import fifth_bits
from qformats.repack import UNIT, slabs
from steps.activations import q8_1_slabs
from steps.instructions import load_f32x2, load_u32x4, prmt, store_f32x4
from steps.step import Family, Launch, Shape, Step, ceil_div

SIDE: Final = 16  # a thread block is 16 x 16 threads
THREADS: Final = SIDE * SIDE
TN: Final = 4  # features of one thread: one 128-bit load
BLOCKS_PER_SM: Final = (
    2  # caps a thread at 128 registers: while one block stages, the other multiplies
)
FEW: Final = 16  # up to so many tokens a thread owns one of them, else 8
BN: Final = SIDE * TN  # features of a tile
PAIRS: Final = BLOCK // 2  # pairs of codes along one block
NIBBLES: Final = 0x0F0F0F0F  # the low nibble of each byte of a word
LARGEST: Final = {4: 15, 5: 31, 8: 128}  # |code| of W, by bits; those of A reach 127
CHAIN: Final = {4: 8, 5: 4, 8: 1}  # pair products that one accumulator carries, by bits of W
ROUND: Final = (
    1 << 15
)  # lifts the low half above zero, so that it borrows nothing from the sum above

for _bits, _chain in CHAIN.items():
    assert 2 * _chain * LARGEST[_bits] * 127 < 1 << 15, "a chain's sum must fit the upper half"


# --- words of four int8 -> pairs, as in step 4
# ------------------------------------------------------
@cuda.jit(device=True, forceinline=True)
def pairs(word):
    """Bytes w0 w1 w2 w3 -> w0 + w1 2^16 and w2 + w3 2^16."""
    w0, w1 = int32(prmt(word, 0, 0x8880)), int32(prmt(word, 0, 0x9144))
    w2, w3 = int32(prmt(word, 0, 0xAAA2)), int32(prmt(word, 0, 0xB344))
    return int32(w0 + w1), int32(w2 + w3)


@cuda.jit(device=True, forceinline=True)
def crossed_pairs(word):
    """Bytes a0 a1 a2 a3 -> a1 + a0 2^16 and a3 + a2 2^16."""
    a1, a0 = int32(prmt(word, 0, 0x9991)), int32(prmt(word, 0, 0x8044))
    a3, a2 = int32(prmt(word, 0, 0xBBB3)), int32(prmt(word, 0, 0xA244))
    return int32(a1 + a0), int32(a3 + a2)


@cache
def kernel(fmt: Format, tm: int) -> Any:
    """The kernel for `tm` tokens a thread: 1, or a multiple of 4."""
    bm = SIDE * tm  # tokens of a tile
    words_a, words_w = PAIRS * bm, PAIRS * BN
    chain = CHAIN[fmt.bits]
    units = 2 if fmt.bits == 8 else 1  # 128-bit loads for one block of W
    five_bits = fmt.bits == 5
    compensated = fmt.name != "q8_0"  # whose offset is zero

    @cuda.jit(device=True, forceinline=True)
    def stage_a(tile, p, row, word):
        first, second = crossed_pairs(word)
        tile[p * bm + row] = first
        tile[(p + 1) * bm + row] = second

    @cuda.jit(device=True, forceinline=True)
    def stage_w(tile, p, row, word):
        first, second = pairs(word)
        tile[p * BN + row] = first
        tile[(p + 1) * BN + row] = second

    @cuda.jit(device=True, forceinline=True)
    def stage_nibbles(tile, i, row, word, qh):
        """Word i of a unit: elements 4i.. in its low nibbles, 16 + 4i.. in its high ones."""
        low, high = uint32(word) & uint32(NIBBLES), (uint32(word) >> uint32(4)) & uint32(NIBBLES)
        if five_bits:
            low |= uint32(fifth_bits((qh >> uint32(4 * i)) & uint32(15)))
            high |= uint32(fifth_bits((qh >> uint32(16 + 4 * i)) & uint32(15)))
        stage_w(tile, 2 * i, row, low)
        stage_w(tile, PAIRS // 2 + 2 * i, row, high)

    @cuda.jit(launch_bounds=(THREADS, BLOCKS_PER_SM))
    def w4a8_vectorized(qs, qh, scale, offset, qa, ds, c, blocks_k):
        """c[M, N] = a @ dequantize(w)[N, K]^T; both operands in slabs (qformats.repack.slabs)."""
        tile_a = cuda.shared.array(words_a, int32, alignment=16)  # [pair][token]
        tile_w = cuda.shared.array(words_w, int32, alignment=16)  # [pair][feature]
        scale_a = cuda.shared.array(bm, float32)
        sum_a = cuda.shared.array(bm, float32)
        scale_w = cuda.shared.array(BN, float32)
        offset_w = cuda.shared.array(BN, float32)
        acc = cuda.local.array((tm, TN), float32)
        total = cuda.local.array((tm, TN), int32)
        v = cuda.local.array((tm, TN), int32)
        xa = cuda.local.array(tm, int32)
        M, N = c.shape
        tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
        t = ty * SIDE + tx
        m0, n0 = cuda.blockIdx.y * bm, cuda.blockIdx.x * BN
        for i in range(tm):
            for j in range(TN):
                acc[i, j] = 0

        for b in range(blocks_k):
            # --- global -> registers -> shared: a unit of 16 bytes each, split into pairs on the
            # way
            for u in range(t, 2 * bm, THREADS):
                half, row = u // bm, u % bm
                if m0 + row < M:
                    x0, x1, x2, x3 = load_u32x4(qa, ((2 * b + half) * M + m0 + row) * UNIT)
                    p = half * (PAIRS // 2)
                    stage_a(tile_a, p, row, x0)
                    stage_a(tile_a, p + 2, row, x1)
                    stage_a(tile_a, p + 4, row, x2)
                    stage_a(tile_a, p + 6, row, x3)
            for u in range(t, units * BN, THREADS):
                half, row = u // BN, u % BN
                if n0 + row < N:
                    x0, x1, x2, x3 = load_u32x4(qs, ((units * b + half) * N + n0 + row) * UNIT)
                    if units == 2:
                        p = half * (PAIRS // 2)
                        stage_w(tile_w, p, row, x0)
                        stage_w(tile_w, p + 2, row, x1)
                        stage_w(tile_w, p + 4, row, x2)
                        stage_w(tile_w, p + 6, row, x3)
                    else:
                        fifth = uint32(0)
                        if five_bits:
                            fifth = qh[b * N + n0 + row]
                        stage_nibbles(tile_w, 0, row, x0, fifth)
                        stage_nibbles(tile_w, 1, row, x1, fifth)
                        stage_nibbles(tile_w, 2, row, x2, fifth)
                        stage_nibbles(tile_w, 3, row, x3, fifth)
            if t < bm and m0 + t < M:
                scale_a[t], sum_a[t] = load_f32x2(ds, (b * M + m0 + t) * 2)
            if t < BN and n0 + t < N:
                scale_w[t] = scale[b * N + n0 + t]
                offset_w[t] = offset[b * N + n0 + t]
            cuda.syncthreads()

            # --- shared -> registers, multiply: tokens 4 ty.. and 64 + 4 ty.., features 4 tx..
            for i in range(tm):
                for j in range(TN):
                    total[i, j] = 0
            for first in range(0, PAIRS, chain):
                for i in range(tm):
                    for j in range(TN):
                        v[i, j] = ROUND
                for p in range(first, first + chain):
                    if tm == 1:
                        xa[0] = tile_a[p * bm + ty]
                    else:
                        for i in range(0, tm, 4):
                            xa[i], xa[i + 1], xa[i + 2], xa[i + 3] = load_u32x4(
                                tile_a, p * bm + i * SIDE + 4 * ty
                            )
                    w0, w1, w2, w3 = load_u32x4(tile_w, p * BN + TN * tx)
                    for i in range(tm):
                        v[i, 0] = int32(v[i, 0] + xa[i] * int32(w0))
                        v[i, 1] = int32(v[i, 1] + xa[i] * int32(w1))
                        v[i, 2] = int32(v[i, 2] + xa[i] * int32(w2))
                        v[i, 3] = int32(v[i, 3] + xa[i] * int32(w3))
                for i in range(tm):
                    for j in range(TN):
                        total[i, j] = int32(total[i, j] + (v[i, j] >> int32(16)))

            # --- scale
            for i in range(tm):
                row = ty if tm == 1 else (i // 4) * 4 * SIDE + 4 * ty + i % 4
                da, s = scale_a[row], sum_a[row]
                for j in range(TN):
                    acc[i, j] += scale_w[TN * tx + j] * da * float32(total[i, j])
                    if compensated:
                        acc[i, j] += offset_w[TN * tx + j] * s
            cuda.syncthreads()

        # --- registers -> global: 128 bits at once where the row allows it
        n = n0 + TN * tx
        for i in range(tm):
            m = m0 + (ty if tm == 1 else (i // 4) * 4 * SIDE + 4 * ty + i % 4)
            if m < M:
                if N % TN == 0 and n < N:
                    store_f32x4(c, m * N + n, acc[i, 0], acc[i, 1], acc[i, 2], acc[i, 3])
                else:
                    for j in range(TN):
                        if n + j < N:
                            c[m, n + j] = acc[i, j]

    return w4a8_vectorized


def launch(
    fmt: Format, family: Family, shape: Shape, weights: tuple, activations: tuple, out: Any
) -> Launch:
    tm = 1 if shape.m <= FEW else 8
    grid = (ceil_div(shape.n, BN), ceil_div(shape.m, SIDE * tm))
    args = (*weights, *activations, out, shape.k // BLOCK)
    return Launch(kernel(fmt, tm), grid, (SIDE, SIDE), args)


STEP = Step(
    number=5,
    name="step05_vectorized",
    title="vectorized: 128-bit accesses, 8 x 4 outputs a thread",
    families=("A8",),
    parents={"A8": 4},
    unit={"A8": "packed_int32"},
    pack=slabs,
    activations=q8_1_slabs,
    launch=launch,
    contains={"A8": ("LDG.E.128", "LDS.128", "STG.E.128", "IMAD", "BAR.SYNC")},
    forbids={"A8": ("IDP", "IMMA", "HMMA", "LDS.U8", "LDS.S8")},
)
