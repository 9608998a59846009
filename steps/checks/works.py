"""Which work is asked for, and whether it comes out right: the half of a run that needs no clock.

A *work* is one step, one activation family, one weight format: a row of every table. A *case* is
one problem it must solve. `check_works` runs all cases of all works on a machine and never stops at
a wrong result; what is wrong is said in the outcome.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

from qformats import FILE_FORMATS, FORMATS, SUPER, WEIGHT_FORMATS
from reference import CHECK_SHAPES, DISTRIBUTIONS, GOLDEN, GPU_CHECK_SHAPES, Check, Problem
from steps.contract import Family, Machine, Size, Step, Work

SIMULATOR_LIMIT: Final = 2**20
"""M * N * K the simulator is asked for at most: about a minute of Python a step."""

GOING_ROUND: Final = ("integer", "normal", "uniform", "integer", "llm")
"""Distributions in turn, where none is asked for: exact problems find what rounding would hide."""

ORDERS: Final = (0, -1, 1, 2)
"""Lane orders in turn: ascending, descending, shuffled."""

ALL_FORMATS: Final = (*WEIGHT_FORMATS, *FILE_FORMATS)

# As CHECK_SHAPES, for blocks of 256: no multiple of a record's 128 K alone, no tile of M or N full.
SUPER_CHECK_SHAPES: Final = (
    (1, 1, 256),
    (1, 33, 512),
    (2, 65, 256),
    (5, 20, 256),
    (9, 5, 768),
    (17, 3, 256),
    (3, 130, 256),
    (33, 18, 256),
)

QUICK: Final = 3
"""A quick check gives each format every third shape, so that all come up among them."""


class UsageError(Exception):
    """A request that cannot be met; its text is the one sentence the user sees."""


@dataclass(frozen=True, slots=True)
class Case:
    """One problem, apart from its format; `order` is the simulator's order of lanes."""

    shape: Size
    distribution: str
    seed: int = 0
    order: int = 0

    def __str__(self) -> str:
        m, n, k = self.shape
        return f"M={m} N={n} K={k} {self.distribution} seed {self.seed} order {self.order}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the cases of one work came to; the errors are those of the one with the most outputs."""

    work: Work
    cases: int = 0
    nmse_same_operands: float | None = None
    nmse_float: float | None = None
    failures: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.failures and self.cases > 0

    def as_json(self) -> dict[str, Any]:
        return {
            "step": self.work.step.number,
            "name": self.work.step.name,
            "scheme": self.work.scheme,
            "format": self.work.format,
            "cases": self.cases,
            "ok": self.ok,
            "nmse_same_operands": self.nmse_same_operands,
            "nmse_float": self.nmse_float,
            "failures": list(self.failures),
        }


@dataclass(slots=True)
class Outcomes:
    """All of a run. `broken` says why it ended early: after a CUDA error nothing can be trusted."""

    each: list[Outcome] = field(default_factory=list)
    broken: str | None = None

    @property
    def ok(self) -> bool:
        return self.broken is None and all(outcome.ok for outcome in self.each)


# --- what is asked for ----------------------------------------------------------------------------


def select(
    steps: Sequence[Step],
    formats: Sequence[str] = (),
    wanted: str | None = None,
    cc: tuple[int, int] | None = None,
) -> tuple[Work, ...]:
    """The works of some steps: of all formats, or of some; of a scheme such as W4A8, or A8.

    UsageError, with the reason, where nothing is left.
    """
    bits, family = _scheme(wanted)
    works: list[Work] = []
    why = f"{', '.join(formats or WEIGHT_FORMATS)}: no format here is {wanted}"
    for step in steps:
        for each in (family,) if family else step.families:
            for name in formats or WEIGHT_FORMATS:
                if bits and FORMATS[name].bits != bits:
                    continue
                if sentence := step.supports(name, each, cc):
                    why = sentence
                else:
                    works.append(Work(step, each, name))  # type: ignore[arg-type]
    if not works:
        raise UsageError(why)
    return tuple(works)


def _scheme(text: str | None) -> tuple[int | None, str | None]:
    if text is None:
        return None, None
    match = re.fullmatch(r"(?:W(\d))?(A16|A8)", text.upper())
    if match is None:
        raise UsageError(f"unknown scheme {text!r}: use one like W4A16, W4A8, W8A8, or A16, A8")
    return int(match[1]) if match[1] else None, match[2]


def with_ancestors(works: Sequence[Work], ladder: Sequence[Step]) -> tuple[Work, ...]:
    """The works, and before them what they are compared with: their parents and step 1."""
    found = {(w.step.number, w.family, w.format): w for w in works}
    for work in works:
        parent = work.step.parents.get(work.family)
        for step in ladder:
            if step.number not in (1, parent) or step.number == work.step.number:
                continue
            families = (work.family,) if work.family in step.families else step.families
            for family in families:
                if step.supports(work.format, family) is None:
                    key = (step.number, family, work.format)
                    found.setdefault(key, Work(step, family, work.format))
    return tuple(found[key] for key in sorted(found, key=_rank))


def _rank(key: tuple[int, Family, str]) -> tuple[int, bool, int]:
    number, family, name = key
    return number, family == "A8", ALL_FORMATS.index(name)


def cases(
    format_name: str,
    *,
    simulated: bool,
    quick: bool = False,
    small: bool = False,
    shape: Size | None = None,
    distribution: str | None = None,
    seed: int = 0,
    order: int | None = None,
) -> tuple[Case, ...]:
    """The problems of one work: one shape, or the check shapes of the machine and the golden case.

    quick: a third of the shapes, another third for the next format. small: a GPU gets the
    simulator's shapes too (for tools that slow it down a hundredfold).
    """
    if distribution is not None and distribution not in DISTRIBUTIONS:
        raise UsageError(
            f"unknown distribution {distribution!r}: use one of {', '.join(DISTRIBUTIONS)}"
        )
    if distribution == "golden":
        return (Case((1, 1, 32), "golden", seed, order or 0),)
    if shape is not None:
        require_depth(format_name, shape[2])
        if simulated and shape[0] * shape[1] * shape[2] > SIMULATOR_LIMIT:
            raise UsageError(
                f"M*N*K = {shape[0] * shape[1] * shape[2]} multiply-adds are too many for the "
                f"simulator, which does some ten thousand a second: use at most {SIMULATOR_LIMIT}"
            )
        return (Case(shape, distribution or "normal", seed, order or 0),)
    shapes = CHECK_SHAPES if simulated or small else GPU_CHECK_SHAPES
    if FORMATS[format_name].elements == SUPER:
        shapes = SUPER_CHECK_SHAPES
        if not (simulated or small):
            long = (shape for shape in GPU_CHECK_SHAPES if shape[2] >= SUPER)
            shapes = (*shapes, *((m, n, -(-k // SUPER) * SUPER) for m, n, k in long))
    if quick:
        shapes = shapes[ALL_FORMATS.index(format_name) % QUICK :: QUICK]
    drawn = itertools.cycle((distribution,) if distribution else GOING_ROUND)
    orders = itertools.cycle(ORDERS if order is None else (order,))
    regular = [
        Case(each, name, seed + i, lanes)
        for i, (each, name, lanes) in enumerate(zip(shapes, drawn, orders, strict=False))
    ]
    has_golden = distribution is None and format_name in GOLDEN
    golden = [Case((1, 1, 32), "golden", 0, order or 0)] if has_golden else []
    return (*golden, *regular)


def require_depth(format_name: str, k: int) -> None:
    """UsageError where K is not a multiple of a format's block."""
    size = FORMATS[format_name].elements
    if k % size:
        raise UsageError(
            f"K={k} is not a multiple of {size}, the block of {format_name}: "
            f"use {k // size * size + size}"
        )


# --- running the cases ----------------------------------------------------------------------------


@lru_cache(maxsize=256)
def problem(format_name: str, shape: Size, distribution: str, seed: int) -> Problem:
    """The problem of a case; kept, as every step solves the same ones."""
    return Problem(*shape, format_name, distribution, seed)


def check_works(
    works: Sequence[Work],
    cases_of: Callable[[str], Sequence[Case]],
    machine: Callable[[int], Machine],
    report: Callable[[str], None] = lambda _: None,
    given: Problem | None = None,
) -> Outcomes:
    """Every case of every work. `machine(order)` is where one runs, `report` hears of each work,
    `given` is the problem of all cases where it is not drawn."""
    outcomes = Outcomes()
    for work in works:
        report(str(work))
        results = list(_results(work, cases_of(work.format), machine, given))
        outcomes.each.append(_outcome(work, results))
        outcomes.broken = next((f"{work}: {r}" for _, r in results if isinstance(r, Broken)), None)
        if outcomes.broken:
            break
    return outcomes


class Broken(str):
    """The sentence of an error after which the GPU is of no use to this process."""

    __slots__ = ()


Result = tuple[Case, "Check | str"]


def _results(
    work: Work,
    some: Iterable[Case],
    machine: Callable[[int], Machine],
    posed: Problem | None = None,
) -> Iterator[Result]:
    from steps.checks.verify import verify

    for case in some:
        bits = GOLDEN[work.format].q81 if case.distribution == "golden" else None
        try:
            one = posed or problem(work.format, case.shape, case.distribution, case.seed)
            yield case, verify(work.step, work.family, one, machine(case.order), bits)
        except Exception as error:  # a kernel may fail in any way, and the other works go on
            sentence = " ".join(f"{type(error).__name__}: {error}".split())
            lost = fatal(error)
            yield case, Broken(sentence) if lost else sentence
            if lost:
                return


_DRIVER_ERRORS: Final = ("CudaAPIError", "CudaDriverError", "CudaRuntimeError", "CUDAError")


def fatal(error: BaseException) -> bool:
    """Whether an exception is the CUDA driver's and has taken the context with it.

    A bad address has: every later call then fails with it. A refused launch or allocation has not.
    """
    if not any(cls.__name__ in _DRIVER_ERRORS for cls in type(error).__mro__):
        return False
    from numba import cuda

    try:
        cuda.synchronize()
    except Exception:
        return True
    return False


def _outcome(work: Work, results: Sequence[Result]) -> Outcome:
    failures = tuple(
        f"{work} at {case}: {result if isinstance(result, str) else result.verdict}"
        for case, result in results
        if isinstance(result, str) or not result.ok
    )
    checked = [(case, result) for case, result in results if not isinstance(result, str)]
    # the exact problems have no quantization error, so they would say nothing of a format's
    telling = [pair for pair in checked if pair[0].distribution not in ("integer", "golden")]
    if not checked:
        return Outcome(work, len(results), failures=failures)
    _, largest = max(telling or checked, key=lambda pair: pair[0].shape[0] * pair[0].shape[1])
    return Outcome(work, len(results), largest.nmse_same_operands, largest.nmse_float, failures)
