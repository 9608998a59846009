"""A block's shared memory as bulk copies and `wgmma` see it: addresses, mbarriers, proxies."""

from __future__ import annotations

import numpy as np

from steps.simulator.arrays import CheckedArray, offset_in_allocation, owner
from steps.simulator.errors import Race, SimulatorError
from steps.simulator.ordering import TICK, Block, Gathered, Known, Lane, knows
from steps.simulator.shadow import Shadow

_FIRST = 1024  # the first kilobyte of shared memory is the system's on a GPU with bulk copies
_MARK = b"mbarrier"  # what the eight bytes of a barrier hold here: overwriting it shows


class Allocation:
    """One piece of a block's shared memory: its address, its bytes, and who used them last."""

    __slots__ = ("base", "bytes", "name", "shadow")

    def __init__(self, block: Block, base: int, data: np.ndarray, name: str):
        self.base, self.name = base, name
        self.bytes = data.reshape(-1).view(np.uint8)
        self.shadow = Shadow(block, name, self.bytes.size)

    def place(self, address: int) -> str:
        """ "byte 512 of ring"."""
        return f"byte {address - self.base} of {self.name}"


class SharedMemory:
    """A block's shared memory as a range of addresses, with its mbarriers."""

    __slots__ = ("allocations", "barriers", "block", "end")

    def __init__(self, block: Block) -> None:
        self.block = block
        self.allocations: dict[int, Allocation] = {}  # by the identity of the owner of the bytes
        self.barriers: dict[int, MBarrier] = {}  # by address
        self.end = _FIRST

    def add(self, data: np.ndarray, name: str) -> None:
        """Give the memory of a shared array an address, if it has none."""
        whole = owner(data)
        if id(whole) in self.allocations or not whole.nbytes:
            return
        self.allocations[id(whole)] = Allocation(self.block, self.end, whole, name)
        self.end += -(-whole.nbytes // 1024) * 1024

    def allocation(self, array: CheckedArray) -> Allocation:
        return self.allocations[id(owner(array.data))]

    def address(self, array: CheckedArray, offset: int) -> int:
        """The address of a byte of a shared array."""
        return self.allocation(array).base + offset_in_allocation(array.data) + offset

    def holding(self, address: int, size: int) -> Allocation | None:
        """The allocation that holds all of these bytes."""
        for allocation in self.allocations.values():
            at = address - allocation.base
            if at >= 0 and at + size <= allocation.bytes.size:
                return allocation
        return None

    # --- mbarriers
    def make_barrier(self, lane: Lane, array: CheckedArray, index: int, count: int) -> None:
        offset = CheckedArray.locate(array, index, len(_MARK))
        name, address = f"{array.name}[{index}]", self.address(array, offset)
        if not 0 < count < 1 << 20:
            raise SimulatorError(f"mbarrier {name} would take {count} arrivals, not 1 to 2^20 - 1")
        if address in self.barriers:
            raise SimulatorError(f"{name} is an mbarrier already")
        array.bytes[offset : offset + len(_MARK)] = _MARK
        self.barriers[address] = MBarrier(name, lane, count)

    def barrier(self, lane: Lane, array: CheckedArray, index: int) -> MBarrier:
        """The mbarrier at array[index] for a thread; SimulatorError where there is none, or none
        any more, or where the thread cannot know of it."""
        offset = CheckedArray.locate(array, index, len(_MARK))
        found = self.barriers.get(self.address(array, offset))
        if found is None:
            raise SimulatorError(
                f"{array.name}[{index}] is no mbarrier: mbarrier_init comes first, then "
                "fence_mbarrier_init, then cuda.syncthreads"
            )
        if array.bytes[offset : offset + len(_MARK)] != _MARK:
            raise SimulatorError(f"mbarrier {found.name} has been overwritten")
        if not knows(lane, found.made):
            raise Race(
                f"mbarrier {found.name} is used, which thread {found.maker} makes: a barrier is "
                "missing between them"
            )
        return found


class MBarrier:
    """One mbarrier: what its current phase lacks."""

    __slots__ = (
        "count",
        "fenced",
        "gathered",
        "handed_on",
        "lacking",
        "made",
        "maker",
        "name",
        "order",
        "pending",
        "phase",
        "seen",
        "slot",
        "under_way",
    )

    def __init__(self, name: str, lane: Lane, count: int):
        self.name, self.maker, self.count = name, lane.index, count  # made by this thread
        self.made = lane.access
        self.order = lane.block.order
        self.slot = self.order.new_slot(name)
        self.gathered = Gathered()  # what those know who arrived
        self.handed_on: Known = []  # to those who wait for the last complete phase
        self.fenced = False
        self.pending = count  # arrivals that the phase lacks
        self.lacking = 0  # bytes it was told of that have not come (negative: not told of yet)
        self.under_way = 0  # bytes of copies that report to it
        self.phase = 0
        self.seen: dict[int, int] = {}  # thread -> the last phase that it saw complete

    @property
    def copy_access(self) -> int:
        """That of bulk copies in the current phase: who waits for it knows of them."""
        return (self.phase + 1) * TICK | self.slot

    def arrive(self, lane: Lane, expected: int) -> bool:
        """Count an arrival and the bytes it announces; whether the phase is complete now."""
        if not self.pending:
            raise SimulatorError(
                f"one arrival too many at mbarrier {self.name}: its phase {self.phase} takes "
                f"{self.count}, has them all and still waits for {self.lacking} bytes"
            )
        self.pending -= 1
        self.lacking += expected
        self.order.arrive(lane, self.gathered)
        return self._settle()

    def brought(self, size: int) -> bool:
        """Count the bytes of a copy; whether the phase is complete now."""
        self.lacking -= size
        self.under_way -= size
        return self._settle()

    def _settle(self) -> bool:
        if self.pending or self.lacking > 0:
            return False
        more = self.under_way - self.lacking  # bytes that nobody announced, here or under way
        if more:
            raise SimulatorError(
                f"phase {self.phase} of mbarrier {self.name} completes although copies bring "
                f"{more} bytes more than its arrivals expect (mbarrier_arrive_expect)"
            )
        self.phase += 1
        self.pending = self.count
        known = self.gathered.known
        known.extend([0] * (self.slot + 1 - len(known)))
        known[self.slot] = self.phase
        self.handed_on = known.copy()
        return True

    def phase_of(self, thread: int, parity: int) -> int:
        """The phase that a wait for `parity` means now; it is complete if below the current one."""
        if parity not in (0, 1):
            raise SimulatorError(f"a wait for parity {parity} of mbarrier {self.name}: 0 or 1")
        phase = self.phase - 1 if self.phase & 1 != parity else self.phase
        if self.seen.get(thread) == phase:
            raise SimulatorError(
                f"a second wait for parity {parity} of mbarrier {self.name}, which returns at once "
                f"for phase {phase}, seen complete before: flip the parity"
            )
        return phase

    def passed(self, lane: Lane, phase: int) -> None:
        """The thread saw that phase complete, if it could: it knows what those knew who arrived."""
        if self.phase > phase + 1:
            raise SimulatorError(
                f"mbarrier {self.name} completed phase {self.phase - 1} before a thread that waits "
                f"for phase {phase} looked, which then waits on: its phases must not advance "
                "without the arrival of everybody who waits for them"
            )
        self.seen[lane.index] = phase
        if phase >= 0:
            self.order.learn(lane, self.handed_on, self.gathered.elsewhere)

    def __str__(self) -> str:
        lacks = []
        if self.pending:
            lacks.append(f"{self.pending} of {self.count} arrivals")
        if self.lacking > 0:
            lacks.append(f"{self.lacking} bytes")
        return f"{self.name}, whose phase {self.phase} lacks {' and '.join(lacks)}"


class BarrierWait:
    """What a thread waits at, described when the sentence is needed."""

    __slots__ = ("barrier", "parity")

    def __init__(self, barrier: MBarrier, parity: int):
        self.barrier, self.parity = barrier, parity

    def __str__(self) -> str:
        return f"mbarrier_wait for parity {self.parity} of {self.barrier}"
