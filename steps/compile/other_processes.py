"""Processes that compile kernels for this one: one that imports Numba, and those that it forks.

    with Compilers(processes=4, arch="sm_90a", sms=132, shared_bytes=232448) as compilers:
        code = compilers.submit(recipe, index).result()

A process with a CUDA context must not be forked, and one that `multiprocessing` spawns runs the
caller's main module again, which a call of a layer must not do. So the first is begun by a command
of its own. It imports all kernels and fills Numba's tables once; those that it forks begin with
both, within milliseconds.

A process that compiles makes a launch anew from a recipe, in a dry run, and does not touch the GPU:
it is told the architecture, the number of SMs and their shared memory.
"""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import active_children, get_context
from multiprocessing.connection import Connection, Pipe
from typing import Any, Final

from steps.compile.compiler import compile_kernel, fill_tables, signature_of
from steps.compile.dry_run import Recipe
from steps.compile.kernel_cache import CompiledKernel
from steps.contract import pretend

IDLE_SECONDS: Final = 60
"""After which processes end that nobody asks for kernels."""

_BEGIN: Final = (
    "import sys; sys.path[:] = {path!r}; from steps.compile import other_processes; "
    "other_processes.serve({fd}, {facts!r})"
)


class Compilers:
    """Some processes that compile for a GPU of an architecture, with so many SMs and so many bytes
    of shared memory. OSError where they cannot be started. They end with this process, at the end
    of a `with`, or when nobody has asked them for `IDLE_SECONDS`."""

    def __init__(self, processes: int, arch: str, sms: int, shared_bytes: int) -> None:
        self._connection, theirs = Pipe()
        self._waiting: dict[int, Future[CompiledKernel]] = {}
        self._changing, self._count, self.ended = threading.Lock(), 0, False
        self.arch, facts = arch, (processes, arch, sms, shared_bytes)
        command = _BEGIN.format(path=sys.path, fd=theirs.fileno(), facts=facts)
        # A group of their own: Ctrl-C is for the process that asks for kernels.
        self._process = subprocess.Popen(
            [sys.executable, "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self._receiving = threading.Thread(target=self._receive, daemon=True)
        self._receiving.start()

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def submit(self, recipe: Recipe, index: int) -> Future[CompiledKernel]:
        """Ask for the kernel of a recipe's launch `index`. Those asked for first are compiled
        first. The result raises what the compiler raised, in a RuntimeError of one sentence."""
        future: Future[CompiledKernel] = Future()
        with self._changing:
            self._count += 1
            try:
                job = self._count, pickle.dumps((recipe, index))
                if self.ended:
                    raise BrokenPipeError("the processes that compile have ended")
                self._waiting[self._count] = future
                self._connection.send(job)
            except Exception as error:  # such as a recipe that cannot be pickled
                self._waiting.pop(self._count, None)
                future.set_exception(RuntimeError(_sentence(error)))
        return future

    def close(self) -> None:
        """End the processes; what they have not compiled raises."""
        with self._changing, suppress(OSError):  # where they have ended
            self._connection.send(None)
        self._receiving.join()

    def _receive(self) -> None:
        while True:
            try:
                number, made = self._connection.recv()
            except (EOFError, OSError):
                break
            future = self._waiting.pop(number)
            if isinstance(made, CompiledKernel):
                future.set_result(made)
            else:
                future.set_exception(RuntimeError(made))
        with self._changing:
            self.ended = True
            left = list(self._waiting.values())
            self._waiting.clear()
            self._connection.close()
        for future in left:
            future.set_exception(RuntimeError("the processes that compile have ended"))
        self._process.wait()


def _sentence(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


# --- in a process of its own ----------------------------------------------------------------------

_arch = ""


def serve(fd: int, facts: tuple[int, str, int, int]) -> None:
    """Compile what comes through a connection, and send it back, until nobody is there any more."""
    global _arch
    processes, _arch, sms, shared_bytes = facts
    pretend(sms, shared_bytes)
    from steps.registry import kernels

    kernels()  # imports them
    fill_tables(_arch)
    gc.freeze()  # what forked processes share is not looked at, and so not copied
    connection, sending = Connection(fd), threading.Lock()
    waiting: set[int] = set()

    def send(number: int, done: Future[CompiledKernel]) -> None:
        error = done.exception()
        with sending:
            connection.send((number, _sentence(error) if error else done.result()))
            waiting.discard(number)

    pool = ProcessPoolExecutor(processes, get_context("fork"))
    try:
        while connection.poll(IDLE_SECONDS) or waiting:
            if (asked := connection.recv()) is None:
                break
            number, job = asked
            waiting.add(number)
            pool.submit(_compiled, job).add_done_callback(partial(send, number))
    except EOFError:  # who asked has ended
        pass
    for child in active_children():  # which may still compile, for nobody
        child.kill()
        child.join()
    os._exit(0)


def _compiled(job: bytes) -> CompiledKernel:
    recipe, index = pickle.loads(job)
    launch = recipe.launches()[index]
    return compile_kernel(launch.kernel, signature_of(launch.args), _arch)
