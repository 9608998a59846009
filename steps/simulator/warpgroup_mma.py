"""`wgmma` simulated at its worst: B may be read until the group is waited for.

Nothing is multiplied before the wait. What `wgmma` returns until then are `Accumulators` that can
be handed on but not read. Its loads of B are an access of each of the four warps, which only those
know of who waited for it in that warp, or met one who did (`steps.simulator.ordering`): who stores
there without knowing is told so, and so is a wgmma that does not know of a store to B.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from steps.simulator.errors import SimulatorError
from steps.simulator.fragments import A_ROW, A_WORD, C_COLUMN, C_ROW, numbers
from steps.simulator.lanes import WARP, WARPGROUP, Block, Site, here, in_words
from steps.simulator.scheduler import now

_CORE = 128  # bytes of a core matrix: 8 columns of B by 16 bytes of K
_ROWS = 64  # of A and D: 16 of each warp
_K_BYTES = 32  # of a row of A

SWIZZLE_128B = 1  # in the two highest bits of a descriptor: 0 is no swizzle
SWIZZLED_ROW = 128  # bytes


class Tile:
    """D of one chain of multiplications: what is done, and how many are not."""

    __slots__ = ("turn", "under_way", "values")

    def __init__(self, values: np.ndarray):
        self.values = values  # [64, N]
        self.turn = 0  # multiplications so far: only the last one's accumulators are of use
        self.under_way = 0


class Accumulators:
    """A lane's part of a tile, as `wgmma` and `wgmma_wait` return it; a tuple once it is there."""

    __slots__ = ("_lane", "_values", "tile", "turn")

    def __init__(self, tile: Tile, lane: int):
        self.tile, self.turn = tile, tile.turn
        self._lane = lane
        self._values: tuple | None = None

    def _there(self) -> tuple:
        if self._values is None:
            raise SimulatorError(
                "accumulators are read while a wgmma works on them: use what wgmma_wait returns"
            )
        return self._values

    def __len__(self) -> int:
        return self.tile.values.shape[1] // 2

    def __iter__(self):
        return iter(self._there())

    def __getitem__(self, key):
        return self._there()[key]


class Landed(Accumulators):
    """Of a tile that nothing works on any more."""

    __slots__ = ("matrix",)

    def __init__(self, tile: Tile, lane: int):
        super().__init__(tile, lane)
        self.matrix = tile.values  # later multiplications make a tile of their own

    def _there(self) -> tuple:
        if self._values is None:  # most lanes' values are only ever handed on
            rows, columns = _places(self.matrix.shape[1])
            row = self.matrix[rows[self._lane], columns[self._lane]]
            self._values = tuple(row) if row.dtype.kind == "f" else tuple(row.tolist())
        return self._values


class Multiplication:
    """One wgmma under way."""

    __slots__ = (
        "a",
        "adds",
        "b",
        "block",
        "descriptor",
        "dtypes",
        "group",
        "kept",
        "site",
        "tile",
        "warpgroup",
    )

    def __init__(
        self,
        block: Block,
        tile: Tile,
        a: np.ndarray,
        descriptor: int,
        adds: bool,
        dtypes: tuple,
        warpgroup: int,
        group: int,
        kept: np.ndarray | None = None,
    ):
        """kept: of a sparse A, which numbers of K it has, bool[64, K]."""
        self.block, self.tile, self.a, self.adds = block, tile, a, adds
        self.warpgroup, self.kept = warpgroup, kept
        self.descriptor, self.dtypes, self.group = descriptor, dtypes, group
        self.site: Site = here()
        self.b = self._read()
        tile.turn += 1
        tile.under_way += 1

    def _read(self) -> np.ndarray:
        """B as uint8[N, bytes of K], from where the descriptor says."""
        first, places = _places_of_b(
            self.descriptor, self.tile.values.shape[1], 4 * self.a.shape[1]
        )
        extent = int(places.max()) + 1
        where = self.block.memory.holding(first, extent)
        if where is None:
            raise SimulatorError(
                f"the descriptor {self.descriptor:#x} of wgmma spans {extent} bytes, which are not "
                "in one piece of shared memory"
            )
        places = places + (first - where.base)
        threads = self.block.lanes[WARPGROUP * self.warpgroup : WARPGROUP * (self.warpgroup + 1)]
        order = self.block.order
        first = threads[0].index // WARP
        accesses = [order.wgmma_access(first + i, self.group + 1) for i in range(4)]
        order.sites.update(dict.fromkeys(accesses, self.site))
        where.shadow.load_async(threads, places, accesses)
        return where.bytes[places]

    def execute(self) -> None:
        """Multiply."""
        of_a, of_b = self.dtypes
        a = numbers(np.ascontiguousarray(self.a), of_a).astype(np.float64)
        b = numbers(np.ascontiguousarray(self.b), of_b).astype(np.float64)
        tile = self.tile
        if self.kept is None or np.isfinite(b).all():
            sums = a @ b.T  # exact in float64 but for the last bits of float16 sums
        else:  # what A does not have meets no NaN of B
            sums = np.where(self.kept[:, None], a[:, None] * b, 0.0).sum(axis=2)
        if tile.values.dtype.kind == "f":
            tile.values = (sums + tile.values if self.adds else sums).astype(np.float32)
        else:
            whole = sums.astype(np.int64)
            tile.values = (whole + tile.values if self.adds else whole).astype(np.int32)
        tile.under_way -= 1


def begin(
    lanes: list[list], dtypes: tuple, accumulator: type, selector: int | None = None
) -> list[Accumulators]:
    """A wgmma of one warpgroup, from (acc, a0, a1, a2, a3, descriptor, accumulate) of each lane;
    with a selector A is sparse, and its metadata comes behind the descriptor."""
    block, group = _warpgroup()
    commits = _commits(block, group)
    threads = block.lanes[WARPGROUP * group : WARPGROUP * (group + 1)]
    for first in range(0, WARPGROUP, WARP):
        block.order.take_loads(threads[first : first + WARP])
    if unfenced := [thread for thread in threads if not thread.fenced]:
        raise SimulatorError(
            f"each group of wgmma begins with wgmma_fence, which {in_words(unfenced)} did not call"
        )
    if len({(lane[5], lane[-1]) for lane in lanes}) > 1:
        raise SimulatorError("the threads of a warpgroup give wgmma different descriptors or flags")
    tile = _tile([lane[0] for lane in lanes], accumulator)
    words = np.array([lane[1:5] for lane in lanes], np.uint32).reshape(4, WARP, 4)
    rows = np.empty((4, 16, _K_BYTES // 4), np.uint32)
    rows[:, A_ROW, A_WORD] = words
    descriptor, adds = lanes[0][5], lanes[0][-1]
    a, kept = rows.reshape(_ROWS, -1), None
    if selector is not None:
        a, kept = _dense(a, np.array([lane[6] for lane in lanes], np.uint32), selector)
    begun = Multiplication(block, tile, a, descriptor, bool(adds), dtypes, group, commits, kept)
    block.multiplying.setdefault(group, []).append(begun)
    return [Accumulators(tile, i) for i in range(len(lanes))]


def _dense(pairs: np.ndarray, metadata: np.ndarray, selector: int) -> tuple[np.ndarray, np.ndarray]:
    """A sparse A, words [64, 8] of two 16-bit numbers each, with its zeros as words [64, 16], and
    which numbers it has, bool[64, 32]."""
    words = metadata.reshape(4, 8, 4)[..., 2 * selector : 2 * selector + 2]  # [warp, g, half of K]
    bits = np.stack([words & 0xFFFF, words >> 16], axis=1)  # [warp, row g or g + 8, g, half of K]
    fours = bits[..., None] >> np.arange(0, 16, 4, dtype=np.uint32) & 15
    fours = fours.reshape(_ROWS, 8)
    first, second = fours & 3, fours >> 2
    if (wrong := first == second).any():
        row, group = np.argwhere(wrong)[0]
        raise SimulatorError(
            f"the metadata of a sparse wgmma gives two numbers of row {row}, K {4 * group} to "
            f"{4 * group + 3}, the position {first[row, group]}: they need two positions"
        )
    a, kept = np.zeros((_ROWS, 8, 4), np.uint16), np.zeros((_ROWS, 8, 4), bool)
    for positions, halves in ((first, pairs & 0xFFFF), (second, pairs >> 16)):
        at = positions[..., None].astype(int)
        np.put_along_axis(a, at, halves[..., None], axis=2)
        np.put_along_axis(kept, at, True, axis=2)
    return a.reshape(_ROWS, -1).view(np.uint32), kept.reshape(_ROWS, -1)


def wait(handed: list, newest: int) -> list:
    """Each lane's accumulators after the wait for all groups but the `newest` last."""
    block, group = _warpgroup()
    commits = _commits(block, group)
    under_way = block.multiplying.get(group, [])
    while under_way and under_way[0].group < commits - newest:
        under_way.pop(0).execute()
    if commits > newest:
        for lane in block.lanes[WARPGROUP * group : WARPGROUP * (group + 1)]:
            access = block.order.wgmma_access(lane.index // WARP, commits - newest)
            block.order.waited_for_wgmma(lane, access)
    if type(handed[0]) is not Accumulators:
        return handed
    tile = _current(handed)
    kind = Accumulators if tile.under_way else Landed
    return [kind(tile, i) for i in range(len(handed))]


def _warpgroup() -> tuple[Block, int]:
    lane = now().lane
    return lane.block, lane.index // WARPGROUP


def _commits(block: Block, group: int) -> int:
    """How many groups the warpgroup has closed."""
    threads = block.lanes[WARPGROUP * group : WARPGROUP * (group + 1)]
    if len({thread.commits for thread in threads}) > 1:
        raise SimulatorError("some threads of the warpgroup have called wgmma_commit, others not")
    return threads[0].commits


def _tile(handed: list, accumulator: type) -> Tile:
    """The tile that a warpgroup's accumulators are of; a new one of values that are there."""
    first = handed[0]
    if type(first) is Accumulators:
        return _current(handed)
    if type(first) is Landed and all(
        type(acc) is Landed and acc.matrix is first.matrix for acc in handed
    ):
        return Tile(first.matrix)
    count = len(first)
    values: np.ndarray = np.zeros((_ROWS, 2 * count), accumulator)
    if any(acc is not first for acc in handed) or any(first):
        rows, columns = _places(2 * count)
        values[rows, columns] = np.array([tuple(acc) for acc in handed], accumulator)
    return Tile(values)


def _current(handed: list) -> Tile:
    """The tile that all these accumulators, under way, are the latest state of."""
    tile = handed[0].tile
    for acc in handed:
        if type(acc) is not Accumulators or acc.tile is not tile or acc.turn != tile.turn:
            raise SimulatorError(
                "these accumulators belong to an earlier wgmma: hand on what the last one returned"
            )
    return tile


@cache
def _places(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of D[64, n] that each of 128 lanes holds: two arrays [128, n / 2]."""
    warps, tiles = np.arange(4)[:, None, None, None], np.arange(n // 8)[:, None]
    rows = 16 * warps + C_ROW[:, None, :] + 0 * tiles
    columns = 8 * tiles + C_COLUMN[:, None, :] + 0 * warps
    return rows.reshape(128, -1), columns.reshape(128, -1)


def _places_of_b(descriptor: int, n: int, k_bytes: int) -> tuple[int, np.ndarray]:
    """An address in shared memory and how far from it each byte of B[n, k_bytes] lies."""
    start, leading, stride = (16 * (descriptor >> bit & 0x3FFF) for bit in (0, 16, 32))
    swizzle = descriptor >> 62 & 3
    if not swizzle:
        return start, _core_matrices(n, k_bytes, leading, stride)
    within = start % (8 * SWIZZLED_ROW)  # from the first of eight rows
    if swizzle != SWIZZLE_128B or within % k_bytes or within >= SWIZZLED_ROW:
        raise SimulatorError(
            f"the descriptor {descriptor:#x} of wgmma has no layout known here: rows swizzled over "
            f"128 bytes begin at a multiple of 1024, and {k_bytes} bytes along K at a multiple of "
            f"{k_bytes}"
        )
    return start - within, _swizzled_rows(n, k_bytes, within, stride)


@cache
def _core_matrices(n: int, k_bytes: int, leading: int, stride: int) -> np.ndarray:
    """How far each byte of B[n, k_bytes] lies from the first one."""
    tiles, chunks = stride * np.arange(n // 8), leading * np.arange(k_bytes // 16)
    within = np.arange(_CORE).reshape(8, 1, 16)
    places = tiles[:, None, None, None] + within + chunks[:, None]
    return places.reshape(n, k_bytes)


@cache
def _swizzled_rows(n: int, k_bytes: int, within: int, stride: int) -> np.ndarray:
    """How far each byte of B[n, k_bytes] lies from its first row; `within` is its first byte in a
    row that is not swizzled."""
    row = np.arange(n)[:, None]
    places = row // 8 * stride + row % 8 * SWIZZLED_ROW + within + np.arange(k_bytes)
    return places ^ (places // SWIZZLED_ROW % 8 * 16)
