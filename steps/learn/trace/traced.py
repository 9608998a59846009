"""What the warps of a step do to memory: its launch in the simulator, recorded."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from qformats import FORMATS
from reference import Problem
from steps.blocks.experts import RowsByIds
from steps.contract import Launch, Shape, Size, Work, array_dtype
from steps.driver.machines import Simulator
from steps.kernels.parts.activations.layouts import inputs
from steps.registry import lesson_of
from steps.simulator.banks import SECTOR
from steps.simulator.lanes import WARP, WARPGROUP
from steps.simulator.launch import simulate
from steps.simulator.trace import BULK, Instruction, Recorder, first_warps

DEPTH: Final = 768
"""K of a recorded launch: some turns of the main loop, behind the first stages of every ring."""
SHALLOW: Final = 128
"""The same on CUDA cores, where a product takes many instructions and the simulator long."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The memory instructions of some warps of one block of a launch."""

    work: Work
    size: Size
    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]  # threads
    instructions: list[Instruction]


def size_of(work: Work, home: Size) -> Size:
    """The tokens and features of a home shape, and so its tiles; K no deeper than need be."""
    m, n, k = home
    depth = SHALLOW if lesson_of(work.step).branch == "cuda_cores" else DEPTH
    return m, n, min(k, max(depth, FORMATS[work.format].elements))


def trace(
    work: Work,
    size: Size,
    *,
    dtype: str | None = None,
    warps: Collection[int] | None = None,
) -> Trace:
    """Records the step's own launch, without its activation pass: where lanes load and store does
    not depend on the values of A, which are zeros here.

    dtype: of C, by default the step's own. warps: by default the first of each warpgroup,
    for warps that have work of their own. ValueError where there is no such warp.
    """
    (m, n, k), step, machine = size, work.step, Simulator()
    fmt = FORMATS[work.format]
    blocks = Problem(1, n, k, work.format).blocks
    make, dtype_of_a = step.activations[work.family], array_dtype(inputs(step, work.family)[0])
    if isinstance(make, RowsByIds):
        # as many rows of an expert as there are on average, of the experts of a token, or of one
        rows = max(1, m // make.experts)
        few = min(m, make.chosen) if rows == 1 else 1
        blocks, m = np.stack([blocks] * few), rows * few
        ids = np.tile(np.arange(few, dtype=np.int32), (rows, 1))
        activations = make(np.zeros((rows, k), dtype_of_a), machine, ids, few)
        for before in activations.launches:
            machine.run(before)
    else:
        activations = make(np.zeros((m, k), dtype_of_a), machine)
        for array in activations.arrays:
            array[...] = 0
    weights = step.pack(blocks)
    out = machine.empty((m, n), array_dtype(work.output(dtype)))
    launch = step.prepare(
        machine, fmt, work.family, Shape(m, n, k), weights, activations.arrays, out
    )
    hand_over(launch)
    threads = math.prod(launch.block)
    if warps is None:
        warps = range(0, -(-threads // WARP), WARPGROUP // WARP)
    recorder = Recorder(warps=warps)
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


def hand_over(launch: Launch) -> None:
    """Gives a block that will run alone something in place of what the others would hand to it: the
    last argument of a launch whose blocks wait for each other, zeros until then."""
    if launch.together:
        launch.args[-1][...] = 1


def main_requests(instructions: Sequence[Instruction]) -> list[Instruction]:
    """The few that say most: of global memory the two arrays that cost most to load, and what is
    stored; of shared memory what costs most to store and the two ways of loading that do."""
    shown = first_warps(instructions)
    from_global = {each.way for each in shown if each.space == "global" and each.kind == BULK}
    groups: dict[str, list[Instruction]] = {}
    for each in shown:
        if each.kind == BULK and each.space == "shared" and each.way in from_global:
            continue  # the same copy, seen from its other end
        groups.setdefault(_group(each), []).append(each)
    found = []
    for group, own in groups.items():
        best: dict[tuple[str, str], Instruction] = {}  # by array and kind
        for each in sorted(own, key=_cost, reverse=True):
            best.setdefault((each.array, each.kind), each)
        found += list(best.values())[: MOST[group]]
    return [each for each in shown if any(each is one for one in found)]


MOST: Final = {"fetch": 2, "to global": 1, "to shared": 1, "from shared": 2}
"""How many of each are shown."""


def _group(instruction: Instruction) -> str:
    if instruction.space == "global":
        return "to global" if instruction.kind in ("store", "atomic") else "fetch"
    if instruction.kind == BULK:  # of a tensor map: the array it comes from is not an argument
        return "fetch"
    return "from shared" if instruction.kind in ("load", "ldmatrix") else "to shared"


def _cost(instruction: Instruction) -> int:
    if instruction.kind == BULK:
        return instruction.size * instruction.requests // SECTOR
    return instruction.sectors + instruction.wavefronts
