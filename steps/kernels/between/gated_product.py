"""silu(gate) * up in the product that makes them, behind a deferred norm.

A warp of step 18 has pairs of row tiles. Here a pair is one of gates and the same one of ups, half
of the matrix apart: two bulk copies for a slot, not one. So when a thread adds up the sums of a
gate, those of its up lie next to them in shared memory, and what it stores is the product:

    sums of all warps | * r / s of the token | silu(gate) * up | float16 [M, hidden]

Weights stay packed as they are. Thread blocks have an even number of row tiles, and there are
multiples of 128 hidden features, as tiles lie in groups of 8.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from qformats import Format
from qformats.repack import TILE_GROUP, TILE_ROWS
from qformats.storage import storage_format
from steps.contract import Launch, dtype_name
from steps.instructions import float_to_half, load_f32, store_u16
from steps.instructions.approximate import reciprocal
from steps.kernels.between.deferred_norm import MOST_TOKENS, WARP, configuration, norm_of_token
from steps.kernels.decode.bulk import arguments, kernel
from steps.kernels.decode.final_sum import FinalSum, warp_sums
from steps.kernels.decode.product import PAIR
from steps.kernels.decode.tiles import Variant, product_of
from steps.kernels.parts.activations.gated import silu_times

GROUP_ROWS: Final = TILE_GROUP * TILE_ROWS


@cache
def gated_end(variant: Variant, scale: float, parts: int) -> FinalSum:
    """The end of the product: it reads (norm, mean_of, epsilon), see `launch`. parts: partial sums
    of a token."""
    tokens, threads = variant.tokens, WARP * variant.warps
    tile_sums = TILE_ROWS * tokens
    of_warps, of_token = warp_sums(tokens, variant.warps_k), norm_of_token(tokens, parts)
    token_and_feature, add_up = of_warps.token_and_feature, of_warps.add_up
    load_norm, factors = of_token.load_ahead, of_token.factors

    @cuda.jit(device=True, forceinline=True)
    def load_ahead(loaded, c, _, reads, m0, first, end, t):
        load_norm(loaded, reads[0], m0, int32(c.shape[0]), t)

    @cuda.jit(device=True, forceinline=True)
    def prologue(loaded, reads, t):
        _, mean_of, epsilon = reads
        s, r = factors(loaded, mean_of, epsilon, t)
        return r * reciprocal(s) * float32(scale)

    @cuda.jit(device=True, forceinline=True)
    def write(smem, sums, row_scales_at, c, _, reads, own_scale, m0, here, first, end, t):
        N = int32(c.shape[1])
        pairs = int32(int32(end - first) >> 1)
        ups_at = int32(row_scales_at + 4 * TILE_ROWS * pairs)
        i = t
        while i < pairs * tile_sums:
            within = int32(i & (tile_sums - 1))
            pair = int32(uint32(i) // uint32(tile_sums))
            at = int32(PAIR * pair * tile_sums + within)
            gate, up = add_up(smem, sums, at), add_up(smem, sums, int32(at + tile_sums))
            token, feature = token_and_feature(within)
            feature = int32(pair * TILE_ROWS + feature)
            gate = gate * load_f32(smem, row_scales_at + 4 * feature) * own_scale
            up = up * load_f32(smem, ups_at + 4 * feature) * own_scale
            if token < here:
                n = int32(int32(first >> 1) * TILE_ROWS + feature)
                x = float_to_half(silu_times(gate, up))
                store_u16(c, int64(m0 + token) * N + n, x)
            i = int32(i + threads)

    return FinalSum(of_warps.store, of_token.n_loads, load_ahead, prologue, write)


def supports(fmt: Format, m: int, hidden: int, k: int) -> bool:
    """Whether there is a kernel for m tokens and this many gates and ups of K weights each."""
    if m > MOST_TOKENS or hidden % GROUP_ROWS:
        return False
    return configuration(fmt, m, 2 * hidden, k).row_tiles % PAIR == 0


def launch(fmt: Format, weights: tuple, x: Any, norm: Any, epsilon: float, out: Any) -> Launch:
    """out = silu(gate) * up, [gate, up] = norm(h) @ dequantize(W)^T, of what
    `deferred_norm.launch_residual` has left of the norm.

    weights : packed by `qformats.repack.tiles`: rows of gates, and then as many of ups.
    x       : float16 [M, K]. norm: float32 [M, 1 + any]. out: float16 [M, hidden].
    ValueError for shapes that it does not support, or a bias.
    """
    (m, k), hidden = x.shape, out.shape[1]
    if len(weights) > 2 or not supports(fmt, m, hidden, k):
        raise ValueError(
            f"gates are multiplied in the product for up to {MOST_TOKENS} tokens, multiples of "
            f"{GROUP_ROWS} hidden features, an even number of row tiles of a thread block and no "
            f"bias, not for {m} tokens and {hidden} hidden features"
        )
    packed, row_scales = weights
    found = configuration(fmt, m, 2 * hidden, k)
    variant, name = found.variant, storage_format(fmt).name
    end_of = gated_end(variant, product_of(name, variant, dtype_name(x)).scale, norm.shape[1] - 1)
    run = kernel(name, variant, dtype_name(x), end_of, gated=True)
    reads = (norm, np.float32(1 / k), np.float32(epsilon))
    args = arguments(variant, packed, row_scales, x, row_scales, out, found.sizes(k), reads)
    grid = found.grid(m, 2 * hidden)
    return Launch(run, grid, (WARP * variant.warps,), args, found.shared, overlap=True)
