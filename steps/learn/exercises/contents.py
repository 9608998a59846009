"""What a kernel finds in shared memory, beside what the step's own kernel finds there: words that
were copied from, or to, a wrong place.

Both are run on one problem of random operands. Of each byte the first value that is loaded counts:
later the memory may hold something else. Where a word of the file's kernel is in another place in
the step's own, it is said what holds what.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Final

import numpy as np

from steps.checks.cases import Case
from steps.contract import Step
from steps.learn.exercises.probe import Finding
from steps.learn.exercises.rerun import LOADS, Watch, run_again
from steps.learn.exercises.trial import Array, File, Subject
from steps.learn.exercises.wording import joined
from steps.simulator import banks
from steps.simulator.lanes import Lane

CASE: Final = Case((5, 40, 96), "normal", 9)
WORD: Final = 4  # bytes
PIECE: Final = 16  # bytes: the widest load of a thread
IN_PIECE: Final = PIECE // WORD


class Contents:
    """Of one allocation: `loaded`, the first values of its bytes that were loaded, where `known`;
    `line`, that which stored to a byte last before."""

    def __init__(self, whole: int, size: int) -> None:
        self.whole = whole
        self.loaded, self.known = np.zeros(size, np.uint8), np.zeros(size, bool)
        self.line = np.zeros(size, int)

    def words(self) -> tuple[Array, Array]:
        """(words, which of them are known)."""
        whole = self.loaded.size // WORD * WORD
        known = np.asarray(self.known[:whole].reshape(-1, WORD).all(axis=1))
        return self.loaded[:whole].view(np.uint32), known


class FirstLoads(Watch):
    """Notes what the first block of a launch finds in shared memory."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "shared")
        self.contents: dict[str, Contents] = {}

    def allocated(self, whole: int, name: str, data: Any) -> None:
        self.contents.setdefault(name, Contents(whole, self.allocations[whole][1].size))

    def accessed(self, lane: Lane, what: banks.Access, whole: int, at: int) -> None:
        name, data = self.allocations[whole]
        found, part = self.contents[name], slice(at, at + what.size)
        if found.whole != whole:
            return
        if what.kind in LOADS:
            new = ~found.known[part]
            found.loaded[part][new] = data[part][new]
            found.known[part] = True
        elif not found.known[part].any():
            found.line[part] = next(iter(self.lines()), 0)


def misplaced(step: Step, right: Step, subject: Subject, file: File) -> Finding | None:
    """Words of shared memory that belong to another place there; None where there are none, or
    where the two kernels use it otherwise."""
    subject = Subject(subject.family, subject.format, CASE, subject.sms)
    own, others = FirstLoads(file.path), FirstLoads(file.path)
    run_again(step, subject, banks=own)
    run_again(right, subject, banks=others)
    for name, found in own.contents.items():
        expected = others.contents.get(name)
        if expected is None or expected.known.size != found.known.size:
            continue
        moved = _moved(found, expected)
        if moved:
            line = int(found.line[WORD * min(moved)])
            stored = f" They are stored at {file.line(line)}." if line else ""
            return Finding("words in a wrong place", f"{_said(name, moved)}.{stored}")
    return None


def _moved(found: Contents, expected: Contents) -> dict[int, int]:
    """Word -> the word that it should be, as what it holds belongs there; none unless that explains
    most of what differs."""
    words, known = found.words()
    right, there = expected.words()
    differ = np.flatnonzero(known & there & (words != right))
    values, first, times = np.unique(right[there], return_index=True, return_counts=True)
    places = np.flatnonzero(there)[first]
    alone = {int(v): int(p) for v, p, t in zip(values, places, times, strict=True) if t == 1}
    moved = {}
    for i in differ.tolist():
        piece = i // IN_PIECE * IN_PIECE
        near = piece + np.flatnonzero(right[piece : piece + IN_PIECE] == words[i])
        if len(near) == 1:  # tokens beyond M repeat the last one: there no word is alone
            moved[i] = int(near[0])
        elif int(words[i]) in alone:
            moved[i] = alone[int(words[i])]
    return moved if 3 * len(moved) >= 2 * len(differ) else {}


def _said(name: str, moved: dict[int, int]) -> str:
    """The same in all pieces of 16 bytes, where it is; else word by word, neighbours together."""
    shifts: dict[int, Counter[int]] = {}  # by the word of a piece
    for i, j in moved.items():
        shifts.setdefault(i % IN_PIECE, Counter())[j - i] += 1
    pieces = {i // IN_PIECE for i in moved}
    if all(len(shift) == 1 for shift in shifts.values()) and len(pieces) > 1:
        first = min(pieces) * IN_PIECE
        runs = _runs({i: j for i, j in moved.items() if first <= i < first + IN_PIECE})
        likewise = f"likewise in {len(pieces) - 1} more pieces of {PIECE} bytes"
        return f"{_joined(name, runs)}; {likewise}, whatever they hold"
    return _joined(name, _runs(moved))


def _runs(moved: dict[int, int]) -> list[tuple[int, int, int]]:
    """(first, last, shift) of neighbours that have the same shift."""
    found: list[tuple[int, int, int]] = []
    for i, j in sorted(moved.items()):
        if found and found[-1][1] == i - 1 and found[-1][2] == j - i:
            found[-1] = (found[-1][0], i, j - i)
        else:
            found.append((i, i, j - i))
    return found


def _joined(name: str, runs: list[tuple[int, int, int]]) -> str:
    said = [
        f"{_bytes(a, b)} of {name} hold what belongs to {_bytes(a + shift, b + shift)}"
        for a, b, shift in runs
    ]
    return joined(said)


def _bytes(first: int, last: int) -> str:
    """ "bytes 8 to 11"."""
    return f"bytes {first * WORD} to {(last + 1) * WORD - 1}"
