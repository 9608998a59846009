"""The product with a low-rank term, `steps.kernels.decode.low_rank`, in the simulator: its values,
its thread blocks that wait for each other, what it leaves, and its machine code."""

from __future__ import annotations

import ast
import itertools
import sys
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from qformats import FORMATS
from steps.compile.compiler import machine_code, signature_of
from steps.contract import Launch
from steps.kernels.decode import low_rank
from steps.kernels.decode import tiles as heuristics
from steps.simulator.errors import SimulatorError
from steps.simulator.launch import simulate
from steps.simulator.stream import Stream
from tests.kernels.between_problems import Matrix, Output, U, close, of_dtype
from tests.steps.mutations import Site, changed, sites

SLOW, EVERY = pytest.mark.slow, pytest.mark.every
FACTOR = 0.5


@dataclass
class Term:
    """A product of `of` and a low-rank term. integers: A and B are small ones, so that y is exact.
    patience: polls before a block computes all of t alone."""

    of: Any
    ranks: int = 8
    output: str = "float32"
    integers: bool = True
    patience: int = 10**6
    module: Any = low_rank

    def __post_init__(self) -> None:
        rng, of = np.random.default_rng(self.ranks), self.of
        shapes = (self.ranks, of.k), (of.n, self.ranks)
        a, b = (
            rng.integers(-2, 3, one) if self.integers else rng.standard_normal(one)
            for one in shapes
        )
        self.down, self.up = of_dtype(a / 4, "float16"), of_dtype(b, "float16")
        self.factors = np.full(self.ranks, FACTOR, np.float32)
        self.out = Output((of.m, of.n), self.output)
        self.words = np.zeros(low_rank.WORDS, np.uint32)
        self.launch: Launch | None = None

    def run(self, order: int = 0, together: bool = True, rounds: int = 1) -> np.ndarray:
        """Launches right behind each other; all blocks in flight together, or one by one."""
        of = self.of
        self.launch = launch = self.module.launch(
            FORMATS[of.format], of.weights, of.a, self.down, self.up, self.factors,
            self.words, self.out.array, patience=self.patience,
        )  # fmt: skip
        stream = Stream()
        for _ in range(rounds):
            simulate(
                launch.kernel, launch.grid, launch.block, launch.args, order=order,
                shared_bytes=launch.shared_bytes, resident=prod(launch.grid) if together else 1,
                stream=stream, overlap=launch.overlap,
            )  # fmt: skip
        assert self.words[0] == rounds, "launches are counted"
        self.out.check()
        return self.out.array

    def check(self) -> None:
        """Bit for bit where integers are multiplied; else within the bound of the product, of t, a
        sum of K, and of t B^T, a sum of its ranks."""
        of = self.of
        x, a, b = (one.astype(np.float64) for one in (of.a, self.down, self.up))
        right = of.y + of.added + FACTOR * (x @ a.T) @ b.T
        if self.integers:
            np.testing.assert_array_equal(self.out.array, right.astype(self.output))
            return
        size = FACTOR * (np.abs(x) @ np.abs(a).T) @ np.abs(b).T
        bound = of.off + size * (of.k + self.ranks + 8) * U + 4 * U * np.abs(right)
        close(self.out.array, right, bound, self.output)


def few_multiprocessors(monkeypatch: Any, count: int) -> None:
    monkeypatch.setattr(heuristics, "multiprocessors", lambda: count)


@pytest.mark.parametrize(("m", "k", "name", "ranks", "order"), [
    pytest.param(1, 288, "q4_0", 64, 0),
    pytest.param(3, 96, "q8_0", 16, -1, marks=SLOW),
    pytest.param(16, 512, "q4_k", 8, 1, marks=SLOW),
    pytest.param(8, 4384, "q5_1", 32, 2, marks=EVERY),
])  # fmt: skip
def test_integers_are_exact(m: int, k: int, name: str, ranks: int, order: int) -> None:
    """N ends inside a row tile; there are fewer blocks than units; and more K than a unit's warps
    have at a time."""
    problem = Term(Matrix(m, 40, k, name, "integer", "float32"), ranks)
    problem.run(order)
    problem.check()


@pytest.mark.parametrize(("output", "together"), [
    ("float32", True), pytest.param("float16", False, marks=SLOW),
])  # fmt: skip
def test_within_the_bound(output: str, together: bool) -> None:
    problem = Term(Matrix(2, 40, 544, "q4_0"), 16, output, integers=False, patience=100)
    problem.run(1, together)
    problem.check()


@SLOW
@pytest.mark.parametrize(("m", "n", "sms"), [(8, 200, 4), (1, 300, 2)])
def test_a_ring_of_many_row_tiles(monkeypatch: Any, m: int, n: int, sms: int) -> None:
    """Where the term lies in the ring, and a thread has several outputs."""
    few_multiprocessors(monkeypatch, sms)
    problem = Term(Matrix(m, n, 160, "q4_0", "integer"), 64)
    problem.run(1)
    problem.check()
    assert problem.launch is not None
    assert problem.launch.grid[0] == sms
    assert problem.launch.args[-1][5][1] == 0, "the first byte"


@SLOW
@pytest.mark.parametrize("ranks", [8, 64])
def test_a_block_that_waits_in_vain_computes_the_same_bits(monkeypatch: Any, ranks: int) -> None:
    """One block at a time: none finds the units of those behind it."""
    few_multiprocessors(monkeypatch, 2)
    of = Matrix(2, 100, 416, "q4_0")
    whole = Term(of, ranks, integers=False)
    alone = Term(of, ranks, integers=False, patience=2)
    assert np.array_equal(whole.run(1), alone.run(0, together=False))
    whole.check()


@SLOW
def test_launches_right_behind_each_other_share_their_words() -> None:
    problem = Term(Matrix(2, 40, 96, "q4_0", "integer"), 16)
    problem.run(1, rounds=2)
    problem.check()


@pytest.mark.parametrize("spoiled", ["x", "down", "up"])
def test_nan_goes_where_it_belongs(spoiled: str) -> None:
    problem = Term(Matrix(2, 24, 96, "q4_0", "integer"))
    of = problem.of
    right = of.y + FACTOR * (of.a.astype(float) @ problem.down.T.astype(float)) @ problem.up.T
    if spoiled == "x":
        of.a[1, 5] = right[1] = np.nan
    elif spoiled == "down":
        problem.down[3, 7] = right[:] = np.nan
    else:
        problem.up[20, 3] = right[:, 20] = np.nan
    np.testing.assert_array_equal(problem.run(), right.astype(np.float32))


def test_what_there_is_no_kernel_for() -> None:
    of = Matrix(17, 24, 32, "q4_0")
    with pytest.raises(ValueError, match="up to 16 tokens, not 17"):
        Term(of).run()
    with pytest.raises(ValueError, match="has 8, 16, 32, 64 ranks, not 24"):
        Term(Matrix(1, 24, 32, "q4_0"), 24).run()
    with pytest.raises(ValueError, match="ranks from 1 to 64, not 65"):
        low_rank.padded(65)
    assert [low_rank.padded(one) for one in (1, 8, 9, 33)] == [8, 8, 16, 64]
    shape = low_rank.Shape(1, 128256, 4096)
    with pytest.raises(ValueError, match="64 ranks needs 140880 bytes of shared memory"):
        low_rank.configuration(FORMATS["q4_0"], shape, 64, "float16")


# --- what orders its accesses ---------------------------------------------------------------------


def mutations() -> list[Site]:
    return list(sites(Path(str(low_rank.__file__))))


def noticed(module: Any, order: int, together: bool, ranks: int) -> bool:
    """A unit is of one warp, or of two."""
    of = Matrix(2, 100, 544, "q4_0", "integer")
    problem = Term(of, ranks, patience=10**6 if together else 2, module=module)
    try:
        problem.run(order, together)
        problem.check()
    except (SimulatorError, AssertionError):
        return True
    return False


def with_tree(tree: ast.Module) -> ModuleType:
    module = ModuleType("low_rank_mutated")
    module.__file__ = low_rank.__file__
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)  # dataclasses ask for it
        exec(compile(tree, str(low_rank.__file__), "exec"), module.__dict__)
    return module


def test_there_are_mutations() -> None:
    kinds = {(one.function, one.called) for one in mutations()}
    assert ("compute_alone", "syncthreads") in kinds
    assert ("write", "syncthreads_or") in kinds
    assert {("write", "cp_async_wait"), ("meet", "barrier_sync"), ("meet", "syncwarp")} <= kinds


@EVERY
@pytest.mark.parametrize("site", mutations(), ids=str)
def test_every_mutation_is_noticed(site: Site, monkeypatch: Any) -> None:
    few_multiprocessors(monkeypatch, 2)
    module = with_tree(changed(site))
    ways = itertools.product((0, -1, 1), (True, False), (16, 64))
    assert any(noticed(module, *way) for way in ways)


# --- machine code ---------------------------------------------------------------------------------


def llama(m: int, ranks: int, n: int = 4096) -> Launch:
    """A thread block for each SM, as of Llama 3 8B, of less K."""
    of = Matrix(m, n, 256, "q4_0")
    problem = Term(of, ranks, "float16")
    return low_rank.launch(
        FORMATS["q4_0"], of.weights, of.a, problem.down, problem.up, problem.factors,
        problem.words, problem.out.array,
    )  # fmt: skip


@pytest.mark.xdist_group("low_rank")
@pytest.mark.parametrize(("m", "ranks"), [
    *(pytest.param(m, ranks, marks=EVERY) for m, ranks in ((1, 8), (8, 64))),
    pytest.param(16, 64, marks=SLOW),
])  # fmt: skip
def test_machine_code(m: int, ranks: int) -> None:
    launch = llama(m, ranks)
    code = machine_code(launch.kernel, signature_of(launch.args), "sm_90a")
    assert (code.stack_bytes, code.spill_store_bytes, code.spill_load_bytes) == (0, 0, 0)
    assert code.registers <= 65536 // launch.block[0]
    assert not code.count(
        "LDL", "STL", "DADD", "DMUL", "DFMA", "MEMBAR.SC", "MEMBAR.ALL.GPU", "ATOM"
    )
    assert code.count("LDG.E.128.STRONG.GPU") >= 1
    assert code.count("STG.E.64.STRONG.GPU") >= 1
    assert not code.warnings
