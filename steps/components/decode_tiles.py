"""How a product of few tokens is cut among thread blocks, and a block's part among its warps.

Weights are read once, so what counts is that all multiprocessors have equally many of them, and as
many on their way as shared memory holds. A thread block takes some row tiles of C, for a part of K
only where more of A would not fit beside the rings: sums that blocks hand each other cost a way
through memory. Of its warps the first `across` take the row tiles in turn, for the first records
along K; the next as many take the same row tiles, for the next records.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from qformats import BLOCK
from qformats.repack import TILE_K, TILE_ROWS
from qformats.storage import StorageFormat
from steps.components.unpack.storage_formats import tile_format
from steps.contract import Shape, ceil_div, multiprocessors, shared_memory

MOST_TOKENS: Final = 16  # of a thread block: the columns of two mma
FUSED: Final = 4  # tokens up to which a thread block quantizes what it needs of A itself
WARPS: Final = 16  # of a thread block
FEWER: Final = 8  # where A is given, and records are large, or there are fewer than LITTLE
LITTLE: Final = 128  # records of a thread block
SHARED: Final = 150 * 1024  # bytes of a thread block
SHARED_GIVEN: Final = 220 * 1024  # where A, as it was quantized, lies there too
ALONE: Final = 116 * 1024  # bytes with which it has an SM to itself: of two, each gets half
STAGES: Final = 8  # records that a warp has under way at most
RING: Final = 96 * 1024  # bytes that all have under way, where A is given
EARLY: Final = 56 * 1024  # and before A, which would wait in line behind more
EARLY_GIVEN: Final = 20 * 1024  # likewise where A is given
SPARE: Final = 72 * 1024  # bytes that A must leave for the rings and the sums
SLICE: Final = 14 * 1024  # values of A that a thread block quantizes; K is cut where there are more
# values of A that fit beside the rings, by tokens: 16 leave little time to wait for the last block
SLICE_GIVEN: Final = {8: 112 * 1024, 16: 64 * 1024}
AHEAD: Final = 4  # blocks of A of a lane whose loads are under way together, at most
PARTIALS: Final = 16 * 1024  # bytes for the sums that the warps of a thread block hand each other
BLOCKS: Final = TILE_K // BLOCK  # of K in a record


@dataclass(frozen=True, slots=True)
class Split:
    """How a product is cut.

    tokens: columns of a thread block. rows, records: its row tiles, and its records along K.
    slices: thread blocks along K. warps: of a thread block; `across` of them lie along N, the
    others along K. stages: of a warp's ring; `early` of them are asked for before A. ahead: blocks
    of A that a lane loads at a time. shared: bytes of a thread block.
    """

    tokens: int
    rows: int
    records: int
    slices: int
    warps: int
    across: int
    stages: int
    early: int
    ahead: int
    shared: int


def scale_bytes(tokens: int, minimum: bool) -> int:
    """Room in shared memory for d of a block of A, and s where it counts. One token has room for
    two, as a lane reads those of two columns."""
    return (2 if tokens == 1 else 1) * (8 if minimum else 4)


def split(fmt: StorageFormat, shape: Shape) -> Split:
    """A thread block for each multiprocessor, or as few more as the shape allows."""
    tokens = next(t for t in (1, 2, 4, 8, 16) if t >= min(shape.m, MOST_TOKENS))
    given, tile, deep = shape.m > FUSED, tile_format(fmt.name), ceil_div(shape.k, TILE_K)
    room = min(SLICE_GIVEN[tokens] if given else SLICE, shared_memory() - SPARE)
    records = ceil_div(deep, min(deep, ceil_div(tokens * shape.k, room)))
    slices = ceil_div(deep, records)
    beside = max(1, multiprocessors() // (slices * ceil_div(shape.m, MOST_TOKENS)))
    rows = ceil_div(ceil_div(shape.n, TILE_ROWS), beside)
    large = 3 * WARPS * tile.tile_bytes > min(RING if given else SHARED, shared_memory() // 2)
    warps = FEWER if large or (given and rows * records < LITTLE) else WARPS
    # across: so that the busiest warp has least to do; and few, as a warp alone needs no barrier
    factors = [w for w in range(1, warps) if warps % w == 0]
    sums = {w: warps // w * rows * TILE_ROWS * tokens * 4 for w in factors}
    fitting = [w for w in sums if sums[w] <= PARTIALS] + [warps]
    across = min(fitting, key=lambda w: ceil_div(rows, w) * ceil_div(records, warps // w))
    fixed = records * BLOCKS * tokens * (BLOCK + scale_bytes(tokens, tile.minimum))
    fixed += sums.get(across, 0)
    stage, each = warps * tile.tile_bytes, ceil_div(records, warps // across)
    ring = min(RING, SHARED_GIVEN - fixed) if given else SHARED - fixed
    stages = max(2, min(STAGES, min(ring, shared_memory() - fixed) // stage))
    mine = ceil_div(rows, across) * each  # records of a warp
    early = EARLY_GIVEN // stage if given else min(EARLY // stage, mine // 4)
    early = min(stages, max(1, early))
    ahead = min(AHEAD, ceil_div(each * BLOCKS * tokens, 8 * across))
    shared = min(max(ALONE, fixed + stages * stage), shared_memory())
    return Split(tokens, rows, records, slices, warps, across, stages, early, ahead, shared)
