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

A split file is read as one: its first part, m-00001-of-00003.gguf, is named, and the others are
found beside it.
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
from qformats.terminal import sentence, shown

_FLOATS: Final = {"f32": "<f4", "f16": "<f2", "bf16": "<u2"}  # NumPy has no bfloat16: its bits
READABLE: Final = (*WEIGHT_FORMATS, *FILE_FORMATS, *_FLOATS)
"""The types of which `Tensor.array` and `Tensor.values` can be had; others are listed only."""

GGML_TYPES: Final = {
    int(GGMLQuantizationType[name.upper()]): name
    for name in (*WEIGHT_FORMATS, *FILE_FORMATS)
    if name.upper() in GGMLQuantizationType.__members__
}
"""Formats by ggml's number of the type, as far as the installed `gguf` knows them: {2: "q4_0"}."""

_STRING, _ARRAY, _U32 = 8, 9, 4  # of the types of metadata
_NUMBERS: Final = {  # of the other types of metadata, as NumPy has them
    **{0: "u1", 1: "i1", 2: "<u2", 3: "<i2", _U32: "<u4", 5: "<i4", 6: "<f4", 7: "?"},
    **{10: "<u8", 11: "<i8", 12: "<f8"},
}
_DIMENSIONS: Final = 4  # ggml's GGML_MAX_DIMS
# Items of one metadata array: strings are walked one by one. Half a million merges are in use.
_ITEMS: Final = 1 << 22
# Tensors, and keys, of a file. Models in use have up to some thousands.
_ENTRIES: Final = 1 << 14
_REMOVED: Final = {
    **{4: "q4_2", 5: "q4_3", 31: "q4_0_4_4", 32: "q4_0_4_8", 33: "q4_0_8_8"},
    **{36: "iq4_nl_4_4", 37: "iq4_nl_4_8", 38: "iq4_nl_8_8"},
}
"""Types that GGUF once had; ggml's `ggml.h` keeps their numbers free."""
_SPLIT: Final = ("split.no", "split.count", "split.tensors.count")


class GGUFError(ValueError):
    """A file that is cut short, damaged, or of a kind that is not read here: one sentence, in which
    what the file says is as `qformats.terminal.shown`."""

    def __init__(self, text: str) -> None:
        super().__init__(sentence(text))


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """One tensor of a file. `shape` is NumPy's, outermost first: a weight matrix is (N, K).

    `name` is as `qformats.terminal.shown`, `type` ggml's name of it in lower case ("q4_k", "f32"),
    `offset` its first byte in the file.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int
    _file: np.memmap[Any, np.dtype[np.uint8]]

    @property
    def path(self) -> Path:
        """The file that it lies in: one part of a split file."""
        return Path(str(self._file.filename))

    @property
    def array(self) -> NDArray[Any]:
        """The content, as a read-only view of the file, which must not change meanwhile.

        Blocks, structured[..., K // elements], of a block format; float32 or float16 [..., K];
        uint16[..., K], the upper halves of float32, of bf16. GGUFError for other types.
        """
        if self.type not in READABLE:
            raise GGUFError(
                f"{self.name} is {self.type}, which is not read here: take a file in "
                f"{', '.join(READABLE)}, or make one by llama-quantize --allow-requantize"
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
    short, damaged, big-endian, a later part of a split file or one whose parts are not all there,
    or holds a type that the installed `gguf` does not know.
    """
    return _read(Path(path))[1]


def metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a GGUF file says of the model by key: str, int, float or bool; of an array of strings a
    list, of one of numbers a NumPy array. Raises as `tensors` does."""
    return _read(Path(path), decode=True)[0]


def _read(path: Path, decode: bool = False) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(The metadata, if they are to be decoded; the tensors) of a file, of all its parts."""
    keys, found = _walk(path, decode)
    number, count, total = _split(path, keys)
    if count > 1 and number:
        raise GGUFError(
            f"{path} is part {number + 1} of {count}: name the first one, which ends in "
            f"{_end(0, count)}"
        )
    if count > 1 and not path.name.endswith(_end(0, count)):
        raise GGUFError(
            f"{path} is part 1 of {count}, and the others are found by its name: let it end in "
            f"{_end(0, count)}"
        )
    for i in range(1, count):
        part = path.with_name(path.name.removesuffix(_end(0, count)) + _end(i, count))
        if not part.is_file():
            raise GGUFError(
                f"{path} is part 1 of {count} and part {i + 1} is not beside it: get {part.name}"
            )
        others, more = _walk(part)
        if (stated := _split(part, others)[:2]) != (i, count):
            raise GGUFError(
                f"{part} says that it is part {stated[0] + 1} of {stated[1]}, and not {i + 1} of "
                f"{count}: get the parts again"
            )
        if twice := found.keys() & more.keys():
            raise GGUFError(f"{part} has '{min(twice)}' of an earlier part: get the parts again")
        found |= more
        if len(found) > _ENTRIES:
            raise GGUFError(f"{path} and its parts have more than {_ENTRIES} tensors")
    if count > 1 and total not in (0, len(found)):
        raise GGUFError(
            f"{path} states {total} tensors and its {count} parts have {len(found)}: get them again"
        )
    return keys, found


def _split(path: Path, keys: dict[str, Any]) -> tuple[int, ...]:
    """(Which part of a split file it is, from 0; how many there are; tensors of all); zeros where
    the file does not say."""
    found = tuple(keys.get(name, 0) for name in _SPLIT)
    for name, one in zip(_SPLIT, found, strict=True):
        if type(one) is not int or one < 0:
            raise GGUFError(f"{path} is damaged: {name} is {one!r}, no count; get the file again")
    return found


def _end(i: int, count: int) -> str:
    """What the name of part i ends in."""
    return f"-{i + 1:05d}-of-{count:05d}.gguf"


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

    def name(self, what: str) -> str:
        """That of a key or a tensor, as `shown`: all that later names it may print it."""
        count = self.u64(f"the length of {what}")
        start = self.skip(count, what)
        try:
            return shown(self.data[start : self.at].decode())
        except UnicodeDecodeError:
            raise self.damaged(f"{what} at byte {start} is not UTF-8") from None

    def texts(self, count: int, what: str, decode: bool) -> list[str]:
        """`count` texts, if they are to be decoded; past them. A vocabulary has 300 000, so this is
        a loop without calls."""
        data, size, at, length = self.data, len(self.data), self.at, struct.Struct("<Q").unpack_from
        found: list[str] = []
        for _ in range(count):
            start = at + 8
            end = start + length(data, at)[0] if start <= size else size + 1
            if end > size:  # what reads it alone says what is wrong
                self.at = at
                self.skip(self.u64(f"the length of {what}"), what)
            if decode:
                try:
                    found.append(data[start:end].decode())
                except UnicodeDecodeError:
                    raise self.damaged(f"{what} is not UTF-8") from None
            at = end
        self.at = at
        return found

    def value(self, key: str, decode: bool) -> tuple[int, Any]:
        """(The type, the value) of a key: a string or number, of an array a list or an array; None
        where it is only stepped over."""
        what, count, stated = f"the value of '{key}'", None, self.u32(f"the type of '{key}'")
        kind = stated
        if kind == _ARRAY:
            kind, count = self.u32(f"the item type of '{key}'"), self.u64(f"the length of '{key}'")
            if count > _ITEMS:
                raise self.damaged(f"'{key}' states {count} items; at most {_ITEMS} are read")
        items = 1 if count is None else count
        if kind == _STRING:
            found = self.texts(items, what, decode)
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


def _walk(path: Path, decode: bool = False) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(The metadata, if they are to be decoded; the tensors) of a file, or of one part of it.

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


def _walk_header(cursor: _Cursor, decode: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
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
    for what, stated in (("tensors", count), ("keys", keys)):
        if stated > _ENTRIES:
            raise cursor.damaged(f"it states {stated} {what}; at most {_ENTRIES} are read")
    found: dict[str, Any] = {}
    alignment = GGUF_DEFAULT_ALIGNMENT
    for i in range(keys):
        key = cursor.name(f"key {i}")
        if key in found:
            raise cursor.damaged(f"two keys are called '{key}'")
        own = key == "general.alignment" or key in _SPLIT
        kind, found[key] = cursor.value(key, decode or own)
        if key == "general.alignment":
            alignment = found[key] if kind == _U32 else 0
            if alignment.bit_count() != 1:
                raise cursor.damaged("general.alignment is not a power of two in 32 bits")
    entries: dict[str, _Entry] = {}
    for i in range(count):
        entry = _entry(cursor, i)
        if entry.name in entries:
            raise cursor.damaged(f"two tensors are called '{entry.name}'")
        entries[entry.name] = entry
    made = _tensors(cursor, list(entries.values()), alignment)
    return found, {one.name: one for one in made}


def _tensors(cursor: _Cursor, entries: list[_Entry], alignment: int) -> list[Tensor]:
    begin = -(-cursor.at // alignment) * alignment
    file, made = np.memmap(cursor.path, mode="r"), []
    for entry in entries:
        if entry.offset % alignment:
            raise cursor.damaged(
                f"'{entry.name}' has offset {entry.offset}, no multiple of {alignment}"
            )
        kind, size = _sized(cursor, entry)
        one = Tensor(entry.name, kind, entry.dims[::-1], size, begin + entry.offset, file)
        if one.offset + size > len(cursor.data):
            raise GGUFError(
                f"{cursor.path} is cut short or damaged: '{entry.name}' lies in bytes {one.offset} "
                f"to {one.offset + size} of {len(cursor.data)}; get the file again"
            )
        made.append(one)
    spans = sorted((one.offset, one.offset + one.nbytes, one.name) for one in made)
    for (_, end, before), (start, _, name) in pairwise(spans):
        if start < end:
            raise cursor.damaged(f"'{before}' and '{name}' overlap at byte {start}")
    return made


def _entry(cursor: _Cursor, i: int) -> _Entry:
    name = cursor.name(f"the name of tensor {i}")
    rank = cursor.u32(f"the rank of '{name}'")
    if rank > _DIMENSIONS:
        raise cursor.damaged(f"'{name}' has {rank} dimensions; {_DIMENSIONS} are the most")
    dims = tuple(cursor.u64(f"a dimension of '{name}'") for _ in range(rank))
    kind = cursor.u32(f"the type of '{name}'")
    return _Entry(name, dims, kind, cursor.u64(f"the offset of '{name}'"))


def _sized(cursor: _Cursor, entry: _Entry) -> tuple[str, int]:
    """(The type in lower case, how many bytes of data) the entry states."""
    if entry.type in _REMOVED:
        raise GGUFError(
            f"{cursor.path}: '{entry.name}' is {_REMOVED[entry.type]}, a type that was removed "
            f"from GGUF: convert the model again"
        )
    try:
        kind = GGMLQuantizationType(entry.type)
    except ValueError:
        raise GGUFError(
            f"{cursor.path}: '{entry.name}' is of type {entry.type}, which the installed gguf does "
            f"not know; a newer gguf may, else the file is damaged"
        ) from None
    elements, size = GGML_QUANT_SIZES[kind]
    row = entry.dims[0] if entry.dims else 1
    if row % elements:
        raise cursor.damaged(
            f"'{entry.name}' has rows of {row} elements, and {kind.name.lower()} has {elements} a "
            f"block"
        )
    return kind.name.lower(), math.prod(entry.dims) // elements * size
