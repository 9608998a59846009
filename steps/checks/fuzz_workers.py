"""Fuzzing on a GPU by several processes: hundreds of products for each kernel that is compiled.

A kernel takes seconds to compile and a product milliseconds. So each process has works of its own,
whose kernels no other compiles. It compiles for at most half of its time, and meanwhile draws cases
of the works that it has kernels for. Weights are shared by `SHARED` cases. A case that is wrong so
is judged again by itself.

Processes take GPUs in turns. What one has there at a time is bounded by what cases may be
(`fuzz_cases.GPU_WEIGHTS` and others), less than 1 GB beside CUDA's own.

Of several processes one in `EXPERTS` multiplies mixtures of experts (`steps.checks.fuzz_experts`),
where no steps were named: its works are requests.

A process that ends before its time, or does not end at all, is told with the case that it was at.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import connection, get_context
from time import monotonic
from typing import Any, Final

import numpy as np

from steps.checks import fuzz
from steps.checks.fuzz import Weights
from steps.checks.fuzz_cases import FuzzCase, dealt, sharing, works
from steps.checks.fuzz_experts import ExpertsCase, ExpertsWeights
from steps.checks.fuzz_experts import sharing as sharing_experts
from steps.compile.compiler import architecture, compiled, signature_of
from steps.product.choice import Choice, Request
from steps.registry import kernel_of, ladder

SHARED: Final = 32  # cases with the same weights, at most
DRAWN: Final = 96  # of so many: for some there may be no kernel, and no time to compile it
LAST: Final = 15.0  # seconds before the end, from when on nothing is compiled
EXPERTS: Final = 4  # see the module; with fewer processes there are no experts
REQUEST: Final = 40  # seconds that a process has for a request of experts, half of them to compile
HEARD: Final = 0.5  # seconds after which there is a report, whatever came
LATE: Final = 60.0  # seconds after the end, after which a process that still runs is stopped
LONGEST: Final = 1000  # bytes of the line of a case
Tell = Callable[[str, list[str]], None]


@dataclass(slots=True)
class Totals:
    """products: how many were multiplied; works: of which; wrong: cases that were."""

    products: int = 0
    works: set[str] = field(default_factory=set)
    wrong: int = 0


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
    what there is so far, twice a second or oftener."""
    works([kernel_of(number) for number in numbers], cc)  # or a UsageError, once
    until = monotonic() + seconds
    arguments = (tuple(numbers), seed, processes, tuple(gpus), until, count)
    return supervised(_work, arguments, processes, until + LATE, tell, report)


def supervised(
    work: Callable[..., None],
    arguments: tuple[Any, ...],
    processes: int,
    latest: float,
    tell: Tell,
    report: Callable[[Totals], None],
) -> Totals:
    """Processes that run work(index, line, pipe, *arguments) each. line: shared bytes, where each
    writes what it is at; pipe: takes ("product", work) and ("wrong", line, sentences)."""
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
            if process.exitcode != 0:
                found(line.value.decode(), [f"a process {_ended(process.exitcode)} at this case"])
            del running[pipe]
            return
        if kind == "wrong":
            found(*told)
        else:
            totals.products += 1
            totals.works |= {*told}

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
            for ready in connection.wait(list(running), HEARD):
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


@contextmanager
def _one_thread_each() -> Any:
    """Processes started meanwhile multiply in NumPy with a thread each: there is one for a core."""
    names = "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"
    lacking = [name for name in names if name not in os.environ]
    os.environ.update(dict.fromkeys(lacking, "1"))
    try:
        yield
    finally:
        for name in lacking:
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
    until: float,
    count: int | None,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    from numba import cuda

    from steps.driver.machines import Gpu

    try:
        cuda.select_device(gpus[index % len(gpus)])
        machine = Gpu()
        own: Sequence[FuzzCase | ExpertsCase]
        if index % EXPERTS == EXPERTS - 1 and len(numbers) == len(ladder()):
            rng = np.random.default_rng([seed, index])
            count_of_works = 1 + round((until - monotonic()) / REQUEST)
            own = [one for _ in range(count_of_works) for one in sharing_experts(rng, False, 1)]
        else:
            some = works([kernel_of(number) for number in numbers], machine.cc)
            own = dealt(some, index, processes, seed)
        most = None if count is None else count // processes + (index < count % processes)
        multiply(machine, own, [seed, index], until, most, line, pipe.send)
    except BaseException as error:
        said = traceback.format_exception_only(error)[-1].strip()
        where = traceback.extract_tb(error.__traceback__)[-1]
        pipe.send(("wrong", line.value.decode(), [f"{said} ({where.filename}:{where.lineno})"]))
    os._exit(0)  # a context that is lost may not survive an orderly end


class Kernels:
    """Those that a process has, on a GPU of a compute capability; None: in the simulator."""

    def __init__(self, cc: tuple[int, int] | None, until: float) -> None:
        self._cc, self._until, self._begin = cc, until, monotonic()
        self._known: set[Any] = set()
        self._compiling = 0.0

    def may_compile(self) -> bool:
        now = monotonic()
        return now < self._until - LAST and self._compiling <= (now - self._begin) / 2

    def has(self, case: FuzzCase | ExpertsCase, new: bool) -> bool:
        """Whether a case can run: its kernels are known, or, if they may be new, there is time to
        compile them. Those that are kept on disk take next to none."""
        if self._cc is None or isinstance(case, ExpertsCase):
            return True
        request = Request(case.format, case.m, case.n, case.k, case.a, case.c, step=case.step)
        launches = Choice.of(case.kernel, case.family, request).launches()
        keys = {(one.kernel, signature_of(one.args)) for one in launches}
        missing = keys - self._known
        if missing and self._known and not (new and self.may_compile()):
            return False
        start = monotonic()
        for key in missing:
            compiled(*key, architecture(self._cc))
        self._known |= keys
        self._compiling += monotonic() - start
        return True


def multiply(
    machine: Any,
    some: Sequence[FuzzCase | ExpertsCase],
    seed: Sequence[int],
    until: float,
    most: int | None,
    line: Any,
    send: Callable[[tuple[Any, ...]], None],
) -> None:
    """Draws cases of some works and multiplies them, until a time of `monotonic`, up to `most`
    products, or until the GPU's context is lost."""
    rng, made, lost = np.random.default_rng(list(seed)), 0, False
    kernels = Kernels(machine.cc, until)
    ready: dict[FuzzCase | ExpertsCase, None] = {}  # works that have some

    def is_over() -> bool:
        return lost or made == most or monotonic() >= until

    while not is_over():
        open_works = list(ready) if ready and not kernels.may_compile() else some
        work, weights = open_works[int(rng.integers(len(open_works)))], None
        cases = _sharing(rng, work, machine.cc is None)
        done = 0  # the first one's kernels alone are compiled, so that many works have some
        for case in cases:
            if is_over() or done == SHARED:
                break
            if not kernels.has(case, new=not done):
                continue
            done += 1
            ready[work] = None
            line.value = str(case).encode()[: LONGEST - 1]
            weights = weights or _weights(case, machine)
            found, lost = fuzz.judged(case, machine, weights)
            if found and not lost:
                weights = None  # a kernel may have changed them
                again, lost = fuzz.judged(case, machine)
                found = again or [*found, "(judged again, by itself, it is right)"]
            if found:
                send(("wrong", str(case), found))
            send(("product", str(work)))
            made += 1


def _sharing(rng: np.random.Generator, work: Any, simulated: bool) -> Sequence[Any]:
    if isinstance(work, ExpertsCase):
        return work.others(rng, simulated, SHARED)
    return sharing(rng, work, simulated, DRAWN)


def _weights(case: Any, machine: Any) -> Any:
    if isinstance(case, ExpertsCase):
        return ExpertsWeights(case, machine)
    return Weights(case, machine)
