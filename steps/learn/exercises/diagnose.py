"""A wrong result in words: numbers first, then the cause, then what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any, Final

import numpy as np

from qformats import BLOCK
from steps.contract import Step
from steps.learn.exercises.contents import misplaced
from steps.learn.exercises.diagnosis import Diagnosis, File
from steps.learn.exercises.faults import of_fault
from steps.learn.exercises.places import places
from steps.learn.exercises.probe import SHOWN, Finding, pairing, runs
from steps.learn.exercises.suspects import SUSPECTS, Suspect
from steps.learn.exercises.trial import Trial
from steps.learn.exercises.unwritten import unwritten
from steps.learn.pitfalls.exhibit import pitfalls

Array = np.ndarray[Any, np.dtype[Any]]

FEW: Final = 12  # wrong outputs, up to which each is sought among the right values of others
NEAR: Final = 1e-2  # relative: such an error is one of rounding


def diagnose(
    trial: Trial,
    step: Step,
    right: Step | None,
    file: File,
    larger: Callable[[], Iterator[Trial]],
) -> Diagnosis:
    """What is wrong with a trial that failed.

    right: the step as it should be, if there is one.
    larger: the same step on larger problems, one by one, which are asked for where one wrong number
    could have several causes.
    """
    if trial.fault is not None:
        return of_fault(trial.fault, trial.subject, step, file)
    assert trial.c is not None, "a trial without a fault has a result"
    if trial.unwritten is not None and trial.unwritten.any():
        return _unwritten(trial)
    if not np.isfinite(trial.c).all():
        return _not_finite(trial, step, file)
    return _wrong_values(trial, step, right, file, larger)


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


def _not_finite(trial: Trial, step: Step, file: File) -> Diagnosis:
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
    if found := unwritten(step, trial.subject, file, m, n):
        return Diagnosis("nan", found[0], (what, found[1]))
    advice = (
        "The kernel stores it, so a term of the sum is no number. Shared and local memory begin as "
        "NaN here: something is read that nobody has written, or a sum does not begin at 0."
    )
    return Diagnosis("nan", 0, (what, advice))


def _first(bad: Array) -> tuple[int, int]:
    m, n = np.unravel_index(int(np.argmax(bad)), bad.shape)
    return int(m), int(n)


def _wrong_values(
    trial: Trial, step: Step, right: Step | None, file: File, larger: More
) -> Diagnosis:
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
    for search in (_suspected, _by_a_factor, _transposed, _elsewhere, _part_of_k):
        if said := search(trial, bad, larger):
            exact = places(step, trial.subject) if said[0] in VAGUE else None
            return Diagnosis(*_found(exact, what) if exact else (said[0], 0, (what, *said[1:])))
    problems = larger()
    for second in islice(problems, 1):
        if second.fault is not None:
            return of_fault(second.fault, second.subject, step, file)
    if met := pairing(step, trial.subject):  # its products are as large as the other problem
        return Diagnosis(*_found(met, what))
    for second in problems:
        if second.fault is not None:
            return of_fault(second.fault, second.subject, step, file)
    if met := places(step, trial.subject):
        return Diagnosis(*_found(met, what))
    if right is not None and (met := misplaced(step, right, trial.subject, file)):
        return Diagnosis(*_found(met, what))
    for search in (_integer_sum, _nearly):
        if said := search(trial, bad, larger):
            return Diagnosis(said[0], 0, (what, *said[1:]))
    unknown = "No known mistake gives these values. Compute this output by hand from its block."
    return Diagnosis("wrong value", 0, (what, unknown))


VAGUE: Final = ("scales of another row", "scales of another block")
"""Causes of suspects of which products made for it may say more: whose scales, and which row."""


def _found(finding: Finding, what: str) -> tuple[str, int, tuple[str, ...]]:
    return finding.cause, 0, (what, finding.says)


_ROUNDING: Final = (
    "Each output is near, all together are too far: something is rounded on the way, such as a sum "
    "kept in float16 or a scale in an integer."
)

Found = tuple[str, ...] | None
More = Callable[[], Iterator[Trial]]


def _suspected(trial: Trial, bad: Array, larger: More) -> Found:
    """A known mistake that gives these very values, on a larger problem too."""
    matches = suspects(trial, bad)
    if len(matches) > 1 or (matches and bad.size == 1):
        second = next(larger())
        if second.fault is None and not second.ok:
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


def _part_of_k(trial: Trial, bad: Array, larger: More) -> Found:
    """The products that count otherwise than once, of pieces of K: they follow from the values
    where there are more outputs than pieces."""
    t, c, size = trial.terms, trial.c, BLOCK // 4
    assert c is not None
    assert t is not None
    values = (t.d[..., None] * t.code + t.z[..., None]).reshape(*t.d.shape, -1, size)
    pieces = np.einsum("nbpj,mbpj->mnbp", values, t.x.reshape(*t.s.shape, -1, size))[bad]
    pieces = pieces.reshape(len(pieces), -1)
    if len(pieces) < 2 * pieces.shape[1]:
        return None
    times = np.linalg.lstsq(pieces, c[bad], rcond=None)[0]
    whole = np.round(times)
    if (np.abs(times - whole) > 0.02).any() or (whole == 1).all():
        return None
    if (np.abs(pieces @ whole - c[bad]) > 2 * trial.tolerance[bad]).any():
        return None
    said = []
    for count, how in ((0, "left out"), (2, "counted twice")):
        own = np.flatnonzero(whole == count)
        if len(own):
            ks = [f"K {a * size} to {(b + 1) * size - 1}" for a, b in runs(own.tolist())]
            more = " ..." if len(ks) > SHOWN else ""
            said.append(f"{', '.join(ks[:SHOWN])}{more} {'is' if len(ks) == 1 else 'are'} {how}")
    if not said or not np.isin(whole, (0, 1, 2)).all():
        return None
    return "part of K", f"The outputs are those of a sum over a part of K: {'; '.join(said)}."


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
