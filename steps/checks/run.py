"""Runs the cases of works on a machine, and says what came of them.

A wrong result never stops the run; it is told in the work's outcome. A lost GPU does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

from reference import GOLDEN, OF_BLOCKS, Check, ExpertsProblem, Problem
from steps.checks.cases import Case, Routing, routing
from steps.checks.verify import verify
from steps.contract import Machine, Size, Work
from steps.kernels.parts.activations.layouts import reading_of


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of one work's cases; the errors are those of the case with the most outputs."""

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
    """All works of a run. `broken` says why it ended early: nothing is sound after a CUDA error."""

    each: list[Outcome] = field(default_factory=list)
    broken: str | None = None

    @property
    def ok(self) -> bool:
        return self.broken is None and all(outcome.ok for outcome in self.each)


@lru_cache(maxsize=256)
def drawn(
    format_name: str,
    shape: Size,
    distribution: str,
    seed: int,
    input: str = "float32",
    routed: Routing | None = None,
    pruned: bool = False,
) -> Problem:
    """The problem of a case; kept, as every step solves the same ones."""
    given = (*shape, format_name, distribution, seed, input)
    if routed is not None:
        return ExpertsProblem(*given, *routed)
    return Problem(*given, pruned=pruned)


def check_works(
    works: Sequence[Work],
    cases_of: Callable[[Work], Sequence[Case]],
    machine: Callable[[int], Machine],
    report: Callable[[str], None] = lambda _: None,
    problem_of: Callable[[str], Problem] | None = None,
    dtype: str | None = None,
) -> Outcomes:
    """Every case of every work.

    cases_of: work -> its cases. machine: lane order -> where a case runs. report: is told of
    each work. problem_of: dtype of A -> the problem of all cases, where the weights are not drawn
    but of a file. dtype: of C, and of A where the step reads it; None for each step's own.
    """
    outcomes = Outcomes()
    for work in works:
        report(str(work))
        results = list(_results(work, cases_of(work), machine, problem_of, dtype))
        outcomes.each.append(_outcome(work, results))
        outcomes.broken = next((f"{work}: {r}" for _, r in results if isinstance(r, Lost)), None)
        if outcomes.broken:
            break
    return outcomes


class Lost(str):
    """The sentence of an error after which this process cannot use the GPU."""

    __slots__ = ()


Result = tuple[Case, "Check | str"]


def _results(
    work: Work,
    some: Iterable[Case],
    machine: Callable[[int], Machine],
    problem_of: Callable[[str], Problem] | None,
    dtype: str | None,
) -> Iterator[Result]:
    output = work.output(dtype)
    input = reading_of(work.step, output, work.family).source
    for case in some:
        bits = GOLDEN[work.format].q81 if case.distribution == "golden" else None
        try:
            if problem_of is not None:
                one = problem_of(input)
            else:
                one = drawn(
                    work.format, case.shape, case.distribution, case.seed, input,
                    routing(work.step, case.shape), work.step.accuracy == "pruned",
                )  # fmt: skip
            yield case, verify(work.step, work.family, one, machine(case.order), bits, output)
        except Exception as error:  # a kernel may fail in any way, and the other works go on
            sentence = " ".join(f"{type(error).__name__}: {error}".split())
            lost = fatal(error)
            yield case, Lost(sentence) if lost else sentence
            if lost:
                return


_DRIVER_ERRORS: Final = ("CudaAPIError", "CudaDriverError", "CudaRuntimeError", "CUDAError")


def fatal(error: BaseException) -> bool:
    """Whether an exception is the CUDA driver's and has destroyed the context.

    A bad address does: every later call then fails too. A refused launch or allocation does not.
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
    # Exact problems have no quantization error, so they say nothing about a format.
    telling = [pair for pair in checked if pair[0].distribution not in OF_BLOCKS]
    if not checked:
        return Outcome(work, len(results), failures=failures)
    _, largest = max(telling or checked, key=lambda pair: pair[0].shape[0] * pair[0].shape[1])
    return Outcome(work, len(results), largest.nmse_same_operands, largest.nmse_float, failures)
