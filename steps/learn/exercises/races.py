"""A race in words: both threads and both lines, and the wait or barrier that is missing."""

from __future__ import annotations

import re
from typing import Final

from steps.contract import Step
from steps.learn.exercises.diagnosis import Diagnosis, File
from steps.learn.exercises.trial import Fault, Subject
from steps.learn.exercises.witness import Copy, Witness, run_again

_RACE: Final = re.compile(
    r"(?P<doing>.*?) byte (?P<byte>\d+) of (?P<name>\w+).*?thread (?P<other>\d+) (?P<did>\w+)",
    re.DOTALL,
)


def race(fault: Fault, subject: Subject, step: Step, file: File) -> Diagnosis:
    """Both threads and both lines, where they can be had."""
    _, _, hint = fault.what.rpartition(": ")
    hint = re.sub(r"^a barrier\b", "a barrier (cuda.syncthreads())", hint)
    advice = (
        f"Nothing orders the two, so on a GPU either may come first: {hint}; see pitfall 9 of "
        "`make pitfalls`."
    )
    said = (
        f"{subject}: race: {fault.what}.",
        file.place(fault),
        advice,
    )
    found = _RACE.match(fault.what)
    if found is None:
        return Diagnosis("race", fault.line, said)
    other = int(found["other"])
    if found["name"] == "c":
        advice = (
            "Two threads store different values to one element of C: each element must have one "
            "thread, that of its m and n."
        )
        return Diagnosis("race", fault.line, (*said[:2], advice))
    witness, thread = _witnessed(found, fault, subject, step, file)
    element = witness.element or found["name"]
    mine = "stores to it" if found["doing"].endswith("to") else "loads it"
    copy, stored = witness.copies.get((thread, fault.line, other)), found["did"].startswith("stor")
    if copy is not None and stored:
        first = (
            f"{subject}: race on {element}: thread {thread} {mine} at {file.line(fault.line)}, "
            f"while a copy of thread {other} to it, issued at {file.line(copy.line)}, may still be "
            "under way."
        )
        over = mine.startswith("stores")
        cause, advice = _OVERWRITTEN if over else _not_awaited(copy, thread, other)
        return Diagnosis(cause, fault.line, (first, advice))
    seen = witness.before(thread, fault.line, other, stored)
    if seen is None:
        return Diagnosis("race", fault.line, said)
    theirs = "stores to it" if seen.stores else "loads it"
    first = (
        f"{subject}: race on {element}: thread {thread} {mine} at "
        f"{file.line(fault.line)}, thread {other} {theirs} at {file.line(seen.line)}."
    )
    return Diagnosis("race", fault.line, (first, advice))


def _witnessed(
    found: re.Match[str], fault: Fault, subject: Subject, step: Step, file: File
) -> tuple[Witness, int]:
    """(who touched that byte, the index of the thread at fault), from a second run."""
    witness = Witness(file.path, fault.block, found["name"], int(found["byte"]))
    launch = run_again(step, subject, witness).launch
    x, y, z = map(int, fault.thread.split(","))
    width, height, _ = (*launch.block, 1, 1)[:3]
    return witness, x + width * (y + height * z)


def _not_awaited(copy: Copy, thread: int, other: int) -> tuple[str, str]:
    """(cause, what to do) of a copy that has not arrived."""
    alone = thread == other
    if not copy.group:
        return "copy not committed", (
            f"Thread {other} has not committed it: cp_async_commit closes copies into a group, and "
            "cp_async_wait waits for groups alone."
        )
    newer = copy.group - 1
    who = f"Thread {other} has committed {newer} group{'' if newer == 1 else 's'} after that copy's"
    wait = f"cp_async_wait({newer}){' or less' if newer else ''}"
    turns = "commits are: each turn commits, also one that has nothing to copy."
    if alone:
        return "copy not awaited", (
            f"{who}, so {wait} waits for it. Either that wait is missing before this line, or "
            f"{turns}"
        )
    return "copy not awaited", (
        f"{who}, so {wait} of that thread waits for it, and a barrier behind it tells the others. "
        f"Either the wait or the barrier is missing before this line, or {turns}"
    )


_OVERWRITTEN: Final = (
    "copy overwritten",
    "One of the two is lost: each stage has a place of its own, and is stored to again only when "
    "the copy before has arrived and all threads have read it.",
)
