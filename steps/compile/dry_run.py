"""A dry run: launches made without a GPU, on arrays that have no memory (placeholders).

What a kernel's `launch` returns, with what grid and what arguments, follows from the types and
shapes of its arrays. So a `Placeholder` can stand for each of them. Listings and the parallel
compiler read the kernels and signatures of such launches; `steps.product.prepared` loads them and
replaces the addresses of placeholders by those of each call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Protocol

import numpy as np

from qformats import FORMATS
from steps.contract import Launch, array_dtype

REGION: Final = 1 << 52
"""Bytes of addresses for each operand, more than any array has. So an address in a launch tells
which operand it belongs to, and the offset in it."""

A, OUT, ZEROED, WORKSPACE, WEIGHTS = (REGION * (1 + i) for i in range(5))
"""Where the operands' placeholders begin: activations, C, memory that must be zero before the first
launch, memory that may hold anything, and the first array of the weights. The others follow."""

ALIGNMENT: Final = 256
"""Bytes; every array in a workspace begins at a multiple of it, as CUDA's own allocations do."""

ROWS: Final = 128
K: Final = 256
"""Size of the small matrix that is packed to learn the types of the arrays that a packing makes."""

ArrayType = tuple[tuple[int, ...], Any]
"""(shape, dtype) of an array."""


@dataclass(frozen=True, slots=True, eq=False)
class Placeholder:
    """A C-contiguous array without memory. `address` stands for the one that a call brings."""

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        """In bytes, as NumPy's."""
        item = self.dtype.itemsize
        return tuple(item * math.prod(self.shape[i + 1 :]) for i in range(self.ndim))


class DryRun:
    """A machine that hands out placeholders and adds up the bytes that they stand for.

    zeroed: bytes of arrays that must be zero at first (`array`); nbytes: of the others (`empty`).
    Both are multiples of `ALIGNMENT`.
    """

    name = "dry run"
    cc: tuple[int, int] | None = None

    def __init__(self) -> None:
        self._used = {ZEROED: 0, WORKSPACE: 0}

    @property
    def zeroed(self) -> int:
        return self._used[ZEROED]

    @property
    def nbytes(self) -> int:
        return self._used[WORKSPACE]

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Placeholder:
        return self._placeholder(WORKSPACE, shape, np.dtype(dtype))

    def array(self, host: np.ndarray) -> Placeholder:
        """TypeError unless all of it is zero: a placeholder has no values."""
        if host.any():
            raise TypeError("a step's scratch memory must be all zero at first")
        return self._placeholder(ZEROED, host.shape, host.dtype)

    def host(self, array: Any) -> np.ndarray:
        raise RuntimeError("arrays of a dry run have no values")

    def run(self, launch: Launch) -> None:
        raise RuntimeError("a dry run launches nothing")

    def _placeholder(
        self, region: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> Placeholder:
        if not math.prod(shape):
            return Placeholder(0, shape, dtype)  # no bytes, so no address
        made = Placeholder(region + self._used[region], shape, dtype)
        self._used[region] += -(-made.size * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        return made


class Recipe(Protocol):
    """What makes launches on placeholders: a `steps.product.choice.Choice`, or `OfArrays`. Where it
    can be pickled, another process makes the same ones."""

    def launches(self) -> Sequence[Launch]: ...
    def runs_on(self, cc: tuple[int, int]) -> bool: ...


@dataclass(frozen=True, slots=True)
class OfArrays:
    """The recipe of a launch that is no product's, such as norms and attention
    (`steps.kernels.between`): make(*arrays, machine=...) of arrays of these shapes and dtypes."""

    make: Callable[..., Launch]
    arrays: tuple[ArrayType, ...]

    def launches(self, machine: DryRun | None = None) -> tuple[Launch, ...]:
        """machine: adds up the memory that the launch asks for. The arrays are at `operands`."""
        placeholders = [
            Placeholder(at, shape or (1,), array_dtype(dtype))
            for at, (shape, dtype) in zip(operands(len(self.arrays)), self.arrays, strict=True)
        ]
        return (self.make(*placeholders, machine=machine or DryRun()),)

    def runs_on(self, cc: tuple[int, int]) -> bool:
        return True


def operands(count: int) -> list[int]:
    """Where the placeholders of so many operands begin: `WEIGHTS` and on, `REGION` apart."""
    return [WEIGHTS + i * REGION for i in range(count)]


@cache
def packed_types(pack: Any, format_name: str) -> tuple[ArrayType, ...]:
    """The types of the arrays that `pack` makes of a small matrix."""
    fmt = FORMATS[format_name]
    arrays = pack(np.zeros((ROWS, K // fmt.elements), fmt.dtype))
    return tuple((array.shape, array.dtype) for array in arrays)
