"""What is said of a kernel that is right in the simulator: whether it compiles, as Numba takes a
part of Python; whether it has the instructions it promises; its requests to memory beside the
step's. The offline compiler needs no GPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from numba.core.errors import NumbaError

from steps.checks.cases import Case
from steps.compile.compiler import MachineCode, machine_code, signature_of
from steps.contract import Family, Step, Work
from steps.learn.exercises.rerun import run_again
from steps.learn.exercises.trial import Diagnosis, Subject
from steps.product.choice import Choice
from steps.simulator.trace import Instruction, Recorder

ARCH: Final = "sm_90a"  # the one on which all steps run
FORMAT: Final = "q4_0"
MISSING: Final = (ImportError, RuntimeError, OSError)  # what is raised where there is no compiler
DOUBLE: Final = ("DADD", "DMUL", "DFMA", "DSETP")


def refused(step: Step, path: Path) -> Diagnosis | None:
    """What the compiler says where it refuses the kernel of a family; None where it takes all."""
    for family in step.families:
        try:
            _machine_code(step, family)
        except NumbaError as error:
            text = re.sub(r"\x1b\[\d+m", "", str(error))
            line = _line_in(text, path)
            said = next((one for one in text.splitlines() if _tells(one)), "it is refused")
            where = f"It happens at {path.name}:{line}." if line else ""
            advice = "Numba takes a part of Python: numbers, tuples and arrays of one type each."
            what = f"{family}: right in the simulator, but it does not compile: {said.strip()}"
            return Diagnosis("compile", line, (what, where, advice))
        except MISSING:
            return None  # said below
    return None


def machine_code_advice(step: Step) -> Iterator[str]:
    """A sentence for float64, for spilled registers, and for each opcode that the machine code
    lacks or should not have; or why nothing could be compiled."""
    for family in step.families:
        try:
            code = _machine_code(step, family)
        except MISSING as error:
            yield f"not compiled here: {' '.join(str(error).split())}"
            return
        where = f"in the machine code of family {family}"
        if wide := code.count(*DOUBLE):
            yield f"{wide} instructions in float64 {where}: begin a sum with float32(0), not 0.0"
        if code.spill_store_bytes:
            yield f"{code.spill_store_bytes} bytes of registers are spilled {where}"
        for promise in step.contains[family]:
            if not any(one.startswith(tuple(promise.split("|"))) for one in code.instructions):
                yield f"no {promise.replace('|', ' or ')} {where}, by which the step is known"
        found = sorted(one for one in code.instructions if one.startswith(step.forbids[family]))
        if found:
            yield f"{', '.join(found)} {where}: the step needs none"


def _machine_code(step: Step, family: Family) -> MachineCode:
    launch = Choice.of_work(Work(step, family, FORMAT), step.home_shapes[0]).launches()[-1]
    return machine_code(launch.kernel, signature_of(launch.args), ARCH)


def _line_in(text: str, path: Path) -> int:
    """The last line of the file that the compiler names: the innermost."""
    name = re.escape(path.name)
    found = re.findall(rf'{name}", line (\d+)|{name} \((\d+)\)', text)
    return int("".join(found[-1])) if found else 0


def _tells(line: str) -> bool:
    """Whether a line of the compiler's text says what is wrong."""
    noise = ("Failed in", "During:", "File ", "There are", "- Of which", "Overload", " * ", ">>>")
    return bool(line.strip()) and not line.strip().startswith(noise)


# --- memory

CASE: Final = Case((40, 36, 64), "integer", 2)

COUNTED: Final[tuple[tuple[str, Callable[[Instruction], int]], ...]] = (
    ("sectors of global memory", lambda one: one.sectors),
    ("bank conflicts", lambda one: one.conflicts),
)


def memory_traffic(step: Step, reference: Step) -> Iterator[str]:
    """A sentence for each family and figure of which the first warp has more than that of the
    reference."""
    for family in step.families:
        subject = Subject(family, "q4_0", CASE)
        own, others = _instructions(step, subject), _instructions(reference, subject)
        for what, of in COUNTED:
            mine, theirs = sum(map(of, own)), sum(map(of, others))
            if mine <= theirs:
                continue
            most = max(own, key=of)
            yield (
                f"the first warp has {mine} {what} in family {family}, that of the step {theirs}: "
                f"{of(most)} of them in {most.requests} requests at {most.place}"
            )


def _instructions(step: Step, subject: Subject) -> list[Instruction]:
    """The memory instructions of the first warp."""
    recorder = Recorder()
    run_again(step, subject, trace=recorder)
    return recorder.instructions()
