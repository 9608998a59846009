"""The ceilings' machine code does what their names say, in its loop, and little else."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest

from results.measure import limits
from results.measure.limits import CEILINGS, Ceiling
from steps.compile.compiler import MachineCode, machine_code, opcodes, signature_of
from steps.contract import why_no_gpu
from steps.driver.machines import Simulator
from tests.results.fake_stopwatch import FakeStopwatch


def compiled(ceiling: Ceiling) -> MachineCode:
    seeds = limits.seeds_for(ceiling)
    out = np.empty(8, ceiling.seed_dtype)
    return machine_code(ceiling.kernel(), signature_of((seeds, out, 16)))


def hottest_loop(sass: str, ceiling: Ceiling) -> str:
    """The lines of a listing between a label and the last branch back to it: of the loop with most
    of the work, the longest such."""
    lines = sass.splitlines()
    labels = {m[1]: i for i, line in enumerate(lines) if (m := re.match(r"(\.L_x_\d+):", line))}
    loops = []
    for i, line in enumerate(lines):
        branch = re.search(r"BRA `\((\.L_x_\d+)\)", line)
        if branch and labels.get(branch[1], i) < i:
            loops.append("\n".join(lines[labels[branch[1]] : i + 1]))

    def work(loop: str) -> int:
        return sum(n for opcode, n in opcodes(loop).items() if is_work(opcode, ceiling))

    return max(loops, key=lambda loop: (work(loop), len(loop)))


def name(ceiling: Ceiling) -> str:
    return f"{ceiling.unit}-{ceiling.opcodes[0]}"


@pytest.mark.parametrize("ceiling", CEILINGS, ids=name)
def test_the_loop_is_the_instruction_it_is_named_for(ceiling):
    code = compiled(ceiling)
    assert code.stack_bytes == 0
    assert code.spill_store_bytes == 0
    loop = opcodes(hottest_loop(code.sass, ceiling))
    total = sum(loop.values())
    work = sum(n for opcode, n in loop.items() if is_work(opcode, ceiling))
    # a wgmma keeps the tensor cores busy for as long as a warp takes to issue fifty instructions
    share = 0.15 if ceiling.max_cc else 0.9
    assert work >= share * total, f"{work} of {total}: {loop.most_common(6)}"
    assert code.warnings == ()

    # The operations claimed for a round are those of the loop (an mma's shared by 32 lanes).
    per_instruction = {
        "FFMA": 2,
        "IMAD": 2,
        "IDP": 8,
        "IMMA": 2 * 16 * 8 * 32 // 32,
        "HMMA": 2 * 16 * 8 * 16 // 32,
        "IGMMA": 2 * 64 * 256 * 32 // 128,
        "HGMMA": 2 * 64 * 256 * (32 if ceiling.unit == "tensor_sparse" else 16) // 128,
    }[ceiling.opcodes[0]]
    rounds, rest = divmod(work * per_instruction, ceiling.operations)
    assert rest == 0
    assert rounds >= 1


def is_work(opcode: str, ceiling: Ceiling) -> bool:
    if ceiling.unit == "int32":  # IMAD.MOV and IMAD.X are ptxas's moves and carries
        return opcode == "IMAD"
    return opcode.split(".")[0] in ceiling.opcodes


@pytest.mark.parametrize("ceiling", CEILINGS[-3:], ids=name)
def test_a_warpgroups_loop_adds_up_its_products(ceiling):
    """In the simulator, which reports any operand that is touched too early: ones times ones. Of 32
    K a sparse product adds up 16."""
    assert ceiling.max_cc is not None
    kind = np.float16 if ceiling.opcodes == ("HGMMA",) else np.int8
    ones = np.ones(4 * limits.SEEDS // np.dtype(kind).itemsize, kind).view(ceiling.seed_dtype)
    out = np.zeros(limits.THREADS, np.float32 if kind is np.float16 else np.int32)
    Simulator().run(limits.launch_of(ceiling, ones, out, 1, 2))
    k = 32 // np.dtype(kind).itemsize * limits.TOGETHER * 2  # in two rounds
    assert (out == k * limits.COLUMNS // 2).all()


def test_a_unit_of_two_instructions_has_the_limit_of_the_faster(monkeypatch):
    rates = iter((60.0, 30.0, 120.0, 1100.0, 550.0, 1500.0, 540.0, 990.0))
    monkeypatch.setattr(limits, "arithmetic_tops", lambda *_: next(rates))
    monkeypatch.setattr(limits, "memory_tbps", lambda *_: (4.0, 4.1))
    from numba import cuda

    def device(cc):
        return SimpleNamespace(compute_capability=cc, MULTIPROCESSOR_COUNT=132)

    free = SimpleNamespace(get_memory_info=lambda: SimpleNamespace(free=1 << 30))
    monkeypatch.setattr(cuda, "current_context", lambda: free)
    monkeypatch.setattr(cuda, "get_current_device", lambda: device((9, 0)))
    tops = limits.measure_limits(object(), object()).tops
    assert (tops["tensor_int8"], tops["tensor_fp16"], tops["packed_int32"]) == (1500, 550, 60)
    assert tops["tensor_sparse"] == 990
    assert next(rates, None) is None
    for cc, expected in (((8, 9), 5), ((10, 0), 5), ((7, 5), 3)):
        rates = iter(range(1, 10))
        monkeypatch.setattr(cuda, "get_current_device", lambda cc=cc: device(cc))
        limits.measure_limits(object(), object())
        assert next(rates) == expected + 1, f"{cc} has no wgmma"


def test_the_time_of_a_launch_is_the_shortest_of_its_graphs_over_the_launches_in_one():
    times = iter([0.1, 9.0, 8.0, 8.5])
    asked = []

    def capture(launches):
        asked.append(launches)
        return SimpleNamespace(seconds=lambda: next(times))

    stopwatch = SimpleNamespace(capture=capture)
    assert limits.best_seconds(stopwatch, "launch", samples=3, repeat=4) == 2.0, "none of a warm-up"
    assert asked == [("launch",) * 4]
    assert next(times, None) is None


class Copies:
    """A machine whose copies are right, or are none."""

    def __init__(self, right=True):
        self.right = right

    def array(self, host):
        return host

    def empty(self, shape, dtype):
        return np.zeros(shape, dtype)

    def host(self, array):
        return array

    def run(self, launch):
        if self.right and launch.kernel is limits.copy_tiles():
            launch.args[1][:] = launch.args[0]


def test_a_copy_reads_and_writes_its_bytes():
    block = 16 * limits.TILE
    seconds = {limits.copy_tiles(): 4e-6, limits.read_tiles(): 1e-6}
    stopwatch = FakeStopwatch(cost=lambda launch: seconds[launch.kernel], simulated=False)
    copied, read = limits.memory_tbps(stopwatch, Copies(), 3 * block + 5)
    assert copied == pytest.approx(2 * 3 * block / 4e-6 * 1e-12)
    assert read == pytest.approx(3 * block / 1e-6 * 1e-12)
    with pytest.raises(RuntimeError, match="the copy kernel does not copy"):
        limits.memory_tbps(stopwatch, Copies(right=False), block)


def test_copies_are_128_bits_wide():
    array = np.empty(4, np.float32)
    copy = machine_code(limits.copy_tiles(), signature_of((array, array)))
    assert copy.count("LDG.E.128") == copy.count("STG.E.128") == limits.LOAD_VECTORS
    read = machine_code(limits.read_tiles(), signature_of((array, array)))
    assert read.count("LDG.E.128") == limits.LOAD_VECTORS
    assert read.count("STG.E.128") == 0


def test_seeds_are_random_and_finite():
    for ceiling in CEILINGS:
        seeds = limits.seeds_for(ceiling)
        assert seeds.dtype == ceiling.seed_dtype
        assert len(np.unique(seeds)) > 0.99 * limits.SEEDS
        halves = ceiling.unit in ("tensor_fp16", "tensor_sparse")
        floats = seeds.view(np.float16) if halves else seeds
        assert np.isfinite(floats.astype(np.float64)).all()


def test_every_unit_of_a_step_has_a_ceiling():
    from typing import get_args

    from steps.contract import Unit

    assert {ceiling.unit for ceiling in CEILINGS} | {"packed_int32"} >= set(get_args(Unit))


@pytest.mark.gpu
def test_limits_of_this_gpu():
    """Plausible ceilings, in the order the hardware has them."""
    if reason := why_no_gpu():
        pytest.skip(reason)
    from results.measure.protocol import GpuStopwatch
    from steps.driver.machines import Gpu

    measured = limits.measure_limits(GpuStopwatch(), Gpu())
    assert measured.copy_tbps is not None
    assert 0.05 < measured.copy_tbps < 50
    assert measured.tops["int32"] <= 1.1 * measured.tops["fp32"]
    assert measured.tops["dp4a"] > 2 * measured.tops["int32"]
