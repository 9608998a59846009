"""Kernels compiled before a long run begins, by all cores.

Compiling one takes seconds, five sixths of them in Numba's front end, which is Python and uses one
core; a bench of five formats launches some 250 kernels. So other processes compile those that the
cache (`steps.compile.kernel_cache`) does not have, keep them there and hand them over.

A process that compiles makes the launch anew, in a dry run, from a recipe, and does not touch the
GPU: it is told what launches depend on. A kernel that fails to compile there is compiled where it
is launched, as without this file.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any, Final

from steps.compile import kernel_cache
from steps.compile.compiler import architecture, compile_kernel, signature_of
from steps.compile.dry_run import launches, packed_types
from steps.compile.kernel_cache import CompiledKernel
from steps.compile.of_arrays import OfArrays
from steps.contract import (
    Launch,
    Size,
    Work,
    array_dtype,
    multiprocessors,
    pretend,
    shared_memory,
)
from steps.registry import find

FEWEST: Final = 8
"""Kernels from which on other processes, which take seconds to start, save time."""

Wanted = (
    tuple[Work, Size, str] | tuple[Work, Size, str, str] | tuple[Work, Size, str, str, str | None]
)
"""(work, (M, N, K), dtype of C, how A comes, dtype of a bias): A as
`steps.compile.dry_run.launches` has it, float32 if it is left out; a bias only for a step that adds
one."""


Recipe = tuple[int, Any, str, Size, str, str, str | None, int] | OfArrays
"""(step, family, format, (M, N, K), dtype of C, how A comes, dtype of a bias, index of the launch):
what another process needs to make a kernel."""


def compile_ahead(
    wanted: Iterable[Wanted | OfArrays],
    gpu: Any,
    say: Callable[[str], None],
    processes: int | None = None,
    *,
    fewest: int = FEWEST,
    report: Callable[[int, int], None] = lambda done, of: None,
) -> int:
    """Compile the kernels of some launches for a GPU (its `cc`); how many were compiled.

    processes : how many compile; by default one for each core.
    fewest    : fewer kernels than this are left to whoever launches them.
    say       : is called with a sentence about those that failed.
    report    : is called with how many kernels are compiled, of how many.
    """
    arch = architecture(gpu.cc)
    found = missing_kernels(wanted, gpu.cc)
    processes = min(processes or len(os.sched_getaffinity(0)), len(found))
    if len(found) < fewest or processes < 2:
        return 0
    facts = arch, multiprocessors(), shared_memory()
    spawn = get_context("spawn")  # a process with a CUDA context must not be forked
    count, why = 0, ""
    with ProcessPoolExecutor(processes, spawn, _begin, facts) as pool:
        jobs = {pool.submit(_compiled, recipe): key for key, recipe in found.items()}
        try:
            for job in as_completed(jobs):
                try:
                    kernel_cache.store(*jobs[job], arch, job.result())
                    count += 1
                except Exception as error:  # in the other process, of any type
                    why = f"{type(error).__name__}: {error}"
                report(count, len(found))
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if why:
        missing, reason = len(found) - count, " ".join(why.split())
        say(f"{missing} kernels were not compiled by other processes: {reason}")
    return count


def missing_kernels(
    wanted: Iterable[Wanted | OfArrays], cc: tuple[int, int]
) -> dict[tuple[Any, Any], Recipe]:
    """What is not in the cache, each kernel and signature once, and how another process makes it.

    Products that cannot be launched are left out: it is reported where they are.
    """
    found: dict[tuple[Any, Any], Recipe] = {}
    for one in wanted:
        if isinstance(one, OfArrays):
            launch = one.launch()
            found.setdefault((launch.kernel, signature_of(launch.args)), one)
            continue
        work, size, output, *rest = one
        input = (rest[0] if rest else None) or "float32"
        bias = rest[1] if len(rest) == 2 else None
        if work.step.supports(work.format, work.family, cc, output):
            continue
        try:
            launches = list(_launches(work, size, output, input, bias))
        except Exception:  # of any type
            continue
        for i, (launch, signature) in enumerate(launches):
            of_step = work.step.number, work.family, work.format
            recipe = (*of_step, size, output, input, bias, i)
            found.setdefault((launch.kernel, signature), recipe)
    arch = architecture(cc)
    return {key: recipe for key, recipe in found.items() if not kernel_cache.find(*key, arch)}


def _launches(
    work: Work, size: Size, output: str, input: str = "float32", bias: str | None = None
) -> Iterator[tuple[Launch, Any]]:
    """Each launch of a product, made in a dry run, and what its kernel is compiled for."""
    weights = packed_types(work.step.pack, work.format)
    if bias:
        weights = (*weights, ((size[1],), array_dtype(bias)))
    before, own = launches(work, size, output=output, input=input, weights=weights)
    for launch in (*before, own):
        yield launch, signature_of(launch.args)


# --- in a process of its own ----------------------------------------------------------------------

_arch = ""


def _begin(arch: str, sms: int, shared_bytes: int) -> None:
    global _arch
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks for kernels
    _arch = arch
    pretend(sms, shared_bytes)


def _compiled(recipe: Recipe) -> CompiledKernel:
    if isinstance(recipe, OfArrays):
        launch = recipe.launch()
        return compile_kernel(launch.kernel, signature_of(launch.args), _arch)
    number, family, format_name, size, output, input, bias, index = recipe
    work = Work(find(number), family, format_name)
    launch, signature = list(_launches(work, size, output, input, bias))[index]
    return compile_kernel(launch.kernel, signature, _arch)
