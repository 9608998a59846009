"""What is made of a tensor's values and kept as long as its memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
StorageWeakRef = import_module("torch.multiprocessing.reductions").StorageWeakRef


class KeptWith(Generic[T]):
    """Values by the tensor that they were made of: made at the first use and after a change."""

    def __init__(self) -> None:
        self._values: dict[Hashable, tuple[Any, int, T]] = {}

    def of(self, tensor: Tensor, key: Hashable, make: Callable[[], T]) -> T:
        """The value of a tensor and of what else it depends on."""
        memory = StorageWeakRef(tensor.untyped_storage())
        place = memory.cdata, tensor.storage_offset(), tensor.shape, key
        version = 0 if tensor.is_inference() else tensor._version
        found = self._values.get(place)
        if found is None or found[1] != version:
            gone = [one for one, (of, _, _) in self._values.items() if of.expired()]
            for one in gone:
                del self._values[one]
            found = self._values[place] = memory, version, make()
        return found[2]

    def __len__(self) -> int:
        return len(self._values)

    def clear(self) -> None:
        self._values.clear()
