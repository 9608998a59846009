"""A failed trial in words: numbers first, then the cause, then what to do."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np

from steps.contract import Step
from steps.exercises.probe import pairing
from steps.exercises.suspects import SUSPECTS, Suspect
from steps.exercises.trial import Fault, Subject, Trial, prepared_for
from steps.exercises.witness import Access, Witness
from steps.pitfalls.exhibit import pitfalls
from steps.simulator.launch import simulate

Array = np.ndarray[Any, np.dtype[Any]]

FEW: Final = 12  # wrong outputs, up to which each is sought among the right values of others
NEAR: Final = 1e-2  # relative: such an error is one of rounding


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is wrong. `cause`: in a word or two, for tests and tables; `line`: of the file, 0 where
    no line says it; `sentences`: what a person reads, the numbers first."""

    cause: str
    line: int
    sentences: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class File:
    """The file at `path` as messages name its lines. `stands_in`: lines in whose place the step's
    own code ran -> the hole."""

    path: Path
    stands_in: Mapping[int, int]

    def line(self, line: int) -> str:
        """ "step03_shared_tiled.py:88 `acc += ...`"."""
        text = f"`{linecache.getline(str(self.path), line).strip()}`"
        if line in self.stands_in:
            text = f"(the step's own code for TODO {self.stands_in[line]})"
        return f"{self.path.name}:{line} {text}"


def diagnose(
    trial: Trial, step: Step, file: File, larger: Callable[[], Trial | None] = lambda: None
) -> Diagnosis:
    """What is wrong with a trial that failed.

    larger: the same step on a larger problem, which is asked for where one wrong number could have
    several causes; None where there is none.
    """
    if trial.fault is not None:
        return _of_fault(trial.fault, trial.subject, step, file)
    assert trial.c is not None, "a trial without a fault has a result"
    if trial.unwritten is not None and trial.unwritten.any():
        return _unwritten(trial)
    if not np.isfinite(trial.c).all():
        return _not_finite(trial)
    return _wrong_values(trial, step, larger)


# --- faults ---------------------------------------------------------------------------------------


def _of_fault(fault: Fault, subject: Subject, step: Step, file: File) -> Diagnosis:
    at, where = str(subject), _place(fault, file)
    if fault.kind == "Race":
        return _race(fault, subject, step, file)
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


def _place(fault: Fault, file: File) -> str:
    """ "file:line `text`, block (0, 0, 0), thread (1, 0, 0)"."""
    lanes = f", in thread ({fault.thread}) of block ({fault.block})" if fault.thread else ""
    return f"It happens at {file.line(fault.line)}{lanes}." if fault.line else ""


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


_RACE: Final = re.compile(
    r"(?P<doing>.*?) byte (?P<byte>\d+) of (?P<name>\w+).*?thread (?P<other>\d+)",
    re.DOTALL,
)


def _race(fault: Fault, subject: Subject, step: Step, file: File) -> Diagnosis:
    """Both threads and both lines, where they can be had."""
    _, _, hint = fault.what.rpartition(": ")
    hint = re.sub(r"^a barrier\b", "a barrier (cuda.syncthreads())", hint)
    advice = (
        f"Nothing orders the two, so on a GPU either may come first: {hint}; see pitfall 9 of "
        "`make pitfalls`."
    )
    said = (f"{subject}: race: {fault.what}.", _place(fault, file), advice)
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
    seen, thread, element = _witnessed(found, fault, subject, step, file)
    if seen is None:
        return Diagnosis("race", fault.line, said)
    mine = "stores to it" if found["doing"].endswith("to") else "loads it"
    theirs = "stores to it" if seen.stores else "loads it"
    first = (
        f"{subject}: race on {element or found['name']}: thread {thread} {mine} at "
        f"{file.line(fault.line)}, thread {other} {theirs} at {file.line(seen.line)}."
    )
    return Diagnosis("race", fault.line, (first, advice))


def _witnessed(
    found: re.Match[str], fault: Fault, subject: Subject, step: Step, file: File
) -> tuple[Access | None, int, str]:
    """(the other access, the index of the thread at fault, the element), from a second run."""
    from steps.api.machines import Simulator

    machine = Simulator(subject.case.order)
    prepared = prepared_for(step, subject, machine)
    for launch in prepared.activations.launches:
        machine.run(launch)
    launch = prepared.launch
    x, y, z = map(int, fault.thread.split(","))
    width, height, _ = (*launch.block, 1, 1)[:3]
    thread = x + width * (y + height * z)
    witness = Witness(file.path, fault.block, found["name"], int(found["byte"]))
    with suppress(Exception):  # it is a faulty kernel: what was seen until then is what counts
        simulate(
            launch.kernel,
            launch.grid,
            launch.block,
            launch.args,
            order=subject.case.order,
            shared_bytes=launch.shared_bytes,
            banks=witness,
        )
    return witness.before(thread, fault.line, int(found["other"])), thread, witness.element


# --- results --------------------------------------------------------------------------------------


def region(bad: Array) -> str:
    """Where the marked elements of C lie: "column 32 and all after it", "rows 0-1, columns 3-4"."""
    if bad.all():
        return f"all {bad.size} outputs" if bad.size > 1 else "the one output"
    rows, columns = np.flatnonzero(bad.any(axis=1)), np.flatnonzero(bad.any(axis=0))
    whole = bad[np.ix_(rows, columns)].all()
    if whole and len(rows) == bad.shape[0]:
        return _range("column", columns, bad.shape[1])
    if whole and len(columns) == bad.shape[1]:
        return _range("row", rows, bad.shape[0])
    some = "" if whole else f"{np.count_nonzero(bad)} outputs in "
    return f"{some}{_range('row', rows, 0)}, {_range('column', columns, 0)}"


def _range(what: str, indices: Array, extent: int) -> str:
    first, last = int(indices[0]), int(indices[-1])
    if len(indices) > 1 and (np.diff(indices) != 1).any():
        shown = ", ".join(map(str, indices[:4])) + (" ..." if len(indices) > 4 else "")
        return f"{what}s {shown}"
    if last == extent - 1 and first > 0:
        return f"every {what} from {first} on"
    return f"{what} {first}" if first == last else f"{what}s {first} to {last}"


def _unwritten(trial: Trial) -> Diagnosis:
    assert trial.unwritten is not None
    missing = trial.unwritten
    m, n = missing.shape
    what = (
        f"{trial.subject}: {np.count_nonzero(missing)} of {missing.size} outputs are never stored "
        f"to: {region(missing)}."
    )
    advice = "Does every thread with m < M and n < N come to the line that stores to c?"
    if missing.all():
        advice = "No thread stores to c: is the store there, and is its condition ever true?"
    elif not missing[0, 0]:
        advice = (
            f"C has {m} rows and {n} columns. Either the grid has too few thread blocks (it takes "
            "ceil_div(extent, tile) of them, as the last tile is not full; pitfall 12), or a guard "
            "lets too many threads return."
        )
    return Diagnosis("not written", 0, (what, advice))


def _not_finite(trial: Trial) -> Diagnosis:
    assert trial.c is not None
    bad = ~np.isfinite(trial.c)
    if trial.added_to is not None and trial.added_to.any():
        what = f"{trial.subject}: the kernel adds to what C held before in {region(bad)}."
        return Diagnosis(
            "added to", 0, (what, "C may hold anything: store the sum with =, not +=.")
        )
    m, n = _first(bad)
    what = (
        f"{trial.subject}: C[{m}, {n}] is {trial.c[m, n]}; so are {region(bad)}."
        if bad.size > 1
        else f"{trial.subject}: C[{m}, {n}] is {trial.c[m, n]}."
    )
    advice = (
        "The kernel stores it, so a term of the sum is no number. Shared and local memory begin as "
        "NaN here: something is read that nobody has written, or a sum does not begin at 0."
    )
    return Diagnosis("nan", 0, (what, advice))


def _first(bad: Array) -> tuple[int, int]:
    m, n = np.unravel_index(int(np.argmax(bad)), bad.shape)
    return int(m), int(n)


def _wrong_values(trial: Trial, step: Step, larger: Callable[[], Trial | None]) -> Diagnosis:
    c, expected, found = trial.c, trial.expected, trial.found
    assert c is not None
    assert found is not None
    if expected is None:  # a step of another kind, whose weights are not those of the blocks
        return Diagnosis("wrong value", 0, (f"{trial.subject}: {found.verdict}.",))
    bad = np.abs(c - expected) > trial.tolerance
    if not bad.any():  # only as a whole: many small errors
        return Diagnosis("rounding", 0, (f"{trial.subject}: {found.verdict}.", _ROUNDING))
    m, n = _first(bad)
    what = f"{trial.subject}: C[{m}, {n}] is {c[m, n]:.6g}, expected {expected[m, n]:.6g}"
    if bad.size > 1:
        what += f"; wrong are {region(bad)}"
    what += "."
    for search in (_suspected, _by_a_factor, _transposed, _elsewhere):
        if said := search(trial, bad, larger):
            return Diagnosis(said[0], 0, (what, *said[1:]))
    met = pairing(step, trial.subject.family, trial.subject.format)
    for search in (_integer_sum, _nearly):
        if said := search(trial, bad, larger):
            return Diagnosis(said[0], 0, (what, *said[1:], met or ""))
    unknown = "No known mistake gives these values. Compute this output by hand from its block."
    return Diagnosis("wrong pairs" if met else "wrong value", 0, (what, met or unknown))


_ROUNDING: Final = (
    "Each output is near, all together are too far: something is rounded on the way, such as a sum "
    "kept in float16 or a scale in an integer."
)

Found = tuple[str, ...] | None
More = Callable[[], Trial | None]


def _suspected(trial: Trial, bad: Array, larger: More) -> Found:
    """A known mistake that gives these very values, on a larger problem too."""
    matches = suspects(trial, bad)
    if len(matches) > 1 or (matches and bad.size == 1):
        second = larger()
        if second is not None and second.fault is None and not second.ok:
            assert second.c is not None
            assert second.expected is not None
            wrong = np.abs(second.c - second.expected) > second.tolerance
            both = suspects(second, wrong) if wrong.any() else []
            matches = [one for one in matches if one in both]
    if not matches:
        return None
    one = matches[0]
    said = f"This is what a kernel computes that {one.says}"
    if one.pitfall:
        title = next(each.title for each in pitfalls() if each.number == one.pitfall)
        said += f" (pitfall {one.pitfall} of `make pitfalls`: {title})"
    return one.cause, f"{said}."


def suspects(trial: Trial, bad: Array) -> list[Suspect]:
    """Those whose C equals the wrong outputs of the trial, the likelier first."""
    assert trial.c is not None
    assert trial.terms is not None
    c, tolerance, matches = trial.c, trial.tolerance, []
    for one in SUSPECTS:
        with np.errstate(all="ignore"):
            every = (one.computes(terms) for terms in (trial.terms, trial.terms.centred()))
            for made in chain.from_iterable(every):
                near = np.abs(c - made) <= tolerance + 1e-6 * np.abs(made)
                if near[bad].all():
                    matches.append(one)
                    break
    return matches


def _by_a_factor(trial: Trial, bad: Array, larger: More) -> Found:
    c, expected = trial.c, trial.expected
    assert c is not None
    assert expected is not None
    telling = bad & (np.abs(expected) > 0)
    if np.count_nonzero(telling) < 2 or (bad & (expected == 0)).any():
        return None
    ratio = c[telling] / expected[telling]
    if np.ptp(ratio) > 1e-4 * np.abs(ratio).max():
        return None
    factor = float(np.median(ratio))
    said = f"Every wrong output is {factor:.4g} times what it should be"
    if abs(factor - round(factor)) < 1e-4 and factor > 1:
        return "factor", f"{said}: something is added {round(factor)} times."
    if abs(factor + 1) < 1e-4:
        return "factor", f"{said}: a sign is wrong."
    return "factor", f"{said}: a scale is missing, there twice, or another one."


def _transposed(trial: Trial, bad: Array, larger: More) -> Found:
    c, expected = trial.c, trial.expected
    assert c is not None
    assert expected is not None
    side = min(c.shape)
    square = np.abs(c[:side, :side] - expected[:side, :side].T) <= trial.tolerance[:side, :side]
    off = ~np.eye(side, dtype=bool)
    if side < 2 or not square.all() or not bad[:side, :side][off].any():
        return None
    return (
        "transposed",
        "C[m, n] holds what belongs to C[n, m]: m and n are exchanged, x is the fast axis and goes "
        "with n.",
    )


def _elsewhere(trial: Trial, bad: Array, larger: More) -> Found:
    """Right values in wrong places."""
    c, expected = trial.c, trial.expected
    assert c is not None
    assert expected is not None
    tolerance = trial.tolerance
    places = np.argwhere(bad)
    if len(places) < 3:
        return None
    found: list[tuple[int, int, int, int]] = []
    for m, n in places[:FEW]:
        near = np.argwhere(np.abs(expected - c[m, n]) <= tolerance)
        if len(near) != 1:
            continue
        found.append((int(m), int(n), int(near[0][0]), int(near[0][1])))
    if len(found) < min(len(places), FEW) * 2 // 3 or len(found) < 3:
        return None
    shifts = {(i - m, j - n) for m, n, i, j in found}
    examples = "; ".join(f"C[{m}, {n}] what belongs to C[{i}, {j}]" for m, n, i, j in found[:3])
    said = f"Right values in wrong places: {examples}."
    if len(shifts) == 1:
        ((down, right),) = shifts
        said += f" Each is {abs(down)} rows and {abs(right)} columns away from where it belongs."
    return "wrong place", said


def _integer_sum(trial: Trial, bad: Array, larger: More) -> Found:
    """Of one block of Q8_1: what the integer sum must have been."""
    t, c = trial.terms, trial.c
    assert c is not None
    if t is None or t.q is None or t.da is None or t.d.shape[1] != 1:
        return None
    m, n = _first(bad)
    d, da = t.d[n, 0], t.da[m, 0]
    if d * da == 0:
        return None
    right = float((t.code[n, 0] * t.q[m, 0]).sum())
    sum_of = (c[m, n] - t.z[n, 0] * t.s[m, 0]) / (d * da)
    if abs(sum_of - round(sum_of)) > 1e-3 * max(1.0, abs(sum_of)):
        return None
    return (
        "wrong sum",
        f"If its scales are right, the integer sum of the block is {round(sum_of)}, expected "
        f"{right:.0f}: look first at the codes and at how they are multiplied.",
    )


def _nearly(trial: Trial, bad: Array, larger: More) -> Found:
    c, expected = trial.c, trial.expected
    assert c is not None
    assert expected is not None
    off = float(np.abs(c - expected).max() / max(float(np.abs(expected).max()), 1e-30))
    if off > NEAR:
        return None
    return "rounding", f"It is off by {off:.1e} of the largest output. {_ROUNDING}"
