"""The shapes (M, N, K) that are checked and measured."""

from __future__ import annotations

from typing import Final

Shape = tuple[int, int, int]

# Shapes a simulator can afford (at most ~20k multiply-adds), each here for a reason: a single
# output, one row, one column, an odd number of blocks, just above a tile of 4 ... 128 in M or N.
# M, N and K differ wherever they can, so that swapping two of them cannot go unseen.
CHECK_SHAPES: Final[tuple[Shape, ...]] = (
    (1, 1, 32),
    (1, 5, 96),
    (5, 1, 64),
    (2, 33, 160),
    (17, 5, 96),
    (9, 20, 96),
    (33, 18, 32),
    (16, 32, 32),
    (3, 66, 96),
    (65, 4, 64),
    (2, 130, 64),
    (130, 2, 64),
    (1, 3, 1312),  # rings of stages are filled again
)

# In place of the last one, for kernels of few tokens: their warps share K, and each has a ring. A
# kernel of large tiles would take the simulator ten seconds for it.
DEEP_CHECK_SHAPE: Final[Shape] = (1, 3, 4256)

# Shapes for a GPU: ragged against tiles of 16/32/64/128 in M and N, and K % 256 != 0 nearly
# everywhere (256 is the stride in K of ggml's own kernels); a few aligned ones for the fast path.
GPU_CHECK_SHAPES: Final[tuple[Shape, ...]] = (
    *CHECK_SHAPES,
    DEEP_CHECK_SHAPE,
    (4, 512, 1024),  # the classical acceptance shape of this ladder
    (1, 257, 352),
    (2, 129, 4128),
    (7, 65, 1056),
    (8, 1024, 4096),
    (16, 100, 288),
    (17, 33, 1120),
    (31, 130, 544),
    (33, 511, 1056),
    (64, 128, 256),
    (65, 257, 2080),
    (127, 129, 736),
    (129, 127, 1184),
    (130, 514, 96),
    (257, 384, 1056),
    (300, 800, 2144),
    (512, 500, 1024),
    (3, 40, 9248),
)

# Decode (1, 8, 16), a batch of 128, and prefill (512, 4096) on the (N, K) of an 8-billion-parameter
# model.
BENCH_SHAPES: Final[tuple[Shape, ...]] = tuple(
    (m, n, k)
    for m in (1, 8, 16, 128, 512, 4096)
    for n, k in ((4096, 4096), (4096, 14336), (14336, 4096))
)
