"""What a step promises of its machine code, proven for three architectures without a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest

import steps
from qformats import FORMATS, WEIGHT_FORMATS
from qformats.device import safe_load
from reference import Problem
from steps.instructions.compile import MachineCode, machine_code, signature_of
from steps.machines import Simulator
from steps.step import Family, Launch, Step
from steps.verify import prepare

ARCHITECTURES = ("sm_75", "sm_80", "sm_90a")
MANY_TOKENS, FEW_TOKENS = 40, 2  # a step may choose another kernel for few tokens: prove both


def launches(step: Step, family: Family, name: str) -> Iterator[Launch]:
    machine = Simulator()
    for m in (MANY_TOKENS, FEW_TOKENS):
        problem = Problem(m, 64, 64, name)
        prepared = prepare(step, family, name, problem.a, problem.blocks, machine)
        yield from (*prepared.activations.launches, prepared.launch)


@cache
def compiled(kernel: object, signature: tuple, arch: str) -> MachineCode:
    return machine_code(kernel, signature, arch)


def codes(step: Step, family: Family, name: str, arch: str) -> Iterator[tuple[Launch, MachineCode]]:
    for launch in launches(step, family, name):
        yield launch, compiled(launch.kernel, signature_of(launch.args), arch)


def works(architectures: tuple[str, ...]) -> Iterator[pytest.param]:
    for step, arch in itertools.product(steps.ladder(), architectures):
        cc = int(arch.removeprefix("sm_").rstrip("a"))
        if cc >= 10 * step.min_cc[0] + step.min_cc[1]:
            for family in step.families:
                yield pytest.param(step, family, arch, id=f"step{step.number:02d}-{family}-{arch}")


@pytest.mark.parametrize(("step", "family", "arch"), works(ARCHITECTURES))
def test_no_spills_no_local_memory_no_double_precision(
    step: Step, family: Family, arch: str
) -> None:
    for name in step.formats if arch == "sm_90a" else ("q4_0", "q5_1", "q8_0"):
        for launch, code in codes(step, family, name, arch):
            where = f"{launch.kernel.__name__} {name}"
            assert (code.spill_store_bytes, code.spill_load_bytes) == (0, 0), where
            assert code.stack_bytes == 0, where
            local = [op for op in code.instructions if op.split(".")[0] in ("LDL", "STL")]
            assert not local, f"{where} uses local memory: {local}"
            double = [op for op in code.instructions if op.startswith(("D", "F2F.F64", "I2F.F64"))
                      and op.split(".")[0] in ("DADD", "DMUL", "DFMA", "DSETP", "F2F", "I2F")]
            assert not double, f"{where} computes in float64: {double}"
            assert ".f64" not in code.ptx, f"{where} computes in float64"
            assert code.registers <= 65536 // int(np.prod(launch.block)), where


@pytest.mark.parametrize(("step", "family", "arch"), works(("sm_80", "sm_90a")))
def test_contains_its_idea_and_nothing_of_a_later_one(
    step: Step, family: Family, arch: str
) -> None:
    assert step.contains[family], "a step must say what its machine code shows"
    for name in step.formats:
        *_, (launch, code) = itertools.islice(codes(step, family, name, arch), len(list(launches(step, family, name))) // 2)
        for wanted in step.contains[family]:
            assert any(op.startswith(wanted) for op in code.instructions), (
                f"{launch.kernel.__name__} {name} lacks {wanted}: {sorted(code.instructions)}"
            )
        for unwanted in step.forbids[family]:
            found = [op for op in code.instructions if op.startswith(unwanted)]
            assert not found, f"{launch.kernel.__name__} {name} must not contain {found}"


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_word_loads_are_as_wide_as_the_layout_guarantees(name: str) -> None:
    """b2 for the 18-, 22- and 34-byte blocks (a 4-byte load would fault in them), b4 for 20 and 24."""
    wanted = "b4" if FORMATS[name].block_bytes % 4 == 0 else "b2"
    assert safe_load(name, "qs").py_func.__name__ == wanted
    *_, (_, code) = itertools.islice(codes(steps.find(4), "A8", name, "sm_90a"), 2)
    halves = sum(n for op, n in code.instructions.items() if op.startswith("LDG.E.U16"))
    assert halves > (4 if wanted == "b2" else 0)


def test_the_packed_product_is_two_multiply_adds_in_one() -> None:
    """Step 4's inner loop has one IMAD for two elements; step 3's has one for each."""
    count = {}
    for number in (3, 4):
        *_, (_, code) = itertools.islice(codes(steps.find(number), "A8", "q4_0", "sm_90a"), 2)
        count[number] = sum(n for op, n in code.instructions.items() if op == "IMAD")
    assert count[4] < count[3]
