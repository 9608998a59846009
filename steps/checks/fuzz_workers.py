"""Fuzzing on a GPU by several processes: hundreds of products for each kernel that is compiled.

A kernel takes seconds to compile and a product milliseconds. So each process has works of its own,
whose kernels no other compiles. It compiles for at most half of its time, and less where products
come too slowly for their number, and then draws cases of the works that it has kernels for. Kernels
that the cache has cost nothing. Weights are shared by `SHARED` cases, and float64 products are the
GPU's. A case that is wrong so is judged again by itself, by NumPy.

Processes take GPUs in turns. What one has there at a time is bounded by what cases may be
(`fuzz_cases.GPU_WEIGHTS` and others), less than 1 GB beside CUDA's own.

A process that ends before its time, or does not end at all, is told with the case that it was at.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from multiprocessing import connection, get_context
from time import monotonic
from typing import Any, Final

import numpy as np

from steps.checks import fuzz
from steps.checks.float64 import products_launch
from steps.checks.fuzz import Spent, Weights
from steps.checks.fuzz_cases import FuzzCase, dealt, sharing, works
from steps.compile import kernel_cache
from steps.compile.compiler import architecture, compiled, signature_of
from steps.product.choice import Choice, Request
from steps.registry import kernel_of

SHARED: Final = 32
"""Cases with the same weights, at most."""

DRAWN: Final = 96
"""Of so many that are drawn: for some there may be no kernel, and no time to compile it."""

COMPILING: Final = 0.5
"""The most of its time that a process compiles."""

AHEAD: Final = 0.1
"""The share of the time in which a process compiles however few products there are."""

LAST: Final = 15.0
"""Seconds before the end, from when on nothing is compiled."""

TOLD: Final = 0.5
"""Seconds after which a process says how many products there were since."""

LATE: Final = 60.0
"""Seconds after the end, after which a process that still runs is stopped."""

LONGEST: Final = 1000
"""Bytes of the line of a case."""

Tell = Callable[[str, list[str]], None]


@dataclass(slots=True)
class Totals:
    """products: how many were multiplied; kernels: digests of the code that did; spent: seconds of
    all processes, by what they did; wrong: cases that were."""

    products: int = 0
    kernels: set[str] = field(default_factory=set)
    spent: Counter[str] = field(default_factory=Counter)
    wrong: int = 0


@dataclass(frozen=True, slots=True)
class Goal:
    """When processes are done: at a time of `monotonic`, or after so many products of all together.
    left: how many are still to be made, a shared integer; None where there is no such number."""

    seconds: float
    until: float
    count: int = 0
    left: Any = None

    def take(self) -> bool:
        """Whether one more product is to be made, which counts from now on."""
        if self.left is None:
            return not self.is_over()
        with self.left.get_lock():
            if self.is_over():
                return False
            self.left.value -= 1
        return True

    def is_over(self) -> bool:
        return monotonic() >= self.until or (self.left is not None and self.left.value <= 0)

    def is_behind(self) -> bool:
        """Whether there are fewer products than there should be by now."""
        if self.left is None:
            return False
        gone = 1 - (self.until - LAST - monotonic()) / max(1.0, self.seconds - LAST)
        return bool(self.count - self.left.value < self.count * (gone - AHEAD) / (1 - AHEAD))


def gpus_of(cc: tuple[int, int]) -> list[int]:
    """The numbers of all GPUs of a compute capability."""
    from numba import cuda

    return [int(gpu.id) for gpu in cuda.gpus if tuple(gpu.compute_capability) == tuple(cc)]


def fuzz_on_gpus(
    numbers: Sequence[int],
    seed: int,
    seconds: float,
    count: int | None,
    processes: int,
    gpus: Sequence[int],
    cc: tuple[int, int],
    tell: Tell,
    report: Callable[[Totals], None] = lambda _: None,
) -> Totals:
    """Random products of some steps, by number. count: the most products, None for as many as there
    are in that time. tell: is called with the line of a wrong case and what is wrong. report: with
    what there is so far, twice a second."""
    works([kernel_of(number) for number in numbers], cc)  # or a UsageError, once
    some = np.zeros((1, 1, 1))  # for the kernel that all processes launch
    launch = products_launch(some[0], some, some)
    compiled(launch.kernel, signature_of(launch.args), architecture(cc))
    left = None if count is None else get_context("spawn").Value("q", count)
    goal = Goal(seconds, monotonic() + seconds, count or 0, left)
    arguments = (tuple(numbers), seed, processes, tuple(gpus), goal)
    return supervised(_work, arguments, processes, goal.until + LATE, tell, report)


def supervised(
    work: Callable[..., None],
    arguments: tuple[Any, ...],
    processes: int,
    latest: float,
    tell: Tell,
    report: Callable[[Totals], None],
) -> Totals:
    """Processes that run work(index, line, pipe, *arguments) each. line: shared bytes, where each
    writes what it is at; pipe: takes ("wrong", line, sentences), ("sum", products, kernels, spent)
    and at last ("end",)."""
    totals, spawn = Totals(), get_context("spawn")  # a process with a CUDA context cannot be forked
    running: dict[Any, tuple[Any, Any]] = {}

    def found(line: str, sentences: list[str]) -> None:
        totals.wrong += 1
        tell(line, sentences)

    def hear(pipe: Any) -> None:
        process, line = running[pipe]
        try:
            kind, *told = pipe.recv()
        except (EOFError, OSError):
            process.join(LATE)
            found(line.value.decode(), [f"a process {_ended(process.exitcode)} at this case"])
            del running[pipe]
            return
        if kind == "wrong":
            found(*told)
        elif kind == "sum":
            products, kernels, spent = told
            totals.products += products
            totals.kernels |= kernels
            totals.spent.update(spent)
        else:
            del running[pipe]

    every = []
    try:
        with _one_thread_each():
            for index in range(processes):
                line = spawn.RawArray("c", LONGEST)
                line.value = b"(before its first case)"
                pipe, end = spawn.Pipe(duplex=False)
                one = spawn.Process(target=work, args=(index, line, end, *arguments), daemon=True)
                one.start()
                end.close()  # so that the pipe ends with the process
                running[pipe] = one, line
                every.append(one)
        while running:
            for ready in connection.wait(list(running), TOLD):
                hear(ready)
            report(totals)
            if running and monotonic() > latest:
                for _, line in running.values():
                    found(line.value.decode(), [f"a process is still at this {LATE:.0f} s later"])
                break
    finally:
        for one in every:
            if one.is_alive():
                one.kill()
        for one in every:
            one.join()
    return totals


def _ended(code: int | None) -> str:
    if code is None or code >= 0:
        return f"ended with exit status {code}"
    return f"was ended by {signal.Signals(-code).name}"


class _one_thread_each:
    """Processes started meanwhile multiply in NumPy with a thread each: there is one for a core."""

    NAMES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")

    def __enter__(self) -> None:
        self._lacking = [name for name in self.NAMES if name not in os.environ]
        os.environ.update(dict.fromkeys(self._lacking, "1"))

    def __exit__(self, *_: object) -> None:
        for name in self._lacking:
            del os.environ[name]


# --- in a process of its own ----------------------------------------------------------------------


def _work(
    index: int,
    line: Any,
    pipe: Any,
    numbers: tuple[int, ...],
    seed: int,
    processes: int,
    gpus: tuple[int, ...],
    goal: Goal,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    from numba import cuda

    from steps.driver.machines import Gpu

    try:
        cuda.select_device(gpus[index % len(gpus)])
        machine = Gpu()
        some = works([kernel_of(number) for number in numbers], machine.cc)
        own = dealt(some, index, processes, seed)
        worker = Worker(machine, own, [seed, index], goal, line, pipe.send)
        try:
            worker.run()
        finally:
            worker.tell_sum()
    except BaseException as error:
        said = traceback.format_exception_only(error)[-1].strip()
        where = traceback.extract_tb(error.__traceback__)[-1]
        pipe.send(("wrong", line.value.decode(), [f"{said} ({where.filename}:{where.lineno})"]))
    pipe.send(("end",))
    os._exit(0)  # a context that is lost may not survive an orderly end


class Worker:
    """Draws cases of some works and multiplies them, until the goal is met or the GPU's context is
    lost."""

    def __init__(
        self,
        machine: Any,
        works: Sequence[FuzzCase],
        seed: Sequence[int],
        goal: Goal,
        line: Any,
        send: Callable[[tuple[Any, ...]], None],
    ) -> None:
        self._machine, self._goal, self._line, self._send = machine, goal, line, send
        self._works = works
        self._rng = np.random.default_rng(list(seed))
        self._spent, self._told, self._begin = Spent(), monotonic(), monotonic()
        self._compiled = 0.0
        self._known: dict[tuple[Any, Any], str] = {}
        self._missing: set[tuple[Any, Any]] = set()
        self._new: set[str] = set()
        self._open: list[FuzzCase] = []
        self._count, self._lost = 0, False

    def run(self) -> None:
        while not self._is_over():
            some = self._next_cases()
            weights = None
            for case in some:
                if self._lost or not self._goal.take():
                    break
                self._is_at(case)
                if weights is None:
                    with self._spent.on("drawing"):
                        weights = Weights(case, self._machine, on_machine=True)
                if not self._is_right(case, weights):
                    weights = None  # a kernel may have changed them
                if monotonic() - self._told > TOLD:
                    self.tell_sum()

    def tell_sum(self) -> None:
        """Say what came since the last time."""
        self._send(("sum", self._count, self._new, dict(self._spent)))
        self._count, self._new, self._told = 0, set(), monotonic()
        self._spent.clear()

    def _is_over(self) -> bool:
        return self._lost or self._goal.is_over()

    def _may_compile(self) -> bool:
        now = monotonic()
        if now >= self._goal.until - LAST or self._goal.is_behind():
            return False
        return self._compiled <= COMPILING * (now - self._begin)

    def _is_at(self, case: FuzzCase) -> None:
        self._line.value = str(case).encode()[: LONGEST - 1]

    def _next_cases(self) -> list[FuzzCase]:
        """Cases that can run and share weights: of another work, or while there is no time to
        compile of one that has kernels."""
        some = self._open if self._open and not self._may_compile() else self._works
        work = some[int(self._rng.integers(len(some)))]
        found: list[FuzzCase] = []
        for case in sharing(self._rng, work, self._machine.cc is None, DRAWN):
            if len(found) < SHARED and not self._is_over() and self._can_run(case, work):
                found.append(case)
        return found

    def _can_run(self, case: FuzzCase, work: FuzzCase) -> bool:
        """Whether there are kernels for a case: known, kept on disk, or compiled now. At the first
        case of a work they are."""
        if self._machine.cc is None:
            return True
        self._is_at(case)
        with self._spent.on("finding kernels"):
            request = Request(case.format, case.m, case.n, case.k, case.a, case.c, step=case.step)
            launches = Choice.of(case.kernel, case.family, request).launches()
            keys = [(one.kernel, signature_of(one.args)) for one in launches]
            arch = architecture(self._machine.cc)
            for key in keys:
                if key in self._known or key in self._missing:
                    continue
                if code := kernel_cache.find(*key, arch):
                    self._know(key, code)
                else:  # asking takes long where the answer is no
                    self._missing.add(key)
        missing = [key for key in keys if key not in self._known]
        if missing and self._open and not self._may_compile():
            return False
        for key in missing:
            start = monotonic()
            with self._spent.on("compiling"):
                self._know(key, compiled(*key, arch))
            self._compiled += monotonic() - start
        if work not in self._open:
            self._open.append(work)
        return True

    def _know(self, key: tuple[Any, Any], code: Any) -> None:
        self._known[key] = digest = blake2b(code.cubin, digest_size=8).hexdigest()
        self._new.add(digest)

    def _is_right(self, case: FuzzCase, weights: Weights) -> bool:
        self._count += 1
        found, self._lost = fuzz.judged(case, self._machine, weights, self._spent)
        if found and not self._lost:
            again, self._lost = fuzz.judged(case, self._machine)
            found = again or [*found, "(judged again, by NumPy and by itself, it is right)"]
        if found:
            self._send(("wrong", str(case), found))
        return not found
