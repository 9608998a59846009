"""The end of a tile of step 11: through shared memory, split-K partial sums, scales, C.

The accumulators hold products that row scales and token scales, powers of two, are to multiply
(`qformats.repack.tiles`, `steps.components.activations.layouts.float16_chunks`). They lie scattered
over a warp, and C may be float32 or float16. So they go to shared memory first, and each thread
then takes four neighbouring features of a token, as C has them. Step 11 teaches this.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int32, int64

from steps.components.epilogue.write import PAD, write_four
from steps.components.split_k_reduction import count_block_arrival
from steps.instructions import fence, load_f32x4, store_f32x4


@cache
def finish_mma_tile(features: int, tokens: int, warps_k: int, threads: int, in_half: bool) -> Any:
    """finish(sums, c, m0, n0, row_scales, token_scales, split, splits, tile_id, partials, arrived):
    the end of a kernel, for all threads of a block.

    sums        : shared float32 [warps_k, tokens, features + PAD], all written; they are added up.
    m0, n0      : the tile's first token and feature.
    row_scales  : float32, one for each feature, as many as whole fragment-packed tiles have.
    token_scales: float32 [M], one for each token.
    split       : the share of K these are the sums of, of `splits`. With more than one share the
                  blocks of a tile store partial sums in `partials`, float32 [tiles, splits, tokens,
                  features]. The last to arrive, by the counter `arrived`, int32 [tiles], adds them
                  up in the order of K: the same bits in every run. The counter is left at zero.
    """
    write, width = write_four(in_half), features // 4
    pitch, size = features + PAD, features * tokens

    @cuda.jit(device=True, forceinline=True)
    def write_scaled(c, m, n, row_scales, token_scales, x):
        if m < c.shape[0] and n < c.shape[1]:
            u, v = load_f32x4(row_scales, n), token_scales[m]
            y = x[0] * u[0] * v, x[1] * u[1] * v, x[2] * u[2] * v, x[3] * u[3] * v
            write(c, m, n, y)

    @cuda.jit(device=True, forceinline=True)
    def finish(
        sums, c, m0, n0, row_scales, token_scales, split, splits, tile_id, partials, arrived
    ):  # fmt: skip
        t = int32(cuda.threadIdx.x)
        before = cuda.shared.array(1, int32)  # how many of the tile's blocks arrived before this
        for i in range(t, size // 4, threads):
            m, n = i // width, i % width * 4
            x = load_f32x4(sums, m * pitch + n)
            for group in range(1, warps_k):
                y = load_f32x4(sums, (group * tokens + m) * pitch + n)
                x = x[0] + y[0], x[1] + y[1], x[2] + y[2], x[3] + y[3]
            if splits == 1:
                write_scaled(c, m0 + m, n0 + n, row_scales, token_scales, x)
            else:
                offset = (int64(tile_id) * splits + split) * size + 4 * i
                store_f32x4(partials, offset, x[0], x[1], x[2], x[3])
        if splits == 1:
            return
        count_block_arrival(arrived, tile_id, before, t)
        if before[0] == splits - 1:
            fence()
            for i in range(t, size // 4, threads):
                x = float32(0), float32(0), float32(0), float32(0)
                for other in range(splits):
                    y = load_f32x4(partials, (int64(tile_id) * splits + other) * size + 4 * i)
                    x = x[0] + y[0], x[1] + y[1], x[2] + y[2], x[3] + y[3]
                write_scaled(c, m0 + i // width, n0 + i % width * 4, row_scales, token_scales, x)
            if t == 0:
                arrived[tile_id] = 0  # for the next launch

    return finish
