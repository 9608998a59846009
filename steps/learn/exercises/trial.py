"""One attempt: a step on one problem in the simulator, and all that can be said of its result."""

from __future__ import annotations

import linecache
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any, Final

import numpy as np

from reference import GOLDEN, Bfloats, Check, Halves, Problem, check
from steps import contract
from steps.checks.cases import Case, routing
from steps.checks.run import drawn
from steps.checks.verify import Prepared, multiply, operands, prepare, require_unchanged
from steps.contract import Family, Step, ceil_div, scheme
from steps.driver.machines import Simulator
from steps.kernels.parts.activations.layouts import inputs
from steps.learn.exercises.suspects import Terms
from steps.simulator.errors import SimulatorError

Array = np.ndarray[Any, np.dtype[Any]]

UNWRITTEN: Final = {4: 0x7F85EED5, 2: 0x7D55}
QUIET: Final = {4: 1 << 22, 2: 1 << 9}
"""By the bytes of a value: the signalling NaN that C is filled with, and the bit that makes it
quiet. What still has it was never stored to; a sum with it is the quiet NaN, so a kernel that
computes C += is noticed."""

PATIENCE: Final = 5.0
"""Seconds of processor time after which a trial of one tile is taken to run for ever; of more, see
`patience`."""

PRODUCTS: Final = 200_000  # of whole tiles, that the simulator is sure to do in a second
_WHERE: Final = re.compile(
    r"(?P<what>.*) \[block \((?P<block>[^)]*)\), thread \((?P<thread>[^)]*)\), .*\]", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Subject:
    """What is tried: a family and a format of a step on one problem. `sms`: of the GPU that the
    launch is sized for, where it is not the usual one: few of them have much work each."""

    family: Family
    format: str
    case: Case
    sms: int | None = None

    def __str__(self) -> str:
        m, n, k = self.case.shape
        what = "one block, by hand" if self.case.distribution == "golden" else ""
        kinds = {"integer": "small integers", "extreme": "codes and activations at their most"}
        what = what or kinds.get(self.case.distribution, "floats")
        what += f", on {self.sms} SM" if self.sms else ""
        return f"{scheme(self.format, self.family)} {self.format}, M={m} N={n} K={k} ({what})"

    def problem_for(self, step: Step) -> Problem:
        """With A of the step's dtype."""
        source, case = inputs(step, self.family)[0], self.case
        return drawn(
            self.format, case.shape, case.distribution, case.seed, source,
            routing(step, case.shape), step.accuracy == "pruned",
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fault:
    """Why there is no result. `kind`: the class of the error; `what`: its sentence; `line`: the
    innermost line of the file on the way to it, 0 where there is none; `block`, `thread`: whose
    fault, as the simulator writes them; `values`: the whole numbers that names of that line's
    function held."""

    kind: str
    what: str
    line: int
    block: str = ""
    thread: str = ""
    values: Mapping[str, int] = field(default_factory=dict)


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

    def placed(self, text: str) -> str:
        """A sentence of the simulator, with its lines of the file as `line` has them."""
        places = re.compile(rf"{re.escape(self.path.name)}:(\d+) `[^`]*`")
        return places.sub(lambda found: self.line(int(found[1])), text)

    def place(self, fault: Fault) -> str:
        """ "It happens at file:line `text`, in thread (1, 0, 0) of block (0, 0, 0)."; "" where no
        line of the file took part."""
        lanes = f", in thread ({fault.thread}) of block ({fault.block})" if fault.thread else ""
        return f"It happens at {self.line(fault.line)}{lanes}." if fault.line else ""


@dataclass(frozen=True)
class Values:
    """A result: `c` float64[M, N], NaN where nothing was stored; `unwritten` and `added_to`, masks;
    `found`, the verdict of `reference.check`; `terms` of the operands, None for weights that are
    not the blocks'; `rounding`, of the terms' magnitudes: how near a value must be to one that a
    mistake would give."""

    c: Array
    unwritten: Array
    added_to: Array
    found: Check
    terms: Terms | None
    rounding: float

    @cached_property
    def expected(self) -> Array:
        """[M, N], where there are terms."""
        assert self.terms is not None
        return self.terms.product()

    @cached_property
    def tolerance(self) -> Array:
        """[M, N], where there are terms."""
        assert self.terms is not None
        return self.rounding * self.terms.size()

    @cached_property
    def bad(self) -> Array:
        """The outputs that are wrong."""
        return np.abs(self.c - self.expected) > self.tolerance


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of it: a fault, or values."""

    subject: Subject
    result: Fault | Values

    @property
    def ok(self) -> bool:
        return isinstance(self.result, Values) and self.result.found.ok


def patience(case: Case) -> float:
    """Seconds of processor time after which a trial is taken to run for ever; right ones take a
    quarter at most."""
    m, n, k = case.shape
    return PATIENCE + (ceil_div(m, 32) * ceil_div(n, 32) * 1024 * k) / PRODUCTS


def attempt(step: Step, subject: Subject, path: Path) -> Trial:
    """Run the step of the file at `path` on the subject."""
    problem, machine = subject.problem_for(step), Simulator(subject.case.order)
    try:
        with limit(patience(subject.case)):
            prepared = prepared_for(step, subject, machine)
            size = prepared.out.itemsize
            out = prepared.out.view(f"u{size}")
            out[...] = UNWRITTEN[size]
            multiply(prepared, machine)
            packed = step.pack(problem.blocks)
            require_unchanged(prepared, machine, step, problem.tokens, packed, problem.ids)
    except Exception as error:  # whatever a beginner's kernel or launch does
        return Trial(subject, fault_of(error, path))
    used = operands(prepared, machine)
    unwritten = out == UNWRITTEN[size]
    c = np.where(unwritten, np.array(np.nan, prepared.out.dtype), prepared.out)
    # C is float16, or weights and activations are where the problem is not exact; else float32 sums
    rounded = size == 2 or (isinstance(used, Halves | Bfloats) and not problem.exact)
    values = Values(
        c=c.astype(np.float64),
        unwritten=unwritten,
        added_to=out == UNWRITTEN[size] | QUIET[size],
        found=check(c, problem, subject.family, used),
        terms=Terms.of(problem, used),
        rounding=2e-3 if rounded else 1e-5,
    )
    return Trial(subject, values)


def prepared_for(step: Step, subject: Subject, machine: Any) -> Prepared:
    """Its operands and launch."""
    problem = subject.problem_for(step)
    golden = subject.case.distribution == "golden"
    bits = GOLDEN[subject.format].q81 if golden else None
    given = problem.format, problem.tokens, problem.blocks, machine, bits
    with sized_for(subject.sms):
        return prepare(step, subject.family, *given, ids=problem.ids)


@contextmanager
def sized_for(sms: int | None) -> Iterator[None]:
    """Launches are made for a GPU of so many SMs. (A contract cannot be told to stop pretending:
    processes that compile never do.)"""
    if sms is None:
        yield
        return
    before, shared = contract._pretended, contract.shared_memory()
    contract.pretend(sms, shared)
    try:
        yield
    finally:
        contract._pretended = before
        contract.multiprocessors.cache_clear()
        contract.shared_memory.cache_clear()


def fault_of(error: Exception, path: Path) -> Fault:
    """An error of the simulator, or of Python on the host."""
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    line = line_of(cause, path) or line_of(error, path)
    text = str(error)
    where = _WHERE.fullmatch(text)
    kind = type(cause).__name__
    if not isinstance(error, SimulatorError) or where is None:
        return Fault(kind, text.removeprefix(f"{kind}: "), line or _line_in(text, path))
    what = where["what"].removeprefix(f"{kind}: ")
    line = line or _line_in(text, path)
    return Fault(kind, what, line, where["block"], where["thread"], _values_in(cause, path))


def line_of(error: BaseException, path: Path) -> int:
    """The innermost line of the file in a traceback."""
    line, step = 0, error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename == str(path):
            line = step.tb_lineno
        step = step.tb_next
    return line


def _values_in(error: BaseException, path: Path) -> dict[str, int]:
    """The whole numbers that names hold in the innermost function of the file in a traceback."""
    found: dict[str, int] = {}
    step = error.__traceback__
    while step is not None:
        frame = step.tb_frame
        if frame.f_code.co_filename == str(path):
            named = {name: frame.f_globals.get(name) for name in frame.f_code.co_names}
            both = named | frame.f_locals
            found = {name: int(x) for name, x in both.items() if isinstance(x, int | np.integer)}
        step = step.tb_next
    return found


def _line_in(text: str, path: Path) -> int:
    """The first line of the file that a sentence names."""
    found = re.search(rf"{re.escape(path.name)}:(\d+)", text)
    return int(found[1]) if found else 0


class Endless(SimulatorError):
    """A kernel that runs on and on."""


@contextmanager
def limit(seconds: float, waits: bool = False) -> Iterator[None]:
    """Endless in whatever has taken so much processor time: in the lane that does; or so long,
    where it may wait for something. (Only a main thread has signals, and not on every system.)"""
    if threading.current_thread() is not threading.main_thread() or not hasattr(
        signal, "setitimer"
    ):
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise Endless(f"still running after {seconds:.0f} seconds")

    which = signal.ITIMER_REAL if waits else signal.ITIMER_PROF
    number = signal.SIGALRM if waits else signal.SIGPROF
    before = signal.signal(number, stop)
    signal.setitimer(which, seconds)
    try:
        yield
    finally:
        signal.setitimer(which, 0)
        signal.signal(number, before)
