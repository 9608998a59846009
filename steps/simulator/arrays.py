"""Arrays as a simulated kernel sees them: every access checked, every value converted as in C."""

import operator
from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from steps.simulator.c_types import as_dtype, cast_to
from steps.simulator.errors import Misaligned, OutOfRange, SimulatorError

_ALLOCATION_ALIGNMENT = 256  # bytes; what cudaMalloc and the pools promise for a whole allocation


class CheckedArray:
    """A NumPy array behind range, sign and alignment checks.

    Loads give Python ints for integer dtypes and NumPy scalars for floating ones; stores to integer
    arrays wrap. Negative indices raise: in a kernel they are a bug far more often than a wish.
    Slices and `.view` share memory. There are no arrays of records: a kernel takes their bytes.

    space: "global", "shared", "local" or "constant". alignment: what is promised of the address of
    the allocation.
    """

    __slots__ = (
        "_base",
        "_bytes",
        "_cast",
        "_first",
        "_high",
        "_item",
        "_length",
        "_low",
        "_stored",
        "_stores",
        "_strides",
        "_table",
        "_values",
        "_writable",
        "alignment",
        "data",
        "dtype",
        "itemsize",
        "name",
        "nbytes",
        "ndim",
        "shape",
        "space",
    )

    def __init__(
        self, data: np.ndarray, name: str, space: str = "global", alignment: int | None = None
    ):
        self.data, self.name, self.space = data, name, space
        self.alignment = _ALLOCATION_ALIGNMENT if alignment is None else alignment
        self.shape, self.ndim, self.dtype = data.shape, data.ndim, data.dtype
        self.itemsize, self.nbytes, self._strides = data.itemsize, data.nbytes, data.strides
        self._writable = data.flags.writeable
        self._bytes: memoryview | None = None
        self._base: int | None = None
        self._cast, self._stored, self._low, self._high = stored_as(data.dtype)
        # -1: the fast path for one index does not apply
        self._length = data.shape[0] if data.ndim == 1 else -1
        self._stores = self._length if self._writable else -1
        # Of an index, or a tuple of them, within range.
        self._item: Callable = data.__getitem__ if data.dtype.kind == "f" else data.item

    # --- what kernels use of an array besides elements
    @property
    def size(self) -> int:
        return self.data.size

    @property
    def strides(self) -> tuple[int, ...]:
        return self.data.strides

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def view(self, dtype) -> "CheckedArray":
        return self._share(self.data.view(as_dtype(dtype)))

    def reshape(self, *shape) -> "CheckedArray":
        return self._share(self.data.reshape(*shape))

    # --- elements
    def __getitem__(self, key):
        if type(key) is int:
            if 0 <= key < self._length:
                return self._item(key)
        elif self._byte(key) >= 0:
            return self._item(key)
        key, whole = self._checked(key)
        return self._item(key) if whole else self._share(self.data[key])

    def __setitem__(self, key, value) -> None:
        if type(key) is int and 0 <= key < self._stores:
            if type(value) is self._stored and (
                self._low is None or self._low <= value <= self._high
            ):
                self.data[key] = value
            else:
                self.data[key] = self._cast(value)
            return
        if not self._writable:
            raise SimulatorError(f"{self.name} is read-only and the kernel stores to it")
        if self._byte(key) < 0:
            key, _ = self._checked(key)
        self.data[key] = value.data if isinstance(value, CheckedArray) else self._cast(value)

    def _byte(self, key) -> int:
        """Where the element of an int within range, or of one for each dimension, lies in `data`:
        the usual case, fast. -1 for any other key."""
        if type(key) is int:
            return key * self._strides[0] if 0 <= key < self._length else -1
        if type(key) is not tuple or len(key) != self.ndim:
            return -1
        if len(key) == 2:
            (i, j), (rows, columns), (row, column) = key, self.shape, self._strides
            if type(i) is int and type(j) is int and 0 <= i < rows and 0 <= j < columns:
                return i * row + j * column
            return -1
        at = 0
        for index, extent, stride in zip(key, self.shape, self._strides):  # noqa: B905 - equally long
            if type(index) is not int or not 0 <= index < extent:
                return -1
            at += index * stride
        return at

    def _checked(self, key) -> tuple[tuple, bool]:
        """The key as a tuple of ints and slices within range, and whether it names one element."""
        keys = key if isinstance(key, tuple) else (key,)
        if len(keys) > self.ndim:
            raise OutOfRange(
                f"{self.name} has {self.ndim} dimension(s) and is indexed with {len(keys)}"
            )
        checked: list[int | slice] = []
        for part, extent in zip(keys, self.shape, strict=False):
            if isinstance(part, slice):
                for bound in (part.start, part.stop):
                    if bound is not None and not 0 <= bound <= extent:
                        raise self._outside(key)
                checked.append(part)
                continue
            try:
                index = int(operator.index(part))
            except TypeError:
                raise SimulatorError(
                    f"{self.name} is indexed with {part!r}, which is not an integer"
                ) from None
            if not 0 <= index < extent:
                raise self._outside(key)
            checked.append(index)
        return tuple(checked), len(keys) == self.ndim and not any(
            isinstance(k, slice) for k in checked
        )

    def extent(self, key) -> tuple[int, int]:
        """The first byte, from the start of the allocation, and the number of bytes of what the key
        names. SimulatorError unless it is in one piece."""
        at = self._byte(key)
        if at < 0:
            checked, whole = self._checked(key)
            if not whole:
                part = self.data[checked]
                if not part.flags.c_contiguous:
                    raise SimulatorError(f"{self.name}: a part not in one piece is stored at once")
                return offset_in_allocation(part), part.nbytes
            at = self._byte(checked)
        return self._begin() + at, self.itemsize

    def _outside(self, key) -> OutOfRange:
        shown = ", ".join(map(_show_key, key)) if isinstance(key, tuple) else _show_key(key)
        return OutOfRange(f"{self.name}[{shown}] is outside {self.name} of shape {self.shape}")

    def _share(self, data: np.ndarray) -> "CheckedArray":
        return CheckedArray(data, self.name, self.space, self.alignment)

    # --- bytes, for instructions
    @property
    def bytes(self) -> memoryview:
        """All bytes of the array, which must be C-contiguous; a view, not a copy."""
        if self._bytes is None:
            if not self.data.flags.c_contiguous:
                raise SimulatorError(
                    f"{self.name} is not C-contiguous, which an (array, index) operand must be: "
                    "it is taken as flat"
                )
            self._bytes = self.data.reshape(-1).view(np.uint8).data
        return self._bytes

    @property
    def writable_bytes(self) -> memoryview:
        """As `bytes`; raises where the array is read-only."""
        if not self._writable:
            raise SimulatorError(f"{self.name} is read-only and the kernel stores to it")
        return self.bytes

    def address(self, index: int) -> int:
        """Where element `index` of the flat array lies, in bytes from the start of its allocation.

        OutOfRange outside of the array.
        """
        return self._begin() + CheckedArray.locate(self, index, self.itemsize, 1)

    def _begin(self) -> int:
        """Where it begins, in bytes from the start of its allocation."""
        if self._base is None:
            self._base = offset_in_allocation(self.data)
        return self._base

    def store(self, index: int, data: Any) -> None:
        """Store these bytes in one access, from element `index` of the flat array on."""
        memory, size = self.writable_bytes, len(data)
        offset = self.locate(index, size)
        memory[offset : offset + size] = data

    def locate_for(self, lane: int, index: int, size: int, *, stores: bool = False) -> int:
        """As `locate`, for another lane of the warp than the one that runs."""
        return self.locate(index, size)

    def exchange(self, index, function: Callable) -> Any:
        """An atomic: the element becomes `function` of it. What it was before."""
        old = self[index]
        self[index] = function(old)
        return old

    # Relaxed accesses, by which blocks see what others have: see `steps.simulator.tracked`.
    def locate_relaxed(self, index: int, size: int) -> int:
        return self.locate(index, size)

    def store_relaxed(self, index: int, data: Any) -> None:
        self.store(index, data)

    # A `cp.async` stores from its issue to its wait: see `steps.simulator.shadow`.
    def begin_async_store(self, lane: Any, offset: int, size: int) -> None:
        pass

    def end_async_store(self, lane: Any, offset: int, size: int) -> None:
        pass

    def locate(self, index: int, size: int, alignment: int | None = None) -> int:
        """The byte offset of element `index` of the flat array for an access of `size` bytes.

        Raises OutOfRange unless all of it is inside, Misaligned unless its address is certainly a
        multiple of `alignment` (default: the size).
        """
        index = operator.index(index)
        offset = index * self.itemsize
        if index < 0 or offset + size > self.nbytes:
            raise OutOfRange(
                f"{self.name}: {size} bytes at index {index} (byte {offset}) are outside its "
                f"{self.nbytes} bytes, shape {self.shape}"
            )
        alignment = alignment or size
        begin = self._base
        if begin is None:
            begin = self._begin()
        if (offset + begin) % alignment:
            where = f" at byte {begin} of its allocation" if begin else ""
            raise Misaligned(
                f"{self.name}{where}: index {index} is byte {offset}, "
                f"{(offset + begin) % alignment} past a multiple of {alignment}; "
                f"a {size}-byte access faults there on the GPU"
            )
        if alignment > self.alignment:
            raise Misaligned(
                f"{self.name} ({self.space}, {self.dtype}) is declared with alignment "
                f"{self.alignment}, so a {size}-byte access may fault on the GPU; "
                f"declare it with alignment={alignment}"
            )
        return offset


class Stored(NamedTuple):
    """How values are stored as elements of a type."""

    cast: Callable  # the C cast
    type: type  # a value of this Python type, from `low` to `high`, is stored as it is
    low: Any = None  # None: any value of that type
    high: Any = None


@cache
def stored_as(dtype: np.dtype) -> Stored:
    """TypeError for a dtype of which there are no elements here."""
    cast = cast_to(dtype)
    if dtype.kind == "f":
        return Stored(cast, dtype.type)
    if dtype.kind == "b":
        return Stored(cast, bool)
    limits = np.iinfo(dtype)
    return Stored(cast, int, int(limits.min), int(limits.max))


def garbage(shape, dtype) -> np.ndarray:
    """Memory nobody wrote: NaN in floats, bytes 0xA5 (165, -91) in everything else."""
    return _garbage((shape,) if isinstance(shape, int) else tuple(shape), as_dtype(dtype)).copy()


@cache
def _garbage(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    if dtype.kind == "f":
        return np.full(shape, np.nan, dtype)
    return np.full(prod(shape) * dtype.itemsize, 0xA5, np.uint8).view(dtype).reshape(shape)


def offset_in_allocation(data: np.ndarray) -> int:
    """Bytes from the start of the owner of the memory, which stands for an aligned allocation."""
    return data.__array_interface__["data"][0] - owner(data).__array_interface__["data"][0]


def owner(data: np.ndarray) -> np.ndarray:
    """The array whose memory `data` is a view of."""
    while isinstance(data.base, np.ndarray):
        data = data.base
    return data


def _show_key(key) -> str:
    if isinstance(key, slice):
        return f"{'' if key.start is None else key.start}:{'' if key.stop is None else key.stop}"
    return str(key)
