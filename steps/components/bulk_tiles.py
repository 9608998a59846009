"""How step 15 cuts a product of few tokens among thread blocks, and a block's part among its warps.

As `steps.components.decode_tiles`; but a warp has a part of K to itself, in all row tiles of its thread block,
and row tiles come in pairs.
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
STAGES: Final = 4  # slots of a warp's ring, at most: more at once do not come sooner
BEFORE: Final = 2  # slots asked for before A has come, where there are more than LITTLE to ask for:
LITTLE: Final = 4  # A waits in line behind them
SUMS: Final = 33 * 1024  # bytes for the sums of warps at most
PAD: Final = 32  # bytes between those of two warps, so that four lanes do not meet in a bank
FITS: Final = 52 * 1024  # bytes that A in Q8_1 may have, beside two slots of any format
SCALES: Final = 8 * BLOCKS  # bytes that a token in slabs has of them in a record
ALONE: Final = 116 * 1024  # bytes with which a block has an SM to itself: of two, each gets half


def regions(fmt: StorageFormat, tokens: int, stages: int) -> tuple[int, int, int]:
    """(bytes of a slot of the ring, where in shared memory behind the rings mbarriers begin, and
    codes of A or the sums)"""
    slot = PAIR * tile_format(fmt.name).tile_bytes
    if tokens > FUSED:
        slot += tokens * (TILE_K + SCALES)
    bars = WARPS * stages * slot
    return slot, bars, bars + ceil_div(8 * WARPS * (stages + 1), 128) * 128


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is cut: `tokens` of the kernel; `across` of a thread block's warps along N, the
    others along K, with `each` records; `tall` row tiles of a thread block; rings of `stages`
    slots, of which `before` are asked for before A; `shared` bytes of a thread block."""

    tokens: int
    across: int
    each: int
    tall: int
    stages: int
    before: int
    chunk: int
    shared: int


def fused(m: int, k: int) -> bool:
    """Whether A[m, k] is quantized inside: for few tokens, if it fits beside the rings."""
    tokens = ceil_div(m, 2) * 2 if m > 1 else 1
    return m <= FUSED and tokens * k * (BLOCK + scale_bytes(tokens, True)) // BLOCK <= FITS


def tiling(fmt: StorageFormat, shape: Shape) -> Tiling:
    """All weights at once if there are as many multiprocessors, in waves if sums would not fit."""
    given, in_row = not fused(shape.m, shape.k), ceil_div(shape.k, TILE_K)
    sizes = (8, MOST_TOKENS) if given else (1, 2, 4)
    tokens = next(t for t in sizes if t >= min(shape.m, MOST_TOKENS))
    row_tiles, of_row_tile = ceil_div(shape.n, TILE_ROWS), 4 * tokens * TILE_ROWS
    beside = max(1, multiprocessors() // ceil_div(shape.m, MOST_TOKENS))
    tall, across = ceil_div(row_tiles, beside), 1
    room = min(SUMS, shared_memory() - regions(fmt, tokens, 2)[2])
    while given and across < WARPS and WARPS // across * (tall * of_row_tile + PAD) > room:
        across *= 2
    along = WARPS // across
    waves = ceil_div(tall, (room // along - PAD) // of_row_tile)
    tall, each = ceil_div(row_tiles, waves * beside), ceil_div(in_row, along)
    fixed = along * (tall * of_row_tile + PAD)
    if not given:
        size_d = scale_bytes(tokens, tile_format(fmt.name).minimum)
        fixed += in_row * BLOCKS * tokens * (BLOCK + size_d)
    mine = each * ceil_div(tall + 1, PAIR * across)  # slots that a warp asks for
    stages = max(2, min(STAGES, mine))
    while stages > 2 and regions(fmt, tokens, stages)[2] + fixed > shared_memory():
        stages -= 1
    slot, _, rings = regions(fmt, tokens, stages)
    before = min(BEFORE if mine > LITTLE else 1, stages - 1)
    chunk = 0 if given else max(1, min(each, (stages - before) * slot // (tokens * 4 * TILE_K)))
    return Tiling(tokens, across, each, tall, stages, before, chunk, max(ALONE, rings + fixed))
