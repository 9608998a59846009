"""What the tests of exercises leave out of a check."""

from __future__ import annotations

import pytest

from steps.learn.exercises.check import GOLDEN_CASE
from steps.learn.exercises.trial import Subject


@pytest.fixture
def golden_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks take one problem: the others have been tried elsewhere."""
    golden = Subject("A16", "q4_0", GOLDEN_CASE)
    monkeypatch.setattr("steps.learn.exercises.check.subjects", lambda *_: iter([golden]))


@pytest.fixture
def not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks compile nothing."""
    monkeypatch.setattr("steps.learn.exercises.check.refused", lambda *_: None)
    monkeypatch.setattr("steps.learn.exercises.check.machine_code_advice", lambda *_: ())
