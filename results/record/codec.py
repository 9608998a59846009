"""The file of a run, declared: a dataclass, whose JSON follows from the fields, both ways.

A file has the key `schema` (`SCHEMA` of its class) and one for each field. A field that is a tuple
of records is an array, one record a line, so that a diff of two files can be read. What is read is
checked against the declaration:

    the annotation      int, float, str, bool, Literal, a tuple, a dict, another dataclass, or None
    `Annotated`         a `Rule` that the value must satisfy, such as `POSITIVE`
    `wrong()`           of a record: a sentence where its fields contradict each other, else None
    `key`               of a record: no two of an array have the same one
"""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Annotated, Any, Final, Literal, TypeVar

from qformats.terminal import sentence, shown


class RecordError(ValueError):
    """A result file that is not one: names the file's field and what was found there, as
    `qformats.terminal.shown`."""

    def __init__(self, text: str) -> None:
        super().__init__(sentence(text))


@dataclass(frozen=True, slots=True)
class Rule:
    """What a value must be besides its type, as a word and as a test."""

    expected: str
    holds: Callable[[Any], bool]


POSITIVE: Final = Rule("positive", lambda value: value > 0)
Positive = Annotated[float, POSITIVE]
Count = Annotated[int, POSITIVE]

Record = TypeVar("Record")


# ------------------------------------------------------------------------------------------ writing


def to_json(file: Any) -> str:
    """The file's text."""
    parts = [f'"schema": {file.SCHEMA}']
    for one in fields(file):
        value = getattr(file, one.name)
        parts.append(f'"{one.name}": {_array(value) if isinstance(value, tuple) else _text(value)}')
    return "{\n " + ",\n ".join(parts) + "\n}\n"


def _array(records: Iterable[Any]) -> str:
    text = ",\n".join("  " + _line(record) for record in records)
    return f"[\n{text}\n ]" if text else "[]"


@lru_cache(maxsize=1 << 14)
def _line(record: Any) -> str:
    """Remembered, as a bench writes all records after every loop."""
    return json.dumps(plain(asdict(record)), allow_nan=False, ensure_ascii=False)


def _text(value: Any) -> str:
    value = plain(asdict(value) if hasattr(value, "__dataclass_fields__") else value)
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, indent=2)
    return text.replace("\n", "\n ")


def plain(value: Any) -> Any:
    """JSON's own types: six significant digits (more would be noise), NaN and Inf as null."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, bool | str) or value is None:
        return value
    if hasattr(value, "item"):  # a NumPy scalar
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


# ------------------------------------------------------------------------------------------ reading


def from_json(kind: type[Record], text: str) -> Record:
    """The inverse of `to_json`. RecordError for anything that is not such a file."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise RecordError(f"a result file must be JSON: {error}") from None
    if not isinstance(data, dict):
        raise RecordError(f"a result file must be a JSON object, not {type(data).__name__}")
    schema = data.pop("schema", None)
    known: int = kind.SCHEMA  # type: ignore[attr-defined]
    if schema != known:
        raise RecordError(
            f"schema is {schema!r}; this version reads schema {known}: measure again, or use "
            "the version of the project that wrote the file"
        )
    if missing := set(_hints(kind)) - set(data):  # type: ignore[arg-type]
        raise RecordError(f"a result file needs the keys {sorted(missing)}")
    return build(kind, data, "")


def build(kind: type[Record], data: Any, where: str) -> Record:
    """An instance of a dataclass from parsed JSON; `where` is its place in the file."""
    if not isinstance(data, dict):
        raise RecordError(f"{where} must be a JSON object, not {data!r}")
    hints = _hints(kind)  # type: ignore[arg-type]
    if unknown := set(data) - set(hints):
        raise RecordError(f"{where or 'the file'} has unknown fields {sorted(unknown)}")
    values = {name: _value(hints[name], data[name], f"{where}.{name}".strip(".")) for name in data}
    try:
        made = kind(**values)
    except TypeError as error:
        raise RecordError(f"{where}: {error}") from None
    if why := getattr(made, "wrong", lambda: None)():
        raise RecordError(f"{where} {getattr(made, 'key', '')}: {why}")
    return made


@lru_cache(maxsize=16)
def _hints(kind: Any) -> dict[str, Any]:
    """Of the fields alone."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {one.name: hints[one.name] for one in fields(kind)}


def _value(hint: Any, data: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        value = _value(arguments[0], data, where)
        for rule in arguments[1:]:
            if not rule.holds(value):
                raise RecordError(f"{where} is {data!r}, expected {rule.expected}")
        return value
    if origin in (typing.Union, types.UnionType):
        if data is None and type(None) in arguments:
            return None
        (inner,) = (argument for argument in arguments if argument is not type(None))
        return _value(inner, data, where)
    if origin is Literal:
        if data in arguments:
            return data
    elif origin is tuple:
        if isinstance(data, list) and arguments[-1] is ...:
            return _records(arguments[0], data, where)
        if isinstance(data, list) and len(data) == len(arguments):
            return tuple(_value(h, d, where) for h, d in zip(arguments, data, strict=True))
    elif origin is dict:
        if isinstance(data, dict):
            return {key: _value(arguments[1], item, f"{where}.{key}") for key, item in data.items()}
    elif hasattr(hint, "__dataclass_fields__"):
        return build(hint, data, where)
    elif hint is float:
        if isinstance(data, int | float) and not isinstance(data, bool) and math.isfinite(data):
            return float(data)
    elif hint is str and isinstance(data, str):
        return shown(data, "\n\t")
    elif isinstance(data, hint) and not (hint is int and isinstance(data, bool)):
        return data
    raise RecordError(f"{where} is {data!r}, expected {getattr(hint, '__name__', hint)}")


def _records(hint: Any, data: list[Any], where: str) -> tuple[Any, ...]:
    """An array of records, none of them twice."""
    made = tuple(_value(hint, one, f"{where}[{i}]") for i, one in enumerate(data))
    seen: set[Any] = set()
    for i, one in enumerate(made):
        if one.key in seen:
            raise RecordError(f"{where}[{i}] {one.key}: measured twice in one run")
        seen.add(one.key)
    return made
