"""What a step would launch: its launches on arrays that reserve no memory and are never touched."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np

from qformats import FORMATS
from steps.components.activations.layouts import reading
from steps.contract import Launch, Shape, Size, Work

ROWS: Final = 128
K: Final = 256
"""Of the weights that launches are made with: all that is read of them is their type."""


class DryRun:
    """A machine that only hands out arrays: they reserve address space and no memory."""

    name = "dry run"
    cc: tuple[int, int] | None = None

    def array(self, host: np.ndarray) -> np.ndarray:
        return np.array(host, order="C")

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.empty(shape, dtype)

    def host(self, array: np.ndarray) -> np.ndarray:
        return array

    def run(self, launch: Launch) -> None:
        raise RuntimeError("a dry run launches nothing")


@cache
def _packed(pack: Any, format_name: str) -> tuple[np.ndarray, ...]:
    """A few weights as a step reads them, all zero."""
    fmt = FORMATS[format_name]
    return tuple(pack(np.zeros((ROWS, K // fmt.elements), fmt.dtype)))


def launches(
    work: Work, size: Size, *, output: str = "float32", given: str = "float32"
) -> tuple[tuple[Launch, ...], Launch]:
    """(launches of the activation pass, the step's own launch) of one product.

    output : dtype of C.
    given  : how A comes, see `steps.components.activations.layouts.reading`.
    """
    m, n, k = size
    step, machine, fmt = work.step, DryRun(), FORMATS[work.format]
    make, _, (wide, dtype) = reading(step.activations, given)
    activations = make(work.family, machine.empty((m, wide * k), np.dtype(dtype)), machine)
    out = machine.empty((m, n), np.dtype(output))
    weights = _packed(step.pack, work.format)
    own = step.prepare(machine, fmt, work.family, Shape(m, n, k), weights, activations.arrays, out)
    return activations.launches, own
