"""`cuda` inside a simulated kernel: indices, arrays, barriers, warp operations, atomics, bits."""

import linecache
import operator
import re
from collections.abc import Callable

import numpy as np

from steps.simulator.arrays import CheckedArray, garbage, owner
from steps.simulator.c_types import as_dtype
from steps.simulator.errors import OutOfRange, SimulatorError
from steps.simulator.lanes import FULL_MASK, WARP, here
from steps.simulator.local_arrays import local_array
from steps.simulator.scheduler import now
from steps.simulator.tracked import SharedArray


def _nothing(operands: list) -> list:
    return [None] * len(operands)


def _declared_name(kind: str) -> str:
    """The variable a declaration is assigned to, read from its source line; else a description."""
    site = here()
    match = re.match(r"\s*(\w+)\s*=", linecache.getline(site.code.co_filename, site.line))
    return match[1] if match else f"the {kind} array of line {site.line}"


class _Shared:
    """`cuda.shared`: one array per declaration and block; garbage until written."""

    @staticmethod
    def array(shape, dtype, alignment: int | None = None) -> CheckedArray:
        block = now().lane.block
        key = here()[:2]
        found = block.shared.get(key)
        if found is None:
            dtype = as_dtype(dtype)
            if shape == 0 or shape == (0,):
                usable = block.dynamic.size // dtype.itemsize * dtype.itemsize
                data = block.dynamic[:usable].view(dtype)
            else:
                data = garbage(shape, dtype)
            banks, name = now().banks, _declared_name("shared")
            alignment = alignment or dtype.alignment
            block.memory.add(data, name)
            if banks is not None:
                found = banks.array(data, name, "shared", alignment)
            elif data.nbytes:
                shadow = block.memory.allocations[id(owner(data))].shadow
                found = SharedArray(data, name, "shared", alignment, shadow)
            else:
                found = CheckedArray(data, name, "shared", alignment)
            block.shared[key] = found
        return found


class _Local:
    """`cuda.local`: a fresh array of garbage at each execution of the declaration."""

    @staticmethod
    def array(shape, dtype, alignment: int | None = None) -> CheckedArray:
        return local_array(shape, dtype, alignment)


def _atomic(function: Callable):
    def update(self, array, index, value):
        return array.exchange(index, lambda old: function(old, value))

    return update


class _Atomic:
    """`cuda.atomic`: each returns the old value. One lane runs at a time, so all are atomic."""

    add, sub, max, min = _atomic(operator.add), _atomic(operator.sub), _atomic(max), _atomic(min)
    and_, or_, xor = _atomic(operator.and_), _atomic(operator.or_), _atomic(operator.xor)
    exch = _atomic(lambda old, value: value)

    def cas(self, array, index, old_value, value):
        return array.exchange(index, lambda old: value if old == old_value else old)


class Cuda:
    """Stands where a kernel says `cuda`. What is missing raises AttributeError with its name; a
    `__getattr__` that says more would make every access slow."""

    shared, local, atomic = _Shared, _Local, _Atomic()
    warpsize = WARP

    # --- where am I
    threadIdx = property(lambda self: now().lane.thread)
    blockIdx = property(lambda self: now().lane.block.index)
    blockDim = property(lambda self: now().block_dim)
    gridDim = property(lambda self: now().grid_dim)
    laneid = property(lambda self: now().lane.index % WARP)

    def grid(self, dimensions: int):
        lane, dim = now().lane, now().block_dim
        block, thread = lane.block.index, lane.thread
        place = (
            block.x * dim.x + thread.x,
            block.y * dim.y + thread.y,
            block.z * dim.z + thread.z,
        )
        return place[0] if dimensions == 1 else place[:dimensions]

    def gridsize(self, dimensions: int):
        sizes = tuple(g * b for g, b in zip(now().grid_dim, now().block_dim, strict=True))
        return sizes[0] if dimensions == 1 else sizes[:dimensions]

    # --- the block
    def syncthreads(self) -> None:
        now().meet_block("syncthreads", _nothing)

    def syncthreads_count(self, predicate) -> int:
        return now().meet_block("syncthreads_count", lambda p: [sum(p)] * len(p), bool(predicate))

    def syncthreads_and(self, predicate) -> int:
        return now().meet_block(
            "syncthreads_and", lambda p: [int(all(p))] * len(p), bool(predicate)
        )

    def syncthreads_or(self, predicate) -> int:
        return now().meet_block("syncthreads_or", lambda p: [int(any(p))] * len(p), bool(predicate))

    # --- the warp
    def syncwarp(self, mask: int = FULL_MASK) -> None:
        now().meet_warp("syncwarp", _nothing, (), mask, orders=True)

    def shfl_sync(self, mask, value, source):
        return _shuffle("shfl_sync", lambda lane, x: x % WARP, mask, value, source)

    def shfl_up_sync(self, mask, value, delta):
        return _shuffle("shfl_up_sync", lambda lane, x: lane - x, mask, value, delta)

    def shfl_down_sync(self, mask, value, delta):
        return _shuffle("shfl_down_sync", lambda lane, x: lane + x, mask, value, delta)

    def shfl_xor_sync(self, mask, value, lane_mask):
        return _shuffle("shfl_xor_sync", lambda lane, x: lane ^ x, mask, value, lane_mask)

    def ballot_sync(self, mask, predicate) -> int:
        return now().meet_warp(
            "ballot_sync",
            lambda votes: [sum(1 << lane for lane, vote in votes if vote)] * len(votes),
            (self.laneid, bool(predicate)),
            mask,
        )

    def any_sync(self, mask, predicate) -> bool:
        return now().meet_warp("any_sync", lambda p: [any(p)] * len(p), bool(predicate), mask)

    def all_sync(self, mask, predicate) -> bool:
        return now().meet_warp("all_sync", lambda p: [all(p)] * len(p), bool(predicate), mask)

    # --- memory order (`steps.simulator.ordering`); a polling lane lets the others run
    def threadfence(self) -> None:
        lane = now().lane
        lane.block.order.fence(lane)

    threadfence_system = threadfence

    def nanosleep(self, nanoseconds) -> None:
        now().poll()

    # --- bits of 32-bit words, or of 64-bit ones where the value does not fit in 32
    @staticmethod
    def _word(x) -> tuple[int, int]:
        x = int(x)
        bits = 32 if -(1 << 31) <= x < 1 << 32 else 64
        return x & ((1 << bits) - 1), bits

    def popc(self, x) -> int:
        return self._word(x)[0].bit_count()

    def clz(self, x) -> int:
        word, bits = self._word(x)
        return bits - word.bit_length()

    def brev(self, x) -> int:
        word, bits = self._word(x)
        return int(f"{word:0{bits}b}"[::-1], 2)

    def fma(self, a, b, c):
        return fma(a, b, c)


def exchange(name: str, source_of, held: list[tuple]) -> list:
    """What each lane gets, from (lane, value, operand) of all that take part: the value of lane
    `source_of(lane, operand)`; outside 0..31, its own."""
    values = {lane: value for lane, value, _ in held}
    results = []
    for lane, own, operand in held:
        source = source_of(lane, operand)
        if source in values:
            results.append(values[source])
        elif not 0 <= source < WARP:
            results.append(own)
        else:
            error = OutOfRange(f"{name}: lane {lane} reads lane {source}, which takes no part")
            error.lane_in_warp = lane
            raise error
    return results


def _shuffle(name: str, source_of, mask, value, operand):
    schedule = now()
    return schedule.meet_warp(
        name,
        lambda held: exchange(name, source_of, held),
        (schedule.lane.index % WARP, value, int(operand)),
        mask,
    )


def fma(a, b, c):
    """a * b + c rounded once, for float32 operands; for wider ones, rounded as Python does."""
    if not all(isinstance(x, np.float32) for x in (a, b, c)):
        return a * b + c
    product, c = np.float64(a) * np.float64(b), np.float64(c)  # the product is exact: 48 bits
    total = product + c
    if not np.isfinite(total):
        return np.float32(total)
    rest = total - product
    lost = (product - (total - rest)) + (c - rest)  # what the addition rounded away (two-sum)
    if lost and not total.view(np.int64) & 1:  # to odd, so that rounding again to float32 is right
        total = np.nextafter(total, np.inf if lost > 0 else -np.inf)
    return np.float32(total)


CUDA = Cuda()

__all__ = ["CUDA", "Cuda", "SimulatorError", "exchange", "fma"]
