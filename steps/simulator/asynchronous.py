"""Bulk copies, simulated at their worst.

A bulk copy overwrites its destination with garbage (0xFF) at once and stores the data as late as
possible: when every thread waits for something (orders 0 and -1), or at any time before (shuffled).
A thread that waits on its mbarrier goes on then; a thread that does not wait has read garbage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from steps.simulator.arrays import CheckedArray
from steps.simulator.errors import SimulatorError
from steps.simulator.lanes import Lane, Site
from steps.simulator.shared_memory import MBarrier


class BulkCopy:
    """A copy under way; `read` gives its data, as they are when it is called."""

    __slots__ = ("at", "barrier", "into", "lane", "read", "site", "size")

    def __init__(
        self,
        lane: Lane,
        site: Site,
        destination: CheckedArray,
        write: int,
        read: Callable[[], Any],
        size: int,
        barrier: MBarrier,
    ):
        memory = lane.block.memory
        self.lane, self.site, self.barrier = lane, site, barrier
        self.into = memory.allocation(destination)
        self.at = memory.address(destination, write) - self.into.base
        self.read, self.size = read, size
        self.into.shadow.begin_copy(lane, self.at, size, barrier.copy_access)
        self._fill(0xFF)
        barrier.under_way += size

    def _fill(self, data: Any) -> None:
        self.into.bytes[self.at : self.at + self.size] = data

    def land(self) -> bool:
        """Store the data, as the source is now; whether that completes the barrier's phase."""
        if all(lane.done for lane in self.lane.block.lanes):
            raise SimulatorError(
                f"all threads of the block have exited while {self.size} bytes are on their way to "
                f"{self.into.place(self.into.base + self.at)}"
            )
        self._fill(np.frombuffer(self.read(), np.uint8))
        return self.barrier.brought(self.size)
