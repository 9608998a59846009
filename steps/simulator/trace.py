"""What a warp does to memory: each memory instruction of a launch, with the address of each lane.

    recorder = Recorder(block=(0, 0, 0), warps=(0,))
    simulate(kernel, grid, block, args, trace=recorder)
    for instruction in recorder.instructions():
        print(instruction.place, instruction.kind, instruction.requests)

An instruction is a place in the source, reached on one way through the calls; where it is in a loop
it is executed several times, and each time is a *request* of the warp. A request to global memory
costs the sectors of 32 bytes that it touches, one to shared memory its wavefronts
(`steps.simulator.banks`, which says how far to trust either figure). A compiler may merge loads of
neighbouring addresses, drop a load whose value it still has, and unroll loops.

Only the recorded block runs: blocks of one launch do not wait for each other before they are
through (`steps.kernels.parts.stream_k` counts arrivals and lets the last one add up).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from steps.simulator.banks import (
    APART,
    Access,
    Gatherer,
    Way,
    sectors,
    site_of,
    wavefronts,
    without_conflicts,
)
from steps.simulator.lanes import WARP, Lane, Site

BULK, ASYNC, PREFETCH = "bulk copy", "cp.async", "prefetch"
WIDEST = 16  # bytes of a lane's access; more is not an access of a lane


@dataclass(slots=True)
class Instruction:
    """One memory instruction of a warp, all its requests together.

    kind: "load", "store", "atomic", "ldmatrix", "stmatrix", "cp.async", "bulk copy", "prefetch".
    space: "global" or "shared"; a `cp.async` is two instructions here, one in each.
    size: bytes of each lane, or of each row of ldmatrix; of a bulk copy, all of its bytes.
    lanes: of one request, the first with the most lanes: the byte of `array` where each accesses
    it, None for a lane that takes no part. For ldmatrix the lanes are the rows.
    """

    warp: int
    kind: str
    array: str
    space: str
    size: int
    way: tuple[Site, ...]  # the innermost place first, the kernel's own last
    requests: int = 0
    sectors: int = 0  # global memory
    wavefronts: int = 0  # shared memory
    ideal: int = 0  # wavefronts without conflicts
    lanes: list[int | None] = field(default_factory=list)
    trail: int = 0  # the same where two instructions accessed the same addresses in turn

    @property
    def place(self) -> Site:
        """Where it stands in the kernel itself: the line of the call, where a device function
        executes it."""
        return self.way[-1]

    @property
    def conflicts(self) -> int:
        """Wavefronts lost."""
        return self.wavefronts - self.ideal

    @property
    def sectors_per_request(self) -> float:
        return self.sectors / self.requests

    @property
    def bytes_used(self) -> int:
        """Of the request shown: different bytes that the lanes access."""
        return len({a + i for a in self.lanes if a is not None for i in range(self.size)})


class Recorder(Gatherer):
    """Records the accesses of some warps of one block (`warps=None`: of all of them)."""

    def __init__(
        self, block: tuple[int, int, int] = (0, 0, 0), warps: Collection[int] | None = (0,)
    ) -> None:
        super().__init__()
        self.block, self.warps = block, warps
        self._found: dict[tuple, Instruction] = {}

    def instructions(self) -> list[Instruction]:
        """What was recorded of every warp, in the order of the kernel's lines."""
        found = list(self._found.values())
        copied = {each.way: each.kind for each in found if each.kind in (ASYNC, BULK)}
        for each in found:  # the loads of copies are known by what stores them
            if each.space == "global" and each.kind == "load":
                each.kind = copied.get(each.way, PREFETCH if each.size > WIDEST else each.kind)
        return sorted(found, key=lambda each: [site.line for site in reversed(each.way)])

    # --- what the simulator calls
    def wants(self, lane: Lane) -> bool:
        return self.warps is None or lane.index // WARP in self.warps

    def copied(self, lane: Lane, array: str, at: int, size: int) -> None:
        if self.wants(lane):
            self.add(lane, Access(BULK, array, "shared", size), at)

    def complete(self, warp: int, way: Way, what: Access, addresses: list[int | None]) -> None:
        key = (warp, way, what)
        found = self._found.get(key)
        if found is None:
            sites = tuple(map(site_of, way))
            found = self._found[key] = Instruction(warp, *what, sites)
        found.requests += 1
        if what.space == "global":
            found.sectors += sectors(addresses, what.size)
        elif what.kind != BULK:
            found.wavefronts += wavefronts(addresses, what.size)
            found.ideal += without_conflicts(addresses, what.size)
        found.trail = hash((found.trail, *addresses))
        if _lanes(addresses) > _lanes(found.lanes):
            first = min(a for a in addresses if a is not None) // APART * APART
            found.lanes = [None if a is None else a - first for a in addresses]


def first_warps(instructions: Iterable[Instruction]) -> list[Instruction]:
    """Of each instruction, that of the first warp that executes it."""
    found: dict[tuple, Instruction] = {}
    for each in instructions:
        key = (each.way, each.kind, each.array, each.space, each.size)
        if key not in found or each.warp < found[key].warp:
            found[key] = each
    return list(found.values())


def _lanes(addresses: Sequence[int | None]) -> int:
    return sum(a is not None for a in addresses)
