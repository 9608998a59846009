"""Small exact kernels for what came with Hopper, made like those of instruction_cases."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda, float32, int32, uint8, uint32

from steps.instructions import (
    BOX_K,
    TensorMap,
    barrier_arrive,
    barrier_sync,
    bulk_copy,
    elect_one,
    fence_mbarrier_init,
    fence_proxy_async,
    fence_proxy_async_global,
    load_u32x4,
    matrix_descriptor,
    mbarrier_arrive,
    mbarrier_arrive_expect,
    mbarrier_init,
    mbarrier_wait,
    mbarrier_wait_bounded,
    prefetch_l2,
    prefetch_tensor_map,
    setmaxnreg_dec,
    setmaxnreg_inc,
    spread,
    stmatrix_x4_trans,
    store_u32x4,
    swizzled_descriptor,
    tensor_copy,
    tensor_map_address,
    wgmma_commit,
    wgmma_f16,
    wgmma_fence,
    wgmma_s8,
    wgmma_sparse_f16,
    wgmma_wait,
    zeros_f32,
    zeros_i32,
)
from steps.instructions.tensor_core import A_ROW, A_WORD
from tests.instructions.instruction_cases import Case

wait_for_all = wgmma_wait(0)
wait_for_all_but_one = wgmma_wait(1)
sparse_0, sparse_1 = wgmma_sparse_f16(0), wgmma_sparse_f16(1)
more_registers, fewer_registers = setmaxnreg_inc(240), setmaxnreg_dec(24)
no_sums_f32 = zeros_f32(16)  # N = 32
no_sums_i32 = zeros_i32(4)  # N = 8


def fragments(a: np.ndarray) -> np.ndarray:
    """A[64 i, 32 j bytes] as the registers of `wgmma`: uint32 [j, 4 i warps, 32 lanes, 4]."""
    rows = np.ascontiguousarray(a).view(np.uint32)
    words = rows.reshape(len(a) // 16, 16, -1, 8).transpose(2, 0, 1, 3)  # [j, warp, row, word]
    return np.ascontiguousarray(words[:, :, A_ROW, A_WORD])


def columns(b: np.ndarray) -> np.ndarray:
    """B, given as tokens [N, 16 u bytes], K outermost: uint8 [u, N, 16]."""
    units = np.ascontiguousarray(b).view(np.uint8).reshape(len(b), -1, 16)
    return np.ascontiguousarray(units.transpose(1, 0, 2))


# --- one warpgroup multiplies


def multiply_kernel(multiply: Any, zeros: Any, dtype: Any, n: int, apart: bool) -> Any:
    """D[64, n] = A[64, 64 bytes] B[64 bytes, n]: B stored by threads, in one of two layouts."""
    half = n // 2
    no_sums = zeros(half)
    # core matrices that are neighbours along N side by side, or those along K
    leading, stride = (16 * n, 128) if apart else (128, 512)
    size = 64 * n

    @cuda.jit
    def multiply_once(a, b, d):
        stage = cuda.shared.array(size, uint8, alignment=128)
        out = cuda.local.array(half, dtype)
        t = cuda.threadIdx.x
        warp, g, quad = t >> 5, t >> 2 & 7, t & 3
        for i in range(t, 4 * n, 128):
            token, unit = i >> 2, i & 3
            x = load_u32x4(b, 16 * i)
            at = (token >> 3) * stride + unit * leading + 16 * (token & 7)
            store_u32x4(stage, at, x[0], x[1], x[2], x[3])
        fence_proxy_async()
        cuda.syncthreads()
        x = load_u32x4(a, 4 * t)
        y = load_u32x4(a, 4 * t + 512)
        where = matrix_descriptor(stage, 0, leading, stride)
        acc = no_sums()
        wgmma_fence()
        acc = multiply(acc, y[0], y[1], y[2], y[3], where, 1)
        acc = multiply(acc, x[0], x[1], x[2], x[3], where, 0)  # which forgets what was there
        acc = multiply(acc, y[0], y[1], y[2], y[3], where + (2 * leading >> 4), 1)
        wgmma_commit()
        acc = wait_for_all(acc)
        spread(out, acc)
        for j in range(n // 8):
            at = (16 * warp + g) * n + 8 * j + 2 * quad
            d[at], d[at + 1] = out[4 * j], out[4 * j + 1]
            d[at + 8 * n], d[at + 8 * n + 1] = out[4 * j + 2], out[4 * j + 3]

    return multiply_once


def multiply_case(n: int, element: Any, apart: bool = True) -> Case:
    """A of `element`, B of the same or int8; sums that are exact, the extremes of bytes
    included."""
    host = np.dtype(element)
    half = host.itemsize == 2
    multiply = {"e": wgmma_f16, "b": wgmma_s8}[host.char]
    sums = np.float32 if half else np.int32
    k = 64 // host.itemsize

    def inputs(rng):
        if half:  # multiples of 1/8 below 8
            a, b = (rng.integers(-63, 64, (rows, k)) / 8 for rows in (64, n))
            a, b = np.float16(a), np.float16(b)
        else:
            a = rng.integers(np.iinfo(host).min, np.iinfo(host).max, (64, k), host, endpoint=True)
            b = rng.integers(-128, 127, (n, k), np.int8, endpoint=True)
            a[0], b[0] = -128, -128
        return fragments(a).reshape(-1), b.view(np.uint8).reshape(-1)

    def expected(a, b):
        rows = np.empty((2, 4, 16, 8), np.uint32)
        rows[:, :, A_ROW, A_WORD] = a.reshape(2, 4, 32, 4)
        rows = np.ascontiguousarray(rows.reshape(2, 64, 8).transpose(1, 0, 2)).view(host)
        rows, tokens = rows.reshape(64, k), b.view(host if half else np.int8).reshape(n, k)
        exact = rows.astype(np.float64) @ tokens.astype(np.float64).T
        return (exact.astype(sums).reshape(-1),)

    zeros, dtype = (zeros_f32, float32) if half else (zeros_i32, int32)
    numbers = {"e": "16.F32", "b": "32.S8.S8"}[host.char]
    return Case(
        f"wgmma_{host.name}_n{n}",
        multiply_kernel(multiply, zeros, dtype, n, apart),
        inputs,
        expected,
        block=128,
        contains=(
            f"{'H' if half else 'I'}GMMA.64x{n}x{numbers}",
            "WARPGROUP.ARRIVE",
            "WARPGROUP.DEPBAR.LE",
            "FENCE.VIEW.ASYNC.S",
        ),
        oldest="sm_90a",
    )


@cuda.jit
def start_kernel(a, start, d):
    """From sums given, which block 0 forgets and block 1 adds to, beyond the end of int32."""
    stage = cuda.shared.array(256, uint8, alignment=128)
    t = cuda.threadIdx.x
    stage[t], stage[t + 128] = 127, 127
    fence_proxy_async()
    cuda.syncthreads()
    x = load_u32x4(a, 4 * t)
    where = matrix_descriptor(stage, 0, 128, 256)
    acc = (start[t], start[t + 128], start[t + 256], start[t + 384])
    wgmma_fence()
    acc = wgmma_s8(acc, x[0], x[1], x[2], x[3], where, cuda.blockIdx.x)
    wgmma_commit()
    acc = wait_for_all(acc)
    at = 512 * cuda.blockIdx.x + t
    d[at], d[at + 128], d[at + 256], d[at + 384] = acc[0], acc[1], acc[2], acc[3]


def start_inputs(rng):
    a = rng.integers(0, 1 << 32, 512, np.uint32)
    near_the_end = rng.integers(2**31 - 99, 2**31 - 1, 512).astype(np.int32)
    return a, near_the_end


def row_sums(registers):
    """127 times the sum of each row of A, in the order of accumulators of N = 8: [4, 128]."""
    rows = np.zeros((4, 16, 8), np.uint32)
    rows[:, A_ROW, A_WORD] = registers.reshape(4, 32, 4)
    of_row = 127 * rows.view(np.int8).astype(np.int64).sum(axis=2)
    g = np.arange(32) // 4
    return np.repeat(np.stack([of_row[:, g], of_row[:, g + 8]]).reshape(2, 128), 2, axis=0)


def start_expected(a, start):
    sums = row_sums(a).reshape(-1)
    return (np.concatenate([sums, sums + start]).astype(np.int32),)


@cuda.jit
def groups_kernel(a, d):
    """Two groups, the second of which may run while the first is waited for."""
    stage = cuda.shared.array(256, uint8, alignment=128)
    t = cuda.threadIdx.x
    stage[t], stage[t + 128] = 127, 127
    fence_proxy_async()
    cuda.syncthreads()
    where = matrix_descriptor(stage, 0, 128, 256)
    x = load_u32x4(a, 4 * t)
    y = load_u32x4(a, 4 * t + 512)
    first = no_sums_i32()
    second = no_sums_i32()
    wgmma_fence()
    first = wgmma_s8(first, x[0], x[1], x[2], x[3], where, 1)
    wgmma_commit()
    wgmma_fence()
    second = wgmma_s8(second, y[0], y[1], y[2], y[3], where, 1)
    wgmma_commit()
    first = wait_for_all_but_one(first)
    d[t], d[t + 128], d[t + 256], d[t + 384] = first[0], first[1], first[2], first[3]
    second = wait_for_all(second)
    at = t + 512
    d[at], d[at + 128], d[at + 256], d[at + 384] = second[0], second[1], second[2], second[3]


# --- a sparse A

PAIRS = np.array([i | j << 2 for i in range(4) for j in range(4) if i != j])
"""The metadata of a group of four: two positions, in any order."""


def sparse_kernel(n: int, apart: bool) -> Any:
    """D[64, n] = A[64, 64] B[64, n], A of two products of 32 K that share a word of metadata; then
    the second one once more alone. B is stored by threads, in one of two layouts."""
    half = n // 2
    no_sums = zeros_f32(half)
    leading, stride = (16 * n, 128) if apart else (128, 1024)
    size = 128 * n

    @cuda.jit
    def multiply_sparse(a, metadata, b, d):
        stage = cuda.shared.array(size, uint8, alignment=1024)
        out = cuda.local.array(half, float32)
        t = cuda.threadIdx.x
        warp, g, quad = t >> 5, t >> 2 & 7, t & 3
        for i in range(t, 8 * n, 128):
            token, unit = i >> 3, i & 7
            x = load_u32x4(b, 16 * i)
            if apart:
                at = (token >> 3) * stride + unit * leading + 16 * (token & 7)
            else:
                at = 128 * token + 16 * (unit ^ (token & 7))
            store_u32x4(stage, at, x[0], x[1], x[2], x[3])
        fence_proxy_async()
        cuda.syncthreads()
        x = load_u32x4(a, 4 * t)
        y = load_u32x4(a, 4 * t + 512)
        positions = metadata[t]
        if apart:
            where = matrix_descriptor(stage, 0, leading, stride)
            further = where + (4 * leading >> 4)
        else:
            where = swizzled_descriptor(stage, 0)
            further = where + 4
        acc = no_sums()
        wgmma_fence()
        acc = sparse_1(acc, x[0], x[1], x[2], x[3], where, positions, 1)
        acc = sparse_1(acc, y[0], y[1], y[2], y[3], further, positions, 0)
        acc = sparse_0(acc, x[0], x[1], x[2], x[3], where, positions, 1)
        wgmma_commit()
        acc = wait_for_all(acc)
        spread(out, acc)
        for j in range(n // 8):
            at = (16 * warp + g) * n + 8 * j + 2 * quad
            d[at], d[at + 1] = out[4 * j], out[4 * j + 1]
            d[at + 8 * n], d[at + 8 * n + 1] = out[4 * j + 2], out[4 * j + 3]

    return multiply_sparse


def sparse_inputs(rng, n):
    """B has a NaN and an infinity: they reach only what A keeps there."""
    kept, b = (rng.integers(-63, 64, shape) / 8 for shape in ((64, 32), (n, 64)))
    b[3, 5], b[n - 1, 40] = np.nan, np.inf
    fours = PAIRS[rng.integers(0, len(PAIRS), (4, 2, 8, 2, 2, 4))].astype(np.uint32)
    # [warp, row g or g + 8, g, product, half of K, group of four] -> words [warp, g, lane of four]
    bits = (fours << np.arange(0, 16, 4, dtype=np.uint32)).sum(axis=-1, dtype=np.uint32)
    words = bits[:, 0] | bits[:, 1] << np.uint32(16)
    kept, b = kept.astype(np.float16), b.astype(np.float16)
    return fragments(kept).reshape(-1), words.reshape(-1), b.view(np.uint8).reshape(-1)


def sparse_expected(a, words, b):
    tokens = b.view(np.float16).reshape(-1, 64).astype(np.float64)
    rows = np.empty((2, 4, 16, 8), np.uint32)
    rows[:, :, A_ROW, A_WORD] = a.reshape(2, 4, 32, 4)
    kept = np.ascontiguousarray(rows.reshape(2, 64, 8)).view(np.float16).astype(np.float64)
    d = np.zeros((64, len(tokens)))
    for product in range(2):
        for row in range(64):
            lane = 32 * (row // 16) + 4 * (row % 8) + 2 * product
            for i in range(16):  # kept numbers along K, two of each four
                word = int(words[lane + i // 8]) >> 16 * (row % 16 // 8)
                k = 32 * product + 4 * (i // 2) + (word >> 4 * (i // 2 % 4) + 2 * (i % 2) & 3)
                with np.errstate(invalid="ignore"):  # 0 times infinity
                    d[row] += kept[product, row, i] * tokens[:, k]
    return (d.astype(np.float32).reshape(-1),)


def sparse_case(n: int, apart: bool = True) -> Case:
    return Case(
        f"wgmma_sparse_n{n}",
        sparse_kernel(n, apart),
        lambda rng: sparse_inputs(rng, n),
        sparse_expected,
        block=128,
        contains=(f"HGMMA.SP.64x{n}x32.F32",),
        oldest="sm_90a",
    )


# --- bulk copies

CHUNK, CHUNKS = 512, 5  # bytes, of which each of 32 lanes reads 16
RING = 2 * CHUNK


@cuda.jit
def ring_kernel(source, out):
    """out = sum over i of (i + 1) * chunk i: a producer, a ring of two stages, a reading warp."""
    stage = cuda.shared.array(RING, uint8, alignment=16)
    full = cuda.shared.array(2, np.uint64)
    empty = cuda.shared.array(2, np.uint64)
    t = cuda.threadIdx.x
    if t == 0:
        for s in range(2):
            mbarrier_init(full, s, 1)
            mbarrier_init(empty, s, 32)
        fence_mbarrier_init()
        prefetch_l2(source, 0, CHUNK * CHUNKS)
    cuda.syncthreads()
    if t == 32:
        for i in range(CHUNKS):
            s = i & 1
            mbarrier_wait(empty, s, (i >> 1 & 1) ^ 1)
            mbarrier_arrive_expect(full, s, CHUNK)
            bulk_copy(stage, CHUNK * s, source, CHUNK * i, 128, full, s)
            bulk_copy(stage, CHUNK * s + 128, source, CHUNK * i + 128, CHUNK - 128, full, s)
    if t < 32:
        x0 = x1 = x2 = x3 = uint32(0)
        for i in range(CHUNKS):
            s = i & 1
            mbarrier_wait_bounded(full, s, i >> 1 & 1)
            x = load_u32x4(stage, CHUNK * s + 16 * t)
            times = uint32(i + 1)
            x0, x1 = uint32(x0 + times * x[0]), uint32(x1 + times * x[1])
            x2, x3 = uint32(x2 + times * x[2]), uint32(x3 + times * x[3])
            mbarrier_arrive(empty, s)
        store_u32x4(out, 4 * t, x0, x1, x2, x3)


def ring_expected(source):
    chunks = source.view(np.uint32).reshape(CHUNKS, -1).astype(np.int64)
    return ((chunks * np.arange(1, CHUNKS + 1)[:, None]).sum(axis=0).astype(np.uint32),)


@cuda.jit
def copied_back_kernel(x, out):
    """What all threads store to global memory a bulk copy reads; its words in reverse follow."""
    stage = cuda.shared.array(128, uint32, alignment=16)
    full = cuda.shared.array(1, np.uint64)
    t = cuda.threadIdx.x
    out[t] = x[t]
    if t == 0:
        mbarrier_init(full, 0, 1)
        fence_mbarrier_init()
    cuda.syncthreads()
    if t == 0:
        fence_proxy_async_global()
        mbarrier_arrive_expect(full, 0, 512)
        bulk_copy(stage, 0, out, 0, 512, full, 0)
    mbarrier_wait(full, 0, 0)
    out[128 + t] = stage[127 - t]


@cuda.jit
def turns_kernel(x, out):
    """Two warps in turns: the first hands over without waiting, the second answers likewise."""
    hand = cuda.shared.array(32, int32)
    answer = cuda.shared.array(32, int32)
    t = cuda.threadIdx.x
    if t < 32:
        hand[t] = x[t]
        barrier_arrive(1, 64)
        barrier_sync(2, 64)
        out[t] = answer[31 - t]
    else:
        barrier_sync(1, 64)
        answer[t - 32] = 2 * hand[(t - 32) ^ 1]
        barrier_arrive(2, 64)


# --- all together: a producer and two warpgroups of consumers

STEPS, STAGES, TOKENS, STEP_K = 5, 3, 32, 32
W_BYTES, A_BYTES = 128 * STEP_K * 2, TOKENS * STEP_K * 2  # of a step
STAGE_BYTES = W_BYTES + A_BYTES
FULL = STAGES * STAGE_BYTES
EMPTY = FULL + 8 * STAGES
SHARED = EMPTY + 8 * STAGES


@cuda.jit(launch_bounds=(384, 1))
def specialised_kernel(w, a, c, largest):
    """c[128, 32] = w[128, K] a[32, K]^T in float16; `largest` of c in each row and quarter."""
    ring = cuda.shared.array(SHARED, uint8, alignment=128)
    exchange = cuda.shared.array(256, float32)
    t = int32(cuda.threadIdx.x)
    warp, lane = t >> 5, t & 31
    if t == 0:
        for s in range(STAGES):
            mbarrier_init(ring, FULL + 8 * s, 1)
            mbarrier_init(ring, EMPTY + 8 * s, 8)
        fence_mbarrier_init()
    cuda.syncthreads()
    if warp >= 8:
        fewer_registers()
        if t == 256:
            s, parity = int32(0), int32(1)
            for step in range(STEPS):
                mbarrier_wait(ring, EMPTY + 8 * s, parity)
                mbarrier_arrive_expect(ring, FULL + 8 * s, STAGE_BYTES)
                at = s * STAGE_BYTES
                bulk_copy(ring, at, w, step * W_BYTES, W_BYTES, ring, FULL + 8 * s)
                bulk_copy(ring, at + W_BYTES, a, step * A_BYTES, A_BYTES, ring, FULL + 8 * s)
                s = int32(s + 1)
                if s == STAGES:
                    s, parity = int32(0), int32(parity ^ 1)
    else:
        more_registers()
        s, parity = int32(0), int32(0)
        acc = no_sums_f32()
        for step in range(STEPS):
            mbarrier_wait(ring, FULL + 8 * s, parity)
            at = s * STAGE_BYTES
            x = load_u32x4(ring, at + 16 * t)
            y = load_u32x4(ring, at + 16 * t + W_BYTES // 2)
            where = matrix_descriptor(ring, at + W_BYTES, 16 * TOKENS, 128)
            wgmma_fence()
            acc = wgmma_f16(acc, x[0], x[1], x[2], x[3], where, step > 0)
            acc = wgmma_f16(acc, y[0], y[1], y[2], y[3], where + 2 * TOKENS, 1)
            wgmma_commit()
            acc = wait_for_all(acc)
            if lane == 0:
                mbarrier_arrive(ring, EMPTY + 8 * s)
            s = int32(s + 1)
            if s == STAGES:
                s, parity = int32(0), int32(parity ^ 1)
        out = cuda.local.array(16, float32)
        spread(out, acc)
        row = 16 * warp + (lane >> 2)
        top = out[0]
        for j in range(4):
            at = row * TOKENS + 8 * j + 2 * (lane & 3)
            c[at], c[at + 1] = out[4 * j], out[4 * j + 1]
            c[at + 8 * TOKENS], c[at + 8 * TOKENS + 1] = out[4 * j + 2], out[4 * j + 3]
            top = max(top, out[4 * j], out[4 * j + 1])
        exchange[t] = top
        barrier_sync(1, 256)
        largest[t] = max(top, exchange[t ^ 128])


def specialised_inputs(rng):
    w = rng.integers(-63, 64, (128, STEPS * STEP_K)).astype(np.float16) / np.float16(8)
    a = rng.integers(-63, 64, (TOKENS, STEPS * STEP_K)).astype(np.float16) / np.float16(8)
    steps = fragments(w).reshape(STEPS, 2, 8, 32, 4)
    return steps.view(np.uint8).reshape(-1), columns(a).reshape(-1)


def specialised_expected(w, a):
    words = np.empty((2 * STEPS, 8, 16, 8), np.uint32)
    words[:, :, A_ROW, A_WORD] = w.view(np.uint32).reshape(2 * STEPS, 8, 32, 4)
    words = words.reshape(2 * STEPS, 128, 8).transpose(1, 0, 2)
    rows = np.ascontiguousarray(words).view(np.float16).reshape(128, -1)
    tokens = a.reshape(-1, TOKENS, 16).transpose(1, 0, 2)
    tokens = np.ascontiguousarray(tokens).view(np.float16).reshape(TOKENS, -1)
    c = rows.astype(np.float64) @ tokens.astype(np.float64).T
    t = np.arange(256)
    of_thread = c[16 * (t // 32) + t % 32 // 4].reshape(256, 4, 4, 2)  # [thread, j, quad, 2]
    top = of_thread[t, :, t % 4].max(axis=(1, 2))
    return (
        c.astype(np.float32).reshape(-1),
        np.maximum(top, top[t ^ 128]).astype(np.float32),
    )


# --- boxes of a matrix

BOX_TOKENS, RAGGED = 24, (37, 104)  # M and K end within a box
BOX = BOX_TOKENS * BOX_K * 2  # bytes
BEFORE = 16  # columns before the first; a box of bytes that began 8 before it stopped an H200
BOXES = 2  # along K, and as many along M
ALL_OF_K = BOXES * BOX


@cuda.jit
def boxes_kernel(a_map, out):
    """The box of each block, as it lies in shared memory: block (x, y) brings columns 64 x - 16 and
    rows 24 y - 3 on."""
    stage = cuda.shared.array(BOX, uint8, alignment=1024)
    full = cuda.shared.array(1, np.uint64)
    t = cuda.threadIdx.x
    x, y = cuda.blockIdx.x, cuda.blockIdx.y
    a = tensor_map_address(a_map)
    if t == 0:
        prefetch_tensor_map(a)
        mbarrier_init(full, 0, 1)
        fence_mbarrier_init()
    cuda.syncthreads()
    if t == 0:
        mbarrier_arrive_expect(full, 0, BOX)
        tensor_copy(stage, 0, a, BOX_K * x - BEFORE, BOX_TOKENS * y - 3, full, 0)
    mbarrier_wait(full, 0, 0)
    for i in range(t, BOX // 16, 32):
        v = load_u32x4(stage, 16 * i)
        store_u32x4(out, 4 * ((BOXES * y + x) * (BOX // 16) + i), v[0], v[1], v[2], v[3])


def boxes_expected(a_map):
    wide = a_map.box[1]
    a = np.pad(a_map.array, ((3, BOX_TOKENS), (BEFORE, wide)))
    out = np.empty((BOXES, BOXES, BOX_TOKENS, 8, wide // 8), a.dtype)
    for y in range(BOXES):
        for x in range(BOXES):
            for row in range(BOX_TOKENS):
                chunks = a[BOX_TOKENS * y + row, BOX_K * x :][:wide].reshape(8, -1)
                for chunk in range(8):
                    out[y, x, row, chunk ^ row % 8] = chunks[chunk]
    return (out.reshape(-1).view(np.uint32),)


@cuda.jit
def small_boxes_kernel(a_map, out):
    """Two boxes of four rows in one kilobyte, which one lane brings."""
    stage = cuda.shared.array(1024, uint8, alignment=1024)
    full = cuda.shared.array(1, np.uint64)
    t = cuda.threadIdx.x
    a = tensor_map_address(a_map)
    if t == 0:
        mbarrier_init(full, 0, 1)
        fence_mbarrier_init()
    cuda.syncthreads()
    if elect_one():
        mbarrier_arrive_expect(full, 0, 1024)
        tensor_copy(stage, 0, a, 0, 0, full, 0)
        tensor_copy(stage, 512, a, BOX_K, 0, full, 0)
    mbarrier_wait(full, 0, 0)
    for i in range(t, 64, 32):
        v = load_u32x4(stage, 16 * i)
        store_u32x4(out, 4 * i, v[0], v[1], v[2], v[3])


def small_boxes_expected(a_map):
    a = np.pad(a_map.array, ((0, 1), (0, 0)))
    out = np.empty((8, 8, 8), a.dtype)
    for row in range(8):  # of shared memory
        for chunk in range(8):
            k = BOX_K * (row // 4) + 8 * chunk
            out[row, chunk ^ row] = a[row % 4, k : k + 8]
    return (out.reshape(-1).view(np.uint32),)


def three_rows(rng):
    """The fourth row of a box is beyond the matrix."""
    return TensorMap(rng.integers(-63, 64, (3, 2 * BOX_K)).astype(np.float16), (4, BOX_K))


def ragged(rng, dtype=np.float16):
    a = rng.integers(-63, 64, RAGGED)
    return TensorMap(
        (a / 8).astype(dtype) if dtype == np.float16 else a.astype(dtype), (BOX_TOKENS, BOX_K)
    )


def ragged_bytes(rng):
    """128 of K are a box, so the two boxes along K overlap."""
    m, k = RAGGED
    return TensorMap(rng.integers(-128, 128, (m, k + 8)).astype(np.int8), (BOX_TOKENS, 2 * BOX_K))


SUMS = BOX_TOKENS // 2  # of a lane
no_sums_of_box = zeros_f32(SUMS)


@cuda.jit
def rows_kernel(a_map, w, d):
    """d[2, 64, 24] = w[64, 128] a^T, float16 rows of A as they are: two boxes, eight products."""
    stage = cuda.shared.array(ALL_OF_K, uint8, alignment=1024)
    full = cuda.shared.array(1, np.uint64)
    out = cuda.local.array(SUMS, float32)
    t = int32(cuda.threadIdx.x)
    warp, g, quad = t >> 5, t >> 2 & 7, t & 3
    a = tensor_map_address(a_map)
    if t == 0:
        mbarrier_init(full, 0, 1)
        fence_mbarrier_init()
    cuda.syncthreads()
    if t == 0:
        mbarrier_arrive_expect(full, 0, ALL_OF_K)
        for box in range(BOXES):
            m = int32(BOX_TOKENS * cuda.blockIdx.x)
            tensor_copy(stage, box * BOX, a, BOX_K * box, m, full, 0)
    mbarrier_wait(full, 0, 0)
    acc = no_sums_of_box()
    wgmma_fence()
    for box in range(BOXES):
        where = swizzled_descriptor(stage, box * BOX)
        for i in range(4):
            x = load_u32x4(w, 512 * (4 * box + i) + 4 * t)
            acc = wgmma_f16(acc, x[0], x[1], x[2], x[3], where + 2 * i, 1)
    wgmma_commit()
    acc = wait_for_all(acc)
    spread(out, acc)
    for j in range(BOX_TOKENS // 8):
        at = (64 * cuda.blockIdx.x + 16 * warp + g) * BOX_TOKENS + 8 * j + 2 * quad
        d[at], d[at + 1] = out[4 * j], out[4 * j + 1]
        d[at + 8 * BOX_TOKENS], d[at + 8 * BOX_TOKENS + 1] = out[4 * j + 2], out[4 * j + 3]


def rows_inputs(rng):
    w = rng.integers(-63, 64, (64, BOXES * BOX_K)).astype(np.float16) / np.float16(8)
    return ragged(rng), fragments(w).reshape(-1)


def rows_expected(a_map, w):
    (m, k), tokens = RAGGED, 2 * BOX_TOKENS
    words = np.empty((8, 4, 16, 8), np.uint32)
    words[:, :, A_ROW, A_WORD] = w.reshape(8, 4, 32, 4)
    rows = np.ascontiguousarray(words.reshape(8, 64, 8).transpose(1, 0, 2)).view(np.float16)
    a = np.zeros((tokens, BOXES * BOX_K))
    a[:m, :k] = a_map.array
    d = rows.reshape(64, -1).astype(np.float64) @ a.T
    return (d.reshape(64, 2, -1).transpose(1, 0, 2).astype(np.float32).reshape(-1),)


# --- stmatrix


@cuda.jit
def stmatrix_kernel(x, out):
    """Four matrices, their rows at places of their own."""
    stage = cuda.shared.array(512, uint8, alignment=16)
    t = cuda.threadIdx.x
    v = load_u32x4(x, 4 * t)
    stmatrix_x4_trans(stage, 16 * (t ^ 5), v[0], v[1], v[2], v[3])
    cuda.syncthreads()
    v = load_u32x4(stage, 16 * t)
    store_u32x4(out, 4 * t, v[0], v[1], v[2], v[3])


def stmatrix_expected(x):
    pairs = x.view(np.uint16).reshape(32, 4, 2)  # [lane, matrix, element]
    rows = np.empty((32, 8), np.uint16)
    for lane in range(32):
        for matrix in range(4):
            for i in range(2):  # column lane // 4 of the matrix, elements 2 (lane % 4) and the next
                row = 2 * (lane % 4) + i
                rows[8 * matrix + row, lane // 4] = pairs[lane, matrix, i]
    return (np.ascontiguousarray(rows[np.arange(32) ^ 5]).view(np.uint32).reshape(-1),)


CASES = (
    Case(
        "boxes",
        boxes_kernel,
        lambda rng: (ragged(rng),),
        boxes_expected,
        grid=(BOXES, BOXES),
        contains=("UTMALDG.2D", "UTMACCTL.PF", "SYNCS.ARRIVE.TRANS64"),
        oldest="sm_90a",
    ),
    Case(
        "boxes_of_words",  # bfloat16, which NumPy has not
        boxes_kernel,
        lambda rng: (ragged(rng, np.uint16),),
        boxes_expected,
        grid=(BOXES, BOXES),
        contains=("UTMALDG.2D",),
        oldest="sm_90a",
    ),
    Case(
        "boxes_of_bytes",
        boxes_kernel,
        lambda rng: (ragged_bytes(rng),),
        boxes_expected,
        grid=(BOXES, BOXES),
        contains=("UTMALDG.2D",),
        oldest="sm_90a",
    ),
    Case(
        "boxes_of_four_rows",
        small_boxes_kernel,
        lambda rng: (three_rows(rng),),
        small_boxes_expected,
        contains=("UTMALDG.2D", "ELECT"),
        oldest="sm_90a",
    ),
    Case(
        "rows",
        rows_kernel,
        rows_inputs,
        rows_expected,
        block=128,
        grid=2,
        contains=("UTMALDG.2D", "HGMMA.64x24x16.F32"),
        oldest="sm_90a",
    ),
    Case(
        "stmatrix",
        stmatrix_kernel,
        lambda rng: (rng.integers(0, 1 << 32, 128, np.uint32),),
        stmatrix_expected,
        contains=("STSM.16.MT88.4",),
        oldest="sm_90",
    ),
    multiply_case(8, np.float16),
    multiply_case(24, np.float16, apart=False),
    multiply_case(128, np.float16),
    multiply_case(256, np.float16),
    sparse_case(8),
    sparse_case(128, apart=False),
    sparse_case(256),
    multiply_case(16, np.int8),
    multiply_case(64, np.int8, apart=False),
    multiply_case(256, np.int8),
    multiply_case(32, np.int8),
    multiply_case(128, np.int8),
    Case(
        "wgmma_start",
        start_kernel,
        start_inputs,
        start_expected,
        block=128,
        grid=2,
        contains=("IGMMA.64x8x32.S8.S8",),
        oldest="sm_90a",
    ),
    Case(
        "wgmma_groups",
        groups_kernel,
        lambda rng: (rng.integers(0, 1 << 32, 1024, np.uint32),),
        lambda a: (np.stack([row_sums(a[:512]), row_sums(a[512:])]).astype(np.int32).reshape(-1),),
        block=128,
        contains=("IGMMA.64x8x32.S8.S8", "WARPGROUP.DEPBAR.LE"),
        oldest="sm_90a",
    ),
    Case(
        "bulk_ring",
        ring_kernel,
        lambda rng: (rng.integers(0, 256, CHUNK * CHUNKS).astype(np.uint8),),
        ring_expected,
        block=64,
        contains=(
            "UBLKCP.S.G",
            "UBLKPF",
            "SYNCS.EXCH.64",
            "SYNCS.ARRIVE.TRANS64",
            "SYNCS.PHASECHK.TRANS64.TRYWAIT",
        ),
        oldest="sm_90",
    ),
    Case(
        "copied_back",
        copied_back_kernel,
        lambda rng: (rng.integers(0, 1 << 32, 128, np.uint32),),
        lambda x: (np.concatenate((x, x[::-1])),),
        block=128,
        contains=("UBLKCP.S.G",),
        oldest="sm_90",
    ),
    Case(
        "turns",
        turns_kernel,
        lambda rng: (rng.integers(-99, 99, 32).astype(np.int32),),
        lambda x: (2 * x.reshape(16, 2)[::-1].reshape(-1).copy(),),
        block=64,
        contains=("BAR.SYNC.DEFER_BLOCKING", "BAR.ARV"),
    ),
    Case(
        "specialised",
        specialised_kernel,
        specialised_inputs,
        specialised_expected,
        block=384,
        contains=(
            "HGMMA.64x32x16.F32",
            "UBLKCP.S.G",
            "USETMAXREG.TRY_ALLOC.CTAPOOL",
            "USETMAXREG.DEALLOC.CTAPOOL",
            "BAR.SYNC.DEFER_BLOCKING",
        ),
        oldest="sm_90a",
    ),
)
