"""Copies of a stage: a tile's tokens by tensor map, its fragment-packed weights by bulk copies.

Step 13 teaches both in its own kernel, for tiles of 128 features, whose weights of 128 K lie in one
piece of memory: a group of packed tiles. Step 14 also has tiles of 256 features, two groups, and of
192, a group and a half. A bulk copy cannot cross the end of a group. So the weights of a tile come
in pieces, each in one group, which are as large as that allows:

    groups of 128 features     [    0     ][    1     ][    2     ]
    tiles of 192               [     tile 0     ][     tile 1     ]
    pieces of 64               [ 0  ][ 1  ][ 2  ][ 0  ][ 1  ][ 2  ]
"""

from __future__ import annotations

from functools import cache
from math import gcd
from typing import Any, Final

from numba import cuda, int32, int64, uint32

from qformats.repack import TILE_GROUP, TILE_ROWS
from steps.instructions import BOX_K, bulk_copy, tensor_copy

GROUP_ROWS: Final = TILE_GROUP * TILE_ROWS
"""Features whose packed tiles of the same 128 K lie in one piece."""


@cache
def box_copies(bm: int) -> Any:
    """copy(memory, to, a, m0, k, barrier): two boxes of bm tokens and 64 K, from A[m0, k] on, to
    byte `to` of shared memory, a multiple of 1024. They report to the mbarrier at byte `barrier`;
    a is the address of a tensor map."""
    box_bytes = 2 * BOX_K * bm

    @cuda.jit(device=True, forceinline=True)
    def copy(memory, to, a, m0, k, barrier):
        tensor_copy(memory, to, a, int32(k), m0, memory, barrier)
        tensor_copy(memory, to + box_bytes, a, int32(k + BOX_K), m0, memory, barrier)

    return copy


@cache
def weight_copies(bn: int, tile_bytes: int) -> Any:
    """copy(memory, to, w, n0, N, step, steps, barrier): the packed tiles of features n0 to n0 + bn,
    of one of the `steps` steps of 128 K, to byte `to`. Where features are beyond N it copies the
    last piece there is. tile_bytes: of a packed tile."""
    piece = gcd(bn, GROUP_ROWS)
    pieces_of_group, piece_bytes = GROUP_ROWS // piece, piece // TILE_ROWS * tile_bytes

    @cuda.jit(device=True, forceinline=True)
    def copy(memory, to, w, n0, N, step, steps, barrier):
        last = int32((N - 1) // GROUP_ROWS * pieces_of_group + pieces_of_group - 1)
        for i in range(bn // piece):
            # unsigned: a signed quotient takes more instructions
            piece_id = min(int32(uint32(n0) // uint32(piece) + i), last)
            group, part = piece_id // pieces_of_group, piece_id % pieces_of_group
            source = int64((group * steps + step) * pieces_of_group + part) * piece_bytes
            bulk_copy(memory, to + i * piece_bytes, w, source, piece_bytes, memory, barrier)

    return copy
