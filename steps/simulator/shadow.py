"""The last accesses to each word of a piece of shared memory, to find those that nothing orders.

Threads load and store, and so do asynchronous operations on their behalf: `cp.async` stores from
its issue to its wait, bulk copies from their issue to the end of an mbarrier's phase, `wgmma` loads
from its issue to its wait. `steps.simulator.ordering` knows what is ordered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from steps.simulator.errors import Race
from steps.simulator.ordering import (
    SLOT,
    SLOT_BITS,
    Block,
    Lane,
    WarpgroupLoads,
    epoch_alone,
    holds,
    knows,
)

Loads = dict[Any, int]
"""Epoch or WarpgroupLoads -> threads."""
_NOBODY: Loads = {}

_WIDEST = 4  # bits: 16 bytes are the widest access of a thread


class Shadow:
    """Of one allocation: what stored to each unit of 16 bytes last, and what loaded it since. Units
    become smaller, all of them, once a thread loads or stores fewer bytes.

    A store overwrites both: what it was ordered after, later accesses are too.
    """

    __slots__ = ("atomics", "bits", "block", "loaded", "name", "stored")

    def __init__(self, block: Block, name: str, size: int):
        self.block, self.name = block, name
        self.bits = _WIDEST
        units = -(-size >> self.bits)
        self.stored = [0] * units  # an access, or 0
        self.loaded: list[Loads] = [_NOBODY] * units  # _NOBODY, or a dictionary of its own
        self.atomics: dict[int, dict[int, int]] = {}  # unit -> slot -> clock, since the last store

    # --- threads
    def load(self, lane: Lane, at: int, size: int) -> None:
        """A thread loads these bytes. Most of the time others have, who know the same."""
        bits, epoch, bit = self.bits, lane.epoch, lane.bit
        if size == 1 << bits and not at & size - 1:
            loads = self.loaded[at >> bits]
            if epoch in loads:
                loads[epoch] |= bit
                return
        units = self._units(at, size)
        loaded = self.loaded
        for i in units:
            loads = loaded[i]
            if epoch in loads:
                loads[epoch] |= bit
            else:
                self._first_load(lane, i)
                epoch = lane.epoch

    def _first_load(self, lane: Lane, i: int) -> None:
        """The first load of unit i in an epoch since the last store. Others in it need not be
        checked: their threads know as much."""
        epoch, last = lane.epoch or epoch_alone(lane), self.stored[i]
        if last and not holds(lane.known, last):
            if not knows(lane, last):
                raise self._loads(last, i)
            epoch = epoch_alone(lane)
        if i in self.atomics:
            self._require_atomics_known(lane, i, "a load of")
            epoch = epoch_alone(lane)
        if self.loaded[i] is _NOBODY:
            self.loaded[i] = {}
        self.loaded[i][epoch] = lane.bit

    def store(self, lane: Lane, at: int, size: int) -> Race | None:
        """A thread stores these bytes. An error unless all bytes are the same as before: threads
        may store one value side by side."""
        return self._overwrite(lane, at, size, lane.access)

    def _overwrite(self, lane: Lane, at: int, size: int, access: int) -> Race | None:
        units = self._units(at, size)
        stored, loaded = self.stored, self.loaded
        mine, before, found = lane.access, 0, None
        for i in units:
            last = stored[i]
            if last != before:
                if last != mine and not knows(lane, last):
                    found = self._stores("a store to", last, "stores to", i)
                    if last < 0 or last & SLOT >= self.block.order.threads:
                        raise found
                before = last
            if loaded[i]:
                self._require_loads_known(lane, i, "a store to")
                loaded[i] = _NOBODY
            if i in self.atomics:
                self._require_atomics_known(lane, i, "a store to")
                del self.atomics[i]
            stored[i] = access
        return found

    def atomic(self, lane: Lane, at: int, size: int) -> None:
        """A thread changes these bytes, and so do others: their atomics need no order."""
        for i in self._units(at, size):
            if self.stored[i] and not knows(lane, self.stored[i]):
                raise self._stores("an atomic on", self.stored[i], "stores to", i)
            self._require_loads_known(lane, i, "an atomic on")
            self.loaded[i] = _NOBODY
            self.atomics.setdefault(i, {})[lane.index] = lane.access >> SLOT_BITS

    def _require_atomics_known(self, lane: Lane, i: int, doing: str) -> None:
        """All who changed unit i before."""
        for slot, clock in self.atomics[i].items():
            access = clock << SLOT_BITS | slot
            if not knows(lane, access):
                raise self._stores(doing, access, "changes by an atomic", i)

    def _require_loads_known(self, lane: Lane, i: int, doing: str) -> None:
        """All who loaded unit i before."""
        for epoch, threads in self.loaded[i].items():
            if access := epoch.unseen(lane, threads):
                raise self._stores(doing, access, "loads", i)

    def _units(self, at: int, size: int) -> range:
        """Those that an access is of; they are as small as it needs from now on."""
        bits = self.bits
        if size < 1 << bits or at & (1 << bits) - 1:
            while bits and (size < 1 << bits or at & (1 << bits) - 1):
                bits -= 1
            self._refine(bits)
        return range(at >> bits, -(-(at + size) >> bits))

    def _refine(self, bits: int) -> None:
        finer = 1 << self.bits - bits
        self.stored = [access for access in self.stored for _ in range(finer)]
        self.loaded = [loads and loads.copy() for loads in self.loaded for _ in range(finer)]
        self.atomics = {
            finer * i + j: slots.copy() for i, slots in self.atomics.items() for j in range(finer)
        }
        self.bits = bits

    # --- asynchronous operations
    def begin_async_store(self, lane: Lane, at: int, size: int) -> None:
        """A `cp.async` of the thread stores to these bytes, until its wait."""
        if found := self._overwrite(lane, at, size, ~lane.index):
            raise found

    def end_async_store(self, lane: Lane, at: int, size: int) -> None:
        """The thread has waited for it: now it is as if it had stored there itself."""
        first, end = at >> self.bits, -(-(at + size) >> self.bits)
        self.stored[first:end] = [lane.access] * (end - first)

    def begin_copy(self, lane: Lane, at: int, size: int, access: int) -> None:
        """A bulk copy, issued by the thread, stores to these bytes: an access of its mbarrier."""
        units = self._units(at, size)
        first, end = units.start, units.stop
        stored = self.stored[first:end]
        for last in set(stored):
            if not knows(lane, last):
                raise self._stores("a copy to", last, "stores to", first + stored.index(last))
            if last & SLOT < self.block.order.threads and last and not self._proxied(last):
                raise self._unfenced("a copy to", last, first + stored.index(last))
        for i in range(first, end):
            self._require_loads_known(lane, i, "a copy to")
        self.stored[first:end] = [access] * (end - first)
        self.loaded[first:end] = [_NOBODY] * (end - first)

    def load_async(
        self, lanes: Sequence[Lane], places: np.ndarray, accesses: Sequence[int]
    ) -> None:
        """A `wgmma` of these threads loads the bytes at these `places`, until its wait: an access
        of each of its warps."""
        units = np.unique(places >> self.bits).tolist()
        stored, loaded = self.stored, self.loaded
        lists = {id(lane.known): lane.known for lane in lanes}.values()
        for last in {stored[i] for i in units} - {0}:
            if not all(holds(known, last) for known in lists):
                for lane in lanes:
                    if not knows(lane, last):
                        i = next(i for i in units if stored[i] == last)
                        raise self._loads(last, i, f"a wgmma of thread {lane.index} and others of")
            if last & SLOT < self.block.order.threads and not self._proxied(last):
                i = next(i for i in units if stored[i] == last)
                raise self._unfenced("a wgmma of", last, i)
        loads = WarpgroupLoads(accesses)
        for i in units:
            if loaded[i] is _NOBODY:
                loaded[i] = {}
            loaded[i][loads] = 0

    def _proxied(self, access: int) -> bool:
        """Whether a fence_proxy_async followed it."""
        known, slot = self.block.order.proxied.known, access & SLOT
        return slot < len(known) and known[slot] >= access >> SLOT_BITS

    # --- sentences
    def _place(self, i: int) -> str:
        return f"byte {i << self.bits} of {self.name}"

    def _loads(self, last: int, i: int, doing: str = "a load of") -> Race:
        order = self.block.order
        if last < 0:
            hint = "cp_async_wait comes first"
        elif last & SLOT in order.names:
            hint = "mbarrier_wait comes first, or a barrier after another thread's"
        else:
            hint = "a barrier is missing between them"
        return Race(f"{doing} {self._place(i)}, to which {order.who(last)} stores: {hint}")

    def _stores(self, doing: str, last: int, did: str, i: int) -> Race:
        order, slot = self.block.order, last & SLOT
        hint = "a barrier, or an arrival and a wait, is missing between them"
        if last > 0 and slot >= order.first_warp and slot not in order.names:
            hint = "wgmma_wait, then an arrival or a barrier, comes first"
        return Race(f"{doing} {self._place(i)}, which {order.who(last)} {did}: {hint}")

    def _unfenced(self, doing: str, last: int, i: int) -> Race:
        return Race(
            f"{doing} {self._place(i)}, to which {self.block.order.who(last)} stored: "
            "fence_proxy_async and a barrier must come between"
        )
