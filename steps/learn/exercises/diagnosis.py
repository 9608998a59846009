"""What a check says is wrong, and how it names a line of the file."""

from __future__ import annotations

import linecache
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from steps.learn.exercises.trial import Fault


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is wrong. `cause`: in a word or two, for tests and tables; `line`: of the file, 0 where
    no line says it; `sentences`: what a person reads, the numbers first."""

    cause: str
    line: int
    sentences: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class File:
    """The file at `path` as messages name its lines. `stands_in`: lines in whose place the step's
    own code ran -> the hole."""

    path: Path
    stands_in: Mapping[int, int]

    def line(self, line: int) -> str:
        """ "step03_shared_tiled.py:88 `acc += ...`"."""
        text = f"`{linecache.getline(str(self.path), line).strip()}`"
        if line in self.stands_in:
            text = f"(the step's own code for TODO {self.stands_in[line]})"
        return f"{self.path.name}:{line} {text}"

    def place(self, fault: Fault) -> str:
        """ "It happens at file:line `text`, in thread (1, 0, 0) of block (0, 0, 0)."; "" where no
        line of the file took part."""
        lanes = f", in thread ({fault.thread}) of block ({fault.block})" if fault.thread else ""
        return f"It happens at {self.line(fault.line)}{lanes}." if fault.line else ""
