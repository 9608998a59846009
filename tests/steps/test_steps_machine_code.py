"""What a step promises of its machine code, proven for three architectures without a GPU; and that
of engineered kernels is sound.

A compilation takes seconds. Tests of one step share theirs: they are one group, which pytest-xdist
gives to one process, and `machine_code` remembers what that process has compiled.
"""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from qformats import FORMATS, WEIGHT_FORMATS
from steps.blocks.codes import safe_load
from steps.compile.compiler import MachineCode, machine_code, signature_of
from steps.contract import Family, Kernel, Launch, Size, Step, Work
from steps.product.choice import Choice
from steps.registry import find, kernel_of, ladder
from tests.steps.running_wgmma import LABEL, LINE, TARGET, misused
from tests.steps.works import ENGINEERED, STORED, WITH_LESSONS, in_turn, label_of, marks_of

OLDER, NEWEST = {"sm_75": (7, 5), "sm_80": (8, 0)}, "sm_90a"
EVERY = pytest.mark.every
REGISTERS = 65536  # of a multiprocessor, on all three architectures
SMALL: tuple[Size, ...] = ((40, 64, 64), (2, 64, 64))
"""A step may choose another kernel for few tokens: prove both."""

# From step 8 on a launch chooses by shape. These shapes take what the tables quote and what neither
# small shapes nor `test_every_tile_of_wgmma` take: of kernels 14 and 15 reduction slices, and no
# stagger. A number is that of an engineered kernel, or of a lesson without one; those of decode are
# in tests.kernels.test_decode.
LARGE: dict[int, list[Size]] = {
    8: [(512, 4096, 4096)],
    9: [(512, 4096, 4096)],
    10: [(512, 4096, 4096), (128, 4096, 4096), (128, 4096, 14336)],
    11: [(m, 4096, 4096) for m in (16, 64, 128, 512, 4096)],
    12: [(512, 4096, 4096)],
    13: [(512, 4096, 4096)],
    14: [(512, 6144, 4096), *((m, 4096, 4096) for m in (128, 256, 512))],
    15: [(512, 4096, 14336), *((m, 4096, 4096) for m in (32, 64, 512))],
}

COMPILED_BY_OTHERS = (13, 14, 15, 17, 18)
"""Engineered kernels of which `make test` compiles no small size here: tests of every tile below,
and tests.kernels.test_decode, have the same."""


def large_of(kernel: Kernel) -> list[Size]:
    """Of a lesson that has a kernel of its own, its first home."""
    if isinstance(kernel, Step) and kernel.number in WITH_LESSONS:
        return [kernel.home_shapes[0]]
    return LARGE.get(kernel.number, [])


def compiled(launch: Launch, arch: str = NEWEST) -> MachineCode:
    return machine_code(launch.kernel, signature_of(launch.args), arch)


def own_code(number: int, name: str) -> MachineCode:
    """The machine code of an A8 step's kernel for many tokens."""
    return compiled(Choice.of_work(Work(find(number), "A8", name), SMALL[0]).launches()[-1])


def group(kernel: Kernel) -> pytest.MarkDecorator:
    return pytest.mark.xdist_group(label_of(kernel))


def works() -> Iterator[pytest.param]:
    """(work, architecture, sizes). Every format on the newest architecture, which has all the
    kernels, by turns; one on each older one; one for each large size, of all that the kernel
    stores, and another for the next. `make test` takes one format, one older architecture in one
    family of each step, and the first and the last of its large sizes, where it has some beside one
    small one. A lesson and the kernel that it teaches have different formats. All kernels of a
    lesson are of the same one: Numba types their device functions once."""
    every = sorted((*ladder(), *ENGINEERED), key=lambda one: -one.number)
    for step in every:  # the longest groups first
        number, large, families = step.number, large_of(step), step.families
        seldom = step in ENGINEERED and number in COMPILED_BY_OTHERS
        own = next(n for n in WEIGHT_FORMATS if EVERY not in marks_of(step, n, shift=2, formats=1))
        formats = [name for name in WEIGHT_FORMATS if name in step.formats]
        for family, name in itertools.product(families, formats):
            marks = [EVERY] if seldom else [*marks_of(step, name, shift=2, formats=1)]
            if EVERY in marks or not large:
                yield one_work(step, family, name, marks=marks)
                continue
            for i, size in enumerate(SMALL):  # large ones come below
                of_size = marks if i == number % 2 else [EVERY]
                yield one_work(step, family, name, NEWEST, size, marks=of_size)
        older = [arch for arch, cc in OLDER.items() if cc >= step.min_cc]
        for i, arch in enumerate(older):
            for family, size in itertools.product(families, SMALL):
                often = arch == older[number % len(older)] and family == families[number % 2 - 1]
                often &= size == SMALL[number % 2] and not seldom
                marks = [pytest.mark.slow if often else EVERY]
                # of step 9 in Q4_1 ptxas for sm_80 keeps three words of its loop in local memory
                name = own if often and number != 9 else in_turn(number + i)
                yield one_work(step, family, name, arch, size, marks=marks)
        # int8 weights are made of five formats, of all others before the launch
        names = STORED if families[-1] == "A16" else WEIGHT_FORMATS
        names = [name for name in names if name in step.formats]
        for i, size in enumerate(large):
            often = size in (large[0], large[-1])
            name = names[(number + i) % len(names)]
            if often and step not in ENGINEERED:
                name = own
            marks = [pytest.mark.slow if often else EVERY]
            yield one_work(step, families[-1], name, NEWEST, size, marks=marks)


def one_work(
    step: Kernel, family: Family, name: str, arch: str = NEWEST, *sizes: Size, marks: list[Any]
) -> pytest.param:
    shapes = ["x".join(map(str, size)) for size in sizes]
    label = "-".join([label_of(step), family, arch, name, *shapes])
    work = Work(step, family, name)
    return pytest.param(work, arch, sizes or SMALL, id=label, marks=(group(step), *marks))


def no_local_memory_where_it_counts(code: MachineCode) -> bool:
    """None at all; or, in a kernel of mma that has all the registers its launch bounds allow, a few
    words that ptxas keeps there while it multiplies. On sm_90a, where the figures are from, none is
    touched from the first mma to the last, which is the unrolled loop; elsewhere two at most."""
    if not code.count("LDL", "STL"):
        return code.stack_bytes == code.spill_store_bytes == code.spill_load_bytes == 0
    lines = code.sass.splitlines()
    multiplies = [i for i, line in enumerate(lines) if "IMMA" in line or "HMMA" in line]
    loop = lines[multiplies[0] : multiplies[-1]] if multiplies else lines
    touched = sum("LDL" in line or "STL" in line for line in loop)
    few = 0 if code.arch == "sm_90a" else 2
    return touched <= few and code.registers in (128, 255) and code.spill_store_bytes <= 64


DOUBLE = ("DADD", "DMUL", "DFMA", "DSETP", "DMNMX")


def double_precision(code: MachineCode) -> list[str]:
    """Opcodes that compute in float64, or convert to it or from it (F2F.F64.F32, I2F.F64)."""
    return [op for op in code.instructions if op.startswith(DOUBLE) or ".F64" in op]


def sound(launch: Launch, arch: str = NEWEST) -> MachineCode:
    """The machine code of a launch: no spills, no float64, no remark of ptxas, registers for a
    thread block, and none lost that a running wgmma reads."""
    code, where = compiled(launch, arch), launch.kernel.__name__
    assert no_local_memory_where_it_counts(code), f"{where}: {code.log}"
    assert double_precision(code) == [], where
    # an SM of compute capability 7.5 has fewer threads than two blocks of 1024
    ignored = ".minnctapersm will be ignored" if arch == "sm_75" else "nothing"
    assert [one for one in code.warnings if ignored not in one] == [], where
    assert code.registers * math.prod(launch.block) <= REGISTERS, where
    if code.count("HGMMA", "IGMMA"):
        no_wgmma_loses_its_weights(code)
    return code


@pytest.mark.parametrize(("work", "arch", "sizes"), list(works()))
def test_machine_code_is_what_the_step_promises(
    work: Work, arch: str, sizes: tuple[Size, ...]
) -> None:
    """It is sound, shows its idea, and none of a later one. Of the idea on sm_75 nothing is
    promised, nor of an engineered kernel."""
    promises, forbidden = promised(work)
    for size in sizes:
        *passes, own = Choice.of_work(work, size).launches()
        for launch in passes:
            sound(launch, arch)
        code = sound(own, arch)
        if arch == "sm_75":
            continue
        for promise in promises:
            held = any(op.startswith(tuple(promise.split("|"))) for op in code.instructions)
            assert held, f"{own.kernel.__name__} lacks {promise}: {sorted(code.instructions)}"
        found = [op for op in code.instructions if op.startswith(forbidden)]
        assert not found, f"{own.kernel.__name__} must not contain {found}"
        if work.step is kernel_of(15) and size[0] >= 128:
            int8_weights_are_made_above_the_wait(code)


def promised(work: Work) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(opcodes its machine code must hold, those that it must not)"""
    step, family = work.step, work.family
    if not isinstance(step, Step):
        return (), ()
    assert step.contains[family], "a step must say what its machine code shows"
    return step.contains[family], step.forbids[family]


@group(find(4))
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("q4_0"),
        pytest.param("q4_1", marks=pytest.mark.slow),
        pytest.param("q5_1", marks=pytest.mark.slow),
        *(pytest.param(one, marks=EVERY) for one in ("q5_0", "q8_0")),
    ],
)
def test_word_loads_are_as_wide_as_the_layout_guarantees(name: str) -> None:
    """b2 for blocks of 18, 22 and 34 bytes (a 4-byte load would fault), b4 for 20 and 24."""
    wanted = "b4" if FORMATS[name].block_bytes % 4 == 0 else "b2"
    assert safe_load(name, "qs").py_func.__name__ == wanted
    scales = 2 + (2 if "m" in FORMATS[name].dtype.names else 1)  # d and s of A; d (and m) of W
    words = 1 if FORMATS[name].bits == 4 else 2  # qs, and qh or the other half of a q8_0 block
    code = own_code(4, name)
    halves = code.count("LDG.E.U16")
    assert halves == scales + (2 * words if wanted == "b2" else 0), code.instructions
    assert code.count("LDG.E") == 1 + halves + (words if wanted == "b4" else 0), code.instructions


@group(find(4))
def test_the_packed_product_is_two_multiply_adds_in_one() -> None:
    """Step 4 multiplies 32 elements with 16 IMAD; nothing else in it accumulates a chain of two.
    ptxas packs four byte products into IDP.4A where step 3 did not ask; step 4 must not be helped
    so."""
    code = own_code(4, "q4_0")
    chains = re.findall(r"LDS R\d+.*;", code.sass)
    assert len(chains) == 2 * 16 + 4  # two words a pair; scales and sums of a token and a feature
    assert code.count("IDP") == 0
    assert own_code(3, "q4_0").count("IDP") == 8


# --- wgmma runs on -------------------------------------------------------------------------------
# while the weights of the next half stage are unpacked: see tests.steps.running_wgmma.


def loops_of_wgmma(sass: str) -> list[list[str]]:
    """The instructions of the innermost loop round each wgmma, each loop once."""
    lines = sass.splitlines()
    labels = {found[1]: i for i, line in enumerate(lines) if (found := LABEL.match(line))}
    ends = [i for i, line in enumerate(lines) if re.search(r"\bBRA `\(", line)]
    backs = [(labels[TARGET.search(lines[end])[1]], end) for end in ends]
    spans = []
    for i, line in enumerate(lines):
        if re.search(r"\b[HI]GMMA\b", line):
            around = [(begin, end) for begin, end in backs if begin < i < end]
            assert around, f"wgmma outside a loop: {line.strip()}"
            if around[0] not in spans:
                spans.append(around[0])
    return [
        [found[3] for line in lines[begin : end + 1] if (found := LINE.match(line))]
        for begin, end in spans
    ]


def unread_when_given_back(loop: list[str]) -> list[str]:
    """Loads from a stage of which a register is read by nothing before the stage is given back, in
    the next turn. An instruction that reads one waits until all lanes of the warp have it: only so
    may one lane arrive for all, and the producer copy over the stage."""
    given_back = [i for i, one in enumerate(loop) if one.startswith("SYNCS.ARRIVE")]
    found = []
    for i, load in enumerate(loop if given_back else ()):
        if written := re.match(r"LDS(?:\.(64|128))? R(\d+)", load):
            between = (loop + loop)[i + 1 : len(loop) + given_back[0]]
            read = " ".join(one.partition(",")[2] for one in between)
            first, words = int(written[2]), int(written[1] or 32) // 32
            if not all(re.search(rf"\bR{r}\b", read) for r in range(first, first + words)):
                found.append(load)
    return found


def no_wgmma_loses_its_weights(code: MachineCode) -> None:
    """Nothing touches a register that a running wgmma still uses, or copies over a stage while a
    load reads it."""
    assert misused(code.sass) == [], code.name
    for loop in loops_of_wgmma(code.sass):
        assert unread_when_given_back(loop) == [], code.name


Call = tuple[str, str]
"""dtypes of A and C"""


def calls_of(step: Kernel) -> list[Call]:
    """All of a kernel of float16; of one that reads int8, one for each dtype of C."""
    calls: list[Call] = [(output, output) for output in step.outputs]
    if step.families[-1] == "A16":
        calls += [("float16", output) for output in step.outputs if output != "float16"]
    return calls


def one_tile_a_block() -> Iterator[pytest.param]:
    """(step, tokens, format, call): with ALL=1 every tile in every format, for one of the calls in
    turn; in one format for all of them. `make test` takes of the latter one call in turn: every
    tile, every call."""
    names, step = STORED, kernel_of(13)
    calls: list[Call] = [*((output, output) for output in step.outputs), ("float16", "float32")]
    for (i, tokens), (j, name) in itertools.product(enumerate((16, 32, 64, 128)), enumerate(names)):
        in_all = j == (2 * i + 1) % len(names)
        in_turn_here = calls[i % len(calls)]
        for call in calls if in_all else [calls[(i + j // 2) % len(step.outputs)]]:
            often = in_all and call == in_turn_here
            label = f"{label_of(step)}-{name}-{tokens}-{'-'.join(call)}"
            marks = (group(step), pytest.mark.slow if often else EVERY)
            yield pytest.param(step, tokens, name, call, id=label, marks=marks)


@pytest.mark.parametrize(("step", "tokens", "name", "call"), list(one_tile_a_block()))
def test_every_tile_of_kernel_13(
    step: Kernel, tokens: int, name: str, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sound, as many blocks an SM as it says, and C of 16 bits by stmatrix; from float32, where
    token scales are multiplied too."""
    monkeypatch.setattr(sys.modules[step.launch.__module__], "TOKENS", (tokens,))
    work = Work(step, step.families[-1], name)
    *_, own = Choice.of_work(work, (tokens, 128, 256), *call).launches()
    code = sound(own)
    assert own.shared_bytes + 1024 <= 228 * 1024
    assert code.count("STSM") == (0 if call[1] == "float32" else tokens // 16)


def wgmma_tiles() -> Iterator[pytest.param]:
    """(step, tile, format, call, slices): with ALL=1 every tile in every format, for one of the
    calls in turn; in one format for all of them, and added up in slices. The loop is of a tile, a
    format and what weights are unpacked to; the end, of a tile and the dtypes. Tiles between two
    powers of two have the registers of neither, and are looked at in one format.

    `make test` takes three tiles of each step for one call, in one format, one of these in
    slices."""
    for number in (14, 15):
        step = kernel_of(number)
        calls = calls_of(step)
        tiles = sys.modules[step.launch.__module__].TILES
        last = len(tiles) - 1
        three = 1, last // 2, last
        for (i, tile), (j, name) in itertools.product(enumerate(tiles), enumerate(WEIGHT_FORMATS)):
            in_all = name == in_turn(number + (0 if i in three else i))
            if tile[1] & (tile[1] - 1) and not in_all:
                continue
            first = calls[(i + j) % len(step.outputs)]
            kernels = [(first, False)]
            if in_all:
                kernels += [(call, False) for call in calls if call != first]
                kernels.append((calls[tile[1] // 16 % len(calls)], True))
            often = kernels[-1 if i == last // 2 else 0] if in_all and i in three else None
            for call, slices in kernels:
                label = f"{label_of(step)}-{name}-{tile[0]}x{tile[1]}-{'-'.join(call)}"
                label += "-slices" * slices
                mark = pytest.mark.slow if (call, slices) == often else EVERY
                marks = (group(step), mark)
                yield pytest.param(step, tile, name, call, slices, id=label, marks=marks)


@pytest.mark.parametrize(("step", "tile", "name", "call", "slices"), list(wgmma_tiles()))
def test_every_tile_of_wgmma(
    step: Kernel,
    tile: tuple[int, int],
    name: str,
    call: Call,
    slices: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sound: a block with more tiles than one, so that one warpgroup is before the other, as in
    large products; or a tile added up in slices."""
    chosen = (tile, 1, 4, 1) if slices else (tile, 2, 1, 0)
    monkeypatch.setattr(sys.modules[step.launch.__module__], "tiling", lambda *_: chosen)
    work = Work(step, step.families[-1], name)
    *_, own = Choice.of_work(work, (2 * tile[1], tile[0], 512), *call).launches()
    code = sound(own)
    if step.number == 15 and tile[1] >= 128:
        int8_weights_are_made_above_the_wait(code)


def int8_weights_are_made_above_the_wait(code: MachineCode) -> None:
    """So they become int8 while products run. Behind the waits, which are for the registers of the
    operands, come the eight instructions that write them, and less than a third of all others."""
    (loop,) = loops_of_wgmma(code.sass)
    waits = [i for i, line in enumerate(loop) if line.startswith("WARPGROUP.DEPBAR.LE gsb0, 0x1")]
    assert len(waits) == 2
    products = [i for i, line in enumerate(loop) if line.startswith("IGMMA")]
    behind = {i for wait in waits for i in range(wait, next(p for p in products if p > wait))}
    made = [i for i, line in enumerate(loop) if re.match("LOP3|PRMT|HFMA2|HMUL2|SHF|IMAD", line)]
    late = len(behind.intersection(made)) - 2 * 8
    assert 0 <= late < (len(made) - 2 * 8) / 3, (late, len(made))


LOOP = """
        /*0010*/                   LDS.128 R8, [R4] ;
.L_x_1:
        /*0020*/                   HFMA2 R24, R8, R5.reuse, R6 ;
        /*0030*/                   LDS.64 R36, [R4+0x200] ;
        /*0040*/                   HGMMA.64x8x16.F32 R40, R24, gdesc[UR16], R40, gsb0 ;
        /*0050*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0060*/              @!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R23+URZ], RZ ;
        /*0070*/               @P0 BRA `(.L_x_2) ;
        /*0080*/                   LDS.128 R8, [R4] ;
        /*0090*/                   BRA `(.L_x_1) ;
.L_x_2:
        /*00a0*/                   EXIT ;
"""


def test_loads_that_nothing_reads_before_their_stage_is_given_back_are_found() -> None:
    (loop,) = loops_of_wgmma(LOOP)
    assert len(loop) == 8
    assert unread_when_given_back(loop) == ["LDS.64 R36, [R4+0x200]", "LDS.128 R8, [R4]"]
    (loop,) = loops_of_wgmma(LOOP.replace("LDS.64 R36", "LDS R6").replace("LDS.128 R8", "LDS R8"))
    assert unread_when_given_back(loop) == []
    assert len(loops_of_wgmma(LOOP + LOOP.replace("_x_", "_y_"))) == 2
    with pytest.raises(AssertionError, match="wgmma outside a loop"):
        loops_of_wgmma(LOOP.replace("BRA `(.L_x_1)", "EXIT"))
