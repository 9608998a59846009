"""The works that tests go through: every step in its families and the formats that all steps have,
with readable ids. The formats that only files hold are in test_files_in_kernels."""

from __future__ import annotations

import itertools

import pytest

from qformats import WEIGHT_FORMATS
from steps import ladder
from steps.contract import Family, Step
from steps.kernels.parts.activations.layouts import reading_of

# (step, family, format)
WORKS = [
    pytest.param(step, family, name, id=f"step{step.number:02d}-{family}-{name}")
    for step in ladder()
    for family, name in itertools.product(step.families, WEIGHT_FORMATS)
]


def input_of(step: Step, family: Family) -> str:
    """The dtype of A in problems of a step: float32, where it reads that."""
    return reading_of(step, "float32", family).source


def in_turn(number: int) -> str:
    """One of the formats: tests of what all formats share take one each, and go round."""
    return WEIGHT_FORMATS[number % len(WEIGHT_FORMATS)]


def marks_by_turn(number: int, name: str, formats: int = 2) -> tuple[pytest.MarkDecorator, ...]:
    """Of a test in a format, the turn being `number`'s: `make test QUICK=1` runs one format,
    `make test` as many as said, `make test ALL=1` all of them."""
    if name == in_turn(number):
        return ()
    others = [in_turn(number + 2 * i) for i in range(1, formats)]
    return (pytest.mark.slow if name in others else pytest.mark.every,)


def by_turn(works: list[pytest.param], shift: int = 0, formats: int = 2) -> list[pytest.param]:
    """The same works, marked so."""
    return [
        pytest.param(*work.values, id=work.id, marks=marks_by_turn(number, work.values[2], formats))
        for work in works
        for number in [work.values[0].number + shift]
    ]
