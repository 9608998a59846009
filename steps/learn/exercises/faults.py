"""A fault of the simulator or of Python in words: what happened, where, and what to do."""

from __future__ import annotations

import re

from steps.contract import Step
from steps.learn.exercises.diagnosis import Diagnosis, File
from steps.learn.exercises.races import race
from steps.learn.exercises.trial import Fault, Subject


def of_fault(fault: Fault, subject: Subject, step: Step, file: File) -> Diagnosis:
    at, where = str(subject), file.place(fault)
    if fault.kind == "Race":
        return race(fault, subject, step, file)
    if fault.kind == "Misaligned":
        advice = (
            "On a GPU this stops the kernel (error 716). Load fewer bytes at a time, or begin at a "
            "multiple of them; see pitfall 7 of `make pitfalls`."
        )
        return Diagnosis("misaligned", fault.line, (f"{at}: {fault.what}.", where, advice))
    if fault.kind == "OutOfRange":
        return Diagnosis("out of range", fault.line, (f"{at}: {fault.what}.", where, _guard(fault)))
    if fault.kind in ("BarrierDivergence", "Deadlock"):
        advice = (
            "All threads of a block must reach the same barrier: move it out of the branch that "
            "some of them do not take, or do not let them return before it."
        )
        if fault.kind == "Deadlock":
            advice = "Each wait needs the arrivals or copies that it waits for, in every lane."
        cause = "barrier" if fault.kind == "BarrierDivergence" else "deadlock"
        return Diagnosis(cause, fault.line, (f"{at}: {fault.what}.", advice))
    if fault.kind in ("NameError", "UnboundLocalError"):
        advice = "Set it before it is used, or use the name that the rest of the kernel has."
        return Diagnosis("name", fault.line, (f"{at}: {fault.what}.", where, advice))
    if fault.kind == "Endless":
        advice = "A loop does not come to its end: does its counter advance in every branch?"
        return Diagnosis("endless", fault.line, (f"{at}: {fault.what}.", where, advice))
    if fault.kind == "RuntimeError" and "changed its" in fault.what:
        advice = "The kernel stores to what it should only load from: store to c alone."
        return Diagnosis("operands changed", fault.line, (f"{at}: {fault.what}.", advice))
    if fault.what.startswith("grid is"):
        advice = (
            "No thread block is launched where a tile is not full: count them with "
            "ceil_div(extent, tile); see pitfall 12 of `make pitfalls`."
        )
        return Diagnosis("grid", fault.line, (f"{at}: {fault.what}.", advice))
    if fault.kind == "SimulatorError":  # a rule of an instruction, in the simulator's own sentence
        return Diagnosis("rule", fault.line, (f"{at}: {fault.what}.", where))
    return Diagnosis("error", fault.line, (f"{at}: {fault.kind}: {fault.what.rstrip('.')}.", where))


def _guard(fault: Fault) -> str:
    if re.match(r"c[\[:]", fault.what):
        return (
            "C has no such element: threads beyond its last row or column must not store. Is the "
            "guard there, and does c have m first and n second?"
        )
    return (
        "Threads beyond the last row or column must not load either, and an index may be off by a "
        "factor or an order: compute by hand what it is in that thread."
    )
