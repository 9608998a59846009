"""The ceilings' machine code does what their names say, in its loop, and little else."""

from __future__ import annotations

import re

import numpy as np
import pytest

from results import limits
from results.limits import CEILINGS, Ceiling
from steps.instructions.compile import MachineCode, machine_code, opcodes, signature_of
from steps.machines import why_no_gpu


def compiled(ceiling: Ceiling) -> MachineCode:
    seeds = limits.seeds_for(ceiling)
    out = np.empty(8, ceiling.seed_dtype)
    return machine_code(ceiling.kernel(), signature_of((seeds, out, 16)))


def hottest_loop(sass: str) -> str:
    """The lines of a listing between a label and the last branch back to it; the longest such."""
    lines = sass.splitlines()
    labels = {m[1]: i for i, line in enumerate(lines) if (m := re.match(r"(\.L_x_\d+):", line))}
    loops = []
    for i, line in enumerate(lines):
        branch = re.search(r"BRA `\((\.L_x_\d+)\)", line)
        if branch and labels.get(branch[1], i) < i:
            loops.append("\n".join(lines[labels[branch[1]] : i + 1]))
    return max(loops, key=len)


@pytest.mark.parametrize("ceiling", CEILINGS, ids=lambda ceiling: ceiling.unit)
def test_the_loop_is_the_instruction_it_is_named_for(ceiling):
    code = compiled(ceiling)
    assert code.stack_bytes == 0
    assert code.spill_store_bytes == 0
    loop = opcodes(hottest_loop(code.sass))
    total = sum(loop.values())
    work = sum(n for opcode, n in loop.items() if is_work(opcode, ceiling))
    assert work >= 0.9 * total, f"{work} of {total}: {loop.most_common(6)}"

    # The operations claimed for a round are those of the loop (an mma's shared by 32 lanes).
    per_instruction = {
        "fp32": 2,
        "int32": 2,
        "dp4a": 8,
        "tensor_int8": 2 * 16 * 8 * 32 // 32,
        "tensor_fp16": 2 * 16 * 8 * 16 // 32,
    }[ceiling.unit]
    rounds, rest = divmod(work * per_instruction, ceiling.operations)
    assert rest == 0
    assert rounds >= 1


def is_work(opcode: str, ceiling: Ceiling) -> bool:
    if ceiling.unit == "int32":  # IMAD.MOV and IMAD.X are ptxas's moves and carries
        return opcode == "IMAD"
    return opcode.split(".")[0] in ceiling.opcodes


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
        floats = seeds.view(np.float16) if ceiling.unit == "tensor_fp16" else seeds
        assert np.isfinite(floats.astype(np.float64)).all()


def test_every_unit_of_a_step_has_a_ceiling():
    from typing import get_args

    from steps.step import Unit

    assert {ceiling.unit for ceiling in CEILINGS} | {"packed_int32"} >= set(get_args(Unit))


@pytest.mark.gpu
def test_limits_and_protocol_on_this_gpu():
    """Plausible ceilings, in the order the hardware has them, and a graph that times a launch."""
    if reason := why_no_gpu():
        pytest.skip(reason)
    from results.measure import GpuStopwatch, sample
    from steps.machines import Gpu

    machine, stopwatch = Gpu(), GpuStopwatch()
    measured = limits.measure_limits(stopwatch, machine)
    assert measured.copy_tbps is not None
    assert 0.05 < measured.copy_tbps < 50
    assert measured.tops["int32"] <= 1.1 * measured.tops["fp32"]
    assert measured.tops["dp4a"] > 2 * measured.tops["int32"]

    (fp32,) = (ceiling for ceiling in CEILINGS if ceiling.unit == "fp32")
    seeds = machine.array(limits.seeds_for(fp32))
    out = machine.empty((limits.THREADS * 1024,), np.float32)
    short, long = (limits.launch_of(fp32, seeds, out, 1024, rounds) for rounds in (64, 256))
    for launch in (short, long):
        machine.run(launch)
    times = [sample(stopwatch, lambda _, la=la: (la,), 1, 0.02)[0] for la in (short, long)]
    assert 2.5 < times[1].us / times[0].us < 4.5
    assert {timing.how for timing in times} == {"graph"}, stopwatch.why_no_graph
