"""Lessons and engineered kernels, every format, ragged shapes, several lane orders, in the
simulator."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from qformats import BLOCK, FORMATS
from reference import CHECK_SHAPES, Problem, check
from steps.checks.cases import Case, cases, routing
from steps.checks.run import check_works
from steps.checks.verify import multiply, operands, prepare, verify
from steps.contract import Family, Kernel, Size, Step, Work
from steps.driver.machines import Simulator
from steps.kernels.decode import tiles as decode_tiles
from steps.kernels.parts.activations.layouts import (
    all_float16_rows,
    float16_rows_of_many,
    reading_of,
)
from steps.kernels.prefill import mma_tiles
from steps.registry import find, kernel_of
from tests.kernels.passes import RemembersPasses
from tests.steps.test_bytes import product
from tests.steps.works import (
    ENGINEERED,
    WITH_LESSONS,
    WORKS,
    by_turn,
    drawn_for,
    in_turn,
    input_of,
    label_of,
)

DESCENDING = -1


def check_cases() -> Iterator[pytest.param]:
    """(step, family, format, whether the golden case and the largest sums are tried, whether the
    shapes). In three formats; where a step has two families, whose tiles are the same, the first of
    them in one. `make test` tries the golden case and the largest sums in the first of the formats,
    but where integers of 16 bits are added up, and their number is one of the format."""
    for work in WORKS:
        step, family, name = work.values
        formats = 3 if family == step.families[-1] else 1
        ((_, _, _, *marks),) = [(*each.values, *each.marks) for each in by_turn([work], 0, formats)]
        first = turn_of(step, name) == (1 if step in ENGINEERED else 0)
        if first or step.number in (4, 5) or pytest.mark.every in marks:
            yield pytest.param(step, family, name, True, True, id=work.id, marks=marks)
        else:
            yield pytest.param(step, family, name, False, True, id=work.id, marks=marks)
            label = f"{work.id}-extreme"
            yield pytest.param(step, family, name, True, False, id=label, marks=pytest.mark.every)


def turn_of(step: Kernel, name: str) -> int:
    return next(i for i in range(5) if name == in_turn(step.number + 2 * i, step.formats[:5]))


@pytest.mark.parametrize(("step", "family", "name", "extremes", "shapes"), list(check_cases()))
def test_right_on_check_shapes(
    step: Kernel, family: Family, name: str, extremes: bool, shapes: bool
) -> None:
    """A third of the shapes in each format, all of them in the three that `make test` runs; of a
    kernel whose lesson has one of the three, half of them. Distributions, seeds and lane orders go
    round too."""
    turn, parts = turn_of(step, name), 3 if isinstance(step, Step) else 2
    if step.formats == (name,):
        parts = 1

    def some(work: Work) -> tuple[Case, ...]:
        golden, extreme, *others = cases(name, simulated=True, step=step)
        assert extreme.distribution == "extreme"
        return (golden, extreme)[: 2 * extremes] + tuple(others[turn % parts :: parts] * shapes)

    outcomes = check_works([Work(step, family, name)], some, RemembersPasses)
    of_shapes = len(CHECK_SHAPES[turn % parts :: parts])
    assert outcomes.each[0].cases == 2 * extremes + of_shapes * shapes
    assert outcomes.ok, "\n".join(outcomes.each[0].failures)


@pytest.mark.parametrize(("step", "family", "name"), by_turn(WORKS, formats=1))
def test_exact_in_two_lane_orders_where_nothing_is_spoiled(
    step: Kernel, family: Family, name: str
) -> None:
    """A missing barrier would show in at least one of these orders; the check shapes are in others
    besides. In the second one there are NaN and Inf among the activations (`gemm` does not look for
    them on a GPU) and in scales (which it refuses): they spoil their own rows and columns only."""
    problem = drawn_for(step, 9, 35, 96, name, "integer", seed=7, input=input_of(step, family))
    machine = RemembersPasses(DESCENDING)
    prepared = prepare(step, family, name, problem.a, problem.blocks, machine)
    right = multiply(prepared, machine).copy()
    assert check(right, problem, family, operands(prepared, machine)).ok
    a, blocks = problem.a.copy(), problem.blocks.copy()
    a[1, 70], a[4, 3], a[4, 4] = np.nan, np.inf, -1
    blocks["d"][34, 1], blocks["d"][20, 0] = np.nan, np.inf
    machine = RemembersPasses(3)
    c = multiply(prepare(step, family, name, a, blocks, machine), machine)
    spoiled = np.zeros(c.shape, bool)
    spoiled[[1, 4]] = spoiled[:, [20, 34]] = True
    hidden = np.zeros(c.shape, bool)
    if step.accuracy == "pruned":  # by weights that are pruned
        w = FORMATS[name].dequantize(problem.blocks)
        hidden[1], hidden[4] = w[:, 70] == 0, w[:, 3] == 0
        hidden[:, [20, 34]] = False
        assert np.isfinite(c[hidden]).any()
    assert not np.isfinite(c[spoiled & ~hidden]).any()
    np.testing.assert_array_equal(c[~spoiled], right[~spoiled])


@pytest.mark.parametrize("number", [4, 5])
def test_a_chain_twice_as_long_is_wrong(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every format, as sums of 16 bits run over: the largest codes and activations show it."""
    step = find(number)
    module = sys.modules[step.launch.__module__]
    monkeypatch.setattr(module, "CHAIN", {bits: 2 * n for bits, n in module.CHAIN.items()})
    monkeypatch.setattr(module, "kernel", module.kernel.__wrapped__)
    for name in step.formats:
        if module.CHAIN[FORMATS[name].bits] > BLOCK // 2:
            continue  # there are no more pairs in a block
        (extreme,) = [one for one in cases(name, simulated=True) if one.distribution == "extreme"]
        outcomes = check_works([Work(step, "A8", name)], lambda _, one=extreme: [one], Simulator)
        assert "differ in the exact case" in outcomes.each[0].failures[0]


# One more row and column than the tile of each that has a large one. Others have such shapes in
# `SHARED_WORK`.
EDGES = (
    (find(5), (129, 65, 32)),
    (find(6), (129, 65, 32)),
    (find(7), (65, 129, 32)),
    (find(8), (65, 129, 32)),
    (find(11), (65, 131, 32)),
    (kernel_of(11), (65, 131, 32)),
    (kernel_of(13), (17, 131, 32)),
)


@pytest.mark.slow
@pytest.mark.parametrize(("step", "shape"), EDGES, ids=lambda one: getattr(one, "name", None))
def test_a_tile_edge_in_both_directions(step: Kernel, shape: Size) -> None:
    """The edges of a tile are the same in all formats."""
    family, name = step.families[-1], in_turn(step.number)
    problem = Problem(*shape, name, "integer", seed=1, input=input_of(step, family))
    assert verify(step, family, problem, RemembersPasses(5)).ok


# (shape, distribution, dtypes of A and C). A row of C is no multiple of four, or whole; K goes
# beyond the first stage. Where a step does not write that dtype, C is float32.
CALLS = (
    ((9, 37, 96), "llm", "float32", "float16"),
    ((5, 132, 64), "uniform", "float32", "float16"),
    ((9, 37, 96), "llm", "float16", "float16"),
    ((17, 36, 288), "integer", "bfloat16", "bfloat16"),
)


def calls() -> Iterator[pytest.param]:
    """(work, shape, distribution, dtype of A, of C): every call in one format, and another for the
    next step. A as a caller has it, where the step reads it so."""
    for work in by_turn(WORKS, shift=1, formats=1):
        step, family, _ = work.values
        for shape, distribution, source, output in CALLS:
            reads = reading_of(step, source, family).source == source
            if source == "bfloat16" and family == "A16":
                reads = reads and "bfloat16" in step.outputs
            to = output if output in step.outputs else step.outputs[0]
            if reads and (source, to) != ("float32", "float32"):
                label = f"{work.id}-{source}-to-{to}-{shape[1]}"
                values = (*work.values, shape, distribution, source, to)
                yield pytest.param(*values, id=label, marks=work.marks)


@pytest.mark.parametrize(
    ("step", "family", "name", "shape", "distribution", "source", "output"), list(calls())
)
def test_dtypes_of_a_and_c(
    step: Kernel,
    family: Family,
    name: str,
    shape: Size,
    distribution: str,
    source: Any,
    output: str,
) -> None:
    """Right, and within the guard bands. Where A of 16 bits is not quantized there is no pass, but
    for bfloat16 that becomes float16."""
    problem = drawn_for(step, *shape, name, distribution, input=source)
    if family == "A16" and source != "float32" and routing(step, shape) is None:
        make = step.activations[family]
        passes = source == "bfloat16" and make in (all_float16_rows, float16_rows_of_many)
        assert len(make(problem.given, Simulator()).launches) == passes
    found = verify(step, family, problem, RemembersPasses(shape[0] % 4), dtype=output)
    assert found.ok, found.verdict


# --- kernels that share out work by the number of SMs ---------------------------------------------
# On 132 SMs a product small enough to simulate is never shared unevenly; on one or two it is. A
# number is that of an engineered kernel, or of a lesson without one.
# Step 10: work ranges that end within tiles. Steps 17 and 18: rings used again and again, for
# several pairs of row tiles; warps along N; tiles of A in the slots, with K that ends in a tile;
# groups of tokens (tests.kernels.test_decode has more). Step 11: split-K, and tiles of many
# tokens, which no small product has, with K longer than the ring. Steps 12 and 13: such tiles, and
# a ring used again and again. Steps 14 and 15: work ranges, two accumulator halves, three
# warpgroups, partial sums in two slices, or in four by five blocks. Constants are those of the
# module that has the tile heuristics.
HEURISTICS_IN = {11: mma_tiles, 17: decode_tiles, 18: decode_tiles}  # any other: its own module
SHARED_WORK = (
    (10, 1, (3, 300, 640), {"tiling": lambda *_: (16, 3, 4, 3)}),
    (10, 1, (70, 20, 288), {"tiling": lambda *_: (64, 2, 3, 2), "STAGES": 2}),
    (10, 1, (20, 300, 416), {"tiling": lambda *_: (32, 3, 3, 1)}),
    (17, 1, (1, 150, 96), {}),
    (17, 1, (3, 90, 2208), {"SUMS": 9000}),
    (17, 1, (7, 10, 4192), {"shared_memory": lambda: 80 * 1024}),
    (17, 3, (35, 20, 288), {}),
    (11, 9, (3, 130, 416), {}),
    (11, 6, (19, 36, 544), {}),
    (11, 2, (20, 70, 160), {"shared_memory": lambda: 99 * 1024}),
    (11, 1, (70, 20, 416), {"TILES": {128: (2, 1)}}),
    (11, 4, (3, 130, 416), {"TILES": {64: (2, 2)}}),
    (12, 1, (70, 140, 672), {}),
    (12, 1, (20, 70, 672), {}),
    (13, 1, (20, 70, 672), {"TOKENS": (32,), "STAGES": 2}),
    (13, 2, (130, 20, 672), {"TOKENS": (128,), "STAGES": 2}),
    (14, 3, (3, 130, 288), {"tiling": lambda *_: ((128, 16), 2, 3, 2), "STAGES": 2}),
    (14, 2, (33, 10, 160), {"tiling": lambda *_: ((128, 16), 3, 2, 1)}),
    (14, 1, (17, 10, 416), {"tiling": lambda *_: ((128, 16), 2, 1, 0), "STAGES": 3}),
    (14, 2, (3, 260, 160), {"tiling": lambda *_: ((256, 16), 2, 2, 1)}),
    (14, 5, (40, 20, 544), {"tiling": lambda *_: ((128, 64), 1, 5, 1)}),
    (14, 4, (70, 20, 544), {"tiling": lambda *_: ((128, 80), 1, 4, 1)}),
    (14, 2, (50, 20, 288), {"tiling": lambda *_: ((128, 48), 2, 2, 2)}),
    (14, 2, (3, 390, 160), {"tiling": lambda *_: ((192, 16), 3, 2, 1)}),
    (14, 6, (40, 400, 160), {"tiling": lambda *_: ((192, 64), 3, 6, 3)}),
    (14, 2, (19, 600, 160), {"tiling": lambda *_: ((256, 16), 6, 2, 2), "STAGES": 3}),
    (15, 3, (3, 130, 288), {"tiling": lambda *_: ((128, 16), 2, 3, 2), "STAGES": 2}),
    (15, 2, (33, 10, 160), {"tiling": lambda *_: ((128, 16), 3, 2, 1)}),
    (15, 1, (17, 10, 416), {"tiling": lambda *_: ((128, 16), 2, 1, 0)}),
    (15, 3, (133, 130, 160), {"tiling": lambda *_: ((128, 256), 2, 3, 2)}),
    (15, 4, (40, 20, 544), {"tiling": lambda *_: ((128, 64), 1, 4, 1)}),
    (15, 3, (90, 20, 416), {"tiling": lambda *_: ((128, 96), 1, 3, 1)}),
    (15, 2, (19, 390, 160), {"tiling": lambda *_: ((128, 16), 8, 2, 2), "STAGES": 3}),
    (15, 2, (133, 6, 160), {"tiling": lambda *_: ((128, 256), 1, 2, 1)}),
    (15, 4, (100, 20, 544), {"tiling": lambda *_: ((128, 112), 1, 4, 1)}),
    (18, 2, (1, 150, 416), {}),
    (18, 1, (3, 90, 2208), {"SUMS": 9000}),
    (18, 1, (7, 10, 4192), {"shared_memory": lambda: 80 * 1024}),
    (18, 3, (35, 20, 288), {}),
)
# Of lessons that have a kernel of their own: smaller tiles where SMs idle; a tile shared by several
# blocks; ranges that end within tiles; rings of a warp used again.
SHARED_WORK_OF_LESSONS = (
    (10, 1, (3, 300, 640), {"schedule": lambda *_: (32, 3, 4, 4)}),
    (10, 1, (70, 20, 288), {"schedule": lambda *_: (64, 2, 2, 3), "shared_memory": lambda: 99_000}),
    (10, 1, (20, 300, 416), {"schedule": lambda *_: (32, 3, 5, 3)}),
    (11, 1, (70, 20, 416), {"shared_memory": lambda: 99 * 1024}),
    (13, 3, (70, 140, 672), {}),
    (17, 1, (3, 20, 4256), {}),
    (18, 1, (3, 20, 4256), {}),
    (14, 3, (40, 20, 544), {}),
    (14, 4, (70, 130, 416), {}),
    (14, 2, (19, 600, 160), {}),
    (15, 3, (40, 20, 544), {}),
    (15, 4, (70, 130, 416), {}),
    (15, 2, (19, 600, 160), {}),
)


AGAIN = [
    one[3]
    for one in SHARED_WORK
    if one[:2] in ((14, 4), (15, 3), (15, 4))
    and one[2] in ((70, 20, 544), (90, 20, 416), (100, 20, 544))
]
"""Tiles of 80, 96 and 112 tokens: their thread blocks share a tile as those of 64 do."""


def heuristics_in(kernel: Kernel) -> ModuleType:
    """The module that has its tile heuristics."""
    own = sys.modules[kernel.launch.__module__]
    return own if own.__name__.startswith("steps.step") else HEURISTICS_IN.get(kernel.number, own)


def _size(work: tuple[Any, ...]) -> int:
    return math.prod(work[2])


def all_shared_work() -> Iterator[tuple[Kernel, int, Size, dict[str, Any]]]:
    for number, *work in SHARED_WORK:
        yield kernel_of(number), *work
    for number, *work in SHARED_WORK_OF_LESSONS:
        if number in WITH_LESSONS:
            yield find(number), *work


def shared_work() -> Iterator[pytest.param]:
    """Each in one format in two orders of lanes, and in another format in one, with C in float16
    where the step writes it: who waits for whom is the same in all formats. `make test` runs one
    order, and two of the smallest product of each step; with QUICK=1 the latter alone. Those of
    the kernels of decode are among `test_every_way_of_a_and_of_the_sums`."""
    works = list(all_shared_work())
    by_size = sorted(works, key=_size, reverse=True)
    smallest = {label_of(kernel): shape for kernel, _, shape, _ in by_size}
    for i, (kernel, sms, shape, constants) in enumerate(works):
        small = shape == smallest[label_of(kernel)]
        for name, orders in ((in_turn(i), (DESCENDING, 5)), (in_turn(i + 2), (5,))):
            label = f"{label_of(kernel)}-{i}-{name}"
            marks: tuple[pytest.MarkDecorator, ...] = (pytest.mark.every,)
            of_decode = label_of(kernel) in ("kernel17", "kernel18")
            if small == (len(orders) == 2) and not of_decode and constants not in AGAIN:
                marks = () if small else (pytest.mark.slow,)
            yield pytest.param(kernel, sms, shape, constants, name, orders, id=label, marks=marks)


@pytest.mark.parametrize(
    ("step", "sms", "shape", "constants", "name", "orders"), list(shared_work())
)
def test_work_shared_by_few_sms(
    step: Kernel,
    sms: int,
    shape: Size,
    constants: dict[str, Any],
    name: str,
    orders: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Right, the same bits in any order, launched again with the same scratch memory too: partial
    sums of before would hide one that is read too early, so none is a number."""
    family, module = step.families[-1], heuristics_in(step)
    monkeypatch.setattr(module, "multiprocessors", lambda: sms, raising=False)
    for constant, value in constants.items():
        monkeypatch.setattr(module, constant, value)
    problem = Problem(*shape, name, input=input_of(step, family))
    machine = RemembersPasses(orders[0])
    dtype = "float16" if "float16" in step.outputs and orders == (5,) else step.outputs[0]
    prepared = prepare(step, family, name, problem.a, problem.blocks, machine, dtype=dtype)
    assert step is not kernel_of(11) or constants or prepared.launch.grid[2] > 1, "K is split"
    first = multiply(prepared, machine).copy()  # of memory full of NaN
    used = operands(prepared, machine)
    assert check(first, problem, family, used).ok
    sums, arrived = prepared.launch.args[-2:] if step.scratch else (np.zeros(0), np.zeros(0))
    for order in orders[1:]:
        assert not arrived.any(), "the next launch counts on"
        machine.host(prepared.out)[...] = np.nan
        sums[...] = np.nan if sums.dtype.kind == "f" else -(2**30)
        Simulator(order).run(prepared.launch)
        np.testing.assert_array_equal(machine.host(prepared.out), first)
    assert not arrived.any(), "the next launch counts on"
    if step.number == 15:  # integer sums are the same however work is cut
        np.testing.assert_array_equal(first, product(used, problem.blocks).astype(dtype))
