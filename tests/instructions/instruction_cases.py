"""Small exact kernels, one or more for each instruction, with what they must compute.

The simulator tests, the machine-code tests and the GPU tests all run these same cases, so that the
twin of an instruction, its SASS and the hardware are held to one plain NumPy expectation, bit for
bit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cuda, float32, int8, int32, uint8, uint16, uint32

from reference import bfloat16_bits, bfloat16_values
from steps.instructions import (
    address,
    and_xor,
    as_bits,
    as_float,
    cp_async_4,
    cp_async_16,
    cp_async_16_zfill,
    cp_async_commit,
    cp_async_wait,
    dp4a,
    dp4a_us,
    fence,
    float_to_half,
    floats_to_bfloats,
    floats_to_halves,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    half_to_float,
    hfma2,
    hfma2_bf16,
    high2half2,
    hmul2,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    load_f32,
    load_f32x2,
    load_f32x4,
    load_u16,
    load_u32,
    load_u32_relaxed,
    load_u32_system,
    load_u32x2,
    load_u32x4,
    load_u32x4_once,
    load_u32x4_relaxed,
    load_u64x2_relaxed,
    low2half2,
    mma_m16n8k8_tf32,
    mma_m16n8k16_bf16,
    mma_m16n8k16_f16,
    mma_m16n8k32_s8,
    mma_m16n8k32_u8,
    movmatrix_trans,
    prmt,
    select_bits,
    shfl,
    shfl_up,
    shfl_xor,
    store_f32,
    store_f32x2,
    store_f32x4,
    store_u16,
    store_u16_relaxed,
    store_u32,
    store_u32_relaxed,
    store_u32_system,
    store_u32x2,
    store_u32x4,
    store_u64_relaxed,
    thread_index,
    trap,
)
from steps.instructions.approximate import exp2, reciprocal, rsqrt


@dataclass(frozen=True)
class Case:
    """`kernel[grid, block](*inputs, *outputs)` must leave `expected(*inputs)` in the outputs."""

    name: str
    kernel: Any
    inputs: Callable[[np.random.Generator], tuple]
    expected: Callable[..., tuple[np.ndarray, ...]]
    block: int | tuple = 32
    grid: int | tuple = 1
    contains: tuple[str, ...] = ()  # SASS opcodes on sm_80 and sm_90a
    oldest: str = "sm_75"

    def prepare(self, seed: int) -> tuple[tuple, tuple]:
        """(inputs, expected outputs) of one seed."""
        inputs = self.inputs(np.random.default_rng(seed))
        return inputs, self.expected(*inputs)

    def __repr__(self) -> str:
        return self.name


def words(rng: np.random.Generator, count: int) -> np.ndarray:
    """Random 32-bit words, the extreme ones of every signedness first."""
    x = rng.integers(0, 1 << 32, count, dtype=np.uint32)
    extreme = (0, 0xFFFFFFFF, 0x80808080, 0x7F7F7F7F, 0x80000000, 0x7FFFFFFF, 0x01020304)
    x[: len(extreme)] = extreme
    return x


def signed_bytes(x: np.ndarray) -> np.ndarray:
    return x.view(np.int8).reshape(-1, 4).astype(np.int64)


def unsigned_bytes(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint8).reshape(-1, 4).astype(np.int64)


# --- arithmetic


@cuda.jit
def relaxed_kernel(source, out):
    """Both halves of 16 bytes change places."""
    t = cuda.threadIdx.x
    low, high = load_u64x2_relaxed(source, 4 * t)
    store_u64_relaxed(out, 4 * t, high)
    store_u64_relaxed(out, 4 * t + 2, low)


def relaxed_expected(source):
    return (np.ascontiguousarray(source.reshape(-1, 2, 2)[:, ::-1]).reshape(-1),)


@cuda.jit
def relaxed_words_kernel(source, out):
    """16 bytes, word by word, in the other order."""
    t = cuda.threadIdx.x
    words = load_u32x4_relaxed(source, 4 * t)
    if t > 99:  # no thread
        trap()
    for i in range(4):
        store_u32_relaxed(out, 4 * t + 3 - i, words[i])


def relaxed_words_expected(source):
    return (np.ascontiguousarray(source.reshape(-1, 4)[:, ::-1]).reshape(-1),)


@cuda.jit
def relaxed_small_kernel(source, out):
    """The lower half of each word."""
    t = thread_index()
    store_u16_relaxed(out, t, uint16(load_u32_relaxed(source, t)))


def relaxed_small_expected(source):
    return (source.astype(np.uint16),)


@cuda.jit
def system_kernel(source, out):
    """Words in the other order."""
    t = thread_index()
    store_u32_system(out, 63 - t, load_u32_system(source, t))


def system_expected(source):
    return (source[::-1].copy(),)


@cuda.jit
def dot_kernel(a, b, c, signed, unsigned):
    i = cuda.grid(1)
    signed[i] = dp4a(a[i], b[i], c[i])
    unsigned[i] = dp4a_us(a[i], b[i], c[i])


def dot_expected(a, b, c):
    signed = (signed_bytes(a) * signed_bytes(b)).sum(1) + c
    unsigned = (unsigned_bytes(a) * signed_bytes(b)).sum(1) + c
    return signed.astype(np.int32), unsigned.astype(np.int32)  # astype wraps, as the GPU does


@cuda.jit
def prmt_kernel(a, b, selector, out):
    i = cuda.grid(1)
    out[i] = prmt(a[i], b[i], selector[i])


def prmt_expected(a, b, selector):
    pool = np.concatenate([unsigned_bytes(a), unsigned_bytes(b)], axis=1)
    picks = (selector[:, None] >> np.arange(0, 16, 4, dtype=np.uint32)) & 15
    taken = np.take_along_axis(pool, (picks & 7).astype(np.int64), axis=1)
    taken = np.where(picks & 8, np.where(taken & 128, 255, 0), taken)
    return (np.ascontiguousarray(taken.astype(np.uint8)).view(np.uint32)[:, 0],)


@cuda.jit
def logic_kernel(a, b, c, xor, select):
    i = cuda.grid(1)
    xor[0, i] = and_xor(a[i], b[i], c[i])
    xor[1, i] = and_xor(a[i], 0x000F000F, 0x00080008)
    select[0, i] = select_bits(a[i], b[i], c[i])
    select[1, i] = select_bits(0x000F000F, b[i], c[i])


def logic_expected(a, b, c):
    xor = a & b ^ c, (a & 0x000F000F) ^ 0x00080008
    return np.stack(xor), np.stack([a & b | ~a & c, b & 0x000F000F | c & 0xFFF0FFF0])


@cuda.jit
def half_kernel(bits, x, as_float, as_half):
    i = cuda.grid(1)
    as_float[i] = half_to_float(bits[i])
    as_half[i] = float_to_half(x[i])


def half_inputs(rng):
    """Every finite float16 and infinity; floats exact, between two halves, ties, too large."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    bits = bits[~np.isnan(bits.view(np.float16))]
    count = bits.size // 256 * 256
    bits = bits[rng.permutation(bits.size)[:count]]
    x = bits.view(np.float16).astype(np.float32)
    x[::4] = np.nextafter(x[::4], np.float32(np.inf))
    x[1::4] *= np.float32(1 + 2**-11)  # the tie, for the halves whose last bits are zero
    x[2::4] = rng.normal(size=x[2::4].size) * 1e5
    return bits, x


def half_expected(bits, x):
    with np.errstate(over="ignore"):
        return bits.view(np.float16).astype(np.float32), x.astype(np.float16).view(np.uint16)


@cuda.jit
def approximate_kernel(x, y, powers, inverses, roots):
    i = cuda.grid(1)
    powers[i] = float_to_half(exp2(x[i]))
    inverses[i] = float_to_half(reciprocal(y[i]))
    roots[i] = float_to_half(rsqrt(y[i]))


def approximate_inputs(rng):
    """None of whose results is nearer than 2^-21 of itself to halfway between two float16, which
    is more than any may be off by."""
    at = rng.permutation(464)
    return (at / 16 - 14).astype(np.float32), (at + 1).astype(np.float32)


def approximate_expected(x, y):
    exact = 2.0 ** x.astype(float), 1 / y, 1 / np.sqrt(y.astype(float))
    return tuple(z.astype(np.float16).view(np.uint16) for z in exact)


@cuda.jit
def packed_half_kernel(a, b, c, products, sums, low, high, picked):
    i = cuda.grid(1)
    products[i] = hmul2(a[i], b[i])
    sums[i] = hfma2(a[i], b[i], c[i])
    low[i] = low2half2(a[i])
    high[i] = high2half2(a[i])
    picked[i] = hfma2(b[i], low2half2(a[i]), high2half2(c[i]))


def packed_half_expected(a, b, c):
    low, high = (np.repeat(a.view(np.uint16)[i::2], 2).view(np.uint32) for i in (0, 1))
    upper = np.repeat(c.view(np.uint16)[1::2], 2).view(np.uint32)
    _, picked = products_and_sums(b, low, upper)
    return *products_and_sums(a, b, c), low, high, picked


@cuda.jit
def packed_bfloat_kernel(a, b, c, sums):
    i = cuda.grid(1)
    sums[i] = hfma2_bf16(a[i], b[i], c[i])


def packed_bfloat_inputs(rng):
    """Subnormal numbers times 2^103, which is exact, and -0 or a neighbour: sums are exact too."""
    a = rng.integers(0, 1 << 7, 1024).astype(np.uint16) << 1 | rng.integers(0, 2, 1024) << 15
    b = np.full(1024, 0x7300)
    c = np.where(np.arange(1024) < 512, 0x8000, 0)
    return tuple(x.astype(np.uint16).view(np.uint32) for x in (a, b, c))


def packed_bfloat_expected(a, b, c):
    x, y, z = (bfloat16_values(part.view(np.uint16)).astype(np.float64) for part in (a, b, c))
    return (bfloat16_bits((x * y + z).astype(np.float32)).view(np.uint32),)


def packed_half_inputs(rng):
    """Words of two halves: of every exponent, and codes as subnormals times a scale plus offset."""

    def operand():
        bits = rng.integers(0, 1 << 16, 1024).astype(np.uint16)
        return np.where(bits & 0x7C00 == 0x7C00, bits & 0x83FF, bits).astype(np.uint16)

    a, b, c = operand(), operand(), operand()
    a[:256] &= 0x07FF
    c[:256] = (b[:256].view(np.float16) * np.float16(-(2.0**-14))).view(np.uint16)
    c[256:320] = b[256:320]
    a[256:320] = np.arange(-32, 32).astype(np.float16).view(np.uint16) | np.uint16(1)
    return tuple(x.view(np.uint32) for x in (a, b, c))


def products_and_sums(a, b, c):
    """In integers, in units of 2^-48 (that of the smallest product), rounded to 11 bits at most."""

    def units(x):
        return [int(v) for v in x.view(np.float16).astype(np.float64) * 2.0**24]

    def rounded(exact, negative):
        unit = 1 << max(abs(exact).bit_length() - 11, 24)
        count, rest = divmod(abs(exact), unit)
        count += 2 * rest > unit or (2 * rest == unit and count & 1)
        return (-1.0 if negative else 1.0) * (count * unit * 2.0**-48)

    x, y, z = units(a), units(b), units(c)
    signs = (a ^ b).view(np.int16) < 0
    products = [rounded(p * q, s) for p, q, s in zip(x, y, signs, strict=True)]
    exact = [p * q + (r << 24) for p, q, r in zip(x, y, z, strict=True)]
    zero = signs & (c.view(np.int16) < 0)  # a sum of nothing but -0
    sums = [rounded(v, v < 0 or (v == 0 and s)) for v, s in zip(exact, zero, strict=True)]
    with np.errstate(over="ignore"):
        return tuple(np.array(v).astype(np.float16).view(np.uint32) for v in (products, sums))


@cuda.jit
def halves_kernel(low, high, out):
    i = cuda.grid(1)
    out[i] = floats_to_halves(low[i], high[i])


def halves_expected(low, high):
    with np.errstate(over="ignore"):
        pairs = np.stack([low, high], axis=1).astype(np.float16)
    return (pairs.view(np.uint32)[:, 0],)


@cuda.jit
def bfloats_kernel(low, high, out):
    i = cuda.grid(1)
    out[i] = floats_to_bfloats(low[i], high[i])


def bfloats_inputs(rng):
    """Any floats that are numbers; ties, and what rounds to infinity."""
    x = words(rng, 1024).view(np.float32)
    x[np.isnan(x)] = 0
    x[:6] = 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8 - 2**-20, 3.4e38, -np.inf, 2.0**-134
    return x[:512].copy(), x[512:].copy()


def bfloats_expected(low, high):
    pairs = np.stack([bfloat16_bits(low), bfloat16_bits(high)], axis=1)
    return (np.ascontiguousarray(pairs).view(np.uint32)[:, 0],)


@cuda.jit
def bits_kernel(x, words, bits, floats):
    i = cuda.grid(1)
    bits[i] = as_bits(x[i])
    floats[i] = as_float(words[i])


def bits_inputs(rng):
    """Both zeros, subnormals, infinities and whatever else is no NaN."""
    w = words(rng, 256)
    w[:6] = 0, 0x80000000, 1, 0x007FFFFF, 0x7F800000, 0xFF800000
    w[np.isnan(w.view(np.float32))] = 0x3F800001
    return w.view(np.float32)[::-1].copy(), w


# --- memory


def copy_kernel(load: Any, store: Any, count: int, dtype: Any) -> Any:
    """Global -> shared -> global, `count` elements a thread, which stores its neighbour's."""
    size = 64 * count

    @cuda.jit
    def copy(source, target):
        stage = cuda.shared.array(size, dtype, alignment=16)
        t = cuda.threadIdx.x
        neighbour = t ^ 1
        if count == 4:
            x = load(source, 4 * t)
            store(stage, 4 * t, x[0], x[1], x[2], x[3])
            cuda.syncthreads()
            y = load(stage, 4 * neighbour)
            store(target, 4 * t, y[0], y[1], y[2], y[3])
        elif count == 2:
            x = load(source, 2 * t)
            store(stage, 2 * t, x[0], x[1])
            cuda.syncthreads()
            y = load(stage, 2 * neighbour)
            store(target, 2 * t, y[0], y[1])
        else:
            store(stage, t, load(source, t))
            cuda.syncthreads()
            store(target, t, load(stage, neighbour))

    return copy


def copy_case(name: str, load: Any, store: Any, count: int, dtype: Any, size: str) -> Case:
    host = np.dtype(str(dtype))

    def inputs(rng):
        if host.kind == "f":
            return (rng.normal(size=64 * count).astype(host),)
        return (rng.integers(0, np.iinfo(host).max, 64 * count, host, endpoint=True),)

    def expected(source):
        return (source.reshape(-1, 2, count)[:, ::-1].reshape(-1).copy(),)

    opcodes = tuple(f"{op}{size}" for op in ("LDG.E", "STS", "LDS", "STG.E"))
    kernel = copy_kernel(load, store, count, dtype)
    return Case(f"copy_{name}", kernel, inputs, expected, block=64, contains=opcodes)


@cuda.jit
def once_kernel(source, out):
    """Neighbours exchange what they have loaded."""
    t = cuda.threadIdx.x
    x = load_u32x4_once(source, 4 * (t ^ 1))
    store_u32x4(out, 4 * t, x[0], x[1], x[2], x[3])


def once_inputs(rng):
    return (rng.integers(0, 2**32, 256, np.uint32),)


def once_expected(source):
    return (source.reshape(-1, 2, 4)[:, ::-1].reshape(-1).copy(),)


@cuda.jit
def bytes_kernel(blocks, out):
    """Byte arrays with byte indices, the way packed blocks are read: u16 at every second byte."""
    t = cuda.threadIdx.x
    stage = cuda.shared.array(32 * 20, uint8, alignment=16)
    for j in range(9):
        store_u16(stage, 20 * t + 2 * j, load_u16(blocks, 18 * t + 2 * j))
    low = load_u16(stage, 20 * t + 2)
    high = load_u16(stage, 20 * t + 4)
    out[2 * t] = low | high << 16
    out[2 * t + 1] = load_u32(stage, 20 * t)


def bytes_expected(blocks):
    rows = blocks.reshape(32, 18)
    out = np.stack(
        [
            np.ascontiguousarray(rows[:, 2:6]).view(np.uint32)[:, 0],
            np.ascontiguousarray(rows[:, :4]).view(np.uint32)[:, 0],
        ],
        axis=1,
    )
    return (out.reshape(-1),)


@cuda.jit
def aligned_kernel(source, out):
    """128 bits at once where the address allows, else value by value."""
    i = cuda.threadIdx.x
    if address(source, i) % 16 == 0:
        x = load_f32x4(source, i)
        out[i] = x[0] + x[1] + x[2] + x[3]
    else:
        out[i] = load_f32(source, i)


def aligned_inputs(rng):
    return (rng.integers(-99, 99, 32).astype(np.float32),)


def aligned_expected(source):
    out = source.copy()
    out[::4] = source.reshape(-1, 4).sum(axis=1)
    return (out,)


# --- tensor cores and asynchronous copies

GEMM_M, GEMM_N, GEMM_K = 32, 16, 64
wait_all = cp_async_wait(0)
wait_all_but_one = cp_async_wait(1)


def gemm_8_kernel(mma: Any) -> Any:
    @cuda.jit
    def gemm_8(a, b, c):
        """C[32, 16] = A[32, 64] B[16, 64]^T in bytes; a block is one warp and owns 16 x 8 of C."""
        stage_a = cuda.shared.array((16, 32), int8, alignment=16)
        stage_b = cuda.shared.array((8, 32), int8, alignment=16)
        lane = cuda.threadIdx.x
        m, n = cuda.blockIdx.y * 16, cuda.blockIdx.x * 8
        row, half = lane >> 1, 16 * (lane & 1)
        c0 = c1 = c2 = c3 = int32(0)
        for k in range(0, GEMM_K, 32):
            cp_async_16(stage_a, row * 32 + half, a, (m + row) * GEMM_K + k + half)
            if lane < 16:
                cp_async_16(stage_b, row * 32 + half, b, (n + row) * GEMM_K + k + half)
            cp_async_commit()
            wait_all()
            cuda.syncthreads()
            a0, a1, a2, a3 = ldmatrix_x4(stage_a, (lane & 15) * 32 + 16 * (lane >> 4))
            b0, b1, _, _ = ldmatrix_x4(stage_b, (lane & 7) * 32 + 16 * ((lane >> 3) & 1))
            c0, c1, c2, c3 = mma(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3)
            cuda.syncthreads()
        g, t = lane >> 2, lane & 3
        c[m + g, n + 2 * t] = c0
        c[m + g, n + 2 * t + 1] = c1
        c[m + g + 8, n + 2 * t] = c2
        c[m + g + 8, n + 2 * t + 1] = c3

    return gemm_8


def gemm_8_case(name: str, mma: Any, dtype: Any, opcode: str) -> Case:
    """A of bytes of `dtype`, B of signed ones; the extreme ones meet in row 0 and column 0."""
    limits = np.iinfo(dtype)

    def inputs(rng):
        a = rng.integers(limits.min, limits.max, (GEMM_M, GEMM_K), dtype, endpoint=True)
        b = rng.integers(-128, 127, (GEMM_N, GEMM_K), np.int8, endpoint=True)
        a[0], b[0] = limits.max if limits.min == 0 else limits.min, -128
        return a, b

    return Case(
        name,
        gemm_8_kernel(mma),
        inputs,
        lambda a, b: (a.astype(np.int32) @ b.astype(np.int32).T,),
        grid=(GEMM_N // 8, GEMM_M // 16),
        contains=(opcode, "LDSM.16.M88.4", "LDGSTS.E.BYPASS.128"),
        oldest="sm_80",
    )


def gemm_16_kernel(mma: Any) -> Any:
    @cuda.jit
    def gemm_16(a, b, c):
        """C[16, 8] = A[16, 16] B[16, 8] of 16 bits with float32 sums; B row-major, hence .trans."""
        stage_a = cuda.shared.array((16, 16), uint16, alignment=16)
        stage_b = cuda.shared.array((16, 8), uint16, alignment=16)
        lane = cuda.threadIdx.x
        x = load_u32x4(a, lane * 8)
        store_u32x4(stage_a, lane * 8, x[0], x[1], x[2], x[3])
        y = load_u32x2(b, lane * 4)
        store_u32x2(stage_b, lane * 4, y[0], y[1])
        cuda.syncthreads()
        a0, a1, a2, a3 = ldmatrix_x4(stage_a, (lane & 15) * 16 + 8 * (lane >> 4))
        b0, b1, _, _ = ldmatrix_x4_trans(stage_b, (lane & 15) * 8)
        g, t = lane >> 2, lane & 3
        c0, c1, c2, c3 = mma(
            a0, a1, a2, a3, b0, b1, float32(g), float32(1), float32(0.5), float32(t)
        )
        c[g, 2 * t] = c0
        c[g, 2 * t + 1] = c1
        c[g + 8, 2 * t] = c2
        c[g + 8, 2 * t + 1] = c3

    return gemm_16


def float16_bits(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).view(np.uint16)


def float16_values(bits: np.ndarray) -> np.ndarray:
    return bits.view(np.float16)


def gemm_16_case(name: str, mma: Any, bits: Any, values: Any, most: int, opcode: str) -> Case:
    """bits, values: from numbers to uint16 and back. A and B are multiples of 1/8 up to most / 8,
    so that every partial sum is a float32 whatever the order."""

    def inputs(rng):
        a = rng.integers(-most, most + 1, (16, 16)) / 8
        return bits(a), bits(rng.integers(-most, most + 1, (16, 8)) / 8)

    return Case(
        name,
        gemm_16_kernel(mma),
        inputs,
        lambda a, b: gemm_16_expected(values(a), values(b)),
        contains=(opcode, "LDSM.16.MT88.4"),
        oldest="sm_80",
    )


def gemm_16_expected(a, b):
    c = a.astype(np.float64) @ b.astype(np.float64)
    rows = np.arange(8)[:, None]
    c[:8, 0::2] += rows
    c[:8, 1::2] += 1
    c[8:, 0::2] += 0.5
    c[8:, 1::2] += np.arange(4)
    return (c.astype(np.float32),)


@cuda.jit
def gemm_tf32_kernel(a, b, c):
    """C[16, 8] = A[16, 8] B[8, 8]^T plus a constant for each register, operands as bits."""
    lane = cuda.threadIdx.x
    g, t = lane >> 2, lane & 3
    c0, c1, c2, c3 = mma_m16n8k8_tf32(
        load_u32(a, g * 8 + t),
        load_u32(a, (g + 8) * 8 + t),
        load_u32(a, g * 8 + t + 4),
        load_u32(a, (g + 8) * 8 + t + 4),
        load_u32(b, g * 8 + t),
        load_u32(b, g * 8 + t + 4),
        float32(g),
        float32(1),
        float32(0.5),
        float32(t),
    )
    c[g, 2 * t] = c0
    c[g, 2 * t + 1] = c1
    c[g + 8, 2 * t] = c2
    c[g + 8, 2 * t + 1] = c3


def gemm_tf32_inputs(rng):
    """As for float16, and below what tf32 holds bits that must make no difference."""

    def operand(rows):
        x = (rng.integers(-512, 513, (rows, 8)) / 8).astype(np.float32).view(np.uint32)
        return x | rng.integers(0, 1 << 13, x.shape, np.uint32)

    return operand(16), operand(8)


def gemm_tf32_expected(a, b):
    a, b = ((x & 0xFFFFE000).view(np.float32).astype(np.float64) for x in (a, b))
    return gemm_16_expected(a, b.T)


@cuda.jit
def ldmatrix_kernel(source, out):
    stage = cuda.shared.array((32, 8), uint16, alignment=16)
    lane = cuda.threadIdx.x
    x = load_u32x4(source, lane * 8)
    store_u32x4(stage, lane * 8, x[0], x[1], x[2], x[3])
    cuda.syncthreads()
    p = ldmatrix_x4(stage, lane * 8)
    q = ldmatrix_x4_trans(stage, lane * 8)
    for i in range(4):
        out[0, i, lane] = p[i]
        out[1, i, lane] = q[i]


def ldmatrix_expected(source):
    plain = source.reshape(4, 8, 8)
    turned = np.ascontiguousarray(plain.transpose(0, 2, 1))
    plain, turned = (m.view(np.uint32).reshape(4, 32) for m in (plain, turned))
    return (np.stack([plain, turned]),)


@cuda.jit
def transpose_kernel(x, out):
    out[cuda.threadIdx.x] = movmatrix_trans(x[cuda.threadIdx.x])


def transpose_expected(x):
    return (np.ascontiguousarray(x.view(np.uint16).reshape(8, 8).T).view(np.uint32).reshape(-1),)


@cuda.jit
def pipeline_kernel(source, tiles, out):
    """Two stages: the copy of tile i + 1 runs while tile i is read. The last tile is half zeros."""
    stages = cuda.shared.array((2, 64 * 16), uint8, alignment=16)
    t = cuda.threadIdx.x
    cp_async_16(stages, 16 * t, source, 16 * t)
    cp_async_commit()
    for i in range(tiles):
        if i + 1 < tiles:
            size = 8 if i + 2 == tiles else 16
            at = 1024 * ((i + 1) & 1) + 16 * t
            cp_async_16_zfill(stages, at, source, 1024 * (i + 1) + 16 * t, size)
            cp_async_commit()
            wait_all_but_one()
        else:
            wait_all()
        cuda.syncthreads()
        x = load_u32x4(stages, 1024 * (i & 1) + 16 * (63 - t))
        store_u32x4(out, 1024 * i + 16 * t, x[0], x[1], x[2], x[3])
        cuda.syncthreads()


PIPELINE_TILES = 4


def pipeline_inputs(rng):
    return rng.integers(0, 256, PIPELINE_TILES * 1024).astype(np.uint8), PIPELINE_TILES


def pipeline_expected(source, tiles):
    out = source.reshape(tiles, 64, 16)[:, ::-1].copy()
    out[-1, :, 8:] = 0
    return (out.reshape(-1),)


@cuda.jit
def gather_kernel(source, out):
    """Every third value through shared memory; lanes beyond the end write a zero instead."""
    stage = cuda.shared.array(32, float32)
    t = cuda.threadIdx.x
    if 3 * t < source.size:
        cp_async_4(stage, t, source, 3 * t)
    else:
        stage[t] = 0
    cp_async_commit()
    wait_all()
    cuda.syncthreads()
    out[t] = stage[31 - t]


def gather_expected(source):
    out = np.zeros(32, np.float32)
    taken = source[::3]
    out[: taken.size] = taken
    return (out[::-1].copy(),)


@cuda.jit
def ordered_kernel(x, out):
    """Launched alone, as any other kernel: the launch before it has ended long since."""
    t = cuda.threadIdx.x
    griddepcontrol_launch_dependents()
    griddepcontrol_wait()
    out[t] = x[t] + 1
    fence()


# --- warps


@cuda.jit
def shuffle_kernel(x, y, ints, floats):
    lane = cuda.threadIdx.x
    a, b = x[lane], y[lane]
    ints[0, lane] = shfl(a, (lane * 7) & 31)
    ints[1, lane] = shfl_xor(a, 5)
    ints[2, lane] = shfl_up(a, 3)
    floats[0, lane] = shfl(b, 31 - lane)
    total = b
    for i in range(5):
        total = float32(total + shfl_xor(total, 16 >> i))
    floats[1, lane] = total


def shuffle_expected(x, y):
    lane = np.arange(32)
    ints = np.stack(
        [
            x[lane * 7 % 32],
            x[lane ^ 5],
            x[np.where(lane < 3, lane, lane - 3)],
        ]
    )
    total = y.copy()
    for i in range(5):
        total = total + total[lane ^ (16 >> i)]
    return ints, np.stack([y[::-1], total])


@cuda.jit
def numba_warp_kernel(x, out):
    """Numba's own warp and block operations, which steps may use as they are."""
    t = cuda.threadIdx.x
    lane = cuda.laneid
    full = 0xFFFFFFFF
    out[0, t] = cuda.shfl_sync(full, x[t], 3)
    out[1, t] = cuda.shfl_xor_sync(full, x[t], 1)
    out[2, t] = cuda.shfl_up_sync(full, x[t], 1)
    out[3, t] = cuda.shfl_down_sync(full, x[t], 1)
    out[4, t] = int32(cuda.ballot_sync(full, x[t] > 0))
    out[5, t] = cuda.any_sync(full, lane == 3 and x[t] > 0)
    out[6, t] = cuda.all_sync(full, x[t] > -1000)
    out[7, t] = cuda.syncthreads_count(int32(x[t] > 0))
    cuda.syncwarp()
    out[8, t] = cuda.popc(uint32(x[t]))
    out[9, t] = cuda.clz(uint32(x[t]))
    out[10, t] = int32(cuda.brev(uint32(x[t])))


def numba_warp_expected(x):
    warps = x.reshape(2, 32)
    lane = np.arange(32)
    bits = [f"{int(v) & 0xFFFFFFFF:032b}" for v in x]
    rows = [
        np.repeat(warps[:, 3:4], 32, axis=1),
        warps[:, lane ^ 1],
        warps[:, np.maximum(lane - 1, 0)],
        warps[:, np.minimum(lane + 1, 31)],
        np.repeat(((warps > 0) * (1 << lane)).sum(1, keepdims=True), 32, axis=1),
        np.repeat(warps[:, 3:4] > 0, 32, axis=1),
        np.repeat((warps > -1000).all(1, keepdims=True), 32, axis=1),
        np.full((2, 32), (x > 0).sum()),
        np.array([b.count("1") for b in bits]),
        np.array([len(b) - len(b.lstrip("0")) for b in bits]),
        np.array([int(b[::-1], 2) for b in bits]),
    ]
    return (np.stack([np.asarray(r).reshape(64) for r in rows]).astype(np.int64).astype(np.int32),)


def int_pair(rng):
    return (rng.integers(-500, 500, 64).astype(np.int32),)


CASES = (
    Case(
        "dp4a",
        dot_kernel,
        lambda rng: (words(rng, 256), words(rng, 256)[::-1].copy(), words(rng, 256).view(np.int32)),
        dot_expected,
        block=256,
        contains=("IDP.4A.S8.S8", "IDP.4A.U8.S8"),
    ),
    Case(
        "prmt",
        prmt_kernel,
        lambda rng: (words(rng, 256), words(rng, 256)[::-1].copy(), words(rng, 256)),
        prmt_expected,
        block=256,
        contains=("PRMT",),
    ),
    Case(
        "logic",
        logic_kernel,
        lambda rng: (words(rng, 256), words(rng, 256)[::-1].copy(), words(rng, 256)),
        logic_expected,
        block=256,
        contains=("LOP3.LUT",),
    ),
    Case(
        "half",
        half_kernel,
        half_inputs,
        half_expected,
        block=256,
        grid=63488 // 256,
        contains=("HADD2.F32", "F2FP.PACK_AB|F2FP.F16.F32.PACK_AB"),
    ),
    Case(
        "approximate",
        approximate_kernel,
        approximate_inputs,
        approximate_expected,
        block=232,
        grid=2,
        contains=("MUFU.EX2", "MUFU.RCP", "MUFU.RSQ"),
    ),
    Case(
        "packed_half",
        packed_half_kernel,
        packed_half_inputs,
        packed_half_expected,
        block=256,
        grid=2,
        contains=("HFMA2|HFMA2.MMA|HMUL2", "PRMT"),
    ),
    Case(
        "packed_bfloat",
        packed_bfloat_kernel,
        packed_bfloat_inputs,
        packed_bfloat_expected,
        block=256,
        grid=2,
        contains=("HFMA2.BF16_V2|HFMA2.MMA.BF16_V2",),
        oldest="sm_80",
    ),
    Case(
        "halves",
        halves_kernel,
        lambda rng: (half_inputs(rng)[1][:512], half_inputs(rng)[1][:512]),
        halves_expected,
        block=256,
        grid=2,
        contains=("F2FP.PACK_AB|F2FP.F16.F32.PACK_AB",),
        oldest="sm_80",
    ),
    Case(
        "bfloats",
        bfloats_kernel,
        bfloats_inputs,
        bfloats_expected,
        block=256,
        grid=2,
        contains=("F2FP.BF16.F32.PACK_AB|F2FP.BF16.PACK_AB",),
        oldest="sm_80",
    ),
    copy_case("u32x4", load_u32x4, store_u32x4, 4, uint32, ".128"),
    Case(
        "once",
        once_kernel,
        once_inputs,
        once_expected,
        block=64,
        contains=("LDG.E.NA.128", "STG.E.128"),
    ),
    copy_case("u32x2", load_u32x2, store_u32x2, 2, uint32, ".64"),
    Case(
        "bits",
        bits_kernel,
        bits_inputs,
        lambda x, w: (x.view(np.uint32), w.view(np.float32)),
        block=256,
    ),
    copy_case("f32x4", load_f32x4, store_f32x4, 4, float32, ".128"),
    copy_case("f32x2", load_f32x2, store_f32x2, 2, float32, ".64"),
    copy_case("f32", load_f32, store_f32, 1, float32, ""),
    copy_case("u32", load_u32, store_u32, 1, uint32, ""),
    copy_case("u16", load_u16, store_u16, 1, uint16, ".U16"),
    Case(
        "bytes",
        bytes_kernel,
        lambda rng: (rng.integers(0, 256, 32 * 18).astype(np.uint8),),
        bytes_expected,
        contains=("LDG.E.U16", "STS.U16"),
    ),
    Case("aligned", aligned_kernel, aligned_inputs, aligned_expected, contains=("LDG.E.128",)),
    gemm_8_case("gemm_s8", mma_m16n8k32_s8, np.int8, "IMMA.16832.S8.S8"),
    gemm_8_case("gemm_u8", mma_m16n8k32_u8, np.uint8, "IMMA.16832.U8.S8"),
    gemm_16_case("gemm_f16", mma_m16n8k16_f16, float16_bits, float16_values, 512, "HMMA.16816.F32"),
    gemm_16_case(
        "gemm_bf16", mma_m16n8k16_bf16, bfloat16_bits, bfloat16_values, 255, "HMMA.16816.F32.BF16"
    ),
    Case(
        "gemm_tf32",
        gemm_tf32_kernel,
        gemm_tf32_inputs,
        gemm_tf32_expected,
        contains=("HMMA.1688.F32.TF32",),
        oldest="sm_80",
    ),
    Case(
        "ldmatrix",
        ldmatrix_kernel,
        lambda rng: (rng.integers(0, 1 << 16, (32, 8)).astype(np.uint16),),
        ldmatrix_expected,
        contains=("LDSM.16.M88.4", "LDSM.16.MT88.4"),
    ),
    Case(
        "cp_async_pipeline",
        pipeline_kernel,
        pipeline_inputs,
        pipeline_expected,
        block=64,
        contains=("LDGSTS.E.BYPASS.128", "LDGDEPBAR", "DEPBAR.LE"),
        oldest="sm_80",
    ),
    Case(
        "gather",
        gather_kernel,
        lambda rng: (rng.normal(size=70).astype(np.float32),),
        gather_expected,
        contains=("LDGSTS.E",),
        oldest="sm_80",
    ),
    Case(
        "launch_order",
        ordered_kernel,
        lambda rng: (rng.integers(0, 99, 32).astype(np.int32),),
        lambda x: (x + 1,),
    ),
    Case(
        "relaxed",
        relaxed_kernel,
        lambda rng: (words(rng, 128),),
        relaxed_expected,
        contains=("LDG.E.128.STRONG.GPU", "STG.E.64.STRONG.GPU"),
    ),
    Case(
        "relaxed_small",
        relaxed_small_kernel,
        lambda rng: (words(rng, 64),),
        relaxed_small_expected,
        block=64,
        contains=("LDG.E.STRONG.GPU", "STG.E.U16.STRONG.GPU"),
    ),
    Case(
        "relaxed_words",
        relaxed_words_kernel,
        lambda rng: (words(rng, 128),),
        relaxed_words_expected,
        contains=("LDG.E.128.STRONG.GPU", "STG.E.STRONG.GPU", "BPT.TRAP"),
    ),
    Case(
        "system",
        system_kernel,
        lambda rng: (words(rng, 64),),
        system_expected,
        block=64,
        contains=("LDG.E.STRONG.SYS", "STG.E.STRONG.SYS"),
    ),
    Case(
        "transpose",
        transpose_kernel,
        lambda rng: (words(rng, 32),),
        transpose_expected,
        contains=("MOVM.16.MT88",),
    ),
    Case(
        "shuffles",
        shuffle_kernel,
        lambda rng: (words(rng, 32).view(np.int32), rng.normal(size=32).astype(np.float32)),
        shuffle_expected,
        contains=("SHFL.IDX", "SHFL.BFLY", "SHFL.UP"),
    ),
    Case("numba_warp", numba_warp_kernel, int_pair, numba_warp_expected, block=64),
)
