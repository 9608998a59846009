"""Compiled kernels, kept on disk: a process that finds its kernels there compiles nothing.

The key holds all that the machine code depends on (`steps.compile.kernel_key`). It hashes all
imported code, so an edit or another toolkit gives another key, and nothing has to be cleared.

The environment variable LADDER_CACHE names the folder, or is "off"; by default it is the user's
cache folder. Who can write there can run code on the GPU, so a folder or file that belongs to
another user (not root), or that others may write, is not read, as ssh does with keys. Nor is a
link, a FIFO or a device. Where there is no folder that can be trusted and written, a warning says
so once, and kernels are kept in memory alone.

A file is written beside its place and moved there, so processes that write at once do no harm. It
begins with a digest of the rest: a file that is cut short, damaged or not of this cache is ignored,
and written anew. Beyond `MOST_BYTES` the least recently used files are removed, and so is what a
killed process left unfinished.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from uuid import uuid4
from weakref import WeakKeyDictionary

from steps.compile.kernel_key import key_of

VARIABLE: Final = "LADDER_CACHE"
MOST_BYTES: Final = 500_000_000
UNFINISHED_SECONDS: Final = 3600
"""A file that was begun so long ago is no longer being written, which takes milliseconds."""

_MAGIC: Final = b"quantized-gemm-ladder kernel 1 "
_SUFFIX: Final = ".kernel"
_UNFINISHED: Final = ".unfinished"


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class CompiledKernel:
    """Machine code of one kernel for one architecture, and what a launch needs besides: the name of
    its entry, and whether all its blocks must run at once. Registers and static shared memory are
    in the cubin; the layout of the arguments follows from their types."""

    name: str
    cubin: bytes
    cooperative: bool


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of the cache: `key` as `key_of` makes it, bytes, and seconds since 1970 of its last
    use."""

    path: Path
    key: dict[str, Any]
    nbytes: int
    used: float


_known: WeakKeyDictionary[Any, dict[tuple[Any, str], CompiledKernel]] = WeakKeyDictionary()
_warned: set[str] = set()


def find(kernel: Any, signature: tuple[Any, ...], arch: str) -> CompiledKernel | None:
    """The machine code of a `@cuda.jit` kernel for the types of its arguments and an architecture
    such as "sm_90a": that of this process or of the disk, None where neither has it."""
    own = _known.setdefault(kernel, {})
    if (signature, arch) not in own and (folder := cache_folder()):
        key = key_of(kernel, signature, arch)
        if key is not None and (found := _read(_place(folder, key), key)) is not None:
            own[signature, arch] = found
    return own.get((signature, arch))


def store(kernel: Any, signature: tuple[Any, ...], arch: str, code: CompiledKernel) -> None:
    """Let `find` return this from here on, in this process and in later ones. A folder that cannot
    be written is a warning."""
    _known.setdefault(kernel, {})[signature, arch] = code
    if folder := cache_folder():
        key = key_of(kernel, signature, arch)
        if key is not None:
            _write(folder, key, code)


_expected: dict[tuple[Any, tuple[Any, ...], str], Future[CompiledKernel]] = {}


def expect(
    kernel: Any, signature: tuple[Any, ...], arch: str, coming: Future[CompiledKernel]
) -> None:
    """Let `wait_for` wait for what another process compiles, and keep it as `store` does."""

    def keep(done: Future[CompiledKernel]) -> None:
        if done.exception() is None:
            store(kernel, signature, arch, done.result())
        _expected.pop((kernel, signature, arch), None)

    _expected[kernel, signature, arch] = coming
    coming.add_done_callback(keep)


def is_expected(kernel: Any, signature: tuple[Any, ...], arch: str) -> bool:
    return (kernel, signature, arch) in _expected


def expect_nothing() -> None:
    """From here on, in a process that was forked from the one that asked."""
    _expected.clear()


def wait_for(kernel: Any, signature: tuple[Any, ...], arch: str) -> None:
    """Until `find` finds what another process is compiling, or that process could not."""
    coming = _expected.get((kernel, signature, arch))
    if coming is not None and coming.exception() is None:
        _known.setdefault(kernel, {})[signature, arch] = coming.result()  # `keep` may come later


# --- files ----------------------------------------------------------------------------------------


def cache_folder() -> Path | None:
    """Where compiled kernels are kept; None where they are not. Unless LADDER_CACHE is "off" that
    is a warning, once."""
    folder, why = folder_or_why()
    if why and not _is_off():
        _warn_of_memory(why)
    return folder


def folder_or_why() -> tuple[Path | None, str]:
    """(where compiled kernels are kept, ""), or (None, why they are not)."""
    if _is_off():
        return None, f"{VARIABLE} is off"
    asked = os.environ.get(VARIABLE)
    try:
        if asked:
            folder = Path(asked).expanduser()
        else:
            from platformdirs import user_cache_path

            folder = user_cache_path("quantized-gemm-ladder") / "kernels"
    except RuntimeError:  # a container's user, without a home
        return None, f"there is no home folder{f' as in {asked}' if asked else ''}"
    with suppress(OSError):  # not there yet, or unreadable, which writing will tell
        if why := _why_not_safe(folder.stat()):
            return None, f"{folder} {why}"
    return folder, ""


def _is_off() -> bool:
    return os.environ.get(VARIABLE, "").lower() == "off"


def _why_not_safe(state: os.stat_result) -> str | None:
    """Why code in this file or folder may be somebody else's, None where it is the user's own. A
    parent that others may write does no harm: what they could put there belongs to them."""
    if state.st_uid not in (os.geteuid(), 0):
        return f"belongs to another user (uid {state.st_uid})"
    if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"may be written by others (mode {stat.S_IMODE(state.st_mode):o})"
    return None


def _warn_of_memory(why: str) -> None:
    _warn(
        f"compiled kernels are kept in memory alone: {why}. Set {VARIABLE} to a folder of your "
        "own, or to off"
    )


def _warn(sentence: str) -> None:
    if sentence not in _warned:
        _warned.add(sentence)
        warnings.warn(sentence, RuntimeWarning, stacklevel=3)


def entries(folder: Path) -> Iterator[Entry]:
    """The files that can be used, in no order."""
    for path in folder.glob(f"*{_SUFFIX}"):
        if (found := _checked(path)) is not None:
            with suppress(OSError):
                state = path.stat()
                yield Entry(path, found[0]["key"], state.st_size, state.st_mtime)


def clear(folder: Path) -> int:
    """Remove all files of the cache; how many. OSError where they cannot be removed."""
    found = [*folder.glob(f"*{_SUFFIX}"), *folder.glob(f"*{_UNFINISHED}")]
    for path in found:
        path.unlink(missing_ok=True)
    return len(found)


def _place(folder: Path, key: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return folder / f"{digest[:40]}{_SUFFIX}"


def _read(path: Path, key: dict[str, Any]) -> CompiledKernel | None:
    """The kernel of a file, None unless the file is whole and has this key."""
    found = _checked(path)
    if found is None or found[0]["key"] != key:
        return None
    with suppress(OSError):
        os.utime(path)
    facts, cubin = found
    return CompiledKernel(facts["name"], cubin, facts["cooperative"])


def _checked(path: Path) -> tuple[dict[str, Any], bytes] | None:
    """(facts, cubin) of a file whose digest is right and that says what `_write` does of a kernel;
    else None."""
    digest, _, rest = _content(path).partition(b"\n")
    if digest != _digest(rest):
        return None
    line, _, cubin = rest.partition(b"\n")
    with suppress(ValueError, RecursionError):
        match facts := json.loads(line):
            case {"key": {"kernel": str(), "arch": str()}, "name": str(), "cooperative": bool()}:
                return facts, cubin
    return None


def _content(path: Path) -> bytes:
    """What is in a file of the user; nothing for another, or for what is no file. Looked at once it
    is open, as the path may then name another."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO waits for nobody
    try:
        with os.fdopen(os.open(path, flags), "rb") as file:
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode):
                return b""
            if why := _why_not_safe(state):
                _warn(f"{path} {why}: it is not read, but compiled and written anew")
                return b""
            return file.read()
    except OSError:
        return b""


def _digest(rest: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(rest).hexdigest().encode()


def _write(folder: Path, key: dict[str, Any], code: CompiledKernel) -> None:
    facts = {"key": key, "name": code.name, "cooperative": code.cooperative}
    rest = json.dumps(facts).encode() + b"\n" + code.cubin
    path, beside = _place(folder, key), folder / f"{uuid4().hex}{_UNFINISHED}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            beside.touch(mode=0o600, exist_ok=False)
            beside.write_bytes(_digest(rest) + b"\n" + rest)
            beside.replace(path)
        except FileNotFoundError:  # another process has cleared the folder
            pass
        finally:
            beside.unlink(missing_ok=True)
        _prune(folder)
    except OSError as error:
        _warn_of_memory(f"{folder} cannot be written ({error.strerror})")


def _prune(folder: Path) -> None:
    """Remove the files that were used least recently, as far as there are too many bytes, and those
    that no process will finish."""
    found = []
    for path in (*folder.glob(f"*{_SUFFIX}"), *folder.glob(f"*{_UNFINISHED}")):
        with suppress(OSError):  # another process has removed it
            state = path.lstat()
            if path.suffix == _UNFINISHED and time.time() - state.st_mtime > UNFINISHED_SECONDS:
                path.unlink()
            else:
                found.append((state.st_mtime, state.st_size, path))
    left = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if left <= MOST_BYTES:
            break
        with suppress(OSError):
            path.unlink()
        left -= size
