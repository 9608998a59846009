"""Step 8: asynchronous pipeline - the tensor cores no longer wait for memory.

What is new
    Tiles travel from global to shared memory by cp.async, behind the threads' backs, into a ring of
    stages of 128 K: while one is multiplied, the next ones are under way, with one barrier a stage.
    A warp owns 32 features x 64 tokens, 64 accumulators a thread, and reads its fragments (ldmatrix
    for the activations) one block of K ahead of the mma that needs them. The minima of q4_1 and
    q5_1 leave the loop: the sum of m * s over a stage is one small tf32 product.
Why it should help
    Step 7 stops at every stage to load and again to store. With that hidden, an mma and what its
    four sums need (I2F, FMUL, FFMA each) take 20 to 22 cycles of a scheduler, measured in a loop of
    nothing else, where the mma alone takes 6.6. Napkin: 132 SM x 4 x 1.98 GHz x 8192 / 21 cycles =
    400 TOPS; fragments, scales and barriers will take a fifth of that.
What it costs
    250 registers a thread: eight warps an SM, in two thread blocks, so that one multiplies while
    the other stands at its barrier. 18 to 27 KB a stage.
Machine code
    LDGSTS where there were LDG and STS; LDSM; IMMA, I2FP, FMUL, FFMA and little else in the loop.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from numba import cuda, float32, int32, int64, uint8, uint32

from qformats import BLOCK, Format
from qformats.repack import CHUNK, HALF_SCALE, MINIMUM_SCALE, TILE_GROUP, TILE_K, TILE_ROWS, tiles
from steps.components.activations.layouts import q8_1_k_outermost
from steps.components.epilogue.write import write_sums
from steps.components.unpack.codes import tile_format
from steps.contract import Family, Launch, Shape, Step, ceil_div, shared_memory
from steps.instructions import (
    as_bits,
    as_float,
    cp_async_4,
    cp_async_16,
    cp_async_commit,
    cp_async_wait,
    half_to_float,
    ldmatrix_x4,
    load_f32,
    load_f32x2,
    load_u16,
    load_u32x4,
    mma_m16n8k8_tf32,
    mma_m16n8k32_s8,
    mma_m16n8k32_u8,
)

BN: Final = TILE_GROUP * TILE_ROWS  # features of a tile of C: 128, of a band
WARP_N: Final = 32  # features of a warp
WARP_M: Final = 64  # its tokens at most: 64 accumulators a thread
WARPS_PER_SM: Final = 8  # as many as their registers allow
STAGES: Final = 4  # of the ring: more hide nothing further
BLOCKS: Final = TILE_K // BLOCK  # of K in a stage
UNITS: Final = TILE_K // CHUNK  # of 16 K in a stage
WARPS_N: Final = BN // WARP_N  # warps side by side along the features
ROW_TILES: Final = WARP_N // TILE_ROWS  # records that a warp multiplies
A_WORDS: Final = 8 * ROW_TILES  # A fragments of two blocks
SCALE_WORDS: Final = 4 * ROW_TILES  # float16 scales of four
TF32: Final = 0xFFFFE000  # the bits of a float32 that a tf32 operand keeps


# No lanes that shared memory serves together meet in a bank, and nothing is swizzled for it. The
# weights are in fragment order: lane l reads the l-th 16 bytes. The activations are K-outermost,
# 16 K of a token, then 16 K of the next: 8 rows of an ldmatrix phase are 128 bytes in one piece.
#
#                    token 0   token 1           token 63
#     K  0..15     |  16 B   |  16 B   |  ...  |  16 B   |    unit 0     ldmatrix: b0 of 8 tokens
#     K 16..31     |  16 B   |  16 B   |  ...  |  16 B   |    unit 1     ldmatrix: b1 of 8 tokens
@cache
def int8_tile(fmt: Format, bm: int, stages: int) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """What a kernel for tiles of BN features x `bm` tokens is made of, this step's and the next's:
    ((threads, tokens of a warp, sums of a thread, bytes of a stage), device functions)."""
    tile = tile_format(fmt.name)
    record, scales_at, minima_at = tile.tile_bytes, tile.scales_at, tile.minima_at
    load, fragments, minimum = tile.load, tile.fragments, tile.minimum
    # of scales, against minima
    unit = float32(HALF_SCALE / MINIMUM_SCALE / tile.code_scale)
    mma = mma_m16n8k32_s8 if tile.signed else mma_m16n8k32_u8
    tokens = min(bm, WARP_M)  # of a warp
    warps = WARPS_N * (bm // tokens)
    threads = 32 * warps
    # a stage: a record of each of 8 rows, then of `bm` tokens the codes, d, and s if it counts
    at_codes = TILE_GROUP * record
    at_d = at_codes + TILE_K * bm
    at_s = at_d + 4 * BLOCKS * bm
    pitch = bm + 8  # floats from one block's s to the next: the four quads in four sets of banks
    stage_bytes = at_s + (4 * BLOCKS * pitch if minimum else 0)
    together = threads // bm  # units of K that the threads copy at a time, one token each
    columns = tokens // 8  # B fragments of a warp, two registers each
    n_acc, n_b = 4 * ROW_TILES * columns, 2 * columns
    wait_for_first, wait_for_next = cp_async_wait(stages - 1), cp_async_wait(stages - 2)

    # --- global -> shared: ask for the operands of one stage
    @cuda.jit(device=True, forceinline=True)
    def origin(t, m0, n0, k0, steps, c):
        """What this thread copies of a tile's stages, which begin at step k0 of K: a part of a
        band, and a token; those beyond the matrix repeat one within."""
        M, band = int32(c.shape[0]), int32(n0 // BN * steps + k0)
        return band, int32(min(m0 + (t & (bm - 1)), M - 1)), int32(k0), M

    @cuda.jit(device=True, forceinline=True)
    def copy_weights(ring, base, w, source, step):
        """Of 8 records, which lie side by side."""
        own = 16 * int32(cuda.threadIdx.x)
        at = int64(source[0] + step) * at_codes + own
        for chunk in range(0, at_codes, 16 * threads):
            if chunk + 16 * threads <= at_codes or own < at_codes - chunk:
                cp_async_16(ring, base + own + chunk, w, at + chunk)

    @cuda.jit(device=True, forceinline=True)
    def copy_tokens(ring, base, qa, ds, source, step):
        _, token, k0, M = source
        t = int32(cuda.threadIdx.x)
        u = t // bm
        unit = int32(((k0 + step) * UNITS + u) * M + token)
        block = int32(((k0 + step) * BLOCKS + u) * M + token)
        column = t & (bm - 1)
        for i in range(0, UNITS, together):
            to = base + at_codes + ((u + i) * bm + column) * CHUNK
            cp_async_16(ring, to, qa, int64(unit + i * M) * CHUNK)
        for i in range(0, BLOCKS, together):
            if together <= BLOCKS or u < BLOCKS:
                at = int64(block + i * M) * 2
                cp_async_4(ring, base + at_d + ((u + i) * bm + column) * 4, ds, at)
                if minimum:
                    to = base + at_s + ((u + i) * pitch + column) * 4
                    cp_async_4(ring, to, ds, at + 1)

    # --- shared -> registers
    @cuda.jit(device=True, forceinline=True)
    def fetch_tokens(b, ring, base, first, lane, block):
        """B fragments of one block of 32 K."""
        unit_k, token = 2 * block + (lane >> 3 & 1), first + (lane >> 4) * 8 + (lane & 7)
        at = base + at_codes + (unit_k * bm + token) * CHUNK
        for j in range(0, n_b, 4):
            b[j], b[j + 1], b[j + 2], b[j + 3] = ldmatrix_x4(ring, at + 4 * CHUNK * j)

    @cuda.jit(device=True, forceinline=True)
    def fetch_d(x, ring, base, first, lane, block):
        """The scales of its tokens."""
        at = base + at_d + (block * bm + first + 2 * (lane & 3)) * 4
        for j in range(0, n_b, 2):
            x[j], x[j + 1] = load_f32x2(ring, at + 16 * j)

    @cuda.jit(device=True, forceinline=True)
    def fetch_weights(a, ring, weights, lane, half):
        """A fragments of two blocks."""
        for i in range(ROW_TILES):
            f = fragments(load(ring, weights + i * record, lane, half))
            a[8 * i], a[8 * i + 1], a[8 * i + 2], a[8 * i + 3] = f[0], f[1], f[2], f[3]
            a[8 * i + 4], a[8 * i + 5], a[8 * i + 6], a[8 * i + 7] = f[4], f[5], f[6], f[7]

    @cuda.jit(device=True, forceinline=True)
    def fetch_scales(scales, ring, weights, lane):
        """float16 scales of rows g and g + 8, four blocks each, two to a word."""
        for i in range(ROW_TILES):
            s = load_u32x4(ring, weights + i * record + scales_at + 16 * (lane >> 2))
            scales[4 * i], scales[4 * i + 1] = s[0], s[1]
            scales[4 * i + 2], scales[4 * i + 3] = s[2], s[3]

    @cuda.jit(device=True, forceinline=True)
    def scale_of(word, odd):
        bits = uint32(word) >> uint32(16) if odd else uint32(word) & uint32(0xFFFF)
        return half_to_float(bits) * unit

    # --- multiply
    @cuda.jit(device=True, forceinline=True)
    def multiply(acc, a, b, x, scales, block):
        """acc += one block of 32 K: an mma, then the promotion of its four integer sums."""
        for i in range(ROW_TILES):
            q, word = 8 * i + 4 * (block & 1), 4 * i + block // 2
            w0, w8 = scale_of(scales[word], block & 1), scale_of(scales[word + 2], block & 1)
            for j in range(columns):
                v = mma(a[q], a[q + 1], a[q + 2], a[q + 3], b[2 * j], b[2 * j + 1], 0, 0, 0, 0)
                r = 4 * (i * columns + j)
                acc[r] += float32(v[0]) * (w0 * x[2 * j])
                acc[r + 1] += float32(v[1]) * (w0 * x[2 * j + 1])
                acc[r + 2] += float32(v[2]) * (w8 * x[2 * j])
                acc[r + 3] += float32(v[3]) * (w8 * x[2 * j + 1])

    @cuda.jit(device=True, forceinline=True)
    def add_minima(acc, ring, base, weights, first, lane):
        """acc += sum over the stage's 4 blocks of m * s: one tf32 mma, s as the sum of two tf32."""
        group, quad = lane >> 2, lane & 3
        for i in range(ROW_TILES):
            at = weights + i * record + minima_at + 16 * group + 2 * quad
            m0 = as_bits(half_to_float(load_u16(ring, at)))
            m8 = as_bits(half_to_float(load_u16(ring, at + 8)))
            for j in range(columns):
                s = load_f32(ring, base + at_s + (quad * pitch + first + 8 * j + group) * 4)
                upper = as_bits(s) & uint32(TF32)
                lower = as_bits(s - as_float(upper))
                r = 4 * (i * columns + j)
                acc[r], acc[r + 1], acc[r + 2], acc[r + 3] = mma_m16n8k8_tf32(
                    m0, m8, m0, m8, upper, lower, acc[r], acc[r + 1], acc[r + 2], acc[r + 3]
                )

    @cuda.jit(device=True, forceinline=True)
    def multiply_stages(acc, ring, w, qa, ds, source, column, first, lane, count):
        """acc += the product of `count` stages, the first of which have been asked for."""
        a = cuda.local.array(A_WORDS, uint32)
        scales = cuda.local.array(SCALE_WORDS, uint32)
        b_even = cuda.local.array(n_b, uint32)
        b_odd = cuda.local.array(n_b, uint32)
        x = cuda.local.array(n_b, float32)
        wait_for_first()
        cuda.syncthreads()
        base = int32(0)
        weights = column * (ROW_TILES * record)
        fetch_weights(a, ring, weights, lane, 0)
        fetch_scales(scales, ring, weights, lane)
        fetch_tokens(b_even, ring, base, first, lane, 0)
        for step in range(count):
            # the fragments of the next block are on their way while this one is multiplied
            fetch_d(x, ring, base, first, lane, 0)
            fetch_tokens(b_odd, ring, base, first, lane, 1)
            multiply(acc, a, b_even, x, scales, 0)
            if minimum:
                add_minima(acc, ring, base, weights, first, lane)
            fetch_d(x, ring, base, first, lane, 1)
            fetch_tokens(b_even, ring, base, first, lane, 2)
            multiply(acc, a, b_odd, x, scales, 1)
            fetch_weights(a, ring, weights, lane, 1)
            fetch_d(x, ring, base, first, lane, 2)
            fetch_tokens(b_odd, ring, base, first, lane, 3)
            multiply(acc, a, b_even, x, scales, 2)
            fetch_d(x, ring, base, first, lane, 3)

            # --- the next stage is there for all, and all have read the last of this one
            wait_for_next()
            cuda.syncthreads()
            ahead = int32(step + stages)
            if ahead < count:
                copy_weights(ring, base, w, source, ahead)
                copy_tokens(ring, base, qa, ds, source, ahead)
            cp_async_commit()
            base = int32(base + stage_bytes)
            if base == stages * stage_bytes:
                base = int32(0)
            weights = base + column * (ROW_TILES * record)
            fetch_tokens(b_even, ring, base, first, lane, 0)
            multiply(acc, a, b_odd, x, scales, 3)
            fetch_weights(a, ring, weights, lane, 0)
            fetch_scales(scales, ring, weights, lane)

    # --- registers -> global
    write = write_sums(ROW_TILES, columns, MINIMUM_SCALE)
    sizes = threads, tokens, n_acc, stage_bytes
    return sizes, (origin, copy_weights, copy_tokens, multiply_stages, write)


@cache
def kernel(fmt: Format, bm: int, stages: int) -> Any:
    """(the kernel for tiles of `bm` tokens and a ring of `stages`, threads, bytes of one stage)"""
    (threads, tokens, n_acc, stage_bytes), functions = int8_tile(fmt, bm, stages)
    origin, copy_weights, copy_tokens, multiply_stages, write = functions

    @cuda.jit(launch_bounds=(threads, 32 * WARPS_PER_SM // threads))
    def w4a8_async_pipeline(w, factors, qa, ds, c, steps):
        """c[M, N] = a @ dequantize(w)[N, K]^T; w, factors: qformats.repack.tiles,
        a: K-outermost."""
        ring = cuda.shared.array(0, uint8, alignment=128)
        acc = cuda.local.array(n_acc, float32)
        t = int32(cuda.threadIdx.x)
        warp, lane = t >> 5, t & 31
        column, first = warp % WARPS_N, warp // WARPS_N * tokens  # what this warp multiplies
        m0, n0 = int32(cuda.blockIdx.y * bm), int32(cuda.blockIdx.x * BN)
        source = origin(t, m0, n0, 0, steps, c)
        for i in range(n_acc):
            acc[i] = 0
        for step in range(stages):
            if step < steps:
                copy_weights(ring, step * stage_bytes, w, source, step)
                copy_tokens(ring, step * stage_bytes, qa, ds, source, step)
            cp_async_commit()
        multiply_stages(acc, ring, w, qa, ds, source, column, first, lane, steps)
        write(c, m0 + first, n0 + WARP_N * column, lane, acc, factors)

    return w4a8_async_pipeline, threads, stage_bytes


def launch(
    fmt: Format, family: Family, shape: Shape, weights: tuple, activations: tuple, out: Any
) -> Launch:
    bm = 2 * WARP_M if "m" in (fmt.dtype.names or ()) and shape.m > WARP_M else WARP_M
    _, threads, stage_bytes = kernel(fmt, bm, STAGES)
    # bytes for each of the blocks that share an SM, which keeps 1 KB of every one
    share = (shared_memory() + 1024) * threads // (32 * WARPS_PER_SM) - 1024
    stages = min(STAGES, share // stage_bytes)
    grid = (ceil_div(shape.n, BN), ceil_div(shape.m, bm))
    args = (*weights, *activations, out, ceil_div(shape.k, TILE_K))
    return Launch(kernel(fmt, bm, stages)[0], grid, (threads,), args, stages * stage_bytes)


STEP = Step(
    number=8,
    name="step08_async_pipeline",
    title="asynchronous pipeline: cp.async stages, ldmatrix, warp tiles",
    branch="int8",
    families=("A8",),
    parents={"A8": 7},
    unit={"A8": "tensor_int8"},
    pack=tiles,
    activations=q8_1_k_outermost,
    launch=launch,
    min_cc=(8, 0),
    contains={"A8": ("IMMA", "LDGSTS.E.BYPASS.128", "LDSM.16.M88.4", "LDGDEPBAR", "BAR.SYNC")},
    forbids={"A8": ("STS", "IDP")},
    chosen_untuned=True,
)
