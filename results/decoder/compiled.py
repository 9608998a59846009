"""Kernels of relocatable plans compiled ahead of their use, each in a process of its own.

Numba compiles in Python, one kernel after another, some seconds each; a model that decodes and
prefills wants some twenty. So other processes lay the same plans out on the same GPU, and hand what
they compiled back in the form in which Numba's cache would write it to a file:

    made = compiled(tasks, jobs=8)              # a task: the arguments of a Relocatable
    for task, kernels in zip(tasks, made):
        with offered(kernels):                  # whatever is loaded now finds its machine code
            ...                                 # lay the plan out in this process

This leans on how numba-cuda 0.30.4 stores kernels, as offline compilation does on how it compiles.
"""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

from numba.cuda import serialize
from numba.cuda.dispatcher import CUDADispatcher, _Kernel

from steps import launcher
from steps.instructions.compile import signature_of
from steps.relocatable import Place, Relocatable
from steps.step import Launch, Shape

Task = tuple[str, Shape, dict[str, tuple[Place, ...]], str, bool]
"""What a `Relocatable` is made of, its machine left out: format, shape, the packings that are
offered, accuracy, and whether C may be float16."""


def compiled(tasks: Sequence[Task], jobs: int) -> list[list[bytes]]:
    """The kernels of each task in the order in which they are loaded, compiled by `jobs` processes
    on the current GPU."""
    context = multiprocessing.get_context("spawn")  # a process that uses CUDA cannot be forked
    with ProcessPoolExecutor(min(jobs, len(tasks)) or 1, context) as pool:
        return list(pool.map(_kernels_of, tasks))


def _kernels_of(task: Task) -> list[bytes]:
    from steps.machines import Gpu

    format_name, shape, places, accuracy, half = task
    made = Relocatable(format_name, shape, places, Gpu(), accuracy, half)
    return [stored(one.source.kernel, signature_of(one.source.args)) for one in made.loaded]


@contextmanager
def offered(kernels: Sequence[bytes]) -> Iterator[None]:
    """What is loaded meanwhile, in this order, is not compiled."""
    left, load = iter(kernels), launcher.load

    def loaded(source: Launch) -> launcher.Loaded:
        offer(source.kernel, signature_of(source.args), next(left))
        return load(source)

    with mock.patch.object(launcher, "load", loaded):
        yield


def stored(kernel: CUDADispatcher, signature: tuple[Any, ...]) -> bytes:
    """A kernel compiled for these types, machine code and all that a launch needs."""
    data: bytes = serialize.dumps(kernel.compile(signature)._reduce_states())
    return data


def offer(kernel: CUDADispatcher, signature: tuple[Any, ...], data: bytes) -> None:
    """Give a kernel what `stored` made of the same one elsewhere, unless it is compiled already."""
    if signature not in kernel.overloads:
        kernel.add_overload(_Kernel._rebuild(**pickle.loads(data)), signature)
