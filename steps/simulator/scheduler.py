"""One lane at a time: the simulator's scheduler.

Each CUDA thread is a greenlet that runs until it must wait: at a barrier, at a warp-wide
instruction, or where it polls. It then switches to the next ready lane itself. A lane that never
waits runs from start to end before the next begins, so what a kernel does without a barrier it does
in the most revealing way: one thread is as far ahead of the others as the barriers allow.

Bulk copies (`steps.simulator.asynchronous`) arrive when no lane can go on, or, where the order is
shuffled, now and then before.

The order in which ready lanes run is the caller's (`order`): 0 ascending, first come first served;
-1 descending, a warp goes on as far as it can before the next; any other number seeds a shuffle.
"""

from __future__ import annotations

import gc
import os
import random
import threading
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from math import prod
from operator import attrgetter
from typing import Any

import numpy as np

from steps.simulator.asynchronous import BulkCopy
from steps.simulator.errors import BarrierDivergence, Deadlock, SimulatorError
from steps.simulator.lanes import (
    FULL_MASK,
    WARP,
    WARPGROUP,
    Block,
    Dim3,
    Lane,
    NamedBarrier,
    Site,
    in_words,
    kernel_codes,
    kernel_frame,
)
from steps.simulator.shared_memory import BarrierWait, MBarrier

# Rounds of nothing but polling, by every ready lane, before they are declared deadlocked.
_PATIENCE = 64
# Likewise of relaxed loads: a kernel may give up by itself, after some hundred of them.
_LOOKS = 512

_INDEX = attrgetter("index")


class Schedule:
    """The run of one launch. `current` is the schedule in progress, one per process at a time:
    who runs one holds `turn`. collected: whether Python looked for cycles before."""

    current: Schedule | None = None
    turn = threading.RLock()
    collected = True
    __slots__ = (
        "arguments",
        "banks",
        "block_dim",
        "copies",
        "error",
        "grid_dim",
        "idle",
        "in_turn",
        "kernel",
        "lane",
        "later",
        "looking",
        "looks",
        "main",
        "mapped",
        "new_greenlet",
        "order",
        "polls",
        "random",
        "ready",
    )

    def __init__(
        self,
        kernel: Callable,
        arguments: tuple,
        mapped: dict[int, Any],
        grid: Dim3,
        block: Dim3,
        order: int,
        banks: Any = None,
    ):
        self.kernel, self.arguments, self.grid_dim, self.block_dim = kernel, arguments, grid, block
        self.mapped = mapped  # arrays that the kernel reads through another argument, by its id
        self.order, self.in_turn = order, order in (0, -1)
        self.banks = banks  # a `steps.simulator.banks.Gatherer`, or None
        self.random = random.Random(order)
        self.ready: deque[Lane] = deque()
        self.copies: list[BulkCopy] = []  # under way, in the order they were issued
        self.lane: Lane  # the one that runs
        self.error: tuple[Lane, Exception] | None = None
        self.polls = 0
        self.looking: list[Lane] = []  # at memory, by a relaxed load, when it changes
        self.looks = 0  # of all of them, since it changed
        self.later = 0  # blocks that begin when those in flight have ended
        self.main: Any  # the greenlet of the schedule itself
        self.new_greenlet: Any  # the class
        # Greenlets whose lane is done. To make one takes longer than many a lane runs, so another
        # lane lives in it.
        self.idle: list = []

    def run(
        self, shared_bytes: int, resident: int, only: tuple[int, int, int] | None = None
    ) -> None:
        """All blocks of the grid, `resident` of them at a time, or only one."""
        import greenlet  # here, so that a machine that only compiles or launches needs no greenlet

        grid = self.grid_dim
        if only is not None:
            indices = [only]
        else:
            indices = [
                (x, y, z) for z in range(grid.z) for y in range(grid.y) for x in range(grid.x)
            ]
        if self.order == -1:
            indices.reverse()
        elif self.order:
            self.random.shuffle(indices)
        if Schedule.current is not None:
            raise SimulatorError("a kernel is already being simulated in this thread")
        Schedule.current = self
        self.main, self.new_greenlet = greenlet.getcurrent(), greenlet.greenlet
        # Lanes make many small objects and no cycles: to look for them takes a tenth of the time.
        Schedule.collected = gc.isenabled()
        gc.disable()
        try:
            # A GPU overflows in silence, and so do wrong kernels worth showing.
            with np.errstate(all="ignore"):
                for start in range(0, len(indices), resident):
                    self.later = max(0, len(indices) - start - resident)
                    self._run_together(indices[start : start + resident], shared_bytes, start)
        finally:
            for done in self.idle:
                done.throw(greenlet.GreenletExit)
            Schedule.current = None
            if Schedule.collected:
                gc.enable()

    def _run_together(self, indices: list, shared_bytes: int, first: int) -> None:
        """Blocks that are in flight at once; `first` have been before them."""
        dim = self.block_dim
        threads = [Dim3(x, y, z) for z in range(dim.z) for y in range(dim.y) for x in range(dim.x)]
        blocks = [
            Block(Dim3(*index), threads, shared_bytes, first + i) for i, index in enumerate(indices)
        ]
        self.polls = self.looks = 0
        for block in blocks:
            self._wake(block.lanes)
        try:
            lane = self._next()
            while lane is not None:
                if lane.greenlet is None:
                    lane.greenlet = self.idle.pop() if self.idle else self._greenlet()
                lane = lane.greenlet.switch()  # the lanes switch among themselves: see `_switch`
            if self.error is None:
                self._all_finished(blocks)
            if self.banks is not None:
                self.banks.close(blocks)
        finally:
            self.ready, self.copies, self.looking = deque(), [], []
            for block in blocks:
                for lane in block.lanes:
                    if lane.greenlet:  # it has begun and not ended
                        lane.greenlet.throw()
        if self.error is not None:
            lane, error = self.error
            raise self._located(lane, error) from error
        for block in blocks:
            block.lanes.clear()  # a cycle, which `run` has nobody look for

    def _live(self) -> None:
        """The life of a greenlet: a lane, and then others."""
        while True:
            lane = self.lane
            try:
                self.kernel(*self.arguments)
            except Exception as error:
                if self.error is None:
                    self.error = lane, error
            lane.done = True
            self.polls = 0
            self.idle.append(lane.greenlet)
            lane.greenlet = None
            self._switch()

    # --- order
    def _wake(self, lanes: list[Lane]) -> None:
        if self.order == -1:
            self.ready.extendleft(lanes)  # the last of them first, before all who were ready
        else:
            self.ready.extend(lanes)

    def _next(self) -> Lane | None:
        """The lane that runs next; None where no lane can, or something went wrong."""
        ready = self.ready
        while self.error is None:
            if self.copies and (not ready or self._early()):
                self._land()
                continue
            if not ready:
                if not self.looking:
                    return None
                self._look_again()
                continue
            if self.in_turn:
                lane = ready.popleft()
            else:
                i = int(self.random.random() * len(ready))
                ready[i], ready[-1] = ready[-1], ready[i]
                lane = ready.pop()
            self.lane = lane
            return lane
        return None

    def _switch(self) -> None:
        """Let the next lane run. The one that calls this goes on when it is next itself."""
        if self.ready and self.in_turn and self.error is None:
            self.lane = lane = self.ready.popleft()  # as `_next` does, with one call less
        else:
            found = self._next()
            if found is None:
                self.main.switch(None)
                return
            lane = found
        if lane.greenlet is None:
            # A new greenlet is as deep in Python's recursion as the one that starts it.
            if not self.idle:
                self.main.switch(lane)
                return
            lane.greenlet = self.idle.pop()
        lane.greenlet.switch()

    def _greenlet(self) -> Any:
        made = self.new_greenlet(self._live, self.main)
        # Or NumPy's error state, a context variable, would be the default again inside.
        made.gr_context = copy_context()
        return made

    def _early(self) -> bool:
        """Whether a bulk copy arrives before it has to."""
        return not self.in_turn and self.random.random() < 0.25

    def _land(self) -> None:
        """One bulk copy arrives: they need not keep their order."""
        i = {0: 0, -1: -1}.get(self.order)
        copy = self.copies.pop(self.random.randrange(len(self.copies)) if i is None else i)
        self.polls = 0
        try:
            if copy.land():
                self._resume(copy.lane.block, ("mbarrier", id(copy.barrier)))
        except SimulatorError as error:
            error.site = copy.site
            self.error = copy.lane, error

    # --- waiting
    def meet(
        self,
        what: str,
        key: tuple,
        members: int,
        function: Callable,
        operands,
        orders: bool = False,
    ):
        """Wait until `members` lanes are at `key`; `function` of their operands gives the results.

        `what` is for messages. All must have come from the same place in the source. `orders`: it
        orders their accesses to memory (a shuffle does not).
        """
        lane = self.lane
        waiting = lane.block.waiting
        # Between here and the kernel lie a `meet_...` and the instruction that called it.
        frame = kernel_frame(4)
        lane.code, lane.instruction = frame.f_code, frame.f_lasti
        lane.operands, lane.meeting = operands, what
        group = waiting.get(key)
        if group is None:
            group = waiting[key] = []
        group.append(lane)
        if len(group) == members:
            del waiting[key]
            group.sort(key=_INDEX)
            self._same_site(group)
            if orders:
                lane.block.order.meet(group)
            results = function([member.operands for member in group])
            for member, result in zip(group, results, strict=True):
                member.result, member.operands = result, None
            self.polls = 0
            self._wake(group)
        self._switch()
        result, lane.result = lane.result, None
        return result

    def meet_block(self, what: str, function: Callable, operands=()):
        """All threads of the block. Threads that have exited count as missing: see `simulate`."""
        block = self.lane.block
        if self.banks is not None:
            function = self.banks.closing(block, function)
        return self.meet(what, ("block",), len(block.lanes), function, operands, orders=True)

    def meet_warp(
        self,
        what: str,
        function: Callable,
        operands=(),
        mask: int = FULL_MASK,
        orders: bool = False,
    ):
        """The lanes of the warp that `mask` names; a partial last warp has fewer than 32."""
        lane = self.lane
        warp = lane.warp
        mask &= FULL_MASK
        if mask == FULL_MASK:
            return self.meet(what, warp.key, warp.size, function, operands, orders)
        lane_in_warp = lane.index % WARP
        if not mask >> lane_in_warp & 1:
            raise SimulatorError(
                f"lane {lane_in_warp} calls {what} with mask {mask:#010x}, which leaves it out"
            )
        members = (mask & ((1 << warp.size) - 1)).bit_count()
        return self.meet(what, ("warp", warp.index, mask), members, function, operands, orders)

    def meet_warpgroup(self, what: str, function: Callable, operands=()):
        """The 128 threads of the warpgroup."""
        group = self.lane.index // WARPGROUP
        there = len(self.lane.block.lanes) - group * WARPGROUP
        if there < WARPGROUP:
            raise SimulatorError(
                f"{what} needs a warpgroup of 128 threads; the last of this block has {there}"
            )
        return self.meet(what, ("warpgroup", group), WARPGROUP, function, operands)

    def wait_for_phase(self, barrier: MBarrier, parity: int) -> None:
        """Wait until the phase of that parity is complete."""
        lane = self.lane
        phase = barrier.phase_of(lane.index, parity)
        if barrier.phase == phase:
            self._park(("mbarrier", id(barrier)), BarrierWait(barrier, parity))
        barrier.passed(lane, phase)

    def arrive(self, barrier: MBarrier, expected: int = 0) -> None:
        """Count an arrival at an mbarrier; who waited for it runs before the lane goes on."""
        if barrier.arrive(self.lane, expected):
            self._resume(self.lane.block, ("mbarrier", id(barrier)))
            self.pause()

    def copy(self, copy: BulkCopy) -> None:
        """A bulk copy is under way from now on."""
        self.copies.append(copy)
        if self.banks is not None:
            self.banks.copied(copy.lane, copy.into.name, copy.at, copy.size)

    def count_at_barrier(self, number: int, threads: int, *, stay: bool) -> None:
        """Arrive at a named barrier, and wait there if `stay`."""
        what = "barrier_sync" if stay else "barrier_arrive"
        lane, barriers = self.lane, self.lane.block.barriers
        if not 1 <= number <= 15:
            raise SimulatorError(
                f"{what} takes a barrier from 1 to 15 (0 is that of cuda.syncthreads), got {number}"
            )
        if threads % WARP or not 0 < threads <= len(lane.block.lanes):
            raise SimulatorError(
                f"{what} takes a number of threads that is a multiple of 32 and at most the "
                f"block's {len(lane.block.lanes)}, got {threads}"
            )
        self.meet_warp(what, lambda operands: [None] * len(operands))
        barrier = barriers.setdefault(number, NamedBarrier(threads))
        if barrier.threads != threads:
            raise SimulatorError(
                f"{what}: barrier {number} is in use by {barrier.threads} threads, not {threads}"
            )
        if lane.index in barrier.arrived:
            raise SimulatorError(
                f"{what}: the thread has arrived at barrier {number} already, which lacks "
                f"{threads - len(barrier.arrived)} of {threads} threads"
            )
        barrier.arrived.add(lane.index)
        order, gathered = lane.block.order, barrier.gathered
        order.arrive(lane, gathered)
        if len(barrier.arrived) == threads:
            del barriers[number]
            self._resume(lane.block, ("barrier", number))
            self.pause()
        elif stay:
            self._park(("barrier", number), f"barrier_sync({number}, {threads})")
        if stay:
            order.learn(lane, gathered.known, gathered.elsewhere)

    def _park(self, key: tuple, meeting: Any) -> None:
        """The lane does nothing until `_resume`."""
        lane = self.lane
        frame = kernel_frame(3)
        lane.code, lane.instruction, lane.meeting = frame.f_code, frame.f_lasti, meeting
        lane.block.waiting.setdefault(key, []).append(lane)
        self._switch()

    def _resume(self, block: Block, key: tuple) -> None:
        """All lanes that are parked there go on."""
        lanes = block.waiting.pop(key, [])
        self.polls = 0
        self._wake(sorted(lanes, key=_INDEX))

    def poll(self) -> None:
        """Let all others run; the lane waits for a change in memory (nanosleep and the like)."""
        self.polls += 1
        if self.copies and self.polls > len(self.ready):  # everybody polls: time for a copy
            self._land()
        if self.polls > _PATIENCE * (len(self.ready) + 1):
            raise self._nothing_changes(len(self.ready) + 1)
        self.pause()

    def look(self) -> None:
        """Before a relaxed load, which may wait for what others store: the lane goes on when memory
        has changed, or nobody else can go on; where the order is shuffled, at once now and then."""
        if self._early():
            return
        lane = self.lane
        frame = kernel_frame(3)
        lane.code, lane.instruction = frame.f_code, frame.f_lasti
        self.looking.append(lane)
        self._switch()

    def changed(self) -> None:
        """Memory that others may look at has."""
        self.polls = self.looks = 0
        if self.looking:
            self._wake(self.looking)
            self.looking = []

    def _look_again(self) -> None:
        """Nobody else can go on."""
        self.looks += 1
        if self.looks > _LOOKS:
            error, lane = self._nothing_changes(len(self.looking)), self.looking[0]
            error.site = lane.site
            self.error = lane, error
        self._wake(self.looking)
        self.looking = []

    def _nothing_changes(self, threads: int) -> Deadlock:
        what = f"{threads} thread(s) poll and nothing changes any more"
        if self.later:
            what += (
                f"; {self.later} of the {prod(self.grid_dim)} blocks have not begun: blocks that "
                "wait for each other must all run at once"
            )
        return Deadlock(what)

    def pause(self) -> None:
        """Let all others run as far as they can; the lane goes on after them."""
        if self.in_turn:
            self.ready.append(self.lane)
        else:
            self.ready.insert(0, self.lane)
        self._switch()

    # --- what went wrong
    def _same_site(self, group: list[Lane]) -> None:
        """BarrierDivergence unless all of them wait at one place for one thing."""
        code, instruction, what = group[0].code, group[0].instruction, group[0].meeting
        for member in group:
            if (
                member.instruction != instruction
                or member.code is not code
                or member.meeting != what
            ):
                break
        else:
            return
        sites: dict[tuple, list[Lane]] = {}
        for member in group:
            sites.setdefault((*member.site[:2], member.meeting), []).append(member)
        parts = "; ".join(f"{in_words(g)} at {g[0].meeting} in {g[0].site}" for g in sites.values())
        raise BarrierDivergence(f"the threads meet at different places: {parts}")

    def _all_finished(self, blocks: list[Block]) -> None:
        for block in blocks:
            if not block.waiting:
                block.check_end()
                continue
            parts = [
                f"{in_words(g)} wait at {g[0].meeting} in {g[0].site}"
                for g in block.waiting.values()
            ]
            exited = [lane for lane in block.lanes if lane.done]
            if exited:
                parts.append(f"{in_words(exited)} have exited")
            alone = exited or len(block.waiting) == 1
            spins = any(key[0] == "mbarrier" for key in block.waiting)
            kind = BarrierDivergence if alone and not spins else Deadlock
            raise kind(f"no thread of block {block.index} can go on: {'; '.join(parts)}")

    def _located(self, lane: Lane, error: Exception) -> Exception:
        """The error with block, thread and line added to its message."""
        index = getattr(error, "lane_in_warp", None)
        if index is not None:  # found while acting for the whole warp
            lane = lane.block.lanes[lane.index // WARP * WARP + index]
        site, step = getattr(error, "site", None), error.__traceback__
        while step is not None:
            if id(step.tb_frame.f_code) in kernel_codes:
                code = step.tb_frame.f_code
                site = Site(id(code), step.tb_lasti, code)
            step = step.tb_next
        where = f"block {lane.block.index}, thread {lane.thread}, {site}"
        if isinstance(error, SimulatorError):
            return type(error)(f"{error} [{where}]")
        return SimulatorError(f"{type(error).__name__}: {error} [{where}]")


def _start_afresh() -> None:
    """In a forked process, which has none of the threads that may simulate."""
    Schedule.turn = threading.RLock()
    if Schedule.current is not None:
        Schedule.current = None
        if Schedule.collected:
            gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_afresh)


def now() -> Schedule:
    """The schedule in progress."""
    if Schedule.current is None:
        raise SimulatorError("this is only defined inside a kernel being simulated")
    return Schedule.current
