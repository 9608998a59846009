"""Sums over the ranks of a process group: by symmetric memory where that is faster, else by the
group's own library.

A token's sum is a few KB, for which NCCL takes longer to begin than to add. torch's one-shot
all-reduce of float32 is one kernel over memory that the GPUs of one host map from each other
(`torch.distributed._symmetric_memory`): each copies its values there, waits for the others' and
adds up all of them. It reads (ranks - 1) times the bytes, so it is used for small sums only.

Large sums of two GPUs are an exchange: each copies its values into memory of the other and adds
what it got to its own. Nothing moves fewer bytes. Copy engines do it, so the SMs are free to
multiply: `begin` a sum, do other work, then ask for the result. Two sums may be under way.

    this stream    | y |           other work              | add |
    side stream        | barrier | copy y to it | barrier |

The first barrier: the other GPU has read what it got there before. The second: copies are there.

A kernel of two GPUs may exchange a small sum by itself, in memory that is here for it (`places`).

Multicast through the NVLink switch is not used.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from steps.nn import operator as operator

if TYPE_CHECKING:
    from torch import Tensor

torch = operator.torch
distributed = torch.distributed

ONE_SHOT: Final = 1 << 20
"""Bytes of float32 up to which a sum is small: 16 tokens of 16384 values."""

EXCHANGED: Final = 1 << 26
"""Bytes of a sum at most that two GPUs exchange: 4096 tokens of 8192 values of 16 bits."""

PLACES: Final = 2
"""Of small sums that kernels exchange, by turns."""


class AllReduce:
    """The sum over the ranks of `group` of tensors on one device. All ranks call it with the same
    shapes, in the same order, on one stream. On a GPU call it once before a CUDA graph is captured.

    how : what is used, in words.
    """

    def __init__(self, group: Any, device: Any) -> None:
        self.group, self.how = group, backends(group).get(device.type, "")
        self._buffer: Any = None
        self._exchange: Exchange | None = None
        if device.type == "cuda" and _near(group, device):
            self._buffer = _symmetric(group, device)
        if self._buffer is not None:
            if distributed.get_world_size(group) == 2:
                self._exchange = _on_all(group, lambda: Exchange(group, device))
            if self._exchange is not None:
                self.how = f"exchanged up to {EXCHANGED} bytes, else {self.how}"
            self.how = f"one-shot in symmetric memory up to {ONE_SHOT} bytes, else {self.how}"

    def travels(self, count: int) -> bool:
        """Whether a sum of `count` values of 16 bits is exchanged, while GPUs do other work."""
        return self._exchange is not None and 0 < 2 * count <= EXCHANGED

    @staticmethod
    def is_small(count: int) -> bool:
        """Whether `count` values are few enough to be summed in float32, to be rounded once. More
        values are summed in the dtype of the product, each rank's y rounded by itself."""
        return 4 * count <= ONE_SHOT

    def places(self, count: int, turn: int) -> tuple[Tensor, Tensor] | None:
        """Where a kernel exchanges its `count` float32 with the other of two GPUs: (memory where
        those of the other come, the other's memory for its own). None where kernels cannot, or
        these are too many.

        It is full of the bytes 0xFF, and a kernel that has read it leaves it so. turn: 0 or 1 in
        turn, from one sum of this stream to the next, or a sum of another kind between them.
        """
        if self._exchange is None or not self.is_small(count):
            return None
        return self._exchange.places(count, turn)

    def __call__(self, y: Tensor) -> Tensor:
        """The sum of all ranks' y, in its dtype; it may be written over y, which is contiguous."""
        shared = self._buffer
        if self.is_one_shot(y):
            # of the same alignment, which the kernel asks for: a product's y begins its memory
            shared = shared[: y.numel()].view(y.shape)
            name = self.group.group_name
            return torch.ops.symm_mem.one_shot_all_reduce_copy(shared, y, "sum", name)
        if self._exchange is not None and 0 < y.nbytes <= EXCHANGED:
            mine, theirs = self.begin(y)()
            return torch.add(mine, theirs, out=y)
        distributed.all_reduce(y, group=self.group)
        return y

    def begin(self, y: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        """Begin the sum of all ranks' y. The returned function returns the terms that are still to
        be added: the sum, or y and that of the only other rank. It is called once, on the same
        stream. Terms may be read until two more sums are begun, and nobody writes to y till then.
        """
        if self._exchange is None or not 0 < y.nbytes <= EXCHANGED or self.is_one_shot(y):
            y = self(y)
            return lambda: (y,)
        arrived = self._exchange.begin(y)
        return lambda: (y, arrived())

    def is_one_shot(self, y: Tensor) -> bool:
        """Whether the sum is made by torch's one-shot kernel."""
        one_shot = y.dtype is torch.float32 and 0 < y.nbytes <= ONE_SHOT
        return self._buffer is not None and one_shot


class Exchange:
    """Two GPUs of a host copy values into memory of each other, two slots of it by turns.
    RuntimeError where torch cannot map that memory."""

    def __init__(self, group: Any, device: Any) -> None:
        from torch.distributed import _symmetric_memory as symmetric_memory

        count, large = 2 * EXCHANGED + PLACES * ONE_SHOT, 2 * EXCHANGED
        got = symmetric_memory.empty(count, dtype=torch.uint8, device=device)
        self._handle = symmetric_memory.rendezvous(got, group)
        other = 1 - distributed.get_rank(group)
        both = got, self._handle.get_buffer(other, (count,), torch.uint8)
        self._slots = list(zip(*(one[:large].split(EXCHANGED) for one in both), strict=True))
        got[large:].fill_(0xFF)
        torch.cuda.synchronize(device)  # the other uses it when all ranks have made theirs
        small = (one[large:].view(torch.float32).split(ONE_SHOT // 4) for one in both)
        self._places = list(zip(*small, strict=True))
        self._side = torch.cuda.Stream(device)

    def places(self, count: int, turn: int) -> tuple[Tensor, Tensor]:
        """See `AllReduce.places`."""
        here, there = self._places[turn]
        return here[:count], there[:count]

    def begin(self, values: Tensor) -> Callable[[], Tensor]:
        """Copy contiguous values to the other GPU, on the side stream. The function returned waits,
        on this stream, and returns what the other has sent, of the same shape and dtype: it may be
        read here until two more have begun."""
        here, self._slots = self._slots[0], self._slots[::-1]
        got, of_other = (one[: values.nbytes].view(values.dtype) for one in here)
        self._side.wait_stream(torch.cuda.current_stream(self._side.device))
        with torch.cuda.stream(self._side):
            self._handle.barrier(channel=0)
            of_other.copy_(values.view(-1))
            self._handle.barrier(channel=1)
            done = self._side.record_event()

        def arrived() -> Tensor:
            torch.cuda.current_stream(self._side.device).wait_event(done)
            return got.view(values.shape)

        return arrived


def backends(group: Any) -> dict[str, str]:
    """The library that a group has for each type of device: {"cpu": "gloo", "cuda": "nccl"}."""
    pairs = str(distributed.get_backend_config(group)).split(",")
    return {device: name for device, _, name in (one.partition(":") for one in pairs)}


_kept: dict[tuple[str, Any], AllReduce] = {}


def all_reduce_of(group: Any, device: Any) -> AllReduce:
    """The one `AllReduce` of a group on a device; the ranks make it together."""
    key = group.group_name, device
    found = _kept.get(key)
    if found is None or found.group is not group:  # names come again in a later group
        found = _kept[key] = AllReduce(group, device)
    return found


def _near(group: Any, device: Any) -> bool:
    """Whether all ranks have GPUs of their own in one host, which can read each other's memory."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    mine = socket.gethostname(), index, torch.cuda.get_device_properties(index).name
    all_of: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(all_of, mine, group=group)
    hosts, devices = {one[0] for one in all_of}, {one[1] for one in all_of}
    reach = len(hosts) == 1 and len(devices) == len(all_of)
    reach = reach and all(
        other == index or torch.cuda.can_device_access_peer(index, other) for other in devices
    )
    distributed.all_gather_object(all_of, reach, group=group)
    return all(all_of)


def _symmetric(group: Any, device: Any) -> Any:
    """float32 [ONE_SHOT / 4] that all ranks can read; None where torch cannot make it."""
    from torch.distributed import _symmetric_memory as symmetric_memory

    def make() -> Any:
        made = symmetric_memory.empty(ONE_SHOT // 4, dtype=torch.float32, device=device)
        symmetric_memory.rendezvous(made, group)
        ones = torch.ones(4, device=device)
        found = torch.ops.symm_mem.one_shot_all_reduce_copy(made[:4], ones, "sum", group.group_name)
        return made if bool((found == distributed.get_world_size(group)).all()) else None

    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # read when memory is mapped
    return _on_all(group, make)


def _on_all(group: Any, make: Callable[[], Any]) -> Any:
    """What `make` returns; None on all ranks where it does or raises RuntimeError on one, such as
    for a driver that exports no memory."""
    try:
        made = make()
    except RuntimeError:
        made = None
    all_of: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(all_of, made is not None, group=group)
    return made if all(all_of) else None
