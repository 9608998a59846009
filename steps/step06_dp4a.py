"""Step 6: dp4a - the hardware multiplies four pairs of bytes and adds them, in one instruction.

What is new
    IDP.4A (`dp4a`) is c + a0 b0 + a1 b1 + a2 b2 + a3 b3 of the signed bytes of two words. Step 5
    needs two IMADs for that, and before them two PRMTs and a sum for each pair of each word. Now a
    word of four codes goes to shared memory as it is: half the words, and a stage twice as deep in
    the same space. The rest is step 5: `python -m steps diff 6` shows the two side by side.
    (Also, the loads of a stage no longer wait for each other: see the comment there.)
Why it should help
    IDP.4A issues at the rate of IMAD, 64 lanes a cycle and SM, and does twice the work, and 12
    words of shared memory still feed 32 of them. No sum can overflow (32 x 128 x 128 < 2^31), so
    one is enough for a block of K, and Q8_0 need not shift its products down any more.
What it costs
    A GPU of compute capability 6.1 or later, and codes that are bytes: Q4_0 and Q5_0 are centred
    here (an OR, a subtraction, an XOR for four codes), so that their offset is gone; the codes of
    Q4_1 and Q5_1 stay as they are and keep the term z * s.
Machine code
    IDP.4A.S8.S8 fills the loop, 256 for each block of K; the IMAD that is left computes addresses.
    What is left beside it: I2F, FMUL, FFMA for each of 32 outputs, once in 32 of K.
Prerequisites
    Step 5, its tiles and layouts.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from numba import cuda, float32, int32, uint32

from qformats import BLOCK, Format
from qformats.repack import CHUNK, k_outermost
from steps.blocks.codes import fifth_bits
from steps.blocks.q8_1 import q8_1_k_outermost
from steps.contract import Family, Launch, Shape, Step, ceil_div
from steps.instructions import (
    dp4a,
    load_f32x2,
    load_f32x4,
    load_u32,
    load_u32x4,
    store_f32x2,
    store_f32x4,
    store_u32,
)

SIDE: Final = 16  # threads of a block along M
BLOCKS_PER_SM: Final = 2  # caps a thread at 128 registers: one block multiplies, one stages
TN: Final = 4  # features of one thread: one 128-bit load
FEW: Final = 16  # tokens up to which there is little work between two barriers and few tiles:
# few -> tokens of a thread, threads along N, blocks of K in one stage
TILES: Final = {True: (1, 8, 8), False: (8, 16, 4)}
WORDS: Final = BLOCK // 4  # of four int8 along one block of K
NIBBLES: Final = 0x0F0F0F0F  # the low nibble of each byte of a word
CENTRE: Final = {"q4_0": 8, "q5_0": 16}  # taken off the codes, so that they have no offset
ONES: Final = 0x01010101  # a 1 in each byte
SIGNS: Final = 0x80808080  # the sign of each byte: lent, so that no subtraction borrows from a byte


@cache
def kernel(fmt: Format, tm: int, columns: int, depth: int) -> Any:
    """The kernel for `tm` tokens a thread (1 or 8), `columns` threads along N, `depth` blocks of K
    a stage."""
    threads = SIDE * columns
    bm, bn = SIDE * tm, columns * TN  # tokens and features of a tile
    assert depth * bm % threads == 0, "every thread stages as many units of one row of A ..."
    assert depth * bn % threads == 0, "... and of one row of W"
    words_a, words_w = depth * WORDS * bm, depth * WORDS * bn
    floats_a, floats_w = 2 * depth * bm, 2 * depth * bn
    units = 2 if fmt.bits == 8 else 1  # 128-bit loads for one block of W
    five_bits = fmt.bits == 5
    # 128-bit loads of one thread for one stage, of A and of W
    units_a, units_w = 2 * depth * bm // threads, units * depth * bn // threads
    centre = CENTRE.get(fmt.name, 0)
    compensated = fmt.name in ("q4_1", "q5_1")  # centring leaves the others an offset of zero

    @cuda.jit(device=True, forceinline=True)
    def stage_w(tile, p, row, word):
        # --- a word of W, the centre taken off each byte, none of which borrows from the next
        if centre:
            lent = uint32(uint32(word) | uint32(SIGNS))
            word = uint32(uint32(lent - uint32(centre * ONES)) ^ uint32(SIGNS))
        store_u32(tile, p * bn + row, word)  # (tile[i] = x would first ask whether i < 0)

    @cuda.jit(device=True, forceinline=True)
    def stage_word(tile, unit, i, row, word, qh):
        """Word i of a unit of W: four codes of 8 bits, or 4i.. and 16 + 4i.. in its nibbles."""
        if units == 2:
            stage_w(tile, unit * (WORDS // 2) + i, row, word)
        else:
            # --- a word has elements 4i.. in its low nibbles, 16 + 4i.. in its high ones; the fifth
            # bit of element j is bit j of qh
            low, high = uint32(word) & uint32(NIBBLES), uint32(word >> 4) & uint32(NIBBLES)
            if five_bits:
                low |= uint32(fifth_bits((qh >> uint32(4 * i)) & uint32(15)))
                high |= uint32(fifth_bits((qh >> uint32(BLOCK // 2 + 4 * i)) & uint32(15)))
            stage_w(tile, unit * WORDS + i, row, low)
            stage_w(tile, unit * WORDS + WORDS // 2 + i, row, high)

    @cuda.jit(device=True, forceinline=True)
    def token(i, ty):
        """Of a thread's i-th row, in the tile: four neighbours, then four 64 further on."""
        return ty if tm == 1 else i // 4 * 4 * SIDE + 4 * ty + i % 4

    @cuda.jit(device=True, forceinline=True)
    def multiply(v, tile_a, tile_w, p, ty, tx):
        """Word p of features 4 tx.. with that of each token of the thread."""
        xa = cuda.local.array(4, int32)
        w = load_u32x4(tile_w, p * bn + TN * tx)
        for i in range(0, tm, 4):
            if tm == 1:
                xa[0] = tile_a[p * bm + ty]
            else:
                xa[0], xa[1], xa[2], xa[3] = load_u32x4(tile_a, p * bm + token(i, ty))
            for r in range(min(tm, 4)):
                # --- four products of token i + r with each of the four features
                v[i + r, 0] = dp4a(xa[r], w[0], v[i + r, 0])
                v[i + r, 1] = dp4a(xa[r], w[1], v[i + r, 1])
                v[i + r, 2] = dp4a(xa[r], w[2], v[i + r, 2])
                v[i + r, 3] = dp4a(xa[r], w[3], v[i + r, 3])

    @cuda.jit(launch_bounds=(threads, BLOCKS_PER_SM))
    def w4a8_dp4a(qs, qh, scale, offset, qa, ds, c, blocks_k):
        """c[M, N] = a @ dequantize(w)[N, K]^T; both operands K-outermost
        (qformats.repack.k_outermost)."""
        tile_a = cuda.shared.array(words_a, int32, alignment=16)  # [word][token]
        tile_w = cuda.shared.array(words_w, int32, alignment=16)  # [word][feature]
        ds_a = cuda.shared.array(floats_a, float32, alignment=16)  # d, s of a token
        dz_w = cuda.shared.array(floats_w, float32, alignment=16)  # d, z of a feature
        acc = cuda.local.array((tm, TN), float32)
        v = cuda.local.array((tm, TN), int32)
        M, N = c.shape
        tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
        t = uint32(ty * columns + tx)  # unsigned: division by a power of two is then one shift
        m0, n0 = cuda.blockIdx.y * bm, cuda.blockIdx.x * bn
        for i in range(tm):
            for j in range(TN):
                acc[i, j] = 0

        for b in range(0, blocks_k, depth):
            # --- A, global -> registers -> shared: a unit of 16 bytes each, four words. Beyond the
            # matrix its last row and block are read instead, as nobody uses them: without a branch
            # between the loads, all of them are under way at once. Then scales and sums of tokens
            row = t % bm
            m = min(m0 + row, M - 1)
            for i in range(units_a):
                unit = t // bm + i * (threads // bm)
                x = load_u32x4(qa, (min(2 * b + unit, 2 * blocks_k - 1) * M + m) * CHUNK)
                p = unit * (WORDS // 2)
                store_u32(tile_a, p * bm + row, x[0])
                store_u32(tile_a, (p + 1) * bm + row, x[1])
                store_u32(tile_a, (p + 2) * bm + row, x[2])
                store_u32(tile_a, (p + 3) * bm + row, x[3])
            for i in range(units_a // 2):
                block = t // bm + i * (threads // bm)
                da, sum_a = load_f32x2(ds, (min(b + block, blocks_k - 1) * M + m) * 2)
                store_f32x2(ds_a, (block * bm + row) * 2, da, sum_a)

            # --- W, global -> registers -> shared: the same, with scales and offsets of features;
            # then wait until all threads have staged theirs
            row = t % bn
            n = min(n0 + row, N - 1)
            for i in range(units_w):
                unit = t // bn + i * (threads // bn)
                at = min(units * b + unit, units * blocks_k - 1) * N + n
                x = load_u32x4(qs, at * CHUNK)
                fifth = uint32(0)
                if five_bits:
                    fifth = load_u32(qh, at)
                stage_word(tile_w, unit, 0, row, x[0], fifth)
                stage_word(tile_w, unit, 1, row, x[1], fifth)
                stage_word(tile_w, unit, 2, row, x[2], fifth)
                stage_word(tile_w, unit, 3, row, x[3], fifth)
            for i in range(units_w // units):
                block = t // bn + i * (threads // bn)
                at = min(b + block, blocks_k - 1) * N + n
                store_f32x2(dz_w, (block * bn + row) * 2, scale[at], offset[at])
            cuda.syncthreads()

            for block in range(min(depth, blocks_k - b)):
                # --- multiply the words of a block of K, the sums of which begin at 0
                for i in range(tm):
                    for j in range(TN):
                        v[i, j] = 0
                for p in range(block * WORDS, block * WORDS + WORDS, 2):
                    multiply(v, tile_a, tile_w, p, ty, tx)
                    multiply(v, tile_a, tile_w, p + 1, ty, tx)

                # --- scale: (d, z) of four features, (d, s) of each token; and compensate where the
                # format has an offset
                d0, z0, d1, z1 = load_f32x4(dz_w, (block * bn + TN * tx) * 2)
                d2, z2, d3, z3 = load_f32x4(dz_w, (block * bn + TN * tx) * 2 + 4)
                for i in range(tm):
                    da, s = load_f32x2(ds_a, (block * bm + token(i, ty)) * 2)
                    acc[i, 0] += d0 * da * float32(v[i, 0])
                    acc[i, 1] += d1 * da * float32(v[i, 1])
                    acc[i, 2] += d2 * da * float32(v[i, 2])
                    acc[i, 3] += d3 * da * float32(v[i, 3])
                    if compensated:
                        acc[i, 0] += z0 * s
                        acc[i, 1] += z1 * s
                        acc[i, 2] += z2 * s
                        acc[i, 3] += z3 * s
            cuda.syncthreads()

        # --- registers -> global: 128 bits at once where the row allows it
        n = n0 + TN * tx
        for i in range(tm):
            m = m0 + token(i, ty)
            if m < M:
                if N % TN == 0 and n < N:
                    store_f32x4(c, m * N + n, acc[i, 0], acc[i, 1], acc[i, 2], acc[i, 3])
                else:
                    for j in range(TN):
                        if n + j < N:
                            c[m, n + j] = acc[i, j]

    return w4a8_dp4a


def launch(
    fmt: Format, family: Family, shape: Shape, weights: tuple, activations: tuple, out: Any
) -> Launch:
    tm, columns, depth = TILES[shape.m <= FEW]
    grid = (ceil_div(shape.n, columns * TN), ceil_div(shape.m, SIDE * tm))
    args = (*weights, *activations, out, shape.k // BLOCK)
    return Launch(kernel(fmt, tm, columns, depth), grid, (columns, SIDE), args)


STEP = Step(
    number=6,
    name="step06_dp4a",
    title="dp4a: four products an instruction",
    branch="cuda_cores",
    families=("A8",),
    parents={"A8": 5},
    unit={"A8": "dp4a"},
    pack=k_outermost,
    activations={"A8": q8_1_k_outermost},
    launch=launch,
    idea=("dp4a",),
    contains={"A8": ("IDP.4A.S8.S8", "LDG.E.128", "LDS.128", "STG.E.128", "BAR.SYNC")},
    forbids={"A8": ("IMMA", "HMMA", "LDS.U8", "LDS.S8")},
    chosen_untuned=True,
)
