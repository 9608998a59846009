"""Two plausible mistakes for every hole of every exercise, and what the check must make of each.

A mistake changes the step's own lines of a hole: each `old` becomes `new`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from steps.exercises.text import Exercise, make, solutions
from steps.registry import find


@dataclass(frozen=True, slots=True)
class Mistake:
    """`cause` is what the diagnosis must say; `says` a part of its message."""

    step: int
    hole: int
    old: str
    new: str
    cause: str
    says: str = ""

    @property
    def id(self) -> str:
        return f"step{self.step:02d}-hole{self.hole}-{self.cause.replace(' ', '_')}"

    def written(self, folder: Path) -> Exercise:
        """The exercise with all holes filled, this one wrongly, as a file in the folder."""
        right = "".join(solutions(self.step)[self.hole].body)
        assert right.count(self.old) == 1, (
            f"{self.id}: {self.old!r} is there {right.count(self.old)} times"
        )
        step = find(self.step)
        text = make(step, solutions(self.step))
        assert text.count(right) == 1 or self.step == 3
        parts = text.split(f"# end of TODO {self.hole}\n")
        before, body, after = parts[0].rpartition(right)
        assert body
        wrong = right.replace(self.old, self.new)
        path = folder / f"{step.name}.py"
        path.write_text(
            f"{before}{wrong}{after}# end of TODO {self.hole}\n{parts[1]}", encoding="utf-8"
        )
        return Exercise.read(path)


MISTAKES = (
    Mistake(1, 1, "m >= c.shape[0] or n >= c.shape[1]", "m >= c.shape[0]", "out of range"),
    Mistake(1, 1, "n, m = cuda.grid(2)", "m, n = cuda.grid(2)", "not written", "column"),
    Mistake(1, 2, "n * blocks_k + b", "n + b", "weights of a wrong block"),
    Mistake(1, 2, "(n * blocks_k + b) * block_bytes", "b * block_bytes", "one row of weights"),
    Mistake(1, 3, " + z)", ")", "no compensation", "pitfall 1"),
    Mistake(1, 3, "b * elements + j", "j", "activations of one block"),
    Mistake(1, 4, "c[m, n]", "c[n, m]", "out of range", "m first"),
    Mistake(1, 4, "c[m, n] = acc", "c[m, n] += acc", "added to"),
    Mistake(1, 5, "ceil_div(shape.n, BLOCK_N)", "shape.n // BLOCK_N", "grid", "pitfall 12"),
    Mistake(
        1,
        5,
        "(ceil_div(shape.n, BLOCK_N), ceil_div(shape.m, BLOCK_M))",
        "(ceil_div(shape.m, BLOCK_M), ceil_div(shape.n, BLOCK_N))",
        "not written",
        "pitfall 12",
    ),
    Mistake(
        2,
        1,
        "at = (n * blocks_k + b) * block_bytes",
        "at = (m * blocks_k + b) * block_bytes",
        "weights of row m",
    ),
    Mistake(2, 1, "BLOCK_Q8_1", "block_bytes", "misaligned", "pitfall 7"),
    Mistake(2, 2, "b4(a, at_a + QA + HALF + i)", "b4(a, at_a + QA + 4 + i)", "wrong sum"),
    Mistake(2, 2, "int8(low >> (8 * j))", "(low >> (8 * j)) & 255", "activations unsigned"),
    Mistake(2, 3, " + offset(w, at) * s", "", "no compensation", "pitfall 1"),
    Mistake(2, 3, "at_a + 2)", "at_a)", "scales exchanged"),
    Mistake(3, 1, "            cuda.syncthreads()\n", "", "race", "pitfall 9"),
    Mistake(3, 1, " + offset(w, at)", "", "no compensation", "pitfall 1"),
    Mistake(3, 2, "tile_w[tx, j]", "tile_w[ty, j]", "wrong place"),
    Mistake(
        3, 2, "            cuda.syncthreads()\n", "                cuda.syncthreads()\n", "barrier"
    ),
    Mistake(3, 3, " and n0 + tx < c.shape[1]", "", "out of range"),
    Mistake(3, 3, "c[m0 + ty, n0 + tx]", "c[m0 + tx, n0 + ty]", "out of range"),
    Mistake(3, 4, "if tx == 0", "if tx == 1 and ty > 0", "nan"),
    Mistake(3, 4, "at + QA + tx", "at + tx", "wrong sum"),
    Mistake(3, 5, "            cuda.syncthreads()\n", "", "race"),
    Mistake(3, 5, "offset_w[ty] = z", "offset_w[ty] = 0", "no compensation"),
    Mistake(3, 6, " + offset_w[tx] * sum_a[ty]", "", "no compensation"),
    Mistake(3, 6, "acc += scale_w", "acc = scale_w", "last block alone"),
)
