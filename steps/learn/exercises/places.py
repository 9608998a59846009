"""From which row, which block and which K a kernel takes each operand: five products that tell.

K goes by *pieces*, of 8 where there are few. In each product one operand differs from place to
place, and the others are made so that every output shows one value of it:

    tokens   rows of A differ; row n of W is alone in piece n         which row of A
    rows     row m of A is alone in piece m; rows of W differ         which row of W
    pieces   row m of A is alone in piece m, row n of W in piece n    which K of A meets which of W
    scales   row m of A is alone in piece m; all scales of W differ   which scale d
    sums     row n of W is alone in piece n; all scales of A differ   which scale da (Q8_1)

The first that finds something wrong is told. Those behind it take for granted that those before
are right, so the first that cannot be read ends the search.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Final

import numpy as np

from qformats import BLOCK
from steps.contract import Step
from steps.learn.exercises.probe import FULL, Array, Finding, Probe
from steps.learn.exercises.trial import Subject
from steps.learn.exercises.wording import joined, listed, runs, span

MOST_PIECES: Final = 24  # more are put together: the simulator takes time for each
TOP: Final = 7  # the level of weights that are not 0: the highest of 4 bits
MOST_TOKENS: Final = 60  # whose activations, FULL - m, are more than half of FULL
CYCLE: Final = 16  # rows of W, and of A, whose scales differ: those of a fragment
MOST_ROWS: Final = 40  # of W, where there are more
LARGEST: Final = 64.0  # of the scales that differ: they are smaller
ANCHOR: Final = 16  # one element of as many is FULL where A becomes Q8_1: that sets its scale

Took = dict[tuple[int, int], int]
"""(row, piece) -> the place that was taken instead of its own."""


def places(step: Step, subject: Subject) -> Finding | None:
    """An operand that is taken from a wrong place; None where each is taken from its own, or where
    that cannot be told."""
    if subject.case.shape[0] > MOST_TOKENS:
        return None
    found = Places(Probe(step, subject))
    searches = found.tokens, found.rows, found.pieces, found.scales, found.sums
    try:
        return next((one for search in searches if (one := search())), None)
    except Unreadable:
        return None


class Unreadable(Exception):
    """A product in which an output is none of the values that tell something."""


class Places:
    """The five products, of as many rows and tokens as the subject has, or as there are pieces."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        m, n, k = probe.subject.case.shape
        n, k = min(n, MOST_ROWS), max(k, 2 * BLOCK)  # of one block no scale could be another's
        self.size = 8 if k // 8 <= MOST_PIECES else BLOCK
        self.count = k // self.size
        self.m, self.n, self.k = max(m, 2), max(n, self.count), k
        # The scales of Q8_1 are those of the largest activation: the weights that it meets are 0.
        anchored = probe.subject.family == "A8"
        self.counted = (np.arange(k) % ANCHOR != ANCHOR - 1) | (not anchored)
        self.met = self.counted.reshape(self.count, self.size).sum(axis=1)

    # --- operands
    def alone(self, rows: int) -> Array:
        """[rows, K], 1 in the piece of each row and 0 elsewhere."""
        own = np.arange(self.k) // self.size == (np.arange(rows) % self.count)[:, None]
        return (own & self.counted).astype(np.float64)

    def anchored(self, a: Array) -> Array:
        return np.where(self.counted, a, FULL)

    def product(self, a: Array, levels: Array, d: Array | float = 1.0) -> Array:
        c = self.probe.product(a, levels.astype(int), d)
        if c is None:
            raise Unreadable
        return c

    # --- products
    def tokens(self) -> Finding | None:
        values = FULL - np.arange(self.m)
        a = self.anchored(np.repeat(values[:, None], self.k, axis=1))
        c = self.product(a, TOP * self.alone(self.n))
        got = c / (TOP * self.met[np.arange(self.n) % self.count])
        took: Took = {}
        for m, n in product(*map(range, got.shape)):
            value = got[m, n]
            times = value / values[m]
            if abs(times - round(times)) < 1e-3:
                continue  # its own; or not at all or twice, which `pieces` tells
            near = np.flatnonzero(np.abs(values - value) < 0.1)
            if len(near):
                took[m, n % self.count] = int(near[0])
            elif not np.any(np.abs(c[m, n] / TOP - values[m] * self.met) < 0.1):
                raise Unreadable  # nor its own, with weights of another row: `rows` tells that
        return self._of_rows(took, "activations", "row", "A", self._at_k(self.count))

    def rows(self) -> Finding | None:
        return self._of_pieces_or_tokens(self._rows, "weights", self.count)

    def _rows(self, order: Array) -> Took:
        """The row of W that each row and token took, where not its own. By a digit of the number of
        the row in each product, of as many digits as it takes."""
        signs = (1, -1) if min(self.probe.levels) < 0 else (1,)
        levels = np.array([sign * level for sign in signs for level in (7, 6, 5, 4)])
        a = self.anchored(FULL * self.alone(self.count)[order])
        met = self.met[order]
        numbers, took, unit = np.arange(self.n), np.zeros((self.count, self.n), int), 1
        while unit < self.n:
            own = numbers // unit % len(levels)
            got = self.product(a, levels[own][:, None] * self.counted) / (FULL * met[:, None])
            off = np.abs(got[..., None] - levels)
            readable = off.min(axis=2) < 0.1
            times = got / levels[own]  # none, or its own more than once: `pieces` tells it
            if not (readable | (np.abs(times - np.round(times)) < 1e-2)).all():
                raise Unreadable
            took += unit * (np.where(readable, off.argmin(axis=2), own) - own)
            unit *= len(levels)
        return {(int(n), int(m)): int(n + took[m, n]) for m, n in np.argwhere(took)}

    def pieces(self) -> Finding | None:
        a = self.anchored(FULL * self.alone(self.count))
        met = self.product(a, TOP * self.alone(self.count)) / (FULL * TOP)
        times = np.round(met / self.met.max() + 0.01).astype(int)
        if (times < 0).any() or np.abs(met / self.met.max() - times).max() > 0.2 * times.max():
            raise Unreadable
        fates: dict[tuple[int, ...], list[int]] = {}
        for p, row in enumerate(times):
            shifts = tuple(int(q) - p for q in np.flatnonzero(row) for _ in range(row[q]))
            if shifts != (0,):
                fates.setdefault(shifts, []).append(p)
        sentences = []
        for shifts, own in fates.items():
            for first, last in runs(own):
                theirs = " and ".join(self._k(first + s, last + s) for s in shifts)
                meet = f"meets the weights of {theirs}" if shifts else "meets no weights"
                sentences.append((first, f"{self._k(first, last)} of A {meet}"))
        if not sentences:
            return None
        return Finding("weights of another K", f"{joined([one for _, one in sorted(sentences)])}.")

    def scales(self) -> Finding | None:
        grid = self._grid(self.n)
        # Tiles of weights hold the scales of a row in units of the largest one. That is the same in
        # all rows here, or the rest would be: the last block does not tell one row from another.
        grid[:, -1] = LARGEST
        telling = self.count - BLOCK // self.size

        def taken(order: Array) -> Took:
            return self._taken(self._scales(grid, order), grid, order)[0]

        in_order = np.arange(self.count)
        of_row, of_block = self._taken(self._scales(grid, in_order), grid, in_order)
        if of_block and not of_row:
            return self._of_blocks(of_block, "scale d")
        return self._of_pieces_or_tokens(taken, "scale d", telling) if of_row else None

    def _scales(self, grid: Array, order: Array) -> Array:
        """[rows of W, tokens]: the scale d of each product, of the piece in which the token is."""
        a = self.anchored(FULL * self.alone(self.count)[order])
        w = np.broadcast_to(TOP * self.counted, (self.n, self.k))
        return (self.product(a, w, grid) / (FULL * TOP * self.met[order][:, None])).T

    def sums(self) -> Finding | None:
        if self.probe.subject.family != "A8":
            return None
        grid = self._grid(self.m)
        a = FULL * np.repeat(grid, BLOCK, axis=1)
        got = self.product(a, TOP * self.alone(self.count)) / (FULL * TOP * self.met)
        of_row, of_block = self._taken(got, grid, np.arange(self.count))
        if of_block and not of_row:
            return self._of_blocks(of_block, "scale da")
        return self._of_rows(of_row, "scale da", "row", "A", self._at_k(self.count))

    # --- what they say
    def _grid(self, rows: int) -> Array:
        """Scales [rows, K/32] that differ, within float16."""
        blocks = self.k // BLOCK
        numbers = np.arange(rows)[:, None] % CYCLE * blocks + np.arange(blocks)
        few = max(min(rows, CYCLE) * blocks, 6)
        grid: Array = (2.0 ** (numbers * 6 / few)).astype(np.float16).astype(np.float64)
        return grid

    def _of_pieces_or_tokens(
        self, taken: Callable[[Array], Took], what: str, telling: int
    ) -> Finding | None:
        """What is taken from another row of W. taken: of the order in which tokens have pieces ->
        by row of W and token. telling: how many pieces tell one row from another.

        A token has one piece, so where some are wrong it may be for their K, or for the token: in
        another order the same K is wrong, or the same tokens are.
        """
        in_order = np.arange(self.count)
        took, where = taken(in_order), self._at_k(telling)
        counted = Counter(n for n, _ in took)
        if any(times < telling for times in counted.values()):
            backwards = taken(in_order[::-1])
            if {(n, self.count - 1 - m): other for (n, m), other in backwards.items()} != took:
                took |= backwards
                where = self._in_rows
        return self._of_rows(took, what, "column", "W", where)

    def _taken(self, got: Array, grid: Array, order: Array) -> tuple[Took, dict[int, set[int]]]:
        """got [rows, pieces in this order]: the scale that each piece of a row was multiplied with
        -> the other row it is of, by row and place in `got`; the other block it is of -> pieces."""
        of_row: Took = {}
        of_block: dict[int, set[int]] = {}
        for n, i in product(*map(range, got.shape)):
            block, value = int(order[i]) * self.size // BLOCK, got[n, i]
            if abs(value - grid[n, block]) < 2e-3 * value or abs(value) < 1e-3:
                continue
            near = np.argwhere(np.abs(grid - value) < 2e-3 * value).tolist()
            if not near:
                raise Unreadable
            row, at = min(near, key=lambda one: (one[1] != block, abs(one[0] - n)))
            if at == block:
                of_row[n, i] = row
            else:
                of_block.setdefault(at, set()).add(int(order[i]))
        return of_row, of_block

    def _of_blocks(self, of_block: dict[int, set[int]], what: str) -> Finding:
        said = [
            f"{self._k(first, last)} are multiplied with the {what} of block {block} "
            f"(K {block * BLOCK} to {block * BLOCK + BLOCK - 1})"
            for block, pieces in of_block.items()
            for first, last in runs(sorted(pieces))
        ]
        return Finding(f"{what} of another block", f"{joined(said)}.")

    def _of_rows(
        self, took: Took, what: str, rows: str, whose: str, where: Callable[[tuple[int, ...]], str]
    ) -> Finding | None:
        """where: says the second index of the places that a row took from another."""
        if not took:
            return None
        fates: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for row in sorted({row for row, _ in took}):
            others: dict[int, list[int]] = {}
            for (own, p), other in took.items():
                if own == row:
                    others.setdefault(other, []).append(p)
            for other, own_pieces in others.items():
                fates.setdefault((other - row, tuple(sorted(own_pieces))), []).append(row)
        said = []
        for (shift, pieces), same in fates.items():
            for first, last in runs(same):
                s, take = ("s", "take") if first < last else ("", "takes")
                theirs = f"row{s} {span(first + shift, last + shift)} of {whose}"
                mine = f"{rows}{s} {span(first, last)} of C"
                said.append(f"{mine} {take} the {what} of {theirs}{where(pieces)}")
        return Finding(f"{what} of another row", f"{joined(said)}.")

    def _at_k(self, telling: int) -> Callable[[tuple[int, ...]], str]:
        """Of pieces: " at K 0 to 7", nothing where they are all that tell something."""
        return lambda pieces: "" if len(pieces) == telling else f" at {self._ks(pieces)}"

    def _in_rows(self, tokens: tuple[int, ...]) -> str:
        """Of tokens: " in rows 0, 2, 4, 6 ..."."""
        together = [span(*run) for run in runs(tokens)]
        return f" in row{'s' * (len(tokens) > 1)} {listed(together)}"

    def _k(self, first: int, last: int) -> str:
        """Of pieces, as elements of K."""
        return f"K {first * self.size} to {(last + 1) * self.size - 1}"

    def _ks(self, pieces: tuple[int, ...]) -> str:
        return listed([self._k(*run) for run in runs(pieces)])
