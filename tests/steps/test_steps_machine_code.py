"""What a step promises of its machine code, proven for three architectures without a GPU.

A compilation takes seconds. Tests of one step share theirs: they are one group, which pytest-xdist
gives to one process, and `machine_code` remembers what that process has compiled.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator

import pytest

import steps
from qformats import FORMATS, WEIGHT_FORMATS
from reference import Problem
from steps.blocks.codes import safe_load
from steps.checks.verify import prepare
from steps.compile.compiler import MachineCode, machine_code, signature_of
from steps.contract import Family, Launch, Size, Step, Work
from steps.driver.machines import Simulator
from steps.product.choice import Choice
from tests.steps.works import in_turn, marks_by_turn

ARCHITECTURES = ("sm_75", "sm_80", "sm_90a")
NEWEST = ARCHITECTURES[-1]
REGISTERS = 65536  # of a multiprocessor, on all three architectures
MANY_TOKENS, FEW_TOKENS = 40, 2  # a step may choose another kernel for few tokens: prove both


def launches(step: Step, family: Family, name: str) -> Iterator[tuple[Launch, bool]]:
    """Every launch of the work, and whether it is the step's own (not the activation pass)."""
    for m in (MANY_TOKENS, FEW_TOKENS):
        problem = Problem(m, 64, 64, name)
        prepared = prepare(step, family, name, problem.a, problem.blocks, Simulator())
        yield from ((launch, False) for launch in prepared.activations.launches)
        yield prepared.launch, True


def compiled(launch: Launch, arch: str) -> MachineCode:
    return machine_code(launch.kernel, signature_of(launch.args), arch)


def own_code(step: Step, family: Family, name: str, arch: str) -> MachineCode:
    """The machine code of the step's kernel for many tokens."""
    return next(compiled(launch, arch) for launch, own in launches(step, family, name) if own)


def group(step: Step) -> pytest.MarkDecorator:
    return pytest.mark.xdist_group(f"step{step.number:02d}")


def works() -> Iterator[pytest.param]:
    """(step, family, arch, format): every format on the newest architecture, which has all the
    kernels, by turns; one on each older one, and another for the next step."""
    for step in reversed(steps.ladder()):  # the longest groups first
        for arch in ARCHITECTURES:
            cc = int(arch.removeprefix("sm_").rstrip("a"))
            if cc < 10 * step.min_cc[0] + step.min_cc[1]:
                continue
            turn = in_turn(step.number + ARCHITECTURES.index(arch))
            for family in step.families:
                for name in WEIGHT_FORMATS if arch == NEWEST else (turn,):
                    turns = marks_by_turn(step.number + ARCHITECTURES.index(arch), name)
                    slow = turns if arch == NEWEST else (pytest.mark.slow,)
                    label = f"step{step.number:02d}-{family}-{arch}-{name}"
                    marks = (group(step), *slow)
                    yield pytest.param(step, family, arch, name, id=label, marks=marks)


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


@pytest.mark.parametrize(("step", "family", "arch", "name"), list(works()))
def test_machine_code_is_what_the_step_promises(
    step: Step, family: Family, arch: str, name: str
) -> None:
    """No spills, no float64, no more registers than there are; its idea, and none of a later one.
    Of the idea on sm_75 nothing is promised."""
    assert step.contains[family], "a step must say what its machine code shows"
    for launch, own in launches(step, family, name):
        code, where = compiled(launch, arch), launch.kernel.__name__
        assert no_local_memory_where_it_counts(code), where
        # an SM of compute capability 7.5 has fewer threads than two blocks of 1024
        ignored = ".minnctapersm will be ignored" if arch == "sm_75" else "nothing"
        assert [one for one in code.warnings if ignored not in one] == [], where
        assert double_precision(code) == [], where
        assert code.registers * math.prod(launch.block) <= REGISTERS, where
        if own and arch != "sm_75":
            for promise in step.contains[family]:
                held = any(op.startswith(tuple(promise.split("|"))) for op in code.instructions)
                assert held, f"{where} lacks {promise}: {sorted(code.instructions)}"
            found = [op for op in code.instructions if op.startswith(step.forbids[family])]
            assert not found, f"{where} must not contain {found}"


# Steps 9 to 18 choose among kernels by shape. These shapes take the ones that the tables quote and
# that neither small shapes nor `test_every_tile_of_wgmma` take: of steps 14 and 15 reduction
# slices, and no stagger.
LARGE: dict[int, list[Size]] = {
    8: [(512, 4096, 4096)],
    9: [(512, 4096, 4096)],
    10: [(512, 4096, 4096), (128, 4096, 4096), (128, 4096, 14336)],
    17: [(1, 4096, 14336), (16, 4096, 14336)],
    11: [(m, 4096, 4096) for m in (16, 64, 128, 512, 4096)],
    12: [(m, 4096, 4096) for m in (128, 512)],
    13: [(512, 4096, 4096)],
    14: [(512, 6144, 4096), *((m, 4096, 4096) for m in (128, 256, 512))],
    15: [(512, 4096, 14336), *((m, 4096, 4096) for m in (32, 64, 512))],
    18: [(m, 4096, 14336) for m in (1, 2, 4, 8, 16)],
}


def large_products() -> Iterator[pytest.param]:
    """(work, size): one format for each, and another for the next. `make test` runs the first and
    the last of each step."""
    for number, sizes in LARGE.items():
        step = steps.find(number)
        for i, size in enumerate(sizes):
            name = in_turn(number + i)
            label = f"step{number:02d}-{name}-{'x'.join(map(str, size))}"
            within = size not in (sizes[0], sizes[-1])
            marks = (group(step), pytest.mark.every if within else pytest.mark.slow)
            yield pytest.param(Work(step, step.families[-1], name), size, id=label, marks=marks)


@pytest.mark.parametrize(("work", "size"), list(large_products()))
def test_the_kernels_of_large_products_too(work: Work, size: Size) -> None:
    *_, own = Choice.of_work(work, size).launches()
    code = compiled(own, NEWEST)
    assert no_local_memory_where_it_counts(code), code.log
    assert code.warnings == ()
    assert code.registers * math.prod(own.block) <= REGISTERS
    if code.count("HGMMA", "IGMMA"):
        no_wgmma_loses_its_weights(code)


@group(steps.find(4))
@pytest.mark.parametrize(
    "name",
    [
        n if n in ("q4_0", "q4_1") else pytest.param(n, marks=pytest.mark.slow)
        for n in WEIGHT_FORMATS
    ],
)
def test_word_loads_are_as_wide_as_the_layout_guarantees(name: str) -> None:
    """b2 for blocks of 18, 22 and 34 bytes (a 4-byte load would fault), b4 for 20 and 24."""
    wanted = "b4" if FORMATS[name].block_bytes % 4 == 0 else "b2"
    assert safe_load(name, "qs").py_func.__name__ == wanted
    scales = 2 + (2 if "m" in FORMATS[name].dtype.names else 1)  # d and s of A; d (and m) of W
    words = 1 if FORMATS[name].bits == 4 else 2  # qs, and qh or the other half of a q8_0 block
    code = own_code(steps.find(4), "A8", name, "sm_90a")
    halves = code.count("LDG.E.U16")
    assert halves == scales + (2 * words if wanted == "b2" else 0), code.instructions
    assert code.count("LDG.E") == 1 + halves + (words if wanted == "b4" else 0), code.instructions


@group(steps.find(4))
def test_the_packed_product_is_two_multiply_adds_in_one() -> None:
    """Step 4 multiplies 32 elements with 16 IMAD; nothing else in it accumulates a chain of two."""
    code = own_code(steps.find(4), "A8", "q4_0", "sm_90a")
    chains = re.findall(r"LDS R\d+.*;", code.sass)
    assert (
        len(chains) == 2 * 16 + 4
    )  # two words a pair; the scales and sums of a token and a feature


def test_the_compiler_finds_dp4a_where_step_3_did_not_ask() -> None:
    """ptxas packs four byte products into IDP.4A behind our back; step 4 must not be helped so."""
    assert own_code(steps.find(3), "A8", "q4_0", "sm_90a").count("IDP") == 8
    assert own_code(steps.find(4), "A8", "q4_0", "sm_90a").count("IDP") == 0


# --- wgmma reads the registers of A while others are written --------------------------------------
# Each group of multiplications runs on while the weights of the next are unpacked. They may not
# take the registers that it still reads, and no simulator shows it: there registers are values.
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\S.*?)\s*;", re.MULTILINE)
GMMA = re.compile(r"[HI]GMMA\.\S+ R\d+, R(\d+)\S*, gdesc\[UR\d+\], (?:R\d+|RZ)")
WRITTEN = re.compile(r"(?!BAR)([A-Z][\w.]*) (?:U?P\w+, )?R(\d+)\b")


def loop_of_wgmma(sass: str) -> list[str]:
    """The instructions from the label before the first wgmma to the branch back to it, which comes
    after the last one: all of them are in one loop."""
    lines = sass.splitlines()
    places = [i for i, line in enumerate(lines) if re.search(r"\b[HI]GMMA\b", line)]
    labels = {line[:-1]: i for i, line in enumerate(lines) if re.fullmatch(r"\.L\w+:", line)}
    for end in range(places[-1], len(lines)):
        back = re.search(r"\bBRA `\((\.L\w+)\)", lines[end])
        if back and labels[back[1]] < places[0]:
            return INSTRUCTION.findall("\n".join(lines[labels[back[1]] : end + 1]))
    raise AssertionError("wgmma outside a loop")


def registers_of_a(instruction: str) -> set[int]:
    found = GMMA.match(instruction)
    assert found, f"its A is no register: {instruction}"
    return set(range(int(found[1]), int(found[1]) + 4))


def commit_groups(loop: list[str]) -> list[set[int]]:
    """The registers of A of each commit group, in the order of the program."""
    groups, own = [], set()
    for instruction in loop:
        if re.match("[HI]GMMA", instruction):
            own |= registers_of_a(instruction)
            if instruction.endswith("gsb0"):
                groups.append(own)
                own = set()
    assert not own, "what is multiplied last in the loop is committed there"
    return groups


def neighbours_that_share(loop: list[str]) -> list[set[int]]:
    """Registers of A that a group has in common with the one before it, that of the first being the
    last of the loop."""
    groups = commit_groups(loop)
    assert len(groups) > 1, "two groups at least: one multiplies while the other is made"
    return [a & b for a, b in zip(groups, groups[-1:] + groups[:-1], strict=True) if a & b]


def written_too_early(loop: list[str]) -> list[str]:
    """Instructions that write a register of A between a wgmma and the wait for its group."""
    running: list[set[int]] = []
    own: set[int] = set()
    found = []
    for instruction in 2 * loop:  # again, with the last group of the first time running
        wait = re.match(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\w+)", instruction)
        write = WRITTEN.match(instruction)
        if wait:
            running = running[max(0, len(running) - int(wait[1], 16)) :]
        elif re.match("[HI]GMMA", instruction):
            own |= registers_of_a(instruction)
            if instruction.endswith("gsb0"):
                running.append(own)
                own = set()
        elif write:
            name, first = write[1], int(write[2])
            wide = 4 if ".128" in name else 2 if re.search(r"\.64|WIDE|^CS2R", name) else 1
            if not own.union(*running).isdisjoint(range(first, first + wide)):
                found.append(instruction)
    return found


def no_wgmma_loses_its_weights(code: MachineCode) -> None:
    """Nothing writes a register that a running wgmma still reads."""
    loop = loop_of_wgmma(code.sass)
    in_loop = sum(bool(re.match("[HI]GMMA", instruction)) for instruction in loop)
    assert in_loop == code.count("HGMMA", "IGMMA"), "some are outside the loop"
    assert neighbours_that_share(loop) == []
    assert written_too_early(loop) == []


Call = tuple[str, str]
"""dtypes of A and C"""


def wgmma_tiles() -> Iterator[pytest.param]:
    """(step, tile, format, calls, slices): every tile in every format, for one of the calls in
    turn; in one format for all of them, and added up in slices. `make test` takes that format with
    one call. The loop is of a tile, a format and what weights are unpacked to; the end, of a tile
    and the dtypes. Tiles between two powers of two have the registers of neither, and are looked at
    in one format."""
    for number in (14, 15):
        step = steps.find(number)
        for i, tile in enumerate(sys.modules[step.launch.__module__].TILES):
            for j, name in enumerate(WEIGHT_FORMATS):
                calls: list[Call] = [(output, output) for output in step.outputs]
                if step.families[-1] == "A16":
                    calls += [("float16", output) for output in step.outputs if output != "float16"]
                in_all = name == in_turn(number + i)
                if tile[1] & (tile[1] - 1) and not in_all:
                    continue
                slices = calls[tile[1] // 16 % len(calls)] if in_all else None
                one = [calls[(i + j) % len(step.outputs)]]
                label = f"step{number}-{name}-{tile[0]}x{tile[1]}"
                here = in_all and (number + i) % 2 == 0
                marks = (group(step), pytest.mark.slow if here else pytest.mark.every)
                yield pytest.param(step, tile, name, one, slices, id=label, marks=marks)
                if in_all:
                    rest = [call for call in calls if call not in one]
                    marks = (group(step), pytest.mark.every)
                    yield pytest.param(
                        step, tile, name, rest, None, id=f"{label}-calls", marks=marks
                    )


def one_tile_a_block() -> Iterator[pytest.param]:
    """(step, tokens, format, calls): every tile in every format, in one of two steps that multiply
    alike, for one of the calls in turn; in one format for all of them. `make test` takes the latter
    in one of the two steps."""
    names = (*WEIGHT_FORMATS, "mxfp4", "q6_k", "q2_k")
    for i, tokens in enumerate((16, 32, 64, 128)):
        for j, name in enumerate(names):
            for step in (steps.find(12), steps.find(13)):
                calls: list[Call] = [(output, output) for output in step.outputs]
                calls.append(("float16", "float32"))
                in_all = j == (2 * i + step.number) % len(names)
                if not in_all:
                    if (i + j + step.number) % 2:
                        continue
                    calls = [calls[(i + j // 2) % len(step.outputs)]]
                label = f"step{step.number}-{name}-{tokens}"
                here = in_all and (step.number + i) % 2 == 0
                marks = (group(step), pytest.mark.slow if here else pytest.mark.every)
                yield pytest.param(step, tokens, name, calls, id=label, marks=marks)


@pytest.mark.parametrize(("step", "tokens", "name", "calls"), list(one_tile_a_block()))
def test_every_tile_of_steps_12_and_13(
    step: Step, tokens: int, name: str, calls: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing in local memory, as many blocks an SM as it says, and C of 16 bits by stmatrix; from
    float32, where token scales are multiplied too."""
    module, blocks = sys.modules[step.launch.__module__], 1
    if step.number == 12:
        blocks = module.TILES[tokens]
        monkeypatch.setattr(module, "TILES", {tokens: blocks})
    else:
        monkeypatch.setattr(module, "TOKENS", (tokens,))
    for source, output in calls:
        work = Work(step, step.families[-1], name)
        *_, own = Choice.of_work(work, (tokens, 128, 256), source, output).launches()
        code = compiled(own, NEWEST)
        assert code.stack_bytes == code.spill_store_bytes == code.count("LDL", "STL") == 0
        assert code.warnings == ()
        assert code.registers * math.prod(own.block) * blocks <= REGISTERS
        assert (own.shared_bytes + 1024) * blocks <= 228 * 1024
        assert code.count("STSM") == (0 if output == "float32" else tokens // 16)
        no_wgmma_loses_its_weights(code)


@pytest.mark.parametrize(("step", "tile", "name", "calls", "slices"), list(wgmma_tiles()))
def test_every_tile_of_wgmma(
    step: Step,
    tile: tuple[int, int],
    name: str,
    calls: list[Call],
    slices: Call | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A block with more tiles than one, so that one warpgroup is before the other, as in large
    products; with `slices`, also a tile added up in them, for that call."""
    module = sys.modules[step.launch.__module__]
    size = (2 * tile[1], tile[0], 512)
    launches = [((tile, 2, 1, 0), call) for call in calls]
    if slices:
        launches.append(((tile, 1, 4, 1), slices))
    for configuration, (source, output) in launches:
        monkeypatch.setattr(module, "tiling", lambda *_, chosen=configuration: chosen)
        work = Work(step, step.families[-1], name)
        *_, own = Choice.of_work(work, size, source, output).launches()
        code = compiled(own, NEWEST)
        assert code.stack_bytes == code.spill_store_bytes == code.count("LDL", "STL") == 0
        assert code.warnings == ()
        assert code.registers * math.prod(own.block) <= REGISTERS
        no_wgmma_loses_its_weights(code)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        pytest.param(name, (128, 256)[(1 + i) % 2], marks=group(steps.find(15)))
        for i, name in enumerate(WEIGHT_FORMATS)
    ],
)
def test_int8_weights_are_unpacked_above_the_wait(
    name: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So they become int8 while products run. Behind the waits, which are for the registers of the
    operands, come the eight instructions that write them, and less than a third of all others."""
    step = steps.find(15)
    monkeypatch.setattr(
        sys.modules[step.launch.__module__], "tiling", lambda *_: ((128, tokens), 2, 1, 0)
    )
    work = Work(step, "A8", name)
    *_, own = Choice.of_work(work, (2 * tokens, 128, 512), c="float16").launches()
    loop = loop_of_wgmma(compiled(own, NEWEST).sass)
    waits = [i for i, line in enumerate(loop) if line.startswith("WARPGROUP.DEPBAR.LE gsb0, 0x1")]
    assert len(waits) == 2
    products = [i for i, line in enumerate(loop) if line.startswith("IGMMA")]
    behind = {i for wait in waits for i in range(wait, next(p for p in products if p > wait))}
    made = [i for i, line in enumerate(loop) if re.match("LOP3|PRMT|HFMA2|HMUL2|SHF|IMAD", line)]
    late = len(behind.intersection(made)) - 2 * 8
    assert 0 <= late < (len(made) - 2 * 8) / 3, (late, len(made))


RIGHT_LOOP = """
        /*0010*/                   LDS.128 R8, [R4] ;
.L_x_1:
        /*0020*/                   HFMA2 R24, R8, R5.reuse, R6 ;
        /*0030*/                   HFMA2 R31, R9, R5, R6 ;
        /*0040*/                   WARPGROUP.ARRIVE ;
        /*0050*/                   HGMMA.64x8x16.F32 R40, R24, gdesc[UR16], R40, !UPT ;
        /*0060*/                   LDS.64 R36, [R4+0x200] ;
        /*0070*/                   HGMMA.64x8x16.F32 R40, R28.reuse, gdesc[UR20], R40, gsb0 ;
        /*0080*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0090*/              @!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R23+URZ], RZ ;
        /*00a0*/                   LOP3.LUT P1, RZ, R24, 0x1f, RZ, 0xc0, !PT ;
        /*00b0*/                   WARPGROUP.ARRIVE ;
        /*00c0*/                   HGMMA.64x8x16.F32 R40, R32, gdesc[UR20], R40, gsb0 ;
        /*00d0*/               @P0 BRA `(.L_x_2) ;
        /*00e0*/                   LDS.128 R8, [R4] ;
        /*00f0*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0100*/                   BRA `(.L_x_1) ;
.L_x_2:
        /*0110*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
"""


def test_registers_that_wgmma_still_reads_are_found() -> None:
    """A listing by hand, and changes of it each of which is wrong in one way."""
    loop = loop_of_wgmma(RIGHT_LOOP)
    assert len(loop) == 15
    assert commit_groups(loop) == [set(range(24, 32)), set(range(32, 36))]
    assert neighbours_that_share(loop) == written_too_early(loop) == []

    shared = loop_of_wgmma(RIGHT_LOOP.replace("R40, R32, gdesc", "R40, R28, gdesc"))
    assert neighbours_that_share(shared) == 2 * [set(range(28, 32))]
    for old, new, early in (
        ("LDS.64 R36", "LDS.64 R26", "LDS.64 R26, [R4+0x200]"),  # of a group not yet committed
        ("LDS.128 R8", "LDS.128 R32", "LDS.128 R32, [R4]"),  # before the second group has ended
        ("HFMA2 R31", "HFMA2 R35", "HFMA2 R35, R9, R5, R6"),  # in the next turn of the loop
        ("LOP3.LUT P1, RZ", "LOP3.LUT P1, R31", "LOP3.LUT P1, R31, R24, 0x1f, RZ, 0xc0, !PT"),
    ):
        wrong = loop_of_wgmma(RIGHT_LOOP.replace(old, new))
        assert set(written_too_early(wrong)) == {early}
        assert neighbours_that_share(wrong) == []
    unwaited = RIGHT_LOOP.replace("/*00f0*/                   WARPGROUP.DEPBAR", "/*00f0*/ NOP")
    assert written_too_early(loop_of_wgmma(unwaited)) == [
        "HFMA2 R24, R8, R5.reuse, R6",
        "HFMA2 R31, R9, R5, R6",
    ]
    with pytest.raises(AssertionError, match="its A is no register"):
        commit_groups(["HGMMA.64x8x16.F32 R40, gdesc[UR4], R40, gsb0"])
    with pytest.raises(AssertionError, match="wgmma outside a loop"):
        loop_of_wgmma(RIGHT_LOOP.replace("BRA `(.L_x_1)", "EXIT"))
