"""What is said of a kernel that is right in the simulator: whether it compiles, as Numba takes a
part of Python; whether it has the instructions it promises; its requests to memory beside the
step's. The offline compiler needs no GPU."""

from __future__ import annotations

import ast
import linecache
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from numba.core.errors import NumbaError

from steps.checks.cases import Case
from steps.compile.compiler import MachineCode, machine_code, signature_of
from steps.contract import Family, Kernel, Step, Work
from steps.learn.exercises.rerun import run_again
from steps.learn.exercises.text import Exercise
from steps.learn.exercises.trial import Diagnosis, Subject
from steps.product.choice import Choice
from steps.registry import lesson_of
from steps.simulator.trace import Instruction, Recorder

ARCH: Final = "sm_90a"  # the one on which all steps run
FORMAT: Final = "q4_0"
MISSING: Final = (ImportError, RuntimeError, OSError)  # what is raised where there is no compiler
DOUBLE: Final = ("DADD", "DMUL", "DFMA", "DSETP")


def refused(step: Kernel, path: Path) -> Diagnosis | None:
    """What the compiler says where it refuses the kernel of a family; None where it takes all."""
    for family in step.families:
        try:
            _machine_code(step, family)
        except NumbaError as error:
            text = re.sub(r"\x1b\[\d+m", "", str(error))
            line = _line_in(text, path)
            said = _reason(text)
            source = linecache.getline(str(path), line).strip()
            where = f"It happens at {path.name}:{line} `{source}`." if line else ""
            advice = "Numba takes a part of Python: numbers, tuples and arrays of one type each."
            what = f"{family}: right in the simulator, but it does not compile: {said.strip()}"
            return Diagnosis("compile", line, (what, where, advice))
        except NotImplementedError as error:
            return _otherwise(family, error)
        except MISSING:
            return None  # said below
        except Exception as error:  # Numba trips over some of Python
            return _otherwise(family, error)
    return None


def _otherwise(family: Family, error: Exception) -> Diagnosis:
    """Of a compiler that fails itself."""
    said = next(iter(str(error).strip().splitlines()), "")
    what = f"{family}: right in the simulator, but Numba cannot compile it: {said.rstrip('.: ')}"
    advice = "Numba takes a part of Python: leave out what you wrote last that is not arithmetic."
    return Diagnosis("compile", 0, (f"{what}.", advice))


def _reason(text: str) -> str:
    """What the compiler says is wrong; of a call that it has not, its types too."""
    telling = [one.strip() for one in text.splitlines() if _tells(one)]
    said = telling[0] if telling else "it is refused"
    if said.endswith("found for signature:"):
        call = next((one.strip() for one in text.splitlines() if ">>>" in one), "")
        said = f"there is no {call.removeprefix('>>>').strip()}"
    return said.rstrip(".: ")


def machine_code_advice(step: Step, exercise: Exercise) -> Iterator[str]:
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
            yield f"{wide} instructions in float64 {where}{_literals(exercise)}"
        if code.spill_store_bytes:
            yield f"{code.spill_store_bytes} bytes of registers are spilled {where}"
        for promise in step.contains[family]:
            if not any(one.startswith(tuple(promise.split("|"))) for one in code.instructions):
                yield f"no {promise.replace('|', ' or ')} {where}, by which the step is known"
        found = sorted(one for one in code.instructions if one.startswith(step.forbids[family]))
        if found:
            yield f"{', '.join(found)} {where}: the step needs none"


def _literals(exercise: Exercise) -> str:
    """The first floating-point literal of a hole that no float32() is around."""
    wide, narrow = [], set()
    for node in ast.walk(ast.parse(exercise.text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("float32"):
            narrow |= {id(one) for one in node.args}
        elif isinstance(node, ast.Constant) and isinstance(node.value, float):
            wide.append(node)
    for one in sorted(wide, key=lambda node: node.lineno):
        if id(one) not in narrow and exercise.hole_at(one.lineno):
            return (
                f": {one.value!r} in line {one.lineno} is a float64, and so is what is computed "
                f"with it; write float32({one.value!r})"
            )
    return ": a sum that begins with 0.0, and a product with 1.0, is one; write float32(0)"


def _machine_code(step: Kernel, family: Family) -> MachineCode:
    launch = Choice.of_work(Work(step, family, FORMAT), lesson_of(step).home_shapes[0]).launches()[
        -1
    ]
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


# --- the launch


def idle_blocks(step: Step, reference: Step) -> Iterator[str]:
    """A sentence for each family with many more thread blocks or threads than the step's own."""
    shape = reference.home_shapes[0]
    for family in step.families:
        own, theirs = (
            Choice.of_work(Work(one, family, FORMAT), shape).launches()[-1]
            for one in (step, reference)
        )
        for what, mine, right in (
            ("thread blocks", math.prod(own.grid), math.prod(theirs.grid)),
            ("threads in a block", math.prod(own.block), math.prod(theirs.block)),
        ):
            if mine >= MANY * right:
                m, n, k = shape
                yield (
                    f"the launch of family {family} has {mine} {what} at M={m} N={n} K={k}, that "
                    f"of the step {right}: the others find nothing to do"
                )


MANY: Final = 2  # times as many as the step's

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
