"""What the warps of a step do to memory: its launch in the simulator, recorded."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import numpy as np

from qformats import FORMATS
from reference import Problem
from steps.api.machines import Simulator
from steps.contract import Shape, Size, Work, array_dtype
from steps.simulator.lanes import WARP, WARPGROUP
from steps.simulator.launch import simulate
from steps.simulator.trace import Instruction, Recorder

DEPTH: Final = 256
"""K of a recorded launch: a few turns of the main loop."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The memory instructions of some warps of one block of a launch."""

    work: Work
    size: Size
    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]  # threads
    instructions: list[Instruction]


def size_of(home: Size) -> Size:
    """The tokens and features of a home shape, and so its tiles; K no deeper than need be."""
    m, n, k = home
    return m, n, min(k, DEPTH)


def trace(
    work: Work,
    size: Size,
    *,
    dtype: str = "float32",
    block: tuple[int, int, int] = (0, 0, 0),
    warps: Collection[int] | None = None,
) -> Trace:
    """Records the step's own launch, without its activation pass: where lanes load and store does
    not depend on the values of A, which are zeros here.

    dtype: of C, and of A where the step reads it. warps: by default the first of each warpgroup,
    for warps that have work of their own. ValueError where there is no such block or warp.
    """
    (m, n, k), step, machine = size, work.step, Simulator()
    fmt = FORMATS[work.format]
    weights = step.pack(Problem(1, n, k, work.format).blocks)
    activations = step.activations(work.family, np.zeros((m, k), np.float32), machine)
    for array in activations.arrays:
        array[...] = 0
    out = machine.empty((m, n), array_dtype(dtype))
    launch = step.prepare(
        machine, fmt, work.family, Shape(m, n, k), weights, activations.arrays, out
    )
    threads = math.prod(launch.block)
    if warps is None:
        warps = range(0, -(-threads // WARP), WARPGROUP // WARP)
    recorder = Recorder(block, warps)
    simulate(
        launch.kernel,
        launch.grid,
        launch.block,
        launch.args,
        shared_bytes=launch.shared_bytes,
        trace=recorder,
    )
    name = launch.kernel.__name__
    return Trace(work, size, name, launch.grid, launch.block, recorder.instructions())
