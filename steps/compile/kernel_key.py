"""What the machine code of a kernel depends on, as a key by which it is found again.

A kernel is a function made by a factory: `kernel(fmt, tile, output)` returns one that *captures*
device functions, instructions and numbers. The key has three parts: a hash over the code of all
files that it is made of (`steps.compile.import_closure`); the values that it captures, as text; and
the types of its arguments, Numba's options and the versions of the compilers.
"""

from __future__ import annotations

import hashlib
import os
import sys
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from importlib import metadata
from inspect import getclosurevars, isfunction, ismodule
from operator import itemgetter
from pathlib import Path
from types import CodeType
from typing import Any, Final

import numpy as np
from numba.core.types import Type

from steps.compile.import_closure import closure_hash, module_path

COMPILERS: Final = (
    *("numba", "numba-cuda", "llvmlite", "numpy", "cuda-core", "cuda-bindings"),
    *("nvidia-nvvm", "nvidia-nvjitlink", "nvidia-cuda-nvcc-cu12", "nvidia-nvjitlink-cu12"),
)
"""The packages that make machine code of Python."""

OTHERS: Final = frozenset({"numba", "llvmlite", "numpy", *sys.stdlib_module_names})
"""Packages whose functions and classes are identified by name, as their versions are in the key.
The project itself may be installed beside them, so where a file lies does not tell."""


def key_of(kernel: Any, signature: tuple[Any, ...], arch: str) -> dict[str, Any] | None:
    """Everything that the machine code depends on, as JSON values; None for a kernel without a key,
    as it captures something of an unknown type or its code is not in files of this project."""
    captured = _Captured()
    try:
        values = captured.text(kernel)
        toolchain = compilers()
    except _Unknown:
        return None
    return {
        "kernel": f"{kernel.py_func.__module__}.{kernel.py_func.__name__}",
        "arch": arch,
        "signature": repr(signature),
        "code": _code_of(frozenset(captured.modules)),
        "values": hashlib.sha256(values.encode()).hexdigest(),
        "compilers": toolchain,
        "settings": {k: v for k, v in sorted(os.environ.items()) if k.startswith("NUMBA_")},
    }


def text_of(function: Any) -> str | None:
    """A text that device functions of this project share where they do the same: their code and all
    that they capture. None for other functions, and where that is not known."""
    captured = _Captured()
    try:
        text = captured.text(function)
    except _Unknown:
        return None
    return text if function.py_func.__module__ in captured.modules else None


@cache
def _code_of(modules: frozenset[str]) -> str:
    """The hash over their code. A file may have changed since this process imported it: `values`
    has the functions as they are here, so that such a kernel is not taken for one of the file."""
    return closure_hash(sorted(modules))


@cache
def _has_file(module: str) -> bool:
    return module_path(module) is not None


@cache
def compilers() -> dict[str, str]:
    """The versions of Python and of the packages that compile."""
    versions = {"python": ".".join(map(str, sys.version_info[:2]))}
    for package in COMPILERS:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    if not any(package.startswith("nvidia") for package in versions):  # a toolkit of the system
        from cuda import pathfinder

        for name in ("nvvm", "nvJitLink"):
            try:
                path = pathfinder.load_nvidia_dynamic_lib(name).abs_path
            except RuntimeError:
                raise _Unknown(name) from None
            versions[name] = f"{Path(path).resolve().name}, {Path(path).stat().st_size} bytes"
    return versions


class _Unknown(Exception):
    """A value that has no text, or code that is in no file of the project."""


class _Captured:
    """The values that a function and those it calls capture, as text that is the same in every
    process. `modules`: where the functions are."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self._numbers: dict[int, int] = {}  # of functions, in the order in which they are met

    def text(self, value: Any) -> str:
        """_Unknown for a value of a type that no kernel here captures."""
        if value is None or isinstance(value, bool | int | float | str | bytes):
            return repr(value)
        if isinstance(value, tuple | list):
            return f"({','.join(map(self.text, value))})"
        if isinstance(value, dict):
            return f"({','.join(sorted(self.text(one) for one in value.items()))})"
        if isinstance(value, frozenset):
            return f"({','.join(sorted(map(self.text, value)))})"
        if isinstance(value, np.generic | np.ndarray):
            return f"{value.dtype.str}{value.shape}{value.tobytes().hex()}"
        if isinstance(value, Type | np.dtype):
            return repr(value)
        if ismodule(value):
            return value.__name__
        if isfunction(value):
            return self._function(value)
        if isinstance(value, type):
            return self._name(value)
        if hasattr(value, "targetoptions"):  # of @cuda.jit
            return self.text(value.py_func) + self.text(value.targetoptions)
        if hasattr(value, "__wrapped__"):  # an intrinsic, or what @cache made
            return self.text(value.__wrapped__)
        if is_dataclass(value):
            parts = [getattr(value, field.name) for field in fields(value)]
            return self._name(type(value)) + self.text(parts)
        raise _Unknown(repr(value))

    def _function(self, function: Any) -> str:
        name = self._name(function)
        if function.__module__ not in self.modules:
            return name
        if id(function) in self._numbers:
            return f"#{self._numbers[id(function)]}"
        self._numbers[id(function)] = len(self._numbers)
        found = getclosurevars(function)
        captured = sorted({**found.globals, **found.nonlocals}.items(), key=itemgetter(0))
        defaults = function.__defaults__, function.__kwdefaults__
        code = [one for one in self._code(function.__code__) if one != function.__doc__]
        return name + self.text(captured) + self.text(defaults) + self.text(code)

    def _code(self, code: CodeType) -> list[Any]:
        """What Python executes; Numba compiles the same."""
        plain = [one for one in code.co_consts if not isinstance(one, CodeType)]
        inner = [self._code(one) for one in code.co_consts if isinstance(one, CodeType)]
        return [code.co_code, code.co_names, code.co_varnames, *plain, *inner]

    def _name(self, one: Any) -> str:
        """The name of a function or class; _Unknown where its code is in no known file."""
        module = one.__module__
        if module.split(".")[0] not in OTHERS:
            if not _has_file(module):
                raise _Unknown(module)
            self.modules.add(module)
        return f"{module}.{one.__qualname__}"
