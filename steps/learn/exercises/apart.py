"""Runs a learner's file in a process of its own, which the file may end: `os._exit(0)`, a signal.

The process is a fork, so it has this terminal, and `breakpoint()` works.
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import struct
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from mmap import mmap
from pathlib import Path
from types import FrameType
from typing import IO, Any, Final, TypeVar

T = TypeVar("T")
_LINE: Final = struct.Struct("q")


class Ended(Exception):
    """The process ended before its work did. `line` of the file was the last to run; `why` says
    how it ended."""

    def __init__(self, line: int, why: str) -> None:
        super().__init__(line, why)
        self.line, self.why = line, why


def apart(work: Callable[[], T], path: Path) -> T:
    """What `work` returns or raises, which must be picklable; Ended where it ends the process.

    Then it is done once more, slowly, to learn which line of the file at `path` does it.
    """
    found, status = _outcome(work)
    if found is None:
        with mmap(-1, _LINE.size) as last:
            _outcome(lambda: _traced(work, path, last))
            raise Ended(_LINE.unpack(last[:])[0], _how(status))
    ok, value = found
    if not ok:
        raise value
    done: T = value
    return done


def _outcome(work: Callable[[], Any]) -> tuple[tuple[bool, Any] | None, int]:
    """((True, result) or (False, exception), or None where there is neither; wait status)."""
    with tempfile.TemporaryFile() as answer:
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads of others, which wait
            child = os.fork()
        if not child:
            _work(work, answer)
        status = _ended(child)
        answer.seek(0)
        said = answer.read()
    return (pickle.loads(said) if said else None), status


def _work(work: Callable[[], Any], answer: IO[bytes]) -> None:
    """All that the forked process does; it does not return."""
    try:
        try:
            found = True, work()
        except KeyboardInterrupt:
            os._exit(128 + signal.SIGINT)
        except Exception as error:
            error.add_note(traceback.format_exc())
            found = False, error
        said = pickle.dumps(found)
        sys.stdout.flush()
        sys.stderr.flush()
        answer.write(said)
        answer.flush()
        os._exit(0)
    except BaseException:  # such as a result that cannot be pickled
        traceback.print_exc()
        os._exit(1)


def _ended(child: int) -> int:
    """The status of a process that has ended; one that stops itself is ended. (Ctrl-Z stops all of
    the terminal, and a shell lets them go on.)"""
    try:
        while True:
            _, status = os.waitpid(child, os.WUNTRACED)
            if not os.WIFSTOPPED(status):
                return status
            if os.WSTOPSIG(status) == signal.SIGSTOP:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return status
    except BaseException:  # Ctrl-C
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise


def _how(status: int) -> str:
    """ "with status 0", "by SIGKILL"."""
    if os.WIFEXITED(status):
        return f"with status {os.WEXITSTATUS(status)}"
    number = os.WSTOPSIG(status) if os.WIFSTOPPED(status) else os.WTERMSIG(status)
    return f"by {signal.Signals(number).name}"


def _traced(work: Callable[[], Any], path: Path, last: mmap) -> None:
    """`work`, each line of the file noted in `last` before it runs."""
    sys.stdout = sys.stderr = io.StringIO()  # it has been printed

    def line(frame: FrameType, event: str, _: Any) -> Any:
        last[:] = _LINE.pack(frame.f_lineno)
        return line

    def call(frame: FrameType, event: str, _: Any) -> Any:
        return line if frame.f_code.co_filename == str(path) else None

    sys.settrace(call)
    work()
