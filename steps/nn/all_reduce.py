"""Sums over the ranks of a process group: by symmetric memory where that is faster, else by the
group's own library.

A token's sum is a few KB, and NCCL takes most of its time to begin. A one-shot all-reduce is one
kernel: each GPU copies its values where the others can read them, waits for theirs and adds up all
of them. It reads (ranks - 1) times the bytes, which is why large sums are not made so. torch has
that kernel for float32, over memory that the GPUs of one host map from each other
(`torch.distributed._symmetric_memory`). It goes into a CUDA graph.

Large sums of two GPUs are an exchange: each copies its values into memory of the other and adds
what it got to its own. No way moves fewer bytes. A GPU's copy engines do it, so multiprocessors are
free to multiply: where y is made in parts, one part travels while the next one is made.

    this stream    | part 0      | part 1      |                   | add |
    side stream    | barrier     | copy part 0 | copy part 1 | barrier |

The first barrier: the other GPU has read what it got before. The second: the copies are there.

Multicast through the NVLink switch is not used.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
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

    @property
    def overlaps(self) -> bool:
        """Whether a part of a large sum travels while the next one is made (`of_parts`)."""
        return self._exchange is not None

    @staticmethod
    def is_small(count: int) -> bool:
        """Whether `count` values are few enough to be summed in float32, to be rounded once. More
        values are summed in the dtype of the product, each rank's y rounded by itself."""
        return 4 * count <= ONE_SHOT

    def __call__(self, y: Tensor) -> Tensor:
        """The sum of all ranks' y, in its dtype; it may be written over y, which is contiguous."""
        shared = self._buffer
        if shared is not None and y.dtype is torch.float32 and 0 < y.nbytes <= ONE_SHOT:
            # of the same alignment, which the kernel asks for: a product's y begins its memory
            shared = shared[: y.numel()].view(y.shape)
            name = self.group.group_name
            return torch.ops.symm_mem.one_shot_all_reduce_copy(shared, y, "sum", name)
        if self._exchange is not None and 0 < y.nbytes <= EXCHANGED:
            self._exchange.begin()
            self._exchange.send(y, 0)
            return torch.add(y, self._exchange.received(y), out=y)
        distributed.all_reduce(y, group=self.group)
        return y

    def of_parts(self, parts: Sequence[Callable[[], Tensor]], rows: int) -> Tensor:
        """The sum of all ranks' y [rows, ...], which the parts make, some rows each, one after the
        other. It is worth it where it `overlaps`."""
        exchange, made, done = self._exchange, [], 0
        if exchange is not None:
            exchange.begin()
        for make in parts:
            made.append(part := make())
            if done == 0:
                y = part.new_empty((rows, *part.shape[1:]))
                exchange = exchange if y.nbytes <= EXCHANGED else None
            if exchange is not None:
                exchange.send(part, done * part[0].nbytes)
            done += len(part)
        if exchange is None:
            torch.cat(made, out=y)
            distributed.all_reduce(y, group=self.group)
            return y
        sizes = [len(part) for part in made]
        theirs, totals = exchange.received(y).split(sizes), y.split(sizes)
        for part, other, total in zip(made, theirs, totals, strict=True):
            torch.add(part, other, out=total)
        return y


class Exchange:
    """Two GPUs of a host copy values into memory of each other: `begin`, then `send` all of them,
    then `received`. RuntimeError where torch cannot map that memory."""

    def __init__(self, group: Any, device: Any) -> None:
        from torch.distributed import _symmetric_memory as symmetric_memory

        self._got = symmetric_memory.empty(EXCHANGED, dtype=torch.uint8, device=device)
        self._handle = symmetric_memory.rendezvous(self._got, group)
        other = 1 - distributed.get_rank(group)
        self._of_other = self._handle.get_buffer(other, (EXCHANGED,), torch.uint8)
        self._side = torch.cuda.Stream(device)

    def begin(self) -> None:
        """Wait, on the side stream, until the other GPU has read what it received before."""
        self._side.wait_stream(torch.cuda.current_stream(self._side.device))
        with torch.cuda.stream(self._side):
            self._handle.barrier(channel=0)

    def send(self, values: Tensor, at: int) -> None:
        """Copy contiguous values to byte `at` of the other GPU's memory, on the side stream."""
        self._side.wait_stream(torch.cuda.current_stream(self._side.device))
        with torch.cuda.stream(self._side):
            to = self._of_other[at : at + values.nbytes].view(values.dtype)
            to.copy_(values.view(-1))

    def received(self, like: Tensor) -> Tensor:
        """What the other GPU has sent, of the shape and dtype of a tensor. It may be read on this
        stream until the next `begin`, and all that was sent may be freed."""
        with torch.cuda.stream(self._side):
            self._handle.barrier(channel=1)
        torch.cuda.current_stream(self._side.device).wait_stream(self._side)
        return self._got[: like.nbytes].view(like.dtype).view(like.shape)


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
