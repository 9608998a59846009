"""The walk from step 1 to a right step 3: its commands print what the page says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from steps.contract import Step
from steps.learn.exercises import check
from steps.learn.exercises.trial import Subject
from steps.registry import find
from tests.learn.walk import PAGE, walked, without_seconds

SECONDS = {check.CASES[1], check.CASES[2]}
"""Of step 3 these two take more time than all others. Those that a mistake of the walk is found by
come before them, and step 1 takes them."""


def without_counts(page: str) -> str:
    return re.sub(r"\b\d+ problems in\b", "- problems in", without_seconds(page))


@pytest.mark.slow
def test_the_walk_prints_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text(encoding="utf-8")
    counts = [int(one) for one in re.findall(r"^right: (\d+) problems in", page, re.MULTILINE)]
    assert counts == [check.count(find(number), check.Asked()) for number in (1, 2, 3)]
    every = check.subjects

    def some(step: Step, asked: check.Asked) -> Iterator[Subject]:
        return (one for one in every(step, asked) if step.number < 3 or one.case not in SECONDS)

    monkeypatch.setattr(check, "subjects", some)
    assert without_counts(walked(page)) == without_counts(page)
    assert page.count("\nright: ") == 3, "three right steps"
    assert "\n3 of " in page.rpartition("$ make exercises")[2]
    assert page.count("\nwrong: ") >= 6, "mistakes are part of it"
