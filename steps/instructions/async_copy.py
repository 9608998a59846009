"""Asynchronous copies from global to shared memory (PTX ISA 9.7.9.25, cp.async).

A thread issues copies, closes them into a *group* with `cp_async_commit`, and later waits until all
but its n newest groups have arrived. The wait is the thread's own: other threads see the data only
after a barrier that follows it. So the order is always: copy, commit, wait, `cuda.syncthreads`,
read.

In the simulator a destination is overwritten with garbage (0xFF: NaN in floats) when the copy is
issued, and the data lands only at the wait, the oldest group first. A missing wait, a missing
barrier after it, and a copy into a buffer that others still read all become wrong results.
"""

from functools import cache

from numba.cuda.types import uint32

from steps.instructions.define import GLOBAL, SHARED, ptx
from steps.simulator.arrays import CheckedArray

_SIZE = 16  # bytes of one copy: the only size that bypasses L1 (.cg)
_WORD = 4  # one float, such as a scale


def _issue(lane, destination, at: int, source, source_at: int, size: int, of: int = _SIZE) -> None:
    read = source.locate(source_at, size, of) if size else 0
    write = CheckedArray.locate(destination, at, of)
    destination.begin_async_store(lane, write, of)
    destination.bytes[write : write + of] = b"\xff" * of
    lane.copies.append((destination, write, of, source.bytes, read, size))


@ptx(
    "cp.async.cg.shared.global [$0], [$1], 16;",
    takes=(SHARED, GLOBAL),
    scope="lane",
    memory=True,
    min_cc=(8, 0),
)
def cp_async_16(lane, destination, di, source, si):
    """Begin to copy 16 bytes from source[si] to destination[di], both aligned. LDGSTS."""
    _issue(lane, destination, di, source, si, _SIZE)


@ptx(
    "cp.async.cg.shared.global [$0], [$1], 16, $2;",
    takes=(SHARED, GLOBAL, uint32),
    scope="lane",
    memory=True,
    min_cc=(8, 0),
)
def cp_async_16_zfill(lane, destination, di, source, si, size):
    """As `cp_async_16`, but only `size` (0..16) bytes are read and the rest of the 16 become zero.

    With size 0 the source is not touched, so a lane beyond the edge of a matrix may give any index.
    """
    if size > _SIZE:
        raise ValueError(f"cp_async_16_zfill reads at most 16 bytes, got {size}")
    _issue(lane, destination, di, source, si, size)


@ptx(
    "cp.async.ca.shared.global [$0], [$1], 4;",
    takes=(SHARED, GLOBAL),
    scope="lane",
    memory=True,
    min_cc=(8, 0),
)
def cp_async_4(lane, destination, di, source, si):
    """Begin to copy 4 bytes from source[si] to destination[di], both aligned; by L1. LDGSTS."""
    _issue(lane, destination, di, source, si, _WORD, _WORD)


@ptx("cp.async.commit_group;", scope="lane", memory=True, min_cc=(8, 0))
def cp_async_commit(lane):
    """Close the copies issued since the last commit into a group (empty if there are none)."""
    lane.groups.append(lane.copies)
    lane.copies = []


@cache
def cp_async_wait(newest: int):
    """The instruction that waits until at most the `newest` youngest groups are under way.

    A factory, since PTX takes the number as an immediate: `wait_for_all_but_one = cp_async_wait(1)`
    at module level. `cp_async_wait(0)` waits for all committed groups.
    """
    if newest < 0:
        raise ValueError(f"cp_async_wait takes a number of groups of at least 0, got {newest}")

    def twin(lane):
        while len(lane.groups) > newest:
            for destination, write, of, source, read, size in lane.groups.popleft():
                data = bytes(source[read : read + size])
                destination.bytes[write : write + of] = data.ljust(of, b"\0")
                destination.end_async_store(lane, write, of)

    twin.__name__ = f"cp_async_wait_{newest}"
    twin.__doc__ = f"Wait until at most {newest} groups of this thread are under way."
    return ptx(f"cp.async.wait_group {newest};", scope="lane", memory=True, min_cc=(8, 0))(twin)
