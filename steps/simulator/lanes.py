"""What a launch is made of: blocks of lanes, where each waits, and places in its kernel."""

from __future__ import annotations

import linecache
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np

from steps.simulator.errors import SimulatorError
from steps.simulator.ordering import TICK, Elsewhere, Epoch, Gathered, Order, Proxied
from steps.simulator.shared_memory import SharedMemory

WARP = 32
WARPGROUP = 128
FULL_MASK = 0xFFFFFFFF
REGISTERS = 65536  # of a multiprocessor, and of a block that has it to itself

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
        "order",
        "registers",
        "shared",
        "waiting",
    )

    def __init__(self, index: Dim3, threads: Sequence[Dim3], shared_bytes: int, number: int):
        self.index = index
        self.order = Order(number, len(threads))
        self.shared: dict = {}  # call site -> CheckedArray
        # One pattern must be garbage for every view of it: 0xFF is NaN as float16, float32 and
        # float64.
        self.dynamic = np.full(shared_bytes, 0xFF, np.uint8)
        self.waiting: dict[tuple, list[Lane]] = {}
        self.memory = SharedMemory(self)
        self.barriers: dict[int, NamedBarrier] = {}  # of `barrier_sync`, while threads wait there
        self.multiplying: dict[int, list] = {}  # warpgroup -> its wgmma under way
        self.registers: dict[int, tuple[str, int]] = {}  # warpgroup -> its setmaxnreg: "inc" or
        # "dec", registers per thread
        self.lanes: list[Lane] = []
        epoch = Epoch([0] * self.order.slots)
        for first in range(0, len(threads), WARP):
            warp = Warp(first // WARP, min(WARP, len(threads) - first))
            for i in range(first, first + warp.size):
                self.lanes.append(Lane(self, warp, i, threads[i], epoch))

    def check_end(self) -> None:
        """What may be left when all threads have exited."""
        for number, barrier in self.barriers.items():
            arrived = in_words(self.lanes[i] for i in barrier.arrived)
            raise SimulatorError(
                f"{arrived} of block {self.index} arrived at barrier {number} of {barrier.threads} "
                "threads (barrier_arrive), and nobody has waited there"
            )
        if self.registers:
            self._check_registers()

    def _check_registers(self) -> None:
        """Whether those that the warpgroups asked for are there, once all have asked."""
        groups = -(-len(self.lanes) // WARPGROUP)
        at_launch = REGISTERS // len(self.lanes) // 8 * 8
        each = [self.registers.get(group, ("", at_launch)) for group in range(groups)]
        total = WARPGROUP * sum(registers for _, registers in each)
        if total > REGISTERS and any(change == "inc" for change, _ in each):
            raise SimulatorError(
                f"the warpgroups of block {self.index} would have {total} registers, more than the "
                f"{REGISTERS} of a multiprocessor: setmaxnreg_inc would wait for ever"
            )
        if {change for change, _ in self.registers.values()} == {"dec"}:
            raise SimulatorError(
                f"warpgroups of block {self.index} give registers back (setmaxnreg_dec), and none "
                "takes them (setmaxnreg_inc)"
            )


class NamedBarrier:
    """A barrier of some of a block's threads, from its first arrival to its last."""

    __slots__ = ("arrived", "gathered", "threads")

    def __init__(self, threads: int):
        self.threads = threads
        self.gathered = Gathered()
        self.arrived: set[int] = set()


class Warp:
    """32 lanes of a block, or fewer in its last warp."""

    __slots__ = ("index", "key", "size")

    def __init__(self, index: int, size: int):
        self.index, self.size = index, size
        self.key = ("warp", index, FULL_MASK)  # where all of them meet


class Lane:
    """One CUDA thread."""

    __slots__ = (
        "access",
        "bit",
        "block",
        "code",
        "commits",
        "copies",
        "done",
        "elsewhere",
        "epoch",
        "fenced",
        "greenlet",
        "groups",
        "index",
        "instruction",
        "known",
        "loads",
        "meeting",
        "operands",
        "own",
        "proxied",
        "result",
        "thread",
        "warp",
    )

    def __init__(self, block: Block, warp: Warp, index: int, thread: Dim3, epoch: Epoch):
        self.block, self.warp, self.index, self.thread = block, warp, index, thread
        # What orders its accesses (`steps.simulator.ordering`): its slot and clock, the slot of its
        # loads, what it knows of other slots, what it alone knows besides, and of other blocks; its
        # bit in a set of threads, and those that its loads are one with.
        self.access = TICK | index
        self.loads = index + block.order.threads
        self.bit = 1 << index
        self.known = epoch.known
        self.epoch: Epoch | None = epoch
        self.own: dict[int, int] = {}
        self.elsewhere: Elsewhere | None = None
        self.proxied: Proxied | None = None  # what its copies of global memory see
        self.greenlet: Any = None
        self.result: Any = None  # of the meeting it was woken from
        self.meeting: Any = ""  # what it waits at, and the operands it brought
        self.operands: Any = None
        self.code: CodeType  # where it waits: see `Site`
        self.instruction: int
        self.done = False
        self.copies: list = []  # cp.async issued and not yet committed
        self.groups: deque = deque()  # committed groups, oldest first
        self.commits = 0  # groups of wgmma it closed
        self.fenced = False  # whether it called wgmma_fence since

    @property
    def site(self) -> Site:
        """Where it waits."""
        return Site(id(self.code), self.instruction, self.code)


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

    @property
    def name(self) -> str:
        """ "step03_shared_tiled.py:132"."""
        return f"{Path(self.code.co_filename).name}:{self.line}"

    @property
    def text(self) -> str:
        """The source of the line; empty where there is no file."""
        return linecache.getline(self.code.co_filename, self.line).strip()

    def __str__(self) -> str:
        text = self.text
        return self.name + (f" `{text}`" if text else "")


def kernel_frame(depth: int) -> FrameType:
    """The innermost frame of simulated code, the `depth` innermost frames not looked at: to name
    those that cannot be it saves their frame objects, which CPython makes on request."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and id(frame.f_code) not in kernel_codes:
        frame = frame.f_back
    if frame is None:
        raise SimulatorError("this is only defined inside a kernel being simulated")
    return frame


def here() -> Site:
    """The innermost place in simulated code on the current stack."""
    frame = kernel_frame(2)
    return Site(id(frame.f_code), frame.f_lasti, frame.f_code)


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
