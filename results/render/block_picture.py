"""The block of a format, byte by byte: what stands in each, for a page without script."""

from __future__ import annotations

from dataclasses import dataclass

from qformats import FORMATS
from qformats.draw import meaning


@dataclass(frozen=True, slots=True)
class Byte:
    """One byte of a block: the field it is of, and what its bits hold, a sentence for each run."""

    number: int
    field: str
    holds: list[str]


@dataclass(frozen=True, slots=True)
class Block:
    name: str
    elements: int
    bytes: list[Byte]
    fields: list[str]  # in the order of the bytes


def block(name: str) -> Block:
    """Of the format of this name."""
    fmt = FORMATS[name]
    found = [Byte(i, *meaning(fmt, i)) for i in range(fmt.block_bytes)]
    return Block(name, fmt.elements, found, list(dict.fromkeys(each.field for each in found)))
