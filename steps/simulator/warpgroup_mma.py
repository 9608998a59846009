"""`wgmma` simulated at its worst: B is read when the group is waited for, and must not change.

Nothing is multiplied before the wait. What `wgmma` returns until then are `Accumulators` that can
be handed on but not read. B is read twice, at the `wgmma` and at the wait: if it is not the same,
somebody wrote to it too early or it was not there yet, and the simulator says so.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from steps.simulator.errors import SimulatorError
from steps.simulator.fragments import A_ROW, A_WORD, C_COLUMN, C_ROW
from steps.simulator.lanes import WARP, WARPGROUP, Block, Site, here, in_words
from steps.simulator.scheduler import now

_CORE = 128  # bytes of a core matrix: 8 columns of B by 16 bytes of K
_ROWS = 64  # of A and D: 16 of each warp
_K_BYTES = 32  # of a row of A


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

    __slots__ = ("a", "adds", "b", "block", "descriptor", "dtypes", "group", "site", "tile")

    def __init__(
        self,
        block: Block,
        tile: Tile,
        a: np.ndarray,
        descriptor: int,
        adds: bool,
        dtypes: tuple,
        group: int,
    ):
        self.block, self.tile, self.a, self.adds = block, tile, a, adds
        self.descriptor, self.dtypes, self.group = descriptor, dtypes, group
        self.site: Site = here()
        self.b = self._read(check=True)
        tile.turn += 1
        tile.under_way += 1

    def _read(self, check: bool = False) -> np.ndarray:
        """B as uint8[N, 32], from where the descriptor says."""
        start, leading, stride = (self.descriptor >> bit & 0x3FFF for bit in (0, 16, 32))
        extent, places = _core_matrices(self.tile.values.shape[1], 16 * leading, 16 * stride)
        where = self.block.memory.holding(16 * start, extent)
        if where is None:
            raise SimulatorError(
                f"the descriptor {self.descriptor:#x} of wgmma spans {extent} bytes, which are not "
                "in one piece of shared memory"
            )
        places = places + (16 * start - where.base)
        b = where.bytes[places]
        if check and not np.array_equal(b, where.seen[places]):
            raise SimulatorError(
                f"wgmma reads what threads wrote to {where.name}: fence_proxy_async and a barrier "
                "must come between"
            )
        if check and any(copy.writes(where, places) for copy in now().copies):
            raise SimulatorError(
                f"wgmma reads {where.name} where a bulk copy is still under way: wait for its "
                "mbarrier"
            )
        return b

    def execute(self) -> None:
        """Multiply."""
        if not np.array_equal(self.b, self._read()):
            error = SimulatorError(
                "the B of a wgmma changed before the wait for it: it was not there yet when it "
                "began, or its buffer was given back too early"
            )
            error.site = self.site
            raise error
        of_a, of_b = self.dtypes
        a = np.ascontiguousarray(self.a).view(of_a).astype(np.float64)
        b = np.ascontiguousarray(self.b).view(of_b).astype(np.float64)
        tile, sums = self.tile, a @ b.T  # exact in float64 but for the last bits of float16 sums
        if tile.values.dtype.kind == "f":
            tile.values = (sums + tile.values if self.adds else sums).astype(np.float32)
        else:
            whole = sums.astype(np.int64)
            tile.values = (whole + tile.values if self.adds else whole).astype(np.int32)
        tile.under_way -= 1


def begin(lanes: list[list], dtypes: tuple, accumulator: type) -> list[Accumulators]:
    """A wgmma of one warpgroup, from (acc, a0, a1, a2, a3, descriptor, accumulate) of each lane."""
    block, group = _warpgroup()
    commits = _commits(block, group)
    threads = block.lanes[WARPGROUP * group : WARPGROUP * (group + 1)]
    if unfenced := [thread for thread in threads if not thread.fenced]:
        raise SimulatorError(
            f"each group of wgmma begins with wgmma_fence, which {in_words(unfenced)} did not call"
        )
    if len({tuple(lane[5:]) for lane in lanes}) > 1:
        raise SimulatorError("the threads of a warpgroup give wgmma different descriptors or flags")
    tile = _tile([lane[0] for lane in lanes], accumulator)
    words = np.array([lane[1:5] for lane in lanes], np.uint32).reshape(4, WARP, 4)
    rows = np.empty((4, 16, _K_BYTES // 4), np.uint32)
    rows[:, A_ROW, A_WORD] = words
    descriptor, adds = lanes[0][5:]
    a = rows.reshape(_ROWS, -1)
    begun = Multiplication(block, tile, a, descriptor, bool(adds), dtypes, commits)
    block.multiplying.setdefault(group, []).append(begun)
    return [Accumulators(tile, i) for i in range(len(lanes))]


def wait(handed: list, newest: int) -> list:
    """Each lane's accumulators after the wait for all groups but the `newest` last."""
    block, group = _warpgroup()
    commits = _commits(block, group)
    under_way = block.multiplying.get(group, [])
    while under_way and under_way[0].group < commits - newest:
        under_way.pop(0).execute()
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


@cache
def _core_matrices(n: int, leading: int, stride: int) -> tuple[int, np.ndarray]:
    """The bytes that B[n, 32] spans, and where each of its bytes lies from its start."""
    tiles, halves = stride * np.arange(n // 8), leading * np.arange(2)
    within = np.arange(_CORE).reshape(8, 1, 16)
    places = tiles[:, None, None, None] + within + halves[:, None]
    places = places.reshape(n, _K_BYTES)
    return int(places.max()) + 1, places
