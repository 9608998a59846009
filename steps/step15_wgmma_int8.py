"""Step 15: int8 wgmma - one scale a row, one scale a token, one integer sum over all of K.

What is new
    Int8 tensor cores multiply twice as fast as float16 ones. But products of codes add up as
    integers only while scales stay the same: one for each 32 K costs three instructions a sum (step
    7). So both operands are *requantized* to one scale a row or token: one integer sum is left.

        row n      codes and block scales, 128 K a stage      as in step 14
                   int8 = round(weight / row_scale)           HFMA2, PRMT: in registers
        token m    int8 = round(a / token_scale)              by a pass; 128 K a stage are one box
        c[m, n]    row_scales[n] * token_scales[m] * sum over all k of int8 * int8

    Two codes at a time, taken as float16, become two int8 by one multiply-add. Beside the magic
    constant 1280 * 2^-13 a float16 has no bits below 2^-13: the sum is rounded to a multiple of
    these, and its low byte is the int8 in two's complement. Q8_0 is requantized when it is packed.

                              byte 3     byte 2     byte 1     byte 0
        word                  [ .. d]    [ .. c]    [ .. b]    [ .. a]
        word & 0x000F000F     0          c          0          a        float16: code * 2^-24
        HFMA2                 exponent   int8 c     exponent   int8 a   (1280 + int8) * 2^-13
        word >> 8, the same   exponent   int8 d     exponent   int8 b
        PRMT                  int8 d     int8 c     int8 b     int8 a   what wgmma takes

    The rest is step 14's kernel with other operands and integer sums, and simpler: launches do not
    overlap, tiles have 128 tokens wherever there are as many, and the last contributor loads its
    own partial sums too.
Why it should help
    128 x 128 outputs and 128 K are 512 cycles of the tensor cores. PRMTs wait until the product
    before has read the registers that they write: 90 more. Meanwhile the two warps of a scheduler
    issue 2 x 152 instructions (5 bits: 2 x 183), one in two cycles: 608 cycles (732). So 32 stages
    at (512,4096,4096), and 2.2 us for the launch and both ends, are 14 us at 1.65 GHz: 1.7x.
What it costs
    Exactness: on normal data requantizing adds an NMSE of 8.5e-5 to the 7.3e-3 of Q4_0. Int8 tokens
    add as much, or 3.2e-3 where a few channels are 20 times the others. It is used only when asked
    for, gemm(..., accuracy="fast"). int32 holds a sum of up to 132096 K.
Machine code
    IGMMA between HFMA2, LOP3 and PRMT, with no wait but WARPGROUP.DEPBAR; no I2FP before the end.
Prerequisites
    Step 14; steps.blocks.halves (step 11: two codes of a word) and steps.blocks.q8_1 (step 2: codes
    of four values).
"""

from __future__ import annotations

from functools import cache
from math import gcd
from typing import Any, Final

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32

from qformats import FORMATS, Format
from qformats.repack import BYTE_SCALE, BYTE_ZERO, CENTRE, TILE_GROUP, TILE_K, byte_tiles
from steps.blocks.halves import BOTH, TWO_TO_MINUS_3, TWO_TO_MINUS_4, half_weights, two_codes
from steps.blocks.q8_1 import four_codes, size_bits, twice_inverse
from steps.contract import (
    Activations,
    Family,
    Launch,
    Machine,
    Shape,
    Step,
    ceil_div,
    multiprocessors,
)
from steps.instructions import (
    TensorMap,
    as_float,
    barrier_sync,
    bulk_copy,
    fence,
    fence_mbarrier_init,
    floats_to_halves,
    half_to_float,
    hfma2,
    high2half2,
    hmul2,
    load_f32,
    load_u32x4,
    low2half2,
    mbarrier_arrive,
    mbarrier_arrive_expect,
    mbarrier_init,
    mbarrier_wait,
    prefetch_tensor_map,
    prmt,
    setmaxnreg_dec,
    setmaxnreg_inc,
    shfl,
    shfl_xor,
    spread,
    stmatrix_x4_trans,
    store_u16,
    store_u32x2,
    store_u32x4,
    swizzled_descriptor,
    tensor_copy,
    tensor_map_address,
    wgmma_commit,
    wgmma_fence,
    wgmma_s8,
    wgmma_wait,
    zeros_i32,
)

BLOCK_M: Final = 128  # tokens of a tile of C, at most: 64 sums a thread
BLOCK_N: Final = 128  # features: a group of packed tiles, whose weights are one piece of memory
BLOCK_K: Final = TILE_K  # of a stage: 128
WARPGROUP: Final = 128  # threads
CONSUMER_WARPS: Final = 8  # two warpgroups, 64 features each; the producer's comes behind them
CONSUMERS: Final = 32 * CONSUMER_WARPS  # threads
THREADS: Final = CONSUMERS + WARPGROUP
CONSUMER_REGISTERS: Final = 232  # of a thread: 2 x 232 + 40 are the 504 of 3 x 168
PRODUCER_REGISTERS: Final = 40
SHARED_BYTES: Final = 227 * 1024  # of a thread block of Hopper, at most
MOST_STAGES: Final = 8  # with small tiles more would not arrive sooner
MBARRIER: Final = 8  # bytes
STAGED: Final = 32  # tokens of the finished tile in shared memory at a time

CHUNK: Final = 16  # bytes that a thread stores at once: 8 float16
C_ROW: Final = 2 * BLOCK_N  # bytes of a token of the finished tile
NEXT_32_K: Final = 2  # of a descriptor, which counts chunks
TOKEN_THREADS: Final = 256  # of the pass: each thread block quantizes a token
EVERY_SECOND_BYTE: Final = 0x6240  # prmt: of two words with two numbers each the low bytes, in turn
HIGHEST_BITS: Final = 0x80808080  # of the bytes of a word: `byte_tiles` has flipped them in Q8_0
# 1280 * 2^-13 = 0.15625 as a float16, 0x3100, in both halves of a register. Float16 from 1/8 to 1/4
# are 2^-13 apart, so a sum with it is rounded to (1280 + int8) * 2^-13; its low byte is the int8.
MAGIC: Final = int(np.float16(BYTE_SCALE * BYTE_ZERO).view(np.uint16)) * BOTH
# The largest K whose products, of int8 from -128 to 127 and tokens from -127 to 127, an int32
# holds whatever their signs: so no sum of a part of K wraps either.
MOST_K: Final = (2**31 - 1) // (128 * 127) // 32 * 32


# --- the pass: tokens -> int8 ---------------------------------------------------------------------
@cuda.jit(device=True, forceinline=True)
def eight_values(x, a, offset):
    """x = eight neighbours of float16 a[offset], as float32."""
    words = load_u32x4(a, offset)
    for i in range(4):
        x[2 * i], x[2 * i + 1] = half_to_float(words[i]), half_to_float(words[i] >> uint32(16))


@cuda.jit
def quantize_tokens(a, codes, token_scales):
    """codes int8[M, K] and token_scales float32[M], amax / 127, of float16 a[M, K]: a thread block
    for each token. A NaN or infinity spoils its token, and no other."""
    x, largest = cuda.local.array(8, float32), cuda.shared.array(1, int32)
    t, m, K = int32(cuda.threadIdx.x), int64(cuda.blockIdx.x), int32(a.shape[1])

    # --- the largest |a| of the token, as bits: so a NaN is the largest of all
    if t == 0:
        largest[0] = 0
    most = int32(0)
    for k in range(8 * t, K, 8 * TOKEN_THREADS):
        eight_values(x, a, m * K + k)
        for i in range(8):
            most = max(most, size_bits(x[i]))
    for apart in (1, 2, 4, 8, 16):
        most = max(most, shfl_xor(most, apart))
    cuda.syncthreads()
    if t & 31 == 0:
        cuda.atomic.max(largest, 0, most)
    cuda.syncthreads()

    # --- codes, the recipe of Q8_1
    scale = as_float(uint32(largest[0])) / float32(127)
    twice = twice_inverse(scale)
    for k in range(8 * t, K, 8 * TOKEN_THREADS):
        eight_values(x, a, m * K + k)
        low, high = (
            four_codes((x[0], x[1], x[2], x[3]), twice),
            four_codes((x[4], x[5], x[6], x[7]), twice),
        )
        store_u32x2(codes, m * K + k, low, high)
    if t == 0:
        token_scales[m] = scale


def int8_tokens(a: Any, machine: Machine) -> Activations:
    """Int8 [M, K] with a scale for each token, float32 [M]."""
    codes, scales = machine.empty(a.shape, np.int8), machine.empty(a.shape[:1], np.float32)
    launch = Launch(quantize_tokens, (a.shape[0],), (TOKEN_THREADS,), (a, codes, scales))
    return Activations((codes, scales), (launch,), "tokens")


# --- the product ----------------------------------------------------------------------------------
@cache
def byte_weights(name: str) -> tuple[int, Any, Any]:
    """(bytes of a packed tile of `byte_tiles`; load(array, offset, lane, half), its words of
    64 K; fragment(words, block), a0 to a3 of block 0 or 1 of these, as `wgmma_s8` takes them)."""
    bits, has_minimum = FORMATS[name].bits, name in ("q4_1", "q5_1")
    weights = half_weights(name)
    codes = two_codes(bits, 0)
    high_nibbles = TWO_TO_MINUS_3 if bits == 5 else TWO_TO_MINUS_4
    minus_centre = 0x8000 * BOTH | CENTRE.get(name, 0) * BOTH  # float16, such as -8 * 2^-24

    @cuda.jit(device=True, forceinline=True)
    def of_row(words, row):
        """(d' for low nibbles, d' for high ones, m') of row g (row 0) or g + 8 (row 1): words of
        two float16, for block 0 and block 1."""
        d = words[bits + row]
        if has_minimum:
            return d, hmul2(d, high_nibbles), words[bits + 2 + row]
        return d, hmul2(d, high_nibbles), hfma2(d, minus_centre, MAGIC)

    @cuda.jit(device=True, forceinline=True)
    def four_int8(words, block, row, high, scale, offset):
        """A register of four neighbours along K, from low nibbles or (high = 1) from high ones."""
        d = high2half2(scale) if block else low2half2(scale)
        m = high2half2(offset) if block else low2half2(offset)
        even = hfma2(codes(words, 2 * block + high, row, 0), d, m)
        odd = hfma2(codes(words, 2 * block + high, row, 1), d, m)
        return prmt(even, odd, EVERY_SECOND_BYTE)

    @cuda.jit(device=True, forceinline=True)
    def fragment(words, block):
        low_g, high_g, offset_g = of_row(words, 0)
        low_g8, high_g8, offset_g8 = of_row(words, 1)
        return (
            four_int8(words, block, 0, 0, low_g, offset_g),
            four_int8(words, block, 1, 0, low_g8, offset_g8),
            four_int8(words, block, 0, 1, high_g, offset_g),
            four_int8(words, block, 1, 1, high_g8, offset_g8),
        )

    @cuda.jit(device=True, forceinline=True)
    def load_8(array, offset, lane, half):
        # Q8_0: codes alone
        first = offset + half * 1024 + lane * 16
        return load_u32x4(array, first) + load_u32x4(array, first + 512)

    @cuda.jit(device=True, forceinline=True)
    def fragment_8(words, block):
        # flipped back here and not on the host: so an instruction writes the registers of the
        # operands. A load would have to wait until the product before has read them
        i, flip = 4 * block, uint32(HIGHEST_BITS)
        return words[i] ^ flip, words[i + 1] ^ flip, words[i + 2] ^ flip, words[i + 3] ^ flip

    if bits == 8:
        return 16 * TILE_K, load_8, fragment_8
    return weights.tile_bytes, weights.load, fragment


@cache
def kernel(format_name: str, block_m: int) -> tuple[Any, int]:
    """(the kernel for tiles of `block_m` tokens, a multiple of 16; its bytes of shared memory)."""
    tile_bytes, load, fragment = byte_weights(format_name)
    # Shared memory: the tokens of all stages, as a box begins at a multiple of 1024 bytes; then the
    # weights of all stages; STAGED tokens of C; the mbarriers, `full` of all stages, then `empty`
    # of all; and a word for how many contributors arrived before this block
    a_bytes, w_bytes = BLOCK_K * block_m, TILE_GROUP * tile_bytes
    staged = gcd(block_m, STAGED)
    stages = min(MOST_STAGES, (SHARED_BYTES - 1024 - staged * C_ROW) // (a_bytes + w_bytes))
    weights_begin, c_begin = stages * a_bytes, stages * (a_bytes + w_bytes)
    full, empty = c_begin + staged * C_ROW, c_begin + staged * C_ROW + stages * MBARRIER
    earlier_word = (empty + stages * MBARRIER) // 4  # that word's place, counted in int32
    shared_bytes = empty + stages * MBARRIER + MBARRIER
    n_acc = block_m // 2  # of a thread: 64 features x block_m tokens by 128 threads
    n_tokens = block_m // 4  # of a thread
    tile_sums = BLOCK_N * block_m
    no_sums = zeros_i32(n_acc)
    wait_for_all, wait_for_all_but_one = wgmma_wait(0), wgmma_wait(1)
    more_registers = setmaxnreg_inc(CONSUMER_REGISTERS)
    fewer_registers = setmaxnreg_dec(PRODUCER_REGISTERS)

    @cuda.jit(device=True, forceinline=True)
    def next_stage(stage, parity):
        if stage == stages - 1:
            return int32(0), int32(parity ^ 1)
        return int32(stage + 1), parity

    @cuda.jit(device=True, forceinline=True)
    def quotient(x, y):
        """x // y of numbers that are not negative, unsigned: a signed one takes more code."""
        return int32(uint32(x) // uint32(y))

    @cuda.jit(device=True, forceinline=True)
    def range_begin(block, share, extra):
        """Where a block's range of work items begins: where that of the block before ends. A range
        has `share` of them; the first `extra` blocks have one more."""
        return int32(block * share + min(block, extra))

    @cuda.jit(device=True, forceinline=True)
    def block_of(item, share, extra):
        """The block whose range has a work item."""
        of_longer = int32(extra * (share + 1))  # the items of blocks that have one more
        if item < of_longer:
            return quotient(item, share + 1)
        return int32(extra + quotient(item - of_longer, share))

    @cuda.jit(device=True, forceinline=True)
    def produce(shared, a, w, item, end, steps, tiles_n):
        """One thread: the copies of work items `item` to `end`, each a step along K of a tile."""
        prefetch_tensor_map(a)
        stage, parity = int32(0), int32(0)
        while item < end:
            tile_id = quotient(item, steps)
            tile_m = quotient(tile_id, tiles_n)
            m0, tile_n = tile_m * block_m, tile_id - tile_m * tiles_n
            step, step_end = item - tile_id * steps, min(steps, item - tile_id * steps + end - item)
            item += step_end - step
            while step < step_end:
                # --- wait until the stage is empty
                mbarrier_wait(shared, empty + MBARRIER * stage, parity ^ 1)

                # --- issue its copies: a box of tokens, and the weights in one piece
                bar, k = int32(full + MBARRIER * stage), int32(step * BLOCK_K)
                destination = stage * a_bytes
                mbarrier_arrive_expect(shared, bar, a_bytes + w_bytes)
                tensor_copy(shared, destination, a, k, int32(m0), shared, bar)
                source = int64(tile_n * steps + step) * w_bytes
                bulk_copy(shared, weights_begin + stage * w_bytes, w, source, w_bytes, shared, bar)
                stage, parity = next_stage(stage, parity)
                step = int32(step + 1)

    @cuda.jit(device=True, forceinline=True)
    def multiply(acc, words, descriptor):
        """acc += 64 K of packed weights times the activations that the descriptor points to."""
        w0, w1 = fragment(words, 0), fragment(words, 1)
        wgmma_fence()
        acc = wgmma_s8(acc, w0[0], w0[1], w0[2], w0[3], descriptor, 1)
        acc = wgmma_s8(acc, w1[0], w1[1], w1[2], w1[3], descriptor + NEXT_32_K, 1)
        wgmma_commit()
        return acc

    @cuda.jit(device=True, forceinline=True)
    def consume(shared, warp, lane, count, stage, parity):
        """A warpgroup -> the sums of its 64 features and all tokens over `count` stages, and the
        stage and parity behind them. While the tensor cores multiply one half of a stage, the
        weights of the other half become int8."""
        acc = no_sums()
        previous, step = int32(0), int32(0)
        while True:  # not `for`: a loop that may have no turn makes ptxas wait at every wgmma
            # --- wait until the stage is full
            mbarrier_wait(shared, full + MBARRIER * stage, parity)
            tile_at = weights_begin + stage * w_bytes + warp * tile_bytes
            descriptor = swizzled_descriptor(shared, stage * a_bytes)
            lower, upper = load(shared, tile_at, lane, 0), load(shared, tile_at, lane, 1)

            # --- multiply its first half
            acc = wait_for_all_but_one(acc)  # done: the last stage's first half, its registers free
            acc = multiply(acc, lower, descriptor)

            # --- the previous stage has been multiplied: the warp says so
            acc = wait_for_all_but_one(acc)
            cuda.syncwarp()  # all lanes have loaded their weights of it: one speaks for the warp
            if lane == 0 and step > 0:
                mbarrier_arrive(shared, empty + MBARRIER * previous)

            # --- multiply the second half
            acc = multiply(acc, upper, descriptor + 2 * NEXT_32_K)
            previous = stage
            stage, parity = next_stage(stage, parity)
            step = int32(step + 1)
            if step == count:
                break
        acc = wait_for_all(acc)
        cuda.syncwarp()
        if lane == 0:
            mbarrier_arrive(shared, empty + MBARRIER * previous)
        return acc, stage, parity

    @cuda.jit(device=True, forceinline=True)
    def add_up(sums, shared_words, tile_id, steps, share, extra, partials, arrived, t):
        """The end of a part of a tile, by all consumers. True if this block is the last of the
        tile's contributors to arrive: `sums`, its own, have become those of all. Else False, and
        a block that comes later adds them up."""
        # --- store the partial sums: four of a thread, then four of the next one
        tile_begin = int32(tile_id * steps)
        first_block = block_of(tile_begin, share, extra)
        others = int32(block_of(int32(tile_begin + steps - 1), share, extra) - first_block)
        # A block has slot 0 for the tile that its range begins in, slot 1 for the one that it ends
        # in, if that is another. Only a tile's first contributor can have begun in another
        first_slot = int32(1 if range_begin(first_block, share, extra) < tile_begin else 0)
        block = int32(cuda.blockIdx.x)
        place = int64(2 * block + (first_slot if block == first_block else 0)) * tile_sums + 4 * t
        for r in range(0, n_acc, 4):
            store_u32x4(
                partials, place + r * CONSUMERS, sums[r], sums[r + 1], sums[r + 2], sums[r + 3]
            )

        # --- count this block: one that finds all others counted is the last
        fence()
        barrier_sync(1, CONSUMERS)
        if t == 0:
            shared_words[earlier_word] = cuda.atomic.add(arrived, tile_id, 1)
        barrier_sync(1, CONSUMERS)
        if shared_words[earlier_word] < others:
            return False
        fence()
        if t == 0:
            arrived[tile_id] = 0  # for the next launch

        # --- add up, in the order of K
        for r in range(n_acc):
            sums[r] = 0
        for i in range(others + 1):
            place = int64(2 * (first_block + i) + (first_slot if i == 0 else 0)) * tile_sums + 4 * t
            for r in range(0, n_acc, 4):
                four_sums = load_u32x4(partials, place + r * CONSUMERS)
                for j in range(4):
                    sums[r + j] += int32(four_sums[j])
        return True

    @cuda.jit(launch_bounds=(THREADS, 1))
    def w4a8_wgmma(a_map, token_scales, w, row_scales, c, steps, share, extra, partials, arrived):
        """c[M, N] = token_scales * row_scales * (a[M, K] @ weights[N, K]^T), of int8; w and
        row_scales of qformats.repack.byte_tiles, a_map of int8 a, token_scales float32[M]; steps of
        128 K; share and extra of `range_begin`. c is float16 and begins at a multiple of 16
        bytes."""
        shared = cuda.shared.array(0, uint8, alignment=1024)  # all of the dynamic shared memory
        shared_words = cuda.shared.array(0, int32, alignment=1024)  # the same, as int32
        a = tensor_map_address(a_map)
        t, steps = int32(cuda.threadIdx.x), int32(steps)
        # shuffled, so that the compiler knows it is one value for the whole warp
        warp, lane = shfl(int32(t >> 5), 0), int32(t & 31)
        M, N = int32(c.shape[0]), int32(c.shape[1])
        tiles_n = quotient(N + (BLOCK_N - 1), BLOCK_N)

        # --- this block's range of work items
        share, extra, block = int32(share), int32(extra), int32(cuda.blockIdx.x)
        item, end = range_begin(block, share, extra), range_begin(int32(block + 1), share, extra)

        # --- make the mbarriers: one producer fills a stage, every consumer warp empties it
        if t == 0:
            for stage in range(stages):
                mbarrier_init(shared, full + MBARRIER * stage, 1)
                mbarrier_init(shared, empty + MBARRIER * stage, CONSUMER_WARPS)
            fence_mbarrier_init()
        cuda.syncthreads()  # the only barrier of all threads

        # --- the producer's warpgroup: one thread works, and it needs few registers
        if warp >= CONSUMER_WARPS:
            fewer_registers()
            if warp == CONSUMER_WARPS and lane == 0:
                produce(shared, a, w, item, end, steps, tiles_n)
            return

        # --- the consumers: tile after tile
        more_registers()
        sums, scaled = cuda.local.array(n_acc, int32), cuda.local.array(8, float32)
        lane_token_scales = cuda.local.array(n_tokens, float32)
        stage, parity = int32(0), int32(0)
        out_row, out_chunk = int32(t >> 4), int32(t & 15)  # of the tile that goes to C
        while item < end:
            tile_id = quotient(item, steps)
            tile_m = quotient(tile_id, tiles_n)
            m0, n0 = int32(tile_m * block_m), int32((tile_id - tile_m * tiles_n) * BLOCK_N)
            count = int32(min(int32(tile_id * steps + steps), end) - item)
            item = int32(item + count)
            feature = int32(n0 + 16 * warp + (lane >> 2))
            scale_g, scale_g8 = load_f32(row_scales, feature), load_f32(row_scales, feature + 8)
            for i in range(n_tokens):  # this lane's tokens: m, m + 1, m + 8, m + 9 ...
                m = int32(m0 + 2 * (lane & 3) + (i // 2 * 8 + i % 2))
                lane_token_scales[i] = token_scales[min(m, int32(M - 1))]
            acc, stage, parity = consume(shared, warp, lane, count, stage, parity)
            spread(sums, acc)

            # --- a part of a tile: unless it is the last, its sums are left to another block
            if count < steps and not add_up(
                sums, shared_words, tile_id, steps, share, extra, partials, arrived, t
            ):
                continue

            # --- registers -> shared -> global, as in step 12 but some tokens at a time
            token, chunk = (lane >> 4) * 8 + (lane & 7), 2 * warp + (lane >> 3 & 1)
            destination = c_begin + token * C_ROW + (chunk ^ (token & 7)) * CHUNK
            source = c_begin + out_row * C_ROW + (out_chunk ^ (out_row & 7)) * CHUNK
            n = int32(n0 + 8 * out_chunk)
            for first_token in range(0, block_m, staged):
                barrier_sync(1, CONSUMERS)  # nobody loads the tokens before any more
                for j in range(0, staged, 16):
                    # a lane's next eight sums: of tokens m, m + 1, m + 8 and m + 9, two rows each
                    i = (first_token + j) // 2
                    for r in range(8):
                        row_scale = scale_g8 if r // 2 % 2 else scale_g
                        token_scale = lane_token_scales[i // 2 + (r // 4 * 2 + r % 2)]
                        scaled[r] = float32(sums[i + r]) * row_scale * token_scale
                    stmatrix_x4_trans(
                        shared,
                        destination + j * C_ROW,
                        floats_to_halves(scaled[0], scaled[1]),
                        floats_to_halves(scaled[2], scaled[3]),
                        floats_to_halves(scaled[4], scaled[5]),
                        floats_to_halves(scaled[6], scaled[7]),
                    )
                barrier_sync(1, CONSUMERS)
                for j in range(0, staged, CONSUMERS // 16):
                    m = int32(m0 + out_row + (first_token + j))
                    if m < M and n < N:
                        eight = load_u32x4(shared, source + j * C_ROW)  # float16
                        if N % 8 == 0:
                            store_u32x4(c, int64(m) * N + n, eight[0], eight[1], eight[2], eight[3])
                        else:  # rows of C do not begin at multiples of 16 bytes
                            for i in range(8):
                                if n + i < N:
                                    value = eight[i // 2] >> uint32(16 * (i % 2))
                                    store_u16(c, int64(m) * N + (n + i), value)

    return w4a8_wgmma, shared_bytes


def tiling(shape: Shape) -> tuple[int, int, int]:
    """(tokens of a tile, tiles, thread blocks)."""
    block_m = min(BLOCK_M, ceil_div(shape.m, 16) * 16)  # less than 128 where tokens are few
    tiles_c, sms = ceil_div(shape.n, BLOCK_N) * ceil_div(shape.m, block_m), multiprocessors()
    if tiles_c >= sms:
        return block_m, tiles_c, sms
    parts = min(sms // tiles_c, ceil_div(shape.k, BLOCK_K))  # of a tile, all of one size
    return block_m, tiles_c, tiles_c * parts


def scratch(fmt: Format, family: Family, shape: Shape) -> tuple[tuple[tuple[int, ...], Any], ...]:
    """Partial sums of two tiles a block, and an arrival counter for each tile."""
    block_m, tiles_c, blocks = tiling(shape)
    return ((2 * blocks * BLOCK_N * block_m,), np.int32), ((tiles_c,), np.int32)


def launch(
    fmt: Format, family: Family, shape: Shape, weights: tuple, activations: tuple, out: Any,
    scratch: tuple,
) -> Launch:  # fmt: skip
    block_m, tiles_c, blocks = tiling(shape)
    run, shared_bytes = kernel(fmt.name, block_m)
    (a, token_scales), steps = activations, ceil_div(shape.k, BLOCK_K)
    operands = TensorMap(a, (block_m, BLOCK_K)), token_scales, *weights, out
    share, extra = divmod(tiles_c * steps, blocks)  # of all work items, for each block
    args = (*operands, steps, share, extra, *scratch)
    return Launch(run, (blocks,), (THREADS,), args, shared_bytes)


STEP = Step(
    number=15,
    name="step15_wgmma_int8",
    title="W4A8 with wgmma: one scale a row, one a token, one integer sum",
    branch="float16",
    families=("A8",),
    parents={"A8": 14},
    unit={"A8": "tensor_int8"},
    pack=byte_tiles,
    activations={"A8": int8_tokens},
    launch=launch,
    scratch=scratch,
    inputs=("float16",),
    outputs=("float16",),
    accuracy="fast",
    most_k=MOST_K,
    min_cc=(9, 0),
    max_cc=(9, 0),  # later ones have no wgmma
    idea=("wgmma_s8", "hfma2", "prmt"),
    contains={"A8": ("IGMMA", "UTMALDG", "UBLKCP", "SYNCS", "USETMAXREG")},
    forbids={"A8": ("IMMA", "HMMA", "HGMMA", "LDGSTS", "LDSM")},
)
