"""Which works are asked for (steps, formats, a scheme), and what they are compared with; branches
of the ladder."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Final, get_args

from qformats import FILE_FORMATS, FORMATS, WEIGHT_FORMATS
from qformats.terminal import sentence
from steps.contract import BRANCHES, Branch, Family, Kernel, Work
from steps.registry import find, kernels, ladder, lesson_of

ALL_FORMATS: Final = (*WEIGHT_FORMATS, *FILE_FORMATS)  # in the order of every table


@cache
def branches() -> Mapping[str, Branch]:
    """The branches of the ladder by the name that a step gives, in the order of panels: those of
    the contract, and those that a lesson brings, whose first step defines `BRANCH` beside its
    `STEP`."""
    found = dict(BRANCHES)
    for step in ladder():
        own = getattr(sys.modules[step.launch.__module__], "BRANCH", None)
        if own is not None:
            found[step.branch] = own
    return found


class UsageError(Exception):
    """A request that cannot be met; its text is the one sentence the user sees, in which what files
    and arguments say is as `qformats.terminal.shown`."""

    def __init__(self, text: str) -> None:
        super().__init__(sentence(text))


def select(
    steps: Sequence[Kernel],
    formats: Sequence[str] = (),
    wanted: str | None = None,
    cc: tuple[int, int] | None = None,
    output: str | None = None,
) -> tuple[Work, ...]:
    """The works of some steps, on all formats or some, in all schemes or one (W4A8, or A8), that
    write C in a dtype, or each in its own. What a lesson cannot do is done by the engineered kernel
    that it teaches, where that can.

    UsageError, with the reason, where nothing is left.
    """
    bits, family = _scheme(wanted)
    works: list[Work] = []
    bits_of = ", ".join(f"{name} is W{FORMATS[name].bits}" for name in formats or WEIGHT_FORMATS)
    why = f"no format asked for is {wanted}: {bits_of}"
    for step in steps:
        for each in (family,) if family else step.families:
            for name in formats or WEIGHT_FORMATS:
                if bits and FORMATS[name].bits != bits:
                    continue
                found = _able(step, each, name, cc, output)
                if isinstance(found, str):
                    why = found
                else:
                    works.append(found)
    if not works:
        raise UsageError(why)
    return tuple(works)


def _able(
    step: Kernel, family: Family, name: str, cc: tuple[int, int] | None, output: str | None
) -> Work | str:
    """The work of a step, or of the engineered kernel that it teaches; or why there is none."""
    why = ""
    for one in (step, *(one for one in kernels() if one.number == step.number)):
        reason = one.supports(name, family, cc, output)
        if reason is None:
            return Work(one, family, name)
        why = reason
    return why


def _scheme(text: str | None) -> tuple[int | None, Family | None]:
    """ "W4A8" -> (4, "A8"); "A16" -> (None, "A16")."""
    if text is None:
        return None, None
    match = re.fullmatch(r"(?:W(\d))?(A\d+)", text.upper())
    family = next((each for each in get_args(Family) if match and match[2] == each), None)
    if match is None or family is None:
        raise UsageError(f"unknown scheme {text!r}: use one like W4A16, W4A8, W8A8, or A16, A8")
    return int(match[1]) if match[1] else None, family


def with_parents(
    works: Sequence[Work], cc: tuple[int, int] | None = None, output: str | None = None
) -> tuple[Work, ...]:
    """The works and their parents on the same formats, by step, family and format. Parents that do
    not write C in this dtype, where one is asked for, are left out."""
    found = {(w.step.number, w.family, w.format): w for w in works}
    for work in works:
        number = lesson_of(work.step).parents.get(work.family)
        if number is None:
            continue
        parent = find(number)
        families = (work.family,) if work.family in parent.families else parent.families
        for family in families:
            able = _able(parent, family, work.format, cc, output)
            if not isinstance(able, str):
                found.setdefault((number, family, work.format), able)
    return tuple(found[key] for key in sorted(found, key=_rank))


def _rank(key: tuple[int, Family, str]) -> tuple[int, bool, int]:
    number, family, name = key
    return number, family == "A8", ALL_FORMATS.index(name)
