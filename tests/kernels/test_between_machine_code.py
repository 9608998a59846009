"""What the kernels between products promise of their machine code, compiled without a GPU."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from steps.compile.compiler import MachineCode, machine_code, signature_of
from steps.compile.kernel_key import key_of
from steps.contract import Launch, Work
from steps.driver.machines import Simulator
from steps.kernels.between import add_and_norm, swiglu
from steps.kernels.decode import bulk
from steps.product.choice import Choice
from tests.kernels.between_problems import (
    Heads,
    Matrix,
    argmax_problem,
    attention_problem,
    gated_problem,
    norm_problem,
    normed_problem,
    residual_problem,
    rotary_problem,
    router_problem,
    swiglu_problem,
)
from tests.steps.test_steps_machine_code import sound

EVERY = pytest.mark.every
REGISTERS = 65536  # of an SM
AFTER = {"norm": 96, "add and norm": 96, "swiglu": 104, "attention": 104, "router": 104}
"""Registers of a thread of step 18 in the product that follows, at one token of Llama 3 8B."""
SHARED, PRODUCT_SHARED = 225 * 1024, 120 * 1024
"""Bytes of an SM, less those that the system has for each of three blocks, and of step 18's."""
LLAMA = Heads(1, 32, 8, 128, 512, 128)

LAUNCHES = {
    "norm": lambda: norm_problem(1, 4096, None, "float16"),
    "add and norm": lambda: norm_problem(1, 4096, "float16", "float16"),
    "add two and norm": lambda: norm_problem(512, 4096, "float16", "float16", two=True),
    "norm and sums": lambda: norm_problem(1, 4096, None, "float16", parts=128),
    "swiglu": lambda: swiglu_problem(1, 14336, "float16", "float16"),
    "attention": lambda: attention_problem(LLAMA, "float16", "float16"),
    "rotary": lambda: rotary_problem(LLAMA, 4),
    "argmax": lambda: argmax_problem(1, 128256),
    "router": lambda: router_problem(1, 2048, 128, 8),
    "attention, polled": lambda: attention_problem(LLAMA, "float16", "float16", polled=True),
    "attention, qwen3": lambda: attention_problem(LLAMA, "float16", "float16", True),
    "attention, 8 queries": lambda: attention_problem(Heads(1, 8, 1, 128, 256, 1)),
    "attention, 7 queries of 64": lambda: attention_problem(Heads(1, 7, 1, 64, 256, 1)),
}


def deferred(name: str, m: int, of_format: str) -> Launch:
    """A product around a deferred norm: a thread block for each SM, as of Llama 3 8B, of less K."""
    if name == "before":
        problem = residual_problem(Matrix(m, 4096, 256, of_format), parts=128)
    else:
        problem = normed_problem(Matrix(m, 6144, 256, of_format), parts=128)
    return problem.make(Simulator())


def gates(m: int, of_format: str) -> Launch:
    """Those of Llama 3 8B, of less K."""
    return gated_problem(Matrix(m, 28672, 256, of_format), parts=128).make(Simulator())


def launch_of(name: str) -> Launch:
    return LAUNCHES[name]().make(Simulator())


def compiled(name: str, arch: str = "sm_90a") -> MachineCode:
    launch = launch_of(name)
    return machine_code(launch.kernel, signature_of(launch.args), arch)


def instructions(code: MachineCode) -> list[str]:
    """The opcodes of a listing in their order."""
    found = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", code.sass)
    assert len(found) > 50
    return found


@pytest.mark.xdist_group("between")
@pytest.mark.parametrize(
    ("name", "arch"),
    [
        *(
            pytest.param(name, "sm_90a", marks=[EVERY] * (name == "attention, 8 queries"))
            for name in LAUNCHES
        ),
        *(
            pytest.param(name, "sm_80", marks=pytest.mark.slow if name == "router" else EVERY)
            for name in LAUNCHES
        ),
    ],
)
def test_no_spills_no_local_memory_no_double_precision(name: str, arch: str) -> None:
    code = compiled(name, arch)
    assert (code.stack_bytes, code.spill_store_bytes, code.spill_load_bytes) == (0, 0, 0)
    assert not code.count("LDL", "STL", "DADD", "DMUL", "DFMA", "F2F")
    assert arch == "sm_80" or not code.count("CALL"), "a division of 64 bits, or of floats"
    assert code.count("LDG.E.128", "LDG.E.64") >= 1
    assert not code.warnings


@pytest.mark.xdist_group("between")
@pytest.mark.parametrize("name", AFTER)
def test_the_product_that_follows_has_room_beside_them(name: str) -> None:
    """So its thread blocks can begin before the operation ends."""
    code, launch = compiled(name), launch_of(name)
    assert launch.block[0] * -(-code.registers // 8) * 8 <= REGISTERS - 512 * AFTER[name]
    assert code.shared_bytes + launch.shared_bytes <= SHARED - PRODUCT_SHARED


@pytest.mark.xdist_group("between")
@pytest.mark.parametrize(("n", "k", "before"), [
    (28672, 4096, "add and norm"), (4096, 14336, "swiglu"), (4096, 4096, "attention"),
])  # fmt: skip
def test_products_have_these_registers(n: int, k: int, before: str) -> None:
    """And a shared memory that leaves room, and an SM each, of which four are free."""
    work = Work(bulk.KERNEL, "A16", "q4_0")
    own = Choice.of_work(work, (1, n, k), "float16", "float16").launches()[-1]
    code = sound(own)
    assert not code.count("LDL", "STL"), code.log
    assert code.registers <= AFTER[before]
    assert own.shared_bytes <= PRODUCT_SHARED
    assert (own.grid, own.block) == ((128, 1, 1), (512,))


@pytest.mark.xdist_group("between")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(one, marks=[EVERY] * (one == "attention, 8 queries"))
        for one in LAUNCHES
        if one != "attention, polled"  # it does not wait
    ],
)
def test_the_next_launch_may_begin_at_once(name: str) -> None:
    """PREEXIT comes before the wait. Before the wait come weights of norms and of a router, and of
    attention the position, cos, sin and the first copies of keys and values, which the launch
    before leaves alone."""
    found = instructions(compiled(name))
    first, wait = found.index("PREEXIT"), found.index("ACQBULK")
    assert first < wait
    before = [one for one in found[:wait] if one.startswith(("LD", "ST", "RED", "ATOM"))]
    loads = [one for one in before if one.startswith(("LDG.", "ST", "RED", "ATOM"))]
    wanted = ["LDG.E.128"] * 4 if "norm" in name or name == "router" else []
    if "attention" in name:
        wanted = ["LDG.E", *["LDG.E.128"] * (8 if "qwen3" in name else 4)]
        size = 64 if "64" in name else 128
        copies = [one for one in before if one.startswith("LDGSTS")]
        assert copies == ["LDGSTS.E.BYPASS.128"] * (size // 4)
    assert loads == wanted


@pytest.mark.xdist_group("between")
@pytest.mark.parametrize(
    ("name", "of_format", "m"),
    [
        ("before", "q4_0", 1),
        pytest.param("after", "q6_k", 8, marks=pytest.mark.slow),
        pytest.param("after", "q4_0", 1, marks=EVERY),
        pytest.param("before", "q6_k", 8, marks=EVERY),
        *(
            pytest.param(name, "q4_0", m, marks=EVERY)
            for name in ("before", "after")
            for m in (2, 8)
        ),
    ],
)
def test_products_around_a_deferred_norm(name: str, of_format: str, m: int) -> None:
    """Attention has room beside both, where the format has no minima and no scales of 16 K. The
    first weights are asked for before the wait, and partial sums behind it, all in flight together.
    Between the loop and the end of the block is no load that was not asked for before."""
    launch = deferred(name, m, of_format)
    code = machine_code(launch.kernel, signature_of(launch.args), "sm_90a")
    assert (code.stack_bytes, code.spill_store_bytes, code.spill_load_bytes) == (0, 0, 0)
    assert not code.count("LDL", "STL", "RED", "ATOM", "ATOMG", "DADD", "DMUL", "CALL")
    if of_format == "q4_0":
        assert code.registers <= AFTER["attention"]
        assert launch.shared_bytes <= PRODUCT_SHARED or m == 8
    found = instructions(code)
    wait, first = found.index("ACQBULK"), found.index("HMMA.16816.F32")
    assert found.index("PREEXIT") < found.index("UBLKCP.S.G") < wait
    assert not [one for one in found[:wait] if one.startswith("LDG")]
    loads = [one for one in found[wait:first] if one.startswith("LDG")]
    sums, others = 4 * min(2, m), 1 if name == "after" else 2
    assert len(loads) == sums + others
    shuffled = found.index("SHFL.BFLY", wait)
    assert len([one for one in found[wait:shuffled] if one.startswith("LDG")]) >= sums


@pytest.mark.xdist_group("between")
@pytest.mark.parametrize(
    ("of_format", "m"),
    [
        ("q4_0", 1),
        pytest.param("q6_k", 8, marks=EVERY),
        pytest.param("q4_0", 8, marks=EVERY),
    ],
)
def test_gates_in_the_product(of_format: str, m: int) -> None:
    """Two copies a slot, one before the wait; no more registers than the product without."""
    launch = gates(m, of_format)
    code = machine_code(launch.kernel, signature_of(launch.args), "sm_90a")
    assert (code.stack_bytes, code.spill_store_bytes, code.spill_load_bytes) == (0, 0, 0)
    assert not code.count("LDL", "STL", "RED", "ATOM", "ATOMG", "DADD", "DMUL", "CALL")
    assert code.count("MUFU.EX2") >= 1
    assert code.count("MUFU.RCP") >= 2
    assert launch.grid == (128, 1, 1)
    if of_format == "q4_0":
        assert code.registers <= AFTER["add and norm"]
    found = instructions(code)
    wait = found.index("ACQBULK")
    assert found.index("PREEXIT") < wait
    assert found[:wait].count("UBLKCP.S.G") == 2
    assert not [one for one in found[:wait] if one.startswith("LDG")]


@pytest.mark.xdist_group("between")
def test_all_loads_of_a_norm_are_in_flight_before_the_first_sum() -> None:
    found = instructions(compiled("add and norm"))
    after = found[found.index("ACQBULK") :]
    loads = [i for i, one in enumerate(after) if one.startswith("LDG")]
    assert len(loads) == 6
    assert loads[-1] < next(i for i, one in enumerate(after) if one.startswith("FADD"))
    assert found.count("BAR.SYNC.DEFER_BLOCKING") == 1


def test_the_cache_tells_the_kernels_apart() -> None:
    """A compiled kernel is found again, and only for what it was compiled for."""
    y, x = np.zeros((1, 64), np.float32), np.zeros((1, 32), np.float32)
    w, half = np.zeros(64, np.float32), np.zeros((1, 64), np.float16)
    many: list[Launch] = [
        swiglu.launch(y, x),
        swiglu.launch(half, x),
        add_and_norm.launch(y, half, w, 0.1, y),
        add_and_norm.launch(y, None, w, 0.1, y),
        add_and_norm.launch(y, None, w, 0.1, y, norm=np.zeros((1, 4), np.float32)),
        *(launch_of(name) for name in LAUNCHES if "norm" not in name and name != "swiglu"),
        *(deferred(name, 1, "q4_0") for name in ("before", "after")),
        gates(1, "q4_0"),
    ]
    keys: list[Any] = [key_of(one.kernel, signature_of(one.args), "sm_90a") for one in many]
    assert None not in keys
    assert len({str(key) for key in keys}) == len(many)
