"""Step 9: cp_async - copies run on their own, several stages ahead of the products.

What is new
    `cp.async` copies from global to shared memory without a register and without a wait: a thread
    issues it and goes on. So shared memory holds a *ring* of stages: while one is multiplied, the
    others are being filled. A step is 128 K; step s uses stage s % 4. Over time:

        stage 0  |== copy 0 ==| mul 0 |======= copy 4 ========| mul 4 |=====
        stage 1  |== copy 1 ==|       | mul 1 |======= copy 5 ========| mul 5
        stage 2  |== copy 2 ==|               | mul 2 |======= copy 6 ======
        stage 3  |== copy 3 ==|                       | mul 3 |==== copy 7 =

    A thread closes its copies of a step into a *group*; `wait_group n` waits until all but its
    newest n groups have arrived. Then one barrier a step says two things. The copies of *all*
    threads are there: the next stage may be read. And all threads have read the stage before: it
    may be filled again.
Why it should help
    Step 8 stops in every step of K: for its loads, at two barriers, and for its first fragments,
    some 900 cycles. The other block of the SM hides most of that, not all. Here a copy has three
    steps, 8000 cycles, to arrive, and the first fragments of the next stage are loaded under the
    last products of this one. What is left is 22 cycles an IMMA, 4096 of them on each scheduler,
    and a tenth more: predicted 57 us where step 8 takes 64, 1.12x.
What it costs
    Shared memory for four stages: 72 to 104 KB a block, twice that on an SM.
Machine code
    LDGSTS where there were LDG and STS; one BAR.SYNC in the loop; LDGDEPBAR closes a group.
Prerequisites
    Step 8: its loop, kernels.prefill.warp_tile, and kernels.prefill.shared_stage, here with
    cp.async copies (`ring_stages` there says how many stages fit).
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from numba import cuda, float32, int32, uint8, uint32

from qformats import Format
from qformats.repack import CHUNK, TILE_K, tiles
from steps.blocks.q8_1 import q8_1_mma_order
from steps.contract import Family, Launch, Shape, Step, ceil_div
from steps.instructions import cp_async_4, cp_async_16, cp_async_commit, cp_async_wait
from steps.kernels.parts.epilogue.bias import bias_operand
from steps.kernels.parts.epilogue.mma import write_sums
from steps.kernels.parts.weights.codes import tile_format
from steps.kernels.prefill.shared_stage import BN, THREADS, ring_stages, stage_copies, stage_layout
from steps.kernels.prefill.warp_tile import A_WORDS, ROW_TILES, SCALE_WORDS, WARP_N, warp_tile

BM: Final = 64  # tokens of a tile, as in step 8
COLUMNS: Final = BM // 8  # mma of a warp side by side along the tokens
SUMS: Final = 4 * ROW_TILES * COLUMNS  # of a thread
B_WORDS: Final = 2 * COLUMNS  # registers for the B fragments of a block, or for token scales
BLOCKS_PER_SM: Final = 2  # as many as their registers allow
STAGES: Final = 4  # of the ring, at most: more hide nothing further


@cache
def kernel(fmt: Format, stages: int, of_bias: str | None) -> Any:
    """The kernel with a ring of `stages`, two at least, for a bias of dtype `of_bias` or none."""
    tile, stage_bytes = tile_format(fmt.name), stage_layout(fmt, BM).stage_bytes
    minimum, warp_bytes = tile.minimum, ROW_TILES * tile.tile_bytes
    ring_bytes = stages * stage_bytes
    copies = stage_copies(fmt, BM, cp_async_16, cp_async_4)
    first_source, next_source, copy_weights, copy_tokens = copies
    wt = warp_tile(fmt, BM)
    load_weights, load_scales, load_tokens = wt.load_weights, wt.load_scales, wt.load_tokens
    load_token_scales, multiply, add_minima = wt.load_token_scales, wt.multiply, wt.add_minima
    write = write_sums(ROW_TILES, COLUMNS, of_bias)
    # At first all copies but those of the first step may still be in flight. In step s, when
    # stages + s groups are closed, those behind step s + 1, which is read next.
    wait_for_first, wait_for_next = cp_async_wait(stages - 1), cp_async_wait(stages - 2)

    @cuda.jit(launch_bounds=(THREADS, BLOCKS_PER_SM))
    def w4a8_cp_async(w, row_scales, bias, qa, ds, c, steps):
        """c[M, N] = a @ dequantize(w)[N, K]^T; w, row_scales: qformats.repack.tiles,
        a: K-outermost."""
        ring = cuda.shared.array(0, uint8, alignment=128)
        acc = cuda.local.array(SUMS, float32)
        a = cuda.local.array(A_WORDS, uint32)  # registers as in step 8
        scales = cuda.local.array(SCALE_WORDS, uint32)
        b_even = cuda.local.array(B_WORDS, uint32)
        b_odd = cuda.local.array(B_WORDS, uint32)
        token_scales = cuda.local.array(B_WORDS, float32)
        t, M, count = int32(cuda.threadIdx.x), int32(c.shape[0]), int32(steps)
        warp, lane = t >> 5, t & 31
        m0, n0 = int32(cuda.blockIdx.y * BM), int32(cuda.blockIdx.x * BN)
        # where in a stage this lane reads, as in step 8
        weights_at = warp * warp_bytes
        row_at = ((lane >> 3 & 1) * BM + (lane >> 4) * 8 + (lane & 7)) * CHUNK
        scales_at = 16 * (lane & 3)
        for i in range(SUMS):
            acc[i] = 0

        # --- issue the copies of the first stages. A group is closed for each, even for those
        # beyond K: the waits count groups
        source = first_source(t, m0, n0, 0, count, M)
        for step in range(stages):
            if step < count:
                copy_weights(ring, step * stage_bytes + 16 * t, w, source)
                copy_tokens(ring, step * stage_bytes + 16 * t, qa, ds, source, M)
                source = next_source(source, M)
            cp_async_commit()

        # --- wait for stage 0, and load its weights, scales and first tokens
        wait_for_first()
        cuda.syncthreads()
        stage, to = int32(0), int32(16 * t)  # where it begins; where this thread copies into it
        load_weights(a, ring, weights_at, lane, 0)
        load_scales(scales, ring, weights_at, lane)
        load_tokens(b_even, ring, row_at, 0)
        for step in range(count):
            # --- multiply three blocks of K; the next one's fragments are on their way meanwhile
            load_token_scales(token_scales, ring, stage + scales_at, 0)
            load_tokens(b_odd, ring, stage + row_at, 1)
            multiply(acc, a, b_even, token_scales, scales, 0)
            load_token_scales(token_scales, ring, stage + scales_at, 1)
            load_tokens(b_even, ring, stage + row_at, 2)
            multiply(acc, a, b_odd, token_scales, scales, 1)
            load_weights(a, ring, stage + weights_at, lane, 1)
            load_token_scales(token_scales, ring, stage + scales_at, 2)
            load_tokens(b_odd, ring, stage + row_at, 3)
            multiply(acc, a, b_even, token_scales, scales, 2)
            if minimum:
                add_minima(acc, ring, stage, stage + weights_at, lane)
            load_token_scales(token_scales, ring, stage + scales_at, 3)

            # --- go on to the next stage of the ring when it has arrived for all threads, and all
            # have read this one to its end: what its last block needs is in registers
            wait_for_next()
            cuda.syncthreads()
            stage = int32(stage + stage_bytes)
            if stage == ring_bytes:
                stage = int32(0)
            load_tokens(b_even, ring, stage + row_at, 0)

            # --- refill the stage that was just read: this thread copies to `to`. `stage` is
            # already the next one: there it will copy in the next turn
            if step + stages < count:
                copy_weights(ring, to, w, source)
                copy_tokens(ring, to, qa, ds, source, M)
                source = next_source(source, M)
            cp_async_commit()
            to = int32(stage + 16 * t)

            # --- multiply the last block, then load the weights and scales of the next stage
            multiply(acc, a, b_odd, token_scales, scales, 3)
            load_weights(a, ring, stage + weights_at, lane, 0)
            load_scales(scales, ring, stage + weights_at, lane)
        write(c, m0, n0 + WARP_N * warp, lane, acc, row_scales, bias)

    return w4a8_cp_async


def launch(
    fmt: Format, family: Family, shape: Shape, weights: tuple, activations: tuple, out: Any
) -> Launch:
    grid = (ceil_div(shape.n, BN), ceil_div(shape.m, BM))
    stages, ring_bytes = ring_stages(fmt, BM, BLOCKS_PER_SM, STAGES)
    of_bias, weights = bias_operand(weights)
    args = (*weights, *activations, out, ceil_div(shape.k, TILE_K))
    return Launch(kernel(fmt, stages, of_bias), grid, (THREADS,), args, ring_bytes)


STEP = Step(
    number=9,
    name="step09_cp_async",
    title="a ring of stages: cp.async copies run ahead of the products",
    branch="int8",
    families=("A8",),
    parents={"A8": 8},
    unit={"A8": "tensor_int8"},
    pack=tiles,
    activations={"A8": q8_1_mma_order},
    launch=launch,
    adds_bias=True,
    min_cc=(8, 0),
    contains={"A8": ("IMMA", "LDGSTS.E.BYPASS.128", "LDSM.16.M88.4", "LDGDEPBAR", "BAR.SYNC")},
    forbids={"A8": ("STS", "IDP")},
    chosen_untuned=True,
)
