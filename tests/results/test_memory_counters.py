"""What the simulator's trace says of steps 1 to 9, beside what Nsight Compute counted on a GPU.

`results/<gpu>/ncu.json` has a line for each launch that `make counters` looked at.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections import Counter
from functools import cache
from typing import Any

import pytest

from results.record import ROOT
from steps.cli.counters import METRICS, launched
from steps.compile.compiler import machine_code, signature_of, source_lines
from steps.contract import Size, Work
from steps.learn.trace.traced import trace
from steps.product.choice import Choice
from steps.registry import find, source

STEPS = range(1, 10)
TRACED = [
    pytest.param(number, marks=pytest.mark.xdist_group(f"traced-{number}")) for number in STEPS
]
"""In one process each: a trace takes seconds, and two tests look at it."""
HOME: Size = (512, 4096, 4096)
FORMAT = "q4_0"
FILE = ROOT / "results" / "nvidia-h200" / "ncu.json"

DEPTHS = {
    **dict.fromkeys((1, 2, 3, 4), (512,)),
    **dict.fromkeys((5, 6), (128,)),
    **dict.fromkeys((7, 8, 9), (256, 512)),
}
"""K of the traced blocks. One depth: all but the stores of C is in the loop along K. Two: what is
before and after the loop follows from the difference. Sectors of steps 1 to 4, whose blocks of 18
bytes lie in rows, repeat every 16 blocks: 512 K."""
ALIKE = {1: 8, 2: 8, 3: 32}
"""Warps of a thread block that all do the same, of which one is traced; else all are."""
WARPS = {4: 32, 5: 8, 6: 8, 7: 8, 8: 4, 9: 4}
"""Those of a thread block of the others."""

EXACT = (
    *("global_load_requests", "global_load_sectors", "global_store_requests"),
    *("global_store_sectors", "shared_load_wavefronts", "shared_store_wavefronts"),
    *("ldmatrix_wavefronts", "async_store_wavefronts"),
)
ONLY_D = (
    "a feature without an offset needs d alone: two loads of 128 bits become four of 32, and lanes "
    "32 bytes apart meet in four banks. That is 4 x 3 wavefronts lost, not 2 x 4"
)
TWO_LINES = (
    "d and s of tokens, copied 4 bytes a lane, lie in two lines of 128 bytes, each of which is "
    "written in a cycle of its own: a sixth of the copies, one of 19 wavefronts"
)
D_AND_S = "d and s of a block of A are one load of 32 bits: 26 for 27, of 290 sectors for 292"
EXPLAINED: dict[tuple[int, str], tuple[float, str]] = {
    (2, "global_load_requests"): (26 / 27, D_AND_S),
    (2, "global_load_sectors"): (290 / 292, D_AND_S),
    (5, "shared_load_conflicts"): (1.5, ONLY_D),
    (6, "shared_load_conflicts"): (1.5, ONLY_D),
    (9, "async_store_wavefronts"): (19 / 18, TWO_LINES),
}
"""(step, figure) -> (measured / predicted, why it is not 1). A compiler may merge or drop accesses
of the source; where it does, the reason belongs here. `test_what_the_compiler_merges` reads these
in the machine code."""
PIPE = 0.1
"""What `l1tex__data_bank_conflicts_pipe_lsu` may exceed the wavefronts lost in shared memory by, as
a part of all wavefronts there: it counts cycles lost to other accesses in the pipe as well, and
accesses to global memory, such as C stored in rows that are a multiple of 128 bytes apart."""
SCATTERED = (1, 2, 4)
"""Steps whose lanes load from rows a multiple of 128 bytes apart: their sectors lie in the same
banks of the L1, and each but one of a request may cost a cycle. In 1 and 2 each does."""
AT_ONCE = {1: (16, 8 * 16), 2: (16, 6 * 16), 3: (32, 2 * 32), 4: (32, 2 * 32), 5: (128, 2 * 64)}
"""Tokens and features of the thread blocks that an SM has at a time, side by side, in steps 1 to 5:
their warps ask for the same sectors again and again, and the L1 has some of them."""

COUNTED = {
    ("load", "global"): "global_load",
    ("store", "global"): "global_store",
    ("cp.async", "global"): "global_load",  # the counters of loads hold them
    ("load", "shared"): "shared_load",
    ("ldmatrix", "shared"): "ldmatrix",
    ("store", "shared"): "shared_store",
    ("cp.async", "shared"): "async_store",
}


@cache
def predicted(number: int) -> dict[str, int]:
    """Figures of the whole launch at home: those of one block, which all others are like."""
    step = find(number)
    work = Work(step, step.families[-1], FORMAT)
    m, n, k = HOME
    blocks, found = 0, []
    for depth in DEPTHS[number]:
        traced = trace(work, (m, n, depth), warps=range(WARPS.get(number, 1)))
        blocks = traced.grid[0] * traced.grid[1]
        found.append(_sums(traced.instructions, ALIKE.get(number, 1)))
    first, *rest = found
    depth = DEPTHS[number][0]
    whole = {}
    for name in set().union(*found):
        if rest:
            each = (rest[0][name] - first[name]) / (DEPTHS[number][1] - depth)
            total = first[name] + each * (k - depth)
        else:
            total = first[name] * (1 if name.startswith("global_store") else k / depth)
        assert total == int(total), f"{name}: {total} is not a count"
        whole[name] = int(total) * blocks
    return whole


def _sums(instructions: list, times: int) -> Counter[str]:
    """Requests, sectors, wavefronts and conflicts by what is counted together. Loads of the same
    addresses, one right after the other, are one: a compiler keeps the value."""
    sums: Counter[str] = Counter()
    seen = set()
    for each in instructions:
        again = (each.warp, each.array, each.size, each.trail, each.requests)
        if each.kind == "load" and each.space == "global" and again in seen:
            continue
        seen.add(again)
        name = COUNTED[each.kind, each.space]
        sums[f"{name}_requests"] += times * each.requests
        sums[f"{name}_sectors"] += times * each.sectors
        sums[f"{name}_wavefronts"] += times * each.wavefronts
        sums[f"{name}_conflicts"] += times * each.conflicts
    return sums


def measured(number: int) -> dict[str, Any]:
    """What the committed record has of the step at home."""
    wanted = {"step": number, "family": find(number).families[-1], "format": FORMAT}
    wanted |= {"output": "float32", **dict(zip("MNK", HOME, strict=True))}
    rows = json.loads(FILE.read_text(encoding="utf-8"))["kernels"]
    found = [row for row in rows if wanted.items() <= row.items()]
    assert found, f"no launch of step {number} at {HOME}: `make counters` on that GPU records it"
    return dict(found[0])


@pytest.mark.slow
@pytest.mark.parametrize("number", TRACED)
def test_requests_sectors_and_wavefronts_are_those_counted(number: int) -> None:
    row, ours = measured(number), predicted(number)
    for name in EXACT:
        ratio, why = EXPLAINED.get((number, name), (1.0, "equal"))
        assert row[name] == pytest.approx(ratio * ours.get(name, 0), rel=1e-3), (name, why)
    for kind in ("global_load", "global_store"):
        if row.get(f"{kind}_requests"):
            each = row[f"{kind}_sectors"] / row[f"{kind}_requests"]
            expected = ours[f"{kind}_sectors"] / ours[f"{kind}_requests"]
            known = any((number, f"{kind}_{what}") in EXPLAINED for what in ("requests", "sectors"))
            assert known or each == pytest.approx(expected, rel=0.01), kind


def lost(number: int) -> float:
    """Wavefronts lost to conflicts in shared memory, of all kinds."""
    return sum(
        value * EXPLAINED.get((number, name), (1.0, ""))[0]
        for name, value in predicted(number).items()
        if name.endswith("_conflicts")
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", TRACED)
def test_all_conflicts_of_the_pipe_and_bytes_of_the_l2(number: int) -> None:
    """Two counters that hold more than a trace knows.

    `lts__t_bytes` is what reached the L2. The coalescer between L1 and L2 serves the same sector to
    several SMs at once and keeps some of what was asked for from it: up to a fifth. What warps of
    steps 1 to 5 ask for again, the L1 may keep; then the fifth is of the bytes that the blocks of
    an SM need at all.
    """
    row, ours = measured(number), predicted(number)
    least = lost(number)
    wavefronts = sum(value for name, value in ours.items() if name.endswith("_wavefronts"))
    apart = row["global_load_sectors"] - row["global_load_requests"] if number in SCATTERED else 0
    assert least <= row["shared_bank_conflicts"] <= least + PIPE * wavefronts + apart
    if not wavefronts:  # steps 1 and 2 have no shared memory
        assert row["shared_bank_conflicts"] == pytest.approx(apart, rel=0.01)
    if number == 6:  # whose loads of shared memory are most of what it does
        assert row["shared_bank_conflicts"] == pytest.approx(least, rel=0.01)
    asked = 32 * sum(value for name, value in ours.items() if name.endswith("_sectors"))
    assert 0.8 * needed(number, asked) <= row["l2_bytes"] <= asked


def needed(number: int, asked: int) -> float:
    """Bytes that an SM reads at least once for the blocks `AT_ONCE`, of all such blocks, and C; of
    steps whose warps ask for each sector once, what they ask for."""
    if number not in AT_ONCE:
        return asked
    (m, n, k), (tokens, features) = HOME, AT_ONCE[number]
    of_a = 4 * k if find(number).families[-1] == "A16" else k * 36 // 32
    return m / tokens * n / features * (tokens * of_a + features * k * 18 // 32) + 4 * m * n


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "texts", "opcodes"),
    [
        (2, ["load_u16(a, at_a)"], {"LDG.E": 1, "LDG.E.U16": 0}),
        (6, ["load_f32x4(dz_w,"], {"LDS": 4, "LDS.128": 0}),
    ],
)
def test_what_the_compiler_merges(number: int, texts: list[str], opcodes: dict[str, int]) -> None:
    step = find(number)
    launch = Choice.of_work(Work(step, step.families[-1], FORMAT), HOME).launches()[-1]
    code = machine_code(launch.kernel, signature_of(launch.args), "sm_90a", line_info=True)
    lines = {i for i, line in enumerate(source(step), 1) if any(text in line for text in texts)}
    found = Counter(
        word
        for line, text in source_lines(code.sass)
        if line in lines
        for word in text.split()
        if word.startswith(("LDG", "LDS"))
    )
    assert {name: found[name] for name in opcodes} == opcodes


def test_the_next_run_counts_them_at_the_home_of_each_of_these_steps() -> None:
    assert set(EXACT) <= set(METRICS)
    asked = launched(Namespace(steps=[str(number) for number in STEPS], format=[]), (9, 0))
    for number in STEPS:
        family = find(number).families[-1]
        own = [
            one
            for one in asked
            if (one.work.step.number, one.work.family, one.size) == (number, family, HOME)
        ]
        assert [one.output for one in own] == ["float32"]
        assert own[0].work.format == FORMAT
