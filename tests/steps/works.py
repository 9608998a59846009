"""The works that tests go through: every lesson and every engineered kernel, in its families and
the formats that all have, with readable ids. The formats that only files hold are in
test_files_in_kernels, and one for each storage format in `STORED`."""

from __future__ import annotations

import itertools
from typing import Any, Final

import pytest

from qformats import FORMATS, WEIGHT_FORMATS
from qformats.repack import KNOWN
from qformats.storage import storage_format
from reference import Problem
from steps.contract import Family, Kernel, Step
from steps.kernels.parts.activations.layouts import reading_of
from steps.product.choice import of_gemm
from steps.registry import find, kernel_of, kernels, ladder

ENGINEERED: Final = tuple(one for one in kernels() if one.launch is not find(one.number).launch)
"""The kernels whose lesson has a kernel of its own."""
WITH_LESSONS: Final = frozenset(one.number for one in ENGINEERED)


def label_of(kernel: Kernel) -> str:
    """ "step14" of a lesson, "kernel14" of the engineered kernel that it teaches."""
    return f"{'step' if isinstance(kernel, Step) else 'kernel'}{kernel.number:02d}"


_STORED_AS: Final = {name: storage_format(FORMATS[name]).name for name in KNOWN}
STORED: Final = tuple(
    next(name for name in KNOWN if _STORED_AS[name] == stored)
    for stored in dict.fromkeys(_STORED_AS.values())
)
"""A format for each storage format: the first that is stored so."""

# (lesson or kernel, family, format)
WORKS = [
    pytest.param(kernel, family, name, id=f"{label_of(kernel)}-{family}-{name}")
    for kernel in (*ladder(), *ENGINEERED)
    for family, name in itertools.product(kernel.families, WEIGHT_FORMATS)
    if name in kernel.formats
]


def input_of(kernel: Kernel, family: Family) -> str:
    """The dtype of A in problems of a kernel: float32, where it reads that."""
    return reading_of(kernel, "float32", family).source


# Those that read float32 A, and those that `gemm` takes for a number
FLOAT32 = [work for work in WORKS if input_of(*work.values[:2]) == "float32"]
TAKEN = [
    work
    for work in WORKS
    for kernel in work.values[:1]
    if kernel_of(kernel.number).launch is kernel.launch and of_gemm(kernel)
]


def drawn_for(kernel: Kernel, *given: Any, **others: Any) -> Problem:
    """The problem of a kernel: of one that prunes its weights, with pruned weights."""
    return Problem(*given, **others, pruned=kernel.accuracy == "pruned")


def in_turn(number: int, formats: tuple[str, ...] = WEIGHT_FORMATS) -> str:
    """One of the formats: tests of what all formats share take one each, and go round."""
    return formats[number % len(formats)]


def marks_by_turn(number: int, name: str, formats: int = 2) -> tuple[pytest.MarkDecorator, ...]:
    """Of a test in a format, the turn being `number`'s: `make test QUICK=1` runs one format,
    `make test` as many as said, `make test ALL=1` all of them."""
    if name == in_turn(number):
        return ()
    others = [in_turn(number + 2 * i) for i in range(1, formats)]
    return (pytest.mark.slow if name in others else pytest.mark.every,)


def marks_of(
    kernel: Kernel, name: str, shift: int = 0, formats: int = 2
) -> tuple[pytest.MarkDecorator, ...]:
    """The same, where a lesson and the kernel that it teaches share the formats: the lesson has the
    first, its kernel the others, and one at least."""
    if kernel.formats == (name,):
        return ()
    number = kernel.number + shift
    if number - shift not in WITH_LESSONS:
        return marks_by_turn(number, name, formats)
    if isinstance(kernel, Step):
        return marks_by_turn(number, name, 1)
    first = name == in_turn(number)
    return (pytest.mark.every,) if first else marks_by_turn(number, name, max(formats, 2))


def by_turn(works: list[pytest.param], shift: int = 0, formats: int = 2) -> list[pytest.param]:
    """The same works, marked so."""
    return [
        pytest.param(*work.values, id=work.id, marks=marks_of(kernel, name, shift, formats))
        for work in works
        for kernel, _, name in [work.values]
    ]
