"""The meaning of every instruction in the simulator, registered by `steps.instructions.define`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Twin:
    """The meaning of an instruction in the simulator.

    `function` takes the operands, cast to the declared types, and returns the result(s), which are
    cast likewise. With `scope="lane"` it takes the simulator's lane first; with `scope="warp"` (or
    "warpgroup") it takes a list of the operand tuples of all lanes, is called once when the last
    lane has arrived, and returns the list of their results.
    """

    name: str
    function: Callable
    scope: str | None
    casts: tuple[Callable, ...]  # of each argument
    results: tuple[Callable, ...]
    is_tuple: bool


@dataclass(frozen=True, slots=True)
class Definition:
    """What is known of one instruction: its text (or a part of it that no other has), the oldest
    GPU that has it, or the only one, and its twin."""

    name: str
    text: str
    min_cc: tuple[int, int]
    only: str | None
    twin: Twin


INSTRUCTIONS: dict[Any, Definition] = {}
"""Numba intrinsic -> what is known of it."""

ARGUMENTS: dict[type, Callable[[Any], Any]] = {}
"""Class of a launch's argument that is neither an array nor a number -> what the kernel sees of it.
ValueError where a GPU could not take it."""
