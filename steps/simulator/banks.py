"""Bank conflicts: how many cycles one access of a warp takes in shared memory.

Shared memory is 32 banks side by side; successive 4-byte words lie in successive banks, and each
bank serves one word a cycle (CUDA C++ Programming Guide, "Shared Memory" of compute capability 5.x,
to which the later ones refer). Lanes that want the same word share it, in a load as in a store;
lanes that want different words of one bank wait for each other. An access of 8 bytes a lane is made
in two halves of the warp, one of 16 bytes in four quarters, and `ldmatrix` in matrices of 8 rows of
16 bytes, which is the same thing. Where all neighbours, lanes n and n ^ 1, or all n and n ^ 2, have
one address, twice as many lanes are served together: 8 bytes at once, 16 in two halves (Nvidia's
developer forum, topic 77228; counted in steps 5 to 9 on an H200). What shared memory does in one
cycle is a *wavefront*.

    wavefronts([4 * lane for lane in range(32)], 4)         1     a row of float32
    wavefronts([128 * lane for lane in range(32)], 4)      32     a column of float32[32, 32]
    wavefronts([132 * lane for lane in range(32)], 4)       1     a column of float32[32, 33]
    wavefronts([16 * lane for lane in range(32)], 16)       4     512 bytes need no fewer
    wavefronts([16 * (lane // 2) for lane in range(32)], 16)  2   pairs of lanes with one address

and of a whole kernel, in the simulator:

    counter = BankCounter()
    simulate(kernel, grid, block, args, banks=counter)
    assert counter.conflicts == 0, counter.report()

It is a model. It counts the accesses that the source makes; a compiler may merge or drop some.

Global memory has no banks: there an access costs the *sectors* of 32 bytes that it touches, which
`sectors` counts. `steps.simulator.trace` shows both, lane by lane.
"""

from __future__ import annotations

import dis
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import Any, NamedTuple

from steps.simulator.arrays import CheckedArray, owner
from steps.simulator.errors import SimulatorError
from steps.simulator.lanes import WARP, Block, Lane, Site, kernel_codes
from steps.simulator.tracked import WatchedArray

BANKS = 32
WORD = 4  # bytes that a bank serves in a cycle
SIZES = (1, 2, 4, 8, 16)  # bytes of one lane's access
APART = 1 << 32  # between the addresses given to different arrays: each begins at bank 0
SECTOR = 32  # bytes of global memory that the L1 cache asks the L2 for at once


def wavefronts(addresses: Sequence[int | None], size: int) -> int:
    """Cycles for one access of a warp: `size` bytes at the byte address of each lane.

    None stands for a lane that takes no part. For `ldmatrix` give the addresses of the 8, 16 or 32
    rows and size 16. ValueError for a size that no instruction has, for more than 32 lanes and for
    an address that is not a multiple of the size.
    """
    return sum(map(len, served(addresses, size)))


def served(addresses: Sequence[int | None], size: int) -> list[list[list[int]]]:
    """The words that shared memory serves: by part of the warp, by cycle. Word k is of bank k % 32.
    A part without a lane takes no cycle. ValueError as `wavefronts`."""
    if size not in SIZES:
        raise ValueError(f"one lane accesses 1, 2, 4, 8 or 16 bytes at once, not {size}")
    if len(addresses) > WARP:
        raise ValueError(f"a warp has {WARP} lanes, got {len(addresses)} addresses")
    for address in addresses:
        if address is not None and address % size:
            raise ValueError(f"an access of {size} bytes at address {address} would fault")
    lanes = lanes_together(addresses, size)
    parts = []
    for first in range(0, len(addresses), lanes):
        waiting: dict[int, list[int]] = {}  # by bank
        own = [a for a in addresses[first : first + lanes] if a is not None]
        for word in sorted({(a + at) // WORD for a in own for at in range(0, size, WORD)}):
            waiting.setdefault(word % BANKS, []).append(word)
        deepest = max(map(len, waiting.values()), default=0)
        parts.append([[w[k] for w in waiting.values() if k < len(w)] for k in range(deepest)])
    return parts


def lanes_together(addresses: Sequence[int | None], size: int) -> int:
    """Lanes that shared memory serves together where each accesses `size` bytes."""
    lanes = BANKS * WORD // max(size, WORD)
    return 2 * lanes if lanes < WARP and _in_pairs(addresses) else lanes


def _in_pairs(addresses: Sequence[int | None]) -> bool:
    """Whether all lanes n and n ^ 1, or all n and n ^ 2, have one address, or one takes no part."""
    return any(
        all(
            one == other or one is None or other is None
            for n, (one, other) in enumerate(zip(addresses, addresses[apart:], strict=False))
            if not n & apart
        )
        for apart in (1, 2)
    )


def without_conflicts(addresses: Sequence[int | None], size: int) -> int:
    """Cycles for the same access, were there no conflict: one for each part that it is made in."""
    return sum(map(bool, served(addresses, size)))


def sectors(addresses: Sequence[int | None], size: int) -> int:
    """Sectors of global memory that one access of a warp touches: `size` bytes at the byte address
    of each lane. Lanes that want the same sector share it."""
    return len(
        {
            sector
            for address in addresses
            if address is not None
            for sector in range(address // SECTOR, (address + size - 1) // SECTOR + 1)
        }
    )


# --- in the simulator -----------------------------------------------------------------------------


@dataclass(slots=True)
class Traffic:
    """The accesses of one place in the source to shared memory, all warps together."""

    accesses: int = 0  # of whole warps
    wavefronts: int = 0
    ideal: int = 0  # wavefronts without conflicts

    @property
    def conflicts(self) -> int:
        """Cycles lost."""
        return self.wavefronts - self.ideal


Way = tuple[tuple[int, int], ...]
"""The place of an access in the kernel and, from function to function, the calls that led there:
(identity of a code object, instruction), the innermost first."""


class Gatherer:
    """Puts the accesses of single lanes together to accesses of whole warps.

    The simulator runs one lane at a time, so accesses of a warp are put together afterwards: those
    from one place, reached on one way through the calls, on the same visit of each lane since the
    last barrier of the block. Lanes that pass a place on different turns of a loop, with no barrier
    between, are so taken to be there together.
    """

    def __init__(self) -> None:
        self._open: dict[Block, _Open] = {}

    def wants(self, lane: Lane) -> bool:
        """Whether the accesses of this lane are gathered."""
        return True

    def complete(self, warp: int, way: Way, what: Access, addresses: list[int | None]) -> None:
        """An access of a warp: by lane, the address or None. Those of an array begin at a multiple
        of `APART`."""
        raise NotImplementedError

    # --- what the simulator calls
    def array(self, data: Any, name: str, space: str, alignment: int | None = None) -> CheckedArray:
        """An array whose accesses are gathered."""
        return _GatheredArray(data, name, space, alignment, self)

    def add(self, lane: Lane, what: Access, address: int) -> None:
        """One lane's access at the place where the running lane is."""
        block = lane.block
        opened = self._open.get(block)
        if opened is None:
            opened = self._open[block] = _Open({}, Counter())
        way = _way_here()
        place = (way, what.kind, what.space, what.size)
        visit = opened.visits[lane.index, place]
        opened.visits[lane.index, place] += 1
        key = (lane.index // WARP, place, visit)
        if key not in opened.accesses:
            opened.accesses[key] = (way, what, [None] * WARP)
        opened.accesses[key][2][lane.index % WARP] = address

    def copied(self, lane: Lane, array: str, at: int, size: int) -> None:
        """A bulk copy to this byte of a shared array begins. It is no access of a warp."""

    def close(self, blocks: Iterable[Block]) -> None:
        """At a barrier or the end of blocks: what was begun before it is complete."""
        for block in blocks:
            opened = self._open.pop(block, None)
            if opened is None:
                continue
            for (warp, *_), (way, what, addresses) in opened.accesses.items():
                self.complete(warp, way, what, addresses)

    def closing(self, block: Block, function: Callable) -> Callable:
        """`function` of a barrier, called when all threads of the block have reached it."""

        def closed(operands: list) -> list:
            self.close((block,))
            return function(operands)

        return closed


class BankCounter(Gatherer):
    """Counts the wavefronts of kernels simulated with `simulate(..., banks=counter)`.

    sites: place in the source -> `Traffic`; it grows with every kernel simulated. An atomic counts
    as a load and a store.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sites: dict[Site, Traffic] = {}

    @property
    def wavefronts(self) -> int:
        return sum(traffic.wavefronts for traffic in self.sites.values())

    @property
    def ideal(self) -> int:
        return sum(traffic.ideal for traffic in self.sites.values())

    @property
    def conflicts(self) -> int:
        """Cycles lost: wavefronts beyond those that the same accesses need without conflicts."""
        return self.wavefronts - self.ideal

    def report(self) -> str:
        """A line for each place in the source that accesses shared memory, the worst first."""
        worst_first = sorted(self.sites.items(), key=lambda item: -item[1].conflicts)
        return "\n".join(
            f"{t.wavefronts} wavefronts, {t.conflicts} of them conflicts, in {t.accesses} accesses "
            f"of a warp: {site}"
            for site, t in worst_first
        )

    def complete(self, warp: int, way: Way, what: Access, addresses: list[int | None]) -> None:
        traffic, parts = (
            self.sites.setdefault(site_of(way[0]), Traffic()),
            served(addresses, what.size),
        )
        times = 2 if what.kind == "atomic" else 1
        traffic.accesses += times
        traffic.wavefronts += times * sum(map(len, parts))
        traffic.ideal += times * sum(map(bool, parts))


class Access(NamedTuple):
    """What a lane does at an address."""

    kind: str  # "load", "store", "atomic", "cp.async", "ldmatrix" or "stmatrix"
    array: str
    space: str
    size: int  # bytes


@dataclass(slots=True)
class _Open:
    """The accesses of one block since its last barrier."""

    accesses: dict[tuple, tuple[Way, Access, list[int | None]]]  # by (warp, place, visit)
    visits: Counter[tuple]  # (lane, place) -> so far


class _GatheredArray(WatchedArray):
    """An array that tells a `Gatherer` of each access."""

    __slots__ = ("_gatherer", "_start")

    def __init__(self, data: Any, name: str, space: str, alignment: int | None, gatherer: Gatherer):
        super().__init__(data, name, space, alignment)
        self._gatherer = gatherer
        # Each allocation begins at bank 0: moving all lanes by whole words changes no count.
        self._start = id(owner(data)) * APART

    def _share(self, data: Any) -> CheckedArray:
        return _GatheredArray(data, self.name, self.space, self.alignment, self._gatherer)

    def extent(self, key: Any) -> tuple[int, int]:
        at, size = super().extent(key)
        if size != self.itemsize:
            raise SimulatorError(f"{self.name}: storing a part at once is not counted, only values")
        return at, size

    def _load(self, lane: Lane, at: int, size: int, kind: str = "load") -> None:
        if self._gatherer.wants(lane):
            what = Access(kind, self.name, self.space, size)
            self._gatherer.add(lane, what, self._start + at)

    def _store(self, lane: Lane, at: int, size: int, kind: str = "store") -> None:
        self._load(lane, at, size, kind)

    def _change(self, lane: Lane, at: int, size: int) -> None:
        self._load(lane, at, size, "atomic")

    def begin_async_store(self, lane: Lane, offset: int, size: int) -> None:
        self._load(lane, self._begin() + offset, size, "cp.async")


def site_of(place: tuple[int, int]) -> Site:
    """A place of a `Way` as a place in the source."""
    code_id, instruction = place
    return Site(code_id, instruction, kernel_codes[code_id])


def _way_here() -> Way:
    """The place where the running lane is."""
    frame: FrameType | None = sys._getframe(2)
    way = []
    while frame is not None:
        if id(frame.f_code) in kernel_codes:
            starts = _starts(id(frame.f_code))
            way.append((id(frame.f_code), starts[bisect_right(starts, frame.f_lasti) - 1]))
        frame = frame.f_back
    return tuple(way)


@cache
def _starts(code_id: int) -> list[int]:
    """Where the instructions of a kernel's code begin. Between them lie caches, and once CPython
    has specialised an `x[i]`, it is the last of them that f_lasti names."""
    return [instruction.offset for instruction in dis.get_instructions(kernel_codes[code_id])]
