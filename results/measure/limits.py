"""What this GPU can do at most, measured: the ceilings that every row is held against.

Data sheets are no use here: they give peaks at a clock the GPU may not hold, count sparse
operations, or leave out what one needs (32-bit integer multiply-adds). So each ceiling is a small
kernel that does one thing and nothing else, on random data (zeros draw less power, so they clock
higher), its result consumed so that the compiler cannot drop it; the tests look for the
instruction in the loop of the machine code. The best of several block counts is taken: a limit is
what was reached at best, unlike a row, which is a median.

    unit           one instruction does           counted as
    fp32           FFMA                           2 operations a lane
    int32          IMAD (32 x 32 + 32 bits)       2 operations a lane
    packed_int32   the same IMAD carrying two     4 operations a lane: twice the rate of int32
                   8-bit products side by side
    dp4a           IDP.4A, 4 x int8               8 operations a lane
    tensor_int8    mma.sync m16n8k32 s8           2 x 16 x 8 x 32 a warp
                   wgmma m64n256k32 s8            2 x 64 x 256 x 32 a warpgroup, on 9.0 alone
    tensor_fp16    mma.sync m16n8k16 f16 -> f32   2 x 16 x 8 x 16 a warp
                   wgmma m64n256k16 f16 -> f32    2 x 64 x 256 x 16 a warpgroup, on 9.0 alone
    tensor_sparse  wgmma.sp m64n256k32 f16        2 x 64 x 256 x 32 a warpgroup, zeros included

Where two instructions use one unit, the faster one is its limit: a step is held to what the tensor
cores can do, and not to what its own instruction lets them.

A multiply-add is two operations everywhere, so a limit compares with a row's 2 M N K / time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final

import numpy as np

from results.record.schema import Limits

THREADS: Final = 256
BLOCKS_PER_SM: Final = (1, 2, 4, 8)
CHAINS: Final = 16  # independent accumulators a thread: an FMA is 4 cycles deep
UNROLL: Final = 8  # so that the loop's own counter and branch are 3 of some 130 instructions
SEEDS: Final = 4096  # random words that a kernel starts from
LOAD_VECTORS: Final = 4  # 16-byte loads in flight a thread
TILE: Final = THREADS * LOAD_VECTORS  # 16-byte vectors a block copies
LAUNCH_SECONDS: Final = 2e-3
SAMPLES: Final = 8
COPY_BYTES: Final = 512 << 20  # several L2s, so that nothing of it is found there
COPIES: Final = 8  # in one graph, whose start of some 6 us would be 2 % of a single copy


@dataclass(frozen=True, slots=True)
class Ceiling:
    """One arithmetic limit: its kernel(seeds, out, rounds), and the operations of one round.

    `opcodes` are the SASS opcodes that do the work.
    """

    unit: str
    kernel: Callable[[], Any]
    operations: int  # of one thread in one round
    opcodes: tuple[str, ...]
    seed_dtype: type
    min_cc: tuple[int, int] = (7, 5)
    max_cc: tuple[int, int] | None = None


@cache
def multiply_add_loop(name: str) -> Any:
    """acc = acc * a + b in a Numba type: float32 (finite, as |a| < 1) or int32 (modulo 2^32)."""
    import numba
    from numba import cuda

    number = getattr(numba, name)

    @cuda.jit
    def multiply_add(seeds, out, rounds):
        t = cuda.grid(1)
        acc = cuda.local.array(CHAINS, number)
        for j in range(CHAINS):
            acc[j] = seeds[(t + 97 * j) % SEEDS]
        a, b = seeds[t % SEEDS], seeds[(t + 1) % SEEDS]
        for _ in range(rounds):
            for _ in range(UNROLL):
                for j in range(CHAINS):
                    acc[j] = number(acc[j] * a + b)
        total = number(0)
        for j in range(CHAINS):
            total = number(total + acc[j])
        out[t] = total

    return multiply_add


@cache
def dp4a_loop() -> Any:
    """Dot products of four int8 pairs; operands differ between the chains."""
    from numba import cuda, int32

    from steps.instructions import dp4a

    @cuda.jit
    def dot(seeds, out, rounds):
        t = cuda.grid(1)
        acc = cuda.local.array(CHAINS, int32)
        a = cuda.local.array(4, int32)
        b = cuda.local.array(4, int32)
        for j in range(CHAINS):
            acc[j] = seeds[(t + 97 * j) % SEEDS]
        for j in range(4):
            a[j] = seeds[(t + j) % SEEDS]
            b[j] = seeds[(t + 4 + j) % SEEDS]
        for _ in range(rounds):
            for _ in range(UNROLL):
                for j in range(CHAINS):
                    acc[j] = dp4a(a[j // 4], b[j % 4], acc[j])
        total = int32(0)
        for j in range(CHAINS):
            total = int32(total + acc[j])
        out[t] = total

    return dot


TILES_M: Final = 2  # mma tiles of a warp: 2 x 4, so that 8 of them are in flight and the
TILES_N: Final = 4  # operands change from one to the next, as in a matrix product
A_WORDS: Final = 4 * TILES_M  # registers of the A fragments, of the B fragments
B_WORDS: Final = 2 * TILES_N
C_WORDS: Final = 4 * TILES_M * TILES_N  # and accumulators, a thread


@cache
def mma_loop(instruction: str, name: str) -> Any:
    """Tensor-core products of one warp's 32 x 32 tile, accumulated in a Numba type."""
    import numba
    from numba import cuda, uint32

    from steps import instructions

    mma, number = getattr(instructions, instruction), getattr(numba, name)

    @cuda.jit
    def tensor_core(seeds, out, rounds):
        t = cuda.grid(1)
        a = cuda.local.array(A_WORDS, uint32)
        b = cuda.local.array(B_WORDS, uint32)
        c = cuda.local.array(C_WORDS, number)
        for j in range(A_WORDS):
            a[j] = uint32(seeds[(t + j) % SEEDS])
        for j in range(B_WORDS):
            b[j] = uint32(seeds[(t + 97 + j) % SEEDS])
        for j in range(C_WORDS):
            c[j] = number(0)
        for _ in range(rounds):
            for _ in range(UNROLL):
                for i in range(TILES_M):
                    for j in range(TILES_N):
                        at = 4 * (i * TILES_N + j)
                        c[at], c[at + 1], c[at + 2], c[at + 3] = mma(
                            a[4 * i],
                            a[4 * i + 1],
                            a[4 * i + 2],
                            a[4 * i + 3],
                            b[2 * j],
                            b[2 * j + 1],
                            c[at],
                            c[at + 1],
                            c[at + 2],
                            c[at + 3],
                        )
        total = number(0)
        for j in range(C_WORDS):
            total = number(total + c[j])
        out[t] = total

    return tensor_core


COLUMNS: Final = 256  # of a wgmma: N
TOGETHER: Final = (
    4  # of them before one waits: the other warpgroup's then keep the tensor cores busy
)
SUMS: Final = COLUMNS // 2  # that a thread holds of 64 x COLUMNS
GROUP: Final = 128  # threads of a warpgroup, which executes it together
B_SHARED: Final = TOGETHER * COLUMNS * 8  # words: 32 bytes a column for each wgmma of a round
POSITIONS: Final = 0x4E9D8C4E  # of what a sparse A keeps: any two of each four


@cache
def wgmma_loop(instruction: str, name: str, zeros: str) -> Any:
    """Tensor-core products of a warpgroup's 64 x 256 tile: A in registers, B in shared memory. A
    sparse product reads twice as much of B, so that two of them read what four others do."""
    import numba
    from numba import cuda, int32, uint32

    from steps import instructions
    from steps.instructions import (
        fence_proxy_async,
        matrix_descriptor,
        spread,
        wgmma_commit,
        wgmma_fence,
    )

    wgmma, number = getattr(instructions, instruction), getattr(numba, name)
    places, ahead = TOGETHER, 2 * COLUMNS  # of B, and how far from one to the next in a descriptor
    if instruction == "wgmma_sparse_f16":
        sparse, places, ahead = wgmma(0), TOGETHER // 2, 4 * COLUMNS

        @cuda.jit(device=True, forceinline=True)
        def wgmma(acc, a0, a1, a2, a3, where, accumulate):
            return sparse(acc, a0, a1, a2, a3, where, POSITIONS, accumulate)

    no_sums, wait_for_all = getattr(instructions, zeros)(SUMS), instructions.wgmma_wait(0)

    @cuda.jit(launch_bounds=(THREADS, 1))
    def warpgroup(seeds, out, rounds):
        b = cuda.shared.array(B_SHARED, uint32, alignment=128)
        sums = cuda.local.array(SUMS, number)
        t = cuda.grid(1)
        for j in range(cuda.threadIdx.x, B_SHARED, THREADS):
            b[j] = uint32(seeds[(t + j) % SEEDS])
        fence_proxy_async()
        cuda.syncthreads()
        a0, a1 = uint32(seeds[t % SEEDS]), uint32(seeds[(t + 1) % SEEDS])
        a2, a3 = uint32(seeds[(t + 2) % SEEDS]), uint32(seeds[(t + 3) % SEEDS])
        where = matrix_descriptor(b, 0, 16 * COLUMNS, 128)
        acc = no_sums()
        done = int32(0)
        while True:  # a loop that may run no time at all would zero the sums a second time
            wgmma_fence()
            for i in range(TOGETHER):
                acc = wgmma(acc, a0, a1, a2, a3, where + ahead * (i % places), 1)
            wgmma_commit()
            acc = wait_for_all(acc)
            done = int32(done + 1)
            if done >= rounds:
                break
        spread(sums, acc)
        total = number(0)
        for j in range(SUMS):
            total = number(total + sums[j])
        out[t] = total

    return warpgroup


_SCALAR: Final = 2 * CHAINS * UNROLL
_MMA: Final = 2 * 16 * 8 * TILES_M * TILES_N * UNROLL // 32  # per k and thread of the warp
_WGMMA: Final = 2 * 64 * COLUMNS * TOGETHER // GROUP  # the same of a warpgroup
_INT8: Final = partial(mma_loop, "mma_m16n8k32_s8", "int32")
_FP16: Final = partial(mma_loop, "mma_m16n8k16_f16", "float32")
_INT8_GROUP: Final = partial(wgmma_loop, "wgmma_s8", "int32", "zeros_i32")
_FP16_GROUP: Final = partial(wgmma_loop, "wgmma_f16", "float32", "zeros_f32")
_SPARSE_GROUP: Final = partial(wgmma_loop, "wgmma_sparse_f16", "float32", "zeros_f32")
_HOPPER: Final = (9, 0)  # earlier ones have no wgmma, later ones neither
CEILINGS: Final = (
    Ceiling("fp32", partial(multiply_add_loop, "float32"), _SCALAR, ("FFMA",), np.float32),
    Ceiling("int32", partial(multiply_add_loop, "int32"), _SCALAR, ("IMAD",), np.int32),
    Ceiling("dp4a", dp4a_loop, 4 * _SCALAR, ("IDP",), np.int32),
    Ceiling("tensor_int8", _INT8, 32 * _MMA, ("IMMA",), np.int32, (8, 0)),
    Ceiling("tensor_fp16", _FP16, 16 * _MMA, ("HMMA",), np.uint32, (8, 0)),
    Ceiling("tensor_int8", _INT8_GROUP, 32 * _WGMMA, ("IGMMA",), np.int32, _HOPPER, _HOPPER),
    Ceiling("tensor_fp16", _FP16_GROUP, 16 * _WGMMA, ("HGMMA",), np.uint32, _HOPPER, _HOPPER),
    Ceiling("tensor_sparse", _SPARSE_GROUP, 32 * _WGMMA, ("HGMMA",), np.uint32, _HOPPER, _HOPPER),
)


@cache
def copy_tiles() -> Any:
    """dst = src, 16 bytes at a time, four loads in flight before the first store."""
    from numba import cuda

    from steps.instructions import load_f32x4, store_f32x4

    @cuda.jit
    def copy(src, dst):
        i = 4 * (cuda.blockIdx.x * TILE + cuda.threadIdx.x)
        a0, a1, a2, a3 = load_f32x4(src, i)
        b0, b1, b2, b3 = load_f32x4(src, i + 4 * THREADS)
        c0, c1, c2, c3 = load_f32x4(src, i + 8 * THREADS)
        d0, d1, d2, d3 = load_f32x4(src, i + 12 * THREADS)
        store_f32x4(dst, i, a0, a1, a2, a3)
        store_f32x4(dst, i + 4 * THREADS, b0, b1, b2, b3)
        store_f32x4(dst, i + 8 * THREADS, c0, c1, c2, c3)
        store_f32x4(dst, i + 12 * THREADS, d0, d1, d2, d3)

    return copy


@cache
def read_tiles() -> Any:
    """The sum of a tile's values per thread, so that every byte is read and little is written."""
    from numba import cuda

    from steps.instructions import load_f32x4

    @cuda.jit
    def read(src, out):
        i = 4 * (cuda.blockIdx.x * TILE + cuda.threadIdx.x)
        a0, a1, a2, a3 = load_f32x4(src, i)
        b0, b1, b2, b3 = load_f32x4(src, i + 4 * THREADS)
        c0, c1, c2, c3 = load_f32x4(src, i + 8 * THREADS)
        d0, d1, d2, d3 = load_f32x4(src, i + 12 * THREADS)
        total = (a0 + a1 + a2 + a3) + (b0 + b1 + b2 + b3)
        total += (c0 + c1 + c2 + c3) + (d0 + d1 + d2 + d3)
        out[(cuda.blockIdx.x * THREADS + cuda.threadIdx.x) % SEEDS] = total

    return read


def seeds_for(ceiling: Ceiling) -> np.ndarray:
    """SEEDS random values: float32 in (-1, 1), any 32 bits, or pairs of halves in (-1, 1)."""
    rng = np.random.default_rng(0)
    if ceiling.seed_dtype is np.float32:
        return rng.uniform(-1, 1, SEEDS).astype(np.float32)
    if ceiling.unit in ("tensor_fp16", "tensor_sparse"):
        return rng.uniform(-1, 1, 2 * SEEDS).astype(np.float16).view(np.uint32)
    return rng.integers(-(2**31), 2**31, SEEDS, dtype=np.int64).astype(ceiling.seed_dtype)


def launch_of(ceiling: Ceiling, seeds: Any, out: Any, blocks: int, rounds: int) -> Any:
    """The launch as data (steps.contract.Launch)."""
    from steps.contract import Launch

    return Launch(ceiling.kernel(), (blocks,), (THREADS,), (seeds, out, rounds))


def best_seconds(stopwatch: Any, launch: Any, samples: int = SAMPLES, repeat: int = 1) -> float:
    """Seconds of one launch: the shortest of `samples` runs of `repeat`, after one to warm up."""
    replay = stopwatch.capture((launch,) * repeat)
    replay.seconds()
    return min(replay.seconds() for _ in range(samples)) / repeat


def arithmetic_tops(stopwatch: Any, machine: Any, ceiling: Ceiling, sms: int) -> float:
    """1e12 operations a second, the best of BLOCKS_PER_SM."""
    seeds = machine.array(seeds_for(ceiling))
    out = machine.empty((sms * max(BLOCKS_PER_SM) * THREADS,), ceiling.seed_dtype)
    best = 0.0
    for per_sm in BLOCKS_PER_SM:
        blocks, rounds = sms * per_sm, 128
        machine.run(launch_of(ceiling, seeds, out, blocks, rounds))  # compiles
        seconds = best_seconds(stopwatch, launch_of(ceiling, seeds, out, blocks, rounds), 2)
        rounds = max(rounds, int(rounds * LAUNCH_SECONDS / seconds))
        seconds = best_seconds(stopwatch, launch_of(ceiling, seeds, out, blocks, rounds))
        best = max(best, blocks * THREADS * rounds * ceiling.operations / seconds * 1e-12)
    if not np.any(machine.host(out)):
        raise RuntimeError(f"the {ceiling.unit} loop wrote nothing: its rate means nothing")
    return best


def memory_tbps(stopwatch: Any, machine: Any, size: int) -> tuple[float, float]:
    """(copied: read + written, read only) in 1e12 bytes a second, on `size` bytes of noise."""
    from steps.contract import Launch

    size = size // (16 * TILE) * (16 * TILE)
    noise = np.random.default_rng(0).standard_normal(4 << 20, dtype=np.float32)
    noise = np.resize(noise, size // 4)
    source = machine.array(noise)
    target = machine.empty((size // 4,), np.float32)
    sums = machine.empty((SEEDS,), np.float32)
    blocks = size // (16 * TILE)
    copy = Launch(copy_tiles(), (blocks,), (THREADS,), (source, target))
    read = Launch(read_tiles(), (blocks,), (THREADS,), (source, sums))
    for launch in (copy, read):
        machine.run(launch)
    if not np.array_equal(machine.host(target), noise):
        raise RuntimeError("the copy kernel does not copy: its rate means nothing")
    return (
        2 * size / best_seconds(stopwatch, copy, repeat=COPIES) * 1e-12,
        size / best_seconds(stopwatch, read, repeat=COPIES) * 1e-12,
    )


def measure_limits(stopwatch: Any, machine: Any) -> Limits:
    """Every ceiling of the current GPU; a few milliseconds each on it, some seconds to compile."""
    from numba import cuda

    device = cuda.get_current_device()
    sms = int(device.MULTIPROCESSOR_COUNT)
    cc, tops = tuple(device.compute_capability), dict[str, float]()
    for ceiling in CEILINGS:
        if ceiling.min_cc <= cc <= (ceiling.max_cc or cc):
            reached = arithmetic_tops(stopwatch, machine, ceiling, sms)
            tops[ceiling.unit] = max(reached, tops.get(ceiling.unit, 0.0))
    tops["packed_int32"] = 2 * tops["int32"]  # two products in one multiply-add
    free = int(cuda.current_context().get_memory_info().free)
    copied, read = memory_tbps(stopwatch, machine, min(COPY_BYTES, free // 4))
    return Limits(copy_tbps=copied, read_tbps=read, tops=tops)
