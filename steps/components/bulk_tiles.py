"""Tile heuristics of step 15: the work of each thread block of a decode product, and of its warps.

As `steps.components.decode_tiles`; but a warp has a share of K to itself, in all row tiles of its
thread block, and row tiles come in pairs.

Step 15 (decode with bulk copies) teaches this. The constants were measured on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from qformats import BLOCK
from qformats.repack import TILE_K, TILE_ROWS
from qformats.storage import StorageFormat
from steps.components.bulk_products import PAIR
from steps.components.decode_tiles import BLOCKS, FUSED, MOST_TOKENS, scale_bytes
from steps.components.unpack.storage_formats import tile_format
from steps.contract import Shape, ceil_div, multiprocessors, shared_memory

WARPS: Final = 16  # of a thread block: 128 registers a thread
STAGES: Final = 4  # slots of a warp's ring, at most: more in flight do not arrive sooner
PREFETCHED: Final = 2  # slots issued before A, where a warp has more than LITTLE: A queues behind
LITTLE: Final = 4
SUMS: Final = 33 * 1024  # bytes for the sums of warps at most
PAD: Final = 32  # bytes between those of two warps, so that four lanes do not meet in a bank
FITS: Final = 52 * 1024  # bytes that A in Q8_1 may have, beside two slots of any format
SCALES: Final = 8 * BLOCKS  # bytes of the scales of 128 K of a token, K-outermost
ALONE: Final = 116 * 1024  # bytes with which a block has an SM to itself: of two, each gets half


def regions(fmt: StorageFormat, tokens: int, stages: int) -> tuple[int, int, int]:
    """(bytes of a slot of the ring; where in shared memory behind the rings the mbarriers begin;
    and where codes of A or the sums begin)"""
    slot = PAIR * tile_format(fmt.name).tile_bytes
    if tokens > FUSED:
        slot += tokens * (TILE_K + SCALES)
    bars = WARPS * stages * slot
    return slot, bars, bars + ceil_div(8 * WARPS * (stages + 1), 128) * 128


@dataclass(frozen=True, slots=True)
class TileConfiguration:
    """The work of the thread blocks of a product.

    tokens    : columns of the kernel
    warps_n   : warps of a thread block along N; the others lie along K
    k_tiles   : packed tiles along K of a warp
    row_tiles : of a thread block
    stages    : slots of a warp's ring; `prefetched` of them are issued before A
    chunk     : packed tiles along K whose float32 A a warp has at a time
    shared    : bytes of a thread block
    """

    tokens: int
    warps_n: int
    k_tiles: int
    row_tiles: int
    stages: int
    prefetched: int
    staged_k_tiles: int
    shared: int


def fused(m: int, k: int) -> bool:
    """Whether the kernel quantizes A[m, k]: for few tokens, if it fits beside the rings."""
    tokens = ceil_div(m, 2) * 2 if m > 1 else 1
    return m <= FUSED and tokens * k * (BLOCK + scale_bytes(tokens, True)) // BLOCK <= FITS


def tile_configuration(fmt: StorageFormat, shape: Shape) -> TileConfiguration:
    """All weights at once if there are as many multiprocessors, in waves if sums would not fit."""
    prequantized, all_k_tiles = not fused(shape.m, shape.k), ceil_div(shape.k, TILE_K)
    sizes = (8, MOST_TOKENS) if prequantized else (1, 2, 4)
    tokens = next(t for t in sizes if t >= min(shape.m, MOST_TOKENS))
    all_row_tiles, sums_bytes = ceil_div(shape.n, TILE_ROWS), 4 * tokens * TILE_ROWS
    blocks_n = max(1, multiprocessors() // ceil_div(shape.m, MOST_TOKENS))
    row_tiles, warps_n = ceil_div(all_row_tiles, blocks_n), 1
    room = min(SUMS, shared_memory() - regions(fmt, tokens, 2)[2])
    while (
        prequantized
        and warps_n < WARPS
        and WARPS // warps_n * (row_tiles * sums_bytes + PAD) > room
    ):
        warps_n *= 2
    warps_k = WARPS // warps_n
    waves = ceil_div(row_tiles, (room // warps_k - PAD) // sums_bytes)
    row_tiles, k_tiles = ceil_div(all_row_tiles, waves * blocks_n), ceil_div(all_k_tiles, warps_k)
    fixed = warps_k * (row_tiles * sums_bytes + PAD)
    if not prequantized:
        size_d = scale_bytes(tokens, tile_format(fmt.name).minimum)
        fixed += all_k_tiles * BLOCKS * tokens * (BLOCK + size_d)
    warp_slots = k_tiles * ceil_div(row_tiles + 1, PAIR * warps_n)  # that a warp loads in all
    stages = max(2, min(STAGES, warp_slots))
    while stages > 2 and regions(fmt, tokens, stages)[2] + fixed > shared_memory():
        stages -= 1
    slot, _, rings = regions(fmt, tokens, stages)
    prefetched = min(PREFETCHED if warp_slots > LITTLE else 1, stages - 1)
    if prequantized:
        staged_k_tiles = 0
    else:
        free = (stages - prefetched) * slot
        staged_k_tiles = max(1, min(k_tiles, free // (tokens * 4 * TILE_K)))
    shared = max(ALONE, rings + fixed)
    return TileConfiguration(
        tokens, warps_n, k_tiles, row_tiles, stages, prefetched, staged_k_tiles, shared
    )
