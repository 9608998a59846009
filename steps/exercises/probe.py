"""Which weight meets which activation: what a wrong sum cannot say.

A is the identity, one block long: row m has a 1 at element m and zeros elsewhere. So C[m, n] is the
weight of row n that element m of A meets. Three rows of weights tell the 32 elements apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any, Final

import numpy as np

from qformats import BLOCK, FORMATS
from reference.exact import pack_block
from steps.api.machines import Simulator
from steps.checks.verify import multiply, prepare
from steps.contract import Family, Step

_J: Final = np.arange(BLOCK)
CODES: Final = np.stack([_J % 16, (5 * _J + 3) % 16, 1 + _J // 16 * 6])[:, None, :]
"""[3, 1, 32]: together different for each element, and for no element the sum of two others."""

SHOWN: Final = 4
MIXTURE: Final = -1


def pairing(step: Step, family: Family, format_name: str) -> str | None:
    """A sentence about the elements of a block that meet other weights than their own, or none;
    None where each meets its own, or none a single one, and where the kernel has no result."""
    minimum = np.full((3, 1), 0.5) if "m" in (FORMATS[format_name].dtype.names or ()) else None
    blocks = pack_block(format_name, CODES, np.full((3, 1), 0.25), minimum)
    fmt, a = FORMATS[format_name], np.eye(BLOCK, dtype=np.float32)
    machine = Simulator()
    try:
        c = multiply(prepare(step, family, format_name, a, blocks, machine), machine)
    except Exception:  # a fault, which is told where it matters
        return None
    codes = (c.astype(np.float64) - fmt.offset(blocks)[:, 0]) / fmt.scale(blocks)[:, 0]
    met = [_element(row) for row in codes]
    wrong = [(m, j) for m, j in enumerate(met) if j != m]
    if not wrong or all(j == MIXTURE for j in met):
        return None
    return f"In a block, {'; '.join(_told(wrong))}."


def _element(codes: Any) -> int | None:
    """The element that has these codes; None for none at all."""
    if np.abs(codes).max() < 0.05:
        return None
    near = np.abs(CODES[:, 0].T - codes).max(axis=1) < 0.05
    return int(np.argmax(near)) if near.any() else MIXTURE


def _told(wrong: list[tuple[int, int | None]]) -> Iterator[str]:
    """Elements with the same fate together, neighbours as a range."""

    def fate(place: int) -> Any:
        m, j = wrong[place]
        return m - place, j if j is None or j == MIXTURE else m - j

    for told, (_, group) in enumerate(groupby(range(len(wrong)), key=fate)):
        own = [wrong[place] for place in group]
        if told == SHOWN:
            yield "and so on"
            return
        (first, j), last = own[0], own[-1][0]
        several = len(own) > 1
        who = f"elements {first} to {last} of A meet" if several else f"element {first} of A meets"
        if j is None:
            yield f"{who} nothing"
        elif j == MIXTURE:
            yield f"{who} no weight as it is (a mixture, or a wrong scale)"
        elif several:
            yield f"{who} weights {j} to {j + last - first}"
        else:
            yield f"{who} weight {j}"
