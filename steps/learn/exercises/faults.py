"""A fault of the simulator or of Python in words: what happened, where, and what to do."""

from __future__ import annotations

import linecache
import re
from typing import Final

from steps.contract import Step
from steps.learn.exercises.races import race
from steps.learn.exercises.trial import Diagnosis, Fault, File, Subject

_ADVICE: Final[dict[str, tuple[str, str]]] = {
    "Misaligned": (
        "misaligned",
        "On a GPU this stops the kernel (error 716). Load fewer bytes at a time, or begin at a "
        "multiple of them; see pitfall 7 of `make pitfalls`.",
    ),
    "OutOfRange": (
        "out of range",
        "Threads beyond the last row or column must not load either, and an index may be off by a "
        "factor or an order: compute by hand what it is in that thread.",
    ),
    "BarrierDivergence": (
        "barrier",
        "All threads of a block must reach the same barrier: move it out of the branch that some "
        "of them do not take, or do not let them return before it.",
    ),
    "Deadlock": (
        "deadlock",
        "Each wait needs the arrivals or copies that it waits for, in every lane.",
    ),
    "NameError": (
        "name",
        "Set it before it is used, or use the name that the rest of the kernel has.",
    ),
    "Endless": (
        "endless",
        "A loop does not come to its end: does its counter advance in every branch?",
    ),
    "SimulatorError": ("rule", ""),  # of an instruction, in the simulator's own sentence
}
"""By the class of the error: (cause, what to do)."""

_STORE: Final = (
    "C has no such element: threads beyond its last row or column must not store. Is the guard "
    "there, and does c have m first and n second?"
)
_CHANGED: Final = "The kernel stores to what it should only load from: store to c alone."
_GRID: Final = (
    "No thread block is launched where a tile is not full: count them with ceil_div(extent, tile); "
    "see pitfall 12 of `make pitfalls`."
)


def of_fault(fault: Fault, subject: Subject, step: Step, file: File) -> Diagnosis:
    if fault.kind == "Race":
        return race(fault, subject, step, file)
    what, where = f"{subject}: {file.placed(fault.what)}.", file.place(fault)
    if fault.kind == "RuntimeError" and "changed its" in fault.what:
        return Diagnosis("operands changed", fault.line, (what, _CHANGED))
    if fault.what.startswith("grid is"):
        return Diagnosis("grid", fault.line, (what, _GRID))
    kind = "NameError" if fault.kind == "UnboundLocalError" else fault.kind
    if kind not in _ADVICE:
        what = f"{subject}: {fault.kind}: {fault.what.rstrip('.')}."
        return Diagnosis("error", fault.line, (what, where))
    cause, advice = _ADVICE[kind]
    if kind == "OutOfRange" and re.match(r"c[\[:]", fault.what):
        advice = _STORE
    elif kind == "OutOfRange":
        return Diagnosis(cause, fault.line, (what, where, _held(fault, file), advice))
    if kind in ("BarrierDivergence", "Deadlock"):  # the simulator names the lines of all threads
        where = ""
    return Diagnosis(cause, fault.line, (what, where, advice))


def _held(fault: Fault, file: File) -> str:
    """The whole numbers that names in the line held; "" where it is the step's own code."""
    text = "" if fault.line in file.stands_in else linecache.getline(str(file.path), fault.line)
    names = dict.fromkeys(re.findall(r"[A-Za-z_]\w*", text))
    held = ", ".join(f"{name} = {fault.values[name]}" for name in names if name in fault.values)
    return f"There {held}." if held else ""
