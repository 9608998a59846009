"""The weighted sum over a token's experts, in the product: for a single token.

`few` leaves each product to another launch that adds them up. Here the reduction is longer instead:
an output is a sum over S experts of K each, and a thread block has 16 of them, with all experts.

    C[n] = sum over s of router[s] * (W[ids[s], n] . A[s])

An mma has eight columns and there is one token, so two experts share it: its two row tiles are of
experts s and s + 1, the same 16 rows of both, and of its columns 0 and 1, which are A of the two
slots, each row tile needs one. A third of the weights may be asked for before A is there, as ids
are older than A.

There are as many thread blocks as row tiles: where an SM gets two and another one, half of the time
one of them waits (`suits`). Several tokens would be as many rounds of thread blocks.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, Final

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32

from qformats import FORMATS
from qformats.repack import TILE_K, TILE_ROWS
from qformats.storage import storage_format
from steps.contract import Launch, ceil_div, dtype_name, multiprocessors, shared_memory
from steps.instructions import (
    bulk_copy,
    fence_mbarrier_init,
    fence_proxy_async,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    load_f32,
    mbarrier_arrive_expect,
    mbarrier_init,
    mbarrier_wait,
    prefetch_l2,
    shfl,
    store_f32,
    store_u32x4,
)
from steps.kernels.decode.copies import PAD, ROW_BYTES
from steps.kernels.decode.product import PAIR, product_a16
from steps.kernels.experts.contract import ExpertsOperands, ExpertsRequest
from steps.kernels.experts.grouping import id_of
from steps.kernels.parts.epilogue.bias import LOAD_BIAS
from steps.kernels.parts.epilogue.rounded import STORE
from steps.kernels.parts.weights.codes import tile_index
from steps.kernels.parts.weights.storage_formats import tile_format

WARP: Final = 32
NAN: Final = math.nan
CHUNK: Final = 16
PITCH: Final = ROW_BYTES + PAD
WARPS: Final = 16
"""Of a thread block."""

H200_STAGES: Final = 3
"""Of a warp's ring, at most."""

H200_AHEAD: Final = 1
"""Of them, those asked for before A, where A is still being written."""

LEAST_SHARE: Final = 0.85
"""Of the SMs' time in which they have a thread block, where all have as many, or one more."""


def suits(request: ExpertsRequest) -> bool:
    """Whether this is the kernel for a weighted sum."""
    blocks, sms = ceil_div(request.n, TILE_ROWS), multiprocessors()
    used = blocks / (ceil_div(blocks, sms) * sms)
    return request.tokens == 1 and request.chosen <= WARP and used >= LEAST_SHARE


@cache
def kernel(
    name: str, stages: int, kind: str, output: str, of_ids: str, of_bias: str | None,
    of_router: str, scaled: bool, follows: bool,
) -> Any:  # fmt: skip
    """The kernel of a storage format; dtypes of A, C, ids, bias (None for none) and the router's
    weights. scaled: whether rows of A have scales; follows: see `ExpertsRequest`."""
    product, expert = product_a16(name, kind, PAIR), id_of(of_ids)
    places, multiply, finish, scale = (
        product.places, product.multiply, product.finish, product.scale,
    )  # fmt: skip
    n_acc, ahead = product.sums, min(stages, H200_AHEAD) if follows else stages
    tile_bytes, warps, threads = tile_format(name).tile_bytes, WARPS, WARP * WARPS
    weights = PAIR * tile_bytes
    slot_bytes = weights + PAIR * PITCH
    bars_at = warps * stages * slot_bytes
    sums_at = bars_at + ceil_div(8 * warps * stages, 128) * 128
    biased, load_bias = of_bias is not None, LOAD_BIAS[of_bias or "float32"]
    load_router, store = LOAD_BIAS[of_router], STORE[output]

    @cuda.jit(device=True, forceinline=True)
    def issue(smem, slot, bar, w, a, u, stop, own, row_tile, sizes, lane, of_w, of_a):
        """Issue the copies of step u, of weights (of_w) and of A (of_a), if it is before `stop`.
        own: the expert of slot `lane`."""
        k_tiles, row_tiles, _, _, chosen = sizes
        if u < stop:
            j = int32(uint32(u) // uint32(k_tiles))
            k_tile, K = int32(u - j * k_tiles), int32(a.shape[1])
            size = int32(2 * min(TILE_K, int32(K - k_tile * TILE_K)))
            if of_w and lane == 0:
                mbarrier_arrive_expect(smem, bar, int32(weights + PAIR * size))
            # an odd last expert is there twice, and counts once
            s = int32(min(int32(PAIR * j + lane), int32(chosen - 1)))
            e = max(shfl(own, s), 0)
            if lane < PAIR:
                if of_w:
                    tile = int64(e) * (row_tiles * k_tiles) + tile_index(row_tile, k_tile, k_tiles)
                    at = int32(slot + lane * tile_bytes)
                    bulk_copy(smem, at, w, tile * tile_bytes, tile_bytes, smem, bar)
                if of_a:
                    at = int32(slot + weights + lane * PITCH)
                    bulk_copy(smem, at, a, int64(s) * K + k_tile * TILE_K, size, smem, bar)
                    if size < ROW_BYTES:  # behind the end of A zeros
                        zero, i = uint32(0), size
                        while i < ROW_BYTES:
                            store_u32x4(smem, at + i, zero, zero, zero, zero)
                            i = int32(i + CHUNK)
                        fence_proxy_async()  # before a copy of another step comes there

    @cuda.jit(launch_bounds=(threads, 1))
    def summed(w, row_scales, a, token_scales, ids, bias, router, c, sizes):
        """sizes: (K tiles, row tiles of an expert, E, N, S), int32. c: [1, N], a: [S, K]."""
        smem = cuda.shared.array(0, uint8, alignment=128)
        acc, totals = cuda.local.array(n_acc, float32), cuda.local.array(2, float32)
        factors = cuda.local.array((PAIR, 2), float32)
        added = cuda.local.array((PAIR, 2), float32)
        shares = cuda.local.array(PAIR, float32)
        t = int32(cuda.threadIdx.x)
        lane, warp = int32(t & 31), shfl(int32(t >> 5), 0)
        k_tiles, row_tiles, E, N, chosen = sizes
        row_tile = int32(cuda.blockIdx.x)
        row = int32(row_tile * TILE_ROWS + (lane >> 2))
        ring, bars = int32(warp * (stages * slot_bytes)), int32(bars_at + warp * (8 * stages))
        if lane == 0:
            for s in range(stages):
                mbarrier_init(smem, bars + 8 * s, 1)
            fence_mbarrier_init()
        cuda.syncwarp()
        if not follows:
            griddepcontrol_wait()

        # --- experts, and their shares, of all slots: one in each lane
        own, own_share = int32(0), float32(0)
        if lane < chosen:
            own = expert(ids, lane, E)
            own_share = load_router(router, lane)
            own_share = own_share if own >= 0 else float32(NAN)
        cuda.syncwarp()
        steps = uint32(int32((chosen + 1) >> 1) * k_tiles)
        u = int32(uint32(steps * uint32(warp)) // uint32(warps))
        stop = int32(uint32(steps * uint32(warp + 1)) // uint32(warps))
        for s in range(ahead):
            issue(
                smem, ring + s * slot_bytes, bars + 8 * s, w, a, int32(u + s), stop, own,
                row_tile, sizes, lane, True, not follows,
            )  # fmt: skip
        griddepcontrol_launch_dependents()
        if follows:
            griddepcontrol_wait()
            for s in range(ahead):
                issue(
                    smem, ring + s * slot_bytes, bars + 8 * s, w, a, int32(u + s), stop, own,
                    row_tile, sizes, lane, False, True,
                )  # fmt: skip
        for s in range(ahead, stages):
            issue(
                smem, ring + s * slot_bytes, bars + 8 * s, w, a, int32(u + s), stop, own,
                row_tile, sizes, lane, True, True,
            )  # fmt: skip
        if warp == 0 and lane < chosen:  # would be waited for in the stream
            at = max(own, 0) * (row_tiles * TILE_ROWS) + row_tile * TILE_ROWS
            prefetch_l2(row_scales, at, 4 * TILE_ROWS)
        cuda.syncwarp()  # zeros behind the end of A

        # --- the stream: steps of two experts, then of the next two
        totals[0], totals[1] = float32(0), float32(0)
        offsets, s, parity = places(lane, PAIR, PITCH), int32(0), int32(0)
        while u < stop:
            j = int32(uint32(u) // uint32(k_tiles))
            k_tile = int32(u - j * k_tiles)
            for r in range(PAIR):
                of_pair = int32(PAIR * j + r)
                of_slot = int32(min(of_pair, int32(chosen - 1)))
                e, shares[r] = max(shfl(own, of_slot), 0), shfl(own_share, of_slot)
                of_token = load_f32(token_scales, of_slot) if scaled else float32(1)
                for i in range(2):
                    at = e * (row_tiles * TILE_ROWS) + row + 8 * i
                    factors[r, i] = load_f32(row_scales, at) * float32(scale) * of_token
                    added[r, i] = float32(0)
                    if biased and k_tile == 0:
                        added[r, i] = load_bias(bias, e * N + min(int32(row + 8 * i), int32(N - 1)))
            for i in range(n_acc):
                acc[i] = 0
            left = int32(min(int32(stop - u), int32(k_tiles - k_tile)))
            while left > 0:
                slot, bar = int32(ring + s * slot_bytes), int32(bars + 8 * s)
                mbarrier_wait(smem, bar, parity)
                multiply(acc, smem, slot, int32(slot + weights), 0, offsets, PAIR, lane)
                cuda.syncwarp()
                issue(
                    smem, slot, bar, w, a, int32(u + stages), stop, own, row_tile, sizes,
                    lane, True, True,
                )  # fmt: skip
                left, u, s = int32(left - 1), int32(u + 1), int32(s + 1)
                if s == stages:
                    s, parity = int32(0), int32(parity ^ 1)
            finish(acc)
            for i in range(2):  # of row tile r and rows g + 8 i the token in column r
                totals[i] += shares[0] * (acc[2 * i] * factors[0, i] + added[0, i])
                if PAIR * j + 1 < chosen:
                    totals[i] += shares[1] * (acc[5 + 2 * i] * factors[1, i] + added[1, i])

        # --- all warps' sums, in their order
        if lane & 3 == 0:
            for i in range(2):
                at = TILE_ROWS * warp + (lane >> 2) + 8 * i
                store_f32(smem, sums_at + 4 * at, totals[i])
        cuda.syncthreads()
        n = int32(row_tile * TILE_ROWS + t)
        if t < TILE_ROWS and n < N:
            total = float32(0)
            for v in range(warps):
                total += load_f32(smem, sums_at + 4 * (TILE_ROWS * v + t))
            store(c, n, total)

    return summed


def launch(request: ExpertsRequest, given: ExpertsOperands, activations: tuple[Any, ...]) -> Launch:
    """The product and its weighted sum of a[S, K], perhaps with scales of its rows."""
    a, *scales = activations
    name = storage_format(FORMATS[request.format]).name
    slot_bytes = PAIR * (tile_format(name).tile_bytes + PITCH)
    sums = 4 * TILE_ROWS * WARPS
    stages = next(
        stages
        for stages in range(H200_STAGES, 1, -1)
        if WARPS * stages * (slot_bytes + 8) + sums + 256 <= shared_memory()
    )
    run = kernel(
        name, stages, dtype_name(a), dtype_name(given.out), request.ids, request.bias,
        request.router or "", bool(scales), request.follows,
    )  # fmt: skip
    sizes = (
        ceil_div(request.k, TILE_K),
        request.row_tiles,
        request.experts,
        request.n,
        request.chosen,
    )
    unused = given.row_scales  # where there are no token scales, or no bias
    args = (
        given.packed, given.row_scales, a, scales[0] if scales else unused, given.ids,
        unused if given.bias is None else given.bias, given.router, given.out,
        tuple(map(np.int32, sizes)),
    )  # fmt: skip
    shared = WARPS * stages * slot_bytes + ceil_div(8 * WARPS * stages, 128) * 128 + sums
    grid = (ceil_div(request.n, TILE_ROWS),)
    return Launch(run, grid, (WARP * WARPS,), args, shared, overlap=True)
