"""Step 5: vectorized - 128 bits an access, a small tile of C in each thread's registers.

What is new
    A thread owns 8 tokens x 4 features. For every pair of K it reads 12 words from shared memory in
    three 128-bit loads and multiplies each of the 8 with each of the 4. Global memory is read 128
    bits at a time too: the weights are repacked once into a *K-outermost layout* (codes, fifth
    bits, scales and offsets apart), in which 16 bytes of one row are followed by 16 of the next:
    every address is aligned and 32 lanes read 512 bytes in one piece. Q8_1 arrives alike.
Why it should help
    In step 4 two shared words fed one IMAD, here 12 words feed 32: shared memory is no longer the
    bound, the multiplier is. Napkin: 64 IMAD a cycle and SM, two products each, is 132 SM x 1.9 GHz
    x 64 x 4 = 64 TOPS; staging, scaling and barriers will leave about half.
What it costs
    About 120 registers a thread, so two blocks of 256 threads share an SM; a repack of the weights.
    For few tokens a tile of 128 would be mostly empty: a thread then owns one of them.
Machine code
    LDG.E.128, LDS.128 and STG.E.128 where step 4 had 32-bit ones; IMAD fills the loop.
Prerequisites
    Step 4; the K-outermost layout (qformats.repack), which this step teaches.
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
    load_f32x2,
    load_f32x4,
    load_u32x4,
    prmt,
    store_f32x2,
    store_f32x4,
    store_u32,
)

SIDE: Final = 16  # threads of a block along M
BLOCKS_PER_SM: Final = 2  # caps a thread at 128 registers: one block multiplies, one stages
TN: Final = 4  # features of one thread: one 128-bit load
FEW: Final = 16  # tokens up to which there is little work between two barriers and few tiles:
# few -> tokens of a thread, threads along N, blocks of K in one stage
TILES: Final = {True: (1, 8, 8), False: (8, 16, 2)}
HALF: Final = BLOCK // 2  # pairs along one block of K; also the distance of a byte's two nibbles
NIBBLES: Final = 0x0F0F0F0F  # the low nibble of each byte of a word
# By bits of W: what is taken off the codes, so that they are signed and a chain holds twice as many
CENTRE: Final = {4: 8, 5: 16, 8: 0}
CHAIN: Final = {4: 16, 5: 8, 8: 1}  # pair products that one accumulator carries
ROUND: Final = 1 << 15  # lifts the low half above zero: it borrows nothing from the sum above

for _bits, _chain in CHAIN.items():
    assert 2 * _chain * (1 << (_bits - 1)) * 127 < 1 << 15, "a chain's sum must fit the upper half"


# --- words of four int8 -> pairs, as in step 4 ----------------------------------------------------
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
def kernel(fmt: Format, tm: int, columns: int, depth: int) -> Any:
    """The kernel for `tm` tokens a thread (1 or 8), `columns` threads along N, `depth` blocks of K
    a stage."""
    threads = SIDE * columns
    bm, bn = SIDE * tm, columns * TN  # tokens and features of a tile
    assert threads % bm == 0, "a thread stages units of one row of A ..."
    assert threads % bn == 0, "... and of one row of W"
    words_a, words_w = depth * HALF * bm, depth * HALF * bn
    floats_a, floats_w = 2 * depth * bm, 2 * depth * bn
    units = 2 if fmt.bits == 8 else 1  # 128-bit loads for one block of W
    five_bits = fmt.bits == 5
    # 128-bit loads of one thread for one stage, of A and of W
    units_a, units_w = ceil_div(2 * depth * bm, threads), ceil_div(units * depth * bn, threads)
    centre, centre_pair = float32(CENTRE[fmt.bits]), CENTRE[fmt.bits] * (1 + (1 << 16))
    alone = CHAIN[fmt.bits] == 1  # each product is shifted down before it is added
    run, start, shift = (HALF, 0, 0) if alone else (CHAIN[fmt.bits], ROUND, 16)
    compensated = fmt.name in ("q4_1", "q5_1")  # centring leaves the others an offset of zero

    @cuda.jit(device=True, forceinline=True)
    def stage_a(tile, p, row, word):
        first, second = crossed_pairs(word)
        store_u32(tile, p * bm + row, first)  # (tile[i] = x would first ask whether i < 0)
        store_u32(tile, (p + 1) * bm + row, second)

    @cuda.jit(device=True, forceinline=True)
    def stage_w(tile, p, row, word):
        # --- two pairs of a word of W, their codes centred
        first, second = pairs(word)
        store_u32(tile, p * bn + row, first - centre_pair)
        store_u32(tile, (p + 1) * bn + row, second - centre_pair)

    @cuda.jit(device=True, forceinline=True)
    def stage_word(tile, unit, i, row, word, qh):
        """Word i of a unit of W: four codes of 8 bits, or 4i.. and 16 + 4i.. in its nibbles."""
        if units == 2:
            stage_w(tile, unit * (HALF // 2) + 2 * i, row, word)
        else:
            low, high = uint32(word) & uint32(NIBBLES), uint32(word >> 4) & uint32(NIBBLES)
            if five_bits:
                low |= uint32(fifth_bits((qh >> uint32(4 * i)) & uint32(15)))
                high |= uint32(fifth_bits((qh >> uint32(HALF + 4 * i)) & uint32(15)))
            stage_w(tile, unit * HALF + 2 * i, row, low)
            stage_w(tile, unit * HALF + HALF // 2 + 2 * i, row, high)

    @cuda.jit(device=True, forceinline=True)
    def multiply_add(v, x, w):
        if alone:
            return int32(v + (int32(x * int32(w) + ROUND) >> int32(16)))
        return int32(v + x * int32(w))

    @cuda.jit(device=True, forceinline=True)
    def token(i, ty):
        """Of a thread's i-th row, in the tile: four neighbours, then four 64 further on."""
        return ty if tm == 1 else i // 4 * 4 * SIDE + 4 * ty + i % 4

    @cuda.jit(launch_bounds=(threads, BLOCKS_PER_SM))
    def w4a8_vectorized(qs, qh, scale, offset, qa, ds, c, blocks_k):
        """c[M, N] = a @ dequantize(w)[N, K]^T; both operands K-outermost
        (qformats.repack.k_outermost)."""
        tile_a = cuda.shared.array(words_a, int32, alignment=16)  # [pair][token]
        tile_w = cuda.shared.array(words_w, int32, alignment=16)  # [pair][feature]
        ds_a = cuda.shared.array(floats_a, float32, alignment=16)  # d, s of a token
        dz_w = cuda.shared.array(floats_w, float32, alignment=16)  # d, z of a feature
        acc = cuda.local.array((tm, TN), float32)
        v = cuda.local.array((tm, TN), int32)
        xa = cuda.local.array(4, int32)
        M, N = c.shape
        tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
        t = uint32(ty * columns + tx)  # unsigned: division by a power of two is then one shift
        m0, n0 = cuda.blockIdx.y * bm, cuda.blockIdx.x * bn
        for i in range(tm):
            for j in range(TN):
                acc[i, j] = 0

        for b in range(0, blocks_k, depth):
            left = min(depth, blocks_k - b)  # blocks of K in this stage
            # --- A, global -> registers -> shared: a unit of 16 bytes each, split into pairs; with
            # every second unit, scale and sum of its token
            row = t % bm
            if m0 + row < M:
                for i in range(units_a):
                    unit = t // bm + i * (threads // bm)
                    if unit < 2 * left:
                        x = load_u32x4(qa, ((2 * b + unit) * M + m0 + row) * CHUNK)
                        p = unit * (HALF // 2)
                        stage_a(tile_a, p, row, x[0])
                        stage_a(tile_a, p + 2, row, x[1])
                        stage_a(tile_a, p + 4, row, x[2])
                        stage_a(tile_a, p + 6, row, x[3])
                        if unit % 2 == 0:
                            da, sum_a = load_f32x2(ds, ((b + unit // 2) * M + m0 + row) * 2)
                            store_f32x2(ds_a, (unit // 2 * bm + row) * 2, da, sum_a)

            # --- W, global -> registers -> shared: the same, with scale and offset of its feature,
            # to which the centre of the codes is added; then wait until all have staged theirs
            row = t % bn
            if n0 + row < N:
                for i in range(units_w):
                    unit = t // bn + i * (threads // bn)
                    if unit < units * left:
                        x = load_u32x4(qs, ((units * b + unit) * N + n0 + row) * CHUNK)
                        fifth = uint32(0)
                        if five_bits:
                            fifth = qh[(b + unit) * N + n0 + row]
                        stage_word(tile_w, unit, 0, row, x[0], fifth)
                        stage_word(tile_w, unit, 1, row, x[1], fifth)
                        stage_word(tile_w, unit, 2, row, x[2], fifth)
                        stage_word(tile_w, unit, 3, row, x[3], fifth)
                        if unit % units == 0:
                            block = unit // units
                            at = (b + block) * N + n0 + row
                            d, z = scale[at], offset[at]
                            store_f32x2(dz_w, (block * bn + row) * 2, d, z + centre * d)
            cuda.syncthreads()

            for block in range(left):
                for part in range(HALF // run):
                    # --- shared -> registers, multiply: features 4 tx.. with each token of the
                    # thread, over the `run` pairs of K that an accumulator carries
                    first = block * HALF + part * run
                    for i in range(tm):
                        for j in range(TN):
                            v[i, j] = start
                    for p in range(first, first + run):
                        w = load_u32x4(tile_w, p * bn + TN * tx)
                        for i in range(0, tm, 4):
                            if tm == 1:
                                xa[0] = tile_a[p * bm + ty]
                            else:
                                at = p * bm + token(i, ty)
                                xa[0], xa[1], xa[2], xa[3] = load_u32x4(tile_a, at)
                            for r in range(min(tm, 4)):
                                v[i + r, 0] = multiply_add(v[i + r, 0], xa[r], w[0])
                                v[i + r, 1] = multiply_add(v[i + r, 1], xa[r], w[1])
                                v[i + r, 2] = multiply_add(v[i + r, 2], xa[r], w[2])
                                v[i + r, 3] = multiply_add(v[i + r, 3], xa[r], w[3])

                    # --- scale: (d, z) of four features, (d, s) of each token; once a block add the
                    # compensation too, where the format has one
                    d0, z0, d1, z1 = load_f32x4(dz_w, (block * bn + TN * tx) * 2)
                    d2, z2, d3, z3 = load_f32x4(dz_w, (block * bn + TN * tx) * 2 + 4)
                    for i in range(tm):
                        da, s = load_f32x2(ds_a, (block * bm + token(i, ty)) * 2)
                        acc[i, 0] += d0 * da * float32(v[i, 0] >> int32(shift))
                        acc[i, 1] += d1 * da * float32(v[i, 1] >> int32(shift))
                        acc[i, 2] += d2 * da * float32(v[i, 2] >> int32(shift))
                        acc[i, 3] += d3 * da * float32(v[i, 3] >> int32(shift))
                        if compensated and part == 0:
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

    return w4a8_vectorized


def launch(
    fmt: Format, family: Family, shape: Shape, weights: tuple, activations: tuple, out: Any
) -> Launch:
    tm, columns, depth = TILES[shape.m <= FEW]
    grid = (ceil_div(shape.n, columns * TN), ceil_div(shape.m, SIDE * tm))
    args = (*weights, *activations, out, shape.k // BLOCK)
    return Launch(kernel(fmt, tm, columns, depth), grid, (columns, SIDE), args)


STEP = Step(
    number=5,
    name="step05_vectorized",
    title="vectorized: 128-bit accesses, 8 x 4 outputs a thread",
    branch="cuda_cores",
    families=("A8",),
    parents={"A8": 4},
    unit={"A8": "packed_int32"},
    pack=k_outermost,
    activations={"A8": q8_1_k_outermost},
    launch=launch,
    idea=("load_u32x4", "load_f32x4", "store_f32x4"),
    contains={"A8": ("LDG.E.128", "LDS.128", "STG.E.128", "IMAD", "BAR.SYNC")},
    forbids={"A8": ("IDP", "IMMA", "HMMA", "LDS.U8", "LDS.S8")},
    chosen_untuned=True,
)
