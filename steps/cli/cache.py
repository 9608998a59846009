"""The command `cache`: the compiled kernels that are kept on disk, and how to be rid of them."""

from __future__ import annotations

import datetime
from argparse import Namespace
from typing import Final

from results.render import table
from results.render.table import Column
from steps.compile import kernel_cache
from steps.compile.kernel_cache import MOST_BYTES, VARIABLE, Entry


def cache(args: Namespace) -> int:
    """Shows what is kept, by kernel and architecture; with --clear, removes it."""
    folder = kernel_cache.cache_folder()
    if folder is None:
        print(f"off: {VARIABLE} says so")
        return 0
    removed = kernel_cache.clear(folder) if args.clear else 0
    found = sorted(kernel_cache.entries(folder), key=lambda one: (one.key["kernel"], -one.used))
    nbytes = sum(one.nbytes for one in found)
    if args.clear:
        print(f"removed {removed} files from {folder}")
    elif not found:
        print(f"no compiled kernels in {folder}")
    else:
        groups: dict[tuple[str, str], list[Entry]] = {}
        for one in found:
            groups.setdefault((one.key["kernel"], one.key["arch"]), []).append(one)
        title = f"{len(found)} compiled kernels in {folder}"
        table.show(table.of_records(COLUMNS, groups.values(), title))
        print(f"{_megabytes(nbytes)} of {_megabytes(MOST_BYTES)} at most; {VARIABLE} moves it")
    return 0


COLUMNS: Final = (
    Column("kernel", lambda own: own[0].key["kernel"], words=True),
    Column("for", lambda own: own[0].key["arch"], words=True),
    Column("variants", lambda own: str(len(own))),
    Column("size", lambda own: _megabytes(sum(one.nbytes for one in own))),
    Column("last used", lambda own: _time(own[0].used)),
)
"""Of the entries of one kernel and architecture, the one used last first."""


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.3g} MB"


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
