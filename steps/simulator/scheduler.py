"""One lane at a time: the simulator's scheduler.

Each CUDA thread is a greenlet that runs until it must wait: at a barrier, a warp-wide instruction,
or where it polls. A lane that never waits runs from start to end before the next begins, so what a
kernel does without a barrier it does in the most revealing way: one thread is as far ahead of the
others as the barriers allow.

Bulk copies (`steps.simulator.asynchronous`) arrive when nobody else can go on, or, where the
order is shuffled, now and then before.

The order in which ready lanes run is the caller's (`order`): 0 ascending, first come first served;
-1 descending, a warp goes on as far as it can before the next; any other number seeds a shuffle.
"""

import linecache
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable
from contextvars import copy_context
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np

from steps.simulator.asynchronous import BarrierWait, BulkCopy, MBarrier, SharedMemory
from steps.simulator.errors import BarrierDivergence, Deadlock, SimulatorError

WARP = 32
WARPGROUP = 128
FULL_MASK = 0xFFFFFFFF
_PATIENCE = (
    64  # rounds of nothing but polling, by every ready lane, before they are declared deadlocked
)

# The code objects of kernels and device functions rebuilt for simulation, by identity (two of one
# factory are equal): how a frame is recognised as a kernel's own.
kernel_codes: dict[int, CodeType] = {}


class Dim3:
    """x, y, z of an index or an extent."""

    __slots__ = ("x", "y", "z")

    def __init__(self, x: int = 1, y: int = 1, z: int = 1):
        self.x, self.y, self.z = x, y, z

    def __iter__(self):
        return iter((self.x, self.y, self.z))

    def __repr__(self) -> str:
        return f"({self.x}, {self.y}, {self.z})"


class Block:
    """One thread block: its lanes, its shared memory, and who waits where."""

    __slots__ = (
        "barriers",
        "dynamic",
        "index",
        "lanes",
        "memory",
        "multiplying",
        "registers",
        "shared",
        "waiting",
    )

    def __init__(self, index: Dim3, shared_bytes: int):
        self.index = index
        self.shared: dict = {}  # call site -> CheckedArray
        # One pattern must be garbage for every view of it: 0xFF is NaN as float16, float32 and
        # float64.
        self.dynamic = np.full(shared_bytes, 0xFF, np.uint8)
        self.waiting: dict[tuple, list[Lane]] = {}
        self.memory = SharedMemory()
        self.barriers: dict[int, NamedBarrier] = {}  # those of `barrier_sync`, while in use
        self.multiplying: dict[int, list] = {}  # warpgroup -> its wgmma under way
        self.registers: dict[int, int] = {}  # warpgroup -> what it gave itself (setmaxnreg)
        self.lanes: list[Lane] = []


class NamedBarrier:
    """A barrier of some of a block's threads, from its first arrival to its last."""

    __slots__ = ("arrived", "threads")

    def __init__(self, threads: int):
        self.threads = threads
        self.arrived: set[int] = set()


class Lane:
    """One CUDA thread."""

    __slots__ = (
        "block",
        "commits",
        "copies",
        "done",
        "fenced",
        "greenlet",
        "groups",
        "index",
        "meeting",
        "operands",
        "result",
        "site",
        "thread",
    )

    def __init__(self, block: Block, index: int, thread: Dim3):
        self.block, self.index, self.thread = block, index, thread
        self.greenlet: Any = None
        self.result: Any = None  # of the meeting it was woken from
        self.meeting: Any = ""  # what it waits at, where, and what it brought
        self.site: Site
        self.operands: Any = None
        self.done = False
        self.copies: list = []  # cp.async issued and not yet committed
        self.groups: deque = deque()  # committed groups, oldest first
        self.commits = 0  # groups of wgmma it closed
        self.fenced = False  # whether it called wgmma_fence since


class Site(NamedTuple):
    """A place in a kernel."""

    code_id: int  # an int first, since code objects compare by value and slowly
    instruction: int
    code: CodeType

    @property
    def line(self) -> int:
        """Looked up when a sentence needs it: it takes Python longer than all the rest."""
        lines = self.code.co_lines()
        return next(line or 0 for a, b, line in lines if a <= self.instruction < b)

    def __str__(self) -> str:
        text = linecache.getline(self.code.co_filename, self.line).strip()
        return f"{Path(self.code.co_filename).name}:{self.line}" + (f" `{text}`" if text else "")


def here() -> Site:
    """The innermost place in simulated code on the current stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and id(frame.f_code) not in kernel_codes:
        frame = frame.f_back
    if frame is None:
        raise SimulatorError("this is only defined inside a kernel being simulated")
    return Site(id(frame.f_code), frame.f_lasti, frame.f_code)


class Schedule:
    """The run of one launch. `current` is the schedule in progress; one per process at a time."""

    current: "Schedule | None" = None
    __slots__ = (
        "arguments",
        "banks",
        "block_dim",
        "copies",
        "error",
        "grid_dim",
        "idle",
        "kernel",
        "lane",
        "main",
        "order",
        "polls",
        "random",
        "ready",
    )

    def __init__(
        self,
        kernel: Callable,
        arguments: tuple,
        grid: Dim3,
        block: Dim3,
        order: int,
        banks: Any = None,
    ):
        self.kernel, self.arguments, self.grid_dim, self.block_dim = kernel, arguments, grid, block
        self.order = order
        self.banks = banks  # a BankCounter, or None where nobody asked
        self.random = random.Random(order)
        self.ready: deque[Lane] = deque()
        self.copies: list[BulkCopy] = []  # under way, in the order they were asked for
        self.lane: Lane  # the one that runs
        self.error: tuple[Lane, Exception] | None = None
        self.polls = 0
        self.main: Any  # the greenlet of the schedule itself
        self.idle: list = []  # greenlets whose lane is done: to make one takes longer than many a
        # lane needs, so another lane lives in it

    def run(self, shared_bytes: int, resident: int) -> None:
        """All blocks of the grid, `resident` of them at a time."""
        import greenlet  # here, so that a machine that only compiles or launches needs no greenlet

        grid = self.grid_dim
        indices = [(x, y, z) for z in range(grid.z) for y in range(grid.y) for x in range(grid.x)]
        if self.order == -1:
            indices.reverse()
        elif self.order:
            self.random.shuffle(indices)
        if Schedule.current is not None:
            raise SimulatorError("a kernel is already being simulated in this process")
        Schedule.current = self
        self.main = greenlet.getcurrent()
        try:
            with np.errstate(
                all="ignore"
            ):  # a GPU overflows in silence, and so do wrong kernels worth showing
                for start in range(0, len(indices), resident):
                    self._run_together(
                        [Block(Dim3(*i), shared_bytes) for i in indices[start : start + resident]],
                        greenlet,
                    )
        finally:
            for done in self.idle:
                done.throw(greenlet.GreenletExit)
            Schedule.current = None

    def _run_together(self, blocks: list[Block], greenlet) -> None:
        dim = self.block_dim
        threads = [(x, y, z) for z in range(dim.z) for y in range(dim.y) for x in range(dim.x)]
        for block in blocks:
            block.lanes = [Lane(block, i, Dim3(*t)) for i, t in enumerate(threads)]
        lanes = [lane for block in blocks for lane in block.lanes]
        self.polls = 0
        self._wake(lanes)
        try:
            while (self.ready or self.copies) and self.error is None:
                if self.copies and (not self.ready or self._early()):
                    self._land()
                    continue
                self.lane = lane = self._next()
                if lane.greenlet is None:
                    lane.greenlet = self.idle.pop() if self.idle else self._greenlet(greenlet)
                lane.greenlet.switch()
            if self.error is None:
                self._all_finished(blocks)
            if self.banks is not None:
                self.banks.close(blocks)
        finally:
            self.ready, self.copies = deque(), []
            for lane in lanes:
                if lane.greenlet:  # it has begun and not ended
                    lane.greenlet.throw(greenlet.GreenletExit)
        if self.error is not None:
            lane, error = self.error
            raise self._located(lane, error) from error

    def _greenlet(self, greenlet) -> Any:
        made = greenlet.greenlet(self._live, self.main)
        # Or NumPy's error state, a context variable, would be the default again inside.
        made.gr_context = copy_context()
        return made

    def _live(self) -> None:
        """The life of a lane, and then of others."""
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
            self.main.switch()

    # --- order
    def _wake(self, lanes: list[Lane]) -> None:
        if self.order == -1:
            self.ready.extendleft(lanes)  # the last of them first, before all who were ready
        else:
            self.ready.extend(lanes)

    def _next(self) -> Lane:
        ready = self.ready
        if self.order in (0, -1):
            return ready.popleft()
        i = self.random.randrange(len(ready))
        ready[i], ready[-1] = ready[-1], ready[i]
        return ready.pop()

    def _early(self) -> bool:
        """Whether a bulk copy arrives before it has to."""
        return self.order not in (0, -1) and self.random.random() < 0.25

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
    def meet(self, what: str, key: tuple, members: int, function: Callable, operands, check=True):
        """Wait until `members` lanes are at `key`; `function` of their operands gives the results.

        `what` is for messages. With `check`, they must all have come from the same place in the
        source.
        """
        lane = self.lane
        block = lane.block
        lane.operands, lane.site, lane.meeting = operands, here(), what
        group = block.waiting.setdefault(key, [])
        group.append(lane)
        if len(group) == members:
            del block.waiting[key]
            group.sort(key=lambda member: member.index)
            if check:
                self._same_site(what, group)
            for member, result in zip(group, function([m.operands for m in group]), strict=True):
                member.result, member.operands = result, None
            self.polls = 0
            self._wake(group)
        self.main.switch()
        result, lane.result = lane.result, None
        return result

    def meet_block(self, what: str, function: Callable, operands=()):
        """All threads of the block. Threads that have exited count as missing: see `simulate`."""
        block = self.lane.block
        if self.banks is not None:
            function = self.banks.closing(block, function)
        return self.meet(what, ("block",), len(block.lanes), function, operands)

    def meet_warp(self, what: str, function: Callable, operands=(), mask: int = FULL_MASK):
        """The lanes of the warp that `mask` names; a partial last warp has fewer than 32."""
        lane = self.lane
        warp = lane.index // WARP
        mask &= FULL_MASK
        if not mask >> (lane.index % WARP) & 1:
            raise SimulatorError(
                f"lane {lane.index % WARP} calls {what} with mask {mask:#010x}, which leaves it out"
            )
        size = min(WARP, len(lane.block.lanes) - warp * WARP)
        members = (mask & ((1 << size) - 1)).bit_count()
        return self.meet(what, ("warp", warp, mask), members, function, operands)

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
        phase = barrier.phase_of(lane, parity)
        if barrier.phase == phase:
            self._park(("mbarrier", id(barrier)), BarrierWait(barrier, parity))
        barrier.passed(lane, phase)

    def arrive(self, barrier: MBarrier, expected: int = 0) -> None:
        """Count an arrival at an mbarrier; who waited for it runs before the lane goes on."""
        if barrier.arrive(expected):
            self._resume(self.lane.block, ("mbarrier", id(barrier)))
            self.pause()

    def copy(self, copy: BulkCopy) -> None:
        """A bulk copy is under way from now on."""
        other = next((c for c in self.copies if copy.overlaps(c)), None)
        if other is not None:
            raise SimulatorError(
                f"a bulk copy goes where another of {other.size} bytes is under way to"
            )
        self.copies.append(copy)

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
        if len(barrier.arrived) == threads:
            del barriers[number]
            self._resume(lane.block, ("barrier", number))
            self.pause()
        elif stay:
            self._park(("barrier", number), f"barrier_sync({number}, {threads})")

    def _park(self, key: tuple, meeting: Any) -> None:
        """The lane does nothing until `_resume`."""
        lane = self.lane
        lane.site, lane.meeting = here(), meeting
        lane.block.waiting.setdefault(key, []).append(lane)
        self.main.switch()

    def _resume(self, block: Block, key: tuple) -> None:
        """All lanes that are parked there go on."""
        lanes = block.waiting.pop(key, [])
        self.polls = 0
        self._wake(sorted(lanes, key=lambda lane: lane.index))

    def poll(self) -> None:
        """Let all others run; the lane waits for a change in memory (nanosleep and its like)."""
        self.polls += 1
        if self.copies and self.polls > len(self.ready):  # everybody polls: time for a copy
            self._land()
        if self.polls > _PATIENCE * (len(self.ready) + 1):
            raise Deadlock(f"{len(self.ready) + 1} thread(s) poll and nothing changes any more")
        self.pause()

    def pause(self) -> None:
        """Let all others run as far as they can; the lane goes on after them."""
        if self.order in (0, -1):
            self.ready.append(self.lane)
        else:
            self.ready.insert(0, self.lane)
        self.main.switch()

    # --- what went wrong
    def _same_site(self, what: str, group: list[Lane]) -> None:
        sites: dict[tuple, list[Lane]] = {}
        for member in group:
            sites.setdefault((*member.site[:2], member.meeting), []).append(member)
        if len(sites) > 1:
            parts = "; ".join(
                f"{in_words(g)} at {g[0].meeting} in {g[0].site}" for g in sites.values()
            )
            raise BarrierDivergence(f"the threads meet at different places: {parts}")

    def _all_finished(self, blocks: list[Block]) -> None:
        for block in blocks:
            if not block.waiting:
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


def now() -> Schedule:
    """The schedule in progress."""
    if Schedule.current is None:
        raise SimulatorError("this is only defined inside a kernel being simulated")
    return Schedule.current


def in_words(lanes: Iterable[Lane]) -> str:
    """ "threads 0-15, 40" from lanes, by linear index."""
    indices = sorted(lane.index for lane in lanes)
    runs: list[list[int]] = []
    for i in indices:
        if runs and i == runs[-1][1] + 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in runs[:6]] + (
        ["..."] if len(runs) > 6 else []
    )
    return ("thread " if len(indices) == 1 else "threads ") + ", ".join(shown)
