"""Prepared launches: compiled and laid out once, before any address is known, then called with
them.

    choice, made = prepare(choice, types_of_the_packed_weights)
    made((a, out, *weights), zeros, workspace, stream)          # addresses; queued, not waited for

A `Prepared` owns no memory. Each call brings some: `zeroed` bytes that are zero and that the
kernels leave zero, and a workspace of `nbytes` that may hold anything. So layers of one shape share
one, calls on several streams do not share memory, and what a CUDA graph writes can come from that
graph's pool. `Kept` is the cache in which callers keep what they have prepared.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from steps.compile.dry_run import OUT, REGION, WORKSPACE, ZEROED, A, ArrayType, DryRun, operands
from steps.contract import Launch
from steps.driver import launcher
from steps.product.choice import Choice

T = TypeVar("T")


class Prepared:
    """Launches whose arrays are placeholders; each call brings the addresses that they have.

    zeroed  : bytes of counters, which are zero between calls; 0 where there are none.
    nbytes  : bytes of a workspace; 0 where nothing needs it.
    loaded  : the launches of a call, in their order.
    """

    def __init__(self, launches: Sequence[Launch], memory: DryRun, operands: Sequence[int]) -> None:
        """Compile and load the launches on the current GPU. memory: the dry run that they were made
        on; operands: the address at which each operand's placeholder begins, a multiple of
        `REGION`, in the order in which calls bring addresses."""
        self.zeroed, self.nbytes = memory.zeroed, memory.nbytes
        self.loaded = [launcher.load(launch) for launch in launches]
        bases = (ZEROED, WORKSPACE, *operands)
        self._places = [
            (one.arguments, i, which, offset)
            for one in self.loaded
            for which, base in enumerate(bases)
            for i, offset in one.within(base, REGION)
        ]
        self._mapped = [
            (one, which, offset)
            for one in self.loaded
            for which, base in enumerate(bases)
            if (offset := one.mapped_within(base, REGION)) is not None
        ]
        self._lock = threading.Lock()

    def __call__(self, addresses: Sequence[int], zeros: int, workspace: int, stream: int) -> None:
        """Queue the launches on a stream; return before they are done. Threads wait for each other.

        addresses: of the operands on the GPU, in their order; they are not checked. zeros: the
        address of `zeroed` bytes of zeros. workspace: that of `nbytes` bytes. Both are multiples of
        256, or 0 where there are none. ValueError, and nothing is launched, for an address that a
        tensor map cannot have.
        """
        at = (zeros, workspace, *addresses)
        with self._lock:
            for loaded, which, offset in self._mapped:
                loaded.put_mapped(at[which] + offset)
            for arguments, i, which, offset in self._places:
                arguments[i] = at[which] + offset
            for loaded in self.loaded:
                loaded(stream)


def prepare(choice: Choice, weights: Sequence[ArrayType]) -> tuple[Choice, Prepared]:
    """(the choice with its launch's configuration, its launches), on the current GPU. A call brings
    the addresses of a, out, the packed weights, and the bias that the kernel adds.

    a is [M, K] of `Choice.reading.dtype` ([M, 2 K] where that is of gates and ups), at a multiple
    of 16 bytes unless it is float32. out is [M, N] of `Choice.writes`, at a multiple of 16 bytes
    and apart from a. weights: (shape, dtype) of each packed array. ValueError for a product with
    more thread blocks than CUDA launches.
    """
    memory = DryRun()
    launches = choice.launches(memory, weights)
    count = len(choice.operand_types(weights))
    made = Prepared(launches, memory, (A, OUT, *operands(count)))
    return choice.launched(launches[-1]), made


class Kept(Generic[T]):
    """A thread-safe LRU cache: of at most `most` values the one used longest ago gives way."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[Hashable, T] = OrderedDict()
        self._changing = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable) -> T | None:
        """The value of a key, which is then the one used last; None where it is not kept."""
        try:
            value = self._values[key]
            self._values.move_to_end(key)
        except KeyError:  # never kept, or another thread's `put` has just dropped it
            return None
        return value

    def put(self, key: Hashable, value: T) -> T:
        """Keep a value. Returns the one that is kept: of two threads with one key the first's."""
        with self._changing:
            value = self._values.setdefault(key, value)
            while len(self._values) > self._most:
                self._values.popitem(last=False)
        return value

    def of(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of a key, made if it is not kept."""
        found = self.get(key)
        return self.put(key, make()) if found is None else found

    def clear(self) -> None:
        with self._changing:
            self._values.clear()
