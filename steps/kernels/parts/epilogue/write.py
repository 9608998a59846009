"""The end of a warp tile of steps 8 to 10: from the accumulators of mma.sync straight to C.

Step 7 teaches this in its own kernel, for a warp of one packed tile.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int32, int64

from steps.instructions import load_f32, store_f32
from steps.kernels.parts.epilogue.bias import bias_of


@cache
def write_sums(rows: int, columns: int, of_bias: str | None) -> Any:
    """write(c, m0, n0, lane, acc, row_scales, bias): the sums of a warp, `rows` x `columns` mma of
    16 features x 8 tokens, to c, float32 [M, N], from token m0 and feature n0 on; nothing beyond
    the edges.

    acc       : float32 [4 * rows * columns], of this lane: of each mma tokens m, m + 1 of feature
                n, then of feature n + 8.
    row_scales: float32, one for each feature, as many as whole fragment-packed tiles have.
    bias      : [N] of dtype `of_bias`, which is added; not read where that is None.
    """
    features, (load_bias, add_bias) = 2 * rows, bias_of(of_bias)  # features of a lane

    @cuda.jit(device=True, forceinline=True)
    def write(c, m0, n0, lane, acc, row_scales, bias):
        M, N = int32(c.shape[0]), int32(c.shape[1])
        m, n = int32(m0 + 2 * (lane & 3)), int32(n0 + (lane >> 2))
        # The compiler keeps a load behind the stores above it, so all loads are issued first.
        scales = cuda.local.array(features, float32)
        biases = cuda.local.array(features, float32)
        for i in range(features):
            scales[i] = load_f32(row_scales, n + 8 * i)
            biases[i] = load_bias(bias, n + 8 * i)
        for j in range(columns):
            for odd in range(2):
                token = int32(m + 8 * j + odd)
                offset = int64(token) * N + n
                for i in range(features):
                    if token < M and int32(n + 8 * i) < N:
                        r = 4 * (i // 2 * columns + j) + 2 * (i % 2) + odd
                        store_f32(c, offset + 8 * i, add_bias(acc[r] * scales[i], biases[i]))

    return write
