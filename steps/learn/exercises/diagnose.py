"""A wrong result in words: numbers first, then the cause, then what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from qformats import BLOCK, FORMATS
from steps.checks.cases import Case
from steps.contract import Step
from steps.learn.exercises.beside import Beside, Finding, listed, span, which_blocks
from steps.learn.exercises.faults import of_fault
from steps.learn.exercises.suspects import PITFALLS, SAYS, suspected
from steps.learn.exercises.trial import Array, Diagnosis, Fault, File, Subject, Trial, Values
from steps.learn.pitfalls.exhibit import pitfalls

TELLING: Final = Case((3, 5, 64), "integer", 1)
"""Where one wrong number could have several causes: this has thirty."""

ONE_BLOCK: Final = Case((3, 5, 32), "integer", 1)
"""Whose sums of Q8_1 are integers times one scale of each operand."""

WIDE: Final = Case((32, 80, 64), "integer", 1)
"""With more rows than a tile of 64: what is out of range there is in range in small problems."""

LARGEST: Final = Case((4, 4, 32), "extreme")  # one block of K with the largest sums
RUN_OVER: Final = 1 << 16
"""A sum that runs over the bits it has is off by a multiple of this, or of more."""

FEW: Final = 12  # wrong outputs, up to which each is sought among the right values of others
NEAR: Final = 1e-2  # relative: such an error is one of rounding

Again = Callable[[Case], Trial]  # the same step, family and format on another problem


def diagnose(trial: Trial, step: Step, right: Step | None, file: File, again: Again) -> Diagnosis:
    """What is wrong with a trial that failed. right: the step as it should be, if there is one."""
    if isinstance(trial.result, Fault):
        return of_fault(trial.result, trial.subject, step, file)
    at, v = str(trial.subject), trial.result
    if v.unwritten.any():
        which = "" if v.unwritten.all() else which_blocks(step, trial.subject, file.path)
        return Diagnosis("not written", 0, _unwritten(at, v.unwritten, which))
    if not np.isfinite(v.c).all():
        return _not_finite(trial.subject, v, step, right, file)
    if v.terms is None:  # weights of blocks of 256, or that are not those of the blocks
        m, n = v.found.worst
        what = f"{at}: C[{m}, {n}] is {v.found.got:.6g}, expected {v.found.expected:.6g}."
        fmt = FORMATS[trial.subject.format]
        groups = (
            f"A block of {fmt.name} has {fmt.elements} elements, and each {fmt.group} of them a "
            "scale of their own: group g begins at element g * group."
        )
        return Diagnosis("wrong value", 0, (what, groups if fmt.elements != BLOCK else ""))
    if not v.bad.any():  # only as a whole: many small errors
        return Diagnosis("rounding", 0, (f"{at}: {v.found.verdict}.", _ROUNDING))
    m, n = _first(v.bad)
    what = f"{at}: C[{m}, {n}] is {v.c[m, n]:.6g}, expected {v.expected[m, n]:.6g}"
    what += f"; wrong are {region(v.bad)}." if v.bad.size > 1 else "."

    def said(finding: Finding) -> Diagnosis:
        return Diagnosis(finding.cause, 0, (what, finding.says))

    if found := (
        _suspected(v, again)
        or _run_over(trial, again)
        or _by_a_factor(v)
        or _transposed(v)
        or _elsewhere(v)
    ):
        return said(found)
    for case in (TELLING, WIDE):
        other = again(case).result
        if isinstance(other, Fault):
            subject = Subject(trial.subject.family, trial.subject.format, case)
            return of_fault(other, subject, step, file)
    if right is not None:
        beside = Beside(step, right, trial.subject, file, m, n)
        if found := beside.loads() or beside.contents():
            return said(found)
    if found := _integer_sum(again(ONE_BLOCK).result) or _nearly(v):
        return said(found)
    unknown = "No known mistake gives these values. Compute this output by hand from its block."
    return said(Finding("wrong value", unknown))


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
        return f"{what}s {listed([str(i) for i in indices])}"
    if last == extent - 1 and first > 0:
        return f"every {what} from {first} on"
    return f"{what}{'s' * (first < last)} {span(first, last)}"


def _first(bad: Array) -> tuple[int, int]:
    m, n = np.unravel_index(int(np.argmax(bad)), bad.shape)
    return int(m), int(n)


# --- outputs that are no numbers ------------------------------------------------------------------


def _unwritten(at: str, missing: Array, which: str) -> tuple[str, str]:
    """which: thread blocks that tell why, if they do."""
    m, n = missing.shape
    what = (
        f"{at}: {np.count_nonzero(missing)} of {missing.size} outputs are never stored to: "
        f"{region(missing)}."
    )
    if missing.all():
        return what, "No thread stores to c: is the store there, and is its condition ever true?"
    if which:
        return what, which
    return what, (
        f"C has {m} rows and {n} columns. Either some thread of these does not come to the line "
        "that stores to c, or the grid has too few thread blocks (it takes "
        "ceil_div(extent, tile) of them, as the last tile is not full; pitfall 12), or a guard "
        "lets too many threads return."
    )


def _not_finite(
    subject: Subject, v: Values, step: Step, right: Step | None, file: File
) -> Diagnosis:
    bad = ~np.isfinite(v.c)
    if v.added_to.any():
        what = f"{subject}: the kernel adds to what C held before in {region(bad)}."
        advice = "C may hold anything: store the sum with =, not +=."
        return Diagnosis("added to", 0, (what, advice))
    m, n = _first(bad)
    others = f"; so are {region(bad)}" if bad.size > 1 else ""
    what = f"{subject}: C[{m}, {n}] is {v.c[m, n]}{others}."
    if right is not None and (found := Beside(step, right, subject, file, m, n).unwritten()):
        return Diagnosis(found.cause, 0, (what, found.says))
    advice = (
        "The kernel stores it, so a term of the sum is no number. Shared and local memory begin as "
        "NaN here: something is read that nobody has written, or a sum does not begin at 0."
    )
    return Diagnosis("nan", 0, (what, advice))


# --- wrong values: what their numbers say ---------------------------------------------------------


def suspects(v: Values) -> list[str]:
    """The causes that give the wrong outputs, the likelier first."""
    assert v.terms is not None
    found = set()
    with np.errstate(all="ignore"):
        for terms in (v.terms, v.terms.centred()):
            for cause, made in suspected(terms):
                near = np.abs(v.c - made) <= v.tolerance + 1e-6 * np.abs(made)
                if near[v.bad].all():
                    found.add(cause)
    return [cause for cause in SAYS if cause in found]


def _suspected(v: Values, again: Again) -> Finding | None:
    """A known mistake that gives these very values, on a larger problem too."""
    matches = suspects(v)
    if len(matches) > 1 or (matches and v.bad.size == 1):
        second = again(TELLING).result
        if isinstance(second, Values) and not second.found.ok:
            both = suspects(second) if second.bad.any() else []
            matches = [one for one in matches if one in both]
    if not matches:
        return None
    said = f"This is what a kernel computes that {SAYS[matches[0]]}"
    if number := PITFALLS.get(matches[0]):
        title = next(each.title for each in pitfalls() if each.number == number)
        said += f" (pitfall {number} of `make pitfalls`: {title})"
    return Finding(matches[0], f"{said}.")


def _by_a_factor(v: Values) -> Finding | None:
    telling = v.bad & (np.abs(v.expected) > 0)
    if np.count_nonzero(telling) < 2 or (v.bad & (v.expected == 0)).any():
        return None
    ratio = v.c[telling] / v.expected[telling]
    if np.ptp(ratio) > 1e-4 * np.abs(ratio).max():
        return None
    factor = float(np.median(ratio))
    why = "a scale is missing, there twice, or another one"
    if abs(factor - round(factor)) < 1e-4 and factor > 1:
        why = f"something is added {round(factor)} times"
    elif abs(factor + 1) < 1e-4:
        why = "a sign is wrong"
    return Finding("factor", f"Every wrong output is {factor:.4g} times what it should be: {why}.")


def _transposed(v: Values) -> Finding | None:
    side = min(v.c.shape)
    part = slice(side), slice(side)
    square = np.abs(v.c[part] - v.expected[part].T) <= v.tolerance[part]
    if side < 2 or not square.all() or not v.bad[part][~np.eye(side, dtype=bool)].any():
        return None
    return Finding(
        "transposed",
        "C[m, n] holds what belongs to C[n, m]: m and n are exchanged, x is the fast axis and goes "
        "with n.",
    )


def _elsewhere(v: Values) -> Finding | None:
    """Right values in wrong places."""
    wrong = np.argwhere(v.bad).tolist()
    found = []
    for m, n in wrong[:FEW]:
        near = np.argwhere(np.abs(v.expected - v.c[m, n]) <= v.tolerance).tolist()
        if len(near) == 1:
            found.append((m, n, near[0][0], near[0][1]))
    if len(found) < max(3, min(len(wrong), FEW) * 2 // 3):
        return None
    shifts = {(i - m, j - n) for m, n, i, j in found}
    examples = "; ".join(f"C[{m}, {n}] what belongs to C[{i}, {j}]" for m, n, i, j in found[:3])
    said = f"Right values in wrong places: {examples}."
    if len(shifts) == 1:
        ((down, right),) = shifts
        said += f" Each is {abs(down)} rows and {abs(right)} columns away from where it belongs."
    for which, what in ((1, "rows, of A and C,"), (0, "columns, of C, which are rows of W,")):
        if all(shift[which] == 0 for shift in shifts):
            said += f" So {what} are exchanged."
    return Finding("wrong place", said)


_ROUNDING: Final = (
    "Each output is near, all together are too far: something is rounded on the way, such as a sum "
    "kept in float16 or a scale in an integer."
)


def _off_by(v: Fault | Values) -> Array | None:
    """Of one block of K: by how much the sums of codes are wrong, where they are by integers."""
    if isinstance(v, Fault) or v.terms is None or v.terms.da is None or not v.bad.any():
        return None
    off = (v.c - v.expected) / (v.terms.da * v.terms.d[:, 0])
    return None if np.abs(off - np.round(off)).max() > 1e-2 else np.asarray(off)


def _run_over(trial: Trial, again: Again) -> Finding | None:
    """Sums that are off by what a field of so many bits loses."""
    v = again(LARGEST).result
    off = _off_by(v)
    if off is None or isinstance(v, Fault) or (np.round(off).astype(int) % RUN_OVER).any():
        return None
    assert v.terms is not None
    assert v.terms.q is not None
    m, n = _first(v.bad)
    dot = np.einsum("nbj,mbj->mn", v.terms.code, v.terms.q)
    code = np.abs(v.terms.code).max()
    said = (
        f"An integer sum runs over: with codes and activations at their most (a block with codes "
        f"up to {code:.0f} in magnitude, and 127) the sum of C[{m}, {n}] is {dot[m, n]:.0f}, and "
        f"what comes out is off by {off[m, n]:+.0f}, {abs(off[m, n]) / RUN_OVER:.0f} x 2^16. Each "
        f"product may come to {code * 127:.0f}: count how many of them the bits of a sum hold."
    )
    return Finding("sum runs over", said)


def _integer_sum(v: Fault | Values) -> Finding | None:
    """Of one block of K: by how much the sum of codes is wrong."""
    off = _off_by(v)
    if off is None or isinstance(v, Fault):
        return None
    m, n = _first(v.bad)
    said = f"In one block of K the integer sum of C[{m}, {n}] is off by {off[m, n]:+.0f}"
    if off.max() < 1 and off.min() > -FEW:
        said += (
            f", and {np.count_nonzero(v.bad)} of {off.size} sums are too small: they are rounded "
            "down, where two share a word and the lower one is negative"
        )
    return Finding("integer sum", f"{said}.")


def _nearly(v: Values) -> Finding | None:
    off = float(np.abs(v.c - v.expected).max() / max(float(np.abs(v.expected).max()), 1e-30))
    if off > NEAR:
        return None
    return Finding("rounding", f"It is off by {off:.1e} of the largest output. {_ROUNDING}")
