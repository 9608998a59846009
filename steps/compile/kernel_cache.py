"""Compiled kernels, kept on disk: a process that finds its kernels there compiles nothing.

The key holds all that the machine code depends on (`steps.compile.kernel_key`). It hashes all
imported code, so an edit or another toolkit gives another key, and nothing has to be cleared.

The environment variable LADDER_CACHE names the folder, or is "off"; by default it is the user's
cache folder. Who can write there can run code on the GPU. A file is written beside its place and
moved there, so processes that write at once do no harm. It begins with a digest of the rest: a file
that is cut short, damaged or not of this cache is ignored, and written anew. Beyond `MOST_BYTES`
the least recently used files are removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from uuid import uuid4
from weakref import WeakKeyDictionary

from steps.compile.kernel_key import key_of

VARIABLE: Final = "LADDER_CACHE"
MOST_BYTES: Final = 500_000_000
FACTS: Final = {"key", "name", "cooperative"}
"""What a file says of its kernel, in a line before the cubin."""

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
_warned: set[Path] = set()


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


# --- files ----------------------------------------------------------------------------------------


def cache_folder() -> Path | None:
    """Where compiled kernels are kept; None where LADDER_CACHE is "off"."""
    asked = os.environ.get(VARIABLE, "")
    if asked.lower() == "off":
        return None
    if asked:
        return Path(asked).expanduser()
    from platformdirs import user_cache_path

    return user_cache_path("quantized-gemm-ladder") / "kernels"


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
    """(facts, cubin) of a file whose digest is right, else None."""
    try:
        digest, _, rest = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    if digest != _digest(rest):
        return None
    line, _, cubin = rest.partition(b"\n")
    try:
        facts = json.loads(line)
    except ValueError:
        return None
    return (facts, cubin) if isinstance(facts, dict) and facts.keys() >= FACTS else None


def _digest(rest: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(rest).hexdigest().encode()


def _write(folder: Path, key: dict[str, Any], code: CompiledKernel) -> None:
    facts = {"key": key, "name": code.name, "cooperative": code.cooperative}
    rest = json.dumps(facts).encode() + b"\n" + code.cubin
    path, beside = _place(folder, key), folder / f"{uuid4().hex}{_UNFINISHED}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            beside.write_bytes(_digest(rest) + b"\n" + rest)
            beside.replace(path)
        except FileNotFoundError:  # another process has cleared the folder
            pass
        finally:
            beside.unlink(missing_ok=True)
        _prune(folder)
    except OSError as error:
        if folder not in _warned:
            _warned.add(folder)
            warnings.warn(
                f"compiled kernels are not kept, as {folder} cannot be written "
                f"({error.strerror}): set {VARIABLE} to another folder, or to off",
                RuntimeWarning,
                stacklevel=2,
            )


def _prune(folder: Path) -> None:
    """Remove the files that were used least recently, as far as there are too many bytes."""
    found = []
    for path in folder.glob(f"*{_SUFFIX}"):
        with suppress(OSError):  # another process has removed it
            state = path.stat()
            found.append((state.st_mtime, state.st_size, path))
    left = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if left <= MOST_BYTES:
            break
        path.unlink(missing_ok=True)
        left -= size
