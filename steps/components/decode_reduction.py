"""From a warp's sums to C, for few tokens: those of warps along K, then of thread blocks along K.

They are too few for a tile of shared memory in the order of C (`steps.components.epilogue`): each lane leaves
its own two and two, and finds those of others at the same place in their row tiles.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int32

from qformats.repack import MINIMUM_SCALE, TILE_ROWS
from steps.components.decode_tiles import MOST_TOKENS
from steps.instructions import fence, load_f32x2, shfl, store_f32, store_f32x2


@cache
def finish_rows(tokens: int, holders: int, warps: int, along: int) -> tuple[Any, Any]:
    """(leave, finish) for thread blocks of `warps` warps, `along` of them along K.

    leave(acc, smem, at_sums, place, own, factors, c, sums, row, row_tiles, lane, whole)
        a row tile's sums over a warp's share of K, for the lanes that have some: to shared memory,
        as row tile number `place` from byte at_sums on, or further if no other warp has any.
    finish(acc, smem, at_sums, own, factors, c, sums, arrived, first_row, end, rows, here, each,
           row_tiles, warp, lane, whole)
        for all lanes: adds up what the warps along K have left of row tiles first_row to `end`, one
        warp's `rows` tiles after those of the one before; they had `each` of the `here` records.
        Of the thread blocks along K the last to come adds up those of all.

    acc    : local float32. Of four lanes the first `holders` have sums: lane (g, t) of features g
             and g + 8, tokens 2t and 2t + 1, and then tokens 8 further on.
    own    : where a lane's first two lie in a row tile, 2 (g * holders + t).
    factors: float32 [N], by which a feature's sums are multiplied, in MINIMUM_SCALE.
    sums   : float32 [M/16, row_tiles, slices, 16 * tokens], and arrived, int32 [M/16, row_tiles]:
             how many slices lie there. It is left at zero.
    whole  : whether there is one slice only.

    All are added up in the order of K: the same bits in every run.
    """
    floats, pair = TILE_ROWS * tokens, 16 * holders  # of C in a row tile; of all lanes, two each
    values = floats // (8 * holders)  # of a lane that has some

    @cuda.jit(device=True, forceinline=True)
    def put(array, at, size, acc):
        """A lane's sums to array[at], two and two; a float is `size` of its elements."""
        for r in range(0, values, 2):
            store_f32x2(array, at + r // 2 * pair * size, acc[r], acc[r + 1])

    @cuda.jit(device=True, forceinline=True)
    def total(acc, array, at, size, count, distance):
        """A lane's sums = those that `put` left at `count` places, in order."""
        for r in range(values):
            acc[r] = 0
        for i in range(count):
            for r in range(0, values, 2):
                x0, x1 = load_f32x2(array, at + (i * distance + r // 2 * pair) * size)
                acc[r] += x0
                acc[r + 1] += x1

    @cuda.jit(device=True, forceinline=True)
    def hand_over(acc, factors, c, sums, row, row_tiles, lane, done):
        """A row tile's sums to C if they are all, else to where its last slice will find them."""
        (M, N), z, quad = c.shape, cuda.blockIdx.z, int32(lane & 3)
        if not done:
            tile_at = (z * row_tiles + row) * cuda.gridDim.y + cuda.blockIdx.y
            put(sums, tile_at * floats + (int32(lane >> 2) * holders + quad) * 2, 1, acc)
        else:
            for r in range(values):
                i = z * MOST_TOKENS + 2 * quad + r // 4 * 8 + r // 2 % 2
                j = row * TILE_ROWS + int32(lane >> 2) + r % 2 * 8
                if i < M and j < N:
                    store_f32(c, i * N + j, acc[r] * (factors[j] * float32(MINIMUM_SCALE)))

    @cuda.jit(device=True, forceinline=True)
    def leave(acc, smem, at_sums, place, own, factors, c, sums, row, row_tiles, lane, whole):
        if along > 1:
            put(smem, at_sums + 4 * (place * floats + own), 4, acc)
        else:
            hand_over(acc, factors, c, sums, row, row_tiles, lane, whole)

    # Inlined by Numba, as if it stood in the kernel: what LLVM inlines it simplifies first, and the
    # code that came of this took more registers.
    @cuda.jit(device=True, inline="always")
    def finish(
        acc, smem, at_sums, own, factors, c, sums, arrived, first_row, end, rows, here, each,
        row_tiles, warp, lane, whole,
    ):  # fmt: skip
        quad = int32(lane & 3)
        first = int32(first_row + warp)
        if along > 1:
            cuda.syncthreads()
            for row in range(first, end, warps):
                place, count = int32(row - first_row) * floats + own, (here + each - 1) // each
                if quad < holders:
                    total(acc, smem, at_sums + 4 * place, 4, count, rows * floats)
                    hand_over(acc, factors, c, sums, row, row_tiles, lane, whole)
        if not whole:
            slices, base = cuda.gridDim.y, cuda.blockIdx.z * row_tiles
            fence()  # all sums are to be seen by whoever sees the arrival
            cuda.syncwarp()
            for chunk in range(first, end, 32 * warps):  # one row tile a lane: who is its last?
                mine, last = chunk + lane * warps, int32(0)
                if mine < end:
                    last = int32(cuda.atomic.add(arrived, base + mine, 1) == slices - 1)
                    if last > 0:
                        arrived[base + mine] = 0  # as the next launch must find it
                fence()
                for i in range(min(32, (end - chunk + warps - 1) // warps)):
                    if shfl(last, i) > 0 and quad < holders:
                        row = chunk + i * warps
                        total(acc, sums, (base + row) * slices * floats + own, 1, slices, floats)
                        hand_over(acc, factors, c, sums, row, row_tiles, lane, True)

    return leave, finish
