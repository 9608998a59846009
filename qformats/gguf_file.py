"""The tensors of a GGUF file, memory-mapped: blocks and floats where they lie, not copied.

    from qformats.gguf_file import tensors
    weights = tensors("model.gguf")["blk.0.ffn_up.weight"]
    weights.type, weights.shape       # "q4_k", (N, K)
    weights.array                     # block_q4_k[N, K // 256], a read-only view of the file
    weights.values()                  # float32[N, K]
    metadata("model.gguf")["general.architecture"]      # "llama"

The header is walked here, as ggml's `docs/gguf.md` lays it out, and the types are those of the
`gguf` package. Its own reader takes the numbers of a file as they come: an array said to have 2^60
items keeps version 0.19.0 busy until memory is gone, and a tensor that is not all there ends in
NumPy's words about reshaping. It also makes arrays of each item of the metadata, 14 s for the
vocabulary of Llama 3. Here every count, length and offset is held against the size of the file.
GGUF has no checksum: a changed weight is a weight.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType
from gguf.gguf_reader import READER_SUPPORTED_VERSIONS
from numpy.typing import NDArray

from qformats.codec import FILE_FORMATS, FORMATS, WEIGHT_FORMATS, Floats

_FLOATS: Final = {"f32": "<f4", "f16": "<f2", "bf16": "<u2"}  # NumPy has no bfloat16: its bits
READABLE: Final = (*WEIGHT_FORMATS, *FILE_FORMATS, *_FLOATS)
"""The types of which `Tensor.array` and `Tensor.values` can be had; others are listed only."""

_STRING, _ARRAY, _U32 = 8, 9, 4  # of the types of metadata
_NUMBERS: Final = {  # of the other types of metadata, as NumPy has them
    **{0: "u1", 1: "i1", 2: "<u2", 3: "<i2", _U32: "<u4", 5: "<i4", 6: "<f4", 7: "?"},
    **{10: "<u8", 11: "<i8", 12: "<f8"},
}
_DIMENSIONS: Final = 4  # ggml's GGML_MAX_DIMS
# Items of one metadata array: strings are walked one by one. Half a million merges are in use.
_ITEMS: Final = 1 << 22


class GGUFError(ValueError):
    """A file that is cut short, damaged, or of a kind that is not read here: one sentence."""


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """One tensor of a file. `shape` is NumPy's, outermost first: a weight matrix is (N, K).

    `type` is ggml's name of it in lower case ("q4_k", "f32"), `offset` its first byte in the file.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int
    _file: NDArray[np.uint8]

    @property
    def array(self) -> NDArray[Any]:
        """The content, as a read-only view of the file, which must not change meanwhile.

        Blocks, structured[..., K // elements], of a block format; float32 or float16 [..., K];
        uint16[..., K], the upper halves of float32, of bf16. GGUFError for other types.
        """
        if self.type not in READABLE:
            raise GGUFError(
                f"{self.name} is {self.type}, which is not read here: "
                f"use a tensor of {', '.join(READABLE)}"
            )
        shape, dtype = self.shape, np.dtype(_FLOATS.get(self.type, "u1"))
        if fmt := FORMATS.get(self.type):
            shape, dtype = (*shape[:-1], shape[-1] // fmt.elements), fmt.dtype
        raw = self._file[self.offset : self.offset + self.nbytes]
        return np.asarray(raw).view(dtype).reshape(shape)

    def values(self) -> Floats:
        """The content in float32[..., K]: a view of the file for f32, else a new array. GGUFError
        for other types than `READABLE`."""
        array = self.array
        if self.type in FORMATS:
            return FORMATS[self.type].dequantize(array)
        if self.type == "bf16":
            return (array.astype(np.uint32) << 16).view(np.float32)
        return array.astype(np.float32, copy=False)


def tensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a GGUF file by name, in the file's order. The file is mapped, not loaded.

    Raises OSError where it cannot be opened; GGUFError, a ValueError, where it is no GGUF file, cut
    short, damaged, big-endian, or holds a type that the installed `gguf` does not know.
    """
    return {one.name: one for one in _walk(Path(path))[1]}


def metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a GGUF file says of the model by key: str, int, float or bool; of an array of strings a
    list, of one of numbers a NumPy array. Raises as `tensors` does."""
    return _walk(Path(path), decode=True)[0]


# --- the header -----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Cursor:
    """A position in the header; whatever is taken must lie inside the file."""

    path: Path
    data: mmap.mmap
    at: int = 0

    def skip(self, count: int, what: str) -> int:
        """Move past `count` bytes that hold `what`; where they begin."""
        start, left = self.at, len(self.data) - self.at
        if count > left:
            raise GGUFError(
                f"{self.path} is cut short or damaged: {what} at byte {start} takes {count} bytes "
                f"and {left} are left; get the file again"
            )
        self.at += count
        return start

    def u32(self, what: str) -> int:
        number: int = struct.unpack_from("<I", self.data, self.skip(4, what))[0]
        return number

    def u64(self, what: str) -> int:
        number: int = struct.unpack_from("<Q", self.data, self.skip(8, what))[0]
        return number

    def text(self, what: str) -> str:
        count = self.u64(f"the length of {what}")
        start = self.skip(count, what)
        try:
            return self.data[start : self.at].decode()
        except UnicodeDecodeError:
            raise self.damaged(f"{what} at byte {start} is not UTF-8") from None

    def spans(self, count: int, what: str) -> list[tuple[int, int]]:
        """Where each of `count` strings begins and ends; past them. A vocabulary has 300 000, so
        this is a loop without calls."""
        data, size, at, length = self.data, len(self.data), self.at, struct.Struct("<Q").unpack_from
        found = []
        for _ in range(count):
            start = at + 8
            end = start + length(data, at)[0] if start <= size else size + 1
            if end > size:  # what reads it alone says what is wrong
                self.at = at
                self.skip(self.u64(f"the length of {what}"), what)
            found.append((start, end))
            at = end
        self.at = at
        return found

    def value(self, key: str, decode: bool) -> tuple[int, Any]:
        """(The type, the value) of a key: a string or number, of an array a list or an array; None
        where it is only stepped over."""
        what, count, stated = f"the value of {key!r}", None, self.u32(f"the type of {key!r}")
        kind = stated
        if kind == _ARRAY:
            kind, count = self.u32(f"the item type of {key!r}"), self.u64(f"the length of {key!r}")
            if count > _ITEMS:
                raise self.damaged(f"{key!r} states {count} items; at most {_ITEMS} are read")
        items = 1 if count is None else count
        if kind == _STRING:
            spans = self.spans(items, what)
            try:
                found = [self.data[start:end].decode() for start, end in spans if decode]
            except UnicodeDecodeError:
                raise self.damaged(f"{what} is not UTF-8") from None
            return stated, found[0] if found and count is None else found
        if kind not in _NUMBERS:
            raise self.damaged(f"{what} has type {kind}, and no such type is read")
        dtype = np.dtype(_NUMBERS[kind])
        start = self.skip(items * dtype.itemsize, what)
        if not decode:
            return stated, None
        numbers = np.frombuffer(self.data[start : self.at], dtype)
        return stated, numbers[0].item() if count is None else numbers

    def damaged(self, why: str) -> GGUFError:
        return GGUFError(f"{self.path} is damaged: {why}; get the file again")


@dataclass(frozen=True, slots=True)
class _Entry:
    """What the header says of a tensor."""

    name: str
    dims: tuple[int, ...]  # innermost first, as in the file
    type: int
    offset: int  # from where the data begin


def _walk(path: Path, decode: bool = False) -> tuple[dict[str, Any], list[Tensor]]:
    """(The metadata, if they are to be decoded; the tensors) of a file.

    GGUFError where the header is not sound, or says something that the file is too small for.
    """
    if path.exists() and not path.is_file():
        raise GGUFError(f"{path} is not a file; name a .gguf file")
    with path.open("rb") as file:
        magic = file.read(4)
        if not magic:
            raise GGUFError(f"{path} is empty; get the file again")
        if magic != b"GGUF":
            raise GGUFError(f"{path} is not a GGUF file: it begins with {magic!r}, not b'GGUF'")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _walk_header(_Cursor(path, data, 4), decode)


def _walk_header(cursor: _Cursor, decode: bool) -> tuple[dict[str, Any], list[Tensor]]:
    version = cursor.u32("the version")
    if version & 0xFFFF == 0 and version:
        raise GGUFError(
            f"{cursor.path} is big-endian (its version reads {version:#x}), and only little-endian "
            f"files are read here: convert it with gguf-convert-endian"
        )
    if version not in READER_SUPPORTED_VERSIONS:
        raise GGUFError(
            f"{cursor.path} is GGUF version {version}, and versions "
            f"{', '.join(map(str, READER_SUPPORTED_VERSIONS))} are read: convert the model again"
        )
    count, keys = cursor.u64("the number of tensors"), cursor.u64("the number of keys")
    found: dict[str, Any] = {}
    alignment = GGUF_DEFAULT_ALIGNMENT
    for i in range(keys):
        key = cursor.text(f"key {i}")
        if key in found:
            raise cursor.damaged(f"two keys are called {key!r}")
        kind, found[key] = cursor.value(key, decode or key == "general.alignment")
        if key == "general.alignment":
            alignment = found[key] if kind == _U32 else 0
            if alignment.bit_count() != 1:
                raise cursor.damaged("general.alignment is not a power of two in 32 bits")
    entries: dict[str, _Entry] = {}
    for i in range(count):
        entry = _entry(cursor, i)
        if entry.name in entries:
            raise cursor.damaged(f"two tensors are called {entry.name!r}")
        entries[entry.name] = entry
    return found, _tensors(cursor, list(entries.values()), alignment)


def _tensors(cursor: _Cursor, entries: list[_Entry], alignment: int) -> list[Tensor]:
    begin = -(-cursor.at // alignment) * alignment
    file, made = np.memmap(cursor.path, mode="r"), []
    for entry in entries:
        if entry.offset % alignment:
            raise cursor.damaged(
                f"{entry.name!r} has offset {entry.offset}, no multiple of {alignment}"
            )
        kind, size = _sized(cursor, entry)
        one = Tensor(entry.name, kind, entry.dims[::-1], size, begin + entry.offset, file)
        if one.offset + size > len(cursor.data):
            raise GGUFError(
                f"{cursor.path} is cut short or damaged: {entry.name!r} lies in bytes {one.offset} "
                f"to {one.offset + size} of {len(cursor.data)}; get the file again"
            )
        made.append(one)
    spans = sorted((one.offset, one.offset + one.nbytes, one.name) for one in made)
    for (_, end, before), (start, _, name) in pairwise(spans):
        if start < end:
            raise cursor.damaged(f"{before!r} and {name!r} overlap at byte {start}")
    return made


def _entry(cursor: _Cursor, i: int) -> _Entry:
    name = cursor.text(f"the name of tensor {i}")
    rank = cursor.u32(f"the rank of {name!r}")
    if rank > _DIMENSIONS:
        raise cursor.damaged(f"{name!r} has {rank} dimensions; {_DIMENSIONS} are the most")
    dims = tuple(cursor.u64(f"a dimension of {name!r}") for _ in range(rank))
    kind = cursor.u32(f"the type of {name!r}")
    return _Entry(name, dims, kind, cursor.u64(f"the offset of {name!r}"))


def _sized(cursor: _Cursor, entry: _Entry) -> tuple[str, int]:
    """(The type in lower case, how many bytes of data) the entry states."""
    try:
        kind = GGMLQuantizationType(entry.type)
    except ValueError:
        raise GGUFError(
            f"{cursor.path}: {entry.name!r} is of type {entry.type}, which the installed gguf does "
            f"not know; a newer gguf may, else the file is damaged"
        ) from None
    elements, size = GGML_QUANT_SIZES[kind]
    row = entry.dims[0] if entry.dims else 1
    if row % elements:
        raise cursor.damaged(
            f"{entry.name!r} has rows of {row} elements, and {kind.name.lower()} has {elements} a "
            f"block"
        )
    return kind.name.lower(), math.prod(entry.dims) // elements * size
