"""Local arrays, which stand for registers: kernels make and access more of them than of others."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from steps.simulator.arrays import CheckedArray, Stored, garbage, stored_as
from steps.simulator.c_types import as_dtype


def local_array(shape, dtype, alignment: int | None = None) -> CheckedArray:
    """A fresh array of garbage."""
    if type(shape) is int:
        shape = (shape,)
    layout = _layout(tuple(shape), dtype)
    alignment = alignment or layout.dtype.alignment
    if layout.kind is CheckedArray:
        return CheckedArray(garbage(shape, layout.dtype), _NAME, "local", alignment)
    return layout.kind(layout, alignment)


_NAME = "local array"


class _Layout(NamedTuple):
    """What all arrays of one declaration have in common."""

    kind: Any  # the class
    values: list  # before anything is written
    shape: tuple[int, ...]
    dtype: np.dtype
    stored: Stored


def _in_memory(name: str) -> Any:
    """An attribute that only an array in memory has."""
    return property(lambda array: getattr(array.in_memory(), name))


class _Registers(CheckedArray):
    """A local array while a kernel only loads and stores its elements: a list of values.

    Any other use (its bytes, a slice, a view), or an index outside its range, makes it an ordinary
    `CheckedArray` for good.
    """

    __slots__ = ()

    def __init__(self, layout: _Layout, alignment: int):
        _, values, self.shape, self.dtype, found = layout
        self._values: Any = values.copy()
        self._cast, self._stored, self._low, self._high = found
        self.alignment = alignment

    def in_memory(self) -> CheckedArray:
        """The same array, from now on with `data`."""
        data = np.array(self._values, self.dtype).reshape(self.shape)
        self._values = None  # which its rows look for
        self.__class__ = CheckedArray  # type: ignore[assignment]
        CheckedArray.__init__(self, data, _NAME, "local", self.alignment)
        return self

    # A `__getattr__` would make every access to an attribute slow.
    data, name, space = _in_memory("data"), _in_memory("name"), _in_memory("space")
    ndim, itemsize, nbytes = _in_memory("ndim"), _in_memory("itemsize"), _in_memory("nbytes")
    _base, _bytes, _writable = _in_memory("_base"), _in_memory("_bytes"), _in_memory("_writable")


class _Row(_Registers):
    """Of one dimension."""

    __slots__ = ()

    def __getitem__(self, key):
        if type(key) is int and 0 <= key < self.shape[0]:
            return self._values[key]
        return self.in_memory()[key]

    def __setitem__(self, key, value) -> None:
        if type(key) is int and 0 <= key < self.shape[0]:
            if type(value) is self._stored and (
                self._low is None or self._low <= value <= self._high
            ):
                self._values[key] = value
            else:
                self._values[key] = self._cast(value)
        else:
            self.in_memory()[key] = value


class _Table(_Registers):
    """Of two dimensions."""

    __slots__ = ()

    # The place is looked for in both: a call would take as long as the rest.
    def __getitem__(self, key):
        if type(key) is tuple and len(key) == 2:
            i, j = key
            rows, columns = self.shape
            if type(i) is int and type(j) is int and 0 <= i < rows and 0 <= j < columns:
                return self._values[i * columns + j]
        elif type(key) is int and 0 <= key < self.shape[0]:
            return _RowOf(self, key)
        return self.in_memory()[key]

    def __setitem__(self, key, value) -> None:
        if type(key) is tuple and len(key) == 2:
            i, j = key
            rows, columns = self.shape
            if type(i) is int and type(j) is int and 0 <= i < rows and 0 <= j < columns:
                if type(value) is self._stored and (
                    self._low is None or self._low <= value <= self._high
                ):
                    self._values[i * columns + j] = value
                else:
                    self._values[i * columns + j] = self._cast(value)
                return
        self.in_memory()[key] = value


class _RowOf(_Registers):
    """A row of a table: its values are the table's, or lie in memory where that does."""

    __slots__ = ()

    def __init__(self, table: _Table, i: int):
        self._table, self.shape, self.dtype = table, table.shape[1:], table.dtype
        self._first = i * table.shape[1]
        self._cast, self._stored = table._cast, table._stored
        self._low, self._high, self.alignment = table._low, table._high, table.alignment

    def in_memory(self) -> CheckedArray:
        table = self._table if self._table._values is None else self._table.in_memory()
        data = table.data[self._first // self.shape[0]]
        self.__class__ = CheckedArray  # type: ignore[assignment]
        CheckedArray.__init__(self, data, _NAME, "local", self.alignment)
        return self

    def __getitem__(self, key):
        values = self._table._values
        if type(key) is int and 0 <= key < self.shape[0] and values is not None:
            return values[self._first + key]
        return self.in_memory()[key]

    def __setitem__(self, key, value) -> None:
        values = self._table._values
        if type(key) is int and 0 <= key < self.shape[0] and values is not None:
            if type(value) is self._stored and (
                self._low is None or self._low <= value <= self._high
            ):
                values[self._first + key] = value
            else:
                values[self._first + key] = self._cast(value)
        else:
            self.in_memory()[key] = value


@cache
def _layout(shape: tuple[int, ...], dtype) -> _Layout:
    dtype = as_dtype(dtype)
    numbers = dtype.kind in "iuf"
    kind = {1: _Row, 2: _Table}.get(len(shape), CheckedArray) if numbers else CheckedArray
    unwritten = garbage(shape, dtype).reshape(-1)
    values = list(unwritten) if dtype.kind == "f" else unwritten.tolist()
    return _Layout(kind, values, shape, dtype, stored_as(dtype))
