"""Kernels compiled by other processes, on all cores.

Compiling one takes seconds, four fifths of them in Numba's front end, which is Python and uses one
core. So other processes (`steps.compile.other_processes`) compile those that the cache
(`steps.compile.kernel_cache`) does not have, keep them there and hand them over:

    compile_ahead       before a long run begins, such as a bench, which launches some 250 kernels
    compile_meanwhile   while this process goes on; it waits where it launches one that is not there

A kernel that fails to compile there is compiled where it is launched, as without this file.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import as_completed
from typing import Any, Final

from steps.compile import kernel_cache
from steps.compile.compiler import architecture, signature_of
from steps.compile.dry_run import Recipe
from steps.compile.other_processes import Compilers
from steps.contract import multiprocessors, shared_memory

FEWEST: Final = 8
"""The least number of kernels for which other processes, which take seconds to start, save time."""

FEWEST_MEANWHILE: Final = 2
"""The same where this process would compile one after another."""

VARIABLE: Final = "LADDER_PROCESSES"
MOST_MEANWHILE: Final = 16
"""Processes: more than a model's first products have kernels."""


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
    found = missing_kernels(wanted, gpu.cc)
    processes = min(processes or len(os.sched_getaffinity(0)), len(found))
    if len(found) < fewest or processes < 2:
        return 0
    count, why, arch = 0, "", architecture(gpu.cc)
    with Compilers(processes, arch, multiprocessors(), shared_memory()) as compilers:
        jobs = {compilers.submit(*recipe): key for key, recipe in found.items()}
        for job in as_completed(jobs):
            try:
                kernel_cache.store(*jobs[job], arch, job.result())
                count += 1
            except RuntimeError as error:  # of the other process
                why = str(error)
            report(count, len(found))
    if why:
        missing, reason = len(found) - count, why
        say(f"{missing} kernels were not compiled by other processes: {reason}")
    return count


def compile_meanwhile(wanted: Iterable[Recipe], gpu: Any) -> int:
    """Let other processes compile the kernels of some launches for the current GPU, in their order,
    and return at once; how many they were asked for. `compiler.compiled` waits for them.

    They are as many as cores, at most `MOST_MEANWHILE`. The environment variable LADDER_PROCESSES
    says another number, of which 1 is none. They end when they have had nothing to do for a minute.
    """
    found = {
        key: recipe
        for key, recipe in missing_kernels(wanted, gpu.cc).items()
        if not kernel_cache.is_expected(*key, architecture(gpu.cc))
    }
    with _asking:
        compilers = _running(len(found), architecture(gpu.cc))
        if compilers is None:
            return 0
        for key, recipe in found.items():
            kernel_cache.expect(*key, compilers.arch, compilers.submit(*recipe))
    return len(found)


def start(gpu: Any) -> None:
    """Start the processes of `compile_meanwhile`, which will be asked for kernels soon."""
    with _asking:
        _running(FEWEST_MEANWHILE, architecture(gpu.cc))


_asking = threading.Lock()
_compilers: Compilers | None = None


def _running(kernels: int, arch: str) -> Compilers | None:
    """Those that compile for an architecture, started where there are enough kernels for them."""
    global _compilers
    if _compilers is not None and not _compilers.ended and _compilers.arch == arch:
        return _compilers
    processes = _processes()
    if kernels < FEWEST_MEANWHILE or processes < 2 or getattr(sys, "frozen", False):
        return None
    try:
        _compilers = Compilers(processes, arch, multiprocessors(), shared_memory())
    except OSError:  # where no process may be started, kernels are compiled here
        return None
    return _compilers


def _processes() -> int:
    asked = os.environ.get(VARIABLE)
    if asked is None:
        return min(len(os.sched_getaffinity(0)), MOST_MEANWHILE)
    if not asked.isdecimal():
        raise ValueError(f"{VARIABLE} is {asked!r}: it must be a number of processes, 1 for none")
    return int(asked)


def _forked() -> None:
    """The processes belong to the one that this was forked from."""
    global _asking, _compilers
    _asking, _compilers = threading.Lock(), None
    kernel_cache.expect_nothing()


os.register_at_fork(after_in_child=_forked)


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
