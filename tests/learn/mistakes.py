"""Plausible mistakes, and what the check must make of each: one for each kind of message.

A mistake changes the step's own lines of a hole: `old` becomes `new`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from steps.learn.exercises.text import Exercise, make, solutions
from steps.registry import find


@dataclass(frozen=True, slots=True)
class Mistake:
    """`old` stands in one hole of the step, `cause` is what the diagnosis must say, `says` a part
    of its message."""

    step: int
    old: str
    new: str
    cause: str
    says: str = ""

    @property
    def id(self) -> str:
        return f"step{self.step:02d}-{self.cause.replace(' ', '_')}"

    @property
    def hole(self) -> int:
        holes = [n for n, one in solutions(self.step).items() if self.old in "".join(one.body)]
        assert len(holes) == 1, f"{self.old!r} is in holes {holes} of step {self.step}"
        return holes[0]

    def written(self, folder: Path, *others: int) -> Exercise:
        """The exercise with this hole filled, wrongly, and others as they should be, as a file in
        the folder."""
        right = "".join(solutions(self.step)[self.hole].body)
        assert right.count(self.old) == 1
        text = make(find(self.step), {self.hole, *others})
        assert text.count(right) == 1
        path = folder / f"{find(self.step).name}.py"
        path.write_text(text.replace(right, right.replace(self.old, self.new)), encoding="utf-8")
        return Exercise.read(path)


MISTAKES = (
    Mistake(1, "m >= c.shape[0] or n >= c.shape[1]", "m >= c.shape[0]", "out of range"),
    Mistake(1, "n, m = cuda.grid(2)", "m, n = cuda.grid(2)", "not written", "exchanged"),
    Mistake(1, "n * blocks_k + b", "n + b", "loads", "In the step's own kernel"),
    Mistake(1, "(n * blocks_k + b) * block_bytes", "b * block_bytes", "one row of weights"),
    Mistake(1, " + z)", ")", "no compensation", "pitfall 1"),
    Mistake(1, "b * elements + j", "j", "activations of one block"),
    Mistake(1, "c[m, n]", "c[n, m]", "out of range", "m first"),
    Mistake(1, "c[m, n] = acc", "c[m, n] += acc", "added to"),
    Mistake(1, "ceil_div(shape.n, BLOCK_N)", "shape.n // BLOCK_N", "grid", "pitfall 12"),
    Mistake(
        1,
        "n, m = cuda.grid(2)",
        "n, m = cuda.threadIdx.x, cuda.threadIdx.y",
        "not written",
        "does not depend on blockIdx.x",
    ),
    Mistake(1, "offset(w, at, g)", "-8 * scale(w, at, g)", "offset of another format", "-8 or -16"),
    Mistake(1, "range(g * group, (g + 1) * group)", "range(group)", "wrong value", "g * group"),
    Mistake(1, "c[m, n] = acc", "c[m, n] = [acc][0]", "not compiled", "has no lists"),
    Mistake(1, "c[m, n] = acc", "import math; c[m, n] = acc", "not compiled", "cannot import"),
    Mistake(1, "c[m, n] = acc", "global X; c[m, n] = acc", "not compiled", "cannot set a name"),
    Mistake(
        1, "c[m, n] = acc", "assert n >= 0, f'{n}'; c[m, n] = acc", "not compiled", "plain string"
    ),
    Mistake(2, "at_a = (m * blocks_k + b) * BLOCK_Q8_1", "at_a = b * 36", "one row of activations"),
    Mistake(2, "BLOCK_Q8_1", "block_bytes", "misaligned", "pitfall 7"),
    Mistake(
        2,
        "a, at_a + QA + HALF + i",
        "a, at_a + QA + 4 + i",
        "loads",
        "thread 0 loads a[24] to [35]",
    ),
    Mistake(2, "int8(low >> (8 * j))", "(low >> (8 * j)) & 255", "activations unsigned"),
    Mistake(2, "at_a + 2)", "at_a)", "scales exchanged"),
    Mistake(3, "tile_w[ty, tx] = v\n            cuda.syncthreads()", "tile_w[ty, tx] = v", "race"),
    Mistake(
        3, "tile_a[ty, j] * tile_w[tx, j]", "tile_a[ty, j] * tile_w[ty, j]", "weights of row m"
    ),
    Mistake(
        3,
        "tile_w[tx, j]\n            cuda.syncthreads()",
        "tile_w[tx, j]\n                cuda.syncthreads()",
        "barrier",
        "`cuda.syncthreads()`; threads 32-1023 have exited",
    ),
    Mistake(3, "* tile_w[tx, j]", "* tile_w[j, tx]", "loads", "row and its column are exchanged"),
    Mistake(3, "x = a[m0 + ty, ", "x = a[m0 + tx, ", "out of range", "There m0 = 0, tx = "),
    Mistake(3, "tile_w[ty, tx] = v", "tile_w[tx, ty] = v", "contents", "belongs to tile_w[j, i]"),
    Mistake(3, "scale_a[ty] = half", "scale_a[tx] = half", "race", "no barrier helps"),
    Mistake(
        3,
        "tx == 0:  #",
        "tx == 1 and ty > 0:  #",
        "nan",
        "`scale_a[ty] = half_to_float(da)`: is its branch right?",
    ),
    Mistake(
        3,
        "at + QA + tx",
        "at + tx",
        "loads",
        "thread 0 loads a[4], here it does not: it loads a at",
    ),
    Mistake(
        4,
        "range(0, PAIRS, chain):\n                    v = int32(ROUND)\n"
        "                    for p in range(first, first + chain)",
        "range(0, PAIRS, 2 * chain):\n                    v = int32(ROUND)\n"
        "                    for p in range(first, first + 2 * chain)",
        "sum runs over",
        "off by -65536, 1 x 2^16. Each product may come to 1905",
    ),
    Mistake(4, "int32(ROUND)", "int32(0)", "integer sum", "they are rounded down"),
    Mistake(5, "first - centre_pair", "first", "contents", "It is stored at"),
    Mistake(6, "dp4a(xa[r], w[1], v[i + r, 1])", "dp4a(xa[r], w[1], 0)", "part of a block"),
    Mistake(6, "xa[r], w[3]", "xa[r], w[2]", "weights of another row"),
    Mistake(6, "d0 * da *", "d0 *", "no scale of the activations"),
    Mistake(7, "* 4 + lane", "* 4 + lane % 4", "loads", "thread 4 loads tile_a[4]"),
    Mistake(7, "i // 2 * 8", "i // 2", "race"),
    Mistake(7, "(lane % 4) + i % 2", "(lane % 4) + 1 - i % 2", "wrong place"),
    Mistake(
        8,
        "w_bytes + (i * BLOCK_M + t) * CHUNK",
        "w_bytes + (i * BLOCK_M + (t ^ 1)) * CHUNK",
        "contents",
        "holds what belongs to",
    ),
    Mistake(9, "range(stages):\n            copy", "range(0):\n            copy", "nan"),
    Mistake(
        9,
        "            wait_for_next()  # what",
        "            # what",
        "copy not awaited",
        "so cp_async_wait(2) or less",
    ),
    Mistake(9, "(shared, step * stage_bytes, w", "(shared, 0, w", "copy overwritten"),
    Mistake(
        12,
        "        wgmma_fence()  # what has been written to the registers may be read\n",
        "",
        "rule",
    ),
    Mistake(12, "            fence_proxy_async()", "            #", "race"),
    Mistake(12, "descriptor += a_half_bytes // CHUNK", "descriptor += a_half_bytes", "nan"),
    Mistake(17, "8 * chunk", "4 * chunk", "misaligned"),
)
