"""Registers that a running wgmma still uses, followed through all of a kernel's machine code.

wgmma returns at once. Until a wait says that its group is done, the tensor cores read the registers
of its A and add to its accumulators. What else writes the former or touches the latter makes
products that differ from run to run. ptxas does not wait by itself where the next turn of a loop
writes registers that this turn's wgmma reads, and in the simulator registers are values.

So every path through a listing is walked with the groups that may run on it, the oldest first:

    HGMMA.64x128x16.F32 R24, R96, gdesc[UR4], R24          reads R96 to R99, adds to R24 to R87
    HGMMA.64x128x16.F32 R24, R100, gdesc[UR4], R24, gsb0   the last one of its group
    WARPGROUP.DEPBAR.LE gsb0, 0x1                          all groups are done but the newest
    HFMA2 R96, R97, R98, R102                              an error, if the newest is this one
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

MOST_GROUPS: Final = 8
"""That run at once: a loop that never waits has more from one turn to the next."""

LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?(\S.*?)\s*;")
LABEL = re.compile(r"(\.L_\w+):")
TARGET = re.compile(r"`\((\.L_\w+)\)")
REGISTER = re.compile(r"\bR(\d+)\b")
WGMMA = re.compile(r"[HI]GMMA\.(?:SP\.)?64x(\d+)x\S+ R(\d+), R(\d+)\S*, gdesc\[UR\d+\], (R\d+|RZ)")
METADATA = re.compile(r"HGMMA\.SP\..*, R(\d+), 0x[01]")
WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\w+)")
WRITTEN = re.compile(r"([A-Z]\w*)\S* (?:U?P\w+, )?R(\d+)\b")
READ_ONLY = {"BAR", "CALL", "FCHK", "NANOSLEEP", "R2P", "RET", "WARPSYNC"}
"""Opcodes whose first register is an operand."""
PAIRS = re.compile(r"D(ADD|FMA|MUL)\b|CS2R R|LEPC|\S*(\.64\b|\.WIDE|\.F64\b)")


def registers(first: int, count: int) -> int:
    """A mask of them."""
    return ((1 << count) - 1) << first


def wide(opcode: str) -> int:
    """Registers of what an instruction loads, stores or computes."""
    if opcode.startswith(("HMMA", "IMMA")) or re.search(r"\.128\b|^(LD|ST)SM.*\.4\b", opcode):
        return 4
    return 2 if PAIRS.match(opcode) or re.search(r"^(LD|ST)SM.*\.2\b", opcode) else 1


@dataclass(frozen=True, slots=True)
class Group:
    """Masks of the registers that it reads and of its accumulators; none of them is committed
    before its last wgmma."""

    reads: int
    sums: int
    committed: bool


@dataclass(slots=True)
class Instruction:
    address: str
    text: str
    writes: int = 0
    reads: int = 0
    next: list[int] = field(default_factory=list)  # places in the listing
    wait: int | None = None  # groups that may still run
    group: Group | None = None  # of wgmma: what it reads and adds to


def instruction(address: str, text: str) -> Instruction:
    own = Instruction(address, text)
    opcode = text.split(" ", 1)[0]
    if found := WAIT.match(text):
        own.wait = int(found[1], 16)
    elif re.match("[HIQ]GMMA", text):
        found, metadata = WGMMA.match(text), METADATA.match(text)
        assert found, f"its A is no register: {text}"
        assert bool(metadata) == (".SP." in text), f"no metadata: {text}"
        assert found[4] in (f"R{found[2]}", "RZ"), f"other accumulators: {text}"
        reads = registers(int(found[3]), 4) | (1 << int(metadata[1]) if metadata else 0)
        sums = registers(int(found[2]), int(found[1]) // 2)
        own.group = Group(reads, sums, text.endswith("gsb0"))
    else:
        at = 0
        if (found := WRITTEN.match(text)) and found[1] not in READ_ONLY:
            own.writes, at = registers(int(found[2]), wide(text)), found.end()
        for one in REGISTER.finditer(text, at):
            count = wide(opcode) if opcode.startswith("ST") and one.start() > text.find("]") else 1
            own.reads |= registers(int(one[1]), count)
    return own


def listing(sass: str) -> list[Instruction]:
    """Each instruction with those that may come next. BSYNC goes on behind itself, where the label
    of its BSSY is; behind a call comes both what is called and, at once, what follows."""
    found: list[Instruction] = []
    labels: dict[str, int] = {}
    guarded: list[bool] = []
    for line in sass.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(found)
        elif parts := LINE.match(line):
            found.append(instruction(parts[1], parts[3]))
            guarded.append(parts[2] is not None)
    for i, one in enumerate(found):
        opcode = re.split(r"[ .]", one.text)[0]
        assert opcode not in ("BRX", "BRXU", "JMP", "JMX"), f"a branch to anywhere: {one.text}"
        ends = one.text.split()[0] == "BRA" or opcode in ("EXIT", "RET")
        unless = re.match(r"BRA !?U?P\w", one.text)  # by a predicate that is an operand
        if (not ends or guarded[i] or unless) and i + 1 < len(found):
            one.next.append(i + 1)
        if (target := TARGET.search(one.text)) and opcode not in ("BSSY", "RET"):
            one.next.append(labels[target[1]])
    return found


State = tuple[Group, ...]


def after(state: State, one: Instruction) -> State:
    """The groups that may run behind an instruction, the oldest first. The last one may be open."""
    if one.wait is not None:
        done = max(0, sum(group.committed for group in state) - one.wait)
        return state[done:]
    if one.group is None:
        return state
    new = one.group
    if state and not state[-1].committed:
        *state, last = state
        new = Group(last.reads | new.reads, last.sums | new.sums, new.committed)
    assert len(state) < MOST_GROUPS, f"{one.address}: {MOST_GROUPS} groups run, none is waited for"
    return (*state, new)


def touched(state: State, one: Instruction) -> Iterator[tuple[str, int]]:
    """What an instruction does to registers of running groups: how, and their mask."""
    for group in state:
        if one.group is not None:
            yield "reads the accumulator", one.group.reads & group.sums
            yield "adds to the operand", one.group.sums & group.reads
            if one.group.sums != group.sums:  # the same ones are added to in order
                yield "adds to the accumulator", one.group.sums & group.sums
        else:
            yield "writes the operand", one.writes & group.reads
            yield "writes the accumulator", one.writes & group.sums
            yield "reads the accumulator", one.reads & group.sums


def misused(sass: str) -> list[str]:
    """A sentence for each instruction that touches registers which a running wgmma still uses."""
    code = listing(sass)
    known: list[set[State]] = [set() for _ in code]
    todo: list[tuple[int, State]] = [(0, ())]
    found: dict[int, str] = {}
    while todo:
        place, state = todo.pop()
        if state in known[place]:
            continue
        known[place].add(state)
        one = code[place]
        for how, mask in touched(state, one):
            if mask:
                names = ", ".join(f"R{i}" for i in range(mask.bit_length()) if mask >> i & 1)
                found[place] = f"{one.address}: {one.text}: {how} {names} of a running wgmma"
        behind = after(state, one)
        todo += [(following, behind) for following in one.next]
    unreached = [one.text for i, one in enumerate(code) if one.group and not known[i]]
    assert not unreached, f"no path leads to {unreached}"
    return [found[place] for place in sorted(found)]
