"""Sums over the ranks of a process group: by symmetric memory where they are small, else by the
group's own library.

A token's sum is a few KB, and NCCL takes most of its time to begin. A one-shot all-reduce is one
kernel: each GPU copies its values where the others can read them, waits for theirs and adds up all
of them. It reads (ranks - 1) times the bytes, which is why large sums are NCCL's. torch has that
kernel for float32, over memory that the GPUs of one host map from each other
(`torch.distributed._symmetric_memory`). It goes into a CUDA graph.

Multicast through the NVLink switch is not used.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any, Final

from steps.nn import operator as operator

if TYPE_CHECKING:
    from torch import Tensor

torch = operator.torch
distributed = torch.distributed

ONE_SHOT: Final = 1 << 20
"""Bytes of float32 up to which a sum is small: 16 tokens of 16384 values."""


class AllReduce:
    """The sum over the ranks of `group` of tensors on one device. All ranks call it with the same
    shapes, in the same order, on one stream. On a GPU call it once before a CUDA graph is captured.

    how : what is used, in words.
    """

    def __init__(self, group: Any, device: Any) -> None:
        self.group, self.how = group, backends(group).get(device.type, "")
        self._buffer: Any = None
        if device.type == "cuda" and _near(group, device):
            self._buffer = _symmetric(group, device)
        if self._buffer is not None:
            self.how = f"one-shot in symmetric memory up to {ONE_SHOT} bytes, else {self.how}"

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
        distributed.all_reduce(y, group=self.group)
        return y


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

    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # read when memory is mapped
    try:
        made = symmetric_memory.empty(ONE_SHOT // 4, dtype=torch.float32, device=device)
        symmetric_memory.rendezvous(made, group)
        ones = torch.ones(4, device=device)
        found = torch.ops.symm_mem.one_shot_all_reduce_copy(made[:4], ones, "sum", group.group_name)
        made = made if bool((found == distributed.get_world_size(group)).all()) else None
    except RuntimeError:  # such as a driver that exports no memory
        made = None
    all_of: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(all_of, made is not None, group=group)
    return made if all(all_of) else None
