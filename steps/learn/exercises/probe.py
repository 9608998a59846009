"""Which weight meets which activation: what a wrong sum cannot say.

A is minus the identity, one block long: row m has one element, m. So C[m, n] is what element m of A
makes of row n of W, and as many rows of known codes as there are unknowns say how: which weights it
meets, how often, and what their high bits and nothing at all add to that. Where the rows agree on
no answer there is none: then nothing is said.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from qformats import BLOCK, FORMATS
from reference.exact import pack_block
from steps.checks.verify import multiply, prepare
from steps.contract import Step
from steps.driver.machines import Simulator
from steps.learn.exercises.trial import (
    FIRST_WITH_STAGES,
    PATIENCE,
    Array,
    Subject,
    limit,
    sized_for,
)
from steps.learn.exercises.wording import joined, listed, runs, span

FULL: Final = 127.0  # the largest activation of a block: its scale in Q8_1 is then 1
FEW: Final = 3  # weights that one activation may meet; more are a mixture
ROWS: Final = 2 * BLOCK + 16  # of weights: more than there are unknowns
MOST_PRODUCTS: Final = 4  # of so many rows each, until as many are wrong


class Finding(NamedTuple):
    """What probing found: a cause in a word or two, and the sentence that says it."""

    cause: str
    says: str


@dataclass(frozen=True, slots=True)
class Probe:
    """Products of a step with operands that are made to be told apart, in the format, on the GPU
    and in the order of lanes of a subject."""

    step: Step
    subject: Subject

    @property
    def levels(self) -> tuple[int, ...]:
        """All that a weight may be, in units of its scale, without those that a middle code has."""
        bits, least = FORMATS[self.subject.format].bits, -self.centre
        if bits == 8:
            return (*range(-127, 0), *range(1, 128))
        return tuple(least + code for code in range(1 << bits) if code != 1 << bits - 1)

    @property
    def centre(self) -> int:
        """The code of a weight that is 0."""
        fmt = FORMATS[self.subject.format]
        return 0 if fmt.bits == 8 or "m" in (fmt.dtype.names or ()) else 1 << fmt.bits - 1

    def product(self, a: Array, levels: Array, d: Array | float = 1.0) -> Array | None:
        """C, float64, of A[M, K] and the weights d * levels[N, K]; None where there is a fault,
        which is told where it matters, and where some of C is no number. d: [N, K/32], or one for
        all."""
        n, k = levels.shape
        blocks = (n, k // BLOCK)
        codes = levels.reshape(*blocks, BLOCK) + self.centre
        scales = np.broadcast_to(np.asarray(d), blocks)
        packed = pack_block(self.subject.format, codes, scales)
        machine = Simulator(self.subject.case.order)
        with suppress(Exception), limit(PATIENCE), sized_for(self.subject.sms):
            family, fmt, own = self.subject.family, self.subject.format, a.astype(np.float32)
            c = multiply(prepare(self.step, family, fmt, own, packed, machine), machine)
            return c.astype(np.float64) if np.isfinite(c).all() else None
        return None


@dataclass(frozen=True)
class Fate:
    """What becomes of an element m of A. `weights`: (j - m, times) of each weight j that it meets;
    `high`: (j - m, what is added where weight j is negative); `constant`: added always. `fits`:
    whether it is such a sum at all."""

    weights: tuple[tuple[int, float], ...] = ((0, 1.0),)
    high: tuple[tuple[int, float], ...] = ()
    constant: float = 0.0
    fits: bool = True


RIGHT: Final = Fate()
UNKNOWN: Final = Fate(fits=False)


def pairing(step: Step, subject: Subject) -> Finding | None:
    """Elements of a block that meet other weights than their own, or none, or more than them; None
    where each meets its own, or where that cannot be told."""
    probe, in_order = Probe(step, subject), np.arange(BLOCK)
    # One block of K where that shows the mistake, as the simulator takes half as long; but steps
    # with stages multiply the blocks behind it too, whose scales are 0 where there are none.
    k, random = 2 * BLOCK, np.random.default_rng(5)
    if step.number < FIRST_WITH_STAGES:
        k = min(subject.case.shape[2], k)
    made: list[Array] = []  # of the rows that are wrong
    known: list[Array] = []
    again, found = True, 0
    for _ in range(MOST_PRODUCTS):  # more than one where a part of the rows is wrong
        levels = random.choice(probe.levels, (ROWS, k))
        own = levels[:, :BLOCK]
        c = _made(probe, levels, in_order)
        if c is None:
            return None
        off = c + FULL * own.T
        if subject.family == "A8" and off.any() and np.isin(np.round(off, 3), (0, -1)).all():
            return Finding("rounded down", _ROUNDED.format(int(-off.sum()), off.size))
        wrong = np.abs(off).max(axis=0) > 1.0
        if not wrong.any():
            return None
        if again:
            # of rows of A in another order: else a row met the element of another
            other = _made(probe, levels, np.random.default_rng(6).permutation(BLOCK))
            if other is None or not np.allclose(other, c, atol=1.0):
                return None
            again = False
        made.append(c[:, wrong])
        known.append(own[wrong])
        found += int(np.count_nonzero(wrong))
        if wrong.all() or found >= ROWS:
            return told(*_fates(np.hstack(made) / -FULL, np.vstack(known), probe.centre))
    return None


def _made(probe: Probe, levels: Array, order: Array) -> Array | None:
    """[32, rows]: what each element of A makes of the weights, its rows in this order."""
    a = np.zeros((BLOCK, levels.shape[1]))
    a[np.arange(BLOCK), order] = -FULL
    c = probe.product(a, levels)
    return None if c is None else c[np.argsort(order)]


_ROUNDED: Final = (
    "With one activation alone, the integer sum is 1 too small in {} of {} outputs and right in "
    "all others: it is rounded down, where two sums share a word and the lower one is negative."
)


def _fates(made: Array, levels: Array, centre: int) -> tuple[list[Fate], list[int]]:
    """What was `made` [32, rows] of the levels [rows, 32], as sums of them; and the weights that
    take part in all of them, whatever the element."""
    known = np.hstack([levels, levels < 0, np.ones((len(levels), 1))]).astype(np.float64)
    terms = np.linalg.lstsq(known, made.T, rcond=None)[0].T
    left = np.abs(known @ terms.T - made.T).max(axis=0)
    fits = left <= 2e-3 * np.maximum(1.0, np.abs(made).max(axis=1))
    weights, high, constant = np.split(np.round(terms, 2), (BLOCK, 2 * BLOCK), axis=1)
    # kernels that take the centre off in the end, as offset * s, have a constant where they meet
    # too many weights or too few: it is no mistake of its own
    follows = np.abs(constant[:, 0] - centre * (weights.sum(axis=1) - 1)) < 0.05
    constant = np.where(follows | (np.abs(constant[:, 0]) < 0.2), 0, constant[:, 0])
    common = np.median(weights, axis=0)
    weights = weights - np.where(np.abs(common) > 0.02, common, 0)
    fates = [
        Fate(_shifts(m, weights[m]), _shifts(m, high[m]), float(constant[m]))
        if fits[m]
        else UNKNOWN
        for m in range(BLOCK)
    ]
    return fates, [int(j) for j in np.flatnonzero(np.abs(common) > 0.02)]


def _shifts(m: int, row: Array) -> tuple[tuple[int, float], ...]:
    return tuple((int(j) - m, float(row[j])) for j in np.flatnonzero(np.abs(row) > 0.02))


def told(fates: list[Fate], common: list[int]) -> Finding | None:
    """The elements whose fate is not right, those with the same fate together."""
    groups: dict[Fate, list[int]] = {}
    for m, fate in enumerate(fates):
        if fate != RIGHT:
            groups.setdefault(fate, []).append(m)
    if not groups or len(groups.get(UNKNOWN, [])) == BLOCK:
        return None
    said = [_sentence(fate, own) for fate, own in groups.items()]
    cause, why = _cause(groups)
    if common:
        who = " and ".join(_weights(*run) for run in runs(common))
        why += f" To every sum {who} are added, multiplied with what is no element of A."
    return Finding(cause, f"{joined([f'in a block, {said[0]}', *said[1:]])}.{why}")


def _cause(groups: Iterable[Fate]) -> tuple[str, str]:
    others = {shift for fate in groups for shift, _ in fate.high if shift}
    own = any(not shift for fate in groups for shift, _ in fate.high)
    if all(_swapped(fate) for fate in groups):
        return "high bit of another", ""
    if others or any(abs(times) >= 16 for fate in groups for _, times in fate.weights):
        return (
            "bits of another",
            " Bits of one number run into another: mask or shift them off, or keep them apart.",
        )
    if own:
        return "sign lost", " The sign of a code is lost, or read as one of its bits."
    if any(fate.constant and fate.weights == RIGHT.weights for fate in groups):
        return (
            "centre of the codes",
            " A code stands for code - centre: the centre is to be taken off every one of them.",
        )
    if all(not fate.fits for fate in groups):
        return "wrong elements", ""
    return "wrong pairs", ""


def _swapped(fate: Fate) -> bool:
    """Whether a weight has the high bit of another in place of its own."""
    high = dict(fate.high)
    return len(high) == 2 and high.get(0) == -sum(v for shift, v in high.items() if shift)


def _sentence(fate: Fate, own: list[int]) -> str:
    """For the first neighbours with this fate, then who shares it."""
    (first, last), *others = runs(own)
    who = f"elements {first} to {last} of A" if first < last else f"element {first} of A"
    meet = "meet" if first < last else "meets"
    said = f"{who} {meet} {_met(fate, first, last)}"
    if not fate.fits:
        said = (
            f"{who} {'give' if first < last else 'gives'} products that no sum of weights explains"
        )
    if others:
        said += f"; likewise {listed([span(*run) for run in others], 3)}"
    return said


def _met(fate: Fate, first: int, last: int) -> str:
    if len(fate.weights) > FEW:
        said = f"{len(fate.weights)} weights"
    else:
        parts = [_weights(first + shift, last + shift, times) for shift, times in fate.weights]
        said = " and ".join(parts) or "nothing"
    if _swapped(fate):
        shift = next(shift for shift, _ in fate.high if shift)
        other = _weights(first + shift, last + shift)
        return f"{said}, with the highest bit of {other} in place of {_their(first, last)} own"
    for shift, more in fate.high[:FEW]:
        where = _weights(first + shift, last + shift)
        said += f", {more:+g} where {where} {'are' if first < last else 'is'} negative"
    if not fate.constant:
        return said
    high_or_low = "high" if fate.constant > 0 else "low"
    return f"{said}, {'each ' if first < last else ''}{abs(fate.constant):g} too {high_or_low}"


def _their(first: int, last: int) -> str:
    return "their" if first < last else "its"


def _weights(first: int, last: int, times: float = 1.0) -> str:
    often = "" if times == 1 else f"{times:g} times "
    return f"{often}weight{'s' * (first < last)} {span(first, last)}"
