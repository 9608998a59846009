"""Which accesses are ordered: what each thread knows to have happened before its own.

Lanes run one after the other here, and side by side on a GPU. So a result that is right in one
order of lanes says little. What counts is whether two accesses to one place, one of them a store,
are *ordered*: by the program of one thread, by a barrier that both threads passed, by an arrival
that the second one waited for. Where nothing orders them the simulator raises `Race`, in any order
of lanes.

A thread counts its barriers and arrivals; that count is its *clock*. A thread *knows* of each other
thread the clock up to which that one's accesses came before its own: a list, by *slot*. Barriers
merge these lists, mbarriers hand them on. Loads and stores of a thread have a slot each, since a
`wgmma` orders the loads of a warp (it has taken what they loaded), but not its stores. Asynchronous
operations have slots of their own:

    slot                            its clock
    stores of thread t              barriers and arrivals of the thread so far
    loads of thread t               the same
    launches before this one        1 for a thread that called griddepcontrol_wait
    wgmma of warp w                 groups of them that the warp waited for
    mbarrier b                      phases completed, with the bulk copies of each

An *access* is a clock and a slot in one number. Lists are shared by many threads and never changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any

Block = Any  # of steps.simulator.lanes, which imports this module
Lane = Any  # likewise
SLOT_BITS = 12
SLOT = (1 << SLOT_BITS) - 1
TICK = 1 << SLOT_BITS  # to the next clock of the same slot
WARP = 32
_REMEMBERED = 512  # merged lists: most waits of a warp merge the same two

Known = list[int]


class Epoch:
    """Loads of threads while they know the same: what one may load, all may.

    The clock of each of them is one more than what `known` says of its loads, or it is `clock`, of
    a thread that is alone in it. Sets of threads are integers, with a bit for each.
    """

    __slots__ = ("_seen", "_seen_by", "clock", "known")

    def __init__(self, known: Known, clock: int = 0):
        self.known, self.clock = known, clock
        self._seen_by, self._seen = known, 0  # threads whose loads are in that list

    def unseen(self, lane: Lane, threads: int) -> int:
        """The load of one of these threads that did not come before what `lane` does now, or 0."""
        known = lane.known
        if self._seen_by is not known:
            self._seen_by, self._seen = known, 0
        rest = threads & ~(self._seen | lane.bit)
        while rest:
            bit = rest & -rest
            slot = lane.block.order.threads + bit.bit_length() - 1
            clock = self.clock or self.known[slot] + 1
            if known[slot] < clock:
                return clock << SLOT_BITS | slot
            self._seen |= bit
            rest ^= bit
        return 0


class WarpgroupLoads:
    """Loads of a `wgmma`: an access of each of its warps. In place of an `Epoch`."""

    __slots__ = ("accesses",)

    def __init__(self, accesses: Sequence[int]):
        self.accesses = accesses

    def unseen(self, lane: Lane, threads: int) -> int:
        """The one that did not come before what `lane` does now, or 0."""
        return next((access for access in self.accesses if not knows(lane, access)), 0)


class Elsewhere:
    """What a thread knows of other blocks, by block: `seen`, and `read` by an atomic or a relaxed
    load with no fence since."""

    __slots__ = ("read", "seen")

    def __init__(self, seen: dict[int, Known], read: dict[int, Known]):
        self.seen, self.read = seen, read


class Proxied:
    """What a thread knew at a moment. In place of the thread, for its copies of global memory."""

    __slots__ = ("block", "elsewhere", "index", "known", "loads", "own")

    def __init__(self, lane: Lane):
        self.block, self.index, self.loads = lane.block, lane.index, lane.loads
        self.known, self.own, self.elsewhere = lane.known, lane.own, lane.elsewhere


class Gathered:
    """What the threads knew that have arrived somewhere, for those who wait there."""

    __slots__ = ("elsewhere", "known", "merged")

    def __init__(self) -> None:
        self.known: Known = []
        self.elsewhere: Elsewhere | None = None
        self.merged: dict[int, Known] = {}  # lists that `known` holds already, by identity

    def add(self, lane: Lane) -> None:
        """All that the thread knows, its own accesses too."""
        if id(lane.known) not in self.merged:
            self.merged[id(lane.known)] = lane.known
            self.known = _joined((self.known, lane.known))
        self.known[lane.index] = self.known[lane.loads] = lane.access >> SLOT_BITS
        _raise_to(self.known, lane.own)
        if lane.elsewhere is not None:
            self.elsewhere = lane.block.order.both(self.elsewhere, lane.elsewhere)


class Order:
    """Who knows what, in one block."""

    __slots__ = (
        "_memory",
        "_memory_of_blocks",
        "block",
        "fenced",
        "first_warp",
        "launches_before",
        "names",
        "proxied",
        "sites",
        "slots",
        "threads",
    )

    def __init__(self, block: int, threads: int):
        self.block, self.threads = block, threads
        self.launches_before = TICK | 2 * threads
        self.first_warp = 2 * threads + 1
        self.slots = self.first_warp + -(-threads // WARP)
        self.fenced = Gathered()  # accesses that a `fence` showed to the whole GPU
        self.proxied = Gathered()  # and fence_proxy_async to asynchronous operations
        self.names: dict[int, str] = {}  # of the slots of mbarriers
        self.sites: dict[int, Any] = {}  # access of an asynchronous operation -> where it was made
        # by the identities of two, what both know
        self._memory: dict[tuple[int, int], tuple[Known, Known, Epoch]] = {}
        self._memory_of_blocks: dict[tuple[int, int], tuple[Elsewhere, Elsewhere, Elsewhere]] = {}

    def new_slot(self, name: str) -> int:
        """A slot for one more mbarrier."""
        self.names[self.slots] = name
        self.slots += 1
        return self.slots - 1

    def wgmma_access(self, warp: int, groups: int) -> int:
        """That of the wgmma of a warp in its first so many groups."""
        return groups << SLOT_BITS | self.first_warp + warp

    # --- what orders
    def meet(self, lanes: list[Lane]) -> None:
        """A barrier of these threads: each knows afterwards what any of them knew."""
        known = _joined({id(lane.known): lane.known for lane in lanes}.values())
        others: dict[int, Elsewhere] = {}  # by identity: most threads know the same of other blocks
        for lane in lanes:
            known[lane.index] = known[lane.loads] = lane.access >> SLOT_BITS
            if lane.own:
                _raise_to(known, lane.own)
                lane.own = {}
            if lane.elsewhere is not None:
                others[id(lane.elsewhere)] = lane.elsewhere
        elsewhere = reduce(self.both, others.values()) if others else None
        epoch = Epoch(known)
        for lane in lanes:
            lane.known, lane.elsewhere, lane.epoch = known, elsewhere, epoch
            lane.access += TICK

    def take_loads(self, lanes: list[Lane]) -> None:
        """A `wgmma` of a warp: each lane knows afterwards what any of them has loaded."""
        changed: dict[int, tuple[Known, Epoch]] = {}
        for lane in lanes:
            if id(lane.known) not in changed:
                known = lane.known.copy()
                for each in lanes:
                    known[each.loads] = max(known[each.loads], each.access >> SLOT_BITS)
                changed[id(lane.known)] = lane.known, Epoch(known)
        for lane in lanes:
            lane.epoch = changed[id(lane.known)][1]
            lane.known = lane.epoch.known
            lane.access += TICK

    def arrive(self, lane: Lane, at: Gathered) -> None:
        """Who waits there will know what this thread knows now."""
        at.add(lane)
        _advance(lane)

    def learn(self, lane: Lane, known: Known, elsewhere: Elsewhere | None = None) -> None:
        """The thread has waited for those who knew that."""
        key = id(lane.known), id(known)
        found = self._memory.get(key)
        if found is None:
            if len(self._memory) > _REMEMBERED:
                self._memory.clear()
            found = self._memory[key] = lane.known, known, Epoch(_joined((lane.known, known)))
        epoch = found[2]
        lane.known = epoch.known
        is_next = lane.access >> SLOT_BITS == lane.known[lane.loads] + 1
        lane.epoch = epoch if is_next else None
        if elsewhere is not None:
            lane.elsewhere = self.both(lane.elsewhere, elsewhere)

    def both(self, a: Elsewhere | None, b: Elsewhere) -> Elsewhere:
        """What two threads know of other blocks; `a` itself where it holds all that `b` does."""
        if a is None or a is b:
            return b
        key = id(a), id(b)
        found = self._memory_of_blocks.get(key)
        if found is None:
            if len(self._memory_of_blocks) > _REMEMBERED:
                self._memory_of_blocks.clear()
            seen, read = _merged(a.seen, b.seen), _merged(a.read, b.read)
            both = a if (seen, read) == (a.seen, a.read) else Elsewhere(seen, read)
            found = self._memory_of_blocks[key] = a, b, both
        return found[2]

    def fence(self, lane: Lane) -> None:
        """`fence`: what the thread knows, others may know that see its next atomics or relaxed
        stores; what its last atomics or relaxed loads read, it knows."""
        self.fenced.add(lane)
        elsewhere = lane.elsewhere
        if elsewhere is not None and elsewhere.read:
            own = elsewhere.read.get(self.block)
            if own is not None:  # of threads of this block
                self.learn(lane, own)
            others = {
                block: known for block, known in elsewhere.read.items() if block != self.block
            }
            lane.elsewhere = Elsewhere(_merged(elsewhere.seen, others), {})
        _advance(lane)

    def fence_proxy(self, lane: Lane) -> None:
        """`fence_proxy_async`: what the thread knows, asynchronous operations see."""
        self.proxied.add(lane)
        _advance(lane)

    def fence_proxy_global(self, lane: Lane) -> None:
        """`fence_proxy_async_global`: what the thread knows, copies that it issues see."""
        lane.proxied = Proxied(lane)

    def atomic(self, lane: Lane, counter: dict[int, Known]) -> None:
        """An atomic: `counter` is what those knew who came before. The thread reads it on its next
        fence."""
        self.observe(lane, counter)
        self.show(lane, counter)

    def show(self, lane: Lane, counter: dict[int, Known]) -> None:
        """An atomic or a relaxed store: who sees it may know what the last fence showed."""
        known = lane.known.copy()
        known[lane.index] = known[lane.loads] = lane.access >> SLOT_BITS
        shown = list(map(min, known, self.fenced.known))
        counter[self.block] = _joined((counter.get(self.block, []), shown))
        elsewhere = lane.elsewhere or Elsewhere({}, {})
        for block, known in elsewhere.seen.items():
            counter[block] = _joined((counter.get(block, []), known))
        _advance(lane)

    def observe(self, lane: Lane, counter: dict[int, Known]) -> None:
        """An atomic or a relaxed load of what others have shown: known from the next fence on."""
        if counter:
            elsewhere = lane.elsewhere or Elsewhere({}, {})
            lane.elsewhere = Elsewhere(elsewhere.seen, _merged(elsewhere.read, counter))

    def waited_for_launches(self, lane: Lane) -> None:
        """`griddepcontrol_wait`."""
        lane.own = lane.own | {self.launches_before & SLOT: 1}

    def waited_for_wgmma(self, lane: Lane, access: int) -> None:
        """`wgmma_wait` for this access of its warp."""
        lane.own = lane.own | {access & SLOT: access >> SLOT_BITS}

    # --- what is ordered
    def who(self, access: int) -> str:
        """Who made it, in words."""
        if access < 0:
            return f"a cp_async of thread {~access}"
        slot = access & SLOT
        if slot < 2 * self.threads:
            return f"thread {slot % self.threads}"
        where = f" in {self.sites[access]}" if access in self.sites else ""
        if slot in self.names:
            return f"a copy that reports to mbarrier {self.names[slot]}"
        return f"a wgmma of warp {slot - self.first_warp}{where}"


def _advance(lane: Lane) -> None:
    """The next clock of a thread."""
    lane.access += TICK
    lane.epoch = None


def epoch_alone(lane: Lane) -> Epoch:
    """An epoch of the thread alone."""
    if lane.epoch is None or not lane.epoch.clock:
        lane.epoch = Epoch(lane.known, lane.access >> SLOT_BITS)
    return lane.epoch


def knows(lane: Lane, access: int) -> bool:
    """Whether an access of the same block came before what the thread does now."""
    slot = access & SLOT
    if access < 0:  # a cp_async under way
        return False
    if slot == lane.index or slot == lane.loads or holds(lane.known, access):
        return True
    return lane.own.get(slot, 0) >= access >> SLOT_BITS


def holds(known: Known, access: int) -> bool:
    """Whether a list says that the access came before."""
    slot = access & SLOT
    return access >= 0 and slot < len(known) and known[slot] >= access >> SLOT_BITS


def _joined(lists: Iterable[Known]) -> Known:
    """A new list of the highest clocks."""
    longest, *others = sorted(lists, key=len, reverse=True)
    if not others:
        return longest.copy()
    length = len(longest)
    return list(
        map(max, longest, *(o if len(o) == length else o + [0] * (length - len(o)) for o in others))
    )


def _raise_to(known: Known, own: dict[int, int]) -> None:
    for slot, clock in own.items():
        if slot >= len(known):
            known.extend([0] * (slot + 1 - len(known)))
        known[slot] = max(known[slot], clock)


def _merged(a: dict[int, Known], b: dict[int, Known]) -> dict[int, Known]:
    both = b | a
    for block in a.keys() & b.keys():
        if a[block] is not b[block]:
            both[block] = _joined((a[block], b[block]))
    return both
