"""How far the exercises are: what stands in each file, and what the last check said of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from steps.contract import Step
from steps.learn.exercises.check import Report
from steps.learn.exercises.text import Exercise, ExerciseError, numbers, solutions
from steps.registry import find

FOLDER: Final = Path("build", "exercises")
REMEMBERED: Final = FOLDER / "progress.json"


@dataclass(frozen=True, slots=True)
class Progress:
    """One exercise: `filled` of `holes`, and where it stands in a word or two."""

    step: Step
    filled: int
    holes: int
    state: str

    @property
    def right(self) -> bool:
        return self.state == "right"


def path_for(step: Step) -> Path:
    """Where the exercise of a step is written, unless somebody says otherwise."""
    return FOLDER / f"{step.name}.py"


def remember(report: Report) -> None:
    """Keep what a check said of a file, by a digest of its text."""
    exercise = report.exercise
    if report.ok:
        state = "right"
    elif report.wrong is None:
        state = "right so far" if exercise.filled else "not begun"
    else:
        state = f"wrong: {report.wrong.cause}" + (f", TODO {report.hole}" if report.hole else "")
    known = _remembered() | {_digest(exercise.text): state}
    FOLDER.mkdir(parents=True, exist_ok=True)
    REMEMBERED.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def progress() -> Iterator[Progress]:
    """Every exercise there is, by its step; its file where `make exercise` puts it."""
    known = _remembered()
    for number in numbers():
        step, holes = find(number), len(solutions(number))
        path = path_for(step)
        if not path.exists():
            yield Progress(step, 0, holes, "not made")
            continue
        try:
            exercise = Exercise.read(path)
            filled = len(exercise.filled)
            entire = len(exercise.holes) == holes
        except ExerciseError as error:
            yield Progress(step, 0, holes, str(error))
            continue
        state = "not begun" if entire and not filled else "not checked"
        state = known.get(_digest(exercise.text), state)
        yield Progress(step, filled + holes - len(exercise.holes), holes, state)


def _remembered() -> dict[str, str]:
    try:
        known: dict[str, str] = json.loads(REMEMBERED.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
