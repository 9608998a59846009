"""Every step, every format, ragged shapes, several lane orders, in the simulator."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import steps
from reference import CHECK_SHAPES, GOLDEN, Problem, check
from steps.checks.cases import cases
from steps.checks.run import check_works
from steps.checks.verify import multiply, operands, prepare, verify
from steps.contract import Family, Step, Work
from steps.driver.machines import Simulator
from steps.kernels.decode import tiles as decode_tiles
from steps.kernels.parts.activations.layouts import reading_of
from steps.kernels.prefill import mma_tiles
from tests.kernels.passes import RemembersPasses
from tests.steps.works import WORKS, by_turn, in_turn, slow_unless_in_turn

DESCENDING = -1


@pytest.mark.parametrize(("step", "family", "name"), by_turn(WORKS))
def test_right_on_check_shapes(step: Step, family: Family, name: str) -> None:
    """Every shape in one format, and a third of them in each of the others. Distributions, seeds
    and lane orders go round too."""
    quick = name != in_turn(step.number)
    outcomes = check_works(
        [Work(step, family, name)],
        lambda name: cases(name, simulated=True, quick=quick),
        RemembersPasses,
    )
    shapes = len(CHECK_SHAPES) // (3 if quick else 1)
    assert outcomes.each[0].cases == 1 + shapes  # and the golden one
    assert outcomes.ok, "\n".join(outcomes.each[0].failures)


@pytest.mark.parametrize(("step", "family", "name"), by_turn(WORKS))
def test_integer_problem_is_exact_in_any_lane_order(step: Step, family: Family, name: str) -> None:
    """A missing barrier would show in at least one of these orders. Barriers are the same in every
    format: one is run in all orders, the others in the two that differ most."""
    problem = Problem(3, 35, 96, name, "integer", seed=7)
    results = []
    for order in (0, DESCENDING, 3, 4) if name == in_turn(step.number) else (DESCENDING, 3):
        machine = RemembersPasses(order)
        prepared = prepare(step, family, name, problem.a, problem.blocks, machine)
        results.append(multiply(prepared, machine).copy())
        assert check(results[-1], problem, family, operands(prepared, machine)).ok
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)


@pytest.mark.parametrize(("step", "family", "name"), slow_unless_in_turn(WORKS))
def test_golden_case(step: Step, family: Family, name: str) -> None:
    """1 x 1 x 32 by hand: 141 in Q4_0."""
    golden = GOLDEN[name]
    machine = Simulator()
    prepared = prepare(step, family, name, golden.a, golden.blocks, machine, golden.q81)
    c = multiply(prepared, machine)
    assert c.shape == (1, 1)
    if prepared.activations.layout == "inside":  # no bits can be given: it makes some of its own
        assert verify(step, family, Problem(1, 1, 32, name, "golden"), machine).ok
        return
    assert c[0, 0] == golden.value
    if name == "q4_0":
        assert golden.value == 141


# One more row and column than the tile of each step that has a large one, and K beyond a stage.
EDGES = (
    (5, (129, 65, 32)),
    (6, (129, 65, 32)),
    (7, (65, 129, 160)),
    (8, (65, 129, 160)),
    (11, (65, 131, 160)),
    (12, (65, 131, 160)),
    (13, (17, 131, 160)),
    (14, (17, 131, 160)),
)


@pytest.mark.slow
@pytest.mark.parametrize("turn", [0, pytest.param(2, marks=pytest.mark.every)])
@pytest.mark.parametrize(("number", "shape"), EDGES)
def test_a_tile_edge_in_both_directions(
    number: int, shape: tuple[int, int, int], turn: int
) -> None:
    """In two formats: the edges of a tile are the same in all of them."""
    problem = Problem(*shape, in_turn(number + turn), "integer", seed=1)
    family = steps.find(number).families[-1]
    assert verify(steps.find(number), family, problem, RemembersPasses(5)).ok


WRITES_FLOAT16 = [work for work in WORKS if work.values[0].outputs[1:]]


@pytest.mark.parametrize(("step", "family", "name"), by_turn(WRITES_FLOAT16))
def test_outputs_in_float16(step: Step, family: Family, name: str) -> None:
    """Ragged, where a row is no multiple of four, and whole; the guard bands hold there too."""
    for order, shape in enumerate([(9, 37, 96), (5, 132, 64), (1, 1, 32)]):
        for distribution in ("uniform", "llm"):
            problem = Problem(*shape, name, distribution)
            found = verify(step, family, problem, RemembersPasses(order), dtype=np.float16)
            assert found.ok, found.verdict


READS_16_BITS = [
    work
    for work in WORKS
    if reading_of(work.values[0], "float16", work.values[1]).source == "float16"
]


def inputs_of_16_bits() -> Iterator[pytest.param]:
    """(work, shape, distribution): a ragged shape in every format, and in two formats one that goes
    beyond the first stage."""
    for work in by_turn(READS_16_BITS, shift=1):
        step, _, name = work.values
        yield pytest.param(*work.values, (9, 37, 96), "llm", id=work.id, marks=work.marks)
        if name in (in_turn(step.number), in_turn(step.number + 3)):
            label = f"{work.id}-stages"
            values = (*work.values, (20, 136, 288), "integer")
            marks = pytest.mark.slow if name == in_turn(step.number) else pytest.mark.every
            yield pytest.param(*values, id=label, marks=marks)


@pytest.mark.parametrize(
    ("step", "family", "name", "shape", "distribution"), list(inputs_of_16_bits())
)
def test_inputs_of_16_bits(
    step: Step, family: Family, name: str, shape: tuple[int, int, int], distribution: str
) -> None:
    """A as a caller has it, with no pass where nothing is quantized, and C in the same dtype where
    the step writes it. Ragged, and beyond the first stage."""
    inputs = ["float16"]
    if family == "A8" or "bfloat16" in step.outputs:
        inputs.append("bfloat16")
    for order, input in enumerate(inputs):
        output = input if input in step.outputs else "float32"
        problem = Problem(*shape, name, distribution, input=input)
        if family == "A16":
            assert step.activations[family](problem.given, Simulator()).launches == ()
        found = verify(step, family, problem, RemembersPasses(order), dtype=output)
        assert found.ok, f"{input}: {found.verdict}"


@pytest.mark.parametrize("name", ["q4_0", "q5_1", "q8_0"])
@pytest.mark.parametrize("number", [step.number for step in steps.ladder() if step.outputs[1:]])
def test_what_is_no_number_spoils_its_own_row_and_column_only(number: int, name: str) -> None:
    """NaN and Inf among the activations (the door does not look for them on a GPU) and in scales
    (which it refuses)."""
    step, machine, problem = steps.find(number), Simulator(2), Problem(9, 36, 96, name)
    family = step.families[-1]

    def product(a: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        return multiply(prepare(step, family, name, a, blocks, machine), machine).copy()

    right = product(problem.a, problem.blocks)
    assert np.isfinite(right).all()
    a, blocks = problem.a.copy(), problem.blocks.copy()
    a[1, 70], a[4, 3], a[4, 4] = np.nan, np.inf, -1
    blocks["d"][35, 1], blocks["d"][20, 0] = np.nan, np.inf
    c = product(a, blocks)
    spoiled = np.zeros(c.shape, bool)
    spoiled[[1, 4]] = spoiled[:, [20, 35]] = True
    assert not np.isfinite(c[spoiled]).any()
    np.testing.assert_array_equal(c[~spoiled], right[~spoiled])


# --- steps that share out work by the number of SMs -----------------------------------------------
# On 132 SMs a product small enough to simulate is never shared unevenly; on one or two it is.
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
    (12, 1, (130, 20, 672), {"TILES": {128: 1}}),
    (12, 1, (70, 140, 416), {"TILES": {64: 2}, "STAGES": 2}),
    (12, 1, (20, 70, 672), {"TILES": {16: 2}}),
    (13, 1, (20, 70, 672), {"TOKENS": (32,), "STAGES": 2}),
    (13, 2, (130, 20, 1184), {"TOKENS": (128,)}),
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


def _size(work: tuple[Any, ...]) -> int:
    return math.prod(work[2])


def shared_work() -> Iterator[pytest.param]:
    """Each in one format in three orders of lanes, and in another format in one, with C in float16
    where the step writes it: who waits for whom is the same in all formats. `make test` runs one
    order, and three of the smallest product of each step; with QUICK=1 one of that alone. A launch
    again in the same order shows what is left in scratch memory: steps without any do without."""
    by_size = sorted(SHARED_WORK, key=_size, reverse=True)
    smallest = {number: shape for number, _, shape, _ in by_size}
    for i, (number, sms, shape, constants) in enumerate(SHARED_WORK):
        once = (5,) if steps.find(number).scratch is None else (5, 5)
        for name, orders in ((in_turn(i), (0, DESCENDING, 5)), (in_turn(i + 2), once)):
            label = f"step{number:02d}-{i}-{name}"
            small, alone = shape == smallest[number], len(set(orders)) == 1
            marks = (pytest.mark.slow if small or alone else pytest.mark.every,)
            if small and alone:
                marks = ()
            yield pytest.param(number, sms, shape, constants, name, orders, id=label, marks=marks)


@pytest.mark.parametrize(
    ("number", "sms", "shape", "constants", "name", "orders"), list(shared_work())
)
def test_work_shared_by_few_sms(
    number: int,
    sms: int,
    shape: tuple[int, int, int],
    constants: dict[str, Any],
    name: str,
    orders: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Right, launched again with the same scratch memory too, and the same bits in any order."""
    step, family = steps.find(number), steps.find(number).families[-1]
    module = HEURISTICS_IN.get(number, sys.modules[step.launch.__module__])
    monkeypatch.setattr(module, "multiprocessors", lambda: sms)
    for constant, value in constants.items():
        monkeypatch.setattr(module, constant, value)
    problem, machine = Problem(*shape, name), RemembersPasses(orders[0])
    dtype = np.float16 if step.outputs[1:] and set(orders) == {5} else np.float32
    prepared = prepare(step, family, name, problem.a, problem.blocks, machine, dtype=dtype)
    assert number != 11 or constants or prepared.launch.grid[2] > 1, "K is split"
    first = multiply(prepared, machine).copy()
    assert check(first, problem, family, operands(prepared, machine)).ok
    for order in orders[1:]:
        machine.host(prepared.out)[...] = np.nan
        if step.scratch is not None:
            sums, arrived = prepared.launch.args[-2:]
            assert not arrived.any(), "the next launch counts on"
            # of the launch before: right, so they would hide one that comes too early
            sums[...] = np.nan if sums.dtype.kind == "f" else -(2**30)
        Simulator(order).run(prepared.launch)
        np.testing.assert_array_equal(machine.host(prepared.out), first)


@pytest.mark.slow
def test_integer_sums_are_the_same_however_work_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    step, problem, machine = steps.find(15), Problem(20, 140, 416, "q5_1"), Simulator()
    module, results = sys.modules[step.launch.__module__], []
    for cut in (
        ((128, 32), 2, 1, 0),
        ((128, 32), 2, 3, 2),
        ((128, 16), 4, 7, 4),
        ((128, 64), 2, 2, 1),
    ):
        monkeypatch.setattr(module, "tiling", lambda *_, cut=cut: cut)
        prepared = prepare(step, "A8", "q5_1", problem.a, problem.blocks, machine)
        results.append(multiply(prepared, machine).copy())
    assert all(np.array_equal(results[0], other) for other in results)
