"""Kernels compiled before a long run begins, by all cores.

Compiling one takes seconds, five sixths of them in Numba's front end, which is Python and uses one
core; a bench of five formats launches some 250 kernels. So other processes compile those that the
cache (`steps.compile.kernel_cache`) does not have, keep them there and hand them over.

A process that compiles makes the launch anew from a recipe, in a dry run, and does not touch the
GPU: it is told the architecture, the number of SMs and their shared memory. A kernel that fails to
compile there is compiled where it is launched, as without this file.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any, Final

from steps.compile import kernel_cache
from steps.compile.compiler import architecture, compile_kernel, signature_of
from steps.compile.dry_run import Recipe
from steps.compile.kernel_cache import CompiledKernel
from steps.contract import multiprocessors, pretend, shared_memory

FEWEST: Final = 8
"""The least number of kernels for which other processes, which take seconds to start, save time."""


def compile_ahead(
    wanted: Iterable[Recipe],
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
        jobs = {pool.submit(_compiled, *recipe): key for key, recipe in found.items()}
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
    wanted: Iterable[Recipe], cc: tuple[int, int]
) -> dict[tuple[Any, Any], tuple[Recipe, int]]:
    """What is not in the cache: (kernel, signature) -> (recipe, index among its launches).

    Recipes that raise are left out: whoever launches them gets the error.
    """
    found: dict[tuple[Any, Any], tuple[Recipe, int]] = {}
    for recipe in wanted:
        if not recipe.runs_on(cc):
            continue
        try:
            launches = recipe.launches()
        except Exception:  # of any type
            continue
        for i, launch in enumerate(launches):
            found.setdefault((launch.kernel, signature_of(launch.args)), (recipe, i))
    arch = architecture(cc)
    return {key: recipe for key, recipe in found.items() if not kernel_cache.find(*key, arch)}


# --- in a process of its own ----------------------------------------------------------------------

_arch = ""


def _begin(arch: str, sms: int, shared_bytes: int) -> None:
    global _arch
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks for kernels
    _arch = arch
    pretend(sms, shared_bytes)


def _compiled(recipe: Recipe, index: int) -> CompiledKernel:
    launch = recipe.launches()[index]
    return compile_kernel(launch.kernel, signature_of(launch.args), _arch)
