"""GGUF files byte by byte: keys of any type and value, tensors of any name, size and type.

gguf's own writer refuses, or cannot say, most of what a test of refusals needs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from qformats.gguf_file import metadata, tensors

Value = tuple[int, Any]
"""(type, value); of an array (ARRAY, (type of the items, items))."""

U32, I32, F32, BOOL, STRING, ARRAY, I64, F64 = 4, 5, 6, 7, 8, 9, 11, 12
SCALARS: Final = {
    **{0: "B", 1: "b", 2: "H", 3: "h", U32: "I", I32: "i", F32: "f", BOOL: "?"},
    **{10: "Q", I64: "q", F64: "d"},
}


def array(kind: int, items: Iterable[Any]) -> Value:
    return ARRAY, (kind, list(items))


def text(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


def encoded(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return text(value)
    if kind == ARRAY:
        of, items = value
        return struct.pack("<IQ", of, len(items)) + b"".join(encoded(of, one) for one in items)
    return struct.pack("<" + SCALARS[kind], value)


@dataclass(frozen=True)
class Tensor:
    """dims: innermost first. offset: from where the data begin; by default behind the others."""

    name: str
    dims: tuple[int, ...]
    type: int
    data: bytes
    offset: int | None = None


@dataclass(frozen=True)
class File:
    keys: dict[str, Value]
    tensors: tuple[Tensor, ...]

    def with_keys(self, changes: Mapping[str, Value | None]) -> File:
        """With other keys; those that are None are left out."""
        keys = self.keys | dict(changes)
        return replace(self, keys={name: one for name, one in keys.items() if one is not None})

    def with_tensor(self, name: str, **changes: Any) -> File:
        """With changes of one tensor."""
        made = [replace(one, **changes) if one.name == name else one for one in self.tensors]
        return replace(self, tensors=tuple(made))

    def bytes(self) -> bytes:
        infos, data = b"", bytearray()
        for one in self.tensors:
            offset = len(data) if one.offset is None else one.offset
            dims = struct.pack(f"<I{len(one.dims)}Q", len(one.dims), *one.dims)
            infos += text(one.name) + dims + struct.pack("<IQ", one.type, offset)
            data += one.data + bytes(-len(one.data) % 32)
        head = b"GGUF" + struct.pack("<IQQ", 3, len(self.tensors), len(self.keys))
        for name, (kind, value) in self.keys.items():
            head += text(name) + struct.pack("<I", kind) + encoded(kind, value)
        head += infos
        return head + bytes(-len(head) % 32) + bytes(data)


def read(path: Path) -> File:
    """A file as it is, whose integers are all written in 32 bits."""
    keys = {name: _value(one) for name, one in metadata(path).items()}
    found = []
    for one in tensors(path).values():
        data = one.array.tobytes()
        kind = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8}[one.type]
        found.append(Tensor(one.name, one.shape[::-1], kind, data))
    return File(keys, tuple(found))


def _value(value: Any) -> Value:
    if isinstance(value, list):
        return array(STRING, value)
    if isinstance(value, np.ndarray):
        return array(F32 if value.dtype.kind == "f" else I32, value.tolist())
    kinds = {bool: BOOL, int: U32, float: F32, str: STRING}
    return kinds[type(value)], value
