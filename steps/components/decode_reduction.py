"""From the sums of a warp to C, for few tokens: added over warps, then over thread blocks, along K.

They are too few for a tile of shared memory in the order of C (`steps.components.epilogue`). Each
lane stores its own two and two, and finds those of others at the same place of their row tiles.
Step 10 teaches this.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int32

from qformats.repack import MINIMUM_SCALE, TILE_ROWS
from steps.components.decode_tiles import MOST_TOKENS
from steps.components.split_k_reduction import is_last_arrival
from steps.instructions import fence, load_f32x2, shfl, store_f32, store_f32x2


@cache
def finish_rows(tokens: int, lanes_with_sums: int, warps: int, warps_k: int) -> tuple[Any, Any]:
    """(store_partial, finish) for thread blocks of `warps` warps, `warps_k` of them along K.

    store_partial(acc, smem, smem_partials, slot, own_offset, row_scales, c, partials, row,
                  row_tiles, lane, complete)
        for the lanes that have sums: those of a row tile over a warp's share of K, to this slot of
        shared memory from byte smem_partials on; or further on, where no other warp has any
    finish(acc, smem, smem_partials, own_offset, row_scales, c, partials, arrived, first_row, end,
           slots, k_tiles, warp_k_tiles, row_tiles, warp, lane, complete)
        for all lanes: adds up what the warps along K stored of row tiles first_row to `end`, one
        warp's slots, as many as `slots`, after those of the one before; each had `warp_k_tiles` of
        the block's `k_tiles`. The last thread block along K to arrive adds up those of all blocks.

    acc       : local float32. Of four lanes the first `lanes_with_sums` have sums: lane (g, t) of
                features g and g + 8, tokens 2t and 2t + 1, and then tokens 8 further on.
    own_offset: of a lane's first two in a row tile, 2 (g * lanes_with_sums + t).
    row_scales: float32 [N], in MINIMUM_SCALE.
    partials  : float32 [M/16, row_tiles, splits, 16 * tokens]
    arrived   : int32 [M/16, row_tiles]: how many splits are stored there. It is left at zero.
    complete  : whether there is no other block along K.

    All are added up in the order of K: the same bits in every run.
    """
    tile_sums = TILE_ROWS * tokens
    pair_stride = 16 * lanes_with_sums  # two sums of each lane
    lane_sums = tile_sums // (8 * lanes_with_sums)  # of a lane that has some

    @cuda.jit(device=True, forceinline=True)
    def store(array, offset, size, acc):
        """A lane's sums to array[offset], two and two; a float is `size` of its elements."""
        for r in range(0, lane_sums, 2):
            store_f32x2(array, offset + r // 2 * pair_stride * size, acc[r], acc[r + 1])

    @cuda.jit(device=True, forceinline=True)
    def add_partials(acc, array, offset, size, count, stride):
        """A lane's sums = those that `store` wrote at `count` places, in order."""
        for r in range(lane_sums):
            acc[r] = 0
        for i in range(count):
            for r in range(0, lane_sums, 2):
                x0, x1 = load_f32x2(array, offset + (i * stride + r // 2 * pair_stride) * size)
                acc[r] += x0
                acc[r + 1] += x1

    @cuda.jit(device=True, forceinline=True)
    def store_or_write(acc, row_scales, c, partials, row, row_tiles, lane, complete):
        """A row tile's sums to C if they are complete, else to its partial sums."""
        (M, N), z, quad = c.shape, cuda.blockIdx.z, int32(lane & 3)
        if not complete:
            tile_at = (z * row_tiles + row) * cuda.gridDim.y + cuda.blockIdx.y
            store(
                partials,
                tile_at * tile_sums + (int32(lane >> 2) * lanes_with_sums + quad) * 2,
                1,
                acc,
            )
        else:
            for r in range(lane_sums):
                i = z * MOST_TOKENS + 2 * quad + r // 4 * 8 + r // 2 % 2
                j = row * TILE_ROWS + int32(lane >> 2) + r % 2 * 8
                if i < M and j < N:
                    store_f32(c, i * N + j, acc[r] * (row_scales[j] * float32(MINIMUM_SCALE)))

    @cuda.jit(device=True, forceinline=True)
    def store_partial(
        acc, smem, smem_partials, slot, own_offset, row_scales, c, partials, row, row_tiles, lane,
        complete,
    ):  # fmt: skip
        if warps_k > 1:
            store(smem, smem_partials + 4 * (slot * tile_sums + own_offset), 4, acc)
        else:
            store_or_write(acc, row_scales, c, partials, row, row_tiles, lane, complete)

    # Inlined by Numba, as if it stood in the kernel: what LLVM inlines it simplifies first, and the
    # code that came of this took more registers.
    @cuda.jit(device=True, inline="always")
    def finish(
        acc, smem, smem_partials, own_offset, row_scales, c, partials, arrived, first_row, end,
        slots, k_tiles, warp_k_tiles, row_tiles, warp, lane, complete,
    ):  # fmt: skip
        quad = int32(lane & 3)
        first = int32(first_row + warp)
        if warps_k > 1:
            cuda.syncthreads()
            for row in range(first, end, warps):
                source, count = (
                    int32(row - first_row) * tile_sums + own_offset,
                    (k_tiles + warp_k_tiles - 1) // warp_k_tiles,
                )
                if quad < lanes_with_sums:
                    add_partials(acc, smem, smem_partials + 4 * source, 4, count, slots * tile_sums)
                    store_or_write(acc, row_scales, c, partials, row, row_tiles, lane, complete)
        if not complete:
            splits, base = cuda.gridDim.y, cuda.blockIdx.z * row_tiles
            fence()  # all sums are to be seen by whoever sees the arrival
            cuda.syncwarp()
            for first_row_tile in range(first, end, 32 * warps):  # one row tile a lane
                own_row, is_last = first_row_tile + lane * warps, int32(0)
                if own_row < end:
                    is_last = is_last_arrival(arrived, base + own_row, splits - 1)
                fence()
                for i in range(min(32, (end - first_row_tile + warps - 1) // warps)):
                    if shfl(is_last, i) > 0 and quad < lanes_with_sums:
                        row = first_row_tile + i * warps
                        add_partials(
                            acc,
                            partials,
                            (base + row) * splits * tile_sums + own_offset,
                            1,
                            splits,
                            tile_sums,
                        )
                        store_or_write(acc, row_scales, c, partials, row, row_tiles, lane, True)

    return store_partial, finish
